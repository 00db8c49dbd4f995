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

/// Splits a time into seconds. Returns the samples of those without a stall of the disk, and which
/// part of the seconds have one.
pub(super) fn undisturbed(
    samples: &[Sample],
    probed: &[Sample],
    (from, to): (f64, f64),
) -> (Vec<Sample>, f64) {
    let (mut calm, mut stalled, mut seconds) = (Vec::new(), 0.0, 0.0);
    let mut start = from;
    while start < to {
        let end = (start + 1.0).min(to);
        // A stall of the second before may last into this one.
        let in_second = probed.iter().filter(|write| write.due < end && write.done() >= start);
        seconds += 1.0;
        if in_second.map(|write| write.latency_ms).fold(0.0, f64::max) > STALL_MS {
            stalled += 1.0;
        } else {
            calm.extend(due(samples, (start, end)));
        }
        start = end;
    }
    (calm, stalled / seconds)
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
        let (calm, stalled) = undisturbed(&samples, &probed, (0.0, 4.0));
        assert_eq!((calm, stalled), (vec![samples[0], samples[3]], 0.5));
    }
}
