//! The processes of the campaign: three servers, an exporter, members of etcd, and the commands
//! that look at them.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::exec::wait;
use crate::server::{Metrics, clean};

/// A start, or a stop by SIGTERM.
const LIMIT: Duration = Duration::from_secs(60);

/// A process that is started again and again, with a log of its own. It is killed when dropped.
pub(crate) struct Process {
    name: String,
    binary: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    /// The text of the log that states that it is ready.
    ready: &'static str,
    child: Option<Child>,
    /// Length of the log when it was started last.
    log_before: usize,
}

impl Process {
    pub(crate) fn new(
        name: &str,
        binary: &Path,
        directory: &Path,
        arguments: Vec<String>,
        ready: &'static str,
    ) -> Self {
        let log = directory.join(format!("{name}.log"));
        Self {
            name: name.to_owned(),
            binary: binary.into(),
            arguments,
            log,
            ready,
            child: None,
            log_before: 0,
        }
    }

    /// Starts it, and returns when it is ready.
    pub(crate) fn start(&mut self) -> Result<(), Error> {
        self.begin()?;
        self.wait_until_ready()
    }

    /// Starts it.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        self.log_before = log.metadata()?.len() as usize;
        let mut command = clean(&self.binary);
        let stdout: File = log.try_clone()?;
        command.args(&self.arguments).stdin(Stdio::null()).stdout(stdout).stderr(log);
        self.child = Some(command.spawn()?);
        Ok(())
    }

    /// Waits until it is ready, after a start.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let log = fs::read(&self.log)?;
            if String::from_utf8_lossy(&log[self.log_before..]).contains(self.ready) {
                return Ok(());
            }
            self.check()?;
            if Instant::now() >= deadline {
                return Err(format!("{} is not ready after {LIMIT:?}", self.name).into());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The ID of the current process.
    pub(crate) fn pid(&self) -> Result<u32, Error> {
        Ok(self.child.as_ref().ok_or("the process is not running")?.id())
    }

    /// Its complete log.
    pub(crate) fn log(&self) -> Result<String, Error> {
        Ok(String::from_utf8_lossy(&fs::read(&self.log)?).into_owned())
    }

    pub(crate) fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Fails if the process has ended by itself.
    pub(crate) fn check(&mut self) -> Result<(), Error> {
        let ended = self.child.as_mut().map(Child::try_wait).transpose()?.flatten();
        match ended {
            None => Ok(()),
            Some(status) => {
                let log = self.log.display();
                Err(format!("{} has ended with {status}; its log is {log}", self.name).into())
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Error> {
        let child = self.child.as_ref().ok_or("the process is not running")?;
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    /// Ends it with SIGKILL.
    pub(crate) fn kill(&mut self) -> Result<(), Error> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Ends it with SIGTERM, which it must answer with exit code 0.
    pub(crate) fn stop(&mut self) -> Result<(), Error> {
        self.signal(Signal::TERM)?;
        let mut child = self.child.take().expect("it was signalled");
        match wait(&mut child, LIMIT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("{} ended with {status} after SIGTERM", self.name).into()),
            None => Err(format!("{} ran for {LIMIT:?} after SIGTERM", self.name).into()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that is stopped is killed too; the error is of no use here.
        drop(self.kill());
    }
}

/// Where a cluster has its coordination service.
#[derive(Clone)]
pub(crate) enum Coordination {
    /// At this address of its first server.
    Hosted(SocketAddr),
    /// At these addresses of the members of etcd.
    Etcd(Vec<SocketAddr>),
}

impl fmt::Display for Coordination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hosted(address) => address.fmt(f),
            Self::Etcd(members) => {
                let members: Vec<_> = members.iter().map(SocketAddr::to_string).collect();
                write!(f, "etcd://{}", members.join(","))
            }
        }
    }
}

/// A member of etcd; it is not started. `addresses` has those for clients and peers of all members.
pub(super) fn etcd(
    directory: &Path,
    number: usize,
    addresses: &[(SocketAddr, SocketAddr)],
) -> Process {
    let name = |number: usize| format!("etcd{}", number + 1);
    let of_one =
        |(number, (_, peer)): (usize, &(_, SocketAddr))| format!("{}=http://{peer}", name(number));
    let cluster: Vec<_> = addresses.iter().enumerate().map(of_one).collect();
    let (client, peer) = addresses[number];
    let [client, peer] = [client, peer].map(|address| format!("http://{address}"));
    let data = directory.join(format!("{}.data", name(number)));
    let options = [
        ("name", name(number)),
        ("data-dir", data.display().to_string()),
        ("listen-client-urls", client.clone()),
        ("advertise-client-urls", client),
        ("listen-peer-urls", peer.clone()),
        ("initial-advertise-peer-urls", peer),
        ("initial-cluster", cluster.join(",")),
        ("logger", "zap".to_owned()),
    ];
    let ready = "serving client traffic insecurely";
    let arguments = arguments(&[], options.into_iter());
    Process::new(&name(number), Path::new("etcd"), directory, arguments, ready)
}

/// A server of a cluster; it is not started. The first one, whose number is 1, hosts the
/// coordination service, unless that is etcd. `options` are names without the dashes, and values.
pub(crate) fn server(
    binary: &Path,
    directory: &Path,
    number: usize,
    coordination: &Coordination,
    options: &[(&str, String)],
) -> Process {
    let file = directory.join("coordination").display().to_string();
    let hosts = number == 1 && matches!(coordination, Coordination::Hosted(_));
    let hosted = hosts.then_some(("coordination-file", file));
    let given = [("coordination", coordination.to_string())].into_iter().chain(hosted);
    let arguments = arguments(&["volume", "serve"], given.chain(options.iter().cloned()));
    Process::new(&format!("server{number}"), binary, directory, arguments, " is ready: ")
}

/// Options of the devices of a server whose log and store are small files.
pub(crate) fn small_devices(directory: &Path, number: usize) -> [(&'static str, String); 4] {
    let path = |what: &str| directory.join(format!("{what}{number}")).display().to_string();
    [
        ("wal", path("wal")),
        ("wal-capacity", "160MiB".to_owned()),
        ("store", path("store")),
        ("store-capacity", "256MiB".to_owned()),
    ]
}

/// A process that exports a volume at a socket; it is not started.
pub(crate) fn exporter(
    binary: &Path,
    directory: &Path,
    volume: &str,
    coordination: &Coordination,
    socket: &Path,
    options: &[(&str, String)],
) -> Process {
    let given =
        [("coordination", coordination.to_string()), ("socket", socket.display().to_string())];
    let words = ["volume", "export", volume, "--take"];
    let arguments = arguments(&words, given.into_iter().chain(options.iter().cloned()));
    let name = format!("export-{volume}");
    Process::new(&name, binary, directory, arguments, " is exported: ")
}

fn arguments<'a>(words: &[&str], options: impl Iterator<Item = (&'a str, String)>) -> Vec<String> {
    let options = options.flat_map(|(name, value)| [format!("--{name}"), value]);
    words.iter().map(|word| (*word).to_owned()).chain(options).collect()
}

/// Reads a metric of the server whose metrics are at this address.
pub(crate) fn metric(address: SocketAddr, name: &str) -> Result<u64, Error> {
    let value = Metrics::read(&address.to_string())?.get(name);
    Ok(value.ok_or_else(|| format!("no metric {name}"))? as u64)
}

/// A command of the binary about the volumes of a cluster.
pub(crate) fn volume_command(
    binary: &Path,
    coordination: &Coordination,
    words: &[&str],
) -> Command {
    let mut command = clean(binary);
    command.arg("volume").args(words).arg("--coordination").arg(coordination.to_string());
    command
}
