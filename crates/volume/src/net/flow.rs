//! Decisions of flow control and of timeouts, as functions of the time that they are given.
//! `docs/format/volume-wire.md`, section 8.

use std::time::Duration;

/// A dialer that has sent or received nothing for this long sends `Ping`.
pub const PING_AFTER: Duration = Duration::from_secs(1);
/// A dialer closes if nothing arrives for this long after a `Ping`.
pub const PONG_WITHIN: Duration = Duration::from_secs(5);
/// An acceptor closes if no frame is complete for this long.
pub const SILENCE: Duration = Duration::from_secs(15);
/// The handshake ends within this time.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// A write that makes no progress for this long closes the connection, except at the source of a
/// pull.
pub const WRITE_STALL: Duration = Duration::from_secs(5);

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// The delays between attempts to connect.
#[derive(Debug)]
pub struct BackOff(Duration);

impl Default for BackOff {
    fn default() -> Self {
        Self(FIRST_RETRY)
    }
}

impl BackOff {
    /// The delays after the end of a connection that was open for long: the first ones are short,
    /// because a refusal proves that the process is gone, and elections wait for it.
    pub fn after_loss() -> Self {
        Self(FIRST_RETRY / 10)
    }

    /// The delay before the next attempt.
    pub fn delay(&mut self) -> Duration {
        let delay = self.0;
        self.0 = (delay * 2).min(LAST_RETRY);
        delay
    }
}

/// Whether the other end of a connection that this process has dialed is there. Times are since an
/// arbitrary start.
#[derive(Debug)]
pub struct Liveness {
    sent: Duration,
    received: Duration,
    /// When the first `Ping` was sent after which nothing has arrived.
    pinged: Option<Duration>,
    /// This end does not read at the moment, so that nothing can arrive.
    is_paused: bool,
}

/// What a dialer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Send `Ping`.
    Ping,
    /// Close the connection.
    Close,
    /// Nothing until then.
    WaitUntil(Duration),
}

impl Liveness {
    /// A connection that was opened at `now`.
    pub fn new(now: Duration) -> Self {
        Self { sent: now, received: now, pinged: None, is_paused: false }
    }

    /// A frame is sent.
    pub fn sent(&mut self, now: Duration) {
        self.sent = now;
    }

    /// Bytes have arrived.
    pub fn received(&mut self, now: Duration) {
        self.received = now;
        self.pinged = None;
    }

    /// This end stops reading, because it cannot keep what would arrive.
    pub fn pause(&mut self) {
        self.is_paused = true;
    }

    /// This end reads again.
    pub fn resume(&mut self, now: Duration) {
        self.is_paused = false;
        self.received = now;
        self.pinged = self.pinged.map(|_| now);
    }

    /// What is to be done at `now`. A `Ping` counts as sent.
    pub fn duty(&mut self, now: Duration) -> Duty {
        let close_at = self.pinged.filter(|_| !self.is_paused).map(|at| at + PONG_WITHIN);
        if close_at.is_some_and(|at| at <= now) {
            return Duty::Close;
        }
        let silent = (self.pinged.is_none() && !self.is_paused).then_some(self.received);
        let ping_at = silent.map_or(self.sent, |received| received.min(self.sent)) + PING_AFTER;
        if ping_at <= now {
            self.sent = now;
            self.pinged.get_or_insert(now);
            return Duty::Ping;
        }
        Duty::WaitUntil(close_at.map_or(ping_at, |at| at.min(ping_at)))
    }
}

/// The costs of the unanswered requests of a connection.
#[derive(Debug)]
pub struct RequestWindow {
    limit: usize,
    used: usize,
}

impl RequestWindow {
    /// A window without requests.
    pub fn new(limit: usize) -> Self {
        Self { limit, used: 0 }
    }

    /// Takes the cost of a request, if it fits.
    #[must_use]
    pub fn take(&mut self, cost: usize) -> bool {
        let fits = cost <= self.limit - self.used;
        if fits {
            self.used += cost;
        }
        fits
    }

    /// Whether a request of this cost fits.
    pub fn fits(&self, cost: usize) -> bool {
        cost <= self.limit - self.used
    }

    /// Gives back the cost of a request that is answered.
    pub fn give_back(&mut self, cost: usize) {
        self.used = self.used.checked_sub(cost).expect("the cost was taken");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_dialer_pings_a_silent_end_and_closes_without_an_answer() {
        let mut liveness = Liveness::new(ms(0));
        assert_eq!(liveness.duty(ms(0)), Duty::WaitUntil(ms(1000)));
        assert_eq!(liveness.duty(ms(1000)), Duty::Ping);
        // More are sent, but the first one counts.
        assert_eq!(liveness.duty(ms(2000)), Duty::Ping);
        assert_eq!(liveness.duty(ms(2000)), Duty::WaitUntil(ms(3000)));
        liveness.sent(ms(5500));
        assert_eq!(liveness.duty(ms(5500)), Duty::WaitUntil(ms(6000)));
        assert_eq!(liveness.duty(ms(6000)), Duty::Close);
    }

    /// Heartbeats are sent all the time, and a peer connection has nothing to receive but `Pong`.
    #[test]
    fn a_dialer_that_sends_all_the_time_pings_as_well() {
        let mut liveness = Liveness::new(ms(0));
        let mut pings = 0;
        for now in (0..4000).step_by(100).map(ms) {
            liveness.sent(now);
            if liveness.duty(now) == Duty::Ping {
                pings += 1;
                liveness.received(now + ms(1));
            }
        }
        assert_eq!(pings, 3);
        // The last answer has arrived at 3,201 ms.
        assert_eq!(liveness.duty(ms(4201)), Duty::Ping);
        liveness.sent(ms(9200));
        assert_eq!(liveness.duty(ms(9201)), Duty::Close);
    }

    #[test]
    fn a_dialer_that_does_not_read_pings_and_does_not_close() {
        let mut liveness = Liveness::new(ms(0));
        assert_eq!(liveness.duty(ms(1000)), Duty::Ping);
        liveness.pause();
        for now in (2..100).map(|s| ms(1000 * s)) {
            assert_eq!(liveness.duty(now), Duty::Ping);
        }
        liveness.resume(ms(100_000));
        assert_eq!(liveness.duty(ms(100_000)), Duty::Ping);
        liveness.sent(ms(104_999));
        assert_eq!(liveness.duty(ms(105_000)), Duty::Close);
    }

    #[test]
    fn delays_double_up_to_a_second() {
        let mut back_off = BackOff::default();
        let delays: Vec<_> = (0..6).map(|_| back_off.delay()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1000, 1000].map(ms));
    }
}
