//! Samples the memory of a server during other work.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::server::Server;

/// A server's memory at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Memory {
    /// Seconds since the first sample.
    pub(super) at: f64,
    /// The resident set, in MiB.
    pub(super) resident: f64,
    /// The part of it that is batches in the log cache, in MiB.
    pub(super) cached: f64,
    /// Objects in use, in MiB: on disk, not in memory.
    pub(super) objects: f64,
}

/// Runs `work` and samples the server's memory meanwhile, at least once. A server that does not
/// answer is an error.
pub(super) fn watched<T>(
    server: &Server,
    every: Duration,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<(T, Vec<Memory>), Error> {
    thread::scope(|scope| {
        let (end, ended) = mpsc::channel::<()>();
        let watching = scope.spawn(move || -> Result<Vec<Memory>, String> {
            let started = Instant::now();
            let mut samples = Vec::new();
            loop {
                let sample = sample(server, started).map_err(|error| error.to_string())?;
                samples.push(sample);
                if ended.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
                    return Ok(samples);
                }
            }
        });
        let done = work();
        drop(end);
        let samples = watching.join().expect("the watching thread does not panic")?;
        Ok((done?, samples))
    })
}

fn sample(server: &Server, started: Instant) -> Result<Memory, Error> {
    const MEBIBYTE: f64 = (1 << 20) as f64;
    let metrics = server.metrics()?;
    let mebibytes = |name: &str| metrics.get(name).map(|bytes| bytes / MEBIBYTE);
    let at = started.elapsed().as_secs_f64();
    let resident = server.memory_kib().ok_or("the server has no resident memory")? as f64 / 1024.0;
    let cached =
        mebibytes("alluvium_log_cache_used_bytes").ok_or("the metrics have no log cache")?;
    let objects = mebibytes("alluvium_objects_bytes").ok_or("the metrics have no objects")?;
    Ok(Memory { at, resident, cached, objects })
}
