//! What a checkpoint states of a group, as bytes. `docs/format/volume-log.md`, section 3.

use super::error::RecordError;
use crate::fields::{FieldError, Put, Reader};
use crate::state::VolumeState;
use crate::types::{
    AttachEpoch, CheckpointNumber, ConfState, END_OF_NUMBERS, GroupId, HardState, Index, Layer,
    Parent, PeerId, Sequence, Term, VolumeId,
};
use crate::window::{WINDOW_BYTES, Window};

/// Bytes of a group without its lists.
pub(super) const GROUP_BYTES: usize = 96;
/// Bytes of a volume without its window and its list.
const VOLUME_BYTES: usize = 40;

/// Flags of a group.
const COMPLETES_INSTALL: u32 = 1;
const AUTO_LEAVE: u32 = 2;

/// Flags of a volume.
const ATTACHED: u32 = 1;
const HAS_PARENT: u32 = 2;

/// Greatest number of pairs of a group.
pub(crate) const MAX_PAIRS: usize = 16;
/// Greatest number of volumes of a group.
const MAX_VOLUMES: usize = 1024;
/// Greatest number of dropped layers of a volume.
const MAX_DROPPED_LAYERS: usize = 64;

/// A group in a checkpoint. Base, configuration and volumes are as of the base; the other fields
/// are as of the record's place in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupCheckpoint {
    /// The group.
    pub group: GroupId,
    /// This replica.
    pub peer: PeerId,
    /// The base: the store is durable up to it.
    pub base: Index,
    /// Term of the entry at the base.
    pub base_term: Term,
    /// Index of the last entry in the log.
    pub last: Index,
    /// Term of the last entry in the log.
    pub last_term: Term,
    /// The hard state.
    pub state: HardState,
    /// Index below which an unfinished install may have left blocks that are too new; 0 for none.
    pub barrier: Index,
    /// An install completes with this checkpoint, and all earlier records of the group are void.
    pub completes_install: bool,
    /// The configuration.
    pub conf: ConfState,
    /// Bases at earlier checkpoints, newest first, at most 16. From them a source knows which
    /// blocks have changed since.
    pub pairs: Vec<Pair>,
    /// The volumes that have blocks in this group, in ascending order.
    pub volumes: Vec<VolumeState>,
}

/// The base of a group at an earlier checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The checkpoint.
    pub number: CheckpointNumber,
    /// The base.
    pub base: Index,
}

impl GroupCheckpoint {
    /// Length of its encoding in bytes.
    pub(super) fn encoded_bytes(&self) -> usize {
        let ConfState { voters, learners, outgoing_voters, next_learners, .. } = &self.conf;
        let peers = voters.len() + learners.len() + outgoing_voters.len() + next_learners.len();
        let volumes: usize = self.volumes.iter().map(volume_bytes).sum();
        GROUP_BYTES + 8 * peers + 16 * self.pairs.len() + volumes
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.put_u64(self.group.0);
        out.put_u64(self.peer.0);
        out.put_u64(self.base.0);
        out.put_u64(self.base_term.0);
        out.put_u64(self.last.0);
        out.put_u64(self.last_term.0);
        out.put_u64(self.state.term.0);
        out.put_u64(self.state.vote.0);
        out.put_u64(self.state.commit.0);
        out.put_u64(self.barrier.0);
        out.put_u32(
            flag(self.completes_install, COMPLETES_INSTALL)
                | flag(self.conf.auto_leave, AUTO_LEAVE),
        );
        let peers = self.peer_lists();
        for list in peers {
            out.push(u8::try_from(list.len()).expect("a group has few peers"));
        }
        assert!(self.pairs.len() <= MAX_PAIRS, "a checkpoint has few pairs of a group");
        out.push(self.pairs.len() as u8);
        out.put_zeros(1);
        out.put_u16(u16::try_from(self.volumes.len()).expect("a family has few volumes"));
        out.put_zeros(4);
        for peer in peers.into_iter().flatten() {
            out.put_u64(peer.0);
        }
        for pair in &self.pairs {
            out.put_u64(pair.number.0);
            out.put_u64(pair.base.0);
        }
        for volume in &self.volumes {
            put_volume(volume, out);
        }
    }

    fn peer_lists(&self) -> [&Vec<PeerId>; 4] {
        let ConfState { voters, learners, outgoing_voters, next_learners, .. } = &self.conf;
        [voters, learners, outgoing_voters, next_learners]
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, RecordError> {
        let (group, peer) = read_replica(reader)?;
        let (base, base_term) = (Index(reader.u64()?), Term(reader.u64()?));
        let (last, last_term) = (Index(reader.u64()?), Term(reader.u64()?));
        let state = HardState {
            term: Term(reader.u64()?),
            vote: PeerId(reader.u64()?),
            commit: Index(reader.u64()?),
        };
        let barrier = Index(reader.u64()?);
        let flags = reader.u32()?;
        if flags & !(COMPLETES_INSTALL | AUTO_LEAVE) != 0 {
            return Err(RecordError::Flags { of: "group", flags });
        }
        let counts: [u8; 4] = reader.array()?;
        let pairs = usize::from(reader.u8()?);
        reader.zeros::<1>()?;
        let volumes = usize::from(reader.u16()?);
        reader.zeros::<4>()?;
        if pairs > MAX_PAIRS || volumes > MAX_VOLUMES {
            let value = pairs.max(volumes) as u64;
            return Err(FieldError::Field { field: "number of pairs or volumes", value }.into());
        }
        let mut peers = [const { Vec::new() }; 4];
        for (list, count) in peers.iter_mut().zip(counts) {
            *list = read_list(reader, count.into(), 8, |reader| Ok(PeerId(reader.u64()?)))?;
        }
        let [voters, learners, outgoing_voters, next_learners] = peers;
        let auto_leave = flags & AUTO_LEAVE != 0;
        let pairs = read_list(reader, pairs, 16, |reader| {
            Ok(Pair { number: CheckpointNumber(reader.u64()?), base: Index(reader.u64()?) })
        })?;
        let volumes = read_list(reader, volumes, VOLUME_BYTES, read_volume)?;
        let is_ordered = base <= state.commit
            && state.commit <= last
            && base_term <= last_term
            && last_term <= state.term
            && (flags & COMPLETES_INSTALL == 0 || (last, last_term) == (base, base_term));
        if !is_ordered {
            return Err(FieldError::Field { field: "base or end of group", value: group.0 }.into());
        }
        if last.0 >= END_OF_NUMBERS {
            return Err(FieldError::Field { field: "last index", value: last.0 }.into());
        }
        if !volumes.is_sorted_by(|a, b| a.volume < b.volume) {
            return Err(
                FieldError::Field { field: "order of volumes of group", value: group.0 }.into()
            );
        }
        Ok(Self {
            group,
            peer,
            base,
            base_term,
            last,
            last_term,
            state,
            barrier,
            completes_install: flags & COMPLETES_INSTALL != 0,
            conf: ConfState { voters, learners, outgoing_voters, next_learners, auto_leave },
            pairs,
            volumes,
        })
    }
}

/// Reads the group and the peer of a replica.
pub(super) fn read_replica(reader: &mut Reader<'_>) -> Result<(GroupId, PeerId), FieldError> {
    match (reader.u64()?, reader.u64()?) {
        (0, _) => Err(FieldError::Field { field: "group", value: 0 }),
        (_, 0) => Err(FieldError::Field { field: "peer", value: 0 }),
        (group, peer) => Ok((GroupId(group), PeerId(peer))),
    }
}

/// Length of a volume's encoding in bytes.
fn volume_bytes(state: &VolumeState) -> usize {
    let window = if state.window.is_some() { WINDOW_BYTES } else { 0 };
    VOLUME_BYTES + window + (4 * state.dropped_layers.len()).next_multiple_of(8)
}

fn put_volume(state: &VolumeState, out: &mut Vec<u8>) {
    let parent = state.parent.unwrap_or(Parent { volume: VolumeId(0), layer: Layer(0) });
    out.put_u32(state.volume.0);
    out.put_u32(flag(state.window.is_some(), ATTACHED) | flag(state.parent.is_some(), HAS_PARENT));
    out.put_u32(parent.volume.0);
    out.put_u32(parent.layer.0);
    out.put_u64(state.epoch.0);
    out.put_u64(state.window.as_ref().map_or(0, |window| window.floor().0));
    let layers = state.dropped_layers.len();
    out.put_u16(u16::try_from(layers).expect("a volume has few dropped layers"));
    out.put_zeros(2);
    out.put_u32(state.nonce);
    if let Some(window) = &state.window {
        out.extend(window.bits());
    }
    for layer in &state.dropped_layers {
        out.put_u32(layer.0);
    }
    out.put_zeros(4 * (layers % 2));
}

fn read_volume(reader: &mut Reader<'_>) -> Result<VolumeState, RecordError> {
    let volume = VolumeId(reader.u32()?);
    let flags = reader.u32()?;
    if flags & !(ATTACHED | HAS_PARENT) != 0 {
        return Err(RecordError::Flags { of: "volume", flags });
    }
    let parent = Parent { volume: VolumeId(reader.u32()?), layer: Layer(reader.u32()?) };
    let (epoch, floor) = (AttachEpoch(reader.u64()?), Sequence(reader.u64()?));
    let layers = usize::from(reader.u16()?);
    reader.zeros::<2>()?;
    let nonce = reader.u32()?;
    let window = match flags & ATTACHED {
        0 => None,
        _ => Some(Window::new(floor, Box::new(reader.array()?))),
    };
    if volume == VolumeId(0) || (flags & HAS_PARENT != 0 && parent.volume == VolumeId(0)) {
        return Err(FieldError::Field { field: "volume", value: 0 }.into());
    }
    if window.is_some() && floor == Sequence(0) {
        return Err(FieldError::Field { field: "floor", value: 0 }.into());
    }
    let is_unset = parent == Parent { volume: VolumeId(0), layer: Layer(0) };
    if (flags & HAS_PARENT == 0 && !is_unset) || (window.is_none() && floor.0 != 0) {
        return Err(FieldError::Field { field: "state of volume", value: volume.0.into() }.into());
    }
    if layers > MAX_DROPPED_LAYERS {
        let value = layers as u64;
        return Err(FieldError::Field { field: "number of dropped layers", value }.into());
    }
    let dropped_layers = read_list(reader, layers, 4, |reader| Ok(Layer(reader.u32()?)))?;
    if layers % 2 == 1 {
        reader.zeros::<4>()?;
    }
    if !dropped_layers.is_sorted_by(|a, b| a < b) {
        return Err(FieldError::Field { field: "layers of volume", value: volume.0.into() }.into());
    }
    let parent = (flags & HAS_PARENT != 0).then_some(parent);
    Ok(VolumeState { volume, parent, epoch, nonce, window, dropped_layers })
}

fn flag(is_set: bool, flag: u32) -> u32 {
    if is_set { flag } else { 0 }
}

/// Reads `count` elements of at least `bytes_each`.
fn read_list<T>(
    reader: &mut Reader<'_>,
    count: usize,
    bytes_each: usize,
    read: impl Fn(&mut Reader<'_>) -> Result<T, RecordError>,
) -> Result<Vec<T>, RecordError> {
    reader.check_count(count, bytes_each)?;
    (0..count).map(|_| read(reader)).collect()
}
