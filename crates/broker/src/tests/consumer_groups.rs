//! The consumer group protocol over TCP: what members receive, what admins see, what survives a
//! restart.

use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::consumer_group_describe_response::DescribedGroup;
use kafka_protocol::messages::consumer_group_heartbeat_request::TopicPartitions;
use kafka_protocol::messages::{
    ConsumerGroupDescribeRequest, ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse,
    DeleteGroupsRequest, DeleteTopicsRequest, DescribeGroupsRequest, GroupId, HeartbeatRequest,
    JoinGroupRequest, LeaveGroupRequest, ListGroupsRequest, ShareGroupDescribeRequest,
    ShareGroupHeartbeatRequest, TopicName,
};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::harness::{Client, HANG, TestServer, text};

const STALE_MEMBER_EPOCH: i16 = ResponseError::StaleMemberEpoch.code();
const FENCED_MEMBER_EPOCH: i16 = ResponseError::FencedMemberEpoch.code();
const UNKNOWN_MEMBER_ID: i16 = ResponseError::UnknownMemberId.code();
const GROUP_ID_NOT_FOUND: i16 = ResponseError::GroupIdNotFound.code();
const INVALID_REQUEST: i16 = ResponseError::InvalidRequest.code();

fn group(name: &str) -> GroupId {
    GroupId(text(name))
}

fn names(names: &[&str]) -> Option<Vec<TopicName>> {
    Some(names.iter().map(|name| TopicName(text(name))).collect())
}

fn join(name: &str, member: &str, topics: &[&str]) -> ConsumerGroupHeartbeatRequest {
    ConsumerGroupHeartbeatRequest::default()
        .with_group_id(group(name))
        .with_member_id(text(member))
        .with_rebalance_timeout_ms(60_000)
        .with_subscribed_topic_names(names(topics))
        .with_topic_partitions(Some(vec![]))
}

fn beat(name: &str, member: &str, epoch: i32) -> ConsumerGroupHeartbeatRequest {
    ConsumerGroupHeartbeatRequest::default()
        .with_group_id(group(name))
        .with_member_id(text(member))
        .with_member_epoch(epoch)
        .with_rebalance_timeout_ms(-1)
        .with_subscribed_topic_names(None)
        .with_topic_partitions(None)
}

fn owning(
    request: ConsumerGroupHeartbeatRequest,
    owned: &[(Uuid, Vec<i32>)],
) -> ConsumerGroupHeartbeatRequest {
    let topics = owned.iter().map(|(topic_id, partitions)| {
        TopicPartitions::default().with_topic_id(*topic_id).with_partitions(partitions.clone())
    });
    request.with_topic_partitions(Some(topics.collect()))
}

/// Partitions by topic.
type Assigned = Vec<(Uuid, Vec<i32>)>;

/// Epoch and assignment of a successful response.
fn good(response: &ConsumerGroupHeartbeatResponse) -> (i32, Option<Assigned>) {
    assert_eq!(response.error_code, 0, "{:?}", response.error_message);
    let topics = response.assignment.as_ref().map(|assignment| {
        let topics = assignment.topic_partitions.iter();
        topics.map(|topic| (topic.topic_id, topic.partitions.clone())).collect()
    });
    (response.member_epoch, topics)
}

async fn describe(client: &mut Client, name: &str) -> DescribedGroup {
    let request = ConsumerGroupDescribeRequest::default().with_group_ids(vec![group(name)]);
    client.call(1, &request).await.groups.remove(0)
}

async fn listed(client: &mut Client, types: &[&str]) -> Vec<(String, String, String)> {
    let request = ListGroupsRequest::default()
        .with_types_filter(types.iter().map(|name| text(name)).collect());
    let groups = client.call(5, &request).await.groups;
    let row = |text: &StrBytes| text.as_str().to_owned();
    let rows = groups.iter().map(|g| (row(&g.group_id), row(&g.group_type), row(&g.group_state)));
    rows.collect()
}

async fn commit(client: &mut Client, version: i16, name: &str, member: &str, epoch: i32) -> i16 {
    use kafka_protocol::messages::offset_commit_request::*;
    let partition = OffsetCommitRequestPartition::default().with_committed_offset(7);
    let topic = OffsetCommitRequestTopic::default()
        .with_name(TopicName(text("t")))
        .with_partitions(vec![partition]);
    let request = OffsetCommitRequest::default()
        .with_group_id(group(name))
        .with_member_id(text(member))
        .with_generation_id_or_member_epoch(epoch)
        .with_topics(vec![topic]);
    client.call(version, &request).await.topics[0].partitions[0].error_code
}

/// Error code, and the committed offset of the first partition.
async fn committed(
    client: &mut Client,
    name: &str,
    member: Option<&str>,
    epoch: i32,
) -> (i16, i64) {
    use kafka_protocol::messages::offset_fetch_request::*;
    let topic = OffsetFetchRequestTopics::default()
        .with_name(TopicName(text("t")))
        .with_partition_indexes(vec![0]);
    let wanted = OffsetFetchRequestGroup::default()
        .with_group_id(group(name))
        .with_member_id(member.map(text))
        .with_member_epoch(epoch)
        .with_topics(Some(vec![topic]));
    let request = OffsetFetchRequest::default().with_groups(vec![wanted]);
    let found = client.call(9, &request).await.groups.remove(0);
    let offset = found.topics.first().map_or(-1, |topic| topic.partitions[0].committed_offset);
    (found.error_code, offset)
}

async fn delete(client: &mut Client, name: &str) -> i16 {
    let request = DeleteGroupsRequest::default().with_groups_names(vec![group(name)]);
    client.call(2, &request).await.results[0].error_code
}

/// All operations without an authorizer, but only for groups that exist.
#[tokio::test(flavor = "multi_thread")]
async fn authorized_operations_of_a_group_are_described() {
    const ALL: i32 = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11;
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    good(&client.call(1, &join("g", "a", &["t"])).await);
    let share = ShareGroupHeartbeatRequest::default()
        .with_group_id(group("s"))
        .with_member_id(text("a"))
        .with_subscribed_topic_names(names(&["t"]));
    assert_eq!(client.call(1, &share).await.error_code, 0);

    let request = ConsumerGroupDescribeRequest::default()
        .with_group_ids(vec![group("g"), group("none")])
        .with_include_authorized_operations(true);
    let groups = client.call(1, &request).await.groups;
    assert_eq!(groups.iter().map(|g| g.authorized_operations).collect::<Vec<_>>(), [ALL, i32::MIN]);
    let request = ShareGroupDescribeRequest::default()
        .with_group_ids(vec![group("s"), group("none")])
        .with_include_authorized_operations(true);
    let groups = client.call(1, &request).await.groups;
    assert_eq!(groups.iter().map(|g| g.authorized_operations).collect::<Vec<_>>(), [ALL, i32::MIN]);
    // Before version 6 a group that does not exist is described as one without members.
    for (version, reported) in [(5, ALL), (6, i32::MIN)] {
        let request = DescribeGroupsRequest::default()
            .with_groups(vec![group("none")])
            .with_include_authorized_operations(true);
        assert_eq!(client.call(version, &request).await.groups[0].authorized_operations, reported);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_members_share_a_topic_and_admins_see_their_assignments() {
    let server = TestServer::start().await;
    let t = server.topic("t", 4, &[]).await;
    let mut client = server.client().await;

    let first = client.call(1, &join("g", "a", &["t"])).await;
    assert_eq!(good(&first), (1, Some(vec![(t, vec![0, 1, 2, 3])])));
    assert_eq!((first.member_id.as_deref(), first.heartbeat_interval_ms), (Some("a"), 5000));
    // In version 0 the server generates the member's id.
    let second = client.call(0, &join("g", "", &["t"])).await;
    assert_eq!(good(&second), (2, Some(vec![])));
    let b = second.member_id.unwrap().as_str().to_owned();
    assert!(Uuid::parse_str(&b).is_ok(), "{b}");
    assert_eq!(describe(&mut client, "g").await.group_state.as_str(), "Reconciling");

    let (epoch, kept) = good(&client.call(1, &beat("g", "a", 1)).await);
    let kept = kept.expect("it has to give up two");
    assert_eq!((epoch, kept[0].1.len()), (1, 2));
    assert_eq!(good(&client.call(1, &owning(beat("g", "a", 1), &kept)).await), (2, None));
    let (_, gained) = good(&client.call(1, &beat("g", &b, 2)).await);
    assert_eq!(gained.expect("the released partitions")[0].1.len(), 2);

    let described = describe(&mut client, "g").await;
    assert_eq!(described.group_state.as_str(), "Stable");
    assert_eq!((described.group_epoch, described.assignment_epoch), (2, 2));
    assert_eq!(described.assignor_name.as_str(), "uniform");
    let one = described.members.iter().find(|member| member.member_id.as_str() == "a").unwrap();
    assert_eq!((one.member_epoch, one.member_type), (2, 1));
    assert!(one.client_host.starts_with("/127.0.0.1"));
    assert_eq!(one.assignment.topic_partitions[0].topic_name.as_str(), "t");
    assert_eq!(one.assignment.topic_partitions[0].partitions, kept[0].1);
    assert_eq!(one.assignment, one.target_assignment);

    let row = |state: &str| ("g".to_owned(), "consumer".to_owned(), state.to_owned());
    assert_eq!(listed(&mut client, &["Consumer"]).await, [row("Stable")]);
    assert_eq!(listed(&mut client, &["classic"]).await, []);
    // The older request is for classic groups.
    let request = DescribeGroupsRequest::default().with_groups(vec![group("g")]);
    let classic = client.call(6, &request).await.groups.remove(0);
    assert_eq!((classic.error_code, classic.group_state.as_str()), (GROUP_ID_NOT_FOUND, "Dead"));

    assert_eq!(commit(&mut client, 9, "g", "a", 2).await, 0);
    // It has had the partition since then, and the other one has not.
    assert!(kept[0].1.contains(&0));
    assert_eq!(commit(&mut client, 9, "g", "a", 1).await, 0);
    assert_eq!(commit(&mut client, 9, "g", &b, 1).await, STALE_MEMBER_EPOCH);
    assert_eq!(commit(&mut client, 9, "g", "a", 3).await, STALE_MEMBER_EPOCH);
    assert_eq!(commit(&mut client, 9, "g", "x", 2).await, UNKNOWN_MEMBER_ID);
    assert_eq!(commit(&mut client, 9, "g", "", -1).await, UNKNOWN_MEMBER_ID);
    assert_eq!(
        commit(&mut client, 8, "g", "a", 2).await,
        ResponseError::UnsupportedVersion.code(),
        "a version without epochs"
    );
    assert_eq!(commit(&mut client, 9, "no-such", "a", 2).await, GROUP_ID_NOT_FOUND);
    assert_eq!(
        commit(&mut client, 8, "no-such", "a", 2).await,
        ResponseError::IllegalGeneration.code()
    );
    assert_eq!(committed(&mut client, "g", Some("a"), 2).await, (0, 7));
    assert_eq!(committed(&mut client, "g", Some("a"), 1).await.0, STALE_MEMBER_EPOCH);
    assert_eq!(committed(&mut client, "g", Some("x"), 2).await.0, UNKNOWN_MEMBER_ID);
    assert_eq!(committed(&mut client, "g", None, -1).await, (0, 7));

    // Offsets of a topic that members read stay.
    let forget = {
        use kafka_protocol::messages::offset_delete_request::*;
        let partition = OffsetDeleteRequestPartition::default();
        let topic = OffsetDeleteRequestTopic::default()
            .with_name(TopicName(text("t")))
            .with_partitions(vec![partition]);
        OffsetDeleteRequest::default().with_group_id(group("g")).with_topics(vec![topic])
    };
    assert_eq!(
        client.call(0, &forget).await.topics[0].partitions[0].error_code,
        ResponseError::GroupSubscribedToTopic.code()
    );
    assert_eq!(delete(&mut client, "g").await, ResponseError::NonEmptyGroup.code());
    for member in ["a", &b] {
        let left = client.call(1, &beat("g", member, -1)).await;
        assert_eq!((left.error_code, left.member_epoch), (0, -1));
    }
    assert_eq!(listed(&mut client, &[]).await, [row("Empty")]);
    assert_eq!(
        commit(&mut client, 9, "g", "", -1).await,
        0,
        "an admin, for a group without members"
    );
    assert_eq!(delete(&mut client, "g").await, 0);
    assert_eq!(describe(&mut client, "g").await.error_code, GROUP_ID_NOT_FOUND);
    assert_eq!(committed(&mut client, "g", None, -1).await, (0, -1));
    assert_eq!(listed(&mut client, &[]).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn members_continue_after_a_restart_without_a_rebalance() {
    for uploads in [None, Some(false), Some(true)] {
        let mut server = TestServer::start().await;
        let t = server.topic("t", 4, &[]).await;
        server.topic("u", 1, &[]).await;
        let mut client = server.client().await;
        let mut static_join = join("g", "a", &["t", "u"]);
        static_join.instance_id = Some(text("i"));
        let (_, all) = good(&client.call(1, &static_join).await);
        let all = all.unwrap();
        client.call(1, &join("g", "b", &["t"])).await;
        client.call(1, &join("gone", "c", &["t"])).await;
        client.call(1, &beat("gone", "c", -1)).await;
        assert_eq!(delete(&mut client, "gone").await, 0);
        // In the middle of a rebalance: the first member has to give up partitions.
        let (_, kept) = good(&client.call(1, &beat("g", "a", 1)).await);
        let kept = kept.unwrap();
        assert_ne!(all, kept);
        let before = describe(&mut client, "g").await;

        match uploads {
            None => server.restart().await,
            Some(false) => server.crash().await,
            Some(true) => {
                server.store().flush().await.unwrap();
                server.crash().await;
            }
        }
        let mut client = server.client().await;
        assert_eq!(describe(&mut client, "g").await, before, "{uploads:?}");
        assert_eq!(describe(&mut client, "gone").await.error_code, GROUP_ID_NOT_FOUND);
        assert_eq!(good(&client.call(1, &beat("g", "b", 2)).await), (2, None));
        let fenced = client.call(1, &owning(beat("g", "a", 2), &kept)).await;
        assert_eq!(fenced.error_code, FENCED_MEMBER_EPOCH, "an epoch that was not issued");
        assert_eq!(good(&client.call(1, &owning(beat("g", "a", 1), &kept)).await), (2, None));
        let (epoch, gained) = good(&client.call(1, &beat("g", "b", 2)).await);
        assert_eq!(epoch, 2);
        assert!(
            gained.unwrap().iter().all(|(topic, partitions)| *topic == t && !partitions.is_empty())
        );
        let after = describe(&mut client, "g").await;
        assert_eq!((after.group_epoch, after.group_state.as_str()), (2, "Stable"));
        assert_eq!(commit(&mut client, 9, "g", "b", 2).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_assignment_is_returned_before_it_is_durable() {
    let mut server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let mut other = server.client().await;
    server.hold_disk(true);
    let joining = client.send(1, &join("g", "a", &["t"])).await;
    server.begun("ConsumerGroupHeartbeat", 1, 1).await;
    // A repeated request writes nothing, but waits for the record of the first. So does a describe
    // request.
    let again = other.send(1, &join("g", "a", &["t"])).await;
    server.begun("ConsumerGroupHeartbeat", 1, 2).await;
    for waiting in [&mut client, &mut other] {
        let mut byte = [0];
        let peek = tokio::time::timeout(Duration::from_millis(50), waiting.socket.peek(&mut byte));
        assert!(peek.await.is_err(), "a response before anything is on the disk");
    }
    server.hold_disk(false);
    let first = client.receive::<ConsumerGroupHeartbeatRequest>(1, joining).await;
    let second = other.receive::<ConsumerGroupHeartbeatRequest>(1, again).await;
    assert_eq!(good(&first), good(&second));
    server.crash().await;
    let mut client = server.client().await;
    assert_eq!(
        good(&client.call(1, &beat("g", "a", first.member_epoch)).await).0,
        first.member_epoch
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_members_changes_its_type_and_keeps_its_offsets() {
    use kafka_protocol::messages::join_group_request::JoinGroupRequestProtocol;
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let classic_join = JoinGroupRequest::default()
        .with_group_id(group("g"))
        .with_session_timeout_ms(10_000)
        .with_rebalance_timeout_ms(10_000)
        .with_protocol_type(text("connect"))
        .with_protocols(vec![JoinGroupRequestProtocol::default().with_name(text("range"))]);
    let leave = |member: &StrBytes| {
        LeaveGroupRequest::default().with_group_id(group("g")).with_member_id(member.clone())
    };
    let joined = client.call(3, &classic_join).await;
    assert_eq!(joined.error_code, 0);
    // The members are not consumers, so they are not converted.
    let refused = client.call(1, &join("g", "a", &["t"])).await;
    assert_eq!(refused.error_code, GROUP_ID_NOT_FOUND);
    assert_eq!(refused.error_message.as_deref(), Some("Group g is not a consumer group."));
    assert_eq!(describe(&mut client, "g").await.error_code, GROUP_ID_NOT_FOUND);
    assert_eq!(client.call(1, &leave(&joined.member_id)).await.error_code, 0);
    assert_eq!(commit(&mut client, 9, "g", "", -1).await, 0);

    assert_eq!(good(&client.call(1, &join("g", "a", &["t"])).await).0, 1);
    assert_eq!(committed(&mut client, "g", Some("a"), 1).await, (0, 7));
    assert_eq!(
        client.call(3, &classic_join).await.error_code,
        ResponseError::InconsistentGroupProtocol.code()
    );
    let heartbeat = HeartbeatRequest::default().with_group_id(group("g")).with_member_id(text("a"));
    assert_eq!(client.call(4, &heartbeat).await.error_code, UNKNOWN_MEMBER_ID);
    assert_eq!(client.call(1, &leave(&text("a"))).await.error_code, UNKNOWN_MEMBER_ID);

    assert_eq!(client.call(1, &beat("g", "a", -1)).await.error_code, 0);
    server.crash().await;
    let mut client = server.client().await;
    let row = |kind: &str, state: &str| vec![("g".to_owned(), kind.to_owned(), state.to_owned())];
    assert_eq!(listed(&mut client, &[]).await, row("consumer", "Empty"));
    assert_eq!(client.call(3, &classic_join).await.error_code, 0);
    assert_eq!(listed(&mut client, &[]).await, row("classic", "CompletingRebalance"));
    assert_eq!(committed(&mut client, "g", None, -1).await, (0, 7));
    server.crash().await;
    let mut client = server.client().await;
    assert_eq!(listed(&mut client, &[]).await, row("classic", "Empty"));
}

/// Static or not; closed, killed, and killed after an upload.
#[tokio::test(flavor = "multi_thread")]
async fn members_of_a_classic_group_continue_after_a_restart_without_a_rebalance() {
    use kafka_protocol::messages::SyncGroupRequest;
    use kafka_protocol::messages::join_group_request::JoinGroupRequestProtocol;
    use kafka_protocol::messages::sync_group_request::SyncGroupRequestAssignment;
    const FENCED_INSTANCE_ID: i16 = ResponseError::FencedInstanceId.code();
    let mut server = TestServer::start().await;
    let mut client = server.client().await;
    let range = JoinGroupRequestProtocol::default().with_name(text("range"));
    let join_as = |name: &str, member: &StrBytes| {
        JoinGroupRequest::default()
            .with_group_id(group(name))
            .with_group_instance_id((name == "static").then(|| text("i")))
            .with_member_id(member.clone())
            .with_session_timeout_ms(60_000)
            .with_rebalance_timeout_ms(60_000)
            .with_protocol_type(text("connect"))
            .with_protocols(vec![range.clone()])
    };
    let sync = |name: &str, member: &StrBytes| {
        SyncGroupRequest::default()
            .with_group_id(group(name))
            .with_group_instance_id((name == "static").then(|| text("i")))
            .with_member_id(member.clone())
            .with_generation_id(1)
    };
    let heartbeat = |name: &str, member: &StrBytes| {
        HeartbeatRequest::default()
            .with_group_id(group(name))
            .with_group_instance_id((name == "static").then(|| text("i")))
            .with_member_id(member.clone())
            .with_generation_id(1)
    };
    let mut members = Vec::new();
    for name in ["dynamic", "static"] {
        let mut joined = client.call(5, &join_as(name, &StrBytes::new())).await;
        if joined.error_code == ResponseError::MemberIdRequired.code() {
            joined = client.call(5, &join_as(name, &joined.member_id)).await;
        }
        assert_eq!((joined.error_code, joined.generation_id), (0, 1), "{name}");
        let assignment = SyncGroupRequestAssignment::default()
            .with_member_id(joined.member_id.clone())
            .with_assignment(bytes::Bytes::from(name));
        let sync = sync(name, &joined.member_id).with_assignments(vec![assignment]);
        assert_eq!(client.call(3, &sync).await.error_code, 0);
        members.push((name, joined.member_id));
    }
    let row = |name: &str| (name.to_owned(), "classic".to_owned(), "Stable".to_owned());
    for uploads in [None, Some(false), Some(true)] {
        match uploads {
            None => server.restart().await,
            Some(false) => server.crash().await,
            Some(true) => {
                server.store().flush().await.unwrap();
                server.crash().await;
            }
        }
        client = server.client().await;
        assert_eq!(listed(&mut client, &[]).await, [row("dynamic"), row("static")], "{uploads:?}");
        for (name, member) in &mut members {
            assert_eq!(client.call(3, &heartbeat(name, member)).await.error_code, 0, "{name}");
            let synced = client.call(3, &sync(name, member)).await;
            assert_eq!((synced.error_code, &*synced.assignment), (0, name.as_bytes()));
            if *name == "static" {
                // Its client was restarted as well.
                let joined = client.call(5, &join_as(name, &StrBytes::new())).await;
                assert_eq!((joined.error_code, joined.generation_id), (0, 1));
                let fenced = client.call(3, &heartbeat(name, member)).await;
                assert_eq!(fenced.error_code, FENCED_INSTANCE_ID);
                *member = joined.member_id;
            }
        }
    }
}

/// Encodes what a consumer, or a leader for a member, embeds in the classic protocol.
fn embedded<M: kafka_protocol::protocol::Encodable>(message: &M) -> bytes::Bytes {
    use bytes::BufMut;
    let mut bytes = bytes::BytesMut::new();
    bytes.put_i16(0);
    message.encode(&mut bytes, 0).unwrap();
    bytes.freeze()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_classic_consumers_is_converted_and_converted_back() {
    use kafka_protocol::messages::consumer_protocol_assignment::TopicPartition;
    use kafka_protocol::messages::join_group_request::JoinGroupRequestProtocol;
    use kafka_protocol::messages::sync_group_request::SyncGroupRequestAssignment;
    use kafka_protocol::messages::*;
    use kafka_protocol::protocol::Decodable;
    const REBALANCE_IN_PROGRESS: i16 = ResponseError::RebalanceInProgress.code();
    const ILLEGAL_GENERATION: i16 = ResponseError::IllegalGeneration.code();
    let mut server = TestServer::start().await;
    server.topic("t", 4, &[]).await;
    let (mut old, mut new) = (server.client().await, server.client().await);
    let metadata = embedded(&ConsumerProtocolSubscription::default().with_topics(vec![text("t")]));
    let range =
        JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(metadata);
    let join_as = |member: &StrBytes| {
        JoinGroupRequest::default()
            .with_group_id(group("g"))
            .with_session_timeout_ms(10_000)
            .with_rebalance_timeout_ms(10_000)
            .with_member_id(member.clone())
            .with_protocol_type(text("consumer"))
            .with_protocols(vec![range.clone()])
    };
    let sync = |member: &StrBytes, generation: i32| {
        SyncGroupRequest::default()
            .with_group_id(group("g"))
            .with_member_id(member.clone())
            .with_generation_id(generation)
    };
    let heartbeat = |member: &StrBytes, generation: i32| {
        HeartbeatRequest::default()
            .with_group_id(group("g"))
            .with_member_id(member.clone())
            .with_generation_id(generation)
    };
    let assigned = |assignment: bytes::Bytes| {
        let reported = ConsumerProtocolAssignment::decode(&mut assignment.slice(2..), 0).unwrap();
        reported.assigned_partitions.iter().map(|topic| topic.partitions.len()).sum::<usize>()
    };

    let joined = old.call(3, &join_as(&StrBytes::new())).await;
    let id = joined.member_id.clone();
    assert_eq!((joined.error_code, joined.generation_id, &joined.leader), (0, 1, &id));
    // While the assignment is unknown no member is accepted: COORDINATOR_LOAD_IN_PROGRESS, which
    // clients retry.
    assert_eq!(
        new.call(1, &join("g", "new", &["t"])).await.error_code,
        ResponseError::CoordinatorLoadInProgress.code()
    );
    let all = TopicPartition::default()
        .with_topic(TopicName(text("t")))
        .with_partitions(vec![0, 1, 2, 3]);
    let all = embedded(&ConsumerProtocolAssignment::default().with_assigned_partitions(vec![all]));
    let all = SyncGroupRequestAssignment::default().with_member_id(id.clone()).with_assignment(all);
    let synced = old.call(3, &sync(&id, 1).with_assignments(vec![all])).await;
    assert_eq!((synced.error_code, assigned(synced.assignment)), (0, 4));

    assert_eq!(good(&new.call(1, &join("g", "new", &["t"])).await), (2, Some(vec![])));
    assert_eq!(listed(&mut new, &[]).await[0].1, "consumer");
    let described = describe(&mut new, "g").await;
    let types: Vec<_> =
        described.members.iter().map(|m| (&*m.member_id == "new", m.member_type)).collect();
    assert!(types.contains(&(true, 1)) && types.contains(&(false, 0)), "{types:?}");
    // The old one continues until it learns of the new epoch, and commits in a version without
    // epochs.
    assert_eq!(commit(&mut old, 8, "g", &id, 1).await, 0);
    for version in [8, 9] {
        assert_eq!(commit(&mut old, version, "g", &id, 7).await, ILLEGAL_GENERATION);
    }
    assert_eq!(committed(&mut old, "g", Some(&id), 1).await, (0, 7));
    assert_eq!(committed(&mut old, "g", Some(&id), 7).await.0, ILLEGAL_GENERATION);
    assert_eq!(old.call(3, &heartbeat(&id, 1)).await.error_code, REBALANCE_IN_PROGRESS);
    let joined = old.call(3, &join_as(&id)).await;
    assert_eq!((joined.error_code, joined.generation_id, &*joined.leader), (0, 2, ""));
    let synced = old.call(3, &sync(&id, 2)).await;
    assert_eq!((synced.error_code, assigned(synced.assignment)), (0, 2));
    let (epoch, partitions) = good(&new.call(1, &beat("g", "new", 2)).await);
    assert_eq!((epoch, partitions.unwrap()[0].1.len()), (2, 2));
    assert_eq!(old.call(3, &heartbeat(&id, 2)).await.error_code, 0);

    // After a restart the old one joins again, with its partitions; the new one continues.
    server.crash().await;
    let (mut old, mut new) = (server.client().await, server.client().await);
    assert_eq!(commit(&mut old, 8, "g", &id, 2).await, 0);
    assert_eq!(commit(&mut old, 8, "g", &id, 1).await, ILLEGAL_GENERATION, "it knows no epochs");
    assert_eq!(old.call(3, &heartbeat(&id, 2)).await.error_code, REBALANCE_IN_PROGRESS);
    assert_eq!(good(&new.call(1, &beat("g", "new", 2)).await).0, 2);
    let joined = old.call(3, &join_as(&id)).await;
    assert_eq!((joined.error_code, joined.generation_id), (0, 2));
    let synced = old.call(3, &sync(&id, 2)).await;
    assert_eq!((synced.error_code, assigned(synced.assignment)), (0, 2));

    assert_eq!(new.call(1, &beat("g", "new", -1)).await.error_code, 0);
    let row = |kind: &str, state: &str| vec![("g".to_owned(), kind.to_owned(), state.to_owned())];
    assert_eq!(listed(&mut new, &[]).await, row("classic", "PreparingRebalance"));
    // It is still in its generation: it learns that it has to join again, and commits before it
    // does.
    let generation = joined.generation_id;
    assert_eq!(old.call(3, &heartbeat(&id, generation)).await.error_code, REBALANCE_IN_PROGRESS);
    assert_eq!(commit(&mut old, 8, "g", &id, generation).await, 0);
    let joined = old.call(3, &join_as(&id)).await;
    assert_eq!((joined.error_code, &joined.leader), (0, &id));
    assert!(joined.generation_id > generation);
    assert_eq!(committed(&mut new, "g", None, -1).await, (0, 7));
    // A converted group stays classic.
    server.crash().await;
    assert_eq!(listed(&mut server.client().await, &[]).await, row("classic", "Empty"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_classic_group_that_refuses_a_member_stays_classic() {
    use kafka_protocol::messages::join_group_request::JoinGroupRequestProtocol;
    use kafka_protocol::messages::{ConsumerProtocolSubscription, SyncGroupRequest};
    let server = TestServer::with(16 << 20, |config| config.groups.max_group_members = 1).await;
    server.topic("t", 4, &[]).await;
    let mut client = server.client().await;
    let metadata = embedded(&ConsumerProtocolSubscription::default().with_topics(vec![text("t")]));
    let range =
        JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(metadata);
    let classic_join = JoinGroupRequest::default()
        .with_group_id(group("g"))
        .with_session_timeout_ms(10_000)
        .with_rebalance_timeout_ms(10_000)
        .with_protocol_type(text("consumer"))
        .with_protocols(vec![range]);
    let joined = client.call(3, &classic_join).await;
    let sync = SyncGroupRequest::default()
        .with_group_id(group("g"))
        .with_member_id(joined.member_id.clone())
        .with_generation_id(1);
    assert_eq!(client.call(3, &sync).await.error_code, 0);

    assert_eq!(
        client.call(1, &join("g", "new", &["t"])).await.error_code,
        ResponseError::GroupMaxSizeReached.code()
    );
    let stable = ("g".to_owned(), "classic".to_owned(), "Stable".to_owned());
    assert_eq!(listed(&mut client, &[]).await, [stable]);
    let heartbeat = HeartbeatRequest::default()
        .with_group_id(group("g"))
        .with_member_id(joined.member_id)
        .with_generation_id(1);
    assert_eq!(client.call(3, &heartbeat).await.error_code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn created_grown_and_deleted_topics_reach_the_members() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let mut request = join("g", "a", &[]);
    request.subscribed_topic_regex = Some(text("t[0-9]"));
    assert_eq!(good(&client.call(1, &request).await), (1, Some(vec![])));
    server.topic("other", 1, &[]).await;
    assert_eq!(good(&client.call(1, &beat("g", "a", 1)).await), (1, None));
    let t = server.topic("t1", 1, &[]).await;
    assert_eq!(good(&client.call(1, &beat("g", "a", 1)).await), (2, Some(vec![(t, vec![0])])));
    let grow = {
        use kafka_protocol::messages::create_partitions_request::*;
        let topic = CreatePartitionsTopic::default()
            .with_name(TopicName(text("t1")))
            .with_count(2)
            .with_assignments(None);
        CreatePartitionsRequest::default().with_topics(vec![topic]).with_timeout_ms(10_000)
    };
    assert_eq!(client.call(3, &grow).await.results[0].error_code, 0);
    assert_eq!(good(&client.call(1, &beat("g", "a", 2)).await), (3, Some(vec![(t, vec![0, 1])])));
    let delete = DeleteTopicsRequest::default()
        .with_topic_names(vec![TopicName(text("t1"))])
        .with_timeout_ms(10_000);
    assert_eq!(client.call(5, &delete).await.responses[0].error_code, 0);
    assert_eq!(good(&client.call(1, &beat("g", "a", 3)).await), (3, Some(vec![])));
    assert_eq!(good(&client.call(1, &owning(beat("g", "a", 3), &[])).await), (4, None));
    // Another topic of the name is another topic.
    let anew = server.topic("t1", 1, &[]).await;
    assert_eq!(good(&client.call(1, &beat("g", "a", 4)).await), (5, Some(vec![(anew, vec![0])])));
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_members_are_removed() {
    let server = TestServer::with(16 << 20, |config| {
        let times = &mut config.groups.consumer;
        times.session_timeout = Duration::from_millis(300);
        times.min_session_timeout = Duration::from_millis(1);
        times.heartbeat_interval = Duration::from_millis(100);
        times.min_heartbeat_interval = Duration::from_millis(1);
    })
    .await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let joined = client.call(1, &join("g", "a", &["t"])).await;
    assert_eq!(joined.heartbeat_interval_ms, 100);
    let gone = async {
        while describe(&mut client, "g").await.group_state.as_str() != "Empty" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(HANG, gone).await.expect("the member stays");
    assert_eq!(client.call(1, &beat("g", "a", 1)).await.error_code, UNKNOWN_MEMBER_ID);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_can_have_its_own_timeouts() {
    use kafka_protocol::messages::incremental_alter_configs_request::*;
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let setting = AlterableConfig::default()
        .with_name(text("consumer.heartbeat.interval.ms"))
        .with_value(Some(text("7000")));
    let resource = AlterConfigsResource::default()
        .with_resource_type(32)
        .with_resource_name(text("slow"))
        .with_configs(vec![setting]);
    let alter = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
    assert_eq!(client.call(1, &alter).await.responses[0].error_code, 0);
    for (group, interval_ms) in [("slow", 7_000), ("other", 5_000)] {
        let joined = client.call(1, &join(group, "m", &["t"])).await;
        assert_eq!((joined.error_code, joined.heartbeat_interval_ms), (0, interval_ms));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_heartbeats_are_refused_with_a_reason() {
    let server = TestServer::with(16 << 20, |config| config.groups.max_group_members = 1).await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let good = || join("g", "a", &["t"]);
    type Edit = fn(&mut ConsumerGroupHeartbeatRequest);
    let bad: &[(Edit, i16)] = &[
        (|r| r.group_id = group(""), 24),
        (|r| r.member_id = text(""), INVALID_REQUEST),
        (|r| r.instance_id = Some(text("")), INVALID_REQUEST),
        (|r| r.rack_id = Some(text("")), INVALID_REQUEST),
        (|r| r.rebalance_timeout_ms = -1, INVALID_REQUEST),
        (|r| r.topic_partitions = None, INVALID_REQUEST),
        (|r| r.topic_partitions = Some(vec![TopicPartitions::default()]), INVALID_REQUEST),
        (|r| r.subscribed_topic_names = None, INVALID_REQUEST),
        (|r| r.member_epoch = -2, INVALID_REQUEST),
        (|r| r.member_epoch = -3, INVALID_REQUEST),
        (|r| r.member_id = text(&"x".repeat(1025)), INVALID_REQUEST),
        (|r| r.subscribed_topic_names = names(&[&*"x".repeat(1 << 10); 300]), INVALID_REQUEST),
        (|r| r.server_assignor = Some(text("cooperative-sticky")), 112),
        (|r| r.subscribed_topic_regex = Some(text("(")), 128),
        (|r| r.member_epoch = 1, GROUP_ID_NOT_FOUND),
    ];
    for (at, (edit, code)) in bad.iter().enumerate() {
        let mut request = good();
        edit(&mut request);
        let response = client.call(1, &request).await;
        assert_eq!(response.error_code, *code, "case {at}: {:?}", response.error_message);
        assert!(response.error_message.is_some_and(|message| !message.is_empty()), "case {at}");
    }
    assert_eq!(client.call(1, &good()).await.error_code, 0);
    assert_eq!(
        client.call(1, &join("g", "b", &["t"])).await.error_code,
        ResponseError::GroupMaxSizeReached.code()
    );
    assert_eq!(client.call(1, &beat("g", "b", 1)).await.error_code, UNKNOWN_MEMBER_ID);
    assert_eq!(client.call(1, &beat("g", "a", 9)).await.error_code, FENCED_MEMBER_EPOCH);
}
