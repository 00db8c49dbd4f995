//! The load and its check: several NBD connections that write, zero, trim and read, and know for
//! each unit of 512 bytes which contents a read may return.
//!
//! A unit is written by one worker, each time with a higher version. A read by any worker returns a
//! version that is not below the newest one acknowledged or read before it began, and not above the
//! newest one issued when it ended. So a write of unknown outcome may be missing or present, but
//! what was seen once stays, and a write that takes effect again after a later one is found.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::nbd::{Command, Connection, NbdError};
use crate::rng::Rng;

pub(super) const WORKERS: usize = 4;
/// Bytes whose version is checked. Smaller than a block of the volume, so that the gateway merges.
const UNIT: usize = 512;
const UNITS_PER_BLOCK: u64 = 4096 / UNIT as u64;
/// Units that one worker writes, in turn with the others.
const RUN_UNITS: u64 = 128;
/// Runs at each base.
const RUNS: u64 = 64;
/// Bytes of a volume's region, which is one raft group.
const REGION: u64 = 64 << 30;
/// Where the runs begin. The first run of the second base is in two regions.
const BASES: [u64; 3] = [0, REGION - RUN_UNITS * UNIT as u64 / 2, 2 * REGION];
/// A size of the volume that has all bases, and [`FIO_OFFSET`] outside of the runs.
pub(super) const VOLUME_BYTES: u64 = 3 * REGION;
pub(super) const FIO_OFFSET: u64 = 1 << 30;
/// An operation that took at least this long is kept for the figures.
const SLOW: Duration = Duration::from_millis(20);

/// Versions that a unit may get during one read.
const KEPT_VERSIONS: u64 = 64;

/// What is known of a unit.
#[derive(Clone, Default)]
struct Unit {
    issued: u64,
    /// The newest version that was acknowledged or read.
    floor: u64,
    /// The versions that are zeros. Version 0 is, too.
    zeros: BTreeSet<u64>,
}

/// An operation that has been answered.
#[derive(Clone, Copy)]
struct Slow {
    began: Instant,
    ended: Instant,
}

/// The load and what it has found.
pub(super) struct Checker {
    socket: PathBuf,
    seed: u64,
    units: Mutex<Vec<Unit>>,
    slow: Mutex<Vec<Slow>>,
    in_flight: Mutex<[Option<Instant>; WORKERS]>,
    found: Mutex<Vec<String>>,
    is_stopping: AtomicBool,
    /// The number of exporters that were killed.
    pub(super) exporter: AtomicU64,
    pub(super) writes: [AtomicU64; WORKERS],
    pub(super) reads: AtomicU64,
}

impl Checker {
    /// Starts the workers.
    pub(super) fn start(socket: &Path, seed: u64) -> (Arc<Self>, Vec<JoinHandle<()>>) {
        let count = BASES.len() * (RUNS * RUN_UNITS) as usize;
        let checker = Arc::new(Self {
            socket: socket.to_path_buf(),
            seed,
            units: Mutex::new(vec![Unit::default(); count]),
            slow: Mutex::default(),
            in_flight: Mutex::default(),
            found: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            exporter: AtomicU64::new(0),
            writes: Default::default(),
            reads: AtomicU64::new(0),
        });
        let workers = (0..WORKERS).map(|worker| {
            let checker = Arc::clone(&checker);
            thread::spawn(move || checker.work(worker))
        });
        let workers = workers.collect();
        (checker, workers)
    }

    /// Lets the workers end after their current operation.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// What contradicts the promises.
    pub(super) fn found(&self) -> Vec<String> {
        self.found.lock().expect("no holder panics").clone()
    }

    /// The number of acknowledged writes.
    pub(super) fn written(&self) -> u64 {
        self.writes.iter().map(|writes| writes.load(Ordering::Relaxed)).sum()
    }

    /// The longest time for which an operation waited, of those that were in progress at some time
    /// since `since`.
    pub(super) fn longest_wait(&self, since: Instant) -> Duration {
        let slow = self.slow.lock().expect("no holder panics");
        let done = slow.iter().filter(|it| it.ended >= since).map(|it| it.ended - it.began);
        let in_flight = self.in_flight.lock().expect("no holder panics");
        let waiting = in_flight.iter().flatten().map(Instant::elapsed);
        done.chain(waiting).max().unwrap_or_default()
    }

    /// Reads everything once, by a connection of its own, and returns it.
    pub(super) fn read_all(&self) -> Result<Vec<u8>, NbdError> {
        let mut connection = Connection::open(&self.socket)?;
        let mut content = Vec::new();
        for run in 0..BASES.len() as u64 * RUNS {
            content.extend(self.read(&mut connection, run * RUN_UNITS, RUN_UNITS)?);
        }
        Ok(content)
    }

    fn report(&self, what: String) {
        self.found.lock().expect("no holder panics").push(what);
        self.stop();
    }

    fn work(&self, worker: usize) {
        let mut rng = Rng::new(self.seed ^ (worker as u64 + 1) << 40);
        while !self.is_stopping.load(Ordering::Relaxed) {
            let exporter = self.exporter.load(Ordering::Relaxed);
            let Ok(mut connection) = Connection::open(&self.socket) else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            let ended = loop {
                if self.is_stopping.load(Ordering::Relaxed) {
                    return;
                }
                let began = Instant::now();
                self.in_flight.lock().expect("no holder panics")[worker] = Some(began);
                let done = self.operation(worker, &mut connection, &mut rng);
                self.in_flight.lock().expect("no holder panics")[worker] = None;
                if let Err(error) = done {
                    break error;
                }
                let ended = Instant::now();
                if ended - began >= SLOW {
                    self.slow.lock().expect("no holder panics").push(Slow { began, ended });
                }
            };
            match ended {
                NbdError::Lost(_) if self.exporter.load(Ordering::Relaxed) != exporter => {}
                error => self.report(format!("worker {worker}: {error}")),
            }
        }
    }

    fn operation(
        &self,
        worker: usize,
        connection: &mut Connection,
        rng: &mut Rng,
    ) -> Result<(), NbdError> {
        let runs = BASES.len() as u64 * RUNS;
        let kind = rng.below(10);
        if kind >= 7 {
            let run = rng.below(runs);
            let first = rng.below(RUN_UNITS);
            let count = 1 + rng.below(RUN_UNITS - first);
            drop(self.read(connection, run * RUN_UNITS + first, count)?);
            self.reads.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let run = rng.below(runs / WORKERS as u64) * WORKERS as u64 + worker as u64;
        let (mut first, mut count) = (rng.below(RUN_UNITS), 1 + rng.below(32));
        let command = match kind {
            0 => Command::Trim,
            1 => Command::WriteZeroes,
            _ => Command::Write,
        };
        // Whole blocks, in half of the writes and in all trims: the rest of a block keeps its
        // content when it is trimmed.
        if command == Command::Trim || rng.below(2) == 0 {
            first -= first % UNITS_PER_BLOCK;
            count = count.next_multiple_of(UNITS_PER_BLOCK);
        }
        let count = count.min(RUN_UNITS - first);
        let first = run * RUN_UNITS + first;
        let range = first as usize..(first + count) as usize;
        let mut data = Vec::new();
        let issued: Vec<u64> = {
            let mut units = self.units.lock().expect("no holder panics");
            let issue = range.clone().map(|number| {
                let unit = &mut units[number];
                unit.issued += 1;
                match command {
                    Command::Write => data.extend(content(number as u64, unit.issued)),
                    _ => drop(unit.zeros.insert(unit.issued)),
                }
                unit.issued
            });
            issue.collect()
        };
        connection.request(command, offset(first), count as u32 * UNIT as u32, &data)?;
        let mut units = self.units.lock().expect("no holder panics");
        for (number, version) in range.zip(issued) {
            let unit = &mut units[number];
            unit.floor = unit.floor.max(version);
            // A read that began before this write may still return a version below it.
            unit.zeros = unit.zeros.split_off(&unit.floor.saturating_sub(KEPT_VERSIONS));
        }
        drop(units);
        self.writes[worker].fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn read(
        &self,
        connection: &mut Connection,
        first: u64,
        count: u64,
    ) -> Result<Vec<u8>, NbdError> {
        let range = first as usize..(first + count) as usize;
        let before: Vec<Unit> =
            self.units.lock().expect("no holder panics")[range.clone()].to_vec();
        let len = count as u32 * UNIT as u32;
        let read = connection.request(Command::Read, offset(first), len, &[])?;
        let mut units = self.units.lock().expect("no holder panics");
        for ((number, before), bytes) in range.zip(before).zip(read.chunks_exact(UNIT)) {
            let unit = &mut units[number];
            let possible = before.floor..=unit.issued;
            let version = match parse(number as u64, bytes) {
                Some(Content::Version(version)) => {
                    let is_zeros = before.zeros.contains(&version);
                    Some(version).filter(|it| possible.contains(it) && !is_zeros)
                }
                Some(Content::Zeros) if before.floor == 0 => Some(0),
                Some(Content::Zeros) => {
                    let zeros = before.zeros.iter().chain(&unit.zeros);
                    zeros.filter(|it| possible.contains(it)).min().copied()
                }
                None => None,
            };
            match version {
                Some(version) => unit.floor = unit.floor.max(version),
                None => {
                    let (base, at) = (offset(number as u64), &bytes[..24]);
                    self.report(format!(
                        "STALE or LOST: the unit at {base} must have a version of {possible:?}, \
                         zeros in {:?}, and a read returned {:?}: {at:x?}",
                        before.zeros,
                        parse(number as u64, bytes),
                    ));
                }
            }
        }
        Ok(read)
    }
}

/// Returns the first byte of the volume at which an image of it differs from the content that
/// [`Checker::read_all`] has returned.
pub(super) fn difference(image: &File, content: &[u8]) -> io::Result<Option<u64>> {
    let mut bytes = vec![0; (RUN_UNITS as usize) * UNIT];
    for (run, wanted) in content.chunks_exact(bytes.len()).enumerate() {
        let at = offset(run as u64 * RUN_UNITS);
        image.read_exact_at(&mut bytes, at)?;
        if let Some(differs) = bytes.iter().zip(wanted).position(|(one, other)| one != other) {
            return Ok(Some(at + differs as u64));
        }
    }
    Ok(None)
}

#[derive(Debug)]
enum Content {
    Zeros,
    Version(u64),
}

fn offset(unit: u64) -> u64 {
    let per_base = RUNS * RUN_UNITS;
    BASES[(unit / per_base) as usize] + unit % per_base * UNIT as u64
}

/// The content of a unit: its number and version, and bytes that follow from both.
fn content(unit: u64, version: u64) -> Vec<u8> {
    let mut rng = Rng::new(unit << 32 ^ version);
    let mut bytes = Vec::with_capacity(UNIT);
    bytes.extend(unit.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    while bytes.len() < UNIT {
        bytes.extend(rng.below(u64::MAX).to_le_bytes());
    }
    bytes
}

/// What a unit has; `None` if it was never written so.
fn parse(unit: u64, bytes: &[u8]) -> Option<Content> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Some(Content::Zeros);
    }
    let version = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    (bytes == content(unit, version)).then_some(Content::Version(version))
}
