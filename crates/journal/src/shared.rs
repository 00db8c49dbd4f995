//! State shared by all threads of an open cache, and the write path.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use alluvium_device::GRANULE_BYTES;

use crate::blocks::Blocks;
use crate::clock::Clock;
use crate::disk_budget::{Reservation, WriteClass};
use crate::error::{Error, Result};
use crate::fetch::Pages;
use crate::files::Directory;
use crate::flush::{Flush, Shortage, State};
use crate::hash::{KeyHash, KeyHasher};
use crate::index::{Index, Writer};
use crate::journal::{CacheId, FIRST_RECORD, Journal, Loaded};
use crate::journals::Journals;
use crate::maintenance::Maintenance;
use crate::options::{Durability, Options, WhenFull};
use crate::pool::Pool;
use crate::position::{Granule, JournalNumber, Position};
use crate::record::{Content, MAX_KEY_BYTES, NewRecord, Record};
use crate::sync::{Arc, ArcSwap};
use crate::waker::Waker;

/// The flusher is woken each time that this much has been written.
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
    /// Cached parts of cold journals: records, and decompressed frames.
    pub(crate) blocks: Arc<Blocks>,
    /// The newest journal.
    pub(crate) active: ArcSwap<Journal>,
    pub(crate) flush: Flush,
    /// Wakes the allocator when the spare was taken, or when there is more space or memory.
    pub(crate) allocator: Waker,
    pub(crate) maintenance: Maintenance,
    pub(crate) counters: Counters,
    pub(crate) clock: Clock,
}

/// Totals since the cache was opened.
#[derive(Default)]
pub(crate) struct Counters {
    /// Bytes written to files.
    pub(crate) written_bytes: AtomicU64,
    /// Number of times that a writer waited for a journal.
    pub(crate) stalls: AtomicU64,
    /// Journals compacted.
    pub(crate) compacted: AtomicU64,
    /// Records removed by eviction.
    pub(crate) evicted: AtomicU64,
    /// Records that eviction kept by rewriting them.
    pub(crate) kept: AtomicU64,
    /// Journals promoted to memory.
    pub(crate) promoted: AtomicU64,
}

/// A position in the order of all records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    pub(crate) number: JournalNumber,
    pub(crate) byte: usize,
}

/// Why a record was not appended.
#[derive(Debug)]
pub(crate) enum NotAppended {
    /// The newest journal, with this number, is full or reserved for another write class, and the
    /// next one is not ready. Callers must release their lock before they wait: reclaiming space
    /// may need it.
    Full(JournalNumber),
    Failed(Error),
}

impl From<Error> for NotAppended {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A record that has been appended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appended {
    pub(crate) position: Position,
    /// The end of the record.
    pub(crate) end: Point,
    /// Whether the flusher should be woken.
    crosses_chunk: bool,
}

impl Shared {
    /// Returns the maximum length of a record.
    pub(crate) fn max_record_bytes(&self) -> usize {
        self.journal_bytes - FIRST_RECORD
    }

    pub(crate) fn disk_full(&self) -> Error {
        let path = self.directory.path().to_owned();
        Error::DiskFull { path, max_bytes: self.options.max_disk_bytes }
    }

    pub(crate) fn no_memory(&self, what: &'static str) -> impl FnOnce(io::Error) -> Error {
        // The path too is computed only on failure: each write creates one of these closures.
        move |source| Error::no_memory(self.directory.path(), what)(source)
    }

    pub(crate) fn check_key(&self, key: &[u8]) -> Result<()> {
        match key.len() {
            0 => Err(Error::KeyEmpty),
            len_bytes if len_bytes > MAX_KEY_BYTES => Err(Error::KeyTooLong { len_bytes }),
            _ => Ok(()),
        }
    }

    /// Writes a value under its key unconditionally.
    pub(crate) fn put(&self, key: &[u8], value: &[u8], expires_at: Option<u64>) -> Result<()> {
        let record = self.new_value(key, value, expires_at)?;
        let hash = self.hasher.hash(key);
        let appended = self.retry_append(WriteClass::Put, || {
            self.append_and_index(&mut self.index.lock(hash), hash, &record, WriteClass::Put)
        })?;
        self.finish_append(appended)
    }

    /// Writes a value as [`Self::put`], and returns true, unless it would have to wait.
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
        let entered =
            self.append_and_index(&mut self.index.lock(hash), hash, &record, WriteClass::Put);
        match entered {
            Ok(appended) => self.finish_append(appended).map(|()| true),
            Err(NotAppended::Full(_)) => Ok(false),
            Err(NotAppended::Failed(error)) => Err(error),
        }
    }

    /// Writes a value if the key is absent; returns whether it was written.
    pub(crate) fn put_if_absent(
        &self,
        key: &[u8],
        value: &[u8],
        expires_at: Option<u64>,
    ) -> Result<bool> {
        let record = self.new_value(key, value, expires_at)?;
        let hash = self.hasher.hash(key);
        let appended = self.retry_append(WriteClass::Put, || {
            let (mut writer, is_present) = self.lock_and_read(hash, |named| {
                named.map_or(Ok(false), |position| self.is_present(position, &[]))
            })?;
            if is_present {
                return Ok(None);
            }
            self.append_and_index(&mut writer, hash, &record, WriteClass::Put).map(Some)
        })?;
        match appended {
            Some(appended) => self.finish_append(appended).map(|()| true),
            None => self.finish_refused().map(|()| false),
        }
    }

    /// Removes a key; returns whether it was present.
    pub(crate) fn delete(&self, key: &[u8]) -> Result<bool> {
        match self.delete_with(key, &[])? {
            (was_there, Some(appended)) => self.finish_append(appended).map(|()| was_there),
            (was_there, None) => self.finish_refused().map(|()| was_there),
        }
    }

    /// Removes a key with pages that were read before, without waiting for stable storage. Returns
    /// whether it was present, and what was appended.
    pub(crate) fn delete_with(
        &self,
        key: &[u8],
        fetched: &[Pages],
    ) -> Result<(bool, Option<Appended>)> {
        self.check_key(key)?;
        let hash = self.hasher.hash(key);
        self.retry_append(WriteClass::Deletion, || {
            let (mut writer, was_there) = self.lock_and_read(hash, |named| {
                // A value that cannot be read counts as present.
                Ok(named.is_some_and(|position| self.is_present(position, fetched).unwrap_or(true)))
            })?;
            // A record that eviction has removed from the index is still in its journal until that
            // is removed.
            if writer.get().is_none() && !self.maintenance.is_evicting() {
                return Ok((false, None));
            }
            let appended = self.append_tombstone(key, hash, None, WriteClass::Deletion)?;
            writer.count_user_bytes(key.len());
            if let Some(old) = writer.remove() {
                self.journals.mark_dead(old);
            }
            Ok((was_there, Some(appended)))
        })
    }

    /// Retries an append that finds the newest journal full once there is another one. If the disk
    /// does not keep up with the interval, waits for it first.
    pub(crate) fn retry_append<T>(
        &self,
        class: WriteClass,
        mut append: impl FnMut() -> std::result::Result<T, NotAppended>,
    ) -> Result<T> {
        loop {
            if self.flush.is_behind() {
                self.counters.stalls.fetch_add(1, Ordering::Relaxed);
                self.flush.wait_while_behind();
            }
            match append() {
                Ok(done) => return Ok(done),
                Err(NotAppended::Full(full)) => self.rotate(full, class)?,
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

    /// Locks the shard of a key, and returns the result of `read` for the position that the index
    /// names. `read` runs before the lock is taken, so that no other thread waits behind it for the
    /// disk, and again if the entry has changed meanwhile.
    pub(crate) fn lock_and_read<T>(
        &self,
        hash: KeyHash,
        read: impl Fn(Option<Position>) -> Result<T>,
    ) -> Result<(Writer<'_>, T)> {
        loop {
            let named = self.index.find(hash);
            let found = read(named)?;
            let writer = self.index.lock(hash);
            let is_same = match (named, writer.get()) {
                // A position is never used twice.
                (Some(named), Some(now)) => named.is_same(now),
                (named, now) => named.is_none() && now.is_none(),
            };
            if is_same {
                return Ok((writer, found));
            }
        }
    }

    /// Loads the record at `position` of a cold journal: from the cached parts, the pages in
    /// `fetched`, or the disk; with no pages given, nothing is read. `position` carries the read
    /// bit of the index from before this read.
    #[cold]
    pub(crate) fn load_cold(
        &self,
        journal: &Journal,
        position: Position,
        fetched: Option<&[Pages]>,
    ) -> Result<Option<Loaded>> {
        let (number, first) = (journal.number, position.first());
        if let Some(record) = self.blocks.record(number, first) {
            let len = record.len();
            return Ok(Some(Loaded::of_block(record, 0, len)));
        }
        let Some(fetched) = fetched else { return Ok(None) };
        let loaded = journal.load_with(position, fetched)?;
        // A record that is read for the first time may be part of a long scan.
        if position.was_read() {
            self.blocks.insert_record(number, first, loaded.bytes());
        }
        Ok(Some(loaded))
    }

    /// Returns the record at `position` of a cold journal if it is cached, without counting this as
    /// a use.
    pub(crate) fn peek(&self, journal: &Journal, position: Position) -> Option<Loaded> {
        if journal.arena.is_some() {
            return None;
        }
        let record = self.blocks.peek_record(journal.number, position.first())?;
        let len = record.len();
        Some(Loaded::of_block(record, 0, len))
    }

    /// Loads the record at `position` for a caller that replaces or removes it: from memory, the
    /// pages in `fetched`, or the disk. The record is not cached for this.
    pub(crate) fn load_uncached(
        &self,
        journal: &Journal,
        position: Position,
        fetched: &[Pages],
    ) -> Result<Loaded> {
        self.peek(journal, position).map_or_else(|| journal.load_with(position, fetched), Ok)
    }

    /// Returns whether the record at `position` counts as present, reading these pages or the disk
    /// if necessary.
    fn is_present(&self, position: Position, fetched: &[Pages]) -> Result<bool> {
        if !position.expires() {
            return Ok(true);
        }
        let Some(journal) = self.journals.of(position) else { return Ok(false) };
        let loaded = self.load_uncached(&journal, position, fetched)?;
        Ok(Record::trusted(loaded.bytes()).is_some_and(|record| !record.has_expired(&self.clock)))
    }

    /// Appends a value and sets the index entry, under the lock of the key's shard.
    pub(crate) fn append_and_index(
        &self,
        writer: &mut Writer<'_>,
        hash: KeyHash,
        record: &NewRecord<'_>,
        class: WriteClass,
    ) -> std::result::Result<Appended, NotAppended> {
        // What may fail comes first: a record in the journal that the index does not name would
        // reappear at the next opening.
        writer.reserve_slot().map_err(self.no_memory("the index"))?;
        let appended = self.append(record, hash, class)?;
        if class == WriteClass::Put {
            writer.count_user_bytes(record.user_bytes());
        }
        if let Some(old) = writer.set(appended.position) {
            self.journals.mark_dead(old);
        }
        Ok(appended)
    }

    /// Appends a tombstone, under the lock of the key's shard. `origin`: see
    /// [`Content::Tombstone`].
    pub(crate) fn append_tombstone(
        &self,
        key: &[u8],
        hash: KeyHash,
        origin: Option<JournalNumber>,
        class: WriteClass,
    ) -> std::result::Result<Appended, NotAppended> {
        let record = NewRecord { key, content: Content::Tombstone { origin } };
        self.append(&record, hash, class)
    }

    fn append(
        &self,
        record: &NewRecord<'_>,
        hash: KeyHash,
        class: WriteClass,
    ) -> std::result::Result<Appended, NotAppended> {
        if let Some(error) = self.flush.failure() {
            return Err(error.into());
        }
        let len_bytes = record.len_bytes();
        loop {
            let journal = self.active.load();
            if is_reserved(&journal, class) {
                return Err(NotAppended::Full(journal.number));
            }
            let arena = journal.arena.as_ref().expect("the newest journal is in memory");
            let Some(mut taken) = arena.reserve(len_bytes) else {
                let full = journal.number;
                drop(journal);
                if self.try_rotate(full, class) {
                    continue;
                }
                return Err(NotAppended::Full(full));
            };
            let at = taken.at();
            let first = Granule::at(at);
            record.write(&mut taken, journal.salt, journal.number, first);
            let position = Position::new(journal.number, first, len_bytes, record.expires(), hash);
            let padded_bytes = len_bytes.next_multiple_of(GRANULE_BYTES);
            // Before publication: once published, the journal may be sealed, and a journal whose
            // counts show nothing live is removed without being read.
            match record.content {
                // The index will name it.
                Content::Value { .. } => journal.counts.count(position),
                // Counted with padding: a journal full of tombstones contains nothing else.
                Content::Tombstone { origin } => {
                    journal.counts.count_tombstone(padded_bytes, origin.unwrap_or(journal.number));
                }
            }
            taken.publish();
            let end = at + padded_bytes;
            return Ok(Appended {
                position,
                end: Point { number: journal.number, byte: end },
                crosses_chunk: at / CHUNK_BYTES != end / CHUNK_BYTES,
            });
        }
    }

    /// Returns the end of everything written until now.
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

    /// Completes an append after the lock has been released.
    pub(crate) fn finish_append(&self, appended: Appended) -> Result<()> {
        self.wake_flusher(appended);
        match self.options.durability {
            Durability::Always => self.flush.wait_for(appended.end),
            Durability::None | Durability::Interval(_) => Ok(()),
        }
    }

    /// Completes a call that wrote nothing because of the present state of its key. With
    /// [`Durability::Always`] it also waits for durability: its result reveals another writer's
    /// record, which must not be lost in a power cut afterwards.
    pub(crate) fn finish_refused(&self) -> Result<()> {
        match self.options.durability {
            Durability::Always => self.flush.wait_for(self.newest_point()),
            Durability::None | Durability::Interval(_) => Ok(()),
        }
    }

    /// Wakes the flusher if there is a chunk to write.
    pub(crate) fn wake_flusher(&self, appended: Appended) {
        if appended.crosses_chunk {
            self.flush.wake();
        }
    }

    /// Replaces the journal `full`, which takes no more records, by the next one if that is ready;
    /// false if it is not.
    fn try_rotate(&self, full: JournalNumber, class: WriteClass) -> bool {
        let mut state = self.flush.state.lock();
        self.active.load().number != full || self.advance(&mut state, class)
    }

    fn advance(&self, state: &mut State, class: WriteClass) -> bool {
        if !self.journals.budget.permits(1 + self.headroom(class)) {
            return false;
        }
        let Some(next) = state.spare.take() else { return false };
        // A journal reserved for another write class need not be full, but has to be completed
        // eventually.
        self.active.load().arena.as_ref().expect("the newest journal is in memory").close();
        // Registered by its number before anything can be written to it.
        self.journals.put(next.clone());
        next.free_journals.store(self.free_journals(), Ordering::Relaxed);
        state.pending.push_back(next.clone());
        self.active.store(next);
        self.flush.update_behind(state);
        self.flush.waker.wake();
        self.allocator.wake();
        true
    }

    /// Returns how many journals of the budget a write class leaves free.
    pub(crate) fn headroom(&self, class: WriteClass) -> usize {
        match (self.options.when_full, class) {
            (WhenFull::Refuse, _) => class.headroom(),
            // Some for the records that eviction rewrites. Eviction can also make space without
            // any.
            (WhenFull::Evict, WriteClass::Put) => 2,
            (WhenFull::Evict, WriteClass::Deletion | WriteClass::Maintenance) => 0,
        }
    }

    /// Updates the free space of the disk, so that reserved headroom is real. Not needed with
    /// eviction, which needs no headroom. Called only by an opening and by the allocator, while no
    /// journal is being created.
    pub(crate) fn update_free_space(&self) {
        if self.options.when_full == WhenFull::Evict {
            return;
        }
        // If the file system does not report its free space, only the budget counts.
        let Ok(free_bytes) = self.directory.free_bytes() else { return };
        let state = self.flush.state.lock();
        let spare_bytes = state.spare.as_ref().map_or(0, |spare| spare.file_bytes);
        self.journals.budget.update_free_space(free_bytes, spare_bytes);
        self.active.load().free_journals.store(self.free_journals(), Ordering::Relaxed);
        self.flush.changed.notify_all();
    }

    /// Returns the current value of [`Journal::free_journals`] for the newest journal. Until the
    /// next journal takes over it only grows, unless other files fill the disk.
    pub(crate) fn free_journals(&self) -> usize {
        match self.options.when_full {
            // Eviction needs no headroom.
            WhenFull::Evict => usize::MAX,
            WhenFull::Refuse => self.journals.budget.free_journals(),
        }
    }

    /// Runs `free`, which gives back disk space, and wakes the waiters for space.
    pub(crate) fn release_space(&self, free: impl FnOnce()) {
        self.notify_of_space(free, |state| {
            state.shortage = Shortage::None;
            state.eviction_failure = None;
        });
    }

    /// Releases a reservation and wakes the waiters for space, although there is no more than
    /// before.
    pub(crate) fn release_reservation(&self, reservation: Reservation<'_>) {
        self.notify_of_space(
            || drop(reservation),
            |state| {
                if state.shortage == Shortage::Known {
                    state.shortage = Shortage::Unknown;
                }
            },
        );
    }

    fn notify_of_space(&self, free: impl FnOnce(), change: impl FnOnce(&mut State)) {
        // Under the lock, so that no thread is between its check and its wait, and none sees the
        // new space without the new state or the reverse, and is refused.
        let mut state = self.flush.state.lock();
        free();
        self.active.load().free_journals.store(self.free_journals(), Ordering::Relaxed);
        change(&mut state);
        state.space_generation += 1;
        self.flush.changed.notify_all();
        drop(state);
        self.allocator.wake();
    }

    /// Waits until the next journal is ready and switches to it as [`Self::try_rotate`], or until
    /// the newest one is no longer reserved for another write class. Must be called without a lock.
    fn rotate(&self, full: JournalNumber, class: WriteClass) -> Result<()> {
        let mut state = self.flush.state.lock();
        let mut has_waited = false;
        loop {
            let may_continue = {
                let newest = self.active.load();
                newest.free_journals.store(self.free_journals(), Ordering::Relaxed);
                let arena = newest.arena.as_ref().expect("the newest journal is in memory");
                let takes_more = !is_reserved(&newest, class) && arena.end_bytes().is_none();
                newest.number != full || takes_more
            };
            if may_continue || self.advance(&mut state, class) {
                return Ok(());
            }
            if let Some(error) = self.flush.failure() {
                return Err(error);
            }
            // Also for writers that are refused now: what was deleted since the last check may
            // suffice to make space.
            self.maintenance.waker.wake();
            if !self.may_get_space(&state, class) {
                // The disk may have more space by now.
                self.allocator.wake();
                return Err(self.disk_full());
            }
            if let Some(error) = self.permanent_shortage(&state, class) {
                return Err(error);
            }
            if !std::mem::replace(&mut has_waited, true) {
                self.counters.stalls.fetch_add(1, Ordering::Relaxed);
            }
            // The next journal may be waiting for memory, and that for unwritten data.
            self.flush.waker.wake();
            self.allocator.wake();
            self.flush.changed.wait(&mut state);
        }
    }

    /// Returns whether a journal for `class`, or the space for one, is expected: then a waiter is
    /// notified of the outcome.
    fn may_get_space(&self, state: &State, class: WriteClass) -> bool {
        match self.options.when_full {
            WhenFull::Evict => {
                let is_short = state.shortage == Shortage::Known;
                !is_short || state.pending.len() > 1 || self.has_evictable(state)
            }
            // The allocator creates a journal if there is space, and reservations are given up for
            // it.
            WhenFull::Refuse => {
                self.journals.budget.permits(1 + self.headroom(class))
                    && (state.shortage != Shortage::Known || self.journals.budget.has_reservation())
            }
        }
    }

    /// Returns the error that keeps `class` from getting space and may persist indefinitely.
    fn permanent_shortage(&self, state: &State, class: WriteClass) -> Option<Error> {
        let lacks_space = state.shortage == Shortage::Known
            || !self.journals.budget.permits(1 + self.headroom(class));
        state.eviction_failure.clone().filter(|_| lacks_space)
    }

    /// Waits, on behalf of a task that makes space, until a journal in preparation is ready. False
    /// if none is being prepared, or if closing the cache would have to wait for files or memory
    /// used by others. Must be called without a lock.
    pub(crate) fn wait_for_spare(&self, full: JournalNumber) -> bool {
        let mut state = self.flush.state.lock();
        while self.active.load().number == full
            && !self.advance(&mut state, WriteClass::Maintenance)
        {
            let is_permanent = self.flush.failure().is_some() || state.shortage == Shortage::Known;
            if is_permanent || (state.lacks_resources && self.maintenance.waker.is_closing()) {
                return false;
            }
            self.allocator.wake();
            self.flush.changed.wait(&mut state);
        }
        true
    }
}

/// Returns whether the newest journal is reserved for classes that leave less headroom than
/// `class`.
#[inline]
fn is_reserved(newest: &Journal, class: WriteClass) -> bool {
    newest.free_journals.load(Ordering::Relaxed) < class.headroom()
}
