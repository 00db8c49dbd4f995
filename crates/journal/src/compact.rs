//! Compaction: a journal with few live records is rewritten and removed. Which records may
//! disappear without a tombstone: `docs/format/journal.md`, section 7.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use alluvium_device::GRANULE_BYTES;

use crate::disk_budget::WriteClass;
use crate::error::{Error, Stopped};
use crate::hash::KeyHash;
use crate::journal::{FIRST_RECORD, Journal};
use crate::options::WhenFull;
use crate::position::{Granule, JournalNumber, MAX_SPAN, Position};
use crate::record::{Content, NewRecord, Record};
use crate::shared::{Appended, CHUNK_BYTES, NotAppended, Shared};
use crate::sync::Arc;

/// A journal this far behind the newest one is moved, however much of it is live: long before its
/// number and a new one could be confused.
const FAR_BEHIND: u64 = MAX_SPAN / 2;
/// The number of journals truncated by a close above which they are merged.
const MANY_SHORT: usize = 8;
/// Background tasks read this many bytes and then pause: a concurrent read waits for one such step
/// at most. (Compared with no background work, the p99 of disk reads was 2.7 times as high with
/// steps of a MiB and proportional pauses, and 2.4 times with steps of 128 KiB.)
pub(crate) const STEP_BYTES: usize = 32 << 10;
/// The length of a pause: writers and readers have priority.
pub(crate) const PAUSE: Duration = Duration::from_micros(250);
/// A long record counts as at most this many steps.
const MOST_STEPS: usize = CHUNK_BYTES / STEP_BYTES;
/// The live part of a journal is measured in parts of this many.
pub(crate) const PARTS: u64 = 16;

/// The outcome of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compaction {
    /// The journal was removed.
    Done,
    /// The journal stays: what cannot be read of it may hide older records in other journals.
    Damaged,
    /// The journal stays for now: there is no space for its live records.
    NoSpace,
}

/// What compaction would find in a journal.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LiveScan {
    /// Upper bound of what it would rewrite.
    pub(crate) alive_bytes: usize,
    /// Whether there is anything else.
    pub(crate) has_dead: bool,
    pub(crate) is_damaged: bool,
}

impl LiveScan {
    /// Returns the counts of the journal, which are upper bounds, without reading it. They may not
    /// include damage yet.
    pub(crate) fn by_counts(journal: &Journal) -> Self {
        let counts = &journal.counts;
        let alive_bytes = counts.live_bytes.load(Ordering::Relaxed)
            + counts.tombstone_bytes.load(Ordering::Relaxed);
        let is_damaged = counts.is_damaged.load(Ordering::Relaxed)
            && counts.lost_bytes.load(Ordering::Relaxed) == 0;
        Self { alive_bytes: alive_bytes as usize, has_dead: true, is_damaged }
    }
}

/// What compaction does with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Drop it: there is a newer record of the key, or it is a tombstone that hides nothing.
    Drop,
    /// Remove its key from the index: it has expired, and no older record can exist.
    Expire,
    /// Write a tombstone, since an older record may exist: the record has expired, or is a
    /// tombstone itself.
    Tombstone(JournalNumber),
    Move,
}

impl Shared {
    /// Returns the journal with the smallest live part, if that is small enough to be worth
    /// rewriting, and the maximum of live bytes for which it is.
    pub(crate) fn least_live(&self) -> Option<(Arc<Journal>, usize)> {
        let most_live = self.most_live_parts();
        let unwritten = self.flush.oldest_unwritten();
        let mut sealed = self.journals.all();
        if let Some(oldest) = sealed.first()
            && self.is_far_behind(oldest)
            && oldest.number < unwritten
            && !oldest.counts.has_just_failed()
            && self.can_move(oldest, oldest.end())
        {
            return Some((oldest.clone(), usize::MAX));
        }
        let is_short = |journal: &Journal| journal.is_short(self.journal_bytes);
        let are_many_short = sealed.iter().filter(|journal| is_short(journal)).count() > MANY_SHORT;
        // Even deletions are refused: a process that was killed or closed left a journal half
        // empty, and its successor started another one.
        let is_stuck = self.free_journals() < WriteClass::Deletion.headroom();
        let oldest_two = [0, 1].map(|at| sealed.get(at).map(|journal| journal.number));
        sealed.retain(|journal| journal.number < unwritten && journal.counts.may_be_moved());
        let parts = |journal: &Journal| {
            let counts = &journal.counts;
            let bytes = counts.end_bytes.load(Ordering::Relaxed).saturating_sub(FIRST_RECORD);
            let mut live = counts.unexpired_bytes();
            let oldest_other =
                oldest_two.into_iter().flatten().find(|other| *other != journal.number);
            // Tombstones count as live as long as they may hide something.
            if oldest_other.is_some_and(|it| it.0 <= counts.newest_origin.load(Ordering::Relaxed)) {
                live += counts.tombstone_bytes.load(Ordering::Relaxed);
            }
            let bytes = if journal.frames.is_some() {
                // Moved records are written plain, and must take less than is gained.
                bytes.min(journal.file_bytes as usize)
            } else if is_stuck || (are_many_short && is_short(journal)) {
                // The space behind its end counts as dead.
                self.journal_bytes
            } else {
                bytes
            };
            (live, bytes.max(1) as u64)
        };
        sealed.retain(|journal| {
            let (live, bytes) = parts(journal);
            live * PARTS <= most_live * bytes && self.can_move(journal, live as usize)
        });
        let least_live = sealed.into_iter().min_by_key(|journal| {
            let (live, bytes) = parts(journal);
            live.saturating_mul(1000) / bytes
        })?;
        let (_, bytes) = parts(&least_live);
        Some((least_live, (most_live * bytes / PARTS) as usize))
    }

    /// Returns how many [`PARTS`] of a journal may be live if it is to be compacted.
    pub(crate) fn most_live_parts(&self) -> u64 {
        // Bytes written per byte gained: a third, one, three, fifteen.
        match (self.is_crowded(), self.options.when_full) {
            (false, _) => PARTS / 4,
            (true, WhenFull::Evict) => PARTS / 2,
            (true, WhenFull::Refuse)
                if self.journals.budget.permits(1 + self.headroom(WriteClass::Put)) =>
            {
                PARTS / 4 * 3
            }
            // Puts are refused until journals are removed.
            (true, WhenFull::Refuse) => PARTS - 1,
        }
    }

    fn is_far_behind(&self, journal: &Journal) -> bool {
        self.active.load().number.0 - journal.number.0 >= FAR_BEHIND
    }

    /// Returns whether there is space for the live records of a journal, and enough for the next
    /// journal after its removal: making space must not use it up.
    fn can_move(&self, journal: &Journal, alive_bytes: usize) -> bool {
        let budget = &self.journals.budget;
        let (left_bytes, is_kept) = self.left_in_newest();
        let (alive_bytes, left_bytes) = (alive_bytes as u64, left_bytes as u64);
        let lacks_spare = self.flush.lacks_spare();
        if alive_bytes == 0 || (alive_bytes <= left_bytes && (is_kept || lacks_spare)) {
            return true;
        }
        if lacks_spare {
            return false;
        }
        if budget.permits(2) {
            return true;
        }
        // It takes the last journal. A full file gives that back. A truncated or compressed one
        // does not: then the rest of that journal has to suffice for another one.
        let journal_bytes = self.journal_bytes as u64;
        let kept_bytes = if is_kept { left_bytes } else { 0 };
        let then_bytes =
            (budget.free_bytes() + kept_bytes + journal.file_bytes).saturating_sub(alive_bytes);
        budget.permits(1)
            && (journal.file_bytes >= journal_bytes
                || then_bytes >= 2 * journal_bytes - journal_bytes / PARTS)
    }

    /// Returns the bytes left in the newest journal, and whether it is reserved for maintenance.
    fn left_in_newest(&self) -> (usize, bool) {
        let newest = self.active.load();
        let arena = newest.arena.as_ref().expect("the newest journal is in memory");
        let taken_bytes = arena.taken_bytes().filter(|_| arena.end_bytes().is_none());
        let left_bytes =
            taken_bytes.map_or(0, |taken| arena.capacity_bytes().saturating_sub(taken));
        (left_bytes, newest.free_journals.load(Ordering::Relaxed) < WriteClass::Deletion.headroom())
    }

    /// Returns how many bytes background tasks read at a time: many if writers need the space,
    /// since there are no pauses then.
    pub(crate) fn step_bytes(&self) -> usize {
        if self.is_crowded() { CHUNK_BYTES } else { STEP_BYTES }
    }

    /// Returns whether a journal has tombstones that would be rewritten, according to its counts.
    pub(crate) fn has_to_hide(&self, journal: &Journal) -> bool {
        let counts = &journal.counts;
        let newest_origin = counts.newest_origin.load(Ordering::Relaxed);
        let oldest_other = self.journals.oldest_but(journal.number);
        counts.tombstone_bytes.load(Ordering::Relaxed) > 0
            && oldest_other.is_some_and(|oldest| oldest.0 <= newest_origin)
    }

    /// Determines what a journal contains by reading its records, since its counts are upper
    /// bounds. Done before anything is moved, so that a journal that stays uses up no space.
    pub(crate) fn scan_live(
        &self,
        journal: &Journal,
        pause: Duration,
    ) -> Result<LiveScan, Stopped> {
        let oldest_other = self.journals.oldest_but(journal.number);
        let mut scan = LiveScan::default();
        let mut pauses = Pauses::new(pause);
        let step_bytes = || self.step_bytes();
        let damaged_bytes = self.each_record(journal, step_bytes, |first, record| {
            pauses.pause_before(self, first)?;
            let hash = self.hasher.hash(record.key());
            let named = self.index.find(hash);
            let fate = self.fate(journal, oldest_other, first, record, hash, named);
            scan.alive_bytes += match fate {
                Fate::Move => record.header().padded_bytes(),
                Fate::Tombstone(_) => tombstone_bytes(record.key()),
                Fate::Drop | Fate::Expire => 0,
            };
            let stays =
                fate == Fate::Move || record.origin().is_some_and(|it| fate == Fate::Tombstone(it));
            scan.has_dead |= !stays;
            Ok::<_, Stopped>(())
        })?;
        self.mark_damaged(journal, damaged_bytes);
        scan.is_damaged = journal.counts.has_damage(damaged_bytes);
        scan.has_dead |= damaged_bytes > 0;
        Ok(scan)
    }

    /// Rewrites the live records of a journal, as found by [`Self::scan_live`], and removes it,
    /// with a `pause` after each [`STEP_BYTES`]. The caller must hold
    /// [`crate::maintenance::Maintenance::exclusive`].
    pub(crate) fn compact(
        &self,
        journal: Arc<Journal>,
        scan: &LiveScan,
        pause: Duration,
    ) -> Result<Compaction, Stopped> {
        let number = journal.number;
        let oldest_other = self.journals.oldest_but(number);
        // The oldest journal hides nothing; damaged parts are given up when it has to be removed.
        let may_be_damaged =
            self.is_far_behind(&journal) && oldest_other.is_none_or(|other| number < other);
        if scan.is_damaged && !may_be_damaged {
            return Ok(Compaction::Damaged);
        }
        if !self.can_move(&journal, scan.alive_bytes) {
            return Ok(Compaction::NoSpace);
        }
        let mut pauses = Pauses::new(pause);
        let step_bytes = || self.step_bytes();
        let moved = self.each_record(&journal, step_bytes, |first, record| {
            pauses.pause_before(self, first)?;
            self.rewrite(&journal, oldest_other, first, record)
        });
        // The rest is retried later; the copies are newer than what is left here, and are not made
        // again.
        let damaged_bytes = match moved {
            Err(Stopped::Failed(Error::DiskFull { .. })) => return Ok(Compaction::NoSpace),
            moved => moved?,
        };
        self.mark_damaged(&journal, damaged_bytes);
        if journal.counts.has_damage(damaged_bytes) && !may_be_damaged {
            return Ok(Compaction::Damaged);
        }
        self.remove(journal)?;
        self.counters.compacted.fetch_add(1, Ordering::Relaxed);
        Ok(Compaction::Done)
    }

    /// Rewrites a record if it is still needed.
    fn rewrite(
        &self,
        journal: &Journal,
        oldest_other: Option<JournalNumber>,
        first: Granule,
        record: &Record<'_>,
    ) -> Result<(), Stopped> {
        loop {
            if self.flush.is_behind() {
                self.flush.wait_while_behind();
            }
            match self.try_rewrite(journal, oldest_other, first, record) {
                Ok(Some(appended)) => {
                    self.wake_flusher(appended);
                    return Ok(());
                }
                Ok(None) => return Ok(()),
                Err(NotAppended::Failed(error)) => return Err(error.into()),
                Err(NotAppended::Full(full)) if self.wait_for_spare(full) => {}
                Err(NotAppended::Full(_)) if self.maintenance.waker.is_closing() => {
                    return Err(Stopped::Closing);
                }
                Err(NotAppended::Full(_)) => {
                    let failure = self.flush.failure();
                    return Err(failure.unwrap_or_else(|| self.disk_full()).into());
                }
            }
        }
    }

    fn try_rewrite(
        &self,
        journal: &Journal,
        oldest_other: Option<JournalNumber>,
        first: Granule,
        record: &Record<'_>,
    ) -> Result<Option<Appended>, NotAppended> {
        let key = record.key();
        let hash = self.hasher.hash(key);
        let mut writer = self.index.lock(hash);
        let appended = match self.fate(journal, oldest_other, first, record, hash, writer.get()) {
            Fate::Drop => return Ok(None),
            Fate::Move => {
                let (value, expires_at) = (record.value(), record.expires_at());
                let copy = NewRecord { key, content: Content::Value { value, expires_at } };
                return self
                    .append_and_index(&mut writer, hash, &copy, WriteClass::Maintenance)
                    .map(Some);
            }
            Fate::Tombstone(origin) => {
                let tombstone =
                    self.append_tombstone(key, hash, Some(origin), WriteClass::Maintenance)?;
                // The index records that a value was moved, but knows nothing of tombstones.
                // Records are visited in order.
                journal
                    .counts
                    .tombstones_moved_until
                    .fetch_max(first.byte() + 1, Ordering::Relaxed);
                Some(tombstone)
            }
            Fate::Expire => None,
        };
        if let Some(expired) = writer.remove() {
            self.journals.mark_dead(expired);
        }
        Ok(appended)
    }

    /// Determines what happens to a record at `first` of a journal, given the index entry of its
    /// key, when the other remaining journals start at `oldest_other`.
    fn fate(
        &self,
        journal: &Journal,
        oldest_other: Option<JournalNumber>,
        first: Granule,
        record: &Record<'_>,
        hash: KeyHash,
        named: Option<Position>,
    ) -> Fate {
        // Whether a journal may exist that has an older record of the key.
        let hides_older =
            |origin: JournalNumber| oldest_other.is_some_and(|oldest| oldest <= origin);
        if let Some(origin) = record.origin() {
            let moved_until = journal.counts.tombstones_moved_until.load(Ordering::Relaxed);
            let has_newer = named.is_some() || first.byte() < moved_until;
            return match !has_newer && hides_older(origin) {
                true => Fate::Tombstone(origin),
                false => Fate::Drop,
            };
        }
        let position = record.position(journal.number, first, hash);
        if !named.is_some_and(|named| named.is_same(position)) {
            return Fate::Drop;
        }
        match record.has_expired(&self.clock) {
            false => Fate::Move,
            true if hides_older(journal.number) => Fate::Tombstone(journal.number),
            true => Fate::Expire,
        }
    }
}

/// Returns the space of a tombstone of this key in a journal.
pub(crate) fn tombstone_bytes(key: &[u8]) -> usize {
    let tombstone = NewRecord { key, content: Content::Tombstone { origin: None } };
    tombstone.len_bytes().next_multiple_of(GRANULE_BYTES)
}

/// Inserts pauses into the background scan of a journal.
struct Pauses {
    /// The pause for each step.
    pause: Duration,
    /// The position of the last pause.
    at: usize,
}

impl Pauses {
    fn new(pause: Duration) -> Self {
        Self { pause, at: 0 }
    }

    /// Called before the record at `first`.
    fn pause_before(&mut self, shared: &Shared, first: Granule) -> Result<(), Stopped> {
        let steps = (first.byte() - self.at) / STEP_BYTES;
        if steps > 0 {
            self.at = first.byte();
            if !self.pause.is_zero() && !shared.is_crowded() {
                // The pauses of several steps for a long record; bounded because `close` waits.
                thread::sleep(self.pause * steps.min(MOST_STEPS) as u32);
            }
        }
        if shared.maintenance.waker.is_closing() { Err(Stopped::Closing) } else { Ok(()) }
    }
}
