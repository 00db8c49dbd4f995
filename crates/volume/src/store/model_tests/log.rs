//! The records of the model's log, and a replica as it runs.

use std::collections::{BTreeMap, BTreeSet};

use super::steps::ModelOp;
use crate::types::{GroupId, PeerId, VolumeId};

#[derive(Clone, Debug)]
pub(super) enum Record {
    Created(GroupId, PeerId),
    Removed(GroupId),
    /// Replaces all entries from its index on.
    Entry(GroupId, u64, ModelOp),
    Commit(GroupId, PeerId, u64),
    Install(GroupId, u64),
    Checkpoint(BTreeMap<GroupId, Covered>),
}

/// What a checkpoint states of a replica.
#[derive(Clone, Debug)]
pub(super) struct Covered {
    pub(super) peer: PeerId,
    pub(super) base: u64,
    pub(super) commit: u64,
    pub(super) barrier: u64,
    pub(super) volumes: BTreeSet<VolumeId>,
    pub(super) completes: bool,
}

/// A replica, as the log has it or as it runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Replica {
    pub(super) peer: PeerId,
    pub(super) base: u64,
    pub(super) applied: u64,
    pub(super) commit: u64,
    pub(super) durable_commit: u64,
    pub(super) barrier: u64,
    /// The entries above the base, with the positions of their records.
    pub(super) entries: BTreeMap<u64, (ModelOp, usize)>,
    /// The commit index that the opening has found.
    pub(super) found: u64,
    pub(super) is_replayed: bool,
    pub(super) install: Option<Install>,
}

impl Replica {
    pub(super) fn last(&self) -> u64 {
        self.entries.keys().next_back().copied().unwrap_or(self.base)
    }

    pub(super) fn is_exact(&self) -> bool {
        self.is_replayed && self.applied >= self.barrier && self.install.is_none()
    }
}

#[derive(Clone, Debug)]
pub(super) struct Install {
    /// The index of the snapshot.
    pub(super) snapshot: u64,
    /// The applied index of the source.
    pub(super) source: u64,
    /// The position of the record.
    pub(super) record: usize,
    /// The chunks to be pulled; `None` until the record is durable.
    pub(super) rest: Option<Vec<(u32, u32)>>,
}
