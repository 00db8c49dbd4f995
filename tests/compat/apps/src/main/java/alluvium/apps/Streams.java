package alluvium.apps;

import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.Deque;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Stream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListTransactionsOptions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.admin.TransactionListing;
import org.apache.kafka.clients.admin.TransactionState;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.LongDeserializer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Lets {@link WordCount} count a third-party text, kills it and the server in turn, each while one of its transactions is
 * open, and compares its output with a plain count. {@code BOOTSTRAP=... Streams TEXTS STATE_DIRECTORY}, where each file of
 * the directory of texts is a chapter. The parent process kills and restarts the server when it reads
 * {@link #KILL_THE_SERVER}, and answers with an empty line.
 */
public final class Streams {
    private static final String BOOTSTRAP = System.getenv("BOOTSTRAP");
    private static final String KILL_THE_SERVER = "kill the server";
    private static final Duration PATIENCE = Duration.ofMinutes(8);
    private static final int KILLS_OF_THE_APPLICATION = 3;
    private static final int KILLS_OF_THE_SERVER = 2;
    private static final int KILLS = KILLS_OF_THE_APPLICATION + KILLS_OF_THE_SERVER;
    private static final int PARTITIONS = 3;
    private static final int LINES = 400;

    private record Line(String chapter, String text) {
    }

    private final Admin admin;
    private final KafkaConsumer<String, Long> consumer;
    private final KafkaProducer<String, String> producer;
    private final String state;
    private final long deadline = System.nanoTime() + PATIENCE.toNanos();
    /** The lines that are still to be written. */
    private final Deque<Line> lines = new ArrayDeque<>();
    private final Map<String, Long> plain = new HashMap<>();
    private final Map<String, Long> plainByTitle = new HashMap<>();
    private final Map<String, List<Long>> counts = new HashMap<>();
    private final Map<String, List<Long>> countsByTitle = new HashMap<>();
    private Process app;
    /** Length of the log that earlier processes of the application wrote. */
    private int loggedBefore;
    private long words;
    private long seen;
    private int killsOfTheApplication;
    private int killsOfTheServer;

    public static void main(String[] args) throws Exception {
        System.out.println("1..4");
        String invented = difference(Map.of("word", List.of(1L), "invented", List.of(1L)), Map.of("word", 1L));
        int failed = printResult(1, "the comparison finds a word that was not written", invented != null ? null : "not found");
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", BOOTSTRAP)); var consumer = consumer(); var producer = producer()) {
            admin.createTopics(Stream.of("text", "titles", "counts", "counts-by-title")
                .map(topic -> new NewTopic(topic, PARTITIONS, (short) 1)).toList()).all().get();
            Streams streams = new Streams(admin, consumer, producer, args[1]);
            streams.titles(Path.of(args[0]));
            streams.app = streams.start();
            try {
                streams.run();
            } finally {
                streams.app.destroyForcibly().waitFor();
            }
            failed += streams.judge();
        }
        System.exit(failed);
    }

    private Streams(Admin admin, KafkaConsumer<String, Long> consumer, KafkaProducer<String, String> producer, String state) {
        this.admin = admin;
        this.consumer = consumer;
        this.producer = producer;
        this.state = state;
    }

    private void run() throws Exception {
        List<TopicPartition> partitions = new ArrayList<>();
        for (int partition = 0; partition < PARTITIONS; partition++) {
            partitions.add(new TopicPartition("counts", partition));
            partitions.add(new TopicPartition("counts-by-title", partition));
        }
        consumer.assign(partitions);
        consumer.seekToBeginning(partitions);
        int part = lines.size() / (KILLS + 1);
        for (int kill = 0; kill < KILLS && isTime(); kill++) {
            long since = System.currentTimeMillis();
            long before = seen;
            write(part);
            // The application or the server that was killed before is working again.
            while (seen == before && isTime()) {
                poll();
            }
            kill(kill % 2 == 1, since);
        }
        write(lines.size());
        // After everything has arrived, a moment in which more would arrive.
        for (int quiet = 0; quiet < 20 && isTime();) {
            long before = seen;
            poll();
            quiet = seen >= 2 * words && seen == before ? quiet + 1 : 0;
        }
        System.out.println("# " + seen + " of " + 2 * words + " after " + killsOfTheApplication + " kills of the application and "
            + killsOfTheServer + " of the server");
    }

    private int judge() {
        String kills = killsOfTheApplication == KILLS_OF_THE_APPLICATION && killsOfTheServer == KILLS_OF_THE_SERVER ? null
            : killsOfTheApplication + " and " + killsOfTheServer + " within " + PATIENCE.toSeconds() + " s";
        return printResult(2, "the application is killed " + KILLS_OF_THE_APPLICATION + " times and the server " + KILLS_OF_THE_SERVER
                + " times, in open transactions", kills)
            + printResult(3, "a word count is exact, despite kills of application and server", difference(counts, plain))
            + printResult(4, "a count of a join is exact, despite kills of application and server", difference(countsByTitle, plainByTitle));
    }

    private static int printResult(int number, String test, String failure) {
        System.out.println(failure == null ? "ok " + number + " - " + test : "not ok " + number + " - " + test + ": " + failure);
        return failure == null ? 0 : 1;
    }

    /** Compares the output, with each step of each count, with the expected one: words that are missing, not written, or with wrong steps. */
    private static String difference(Map<String, List<Long>> counts, Map<String, Long> plain) {
        Set<String> all = new HashSet<>(plain.keySet());
        all.addAll(counts.keySet());
        for (String word : all) {
            List<Long> steps = counts.getOrDefault(word, List.of());
            boolean dense = true;
            for (int n = 0; n < steps.size(); n++) {
                dense &= steps.get(n) == n + 1;
            }
            long wanted = plain.getOrDefault(word, 0L);
            if (!dense || steps.size() != wanted) {
                String shown = steps.subList(0, Math.min(20, steps.size())).toString();
                return "the steps of `" + word + "` are " + steps.size() + ", not " + wanted + ", starting with " + shown;
            }
        }
        return null;
    }

    private boolean isTime() {
        return System.nanoTime() < deadline;
    }

    private void poll() throws Exception {
        revive();
        for (ConsumerRecord<String, Long> record : consumer.poll(Duration.ofMillis(100))) {
            seen++;
            (record.topic().equals("counts") ? counts : countsByTitle)
                .computeIfAbsent(record.key(), key -> new ArrayList<>()).add(record.value());
        }
    }

    /** Kills the server, or else the application, in the middle of a transaction that began after {@code since}. */
    private void kill(boolean server, long since) throws Exception {
        for (int attempt = 0; isTime(); attempt++) {
            // It commits every 100 ms: stopped at a different moment each time, it is soon within a transaction.
            Thread.sleep(attempt % 10 * 10);
            signal("STOP");
            // Requests that it had sent are complete by then. A transaction that is open now stays open.
            Thread.sleep(100);
            if (isInTransaction(since)) {
                break;
            }
            signal("CONT");
            // It may have counted all input.
            write(1);
            poll();
        }
        if (!isTime()) {
            return;
        }
        System.out.println("# after " + seen + " of " + 2 * words + ", in a transaction:");
        if (server) {
            System.out.println(KILL_THE_SERVER);
            System.out.flush();
            if (System.in.read() != '\n') {
                throw new IllegalStateException("the server was not killed");
            }
            signal("CONT");
            killsOfTheServer++;
        } else {
            app.destroyForcibly().waitFor();
            System.out.println("# the application is killed");
            app = start();
            killsOfTheApplication++;
        }
    }

    private boolean isInTransaction(long since) throws Exception {
        var ongoing = new ListTransactionsOptions().filterStates(Set.of(TransactionState.ONGOING));
        List<String> ids = admin.listTransactions(ongoing).all().get().stream().map(TransactionListing::transactionalId)
            .filter(id -> id.startsWith(WordCount.ID)).toList();
        if (ids.isEmpty()) {
            return false;
        }
        // A killed application may have left a transaction open.
        for (TransactionDescription found : admin.describeTransactions(ids).all().get().values()) {
            if (found.state() == TransactionState.ONGOING && found.transactionStartTimeMs().orElse(0) >= since) {
                return true;
            }
        }
        return false;
    }

    /**
     * Kafka Streams opens its local stores when it starts, before it removes those that a kill left unfinished. If it is
     * killed during the removal, every later start fails. The operator's remedy is to remove the rest; the application then
     * restores the stores from its topics.
     */
    private void revive() throws Exception {
        if (app.isAlive()) {
            return;
        }
        if (!Files.readString(Path.of(state + ".log")).substring(loggedBefore).contains("ProcessorStateException: Error opening store")) {
            throw new IllegalStateException("the application ended, see " + state + ".log");
        }
        System.out.println("# the application cannot open its local stores: removed, to be restored");
        try (Stream<Path> files = Files.walk(Path.of(state))) {
            for (Path file : files.sorted(Comparator.reverseOrder()).toList()) {
                Files.delete(file);
            }
        }
        app = start();
    }

    private void signal(String name) throws Exception {
        revive();
        int status = new ProcessBuilder("sh", "-c", "kill -" + name + " " + app.pid()).start().waitFor();
        if (status != 0) {
            throw new IllegalStateException("the application ended, see " + state + ".log");
        }
    }

    /** Writes a title for each file, and collects its lines. */
    private void titles(Path texts) throws Exception {
        List<Path> files;
        try (Stream<Path> found = Files.list(texts)) {
            files = found.filter(Files::isRegularFile).filter(file -> !Files.isSymbolicLink(file)).sorted().toList();
        }
        for (Path file : files) {
            String chapter = file.getFileName().toString();
            producer.send(new ProducerRecord<>("titles", chapter, title(chapter)));
            Files.readString(file, StandardCharsets.ISO_8859_1).lines().limit(LINES).forEach(line -> lines.add(new Line(chapter, line)));
        }
        producer.flush();
        // A title is older than the lines that are joined with it.
        Thread.sleep(10);
        System.out.println("# " + lines.size() + " lines of " + files.size() + " texts");
    }

    private static String title(String chapter) {
        return "title-of-" + chapter;
    }

    /** Writes more lines, and counts the expected result. */
    private void write(int count) {
        for (int n = 0; n < count && !lines.isEmpty(); n++) {
            Line line = lines.remove();
            producer.send(new ProducerRecord<>("text", line.chapter(), line.text()));
            for (String word : WordCount.words(line.text())) {
                words++;
                plain.merge(word, 1L, Long::sum);
                plainByTitle.merge(title(line.chapter()) + " " + word, 1L, Long::sum);
            }
        }
        producer.flush();
    }

    private static KafkaProducer<String, String> producer() {
        Map<String, Object> settings = Map.of("bootstrap.servers", BOOTSTRAP, "linger.ms", 20);
        return new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
    }

    private static KafkaConsumer<String, Long> consumer() {
        Map<String, Object> settings = Map.of("bootstrap.servers", BOOTSTRAP, "isolation.level", "read_committed");
        return new KafkaConsumer<>(settings, new StringDeserializer(), new LongDeserializer());
    }

    private Process start() throws IOException {
        Path log = Path.of(state + ".log");
        loggedBefore = Files.exists(log) ? Files.readString(log).length() : 0;
        return new ProcessBuilder(System.getProperty("java.home") + File.separator + "bin" + File.separator + "java", "-Xmx256m",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", System.getProperty("java.class.path"), WordCount.class.getName(),
            BOOTSTRAP, state).redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.appendTo(new File(state + ".log"))).start();
    }
}
