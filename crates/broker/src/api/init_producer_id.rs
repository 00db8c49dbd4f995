//! InitProducerId: an id for an idempotent producer.

use kafka_protocol::messages::{InitProducerIdRequest, InitProducerIdResponse, ProducerId};

use super::Context;
use crate::errors::ApiError;

/// A producer without a transactional id gets a new id each time, whichever it has: so does Kafka.
pub(super) async fn handle(cx: &Context, request: InitProducerIdRequest) -> InitProducerIdResponse {
    let allocated = match request.transactional_id {
        None => cx.server.producer_ids.allocate().await,
        Some(_) => Err(ApiError::TransactionsNotServed),
    };
    match allocated {
        Ok(id) => InitProducerIdResponse::default()
            .with_producer_id(ProducerId(id))
            .with_producer_epoch(0),
        Err(error) => {
            tracing::debug!(%error, "no producer id");
            InitProducerIdResponse::default()
                .with_error_code(error.code())
                .with_producer_id(ProducerId(-1))
                .with_producer_epoch(-1)
        }
    }
}
