//! What all threads of an open cache share, and the write path.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use alluvium_device::GRANULE_BYTES;

use crate::blocks::Blocks;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::fetch::Pages;
use crate::files::Directory;
use crate::flush::{Flush, Shortage, State};
use crate::hash::{KeyHash, KeyHasher};
use crate::index::{Index, Writer};
use crate::journal::{CacheId, FIRST_RECORD, Journal, Loaded};
use crate::journals::Journals;
use crate::keep::Keep;
use crate::options::{Durability, Options, WhenFull};
use crate::place::{Granule, JournalNumber, Place};
use crate::pool::Pool;
use crate::record::{Content, MAX_KEY_BYTES, NewRecord, Record};
use crate::room::{SetAside, Who};
use crate::sync::{Arc, ArcSwap};
use crate::waker::Waker;

/// The flusher is woken each time that so much has been written.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) id: CacheId,
    pub(crate) journal_bytes: usize,
    pub(crate) directory: Box<dyn Directory>,
    pub(crate) hasher: KeyHasher,
    pub(crate) index: Index,
    pub(crate) journals: Journals,
    pub(crate) pool: Pool,
    /// What was read of cold journals: records, and frames that were decompressed.
    pub(crate) blocks: Arc<Blocks>,
    /// The newest journal.
    pub(crate) active: ArcSwap<Journal>,
    pub(crate) flush: Flush,
    /// The preparer is told that the spare was taken, or that there is more room or memory than
    /// before.
    pub(crate) prepare: Waker,
    pub(crate) keep: Keep,
    pub(crate) counters: Counters,
    pub(crate) clock: Clock,
}

/// Totals since the cache was opened.
#[derive(Default)]
pub(crate) struct Counters {
    /// Bytes that were written to files.
    pub(crate) written_bytes: AtomicU64,
    /// Times that a writer waited for a journal.
    pub(crate) stalls: AtomicU64,
    /// Journals that were compacted.
    pub(crate) compacted: AtomicU64,
    /// Records that eviction removed.
    pub(crate) evicted: AtomicU64,
    /// Records that eviction kept, by writing them anew.
    pub(crate) kept: AtomicU64,
    /// Journals that were brought into memory because they were read.
    pub(crate) promoted: AtomicU64,
}

/// A point in the order of all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    pub(crate) number: JournalNumber,
    pub(crate) byte: usize,
}

/// Why a record was not appended.
#[derive(Debug)]
pub(crate) enum NotAppended {
    /// The newest journal, this one, is full, or kept for others, and the next one is not there
    /// yet. Nobody waits for it with a lock: who makes room may want that lock.
    Full(JournalNumber),
    Failed(Error),
}

impl From<Error> for NotAppended {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A record that has its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appended {
    pub(crate) place: Place,
    /// Its end.
    pub(crate) end: Point,
    /// Whether the flusher has something to do.
    crosses_chunk: bool,
}

impl Shared {
    /// Bytes that a record may have.
    pub(crate) fn max_record_bytes(&self) -> usize {
        self.journal_bytes - FIRST_RECORD
    }

    pub(crate) fn disk_full(&self) -> Error {
        let path = self.directory.path().to_owned();
        Error::DiskFull { path, max_bytes: self.options.max_disk_bytes }
    }

    pub(crate) fn no_memory(&self, what: &'static str) -> impl FnOnce(io::Error) -> Error {
        // Also the path is asked for only then: a write makes one of these.
        move |source| Error::no_memory(self.directory.path(), what)(source)
    }

    pub(crate) fn check_key(&self, key: &[u8]) -> Result<()> {
        match key.len() {
            0 => Err(Error::KeyEmpty),
            len_bytes if len_bytes > MAX_KEY_BYTES => Err(Error::KeyTooLong { len_bytes }),
            _ => Ok(()),
        }
    }

    /// Write a value under its key, whatever is there.
    pub(crate) fn put(&self, key: &[u8], value: &[u8], expires_at: Option<u64>) -> Result<()> {
        let record = self.new_value(key, value, expires_at)?;
        let hash = self.hasher.hash(key);
        let appended = self.until_appended(Who::User, || {
            self.enter(&mut self.index.lock(hash), hash, &record, Who::User)
        })?;
        self.after(appended)
    }

    /// The same if nothing has to be waited for; whether it was written.
    pub(crate) fn try_put(
        &self,
        key: &[u8],
        value: &[u8],
        expires_at: Option<u64>,
    ) -> Result<bool> {
        if self.options.durability == Durability::Always {
            return Ok(false);
        }
        let record = self.new_value(key, value, expires_at)?;
        if self.flush.is_behind() && self.flush.failure().is_none() {
            return Ok(false);
        }
        let hash = self.hasher.hash(key);
        let entered = self.enter(&mut self.index.lock(hash), hash, &record, Who::User);
        match entered {
            Ok(appended) => self.after(appended).map(|()| true),
            Err(NotAppended::Full(_)) => Ok(false),
            Err(NotAppended::Failed(error)) => Err(error),
        }
    }

    /// The same as `put` if there is nothing; whether it was written.
    pub(crate) fn put_if_absent(
        &self,
        key: &[u8],
        value: &[u8],
        expires_at: Option<u64>,
    ) -> Result<bool> {
        let record = self.new_value(key, value, expires_at)?;
        let hash = self.hasher.hash(key);
        let appended = self.until_appended(Who::User, || {
            let (mut writer, is_there) = self.lock_and_read(hash, |named| {
                named.map_or(Ok(false), |place| self.is_there(place, &[]))
            })?;
            if is_there {
                return Ok(None);
            }
            self.enter(&mut writer, hash, &record, Who::User).map(Some)
        })?;
        match appended {
            Some(appended) => self.after(appended).map(|()| true),
            None => self.after_nothing().map(|()| false),
        }
    }

    /// Remove what is there; whether it was there.
    pub(crate) fn delete(&self, key: &[u8]) -> Result<bool> {
        match self.delete_with(key, &[])? {
            (was_there, Some(appended)) => self.after(appended).map(|()| was_there),
            (was_there, None) => self.after_nothing().map(|()| was_there),
        }
    }

    /// The same with pages that were read before, and without waiting for stable storage; and what
    /// was appended.
    pub(crate) fn delete_with(
        &self,
        key: &[u8],
        fetched: &[Pages],
    ) -> Result<(bool, Option<Appended>)> {
        self.check_key(key)?;
        let hash = self.hasher.hash(key);
        self.until_appended(Who::Deletion, || {
            let (mut writer, was_there) = self.lock_and_read(hash, |named| {
                // One that cannot be read is somebody's value too.
                Ok(named.is_some_and(|place| self.is_there(place, fetched).unwrap_or(true)))
            })?;
            // What eviction has just removed from the index is in its journal until that is gone.
            if writer.get().is_none() && !self.keep.is_evicting() {
                return Ok((false, None));
            }
            let appended = self.append_tombstone(key, hash, None, Who::Deletion)?;
            writer.count_user_bytes(key.len());
            if let Some(old) = writer.remove() {
                self.journals.forget(old);
            }
            Ok((was_there, Some(appended)))
        })
    }

    /// Repeat what finds the newest journal full, as soon as there is another one. Not before the
    /// disk has caught up, if it does not keep up with the interval.
    pub(crate) fn until_appended<T>(
        &self,
        who: Who,
        mut append: impl FnMut() -> std::result::Result<T, NotAppended>,
    ) -> Result<T> {
        loop {
            if self.flush.is_behind() {
                self.counters.stalls.fetch_add(1, Ordering::Relaxed);
                self.flush.wait_while_behind();
            }
            match append() {
                Ok(done) => return Ok(done),
                Err(NotAppended::Full(full)) => self.rotate(full, who)?,
                Err(NotAppended::Failed(error)) => return Err(error),
            }
        }
    }

    pub(crate) fn new_value<'a>(
        &self,
        key: &'a [u8],
        value: &'a [u8],
        expires_at: Option<u64>,
    ) -> Result<NewRecord<'a>> {
        self.check_key(key)?;
        let record = NewRecord { key, content: Content::Value { value, expires_at } };
        let (len_bytes, max_bytes) = (record.len_bytes(), self.max_record_bytes());
        if len_bytes > max_bytes {
            return Err(Error::ValueTooLong { len_bytes, max_bytes });
        }
        Ok(record)
    }

    /// Lock the shard of a key with what was read of the place that the index names: before the
    /// lock, so that nobody waits behind it for the disk, and again if somebody has changed it
    /// since.
    pub(crate) fn lock_and_read<T>(
        &self,
        hash: KeyHash,
        read: impl Fn(Option<Place>) -> Result<T>,
    ) -> Result<(Writer<'_>, T)> {
        loop {
            let named = self.index.find(hash);
            let found = read(named)?;
            let writer = self.index.lock(hash);
            let is_same = match (named, writer.get()) {
                // A place is never used twice.
                (Some(named), Some(now)) => named.is_same(now),
                (named, now) => named.is_none() && now.is_none(),
            };
            if is_same {
                return Ok((writer, found));
            }
        }
    }

    /// The record at `place` of a cold journal: as it is kept, or from the disk or the pages that
    /// were `fetched` of it; without these nothing is read. `place`: with what the index knew
    /// before this read.
    #[cold]
    pub(crate) fn load_cold(
        &self,
        journal: &Journal,
        place: Place,
        fetched: Option<&[Pages]>,
    ) -> Result<Option<Loaded>> {
        let (number, first) = (journal.number, place.first());
        if let Some(record) = self.blocks.record(number, first) {
            let len = record.len();
            return Ok(Some(Loaded::of_block(record, 0, len)));
        }
        let Some(fetched) = fetched else { return Ok(None) };
        let loaded = journal.load_with(place, fetched)?;
        // What is read for the first time may be the first of a million that are read once.
        if place.was_read() {
            self.blocks.keep_record(number, first, loaded.bytes());
        }
        Ok(Some(loaded))
    }

    /// The record at `place` of a cold journal, if it is kept; this is no use of it.
    pub(crate) fn peek(&self, journal: &Journal, place: Place) -> Option<Loaded> {
        if journal.arena.is_some() {
            return None;
        }
        let record = self.blocks.peek_record(journal.number, place.first())?;
        let len = record.len();
        Some(Loaded::of_block(record, 0, len))
    }

    /// The record at `place`, for whoever replaces or removes it: from memory, the pages that were
    /// `fetched`, or the disk. It is not kept for this.
    pub(crate) fn load_once(
        &self,
        journal: &Journal,
        place: Place,
        fetched: &[Pages],
    ) -> Result<Loaded> {
        self.peek(journal, place).map_or_else(|| journal.load_with(place, fetched), Ok)
    }

    /// Whether what the index names counts as present, by these pages or the disk.
    fn is_there(&self, place: Place, fetched: &[Pages]) -> Result<bool> {
        if !place.expires() {
            return Ok(true);
        }
        let Some(journal) = self.journals.of(place) else { return Ok(false) };
        let loaded = self.load_once(&journal, place, fetched)?;
        Ok(Record::trusted(loaded.bytes()).is_some_and(|record| !record.has_expired(&self.clock)))
    }

    /// Append a value and have the index name it, under the lock of its key's shard.
    pub(crate) fn enter(
        &self,
        writer: &mut Writer<'_>,
        hash: KeyHash,
        record: &NewRecord<'_>,
        who: Who,
    ) -> std::result::Result<Appended, NotAppended> {
        // First what may fail: a record in the journal that the index does not name would be there
        // after the next opening.
        writer.make_room().map_err(self.no_memory("the index"))?;
        let appended = self.append(record, hash, who)?;
        if who == Who::User {
            writer.count_user_bytes(record.user_bytes());
        }
        if let Some(old) = writer.set(appended.place) {
            self.journals.forget(old);
        }
        Ok(appended)
    }

    /// Append that a key has no value, under the lock of its shard. `origin`:
    /// [`Content::Tombstone`].
    pub(crate) fn append_tombstone(
        &self,
        key: &[u8],
        hash: KeyHash,
        origin: Option<JournalNumber>,
        who: Who,
    ) -> std::result::Result<Appended, NotAppended> {
        let record = NewRecord { key, content: Content::Tombstone { origin } };
        self.append(&record, hash, who)
    }

    fn append(
        &self,
        record: &NewRecord<'_>,
        hash: KeyHash,
        who: Who,
    ) -> std::result::Result<Appended, NotAppended> {
        if let Some(error) = self.flush.failure() {
            return Err(error.into());
        }
        let len_bytes = record.len_bytes();
        loop {
            let journal = self.active.load();
            if is_kept(&journal, who) {
                return Err(NotAppended::Full(journal.number));
            }
            let arena = journal.arena.as_ref().expect("the newest journal is in memory");
            let Some(mut taken) = arena.reserve(len_bytes) else {
                let full = journal.number;
                drop(journal);
                if self.try_rotate(full, who) {
                    continue;
                }
                return Err(NotAppended::Full(full));
            };
            let at = taken.at();
            let first = Granule::at(at);
            record.write(&mut taken, journal.salt, journal.number, first);
            let place = Place::new(journal.number, first, len_bytes, record.expires(), hash);
            let padded_bytes = len_bytes.next_multiple_of(GRANULE_BYTES);
            // Before it is published: with that the journal may be sealed, and one in which nothing
            // is alive, by its counts, goes as it is.
            match record.content {
                // The index will name it.
                Content::Value { .. } => journal.counts.count(place),
                // As it is taken from the journal: one that is full of them has nothing else in it.
                Content::Tombstone { origin } => {
                    journal.counts.count_tombstone(padded_bytes, origin.unwrap_or(journal.number));
                }
            }
            taken.publish();
            let end = at + padded_bytes;
            return Ok(Appended {
                place,
                end: Point { number: journal.number, byte: end },
                crosses_chunk: at / CHUNK_BYTES != end / CHUNK_BYTES,
            });
        }
    }

    /// Where everything ends that was written until now.
    pub(crate) fn newest_point(&self) -> Point {
        loop {
            let journal = self.active.load();
            let arena = journal.arena.as_ref().expect("the newest journal is in memory");
            if let Some(byte) = arena.taken_bytes() {
                return Point { number: journal.number, byte };
            }
            thread::yield_now();
        }
    }

    /// What is left to do when no lock is held any more.
    pub(crate) fn after(&self, appended: Appended) -> Result<()> {
        self.nudge(appended);
        match self.options.durability {
            Durability::Always => self.flush.wait_for(appended.end),
            Durability::None | Durability::Interval(_) => Ok(()),
        }
    }

    /// The same if nothing was written because of what is there, which may be somebody's who still
    /// waits for stable storage: who is told of it must not hear of what a power cut takes away.
    pub(crate) fn after_nothing(&self) -> Result<()> {
        match self.options.durability {
            Durability::Always => self.flush.wait_for(self.newest_point()),
            Durability::None | Durability::Interval(_) => Ok(()),
        }
    }

    /// Tell the flusher, if there is enough for it.
    pub(crate) fn nudge(&self, appended: Appended) {
        if appended.crosses_chunk {
            self.flush.nudge();
        }
    }

    /// The journal `full` takes no more: go on to the next one, if it is there; false if not.
    fn try_rotate(&self, full: JournalNumber, who: Who) -> bool {
        let mut state = self.flush.state.lock();
        self.active.load().number != full || self.advance(&mut state, who)
    }

    fn advance(&self, state: &mut State, who: Who) -> bool {
        if !self.journals.room.has(1 + self.leaves(who)) {
            return false;
        }
        let Some(next) = state.spare.take() else { return false };
        // One that is kept from somebody need not be full, and it has to be complete some day.
        self.active.load().arena.as_ref().expect("the newest journal is in memory").close();
        // Found by its number before anybody can write to it.
        self.journals.put(next.clone());
        next.beside.store(self.beside(), Ordering::Relaxed);
        state.pending.push_back(next.clone());
        self.active.store(next);
        self.flush.look_whether_behind(state);
        self.flush.waker.wake();
        self.prepare.wake();
        true
    }

    /// Journals of the budget that `who` leaves to others.
    pub(crate) fn leaves(&self, who: Who) -> usize {
        match (self.options.when_full, who) {
            (WhenFull::Refuse, _) => who.leaves(),
            // Some for what eviction writes anew. It makes room without any, too.
            (WhenFull::Evict, Who::User) => 2,
            (WhenFull::Evict, Who::Deletion | Who::Maintenance) => 0,
        }
    }

    /// See what the disk has: what somebody leaves of the budget to others has to be there. Only if
    /// nothing is evicted, which makes room without any. For who makes journals: none is in the
    /// making.
    pub(crate) fn see_disk(&self) {
        if self.options.when_full == WhenFull::Evict {
            return;
        }
        // If it cannot be said, it is the budget alone that counts.
        let Ok(free_bytes) = self.directory.free_bytes() else { return };
        let state = self.flush.state.lock();
        let spare_bytes = state.spare.as_ref().map_or(0, |spare| spare.file_bytes);
        self.journals.room.see_disk(free_bytes, spare_bytes);
        self.active.load().beside.store(self.beside(), Ordering::Relaxed);
        self.flush.changed.notify_all();
    }

    /// What [`Journal::beside`] of the newest journal is now. Until another one takes over it only
    /// grows, unless others take room on the disk.
    pub(crate) fn beside(&self) -> usize {
        match self.options.when_full {
            // Eviction makes room without any.
            WhenFull::Evict => usize::MAX,
            WhenFull::Refuse => self.journals.room.left(),
        }
    }

    /// There is more room when `free` has given it back: tell those who wait for it.
    pub(crate) fn made_room(&self, free: impl FnOnce()) {
        self.tell_of_room(free, |state| {
            state.shortage = Shortage::None;
            state.eviction_failure = None;
        });
    }

    /// What was set aside is not any more, though there is no more room than before: the same.
    pub(crate) fn gave_way(&self, set_aside: SetAside<'_>) {
        self.tell_of_room(
            || drop(set_aside),
            |state| {
                if state.shortage == Shortage::Known {
                    state.shortage = Shortage::Unknown;
                }
            },
        );
    }

    fn tell_of_room(&self, free: impl FnOnce(), change: impl FnOnce(&mut State)) {
        // With the lock, so that nobody is between looking and waiting; and that nobody who looks
        // has one of the two alone, the room or what is known of it: he would be refused.
        let mut state = self.flush.state.lock();
        free();
        self.active.load().beside.store(self.beside(), Ordering::Relaxed);
        change(&mut state);
        state.rooms_made += 1;
        self.flush.changed.notify_all();
        drop(state);
        self.prepare.wake();
    }

    /// The same as [`Self::try_rotate`], waiting until the next one is there, or until the newest
    /// one is not kept from `who` any more. With no lock held.
    fn rotate(&self, full: JournalNumber, who: Who) -> Result<()> {
        let mut state = self.flush.state.lock();
        let mut has_waited = false;
        loop {
            let may_go_on = {
                let newest = self.active.load();
                newest.beside.store(self.beside(), Ordering::Relaxed);
                let arena = newest.arena.as_ref().expect("the newest journal is in memory");
                let takes_more = !is_kept(&newest, who) && arena.end_bytes().is_none();
                newest.number != full || takes_more
            };
            if may_go_on || self.advance(&mut state, who) {
                return Ok(());
            }
            if let Some(error) = self.flush.failure() {
                return Err(error);
            }
            // Also for whoever is refused now: what was deleted since it looked may be enough to
            // make room.
            self.keep.waker.wake();
            if !self.room_may_come(&state, who) {
                // The disk may have more by now.
                self.prepare.wake();
                return Err(self.disk_full());
            }
            if let Some(error) = self.why_no_room_comes(&state, who) {
                return Err(error);
            }
            if !std::mem::replace(&mut has_waited, true) {
                self.counters.stalls.fetch_add(1, Ordering::Relaxed);
            }
            // The journal may wait for memory, and that for what is not yet written.
            self.flush.waker.wake();
            self.prepare.wake();
            self.flush.changed.wait(&mut state);
        }
    }

    /// Whether somebody is about to make a journal for `who`, or the room for one: who waits is
    /// told what becomes of it.
    fn room_may_come(&self, state: &State, who: Who) -> bool {
        match self.options.when_full {
            WhenFull::Evict => {
                let is_short = state.shortage == Shortage::Known;
                !is_short || state.pending.len() > 1 || self.has_evictable(state)
            }
            // The preparer makes one if there is room; and what is set aside is given up for it.
            WhenFull::Refuse => {
                self.journals.room.has(1 + self.leaves(who))
                    && (state.shortage != Shortage::Known || self.journals.room.is_set_aside())
            }
        }
    }

    /// Why there is no room for `who`, and none comes as long as that is so: it may last for ever.
    fn why_no_room_comes(&self, state: &State, who: Who) -> Option<Error> {
        let lacks_room =
            state.shortage == Shortage::Known || !self.journals.room.has(1 + self.leaves(who));
        state.eviction_failure.clone().filter(|_| lacks_room)
    }

    /// Wait until a journal that is being made is there, for those who make room: false if none is,
    /// or if a close would have to wait for files or memory that others have. With no lock held.
    pub(crate) fn wait_for_spare(&self, full: JournalNumber) -> bool {
        let mut state = self.flush.state.lock();
        while self.active.load().number == full && !self.advance(&mut state, Who::Maintenance) {
            let is_hopeless = self.flush.failure().is_some() || state.shortage == Shortage::Known;
            if is_hopeless || (state.is_held_up && self.keep.waker.is_closing()) {
                return false;
            }
            self.prepare.wake();
            self.flush.changed.wait(&mut state);
        }
        true
    }
}

/// Whether the newest journal is kept for those who leave less than `who`.
#[inline]
fn is_kept(newest: &Journal, who: Who) -> bool {
    newest.beside.load(Ordering::Relaxed) < who.leaves()
}
