//! Numbered records in the WAL of a real device, for the test that cuts its power (`cargo xtask
//! crash`).
//!
//! The writer prints each guarantee that it gets to standard output, line by line; the process that
//! cuts the power reads them elsewhere, and runs the checker on what is left. Numbers are half-open
//! ranges:
//!
//! | line | meaning |
//! |---|---|
//! | `opening` | recovery begins |
//! | `held A B` | recovery has handed out the records `A..B`, all with their expected content |
//! | `acked B` | all records before `B` are durable |
//! | `trim A` | a trim of the records before `A` is about to be requested |
//! | `trimmed A` | that trim has taken effect |
//! | `closed` | the log was closed; everything appended is durable |
//! | `failed CAUSE` | the device or the WAL has stopped |
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};

use alluvium_device::sim::Random;
use alluvium_device::{Access, Durability, OpenOptions, SharedDevice};
use alluvium_wal::{
    Append, AppendError, FormatOptions, LogOffset, Options, Record, RecoveryReport, Trim, Wal,
};
use clap::{Args, Parser, Subcommand};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Small, so that the log makes many laps.
const DEVICE_BYTES: u64 = 16 * 1024 * 1024;
/// Small, so that a block and the window fill up soon.
const BLOCK_BYTES: u32 = 64 * 1024;
const WINDOW_BYTES: u64 = 1024 * 1024;
const MAX_RECORD_BYTES: u64 = 100_000;

#[derive(Parser)]
#[command(name = "numbered")]
/// Write numbered records to a WAL, or check what is left of them.
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Format a WAL of 16 MiB in a new file.
    Format { path: PathBuf },
    /// Recover the WAL and append until the device fails.
    Write {
        #[command(flatten)]
        target: Target,
        /// Close the log after this number of records. Default: never.
        #[arg(long, default_value_t = u64::MAX)]
        records: u64,
        /// Seed of the record sizes and the number of records in flight.
        #[arg(long)]
        load: u64,
        /// `auto` flushes where there is a volatile cache; `device` trusts the device, as a
        /// negative control.
        #[arg(long, default_value_t = Durability::Auto)]
        durability: Durability,
    },
    /// Walk the log without writing, and print the line `held A B`. Damage, a gap or an unexpected
    /// record is an error.
    Check(Target),
}

#[derive(Args)]
struct Target {
    /// Block device or file.
    path: PathBuf,
    /// Seed of the records' content; must be the same for all commands on a WAL.
    #[arg(long)]
    seed: u64,
}

fn open(path: &Path, access: Access, durability: Durability) -> Result<SharedDevice, Error> {
    Ok(alluvium_device::open(path, &OpenOptions { access, durability, ..OpenOptions::default() })?)
}

/// The payload of record `number`: the number, then bytes derived from it.
fn payload(seed: u64, number: u64) -> Vec<u8> {
    let mut random = Random::new(seed ^ number.wrapping_mul(0x9e37_79b9));
    let len = match random.below(100) {
        0 => 8 + random.below(MAX_RECORD_BYTES - 8),
        1..=20 => 8 + random.below(8 * 1024),
        _ => 8 + random.below(600),
    };
    let mut payload = number.to_le_bytes().to_vec();
    while (payload.len() as u64) < len {
        payload.extend(random.next_u64().to_le_bytes());
    }
    payload.truncate(len as usize);
    payload
}

/// The records handed out by a walk, with consecutive numbers and their expected content.
struct Held {
    seed: u64,
    first: u64,
    /// Start of each record.
    starts: VecDeque<LogOffset>,
}

impl Held {
    fn new(seed: u64) -> Self {
        Self { seed, first: 0, starts: VecDeque::new() }
    }

    fn next(&self) -> u64 {
        self.first + self.starts.len() as u64
    }

    fn take(&mut self, record: &Record) -> Result<(), Error> {
        let number = record.payload.first_chunk().map(|number| u64::from_le_bytes(*number));
        let number = number.ok_or("a record without a number")?;
        if self.starts.is_empty() {
            self.first = number;
        }
        if number != self.next() {
            return Err(format!("record {number} where {} should be", self.next()).into());
        }
        if record.payload != payload(self.seed, number) {
            return Err(format!("record {number} has unexpected content").into());
        }
        self.starts.push_back(record.offset);
        Ok(())
    }

    /// Fails on damage: a disk that only lost its cache has none.
    fn finish(self, report: &RecoveryReport) -> Result<Self, Error> {
        match report.damage.first() {
            Some(damage) => Err(format!("damaged: {damage}").into()),
            None => Ok(self),
        }
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "held {} {}", self.first, self.next())
    }
}

fn format(path: &Path) -> Result<(), Error> {
    let options = OpenOptions { create_bytes: Some(DEVICE_BYTES), ..OpenOptions::default() };
    let device = alluvium_device::open(path, &options)?;
    Wal::format(&device, &FormatOptions::default())?;
    Ok(())
}

fn check(target: &Target) -> Result<(), Error> {
    let device = open(&target.path, Access::ReadOnly, Durability::Auto)?;
    let mut held = Held::new(target.seed);
    let report = Wal::scan(&device, None, &mut |record| held.take(&record))?;
    println!("{}", held.finish(&report)?);
    Ok(())
}

fn write(target: &Target, records: u64, load: u64, durability: Durability) -> Result<(), Error> {
    let device = open(&target.path, Access::Exclusive, durability)?;
    eprintln!("{:?}", device.geometry());
    let options = Options {
        window_bytes: WINDOW_BYTES,
        block_bytes: BLOCK_BYTES,
        max_record_bytes: MAX_RECORD_BYTES as u32,
        ..Options::default()
    };
    println!("opening");
    let mut held = Held::new(target.seed);
    let (wal, report) = Wal::open(device, &options, None, &mut |record| held.take(&record))?;
    let held = held.finish(&report)?;
    println!("{held}");
    let mut writer = Writer { wal, held, waiting: VecDeque::new(), trim: None };
    writer.run(records, &mut Random::new(load))?;
    writer.wal.close()?;
    println!("closed");
    Ok(())
}

struct Writer {
    wal: Wal,
    held: Held,
    /// Records appended and not acknowledged: the number after each, and its future.
    waiting: VecDeque<(u64, Append)>,
    /// The trim in flight: the first number that stays.
    trim: Option<(u64, Trim)>,
}

impl Writer {
    /// Appends `records` records, with a varying number in flight so that blocks of all sizes
    /// occur.
    fn run(&mut self, records: u64, random: &mut Random) -> Result<(), Error> {
        let mut depth = 1;
        for index in 0..records {
            if index % 64 == 0 {
                depth = 1 << random.below(9);
            }
            let number = self.held.next();
            let payload = payload(self.held.seed, number);
            let append = loop {
                self.trim_half()?;
                match self.wal.append(&[&payload]) {
                    Ok(append) => break append,
                    Err(AppendError::WindowFull { .. }) => self.drain(self.waiting.len() - 1)?,
                    Err(AppendError::OverCapacity { .. }) => {
                        self.drain(0)?;
                        self.finish_trim()?;
                    }
                    Err(cause) => return Err(cause.into()),
                }
            };
            self.held.starts.push_back(append.offset());
            self.waiting.push_back((number + 1, append));
            self.drain(depth)?;
        }
        self.drain(0)?;
        self.finish_trim()
    }

    /// Waits until at most `depth` records are unacknowledged.
    fn drain(&mut self, depth: usize) -> Result<(), Error> {
        while self.waiting.len() > depth {
            let (mut next, append) = self.waiting.pop_front().expect("more than `depth`");
            append.wait()?;
            // One line for all records that became durable with it.
            let durable = self.wal.durable();
            while let Some((number, append)) = self.waiting.front()
                && append.end() <= durable
            {
                next = *number;
                self.waiting.pop_front();
            }
            println!("acked {next}");
        }
        Ok(())
    }

    /// Trims the older half of the records when they fill more than half of the ring. One trim at a
    /// time, beside the appends.
    fn trim_half(&mut self) -> Result<(), Error> {
        if let Some((_, trim)) = &mut self.trim {
            let mut cx = Context::from_waker(Waker::noop());
            return match Pin::new(trim).poll(&mut cx) {
                Poll::Ready(_) => self.finish_trim(),
                Poll::Pending => Ok(()),
            };
        }
        let stats = self.wal.stats();
        let half = self.held.starts.len() / 2;
        if stats.used_bytes > stats.ring_bytes / 2 && self.held.starts[half] <= stats.durable {
            let first = self.held.first + half as u64;
            println!("trim {first}");
            self.trim = Some((first, self.wal.trim(..self.held.starts[half])));
            self.held.first = first;
            self.held.starts.drain(..half);
        }
        Ok(())
    }

    fn finish_trim(&mut self) -> Result<(), Error> {
        if let Some((first, trim)) = self.trim.take() {
            trim.wait()?;
            println!("trimmed {first}");
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Format { path } => format(&path),
        Command::Write { target, records, load, durability } => {
            write(&target, records, load, durability)
        }
        Command::Check(target) => check(&target),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            println!("failed {cause}");
            ExitCode::FAILURE
        }
    }
}
