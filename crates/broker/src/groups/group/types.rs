//! Input and output types of a classic group.

use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;

use crate::groups::TopicVisibility;

/// A JoinGroup request that owns its strings and bytes; slices would keep the request frame in
/// memory.
#[derive(Clone, Debug)]
pub(in crate::groups) struct JoinEvent {
    /// Empty if the client has none yet.
    pub(in crate::groups) member_id: StrBytes,
    /// The id that the client receives if it has none.
    pub(in crate::groups) fresh_id: StrBytes,
    pub(in crate::groups) instance_id: Option<StrBytes>,
    pub(in crate::groups) client_id: StrBytes,
    pub(in crate::groups) client_host: StrBytes,
    pub(in crate::groups) session_timeout: Duration,
    pub(in crate::groups) rebalance_timeout: Duration,
    pub(in crate::groups) protocol_type: StrBytes,
    /// Name and metadata, in order of preference.
    pub(in crate::groups) protocols: Vec<(StrBytes, Bytes)>,
    /// Whether the client understands MEMBER_ID_REQUIRED (version 4 and later).
    pub(in crate::groups) can_require_id: bool,
    /// Whether the client understands `skip_assignment` (version 9 and later).
    pub(in crate::groups) can_skip_assignment: bool,
    /// The topics that the client may describe.
    pub(in crate::groups) visibility: TopicVisibility,
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

/// A member in the list that the leader receives with its JoinGroup response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct JoinedMember {
    pub(in crate::groups) member_id: StrBytes,
    pub(in crate::groups) instance_id: Option<StrBytes>,
    pub(in crate::groups) metadata: Bytes,
}

/// The answer to a successful JoinGroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Joined {
    pub(in crate::groups) generation: i32,
    pub(in crate::groups) protocol_type: StrBytes,
    pub(in crate::groups) protocol: StrBytes,
    pub(in crate::groups) leader: StrBytes,
    pub(in crate::groups) member_id: StrBytes,
    pub(in crate::groups) skip_assignment: bool,
    /// Empty for all members but the leader.
    pub(in crate::groups) members: Vec<JoinedMember>,
}

/// The answer to a refused JoinGroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Refusal {
    pub(in crate::groups) error: ResponseError,
    /// The request's member id; with MEMBER_ID_REQUIRED the id to join with.
    pub(in crate::groups) member_id: StrBytes,
}

/// The answer to a successful SyncGroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Synced {
    pub(in crate::groups) protocol_type: Option<StrBytes>,
    pub(in crate::groups) protocol: Option<StrBytes>,
    pub(in crate::groups) assignment: Bytes,
}

/// An action for the caller to carry out.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::groups) enum Effect<J, S> {
    /// Answer a JoinGroup.
    Joined(J, Result<Joined, Refusal>),
    /// Answer a SyncGroup.
    Synced(S, Result<Synced, ResponseError>),
    /// Log that a member was removed without its request, with the reason.
    Dropped(StrBytes, &'static str),
}

/// The state of a group; see the diagram of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::groups) enum State {
    /// No members.
    Empty,
    /// Collecting JoinGroups for the next generation.
    Preparing,
    /// The generation is fixed; waiting for the leader's assignment.
    Completing,
    /// Every member can fetch its assignment.
    Stable,
    /// Deleted, or the coordinator is closing. Nothing leaves this state.
    Dead,
}

impl State {
    /// The state in the protocol's spelling.
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

/// The data for DescribeGroups and ListGroups.
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
