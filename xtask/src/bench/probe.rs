//! Latency of the underlying disk itself: the lower bound for every server on it.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::load::{Sample, due};
use super::unix_seconds;
use crate::Error;

const EVERY: Duration = Duration::from_millis(10);
const WRITE_BYTES: usize = 4096;
/// A write that takes longer is a stall of the disk: its usual latency is below 1 ms.
const STALL_MS: f64 = 5.0;

/// Writes 4 KiB of a file 100 times a second, each time to stable storage.
pub(super) struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Sample>, std::io::Error>>,
}

impl Probe {
    pub(super) fn start(directory: &Path) -> Result<Self, Error> {
        let flags = rustix::fs::OFlags::DSYNC.bits().cast_signed();
        let path = directory.join("probe");
        let file = File::options().write(true).create(true).custom_flags(flags).open(path)?;
        // The file's blocks exist from now on, so that writes change only data and no metadata.
        file.write_all_at(&[1; WRITE_BYTES], 0)?;
        file.sync_all()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let mut samples = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let (due, begun) = (unix_seconds(), Instant::now());
                file.write_all_at(&[samples.len() as u8; WRITE_BYTES], 0)?;
                let latency_ms = begun.elapsed().as_secs_f64() * 1e3;
                samples.push(Sample { due, latency_ms, bytes: WRITE_BYTES as f64 });
                thread::sleep(EVERY.saturating_sub(begun.elapsed()));
            }
            Ok(samples)
        });
        Ok(Self { stop, thread })
    }

    pub(super) fn finish(self) -> Result<Vec<Sample>, Error> {
        self.stop.store(true, Ordering::Relaxed);
        Ok(self.thread.join().map_err(|_| "the probe of the disk panicked")??)
    }
}

/// Returns the seconds of a time, and whether the disk stalls in each.
fn seconds(probed: &[Sample], (from, to): (f64, f64)) -> impl Iterator<Item = ((f64, f64), bool)> {
    let count = (to - from).ceil() as u32;
    (0..count).map(move |number| {
        let start = from + f64::from(number);
        let end = (start + 1.0).min(to);
        // A stall of the second before may last into this one.
        let mut writes = probed.iter().filter(|write| write.due < end && write.done() >= start);
        ((start, end), writes.any(|write| write.latency_ms > STALL_MS))
    })
}

/// Returns the samples of the seconds in which the disk does not stall.
pub(super) fn undisturbed(samples: &[Sample], probed: &[Sample], time: (f64, f64)) -> Vec<Sample> {
    let calm = seconds(probed, time).filter(|(_, is_stalled)| !is_stalled);
    calm.flat_map(|(second, _)| due(samples, second)).collect()
}

/// Returns the part of the seconds in which the disk stalls.
pub(super) fn stalled(probed: &[Sample], time: (f64, f64)) -> f64 {
    let stalls: Vec<_> = seconds(probed, time).map(|(_, is_stalled)| is_stalled).collect();
    stalls.iter().filter(|is_stalled| **is_stalled).count() as f64 / stalls.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_with_a_stall_of_the_disk_are_left_out() {
        let sample = |due, latency_ms| Sample { due, latency_ms, bytes: 1.0 };
        let probed = [sample(0.1, 0.5), sample(1.9, 300.0), sample(2.5, 0.5), sample(3.5, 0.5)];
        let samples: Vec<_> = [0.0, 1.0, 2.0, 3.0].map(|due| sample(due, due)).into();
        // The stall begins in the second 1 and ends in the second 2.
        let calm = undisturbed(&samples, &probed, (0.0, 4.0));
        assert_eq!(calm, [samples[0], samples[3]]);
        assert_eq!(stalled(&probed, (0.0, 4.0)), 0.5);
    }
}
