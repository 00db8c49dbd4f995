//! DescribeClientQuotas and AlterClientQuotas.

use std::collections::HashSet;
use std::net::IpAddr;

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
use crate::java_order;
use crate::quotas::{Bound, Entity, MAX_NAME_BYTES, Op, Part};
use crate::security::{Operation, Resource};

const USER: &str = "user";
const CLIENT_ID: &str = "client-id";
const IP: &str = "ip";

// Match types of filters by their protocol codes.
const EXACT: i8 = 0;
const DEFAULT: i8 = 1;
const ANY: i8 = 2;

pub(super) async fn describe(
    cx: &Context,
    request: DescribeClientQuotasRequest,
) -> DescribeClientQuotasResponse {
    let response = DescribeClientQuotasResponse::default();
    let allowed = cx.authorize(Operation::DescribeConfigs, Resource::Cluster);
    if let Err(error) = allowed.and_then(|()| check(&request.components)) {
        return response
            .with_error_code(error.code())
            .with_error_message(error.message())
            .with_entries(None);
    }
    let matches = |entity: &Entity| {
        let parts = [(USER, &entity.user), (CLIENT_ID, &entity.client), (IP, &entity.ip)];
        let component = |name: &str| request.components.iter().find(|c| &*c.entity_type == name);
        parts.into_iter().all(|(name, part)| match component(name) {
            None => !request.strict || *part == Part::Any,
            Some(component) => is_match(component, part),
        })
    };
    let mut entries = Vec::new();
    // The order of Kafka's hash maps, which clients' tests expect.
    let mut all = cx.server.quotas.all();
    java_order::sort(&mut all, 1, |(entity, _)| hash(entity));
    for (entity, limits) in all {
        if !matches(&entity) {
            continue;
        }
        let mut limits: Vec<_> = limits.into_iter().collect();
        java_order::sort(&mut limits, 1, |(key, _)| java_order::hash(key));
        let values = limits.into_iter().map(|(key, value)| {
            ValueData::default().with_key(StrBytes::from_string(key)).with_value(value)
        });
        let parts = [(CLIENT_ID, entity.client), (USER, entity.user), (IP, entity.ip)];
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

/// The hash of an entity in Kafka: that of a map from types to names.
fn hash(entity: &Entity) -> u32 {
    let parts = [(USER, &entity.user), (CLIENT_ID, &entity.client), (IP, &entity.ip)];
    let hashes = parts.into_iter().filter_map(|(kind, part)| match part {
        Part::Any => None,
        Part::Default => Some(java_order::hash(kind)),
        Part::Name(name) => Some(java_order::hash(kind) ^ java_order::hash(name)),
    });
    hashes.fold(31, u32::wrapping_add)
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
                return invalid("only an exact match has a name, and it must have one".into());
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
        let altered = allowed.and_then(|()| cx.check_writable()).and_then(|()| {
            let entity = entity(&entry)?;
            let ops = operations(&entry, &entity)?;
            Ok((entity, ops))
        });
        let error = match altered {
            Ok((entity, ops)) => {
                cx.server.quotas.alter(entity, ops, request.validate_only).await.err()
            }
            Err(error) => Some(error),
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
    let mut entity = Entity { user: Part::Any, client: Part::Any, ip: Part::Any };
    for named in &entry.entity {
        let part = match &*named.entity_type {
            USER => &mut entity.user,
            CLIENT_ID => &mut entity.client,
            IP if entry.entity.len() > 1 => {
                let reason = "Invalid quota entity combination, IP entity should not be combined \
                              with User or ClientId";
                return invalid(reason.into());
            }
            IP => &mut entity.ip,
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
                return invalid(format!("a name can have at most {MAX_NAME_BYTES} bytes"));
            }
            // Kafka also accepts host names, whose addresses may change.
            Some(name) if &*named.entity_type == IP => match name.parse::<IpAddr>() {
                Ok(ip) => Part::Name(ip.to_canonical().to_string()),
                Err(_) => return invalid(format!("{} is not a valid IP address.", &**name)),
            },
            Some(name) => Part::Name(name.to_string()),
        };
    }
    Ok(entity)
}

fn operations(entry: &EntryData, entity: &Entity) -> Result<Vec<Op>, ApiError> {
    let invalid = |reason: String| Err(ApiError::InvalidRequest(reason));
    let bounds: &[Bound] = match entity.ip {
        Part::Any => &Bound::OF_CLIENTS,
        _ => &Bound::OF_ADDRESSES,
    };
    let mut ops = Vec::with_capacity(entry.ops.len());
    for op in &entry.ops {
        let key = &*op.key;
        let Some(bound) = bounds.iter().find(|bound| bound.key() == key) else {
            return invalid(format!("Invalid configuration key {key}"));
        };
        if op.remove {
            ops.push((key.to_owned(), None));
            continue;
        }
        // NaN does not compare as greater.
        if op.value.is_nan() || op.value <= 0.0 {
            return invalid(format!("Quota {key} must be greater than 0"));
        }
        if op.value.is_infinite() || bound.max_whole().is_some_and(|max| op.value > max) {
            return invalid(format!("Proposed value for {key} is too large."));
        }
        if bound.max_whole().is_some() && op.value.fract() != 0.0 {
            return invalid(format!("{key} cannot be a fractional value."));
        }
        ops.push((key.to_owned(), Some(op.value)));
    }
    Ok(ops)
}
