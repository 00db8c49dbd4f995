package alluvium.apps;

import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Moves a topic, its settings and the offsets of a group from one server to another with MirrorMaker 2, as
 * docs/moving-from-kafka.md describes, and continues the producer and the group there.
 * {@code BOOTSTRAP=TO Moving FROM DIRECTORY}.
 */
public final class Moving {
    private static final String TO = System.getenv("BOOTSTRAP");
    private static final String TOPIC = "moved";
    private static final String GROUP = "readers";
    private static final int PARTITIONS = 3;
    private static final int RECORDS = 3000;
    private static final int LATER = 300;
    private static final Map<String, String> SETTINGS = Map.of("retention.ms", "-1", "max.message.bytes", "2000000");
    private static final Duration PATIENCE = Duration.ofMinutes(3);

    private final String from;
    private final Path directory;
    private final long deadline = System.nanoTime() + PATIENCE.toNanos();
    /** The committed records, by partition, in order. */
    private final Map<Integer, List<String>> written = new TreeMap<>();
    /** The end offset of each partition on the target server. */
    private final Map<Integer, Long> ends = new TreeMap<>();

    public static void main(String[] args) throws Exception {
        System.exit(new Moving(args[0], Path.of(args[1])).run());
    }

    private Moving(String from, Path directory) {
        this.from = from;
        this.directory = directory;
    }

    private int run() throws Exception {
        System.out.println("1..3");
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", from))) {
            admin.createTopics(List.of(new NewTopic(TOPIC, PARTITIONS, (short) 1).configs(SETTINGS))).all().get();
        }
        String settings;
        String records;
        Set<String> readBefore;
        Process mirror = mirror();
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", TO))) {
            produce(from, 0, RECORDS, true);
            records = untilEqual(mirror);
            settings = settings(admin);
            readBefore = read(from, RECORDS);
            offsets(admin, mirror);
        } finally {
            mirror.destroy();
            if (!mirror.waitFor(30, TimeUnit.SECONDS)) {
                mirror.destroyForcibly().waitFor();
            }
        }
        int failed = printResult(1, "the topic has its partitions and settings", settings);
        failed += printResult(2, "each record is copied exactly once, in order, and none of an aborted transaction", records);
        // The producer and the group now use the other server's address.
        produce(TO, RECORDS, LATER, false);
        Set<String> readLater = read(TO, LATER);
        Set<String> missing = new HashSet<>();
        written.values().forEach(missing::addAll);
        missing.removeAll(readBefore);
        missing.removeAll(readLater);
        readLater.retainAll(readBefore);
        String goesOn = !missing.isEmpty() ? missing.size() + " records missing"
            : !readLater.isEmpty() ? readLater.size() + " records delivered again" : null;
        failed += printResult(3, "the group resumes at its offsets", goesOn);
        return failed;
    }

    private boolean isTime() {
        return System.nanoTime() < deadline;
    }

    private void pause(String what, Process mirror) throws Exception {
        if (!isTime() || !mirror.isAlive()) {
            throw new IllegalStateException(what + (mirror.isAlive() ? ": timed out" : ": MirrorMaker ended") + ", see " + log());
        }
        Thread.sleep(200);
    }

    private Path log() {
        return directory.resolve("mirror.log");
    }

    /** With transactions, some of them aborted, so that the offsets on the source have gaps. */
    private void produce(String server, int first, int count, boolean inTransactions) throws Exception {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", server, "compression.type", "zstd"));
        if (inTransactions) {
            settings.put("transactional.id", "mover");
        }
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            if (!inTransactions) {
                send(producer, first, count, true);
                return;
            }
            producer.initTransactions();
            for (int n = first; n < first + count; n += 100) {
                producer.beginTransaction();
                send(producer, n, 100, true);
                producer.commitTransaction();
                producer.beginTransaction();
                send(producer, -n - 10, 10, false);
                producer.flush();
                producer.abortTransaction();
            }
        }
    }

    private void send(KafkaProducer<String, String> producer, int first, int count, boolean counts) {
        for (int n = first; n < first + count; n++) {
            int partition = Math.floorMod(n * 7, PARTITIONS);
            var record = new ProducerRecord<>(TOPIC, partition, 1_700_000_000_000L + Math.abs(n), "key " + n % 50, "value " + n);
            record.headers().add("number", Integer.toString(n).getBytes(StandardCharsets.UTF_8));
            producer.send(record);
            if (counts) {
                written.computeIfAbsent(partition, some -> new ArrayList<>()).add(record.value());
            }
        }
    }

    private static KafkaConsumer<String, String> consumer(String server, boolean inGroup) {
        Map<String, Object> settings = new HashMap<>(Map.of("bootstrap.servers", server, "isolation.level", "read_committed",
            "auto.offset.reset", "earliest", "enable.auto.commit", "false", "max.poll.records", "100"));
        if (inGroup) {
            settings.put("group.id", GROUP);
        }
        return new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
    }

    /** Reads `count` records as the group, and those that arrive for a moment after them, then commits. */
    private Set<String> read(String server, int count) {
        Set<String> values = new HashSet<>();
        try (var consumer = consumer(server, true)) {
            consumer.subscribe(List.of(TOPIC));
            for (int quiet = 0; (values.size() < count || quiet < 10) && isTime(); quiet++) {
                var records = consumer.poll(Duration.ofMillis(200));
                quiet = records.isEmpty() ? quiet : 0;
                records.forEach(record -> values.add(record.value()));
            }
            consumer.commitSync();
        }
        return values;
    }

    private Process mirror() throws Exception {
        Path properties = directory.resolve("mirror.properties");
        Files.writeString(properties, """
            clusters = from, to
            from.bootstrap.servers = %s
            to.bootstrap.servers = %s
            from->to.enabled = true
            from->to.topics = moved
            from->to.groups = readers
            from->to.config.properties.exclude = follower.replication.throttled.replicas, leader.replication.throttled.replicas, \
                message.timestamp.difference.max.ms, message.timestamp.type, unclean.leader.election.enable, min.insync.replicas, remote.*
            replication.policy.class = org.apache.kafka.connect.mirror.IdentityReplicationPolicy
            from->to.sync.group.offsets.enabled = true
            from->to.sync.group.offsets.interval.seconds = 1
            from->to.emit.checkpoints.interval.seconds = 1
            from->to.offset.lag.max = 0
            from->to.refresh.groups.interval.seconds = 1
            from->to.sync.topic.acls.enabled = false
            from->to.emit.heartbeats.enabled = false
            to->from.emit.heartbeats.enabled = false
            from.consumer.isolation.level = read_committed
            from.consumer.auto.offset.reset = earliest
            to.exactly.once.source.support = enabled
            dedicated.mode.enable.internal.rest = true
            listeners = http://127.0.0.1:0
            replication.factor = 1
            checkpoints.topic.replication.factor = 1
            heartbeats.topic.replication.factor = 1
            offset-syncs.topic.replication.factor = 1
            config.storage.replication.factor = 1
            offset.storage.replication.factor = 1
            status.storage.replication.factor = 1
            """.formatted(from, TO));
        return new ProcessBuilder(System.getProperty("java.home") + File.separator + "bin" + File.separator + "java", "-Xmx512m",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=info", "-cp", System.getProperty("java.class.path"),
            "org.apache.kafka.connect.mirror.MirrorMaker", properties.toString()).directory(directory.toFile())
            .redirectErrorStream(true).redirectOutput(log().toFile()).start();
    }

    /** Waits for as many records as were written, and for a moment in which more would arrive; returns what differs. */
    private String untilEqual(Process mirror) throws Exception {
        Map<Integer, List<String>> found = new TreeMap<>();
        String wrong = null;
        List<TopicPartition> partitions = new ArrayList<>();
        for (int partition = 0; partition < PARTITIONS; partition++) {
            partitions.add(new TopicPartition(TOPIC, partition));
        }
        try (var consumer = consumer(TO, false)) {
            while (consumer.listTopics().getOrDefault(TOPIC, List.of()).size() < PARTITIONS) {
                pause("waiting for the topic", mirror);
            }
            consumer.assign(partitions);
            for (int seen = 0, quiet = 0; seen < RECORDS || quiet < 10;) {
                int before = seen;
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(200))) {
                    seen++;
                    ends.merge(record.partition(), record.offset() + 1, Math::max);
                    found.computeIfAbsent(record.partition(), some -> new ArrayList<>()).add(record.value());
                    int n = Integer.parseInt(record.value().substring("value ".length()));
                    var header = record.headers().lastHeader("number");
                    if (!record.key().equals("key " + n % 50) || record.timestamp() != 1_700_000_000_000L + n || header == null
                        || !new String(header.value(), StandardCharsets.UTF_8).equals(Integer.toString(n))) {
                        wrong = "another key, time or header: " + record;
                    }
                }
                quiet = seen == before ? quiet + 1 : 0;
                pause("waiting for records, " + seen + " of " + RECORDS, mirror);
            }
        }
        for (int partition = 0; wrong == null && partition < PARTITIONS; partition++) {
            List<String> there = found.getOrDefault(partition, List.of());
            if (!written.get(partition).equals(there)) {
                wrong = "partition " + partition + " has " + there.size() + " records, not the " + written.get(partition).size()
                    + " that were committed, or different ones";
            }
        }
        return wrong;
    }

    private String settings(Admin admin) throws Exception {
        var resource = new ConfigResource(ConfigResource.Type.TOPIC, TOPIC);
        var config = admin.describeConfigs(List.of(resource)).all().get().get(resource);
        for (var setting : SETTINGS.entrySet()) {
            String value = config.get(setting.getKey()).value();
            if (!setting.getValue().equals(value)) {
                return setting.getKey() + " is " + value;
            }
        }
        return null;
    }

    /** Waits until the group's offsets are at the end of each partition, up to which it has read. */
    private void offsets(Admin admin, Process mirror) throws Exception {
        Map<Integer, Long> now = Map.of();
        while (!now.equals(ends)) {
            pause("waiting for the group's offsets, " + now + " of " + ends, mirror);
            now = new TreeMap<>();
            for (var offset : admin.listConsumerGroupOffsets(GROUP).partitionsToOffsetAndMetadata().get().entrySet()) {
                now.put(offset.getKey().partition(), offset.getValue().offset());
            }
        }
    }

    private static int printResult(int number, String test, String failure) {
        System.out.println(failure == null ? "ok " + number + " - " + test : "not ok " + number + " - " + test + ": " + failure);
        return failure == null ? 0 : 1;
    }
}
