package alluvium.clients;

import static alluvium.clients.Suite.answer;
import static alluvium.clients.Suite.consumer;
import static alluvium.clients.Suite.createTopic;
import static alluvium.clients.Suite.producer;
import static alluvium.clients.Suite.take;
import static alluvium.clients.Tap.check;
import static alluvium.clients.Tap.equal;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.LogTruncationException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;

/**
 * Consumers that have read records which the server has lost since (KIP-320). {@code Truncation write} writes and reads
 * them; then the server is killed and the values that begin with "lost-" are damaged in its log; then
 * {@code Truncation verify} continues.
 */
public final class Truncation {
    private static final String TOPIC = "java-truncation";
    private static final TopicPartition PARTITION = new TopicPartition(TOPIC, 0);
    private static final int KEPT = 5;
    private static final int LOST = 5;
    private static final int NEW = 3;
    /** A group with {@code auto.offset.reset}, and one without. */
    private static final List<String> GROUPS = List.of("latest", "none");

    /** Exits with 1 if a test failed. */
    public static void main(String[] args) {
        Tap tap = Tap.create();
        switch (args[0]) {
            case "write" -> tap.test("records are written and read before they are lost", Truncation::write);
            case "verify" -> {
                tap.test("a consumer seeks back to the end of what is left", Truncation::seeksBack);
                tap.test("a consumer without a reset policy learns of the loss", Truncation::throwsException);
            }
            default -> throw new IllegalArgumentException(args[0]);
        }
        int failed = tap.run();
        Suite.ADMIN.close(Duration.ofSeconds(5));
        System.exit(failed == 0 ? 0 : 1);
    }

    private static void write() throws Exception {
        createTopic(TOPIC, 1);
        createTopic(TOPIC + "-proof", 1);
        send(TOPIC, "kept-", KEPT);
        send(TOPIC, "lost-", LOST);
        for (String group : GROUPS) {
            try (KafkaConsumer<String, String> consumer = consumer(group, Map.of())) {
                consumer.assign(List.of(PARTITION));
                equal(take(consumer, KEPT + LOST).size(), KEPT + LOST, "records");
                consumer.commitSync();
            }
        }
        // A record after the lost ones proves that these were durable.
        send(TOPIC + "-proof", "proof-", 1);
    }

    /** One batch per record. */
    private static void send(String topic, String prefix, int count) throws Exception {
        try (KafkaProducer<String, String> producer = producer(Map.of())) {
            for (int n = 0; n < count; n++) {
                answer(producer.send(new ProducerRecord<>(topic, prefix + n)));
            }
        }
    }

    private static void seeksBack() throws Exception {
        send(TOPIC, "new-", NEW);
        try (KafkaConsumer<String, String> consumer = consumer("latest", Map.of("auto.offset.reset", "latest"))) {
            consumer.assign(List.of(PARTITION));
            List<ConsumerRecord<String, String>> records = take(consumer, NEW);
            equal(records.stream().map(ConsumerRecord::value).toList(), List.of("new-0", "new-1", "new-2"), "values");
            equal(records.get(0).offset(), (long) KEPT + LOST, "no offset is used twice");
            check(records.get(0).leaderEpoch().orElse(-1) > 0, "the leader epoch is greater than before the loss");
            equal(consumer.position(PARTITION), (long) KEPT + LOST + NEW, "position");
        }
    }

    private static void throwsException() throws Exception {
        try (KafkaConsumer<String, String> consumer = consumer("none", Map.of("auto.offset.reset", "none"))) {
            consumer.assign(List.of(PARTITION));
            AtomicReference<LogTruncationException> thrown = new AtomicReference<>();
            Tap.eventually("the exception", () -> {
                try {
                    consumer.poll(Duration.ofMillis(200));
                } catch (LogTruncationException truncation) {
                    thrown.set(truncation);
                }
                return thrown.get() != null;
            });
            equal(thrown.get().divergentOffsets().get(PARTITION).offset(), (long) KEPT, "the end of what is left");
        }
    }

    private Truncation() {
    }
}
