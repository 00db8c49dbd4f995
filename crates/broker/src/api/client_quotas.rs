//! DescribeClientQuotas and AlterClientQuotas.

use std::collections::HashSet;

use kafka_protocol::messages::alter_client_quotas_request::EntryData;
use kafka_protocol::messages::alter_client_quotas_response::{
    EntityData as AlteredEntity, EntryData as Altered,
};
use kafka_protocol::messages::describe_client_quotas_request::ComponentData;
use kafka_protocol::messages::describe_client_quotas_response::{
    EntityData as DescribedEntity, EntryData as Described, ValueData,
};
use kafka_protocol::messages::{
    AlterClientQuotasRequest, AlterClientQuotasResponse, DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::errors::ApiError;
use crate::quotas::{Bound, Entity, MAX_NAME_BYTES, Op, Part};
use crate::security::{Operation, Resource};

const USER: &str = "user";
const CLIENT_ID: &str = "client-id";
const IP: &str = "ip";

/// Quotas that Kafka knows and nothing here holds to.
const NOT_ENFORCED: [&str; 3] =
    ["request_percentage", "controller_mutation_rate", "connection_creation_rate"];

// How a filter matches, by its numbers in the protocol.
const EXACT: i8 = 0;
const DEFAULT: i8 = 1;
const ANY: i8 = 2;

pub(super) async fn describe(
    cx: &Context,
    request: DescribeClientQuotasRequest,
) -> DescribeClientQuotasResponse {
    let response = DescribeClientQuotasResponse::default().with_error_message(None);
    let allowed = cx.authorize(Operation::DescribeConfigs, Resource::Cluster);
    if let Err(error) = allowed.and_then(|()| check(&request.components)) {
        return response
            .with_error_code(error.code())
            .with_error_message(error.message())
            .with_entries(None);
    }
    let matches = |entity: &Entity| {
        let parts = [(USER, &entity.user), (CLIENT_ID, &entity.client)];
        let component = |name: &str| request.components.iter().find(|c| &*c.entity_type == name);
        // Quotas of addresses there are none.
        component(IP).is_none()
            && parts.into_iter().all(|(name, part)| match component(name) {
                None => !request.strict || *part == Part::Any,
                Some(component) => is_match(component, part),
            })
    };
    let mut entries = Vec::new();
    for (entity, limits) in cx.server.quotas.all() {
        if !matches(&entity) {
            continue;
        }
        let values = limits.into_iter().map(|(key, value)| {
            ValueData::default().with_key(StrBytes::from_string(key)).with_value(value)
        });
        let parts = [(USER, entity.user), (CLIENT_ID, entity.client)];
        let named = parts.into_iter().filter_map(|(name, part)| {
            let entity =
                DescribedEntity::default().with_entity_type(StrBytes::from_static_str(name));
            match part {
                Part::Any => None,
                Part::Default => Some(entity.with_entity_name(None)),
                Part::Name(name) => {
                    Some(entity.with_entity_name(Some(StrBytes::from_string(name))))
                }
            }
        });
        entries
            .push(Described::default().with_entity(named.collect()).with_values(values.collect()));
    }
    response.with_entries(Some(entries))
}

fn check(components: &[ComponentData]) -> Result<(), ApiError> {
    let invalid = |reason: String| Err(ApiError::InvalidRequest(reason));
    let mut seen = HashSet::new();
    for component in components {
        let name = &*component.entity_type;
        if !seen.insert(name) {
            return invalid(format!("Duplicate {name} filter component entity type"));
        }
        if ![USER, CLIENT_ID, IP].contains(&name) {
            return invalid(format!("Custom entity type '{name}' not supported"));
        }
        match (component.match_type, &component._match) {
            (EXACT, Some(_)) | (DEFAULT | ANY, None) => {}
            (EXACT | DEFAULT | ANY, _) => {
                return invalid("a name is for an exact match, and only for that".into());
            }
            (other, _) => return invalid(format!("Unexpected match type: {other}")),
        }
    }
    Ok(())
}

fn is_match(component: &ComponentData, part: &Part) -> bool {
    match (component.match_type, part) {
        (_, Part::Any) => false,
        (EXACT, Part::Name(name)) => component._match.as_deref() == Some(name),
        (DEFAULT, part) => *part == Part::Default,
        (ANY, _) => true,
        _ => false,
    }
}

pub(super) async fn alter(
    cx: &Context,
    request: AlterClientQuotasRequest,
) -> AlterClientQuotasResponse {
    let mut entries = Vec::with_capacity(request.entries.len());
    for entry in request.entries {
        let allowed = cx.authorize(Operation::AlterConfigs, Resource::Cluster);
        let error = match (allowed.and_then(|()| entity(&entry)), operations(&entry)) {
            (Ok(entity), Ok(ops)) => {
                cx.server.quotas.alter(entity, ops, request.validate_only).await.err()
            }
            (Err(error), _) | (_, Err(error)) => Some(error),
        };
        let named = entry.entity.into_iter().map(|entity| {
            AlteredEntity::default()
                .with_entity_type(entity.entity_type)
                .with_entity_name(entity.entity_name)
        });
        entries.push(
            Altered::default()
                .with_error_code(error.as_ref().map_or(0, ApiError::code))
                .with_error_message(error.and_then(|error| error.message()))
                .with_entity(named.collect()),
        );
    }
    AlterClientQuotasResponse::default().with_entries(entries)
}

fn entity(entry: &EntryData) -> Result<Entity, ApiError> {
    let invalid = |reason: String| Err(ApiError::InvalidRequest(reason));
    if entry.entity.is_empty() {
        return invalid("Invalid empty client quota entity".into());
    }
    let mut entity = Entity { user: Part::Any, client: Part::Any };
    for named in &entry.entity {
        let part = match &*named.entity_type {
            USER => &mut entity.user,
            CLIENT_ID => &mut entity.client,
            IP if entry.entity.len() > 1 => {
                return invalid("Invalid quota entity combination, IP entity should not be combined with User or ClientId".into());
            }
            IP => return invalid("quotas of addresses are not enforced by this server".into()),
            other => return invalid(format!("Unhandled client quota entity type: {other}")),
        };
        if *part != Part::Any {
            return invalid(format!("Duplicate {} entity", &*named.entity_type));
        }
        *part = match &named.entity_name {
            None => Part::Default,
            Some(name) if name.is_empty() => {
                return invalid(format!("Empty {} not supported", &*named.entity_type));
            }
            Some(name) if name.len() > MAX_NAME_BYTES => {
                return invalid(format!("a name has at most {MAX_NAME_BYTES} bytes"));
            }
            Some(name) => Part::Name(name.to_string()),
        };
    }
    Ok(entity)
}

fn operations(entry: &EntryData) -> Result<Vec<Op>, ApiError> {
    let invalid = |reason: String| Err(ApiError::InvalidRequest(reason));
    let mut ops = Vec::with_capacity(entry.ops.len());
    for op in &entry.ops {
        let key = &*op.key;
        if NOT_ENFORCED.contains(&key) {
            return invalid(format!("{key} is not enforced by this server"));
        }
        if ![Bound::Produced.key(), Bound::Fetched.key()].contains(&key) {
            return invalid(format!("Invalid configuration key {key}"));
        }
        if op.remove {
            ops.push((key.to_owned(), None));
            continue;
        }
        // Not a number is not greater either.
        if op.value.is_nan() || op.value <= 0.0 {
            return invalid(format!("Quota {key} must be greater than 0"));
        }
        if op.value.fract() != 0.0 || op.value > i64::MAX as f64 {
            return invalid(format!("{key} cannot be a fractional value."));
        }
        ops.push((key.to_owned(), Some(op.value)));
    }
    Ok(ops)
}
