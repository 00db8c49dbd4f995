//! ListConfigResources: the resources whose settings can be described.

use kafka_protocol::messages::list_config_resources_response::ConfigResource;
use kafka_protocol::messages::{ListConfigResourcesRequest, ListConfigResourcesResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use super::describe_configs::{BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP, TOPIC};
use crate::errors::ApiError;
use crate::security::{Operation, Resource};

pub(super) async fn handle(
    cx: &Context,
    request: ListConfigResourcesRequest,
) -> ListConfigResourcesResponse {
    let response = ListConfigResourcesResponse::default();
    if let Err(error) = cx.authorize(Operation::DescribeConfigs, Resource::Cluster) {
        return response.with_error_code(error.code());
    }
    // Version 0 requests client metrics, which do not exist here.
    let wanted = match request.resource_types {
        _ if cx.version == 0 => vec![CLIENT_METRICS],
        types if types.is_empty() => vec![TOPIC, BROKER, GROUP],
        types => types,
    };
    let known = [TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP];
    if let Some(unknown) = wanted.iter().find(|wanted| !known.contains(wanted)) {
        let error = ApiError::UnsupportedResourceType(*unknown);
        return response.with_error_code(error.code());
    }
    let server = &cx.server;
    let mut resources = Vec::new();
    let mut add = |resource_type: i8, name: String| {
        resources.push(
            ConfigResource::default()
                .with_resource_type(resource_type)
                .with_resource_name(StrBytes::from_string(name)),
        );
    };
    // In this order, each type once, however often it is requested.
    if wanted.contains(&TOPIC) {
        server.topics.all().iter().for_each(|topic| add(TOPIC, topic.name.to_string()));
    }
    if wanted.contains(&BROKER) {
        add(BROKER, server.node.id.to_string());
    }
    if wanted.contains(&GROUP) {
        server.configs.groups().into_iter().for_each(|group| add(GROUP, group));
    }
    response.with_config_resources(resources)
}
