package alluvium.clients;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * One member of a consumer group as a separate process, so that a test can kill it. Commits after each poll, and prints
 * one line per event: {@code assigned P...}, {@code revoked P...}, {@code lost P...}, {@code read PARTITION OFFSET VALUE}.
 * It leaves the group when its standard input ends.
 */
public final class Member {
    /** Instead of an assignor: the server assigns (KIP-848), and also sets session timeouts and heartbeat intervals. */
    static final String BY_THE_SERVER = "consumer";

    /** Arguments: bootstrap servers, topic, group, class of the assignor or {@link #BY_THE_SERVER}. */
    public static void main(String[] args) {
        Properties config = new Properties();
        config.put(ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        config.put(ConsumerConfig.GROUP_ID_CONFIG, args[2]);
        config.put(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest");
        config.put(ConsumerConfig.ENABLE_AUTO_COMMIT_CONFIG, false);
        if (args[3].equals(BY_THE_SERVER)) {
            config.put(ConsumerConfig.GROUP_PROTOCOL_CONFIG, "consumer");
        } else {
            config.put(ConsumerConfig.PARTITION_ASSIGNMENT_STRATEGY_CONFIG, args[3]);
            config.put(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG, 6000);
            config.put(ConsumerConfig.HEARTBEAT_INTERVAL_MS_CONFIG, 500);
        }
        AtomicBoolean leaving = new AtomicBoolean();
        Thread watcher = new Thread(() -> {
            try (BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
                while (in.readLine() != null) {
                    // only its end counts
                }
            } catch (java.io.IOException closed) {
                // the same as its end
            }
            leaving.set(true);
        });
        watcher.setDaemon(true);
        watcher.start();
        try (KafkaConsumer<String, String> consumer =
                 new KafkaConsumer<>(config, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(args[1]), new Listener());
            while (!leaving.get()) {
                Map<TopicPartition, OffsetAndMetadata> ends = new HashMap<>();
                List<String> lines = new ArrayList<>();
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100))) {
                    lines.add("read " + record.partition() + " " + record.offset() + " " + record.value());
                    ends.put(new TopicPartition(record.topic(), record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
                }
                try {
                    if (!ends.isEmpty()) {
                        consumer.commitSync(ends);
                    }
                    lines.forEach(System.out::println);
                } catch (RebalanceInProgressException retry) {
                    // Not committed: the next owner of the partitions starts at the last commit.
                    ends.keySet().forEach(partition -> rewind(consumer, partition));
                }
            }
        }
        System.out.println("left");
    }

    private static void rewind(KafkaConsumer<String, String> consumer, TopicPartition partition) {
        OffsetAndMetadata committed = consumer.committed(java.util.Set.of(partition)).get(partition);
        consumer.seek(partition, committed == null ? 0 : committed.offset());
    }

    private static final class Listener implements ConsumerRebalanceListener {
        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            print("assigned", partitions);
        }

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            print("revoked", partitions);
        }

        @Override
        public void onPartitionsLost(Collection<TopicPartition> partitions) {
            print("lost", partitions);
        }

        private static void print(String event, Collection<TopicPartition> partitions) {
            StringBuilder line = new StringBuilder(event);
            partitions.forEach(each -> line.append(' ').append(each.partition()));
            System.out.println(line);
        }
    }

    private Member() {
    }
}
