//! FindCoordinator: this server coordinates all groups and transactions.

use kafka_protocol::messages::find_coordinator_response::Coordinator;
use kafka_protocol::messages::{BrokerId, FindCoordinatorRequest, FindCoordinatorResponse};

use super::Context;
use crate::errors::ApiError;
use crate::topics::{GROUP_TOPIC, TRANSACTION_TOPIC};

const GROUP: i8 = 0;
const TRANSACTION: i8 = 1;

/// Versions from here on ask for several keys at once.
const FIRST_WITH_KEYS: i16 = 4;

pub(super) async fn handle(
    cx: &Context,
    request: FindCoordinatorRequest,
) -> FindCoordinatorResponse {
    match request.key_type {
        GROUP => cx.server.ensure_internal(GROUP_TOPIC).await,
        TRANSACTION => cx.server.ensure_internal(TRANSACTION_TOPIC).await,
        _ => {}
    }
    let node = &cx.server.node;
    let error = match request.key_type {
        GROUP | TRANSACTION => None,
        other => {
            Some(ApiError::InvalidRequest(format!("there are no coordinators of type {other}")))
        }
    };
    let error_code = error.as_ref().map_or(0, ApiError::code);
    let error_message = error.as_ref().and_then(ApiError::message);
    let (id, host, port) = match error {
        None => (node.id, node.host.clone(), node.port),
        Some(_) => (-1, Default::default(), -1),
    };
    if cx.version < FIRST_WITH_KEYS {
        return FindCoordinatorResponse::default()
            .with_error_code(error_code)
            .with_error_message(error_message)
            .with_node_id(BrokerId(id))
            .with_host(host)
            .with_port(port);
    }
    let coordinator = |key| {
        Coordinator::default()
            .with_key(key)
            .with_node_id(BrokerId(id))
            .with_host(host.clone())
            .with_port(port)
            .with_error_code(error_code)
            .with_error_message(error_message.clone())
    };
    FindCoordinatorResponse::default()
        .with_coordinators(request.coordinator_keys.into_iter().map(coordinator).collect())
}
