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
use super::buffers::FREE_BYTES;
use super::command::{self, Ran, Reach};
use super::request::{Limits, Request, Requests};
use super::{Client, Patience, Server};

/// Answers are written when they reach this size, even if more requests have arrived.
const ENOUGH_ANSWERS: usize = 1 << 20;
/// The maximum of further requests read while answers cannot be written.
const MAX_AHEAD: usize = 64 << 20;
/// Words of requests on the connection's task that consume one unit of its cooperative budget.
const WORDS_OF_A_STEP: usize = 64;
/// The maximum number of requests that change threads together.
const MAX_TOGETHER: usize = 1024;
/// After this time on a blocking thread, other connections get their turn.
const TURN: Duration = Duration::from_millis(20);
/// The maximum of input discarded after the last answer, so that the client receives it.
const MAX_HEARD: usize = 64 << 20;
/// The maximum time of that.
const HEAR_OUT: Duration = Duration::from_secs(2);

/// How far a client is behind [`Patience::least_rate`] with sending a request or receiving its
/// answers, during which their memory is not available to others.
///
/// A faster transfer earns no credit. So n bytes take at most [`Patience::time`] plus the time at
/// that rate, and a client cannot hold a large request or answer by transferring an occasional
/// byte.
struct Pace {
    patience: Patience,
    behind: Duration,
}

impl Pace {
    fn new(patience: Patience) -> Self {
        Self { patience, behind: Duration::ZERO }
    }

    /// Counts a time without progress that the client was responsible for; not more than the
    /// patience, since the server did not wait longer for it.
    fn waited(&mut self, time: Duration) {
        self.behind = (self.behind + time).min(self.patience.time);
    }

    fn moved(&mut self, bytes: usize) {
        let worth = Duration::from_secs_f64(bytes as f64 / self.patience.least_rate as f64);
        self.behind = self.behind.saturating_sub(worth);
    }

    /// Returns how long the server may still wait for it. `None`: no longer.
    fn left(&self) -> Option<Duration> {
        self.patience.time.checked_sub(self.behind).filter(|left| !left.is_zero())
    }
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the client has closed the connection")]
    Closed,
    #[error("the client has asked to be disconnected, or was sent the reason")]
    Left,
    #[error("the server is stopping")]
    Stopping,
    #[error("the client was idle for too long, or sent too slowly")]
    Silent,
    #[error("the client does not receive its answers, or receives them too slowly")]
    Deaf,
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
    // There are many small answers, each of which is wanted at once.
    let _ = socket.set_nodelay(true);
    let requests = Requests::new(&server.buffers, server.limits);
    let mut connection = Connection::new(server, requests, stopping);
    let end = connection.run(&socket, client).await.unwrap_or_else(|end| end);
    // And with it the memory of requests, which others may need.
    drop(connection);
    if matches!(end, End::Left) {
        hear_out(socket).await;
    }
    end
}

/// Discards what a client still sends after it was sent the reason for the disconnection: if a
/// socket is closed with unread input, the system discards what was written to it.
async fn hear_out(mut socket: TcpStream) {
    use tokio::io::AsyncWriteExt as _;
    if socket.shutdown().await.is_err() {
        return;
    }
    // Small, since this is outside the shared memory, and there may be as many as there are
    // connections.
    let mut some = vec![0; 4 << 10];
    let mut heard = 0;
    let hear = async {
        while heard < MAX_HEARD && socket.readable().await.is_ok() {
            match socket.try_read(&mut some) {
                Ok(0) => break,
                Ok(read) => heard += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
            consume_budget().await;
        }
    };
    let _ = timeout(HEAR_OUT, hear).await;
}

struct Connection {
    server: Arc<Server>,
    requests: Requests,
    stopping: watch::Receiver<bool>,
    begun: Instant,
    /// Of the request being received.
    arriving: Pace,
    /// Of the answers to everything received.
    taking: Pace,
}

impl Connection {
    fn new(server: Arc<Server>, requests: Requests, stopping: watch::Receiver<bool>) -> Self {
        let [arriving, taking] = [(); 2].map(|()| Pace::new(server.patience));
        Self { server, requests, stopping, begun: Instant::now(), arriving, taking }
    }

    async fn run(&mut self, socket: &TcpStream, mut client: Client) -> Result<End, End> {
        loop {
            client = self.answer(socket, client).await?;
            if client.is_leaving {
                return Ok(End::Left);
            }
            self.requests.rest();
            self.read(socket, &client).await?;
        }
    }

    /// Waits until more input has arrived.
    async fn read(&mut self, socket: &TcpStream, client: &Client) -> Result<(), End> {
        let is_within = self.requests.is_within();
        if !is_within {
            self.arriving = Pace::new(self.server.patience);
        }
        loop {
            let left = match (self.server.is_stranger(client), is_within) {
                (true, _) => self.server.patience.time.checked_sub(self.begun.elapsed()),
                (false, true) => self.arriving.left(),
                (false, false) => Some(self.server.idle_timeout),
            };
            let left = left.ok_or(End::Silent)?;
            let waiting = Instant::now();
            tokio::select! {
                ready = timeout(left, socket.readable()) => {
                    ready.map_err(|_| End::Silent)??;
                }
                _ = self.stopping.changed() => return Err(End::Stopping),
            }
            if is_within {
                self.arriving.waited(waiting.elapsed());
            }
            match self.requests.read_from(socket) {
                Ok(0) => return Err(End::Closed),
                Ok(bytes) => {
                    self.arriving.moved(bytes);
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
        while !client.is_leaving {
            self.requests.limits = match self.server.is_stranger(&client) {
                true => Limits::STRANGER,
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
                Err(broken) => {
                    client.answers.error(&format!("ERR {broken}"));
                    client.is_leaving = true;
                    break;
                }
            };
            has_answered = true;
            let steps = 1 + request.len() / WORDS_OF_A_STEP;
            match command::run(&self.server, &mut client, &request, Reach::Memory) {
                Ran::Waits => client = self.answer_waiting(socket, client, request).await?,
                // It no longer counts, and the client may be slow to receive the answer.
                Ran::Answered => drop(request),
            }
            self.requests.are_answered();
            // The input read ahead may contain very many requests with answers so small that none
            // is written for long.
            for _ in 0..steps {
                consume_budget().await;
            }
            if are_enough(&self.server, &mut client) {
                self.write(socket, &mut client).await?;
            }
        }
        self.write(socket, &mut client).await?;
        self.taking = Pace::new(self.server.patience);
        if has_answered {
            // What has arrived of the next request had to wait for that.
            self.arriving = Pace::new(self.server.patience);
        }
        Ok(client)
    }

    /// Answers this request and those that have arrived with it on a blocking thread.
    async fn answer_waiting(
        &mut self,
        socket: &TcpStream,
        mut client: Client,
        first: Request,
    ) -> Result<Client, End> {
        let mut together = VecDeque::from([first]);
        // An invalid request is reported in its turn.
        while together.len() < MAX_TOGETHER
            && let Ok(Some(request)) = self.requests.next()
        {
            together.push_back(request);
        }
        let has_writes = together.iter().any(|request| command::is_write(&request[0]));
        loop {
            let server = self.server.clone();
            let turn = match has_writes {
                true => Some(self.server.writers.acquire().await.expect("it is never closed")),
                false => None,
            };
            let run = spawn_blocking(move || {
                run_together(&server, &mut client, &mut together);
                (client, together)
            });
            (client, together) = run.await.map_err(|_| End::Panicked)?;
            drop(turn);
            if together.is_empty() || client.is_leaving {
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
        // With a client that keeps up nothing here has to wait, so the task yields explicitly.
        consume_budget().await;
        let mut may_read = !self.server.is_stranger(client) && !client.is_leaving;
        let mut at = 0;
        while at < client.answers.len() {
            match socket.try_write(&client.answers.bytes()[at..]) {
                Ok(0) => return Err(End::Closed),
                Ok(written) => {
                    at += written;
                    self.taking.moved(written);
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            may_read &= !*self.stopping.borrow() && self.requests.has_room_ahead(MAX_AHEAD);
            let interest = match may_read {
                true => Interest::READABLE | Interest::WRITABLE,
                false => Interest::WRITABLE,
            };
            let left = self.taking.left().ok_or(End::Deaf)?;
            let waiting = Instant::now();
            let ready = timeout(left, socket.ready(interest)).await.map_err(|_| End::Deaf)??;
            self.taking.waited(waiting.elapsed());
            if may_read && ready.is_readable() && !ready.is_writable() {
                match self.requests.read_from(socket) {
                    // It sends no more, which is noticed again when everything is answered.
                    Ok(0) => may_read = false,
                    // This is progress too, but limited.
                    Ok(read) => self.taking.moved(read),
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
fn are_enough(server: &Server, client: &mut Client) -> bool {
    let most = match server.is_stranger(client) {
        true => FREE_BYTES - ERROR_BYTES,
        false => ENOUGH_ANSWERS,
    };
    client.answers.len() >= most || !client.answers.make_room(ERROR_BYTES)
}

/// Executes requests until all are answered, or there are enough answers to write.
fn run_together(server: &Server, client: &mut Client, together: &mut VecDeque<Request>) {
    let begun = Instant::now();
    while let Some(request) = together.pop_front() {
        let ran = command::run(server, client, &request, Reach::Disk);
        debug_assert_eq!(ran, Ran::Answered, "nothing has to move where it may block");
        if client.is_leaving || are_enough(server, client) || begun.elapsed() >= TURN {
            break;
        }
    }
    // One sync for all of them, and for those of other connections that wait at the same time.
    if server.flushes
        && std::mem::take(&mut client.must_flush)
        && let Err(error) = server.cache.flush()
    {
        // It is unknown which of the answers are wrong.
        client.answers.take_back(0);
        client.answers.error(&format!("ERR the writes are not on stable storage: {error}"));
        client.is_leaving = true;
    }
}

#[cfg(test)]
mod tests;
