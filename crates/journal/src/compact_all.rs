//! Compaction of all journals on demand.

use std::time::Duration;

use crate::allocator::RECHECK_AFTER;
use crate::compact::Compaction;
use crate::error::{Result, Stopped};
use crate::journal::Journal;
use crate::options::Compression;
use crate::position::JournalNumber;
use crate::shared::Shared;
use crate::sync::Arc;
use crate::unreadable::is_unreadable;

/// The progress, or the result, of a [`crate::Cache::compact`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// Number of sealed journals when it began.
    pub journals: usize,
    /// Number of these that it has processed.
    pub done: usize,
    /// Number of these that had something to remove. Their live records are in newer journals,
    /// which are plain at first. (With [`crate::Compression::None`] they would stay plain, so a
    /// compressed journal is left as it is where that would take more space.)
    pub rewritten: usize,
    /// Number of these that stay because they are damaged or partly unreadable.
    pub damaged: usize,
}

/// The outcome for one journal.
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
            let mut deferred = Vec::new();
            // Oldest first: removing it makes tombstones in the others unnecessary.
            for number in numbers {
                match self.compact_one(number) {
                    Ok(Some(Done::Stays)) => {}
                    Ok(Some(Done::Rewritten)) => compacted.rewritten += 1,
                    Ok(Some(Done::Damaged)) => compacted.damaged += 1,
                    Err(Stopped::Failed(error)) => return Err(error),
                    // `close` takes the cache by value, so there is no caller that would see this.
                    Err(Stopped::Closing) => return Ok(compacted),
                    Ok(None) => {
                        deferred.push(number);
                        continue;
                    }
                }
                compacted.done += 1;
                progress(&compacted);
            }
            // Other compactions may have made space for these.
            numbers = deferred;
            if !numbers.is_empty() && compacted.done == done_before {
                self.wait_for_eviction()?;
            }
        }
        Ok(compacted)
    }

    /// Compacts a journal, if it still exists and contains something to remove; `None` if there is
    /// no space for that.
    fn compact_one(&self, number: JournalNumber) -> std::result::Result<Option<Done>, Stopped> {
        // One journal at a time, so that the maintenance thread can reclaim space in between.
        let _exclusive = self.maintenance.exclusive.lock();
        let Some(journal) = self.journals.get(number) else {
            return Ok(Some(Done::Stays)); // evicted, or compacted by the maintenance thread
        };
        let _busy = journal.busy();
        match self.compact_if_worth(journal) {
            // The journal may hide older records, like other damage; the ones after it can be
            // compacted.
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
        let scan = self.scan_live(&journal, Duration::ZERO)?;
        let is_for_good = self.options.compression == Compression::None && journal.frames.is_some();
        let would_grow = is_for_good && scan.alive_bytes as u64 >= journal.file_bytes;
        if !scan.is_damaged && (!scan.has_dead || would_grow) {
            return Ok(Some(Done::Stays));
        }
        Ok(match self.compact(journal, &scan, Duration::ZERO)? {
            Compaction::Done => Some(Done::Rewritten),
            Compaction::Damaged => Some(Done::Damaged),
            Compaction::NoSpace => None,
        })
    }

    /// Waits until eviction has made space, or for a short time.
    ///
    /// # Errors
    /// Nothing may be evicted, or eviction fails.
    fn wait_for_eviction(&self) -> Result<()> {
        let mut state = self.flush.state.lock();
        if let Some(error) = self.flush.failure() {
            return Err(error);
        }
        if !self.has_evictable(&state) {
            return Err(self.disk_full());
        }
        self.maintenance.waker.wake();
        self.flush.changed.wait_for(&mut state, RECHECK_AFTER);
        drop(state);
        // Eviction is retried, but may keep failing.
        self.maintenance.failure.lock().clone().map_or(Ok(()), Err)
    }
}
