//! `alluvium cache serve`: a journal cache behind the Redis protocol. Which thread runs what:
//! `docs/cache-server.md`, "Threads".

mod answers;
mod buffers;
mod command;
mod connection;
mod counters;
mod files;
mod glob;
mod info;
mod request;
mod session;
mod set;
mod threads;

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use alluvium_journal::{Cache, Compression, Durability, Options, WhenFull};
use clap::Args;
use prometheus_client::registry::Registry;
use ring::digest::{Digest, SHA256, digest};
use subtle::ConstantTimeEq as _;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use self::answers::Answers;
use self::buffers::Buffers;
use self::counters::{CacheCollector, Counters};
use self::files::Journals;
use self::request::Limits;
use super::memory;
use super::options::CacheArgs;
use crate::address::Address;
use crate::admin::{Admin, Condition, Health};
use crate::output::Failure;
use crate::password::first_line;
use crate::serve::Signals;
use crate::units::{Size, Span, about, counted};

/// Serve a cache to Redis clients: GET, SET with all of its options, DEL, EXISTS, MGET, MSET, TTL,
/// SCAN, INFO and others.
///
/// Without --password-file, everyone who can reach the port can read and write everything.
/// Passwords and values are sent in clear text: there is no TLS. SIGTERM stops the server after
/// everything is written. Exit codes: 0 stopped; 1 failed; 2 wrong usage.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    /// Directory of the cache; created if it does not exist. Only one process can have it open.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Address for clients; port 0 selects a free one. An address other than loopback needs
    /// --password-file or --allow-unauthenticated.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:6379")]
    listen: Address,
    #[command(flatten)]
    cache: CacheArgs,
    /// Clients have to authenticate (AUTH, or HELLO with AUTH) with the password in the first line
    /// of this file. Default: no authentication.
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
    /// Listen on the network without authentication: everyone who can reach the port can read and
    /// write everything.
    #[arg(long)]
    allow_unauthenticated: bool,
    /// Address for metrics (/metrics, for Prometheus) and probes (/livez, /readyz, /healthz).
    /// Default: none.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<Address>,
    /// Maximum number of connected clients; lower if the limit of open files (ulimit -n) does not
    /// permit as many in addition to the journals.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 10_000,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    max_connections: u32,
    /// Memory that all connections share for large requests and answers and for large values read
    /// from disk; up to 64KiB of each are not counted. A request that does not fit gets an error.
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(512))]
    buffer_memory: Size,
    /// A client without requests is disconnected after this time, at least 1s.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_idle_timeout)]
    idle_timeout: Span,
    /// Minimum rate, in bytes per second, at which a client has to send a request and receive its
    /// answers; it is disconnected when it is 30s behind.
    #[arg(long, value_name = "SIZE", default_value_t = Size::kib(64), value_parser = parse_rate)]
    min_rate: Size,
    /// What to log: error, warn, info, debug or trace, or a list of target=level.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,
}

const DEFAULT_MEMORY: Size = Size::gib(1);
/// The minimum of `--idle-timeout`.
const MIN_IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// With `--durability always`: answers wait for their own sync, so this one finds nothing to do.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of blocking threads.
const BLOCKING_THREADS: usize = 512;
/// See [`SlowClientLimits::max_lag`].
const MAX_LAG: Duration = Duration::from_secs(30);
/// How long requests in progress may take when the server stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
/// The delay after a failed accept, typically for lack of file descriptors: the kernel does not
/// report when there are some again.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// State shared by all connections.
struct Server {
    cache: Cache,
    password: Option<Password>,
    /// Answers to writes wait until everything is on stable storage. (Instead of the cache's own
    /// [`Durability::Always`], with which each write of a pipeline would wait for a sync of its
    /// own.)
    flushes_before_answers: bool,
    /// The oldest records are evicted when the disk space is used up.
    evicts: bool,
    /// The values of `--memory` and `--max-disk`, for INFO and metrics.
    memory_bytes: u64,
    max_disk_bytes: u64,
    limits: Limits,
    buffers: Arc<Buffers>,
    counters: Counters,
    max_connections: u32,
    idle_timeout: Duration,
    slow_clients: SlowClientLimits,
    started: Instant,
    next_id: AtomicI64,
    /// Limits the blocking threads in use by writers: when these all wait for the disk, threads are
    /// left for readers.
    writers: Semaphore,
}

/// The limits beyond which a client that has not finished a transfer is disconnected.
#[derive(Clone, Copy, Debug)]
struct SlowClientLimits {
    /// How far the client may be behind the minimum rate. It also has to authenticate within this
    /// time.
    max_lag: Duration,
    /// Bytes per second, at least 1, for a request being received and for answers being sent.
    min_rate: u64,
}

/// The state of a connection.
struct Client {
    id: i64,
    name: Vec<u8>,
    answers: Answers,
    is_authenticated: bool,
    /// The connection is closed after the pending answers are written.
    is_closing: bool,
    /// The pending answers reveal data that may not be on stable storage: what the client has
    /// written since the last flush, or what one of its writes has read.
    must_flush: bool,
    /// Number of wrong passwords.
    failed_logins: u32,
}

/// The digest of a password, so that the time of a comparison does not depend on the password that
/// it is compared with.
struct Password(Digest);

impl Password {
    fn new(password: &[u8]) -> Self {
        Self(digest(&SHA256, password))
    }

    fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read(path)
            .map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))?;
        let password = first_line(&text)
            .map_err(|reason| Failure::Usage(format!("{}: {reason}", path.display())))?;
        Ok(Self::new(password))
    }

    fn matches(&self, other: &[u8]) -> bool {
        self.0.as_ref().ct_eq(digest(&SHA256, other).as_ref()).into()
    }
}

impl Server {
    fn new(
        cache: Cache,
        args: &ServeArgs,
        password: Option<Password>,
        max_connections: u32,
    ) -> Arc<Self> {
        let limits = Limits::new(cache.max_record_bytes());
        Arc::new(Self {
            cache,
            password,
            flushes_before_answers: args.cache.durability == Durability::Always,
            evicts: args.cache.when_full == WhenFull::Evict,
            memory_bytes: args.cache.memory(DEFAULT_MEMORY).bytes,
            max_disk_bytes: args.cache.max_disk.bytes,
            limits,
            buffers: Buffers::new(args.buffer_memory.in_memory()),
            counters: Counters::new(),
            max_connections,
            idle_timeout: args.idle_timeout.0,
            slow_clients: SlowClientLimits { max_lag: MAX_LAG, min_rate: args.min_rate.bytes },
            started: Instant::now(),
            next_id: AtomicI64::new(1),
            writers: Semaphore::new(BLOCKING_THREADS / 2),
        })
    }

    fn client(&self) -> Client {
        Client {
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            name: Vec::new(),
            // The largest value, as an answer.
            answers: Answers::new(&self.buffers, self.limits.request_bytes),
            is_authenticated: false,
            is_closing: false,
            must_flush: false,
            failed_logins: 0,
        }
    }

    /// Returns what happens when the cache is full, as the nearest policy of Redis.
    fn eviction_policy(&self) -> &'static str {
        if self.evicts { "allkeys-lru" } else { "noeviction" }
    }

    /// Returns whether a client still has to authenticate.
    fn is_unauthenticated(&self, client: &Client) -> bool {
        self.password.is_some() && !client.is_authenticated
    }

    fn condition(&self) -> Condition {
        // The first one is permanent.
        match self.cache.failure().or_else(|| self.cache.upkeep_failure()) {
            None => Condition::Ok,
            Some(cause) => Condition::Failed(cause.to_string()),
        }
    }
}

/// Parses the minimum rate.
fn parse_rate(text: &str) -> Result<Size, String> {
    match text.parse::<Size>()? {
        Size { bytes: 0 } => Err("at 0 a client could hold memory forever: at least 1B".into()),
        rate => Ok(rate),
    }
}

/// Parses the time after which a client without requests is disconnected. (In Redis 0 means
/// forever; here there is always a timeout.)
fn parse_idle_timeout(text: &str) -> Result<Span, String> {
    match text.parse::<Span>()? {
        time if time.0 < MIN_IDLE_TIMEOUT => {
            Err("clients would be disconnected between two requests: at least 1s".into())
        }
        time => Ok(time),
    }
}

impl ServeArgs {
    /// Returns the log filter.
    pub(super) fn log(&self) -> &str {
        &self.log
    }

    fn options(&self) -> Options {
        let options = self.cache.options(DEFAULT_MEMORY);
        match options.durability {
            Durability::Always => {
                Options { durability: Durability::Interval(SYNC_INTERVAL), ..options }
            }
            Durability::None | Durability::Interval(_) => options,
        }
    }

    /// Checks that listening beyond the loopback interface, the only protection without
    /// authentication, was requested explicitly.
    fn check_exposure(&self) -> Result<(), Failure> {
        let clients = ("listen", self.listen.0, self.password_file.is_some());
        let metrics =
            self.metrics_listen.map(|Address(address)| ("metrics-listen", address, false));
        for (option, address, is_protected) in [Some(clients), metrics].into_iter().flatten() {
            if !address.ip().is_loopback() && !is_protected && !self.allow_unauthenticated {
                return Err(Failure::Usage(format!(
                    "{option} is {address}, which is reachable from the network, and it lacks \
                     authentication: anyone who can reach it could read and write all data. Use \
                     127.0.0.1, or for clients a password (--password-file), or give \
                     --allow-unauthenticated if the network is trusted"
                )));
            }
        }
        Ok(())
    }
}

/// Serves until a signal stops it.
///
/// # Errors
/// Invalid options; the cache cannot be opened or closed properly; a port is in use.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    args.check_exposure()?;
    memory::check(args.cache.memory(DEFAULT_MEMORY));
    let password = args.password_file.as_deref().map(Password::read).transpose()?;
    let Address(listen) = args.listen;
    let failed = |error| {
        Failure::Failed(format!("cannot listen on {listen} for clients (--listen): {error}"))
    };
    // First, so that the cache is not opened in vain.
    let socket = TcpListener::bind(listen).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    let files = crate::open_files::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
    let health = Health::new();
    let metrics = match args.metrics_listen {
        Some(Address(listen)) => Some(runtime.block_on(Admin::start(listen, health.clone()))?),
        None => None,
    };
    health.begin("opening the cache");
    let opening = Instant::now();
    let options = args.options();
    let cache = Cache::open(&args.dir, options.clone())?;
    let journals = Journals {
        plain: options.max_disk_bytes / cache.max_record_bytes() as u64,
        are_compressed: options.compression != Compression::None,
    };
    let max_connections = match files {
        Some(files) => files::connections(files, args.max_connections, journals)?,
        None => args.max_connections,
    };
    let found = cache.recovered();
    tracing::info!(
        "cache {}: {} in {}, opened in {:.3} s",
        args.dir.display(),
        counted(found.entries as u64, "key", "keys"),
        counted(found.journals as u64, "journal", "journals"),
        opening.elapsed().as_secs_f64()
    );
    if found.damaged_bytes > 0 {
        tracing::warn!("{} are damaged and not used", about(found.damaged_bytes));
    }
    let set_aside = cache.stats().set_aside;
    if set_aside.files > 0 {
        tracing::warn!(
            "{} of {} set aside (*.journal.damaged), outside the disk budget: inspect or remove \
             them",
            counted(set_aside.files as u64, "file", "files"),
            about(set_aside.bytes)
        );
    }
    threads::check()?;
    let server = Server::new(cache, args, password, max_connections);
    let served = runtime.block_on(serve(server.clone(), socket, metrics, &health));
    runtime.shutdown_timeout(SHUTDOWN_GRACE);
    let closed = close_cache(server);
    served.and(closed)?;
    tracing::info!("stopped: the cache is closed");
    Ok(())
}

/// Closes the cache. If it is still in use, syncs what was answered, for a limited time.
fn close_cache(server: Arc<Server>) -> Result<(), Failure> {
    let server = match Arc::try_unwrap(server) {
        Ok(server) => return server.cache.close().map_err(Failure::from),
        Err(server) => server,
    };
    // On a thread of its own: the request may be waiting for a disk that does not answer.
    let (send, flushed) = mpsc::channel();
    thread::spawn(move || {
        // The receiver may have timed out.
        let _ = send.send(server.cache.flush());
    });
    let written = match flushed.recv_timeout(SHUTDOWN_GRACE) {
        Ok(Ok(())) => "everything answered is on stable storage".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => {
            format!("what was answered could not be written within {} s", SHUTDOWN_GRACE.as_secs())
        }
    };
    Err(Failure::Failed(format!(
        "a request did not end: the next start is as after a kill; {written}"
    )))
}

async fn serve(
    server: Arc<Server>,
    socket: TcpListener,
    metrics: Option<Admin>,
    health: &Health,
) -> Result<(), Failure> {
    let mut signals = Signals::install()?;
    let socket = tokio::net::TcpListener::from_std(socket).map_err(Failure::new)?;
    let local = socket.local_addr().map_err(Failure::new)?;
    // Weak, so that the cache can be closed by its only owner.
    let watched = Arc::downgrade(&server);
    health.watch(move || watched.upgrade().map_or(Condition::Ok, |server| server.condition()));
    if let Some(metrics) = &metrics {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(CacheCollector(server.clone())));
        metrics.publish(registry);
    }
    let (stop, stopping) = watch::channel(false);
    let accepting = tokio::spawn(accept(server, socket, stopping));
    let metrics_at = metrics.as_ref().map_or_else(
        || "no metrics port".to_owned(),
        |metrics| format!("metrics on http://{}/metrics", metrics.local_addr()),
    );
    health.serving();
    tracing::info!("alluvium cache is ready: redis on {local}, {metrics_at}");
    let name = signals.next().await;
    tracing::info!(
        "{name}: stopping; a further signal after at least one second ends the process at once"
    );
    health.stopping();
    signals.end_on_second();
    let _ = stop.send(true);
    if accepting.await.is_err() {
        tracing::error!("the task that accepts connections failed");
    }
    if let Some(metrics) = metrics {
        metrics.shutdown().await;
    }
    Ok(())
}

/// Accepts and serves connections until the server stops; then waits for the requests in progress.
async fn accept(
    server: Arc<Server>,
    socket: tokio::net::TcpListener,
    mut stopping: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    let stop_signal = stopping.clone();
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            Some(ended) = connections.join_next() => {
                log_failure(ended);
                continue;
            }
            _ = stopping.changed() => break,
        };
        match accepted {
            Ok((socket, peer)) => {
                if !server.counters.connect(server.max_connections.into()) {
                    refuse(socket);
                    continue;
                }
                let (server, stop_signal) = (server.clone(), stop_signal.clone());
                connections.spawn(async move {
                    let open = OpenConnection(server.clone());
                    let client = server.client();
                    let end = connection::serve(server, socket, client, stop_signal).await;
                    tracing::debug!(%peer, "connection closed: {end}");
                    drop(open);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                sleep(RETRY_ACCEPT).await;
            }
        }
    }
    drop(socket);
    let all_ended = async {
        while let Some(ended) = connections.join_next().await {
            log_failure(ended);
        }
    };
    if timeout(SHUTDOWN_GRACE, all_ended).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "requests in progress did not end within {} s",
            SHUTDOWN_GRACE.as_secs()
        );
        connections.shutdown().await;
    }
}

/// Refuses a connection with an error: there are too many. The error fits into the socket's buffer
/// or is dropped, without waiting.
fn refuse(socket: tokio::net::TcpStream) {
    // The runtime does not know yet that the socket is writable, and would not try.
    let Ok(mut socket) = socket.into_std() else { return };
    // Input is read first: otherwise the system would discard the answer.
    if !matches!(socket.read(&mut [0; 4096]), Ok(0)) {
        let _ = socket.write_all(b"-ERR max number of clients reached\r\n");
    }
}

/// An open connection, counted while it exists.
struct OpenConnection(Arc<Server>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.counters.disconnect();
    }
}

fn log_failure(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection's task failed");
    }
}

#[cfg(test)]
mod tests;
