//! Identities and positions. Each is a type of its own, so that the compiler keeps them apart.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Defines a number that is an identity or a position.
macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize,
            Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// A raft group. Never reused.
    GroupId(u64)
}
number! {
    /// A member of a group, and raft's node id in it. Each replica gets a new one, so that a server
    /// that has lost its disks never votes twice. 0 is no peer.
    PeerId(u64)
}
number! {
    /// A volume. Never reused.
    VolumeId(u32)
}
number! {
    /// A server of volumes. 0 is no server.
    ServerId(u32)
}
number! {
    /// A chunk of a volume: 16 MiB.
    ChunkIndex(u32)
}
number! {
    /// A block of 4 KiB in its chunk, below 4,096.
    BlockIndex(u16)
}
number! {
    /// A part of 64 blocks in its chunk, below 64.
    SlotNumber(u8)
}
number! {
    /// A slot of a store: 256 KiB of the device.
    SlotIndex(u32)
}
number! {
    /// A snapshot's number within its volume: blocks that were written before the first snapshot
    /// are in layer 0.
    Layer(u32)
}
number! {
    /// Position of an entry in its group's raft log, from 1. 0 is the position before the first.
    Index(u64)
}
number! {
    /// A raft term, from 1. 0 is the term of the position before the first entry.
    Term(u64)
}
number! {
    /// The number of an attachment of a volume. A greater one fences the ones before it.
    AttachEpoch(u64)
}
number! {
    /// The number of a write within its attachment and group.
    Sequence(u64)
}
number! {
    /// The number of a checkpoint of a server, from 1.
    CheckpointNumber(u64)
}

/// Indexes, terms, epochs and sequence numbers are below it, so that their sums do not overflow
/// (`docs/format/volume-wire.md`).
pub(crate) const END_OF_NUMBERS: u64 = 1 << 62;

/// Index and term of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// The index.
    pub index: Index,
    /// The term of the entry there.
    pub term: Term,
}

/// What raft requires to be durable beside the entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HardState {
    /// The current term.
    pub term: Term,
    /// The peer that this replica has voted for in that term; 0 for none.
    pub vote: PeerId,
    /// The commit index.
    pub commit: Index,
}

/// A group's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConfState {
    /// Peers that vote.
    pub voters: Vec<PeerId>,
    /// Peers that get entries and do not vote.
    pub learners: Vec<PeerId>,
    /// In a joint configuration, the voters of the one that is being left.
    pub outgoing_voters: Vec<PeerId>,
    /// Outgoing voters that become learners when the joint configuration is left.
    pub next_learners: Vec<PeerId>,
    /// Whether raft leaves the joint configuration by itself.
    pub auto_leave: bool,
}

/// What a volume is a clone of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The volume.
    pub volume: VolumeId,
    /// The layer of that volume.
    pub layer: Layer,
}

/// The keys of all replicas of a group, in a map by group and replica.
pub(crate) fn replicas_of(group: GroupId) -> RangeInclusive<(GroupId, PeerId)> {
    (group, PeerId(0))..=(group, PeerId(u64::MAX))
}

/// The time in milliseconds since 1970, for information only.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}
