//! The allocator: a thread that creates the journal after the newest one, the *spare*, before it is
//! needed, so that neither writers nor the flusher wait for the kernel to clear memory or for
//! readers to release it.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use uuid::Uuid;

use crate::disk_budget::WriteClass;
use crate::error::{Error, Result};
use crate::files::Directory;
use crate::flush::{PanicReporter, Shortage, State};
use crate::journal::{CacheId, Counts, FIRST_RECORD, Journal, JournalHeader, file_name};
use crate::options::WhenFull;
use crate::pool::{Pool, Pooled};
use crate::position::{JournalNumber, MAX_SPAN};
use crate::record::Salt;
use crate::shared::Shared;
use crate::sync::Arc;

/// How long to wait for readers to release a journal whose memory is taken.
pub(crate) const RELEASE_WITHIN: Duration = Duration::from_millis(10);
/// Journals kept free for writers, in addition to the headroom that they leave.
const JOURNALS_AHEAD: usize = 2;
/// The maximum distance between journal numbers. The rest is for openings, each of which creates a
/// journal.
const MOST_SPAN: u64 = MAX_SPAN / 4 * 3;
/// The interval for checking again for space, even without a notification.
pub(crate) const RECHECK_AFTER: Duration = Duration::from_millis(100);

/// The state of the allocator thread.
pub(crate) struct Allocator {
    shared: Arc<Shared>,
    next_number: JournalNumber,
}

impl Allocator {
    /// `next_number`: the number after that of the newest journal.
    pub(crate) fn new(shared: Arc<Shared>, next_number: JournalNumber) -> Self {
        Self { shared, next_number }
    }

    /// Runs until the cache is closed or a write fails. The spare stays.
    pub(crate) fn run(mut self) {
        let shared = self.shared.clone();
        let _reporter = PanicReporter(&shared);
        let waker = &shared.allocator;
        waker.register();
        loop {
            waker.begin_check();
            if waker.is_closing() || shared.flush.failure().is_some() {
                return;
            }
            if let Err(error) = self.ensure_spare() {
                return shared.flush.fail(error);
            }
            let lacks_spare = shared.flush.state.lock().spare.is_none();
            waker.sleep(lacks_spare.then_some(RECHECK_AFTER));
        }
    }

    /// Creates a spare if there is none and disk and memory permit it.
    fn ensure_spare(&mut self) -> Result<()> {
        let shared = &self.shared;
        shared.update_free_space();
        let space_generation = {
            let state = shared.flush.state.lock();
            if state.spare.is_some() {
                return Ok(());
            }
            state.space_generation
        };
        if shared.is_crowded() {
            shared.maintenance.waker.wake();
        }
        let made = match self.number_if_space() {
            Some(number) => match self.take_arena() {
                Err(error) => {
                    self.note_lack_of_resources(&error);
                    return Ok(());
                }
                Ok(Some(arena)) => {
                    let made = make_journal(
                        &*shared.directory,
                        shared.id,
                        number,
                        shared.journal_bytes,
                        arena,
                    );
                    match made {
                        Err(error) if error.is_out_of_files() && !shared.may_evict_for_files() => {
                            self.note_lack_of_resources(&error);
                            return Ok(());
                        }
                        Err(error) if error.is_out_of_files() => None,
                        made => made?,
                    }
                }
                // All journals in memory are waiting to be written, and the allocator waits for
                // them.
                Ok(None) => return Ok(()),
            },
            None => None,
        };
        let mut state = shared.flush.state.lock();
        match made {
            Some(spare) => {
                self.next_number = JournalNumber(spare.number.0 + 1);
                state.lacks_resources = false;
                state.has_new_names = true;
                state.shortage = Shortage::None;
                state.spare = Some(Arc::new(spare));
            }
            // Space was made during the check: it has been woken and checks again.
            None if state.space_generation != space_generation => return Ok(()),
            None => {
                state.shortage = Shortage::Known;
                shared.maintenance.waker.wake();
            }
        }
        shared.flush.changed.notify_all();
        Ok(())
    }

    /// Records that file descriptors or memory are in use elsewhere, which is temporary: writers
    /// wait, and it is retried.
    fn note_lack_of_resources(&self, error: &Error) {
        let flush = &self.shared.flush;
        if !std::mem::replace(&mut flush.state.lock().lacks_resources, true) {
            tracing::warn!("journal cache: {error}; writers wait until it is available");
            flush.changed.notify_all();
        }
    }

    /// Returns the next journal's number, if there is space for it.
    fn number_if_space(&self) -> Option<JournalNumber> {
        let journals = &self.shared.journals;
        if !journals.budget.permits_with_reservations(1) {
            return None;
        }
        // The number may collide with that of a journal that has existed for long.
        let number = (self.next_number.0..).map(JournalNumber).find(|it| journals.is_free(*it))?;
        // A journal that cannot be read is not moved in time.
        let oldest = journals.oldest().unwrap_or(number);
        (number.0 - oldest.0 < MOST_SPAN).then_some(number)
    }

    /// Takes memory for a journal: free memory, or that of the least read hot journal. `None` if
    /// all journals wait to be written; the flusher then wakes the allocator.
    fn take_arena(&self) -> Result<Option<Pooled>> {
        let shared = &self.shared;
        let no_memory = || shared.no_memory("a journal");
        // If the system has none, the existing memory must suffice: a hot journal is demoted.
        if let Some(arena) = shared.pool.take() {
            return Ok(Some(arena));
        }
        for _ in 0..shared.pool.excess() {
            // Its memory returns to the system, and that of the next journal is within the budget
            // again.
            if let Some(coldest) = shared.coldest_in_memory() {
                shared.demote(&coldest);
            }
        }
        let Some(coldest) = shared.coldest_in_memory() else {
            // Journals waiting to be written will release their memory. If there are none, readers
            // hold all of it.
            let waits = shared.flush.state.lock().pending.len() > 1;
            return if waits {
                Ok(None)
            } else {
                shared.pool.take_over_budget().map(Some).map_err(no_memory())
            };
        };
        let demote = move || shared.demote(&coldest);
        match shared.pool.take_for_writers(RELEASE_WITHIN, demote).map_err(no_memory())? {
            Some(arena) => Ok(Some(arena)),
            // Readers hold values of it, perhaps indefinitely.
            None => shared.pool.take_over_budget().map(Some).map_err(no_memory()),
        }
    }
}

/// Creates an empty journal in memory, with a durable header in its file. (The name of the file is
/// durable after a sync of the directory.) `None` if the disk has no space for it.
fn make_journal(
    directory: &dyn Directory,
    id: CacheId,
    number: JournalNumber,
    journal_bytes: usize,
    mut arena: Pooled,
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
        Err(error) => return Err(Error::io(&path, "creating a journal")(error)),
    };
    // Otherwise writers would wait for each page.
    arena.arena_mut().populate();
    let salt = Salt(Uuid::new_v4().as_u64_pair().1);
    let header = JournalHeader { cache: id, number, salt, is_compressed: false };
    let mut page = arena.reserve(FIRST_RECORD).expect("an arena is larger than a page");
    page.fill(0);
    header.write(&mut page);
    // Otherwise a power cut could leave records without a header, in a file that cannot be read.
    let written = file.write_at(0, &page).and_then(|()| file.sync());
    written.map_err(Error::io(&path, "writing the header"))?;
    page.publish();
    let file_bytes = journal_bytes as u64;
    let (arena, free_journals) = (Some(Arc::new(arena)), AtomicUsize::new(0));
    let counts = Arc::new(Counts::new(journal_bytes));
    Ok(Some(Journal {
        number,
        salt,
        file,
        path,
        file_bytes,
        frames: None,
        arena,
        free_journals,
        counts,
    }))
}

/// Creates the first newest journal of an opened cache, durably. `None` if the disk has no space
/// for it.
pub(crate) fn first_journal(
    directory: &dyn Directory,
    id: CacheId,
    number: JournalNumber,
    journal_bytes: usize,
    pool: &Pool,
) -> Result<Option<Journal>> {
    let path = directory.path();
    let arena = pool.take_or_create().map_err(Error::no_memory(path, "a journal"))?;
    let made = make_journal(directory, id, number, journal_bytes, arena)?;
    if made.is_some() {
        directory.sync().map_err(Error::io(path, "syncing the directory"))?;
    }
    Ok(made)
}

impl Shared {
    /// Returns whether journals have to be removed so that writers find space when they need it.
    pub(crate) fn is_crowded(&self) -> bool {
        !self.journals.budget.permits(JOURNALS_AHEAD + self.headroom(WriteClass::Put))
            || self.flush.is_short()
    }

    /// Returns whether a journal may be evicted to free its file descriptor: only if compression
    /// has made more journals than there would be otherwise. With fewer, the descriptors are used
    /// elsewhere.
    fn may_evict_for_files(&self) -> bool {
        let plain_bytes = self.journals.budget.journals() as u64 * self.journal_bytes as u64;
        self.options.when_full == WhenFull::Evict && plain_bytes > self.options.max_disk_bytes
    }

    /// Returns whether there is a journal that eviction can remove.
    pub(crate) fn has_evictable(&self, state: &State) -> bool {
        self.options.when_full == WhenFull::Evict && self.journals.len() > state.pending.len()
    }

    /// Returns the least read journal in memory that is completely written and not in use by a
    /// maintenance task.
    pub(crate) fn coldest_in_memory(&self) -> Option<Arc<Journal>> {
        let mut hot = self.journals.all();
        // Journals that take over from now on have higher numbers, so the newest journal is never
        // mistaken for a written one.
        let unwritten = self.flush.oldest_unwritten();
        hot.retain(|journal| {
            let is_busy = journal.counts.is_busy.load(Ordering::Acquire);
            journal.arena.is_some() && journal.number < unwritten && !is_busy
        });
        hot.into_iter()
            .min_by_key(|journal| (journal.counts.reads.load(Ordering::Relaxed), journal.number))
    }
}
