//! Ops: the commands of the replicated state machine, as bytes. They are the data of log entries
//! and travel in requests. `docs/format/volume-wire.md`, section 6.

use bytes::Bytes;

use crate::fields::{FieldError, Put, Reader};
use crate::types::{AttachEpoch, ChunkIndex, Layer, Parent, PeerId, Sequence, ServerId, VolumeId};

/// Bytes of a block, the unit of checksums and of ops.
pub const BLOCK_BYTES: usize = 4096;
/// Blocks of a chunk.
pub const CHUNK_BLOCKS: u16 = 4096;
/// Chunks of the largest volume.
pub const MAX_CHUNKS: u32 = 1 << 22;
/// Greatest number of blocks of a write.
pub const MAX_WRITE_BLOCKS: u16 = 256;
/// Greatest number of changes in a configuration op.
pub const MAX_CHANGES: u16 = 8;
/// Greatest distance of a number from the floor.
pub const MAX_FLOOR_DISTANCE: u32 = 4095;

const HEAD_BYTES: usize = 40;

const WRITE: u8 = 1;
const ZERO: u8 = 2;
const DISCARD: u8 = 3;
const ATTACH: u8 = 4;
const NOOP: u8 = 5;
const CONFIGURATION: u8 = 9;

/// A command of the replicated state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// A change of blocks.
    Blocks(BlockOp),
    /// A new attachment of a volume.
    Attach(Attach),
    /// Changes nothing. Its index serves as a token; with an epoch it is fenced like a write.
    Noop {
        /// The volume and the epoch of the attachment; `None` for an op that is not fenced.
        attachment: Option<(VolumeId, AttachEpoch)>,
    },
    /// A change of the group's members.
    Configuration(Configuration),
}

/// A change of blocks by an attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockOp {
    /// The volume.
    pub volume: VolumeId,
    /// Epoch of the attachment.
    pub epoch: AttachEpoch,
    /// The volume's current layer.
    pub layer: Layer,
    /// The op's number within its attachment and group, from 1.
    pub number: Sequence,
    /// How far the number is above the lowest one that was not completed when the op was encoded.
    pub floor_distance: u32,
    /// The blocks.
    pub range: BlockRange,
    /// What happens to them.
    pub change: Change,
}

impl BlockOp {
    /// All numbers below it are settled.
    pub fn floor(&self) -> Sequence {
        Sequence(self.number.0 - u64::from(self.floor_distance))
    }
}

/// Blocks of a chunk, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The chunk of the volume.
    pub chunk: ChunkIndex,
    /// The first block in the chunk.
    pub first: u16,
    /// Number of blocks.
    pub blocks: u16,
}

/// What happens to blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// They are replaced.
    Write {
        /// CRC32C of each block.
        crcs: Vec<u32>,
        /// The blocks, one after the other. As decoded, a part of the op's buffer.
        data: Bytes,
    },
    /// They read as zeros, and stay allocated.
    Zero,
    /// They read as zeros, and need no space.
    Discard,
}

impl Change {
    /// The write of whole blocks, with their checksums.
    pub fn write(data: Bytes) -> Self {
        Self::Write { crcs: block_crcs(&data), data }
    }

    /// Verifies the checksums of the blocks of a write.
    pub fn verify(&self) -> Result<(), OpError> {
        match self {
            Self::Write { crcs, data } => {
                verify_blocks(data, crcs).map_err(|block| OpError::Checksum { block })
            }
            Self::Zero | Self::Discard => Ok(()),
        }
    }
}

/// A new attachment of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attach {
    /// The volume.
    pub volume: VolumeId,
    /// The epoch, greater than that of all attachments before.
    pub epoch: AttachEpoch,
    /// What the volume is a clone of.
    pub parent: Option<Parent>,
    /// The server with the gateway, to which the leader hands over if it can.
    pub gateway: Option<ServerId>,
    /// A random number of the attachment.
    pub nonce: u32,
}

/// A change of the group's members. Without changes it leaves a joint configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// How the change takes effect.
    pub transition: Transition,
    /// The changes, at most [`MAX_CHANGES`].
    pub changes: Vec<(ChangeKind, PeerId)>,
}

/// How a change of the members takes effect: raft's `ConfChangeTransition`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// At once if it is simple, otherwise jointly.
    Auto,
    /// Jointly; raft leaves the joint configuration by itself.
    Implicit,
    /// Jointly, until another configuration op leaves the joint configuration.
    Explicit,
}

/// A change of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// It becomes a voter.
    AddVoter,
    /// It leaves the group.
    Remove,
    /// It becomes a learner.
    AddLearner,
}

/// Why bytes are not an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// Kinds 6 to 8 are kept for features that this version does not have.
    #[error("op kind {0} is not supported")]
    Kind(u8),
    /// A field that a decoder of this version does not accept.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// A block does not have its checksum.
    #[error("block {block} of the op does not have its checksum")]
    Checksum {
        /// Number of the block in the op.
        block: usize,
    },
}

impl Op {
    /// Parses an op. The data of a write is a part of `op`.
    ///
    /// # Errors
    /// The bytes are not exactly an op, or break a bound. The checksums of blocks are not verified
    /// ([`Op::verify`]).
    pub fn decode(op: &Bytes) -> Result<Self, OpError> {
        let (head, blocks) = Self::split(op);
        Self::decode_parts(&head, &blocks)
    }

    /// Parses an op whose blocks are in a buffer of their own, as in a frame or in an entry in
    /// memory.
    ///
    /// # Errors
    /// As for [`Op::decode`].
    pub fn decode_parts(head: &Bytes, blocks: &Bytes) -> Result<Self, OpError> {
        let reader = &mut Reader::new(head);
        let kind = reader.u8()?;
        let op = match kind {
            CONFIGURATION => Self::Configuration(Configuration::read(reader)?),
            WRITE | ZERO | DISCARD | ATTACH | NOOP => Self::read(kind, reader, blocks)?,
            other => return Err(OpError::Kind(other)),
        };
        reader.end()?;
        match op.blocks().len() == blocks.len() {
            true => Ok(op),
            false => Err(FieldError::Length { len: head.len() + blocks.len() }.into()),
        }
    }

    /// Splits an encoded op into its head and the blocks of a write. What is not an op is split
    /// somewhere, and is refused by [`Op::decode_parts`].
    pub fn split(op: &Bytes) -> (Bytes, Bytes) {
        let blocks =
            op.get(2..4).and_then(<[u8]>::first_chunk).map_or(0, |n| u16::from_le_bytes(*n));
        let head = match op.first() {
            Some(&WRITE) => op.len().min(HEAD_BYTES + 4 * usize::from(blocks)),
            _ => op.len(),
        };
        (op.slice(..head), op.slice(head..))
    }

    /// The length of the head of the op with which `bytes` begin, by its kind and its counts.
    /// `bytes` may be shorter.
    ///
    /// # Errors
    /// The kind is unknown, or the bytes are too few for it.
    pub(crate) fn head_bytes(bytes: &[u8]) -> Result<usize, OpError> {
        let prefix: [u8; 4] =
            *bytes.first_chunk().ok_or(FieldError::Length { len: bytes.len() })?;
        let count = usize::from(u16::from_le_bytes([prefix[2], prefix[3]]));
        match prefix[0] {
            WRITE => Ok(HEAD_BYTES + 4 * count),
            ZERO | DISCARD | NOOP => Ok(HEAD_BYTES),
            ATTACH => Ok(HEAD_BYTES + 16),
            CONFIGURATION => Ok(8 + 16 * count),
            other => Err(OpError::Kind(other)),
        }
    }

    /// The blocks of a write; empty for every other op.
    pub fn blocks(&self) -> Bytes {
        match self {
            Self::Blocks(BlockOp { change: Change::Write { data, .. }, .. }) => data.clone(),
            _ => Bytes::new(),
        }
    }

    /// The op as far as the replicated state depends on it: a write without its blocks.
    pub(crate) fn without_data(&self) -> Self {
        match self {
            Self::Blocks(op) => Self::Blocks(BlockOp { change: Change::Zero, ..*op }),
            other => other.clone(),
        }
    }

    fn read(kind: u8, reader: &mut Reader<'_>, data: &Bytes) -> Result<Self, FieldError> {
        let head = Head::read(reader)?;
        let Head { blocks, volume, chunk, first, epoch, layer, number, floor_distance } = head;
        if !matches!(kind, WRITE | ZERO | DISCARD) {
            let zeros = (blocks, chunk, first, layer, number, floor_distance);
            if zeros != (0, 0, 0, 0, 0, 0) {
                return Err(FieldError::Field { field: "range of an op", value: chunk.into() });
            }
            return match (kind, volume, epoch) {
                (ATTACH, 1.., 1..) => Attach::read(volume, epoch, reader).map(Self::Attach),
                (NOOP, 0, 0) => Ok(Self::Noop { attachment: None }),
                (NOOP, 1.., 1..) => {
                    Ok(Self::Noop { attachment: Some((VolumeId(volume), AttachEpoch(epoch))) })
                }
                _ => Err(FieldError::Field { field: "epoch of an op", value: epoch }),
            };
        }
        let most = if kind == WRITE { MAX_WRITE_BLOCKS } else { CHUNK_BLOCKS };
        if blocks == 0
            || blocks > most
            || u32::from(first) + u32::from(blocks) > CHUNK_BLOCKS.into()
        {
            return Err(FieldError::Field { field: "blocks of an op", value: blocks.into() });
        }
        if chunk >= MAX_CHUNKS {
            return Err(FieldError::Field { field: "chunk of an op", value: chunk.into() });
        }
        if floor_distance > MAX_FLOOR_DISTANCE || u64::from(floor_distance) >= number {
            return Err(FieldError::Field { field: "number of an op", value: number });
        }
        if volume == 0 || epoch == 0 {
            return Err(FieldError::Field { field: "epoch of an op", value: epoch });
        }
        let change = match kind {
            WRITE => {
                let crcs = (0..blocks).map(|_| reader.u32()).collect::<Result<_, _>>()?;
                if data.len() != usize::from(blocks) * BLOCK_BYTES {
                    return Err(FieldError::Length { len: data.len() });
                }
                Change::Write { crcs, data: data.clone() }
            }
            ZERO => Change::Zero,
            _ => Change::Discard,
        };
        Ok(Self::Blocks(BlockOp {
            volume: VolumeId(volume),
            epoch: AttachEpoch(epoch),
            layer: Layer(layer),
            number: Sequence(number),
            floor_distance,
            range: BlockRange { chunk: ChunkIndex(chunk), first, blocks },
            change,
        }))
    }

    /// Encodes the op without the blocks of a write, which follow.
    pub fn encode_head(&self) -> Vec<u8> {
        match self {
            Self::Blocks(op) => op.encode_head(),
            Self::Attach(attach) => attach.encode(),
            Self::Noop { attachment } => {
                let (volume, epoch) = attachment.unwrap_or_default();
                Head { volume: volume.0, epoch: epoch.0, ..Head::default() }.encode(NOOP, 0)
            }
            Self::Configuration(configuration) => configuration.encode(),
        }
    }

    /// Verifies the checksums of the blocks of a write.
    pub fn verify(&self) -> Result<(), OpError> {
        match self {
            Self::Blocks(op) => op.change.verify(),
            _ => Ok(()),
        }
    }
}

/// Computes the CRC32C of each block.
pub(crate) fn block_crcs(blocks: &[u8]) -> Vec<u32> {
    blocks.chunks(BLOCK_BYTES).map(crc32c::crc32c).collect()
}

/// Verifies the checksums of blocks. Returns the number of the first block that does not have its
/// checksum.
pub(crate) fn verify_blocks(blocks: &[u8], crcs: &[u32]) -> Result<(), usize> {
    let mut pairs = blocks.chunks(BLOCK_BYTES).zip(crcs);
    match pairs.position(|(block, crc)| crc32c::crc32c(block) != *crc) {
        None => Ok(()),
        Some(block) => Err(block),
    }
}

/// The fields that all kinds but the configuration have.
#[derive(Default)]
struct Head {
    blocks: u16,
    volume: u32,
    chunk: u32,
    first: u16,
    epoch: u64,
    layer: u32,
    number: u64,
    floor_distance: u32,
}

impl Head {
    /// Reads what follows the kind.
    fn read(reader: &mut Reader<'_>) -> Result<Self, FieldError> {
        reader.zeros::<1>()?;
        let (blocks, volume, chunk) = (reader.u16()?, reader.u32()?, reader.u32()?);
        let first = reader.u16()?;
        reader.zeros::<2>()?;
        let (epoch, layer) = (reader.u64()?, reader.u32()?);
        let (number, floor_distance) = (reader.u64()?, reader.u32()?);
        Ok(Self { blocks, volume, chunk, first, epoch, layer, number, floor_distance })
    }

    /// Encodes it, with space for `more` bytes.
    fn encode(&self, kind: u8, more: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + more);
        out.extend([kind, 0]);
        out.put_u16(self.blocks);
        out.put_u32(self.volume);
        out.put_u32(self.chunk);
        out.put_u16(self.first);
        out.put_zeros(2);
        out.put_u64(self.epoch);
        out.put_u32(self.layer);
        out.put_u64(self.number);
        out.put_u32(self.floor_distance);
        out
    }
}

impl BlockOp {
    fn encode_head(&self) -> Vec<u8> {
        let head = Head {
            blocks: self.range.blocks,
            volume: self.volume.0,
            chunk: self.range.chunk.0,
            first: self.range.first,
            epoch: self.epoch.0,
            layer: self.layer.0,
            number: self.number.0,
            floor_distance: self.floor_distance,
        };
        match &self.change {
            Change::Write { crcs, .. } => {
                let mut out = head.encode(WRITE, 4 * crcs.len());
                for crc in crcs {
                    out.put_u32(*crc);
                }
                out
            }
            Change::Zero => head.encode(ZERO, 0),
            Change::Discard => head.encode(DISCARD, 0),
        }
    }
}

impl Attach {
    fn encode(&self) -> Vec<u8> {
        let head = Head { volume: self.volume.0, epoch: self.epoch.0, ..Head::default() };
        let mut out = head.encode(ATTACH, 16);
        out.put_u32(self.parent.map_or(0, |parent| parent.volume.0));
        out.put_u32(self.parent.map_or(0, |parent| parent.layer.0));
        out.put_u32(self.gateway.map_or(0, |gateway| gateway.0));
        out.put_u32(self.nonce);
        out
    }

    fn read(volume: u32, epoch: u64, reader: &mut Reader<'_>) -> Result<Self, FieldError> {
        let (parent, layer) = (VolumeId(reader.u32()?), Layer(reader.u32()?));
        if parent == VolumeId(0) && layer != Layer(0) {
            return Err(FieldError::Field { field: "parent's layer", value: layer.0.into() });
        }
        let gateway = ServerId(reader.u32()?);
        Ok(Self {
            volume: VolumeId(volume),
            epoch: AttachEpoch(epoch),
            parent: (parent != VolumeId(0)).then_some(Parent { volume: parent, layer }),
            gateway: (gateway != ServerId(0)).then_some(gateway),
            nonce: reader.u32()?,
        })
    }
}

impl Configuration {
    fn encode(&self) -> Vec<u8> {
        let count = self.changes.len();
        assert!(count <= usize::from(MAX_CHANGES), "a configuration op has few changes");
        let mut out = Vec::with_capacity(8 + 16 * count);
        let transition = match self.transition {
            Transition::Auto => 0,
            Transition::Implicit => 1,
            Transition::Explicit => 2,
        };
        out.extend([CONFIGURATION, transition]);
        out.put_u16(count as u16);
        out.put_zeros(4);
        for (kind, peer) in &self.changes {
            out.push(match kind {
                ChangeKind::AddVoter => 0,
                ChangeKind::Remove => 1,
                ChangeKind::AddLearner => 2,
            });
            out.put_zeros(7);
            out.put_u64(peer.0);
        }
        out
    }

    /// Reads what follows the kind.
    fn read(reader: &mut Reader<'_>) -> Result<Self, FieldError> {
        let transition = match reader.u8()? {
            0 => Transition::Auto,
            1 => Transition::Implicit,
            2 => Transition::Explicit,
            other => return Err(FieldError::Field { field: "transition", value: other.into() }),
        };
        let count = reader.u16()?;
        if count > MAX_CHANGES {
            return Err(FieldError::Field { field: "number of changes", value: count.into() });
        }
        reader.zeros::<4>()?;
        let change = |_| {
            let kind = match reader.u8()? {
                0 => ChangeKind::AddVoter,
                1 => ChangeKind::Remove,
                2 => ChangeKind::AddLearner,
                other => return Err(FieldError::Field { field: "change", value: other.into() }),
            };
            reader.zeros::<7>()?;
            Ok((kind, PeerId(reader.u64()?)))
        };
        Ok(Self { transition, changes: (0..count).map(change).collect::<Result<_, _>>()? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Arbitrary bytes, in one buffer or in two, are refused or have one meaning.
        #[test]
        fn parts_mean_what_one_buffer_means(
            head in vec(any::<u8>(), 1..80),
            blocks in vec(any::<u8>(), 0..40),
        ) {
            let (head, blocks) = (Bytes::from(head), Bytes::from(blocks));
            let whole = Bytes::from([&head[..], &blocks[..]].concat());
            let (first, rest) = Op::split(&whole);
            prop_assert_eq!([&first[..], &rest[..]].concat(), &whole[..]);
            prop_assert_eq!(Op::decode(&whole), Op::decode_parts(&first, &rest));
        }
    }

    /// The bytes of an op, as an entry of the log has them.
    fn encode(op: &Op) -> Bytes {
        [op.encode_head(), op.blocks().to_vec()].concat().into()
    }

    fn change(blocks: u16) -> impl Strategy<Value = Change> {
        let write = vec(any::<u8>(), 3).prop_map(move |seed| {
            let block = |n: u16| seed.iter().copied().cycle().skip(n.into()).take(BLOCK_BYTES);
            let data: Vec<u8> = (0..blocks).flat_map(block).collect();
            Change::write(data.into())
        });
        prop_oneof![write, Just(Change::Zero), Just(Change::Discard)]
    }

    fn block_op() -> impl Strategy<Value = Op> {
        let range = (0..MAX_CHUNKS, 0..CHUNK_BLOCKS - 4, 1..4_u16);
        let number = (0..=MAX_FLOOR_DISTANCE, 1..u64::MAX >> 1);
        (1..=u32::MAX, 1..=u64::MAX, any::<u32>(), number, range).prop_flat_map(
            |(volume, epoch, layer, (floor_distance, above), (chunk, first, blocks))| {
                change(blocks).prop_map(move |change| {
                    Op::Blocks(BlockOp {
                        volume: VolumeId(volume),
                        epoch: AttachEpoch(epoch),
                        layer: Layer(layer),
                        number: Sequence(u64::from(floor_distance) + above),
                        floor_distance,
                        range: BlockRange { chunk: ChunkIndex(chunk), first, blocks },
                        change,
                    })
                })
            },
        )
    }

    fn attach() -> impl Strategy<Value = Op> {
        let parent = prop::option::of((1..=u32::MAX, any::<u32>()));
        let gateway = prop::option::of(1..=u32::MAX);
        (1..=u32::MAX, 1..=u64::MAX, parent, gateway, any::<u32>()).prop_map(
            |(volume, epoch, parent, gateway, nonce)| {
                let parent = parent.map(|(volume, layer)| Parent {
                    volume: VolumeId(volume),
                    layer: Layer(layer),
                });
                Op::Attach(Attach {
                    volume: VolumeId(volume),
                    epoch: AttachEpoch(epoch),
                    parent,
                    gateway: gateway.map(ServerId),
                    nonce,
                })
            },
        )
    }

    fn configuration() -> impl Strategy<Value = Op> {
        let transition = prop::sample::select(vec![
            Transition::Auto,
            Transition::Implicit,
            Transition::Explicit,
        ]);
        let kind = prop::sample::select(vec![
            ChangeKind::AddVoter,
            ChangeKind::Remove,
            ChangeKind::AddLearner,
        ]);
        let changes = vec((kind, any::<u64>().prop_map(PeerId)), 0..=usize::from(MAX_CHANGES));
        (transition, changes).prop_map(|(transition, changes)| {
            Op::Configuration(Configuration { transition, changes })
        })
    }

    fn op() -> impl Strategy<Value = Op> {
        let noop = prop::option::of((1..=u32::MAX, 1..=u64::MAX)).prop_map(|attachment| Op::Noop {
            attachment: attachment.map(|(volume, epoch)| (VolumeId(volume), AttachEpoch(epoch))),
        });
        prop_oneof![4 => block_op(), 1 => attach(), 1 => configuration(), 1 => noop]
    }

    proptest! {
        #[test]
        fn an_op_is_read_as_it_was_written(op in op()) {
            let bytes = encode(&op);
            prop_assert_eq!(op.verify(), Ok(()));
            prop_assert_eq!(Op::decode(&bytes), Ok(op));
        }

        #[test]
        fn an_op_that_is_shorter_or_longer_is_refused(op in op(), at: prop::sample::Index) {
            let bytes = encode(&op);
            prop_assert!(Op::decode(&bytes.slice(..at.index(bytes.len()))).is_err());
            prop_assert!(Op::decode(&[&bytes[..], &[0]].concat().into()).is_err());
        }

        /// What is accepted is written again as the same bytes, and a changed block is found.
        #[test]
        fn a_changed_op_is_refused_or_has_one_encoding(
            op in op(),
            at: prop::sample::Index,
            more in 1..=u8::MAX,
        ) {
            let mut bytes = encode(&op).to_vec();
            let at = at.index(bytes.len());
            bytes[at] = bytes[at].wrapping_add(more);
            let bytes = Bytes::from(bytes);
            if let Ok(other) = Op::decode(&bytes) {
                prop_assert_eq!(encode(&other), bytes);
                if at >= HEAD_BYTES && matches!(op, Op::Blocks(_)) {
                    let verified = other.verify();
                    let is_found = matches!(verified, Err(OpError::Checksum { .. }));
                    prop_assert!(is_found, "{:?}", verified);
                }
            }
        }
    }

    #[test]
    fn the_checksums_of_a_write_find_a_changed_block() {
        let Change::Write { mut crcs, data } = Change::write(vec![7; 2 * BLOCK_BYTES].into())
        else {
            unreachable!()
        };
        assert_eq!(Change::Write { crcs: crcs.clone(), data: data.clone() }.verify(), Ok(()));
        crcs[1] ^= 1;
        let damaged = Change::Write { crcs, data }.verify();
        assert_eq!(damaged, Err(OpError::Checksum { block: 1 }));
    }

    #[test]
    fn bounds_are_checked() {
        let op = BlockOp {
            volume: VolumeId(1),
            epoch: AttachEpoch(1),
            layer: Layer(0),
            number: Sequence(5),
            floor_distance: 4,
            range: BlockRange { chunk: ChunkIndex(3), first: 0, blocks: 4096 },
            change: Change::Zero,
        };
        assert_eq!(op.floor(), Sequence(1));
        let decoded = |op: BlockOp| Op::decode(&encode(&Op::Blocks(op)));
        assert!(decoded(op.clone()).is_ok());
        let range = op.range;
        for range in [
            BlockRange { blocks: 0, ..range },
            BlockRange { first: 1, ..range },
            BlockRange { chunk: ChunkIndex(MAX_CHUNKS), ..range },
            BlockRange { first: u16::MAX, blocks: u16::MAX, ..range },
        ] {
            assert!(decoded(BlockOp { range, ..op.clone() }).is_err(), "{range:?}");
        }
        // A floor of 0, and a number beyond the window.
        assert!(decoded(BlockOp { floor_distance: 5, ..op.clone() }).is_err());
        let far = BlockOp { number: Sequence(9000), floor_distance: 4096, ..op.clone() };
        assert!(decoded(far).is_err());
        assert!(decoded(BlockOp { epoch: AttachEpoch(0), ..op.clone() }).is_err());
        // A write of more than 1 MiB.
        let blocks = MAX_WRITE_BLOCKS + 1;
        let data = Bytes::from(vec![0; usize::from(blocks) * BLOCK_BYTES]);
        let change = Change::Write { crcs: vec![0; blocks.into()], data };
        assert!(decoded(BlockOp { range: BlockRange { blocks, ..range }, change, ..op }).is_err());
        for kind in [0, 6, 7, 8, 10] {
            assert_eq!(Op::decode(&vec![kind; 40].into()), Err(OpError::Kind(kind)));
        }
    }
}
