//! The overlay: blocks that are applied and not yet in the store. Apply, replay and installs write
//! here, and write-back takes what may go to the device. `docs/format/volume-log.md`, section 5.
//!
//! - W1: a block is taken only if its entry is at or below the group's durable commit.
//! - Two writes of one block are never in flight together. A newer version waits, so that a block
//!   that is written again and again is written once per landing.
//! - A checkpoint waits for what was here at its swap, or for what has replaced it since.
//!
//! Pieces that may be written now are indexed, so that taking one costs the same however many
//! there are: a piece is *eligible* when W1 allows its write, and *ready* when in addition no write
//! of its blocks is in flight.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Bound, Range};

use bytes::Bytes;

use super::sector::{Word, mix};
use crate::op::BLOCK_BYTES;
use crate::types::{BlockIndex, ChunkIndex, GroupId, Index, Layer, VolumeId};

/// A chunk of a layer of a volume, in the group that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChunkKey {
    /// The group.
    pub(super) group: GroupId,
    /// The volume.
    pub(super) volume: VolumeId,
    /// The chunk.
    pub(super) chunk: ChunkIndex,
    /// The layer.
    pub(super) layer: Layer,
}

impl ChunkKey {
    /// The word of a block whose data has this CRC32C.
    pub(super) fn word_of_data(self, block: u16, crc: u32) -> Word {
        Word::of_data(crc, mix(self.group, self.volume, self.chunk, BlockIndex(block)))
    }
}

/// What blocks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The blocks, one after the other, and the CRC32C of each.
    Data(Bytes, Vec<u32>),
    /// They read as zeros.
    Zeros,
    /// They are not there: an older layer, or nothing.
    Absent,
}

impl Content {
    /// A part of it, by numbers of blocks.
    pub(super) fn slice(&self, blocks: Range<usize>) -> Self {
        match self {
            Self::Data(data, crcs) => Self::Data(
                data.slice(blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES),
                crcs[blocks].to_vec(),
            ),
            Self::Zeros => Self::Zeros,
            Self::Absent => Self::Absent,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Data(data, _) => data.len(),
            Self::Zeros | Self::Absent => 0,
        }
    }

    /// Whether a slot must be allocated for the blocks.
    pub(super) fn needs_slot(&self) -> bool {
        !matches!(self, Self::Absent)
    }

    /// The word of block `block` of a chunk, which is the block with number `at` of the content.
    pub(super) fn word(&self, key: ChunkKey, block: u16, at: usize) -> Word {
        match self {
            Self::Data(_, crcs) => key.word_of_data(block, crcs[at]),
            Self::Zeros => Word::ZEROS,
            Self::Absent => Word::ABSENT,
        }
    }
}

/// Memory of a piece beside its data, for the budget.
const PIECE_BYTES: usize = 128;

/// Neighbouring blocks of one content and one entry. Its first block is its key in the map.
#[derive(Clone, Debug)]
struct Piece {
    blocks: u16,
    content: Content,
    index: Index,
    /// W1 allows the write.
    is_eligible: bool,
    /// The write-back that has taken it.
    flight: Option<FlightId>,
    /// The checkpoint in progress waits for it.
    is_awaited: bool,
}

/// The pieces and write-backs of a chunk, at least one of either.
#[derive(Debug, Default)]
struct Chunk {
    pieces: BTreeMap<u16, Piece>,
    flights: Vec<(FlightId, Range<u16>)>,
    /// The first blocks of the pieces that are ready.
    ready: BTreeSet<u16>,
    /// Those of them that the checkpoint in progress waits for.
    ready_awaited: BTreeSet<u16>,
}

impl Chunk {
    fn is_ready(&self, first: u16, piece: &Piece) -> bool {
        let end = first + piece.blocks;
        piece.is_eligible
            && piece.flight.is_none()
            && !self.flights.iter().any(|(_, taken)| taken.start < end && first < taken.end)
    }

    /// The pieces with blocks in a range, each with its first block.
    fn overlapping<'a>(
        &'a self,
        blocks: &Range<u16>,
    ) -> impl Iterator<Item = (u16, &'a Piece)> + use<'a> {
        let before = self.pieces.range(..blocks.start).next_back();
        let first = match before {
            Some((first, piece)) if first + piece.blocks > blocks.start => *first,
            _ => blocks.start,
        };
        self.pieces.range(first..blocks.end).map(|(first, piece)| (*first, piece))
    }

    /// The first blocks of the pieces with blocks in a range.
    fn firsts(&self, blocks: &Range<u16>) -> Vec<u16> {
        self.overlapping(blocks).map(|(first, _)| first).collect()
    }
}

/// Blocks of an entry that is not yet known to be durably committed.
#[derive(Debug)]
struct Waiting {
    index: Index,
    key: ChunkKey,
    blocks: Range<u16>,
}

/// The number of a write-back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FlightId(u64);

/// Blocks to be written to the store, or words to be set without a write.
#[derive(Clone, Debug)]
pub(super) struct WriteBack {
    /// To be given to [`Overlay::landed`].
    pub(super) id: FlightId,
    /// The chunk.
    pub(super) key: ChunkKey,
    /// The blocks, in ascending order and without a gap, each run with its content.
    pub(super) runs: Vec<(Range<u16>, Content)>,
}

/// Blocks that are applied and not yet in the store, of all groups of a server.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    chunks: BTreeMap<ChunkKey, Chunk>,
    /// The chunks with ready pieces.
    ready: BTreeSet<ChunkKey>,
    /// The chunks with ready pieces that the checkpoint in progress waits for.
    ready_awaited: BTreeSet<ChunkKey>,
    /// What waits for the durable commit of its group, by index in ascending order.
    waiting: BTreeMap<GroupId, VecDeque<Waiting>>,
    /// The write-backs in flight.
    flights: BTreeMap<FlightId, (ChunkKey, Range<u16>)>,
    /// Write-backs that were in flight at the swap of the checkpoint in progress.
    awaited_flights: BTreeSet<FlightId>,
    /// Number of pieces that the checkpoint in progress waits for.
    awaited: usize,
    next_flight: u64,
    bytes: usize,
}

impl Overlay {
    /// Memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is nothing to be written and nothing in flight.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Whether a group has something to be written or in flight.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn has_group(&self, group: GroupId) -> bool {
        self.chunks.range(first_key(group)..).next().is_some_and(|(key, _)| key.group == group)
    }

    /// Replaces `blocks` of a chunk by what entry `index` has made of them. Index 0 is that of
    /// blocks that are not from an entry: no commit has to precede their write.
    pub(super) fn insert(
        &mut self,
        key: ChunkKey,
        blocks: Range<u16>,
        content: Content,
        index: Index,
    ) {
        let is_awaited = self.cut(key, &blocks);
        let count = blocks.end - blocks.start;
        let waiting = self.waiting.entry(key.group).or_default();
        // Blocks that are not from an entry go to the front.
        let at = match waiting.back() {
            Some(last) if last.index > index => waiting.partition_point(|w| w.index <= index),
            _ => waiting.len(),
        };
        waiting.insert(at, Waiting { index, key, blocks: blocks.clone() });
        self.bytes += size_of::<Waiting>();
        let piece =
            Piece { blocks: count, content, index, is_eligible: false, flight: None, is_awaited };
        self.put(key, blocks.start, piece);
    }

    /// Removes `blocks` from the pieces of a chunk. Returns whether the checkpoint waits for one.
    fn cut(&mut self, key: ChunkKey, blocks: &Range<u16>) -> bool {
        let Some(chunk) = self.chunks.get(&key) else { return false };
        let mut is_awaited = false;
        for first in chunk.firsts(blocks) {
            let piece = self.take(key, first);
            is_awaited |= piece.is_awaited;
            let end = first + piece.blocks;
            for rest in [first..blocks.start.min(end), blocks.end.max(first)..end] {
                if rest.start < rest.end {
                    let part = usize::from(rest.start - first)..usize::from(rest.end - first);
                    let content = piece.content.slice(part);
                    let blocks = rest.end - rest.start;
                    self.put(key, rest.start, Piece { blocks, content, ..piece });
                }
            }
        }
        is_awaited
    }

    fn put(&mut self, key: ChunkKey, first: u16, piece: Piece) {
        self.bytes += PIECE_BYTES + piece.content.bytes();
        self.awaited += usize::from(piece.is_awaited);
        let chunk = self.chunks.entry(key).or_default();
        let replaced = chunk.pieces.insert(first, piece);
        assert!(replaced.is_none(), "pieces of a chunk do not overlap");
        self.refresh(key, first);
    }

    fn take(&mut self, key: ChunkKey, first: u16) -> Piece {
        let chunk = self.chunks.get_mut(&key).expect("the chunk has pieces");
        let piece = chunk.pieces.remove(&first).expect("the piece is there");
        self.refresh(key, first);
        self.bytes -= PIECE_BYTES + piece.content.bytes();
        self.awaited -= usize::from(piece.is_awaited);
        piece
    }

    /// Notes whether the piece that begins with a block is ready; it may have been removed.
    fn refresh(&mut self, key: ChunkKey, first: u16) {
        let chunk = self.chunks.get_mut(&key).expect("the caller has found the chunk");
        let piece = chunk.pieces.get(&first);
        let is_ready = piece.is_some_and(|piece| chunk.is_ready(first, piece));
        let is_awaited = is_ready && piece.is_some_and(|piece| piece.is_awaited);
        set(&mut chunk.ready, &mut self.ready, key, first, is_ready);
        set(&mut chunk.ready_awaited, &mut self.ready_awaited, key, first, is_awaited);
        if chunk.pieces.is_empty() && chunk.flights.is_empty() {
            self.chunks.remove(&key);
        }
    }

    /// Whether a piece with blocks in a range needs a slot.
    pub(super) fn needs_slot(&self, key: ChunkKey, blocks: &Range<u16>) -> bool {
        self.overlapping(key, blocks).any(|(_, piece)| piece.content.needs_slot())
    }

    /// Whether one of the blocks waits to be written as the entry `index` or an older one has made
    /// it.
    pub(super) fn has_up_to(&self, key: ChunkKey, blocks: &Range<u16>, index: Index) -> bool {
        self.overlapping(key, blocks).any(|(_, piece)| piece.index <= index)
    }

    /// Whether one of the blocks waits to be written.
    pub(super) fn has(&self, key: ChunkKey, blocks: &Range<u16>) -> bool {
        self.overlapping(key, blocks).next().is_some()
    }

    /// What the overlay has of `blocks`, in ascending order. The rest is in the store.
    pub(super) fn read(
        &self,
        key: ChunkKey,
        blocks: Range<u16>,
    ) -> impl Iterator<Item = (Range<u16>, Content)> {
        self.overlapping(key, &blocks).map(move |(first, piece)| {
            let found = blocks.start.max(first)..blocks.end.min(first + piece.blocks);
            let part = usize::from(found.start - first)..usize::from(found.end - first);
            (found, piece.content.slice(part))
        })
    }

    /// The pieces with blocks in a range, each with its first block.
    fn overlapping<'a>(
        &'a self,
        key: ChunkKey,
        blocks: &Range<u16>,
    ) -> impl Iterator<Item = (u16, &'a Piece)> + use<'a> {
        self.chunks.get(&key).map(|chunk| chunk.overlapping(blocks)).into_iter().flatten()
    }

    /// Notes durable commits: pieces at or below them may be written.
    pub(super) fn commit(&mut self, durable_commit: impl Fn(GroupId) -> Index) {
        let mut eligible = Vec::new();
        self.waiting.retain(|group, waiting| {
            let commit = durable_commit(*group);
            while let Some(first) = waiting.pop_front_if(|waiting| waiting.index <= commit) {
                eligible.push((first, commit));
            }
            !waiting.is_empty()
        });
        self.bytes -= eligible.len() * size_of::<Waiting>();
        for (Waiting { key, blocks, .. }, commit) in eligible {
            let Some(chunk) = self.chunks.get_mut(&key) else { continue };
            for first in chunk.firsts(&blocks) {
                let chunk = self.chunks.get_mut(&key).expect("it has pieces");
                let piece = chunk.pieces.get_mut(&first).expect("found above");
                if !piece.is_eligible && piece.index <= commit {
                    piece.is_eligible = true;
                    self.refresh(key, first);
                }
            }
        }
    }

    /// Takes neighbouring blocks of a chunk that may be written now, at most `max_blocks` unless
    /// one piece has more: what a checkpoint waits for first, otherwise in the order of chunks
    /// behind `after`.
    pub(super) fn next_write(
        &mut self,
        after: Option<ChunkKey>,
        max_blocks: u16,
    ) -> Option<WriteBack> {
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let next = |chunks: &BTreeSet<ChunkKey>| {
            chunks.range(behind).next().or_else(|| chunks.first()).copied()
        };
        let (key, first) = if let Some(key) = next(&self.ready_awaited) {
            (key, *self.chunks[&key].ready_awaited.first().expect("the chunk has one"))
        } else {
            let key = next(&self.ready)?;
            (key, *self.chunks[&key].ready.first().expect("the chunk has one"))
        };
        let chunk = self.chunks.get_mut(&key).expect("a chunk with ready pieces is there");
        let id = FlightId(self.next_flight);
        self.next_flight += 1;
        let mut runs: Vec<(Range<u16>, Content)> = Vec::new();
        let mut end = first;
        for (start, piece) in chunk.pieces.range_mut(first..) {
            let is_next = *start == end && end - first + piece.blocks <= max_blocks;
            if !((runs.is_empty() || is_next) && chunk.ready.contains(start)) {
                break;
            }
            end = start + piece.blocks;
            piece.flight = Some(id);
            runs.push((*start..end, piece.content.clone()));
        }
        chunk.flights.push((id, first..end));
        self.flights.insert(id, (key, first..end));
        for (blocks, _) in &runs {
            self.refresh(key, blocks.start);
        }
        Some(WriteBack { id, key, runs })
    }

    /// The write-back has completed on the device. What was not replaced meanwhile is removed.
    pub(super) fn landed(&mut self, id: FlightId) {
        let (key, blocks) = self.flights.remove(&id).expect("a write-back lands once");
        self.awaited_flights.remove(&id);
        let chunk = self.chunks.get_mut(&key).expect("a chunk with write-backs is there");
        chunk.flights.retain(|(other, _)| *other != id);
        let pieces = chunk.firsts(&blocks);
        if chunk.pieces.is_empty() && chunk.flights.is_empty() {
            self.chunks.remove(&key);
        }
        for first in pieces {
            if self.chunks[&key].pieces[&first].flight == Some(id) {
                self.take(key, first);
            } else {
                self.refresh(key, first);
            }
        }
    }

    /// The swap of a checkpoint: from now on it waits for all pieces at or below their group's
    /// base, and for all write-backs in flight.
    pub(super) fn swap(&mut self, base: impl Fn(GroupId) -> Index) {
        assert!(!self.has_awaited(), "one checkpoint at a time");
        for (key, chunk) in &mut self.chunks {
            if chunk.pieces.is_empty() {
                // The replica may be gone.
                continue;
            }
            let base = base(key.group);
            for (first, piece) in &mut chunk.pieces {
                piece.is_awaited = piece.index <= base || piece.flight.is_some();
                self.awaited += usize::from(piece.is_awaited);
                if piece.is_awaited && chunk.ready.contains(first) {
                    set(&mut chunk.ready_awaited, &mut self.ready_awaited, *key, *first, true);
                }
            }
        }
        self.awaited_flights = self.flights.keys().copied().collect();
    }

    /// Whether the checkpoint in progress has something left to wait for.
    pub(super) fn has_awaited(&self) -> bool {
        !self.awaited_flights.is_empty() || self.awaited > 0
    }

    /// Removes what a group has here, because the replica is gone. Write-backs in flight go on.
    pub(super) fn remove_group(&mut self, group: GroupId) {
        let chunks = self.chunks.range(first_key(group)..);
        let chunks: Vec<(ChunkKey, Vec<u16>)> = chunks
            .take_while(|(key, _)| key.group == group)
            .map(|(key, chunk)| (*key, chunk.pieces.keys().copied().collect()))
            .collect();
        for (key, pieces) in chunks {
            for first in pieces {
                self.take(key, first);
            }
        }
        let waiting = self.waiting.remove(&group).unwrap_or_default();
        self.bytes -= waiting.len() * size_of::<Waiting>();
    }

    /// The number of pieces that the checkpoint in progress waits for.
    #[cfg(test)]
    pub(super) fn awaited(&self) -> usize {
        self.awaited
    }
}

/// Adds a block to the blocks of a chunk, or removes it, and the chunk if it has no other.
fn set(
    blocks: &mut BTreeSet<u16>,
    chunks: &mut BTreeSet<ChunkKey>,
    key: ChunkKey,
    block: u16,
    is_in: bool,
) {
    if is_in {
        if blocks.is_empty() {
            chunks.insert(key);
        }
        blocks.insert(block);
    } else if blocks.remove(&block) && blocks.is_empty() {
        chunks.remove(&key);
    }
}

/// The least key of a group.
pub(super) fn first_key(group: GroupId) -> ChunkKey {
    ChunkKey { group, volume: VolumeId(0), chunk: ChunkIndex(0), layer: Layer(0) }
}
