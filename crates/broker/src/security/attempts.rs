//! Limits the rate of failed authentication attempts per address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout_at;

/// The number of failures that an address has free, including users behind a gateway.
const BURST: u32 = 20;

/// The greatest number of tracked addresses; about 100 bytes each.
const MAX_ADDRESSES: usize = 20_000;

/// The longest wait of an attempt. It exceeds the time that clients wait for a response.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The attempts of each address. An attempt in progress may fail, so there are never more of them
/// than failures left; the others wait until one ends. All clients of a machine may reconnect at
/// the same time, and none of them has failed. One failure is dropped per second.
#[derive(Default)]
pub(crate) struct Attempts {
    by_address: Mutex<HashMap<IpAddr, AddressState>>,
}

/// The attempts of one address.
struct AddressState {
    failed: u32,
    since: Instant,
    in_progress: u32,
    /// Notified when an attempt ends.
    ended: Arc<Notify>,
}

impl AddressState {
    fn new(now: Instant) -> Self {
        Self { failed: 0, since: now, in_progress: 0, ended: Arc::default() }
    }

    /// Drops the failures that have decayed.
    fn decay(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        self.failed = self.failed.saturating_sub(u32::try_from(seconds).unwrap_or(u32::MAX));
        self.since += Duration::from_secs(seconds);
    }
}

/// An attempt in progress. Dropping it without success counts as a failure.
pub(crate) struct Attempt {
    attempts: Arc<Attempts>,
    ip: IpAddr,
    succeeded: bool,
}

impl Attempt {
    pub(crate) fn succeeded(mut self) {
        self.succeeded = true;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut by_address = self.attempts.by_address.lock();
        let of = by_address.entry(self.ip).or_insert_with(|| AddressState::new(now));
        of.decay(now);
        of.in_progress = of.in_progress.saturating_sub(1);
        // More failures would only delay the time when the address is forgiven.
        of.failed = (of.failed + u32::from(!self.succeeded)).min(BURST);
        of.ended.notify_one();
    }
}

impl Attempts {
    /// Begins a re-authentication of an authenticated client. It does not wait, and failures of
    /// other clients do not affect it; its own failure counts.
    pub(crate) fn begin_reauthentication(self: &Arc<Self>, ip: IpAddr) -> Attempt {
        let ip = network(ip);
        let mut by_address = self.by_address.lock();
        let now = Instant::now();
        evict(&mut by_address, now);
        by_address.entry(ip).or_insert_with(|| AddressState::new(now)).in_progress += 1;
        Attempt { attempts: self.clone(), ip, succeeded: false }
    }

    /// Begins an attempt once those in progress of the same address allow it; `None` if too many
    /// have failed.
    pub(crate) async fn begin(self: &Arc<Self>, ip: IpAddr) -> Option<Attempt> {
        let ip = network(ip);
        let deadline = tokio::time::Instant::now() + MAX_WAIT;
        loop {
            let ended = {
                let mut by_address = self.by_address.lock();
                let now = Instant::now();
                evict(&mut by_address, now);
                let of = by_address.entry(ip).or_insert_with(|| AddressState::new(now));
                of.decay(now);
                if of.failed >= BURST {
                    // Later waiters must get the same result.
                    of.ended.notify_one();
                    return None;
                }
                if of.failed + of.in_progress < BURST {
                    of.in_progress += 1;
                    if of.failed + of.in_progress < BURST {
                        // Two attempts may have ended before the first waiter was notified.
                        of.ended.notify_one();
                    }
                    return Some(Attempt { attempts: self.clone(), ip, succeeded: false });
                }
                of.ended.clone()
            };
            timeout_at(deadline, ended.notified()).await.ok()?;
        }
    }
}

/// Makes space for an address. Under an attack from many addresses, a dropped address has its
/// attempts again, which is better than refusing every client.
fn evict(by_address: &mut HashMap<IpAddr, AddressState>, now: Instant) {
    if by_address.len() < MAX_ADDRESSES {
        return;
    }
    by_address.retain(|_, of| {
        of.decay(now);
        of.failed > 0 || of.in_progress > 0
    });
    if by_address.len() >= MAX_ADDRESSES {
        // Addresses with waiters stay: else the waiters would not be notified.
        by_address.retain(|_, of| of.in_progress > 0);
    }
}

/// The key of an address. The owner of an IPv6 address has a network of 64 bits of them.
fn network(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(ip) => IpAddr::V6((u128::from(ip) >> 64 << 64).into()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Moves the clock forward by `by`.
    fn later(attempts: &Attempts, by: Duration) {
        for of in attempts.by_address.lock().values_mut() {
            of.since -= by;
        }
    }

    #[tokio::test]
    async fn too_many_failures_block_their_address_only() {
        let attempts = Arc::new(Attempts::default());
        let [bad, good] = [ip("10.0.0.1"), ip("10.0.0.2")];
        for _ in 0..BURST {
            drop(attempts.begin(bad).await.unwrap());
        }
        assert!(attempts.begin(bad).await.is_none());
        for _ in 0..3 * BURST {
            attempts.begin(good).await.unwrap().succeeded();
        }
        later(&attempts, Duration::from_secs(2));
        drop(attempts.begin(bad).await.unwrap());
        drop(attempts.begin(bad).await.unwrap());
        assert!(attempts.begin(bad).await.is_none());
    }

    #[tokio::test]
    async fn failures_of_others_do_not_block_a_reauthentication() {
        let attempts = Arc::new(Attempts::default());
        let here = ip("10.0.0.1");
        for _ in 0..BURST {
            drop(attempts.begin(here).await.unwrap());
        }
        attempts.begin_reauthentication(here).succeeded();
        later(&attempts, Duration::from_secs(1));
        drop(attempts.begin_reauthentication(here));
        assert!(attempts.begin(here).await.is_none(), "its failure counts");
    }

    #[tokio::test]
    async fn concurrent_attempts_are_limited_to_the_failures_left() {
        let attempts = Arc::new(Attempts::default());
        let here = ip("10.0.0.1");
        let mut in_progress = Vec::new();
        for _ in 0..BURST {
            in_progress.push(attempts.begin(here).await.unwrap());
        }
        let mut next = Box::pin(attempts.begin(here));
        assert!(futures::poll!(&mut next).is_pending());
        in_progress.pop().unwrap().succeeded();
        in_progress.push(next.await.unwrap());

        let waiting = futures::future::join_all((0..BURST).map(|_| attempts.begin(here)));
        let mut waiting = Box::pin(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        in_progress.clear();
        assert!(waiting.await.iter().all(Option::is_none));
    }

    #[tokio::test]
    async fn an_ipv6_network_counts_as_one_address_and_addresses_are_bounded() {
        let attempts = Arc::new(Attempts::default());
        for n in 0..u128::from(BURST) {
            drop(attempts.begin(IpAddr::V6((0x2001_0db8_u128 << 96 | n).into())).await.unwrap());
        }
        assert!(attempts.begin(ip("2001:db8::ffff")).await.is_none());
        for n in 0..50_000_u32 {
            drop(attempts.begin(IpAddr::V4(n.into())).await);
        }
        assert!(attempts.by_address.lock().len() <= MAX_ADDRESSES);
    }
}
