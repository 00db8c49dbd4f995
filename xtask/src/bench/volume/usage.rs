//! What a cluster has used: processor time, writes of its devices, counters of its servers; and how
//! busy that kept the machine.

use std::fs;
use std::iter::Sum;
use std::ops::Sub;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use crate::Error;
use crate::server::Metrics;

/// Writes of a block device, as the kernel counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceStat {
    pub(super) writes: u64,
    pub(super) bytes: u64,
    pub(super) flushes: u64,
}

impl DeviceStat {
    /// Parses /sys/block/NAME/stat (Documentation/block/stat.rst of Linux).
    pub(super) fn parse(text: &str) -> Option<Self> {
        let fields: Vec<u64> =
            text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        // Sectors are of 512 bytes, whatever the device's are. Flushes are there since Linux 5.5.
        let (writes, sectors, flushes) = (fields.get(4)?, fields.get(6)?, fields.get(15)?);
        Some(Self { writes: *writes, bytes: sectors * 512, flushes: *flushes })
    }
}

impl Sub for DeviceStat {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            writes: self.writes - before.writes,
            bytes: self.bytes - before.bytes,
            flushes: self.flushes - before.flushes,
        }
    }
}

impl Sum for DeviceStat {
    fn sum<I: Iterator<Item = Self>>(stats: I) -> Self {
        stats.fold(Self::default(), |sum, stat| Self {
            writes: sum.writes + stat.writes,
            bytes: sum.bytes + stat.bytes,
            flushes: sum.flushes + stat.flushes,
        })
    }
}

/// How busy the machine was since its start: whether a load was limited by its processors or by its
/// disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Machine {
    /// Clock ticks of all processors.
    ticks: u64,
    /// Of these, ticks without anything to run.
    idle: u64,
    /// Time with a request in progress on the disk of the devices' files. 0 if the kernel does not
    /// count it.
    disk: Duration,
}

impl Machine {
    /// Reads the counters of the kernel. `directory` is on the disk.
    pub(super) fn read(directory: &Path) -> Result<Self, Error> {
        let stat = fs::read_to_string("/proc/stat")?;
        let (ticks, idle) = processors(&stat).ok_or("/proc/stat has no processors")?;
        let device = fs::metadata(directory)?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        // A file system without a block device has no such file.
        let stat = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat"));
        let disk = stat.ok().and_then(|stat| disk_time(&stat)).unwrap_or_default();
        Ok(Self { ticks, idle, disk })
    }

    /// The share of the processors' time without anything to run, in percent.
    pub(super) fn idle_percent(&self) -> f64 {
        100.0 * self.idle as f64 / self.ticks as f64
    }

    /// The share of `seconds` with a request in progress on the disk, in percent.
    pub(super) fn disk_percent(&self, seconds: f64) -> f64 {
        100.0 * self.disk.as_secs_f64() / seconds
    }
}

impl Sub for Machine {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            ticks: self.ticks - before.ticks,
            idle: self.idle - before.idle,
            disk: self.disk.saturating_sub(before.disk),
        }
    }
}

/// The ticks of all processors in /proc/stat, and those of them without anything to run
/// (`proc_stat(5)`: user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of
/// user time).
fn processors(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> =
        line.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
    Some((ticks.iter().sum(), ticks.get(3)? + ticks.get(4)?))
}

/// `io_ticks` of /sys/block/NAME/stat: milliseconds with a request in progress.
fn disk_time(stat: &str) -> Option<Duration> {
    Some(Duration::from_millis(stat.split_whitespace().nth(9)?.parse().ok()?))
}

/// Sums of the servers' counters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counters {
    pub(super) busy: f64,
    pub(super) turns: f64,
    pub(super) records: f64,
    pub(super) log_writes: f64,
    pub(super) log_flushes: f64,
    pub(super) log_bytes: f64,
    pub(super) block_writes: f64,
    pub(super) block_bytes: f64,
    pub(super) checkpoint_bytes: f64,
    pub(super) store_flushes: f64,
    pub(super) checkpoints: f64,
    pub(super) installs: f64,
    /// Servers with a checkpoint in progress.
    pub(super) running: f64,
}

impl Counters {
    /// Bytes of all writes but those of the log's headers.
    pub(super) fn device_bytes(&self) -> f64 {
        self.log_bytes + self.block_bytes + self.checkpoint_bytes
    }

    /// Whether nothing was written since, and no checkpoint is in progress.
    pub(super) fn is_quiet_since(&self, before: &Self) -> bool {
        self.running == 0.0 && self.device_bytes() == before.device_bytes()
    }
}

/// Adds the counters of all servers up.
pub(super) fn sum(metrics: &[Metrics]) -> Result<Counters, Error> {
    let mut counters = Counters::default();
    let Counters {
        busy,
        turns,
        records,
        log_writes,
        log_flushes,
        log_bytes,
        block_writes,
        block_bytes,
        checkpoint_bytes,
        store_flushes,
        checkpoints,
        installs,
        running,
    } = &mut counters;
    for (sum, name) in [
        (busy, "volume_busy_answers_total"),
        (turns, "volume_turns_total"),
        (records, "wal_records_total"),
        (log_writes, "wal_block_writes_total"),
        (log_flushes, "wal_flushed_writes_total"),
        (log_bytes, "wal_device_bytes_total"),
        (block_writes, "volume_store_block_writes_total"),
        (block_bytes, "volume_store_block_bytes_total"),
        (checkpoint_bytes, "volume_store_checkpoint_bytes_total"),
        (store_flushes, "volume_store_flushes_total"),
        (checkpoints, "volume_checkpoints_total"),
        (installs, "volume_installs_total"),
        (running, "volume_checkpoint_running"),
    ] {
        let name = format!("alluvium_{name}");
        for metrics in metrics {
            *sum += metrics.get(&name).ok_or_else(|| format!("no metric {name}"))?;
        }
    }
    Ok(counters)
}

impl Sub for Counters {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            busy: self.busy - before.busy,
            turns: self.turns - before.turns,
            records: self.records - before.records,
            log_writes: self.log_writes - before.log_writes,
            log_flushes: self.log_flushes - before.log_flushes,
            log_bytes: self.log_bytes - before.log_bytes,
            block_writes: self.block_writes - before.block_writes,
            block_bytes: self.block_bytes - before.block_bytes,
            checkpoint_bytes: self.checkpoint_bytes - before.checkpoint_bytes,
            store_flushes: self.store_flushes - before.store_flushes,
            checkpoints: self.checkpoints - before.checkpoints,
            installs: self.installs - before.installs,
            running: self.running,
        }
    }
}

/// What a cluster has used since its start.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    /// Processor time of each server.
    pub(super) servers_cpu: Vec<Duration>,
    pub(super) export_cpu: Duration,
    /// Of all logs; `None` if they are files.
    pub(super) log: Option<DeviceStat>,
    /// Of all stores.
    pub(super) store: Option<DeviceStat>,
    pub(super) machine: Machine,
    pub(super) counters: Counters,
}

impl Usage {
    /// What was used since.
    pub(super) fn since(&self, before: &Self) -> Self {
        let devices =
            |now: Option<DeviceStat>, before| now.zip(before).map(|(now, before)| now - before);
        let servers = self.servers_cpu.iter().zip(&before.servers_cpu);
        Self {
            servers_cpu: servers.map(|(now, before)| now.saturating_sub(*before)).collect(),
            export_cpu: self.export_cpu.saturating_sub(before.export_cpu),
            log: devices(self.log, before.log),
            store: devices(self.store, before.store),
            machine: self.machine - before.machine,
            counters: self.counters - before.counters,
        }
    }

    /// Processor time of all servers.
    pub(super) fn all_servers_cpu(&self) -> Duration {
        self.servers_cpu.iter().sum()
    }

    /// Bytes written to all devices, as the kernel counts them.
    pub(super) fn kernel_bytes(&self) -> Option<f64> {
        Some((self.log?.bytes + self.store?.bytes) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "     120        0     2048       60     9000      31   262144     7000  \
        0     5000     7100        0        0        0        0      450       40\n";

    #[test]
    fn writes_and_flushes_of_a_device_are_parsed() {
        let stat = DeviceStat::parse(STAT).unwrap();
        assert_eq!(stat, DeviceStat { writes: 9000, bytes: 262_144 * 512, flushes: 450 });
        let twice: DeviceStat = [stat, stat].into_iter().sum();
        assert_eq!(twice - stat, stat);
        let (without_flushes, _) = STAT.trim_end().rsplit_once("450").unwrap();
        assert_eq!(DeviceStat::parse(without_flushes), None);
        assert_eq!(DeviceStat::parse("a device"), None);
    }

    #[test]
    fn the_idle_share_of_processors_and_disk_is_parsed() {
        let stat = "cpu  10 20 30 400 100 0 35 5 7 0\ncpu0 5 10 15 200 50 0 17 3 3 0\n";
        assert_eq!(processors(stat), Some((600, 500)));
        assert_eq!(processors("cpu0 5 10 15 200 50 0 17 3 3 0\n"), None);
        assert_eq!(processors("cpu  10 20\n"), None);
        assert_eq!(disk_time(STAT), Some(Duration::from_secs(5)));
        let machine = Machine { ticks: 600, idle: 150, disk: Duration::from_secs(5) };
        assert_eq!((machine.idle_percent(), machine.disk_percent(10.0)), (25.0, 50.0));
    }

    #[test]
    fn a_cluster_with_a_checkpoint_in_progress_is_not_quiet() {
        let before = Counters { log_bytes: 1.0, block_bytes: 2.0, ..Counters::default() };
        assert!(before.is_quiet_since(&before));
        assert!(!Counters { running: 1.0, ..before }.is_quiet_since(&before));
        assert!(!Counters { checkpoint_bytes: 4096.0, ..before }.is_quiet_since(&before));
    }
}
