//! The cursors of the log and what they allow. Pure; `docs/format/wal.md`, section 5.

use crate::AppendError;
use crate::layout::{LogOffset, padding_len, page_floor};

/// `trim <= durable <= submitted <= appended`, all within one ring from the trim offset's page and one window from
/// `durable`. Each move is checked, in release builds too: a cursor out of order is lost data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursors {
    /// Durably trimmed: the space before it is reusable.
    trim: LogOffset,
    durable: LogOffset,
    submitted: LogOffset,
    appended: LogOffset,
    ring_bytes: u64,
    window_bytes: u64,
}

impl Cursors {
    /// Of a log that reaches from `trim` to `end` and is durable.
    pub(crate) fn new(trim: LogOffset, end: LogOffset, ring_bytes: u64, window_bytes: u64) -> Self {
        let cursors =
            Self { trim, durable: end, submitted: end, appended: end, ring_bytes, window_bytes };
        cursors.check();
        cursors
    }

    pub(crate) fn trim(&self) -> LogOffset {
        self.trim
    }

    pub(crate) fn durable(&self) -> LogOffset {
        self.durable
    }

    pub(crate) fn appended(&self) -> LogOffset {
        self.appended
    }

    /// The first byte that must not be written: the page of the trim offset, one lap on, holds live records.
    fn ring_end(&self) -> u64 {
        page_floor(self.trim.0) + self.ring_bytes
    }

    /// Whether a record that ends at `end`, and the padding that may follow it, fit.
    pub(crate) fn admit(&self, end: LogOffset) -> Result<(), AppendError> {
        let padded_end = end.0 + padding_len(end.0);
        let needed_bytes = padded_end - self.appended.0;
        if padded_end > self.ring_end() {
            return Err(AppendError::OverCapacity {
                needed_bytes,
                free_bytes: self.ring_end().saturating_sub(self.appended.0),
                ring_bytes: self.ring_bytes,
            });
        }
        if padded_end > self.durable.0 + self.window_bytes {
            return Err(AppendError::WindowFull {
                needed_bytes,
                free_bytes: self.durable.0 + self.window_bytes - self.appended.0,
                window_bytes: self.window_bytes,
            });
        }
        Ok(())
    }

    /// A record or a padding was put at the end of the log.
    pub(crate) fn append(&mut self, end: LogOffset) {
        assert!(end > self.appended, "append to {end}: {self:?}");
        self.appended = end;
        self.check();
    }

    /// The block that ends at `end` goes to the device.
    pub(crate) fn submit(&mut self, end: LogOffset) {
        assert!(end > self.submitted, "submit to {end}: {self:?}");
        self.submitted = end;
        self.check();
    }

    /// Everything before `end` is on stable storage.
    pub(crate) fn complete(&mut self, end: LogOffset) {
        assert!(end > self.durable, "durable to {end}: {self:?}");
        self.durable = end;
        self.check();
    }

    /// The headers with this trim offset are durable.
    pub(crate) fn trim_to(&mut self, to: LogOffset) {
        assert!(to >= self.trim, "trim to {to}: {self:?}");
        self.trim = to;
        self.check();
    }

    fn check(&self) {
        assert!(
            self.trim <= self.durable
                && self.durable <= self.submitted
                && self.submitted <= self.appended
                && self.appended.0 <= self.ring_end()
                && self.appended.0 <= self.durable.0 + self.window_bytes,
            "cursors out of order: {self:?}"
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::PAGE;

    const WINDOW: u64 = 16 * PAGE;
    const RING: u64 = 40 * PAGE;

    fn new() -> Cursors {
        Cursors::new(LogOffset(0), LogOffset(0), RING, WINDOW)
    }

    #[test]
    fn the_window_and_the_ring_bound_what_is_taken_and_padding_counts() {
        let mut cursors = new();
        cursors.admit(LogOffset(WINDOW)).unwrap();
        assert!(
            matches!(cursors.admit(LogOffset(WINDOW - 8)), Err(AppendError::WindowFull { .. })),
            "padding of 8 + 4096"
        );
        cursors.admit(LogOffset(WINDOW - 32)).unwrap();
        for step in 1..=2 {
            cursors.append(LogOffset(step * WINDOW));
            cursors.submit(LogOffset(step * WINDOW));
            cursors.complete(LogOffset(step * WINDOW));
        }
        cursors.admit(LogOffset(RING)).unwrap();
        assert!(matches!(
            cursors.admit(LogOffset(RING + 32)),
            Err(AppendError::OverCapacity { .. })
        ));
        cursors.trim_to(LogOffset(PAGE - 1));
        assert!(
            cursors.admit(LogOffset(RING + 32)).is_err(),
            "the page of the trim offset is still in use"
        );
        cursors.trim_to(LogOffset(PAGE));
        cursors.admit(LogOffset(RING + 32)).unwrap();
    }

    #[test]
    #[should_panic(expected = "cursors out of order")]
    fn durable_can_not_pass_submitted() {
        let mut cursors = new();
        cursors.append(LogOffset(PAGE));
        cursors.complete(LogOffset(PAGE));
    }

    #[test]
    #[should_panic(expected = "cursors out of order")]
    fn trim_can_not_pass_durable() {
        new().trim_to(LogOffset(1));
    }

    proptest! {
        /// Whatever is admitted keeps the order, and what is refused would have broken it.
        #[test]
        fn admission_is_exact(steps in prop::collection::vec((0u8..4, 1u64..20_000), 1..300)) {
            let mut cursors = new();
            let mut blocks = std::collections::VecDeque::new();
            for (what, amount) in steps {
                match what {
                    0 | 1 => {
                        let end = LogOffset(cursors.appended().0 + amount);
                        let padded = end.0 + padding_len(end.0);
                        let fits_ring = padded <= page_floor(cursors.trim().0) + RING;
                        let fits_window = padded <= cursors.durable().0 + WINDOW;
                        match cursors.admit(end) {
                            Ok(()) => {
                                prop_assert!(fits_ring && fits_window);
                                cursors.append(end);
                                if !end.0.is_multiple_of(PAGE) {
                                    cursors.append(LogOffset(padded));
                                }
                                cursors.submit(LogOffset(padded));
                                blocks.push_back(LogOffset(padded));
                            }
                            Err(AppendError::OverCapacity { .. }) => prop_assert!(!fits_ring),
                            Err(AppendError::WindowFull { .. }) => prop_assert!(fits_ring && !fits_window),
                            Err(other) => prop_assert!(false, "{}", other),
                        }
                    }
                    2 => if let Some(end) = blocks.pop_front() {
                        cursors.complete(end);
                    },
                    _ => {
                        let to = cursors.trim().0 + amount.min(cursors.durable().0 - cursors.trim().0);
                        cursors.trim_to(LogOffset(to));
                    }
                }
            }
        }
    }
}
