//! Numbers that are given out once, also after the metadata was restored from a backup.
//!
//! A backup lacks the numbers that were given out after it. So each restore begins a new range: the
//! count of restores is in the high bits.

use alluvium_coordination::keys::NumberKind;
use alluvium_coordination::{Change, Guard};

use super::{Registry, RegistryError, Result, encode, unchanged};
use crate::AttachEpoch;

/// Bits below the count of restores, of numbers with 32 bits: 255 restores, of 16 million numbers
/// each.
const NARROW_RANGE_BITS: u32 = 24;
/// Bits below the count of restores, of numbers with 62 bits.
const WIDE_RANGE_BITS: u32 = 40;

/// Numbers that a transaction takes.
pub(super) struct Drawn {
    /// The first of them.
    pub(super) first: u64,
    /// What guards that nothing else takes them, and what takes them.
    pub(super) guard: Guard,
    pub(super) change: Change,
}

/// Returns the first number at or above `next` in the range of the last restore, if `count` numbers
/// are left there.
fn in_range(next: u64, count: u64, restores: u32, range_bits: u32, bits: u32) -> Option<u64> {
    let restores = u64::from(restores);
    if restores >= 1 << (bits - range_bits) {
        return None;
    }
    // 0 is no number.
    let first = next.max(restores << range_bits).max(1);
    let end = (restores + 1) << range_bits;
    first.checked_add(count).filter(|after| *after <= end).map(|_| first)
}

impl Registry<'_> {
    /// Plans to take the next `count` numbers of a kind.
    pub(super) async fn draw(&self, kind: NumberKind, count: u64) -> Result<Drawn> {
        let (range_bits, bits, name) = match kind {
            NumberKind::Server => (NARROW_RANGE_BITS, 32, "servers"),
            NumberKind::Volume => (NARROW_RANGE_BITS, 32, "volumes"),
            NumberKind::Group => (WIDE_RANGE_BITS, 62, "groups"),
            NumberKind::Peer => (WIDE_RANGE_BITS, 62, "peers"),
        };
        let key = self.keys.next(kind);
        let stored = self.read::<u64>(&key).await?;
        let restores = self.service.identity().await?.restores;
        let next = stored.as_ref().map_or(1, |stored| stored.value);
        let first = in_range(next, count, restores, range_bits, bits)
            .ok_or(RegistryError::NumbersUsedUp(name))?;
        let guard = unchanged(&key, stored.as_ref());
        Ok(Drawn { first, guard, change: Change::put(key, encode(&(first + count))) })
    }

    /// Returns the epoch that follows `last`.
    pub(super) async fn next_epoch(&self, last: AttachEpoch) -> Result<AttachEpoch> {
        let restores = self.service.identity().await?.restores;
        in_range(last.0.saturating_add(1), 1, restores, WIDE_RANGE_BITS, 62)
            .map(AttachEpoch)
            .ok_or(RegistryError::NumbersUsedUp("attachments"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_restore_has_a_range_of_its_own() {
        assert_eq!(in_range(1, 3, 0, 24, 32), Some(1));
        assert_eq!(in_range(0, 1, 0, 24, 32), Some(1));
        assert_eq!(in_range(7, 3, 1, 24, 32), Some(1 << 24));
        assert_eq!(in_range((1 << 24) + 7, 3, 1, 24, 32), Some((1 << 24) + 7));
        // Numbers above the range would be in that of the next restore.
        assert_eq!(in_range((1 << 24) - 3, 3, 0, 24, 32), Some((1 << 24) - 3));
        assert_eq!(in_range((1 << 24) - 2, 3, 0, 24, 32), None);
        assert_eq!(in_range(1, 1, 255, 24, 32), Some(255 << 24));
        assert_eq!(in_range(1, 1, 256, 24, 32), None);
        assert_eq!(in_range(1, 1, (1 << 22) - 1, 40, 62), Some(((1 << 22) - 1) << 40));
        assert_eq!(in_range(1, 1, 1 << 22, 40, 62), None);
    }
}
