//! Changes of topics that are lost to damage of the write-ahead log.

use std::time::Duration;

use alluvium_stream::StreamOffset;
use uuid::Uuid;

use super::configs::{TOPIC, set_well};
use super::harness::{TestServer, stored};
use super::lost_offsets::prove;
use crate::batch::tests::plain;
use crate::label::Label;

/// A server whose changes are not published before it is stopped or uploads.
async fn start() -> TestServer {
    let mut server = TestServer::start().await;
    server.options.catalog_interval = Duration::from_secs(3_600);
    server.restart().await;
    server
}

/// Damages the record that creates this topic.
fn damage_creation(wal: &mut [u8], topic: &str, id: Uuid) {
    let label = Label::Partition { topic: topic.into(), id, partition: 0 }.encode();
    let found = wal.windows(label.len()).position(|bytes| bytes == label);
    wal[found.expect("the label is in the log")] ^= 1;
}

/// It has records, so it is kept, without a name. Nothing refers to it, and nothing else suffers.
#[tokio::test(flavor = "multi_thread")]
async fn the_stream_of_a_topic_whose_creation_is_lost_is_kept() {
    let mut server = start().await;
    let lost = server.topic("t", 1, &[]).await;
    let batch = plain(&[1, 2, 3]);
    assert_eq!(server.client().await.produce("t", 0, &batch).await, (0, 0));
    let stream = server.server().topics.by_name("t").unwrap().partitions[0].stream.id();
    prove(&server).await;
    assert_eq!(server.server().topics.unknown_streams(), []);
    server.crash_and_damage(|wal| damage_creation(wal, "t", lost)).await;

    // As recovered; recovered again from the damaged log; and from what was uploaded.
    for step in 0..3 {
        assert_eq!(server.server().topics.unknown_streams(), [stream], "step {step}");
        let kept = server.store().stream(stream).unwrap().fetch(StreamOffset(0), 1 << 20).await;
        let kept = kept.unwrap().batches;
        assert_eq!(kept.len(), 1, "step {step}");
        assert_eq!(kept[0].payload, stored(&batch, 0), "step {step}");
        assert!(server.server().topics.by_name("t").is_err() || step > 0);
        match step {
            0 => {
                // Another topic of the name has another stream.
                assert_ne!(server.topic("t", 1, &[]).await, lost);
                assert_eq!(server.client().await.produce("t", 0, &plain(&[4])).await, (0, 0));
                server.crash().await;
            }
            1 => {
                server.store().flush().await.unwrap();
                server.restart().await;
            }
            _ => {}
        }
    }
    let (code, end, _) = server.client().await.fetch("t", 0, 0).await;
    assert_eq!((code, end), (0, 1));
}

/// A later change of the topic is intact, and names a stream of which nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_creation_is_lost_is_created_again() {
    let mut server = start().await;
    let id = server.topic("t", 1, &[]).await;
    let lost = server.server().topics.by_name("t").unwrap().partitions[0].stream.id();
    set_well(&mut server.client().await, (TOPIC, "t"), "retention.ms", "1234567").await;
    let producer_id = server.server().producer_ids.allocate().await.unwrap();
    prove(&server).await;
    server.crash_and_damage(|wal| damage_creation(wal, "t", id)).await;
    for step in 0..2 {
        // Lists that reserve producer IDs may be lost, too. The next start finds the loss again.
        let skipped = (1_000_000_000 + 1_000) * (1 + step);
        let next = server.server().producer_ids.allocate().await.unwrap();
        assert_eq!(next, producer_id + skipped, "step {step}");
        let topic = server.server().topics.by_name("t").unwrap();
        assert_eq!((topic.id, topic.partitions.len()), (id, 1), "step {step}");
        assert_ne!(topic.partitions[0].stream.id(), lost, "step {step}");
        drop(topic);
        assert_eq!(server.client().await.produce("t", 0, &plain(&[1])).await, (0, step));
        server.restart().await;
    }
}
