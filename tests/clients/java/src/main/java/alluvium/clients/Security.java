package alluvium.clients;

import static alluvium.clients.Tap.check;
import static alluvium.clients.Tap.equal;
import static alluvium.clients.Tap.eventually;
import static alluvium.clients.Tap.fails;

import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.ScramCredentialInfo;
import org.apache.kafka.clients.admin.ScramMechanism;
import org.apache.kafka.clients.admin.UserScramCredentialDeletion;
import org.apache.kafka.clients.admin.UserScramCredentialUpsertion;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.acl.AccessControlEntry;
import org.apache.kafka.common.acl.AclBinding;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.errors.ClusterAuthorizationException;
import org.apache.kafka.common.errors.GroupAuthorizationException;
import org.apache.kafka.common.errors.SaslAuthenticationException;
import org.apache.kafka.common.errors.SslAuthenticationException;
import org.apache.kafka.common.errors.TopicAuthorizationException;
import org.apache.kafka.common.errors.TransactionalIdAuthorizationException;
import org.apache.kafka.common.errors.UnsupportedSaslMechanismException;
import org.apache.kafka.common.quota.ClientQuotaAlteration;
import org.apache.kafka.common.quota.ClientQuotaEntity;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** kafka-clients on listeners with authentication, which the environment names with their files. */
public final class Security {
    private static final Path FILES = Path.of(System.getenv("FILES"));
    private static final String MODULES = "org.apache.kafka.common.security.";
    private static final String BEARER = MODULES + "oauthbearer.OAuthBearerLoginModule required ";

    /** Exits with 1 if a test failed. With {@code short} it omits slow tests. */
    public static void main(String[] args) {
        Tap tap = Tap.create();
        tap.test("default deny: users without permissions, and anonymous ones, are refused everything", Security::defaultDeny);
        tap.test("permissions by name and by prefix are granted, and denied", Security::rights);
        for (String listener : List.of("SASL", "SASL_TLS")) {
            for (String mechanism : List.of("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")) {
                tap.test(listener + " " + mechanism + ": records are written and read",
                    () -> thereAndBack(login(listener, mechanism, "alice")));
                tap.test(listener + " " + mechanism + ": a wrong password is refused",
                    () -> refused(SaslAuthenticationException.class,
                        login(listener, mechanism, "alice", System.getenv("WRONG_PASSWORD"))));
            }
        }
        tap.test("a token of the issuer's endpoint", () -> thereAndBack(token(System.getenv("TOKENS"))));
        tap.test("a token of a file", () -> thereAndBack(token(file("alice.jwt").toUri().toString())));
        tap.test("a forged token is refused",
            () -> refused(SaslAuthenticationException.class, token(file("forged.jwt").toUri().toString())));
        tap.test("an expired token is refused",
            () -> refused(SaslAuthenticationException.class, token(file("expired.jwt").toUri().toString())));
        tap.test("a mechanism that the listener does not offer is refused", Security::otherMechanism);
        tap.test("mutual TLS: a certificate maps to a user by the rules", () -> thereAndBack(certificate("alice.pem")));
        tap.test("mutual TLS: a client without a certificate is refused",
            () -> refused(SslAuthenticationException.class, tls("MUTUAL_TLS", "ca.pem")));
        tap.test("mutual TLS: a certificate of another authority is refused",
            () -> refused(SslAuthenticationException.class, certificate("stranger.pem")));
        tap.test("TLS: a server of an unknown authority is not trusted",
            () -> refused(SslAuthenticationException.class, tls("TLS", "stranger-ca.pem")));
        tap.test("users are created, described, changed and deleted", Security::users);
        tap.test("a quota applies to the authenticated user", Security::quota);
        String again = "clients reauthenticate on the same connection";
        if (args.length == 0) {
            tap.test(again, Security::again);
        } else {
            tap.skip(again, "the short form omits it");
        }
        System.exit(tap.run() == 0 ? 0 : 1);
    }

    private static Path file(String name) {
        return FILES.resolve(name);
    }

    private static Map<String, Object> tls(String listener, String authority) {
        Map<String, Object> config = new HashMap<>();
        config.put("bootstrap.servers", System.getenv(listener));
        config.put("security.protocol", "SSL");
        config.put("ssl.truststore.type", "PEM");
        config.put("ssl.truststore.location", file(authority).toString());
        return config;
    }

    private static Map<String, Object> certificate(String name) {
        Map<String, Object> config = tls("MUTUAL_TLS", "ca.pem");
        config.put("ssl.keystore.type", "PEM");
        config.put("ssl.keystore.location", file(name).toString());
        return config;
    }

    private static Map<String, Object> login(String listener, String mechanism, String user) {
        return login(listener, mechanism, user, user + "-has-this-secret");
    }

    private static Map<String, Object> login(String listener, String mechanism, String user, String password) {
        Map<String, Object> config = tls(listener, "ca.pem");
        config.put("security.protocol", listener.equals("SASL") ? "SASL_PLAINTEXT" : "SASL_SSL");
        config.put("sasl.mechanism", mechanism);
        String module = mechanism.equals("PLAIN") ? "plain.PlainLoginModule" : "scram.ScramLoginModule";
        config.put("sasl.jaas.config",
            MODULES + module + " required username=\"" + user + "\" password=\"" + password + "\";");
        return config;
    }

    private static Map<String, Object> token(String source) {
        Map<String, Object> config = tls("SASL_TLS", "ca.pem");
        config.put("security.protocol", "SASL_SSL");
        config.put("sasl.mechanism", "OAUTHBEARER");
        config.put("sasl.login.callback.handler.class", MODULES + "oauthbearer.OAuthBearerLoginCallbackHandler");
        config.put("sasl.oauthbearer.token.endpoint.url", source);
        // The same authority issued the issuer's certificate.
        config.put("sasl.jaas.config", BEARER
            + "clientId=\"alice\" clientSecret=\"alice-has-this-secret\" scope=\"kafka\" "
            + "ssl.truststore.type=\"PEM\" ssl.truststore.location=\"" + file("ca.pem") + "\";");
        return config;
    }

    private static Map<String, Object> administrator() {
        return login("SASL_TLS", "SCRAM-SHA-512", "admin");
    }

    private static <T> T answer(Future<T> future) throws Exception {
        return future.get(Tap.PATIENCE.toSeconds(), TimeUnit.SECONDS);
    }

    private static KafkaProducer<String, String> producer(Map<String, Object> config) {
        Map<String, Object> all = new HashMap<>(config);
        all.put("max.block.ms", Tap.PATIENCE.toMillis());
        return new KafkaProducer<>(all, new StringSerializer(), new StringSerializer());
    }

    private static KafkaConsumer<String, String> consumer(Map<String, Object> config, String group) {
        Map<String, Object> all = new HashMap<>(config);
        all.put("group.id", group);
        all.put("auto.offset.reset", "earliest");
        return new KafkaConsumer<>(all, new StringDeserializer(), new StringDeserializer());
    }

    /** Writes and reads records as alice. */
    private static void thereAndBack(Map<String, Object> config) throws Exception {
        RecordMetadata written;
        String value = "record " + System.nanoTime();
        try (KafkaProducer<String, String> producer = producer(config)) {
            written = answer(producer.send(new ProducerRecord<>("java-records", value)));
        }
        try (KafkaConsumer<String, String> consumer = consumer(config, "java-group")) {
            consumer.subscribe(List.of("java-records"));
            List<String> read = new ArrayList<>();
            eventually("the record", () -> {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(200))) {
                    if (record.offset() == written.offset()) {
                        read.add(record.value());
                    }
                }
                return !read.isEmpty();
            });
            equal(read, List.of(value), "what was read");
            consumer.commitSync(Tap.PATIENCE);
        }
    }

    private static void refused(Class<? extends Exception> error, Map<String, Object> config) throws Exception {
        try (Admin admin = Admin.create(config)) {
            fails(error, () -> answer(admin.listTopics().names()));
        }
    }

    private static void otherMechanism() throws Exception {
        Map<String, Object> config = token(file("alice.jwt").toUri().toString());
        config.put("bootstrap.servers", System.getenv("SASL"));
        config.put("security.protocol", "SASL_PLAINTEXT");
        refused(UnsupportedSaslMechanismException.class, config);
    }

    private static void defaultDeny() throws Exception {
        try (Admin admin = Admin.create(administrator())) {
            answer(admin.createTopics(List.of(new NewTopic("java-secret", 1, (short) 1))).all());
        }
        Map<String, Object> alice = login("SASL_TLS", "SCRAM-SHA-256", "alice");
        for (Map<String, Object> config : List.of(tls("TLS", "ca.pem"), alice)) {
            try (Admin admin = Admin.create(config)) {
                check(answer(admin.listTopics().names()).isEmpty(), "no topic is seen");
                fails(TopicAuthorizationException.class,
                    () -> answer(admin.describeTopics(List.of("java-secret")).allTopicNames()));
                fails(TopicAuthorizationException.class,
                    () -> answer(admin.createTopics(List.of(new NewTopic("java-mine", 1, (short) 1))).all()));
                fails(ClusterAuthorizationException.class,
                    () -> answer(admin.describeAcls(org.apache.kafka.common.acl.AclBindingFilter.ANY).values()));
                fails(ClusterAuthorizationException.class,
                    () -> answer(admin.alterUserScramCredentials(List.of(upsertion("alice", "mine"))).all()));
            }
            try (KafkaProducer<String, String> producer = producer(config)) {
                fails(TopicAuthorizationException.class,
                    () -> answer(producer.send(new ProducerRecord<>("java-secret", "x"))));
            }
            Map<String, Object> transactional = new HashMap<>(config);
            transactional.put("transactional.id", "java-transactional");
            try (KafkaProducer<String, String> producer = producer(transactional)) {
                fails(TransactionalIdAuthorizationException.class, producer::initTransactions);
            }
            try (KafkaConsumer<String, String> consumer = consumer(config, "java-group")) {
                consumer.subscribe(List.of("java-secret"));
                fails(TopicAuthorizationException.class, () -> eventually("a refusal", () -> {
                    consumer.poll(Duration.ofMillis(200));
                    return false;
                }));
            }
        }
    }

    private static AclBinding acl(ResourceType type, String name, PatternType pattern, AclOperation operation,
        AclPermissionType permission) {
        return new AclBinding(new ResourcePattern(type, name, pattern),
            new AccessControlEntry("User:alice", "*", operation, permission));
    }

    /** Permissions that the following tests need as well. */
    private static void rights() throws Exception {
        Map<String, Object> alice = login("SASL", "SCRAM-SHA-512", "alice");
        try (Admin admin = Admin.create(administrator()); Admin hers = Admin.create(alice);
            KafkaConsumer<String, String> consumer = consumer(alice, "java-group")) {
            answer(admin.createTopics(List.of(new NewTopic("java-records", 1, (short) 1))).all());
            answer(admin.createAcls(List.of(
                acl(ResourceType.TOPIC, "java-rec", PatternType.PREFIXED, AclOperation.READ, AclPermissionType.ALLOW),
                acl(ResourceType.TOPIC, "java-rec", PatternType.PREFIXED, AclOperation.WRITE, AclPermissionType.ALLOW),
                acl(ResourceType.TRANSACTIONAL_ID, "java-", PatternType.PREFIXED, AclOperation.WRITE,
                    AclPermissionType.ALLOW))).all());
            equal(answer(hers.listTopics().names()), java.util.Set.of("java-records"), "what alice sees");
            consumer.subscribe(List.of("java-records"));
            fails(GroupAuthorizationException.class, () -> eventually("a refusal", () -> {
                consumer.poll(Duration.ofMillis(200));
                return false;
            }));
            answer(admin.createAcls(List.of(acl(ResourceType.GROUP, "java-group", PatternType.LITERAL,
                AclOperation.READ, AclPermissionType.ALLOW))).all());
            AclBinding denial = acl(ResourceType.TOPIC, "java-records", PatternType.LITERAL, AclOperation.WRITE,
                AclPermissionType.DENY);
            answer(admin.createAcls(List.of(denial)).all());
            try (KafkaProducer<String, String> producer = producer(alice)) {
                fails(TopicAuthorizationException.class,
                    () -> answer(producer.send(new ProducerRecord<>("java-records", "x"))));
            }
            equal(answer(admin.deleteAcls(List.of(denial.toFilter())).all()).size(), 1, "denials removed");
        }
        Map<String, Object> transactional = new HashMap<>(alice);
        transactional.put("transactional.id", "java-transactional");
        try (KafkaProducer<String, String> producer = producer(transactional)) {
            producer.initTransactions();
            producer.beginTransaction();
            answer(producer.send(new ProducerRecord<>("java-records", "in a transaction")));
            producer.commitTransaction();
        }
    }

    private static UserScramCredentialUpsertion upsertion(String user, String password) {
        return new UserScramCredentialUpsertion(user, new ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096),
            password);
    }

    private static void users() throws Exception {
        try (Admin admin = Admin.create(administrator())) {
            answer(admin.alterUserScramCredentials(List.of(upsertion("carol", "first"))).all());
            equal(answer(admin.describeUserScramCredentials(List.of("carol")).all()).get("carol").credentialInfos(),
                List.of(new ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)), "her credentials");
            try (Admin hers = Admin.create(login("SASL_TLS", "SCRAM-SHA-512", "carol", "first"))) {
                check(answer(hers.listTopics().names()).isEmpty(), "no topic is seen");
            }
            // There is none for the other hash.
            refused(SaslAuthenticationException.class, login("SASL_TLS", "SCRAM-SHA-256", "carol", "first"));
            answer(admin.alterUserScramCredentials(List.of(upsertion("carol", "second"))).all());
            refused(SaslAuthenticationException.class, login("SASL_TLS", "SCRAM-SHA-512", "carol", "first"));
            answer(admin.alterUserScramCredentials(
                List.of(new UserScramCredentialDeletion("carol", ScramMechanism.SCRAM_SHA_512))).all());
            refused(SaslAuthenticationException.class, login("SASL_TLS", "SCRAM-SHA-512", "carol", "second"));
        }
    }

    private static double metric(KafkaProducer<String, String> producer, String name) {
        return producer.metrics().entrySet().stream()
            .filter(each -> each.getKey().name().equals(name) && each.getKey().group().equals("producer-metrics"))
            .mapToDouble(each -> (Double) each.getValue().metricValue()).findFirst().orElseThrow();
    }

    private static void quota() throws Exception {
        ClientQuotaEntity alice = new ClientQuotaEntity(Map.of(ClientQuotaEntity.USER, "alice"));
        try (Admin admin = Admin.create(administrator())) {
            ClientQuotaAlteration.Op set = new ClientQuotaAlteration.Op("producer_byte_rate", 10_000.0);
            answer(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(alice, List.of(set)))).all());
            String value = "x".repeat(30_000);
            try (KafkaProducer<String, String> hers = producer(login("SASL", "PLAIN", "alice"));
                KafkaProducer<String, String> other = producer(administrator())) {
                for (int n = 0; n < 4; n++) {
                    answer(hers.send(new ProducerRecord<>("java-records", value)));
                    answer(other.send(new ProducerRecord<>("java-records", value)));
                }
                check(metric(hers, "produce-throttle-time-max") > 0, "alice is throttled");
                equal(metric(other, "produce-throttle-time-max"), 0.0, "how the administrator is throttled");
            }
            ClientQuotaAlteration.Op none = new ClientQuotaAlteration.Op("producer_byte_rate", null);
            answer(admin.alterClientQuotas(List.of(new ClientQuotaAlteration(alice, List.of(none)))).all());
        }
    }

    private static void again() throws Exception {
        for (Map<String, Object> config : List.of(login("SASL_TLS", "SCRAM-SHA-512", "alice"),
            login("SASL", "PLAIN", "alice"), token(System.getenv("TOKENS")))) {
            try (KafkaProducer<String, String> producer = producer(config)) {
                answer(producer.send(new ProducerRecord<>("java-records", "first")));
                double connections = metric(producer, "connection-creation-total");
                eventually("reauthentication", () -> {
                    answer(producer.send(new ProducerRecord<>("java-records", "more")));
                    return metric(producer, "successful-reauthentication-total") >= 2;
                });
                equal(metric(producer, "failed-reauthentication-total"), 0.0, "number of failures");
                equal(metric(producer, "connection-creation-total"), connections, "connections");
            }
        }
    }

    private Security() {
    }
}
