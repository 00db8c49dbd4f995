//! FindCoordinator: this server coordinates all groups and transactions.

use kafka_protocol::messages::find_coordinator_response::Coordinator;
use kafka_protocol::messages::{BrokerId, FindCoordinatorRequest, FindCoordinatorResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::errors::ApiError;
use crate::security::{Operation, Resource};
use crate::topics::{GROUP_TOPIC, TRANSACTION_TOPIC};

const GROUP: i8 = 0;
const TRANSACTION: i8 = 1;
/// A share partition, `group:topic id:partition`; used between brokers.
const SHARE: i8 = 2;

/// The first version with share partitions.
const FIRST_WITH_SHARES: i16 = 6;

/// The first version with several keys.
const FIRST_WITH_KEYS: i16 = 4;

pub(super) async fn handle(
    cx: &Context,
    request: FindCoordinatorRequest,
) -> FindCoordinatorResponse {
    let (node, listener) = (&cx.server.node, &cx.peer.listener);
    let error = match request.key_type {
        GROUP | TRANSACTION => None,
        SHARE if cx.version >= FIRST_WITH_SHARES => {
            let is_named = |key: &&StrBytes| key.split(':').count() >= 3;
            let unnamed = request.coordinator_keys.iter().find(|key| !is_named(key));
            unnamed.map(|key| {
                ApiError::InvalidRequest(format!("{} is not a share partition", key.as_str()))
            })
        }
        other => Some(ApiError::InvalidRequest(format!("unknown coordinator type {other}"))),
    };
    let error_code = error.as_ref().map_or(0, ApiError::code);
    // As in Kafka: older versions get the name of error 0, newer ones an empty text.
    let no_error = if cx.version < FIRST_WITH_KEYS { "NONE" } else { "" };
    let error_message = match &error {
        Some(error) => error.message(),
        None => Some(StrBytes::from_static_str(no_error)),
    };
    let (id, host, port) = match error {
        None => (node.id, listener.host.clone(), listener.port),
        Some(_) => (-1, Default::default(), -1),
    };
    // An unknown type requires no rights.
    let refused = |key: &str| match request.key_type {
        GROUP => cx.authorize(Operation::Describe, Resource::Group(key)).err(),
        TRANSACTION => cx.authorize(Operation::Describe, Resource::TransactionalId(key)).err(),
        SHARE => cx.authorize(Operation::ClusterAction, Resource::Cluster).err(),
        _ => None,
    };
    let single = (cx.version < FIRST_WITH_KEYS).then_some(&request.key);
    if single.into_iter().chain(&request.coordinator_keys).any(|key| refused(key).is_none()) {
        match request.key_type {
            GROUP => cx.server.ensure_internal(GROUP_TOPIC).await,
            TRANSACTION => cx.server.ensure_internal(TRANSACTION_TOPIC).await,
            _ => {}
        }
    }
    if cx.version < FIRST_WITH_KEYS {
        if let Some(error) = refused(&request.key) {
            return FindCoordinatorResponse::default()
                .with_error_code(error.code())
                .with_error_message(error.message())
                .with_node_id(BrokerId(-1))
                .with_port(-1);
        }
        return FindCoordinatorResponse::default()
            .with_error_code(error_code)
            .with_error_message(error_message)
            .with_node_id(BrokerId(id))
            .with_host(host)
            .with_port(port);
    }
    let coordinator = |key: &StrBytes| {
        let key = key.clone();
        if let Some(error) = refused(&key) {
            return Coordinator::default()
                .with_key(key)
                .with_node_id(BrokerId(-1))
                .with_port(-1)
                .with_error_code(error.code())
                .with_error_message(error.message());
        }
        Coordinator::default()
            .with_key(key)
            .with_node_id(BrokerId(id))
            .with_host(host.clone())
            .with_port(port)
            .with_error_code(error_code)
            .with_error_message(error_message.clone())
    };
    FindCoordinatorResponse::default()
        .with_coordinators(request.coordinator_keys.iter().map(coordinator).collect())
}
