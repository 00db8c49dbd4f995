//! The server under test, as a separate process.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::client::{Client, Resource};
use crate::exec::{cargo, describe, wait};
use crate::rng::Rng;

/// Preallocating a WAL and recovery take seconds; a slow machine under load may take longer.
const START_LIMIT: Duration = Duration::from_secs(180);
/// Interval of readings of the metrics while a condition is waited for.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// A graceful stop uploads pending data and closes the WAL.
const STOP_LIMIT: Duration = Duration::from_secs(120);

/// Builds the binary, or returns the named one.
///
/// The dev profile suffices: its dependencies are optimised, and the gate has already built most of
/// it.
pub(crate) fn binary(root: &Path, named: Option<&Path>) -> Result<PathBuf, Error> {
    built(root, named, "dev")
}

/// Builds the binary with the release profile, for measurements, or returns the named one.
pub(crate) fn release_binary(root: &Path, named: Option<&Path>) -> Result<PathBuf, Error> {
    built(root, named, "release")
}

fn built(root: &Path, named: Option<&Path>, profile: &str) -> Result<PathBuf, Error> {
    if let Some(path) = named {
        return fs::canonicalize(path)
            .map_err(|error| format!("--server {}: {error}", path.display()).into());
    }
    let mut build = cargo(root);
    build.args(["build", "--locked", "--package", "alluvium", "--bin", "alluvium"]);
    build.args(["--profile", profile]);
    println!("{}", describe(&build));
    let status = build.status()?;
    if !status.success() {
        return Err(format!("`{}` failed: {status}", describe(&build)).into());
    }
    let target = match std::env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => root.join(directory),
        None => root.join("target"),
    };
    let directory = if profile == "dev" { "debug" } else { profile };
    Ok(target.join(directory).join("alluvium"))
}

/// How to start a server.
#[derive(Clone)]
pub(crate) struct Config {
    /// The server's binary.
    pub(crate) binary: PathBuf,
    /// The directory of the server's data and log file.
    pub(crate) directory: PathBuf,
    /// Capacity of the WAL in MiB.
    pub(crate) wal_mebibytes: u64,
    /// Memory for recent records in MiB. Smaller than a suite's data, so that most of it is read
    /// from objects.
    pub(crate) log_cache_mebibytes: u64,
    /// Path of the WAL, if it is not in the data directory.
    pub(crate) wal: Option<PathBuf>,
    /// Settings of the object store, if they are not the defaults.
    pub(crate) objects: Option<Objects>,
}

/// Settings of the object store and its caches.
#[derive(Clone)]
pub(crate) struct Objects {
    /// Arguments of the server.
    pub(crate) arguments: Vec<String>,
    /// Credentials.
    pub(crate) environment: Vec<(&'static str, String)>,
}

/// The way a server is ended.
#[derive(Clone, Copy)]
pub(crate) enum Ending {
    /// SIGTERM: a graceful stop, which must succeed.
    Sigterm,
    /// SIGKILL: the process cannot write any more; the kernel keeps what was written.
    Sigkill,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sigterm => "SIGTERM",
            Self::Sigkill => "SIGKILL",
        })
    }
}

/// A response of `/metrics`.
pub(crate) struct Metrics(String);

impl Metrics {
    /// Reads all metrics from an admin port.
    pub(crate) fn read(address: &str) -> Result<Self, Error> {
        let mut connection = TcpStream::connect(address)?;
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        connection.write_all(request.as_bytes())?;
        let mut text = String::new();
        connection.read_to_string(&mut text)?;
        Ok(Self(text))
    }

    /// Returns the value of a metric, named with its labels if it has any. `None` if it does not
    /// exist (yet).
    pub(crate) fn get(&self, name: &str) -> Option<f64> {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line?.trim().parse().ok()
    }
}

/// A running server. It is killed when dropped.
pub(crate) struct Server {
    config: Config,
    address: SocketAddr,
    child: Child,
    /// Where the log of the current process begins in the log file.
    log_from: u64,
}

impl Server {
    /// Starts a server in an empty directory, on a free port, and waits until it accepts
    /// connections.
    pub(crate) fn start(config: Config) -> Result<Self, Error> {
        let mut server = Self::spawn(config)?;
        server.wait_until_ready()?;
        Ok(server)
    }

    /// Starts a server in an empty directory, on a free port, without waiting for it.
    pub(crate) fn spawn(config: Config) -> Result<Self, Error> {
        if config.directory.exists() {
            fs::remove_dir_all(&config.directory)?;
        }
        fs::create_dir_all(&config.directory)?;
        let address = free_address()?;
        let child = spawn(&config, address)?;
        Ok(Self { config, address, child, log_from: 0 })
    }

    /// The ID of the current process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The address that clients connect to. It stays the same over all restarts.
    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Returns a command for a client program, with the server's address in `BOOTSTRAP`.
    pub(crate) fn client(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("BOOTSTRAP", self.address()).env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::null());
        command
    }

    /// Ends the process and waits for its end.
    pub(crate) fn end(&mut self, ending: Ending) -> Result<(), Error> {
        if let Ending::Sigkill = ending {
            self.child.kill()?;
            self.child.wait()?;
            return Ok(());
        }
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a child has a process id"), Signal::TERM)?;
        match wait(&mut self.child, STOP_LIMIT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                Err(format!("the server ended with {status} after SIGTERM{}", self.log_tail())
                    .into())
            }
            None => {
                let seconds = STOP_LIMIT.as_secs();
                Err(format!(
                    "the server was still running {seconds} s after SIGTERM{}",
                    self.log_tail()
                )
                .into())
            }
        }
    }

    /// Starts with this write-ahead log from now on.
    pub(crate) fn use_wal(&mut self, path: &Path) {
        self.config.wal = Some(path.to_path_buf());
    }

    /// Starts the process again, with the same data and address, without waiting for it.
    pub(crate) fn spawn_again(&mut self) -> Result<(), Error> {
        self.log_from = fs::metadata(log_path(&self.config))?.len();
        self.child = spawn(&self.config, self.address)?;
        Ok(())
    }

    /// Starts the process again, waits until it accepts connections, and returns how long that
    /// took.
    pub(crate) fn start_again(&mut self) -> Result<Duration, Error> {
        let start = Instant::now();
        self.spawn_again()?;
        self.wait_until_ready()?;
        Ok(start.elapsed())
    }

    /// Damages every place of the log file with these bytes, while the process does not run.
    /// Returns their number.
    pub(crate) fn damage_log(&self, pattern: &[u8]) -> Result<usize, Error> {
        let path = self.config.directory.join("data").join("wal");
        let mut log = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let begins = log.iter().enumerate().filter(|(_, byte)| **byte == pattern[0]);
        let found = begins.map(|(at, _)| at).filter(|at| log[*at..].starts_with(pattern));
        let found: Vec<usize> = found.collect();
        for at in &found {
            log[*at] ^= 1;
        }
        fs::write(&path, log)?;
        Ok(found.len())
    }

    /// Stops the server for good and removes its data. For suites that passed.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        self.end(Ending::Sigterm)?;
        fs::remove_dir_all(&self.config.directory)?;
        Ok(())
    }

    /// Sets a user's password with the server's own command.
    pub(crate) fn add_user(&self, user: &str, password: &str) -> Result<(), Error> {
        let mut add = clean(&self.config.binary);
        add.args(["user", "add", user, "--data-dir"]).arg(self.config.directory.join("data"));
        add.stdin(Stdio::piped());
        let mut child = add.spawn().map_err(|error| format!("{}: {error}", describe(&add)))?;
        child.stdin.take().expect("standard input is piped").write_all(password.as_bytes())?;
        match child.wait()? {
            status if status.success() => Ok(()),
            status => Err(format!("`{}`: {status}{}", describe(&add), self.log_tail()).into()),
        }
    }

    /// Sets a setting of the broker.
    pub(crate) fn set(&self, name: &str, value: &str) -> Result<(), Error> {
        Client::connect(self.address)?.set(Resource::Brokers, name, value)
    }

    /// The current resident memory of the process, in KiB.
    pub(crate) fn memory_kib(&self) -> Option<u64> {
        memory_kib(self.pid())
    }

    /// The server's complete log.
    pub(crate) fn log(&self) -> Result<String, Error> {
        Ok(String::from_utf8_lossy(&fs::read(log_path(&self.config))?).into_owned())
    }

    /// The last lines of the server's log, to append to a message.
    pub(crate) fn log_tail(&self) -> String {
        let path = log_path(&self.config);
        let log = fs::read(&path).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(20)..].join("\n  | ");
        format!("\n  end of {}:\n  | {tail}", path.display())
    }

    /// Reads a metric of the current process.
    pub(crate) fn metric(&self, name: &str) -> Result<f64, Error> {
        Ok(self.metrics()?.get(name).ok_or_else(|| format!("no metric {name}"))?)
    }

    /// Reads all metrics of the current process.
    pub(crate) fn metrics(&self) -> Result<Metrics, Error> {
        Metrics::read(&self.admin_address()?)
    }

    /// Polls the metrics until the condition holds.
    ///
    /// # Errors
    /// It fails, or does not hold within `limit`.
    pub(crate) fn until(
        &self,
        what: &str,
        limit: Duration,
        holds: impl Fn(&Metrics) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        loop {
            // Right after a restart the log may still end with the previous address of the metrics.
            if let Ok(metrics) = self.metrics()
                && holds(&metrics)?
            {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let seconds = limit.as_secs();
                return Err(format!("not within {seconds} s: {what}{}", self.log_tail()).into());
            }
            thread::sleep(POLL_EVERY);
        }
    }

    /// The address of the metrics. (The Kafka port opens a moment before the log line appears.)
    pub(crate) fn admin_address(&self) -> Result<String, Error> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let log = fs::read_to_string(log_path(&self.config))?;
            let ready = log.rsplit_once("alluvium is ready").map(|(_, ready)| ready);
            let address = ready.and_then(|line| line.split_once("metrics on http://"));
            if let Some((address, _)) = address.and_then(|(_, rest)| rest.split_once('/')) {
                return Ok(address.to_owned());
            }
            if Instant::now() >= deadline {
                return Err("the log does not contain the address of the metrics".into());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether the current process accepts connections and has reported that it is ready. A
    /// connection alone may be one to another program that listens on the port.
    pub(crate) fn is_ready(&self) -> Result<bool, Error> {
        if TcpStream::connect(self.address).is_err() {
            return Ok(false);
        }
        let mut log = File::open(log_path(&self.config))?;
        log.seek(SeekFrom::Start(self.log_from))?;
        let mut written = Vec::new();
        log.read_to_end(&mut written)?;
        Ok(String::from_utf8_lossy(&written).contains("alluvium is ready"))
    }

    /// Waits until the current process is ready.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + START_LIMIT;
        while !self.is_ready()? {
            if let Some(status) = self.child.try_wait()? {
                return Err(
                    format!("the server ended with {status} at start{}", self.log_tail()).into()
                );
            }
            if Instant::now() >= deadline {
                let seconds = START_LIMIT.as_secs();
                return Err(format!(
                    "the server accepts no connections after {seconds} s{}",
                    self.log_tail()
                )
                .into());
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended already; the error is of no use here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log_path(config: &Config) -> PathBuf {
    config.directory.join("server.log")
}

/// The peak resident memory of a process, in KiB.
pub(crate) fn peak_memory_kib(pid: u32) -> Option<u64> {
    status_kib(pid, "VmHWM:")
}

/// The current resident memory of a process, in KiB.
pub(crate) fn memory_kib(pid: u32) -> Option<u64> {
    status_kib(pid, "VmRSS:")
}

fn status_kib(pid: u32, field: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

/// Returns a command of the binary without the settings, credentials and proxies of the operator's
/// environment, which are not under test.
pub(crate) fn clean(binary: &Path) -> Command {
    let mut command = Command::new(binary);
    for (name, _) in std::env::vars_os() {
        let upper = name.to_string_lossy().to_ascii_uppercase();
        let theirs = ["ALLUVIUM_", "AWS_", "SSL_CERT_"].iter().any(|it| upper.starts_with(it));
        if theirs || upper.ends_with("_PROXY") {
            command.env_remove(name);
        }
    }
    command
}

fn spawn(config: &Config, address: SocketAddr) -> Result<Child, Error> {
    let log = OpenOptions::new().create(true).append(true).open(log_path(config))?;
    let mut command = clean(&config.binary);
    command.arg("serve").arg("--listen").arg(address.to_string());
    command.arg("--data-dir").arg(config.directory.join("data"));
    command.arg("--wal-capacity").arg(format!("{}MiB", config.wal_mebibytes));
    command.arg("--log-cache").arg(format!("{}MiB", config.log_cache_mebibytes));
    command.args(["--admin-listen", "127.0.0.1:0"]);
    if let Some(objects) = &config.objects {
        command.args(&objects.arguments);
        command.envs(objects.environment.iter().map(|(name, value)| (name, value)));
    }
    if let Some(wal) = &config.wal {
        command.arg("--wal").arg(wal);
    }
    let stdout: File = log.try_clone()?;
    command.stdin(Stdio::null()).stdout(stdout).stderr(log);
    command.spawn().map_err(|error| format!("{}: {error}", config.binary.display()).into())
}

/// Returns a free port on the loopback interface, outside the range of ephemeral ports. It stays
/// reserved for this process: another process that asks gets another port, even before anything
/// listens on this one and between two starts of a server.
///
/// With a port in the ephemeral range, a client that reconnects while the server is down can get
/// the server's port as its own source port and connect to itself; the server then finds its port
/// in use.
pub(crate) fn free_address() -> Result<SocketAddr, Error> {
    // A lock on a file per port, held to the end of the process.
    static RESERVED: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let mut reserved = RESERVED.lock().expect("no holder panics");
    let directory = std::env::temp_dir().join("alluvium-xtask-ports");
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let mut rng = Rng::new(u64::from(std::process::id()) + ((reserved.len() as u64) << 32));
    for _ in 0..1000 {
        let port = 20_000 + rng.below(12_000) as u16;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let path = directory.join(port.to_string());
        let lock = File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => continue,
            Err(TryLockError::Error(error)) => {
                return Err(format!("{}: {error}", path.display()).into());
            }
        }
        if TcpListener::bind(address).is_ok() {
            reserved.push(lock);
            return Ok(address);
        }
    }
    Err("no free port between 20000 and 32000".into())
}
