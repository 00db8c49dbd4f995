//! Every API in every announced version, over TCP, decoded by the client's side of the protocol
//! library.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{ApiKey, ApiVersionsRequest, TopicName, create_topics_request};

use super::examples::{self, World};
use super::harness::{Client, TestServer, text};

/// The error codes that the examples must get, where that is not 0.
fn expected_errors(key: ApiKey, version: i16) -> Vec<i16> {
    use ResponseError as E;
    match key {
        // The member does not exist.
        ApiKey::Heartbeat | ApiKey::SyncGroup => vec![E::UnknownMemberId.code()],
        ApiKey::LeaveGroup if version >= 3 => vec![0, E::UnknownMemberId.code()],
        ApiKey::LeaveGroup => vec![E::UnknownMemberId.code()],
        // A member without an id gets one, and has to join again.
        ApiKey::JoinGroup if version >= 4 => vec![E::MemberIdRequired.code()],
        // The group does not exist, which versions before 6 show as a state only.
        ApiKey::DescribeGroups if version >= 6 => vec![E::GroupIdNotFound.code()],
        ApiKey::DeleteGroups => vec![E::GroupIdNotFound.code()],
        // The transaction does not exist.
        ApiKey::AddPartitionsToTxn => vec![0, E::InvalidProducerIdMapping.code()],
        ApiKey::AddOffsetsToTxn | ApiKey::EndTxn | ApiKey::TxnOffsetCommit => {
            vec![E::InvalidProducerIdMapping.code()]
        }
        ApiKey::DescribeTransactions => vec![E::TransactionalIdNotFound.code()],
        ApiKey::ConsumerGroupHeartbeat | ApiKey::ConsumerGroupDescribe => {
            vec![E::GroupIdNotFound.code()]
        }
        ApiKey::ShareGroupHeartbeat => vec![E::UnknownMemberId.code()],
        ApiKey::ShareGroupDescribe => vec![E::GroupIdNotFound.code()],
        ApiKey::DescribeShareGroupOffsets | ApiKey::DeleteShareGroupOffsets => {
            vec![E::GroupIdNotFound.code()]
        }
        // The session does not exist either, and a fetch creates no group.
        ApiKey::ShareAcknowledge => vec![E::ShareSessionNotFound.code()],
        ApiKey::ShareFetch => vec![0, E::UnknownTopicOrPartition.code(), 0],
        ApiKey::DeleteTopics if version >= 6 => vec![0, E::UnknownTopicId.code()],
        ApiKey::DeleteRecords => vec![0, E::UnknownTopicOrPartition.code()],
        ApiKey::AlterReplicaLogDirs => {
            vec![0, E::UnknownTopicOrPartition.code(), E::LogDirNotFound.code()]
        }
        ApiKey::ElectLeaders => {
            vec![0, E::ElectionNotNeeded.code(), E::UnknownTopicOrPartition.code()]
        }
        ApiKey::AlterPartitionReassignments => vec![
            0,
            E::InvalidReplicaAssignment.code(),
            E::NoReassignmentInProgress.code(),
            E::UnknownTopicOrPartition.code(),
        ],
        ApiKey::OffsetDelete => vec![E::GroupIdNotFound.code()],
        // The listener has no authentication.
        ApiKey::SaslHandshake | ApiKey::SaslAuthenticate => vec![E::IllegalSaslState.code()],
        // There is no authorizer.
        ApiKey::DescribeAcls | ApiKey::CreateAcls | ApiKey::DeleteAcls => {
            vec![E::SecurityDisabled.code()]
        }
        // The user does not exist.
        ApiKey::DescribeUserScramCredentials => vec![0, E::ResourceNotFound.code()],
        ApiKey::AlterUserScramCredentials => vec![E::ResourceNotFound.code(), 0],
        _ => vec![],
    }
}

pub(super) fn error_codes(response: &str) -> Vec<i16> {
    let number = |rest: &str| rest.split([',', ' ', '}']).next().unwrap().parse().unwrap();
    response.split("error_code: ").skip(1).map(number).collect()
}

/// Returns all APIs that are announced, in all versions that are served.
pub(super) async fn announced(client: &mut Client) -> Vec<(ApiKey, i16)> {
    let announced = client.call(0, &ApiVersionsRequest::default()).await;
    assert_eq!(announced.api_keys.len(), crate::api::APIS.len());
    let mut versions = Vec::new();
    for api in announced.api_keys {
        let key = ApiKey::try_from(api.api_key).unwrap();
        // Some versions of Produce are announced but not served.
        let first = if key == ApiKey::Produce { 3 } else { api.min_version };
        versions.extend((first..=api.max_version).map(|version| (key, version)));
    }
    versions
}

/// Sends the example of a request, and returns the response as text.
pub(super) async fn call(client: &mut Client, key: ApiKey, version: i16, world: &World) -> String {
    client.send_frame(&examples::request(key, version, version.into(), world)).await;
    let response = client.receive_frame().await;
    let response = response.unwrap_or_else(|| panic!("{key:?} v{version}: closed"));
    examples::decode_response(key, version, version.into(), response)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_announced_version_answers() {
    let server = TestServer::start().await;
    let topic_id = server.topic("topic", 3, &[]).await;
    let mut client = server.client().await;
    let announced = announced(&mut client).await;
    assert!(announced.len() > 120, "{announced:?}");
    for (key, version) in announced {
        let world = World {
            topic_id,
            group: format!("group-{key:?}-{version}"),
            unique: format!("unique-{key:?}-{version}"),
            ..World::imaginary()
        };
        if key == ApiKey::DeleteTopics {
            server.topic(&world.unique, 1, &[]).await;
        }
        let response = call(&mut client, key, version, &world).await;
        let mut errors = error_codes(&response);
        errors.dedup();
        let mut expected = expected_errors(key, version);
        if expected.is_empty() && !errors.is_empty() {
            expected.push(0);
        }
        assert_eq!(errors, expected, "{key:?} v{version}: {response}");
    }
}

/// The minimum for clients: the versions that kafka-clients 4, librdkafka 2 and franz-go choose
/// from.
#[tokio::test(flavor = "multi_thread")]
async fn the_announced_versions_are_those_that_clients_need() {
    let server = TestServer::start().await;
    let announced = server.client().await.call(0, &ApiVersionsRequest::default()).await;
    let range = |key: ApiKey| {
        let api = announced.api_keys.iter().find(|api| api.api_key == key as i16).unwrap();
        (api.min_version, api.max_version)
    };
    // Those before 3 are announced for librdkafka, as by Kafka; and refused, as by Kafka.
    assert_eq!(range(ApiKey::Produce), (0, 13));
    for version in 0..3 {
        let mut client = server.client().await;
        client.send_frame(&[0, 0, 0, version, 0, 0, 0, 1, 0xff, 0xff]).await;
        assert!(client.receive_frame().await.is_none());
    }
    assert_eq!(range(ApiKey::Fetch), (4, 18));
    assert_eq!(range(ApiKey::Metadata), (0, 13));
    assert_eq!(range(ApiKey::OffsetCommit), (2, 10));
    assert_eq!(range(ApiKey::OffsetFetch), (1, 10));
    assert_eq!(range(ApiKey::ListOffsets), (1, 11));
    assert_eq!(range(ApiKey::DescribeLogDirs), (1, 5));
    assert_eq!(range(ApiKey::ConsumerGroupHeartbeat), (0, 1));
    // Each range is one that the codec supports, or that is decoded in addition to it.
    let beside = [
        ApiKey::OffsetCommit,
        ApiKey::OffsetFetch,
        ApiKey::ListOffsets,
        ApiKey::DescribeLogDirs,
        ApiKey::ShareFetch,
        ApiKey::ShareAcknowledge,
        ApiKey::DescribeShareGroupOffsets,
    ];
    for api in crate::api::APIS.iter().filter(|api| !beside.contains(&api.key)) {
        let valid = api.key.valid_versions();
        assert!(valid.min <= api.min && api.max <= valid.max, "{}", api.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_are_validated_as_in_kafka() {
    use ResponseError as E;
    use create_topics_request::*;
    let server = TestServer::with(16 << 20, |config| config.max_partitions = 20).await;
    server.topic("a.b", 1, &[]).await;
    let topic = |name: &str| {
        CreatableTopic::default()
            .with_name(TopicName(text(name)))
            .with_num_partitions(1)
            .with_replication_factor(1)
    };
    let config = |name: &str, value: Option<&str>| {
        CreatableTopicConfig::default().with_name(text(name)).with_value(value.map(text))
    };
    let cases = vec![
        (topic("a.b"), E::TopicAlreadyExists.code()),
        (topic("a_b"), E::InvalidTopicException.code()),
        (topic("no/slash"), E::InvalidTopicException.code()),
        (topic("x").with_num_partitions(0), E::InvalidPartitions.code()),
        (topic("x").with_num_partitions(-2), E::InvalidPartitions.code()),
        (topic("x").with_num_partitions(21), E::PolicyViolation.code()),
        (topic("x").with_replication_factor(2), E::InvalidReplicationFactor.code()),
        (topic("x").with_replication_factor(0), E::InvalidReplicationFactor.code()),
        (topic("x").with_configs(vec![config("nonsense", Some("1"))]), E::InvalidConfig.code()),
        (topic("x").with_configs(vec![config("retention.ms", None)]), E::InvalidConfig.code()),
        (
            topic("x").with_assignments(vec![CreatableReplicaAssignment::default()]),
            E::InvalidRequest.code(),
        ),
        (
            topic("x").with_num_partitions(-1).with_replication_factor(-1).with_assignments(vec![
                CreatableReplicaAssignment::default().with_broker_ids(vec![9.into()]),
            ]),
            E::InvalidReplicaAssignment.code(),
        ),
        (topic("good").with_num_partitions(-1).with_replication_factor(-1), 0),
    ];
    let mut client = server.client().await;
    for validate_only in [true, false] {
        for (topic, code) in &cases {
            let request = CreateTopicsRequest::default()
                .with_topics(vec![topic.clone()])
                .with_validate_only(validate_only);
            let result = &client.call(7, &request).await.topics[0];
            assert_eq!(result.error_code, *code, "{topic:?}: {:?}", result.error_message);
        }
    }
    let twice = CreateTopicsRequest::default().with_topics(vec![topic("y"), topic("y")]);
    let results = client.call(7, &twice).await.topics;
    assert!(
        results.len() == 1 && results[0].error_code == ResponseError::InvalidRequest.code(),
        "{results:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_added_as_in_kafka() {
    use kafka_protocol::messages::CreatePartitionsRequest;
    use kafka_protocol::messages::create_partitions_request::*;
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let topic = |name: &str, count| {
        CreatePartitionsTopic::default().with_name(TopicName(text(name))).with_count(count)
    };
    let assigned = |topic: CreatePartitionsTopic, brokers: &[i32]| {
        let to =
            |id: &i32| CreatePartitionsAssignment::default().with_broker_ids(vec![(*id).into()]);
        topic.with_assignments(Some(brokers.iter().map(to).collect()))
    };
    let cases = vec![
        (vec![topic("unknown", 3)], vec![ResponseError::UnknownTopicOrPartition.code()]),
        (vec![topic("t", 2)], vec![ResponseError::InvalidPartitions.code()]),
        (vec![topic("t", -1)], vec![ResponseError::InvalidPartitions.code()]),
        (vec![assigned(topic("t", 2), &[1])], vec![ResponseError::InvalidPartitions.code()]),
        (vec![assigned(topic("t", 4), &[1])], vec![ResponseError::InvalidReplicaAssignment.code()]),
        (vec![assigned(topic("t", 3), &[7])], vec![ResponseError::InvalidReplicaAssignment.code()]),
        (vec![topic("t", 3), topic("t", 4)], vec![ResponseError::InvalidRequest.code()]),
        (vec![assigned(topic("t", 3), &[1])], vec![0]),
        (vec![topic("t", 3)], vec![ResponseError::InvalidPartitions.code()]),
    ];
    let mut client = server.client().await;
    for (topics, codes) in cases {
        let request = CreatePartitionsRequest::default().with_topics(topics);
        let results = client.call(3, &request).await.results;
        let got: Vec<_> = results.iter().map(|result| result.error_code).collect();
        assert_eq!(got, codes, "{request:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_creates_topics_where_both_sides_allow_it() {
    use kafka_protocol::messages::MetadataRequest;
    use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
    let server = TestServer::with(16 << 20, |config| config.default_partitions = 3).await;
    let mut client = server.client().await;
    let request = |name: &str, create| {
        MetadataRequest::default()
            .with_topics(Some(vec![
                MetadataRequestTopic::default().with_name(Some(TopicName(text(name)))),
            ]))
            .with_allow_auto_topic_creation(create)
    };
    let unknown = &client.call(12, &request("new", false)).await.topics[0];
    assert_eq!(unknown.error_code, ResponseError::UnknownTopicOrPartition.code());
    let created = &client.call(12, &request("new", true)).await.topics[0];
    assert_eq!((created.error_code, created.partitions.len()), (0, 3));
    assert!(!created.topic_id.is_nil());
    assert_eq!(
        client.call(12, &request("no good", true)).await.topics[0].error_code,
        ResponseError::InvalidTopicException.code()
    );
    assert_eq!(
        client.call(12, &request("no good", false)).await.topics[0].error_code,
        ResponseError::InvalidTopicException.code()
    );

    // kafka-clients send an empty name with the id, others none.
    for name in [None, Some(TopicName::default())] {
        let by_id = |id| {
            MetadataRequest::default().with_topics(Some(vec![
                MetadataRequestTopic::default().with_name(name.clone()).with_topic_id(id),
            ]))
        };
        let found = &client.call(13, &by_id(created.topic_id)).await.topics[0];
        assert_eq!(found.name.as_deref().map(ToString::to_string), Some("new".into()));
        let unknown = client.call(13, &by_id(uuid::Uuid::from_u128(1))).await;
        assert_eq!(unknown.topics[0].error_code, ResponseError::UnknownTopicId.code());
    }

    let all = client.call(1, &MetadataRequest::default().with_topics(None)).await;
    assert_eq!(all.topics.len(), 1);
    let none = client.call(1, &MetadataRequest::default().with_topics(Some(vec![]))).await;
    assert_eq!(none.topics.len(), 0);
    let all_of_old = client.call(0, &MetadataRequest::default().with_topics(Some(vec![]))).await;
    assert_eq!(all_of_old.topics.len(), 1);
    assert_eq!(i32::from(server.addr().port()), all_of_old.brokers[0].port);

    let server = TestServer::with(16 << 20, |config| config.auto_create_topics = false).await;
    let refused = &server.client().await.call(12, &request("new", true)).await.topics[0];
    assert_eq!(refused.error_code, ResponseError::UnknownTopicOrPartition.code());
}

/// Clients and tools look for them, and skip them by their flag.
#[tokio::test(flavor = "multi_thread")]
async fn internal_topics_appear_when_requested_and_stay_empty() {
    use kafka_protocol::messages::{FindCoordinatorRequest, MetadataRequest};
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let all = MetadataRequest::default().with_topics(None);
    assert_eq!(client.call(12, &all).await.topics.len(), 1);
    for _ in 0..2 {
        for key_type in [0, 1] {
            let find = FindCoordinatorRequest::default()
                .with_key_type(key_type)
                .with_coordinator_keys(vec![text("key")]);
            assert_eq!(client.call(6, &find).await.coordinators[0].error_code, 0);
        }
    }
    let topics = client.call(12, &all).await.topics;
    let reported = topics.iter().map(|topic| {
        (topic.name.as_ref().unwrap().to_string(), topic.is_internal, topic.partitions.len())
    });
    let wanted = [("__consumer_offsets", true), ("__transaction_state", true), ("t", false)];
    assert!(reported.eq(wanted.map(|(name, is_internal)| (name.to_owned(), is_internal, 1))));
    let batch = crate::batch::tests::plain(&[1]);
    assert_eq!(
        client.produce("__consumer_offsets", 0, &batch).await,
        (ResponseError::InvalidTopicException.code(), -1)
    );
    assert_eq!(client.fetch("__consumer_offsets", 0, 0).await, (0, 0, bytes::Bytes::new()));
}
