//! Staged offsets of a transaction: what consumers and admins see of them, and of their group,
//! before the transaction ends and after.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use futures::poll;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;

use super::deleting::{commit, commit_request, committed, delete_group, delete_offsets};
use super::harness::{Client, HANG, TestServer, text};
use super::transactions::Producer;
use crate::BrokerConfig;
use crate::batch::Outcome;
use crate::groups::{Position, TopicsView};
use crate::transactions::{State, Transactions};

const COORDINATOR_NOT_AVAILABLE: i16 = ResponseError::CoordinatorNotAvailable.code();
const UNSTABLE_OFFSET_COMMIT: i16 = ResponseError::UnstableOffsetCommit.code();

/// Error codes and committed offsets of the partitions 0 and 1 of `t`.
async fn offsets(client: &mut Client, version: i16, group: &str, stable: bool) -> [(i16, i64); 2] {
    use offset_fetch_request::*;
    let request = OffsetFetchRequest::default().with_require_stable(stable);
    let group = GroupId(text(group));
    if version < 8 {
        let topic = OffsetFetchRequestTopic::default()
            .with_name(TopicName(text("t")))
            .with_partition_indexes(vec![0, 1]);
        let request = request.with_group_id(group).with_topics(Some(vec![topic]));
        let response = client.call(version, &request).await;
        assert_eq!(response.error_code, 0);
        let partitions = &response.topics[0].partitions;
        return [0, 1]
            .map(|at: usize| (partitions[at].error_code, partitions[at].committed_offset));
    }
    let topic = OffsetFetchRequestTopics::default()
        .with_name(TopicName(text("t")))
        .with_partition_indexes(vec![0, 1]);
    let group =
        OffsetFetchRequestGroup::default().with_group_id(group).with_topics(Some(vec![topic]));
    let response = client.call(version, &request.with_groups(vec![group])).await;
    assert_eq!(response.groups[0].error_code, 0);
    let partitions = &response.groups[0].topics[0].partitions;
    [0, 1].map(|at: usize| (partitions[at].error_code, partitions[at].committed_offset))
}

/// The result of all versions with `require_stable`.
async fn stable_offsets(client: &mut Client, group: &str) -> [(i16, i64); 2] {
    let [first, second, third] = [
        offsets(client, 7, group, true).await,
        offsets(client, 8, group, true).await,
        offsets(client, 9, group, true).await,
    ];
    assert_eq!((first, second), (second, third));
    first
}

/// A client that requires stable offsets has to retry until the end is durable; others see the old
/// ones.
#[tokio::test(flavor = "multi_thread")]
async fn offsets_are_unstable_until_their_transaction_has_ended() {
    for (commits, version_2) in [(true, true), (true, false), (false, true), (false, false)] {
        let server = TestServer::simulated(16 << 20).await;
        server.topic("t", 2, &[]).await;
        let mut client = server.client().await;
        commit(&mut client, "g", "t", &[0]).await;
        let mut producer = Producer::init(&server, "a", version_2).await;
        if !version_2 {
            assert_eq!(producer.add_offsets("g").await, 0);
        }
        let before = [(0, 7), (0, -1)];
        assert_eq!(stable_offsets(&mut client, "g").await, before);

        assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
        let unstable = [(UNSTABLE_OFFSET_COMMIT, -1), (0, -1)];
        assert_eq!(stable_offsets(&mut client, "g").await, unstable);
        assert_eq!(offsets(&mut client, 9, "g", false).await, before);

        server.hold_disk(true);
        let end = tokio::spawn(async move { producer.end(commits).await });
        let decided = async {
            let transactions = &server.server().transactions;
            while transactions.describe("a").unwrap().state == State::Ongoing {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(HANG, decided).await.unwrap();
        assert_eq!(stable_offsets(&mut client, "g").await, unstable);
        assert_eq!(offsets(&mut client, 9, "g", false).await, before);

        server.hold_disk(false);
        assert_eq!(end.await.unwrap(), 0);
        let after = [(0, if commits { 9 } else { 7 }), (0, -1)];
        assert_eq!(stable_offsets(&mut client, "g").await, after);
        assert_eq!(offsets(&mut client, 9, "g", false).await, after);
    }
}

/// The offset of a committing transaction for the partition `index` of `t`, as it is appended for
/// the group.
fn decided(index: i32, offset: i64) -> BTreeMap<String, BTreeMap<i32, Position>> {
    let metadata = String::new();
    let position = Position { partition: index, offset, leader_epoch: -1, metadata };
    BTreeMap::from([("t".to_owned(), BTreeMap::from([(index, position)]))])
}

/// Steps that are not known to be complete are repeated after a crash. What was acknowledged after
/// them must be preserved.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_transactional_commit_replaces_no_acknowledged_offset() {
    let configure = |config: &mut BrokerConfig| {
        config.groups.append_timeout = Duration::from_millis(20);
    };
    let mut server = TestServer::with(16 << 20, configure).await;
    server.topic("t", 2, &[]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
    server.server().transactions.decide_only("a", Outcome::Commit, true).await;
    // The log ends before the record of the completion.
    let committed = server.server().groups.commit_of_transaction("g", decided(0, 9), |_, _| true);
    assert_eq!(committed.await, Ok(()));
    let mut client = server.client().await;
    let mut acknowledged = Vec::new();
    for partition in [0, 1] {
        let answer = client.call(8, &commit_request("g", "t", &[partition], 11)).await;
        acknowledged.push(answer.topics[0].partitions[0].error_code);
    }
    server.crash().await;
    let found = stable_offsets(&mut server.client().await, "g").await;
    assert!(acknowledged[0] != 0 || found[0] == (0, 11), "11 was acknowledged: {found:?}");
    assert_eq!(acknowledged, [COORDINATOR_NOT_AVAILABLE, 0]);
    assert_eq!(found, [(0, 9), (0, 11)]);
}

/// A commit for a partition for which a transaction is about to commit comes before the decision or
/// after the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_concurrent_with_the_end_of_a_transaction_waits_for_it() {
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let (core, mut client) = (server.server(), server.client().await);
    let mut a = Producer::init(&server, "a", true).await;
    assert_eq!(a.commit_offsets("g", "t", &[0, 1], 9).await, 0);
    let mut b = Producer::init(&server, "b", true).await;
    assert_eq!(b.commit_offsets("g", "t", &[1], 11).await, 0);
    core.transactions.decide_only("a", Outcome::Commit, true).await;
    let view = TopicsView::default();

    let request = commit_request("g", "t", &[0], 11);
    let mut plain = pin!(core.groups.offset_commit(request, 8, &view, |_, _| true));
    assert!(poll!(plain.as_mut()).is_pending());
    let mut end = pin!(Transactions::end(core, b.identity(), Outcome::Commit, true));
    assert!(poll!(end.as_mut()).is_pending());
    assert_eq!(core.transactions.describe("b").unwrap().state, State::Ongoing);
    // Others have nothing to wait for.
    commit(&mut client, "other", "t", &[0, 1]).await;

    core.transactions.complete_decided(core, "a");
    assert_eq!(plain.await.topics[0].partitions[0].error_code, 0);
    assert!(end.await.is_ok());
    assert_eq!(stable_offsets(&mut client, "g").await, [(0, 11), (0, 11)]);
}

/// Rows of ListGroups: name, state, type and protocol type.
async fn listed(client: &mut Client) -> Vec<[String; 4]> {
    let groups = client.call(5, &ListGroupsRequest::default()).await.groups;
    let row = |group: &list_groups_response::ListedGroup| {
        let texts = [&*group.group_id, &group.group_state, &group.group_type, &group.protocol_type];
        texts.map(|text| text.as_str().to_owned())
    };
    groups.iter().map(row).collect()
}

/// As in Kafka it is an empty classic group since the first TxnOffsetCommit.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_with_staged_offsets_only_is_an_ordinary_group() {
    for crash in [false, true] {
        let mut server = TestServer::start().await;
        server.topic("t", 2, &[]).await;
        let mut client = server.client().await;
        let mut producer = Producer::init(&server, "a", true).await;
        for group in ["deleted", "kept"] {
            assert_eq!(producer.commit_offsets(group, "t", &[0, 1], 9).await, 0);
        }
        if crash {
            server.crash().await;
            client = server.client().await;
            producer.reconnect(&server).await;
        }
        let empty = |name: &str| [name, "Empty", "classic", ""].map(str::to_owned);
        assert_eq!(listed(&mut client).await, [empty("deleted"), empty("kept")]);
        let groups = ["kept", "none"].map(|name| GroupId(text(name))).to_vec();
        let request = DescribeGroupsRequest::default().with_groups(groups);
        let described = client.call(6, &request).await.groups;
        let states: Vec<(i16, &str)> =
            described.iter().map(|g| (g.error_code, g.group_state.as_str())).collect();
        assert_eq!(states, [(0, "Empty"), (69, "Dead")]);

        // A share group cannot use committed offsets.
        let share = ShareGroupHeartbeatRequest::default()
            .with_group_id(GroupId(text("kept")))
            .with_member_id(text("m"))
            .with_subscribed_topic_names(Some(vec![TopicName(text("t"))]));
        assert_eq!(client.call(1, &share).await.error_code, ResponseError::GroupIdNotFound.code());

        let unstable = (UNSTABLE_OFFSET_COMMIT, -1);
        assert_eq!(stable_offsets(&mut client, "kept").await, [unstable, unstable]);
        assert_eq!(delete_offsets(&mut client, "kept", &[("t", 0)]).await, (0, vec![0]));
        assert_eq!(stable_offsets(&mut client, "kept").await, [(0, -1), unstable]);
        assert_eq!(delete_group(&mut client, "deleted").await, 0);
        assert_eq!(
            delete_group(&mut client, "deleted").await,
            ResponseError::GroupIdNotFound.code()
        );
        assert_eq!(stable_offsets(&mut client, "deleted").await, [(0, -1), (0, -1)]);
        if crash {
            server.crash().await;
            client = server.client().await;
            producer.reconnect(&server).await;
        }
        assert_eq!(listed(&mut client).await, [empty("kept")]);
        assert_eq!(producer.end(true).await, 0);
        assert_eq!(committed(&mut client, "kept").await, [("t".to_owned(), 1)]);
        assert_eq!(listed(&mut client).await, [empty("kept")]);
    }
}
