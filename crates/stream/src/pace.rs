//! The rate of an upload: about that at which its data was appended, so that the object store and
//! the network see a steady stream instead of one burst per cut that delays all other traffic.

use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The lowest rate of an upload: small uploads complete soon, and an almost idle log is trimmed
/// soon.
const LEAST_BYTES_PER_SECOND: u64 = 4 << 20;
/// Longest interval between checks for a reason to hurry.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The pace of one upload.
pub(crate) struct Pace<'a> {
    /// Notified when the upload is wanted. A notification consumed while waiting is sent again at
    /// the end.
    wanted: &'a Notify,
    was_wanted: bool,
    began: Instant,
    /// `None`: unlimited.
    bytes_per_second: Option<u64>,
    written: u64,
}

impl<'a> Pace<'a> {
    /// Creates a pace for `bytes` that were appended in `gathered`. The upload takes three quarters
    /// of that time, which leaves a quarter for the commit before the next upload is due.
    pub(crate) fn new(bytes: u64, gathered: Duration, wanted: &'a Notify) -> Self {
        let span_ms = u64::try_from(gathered.as_millis() * 3 / 4).unwrap_or(u64::MAX).max(1);
        let rate = u128::from(bytes) * 1000 / u128::from(span_ms);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).max(LEAST_BYTES_PER_SECOND);
        let bytes_per_second = Some(rate);
        Self { wanted, was_wanted: false, began: Instant::now(), bytes_per_second, written: 0 }
    }

    /// Removes the limit.
    pub(crate) fn end(&mut self) {
        self.bytes_per_second = None;
    }

    /// Waits until the next `bytes` may be written. Once `hurry` returns true, the limit is
    /// removed.
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
                () = tokio::time::sleep(left.min(CHECK_INTERVAL)) => {}
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

    /// Returns how long it takes to write this much, a mebibyte at a time.
    async fn taken(pace: &mut Pace<'_>, mebibytes: u64, hurry: impl Fn() -> bool) -> Duration {
        let began = Instant::now();
        for _ in 0..mebibytes {
            pace.wait(MIB, &hurry).await;
        }
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_cut_is_uploaded_in_three_quarters_of_the_time_of_its_appends() {
        let wanted = Notify::new();
        let mut pace = Pace::new(600 * MIB, Duration::from_secs(60), &wanted);
        let took = taken(&mut pace, 600, || false).await;
        // The last mebibyte waits only for the others.
        assert!(took > Duration::from_secs(44) && took <= Duration::from_secs(45), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_small_upload_is_not_stretched() {
        let wanted = Notify::new();
        let mut pace = Pace::new(5 * MIB, Duration::from_secs(60), &wanted);
        assert_eq!(taken(&mut pace, 5, || false).await, Duration::from_secs(1));
        let mut pace = Pace::new(600 * MIB, Duration::ZERO, &wanted);
        assert!(taken(&mut pace, 600, || false).await < Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn lost_time_is_made_up_for() {
        let wanted = Notify::new();
        let mut pace = Pace::new(600 * MIB, Duration::from_secs(60), &wanted);
        taken(&mut pace, 1, || false).await;
        tokio::time::sleep(Duration::from_secs(30)).await;
        let took = taken(&mut pace, 599, || false).await;
        assert!(took <= Duration::from_secs(15), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn hurrying_removes_the_limit_at_once_and_permanently() {
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
        // A later waiter still gets the notification.
        drop(pace);
        tokio::time::timeout(Duration::from_secs(1), wanted.notified()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_hurry_without_a_notification_is_noticed_soon() {
        let wanted = Notify::new();
        let began = Instant::now();
        let mut pace = Pace::new(600 * MIB, Duration::from_secs(600), &wanted);
        let hurry = || began.elapsed() >= Duration::from_secs(10);
        let took = taken(&mut pace, 600, hurry).await;
        assert!(
            took >= Duration::from_secs(10) && took <= Duration::from_secs(10) + CHECK_INTERVAL
        );
    }
}
