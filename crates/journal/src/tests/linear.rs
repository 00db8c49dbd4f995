//! A checker for the linearizability of a history of one key: the search of Wing and Gong for an
//! order in which all answers are right, with Lowe's cache of tried configurations ("Testing for
//! linearizability", 2017).
//!
//! A history of several keys is linearizable if that of each key is (Herlihy and Wing, "locality"),
//! so checking one key at a time suffices, and keeps the search short.

use std::collections::HashSet;
use std::fmt::Write;

use crate::When;

/// The end of a call that has not ended.
pub(super) const NEVER: u64 = u64::MAX;
/// The number of last calls shown for a history that is wrong.
const SHOWN: usize = 30;

/// A call with its answer. Values are numbers that are written once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Get(Option<u64>),
    Contains(bool),
    Put(u64),
    PutIfAbsent(u64, bool),
    /// The previous value.
    Swap(When, u64, Held),
    Delete(bool),
    /// It is absent afterwards, and may have been before.
    Remove,
    /// The clock shows this from then on.
    Time(u64),
}

/// The bits of a value that hold its time of expiry; 0: it does not expire.
const DEADLINE_BITS: u32 = 40;

/// Returns the value with a time of expiry.
pub(super) fn expiring(value: u64, at: u64) -> u64 {
    value | at << DEADLINE_BITS
}

fn has_expired(value: u64, now: u64) -> bool {
    let at = value >> DEADLINE_BITS;
    at != 0 && at <= now
}

/// A call, from the moment before it to the one after it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) begun: u64,
    pub(super) ended: u64,
    pub(super) answer: Answer,
}

/// The value of a key.
type Held = Option<u64>;

impl Answer {
    /// Returns the value that it has written, if any.
    pub(super) fn written(self) -> Option<u64> {
        match self {
            Self::Put(value)
            | Self::PutIfAbsent(value, true)
            | Self::Swap(When::Always, value, _)
            | Self::Swap(When::IfAbsent, value, None)
            | Self::Swap(When::IfPresent, value, Some(_)) => Some(value),
            _ => None,
        }
    }

    /// Returns whether it has replaced or removed the previous value, if there was one.
    pub(super) fn changes(self) -> bool {
        self.written().is_some() || matches!(self, Self::Delete(true) | Self::Remove)
    }

    /// Returns whether it is right only if the key is absent.
    fn wants_absence(self) -> bool {
        matches!(
            self,
            Self::Get(None)
                | Self::Contains(false)
                | Self::PutIfAbsent(_, true)
                | Self::Swap(_, _, None)
                | Self::Delete(false)
        )
    }

    /// Returns the value after it, if it is right with the value `held` before it.
    ///
    /// What may be evicted may be evicted at any moment, and is then absent until the next write.
    /// This cannot be observed before a call that finds nothing, so it suffices to assume the
    /// eviction there.
    fn after(self, held: Held, may_evict: bool) -> Result<Held, ()> {
        let is_right = match self {
            Self::Put(_) | Self::Remove | Self::Time(_) => true,
            Self::Get(Some(value)) | Self::Swap(_, _, Some(value)) => held == Some(value),
            Self::Contains(true) | Self::PutIfAbsent(_, false) | Self::Delete(true) => {
                held.is_some()
            }
            _ => held.is_none() || may_evict,
        };
        match self {
            _ if !is_right => Err(()),
            Self::Get(Some(_))
            | Self::Contains(true)
            | Self::PutIfAbsent(_, false)
            | Self::Time(_)
            | Self::Swap(When::IfAbsent, _, Some(_)) => Ok(held),
            _ => Ok(self.written()),
        }
    }

    /// Returns, for a call without an answer, the answer with which it has an effect. It may also
    /// have had none.
    fn with_effect(self) -> Option<Self> {
        match self {
            Self::Get(_) | Self::Contains(_) => None,
            Self::Put(_) | Self::Time(_) => Some(self),
            Self::PutIfAbsent(value, _) | Self::Swap(When::IfAbsent, value, _) => {
                Some(Self::PutIfAbsent(value, true))
            }
            // The previous value is unknown.
            Self::Swap(_, value, _) => Some(Self::Put(value)),
            Self::Delete(_) | Self::Remove => Some(Self::Delete(true)),
        }
    }
}

/// Checks whether there is an order for all calls; returns the number of evictions that it needs,
/// or the shortest prefix that has no order.
pub(super) fn check(calls: &[Call], may_evict: bool) -> Result<u64, String> {
    if let Some(evictions) = evictions(calls, NEVER, may_evict) {
        return Ok(evictions);
    }
    let mut ends: Vec<u64> =
        calls.iter().map(|call| call.ended).filter(|ended| *ended != NEVER).collect();
    ends.sort_unstable();
    // A history with an order has one without its last answers.
    let wrong = ends.partition_point(|ended| evictions(calls, ended + 1, may_evict).is_some());
    let until = ends[wrong];
    let mut part: Vec<_> = calls.iter().filter(|call| call.begun <= until).collect();
    part.sort_unstable_by_key(|call| call.begun);
    let mut message = format!("of {} calls the answer at moment {until} cannot be", part.len());
    for call in &part[part.len().saturating_sub(SHOWN)..] {
        let ended = if call.ended <= until { call.ended.to_string() } else { "...".into() };
        let _ = write!(message, "\n  {:>8} to {ended:<8} {:?}", call.begun, call.answer);
    }
    Err(message)
}

/// Returns the number of evictions in an order of what was called and answered before the moment
/// `until`, if there is one.
fn evictions(calls: &[Call], until: u64, may_evict: bool) -> Option<u64> {
    let answers: Vec<_> = calls
        .iter()
        .filter(|call| call.begun < until)
        .filter_map(|call| {
            let is_answered = call.ended < until;
            let answer = if is_answered { Some(call.answer) } else { call.answer.with_effect() };
            answer.map(|answer| (call.begun, is_answered.then_some(call.ended), answer))
        })
        .collect();
    let mut moments = Moments::new(&answers);
    let mut open = answers.iter().filter(|(_, ended, _)| ended.is_some()).count();
    let mut held: Held = None;
    let mut done = vec![0u64; answers.len().div_ceil(64)];
    let mut tried = HashSet::new();
    // The calls in order so far, each with the value before it and the time.
    let mut order: Vec<(usize, Held, u64)> = Vec::new();
    // Determined by what is done.
    let mut now = 0;
    let mut at = moments.first();
    while open > 0 {
        // There is nothing after the last moment: the end of an open call comes first.
        let Moment { call, is_end, next, .. } = moments.0[at];
        let (word, bit) = (call / 64, 1u64 << (call % 64));
        if is_end {
            // It must have taken effect before: the last choice was wrong.
            let (begin, before, then) = order.pop()?;
            now = then;
            let call = moments.0[begin].call;
            done[call / 64] &= !(1u64 << (call % 64));
            held = before;
            open += usize::from(moments.put_back(begin));
            at = moments.0[begin].next;
            continue;
        }
        let answer = answers[call].2;
        // Expired values are not visible, and time does not go back.
        held = held.filter(|value| !has_expired(*value, now));
        if let Ok(after) = answer.after(held, may_evict) {
            done[word] |= bit;
            if tried.insert((done.clone(), after)) {
                order.push((at, held, now));
                if let Answer::Time(time) = answer {
                    now = now.max(time);
                }
                held = after;
                open -= usize::from(moments.take(at));
                at = moments.first();
                continue;
            }
            done[word] &= !bit;
        }
        at = next;
    }
    let is_eviction = |(begin, before, _): &&(usize, Held, u64)| {
        before.is_some() && answers[moments.0[*begin].call].2.wants_absence()
    };
    Some(order.iter().filter(is_eviction).count() as u64)
}

/// The remaining beginnings and ends of calls in order of time: a ring whose element 0 is before
/// the first and after the last.
struct Moments(Vec<Moment>);

#[derive(Clone, Copy)]
struct Moment {
    call: usize,
    is_end: bool,
    /// The position of the end of a beginning; 0: it has none.
    end: usize,
    previous: usize,
    next: usize,
}

impl Moments {
    fn new(calls: &[(u64, Option<u64>, Answer)]) -> Self {
        let begins = calls.iter().enumerate().map(|(call, (begun, ..))| (*begun, false, call));
        let ends = calls
            .iter()
            .enumerate()
            .filter_map(|(call, (_, ended, _))| ended.map(|ended| (ended, true, call)));
        // At the same moment beginnings come first: these calls overlap.
        let mut all: Vec<_> = begins.chain(ends).collect();
        all.sort_unstable();
        let mut moments =
            vec![Moment { call: 0, is_end: true, end: 0, previous: all.len(), next: 1 }];
        let mut begin_of = vec![0; calls.len()];
        for (index, (_, is_end, call)) in all.iter().copied().enumerate() {
            let at = index + 1;
            moments.push(Moment { call, is_end, end: 0, previous: index, next: at + 1 });
            if is_end {
                let begin: usize = begin_of[call];
                moments[begin].end = at;
            } else {
                begin_of[call] = at;
            }
        }
        let last = all.len();
        moments[last].next = 0;
        Self(moments)
    }

    fn first(&self) -> usize {
        self.0[0].next
    }

    /// Removes a call; returns whether it had an end.
    fn take(&mut self, begin: usize) -> bool {
        self.unlink(begin);
        let end = self.0[begin].end;
        if end > 0 {
            self.unlink(end);
        }
        end > 0
    }

    /// Restores the call removed last; returns whether it has an end.
    fn put_back(&mut self, begin: usize) -> bool {
        let end = self.0[begin].end;
        if end > 0 {
            self.link(end);
        }
        self.link(begin);
        end > 0
    }

    fn unlink(&mut self, at: usize) {
        let Moment { previous, next, .. } = self.0[at];
        self.0[previous].next = next;
        self.0[next].previous = previous;
    }

    fn link(&mut self, at: usize) {
        let Moment { previous, next, .. } = self.0[at];
        self.0[previous].next = at;
        self.0[next].previous = at;
    }
}

mod tests {
    use alluvium_device::sim::Random;

    use super::Answer::*;
    use super::*;

    fn call(begun: u64, ended: u64, answer: Answer) -> Call {
        Call { begun, ended, answer }
    }

    /// Calls one after the other.
    fn in_turn(answers: &[Answer]) -> Vec<Call> {
        let moments = (0..).step_by(2);
        moments.zip(answers).map(|(begun, answer)| call(begun, begun + 1, *answer)).collect()
    }

    fn is_right(calls: &[Call]) -> bool {
        check(calls, false).is_ok()
    }

    fn is_right_with_eviction(calls: &[Call]) -> bool {
        check(calls, true).is_ok()
    }

    #[test]
    fn a_history_with_a_stale_read_is_refused() {
        let stale = in_turn(&[Put(1), Put(2), Get(Some(1))]);
        assert!(!is_right(&stale) && !is_right_with_eviction(&stale));
        assert!(is_right(&[call(0, 1, Put(1)), call(2, 5, Put(2)), call(3, 4, Get(Some(1)))]));
        // Once the new value was seen, the old one is not.
        let back = [
            call(0, 1, Put(1)),
            call(2, 9, Put(2)),
            call(3, 4, Get(Some(2))),
            call(5, 6, Get(Some(1))),
        ];
        assert!(!is_right(&back) && !is_right_with_eviction(&back));
    }

    #[test]
    fn a_history_with_a_lost_write_is_refused() {
        let lost = in_turn(&[Put(1), Get(None)]);
        assert!(!is_right(&lost));
        assert_eq!(check(&lost, true), Ok(1), "it may have been evicted");
        assert!(!is_right(&in_turn(&[Put(1), Contains(false)])));
        assert!(!is_right(&in_turn(&[Put(1), Delete(false)])));
        // Two concurrent writes: the overwritten one does not come back.
        let both = [
            call(0, 5, Put(1)),
            call(1, 4, Put(2)),
            call(6, 7, Get(Some(1))),
            call(8, 9, Get(Some(2))),
        ];
        assert!(!is_right(&both) && !is_right_with_eviction(&both));
        assert!(is_right(&both[..3]));
    }

    #[test]
    fn one_of_two_concurrent_puts_if_absent_succeeds() {
        let both = [call(0, 3, PutIfAbsent(1, true)), call(1, 2, PutIfAbsent(2, true))];
        assert!(!is_right(&both));
        assert_eq!(check(&both, true), Ok(1), "the first may have been evicted in between");
        let seen = [both[0], both[1], call(4, 5, Get(Some(1))), call(6, 7, Get(Some(2)))];
        assert!(!is_right_with_eviction(&seen));
        assert!(!is_right_with_eviction(&in_turn(&[PutIfAbsent(1, false)])));
        let one = [call(0, 3, PutIfAbsent(1, true)), call(1, 2, PutIfAbsent(2, false))];
        assert!(is_right(&one));
    }

    #[test]
    fn a_swap_returns_a_value_that_was_present() {
        use When::{Always, IfAbsent, IfPresent};

        let swaps = in_turn(&[
            Swap(IfPresent, 1, None),
            Swap(Always, 2, None),
            Swap(IfAbsent, 3, Some(2)),
            Swap(IfPresent, 4, Some(2)),
            Swap(Always, 5, Some(4)),
            Delete(true),
            Swap(IfAbsent, 6, None),
            Get(Some(6)),
        ]);
        assert!(is_right(&swaps) && check(&swaps, true) == Ok(0));
        for when in [Always, IfAbsent, IfPresent] {
            // An older value, or none.
            let stale = in_turn(&[Put(1), Put(2), Swap(when, 3, Some(1))]);
            assert!(!is_right(&stale) && !is_right_with_eviction(&stale), "{when:?}");
            let lost = in_turn(&[Put(1), Swap(when, 2, None)]);
            assert!(!is_right(&lost), "{when:?}");
            assert_eq!(check(&lost, true), Ok(1), "it may have been evicted");
            assert!(!is_right_with_eviction(&in_turn(&[Swap(when, 2, Some(1))])), "never written");
        }
        // Written where it should not have been, and not written where it should.
        for (when, old, seen) in
            [(IfAbsent, Some(1), 2), (IfPresent, Some(1), 1), (Always, Some(1), 1)]
        {
            let wrong = in_turn(&[Put(1), Swap(when, 2, old), Get(Some(seen))]);
            assert!(!is_right(&wrong) && !is_right_with_eviction(&wrong), "{when:?}");
        }
        assert!(!is_right_with_eviction(&in_turn(&[Swap(IfPresent, 1, None), Get(Some(1))])));
        // Of two concurrent ones, one has replaced the other.
        let both = [call(0, 3, Swap(Always, 1, None)), call(1, 2, Swap(Always, 2, None))];
        assert!(!is_right(&both));
        let both = [call(0, 3, Swap(Always, 1, Some(2))), call(1, 2, Swap(Always, 2, None))];
        assert!(is_right(&both));
        let both = [call(0, 3, Swap(Always, 1, Some(2))), call(1, 2, Swap(Always, 2, Some(1)))];
        assert!(!is_right_with_eviction(&both));
    }

    #[test]
    fn a_removed_value_does_not_come_back() {
        let deleted = in_turn(&[Put(1), Delete(true), Get(Some(1))]);
        assert!(!is_right(&deleted) && !is_right_with_eviction(&deleted));
        let evicted = in_turn(&[Put(1), Get(None), Get(Some(1))]);
        assert!(!is_right_with_eviction(&evicted));
        assert!(!is_right_with_eviction(&in_turn(&[Put(1), Get(None), Contains(true)])));
        let twice = [call(0, 1, Put(1)), call(2, 5, Delete(true)), call(3, 4, Delete(true))];
        assert!(!is_right(&twice) && !is_right_with_eviction(&twice));
        assert!(!is_right_with_eviction(&in_turn(&[Get(Some(1))])), "never written");
    }

    #[test]
    fn a_record_is_absent_exactly_from_its_expiry() {
        let value = expiring(1, 5);
        let put = Put(value);
        let seen = in_turn(&[Time(3), put, Get(Some(value)), Time(4), Contains(true), Time(5)]);
        assert_eq!(check(&seen, false), Ok(0));
        let with = |answer| {
            let mut calls = seen.clone();
            calls.push(call(100, 101, answer));
            calls
        };
        assert_eq!(check(&with(Get(None)), true), Ok(0), "expiry is no eviction");
        assert!(is_right(&with(PutIfAbsent(2, true))) && is_right(&with(Delete(false))));
        for late in [Get(Some(value)), Contains(true), Delete(true), PutIfAbsent(2, false)] {
            assert!(!is_right(&with(late)) && !is_right_with_eviction(&with(late)), "{late:?}");
        }
        let early = in_turn(&[put, Time(4), Get(None)]);
        assert!(!is_right(&early));
        // It was replaced before: there was a value throughout.
        let replaced = in_turn(&[put, Put(2), Time(5), Get(None)]);
        assert!(!is_right(&replaced));
        // A concurrent read may come before or after.
        for answer in [Some(value), None] {
            let calls = [call(0, 1, put), call(2, 5, Time(5)), call(3, 4, Get(answer))];
            assert!(is_right(&calls), "{answer:?}");
        }
        let both = [
            call(0, 1, put),
            call(2, 9, Time(5)),
            call(3, 4, Get(None)),
            call(5, 6, Get(Some(value))),
        ];
        assert!(!is_right(&both) && !is_right_with_eviction(&both));
        // Written after its expiry.
        assert!(is_right(&in_turn(&[Time(7), put, Get(None)])));
    }

    #[test]
    fn a_key_removed_with_others_is_absent() {
        assert!(is_right(&in_turn(&[Remove, Put(1), Remove, Get(None), Put(2), Get(Some(2))])));
        let back = in_turn(&[Put(1), Remove, Get(Some(1))]);
        assert!(!is_right(&back) && !is_right_with_eviction(&back));
        // Before the concurrent write, or after it.
        for (seen, can_be) in [(None, true), (Some(2), true), (Some(1), false)] {
            let calls =
                [call(0, 1, Put(1)), call(2, 5, Remove), call(3, 4, Put(2)), call(6, 7, Get(seen))];
            assert_eq!(is_right(&calls), can_be, "{seen:?}");
        }
        // Not answered: removed or not, and then permanently.
        let (put, removed) = (call(0, 1, Put(1)), call(2, NEVER, Remove));
        for seen in [None, Some(1)] {
            assert!(is_right(&[put, removed, call(3, 4, Get(seen))]));
        }
        let back = [put, removed, call(3, 4, Get(None)), call(5, 6, Get(Some(1)))];
        assert!(!is_right(&back) && !is_right_with_eviction(&back));
    }

    #[test]
    fn a_call_without_an_answer_may_have_happened() {
        for answer in [Some(1), Some(2)] {
            let calls = [call(0, 1, Put(1)), call(2, NEVER, Put(2)), call(3, 4, Get(answer))];
            assert!(is_right(&calls));
        }
        let back_and_forth = [
            call(0, 1, Put(1)),
            call(2, NEVER, Put(2)),
            call(3, 4, Get(Some(2))),
            call(5, 6, Get(Some(1))),
        ];
        assert!(!is_right(&back_and_forth));
        let deleted = [call(0, 1, Put(1)), call(2, NEVER, Delete(false)), call(3, 4, Get(None))];
        assert!(is_right(&deleted));
        for when in [When::Always, When::IfPresent] {
            let swapped = call(2, NEVER, Swap(when, 2, None));
            assert!(is_right(&[call(0, 1, Put(1)), swapped, call(3, 4, Get(Some(2)))]));
        }
        let kept = call(2, NEVER, Swap(When::IfAbsent, 2, None));
        assert!(!is_right(&[call(0, 1, Put(1)), kept, call(3, 4, Get(Some(2)))]));
    }

    #[test]
    fn the_shortest_wrong_prefix_is_reported() {
        let mut answers = Vec::new();
        for value in 0..200 {
            answers.extend([Put(value), Get(Some(value)), Contains(true)]);
        }
        answers[301] = Get(Some(7));
        let message = check(&in_turn(&answers), false).unwrap_err();
        assert!(
            message.starts_with("of 302 calls the answer at moment 603 cannot be"),
            "{message}"
        );
        assert!(message.ends_with("602 to 603      Get(Some(7))"), "{message}");
    }

    /// Returns whether there is an order, by trying all of them.
    fn has_order(calls: &[Call], held: Held, may_evict: bool) -> bool {
        calls.is_empty()
            || (0..calls.len()).any(|next| {
                let mut rest = calls.to_vec();
                let first = rest.remove(next);
                rest.iter().all(|other| first.begun < other.ended)
                    && first
                        .answer
                        .after(held, may_evict)
                        .is_ok_and(|held| has_order(&rest, held, may_evict))
            })
    }

    #[test]
    fn the_checker_agrees_with_trying_all_orders() {
        let mut random = Random::new(1);
        let mut right = 0;
        for round in 0..5_000 {
            let mut moments: Vec<u64> = (0..12).collect();
            for at in 0..12 {
                // Mostly neighbours, so that some calls are sequential.
                let other = (at + random.index(4)).min(11);
                moments.swap(at, other);
            }
            let mut value = 0;
            let calls: Vec<_> = moments
                .chunks(2)
                .map(|pair| {
                    value += 1;
                    let seen = random.below(4);
                    let held = (seen > 0).then_some(seen);
                    let answer = match random.below(9) {
                        0 | 1 => Put(value),
                        2 => PutIfAbsent(value, random.chance(0.5)),
                        3 => Delete(random.chance(0.5)),
                        4 => Contains(random.chance(0.5)),
                        5 => {
                            let when = [When::Always, When::IfAbsent, When::IfPresent];
                            Swap(when[random.index(3)], value, held)
                        }
                        6 => Remove,
                        _ => Get(held),
                    };
                    call(pair[0].min(pair[1]), pair[0].max(pair[1]), answer)
                })
                .collect();
            for may_evict in [false, true] {
                let found = check(&calls, may_evict);
                assert_eq!(
                    found.is_ok(),
                    has_order(&calls, None, may_evict),
                    "round {round}: {calls:?}: {found:?}"
                );
                right += u64::from(found.is_ok());
            }
        }
        assert!((100..9_000).contains(&right), "{right}");
    }
}
