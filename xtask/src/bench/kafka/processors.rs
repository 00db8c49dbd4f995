//! The division of the processors between the server and the tools.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Error;

/// Enough to stand out from other interrupts in the meantime.
const FLUSHES: u64 = 500;

/// One half for the server, one for the tools: both servers have the same share, and the tools use
/// none of it.
pub(super) struct Processors {
    pub(super) server: CpuSet,
    pub(super) tools: CpuSet,
}

impl Processors {
    /// The server's half is the one that handles the interrupts of the disk with `directory`. The
    /// kernel's work for an interrupt, and the threads that continue a flush, stay on that
    /// processor: on the tools' half, each flush waits some milliseconds until the tools yield, and
    /// its cost does not count as the server's.
    pub(super) fn divided(directory: &Path) -> Result<Self, Error> {
        let all = sched_getaffinity(None)?;
        let numbers: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
        if numbers.len() < 2 {
            return Err(
                "at least two processors are needed, one for the server and one for the tools"
                    .into(),
            );
        }
        let before = interrupts()?;
        flush(&directory.join("flushed"))?;
        let disk = busiest(&before, &interrupts()?);
        let (low, high) = numbers.split_at(numbers.len() / 2);
        let of = |half: &[usize]| half.iter().filter_map(|cpu| disk.get(*cpu)).sum::<u64>();
        let (server, tools) = if of(low) > of(high) { (low, high) } else { (high, low) };
        println!(
            "processors: {server:?} for the server, with the disk's interrupts, \
             {tools:?} for the tools"
        );
        let set = |numbers: &[usize]| {
            let mut set = CpuSet::new();
            numbers.iter().for_each(|cpu| set.set(*cpu));
            set
        };
        Ok(Self { server: set(server), tools: set(tools) })
    }

    /// Runs `start` so that the processes that it creates run on these processors: a child inherits
    /// them from the thread that creates it.
    pub(super) fn on<T>(
        set: &CpuSet,
        start: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let before = sched_getaffinity(None)?;
        sched_setaffinity(None, set)?;
        let started = start();
        sched_setaffinity(None, &before)?;
        started
    }
}

fn flush(path: &Path) -> Result<(), Error> {
    let file = File::create(path)?;
    for number in 0..FLUSHES {
        file.write_all_at(&[1; 4096], number * 4096)?;
        file.sync_data()?;
    }
    fs::remove_file(path)?;
    Ok(())
}

/// For each source of interrupts, the number on each processor, by its number.
type Interrupts = Vec<(String, Vec<u64>)>;

fn interrupts() -> Result<Interrupts, Error> {
    let path = "/proc/interrupts";
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    Ok(counted(&text))
}

/// The header names the online processors; each line has a count for each of them, followed by a
/// description.
fn counted(text: &str) -> Interrupts {
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default().split_whitespace();
    let online: Vec<usize> = head.filter_map(|cpu| cpu.strip_prefix("CPU")?.parse().ok()).collect();
    let devices = lines.filter_map(|line| {
        let (source, counts) = line.split_once(':')?;
        // The other lines are interrupts of the processors themselves: timers, calls between them.
        source.trim().parse::<u32>().ok()?;
        let mut by_cpu = vec![0; online.last()? + 1];
        for (cpu, count) in online.iter().zip(counts.split_whitespace()) {
            by_cpu[*cpu] = count.parse().ok()?;
        }
        Some((source.trim().to_owned(), by_cpu))
    });
    devices.collect()
}

/// The increase for the device with the largest one.
fn busiest(before: &Interrupts, after: &Interrupts) -> Vec<u64> {
    let more = after.iter().filter_map(|(source, after)| {
        let (_, before) = before.iter().find(|(other, _)| other == source)?;
        Some(
            after.iter().zip(before).map(|(after, before)| after.saturating_sub(*before)).collect(),
        )
    });
    more.max_by_key(|more: &Vec<u64>| more.iter().sum::<u64>()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_device_is_found() {
        let before = "           CPU0       CPU2\n\
             \x20 0:         10          0   IO-APIC    2-edge      timer\n\
             \x2036:          5   6783581   PCI-MSIX-0000:00:02.0   1-edge      virtio1-req.0\n\
             \x2041:      10708          0   PCI-MSIX-0000:00:04.0   1-edge      virtio3-rx\n\
             \x20LOC:    1000000    1000000   Local timer interrupts\n";
        let after = before.replace("6783581", "6784081").replace("10708", "10720");
        let after = after.replace("1000000    ", "9000000    ");
        assert_eq!(counted(before).len(), 3);
        assert_eq!(busiest(&counted(before), &counted(&after)), [0, 0, 500]);
        assert_eq!(busiest(&Vec::new(), &counted(&after)), [0_u64; 0]);
    }
}
