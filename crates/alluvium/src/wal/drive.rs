//! The closed-loop load of `alluvium wal bench`: one thread that keeps a fixed number of records
//! outstanding.
//!
//! It is designed to cost little compared with the write-ahead log itself: records are acknowledged
//! in log order, so it keeps a queue of (end, start time), waits for the oldest entry and removes
//! all that are durable then.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use alluvium_wal::{AppendError, LogOffset, Trim, Wal};
use bytes::Bytes;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::load::{Latencies, Summary, noise};
use crate::output::Failure;

/// A load and its duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) record_bytes: usize,
    pub(super) outstanding: usize,
    pub(super) warmup: Duration,
    pub(super) duration: Duration,
    /// The limit to which the log may grow its window; for the report.
    pub(super) window_bytes: u64,
}

/// The result of a load. Latency is measured from the call of `append` until the calling thread
/// sees the acknowledgement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measured {
    pub(super) record_bytes: usize,
    pub(super) outstanding: usize,
    pub(super) window_bytes: u64,
    pub(super) records: u64,
    pub(super) seconds: f64,
    #[serde(flatten)]
    pub(super) latency: Summary,
    /// Payload only.
    pub(super) bytes_per_second: f64,
    /// Writes of blocks and headers.
    pub(super) device_writes_per_second: f64,
    /// The device writes that carried a flush or FUA.
    pub(super) flushes_per_second: f64,
    /// User and system time of the whole process, including this thread.
    pub(super) cpu_us_per_record: f64,
}

/// Keeps `load` up on an empty log, and measures.
///
/// # Errors
/// The write-ahead log fails, or cannot hold the load.
pub(super) fn drive(wal: &Wal, load: &Load) -> Result<Measured, Failure> {
    let mut latencies = Latencies::new()?;
    let mut driver = Driver::new(wal, load);
    driver.run(Instant::now() + load.warmup, &mut |_| ())?;

    let (stats_before, cpu_before, started) = (wal.stats(), cpu_time(), Instant::now());
    driver.run(started + load.duration, &mut |latency| latencies.record(latency))?;
    let (stats, cpu, elapsed) = (wal.stats(), cpu_time() - cpu_before, started.elapsed());
    driver.drain()?;

    let records = latencies.count();
    let seconds = elapsed.as_secs_f64();
    let writes = stats.block_writes + stats.header_writes;
    let writes_before = stats_before.block_writes + stats_before.header_writes;
    let flushes = stats.flushed_writes - stats_before.flushed_writes;
    Ok(Measured {
        record_bytes: load.record_bytes,
        outstanding: load.outstanding,
        window_bytes: load.window_bytes,
        records,
        seconds,
        latency: latencies.summary(),
        bytes_per_second: records as f64 * load.record_bytes as f64 / seconds,
        device_writes_per_second: (writes - writes_before) as f64 / seconds,
        flushes_per_second: flushes as f64 / seconds,
        cpu_us_per_record: cpu.as_secs_f64() * 1e6 / records.max(1) as f64,
    })
}

/// User and system time of all threads of this process, with nanosecond resolution.
pub(super) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

struct Driver<'a> {
    wal: &'a Wal,
    payload: Bytes,
    outstanding: usize,
    /// Records that are not acknowledged yet, in log order: end in the log, and time of the append.
    pending: VecDeque<(LogOffset, Instant)>,
    /// End of the last acknowledged record.
    acknowledged: LogOffset,
    /// The trim offset, and the trim in progress.
    trimmed: LogOffset,
    trim: Option<Trim>,
    trim_every_bytes: u64,
}

impl<'a> Driver<'a> {
    fn new(wal: &'a Wal, load: &Load) -> Self {
        let start = wal.stats().trimmed;
        Self {
            wal,
            payload: noise(load.record_bytes).into(),
            outstanding: load.outstanding,
            pending: VecDeque::with_capacity(load.outstanding),
            acknowledged: start,
            trimmed: start,
            trim: None,
            // Often enough that a lap never waits, seldom enough that header writes are negligible.
            trim_every_bytes: wal.stats().ring_bytes / 4,
        }
    }

    /// Keeps the records outstanding until the end of the time; adds the latency of each to
    /// `acknowledged`.
    fn run(
        &mut self,
        until: Instant,
        acknowledged: &mut dyn FnMut(Duration),
    ) -> Result<(), Failure> {
        loop {
            let durable = self.wal.durable();
            let now = Instant::now();
            while let Some(&(end, appended_at)) = self.pending.front()
                && end <= durable
            {
                acknowledged(now - appended_at);
                self.acknowledged = end;
                self.pending.pop_front();
            }
            if now >= until {
                return Ok(());
            }
            if self.acknowledged.0 - self.trimmed.0 >= self.trim_every_bytes {
                self.start_trim()?;
            }
            self.fill()?;
            self.wait_for_oldest()?;
        }
    }

    fn fill(&mut self) -> Result<(), Failure> {
        while self.pending.len() < self.outstanding {
            let now = Instant::now();
            match self.wal.append_shared(&[], &self.payload) {
                Ok(append) => self.pending.push_back((append.end(), now)),
                Err(AppendError::WindowFull { .. }) if !self.pending.is_empty() => break,
                Err(AppendError::OverCapacity { .. }) if self.trim.is_some() => self.end_trim()?,
                Err(AppendError::OverCapacity { .. }) if self.acknowledged > self.trimmed => {
                    self.start_trim()?;
                }
                Err(AppendError::OverCapacity { .. }) if !self.pending.is_empty() => break,
                Err(error) => return Err(Failure::new(error)),
            }
        }
        Ok(())
    }

    fn wait_for_oldest(&mut self) -> Result<(), Failure> {
        match self.pending.front() {
            Some(&(end, _)) => self.wal.wait_durable(end).wait().map_err(Failure::new),
            None => Ok(()),
        }
    }

    fn start_trim(&mut self) -> Result<(), Failure> {
        self.end_trim()?;
        self.trimmed = self.acknowledged;
        self.trim = Some(self.wal.trim(..self.trimmed));
        Ok(())
    }

    fn end_trim(&mut self) -> Result<(), Failure> {
        self.trim.take().map_or(Ok(()), |trim| trim.wait().map_err(Failure::new))
    }

    fn drain(mut self) -> Result<(), Failure> {
        while let Some((end, _)) = self.pending.pop_back() {
            self.wal.wait_durable(end).wait().map_err(Failure::new)?;
        }
        self.end_trim()
    }
}
