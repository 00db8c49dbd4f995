//! The cursors of the log, the window, and the bounds they imply. Pure; `docs/format/wal.md`,
//! section 5.

use crate::layout::{LogOffset, padding_len, page_ceil, page_floor};
use crate::{AppendError, Options};

/// The positions of the log: `trim <= durable <= submitted <= appended`, all within one ring from
/// the trim offset's page and one window from `durable`. Each move is checked, in release builds
/// too: a cursor out of order is lost data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursors {
    /// Durable trim offset: the space before it is reusable.
    trim: LogOffset,
    durable: LogOffset,
    submitted: LogOffset,
    appended: LogOffset,
    ring_bytes: u64,
    /// Ring size that bounds appends: a smaller one while a resize is pending.
    bound_bytes: u64,
    window_bytes: u64,
}

impl Cursors {
    /// The cursors of a durable log from `trim` to `end`.
    pub(crate) fn new(trim: LogOffset, end: LogOffset, ring_bytes: u64, window_bytes: u64) -> Self {
        let cursors = Self {
            trim,
            durable: end,
            submitted: end,
            appended: end,
            ring_bytes,
            bound_bytes: ring_bytes,
            window_bytes,
        };
        cursors.check();
        cursors
    }

    pub(crate) fn trim(&self) -> LogOffset {
        self.trim
    }

    pub(crate) fn durable(&self) -> LogOffset {
        self.durable
    }

    pub(crate) fn submitted(&self) -> LogOffset {
        self.submitted
    }

    pub(crate) fn appended(&self) -> LogOffset {
        self.appended
    }

    /// End of the log including a padding after the last record.
    pub(crate) fn padded_end(&self) -> u64 {
        self.appended.0 + padding_len(self.appended.0)
    }

    /// The first byte that must not be written: one lap on, the page of the trim offset holds live
    /// records.
    fn ring_end(&self) -> u64 {
        page_floor(self.trim.0) + self.ring_bytes
    }

    /// Checks that a record that ends at `end` fits, with the padding that may follow it.
    pub(crate) fn check_fits(&self, end: LogOffset) -> Result<(), AppendError> {
        let padded_end = end.0 + padding_len(end.0);
        let needed_bytes = padded_end - self.appended.0;
        let bound = page_floor(self.trim.0) + self.bound_bytes;
        if padded_end > bound {
            return Err(AppendError::OverCapacity {
                needed_bytes,
                free_bytes: bound.saturating_sub(self.appended.0),
                ring_bytes: self.bound_bytes,
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

    /// Records that a record or a padding was appended.
    pub(crate) fn append(&mut self, end: LogOffset) {
        assert!(end > self.appended, "append to {end}: {self:?}");
        self.appended = end;
        self.check();
    }

    /// Records that the block that ends at `end` was submitted.
    pub(crate) fn submit(&mut self, end: LogOffset) {
        assert!(end > self.submitted, "submit to {end}: {self:?}");
        self.submitted = end;
        self.check();
    }

    /// Records that everything before `end` is on stable storage.
    pub(crate) fn complete(&mut self, end: LogOffset) {
        assert!(end > self.durable, "durable to {end}: {self:?}");
        self.durable = end;
        self.check();
    }

    /// Records that the headers with this trim offset are durable.
    pub(crate) fn trim_to(&mut self, to: LogOffset) {
        assert!(to >= self.trim, "trim to {to}: {self:?}");
        self.trim = to;
        self.check();
    }

    /// Bytes appended and not durable.
    pub(crate) fn outstanding_bytes(&self) -> u64 {
        self.appended.0 - self.durable.0
    }

    pub(crate) fn window_bytes(&self) -> u64 {
        self.window_bytes
    }

    /// Sets the window, into which the outstanding bytes must fit.
    pub(crate) fn set_window(&mut self, window_bytes: u64) {
        self.window_bytes = window_bytes;
        self.check();
    }

    /// Bounds appends by a ring of `bytes`, at most the actual ring. Bytes already appended may
    /// exceed it.
    pub(crate) fn set_bound(&mut self, bytes: u64) {
        assert!(bytes <= self.ring_bytes, "a bound of {bytes}: {self:?}");
        self.bound_bytes = bytes;
    }

    /// Sets the size of the ring, into which the appended bytes must fit.
    pub(crate) fn set_ring(&mut self, bytes: u64) {
        self.ring_bytes = bytes;
        self.bound_bytes = bytes;
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

/// The growth and shrinking of the window. The cursors' window is never larger than the one in the
/// header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowSize {
    min_bytes: u64,
    max_bytes: u64,
    /// The smallest window in any header that recovery may use.
    persisted_bytes: u64,
    /// The window of the next header, for a growth.
    wanted_bytes: u64,
    /// Set after the cursors' window has shrunk: the header may follow when everything before this
    /// offset is durable.
    shrunk_at: Option<LogOffset>,
    /// Maximum of outstanding bytes since the last header change.
    peak_bytes: u64,
}

impl WindowSize {
    pub(crate) fn new(options: &Options, persisted_bytes: u64) -> Self {
        Self {
            min_bytes: options.initial_window_bytes(),
            max_bytes: options.window_bytes,
            persisted_bytes,
            wanted_bytes: persisted_bytes,
            shrunk_at: None,
            peak_bytes: 0,
        }
    }

    /// Records an append.
    pub(crate) fn appended(&mut self, cursors: &Cursors) {
        self.peak_bytes = self.peak_bytes.max(cursors.outstanding_bytes());
    }

    /// Handles an append refused for `needed_bytes`. Returns true if it fits now; otherwise a
    /// larger window may be requested.
    pub(crate) fn refused(&mut self, cursors: &mut Cursors, needed_bytes: u64) -> bool {
        let all_bytes = cursors.outstanding_bytes() + needed_bytes;
        if self.shrunk_at.take().is_some() {
            cursors.set_window(self.persisted_bytes);
            if all_bytes <= self.persisted_bytes {
                return true;
            }
        }
        let doubled = self.persisted_bytes.saturating_mul(2).max(page_ceil(all_bytes));
        self.wanted_bytes = doubled.min(self.max_bytes);
        false
    }

    /// Whether the window requires a header change.
    pub(crate) fn wants_change(&self) -> bool {
        self.wanted_bytes > self.persisted_bytes
    }

    /// Returns the window for a header change that begins now.
    pub(crate) fn begin_change(&mut self, cursors: &Cursors) -> u64 {
        if self.wants_change() {
            return self.wanted_bytes;
        }
        // From the first write on a header may state the smaller window: it cannot grow back
        // without another change.
        if self.shrunk_at.is_some_and(|at| at <= cursors.durable()) {
            self.shrunk_at = None;
            self.persisted_bytes = cursors.window_bytes();
            self.wanted_bytes = self.persisted_bytes;
        }
        self.persisted_bytes
    }

    /// Records that the change with `window_bytes` has taken effect.
    pub(crate) fn changed(&mut self, cursors: &mut Cursors, window_bytes: u64) {
        if window_bytes > self.persisted_bytes {
            self.persisted_bytes = window_bytes;
            self.shrunk_at = None;
            cursors.set_window(window_bytes);
        } else if self.shrunk_at.is_none()
            && self.peak_bytes <= self.persisted_bytes / 4
            && self.persisted_bytes > self.min_bytes
        {
            let half = page_ceil(self.persisted_bytes / 2);
            cursors.set_window(half.max(self.min_bytes));
            self.shrunk_at = Some(cursors.appended());
        }
        self.peak_bytes = cursors.outstanding_bytes();
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
    fn the_window_and_the_ring_bound_appends_including_padding() {
        let mut cursors = new();
        cursors.check_fits(LogOffset(WINDOW)).unwrap();
        assert!(
            matches!(
                cursors.check_fits(LogOffset(WINDOW - 8)),
                Err(AppendError::WindowFull { .. })
            ),
            "padding of 8 + 4096"
        );
        cursors.check_fits(LogOffset(WINDOW - 32)).unwrap();
        for step in 1..=2 {
            cursors.append(LogOffset(step * WINDOW));
            cursors.submit(LogOffset(step * WINDOW));
            cursors.complete(LogOffset(step * WINDOW));
        }
        cursors.check_fits(LogOffset(RING)).unwrap();
        assert!(matches!(
            cursors.check_fits(LogOffset(RING + 32)),
            Err(AppendError::OverCapacity { .. })
        ));
        cursors.trim_to(LogOffset(PAGE - 1));
        assert!(
            cursors.check_fits(LogOffset(RING + 32)).is_err(),
            "the page of the trim offset is still in use"
        );
        cursors.trim_to(LogOffset(PAGE));
        cursors.check_fits(LogOffset(RING + 32)).unwrap();
    }

    #[test]
    #[should_panic(expected = "cursors out of order")]
    fn durable_cannot_pass_submitted() {
        let mut cursors = new();
        cursors.append(LogOffset(PAGE));
        cursors.complete(LogOffset(PAGE));
    }

    #[test]
    #[should_panic(expected = "cursors out of order")]
    fn trim_cannot_pass_durable() {
        new().trim_to(LogOffset(1));
    }

    proptest! {
        /// Accepted appends keep the order of the cursors; refused ones would have broken it.
        #[test]
        fn appends_are_accepted_exactly_when_they_fit(
            steps in prop::collection::vec((0u8..4, 1u64..20_000), 1..300),
        ) {
            let mut cursors = new();
            let mut blocks = std::collections::VecDeque::new();
            for (what, amount) in steps {
                match what {
                    0 | 1 => {
                        let end = LogOffset(cursors.appended().0 + amount);
                        let padded = end.0 + padding_len(end.0);
                        let fits_ring = padded <= page_floor(cursors.trim().0) + RING;
                        let fits_window = padded <= cursors.durable().0 + WINDOW;
                        match cursors.check_fits(end) {
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
                            Err(AppendError::WindowFull { .. }) => {
                                prop_assert!(fits_ring && !fits_window);
                            }
                            Err(other) => prop_assert!(false, "{}", other),
                        }
                    }
                    2 => if let Some(end) = blocks.pop_front() {
                        cursors.complete(end);
                    },
                    _ => {
                        let trim = cursors.trim().0;
                        let to = trim + amount.min(cursors.durable().0 - trim);
                        cursors.trim_to(LogOffset(to));
                    }
                }
            }
        }
    }

    proptest! {
        /// No header that may be on the device states a smaller window than the outstanding bytes,
        /// and each record at or behind its durable offset was appended with no more outstanding
        /// bytes than it states.
        #[test]
        fn every_header_states_a_sufficient_window(
            steps in prop::collection::vec((0u8..6, 1u64..30_000), 1..400),
        ) {
            let (ring, initial) = (1 << 24, 64 << 10);
            let options =
                Options { window_bytes: 1 << 20, max_record_bytes: 1000, ..Options::default() };
            let mut cursors = Cursors::new(LogOffset(0), LogOffset(0), ring, initial);
            let mut size = WindowSize::new(&options, initial);
            // Headers that may be valid (window, durable), the change in flight, and each record
            // with the bytes outstanding at its append.
            let mut headers = vec![(initial, 0)];
            let mut change = None;
            let mut records: Vec<(u64, u64)> = Vec::new();
            for (what, amount) in steps {
                match what {
                    0..=2 => {
                        let end = LogOffset(cursors.appended().0 + page_ceil(amount));
                        let fits = match cursors.check_fits(end) {
                            Err(AppendError::WindowFull { needed_bytes, .. }) => {
                                size.refused(&mut cursors, needed_bytes)
                            }
                            other => other.is_ok(),
                        };
                        if fits {
                            prop_assert!(cursors.check_fits(end).is_ok());
                            cursors.append(end);
                            cursors.submit(end);
                            size.appended(&cursors);
                            records.push((end.0, cursors.outstanding_bytes()));
                        }
                    }
                    3 => {
                        let step = amount.min(cursors.outstanding_bytes());
                        let to = LogOffset(cursors.durable().0 + step);
                        if to > cursors.durable() {
                            cursors.complete(to);
                            cursors.trim_to(to);
                        }
                    }
                    4 if change.is_none() => {
                        let window = size.begin_change(&cursors);
                        change = Some(window);
                        headers.push((window, cursors.durable().0));
                    }
                    5 => if let Some(window) = change.take() {
                        size.changed(&mut cursors, window);
                        headers.drain(..headers.len() - 1);
                    },
                    _ => {}
                }
                for (window, durable) in &headers {
                    prop_assert!(cursors.outstanding_bytes() <= *window);
                    let behind = records.iter().filter(|(end, _)| end > durable);
                    let widest = behind.map(|(_, outstanding)| *outstanding).max();
                    prop_assert!(
                        widest.unwrap_or(0) <= *window,
                        "{widest:?} behind {durable} under a window of {window}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_window_grows_when_full_and_shrinks_when_unused() {
        let options =
            Options { window_bytes: 1 << 20, max_record_bytes: 1000, ..Options::default() };
        let initial = options.initial_window_bytes();
        assert_eq!(initial, 64 << 10);
        let mut cursors = Cursors::new(LogOffset(0), LogOffset(0), 1 << 24, initial);
        let mut size = WindowSize::new(&options, initial);
        assert!(!size.refused(&mut cursors, 300 << 10));
        assert!(size.wants_change());
        let window = size.begin_change(&cursors);
        assert_eq!(
            (window, cursors.window_bytes()),
            (300 << 10, initial),
            "not used before a header states it"
        );
        size.changed(&mut cursors, window);
        assert_eq!(cursors.window_bytes(), 300 << 10);
        size.changed(&mut cursors, window);
        assert_eq!(cursors.window_bytes(), 152 << 10, "smaller at once");
        assert_eq!(size.begin_change(&cursors), 152 << 10);
        size.changed(&mut cursors, 152 << 10);
        assert_eq!(size.begin_change(&cursors), 76 << 10);
        assert!(!size.refused(&mut cursors, 100 << 10), "a header may state 76 KiB by now");
    }
}
