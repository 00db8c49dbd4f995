//! Conversions between raft's types and those of this crate.

use bytes::Bytes;
use raft::eraftpb::{self, EntryType};

use crate::log::{Entry, EntryKind};
use crate::op::Op;
use crate::types::{ConfState, HardState, Index, PeerId, Term};

/// Converts a configuration to raft's type.
pub(crate) fn conf_to_raft(conf: &ConfState) -> eraftpb::ConfState {
    let ids = |peers: &[PeerId]| peers.iter().map(|peer| peer.0).collect();
    eraftpb::ConfState {
        voters: ids(&conf.voters),
        learners: ids(&conf.learners),
        voters_outgoing: ids(&conf.outgoing_voters),
        learners_next: ids(&conf.next_learners),
        auto_leave: conf.auto_leave,
        ..eraftpb::ConfState::default()
    }
}

/// Converts a configuration from raft's type.
pub(crate) fn conf_from_raft(conf: &eraftpb::ConfState) -> ConfState {
    let peers = |ids: &[u64]| ids.iter().copied().map(PeerId).collect();
    ConfState {
        voters: peers(&conf.voters),
        learners: peers(&conf.learners),
        outgoing_voters: peers(&conf.voters_outgoing),
        next_learners: peers(&conf.learners_next),
        auto_leave: conf.auto_leave,
    }
}

/// A hard state of raft.
pub(crate) fn hard_state_from_raft(state: &eraftpb::HardState) -> HardState {
    HardState { term: Term(state.term), vote: PeerId(state.vote), commit: Index(state.commit) }
}

/// A hard state, as raft has it.
pub(crate) fn hard_state_to_raft(state: HardState) -> eraftpb::HardState {
    let HardState { term, vote, commit } = state;
    eraftpb::HardState {
        term: term.0,
        vote: vote.0,
        commit: commit.0,
        ..eraftpb::HardState::default()
    }
}

/// An entry of the log, as raft has it. In memory the blocks of a write are in `context`, apart
/// from the rest of the op in `data`, so that neither a frame nor a record copies them.
pub(crate) fn entry_from_log(index: Index, entry: &Entry) -> eraftpb::Entry {
    let (data, context) = Op::split(&entry.data);
    let entry_type = match entry.kind {
        EntryKind::Normal => EntryType::EntryNormal,
        EntryKind::ConfChange => EntryType::EntryConfChangeV2,
    };
    let (index, term) = (index.0, entry.term.0);
    eraftpb::Entry { entry_type, term, index, data, context, ..eraftpb::Entry::default() }
}

/// The entry of a record for an entry of raft, without its data, and the two parts of its data.
pub(crate) fn entry_to_log(entry: &eraftpb::Entry) -> (Entry, [Bytes; 2]) {
    let kind = match entry.get_entry_type() {
        EntryType::EntryNormal => EntryKind::Normal,
        EntryType::EntryConfChange | EntryType::EntryConfChangeV2 => EntryKind::ConfChange,
    };
    let data = [entry.data.clone(), entry.context.clone()];
    (Entry { term: Term(entry.term), kind, data: Bytes::new() }, data)
}
