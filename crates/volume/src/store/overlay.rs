//! The overlay: blocks that are applied and not yet in the store. Apply, replay and installs write
//! here, and write-back takes what may go to the device. `docs/format/volume-log.md`, section 5.
//!
//! - W1: a block is taken only if its entry is at or below the group's durable commit.
//! - Two writes of one block are never in flight together. A newer version waits, so that a block
//!   that is written again and again is written once per landing.
//! - A checkpoint waits for what was here at its swap, or for what has replaced it since.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Bound, Range};

use bytes::Bytes;

use crate::op::BLOCK_BYTES;
use crate::types::{ChunkIndex, GroupId, Index, Layer, VolumeId};

/// A chunk of a layer of a volume, in the group that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkKey {
    /// The group.
    pub group: GroupId,
    /// The volume.
    pub volume: VolumeId,
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The layer.
    pub layer: Layer,
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
    fn slice(&self, blocks: Range<usize>) -> Self {
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
}

/// Memory of a piece beside its data, for the budget.
const PIECE_BYTES: usize = 128;

/// Neighbouring blocks of one content and one entry. Its first block is its key in the map.
#[derive(Clone, Debug)]
struct Piece {
    blocks: u16,
    content: Content,
    index: Index,
    /// The write-back that has taken it.
    flight: Option<FlightId>,
    /// The checkpoint in progress waits for it.
    is_awaited: bool,
}

/// The number of a write-back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlightId(u64);

/// Blocks to be written to the store, or words to be set without a write.
#[derive(Clone, Debug)]
pub struct WriteBack {
    /// To be given to [`Overlay::landed`].
    pub id: FlightId,
    /// The chunk.
    pub key: ChunkKey,
    /// The blocks, in ascending order and without a gap, each run with its content.
    pub runs: Vec<(Range<u16>, Content)>,
}

/// Blocks that are applied and not yet in the store, of all groups of a server.
#[derive(Debug, Default)]
pub struct Overlay {
    chunks: BTreeMap<ChunkKey, BTreeMap<u16, Piece>>,
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
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there is nothing to be written and nothing in flight.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.flights.is_empty()
    }

    /// Replaces `blocks` of a chunk by what entry `index` has made of them.
    pub fn insert(&mut self, key: ChunkKey, blocks: Range<u16>, content: Content, index: Index) {
        let is_awaited = self.cut(key, &blocks);
        let count = blocks.end - blocks.start;
        let piece = Piece { blocks: count, content, index, flight: None, is_awaited };
        self.put(key, blocks.start, piece);
    }

    /// Removes `blocks` from the pieces of a chunk. Returns whether the checkpoint waits for one.
    fn cut(&mut self, key: ChunkKey, blocks: &Range<u16>) -> bool {
        let Some(pieces) = self.chunks.get(&key) else { return false };
        let before = pieces.range(..blocks.start).next_back();
        let first = match before {
            Some((first, piece)) if first + piece.blocks > blocks.start => *first,
            _ => blocks.start,
        };
        let touched: Vec<u16> = pieces.range(first..blocks.end).map(|(first, _)| *first).collect();
        let mut is_awaited = false;
        for first in touched {
            let piece = self.take(key, first);
            is_awaited |= piece.is_awaited;
            let end = first + piece.blocks;
            for rest in [first..blocks.start.min(end), blocks.end.max(first)..end] {
                if rest.start < rest.end {
                    let part = usize::from(rest.start - first)..usize::from(rest.end - first);
                    let content = piece.content.slice(part);
                    let blocks = rest.end - rest.start;
                    let Piece { index, flight, is_awaited, .. } = piece;
                    let rest_of_piece = Piece { blocks, content, index, flight, is_awaited };
                    self.put(key, rest.start, rest_of_piece);
                }
            }
        }
        is_awaited
    }

    fn put(&mut self, key: ChunkKey, first: u16, piece: Piece) {
        self.bytes += PIECE_BYTES + piece.content.bytes();
        self.awaited += usize::from(piece.is_awaited);
        let replaced = self.chunks.entry(key).or_default().insert(first, piece);
        assert!(replaced.is_none(), "pieces of a chunk do not overlap");
    }

    fn take(&mut self, key: ChunkKey, first: u16) -> Piece {
        let pieces = self.chunks.get_mut(&key).expect("the chunk has pieces");
        let piece = pieces.remove(&first).expect("the piece is there");
        if pieces.is_empty() {
            self.chunks.remove(&key);
        }
        self.bytes -= PIECE_BYTES + piece.content.bytes();
        self.awaited -= usize::from(piece.is_awaited);
        piece
    }

    /// What the overlay has of `blocks`, in ascending order. The rest is in the store.
    pub fn read(
        &self,
        key: ChunkKey,
        blocks: Range<u16>,
    ) -> impl Iterator<Item = (Range<u16>, Content)> {
        let pieces = self.chunks.get(&key);
        let before = pieces.and_then(|pieces| pieces.range(..blocks.start).next_back());
        let others = pieces.into_iter().flat_map({
            let blocks = blocks.clone();
            move |pieces| pieces.range(blocks.clone())
        });
        before.into_iter().chain(others).filter_map(move |(first, piece)| {
            let found = blocks.start.max(*first)..blocks.end.min(first + piece.blocks);
            (found.start < found.end).then(|| {
                let part = usize::from(found.start - first)..usize::from(found.end - first);
                (found, piece.content.slice(part))
            })
        })
    }

    /// Takes neighbouring blocks of a chunk that may be written now, at most `max_blocks`: what a
    /// checkpoint waits for first, otherwise in the order of chunks behind `after`.
    pub fn next_write(
        &mut self,
        after: Option<ChunkKey>,
        max_blocks: u16,
        durable_commit: impl Fn(GroupId) -> Index,
    ) -> Option<WriteBack> {
        let may_go = |key: &ChunkKey, first: u16, piece: &Piece| {
            piece.flight.is_none()
                && piece.index <= durable_commit(key.group)
                && !self.is_in_flight(*key, first..first + piece.blocks)
        };
        let behind = after.map_or(Bound::Unbounded, Bound::Excluded);
        let in_order = || self.chunks.range((behind, Bound::Unbounded)).chain(&self.chunks);
        let find = |only_awaited: bool| {
            in_order().find_map(|(key, pieces)| {
                let mut pieces = pieces.iter();
                pieces
                    .find(|(first, piece)| {
                        (piece.is_awaited || !only_awaited) && may_go(key, **first, piece)
                    })
                    .map(|(first, _)| (*key, *first))
            })
        };
        let awaited = if self.awaited > 0 { find(true) } else { None };
        let (key, first) = awaited.or_else(|| find(false))?;
        let mut runs: Vec<(u16, u16)> = Vec::new();
        let mut end = first;
        for (start, piece) in self.chunks[&key].range(first..) {
            let is_next = *start == end && end - first + piece.blocks <= max_blocks;
            if !(runs.is_empty() || is_next) || !may_go(&key, *start, piece) {
                break;
            }
            end = start + piece.blocks;
            runs.push((*start, piece.blocks));
        }
        let id = FlightId(self.next_flight);
        self.next_flight += 1;
        let pieces = self.chunks.get_mut(&key).expect("found above");
        let mut taken = Vec::with_capacity(runs.len());
        for (start, blocks) in runs {
            let piece = pieces.get_mut(&start).expect("found above");
            piece.flight = Some(id);
            taken.push((start..start + blocks, piece.content.clone()));
        }
        self.flights.insert(id, (key, first..end));
        Some(WriteBack { id, key, runs: taken })
    }

    fn is_in_flight(&self, key: ChunkKey, blocks: Range<u16>) -> bool {
        self.flights.values().any(|(other, taken)| {
            *other == key && taken.start < blocks.end && blocks.start < taken.end
        })
    }

    /// The write-back has completed on the device. What was not replaced meanwhile is removed.
    pub fn landed(&mut self, id: FlightId) {
        let (key, blocks) = self.flights.remove(&id).expect("a write-back lands once");
        self.awaited_flights.remove(&id);
        let Some(pieces) = self.chunks.get(&key) else { return };
        let landed: Vec<u16> = pieces
            .range(blocks)
            .filter(|(_, piece)| piece.flight == Some(id))
            .map(|(first, _)| *first)
            .collect();
        for first in landed {
            self.take(key, first);
        }
    }

    /// The swap of a checkpoint: from now on it waits for all pieces at or below their group's
    /// base, and for all write-backs in flight.
    pub fn swap(&mut self, base: impl Fn(GroupId) -> Index) {
        assert!(!self.has_awaited(), "one checkpoint at a time");
        for (key, pieces) in &mut self.chunks {
            let base = base(key.group);
            for piece in pieces.values_mut() {
                piece.is_awaited = piece.index <= base || piece.flight.is_some();
                self.awaited += usize::from(piece.is_awaited);
            }
        }
        self.awaited_flights = self.flights.keys().copied().collect();
    }

    /// Whether the checkpoint in progress has something left to wait for.
    pub fn has_awaited(&self) -> bool {
        !self.awaited_flights.is_empty() || self.awaited > 0
    }

    /// Removes what a group has here, because the replica is gone. Write-backs in flight go on.
    pub fn remove_group(&mut self, group: GroupId) {
        let chunks: Vec<ChunkKey> =
            self.chunks.keys().filter(|key| key.group == group).copied().collect();
        for key in chunks {
            let firsts: Vec<u16> = self.chunks[&key].keys().copied().collect();
            for first in firsts {
                self.take(key, first);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const BLOCKS: u16 = 12;

    fn key(group: u64, chunk: u32) -> ChunkKey {
        ChunkKey {
            group: GroupId(group),
            volume: VolumeId(1),
            chunk: ChunkIndex(chunk),
            layer: Layer(0),
        }
    }

    /// Blocks that say which entry has written them.
    fn data(index: u64, blocks: u16) -> Content {
        let block = |_| index.to_le_bytes().repeat(BLOCK_BYTES / 8);
        let data: Vec<u8> = (0..blocks).flat_map(block).collect();
        Content::Data(data.into(), vec![index as u32; blocks.into()])
    }

    /// The entry that has made a block what it is, and whether it has data.
    fn entry(content: &Content, at: usize) -> (u64, bool) {
        match content {
            Content::Data(data, crcs) => {
                let at = at * BLOCK_BYTES;
                let index = u64::from_le_bytes(data[at..at + 8].try_into().unwrap());
                assert_eq!(crcs.len() * BLOCK_BYTES, data.len());
                assert_eq!(u64::from(crcs[at / BLOCK_BYTES]), index);
                (index, true)
            }
            Content::Zeros | Content::Absent => (0, false),
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Insert { group: u64, chunk: u32, first: u16, blocks: u16, kind: u8 },
        Commit { group: u64, by: u64 },
        Write { max_blocks: u16 },
        Land(prop::sample::Index),
        Swap,
    }

    fn step() -> impl Strategy<Value = Step> {
        let insert = (1..3_u64, 0..2_u32, 0..BLOCKS, 1..5_u16, 0..4_u8).prop_map(
            |(group, chunk, first, blocks, kind)| {
                let blocks = blocks.min(BLOCKS - first);
                Step::Insert { group, chunk, first, blocks, kind }
            },
        );
        prop_oneof![
            6 => insert,
            3 => (1..3_u64, 0..6_u64).prop_map(|(group, by)| Step::Commit { group, by }),
            4 => (1..9_u16).prop_map(|max_blocks| Step::Write { max_blocks }),
            4 => any::<prop::sample::Index>().prop_map(Step::Land),
            1 => Just(Step::Swap),
        ]
    }

    type Place = (ChunkKey, u16);

    /// The overlay over a device, beside plain maps.
    #[derive(Default)]
    struct Model {
        overlay: Overlay,
        /// The last change of each block: entry, and whether it has data.
        applied: BTreeMap<Place, (u64, bool)>,
        /// The entry of each block that has landed last.
        landed: BTreeMap<Place, u64>,
        flights: Vec<(WriteBack, BTreeMap<Place, u64>)>,
        /// The entry that has last changed each block when it was taken, in order.
        next_index: [u64; 3],
        durable: [u64; 3],
        after: Option<ChunkKey>,
        /// What a checkpoint in progress has to make durable: the last change of each block that
        /// was at or below its base at the swap.
        required: Option<BTreeMap<Place, u64>>,
    }

    impl Model {
        fn step(&mut self, step: Step) {
            match step {
                Step::Insert { group, chunk, first, blocks, kind } => {
                    let index = self.next_index[group as usize] + 1;
                    self.next_index[group as usize] = index;
                    let content = match kind {
                        0 => Content::Zeros,
                        1 => Content::Absent,
                        _ => data(index, blocks),
                    };
                    let key = key(group, chunk);
                    let range = first..first + blocks;
                    self.overlay.insert(key, range.clone(), content, Index(index));
                    for block in range {
                        self.applied.insert((key, block), (index, kind > 1));
                    }
                }
                Step::Commit { group, by } => {
                    let durable = &mut self.durable[group as usize];
                    *durable = (*durable + by).min(self.next_index[group as usize]);
                }
                Step::Write { max_blocks } => {
                    let durable = self.durable;
                    let commit = |group: GroupId| Index(durable[group.0 as usize]);
                    let taken = self.overlay.next_write(self.after, max_blocks, commit);
                    let Some(taken) = taken else { return };
                    self.after = Some(taken.key);
                    let mut entries = BTreeMap::new();
                    let mut next = taken.runs[0].0.start;
                    for (range, content) in &taken.runs {
                        assert_eq!(range.start, next, "neighbouring blocks");
                        next = range.end;
                        for block in range.clone() {
                            let place = (taken.key, block);
                            let (index, has_data) = self.applied[&place];
                            let found = entry(content, usize::from(block - range.start));
                            assert_eq!(found, (if has_data { index } else { 0 }, has_data));
                            assert!(index <= durable[taken.key.group.0 as usize], "W1");
                            let is_twice =
                                self.flights.iter().any(|(_, others)| others.contains_key(&place));
                            assert!(!is_twice, "two writes of a block in flight");
                            entries.insert(place, index);
                        }
                    }
                    assert!(taken.runs.len() == 1 || entries.len() <= usize::from(max_blocks));
                    self.flights.push((taken, entries));
                }
                Step::Land(at) if !self.flights.is_empty() => {
                    self.land(at.index(self.flights.len()));
                }
                Step::Land(_) => {}
                Step::Swap if self.required.is_none() => {
                    let durable = self.durable;
                    self.overlay.swap(|group| Index(durable[group.0 as usize]));
                    let is_below = |(place, (index, _)): &(&Place, &(u64, bool))| {
                        *index <= durable[place.0.group.0 as usize]
                    };
                    let below = self.applied.iter().filter(is_below);
                    self.required = Some(below.map(|(place, entry)| (*place, entry.0)).collect());
                }
                Step::Swap => {}
            }
        }

        fn land(&mut self, flight: usize) {
            let (taken, entries) = self.flights.remove(flight);
            self.overlay.landed(taken.id);
            for (place, index) in entries {
                let before = self.landed.insert(place, index);
                assert!(before < Some(index), "an older write has landed later");
            }
        }

        fn check(&mut self) {
            for chunk in [key(1, 0), key(1, 1), key(2, 0), key(2, 1)] {
                let mut found = BTreeMap::new();
                for (range, content) in self.overlay.read(chunk, 1..BLOCKS) {
                    for block in range.clone() {
                        let at = usize::from(block - range.start);
                        assert!(found.insert(block, entry(&content, at)).is_none());
                    }
                }
                for block in 1..BLOCKS {
                    let place = (chunk, block);
                    let Some((index, has_data)) = self.applied.get(&place).copied() else {
                        assert!(!found.contains_key(&block));
                        continue;
                    };
                    match found.get(&block) {
                        Some(found) => {
                            let expected = if has_data { index } else { 0 };
                            assert_eq!(*found, (expected, has_data));
                        }
                        None => assert_eq!(self.landed.get(&place), Some(&index), "{place:?}"),
                    }
                }
            }
            if let Some(required) = &self.required
                && !self.overlay.has_awaited()
            {
                for (place, index) in required {
                    assert!(self.landed.get(place) >= Some(index), "{place:?} has not landed");
                }
                self.required = None;
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn blocks_are_read_written_and_awaited_as_in_a_model(
            steps in prop::collection::vec(step(), 1..150),
        ) {
            let mut model = Model::default();
            for step in steps {
                model.step(step);
                model.check();
            }
            // Everything becomes durable, and lands: nothing is left behind or counted.
            model.durable = model.next_index;
            for _ in 0..1000 {
                model.step(Step::Write { max_blocks: 8 });
                if !model.flights.is_empty() {
                    model.land(0);
                }
                model.check();
                if model.overlay.is_empty() {
                    break;
                }
            }
            prop_assert!(model.overlay.is_empty() && model.required.is_none());
            prop_assert_eq!((model.overlay.bytes(), model.overlay.awaited), (0, 0));
        }
    }

    #[test]
    fn a_hot_block_is_written_once_per_landing_and_a_checkpoint_ends() {
        let mut overlay = Overlay::default();
        let key = key(1, 0);
        let all = |_: GroupId| Index(u64::MAX);
        overlay.insert(key, 0..1, data(1, 1), Index(1));
        let first = overlay.next_write(None, 8, all).unwrap();
        overlay.insert(key, 0..1, data(2, 1), Index(2));
        overlay.insert(key, 0..1, data(3, 1), Index(3));
        assert!(overlay.next_write(None, 8, all).is_none(), "a write of it is in flight");
        overlay.swap(|_| Index(2));
        assert!(overlay.has_awaited(), "a write is in flight");
        overlay.landed(first.id);
        assert!(!overlay.has_awaited(), "entry 2 was replaced before the swap");
        let second = overlay.next_write(None, 8, all).unwrap();
        assert_eq!(entry(&second.runs[0].1, 0), (3, true));
        overlay.landed(second.id);
        assert!(overlay.is_empty());
    }

    #[test]
    fn a_removed_group_leaves_nothing_but_writes_in_flight() {
        let mut overlay = Overlay::default();
        let all = |_: GroupId| Index(u64::MAX);
        for group in [1, 2] {
            overlay.insert(key(group, 0), 0..4, data(1, 4), Index(1));
        }
        let taken = overlay.next_write(None, 8, all).unwrap();
        overlay.remove_group(GroupId(1));
        assert!(overlay.read(key(1, 0), 0..4).next().is_none());
        assert!(overlay.read(key(2, 0), 0..4).next().is_some());
        overlay.landed(taken.id);
        assert!(overlay.next_write(None, 8, all).is_some_and(|next| next.key == key(2, 0)));
    }
}
