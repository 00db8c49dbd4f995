//! The ops of the model, and what happens to its server.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use proptest::prelude::*;

use crate::op::{BLOCK_BYTES, BlockRange};
use crate::store::Content;
use crate::types::{ChunkIndex, Layer, VolumeId};

pub(super) const GROUPS: u64 = 2;
pub(super) const LAYER: Layer = Layer(0);
/// 8 or 16 slots, where the groups could use 24.
pub(super) const DEVICE_BYTES: [u64; 2] = [4 << 20, 6 << 20];
pub(super) const MAX_BYTES: u64 = 16 << 20;
/// The first blocks of ops: at the edges of three slots.
pub(super) const BLOCKS: [u16; 5] = [0, 1, 63, 64, 127];

/// The volumes of a group, and the chunks of each.
pub(super) const CHUNKS: [(u32, u32); 4] = [(1, 0), (1, 1), (2, 0), (2, 1)];

/// A block of a group: volume, chunk, block.
pub(super) type Place = (u32, u32, u16);

/// What a block is, if it is there: zeros, or the number of the op that has written it.
pub(super) type Value = Option<u64>;

pub(super) type State = BTreeMap<Place, Value>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelOp {
    pub(super) volume: u32,
    pub(super) chunk: u32,
    pub(super) first: u16,
    pub(super) blocks: u16,
    pub(super) kind: Kind,
    pub(super) id: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Write,
    Zero,
    Discard,
}

impl ModelOp {
    pub(super) fn range(&self) -> BlockRange {
        BlockRange { chunk: ChunkIndex(self.chunk), first: self.first, blocks: self.blocks }
    }

    pub(super) fn content(&self) -> Content {
        match self.kind {
            Kind::Write => data(self.first..self.first + self.blocks, self.id),
            Kind::Zero => Content::Zeros,
            Kind::Discard => Content::Absent,
        }
    }

    pub(super) fn apply(&self, state: &mut State) {
        for block in self.first..self.first + self.blocks {
            let place = (self.volume, self.chunk, block);
            match self.kind {
                Kind::Write => state.insert(place, Some(self.id)),
                Kind::Zero => state.insert(place, None),
                Kind::Discard => state.remove(&place),
            };
        }
    }
}

pub(super) fn page(block: u16, id: u64) -> Vec<u8> {
    (id << 16 | u64::from(block)).to_le_bytes().repeat(BLOCK_BYTES / 8)
}

pub(super) fn data(blocks: std::ops::Range<u16>, id: u64) -> Content {
    let pages: Vec<Vec<u8>> = blocks.map(|block| page(block, id)).collect();
    let crcs = pages.iter().map(|page| crc32c::crc32c(page)).collect();
    Content::Data(Bytes::from(pages.concat()), crcs)
}

/// The state after the first `count` ops.
pub(super) fn state_after(ops: &[ModelOp], count: u64) -> State {
    let mut state = State::new();
    ops[..count as usize].iter().for_each(|op| op.apply(&mut state));
    state
}

pub(super) fn volumes_after(ops: &[ModelOp], count: u64) -> BTreeSet<VolumeId> {
    ops[..count as usize].iter().map(|op| VolumeId(op.volume)).collect()
}

// -- Steps

#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Propose(u64, ModelOp),
    Sync,
    Commit(u64),
    Apply(u64, u8),
    WriteBack,
    Device(u8),
    /// All of the above for a group.
    Turn(u64, u8),
    /// Applies an op before its commit index is durable.
    Hurry(u64, ModelOp, u8),
    Checkpoint(u8),
    /// A whole checkpoint.
    Complete,
    Read(u64),
    /// Another leader replaces the entries that are not committed.
    Replace(u64, ModelOp),
    Recreate(u64),
    /// A replica is removed, and the other group uses its slots before that is durable.
    HandOver(u64),
    /// Ops that the other replicas commit without this one.
    Elsewhere(u64, ModelOp),
    CatchUp(u64, u8),
    Install(u64, u8),
    /// The next flush fails.
    FailFlush,
    Crash {
        is_power_cut: bool,
        keeps: u8,
    },
}

pub(super) fn op() -> impl Strategy<Value = ModelOp> {
    let kind = prop_oneof![6 => Just(Kind::Write), 1 => Just(Kind::Zero), 3 => Just(Kind::Discard)];
    let blocks =
        (prop::sample::select(BLOCKS.to_vec()), prop_oneof![4 => 1..4_u16, 1 => 1..130_u16]);
    (1..3_u32, 0..2_u32, blocks, kind).prop_map(|(volume, chunk, (first, blocks), kind)| {
        let blocks = match kind {
            Kind::Write => blocks.min(4),
            Kind::Zero | Kind::Discard => blocks,
        };
        let blocks = blocks.min(192 - first);
        ModelOp { volume, chunk, first, blocks, kind, id: 0 }
    })
}

pub(super) fn crash() -> impl Strategy<Value = Step> {
    let keeps = prop_oneof![Just(0), any::<u8>()];
    (any::<bool>(), keeps).prop_map(|(is_power_cut, keeps)| Step::Crash { is_power_cut, keeps })
}

pub(super) fn group() -> impl Strategy<Value = u64> {
    1..=GROUPS
}

/// Steps of all kinds.
pub(super) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => (group(), op()).prop_map(|(group, op)| Step::Propose(group, op)),
        3 => Just(Step::Sync),
        4 => group().prop_map(Step::Commit),
        6 => (group(), 1..4_u8).prop_map(|(group, count)| Step::Apply(group, count)),
        4 => Just(Step::WriteBack),
        8 => (1..6_u8).prop_map(Step::Device),
        6 => (group(), 0..8_u8).prop_map(|(group, count)| Step::Turn(group, count)),
        6 => (group(), op(), 0..4_u8).prop_map(|(group, op, count)| Step::Hurry(group, op, count)),
        10 => (1..4_u8).prop_map(Step::Checkpoint),
        3 => Just(Step::Complete),
        4 => group().prop_map(Step::Read),
        1 => (group(), op()).prop_map(|(group, op)| Step::Replace(group, op)),
        1 => group().prop_map(Step::Recreate),
        1 => group().prop_map(Step::HandOver),
        1 => (group(), op()).prop_map(|(group, op)| Step::Elsewhere(group, op)),
        2 => (group(), 1..4_u8).prop_map(|(group, count)| Step::CatchUp(group, count)),
        3 => (group(), 0..3_u8).prop_map(|(group, behind)| Step::Install(group, behind)),
        1 => Just(Step::FailFlush),
        4 => crash(),
    ]
}

/// Steps around the installs of one group.
pub(super) fn install_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => op().prop_map(|op| Step::Elsewhere(1, op)),
        20 => (0..3_u8).prop_map(|behind| Step::Install(1, behind)),
        2 => Just(Step::Sync),
        6 => Just(Step::WriteBack),
        10 => (1..4_u8).prop_map(Step::Device),
        8 => (1..3_u8).prop_map(Step::Checkpoint),
        1 => Just(Step::Complete),
        2 => op().prop_map(|op| Step::Hurry(2, op, 1)),
        1 => (0..4_u8).prop_map(|count| Step::Turn(1, count)),
        1 => (1..4_u8).prop_map(|count| Step::CatchUp(1, count)),
        4 => crash(),
    ]
}

pub(super) fn case() -> impl Strategy<Value = (u64, Vec<Step>)> {
    let steps = prop_oneof![
        3 => prop::collection::vec(step(), 20..250),
        2 => prop::collection::vec(install_step(), 20..250),
    ];
    (any::<u64>(), steps)
}
