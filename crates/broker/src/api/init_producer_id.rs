//! InitProducerId: an ID for an idempotent producer, and the next epoch for a transactional one.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{InitProducerIdRequest, InitProducerIdResponse, ProducerId};

use super::Context;
use crate::security::{Operation, Resource, ResourceType};
use crate::transactions::Transactions;

/// The first version with PRODUCER_FENCED.
const FIRST_WITH_FENCED: i16 = 4;

pub(super) async fn handle(cx: &Context, request: InitProducerIdRequest) -> InitProducerIdResponse {
    match init(cx, &request).await {
        Ok((id, epoch)) => InitProducerIdResponse::default()
            .with_producer_id(ProducerId(id))
            .with_producer_epoch(epoch),
        Err(error) => {
            tracing::debug!(%error, "no producer ID allocated");
            let error = match error {
                ResponseError::ProducerFenced if cx.version < FIRST_WITH_FENCED => {
                    ResponseError::InvalidProducerEpoch
                }
                error => error,
            };
            InitProducerIdResponse::default()
                .with_error_code(error.code())
                .with_producer_id(ProducerId(-1))
                .with_producer_epoch(-1)
        }
    }
}

async fn init(cx: &Context, request: &InitProducerIdRequest) -> Result<(i64, i16), ResponseError> {
    let is = (request.producer_id.0, request.producer_epoch);
    let expected = match is {
        (-1, -1) => Ok(None),
        (0.., 0..) => Ok(Some(is)),
        _ => Err(ResponseError::InvalidRequest),
    };
    let Some(id) = &request.transactional_id else {
        // The error at which all clients give up: some repeat others for minutes.
        cx.check_writable().map_err(|_| ResponseError::ClusterAuthorizationFailed)?;
        // A client that may write to any topic may also use idempotence.
        if !cx.may_with_some(Operation::Write, ResourceType::Topic) {
            cx.authorize(Operation::IdempotentWrite, Resource::Cluster).map_err(|e| e.kind())?;
        }
        expected?;
        // A producer without a transactional ID always gets a new ID, whichever it has; Kafka does
        // the same.
        let id = cx.server.producer_ids.allocate().await.map_err(|error| error.kind())?;
        return Ok((id, 0));
    };
    cx.authorize(Operation::Write, Resource::TransactionalId(id)).map_err(|e| e.kind())?;
    cx.check_writable().map_err(|_| ResponseError::TransactionalIdAuthorizationFailed)?;
    Transactions::init(&cx.server, id, expected?, request.transaction_timeout_ms).await
}
