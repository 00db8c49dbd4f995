//! Three servers, each with a log and a store on devices of its own, and one export.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::usage::{DeviceStat, Machine, Usage, sum};
use crate::Error;
use crate::bench::cpu_time;
use crate::exec::quietly;
use crate::loopdev::{LoopDevice, write_image};
use crate::server::{Metrics, free_address};
use crate::volume::leaders;
use crate::volume::member::{self, Coordination, Process, volume_command};

pub(super) const SERVERS: usize = 3;
/// The volume that is measured.
pub(super) const NAME: &str = "bench";

/// Time for the writes that follow a load, and for replicas to become exact.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);
/// Nothing was written for this time.
const QUIET: Duration = Duration::from_millis(600);

/// When a write is answered: `--apply` of the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Apply {
    Deferred,
    Dsync,
}

impl Apply {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Deferred => "deferred",
            Self::Dsync => "dsync",
        }
    }
}

/// Sizes in MiB.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) log: u64,
    pub(super) store: u64,
    pub(super) volume: u64,
}

/// A device: a loop device, or its file where there are none.
struct Device {
    file: PathBuf,
    device: Option<LoopDevice>,
}

impl Device {
    fn new(directory: &Path, name: &str, mebibytes: u64) -> Result<Self, Error> {
        let file = directory.join(name);
        // Written completely, so that a flush does not have to commit the file system's journal.
        write_image(&file, mebibytes)?;
        let device = LoopDevice::attach(&file);
        if let Err(error) = &device {
            println!("{name} is a file, not a loop device: {error}");
        }
        Ok(Self { file, device: device.ok() })
    }

    fn path(&self) -> &Path {
        self.device.as_ref().map_or(&self.file, LoopDevice::path)
    }

    /// What the kernel has counted. `None` for a file.
    fn stat(&self) -> Result<Option<DeviceStat>, Error> {
        let Some(device) = &self.device else { return Ok(None) };
        let name = device.path().file_name().expect("a device has a name").to_string_lossy();
        let path = format!("/sys/block/{name}/stat");
        let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        Ok(Some(DeviceStat::parse(&text).ok_or_else(|| format!("{path}: `{text}`"))?))
    }
}

/// The cluster. Its processes are killed and its devices detached when it is dropped.
pub(super) struct Cluster {
    pub(super) binary: PathBuf,
    pub(super) directory: PathBuf,
    pub(super) coordination: Coordination,
    metrics: Vec<SocketAddr>,
    listen: Vec<SocketAddr>,
    export: Option<Process>,
    pub(super) servers: Vec<Process>,
    /// The log and the store of each server. Dropped after the processes.
    devices: Vec<[Device; 2]>,
}

impl Cluster {
    /// Creates the devices, formats them by a first start, and creates the volume.
    pub(super) fn create(binary: &Path, directory: &Path, sizes: Sizes) -> Result<Self, Error> {
        let addresses = || (0..SERVERS).map(|_| free_address()).collect::<Result<Vec<_>, _>>();
        let devices = (1..=SERVERS).map(|server| {
            let log = Device::new(directory, &format!("log{server}"), sizes.log)?;
            Ok([log, Device::new(directory, &format!("store{server}"), sizes.store)?])
        });
        let mut cluster = Self {
            binary: binary.to_path_buf(),
            directory: directory.to_path_buf(),
            coordination: Coordination::Hosted(free_address()?),
            metrics: addresses()?,
            listen: addresses()?,
            export: None,
            servers: Vec::new(),
            devices: devices.collect::<Result<_, Error>>()?,
        };
        cluster.start(Apply::Deferred)?;
        cluster.command(&["create", NAME, "--size", &format!("{}MiB", sizes.volume)])?;
        Ok(cluster)
    }

    /// The logs, and the stores.
    pub(super) fn device_paths(&self) -> [Vec<&Path>; 2] {
        [0, 1].map(|which| self.devices.iter().map(|devices| devices[which].path()).collect())
    }

    /// Starts the servers.
    pub(super) fn start(&mut self, apply: Apply) -> Result<(), Error> {
        assert!(self.servers.is_empty(), "they are stopped before they are started again");
        for server in 0..SERVERS {
            let [log, store] = &self.devices[server];
            let options = [
                ("wal", log.path().display().to_string()),
                ("store", store.path().display().to_string()),
                ("listen", self.listen[server].to_string()),
                ("metrics-listen", self.metrics[server].to_string()),
                ("apply", apply.name().to_owned()),
            ];
            let (binary, directory) = (&self.binary, &self.directory);
            let mut process =
                member::server(binary, directory, server + 1, &self.coordination, &options);
            process.start()?;
            self.servers.push(process);
        }
        Ok(())
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join("nbd.sock")
    }

    /// A process that exports a volume at a socket; it is not started.
    pub(super) fn exporter(&self, volume: &str, socket: &Path) -> Process {
        member::exporter(&self.binary, &self.directory, volume, &self.coordination, socket, &[])
    }

    pub(super) fn start_export(&mut self) -> Result<(), Error> {
        let mut export = self.exporter(NAME, &self.socket());
        export.start()?;
        self.export = Some(export);
        Ok(())
    }

    pub(super) fn stop_export(&mut self) -> Result<(), Error> {
        self.export.take().map_or(Ok(()), |mut export| export.stop())
    }

    /// Stops the export and all servers.
    pub(super) fn stop(&mut self) -> Result<(), Error> {
        self.stop_export()?;
        // The first one hosts the coordination service of the others.
        while let Some(mut server) = self.servers.pop() {
            server.stop()?;
        }
        Ok(())
    }

    /// Starts everything again with another way of answering, when all replicas have everything: a
    /// leader that has started again does not have the older entries that a slow follower lacks,
    /// which would then pull all blocks during the measurement.
    pub(super) fn restart(&mut self, apply: Apply) -> Result<(), Error> {
        self.settled()?;
        self.stop()?;
        self.start(apply)?;
        self.start_export()?;
        self.leader().map(drop)
    }

    /// Runs a command about volumes.
    pub(super) fn command(&self, words: &[&str]) -> Result<(), Error> {
        quietly(&mut volume_command(&self.binary, &self.coordination, words))
    }

    fn replicas(&self) -> Result<Vec<serde_json::Value>, Error> {
        let mut info = volume_command(&self.binary, &self.coordination, &["info", NAME, "--json"]);
        let info: serde_json::Value = serde_json::from_slice(&crate::exec::output(&mut info)?)?;
        Ok(info["replicas"].as_array().ok_or("no replicas")?.clone())
    }

    /// Waits until all replicas of the volume are exact, and returns the server that leads.
    pub(super) fn leader(&self) -> Result<usize, Error> {
        let deadline = Instant::now() + SETTLE_LIMIT;
        loop {
            let replicas = self.replicas()?;
            let exact = replicas.iter().filter(|replica| replica["state"] == "exact").count();
            if let [leader] = leaders(&replicas)[..]
                && exact == SERVERS
            {
                return Ok(leader);
            }
            if Instant::now() >= deadline {
                return Err(format!("no exact replicas after {SETTLE_LIMIT:?}").into());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The metrics of each server.
    pub(super) fn metrics(&self) -> Result<Vec<Metrics>, Error> {
        self.metrics.iter().map(|address| Metrics::read(&address.to_string())).collect()
    }

    /// Addresses of the metrics.
    pub(super) fn metrics_addresses(&self) -> &[SocketAddr] {
        &self.metrics
    }

    /// What all processes and devices have used.
    pub(super) fn usage(&self) -> Result<Usage, Error> {
        let mut servers_cpu = Vec::new();
        for server in &self.servers {
            servers_cpu.push(cpu_time(server.pid()?)?);
        }
        let export_cpu = match &self.export {
            Some(export) => cpu_time(export.pid()?)?,
            None => Duration::ZERO,
        };
        let of = |which: usize| -> Result<Option<DeviceStat>, Error> {
            let stats: Result<Vec<_>, Error> =
                self.devices.iter().map(|devices| devices[which].stat()).collect();
            Ok(stats?.into_iter().sum())
        };
        Ok(Usage {
            servers_cpu,
            export_cpu,
            log: of(0)?,
            store: of(1)?,
            machine: Machine::read(&self.directory)?,
            counters: sum(&self.metrics()?)?,
        })
    }

    /// Waits until everything that was answered is written, and returns what was used.
    pub(super) fn settled(&self) -> Result<Usage, Error> {
        let deadline = Instant::now() + SETTLE_LIMIT;
        let mut before = self.usage()?;
        loop {
            thread::sleep(QUIET);
            let now = self.usage()?;
            if now.counters.is_quiet_since(&before.counters) {
                return Ok(now);
            }
            if Instant::now() >= deadline {
                return Err(format!("the servers write for {SETTLE_LIMIT:?} after the load").into());
            }
            before = now;
        }
    }
}
