//! All entries, journal by journal.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use crate::cache::Value;
use crate::error::Result;
use crate::journal::{FIRST_RECORD, Journal, Loaded};
use crate::place::{Granule, JournalNumber};
use crate::pool::Pooled;
use crate::record::{HEADER_BYTES, Header, Kind, Record};
use crate::shared::{Shared, now_millis};
use crate::walk::{Found, Walk};

/// Records whose entries in the index are looked at together: the processor fetches them at one time.
const OVERLAP: usize = 32;

/// A key and its value.
#[derive(Clone, Debug)]
pub struct Entry {
    record: Loaded,
    key: Range<usize>,
    value: Range<usize>,
}

impl Entry {
    /// Its key.
    pub fn key(&self) -> &[u8] {
        &self.record.bytes()[self.key.clone()]
    }

    /// Its value.
    pub fn value(&self) -> &[u8] {
        &self.record.bytes()[self.value.clone()]
    }

    /// Its value alone.
    pub fn into_value(self) -> Value {
        Value(self.record.slice(self.value))
    }
}

/// See [`crate::Cache::iter`].
pub struct Iter<'a> {
    shared: &'a Shared,
    /// The next journal is the first one from this number on.
    next: JournalNumber,
    open: Option<Open>,
    ready: VecDeque<Entry>,
}

/// The journal that is at hand.
struct Open {
    journal: Arc<Journal>,
    /// All of its records from `at` to `end` can be read here.
    arena: Arc<Pooled>,
    at: usize,
    end: usize,
    /// Something may be added to it.
    is_open: bool,
    /// Since `end` was found, records were met that are not the newest of their keys any more: what has replaced them may be behind it.
    has_missed: bool,
    /// It was read from the disk just now, and may be damaged.
    is_unchecked: bool,
}

impl<'a> Iter<'a> {
    pub(crate) fn new(shared: &'a Shared) -> Self {
        Self { shared, next: JournalNumber(0), open: None, ready: VecDeque::with_capacity(OVERLAP) }
    }

    /// The next journal; false if there is none any more.
    fn open_next(&mut self) -> Result<bool> {
        let journal = self.shared.journals.all().into_iter().find(|it| it.number >= self.next);
        let Some(journal) = journal else { return Ok(false) };
        self.next = JournalNumber(journal.number.0 + 1);
        let sealed_at = journal.counts.end_bytes.load(Ordering::Acquire);
        let (arena, is_unchecked) = match &journal.arena {
            Some(arena) => (arena.clone(), false),
            None => (Arc::new(self.shared.load_whole(&journal, sealed_at)?), true),
        };
        let is_open = sealed_at == 0;
        let end = if is_open { published(&arena) } else { sealed_at };
        let (at, has_missed) = (FIRST_RECORD, false);
        self.open = Some(Open { journal, arena, at, end, is_open, has_missed, is_unchecked });
        Ok(true)
    }

    /// Look at the next records of the journal at hand, those together of which only the index knows whether they count; false if there are none.
    fn take_records(&mut self) -> bool {
        let Some(open) = &mut self.open else { return false };
        let arena = open.arena.clone();
        let mut seen = Vec::with_capacity(OVERLAP);
        while seen.len() < OVERLAP
            && let Some((first, record)) = open.next_record(&arena)
        {
            if record.header().kind == Kind::Value {
                let hash = open.may_be_dead(first).then(|| self.shared.hasher.hash(record.key()));
                hash.inspect(|hash| self.shared.index.prefetch(*hash));
                seen.push((first, record, hash));
            }
        }
        for (first, record, hash) in &seen {
            let is_newest = hash.is_none_or(|hash| {
                let place = record.place(open.journal.number, *first, hash);
                self.shared.index.find(hash).is_some_and(|named| named.is_same(place))
            });
            open.has_missed |= !is_newest;
            if is_newest && !record.has_expired(now_millis) {
                self.ready.push_back(open.entry(*first, record));
            }
        }
        if open.at >= open.end && open.is_open && std::mem::take(&mut open.has_missed) {
            open.end = published(&arena);
        }
        open.at < open.end || !self.ready.is_empty()
    }
}

impl Open {
    /// The next entry, if it is known without the index that it counts.
    #[inline]
    fn next_alive(&mut self) -> Option<Entry> {
        if self.is_open || self.is_unchecked || self.at >= self.end {
            return None;
        }
        let first = Granule::at(self.at);
        if self.journal.counts.dead.may_be(first) {
            return None;
        }
        let record = Record::trusted(self.arena.read(self.at..self.end)?)?;
        if record.header().kind != Kind::Value || record.has_expired(now_millis) {
            return None;
        }
        self.at += record.header().padded_bytes();
        Some(self.entry(first, &record))
    }

    fn may_be_dead(&self, first: Granule) -> bool {
        self.is_open || self.journal.counts.dead.may_be(first)
    }

    fn entry(&self, first: Granule, record: &Record<'_>) -> Entry {
        let len = record.header().len_bytes();
        Entry {
            record: Loaded::hot(self.arena.clone(), first.byte(), len),
            key: record.key_range(),
            value: record.value_range(),
        }
    }

    fn next_record<'b>(&mut self, arena: &'b Pooled) -> Option<(Granule, Record<'b>)> {
        let at = self.at;
        if at >= self.end {
            return None;
        }
        if !self.is_unchecked {
            let header = arena.read(at..at + HEADER_BYTES).and_then(Header::parse);
            let record =
                header.and_then(|it| Record::trusted(arena.read(at..at + it.len_bytes())?));
            self.at = record.map_or(self.end, |record| at + record.header().padded_bytes());
            return record.map(|record| (Granule::at(at), record));
        }
        let bytes = arena.read(0..self.end).expect("sealed up to its end");
        let mut walk = Walk::from(bytes, self.journal.salt, at);
        let found = walk.find_map(|found| match found {
            Found::Record(first, record) => Some((first, record)),
            Found::Damage(_) => None,
        });
        self.at = if found.is_some() { walk.end() } else { self.end };
        found
    }
}

/// Where everything ends that was taken until now. Who has taken a place gives it up at once.
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
            if let Some(entry) = self.open.as_mut().and_then(Open::next_alive) {
                return Some(Ok(entry));
            }
            if self.take_records() {
                continue;
            }
            self.open = None;
            match self.open_next() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
