//! Iteration over all entries, journal by journal. A journal that is not in memory is read a MiB at
//! a time.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::thread;
use std::vec;

use crate::cache::Value;
use crate::clock::Clock;
use crate::error::Result;
use crate::journal::{FIRST_RECORD, Hold, Journal, Loaded};
use crate::pieces::Piece;
use crate::pool::Pooled;
use crate::position::{Granule, JournalNumber};
use crate::record::{HEADER_BYTES, Header, Kind, Record};
use crate::shared::{CHUNK_BYTES, Shared};
use crate::sync::Arc;
use crate::walk::{Found, Walk, search_bytes_of};

/// The number of records whose index entries are looked up together, so that the processor's cache
/// misses overlap.
const OVERLAP: usize = 32;

/// A key and its value.
#[derive(Clone, Debug)]
pub struct Entry {
    record: Loaded,
    /// Where the key begins in the record; the value follows it, up to the end of the record.
    key_at: u32,
    value_at: u32,
}

impl Entry {
    /// Returns the key.
    pub fn key(&self) -> &[u8] {
        &self.record.bytes()[self.key_at as usize..self.value_at as usize]
    }

    /// Returns the value.
    pub fn value(&self) -> &[u8] {
        &self.record.bytes()[self.value_at as usize..]
    }

    /// Returns the value alone.
    pub fn into_value(self) -> Value {
        let len = self.record.bytes().len();
        Value(self.record.slice(self.value_at as usize..len))
    }
}

/// An iterator over the entries of a cache. See [`crate::Cache::iter`].
pub struct Iter<'a> {
    shared: &'a Shared,
    /// Journals not yet visited, as of the last listing.
    ahead: vec::IntoIter<JournalNumber>,
    /// Where to look for journals created since then: they have the highest numbers.
    next: JournalNumber,
    open: Option<Open>,
    ready: VecDeque<Entry>,
}

/// The journal being read.
struct Open {
    journal: Arc<Journal>,
    bytes: Bytes,
    /// The records from `at` to `end` are still to be read.
    at: usize,
    end: usize,
    /// Records may still be appended to it.
    is_open: bool,
    /// Since `end` was determined, records were met that are no longer the newest of their keys:
    /// their replacements may be after `end`.
    has_missed: bool,
    /// On disk: the current piece has no more records.
    is_piece_done: bool,
    /// After damage: how many bytes may still be searched for records, in total for the journal, as
    /// in an opening.
    search_bytes: usize,
}

/// Where records are read from. Entries keep only this in memory.
#[derive(Clone)]
enum Bytes {
    /// The whole journal in memory: checksums are not verified again.
    Hot(Arc<Hold>),
    /// A piece of a journal on disk.
    Cold(Piece),
    /// A whole journal on disk, once damage was met: the records after it are located in all of it
    /// at once.
    Damaged(Arc<Hold>),
}

impl Bytes {
    /// Returns the entry of the record at `first`.
    #[inline]
    fn entry(&self, first: Granule, record: &Record<'_>) -> Entry {
        let (at, len) = (first.byte(), record.header().len_bytes());
        let loaded = match self {
            Self::Hot(hold) | Self::Damaged(hold) => Loaded::iterated(hold.clone(), at, len),
            Self::Cold(piece) => piece.loaded(at, len),
        };
        let key = record.key_range();
        Entry { record: loaded, key_at: key.start as u32, value_at: key.end as u32 }
    }
}

impl<'a> Iter<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        let (ahead, ready) = (Vec::new().into_iter(), VecDeque::with_capacity(OVERLAP));
        Self { shared, ahead, next: JournalNumber(0), open: None, ready }
    }

    fn find_next(&mut self) -> Option<Arc<Journal>> {
        let journals = &self.shared.journals;
        loop {
            if self.ahead.as_slice().is_empty() {
                self.ahead = journals.numbers_from(self.next).into_iter();
            }
            let number = self.ahead.next()?;
            self.next = JournalNumber(number.0 + 1);
            // What was still live in a removed journal is in a newer one.
            if let Some(journal) = journals.get(number) {
                return Some(journal);
            }
        }
    }

    /// Moves on to the next journal; false if there is none.
    fn open_next(&mut self) -> bool {
        let Some(journal) = self.find_next() else { return false };
        let sealed_at = journal.counts.end_bytes.load(Ordering::Acquire);
        let (is_open, is_piece_done) = (sealed_at == 0, journal.arena.is_none());
        let (bytes, end) = match &journal.arena {
            Some(arena) if is_open => (Bytes::Hot(Arc::new(Hold(arena.clone()))), published(arena)),
            Some(arena) => (Bytes::Hot(Arc::new(Hold(arena.clone()))), sealed_at),
            None => (Bytes::Cold(Piece::none()), sealed_at),
        };
        self.open = Some(Open {
            journal,
            bytes,
            at: FIRST_RECORD,
            end,
            is_open,
            has_missed: false,
            is_piece_done,
            search_bytes: search_bytes_of(self.shared.journal_bytes),
        });
        true
    }

    /// Reads the next records of the current journal, looking up together those for which only the
    /// index knows whether they are live; false if there are none.
    fn take_records(&mut self) -> Result<bool> {
        let Some(open) = &mut self.open else { return Ok(false) };
        if std::mem::take(&mut open.is_piece_done) {
            open.read_on(self.shared)?;
        }
        let bytes = open.bytes.clone();
        let mut seen = Vec::with_capacity(OVERLAP);
        while seen.len() < OVERLAP
            && let Some((first, record)) = open.next_record(&bytes)
        {
            if record.header().kind == Kind::Value {
                // Checked before the index confirms that it is the newest: the key was then absent
                // at that moment.
                let has_expired = record.has_expired(&self.shared.clock);
                let needs_index = has_expired || open.may_be_dead(first);
                let hash = needs_index.then(|| self.shared.hasher.hash(record.key()));
                hash.inspect(|hash| self.shared.index.prefetch(*hash));
                seen.push((first, record, hash, has_expired));
            }
        }
        for (first, record, hash, has_expired) in &seen {
            let is_newest = hash.is_none_or(|hash| {
                let position = record.position(open.journal.number, *first, hash);
                let named = match has_expired {
                    true => self.shared.index.find_after_writer(hash),
                    false => self.shared.index.find(hash),
                };
                named.is_some_and(|named| named.is_same(position))
            });
            open.has_missed |= !is_newest;
            if is_newest && !has_expired {
                self.ready.push_back(bytes.entry(*first, record));
            }
        }
        if let Bytes::Hot(hold) = &bytes
            && open.at >= open.end
            && open.is_open
            && std::mem::take(&mut open.has_missed)
        {
            open.end = published(&hold.0);
        }
        Ok(open.at < open.end || !self.ready.is_empty())
    }
}

impl Open {
    /// Returns the next entry if it is known to be live without the index.
    #[inline]
    fn next_alive(&mut self, clock: &Clock) -> Option<Entry> {
        let Bytes::Hot(hold) = &self.bytes else { return None };
        if self.is_open || self.at >= self.end {
            return None;
        }
        let first = Granule::at(self.at);
        if self.journal.counts.dead.may_be_dead(first) {
            return None;
        }
        let record = Record::trusted(hold.0.read(self.at..self.end)?)?;
        if record.header().kind != Kind::Value || record.has_expired(clock) {
            return None;
        }
        self.at += record.header().padded_bytes();
        Some(self.bytes.entry(first, &record))
    }

    fn may_be_dead(&self, first: Granule) -> bool {
        // Records that an opening did not find after damage are not marked as replaced either.
        let is_damaged = matches!(self.bytes, Bytes::Damaged(_));
        self.is_open || is_damaged || self.journal.counts.dead.may_be_dead(first)
    }

    /// For a journal on disk: loads the piece that begins with the next record, or the whole
    /// journal if that record is damaged.
    fn read_on(&mut self, shared: &Shared) -> Result<()> {
        let Bytes::Cold(piece) = &mut self.bytes else { return Ok(()) };
        if !piece.read_on(&self.journal, self.at, self.end, CHUNK_BYTES)? {
            let arena = shared.load_whole(&self.journal, self.end)?;
            self.bytes = Bytes::Damaged(Arc::new(Hold(Arc::new(arena))));
        }
        Ok(())
    }

    fn next_record<'b>(&mut self, bytes: &'b Bytes) -> Option<(Granule, Record<'b>)> {
        let at = self.at;
        if at >= self.end {
            return None;
        }
        match bytes {
            Bytes::Hot(hold) => {
                let arena = &hold.0;
                let header = arena.read(at..at + HEADER_BYTES).and_then(Header::parse);
                let record =
                    header.and_then(|it| Record::trusted(arena.read(at..at + it.len_bytes())?));
                self.at = record.map_or(self.end, |record| at + record.header().padded_bytes());
                record.map(|record| (Granule::at(at), record))
            }
            Bytes::Cold(piece) => {
                let record = piece.record(at, self.journal.salt);
                self.is_piece_done = record.is_none();
                self.at += record.map_or(0, |record| record.header().padded_bytes());
                record.map(|record| (Granule::at(at), record))
            }
            Bytes::Damaged(hold) => {
                let bytes = hold.0.read(0..self.end).expect("sealed up to its end");
                let walk = Walk::from(bytes, self.journal.salt, at);
                let mut walk = walk.with_search_bytes(self.search_bytes);
                let found = walk.find_map(|found| match found {
                    Found::Record(first, record) => Some((first, record)),
                    Found::Damage(_) => None,
                });
                self.search_bytes = walk.search_bytes();
                self.at = if found.is_some() { walk.end() } else { self.end };
                found
            }
        }
    }
}

/// Returns the end of everything appended until now. A writer between reservation and publication
/// holds its reservation only briefly.
fn published(arena: &Pooled) -> usize {
    let mut taken = arena.taken_bytes();
    loop {
        match taken {
            Some(end) if arena.published_from(FIRST_RECORD) >= end => return end,
            Some(_) => {}
            None => taken = arena.taken_bytes(),
        }
        thread::yield_now();
    }
}

impl Iterator for Iter<'_> {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.ready.pop_front() {
                return Some(Ok(entry));
            }
            let clock = &self.shared.clock;
            if let Some(entry) = self.open.as_mut().and_then(|open| open.next_alive(clock)) {
                return Some(Ok(entry));
            }
            match self.take_records() {
                Ok(true) => continue,
                Ok(false) => self.open = None,
                // The rest of the journal cannot be read.
                Err(error) => {
                    self.open = None;
                    return Some(Err(error));
                }
            }
            if !self.open_next() {
                return None;
            }
        }
    }
}
