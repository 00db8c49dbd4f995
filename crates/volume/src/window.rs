//! The window: which writes of an attachment a group has applied. It is replicated state, so that
//! every replica decides alike whether a write that is sent again is applied.
//! `docs/format/volume-wire.md` defines the numbers.

use crate::types::Sequence;

/// Numbers in a window, and so the greatest number of writes that a gateway may have outstanding in
/// a group.
pub const WINDOW_NUMBERS: u64 = 4096;

/// The bytes of a window's bits.
pub(crate) const WINDOW_BYTES: usize = WINDOW_NUMBERS as usize / 8;

/// What is to be done with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// It is applied, and its number is taken.
    Apply,
    /// It was applied before, or given up by the gateway: it is answered and not applied.
    Repeated,
    /// Its number is too far above the floor. The bounds of an op exclude it.
    OutOfWindow,
}

/// The numbers of an attachment's writes that were applied, at or above a floor. Numbers begin at
/// 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    floor: Sequence,
    /// Bit `n mod 4,096` stands for number n, where `floor <= n < floor + 4,096`.
    bits: Box<[u8; WINDOW_BYTES]>,
}

impl Default for Window {
    fn default() -> Self {
        Self { floor: Sequence(1), bits: Box::new([0; WINDOW_BYTES]) }
    }
}

impl Window {
    pub(crate) fn new(floor: Sequence, bits: Box<[u8; WINDOW_BYTES]>) -> Self {
        Self { floor, bits }
    }

    /// All numbers below it are settled.
    pub fn floor(&self) -> Sequence {
        self.floor
    }

    pub(crate) fn bits(&self) -> &[u8; WINDOW_BYTES] {
        &self.bits
    }

    /// Decides about the write `number`, which states that all numbers below `floor` are settled.
    ///
    /// The floor is raised before the number is tested. In the opposite order, a number 4,096 above
    /// one that the old floor still covers would meet that one's bit, and a new write would be
    /// answered and lost.
    pub fn write(&mut self, number: Sequence, floor: Sequence) -> Write {
        self.raise_floor(floor);
        if number < self.floor {
            return Write::Repeated;
        }
        if number.0 - self.floor.0 >= WINDOW_NUMBERS {
            return Write::OutOfWindow;
        }
        let (byte, bit) = position(number);
        let is_set = self.bits[byte] & bit != 0;
        self.bits[byte] |= bit;
        if is_set { Write::Repeated } else { Write::Apply }
    }

    fn raise_floor(&mut self, floor: Sequence) {
        let steps = floor.0.saturating_sub(self.floor.0);
        if steps >= WINDOW_NUMBERS {
            self.bits.fill(0);
        } else {
            for number in self.floor.0..self.floor.0 + steps {
                let (byte, bit) = position(Sequence(number));
                self.bits[byte] &= !bit;
            }
        }
        self.floor = self.floor.max(floor);
    }
}

/// The byte and the bit of a number.
fn position(number: Sequence) -> (usize, u8) {
    let n = (number.0 % WINDOW_NUMBERS) as usize;
    (n / 8, 1 << (n % 8))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Numbers that were applied, without a bound.
    struct Model {
        applied: HashSet<u64>,
        floor: u64,
    }

    impl Model {
        fn write(&mut self, number: u64, floor: u64) -> Write {
            self.floor = self.floor.max(floor);
            if number < self.floor {
                Write::Repeated
            } else if number >= self.floor + WINDOW_NUMBERS {
                Write::OutOfWindow
            } else if self.applied.insert(number) {
                Write::Apply
            } else {
                Write::Repeated
            }
        }
    }

    proptest! {
        /// The steps move the floor by little, by about a window, and by far more.
        #[test]
        fn a_window_decides_as_a_set_without_a_bound(
            steps in prop::collection::vec(
                (0..9000_u64, prop_oneof![0..3_u64, 4090..4100_u64, 0..20_000_u64], 0..4_u8),
                1..200,
            ),
        ) {
            let mut window = Window::default();
            let mut model = Model { applied: HashSet::new(), floor: 1 };
            let mut floor = 1;
            for (number, raise, dice) in steps {
                if dice == 0 {
                    floor += raise;
                }
                // Numbers around the floor, some below it and some beyond the window.
                let number = (floor + number).saturating_sub(4000);
                let stated = floor.saturating_sub(u64::from(dice == 1) * 10);
                prop_assert_eq!(
                    window.write(Sequence(number), Sequence(stated)),
                    model.write(number, stated)
                );
                prop_assert_eq!(window.floor().0, model.floor);
            }
        }
    }

    #[test]
    fn a_number_a_window_above_an_old_one_is_applied_when_the_floor_has_passed_it() {
        let mut window = Window::default();
        assert_eq!(window.write(Sequence(7), Sequence(0)), Write::Apply);
        assert_eq!(window.write(Sequence(7 + WINDOW_NUMBERS), Sequence(0)), Write::OutOfWindow);
        assert_eq!(window.write(Sequence(7 + WINDOW_NUMBERS), Sequence(8)), Write::Apply);
        assert_eq!(window.write(Sequence(7), Sequence(0)), Write::Repeated);
        assert_eq!(window.write(Sequence(u64::MAX), Sequence(u64::MAX)), Write::Apply);
    }
}
