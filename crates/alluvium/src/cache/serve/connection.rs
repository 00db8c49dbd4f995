//! A connection: requests in, answers out, and what runs where.
//!
//! Requests run on the connection's own task as long as they need nothing but memory. From the
//! first one on that would have to wait, everything that has come with it runs on a thread that
//! may: one change of threads for a whole pipeline. The answers to what came together go out
//! together.

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

/// Answers are written when they are so many, whatever has come besides.
const ENOUGH_ANSWERS: usize = 1 << 20;
/// Read of further requests while answers wait to be taken.
const MAX_AHEAD: usize = 64 << 20;
/// Of requests that stay on the connection's task: a step of the budget that it has until others
/// have their turn.
const WORDS_OF_A_STEP: usize = 64;
/// Requests that change threads together.
const MAX_TOGETHER: usize = 1024;
/// For so long they run there; then it is the turn of those of others.
const TURN: Duration = Duration::from_millis(20);
/// So much of what a client still sends is discarded for its last answer to reach it.
const MAX_HEARD: usize = 64 << 20;
/// And for so long.
const HEAR_OUT: Duration = Duration::from_secs(2);

/// How far a client is behind [`Patience::least_rate`] with a request that is on its way, or with
/// taking its answers: for as long as these take, others lack the memory.
///
/// Whoever goes faster gets nothing for it later. So n bytes keep the server waiting for
/// [`Patience::time`] and for as long as they take at that rate, at most; and nobody holds what
/// came fast by a byte now and then.
struct Pace {
    patience: Patience,
    behind: Duration,
}

impl Pace {
    fn new(patience: Patience) -> Self {
        Self { patience, behind: Duration::ZERO }
    }

    /// Nothing has moved for so long, and that was up to the client; not what goes beyond the
    /// patience, since it was not waited for so long.
    fn waited(&mut self, time: Duration) {
        self.behind = (self.behind + time).min(self.patience.time);
    }

    fn moved(&mut self, bytes: usize) {
        let worth = Duration::from_secs_f64(bytes as f64 / self.patience.least_rate as f64);
        self.behind = self.behind.saturating_sub(worth);
    }

    /// For so long it may be waited for. `None`: no longer.
    fn left(&self) -> Option<Duration> {
        self.patience.time.checked_sub(self.behind).filter(|left| !left.is_zero())
    }
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the client has closed it")]
    Closed,
    #[error("the client has asked for it, or was told why")]
    Left,
    #[error("the server stops")]
    Stopping,
    #[error("the client was silent for too long, or too slow")]
    Silent,
    #[error("the client does not take its answers, or too slowly")]
    Deaf,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("a command has panicked, which is a defect")]
    Panicked,
}

/// Serve a connection to its end.
pub(super) async fn serve(
    server: Arc<Server>,
    socket: TcpStream,
    client: Client,
    stopping: watch::Receiver<bool>,
) -> End {
    // Many small answers, each of them wanted at once.
    let _ = socket.set_nodelay(true);
    let requests = Requests::new(&server.buffers, server.limits);
    let mut connection = Connection::new(server, requests, stopping);
    let end = connection.run(&socket, client).await.unwrap_or_else(|end| end);
    // And with it the memory of requests, which others may want.
    drop(connection);
    if matches!(end, End::Left) {
        hear_out(socket).await;
    }
    end
}

/// Discard what a client still sends that was told why it is disconnected: the system takes back
/// what was written to a socket that is closed with something unread in it.
async fn hear_out(mut socket: TcpStream) {
    use tokio::io::AsyncWriteExt as _;
    if socket.shutdown().await.is_err() {
        return;
    }
    // Little, as this is beside the memory that clients share, and there may be as many as there
    // are connections.
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
    /// Of the request that is on its way.
    arriving: Pace,
    /// Of the answers to all that has come.
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

    /// Wait until more has come.
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

    /// Answer all requests that have come.
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
                    // More may come meanwhile.
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
                // It does not count any more, and the client may be slow to take the answer.
                Ran::Answered => drop(request),
            }
            self.requests.are_answered();
            // What was read ahead may be a great many requests, with answers so small that none is
            // written for long.
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
            // What has come of the next request has waited for that.
            self.arriving = Pace::new(self.server.patience);
        }
        Ok(client)
    }

    /// Answer this request and those that have come with it, on a thread that may wait.
    async fn answer_waiting(
        &mut self,
        socket: &TcpStream,
        mut client: Client,
        first: Request,
    ) -> Result<Client, End> {
        let mut together = VecDeque::from([first]);
        // What is broken is told when it is its turn.
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

    /// Write all answers that there are.
    ///
    /// Many clients send all of a pipeline before they take the first answer. So what they send is
    /// read while they take none, as far as there is memory: else both would wait for each other.
    async fn write(&mut self, socket: &TcpStream, client: &mut Client) -> Result<(), End> {
        // Of a client that keeps up nothing here has to be waited for, and others want to be served
        // too.
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
                    // It sends no more; that is met again when everything is answered.
                    Ok(0) => may_read = false,
                    // It goes on too, and not for ever.
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

/// Whether the answers have to be written before another request is answered: there are many, or
/// the next one would find no room even for an error. Those who have not logged in have no part of
/// the memory that is shared.
fn are_enough(server: &Server, client: &mut Client) -> bool {
    let most = match server.is_stranger(client) {
        true => FREE_BYTES - ERROR_BYTES,
        false => ENOUGH_ANSWERS,
    };
    client.answers.len() >= most || !client.answers.make_room(ERROR_BYTES)
}

/// Until all are answered, or there is enough to be written.
fn run_together(server: &Server, client: &mut Client, together: &mut VecDeque<Request>) {
    let begun = Instant::now();
    while let Some(request) = together.pop_front() {
        let ran = command::run(server, client, &request, Reach::Disk);
        debug_assert_eq!(ran, Ran::Answered, "nothing waits where it may");
        if client.is_leaving || are_enough(server, client) || begun.elapsed() >= TURN {
            break;
        }
    }
    // One sync for all of them, and for those of other connections that wait at the same time.
    if server.flushes
        && std::mem::take(&mut client.must_flush)
        && let Err(error) = server.cache.flush()
    {
        // Which of the answers are not true nobody knows.
        client.answers.take_back(0);
        client.answers.error(&format!("ERR what was written is not on stable storage: {error}"));
        client.is_leaving = true;
    }
}

#[cfg(test)]
mod tests;
