package alluvium.clients;

import static alluvium.clients.Tap.check;
import static alluvium.clients.Tap.equal;
import static alluvium.clients.Tap.eventually;

import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.RecordTooLargeException;
import org.apache.kafka.common.errors.TopicExistsException;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** kafka-clients against a running server: {@code BOOTSTRAP=127.0.0.1:9092 java -cp ... alluvium.clients.Suite}. */
public final class Suite {
    static final String BOOTSTRAP = Optional.ofNullable(System.getenv("BOOTSTRAP")).orElse("127.0.0.1:9092");

    static final Admin ADMIN = Admin.create(Map.of("bootstrap.servers", BOOTSTRAP));

    /** Exits with 1 if a test failed. */
    public static void main(String[] args) {
        Tap tap = Tap.create();
        tap.test("topics are created, listed, described and deleted", Suite::topics);
        tap.test("cluster and configuration are described", Suite::cluster);
        tap.test("the default producer is idempotent and gets dense offsets", Suite::defaultProducer);
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            tap.test("records compressed with " + codec + " are read back", () -> compression(codec));
        }
        tap.test("headers, nulls and timestamps are read back", Suite::shapes);
        tap.test("a record over the limit is refused, and the producer continues", Suite::tooLarge);
        tap.test("a consumer seeks, and finds offsets by time", Suite::seek);
        tap.test("offsets are committed, listed and altered", Suite::offsets);
        tap.test("console producer and console consumer", Suite::console);
        Groups.register(tap);
        int failed = tap.run();
        ADMIN.close(Duration.ofSeconds(5));
        System.exit(failed == 0 ? 0 : 1);
    }

    private static void topics() throws Exception {
        createTopic("java-topic", 3);
        try {
            createTopic("java-topic", 3);
            throw new AssertionError("a topic was created twice");
        } catch (ExecutionException error) {
            check(error.getCause() instanceof TopicExistsException, "error of the second creation: " + error.getCause());
        }
        check(answer(ADMIN.listTopics().names()).contains("java-topic"), "the topic is listed");
        TopicDescription described = answer(ADMIN.describeTopics(List.of("java-topic")).allTopicNames()).get("java-topic");
        equal(described.partitions().size(), 3, "partitions");
        answer(ADMIN.createPartitions(Map.of("java-topic", NewPartitions.increaseTo(7))).all());
        eventually("seven partitions", () -> answer(ADMIN.describeTopics(List.of("java-topic")).allTopicNames())
            .get("java-topic").partitions().size() == 7);
        answer(ADMIN.deleteTopics(List.of("java-topic")).all());
        eventually("the topic is gone", () -> !answer(ADMIN.listTopics().names()).contains("java-topic"));
        try {
            answer(ADMIN.describeTopics(List.of("java-topic")).allTopicNames());
            throw new AssertionError("a deleted topic is described");
        } catch (ExecutionException error) {
            check(error.getCause() instanceof UnknownTopicOrPartitionException, "error: " + error.getCause());
        }
    }

    private static void cluster() throws Exception {
        equal(answer(ADMIN.describeCluster().nodes()).size(), 1, "nodes");
        check(!answer(ADMIN.describeCluster().clusterId()).isEmpty(), "the cluster has an id");
        check(answer(ADMIN.describeCluster().controller()) != null, "a controller exists");
        createTopic("java-config", 1);
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, "java-config");
        Config config = answer(ADMIN.describeConfigs(List.of(resource)).all()).get(resource);
        check(Integer.parseInt(config.get("max.message.bytes").value()) > 0, "max.message.bytes is a number");
    }

    private static void defaultProducer() throws Exception {
        createTopic("java-idempotent", 2);
        try (KafkaProducer<String, String> producer = producer(Map.of())) {
            List<Future<RecordMetadata>> answers = new ArrayList<>();
            for (int n = 0; n < 20_000; n++) {
                answers.add(producer.send(new ProducerRecord<>("java-idempotent", n % 2, "k", "value " + n)));
            }
            for (int n = 0; n < answers.size(); n++) {
                equal(answer(answers.get(n)).offset(), (long) n / 2, "offset of record " + n);
            }
        }
        for (int partition = 0; partition < 2; partition++) {
            List<ConsumerRecord<String, String>> records = readPartition("java-idempotent", partition, 10_000);
            for (int n = 0; n < records.size(); n++) {
                equal(records.get(n).value(), "value " + (2 * n + partition), "value at offset " + n);
            }
        }
    }

    private static void compression(String codec) throws Exception {
        String topic = "java-codec-" + codec;
        createTopic(topic, 1);
        List<String> values = IntStream.range(0, 2000).mapToObj(n -> n + " compress me".repeat(n % 100)).toList();
        try (KafkaProducer<String, String> producer = producer(Map.of("compression.type", codec, "linger.ms", 20))) {
            List<Future<RecordMetadata>> answers = values.stream()
                .map(value -> producer.send(new ProducerRecord<>(topic, value))).toList();
            for (Future<RecordMetadata> answer : answers) {
                answer(answer);
            }
        }
        equal(readPartition(topic, 0, values.size()).stream().map(ConsumerRecord::value).toList(), values, "values");
    }

    private static void shapes() throws Exception {
        createTopic("java-shapes", 1);
        ProducerRecord<String, String> full = new ProducerRecord<>("java-shapes", 0, 1_600_000_000_123L, "key", (String) null);
        full.headers().add("h", new byte[] {1, 2}).add("h", new byte[0]).add("null", null);
        try (KafkaProducer<String, String> producer = producer(Map.of())) {
            answer(producer.send(full));
            answer(producer.send(new ProducerRecord<>("java-shapes", 0, null, "")));
        }
        List<ConsumerRecord<String, String>> records = readPartition("java-shapes", 0, 2);
        equal(records.get(0).key(), "key", "key");
        equal(records.get(0).value(), null, "value");
        equal(records.get(0).timestamp(), 1_600_000_000_123L, "timestamp");
        equal(Arrays.asList(records.get(0).headers().toArray()), Arrays.asList(full.headers().toArray()), "headers");
        equal(records.get(1).key(), null, "key");
        equal(records.get(1).value(), "", "value");
    }

    private static void tooLarge() throws Exception {
        createTopic("java-large", 1);
        try (KafkaProducer<String, String> producer = producer(Map.of("max.request.size", 50_000_000))) {
            answer(producer.send(new ProducerRecord<>("java-large", "before")));
            try {
                answer(producer.send(new ProducerRecord<>("java-large", "x".repeat(20_000_000))));
                throw new AssertionError("a record of 20 MB was accepted");
            } catch (ExecutionException error) {
                check(error.getCause() instanceof RecordTooLargeException, "error: " + error.getCause());
            }
            equal(answer(producer.send(new ProducerRecord<>("java-large", "after"))).offset(), 1L, "offset afterwards");
        }
        equal(readPartition("java-large", 0, 2).stream().map(ConsumerRecord::value).toList(),
            List.of("before", "after"), "values");
    }

    private static void seek() throws Exception {
        createTopic("java-seek", 1);
        TopicPartition partition = new TopicPartition("java-seek", 0);
        try (KafkaProducer<String, String> producer = producer(Map.of("linger.ms", 20))) {
            List<Future<RecordMetadata>> answers = IntStream.range(0, 100).mapToObj(n ->
                producer.send(new ProducerRecord<>("java-seek", 0, 1_000_000L + n * 10L, "k", "v" + n))).toList();
            for (Future<RecordMetadata> answer : answers) {
                answer(answer);
            }
        }
        try (KafkaConsumer<String, String> consumer = consumer("java-seek", Map.of())) {
            consumer.assign(List.of(partition));
            for (long offset : new long[] {50, 3, 99, 0}) {
                consumer.seek(partition, offset);
                equal(take(consumer, 1).get(0).offset(), offset, "offset after a seek");
            }
            equal(consumer.beginningOffsets(List.of(partition)).get(partition), 0L, "beginning");
            equal(consumer.endOffsets(List.of(partition)).get(partition), 100L, "end");
            equal(consumer.offsetsForTimes(Map.of(partition, 1_000_255L)).get(partition).offset(), 26L, "offset by time");
            equal(consumer.offsetsForTimes(Map.of(partition, 2_000_000L)).get(partition), null, "no record after this time");
            consumer.seekToEnd(List.of(partition));
            equal(consumer.position(partition), 100L, "position at the end");
        }
        equal(answer(ADMIN.listOffsets(Map.of(partition, OffsetSpec.maxTimestamp())).all()).get(partition).offset(), 99L,
            "offset of the largest timestamp");
    }

    private static void offsets() throws Exception {
        createTopic("java-offsets", 2);
        Map<TopicPartition, OffsetAndMetadata> wanted = new HashMap<>();
        wanted.put(new TopicPartition("java-offsets", 0), new OffsetAndMetadata(5, "five"));
        wanted.put(new TopicPartition("java-offsets", 1), new OffsetAndMetadata(0));
        try (KafkaProducer<String, String> producer = producer(Map.of())) {
            for (int n = 0; n < 10; n++) {
                answer(producer.send(new ProducerRecord<>("java-offsets", 0, null, "v" + n)));
            }
        }
        try (KafkaConsumer<String, String> consumer = consumer("java-offsets-group", Map.of())) {
            consumer.subscribe(List.of("java-offsets"));
            take(consumer, 10);
            consumer.commitSync(wanted);
            equal(consumer.committed(wanted.keySet()), wanted, "committed, as the consumer sees it");
            ConsumerGroupDescription group = answer(ADMIN.describeConsumerGroups(List.of("java-offsets-group")).all())
                .get("java-offsets-group");
            equal(group.groupState(), GroupState.STABLE, "state");
            equal(group.members().size(), 1, "members");
        }
        equal(answer(ADMIN.listConsumerGroupOffsets("java-offsets-group").partitionsToOffsetAndMetadata()), wanted,
            "committed, as the admin client sees it");
        Map<TopicPartition, OffsetAndMetadata> altered =
            Map.of(new TopicPartition("java-offsets", 0), new OffsetAndMetadata(7));
        answer(ADMIN.alterConsumerGroupOffsets("java-offsets-group", altered).all());
        try (KafkaConsumer<String, String> consumer = consumer("java-offsets-group", Map.of())) {
            consumer.subscribe(List.of("java-offsets"));
            equal(take(consumer, 3).stream().map(ConsumerRecord::offset).toList(), List.of(7L, 8L, 9L), "offsets read");
        }
        Set<String> listed = new HashSet<>();
        answer(ADMIN.listGroups().all()).forEach(each -> listed.add(each.groupId()));
        check(listed.contains("java-offsets-group"), "the group is listed");
    }

    private static void console() throws Exception {
        createTopic("java-console", 1);
        Path in = Files.createTempFile("console", ".in");
        Path out = Files.createTempFile("console", ".out");
        try {
            List<String> lines = corpus();
            Files.write(in, lines, StandardCharsets.UTF_8);
            Process producer = java("org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", BOOTSTRAP,
                "--topic", "java-console").redirectInput(in.toFile()).redirectOutput(ProcessBuilder.Redirect.DISCARD)
                .redirectError(ProcessBuilder.Redirect.INHERIT).start();
            finish(producer, "the console producer");
            Process consumer = java("org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", BOOTSTRAP,
                "--topic", "java-console", "--from-beginning", "--max-messages", String.valueOf(lines.size()))
                .redirectOutput(out.toFile()).redirectError(ProcessBuilder.Redirect.DISCARD).start();
            finish(consumer, "the console consumer");
            equal(Files.readString(out), Files.readString(in), "what the console consumer printed");
        } finally {
            Files.delete(in);
            Files.delete(out);
        }
    }

    /** Third-party text: the licences inside the jar of kafka-clients. */
    private static List<String> corpus() throws Exception {
        List<String> lines = new ArrayList<>();
        for (String name : List.of("LICENSE", "NOTICE")) {
            var found = Suite.class.getClassLoader().getResources(name);
            var resources = new ArrayList<java.net.URL>();
            found.asIterator().forEachRemaining(resources::add);
            found = Suite.class.getClassLoader().getResources("META-INF/" + name);
            found.asIterator().forEachRemaining(resources::add);
            for (java.net.URL url : resources) {
                try (var stream = url.openStream()) {
                    new String(stream.readAllBytes(), StandardCharsets.UTF_8).lines().forEach(lines::add);
                }
            }
        }
        check(lines.size() > 200, "there is text to send: " + lines.size() + " lines");
        return lines;
    }

    private static void finish(Process process, String what) throws Exception {
        try {
            check(process.waitFor(Tap.PATIENCE.toSeconds(), TimeUnit.SECONDS), what + " ends");
            equal(process.exitValue(), 0, "exit status of " + what);
        } finally {
            process.destroyForcibly();
        }
    }

    /** A process that runs another class with this one's class path. */
    static ProcessBuilder java(String mainClass, String... arguments) {
        List<String> command = new ArrayList<>(List.of(
            System.getProperty("java.home") + File.separator + "bin" + File.separator + "java", "-Xmx128m",
            "-XX:TieredStopAtLevel=1", "-cp", System.getProperty("java.class.path"), mainClass));
        command.addAll(List.of(arguments));
        return new ProcessBuilder(command);
    }

    static void createTopic(String name, int partitions) throws Exception {
        answer(ADMIN.createTopics(List.of(new NewTopic(name, partitions, (short) 1))).all());
    }

    static KafkaProducer<String, String> producer(Map<String, Object> settings) {
        Map<String, Object> config = new HashMap<>(settings);
        config.put("bootstrap.servers", BOOTSTRAP);
        return new KafkaProducer<>(config, new StringSerializer(), new StringSerializer());
    }

    static KafkaConsumer<String, String> consumer(String group, Map<String, Object> settings) {
        Map<String, Object> config = new HashMap<>();
        config.put("bootstrap.servers", BOOTSTRAP);
        config.put("group.id", group);
        config.put("auto.offset.reset", "earliest");
        config.put("enable.auto.commit", false);
        config.putAll(settings);
        return new KafkaConsumer<>(config, new StringDeserializer(), new StringDeserializer());
    }

    private static List<ConsumerRecord<String, String>> readPartition(String topic, int partition, int count)
        throws Exception {
        try (KafkaConsumer<String, String> consumer = consumer("java-reader", Map.of())) {
            consumer.assign(List.of(new TopicPartition(topic, partition)));
            consumer.seekToBeginning(consumer.assignment());
            List<ConsumerRecord<String, String>> records = take(consumer, count);
            equal(records.size(), count, "records of " + topic);
            equal(records.stream().map(ConsumerRecord::offset).collect(Collectors.toList()),
                IntStream.range(0, count).mapToObj(n -> (long) n).toList(), "offsets of " + topic);
            return records;
        }
    }

    static List<ConsumerRecord<String, String>> take(KafkaConsumer<String, String> consumer, int count)
        throws Exception {
        List<ConsumerRecord<String, String>> records = new ArrayList<>();
        eventually(count + " records", () -> {
            consumer.poll(Duration.ofMillis(200)).forEach(records::add);
            return records.size() >= count;
        });
        return records;
    }

    static <T> T answer(Future<T> future) throws Exception {
        return future.get(Tap.PATIENCE.toSeconds(), TimeUnit.SECONDS);
    }

    private Suite() {
    }
}
