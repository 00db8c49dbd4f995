//! The records of the log, as bytes. `docs/format/volume-log.md`, section 3.

use bytes::Bytes;

use super::error::RecordError;
use super::group::{GROUP_BYTES, GroupCheckpoint, read_replica};
use crate::fields::{FieldError, Put, Reader};
use crate::group::REGION_CHUNKS;
use crate::types::{
    CheckpointNumber, END_OF_NUMBERS, GroupId, HardState, Index, PeerId, Term, VolumeId,
};

const MAGIC: u8 = b'V';
const VERSION: u8 = 1;
const PREFIX_BYTES: usize = 8;

const KIND_ENTRIES: u8 = 1;
const KIND_INSTALL: u8 = 2;
const KIND_CHECKPOINT: u8 = 3;
const KIND_TOMBSTONE: u8 = 4;

/// Flag of an install: it states its progress.
const FLAG_PROGRESS: u8 = 1;

/// Bytes of a part of a checkpoint without its groups.
pub(super) const CHECKPOINT_BYTES: usize = PREFIX_BYTES + 24;

/// Greatest number of entries in a record.
pub const MAX_ENTRIES: u32 = 65_536;
const ENTRY_BYTES: usize = 16;

/// Bytes of a bitmap of the chunks of a region.
const REGION_BITMAP_BYTES: usize = REGION_CHUNKS as usize / 8;
/// Bytes of a [`FinishedChunks`] in a record.
const FINISHED_BYTES: usize = 8 + REGION_BITMAP_BYTES;

/// A record of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// Entries of a group, and its hard state.
    Entries(Entries),
    /// An install is in progress.
    Install(Install),
    /// A part of a checkpoint.
    Checkpoint(CheckpointPart),
    /// A replica is gone.
    Tombstone(Tombstone),
}

/// Entries of a group, and its hard state as of this record. The group's log is what it was below
/// `first`, then these entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entries {
    /// The group.
    pub group: GroupId,
    /// This replica.
    pub peer: PeerId,
    /// The hard state.
    pub state: HardState,
    /// Index of the first entry; without entries one above the last index of the log.
    pub first: Index,
    /// Term of the entry before `first`.
    pub previous_term: Term,
    /// The entries, at most [`MAX_ENTRIES`].
    pub entries: Vec<Entry>,
}

/// An entry of a raft log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Term of the leader that proposed it.
    pub term: Term,
    /// What its data is.
    pub kind: EntryKind,
    /// The data. As decoded, a part of the record's buffer.
    pub data: Bytes,
}

/// What the data of an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// An op, or nothing.
    Normal,
    /// A change of the group's configuration.
    ConfChange,
}

/// An install is in progress. It is durable before the first of its blocks is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Install {
    /// The group.
    pub group: GroupId,
    /// This replica.
    pub peer: PeerId,
    /// Blocks of this group may be as new as this index.
    pub barrier: Index,
    /// The applied index, at which applying is suspended.
    pub applied: Index,
    /// What a later attempt need not pull again: the index from which it continues, and the chunks
    /// that are complete as of it.
    pub progress: Option<(Index, Vec<FinishedChunks>)>,
}

/// The chunks of a volume that an install has finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedChunks {
    /// The volume.
    pub volume: VolumeId,
    /// Bit n mod 8 of byte n / 8 stands for chunk n of the group's region.
    pub chunks: Box<[u8; REGION_BITMAP_BYTES]>,
}

/// A part of a checkpoint. It counts only together with all other parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointPart {
    /// Number of the checkpoint.
    pub number: CheckpointNumber,
    /// Number of this part, from 0.
    pub part: u32,
    /// Number of parts.
    pub parts: u32,
    /// The groups of this part, in ascending order.
    pub groups: Vec<GroupCheckpoint>,
}

/// A replica is gone: nothing of it in earlier records counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The group.
    pub group: GroupId,
    /// The replica.
    pub peer: PeerId,
}

impl Record {
    /// Parses the payload of a record. Data of entries are parts of `payload`, which may be part of
    /// a larger buffer.
    ///
    /// # Errors
    /// See [`RecordError`]. Never allocates more than a small multiple of the payload's length.
    pub fn decode(payload: &Bytes) -> Result<Self, RecordError> {
        let reader = &mut Reader::new(payload);
        let [magic, version, kind, flags] = reader.array()?;
        if magic != MAGIC {
            return Err(RecordError::Magic(magic));
        }
        if version != VERSION {
            return Err(RecordError::Version(version));
        }
        reader.zeros::<4>()?;
        let known = match kind {
            KIND_INSTALL => FLAG_PROGRESS,
            KIND_ENTRIES | KIND_CHECKPOINT | KIND_TOMBSTONE => 0,
            _ => return Err(RecordError::Kind(kind)),
        };
        if flags & !known != 0 {
            return Err(RecordError::Flags { of: "record", flags: flags.into() });
        }
        let record = match kind {
            KIND_ENTRIES => Self::Entries(Entries::read(reader)?),
            KIND_INSTALL => Self::Install(Install::read(reader, flags & FLAG_PROGRESS != 0)?),
            KIND_CHECKPOINT => Self::Checkpoint(CheckpointPart::read(reader)?),
            _ => {
                let (group, peer) = read_replica(reader)?;
                Self::Tombstone(Tombstone { group, peer })
            }
        };
        reader.end()?;
        Ok(record)
    }

    /// Encodes the record, without the data of entries, which follow it ([`Entry::data`]).
    pub fn encode_head(&self) -> Vec<u8> {
        match self {
            Self::Entries(entries) => entries.encode_head(),
            Self::Install(install) => install.encode(),
            Self::Checkpoint(part) => part.encode(),
            Self::Tombstone(gone) => {
                let mut out = prefix(KIND_TOMBSTONE, 0, 16);
                out.put_u64(gone.group.0);
                out.put_u64(gone.peer.0);
                out
            }
        }
    }
}

/// A buffer with the prefix of a record, and space for `bytes` more.
fn prefix(kind: u8, flags: u8, bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(PREFIX_BYTES + bytes);
    out.extend([MAGIC, VERSION, kind, flags, 0, 0, 0, 0]);
    out
}

impl Entries {
    /// Index of the last entry, or the one before `first`.
    pub fn last(&self) -> Index {
        Index(self.first.0 - 1 + self.entries.len() as u64)
    }

    /// Encodes everything but the data of the entries, which follow it.
    pub fn encode_head(&self) -> Vec<u8> {
        self.encode(self.entries.iter().map(|entry| entry.data.len()))
    }

    /// Encodes everything but the data of the entries, which have these lengths.
    pub(super) fn encode(&self, lengths: impl Iterator<Item = usize>) -> Vec<u8> {
        assert!(self.entries.len() <= MAX_ENTRIES as usize, "a record has few entries");
        let mut out = prefix(KIND_ENTRIES, 0, 64 + ENTRY_BYTES * self.entries.len());
        out.put_u64(self.group.0);
        out.put_u64(self.peer.0);
        out.put_u64(self.state.term.0);
        out.put_u64(self.state.vote.0);
        out.put_u64(self.state.commit.0);
        out.put_u64(self.first.0);
        out.put_u64(self.previous_term.0);
        out.put_u32(self.entries.len() as u32);
        out.put_zeros(4);
        for (entry, length) in self.entries.iter().zip(lengths) {
            out.put_u64(entry.term.0);
            out.put_u32(u32::try_from(length).expect("an entry is far below 4 GiB"));
            out.push(match entry.kind {
                EntryKind::Normal => 0,
                EntryKind::ConfChange => 2,
            });
            out.put_zeros(3);
        }
        out
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, RecordError> {
        let (group, peer) = read_replica(reader)?;
        let state = HardState {
            term: Term(reader.u64()?),
            vote: PeerId(reader.u64()?),
            commit: Index(reader.u64()?),
        };
        let (first, previous_term) = (reader.u64()?, Term(reader.u64()?));
        if first == 0 || first >= END_OF_NUMBERS {
            return Err(FieldError::Field { field: "first index", value: first }.into());
        }
        if (first == 1) != (previous_term.0 == 0) || previous_term > state.term {
            return Err(FieldError::Field { field: "previous term", value: previous_term.0 }.into());
        }
        let count = reader.u32()?;
        if count > MAX_ENTRIES {
            return Err(FieldError::Field { field: "entry count", value: count.into() }.into());
        }
        reader.zeros::<4>()?;
        reader.check_count(count as usize, ENTRY_BYTES)?;
        let mut entries = Vec::with_capacity(count as usize);
        let mut lengths = Vec::with_capacity(count as usize);
        let mut at_least = previous_term;
        for _ in 0..count {
            let term = Term(reader.u64()?);
            if term.0 == 0 || term < at_least || term > state.term {
                return Err(FieldError::Field { field: "term of an entry", value: term.0 }.into());
            }
            at_least = term;
            lengths.push(reader.u32()? as usize);
            let kind = match reader.u8()? {
                0 => EntryKind::Normal,
                2 => EntryKind::ConfChange,
                other => {
                    return Err(
                        FieldError::Field { field: "entry type", value: other.into() }.into()
                    );
                }
            };
            reader.zeros::<3>()?;
            entries.push(Entry { term, kind, data: Bytes::new() });
        }
        for (entry, len) in entries.iter_mut().zip(lengths) {
            entry.data = reader.bytes(len)?;
        }
        Ok(Self { group, peer, state, first: Index(first), previous_term, entries })
    }
}

impl Install {
    fn encode(&self) -> Vec<u8> {
        let flags = if self.progress.is_some() { FLAG_PROGRESS } else { 0 };
        let none = (Index(0), Vec::new());
        let (since, finished) = self.progress.as_ref().unwrap_or(&none);
        let mut out = prefix(KIND_INSTALL, flags, 48 + FINISHED_BYTES * finished.len());
        out.put_u64(self.group.0);
        out.put_u64(self.peer.0);
        out.put_u64(self.barrier.0);
        out.put_u64(self.applied.0);
        out.put_u64(since.0);
        out.put_u32(finished.len() as u32);
        out.put_zeros(4);
        for finished in finished {
            out.put_u32(finished.volume.0);
            out.put_zeros(4);
            out.extend(&finished.chunks[..]);
        }
        out
    }

    fn read(reader: &mut Reader<'_>, has_progress: bool) -> Result<Self, RecordError> {
        let (group, peer) = read_replica(reader)?;
        let (barrier, applied) = (Index(reader.u64()?), Index(reader.u64()?));
        let since = Index(reader.u64()?);
        let count = reader.u32()?;
        reader.zeros::<4>()?;
        if !has_progress && (since.0, count) != (0, 0) {
            return Err(FieldError::Field { field: "progress", value: since.0 }.into());
        }
        reader.check_count(count as usize, FINISHED_BYTES)?;
        let mut finished = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let volume = VolumeId(reader.u32()?);
            reader.zeros::<4>()?;
            finished.push(FinishedChunks { volume, chunks: Box::new(reader.array()?) });
        }
        if !finished.is_sorted_by(|a, b| a.volume < b.volume) {
            return Err(FieldError::Field { field: "volumes of group", value: group.0 }.into());
        }
        let progress = has_progress.then_some((since, finished));
        Ok(Self { group, peer, barrier, applied, progress })
    }
}

impl CheckpointPart {
    fn encode(&self) -> Vec<u8> {
        let mut out = prefix(KIND_CHECKPOINT, 0, 24 + 128 * self.groups.len());
        out.put_u64(self.number.0);
        out.put_u32(self.part);
        out.put_u32(self.parts);
        out.put_u32(self.groups.len() as u32);
        out.put_zeros(4);
        for group in &self.groups {
            group.put(&mut out);
        }
        out
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, RecordError> {
        let number = CheckpointNumber(reader.u64()?);
        if number.0 > u32::MAX.into() {
            return Err(FieldError::Field { field: "checkpoint number", value: number.0 }.into());
        }
        let (part, parts) = (reader.u32()?, reader.u32()?);
        if part >= parts {
            return Err(FieldError::Field { field: "part", value: part.into() }.into());
        }
        let count = reader.u32()? as usize;
        reader.zeros::<4>()?;
        if count == 0 && parts > 1 {
            return Err(FieldError::Field { field: "number of groups", value: 0 }.into());
        }
        reader.check_count(count, GROUP_BYTES)?;
        let mut groups: Vec<GroupCheckpoint> = Vec::with_capacity(count);
        for _ in 0..count {
            let group = GroupCheckpoint::read(reader)?;
            if groups.last().is_some_and(|last| last.group >= group.group) {
                return Err(FieldError::Field { field: "group", value: group.group.0 }.into());
            }
            groups.push(group);
        }
        Ok(Self { number, part, parts, groups })
    }
}
