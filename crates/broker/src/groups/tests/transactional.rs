//! Offsets that transactions commit, and the groups that they are for.

use super::*;
use crate::groups::offset_log::Prepared;
use crate::groups::offsets::Record;

/// An offset of one partition of `topic`, as a transaction hands it over when it commits.
fn decided(partition: i32, offset: i64) -> BTreeMap<String, BTreeMap<i32, Position>> {
    let position = Position { partition, offset, leader_epoch: -1, metadata: String::new() };
    BTreeMap::from([("topic".to_owned(), BTreeMap::from([(partition, position)]))])
}

/// The end of a transaction may come between the death of a group and its end in the map: its offsets would be without a group until a restart, so nobody could
/// list or delete them, and they would never expire.
#[tokio::test]
async fn offsets_that_are_committed_beside_a_deletion_have_a_group() {
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
    // What the deletion does next concerns the group that it has found, and no other one of its name.
    shared.registry.remove(&slot);
    // Durable with this is all that was written before it.
    assert_eq!(world.run(commit(&groups, commit_request("x", &[("topic", 0, 1)]))).await, [0]);
    assert_eq!(fetch(&groups, "g").await, [found("topic", 1, 9)]);
    let names: Vec<String> = list(&groups, 5).await.into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["g", "x"]);
    assert_eq!(world.run(groups.delete_group("g")).await, Ok(()));
    assert_eq!(fetch(&groups, "g").await, []);
}
