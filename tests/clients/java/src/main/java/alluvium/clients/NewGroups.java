package alluvium.clients;

import static alluvium.clients.Suite.ADMIN;
import static alluvium.clients.Suite.answer;
import static alluvium.clients.Tap.equal;
import static alluvium.clients.Tap.eventually;
import static alluvium.clients.Tap.fails;

import java.time.Duration;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.SubscriptionPattern;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.UnsupportedAssignorException;
import org.apache.kafka.common.errors.UnreleasedInstanceIdException;

/** Consumer groups of KIP-848, whose partitions the server assigns. */
final class NewGroups {
    static void register(Tap tap) {
        tap.test("new groups, a member reads, commits and resumes", NewGroups::one);
        for (String assignor : List.of("uniform", "range")) {
            tap.test("new groups, members share and hand over, " + assignor, () -> share(assignor));
        }
        tap.test("new groups, an unknown assignor is refused", NewGroups::refused);
        tap.test("new groups, a pattern is a subscription, resolved by the server", NewGroups::pattern);
        tap.test("new groups, new partitions are assigned", NewGroups::grows);
        tap.test("new groups, a static member gets its partitions back", NewGroups::statics);
        tap.test("new groups, a group is described", NewGroups::described);
        tap.test("new groups, a classic group is migrated in place, and back", NewGroups::migration);
    }

    private static KafkaConsumer<String, String> member(String group, Map<String, Object> settings) {
        Map<String, Object> all = new HashMap<>(settings);
        all.put("group.protocol", "consumer");
        return Suite.consumer(group, all);
    }

    private static void send(String topic, int partitions, int each) throws Exception {
        try (KafkaProducer<String, String> producer = Suite.producer(Map.of())) {
            for (int n = 0; n < partitions * each; n++) {
                producer.send(new ProducerRecord<>(topic, n % partitions, null, "v" + n));
            }
        }
    }

    private static void one() throws Exception {
        Suite.createTopic("new-one", 3);
        send("new-one", 3, 10);
        try (KafkaConsumer<String, String> consumer = member("new-one", Map.of())) {
            consumer.subscribe(List.of("new-one"));
            equal(Suite.take(consumer, 30).size(), 30, "records");
            consumer.commitSync();
            equal(consumer.committed(Set.of(new TopicPartition("new-one", 0))).get(new TopicPartition("new-one", 0)).offset(), 10L, "offset");
        }
        send("new-one", 3, 1);
        try (KafkaConsumer<String, String> consumer = member("new-one", Map.of())) {
            consumer.subscribe(List.of("new-one"));
            equal(Suite.take(consumer, 3).size(), 3, "records of the second member");
            consumer.commitSync(Map.of(new TopicPartition("new-one", 1), new OffsetAndMetadata(4)));
            consumer.unsubscribe();
        }
    }

    private static void share(String assignor) throws Exception {
        String topic = "new-share-" + assignor;
        Suite.createTopic(topic, 6);
        send(topic, 6, 10);
        Map<String, Object> settings = Map.of("group.remote.assignor", assignor);
        try (KafkaConsumer<String, String> first = member(topic, settings)) {
            first.subscribe(List.of(topic));
            Suite.take(first, 60);
            try (KafkaConsumer<String, String> second = member(topic, settings)) {
                second.subscribe(List.of(topic));
                eventually("three partitions each", () -> {
                    first.poll(Duration.ofMillis(50));
                    second.poll(Duration.ofMillis(50));
                    return first.assignment().size() == 3 && second.assignment().size() == 3;
                });
                Set<TopicPartition> both = new HashSet<>(first.assignment());
                both.addAll(second.assignment());
                equal(both.size(), 6, "no partition has two owners");
            }
            eventually("all partitions are returned", () -> {
                first.poll(Duration.ofMillis(50));
                return first.assignment().size() == 6;
            });
        }
    }

    private static void refused() throws Exception {
        Suite.createTopic("new-refused", 1);
        try (KafkaConsumer<String, String> consumer = member("new-refused", Map.of("group.remote.assignor", "fair"))) {
            consumer.subscribe(List.of("new-refused"));
            fails(UnsupportedAssignorException.class, () -> {
                for (int n = 0; n < 100; n++) {
                    consumer.poll(Duration.ofMillis(100));
                }
            });
        }
    }

    private static void pattern() throws Exception {
        Suite.createTopic("new-pattern-a", 1);
        Suite.createTopic("other-pattern", 1);
        try (KafkaConsumer<String, String> consumer = member("new-pattern", Map.of("metadata.max.age.ms", 1000))) {
            consumer.subscribe(new SubscriptionPattern("new-pattern-.*"));
            owns(consumer, "new-pattern-a");
            Suite.createTopic("new-pattern-b", 1);
            owns(consumer, "new-pattern-a", "new-pattern-b");
        }
    }

    private static void owns(KafkaConsumer<String, String> consumer, String... topics) throws Exception {
        eventually("partitions of " + List.of(topics), () -> {
            consumer.poll(Duration.ofMillis(50));
            Set<String> owned = new TreeSet<>();
            consumer.assignment().forEach(each -> owned.add(each.topic()));
            return owned.equals(new TreeSet<>(List.of(topics)));
        });
    }

    private static void grows() throws Exception {
        Suite.createTopic("new-grows", 1);
        try (KafkaConsumer<String, String> consumer = member("new-grows", Map.of("metadata.max.age.ms", 1000))) {
            consumer.subscribe(List.of("new-grows"));
            owns(consumer, "new-grows");
            answer(ADMIN.createPartitions(Map.of("new-grows", NewPartitions.increaseTo(4))).all());
            eventually("four partitions", () -> {
                consumer.poll(Duration.ofMillis(50));
                return consumer.assignment().size() == 4;
            });
        }
    }

    private static void statics() throws Exception {
        Suite.createTopic("new-static", 2);
        Map<String, Object> a = Map.of("group.instance.id", "a");
        try (KafkaConsumer<String, String> other = member("new-static", Map.of("group.instance.id", "b"))) {
            other.subscribe(List.of("new-static"));
            Set<TopicPartition> owned;
            try (KafkaConsumer<String, String> first = member("new-static", a)) {
                first.subscribe(List.of("new-static"));
                eventually("a partition each", () -> {
                    other.poll(Duration.ofMillis(50));
                    first.poll(Duration.ofMillis(50));
                    return other.assignment().size() == 1 && first.assignment().size() == 1;
                });
                owned = Set.copyOf(first.assignment());
                try (KafkaConsumer<String, String> twin = member("new-static", a)) {
                    twin.subscribe(List.of("new-static"));
                    fails(UnreleasedInstanceIdException.class, () -> {
                        for (int n = 0; n < 100; n++) {
                            twin.poll(Duration.ofMillis(100));
                        }
                    });
                }
            }
            try (KafkaConsumer<String, String> back = member("new-static", a)) {
                back.subscribe(List.of("new-static"));
                eventually("the partition is assigned again", () -> {
                    other.poll(Duration.ofMillis(50));
                    back.poll(Duration.ofMillis(50));
                    return back.assignment().equals(owned);
                });
                equal(other.assignment().size(), 1, "partitions of the other");
            }
        }
    }

    private static void described() throws Exception {
        Suite.createTopic("new-described", 2);
        try (KafkaConsumer<String, String> consumer = member("new-described", Map.of("client.id", "someone"))) {
            consumer.subscribe(List.of("new-described"));
            owns(consumer, "new-described");
            ConsumerGroupDescription group = describe("new-described");
            equal(group.type(), GroupType.CONSUMER, "type");
            eventually("the group is stable", () -> {
                consumer.poll(Duration.ofMillis(50));
                return describe("new-described").groupState() == GroupState.STABLE;
            });
            group = describe("new-described");
            equal(group.partitionAssignor(), "uniform", "assignor");
            var member = group.members().iterator().next();
            equal(member.clientId(), "someone", "client id");
            equal(member.assignment().topicPartitions().size(), 2, "partitions");
        }
        equal(describe("new-described").groupState(), GroupState.EMPTY, "state in the end");
    }

    private static ConsumerGroupDescription describe(String group) throws Exception {
        return answer(ADMIN.describeConsumerGroups(List.of(group)).all()).get(group);
    }

    private static void migration() throws Exception {
        Suite.createTopic("new-migration", 4);
        try (KafkaConsumer<String, String> classic = Suite.consumer("new-migration", Map.of("session.timeout.ms", 10_000))) {
            classic.subscribe(List.of("new-migration"));
            owns(classic, "new-migration");
            equal(describe("new-migration").type(), GroupType.CLASSIC, "type before");
            try (KafkaConsumer<String, String> modern = member("new-migration", Map.of())) {
                modern.subscribe(List.of("new-migration"));
                eventually("two partitions each", () -> {
                    classic.poll(Duration.ofMillis(50));
                    modern.poll(Duration.ofMillis(50));
                    return classic.assignment().size() == 2 && modern.assignment().size() == 2;
                });
                equal(describe("new-migration").type(), GroupType.CONSUMER, "type with both");
            }
            eventually("all partitions are returned", () -> {
                classic.poll(Duration.ofMillis(50));
                return classic.assignment().size() == 4;
            });
            equal(describe("new-migration").type(), GroupType.CLASSIC, "type after");
        }
    }

    private NewGroups() {
    }
}
