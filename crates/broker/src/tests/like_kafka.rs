//! Details of responses that clients and their tests compare with those of Apache Kafka 4.4.0: null
//! or an empty string, the order of lists, reserved names. Every expectation is what a real 4.4.0
//! answers.

use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;
use kafka_protocol::protocol::StrBytes;

use super::harness::{Client, TestServer, text};
use super::secured::sasl;
use super::transactions::Producer;
use crate::{AuthorizationConfig, Mechanism};

/// The nullable strings of successful responses: some are null in Kafka, some empty, and one is
/// "NONE".
#[tokio::test(flavor = "multi_thread")]
async fn strings_are_null_or_empty_as_in_kafka() {
    let server = TestServer::with(16 << 20, |config| {
        config.security.authorization = Some(AuthorizationConfig {
            super_users: vec!["User:ANONYMOUS".into()],
            ..AuthorizationConfig::default()
        });
    })
    .await;
    server.topic("topic", 1, &[]).await;
    let mut client = server.client().await;
    let (null, empty) = (None, Some(StrBytes::new()));

    let acl = create_acls_request::AclCreation::default()
        .with_resource_type(2)
        .with_resource_name(text("topic"))
        .with_resource_pattern_type(3)
        .with_principal(text("User:x"))
        .with_host(text("*"))
        .with_operation(3)
        .with_permission_type(3);
    let created =
        client.call(3, &CreateAclsRequest::default().with_creations(vec![acl])).await.results;
    assert_eq!(created[0].error_message, empty);
    let all = DescribeAclsRequest::default()
        .with_resource_type_filter(1)
        .with_resource_name_filter(None)
        .with_pattern_type_filter(1)
        .with_principal_filter(None)
        .with_host_filter(None)
        .with_operation(1)
        .with_permission_type(1);
    let described = client.call(3, &all).await;
    assert_eq!((described.resources.len(), described.error_message), (1, empty.clone()));
    let filter = delete_acls_request::DeleteAclsFilter::default()
        .with_resource_type_filter(1)
        .with_resource_name_filter(None)
        .with_pattern_type_filter(1)
        .with_principal_filter(None)
        .with_host_filter(None)
        .with_operation(1)
        .with_permission_type(1);
    let request = DeleteAclsRequest::default().with_filters(vec![filter]);
    let deleted = client.call(3, &request).await.filter_results.remove(0);
    assert_eq!(deleted.error_message, null);
    assert_eq!(deleted.matching_acls[0].error_message, null);

    let quotas = client.call(1, &DescribeClientQuotasRequest::default()).await;
    assert_eq!((quotas.error_code, quotas.error_message), (0, empty.clone()));
    let topic = describe_configs_request::DescribeConfigsResource::default()
        .with_resource_type(2)
        .with_resource_name(text("topic"));
    let request = DescribeConfigsRequest::default().with_resources(vec![topic]);
    assert_eq!(client.call(4, &request).await.results[0].error_message, empty);
    server.server().authentication.users.set_password("alice", "wonder").await.unwrap();
    let users = client.call(0, &DescribeUserScramCredentialsRequest::default()).await;
    assert_eq!(users.error_message, empty);
    assert_eq!(users.results[0].error_message, empty);
    let keys = FindCoordinatorRequest::default().with_coordinator_keys(vec![text("group")]);
    assert_eq!(client.call(4, &keys).await.coordinators[0].error_message, empty);
    let key = FindCoordinatorRequest::default().with_key(text("group"));
    assert_eq!(client.call(2, &key).await.error_message, Some(text("NONE")));
    let partition = describe_quorum_request::PartitionData::default();
    let log = describe_quorum_request::TopicData::default()
        .with_topic_name(TopicName(text("__cluster_metadata")))
        .with_partitions(vec![partition]);
    let quorum = client.call(2, &DescribeQuorumRequest::default().with_topics(vec![log])).await;
    assert_eq!(quorum.error_message, empty);
    assert_eq!(quorum.topics[0].partitions[0].error_message, empty);
}

/// Kafka iterates over a hash map. Its order is a function of the names, so clients' tests can
/// compare lists.
#[tokio::test(flavor = "multi_thread")]
async fn quotas_and_users_are_listed_in_the_order_of_kafka() {
    use alter_client_quotas_request::*;
    type Parts = [(&'static str, Option<&'static str>)];
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let alter = async |client: &mut Client, parts: &Parts, keys: &[&str]| {
        let parts = parts.iter().map(|(kind, name)| {
            EntityData::default().with_entity_type(text(kind)).with_entity_name(name.map(text))
        });
        let ops = keys.iter().map(|key| OpData::default().with_key(text(key)).with_value(9.0));
        let entry = EntryData::default().with_entity(parts.collect()).with_ops(ops.collect());
        let request = AlterClientQuotasRequest::default().with_entries(vec![entry]);
        assert_eq!(client.call(1, &request).await.entries[0].error_code, 0);
    };
    let four = [
        "consumer_byte_rate",
        "controller_mutation_rate",
        "producer_byte_rate",
        "request_percentage",
    ];
    let one = &four[..1];
    alter(&mut client, &[("user", None)], &four).await;
    alter(&mut client, &[("ip", Some("10.0.0.9"))], &["connection_creation_rate"]).await;
    alter(&mut client, &[("user", Some("a"))], one).await;
    alter(&mut client, &[("client-id", Some("c1"))], one).await;
    alter(&mut client, &[("client-id", None)], one).await;
    alter(&mut client, &[("user", Some("m1")), ("client-id", Some("c1"))], one).await;
    alter(&mut client, &[("user", Some("B"))], one).await;
    let entries = client.call(1, &DescribeClientQuotasRequest::default()).await.entries.unwrap();
    let parts = entries.iter().map(|entry| {
        let part = |part: &describe_client_quotas_response::EntityData| {
            let name = part.entity_name.as_ref().map_or("<default>", |name| name.as_str());
            format!("{}={name}", part.entity_type.as_str())
        };
        entry.entity.iter().map(part).collect::<Vec<_>>().join(" ")
    });
    assert_eq!(
        parts.collect::<Vec<_>>(),
        [
            "client-id=c1",
            "ip=10.0.0.9",
            "client-id=c1 user=m1",
            "user=<default>",
            "client-id=<default>",
            "user=B",
            "user=a",
        ]
    );
    let default_user = &entries[3];
    let keys: Vec<&str> = default_user.values.iter().map(|value| value.key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "producer_byte_rate",
            "consumer_byte_rate",
            "controller_mutation_rate",
            "request_percentage",
        ]
    );

    for user in ["sa", "sm", "su"] {
        server.server().authentication.users.set_password(user, "secret").await.unwrap();
    }
    let all = DescribeUserScramCredentialsRequest::default().with_users(None);
    let listed = client.call(0, &all).await.results;
    let listed: Vec<&str> = listed.iter().map(|result| result.user.as_str()).collect();
    assert_eq!(listed, ["su", "sm", "sa"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cluster_metadata_topic_cannot_be_used() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let name = || TopicName(text("__cluster_metadata"));
    for validate_only in [true, false] {
        let topic = create_topics_request::CreatableTopic::default()
            .with_name(name())
            .with_num_partitions(1)
            .with_replication_factor(1);
        let request = CreateTopicsRequest::default()
            .with_topics(vec![topic])
            .with_validate_only(validate_only);
        let refused = client.call(7, &request).await.topics.remove(0);
        let message = refused.error_message.unwrap_or_default();
        assert_eq!(
            (refused.error_code, message.as_str()),
            (
                ResponseError::InvalidRequest.code(),
                "Creation of internal topic __cluster_metadata is prohibited."
            )
        );
    }
    for _ in 0..2 {
        let topic = metadata_request::MetadataRequestTopic::default().with_name(Some(name()));
        let request = MetadataRequest::default()
            .with_topics(Some(vec![topic]))
            .with_allow_auto_topic_creation(true);
        assert_eq!(
            client.call(9, &request).await.topics[0].error_code,
            ResponseError::UnknownTopicOrPartition.code()
        );
    }
    assert!(server.server().topics.all().is_empty());
}

/// Transactions that have never begun match every duration, and the age of those that have ended
/// counts from their begin.
#[tokio::test(flavor = "multi_thread")]
async fn transactions_are_listed_by_the_time_since_they_began() {
    let server = TestServer::start().await;
    let topic_id = server.topic("t", 1, &[]).await;
    let _never_begun = Producer::init(&server, "empty", true).await;
    let mut ended = Producer::init(&server, "ended", true).await;
    assert_eq!(ended.produce("t", topic_id, 0).await.0, 0);
    assert_eq!(ended.end(true).await, 0);
    let mut open = Producer::init(&server, "open", true).await;
    assert_eq!(open.produce("t", topic_id, 0).await.0, 0);
    // Kafka checks whether a transaction is older than the duration.
    tokio::time::sleep(Duration::from_millis(2)).await;
    let mut client = server.client().await;
    for (duration_ms, expected) in [
        (-1, &["empty", "ended", "open"][..]),
        (0, &["empty", "ended", "open"]),
        (3_600_000, &["empty"]),
    ] {
        let request = ListTransactionsRequest::default().with_duration_filter(duration_ms);
        let listed = client.call(1, &request).await.transaction_states;
        let listed: Vec<&str> =
            listed.iter().map(|state| state.transactional_id.as_str()).collect();
        assert_eq!(listed, expected, "{duration_ms}");
    }
    let ids = vec![TransactionalId(text("ended")), TransactionalId(text("empty"))];
    let request = DescribeTransactionsRequest::default().with_transactional_ids(ids);
    let described = client.call(0, &request).await.transaction_states;
    assert!(described[0].transaction_start_time_ms > 0);
    assert_eq!(described[1].transaction_start_time_ms, -1);
}

/// The first repetition is accepted at once, and the next one only after a while.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_may_reauthenticate_once_and_then_only_after_a_while() {
    let server = TestServer::with(16 << 20, |config| {
        config.listeners.push(sasl("sasl", &[Mechanism::Plain]));
        config.security.session_lifetime = Some(Duration::from_secs(3_600));
    })
    .await;
    server.server().authentication.users.set_password("alice", "wonder").await.unwrap();
    let mut client = Client::connect(server.addr_of("sasl")).await;
    assert_eq!(client.plain("alice", "wonder").await.0, 0);
    assert_eq!(client.plain("alice", "wonder").await.0, 0);
    assert_eq!(client.handshake("PLAIN").await, ResponseError::IllegalSaslState.code());
    assert_eq!(client.call(12, &MetadataRequest::default()).await.brokers.len(), 1);
}
