//! A request of every API in every version with a value in every field, and decoding of both sides
//! by API key.

mod admin;
mod groups;
pub(crate) mod newer;
mod security;
pub(crate) mod share;
mod transactions;

use bytes::{Bytes, BytesMut};
use kafka_protocol::messages::*;
use kafka_protocol::protocol::{Decodable, Encodable, Request, StrBytes};
use uuid::Uuid;

use crate::wire::newer::Unchanged;
use crate::wire::offsets::{OffsetCommit, OffsetFetch};

/// The names and ids in an example, so that a server can be prepared for it.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) topic: &'static str,
    pub(crate) topic_id: Uuid,
    pub(crate) group: String,
    pub(crate) batch: Bytes,
    /// Names for topics to create and to delete: they must differ between versions.
    pub(crate) unique: String,
}

impl World {
    pub(crate) fn imaginary() -> Self {
        Self {
            topic: "topic",
            topic_id: Uuid::from_u128(0x1234_5678_9abc),
            group: "group".into(),
            batch: crate::batch::tests::plain(&[1, 2]),
            unique: "unique".into(),
        }
    }
}

fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

/// Encodes a request header and body; `max_wait` of fetches is short.
pub(crate) fn request(key: ApiKey, version: i16, correlation_id: i32, world: &World) -> Bytes {
    let mut out = header(key as i16, version, correlation_id, key.request_header_version(version));
    out.extend_from_slice(&body(key, version, world));
    out.freeze()
}

pub(crate) fn header(key: i16, version: i16, correlation_id: i32, header_version: i16) -> BytesMut {
    let mut out = BytesMut::new();
    RequestHeader::default()
        .with_request_api_key(key)
        .with_request_api_version(version)
        .with_correlation_id(correlation_id)
        .with_client_id(Some(text("a test")))
        .encode(&mut out, header_version)
        .unwrap();
    out
}

pub(crate) fn encode<R: Request>(request: &R, version: i16) -> Bytes {
    let mut out = BytesMut::new();
    request.encode(&mut out, version).unwrap_or_else(|e| panic!("v{version}: {e}"));
    out.freeze()
}

pub(crate) fn body(key: ApiKey, version: i16, world: &World) -> Bytes {
    // Fields that a version does not have must keep their defaults, or the encoder fails.
    let from = |first: i16| version >= first;
    let topic = || TopicName(text(world.topic));
    let name_until = |last: i16| if version <= last { topic() } else { TopicName::default() };
    let id_from = |first: i16| if version >= first { world.topic_id } else { Uuid::nil() };
    match key {
        ApiKey::Produce => {
            use produce_request::*;
            let partition = PartitionProduceData::default().with_records(Some(world.batch.clone()));
            let data = TopicProduceData::default()
                .with_name(name_until(12))
                .with_topic_id(id_from(13))
                .with_partition_data(vec![partition]);
            encode(
                &ProduceRequest::default()
                    .with_acks(-1)
                    .with_timeout_ms(10_000)
                    .with_topic_data(vec![data]),
                version,
            )
        }
        ApiKey::Fetch => {
            use fetch_request::*;
            let mut partition = FetchPartition::default().with_partition_max_bytes(1 << 20);
            if from(9) {
                partition.current_leader_epoch = 0;
            }
            if from(17) {
                partition.replica_directory_id = Uuid::from_u128(7);
            }
            let mut request = FetchRequest::default()
                .with_max_wait_ms(1)
                .with_min_bytes(1)
                .with_max_bytes(1 << 20)
                .with_isolation_level(1)
                .with_topics(vec![
                    FetchTopic::default()
                        .with_topic(name_until(12))
                        .with_topic_id(id_from(13))
                        .with_partitions(vec![partition]),
                ]);
            if from(7) {
                request.session_epoch = 0;
                request.forgotten_topics_data = vec![
                    ForgottenTopic::default()
                        .with_topic(name_until(12))
                        .with_topic_id(id_from(13))
                        .with_partitions(vec![8, 9]),
                ];
            }
            if from(11) {
                request.rack_id = text("rack");
            }
            if from(12) {
                request.cluster_id = Some(text("cluster"));
            }
            if from(15) {
                request.replica_state = ReplicaState::default().with_replica_epoch(3);
            }
            encode(&request, version)
        }
        ApiKey::ListOffsets => {
            use list_offsets_request::*;
            let partition = |index, timestamp| {
                ListOffsetsPartition::default()
                    .with_partition_index(index)
                    .with_timestamp(timestamp)
            };
            let topic = ListOffsetsTopic::default().with_name(topic()).with_partitions(vec![
                partition(0, -1),
                partition(1, -2),
                partition(2, if from(11) { -6 } else { 1 }),
            ]);
            let mut request = ListOffsetsRequest::default()
                .with_replica_id(BrokerId(-1))
                .with_topics(vec![topic]);
            if from(2) {
                request.isolation_level = 1;
            }
            if from(10) {
                request.timeout_ms = 5;
            }
            encode(&Unchanged(request), version)
        }
        ApiKey::Metadata => {
            use metadata_request::*;
            let mut request = MetadataRequest::default()
                .with_topics(Some(vec![MetadataRequestTopic::default().with_name(Some(topic()))]));
            if from(4) {
                request.allow_auto_topic_creation = false;
            }
            if (8..=10).contains(&version) {
                request.include_cluster_authorized_operations = true;
            }
            if from(8) {
                request.include_topic_authorized_operations = true;
            }
            encode(&request, version)
        }
        ApiKey::OffsetCommit => {
            use offset_commit_request::*;
            let mut partition = OffsetCommitRequestPartition::default()
                .with_committed_offset(1)
                .with_committed_metadata(Some(text("note")));
            if from(6) {
                partition.committed_leader_epoch = 0;
            }
            let topic = OffsetCommitRequestTopic::default()
                .with_name(name_until(9))
                .with_partitions(vec![partition]);
            let body = OffsetCommitRequest::default()
                .with_group_id(GroupId(text(&world.group)))
                .with_generation_id_or_member_epoch(-1)
                .with_topics(vec![topic]);
            encode(&OffsetCommit { body, topic_ids: vec![world.topic_id] }, version)
        }
        ApiKey::OffsetFetch => {
            use offset_fetch_request::*;
            let group = GroupId(text(&world.group));
            let mut request = OffsetFetchRequest::default();
            if from(8) {
                let topic = OffsetFetchRequestTopics::default()
                    .with_name(name_until(9))
                    .with_partition_indexes(vec![0, 1]);
                request.groups = vec![
                    OffsetFetchRequestGroup::default()
                        .with_group_id(group)
                        .with_topics(Some(vec![topic])),
                ];
            } else {
                let topic = OffsetFetchRequestTopic::default()
                    .with_name(topic())
                    .with_partition_indexes(vec![0, 1]);
                request.group_id = group;
                request.topics = Some(vec![topic]);
            }
            if from(7) {
                request.require_stable = true;
            }
            encode(&OffsetFetch { body: request, topic_ids: vec![vec![world.topic_id]] }, version)
        }
        ApiKey::FindCoordinator => {
            let mut request = FindCoordinatorRequest::default();
            if from(4) {
                request.coordinator_keys = vec![text(&world.group), text("other")];
            } else {
                request.key = text(&world.group);
            }
            encode(&request, version)
        }
        ApiKey::JoinGroup => {
            use join_group_request::*;
            let protocol = JoinGroupRequestProtocol::default()
                .with_name(text("range"))
                .with_metadata(Bytes::from_static(b"subscription"));
            let mut request = JoinGroupRequest::default()
                .with_group_id(GroupId(text(&world.group)))
                .with_session_timeout_ms(10_000)
                .with_protocol_type(text("consumer"))
                .with_protocols(vec![protocol]);
            if from(1) {
                request.rebalance_timeout_ms = 10_000;
            }
            if from(8) {
                request.reason = Some(text("because"));
            }
            encode(&request, version)
        }
        ApiKey::Heartbeat => encode(
            &HeartbeatRequest::default()
                .with_group_id(GroupId(text(&world.group)))
                .with_generation_id(1)
                .with_member_id(text("absent")),
            version,
        ),
        ApiKey::LeaveGroup => {
            use leave_group_request::*;
            let mut request =
                LeaveGroupRequest::default().with_group_id(GroupId(text(&world.group)));
            if from(3) {
                request.members = vec![MemberIdentity::default().with_member_id(text("absent"))];
            } else {
                request.member_id = text("absent");
            }
            encode(&request, version)
        }
        ApiKey::SyncGroup => {
            use sync_group_request::*;
            let assignment = SyncGroupRequestAssignment::default()
                .with_member_id(text("absent"))
                .with_assignment(Bytes::from_static(b"assignment"));
            let mut request = SyncGroupRequest::default()
                .with_group_id(GroupId(text(&world.group)))
                .with_generation_id(1)
                .with_member_id(text("absent"))
                .with_assignments(vec![assignment]);
            if from(5) {
                request.protocol_type = Some(text("consumer"));
                request.protocol_name = Some(text("range"));
            }
            encode(&request, version)
        }
        ApiKey::DescribeGroups => {
            let mut request = DescribeGroupsRequest::default()
                .with_groups(vec![GroupId(text(&world.group)), GroupId(text("other"))]);
            if from(3) {
                request.include_authorized_operations = true;
            }
            encode(&request, version)
        }
        ApiKey::ListGroups => {
            let mut request = ListGroupsRequest::default();
            if from(4) {
                request.states_filter = vec![text("Stable"), text("Empty")];
            }
            if from(5) {
                request.types_filter = vec![text("classic")];
            }
            encode(&request, version)
        }
        ApiKey::ApiVersions => {
            let mut request = ApiVersionsRequest::default();
            if from(3) {
                request.client_software_name = text("test");
                request.client_software_version = text("1.0");
            }
            encode(&request, version)
        }
        ApiKey::CreateTopics => {
            use create_topics_request::*;
            let config = CreatableTopicConfig::default()
                .with_name(text("retention.ms"))
                .with_value(Some(text("1000")));
            let assignment = CreatableReplicaAssignment::default()
                .with_partition_index(0)
                .with_broker_ids(vec![BrokerId(1)]);
            let plain = CreatableTopic::default()
                .with_name(TopicName(text(&world.unique)))
                .with_num_partitions(2)
                .with_replication_factor(1)
                .with_configs(vec![config]);
            let assigned = CreatableTopic::default()
                .with_name(TopicName(text(&format!("{}-assigned", world.unique))))
                .with_num_partitions(-1)
                .with_replication_factor(-1)
                .with_assignments(vec![assignment]);
            encode(
                &CreateTopicsRequest::default()
                    .with_topics(vec![plain, assigned])
                    .with_timeout_ms(5_000),
                version,
            )
        }
        ApiKey::DeleteTopics => {
            use delete_topics_request::*;
            let name = TopicName(text(&world.unique));
            let mut request = DeleteTopicsRequest::default().with_timeout_ms(5_000);
            if from(6) {
                request.topics = vec![
                    DeleteTopicState::default().with_name(Some(name)),
                    DeleteTopicState::default().with_name(None).with_topic_id(Uuid::from_u128(9)),
                ];
            } else {
                request.topic_names = vec![name];
            }
            encode(&request, version)
        }
        ApiKey::InitProducerId => {
            let mut request = InitProducerIdRequest::default()
                .with_transactional_id(None)
                .with_transaction_timeout_ms(1);
            if from(3) {
                request.producer_id = ProducerId(5);
                request.producer_epoch = 1;
            }
            encode(&request, version)
        }
        ApiKey::OffsetForLeaderEpoch => {
            use offset_for_leader_epoch_request::*;
            let topic = OffsetForLeaderTopic::default().with_topic(topic()).with_partitions(vec![
                OffsetForLeaderPartition::default().with_current_leader_epoch(0),
            ]);
            let mut request = OffsetForLeaderEpochRequest::default().with_topics(vec![topic]);
            if from(3) {
                request.replica_id = BrokerId(-1);
            }
            encode(&request, version)
        }
        ApiKey::DescribeConfigs => {
            use describe_configs_request::*;
            let resource = |kind, name: &str| {
                DescribeConfigsResource::default()
                    .with_resource_type(kind)
                    .with_resource_name(text(name))
                    .with_configuration_keys(None)
            };
            let some = resource(2, world.topic)
                .with_configuration_keys(Some(vec![text("max.message.bytes"), text("no such")]));
            let mut request = DescribeConfigsRequest::default()
                .with_resources(vec![resource(2, world.topic), resource(4, "1"), some])
                .with_include_synonyms(true);
            if from(3) {
                request.include_documentation = true;
            }
            encode(&request, version)
        }
        ApiKey::CreatePartitions => {
            use create_partitions_request::*;
            let assignment =
                CreatePartitionsAssignment::default().with_broker_ids(vec![BrokerId(1)]);
            let topic = CreatePartitionsTopic::default()
                .with_name(topic())
                .with_count(4)
                .with_assignments(Some(vec![assignment]));
            encode(
                &CreatePartitionsRequest::default()
                    .with_topics(vec![topic])
                    .with_timeout_ms(5_000)
                    .with_validate_only(true),
                version,
            )
        }
        ApiKey::DeleteGroups => encode(
            &DeleteGroupsRequest::default().with_groups_names(vec![GroupId(text("no such group"))]),
            version,
        ),
        ApiKey::DescribeCluster => {
            let mut request =
                DescribeClusterRequest::default().with_include_cluster_authorized_operations(true);
            if from(2) {
                request.include_fenced_brokers = true;
            }
            encode(&request, version)
        }
        other => groups::body(other, version, world)
            .or_else(|| share::body(other, version, world))
            .or_else(|| transactions::body(other, version, world))
            .or_else(|| admin::body(other, version, world))
            .or_else(|| security::body(other, version, world))
            .unwrap_or_else(|| panic!("no example of {other:?}")),
    }
}

/// Calls a generic function with the request type of an API.
macro_rules! for_request_of {
    ($key:expr, $call:ident ( $($arg:expr),* )) => {
        match $key {
            ApiKey::Produce => $call::<ProduceRequest>($($arg),*),
            ApiKey::Fetch => $call::<FetchRequest>($($arg),*),
            ApiKey::ListOffsets => $call::<Unchanged<ListOffsetsRequest>>($($arg),*),
            ApiKey::Metadata => $call::<MetadataRequest>($($arg),*),
            ApiKey::OffsetCommit => $call::<OffsetCommit>($($arg),*),
            ApiKey::OffsetFetch => $call::<OffsetFetch>($($arg),*),
            ApiKey::FindCoordinator => $call::<FindCoordinatorRequest>($($arg),*),
            ApiKey::JoinGroup => $call::<JoinGroupRequest>($($arg),*),
            ApiKey::Heartbeat => $call::<HeartbeatRequest>($($arg),*),
            ApiKey::LeaveGroup => $call::<LeaveGroupRequest>($($arg),*),
            ApiKey::SyncGroup => $call::<SyncGroupRequest>($($arg),*),
            ApiKey::DescribeGroups => $call::<DescribeGroupsRequest>($($arg),*),
            ApiKey::ListGroups => $call::<ListGroupsRequest>($($arg),*),
            ApiKey::ApiVersions => $call::<ApiVersionsRequest>($($arg),*),
            ApiKey::CreateTopics => $call::<CreateTopicsRequest>($($arg),*),
            ApiKey::DeleteTopics => $call::<DeleteTopicsRequest>($($arg),*),
            ApiKey::InitProducerId => $call::<InitProducerIdRequest>($($arg),*),
            ApiKey::OffsetForLeaderEpoch => $call::<OffsetForLeaderEpochRequest>($($arg),*),
            ApiKey::DescribeConfigs => $call::<DescribeConfigsRequest>($($arg),*),
            ApiKey::CreatePartitions => $call::<CreatePartitionsRequest>($($arg),*),
            ApiKey::DeleteGroups => $call::<DeleteGroupsRequest>($($arg),*),
            ApiKey::SaslHandshake => $call::<SaslHandshakeRequest>($($arg),*),
            ApiKey::SaslAuthenticate => $call::<SaslAuthenticateRequest>($($arg),*),
            ApiKey::DescribeUserScramCredentials => {
                $call::<DescribeUserScramCredentialsRequest>($($arg),*)
            }
            ApiKey::AlterUserScramCredentials => {
                $call::<AlterUserScramCredentialsRequest>($($arg),*)
            }
            ApiKey::DescribeAcls => $call::<DescribeAclsRequest>($($arg),*),
            ApiKey::CreateAcls => $call::<CreateAclsRequest>($($arg),*),
            ApiKey::DeleteAcls => $call::<DeleteAclsRequest>($($arg),*),
            ApiKey::DescribeQuorum => $call::<DescribeQuorumRequest>($($arg),*),
            ApiKey::UpdateFeatures => $call::<UpdateFeaturesRequest>($($arg),*),
            ApiKey::DescribeCluster => $call::<DescribeClusterRequest>($($arg),*),
            ApiKey::AddPartitionsToTxn => $call::<AddPartitionsToTxnRequest>($($arg),*),
            ApiKey::AddOffsetsToTxn => $call::<AddOffsetsToTxnRequest>($($arg),*),
            ApiKey::EndTxn => $call::<EndTxnRequest>($($arg),*),
            ApiKey::WriteTxnMarkers => $call::<WriteTxnMarkersRequest>($($arg),*),
            ApiKey::TxnOffsetCommit => $call::<TxnOffsetCommitRequest>($($arg),*),
            ApiKey::DescribeProducers => $call::<DescribeProducersRequest>($($arg),*),
            ApiKey::DescribeTransactions => $call::<DescribeTransactionsRequest>($($arg),*),
            ApiKey::ListTransactions => $call::<ListTransactionsRequest>($($arg),*),
            ApiKey::AlterConfigs => $call::<AlterConfigsRequest>($($arg),*),
            ApiKey::IncrementalAlterConfigs => $call::<IncrementalAlterConfigsRequest>($($arg),*),
            ApiKey::DeleteRecords => $call::<DeleteRecordsRequest>($($arg),*),
            ApiKey::AlterReplicaLogDirs => $call::<AlterReplicaLogDirsRequest>($($arg),*),
            ApiKey::DescribeLogDirs => $call::<Unchanged<DescribeLogDirsRequest>>($($arg),*),
            ApiKey::ElectLeaders => $call::<ElectLeadersRequest>($($arg),*),
            ApiKey::AlterPartitionReassignments => {
                $call::<AlterPartitionReassignmentsRequest>($($arg),*)
            }
            ApiKey::ListPartitionReassignments => {
                $call::<ListPartitionReassignmentsRequest>($($arg),*)
            }
            ApiKey::OffsetDelete => $call::<OffsetDeleteRequest>($($arg),*),
            ApiKey::DescribeTopicPartitions => $call::<DescribeTopicPartitionsRequest>($($arg),*),
            ApiKey::DescribeClientQuotas => $call::<DescribeClientQuotasRequest>($($arg),*),
            ApiKey::AlterClientQuotas => $call::<AlterClientQuotasRequest>($($arg),*),
            ApiKey::ListConfigResources => $call::<ListConfigResourcesRequest>($($arg),*),
            ApiKey::ConsumerGroupHeartbeat => $call::<ConsumerGroupHeartbeatRequest>($($arg),*),
            ApiKey::ConsumerGroupDescribe => $call::<ConsumerGroupDescribeRequest>($($arg),*),
            ApiKey::ShareGroupHeartbeat => $call::<ShareGroupHeartbeatRequest>($($arg),*),
            ApiKey::ShareGroupDescribe => $call::<ShareGroupDescribeRequest>($($arg),*),
            ApiKey::ShareFetch => $call::<crate::wire::share::ShareFetch>($($arg),*),
            ApiKey::ShareAcknowledge => $call::<crate::wire::share::ShareAcknowledge>($($arg),*),
            ApiKey::DescribeShareGroupOffsets => {
                $call::<crate::wire::share::DescribeShareOffsets>($($arg),*)
            }
            ApiKey::AlterShareGroupOffsets => $call::<AlterShareGroupOffsetsRequest>($($arg),*),
            ApiKey::DeleteShareGroupOffsets => $call::<DeleteShareGroupOffsetsRequest>($($arg),*),
            other => panic!("no example of {other:?}"),
        }
    };
}

/// Decodes a request's header and body; returns the number of bytes after it.
pub(crate) fn decode_request(key: ApiKey, version: i16, mut bytes: Bytes) -> Result<usize, String> {
    fn decode<R: Request>(bytes: &mut Bytes, version: i16) -> Result<(), String> {
        R::decode(bytes, version).map(drop).map_err(|e| format!("{e:#}"))
    }
    RequestHeader::decode(&mut bytes, key.request_header_version(version))
        .map_err(|e| format!("{e:#}"))?;
    for_request_of!(key, decode(&mut bytes, version))?;
    Ok(bytes.len())
}

/// Decodes a response's header and body, which must be all of `bytes`; returns the body as text.
pub(crate) fn decode_response(
    key: ApiKey,
    version: i16,
    correlation_id: i32,
    mut bytes: Bytes,
) -> String {
    fn decode<R: Request>(bytes: &mut Bytes, version: i16) -> String
    where
        R::Response: std::fmt::Debug,
    {
        let response =
            R::Response::decode(bytes, version).unwrap_or_else(|e| panic!("v{version}: {e:#}"));
        format!("{response:?}")
    }
    let header = ResponseHeader::decode(&mut bytes, key.response_header_version(version)).unwrap();
    assert_eq!(header.correlation_id, correlation_id);
    let response = for_request_of!(key, decode(&mut bytes, version));
    assert!(bytes.is_empty(), "{key:?} v{version}: {} bytes after the response", bytes.len());
    response
}
