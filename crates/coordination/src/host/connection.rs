//! One connection of a host: a reader, a writer, and a task per operation and watch.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use super::{Shared, execute, kib};
use crate::wire::{
    ClientMessage, Hello, HostMessage, MAX_CLIENT_BYTES, MAX_HOST_BYTES, PART_BYTES, Reader,
    Request, VERSION, WATCH_WINDOW_BYTES, Welcome, Writer, decode, encode, ping_times, split,
    watch_cost,
};
use crate::{Error, Event, ListRequest, Revision};

/// Frames that wait for the writer. Each holds its part of the host's memory.
const QUEUED_FRAMES: usize = 16;

struct Outgoing {
    frame: Bytes,
    _memory: OwnedSemaphorePermit,
}

/// Serves a connection until the client closes it or the host stops.
///
/// # Errors
/// Why the host has closed it.
pub(super) async fn serve(
    stream: TcpStream,
    shared: &Arc<Shared>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), String> {
    let (mut reader, mut writer) = split(stream, MAX_HOST_BYTES);
    let limit = shared.options.handshake_timeout;
    match timeout(limit, welcome(&mut reader, &mut writer, shared)).await {
        Ok(result) => result?,
        Err(_) => return Err(format!("no handshake within {limit:?}")),
    }
    reader.decoder_mut().set_max_frame_length(MAX_CLIENT_BYTES);
    let (out, queue) = mpsc::channel(QUEUED_FRAMES);
    let mut connection = Connection {
        shared: shared.clone(),
        out,
        calls: Arc::new(Semaphore::new(shared.options.max_calls)),
        tasks: JoinSet::new(),
        watches: HashMap::new(),
    };
    let write = write_all(&mut writer, queue, shared);
    tokio::pin!(write);
    tokio::select! {
        read = connection.read_all(&mut reader, &mut stop) => read?,
        written = &mut write => return written,
    }
    if !*stop.borrow() {
        return Ok(());
    }
    let Connection { out, mut tasks, watches, .. } = connection;
    watches.into_values().for_each(|watch| watch.task.abort());
    drop(out);
    // The writer ends when the last task has dropped its side of the queue.
    let drain = async { while tasks.join_next().await.is_some() {} };
    tokio::join!(drain, write).1
}

async fn welcome(reader: &mut Reader, writer: &mut Writer, shared: &Shared) -> Result<(), String> {
    let frame = match reader.next().await {
        Some(frame) => frame.map_err(|error| error.to_string())?,
        None => return Err("closed before the handshake".to_owned()),
    };
    // What does not speak this protocol gets no answer.
    let hello = Hello::decode(&frame)?;
    let welcome = match accept(&hello, shared).await {
        Ok(welcome) => welcome,
        Err(reason) => {
            let refusal = Welcome::refused(reason.clone()).encode();
            writer.send(refusal).await.map_err(|error| error.to_string())?;
            return Err(reason);
        }
    };
    writer.send(welcome.encode()).await.map_err(|error| error.to_string())
}

async fn accept(hello: &Hello, shared: &Shared) -> Result<Welcome, String> {
    if !(hello.lowest..=hello.highest).contains(&VERSION) {
        return Err(format!(
            "the client speaks versions {} to {} of the protocol, and the host {VERSION}",
            hello.lowest, hello.highest
        ));
    }
    let cluster = &shared.options.cluster;
    if hello.cluster != *cluster {
        return Err(format!(
            "the client expects cluster {:?}, and the host serves {cluster:?}",
            hello.cluster
        ));
    }
    let service = &shared.service;
    let identity = service.identity().await.map_err(|error| error.to_string())?;
    let first = ListRequest { limit: 1, keys_only: true, ..ListRequest::new("") };
    let page = service.list(&first).await.map_err(|error| error.to_string())?;
    Ok(Welcome::accepted(identity, page.revision))
}

/// Writes frames until the queue ends, and a ping when there is none.
async fn write_all(
    writer: &mut Writer,
    mut queue: mpsc::Receiver<Outgoing>,
    shared: &Shared,
) -> Result<(), String> {
    let mut pings = ping_times();
    let limit = shared.options.write_timeout;
    loop {
        let (frame, _memory) = tokio::select! {
            next = queue.recv() => match next {
                Some(next) => (next.frame, Some(next._memory)),
                None => return Ok(()),
            },
            _ = pings.tick() => (encode(&HostMessage::Ping), None),
        };
        match timeout(limit, writer.send(frame)).await {
            Ok(sent) => sent.map_err(|error| error.to_string())?,
            Err(_) => return Err(format!("the client has not taken a frame within {limit:?}")),
        }
    }
}

struct Watch {
    taken: watch::Sender<u64>,
    task: AbortHandle,
}

struct Connection {
    shared: Arc<Shared>,
    out: mpsc::Sender<Outgoing>,
    calls: Arc<Semaphore>,
    tasks: JoinSet<()>,
    watches: HashMap<u64, Watch>,
}

impl Connection {
    /// Reads frames until the connection ends or the host stops.
    async fn read_all(
        &mut self,
        reader: &mut Reader,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<(), String> {
        let limit = self.shared.options.idle_timeout;
        loop {
            let read = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
                read = timeout(limit, reader.next()) => read,
            };
            let frame = match read {
                Ok(Some(frame)) => frame.map_err(|error| error.to_string())?,
                Ok(None) => return Ok(()),
                Err(_) => return Err(format!("the client has sent nothing for {limit:?}")),
            };
            while self.tasks.try_join_next().is_some() {}
            let bytes = frame.len();
            let message = decode(&frame)?;
            drop(frame);
            match message {
                ClientMessage::Ping => {}
                ClientMessage::Call(id, request) => self.call(id, request, bytes).await,
                ClientMessage::Watch { id, prefix, after } => {
                    self.watch(id, prefix, after).await?;
                }
                ClientMessage::Taken { id, bytes } => {
                    if let Some(watch) = self.watches.get(&id) {
                        watch.taken.send_modify(|taken| *taken = taken.saturating_add(bytes));
                    }
                }
                ClientMessage::Cancel(id) => {
                    if let Some(watch) = self.watches.remove(&id) {
                        watch.task.abort();
                    }
                }
            }
        }
    }

    /// Starts an operation, when there are a slot and memory for it and its answer.
    async fn call(&mut self, id: u64, request: Request, bytes: usize) {
        let slot = self.calls.clone().acquire_owned().await.expect("never closed");
        let memory = reserve(&self.shared, bytes + request.answer_bytes()).await;
        let (shared, out) = (self.shared.clone(), self.out.clone());
        self.tasks.spawn(async move {
            let answer = execute(&*shared.service, request).await;
            let frame = encode(&HostMessage::Answer(id, answer));
            // If the queue has ended, so has the connection.
            let _ = out.send(Outgoing { frame, _memory: memory }).await;
            drop(slot);
        });
    }

    async fn watch(&mut self, id: u64, prefix: String, after: Revision) -> Result<(), String> {
        self.watches.retain(|_, watch| !watch.task.is_finished());
        if self.watches.contains_key(&id) {
            return Err(format!("the client has opened watch {id} twice"));
        }
        let most = self.shared.options.max_watches;
        if self.watches.len() >= most {
            let error = Error::Full(format!("the connection has {most} watches"));
            let _ = end_watch(&self.shared, id, error, &self.out).await;
            return Ok(());
        }
        let (taken, window) = watch::channel(0);
        let (shared, out) = (self.shared.clone(), self.out.clone());
        let task = self.tasks.spawn(async move {
            // If the queue has ended, so has the connection.
            let _ = follow(&shared, id, &prefix, after, window, &out).await;
        });
        self.watches.insert(id, Watch { taken, task });
        Ok(())
    }
}

async fn reserve(shared: &Shared, bytes: usize) -> OwnedSemaphorePermit {
    // A request that takes more than all of the memory runs alone.
    let wanted = kib(bytes).min(kib(shared.options.memory_bytes));
    shared.memory.clone().acquire_many_owned(wanted).await.expect("never closed")
}

/// Sends the changes of a watch. The next revision is read from the service only when the client
/// has taken enough of those before, so that a slow client costs no memory: when the history that
/// it needs is gone, the service ends the watch.
async fn follow(
    shared: &Shared,
    id: u64,
    prefix: &str,
    after: Revision,
    mut taken: watch::Receiver<u64>,
    out: &mpsc::Sender<Outgoing>,
) -> Option<()> {
    let mut changes = shared.service.watch(prefix, after);
    let mut sent = 0_u64;
    loop {
        taken.wait_for(|taken| sent.saturating_sub(*taken) < WATCH_WINDOW_BYTES).await.ok()?;
        let next = changes.next().await?;
        let changes = match next {
            Ok(changes) => changes,
            Err(error) => return end_watch(shared, id, error, out).await,
        };
        let revision = changes.revision;
        let mut parts = parts(changes.events).into_iter().peekable();
        while let Some((events, bytes)) = parts.next() {
            let memory = reserve(shared, bytes).await;
            let more = parts.peek().is_some();
            let frame = encode(&HostMessage::Changes { id, revision, events, more });
            sent += watch_cost(frame.len());
            out.send(Outgoing { frame, _memory: memory }).await.ok()?;
        }
    }
}

/// Sends the end of a watch.
async fn end_watch(
    shared: &Shared,
    id: u64,
    error: Error,
    out: &mpsc::Sender<Outgoing>,
) -> Option<()> {
    let memory = reserve(shared, 1).await;
    let frame = encode(&HostMessage::WatchEnded(id, error));
    out.send(Outgoing { frame, _memory: memory }).await.ok()
}

/// Splits the changes of a revision into frames, with a bound of the bytes of each.
fn parts(events: Vec<Event>) -> Vec<(Vec<Event>, usize)> {
    let mut parts = Vec::new();
    let (mut part, mut bytes) = (Vec::new(), 64);
    for event in events {
        let value = event.entry.as_ref().map_or(0, |entry| entry.key.len() + entry.value.len());
        bytes += event.key.len() + value + 64;
        part.push(event);
        if bytes >= PART_BYTES {
            parts.push((std::mem::take(&mut part), std::mem::replace(&mut bytes, 64)));
        }
    }
    if !part.is_empty() {
        parts.push((part, bytes));
    }
    parts
}
