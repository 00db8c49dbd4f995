//! Clients that send invalid data. Each loses at most its connection; the others are still served.

mod responses;

use std::time::Duration;

use alluvium_device::sim::Random;
use bytes::{BufMut, BytesMut};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{
    AlterPartitionReassignmentsRequest, ApiKey, ApiVersionsRequest, ApiVersionsResponse,
    CreateTopicsRequest, DescribeConfigsRequest, DescribeGroupsRequest, ElectLeadersRequest,
    FetchRequest, JoinGroupRequest, ListOffsetsRequest, MetadataRequest, OffsetCommitRequest,
    OffsetFetchRequest, ProduceRequest, SyncGroupRequest, TopicName,
    alter_partition_reassignments_request, create_topics_request, create_topics_response,
    describe_configs_request, elect_leaders_request, fetch_request, join_group_request,
    list_offsets_request, metadata_request, offset_commit_request, offset_fetch_request,
    produce_request::PartitionProduceData, sync_group_request,
};
use kafka_protocol::protocol::{Decodable, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::examples::{self, World};
use super::harness::{HANG, TestServer, fetch, produce, text};
use crate::batch::tests::plain;

#[tokio::test(flavor = "multi_thread")]
async fn impossible_lengths_close_the_connection() {
    let server = TestServer::start().await;
    for len in [i32::MAX, i32::MIN, -1, (100 << 20) + 1, 0, 3] {
        let mut client = server.client().await;
        client.socket.write_all(&len.to_be_bytes()).await.unwrap();
        let _ = client.socket.write_all(&[0; 3]).await;
        assert!(client.receive_frame().await.is_none(), "{len}");
    }
    server.assert_alive().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_apis_and_versions_close_the_connection_except_for_api_versions() {
    let server = TestServer::start().await;
    for (key, version) in
        [(999, 0), (-1, 0), (17, 0), (0, 2), (0, 14), (3, -1), (3, 14), (i16::MAX, i16::MAX)]
    {
        let mut client = server.client().await;
        client.send_frame(&examples::header(key, version, 5, 1)).await;
        assert!(client.receive_frame().await.is_none(), "{key} {version}");
    }
    let mut client = server.client().await;
    for version in [5, 99, -1] {
        client.send_frame(&examples::header(18, version, 5, 2)).await;
        let mut response = client.receive_frame().await.unwrap().slice(4..);
        let response = ApiVersionsResponse::decode(&mut response, 0).unwrap();
        assert_eq!(response.error_code, ResponseError::UnsupportedVersion.code());
        assert_eq!(response.api_keys.len(), crate::api::APIS.len());
    }
    // The connection continues with a version that both sides support.
    assert_eq!(client.call(0, &ApiVersionsRequest::default()).await.error_code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_truncation_of_a_request_closes_the_connection() {
    let server = TestServer::start().await;
    let world = World::imaginary();
    for (key, version) in [
        (ApiKey::Produce, 9),
        (ApiKey::Produce, 3),
        (ApiKey::Fetch, 17),
        (ApiKey::Fetch, 4),
        (ApiKey::JoinGroup, 9),
        (ApiKey::CreateTopics, 7),
    ] {
        let request = examples::request(key, version, 1, &world);
        for len in 0..request.len() {
            let mut client = server.client().await;
            client.send_frame(&request[..len]).await;
            assert!(
                client.receive_frame().await.is_none(),
                "{key:?} v{version}, {len} of {} bytes",
                request.len()
            );
        }
    }
    server.assert_alive().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_bytes_and_damaged_requests_do_no_harm() {
    let server = TestServer::start().await;
    server.topic("topic", 1, &[]).await;
    let mut random = Random::new(20_260);
    let world = World::imaginary();
    for round in 0..400 {
        let api = &crate::api::APIS[random.index(crate::api::APIS.len())];
        let version = api.min + random.index((api.max - api.min + 1) as usize) as i16;
        let mut bytes = examples::request(api.key, version, 1, &world).to_vec();
        match round % 4 {
            0 => bytes.iter_mut().for_each(|byte| *byte = random.next_u64() as u8),
            // A valid header followed by noise.
            1 => bytes[8..].iter_mut().for_each(|byte| *byte = random.next_u64() as u8),
            _ => {
                for _ in 0..=random.index(3) {
                    let at = random.index(bytes.len());
                    bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.index(5)];
                }
            }
        }
        let mut client = server.client().await;
        client.send_frame(&bytes).await;
        client.socket.shutdown().await.unwrap();
        // Either a response or a closed connection; a group that waits for members answers long
        // after the client has disconnected.
        let _ = tokio::time::timeout(Duration::from_millis(200), client.socket.read(&mut [0; 64]))
            .await;
    }
    server.assert_alive().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claimed_array_lengths_allocate_nothing() {
    let server = TestServer::start().await;
    for version in [1, 9] {
        let mut request = examples::header(3, version, 1, if version >= 9 { 2 } else { 1 });
        if version >= 9 {
            request.put_slice(&[0xff, 0xff, 0xff, 0xff, 0x0f]);
        } else {
            request.put_i32(i32::MAX);
        }
        let mut client = server.client().await;
        client.send_frame(&request).await;
        assert!(client.receive_frame().await.is_none());
    }
    server.assert_alive().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn incomplete_and_slow_requests_and_idle_clients_are_disconnected() {
    let server = TestServer::with(16 << 20, |config| {
        config.transfer_timeout = Duration::from_millis(200);
        config.idle_timeout = Duration::from_secs(1);
    })
    .await;
    // Disconnected in the middle.
    for _ in 0..20 {
        let mut client = server.client().await;
        client.socket.write_all(&1_000i32.to_be_bytes()).await.unwrap();
        client.socket.write_all(&[0; 100]).await.unwrap();
    }
    // Silent in the middle: small, and large enough to need the budget.
    for len in [1_000, 50 << 20] {
        let mut client = server.client().await;
        client.socket.write_all(&i32::to_be_bytes(len)).await.unwrap();
        client.socket.write_all(&[0; 100]).await.unwrap();
        assert!(client.receive_frame().await.is_none());
    }
    // Silent before the length is complete, and from the start.
    let mut client = server.client().await;
    client.socket.write_all(&[0]).await.unwrap();
    assert!(client.receive_frame().await.is_none());
    assert!(server.client().await.receive_frame().await.is_none());
    server.assert_alive().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_no_responses_is_disconnected() {
    let server =
        TestServer::with(16 << 20, |config| config.transfer_timeout = Duration::from_millis(300))
            .await;
    server.topic("t", 1_000, &[]).await;
    let mut client = server.client().await;
    // Each asks for a response of tens of kilobytes. The server must stop reading, then close the
    // connection.
    let mut request = examples::header(3, 1, 1, 1);
    request.put_i32(-1);
    let mut frame = BytesMut::new();
    frame.put_i32(request.len() as i32);
    frame.put_slice(&request);
    let flood = async { while client.socket.write_all(&frame).await.is_ok() {} };
    tokio::time::timeout(HANG, flood).await.expect("the server reads requests without limit");
    server.assert_alive().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_bounded() {
    let server = TestServer::with(16 << 20, |config| config.max_connections = 3).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = server.client().await;
        client.call(0, &ApiVersionsRequest::default()).await;
        clients.push(client);
    }
    let mut refused = server.client().await;
    assert!(refused.receive_frame().await.is_none());
    clients.pop();
    // The slot is free when the server has noticed the disconnect.
    let admitted = async {
        loop {
            let mut client = server.client().await;
            client.send(0, &ApiVersionsRequest::default()).await;
            if client.receive_frame().await.is_some() {
                break;
            }
        }
    };
    tokio::time::timeout(HANG, admitted).await.unwrap();
}

/// Otherwise members that wait for others that never join would hold their connections long after
/// they have disconnected.
#[tokio::test(flavor = "multi_thread")]
async fn the_connection_of_a_disconnected_member_is_released() {
    let server = TestServer::with(16 << 20, |config| config.max_connections = 2).await;
    let protocol = join_group_request::JoinGroupRequestProtocol::default().with_name(text("range"));
    let join = JoinGroupRequest::default()
        .with_group_id(text("g").into())
        .with_session_timeout_ms(600_000)
        .with_rebalance_timeout_ms(i32::MAX)
        .with_protocol_type(text("consumer"))
        .with_protocols(vec![protocol]);
    let mut stays = server.client().await;
    assert_eq!(stays.call(2, &join).await.error_code, 0);
    let mut waits = server.client().await;
    waits.send(2, &join).await;
    server.begun("JoinGroup", 2, 2).await;
    drop(waits);
    let admitted = async {
        loop {
            let mut client = server.client().await;
            client.send(0, &ApiVersionsRequest::default()).await;
            if client.receive_frame().await.is_some() {
                break;
            }
        }
    };
    tokio::time::timeout(HANG, admitted).await.expect("its connection is still open");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_an_address_are_bounded() {
    let server = TestServer::with(16 << 20, |config| {
        config.max_connections_of_address = 100;
        config.max_connections_overrides = [("127.0.0.1".parse().unwrap(), 2)].into();
    })
    .await;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = server.client().await;
        client.call(0, &ApiVersionsRequest::default()).await;
        clients.push(client);
    }
    let mut refused = server.client().await;
    assert!(refused.receive_frame().await.is_none());
    // Existing connections stay.
    for client in &mut clients {
        client.call(0, &ApiVersionsRequest::default()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn large_requests_share_their_memory() {
    let server = TestServer::with(16 << 20, |config| {
        config.max_request_bytes = 1 << 20;
        config.queued_request_bytes = 1 << 20;
        config.max_message_bytes = 1 << 20;
        // No request times out in this test.
        config.transfer_timeout = Duration::from_secs(600);
    })
    .await;
    server.topic("t", 1, &[]).await;
    let batch = plain(&[1; 10_000]);
    assert!(batch.len() > 128 << 10 && batch.len() < 900 << 10, "{}", batch.len());
    // The received part of the first leaves no space for the second, which has the overdraft:
    // others wait, and are served when one of them ends.
    let memory = &server.server().request_memory;
    let mut half = Vec::new();
    for sent_bytes in [900 << 10, 200 << 10] {
        let mut client = server.client().await;
        client.socket.write_all(&(1i32 << 20).to_be_bytes()).await.unwrap();
        client.socket.write_all(&vec![0; sent_bytes]).await.unwrap();
        half.push(client);
        let is_second = half.len() == 2;
        let taken = async {
            while memory.free_bytes() > 64 << 10 || memory.has_overdraft() == is_second {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(HANG, taken).await.expect("received bytes are not counted");
    }
    let mut waiting = server.client().await;
    let id = waiting.send(9, &produce("t", 0, &batch, -1)).await;
    // Small requests do not wait.
    server.client().await.call(1, &MetadataRequest::default().with_topics(None)).await;
    let mut byte = [0];
    let answered = waiting.socket.peek(&mut byte);
    let answered = tokio::time::timeout(Duration::from_millis(300), answered).await;
    assert!(answered.is_err(), "it does not wait for memory");
    drop(half);
    let response = waiting.receive::<ProduceRequest>(9, id).await;
    assert_eq!(response.responses[0].partition_responses[0].error_code, 0);
}

/// The length that a request announces must not block others.
#[tokio::test(flavor = "multi_thread")]
async fn incomplete_requests_do_not_block_others() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut half = Vec::new();
    for _ in 0..5 {
        let mut client = server.client().await;
        client.socket.write_all(&(100i32 << 20).to_be_bytes()).await.unwrap();
        client.socket.write_all(&vec![0; 200 << 10]).await.unwrap();
        half.push(client);
    }
    // Each has received so much that it has asked for more memory.
    let asked = async {
        while server.server().request_memory.free_bytes() > (256 << 20) - 5 * (256 << 10) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, asked).await.expect("they have not arrived");
    let batch = plain(&[1; 10_000]);
    let mut honest = server.client().await;
    let produced = honest.produce("t", 0, &batch);
    let produced = tokio::time::timeout(Duration::from_secs(10), produced).await;
    assert_eq!(produced.expect("incomplete requests block others"), (0, 0));
}

/// Requests that have used up the memory and send no more do not time out one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn incomplete_requests_that_hold_all_memory_release_it() {
    let server = TestServer::with(16 << 20, |config| {
        config.max_request_bytes = 1 << 20;
        config.queued_request_bytes = 1 << 20;
        config.max_message_bytes = 1 << 20;
        config.transfer_timeout = Duration::from_secs(3);
    })
    .await;
    server.topic("t", 1, &[]).await;
    let memory = &server.server().request_memory;
    // Each has a step as soon as one is available, and asks for another.
    let mut half = Vec::new();
    for _ in 0..60 {
        let mut client = server.client().await;
        half.push(tokio::spawn(async move {
            let _ = client.socket.write_all(&(1i32 << 20).to_be_bytes()).await;
            let _ = client.socket.write_all(&vec![0; 320 << 10]).await;
            client
        }));
    }
    let used_up = async {
        while !memory.is_exhausted() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(HANG, used_up).await.expect("they have not arrived");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(memory.is_exhausted());
    let mut frame = examples::header(ProduceRequest::KEY, 9, 1, 2);
    frame.extend_from_slice(&examples::encode(&produce("t", 0, &plain(&[1; 10_000]), -1), 9));
    assert!(frame.len() > 128 << 10, "{}", frame.len());
    let served = async {
        loop {
            // Its time may end only slightly later than that of the others.
            let mut honest = server.client().await;
            if honest.try_send_frame(&frame).await.is_ok() && honest.receive_frame().await.is_some()
            {
                break;
            }
        }
    };
    let served = tokio::time::timeout(Duration::from_secs(15), served).await;
    served.expect("incomplete requests block others");
}

/// The time limit applies to the whole request, not to each part of it.
#[tokio::test(flavor = "multi_thread")]
async fn the_time_limit_of_a_request_covers_all_its_parts() {
    let server =
        TestServer::with(16 << 20, |config| config.transfer_timeout = Duration::from_millis(600))
            .await;
    let mut request = examples::header(18, 0, 1, 1);
    request.put_bytes(0, 200 << 10);
    let frame = [&(request.len() as i32).to_be_bytes()[..], &request[..]].concat();
    let mut client = server.client().await;
    // In the middle of its length, of what is read at once, and of what needs memory: each part
    // arrives within the time.
    for part in [0..1, 1..100, 100..100 << 10, 100 << 10..frame.len()] {
        let _ = client.socket.write_all(&frame[part]).await;
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    assert!(client.receive_frame().await.is_none(), "it was answered");
}

/// A small request that names the same thing repeatedly must not cause a response of any size.
#[tokio::test(flavor = "multi_thread")]
async fn repeated_names_in_a_request_are_answered_once() {
    let server = TestServer::start().await;
    server.topic("t", 2, &[]).await;
    let mut client = server.client().await;
    let name = || TopicName(text("t"));
    let group = || text("g").into();

    let wanted = metadata_request::MetadataRequestTopic::default().with_name(Some(name()));
    let request = MetadataRequest::default().with_topics(Some(vec![wanted; 100]));
    assert_eq!(client.call(9, &request).await.topics.len(), 1);

    let wanted = describe_configs_request::DescribeConfigsResource::default()
        .with_resource_type(2)
        .with_resource_name(text("t"))
        .with_configuration_keys(None);
    let request = DescribeConfigsRequest::default().with_resources(vec![wanted; 100]);
    assert_eq!(client.call(4, &request).await.results.len(), 1);

    let request = DescribeGroupsRequest::default().with_groups(vec![group(); 100]);
    assert_eq!(client.call(5, &request).await.groups.len(), 1);

    let committed = offset_commit_request::OffsetCommitRequestPartition::default()
        .with_committed_metadata(Some(text(&"m".repeat(4_096))));
    let topic = offset_commit_request::OffsetCommitRequestTopic::default()
        .with_name(name())
        .with_partitions(vec![committed]);
    let request = OffsetCommitRequest::default().with_group_id(group()).with_topics(vec![topic]);
    assert_eq!(client.call(8, &request).await.topics[0].partitions[0].error_code, 0);

    let topic = offset_fetch_request::OffsetFetchRequestTopics::default()
        .with_name(name())
        .with_partition_indexes(vec![0; 100]);
    let of_group = |topics| {
        offset_fetch_request::OffsetFetchRequestGroup::default()
            .with_group_id(group())
            .with_topics(topics)
    };
    for topics in [None, Some(vec![topic; 10])] {
        let request = OffsetFetchRequest::default().with_groups(vec![of_group(topics); 10]);
        let response = client.call(8, &request).await;
        assert_eq!(response.groups.len(), 1);
        let partitions = response.groups[0].topics.iter().flat_map(|topic| &topic.partitions);
        assert_eq!(partitions.count(), 1);
    }
    let topic = offset_fetch_request::OffsetFetchRequestTopic::default()
        .with_name(name())
        .with_partition_indexes(vec![0; 100]);
    let request =
        OffsetFetchRequest::default().with_group_id(group()).with_topics(Some(vec![topic; 10]));
    let response = client.call(7, &request).await;
    assert_eq!(response.topics.iter().flat_map(|topic| &topic.partitions).count(), 1);

    // Each of these may cost the decompression of a batch. Kafka refuses repetitions too.
    let wanted = list_offsets_request::ListOffsetsPartition::default().with_timestamp(0);
    let topic = list_offsets_request::ListOffsetsTopic::default()
        .with_name(name())
        .with_partitions(vec![wanted; 3]);
    let request = ListOffsetsRequest::default().with_topics(vec![topic; 2]);
    let response = client.call(7, &request).await;
    let errors: Vec<_> = response.topics.iter().flat_map(|topic| &topic.partitions).collect();
    let errors: Vec<_> = errors.iter().map(|partition| partition.error_code).collect();
    assert_eq!(errors, [ResponseError::InvalidRequest.code(); 6]);

    let mut request = fetch("t", &[(0, 0); 100], 0);
    request.session_epoch = -1;
    let response = client.call(12, &request).await;
    assert_eq!(response.responses[0].partitions.len(), 1);
}

/// A produce request for the first partition of "t", and for many that do not exist.
fn produce_with_many_elements(elements: usize) -> ProduceRequest {
    let mut request = produce("t", 0, &plain(&[1]), -1);
    let unknown = PartitionProduceData::default().with_index(9).with_records(None);
    request.topic_data[0].partition_data.resize(elements, unknown);
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn large_requests_hold_their_budget_until_they_are_answered() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    let all_bytes = server.server().decoded_budget.free_bytes();
    server.hold_disk(true);
    let mut client = server.client().await;
    let large = client.send(9, &produce_with_many_elements(5_000)).await;
    let next = client.send(0, &ApiVersionsRequest::default()).await;
    // The next request begins when the large one is queued. Its responses hold memory until the
    // disk is done.
    server.begun("ApiVersions", 0, 1).await;
    assert!(all_bytes - server.server().decoded_budget.free_bytes() > 5_000 * 100);
    server.hold_disk(false);
    let response = client.receive::<ProduceRequest>(9, large).await;
    assert_eq!(response.responses[0].partition_responses.len(), 5_000);
    client.receive::<ApiVersionsRequest>(0, next).await;
    server.assert_alive().await;
    assert_eq!(server.server().decoded_budget.free_bytes(), all_bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_that_wait_for_the_disk_are_bounded_by_bytes() {
    let server = TestServer::simulated(16 << 20).await;
    server.topic("t", 1, &[]).await;
    server.hold_disk(true);
    let mut client = server.client().await;
    // Each holds about 200 KB of responses, and the bound is 256 KiB: one is queued, one waits for
    // the queue, no third one begins.
    let mut ids = Vec::new();
    for _ in 0..10 {
        ids.push(client.send(9, &produce_with_many_elements(1_000)).await);
    }
    server.begun("Produce", 9, 2).await;
    for _ in 0..200 {
        server.client().await.call(0, &ApiVersionsRequest::default()).await;
    }
    server.begun("Produce", 9, 2).await;
    server.hold_disk(false);
    for id in ids {
        let response = client.receive::<ProduceRequest>(9, id).await;
        assert_eq!(response.responses[0].partition_responses[0].error_code, 0);
    }
}

/// Otherwise a few clients that wait as long as they like would block all other larger requests.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_hold_no_request_memory() {
    let server = TestServer::start().await;
    server.topic("t", 2_000, &[]).await;
    let (of_bytes, of_elements) =
        (&server.server().request_memory, &server.server().decoded_budget);
    let all = (of_bytes.free_bytes(), of_elements.free_bytes());
    let given_back = async || {
        // Time to begin to wait.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let given_back = async {
            while (of_bytes.free_bytes(), of_elements.free_bytes()) != all {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(HANG, given_back).await.expect("a waiting request holds memory");
    };

    // Partitions to forget, and bytes after the end of the request.
    let forgotten = fetch_request::ForgottenTopic::default()
        .with_topic(TopicName(text("t")))
        .with_partitions((0..5_000).collect());
    let waiting = fetch("t", &[(0, 0)], 600_000).with_forgotten_topics_data(vec![forgotten]);
    let mut frame = examples::header(FetchRequest::KEY, 12, 1, 2);
    frame.extend_from_slice(&examples::encode(&waiting, 12));
    frame.put_bytes(0, 200 << 10);
    let mut fetching = server.client().await;
    fetching.send_frame(&frame).await;
    server.begun("Fetch", 12, 1).await;
    given_back().await;

    // A member that waits for another, which has not learned of it yet.
    let join = |bytes: usize| {
        let protocol = join_group_request::JoinGroupRequestProtocol::default()
            .with_name(text("range"))
            .with_metadata(vec![7; bytes].into());
        JoinGroupRequest::default()
            .with_group_id(text("g").into())
            .with_session_timeout_ms(600_000)
            .with_rebalance_timeout_ms(600_000)
            .with_protocol_type(text("consumer"))
            .with_protocols(vec![protocol])
    };
    assert_eq!(server.client().await.call(2, &join(10)).await.error_code, 0);
    let mut joining = server.client().await;
    joining.send(2, &join(200 << 10)).await;
    server.begun("JoinGroup", 2, 2).await;
    given_back().await;

    // A request that holds memory while it waits does not wait for long.
    let partitions: Vec<_> = (0..2_000).map(|partition| (partition, 0)).collect();
    let response = server.client().await.call(12, &fetch("t", &partitions, 600_000)).await;
    assert_eq!(response.responses[0].partitions.len(), 2_000);
}
