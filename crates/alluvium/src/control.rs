//! The control socket: how a command asks the server that runs in a data directory to do something.
//! Contains both ends.
//!
//! A connection carries one [`Request`], a line of JSON. The answer is lines with one [`Reply`]
//! each; the last one is the outcome. Only the server's own user and root are accepted. A request
//! continues if its client disconnects.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use alluvium_broker::UserAdmin;
use alluvium_device::SharedDevice;
use alluvium_stream::Store;
use alluvium_wal::ResizeError;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;

use crate::config::{ServeConfig, limits};
use crate::output::Failure;
use crate::progress::Meter;
use crate::storage;
use crate::units::{Size, about};
use crate::unix_socket;

/// Name of the socket in the data directory.
pub(crate) const SOCKET: &str = "alluvium.sock";

/// Limit on a request; real ones are much shorter.
const MAX_REQUEST_BYTES: u64 = 16 << 10;
/// Time limit for the request, which a client sends at once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a stopping server waits for a step in progress.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the replies that report progress.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// (Without `Debug`, so that no log contains a password.)
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Change the capacity of the write-ahead log.
    Resize { wal: Target, capacity_bytes: u64 },
    /// Add a user, or change its password.
    SetPassword { user: String, password: String },
    /// Delete a user.
    DeleteUser { user: String },
    /// List the users.
    ListUsers,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// The file is being extended.
    Extending { done_bytes: u64, total_bytes: u64 },
    /// At most this much must be trimmed from the log before the resize takes effect.
    Waiting { distance_bytes: u64 },
    /// Outcome: success.
    Done,
    /// Outcome: the users, each with the mechanisms that it has a password for.
    Users(Vec<(String, Vec<String>)>),
    /// Outcome: failure.
    Failed { reason: String },
    /// Outcome: this server has another log.
    OtherLog,
}

impl Reply {
    fn is_outcome(&self) -> bool {
        matches!(self, Self::Done | Self::Users(_) | Self::Failed { .. } | Self::OtherLog)
    }
}

/// Identity of a file or block device, independent of the path that leads to it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Target {
    device: u64,
    inode: u64,
}

impl Target {
    fn at(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path)?;
        Ok(match found.file_type().is_block_device() {
            true => Self { device: found.rdev(), inode: 0 },
            false => Self { device: found.dev(), inode: found.ino() },
        })
    }
}

// -- The command's end

/// Asks the server behind `socket` to change the capacity of the log at `target`, and waits until
/// it is done. Returns false if there is no server or it has another log.
///
/// # Errors
/// The server refuses, fails, or ends before it is done.
pub(crate) fn resize(socket: &Path, target: &Path, capacity: Size) -> Result<bool, Failure> {
    let failed = |error: io::Error| {
        Failure::Failed(format!("{}: request to the server: {error}", socket.display()))
    };
    let mut stream = match BlockingStream::connect(socket) {
        Ok(stream) => stream,
        Err(error) => match error.kind() {
            // A path that is too long for a socket cannot have a server behind it.
            ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::InvalidInput => {
                return Ok(false);
            }
            _ => return Err(failed(error)),
        },
    };
    let wal = Target::at(target).map_err(failed)?;
    let request = Request::Resize { wal, capacity_bytes: capacity.bytes };
    let mut line = serde_json::to_string(&request).map_err(Failure::new)?;
    line.push('\n');
    stream.write_all(line.as_bytes()).map_err(failed)?;

    let extending = Meter::new(format!("pre-writing {}", target.display()));
    let waiting = Meter::new("waiting for the log to pass the end of its ring");
    let mut furthest = 0;
    for line in BufReader::new(stream).lines() {
        match serde_json::from_str(&line.map_err(failed)?).map_err(Failure::new)? {
            Reply::Extending { done_bytes, total_bytes } => {
                extending.callback()(done_bytes, total_bytes);
            }
            Reply::Waiting { distance_bytes } => {
                // The first reply may arrive before the distance is known.
                if furthest == 0 && distance_bytes > 0 {
                    eprintln!(
                        "waiting for the log to pass the end of its ring: at most {} left. The \
                         server continues if this command is interrupted",
                        about(distance_bytes)
                    );
                }
                furthest = furthest.max(distance_bytes);
                waiting.callback()(furthest - distance_bytes, furthest);
            }
            Reply::Done => return Ok(true),
            Reply::Failed { reason } => return Err(Failure::Failed(reason)),
            Reply::OtherLog => return Ok(false),
            Reply::Users(_) => {}
        }
    }
    Err(Failure::Failed(format!(
        "{}: the server ended before the resize was done. Check the log with `alluvium wal \
         inspect` and repeat the command",
        target.display()
    )))
}

/// Sends the server behind `socket` a request about users.
///
/// # Errors
/// There is no server, or it refuses.
pub(crate) fn ask(socket: &Path, request: &Request) -> Result<Reply, Failure> {
    let failed = |error: io::Error| {
        let hint = match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                "; is `alluvium serve` running with this --data-dir?"
            }
            _ => "",
        };
        Failure::Failed(format!("{}: request to the server: {error}{hint}", socket.display()))
    };
    let mut stream = BlockingStream::connect(socket).map_err(failed)?;
    let mut line = serde_json::to_string(request).map_err(Failure::new)?;
    line.push('\n');
    stream.write_all(line.as_bytes()).map_err(failed)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).map_err(failed)?;
    match serde_json::from_str(&answer).map_err(Failure::new)? {
        Reply::Failed { reason } => Err(Failure::Failed(reason)),
        reply => Ok(reply),
    }
}

// -- The server's end

/// An open control socket. Clients can connect, and wait until the server answers.
pub(crate) struct Socket {
    path: PathBuf,
    listener: UnixListener,
    wal: Target,
}

impl Socket {
    /// Opens the socket. Called before the ports open, so that a client that finds a port also
    /// finds the socket. Returns `None`, with a warning, if that fails: the server works without
    /// it.
    pub(crate) fn open(config: &ServeConfig) -> Option<Self> {
        let path = config.data_dir.join(SOCKET);
        match Target::at(&config.wal).and_then(|wal| Ok((listen(&path)?, wal))) {
            Ok((listener, wal)) => Some(Self { path, listener, wal }),
            Err(error) => {
                tracing::warn!(
                    "no control socket at {}: {error}; `alluvium user` does not work, and \
                     `alluvium wal resize` needs this server to be stopped",
                    path.display()
                );
                None
            }
        }
    }

    /// Starts to answer requests.
    pub(crate) fn answer(
        self,
        config: &ServeConfig,
        device: SharedDevice,
        store: Store,
        users: UserAdmin,
    ) -> Control {
        let Self { path, listener, wal } = self;
        let resizer = Arc::new(Resizer::new(config, wal, device, store));
        let task = tokio::spawn(accept(listener, resizer.clone(), users));
        Control { path, task, resizer }
    }
}

/// A control socket that answers requests.
pub(crate) struct Control {
    path: PathBuf,
    task: JoinHandle<()>,
    resizer: Arc<Resizer>,
}

impl Control {
    /// Stops answering. Requests in progress continue until the log is closed.
    pub(crate) fn stop(&self) {
        self.task.abort();
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }

    /// Cuts off what was added to the file for requests that ended when the log was closed. A file
    /// that is still being extended after [`STEP_TIMEOUT`] keeps its length.
    pub(crate) async fn closed(self) {
        let step = self.resizer.steps.lock();
        if let Ok(_step) = tokio::time::timeout(STEP_TIMEOUT, step).await {
            self.resizer.shorten().await;
        }
    }
}

/// Binds the socket. The directory is locked, so an existing socket was left by a server that was
/// killed.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let listener = unix_socket::bind(path)?;
    // Other users that connect before this are refused in `accept`.
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn accept(listener: UnixListener, resizer: Arc<Resizer>, users: UserAdmin) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("cannot accept a connection to the control socket: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        let own = rustix::process::geteuid().as_raw();
        if stream.peer_cred().is_ok_and(|peer| [0, own].contains(&peer.uid())) {
            let (resizer, users) = (resizer.clone(), users.clone());
            tokio::spawn(async move {
                if let Err(error) = answer(stream, resizer, users).await {
                    tracing::debug!("a connection to the control socket failed: {error}");
                }
            });
        }
    }
}

async fn answer(stream: UnixStream, resizer: Arc<Resizer>, users: UserAdmin) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut read = tokio::io::BufReader::new(read.take(MAX_REQUEST_BYTES));
    tokio::time::timeout(REQUEST_TIMEOUT, read.read_line(&mut line)).await??;
    let (wal, capacity_bytes) = match serde_json::from_str(&line) {
        Ok(Request::Resize { wal, capacity_bytes }) => (wal, capacity_bytes),
        Ok(request) => {
            let reply = change_users(&users, request).await;
            return send_reply(
                &mut write,
                &reply.unwrap_or_else(|reason| Reply::Failed { reason }),
            )
            .await;
        }
        Err(error) => {
            let reason = format!("the server cannot parse the request: {error}");
            return send_reply(&mut write, &Reply::Failed { reason }).await;
        }
    };
    if wal != resizer.wal {
        return send_reply(&mut write, &Reply::OtherLog).await;
    }
    let (reports, mut updates) = watch::channel(None);
    // In a task of its own, because it continues if the client disconnects.
    tokio::spawn(resizer.resize(Size { bytes: capacity_bytes }, reports));
    while updates.changed().await.is_ok() {
        let Some(reply) = updates.borrow_and_update().clone() else { continue };
        send_reply(&mut write, &reply).await?;
        if reply.is_outcome() {
            break;
        }
    }
    Ok(())
}

async fn change_users(users: &UserAdmin, request: Request) -> Result<Reply, String> {
    let reason = |error: alluvium_broker::UserError| error.to_string();
    match request {
        Request::SetPassword { user, password } => {
            users.set_password(&user, &password).await.map_err(reason)?;
            tracing::info!("password of user {user:?} set");
            Ok(Reply::Done)
        }
        Request::DeleteUser { user } => match users.delete(&user).await.map_err(reason)? {
            true => {
                tracing::info!("user {user:?} deleted");
                Ok(Reply::Done)
            }
            false => Err(format!("there is no user {user:?}")),
        },
        Request::ListUsers => {
            let all = users.list().into_iter().map(|(user, mechanisms)| {
                (user, mechanisms.into_iter().map(str::to_owned).collect())
            });
            Ok(Reply::Users(all.collect()))
        }
        Request::Resize { .. } => Err("not a request about users".into()),
    }
}

async fn send_reply(write: &mut OwnedWriteHalf, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_string(reply)?;
    line.push('\n');
    write.write_all(line.as_bytes()).await
}

/// Resizes the log that the server has open.
struct Resizer {
    config: ServeConfig,
    wal: Target,
    device: SharedDevice,
    store: Store,
    /// The file contains nothing but the log, so what the log does not use can be cut off.
    whole: bool,
    /// Serializes changes of the file and resize requests to the log.
    steps: Mutex<()>,
}

type Reports = watch::Sender<Option<Reply>>;

impl Resizer {
    fn new(config: &ServeConfig, wal: Target, device: SharedDevice, store: Store) -> Self {
        let log_bytes = store.wal_header().capacity_bytes;
        let whole = !device.geometry().block_device && device.capacity_bytes() == log_bytes;
        Self { config: config.clone(), wal, device, store, whole, steps: Mutex::default() }
    }

    async fn resize(self: Arc<Self>, wanted: Size, reports: Reports) {
        let path = self.config.wal.display();
        let before = Size { bytes: self.store.wal_header().capacity_bytes };
        if before != wanted {
            tracing::info!("{path}: resizing from {before} to {wanted}");
        }
        let outcome = match self.try_resize(wanted, &reports).await {
            Ok(()) => {
                tracing::info!("{path}: the capacity of the write-ahead log is now {wanted}");
                Reply::Done
            }
            Err(reason) => {
                tracing::warn!("{path}: not resized to {wanted}: {reason}");
                Reply::Failed { reason: format!("{path}: not resized to {wanted}: {reason}") }
            }
        };
        self.cut_off().await;
        reports.send_replace(Some(outcome));
    }

    async fn try_resize(&self, wanted: Size, reports: &Reports) -> Result<(), String> {
        let mut resizing = {
            let _step = self.steps.lock().await;
            if wanted.bytes != self.store.wal_header().capacity_bytes {
                self.check(wanted)?;
            }
            if wanted.bytes > self.device.capacity_bytes() {
                self.enlarge(wanted, reports.clone()).await?;
            }
            self.store.request_resize(wanted.bytes).map_err(describe)?
        };
        let mut tick = tokio::time::interval(REPORT_INTERVAL);
        loop {
            tokio::select! {
                outcome = &mut resizing => return outcome.map(drop).map_err(describe),
                _ = tick.tick() => {
                    let distance_bytes = self.store.stats().wal.resize_distance_bytes;
                    reports.send_replace(Some(Reply::Waiting { distance_bytes }));
                }
            }
        }
    }

    /// Refuses now what the next start would refuse.
    fn check(&self, wanted: Size) -> Result<(), String> {
        let (least, most) = (limits::WAL_CAPACITY_MIN, limits::WAL_CAPACITY_MAX);
        if !(least..=most).contains(&wanted) {
            return Err(format!("the log of a server must have {least} to {most}"));
        }
        storage::stream_options(&self.config, wanted).map(drop).map_err(|refused| match refused {
            Failure::Usage(reason) => reason,
            other => format!("{other:?}"),
        })
    }

    async fn enlarge(&self, wanted: Size, reports: Reports) -> Result<(), String> {
        let device = self.device.clone();
        let progress: alluvium_device::Progress = Arc::new(move |done_bytes, total_bytes| {
            reports.send_replace(Some(Reply::Extending { done_bytes, total_bytes }));
        });
        tokio::task::spawn_blocking(move || device.set_capacity(wanted.bytes, Some(&progress)))
            .await
            .map_err(|error| error.to_string())?
            .map_err(|error| match Failure::from(error) {
                Failure::Failed(reason) => reason,
                other => format!("{other:?}"),
            })
    }

    /// Cuts off the part of the file that is no longer needed. Does nothing after a failure,
    /// because the content of the headers is unknown then, or while another resize is in progress,
    /// because that one calls this when it ends.
    async fn cut_off(&self) {
        let _step = self.steps.lock().await;
        if self.store.failure().is_none() && self.store.stats().wal.resize_to_bytes.is_none() {
            self.shorten().await;
        }
    }

    /// Like [`Resizer::cut_off`], for a caller that knows that no resize is in progress and that
    /// the headers are valid.
    async fn shorten(&self) {
        let log_bytes = self.store.wal_header().capacity_bytes;
        if !self.whole || self.device.capacity_bytes() <= log_bytes {
            return;
        }
        let device = self.device.clone();
        let cut = tokio::task::spawn_blocking(move || device.set_capacity(log_bytes, None)).await;
        if let Ok(Err(error)) = cut {
            tracing::warn!(
                "the file stays longer than the write-ahead log: cannot cut it off: {error}"
            );
        }
    }
}

fn describe(error: ResizeError) -> String {
    match error {
        ResizeError::Replaced { capacity_bytes } => {
            format!("replaced by a later request, for {}", Size { bytes: capacity_bytes })
        }
        ResizeError::Refused { reason, .. } => {
            format!(
                "{reason}. While the server is stopped, less of the log may be in use, and \
                     the command may succeed"
            )
        }
        other => other.to_string(),
    }
}
