//! The maintenance thread: writes the hints of sealed journals, compacts journals with few live
//! records, evicts the oldest one when the disk budget is reached, promotes journals that are read,
//! and compresses journals that are not in memory.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::clear::SetAside;
use crate::compact::{Compaction, LiveScan, PAUSE};
use crate::disk_budget::{WriteClass, hint_headroom_bytes};
use crate::error::{Error, Result, Stopped};
use crate::flush::PanicReporter;
use crate::hint::{self, Entry};
use crate::journal::{Counts, Journal, file_name};
use crate::options::WhenFull;
use crate::position::{Granule, JournalNumber};
use crate::record::{Content, Kind, NewRecord, Record};
use crate::shared::{CHUNK_BYTES, NotAppended, Shared};
use crate::sync::Arc;
use crate::waker::Waker;

/// Eviction keeps at most one part in this many of a journal, so that it always makes space.
/// Keeping records may also waste the end of the newest journal, which is less than its longest
/// record.
const MAX_KEPT: usize = 2;

/// The retry interval after a failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// How often the thread checks that the files still exist, when there is nothing else to do.
const CHECK_FILES_EVERY: Duration = Duration::from_secs(10);

/// The interface of the maintenance thread to the others.
#[derive(Default)]
pub(crate) struct Maintenance {
    /// Also used to end the thread, which ends after the journal that it is working on.
    pub(crate) waker: Waker,
    /// Number of journals with keys that the index has lost:
    /// [`crate::journal::Counts::has_lost_keys`].
    evicting: AtomicUsize,
    /// Held while records are moved and journals removed: by the maintenance thread, journal by
    /// journal, or by a compaction on demand.
    pub(crate) exclusive: Mutex<()>,
    /// Sealed journals that have no hint yet, oldest first.
    pub(crate) without_hint: Mutex<VecDeque<JournalNumber>>,
    /// Bytes found damaged; each journal counts once.
    pub(crate) damaged_bytes: AtomicU64,
    /// Why the last background task failed; `None` after a success. It is retried.
    pub(crate) failure: Mutex<Option<Error>>,
    /// Memory to compress with was lacking since the last compression.
    pub(crate) has_logged_memory: AtomicBool,
    /// Files that openings could not use.
    pub(crate) set_aside: Mutex<SetAside>,
}

impl Maintenance {
    /// Returns whether files contain records that the index no longer names, without newer records
    /// that supersede them.
    pub(crate) fn is_evicting(&self) -> bool {
        self.evicting.load(Ordering::Acquire) > 0
    }

    /// Records the outcome of a task. A repeated failure is logged once.
    fn record_outcome(&self, error: Option<&Error>) {
        let before = std::mem::replace(&mut *self.failure.lock(), error.cloned());
        let text = |error: &Error| error.to_string();
        if let Some(error) = error
            && before.as_ref().map(text) != Some(text(error))
        {
            tracing::warn!("journal cache: {error}; retried every {RETRY_AFTER:?}");
        }
    }
}

/// Runs the thread until the cache is closed.
pub(crate) fn run(shared: &Arc<Shared>) {
    let maintenance = &shared.maintenance;
    let _reporter = PanicReporter(shared);
    maintenance.waker.register();
    let mut is_warm = false;
    loop {
        maintenance.waker.begin_check();
        if maintenance.waker.is_closing() {
            return;
        }
        let exclusive = maintenance.exclusive.lock();
        shared.check_files();
        let worked = shared.run_task(&mut is_warm);
        drop(exclusive);
        match &worked {
            Err(error) => maintenance.record_outcome(Some(error)),
            // Nothing is left to do. (Success at something else, such as writing a hint, does not
            // clear the failure.)
            Ok(false) => maintenance.record_outcome(None),
            Ok(true) => continue,
        }
        // Writers may wait for the space that it has not made, and a waiter does not wake this
        // thread again.
        let is_tried_again = worked.is_err() && shared.flush.failure().is_none();
        maintenance.waker.sleep(Some(if is_tried_again { RETRY_AFTER } else { CHECK_FILES_EVERY }));
    }
}

impl Shared {
    /// Performs the most urgent task; returns whether there was one. `is_warm`: the journals that
    /// an opening left cold were loaded into memory, as far as there is any.
    pub(crate) fn run_task(&self, is_warm: &mut bool) -> Result<bool> {
        // Also if space is needed: a hint is written quickly, and under constant pressure no
        // journal would ever get one.
        if self.write_one_hint() || self.reclaim_once()? {
            return Ok(true);
        }
        if !*is_warm {
            // One that cannot be read does not prevent the others from being loaded.
            *is_warm = !self.load_one()?;
            return Ok(true);
        }
        Ok(self.promote_one()? || self.compress_one()?)
    }

    /// Stops all writing if the newest journal or the lock file was removed: the kernel accepts
    /// writes to a file without a name, and frees it when it is closed. The caller must hold
    /// [`Maintenance::exclusive`], so that no journal is removed meanwhile.
    fn check_files(&self) {
        if self.flush.failure().is_some() {
            return;
        }
        let newest = self.active.load();
        // If it cannot be determined now, it is checked again later.
        let removed = self.directory.removed(&file_name(newest.number), &*newest.file);
        if let Ok(Some(path)) = removed {
            self.flush.fail(Error::Removed { path });
        }
    }

    /// Writes the hint of a sealed journal; returns whether one was due. The caller must hold
    /// [`Maintenance::exclusive`], so that no journal is removed meanwhile.
    pub(crate) fn write_one_hint(&self) -> bool {
        if self.flush.failure().is_some() {
            return false;
        }
        let Some(number) = self.maintenance.without_hint.lock().pop_front() else { return false };
        let headroom_bytes = hint_headroom_bytes(self.options.when_full, self.journal_bytes);
        // It may have been removed, or no longer be in memory.
        if let Some(journal) = self.journals.get(number)
            && hint::has_space(&*self.directory, headroom_bytes)
        {
            let _busy = journal.busy();
            // The next opening reads the whole journal; there is no other loss.
            if let Err(error) = self.write_hint(&journal) {
                tracing::warn!("journal cache: {error}");
            }
        }
        true
    }

    fn write_hint(&self, journal: &Journal) -> Result<()> {
        let number = journal.number;
        let path = || self.directory.path().join(hint::file_name(number));
        let failed = |error| Error::io(path(), "writing a hint")(error);
        let writer = hint::Writer::new(&*self.directory, number, journal.salt);
        let mut writer = writer.map_err(failed)?;
        let damaged_bytes = self.each_record(
            journal,
            || self.step_bytes(),
            |first, record| {
                let entry = Entry::of(self.hasher.hash(record.key()), first, record);
                writer.push(&entry).map_err(failed)
            },
        )?;
        self.mark_damaged(journal, damaged_bytes);
        // Otherwise records would be missing in the hint, and openings trust hints.
        if damaged_bytes == 0 { writer.finish(journal.end()).map_err(failed) } else { Ok(()) }
    }

    /// Compacts or evicts one journal, or scans one for expired records, if that is due; returns
    /// whether anything was done.
    fn reclaim_once(&self) -> Result<bool> {
        if self.flush.failure().is_some() {
            // Space is no longer needed, and reads continue.
            return Ok(false);
        }
        if let Some((journal, most_alive_bytes)) = self.least_live() {
            let counts = journal.counts.clone();
            match self.compact_least_live(journal, most_alive_bytes) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(Stopped::Closing) => return Ok(false),
                Err(Stopped::Failed(error)) if self.flush.failure().is_some() => return Err(error),
                Err(Stopped::Failed(error)) => {
                    tracing::warn!("journal cache: {error}");
                    counts.failed();
                }
            }
        }
        if self.scan_for_expired() {
            return Ok(true);
        }
        match self.options.when_full == WhenFull::Evict && self.is_crowded() {
            true => self.try_to_evict(),
            false => Ok(false),
        }
    }

    /// Compacts a journal that [`Self::least_live`] has found; returns whether it was removed.
    pub(crate) fn compact_least_live(
        &self,
        journal: Arc<Journal>,
        most_alive_bytes: usize,
    ) -> std::result::Result<bool, Stopped> {
        let _busy = journal.busy();
        // While there is space, it is harmless if damage is found after some values have been
        // moved: the index knows these, so none is moved twice, and scanning the journal first
        // would read it twice. Moved tombstones are known only to this process: each process that
        // reaches the same damage would move all those before it again.
        let is_scanned = self.is_crowded() || self.has_to_hide(&journal);
        let scan = match is_scanned {
            true => self.scan_live(&journal, PAUSE)?,
            false => LiveScan::by_counts(&journal),
        };
        if is_scanned && scan.alive_bytes > most_alive_bytes {
            // Only expired records can have been miscounted: they are counted again.
            journal.counts.found_expired(0, 0, 0);
            return Ok(false);
        }
        Ok(self.compact(journal, &scan, PAUSE)? == Compaction::Done)
    }

    /// Calls [`Self::evict_oldest`]. If it fails, the writers that wait for space are notified; it
    /// is retried, but may keep failing.
    fn try_to_evict(&self) -> Result<bool> {
        let evicted = self.evict_oldest();
        match &evicted {
            // If writers always need space, there is always something to do.
            Ok(_) => self.maintenance.record_outcome(None),
            Err(error) => {
                let mut state = self.flush.state.lock();
                state.eviction_failure = Some(error.clone());
                self.flush.changed.notify_all();
            }
        }
        evicted
    }

    /// Removes the oldest journal. Of its records that are the newest of their keys, those that
    /// were read are rewritten; the others are lost. False if there is none.
    pub(crate) fn evict_oldest(&self) -> Result<bool> {
        // Only this journal is held meanwhile: the memory of the others has to be released when it
        // is taken from them.
        let oldest = self.journals.oldest();
        let Some(journal) = oldest.and_then(|number| self.journals.get(number)) else {
            return Ok(false);
        };
        if journal.number >= self.flush.oldest_unwritten() {
            return Ok(false);
        }
        let _busy = journal.busy();
        // Otherwise there is nothing to move, for example after a failed removal.
        if journal.counts.live_bytes.load(Ordering::Relaxed) > 0 {
            self.evict_records(&journal)?;
        }
        self.remove(journal)?;
        Ok(true)
    }

    /// Moves the records of the oldest journal that were read, and removes the others from the
    /// index.
    fn evict_records(&self, journal: &Arc<Journal>) -> Result<()> {
        let number = journal.number;
        self.mark_keys_lost(journal);
        let mut kept_bytes = 0;
        // Writers wait for it.
        let step_bytes = || CHUNK_BYTES;
        let read = self.each_record(journal, step_bytes, |first, record| {
            if record.header().kind == Kind::Tombstone {
                return Ok(());
            }
            let with_it = kept_bytes + record.header().padded_bytes();
            let is_wanted = with_it <= self.journal_bytes / MAX_KEPT;
            if self.move_or_drop(number, first, record, is_wanted)? {
                kept_bytes = with_it;
            }
            Ok(())
        });
        match read {
            // What cannot be read is lost; so is what is after damage if there is no memory to
            // search it.
            Err(error @ (Error::Io { .. } | Error::NoMemory { .. }))
                if self.flush.failure().is_none() =>
            {
                let path = journal.path.display();
                tracing::warn!("journal cache: {error}; {path} is given up");
            }
            read => self.mark_damaged(journal, read?),
        }
        Ok(())
    }

    /// Marks that the index loses keys whose records are in this journal, until the journal is
    /// removed durably. The mark stays after a failed removal: the file still exists, or a power
    /// cut may restore it.
    pub(crate) fn mark_keys_lost(&self, journal: &Journal) {
        if !journal.counts.has_lost_keys.swap(true, Ordering::Relaxed) {
            self.maintenance.evicting.fetch_add(1, Ordering::Release);
        }
    }

    /// Records that bytes of a journal were found damaged, and counts those not known before.
    pub(crate) fn mark_damaged(&self, journal: &Journal, damaged_bytes: usize) {
        let Counts { lost_bytes, is_damaged, .. } = &*journal.counts;
        if !journal.counts.has_damage(damaged_bytes) {
            return;
        }
        // From now on all of it counts as damage: the journal stays.
        let known_bytes = lost_bytes.swap(0, Ordering::Relaxed);
        if !is_damaged.swap(true, Ordering::Relaxed) || known_bytes > 0 {
            let more_bytes = damaged_bytes.saturating_sub(known_bytes) as u64;
            self.maintenance.damaged_bytes.fetch_add(more_bytes, Ordering::Relaxed);
            let path = journal.path.display();
            tracing::warn!("journal cache: {path}: {damaged_bytes} bytes are damaged");
        }
    }

    /// Removes a journal whose records are not needed any more.
    pub(crate) fn remove(&self, journal: Arc<Journal>) -> Result<()> {
        let number = journal.number;
        // What is left in the index cannot be read: it was damaged, or is not where a hint has
        // placed it.
        if journal.counts.live_bytes.load(Ordering::Relaxed) > 0 {
            // But an opening may be able to read it, before the file is removed.
            self.mark_keys_lost(&journal);
            self.index.retain(|position| {
                let is_in_it = position.is_in(number);
                if is_in_it {
                    // The journal exists until its file is removed: an iteration has to ask the
                    // index about each of these records.
                    self.journals.mark_dead(position);
                }
                !is_in_it
            });
        }
        // Records that replaced its records or were moved out of it must be durable before it is
        // removed.
        self.flush.wait_for(self.newest_point())?;
        if let Some(error) = self.flush.failure() {
            // Perhaps the removal of another journal failed, and this one hides records of it.
            return Err(error);
        }
        let name = file_name(number);
        let path = self.directory.path();
        match self.directory.remove(&name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(Error::io(path.join(&name), "removing a journal"))?,
        }
        // A hint is useless without its journal.
        let _ = self.directory.remove(&hint::file_name(number));
        // After the file: as long as that exists the next opening reads it, and it counts as the
        // oldest, or what hides its records might be removed.
        let removed = self.journals.remove(number);
        let (file, file_bytes) = (removed.file.clone(), removed.file_bytes);
        let has_lost_keys = removed.counts.has_lost_keys.load(Ordering::Relaxed);
        // Its memory is released with the last reference.
        drop((journal, removed));
        // With every durability: deletions of its keys write nothing from now on, and a power cut
        // must not restore the journal. Nor half of it, once the file is truncated.
        self.sync_names()?;
        if has_lost_keys {
            self.maintenance.evicting.fetch_sub(1, Ordering::Release);
        }
        self.journals.budget.begin_removal();
        self.free_file(file);
        self.release_space(|| self.journals.budget.give_back(file_bytes));
        Ok(())
    }

    /// Moves a record of the oldest journal or removes its entry; returns whether it was moved.
    fn move_or_drop(
        &self,
        number: JournalNumber,
        first: Granule,
        record: &Record<'_>,
        is_wanted: bool,
    ) -> Result<bool> {
        let hash = self.hasher.hash(record.key());
        let position = record.position(number, first, hash);
        loop {
            if is_wanted && self.flush.is_behind() {
                self.flush.wait_while_behind();
            }
            let mut writer = self.index.lock(hash);
            let Some(named) = writer.get().filter(|named| named.is_same(position)) else {
                return Ok(false);
            };
            let is_kept = is_wanted && named.was_read() && !record.has_expired(&self.clock);
            if is_kept {
                let content =
                    Content::Value { value: record.value(), expires_at: record.expires_at() };
                let copy = NewRecord { key: record.key(), content };
                match self.append_and_index(&mut writer, hash, &copy, WriteClass::Maintenance) {
                    Ok(appended) => {
                        drop(writer);
                        self.counters.kept.fetch_add(1, Ordering::Relaxed);
                        self.wake_flusher(appended);
                        return Ok(true);
                    }
                    Err(NotAppended::Failed(error)) => return Err(error),
                    Err(NotAppended::Full(full)) => {
                        drop(writer);
                        if self.wait_for_spare(full) {
                            continue;
                        }
                        writer = self.index.lock(hash);
                        if !writer.get().is_some_and(|named| named.is_same(position)) {
                            return Ok(false);
                        }
                    }
                }
            }
            writer.remove();
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
            self.journals.mark_dead(named);
            return Ok(false);
        }
    }
}
