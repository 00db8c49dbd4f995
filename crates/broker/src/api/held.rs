//! What a request holds, while it is handled, of what all share.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::Context;
use super::large::SMALL_BYTES;
use crate::server::{ByteBudget, RequestShare, Server};

/// Requests with more elements than this take their decoded size from the server's budget; the
/// others are bounded by the number of connections.
const UNCOUNTED_ELEMENTS: usize = 1_024;

/// What an element takes, about: decoded, its strings not counted, which are slices of the request;
/// and in the response.
const ELEMENT_BYTES: usize = 192;

/// Who holds what others may be waiting for waits no longer for records.
const HOLDING_WAIT: Duration = Duration::from_secs(1);

/// How long an answer that exists already waits for room to be encoded. It may be all that still
/// keeps an assignment, or members' metadata, in memory, which would be without bound if many
/// waited long.
const ROOM_WAIT: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Held {
    /// For the bytes of the request.
    pub(super) request: RequestShare,
    /// Those of its batches that are apart from it, until its handler takes them.
    pub(super) batches: Vec<Bytes>,
    /// For what it is decoded into and for its answer, if it has many elements.
    pub(super) elements: Option<OwnedSemaphorePermit>,
    /// To put together an answer that is large however small the request is.
    pub(super) turn: Option<OwnedSemaphorePermit>,
    /// For the bytes of its answer.
    pub(super) answer: Option<OwnedSemaphorePermit>,
}

/// What a request of so many elements holds for them.
pub(super) async fn share_of(server: &Server, elements: usize) -> Option<OwnedSemaphorePermit> {
    if elements <= UNCOUNTED_ELEMENTS {
        return None;
    }
    Some(server.decoded_budget.acquire(elements * ELEMENT_BYTES).await)
}

impl Context {
    /// The batches that were read apart from the request, in their order. Each has left an empty
    /// field in it.
    pub(super) fn take_batches(&self) -> Vec<Bytes> {
        std::mem::take(&mut self.held.lock().batches)
    }

    /// The request is about to wait for what may be long in coming. Nothing of its bytes is needed
    /// any more, and so many elements, of the request or of what it stands for: hold what is for
    /// these, and nothing else. How long it may wait at most.
    pub(super) async fn keep_elements(&self, elements: usize) -> Duration {
        let before = {
            let mut held = self.held.lock();
            held.request = RequestShare::default();
            held.elements.take()
        };
        let bytes = elements * ELEMENT_BYTES;
        let kept = match before {
            Some(share) if elements > UNCOUNTED_ELEMENTS && share.num_permits() * 1024 >= bytes => {
                ByteBudget::shrink(share, bytes)
            }
            before => {
                // Who waited with a part of it could wait for another that does the same.
                drop(before);
                share_of(&self.server, elements).await
            }
        };
        let max_wait = match kept {
            Some(_) => HOLDING_WAIT,
            // Longer than a connection may be idle nobody waits.
            None => self.server.config.idle_timeout,
        };
        self.held.lock().elements = kept;
        max_wait
    }

    /// Wait for a turn to put a large answer together. It is kept until the answer's bytes are
    /// counted.
    pub(super) async fn take_turn(&self) {
        let turn = self.server.large_answers.turn(self.api.key).await;
        self.held.lock().turn = turn;
    }

    /// The same without a wait; whether there was one.
    pub(super) fn take_free_turn(&self) -> bool {
        let turn = self.server.large_answers.free_turn(self.api.key);
        let mut held = self.held.lock();
        held.turn = turn;
        held.turn.is_some()
    }

    /// Have so many bytes counted that the answer will take, before it is encoded. Whether there is
    /// room.
    pub(super) async fn make_room(&self, answer_bytes: usize) -> bool {
        if answer_bytes <= SMALL_BYTES {
            return true;
        }
        let room = timeout(ROOM_WAIT, self.server.large_answers.room(answer_bytes)).await.ok();
        let mut held = self.held.lock();
        held.answer = room;
        held.answer.is_some()
    }
}
