//! Generates `docs/kafka-compatibility.md` from the table of APIs and the notes here on differences
//! from Apache Kafka, and checks it against a running server.
//!
//! With `UPDATE_DOCS=1` the test writes the document instead of failing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use kafka_protocol::messages::{ApiKey, ApiVersionsRequest};

use super::harness::TestServer;
use crate::api::APIS;
use crate::configs::broker;

/// The versions that a single node of Apache Kafka 4.4.0 announces. It knows those that are
/// UNSUPPORTED and does not announce them.
const KAFKA: &str = include_str!("api-versions-4.4.0.txt");

/// Notes on served APIs: where versions differ, and where the behaviour differs.
const NOTES: &[(&str, &str)] = &[
    (
        "Produce",
        "Versions 0 to 2 are announced and refused, as by Kafka: librdkafka before 2.11.1 does \
         not compress otherwise.",
    ),
    (
        "Fetch",
        "Each version gets batches of every codec, including zstd, as from Kafka 4. (KIP-110 \
         refuses versions below 10.)",
    ),
    (
        "ListOffsets",
        "Offsets of the tiers (-5, -6) are -1 for topics without `remote.storage.enable`, as in \
         Kafka.",
    ),
    (
        "Metadata",
        "The response contains a topic that the request creates; see the note below the table.",
    ),
    (
        "ApiVersions",
        "Version 5 checks the ids of cluster and node (KIP-1242). A client that sends it gets \
         UNSUPPORTED_VERSION and retries with version 4.",
    ),
    ("TxnOffsetCommit", "Version 6 has topic ids instead of names (KIP-1319)."),
    ("DeleteGroups", "Version 3 adds a message to each error."),
    (
        "OffsetCommit",
        "The `retention_time_ms` of versions 2 to 4 is ignored: the server's \
         `offsets-retention` applies to all offsets.",
    ),
    (
        "CreateTopics",
        "One replica: a replication factor of 1 or -1. The response contains the settings of \
         the first 1,000 topics of a request.",
    ),
    (
        "DescribeConfigs",
        "Topics: all settings of Kafka 4.4; groups; brokers: start settings, topic defaults, and \
         settings changeable at run time. No log levels, no client metrics.",
    ),
    ("AlterConfigs", "As IncrementalAlterConfigs."),
    (
        "IncrementalAlterConfigs",
        "All settings of topics and groups; of brokers see the table below. The documentation of \
         a setting says if it has no effect.",
    ),
    ("ListConfigResources", "Topics, the broker, and groups with their own settings."),
    ("DescribeLogDirs", "One directory, `/alluvium`, of unknown size, never cordoned."),
    ("AlterReplicaLogDirs", "There is no other directory to move a replica to."),
    ("ElectLeaders", "Each partition has one possible leader: no election is ever needed."),
    ("AlterPartitionReassignments", "Only the current assignment is accepted."),
    (
        "AlterClientQuotas",
        "All of Kafka's quotas, by user, client id and address; not by host name. See \
         configuration.md.",
    ),
    ("ListPartitionReassignments", "Always empty."),
    (
        "DescribeQuorum",
        "The one server is the leader and the only voter; its log end offset is the version of \
         its catalog.",
    ),
    (
        "UpdateFeatures",
        "Succeeds only for the level that the version of the server determines; see the note \
         below the table.",
    ),
    ("AddPartitionsToTxn", "Versions 4 and 5 are for requests between brokers."),
    ("WriteTxnMarkers", "Version 2 is for requests between brokers."),
    (
        "ConsumerGroupHeartbeat",
        "Groups of consumers convert from the classic protocol, and back, with their members. \
         Racks are stored but not used. See consumer-groups.md.",
    ),
    ("ShareGroupHeartbeat", "See share-groups.md."),
];

/// Why the others are not served.
const ABSENT: &[(&str, &str)] = &[
    (
        "CreateDelegationToken",
        "Delegation tokens are off in Kafka too unless a secret is configured.",
    ),
    ("RenewDelegationToken", "As CreateDelegationToken."),
    ("ExpireDelegationToken", "As CreateDelegationToken."),
    ("DescribeDelegationToken", "As CreateDelegationToken."),
    ("UnregisterBroker", "There is one broker, which cannot be unregistered."),
    (
        "GetTelemetrySubscriptions",
        "Client metrics are not collected; Kafka announces it only with a plug-in that does.",
    ),
    ("PushTelemetry", "As GetTelemetrySubscriptions."),
    (
        "AddRaftVoter",
        "The catalog has one writer, the server: there are no controllers to add or remove.",
    ),
    ("RemoveRaftVoter", "As AddRaftVoter."),
    ("InitializeShareGroupState", "Between brokers."),
    ("ReadShareGroupState", "Between brokers."),
    ("WriteShareGroupState", "Between brokers."),
    ("DeleteShareGroupState", "Between brokers."),
    ("ReadShareGroupStateSummary", "Between brokers."),
    (
        "StreamsGroupHeartbeat",
        "Kafka Streams uses classic groups unless configured otherwise (KIP-1071).",
    ),
    ("StreamsGroupDescribe", "As StreamsGroupHeartbeat."),
    ("StreamsGroupTopologyDescriptionUpdate", "As StreamsGroupHeartbeat."),
    ("UnregisterController", "As AddRaftVoter."),
];

const HEAD: &str = r"# Supported parts of Kafka's protocol

Each API that Apache Kafka 4.4.0 announces to clients (KRaft, one node), with its versions there
and here. A client requests this list with ApiVersions and chooses a version that both sides
support; APIs that are not supported are not in the response.

The coordinators of groups and of transactions keep their state in state streams, not in topics
([0010](decisions/0010-coordinator-state-in-state-streams.md)). `__consumer_offsets` and
`__transaction_state` exist for clients that look for them, with one partition each, which is
always empty: neither producers nor WriteTxnMarkers write to them. OffsetFetch, DescribeGroups,
DescribeTransactions and similar APIs return what Kafka stores in these topics.

## Validation of batches

Every batch that a producer sends is validated by Kafka's rules. Header: length, format, CRC,
consistency of offsets and number of records, codec, producer, transaction. Records, which are
decompressed for this: their number matches the header, the fields of each fill it, their offset
deltas are 0, 1, 2 and so on; their timestamps, and their keys if the topic is compacted. The
maximum timestamp of the records replaces the one in the header if that differs.
[0016](decisions/0016-compressed-batches-are-checked.md) explains the reason and the cost.

Differences from Kafka 4.4.0:

- Offset deltas that are not 0, 1, 2 and so on are refused with INVALID_RECORD. Kafka accepts them
  in uncompressed batches, where readers then see other offsets than the log has assigned, and
  answers UNKNOWN_SERVER_ERROR for compressed ones.
- Records that cannot be decompressed are refused with INVALID_RECORD, an unknown codec with
  UNSUPPORTED_COMPRESSION_TYPE; by Kafka both with UNKNOWN_SERVER_ERROR. The same applies to LZ4
  frames that Kafka's Java clients cannot read: those with blocks that depend on each other, with a
  dictionary, or without an end mark.
- Other bytes after a gzip stream, and a wrong content size or content checksum of an LZ4 frame,
  are refused with INVALID_RECORD; Kafka does not check these.
- A batch that is followed by other bytes, that carries a producer id but no epoch, or that is
  marked with the time of the append (INVALID_TIMESTAMP) is refused; Kafka accepts these.
- A transactional batch without a producer id is refused with INVALID_RECORD, by Kafka with
  TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
- Records of more than 256 MiB in one batch, decompressed, are refused with INVALID_RECORD. Kafka
  limits each record of a compressed batch (`max.decompressed.message.bytes`, which applies here
  too), but not all of them together.

**Imports.** A topic that is created with the setting `alluvium.import`, which is not one of
Kafka's, takes batches at the offsets that they state, and neither batches nor transactions of
producers (POLICY_VIOLATION), until the setting is deleted. Such a batch has leader epoch -2, no
producer and no transaction, begins at the end of the partition (else OFFSET_OUT_OF_RANGE, with the
end in the message), covers 2^20 offsets at most, and may lack offsets within and records
altogether. Time, keys and size of its records are not checked, and its compression and timestamp
type stay; it has at most 64 MiB after decompression. Retention and log compaction of the topic are
off meanwhile. `alluvium import` and `alluvium rebuild --topic` use it ([import.md](import.md),
[rebuild.md](rebuild.md), [0028](decisions/0028-import-at-given-offsets.md)).

## Tiered storage (KIP-405)

All records of all topics go to the object store, where late consumers read them. What Kafka calls
local is the part of a partition in the log cache, and the part that is not uploaded yet. Four
offsets are always in this order: log start, local start, uploaded end, high watermark.

- `remote.storage.enable` is accepted. It does not change where records are; with it, ListOffsets
  finds the last uploaded offset (-5, KIP-1005) and the first pending one (-6, KIP-1023), and the
  rules of KIP-950 apply; the local start (-4) is the log start without it. The last uploaded offset
  may be behind the last stable offset, and is -1 when all that was uploaded is deleted. Compacted
  topics may set it; Kafka refuses that.
- `local.retention.ms` and `.bytes`, and `remote.copy.lag.ms` and `.bytes` (KIP-1241), are checked
  against the retention as in Kafka. Uploads are not delayed, since they free the log.
- Switching `remote.storage.enable` off is refused without `remote.log.delete.on.disable=true`.
  With it, the records are deleted that the local retention before the change does not keep,
  upload by upload, in the same commit.
- `remote.log.copy.disable=true` is refused: the log frees its space only by uploads.
- `remote.log.manager.copy.max.bytes.per.second` and `remote.log.manager.fetch.max.bytes.per.second`
  (KIP-956) limit what uploads write and compaction reads and writes, and what other tasks read,
  at once; on a read-only server too. The metrics
  `alluvium_remote_copy_throttle_ms_total` and `alluvium_remote_fetch_throttle_ms_total` show how
  long transfers have waited. With a copy quota below what producers write the log fills up; then
  they wait, and so do commits of offsets and of transactions: raise the quota before that.
- Topics with `remote.storage.enable` have Kafka's metrics of tiered storage, under the names that
  the JMX exporter gives them ([metrics.md](metrics.md#tiered-storage-by-topic)).
- Class names and prefixes of Kafka's plug-ins are not settings here; thread pools are kept without
  effect.

[0030](decisions/0030-tiered-storage-by-kafkas-names.md) has the reasons.

## Read-only servers

A [read-only server](read-only.md) announces the same APIs. Those that would store something are
refused; its page lists their error codes.

## APIs

This page is generated from the server's table of APIs, and checked against a running server:
`UPDATE_DOCS=1 cargo test -p alluvium-broker compatibility`.

| key | API | Kafka 4.4.0 | here | |
|---:|---|---|---|---|
";

/// Settings that can be changed while Apache Kafka 4.4.0 runs: its
/// `DynamicBrokerConfig.ALL_DYNAMIC_CONFIGS`, and their types.
const DYNAMIC: &str = include_str!("dynamic-configs-4.4.0.txt");

const CHANGEABLE: &str = r"
On a Metadata request that creates a topic, Kafka answers UNKNOWN_TOPIC_OR_PARTITION at first and
creates the topic in the background. This server answers so for half a second after a topic of the
name was deleted, and does not create it then.

The version of the server determines the level of each feature: UpdateFeatures to that level
succeeds, any other fails with INVALID_UPDATE_VERSION. `kafka-features.sh describe` shows the
levels; `upgrade --release-version` fails, since it also raises features that do not exist here
(`kraft.version`, `streams.version`).

## Broker settings that can be changed at run time

Every setting that Apache Kafka 4.4.0 lets operators change (`kafka-configs --alter --entity-type
brokers`, IncrementalAlterConfigs, AlterConfigs), and its effect here. A *kept* setting is shown by
DescribeConfigs, survives a restart, and changes nothing: it tunes a part of Kafka that this server
does not have, or describes behaviour that this server always has, so that tools that set it
(Cruise Control, Strimzi, `kafka-reassign-partitions --throttle`) work. A setting that would promise
something that the server does not do is *refused*, with the reason in the response.

| setting | here | |
|---|---|---|
";

fn versions(min: i16, max: i16) -> String {
    if min == max { min.to_string() } else { format!("{min} to {max}") }
}

/// Key, name and printed versions of each of Kafka's APIs.
fn kafkas() -> Vec<(i16, &'static str, &'static str)> {
    let apis = KAFKA.lines().filter_map(|line| {
        let (api, versions) = line.trim().trim_end_matches(',').split_once(": ")?;
        let (name, key) = api.strip_suffix(')')?.split_once('(')?;
        Some((key.parse().ok()?, name, versions))
    });
    apis.collect()
}

fn document() -> String {
    let notes: BTreeMap<_, _> = NOTES.iter().copied().collect();
    let absent: BTreeMap<_, _> = ABSENT.iter().copied().collect();
    assert_eq!((notes.len(), absent.len()), (NOTES.len(), ABSENT.len()), "a note is there twice");
    let kafkas = kafkas();
    for name in notes.keys().chain(absent.keys()) {
        assert!(kafkas.iter().any(|(_, known, _)| known == name), "{name} is no API of Kafka's");
    }
    let mut document = HEAD.to_owned();
    for (key, name, there) in &kafkas {
        let served = APIS.iter().find(|api| api.key as i16 == *key);
        let (here, note) = match served {
            Some(api) => {
                assert_eq!(api.name, *name);
                assert!(!absent.contains_key(name), "{name} is served: take it out of ABSENT");
                let here = versions(api.announced_min(), api.max);
                let note = notes.get(name).copied().unwrap_or_default();
                assert!(here == *there || !note.is_empty(), "{name} differs: say why in NOTES");
                (here, note)
            }
            None => {
                assert!(!notes.contains_key(name), "{name} is not served, and has a note");
                let why = absent.get(name).copied();
                ("–".to_owned(), why.unwrap_or_else(|| panic!("say in ABSENT why {name} is")))
            }
        };
        let there = if *there == "UNSUPPORTED" { "–" } else { there };
        writeln!(document, "| {key} | {name} | {there} | {here} | {note} |").unwrap();
    }
    for api in APIS {
        assert!(
            kafkas.iter().any(|(key, ..)| *key == api.key as i16),
            "{} is not announced by Kafka",
            api.name
        );
    }
    document.push_str(CHANGEABLE);
    for line in DYNAMIC.lines() {
        let name = line.split(' ').next().unwrap();
        let settings = broker::settings();
        let setting = settings.iter().find(|setting| setting.name == name);
        let (here, note) = match setting.and_then(|setting| setting.dynamic) {
            Some(setting) if setting.effective => ("takes effect", setting.documentation),
            Some(setting) => ("kept, no effect", setting.documentation),
            None => ("refused", broker::refusal(name).expect(name)),
        };
        writeln!(document, "| `{name}` | {here} | {note} |").unwrap();
    }
    document
}

#[tokio::test(flavor = "multi_thread")]
async fn the_compatibility_document_lists_what_a_server_announces() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/kafka-compatibility.md");
    let document = document();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &document).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == document,
        "docs/kafka-compatibility.md is not up to date: UPDATE_DOCS=1 cargo test -p \
         alluvium-broker compatibility"
    );

    // Parse the document row by row.
    let mut documented = BTreeMap::new();
    let rows = stored.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    for row in rows.take_while(|row| row.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [key, name, _, here, _] = cells[..] else { panic!("{row}") };
        if here != "–" {
            documented.insert(key.parse::<i16>().unwrap(), (name.to_owned(), here.to_owned()));
        }
    }
    let server = TestServer::start().await;
    let announced = server.client().await.call(0, &ApiVersionsRequest::default()).await;
    let announced = announced.api_keys.iter().map(|api| {
        let name = format!("{:?}", ApiKey::try_from(api.api_key).unwrap());
        (api.api_key, (name, versions(api.min_version, api.max_version)))
    });
    assert_eq!(documented, announced.collect());
}
