package alluvium.clients;

import static alluvium.clients.Suite.ADMIN;
import static alluvium.clients.Suite.answer;
import static alluvium.clients.Tap.check;
import static alluvium.clients.Tap.equal;
import static alluvium.clients.Tap.eventually;
import static alluvium.clients.Tap.fails;

import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.CreatePartitionsOptions;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.CreateTopicsResult;
import org.apache.kafka.clients.admin.DescribeClusterOptions;
import org.apache.kafka.clients.admin.DescribeConfigsOptions;
import org.apache.kafka.clients.admin.DescribeTopicsOptions;
import org.apache.kafka.clients.admin.FeatureMetadata;
import org.apache.kafka.clients.admin.ListConfigResourcesOptions;
import org.apache.kafka.clients.admin.ListGroupsOptions;
import org.apache.kafka.clients.admin.LogDirDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.admin.ScramCredentialInfo;
import org.apache.kafka.clients.admin.ScramMechanism;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.admin.UserScramCredentialDeletion;
import org.apache.kafka.clients.admin.UserScramCredentialUpsertion;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.GroupState;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.TopicCollection;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.acl.AccessControlEntry;
import org.apache.kafka.common.acl.AccessControlEntryFilter;
import org.apache.kafka.common.acl.AclBinding;
import org.apache.kafka.common.acl.AclBindingFilter;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.ElectionNotNeededException;
import org.apache.kafka.common.errors.GroupNotEmptyException;
import org.apache.kafka.common.errors.GroupSubscribedToTopicException;
import org.apache.kafka.common.errors.InvalidConfigurationException;
import org.apache.kafka.common.errors.InvalidPartitionsException;
import org.apache.kafka.common.errors.InvalidReplicationFactorException;
import org.apache.kafka.common.errors.InvalidTopicException;
import org.apache.kafka.common.errors.OffsetOutOfRangeException;
import org.apache.kafka.common.errors.UnknownTopicIdException;
import org.apache.kafka.common.errors.UnknownTopicOrPartitionException;
import org.apache.kafka.common.quota.ClientQuotaAlteration;
import org.apache.kafka.common.quota.ClientQuotaEntity;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.quota.ClientQuotaFilterComponent;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourcePatternFilter;
import org.apache.kafka.common.resource.ResourceType;

/** The Admin client's calls, one test for each group of related calls. */
final class Admins {
    static void register(Tap tap) {
        tap.test("admin, a topic is only validated, and its settings are returned", Admins::validateOnly);
        tap.test("admin, invalid settings of a topic are refused", Admins::refusals);
        tap.test("admin, topics are described and deleted by id", Admins::topicIds);
        tap.test("admin, settings of a topic are changed, appended to and reset", Admins::configs);
        tap.test("admin, settings are described with types, sources and documentation", Admins::configDocumentation);
        tap.test("admin, resources with settings are listed", Admins::configResources);
        tap.test("admin, records are deleted", Admins::deleteRecords);
        tap.test("admin, offsets are listed by every specification", Admins::listOffsets);
        tap.test("admin, log directories are described", Admins::logDirs);
        tap.test("admin, features are described", Admins::features);
        tap.test("admin, the quorum is described", Admins::quorum);
        tap.test("admin, leaders are elected and partitions reassigned as on one node", Admins::replicas);
        tap.test("admin, producers of a partition are described", Admins::producers);
        tap.test("admin, authorized operations are returned", Admins::authorizedOperations);
        tap.test("admin, ACLs are created, described and deleted", Admins::acls);
        tap.test("admin, quotas are set, described and removed", Admins::quotas);
        tap.test("admin, SCRAM users are created, described and deleted", Admins::scram);
        tap.test("admin, groups are listed by state and type", Admins::listGroups);
        tap.test("admin, offsets of a group are deleted, then the group", Admins::deleteGroups);
        tap.test("admin, members are removed from a group", Admins::removeMembers);
    }

    private static void validateOnly() throws Exception {
        NewTopic topic = new NewTopic("admin-validated", 3, (short) 1).configs(Map.of("retention.ms", "1234567"));
        CreateTopicsResult result = ADMIN.createTopics(List.of(topic), new CreateTopicsOptions().validateOnly(true));
        answer(result.all());
        check(!answer(ADMIN.listTopics().names()).contains("admin-validated"), "nothing was created");
        result = ADMIN.createTopics(List.of(topic));
        equal(answer(result.numPartitions("admin-validated")), 3, "partitions");
        equal(answer(result.replicationFactor("admin-validated")), 1, "replicas");
        check(!answer(result.topicId("admin-validated")).equals(Uuid.ZERO_UUID), "the topic has an id");
        equal(answer(result.config("admin-validated")).get("retention.ms").value(), "1234567", "retention.ms");
        answer(ADMIN.createPartitions(Map.of("admin-validated", NewPartitions.increaseTo(9)),
            new CreatePartitionsOptions().validateOnly(true)).all());
        equal(describe("admin-validated").partitions().size(), 3, "partitions after a validation");
        NewTopic defaults = new NewTopic("admin-defaults", Optional.empty(), Optional.empty());
        answer(ADMIN.createTopics(List.of(defaults)).all());
        NewTopic assigned = new NewTopic("admin-assigned", Map.of(0, List.of(nodeId()), 1, List.of(nodeId())));
        answer(ADMIN.createTopics(List.of(assigned)).all());
        equal(describe("admin-assigned").partitions().size(), 2, "partitions by assignment");
    }

    private static void refusals() throws Exception {
        fails(InvalidTopicException.class, () -> create(new NewTopic("a/b", 1, (short) 1)));
        fails(InvalidTopicException.class, () -> create(new NewTopic("..", 1, (short) 1)));
        fails(InvalidTopicException.class, () -> create(new NewTopic("x".repeat(250), 1, (short) 1)));
        fails(InvalidPartitionsException.class, () -> create(new NewTopic("admin-none", 0, (short) 1)));
        fails(InvalidReplicationFactorException.class, () -> create(new NewTopic("admin-many", 1, (short) 3)));
        fails(InvalidConfigurationException.class, () -> create(
            new NewTopic("admin-odd", 1, (short) 1).configs(Map.of("no.such.setting", "1"))));
        fails(InvalidConfigurationException.class, () -> create(
            new NewTopic("admin-odd", 1, (short) 1).configs(Map.of("retention.ms", "soon"))));
        Suite.createTopic("admin.collision_1", 1);
        fails(InvalidTopicException.class, () -> create(new NewTopic("admin_collision.1", 1, (short) 1)));
        fails(UnknownTopicOrPartitionException.class, () -> answer(ADMIN.deleteTopics(List.of("admin-nowhere")).all()));
        fails(UnknownTopicOrPartitionException.class, () -> answer(
            ADMIN.createPartitions(Map.of("admin-nowhere", NewPartitions.increaseTo(9))).all()));
    }

    private static void topicIds() throws Exception {
        Suite.createTopic("admin-ids", 2);
        Uuid id = describe("admin-ids").topicId();
        Map<Uuid, TopicDescription> described =
            answer(ADMIN.describeTopics(TopicCollection.ofTopicIds(List.of(id))).allTopicIds());
        equal(described.get(id).name(), "admin-ids", "name by id");
        answer(ADMIN.deleteTopics(TopicCollection.ofTopicIds(List.of(id))).all());
        eventually("the topic is gone", () -> !answer(ADMIN.listTopics().names()).contains("admin-ids"));
        fails(UnknownTopicIdException.class,
            () -> answer(ADMIN.describeTopics(TopicCollection.ofTopicIds(List.of(id))).allTopicIds()));
    }

    private static void configs() throws Exception {
        Suite.createTopic("admin-configs", 1);
        alter("admin-configs", op("retention.ms", "7200000", AlterConfigOp.OpType.SET),
            op("cleanup.policy", "compact", AlterConfigOp.OpType.APPEND));
        Config config = topicConfig("admin-configs");
        equal(config.get("retention.ms").value(), "7200000", "retention.ms");
        equal(config.get("retention.ms").source(), ConfigEntry.ConfigSource.DYNAMIC_TOPIC_CONFIG, "its source");
        equal(Set.of(config.get("cleanup.policy").value().split(",")), Set.of("compact", "delete"), "cleanup.policy");
        alter("admin-configs", op("retention.ms", null, AlterConfigOp.OpType.DELETE),
            op("cleanup.policy", "delete", AlterConfigOp.OpType.SUBTRACT));
        config = topicConfig("admin-configs");
        equal(config.get("retention.ms").value(), "604800000", "retention.ms by default");
        equal(config.get("retention.ms").source(), ConfigEntry.ConfigSource.DEFAULT_CONFIG, "its source");
        equal(config.get("cleanup.policy").value(), "compact", "cleanup.policy");
        for (String[] odd : new String[][] {{"no.such.setting", "1"}, {"retention.ms", "soon"}, {"cleanup.policy", "burn"},
            {"min.cleanable.dirty.ratio", "1.5"}, {"compression.type", "middle-out"}, {"max.message.bytes", "-5"}}) {
            fails(InvalidConfigurationException.class,
                () -> alter("admin-configs", op(odd[0], odd[1], AlterConfigOp.OpType.SET)));
        }
        fails(UnknownTopicOrPartitionException.class,
            () -> alter("admin-nowhere", op("retention.ms", "1", AlterConfigOp.OpType.SET)));
    }

    private static void configDocumentation() throws Exception {
        Suite.createTopic("admin-documented", 1);
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, "admin-documented");
        Config config = answer(ADMIN.describeConfigs(List.of(resource),
            new DescribeConfigsOptions().includeDocumentation(true).includeSynonyms(true)).all()).get(resource);
        for (String name : List.of("cleanup.policy", "compression.type", "delete.retention.ms", "file.delete.delay.ms",
            "flush.messages", "flush.ms", "index.interval.bytes", "max.compaction.lag.ms", "max.message.bytes",
            "message.timestamp.after.max.ms", "message.timestamp.before.max.ms", "message.timestamp.type",
            "min.cleanable.dirty.ratio", "min.compaction.lag.ms", "min.insync.replicas", "preallocate", "retention.bytes",
            "retention.ms", "segment.bytes", "segment.index.bytes", "segment.jitter.ms", "segment.ms",
            "unclean.leader.election.enable")) {
            ConfigEntry entry = config.get(name);
            check(entry != null, "there is " + name);
            check(entry.type() != ConfigEntry.ConfigType.UNKNOWN, "the type of " + name + ": " + entry.type());
            check(entry.documentation() != null && !entry.documentation().isEmpty(), "documentation of " + name);
            check(!entry.isReadOnly() && !entry.isSensitive(), name + " may be read and changed");
        }
        equal(config.get("retention.ms").type(), ConfigEntry.ConfigType.LONG, "type of retention.ms");
        equal(config.get("cleanup.policy").type(), ConfigEntry.ConfigType.LIST, "type of cleanup.policy");
        ConfigResource node = new ConfigResource(ConfigResource.Type.BROKER, String.valueOf(nodeId()));
        Config broker = answer(ADMIN.describeConfigs(List.of(node)).all()).get(node);
        for (String name : List.of("message.max.bytes", "num.partitions", "log.retention.ms", "log.cleanup.policy",
            "auto.create.topics.enable", "offsets.retention.minutes", "transactional.id.expiration.ms")) {
            check(broker.get(name) != null, "the node has " + name);
        }
    }

    private static void configResources() throws Exception {
        Suite.createTopic("admin-resource", 1);
        Collection<ConfigResource> topics = answer(ADMIN.listConfigResources(Set.of(ConfigResource.Type.TOPIC),
            new ListConfigResourcesOptions()).all());
        check(topics.contains(new ConfigResource(ConfigResource.Type.TOPIC, "admin-resource")), "listed: " + topics);
        Collection<ConfigResource> brokers = answer(ADMIN.listConfigResources(Set.of(ConfigResource.Type.BROKER),
            new ListConfigResourcesOptions()).all());
        check(brokers.contains(new ConfigResource(ConfigResource.Type.BROKER, String.valueOf(nodeId()))),
            "listed: " + brokers);
    }

    private static void deleteRecords() throws Exception {
        fill("admin-delete", 10);
        TopicPartition partition = new TopicPartition("admin-delete", 0);
        equal(answer(ADMIN.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(4))).lowWatermarks().get(partition))
            .lowWatermark(), 4L, "low watermark");
        equal(offset(partition, OffsetSpec.earliest()), 4L, "the beginning");
        try (KafkaConsumer<String, String> consumer = Suite.consumer("admin-delete", Map.of())) {
            consumer.assign(List.of(partition));
            consumer.seekToBeginning(List.of(partition));
            List<ConsumerRecord<String, String>> records = Suite.take(consumer, 6);
            equal(records.get(0).offset(), 4L, "first offset");
        }
        fails(OffsetOutOfRangeException.class,
            () -> answer(ADMIN.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(11))).all()));
        answer(ADMIN.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(-1))).all());
        equal(offset(partition, OffsetSpec.earliest()), 10L, "the beginning after all were deleted");
        equal(offset(partition, OffsetSpec.latest()), 10L, "the end");
    }

    private static void listOffsets() throws Exception {
        Suite.createTopic("admin-offsets", 1);
        TopicPartition partition = new TopicPartition("admin-offsets", 0);
        equal(offset(partition, OffsetSpec.maxTimestamp()), -1L, "no newest record in an empty partition");
        try (KafkaProducer<String, String> producer = Suite.producer(Map.of())) {
            for (long time : new long[] {1_000, 5_000, 3_000}) {
                answer(producer.send(new ProducerRecord<>("admin-offsets", 0, time, null, "v")));
            }
        }
        equal(offset(partition, OffsetSpec.earliest()), 0L, "earliest");
        equal(offset(partition, OffsetSpec.latest()), 3L, "latest");
        equal(offset(partition, OffsetSpec.maxTimestamp()), 1L, "the newest");
        equal(offset(partition, OffsetSpec.forTimestamp(2_000)), 1L, "by time");
        equal(offset(partition, OffsetSpec.forTimestamp(6_000)), -1L, "by a future time");
        equal(offset(partition, OffsetSpec.earliestLocal()), 0L, "earliest on the node");
        equal(offset(partition, OffsetSpec.latestTiered()), -1L, "latest in a tier, without tiers");
    }

    private static void logDirs() throws Exception {
        fill("admin-dirs", 5);
        Map<String, LogDirDescription> dirs = answer(ADMIN.describeLogDirs(List.of(nodeId())).allDescriptions()).get(nodeId());
        equal(dirs.size(), 1, "directories");
        LogDirDescription dir = dirs.values().iterator().next();
        check(dir.replicaInfos().get(new TopicPartition("admin-dirs", 0)).size() > 0, "the partition has a size");
    }

    private static void features() throws Exception {
        FeatureMetadata features = answer(ADMIN.describeFeatures().featureMetadata());
        for (String name : List.of("metadata.version", "transaction.version", "group.version")) {
            check(features.finalizedFeatures().containsKey(name), name + " is in " + features.finalizedFeatures());
        }
    }

    private static void quorum() throws Exception {
        equal(answer(ADMIN.describeMetadataQuorum().quorumInfo()).voters().size(), 1, "voters");
    }

    private static void replicas() throws Exception {
        Suite.createTopic("admin-replicas", 1);
        TopicPartition partition = new TopicPartition("admin-replicas", 0);
        Optional<Throwable> outcome =
            answer(ADMIN.electLeaders(ElectionType.PREFERRED, Set.of(partition)).partitions()).get(partition);
        check(outcome.isPresent() && outcome.get() instanceof ElectionNotNeededException, "outcome: " + outcome);
        equal(answer(ADMIN.listPartitionReassignments().reassignments()), Map.of(), "reassignments");
    }

    private static void producers() throws Exception {
        fill("admin-producers", 3);
        TopicPartition partition = new TopicPartition("admin-producers", 0);
        var states = answer(ADMIN.describeProducers(List.of(partition)).partitionResult(partition)).activeProducers();
        equal(states.size(), 1, "producers");
        equal(states.get(0).lastSequence(), 2, "the last sequence");
        check(states.get(0).currentTransactionStartOffset().isEmpty(), "there is no transaction");
    }

    private static void authorizedOperations() throws Exception {
        Suite.createTopic("admin-operations", 1);
        TopicDescription topic = answer(ADMIN.describeTopics(List.of("admin-operations"),
            new DescribeTopicsOptions().includeAuthorizedOperations(true)).allTopicNames()).get("admin-operations");
        check(topic.authorizedOperations().containsAll(Set.of(AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE)),
            "of a topic: " + topic.authorizedOperations());
        Set<AclOperation> cluster = answer(ADMIN.describeCluster(
            new DescribeClusterOptions().includeAuthorizedOperations(true)).authorizedOperations());
        check(cluster.containsAll(Set.of(AclOperation.CREATE, AclOperation.ALTER)), "of the cluster: " + cluster);
        check(topic.authorizedOperations().stream().noneMatch(each -> each == AclOperation.UNKNOWN), "all are known");
    }

    private static void acls() throws Exception {
        AclBinding read = new AclBinding(new ResourcePattern(ResourceType.TOPIC, "admin-acl", PatternType.LITERAL),
            new AccessControlEntry("User:alice", "*", AclOperation.READ, AclPermissionType.ALLOW));
        AclBinding group = new AclBinding(new ResourcePattern(ResourceType.GROUP, "admin-", PatternType.PREFIXED),
            new AccessControlEntry("User:bob", "10.0.0.1", AclOperation.ALL, AclPermissionType.DENY));
        answer(ADMIN.createAcls(List.of(read, group)).all());
        equal(Set.copyOf(answer(ADMIN.describeAcls(AclBindingFilter.ANY).values())), Set.of(read, group), "all ACLs");
        AclBindingFilter matching = new AclBindingFilter(
            new ResourcePatternFilter(ResourceType.GROUP, "admin-group", PatternType.MATCH), AccessControlEntryFilter.ANY);
        equal(Set.copyOf(answer(ADMIN.describeAcls(matching).values())), Set.of(group), "ACLs that match");
        equal(Set.copyOf(answer(ADMIN.deleteAcls(List.of(read.toFilter())).all())), Set.of(read), "deleted");
        answer(ADMIN.deleteAcls(List.of(AclBindingFilter.ANY)).all());
        check(answer(ADMIN.describeAcls(AclBindingFilter.ANY).values()).isEmpty(), "all are gone");
    }

    private static void quotas() throws Exception {
        ClientQuotaEntity entity = new ClientQuotaEntity(Map.of(ClientQuotaEntity.USER, "alice", ClientQuotaEntity.CLIENT_ID, "app"));
        quota(entity, "producer_byte_rate", 4096.0);
        quota(entity, "request_percentage", 12.5);
        ClientQuotaFilter filter = ClientQuotaFilter.contains(
            List.of(ClientQuotaFilterComponent.ofEntity(ClientQuotaEntity.USER, "alice")));
        equal(answer(ADMIN.describeClientQuotas(filter).entities()),
            Map.of(entity, Map.of("producer_byte_rate", 4096.0, "request_percentage", 12.5)), "quotas");
        quota(entity, "producer_byte_rate", null);
        quota(entity, "request_percentage", null);
        equal(answer(ADMIN.describeClientQuotas(filter).entities()), Map.of(), "quotas");
    }

    private static void quota(ClientQuotaEntity entity, String key, Double value) throws Exception {
        answer(ADMIN.alterClientQuotas(List.of(new ClientQuotaAlteration(entity,
            List.of(new ClientQuotaAlteration.Op(key, value))))).all());
    }

    private static void scram() throws Exception {
        ScramCredentialInfo info = new ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192);
        answer(ADMIN.alterUserScramCredentials(List.of(new UserScramCredentialUpsertion("carol", info, "secret"))).all());
        eventually("the user is described", () -> answer(ADMIN.describeUserScramCredentials().users()).contains("carol"));
        equal(answer(ADMIN.describeUserScramCredentials(List.of("carol")).description("carol")).credentialInfos(),
            List.of(info), "credentials");
        answer(ADMIN.alterUserScramCredentials(
            List.of(new UserScramCredentialDeletion("carol", ScramMechanism.SCRAM_SHA_512))).all());
        eventually("the user is gone", () -> !answer(ADMIN.describeUserScramCredentials().users()).contains("carol"));
    }

    private static void listGroups() throws Exception {
        fill("admin-groups", 3);
        try (KafkaConsumer<String, String> consumer = Suite.consumer("admin-group-live", Map.of())) {
            consumer.subscribe(List.of("admin-groups"));
            Suite.take(consumer, 3);
            check(groups(new ListGroupsOptions().inGroupStates(Set.of(GroupState.STABLE))).contains("admin-group-live"),
                "it is stable");
            check(!groups(new ListGroupsOptions().inGroupStates(Set.of(GroupState.EMPTY))).contains("admin-group-live"),
                "it is not empty");
            check(groups(new ListGroupsOptions().withTypes(Set.of(GroupType.CLASSIC))).contains("admin-group-live"),
                "it is of the classic type");
            check(!groups(new ListGroupsOptions().withTypes(Set.of(GroupType.CONSUMER))).contains("admin-group-live"),
                "it is not of the new type");
            equal(answer(ADMIN.describeClassicGroups(List.of("admin-group-live")).all()).get("admin-group-live").members().size(),
                1, "members of the classic group");
            fails(GroupNotEmptyException.class,
                () -> answer(ADMIN.deleteConsumerGroups(List.of("admin-group-live")).all()));
        }
    }

    private static void deleteGroups() throws Exception {
        fill("admin-delete-groups", 3);
        TopicPartition partition = new TopicPartition("admin-delete-groups", 0);
        try (KafkaConsumer<String, String> consumer = Suite.consumer("admin-delete-group", Map.of())) {
            consumer.subscribe(List.of("admin-delete-groups"));
            Suite.take(consumer, 3);
            consumer.commitSync();
            fails(GroupSubscribedToTopicException.class,
                () -> answer(ADMIN.deleteConsumerGroupOffsets("admin-delete-group", Set.of(partition)).all()));
        }
        answer(ADMIN.deleteConsumerGroupOffsets("admin-delete-group", Set.of(partition)).all());
        Map<TopicPartition, OffsetAndMetadata> offsets =
            answer(ADMIN.listConsumerGroupOffsets("admin-delete-group").partitionsToOffsetAndMetadata());
        check(offsets.get(partition) == null, "no offset is left: " + offsets);
        // Without offsets and members the group may already have been deleted.
        answer(ADMIN.alterConsumerGroupOffsets("admin-delete-group", Map.of(partition, new OffsetAndMetadata(1))).all());
        answer(ADMIN.deleteConsumerGroups(List.of("admin-delete-group")).all());
        check(!groups(new ListGroupsOptions()).contains("admin-delete-group"), "it is gone");
    }

    private static void removeMembers() throws Exception {
        fill("admin-remove", 3);
        try (KafkaConsumer<String, String> consumer = Suite.consumer("admin-remove-group", Map.of())) {
            consumer.subscribe(List.of("admin-remove"));
            Suite.take(consumer, 3);
            answer(ADMIN.removeMembersFromConsumerGroup("admin-remove-group", new RemoveMembersFromConsumerGroupOptions()).all());
            eventually("the group is empty", () ->
                groups(new ListGroupsOptions().inGroupStates(Set.of(GroupState.EMPTY))).contains("admin-remove-group"));
        }
    }

    private static Set<String> groups(ListGroupsOptions options) throws Exception {
        return answer(ADMIN.listGroups(options).all()).stream().map(each -> each.groupId()).collect(Collectors.toSet());
    }

    private static int nodeId() throws Exception {
        return answer(ADMIN.describeCluster().nodes()).iterator().next().id();
    }

    private static void create(NewTopic topic) throws Exception {
        answer(ADMIN.createTopics(List.of(topic)).all());
    }

    private static TopicDescription describe(String topic) throws Exception {
        return answer(ADMIN.describeTopics(List.of(topic)).allTopicNames()).get(topic);
    }

    private static Config topicConfig(String topic) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        return answer(ADMIN.describeConfigs(List.of(resource)).all()).get(resource);
    }

    private static AlterConfigOp op(String name, String value, AlterConfigOp.OpType type) {
        return new AlterConfigOp(new ConfigEntry(name, value), type);
    }

    private static void alter(String topic, AlterConfigOp... ops) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        answer(ADMIN.incrementalAlterConfigs(Map.of(resource, List.of(ops))).all());
    }

    private static long offset(TopicPartition partition, OffsetSpec spec) throws Exception {
        return answer(ADMIN.listOffsets(Map.of(partition, spec)).all()).get(partition).offset();
    }

    /** A topic with one partition and some records. */
    static void fill(String topic, int records) throws Exception {
        Suite.createTopic(topic, 1);
        try (KafkaProducer<String, String> producer = Suite.producer(Map.of())) {
            for (int n = 0; n < records; n++) {
                answer(producer.send(new ProducerRecord<>(topic, 0, "k" + n, "v" + n)));
            }
        }
    }

    private Admins() {
    }
}
