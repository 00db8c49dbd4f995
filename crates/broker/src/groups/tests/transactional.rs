//! Offsets that transactions commit, and their groups.

use std::sync::mpsc;
use std::thread;

use futures::FutureExt as _;

use super::*;
use crate::groups::offset_log::Prepared;
use crate::groups::offsets::Record;

/// An offset of one partition of `topic`, as a committing transaction passes it.
fn decided(partition: i32, offset: i64) -> BTreeMap<String, BTreeMap<i32, Position>> {
    let position = Position { partition, offset, leader_epoch: -1, metadata: String::new() };
    BTreeMap::from([("topic".to_owned(), BTreeMap::from([(partition, position)]))])
}

/// The end of a transaction may come between the death of a group and its removal from the map:
/// without a group its offsets could not be listed or deleted until a restart, and would never
/// expire.
#[tokio::test]
async fn offsets_committed_concurrently_with_a_deletion_have_a_group() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let shared = &groups.shared;
    assert_eq!(world.run(commit(&groups, commit_request("g", &[("topic", 0, 7)]))).await, [0]);
    let slot = shared.registry.get("g").expect("it is there");
    let record = Prepared::from(Record::GroupDeleted { group: "g".to_owned() });
    let deleted = shared.put_deletion(&slot, &record);
    assert!(deleted.is_ok());
    let committed = groups.commit_of_transaction("g", decided(1, 9), |_, _| true);
    assert_eq!(world.run(committed).await, Ok(()));
    // The rest of the deletion concerns the group that it has found, and no other one of its name.
    shared.registry.remove(&slot);
    // When this is durable, everything written before it is, too.
    assert_eq!(world.run(commit(&groups, commit_request("x", &[("topic", 0, 1)]))).await, [0]);
    assert_eq!(fetch(&groups, "g").await, [found("topic", 1, 9)]);
    let names: Vec<String> = list(&groups, 5).await.into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["g", "x"]);
    assert_eq!(world.run(groups.delete_group("g")).await, Ok(()));
    assert_eq!(fetch(&groups, "g").await, []);
}

/// As in Kafka. Otherwise an aborted transaction would leave no offset where there was one, and an
/// open one would have offsets for a group that cannot be listed.
#[tokio::test]
async fn the_sweep_keeps_offsets_that_an_open_transaction_will_replace() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let id: Arc<str> = "id".into();
    let pending = groups.pending();
    for partition in [0, 1] {
        let request = commit_request("old", &[("topic", partition, 7)]);
        assert_eq!(world.run(commit(&groups, request)).await, [0]);
    }
    let begin = |group, partition| {
        let request = TxnOffsetCommitRequest::default().with_group_id(group_id(group));
        let record = || pending.add(group, &id, [("topic", vec![partition])].into_iter());
        assert_eq!(
            groups.commit_in_transaction(&request, &[], &TopicsView::default(), record),
            Ok(())
        );
    };
    begin("old", 1);
    begin("new", 0);

    let later = world.config.offsets_retention + Duration::from_secs(60);
    let names = async || -> Vec<String> {
        list(&groups, 5).await.into_iter().map(|(name, ..)| name).collect()
    };
    assert_eq!(names().await, ["new", "old"]);
    sweep(&groups, later, later).await;
    dropped(&world, &groups, "old", 1).await;
    assert_eq!(fetch(&groups, "old").await, [found("topic", 1, 7)]);
    assert_eq!(names().await, ["new", "old"]);

    // The transaction was aborted.
    for group in ["new", "old"] {
        pending.remove(group, &id);
    }
    sweep(&groups, later, later).await;
    assert_eq!(names().await, ["old"]);
    dropped(&world, &groups, "old", 0).await;
    sweep(&groups, later, later).await;
    assert_eq!(names().await, [] as [&str; 0]);
}

/// Commits in a transaction, and runs `other` on its own thread from the moment at which the
/// offsets may be appended.
fn commit_beside(groups: &Groups, group: &str, other: impl FnOnce() + Send) {
    let request = TxnOffsetCommitRequest::default().with_group_id(group_id(group));
    let (begun, begins) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            begins.recv().expect("the commit is accepted");
            other();
        });
        let record = move || {
            begun.send(()).expect("the other thread waits");
            thread::yield_now();
            groups.pending().add(group, &"id".into(), [("topic", vec![0])].into_iter());
        };
        assert_eq!(
            groups.commit_in_transaction(&request, &[], &TopicsView::default(), record),
            Ok(())
        );
    });
}

/// Otherwise it could drop the group's offsets, and the transaction could be aborted.
#[tokio::test]
async fn the_sweep_does_not_run_between_the_check_of_a_transactional_commit_and_its_record() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    assert_eq!(world.run(commit(&groups, commit_request("g", &[("topic", 0, 7)]))).await, [0]);
    let later = world.config.offsets_retention + Duration::from_secs(60);
    for _ in 0..100 {
        commit_beside(&groups, "g", || {
            sweep(&groups, later, later).now_or_never().expect("there are few groups");
        });
        groups.pending().remove("g", "id");
    }
    // When this is durable, everything written before it is, too.
    assert_eq!(world.run(commit(&groups, commit_request("x", &[("topic", 0, 1)]))).await, [0]);
    assert_eq!(fetch(&groups, "g").await, [found("topic", 0, 7)]);
}

/// Otherwise the transaction would commit offsets for a group that cannot have any.
#[tokio::test]
async fn a_group_with_offsets_in_a_transaction_does_not_become_a_share_group() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let (session_timeout, interval) = (Duration::from_secs(45), Duration::from_secs(5));
    let topics = TopicsView::default();
    for round in 0..100 {
        let group = format!("g{round}");
        let join = || {
            let request = ShareGroupHeartbeatRequest::default()
                .with_group_id(group_id(&group))
                .with_member_id(s("m"))
                .with_subscribed_topic_names(Some(vec![TopicName(s("topic"))]));
            let joined =
                groups.share_heartbeat(client(), request, session_timeout, interval, &topics);
            let refused = joined.now_or_never().expect("it has nothing to wait for");
            assert_eq!(refused.error_code, ResponseError::GroupIdNotFound.code());
        };
        commit_beside(&groups, &group, join);
    }
}

/// A request that found the group before it was deleted sees a dead one.
#[tokio::test]
async fn nothing_is_committed_for_a_dead_group() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let slot = groups.shared.create("g").expect("there are few groups");
    groups.shared.registry.change(&slot, |group, _| group.classic().expect("it is new").kill());
    let come_again = ResponseError::CoordinatorNotAvailable;
    let request = TxnOffsetCommitRequest::default().with_group_id(group_id("g"));
    let mut is_recorded = false;
    let refused =
        groups.commit_in_transaction(&request, &[], &TopicsView::default(), || is_recorded = true);
    assert_eq!((refused, is_recorded), (Err(come_again), false));
    let refused = world.run(commit(&groups, commit_request("g", &[("topic", 0, 7)]))).await;
    assert_eq!(refused, [come_again.code()]);
}
