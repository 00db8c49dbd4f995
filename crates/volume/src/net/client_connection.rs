//! The client's end of a client connection: requests that share it, within the server's window.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::client::{Expected, decode_answer, encode_request, request_cost};
use super::connection::{Control, Queue, send};
use super::dial::{ConnectError, connect};
use super::error::WireError;
use super::error_frame::decode_error;
use super::flow::WRITE_STALL;
use super::frame::{ConnectionRole, Frame, FrameType};
use super::handshake::{Directory, Features, HandshakeError, Identity, Local};
use super::io::{End, FrameReader, Pulse};
use crate::request::{Answer, Request, RequestError};
use crate::types::ServerId;

/// Why a call has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The server answers with an error.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The connection has ended. The request may or may not have been received.
    #[error("the connection to the server was closed")]
    Closed,
}

/// Why a connection cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectFailure {
    /// The server cannot be reached.
    #[error("the server cannot be reached: {0}")]
    Unreachable(String),
    /// The handshake fails.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

impl From<ConnectError> for ConnectFailure {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Handshake(error) => Self::Handshake(error),
            other => Self::Unreachable(other.to_string()),
        }
    }
}

/// A connection of a gateway or a tool to a server. When it is dropped, the connection ends.
pub struct ClientConnection {
    calls: Arc<Mutex<Calls>>,
    control: Arc<Control>,
    window: Arc<Semaphore>,
    window_bytes: usize,
    server: Identity,
    features: Features,
    task: AbortHandle,
}

/// The calls of a connection.
#[derive(Default)]
struct Calls {
    next_id: u64,
    to_send: VecDeque<Frame>,
    waiting: HashMap<u64, Waiting>,
    is_closed: bool,
}

/// A call without an answer. Its share of the window is given back when it is dropped.
struct Waiting {
    expected: Expected,
    reply: oneshot::Sender<Result<Answer, RequestError>>,
    _window: OwnedSemaphorePermit,
}

impl Queue for Calls {
    fn take(&mut self) -> Option<Frame> {
        self.to_send.pop_front()
    }
}

impl ClientConnection {
    /// Connects to a server. A tool that has only an address expects no server and has no
    /// directory.
    ///
    /// # Errors
    /// See [`ConnectFailure`].
    pub async fn connect(
        local: &Local,
        address: &str,
        expected: Option<ServerId>,
        directory: Option<&Mutex<Directory>>,
    ) -> Result<Self, ConnectFailure> {
        let role = ConnectionRole::Client;
        let (socket, welcome) = connect(local, role, address, expected, directory).await?;
        let (read, write) = socket.into_split();
        let (calls, control) = (Arc::<Mutex<Calls>>::default(), Arc::new(Control::default()));
        let pulse = Arc::new(Pulse::new());
        let connection = welcome.connection;
        let mut reader = FrameReader::new(read, connection, role, Some(Arc::clone(&pulse)));
        let window_bytes = welcome.window_bytes as usize;
        let window = Arc::new(Semaphore::new(window_bytes));
        let open = Open { calls: Arc::clone(&calls), window: Arc::clone(&window) };
        let sending = Arc::clone(&control);
        let task = tokio::spawn(async move {
            let receive = async {
                loop {
                    if let Err(end) = receive(&mut reader, &open.calls).await {
                        return end;
                    }
                }
            };
            let end = tokio::select! {
                end = receive => end,
                end = send(&sending, &open.calls, write, connection, Some(pulse), WRITE_STALL) => {
                    end
                }
            };
            tracing::debug!(%end, "connection to a volume server ended");
            drop(open);
        });
        Ok(Self {
            calls,
            control,
            window,
            window_bytes,
            server: welcome.identity,
            features: welcome.features,
            task: task.abort_handle(),
        })
    }

    /// The server.
    pub fn server(&self) -> &Identity {
        &self.server
    }

    /// The features of the connection.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Whether all calls fail with [`CallError::Closed`].
    pub fn is_closed(&self) -> bool {
        self.calls.lock().is_closed
    }

    /// Sends a request and waits for its answer. Waits first until the window has space for it;
    /// calls are sent in the order in which they wait. If the future is dropped, the server handles
    /// the request nevertheless.
    ///
    /// # Errors
    /// See [`CallError`].
    ///
    /// # Panics
    /// The op is longer than a frame.
    pub async fn call(&self, request: &Request) -> Result<Answer, CallError> {
        let frame = encode_request(0, request);
        let cost = request_cost(frame.wire_bytes(), request);
        assert!(cost <= self.window_bytes, "every request fits the smallest window");
        let window = Arc::clone(&self.window).acquire_many_owned(cost as u32).await;
        let window = window.map_err(|_| CallError::Closed)?;
        let (reply, answer) = oneshot::channel();
        {
            let calls = &mut *self.calls.lock();
            if calls.is_closed {
                return Err(CallError::Closed);
            }
            calls.next_id += 1;
            let expected = Expected::of(request);
            let waiting = Waiting { expected, reply, _window: window };
            calls.waiting.insert(calls.next_id, waiting);
            calls.to_send.push_back(frame.with_request_id(calls.next_id));
        }
        self.control.wake();
        match answer.await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(CallError::Closed),
        }
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Fails all calls when the connection ends.
struct Open {
    calls: Arc<Mutex<Calls>>,
    window: Arc<Semaphore>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let waiting = {
            let calls = &mut *self.calls.lock();
            calls.is_closed = true;
            calls.to_send.clear();
            std::mem::take(&mut calls.waiting)
        };
        self.window.close();
        // Their senders wake the callers.
        drop(waiting);
    }
}

/// Receives an answer and completes its call.
async fn receive(reader: &mut FrameReader, calls: &Mutex<Calls>) -> Result<(), End> {
    let header = reader.header().await?;
    let id = header.request_id;
    // Nothing is read for an answer to nothing.
    let expected = match header.kind {
        FrameType::Pong | FrameType::Close => None,
        _ => match calls.lock().waiting.get(&id).map(|waiting| waiting.expected) {
            Some(expected) if expected.is_answered_by(&header) => Some(expected),
            _ => return Err(WireError::field("request id of an answer", id).into()),
        },
    };
    let frame = reader.body(header, None).await?;
    let Some(expected) = expected else {
        if header.kind == FrameType::Close {
            let error = decode_error(&frame)?;
            tracing::info!(%error, "the server has closed the connection");
            return Err(End::Closed);
        }
        return Ok(());
    };
    let answer = decode_answer(&frame, expected)?;
    if let Some(waiting) = calls.lock().waiting.remove(&id) {
        // A caller that has gone does not want it.
        let _ = waiting.reply.send(answer);
    }
    Ok(())
}
