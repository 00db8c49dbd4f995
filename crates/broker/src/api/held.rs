//! What a request holds, while it is handled, of what all share.

use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::Context;
use super::large::SMALL_BYTES;

/// How long an answer that exists already waits for room to be encoded. It may be all that still keeps an assignment, or members' metadata, in
/// memory, which would be without bound if many waited long.
const ROOM_WAIT: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Held {
    /// To put together an answer that is large however small the request is.
    pub(super) turn: Option<OwnedSemaphorePermit>,
    /// For the bytes of its answer.
    pub(super) answer: Option<OwnedSemaphorePermit>,
}

impl Context {
    /// Wait for a turn to put a large answer together. It is kept until the answer's bytes are counted.
    pub(super) async fn take_turn(&self) {
        let turn = self.server.large_answers.turn(self.api.key).await;
        self.held.lock().turn = turn;
    }

    /// Have so many bytes counted that the answer will take, before it is encoded. Whether there is room.
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
