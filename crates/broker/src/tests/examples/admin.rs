//! Examples of requests about settings, records and replicas.

use bytes::Bytes;
use kafka_protocol::messages::*;

use super::{World, encode, text};
use crate::wire::newer::Unchanged;

/// The body of a request, if this module has an example of it.
pub(super) fn body(key: ApiKey, version: i16, world: &World) -> Option<Bytes> {
    let topic = || TopicName(text(world.topic));
    let body = match key {
        ApiKey::AlterConfigs => {
            use alter_configs_request::*;
            let config = AlterableConfig::default()
                .with_name(text("retention.ms"))
                .with_value(Some(text("1000")));
            let resource = AlterConfigsResource::default()
                .with_resource_type(2)
                .with_resource_name(text(world.topic))
                .with_configs(vec![config]);
            let request = AlterConfigsRequest::default()
                .with_resources(vec![resource])
                .with_validate_only(true);
            encode(&request, version)
        }
        ApiKey::IncrementalAlterConfigs => {
            use incremental_alter_configs_request::*;
            let config = |name: &str, operation, value: Option<&str>| {
                AlterableConfig::default()
                    .with_name(text(name))
                    .with_config_operation(operation)
                    .with_value(value.map(text))
            };
            let resource = |resource_type, name: &str, configs| {
                AlterConfigsResource::default()
                    .with_resource_type(resource_type)
                    .with_resource_name(text(name))
                    .with_configs(configs)
            };
            let of_topic = vec![
                config("retention.ms", 0, Some("1000")),
                config("retention.bytes", 1, None),
                config("cleanup.policy", 2, Some("compact")),
            ];
            let of_group = vec![config("consumer.session.timeout.ms", 0, Some("50000"))];
            let request = IncrementalAlterConfigsRequest::default()
                .with_resources(vec![
                    resource(2, world.topic, of_topic),
                    resource(4, "", vec![config("log.retention.ms", 0, Some("5"))]),
                    resource(32, &world.group, of_group),
                ])
                .with_validate_only(true);
            encode(&request, version)
        }
        ApiKey::ListConfigResources => {
            let mut request = ListConfigResourcesRequest::default();
            if version >= 1 {
                request.resource_types = vec![2, 4, 16, 32];
            }
            encode(&request, version)
        }
        ApiKey::DescribeQuorum => {
            use describe_quorum_request::*;
            let topic = TopicData::default()
                .with_topic_name(TopicName(text("__cluster_metadata")))
                .with_partitions(vec![PartitionData::default()]);
            encode(&DescribeQuorumRequest::default().with_topics(vec![topic]), version)
        }
        ApiKey::UpdateFeatures => {
            use update_features_request::*;
            let update = |feature: &str, level| {
                let update = FeatureUpdateKey::default().with_feature(text(feature));
                update.with_max_version_level(level)
            };
            let mut request =
                UpdateFeaturesRequest::default().with_timeout_ms(1000).with_feature_updates(vec![
                    update("group.version", 1),
                    update("transaction.version", 2),
                ]);
            if version == 0 {
                request.feature_updates[0].allow_downgrade = true;
            } else {
                request.feature_updates[0].upgrade_type = 3;
                request.validate_only = true;
            }
            encode(&request, version)
        }
        ApiKey::DescribeClientQuotas => {
            use describe_client_quotas_request::*;
            let component = |entity_type: &str, match_type, name: Option<&str>| {
                ComponentData::default()
                    .with_entity_type(text(entity_type))
                    .with_match_type(match_type)
                    .with_match(name.map(text))
            };
            let components =
                vec![component("user", 0, Some("erin")), component("client-id", 1, None)];
            let request = DescribeClientQuotasRequest::default()
                .with_components(components)
                .with_strict(true);
            encode(&request, version)
        }
        ApiKey::AlterClientQuotas => {
            use alter_client_quotas_request::*;
            let entity = |entity_type: &str, name: Option<&str>| {
                EntityData::default()
                    .with_entity_type(text(entity_type))
                    .with_entity_name(name.map(text))
            };
            let op = |key: &str, value, remove| {
                OpData::default().with_key(text(key)).with_value(value).with_remove(remove)
            };
            let entry = EntryData::default()
                .with_entity(vec![entity("user", Some("erin")), entity("client-id", None)])
                .with_ops(vec![
                    op("producer_byte_rate", 1024.0, false),
                    op("consumer_byte_rate", 0.0, true),
                ]);
            let request = AlterClientQuotasRequest::default()
                .with_entries(vec![entry])
                .with_validate_only(true);
            encode(&request, version)
        }
        ApiKey::DeleteRecords => {
            use delete_records_request::*;
            let partition = |index, offset| {
                DeleteRecordsPartition::default().with_partition_index(index).with_offset(offset)
            };
            let topic = DeleteRecordsTopic::default().with_name(topic()).with_partitions(vec![
                partition(0, 0),
                partition(1, -1),
                partition(99, 0),
            ]);
            let request =
                DeleteRecordsRequest::default().with_topics(vec![topic]).with_timeout_ms(5_000);
            encode(&request, version)
        }
        ApiKey::AlterReplicaLogDirs => {
            use alter_replica_log_dirs_request::*;
            let topic =
                AlterReplicaLogDirTopic::default().with_name(topic()).with_partitions(vec![0, 99]);
            let dir = |path: &str| {
                AlterReplicaLogDir::default().with_path(text(path)).with_topics(vec![topic.clone()])
            };
            let request = AlterReplicaLogDirsRequest::default()
                .with_dirs(vec![dir("/alluvium"), dir("/elsewhere")]);
            encode(&request, version)
        }
        ApiKey::DescribeLogDirs => {
            use describe_log_dirs_request::*;
            let topic = DescribableLogDirTopic::default()
                .with_topic(topic())
                .with_partitions(vec![0, 1, 99]);
            let request = DescribeLogDirsRequest::default().with_topics(Some(vec![topic]));
            encode(&Unchanged(request), version)
        }
        ApiKey::ElectLeaders => {
            use elect_leaders_request::*;
            let topic = TopicPartitions::default().with_topic(topic()).with_partitions(vec![0, 99]);
            let mut request = ElectLeadersRequest::default()
                .with_topic_partitions(Some(vec![topic]))
                .with_timeout_ms(5_000);
            if version >= 1 {
                request.election_type = 1;
            }
            encode(&request, version)
        }
        ApiKey::AlterPartitionReassignments => {
            use alter_partition_reassignments_request::*;
            let partition = |index, replicas: Option<&[i32]>| {
                let replicas = replicas.map(|ids| ids.iter().map(|id| BrokerId(*id)).collect());
                ReassignablePartition::default().with_partition_index(index).with_replicas(replicas)
            };
            let partitions = vec![
                partition(0, Some(&[1])),
                partition(0, Some(&[2])),
                partition(0, Some(&[])),
                partition(0, Some(&[1, 1])),
                partition(1, None),
                partition(99, None),
            ];
            let topic = ReassignableTopic::default().with_name(topic()).with_partitions(partitions);
            let mut request = AlterPartitionReassignmentsRequest::default()
                .with_topics(vec![topic])
                .with_timeout_ms(5_000);
            if version >= 1 {
                request.allow_replication_factor_change = false;
            }
            encode(&request, version)
        }
        ApiKey::ListPartitionReassignments => {
            use list_partition_reassignments_request::*;
            let topic = ListPartitionReassignmentsTopics::default()
                .with_name(topic())
                .with_partition_indexes(vec![0, 1]);
            let request = ListPartitionReassignmentsRequest::default()
                .with_timeout_ms(5_000)
                .with_topics(Some(vec![topic]));
            encode(&request, version)
        }
        ApiKey::OffsetDelete => {
            use offset_delete_request::*;
            let partition =
                |index| OffsetDeleteRequestPartition::default().with_partition_index(index);
            let topic = OffsetDeleteRequestTopic::default()
                .with_name(topic())
                .with_partitions(vec![partition(0), partition(1)]);
            let request = OffsetDeleteRequest::default()
                .with_group_id(GroupId(text("no such group")))
                .with_topics(vec![topic]);
            encode(&request, version)
        }
        ApiKey::DescribeTopicPartitions => {
            use describe_topic_partitions_request::*;
            let cursor = Cursor::default().with_topic_name(topic()).with_partition_index(1);
            let named = |name: &str| TopicRequest::default().with_name(TopicName(text(name)));
            let request = DescribeTopicPartitionsRequest::default()
                .with_topics(vec![named("a"), named(world.topic)])
                .with_response_partition_limit(2)
                .with_cursor(Some(cursor));
            encode(&request, version)
        }
        _ => return None,
    };
    Some(body)
}
