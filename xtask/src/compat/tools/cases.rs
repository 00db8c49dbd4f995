//! The cases of each tool. Each case builds on the previous ones; all of them hold for Apache
//! Kafka.

/// One command.
pub(in crate::compat) struct Case {
    pub(in crate::compat) tool: &'static str,
    pub(in crate::compat) what: &'static str,
    /// Arguments in addition to the server's address. `$FILES` is the directory with [`FILES`].
    pub(in crate::compat) arguments: &'static str,
    /// Its standard input.
    pub(in crate::compat) input: &'static str,
    pub(in crate::compat) ends: Ends,
    /// Lines that it must print, or must not print after a `!`; `*` matches anything, and one space
    /// matches several.
    pub(in crate::compat) prints: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::compat) enum Ends {
    Well,
    /// With a non-zero exit code.
    Badly,
}

pub(in crate::compat) const fn well(
    tool: &'static str,
    what: &'static str,
    arguments: &'static str,
    prints: &'static [&'static str],
) -> Case {
    Case { tool, what, arguments, input: "", ends: Ends::Well, prints }
}

pub(in crate::compat) const fn badly(
    tool: &'static str,
    what: &'static str,
    arguments: &'static str,
    prints: &'static [&'static str],
) -> Case {
    Case { tool, what, arguments, input: "", ends: Ends::Badly, prints }
}

pub(in crate::compat) const fn fed(
    tool: &'static str,
    what: &'static str,
    arguments: &'static str,
    input: &'static str,
) -> Case {
    Case { tool, what, arguments, input, ends: Ends::Well, prints: &["!*ERROR*", "!*Exception*"] }
}

/// Files that arguments name.
pub(super) const FILES: &[(&str, &str)] = &[
    ("offsets.json", r#"{"version":1,"partitions":[{"topic":"perf","partition":0,"offset":400}]}"#),
    ("beyond.json", r#"{"version":1,"partitions":[{"topic":"perf","partition":0,"offset":4000}]}"#),
    ("fast.properties", "acks=1\nlinger.ms=5\n"),
];

/// The cases, in the order in which they run.
pub(super) const CASES: &[Case] = &[
    // The cluster.
    well("cluster", "the cluster ID is shown", "cluster-id", &["Cluster ID: *"]),
    well(
        "cluster",
        "endpoints are listed",
        "list-endpoints",
        &["ID HOST PORT *", "* 127.0.0.1 * broker"],
    ),
    well(
        "broker-api-versions",
        "the node reports its API versions",
        "",
        &[
            "127.0.0.1:* (id: * rack: *) -> (",
            "Produce(0): * to 13 [usable: 13],",
            "Metadata(3): 0 to 13 [usable: 13],",
        ],
    ),
    well(
        "features",
        "are described",
        "describe",
        &["Feature: metadata.version*", "Feature: transaction.version*"],
    ),
    well(
        "features",
        "a feature is kept at its level",
        "upgrade --feature transaction.version=2",
        &["transaction.version was upgraded to 2."],
    ),
    badly(
        "features",
        "a feature is not raised beyond the server's level",
        "upgrade --feature group.version=9",
        &["*Invalid update version 9 for feature group.version.*"],
    ),
    badly(
        "features",
        "an unknown feature is not raised",
        "upgrade --feature no.such=1",
        &["*Invalid update version 1 for feature no.such. Local controller * does not support*"],
    ),
    well(
        "metadata-quorum",
        "its status is described",
        "describe --status",
        &["ClusterId: *", "LeaderId: *"],
    ),
    // Topics.
    well(
        "topics",
        "a topic is created",
        "--create --topic tools --partitions 3 --replication-factor 1 \
         --config retention.ms=3600000",
        &["Created topic tools."],
    ),
    badly(
        "topics",
        "a topic is not created twice",
        "--create --topic tools",
        &["*TopicExistsException*"],
    ),
    well(
        "topics",
        "an existing topic is accepted with --if-not-exists",
        "--create --topic tools --if-not-exists",
        &["!*rror*"],
    ),
    badly(
        "topics",
        "an invalid name is refused",
        "--create --topic a/b",
        &["*InvalidTopicException*"],
    ),
    badly(
        "topics",
        "a topic with no partitions is refused",
        "--create --topic none --partitions 0",
        &["*partitions*"],
    ),
    badly(
        "topics",
        "more replicas than nodes are refused",
        "--create --topic many --replication-factor 3",
        &["*eplication factor*"],
    ),
    badly(
        "topics",
        "an unknown setting is refused",
        "--create --topic odd --config no.such.setting=1",
        &["*no.such.setting*"],
    ),
    badly(
        "topics",
        "an invalid value of a setting is refused",
        "--create --topic odd --config retention.ms=soon",
        &["*retention.ms*"],
    ),
    well("topics", "topics are listed", "--list", &["tools", "!odd", "!many"]),
    well(
        "topics",
        "a topic is described",
        "--describe --topic tools",
        &[
            "Topic: tools TopicId: * PartitionCount: 3 ReplicationFactor: 1 Configs: \
             *retention.ms=3600000*",
            "Topic: tools Partition: 2 Leader: * Replicas: * Isr: * Elr:* LastKnownElr:*",
        ],
    ),
    well(
        "topics",
        "no partition is under-replicated",
        "--describe --under-replicated-partitions",
        &["!*Partition:*"],
    ),
    well(
        "topics",
        "no partition is unavailable",
        "--describe --unavailable-partitions",
        &["!*Partition:*"],
    ),
    well(
        "topics",
        "a topic with its own settings is found",
        "--describe --topics-with-overrides",
        &["Topic: tools *"],
    ),
    badly(
        "topics",
        "a missing topic is not described",
        "--describe --topic nowhere",
        &["*Topic 'nowhere' does not exist as expected*"],
    ),
    well(
        "topics",
        "a topic gets more partitions",
        "--alter --topic tools --partitions 5",
        &["!*rror*"],
    ),
    well(
        "topics",
        "the new partitions are described",
        "--describe --topic tools",
        &["Topic: tools *PartitionCount: 5 *"],
    ),
    badly(
        "topics",
        "a topic does not get fewer partitions",
        "--alter --topic tools --partitions 2",
        &["*5 partition*"],
    ),
    well(
        "topics",
        "a compacted topic is created",
        "--create --topic compacted --config cleanup.policy=compact",
        &["Created topic compacted."],
    ),
    // Settings.
    well(
        "configs",
        "a topic's setting is changed",
        "--alter --entity-type topics --entity-name tools \
         --add-config max.message.bytes=2000,file.delete.delay.ms=[30000]",
        &["Completed updating config for topic tools."],
    ),
    well(
        "configs",
        "a topic's own settings are described",
        "--describe --entity-type topics --entity-name tools",
        &[
            "max.message.bytes=2000 sensitive=false \
             synonyms={DYNAMIC_TOPIC_CONFIG:max.message.bytes=2000, *}",
            "file.delete.delay.ms=30000 *",
            "retention.ms=3600000 *",
            "!segment.bytes=*",
        ],
    ),
    well(
        "configs",
        "all settings of a topic are described",
        "--describe --all --entity-type topics --entity-name tools",
        &[
            "min.cleanable.dirty.ratio=0.5 *",
            "compression.type=producer *",
            "message.timestamp.type=CreateTime *",
            "retention.bytes=-1 *",
        ],
    ),
    well(
        "configs",
        "a topic's setting is reset to the default",
        "--alter --entity-type topics --entity-name tools --delete-config max.message.bytes",
        &["Completed updating config for topic tools."],
    ),
    well(
        "configs",
        "it no longer exists",
        "--describe --entity-type topics --entity-name tools",
        &["!max.message.bytes=*", "retention.ms=3600000 *"],
    ),
    badly(
        "configs",
        "an unknown setting is refused",
        "--alter --entity-type topics --entity-name tools --add-config no.such.setting=1",
        &["*no.such.setting*"],
    ),
    badly(
        "configs",
        "an invalid value is refused",
        "--alter --entity-type topics --entity-name tools --add-config min.cleanable.dirty.ratio=7",
        &["*min.cleanable.dirty.ratio*"],
    ),
    badly(
        "configs",
        "settings of a missing topic are refused",
        "--alter --entity-type topics --entity-name nowhere --add-config retention.ms=1",
        &["*nowhere*"],
    ),
    well(
        "configs",
        "all settings of the node are described",
        "--describe --all --entity-type brokers --entity-name 1",
        &["*message.max.bytes=*", "*num.partitions=*", "*log.retention.*"],
    ),
    well(
        "configs",
        "settings of all nodes are changed",
        "--alter --entity-type brokers --entity-default --add-config log.retention.ms=7200000",
        &["Completed updating default config for brokers in the cluster."],
    ),
    well(
        "configs",
        "settings of all nodes are described",
        "--describe --entity-type brokers --entity-default",
        &["log.retention.ms=7200000 *"],
    ),
    well(
        "configs",
        "settings of all nodes are reset",
        "--alter --entity-type brokers --entity-default --delete-config log.retention.ms",
        &["Completed updating default config for brokers in the cluster."],
    ),
    well(
        "configs",
        "a quota is set",
        "--alter --entity-type users --entity-name alice --entity-type clients \
         --entity-name app --add-config producer_byte_rate=1000000,request_percentage=50",
        &["Completed updating config for user alice."],
    ),
    well(
        "configs",
        "a quota is described",
        "--describe --entity-type users --entity-name alice --entity-type clients \
         --entity-name app",
        &["Quota configs for user-principal 'alice', client-id 'app' are \
             *producer_byte_rate=1000000*"],
    ),
    well(
        "configs",
        "a quota is removed",
        "--alter --entity-type users --entity-name alice --entity-type clients \
         --entity-name app --delete-config producer_byte_rate,request_percentage",
        &["Completed updating config for user alice."],
    ),
    well(
        "configs",
        "a user's password is set",
        "--alter --entity-type users --entity-name bob \
         --add-config SCRAM-SHA-256=[iterations=8192,password=secret]",
        &["Completed updating config for user bob."],
    ),
    well(
        "configs",
        "a user is described without the password",
        "--describe --entity-type users --entity-name bob",
        &[
            "SCRAM credential configs for user-principal 'bob' are SCRAM-SHA-256=iterations=8192",
            "!*secret*",
        ],
    ),
    well(
        "configs",
        "a user is removed",
        "--alter --entity-type users --entity-name bob --delete-config SCRAM-SHA-256",
        &["Completed updating config for user bob."],
    ),
    well(
        "configs",
        "a group's setting is changed",
        "--alter --entity-type groups --entity-name sharing \
         --add-config share.auto.offset.reset=earliest",
        &["Completed updating config for group sharing."],
    ),
    well(
        "configs",
        "a group's setting is described",
        "--describe --entity-type groups --entity-name sharing",
        &["share.auto.offset.reset=earliest *"],
    ),
    // Records.
    well(
        "topics",
        "a topic for load is created",
        "--create --topic perf --partitions 1",
        &["Created topic perf."],
    ),
    well(
        "producer-perf-test",
        "1,000 records are sent",
        "--topic perf --num-records 1000 --record-size 100 --throughput -1 \
         --command-property acks=all",
        &["1000 records sent, *"],
    ),
    well(
        "producer-perf-test",
        "compressed records are sent, with a settings file",
        "--topic perf --num-records 500 --record-size 100 --throughput 5000 \
         --command-config $FILES/fast.properties --command-property compression.type=zstd",
        &["500 records sent, *"],
    ),
    well(
        "producer-perf-test",
        "records are sent in transactions",
        "--topic perf --num-records 500 --record-size 100 --throughput 2000 \
         --transactional-id perf --transaction-duration-ms 100",
        &["500 records sent, *"],
    ),
    well(
        "consumer-perf-test",
        "records are read",
        "--topic perf --num-records 1000 --timeout 20000",
        &["start.time, end.time, *", "*, *, *, *, 1*, *"],
    ),
    well(
        "consumer-perf-test",
        "records are read with the new group protocol",
        "--topic perf --num-records 1000 --timeout 20000 \
         --command-property group.protocol=consumer",
        &["*, *, *, *, 1*, *"],
    ),
    well(
        "verifiable-producer",
        "1,000 records are acknowledged",
        "--topic tools --max-messages 1000",
        &["*\"name\":\"shutdown_complete\"*", "*\"name\":\"tool_data\"*\"acked\":1000*"],
    ),
    well(
        "verifiable-consumer",
        "1,000 records are read and committed",
        "--topic tools --group-id verifiable --max-messages 1000",
        &[
            "*\"name\":\"partitions_assigned\"*",
            "*\"name\":\"offsets_committed\"*\"success\":true*",
            "*\"name\":\"shutdown_complete\"*",
            "!*\"success\":false*",
        ],
    ),
    well(
        "verifiable-consumer",
        "1,000 records are read and committed with the new group protocol",
        "--topic tools --group-id verifiable-new --max-messages 1000 --group-protocol consumer",
        &[
            "*\"name\":\"partitions_assigned\"*",
            "*\"name\":\"offsets_committed\"*\"success\":true*",
            "*\"name\":\"shutdown_complete\"*",
            "!*\"success\":false*",
        ],
    ),
    well(
        "topics",
        "a topic for lines is created",
        "--create --topic lines --partitions 1",
        &["Created topic lines."],
    ),
    fed(
        "console-producer",
        "lines with keys are sent",
        "--topic lines --reader-property parse.key=true --reader-property key.separator=:",
        "a:1\nb:2\na:3\n",
    ),
    well(
        "console-consumer",
        "they are read with keys, offsets and partitions",
        "--topic lines --from-beginning --max-messages 3 \
         --formatter-property print.key=true \
         --formatter-property print.offset=true --formatter-property print.partition=true",
        &[
            "Partition:0 Offset:0 a 1",
            "Partition:0 Offset:1 b 2",
            "Partition:0 Offset:2 a 3",
            "Processed a total of 3 messages",
        ],
    ),
    well(
        "console-consumer",
        "committed records are read by a group",
        "--topic lines --group lines --from-beginning --max-messages 2 \
         --isolation-level read_committed",
        &["1", "2", "Processed a total of 2 messages"],
    ),
    well(
        "console-consumer",
        "reading starts at a given offset",
        "--topic lines --partition 0 --offset 2 --max-messages 1",
        &["3", "!2"],
    ),
    well(
        "e2e-latency",
        "latency is measured",
        "--topic perf --num-records 100 --producer-acks all --record-size 64",
        &["Avg latency: *", "Percentiles: *"],
    ),
    // Offsets.
    well(
        "get-offsets",
        "the end of a topic is shown",
        "--topic lines --time latest",
        &["lines:0:3"],
    ),
    well(
        "get-offsets",
        "the beginning of a topic is shown",
        "--topic lines --time earliest",
        &["lines:0:0"],
    ),
    well(
        "get-offsets",
        "the newest record is found",
        "--topic lines --time max-timestamp",
        &["lines:0:*", "!lines:0:-*", "!lines:0:"],
    ),
    well("get-offsets", "a time is found", "--topic lines --time 0", &["lines:0:0"]),
    well(
        "get-offsets",
        "a future time is not found",
        "--topic lines --time 4000000000000",
        &["!lines:0:*"],
    ),
    well(
        "get-offsets",
        "partitions are chosen",
        "--topic-partitions tools:1-3 --time -1",
        &["tools:1:*", "tools:2:*", "!tools:3:*"],
    ),
    badly(
        "get-offsets",
        "a missing topic is reported",
        "--topic nowhere",
        &["*Could not match any topic-partitions*"],
    ),
    well(
        "delete-records",
        "records below an offset are deleted",
        "--offset-json-file $FILES/offsets.json",
        &["partition: perf-0 low_watermark: 400"],
    ),
    well(
        "get-offsets",
        "the topic begins at that offset",
        "--topic perf --time earliest",
        &["perf:0:400"],
    ),
    well(
        "delete-records",
        "an offset beyond the end is refused",
        "--offset-json-file $FILES/beyond.json",
        &["partition: perf-0 error: org.apache.kafka.common.errors.OffsetOutOfRangeException*"],
    ),
    well(
        "log-dirs",
        "sizes of partitions are described",
        "--describe --topic-list lines",
        &["*\"partition\":\"lines-0\"*"],
    ),
    // Groups.
    well("consumer-groups", "groups are listed", "--list", &["lines", "verifiable"]),
    well(
        "consumer-groups",
        "groups are listed with their states",
        "--list --state",
        &["lines *Empty"],
    ),
    well(
        "consumer-groups",
        "offsets and lag are described",
        "--describe --group lines",
        &["GROUP TOPIC PARTITION *CURRENT-OFFSET LOG-END-OFFSET LAG *", "lines lines 0 *2 3 1 *"],
    ),
    well(
        "consumer-groups",
        "an empty group has no members",
        "--describe --group lines --members",
        &["*'lines' has no active members.*"],
    ),
    well(
        "consumer-groups",
        "its state is described",
        "--describe --group lines --state",
        &["lines *Empty*0"],
    ),
    well(
        "consumer-groups",
        "all groups are described",
        "--describe --all-groups --offsets",
        &["verifiable tools *", "lines lines 0 *"],
    ),
    well(
        "consumer-groups",
        "a missing group is reported",
        "--describe --group nowhere",
        &["*Group nowhere not found.*"],
    ),
    well(
        "consumer-groups",
        "offsets are reset to the beginning",
        "--reset-offsets --group lines --topic lines --to-earliest --execute",
        &["lines lines 0 0"],
    ),
    well(
        "consumer-groups",
        "the reset offsets are described",
        "--describe --group lines",
        &["lines lines 0 *0 3 3 *"],
    ),
    well(
        "consumer-groups",
        "offsets are shifted, as a plan",
        "--reset-offsets --group lines --topic lines:0 --shift-by 2 --dry-run",
        &["lines lines 0 2"],
    ),
    well(
        "consumer-groups",
        "offsets are exported",
        "--reset-offsets --group lines --topic lines \
         --to-datetime 2020-01-01T00:00:00.000 --export --dry-run",
        &["*lines*,0,0*"],
    ),
    well(
        "consumer-groups",
        "offsets of a topic are deleted",
        "--delete-offsets --group lines --topic lines",
        &["Request succe* deleting offsets from group lines.", "lines 0 Successful"],
    ),
    well(
        "consumer-groups",
        "a group is deleted",
        "--delete --group verifiable",
        &["Deletion of requested consumer groups ('verifiable') was successful."],
    ),
    well("consumer-groups", "it no longer exists", "--list", &["!verifiable"]),
    well(
        "groups",
        "groups of all kinds are listed",
        "--list",
        &["GROUP TYPE PROTOCOL", "verifiable-new Consumer consumer"],
    ),
    well(
        "groups",
        "groups of the new protocol are listed",
        "--list --group-type consumer",
        &["verifiable-new Consumer consumer", "!lines *"],
    ),
    // Share groups.
    well(
        "console-share-consumer",
        "a share group reads",
        "--topic lines --group sharing --max-messages 3 --timeout-ms 30000",
        &["1", "2", "3"],
    ),
    well("share-groups", "share groups are listed", "--list", &["sharing"]),
    well(
        "share-groups",
        "a share group is described",
        "--describe --group sharing",
        &["GROUP TOPIC PARTITION *", "sharing lines 0 *"],
    ),
    well(
        "share-groups",
        "its state is described",
        "--describe --group sharing --state",
        &["sharing * Empty *"],
    ),
    well(
        "share-groups",
        "its offsets are reset",
        "--reset-offsets --group sharing --topic lines --to-earliest --execute",
        &["sharing lines 0 0"],
    ),
    well(
        "share-groups",
        "a share group is deleted",
        "--delete --group sharing",
        &["Deletion of requested share groups ('sharing') was successful."],
    ),
    // Transactions.
    well(
        "transactions",
        "transactions are listed",
        "list",
        &["TransactionalId Coordinator ProducerId TransactionState", "perf * CompleteCommit"],
    ),
    well(
        "transactions",
        "a transaction is described",
        "describe --transactional-id perf",
        &["* perf * CompleteCommit *"],
    ),
    badly(
        "transactions",
        "a missing transaction is reported",
        "describe --transactional-id nowhere",
        &["*nowhere*"],
    ),
    well(
        "transactions",
        "producers of a partition are described",
        "describe-producers --topic perf --partition 0",
        &["ProducerId ProducerEpoch *"],
    ),
    well(
        "transactions",
        "no transaction hangs",
        "find-hanging --broker-id 1",
        &["Topic Partition ProducerId *", "!perf *"],
    ),
    // ACLs.
    well(
        "acls",
        "access is granted",
        "--add --allow-principal User:alice --operation Read --topic tools",
        &["*(principal=User:alice, host=*, operation=READ, permissionType=ALLOW)"],
    ),
    well(
        "acls",
        "access by prefix is denied",
        "--add --deny-principal User:eve --operation All --topic pre \
         --resource-pattern-type prefixed",
        &["*(principal=User:eve, host=*, operation=ALL, permissionType=DENY)"],
    ),
    well(
        "acls",
        "access is listed",
        "--list",
        &[
            "Current ACLs for resource `ResourcePattern(resourceType=TOPIC, name=tools, \
             patternType=LITERAL)`:",
            "*patternType=PREFIXED)`:",
        ],
    ),
    well(
        "acls",
        "access is listed for a principal",
        "--list --principal User:eve",
        &["*principal=User:eve*", "!*principal=User:alice*"],
    ),
    well(
        "acls",
        "access is revoked",
        "--remove --force --allow-principal User:alice --operation Read --topic tools",
        &["!*rror*"],
    ),
    well("acls", "it no longer exists", "--list --topic tools", &["!*User:alice*"]),
    well(
        "acls",
        "the other ACL is revoked",
        "--remove --force --topic pre --resource-pattern-type prefixed",
        &["!*rror*"],
    ),
    // For clusters of several nodes; on one node they find nothing to do.
    well(
        "reassign-partitions",
        "no partition is being moved",
        "--list",
        &["No partition reassignments found."],
    ),
    well(
        "leader-election",
        "the leader is the preferred one",
        "--election-type preferred --topic lines --partition 0",
        &["Valid replica already elected for partitions lines-0"],
    ),
    // The rest.
    well("client-metrics", "no client metrics are listed", "--list", &["!*rror*"]),
    well("streams-groups", "no streams groups are listed", "--list", &["!*rror*"]),
    well(
        "streams-application-reset",
        "an application's input is reset",
        "--application-id lines --input-topics lines --to-earliest --force",
        &["Topic: lines Partition: 0 Offset: 0"],
    ),
    well("topics", "topics are deleted", "--delete --topic tools", &["!*rror*"]),
    badly(
        "topics",
        "a topic is not deleted twice",
        "--delete --topic tools",
        &["*Topic 'tools' does not exist as expected*"],
    ),
    well(
        "topics",
        "topics are deleted by a pattern",
        "--delete --topic lines|perf|compacted",
        &["!*rror*"],
    ),
    well(
        "topics",
        "they no longer exist",
        "--list --exclude-internal",
        &["!lines", "!perf", "!compacted", "!tools"],
    ),
];
