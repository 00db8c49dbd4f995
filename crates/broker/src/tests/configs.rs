//! Settings: changed, in effect at once, persisted, and described as Kafka describes them.

use std::collections::BTreeMap;
use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_configs_response::DescribeConfigsResourceResult;
use kafka_protocol::messages::*;

use super::harness::{Client, HANG, TestServer, text};
use crate::batch::tests::plain;
use crate::configs::broker;
use crate::configs::topic::IMPORT;
use crate::partition::unix_time_ms;

pub(super) const TOPIC: i8 = 2;
const BROKER: i8 = 4;
const BROKER_LOGGER: i8 = 8;
const CLIENT_METRICS: i8 = 16;
const GROUP: i8 = 32;

const SET: i8 = 0;
const DELETE: i8 = 1;
const APPEND: i8 = 2;
const SUBTRACT: i8 = 3;

/// Changes some settings of one resource; returns code and text of the error.
pub(super) async fn alter_some(
    client: &mut Client,
    (resource_type, name): (i8, &str),
    ops: &[(&str, i8, Option<&str>)],
    validate_only: bool,
) -> (i16, String) {
    use incremental_alter_configs_request::*;
    let config = |(name, operation, value): &(&str, i8, Option<&str>)| {
        AlterableConfig::default()
            .with_name(text(name))
            .with_config_operation(*operation)
            .with_value(value.map(text))
    };
    let resource = AlterConfigsResource::default()
        .with_resource_type(resource_type)
        .with_resource_name(text(name))
        .with_configs(ops.iter().map(config).collect());
    let request = IncrementalAlterConfigsRequest::default()
        .with_resources(vec![resource])
        .with_validate_only(validate_only);
    let response = &client.call(1, &request).await.responses[0];
    assert_eq!((response.resource_type, &*response.resource_name), (resource_type, name));
    let message = response.error_message.as_ref().map(ToString::to_string);
    (response.error_code, message.unwrap_or_default())
}

async fn set(client: &mut Client, resource: (i8, &str), name: &str, value: &str) -> (i16, String) {
    alter_some(client, resource, &[(name, SET, Some(value))], false).await
}

pub(super) async fn set_well(client: &mut Client, resource: (i8, &str), name: &str, value: &str) {
    assert_eq!(set(client, resource, name, value).await, (0, String::new()), "{name}={value}");
}

/// Describes the settings of one resource, by name.
async fn describe(
    client: &mut Client,
    (resource_type, name): (i8, &str),
) -> BTreeMap<String, DescribeConfigsResourceResult> {
    use describe_configs_request::*;
    let resource = DescribeConfigsResource::default()
        .with_resource_type(resource_type)
        .with_resource_name(text(name))
        .with_configuration_keys(None);
    let request = DescribeConfigsRequest::default()
        .with_resources(vec![resource])
        .with_include_synonyms(true)
        .with_include_documentation(true);
    let result = client.call(4, &request).await.results.remove(0);
    assert_eq!(result.error_code, 0, "{:?}", result.error_message);
    result.configs.into_iter().map(|config| (config.name.to_string(), config)).collect()
}

/// A setting's value and source, and its synonyms as name, value and source.
fn summary(config: &DescribeConfigsResourceResult) -> (String, i8, Vec<(String, String, i8)>) {
    let shown = |value: &Option<kafka_protocol::protocol::StrBytes>| {
        value.as_ref().map(ToString::to_string).unwrap_or_default()
    };
    let synonyms = config.synonyms.iter();
    let synonyms = synonyms.map(|s| (s.name.to_string(), shown(&s.value), s.source)).collect();
    (shown(&config.value), config.config_source, synonyms)
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_topic_settings_take_effect_at_once_and_persist() {
    let mut server = TestServer::with(16 << 20, |config| {
        config.retention_check_interval = Duration::from_millis(1);
    })
    .await;
    let id = server.topic("t", 2, &[("retention.bytes", "-1")]).await;
    let mut client = server.client().await;
    let old = unix_time_ms() - 90_000_000;
    let batch = plain(&[old]);
    assert_eq!(client.produce("t", 0, &batch).await, (0, 0));
    server.server().store.flush().await.unwrap();

    // A change with `validate_only` has no effect.
    let small = (batch.len() - 1).to_string();
    let ops = [("max.message.bytes", SET, Some(small.as_str()))];
    assert_eq!(alter_some(&mut client, (TOPIC, "t"), &ops, true).await.0, 0);
    assert_eq!(client.produce("t", 1, &batch).await, (0, 0));
    assert_eq!(alter_some(&mut client, (TOPIC, "t"), &ops, false).await.0, 0);
    assert_eq!(client.produce("t", 1, &batch).await.0, ResponseError::MessageTooLarge.code());
    let ops = [("max.message.bytes", DELETE, None)];
    assert_eq!(alter_some(&mut client, (TOPIC, "t"), &ops, false).await.0, 0);
    assert_eq!(client.produce("t", 1, &batch).await, (0, 1));

    set_well(&mut client, (TOPIC, "t"), "retention.ms", "3600000").await;
    let gone = async {
        while server.server().topics.by_name("t").unwrap().partitions[0].log_start() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, gone).await.expect("the new retention does not hold");

    let ops = [("cleanup.policy", APPEND, Some("compact")), ("retention.bytes", DELETE, None)];
    assert_eq!(alter_some(&mut client, (TOPIC, "t"), &ops, false).await.0, 0);
    server.crash().await;
    let mut client = server.client().await;
    let configs = describe(&mut client, (TOPIC, "t")).await;
    let own = |name: &str, value: &str| (name.to_owned(), value.to_owned(), 1);
    let default = |name: &str, value: &str| (name.to_owned(), value.to_owned(), 5);
    let policy =
        vec![own("cleanup.policy", "delete,compact"), default("log.cleanup.policy", "delete")];
    assert_eq!(summary(&configs["cleanup.policy"]), ("delete,compact".into(), 1, policy));
    let bytes = vec![default("log.retention.bytes", "-1")];
    assert_eq!(summary(&configs["retention.bytes"]), ("-1".into(), 5, bytes));
    assert_eq!(server.server().topics.by_id(id).unwrap().partitions.len(), 2);
    let ops = [("cleanup.policy", SUBTRACT, Some("delete"))];
    assert_eq!(alter_some(&mut client, (TOPIC, "t"), &ops, false).await.0, 0);
    assert!(server.server().topics.by_name("t").unwrap().rules.only_compacts);
}

/// Names, types, defaults, sources and synonyms of a new topic are those that Apache Kafka 4.4.0
/// returns; but a new Kafka sets `min.insync.replicas` for the cluster.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_topic_is_described_as_in_kafka() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let configs = describe(&mut server.client().await, (TOPIC, "t")).await;
    let mut lines = String::new();
    for (name, config) in configs.iter().filter(|(name, _)| *name != IMPORT) {
        assert!(!config.read_only && !config.is_sensitive);
        assert!(config.documentation.as_ref().is_some_and(|text| text.len() > 20), "{name}");
        let (value, source, synonyms) = summary(config);
        assert_eq!(source, 5, "{name}");
        let synonyms: Vec<_> =
            synonyms.iter().map(|(name, value, _)| format!("{name}={value}")).collect();
        lines += &format!("{name} {} {value} [{}]\n", config.config_type, synonyms.join(","));
    }
    assert_eq!(lines, include_str!("topic-configs-4.4.0.txt"));
}

#[tokio::test(flavor = "multi_thread")]
async fn broker_settings_apply_to_topics_without_their_own() {
    let mut server = TestServer::with(16 << 20, |config| config.max_message_bytes = 900_000).await;
    server.topic("t", 1, &[]).await;
    server.topic("own", 1, &[("max.message.bytes", "800000")]).await;
    let mut client = server.client().await;
    let batch = plain(&[unix_time_ms()]);
    let limit = |config: &BTreeMap<String, _>| summary(&config["max.message.bytes"]);
    let name = || "message.max.bytes".to_owned();
    let started_with = (name(), "900000".to_owned(), 4);
    let default = (name(), "1048588".to_owned(), 5);
    let described = describe(&mut client, (TOPIC, "t")).await;
    let synonyms = vec![started_with.clone(), default.clone()];
    assert_eq!(limit(&described), ("900000".into(), 4, synonyms));

    set_well(&mut client, (BROKER, ""), "message.max.bytes", "61").await;
    assert_eq!(client.produce("t", 0, &batch).await.0, ResponseError::MessageTooLarge.code());
    assert_eq!(client.produce("own", 0, &batch).await.0, 0);
    set_well(&mut client, (BROKER, "1"), "message.max.bytes", "700000").await;
    assert_eq!(client.produce("t", 0, &batch).await.0, 0);
    for restarted in [false, true] {
        if restarted {
            server.restart().await;
        }
        let mut client = server.client().await;
        let described = describe(&mut client, (TOPIC, "t")).await;
        let synonyms = vec![
            (name(), "700000".into(), 2),
            (name(), "61".into(), 3),
            started_with.clone(),
            default.clone(),
        ];
        assert_eq!(limit(&described), ("700000".into(), 2, synonyms.clone()));
        let this = describe(&mut client, (BROKER, "1")).await;
        assert_eq!(summary(&this["message.max.bytes"]), ("700000".into(), 2, synonyms));
        assert!(!this["message.max.bytes"].read_only && this["num.partitions"].read_only);
        let all = describe(&mut client, (BROKER, "")).await;
        assert_eq!(all.keys().collect::<Vec<_>>(), ["message.max.bytes"]);
        let rules = server.server().topics.by_name("own").unwrap().rules;
        assert_eq!(rules.append.max_batch_bytes, 800_000);
    }
    let mut client = server.client().await;
    let ops = [("message.max.bytes", DELETE, None)];
    assert_eq!(alter_some(&mut client, (BROKER, "1"), &ops, false).await.0, 0);
    assert_eq!(client.produce("t", 0, &batch).await.0, ResponseError::MessageTooLarge.code());
    set_well(&mut client, (BROKER, ""), "log.retention.ms", "5").await;
    let described = describe(&mut client, (TOPIC, "t")).await;
    assert_eq!(summary(&described["retention.ms"]).0, "5");
}

/// As librdkafka's tests and Kafka's operators set them.
#[tokio::test]
async fn settings_without_effect_are_persisted_and_described() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    for (name, value) in
        [("sasl.kerberos.min.time.before.relogin", "58000"), ("log.segment.bytes", "2000000")]
    {
        set_well(&mut client, (BROKER, "1"), name, value).await;
        let described = describe(&mut client, (BROKER, "1")).await;
        let config = &described[name];
        assert_eq!(summary(config).0, value);
        assert!(!config.read_only, "{name}");
    }
}

/// Codes and texts of Apache Kafka 4.3.1, where it refuses these too.
#[tokio::test(flavor = "multi_thread")]
async fn changes_are_refused_with_a_reason() {
    use ResponseError as E;
    let server = TestServer::start().await;
    server.topic("t", 1, &[("min.compaction.lag.ms", "100")]).await;
    let mut client = server.client().await;
    let before = describe(&mut client, (TOPIC, "t")).await;
    for (resource, name, operation, value, code, reason) in [
        ((TOPIC, "t"), "nope", SET, "1", E::InvalidConfig, "Unknown topic config name: nope"),
        (
            (TOPIC, "t"),
            "nope",
            APPEND,
            "1",
            E::InvalidConfig,
            "Can't APPEND to key nope because its type is not LIST.",
        ),
        (
            (TOPIC, "t"),
            "retention.ms",
            SUBTRACT,
            "1",
            E::InvalidConfig,
            "Can't SUBTRACT to key retention.ms",
        ),
        ((TOPIC, "t"), "retention.ms", SET, "-2", E::InvalidConfig, "Value must be at least -1"),
        (
            (TOPIC, "t"),
            "cleanup.policy",
            APPEND,
            "x",
            E::InvalidConfig,
            "String must be one of: compact, delete",
        ),
        (
            (TOPIC, "t"),
            "max.compaction.lag.ms",
            SET,
            "50",
            E::InvalidConfig,
            "conflict topic config setting",
        ),
        ((TOPIC, "t"), "retention.ms", 7, "1", E::InvalidRequest, "Unknown operations type 7"),
        ((TOPIC, "zz"), "retention.ms", SET, "1", E::UnknownTopicOrPartition, "does not exist"),
        ((TOPIC, "z z"), "retention.ms", SET, "1", E::InvalidTopicException, "letters, digits"),
        (
            (TOPIC, ""),
            "retention.ms",
            SET,
            "1",
            E::InvalidRequest,
            "Default topic resources are not allowed.",
        ),
        (
            (BROKER, ""),
            "num.partitions",
            SET,
            "3",
            E::InvalidRequest,
            "Cannot update these configs dynamically: [num.partitions]",
        ),
        ((BROKER, ""), "num.io.threads", SET, "0", E::InvalidRequest, "Value must be at least 1"),
        (
            (BROKER, ""),
            "retention.ms",
            SET,
            "3",
            E::InvalidRequest,
            "Cannot update these configs dynamically",
        ),
        (
            (BROKER, "1"),
            "message.max.bytes",
            SET,
            "x",
            E::InvalidRequest,
            "Invalid value x for configuration message.max.bytes: Not a number of type INT",
        ),
        (
            (BROKER, "9"),
            "message.max.bytes",
            SET,
            "99",
            E::InvalidRequest,
            "Unexpected broker id, expected 1",
        ),
        (
            (BROKER, "x"),
            "message.max.bytes",
            SET,
            "99",
            E::InvalidRequest,
            "Broker id must be an integer, but it is: x",
        ),
        ((GROUP, "g"), "nope", SET, "1", E::InvalidConfig, "Unknown group config name: nope"),
        (
            (GROUP, "g"),
            "consumer.session.timeout.ms",
            SET,
            "1",
            E::InvalidConfig,
            "consumer.session.timeout.ms must be in the range 45000 to 60000 inclusive.",
        ),
        (
            (GROUP, ""),
            "consumer.session.timeout.ms",
            SET,
            "50000",
            E::InvalidRequest,
            "Default group resources are not allowed.",
        ),
        ((CLIENT_METRICS, "m"), "interval.ms", SET, "1000", E::InvalidRequest, "client metrics"),
        ((BROKER_LOGGER, "1"), "root", SET, "DEBUG", E::InvalidRequest, "log levels"),
        ((77, "m"), "interval.ms", SET, "1000", E::InvalidRequest, "Unsupported resource type: 77"),
    ] {
        let ops = [(name, operation, Some(value))];
        let (got, message) = alter_some(&mut client, resource, &ops, false).await;
        assert_eq!(got, code.code(), "{resource:?} {name}: {message}");
        assert!(message.contains(reason), "{resource:?} {name}: {message}");
    }
    let twice = [("retention.ms", SET, Some("1")), ("retention.ms", SET, Some("2"))];
    assert_eq!(
        alter_some(&mut client, (TOPIC, "t"), &twice, false).await.0,
        ResponseError::InvalidRequest.code()
    );
    let null = [("retention.ms", SET, None)];
    assert_eq!(
        alter_some(&mut client, (TOPIC, "t"), &null, false).await.0,
        ResponseError::InvalidRequest.code()
    );
    // One invalid setting prevents the change of all others of its resource.
    let half = [("retention.ms", SET, Some("1")), ("retention.bytes", SET, Some("x"))];
    assert_eq!(
        alter_some(&mut client, (TOPIC, "t"), &half, false).await.0,
        ResponseError::InvalidConfig.code()
    );
    assert_eq!(describe(&mut client, (TOPIC, "t")).await, before);
    assert!(server.server().configs.groups().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn alter_configs_replaces_all_settings() {
    use alter_configs_request::*;
    let server = TestServer::start().await;
    server.topic("t", 1, &[("retention.ms", "5"), ("segment.ms", "7")]).await;
    let mut client = server.client().await;
    let request = |names: &[&str], value: &str| {
        let config = AlterableConfig::default()
            .with_name(text("retention.bytes"))
            .with_value(Some(text(value)));
        let resource = |name: &&str| {
            AlterConfigsResource::default()
                .with_resource_type(TOPIC)
                .with_resource_name(text(name))
                .with_configs(vec![config.clone()])
        };
        AlterConfigsRequest::default().with_resources(names.iter().map(resource).collect())
    };
    let mut codes = async |request: AlterConfigsRequest| {
        let responses = client.call(2, &request).await.responses;
        responses.iter().map(|response| response.error_code).collect::<Vec<_>>()
    };
    assert_eq!(
        codes(request(&["t", "t"], "9")).await,
        [ResponseError::InvalidRequest.code(), ResponseError::InvalidRequest.code()]
    );
    assert_eq!(
        codes(request(&["t", "zz"], "x")).await,
        [ResponseError::InvalidConfig.code(), ResponseError::UnknownTopicOrPartition.code()]
    );
    assert_eq!(
        codes(request(&["zz", "t"], "9")).await,
        [ResponseError::UnknownTopicOrPartition.code(), 0]
    );
    let overrides = server.server().topics.by_name("t").unwrap().overrides.clone();
    assert_eq!(overrides, [("retention.bytes".to_owned(), "9".to_owned())].into());
}

/// Clients may set more, as in Kafka; a batch that the store cannot hold is refused when it is
/// sent.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_size_limit_above_the_stores_is_capped_by_the_store() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[("max.message.bytes", "2147483647")]).await;
    let store_bytes = server.store().max_batch_bytes();
    let rules = |server: &TestServer| server.server().topics.by_name("t").unwrap().rules;
    assert_eq!(u64::from(rules(&server).append.max_batch_bytes), store_bytes);
    server.crash().await;
    assert_eq!(u64::from(rules(&server).append.max_batch_bytes), store_bytes);
    let mut client = server.client().await;
    set_well(&mut client, (TOPIC, "t"), "compression.type", "uncompressed").await;
    assert!(rules(&server).append.compression.is_some());
    assert_eq!(u64::from(rules(&server).append.max_batch_bytes), store_bytes);
    set_well(&mut client, (BROKER, ""), "message.max.bytes", "2147483647").await;
    server.topic("u", 1, &[]).await;
    let of_another = server.server().topics.by_name("u").unwrap().rules;
    assert_eq!(u64::from(of_another.append.max_batch_bytes), store_bytes);
}

/// Names that clients and tools read, with the values in effect.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_describes_its_start_options_and_fixed_settings() {
    let server = TestServer::with(16 << 20, |config| {
        config.groups.offsets_retention = Duration::from_secs(3_600);
        config.groups.max_session_timeout = Duration::from_secs(120);
        config.transaction_max_timeout = Duration::from_secs(60);
        config.transactional_id_expiration = Duration::from_secs(3_600);
        config.rack = Some("eu-1a".into());
        config.groups.consumer.min_heartbeat_interval = Duration::from_millis(100);
        config.groups.consumer.heartbeat_interval = Duration::from_millis(500);
        config.groups.share.max_session_timeout = Duration::from_secs(120);
        config.groups.share.session_timeout = Duration::from_secs(100);
        config.max_connections_of_address = 9;
        config.max_connections_overrides = [("10.0.0.1".parse().unwrap(), 7)].into();
    })
    .await;
    let described = describe(&mut server.client().await, (BROKER, "1")).await;
    let value = |name: &str| summary(&described[name]).0;
    assert_eq!(value("group.consumer.min.heartbeat.interval.ms"), "100");
    assert_eq!(value("group.consumer.heartbeat.interval.ms"), "500");
    assert_eq!(value("group.consumer.max.heartbeat.interval.ms"), "15000");
    assert_eq!(value("group.share.max.session.timeout.ms"), "120000");
    assert_eq!(value("group.share.session.timeout.ms"), "100000");
    let mut client = server.client().await;
    // The value for a group without its own setting, and its bounds.
    assert_eq!(server.server().configs.group_number("g", "consumer.heartbeat.interval.ms"), 500);
    assert_eq!(server.server().configs.group_number("g", "share.session.timeout.ms"), 100_000);
    set_well(&mut client, (GROUP, "g"), "consumer.heartbeat.interval.ms", "100").await;
    set_well(&mut client, (GROUP, "g"), "share.session.timeout.ms", "120000").await;
    let (code, message) =
        set(&mut client, (GROUP, "g"), "consumer.heartbeat.interval.ms", "99").await;
    assert_eq!(code, ResponseError::InvalidConfig.code());
    assert!(message.contains("in the range 100 to 15000 inclusive"), "{message}");
    assert_eq!(value("offsets.retention.minutes"), "60");
    assert_eq!(value("group.max.session.timeout.ms"), "120000");
    assert_eq!(value("transaction.max.timeout.ms"), "60000");
    assert_eq!(value("transactional.id.expiration.ms"), "3600000");
    assert_eq!(value("broker.rack"), "eu-1a");
    assert_eq!(value("group.initial.rebalance.delay.ms"), "0");
    assert_eq!(value("max.connections.per.ip"), "9");
    assert_eq!(value("max.connections.per.ip.overrides"), "10.0.0.1:7");
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_have_settings_and_are_listed_with_topics_and_brokers() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let session = "consumer.session.timeout.ms";
    set_well(&mut client, (GROUP, "g"), session, "50000").await;
    server.restart().await;
    let mut client = server.client().await;
    let described = describe(&mut client, (GROUP, "g")).await;
    let synonyms = vec![
        (session.to_owned(), "50000".to_owned(), 8),
        (format!("group.{session}"), "45000".to_owned(), 5),
    ];
    assert_eq!(summary(&described[session]), ("50000".into(), 8, synonyms));
    assert_eq!(server.server().configs.group_number("g", session), 50_000);
    assert_eq!(server.server().configs.group_number("other", session), 45_000);
    assert_eq!(described.len(), 21);

    let list = async |client: &mut Client, version, types: &[i8]| {
        let request = ListConfigResourcesRequest::default().with_resource_types(types.to_vec());
        let response = client.call(version, &request).await;
        let resources = response.config_resources.iter();
        let named = resources.map(|r| (r.resource_type, r.resource_name.to_string())).collect();
        (response.error_code, named)
    };
    let (topic, broker, group) = ((TOPIC, "t".into()), (BROKER, "1".into()), (GROUP, "g".into()));
    let all: Vec<(i8, String)> = vec![topic, broker, group.clone()];
    assert_eq!(list(&mut client, 1, &[]).await, (0, all));
    assert_eq!(list(&mut client, 1, &[GROUP, GROUP, CLIENT_METRICS]).await, (0, vec![group]));
    assert_eq!(
        list(&mut client, 1, &[77]).await,
        (ResponseError::UnsupportedVersion.code(), vec![])
    );
    assert_eq!(list(&mut client, 0, &[]).await, (0, vec![]));

    let ops = [(session, DELETE, None)];
    assert_eq!(alter_some(&mut client, (GROUP, "g"), &ops, false).await.0, 0);
    assert!(server.server().configs.groups().is_empty());
}

/// A setting that Apache Kafka 4.4.0 can change while it runs can be changed here too, and is
/// documented if it has no effect; or it is refused with the reason.
#[tokio::test(flavor = "multi_thread")]
async fn dynamic_broker_settings_are_accepted_or_refused_with_a_reason() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let described = describe(&mut client, (BROKER, "1")).await;
    for line in include_str!("dynamic-configs-4.4.0.txt").lines() {
        let (name, kind) = line.split_once(' ').unwrap();
        let value = described.get(name).and_then(|config| config.value.as_ref());
        let value = match (value, kind) {
            (Some(value), _) => value.to_string(),
            (None, "LONG") => "9223372036854775807".to_owned(),
            _ => String::new(),
        };
        let (code, message) = set(&mut client, (BROKER, ""), name, &value).await;
        match broker::refusal(name).filter(|_| !described.contains_key(name)) {
            Some(reason) => assert_eq!(
                (code, message),
                (42, format!("Cannot update these configs dynamically: [{name}]: {reason}"))
            ),
            None if code == 0 => assert!(!described[name].read_only, "{name}"),
            None => {
                let reason = broker::refusal(name).expect(name);
                assert!(
                    described[name].read_only && message.ends_with(reason),
                    "{name}: {message}"
                );
            }
        }
    }
}

/// KIP-956.
#[tokio::test(flavor = "multi_thread")]
async fn transfers_have_quotas_that_change_at_run_time() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let quota = "remote.log.manager.copy.max.bytes.per.second";
    assert_eq!(
        set(&mut client, (BROKER, ""), quota, "0").await.0,
        ResponseError::InvalidRequest.code()
    );
    set_well(&mut client, (BROKER, ""), quota, "1").await;
    assert_eq!(server.server().configs.transfer_limits(), [1, 0]);
    // The first transfer takes its bytes in advance, and the next one waits for them.
    let mut uploads = Vec::new();
    for _ in 0..2 {
        client.produce("t", 0, &plain(&[1])).await;
        let store = server.store().clone();
        uploads.push(tokio::spawn(async move { store.flush().await }));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(!uploads[1].is_finished());
    set_well(&mut client, (BROKER, ""), quota, "9223372036854775807").await;
    for upload in uploads {
        upload.await.unwrap().unwrap();
    }
    assert!(server.store().stats().throttled.copy >= Duration::from_millis(100));
    set_well(&mut client, (BROKER, ""), quota, "1000000").await;
    server.restart().await;
    assert_eq!(server.server().configs.transfer_limits(), [1_000_000, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn defaults_of_local_retention_are_at_most_those_of_retention() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let week_ms = "604800000";
    for (name, ops, reason) in [
        (
            "",
            [("log.local.retention.ms", "604800001")],
            "log.retention.ms property value: 604800000",
        ),
        ("1", [("log.local.retention.ms", "-1")], "Value must not be -1"),
    ] {
        let ops = ops.map(|(name, value)| (name, SET, Some(value)));
        let (code, message) = alter_some(&mut client, (BROKER, name), &ops, false).await;
        assert_eq!(code, ResponseError::InvalidRequest.code(), "{message}");
        assert!(message.contains(reason), "{message}");
    }
    set_well(&mut client, (BROKER, ""), "log.local.retention.ms", week_ms).await;
    let less = [("log.retention.ms", SET, Some("5"))];
    for of in ["", "1"] {
        let (code, message) = alter_some(&mut client, (BROKER, of), &less, false).await;
        assert_eq!(code, ResponseError::InvalidRequest.code(), "{message}");
    }
    let both = [less[0], ("log.local.retention.ms", SET, Some("4"))];
    assert_eq!(alter_some(&mut client, (BROKER, "1"), &both, false).await.0, 0);
    // Other changes are not affected, and a topic is accepted with what is in effect.
    set_well(&mut client, (BROKER, ""), "message.max.bytes", "700000").await;
    server.topic("t", 1, &[("remote.storage.enable", "true")]).await;
}

/// KIP-950: what Kafka would have on local disks is left when tiered storage is switched off.
#[tokio::test(flavor = "multi_thread")]
async fn switching_remote_storage_off_deletes_what_is_not_local() {
    let server = TestServer::start().await;
    let tiered = [("remote.storage.enable", "true"), ("local.retention.bytes", "0")];
    server.topic("t", 1, &tiered).await;
    let mut client = server.client().await;
    let batch = || plain(&[1, 2, 3]);
    client.produce("t", 0, &batch()).await;
    server.store().flush().await.unwrap();
    client.produce("t", 0, &batch()).await;
    let start = || server.server().topics.by_name("t").unwrap().partitions[0].log_start();
    let off = [("remote.storage.enable", SET, Some("false"))];
    let (code, message) = alter_some(&mut client, (TOPIC, "t"), &off, false).await;
    assert_eq!(code, ResponseError::InvalidConfig.code(), "{message}");
    assert!(message.contains("without deleting remote data"), "{message}");
    assert_eq!(start(), 0);
    let delete = [off[0], ("remote.log.delete.on.disable", SET, Some("true"))];
    assert_eq!(alter_some(&mut client, (TOPIC, "t"), &delete, false).await.0, 0);
    assert_eq!(start(), 3, "what is not uploaded is local");
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_limits_can_be_changed_at_run_time() {
    let mut server = TestServer::start().await;
    let mut first = server.client().await;
    set_well(&mut first, (BROKER, "1"), "max.connections.per.ip.overrides", "127.0.0.1:1").await;
    assert!(server.client().await.receive_frame().await.is_none());
    set_well(&mut first, (BROKER, "1"), "max.connections.per.ip.overrides", "127.0.0.1:2").await;
    let mut second = server.client().await;
    second.call(0, &ApiVersionsRequest::default()).await;
    drop((first, second));
    server.restart().await;
    let mut first = server.client().await;
    let mut second = server.client().await;
    second.call(0, &ApiVersionsRequest::default()).await;
    assert!(server.client().await.receive_frame().await.is_none());
    set_well(&mut first, (BROKER, "1"), "max.connections.per.ip.overrides", "").await;
    set_well(&mut first, (BROKER, ""), "max.connections.per.ip", "3").await;
    set_well(&mut first, (BROKER, ""), "max.connections", "2").await;
    assert!(server.client().await.receive_frame().await.is_none());
    for (name, value) in [
        ("max.connections", "0"),
        ("max.connections.per.ip", "0"),
        ("max.connections.per.ip.overrides", "host:5"),
        ("max.connections.per.ip.overrides", "10.0.0.1:5,10.0.0.1:6"),
        ("log.cleaner.backoff.ms", "0"),
        ("transaction.partition.verification.enable", "false"),
    ] {
        let (code, message) = set(&mut first, (BROKER, ""), name, value).await;
        assert_eq!(code, ResponseError::InvalidRequest.code(), "{name}: {message}");
    }
}
