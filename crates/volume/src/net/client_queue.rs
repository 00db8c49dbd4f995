//! The unanswered requests of a client's connection, and its answers.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use super::client::encode_answer;
use super::connection::{Control, Queue};
use super::flow::RequestWindow;
use super::frame::{Frame, FrameType};
use crate::request::{Answer, RequestError};

/// A client's connection, as the table has it.
pub(super) struct Client {
    pub(super) control: Arc<Control>,
    pub(super) queue: Arc<Mutex<ClientQueue>>,
}

/// The unanswered requests of a connection, and the answers that wait to be sent.
pub(super) struct ClientQueue {
    window: RequestWindow,
    unanswered: HashMap<u64, Unanswered>,
    answers: VecDeque<(Frame, Unanswered)>,
    /// What the answers that are being written have of the budgets.
    writing: Vec<Reserved>,
}

/// A request whose answer is not being written yet.
struct Unanswered {
    /// The type of its answer.
    answer: FrameType,
    /// Its cost in the window.
    cost: usize,
    reserved: Reserved,
}

/// What a request has of the budgets of answers.
pub(super) type Reserved = [Option<OwnedSemaphorePermit>; 2];

/// Why a request is not accepted, and the connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Violation {
    TooManyBytes,
    RequestId,
}

impl ClientQueue {
    pub(super) fn new(window_bytes: usize) -> Self {
        let window = RequestWindow::new(window_bytes);
        Self { window, unanswered: HashMap::new(), answers: VecDeque::new(), writing: Vec::new() }
    }

    /// Whether a request of this cost fits the window.
    pub(super) fn fits(&self, cost: usize) -> bool {
        self.window.fits(cost)
    }

    /// Counts a request, and keeps what is reserved for it, until its answer is written.
    pub(super) fn begin(
        &mut self,
        request_id: u64,
        answer: FrameType,
        cost: usize,
        reserved: Reserved,
    ) -> Result<(), Violation> {
        let Entry::Vacant(entry) = self.unanswered.entry(request_id) else {
            return Err(Violation::RequestId);
        };
        if !self.window.take(cost) {
            return Err(Violation::TooManyBytes);
        }
        entry.insert(Unanswered { answer, cost, reserved });
        Ok(())
    }

    /// Queues the answer to an unanswered request.
    pub(super) fn answer(&mut self, request_id: u64, answer: &Result<Answer, RequestError>) {
        if let Some(request) = self.unanswered.remove(&request_id) {
            let frame = encode_answer(request.answer, request_id, answer);
            self.answers.push_back((frame, request));
        }
    }
}

impl Queue for ClientQueue {
    /// The cost is given back before the answer is written: the client may send the next request
    /// as soon as the answer has arrived, before a write has returned here.
    fn take(&mut self) -> Option<Frame> {
        let (frame, request) = self.answers.pop_front()?;
        self.window.give_back(request.cost);
        self.writing.push(request.reserved);
        Some(frame)
    }

    fn written(&mut self) {
        self.writing.clear();
    }
}
