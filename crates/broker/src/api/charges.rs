//! The charges of a request to its client's quotas.

use std::future::poll_fn;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::Context;
use crate::errors::ApiError;
use crate::quotas::{Bound, QuotaOwner};

/// The charges of a request so far.
#[derive(Default)]
pub(super) struct RequestCharges(Mutex<Charges>);

#[derive(Default)]
struct Charges {
    /// How long the connection is throttled after this request.
    throttle_ms: u32,
    /// The thread time of handling the request that is not charged yet.
    handling: Duration,
    /// When a thread began to work on it, if one does now.
    since: Option<Instant>,
}

impl RequestCharges {
    /// Handles a request and measures its thread time, without waits and work done elsewhere.
    pub(super) async fn timed<T>(&self, mut handling: BoxFuture<'_, T>) -> T {
        poll_fn(|cx| {
            self.0.lock().since = Some(Instant::now());
            let polled = handling.as_mut().poll(cx);
            self.stop_clock(Instant::now());
            polled
        })
        .await
    }

    fn stop_clock(&self, now: Instant) {
        let mut charged = self.0.lock();
        if let Some(since) = charged.since.take() {
            charged.handling += now.saturating_duration_since(since);
        }
    }

    /// Takes the thread time that is not charged yet, up to now.
    fn take_handling(&self, now: Instant) -> Duration {
        self.stop_clock(now);
        let mut charged = self.0.lock();
        charged.since = Some(now);
        std::mem::take(&mut charged.handling)
    }

    /// How long the connection is throttled after this request.
    pub(super) fn throttle(&self) -> Duration {
        Duration::from_millis(self.0.lock().throttle_ms.into())
    }

    /// Throttles the client for `wait` at least.
    fn wait(&self, wait: Duration) {
        // Rounded up, so that a client that waits exactly this long is not early.
        let wait_ms = u32::try_from(wait.as_micros().div_ceil(1_000)).unwrap_or(u32::MAX);
        let mut charged = self.0.lock();
        charged.throttle_ms = charged.throttle_ms.max(wait_ms);
    }
}

impl Context {
    /// The user whose quota is charged. `None` if there is no quota, and before authentication
    /// where it is required: a claimed name is not charged.
    fn charged_user(&self, bound: Bound) -> Option<String> {
        let is_charged = self.server.quotas.bound(bound);
        is_charged.then(|| self.peer.principal()).flatten().map(|user| user.name().to_owned())
    }

    /// Charges the client's quota and throttles the connection until the debt is paid.
    pub(super) fn charge(&self, bound: Bound, amount: f64) {
        let quotas = &self.server.quotas;
        if let Some(user) = self.charged_user(bound) {
            let owner = QuotaOwner::Client { user: &user, client: &self.client.client_id };
            self.wait(bound, quotas.charge(bound, owner, amount, Instant::now()));
        }
    }

    fn wait(&self, bound: Bound, wait: Duration) {
        if !wait.is_zero() {
            self.server.metrics.throttled(bound.key());
            self.charges.wait(wait);
        }
    }

    /// Charges the client's quota of topic changes. For versions before `first_strict` the change
    /// succeeds and the client waits afterwards.
    ///
    /// # Errors
    /// The client is in debt for earlier changes.
    pub(super) fn charge_changes(
        &self,
        partitions: usize,
        first_strict: i16,
    ) -> Result<(), ApiError> {
        let quotas = &self.server.quotas;
        if self.version < first_strict {
            self.charge(Bound::Changes, partitions as f64);
        } else if let Some(user) = self.charged_user(Bound::Changes) {
            let owner = QuotaOwner::Client { user: &user, client: &self.client.client_id };
            let taken = quotas.try_charge(Bound::Changes, owner, partitions as f64, Instant::now());
            if let Err(wait) = taken {
                self.wait(Bound::Changes, wait);
                return Err(ApiError::QuotaExceeded);
            }
        }
        Ok(())
    }

    /// Charges the thread time of the request and returns the throttle time for all charges. Called
    /// last, before the response is encoded.
    pub(super) fn throttle_ms(&self) -> i32 {
        if self.server.quotas.bound(Bound::Handling) {
            let handling = self.charges.take_handling(Instant::now());
            self.charge(Bound::Handling, handling.as_secs_f64() * 100.0);
        }
        i32::try_from(self.charges.throttle().as_millis()).unwrap_or(i32::MAX)
    }

    /// Whether the client is still in debt: it came back early, or on another connection. It gets
    /// an empty response and has to retry.
    pub(super) fn is_throttled(&self, bound: Bound) -> bool {
        let quotas = &self.server.quotas;
        let Some(user) = self.charged_user(bound) else { return false };
        let owner = QuotaOwner::Client { user: &user, client: &self.client.client_id };
        let wait = quotas.charge(bound, owner, 0.0, Instant::now());
        self.wait(bound, wait);
        !wait.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;

    #[test]
    fn waiting_time_is_not_charged() {
        const WORK: Duration = Duration::from_millis(3);
        const WAIT: Duration = Duration::from_millis(20);
        let charges = RequestCharges::default();
        let begun = Instant::now();
        let mut handling = Box::pin(charges.timed(Box::pin(async {
            std::thread::sleep(WORK);
            tokio::task::yield_now().await;
            std::thread::sleep(WORK);
            charges.take_handling(Instant::now())
        })));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(handling.as_mut().poll(&mut cx).is_pending());
        std::thread::sleep(WAIT);
        let Poll::Ready(handled) = handling.as_mut().poll(&mut cx) else { panic!("it has ended") };
        assert!(handled >= 2 * WORK, "{handled:?}");
        assert!(handled <= begun.elapsed() - WAIT, "{handled:?}");
        drop(handling);
        // The time is not charged again.
        assert!(charges.take_handling(Instant::now()) < handled);
    }

    #[test]
    fn the_longest_throttle_applies_and_is_rounded_up() {
        let charges = RequestCharges::default();
        charges.wait(Duration::from_micros(1_500));
        charges.wait(Duration::from_micros(1));
        assert_eq!(charges.throttle(), Duration::from_millis(2));
    }
}
