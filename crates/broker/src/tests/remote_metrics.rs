//! The metrics of tiered storage by topic.

use prometheus_client::encoding::text::encode;

use super::harness::{TestServer, fetch};
use crate::batch::tests::plain;

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

    // Nothing is in memory after a restart.
    server.restart().await;
    let mut client = server.client().await;
    let response = client.call(12, &fetch("t", &[(0, 0)], 1_000)).await;
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
