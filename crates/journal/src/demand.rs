//! Compaction of everything, when somebody asks for it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::place::{Granule, JournalNumber};
use crate::record::Record;
use crate::shared::{Shared, now_millis};

/// How far a [`crate::Cache::compact`] is, or has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// Sealed journals that were there when it began.
    pub journals: usize,
    /// Of these, journals that it has done with.
    pub done: usize,
    /// Of these, journals that had something in them that could go. What was alive is in newer ones.
    pub rewritten: usize,
    /// Of these, journals that stay because they are damaged.
    pub damaged: usize,
}

/// What a look at a journal has found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    AllAlive,
    SomethingDead,
    Damaged,
}

impl Shared {
    pub(crate) fn compact_all(&self, mut progress: impl FnMut(&Compacted)) -> Result<Compacted> {
        let unwritten = self.flush.oldest_unwritten();
        let mut numbers: Vec<_> = self.journals.all().iter().map(|it| it.number).collect();
        numbers.retain(|number| *number < unwritten);
        let mut compacted = Compacted { journals: numbers.len(), ..Compacted::default() };
        progress(&compacted);
        // The oldest first: with it go the reasons for tombstones in the others.
        for number in numbers {
            match self.compact_one(number)? {
                Look::AllAlive => {}
                Look::SomethingDead => compacted.rewritten += 1,
                Look::Damaged => compacted.damaged += 1,
            }
            compacted.done += 1;
            progress(&compacted);
        }
        Ok(compacted)
    }

    /// Look at a journal, if it is still there, and write it anew if something in it could go.
    fn compact_one(&self, number: JournalNumber) -> Result<Look> {
        // One journal at a time, so that the keeper can make room between two of them.
        let _turn = self.keep.turn.lock();
        let Some(journal) = self.journals.all().into_iter().find(|it| it.number == number) else {
            return Ok(Look::AllAlive); // evicted, or compacted by the keeper
        };
        let look = self.look_for_dead(&journal, self.oldest_but(number))?;
        if look != Look::SomethingDead || self.compact(&journal, Duration::ZERO)? {
            return Ok(look);
        }
        match journal.counts.is_damaged.load(Ordering::Relaxed) {
            true => Ok(Look::Damaged),
            false => Err(Error::DiskFull { max_bytes: self.options.max_disk_bytes }),
        }
    }

    /// By the records themselves: the counts of a journal are upper bounds.
    fn look_for_dead(
        &self,
        journal: &Journal,
        oldest_other: Option<JournalNumber>,
    ) -> Result<Look> {
        let end = journal.counts.end_bytes.load(Ordering::Acquire);
        let mut has_dead = false;
        let is_whole = self.each_record(journal, end, |first, record| {
            has_dead |= self.could_go(journal.number, oldest_other, first, record);
            Ok(())
        })?;
        Ok(match (is_whole, has_dead) {
            (false, _) => Look::Damaged,
            (true, false) => Look::AllAlive,
            (true, true) => Look::SomethingDead,
        })
    }

    /// Whether compaction would not write a record anew, or less of it.
    fn could_go(
        &self,
        number: JournalNumber,
        oldest_other: Option<JournalNumber>,
        first: Granule,
        record: &Record<'_>,
    ) -> bool {
        let hash = self.hasher.hash(record.key());
        let named = self.index.find(hash);
        if let Some(origin) = record.origin() {
            let hides_older = oldest_other.is_some_and(|oldest| oldest <= origin);
            return named.is_some() || !hides_older;
        }
        let place = record.place(number, first, hash);
        !named.is_some_and(|named| named.is_same(place)) || record.has_expired(now_millis)
    }
}
