//! The public interface of an open cache, and its reads.

mod many;

use std::cell::Cell;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::allocator::Allocator;
use crate::clear;
use crate::compact_all::Compacted;
use crate::error::{Error, Result};
use crate::fetch::Pages;
use crate::files::{Directory, RealDirectory};
use crate::flush::Flusher;
use crate::hash::KeyHash;
use crate::index::Grower;
use crate::iter::Iter;
use crate::journal::{Journal, Loaded};
use crate::maintenance;
use crate::memory;
use crate::open::{self, Recovered};
use crate::options::Options;
use crate::position::{JournalNumber, Position};
use crate::record::Record;
use crate::scan::{ScanCursor, Scanned};
use crate::shared::Shared;
use crate::stats::Stats;
use crate::swap::{Swapped, Ttl, When};
use crate::sync::Arc;

/// One in this many reads from memory is counted, and counted as this many.
pub(crate) const READS_PER_COUNT: u64 = 16;

/// A key-value cache in a directory. Every method may be called from any thread concurrently.
/// Methods block on the disk only where their documentation says so.
///
/// Dropping the cache writes what is not yet written; [`Cache::close`] does the same and reports
/// whether it succeeded.
pub struct Cache {
    pub(crate) shared: Arc<Shared>,
    recovered: Recovered,
    /// In the order in which they are stopped: each may wait for those before it.
    threads: Vec<Running>,
}

/// A background thread of the cache, and the function that stops it.
struct Running {
    thread: JoinHandle<()>,
    end: fn(&Shared),
}

impl Cache {
    /// Opens the cache in `path`, or creates one there. Blocks: ten million keys take about a
    /// second if the cache was closed or its journals were full.
    ///
    /// # Errors
    /// The cache is in use; the files in `path` are not a usable cache; an option is out of bounds;
    /// there is no space for another journal and none may be evicted; there is not enough memory
    /// for journals or index; an I/O error.
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        let path = path.as_ref();
        if !options.create {
            // If there is no cache, not even a lock file is left behind.
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
        let allocator = Allocator::new(shared.clone(), next);
        let (grower, maintained) = (shared.clone(), shared.clone());
        let mut cache = Self { shared, recovered, threads: Vec::new() };
        cache.run("journal-flush", move || flusher.run(), |shared| shared.flush.waker.close())?;
        cache.run("journal-alloc", move || allocator.run(), |shared| shared.allocator.close())?;
        cache.run(
            "journal-grow",
            move || Grower::run(&grower),
            |shared| shared.index.grower.waker.close(),
        )?;
        cache.run(
            "journal-maint",
            move || maintenance::run(&maintained),
            |shared| {
                shared.maintenance.waker.close();
                // The thread may be waiting for a journal, which cannot be created while the
                // process is out of file descriptors.
                shared.flush.notify_all();
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

    /// Returns what the opening found.
    pub fn recovered(&self) -> Recovered {
        self.recovered
    }

    /// Writes a value under its key, and replaces the previous value.
    ///
    /// Waits for the flusher if writers are faster than the disk, and for stable storage with
    /// [`crate::Durability::Always`].
    ///
    /// # Errors
    /// The key or the value is too long, or the key is empty; the disk is full and nothing may be
    /// evicted, or eviction fails; a write has failed, now or earlier. With
    /// [`crate::Durability::Always`], a value whose sync failed may be readable until the cache is
    /// closed, and may or may not be present after the next opening.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.shared.put(key, value, None)
    }

    /// Writes a value that counts as absent after `ttl`. Time is that of the system clock, in
    /// milliseconds: a `ttl` below one millisecond expires at once, and a value lives longer if the
    /// clock is set back. Time passes while the cache is closed.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn put_with_ttl(&self, key: &[u8], value: &[u8], ttl: Duration) -> Result<()> {
        self.shared.put(key, value, Some(self.shared.clock.expiry(ttl)))
    }

    /// Checks whether [`Self::put`] accepts this key and value by their lengths. For callers that
    /// write several values or none.
    ///
    /// # Errors
    /// The key or the value is too long, or the key is empty.
    pub fn check(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.shared.new_value(key, value, None).map(drop)
    }

    /// Writes a value like [`Self::put`] or [`Self::put_with_ttl`], from a thread that must not
    /// wait for the disk. Returns false and writes nothing if it would have to wait, which is
    /// always so with [`crate::Durability::Always`].
    ///
    /// # Errors
    /// The key or the value is too long, or the key is empty; there is no memory for a larger
    /// index; a write has failed earlier.
    pub fn try_put(&self, key: &[u8], value: &[u8], ttl: Option<Duration>) -> Result<bool> {
        self.shared.try_put(key, value, ttl.map(|ttl| self.shared.clock.expiry(ttl)))
    }

    /// Writes a value depending on the present one, and returns the present one, atomically.
    ///
    /// # Errors
    /// As [`Self::put`], and as [`Self::get`]: the present value is read, from the disk if it is
    /// not in memory.
    pub fn swap(&self, key: &[u8], value: &[u8], when: When, ttl: Ttl) -> Result<Swapped> {
        self.shared.swap(key, value, when, ttl)
    }

    /// Writes a value, with or without a time to live, if its key is absent. Returns whether it was
    /// written; one of several concurrent callers succeeds.
    ///
    /// # Errors
    /// As [`Self::put`]. May read the disk if the present value has a time to live.
    pub fn put_if_absent(&self, key: &[u8], value: &[u8], ttl: Option<Duration>) -> Result<bool> {
        self.shared.put_if_absent(key, value, ttl.map(|ttl| self.shared.clock.expiry(ttl)))
    }

    /// Removes a key. Returns whether it was present. May read the disk if the present value has a
    /// time to live.
    ///
    /// # Errors
    /// The key is empty or too long; the disk is full and nothing may be evicted, or eviction
    /// fails; a write has failed, now or earlier. A value that cannot be read counts as present.
    /// With [`crate::Durability::Always`], a key whose removal could not be synced is absent until
    /// the cache is closed, and may or may not be present after the next opening.
    pub fn delete(&self, key: &[u8]) -> Result<bool> {
        self.shared.delete(key)
    }

    /// Returns the value of a key as a view of memory, without a copy. The view keeps the memory of
    /// its whole journal in use: copy the bytes with `to_vec` to keep a value for long.
    ///
    /// Reads the disk if the record is not in memory.
    ///
    /// # Errors
    /// The record is damaged or cannot be read.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value>> {
        Ok(self.find(key)?.map(|found| found.value))
    }

    /// Returns the value of a key as a copy, which keeps no other memory in use. (A `Vec` rather
    /// than a reference-counted type: a caller can convert it into one without another copy.)
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn get_bytes(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let Some(value) = self.get(key)? else { return Ok(None) };
        memory::copy(&value).map(Some).map_err(self.shared.no_memory("a value"))
    }

    /// Returns the value of a key and its remaining time to live, from a thread that must not wait
    /// for the disk: it reads no disk and decompresses nothing.
    ///
    /// # Errors
    /// As [`Self::get`]; what is in memory was checked when it was loaded.
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

    /// Returns the memory that reading a key allocates for the record, in bytes: the size of the
    /// record or up to a quarter more. 0 if the key is absent or its journal is in memory.
    ///
    /// What is read along with the record comes on top. For a plain record this is the rest of its
    /// pages, less than 8 KiB. For a compressed one it is the frames that contain it, stored and
    /// decompressed: a frame has 16 KiB for short records and up to 256 KiB for long ones, and the
    /// stored frames of a record in more than four of them are read a MiB at a time.
    pub fn read_bytes(&self, key: &[u8]) -> usize {
        let named = self.shared.index.find(self.shared.hasher.hash(key));
        named.map_or(0, |position| self.shared.cold_bytes(position))
    }

    /// Returns the memory that [`Self::put_if_absent`], [`Self::delete`] and [`Self::delete_many`]
    /// allocate to find out whether a key is present; see [`Self::read_bytes`]. Also 0 for a record
    /// without a time to live, which they do not read.
    pub fn presence_bytes(&self, key: &[u8]) -> usize {
        let named = self.shared.index.find(self.shared.hasher.hash(key));
        let read = named.filter(|position| position.expires());
        read.map_or(0, |position| self.shared.cold_bytes(position))
    }

    /// Returns the value of a key like [`Self::get`], with its remaining time to live if it has
    /// one.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn get_with_ttl(&self, key: &[u8]) -> Result<Option<(Value, Option<Duration>)>> {
        let found = self.find(key)?;
        let left = |at| self.shared.clock.left(at);
        Ok(found.map(|found| (found.value, found.expires_at.map(left))))
    }

    /// Returns whether a key has a value. The index nearly always knows that a key is absent; that
    /// it is present needs the record, which is read from the disk if it is not in memory.
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

    /// Reads the record that the index has just returned as `named`.
    #[inline]
    fn read(
        &self,
        key: &[u8],
        hash: KeyHash,
        mut named: Option<Position>,
        reach: Reach<'_>,
    ) -> Result<Read> {
        let shared = &*self.shared;
        loop {
            let Some((position, journal)) = shared.journals.find(&shared.index, hash, named) else {
                return Ok(Read::Absent);
            };
            let loaded = match &journal.arena {
                Some(_) => journal.load(position)?,
                None => match shared.load_cold(&journal, position, reach.pages())? {
                    Some(loaded) => loaded,
                    None => return Ok(Read::OnDisk),
                },
            };
            let record = Record::trusted(loaded.bytes()).expect("loaded as a record");
            if record.key() != key {
                return Ok(Read::Absent);
            }
            if record.has_expired(&shared.clock) {
                named = shared.index.find_after_writer(hash);
                if named.is_none_or(|now| now.is_same(position)) {
                    return Ok(Read::Absent);
                }
                // It was replaced since the index was read, perhaps before it expired; in that case
                // the key was present throughout.
                continue;
            }
            let (range, expires_at) = (record.value_range(), record.expires_at());
            shared.count_read(&journal);
            drop(journal);
            if !position.was_read() {
                shared.index.mark_read(hash, position);
            }
            return Ok(Read::Found(Found { value: Value(loaded.slice(range)), expires_at }));
        }
    }

    /// Returns an iterator over all keys and values, oldest first. A key that is present throughout
    /// is returned at least once; a value written during the iteration may be returned, and one
    /// that is moved may be returned twice. A value that was replaced or removed by a call that
    /// returned before the iteration began is not returned. While such a call is in progress, the
    /// iteration may see the new value before other readers do, and the old value after they no
    /// longer do.
    ///
    /// Records that are not in memory are read a MiB at a time, or the length of the longest
    /// record. This memory is outside the budget, and each entry or value that the caller keeps
    /// holds the piece that it was read in. From damage to the end of that journal, the iteration
    /// uses the memory of a whole journal.
    ///
    /// An item is an error if a journal cannot be read; the next item is from the journal after it.
    pub fn iter(&self) -> Iter<'_> {
        Iter::new(&self.shared)
    }

    /// Returns at least `limit` keys if there are that many, and the cursor to continue from. For
    /// callers that cannot keep an [`Iter`] between calls. `ScanCursor::default()` is the
    /// beginning; any other number is a valid cursor too. Reads the disk once for each key whose
    /// record is not in memory.
    ///
    /// A full scan, from the beginning to the end, returns each key that is present throughout, and
    /// it ends whatever is written meanwhile. A key is returned twice only if it was removed and
    /// written again. A call returns fewer keys than requested if it finds few in 8,192 buckets of
    /// the index, or if the keys reach a MiB together.
    ///
    /// # Errors
    /// An I/O error. A damaged record is left out if its key is not known for certain; the key of a
    /// long damaged record may be returned.
    pub fn scan(&self, from: ScanCursor, limit: usize) -> Result<Scanned> {
        let scanned = self.shared.scan(from, limit, |_| true)?;
        Ok(scanned.expect("every read was let pass"))
    }

    /// Scans like [`Self::scan`] for callers that bound the memory of concurrent reads. Before each
    /// read it calls `may_read` with the number of bytes that the read takes; the memory of the
    /// previous read is free by then.
    ///
    /// The number is 0 for a record whose journal is in memory or that is itself cached; up to 8
    /// KiB for the beginning of a record of more than 16 KiB; otherwise, or where the beginning is
    /// not sufficient, what [`Self::read_bytes`] returns. If `may_read` returns false, the call
    /// returns what was found before, or `None` if that is nothing: no key is left out and none is
    /// returned twice.
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

    /// Rewrites the live records of each sealed journal that contains anything else, and removes
    /// the journal. The maintenance thread does this where it is worthwhile; this call does it for
    /// the smallest gain and without pauses, for callers that want the space now. Blocks; calls
    /// `progress` after each journal.
    ///
    /// The newest journal is not sealed. Damaged journals stay, except those without a hint whose
    /// damage the opening found by reading them whole. If writers take all available space, the
    /// call waits for eviction.
    ///
    /// # Errors
    /// The disk budget leaves no space to move records to, and nothing may be evicted or eviction
    /// fails; a file cannot be read or written.
    pub fn compact(&self, progress: impl FnMut(&Compacted)) -> Result<Compacted> {
        self.shared.compact_all(progress)
    }

    /// Removes the files that openings set aside because they could not be used (`*.damaged`), and
    /// returns their number. They are not part of any budget.
    ///
    /// # Errors
    /// An I/O error.
    pub fn remove_damaged(&self) -> Result<usize> {
        clear::remove_set_aside(&self.shared)
    }

    /// Waits until everything written before the call is on stable storage.
    ///
    /// # Errors
    /// A write or sync has failed.
    pub fn flush(&self) -> Result<()> {
        self.shared.flush.wait_for(self.shared.newest_point())
    }

    /// Returns why nothing can be written any more, if that is so.
    pub fn failure(&self) -> Option<Error> {
        self.shared.flush.failure()
    }

    /// Returns why the last background task failed, if it did; for example, a journal could not be
    /// removed. The task is retried every second. If it was eviction, writes that need the space
    /// fail with the same error until an eviction succeeds; otherwise only the purpose of that task
    /// is affected.
    pub fn upkeep_failure(&self) -> Option<Error> {
        self.shared.maintenance.failure.lock().clone()
    }

    /// Returns the maximum total length of a key, its value and a header of 24 bytes.
    pub fn max_record_bytes(&self) -> usize {
        self.shared.max_record_bytes()
    }

    /// Returns what the cache holds and what it has done.
    pub fn stats(&self) -> Stats {
        Stats::of(&self.shared)
    }

    /// Writes everything that is not yet written to stable storage, and closes the cache.
    ///
    /// # Errors
    /// A write or sync has failed, now or earlier.
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

/// What a read may access.
#[derive(Clone, Copy)]
enum Reach<'a> {
    Memory,
    /// The disk, for what these pages do not contain.
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
    /// Not available within [`Reach::Memory`].
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

/// The result of [`Cache::try_get`].
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The value, and its remaining time to live if it has one.
    Found(Value, Option<Duration>),
    /// The key is absent.
    Absent,
    /// The journal is not in memory. [`Cache::get`] reads the disk, unless a decompressed copy of
    /// the record is cached.
    OnDisk,
}

thread_local! {
    /// State of the generator that selects which reads are counted: by chance, so that no key and
    /// no access pattern is left out. 0: the thread has not read yet.
    static CHANCE: Cell<u64> = const { Cell::new(0) };
}

/// Returns the initial state of a thread, different for each thread: otherwise threads with few
/// reads would all skip the same ones of their reads, perhaps all of them.
#[cold]
fn random_seed() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Multiples of the golden ratio are spread evenly, however many there are.
    NEXT.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed) | 1
}

impl Shared {
    #[inline]
    fn count_read(&self, journal: &Journal) {
        let counts = &journal.counts;
        if journal.arena.is_none() {
            counts.reads.fetch_add(1, Ordering::Relaxed);
            // A damaged journal is not promoted, and its count would never be reset.
            if counts.disk_reads.load(Ordering::Relaxed) >= self.promotion_reads()
                && counts.is_sound()
            {
                self.maintenance.waker.wake();
            }
            return;
        }
        // Knuth's generator (MMIX); its high bits are the good ones.
        let last = match CHANCE.get() {
            0 => random_seed(),
            last => last,
        };
        let next =
            last.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        CHANCE.set(next);
        if (next >> 32).is_multiple_of(READS_PER_COUNT) {
            counts.reads.fetch_add(READS_PER_COUNT, Ordering::Relaxed);
        }
    }

    /// Starts loading a record into the processor's cache, if it is in memory.
    #[inline]
    fn prefetch_record(&self, position: Position) {
        if let Some(arena) = self.journals.of(position).as_ref().and_then(|it| it.arena.as_ref()) {
            arena.prefetch(position.first().byte(), position.max_len_bytes());
        }
    }
}

/// A value as a view of memory. It does not change, whatever happens to its key.
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
