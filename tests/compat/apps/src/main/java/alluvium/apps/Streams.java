package alluvium.apps;

import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.LongDeserializer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Lets {@link WordCount} count a text that nobody here wrote, kills it again and again, and compares its output with a plain count.
 * {@code BOOTSTRAP=... Streams TEXTS STATE_DIRECTORY}, where each file of the directory of texts is a chapter.
 */
public final class Streams {
    private static final String BOOTSTRAP = System.getenv("BOOTSTRAP");
    private static final Duration PATIENCE = Duration.ofMinutes(4);
    private static final int KILLS = 3;
    private static final int PARTITIONS = 3;
    private static final int LINES = 400;

    public static void main(String[] args) throws Exception {
        Map<String, Long> plain = new HashMap<>();
        Map<String, Long> plainByTitle = new HashMap<>();
        System.out.println("1..2");
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", BOOTSTRAP))) {
            admin.createTopics(Stream.of("text", "titles", "counts", "counts-by-title")
                .map(topic -> new NewTopic(topic, PARTITIONS, (short) 1)).toList()).all().get();
        }
        write(Path.of(args[0]), plain, plainByTitle);
        long words = plain.values().stream().mapToLong(Long::longValue).sum();

        Map<String, List<Long>> counts = new HashMap<>();
        Map<String, List<Long>> countsByTitle = new HashMap<>();
        Process app = start(args[1]);
        try (KafkaConsumer<String, Long> consumer = consumer()) {
            List<TopicPartition> partitions = new ArrayList<>();
            for (int partition = 0; partition < PARTITIONS; partition++) {
                partitions.add(new TopicPartition("counts", partition));
                partitions.add(new TopicPartition("counts-by-title", partition));
            }
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            long seen = 0;
            int kills = 0;
            long deadline = System.nanoTime() + PATIENCE.toNanos();
            // Once it is all there, a moment in which more would come.
            for (int quiet = 0; quiet < 20 && System.nanoTime() < deadline;) {
                long before = seen;
                for (ConsumerRecord<String, Long> record : consumer.poll(Duration.ofMillis(100))) {
                    seen++;
                    (record.topic().equals("counts") ? counts : countsByTitle)
                        .computeIfAbsent(record.key(), key -> new ArrayList<>()).add(record.value());
                }
                quiet = seen >= 2 * words && seen == before ? quiet + 1 : 0;
                if (kills < KILLS && seen > 2 * words * (kills + 1) / (KILLS + 2)) {
                    kills++;
                    app.destroyForcibly().waitFor();
                    System.out.println("# killed after " + seen + " of " + 2 * words);
                    app = start(args[1]);
                }
            }
            System.out.println("# " + seen + " of " + 2 * words + " after " + kills + " kills");
        } finally {
            app.destroyForcibly().waitFor();
        }
        int failed = compare(1, "a word count is exact, over kills of the application", counts, plain)
            + compare(2, "a count of a join is exact, over kills of the application", countsByTitle, plainByTitle);
        System.exit(failed);
    }

    private static int compare(int number, String test, Map<String, List<Long>> counts, Map<String, Long> plain) {
        for (String word : plain.keySet()) {
            List<Long> steps = counts.getOrDefault(word, List.of());
            boolean dense = true;
            for (int n = 0; n < steps.size(); n++) {
                dense &= steps.get(n) == n + 1;
            }
            if (!dense || steps.size() != plain.get(word)) {
                String shown = steps.subList(0, Math.min(20, steps.size())).toString();
                System.out.println("not ok " + number + " - " + test + ": the steps of `" + word + "` are " + steps.size() + ", not "
                    + plain.get(word) + ", they begin " + shown);
                return 1;
            }
        }
        System.out.println("ok " + number + " - " + test);
        return 0;
    }

    private static void write(Path texts, Map<String, Long> plain, Map<String, Long> plainByTitle) throws Exception {
        Map<String, Object> settings = Map.of("bootstrap.servers", BOOTSTRAP, "linger.ms", 20);
        List<Path> files;
        try (Stream<Path> found = Files.list(texts)) {
            files = found.filter(Files::isRegularFile).filter(file -> !Files.isSymbolicLink(file)).sorted().toList();
        }
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (Path file : files) {
                producer.send(new ProducerRecord<>("titles", file.getFileName().toString(), "title-of-" + file.getFileName()));
            }
            producer.flush();
            // A title is older than what it is joined with.
            Thread.sleep(10);
            for (Path file : files) {
                String chapter = file.getFileName().toString();
                String text = Files.readString(file, StandardCharsets.ISO_8859_1);
                for (String line : text.lines().limit(LINES).toList()) {
                    producer.send(new ProducerRecord<>("text", chapter, line));
                    for (String word : WordCount.words(line)) {
                        plain.merge(word, 1L, Long::sum);
                        plainByTitle.merge("title-of-" + chapter + " " + word, 1L, Long::sum);
                    }
                }
            }
        }
        System.out.println("# " + plain.size() + " words of " + files.size() + " texts");
    }

    private static KafkaConsumer<String, Long> consumer() {
        Map<String, Object> settings = Map.of("bootstrap.servers", BOOTSTRAP, "isolation.level", "read_committed");
        return new KafkaConsumer<>(settings, new StringDeserializer(), new LongDeserializer());
    }

    private static Process start(String state) throws Exception {
        return new ProcessBuilder(System.getProperty("java.home") + File.separator + "bin" + File.separator + "java", "-Xmx256m",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", System.getProperty("java.class.path"), WordCount.class.getName(),
            BOOTSTRAP, state).redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.appendTo(new File(state + ".log"))).start();
    }

    private Streams() {
    }
}
