//! The sending half of a connection: a queue of its role, and the frames that every connection has.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::Notify;
use tokio::time::timeout_at;

use super::error_frame::close_frame;
use super::flow::Duty;
use super::frame::{ConnectionId, Frame};
use super::io::{End, Pulse, write_all};
use crate::request::{ErrorCode, RequestError};
use crate::types::GroupId;

/// A batch that is written at once ends with the frame that exceeds this length.
const MAX_BATCH_BYTES: usize = 256 << 10;

/// What a connection sends beside the frames of its role.
#[derive(Default)]
pub(super) struct Control {
    state: Mutex<ControlState>,
    wake: Notify,
}

#[derive(Default)]
struct ControlState {
    /// The answer to the last `Ping`. There is one at most, so that an end that sends `Ping` and
    /// reads nothing does not fill the memory.
    pong: Option<u64>,
    closing: Option<Closing>,
}

/// How a connection ends.
#[derive(Clone)]
enum Closing {
    /// With what is queued.
    Finish,
    /// Now, with a reason.
    Now(RequestError),
}

impl Control {
    /// Wakes the sender, since its queue has changed.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Answers a `Ping`.
    pub(super) fn pong(&self, request_id: u64) {
        self.state.lock().pong = Some(request_id);
        self.wake();
    }

    /// Ends the connection with the reason.
    pub(super) fn close(&self, code: ErrorCode, text: impl Into<String>) {
        self.state.lock().closing = Some(Closing::Now(RequestError::new(code, GroupId(0), text)));
        self.wake();
    }

    /// Ends the connection when its queue is empty.
    pub(super) fn finish(&self) {
        self.state.lock().closing.get_or_insert(Closing::Finish);
        self.wake();
    }
}

/// The frames of a connection's role, in their order.
pub(super) trait Queue {
    /// Takes the next frame.
    fn take(&mut self) -> Option<Frame>;

    /// All frames that were taken have been written.
    fn written(&mut self) {}
}

/// The queue of an end that sends one frame, or none, beside `Ping`, `Pong` and `Close`.
impl Queue for Option<Frame> {
    fn take(&mut self) -> Option<Frame> {
        Option::take(self)
    }
}

/// Sends what `queue` has until the connection ends. A dialer has a pulse.
pub(super) async fn send(
    control: &Control,
    queue: &Mutex<impl Queue>,
    mut socket: OwnedWriteHalf,
    connection: ConnectionId,
    pulse: Option<Arc<Pulse>>,
    stall: Duration,
) -> End {
    let mut ping = 0;
    loop {
        let mut wait_until = None;
        let mut batch = Vec::new();
        if let Some(pulse) = &pulse {
            match pulse.duty() {
                Duty::Close => return End::Silent,
                Duty::Ping => {
                    ping += 1;
                    batch.extend(Frame::ping(ping).encode(connection));
                }
                Duty::WaitUntil(at) => wait_until = Some(pulse.at(at)),
            }
        }
        let is_last = fill(&mut batch, control, queue, connection);
        if !batch.is_empty() {
            if let Some(pulse) = &pulse {
                pulse.sent();
            }
            if let Err(end) = write_all(&mut socket, batch, stall).await {
                return end;
            }
            queue.lock().written();
        } else if !is_last {
            let woken = control.wake.notified();
            match wait_until {
                Some(at) => drop(timeout_at(at, woken).await),
                None => woken.await,
            }
        }
        if is_last {
            let _ = socket.shutdown().await;
            return End::Closed;
        }
    }
}

/// Fills a batch with what is to be sent. Returns whether nothing follows it.
fn fill(
    batch: &mut Vec<Bytes>,
    control: &Control,
    queue: &Mutex<impl Queue>,
    connection: ConnectionId,
) -> bool {
    let (pong, closing) = {
        let mut state = control.state.lock();
        (state.pong.take(), state.closing.clone())
    };
    if let Some(Closing::Now(error)) = closing {
        batch.extend(close_frame(&error).encode(connection));
        return true;
    }
    if let Some(request_id) = pong {
        batch.extend(Frame::pong(request_id).encode(connection));
    }
    let mut bytes = 0;
    while bytes < MAX_BATCH_BYTES {
        let Some(frame) = queue.lock().take() else { return closing.is_some() };
        bytes += frame.wire_bytes();
        batch.extend(frame.encode(connection));
    }
    false
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::net::{ConnectionRole, FrameType, Received, Side, decode_error};

    impl Queue for VecDeque<Frame> {
        fn take(&mut self) -> Option<Frame> {
            self.pop_front()
        }
    }

    /// The frames of the next batch, and whether it is the last.
    fn batch(control: &Control, queue: &Mutex<VecDeque<Frame>>) -> (Vec<Received>, bool) {
        let (mut buffers, connection) = (Vec::new(), ConnectionId([1; 8]));
        let is_last = fill(&mut buffers, control, queue, connection);
        let (mut frames, mut rest) = (Vec::new(), Bytes::from(buffers.concat()));
        while !rest.is_empty() {
            let role = ConnectionRole::Client;
            let parsed = Received::parse(&rest, connection, role, Side::Dialer).unwrap();
            frames.push(parsed.0);
            rest = parsed.1;
        }
        (frames, is_last)
    }

    /// An end that sends `Ping` without end and reads nothing does not fill the memory.
    #[test]
    fn there_is_one_pong_at_most() {
        let (control, queue) = (Control::default(), Mutex::default());
        for request_id in 0..1000 {
            control.pong(request_id);
        }
        let (frames, is_last) = batch(&control, &queue);
        let ids: Vec<_> = frames.iter().map(|frame| frame.header.request_id).collect();
        assert_eq!((ids, is_last), (vec![999], false));
        assert!(batch(&control, &queue).0.is_empty());
    }

    #[test]
    fn a_connection_finishes_with_its_queue_or_closes_before_it() {
        let queue = Mutex::new((0..3).map(Frame::pong).collect());
        let control = Control::default();
        control.finish();
        let (frames, is_last) = batch(&control, &queue);
        assert_eq!((frames.len(), is_last), (3, true));
        queue.lock().push_back(Frame::pong(1));
        control.close(ErrorCode::Stopping, "the server shuts down");
        let (frames, is_last) = batch(&control, &queue);
        assert!(is_last);
        assert_eq!(frames.len(), 1);
        assert_eq!(frames[0].header.kind, FrameType::Close);
        assert_eq!(decode_error(&frames[0]).unwrap().code, ErrorCode::Stopping);
    }
}
