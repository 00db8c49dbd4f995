//! Detection of expired records when space is needed. Nothing deletes them when they expire, and
//! the index knows only that they will; the time is in their journal.

use std::sync::atomic::Ordering;

use crate::compact::{PARTS, tombstone_bytes};
use crate::disk_budget::WriteClass;
use crate::error::Stopped;
use crate::journal::{FIRST_RECORD, Journal};
use crate::options::WhenFull;
use crate::shared::Shared;
use crate::sync::Arc;

/// Nothing is left that will expire.
const NEVER: u64 = u64::MAX;

impl Shared {
    /// Determines how much has expired in one of the journals whose removal may depend on it;
    /// returns whether there was one. [`Self::least_live`] counts the result as dead.
    ///
    /// A journal is scanned again when another sixteenth of it will have expired, or when so much
    /// of what will expire was replaced or removed that the result is wrong by as much; so each is
    /// read a few times at most.
    pub(crate) fn scan_for_expired(&self) -> bool {
        let has_time = match self.options.when_full {
            // If writers wait already, eviction is faster.
            WhenFull::Evict => {
                self.journals.budget.permits(1 + self.headroom(WriteClass::Put))
                    && !self.flush.is_short()
            }
            WhenFull::Refuse => true,
        };
        if !self.is_crowded() || !has_time {
            return false;
        }
        let Some(journal) = self.expiry_candidate() else { return false };
        let _busy = journal.busy();
        match self.count_expired(&journal) {
            Ok(()) => true,
            Err(Stopped::Closing) => false,
            Err(Stopped::Failed(error)) => {
                tracing::warn!("journal cache: {error}");
                journal.counts.failed();
                true
            }
        }
    }

    /// Returns the journal with the most expiring bytes, of those worth compacting if all of these
    /// had expired.
    fn expiry_candidate(&self) -> Option<Arc<Journal>> {
        let (now, most_live) = (self.clock.now_millis(), self.most_live_parts());
        let unwritten = self.flush.oldest_unwritten();
        let expiring = |it: &Journal| it.counts.expiring_bytes.load(Ordering::Relaxed);
        let may_go = |journal: &Arc<Journal>| {
            let counts = &journal.counts;
            let live = counts.live_bytes.load(Ordering::Relaxed);
            let at_least = live.saturating_sub(expiring(journal));
            journal.number < unwritten
                && expiring(journal) > 0
                && counts.is_sound()
                && (counts.next_scan_millis.load(Ordering::Relaxed) <= now
                    || counts.doubtful_bytes() >= part_bytes(journal))
                && at_least * PARTS <= most_live * gained_bytes(journal)
        };
        let all = self.journals.all().into_iter().filter(may_go);
        all.max_by_key(|journal| expiring(journal))
    }

    fn count_expired(&self, journal: &Journal) -> Result<(), Stopped> {
        let now = self.clock.now_millis();
        let counts = &journal.counts;
        // Records removed meanwhile may or may not be counted.
        let expiring_then = counts.expiring_bytes.load(Ordering::Relaxed);
        let number = journal.number;
        let is_oldest = self.journals.oldest_but(number).is_none_or(|other| number < other);
        let mut expired_bytes = 0;
        // Bytes that will expire, by the power of two of the remaining milliseconds.
        let mut later_bytes = [0u64; u64::BITS as usize];
        let step_bytes = || self.step_bytes();
        let damaged_bytes = self.each_record(journal, step_bytes, |first, record| {
            if self.maintenance.waker.is_closing() {
                return Err(Stopped::Closing);
            }
            let Some(expires_at) = record.expires_at() else { return Ok(()) };
            let hash = self.hasher.hash(record.key());
            let position = record.position(number, first, hash);
            if !self.index.find(hash).is_some_and(|named| named.is_same(position)) {
                return Ok(());
            }
            // An older record may exist that it hides.
            let kept = if is_oldest { 0 } else { tombstone_bytes(record.key()) };
            let bytes = position.max_len_bytes().saturating_sub(kept) as u64;
            match expires_at.saturating_sub(now).checked_ilog2() {
                None => expired_bytes += bytes,
                Some(power) => later_bytes[power as usize] += bytes,
            }
            Ok(())
        })?;
        self.mark_damaged(journal, damaged_bytes);
        let mut sum = 0u64;
        let enough = later_bytes.iter().position(|bytes| {
            sum += bytes;
            sum >= part_bytes(journal)
        });
        // A remaining time in class n is less than 2^(n+1) milliseconds.
        let next_scan =
            enough.map_or(NEVER, |power| now.saturating_add(2u64.saturating_pow(power as u32 + 1)));
        counts.found_expired(expired_bytes, expiring_then, next_scan);
        Ok(())
    }
}

/// Returns the size of one of its [`PARTS`].
fn part_bytes(journal: &Journal) -> u64 {
    (gained_bytes(journal) / PARTS).max(1)
}

/// Returns what removing the journal would free.
fn gained_bytes(journal: &Journal) -> u64 {
    let plain_bytes = journal.end().saturating_sub(FIRST_RECORD) as u64;
    match journal.frames {
        Some(_) => plain_bytes.min(journal.file_bytes),
        None => plain_bytes,
    }
}
