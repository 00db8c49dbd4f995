//! Descriptions of topics, and of the server itself.

use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::{
    ApiVersionsRequest, DescribeClusterRequest, DescribeQuorumRequest, MetadataRequest, TopicName,
    UpdateFeaturesRequest, describe_quorum_request as quorum, update_features_request as features,
};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::harness::{HANG, TestServer, text};

/// kafka-clients send an empty name, not null, when they ask by id.
#[tokio::test(flavor = "multi_thread")]
async fn metadata_by_id_ignores_the_name() {
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
            assert_eq!(topics[0].error_code, ResponseError::UnknownTopicId.code());
            assert_eq!((topics[0].topic_id, &topics[0].name), (unknown, &None));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_receive_the_rack() {
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
        // Each publication of the catalog increases it.
        assert!(partition.high_watermark > last);
        last = partition.high_watermark;
        server.topic(&format!("t{version}"), 1, &[]).await;
        let published = async {
            while server.store().catalog_version().cast_signed() == last {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(HANG, published).await.expect("the topic is not published");
    }
    for (name, index) in [("__cluster_metadata", 1), ("t0", 0)] {
        let response = client.call(2, &ask(name, index)).await;
        let partition = &response.topics[0].partitions[0];
        assert_eq!(
            (response.error_code, partition.error_code),
            (0, ResponseError::UnknownTopicOrPartition.code()),
            "{name}-{index}"
        );
        assert_eq!(partition.partition_index, index);
    }
}

/// Both sides of one table: ApiVersions announces each feature with the one level that
/// UpdateFeatures accepts, with and without `validate_only`, and for every type of update.
#[tokio::test(flavor = "multi_thread")]
async fn features_are_announced_with_the_levels_that_an_update_accepts() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    for version in 3..=4 {
        let request = ApiVersionsRequest::default()
            .with_client_software_name(text("a"))
            .with_client_software_version(text("1"));
        let response = server.client().await.call(version, &request).await;
        let finalized = response.finalized_features.iter();
        let finalized: Vec<_> = finalized
            .map(|f| (f.name.as_str(), f.min_version_level, f.max_version_level))
            .collect();
        assert_eq!(
            finalized,
            [
                ("group.version", 1, 1),
                ("metadata.version", 30, 30),
                ("share.version", 1, 1),
                ("transaction.version", 2, 2),
            ]
        );
        let supported = response.supported_features.iter();
        assert!(supported.map(|f| (f.name.as_str(), f.min_version, f.max_version)).eq(finalized));
        assert!(response.finalized_features_epoch >= 0);

        for feature in &response.finalized_features {
            for (version, upgrade_type, validate_only) in
                [(0, 1, false), (1, 1, true), (1, 2, false), (2, 3, true), (2, 1, false)]
            {
                let update = (feature.name.as_str(), feature.max_version_level, upgrade_type);
                let request = updates(&[update]).with_validate_only(validate_only);
                let response = client.call(version, &request).await;
                assert_eq!((response.error_code, response.error_message), (0, None));
            }
        }
    }
}

/// Name of a feature, level and type of the update.
fn updates(all: &[(&str, i16, i8)]) -> UpdateFeaturesRequest {
    let update = |&(name, level, upgrade_type): &(&str, i16, i8)| {
        features::FeatureUpdateKey::default()
            .with_feature(text(name))
            .with_max_version_level(level)
            .with_upgrade_type(upgrade_type)
    };
    UpdateFeaturesRequest::default().with_feature_updates(all.iter().map(update).collect())
}

/// Codes, texts and results are those of Apache Kafka 4.4.0, except for the range of levels.
#[tokio::test(flavor = "multi_thread")]
async fn features_are_not_changed() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let no_such = "Local controller 1 does not support this feature.";
    let only_1 = "Local controller 1 only supports versions 1";
    let only_2 = "Local controller 1 only supports versions 2";
    let only_30 = "Local controller 1 only supports versions 30";
    let negative = "A feature version cannot be less than 0.";
    let no_such_type = "The controller does not support the given upgrade type.";
    let (groups, transactions) = ("group.version", "transaction.version");
    // The updates; level and feature in the expected message, and the reason.
    type Case<'a> = (&'a [(&'a str, i16, i8)], i16, &'a str, &'a str);
    let cases: &[Case<'_>] = &[
        (&[("no.such", 1, 1)], 1, "no.such", no_such),
        (&[("no.such", 0, 1)], 0, "no.such", "Feature no.such not found."),
        (&[("", 1, 1)], 1, "", no_such),
        (&[(groups, -1, 1)], -1, groups, negative),
        (&[(groups, 2, 1)], 2, groups, only_1),
        (&[(groups, 0, 1)], 0, groups, only_1),
        (&[("metadata.version", 29, 1)], 29, "metadata.version", only_30),
        (&[(groups, 1, 1), ("no.such", 1, 1), ("other", 1, 1)], 1, "no.such", no_such),
        (&[(groups, 1, 1), (groups, 9, 1)], 9, groups, only_1),
    ];
    let downgrades: &[Case<'_>] = &[
        (&[("no.such", 0, 2)], 0, "no.such", "Feature no.such not found."),
        (&[(groups, 0, 2)], 0, groups, only_1),
        (&[(transactions, 1, 3)], 1, transactions, only_2),
        (&[(groups, 1, 0)], 1, groups, no_such_type),
        (&[(groups, 1, 4)], 1, groups, no_such_type),
    ];
    for version in 0..=2 {
        // Version 0 has no types.
        let typed = if version == 0 { &[] } else { downgrades };
        for (all, level, feature, reason) in cases.iter().chain(typed) {
            let response = client.call(version, &updates(all)).await;
            let message = format!(
                "The update failed for all features since the following feature had an error: \
                 Invalid update version {level} for feature {feature}. {reason}"
            );
            let reported = response.error_message.as_ref().map(ToString::to_string);
            assert_eq!(
                (response.error_code, reported),
                (ResponseError::InvalidUpdateVersion.code(), Some(message)),
                "v{version} {all:?}"
            );
            assert_eq!(response.results, []);
        }

        let nothing = client.call(version, &updates(&[])).await;
        assert_eq!((nothing.error_code, nothing.error_message), (0, None));
        assert_eq!(nothing.results, []);
        // The last update of a feature counts; there is a result for each.
        let twice = [(groups, 9, 1), (transactions, 2, 1), (groups, 1, 1)];
        let response = client.call(version, &updates(&twice)).await;
        assert_eq!((response.error_code, &response.error_message), (0, &None));
        let results = response.results.iter().map(|result| {
            let message = result.error_message.as_ref().map(StrBytes::as_str);
            (result.feature.as_str(), result.error_code, message)
        });
        let wanted = twice.map(|(name, ..)| (name, 0, Some("NONE")));
        assert!(results.eq(wanted.into_iter().filter(|_| version <= 1)), "{response:?}");
    }
    // An old client's permission to downgrade has no effect, as in Kafka.
    let mut lower = updates(&[(groups, 0, 1)]);
    lower.feature_updates[0].allow_downgrade = true;
    assert_eq!(client.call(0, &lower).await.error_code, ResponseError::InvalidUpdateVersion.code());
}
