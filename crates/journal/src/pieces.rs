//! The records of a journal one after the other, for whoever evicts, compacts or checks all of it. One that is not in memory is read in pieces: the memory budget has no room for it as a whole.

use std::io;

use alluvium_device::AlignedBuf;

use crate::compact::STEP_BYTES;
use crate::error::{Error, Result};
use crate::flush::LET_GO_WITHIN;
use crate::journal::{FIRST_RECORD, Journal};
use crate::place::Granule;
use crate::pool::Pooled;
use crate::record::{HEADER_BYTES, Header, Record, Salt};
use crate::shared::{CHUNK_BYTES, Shared};
use crate::walk::{Found, Walk};

/// Hand the records of a journal's bytes to `each`, from the one at `at` on; returns how many bytes are damaged. `bytes`: from the beginning of the file to the end of its last record.
pub(crate) fn each_in(
    bytes: &[u8],
    salt: Salt,
    at: usize,
    mut each: impl FnMut(Granule, &Record<'_>) -> Result<()>,
) -> Result<usize> {
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

/// The same of a file, from its first record on as long as all of them are undamaged; returns where that ends. Takes memory for a piece, or for the longest record.
fn each_whole(
    journal: &Journal,
    end: usize,
    mut each: impl FnMut(Granule, &Record<'_>) -> Result<()>,
) -> Result<usize> {
    // A compressed journal is read by whole frames.
    let piece_bytes = if journal.frames.is_some() { CHUNK_BYTES } else { STEP_BYTES };
    let mut piece = AlignedBuf::zeroed(piece_bytes);
    let mut at = FIRST_RECORD;
    while at < end {
        let there = journal.read_piece(at, end, &mut piece)?;
        let bytes = &piece[..there.len()];
        let from = at;
        while at < there.end
            && let Some(record) =
                Record::checked(&bytes[at - there.start..], journal.salt, Granule::at(at))
        {
            each(Granule::at(at), &record)?;
            at += record.header().padded_bytes();
        }
        if at > from {
            continue;
        }
        // The piece begins with it: it is longer than the piece, or it is damaged.
        let header = Header::parse(&bytes[at - there.start..]);
        let record_end = at + header.map_or(HEADER_BYTES, Header::padded_bytes);
        if record_end <= there.end || record_end > end {
            break;
        }
        piece = AlignedBuf::zeroed((record_end - there.start).next_multiple_of(CHUNK_BYTES));
    }
    Ok(at)
}

impl Shared {
    /// Hand all records of a sealed journal to `each`; returns how many bytes of it are damaged.
    pub(crate) fn each_record(
        &self,
        journal: &Journal,
        mut each: impl FnMut(Granule, &Record<'_>) -> Result<()>,
    ) -> Result<usize> {
        let end = journal.end();
        if let Some(arena) = &journal.arena {
            let bytes = arena.read(0..end).expect("sealed up to its end");
            return each_in(bytes, journal.salt, FIRST_RECORD, each);
        }
        if journal.frames.as_ref().is_some_and(|frames| frames.is_lost()) {
            return Ok(end - FIRST_RECORD);
        }
        let whole_until = each_whole(journal, end, &mut each)?;
        if whole_until == end {
            return Ok(0);
        }
        // What comes behind the damage is found in all of it at one time.
        let arena = self.load_into(journal, end, self.take_to_search()?)?;
        let bytes = arena.read(0..end).expect("sealed up to its end");
        each_in(bytes, journal.salt, whole_until, each)
    }

    /// Memory for a whole journal within the budget: free, or that of the hot one that is read least.
    fn take_to_search(&self) -> Result<Pooled> {
        let no_memory = || Error::no_memory("a damaged journal");
        if let Some(arena) = self.pool.take().map_err(no_memory())? {
            return Ok(arena);
        }
        if let Some(coldest) = self.coldest_in_memory() {
            self.demote(&coldest);
        }
        let taken = self.pool.take_within(LET_GO_WITHIN).map_err(no_memory())?;
        // Writers or readers have all of it now. What this is for is tried again.
        taken.ok_or_else(|| no_memory()(io::ErrorKind::WouldBlock.into()))
    }

    /// A sealed journal's bytes for an iteration, which has the memory of a journal for itself: beyond the budget, if none is free.
    pub(crate) fn load_whole(&self, journal: &Journal, end: usize) -> Result<Pooled> {
        let arena = self.pool.take_anyway().map_err(Error::no_memory("a journal"))?;
        self.load_into(journal, end, arena)
    }

    /// The same in this memory.
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
