//! The numbers of an attachment's ops in a group. `docs/format/volume-wire.md`, section 6, "Epoch
//! and window".

use std::collections::{BTreeMap, VecDeque};

use super::types::UserId;
use crate::types::Sequence;
use crate::window::WINDOW_NUMBERS;

/// The numbers from the floor on. The floor is the lowest number that is not completed; a number is
/// completed when its op was answered with success or its error was reported.
#[derive(Debug)]
pub(super) struct Numbers {
    floor: u64,
    /// Whether each number from the floor on is completed. The first one is not.
    completed: VecDeque<bool>,
    /// Failed ops whose number the floor has not passed, with their requests, whose ranges stay
    /// locked.
    failed: BTreeMap<Sequence, UserId>,
}

impl Default for Numbers {
    fn default() -> Self {
        Self { floor: 1, completed: VecDeque::new(), failed: BTreeMap::new() }
    }
}

impl Numbers {
    /// The number of the next op; `None` while the next number would be 4,096 above the floor.
    pub(super) fn allocate(&mut self) -> Option<Sequence> {
        if self.completed.len() as u64 >= WINDOW_NUMBERS {
            return None;
        }
        self.completed.push_back(false);
        Some(Sequence(self.floor + self.completed.len() as u64 - 1))
    }

    /// The lowest number that is not completed.
    pub(super) fn floor(&self) -> Sequence {
        Sequence(self.floor)
    }

    /// Records that the number's op was answered with success.
    pub(super) fn complete(&mut self, number: Sequence) {
        self.completed[(number.0 - self.floor) as usize] = true;
        while self.completed.front() == Some(&true) {
            self.completed.pop_front();
            self.floor += 1;
        }
    }

    /// Records that the error of the number's op is reported. `request` stays locked until
    /// [`Numbers::next_passed`] returns it.
    pub(super) fn fail(&mut self, number: Sequence, request: UserId) {
        self.failed.insert(number, request);
        self.complete(number);
    }

    /// Removes a failed op whose number the floor has passed, and returns its request. No later op
    /// of this group can be overwritten by a late copy of it.
    pub(super) fn next_passed(&mut self) -> Option<UserId> {
        let entry = self.failed.first_entry()?;
        (entry.key().0 < self.floor).then(|| entry.remove())
    }

    /// The number of numbers from the floor on that were given to ops.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.completed.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_lowest_number_that_is_not_completed() {
        let mut numbers = Numbers::default();
        let given: Vec<_> = (0..4).map(|_| numbers.allocate().unwrap().0).collect();
        assert_eq!(given, [1, 2, 3, 4]);
        numbers.complete(Sequence(2));
        assert_eq!(numbers.floor(), Sequence(1));
        numbers.complete(Sequence(1));
        assert_eq!(numbers.floor(), Sequence(3));
    }

    #[test]
    fn a_failed_op_keeps_its_range_until_the_floor_has_passed_it() {
        let mut numbers = Numbers::default();
        (0..3).for_each(|_| assert!(numbers.allocate().is_some()));
        numbers.fail(Sequence(2), UserId(77));
        assert_eq!(numbers.next_passed(), None, "the first number is below it");
        numbers.complete(Sequence(1));
        assert_eq!(numbers.next_passed(), Some(UserId(77)));
        assert_eq!(numbers.next_passed(), None);
        numbers.fail(Sequence(3), UserId(78));
        assert_eq!(numbers.next_passed(), Some(UserId(78)));
    }

    #[test]
    fn at_most_a_window_of_numbers_is_given_above_the_floor() {
        let mut numbers = Numbers::default();
        (0..WINDOW_NUMBERS).for_each(|_| assert!(numbers.allocate().is_some()));
        assert_eq!(numbers.allocate(), None);
        (2..=WINDOW_NUMBERS).for_each(|number| numbers.complete(Sequence(number)));
        assert_eq!(numbers.allocate(), None, "the first one is not completed");
        numbers.complete(Sequence(1));
        assert_eq!(numbers.allocate(), Some(Sequence(WINDOW_NUMBERS + 1)));
        assert_eq!(numbers.len(), 1);
    }
}
