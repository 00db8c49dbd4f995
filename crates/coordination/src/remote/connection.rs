//! One connection of a client.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use parking_lot::{Mutex, MutexGuard};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::RemoteOptions;
use crate::wire::{
    Answer, ClientMessage, Hello, HostMessage, MAX_CLIENT_BYTES, MAX_HOST_BYTES, Reader, VERSION,
    Welcome, WelcomeBody, Writer, decode, encode, ping_times, split, watch_cost,
};
use crate::{Error, Event, Identity, Result, Revision};

/// Frames that wait for the writer.
const QUEUED_FRAMES: usize = 16;
/// Frames of a watch that wait for its reader. The window of a watch holds 1,024 frames, and
/// one revision in addition, of which all but the last frame have more than 1 MiB.
const QUEUED_WATCH_FRAMES: usize = 2048;

/// The connection has ended, and why.
#[derive(Debug)]
pub(super) struct Broken(pub(super) String);

/// What a watch receives.
#[derive(Debug)]
pub(super) enum WatchFrame {
    Part { revision: Revision, events: Vec<Event>, more: bool, cost: u64 },
    Ended(Error),
}

/// Connects, and returns what the host states about itself.
///
/// # Errors
/// What failed.
pub(super) async fn dial(
    options: &RemoteOptions,
) -> std::result::Result<((Reader, Writer), Identity, Revision), String> {
    match timeout(options.connect_timeout, shake_hands(options)).await {
        Ok(dialed) => dialed,
        Err(_) => Err(format!("no connection within {:?}", options.connect_timeout)),
    }
}

async fn shake_hands(
    options: &RemoteOptions,
) -> std::result::Result<((Reader, Writer), Identity, Revision), String> {
    let text = |error: std::io::Error| error.to_string();
    let stream = TcpStream::connect(&options.address).await.map_err(text)?;
    let (mut reader, mut writer) = split(stream, MAX_CLIENT_BYTES);
    let cluster = options.cluster.clone();
    let hello = Hello { lowest: VERSION, highest: VERSION, cluster };
    writer.send(hello.encode()).await.map_err(text)?;
    let frame = reader.next().await.ok_or("the host has closed the connection")?.map_err(text)?;
    let welcome = Welcome::decode(&frame)?;
    match welcome.body {
        WelcomeBody::Refused(reason) => Err(format!("the host refuses the connection: {reason}")),
        WelcomeBody::Accepted { .. } if welcome.version != VERSION => {
            Err(format!("the host has chosen version {} of the protocol", welcome.version))
        }
        WelcomeBody::Accepted { identity, revision } => {
            reader.decoder_mut().set_max_frame_length(MAX_HOST_BYTES);
            Ok(((reader, writer), identity, revision))
        }
    }
}

pub(super) struct Connection {
    frames: mpsc::Sender<Bytes>,
    /// Messages of watches, which a drop sends too, in the order in which they were sent: the host
    /// ignores the end of a watch that it does not have. The window of each watch bounds them.
    control: mpsc::UnboundedSender<ClientMessage>,
    waiting: Mutex<Waiting>,
}

/// The operations and watches that wait for frames from the host.
#[derive(Default)]
struct Waiting {
    /// Why the connection has ended, if it has.
    ended: Option<String>,
    calls: HashMap<u64, oneshot::Sender<Result<Answer>>>,
    watches: HashMap<u64, mpsc::Sender<WatchFrame>>,
}

impl Connection {
    /// Returns a connection and what runs it; that returns why the connection has ended.
    pub(super) fn start(
        (reader, writer): (Reader, Writer),
        options: &RemoteOptions,
    ) -> (Arc<Self>, impl Future<Output = String> + use<>) {
        let (frames, queue) = mpsc::channel(QUEUED_FRAMES);
        let (control, controls) = mpsc::unbounded_channel();
        let connection = Arc::new(Self { frames, control, waiting: Mutex::default() });
        let idle_timeout = options.idle_timeout;
        let reading = connection.clone();
        let running = async move {
            tokio::select! {
                reason = reading.read_all(reader, idle_timeout) => reason,
                reason = write_all(writer, queue, controls, idle_timeout) => reason,
            }
        };
        (connection, running)
    }

    pub(super) fn is_open(&self) -> bool {
        self.waiting.lock().ended.is_none()
    }

    /// Ends all operations and watches of the connection.
    pub(super) fn close(&self, reason: &str) {
        let mut waiting = self.waiting.lock();
        *waiting = Waiting { ended: Some(reason.to_owned()), ..Waiting::default() };
    }

    fn broken(&self) -> Broken {
        let ended = self.waiting.lock().ended.clone();
        Broken(ended.unwrap_or_else(|| "it was closed".to_owned()))
    }

    /// Returns what waits for frames, to which more can be added: the connection has not ended.
    fn open(&self) -> std::result::Result<MutexGuard<'_, Waiting>, Broken> {
        let waiting = self.waiting.lock();
        match &waiting.ended {
            Some(reason) => Err(Broken(reason.clone())),
            None => Ok(waiting),
        }
    }

    /// Sends an operation and returns its answer. `is_sent` is set when the host may have got it.
    pub(super) async fn call(
        self: &Arc<Self>,
        id: u64,
        frame: Bytes,
        is_sent: &AtomicBool,
    ) -> std::result::Result<Result<Answer>, Broken> {
        let (answer, answered) = oneshot::channel();
        self.open()?.calls.insert(id, answer);
        // Removes it when this future is dropped, too.
        let _entry = Entry { connection: self, id };
        let slot = self.frames.reserve().await.map_err(|_| self.broken())?;
        is_sent.store(true, Ordering::Relaxed);
        slot.send(frame);
        answered.await.map_err(|_| self.broken())
    }

    /// Opens a watch.
    pub(super) fn watch(
        self: &Arc<Self>,
        id: u64,
        prefix: &str,
        after: Revision,
    ) -> std::result::Result<OpenWatch, Broken> {
        let (frames, received) = mpsc::channel(QUEUED_WATCH_FRAMES);
        self.open()?.watches.insert(id, frames);
        let watch = OpenWatch { connection: self.clone(), id, received };
        let message = ClientMessage::Watch { id, prefix: prefix.to_owned(), after };
        self.control.send(message).map_err(|_| self.broken())?;
        Ok(watch)
    }

    /// Reads frames until the connection ends; returns why.
    async fn read_all(&self, mut reader: Reader, limit: std::time::Duration) -> String {
        loop {
            let frame = match timeout(limit, reader.next()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(error))) => return error.to_string(),
                Ok(None) => return "the host has closed the connection".to_owned(),
                Err(_) => return format!("the host has sent nothing for {limit:?}"),
            };
            let taken = match decode(&frame) {
                Ok(message) => self.take(message, watch_cost(frame.len())),
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                return format!("the host has violated the protocol: {error}");
            }
        }
    }

    fn take(&self, message: HostMessage, cost: u64) -> std::result::Result<(), String> {
        let (id, frame) = match message {
            HostMessage::Ping => return Ok(()),
            HostMessage::Answer(id, answer) => {
                // An operation whose deadline is over does not wait any more.
                if let Some(waiting) = self.waiting.lock().calls.remove(&id) {
                    let _ = waiting.send(answer);
                }
                return Ok(());
            }
            HostMessage::Changes { id, revision, events, more } => {
                (id, WatchFrame::Part { revision, events, more, cost })
            }
            HostMessage::WatchEnded(id, error) => (id, WatchFrame::Ended(error)),
        };
        let mut waiting = self.waiting.lock();
        let Some(watch) = waiting.watches.get(&id) else { return Ok(()) };
        match watch.try_send(frame) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => {
                waiting.watches.remove(&id);
                Ok(())
            }
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(format!("watch {id} has more frames than its window"))
            }
        }
    }
}

/// An operation that waits for its answer.
struct Entry<'a> {
    connection: &'a Connection,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.connection.waiting.lock().calls.remove(&self.id);
    }
}

/// A watch on one connection. A drop ends it.
pub(super) struct OpenWatch {
    connection: Arc<Connection>,
    id: u64,
    received: mpsc::Receiver<WatchFrame>,
}

impl OpenWatch {
    /// Returns the next frame, or `None` if the connection has ended.
    pub(super) async fn next(&mut self) -> Option<WatchFrame> {
        let next = self.received.recv().await?;
        if let WatchFrame::Part { cost, .. } = next {
            let taken = ClientMessage::Taken { id: self.id, bytes: cost };
            // If the connection has ended, the frames that it delivered are still good.
            let _ = self.connection.control.send(taken);
        }
        Some(next)
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.connection.waiting.lock().watches.remove(&self.id);
        // If the connection has ended, so has the watch.
        let _ = self.connection.control.send(ClientMessage::Cancel(self.id));
    }
}

/// Writes frames until the connection ends; returns why.
async fn write_all(
    mut writer: Writer,
    mut queue: mpsc::Receiver<Bytes>,
    mut controls: mpsc::UnboundedReceiver<ClientMessage>,
    limit: std::time::Duration,
) -> String {
    let mut pings = ping_times();
    loop {
        let frame = tokio::select! {
            Some(frame) = queue.recv() => frame,
            Some(message) = controls.recv() => encode(&message),
            _ = pings.tick() => encode(&ClientMessage::Ping),
        };
        match timeout(limit, writer.send(frame)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return format!("the host has not taken a frame within {limit:?}"),
        }
    }
}
