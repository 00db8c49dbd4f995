//! The source's end of the stream of a pull.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::connection::{Control, Queue};
use super::frame::Frame;
use super::pull::PullFrame;

/// The connection of a pull has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection of the pull was closed")]
pub struct PullClosed;

/// The source's end of a stream. When it is dropped, the stream ends with what was sent.
#[derive(Debug)]
pub struct PullSender {
    stream: Arc<Stream>,
}

/// A frame that waits to be written, so that a source holds two batches at most.
pub(super) struct Stream {
    pub(super) control: Arc<Control>,
    slot: Mutex<Option<Frame>>,
    /// The slot is empty, or the connection has ended.
    taken: Notify,
    /// Closed when the connection has ended.
    open: Semaphore,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").finish_non_exhaustive()
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self {
            control: Arc::default(),
            slot: Mutex::default(),
            taken: Notify::new(),
            open: Semaphore::new(0),
        }
    }
}

impl PullSender {
    pub(super) fn new(stream: &Arc<Stream>) -> Self {
        Self { stream: Arc::clone(stream) }
    }

    /// Sends a frame. Waits while the target does not take the frames before it.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn send(&mut self, frame: &PullFrame) -> Result<(), PullClosed> {
        loop {
            let taken = self.stream.taken.notified();
            if self.stream.open.is_closed() {
                return Err(PullClosed);
            }
            if self.stream.slot.lock().is_none() {
                break;
            }
            taken.await;
        }
        *self.stream.slot.lock() = Some(frame.encode());
        self.stream.control.wake();
        Ok(())
    }
}

impl Drop for PullSender {
    fn drop(&mut self) {
        self.stream.control.finish();
    }
}

/// The queue of a stream as its sender sees it.
pub(super) struct Slot(pub(super) Arc<Stream>);

impl Queue for Slot {
    fn take(&mut self) -> Option<Frame> {
        let frame = self.0.slot.lock().take()?;
        self.0.taken.notify_one();
        Some(frame)
    }
}

/// Marks a stream as ended.
pub(super) struct Ended<'a>(pub(super) &'a Stream);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.open.close();
        self.0.taken.notify_one();
    }
}
