//! Visiting all records of a journal in order, for eviction, compaction, iteration and
//! verification. A journal that is not in memory is read in pieces: all of it does not fit
//! the memory budget.

use std::io;
use std::ops::Range;

use alluvium_device::{AlignedBuf, PAGE_BYTES};

use crate::allocator::RELEASE_WITHIN;
use crate::error::{Error, Result};
use crate::journal::{FIRST_RECORD, Journal, Loaded};
use crate::pool::Pooled;
use crate::position::Granule;
use crate::record::{HEADER_BYTES, Header, Record, Salt};
use crate::shared::{CHUNK_BYTES, Shared};
use crate::sync::Arc;
use crate::walk::{Found, Walk};

/// Passes the records in a journal's bytes, from the one at `at` on, to `each`; returns how many
/// bytes are damaged. `bytes` range from the beginning of the file to the end of its last record.
pub(crate) fn each_in<E>(
    bytes: &[u8],
    salt: Salt,
    at: usize,
    mut each: impl FnMut(Granule, &Record<'_>) -> std::result::Result<(), E>,
) -> std::result::Result<usize, E> {
    let mut walk = Walk::from(bytes, salt, at);
    let mut damaged_bytes = 0;
    for found in walk.by_ref() {
        match found {
            Found::Record(first, record) => each(first, &record)?,
            Found::Damage(range) => damaged_bytes += range.len(),
        }
    }
    Ok(damaged_bytes + bytes.len().saturating_sub(walk.end()))
}

/// A part of a journal that is not in memory: as large as requested, or as a record in it. Clones
/// share the memory.
#[derive(Clone)]
pub(crate) struct Piece {
    /// Reused, unless a record in it is still referenced.
    memory: Arc<AlignedBuf>,
    /// The range of the journal that it contains.
    present: Range<usize>,
}

impl Piece {
    /// Creates an empty piece.
    pub(crate) fn none() -> Self {
        Self { memory: Arc::new(AlignedBuf::zeroed(PAGE_BYTES)), present: 0..0 }
    }

    /// Returns the record at `at`, if all of it is here, undamaged.
    pub(crate) fn record(&self, at: usize, salt: Salt) -> Option<Record<'_>> {
        Record::checked(self.bytes_at(at)?, salt, Granule::at(at))
    }

    /// Returns a reference to the record of `len` bytes at `at`, which shares the memory.
    pub(crate) fn loaded(&self, at: usize, len: usize) -> Loaded {
        Loaded::cold(self.memory.clone(), at - self.present.start, len)
    }

    /// Returns what is here from `at` on, if anything.
    fn bytes_at(&self, at: usize) -> Option<&[u8]> {
        let here = &self.memory[..self.present.len()];
        self.present.contains(&at).then(|| &here[at - self.present.start..])
    }

    /// Reads on at `at`, where [`Self::record`] has found none: about `piece_bytes`, not beyond
    /// `end`, or as much as the record there has. False if the record is damaged.
    pub(crate) fn read_on(
        &mut self,
        journal: &Journal,
        at: usize,
        end: usize,
        piece_bytes: usize,
    ) -> Result<bool> {
        // A compressed journal is read by whole frames.
        let unit = if journal.frames.is_some() { CHUNK_BYTES } else { PAGE_BYTES };
        let mut wanted_bytes = piece_bytes;
        if let Some(here) = self.bytes_at(at) {
            let record_bytes = Header::parse(here).map_or(HEADER_BYTES, Header::padded_bytes);
            if record_bytes <= here.len() || at + record_bytes > end {
                return Ok(false);
            }
            wanted_bytes = wanted_bytes.max(at + record_bytes - journal.piece_start(at));
        }
        let wanted_bytes = wanted_bytes.next_multiple_of(unit);
        // Not larger memory: a caller that keeps a short record keeps all of it.
        let is_free =
            Arc::get_mut(&mut self.memory).is_some_and(|memory| memory.len() == wanted_bytes);
        if !is_free {
            // The previous memory is released first.
            *self = Self::none();
            self.memory = Arc::new(journal.source().pages(wanted_bytes)?);
        }
        self.present = 0..0;
        let memory = Arc::get_mut(&mut self.memory).expect("replaced if shared");
        self.present = journal.read_piece(at, end, memory)?;
        Ok(true)
    }
}

/// Passes the records of a file to `each` like [`each_in`], from the first one on as long as all
/// are undamaged; returns where that ends. Takes memory for a piece of the current `piece_bytes`,
/// or for the longest record.
fn each_whole<E: From<Error>>(
    journal: &Journal,
    end: usize,
    piece_bytes: impl Fn() -> usize,
    mut each: impl FnMut(Granule, &Record<'_>) -> std::result::Result<(), E>,
) -> std::result::Result<usize, E> {
    let mut piece = Piece::none();
    let mut at = FIRST_RECORD;
    while at < end {
        if let Some(record) = piece.record(at, journal.salt) {
            each(Granule::at(at), &record)?;
            at += record.header().padded_bytes();
        } else if !piece.read_on(journal, at, end, piece_bytes())? {
            break;
        }
    }
    Ok(at)
}

impl Shared {
    /// Passes all records of a sealed journal to `each`; returns how many bytes of it are damaged.
    /// A journal that is not in memory is read by about `piece_bytes` at a time, evaluated before
    /// each piece: a concurrent read may have to wait for one.
    pub(crate) fn each_record<E: From<Error>>(
        &self,
        journal: &Journal,
        piece_bytes: impl Fn() -> usize,
        mut each: impl FnMut(Granule, &Record<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<usize, E> {
        let end = journal.end();
        if let Some(arena) = &journal.arena {
            let bytes = arena.read(0..end).expect("sealed up to its end");
            return each_in(bytes, journal.salt, FIRST_RECORD, each);
        }
        if journal.frames.as_ref().is_some_and(|frames| frames.is_lost()) {
            return Ok(end - FIRST_RECORD);
        }
        let whole_until = each_whole(journal, end, piece_bytes, &mut each)?;
        if whole_until == end {
            return Ok(0);
        }
        // The records after the damage are located in the whole journal at once.
        let arena = self.load_into(journal, end, self.take_arena_for_search()?)?;
        let bytes = arena.read(0..end).expect("sealed up to its end");
        each_in(bytes, journal.salt, whole_until, each)
    }

    /// Takes memory for a whole journal within the budget: free memory, or that of the least read
    /// hot journal.
    fn take_arena_for_search(&self) -> Result<Pooled> {
        let no_memory = || self.no_memory("a damaged journal");
        if let Some(arena) = self.pool.take() {
            return Ok(arena);
        }
        if let Some(coldest) = self.coldest_in_memory() {
            self.demote(&coldest);
        }
        let taken = self.pool.take_within(RELEASE_WITHIN).map_err(no_memory())?;
        // Writers or readers use all of it now; the caller's task is retried.
        taken.ok_or_else(|| no_memory()(io::ErrorKind::WouldBlock.into()))
    }

    /// Loads a sealed journal for an iteration that has met damage in it: in memory beyond the
    /// budget if none is free.
    pub(crate) fn load_whole(&self, journal: &Journal, end: usize) -> Result<Pooled> {
        let arena = self.pool.take_or_create().map_err(self.no_memory("a journal"))?;
        self.load_into(journal, end, arena)
    }

    /// Loads a sealed journal into this memory.
    pub(crate) fn load_into(
        &self,
        journal: &Journal,
        end: usize,
        mut arena: Pooled,
    ) -> Result<Pooled> {
        let memory = arena.arena_mut();
        journal.read_whole(end, memory.memory())?;
        memory.seal(end);
        Ok(arena)
    }
}
