//! The server under test, started on existing files, with access to its log and metrics.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::exec::{describe, wait};
use crate::server::{Ending, clean, free_address};

/// The longest wait for a start, which takes a fraction of a second.
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Interval at which the log is checked while the server starts.
const PAUSE: Duration = Duration::from_millis(3);

/// The smallest log and caches, and transactions that stay open.
pub(super) const SMALL: [&str; 5] = [
    "--wal-capacity=64MiB",
    "--log-cache=16MiB",
    "--block-cache=16MiB",
    "--cold-read-memory=8MiB",
    "--transaction-max-timeout=24h",
];

/// The program of a server and the directory of its files.
#[derive(Clone)]
pub(super) struct Installation {
    pub(super) binary: PathBuf,
    /// Contains `data`, `disk-cache` and `server.log`.
    pub(super) directory: PathBuf,
}

/// Settings that vary between starts.
#[derive(Clone, Copy)]
pub(super) struct Settings {
    /// Whether to upload and compact as often as possible, or not at all.
    pub(super) uploads: bool,
    pub(super) disk_cache: bool,
}

/// The result of a start.
pub(super) enum Start {
    Ready(Process),
    /// The process has ended by itself.
    Ended(ExitStatus),
    /// Neither ready nor ended. It was killed.
    Hangs,
}

/// A running server.
pub(super) struct Process {
    child: Child,
    pub(super) address: SocketAddr,
    admin: SocketAddr,
}

impl Installation {
    pub(super) fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    pub(super) fn disk_cache(&self) -> PathBuf {
        self.directory.join("disk-cache")
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join("server.log")
    }

    /// Returns everything that the servers in this directory have logged.
    pub(super) fn log(&self) -> Result<String, Error> {
        read_log(&self.log_path())
    }

    /// Starts a server and waits until it accepts connections.
    pub(super) fn start(&self, settings: Settings) -> Result<Start, Error> {
        let mut command = clean(&self.binary);
        command.arg("serve").arg("--data-dir").arg(self.data());
        command.args(SMALL).arg("--upload-size=4MiB");
        command.args(match settings.uploads {
            true => [
                "--upload-interval=100ms",
                "--log-compaction-interval=20ms",
                "--compaction-size=4MiB",
            ],
            false => {
                ["--upload-interval=24h", "--log-compaction-interval=24h", "--compaction-size=0"]
            }
        });
        if settings.disk_cache {
            command.arg("--disk-cache").arg(self.disk_cache());
            command.args(["--disk-cache-size=128MiB", "--disk-cache-memory=16MiB"]);
        }
        launch(command, [free_address()?, free_address()?], &self.log_path())
    }

    /// Creates an empty directory in place of an existing one.
    pub(super) fn clear(directory: &Path) -> Result<(), Error> {
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
        Ok(fs::create_dir_all(directory)?)
    }
}

/// Returns everything that servers have logged to a file, which may not exist.
pub(super) fn read_log(path: &Path) -> Result<String, Error> {
    match fs::read(path) {
        Ok(log) => Ok(String::from_utf8_lossy(&log).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error.into()),
    }
}

/// Starts a server on these ports for clients and metrics, and waits until it accepts connections.
/// Its output is appended to the file at `log_path`.
pub(super) fn launch(
    mut command: Command,
    [address, admin]: [SocketAddr; 2],
    log_path: &Path,
) -> Result<Start, Error> {
    let before = read_log(log_path)?.len();
    let log = OpenOptions::new().create(true).append(true).open(log_path)?;
    command.arg("--listen").arg(address.to_string());
    command.arg("--admin-listen").arg(admin.to_string());
    let stdout: File = log.try_clone()?;
    command.stdin(Stdio::null()).stdout(stdout).stderr(log);
    let child = command.spawn().map_err(|error| format!("{}: {error}", describe(&command)))?;
    let mut process = Process { child, address, admin };
    let begun = Instant::now();
    // A connection would not show it: the server first opens its ports only to check that they are
    // free.
    while !read_log(log_path)?[before..].contains("alluvium is ready") {
        if let Some(status) = process.child.try_wait()? {
            return Ok(Start::Ended(status));
        }
        if begun.elapsed() > START_LIMIT {
            return Ok(Start::Hangs);
        }
        thread::sleep(PAUSE);
    }
    Ok(Start::Ready(process))
}

impl Process {
    /// The ID of the process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the status if the process has ended by itself.
    pub(super) fn ended(&mut self) -> Result<Option<ExitStatus>, Error> {
        Ok(self.child.try_wait()?)
    }

    /// Ends the process. `None` if it did not end after SIGTERM.
    pub(super) fn end(mut self, ending: Ending) -> Result<Option<ExitStatus>, Error> {
        if let Ending::Sigkill = ending {
            self.child.kill()?;
            return Ok(Some(self.child.wait()?));
        }
        if let Some(status) = self.child.try_wait()? {
            return Ok(Some(status));
        }
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a child has a process id"), Signal::TERM)?;
        Ok(wait(&mut self.child, STOP_LIMIT)?)
    }

    /// Returns the body of an answer of the admin port; empty if the port is closed.
    pub(super) fn get(&self, path: &str) -> Result<String, Error> {
        let Ok(mut connection) = TcpStream::connect(self.admin) else { return Ok(String::new()) };
        let host = self.admin;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        connection.write_all(request.as_bytes())?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        Ok(answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned())
    }

    /// Returns the value of a metric, summed over its labels.
    pub(super) fn metric(&self, name: &str) -> Result<Option<f64>, Error> {
        let metrics = self.get("/metrics")?;
        let values = metrics.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            (rest.starts_with([' ', '{'])).then(|| rest.rsplit_once(' ')?.1.parse::<f64>().ok())?
        });
        Ok(values.reduce(|sum, value| sum + value))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
