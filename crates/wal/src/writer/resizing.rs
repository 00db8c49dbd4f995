//! Resizing of an open log: nothing is moved, it only has to wait for the right moment.
//! `docs/format/wal.md`, section 7.

use std::sync::Arc;

use super::{Shared, State, StopOnPanic};
use crate::layout::{
    DATA_START, LogOffset, MIN_CAPACITY_BYTES, PAGE, Ring, is_capacity, page_ceil, page_floor,
};
use crate::report::HeaderInfo;
use crate::sync::OnceLock;
use crate::window::Cursors;
use crate::{ResizeError, WalError};

/// The outcome of a request.
pub(crate) type Outcome = Arc<OnceLock<Result<HeaderInfo, ResizeError>>>;

/// The pending and the current resize.
#[derive(Default)]
pub(super) struct Resizing {
    /// The resize whose headers are being written.
    change: Option<Target>,
    /// The resize that waits for its moment.
    wanted: Option<Target>,
    /// Number of requests with an outcome.
    over: u64,
}

struct Target {
    capacity_bytes: u64,
    outcome: Outcome,
}

impl Target {
    fn ring_bytes(&self) -> u64 {
        self.capacity_bytes - DATA_START
    }
}

impl Resizing {
    /// Whether blocks have to wait because their positions are about to change.
    pub(super) fn holds_blocks(&self) -> bool {
        self.change.is_some()
    }

    /// The requested capacity, if it differs from the current one.
    pub(super) fn pending_bytes(&self) -> Option<u64> {
        self.wanted.as_ref().or(self.change.as_ref()).map(|target| target.capacity_bytes)
    }

    /// Number of requests with an outcome.
    pub(super) fn over(&self) -> u64 {
        self.over
    }

    /// Withdraws the pending request when the log closes.
    pub(super) fn withdraw(&mut self) {
        self.wanted = None;
    }
}

/// Returns the ring of `ring_bytes` in which every live page of `from` keeps its position, if there
/// is one and everything appended fits.
fn place(from: Ring, ring_bytes: u64, cursors: &Cursors) -> Option<Ring> {
    if cursors.padded_end() > page_floor(cursors.trim().0) + ring_bytes {
        return None;
    }
    let start = page_floor(cursors.trim().0);
    let at = from.position(LogOffset(start));
    let at = if cursors.trim() == cursors.submitted() {
        // There is no live record, not even on this page.
        if at + PAGE <= ring_bytes { at } else { 0 }
    } else {
        let len = page_ceil(cursors.submitted().0) - start;
        if at + len > from.bytes().min(ring_bytes) {
            return None;
        }
        at
    };
    let origin = (at + ring_bytes - start % ring_bytes) % ring_bytes;
    Some(Ring::new(DATA_START + ring_bytes, origin))
}

/// Upper bound of the bytes by which the trim offset has to move before [`place`] finds the ring.
fn distance(from: Ring, ring_bytes: u64, cursors: &Cursors) -> u64 {
    if place(from, ring_bytes, cursors).is_some() {
        return 0;
    }
    let start = page_floor(cursors.trim().0);
    let to_the_end = from.bytes() - from.position(LogOffset(start));
    // The part beyond the new ring has to be trimmed first, which takes until the end of the ring
    // comes round again.
    let beyond = cursors.padded_end() > start + to_the_end + ring_bytes;
    to_the_end + if beyond { from.bytes() } else { 0 }
}

impl Shared {
    /// Implements [`Wal::request_resize`](crate::Wal::request_resize).
    pub(crate) fn request_resize(
        self: &Arc<Self>,
        capacity_bytes: u64,
    ) -> Result<Outcome, ResizeError> {
        let device_bytes = self.device.capacity_bytes();
        if capacity_bytes > device_bytes {
            return Err(ResizeError::LargerThanDevice { capacity_bytes, device_bytes });
        }
        if !is_capacity(capacity_bytes) {
            let reason =
                format!("it is not a multiple of {PAGE}, or less than {MIN_CAPACITY_BYTES}");
            return Err(ResizeError::Refused { capacity_bytes, reason });
        }
        if let Err(cause) = self.options.check(capacity_bytes - DATA_START) {
            return Err(ResizeError::Refused { capacity_bytes, reason: cause.to_string() });
        }
        let _guard = StopOnPanic::new(self);
        let mut state = self.state.lock();
        if let Some(cause) = self.marks.stopped() {
            return Err(cause.into());
        }
        if state.closing {
            return Err(WalError::Closed.into());
        }
        let outcome = state.request_resize(capacity_bytes);
        state.counters.moves += 1; // the bound for appends may have moved
        let (over, moves) = (state.resizing.over, state.counters.moves);
        let header = state.next_header();
        drop(state);
        self.submit_header(header);
        self.marks.moves.advance(moves);
        self.marks.resizes.advance(over);
        Ok(outcome)
    }
}

impl State {
    fn request_resize(&mut self, capacity_bytes: u64) -> Outcome {
        let resizing = &mut self.resizing;
        if let Some(wanted) = &resizing.wanted
            && wanted.capacity_bytes == capacity_bytes
        {
            return wanted.outcome.clone();
        }
        if let Some(replaced) = resizing.wanted.take() {
            let _ = replaced.outcome.set(Err(ResizeError::Replaced { capacity_bytes }));
            resizing.over += 1;
        }
        let outcome = match &resizing.change {
            Some(change) if change.capacity_bytes == capacity_bytes => change.outcome.clone(),
            None if self.headers.newest.capacity_bytes == capacity_bytes => {
                OnceLock::from(Ok(self.headers.newest.clone())).into()
            }
            _ => {
                let outcome = Outcome::default();
                resizing.wanted = Some(Target { capacity_bytes, outcome: outcome.clone() });
                outcome
            }
        };
        self.bound();
        outcome
    }

    /// Limits appends to the smallest of the current and requested rings.
    fn bound(&mut self) {
        let Resizing { change, wanted, .. } = &self.resizing;
        let targets = change.iter().chain(wanted).map(Target::ring_bytes);
        self.cursors.set_bound(targets.fold(self.ring.bytes(), u64::min));
    }

    /// If the moment has come, begins the change and returns the ring for the header. Blocks wait
    /// until the change has taken effect.
    pub(super) fn begin_resize(&mut self) -> Option<Ring> {
        let resizing = &mut self.resizing;
        let ring = place(self.ring, resizing.wanted.as_ref()?.ring_bytes(), &self.cursors)?;
        resizing.change = resizing.wanted.take();
        Some(ring)
    }

    /// Completes a header change, which may have changed the ring. Returns the number of requests
    /// with an outcome.
    pub(super) fn resized(&mut self) -> u64 {
        if let Some(change) = self.resizing.change.take() {
            self.ring = self.headers.newest.ring();
            self.cursors.set_ring(self.ring.bytes());
            let _ = change.outcome.set(Ok(self.headers.newest.clone()));
            self.resizing.over += 1;
        }
        self.bound();
        self.resizing.over
    }

    /// The requested capacity, and an upper bound of the bytes by which the trim offset has to move
    /// first.
    pub(super) fn resize_pending(&self) -> (Option<u64>, u64) {
        let wanted = self.resizing.wanted.as_ref();
        let distance =
            wanted.map_or(0, |wanted| distance(self.ring, wanted.ring_bytes(), &self.cursors));
        (self.resizing.pending_bytes(), distance)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn position(ring: Ring, page: u64) -> u64 {
        ring.position(LogOffset(page * PAGE))
    }

    /// The bytes left on the last page are too few for a padding, which would take the next page,
    /// that is, the first one.
    #[test]
    fn a_resize_leaves_space_for_a_following_padding() {
        let from = Ring::new(DATA_START + 40 * PAGE, 0);
        let place = |end| {
            let cursors = Cursors::new(LogOffset(0), LogOffset(end), 40 * PAGE, 16 * PAGE);
            place(from, 32 * PAGE, &cursors)
        };
        assert!(place(32 * PAGE - 32).is_some());
        assert!(place(32 * PAGE - 31).is_none());
        assert!(place(32 * PAGE).is_some());
    }

    proptest! {
        /// In every ring chosen each live page keeps its position; and a log in one piece inside
        /// the new ring always finds one.
        #[test]
        fn every_live_page_keeps_its_position(
            old in 32u64..80, new in 32u64..80, origin in 0u64..32, start in 0u64..500,
            len_permille in 0u64..=1000, trim in 0..PAGE, end in 0..PAGE,
        ) {
            let from = Ring::new(DATA_START + old * PAGE, origin * PAGE);
            let end = (start * PAGE + (old - 1) * PAGE * len_permille / 1000) + end;
            let trim = (start * PAGE + trim).min(end);
            let cursors = Cursors::new(LogOffset(trim), LogOffset(end), old * PAGE, 16 * PAGE);
            let live = start..end.div_ceil(PAGE).max(start);
            let first = position(from, start);
            let fits = first + (live.end - live.start) * PAGE <= from.bytes().min(new * PAGE);
            let has_space = cursors.padded_end() <= start * PAGE + new * PAGE;
            match place(from, new * PAGE, &cursors) {
                Some(to) if trim < end => {
                    prop_assert!(fits && has_space);
                    prop_assert_eq!(to.bytes(), new * PAGE);
                    for page in live {
                        prop_assert_eq!(position(from, page), position(to, page));
                    }
                }
                Some(to) => prop_assert_eq!(to.bytes(), new * PAGE),
                None => prop_assert!(!has_space || !fits && trim < end),
            }
        }

        /// The distance is sufficient: a log that continues within its bounds finds its ring when
        /// the trim offset has moved that far.
        #[test]
        fn a_resize_takes_effect_within_the_stated_distance(
            old in 32u64..80, new in 32u64..80, origin in 0u64..32, start in 0u64..200,
            len in 1u64..80, step in 1u64..40,
        ) {
            let from = Ring::new(DATA_START + old * PAGE, origin * PAGE);
            let end = (start + len.min(old)) * PAGE;
            let first = LogOffset(start * PAGE);
            let mut cursors = Cursors::new(first, LogOffset(end), old * PAGE, 16 * PAGE);
            cursors.set_bound(old.min(new) * PAGE);
            let until = start * PAGE + distance(from, new * PAGE, &cursors);
            let mut trim = start * PAGE;
            while place(from, new * PAGE, &cursors).is_none() {
                prop_assert!(trim < until, "no ring at {trim}, expected by {until}");
                // Fill the log as far as possible, then trim.
                while cursors.check_fits(LogOffset(cursors.appended().0 + PAGE)).is_ok() {
                    let end = LogOffset(cursors.appended().0 + PAGE);
                    cursors.append(end);
                    cursors.submit(end);
                    cursors.complete(end);
                }
                trim = (trim + step * PAGE).min(cursors.durable().0);
                cursors.trim_to(LogOffset(trim));
            }
        }
    }
}
