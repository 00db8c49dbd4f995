//! A group of any type as the registry holds it: classic, consumer, or share. Dispatches the
//! operations that all types have.

use std::time::Instant;

use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::consumer::ConsumerGroup;
use super::group::{Group, State};
use super::registry::{JoinAnswer, SyncAnswer};
use super::share::ShareGroup;

/// The first version of OffsetCommit that has member epochs.
const FIRST_VERSION_WITH_EPOCHS: i16 = 9;

/// A classic group whose waiters are the response channels of requests.
pub(super) type ClassicGroup = Group<oneshot::Sender<JoinAnswer>, oneshot::Sender<SyncAnswer>>;

/// A group. A group without members changes its type with the first member of another type; a group
/// of consumers changes it together with its members. Its offsets stay.
pub(super) enum LiveGroup {
    /// Its members compute the assignment. Only this type can be dead.
    Classic(ClassicGroup),
    /// The server computes the assignment.
    Consumer(ConsumerGroup),
    /// Its members share partitions (KIP-932). Without members and share partitions it may become
    /// another type.
    Share(ShareGroup),
}

impl LiveGroup {
    /// The type in the spelling of ListGroups.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Classic(_) => "classic",
            Self::Consumer(_) => "consumer",
            Self::Share(_) => "share",
        }
    }

    pub(super) fn state_name(&self) -> &'static str {
        match self {
            Self::Classic(group) => group.state().name(),
            Self::Consumer(group) => group.phase().name(),
            Self::Share(group) => group.phase_name(),
        }
    }

    pub(super) fn is_dead(&self) -> bool {
        matches!(self, Self::Classic(group) if group.state() == State::Dead)
    }

    /// Whether a group of any other type may replace it, keeping its offsets.
    pub(super) fn is_vacant_classic(&self) -> bool {
        matches!(self, Self::Classic(group) if group.state() == State::Empty)
    }

    /// Since when the group has had no members; `None` if it has any.
    pub(super) fn vacant_since(&self) -> Option<Instant> {
        match self {
            Self::Classic(group) => group.vacant_since(),
            Self::Consumer(group) => group.vacant_since(),
            Self::Share(group) => group.vacant_since(),
        }
    }

    /// Estimated memory of one of its members.
    pub(super) fn member_bytes(&self, member_id: &str, instance_id: Option<&str>) -> Option<usize> {
        match self {
            Self::Classic(group) => group.member_bytes(member_id, instance_id),
            Self::Consumer(group) => group.member_bytes(member_id, instance_id),
            Self::Share(group) => group.member_bytes(member_id),
        }
    }

    /// Estimated memory of the members.
    pub(super) fn size_bytes(&self) -> usize {
        match self {
            Self::Classic(group) => group.size_bytes(),
            Self::Consumer(group) => group.size_bytes(),
            Self::Share(group) => group.size_bytes(),
        }
    }

    /// The next moment at which something is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Classic(group) => group.deadline(),
            Self::Consumer(group) => group.deadline(),
            Self::Share(group) => group.deadline(),
        }
    }

    /// Returns the classic group, for a request that concerns members of one.
    ///
    /// # Errors
    /// UNKNOWN_MEMBER_ID: the group is of another type.
    pub(super) fn classic(&mut self) -> Result<&mut ClassicGroup, ResponseError> {
        match self {
            Self::Classic(group) => Ok(group),
            Self::Consumer(_) | Self::Share(_) => Err(ResponseError::UnknownMemberId),
        }
    }

    /// Checks whether offsets of these partitions may be committed by OffsetCommit of this version.
    /// For a member of a classic group, a commit also counts as a heartbeat. A partition without an
    /// id belongs to a topic that does not exist.
    pub(super) fn check_commit(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation_or_epoch: i32,
        version: i16,
        partitions: impl Iterator<Item = Option<(Uuid, i32)>>,
    ) -> Result<(), ResponseError> {
        match self {
            Self::Classic(group) => {
                group.check_commit(now, member_id, instance_id, generation_or_epoch)
            }
            // It has share partitions instead of committed offsets.
            Self::Share(_) => Err(ResponseError::GroupIdNotFound),
            // An admin client, or a consumer that assigns its partitions itself.
            Self::Consumer(group) if group.is_empty() && generation_or_epoch < 0 => Ok(()),
            // A client of such a version uses generations, and only the current one is valid.
            Self::Consumer(group) if version < FIRST_VERSION_WITH_EPOCHS => {
                match group.check_epoch(member_id, generation_or_epoch) {
                    Err(error @ ResponseError::UnknownMemberId) => Err(error),
                    _ if !group.may_be_classic(member_id) => Err(ResponseError::UnsupportedVersion),
                    // From before a restart. The version shows that the member speaks the classic
                    // protocol.
                    Err(ResponseError::StaleMemberEpoch) => Err(ResponseError::IllegalGeneration),
                    checked => checked,
                }
            }
            Self::Consumer(group) => group.check_commit(member_id, generation_or_epoch, partitions),
        }
    }

    /// Checks whether these offsets may be committed in a transaction. A client that names no
    /// member need not be a member of the group.
    pub(super) fn check_transactional_commit(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation_or_epoch: i32,
        partitions: impl Iterator<Item = Option<(Uuid, i32)>>,
    ) -> Result<(), ResponseError> {
        match self {
            Self::Classic(group) => {
                group.check_transactional_commit(now, member_id, instance_id, generation_or_epoch)
            }
            Self::Share(_) => Err(ResponseError::GroupIdNotFound),
            Self::Consumer(group) => {
                let is_named =
                    generation_or_epoch >= 0 || !member_id.is_empty() || instance_id.is_some();
                if !is_named || (group.is_empty() && generation_or_epoch < 0) {
                    return Ok(());
                }
                match group.check_commit(member_id, generation_or_epoch, partitions) {
                    // TxnOffsetCommit has generations only, as in Kafka.
                    Err(ResponseError::StaleMemberEpoch) => Err(ResponseError::IllegalGeneration),
                    checked => checked,
                }
            }
        }
    }

    /// Checks whether a member may read the offsets. A client that names no member may.
    pub(super) fn check_fetch(
        &self,
        member_id: Option<&StrBytes>,
        epoch: i32,
    ) -> Result<(), ResponseError> {
        match (self, member_id) {
            (Self::Classic(_), _) => Ok(()),
            (Self::Share(_), _) => Err(ResponseError::GroupIdNotFound),
            (Self::Consumer(_), None) if epoch < 0 => Ok(()),
            (Self::Consumer(group), member_id) => {
                group.check_epoch(member_id.map_or("", StrBytes::as_str), epoch)
            }
        }
    }
}
