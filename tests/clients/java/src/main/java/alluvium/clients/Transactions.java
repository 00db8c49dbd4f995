package alluvium.clients;

import static alluvium.clients.Suite.ADMIN;
import static alluvium.clients.Suite.answer;
import static alluvium.clients.Tap.check;
import static alluvium.clients.Tap.equal;
import static alluvium.clients.Tap.eventually;
import static alluvium.clients.Tap.fails;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.AbortTransactionSpec;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.TransactionState;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TransactionalIdNotFoundException;

/** Transactional producers and read_committed consumers. */
final class Transactions {
    static void register(Tap tap) {
        tap.test("transactions, committed records are read, aborted ones are not", Transactions::commitAndAbort);
        tap.test("transactions, an open one holds committed readers back", Transactions::open);
        tap.test("transactions, one over several topics and many batches", Transactions::wide);
        tap.test("transactions, a second producer fences the first, and aborts what it had open", Transactions::fencing);
        tap.test("transactions, offsets are committed with them, or not", Transactions::offsets);
        tap.test("transactions, one that exceeds its timeout is aborted", Transactions::timeout);
        tap.test("transactions, a producer continues after a timed-out one", Transactions::goesOnLate);
        tap.test("transactions, a producer continues after an abort", Transactions::goesOn);
        tap.test("transactions, a timeout above the node's is refused", Transactions::refusedTimeout);
        tap.test("transactions, an empty one is committed", Transactions::empty);
        tap.test("transactions, read, transform, write, and each input is in the output exactly once", Transactions::pipeline);
        tap.test("transactions, they are listed and described", Transactions::described);
        tap.test("transactions, a producer is fenced by the admin client", Transactions::adminFencing);
        tap.test("transactions, a hanging one is aborted by the admin client", Transactions::adminAbort);
    }

    private static KafkaProducer<String, String> producer(String id) {
        return Suite.producer(Map.of("transactional.id", id, "max.block.ms", 20_000));
    }

    /** The values that a consumer reads from the beginning of the partition to its end. */
    private static List<String> values(String topic, boolean committed) throws Exception {
        TopicPartition partition = new TopicPartition(topic, 0);
        IsolationLevel level = committed ? IsolationLevel.READ_COMMITTED : IsolationLevel.READ_UNCOMMITTED;
        List<String> values = new ArrayList<>();
        Map<String, Object> settings = Map.of("isolation.level", committed ? "read_committed" : "read_uncommitted");
        long end = answer(ADMIN.listOffsets(Map.of(partition, OffsetSpec.latest()), new ListOffsetsOptions(level)).all())
            .get(partition).offset();
        try (KafkaConsumer<String, String> consumer = Suite.consumer("transactions", settings)) {
            consumer.assign(List.of(partition));
            consumer.seekToBeginning(List.of(partition));
            eventually("offset " + end + " of " + topic, () -> {
                consumer.poll(Duration.ofMillis(100)).forEach(record -> values.add(record.value()));
                return consumer.position(partition) >= end;
            });
        }
        return values;
    }

    private static void send(KafkaProducer<String, String> producer, String topic, String... values) throws Exception {
        for (String value : values) {
            answer(producer.send(new ProducerRecord<>(topic, 0, null, value)));
        }
    }

    private static void commitAndAbort() throws Exception {
        Suite.createTopic("txn-basic", 1);
        try (KafkaProducer<String, String> producer = producer("txn-basic"); KafkaProducer<String, String> plain = Suite.producer(Map.of())) {
            producer.initTransactions();
            producer.beginTransaction();
            send(producer, "txn-basic", "a", "b");
            producer.commitTransaction();
            send(plain, "txn-basic", "plain");
            producer.beginTransaction();
            send(producer, "txn-basic", "lost");
            producer.abortTransaction();
            producer.beginTransaction();
            send(producer, "txn-basic", "c");
            producer.commitTransaction();
        }
        equal(values("txn-basic", true), List.of("a", "b", "plain", "c"), "committed");
        equal(values("txn-basic", false), List.of("a", "b", "plain", "lost", "c"), "all");
    }

    private static void open() throws Exception {
        Suite.createTopic("txn-open", 1);
        TopicPartition partition = new TopicPartition("txn-open", 0);
        try (KafkaProducer<String, String> producer = producer("txn-open"); KafkaProducer<String, String> plain = Suite.producer(Map.of())) {
            send(plain, "txn-open", "before");
            producer.initTransactions();
            producer.beginTransaction();
            send(producer, "txn-open", "within");
            send(plain, "txn-open", "after");
            equal(values("txn-open", true), List.of("before"), "what is stable");
            equal(values("txn-open", false), List.of("before", "within", "after"), "all");
            try (KafkaConsumer<String, String> consumer = Suite.consumer("txn-open", Map.of("isolation.level", "read_committed"))) {
                equal(consumer.endOffsets(List.of(partition)).get(partition), 1L, "the last stable offset");
            }
            producer.commitTransaction();
        }
        equal(values("txn-open", true), List.of("before", "within", "after"), "after the commit");
    }

    private static void wide() throws Exception {
        Suite.createTopic("txn-wide-1", 5);
        Suite.createTopic("txn-wide-2", 5);
        try (KafkaProducer<String, String> producer = producer("txn-wide")) {
            producer.initTransactions();
            for (boolean commit : new boolean[] {true, false, true}) {
                producer.beginTransaction();
                for (int n = 0; n < 5000; n++) {
                    producer.send(new ProducerRecord<>("txn-wide-" + (n % 2 + 1), n % 5, null, commit ? "kept" : "lost"));
                }
                if (commit) {
                    producer.commitTransaction();
                } else {
                    producer.abortTransaction();
                }
            }
        }
        for (String topic : List.of("txn-wide-1", "txn-wide-2")) {
            List<String> values = values(topic, true);
            equal(values.size(), 1000, "records in a partition");
            check(!values.contains("lost"), "none of the aborted");
        }
    }

    private static void fencing() throws Exception {
        Suite.createTopic("txn-fence", 1);
        KafkaProducer<String, String> old = producer("txn-fence");
        try (KafkaProducer<String, String> successor = producer("txn-fence")) {
            old.initTransactions();
            old.beginTransaction();
            send(old, "txn-fence", "old");
            successor.initTransactions();
            fails(KafkaException.class, () -> {
                send(old, "txn-fence", "fenced");
                old.commitTransaction();
            });
            successor.beginTransaction();
            send(successor, "txn-fence", "successor");
            successor.commitTransaction();
        } finally {
            old.close(Duration.ZERO);
        }
        equal(values("txn-fence", true), List.of("successor"), "committed");
    }

    private static void offsets() throws Exception {
        Admins.fill("txn-in", 3);
        TopicPartition in = new TopicPartition("txn-in", 0);
        Suite.createTopic("txn-out", 1);
        try (KafkaProducer<String, String> producer = producer("txn-offsets");
            KafkaConsumer<String, String> consumer = Suite.consumer("txn-offsets", Map.of())) {
            producer.initTransactions();
            consumer.subscribe(List.of("txn-in"));
            Suite.take(consumer, 3);
            for (boolean commit : new boolean[] {false, true}) {
                producer.beginTransaction();
                send(producer, "txn-out", commit ? "kept" : "lost");
                producer.sendOffsetsToTransaction(Map.of(in, new OffsetAndMetadata(3, "by a transaction")), consumer.groupMetadata());
                if (commit) {
                    producer.commitTransaction();
                    eventually("the offset exists", () ->
                        new OffsetAndMetadata(3, "by a transaction").equals(consumer.committed(java.util.Set.of(in)).get(in)));
                } else {
                    producer.abortTransaction();
                    equal(consumer.committed(java.util.Set.of(in)).get(in), null, "the offset after an abort");
                }
            }
        }
        equal(values("txn-out", true), List.of("kept"), "committed");
    }

    private static void timeout() throws Exception {
        Suite.createTopic("txn-timeout", 1);
        KafkaProducer<String, String> slow = Suite.producer(Map.of("transactional.id", "txn-timeout", "transaction.timeout.ms", 2000));
        try {
            slow.initTransactions();
            slow.beginTransaction();
            send(slow, "txn-timeout", "slow");
            untilAborted("txn-timeout");
            fails(KafkaException.class, slow::commitTransaction);
        } finally {
            slow.close(Duration.ZERO);
        }
        equal(values("txn-timeout", true), List.of(), "committed");
    }

    /** Waits until a topic has one record, and the marker that ends its transaction. */
    private static void untilAborted(String topic) throws Exception {
        TopicPartition partition = new TopicPartition(topic, 0);
        eventually("the transaction is aborted", () -> answer(ADMIN.listOffsets(Map.of(partition, OffsetSpec.latest()),
            new ListOffsetsOptions(IsolationLevel.READ_COMMITTED)).all()).get(partition).offset() == 2);
    }

    private static void goesOnLate() throws Exception {
        Suite.createTopic("txn-late", 1);
        try (KafkaProducer<String, String> producer = Suite.producer(Map.of("transactional.id", "txn-late", "transaction.timeout.ms", 2000))) {
            producer.initTransactions();
            producer.beginTransaction();
            send(producer, "txn-late", "slow");
            untilAborted("txn-late");
            producer.abortTransaction();
            producer.beginTransaction();
            send(producer, "txn-late", "next");
            producer.commitTransaction();
        }
        equal(values("txn-late", true), List.of("next"), "committed");
    }

    private static void goesOn() throws Exception {
        Suite.createTopic("txn-goes-on", 1);
        try (KafkaProducer<String, String> producer = producer("txn-goes-on")) {
            producer.initTransactions();
            for (int n = 0; n < 20; n++) {
                producer.beginTransaction();
                send(producer, "txn-goes-on", String.valueOf(n));
                if (n % 3 == 0) {
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                }
            }
        }
        equal(values("txn-goes-on", true), IntStream.range(0, 20).filter(n -> n % 3 != 0).mapToObj(String::valueOf).toList(), "committed");
    }

    private static void refusedTimeout() throws Exception {
        Map<String, Object> settings = Map.of("transactional.id", "txn-long", "transaction.timeout.ms", 86_400_000);
        try (KafkaProducer<String, String> producer = Suite.producer(settings)) {
            fails(KafkaException.class, producer::initTransactions);
        }
    }

    private static void empty() throws Exception {
        try (KafkaProducer<String, String> producer = producer("txn-empty")) {
            producer.initTransactions();
            producer.beginTransaction();
            producer.commitTransaction();
            producer.beginTransaction();
            producer.abortTransaction();
        }
    }

    private static void pipeline() throws Exception {
        Admins.fill("txn-pipe-in", 500);
        Suite.createTopic("txn-pipe-out", 1);
        int done = 0;
        // Each stage is abandoned in the middle of a transaction; the next one takes over.
        for (int life = 0; done < 500; life++) {
            KafkaProducer<String, String> producer = producer("txn-pipe");
            KafkaConsumer<String, String> consumer = Suite.consumer("txn-pipe",
                Map.of("isolation.level", "read_committed", "max.poll.records", 50, "session.timeout.ms", 6000));
            TopicPartition in = new TopicPartition("txn-pipe-in", 0);
            try {
                producer.initTransactions();
                consumer.subscribe(List.of("txn-pipe-in"));
                for (int round = 0; done < 500; round++) {
                    List<ConsumerRecord<String, String>> records = Suite.take(consumer, 1);
                    producer.beginTransaction();
                    for (ConsumerRecord<String, String> record : records) {
                        producer.send(new ProducerRecord<>("txn-pipe-out", 0, record.key(), record.value()));
                    }
                    producer.flush();
                    if (life < 3 && round == 2) {
                        break;
                    }
                    long next = records.get(records.size() - 1).offset() + 1;
                    producer.sendOffsetsToTransaction(Map.of(in, new OffsetAndMetadata(next)), consumer.groupMetadata());
                    producer.commitTransaction();
                    done = (int) next;
                }
            } finally {
                producer.close(Duration.ZERO);
                consumer.close();
            }
        }
        equal(values("txn-pipe-out", true), IntStream.range(0, 500).mapToObj(n -> "v" + n).toList(), "output");
    }

    private static void described() throws Exception {
        Suite.createTopic("txn-described", 1);
        TopicPartition partition = new TopicPartition("txn-described", 0);
        try (KafkaProducer<String, String> producer = producer("txn-described")) {
            producer.initTransactions();
            producer.beginTransaction();
            send(producer, "txn-described", "open");
            var description = answer(ADMIN.describeTransactions(List.of("txn-described")).description("txn-described"));
            equal(description.state(), TransactionState.ONGOING, "state");
            equal(description.topicPartitions(), java.util.Set.of(partition), "partitions");
            equal(description.transactionTimeoutMs(), 60_000L, "timeout");
            check(answer(ADMIN.listTransactions().all()).stream().anyMatch(each ->
                each.transactionalId().equals("txn-described") && each.state() == TransactionState.ONGOING), "it is listed");
            var states = answer(ADMIN.describeProducers(List.of(partition)).partitionResult(partition)).activeProducers();
            equal(states.get(0).currentTransactionStartOffset().getAsLong(), 0L, "where it begins");
            producer.commitTransaction();
            eventually("the transaction is complete", () ->
                answer(ADMIN.describeTransactions(List.of("txn-described")).description("txn-described")).state()
                    == TransactionState.COMPLETE_COMMIT);
        }
        fails(TransactionalIdNotFoundException.class,
            () -> answer(ADMIN.describeTransactions(List.of("txn-nowhere")).all()));
    }

    private static void adminFencing() throws Exception {
        Suite.createTopic("txn-admin-fence", 1);
        KafkaProducer<String, String> producer = producer("txn-admin-fence");
        try {
            producer.initTransactions();
            producer.beginTransaction();
            send(producer, "txn-admin-fence", "fenced");
            answer(ADMIN.fenceProducers(List.of("txn-admin-fence")).all());
            fails(KafkaException.class, producer::commitTransaction);
        } finally {
            producer.close(Duration.ZERO);
        }
        equal(values("txn-admin-fence", true), List.of(), "committed");
    }

    private static void adminAbort() throws Exception {
        Suite.createTopic("txn-admin-abort", 1);
        TopicPartition partition = new TopicPartition("txn-admin-abort", 0);
        KafkaProducer<String, String> producer = producer("txn-admin-abort");
        try {
            producer.initTransactions();
            producer.beginTransaction();
            send(producer, "txn-admin-abort", "hangs");
            var state = answer(ADMIN.describeProducers(List.of(partition)).partitionResult(partition)).activeProducers().get(0);
            answer(ADMIN.abortTransaction(new AbortTransactionSpec(partition, state.producerId(), (short) state.producerEpoch(),
                state.coordinatorEpoch().orElse(0))).all());
            eventually("the partition is stable", () -> answer(ADMIN.listOffsets(Map.of(partition, OffsetSpec.latest()),
                new ListOffsetsOptions(IsolationLevel.READ_COMMITTED)).all()).get(partition).offset() == 2);
        } finally {
            producer.close(Duration.ZERO);
        }
        equal(values("txn-admin-abort", true), List.of(), "committed");
    }

    private Transactions() {
    }
}
