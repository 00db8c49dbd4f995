package alluvium.clients;

import static alluvium.clients.Suite.ADMIN;
import static alluvium.clients.Suite.BOOTSTRAP;
import static alluvium.clients.Suite.answer;
import static alluvium.clients.Tap.check;
import static alluvium.clients.Tap.equal;
import static alluvium.clients.Tap.eventually;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.StringDeserializer;

/** Share groups of KIP-932: records are acquired individually, and released or acknowledged. */
final class ShareGroups {
    static void register(Tap tap) {
        tap.test("share groups, a consumer reads, and acknowledges implicitly", ShareGroups::implicit);
        tap.test("share groups, records are accepted, released and rejected", ShareGroups::explicit);
        tap.test("share groups, two consumers share one partition", ShareGroups::two);
        tap.test("share groups, records of a closed consumer are delivered again", ShareGroups::closed);
        tap.test("share groups, a record that every consumer fails on is archived", ShareGroups::givenUp);
        tap.test("share groups, a group is described, with its offsets", ShareGroups::described);
    }

    private static KafkaShareConsumer<String, String> consumer(String group, String acknowledgement) throws Exception {
        answer(ADMIN.incrementalAlterConfigs(Map.of(new ConfigResource(ConfigResource.Type.GROUP, group), List.of(new AlterConfigOp(
            new ConfigEntry("share.auto.offset.reset", "earliest"), AlterConfigOp.OpType.SET)))).all());
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", BOOTSTRAP);
        settings.put("group.id", group);
        settings.put("share.acknowledgement.mode", acknowledgement);
        return new KafkaShareConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
    }

    private static List<ConsumerRecord<String, String>> poll(KafkaShareConsumer<String, String> consumer) throws Exception {
        List<ConsumerRecord<String, String>> records = new ArrayList<>();
        eventually("some records", () -> {
            consumer.poll(Duration.ofMillis(200)).forEach(records::add);
            return !records.isEmpty();
        });
        return records;
    }

    private static void implicit() throws Exception {
        Admins.fill("share-implicit", 10);
        Set<String> values = new HashSet<>();
        try (KafkaShareConsumer<String, String> consumer = consumer("share-implicit", "implicit")) {
            consumer.subscribe(List.of("share-implicit"));
            while (values.size() < 10) {
                poll(consumer).forEach(record -> check(values.add(record.value()), record.value() + " came twice"));
            }
            consumer.commitSync();
        }
        try (KafkaShareConsumer<String, String> consumer = consumer("share-implicit", "implicit")) {
            consumer.subscribe(List.of("share-implicit"));
            for (int n = 0; n < 10; n++) {
                check(consumer.poll(Duration.ofMillis(200)).isEmpty(), "nothing is left");
            }
        }
    }

    private static void explicit() throws Exception {
        Admins.fill("share-explicit", 3);
        try (KafkaShareConsumer<String, String> consumer = consumer("share-explicit", "explicit")) {
            consumer.subscribe(List.of("share-explicit"));
            Map<String, Integer> deliveries = new HashMap<>();
            eventually("v0 once, v1 three times, v2 once", () -> {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(200))) {
                    int seen = deliveries.merge(record.value(), 1, Integer::sum);
                    equal((int) record.deliveryCount().get(), seen, "deliveries of " + record.value());
                    consumer.acknowledge(record, switch (record.value()) {
                        case "v1" -> seen < 3 ? AcknowledgeType.RELEASE : AcknowledgeType.ACCEPT;
                        case "v2" -> AcknowledgeType.REJECT;
                        default -> AcknowledgeType.ACCEPT;
                    });
                }
                consumer.commitSync().values().forEach(error -> check(error.isEmpty(), "error: " + error));
                return deliveries.equals(Map.of("v0", 1, "v1", 3, "v2", 1));
            });
        }
    }

    private static void two() throws Exception {
        Admins.fill("share-two", 200);
        Set<String> values = new HashSet<>();
        try (KafkaShareConsumer<String, String> first = consumer("share-two", "implicit");
            KafkaShareConsumer<String, String> second = consumer("share-two", "implicit")) {
            first.subscribe(List.of("share-two"));
            second.subscribe(List.of("share-two"));
            eventually("all records", () -> {
                for (KafkaShareConsumer<String, String> each : List.of(first, second)) {
                    each.poll(Duration.ofMillis(100)).forEach(record ->
                        check(values.add(record.value()), record.value() + " came twice"));
                }
                return values.size() == 200;
            });
        }
    }

    private static void closed() throws Exception {
        Admins.fill("share-closed", 5);
        try (KafkaShareConsumer<String, String> first = consumer("share-closed", "explicit")) {
            first.subscribe(List.of("share-closed"));
            poll(first);
        }
        Set<String> values = new HashSet<>();
        try (KafkaShareConsumer<String, String> second = consumer("share-closed", "implicit")) {
            second.subscribe(List.of("share-closed"));
            while (values.size() < 5) {
                poll(second).forEach(record -> values.add(record.value()));
            }
        }
    }

    private static void givenUp() throws Exception {
        Admins.fill("share-given-up", 1);
        for (int deliveries = 1; deliveries <= 5; deliveries++) {
            try (KafkaShareConsumer<String, String> consumer = consumer("share-given-up", "explicit")) {
                consumer.subscribe(List.of("share-given-up"));
                equal((int) poll(consumer).get(0).deliveryCount().get(), deliveries, "deliveries");
            }
        }
        try (KafkaShareConsumer<String, String> consumer = consumer("share-given-up", "implicit")) {
            consumer.subscribe(List.of("share-given-up"));
            for (int n = 0; n < 10; n++) {
                check(consumer.poll(Duration.ofMillis(200)).isEmpty(), "it is archived");
            }
        }
    }

    private static void described() throws Exception {
        Admins.fill("share-described", 5);
        try (KafkaShareConsumer<String, String> consumer = consumer("share-described", "implicit")) {
            consumer.subscribe(List.of("share-described"));
            int read = 0;
            while (read < 5) {
                read += poll(consumer).size();
            }
            consumer.commitSync();
            equal(answer(ADMIN.describeShareGroups(List.of("share-described")).all()).get("share-described").members().size(), 1, "members");
        }
        var offsets = answer(ADMIN.listShareGroupOffsets(
            Map.of("share-described", new org.apache.kafka.clients.admin.ListShareGroupOffsetsSpec())).all());
        check(!offsets.get("share-described").isEmpty(), "offsets: " + offsets);
        answer(ADMIN.deleteShareGroups(List.of("share-described")).all());
    }

    private ShareGroups() {
    }
}
