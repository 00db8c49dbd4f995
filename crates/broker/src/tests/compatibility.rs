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

/// The versions that a single node of Apache Kafka 4.3.1 announces, as its own tool prints them.
const KAFKA: &str = include_str!("api-versions-4.3.1.txt");

/// Notes on served APIs: where versions differ, and where the behaviour differs.
const NOTES: &[(&str, &str)] = &[
    (
        "Produce",
        "Versions 0 to 2 are announced, as by Kafka, since librdkafka before 2.11.1 compresses \
         nothing otherwise; and refused, as by Kafka.",
    ),
    (
        "Fetch",
        "Each version gets batches of every codec, zstd too, as from Kafka. (KIP-110 has \
         versions below 10 refused; Kafka 4 does not.)",
    ),
    (
        "ListOffsets",
        "Objects are not Kafka's remote storage: of what is in that, or not yet, -1 is told, as \
         by Kafka of topics without it.",
    ),
    (
        "Metadata",
        "A topic that a request creates is in its answer; Kafka creates it in the background and \
         answers UNKNOWN_TOPIC_OR_PARTITION at first. So does this server in the half second \
         after a topic of the name was deleted, and creates none then.",
    ),
    (
        "OffsetCommit",
        "The `retention_time_ms` of versions 2 to 4 is not heeded: the server's \
         `offsets-retention` holds for all offsets.",
    ),
    (
        "CreateTopics",
        "One replica: a replication factor of 1 or -1. Of the first 1,000 topics of a request \
         the settings are told.",
    ),
    (
        "DescribeConfigs",
        "Topics with all settings of Kafka 4.3; brokers with those that they were started with, \
         that stand in for topics, or that Kafka's operators change while they run; groups. No \
         log levels, no metrics of clients.",
    ),
    ("AlterConfigs", "As IncrementalAlterConfigs."),
    (
        "IncrementalAlterConfigs",
        "All settings of topics and groups; of brokers see the table below. What has no effect \
         says so in its documentation.",
    ),
    ("ListConfigResources", "Topics, the broker, and groups with settings of their own."),
    ("DescribeLogDirs", "One place, `/alluvium`, of unknown size, never cordoned off."),
    ("AlterReplicaLogDirs", "There is nowhere to move a replica to."),
    ("ElectLeaders", "Each partition has its one leader: no election is ever needed."),
    ("AlterPartitionReassignments", "The only assignment is the one that there is."),
    (
        "AlterClientQuotas",
        "All of Kafka's quotas, by user, client id and address; not by the name of a host. See \
         configuration.md.",
    ),
    ("ListPartitionReassignments", "None is ever under way."),
    (
        "DescribeQuorum",
        "The one server is the leader and the only voter; its log end offset is the version of \
         its catalog.",
    ),
    (
        "UpdateFeatures",
        "The level of each feature belongs to the version of the server: an update to that level \
         succeeds, any other fails with INVALID_UPDATE_VERSION. `kafka-features.sh describe` \
         shows the levels; `upgrade --release-version` fails, since it also raises features that \
         are not here (`kraft.version`, `streams.version`).",
    ),
    ("AddPartitionsToTxn", "Versions 4 and 5 are for brokers among themselves."),
    ("WriteTxnMarkers", "Version 2 is for brokers among themselves."),
    (
        "ConsumerGroupHeartbeat",
        "Groups of consumers go over from the classic protocol, and back, with their members. \
         Racks are remembered, not heeded. See consumer-groups.md.",
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
        "No metrics of clients are collected; Kafka announces it only with a plugin that does.",
    ),
    ("PushTelemetry", "As GetTelemetrySubscriptions."),
    (
        "AddRaftVoter",
        "The catalog is the server's own: there are no controllers that could come and go.",
    ),
    ("RemoveRaftVoter", "As AddRaftVoter."),
    ("InitializeShareGroupState", "Between brokers."),
    ("ReadShareGroupState", "Between brokers."),
    ("WriteShareGroupState", "Between brokers."),
    ("DeleteShareGroupState", "Between brokers."),
    ("ReadShareGroupStateSummary", "Between brokers."),
    (
        "StreamsGroupHeartbeat",
        "Kafka Streams uses classic groups unless it is told otherwise (KIP-1071).",
    ),
    ("StreamsGroupDescribe", "As StreamsGroupHeartbeat."),
];

const HEAD: &str = "# What of Kafka's protocol is served

Each API that Apache Kafka 4.3.1 \
    announces to clients (KRaft, one node), with the versions there and here. A client asks for \
    this list with ApiVersions, and
chooses what both sides have; what is absent is absent from \
    the answer, so that a client knows.

The coordinators of groups and of transactions keep \
    their state in state streams, not in topics \
    ([0010](decisions/0010-coordinator-state-in-state-streams.md)): `__consumer_offsets` \
    and
`__transaction_state` are there for clients that look for them, with one partition each, \
    which is always empty: neither producers nor WriteTxnMarkers write there. What is in them on \
    Kafka is asked for by OffsetFetch, DescribeGroups, DescribeTransactions and
the like.

## \
    What is checked of a batch

Every batch that a producer sends is checked by Kafka's rules. \
    Its header: length, format, CRC, that offsets and number of records fit each other, codec, \
    producer, transaction. Its records, which are
decompressed for that: that there are as many \
    as the header says, that each is filled by its fields, that their offset deltas are 0, 1, 2 \
    and so on; their times, and their keys where the topic is compacted. The
greatest time of \
    the records replaces the one in the header if that is another one. Why, and what it costs: \
    [0016](decisions/0016-compressed-batches-are-checked.md).

What differs from Kafka:

- \
    Offset deltas that are not 0, 1, 2 and so on are refused with INVALID_RECORD. Kafka 4.4 \
    accepts them in batches that are not compressed, where readers then see other offsets than \
    the log has given, and answers UNKNOWN_SERVER_ERROR for compressed ones.
- Records that \
    cannot be decompressed are refused with INVALID_RECORD, an unknown codec with \
    UNSUPPORTED_COMPRESSION_TYPE; by Kafka 4.4 both with UNKNOWN_SERVER_ERROR.
- A batch that is \
    followed by other bytes, that carries a producer id but no epoch, or that is marked with the \
    time of the append (INVALID_TIMESTAMP) is refused; Kafka 4.4 accepts these.
- Records of \
    more than 256 MiB in one batch, decompressed, are refused with INVALID_RECORD. Kafka has no \
    bound.

## API by API

This page is made from the server's table of APIs, and checked \
    against a running server: `UPDATE_DOCS=1 cargo test -p alluvium-broker compatibility`.

| \
    key | API | Kafka 4.3.1 | here | |
|---:|---|---|---|---|
";

/// Settings that can be changed while Apache Kafka 4.4.0 runs: its
/// `DynamicBrokerConfig.ALL_DYNAMIC_CONFIGS`, and their types.
const DYNAMIC: &str = include_str!("dynamic-configs-4.4.0.txt");

const CHANGEABLE: &str = "
## Settings of brokers that are changed while the server runs

Every \
    setting that Apache Kafka 4.4.0 lets operators change (`kafka-configs --alter --entity-type \
    brokers`, IncrementalAlterConfigs, AlterConfigs), and what comes of it here. What is *kept* \
    is shown by
DescribeConfigs, outlives a restart, and changes nothing: it tunes a part of \
    Kafka that this server does not have, or names what it does anyway, so tools that set it \
    (Cruise Control, Strimzi,
`kafka-reassign-partitions --throttle`) go on. What would promise \
    something that the server does not do is *refused*, with the reason in the answer.

| \
    setting | here | |
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
    let mut told = BTreeMap::new();
    let rows = stored.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    for row in rows.take_while(|row| row.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [key, name, _, here, _] = cells[..] else { panic!("{row}") };
        if here != "–" {
            told.insert(key.parse::<i16>().unwrap(), (name.to_owned(), here.to_owned()));
        }
    }
    let server = TestServer::start().await;
    let announced = server.client().await.call(0, &ApiVersionsRequest::default()).await;
    let announced = announced.api_keys.iter().map(|api| {
        let name = format!("{:?}", ApiKey::try_from(api.api_key).unwrap());
        (api.api_key, (name, versions(api.min_version, api.max_version)))
    });
    assert_eq!(told, announced.collect());
}
