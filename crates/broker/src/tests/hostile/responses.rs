//! Requests that cause large responses.

use super::*;

/// Small parts of a request must not become large by being repeated for each partition, or for each
/// unknown name.
#[tokio::test(flavor = "multi_thread")]
async fn responses_stay_in_proportion_to_their_requests() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let long_name = "\u{e4}".repeat(16_000);
    let wanted = elect_leaders_request::TopicPartitions::default()
        .with_topic(TopicName(text(&long_name)))
        .with_partitions((0..1_000).collect());
    let request = ElectLeadersRequest::default().with_topic_partitions(Some(vec![wanted]));
    client.send(2, &request).await;
    let response = client.receive_frame().await.unwrap();
    assert!(response.len() < 1 << 20, "{} bytes", response.len());

    let wanted = |index| {
        alter_partition_reassignments_request::ReassignablePartition::default()
            .with_partition_index(index)
    };
    let wanted = alter_partition_reassignments_request::ReassignableTopic::default()
        .with_name(TopicName(text(&long_name)))
        .with_partitions((0..1_000).map(wanted).collect());
    let request = AlterPartitionReassignmentsRequest::default().with_topics(vec![wanted]);
    client.send(0, &request).await;
    let response = client.receive_frame().await.unwrap();
    assert!(response.len() < 1 << 20, "{} bytes", response.len());

    let response = client.call(9, &produce(&long_name, 0, &plain(&[1]), -1)).await;
    assert!(response.responses[0].name.len() <= 251, "{} bytes", response.responses[0].name.len());
    assert_eq!(
        response.responses[0].partition_responses[0].error_code,
        ResponseError::UnknownTopicOrPartition.code()
    );
    let response = client.call(12, &fetch(&long_name, &[(0, 0)], 0)).await;
    assert!(response.responses[0].topic.len() <= 251);
    assert_eq!(
        response.responses[0].partitions[0].error_code,
        ResponseError::UnknownTopicOrPartition.code()
    );

    let wanted = |n: i32| {
        describe_configs_request::DescribeConfigsResource::default()
            .with_resource_type(32)
            .with_resource_name(text(&n.to_string()))
            .with_configuration_keys(None)
    };
    let request = DescribeConfigsRequest::default()
        .with_include_documentation(true)
        .with_resources((0..20_000).map(wanted).collect());
    let response = client.call(4, &request).await;
    assert_eq!(response.results.len(), 20_000);
    let described = response.results.iter().filter(|result| !result.configs.is_empty());
    assert_eq!(described.count(), 10_000);

    // Nothing has to exist for this, and each name would be answered with all settings of a topic.
    let wanted = |n: i32| {
        create_topics_request::CreatableTopic::default()
            .with_name(TopicName(text(&n.to_string())))
            .with_num_partitions(1)
            .with_replication_factor(1)
    };
    let request = CreateTopicsRequest::default()
        .with_validate_only(true)
        .with_topics((0..20_000).map(wanted).collect());
    let response = client.call(7, &request).await;
    assert_eq!(response.topics.len(), 20_000);
    assert!(response.topics.iter().all(|topic| topic.error_code == 0));
    let described = |topic: &&create_topics_response::CreatableTopicResult| {
        topic.configs.as_ref().is_some_and(|configs| !configs.is_empty())
    };
    assert_eq!(response.topics.iter().filter(described).count(), 1_000);
    assert!(
        response.topics[1_000..]
            .iter()
            .all(|topic| topic.topic_config_error_code == ResponseError::PolicyViolation.code())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn large_responses_share_their_budget() {
    let server = TestServer::with(16 << 20, |config| {
        config.max_request_bytes = 1 << 20;
        config.queued_request_bytes = 1 << 20;
        config.max_message_bytes = 1 << 20;
        config.max_partitions = 20_000;
    })
    .await;
    server.topic("wide", 12_000, &[]).await;
    let budget = server.server().large_responses.budget();
    let all = budget.acquire(1 << 20).await;
    let mut waiting = server.client().await;
    let all_topics = MetadataRequest::default().with_topics(None);
    let id = waiting.send(12, &all_topics).await;
    let mut byte = [0];
    let answered = waiting.socket.peek(&mut byte);
    let answered = tokio::time::timeout(Duration::from_millis(300), answered).await;
    assert!(answered.is_err(), "it is not counted");
    let mut others = Vec::new();
    for _ in 0..10 {
        let mut client = server.client().await;
        client.send(12, &all_topics).await;
        others.push(client);
    }
    server.begun("Metadata", 12, 11).await;
    // Unknown names are repeated in the response, which makes it large.
    let unknown = |n: usize| {
        list_offsets_request::ListOffsetsTopic::default()
            .with_name(TopicName(text(&n.to_string().repeat(10_000))))
            .with_partitions(vec![list_offsets_request::ListOffsetsPartition::default()])
    };
    let request = ListOffsetsRequest::default().with_topics((10..30).map(unknown).collect());
    let mut listing = server.client().await;
    let listed = listing.send(7, &request).await;
    let answered = listing.socket.peek(&mut byte);
    let answered = tokio::time::timeout(Duration::from_millis(300), answered).await;
    assert!(answered.is_err(), "a large response is not counted");
    // Small responses do not wait, even of the same API: neither for the bytes nor for a permit.
    let none = MetadataRequest::default().with_topics(Some(Vec::new()));
    server.client().await.call(12, &none).await;
    server.assert_alive().await;
    drop(all);
    let response = waiting.receive::<MetadataRequest>(12, id).await;
    assert_eq!(response.topics[0].partitions.len(), 12_000);
    for mut client in others {
        assert!(client.receive_frame().await.is_some());
    }
    let response = listing.receive::<ListOffsetsRequest>(7, listed).await;
    assert_eq!(response.topics.len(), 20);
    server.assert_alive().await;
    assert_eq!(budget.free_bytes(), 1 << 20);
}

/// Otherwise a client that gets partitions by a rebalance could not begin while others leave large
/// responses to the same request unread.
#[tokio::test(flavor = "multi_thread")]
async fn small_responses_do_not_wait_for_a_permit_behind_large_ones() {
    let server = TestServer::start().await;
    server.topic("t", 100, &[]).await;
    let mut client = server.client().await;
    let committed = |partition| {
        offset_commit_request::OffsetCommitRequestPartition::default()
            .with_partition_index(partition)
            .with_committed_offset(7)
            .with_committed_metadata(Some(text(&"m".repeat(4_096))))
    };
    let topic = offset_commit_request::OffsetCommitRequestTopic::default()
        .with_name(TopicName(text("t")))
        .with_partitions((0..100).map(committed).collect());
    let request =
        OffsetCommitRequest::default().with_group_id(text("g").into()).with_topics(vec![topic]);
    let response = client.call(8, &request).await;
    assert!(response.topics[0].partitions.iter().all(|partition| partition.error_code == 0));

    let of_group = |topics| {
        let group = offset_fetch_request::OffsetFetchRequestGroup::default()
            .with_group_id(text("g").into())
            .with_topics(topics);
        OffsetFetchRequest::default().with_groups(vec![group])
    };
    let all = server.server().large_responses.budget().acquire(usize::MAX).await;
    let mut large = Vec::new();
    for _ in 0..10 {
        let mut client = server.client().await;
        let id = client.send(8, &of_group(None)).await;
        large.push((client, id));
    }
    server.begun("OffsetFetch", 8, 10).await;
    // Time to take their permits.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let of_one = offset_fetch_request::OffsetFetchRequestTopics::default()
        .with_name(TopicName(text("t")))
        .with_partition_indexes(vec![5]);
    let response = client.call(8, &of_group(Some(vec![of_one]))).await;
    assert_eq!(response.groups[0].topics[0].partitions[0].committed_offset, 7);
    // The responses that have waited for a permit are then assembled.
    drop(all);
    for (mut client, id) in large {
        let response = client.receive::<OffsetFetchRequest>(8, id).await;
        let partitions = &response.groups[0].topics[0].partitions;
        assert_eq!(partitions.len(), 100);
        assert!(partitions.iter().all(|partition| partition.committed_offset == 7));
    }
}

/// The server has an assignment once, and any number of small requests would have it copied for
/// each of them.
#[tokio::test(flavor = "multi_thread")]
async fn responses_to_group_members_share_the_budget_of_large_ones() {
    const MIB: usize = 1 << 20;
    let server = TestServer::with(16 << 20, |config| {
        config.max_request_bytes = 12 << 20;
        config.queued_request_bytes = 12 << 20;
    })
    .await;
    let budget = server.server().large_responses.budget();
    let member = |bytes: usize| {
        let protocol = join_group_request::JoinGroupRequestProtocol::default()
            .with_name(text("range"))
            .with_metadata(vec![7; bytes].into());
        JoinGroupRequest::default()
            .with_group_id(text("g").into())
            .with_session_timeout_ms(60_000)
            .with_rebalance_timeout_ms(60_000)
            .with_protocol_type(text("consumer"))
            .with_protocols(vec![protocol])
    };
    // The leader receives all members, and again while it has not assigned; its response is counted
    // as well.
    let join = member(10 * MIB);
    let joined = server.client().await.call(3, &join).await;
    assert_eq!((joined.error_code, joined.members[0].metadata.len()), (0, 10 * MIB));
    let again = join.with_member_id(joined.member_id.clone());
    let all = budget.acquire(12 * MIB).await;
    assert_eq!(
        server.client().await.call(3, &again).await.error_code,
        ResponseError::CoordinatorNotAvailable.code()
    );
    drop(all);
    assert_eq!(server.client().await.call(3, &again).await.error_code, 0);

    let sync = SyncGroupRequest::default()
        .with_group_id(text("g").into())
        .with_generation_id(joined.generation_id)
        .with_member_id(joined.member_id.clone());
    let assignment = sync_group_request::SyncGroupRequestAssignment::default()
        .with_member_id(joined.member_id.clone())
        .with_assignment(vec![8; 10 * MIB].into());
    let assign = sync.clone().with_assignments(vec![assignment]);
    assert_eq!(server.client().await.call(2, &assign).await.assignment.len(), 10 * MIB);
    let mut unread = Vec::new();
    for _ in 0..20 {
        let mut client = server.client().await;
        let ids = [client.send(2, &sync).await, client.send(2, &sync).await];
        unread.push((client, ids));
    }
    // Together they have the bytes of one response: the others have to retry, and one that reads
    // has it then.
    let taken = async {
        while budget.free_bytes() > 2 * MIB {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, taken).await.expect("the responses are not counted");
    assert_eq!(
        server.client().await.call(2, &sync).await.error_code,
        ResponseError::CoordinatorNotAvailable.code()
    );
    for (mut client, [first, _]) in unread {
        let response = client.receive::<SyncGroupRequest>(2, first).await;
        assert!(
            [0, ResponseError::CoordinatorNotAvailable.code()].contains(&response.error_code),
            "{}",
            response.error_code
        );
        assert_eq!(response.assignment.len(), if response.error_code == 0 { 10 * MIB } else { 0 });
    }
    server.assert_alive().await;
}
