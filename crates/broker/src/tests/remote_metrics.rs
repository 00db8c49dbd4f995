//! The metrics of tiered storage by topic.

use kafka_protocol::messages::delete_records_request::{
    DeleteRecordsPartition, DeleteRecordsTopic,
};
use kafka_protocol::messages::{DeleteRecordsRequest, TopicName};
use prometheus_client::encoding::text::encode;

use super::harness::{TestServer, fetch, text};
use super::losses::in_an_object;
use crate::batch::tests::plain;

fn delete_records(topic: &str, partition: i32, before: i64) -> DeleteRecordsRequest {
    let partition =
        DeleteRecordsPartition::default().with_partition_index(partition).with_offset(before);
    let topic = DeleteRecordsTopic::default()
        .with_name(TopicName(text(topic)))
        .with_partitions(vec![partition]);
    DeleteRecordsRequest::default().with_topics(vec![topic])
}

/// The values by metric and topic, without the common prefix.
fn values(server: &TestServer) -> Vec<String> {
    let mut text = String::new();
    encode(&mut text, &server.registry).unwrap();
    let lines =
        text.lines().filter_map(|line| line.strip_prefix("kafka_server_brokertopicmetrics_"));
    lines.map(|line| line.replace("{topic=\"t\"}", "")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_and_cold_reads_are_counted_for_tiered_topics_only() {
    let mut server = TestServer::start().await;
    server.topic("t", 2, &[("remote.storage.enable", "true")]).await;
    server.topic("local", 1, &[]).await;
    let batch = plain(&[1, 2, 3]);
    let size = batch.len();
    let mut client = server.client().await;
    for topic in ["t", "local"] {
        client.produce(topic, 0, &batch).await;
    }
    let waiting = values(&server);
    assert!(waiting.contains(&format!("remotecopylagbytes {size}")), "{waiting:?}");
    server.store().flush().await.unwrap();
    let copied = [
        format!("remotecopybytes_total {size}"),
        "remotecopyrequests_total 1".into(),
        "remotefetchbytes_total 0".into(),
        "remotefetchrequests_total 0".into(),
        "remotefetcherrors_total 0".into(),
        "remotedeleterequests_total 0".into(),
        "remotecopylagbytes 0".into(),
        format!("remotelogsizebytes {size}"),
        "remotelogmetadatacount 1".into(),
    ];
    assert_eq!(values(&server), copied, "no other topic has values");
    let response = client.call(2, &delete_records("t", 0, 3)).await;
    assert_eq!(response.topics[0].partitions[0].error_code, 0);
    let removed = values(&server);
    for value in ["remotedeleterequests_total 1", "remotelogsizebytes 0"] {
        assert!(removed.contains(&value.to_owned()), "{value}: {removed:?}");
    }
    client.produce("t", 0, &batch).await;
    server.store().flush().await.unwrap();

    // Nothing is in memory after a restart.
    server.restart().await;
    let mut client = server.client().await;
    let response = client.call(12, &fetch("t", &[(0, 3)], 1_000)).await;
    assert_eq!(response.responses[0].partitions[0].error_code, 0);
    let read = values(&server);
    for value in [
        "remotecopybytes_total 0".to_owned(),
        format!("remotefetchbytes_total {size}"),
        "remotefetchrequests_total 1".into(),
        format!("remotelogsizebytes {size}"),
    ] {
        assert!(read.contains(&value), "{value}: {read:?}");
    }
}

/// The bound is 3 in tests.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_topics_by_name_have_metrics_and_the_others_are_counted() {
    let server = TestServer::start().await;
    for name in ["d", "b", "e", "a", "c"] {
        server.topic(name, 1, &[("remote.storage.enable", "true")]).await;
    }
    let mut metrics = String::new();
    encode(&mut metrics, &server.registry).unwrap();
    for (topic, is_shown) in [("a", true), ("b", true), ("c", true), ("d", false), ("e", false)] {
        assert_eq!(metrics.contains(&format!("{{topic=\"{topic}\"}}")), is_shown, "{topic}");
    }
    assert!(metrics.contains("\nalluvium_kafka_topics_without_remote_metrics 2\n"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_of_missing_objects_are_counted_as_errors() {
    let mut server = TestServer::start().await;
    server.topic("t", 1, &[("remote.storage.enable", "true")]).await;
    server.client().await.produce("t", 0, &plain(&[1])).await;
    std::fs::remove_file(in_an_object(&mut server).await).unwrap();
    let response = server.client().await.call(12, &fetch("t", &[(0, 0)], 1_000)).await;
    assert_ne!(response.responses[0].partitions[0].error_code, 0);
    let errors = values(&server);
    assert!(errors.contains(&"remotefetcherrors_total 1".to_owned()), "{errors:?}");
}
