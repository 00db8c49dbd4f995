//! Latency of the underlying disk itself: the lower bound for every server on it.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::load::Sample;
use super::unix_seconds;
use crate::Error;

const EVERY: Duration = Duration::from_millis(10);
const WRITE_BYTES: usize = 4096;

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
