//! The disk cache: blocks and indexes read from objects, in a journal cache on a local disk. It is
//! between the block cache and the object store and outlives the process. See `docs/disk-cache.md`.
//!
//! Nothing depends on it. What it returns is verified like data from the object store; anything
//! that fails or takes too long is treated as a miss; and a reader never waits for a write.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use alluvium_journal::{Cache, Compression, Contents, Durability, Error, Lookup, WhenFull};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use rustix::process::{Resource, getrlimit};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::background::lower_priority;
use crate::damage::Damage;
use crate::options::DiskCacheOptions;

/// Concurrent reads of the disk.
const READS_AT_A_TIME: usize = 4;
/// A slower disk is no help: the object store usually responds much sooner. (Threads of low
/// priority wait for the log's writes if the log is on the same disk.)
const READ_WITHIN: Duration = Duration::from_secs(5);
/// This number of failures without a success in between is not by chance.
const MOST_FAILURES: u32 = 8;
/// Bound on what waits to be written: twice what one GET returns.
const QUEUE_BYTES: u64 = 16 << 20;
/// How long closing the store waits for the disk cache. A slower disk does not respond at all.
const CLOSE_WITHIN: Duration = Duration::from_secs(10);
/// Distinguishes its directory from that of another cache, which must not be emptied.
const CONTENTS: Contents = Contents(*b"blk1");
const MIB: u64 = 1 << 20;

/// Statistics of the disk cache since the start. All 0 without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCacheStats {
    /// It is open, and reads use it.
    pub is_open: bool,
    /// It could not be opened, was given up after errors, or accepts no more writes. This stays so
    /// until the store is opened again.
    pub has_failed: bool,
    /// Blocks and indexes in it.
    pub entries: usize,
    /// Disk space that it uses, in bytes.
    pub disk_bytes: u64,
    /// Memory that it uses, in bytes, index included.
    pub memory_bytes: u64,
    /// Blocks and indexes that were found.
    pub hits: u64,
    /// Their size in bytes.
    pub hit_bytes: u64,
    /// Blocks and indexes that were not found.
    pub misses: u64,
    /// Blocks and indexes that were written to it.
    pub writes: u64,
    /// Their size in bytes.
    pub written_bytes: u64,
    /// Blocks and indexes that were not written to it: its disk was too slow, they are too large,
    /// or a write failed.
    pub dropped_writes: u64,
    /// Blocks and indexes that were evicted.
    pub evicted: u64,
    /// Blocks and indexes that were damaged.
    pub damaged: u64,
    /// Reads and writes that failed or took too long.
    pub errors: u64,
}

pub(super) struct DiskCache {
    shared: Arc<Shared>,
    /// Threads that may wait for the disk. `None`: they could not be started, or have ended.
    reads: Option<Runtime>,
    /// Completes when the thread that opens, writes and closes the cache has ended.
    ended: Mutex<Option<oneshot::Receiver<()>>>,
}

struct Shared {
    directory: PathBuf,
    /// Set while it is open. Code that must not block does not wait for this lock either: it is
    /// held while the disk is read.
    cache: RwLock<Option<Cache>>,
    /// `None`: nothing is accepted any more, and the thread ends.
    writes: Mutex<Option<Sender<Write>>>,
    /// Bytes in that queue.
    queued_bytes: AtomicU64,
    /// Nothing is read or written any more.
    is_off: AtomicBool,
    /// Nothing is written any more.
    is_read_only: AtomicBool,
    has_failed: AtomicBool,
    failures_in_a_row: AtomicU32,
    numbers: Numbers,
}

#[derive(Default)]
struct Numbers {
    hits: AtomicU64,
    hit_bytes: AtomicU64,
    misses: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    dropped_writes: AtomicU64,
    damaged: AtomicU64,
    errors: AtomicU64,
}

struct Write {
    key: Vec<u8>,
    bytes: Bytes,
}

/// Returns the key of a piece of an object: its position, and the object's name, which is never
/// used for other bytes.
fn key(name: &str, position: u64) -> Vec<u8> {
    [position.to_le_bytes().as_slice(), name.as_bytes()].concat()
}

impl DiskCache {
    /// Starts opening the cache in the background. Nothing is found until that is done, or ever if
    /// it fails.
    pub(super) fn start(options: &DiskCacheOptions) -> Self {
        let options = options.clone();
        Self::start_with(options.directory.clone(), move || open(&options))
    }

    fn start_with(
        directory: PathBuf,
        open: impl FnOnce() -> Result<Cache, String> + Send + 'static,
    ) -> Self {
        let (sender, writes) = mpsc::channel();
        let shared = Arc::new(Shared {
            directory,
            cache: RwLock::new(None),
            writes: Mutex::new(Some(sender)),
            queued_bytes: AtomicU64::new(0),
            is_off: AtomicBool::new(false),
            is_read_only: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            failures_in_a_row: AtomicU32::new(0),
            numbers: Numbers::default(),
        });
        let name = "alluvium-disk";
        let reads = Builder::new_current_thread()
            .max_blocking_threads(READS_AT_A_TIME)
            .thread_name(name)
            .on_thread_start(lower_priority)
            .build()
            .inspect_err(|error| shared.give_up(&format!("cannot start its threads: {error}")))
            .ok();
        let (ending, ended) = oneshot::channel();
        let worker = shared.clone();
        let started = thread::Builder::new().name(name.into()).spawn(move || {
            // This also applies to the cache's own threads: a new thread inherits the priorities of
            // its creator.
            lower_priority();
            worker.run(open, &writes);
            drop(ending);
        });
        if let Err(error) = started {
            shared.give_up(&format!("cannot start its thread: {error}"));
        }
        Self { shared, reads, ended: Mutex::new(Some(ended)) }
    }

    /// Whether it may have the piece at this position. Does not wait.
    pub(super) fn may_have(&self, name: &str, position: u64) -> bool {
        self.shared.may_have(&key(name, position))
    }

    /// Returns the pieces of an object at `positions`, in their order, as far as it has them. The
    /// caller verifies them.
    pub(super) async fn get(&self, name: &str, positions: &[u64]) -> Vec<Option<Bytes>> {
        let keys: Vec<_> = positions.iter().map(|position| key(name, *position)).collect();
        let found = match self.shared.may_have_any(&keys) {
            true => self.read(keys).await,
            false => vec![None; positions.len()],
        };
        let numbers = &self.shared.numbers;
        for piece in &found {
            match piece {
                Some(bytes) => {
                    numbers.hits.fetch_add(1, Ordering::Relaxed);
                    numbers.hit_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                }
                None => {
                    numbers.misses.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        found
    }

    /// Reads on a thread that may block.
    async fn read(&self, keys: Vec<Vec<u8>>) -> Vec<Option<Bytes>> {
        let count = keys.len();
        let Some(reads) = &self.reads else { return vec![None; count] };
        let shared = self.shared.clone();
        let (sender, receiver) = oneshot::channel();
        drop(reads.spawn_blocking(move || {
            // The caller may have stopped waiting.
            let read = |key: &Vec<u8>| if sender.is_closed() { None } else { shared.read(key) };
            let found: Vec<_> = keys.iter().map(read).collect();
            let _ = sender.send(found);
        }));
        match timeout(READ_WITHIN, receiver).await {
            Ok(Ok(found)) => found,
            // It is being closed.
            Ok(Err(_)) => vec![None; count],
            Err(_) => {
                self.shared.failed(&format!("no response within {READ_WITHIN:?}"));
                vec![None; count]
            }
        }
    }

    /// Stores a piece that was read from an object and verified, if there is space in the queue.
    /// Does not wait.
    pub(super) fn put(&self, name: &str, position: u64, bytes: &Bytes) {
        let shared = &*self.shared;
        let writes = shared.writes.lock();
        let Some(sender) = &*writes else { return };
        let len_bytes = bytes.len() as u64;
        // No other thread adds to it.
        let is_full = shared.queued_bytes.load(Ordering::Relaxed) + len_bytes > QUEUE_BYTES;
        if is_full || shared.is_read_only.load(Ordering::Relaxed) {
            shared.numbers.dropped_writes.fetch_add(1, Ordering::Relaxed);
            return;
        }
        shared.queued_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        let _ = sender.send(Write { key: key(name, position), bytes: bytes.clone() });
    }

    /// Records that a piece did not match its checksum. It is read from the object store, which
    /// replaces it.
    pub(super) fn damaged(&self, name: &str, damage: &Damage) {
        self.shared.numbers.damaged.fetch_add(1, Ordering::Relaxed);
        tracing::debug!("disk cache {}: {name} is {damage}", self.shared.directory.display());
    }

    /// Writes what the journals have, and closes them, so that the directory can be opened again.
    /// Waits at most 10 s for a disk that does not respond.
    pub(super) async fn close(&self) {
        self.shared.end();
        let ended = self.ended.lock().take();
        if let Some(ended) = ended
            && timeout(CLOSE_WITHIN, ended).await.is_err()
        {
            tracing::warn!(
                "disk cache {}: it is not closed after {CLOSE_WITHIN:?}; the store no longer \
                 waits for it",
                self.shared.directory.display()
            );
        }
    }

    pub(super) fn stats(&self) -> DiskCacheStats {
        let Shared { numbers, is_off, has_failed, .. } = &*self.shared;
        let cache = self.shared.cache.try_read();
        let held = cache.as_ref().and_then(|cache| cache.as_ref()).map(Cache::stats);
        let is_open = held.is_some() && !is_off.load(Ordering::Relaxed);
        let held = held.unwrap_or_default();
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        DiskCacheStats {
            is_open,
            has_failed: has_failed.load(Ordering::Relaxed),
            entries: held.entries,
            disk_bytes: held.disk_bytes,
            memory_bytes: (held.memory_bytes + held.index_bytes + held.table_bytes) as u64,
            hits: load(&numbers.hits),
            hit_bytes: load(&numbers.hit_bytes),
            misses: load(&numbers.misses),
            writes: load(&numbers.writes),
            written_bytes: load(&numbers.written_bytes),
            dropped_writes: load(&numbers.dropped_writes),
            evicted: held.evicted,
            damaged: load(&numbers.damaged),
            errors: load(&numbers.errors),
        }
    }
}

impl Drop for DiskCache {
    fn drop(&mut self) {
        self.shared.end();
        // The last owner may be a task, which must not block.
        if let Some(reads) = self.reads.take() {
            reads.shutdown_background();
        }
    }
}

impl Shared {
    fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Relaxed)
    }

    fn may_have_any(&self, keys: &[Vec<u8>]) -> bool {
        keys.iter().any(|key| self.may_have(key))
    }

    fn may_have(&self, key: &[u8]) -> bool {
        if self.is_off() {
            return false;
        }
        let Some(cache) = self.cache.try_read() else { return false };
        let Some(cache) = cache.as_ref() else { return false };
        !matches!(cache.try_get(key), Ok(Lookup::Absent))
    }

    /// Reads a value. Waits for the disk.
    fn read(&self, key: &[u8]) -> Option<Bytes> {
        if self.is_off() {
            return None;
        }
        match self.cache.read().as_ref()?.get(key) {
            Ok(value) => {
                // A miss shows nothing about the disk.
                let value = value?;
                self.failures_in_a_row.store(0, Ordering::Relaxed);
                // Copied: the value would keep the memory of a whole journal alive, or more than
                // its own.
                Some(Bytes::copy_from_slice(&value))
            }
            Err(error) => {
                self.count_error(&error);
                None
            }
        }
    }

    /// Runs the cache's thread, from opening to closing the cache.
    fn run(&self, open: impl FnOnce() -> Result<Cache, String>, writes: &Receiver<Write>) {
        let began = Instant::now();
        match open() {
            Ok(cache) => {
                let (found, stats) = (cache.recovered(), cache.stats());
                let (directory, time) = (self.directory.display(), began.elapsed());
                tracing::info!(
                    "disk cache {directory}: {} blocks and indexes in {} MiB, opened in {:.3} s",
                    found.entries,
                    stats.disk_bytes / MIB,
                    time.as_secs_f64()
                );
                if found.damaged_bytes > 0 {
                    tracing::warn!(
                        "disk cache {directory}: {} bytes were damaged; their contents are read \
                         from the object store again",
                        found.damaged_bytes
                    );
                }
                *self.cache.write() = Some(cache);
            }
            Err(why) => return self.give_up(&why),
        }
        for write in writes {
            self.write(&write);
            self.queued_bytes.fetch_sub(write.bytes.len() as u64, Ordering::Relaxed);
        }
        // Waits for reads in progress.
        let cache = self.cache.write().take();
        if let Some(Err(error)) = cache.map(Cache::close) {
            tracing::warn!("disk cache: cannot close it cleanly: {error}");
        }
    }

    /// Writes a piece. Waits for the disk if that is slower than the pieces arrive.
    fn write(&self, Write { key, bytes }: &Write) {
        let cache = self.cache.read();
        let Some(cache) = cache.as_ref().filter(|_| !self.is_off()) else { return };
        let Err(error) = cache.put(key, bytes) else {
            self.numbers.writes.fetch_add(1, Ordering::Relaxed);
            self.numbers.written_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            return;
        };
        self.numbers.dropped_writes.fetch_add(1, Ordering::Relaxed);
        if matches!(error, Error::ValueTooLong { .. }) {
            return;
        }
        if cache.failure().is_none() {
            // Space may become free again.
            self.count_error(&error);
        } else if !self.is_read_only.swap(true, Ordering::Relaxed) {
            self.numbers.errors.fetch_add(1, Ordering::Relaxed);
            self.has_failed.store(true, Ordering::Relaxed);
            tracing::error!(
                "disk cache {}: {error}. Nothing is added to it until the server is restarted; \
                 its contents are still used",
                self.directory.display()
            );
        }
    }

    fn count_error(&self, error: &Error) {
        match error {
            // The piece is written again; only its own bytes are wrong.
            Error::Corrupt { .. } => {
                self.numbers.damaged.fetch_add(1, Ordering::Relaxed);
            }
            // The disk is filled by other files. What is cached can still be read.
            Error::DiskFull { .. } => {
                self.numbers.errors.fetch_add(1, Ordering::Relaxed);
            }
            error => self.failed(error),
        }
    }

    /// Counts a failed operation.
    fn failed(&self, error: &dyn fmt::Display) {
        self.numbers.errors.fetch_add(1, Ordering::Relaxed);
        tracing::debug!("disk cache {}: {error}", self.directory.display());
        let in_a_row = self.failures_in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        if in_a_row >= MOST_FAILURES {
            self.give_up(&format!("{in_a_row} failures in a row, the last one: {error}"));
        }
    }

    /// Stops using the cache.
    fn give_up(&self, why: &str) {
        if self.end() {
            self.has_failed.store(true, Ordering::Relaxed);
            tracing::error!(
                "disk cache {}: {why}. The server does without it until it is restarted",
                self.directory.display()
            );
        }
    }

    /// Ends all reads and writes; returns whether they had not ended before.
    fn end(&self) -> bool {
        let is_new = !self.is_off.swap(true, Ordering::Relaxed);
        drop(self.writes.lock().take());
        is_new
    }
}

/// Opens the cache of these options. A cache that is unusable is emptied; an error is returned if
/// it cannot be opened.
fn open(options: &DiskCacheOptions) -> Result<Cache, String> {
    open_with(options, getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
}

/// Opens the cache in a process with this limit of open files.
fn open_with(options: &DiskCacheOptions, files: u64) -> Result<Cache, String> {
    // Otherwise there would be none left for connections.
    let most_journals = files / 2;
    let journals = options.journals();
    if journals > most_journals {
        return Err(format!(
            "it needs {journals} open files, but the process may have only {files}: raise the \
             limit (ulimit -n, LimitNOFILE) or give the disk cache more memory"
        ));
    }
    let directory = &options.directory;
    let describe = |error: Error| error.to_string();
    let unusable = match Cache::open(directory, journal_options(options)) {
        Ok(cache) => {
            let journals = journals_of(&cache, options);
            if journals <= most_journals {
                return without_damaged(cache);
            }
            format!(
                "{}: its journals were created for a smaller cache; there would be {journals}, \
                 each an open file, but the process may have only {files}",
                directory.display()
            )
        }
        Err(error @ Error::NoCache { .. }) => error.to_string(),
        Err(error) => return Err(error.to_string()),
    };
    tracing::warn!("disk cache: {unusable}. It is emptied");
    alluvium_journal::clear(directory, CONTENTS).map_err(describe)?;
    without_damaged(Cache::open(directory, journal_options(options)).map_err(describe)?)
}

/// Returns the number of journals that an open cache may have. Its journals keep the size that they
/// once got: a power of two.
fn journals_of(cache: &Cache, options: &DiskCacheOptions) -> u64 {
    options.max_disk_bytes / cache.max_record_bytes().next_power_of_two() as u64
}

/// Removes damaged journals, since their contents can be read again from the object store.
fn without_damaged(cache: Cache) -> Result<Cache, String> {
    cache.remove_damaged().map_err(|error| error.to_string())?;
    Ok(cache)
}

fn journal_options(options: &DiskCacheOptions) -> alluvium_journal::Options {
    alluvium_journal::Options {
        memory_bytes: options.memory_bytes,
        max_disk_bytes: options.max_disk_bytes,
        journal_bytes: options.journal_bytes(),
        durability: Durability::None,
        when_full: WhenFull::Evict,
        // Producers have compressed what is worth compressing.
        compression: Compression::None,
        contents: CONTENTS,
        create: true,
    }
}

#[cfg(test)]
mod tests;
