//! The open-loop load of `alluvium wal bench`: records arrive on a schedule, whether or not earlier
//! ones are durable.
//!
//! Arrivals are evenly spaced. Latency is measured from the time at which a record was due, not
//! from its append: the time that it waits for this thread or for space in a full window counts.
//! (In a load that waits for answers, a slow answer delays the requests behind it, and the latency
//! that they would have had is never measured: "coordinated omission".)
//!
//! One thread appends, another waits for acknowledgements; both are part of what is measured.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use alluvium_device::PAGE_BYTES;
use alluvium_device::model::{ModelledDisk, Usage};
use alluvium_wal::{AppendError, LogOffset, Stats, Trim, Wal};
use bytes::Bytes;
use serde::Serialize;

use super::drive::cpu_time;
use crate::load::{Latencies, Summary, noise};
use crate::output::Failure;

/// The schedule of arrivals and its duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace {
    pub(super) record_bytes: usize,
    /// Payload. At least one record in `duration`.
    pub(super) bytes_per_second: u64,
    pub(super) warmup: Duration,
    pub(super) duration: Duration,
    /// The limit to which the log may grow its window; for the report.
    pub(super) window_bytes: u64,
}

/// The result of a load.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Measured {
    pub(super) record_bytes: usize,
    pub(super) window_bytes: u64,
    pub(super) offered_bytes_per_second: u64,
    /// All records that were due in the measured time.
    pub(super) records: u64,
    /// Records among these that were still not acknowledged after the same time again. They count
    /// with the time until then.
    pub(super) unacknowledged: u64,
    pub(super) seconds: f64,
    #[serde(flatten)]
    pub(super) latency: Summary,
    /// Payload acknowledged in the measured time.
    pub(super) bytes_per_second: f64,
    /// Whether that is less than the offered load by more than 1% and a record.
    pub(super) saturated: bool,
    #[serde(flatten)]
    pub(super) disk: Disk,
    /// User and system time of the whole process, including both threads of the load and the
    /// modelled disk.
    pub(super) cpu_us_per_record: f64,
}

/// What reached the disk in the measured time, as `iostat` shows it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Disk {
    /// Pieces of 256 KiB on a modelled disk; otherwise writes of blocks and headers.
    pub(super) iops: f64,
    pub(super) disk_bytes_per_second: f64,
    /// Mean length of the queue, including requests being served. Known for a modelled disk only.
    pub(super) queue: Option<f64>,
}

impl Disk {
    /// Bytes of a mean request.
    pub(super) fn request_bytes(&self) -> f64 {
        if self.iops > 0.0 { self.disk_bytes_per_second / self.iops } else { 0.0 }
    }
}

/// The arrival times of records, counted from the start of the warm-up.
#[derive(Clone, Copy)]
struct Arrivals {
    record_bytes: u64,
    bytes_per_second: u64,
}

impl Arrivals {
    fn at(self, index: u64) -> Duration {
        let nanos = u128::from(index) * u128::from(self.record_bytes) * 1_000_000_000
            / u128::from(self.bytes_per_second);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The first record that arrives at `time` or later.
    fn first_from(self, time: Duration) -> u64 {
        let exact = time.as_nanos() * u128::from(self.bytes_per_second)
            / (u128::from(self.record_bytes) * 1_000_000_000);
        let index = u64::try_from(exact).unwrap_or(u64::MAX);
        if self.at(index) >= time { index } else { index + 1 }
    }
}

/// Offers the load to an empty log, and measures.
///
/// # Errors
/// The write-ahead log fails, or cannot hold a record.
pub(super) fn drive(
    wal: &Wal,
    disk: Option<&ModelledDisk>,
    pace: &Pace,
) -> Result<Measured, Failure> {
    let arrivals = Arrivals {
        record_bytes: pace.record_bytes as u64,
        bytes_per_second: pace.bytes_per_second,
    };
    let end = pace.warmup + pace.duration;
    let measured = arrivals.first_from(pace.warmup)..arrivals.first_from(end);
    let records = measured.end - measured.start;
    let started = Instant::now();
    let acknowledger = Acknowledger {
        wal,
        arrivals,
        started,
        measured: measured.clone(),
        span: pace.warmup..end,
        acknowledged: &AtomicU64::new(wal.stats().trimmed.0),
        complete: &AtomicBool::new(false),
    };
    let (appended, ends) = mpsc::channel();
    let (before, after, acks) = thread::scope(|scope| {
        let acknowledger = &acknowledger;
        let thread = scope.spawn(move || acknowledger.run(ends));
        let mut appender = Appender::new(wal, pace.record_bytes, acknowledger.acknowledged);
        let spans = appender.run(disk, acknowledger, &appended, end + pace.duration);
        // The other thread ends when the queue is closed, or when the log fails.
        drop(appended);
        let acks = thread.join().expect("it does not panic")?;
        appender.end_trim()?;
        let (before, after) = spans?;
        Ok::<_, Failure>((before, after, acks))
    })?;
    let seconds = (after.at - before.at).as_secs_f64();
    let mut latencies = acks.latencies;
    let unacknowledged = records - latencies.count();
    let stopped = started.elapsed();
    for index in measured.end - unacknowledged..measured.end {
        latencies.record(stopped.saturating_sub(arrivals.at(index)));
    }
    Ok(Measured {
        record_bytes: pace.record_bytes,
        window_bytes: pace.window_bytes,
        offered_bytes_per_second: pace.bytes_per_second,
        records,
        unacknowledged,
        seconds,
        latency: latencies.summary(),
        bytes_per_second: acks.in_time as f64 * pace.record_bytes as f64
            / pace.duration.as_secs_f64(),
        saturated: (acks.in_time + 1) * 100 < records * 99,
        disk: disk_figures(&before, &after),
        cpu_us_per_record: (after.cpu - before.cpu).as_secs_f64() * 1e6 / records.max(1) as f64,
    })
}

/// All counters at one moment.
struct Snapshot {
    at: Instant,
    stats: Stats,
    usage: Option<Usage>,
    cpu: Duration,
}

impl Snapshot {
    fn take(wal: &Wal, disk: Option<&ModelledDisk>) -> Self {
        Self {
            stats: wal.stats(),
            usage: disk.map(ModelledDisk::usage),
            cpu: cpu_time(),
            at: Instant::now(),
        }
    }
}

fn disk_figures(before: &Snapshot, after: &Snapshot) -> Disk {
    let seconds = (after.at - before.at).as_secs_f64();
    let (requests, bytes, queue) = match (before.usage, after.usage) {
        (Some(before), Some(after)) => (
            after.pieces - before.pieces,
            after.bytes - before.bytes,
            Some((after.in_flight - before.in_flight).as_secs_f64() / seconds),
        ),
        _ => {
            let (before, after) = (&before.stats, &after.stats);
            let headers = after.header_writes - before.header_writes;
            (
                after.block_writes - before.block_writes + headers,
                after.device_bytes - before.device_bytes + headers * PAGE_BYTES as u64,
                None,
            )
        }
    };
    Disk { iops: requests as f64 / seconds, disk_bytes_per_second: bytes as f64 / seconds, queue }
}

/// The thread that appends.
struct Appender<'a> {
    wal: &'a Wal,
    payload: Bytes,
    /// End of the last acknowledged record.
    acknowledged: &'a AtomicU64,
    /// The trim offset, and the trim in progress.
    trimmed: LogOffset,
    trim: Option<Trim>,
    trim_every_bytes: u64,
}

impl<'a> Appender<'a> {
    fn new(wal: &'a Wal, record_bytes: usize, acknowledged: &'a AtomicU64) -> Self {
        let stats = wal.stats();
        Self {
            wal,
            payload: noise(record_bytes).into(),
            acknowledged,
            trimmed: stats.trimmed,
            trim: None,
            // Often enough that a lap never waits, seldom enough that header writes are negligible.
            trim_every_bytes: stats.ring_bytes / 4,
        }
    }

    /// Appends arriving records until all measured ones are acknowledged, or until `limit` is over.
    /// Returns what was counted when the measured time began, and a whole measured time later: a
    /// machine that stalls delays both.
    fn run(
        &mut self,
        disk: Option<&ModelledDisk>,
        acknowledger: &Acknowledger<'_>,
        appended: &mpsc::Sender<(LogOffset, u64)>,
        limit: Duration,
    ) -> Result<(Snapshot, Snapshot), Failure> {
        // Makes the kernel wake this thread at the requested time, not up to 50 us later.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let Acknowledger { arrivals, started, ref span, complete, .. } = *acknowledger;
        let (mut before, mut after) = (None, None);
        let mut counted_until = span.end;
        for index in 0.. {
            let mut now = started.elapsed();
            if now < arrivals.at(index) {
                thread::sleep(arrivals.at(index) - now);
                now = started.elapsed();
            }
            if now >= span.start && before.is_none() {
                before = Some(Snapshot::take(self.wal, disk));
                counted_until = now + (span.end - span.start);
            } else if now >= counted_until && after.is_none() {
                after = Some(Snapshot::take(self.wal, disk));
            }
            if after.is_some() && (complete.load(Ordering::Acquire) || now >= limit) {
                break;
            }
            let Some(end) = self.append(started + limit)? else { break };
            if appended.send((end, index)).is_err() {
                break; // The log has failed, and the other thread reports why.
            }
            if self.acknowledged().0 - self.trimmed.0 >= self.trim_every_bytes {
                self.start_trim()?;
            }
        }
        let now = || Snapshot::take(self.wal, disk);
        Ok((before.unwrap_or_else(now), after.unwrap_or_else(now)))
    }

    /// Appends a record as soon as there is space. `None` if there was none until `deadline`.
    fn append(&mut self, deadline: Instant) -> Result<Option<LogOffset>, Failure> {
        loop {
            let space = self.wal.wait_space();
            match self.wal.append_shared(&[], &self.payload) {
                Ok(append) => return Ok(Some(append.end())),
                Err(_) if Instant::now() >= deadline => return Ok(None),
                Err(AppendError::OverCapacity { .. }) if self.trim.is_some() => self.end_trim()?,
                Err(AppendError::OverCapacity { .. }) if self.acknowledged() > self.trimmed => {
                    self.start_trim()?;
                }
                Err(AppendError::WindowFull { .. } | AppendError::OverCapacity { .. }) => {
                    space.wait();
                }
                Err(error) => return Err(Failure::new(error)),
            }
        }
    }

    fn acknowledged(&self) -> LogOffset {
        LogOffset(self.acknowledged.load(Ordering::Acquire))
    }

    fn start_trim(&mut self) -> Result<(), Failure> {
        self.end_trim()?;
        self.trimmed = self.acknowledged();
        self.trim = Some(self.wal.trim(..self.trimmed));
        Ok(())
    }

    fn end_trim(&mut self) -> Result<(), Failure> {
        self.trim.take().map_or(Ok(()), |trim| trim.wait().map_err(Failure::new))
    }
}

/// The thread that waits for acknowledgements, and the state that both threads share.
struct Acknowledger<'a> {
    wal: &'a Wal,
    arrivals: Arrivals,
    started: Instant,
    /// The records that count.
    measured: std::ops::Range<u64>,
    /// The time in which they arrive.
    span: std::ops::Range<Duration>,
    /// End of the last acknowledged record.
    acknowledged: &'a AtomicU64,
    /// Whether all records that count are acknowledged.
    complete: &'a AtomicBool,
}

struct Acks {
    latencies: Latencies,
    /// Records acknowledged within the span.
    in_time: u64,
}

impl Acknowledger<'_> {
    fn run(&self, ends: mpsc::Receiver<(LogOffset, u64)>) -> Result<Acks, Failure> {
        let mut acks = Acks { latencies: Latencies::new()?, in_time: 0 };
        let mut durable = self.wal.durable();
        let mut now = self.started.elapsed();
        // Records are acknowledged in log order, so waiting for the first one misses none.
        for (end, index) in ends {
            if end > durable {
                self.wal.wait_durable(end).wait().map_err(Failure::new)?;
                durable = self.wal.durable();
                now = self.started.elapsed();
            }
            if self.span.contains(&now) {
                acks.in_time += 1;
            }
            if self.measured.contains(&index) {
                acks.latencies.record(now.saturating_sub(self.arrivals.at(index)));
            }
            self.acknowledged.store(end.0, Ordering::Release);
            if index + 1 >= self.measured.end {
                self.complete.store(true, Ordering::Release);
            }
        }
        Ok(acks)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use alluvium_device::SharedDevice;
    use alluvium_device::model::DiskModel;
    use alluvium_wal::{FormatOptions, Options};

    use super::*;

    #[test]
    fn arrivals_are_evenly_spaced_and_none_is_counted_twice() {
        let arrivals = Arrivals { record_bytes: 1000, bytes_per_second: 3000 };
        assert_eq!(arrivals.at(3), Duration::from_secs(1));
        assert_eq!(arrivals.at(4), Duration::from_nanos(1_333_333_333));
        for (nanos, first) in
            [(0, 0), (1, 1), (333_333_333, 1), (333_333_334, 2), (1_000_000_000, 3)]
        {
            assert_eq!(arrivals.first_from(Duration::from_nanos(nanos)), first, "{nanos} ns");
        }
        let fast = Arrivals { record_bytes: 1, bytes_per_second: u64::MAX };
        assert_eq!(fast.at(u64::MAX), Duration::from_secs(1));
    }

    /// 32 KiB may be in flight for 50 ms: that is 640 KiB per second, and eight times as much is
    /// offered. A load that waited for its answers would see 50 to 100 ms for each record that it
    /// appends. On the schedule, the record that is due at 200 ms is the 1,024th KiB and cannot be
    /// durable before 1.5 s; when the load gives up at 0.4 s it has waited for 200 ms.
    #[test]
    fn latency_counts_from_when_a_record_was_due() {
        let model = DiskModel { latency: Duration::from_millis(50), ..DiskModel::CLOUD };
        let device: SharedDevice = Arc::new(ModelledDisk::in_memory(1 << 20, &model).unwrap());
        Wal::format(&device, &FormatOptions::default()).unwrap();
        let options = Options {
            window_bytes: 32 << 10,
            block_bytes: 16 << 10,
            max_record_bytes: 8 << 10,
            ..Options::default()
        };
        let (wal, _) = Wal::open(device, &options, None, &mut |_| Ok(())).unwrap();
        let pace = Pace {
            record_bytes: 1024,
            bytes_per_second: 5 << 20,
            warmup: Duration::ZERO,
            duration: Duration::from_millis(200),
            window_bytes: options.window_bytes,
        };
        let measured = drive(&wal, None, &pace).unwrap();
        wal.close().unwrap();
        assert_eq!(measured.records, 1024, "all that were due count");
        assert!(measured.saturated && measured.unacknowledged > 500, "{measured:?}");
        assert!(measured.latency.p50_us > 250_000.0, "{measured:?}");
    }
}
