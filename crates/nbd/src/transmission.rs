//! Transmission: the requests of a connection and their replies.
//!
//! A connection is one task. It reads requests, executes them concurrently, and writes the replies
//! in the order in which they become available. It stops reading while its memory is used up.

mod check;
mod execute;
mod input;
mod output;
mod reply;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};

use self::check::{Action, Failure, MAX_EXTENTS, Rules, check};
use self::execute::{InProgress, Job, execute};
use self::input::Input;
use self::output::write_replies;
use self::reply::Reply;
use crate::budget::{Budget, PIECE_BYTES};
use crate::counters::{Counters, add};
use crate::disk::{Disk, DiskError, Extent};
use crate::handshake::Negotiated;
use crate::protocol::{Command, Errno, MAX_PAYLOAD, Request};

/// Time for a client to close the connection that the server has ended. Without it, replies that
/// the client has not received yet could be lost, because it had sent more.
const LINGER: Duration = Duration::from_secs(1);
/// What such a client may still send.
const LINGER_BYTES: usize = 4 << 20;

/// What a transmission needs of its server.
pub(crate) struct Environment {
    pub(crate) budget: Budget,
    pub(crate) counters: Arc<Counters>,
    pub(crate) stall_timeout: Duration,
    pub(crate) grace: Duration,
}

/// How a transmission ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The client has sent `NBD_CMD_DISC`.
    Disconnected,
    /// The client has closed the connection between two requests.
    Closed,
    /// The server stops, or the export was removed, or the disk is fenced.
    Stopped,
    /// The client has violated the protocol.
    Violation(&'static str),
    /// The connection failed, or the client stopped sending or receiving.
    Failed(io::Error),
}

/// State that the parts of a connection share.
pub(crate) struct Session {
    disk: Arc<dyn Disk>,
    rules: Rules,
    budget: Budget,
    counters: Arc<Counters>,
    grace: Duration,
    /// When the requests in flight are dropped, once the connection has begun to end.
    end_by: OnceLock<Instant>,
    /// Jobs that have not been replied to.
    in_flight: AtomicUsize,
    /// Notified when there are none.
    idle: Notify,
    /// Set when the disk is fenced.
    fenced: watch::Sender<bool>,
}

impl Session {
    /// Translates an error of the disk. If it is fenced, the connection begins to end.
    fn failure(&self, error: DiskError) -> Failure {
        if error == DiskError::Fenced {
            self.fenced.send_replace(true);
        }
        error.into()
    }

    /// Begins the grace period, if it has not begun. Returns its end.
    fn end_by(&self) -> Instant {
        *self.end_by.get_or_init(|| Instant::now() + self.grace)
    }

    fn leave(&self) {
        if self.in_flight.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.idle.notify_one();
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0
    }
}

/// What makes a connection end with errors, because the disk does not come back: the removal of
/// the export, and a fence.
struct Stops([watch::Receiver<bool>; 2]);

impl Stops {
    fn is_set(&self) -> bool {
        self.0.iter().any(|stop| *stop.borrow())
    }

    /// Waits until one is set. A sender that is gone counts too.
    async fn wait(&mut self) {
        let [export, disk] = &mut self.0;
        tokio::select! {
            _ = export.wait_for(|is_set| *is_set) => {}
            _ = disk.wait_for(|is_set| *is_set) => {}
        }
    }
}

/// Serves the requests of a client until the connection ends.
///
/// After `stop` no further request is read. Those in flight are completed, and the others stay
/// without a reply: a client that reconnects sends them again, whereas it would report an error
/// reply as an I/O error.
pub(crate) async fn transmit<R, W>(
    reader: R,
    mut writer: W,
    negotiated: Negotiated,
    environment: Environment,
    mut stop: watch::Receiver<bool>,
) -> End
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let Negotiated { export, size_bytes, is_read_only, is_structured, has_allocation } = negotiated;
    let Environment { budget, counters, stall_timeout, grace } = environment;
    let session = Arc::new(Session {
        disk: Arc::clone(&export.0.disk),
        rules: Rules { size_bytes, is_read_only, is_structured, has_allocation },
        budget,
        counters,
        grace,
        end_by: OnceLock::new(),
        in_flight: AtomicUsize::new(0),
        idle: Notify::new(),
        fenced: watch::Sender::new(false),
    });
    let mut stops = Stops([export.stop(), session.fenced.subscribe()]);
    let mut input = Input::new(reader, stall_timeout);
    let (jobs, queued_jobs) = unbounded_channel();
    let (replies, mut queued_replies) = unbounded_channel();
    let gone = Notify::new();
    // Both channels are bounded by the memory that is reserved for what is in them.
    let reading = {
        let replies = replies.clone();
        async {
            tokio::select! {
                end = read_requests(&mut input, &session, &mut stops, jobs, replies) => {
                    end.unwrap_or_else(End::Failed)
                }
                () = gone.notified() => End::Closed,
                // A sender that is gone counts too.
                _ = stop.wait_for(|is_set| *is_set) => End::Stopped,
            }
        }
    };
    let writing = async {
        let result = write_replies(&mut writer, &mut queued_replies, stall_timeout).await;
        if result.is_err() {
            gone.notify_one();
            // Releases the memory of replies that cannot be written.
            while queued_replies.recv().await.is_some() {}
        }
        result
    };
    let executing = execute(&session, queued_jobs, replies);
    let (end, (), written) = tokio::join!(reading, executing, writing);
    let end = match written {
        Ok(()) => end,
        Err(error) => End::Failed(error),
    };
    if matches!(end, End::Stopped | End::Violation(_)) {
        let closing = async {
            if writer.shutdown().await.is_ok() {
                input.discard(LINGER_BYTES).await;
            }
        };
        // It is closed either way.
        let _ = timeout(LINGER, closing).await;
    }
    end
}

/// Reads requests and passes them on, until the connection is to end.
async fn read_requests<R: AsyncRead + Unpin>(
    input: &mut Input<R>,
    session: &Arc<Session>,
    stops: &mut Stops,
    jobs: UnboundedSender<Job>,
    replies: UnboundedSender<Reply>,
) -> io::Result<End> {
    let counters = &session.counters;
    loop {
        if stops.is_set() && (session.is_idle() || Instant::now() >= session.end_by()) {
            return Ok(End::Stopped);
        }
        let header = tokio::select! {
            biased;
            header = input.header() => header?,
            () = completed(stops, session) => return Ok(End::Stopped),
        };
        let Some(header) = header else { return Ok(End::Closed) };
        let Some(request) = Request::decode(&header) else {
            return Ok(End::Violation("a request does not begin with the magic"));
        };
        let command = request.command();
        match command {
            Some(command) => add(&counters.command(command).requests, 1),
            None => add(&counters.unknown_requests, 1),
        }
        let checked = match command {
            Some(Command::Disconnect) => return Ok(End::Disconnected),
            _ if stops.is_set() => Err(Failure::SHUTDOWN),
            Some(command) => check(&request, command, &session.rules),
            None => Err(Failure::new(Errno::Invalid, "unknown command")),
        };
        let payload = if command == Some(Command::Write) { request.len } else { 0 };
        let is_too_long = payload > MAX_PAYLOAD;
        match (checked, command) {
            (Ok(action), Some(command)) if !is_too_long => {
                add(&counters.command(command).bytes, request.len.into());
                submit(input, session, &request, command, action, &jobs).await?;
            }
            (checked, _) => {
                let too_long = Failure::new(Errno::Invalid, "writes of more than 32 MiB");
                let failure = checked.err().unwrap_or(too_long);
                let reservation = session.budget.acquire(0).await;
                if !is_too_long {
                    input.skip(payload).await?;
                }
                if let Some(command) = command {
                    add(&counters.command(command).errors, 1);
                }
                let is_structured = session.rules.is_structured;
                let cookie = request.cookie;
                let reply = Reply::failure(is_structured, cookie, &failure, reservation);
                // The channel is closed if the client is gone.
                let _ = replies.send(reply);
            }
        }
        if is_too_long {
            return Ok(End::Violation("a write of more than 32 MiB"));
        }
    }
}

/// Waits until the connection is to end, and then until it has completed what is in flight, for the
/// grace period at most.
async fn completed(stops: &mut Stops, session: &Session) {
    stops.wait().await;
    let idle = async {
        while !session.is_idle() {
            session.idle.notified().await;
        }
    };
    // What is in flight is dropped in the end.
    let _ = timeout_at(session.end_by(), idle).await;
}

/// Passes a request on, in pieces if it is large, each when there is memory for it.
async fn submit<R: AsyncRead + Unpin>(
    input: &mut Input<R>,
    session: &Arc<Session>,
    request: &Request,
    command: Command,
    action: Action,
    jobs: &UnboundedSender<Job>,
) -> io::Result<()> {
    let is_cut = match action {
        Action::Write => true,
        // Other replies to reads are sent when all data is there, as an error excludes data.
        Action::Read { is_unfragmented } => session.rules.is_structured && !is_unfragmented,
        _ => false,
    };
    let first = if is_cut { first_piece(request.at, request.len) } else { request.len };
    let pieces = 1 + (request.len - first).div_ceil(PIECE_BYTES);
    let in_progress = InProgress::new(session, request.cookie, command, pieces);
    let (mut at, mut left, mut len) = (request.at, request.len, first);
    loop {
        let reserved_bytes = match action {
            Action::Read { .. } | Action::Write => len,
            Action::Status { max_extents } => status_bytes(max_extents),
            _ => 0,
        };
        let reservation = session.budget.acquire(reserved_bytes).await;
        let data = match action {
            Action::Write => input.payload(len).await?,
            _ => Bytes::new(),
        };
        session.in_flight.fetch_add(1, Ordering::Relaxed);
        let request = Arc::clone(&in_progress);
        let job = Job { request, action, at, len, data, reservation };
        // The receiver lives until this sender is dropped.
        let _ = jobs.send(job);
        at += u64::from(len);
        left -= len;
        if left == 0 {
            return Ok(());
        }
        len = left.min(PIECE_BYTES);
    }
}

/// Length of the first piece of a request. A request that needs more than one is cut at multiples
/// of their length.
fn first_piece(at: u64, len: u32) -> u32 {
    match len <= PIECE_BYTES {
        true => len,
        false => PIECE_BYTES - (at % u64::from(PIECE_BYTES)) as u32,
    }
}

/// Memory of the extents of a disk and of the reply that is made of them.
fn status_bytes(max_extents: usize) -> u32 {
    const { assert!(MAX_EXTENTS * 24 < PIECE_BYTES as usize) };
    (max_extents * (size_of::<Extent>() + 8)) as u32
}
