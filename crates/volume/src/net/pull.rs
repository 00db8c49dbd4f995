//! Frames of pulls. `docs/format/volume-wire.md`, section 11.

use bytes::Bytes;

use super::error::WireError;
use super::error_frame::{decode_error, error_frame};
use super::frame::{Blocks, Frame, FrameType, Received};
use super::messages::{configuration_bytes, put_configuration, read_configuration};
use crate::fields::{Put, Reader};
use crate::log::FinishedChunks;
use crate::messages::{PullChunk, PullContent, PullItem};
use crate::op::{CHUNK_BLOCKS, MAX_CHUNKS, MAX_WRITE_BLOCKS, verify_blocks};
use crate::request::RequestError;
use crate::state::VolumeState;
use crate::types::{
    AttachEpoch, ChunkIndex, ConfState, END_OF_NUMBERS, GroupId, Index, Layer, Parent, PeerId,
    Position, Sequence, Term, VolumeId,
};
use crate::window::Window;

/// Greatest number of volumes with finished chunks in a request to pull.
pub const MAX_FINISHED_VOLUMES: usize = 900;
/// Greatest number of dropped layers of a volume in a pull.
pub const MAX_PULLED_LAYERS: usize = 4096;

const FINISHED_BYTES: usize = 8 + 512;
const ITEM_BYTES: usize = 24;

const FLAG_EVERYTHING: u32 = 1;
const FLAG_WINDOW: u32 = 1;
const FLAG_DELETED: u32 = 2;
const FLAG_LAST_BITMAP: u8 = 1;

const BLOCKS: u8 = 1;
const ZEROS: u8 = 2;
const BITMAP: u8 = 3;
const ABSENT: u8 = 4;

/// The group, the peers and the term of a frame about a pull between a leader and a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullParties {
    /// The group.
    pub group: GroupId,
    /// The sender.
    pub from: PeerId,
    /// The receiver.
    pub to: PeerId,
    /// The sender's term.
    pub term: Term,
}

/// A leader offers a pull to a replica whose next entries it no longer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullOffer {
    /// Leader and target.
    pub parties: PullParties,
    /// The leader's applied index.
    pub applied: Index,
}

/// A target states which entries it will need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullPin {
    /// Target and leader.
    pub parties: PullParties,
    /// The source's applied index when the round began.
    pub since: Position,
}

/// A target has pulled everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Target and leader.
    pub parties: PullParties,
    /// The source's applied index when the last round began.
    pub since: Position,
    /// The configuration as of it.
    pub conf: ConfState,
}

/// A request for the blocks of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pull {
    /// The group.
    pub group: GroupId,
    /// The target's peer.
    pub peer: PeerId,
    /// Only blocks that have changed since this index; 0 for everything. The target's applied
    /// index, or in a later round, what the source had applied when the round before began.
    pub since: Index,
    /// What `since` is for the chunks in `finished`.
    pub finished_since: Index,
    /// Only what follows this chunk; `None` for everything.
    pub after: Option<(VolumeId, ChunkIndex)>,
    /// Chunks that an earlier attempt has finished, at most [`MAX_FINISHED_VOLUMES`].
    pub finished: Vec<FinishedChunks>,
}

/// The first frame of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullBegin {
    /// The source's applied index.
    pub applied: Position,
    /// The source's peer.
    pub peer: PeerId,
    /// Number of `PullState` frames that follow.
    pub state_frames: u32,
    /// The stream has all blocks, and not only the changed ones.
    pub sends_everything: bool,
    /// The configuration as of the applied index.
    pub conf: ConfState,
}

/// A volume as of the beginning of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledVolume {
    /// Its replicated state.
    pub state: VolumeState,
    /// The volume is deleted.
    pub is_deleted: bool,
}

/// Blocks of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullBatch {
    /// The source's applied index after the last block was read.
    pub applied: Index,
    /// The items, by volume and chunk.
    pub items: Vec<PullItem>,
}

/// The last frame of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullEnd {
    /// The greatest applied index of a batch.
    pub applied: Index,
    /// Bytes of blocks in the stream.
    pub bytes: u64,
    /// Chunks in the stream.
    pub chunks: u64,
}

/// A frame of the stream of a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullFrame {
    /// The first frame.
    Begin(PullBegin),
    /// Volumes.
    State(Vec<PulledVolume>),
    /// Blocks.
    Batch(PullBatch),
    /// The last frame, or instead of any frame, the reason why the source ends the stream.
    End(Result<PullEnd, RequestError>),
}

impl PullParties {
    fn put(&self, out: &mut Vec<u8>) {
        for field in [self.group.0, self.from.0, self.to.0, self.term.0] {
            out.put_u64(field);
        }
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let (group, from, to) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let term = read_number(reader, "term of a pull")?;
        if group == 0 || from == 0 || to == 0 || term == 0 {
            return Err(WireError::field("group, peer or term of a pull", term));
        }
        let (group, term) = (GroupId(group), Term(term));
        Ok(Self { group, from: PeerId(from), to: PeerId(to), term })
    }
}

fn read_number(reader: &mut Reader<'_>, field: &'static str) -> Result<u64, WireError> {
    match reader.u64()? {
        number if number < END_OF_NUMBERS => Ok(number),
        other => Err(WireError::field(field, other)),
    }
}

fn read_index(reader: &mut Reader<'_>) -> Result<Index, WireError> {
    read_number(reader, "index of a pull").map(Index)
}

impl Position {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_u64(self.index.0);
        out.put_u64(self.term.0);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let (index, term) = (read_index(reader)?, Term(read_number(reader, "term of a pull")?));
        match (index.0 == 0) == (term.0 == 0) {
            true => Ok(Self { index, term }),
            false => Err(WireError::field("term of a position", term.0)),
        }
    }
}

impl PullOffer {
    /// Builds its frame.
    pub fn encode(&self) -> Frame {
        let mut frame = Frame::new(FrameType::PullOffer, 0);
        self.parties.put(frame.meta());
        frame.meta().put_u64(self.applied.0);
        frame
    }

    pub(crate) fn decode(meta: &Bytes) -> Result<Self, WireError> {
        let reader = &mut Reader::new(meta);
        let offer = Self { parties: PullParties::read(reader)?, applied: read_index(reader)? };
        reader.end()?;
        Ok(offer)
    }
}

impl PullPin {
    /// Builds its frame.
    pub fn encode(&self) -> Frame {
        let mut frame = Frame::new(FrameType::PullPin, 0);
        self.parties.put(frame.meta());
        self.since.put(frame.meta());
        frame
    }

    pub(crate) fn decode(meta: &Bytes) -> Result<Self, WireError> {
        let reader = &mut Reader::new(meta);
        let pin = Self { parties: PullParties::read(reader)?, since: Position::read(reader)? };
        reader.end()?;
        Ok(pin)
    }
}

impl Pulled {
    /// Builds its frame.
    pub fn encode(&self) -> Frame {
        let mut frame = Frame::new(FrameType::Pulled, 0);
        self.parties.put(frame.meta());
        self.since.put(frame.meta());
        put_configuration(&self.conf, frame.meta());
        frame
    }

    pub(crate) fn decode(meta: &Bytes) -> Result<Self, WireError> {
        let reader = &mut Reader::new(meta);
        let (parties, since) = (PullParties::read(reader)?, Position::read(reader)?);
        let conf = read_configuration(reader)?;
        reader.end()?;
        Ok(Self { parties, since, conf })
    }
}

impl Pull {
    /// Builds its frame. Finished chunks of more than [`MAX_FINISHED_VOLUMES`] volumes are left
    /// out, and pulled again.
    pub fn encode(&self) -> Frame {
        let mut frame = Frame::new(FrameType::Pull, 0);
        let meta = frame.meta();
        for field in [self.group.0, self.peer.0, self.since.0, self.finished_since.0] {
            meta.put_u64(field);
        }
        let (volume, chunk) = self.after.unwrap_or_default();
        meta.put_u32(volume.0);
        meta.put_u32(chunk.0);
        let finished = &self.finished[..self.finished.len().min(MAX_FINISHED_VOLUMES)];
        meta.put_u32(finished.len() as u32);
        meta.put_zeros(4);
        for FinishedChunks { volume, chunks } in finished {
            meta.put_u32(volume.0);
            meta.put_zeros(4);
            meta.extend(&chunks[..]);
        }
        frame
    }

    /// Decodes the request of a pull connection.
    ///
    /// # Errors
    /// A field is out of bounds.
    pub fn decode(frame: &Received) -> Result<Self, WireError> {
        let reader = &mut Reader::new(&frame.meta);
        let (group, peer) = (GroupId(reader.u64()?), PeerId(reader.u64()?));
        let (since, finished_since) = (read_index(reader)?, read_index(reader)?);
        let (volume, chunk) = (VolumeId(reader.u32()?), ChunkIndex(reader.u32()?));
        let count = reader.u32()? as usize;
        reader.zeros::<4>()?;
        if group.0 == 0 || peer.0 == 0 {
            return Err(WireError::field("group or peer of a pull", group.0));
        }
        if chunk.0 >= MAX_CHUNKS || (volume.0 == 0 && chunk.0 != 0) {
            return Err(WireError::field("chunk of a pull", chunk.0));
        }
        if count > MAX_FINISHED_VOLUMES {
            return Err(WireError::field("volumes of a pull", count as u64));
        }
        reader.check_count(count, FINISHED_BYTES)?;
        let mut finished = Vec::with_capacity(count);
        for _ in 0..count {
            let volume = VolumeId(reader.u32()?);
            reader.zeros::<4>()?;
            let chunks = Box::new(reader.array()?);
            if volume.0 == 0 {
                return Err(WireError::field("volume of a pull", 0_u64));
            }
            finished.push(FinishedChunks { volume, chunks });
        }
        reader.end()?;
        if !finished.is_sorted_by(|a, b| a.volume < b.volume) {
            return Err(WireError::field("order of the volumes of a pull", count as u64));
        }
        let after = (volume.0 != 0).then_some((volume, chunk));
        Ok(Self { group, peer, since, finished_since, after, finished })
    }
}

impl PullFrame {
    /// Builds the frame. The caller bounds volumes and items by the limits of a frame.
    pub fn encode(&self) -> Frame {
        match self {
            Self::Begin(begin) => begin.encode(),
            Self::State(volumes) => {
                let mut frame = Frame::new(FrameType::PullState, 0);
                for volume in volumes {
                    volume.put(frame.meta());
                }
                frame
            }
            Self::Batch(batch) => batch.encode(),
            Self::End(Ok(end)) => {
                let mut frame = Frame::new(FrameType::PullEnd, 0);
                for field in [end.applied.0, end.bytes, end.chunks] {
                    frame.meta().put_u64(field);
                }
                frame
            }
            Self::End(Err(error)) => error_frame(FrameType::PullEnd, 0, error),
        }
    }

    /// Decodes a frame of the stream, with the checksums of its blocks.
    ///
    /// # Errors
    /// A field is out of bounds, or a block does not have its checksum.
    pub fn decode(frame: &Received) -> Result<Self, WireError> {
        let reader = &mut Reader::new(&frame.meta);
        match frame.header.kind {
            FrameType::PullBegin => PullBegin::read(reader).map(Self::Begin),
            FrameType::PullState => {
                let mut volumes: Vec<PulledVolume> = Vec::new();
                while reader.rest() > 0 {
                    let volume = PulledVolume::read(reader)?;
                    let id = volume.state.volume;
                    if volumes.last().is_some_and(|last| last.state.volume >= id) {
                        return Err(WireError::field("order of volumes", id.0));
                    }
                    volumes.push(volume);
                }
                Ok(Self::State(volumes))
            }
            FrameType::PullBatch => PullBatch::read(reader, &frame.data).map(Self::Batch),
            FrameType::PullEnd if frame.header.is_error => {
                decode_error(frame).map(|error| Self::End(Err(error)))
            }
            FrameType::PullEnd => {
                let applied = read_index(reader)?;
                let end = PullEnd { applied, bytes: reader.u64()?, chunks: reader.u64()? };
                reader.end()?;
                Ok(Self::End(Ok(end)))
            }
            other => Err(WireError::Type(other as u16)),
        }
    }
}

impl PullBegin {
    fn encode(&self) -> Frame {
        let mut frame = Frame::new(FrameType::PullBegin, 0);
        let meta = frame.meta();
        meta.reserve_exact(32 + configuration_bytes(&self.conf));
        self.applied.put(meta);
        meta.put_u64(self.peer.0);
        meta.put_u32(self.state_frames);
        meta.put_u32(if self.sends_everything { FLAG_EVERYTHING } else { 0 });
        put_configuration(&self.conf, meta);
        frame
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let applied = Position::read(reader)?;
        let (peer, state_frames) = (PeerId(reader.u64()?), reader.u32()?);
        let flags = reader.u32()?;
        if peer.0 == 0 || flags & !FLAG_EVERYTHING != 0 {
            return Err(WireError::field("flags of a pull", flags));
        }
        let conf = read_configuration(reader)?;
        reader.end()?;
        let sends_everything = flags & FLAG_EVERYTHING != 0;
        Ok(Self { applied, peer, state_frames, sends_everything, conf })
    }
}

impl PulledVolume {
    fn put(&self, out: &mut Vec<u8>) {
        let VolumeState { volume, parent, epoch, nonce, window, dropped_layers } = &self.state;
        assert!(dropped_layers.len() <= MAX_PULLED_LAYERS, "a volume has few dropped layers");
        out.put_u32(volume.0);
        out.put_u32(parent.map_or(0, |parent| parent.volume.0));
        out.put_u32(parent.map_or(0, |parent| parent.layer.0));
        out.put_u32(*nonce);
        out.put_u32(dropped_layers.len() as u32);
        let window_flag = if window.is_some() { FLAG_WINDOW } else { 0 };
        out.put_u32(window_flag | if self.is_deleted { FLAG_DELETED } else { 0 });
        out.put_u64(epoch.0);
        out.put_u64(window.as_ref().map_or(0, |window| window.floor().0));
        if let Some(window) = window {
            out.extend(window.bits());
        }
        for layer in dropped_layers {
            out.put_u32(layer.0);
        }
        out.put_zeros(4 * (dropped_layers.len() % 2));
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let volume = VolumeId(reader.u32()?);
        let (parent, layer) = (VolumeId(reader.u32()?), Layer(reader.u32()?));
        let (nonce, layers, flags) = (reader.u32()?, reader.u32()? as usize, reader.u32()?);
        let epoch = read_number(reader, "epoch of a volume")?;
        let floor = read_number(reader, "floor of a volume")?;
        let has_window = flags & FLAG_WINDOW != 0;
        let is_valid = volume.0 != 0
            && (parent.0 != 0 || layer.0 == 0)
            && layers <= MAX_PULLED_LAYERS
            && flags & !(FLAG_WINDOW | FLAG_DELETED) == 0
            && has_window == (floor != 0);
        if !is_valid {
            return Err(WireError::field("state of volume", volume.0));
        }
        let window = match has_window {
            true => Some(Window::new(Sequence(floor), Box::new(reader.array()?))),
            false => None,
        };
        reader.check_count(layers, 4)?;
        let mut dropped_layers = Vec::with_capacity(layers);
        for _ in 0..layers {
            dropped_layers.push(Layer(reader.u32()?));
        }
        reader.padding()?;
        if !dropped_layers.is_sorted_by(|a, b| a < b) {
            return Err(WireError::field("order of dropped layers of volume", volume.0));
        }
        let parent = (parent.0 != 0).then_some(Parent { volume: parent, layer });
        let epoch = AttachEpoch(epoch);
        let state = VolumeState { volume, parent, epoch, nonce, window, dropped_layers };
        Ok(Self { state, is_deleted: flags & FLAG_DELETED != 0 })
    }
}

impl PullBatch {
    fn encode(&self) -> Frame {
        let mut frame = Frame::new(FrameType::PullBatch, 0);
        frame.meta().put_u64(self.applied.0);
        frame.meta().put_u32(self.items.len() as u32);
        frame.meta().put_zeros(4);
        for item in &self.items {
            item.put(frame.meta());
            if let PullContent::Blocks { data, .. } = &item.content {
                frame.push_data(data.clone());
            }
        }
        frame
    }

    fn read(reader: &mut Reader<'_>, data: &Bytes) -> Result<Self, WireError> {
        let applied = read_index(reader)?;
        let count = reader.u32()? as usize;
        reader.zeros::<4>()?;
        reader.check_count(count, ITEM_BYTES)?;
        let (blocks, all) = (&mut Blocks(data.clone()), data.len());
        let mut items: Vec<PullItem> = Vec::with_capacity(count);
        for _ in 0..count {
            let at = (all - blocks.0.len()) / crate::BLOCK_BYTES;
            let item = PullItem::read(reader, blocks)?;
            if let PullContent::Blocks { crcs, data, .. } = &item.content {
                verify_blocks(data, crcs).map_err(|n| WireError::Block { block: at + n })?;
            }
            let position = |item: &PullItem| (item.at.volume, item.at.chunk);
            if items.last().is_some_and(|last| position(last) > position(&item)) {
                return Err(WireError::field("order of items of volume", item.at.volume.0));
            }
            items.push(item);
        }
        reader.end()?;
        blocks.end()?;
        Ok(Self { applied, items })
    }
}

impl PullItem {
    fn put(&self, out: &mut Vec<u8>) {
        let (kind, flags, first, blocks, count) = match &self.content {
            PullContent::Blocks { first, crcs, .. } => (BLOCKS, 0, *first, crcs.len() as u16, 0),
            PullContent::Zeros { first, blocks } => (ZEROS, 0, *first, *blocks, 0),
            PullContent::Bitmap { is_last, .. } => {
                (BITMAP, if *is_last { FLAG_LAST_BITMAP } else { 0 }, 0, 0, 0)
            }
            PullContent::Absent { chunks } => (ABSENT, 0, 0, 0, *chunks),
        };
        out.extend([kind, flags]);
        out.put_u16(first);
        out.put_u16(blocks);
        out.put_zeros(2);
        for field in [self.at.volume.0, self.at.layer.0, self.at.chunk.0, count] {
            out.put_u32(field);
        }
        match &self.content {
            PullContent::Blocks { crcs, .. } => {
                for crc in crcs {
                    out.put_u32(*crc);
                }
                out.put_zeros(4 * (crcs.len() % 2));
            }
            PullContent::Bitmap { bits, .. } => out.extend(&bits[..]),
            PullContent::Zeros { .. } | PullContent::Absent { .. } => {}
        }
    }

    fn read(reader: &mut Reader<'_>, data: &mut Blocks) -> Result<Self, WireError> {
        let (kind, flags) = (reader.u8()?, reader.u8()?);
        let (first, blocks) = (reader.u16()?, reader.u16()?);
        reader.zeros::<2>()?;
        let (volume, layer) = (VolumeId(reader.u32()?), Layer(reader.u32()?));
        let (chunk, count) = (ChunkIndex(reader.u32()?), reader.u32()?);
        let is_range = blocks > 0 && u32::from(first) + u32::from(blocks) <= CHUNK_BLOCKS.into();
        let is_valid = volume.0 != 0
            && chunk.0 < MAX_CHUNKS
            && (flags == 0 || (kind == BITMAP && flags == FLAG_LAST_BITMAP))
            && match kind {
                BLOCKS => is_range && blocks <= MAX_WRITE_BLOCKS && count == 0,
                ZEROS => is_range && count == 0,
                BITMAP => (first, blocks, count) == (0, 0, 0),
                ABSENT => (first, blocks) == (0, 0) && (1..=MAX_CHUNKS - chunk.0).contains(&count),
                _ => false,
            };
        if !is_valid {
            return Err(WireError::field("item of kind", kind));
        }
        let content = match kind {
            BLOCKS => {
                let mut crcs = Vec::with_capacity(blocks.into());
                for _ in 0..blocks {
                    crcs.push(reader.u32()?);
                }
                reader.padding()?;
                PullContent::Blocks { first, crcs, data: data.take(blocks)? }
            }
            ZEROS => PullContent::Zeros { first, blocks },
            BITMAP => PullContent::Bitmap {
                bits: Box::new(reader.array()?),
                is_last: flags == FLAG_LAST_BITMAP,
            },
            _ => PullContent::Absent { chunks: count },
        };
        Ok(Self { at: PullChunk { volume, layer, chunk }, content })
    }
}
