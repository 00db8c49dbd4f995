//! Entering journals into the index: the time-consuming part of an opening.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use alluvium_device::PAGE_BYTES;
use parking_lot::Mutex;

use crate::allocator::RECHECK_AFTER;
use crate::error::{Error, Result};
use crate::files::Directory;
use crate::hash::KeyHasher;
use crate::hint::{self, Entry};
use crate::index::{Index, Recovery};
use crate::journal::{FIRST_RECORD, file_name};
use crate::open::ExistingJournal;
use crate::pieces::each_in;
use crate::pool::{Pool, Pooled};
use crate::position::Position;
use crate::walk::{Found, Walk};

/// The number of entries whose slots are prefetched together.
const OVERLAP: usize = 32;

/// A full journal leaves at most one part in this many unused.
const FULL_PARTS: u64 = 16;

/// What was found in one journal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents {
    pub(crate) file_bytes: u64,
    pub(crate) end: usize,
    pub(crate) tombstone_bytes: usize,
    pub(crate) damaged_bytes: u64,
    /// Some of it could not be read, and nothing else shows which records it had. A later attempt
    /// may succeed.
    pub(crate) has_unread: bool,
    pub(crate) is_scanned: bool,
}

/// The journals to read, and where their entries go.
pub(crate) struct Reading<'a> {
    pub(crate) directory: &'a dyn Directory,
    /// Oldest first.
    pub(crate) journals: &'a [ExistingJournal],
    pub(crate) index: &'a Index,
    pub(crate) hasher: &'a KeyHasher,
    pub(crate) pool: &'a Pool,
    /// `Some` if journals without a hint are to be given one, as long as the disk has this much
    /// left. `None` if the newest journal has no space yet.
    pub(crate) hint_headroom_bytes: Option<u64>,
    /// Held to check the free space and write a hint.
    pub(crate) hint_lock: Mutex<()>,
    /// Entries were made in the index that must be removed at the end: tombstones, or those of a
    /// hint that then proved damaged, which may name records that do not exist.
    pub(crate) has_excess: AtomicBool,
}

/// Returns whether an entry is a tombstone. During an opening tombstones are indexed too, with the
/// read bit as their mark, so that they take precedence over what they delete.
pub(crate) fn is_tombstone(position: Position) -> bool {
    position.was_read()
}

impl Reading<'_> {
    /// Reads all journals with as many threads as there are processors, including this one; returns
    /// the results in their order.
    pub(crate) fn read_all(&self) -> Result<Vec<Contents>> {
        let next = AtomicUsize::new(0);
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let work = || -> Result<Vec<(usize, Contents)>> {
            let mut found = Vec::new();
            while let at = next.fetch_add(1, Ordering::Relaxed)
                && let Some(journal) = self.journals.get(at)
            {
                found.push((at, self.read_one(journal)?));
            }
            Ok(found)
        };
        let mut found = thread::scope(|scope| -> Result<Vec<_>> {
            let others = processors.min(self.journals.len()).saturating_sub(1);
            // With fewer threads, or none, it takes longer.
            let start = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
            let threads: Vec<_> = (0..others).map_while(start).collect();
            let mut found = work()?;
            for thread in threads {
                found.extend(thread.join().expect("reading a journal does not panic")?);
            }
            Ok(found)
        })?;
        found.sort_unstable_by_key(|(at, _)| *at);
        Ok(found.into_iter().map(|(_, contents)| contents).collect())
    }

    fn read_one(&self, journal: &ExistingJournal) -> Result<Contents> {
        let path = || self.directory.path().join(file_name(journal.number));
        let len_bytes =
            journal.file.len_bytes().map_err(|e| Error::io(path(), "asking for the length")(e))?;
        let file_bytes = self.without_excess(journal, len_bytes);
        let mut tombstone_bytes = 0;
        if let Some(head) = journal.hint {
            let each =
                |entries: &[Entry]| self.index_entries(journal, entries, &mut tombstone_bytes);
            if hint::read(self.directory, journal.number, journal.salt, head, each)? {
                let end = head.end;
                let damaged_bytes = match &journal.frames {
                    Some(frames) if frames.is_lost() => (end - FIRST_RECORD) as u64,
                    // Whatever else is lost, up to all of a compressed journal, can only be found
                    // by reading it.
                    None if journal.has_lost_header => self.damaged_bytes(journal, end)?,
                    _ => 0,
                };
                return Ok(Contents {
                    file_bytes,
                    end,
                    tombstone_bytes,
                    damaged_bytes,
                    has_unread: false,
                    is_scanned: false,
                });
            }
            self.has_excess.store(true, Ordering::Relaxed);
        }
        self.scan(journal, file_bytes)
    }

    /// Adds records of one journal to the index, and counts the live ones.
    fn index_entries(
        &self,
        journal: &ExistingJournal,
        entries: &[Entry],
        tombstone_bytes: &mut usize,
    ) -> Result<()> {
        let (mut live_bytes, mut expiring_bytes) = (0, 0);
        let path = self.directory.path();
        for entries in entries.chunks(OVERLAP) {
            entries.iter().for_each(|entry| self.index.prefetch(entry.hash));
            for entry in entries {
                let mut position = entry.position(journal.number);
                if entry.is_tombstone {
                    position = position.marked_read();
                    *tombstone_bytes += entry.len_bytes;
                }
                let recovery = self.index.recover(entry.hash, position);
                match recovery.map_err(Error::no_memory(path, "the index"))? {
                    Recovery::Older if !entry.is_tombstone => {
                        journal.counts.dead.mark(position.first());
                        continue;
                    }
                    Recovery::Older | Recovery::Known => continue,
                    Recovery::Replaced(old) if !is_tombstone(old) => self.mark_dead(old),
                    Recovery::Replaced(_) | Recovery::New => {}
                }
                if entry.is_tombstone {
                    self.has_excess.store(true, Ordering::Relaxed);
                } else {
                    live_bytes += position.max_len_bytes() as u64;
                    expiring_bytes +=
                        if position.expires() { position.max_len_bytes() as u64 } else { 0 };
                }
            }
        }
        journal.counts.live_bytes.fetch_add(live_bytes, Ordering::Relaxed);
        journal.counts.expiring_bytes.fetch_add(expiring_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Removes a replaced record from the counts. The thread that adds it to its journal's count
    /// may do so later: the sum is right at the end.
    fn mark_dead(&self, old: Position) {
        let of = self.journals.partition_point(|it| !it.number.is_behind(old));
        self.journals[of - 1].counts.mark_dead(old);
    }

    /// Returns how many bytes of a journal with a hint, up to its `end`, are not records.
    fn damaged_bytes(&self, journal: &ExistingJournal, end: usize) -> Result<u64> {
        let mut arena = self.take_arena()?;
        let (bytes, _) = journal.read(self.directory.path(), arena.arena_mut().memory())?;
        let there = &bytes[..end.min(bytes.len())];
        let damaged_bytes = each_in(there, journal.salt, FIRST_RECORD, |_, _| Ok::<_, Error>(()))?;
        let damaged_bytes = (damaged_bytes + end - there.len()) as u64;
        if damaged_bytes > 0 {
            tracing::warn!(
                "journal cache: {}: its header and {damaged_bytes} bytes are damaged",
                self.directory.path().join(file_name(journal.number)).display()
            );
        }
        Ok(damaged_bytes)
    }

    /// Takes memory for a journal. The newest journal has one arena, and each thread returns its
    /// own: there may be more threads than arenas.
    fn take_arena(&self) -> Result<Pooled> {
        loop {
            let taken = self.pool.take_within(RECHECK_AFTER);
            let no_memory = Error::no_memory(self.directory.path(), "a journal");
            if let Some(arena) = taken.map_err(no_memory)? {
                return Ok(arena);
            }
        }
    }

    /// Reads the whole journal.
    fn scan(&self, journal: &ExistingJournal, file_bytes: u64) -> Result<Contents> {
        // A hint is written after a sync. Without a hint it is unknown whether there was a sync,
        // and what these records replace may be removed as soon as they are in the index.
        let path = || self.directory.path().join(file_name(journal.number));
        journal.file.sync().map_err(|e| Error::io(path(), "syncing records")(e))?;
        let mut arena = self.take_arena()?;
        let (bytes, unreadable) =
            journal.read(self.directory.path(), arena.arena_mut().memory())?;
        let mut walk = Walk::new(bytes, journal.salt);
        let (mut damaged_bytes, mut tombstone_bytes) = (0, 0);
        let mut entries = Vec::with_capacity(OVERLAP);
        for found in walk.by_ref() {
            match found {
                Found::Record(first, record) => {
                    entries.push(Entry::of(self.hasher.hash(record.key()), first, &record));
                    if entries.len() == OVERLAP {
                        self.index_entries(journal, &entries, &mut tombstone_bytes)?;
                        entries.clear();
                    }
                }
                Found::Damage(range) => damaged_bytes += range.len() as u64,
            }
        }
        self.index_entries(journal, &entries, &mut tombstone_bytes)?;
        damaged_bytes += journal.lost_tail(walk.end(), &unreadable);
        let end = journal.frames.as_ref().map_or(walk.end(), |frames| frames.end());
        if damaged_bytes > 0 {
            tracing::warn!(
                "journal cache: {}: {damaged_bytes} bytes are damaged and not used",
                path().display()
            );
        }
        // A damaged file stays as it is, for inspection.
        let file_bytes = match (&journal.frames, damaged_bytes) {
            (None, 0) => self.cut(journal, file_bytes, end),
            _ => file_bytes,
        };
        // Spares the next opening this work. A damaged journal gets no hint: records would be
        // missing in it, and openings trust hints.
        let Self { directory, hasher, .. } = *self;
        if let Some(headroom_bytes) = self.hint_headroom_bytes
            && damaged_bytes == 0
            && end > FIRST_RECORD
        {
            // If space has to be left, hints are written one at a time: otherwise all threads would
            // count on the same space.
            let _hint_lock = (headroom_bytes > 0).then(|| self.hint_lock.lock());
            if hint::has_space(directory, headroom_bytes) {
                hint::write(directory, hasher, journal.number, journal.salt, &bytes[..end]);
            }
        }
        let has_unread = damaged_bytes > 0 && !unreadable.is_empty();
        Ok(Contents {
            file_bytes,
            end,
            tombstone_bytes,
            damaged_bytes,
            has_unread,
            is_scanned: true,
        })
    }

    /// Truncates a file that is longer than a journal, and returns its length. The excess comes
    /// from outside the cache; it would count as used space, and good journals would be evicted for
    /// it.
    fn without_excess(&self, journal: &ExistingJournal, len_bytes: u64) -> u64 {
        let most_bytes = self.pool.arena_bytes() as u64;
        if journal.frames.is_some() || len_bytes <= most_bytes {
            return len_bytes;
        }
        tracing::warn!(
            "journal cache: {}: its file has {len_bytes} bytes, more than a journal; it is \
             truncated",
            self.directory.path().join(file_name(journal.number)).display()
        );
        self.cut_to(journal, len_bytes, most_bytes)
    }

    /// Frees the space after the last record, as a close does, and returns the length of the file:
    /// a process that is killed repeatedly must not leave a series of nearly empty journals.
    fn cut(&self, journal: &ExistingJournal, file_bytes: u64, end: usize) -> u64 {
        let whole = end.next_multiple_of(PAGE_BYTES) as u64;
        // A full journal has less than its longest record there and keeps its length: moving it
        // then gives back the space of a whole journal.
        if file_bytes.saturating_sub(whole) <= file_bytes / FULL_PARTS {
            return file_bytes;
        }
        self.cut_to(journal, file_bytes, whole)
    }

    /// Truncates the file from `file_bytes` to `len_bytes`; returns the resulting length.
    fn cut_to(&self, journal: &ExistingJournal, file_bytes: u64, len_bytes: u64) -> u64 {
        match journal.file.truncate(len_bytes) {
            Ok(()) => len_bytes,
            Err(error) => {
                let path = self.directory.path().join(file_name(journal.number));
                tracing::warn!("journal cache: {}: truncating it: {error}", path.display());
                file_bytes
            }
        }
    }
}
