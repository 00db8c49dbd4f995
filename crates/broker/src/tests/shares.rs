//! Share groups over TCP: what members receive, the delivery state of records, what survives a
//! restart.

mod table;

use std::time::Duration;

use alluvium_stream::StreamOffset;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::share_acknowledge_request as acked;
use kafka_protocol::messages::share_fetch_request as fetched;
use kafka_protocol::messages::{
    DeleteGroupsRequest, DeleteRecordsRequest, DeleteTopicsRequest, GroupId, JoinGroupRequest,
    ListGroupsRequest, ShareAcknowledgeRequest, ShareFetchRequest, ShareGroupDescribeRequest,
    ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse, TopicName,
    alter_share_group_offsets_request, delete_records_request, delete_share_group_offsets_request,
    join_group_request,
};
use tokio::net::TcpStream;
use uuid::Uuid;

use super::harness::{Client, HANG, TestServer, text};
use super::transactions::delete_topic;
use crate::batch::tests::plain;
use crate::configs::{Alteration, Entity, Op};
use crate::wire::share::{DescribeShareOffsets, ShareAcknowledge, ShareFetch};

const UNKNOWN_TOPIC_OR_PARTITION: i16 = ResponseError::UnknownTopicOrPartition.code();
const UNKNOWN_MEMBER_ID: i16 = ResponseError::UnknownMemberId.code();
const MEMBER_ID_REQUIRED: i16 = ResponseError::MemberIdRequired.code();
const INVALID_REQUEST: i16 = ResponseError::InvalidRequest.code();
const NON_EMPTY_GROUP: i16 = ResponseError::NonEmptyGroup.code();
const UNKNOWN_TOPIC_ID: i16 = ResponseError::UnknownTopicId.code();
const GROUP_ID_NOT_FOUND: i16 = ResponseError::GroupIdNotFound.code();
const INVALID_RECORD_STATE: i16 = ResponseError::InvalidRecordState.code();
const SESSION_NOT_FOUND: i16 = ResponseError::ShareSessionNotFound.code();
const INVALID_SESSION_EPOCH: i16 = ResponseError::InvalidShareSessionEpoch.code();

const ACCEPT: i8 = 1;
const RELEASE: i8 = 2;
const REJECT: i8 = 3;
const RENEW: i8 = 4;

fn group(name: &str) -> GroupId {
    GroupId(text(name))
}

fn beat(name: &str, member: &str, epoch: i32, topics: &[&str]) -> ShareGroupHeartbeatRequest {
    let names = topics.iter().map(|name| TopicName(text(name))).collect();
    ShareGroupHeartbeatRequest::default()
        .with_group_id(group(name))
        .with_member_id(text(member))
        .with_member_epoch(epoch)
        .with_subscribed_topic_names((epoch == 0).then_some(names))
}

/// Partitions by topic.
type Assigned = Vec<(Uuid, Vec<i32>)>;

/// Epoch and assignment of a successful response.
fn good(response: &ShareGroupHeartbeatResponse) -> (i32, Option<Assigned>) {
    assert_eq!(response.error_code, 0, "{:?}", response.error_message);
    let assignment = response.assignment.as_ref().map(|assignment| {
        let topics = assignment.topic_partitions.iter();
        topics.map(|topic| (topic.topic_id, topic.partitions.clone())).collect()
    });
    (response.member_epoch, assignment)
}

async fn set(server: &TestServer, of: Entity<'_>, name: &str, value: &str) {
    let ops = [(name.to_owned(), Op::Set(value.to_owned()))].into();
    let alteration = Alteration { ops, only_these: false };
    server.server().configs.alter(of, &alteration, false).await.unwrap();
}

/// A member of the group `g`, which reads one topic.
struct Member {
    client: Client<TcpStream>,
    id: &'static str,
    topic: Uuid,
    epoch: i32,
}

/// First and last offset, types.
type Acked<'a> = (i64, i64, &'a [i8]);
/// First and last offset, delivery count.
type Got = Vec<(i64, i64, i16)>;

impl Member {
    async fn new(server: &TestServer, id: &'static str, topic: Uuid) -> Self {
        let mut client = server.client().await;
        good(&client.call(1, &beat("g", id, 0, &["t"])).await);
        Self { client, id, topic, epoch: 0 }
    }

    fn fetch_of(&mut self, partitions: &[i32], acks: &[Acked<'_>], wait_ms: i32) -> ShareFetch {
        let batches = acks.iter().map(|(first, last, types)| {
            fetched::AcknowledgementBatch::default()
                .with_first_offset(*first)
                .with_last_offset(*last)
                .with_acknowledge_types(types.to_vec())
        });
        let batches: Vec<_> = batches.collect();
        let partitions = partitions.iter().map(|index| {
            fetched::FetchPartition::default()
                .with_partition_index(*index)
                .with_acknowledgement_batches(batches.clone())
        });
        let topic = fetched::FetchTopic::default()
            .with_topic_id(self.topic)
            .with_partitions(partitions.collect());
        let body = ShareFetchRequest::default()
            .with_group_id(Some(group("g")))
            .with_member_id(Some(text(self.id)))
            .with_share_session_epoch(self.epoch)
            .with_max_wait_ms(wait_ms)
            .with_min_bytes(1)
            .with_max_bytes(1 << 20)
            .with_max_records(500)
            .with_batch_size(500)
            .with_topics(vec![topic]);
        self.epoch += 1;
        ShareFetch { body, acquire_mode: 0, is_renew_ack: false }
    }

    /// Sends a fetch. Returns the errors of the request, of the partition and of the
    /// acknowledgements, and the acquired records of partition 0.
    async fn send(&mut self, request: &ShareFetch) -> ([i16; 3], Got) {
        let response = self.client.call(2, request).await.0;
        let partition = response.responses.first().and_then(|topic| topic.partitions.first());
        let acquired = partition.into_iter().flat_map(|partition| &partition.acquired_records);
        let acquired = acquired.map(|a| (a.first_offset, a.last_offset, a.delivery_count));
        let (error, ack) = partition.map_or((0, 0), |p| (p.error_code, p.acknowledge_error_code));
        ([response.error_code, error, ack], acquired.collect())
    }

    async fn fetch(&mut self, acks: &[Acked<'_>]) -> ([i16; 3], Got) {
        let request = self.fetch_of(&[0], acks, 1);
        self.send(&request).await
    }

    /// Fetches without an error, and returns the acquired records.
    async fn got(&mut self) -> Got {
        let (errors, got) = self.fetch(&[]).await;
        assert_eq!(errors, [0; 3]);
        got
    }

    /// Acknowledges, and returns the errors of the request and of the partition.
    async fn acknowledge(&mut self, acks: &[Acked<'_>], close: bool) -> [i16; 2] {
        let batches = acks.iter().map(|(first, last, types)| {
            acked::AcknowledgementBatch::default()
                .with_first_offset(*first)
                .with_last_offset(*last)
                .with_acknowledge_types(types.to_vec())
        });
        let partition =
            acked::AcknowledgePartition::default().with_acknowledgement_batches(batches.collect());
        let topic = acked::AcknowledgeTopic::default()
            .with_topic_id(self.topic)
            .with_partitions(vec![partition]);
        let is_renew_ack = acks.iter().any(|(.., types)| types.contains(&RENEW));
        let body = ShareAcknowledgeRequest::default()
            .with_group_id(Some(group("g")))
            .with_member_id(Some(text(self.id)))
            .with_share_session_epoch(if close { -1 } else { self.epoch })
            .with_topics(if acks.is_empty() { vec![] } else { vec![topic] });
        self.epoch += 1;
        let response = self.client.call(2, &ShareAcknowledge { body, is_renew_ack }).await.body;
        let partition = response.responses.first().and_then(|topic| topic.partitions.first());
        [response.error_code, partition.map_or(0, |partition| partition.error_code)]
    }
}

/// Start and lag of partition 0 of the topic `t`, and the error of the group.
async fn described(client: &mut Client<TcpStream>, by_name: bool) -> (i16, i64, i64) {
    use kafka_protocol::messages::describe_share_group_offsets_request::*;
    let topic = DescribeShareGroupOffsetsRequestTopic::default()
        .with_topic_name(TopicName(text("t")))
        .with_partitions(vec![0]);
    let wanted = DescribeShareGroupOffsetsRequestGroup::default()
        .with_group_id(group("g"))
        .with_topics(by_name.then_some(vec![topic]));
    let request = DescribeShareGroupOffsetsRequest::default().with_groups(vec![wanted]);
    let response = client.call(1, &DescribeShareOffsets(request)).await;
    let described = &response.0.groups[0];
    match described.topics.first() {
        Some(topic) => {
            assert_eq!(&*topic.topic_name.0, "t");
            (described.error_code, topic.partitions[0].start_offset, response.1[0])
        }
        None => (described.error_code, -1, -1),
    }
}

async fn earliest() -> (TestServer, Uuid) {
    earliest_on(TestServer::start().await).await
}

async fn earliest_on(server: TestServer) -> (TestServer, Uuid) {
    set(&server, Entity::Group("g"), "share.auto.offset.reset", "earliest").await;
    let topic = server.topic("t", 1, &[]).await;
    (server, topic)
}

async fn produce(server: &TestServer, records: usize) {
    let mut client = server.client().await;
    assert_eq!(client.produce("t", 0, &plain(&vec![1; records])).await.0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn members_join_share_and_leave() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let topic = server.topic("t", 2, &[]).await;
    let (epoch, all) = good(&client.call(1, &beat("g", "a", 0, &["t", "none"])).await);
    assert_eq!(all, Some(vec![(topic, vec![0, 1])]));
    assert_eq!(good(&client.call(1, &beat("g", "a", epoch, &[])).await), (epoch, None));
    let (later, of_b) = good(&client.call(1, &beat("g", "b", 0, &["t"])).await);
    let (same, of_a) = good(&client.call(1, &beat("g", "a", epoch, &[])).await);
    assert_eq!((same, later > epoch), (later, true));
    assert_eq!((of_a, of_b), (Some(vec![(topic, vec![0])]), Some(vec![(topic, vec![1])])));
    good(&client.call(1, &beat("g", "c", 0, &["t"])).await);
    let request = ShareGroupDescribeRequest::default().with_group_ids(vec![group("g")]);
    let described = client.call(1, &request).await.groups.remove(0);
    assert_eq!(
        (described.group_state.as_str(), described.assignor_name.as_str()),
        ("Stable", "simple")
    );
    let read =
        described.members.iter().map(|m| m.assignment.topic_partitions[0].partitions.clone());
    assert_eq!(read.collect::<Vec<_>>(), [[0], [1], [0]]);

    // Members of another type are not accepted, and a wrong epoch is fenced.
    let response = client.call(1, &beat("g", "a", later + 5, &[])).await;
    assert_eq!(response.error_code, ResponseError::FencedMemberEpoch.code());
    let join = JoinGroupRequest::default()
        .with_group_id(group("g"))
        .with_session_timeout_ms(10_000)
        .with_rebalance_timeout_ms(10_000)
        .with_protocol_type(text("consumer"));
    assert_eq!(
        client.call(3, &join).await.error_code,
        ResponseError::InconsistentGroupProtocol.code()
    );
    let listed =
        client.call(5, &ListGroupsRequest::default().with_types_filter(vec![text("share")])).await;
    assert_eq!(listed.groups.len(), 1);
    assert_eq!(
        (&*listed.groups[0].group_type, &*listed.groups[0].group_state),
        ("share", "Stable")
    );

    for member in ["a", "b", "c"] {
        let left = client.call(1, &beat("g", member, -1, &[])).await;
        assert_eq!((left.error_code, left.member_epoch), (0, -1));
    }
    assert_eq!(client.call(1, &beat("g", "a", -1, &[])).await.error_code, UNKNOWN_MEMBER_ID);
    assert_eq!(client.call(1, &beat("missing", "a", 3, &[])).await.error_code, UNKNOWN_MEMBER_ID);
    assert_eq!(client.call(1, &beat("g", "a", 0, &[])).await.error_code, INVALID_REQUEST);
}

/// They have no share partitions that would make the group known. GROUP_ID_NOT_FOUND would be fatal
/// for their clients.
#[tokio::test(flavor = "multi_thread")]
async fn members_that_wait_for_a_topic_join_again_after_a_restart() {
    let mut server = TestServer::start().await;
    let mut client = server.client().await;
    let (epoch, _) = good(&client.call(1, &beat("g", "a", 0, &["later"])).await);
    for is_classic in [false, true] {
        server.restart().await;
        client = server.client().await;
        if is_classic {
            let join = JoinGroupRequest::default()
                .with_group_id(group("g"))
                .with_session_timeout_ms(10_000)
                .with_rebalance_timeout_ms(10_000)
                .with_protocol_type(text("consumer"))
                .with_protocols(vec![
                    join_group_request::JoinGroupRequestProtocol::default().with_name(text("p")),
                ]);
            assert_eq!(client.call(4, &join).await.error_code, MEMBER_ID_REQUIRED);
        }
        let error = client.call(1, &beat("g", "a", epoch, &[])).await.error_code;
        assert_eq!(error, UNKNOWN_MEMBER_ID, "{is_classic}");
        good(&client.call(1, &beat("g", "a", 0, &["later"])).await);
    }
}

/// Also if another member leaves meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_topic_is_not_assigned() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    server.topic("t", 2, &[]).await;
    good(&client.call(1, &beat("g", "a", 0, &["t"])).await);
    good(&client.call(1, &beat("g", "b", 0, &["t"])).await);
    let (epoch, of_a) = good(&client.call(1, &beat("g", "a", 0, &["t"])).await);
    assert!(of_a.is_some_and(|topics| topics.len() == 1));
    delete_topic(&server, "t").await;
    assert_eq!(client.call(1, &beat("g", "b", -1, &[])).await.error_code, 0);
    let (_, of_a) = good(&client.call(1, &beat("g", "a", epoch, &[])).await);
    assert_eq!(of_a, Some(vec![]));
}

/// Its last request waits for space in the log when its client disconnects: its records are
/// released all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_ends_its_session_and_disconnects_holds_no_records() {
    let (server, topic) = earliest_on(TestServer::simulated(16 << 20).await).await;
    produce(&server, 200).await;
    let mut a = Member::new(&server, "a", topic).await;
    let mut b = Member::new(&server, "b", topic).await;
    assert_eq!(a.got().await, [(0, 199, 1)]);
    assert_eq!(b.got().await, []);
    server.hold_disk(true);
    server.fill_log("t");
    // More than the hundred bytes for which there is space.
    let types = [ACCEPT, REJECT].repeat(100);
    let mut last = a.fetch_of(&[0], &[(0, 199, &types)], 1);
    last.body.share_session_epoch = -1;
    a.client.send(2, &last).await;
    server.begun("ShareFetch", 2, 3).await;
    drop(a);
    let back = async {
        loop {
            match b.got().await {
                got if got.is_empty() => {}
                got => break got,
            }
        }
    };
    // Long before the locks expire.
    let back = tokio::time::timeout(Duration::from_secs(20), back).await;
    assert_eq!(back.expect("they stay locked"), [(0, 199, 2)]);
    server.hold_disk(false);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_accepted_released_and_rejected() {
    let (server, topic) = earliest().await;
    produce(&server, 5).await;
    let mut a = Member::new(&server, "a", topic).await;
    let mut b = Member::new(&server, "b", topic).await;
    assert_eq!(a.got().await, [(0, 4, 1)]);
    assert_eq!(b.got().await, []);
    assert_eq!(b.acknowledge(&[(0, 4, &[ACCEPT])], false).await, [0, INVALID_RECORD_STATE]);
    let acks: &[Acked<'_>] = &[(0, 2, &[ACCEPT, RELEASE, REJECT])];
    assert_eq!(a.acknowledge(acks, false).await, [0, 0]);
    assert_eq!(described(&mut a.client, true).await, (0, 1, 3));
    assert_eq!(b.got().await, [(1, 1, 2)]);
    // With the next fetch, and the records that arrived since.
    produce(&server, 2).await;
    let (errors, got) = b.fetch(&[(1, 1, &[ACCEPT])]).await;
    assert_eq!((errors, got), ([0; 3], vec![(5, 6, 1)]));
    assert_eq!(described(&mut a.client, false).await, (0, 3, 4));
    assert_eq!(a.acknowledge(&[(3, 3, &[RENEW])], false).await, [0, 0]);
    assert_eq!(
        a.acknowledge(&[(3, 4, &[ACCEPT]), (2, 2, &[ACCEPT])], false).await,
        [0, INVALID_REQUEST]
    );
    assert_eq!(a.acknowledge(&[(3, 4, &[ACCEPT])], false).await, [0, 0]);
    assert_eq!(described(&mut a.client, true).await, (0, 5, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgements_of_a_partition_named_twice_are_refused() {
    let (server, topic) = earliest().await;
    produce(&server, 2).await;
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(0, 1, 1)]);
    let mut twice = a.fetch_of(&[0, 0], &[(0, 0, &[ACCEPT])], 1);
    twice.body.max_records = 0;
    assert_eq!(a.send(&twice).await, ([0, 0, INVALID_REQUEST], vec![]));
    assert_eq!(a.acknowledge(&[(0, 1, &[ACCEPT])], false).await, [0, 0]);
    assert_eq!(described(&mut a.client, true).await, (0, 2, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_waits_for_new_and_for_released_records() {
    let (server, topic) = earliest().await;
    let mut a = Member::new(&server, "a", topic).await;
    let mut b = Member::new(&server, "b", topic).await;
    let request = a.fetch_of(&[0], &[], 60_000);
    let waiting = tokio::spawn(async move {
        let answer = tokio::time::timeout(HANG, a.send(&request)).await.unwrap();
        (a, answer)
    });
    server.begun("ShareFetch", 2, 1).await;
    produce(&server, 3).await;
    let (mut a, answer) = waiting.await.unwrap();
    assert_eq!(answer, ([0; 3], vec![(0, 2, 1)]));
    let request = b.fetch_of(&[0], &[], 60_000);
    let waiting =
        tokio::spawn(async move { tokio::time::timeout(HANG, b.send(&request)).await.unwrap() });
    server.begun("ShareFetch", 2, 2).await;
    assert_eq!(a.acknowledge(&[(0, 0, &[ACCEPT]), (1, 1, &[RELEASE])], false).await, [0, 0]);
    assert_eq!(waiting.await.unwrap(), ([0; 3], vec![(1, 1, 2)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_departed_member_are_released() {
    let (server, topic) = earliest().await;
    produce(&server, 3).await;
    let mut b = Member::new(&server, "b", topic).await;
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(0, 2, 1)]);
    // It closes its session and acknowledges some of them.
    assert_eq!(a.acknowledge(&[(0, 0, &[ACCEPT])], true).await, [0, 0]);
    assert_eq!(b.got().await, [(1, 2, 2)]);
    assert_eq!(b.acknowledge(&[(1, 2, &[RELEASE])], false).await, [0, 0]);
    // It leaves the group.
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(1, 2, 3)]);
    let left = a.client.call(1, &beat("g", "a", -1, &[])).await;
    assert_eq!(left.error_code, 0);
    assert_eq!(a.fetch(&[]).await.0[0], SESSION_NOT_FOUND);
    // Its connection ends.
    assert_eq!(b.got().await, [(1, 2, 4)]);
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, []);
    let request = a.fetch_of(&[0], &[], 60_000);
    drop(b);
    let answer = tokio::time::timeout(HANG, a.send(&request)).await.unwrap();
    assert_eq!(answer, ([0; 3], vec![(1, 2, 5)]));
}

/// Each of its readers fails on it without an acknowledgement, and is restarted.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_archived_at_the_limit_of_the_group_or_else_of_the_broker() {
    let (server, topic) = earliest().await;
    for (offset, limit) in [(0, 5), (1, 2), (2, 3)] {
        match limit {
            5 => {} // Kafka's default
            2 => set(&server, Entity::Brokers, "group.share.delivery.count.limit", "2").await,
            _ => set(&server, Entity::Group("g"), "share.delivery.count.limit", "3").await,
        }
        produce(&server, 1).await;
        for deliveries in 1..=limit {
            let mut a = Member::new(&server, "a", topic).await;
            assert_eq!(a.got().await, [(offset, offset, deliveries)]);
            assert_eq!(a.acknowledge(&[], true).await[0], 0);
        }
        assert_eq!(Member::new(&server, "a", topic).await.got().await, []);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_have_epochs() {
    let (server, topic) = earliest().await;
    let mut a = Member::new(&server, "a", topic).await;
    a.epoch = 3;
    assert_eq!(a.fetch(&[]).await.0[0], SESSION_NOT_FOUND);
    a.epoch = 0;
    assert_eq!(a.acknowledge(&[], false).await[0], INVALID_SESSION_EPOCH);
    a.epoch = 0;
    assert_eq!(a.fetch(&[(0, 0, &[ACCEPT])]).await.0[0], INVALID_REQUEST);
    a.epoch = 0;
    assert_eq!(a.got().await, []);
    a.epoch = 5;
    assert_eq!(a.fetch(&[]).await.0[0], INVALID_SESSION_EPOCH);
    a.epoch = 1;
    assert_eq!(a.got().await, []);
    // A group that does not exist has no share partitions, and a fetch creates none.
    let mut request = a.fetch_of(&[0], &[], 1);
    request.body.group_id = Some(group("missing"));
    request.body.share_session_epoch = 0;
    assert_eq!(a.send(&request).await.0, [0, UNKNOWN_TOPIC_OR_PARTITION, 0]);
    let renew = ShareFetch { is_renew_ack: true, ..a.fetch_of(&[0], &[], 1) };
    assert_eq!(a.send(&renew).await.0[0], INVALID_REQUEST, "it requests records as well");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_partitions_are_reported_once() {
    let (server, topic) = earliest().await;
    let sessions = &server.server().groups.shares().sessions;
    let mut a = Member::new(&server, "a", Uuid::from_u128(7)).await;
    let invented: Vec<i32> = (0..100_000).collect();
    let request = a.fetch_of(&invented, &[], 60_000);
    let reported = a.client.call(2, &request).await.0.responses.remove(0).partitions;
    assert_eq!((reported.len(), reported[99_999].error_code), (100_000, UNKNOWN_TOPIC_ID));
    assert_eq!(sessions.partitions(), 0);
    let mut empty = a.fetch_of(&[], &[], 1);
    empty.body.topics.clear();
    a.client.send(2, &empty).await;
    let answer = a.client.receive_frame().await.unwrap();
    assert!(answer.len() < 100, "{} bytes", answer.len());

    a.topic = topic;
    let request = a.fetch_of(&[5], &[], 60_000);
    assert_eq!(a.send(&request).await.0, [0, UNKNOWN_TOPIC_OR_PARTITION, 0]);
    assert_eq!(a.got().await, []);
    assert_eq!(sessions.partitions(), 1);
    // A deleted topic is removed from the session.
    let request = DeleteTopicsRequest::default()
        .with_topic_names(vec![TopicName(text("t"))])
        .with_timeout_ms(10_000);
    assert_eq!(server.client().await.call(5, &request).await.responses[0].error_code, 0);
    let mut empty = a.fetch_of(&[], &[], 1);
    empty.body.topics.clear();
    assert_eq!(a.send(&empty).await.0, [0, UNKNOWN_TOPIC_ID, 0]);
    assert_eq!(sessions.partitions(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgements_survive_every_kind_of_stop() {
    for how in ["closed", "killed", "killed after an upload"] {
        let (mut server, topic) = earliest().await;
        produce(&server, 6).await;
        let mut a = Member::new(&server, "a", topic).await;
        assert_eq!(a.got().await, [(0, 5, 1)]);
        let acks: &[Acked<'_>] = &[(0, 3, &[ACCEPT, RELEASE, REJECT, ACCEPT])];
        assert_eq!(a.acknowledge(acks, false).await, [0, 0]);
        match how {
            "closed" => server.restart().await,
            "killed" => server.crash().await,
            _ => {
                server.store().flush().await.unwrap();
                server.crash().await;
            }
        }
        let mut admin = server.client().await;
        assert_eq!(described(&mut admin, true).await, (0, 1, 3), "{how}");
        let listed = admin.call(5, &ListGroupsRequest::default()).await.groups;
        assert_eq!((listed.len(), listed[0].group_type.as_str()), (1, "share"), "{how}");
        let gone = admin.call(1, &beat("g", "a", 1, &[])).await;
        assert_eq!(gone.error_code, UNKNOWN_MEMBER_ID, "{how}");
        let mut a = Member::new(&server, "a", topic).await;
        assert_eq!(a.got().await, [(1, 1, 2), (4, 5, 1)], "{how}");
        assert_eq!(a.acknowledge(&[(1, 1, &[ACCEPT]), (4, 5, &[ACCEPT])], false).await, [0, 0]);
        server.crash().await;
        let mut a = Member::new(&server, "a", topic).await;
        assert_eq!(a.got().await, [], "{how}");
        produce(&server, 1).await;
        assert_eq!(a.got().await, [(6, 6, 1)], "{how}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_begins_at_its_configured_offset_and_persists_it() {
    let mut server = TestServer::start().await;
    let topic = server.topic("t", 1, &[]).await;
    produce(&server, 4).await;
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [], "latest");
    produce(&server, 2).await;
    server.crash().await;
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(4, 5, 1)]);
    assert_eq!(described(&mut a.client, true).await, (0, 4, 2));
}

/// The start offset of a group is durable before any of its members gets records.
#[tokio::test(flavor = "multi_thread")]
async fn no_records_are_delivered_before_the_start_offset_is_durable() {
    let (server, topic) = earliest_on(TestServer::simulated(16 << 20).await).await;
    produce(&server, 3).await;
    let mut a = Member::new(&server, "a", topic).await;
    let mut b = Member::new(&server, "b", topic).await;
    server.hold_disk(true);
    let request = a.fetch_of(&[0], &[], 60_000);
    a.client.send(2, &request).await;
    let begun = async {
        while server.server().groups.shares().get("g", (topic, 0)).is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, begun).await.expect("the share partition does not begin");
    // The other one finds the same new share partition, and waits for it as well.
    let request = b.fetch_of(&[0], &[], 60_000);
    b.client.send(2, &request).await;
    server.begun("ShareFetch", 2, 2).await;
    for waiting in [&mut a, &mut b] {
        let mut byte = [0];
        let peek = waiting.client.socket.peek(&mut byte);
        let answer = tokio::time::timeout(Duration::from_millis(50), peek).await;
        assert!(answer.is_err(), "a response before anything is on the disk");
    }
    server.hold_disk(false);
    let (mut of_a, mut of_b) = ([0], [0]);
    tokio::select! {
        answer = a.client.socket.peek(&mut of_a) => assert_eq!(answer.unwrap(), 1),
        answer = b.client.socket.peek(&mut of_b) => assert_eq!(answer.unwrap(), 1),
        () = tokio::time::sleep(HANG) => panic!("no answer"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_start_advances_the_start_offset_of_groups() {
    let (server, topic) = earliest().await;
    produce(&server, 3).await;
    produce(&server, 3).await;
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(0, 5, 1)]);
    let partition = delete_records_request::DeleteRecordsPartition::default().with_offset(4);
    let topics = delete_records_request::DeleteRecordsTopic::default()
        .with_name(TopicName(text("t")))
        .with_partitions(vec![partition]);
    let request = DeleteRecordsRequest::default().with_topics(vec![topics]).with_timeout_ms(5_000);
    assert_eq!(a.client.call(2, &request).await.topics[0].partitions[0].error_code, 0);
    assert_eq!(described(&mut a.client, true).await, (0, 4, 2));
    let mut b = Member::new(&server, "b", topic).await;
    assert_eq!(b.got().await, []);
    // Acknowledgements of deleted records are ignored; the rest is the member's.
    assert_eq!(a.acknowledge(&[(0, 4, &[ACCEPT]), (5, 5, &[RELEASE])], false).await, [0, 0]);
    assert_eq!(b.got().await, [(5, 5, 2)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn record_limits_split_batches() {
    let (server, topic) = earliest().await;
    set(&server, Entity::Group("g"), "share.partition.max.record.locks", "100").await;
    produce(&server, 150).await;
    let mut a = Member::new(&server, "a", topic).await;
    let mut few = a.fetch_of(&[0], &[], 1);
    (few.body.max_records, few.acquire_mode) = (10, 1);
    assert_eq!(a.send(&few).await, ([0; 3], vec![(0, 9, 1)]));
    // Whole batches would be too much.
    assert_eq!(a.got().await, [(10, 99, 1)]);
    assert_eq!(a.got().await, []);
    assert_eq!(a.acknowledge(&[(0, 9, &[ACCEPT])], false).await, [0, 0]);
    assert_eq!(a.got().await, [(100, 109, 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn read_committed_groups_get_committed_records_only() {
    use super::transactions::Producer;
    let (server, topic) = earliest().await;
    set(&server, Entity::Group("g"), "share.isolation.level", "read_committed").await;
    let mut producer = Producer::init(&server, "tx", false).await;
    for commit in [false, true] {
        assert_eq!(producer.add("t", &[0]).await, 0);
        assert_eq!(producer.produce("t", topic, 0).await.0, 0);
        assert_eq!(producer.end(commit).await, 0);
    }
    let mut a = Member::new(&server, "a", topic).await;
    // 0 and 1 are aborted, 2 is their marker, 5 that of the commit.
    assert_eq!(a.got().await, [(3, 4, 1)]);
    assert_eq!(a.acknowledge(&[(3, 4, &[ACCEPT])], false).await, [0, 0]);
    assert_eq!(a.got().await, []);
    assert_eq!(described(&mut a.client, true).await, (0, 6, 0));
    // Records of an open transaction are not delivered.
    assert_eq!(producer.add("t", &[0]).await, 0);
    assert_eq!(producer.produce("t", topic, 0).await, (0, 6));
    assert_eq!(a.got().await, []);
    set(&server, Entity::Group("g"), "share.isolation.level", "read_uncommitted").await;
    assert_eq!(a.got().await, [(6, 7, 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn admins_can_set_and_delete_offsets_and_delete_groups() {
    let (mut server, topic) = earliest().await;
    produce(&server, 8).await;
    let mut admin = server.client().await;
    let alter = |offset: i64| {
        use alter_share_group_offsets_request::*;
        let partition = AlterShareGroupOffsetsRequestPartition::default().with_start_offset(offset);
        let missing = partition.clone().with_partition_index(7);
        let topic = AlterShareGroupOffsetsRequestTopic::default()
            .with_topic_name(TopicName(text("t")))
            .with_partitions(vec![partition, missing]);
        AlterShareGroupOffsetsRequest::default().with_group_id(group("g")).with_topics(vec![topic])
    };
    let forget = |topic: &str| {
        use delete_share_group_offsets_request::*;
        let topic =
            DeleteShareGroupOffsetsRequestTopic::default().with_topic_name(TopicName(text(topic)));
        DeleteShareGroupOffsetsRequest::default().with_group_id(group("g")).with_topics(vec![topic])
    };
    assert_eq!(described(&mut admin, true).await, (GROUP_ID_NOT_FOUND, -1, -1));
    assert_eq!(admin.call(0, &forget("t")).await.error_code, GROUP_ID_NOT_FOUND);
    let altered = admin.call(0, &alter(6)).await;
    assert_eq!(altered.error_code, 0);
    let codes = altered.responses[0].partitions.iter().map(|p| p.error_code);
    assert_eq!(codes.collect::<Vec<_>>(), [0, UNKNOWN_TOPIC_OR_PARTITION]);
    server.crash().await;
    let mut admin = server.client().await;
    assert_eq!(described(&mut admin, true).await, (0, 6, 2));

    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(6, 7, 1)]);
    assert_eq!(admin.call(0, &alter(2)).await.error_code, NON_EMPTY_GROUP);
    assert_eq!(admin.call(0, &forget("t")).await.error_code, NON_EMPTY_GROUP);
    let delete = DeleteGroupsRequest::default().with_groups_names(vec![group("g")]);
    assert_eq!(admin.call(2, &delete).await.results[0].error_code, NON_EMPTY_GROUP);
    a.client.call(1, &beat("g", "a", -1, &[])).await;
    assert_eq!(admin.call(0, &alter(2)).await.error_code, 0);
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(2, 7, 1)]);
    a.client.call(1, &beat("g", "a", -1, &[])).await;

    let unknown = UNKNOWN_TOPIC_OR_PARTITION;
    assert_eq!(admin.call(0, &forget("missing")).await.responses[0].error_code, unknown);
    assert_eq!(admin.call(0, &forget("t")).await.responses[0].error_code, 0);
    assert_eq!(admin.call(0, &forget("t")).await.responses[0].error_code, unknown);
    assert_eq!(described(&mut admin, true).await, (0, -1, -1), "it has not begun");
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(0, 7, 1)]);
    a.client.call(1, &beat("g", "a", -1, &[])).await;
    assert_eq!(admin.call(2, &delete).await.results[0].error_code, 0);
    assert_eq!(described(&mut admin, true).await, (GROUP_ID_NOT_FOUND, -1, -1));
    server.crash().await;
    let mut admin = server.client().await;
    assert_eq!(described(&mut admin, true).await, (GROUP_ID_NOT_FOUND, -1, -1));
    assert!(admin.call(5, &ListGroupsRequest::default()).await.groups.is_empty());
}
