//! The flusher: a thread that writes what is published, syncs it and seals full journals.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use alluvium_device::{AlignedBuf, PAGE_BYTES};
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::journal::{FIRST_RECORD, Journal, file_name};
use crate::options::Durability;
use crate::pace::Pace;
use crate::position::JournalNumber;
use crate::shared::{CHUNK_BYTES, Point, Shared};
use crate::sync::Arc;
use crate::waker::Waker;

/// A reserved range is published as soon as its bytes are copied.
const PUBLISHED_WITHIN: Duration = Duration::from_millis(1);
/// The minimum of [`Durability::Interval`].
const LEAST_INTERVAL: Duration = Duration::from_millis(1);

/// Coordinates writers, the flusher and the allocator.
pub(crate) struct Flush {
    pub(crate) waker: Waker,
    pub(crate) state: Mutex<State>,
    /// Notified when the spare is ready, more is durable, or a failure has occurred.
    pub(crate) changed: Condvar,
    /// Held while the directory is synced: [`Shared::sync_names`].
    pub(crate) naming: Mutex<()>,
    /// Set before the waiters on `state` are notified.
    failed: OnceLock<Error>,
    /// Whether there is a [`State::pace`].
    has_pace: bool,
    /// Writers have to wait for the disk: [`State::pace`]. Changed with `state` locked, so that no
    /// waiter sees it still set after it was cleared.
    is_behind: AtomicBool,
}

pub(crate) struct State {
    /// Journals that are not completely written, newest last.
    pub(crate) pending: VecDeque<Arc<Journal>>,
    /// Takes over when the newest journal is full.
    pub(crate) spare: Option<Arc<Journal>>,
    /// Files were created since the directory was last synced.
    pub(crate) has_new_names: bool,
    /// Everything before it is on stable storage.
    durable: Point,
    /// A thread waits for everything before it to be on stable storage.
    wanted: Point,
    pub(crate) shortage: Shortage,
    /// The last attempt to create a journal failed for lack of file descriptors or memory, which is
    /// temporary.
    pub(crate) lacks_resources: bool,
    /// Number of times that space was made.
    pub(crate) space_generation: u64,
    /// Why eviction failed, if it was the last attempt to make space. It is retried.
    pub(crate) eviction_failure: Option<Error>,
    /// With [`Durability::Interval`]: how much may wait for stable storage.
    pace: Option<Pace>,
}

impl State {
    /// Returns the number of bytes appended to journals that are not on stable storage.
    fn unsynced_bytes(&self) -> usize {
        let of = |journal: &Arc<Journal>| {
            let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
            let is_begun = journal.number == self.durable.number;
            let begin = if is_begun { self.durable.byte } else { FIRST_RECORD };
            // The journal was just found full: its end is at or slightly below the capacity.
            let end = arena.taken_bytes().unwrap_or_else(|| arena.capacity_bytes());
            end.saturating_sub(begin)
        };
        self.pending.iter().map(of).sum()
    }
}

/// Whether space for the spare was lacking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// There was space, or there is more now.
    None,
    /// There was none, but a reservation has been released since, and the allocator checks again.
    /// Until it has, no writer is refused and nothing new is reserved.
    Unknown,
    /// There was none.
    Known,
}

impl Flush {
    /// `newest` is the only journal that is not completely written.
    pub(crate) fn new(newest: Arc<Journal>, durability: Durability) -> Self {
        let start = Point { number: newest.number, byte: FIRST_RECORD };
        let pace = interval(durability).map(Pace::new);
        let has_pace = pace.is_some();
        Self {
            state: Mutex::new(State {
                pending: VecDeque::from([newest]),
                spare: None,
                has_new_names: false,
                durable: start,
                wanted: start,
                shortage: Shortage::None,
                lacks_resources: false,
                space_generation: 0,
                eviction_failure: None,
                pace,
            }),
            changed: Condvar::new(),
            naming: Mutex::new(()),
            failed: OnceLock::new(),
            has_pace,
            is_behind: AtomicBool::new(false),
            waker: Waker::default(),
        }
    }

    /// Returns why nothing is written any more, if that is so.
    #[inline]
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failed.get().cloned()
    }

    /// Waits until everything before `point` is on stable storage.
    pub(crate) fn wait_for(&self, point: Point) -> Result<()> {
        let mut state = self.state.lock();
        while state.durable < point {
            if let Some(error) = self.failure() {
                return Err(error);
            }
            state.wanted = state.wanted.max(point);
            self.waker.wake();
            self.changed.wait(&mut state);
        }
        Ok(())
    }

    /// Returns whether the disk does not keep up: what is put now would not be on stable storage
    /// within the interval.
    #[inline]
    pub(crate) fn is_behind(&self) -> bool {
        self.is_behind.load(Ordering::Relaxed)
    }

    /// Re-evaluates [`Self::is_behind`] after an append or a sync.
    pub(crate) fn update_behind(&self, state: &State) {
        let Some(pace) = &state.pace else { return };
        self.is_behind.store(pace.is_exceeded(state.unsynced_bytes()), Ordering::Relaxed);
    }

    /// Re-evaluates [`Self::is_behind`] when there was nothing to sync: a journal that a writer has
    /// just found full looks longer than it is, and that writer may wait for those that wait behind
    /// it.
    fn recheck_behind(&self) {
        let state = self.state.lock();
        self.update_behind(&state);
        // Waiters that keep waiting would wake the flusher, which would repeat this.
        if !self.is_behind() {
            self.changed.notify_all();
        }
    }

    /// Waits until the disk has caught up or a write has failed. Must be called without a lock.
    /// Background tasks that make space wait too: their appends come before those of others.
    #[cold]
    pub(crate) fn wait_while_behind(&self) {
        let mut state = self.state.lock();
        while self.is_behind() && self.failure().is_none() {
            self.waker.wake();
            self.changed.wait(&mut state);
        }
    }

    /// Wakes the flusher: there is another chunk to write.
    pub(crate) fn wake(&self) {
        if self.has_pace {
            let state = self.state.lock();
            self.update_behind(&state);
        }
        self.waker.wake();
    }

    /// Returns the oldest journal that is not completely written.
    pub(crate) fn oldest_unwritten(&self) -> JournalNumber {
        self.state.lock().pending[0].number
    }

    /// Returns whether a journal has to be removed, whatever the budget says.
    pub(crate) fn is_short(&self) -> bool {
        self.state.lock().shortage != Shortage::None
    }

    /// Returns whether the newest journal has no successor and none can be created now.
    pub(crate) fn lacks_spare(&self) -> bool {
        let state = self.state.lock();
        state.spare.is_none() && state.shortage == Shortage::Known
    }

    /// Records that nothing can be written any more.
    pub(crate) fn fail(&self, error: Error) {
        let _ = self.failed.get_or_init(|| {
            tracing::error!("journal cache: {error}; nothing is written any more");
            error
        });
        self.notify_all();
    }

    /// Wakes all waiters to check their condition again.
    pub(crate) fn notify_all(&self) {
        // Under the lock, so that no thread is between its check and its wait.
        let _state = self.state.lock();
        self.changed.notify_all();
    }
}

/// The state of the flusher thread.
pub(crate) struct Flusher {
    shared: Arc<Shared>,
    /// How much of the oldest journal in [`State::pending`] is in its file.
    written_bytes: usize,
    /// Journals written to since they were synced.
    unsynced: Vec<Arc<Journal>>,
    /// Everything written before this time is on stable storage.
    synced_at: Instant,
    /// Since the last sync: bytes written, and the time this took.
    unsynced_bytes: usize,
    writing: Duration,
}

/// What the flusher found to do.
#[derive(PartialEq, Eq)]
enum Step {
    More,
    Idle,
}

impl Flusher {
    /// Nothing of the newest journal is written yet.
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            written_bytes: FIRST_RECORD,
            unsynced: Vec::new(),
            synced_at: Instant::now(),
            unsynced_bytes: 0,
            writing: Duration::ZERO,
        }
    }

    /// Runs until the cache is closed and everything is written and synced, or until a write fails.
    pub(crate) fn run(mut self) {
        let shared = self.shared.clone();
        let _reporter = PanicReporter(&shared);
        shared.flush.waker.register();
        loop {
            shared.flush.waker.begin_check();
            // Reported by another thread: the allocator, or one that removes journals.
            if shared.flush.failure().is_some() {
                return;
            }
            // First: what was written before closing is then written.
            let is_closing = shared.flush.waker.is_closing();
            match self.run_once(is_closing) {
                Ok(Step::More) => {}
                Ok(Step::Idle) if is_closing => return self.finish(),
                Ok(Step::Idle) => self.sleep(),
                Err(error) => return shared.flush.fail(error),
            }
        }
    }

    fn sleep(&self) {
        let (is_waited_for, journal) = {
            let state = self.shared.flush.state.lock();
            (state.wanted > state.durable, state.pending[0].clone())
        };
        // A writer has reserved a range and not yet filled it; it does not notify when it has.
        let is_publishing =
            is_waited_for || self.shared.flush.is_behind() || self.lacks_bytes(&journal);
        let publishing = is_publishing.then_some(PUBLISHED_WITHIN);
        // If the interval has passed, a writer is in the middle of a put.
        let interval = self.interval().map(|interval| {
            let left = interval.saturating_sub(self.synced_at.elapsed());
            if left.is_zero() { PUBLISHED_WITHIN } else { left }
        });
        self.shared.flush.waker.sleep([publishing, interval].into_iter().flatten().min());
    }

    /// Returns whether more of the oldest pending journal is reserved than published, so that it
    /// cannot be written: a whole chunk, or the rest of a full journal, whose memory and space
    /// others may wait for.
    fn lacks_bytes(&self, journal: &Journal) -> bool {
        let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
        match (arena.end_bytes(), arena.taken_bytes()) {
            (Some(end), _) => self.written_bytes < end,
            (None, Some(taken)) => taken / CHUNK_BYTES > self.written_bytes / CHUNK_BYTES,
            // Just found full.
            (None, None) => true,
        }
    }

    fn interval(&self) -> Option<Duration> {
        interval(self.shared.options.durability)
    }

    /// Does everything that there is to do now, in steps: a chunk, a sync.
    fn run_once(&mut self, is_closing: bool) -> Result<Step> {
        // What arrives during the write and sync may not be included.
        let begun = Instant::now();
        let (wanted, durable) = {
            let state = self.shared.flush.state.lock();
            (state.wanted, state.durable)
        };
        let is_due = self.interval().is_some_and(|interval| begun - self.synced_at >= interval);
        // Writers wait for a sync, although no thread has requested one.
        let is_behind = self.shared.flush.is_behind();
        let is_asked = is_closing || is_due || wanted > durable || is_behind;
        // Everything put until now. (Only needed with an interval.)
        let put = self.interval().filter(|_| is_asked).map(|_| self.shared.newest_point());
        let (wrote, reached) = self.write(is_asked)?;
        // Waiters get what is written so far: with more writers than the disk can take there is
        // always more.
        let is_more = is_asked && reached > durable;
        if is_more {
            self.sync(reached)?;
        } else if is_behind {
            self.shared.flush.recheck_behind();
        }
        // Not after the sync of a sealed journal: what is in the next one was already there. Nor if
        // a writer is in the middle of a put: what others have put after it is not durable,
        // however old it is.
        if put.is_some_and(|put| reached >= put) {
            self.synced_at = begun;
        }
        Ok(if is_more || wrote { Step::More } else { Step::Idle })
    }

    /// Writes what is published without a hole: whole chunks, or `all` of it. Returns whether
    /// anything was written, and the position up to which everything is.
    fn write(&mut self, all: bool) -> Result<(bool, Point)> {
        let mut has_written = false;
        loop {
            let journal = self.shared.flush.state.lock().pending[0].clone();
            let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
            // The end is read first: what is published once the end is known is then included in
            // the comparison.
            let end = arena.end_bytes();
            let published = arena.published_from(self.written_bytes);
            let is_complete = end.is_some_and(|end| published >= end);
            let limit =
                if all || is_complete { published } else { published / CHUNK_BYTES * CHUNK_BYTES };
            if limit > self.written_bytes {
                self.write_to(&journal, limit)?;
                has_written = true;
            }
            let reached = Point { number: journal.number, byte: self.written_bytes };
            if !is_complete {
                return Ok((has_written, reached));
            }
            if self.shared.flush.state.lock().pending.len() == 1 {
                // Full, and the next journal has not been requested yet.
                return Ok((has_written, reached));
            }
            self.seal(&journal)?;
        }
    }

    /// Writes from the current position to `limit`. The last page is padded with zeroes, and
    /// written again with what follows.
    fn write_to(&mut self, journal: &Arc<Journal>, limit: usize) -> Result<()> {
        let failed = |action| Error::io(&*journal.path, action);
        let begun = Instant::now();
        let mut at = self.written_bytes / PAGE_BYTES * PAGE_BYTES;
        let whole = limit / PAGE_BYTES * PAGE_BYTES;
        while at < whole {
            let end = (at / CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES).min(whole);
            let bytes = published(journal, at, end);
            journal.file.write_at(at as u64, bytes).map_err(failed("writing records"))?;
            at = end;
        }
        if limit > whole {
            let mut page = AlignedBuf::zeroed(PAGE_BYTES);
            page[..limit - whole].copy_from_slice(published(journal, whole, limit));
            journal.file.write_at(whole as u64, &page).map_err(failed("writing records"))?;
        }
        let pages =
            limit.next_multiple_of(PAGE_BYTES) - self.written_bytes / PAGE_BYTES * PAGE_BYTES;
        self.shared.counters.written_bytes.fetch_add(pages as u64, Ordering::Relaxed);
        self.written_bytes = limit;
        self.unsynced_bytes += pages;
        self.writing += begun.elapsed();
        if self.unsynced.last().is_none_or(|last| last.number != journal.number) {
            self.unsynced.push(journal.clone());
        }
        Ok(())
    }

    /// Seals the oldest pending journal, all of which is in its file.
    fn seal(&mut self, journal: &Arc<Journal>) -> Result<()> {
        let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
        assert!(arena.try_seal(), "all of it is published");
        journal.counts.end_bytes.store(self.written_bytes, Ordering::Release);
        // With `None` too: it bounds the loss in a power cut to a journal.
        self.sync(Point { number: journal.number, byte: self.written_bytes })?;
        // Not here: waiters for later records would have to wait for it.
        self.shared.maintenance.without_hint.lock().push_back(journal.number);
        self.shared.flush.state.lock().pending.pop_front();
        self.written_bytes = FIRST_RECORD;
        // Its memory may now be reused and its records moved.
        self.shared.allocator.wake();
        self.shared.maintenance.waker.wake();
        Ok(())
    }

    /// Makes everything before `reached`, which is written, durable.
    fn sync(&mut self, reached: Point) -> Result<()> {
        let begun = Instant::now();
        for journal in self.unsynced.drain(..) {
            journal.file.sync().map_err(Error::io(&*journal.path, "syncing records"))?;
        }
        // Everything written by now is in a journal whose file was registered before.
        let has_new_names = std::mem::take(&mut self.shared.flush.state.lock().has_new_names);
        if has_new_names {
            self.shared.sync_names()?;
        }
        let bytes = std::mem::take(&mut self.unsynced_bytes);
        let took = std::mem::take(&mut self.writing) + begun.elapsed();
        let flush = &self.shared.flush;
        let mut state = flush.state.lock();
        state.durable = reached;
        if let Some(pace) = &mut state.pace {
            pace.synced(bytes, took);
        }
        flush.update_behind(&state);
        flush.changed.notify_all();
        Ok(())
    }

    /// Everything is written: finishes the newest journal as if it were full and removes the spare.
    /// The maintenance thread has ended, and has left the hints that it did not get to.
    fn finish(&mut self) {
        let (newest, spare) = {
            let mut state = self.shared.flush.state.lock();
            (state.pending[0].clone(), state.spare.take())
        };
        let directory = &self.shared.directory;
        if let Some(spare) = spare
            && let Err(error) = directory.remove(&file_name(spare.number))
        {
            let path = spare.path.display();
            tracing::warn!("journal cache: {path}: removing an empty journal: {error}");
        }
        if self.written_bytes == FIRST_RECORD {
            let _ = directory.remove(&file_name(newest.number));
        } else {
            self.leave(&newest);
        }
        while self.shared.write_one_hint() {}
    }

    /// Finishes the newest journal as a full one.
    fn leave(&self, newest: &Journal) {
        let whole = self.written_bytes.next_multiple_of(PAGE_BYTES) as u64;
        if let Err(error) = newest.file.truncate(whole) {
            let path = newest.path.display();
            tracing::warn!("journal cache: {path}: truncating the newest journal: {error}");
        }
        if let Some(arena) = &newest.arena {
            arena.close();
            arena.try_seal();
        }
        newest.counts.end_bytes.store(self.written_bytes, Ordering::Release);
        self.shared.maintenance.without_hint.lock().push_back(newest.number);
    }
}

/// Returns the time within which everything is to be on stable storage, if there is one.
fn interval(durability: Durability) -> Option<Duration> {
    match durability {
        Durability::Interval(interval) => Some(interval.max(LEAST_INTERVAL)),
        Durability::None | Durability::Always => None,
    }
}

/// Reports a panic of a background thread, since others wait for its work.
pub(crate) struct PanicReporter<'a>(pub(crate) &'a Shared);

impl Drop for PanicReporter<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let path = self.0.directory.path().to_owned();
            self.0.flush.fail(Error::Panicked { path });
        }
    }
}

/// Returns bytes that are known to be published.
fn published(journal: &Journal, from: usize, to: usize) -> &[u8] {
    let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
    arena.read(from..to).expect("published without a hole up to here")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::allocator::Allocator;
    use crate::files::sim::SimDirectory;
    use crate::open;
    use crate::options::Options;
    use crate::pace::LEAST_AHEAD_BYTES;

    /// Longer than a test takes.
    const INTERVAL: Duration = Duration::from_secs(3600);

    fn options(durability: Durability) -> Options {
        Options {
            journal_bytes: 1 << 20,
            memory_bytes: 4 << 20,
            max_disk_bytes: 16 << 20,
            durability,
            ..Options::default()
        }
    }

    /// What is older than the interval is durable after the next run; newer data waits.
    #[test]
    fn writes_are_synced_when_the_interval_is_over() {
        let directory = SimDirectory::default();
        let options = options(Durability::Interval(INTERVAL));
        let (shared, _) = open::open(Box::new(directory), options).unwrap();
        let shared = Arc::new(shared);
        let mut flusher = Flusher::new(shared.clone());
        for key in [b"one", b"two"] {
            shared.put(key, b"value", None).unwrap();
            let written = shared.newest_point();
            assert!(flusher.run_once(false).unwrap() == Step::Idle);
            assert!(shared.flush.state.lock().durable < written);
            flusher.synced_at -= INTERVAL;
            let begun = Instant::now();
            assert!(flusher.run_once(false).unwrap() == Step::More);
            assert_eq!(shared.flush.state.lock().durable, written);
            assert!(flusher.synced_at >= begun);
        }
    }

    /// Writers wait for the sync, so it happens at once, and they continue after it.
    #[test]
    fn writes_are_synced_early_when_writers_wait() {
        let options = options(Durability::Interval(INTERVAL));
        let options = Options { journal_bytes: 8 << 20, memory_bytes: 32 << 20, ..options };
        let options = Options { max_disk_bytes: 64 << 20, ..options };
        let (shared, _) = open::open(Box::new(SimDirectory::default()), options).unwrap();
        let shared = Arc::new(shared);
        let mut flusher = Flusher::new(shared.clone());
        let mut bytes = 0;
        while !shared.flush.is_behind() {
            assert!(bytes <= LEAST_AHEAD_BYTES + CHUNK_BYTES, "writers do not wait yet");
            // Whole chunks are written as they arrive, and not synced.
            flusher.run_once(false).unwrap();
            shared.put(b"key", &[1; 10_000], None).unwrap();
            bytes += 10_000;
        }
        assert!(bytes > LEAST_AHEAD_BYTES - CHUNK_BYTES, "{bytes}");
        assert!(!shared.try_put(b"key", b"value", None).unwrap());
        assert!(flusher.run_once(false).unwrap() == Step::More);
        assert_eq!(shared.flush.state.lock().durable, shared.newest_point());
        assert!(!shared.flush.is_behind());
        assert!(shared.try_put(b"key", b"value", None).unwrap());
    }

    /// A writer has found the newest journal full and not yet recorded its end, so that another one
    /// assumed it to be longer. All of it is synced, so no later event would wake that writer.
    #[test]
    fn no_writer_waits_after_everything_is_synced() {
        let options = options(Durability::Interval(INTERVAL));
        let (shared, _) = open::open(Box::new(SimDirectory::default()), options).unwrap();
        let shared = Arc::new(shared);
        let mut flusher = Flusher::new(shared.clone());
        shared.flush.is_behind.store(true, Ordering::Relaxed);
        assert!(flusher.run_once(false).unwrap() == Step::Idle, "nothing to sync");
        assert!(!shared.flush.is_behind());
    }

    /// What is behind the reservation of a writer in the middle of a put is durable soon after that
    /// put, not an interval later.
    #[test]
    fn a_put_behind_another_one_is_synced_without_another_interval() {
        let options = options(Durability::Interval(INTERVAL));
        let (shared, _) = open::open(Box::new(SimDirectory::default()), options).unwrap();
        let shared = Arc::new(shared);
        let mut flusher = Flusher::new(shared.clone());
        shared.put(b"before", b"value", None).unwrap();
        let journal = shared.active.load_full();
        let slow = journal.arena.as_ref().unwrap().reserve(1000).unwrap();
        shared.put(b"behind", b"value", None).unwrap();
        let written = shared.newest_point();
        flusher.synced_at -= INTERVAL;
        let due = flusher.synced_at;
        assert!(flusher.run_once(false).unwrap() == Step::More);
        // What is before it is durable; the sync is still due.
        assert!(shared.flush.state.lock().durable < written);
        assert!(flusher.run_once(false).unwrap() == Step::Idle);
        assert_eq!(flusher.synced_at, due);
        slow.publish();
        assert!(flusher.run_once(false).unwrap() == Step::More);
        assert_eq!(shared.flush.state.lock().durable, written);
        assert!(flusher.synced_at > due);
    }

    /// The interval counts from the last sync of everything, whatever was sealed meanwhile.
    #[test]
    fn sealing_a_journal_does_not_put_off_the_sync_of_the_next_one() {
        let options = options(Durability::Interval(INTERVAL));
        let (shared, _) = open::open(Box::new(SimDirectory::default()), options).unwrap();
        let shared = Arc::new(shared);
        let first = shared.active.load().number;
        let next = JournalNumber(first.0 + 1);
        let allocator = Allocator::new(shared.clone(), next);
        let allocator = thread::spawn(move || allocator.run());
        let mut flusher = Flusher::new(shared.clone());
        let begun = flusher.synced_at;
        let mut key = 0u64;
        while shared.active.load().number == first {
            shared.put(&key.to_le_bytes(), &[1; 1000], None).unwrap();
            key += 1;
        }
        assert!(flusher.run_once(false).unwrap() == Step::More);
        assert_eq!(shared.flush.oldest_unwritten(), next);
        assert_eq!(flusher.synced_at, begun);
        assert!(shared.flush.state.lock().durable.number == first);
        assert!(flusher.run_once(true).unwrap() == Step::More);
        assert_eq!(shared.flush.state.lock().durable, shared.newest_point());
        assert!(flusher.synced_at > begun);
        shared.allocator.close();
        allocator.join().unwrap();
    }

    #[test]
    fn a_panic_stops_writing_and_names_the_cache() {
        let directory = SimDirectory::at("/srv/cache".as_ref());
        let opened = open::open(Box::new(directory), options(Durability::None));
        let (shared, _) = opened.unwrap();
        shared.put(b"key", b"value", None).unwrap();
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _reporter = PanicReporter(&shared);
                assert_eq!(shared.index.len(), 0, "on purpose");
            });
            assert!(thread.join().is_err());
        });
        let error = shared.put(b"key", b"other", None).unwrap_err();
        assert!(error.to_string().starts_with("/srv/cache: a thread of the cache"), "{error}");
    }
}
