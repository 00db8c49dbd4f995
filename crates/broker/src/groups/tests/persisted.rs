//! Members of classic groups over restarts.

use super::*;

/// With their generation, assignment and offsets: from the log alone, and from the checkpoint.
#[tokio::test]
async fn members_continue_after_a_restart() {
    let mut world = World::new();
    let (mut store, mut groups) = world.start().await;
    let member = join(&groups, "g", 10_000).await;
    let synced = world.run(groups.sync(&sync_request("g", &member), 5)).await;
    assert_eq!(synced.error_code, 0);
    let by_member = |offset| {
        commit_request("g", &[("topic", 0, offset)])
            .with_generation_id_or_member_epoch(member.generation_id)
            .with_member_id(member.member_id.clone())
    };
    let wrong = by_member(1).with_generation_id_or_member_epoch(member.generation_id + 1);
    let illegal = ResponseError::IllegalGeneration.code();
    assert_eq!(world.run(commit(&groups, wrong)).await, [illegal]);
    for upload in [false, true, false] {
        if upload {
            world.run(store.flush()).await.expect("an upload");
        }
        world.crash(store, groups);
        (store, groups) = world.start().await;
        let stable = ("g".to_owned(), "Stable".to_owned(), "consumer".to_owned());
        assert_eq!(list(&groups, 5).await, [stable]);
        assert_eq!(groups.heartbeat(heartbeat_request("g", &member)).await.error_code, 0);
        let offset = i64::from(upload) + 1;
        assert_eq!(world.run(commit(&groups, by_member(offset))).await, [0]);
        assert_eq!(fetch(&groups, "g").await, [found("topic", 0, offset)]);
        let again = world.run(groups.sync(&sync_request("g", &member), 5)).await;
        assert_eq!((again.error_code, &again.assignment), (0, &synced.assignment));
    }

    // A new member joins, and the existing one joins again when it learns of it.
    let old = async {
        while groups.heartbeat(heartbeat_request("g", &member)).await.error_code == 0 {
            tokio::task::yield_now().await;
        }
        groups
            .join(&client(), &join_request("g", &member.member_id), 9, &TopicsView::default())
            .await
    };
    let (new, old) = world.run(async { tokio::join!(join(&groups, "g", 10_000), old) }).await;
    assert_eq!((new.error_code, old.error_code), (0, 0));
    assert_eq!((new.generation_id, old.generation_id), (2, 2));

    // They had begun a generation that has no assignments yet: it is lost.
    world.crash(store, groups);
    let (store, groups) = world.start().await;
    let unknown = ResponseError::UnknownMemberId.code();
    assert_eq!(groups.heartbeat(heartbeat_request("g", &new)).await.error_code, unknown);
    assert_eq!(groups.heartbeat(heartbeat_request("g", &old)).await.error_code, illegal);
    assert_eq!(groups.heartbeat(heartbeat_request("g", &member)).await.error_code, 0);

    // A group without members has none after a restart either.
    let leave = LeaveGroupRequest::default().with_group_id(group_id("g"));
    let left = groups.leave(leave.with_member_id(member.member_id.clone()), 2);
    assert_eq!(world.run(left).await.error_code, 0);
    world.crash(store, groups);
    let (_store, groups) = world.start().await;
    assert_eq!(groups.heartbeat(heartbeat_request("g", &member)).await.error_code, unknown);
    assert_eq!(list(&groups, 5).await, [("g".into(), "Empty".into(), String::new())]);
}

/// Otherwise two members could have one partition, each by its own assignment.
#[tokio::test]
async fn a_member_receives_its_assignment_only_once_it_is_durable() {
    let mut world = World::new();
    let (store, groups) = world.start().await;
    let member = join(&groups, "g", 10_000).await;
    // The disk does not complete writes.
    let mut synced = Box::pin(groups.sync(&sync_request("g", &member), 5));
    for _ in 0..100 {
        tokio::select! {
            biased;
            _ = &mut synced => panic!("answered without being durable"),
            () = tokio::task::yield_now() => {}
        }
    }
    assert_eq!(world.run(synced).await.error_code, 0);
    world.crash(store, groups);
    let (_store, groups) = world.start().await;
    assert_eq!(groups.heartbeat(heartbeat_request("g", &member)).await.error_code, 0);
}

/// It serves its members as long as the server runs.
#[tokio::test]
async fn a_group_too_large_for_a_record_is_not_persisted() {
    let mut world = World::new();
    let (store, groups) = world.start().await;
    let small = join(&groups, "g", 10_000).await;
    assert_eq!(world.run(groups.sync(&sync_request("g", &small), 5)).await.error_code, 0);
    let protocol = JoinGroupRequestProtocol::default()
        .with_name(s("range"))
        .with_metadata(Bytes::from(vec![7; 20 << 10]));
    let larger = join_request("g", &small.member_id).with_protocols(vec![protocol]);
    let joined = groups.join(&client(), &larger, 9, &TopicsView::default()).await;
    assert_eq!((joined.error_code, joined.generation_id), (0, 2));
    assert_eq!(world.run(groups.sync(&sync_request("g", &joined), 5)).await.error_code, 0);
    assert_eq!(groups.heartbeat(heartbeat_request("g", &joined)).await.error_code, 0);
    world.crash(store, groups);
    let (_store, groups) = world.start().await;
    let unknown = ResponseError::UnknownMemberId.code();
    assert_eq!(groups.heartbeat(heartbeat_request("g", &joined)).await.error_code, unknown);
    assert_eq!(groups.heartbeat(heartbeat_request("g", &small)).await.error_code, unknown);
}
