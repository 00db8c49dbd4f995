//! Two hosts that take a WAL from each other on one shared disk, on real block devices (`cargo
//! xtask fence`).
//!
//! The previous owner continues to append while the other host opens the log. The disk must refuse
//! its writes and report that; every record acknowledged to either must be there.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::{self, JoinHandle};

use alluvium_device::{
    Access, DeviceError, DeviceOffset, OpenOptions, PAGE_BYTES, ReserveError, SharedDevice,
};
use alluvium_wal::{
    Append, AppendError, FormatOptions, LogOffset, OpenError, Options, Record, Wal, WalError,
};
use clap::Parser;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Outstanding records of the old owner.
const DEPTH: usize = 16;
/// Records of an undisturbed owner before the next takeover.
const RECORDS: u64 = 300;

#[derive(Parser)]
#[command(name = "fence")]
/// Take a WAL over from one host to another, on a disk that is reserved.
struct Cli {
    /// The disk, as seen by one host.
    a: PathBuf,
    /// The disk as seen by the other host.
    b: PathBuf,
    /// Number of takeovers.
    #[arg(long)]
    rounds: u32,
}

fn open(path: &Path) -> Result<SharedDevice, Error> {
    Ok(alluvium_device::open(path, &OpenOptions::default())?)
}

fn options() -> Options {
    Options {
        window_bytes: 1024 * 1024,
        block_bytes: 16 * 1024,
        max_record_bytes: 100_000,
        reserve: true,
        ..Options::default()
    }
}

fn write(device: &SharedDevice, byte: u8) -> Result<(), DeviceError> {
    let mut page = device.alloc(PAGE_BYTES);
    page.fill(byte);
    device.write_durable(DeviceOffset(1 << 20), page.freeze())
}

fn check(holds: bool, what: &str) -> Result<(), Error> {
    match holds {
        true => Ok(()),
        false => Err(what.into()),
    }
}

fn is_refused(result: &Result<(), DeviceError>) -> bool {
    matches!(result, Err(cause) if cause.is_reserved())
}

/// Checks the disk's behaviour without a log.
fn devices(paths: [&Path; 2]) -> Result<(), Error> {
    {
        let [a, b] = [open(paths[0])?, open(paths[1])?];
        write(&a, 1)?;
        write(&b, 2)?;
        let there = a.read(DeviceOffset(1 << 20), PAGE_BYTES)?;
        check(there[..] == [2; PAGE_BYTES], "both paths lead to the same disk")?;
    }
    // Each takes it from the other, twice, so that each also returns after its registration was
    // cancelled.
    for (old, new) in [(0, 1), (1, 0), (0, 1), (1, 0)] {
        let [old, new] = [open(paths[old])?, open(paths[new])?];
        old.reserve()?;
        old.reserve()?;
        write(&old, 3)?;
        check(is_refused(&write(&new, 4)), "the other host's write is refused")?;
        // It has latched.
        drop(new);
    }
    let [a, b] = [open(paths[0])?, open(paths[1])?];
    a.reserve()?;
    b.reserve()?;
    write(&b, 5)?;
    let refused = write(&a, 6);
    check(is_refused(&refused), "the write of the previous holder is refused")?;
    println!("refused: {}", refused.unwrap_err());
    let there = a.read(DeviceOffset(1 << 20), PAGE_BYTES)?;
    check(there[..] == [5; PAGE_BYTES], "both can read it, and it holds the holder's write")?;
    let read_only = OpenOptions { access: Access::ReadOnly, ..OpenOptions::default() };
    let read_only = alluvium_device::open(paths[0], &read_only)?;
    let refused = read_only.reserve();
    check(matches!(refused, Err(ReserveError::Unsupported { .. })), "a reader reserves nothing")
}

/// The payload of record `number`.
fn payload(number: u64) -> Vec<u8> {
    let len = 8 + (number.wrapping_mul(0x9e37_79b9) >> 7) % 3000;
    let mut payload = number.to_le_bytes().to_vec();
    payload.resize(len as usize, number as u8);
    payload
}

/// Returns the number after `record`, which must continue the sequence of the record before it.
fn behind(record: &Record, before: Option<u64>) -> Result<u64, Error> {
    let number = record.payload.first_chunk().map(|number| u64::from_le_bytes(*number));
    let number = number.ok_or("a record without a number")?;
    check(before.is_none_or(|next| next == number), &format!("{number} follows {before:?}"))?;
    check(record.payload == payload(number), &format!("record {number} has unexpected content"))?;
    Ok(number + 1)
}

/// Recovers the log; returns it and the number after its last record.
fn recover(path: &Path) -> Result<(Wal, u64), Error> {
    let mut next = None;
    let (wal, report) = Wal::open(open(path)?, &options(), None, &mut |record| {
        next = Some(behind(&record, next)?);
        Ok(())
    })?;
    check(report.damage.is_empty(), &format!("damage: {report}"))?;
    Ok((wal, next.unwrap_or(0)))
}

/// An owner that appends on its own thread until it fails.
struct Owner {
    wal: Wal,
    thread: JoinHandle<(u64, WalError)>,
}

impl Owner {
    fn start(wal: Wal, first: u64) -> Self {
        let thread = thread::spawn({
            let wal = wal.clone();
            move || append_until_it_fails(&wal, first)
        });
        Self { wal, thread }
    }

    /// Waits for the owner to stop and returns its acknowledged records: those before this number.
    /// The owner must have learned the cause.
    fn acknowledged(self) -> Result<u64, Error> {
        let (next, cause) = self.thread.join().map_err(|_| "the old owner has panicked")?;
        let WalError::Fenced { found } = &cause else { return Err(cause.into()) };
        check(found.ends_with("another host has reserved the device"), found)?;
        check(matches!(self.wal.close(), Err(WalError::Fenced { .. })), "it cannot be closed")?;
        Ok(next)
    }
}

fn append_until_it_fails(wal: &Wal, first: u64) -> (u64, WalError) {
    let mut waiting: VecDeque<Append> = VecDeque::new();
    let mut acknowledged = first;
    let mut last = wal.durable();
    loop {
        let number = acknowledged + waiting.len() as u64;
        match wal.append(&[&payload(number)]) {
            Ok(append) => waiting.push_back(append),
            Err(AppendError::Failed(cause)) => return (acknowledged, cause),
            // Trim all but one record, so that the log always shows how far it has come.
            Err(AppendError::OverCapacity { .. }) => {
                if let Err(cause) = wal.trim(..last).wait() {
                    return (acknowledged, cause);
                }
            }
            Err(refused) => panic!("{refused}"),
        }
        if waiting.len() == DEPTH {
            let append = waiting.pop_front().expect("some are waiting");
            let offset = append.offset();
            match append.wait() {
                Ok(()) => (acknowledged, last) = (acknowledged + 1, offset),
                Err(cause) => return (acknowledged, cause),
            }
        }
    }
}

fn takeovers(paths: [&Path; 2], rounds: u32) -> Result<(), Error> {
    let device = open(paths[0])?;
    device.reserve()?;
    Wal::format(&device, &FormatOptions { force: true, ..FormatOptions::default() })?;
    drop(device);
    let (wal, next) = recover(paths[0])?;
    let mut old = Owner::start(wal, next);
    for round in 1..=rounds {
        let (path, other) = (paths[round as usize % 2], paths[(round as usize + 1) % 2]);
        // Let the old owner make some progress.
        old.wal.wait_durable(LogOffset(old.wal.durable().0 + 100_000)).wait()?;
        let (new, found) = recover(path)?;
        let first = new.appended();
        for number in found..found + RECORDS {
            new.append(&[&payload(number)])?.wait()?;
        }
        let acknowledged = old.acknowledged()?;
        println!("round {round}: {found} records found, {acknowledged} of them acknowledged");
        check(acknowledged <= found, "a record that was acknowledged is lost")?;
        if round < rounds {
            new.trim(..first).wait()?;
            old = Owner::start(new, found + RECORDS);
            continue;
        }
        new.close()?;
        let without = Options { reserve: false, ..options() };
        let refused = Wal::open(open(other)?, &without, None, &mut |_| Ok(()));
        check(
            matches!(&refused, Err(OpenError::Device(cause)) if cause.is_reserved()),
            "another host cannot open it without a reservation, though it was closed",
        )?;
        let (_, next) = recover(other)?;
        check(next == found + RECORDS, "a record of the last owner is lost")?;
        return Ok(());
    }
    Err("no rounds".into())
}

fn main() -> ExitCode {
    let Cli { a, b, rounds } = Cli::parse();
    match devices([&a, &b]).and_then(|()| takeovers([&a, &b], rounds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            println!("failed: {cause}");
            ExitCode::FAILURE
        }
    }
}
