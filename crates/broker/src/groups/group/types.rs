//! What goes into a group and what comes out.

use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;

use crate::groups::Sight;

/// A JoinGroup request whose strings and bytes are its own (not slices of a request frame, which
/// they would keep in memory).
#[derive(Clone, Debug)]
pub(in crate::groups) struct JoinEvent {
    /// Empty: the client has none yet.
    pub(in crate::groups) member_id: StrBytes,
    /// The id that the client gets if it has none.
    pub(in crate::groups) fresh_id: StrBytes,
    pub(in crate::groups) instance_id: Option<StrBytes>,
    pub(in crate::groups) client_id: StrBytes,
    pub(in crate::groups) client_host: StrBytes,
    pub(in crate::groups) session_timeout: Duration,
    pub(in crate::groups) rebalance_timeout: Duration,
    pub(in crate::groups) protocol_type: StrBytes,
    /// Name and metadata, most wanted first.
    pub(in crate::groups) protocols: Vec<(StrBytes, Bytes)>,
    /// The client understands MEMBER_ID_REQUIRED (version 4 and later).
    pub(in crate::groups) can_require_id: bool,
    /// The client understands `skip_assignment` (version 9 and later).
    pub(in crate::groups) can_skip_assignment: bool,
    /// The topics that the client may know of.
    pub(in crate::groups) sight: Sight,
}

/// A SyncGroup request; owns its memory as [`JoinEvent`] does.
#[derive(Clone, Debug)]
pub(in crate::groups) struct SyncEvent {
    pub(in crate::groups) member_id: StrBytes,
    pub(in crate::groups) instance_id: Option<StrBytes>,
    pub(in crate::groups) generation: i32,
    pub(in crate::groups) protocol_type: Option<StrBytes>,
    pub(in crate::groups) protocol: Option<StrBytes>,
    pub(in crate::groups) assignments: Vec<(StrBytes, Bytes)>,
}

/// A member that a successful JoinGroup tells the leader of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct JoinedMember {
    pub(in crate::groups) member_id: StrBytes,
    pub(in crate::groups) instance_id: Option<StrBytes>,
    pub(in crate::groups) metadata: Bytes,
}

/// A successful JoinGroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Joined {
    pub(in crate::groups) generation: i32,
    pub(in crate::groups) protocol_type: StrBytes,
    pub(in crate::groups) protocol: StrBytes,
    pub(in crate::groups) leader: StrBytes,
    pub(in crate::groups) member_id: StrBytes,
    pub(in crate::groups) skip_assignment: bool,
    /// Empty for all but the leader.
    pub(in crate::groups) members: Vec<JoinedMember>,
}

/// A refused JoinGroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Refusal {
    pub(in crate::groups) error: ResponseError,
    /// The request's member id; with MEMBER_ID_REQUIRED the one to come back with.
    pub(in crate::groups) member_id: StrBytes,
}

/// A successful SyncGroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Synced {
    pub(in crate::groups) protocol_type: Option<StrBytes>,
    pub(in crate::groups) protocol: Option<StrBytes>,
    pub(in crate::groups) assignment: Bytes,
}

/// What is to be done outside.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::groups) enum Effect<J, S> {
    /// Answer a JoinGroup.
    Joined(J, Result<Joined, Refusal>),
    /// Answer a SyncGroup.
    Synced(S, Result<Synced, ResponseError>),
    /// Tell the operator that a member is gone that did not ask for it.
    Dropped(StrBytes, &'static str),
}

/// Where the group is in its life; see the module's picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::groups) enum State {
    /// No members.
    Empty,
    /// Collecting JoinGroups for the next generation.
    Preparing,
    /// The generation is fixed; waiting for the leader's assignment.
    Completing,
    /// Every member can have its assignment.
    Stable,
    /// Deleted, or the coordinator is closing. Nothing leaves this state.
    Dead,
}

impl State {
    /// As the protocol spells it.
    pub(in crate::groups) fn name(self) -> &'static str {
        match self {
            State::Empty => "Empty",
            State::Preparing => "PreparingRebalance",
            State::Completing => "CompletingRebalance",
            State::Stable => "Stable",
            State::Dead => "Dead",
        }
    }
}

/// What DescribeGroups and ListGroups show.
#[derive(Clone, Debug)]
pub(in crate::groups) struct Description {
    pub(in crate::groups) state: State,
    pub(in crate::groups) protocol_type: StrBytes,
    /// Empty unless the group is stable.
    pub(in crate::groups) protocol: StrBytes,
    pub(in crate::groups) members: Vec<DescribedMember>,
}

/// One member of a [`Description`]; metadata and assignment are empty unless the group is stable.
#[derive(Clone, Debug)]
pub(in crate::groups) struct DescribedMember {
    pub(in crate::groups) member_id: StrBytes,
    pub(in crate::groups) instance_id: Option<StrBytes>,
    pub(in crate::groups) client_id: StrBytes,
    pub(in crate::groups) client_host: StrBytes,
    pub(in crate::groups) metadata: Bytes,
    pub(in crate::groups) assignment: Bytes,
}
