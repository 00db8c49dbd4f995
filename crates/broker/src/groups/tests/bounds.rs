//! Refusals: because of memory bounds, and of requests that no group can answer.

use super::*;

#[tokio::test]
async fn requests_that_no_group_can_answer_are_refused() {
    let mut world = World::new();
    world.config.max_groups = 1;
    world.config.max_membership_bytes = 1 << 20;
    world.config.min_session_timeout = Duration::from_secs(6);
    let (_store, groups) = world.start().await;
    let ask = |request: JoinGroupRequest, version| {
        let groups = groups.clone();
        async move {
            let response = groups.join(&client(), &request, version, &TopicsView::default()).await;
            encodes(&response, version..=version);
            response.error_code
        }
    };
    let good = || join_request("g", &StrBytes::new());
    let many = vec![JoinGroupRequestProtocol::default().with_name(s("p")); 65];
    let large = JoinGroupRequestProtocol::default()
        .with_name(s("p"))
        .with_metadata(Bytes::from(vec![0; (1 << 20) + 1]));
    for version in [0, 4, 6, 7, 9] {
        let cases = [
            (good().with_group_id(group_id("")), ResponseError::InvalidGroupId),
            (good().with_session_timeout_ms(5_999), ResponseError::InvalidSessionTimeout),
            (good().with_session_timeout_ms(-1), ResponseError::InvalidSessionTimeout),
            (good().with_session_timeout_ms(1_800_001), ResponseError::InvalidSessionTimeout),
            (good().with_member_id(s("stranger")), ResponseError::UnknownMemberId),
            (good().with_protocol_type(s("")), ResponseError::InconsistentGroupProtocol),
            (good().with_protocols(Vec::new()), ResponseError::InconsistentGroupProtocol),
            (good().with_protocols(many.clone()), ResponseError::InvalidRequest),
            (good().with_protocols(vec![large.clone()]), ResponseError::PolicyViolation),
            (good().with_group_id(group_id("two")), ResponseError::CoordinatorNotAvailable),
        ];
        for (request, expected) in cases {
            assert_eq!(ask(request, version).await, expected.code(), "{expected:?}");
        }
    }
    let unknown = ResponseError::UnknownMemberId.code();
    let absent = JoinGroupResponse::default().with_member_id(s("x"));
    assert_eq!(groups.heartbeat(heartbeat_request("none", &absent)).await.error_code, unknown);
    assert_eq!(groups.sync(&sync_request("none", &absent), 4).await.error_code, unknown);
    // Since version 5 clients send the protocol.
    let inconsistent = ResponseError::InconsistentGroupProtocol.code();
    assert_eq!(groups.sync(&sync_request("none", &absent), 5).await.error_code, inconsistent);
}

/// Memory for members is bounded for new ones. Existing members can continue and leave, however
/// full it is.
#[tokio::test]
async fn members_can_continue_and_leave_when_memory_is_full() {
    let mut world = World::new();
    world.config.max_membership_bytes = 1 << 20;
    let (_store, groups) = world.start().await;
    let topics = TopicsView::default();
    let (session_timeout, interval) = (Duration::from_secs(45), Duration::from_secs(5));
    let times = ConsumerTimes { session_timeout, heartbeat_interval: interval };
    let names = || Some(vec![TopicName(s("topic"))]);
    let consumer = async |epoch: i32, joins: bool| {
        let request = ConsumerGroupHeartbeatRequest::default()
            .with_group_id(group_id("consumers"))
            .with_member_id(s("m"))
            .with_member_epoch(epoch)
            .with_rebalance_timeout_ms(if joins { 60_000 } else { -1 })
            .with_subscribed_topic_names(if joins { names() } else { None })
            .with_topic_partitions(joins.then(Vec::new));
        let beat = groups.consumer_heartbeat(client(), request, 1, &topics, times);
        let beat = world.run(beat).await;
        (beat.error_code, beat.member_epoch)
    };
    let share = async |epoch: i32, joins: bool| {
        let request = ShareGroupHeartbeatRequest::default()
            .with_group_id(group_id("sharing"))
            .with_member_id(s("m"))
            .with_member_epoch(epoch)
            .with_subscribed_topic_names(if joins { names() } else { None });
        let beat = groups.share_heartbeat(client(), request, session_timeout, interval, &topics);
        let beat = beat.await;
        (beat.error_code, beat.member_epoch)
    };
    let (code, consumer_epoch) = consumer(0, true).await;
    assert_eq!(code, 0);
    let (code, share_epoch) = share(0, true).await;
    assert_eq!(code, 0);
    // Static members with little metadata and many long names, until no more are accepted.
    let protocol = |n: usize, len: usize| {
        JoinGroupRequestProtocol::default()
            .with_name(s(&format!("{n:01000}")))
            .with_metadata(Bytes::from(vec![0; len]))
    };
    let classic = |n: usize, metadata: usize| {
        join_request(&format!("g{n}"), &StrBytes::new())
            .with_group_instance_id(Some(s("i")))
            .with_protocols((0..60).map(|n| protocol(n, metadata)).collect())
    };
    let ask = async |request: &JoinGroupRequest| {
        world.run(groups.join(&client(), request, 9, &topics)).await.error_code
    };
    let mut taken = 0;
    while ask(&classic(taken, 0)).await == 0 {
        taken += 1;
    }
    assert!((10..18).contains(&taken), "{taken}");
    assert!(groups.shared.registry.size_bytes() <= 1 << 20);
    // Until the last few KiB are used too; then an existing member grows beyond the bound for new
    // ones.
    let full = ResponseError::CoordinatorNotAvailable.code();
    assert_eq!(ask(&classic(0, 1500)).await, 0);
    assert!(groups.shared.registry.size_bytes() > 1 << 20);
    assert_eq!(ask(&join_request("new", &StrBytes::new())).await, full);
    assert_eq!(consumer(consumer_epoch, false).await, (0, consumer_epoch));
    assert_eq!(share(share_epoch, false).await, (0, share_epoch));
    // As clients do when a response was lost.
    assert_eq!(consumer(consumer_epoch, true).await.0, 0);
    assert_eq!(share(share_epoch, true).await.0, 0);
    assert_eq!(ask(&classic(1, 0)).await, 0);
    // But not without limit.
    let grown = async |n: usize| ask(&classic(n, 1500)).await;
    let mut codes = Vec::new();
    for n in 1..taken {
        codes.push(grown(n).await);
    }
    assert!(codes.contains(&full), "{codes:?}");
    assert!(groups.shared.registry.size_bytes() <= (1 << 20) + (1 << 18));
    assert_eq!(consumer(-1, false).await, (0, -1));
    assert_eq!(share(-1, false).await, (0, -1));
}

/// The number of groups is bounded, but their names can be long.
#[tokio::test]
async fn names_of_groups_count_in_the_memory_limit() {
    let mut world = World::new();
    world.config.max_membership_bytes = 1 << 20;
    let (_store, groups) = world.start().await;
    let name = |i: usize| format!("{i:05000}");
    let mut created = 0;
    loop {
        let request = join_request(&name(created), &StrBytes::new());
        match groups.join(&client(), &request, 4, &TopicsView::default()).await.error_code {
            code if code == ResponseError::MemberIdRequired.code() => created += 1,
            code => break assert_eq!(code, ResponseError::CoordinatorNotAvailable.code()),
        }
    }
    assert!((150..210).contains(&created), "{created}");
    let commit_to_new = commit_request(&name(created), &[("topic", 0, 7)]);
    assert_eq!(
        world.run(commit(&groups, commit_to_new)).await,
        [ResponseError::CoordinatorNotAvailable.code()]
    );
    assert_eq!(world.run(groups.delete_group(&name(0))).await, Ok(()));
    let request = join_request(&name(created), &StrBytes::new());
    let joined = groups.join(&client(), &request, 4, &TopicsView::default()).await;
    assert_eq!(joined.error_code, ResponseError::MemberIdRequired.code());
}

#[tokio::test]
async fn the_limit_of_offsets_refuses_new_ones_and_accepts_overwrites() {
    let mut world = World::new();
    world.config.max_offsets_bytes = 1 << 20;
    world.config.max_offset_metadata_bytes = 12_000;
    let (_store, groups) = world.start().await;
    let request = |group: &str, offset| {
        let mut request = commit_request(group, &[("topic", 0, offset)]);
        request.topics[0].partitions[0].committed_metadata = Some(s(&"n".repeat(12_000)));
        request
    };
    let mut accepted = 0;
    loop {
        let codes = world.run(commit(&groups, request(&format!("g{accepted}"), 1))).await;
        if codes != [0] {
            assert_eq!(codes, [ResponseError::CoordinatorNotAvailable.code()]);
            break;
        }
        accepted += 1;
        assert!(accepted < 1000, "there is no bound");
    }
    assert!(accepted > 50, "only {accepted} offsets fit");
    assert_eq!(world.run(commit(&groups, request("g0", 2))).await, [0]);
    assert_eq!(fetch(&groups, "g0").await, [found("topic", 0, 2)]);

    // Offsets that a transaction has decided are always accepted, and then the table is above its
    // bound.
    let metadata = "n".repeat(12_000);
    let position = Position { partition: 0, offset: 3, leader_epoch: -1, metadata };
    let offsets = BTreeMap::from([(0, position.clone())]);
    let decided = BTreeMap::from([("topic".to_owned(), offsets)]);
    let committed = groups.commit_of_transaction("decided", decided, |_, _| true);
    assert_eq!(world.run(committed).await, Ok(()));
    assert_eq!(world.run(commit(&groups, request("g0", 3))).await, [0]);
    let topics = [("topic".to_owned(), vec![position])];
    let may_commit = |group| {
        let request = TxnOffsetCommitRequest::default().with_group_id(group_id(group));
        groups.commit_in_transaction(&request, &topics, &TopicsView::default(), || ())
    };
    assert_eq!(may_commit("g0"), Ok(()));
    assert_eq!(may_commit("new"), Err(ResponseError::CoordinatorNotAvailable));
}
