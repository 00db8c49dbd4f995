//! The keeper: a thread that writes the hints of journals that were sealed, compacts journals with
//! few live records, evicts the oldest one when the disk budget is reached, brings into memory what
//! is read, and compresses what is not in memory.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::clear::KeptAside;
use crate::compact::{Compaction, Look, PAUSE};
use crate::error::{Error, Result, Stopped};
use crate::flush::TellOfPanic;
use crate::hint::{self, Entry};
use crate::journal::{Counts, Journal, file_name};
use crate::options::WhenFull;
use crate::place::{Granule, JournalNumber};
use crate::record::{Content, Kind, NewRecord, Record};
use crate::room::{Who, hint_leaves_bytes};
use crate::shared::{CHUNK_BYTES, NotAppended, Shared};
use crate::sync::Arc;
use crate::waker::Waker;

/// Eviction keeps at most this part of a journal, so that it always makes room: what is kept may
/// waste the end of the newest journal too, which is less than its longest record.
const MAX_KEPT: usize = 2;

/// What has failed is tried again after this time.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// So often it is looked whether the files are still there, when nothing else is to do.
const LOOK_FOR_FILES: Duration = Duration::from_secs(10);

/// How others reach the keeper.
#[derive(Default)]
pub(crate) struct Keep {
    /// To end it is told too; it does after the journal that it is at.
    pub(crate) waker: Waker,
    /// How many journals there are of which the index has lost keys:
    /// [`crate::journal::Counts::has_lost_keys`].
    evicting: AtomicUsize,
    /// Held by whoever moves records and removes journals: the keeper, journal by journal, or
    /// somebody who compacts on demand.
    pub(crate) turn: Mutex<()>,
    /// Journals that were sealed and have no hint yet, the oldest first.
    pub(crate) without_hint: Mutex<VecDeque<JournalNumber>>,
    /// Bytes that were found damaged, of each journal once.
    pub(crate) damaged_bytes: AtomicU64,
    /// Why the keeper's work has failed; `None` when it has gone well since. It tries again.
    pub(crate) failure: Mutex<Option<Error>>,
    /// There was no memory to compress with, since it was last done.
    pub(crate) has_told_of_memory: AtomicBool,
    /// What openings could not use.
    pub(crate) kept_aside: Mutex<KeptAside>,
}

impl Keep {
    /// Whether records are in the files that the index does not name any more, with no newer ones
    /// that say that they are gone.
    pub(crate) fn is_evicting(&self) -> bool {
        self.evicting.load(Ordering::Acquire) > 0
    }

    /// What came of a turn. What fails again and again is told once.
    fn tell_of(&self, error: Option<&Error>) {
        let before = std::mem::replace(&mut *self.failure.lock(), error.cloned());
        let text = |error: &Error| error.to_string();
        if let Some(error) = error
            && before.as_ref().map(text) != Some(text(error))
        {
            tracing::warn!("journal cache: {error}; it is tried again each {TRY_AGAIN:?}");
        }
    }
}

/// The thread, until the cache is closed.
pub(crate) fn run(shared: &Arc<Shared>) {
    let keep = &shared.keep;
    let _told = TellOfPanic(shared);
    keep.waker.is_here();
    let mut is_warm = false;
    loop {
        keep.waker.look();
        if keep.waker.is_closing() {
            return;
        }
        let turn = keep.turn.lock();
        shared.look_for_files();
        let worked = shared.turn(&mut is_warm);
        drop(turn);
        match &worked {
            Err(error) => keep.tell_of(Some(error)),
            // Nothing is wanted any more. (That something else was done, a hint written say, tells
            // nothing of what has failed.)
            Ok(false) => keep.tell_of(None),
            Ok(true) => continue,
        }
        // Writers may wait for the room that it has not made, and who waits does not ask again.
        let is_tried_again = worked.is_err() && shared.flush.failure().is_none();
        keep.waker.sleep(Some(if is_tried_again { TRY_AGAIN } else { LOOK_FOR_FILES }));
    }
}

impl Shared {
    /// Do one thing, the most urgent one; whether there was one. `is_warm`: what an opening has
    /// left cold was brought into memory, as far as there is any.
    pub(crate) fn turn(&self, is_warm: &mut bool) -> Result<bool> {
        // Also where room is wanted: it is soon done, and if writers wanted some all the time no
        // journal would have one.
        if self.write_one_hint() || self.make_room_once()? {
            return Ok(true);
        }
        if !*is_warm {
            // One that cannot be read does not keep the others from it.
            *is_warm = !self.warm_one()?;
            return Ok(true);
        }
        Ok(self.promote_one()? || self.compress_one()?)
    }

    /// End all writing if somebody has removed the newest journal or the lock: the system goes on
    /// to take what is written to a file without a name, and gives its room back when that is
    /// closed. For whoever has the turn: nobody else removes a journal meanwhile.
    fn look_for_files(&self) {
        if self.flush.failure().is_some() {
            return;
        }
        let newest = self.active.load();
        // If it cannot be told, it is told another time.
        let removed = self.directory.removed(&file_name(newest.number), &*newest.file);
        if let Ok(Some(path)) = removed {
            self.flush.fail(Error::Removed { path });
        }
    }

    /// Write the hint of a journal that was sealed; whether one was wanted. For whoever has the
    /// turn: nobody removes a journal meanwhile.
    pub(crate) fn write_one_hint(&self) -> bool {
        if self.flush.failure().is_some() {
            return false;
        }
        let Some(number) = self.keep.without_hint.lock().pop_front() else { return false };
        let leaves_bytes = hint_leaves_bytes(self.options.when_full, self.journal_bytes);
        // It may be gone, or not be in memory any more.
        if let Some(journal) = self.journals.get(number)
            && hint::has_room(&*self.directory, leaves_bytes)
        {
            let _busy = journal.busy();
            // The next opening reads all of it, and nothing else is missing.
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
        // Or records would be missing in it, and a hint is believed.
        if damaged_bytes == 0 { writer.finish(journal.end()).map_err(failed) } else { Ok(()) }
    }

    /// Compact or evict one journal, or look what has expired in one, if that is due; whether
    /// anything was done.
    fn make_room_once(&self) -> Result<bool> {
        if self.flush.failure().is_some() {
            // Nobody needs room any more, and what is there can be read.
            return Ok(false);
        }
        if let Some((journal, most_alive_bytes)) = self.emptiest() {
            let counts = journal.counts.clone();
            match self.compact_emptiest(journal, most_alive_bytes) {
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
        if self.look_for_expired() {
            return Ok(true);
        }
        match self.options.when_full == WhenFull::Evict && self.is_crowded() {
            true => self.try_to_evict(),
            false => Ok(false),
        }
    }

    /// Compact a journal that [`Self::emptiest`] has found; whether it is gone.
    pub(crate) fn compact_emptiest(
        &self,
        journal: Arc<Journal>,
        most_alive_bytes: usize,
    ) -> std::result::Result<bool, Stopped> {
        let _busy = journal.busy();
        // Where there is room, nobody is worse off if it turns out to be damaged when some of its
        // values have been moved: the index knows these, so none is moved twice; and to look
        // through it is to read it twice. Tombstones that were moved only this process knows of:
        // each one that comes to the same damage would move all before it once more.
        let is_looked_at = self.is_crowded() || self.has_to_hide(&journal);
        let look = match is_looked_at {
            true => self.look(&journal, PAUSE)?,
            false => Look::by_counts(&journal),
        };
        if is_looked_at && look.alive_bytes > most_alive_bytes {
            // Only what has expired can have been counted wrongly: it is looked for anew.
            journal.counts.found_expired(0, 0, 0);
            return Ok(false);
        }
        Ok(self.compact(journal, &look, PAUSE)? == Compaction::Done)
    }

    /// The same as [`Self::evict_oldest`]. If it fails, writers who wait for the room are told; it
    /// is tried again, but may fail for ever.
    fn try_to_evict(&self) -> Result<bool> {
        let evicted = self.evict_oldest();
        match &evicted {
            // Where writers always want room there is no turn in which nothing is wanted.
            Ok(_) => self.keep.tell_of(None),
            Err(error) => {
                let mut state = self.flush.state.lock();
                state.eviction_failure = Some(error.clone());
                self.flush.changed.notify_all();
            }
        }
        evicted
    }

    /// Remove the oldest journal. Of its records that are still the newest of their keys those that
    /// were read are written anew; the others are gone. False if there is none.
    pub(crate) fn evict_oldest(&self) -> Result<bool> {
        // Only this one is held meanwhile: the memory of the others has to come free when it is
        // taken from them.
        let oldest = self.journals.oldest();
        let Some(journal) = oldest.and_then(|number| self.journals.get(number)) else {
            return Ok(false);
        };
        if journal.number >= self.flush.oldest_unwritten() {
            return Ok(false);
        }
        let _busy = journal.busy();
        // Else nothing is to be moved, as after a removal that has failed.
        if journal.counts.live_bytes.load(Ordering::Relaxed) > 0 {
            self.empty(&journal)?;
        }
        self.remove(journal)?;
        Ok(true)
    }

    /// Move what was read of the oldest journal, and take the rest out of the index.
    fn empty(&self, journal: &Arc<Journal>) -> Result<()> {
        let number = journal.number;
        self.lose_keys(journal);
        let mut kept_bytes = 0;
        // Writers wait for it.
        let step_bytes = || CHUNK_BYTES;
        let read = self.each_record(journal, step_bytes, |first, record| {
            if record.header().kind == Kind::Tombstone {
                return Ok(());
            }
            let with_it = kept_bytes + record.header().padded_bytes();
            let is_wanted = with_it <= self.journal_bytes / MAX_KEPT;
            if self.settle(number, first, record, is_wanted)? {
                kept_bytes = with_it;
            }
            Ok(())
        });
        match read {
            // What cannot be read is not there; neither is what is behind damage, if there is no
            // memory to look for it.
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

    /// From now on the index loses keys whose records are in this journal, until it is gone for
    /// good: not after a removal that has failed, since then it is there, or a power cut may bring
    /// it back.
    pub(crate) fn lose_keys(&self, journal: &Journal) {
        if !journal.counts.has_lost_keys.swap(true, Ordering::Relaxed) {
            self.keep.evicting.fetch_add(1, Ordering::Release);
        }
    }

    /// Bytes of a journal were found that are no records, though there were some: if that was not
    /// yet known, it is counted.
    pub(crate) fn mark_damaged(&self, journal: &Journal, damaged_bytes: usize) {
        let Counts { lost_bytes, is_damaged, .. } = &*journal.counts;
        if !journal.counts.has_damage(damaged_bytes) {
            return;
        }
        // From now on all of it is damage: it stays.
        let known_bytes = lost_bytes.swap(0, Ordering::Relaxed);
        if !is_damaged.swap(true, Ordering::Relaxed) || known_bytes > 0 {
            let more_bytes = damaged_bytes.saturating_sub(known_bytes) as u64;
            self.keep.damaged_bytes.fetch_add(more_bytes, Ordering::Relaxed);
            let path = journal.path.display();
            tracing::warn!("journal cache: {path}: {damaged_bytes} bytes are damaged");
        }
    }

    /// Remove a journal whose records are not needed any more.
    pub(crate) fn remove(&self, journal: Arc<Journal>) -> Result<()> {
        let number = journal.number;
        // What is left in the index cannot be read: it was damaged, or its record is not where a
        // hint has told.
        if journal.counts.live_bytes.load(Ordering::Relaxed) > 0 {
            // But an opening may read it, before the file is gone.
            self.lose_keys(&journal);
            self.index.retain(|place| {
                let is_in_it = place.is_in(number);
                if is_in_it {
                    // It is there until its file is gone: an iteration has to ask the index for
                    // each of these.
                    self.journals.forget(place);
                }
                !is_in_it
            });
        }
        // What has replaced its records, or was moved out of it, has to be durable before these go.
        self.flush.wait_for(self.newest_point())?;
        if let Some(error) = self.flush.failure() {
            // Perhaps the removal of another journal has failed, and this one hides what is in it.
            return Err(error);
        }
        let name = file_name(number);
        let path = self.directory.path();
        match self.directory.remove(&name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(Error::io(path.join(&name), "removing a journal"))?,
        }
        // Without its journal it means nothing.
        let _ = self.directory.remove(&hint::file_name(number));
        // Behind its file: as long as that is there the next opening reads it, and it counts as the
        // oldest, or what hides it may not go.
        let removed = self.journals.remove(number);
        let (file, file_bytes) = (removed.file.clone(), removed.file_bytes);
        let has_lost_keys = removed.counts.has_lost_keys.load(Ordering::Relaxed);
        // Its memory comes free with the last one who has it open.
        drop((journal, removed));
        // With each durability: a deletion of what was in it writes nothing from now on, and a
        // power cut must not bring it back. Nor, once it is cut, half of it.
        self.sync_names()?;
        if has_lost_keys {
            self.keep.evicting.fetch_sub(1, Ordering::Release);
        }
        self.journals.room.removing();
        self.free(file);
        self.made_room(|| self.journals.room.give_back(file_bytes));
        Ok(())
    }

    /// Move a record of the oldest journal, or remove its entry; whether it was moved.
    fn settle(
        &self,
        number: JournalNumber,
        first: Granule,
        record: &Record<'_>,
        is_wanted: bool,
    ) -> Result<bool> {
        let hash = self.hasher.hash(record.key());
        let place = record.place(number, first, hash);
        loop {
            if is_wanted && self.flush.is_behind() {
                self.flush.wait_while_behind();
            }
            let mut writer = self.index.lock(hash);
            let Some(named) = writer.get().filter(|named| named.is_same(place)) else {
                return Ok(false);
            };
            let is_kept = is_wanted && named.was_read() && !record.has_expired(&self.clock);
            if is_kept {
                let content =
                    Content::Value { value: record.value(), expires_at: record.expires_at() };
                let copy = NewRecord { key: record.key(), content };
                match self.enter(&mut writer, hash, &copy, Who::Maintenance) {
                    Ok(appended) => {
                        drop(writer);
                        self.counters.kept.fetch_add(1, Ordering::Relaxed);
                        self.nudge(appended);
                        return Ok(true);
                    }
                    Err(NotAppended::Failed(error)) => return Err(error),
                    Err(NotAppended::Full(full)) => {
                        drop(writer);
                        if self.wait_for_spare(full) {
                            continue;
                        }
                        writer = self.index.lock(hash);
                        if !writer.get().is_some_and(|named| named.is_same(place)) {
                            return Ok(false);
                        }
                    }
                }
            }
            writer.remove();
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
            self.journals.forget(named);
            return Ok(false);
        }
    }
}
