//! A connection: requests in, answers out, and which thread executes what.
//!
//! Requests are executed on the connection's own task as long as they need only memory. From the
//! first one that would have to block, everything that has arrived with it is executed on a
//! blocking thread: one change of threads for a whole pipeline. The answers to what arrived
//! together are written together.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::coop::consume_budget;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::answers::ERROR_BYTES;
use super::buffers::UNCOUNTED_BYTES;
use super::command::{self, Mode, Outcome};
use super::request::{Limits, Request, Requests};
use super::{Client, Server, SlowClientLimits};

/// Answers are written when they reach this size, even if more requests have arrived.
const WRITE_THRESHOLD_BYTES: usize = 1 << 20;
/// The maximum size of further requests read while answers cannot be written.
const MAX_READ_AHEAD_BYTES: usize = 64 << 20;
/// The number of arguments, on the connection's task, that consume one unit of its cooperative
/// budget.
const ARGS_PER_STEP: usize = 64;
/// The maximum number of requests that move to a blocking thread together.
const MAX_BATCH_REQUESTS: usize = 1024;
/// The time on a blocking thread after which other connections may use it.
const TIME_SLICE: Duration = Duration::from_millis(20);
/// The maximum of input discarded after the last answer, so that the client receives it.
const MAX_DRAINED_BYTES: usize = 64 << 20;
/// The maximum time for discarding input.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How far a client is behind [`SlowClientLimits::min_rate`] with sending a request or receiving
/// its answers, during which their memory is not available to others.
///
/// A faster transfer earns no credit. So n bytes take at most [`SlowClientLimits::max_lag`] plus
/// the time at that rate, and a client cannot hold a large request or answer by transferring an
/// occasional byte.
struct TransferLag {
    limits: SlowClientLimits,
    lag: Duration,
}

impl TransferLag {
    fn new(limits: SlowClientLimits) -> Self {
        Self { limits, lag: Duration::ZERO }
    }

    /// Counts a time without progress that the client was responsible for; at most the maximum lag,
    /// since the server did not wait longer for it.
    fn add_wait(&mut self, time: Duration) {
        self.lag = (self.lag + time).min(self.limits.max_lag);
    }

    /// Counts transferred bytes.
    fn add_bytes(&mut self, bytes: usize) {
        let worth = Duration::from_secs_f64(bytes as f64 / self.limits.min_rate as f64);
        self.lag = self.lag.saturating_sub(worth);
    }

    /// Returns how much longer the server waits for the client; `None` if its lag is too large.
    fn remaining(&self) -> Option<Duration> {
        self.limits.max_lag.checked_sub(self.lag).filter(|remaining| !remaining.is_zero())
    }
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the client has closed the connection")]
    ClosedByClient,
    #[error("the client has asked to be disconnected, or was sent the reason")]
    ClosedByServer,
    #[error("the server is stopping")]
    Stopping,
    #[error("the client was idle for too long, or sent too slowly")]
    ReadTimeout,
    #[error("the client does not receive its answers, or receives them too slowly")]
    WriteTimeout,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("a command has panicked, which is a defect")]
    Panicked,
}

/// Serves a connection to its end.
pub(super) async fn serve(
    server: Arc<Server>,
    socket: TcpStream,
    client: Client,
    stopping: watch::Receiver<bool>,
) -> End {
    // Small answers must not wait for more data.
    let _ = socket.set_nodelay(true);
    let requests = Requests::new(&server.buffers, server.limits);
    let mut connection = Connection::new(server, requests, stopping);
    let end = connection.run(&socket, client).await.unwrap_or_else(|end| end);
    // This releases the memory of requests, which others may need.
    drop(connection);
    if matches!(end, End::ClosedByServer) {
        drain_input(socket).await;
    }
    end
}

/// Discards what a client still sends after it was sent the reason for the disconnection: if a
/// socket is closed with unread input, the system discards what was written to it.
async fn drain_input(mut socket: TcpStream) {
    use tokio::io::AsyncWriteExt as _;
    if socket.shutdown().await.is_err() {
        return;
    }
    // Small, since it is outside the shared memory, and every connection may have one.
    let mut buffer = vec![0; 4 << 10];
    let mut drained_bytes = 0;
    let drain = async {
        while drained_bytes < MAX_DRAINED_BYTES && socket.readable().await.is_ok() {
            match socket.try_read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => drained_bytes += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
            consume_budget().await;
        }
    };
    let _ = timeout(DRAIN_TIMEOUT, drain).await;
}

struct Connection {
    server: Arc<Server>,
    requests: Requests,
    stopping: watch::Receiver<bool>,
    begun: Instant,
    /// The client's lag in sending a request.
    request_lag: TransferLag,
    /// The client's lag in receiving the answers to everything received.
    answer_lag: TransferLag,
}

impl Connection {
    fn new(server: Arc<Server>, requests: Requests, stopping: watch::Receiver<bool>) -> Self {
        let [request_lag, answer_lag] = [(); 2].map(|()| TransferLag::new(server.slow_clients));
        Self { server, requests, stopping, begun: Instant::now(), request_lag, answer_lag }
    }

    async fn run(&mut self, socket: &TcpStream, mut client: Client) -> Result<End, End> {
        loop {
            client = self.answer(socket, client).await?;
            if client.is_closing {
                return Ok(End::ClosedByServer);
            }
            self.requests.shrink();
            self.read(socket, &client).await?;
        }
    }

    /// Waits until more input has arrived.
    async fn read(&mut self, socket: &TcpStream, client: &Client) -> Result<(), End> {
        let has_begun = self.requests.has_partial_request();
        if !has_begun {
            self.request_lag = TransferLag::new(self.server.slow_clients);
        }
        loop {
            let remaining = match (self.server.is_unauthenticated(client), has_begun) {
                (true, _) => self.server.slow_clients.max_lag.checked_sub(self.begun.elapsed()),
                (false, true) => self.request_lag.remaining(),
                (false, false) => Some(self.server.idle_timeout),
            };
            let remaining = remaining.ok_or(End::ReadTimeout)?;
            let waiting = Instant::now();
            tokio::select! {
                ready = timeout(remaining, socket.readable()) => {
                    ready.map_err(|_| End::ReadTimeout)??;
                }
                _ = self.stopping.changed() => return Err(End::Stopping),
            }
            if has_begun {
                self.request_lag.add_wait(waiting.elapsed());
            }
            match self.requests.read_from(socket) {
                Ok(0) => return Err(End::ClosedByClient),
                Ok(bytes) => {
                    self.request_lag.add_bytes(bytes);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Answers all requests that have arrived.
    async fn answer(&mut self, socket: &TcpStream, mut client: Client) -> Result<Client, End> {
        let mut has_answered = false;
        while !client.is_closing {
            self.requests.limits = match self.server.is_unauthenticated(&client) {
                true => Limits::UNAUTHENTICATED,
                false => self.server.limits,
            };
            let request = match self.requests.next() {
                Ok(Some(request)) => request,
                Ok(None) if client.answers.len() > 0 => {
                    // More may arrive meanwhile.
                    self.write(socket, &mut client).await?;
                    continue;
                }
                Ok(None) => break,
                Err(error) => {
                    client.answers.error(&format!("ERR {error}"));
                    client.is_closing = true;
                    break;
                }
            };
            has_answered = true;
            let steps = 1 + request.len() / ARGS_PER_STEP;
            match command::run(&self.server, &mut client, &request, Mode::NonBlocking) {
                Outcome::WouldBlock => {
                    client = self.answer_blocking(socket, client, request).await?;
                }
                // The client may be slow to receive the answer, and the request no longer counts.
                Outcome::Answered => drop(request),
            }
            self.requests.set_answered();
            // The input read ahead may contain very many requests with small answers, of which none
            // is written for a long time.
            for _ in 0..steps {
                consume_budget().await;
            }
            if must_write(&self.server, &mut client) {
                self.write(socket, &mut client).await?;
            }
        }
        self.write(socket, &mut client).await?;
        self.answer_lag = TransferLag::new(self.server.slow_clients);
        if has_answered {
            // The received part of the next request had to wait for the answers.
            self.request_lag = TransferLag::new(self.server.slow_clients);
        }
        Ok(client)
    }

    /// Answers this request and those that have arrived with it on a blocking thread.
    async fn answer_blocking(
        &mut self,
        socket: &TcpStream,
        mut client: Client,
        first: Request,
    ) -> Result<Client, End> {
        let mut batch = VecDeque::from([first]);
        // An invalid request is reported after those before it.
        while batch.len() < MAX_BATCH_REQUESTS
            && let Ok(Some(request)) = self.requests.next()
        {
            batch.push_back(request);
        }
        let has_writes = batch.iter().any(|request| command::is_write(&request[0]));
        loop {
            let server = self.server.clone();
            let writer_permit = match has_writes {
                true => Some(self.server.writers.acquire().await.expect("it is never closed")),
                false => None,
            };
            let run = spawn_blocking(move || {
                run_batch(&server, &mut client, &mut batch);
                (client, batch)
            });
            (client, batch) = run.await.map_err(|_| End::Panicked)?;
            drop(writer_permit);
            if batch.is_empty() || client.is_closing {
                return Ok(client);
            }
            self.write(socket, &mut client).await?;
        }
    }

    /// Writes all answers.
    ///
    /// Many clients send a whole pipeline before they receive the first answer. So input is read
    /// while the client does not receive, as far as there is memory: otherwise both sides would
    /// wait for each other.
    async fn write(&mut self, socket: &TcpStream, client: &mut Client) -> Result<(), End> {
        // If the client keeps up, nothing here has to wait, so the task yields explicitly.
        consume_budget().await;
        let mut may_read = !self.server.is_unauthenticated(client) && !client.is_closing;
        let mut written_bytes = 0;
        while written_bytes < client.answers.len() {
            match socket.try_write(&client.answers.bytes()[written_bytes..]) {
                Ok(0) => return Err(End::ClosedByClient),
                Ok(written) => {
                    written_bytes += written;
                    self.answer_lag.add_bytes(written);
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            may_read &=
                !*self.stopping.borrow() && self.requests.may_read_ahead(MAX_READ_AHEAD_BYTES);
            let interest = match may_read {
                true => Interest::READABLE | Interest::WRITABLE,
                false => Interest::WRITABLE,
            };
            let remaining = self.answer_lag.remaining().ok_or(End::WriteTimeout)?;
            let waiting = Instant::now();
            let ready = timeout(remaining, socket.ready(interest))
                .await
                .map_err(|_| End::WriteTimeout)??;
            self.answer_lag.add_wait(waiting.elapsed());
            if may_read && ready.is_readable() && !ready.is_writable() {
                match self.requests.read_from(socket) {
                    // The client sends no more, which is noticed again when everything is answered.
                    Ok(0) => may_read = false,
                    // This counts as progress too, but is limited.
                    Ok(read) => self.answer_lag.add_bytes(read),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        client.answers.clear();
        Ok(())
    }
}

/// Returns whether the answers have to be written before another request is answered: there are
/// many, or the next one might not even fit an error. Clients that are not authenticated use none
/// of the shared memory.
fn must_write(server: &Server, client: &mut Client) -> bool {
    let max_bytes = match server.is_unauthenticated(client) {
        true => UNCOUNTED_BYTES - ERROR_BYTES,
        false => WRITE_THRESHOLD_BYTES,
    };
    client.answers.len() >= max_bytes || !client.answers.reserve(ERROR_BYTES)
}

/// Executes requests until all are answered, or there are enough answers to write.
fn run_batch(server: &Server, client: &mut Client, batch: &mut VecDeque<Request>) {
    let begun = Instant::now();
    while let Some(request) = batch.pop_front() {
        let outcome = command::run(server, client, &request, Mode::Blocking);
        debug_assert_eq!(outcome, Outcome::Answered, "a blocking thread may block");
        if client.is_closing || must_write(server, client) || begun.elapsed() >= TIME_SLICE {
            break;
        }
    }
    // One sync for all of them, and for writes of other connections that wait at the same time.
    if server.flushes_before_answers
        && std::mem::take(&mut client.must_flush)
        && let Err(error) = server.cache.flush()
    {
        // It is unknown which of the answers are wrong.
        client.answers.truncate(0);
        client.answers.error(&format!("ERR the writes are not on stable storage: {error}"));
        client.is_closing = true;
    }
}

#[cfg(test)]
mod tests;
