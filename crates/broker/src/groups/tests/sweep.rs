//! The sweep: expiry of offsets, and removal of empty groups.

use super::*;

#[tokio::test]
async fn the_sweep_drops_old_offsets_and_empty_groups() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let request = commit_request("idle", &[("topic", 0, 7)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0]);
    let request = commit_request("busy", &[("topic", 0, 8)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0]);
    let member = join(&groups, "busy", 10_000).await;
    assert_eq!(member.error_code, 0);

    let sweep_after = async |time| sweep(&groups, time, time).await;
    let retention = world.config.offsets_retention;
    sweep_after(retention - Duration::from_secs(60)).await;
    assert_eq!(list(&groups, 5).await.len(), 2);
    sweep_after(retention + Duration::from_secs(60)).await;
    dropped(&world, &groups, "idle", 0).await;
    // The group itself is removed by the next sweep; the one with a member keeps everything.
    sweep_after(retention + Duration::from_secs(60)).await;
    let listed = list(&groups, 5).await;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].0, "busy");
    assert_eq!(fetch(&groups, "busy").await, [found("topic", 0, 8)]);
}

/// As in Kafka, it does not matter how long the group has been empty.
#[tokio::test]
async fn a_group_without_members_and_offsets_is_removed_by_the_next_sweep() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let request = commit_request("offsets", &[("topic", 0, 7)]);
    assert_eq!(world.run(commit(&groups, request)).await, [0]);
    let member = join(&groups, "emptied", 10_000).await;
    let leave = LeaveGroupRequest::default()
        .with_group_id(group_id("emptied"))
        .with_member_id(member.member_id);
    assert_eq!(world.run(groups.leave(leave, 2)).await.error_code, 0);
    let before = now();
    groups.shared.sweep(before, unix_time_ms()).await;
    assert_eq!(list(&groups, 5).await.len(), 2);
    groups.shared.sweep(before + Duration::from_secs(2), unix_time_ms()).await;
    let listed = list(&groups, 5).await;
    assert_eq!((listed.len(), listed[0].0.as_str()), (1, "offsets"));
}

/// As in Kafka, for classic and consumer groups: the lag of a topic that is not read any more is of
/// no interest.
#[tokio::test]
async fn the_sweep_drops_old_offsets_of_topics_without_subscribers() {
    let world = World::new();
    let (_store, groups) = world.start().await;
    let all = [("topic", 0, 7), ("topic-former", 0, 8)];
    for group in ["classic", "connect", "new"] {
        assert_eq!(world.run(commit(&groups, commit_request(group, &all))).await, [0, 0]);
    }
    // A consumer's subscription: the version, one topic, no user data.
    let reads = Bytes::from_static(b"\x00\x01\x00\x00\x00\x01\x00\x05topic\xff\xff\xff\xff");
    for (group, protocol_type) in [("classic", "consumer"), ("connect", "connect")] {
        let request = |id: &StrBytes| {
            let mut request = join_request(group, id).with_protocol_type(s(protocol_type));
            request.protocols[0].metadata = reads.clone();
            request
        };
        let topics = TopicsView::default();
        let first = groups.join(&client(), &request(&StrBytes::new()), 9, &topics).await;
        let joined = groups.join(&client(), &request(&first.member_id), 9, &topics).await;
        assert_eq!(joined.error_code, 0);
        let synced = world.run(groups.sync(&sync_request(group, &joined), 5)).await;
        assert_eq!(synced.error_code, 0);
    }
    let (session_timeout, heartbeat_interval) = (Duration::from_secs(45), Duration::from_secs(5));
    let request = ConsumerGroupHeartbeatRequest::default()
        .with_group_id(group_id("new"))
        .with_member_id(s("m"))
        .with_rebalance_timeout_ms(60_000)
        .with_subscribed_topic_names(Some(vec![TopicName(s("topic"))]))
        .with_topic_partitions(Some(vec![]));
    let times = ConsumerTimes { session_timeout, heartbeat_interval };
    let topics = TopicsView::default();
    let beat = groups.consumer_heartbeat(client(), request, 1, &topics, times);
    assert_eq!(world.run(beat).await.error_code, 0);

    let sweep_after = async |time| sweep(&groups, time, time).await;
    let (retention, minute) = (world.config.offsets_retention, Duration::from_secs(60));
    sweep_after(retention - minute).await;
    // When this is durable, everything written before it is, too.
    assert_eq!(world.run(commit(&groups, commit_request("x", &[("topic", 0, 1)]))).await, [0]);
    let both = all.map(|(topic, partition, offset)| found(topic, partition, offset));
    for group in ["classic", "connect", "new"] {
        assert_eq!(fetch(&groups, group).await, both, "{group}");
    }
    sweep_after(retention + minute).await;
    assert_eq!(world.run(commit(&groups, commit_request("x", &[("topic", 0, 2)]))).await, [0]);
    for (group, left) in [("classic", &both[..1]), ("connect", &both[..]), ("new", &both[..1])] {
        assert_eq!(fetch(&groups, group).await, left, "{group}");
    }
}

/// Otherwise they would never expire on a server that is restarted more often.
#[tokio::test]
async fn offsets_expire_after_a_restart() {
    let mut world = World::new();
    let (store, groups) = world.start().await;
    for group in ["idle", "busy", "back"] {
        let request = commit_request(group, &[("topic", 0, 7)]);
        assert_eq!(world.run(commit(&groups, request)).await, [0]);
    }
    world.crash(store, groups);
    let (_store, groups) = world.start().await;
    assert_eq!(join(&groups, "busy", 10_000).await.error_code, 0);
    // A group whose members have come back and left again is without members since then.
    let back = join(&groups, "back", 10_000).await;
    let leave = LeaveGroupRequest::default().with_group_id(group_id("back"));
    let left = groups.leave(leave.with_member_id(back.member_id.clone()), 2).await;
    assert_eq!(left.error_code, 0);

    let (retention, minute) = (world.config.offsets_retention, Duration::from_secs(60));
    let timeout = world.config.max_session_timeout;
    sweep(&groups, timeout - minute, retention + minute).await;
    sweep(&groups, timeout + minute, retention - minute).await;
    // When this is durable, everything written before it is, too.
    assert_eq!(world.run(commit(&groups, commit_request("new", &[("topic", 0, 8)]))).await, [0]);
    assert_eq!(fetch(&groups, "idle").await, [found("topic", 0, 7)]);
    sweep(&groups, timeout + minute, retention + minute).await;
    dropped(&world, &groups, "idle", 0).await;
    assert_eq!(fetch(&groups, "busy").await, [found("topic", 0, 7)]);
    assert_eq!(fetch(&groups, "back").await, [found("topic", 0, 7)]);
}

/// Members that have nothing to read for long commit nothing: their offsets are in use as long as
/// the group has members.
#[tokio::test]
async fn the_last_use_of_a_group_survives_a_restart() {
    let mut world = World::new();
    let (store, groups) = world.start().await;
    for group in ["busy", "idle"] {
        let request = commit_request(group, &[("topic", 0, 7)]);
        assert_eq!(world.run(commit(&groups, request)).await, [0]);
    }
    assert_eq!(join(&groups, "busy", 10_000).await.error_code, 0);
    let (retention, minute) = (world.config.offsets_retention, Duration::from_secs(60));
    let before_the_crash = retention - minute;
    sweep(&groups, before_the_crash, before_the_crash).await;
    // When this is durable, everything written before it is, too.
    assert_eq!(world.run(commit(&groups, commit_request("new", &[("topic", 0, 8)]))).await, [0]);
    world.crash(store, groups);

    let (_store, groups) = world.start().await;
    let up = world.config.max_session_timeout + minute;
    let found_now = async |later: Duration| {
        sweep(&groups, up, later).await;
        assert_eq!(
            world.run(commit(&groups, commit_request("new", &[("topic", 0, 9)]))).await,
            [0]
        );
        let mut found = Vec::new();
        for group in ["idle", "busy"] {
            found.push(fetch(&groups, group).await.len());
        }
        found
    };
    assert_eq!(found_now(retention + minute).await, [0, 1]);
    assert_eq!(found_now(before_the_crash + retention - minute).await, [0, 1]);
    assert_eq!(found_now(before_the_crash + retention + minute).await, [0, 0]);
}
