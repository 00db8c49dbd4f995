//! IncrementalAlterConfigs, and the older AlterConfigs, which sets all settings of a resource at
//! once.

use std::collections::{HashMap, HashSet};

use kafka_protocol::messages::alter_configs_request::AlterConfigsResource as Whole;
use kafka_protocol::messages::alter_configs_response::AlterConfigsResourceResponse as WholeAltered;
use kafka_protocol::messages::incremental_alter_configs_request::AlterConfigsResource;
use kafka_protocol::messages::incremental_alter_configs_response::AlterConfigsResourceResponse;
use kafka_protocol::messages::{
    AlterConfigsRequest, AlterConfigsResponse, IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use super::describe_configs::{BROKER, GROUP, TOPIC, check_this_broker, not_configurable};
use crate::configs::{Alteration, Entity, Op};
use crate::errors::ApiError;
use crate::security::{self, Operation};
use crate::topics::check_name;

/// A resource with settings: type and name.
type Resource = (i8, StrBytes);

pub(super) async fn incremental(
    cx: &Context,
    request: IncrementalAlterConfigsRequest,
) -> IncrementalAlterConfigsResponse {
    let named =
        |resource: &AlterConfigsResource| (resource.resource_type, resource.resource_name.clone());
    let repeated = repeated(request.resources.iter().map(named));
    let mut responses = Vec::with_capacity(request.resources.len());
    for resource in request.resources {
        let key = named(&resource);
        let configs = resource.configs.iter();
        let ops =
            configs.map(|config| (&*config.name, config.value.as_deref(), config.config_operation));
        let error = match operations(ops, false) {
            _ if repeated.contains(&key) => Some(named_twice()),
            Ok(alteration) => alter(cx, &key, &alteration, request.validate_only).await.err(),
            Err(error) => Some(error),
        };
        responses.push(
            AlterConfigsResourceResponse::default()
                .with_error_code(error.as_ref().map_or(0, ApiError::code))
                .with_error_message(error.and_then(|error| error.message()))
                .with_resource_type(key.0)
                .with_resource_name(key.1),
        );
    }
    IncrementalAlterConfigsResponse::default().with_responses(responses)
}

pub(super) async fn whole(cx: &Context, request: AlterConfigsRequest) -> AlterConfigsResponse {
    let named = |resource: &Whole| (resource.resource_type, resource.resource_name.clone());
    let repeated = repeated(request.resources.iter().map(named));
    let mut responses = Vec::with_capacity(request.resources.len());
    for resource in request.resources {
        let key = named(&resource);
        let ops = resource.configs.iter().map(|c| (&*c.name, c.value.as_deref(), SET));
        let error = match operations(ops, true) {
            _ if repeated.contains(&key) => Some(named_twice()),
            Ok(alteration) => alter(cx, &key, &alteration, request.validate_only).await.err(),
            Err(error) => Some(error),
        };
        responses.push(
            WholeAltered::default()
                .with_error_code(error.as_ref().map_or(0, ApiError::code))
                .with_error_message(error.and_then(|error| error.message()))
                .with_resource_type(key.0)
                .with_resource_name(key.1),
        );
    }
    AlterConfigsResponse::default().with_responses(responses)
}

fn named_twice() -> ApiError {
    ApiError::InvalidRequest("Each resource must appear at most once.".into())
}

fn repeated(resources: impl Iterator<Item = Resource>) -> HashSet<Resource> {
    let mut times: HashMap<Resource, u32> = HashMap::new();
    for resource in resources {
        *times.entry(resource).or_default() += 1;
    }
    times.into_iter().filter(|(_, times)| *times > 1).map(|(resource, _)| resource).collect()
}

// Operations by their protocol codes.
const SET: i8 = 0;
const DELETE: i8 = 1;
const APPEND: i8 = 2;
const SUBTRACT: i8 = 3;

fn operations<'a>(
    configs: impl Iterator<Item = (&'a str, Option<&'a str>, i8)>,
    only_these: bool,
) -> Result<Alteration, ApiError> {
    let mut seen = HashSet::new();
    let mut without_value = Vec::new();
    let mut ops = Vec::new();
    for (name, value, operation) in configs {
        if !seen.insert(name) {
            return Err(ApiError::InvalidRequest("Error due to duplicate config keys".into()));
        }
        let op = match (operation, value.map(str::to_owned)) {
            (DELETE, _) => Op::Delete,
            (_, None) => {
                without_value.push(name);
                continue;
            }
            (SET, Some(value)) => Op::Set(value),
            (APPEND, Some(value)) => Op::Append(value),
            (SUBTRACT, Some(value)) => Op::Subtract(value),
            (other, _) => {
                return Err(ApiError::InvalidRequest(format!("Unknown operations type {other}")));
            }
        };
        ops.push((name.to_owned(), op));
    }
    if !without_value.is_empty() {
        return Err(ApiError::InvalidRequest(format!(
            "Null value not supported for : {}",
            without_value.join(", ")
        )));
    }
    Ok(Alteration { ops, only_these })
}

async fn alter(
    cx: &Context,
    (resource_type, name): &Resource,
    alteration: &Alteration,
    validate_only: bool,
) -> Result<(), ApiError> {
    let server = &cx.server;
    let authorize = |of| cx.authorize(Operation::AlterConfigs, of);
    match *resource_type {
        TOPIC => authorize(security::Resource::Topic(name))?,
        BROKER => authorize(security::Resource::Cluster)?,
        GROUP => authorize(security::Resource::Group(name))?,
        _ => {}
    }
    cx.check_writable()?;
    match *resource_type {
        TOPIC if name.is_empty() => {
            Err(ApiError::InvalidRequest("Default topic resources are not allowed.".into()))
        }
        TOPIC => {
            check_name(name)?;
            server.topics.alter(name, alteration, validate_only).await
        }
        BROKER => {
            let entity = if name.is_empty() {
                Entity::Brokers
            } else {
                check_this_broker(server, name)?;
                Entity::ThisBroker
            };
            server.configs.alter(entity, alteration, validate_only).await?;
            if !validate_only {
                server.topics.refresh_defaults(|| server.configs.topic_defaults()).await;
                server.connections.refresh(|| server.configs.connection_limits());
                server.limit_transfers();
            }
            Ok(())
        }
        GROUP => server.configs.alter(Entity::Group(name), alteration, validate_only).await,
        other => Err(not_configurable(other)),
    }
}
