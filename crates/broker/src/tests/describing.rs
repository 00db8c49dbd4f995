//! What the server tells about its topics.

use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::{MetadataRequest, TopicName};
use uuid::Uuid;

use super::harness::{TestServer, text};

/// kafka-clients leave the name empty where they mean an id, not null.
#[tokio::test(flavor = "multi_thread")]
async fn metadata_by_id_does_not_look_at_the_name() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let id = server.topic("known", 2, &[]).await;
    for name in [None, Some(""), Some("other")] {
        let wanted = |id: Uuid| {
            let name = name.map(|name| TopicName(text(name)));
            MetadataRequest::default()
                .with_topics(Some(vec![
                    MetadataRequestTopic::default().with_topic_id(id).with_name(name),
                ]))
                .with_allow_auto_topic_creation(false)
        };
        for version in [12, 13] {
            let topics = client.call(version, &wanted(id)).await.topics;
            let found = topics[0].name.as_ref().map(|name| name.to_string());
            assert_eq!((topics[0].error_code, found.as_deref()), (0, Some("known")), "{name:?}");
            assert_eq!((topics[0].topic_id, topics[0].partitions.len()), (id, 2));
            let unknown = Uuid::from_u128(7);
            let topics = client.call(version, &wanted(unknown)).await.topics;
            assert_eq!(topics[0].error_code, 100, "UNKNOWN_TOPIC_ID");
            assert_eq!((topics[0].topic_id, &topics[0].name), (unknown, &None));
        }
    }
}
