//! Tests of the coordinator on a real store over a simulated disk: what is durable, what is
//! visible, and what a restart restores.

mod bounds;
mod deleted;
pub(super) mod lost;
mod persisted;
mod sweep;
mod transactional;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;

use alluvium_device::sim::{Mode, SimDisk, SimOptions};
use alluvium_stream::{Batch, Fold, Options, Store, StreamId, StreamOffset};
use bytes::{Bytes, BytesMut};
use kafka_protocol::messages::join_group_request::JoinGroupRequestProtocol;
use kafka_protocol::messages::leave_group_request::MemberIdentity;
use kafka_protocol::messages::offset_commit_request::{
    OffsetCommitRequestPartition, OffsetCommitRequestTopic,
};
use kafka_protocol::messages::offset_fetch_request::{
    OffsetFetchRequestGroup, OffsetFetchRequestTopic, OffsetFetchRequestTopics,
};
use kafka_protocol::messages::sync_group_request::SyncGroupRequestAssignment;
use kafka_protocol::messages::{
    ConsumerGroupHeartbeatRequest, DescribeGroupsRequest, GroupId, HeartbeatRequest,
    JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest, ListGroupsRequest, OffsetCommitRequest,
    OffsetFetchRequest, ShareGroupHeartbeatRequest, SyncGroupRequest, TopicName,
    TxnOffsetCommitRequest,
};
use kafka_protocol::protocol::Encodable;

use super::*;

struct TestFold;

impl Fold for TestFold {
    fn fold(
        &self,
        _: StreamId,
        kind: u8,
        offsets: std::ops::Range<StreamOffset>,
        _: StreamOffset,
        previous: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>> {
        match kind {
            crate::state_stream::KIND_OFFSETS => {
                crate::state_table::fold::<Offsets>(offsets, previous, batches)
            }
            KIND_CLASSIC_GROUPS => {
                crate::state_table::fold::<PersistedGroups>(offsets, previous, batches)
            }
            _ => crate::state_table::fold::<GroupStates>(offsets, previous, batches),
        }
    }
}

/// A test environment: disk and objects outlive the store.
struct World {
    disk: SimDisk,
    objects: tempfile::TempDir,
    config: GroupConfig,
}

impl World {
    fn new() -> Self {
        let disk = SimDisk::new(SimOptions { capacity_bytes: 8 << 20, ..SimOptions::default() });
        let format = alluvium_wal::FormatOptions::default();
        alluvium_wal::Wal::format(&disk.device(), &format).expect("the disk is empty");
        disk.set_mode(Mode::Queued);
        let config =
            GroupConfig { min_session_timeout: Duration::from_millis(1), ..GroupConfig::default() };
        let objects = tempfile::tempdir().expect("a directory");
        World { disk, objects, config }
    }

    /// Runs the disk until `future` is ready.
    async fn run<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                biased;
                output = &mut future => return output,
                () = tokio::task::yield_now() => self.disk.run_until_idle(),
            }
        }
    }

    async fn start(&self) -> (Store, Groups) {
        let opened = self.try_start().await.expect("the coordinator opens");
        (opened.0, opened.1)
    }

    async fn try_start(&self) -> Result<(Store, Groups), GroupsError> {
        self.run(async {
            let window_bytes = 64 << 10;
            let wal_options = alluvium_wal::Options {
                window_bytes,
                block_bytes: 16 << 10,
                max_record_bytes: 16 << 10,
                ..alluvium_wal::Options::default()
            };
            let objects = alluvium_stream::local_objects(self.objects.path()).expect("objects");
            let device = self.disk.device();
            let options = Options::for_wal(8 << 20);
            let fold = Arc::new(TestFold);
            let opened = Store::open(device, wal_options, objects, fold, options, None)
                .await
                .map_err(StateError::from)?;
            let groups = Groups::open(opened.store.clone(), self.config.clone()).await?;
            Ok((opened.store, groups))
        })
        .await
    }

    /// Crashes the process; the disk stays.
    fn crash(&mut self, store: Store, groups: Groups) {
        self.disk = self.disk.process_crash();
        self.disk.set_mode(Mode::Queued);
        drop((store, groups));
    }
}

fn s(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn group_id(text: &str) -> GroupId {
    GroupId(s(text))
}

fn client() -> ClientInfo {
    ClientInfo {
        client_id: s("test"),
        client_host: s("/127.0.0.1"),
        visibility: TopicVisibility::default(),
    }
}

fn join_request(group: &str, member_id: &StrBytes) -> JoinGroupRequest {
    let protocol = JoinGroupRequestProtocol::default()
        .with_name(s("range"))
        .with_metadata(Bytes::from_static(b"subscription"));
    JoinGroupRequest::default()
        .with_group_id(group_id(group))
        .with_member_id(member_id.clone())
        .with_session_timeout_ms(10_000)
        .with_rebalance_timeout_ms(60_000)
        .with_protocol_type(s("consumer"))
        .with_protocols(vec![protocol])
}

/// Joins as clients do: one request for the id, another to join.
async fn join(groups: &Groups, group: &str, session_timeout_ms: i32) -> JoinGroupResponse {
    let request =
        |id: &StrBytes| join_request(group, id).with_session_timeout_ms(session_timeout_ms);
    let first = groups.join(&client(), &request(&StrBytes::new()), 9, &TopicsView::default()).await;
    assert_eq!(first.error_code, ResponseError::MemberIdRequired.code());
    groups.join(&client(), &request(&first.member_id), 9, &TopicsView::default()).await
}

fn sync_request(group: &str, joined: &JoinGroupResponse) -> SyncGroupRequest {
    let assignments = joined.members.iter().map(|member| {
        SyncGroupRequestAssignment::default()
            .with_member_id(member.member_id.clone())
            .with_assignment(Bytes::from(format!("for {}", member.member_id)))
    });
    SyncGroupRequest::default()
        .with_group_id(group_id(group))
        .with_generation_id(joined.generation_id)
        .with_member_id(joined.member_id.clone())
        .with_protocol_type(joined.protocol_type.clone())
        .with_protocol_name(joined.protocol_name.clone())
        .with_assignments(assignments.collect())
}

fn heartbeat_request(group: &str, joined: &JoinGroupResponse) -> HeartbeatRequest {
    HeartbeatRequest::default()
        .with_group_id(group_id(group))
        .with_member_id(joined.member_id.clone())
        .with_generation_id(joined.generation_id)
}

/// A commit without a member.
fn commit_request(group: &str, offsets: &[(&str, i32, i64)]) -> OffsetCommitRequest {
    let topics = offsets.iter().map(|(topic, partition, offset)| {
        let partition = OffsetCommitRequestPartition::default()
            .with_partition_index(*partition)
            .with_committed_offset(*offset)
            .with_committed_leader_epoch(4)
            .with_committed_metadata(Some(s("note")));
        OffsetCommitRequestTopic::default()
            .with_name(TopicName(s(topic)))
            .with_partitions(vec![partition])
    });
    OffsetCommitRequest::default()
        .with_group_id(group_id(group))
        .with_generation_id_or_member_epoch(-1)
        .with_topics(topics.collect())
}

fn exists(topic: &str, partition: i32) -> bool {
    topic.starts_with("topic") && (0..10).contains(&partition)
}

async fn commit(groups: &Groups, request: OffsetCommitRequest) -> Vec<i16> {
    let response = groups.offset_commit(request, 9, &TopicsView::default(), exists).await;
    encodes(&response, 2..=9);
    let partitions = response.topics.iter().flat_map(|topic| &topic.partitions);
    partitions.map(|partition| partition.error_code).collect()
}

/// Fetches all offsets of a group.
async fn fetch(groups: &Groups, group: &str) -> Vec<(String, i32, i64)> {
    let request =
        OffsetFetchRequestGroup::default().with_group_id(group_id(group)).with_topics(None);
    let request =
        OffsetFetchRequest::default().with_groups(vec![request]).with_require_stable(true);
    let response = groups.offset_fetch(request, 9).await;
    encodes(&response, 8..=9);
    let [group] = &response.groups[..] else { panic!("one group was requested") };
    assert_eq!(group.error_code, 0);
    let topics = group.topics.iter().flat_map(|topic| {
        let name = topic.name.as_str().to_owned();
        topic.partitions.iter().map(move |p| (name.clone(), p.partition_index, p.committed_offset))
    });
    topics.collect()
}

fn found(topic: &str, partition: i32, offset: i64) -> (String, i32, i64) {
    (topic.to_owned(), partition, offset)
}

/// Sweeps when the server has been `up` longer, and the wall clock is `later` than now.
async fn sweep(groups: &Groups, up: Duration, later: Duration) {
    let unix_ms = unix_time_ms() + i64::try_from(later.as_millis()).unwrap();
    groups.shared.sweep(now() + up, unix_ms).await;
}

/// Waits until a group has at most `left` offsets.
async fn dropped(world: &World, groups: &Groups, group: &str, left: usize) {
    world
        .run(async {
            while fetch(groups, group).await.len() > left {
                tokio::task::yield_now().await;
            }
        })
        .await;
}

/// Checks that a response can be encoded in each of these versions.
fn encodes(response: &impl Encodable, versions: std::ops::RangeInclusive<i16>) {
    for version in versions {
        let encoded = response.encode(&mut BytesMut::new(), version);
        encoded.unwrap_or_else(|error| panic!("version {version}: {error}"));
    }
}

async fn list(groups: &Groups, version: i16) -> Vec<(String, String, String)> {
    let response = groups.list(ListGroupsRequest::default(), version).await;
    encodes(&response, version..=version);
    let listed = response.groups.iter().map(|group| {
        let text = |text: &StrBytes| text.as_str().to_owned();
        (text(&group.group_id), text(&group.group_state), text(&group.protocol_type))
    });
    listed.collect()
}

#[tokio::test]
async fn three_members_join_a_group_and_leave() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let a = join(&groups, "g", 10_000).await;
    assert_eq!((a.generation_id, &a.leader), (1, &a.member_id));
    world.run(groups.sync(&sync_request("g", &a), 5)).await;

    let (b, c) = (join(&groups, "g", 10_000), join(&groups, "g", 10_000));
    let a_again = async {
        // As a client does: it joins again when its heartbeat requires it.
        while groups.heartbeat(heartbeat_request("g", &a)).await.error_code == 0 {
            tokio::task::yield_now().await;
        }
        groups.join(&client(), &join_request("g", &a.member_id), 9, &TopicsView::default()).await
    };
    let (b, c, a) = tokio::join!(b, c, a_again);
    assert_eq!([a.generation_id, b.generation_id, c.generation_id], [2, 2, 2]);
    assert_eq!([a.members.len(), b.members.len(), c.members.len()], [3, 0, 0]);
    encodes(&a, 9..=9);
    let synced = world
        .run(async {
            tokio::join!(
                groups.sync(&sync_request("g", &b), 5),
                groups.sync(&sync_request("g", &c), 5),
                groups.sync(&sync_request("g", &a), 5)
            )
        })
        .await;
    for (response, joined) in [(&synced.0, &b), (&synced.1, &c), (&synced.2, &a)] {
        assert_eq!(response.error_code, 0);
        assert_eq!(response.assignment, format!("for {}", joined.member_id));
        assert_eq!(response.protocol_name, Some(s("range")));
        encodes(response, 0..=5);
    }
    assert_eq!(list(&groups, 5).await, [("g".into(), "Stable".into(), "consumer".into())]);

    let leaving = [&b, &c].map(|j| MemberIdentity::default().with_member_id(j.member_id.clone()));
    let stranger = MemberIdentity::default().with_member_id(s("stranger"));
    let members = leaving.into_iter().chain([stranger]).collect();
    let leave = LeaveGroupRequest::default().with_group_id(group_id("g")).with_members(members);
    let left = groups.leave(leave, 5).await;
    encodes(&left, 3..=5);
    let codes: Vec<i16> = left.members.iter().map(|member| member.error_code).collect();
    assert_eq!((left.error_code, codes), (0, vec![0, 0, ResponseError::UnknownMemberId.code()]));

    let leave = LeaveGroupRequest::default().with_group_id(group_id("g"));
    let leave = leave.with_member_id(a.member_id.clone());
    let left = world.run(groups.leave(leave, 2)).await;
    encodes(&left, 0..=2);
    assert_eq!(left.error_code, 0);
    assert_eq!(list(&groups, 4).await, [("g".into(), "Empty".into(), "consumer".into())]);
}

#[tokio::test]
async fn the_timer_removes_a_silent_member_and_the_other_continues() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    // The timer is in a long sleep when the short session begins.
    assert_eq!(join(&groups, "another", 1_800_000).await.error_code, 0);
    tokio::task::yield_now().await;
    let silent = join(&groups, "g", 50).await;
    world.run(groups.sync(&sync_request("g", &silent), 5)).await;
    let other = tokio::time::timeout(Duration::from_secs(20), join(&groups, "g", 10_000));
    let other = world.run(other).await.expect("no wakeup");
    assert_eq!((other.error_code, other.members.len()), (0, 1));
    let gone = groups.heartbeat(heartbeat_request("g", &silent)).await;
    assert_eq!(gone.error_code, ResponseError::UnknownMemberId.code());
}

#[tokio::test]
async fn shutdown_answers_waiting_and_later_requests() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let gone = ResponseError::CoordinatorNotAvailable.code();
    let a = join(&groups, "g", 10_000).await;
    world.run(groups.sync(&sync_request("g", &a), 5)).await;
    let waiting = join(&groups, "g", 10_000);
    let shutdown = async {
        while groups.heartbeat(heartbeat_request("g", &a)).await.error_code == 0 {
            tokio::task::yield_now().await;
        }
        groups.shutdown().await;
    };
    let (waiting, ()) = tokio::join!(waiting, shutdown);
    assert_eq!(waiting.error_code, gone);
    let later = groups
        .join(&client(), &join_request("g", &StrBytes::new()), 9, &TopicsView::default())
        .await;
    assert_eq!(later.error_code, gone);
    assert_eq!(groups.heartbeat(heartbeat_request("g", &a)).await.error_code, gone);
    assert_eq!(commit(&groups, commit_request("g", &[("topic", 0, 1)])).await, [gone]);
    groups.shutdown().await;
}

#[tokio::test]
async fn committed_offsets_survive_crashes_and_uploads() {
    let mut world = World::new();
    let (store, groups) = world.start().await;
    let request = commit_request("g", &[("topic-a", 0, 10), ("topic-b", 1, 20)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0, 0]);
    let request = commit_request("g", &[("topic-a", 0, 11), ("topic-a", 2, 5)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0, 0]);
    let expected = [found("topic-a", 0, 11), found("topic-a", 2, 5), found("topic-b", 1, 20)];
    assert_eq!(fetch(&groups, "g").await, expected);

    // From the log alone.
    world.crash(store, groups);
    let (store, groups) = world.start().await;
    assert_eq!(fetch(&groups, "g").await, expected);
    assert_eq!(list(&groups, 5).await, [("g".into(), "Empty".into(), String::new())]);

    // From the checkpoint alone, then from both.
    world.run(store.flush()).await.expect("an upload");
    world.crash(store, groups);
    let (store, groups) = world.start().await;
    assert_eq!(fetch(&groups, "g").await, expected);
    assert_eq!(world.run(commit(&groups, commit_request("h", &[("topic-a", 0, 7)]))).await, [0]);
    world.crash(store, groups);
    let (store, groups) = world.start().await;
    assert_eq!(fetch(&groups, "g").await, expected);
    assert_eq!(fetch(&groups, "h").await, [found("topic-a", 0, 7)]);

    // Deletions are durable too.
    assert_eq!(groups.topics_with_offsets(), ["topic-a", "topic-b"]);
    let both = ["topic-a".to_owned(), "topic-b".to_owned()];
    let exists = |name: &str| name == "topic-b";
    world.run(groups.forget_missing_topics(&both, exists)).await.expect("written");
    assert_eq!(fetch(&groups, "g").await, [found("topic-b", 1, 20)]);
    assert_eq!(world.run(groups.delete_group("g")).await, Ok(()));
    let absent = world.run(groups.delete_group("absent")).await;
    assert_eq!(absent, Err(ResponseError::GroupIdNotFound));
    world.crash(store, groups);
    let (_store, groups) = world.start().await;
    assert_eq!(fetch(&groups, "g").await, []);
    assert_eq!(fetch(&groups, "h").await, []);
    assert_eq!(list(&groups, 5).await, []);
}

#[tokio::test]
async fn an_offset_is_visible_only_once_it_is_durable() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let request = |offset| commit_request("g", &[("topic", 0, offset)]);
    assert_eq!(world.run(commit(&groups, request(1))).await, [0]);

    // The disk does not complete writes.
    let mut second = Box::pin(commit(&groups, request(2)));
    let mut third = Box::pin(commit(&groups, request(3)));
    for _ in 0..100 {
        tokio::select! {
            biased;
            _ = &mut second => panic!("acknowledged without being durable"),
            _ = &mut third => panic!("acknowledged without being durable"),
            () = tokio::task::yield_now() => {}
        }
    }
    assert_eq!(fetch(&groups, "g").await, [found("topic", 0, 1)]);

    // The commit of a disconnected client still takes effect, in order.
    drop(second);
    assert_eq!(world.run(third).await, [0]);
    assert_eq!(fetch(&groups, "g").await, [found("topic", 0, 3)]);

    // No request has to wait for it.
    let mut fourth = Box::pin(commit(&groups, request(4)));
    tokio::select! {
        biased;
        _ = &mut fourth => panic!("acknowledged without being durable"),
        () = tokio::task::yield_now() => {}
    }
    drop(fourth);
    world
        .run(async {
            while fetch(&groups, "g").await != [found("topic", 0, 4)] {
                tokio::task::yield_now().await;
            }
        })
        .await;
}

#[tokio::test]
async fn a_commit_waits_for_space_and_then_fails_with_a_retriable_error() {
    let mut world = World::new();
    world.config.append_timeout = Duration::from_millis(20);
    let (_store, groups) = world.start().await;
    let note = s(&"n".repeat(4096));
    let request = |offset| {
        let mut request = commit_request("g", &[("topic", 0, offset)]);
        request.topics[0].partitions[0].committed_metadata = Some(note.clone());
        request
    };
    // More than the window of 64 KiB holds, while the disk does not complete writes.
    let commits = (0..20).map(|offset| commit(&groups, request(offset)));
    let mut commits: Vec<_> = commits.map(Box::pin).collect();
    let mut refused = 0;
    for pending in &mut commits {
        let answer = tokio::time::timeout(Duration::from_millis(200), pending).await;
        if let Ok(codes) = answer {
            assert_eq!(codes, [ResponseError::CoordinatorNotAvailable.code()]);
            refused += 1;
        }
    }
    assert!((1..20).contains(&refused), "{refused} of 20 were refused");
    drop(commits);
    assert_eq!(world.run(commit(&groups, request(99))).await, [0]);
    assert_eq!(fetch(&groups, "g").await, [found("topic", 0, 99)]);
}

/// Another writer has opened the offsets stream, as the next coordinator would.
#[tokio::test]
async fn a_coordinator_whose_offsets_stream_was_taken_over_refuses_commits() {
    let world = World::new();
    let (store, groups) = world.start().await;
    let offsets = |at| commit_request("g", &[("topic", 0, at)]);
    assert_eq!(world.run(commit(&groups, offsets(1))).await, [0]);
    // The offsets come first, so their stream has the lowest id.
    let stream = store.stream_ids().into_iter().min().expect("a stream");
    let epoch = alluvium_stream::StreamEpoch(1);
    let other = world.run(store.open_stream(stream, epoch)).await.expect("its epoch is newer");
    let refused = world.run(commit(&groups, offsets(2))).await;
    assert_eq!(refused, [ResponseError::NotCoordinator.code()]);
    assert_eq!(other.next_offset(), other.durable_end());
    assert_eq!(fetch(&groups, "g").await, [found("topic", 0, 1)]);
}

#[tokio::test]
async fn partitions_of_a_commit_are_checked_one_by_one() {
    let mut world = World::new();
    world.config.max_offset_metadata_bytes = 3;
    let (_store, groups) = world.start().await;
    let mut request = commit_request("g", &[("topic", 0, 1), ("topic", 10, 1), ("nope", 0, 1)]);
    assert_eq!(
        world.run(commit(&groups, request.clone())).await,
        [
            ResponseError::OffsetMetadataTooLarge.code(),
            ResponseError::UnknownTopicOrPartition.code(),
            ResponseError::UnknownTopicOrPartition.code(),
        ]
    );
    assert_eq!(fetch(&groups, "g").await, []);
    request.topics[0].partitions[0].committed_metadata = None;
    let codes = world.run(commit(&groups, request)).await;
    assert_eq!(codes[0], 0);
    assert_eq!(fetch(&groups, "g").await, [found("topic", 0, 1)]);

    let stranger = commit_request("new", &[("topic", 0, 1)]).with_generation_id_or_member_epoch(3);
    // Since version 9 the error says that the group does not exist.
    let not_found = ResponseError::GroupIdNotFound.code();
    assert_eq!(commit(&groups, stranger).await, [not_found]);
}

#[tokio::test]
async fn every_version_of_offset_fetch_returns_the_same_offsets() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let request = commit_request("g", &[("topic", 0, 7)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0]);
    let topic = OffsetFetchRequestTopic::default()
        .with_name(TopicName(s("topic")))
        .with_partition_indexes(vec![0, 1]);
    for version in 1..=7 {
        let request = OffsetFetchRequest::default()
            .with_group_id(group_id("g"))
            .with_topics(Some(vec![topic.clone()]));
        let response = groups.offset_fetch(request, version).await;
        encodes(&response, version..=version);
        let partitions = &response.topics[0].partitions;
        assert_eq!((partitions[0].committed_offset, partitions[0].committed_leader_epoch), (7, 4));
        assert_eq!(partitions[0].metadata, Some(s("note")));
        assert_eq!((partitions[1].committed_offset, partitions[1].error_code), (-1, 0));
    }
    for version in 2..=7 {
        let request = OffsetFetchRequest::default().with_group_id(group_id("g")).with_topics(None);
        let response = groups.offset_fetch(request, version).await;
        encodes(&response, version..=version);
        assert_eq!(response.topics[0].partitions[0].committed_offset, 7);
    }
    let topics = OffsetFetchRequestTopics::default()
        .with_name(TopicName(s("topic")))
        .with_partition_indexes(vec![0]);
    let group = |name| {
        OffsetFetchRequestGroup::default()
            .with_group_id(group_id(name))
            .with_topics(Some(vec![topics.clone()]))
    };
    let request = OffsetFetchRequest::default().with_groups(vec![group("g"), group("absent")]);
    let response = groups.offset_fetch(request, 8).await;
    encodes(&response, 8..=9);
    let offset = |index: usize| response.groups[index].topics[0].partitions[0].committed_offset;
    assert_eq!((offset(0), offset(1)), (7, -1));
}

#[tokio::test]
async fn groups_are_listed_described_and_deleted() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let member = join(&groups, "active", 10_000).await;
    world.run(groups.sync(&sync_request("active", &member), 5)).await;
    let request = commit_request("idle", &[("topic", 0, 7)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0]);

    for version in 0..=5 {
        assert_eq!(list(&groups, version).await.len(), 2);
    }
    let filtered = |states: &[&str], types: &[&str]| {
        let all = |texts: &[&str]| texts.iter().map(|text| s(text)).collect();
        let request = ListGroupsRequest::default()
            .with_states_filter(all(states))
            .with_types_filter(all(types));
        let groups = groups.clone();
        async move {
            let response = groups.list(request, 5).await;
            let ids = response.groups.iter().map(|group| group.group_id.as_str().to_owned());
            ids.collect::<Vec<_>>()
        }
    };
    assert_eq!(filtered(&["stable"], &[]).await, ["active"]);
    assert_eq!(filtered(&["Empty", "Dead"], &["Classic"]).await, ["idle"]);
    assert_eq!(filtered(&[], &["consumer"]).await, [] as [&str; 0]);

    for version in 0..=6 {
        let request = DescribeGroupsRequest::default()
            .with_groups(vec![group_id("active"), group_id("idle"), group_id("absent")])
            .with_include_authorized_operations(version >= 3);
        let response = groups.describe(request, version).await;
        encodes(&response, version..=version);
        let [active, idle, absent] = &response.groups[..] else { panic!("three were requested") };
        assert_eq!((&active.group_state, &active.protocol_data), (&s("Stable"), &s("range")));
        let [described] = &active.members[..] else { panic!("it has one member") };
        assert_eq!(described.member_id, member.member_id);
        assert_eq!((&described.client_id, &described.client_host), (&s("test"), &s("/127.0.0.1")));
        assert_eq!(described.member_metadata, "subscription");
        assert_eq!(described.member_assignment, format!("for {}", member.member_id));
        assert_eq!((&idle.group_state, idle.members.len()), (&s("Empty"), 0));
        let not_found = if version >= 6 { ResponseError::GroupIdNotFound.code() } else { 0 };
        assert_eq!((&absent.group_state, absent.error_code), (&s("Dead"), not_found));
    }

    let slot = groups.shared.registry.get("idle").expect("it is there");
    let active = world.run(groups.delete_group("active")).await;
    assert_eq!(active, Err(ResponseError::NonEmptyGroup));
    assert_eq!(world.run(groups.delete_group("idle")).await, Ok(()));
    let again = world.run(groups.delete_group("idle")).await;
    assert_eq!(again, Err(ResponseError::GroupIdNotFound));
    assert_eq!(fetch(&groups, "idle").await, []);
    // A request that found the group before it was deleted sees a dead one.
    let state = groups.shared.registry.peek(&slot, |group, _| group.state_name());
    assert_eq!(state, group::State::Dead.name());
    // A group of this name can be used again at once.
    let request = commit_request("idle", &[("topic", 1, 8)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0]);
    assert_eq!(fetch(&groups, "idle").await, [found("topic", 1, 8)]);
}

/// No group is created, so it does not count.
#[tokio::test]
async fn an_empty_commit_creates_no_group() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let request = commit_request("g", &[("gone", 0, 1)]);
    let view = TopicsView::default();
    let committed = groups.offset_commit(request, 9, &view, |_, _| false);
    let committed = world.run(committed).await;
    let unknown = ResponseError::UnknownTopicOrPartition.code();
    assert_eq!(committed.topics[0].partitions[0].error_code, unknown);
    assert_eq!(list(&groups, 5).await.len(), 0);
}

#[tokio::test]
async fn a_configuration_out_of_range_is_refused() {
    let mut world = World::new();
    world.config.max_session_timeout = Duration::from_millis(0);
    assert!(matches!(world.try_start().await, Err(GroupsError::Config(_))));
}

/// A member may find a group a moment before it is deleted.
#[tokio::test]
async fn a_member_that_joins_a_deleted_group_has_to_retry() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let slot = groups.shared.create("g").expect("there are few groups");
    groups.shared.registry.change(&slot, |group, _| group.classic().expect("it is new").kill());
    let names = || Some(vec![TopicName(s("topic"))]);
    let (session_timeout, heartbeat_interval) = (Duration::from_secs(45), Duration::from_secs(5));
    let request = ConsumerGroupHeartbeatRequest::default()
        .with_group_id(group_id("g"))
        .with_member_id(s("m"))
        .with_rebalance_timeout_ms(60_000)
        .with_subscribed_topic_names(names())
        .with_topic_partitions(Some(vec![]));
    let (topics, times) =
        (TopicsView::default(), ConsumerTimes { session_timeout, heartbeat_interval });
    let refused = groups.consumer_heartbeat(client(), request, 1, &topics, times).await;
    assert_eq!(refused.error_code, ResponseError::CoordinatorNotAvailable.code());
    let request = ShareGroupHeartbeatRequest::default()
        .with_group_id(group_id("g"))
        .with_member_id(s("m"))
        .with_subscribed_topic_names(names());
    let refused = groups
        .share_heartbeat(client(), request, session_timeout, heartbeat_interval, &topics)
        .await;
    assert_eq!(refused.error_code, ResponseError::CoordinatorNotAvailable.code());
    let starts = [(0, StreamOffset(0))];
    let refused = groups.alter_shares("g", uuid::Uuid::from_u128(1), &starts, || true).await;
    let error = refused.expect_err("the group is dead").error;
    assert_eq!(error, ResponseError::CoordinatorNotAvailable);
}
