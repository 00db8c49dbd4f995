//! The shares of server-wide budgets that a request holds while it is handled.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::Context;
use super::large::SMALL_BYTES;
use crate::server::{ByteBudget, RequestShare, Server};

/// Requests with more elements than this take their decoded size from the server's budget; the
/// limit on connections limits the others.
const UNCOUNTED_ELEMENTS: usize = 1_024;

/// The approximate size of an element: decoded, without its strings, which are slices of the
/// request; and in the response.
const ELEMENT_BYTES: usize = 192;

/// The longest wait for records by a request that holds memory for which others may be waiting.
const HOLDING_WAIT: Duration = Duration::from_secs(1);

/// How long a response that already exists waits for memory to be encoded. It may be the last
/// reference to an assignment or to members' metadata, which would be unlimited if many responses
/// waited long.
const RESERVE_WAIT: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct RequestLease {
    /// For the bytes of the request.
    pub(super) request: RequestShare,
    /// The batches that are separate from the request, until its handler takes them.
    pub(super) batches: Vec<Bytes>,
    /// For the decoded form and the response, if the request has many elements.
    pub(super) elements: Option<OwnedSemaphorePermit>,
    /// The permit to build a response that may be large however small the request is.
    pub(super) permit: Option<OwnedSemaphorePermit>,
    /// For the bytes of the response.
    pub(super) answer: Option<OwnedSemaphorePermit>,
}

/// Takes the budget for a request of `elements` elements.
pub(super) async fn element_share(
    server: &Server,
    elements: usize,
) -> Option<OwnedSemaphorePermit> {
    if elements <= UNCOUNTED_ELEMENTS {
        return None;
    }
    Some(server.decoded_budget.acquire(elements * ELEMENT_BYTES).await)
}

impl Context {
    /// Takes the batches that were read separately from the request, in their order. Each has left
    /// an empty field in it.
    pub(super) fn take_batches(&self) -> Vec<Bytes> {
        std::mem::take(&mut self.lease.lock().batches)
    }

    /// Prepares for a long wait: releases the memory of the request's bytes, which are not needed
    /// any more, and keeps the budget for `elements` elements only. Returns the longest time to
    /// wait.
    pub(super) async fn release_request_memory(&self, elements: usize) -> Duration {
        let before = {
            let mut lease = self.lease.lock();
            lease.request = RequestShare::default();
            lease.elements.take()
        };
        let bytes = elements * ELEMENT_BYTES;
        let kept = match before {
            Some(share) if elements > UNCOUNTED_ELEMENTS && share.num_permits() * 1024 >= bytes => {
                ByteBudget::shrink(share, bytes)
            }
            before => {
                // A waiter that kept a part could deadlock with another one that does the same.
                drop(before);
                element_share(&self.server, elements).await
            }
        };
        let max_wait = match kept {
            Some(_) => HOLDING_WAIT,
            // No wait exceeds the idle timeout of the connection.
            None => self.server.config.idle_timeout,
        };
        self.lease.lock().elements = kept;
        max_wait
    }

    /// Waits for a permit to build a large response. It is held until the response's bytes are
    /// counted.
    pub(super) async fn wait_for_permit(&self) {
        let permit = self.server.large_responses.permit(self.api.key).await;
        self.lease.lock().permit = permit;
    }

    /// Takes a permit if one is free, without waiting; returns whether there was one.
    pub(super) fn take_free_permit(&self) -> bool {
        let permit = self.server.large_responses.free_permit(self.api.key);
        let mut lease = self.lease.lock();
        lease.permit = permit;
        lease.permit.is_some()
    }

    /// Reserves memory for a response before it is encoded. Returns whether there was enough in
    /// time.
    pub(super) async fn reserve_response(&self, answer_bytes: usize) -> bool {
        if answer_bytes <= SMALL_BYTES {
            return true;
        }
        let reserve = self.server.large_responses.reserve(answer_bytes);
        let permit = timeout(RESERVE_WAIT, reserve).await.ok();
        let mut lease = self.lease.lock();
        lease.answer = permit;
        lease.answer.is_some()
    }
}
