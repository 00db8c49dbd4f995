//! How fast an upload writes: about as fast as what it writes came in, so that the object store and
//! the network see a steady stream and not one burst per cut, which everything else on the way
//! would have to wait for.

use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// An upload is never slower: what is small is done soon, and a log that is nearly idle is trimmed
/// soon.
const LEAST_BYTES_PER_SECOND: u64 = 4 << 20;
/// So often it is looked whether there is a reason to hurry, at least.
const LOOK: Duration = Duration::from_millis(100);

/// The pace of one upload.
pub(crate) struct Pace<'a> {
    /// Somebody wants the upload's attention. What is taken from it while waiting is put back at
    /// the end.
    wanted: &'a Notify,
    was_wanted: bool,
    began: Instant,
    /// `None`: as fast as it goes.
    bytes_per_second: Option<u64>,
    written: u64,
}

impl<'a> Pace<'a> {
    /// `bytes` are to be written. They took `gathered` to come in, and three quarters of that to go
    /// out leave a rest for the commit, before the next ones are due.
    pub(crate) fn new(bytes: u64, gathered: Duration, wanted: &'a Notify) -> Self {
        let span_ms = u64::try_from(gathered.as_millis() * 3 / 4).unwrap_or(u64::MAX).max(1);
        let rate = u128::from(bytes) * 1000 / u128::from(span_ms);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).max(LEAST_BYTES_PER_SECOND);
        let bytes_per_second = Some(rate);
        Self { wanted, was_wanted: false, began: Instant::now(), bytes_per_second, written: 0 }
    }

    /// From here on as fast as it goes.
    pub(crate) fn end(&mut self) {
        self.bytes_per_second = None;
    }

    /// Wait until the next `bytes` may be written. `hurry` ends the waiting, now and for good.
    pub(crate) async fn wait(&mut self, bytes: u64, hurry: impl Fn() -> bool) {
        while let Some(rate) = self.bytes_per_second {
            if hurry() {
                return self.end();
            }
            let micros = u128::from(self.written) * 1_000_000 / u128::from(rate);
            let micros = u64::try_from(micros).unwrap_or(u64::MAX);
            let left = Duration::from_micros(micros).saturating_sub(self.began.elapsed());
            if left.is_zero() {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(LOOK)) => {}
                () = self.wanted.notified() => self.was_wanted = true,
            }
        }
        self.written += bytes;
    }
}

impl Drop for Pace<'_> {
    fn drop(&mut self) {
        if self.was_wanted {
            self.wanted.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// How long it takes to write so much, a mebibyte at a time.
    async fn taken(pace: &mut Pace<'_>, mebibytes: u64, hurry: impl Fn() -> bool) -> Duration {
        let began = Instant::now();
        for _ in 0..mebibytes {
            pace.wait(MIB, &hurry).await;
        }
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_cut_goes_out_in_three_quarters_of_the_time_that_it_took_to_come_in() {
        let wanted = Notify::new();
        let mut pace = Pace::new(600 * MIB, Duration::from_secs(60), &wanted);
        let took = taken(&mut pace, 600, || false).await;
        // The last mebibyte waits for the others only.
        assert!(took > Duration::from_secs(44) && took <= Duration::from_secs(45), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_small_is_not_stretched() {
        let wanted = Notify::new();
        let mut pace = Pace::new(5 * MIB, Duration::from_secs(60), &wanted);
        assert_eq!(taken(&mut pace, 5, || false).await, Duration::from_secs(1));
        let mut pace = Pace::new(600 * MIB, Duration::ZERO, &wanted);
        assert!(taken(&mut pace, 600, || false).await < Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn time_that_was_lost_is_made_up_for() {
        let wanted = Notify::new();
        let mut pace = Pace::new(600 * MIB, Duration::from_secs(60), &wanted);
        taken(&mut pace, 1, || false).await;
        tokio::time::sleep(Duration::from_secs(30)).await;
        let took = taken(&mut pace, 599, || false).await;
        assert!(took <= Duration::from_secs(15), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_hurry_ends_it_at_once_and_for_good() {
        let wanted = Notify::new();
        let hurry = Cell::new(false);
        let mut pace = Pace::new(600 * MIB, Duration::from_secs(600), &wanted);
        taken(&mut pace, 1, || hurry.get()).await;
        let began = Instant::now();
        tokio::join!(taken(&mut pace, 500, || hurry.get()), async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            hurry.set(true);
            wanted.notify_one();
        });
        assert_eq!(began.elapsed(), Duration::from_millis(30), "the notification woke it");
        hurry.set(false);
        assert_eq!(taken(&mut pace, 99, || hurry.get()).await, Duration::ZERO);
        // Who waits for the notification gets it all the same.
        drop(pace);
        tokio::time::timeout(Duration::from_secs(1), wanted.notified()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_hurry_that_nobody_tells_is_seen_soon() {
        let wanted = Notify::new();
        let began = Instant::now();
        let mut pace = Pace::new(600 * MIB, Duration::from_secs(600), &wanted);
        let hurry = || began.elapsed() >= Duration::from_secs(10);
        let took = taken(&mut pace, 600, hurry).await;
        assert!(took >= Duration::from_secs(10) && took <= Duration::from_secs(10) + LOOK);
    }
}
