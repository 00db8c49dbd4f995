//! Compaction of everything, when somebody asks for it.

use std::time::Duration;

use crate::compact::Compaction;
use crate::error::{Result, Stopped};
use crate::journal::Journal;
use crate::options::Compression;
use crate::place::JournalNumber;
use crate::prepare::LOOK_AGAIN;
use crate::shared::Shared;
use crate::sync::Arc;
use crate::unreadable::is_unreadable;

/// How far a [`crate::Cache::compact`] is, or has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// Sealed journals that were there when it began.
    pub journals: usize,
    /// Of these, journals that it has done with.
    pub done: usize,
    /// Of these, journals that had something in them that could go. What was alive is in newer
    /// ones, plain at first if it was compressed. (Without [`crate::Compression`] it would stay
    /// plain: then a journal is left as it is where that would take more room.)
    pub rewritten: usize,
    /// Of these, journals that stay because they are damaged, or the disk cannot read all of them.
    pub damaged: usize,
}

/// What became of a journal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Done {
    /// Nothing would be gained.
    Stays,
    Rewritten,
    Damaged,
}

impl Shared {
    pub(crate) fn compact_all(&self, mut progress: impl FnMut(&Compacted)) -> Result<Compacted> {
        let unwritten = self.flush.oldest_unwritten();
        let mut numbers = self.journals.numbers_from(JournalNumber(0));
        numbers.retain(|number| *number < unwritten);
        let mut compacted = Compacted { journals: numbers.len(), ..Compacted::default() };
        progress(&compacted);
        while !numbers.is_empty() {
            let done_before = compacted.done;
            let mut without_room = Vec::new();
            // The oldest first: with it go the reasons for tombstones in the others.
            for number in numbers {
                match self.compact_one(number) {
                    Ok(Some(Done::Stays)) => {}
                    Ok(Some(Done::Rewritten)) => compacted.rewritten += 1,
                    Ok(Some(Done::Damaged)) => compacted.damaged += 1,
                    Err(Stopped::Failed(error)) => return Err(error),
                    // Whoever closes a cache has it for himself, so this is nobody's answer.
                    Err(Stopped::Closing) => return Ok(compacted),
                    Ok(None) => {
                        without_room.push(number);
                        continue;
                    }
                }
                compacted.done += 1;
                progress(&compacted);
            }
            // Others may have left room for these.
            numbers = without_room;
            if !numbers.is_empty() && compacted.done == done_before {
                self.wait_for_eviction()?;
            }
        }
        Ok(compacted)
    }

    /// Look at a journal, if it is still there, and write it anew if something in it could go;
    /// `None` if there is no room for that.
    fn compact_one(&self, number: JournalNumber) -> std::result::Result<Option<Done>, Stopped> {
        // One journal at a time, so that the keeper can make room between two of them.
        let _turn = self.keep.turn.lock();
        let Some(journal) = self.journals.get(number) else {
            return Ok(Some(Done::Stays)); // evicted, or compacted by the keeper
        };
        let _busy = journal.busy();
        match self.compact_if_worth(journal) {
            // It may hide older records, as other damage may; those behind it can be compacted.
            Err(Stopped::Failed(error)) if is_unreadable(&error) => {
                tracing::warn!("journal cache: {error}; the journal stays as it is");
                Ok(Some(Done::Damaged))
            }
            done => done,
        }
    }

    fn compact_if_worth(
        &self,
        journal: Arc<Journal>,
    ) -> std::result::Result<Option<Done>, Stopped> {
        let look = self.look(&journal, Duration::ZERO)?;
        let is_for_good = self.options.compression == Compression::None && journal.frames.is_some();
        let would_grow = is_for_good && look.alive_bytes as u64 >= journal.file_bytes;
        if !look.is_damaged && (!look.has_dead || would_grow) {
            return Ok(Some(Done::Stays));
        }
        Ok(match self.compact(journal, &look, Duration::ZERO)? {
            Compaction::Done => Some(Done::Rewritten),
            Compaction::Damaged => Some(Done::Damaged),
            Compaction::NoRoom => None,
        })
    }

    /// Until eviction has made some room, or soon.
    ///
    /// # Errors
    /// There is nothing that it may remove, or it fails.
    fn wait_for_eviction(&self) -> Result<()> {
        let mut state = self.flush.state.lock();
        if let Some(error) = self.flush.failure() {
            return Err(error);
        }
        if !self.has_evictable(&state) {
            return Err(self.disk_full());
        }
        self.keep.waker.wake();
        self.flush.changed.wait_for(&mut state, LOOK_AGAIN);
        drop(state);
        // It tries again, but may fail for ever.
        self.keep.failure.lock().clone().map_or(Ok(()), Err)
    }
}
