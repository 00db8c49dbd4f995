//! The task around the shard: it collects what arrives, lets the shard take a turn, sends what the
//! turn has put out, and waits for the next event.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_wal::{Durable, LogOffset, Wal};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::rate::Rate;
use super::translate::{Arriving, PeerOutput, Sent, from_peer, from_pull, to_peer, to_pull};
use crate::messages::{PullFrame, PullRequest, data_bytes};
use crate::net::{Directory, Held, Local, Net, NetEvent, PullSender, PullStream, SenderState};
use crate::shard::{Input, Notice, Output, ServerState, Shard, ShardFailure};
use crate::types::{GroupId, ServerId};

/// Frames of a pull that wait for their connection: those with the volumes come together.
const STREAM_FRAMES: usize = 8;

/// Batches of a pull that have arrived and wait for the store.
const ARRIVED_BATCHES: usize = 4;

/// What arrives for the shard, from any thread.
#[derive(Default)]
pub(super) struct Events {
    queue: Mutex<VecDeque<Event>>,
    notify: Notify,
}

/// Something that has arrived.
pub(super) enum Event {
    Net(NetEvent),
    Input(Input),
    /// The driver ends after a last turn.
    Stop,
}

impl Events {
    pub(super) fn push(&self, event: Event) {
        self.queue.lock().push_back(event);
        self.notify.notify_one();
    }

    pub(super) fn input(&self, input: Input) {
        self.push(Event::Input(input));
    }

    /// Takes all that has arrived.
    pub(super) fn take(&self) -> VecDeque<Event> {
        std::mem::take(&mut self.queue.lock())
    }

    /// Wakes the driver without an event.
    pub(super) fn wake(&self) {
        self.notify.notify_one();
    }
}

/// A request whose answer is awaited.
struct Waiting {
    connection: u64,
    request_id: u64,
    _held: Held,
}

/// What the driver of a shard works with.
pub(super) struct Driver {
    pub(super) shard: Shard,
    pub(super) events: Arc<Events>,
    pub(super) net: Arc<Net>,
    /// What this server states in handshakes, and what it knows of others, for pulls.
    pub(super) local: Local,
    pub(super) directory: Arc<Mutex<Directory>>,
    pub(super) addresses: Arc<Mutex<HashMap<ServerId, String>>>,
    pub(super) notices: mpsc::UnboundedSender<Notice>,
    /// What the metrics show.
    pub(super) view: Arc<Mutex<super::ServerView>>,
    pub(super) started: Instant,
    /// Bounds of the blocks that pulls send and receive.
    pub(super) sending: Arc<Rate>,
    pub(super) receiving: Arc<Rate>,
}

/// The state of the driver's task.
#[derive(Default)]
struct Streams {
    waiting: BTreeMap<u64, Waiting>,
    next_ticket: u64,
    next_stream: u64,
    /// Frames on their way to the connections of pulls, by stream.
    sources: HashMap<u64, (GroupId, Sent, mpsc::Sender<crate::net::PullFrame>)>,
    /// Pulls of this server, by attempt, each with the permits for its batches.
    targets: HashMap<u64, (JoinHandle<()>, Arc<Semaphore>)>,
    /// Whether this server is connected to others, of which that was logged.
    is_connected: BTreeMap<ServerId, bool>,
}

impl Driver {
    /// Runs the shard until it fails, or [`Event::Stop`] arrives. Then the log is closed, unless
    /// its device hangs.
    pub(super) async fn run(mut self) -> Result<(), ShardFailure> {
        let mut streams = Streams::default();
        let mut inputs = VecDeque::new();
        let mut out = Output::default();
        let mut durable: Option<(LogOffset, Durable)> = None;
        loop {
            let is_stopping = self.collect(&mut streams, &mut inputs);
            let now = self.started.elapsed();
            self.shard.turn(now.as_millis() as u64, &mut inputs, &mut out)?;
            self.dispatch(&mut streams, &mut out);
            self.show();
            if is_stopping {
                if self.shard.log_is_stalled() {
                    tracing::warn!(
                        "the device of the write-ahead log has completed nothing for 2 s: the log \
                         is not closed, and the next start recovers"
                    );
                    return Ok(());
                }
                return close(self.shard.into_wal()).await;
            }
            let awaited = self.shard.awaits_log();
            if durable.as_ref().map(|(offset, _)| *offset) != awaited {
                let wait = |offset| (offset, self.shard.wal().wait_durable(offset));
                durable = awaited.map(wait);
            }
            let wakes_at = Duration::from_millis(self.shard.wakes_at());
            let (wal, waits_for_space) = (self.shard.wal(), self.shard.waits_for_space());
            let has_space = async {
                match waits_for_space {
                    true => wal.wait_space().await,
                    false => std::future::pending().await,
                }
            };
            let is_durable = async {
                match &mut durable {
                    // A failed log is reported by the next turn.
                    Some((_, durable)) => drop(durable.await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.events.notify.notified() => {}
                () = is_durable => durable = None,
                () = has_space => {}
                () = tokio::time::sleep_until((self.started + wakes_at).into()) => {}
            }
        }
    }

    /// Takes what has arrived. Returns whether the driver is to end.
    fn collect(&mut self, streams: &mut Streams, inputs: &mut VecDeque<Input>) -> bool {
        let mut is_stopping = false;
        for event in self.events.take() {
            match event {
                Event::Input(input) => inputs.push_back(input),
                Event::Stop => is_stopping = true,
                Event::Net(event) => self.net_event(event, streams, inputs),
            }
        }
        is_stopping
    }

    fn net_event(&self, event: NetEvent, streams: &mut Streams, inputs: &mut VecDeque<Input>) {
        match event {
            NetEvent::Peer { server, frame, held: _held } => {
                if let crate::net::PeerFrame::Messages(messages) = &frame {
                    let SenderState { free_slots, is_stalled, .. } = messages.sender;
                    let state = ServerState { free_slots, is_stalled };
                    inputs.push_back(Input::PeerState { server, state });
                }
                let messages = from_peer(frame).into_iter();
                inputs.extend(messages.map(|message| Input::Peer { server, message }));
            }
            NetEvent::PeerUp { server } => {
                streams.is_connected.insert(server, true);
                tracing::info!(%server, "connected to a server");
            }
            NetEvent::PeerDown { server, is_gone } => {
                // The end of a connection is followed by a refusal if the process has ended.
                match streams.is_connected.insert(server, false) {
                    Some(true) => tracing::info!(%server, "the connection to a server has ended"),
                    Some(false) => {}
                    None => tracing::info!(%server, "a server does not run at its address"),
                }
                inputs.push_back(Input::PeerDown { server, is_gone });
            }
            NetEvent::PeerRefused { server, error } => {
                tracing::warn!(%server, %error, "a handshake with a server has failed");
            }
            NetEvent::Client { connection, request_id, request, held, .. } => {
                streams.next_ticket += 1;
                let ticket = streams.next_ticket;
                streams.waiting.insert(ticket, Waiting { connection, request_id, _held: held });
                inputs.push_back(Input::Client { ticket, request });
            }
            NetEvent::ClientGone { .. } => {}
            NetEvent::Pull { server, pull, sender } => {
                streams.next_stream += 1;
                let stream = streams.next_stream;
                tracing::info!(%server, group = %pull.group, "a server pulls blocks");
                let (frames, queue) = mpsc::channel(STREAM_FRAMES);
                streams.sources.insert(stream, (pull.group, Sent::default(), frames));
                let events = Arc::clone(&self.events);
                let rate = Arc::clone(&self.sending);
                tokio::spawn(send_stream(stream, sender, queue, events, rate));
                inputs.push_back(Input::Pull { stream, request: from_pull(&pull) });
            }
        }
    }

    /// Sends what a turn has put out.
    fn dispatch(&self, streams: &mut Streams, out: &mut Output) {
        let mut raft: BTreeMap<ServerId, Vec<_>> = BTreeMap::new();
        for (server, message) in out.messages.drain(..) {
            match to_peer(message) {
                PeerOutput::Raft(message) => raft.entry(server).or_default().push(message),
                PeerOutput::Frame(frame) => drop(self.net.send_peer_frame(server, frame)),
            }
        }
        for (server, messages) in raft {
            if let Err(error) = self.net.send_peer(server, messages) {
                tracing::error!(%server, %error, "a message cannot be sent");
            }
        }
        for (ticket, answer) in out.answers.drain(..) {
            if let Some(waiting) = streams.waiting.remove(&ticket) {
                self.net.answer(waiting.connection, waiting.request_id, &answer);
            }
        }
        for (stream, frame) in out.frames.drain(..) {
            let is_last = matches!(frame, PullFrame::End | PullFrame::Failed);
            let Some((group, sent, queue)) = streams.sources.get_mut(&stream) else { continue };
            let frames = sent.frames(*group, frame);
            let is_open = frames.into_iter().all(|frame| queue.try_send(frame).is_ok());
            if is_last || !is_open {
                streams.sources.remove(&stream);
            }
            if !is_open {
                self.events.input(Input::PullClosed { stream });
            }
        }
        // First, since a pull may be given up in the turn in which it begins.
        for (attempt, server, request) in out.pulls.drain(..) {
            streams.targets.retain(|_, (target, _)| !target.is_finished());
            streams.targets.insert(attempt, self.pull(attempt, server, request));
        }
        for attempt in out.cancelled.drain(..) {
            if let Some((target, _)) = streams.targets.remove(&attempt) {
                target.abort();
            }
        }
        for attempt in out.taken.drain(..) {
            if let Some((_, permits)) = streams.targets.get(&attempt) {
                permits.add_permits(1);
            }
        }
        // They keep the blocks of all ops. The feature is on in a build of the whole workspace.
        #[cfg(feature = "simulation")]
        out.applied.clear();
        for notice in out.notices.drain(..) {
            match notice {
                // There may be one for each message, so they do not wait for the registry.
                Notice::UnknownGroup { group } => {
                    tracing::debug!(%group, "a message for a group that is not here");
                }
                notice => drop(self.notices.send(notice)),
            }
        }
    }

    /// Begins to pull blocks from another server.
    fn pull(
        &self,
        attempt: u64,
        server: ServerId,
        request: PullRequest,
    ) -> (JoinHandle<()>, Arc<Semaphore>) {
        let group = request.group;
        tracing::info!(%group, %server, "pulls the blocks of a group");
        let address = self.addresses.lock().get(&server).cloned();
        let (local, directory) = (self.local, Arc::clone(&self.directory));
        let (events, rate) = (Arc::clone(&self.events), Arc::clone(&self.receiving));
        let permits = Arc::new(Semaphore::new(ARRIVED_BATCHES));
        let arrived = Arc::clone(&permits);
        let task = tokio::spawn(async move {
            let input = |frame| events.input(Input::PullFrame { attempt, group, frame });
            let Some(address) = address else {
                input(PullFrame::Failed);
                return;
            };
            let pull = to_pull(&request);
            let stream = PullStream::connect(&local, &directory, &address, server, &pull).await;
            let mut arriving = Arriving::default();
            let ended = match stream {
                Err(error) => Err(error),
                Ok(mut stream) => loop {
                    match stream.next().await {
                        Ok(frame) => {
                            let Some(frame) = arriving.frame(frame) else { continue };
                            if let PullFrame::Batch { items, .. } = &frame {
                                // Later rounds race with writes, so they are not slowed down.
                                let bytes = if request.is_first { data_bytes(items) } else { 0 };
                                let (permit, ()) =
                                    tokio::join!(arrived.acquire(), rate.take(bytes));
                                // Given back when the store has the batch.
                                permit.expect("it is never closed").forget();
                            }
                            let is_last = matches!(frame, PullFrame::End | PullFrame::Failed);
                            input(frame);
                            if is_last {
                                break Ok(());
                            }
                        }
                        Err(error) => break Err(error),
                    }
                },
            };
            if let Err(error) = ended {
                tracing::warn!(%group, %server, %error, "a pull has failed");
                input(PullFrame::Failed);
            }
        });
        (task, permits)
    }

    /// What other servers and the metrics see of this one.
    fn show(&self) {
        let is_stalled = self.shard.is_stalled();
        let (slots, free_slots) = self.shard.slots();
        self.net.set_sender_state(SenderState {
            free_slots,
            is_stalled,
            drops_entries: self.shard.refuses_entries(),
        });
        let mut view = self.view.lock();
        view.counters = self.shard.counters();
        (view.slots, view.free_slots) = (slots, free_slots);
        view.overlay_bytes = self.shard.overlay_bytes() as u64;
        match (view.is_stalled, is_stalled) {
            (false, true) => tracing::warn!(
                device = if self.shard.log_is_stalled() { "write-ahead log" } else { "store" },
                "a device has completed nothing for 2 s; this server leads no group until it does"
            ),
            (true, false) => tracing::info!("the devices complete requests again"),
            _ => {}
        }
        view.is_stalled = is_stalled;
        view.is_checkpointing = self.shard.is_checkpointing();
        view.log = self.shard.wal().stats();
        view.store = self.shard.store_counters();
    }
}

/// Closes the log: what was appended becomes durable, and the next opening knows where it ends.
async fn close(wal: Wal) -> Result<(), ShardFailure> {
    let closing = tokio::task::spawn_blocking(move || wal.close());
    match closing.await {
        Ok(closed) => closed.map_err(ShardFailure::Log),
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Sends the frames of a stream. After each one, the shard may read the next blocks.
async fn send_stream(
    stream: u64,
    mut sender: PullSender,
    mut queue: mpsc::Receiver<crate::net::PullFrame>,
    events: Arc<Events>,
    rate: Arc<Rate>,
) {
    // Pulls of changes may be later rounds, which race with writes.
    let mut is_bounded = false;
    while let Some(frame) = queue.recv().await {
        match &frame {
            crate::net::PullFrame::Begin(begin) => is_bounded = begin.sends_everything,
            crate::net::PullFrame::Batch(batch) if is_bounded => {
                rate.take(data_bytes(&batch.items)).await;
            }
            _ => {}
        }
        if sender.send(&frame).await.is_err() {
            break;
        }
        // The state frames that follow the first one have been queued together with it.
        if queue.is_empty() {
            events.input(Input::PullReady { stream });
        }
    }
    events.input(Input::PullClosed { stream });
}
