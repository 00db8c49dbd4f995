//! The flusher: a thread that writes what is published, syncs it, seals full journals and keeps the next one ready.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use alluvium_device::{AlignedBuf, PAGE_BYTES};
use parking_lot::{Condvar, Mutex};
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::files::Directory;
use crate::hint;
use crate::journal::{CacheId, Counts, FIRST_RECORD, Journal, JournalHeader, file_name};
use crate::options::{Durability, WhenFull};
use crate::place::{JournalNumber, MAX_SPAN};
use crate::pool::{Pool, Pooled};
use crate::record::Salt;
use crate::room::Who;
use crate::shared::{CHUNK_BYTES, Point, Shared};

/// How long it is waited for readers to let go of a journal whose memory is taken.
pub(crate) const LET_GO_WITHIN: Duration = Duration::from_millis(10);
/// Journals that are kept free for writers, beside those that they leave.
const ROOM_AHEAD: usize = 2;
/// A place that was taken is given up as soon as its bytes are copied.
const PUBLISHED_WITHIN: Duration = Duration::from_millis(1);
/// Numbers of journals are not further apart than this. What is left is for opening the cache, which makes one each time.
const MOST_SPAN: u64 = MAX_SPAN / 4 * 3;
/// Of [`Durability::Interval`].
const LEAST_INTERVAL: Duration = Duration::from_millis(1);
/// A flusher that waits for disk space looks again after this time, even if nobody tells it.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What writers and the flusher tell each other.
pub(crate) struct Flush {
    pub(crate) state: Mutex<State>,
    /// A spare is there, more is durable, or something has failed.
    pub(crate) changed: Condvar,
    /// Held while the directory is synced: [`Shared::sync_names`].
    pub(crate) naming: Mutex<()>,
    failed: OnceLock<Error>,
    thread: OnceLock<Thread>,
    is_woken: AtomicBool,
}

pub(crate) struct State {
    /// Journals that are not wholly written, the newest last.
    pub(crate) pending: VecDeque<Arc<Journal>>,
    /// Takes over when the newest one is full.
    pub(crate) spare: Option<Arc<Journal>>,
    /// Everything before it is on stable storage.
    durable: Point,
    /// Somebody waits until everything before it is.
    wanted: Point,
    pub(crate) failed: Option<Error>,
    pub(crate) shortage: Shortage,
    /// The last journal that was tried could not be made since too many files are open.
    pub(crate) lacks_files: bool,
    /// How many times room was made.
    pub(crate) rooms_made: u64,
    is_closing: bool,
}

/// Whether there was no room for the spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// There was, or there is more now.
    None,
    /// There was none. What was set aside has come free since, and the flusher looks again: until it has, nobody is refused, and nothing is set aside anew.
    Unknown,
    /// There was none.
    Known,
}

impl Flush {
    /// `newest` is the only journal that is not wholly written.
    pub(crate) fn new(newest: Arc<Journal>) -> Self {
        let start = Point { number: newest.number, byte: FIRST_RECORD };
        Self {
            state: Mutex::new(State {
                pending: VecDeque::from([newest]),
                spare: None,
                durable: start,
                wanted: start,
                failed: None,
                shortage: Shortage::None,
                lacks_files: false,
                rooms_made: 0,
                is_closing: false,
            }),
            changed: Condvar::new(),
            naming: Mutex::new(()),
            failed: OnceLock::new(),
            thread: OnceLock::new(),
            is_woken: AtomicBool::new(false),
        }
    }

    /// There may be something to do.
    pub(crate) fn wake(&self) {
        // Once until it looks: writers that come in crowds leave the rest to the first one.
        if !self.is_woken.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Why nothing is written any more.
    #[inline]
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failed.get().cloned()
    }

    /// Until everything before `point` is on stable storage.
    pub(crate) fn wait_for(&self, point: Point) -> Result<()> {
        let mut state = self.state.lock();
        while state.durable < point {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            state.wanted = state.wanted.max(point);
            self.wake();
            self.changed.wait(&mut state);
        }
        Ok(())
    }

    /// All journals before this one are wholly written.
    pub(crate) fn oldest_unwritten(&self) -> JournalNumber {
        self.state.lock().pending[0].number
    }

    /// Whether a journal has to go, whatever the budget says.
    pub(crate) fn is_short(&self) -> bool {
        self.state.lock().shortage != Shortage::None
    }

    /// Whether the newest journal has no successor, and none can be made now.
    pub(crate) fn lacks_spare(&self) -> bool {
        let state = self.state.lock();
        state.spare.is_none() && state.shortage == Shortage::Known
    }

    /// Nothing can be written any more.
    pub(crate) fn fail(&self, error: Error) {
        let error = self.failed.get_or_init(|| {
            tracing::error!("journal cache: {error}; nothing is written any more");
            error
        });
        let mut state = self.state.lock();
        state.failed = Some(error.clone());
        self.changed.notify_all();
    }

    /// Those who wait look again.
    pub(crate) fn tell(&self) {
        // With the lock, so that nobody is between looking and waiting.
        let _state = self.state.lock();
        self.changed.notify_all();
    }

    /// Write and sync everything, then end the thread.
    pub(crate) fn close(&self) {
        self.state.lock().is_closing = true;
        self.wake();
    }
}

/// The flusher's own.
pub(crate) struct Flusher {
    shared: Arc<Shared>,
    /// How much of the oldest journal in [`State::pending`] is in its file.
    written_bytes: usize,
    /// Written to since they were synced.
    unsynced: Vec<Arc<Journal>>,
    /// Files were made since the directory was synced.
    has_new_names: bool,
    next_number: JournalNumber,
    synced_at: Instant,
}

/// What the flusher found to do.
#[derive(PartialEq, Eq)]
enum Step {
    More,
    Idle,
}

impl Flusher {
    /// `next_number`: of the journal after the newest one.
    pub(crate) fn new(shared: Arc<Shared>, next_number: JournalNumber) -> Self {
        Self {
            shared,
            written_bytes: FIRST_RECORD,
            unsynced: Vec::new(),
            has_new_names: false,
            next_number,
            synced_at: Instant::now(),
        }
    }

    /// Until the cache is closed or a write fails.
    pub(crate) fn run(mut self) {
        let shared = self.shared.clone();
        let _told = TellOfPanic(&shared);
        let _ = shared.flush.thread.set(thread::current());
        loop {
            shared.flush.is_woken.swap(false, Ordering::AcqRel);
            // Before the turn: what was written before the closing is written in it.
            let is_closing = shared.flush.state.lock().is_closing;
            match self.turn(is_closing) {
                Ok(Step::More) => {}
                Ok(Step::Idle) if is_closing => return self.finish(),
                Ok(Step::Idle) => self.sleep(),
                Err(error) => return shared.flush.fail(error),
            }
        }
    }

    fn sleep(&self) {
        if self.shared.flush.is_woken.load(Ordering::Acquire) {
            return;
        }
        let (lacks_spare, is_waited_for) = {
            let state = self.shared.flush.state.lock();
            (state.spare.is_none(), state.wanted > state.durable)
        };
        let interval =
            self.interval().map(|interval| interval.saturating_sub(self.synced_at.elapsed()));
        let until = [
            // Somebody has taken a place and not yet filled it; nobody tells when he has.
            is_waited_for.then_some(PUBLISHED_WITHIN),
            lacks_spare.then_some(LOOK_AGAIN),
            interval,
        ];
        match until.into_iter().flatten().min() {
            Some(time) => thread::park_timeout(time),
            None => thread::park(),
        }
    }

    fn interval(&self) -> Option<Duration> {
        match self.shared.options.durability {
            Durability::Interval(interval) => Some(interval.max(LEAST_INTERVAL)),
            Durability::None | Durability::Always => None,
        }
    }

    /// Everything that there is to do now, in pieces: the next journal, a chunk, a sync.
    fn turn(&mut self, is_closing: bool) -> Result<Step> {
        self.prepare()?;
        let (wanted, durable) = {
            let state = self.shared.flush.state.lock();
            (state.wanted, state.durable)
        };
        let is_due = self.interval().is_some_and(|interval| self.synced_at.elapsed() >= interval);
        let is_asked = is_closing || is_due || wanted > durable;
        let (wrote, reached) = self.write(is_asked)?;
        // Whoever waits gets what is written so far: with more writers than the disk takes there is always more.
        if is_asked && reached > durable {
            self.sync(reached)?;
            return Ok(Step::More);
        }
        if is_due {
            self.synced_at = Instant::now();
        }
        Ok(if wrote { Step::More } else { Step::Idle })
    }

    /// Write what is published without a hole: whole chunks, or `all` of it. Returns whether anything was written, and up to where everything is.
    fn write(&mut self, all: bool) -> Result<(bool, Point)> {
        let mut has_written = false;
        loop {
            let journal = self.shared.flush.state.lock().pending[0].clone();
            let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
            // The end is asked first: what is published after it was known is published before it is compared.
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
                // Full, and nobody has asked for the next one yet.
                return Ok((has_written, reached));
            }
            self.seal(&journal)?;
        }
    }

    /// Write from where it is written to `limit`, the last page filled up with zeroes: it is written again with what follows.
    fn write_to(&mut self, journal: &Arc<Journal>, limit: usize) -> Result<()> {
        let failed = |action| {
            Error::io(self.shared.directory.path().join(file_name(journal.number)), action)
        };
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
        if self.unsynced.last().is_none_or(|last| last.number != journal.number) {
            self.unsynced.push(journal.clone());
        }
        Ok(())
    }

    /// All of the oldest pending journal is in its file.
    fn seal(&mut self, journal: &Arc<Journal>) -> Result<()> {
        let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
        assert!(arena.try_seal(), "all of it is published");
        journal.counts.end_bytes.store(self.written_bytes, Ordering::Release);
        // With `none` too: what a power cut takes is bounded by a journal.
        self.sync(Point { number: journal.number, byte: self.written_bytes })?;
        self.write_hint(journal);
        self.shared.flush.state.lock().pending.pop_front();
        self.written_bytes = FIRST_RECORD;
        self.shared.keep.wake();
        Ok(())
    }

    /// Of a journal that is written up to [`Self::written_bytes`], and takes no more.
    fn write_hint(&self, journal: &Journal) {
        let Shared { directory, hasher, .. } = &*self.shared;
        let arena = journal.arena.as_ref().expect("in memory until its hint is written");
        let bytes = arena.read(0..self.written_bytes).expect("only what is published is written");
        hint::write(&**directory, hasher, journal.number, journal.salt, bytes);
    }

    /// Everything before `reached`, which is written, is made durable.
    fn sync(&mut self, reached: Point) -> Result<()> {
        for journal in self.unsynced.drain(..) {
            let path = || self.shared.directory.path().join(file_name(journal.number));
            journal.file.sync().map_err(|error| Error::io(path(), "syncing records")(error))?;
        }
        if self.has_new_names {
            self.shared.sync_names()?;
            self.has_new_names = false;
        }
        self.synced_at = Instant::now();
        self.shared.flush.state.lock().durable = reached;
        self.shared.flush.changed.notify_all();
        Ok(())
    }

    /// Everything is written: leave the newest journal as if it were full, and nothing of the one behind it.
    fn finish(&mut self) {
        let (newest, spare) = {
            let mut state = self.shared.flush.state.lock();
            (state.pending[0].clone(), state.spare.take())
        };
        let directory = &self.shared.directory;
        if let Some(spare) = spare
            && let Err(error) = directory.remove(&file_name(spare.number))
        {
            tracing::warn!("journal cache: removing an empty journal: {error}");
        }
        if self.written_bytes == FIRST_RECORD {
            let _ = directory.remove(&file_name(newest.number));
            return;
        }
        let whole = self.written_bytes.next_multiple_of(PAGE_BYTES) as u64;
        if let Err(error) = newest.file.truncate(whole) {
            tracing::warn!("journal cache: cutting the newest journal: {error}");
        }
        if let Some(arena) = &newest.arena {
            arena.close();
            arena.try_seal();
        }
        self.write_hint(&newest);
    }

    /// See to it that a spare is there, if disk and memory allow one.
    fn prepare(&mut self) -> Result<()> {
        let shared = &self.shared;
        let rooms_made = {
            let state = shared.flush.state.lock();
            if state.spare.is_some() {
                return Ok(());
            }
            state.rooms_made
        };
        if shared.is_crowded() {
            shared.keep.wake();
        }
        let made = match self.number_with_room() {
            Some(number) => match self.take_arena()? {
                Some(arena) => {
                    // Or writers would wait for it, page by page.
                    arena.populate();
                    let made = make_journal(
                        &*shared.directory,
                        shared.id,
                        number,
                        shared.journal_bytes,
                        arena,
                    );
                    match made {
                        // Others have the files, and give them back: writers wait, and it is tried again.
                        Err(error) if error.is_want_of_files() && !shared.may_evict_for_files() => {
                            let mut state = shared.flush.state.lock();
                            if !std::mem::replace(&mut state.lacks_files, true) {
                                tracing::warn!("journal cache: {error}; writers wait for it");
                                shared.flush.changed.notify_all();
                            }
                            return Ok(());
                        }
                        Err(error) if error.is_want_of_files() => None,
                        made => made?,
                    }
                }
                // All journals in memory wait to be written, and so does this.
                None => return Ok(()),
            },
            None => None,
        };
        let mut state = shared.flush.state.lock();
        match made {
            Some(spare) => {
                state.lacks_files = false;
                self.has_new_names = true;
                self.next_number = JournalNumber(spare.number.0 + 1);
                state.shortage = Shortage::None;
                state.spare = Some(Arc::new(spare));
            }
            // While it looked room was made: it is woken, and looks again.
            None if state.rooms_made != rooms_made => return Ok(()),
            None => {
                state.shortage = Shortage::Known;
                shared.keep.wake();
            }
        }
        shared.flush.changed.notify_all();
        Ok(())
    }

    /// The next journal's number, if there is room for it.
    fn number_with_room(&self) -> Option<JournalNumber> {
        let journals = &self.shared.journals;
        if !journals.room.has_now(1) {
            return None;
        }
        // A journal that has lived for long may have a number that this one would collide with.
        let number = (self.next_number.0..).map(JournalNumber).find(|it| journals.is_free(*it))?;
        // What can not be read is not moved out of the way in time.
        let oldest = journals.all().first().map_or(number, |oldest| oldest.number);
        (number.0 - oldest.0 < MOST_SPAN).then_some(number)
    }

    /// Memory for a journal: free, or the hot journal's that is read least. `None` if all of them wait to be written.
    fn take_arena(&self) -> Result<Option<Pooled>> {
        let shared = &self.shared;
        let no_memory = || Error::no_memory("a journal");
        if let Some(arena) = shared.pool.take().map_err(no_memory())? {
            return Ok(Some(arena));
        }
        for _ in 0..shared.pool.beyond() {
            // Its memory goes back to the system, and that of the next one is within the bound again.
            if let Some(coldest) = shared.coldest_in_memory() {
                shared.demote(&coldest);
            }
        }
        let Some(coldest) = shared.coldest_in_memory() else {
            // What waits to be written gives its memory back. If nothing does, readers have all of it.
            let waits = shared.flush.state.lock().pending.len() > 1;
            return if waits {
                Ok(None)
            } else {
                shared.pool.take_beyond().map(Some).map_err(no_memory())
            };
        };
        let let_go = move || shared.demote(&coldest);
        match shared.pool.take_for_writers(LET_GO_WITHIN, let_go).map_err(no_memory())? {
            Some(arena) => Ok(Some(arena)),
            // Readers keep values of it. They may do so for ever.
            None => shared.pool.take_beyond().map(Some).map_err(no_memory()),
        }
    }
}

/// Says so when a thread of the cache ends by a panic: others wait for what it does.
pub(crate) struct TellOfPanic<'a>(pub(crate) &'a Shared);

impl Drop for TellOfPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.flush.fail(Error::Panicked);
        }
    }
}

/// An empty journal in memory, its header in its file. `None` if the disk has no room for it.
fn make_journal(
    directory: &dyn Directory,
    id: CacheId,
    number: JournalNumber,
    journal_bytes: usize,
    arena: Pooled,
) -> Result<Option<Journal>> {
    let name = file_name(number);
    let path = directory.path().join(&name);
    let file = match directory.create(&name, journal_bytes as u64) {
        Ok(file) => file,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(Error::io(path, "making a journal")(error)),
    };
    let salt = Salt(Uuid::new_v4().as_u64_pair().1);
    let header = JournalHeader { cache: id, number, salt, is_compressed: false };
    let mut page = arena.reserve(FIRST_RECORD).expect("an arena is larger than a page");
    page.fill(0);
    header.write(&mut page);
    file.write_at(0, &page).map_err(Error::io(path, "writing the header"))?;
    page.publish();
    let file_bytes = journal_bytes as u64;
    let (arena, beside) = (Some(Arc::new(arena)), AtomicUsize::new(0));
    let counts = Arc::new(Counts::new(journal_bytes));
    Ok(Some(Journal { number, salt, file, file_bytes, frames: None, arena, beside, counts }))
}

/// The first newest journal of an opened cache, durable. `None` if the disk has no room for it.
pub(crate) fn first_journal(
    directory: &dyn Directory,
    id: CacheId,
    number: JournalNumber,
    journal_bytes: usize,
    pool: &Arc<Pool>,
) -> Result<Option<Journal>> {
    let arena = pool.take_anyway().map_err(Error::no_memory("a journal"))?;
    let path = directory.path();
    let made = make_journal(directory, id, number, journal_bytes, arena)?;
    if let Some(journal) = &made {
        let header = path.join(file_name(number));
        journal.file.sync().map_err(Error::io(header, "syncing the header"))?;
        directory.sync().map_err(Error::io(path, "syncing the directory"))?;
    }
    Ok(made)
}

/// Bytes that are known to be published.
fn published(journal: &Journal, from: usize, to: usize) -> &[u8] {
    let arena = journal.arena.as_ref().expect("a journal is in memory until it is written");
    arena.read(from..to).expect("published without a hole up to here")
}

impl Shared {
    /// Whether journals have to go, so that writers find room when they need it.
    pub(crate) fn is_crowded(&self) -> bool {
        !self.journals.room.has(ROOM_AHEAD + self.leaves(Who::User)) || self.flush.is_short()
    }

    /// Whether a journal may go for its file: where compression has made more of them than there would be otherwise. Down to those it is others who have too many files open.
    fn may_evict_for_files(&self) -> bool {
        let plain_bytes = self.journals.room.journals() as u64 * self.journal_bytes as u64;
        self.options.when_full == WhenFull::Evict && plain_bytes > self.options.max_disk_bytes
    }

    /// Whether there is a journal that eviction can remove.
    pub(crate) fn has_evictable(&self, state: &State) -> bool {
        self.options.when_full == WhenFull::Evict && self.journals.len() > state.pending.len()
    }

    /// The journal in memory that is read least, of those that are wholly written and that nobody is at who makes room.
    pub(crate) fn coldest_in_memory(&self) -> Option<Arc<Journal>> {
        let mut hot = self.journals.all();
        // Whatever takes over from now on has a number beyond it: the newest journal's memory must not be taken for that of a written one.
        let unwritten = self.flush.oldest_unwritten();
        hot.retain(|journal| {
            let is_busy = journal.counts.is_busy.load(Ordering::Acquire);
            journal.arena.is_some() && journal.number < unwritten && !is_busy
        });
        hot.into_iter()
            .min_by_key(|journal| (journal.counts.reads.load(Ordering::Relaxed), journal.number))
    }
}
