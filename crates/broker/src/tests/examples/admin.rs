//! Examples of requests about settings, records and replicas as a whole.

use bytes::Bytes;
use kafka_protocol::messages::*;

use super::{World, encode, text};

/// The body of a request, if there is an example of it here.
pub(super) fn body(key: ApiKey, version: i16, world: &World) -> Option<Bytes> {
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
        _ => return None,
    };
    Some(body)
}
