//! The loss of an object is accepted with a rebuild.

use kafka_protocol::error::ResponseError as E;

use super::harness::TestServer;
use super::transactions::Producer;
use crate::batch::tests::plain;

/// A transaction with records in a lost object must not be committed.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_with_lost_records_is_aborted() {
    for version_2 in [false, true] {
        // A start that ends before the transactions are looked at must not hide the loss.
        for openings in [0, 1, 2] {
            let mut server = TestServer::start().await;
            let id = server.topic("t", 1, &[]).await;
            let mut producer = Producer::init(&server, "id", version_2).await;
            if !version_2 {
                assert_eq!(producer.add("t", &[0]).await, 0);
            }
            for offset in [0, 2] {
                assert_eq!(producer.produce("t", id, 0).await, (0, offset));
                server.store().flush().await.unwrap();
            }
            server.accept_lost_object(1, openings).await;
            producer.reconnect(&server).await;
            let end = producer.end(true).await;
            assert_ne!(end, 0, "version 2: {version_2}, openings: {openings}");
            // A later one is not affected, also after another start.
            server.restart().await;
            let mut producer = Producer::init(&server, "id", version_2).await;
            if !version_2 {
                assert_eq!(producer.add("t", &[0]).await, 0);
            }
            let (error, offset) = producer.produce("t", id, 0).await;
            assert_eq!(error, 0);
            server.restart().await;
            producer.reconnect(&server).await;
            assert_eq!(producer.end(true).await, 0, "version 2: {version_2}");
            let mut client = server.client().await;
            let partition = &server.server().topics.by_name("t").unwrap().partitions[0];
            let aborted = partition.aborted_transactions();
            assert_eq!(aborted, 1, "version 2: {version_2}, openings: {openings}");
            let (error, next) = client.produce("t", 0, &plain(&[1])).await;
            assert_eq!((E::try_from_code(error), next > offset + 2), (None, true));
        }
    }
}
