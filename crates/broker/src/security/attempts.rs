//! Attempts to log in, by address: who fails too often has to wait.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Instant;

/// Failures in a row that an address has free, users behind a gateway included.
const BURST: u32 = 20;

/// Addresses that are remembered; about 50 bytes each.
const MAX_ADDRESSES: usize = 20_000;

/// Attempts of each address. One that is begun counts as failed until it has succeeded, so that many at the same time do not get by; one is
/// forgotten each second.
#[derive(Default)]
pub(crate) struct Attempts {
    by_address: HashMap<IpAddr, Failed>,
}

struct Failed {
    count: u32,
    since: Instant,
}

impl Failed {
    /// What is left of it.
    fn decay(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        if seconds > 0 {
            let seconds = u32::try_from(seconds).unwrap_or(u32::MAX);
            self.count = self.count.saturating_sub(seconds);
            self.since = now;
        }
    }
}

impl Attempts {
    /// Begin an attempt; false if it is one too many now.
    pub(crate) fn begin(&mut self, ip: IpAddr, now: Instant) -> bool {
        if self.by_address.len() >= MAX_ADDRESSES {
            self.by_address.retain(|_, failed| {
                failed.decay(now);
                failed.count > 0
            });
            if self.by_address.len() >= MAX_ADDRESSES {
                // Under attack from everywhere. Who is forgotten has its attempts again, which is better than to let nobody in.
                self.by_address.clear();
            }
        }
        let failed = self.by_address.entry(network(ip)).or_insert(Failed { count: 0, since: now });
        failed.decay(now);
        if failed.count >= BURST {
            return false;
        }
        failed.count += 1;
        true
    }

    /// The attempt has succeeded.
    pub(crate) fn succeeded(&mut self, ip: IpAddr) {
        if let Some(failed) = self.by_address.get_mut(&network(ip)) {
            failed.count = failed.count.saturating_sub(1);
        }
    }
}

/// Whoever has an IPv6 address has a network of 64 bits of them.
fn network(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(ip) => IpAddr::V6((u128::from(ip) >> 64 << 64).into()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_fails_too_often_waits_and_others_do_not() {
        let mut attempts = Attempts::default();
        let now = Instant::now();
        let [bad, good] = ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()];
        for _ in 0..BURST {
            assert!(attempts.begin(bad, now));
        }
        assert!(!attempts.begin(bad, now));
        for _ in 0..3 * BURST {
            assert!(attempts.begin(good, now));
            attempts.succeeded(good);
        }
        let later = now + Duration::from_secs(2);
        assert!(attempts.begin(bad, later));
        assert!(attempts.begin(bad, later));
        assert!(!attempts.begin(bad, later));
    }

    #[test]
    fn a_network_of_ipv6_is_one_address_and_the_number_is_bounded() {
        let mut attempts = Attempts::default();
        let now = Instant::now();
        for n in 0..u128::from(BURST) {
            assert!(attempts.begin(IpAddr::V6((0x2001_0db8_u128 << 96 | n).into()), now));
        }
        assert!(!attempts.begin("2001:db8::ffff".parse().unwrap(), now));
        for n in 0..50_000_u32 {
            attempts.begin(IpAddr::V4(n.into()), now);
        }
        assert!(attempts.by_address.len() <= MAX_ADDRESSES);
    }
}
