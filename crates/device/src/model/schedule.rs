//! The start and completion times of requests on a cloud disk: a pure function of the times and
//! sizes of the requests so far.

use std::time::Duration;

/// The unit in which cloud disks count I/O: a longer request is charged and served as several.
pub const PIECE_BYTES: u64 = 256 * 1024;

const NANOS: u64 = 1_000_000_000;

/// The quotas and latency of a cloud disk. The module documentation gives the sources of the
/// figures of [`DiskModel::CLOUD`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskModel {
    /// Pieces of at most [`PIECE_BYTES`] that start per second, reads and writes together. At least
    /// 1.
    pub iops: u32,
    /// Bytes per second, reads and writes together. At least 1.
    pub bandwidth_bytes_per_second: u64,
    /// Duration of every piece from its start, independent of its size. At most an hour.
    pub latency: Duration,
    /// Transfer rate of a piece, whose time adds to the latency; concurrent pieces do not slow each
    /// other down. At least 1.
    pub piece_bytes_per_second: u64,
    /// Unused quota that accumulates, as a time. At most an hour. A value below the time of a whole
    /// piece counts as that time: otherwise no piece could ever start.
    pub burst: Duration,
}

impl DiskModel {
    /// 3,000 IOPS and 125 MiB/s; 0.5 ms, and 220 MiB/s within a piece; a burst of a tenth of a
    /// second.
    pub const CLOUD: Self = Self {
        iops: 3000,
        bandwidth_bytes_per_second: 125 << 20,
        latency: Duration::from_micros(500),
        piece_bytes_per_second: 220 << 20,
        burst: Duration::from_millis(100),
    };

    /// The duration of a request of `len_bytes` on a disk that has been idle for long: that of its
    /// longest piece.
    pub fn idle_latency(&self, len_bytes: u64) -> Duration {
        let piece = len_bytes.min(PIECE_BYTES);
        self.latency + Duration::from_nanos(nanos(piece, self.piece_bytes_per_second))
    }

    fn check(&self) {
        assert!(
            self.iops > 0 && self.bandwidth_bytes_per_second > 0 && self.piece_bytes_per_second > 0,
            "{self:?} has a rate of zero"
        );
        let hour = Duration::from_secs(3600);
        assert!(self.latency <= hour && self.burst <= hour, "{self:?} takes longer than an hour");
    }
}

/// The requests submitted to a modelled disk so far. The difference of two values gives the figures
/// of `iostat`: requests per second, their size, and, as `in_flight` per second, the queue length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of pieces of at most [`PIECE_BYTES`].
    pub pieces: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Sum over all pieces of the time from submission until the model completes them.
    pub in_flight: Duration,
}

/// A rate limit expressed in time: each unit takes its share of a second, and the lead over the
/// clock is bounded by the burst. (The generic cell rate algorithm of ATM, which is a token bucket
/// in integers, without a clock.)
#[derive(Clone, Copy, Debug)]
struct Quota {
    per_second: u64,
    burst: u64,
    /// The time until which the quota is used up. In nanoseconds, as all times here.
    spent_until: u64,
}

/// The time that `units` take at a rate, rounded up, so that rounding never exceeds the quota.
fn nanos(units: u64, per_second: u64) -> u64 {
    let nanos = (u128::from(units) * u128::from(NANOS)).div_ceil(u128::from(per_second));
    u64::try_from(nanos).expect("a request takes less than 500 years")
}

impl Quota {
    /// Creates a quota. `largest` is the maximum taken at once.
    fn new(per_second: u64, burst: Duration, largest: u64) -> Self {
        let burst = (burst.as_nanos() as u64).max(nanos(largest, per_second));
        Self { per_second, burst, spent_until: 0 }
    }

    /// The earliest time at which `units` are available.
    fn free_at(&self, units: u64) -> u64 {
        (self.spent_until + nanos(units, self.per_second)).saturating_sub(self.burst)
    }

    fn take(&mut self, now: u64, units: u64) {
        self.spent_until = self.spent_until.max(now) + nanos(units, self.per_second);
    }
}

/// The state of a disk: quotas used and requests counted.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    model: DiskModel,
    starts: Quota,
    bytes: Quota,
    /// Start of the last piece: pieces start in the order of arrival.
    last_start: u64,
    usage: Usage,
}

impl Schedule {
    /// Creates the schedule of a disk that has been idle for long. Panics if the model's numbers
    /// are out of their ranges.
    pub(super) fn new(model: &DiskModel) -> Self {
        model.check();
        Self {
            model: *model,
            starts: Quota::new(model.iops.into(), model.burst, 1),
            bytes: Quota::new(model.bandwidth_bytes_per_second, model.burst, PIECE_BYTES),
            last_start: 0,
            usage: Usage::default(),
        }
    }

    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// Returns the completion time of a request of `len_bytes` that arrives at `now`, which is that
    /// of its last piece. `now` never goes backwards.
    pub(super) fn request(&mut self, now: u64, len_bytes: u64) -> u64 {
        let mut done = now;
        let mut left = len_bytes;
        while left > 0 {
            let piece = left.min(PIECE_BYTES);
            left -= piece;
            let completed = self.start(now, piece) + self.idle_nanos(piece);
            self.usage.in_flight += Duration::from_nanos(completed - now);
            done = done.max(completed);
        }
        done
    }

    fn idle_nanos(&self, piece: u64) -> u64 {
        self.model.idle_latency(piece).as_nanos() as u64
    }

    /// The start of a piece that arrives at `now`.
    fn start(&mut self, now: u64, piece: u64) -> u64 {
        let quotas = self.starts.free_at(1).max(self.bytes.free_at(piece));
        let start = now.max(self.last_start).max(quotas);
        self.starts.take(start, 1);
        self.bytes.take(start, piece);
        self.last_start = start;
        self.usage.pieces += 1;
        self.usage.bytes += piece;
        start
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MILLI: u64 = 1_000_000;
    const KIB: u64 = 1024;

    /// One piece of 4 KiB takes 1 ms; a second begins with quota for ten of them.
    const SLOW: DiskModel = DiskModel {
        iops: 100,
        bandwidth_bytes_per_second: 1 << 20,
        latency: Duration::from_micros(500),
        piece_bytes_per_second: 8192 * 1000,
        burst: Duration::from_millis(100),
    };

    #[test]
    fn an_idle_disk_takes_its_latency_and_the_time_of_the_bytes() {
        let mut disk = Schedule::new(&SLOW);
        assert_eq!(disk.request(7, 4 * KIB), 7 + MILLI);
        assert_eq!(SLOW.idle_latency(4 * KIB), Duration::from_millis(1));
        assert_eq!(
            disk.usage(),
            Usage { pieces: 1, bytes: 4096, in_flight: Duration::from_millis(1) }
        );
        // Pieces are served in parallel: eight take as long as one.
        let mut cloud = Schedule::new(&DiskModel::CLOUD);
        let piece = DiskModel::CLOUD.idle_latency(PIECE_BYTES);
        assert_eq!(cloud.request(0, 8 * PIECE_BYTES), piece.as_nanos() as u64);
        assert_eq!(DiskModel::CLOUD.idle_latency(8 * PIECE_BYTES), piece);
    }

    #[test]
    fn a_request_is_charged_for_each_256_kib_begun() {
        for (len_bytes, pieces) in
            [(4096, 1), (PIECE_BYTES, 1), (PIECE_BYTES + 4096, 2), (1 << 20, 4)]
        {
            let mut disk = Schedule::new(&DiskModel::CLOUD);
            disk.request(0, len_bytes);
            assert_eq!((disk.usage().pieces, disk.usage().bytes), (pieces, len_bytes));
        }
    }

    #[test]
    fn beyond_the_burst_pieces_start_at_the_rate() {
        let mut disk = Schedule::new(&SLOW);
        for _ in 0..10 {
            assert_eq!(disk.request(0, 4 * KIB), MILLI, "saved up");
        }
        for n in 1..50 {
            assert_eq!(disk.request(0, 4 * KIB), n * 10 * MILLI + MILLI, "100 a second");
        }
        // A long pause fills the quota, but not beyond the burst.
        for _ in 0..10 {
            assert_eq!(disk.request(10_000 * MILLI, 4 * KIB), 10_001 * MILLI);
        }
        assert_eq!(disk.request(10_000 * MILLI, 4 * KIB), 10_011 * MILLI);
    }

    #[test]
    fn bytes_wait_for_the_bandwidth() {
        // Its burst, 102.4 KiB, is smaller than a piece; one piece is then the burst.
        let mut disk = Schedule::new(&SLOW);
        let alone = disk.idle_nanos(PIECE_BYTES);
        assert_eq!(disk.request(0, PIECE_BYTES), alone);
        assert_eq!(disk.request(0, PIECE_BYTES), 250 * MILLI + alone);
        // A small piece behind a large one waits for its turn, although IOPS quota is left.
        assert_eq!(disk.request(1, 4 * KIB), 254 * MILLI - 93_750 + MILLI);
    }

    #[test]
    #[should_panic(expected = "rate of zero")]
    fn a_rate_of_zero_is_refused() {
        Schedule::new(&DiskModel { iops: 0, ..DiskModel::CLOUD });
    }

    prop_compose! {
        fn models()(
            iops in 1u32..100_000,
            bandwidth in (1u64 << 12)..(1 << 32),
            latency_us in 0u64..10_000,
            piece in (1u64 << 16)..(1 << 32),
            burst_us in 0u64..2_000_000,
        ) -> DiskModel {
            DiskModel {
                iops,
                bandwidth_bytes_per_second: bandwidth,
                latency: Duration::from_micros(latency_us),
                piece_bytes_per_second: piece,
                burst: Duration::from_micros(burst_us),
            }
        }
    }

    /// Gaps between requests in nanoseconds, often zero, and their pages.
    fn arrivals() -> impl Strategy<Value = Vec<(u64, u64)>> {
        let gap = prop_oneof![Just(0), 0u64..3_000_000, 0u64..300_000_000];
        let pages = prop_oneof![1u64..=64, 1u64..600];
        prop::collection::vec((gap, pages), 1..80)
    }

    /// Arrival, bytes and start of each piece.
    fn starts(model: &DiskModel, arrivals: &[(u64, u64)]) -> Vec<(u64, u64, u64)> {
        let mut disk = Schedule::new(model);
        let mut now = 0;
        let mut pieces = Vec::new();
        for (gap, pages) in arrivals {
            now += gap;
            let mut left = pages * 4096;
            while left > 0 {
                let piece = left.min(PIECE_BYTES);
                left -= piece;
                pieces.push((now, piece, disk.start(now, piece)));
            }
        }
        pieces
    }

    proptest! {
        /// Whatever the arrivals: in no interval do more pieces start than the quota of that
        /// interval plus the burst.
        #[test]
        fn no_span_exceeds_a_quota(model in models(), arrivals in arrivals()) {
            let pieces = starts(&model, &arrivals);
            let burst = model.burst.as_secs_f64();
            for (first, &(_, _, from)) in pieces.iter().enumerate() {
                let mut bytes = 0;
                for (last, &(_, piece, to)) in pieces.iter().enumerate().skip(first) {
                    prop_assert!(to >= from, "in order");
                    bytes += piece;
                    let seconds = (to - from) as f64 / NANOS as f64 + 1e-6;
                    let count = (last - first + 1) as f64;
                    let iops = f64::from(model.iops);
                    prop_assert!(count <= (burst * iops).max(1.0) + seconds * iops);
                    let bandwidth = model.bandwidth_bytes_per_second as f64;
                    let saved = (burst * bandwidth).max(PIECE_BYTES as f64);
                    prop_assert!(bytes as f64 <= saved + seconds * bandwidth);
                }
            }
        }

        /// No piece waits without need: a late piece could not have started a microsecond earlier,
        /// because some interval that ends with it would then have exceeded a quota, or because its
        /// predecessor started no earlier.
        #[test]
        fn nothing_waits_without_need(model in models(), arrivals in arrivals()) {
            let pieces = starts(&model, &arrivals);
            for (last, &(arrival, _, start)) in pieces.iter().enumerate() {
                let earlier = start.saturating_sub(1_000 + last as u64);
                if earlier <= arrival || (last > 0 && pieces[last - 1].2 > earlier) {
                    continue;
                }
                let mut bytes = 0;
                let needed = (0..=last).rev().any(|first| {
                    bytes += pieces[first].1;
                    let seconds = earlier.saturating_sub(pieces[first].2) as f64 / NANOS as f64;
                    let burst = model.burst.as_secs_f64();
                    let iops = f64::from(model.iops);
                    let bandwidth = model.bandwidth_bytes_per_second as f64;
                    (last - first + 1) as f64 > (burst * iops).max(1.0) + seconds * iops
                        || bytes as f64
                            > (burst * bandwidth).max(PIECE_BYTES as f64) + seconds * bandwidth
                });
                prop_assert!(needed, "piece {last} waited from {arrival} to {start}");
            }
        }

        /// A request is complete when its last piece has had its latency and transfer time; usage
        /// adds up.
        #[test]
        fn requests_complete_with_their_pieces(model in models(), arrivals in arrivals()) {
            let mut pieces = starts(&model, &arrivals).into_iter();
            let mut disk = Schedule::new(&model);
            let (mut now, mut usage) = (0, Usage::default());
            for (gap, pages) in &arrivals {
                now += gap;
                let done = disk.request(now, pages * 4096);
                let own = pieces.by_ref().take((pages * 4096).div_ceil(PIECE_BYTES) as usize);
                let mut last = 0;
                for (_, bytes, start) in own {
                    let completed = start + model.idle_latency(bytes).as_nanos() as u64;
                    last = last.max(completed);
                    usage.pieces += 1;
                    usage.bytes += bytes;
                    usage.in_flight += Duration::from_nanos(completed - now);
                }
                prop_assert_eq!(done, last);
            }
            prop_assert_eq!(disk.usage(), usage);
        }
    }
}
