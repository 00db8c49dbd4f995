//! What the server tells about its topics, and itself.

use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::{
    ApiVersionsRequest, DescribeClusterRequest, DescribeQuorumRequest, MetadataRequest, TopicName,
    describe_quorum_request as quorum,
};
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

#[tokio::test(flavor = "multi_thread")]
async fn clients_learn_the_rack() {
    for rack in [None, Some("eu-1a")] {
        let server =
            TestServer::with(16 << 20, |config| config.rack = rack.map(str::to_owned)).await;
        let mut client = server.client().await;
        for version in [0, 1, 13] {
            let brokers = client.call(version, &MetadataRequest::default()).await.brokers;
            // The first version does not have it.
            assert_eq!(brokers[0].rack.as_deref(), rack.filter(|_| version > 0));
        }
        for version in 0..=2 {
            let request = DescribeClusterRequest::default().with_endpoint_type(1);
            let brokers = client.call(version, &request).await.brokers;
            assert_eq!(brokers[0].rack.as_deref(), rack);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_one_server_is_its_own_quorum() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let ask = |name: &str, index| {
        let partition = quorum::PartitionData::default().with_partition_index(index);
        let topic = quorum::TopicData::default()
            .with_topic_name(TopicName(text(name)))
            .with_partitions(vec![partition]);
        DescribeQuorumRequest::default().with_topics(vec![topic])
    };
    let mut last = 0;
    for version in 0..=2 {
        let response = client.call(version, &ask("__cluster_metadata", 0)).await;
        assert_eq!(response.error_code, 0);
        let partition = &response.topics[0].partitions[0];
        assert_eq!((partition.error_code, partition.leader_id.0), (0, 1));
        let [voter] = &partition.current_voters[..] else { panic!("{partition:?}") };
        assert_eq!((voter.replica_id.0, voter.log_end_offset), (1, partition.high_watermark));
        assert_eq!(voter.last_caught_up_timestamp > 0, version > 0);
        assert_eq!(partition.observers, []);
        // Each change of what there is moves it on.
        assert!(partition.high_watermark > last);
        last = partition.high_watermark;
        server.topic(&format!("t{version}"), 1, &[]).await;
    }
    for (name, index) in [("__cluster_metadata", 1), ("t0", 0)] {
        let response = client.call(2, &ask(name, index)).await;
        let partition = &response.topics[0].partitions[0];
        assert_eq!((response.error_code, partition.error_code), (0, 3), "{name}-{index}");
        assert_eq!(partition.partition_index, index);
    }
}

/// As Kafka's clients read it: a range's lower end is not above its upper end, and before version 4 not 0.
#[tokio::test(flavor = "multi_thread")]
async fn features_are_told_with_their_levels() {
    let server = TestServer::start().await;
    for version in 3..=4 {
        let request = ApiVersionsRequest::default()
            .with_client_software_name(text("a"))
            .with_client_software_version(text("1"));
        let response = server.client().await.call(version, &request).await;
        let finalized = response.finalized_features.iter();
        let levels: Vec<_> = finalized.map(|f| (f.name.to_string(), f.max_version_level)).collect();
        for feature in [
            ("metadata.version", 30),
            ("group.version", 1),
            ("transaction.version", 2),
            ("share.version", 1),
        ] {
            assert!(levels.contains(&(feature.0.to_owned(), feature.1)), "{levels:?}");
        }
        for feature in &response.supported_features {
            let (min, max) = (feature.min_version, feature.max_version);
            assert!(min <= max && (version > 3 || min > 0), "{feature:?}");
            assert!(levels.contains(&(feature.name.to_string(), max)));
        }
        assert!(response.finalized_features_epoch >= 0);
    }
}
