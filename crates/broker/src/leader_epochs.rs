//! The leader epochs of a partition, as Kafka's `LeaderEpochFileCache` has them (KIP-101, KIP-320).
//! They are derived from the partition's batches, which carry the epochs of their leaders, and from
//! the epoch of the current leader.
//!
//! There is one leader, so an epoch begins only with an opening that may have lost records. An
//! earlier epoch ends where its last batch ends. A consumer that has read lost records is beyond
//! that, asks for the end of the epoch in which it has read, and learns of the loss.

use crate::batch::NO_LEADER_EPOCH;

/// The first epoch, which begins with the partition.
const FIRST: i32 = 0;
/// The greatest number of epochs that are remembered. Beyond it the oldest are forgotten; their
/// records then count as those of the first epoch.
pub(crate) const MOST_EPOCHS: usize = 64;

/// An epoch, and the offset at which the batches before it end.
pub(crate) type Begun = (i32, u64);

/// The leader epochs of a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeaderEpochs {
    /// Both epochs and offsets ascend. Without the first epoch.
    begun: Vec<Begun>,
    /// The end of the last batch. `None`: no lost offsets follow it, so it is the end of
    /// what this describes.
    batches_end: Option<u64>,
}

impl LeaderEpochs {
    /// Creates the state from its [parts](Self::parts).
    pub(crate) fn new(begun: Vec<Begun>, batches_end: Option<u64>) -> Self {
        Self { begun, batches_end }
    }

    /// Returns the epochs after the first one, and the end of the last batch if that is not `to`,
    /// the end of what this describes.
    pub(crate) fn parts(&self, to: u64) -> (&[Begun], Option<u64>) {
        (&self.begun, self.batches_end.filter(|end| *end != to))
    }

    /// Sets the end of what was described until now. Called before [`Self::appended`].
    pub(crate) fn continue_from(&mut self, from: u64) {
        self.batches_end.get_or_insert(from);
    }

    /// Records a batch. One with epoch -1 is ignored: no leader has appended it.
    pub(crate) fn appended(&mut self, epoch: i32, end: u64) {
        if epoch < FIRST {
            return;
        }
        self.begin(epoch);
        self.batches_end = Some(end);
    }

    /// Begins an epoch after the last batch, unless it is not newer than the newest one.
    pub(crate) fn begin(&mut self, epoch: i32) {
        if epoch <= self.newest() {
            return;
        }
        let start = self.batches_end.expect("the end was set before");
        // An epoch without batches is forgotten.
        self.begun.retain(|(_, begun)| *begun < start);
        self.begun.push((epoch, start));
        let excess = self.begun.len().saturating_sub(MOST_EPOCHS);
        self.begun.drain(..excess);
    }

    /// Returns the newest epoch.
    pub(crate) fn newest(&self) -> i32 {
        self.begun.last().map_or(FIRST, |(epoch, _)| *epoch)
    }

    /// Returns the greatest epoch that is at most `epoch`, with its end, or `Some((epoch, None))`
    /// for the newest one, which has not ended; `None` if `epoch` has not begun or is negative.
    /// Kafka's `LeaderEpochFileCache.endOffsetFor`.
    pub(crate) fn end_of(&self, epoch: i32) -> Option<(i32, Option<u64>)> {
        if !(FIRST..=self.newest()).contains(&epoch) {
            return None;
        }
        let after = self.begun.partition_point(|(begun, _)| *begun <= epoch);
        let found = after.checked_sub(1).map_or(FIRST, |at| self.begun[at].0);
        Some((found, self.begun.get(after).map(|(_, start)| *start)))
    }

    /// Returns the epoch of the batch at an offset, or of the next one after it. -1 if that is an
    /// epoch without batches: it would be forgotten if no batch follows before the next epoch
    /// begins, and its end would then be below the offset, although nothing there was lost.
    pub(crate) fn at(&self, offset: u64) -> i32 {
        let after = self.begun.partition_point(|(_, start)| *start <= offset);
        match after.checked_sub(1).map(|at| self.begun[at]) {
            None => FIRST,
            Some((_, start)) if self.batches_end == Some(start) => NO_LEADER_EPOCH,
            Some((epoch, _)) => epoch,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches up to 10 in epoch 0, lost offsets, 20 to 30 in epoch 2, and none yet in epoch 3.
    fn epochs() -> LeaderEpochs {
        let mut epochs = LeaderEpochs::default();
        epochs.continue_from(0);
        epochs.appended(0, 10);
        epochs.begin(1);
        epochs.begin(2);
        epochs.appended(2, 30);
        epochs.begin(3);
        epochs
    }

    #[test]
    fn an_epoch_ends_where_its_last_batch_ends() {
        let epochs = epochs();
        for (asked, answer) in [
            (0, Some((0, Some(10)))),
            (1, Some((0, Some(10)))),
            (2, Some((2, Some(30)))),
            (3, Some((3, None))),
            (4, None),
            (-1, None),
        ] {
            assert_eq!(epochs.end_of(asked), answer, "epoch {asked}");
        }
        for (offset, epoch) in [(0, 0), (9, 0), (10, 2), (25, 2), (30, -1), (1 << 40, -1)] {
            assert_eq!(epochs.at(offset), epoch, "offset {offset}");
        }
        let mut epochs = epochs;
        epochs.appended(3, 50);
        assert_eq!((epochs.at(30), epochs.at(1 << 40)), (3, 3));
        let untouched = LeaderEpochs::default();
        assert_eq!((untouched.end_of(0), untouched.at(7)), (Some((0, None)), 0));
    }

    #[test]
    fn a_batch_without_an_epoch_changes_nothing() {
        let mut epochs = epochs();
        let before = epochs.clone();
        epochs.appended(-1, 40);
        assert_eq!(epochs, before);
        // A batch of an epoch that has begun, and one that comes from an earlier leader.
        epochs.appended(3, 50);
        epochs.appended(2, 60);
        assert_eq!(epochs.end_of(2), Some((2, Some(30))));
        assert_eq!(epochs.newest(), 3);
    }

    #[test]
    fn only_lost_offsets_at_the_end_are_stored_beside_the_epochs() {
        let mut epochs = LeaderEpochs::default();
        epochs.continue_from(5);
        assert_eq!(epochs.parts(5), (&[][..], None));
        epochs.appended(0, 10);
        assert_eq!(epochs.parts(10), (&[][..], None));
        assert_eq!(epochs.parts(20), (&[][..], Some(10)));
        let mut read = LeaderEpochs::new(Vec::new(), Some(10));
        read.continue_from(20);
        read.appended(1, 30);
        assert_eq!(read.end_of(0), Some((0, Some(10))));
        assert_eq!(read.parts(30), (&[(1, 10)][..], None));
    }

    #[test]
    fn the_oldest_epochs_are_forgotten() {
        let mut epochs = LeaderEpochs::default();
        epochs.continue_from(0);
        for epoch in 1..=MOST_EPOCHS as i32 + 2 {
            epochs.appended(epoch, epoch as u64 * 10);
        }
        assert_eq!(epochs.begun.len(), MOST_EPOCHS);
        assert_eq!(epochs.end_of(1), Some((0, Some(20))));
        assert_eq!(epochs.end_of(3), Some((3, Some(30))));
    }
}
