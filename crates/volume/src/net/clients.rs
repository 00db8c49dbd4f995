//! The server's end of client connections: requests within their window, and answers in any order.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::client::{
    MAX_ANSWER_COST, MIN_ANSWER_COST, Refused, answer_cost, answer_type, decode_request,
};
use super::client_queue::{Client, ClientQueue, Reserved, Violation};
use super::connection::{Control, send};
use super::error::WireError;
use super::flow::{PING_AFTER, SILENCE, WRITE_STALL};
use super::frame::{ConnectionRole, FrameType};
use super::handshake::Features;
use super::host::{Held, NetEvent};
use super::io::{End, FrameReader};
use super::receive::{common_frame, end_of, next_header};
use super::shared::{Accepted, Shared};
use crate::op::{BlockOp, Op};
use crate::request::{Answer, ErrorCode, ReadRequest, Request, RequestError};
use crate::types::{GroupId, Layer};

/// Answers a request, if its connection still exists.
pub(super) fn answer(
    shared: &Shared,
    connection: u64,
    request_id: u64,
    answer: &Result<Answer, RequestError>,
) {
    let found = {
        let clients = shared.clients.lock();
        clients.get(&connection).map(|client| (client.control.clone(), client.queue.clone()))
    };
    let Some((control, queue)) = found else { return };
    queue.lock().answer(request_id, answer);
    control.wake();
}

/// A connection in the table, until it ends.
struct Listed<'a> {
    shared: &'a Shared,
    id: u64,
    held: Held,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.shared.clients.lock().remove(&self.id);
        let (connection, held) = (self.id, self.held.clone());
        self.shared.host.event(NetEvent::ClientGone { connection, held });
    }
}

/// Serves a client's connection.
pub(super) async fn serve(shared: &Arc<Shared>, accepted: Accepted, slot: OwnedSemaphorePermit) {
    let Accepted { socket, connection, features } = accepted;
    let control = Arc::new(Control::default());
    let queue = Arc::new(Mutex::new(ClientQueue::new(shared.local.window_bytes as usize)));
    let id = shared.next_id();
    let client = Client { control: Arc::clone(&control), queue: Arc::clone(&queue) };
    shared.clients.lock().insert(id, client);
    let _listed = Listed { shared, id, held: Held::new(Arc::new(slot)) };
    let (read, write) = socket.into_split();
    let role = ConnectionRole::Client;
    let reader = FrameReader::new(read, connection, role, None);
    let (control, queue) = (&*control, &*queue);
    let own_answers = Arc::new(Semaphore::new(MAX_ANSWER_COST));
    let mut requests = Requests { shared, id, features, reader, control, queue, own_answers };
    let sending = send(control, queue, write, connection, None, WRITE_STALL);
    let receive = async {
        loop {
            if let Err(end) = requests.receive().await {
                return end;
            }
        }
    };
    let end = end_of(control, receive, sending).await;
    tracing::debug!(connection = id, %end, "connection of a client ended");
    requests.reader.drain().await;
}

/// The receiving half of a client's connection.
struct Requests<'a> {
    shared: &'a Shared,
    id: u64,
    features: Features,
    reader: FrameReader,
    control: &'a Control,
    queue: &'a Mutex<ClientQueue>,
    /// What the connection may reserve for answers whatever the others have reserved.
    own_answers: Arc<Semaphore>,
}

impl Requests<'_> {
    /// Receives a request and hands it on.
    async fn receive(&mut self) -> Result<(), End> {
        let header = next_header(&mut self.reader).await?;
        let header = common_frame(&mut self.reader, header, self.control).await?;
        let Some(header) = header else { return Ok(()) };
        let bytes = header.wire_bytes();
        // Before memory is allocated, and before the request waits.
        if !self.queue.lock().fits(bytes + MIN_ANSWER_COST) {
            return self.violation(Violation::TooManyBytes).await;
        }
        let mut reserved = [Some(self.reserve_answer(MIN_ANSWER_COST).await), None];
        let queued = &self.shared.request_bytes;
        let held = self.wait(Arc::clone(queued).acquire_many_owned(bytes as u32)).await;
        let held = Held::new(Arc::new(held));
        let frame = timeout(SILENCE, self.reader.body(header, None)).await;
        let frame = frame.unwrap_or(Err(End::Silent))?;
        let request_id = header.request_id;
        let request = match decode_request(&frame) {
            Ok(request) => request,
            Err(Refused::Connection(error)) => return Err(error.into()),
            Err(Refused::Request(error)) => {
                let cost = bytes + MIN_ANSWER_COST;
                return self.refuse(request_id, FrameType::OpAnswer, cost, reserved, error).await;
            }
        };
        let (kind, answer) = (answer_type(&request), answer_cost(&request));
        let cost = bytes + answer;
        if let Some(error) = missing_feature(&request, self.features) {
            return self.refuse(request_id, kind, cost, reserved, error).await;
        }
        if !self.queue.lock().fits(cost) {
            return self.violation(Violation::TooManyBytes).await;
        }
        // Requests with blocks have the shortest answers: no block waits here.
        if answer > MIN_ANSWER_COST {
            reserved[1] = Some(self.reserve_answer(answer - MIN_ANSWER_COST).await);
        }
        let begun = self.queue.lock().begin(request_id, kind, cost, reserved);
        if let Err(violation) = begun {
            return self.violation(violation).await;
        }
        let connection = self.id;
        self.shared.host.event(NetEvent::Client { connection, request_id, request, held });
        Ok(())
    }

    /// Reserves the bytes of an answer: the connection's own, or those that all clients share.
    /// Otherwise clients that send requests and read no answers would fill the memory.
    async fn reserve_answer(&self, bytes: usize) -> OwnedSemaphorePermit {
        let own = Arc::clone(&self.own_answers).acquire_many_owned(bytes as u32);
        let shared = Arc::clone(&self.shared.answer_bytes).acquire_many_owned(bytes as u32);
        self.wait(async {
            tokio::select! {
                biased;
                own = own => own,
                shared = shared => shared,
            }
        })
        .await
    }

    /// Waits for a share of a budget. `Pong` shows the client meanwhile that the server is there.
    async fn wait(
        &self,
        share: impl Future<Output = Result<OwnedSemaphorePermit, AcquireError>>,
    ) -> OwnedSemaphorePermit {
        tokio::pin!(share);
        loop {
            match timeout(PING_AFTER, &mut share).await {
                Ok(permit) => return permit.expect("a budget is never closed"),
                Err(_) => self.control.pong(0),
            }
        }
    }

    async fn refuse(
        &self,
        request_id: u64,
        kind: FrameType,
        cost: usize,
        reserved: Reserved,
        error: RequestError,
    ) -> Result<(), End> {
        let refused = {
            let mut queue = self.queue.lock();
            let begun = queue.begin(request_id, kind, cost, reserved);
            begun.map(|()| queue.answer(request_id, &Err(error)))
        };
        if let Err(violation) = refused {
            return self.violation(violation).await;
        }
        self.control.wake();
        Ok(())
    }

    /// Closes the connection. The sender ends it.
    async fn violation(&self, violation: Violation) -> Result<(), End> {
        match violation {
            Violation::RequestId => Err(WireError::field("request id", 0_u64).into()),
            Violation::TooManyBytes => {
                let text = "the unanswered requests exceed the window";
                self.control.close(ErrorCode::TooManyBytes, text);
                std::future::pending().await
            }
        }
    }
}

/// The error of a request that uses a feature that the connection does not have.
fn missing_feature(request: &Request, features: Features) -> Option<RequestError> {
    let (group, layer) = match request {
        Request::Op { group, op: Op::Blocks(BlockOp { layer, .. }) } => (*group, *layer),
        Request::Read(ReadRequest { group, layer, .. }) => (*group, *layer),
        Request::Op { .. } | Request::Status { .. } => (GroupId(0), Layer(0)),
    };
    let is_missing = layer != Layer(0) && !features.has(Features::LAYERS);
    let text = "the connection does not have the feature of layers";
    is_missing.then(|| RequestError::new(ErrorCode::Unsupported, group, text))
}
