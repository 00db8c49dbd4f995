package alluvium.flink;

import java.io.File;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Lets {@link Copy} copy a topic while it is written, kills the job and the server in turn, and compares the committed
 * output with the input. {@code BOOTSTRAP=... Flink DIRECTORY}. The parent process kills and restarts the server when it
 * reads {@link #KILL_THE_SERVER}, and answers with an empty line.
 */
public final class Flink {
    private static final String BOOTSTRAP = System.getenv("BOOTSTRAP");
    private static final String KILL_THE_SERVER = "kill the server";
    /** Limit of a job's duration. No test measures time. */
    private static final Duration PATIENCE = Duration.ofMinutes(5);
    private static final int PARTITIONS = 3;
    private static final int RECORDS = 10_000;
    /** Number of output records after which the job or the server is killed, alternately. */
    private static final int[] KILLS = {1_500, 3_000, 4_500, 6_000, 7_500};

    public static void main(String[] args) throws Exception {
        // How transactions are named: a new name for each, or names from a pool, whose transactions are found with ListTransactions.
        String[] strategies = {"INCREMENTING", "POOLING"};
        System.out.println("1.." + (strategies.length + 1));
        List<String> input = IntStream.range(0, RECORDS).mapToObj(String::valueOf).toList();
        boolean finds = difference(input).isEmpty()
            && difference(input.subList(1, RECORDS)).equals("0 not at all, ")
            && difference(Stream.concat(input.stream(), Stream.of("1")).toList()).equals("1 twice, ")
            && difference(Stream.concat(input.stream(), Stream.of("x")).toList()).equals("x is not in the input, ");
        System.out.println((finds ? "ok" : "not ok") + " 1 - the comparison finds a lost, a repeated and a foreign record");
        int failed = finds ? 0 : 1;
        for (int number = 0; number < strategies.length; number++) {
            String name = (number + 2) + " - a topic is copied exactly once, with transactions named by " + strategies[number];
            try {
                new Flink(Path.of(args[0]), strategies[number]).run();
                System.out.println("ok " + name);
            } catch (Exception | AssertionError error) {
                failed++;
                error.printStackTrace();
                System.out.println("not ok " + name + ": " + String.valueOf(error.getMessage()).replace('\n', ' '));
            }
        }
        System.exit(failed == 0 ? 0 : 1);
    }

    private final String from;
    private final String to;
    private final File directory;
    private final String strategy;
    private final long deadline = System.nanoTime() + PATIENCE.toNanos();
    private final List<String> copied = new ArrayList<>();

    private Flink(Path directory, String strategy) {
        this.from = "from-" + strategy.toLowerCase();
        this.to = "to-" + strategy.toLowerCase();
        this.directory = directory.resolve(strategy.toLowerCase()).toFile();
        this.strategy = strategy;
    }

    private void run() throws Exception {
        directory.mkdirs();
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", BOOTSTRAP))) {
            admin.createTopics(Stream.of(from, to).map(topic -> new NewTopic(topic, PARTITIONS, (short) 1)).toList()).all().get();
        }
        Thread writer = new Thread(this::write);
        writer.setDaemon(true);
        Process job = start();
        try (KafkaConsumer<String, String> consumer = consumer()) {
            writer.start();
            for (int kill = 0; kill < KILLS.length; kill++) {
                read(consumer, KILLS[kill], job);
                if (kill % 2 == 0) {
                    job.destroyForcibly().waitFor();
                    job = start();
                } else {
                    System.out.println(KILL_THE_SERVER);
                    if (System.in.read() < 0) {
                        throw new AssertionError("the server is not running any more");
                    }
                }
            }
            read(consumer, RECORDS, job);
            // A record that was written twice becomes visible after some more checkpoints.
            long until = System.nanoTime() + Duration.ofSeconds(3).toNanos();
            while (System.nanoTime() < until) {
                take(consumer);
            }
        } finally {
            job.destroyForcibly().waitFor();
        }
        equal("a consumer that read all the time", copied);
        equal("a consumer that reads from the beginning afterwards", all());
    }

    private static void equal(String who, List<String> read) {
        String difference = difference(read);
        if (!difference.isEmpty()) {
            throw new AssertionError(who + ": " + difference);
        }
    }

    /** A read_committed consumer of the output that starts at its beginning. */
    private KafkaConsumer<String, String> consumer() {
        KafkaConsumer<String, String> consumer = new KafkaConsumer<>(Map.of("bootstrap.servers", BOOTSTRAP, "isolation.level", "read_committed",
            "auto.offset.reset", "earliest"), new StringDeserializer(), new StringDeserializer());
        consumer.assign(IntStream.range(0, PARTITIONS).mapToObj(number -> new TopicPartition(to, number)).toList());
        return consumer;
    }

    /** The whole output, as a new consumer reads it: up to the last stable offset of each partition. */
    private List<String> all() {
        List<String> values = new ArrayList<>();
        try (KafkaConsumer<String, String> consumer = consumer()) {
            Map<TopicPartition, Long> ends = consumer.endOffsets(consumer.assignment());
            while (ends.entrySet().stream().anyMatch(end -> consumer.position(end.getKey()) < end.getValue())) {
                consumer.poll(Duration.ofMillis(200)).forEach(record -> values.add(record.value()));
                if (System.nanoTime() > deadline) {
                    throw new AssertionError("a new consumer does not reach the ends " + ends + " of the output");
                }
            }
        }
        return values;
    }

    /** Reads until the output has this many records. */
    private void read(KafkaConsumer<String, String> consumer, int count, Process job) {
        while (copied.size() < count) {
            take(consumer);
            if (!job.isAlive()) {
                throw new AssertionError("the job ended, see job.log in " + directory);
            }
            if (System.nanoTime() > deadline) {
                throw new AssertionError(copied.size() + " of " + count + " records within " + PATIENCE.toSeconds() + " s, see " + directory);
            }
        }
    }

    private void take(KafkaConsumer<String, String> consumer) {
        for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(200))) {
            copied.add(record.value());
        }
    }

    private Process start() throws Exception {
        ProcessBuilder java = new ProcessBuilder("java", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=info",
            "--add-opens=java.base/java.util=ALL-UNNAMED", "--add-opens=java.base/java.lang=ALL-UNNAMED",
            "-cp", System.getProperty("java.class.path"), Copy.class.getName(), from, to, directory.toPath().resolve("checkpoints").toString(), strategy);
        File log = new File(directory, "job.log");
        return java.redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.appendTo(log)).start();
    }

    /** Writes some hundred records per second, so that records are in flight at each kill. */
    private void write() {
        Map<String, Object> settings = Map.of("bootstrap.servers", BOOTSTRAP, "compression.type", "lz4", "delivery.timeout.ms", 300_000,
            "linger.ms", 5);
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (int number = 0; number < RECORDS; number++) {
                producer.send(new ProducerRecord<>(from, number % PARTITIONS, null, String.valueOf(number)));
                if (number % 10 == 0) {
                    Thread.sleep(15);
                }
            }
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
        }
    }

    /** What is wrong with the copy: empty if it contains each number exactly once and nothing else. */
    private static String difference(List<String> copied) {
        Map<String, Integer> times = new HashMap<>();
        copied.forEach(value -> times.merge(value, 1, Integer::sum));
        StringBuilder wrong = new StringBuilder();
        int printed = 0;
        for (int number = 0; number < RECORDS; number++) {
            Integer count = times.remove(String.valueOf(number));
            int found = count == null ? 0 : count;
            if (found != 1 && printed++ < 5) {
                wrong.append(number).append(found == 0 ? " not at all, " : found == 2 ? " twice, " : " " + found + " times, ");
            }
        }
        times.keySet().stream().limit(5).forEach(value -> wrong.append(value).append(" is not in the input, "));
        return wrong.toString();
    }
}
