//! An open cache, as its users see it.

mod many;

use std::cell::Cell;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::clear;
use crate::demand::Compacted;
use crate::error::{Error, Result};
use crate::fetch::Pages;
use crate::files::{Directory, RealDirectory};
use crate::flush::Flusher;
use crate::hash::KeyHash;
use crate::index::Grower;
use crate::iter::Iter;
use crate::journal::{Journal, Loaded};
use crate::keep;
use crate::memory;
use crate::open::{self, Recovered};
use crate::options::Options;
use crate::place::{JournalNumber, Place};
use crate::prepare::Preparer;
use crate::record::Record;
use crate::scan::{ScanCursor, Scanned};
use crate::shared::Shared;
use crate::stats::Stats;
use crate::swap::{Swapped, Ttl, When};
use crate::sync::Arc;

/// Of reads in memory one of so many is counted for its journal, for all of them.
pub(crate) const READS_PER_COUNT: u64 = 16;

/// A key-value cache in a directory. All calls may come from any thread, at one time; they block on
/// the disk only where they say so.
///
/// Dropping it writes what is not yet written; [`Cache::close`] does the same and reports whether
/// it succeeded.
pub struct Cache {
    pub(crate) shared: Arc<Shared>,
    recovered: Recovered,
    /// Each may wait for those before it.
    threads: Vec<Running>,
}

/// A thread behind the cache, and how it is told to end.
struct Running {
    thread: JoinHandle<()>,
    end: fn(&Shared),
}

impl Cache {
    /// Open the cache in `path`, or make one there. Blocks: ten million keys take about a second,
    /// if the cache was closed or its journals were full.
    ///
    /// # Errors
    /// Somebody has it open; it cannot be used as it is; options are outside of their bounds;
    /// there is no room for a journal, and nothing that may be evicted for it; there is no memory
    /// for journals or index; the system.
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        let path = path.as_ref();
        if !options.create {
            // Where there is no cache not even a lock is left.
            let directory = RealDirectory::open_to_read(path)
                .map_err(Error::io(path, "opening the directory"))?;
            let names = directory.list().map_err(Error::io(path, "listing the files"))?;
            open::identity_of(&directory, &names)?;
        }
        let directory = RealDirectory::open(path, options.create)
            .map_err(Error::io(path, "opening the directory"))?
            .ok_or_else(|| Error::InUse { path: path.to_owned() })?;
        Self::open_in(Box::new(directory), options)
    }

    pub(crate) fn open_in(directory: Box<dyn Directory>, options: Options) -> Result<Self> {
        let (shared, recovered) = open::open(directory, options)?;
        let shared = Arc::new(shared);
        let next = JournalNumber(shared.active.load().number.0 + 1);
        let flusher = Flusher::new(shared.clone());
        let preparer = Preparer::new(shared.clone(), next);
        let (grower, keeper) = (shared.clone(), shared.clone());
        let mut cache = Self { shared, recovered, threads: Vec::new() };
        cache.run("journal-flush", move || flusher.run(), |shared| shared.flush.waker.close())?;
        cache.run("journal-prepare", move || preparer.run(), |shared| shared.prepare.close())?;
        cache.run(
            "journal-grow",
            move || Grower::run(&grower),
            |shared| shared.index.grower.waker.close(),
        )?;
        cache.run(
            "journal-keep",
            move || keep::run(&keeper),
            |shared| {
                shared.keep.waker.close();
                // It may wait for a journal, which cannot be made as long as others have all
                // files.
                shared.flush.tell();
            },
        )?;
        Ok(cache)
    }

    fn run(
        &mut self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
        end: fn(&Shared),
    ) -> Result<()> {
        let failed = Error::io(self.shared.directory.path(), "starting a thread");
        let thread = thread::Builder::new().name(name.into()).spawn(run).map_err(failed)?;
        self.threads.push(Running { thread, end });
        Ok(())
    }

    /// What the opening found.
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    /// Write a value under its key. What was there before is gone.
    ///
    /// Waits for the flusher where writers are faster than the disk, and for stable storage with
    /// [`crate::Durability::Always`].
    ///
    /// # Errors
    /// Key or value are too long, or the key is empty; the disk is full and nothing may be evicted,
    /// or eviction fails; a write has failed, now or before. With [`crate::Durability::Always`] a
    /// value whose sync has failed may be read until the cache is closed, and be there or not after
    /// it is opened again.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.shared.put(key, value, None)
    }

    /// The same; after `ttl` it counts as absent. By the system's clock and to the millisecond:
    /// with less than one it is absent at once, and where the clock is set back it is there for
    /// longer. The time goes on while the cache is closed.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn put_with_ttl(&self, key: &[u8], value: &[u8], ttl: Duration) -> Result<()> {
        self.shared.put(key, value, Some(self.shared.clock.expiry(ttl)))
    }

    /// Whether [`Self::put`] would take them, by their lengths: for those who write several or
    /// none.
    ///
    /// # Errors
    /// Key or value are too long, or the key is empty.
    pub fn check(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.shared.new_value(key, value, None).map(drop)
    }

    /// The same as [`Self::put`] or [`Self::put_with_ttl`] for threads that must not wait for the
    /// disk: false, and nothing is written, if it would have to. So it is always with
    /// [`crate::Durability::Always`].
    ///
    /// # Errors
    /// Key or value are too long, or the key is empty; there is no memory for a larger index; a
    /// write has failed before.
    pub fn try_put(&self, key: &[u8], value: &[u8], ttl: Option<Duration>) -> Result<bool> {
        self.shared.try_put(key, value, ttl.map(|ttl| self.shared.clock.expiry(ttl)))
    }

    /// Write a value depending on what is there, and learn what was there, in one step that nobody
    /// comes between.
    ///
    /// # Errors
    /// As [`Self::put`], and as [`Self::get`]: what is there is read, from the disk if it is not in
    /// memory.
    pub fn swap(&self, key: &[u8], value: &[u8], when: When, ttl: Ttl) -> Result<Swapped> {
        self.shared.swap(key, value, when, ttl)
    }

    /// Write a value, with or without a time to live, if there is none under its key; returns
    /// whether it was written. Of several callers one succeeds.
    ///
    /// # Errors
    /// As [`Self::put`]. May read the disk, if what is there has a time to live.
    pub fn put_if_absent(&self, key: &[u8], value: &[u8], ttl: Option<Duration>) -> Result<bool> {
        self.shared.put_if_absent(key, value, ttl.map(|ttl| self.shared.clock.expiry(ttl)))
    }

    /// Remove a key; returns whether it was there. May read the disk, if what is there has a time
    /// to live.
    ///
    /// # Errors
    /// The key is empty or too long; the disk is full and nothing may be evicted, or eviction
    /// fails; a write has failed, now or before. What cannot be read counts as there. With
    /// [`crate::Durability::Always`] a key whose removal could not be synced is absent until the
    /// cache is closed, and there or not after it is opened again.
    pub fn delete(&self, key: &[u8]) -> Result<bool> {
        self.shared.delete(key)
    }

    /// The value of a key: a view of memory, without a copy. It keeps the whole journal in memory
    /// that it is in, so those who keep it for long take its bytes with `to_vec`.
    ///
    /// Reads the disk, if the record is not in memory.
    ///
    /// # Errors
    /// The record is damaged, or cannot be read.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>> {
        Ok(self.find(key)?.map(|found| found.value))
    }

    /// The same as bytes of one's own, which keep nothing in memory but themselves. (A `Vec` and
    /// nothing with a counter: whoever wants to share them makes that of it without another copy.)
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn get_bytes(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let Some(value) = self.get(key)? else { return Ok(None) };
        memory::copy(&value).map(Some).map_err(self.shared.no_memory("a value"))
    }

    /// The value of a key, and the time that is left to it, for threads that must not wait for the
    /// disk: it is not read, and nothing is decompressed.
    ///
    /// # Errors
    /// As [`Self::get`]; what is in memory was checked when it came there.
    pub fn try_get(&self, key: &[u8]) -> Result<Lookup> {
        let hash = self.shared.hasher.hash(key);
        let found = self.read(key, hash, self.shared.index.find(hash), Reach::Memory)?;
        Ok(match found {
            Read::Found(found) => {
                Lookup::Found(found.value, found.expires_at.map(|at| self.shared.clock.left(at)))
            }
            Read::Absent => Lookup::Absent,
            Read::OnDisk => Lookup::OnDisk,
        })
    }

    /// Memory that reading a key takes for itself, in bytes: the size of its record, or up to a
    /// quarter more; 0 if there is none, or if that is in a journal in memory.
    ///
    /// On top comes what is read with it: of a plain record the rest of its pages, less than 8 KiB;
    /// of a compressed one the frames that it lies in, as they are stored and decompressed. A frame
    /// has 16 KiB where records are short, up to 256 KiB where they are long, and of a record in
    /// more than four of them the stored ones are read by the MiB.
    pub fn read_bytes(&self, key: &[u8]) -> usize {
        let named = self.shared.index.find(self.shared.hasher.hash(key));
        named.map_or(0, |place| self.shared.cold_bytes(place))
    }

    /// The same for what asks only whether the key is there: [`Self::put_if_absent`],
    /// [`Self::delete`] and [`Self::delete_many`]. 0 also for a record without a time to live, of
    /// which they read nothing.
    pub fn presence_bytes(&self, key: &[u8]) -> usize {
        let named = self.shared.index.find(self.shared.hasher.hash(key));
        let read = named.filter(|place| place.expires());
        read.map_or(0, |place| self.shared.cold_bytes(place))
    }

    /// The same as [`Self::get`] with the time that is left to it, if that has an end.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn get_with_ttl(&self, key: &[u8]) -> Result<Option<(Value, Option<Duration>)>> {
        let found = self.find(key)?;
        let left = |at| self.shared.clock.left(at);
        Ok(found.map(|found| (found.value, found.expires_at.map(left))))
    }

    /// Whether there is a value under a key. That there is none the index knows, nearly always;
    /// that there is one the record has to say, which is read from the disk if it is not in memory.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn contains(&self, key: &[u8]) -> Result<bool> {
        Ok(self.get(key)?.is_some())
    }

    #[inline]
    fn find(&self, key: &[u8]) -> Result<Option<Found>> {
        let hash = self.shared.hasher.hash(key);
        Ok(self.read(key, hash, self.shared.index.find(hash), Reach::Disk(&[]))?.found())
    }

    /// What the index has just named.
    #[inline]
    fn read(
        &self,
        key: &[u8],
        hash: KeyHash,
        mut named: Option<Place>,
        reach: Reach<'_>,
    ) -> Result<Read> {
        let shared = &*self.shared;
        loop {
            let Some((place, journal)) = shared.journals.find(&shared.index, hash, named) else {
                return Ok(Read::Absent);
            };
            let loaded = match &journal.arena {
                Some(_) => journal.load(place)?,
                None => match shared.load_cold(&journal, place, reach.pages())? {
                    Some(loaded) => loaded,
                    None => return Ok(Read::OnDisk),
                },
            };
            let record = Record::trusted(loaded.bytes()).expect("loaded as a record");
            if record.key() != key {
                return Ok(Read::Absent);
            }
            if record.has_expired(&shared.clock) {
                named = shared.index.find(hash);
                if named.is_none_or(|now| now.is_same(place)) {
                    return Ok(Read::Absent);
                }
                // It was replaced since it was seen, perhaps before its time: then there was a
                // value all the time.
                continue;
            }
            let (range, expires_at) = (record.value_range(), record.expires_at());
            shared.count_read(&journal);
            drop(journal);
            if !place.was_read() {
                shared.index.mark_read(hash, place);
            }
            return Ok(Read::Found(Found { value: Value(loaded.slice(range)), expires_at }));
        }
    }

    /// All keys and values, the oldest first. What is there all the time is returned at least once;
    /// what is written meanwhile may be returned, and what is moved twice. A value that was
    /// replaced or removed by a call that had returned before the iteration began is not returned.
    /// As long as such a call is under way the iteration may have what it writes before others read
    /// it, and what it replaces or removes after they do not any more.
    ///
    /// Records that are not in memory are read by the MiB, or in the length of the longest one: the
    /// iteration has so much memory beside the budget, and each entry or value that is kept keeps
    /// the piece that it was read in. Where damage is met it has the memory of a journal, until it
    /// is through with that.
    ///
    /// An item is an error where a journal cannot be read; the next one is of the journal behind
    /// it.
    pub fn iter(&self) -> Iter<'_> {
        Iter::new(&self.shared)
    }

    /// Some keys, at least `limit` if there are so many, and where to go on: for those who cannot
    /// keep an [`Iter`] between two calls. `ScanCursor::default()` is the beginning; any other
    /// number is a place too. Reads the disk, once for each key whose record is not in memory.
    ///
    /// Over all calls from the beginning to the end each key that is there all the time is
    /// returned; and in the end they come, whatever is written meanwhile. A key is returned twice
    /// only if it was removed and written again. One call returns fewer keys than asked if it finds
    /// few in 8,192 buckets of the index, or if they have a MiB together.
    ///
    /// # Errors
    /// The system. A record that is damaged is left out if its key is not known for sure; of a long
    /// one it may be.
    pub fn scan(&self, from: ScanCursor, limit: usize) -> Result<Scanned> {
        let scanned = self.shared.scan(from, limit, |_| true)?;
        Ok(scanned.expect("every read was let pass"))
    }

    /// The same for those who bound the memory of what is read at the same time: `may_read` hears,
    /// before each read, how many bytes it takes, and what the one before took has gone by then.
    /// That is 0 for a record in memory, its journal or itself, up to 8 KiB for the beginning of
    /// one of more than 16 KiB, and else, or where that does not tell enough, as much as
    /// [`Self::read_bytes`] says. When it says no, what was found before is returned, or `None` if
    /// that is nothing: no key is left out, and none comes twice.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn scan_within(
        &self,
        from: ScanCursor,
        limit: usize,
        may_read: impl FnMut(usize) -> bool,
    ) -> Result<Option<Scanned>> {
        self.shared.scan(from, limit, may_read)
    }

    /// Write anew what is alive in each sealed journal that holds something else too, and remove
    /// it. What is done in the background anyhow, where it is worth it, is done here for the
    /// smallest gain, and without pauses: for whoever wants the space, and has the time. Blocks;
    /// `progress` hears of each journal.
    ///
    /// The newest journal is not sealed. Damaged ones stay, but for those whose damage the opening
    /// has found by reading all of them for want of a hint. Where writers take all the room there
    /// is, it waits for eviction.
    ///
    /// # Errors
    /// The disk budget leaves no room to move records to, and nothing may be evicted, or eviction
    /// fails; a file cannot be read or written.
    pub fn compact(&self, progress: impl FnMut(&Compacted)) -> Result<Compacted> {
        self.shared.compact_all(progress)
    }

    /// Remove what openings have kept aside because it could not be read (`*.damaged`): it is in no
    /// budget. How many files those were.
    ///
    /// # Errors
    /// The system.
    pub fn remove_damaged(&self) -> Result<usize> {
        clear::remove_set_aside(&self.shared)
    }

    /// Wait until everything that was written before is on stable storage.
    ///
    /// # Errors
    /// A write or sync has failed.
    pub fn flush(&self) -> Result<()> {
        self.shared.flush.wait_for(self.shared.newest_point())
    }

    /// Why nothing can be written any more, if that is so.
    pub fn failure(&self) -> Option<Error> {
        self.shared.flush.failure()
    }

    /// Why the last work in the background has failed, if it has: removing a journal, say. It is
    /// tried again, each second. If it was eviction, who needs the room gets the same error until
    /// one has succeeded; else nothing is missing but what that work is for.
    pub fn upkeep_failure(&self) -> Option<Error> {
        self.shared.keep.failure.lock().clone()
    }

    /// Bytes that a key, its value, and a header of 24 bytes may have together.
    pub fn max_record_bytes(&self) -> usize {
        self.shared.max_record_bytes()
    }

    /// What it holds and what it has done.
    pub fn stats(&self) -> Stats {
        Stats::of(&self.shared)
    }

    /// Write everything that is not yet written, to stable storage, and end.
    ///
    /// # Errors
    /// A write or sync has failed, now or before.
    pub fn close(mut self) -> Result<()> {
        self.end();
        self.shared.flush.failure().map_or(Ok(()), Err)
    }

    fn end(&mut self) {
        while let Some(Running { thread, end }) = self.threads.pop() {
            end(&self.shared);
            if thread.join().is_err() {
                let path = self.shared.directory.path().display();
                tracing::error!("journal cache: {path}: a thread has panicked");
            }
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cache({})", self.shared.directory.path().display())
    }
}

struct Found {
    value: Value,
    expires_at: Option<u64>,
}

/// How far a read may go.
#[derive(Clone, Copy)]
enum Reach<'a> {
    Memory,
    /// The disk, where it is not among these pages.
    Disk(&'a [Pages]),
}

impl<'a> Reach<'a> {
    /// `None` if the disk must not be read.
    fn pages(self) -> Option<&'a [Pages]> {
        match self {
            Self::Memory => None,
            Self::Disk(pages) => Some(pages),
        }
    }
}

enum Read {
    Found(Found),
    Absent,
    /// Not there within [`Reach::Memory`].
    OnDisk,
}

impl Read {
    #[inline]
    fn found(self) -> Option<Found> {
        match self {
            Self::Found(found) => Some(found),
            Self::Absent | Self::OnDisk => None,
        }
    }
}

/// What [`Cache::try_get`] has found.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The value, and the time that is left to it if that has an end.
    Found(Value, Option<Duration>),
    /// There is none.
    Absent,
    /// Its journal is not in memory: [`Cache::get`] reads the disk, unless it finds the record
    /// decompressed.
    OnDisk,
}

thread_local! {
    /// Which reads are counted: by chance, so that no key and no rhythm of a caller is left out. 0:
    /// it is the thread's first.
    static CHANCE: Cell<u64> = const { Cell::new(0) };
}

/// Where a thread begins, each in another place: or those that read little would all leave out the
/// same of their reads, perhaps each one.
#[cold]
fn first_chance() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Steps by the golden ratio are spread evenly, however many there are.
    NEXT.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed) | 1
}

impl Shared {
    #[inline]
    fn count_read(&self, journal: &Journal) {
        let counts = &journal.counts;
        if journal.arena.is_none() {
            counts.reads.fetch_add(1, Ordering::Relaxed);
            // Of one that is damaged nothing comes, and its count is never taken back.
            if counts.disk_reads.load(Ordering::Relaxed) >= self.promotion_reads()
                && counts.is_sound()
            {
                self.keep.waker.wake();
            }
            return;
        }
        // Knuth's generator (MMIX); its high bits are the good ones.
        let last = match CHANCE.get() {
            0 => first_chance(),
            last => last,
        };
        let next =
            last.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        CHANCE.set(next);
        if (next >> 32).is_multiple_of(READS_PER_COUNT) {
            counts.reads.fetch_add(READS_PER_COUNT, Ordering::Relaxed);
        }
    }

    /// Begin to bring a record into the cache of the processor, if it is in memory.
    #[inline]
    fn prefetch_record(&self, place: Place) {
        if let Some(arena) = self.journals.of(place).as_ref().and_then(|it| it.arena.as_ref()) {
            arena.prefetch(place.first().byte(), place.max_len_bytes());
        }
    }
}

/// A value, as it lies in memory. It stays as it is, whatever becomes of its key.
#[derive(Clone, Debug)]
pub struct Value(pub(crate) Loaded);

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl PartialEq<[u8]> for Value {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}
