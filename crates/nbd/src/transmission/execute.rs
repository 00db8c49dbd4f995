//! Execution of requests by the disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, sleep_until};

use super::Session;
use super::check::{Action, Failure};
use super::reply::Reply;
use crate::budget::Reservation;
use crate::counters::{add, subtract};
use crate::disk::{DiskError, Part};
use crate::protocol::{Command, Errno};

/// A request that is being executed, in one or more pieces.
pub(crate) struct InProgress {
    session: Arc<Session>,
    cookie: u64,
    command: Command,
    /// Number of pieces that have not ended.
    left: AtomicU32,
    /// The failure of the first piece that failed.
    failure: Mutex<Option<Failure>>,
}

impl InProgress {
    pub(crate) fn new(
        session: &Arc<Session>,
        cookie: u64,
        command: Command,
        pieces: u32,
    ) -> Arc<Self> {
        add(&session.counters.requests_in_flight, 1);
        Arc::new(Self {
            session: Arc::clone(session),
            cookie,
            command,
            left: AtomicU32::new(pieces),
            failure: Mutex::new(None),
        })
    }

    /// Records the end of a piece. Returns whether it was the last one.
    fn end(&self, result: Result<(), &Failure>) -> bool {
        if let Err(failure) = result {
            self.failure.lock().get_or_insert_with(|| failure.clone());
        }
        // All pieces run in the task of the connection.
        self.left.fetch_sub(1, Ordering::Relaxed) == 1
    }

    fn has_failed(&self) -> bool {
        self.failure.lock().is_some()
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let counters = &self.session.counters;
        subtract(&counters.requests_in_flight, 1);
        if self.has_failed() {
            add(&counters.command(self.command).errors, 1);
        }
    }
}

/// A request, or a piece of one.
pub(crate) struct Job {
    pub(crate) request: Arc<InProgress>,
    pub(crate) action: Action,
    pub(crate) at: u64,
    pub(crate) len: u32,
    /// What is to be written.
    pub(crate) data: Bytes,
    pub(crate) reservation: Reservation,
}

/// Executes jobs concurrently and sends their replies, until the channel of jobs is closed and all
/// have ended. Those that have not ended by the end of the grace period are dropped.
pub(crate) async fn execute(
    session: &Session,
    mut jobs: UnboundedReceiver<Job>,
    replies: UnboundedSender<Reply>,
) {
    let mut running = FuturesUnordered::new();
    // Set when no further job can arrive.
    let mut deadline = None;
    while deadline.is_none() || !running.is_empty() {
        tokio::select! {
            Some(reply) = running.next(), if !running.is_empty() => {
                if let Some(reply) = reply {
                    // The channel is closed if the client is gone.
                    let _ = replies.send(reply);
                }
                session.leave();
            }
            job = jobs.recv(), if deadline.is_none() => match job {
                Some(job) => running.push(run(job)),
                None => deadline = Some(session.end_by()),
            },
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => break,
        }
    }
}

/// Executes a job. Returns what there is to reply.
async fn run(job: Job) -> Option<Reply> {
    match job.action {
        Action::Read { is_unfragmented } => Some(read(job, is_unfragmented).await),
        Action::Status { max_extents } => Some(status(job, max_extents).await),
        _ => change(job).await,
    }
}

async fn read(job: Job, is_unfragmented: bool) -> Reply {
    let Job { request, at, len, mut reservation, .. } = job;
    let session = &request.session;
    let result = session.disk.read(at, len).await.map_err(|error| session.failure(error));
    let result = result.and_then(|parts| {
        let bytes: usize = parts.iter().map(Part::len).sum();
        match bytes == len as usize {
            true => Ok(parts),
            false => {
                Err(Failure::new(Errno::Io, "the disk returned another number of bytes than asked"))
            }
        }
    });
    let is_last = request.end(result.as_ref().map(drop));
    let cookie = request.cookie;
    let is_structured = session.rules.is_structured;
    match result {
        Ok(parts) => {
            let data = |part: &Part| if matches!(part, Part::Data(_)) { part.len() } else { 0 };
            reservation.shrink(parts.iter().map(data).sum::<usize>() as u32);
            match () {
                () if !is_structured => Reply::simple_data(cookie, parts, reservation),
                () if is_unfragmented => Reply::unfragmented(at, cookie, parts, reservation),
                () => Reply::chunks(at, is_last, cookie, parts, reservation),
            }
        }
        Err(failure) => {
            reservation.shrink(0);
            match is_structured {
                true => Reply::failure_at(at, is_last, cookie, &failure, reservation),
                false => Reply::failure(false, cookie, &failure, reservation),
            }
        }
    }
}

async fn status(job: Job, max_extents: usize) -> Reply {
    let Job { request, at, len, mut reservation, .. } = job;
    let session = &request.session;
    let result = session.disk.status(at, len.into(), max_extents).await;
    let failure = match result {
        Ok(mut extents) => {
            extents.truncate(max_extents);
            match Reply::status(request.cookie, len, &extents, reservation) {
                Ok(mut reply) => {
                    request.end(Ok(()));
                    let bytes = reply.len() as u32;
                    reply.reservation.shrink(bytes);
                    return reply;
                }
                Err(unused) => {
                    reservation = unused;
                    Failure::new(Errno::Io, "the disk returned no extents")
                }
            }
        }
        Err(error) => session.failure(error),
    };
    request.end(Err(&failure));
    reservation.shrink(0);
    Reply::failure(true, request.cookie, &failure, reservation)
}

/// Executes everything that has no data in its reply.
async fn change(job: Job) -> Option<Reply> {
    let Job { request, action, at, len, data, mut reservation } = job;
    let session = &request.session;
    let disk = &session.disk;
    let bytes = u64::from(len);
    let result = match action {
        // An earlier piece has failed, so the request fails anyway.
        _ if request.has_failed() => Ok(()),
        Action::Write => disk.write(at, data).await,
        Action::Flush => disk.flush().await,
        Action::Discard => disk.discard(at, bytes).await,
        Action::Prefetch => disk.prefetch(at, bytes).await,
        Action::Zero { mode, only_if_fast } => {
            if only_if_fast && !disk.is_zero_fast(at, bytes, mode) {
                let text = "zeroing is not faster than writing here";
                let failure = Failure::new(Errno::NotSupported, text);
                request.end(Err(&failure));
                let is_structured = session.rules.is_structured;
                return Some(Reply::failure(is_structured, request.cookie, &failure, reservation));
            }
            disk.zero(at, bytes, mode).await
        }
        Action::Nothing | Action::Read { .. } | Action::Status { .. } => Ok(()),
    };
    let result = result.map_err(|error: DiskError| session.failure(error));
    if !request.end(result.as_ref().copied()) {
        return None;
    }
    reservation.shrink(0);
    let cookie = request.cookie;
    let is_structured = session.rules.is_structured;
    Some(match &*request.failure.lock() {
        Some(failure) => Reply::failure(is_structured, cookie, failure, reservation),
        None if action == Action::Nothing && request.command == Command::Read && is_structured => {
            Reply::empty_read(cookie, reservation)
        }
        None => Reply::success(cookie, reservation),
    })
}
