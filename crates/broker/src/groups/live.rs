//! A group as the registry has it: classic, of the consumer protocol, or a share group. What all of
//! them can be asked is here.

use std::time::Instant;

use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::consumer::ConsumerGroup;
use super::group::{Group, State};
use super::registry::{JoinAnswer, SyncAnswer};
use super::share::ShareGroup;

/// The first version of OffsetCommit that knows member epochs.
const FIRST_VERSION_WITH_EPOCHS: i16 = 9;

/// A group whose waiters are the requests' answers.
pub(super) type ClassicGroup = Group<oneshot::Sender<JoinAnswer>, oneshot::Sender<SyncAnswer>>;

/// A group. One without members changes its type with the first member of the other, one of
/// consumers with its members; its offsets stay.
pub(super) enum LiveGroup {
    /// Its members assign. The only type that can be dead.
    Classic(ClassicGroup),
    /// The server assigns.
    Consumer(ConsumerGroup),
    /// Its members share partitions (KIP-932). One without members and without share partitions may
    /// become another.
    Share(ShareGroup),
}

impl LiveGroup {
    /// As ListGroups spells the type.
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

    /// What any other kind of group may take the place of, but for its offsets.
    pub(super) fn is_vacant_classic(&self) -> bool {
        matches!(self, Self::Classic(group) if group.state() == State::Empty)
    }

    /// No members: since when.
    pub(super) fn vacant_since(&self) -> Option<Instant> {
        match self {
            Self::Classic(group) => group.vacant_since(),
            Self::Consumer(group) => group.vacant_since(),
            Self::Share(group) => group.vacant_since(),
        }
    }

    /// An estimate of the memory that one of its members takes.
    pub(super) fn member_bytes(&self, member_id: &str, instance_id: Option<&str>) -> Option<usize> {
        match self {
            Self::Classic(group) => group.member_bytes(member_id, instance_id),
            Self::Consumer(group) => group.member_bytes(member_id, instance_id),
            Self::Share(group) => group.member_bytes(member_id),
        }
    }

    /// An estimate of the memory that the members take.
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

    /// The classic group, for a request that concerns members of one.
    ///
    /// # Errors
    /// UNKNOWN_MEMBER_ID: the group has members of the other type, if any.
    pub(super) fn classic(&mut self) -> Result<&mut ClassicGroup, ResponseError> {
        match self {
            Self::Classic(group) => Ok(group),
            Self::Consumer(_) | Self::Share(_) => Err(ResponseError::UnknownMemberId),
        }
    }

    /// May offsets of these partitions be committed? By a version of OffsetCommit; for a member of
    /// a classic group a sign of life too. A partition without an id is of a topic that is not
    /// there.
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
            // It has share partitions instead.
            Self::Share(_) => Err(ResponseError::GroupIdNotFound),
            // An admin client, or a consumer that assigns its partitions itself.
            Self::Consumer(group) if group.is_empty() && generation_or_epoch < 0 => Ok(()),
            // Who sends such a version knows generations, and the present one alone counts.
            Self::Consumer(group) if version < FIRST_VERSION_WITH_EPOCHS => {
                match group.check_epoch(member_id, generation_or_epoch) {
                    Err(error @ ResponseError::UnknownMemberId) => Err(error),
                    _ if !group.may_be_classic(member_id) => Err(ResponseError::UnsupportedVersion),
                    // Of before a restart. It speaks the classic protocol, by its version.
                    Err(ResponseError::StaleMemberEpoch) => Err(ResponseError::IllegalGeneration),
                    checked => checked,
                }
            }
            Self::Consumer(group) => group.check_commit(member_id, generation_or_epoch, partitions),
        }
    }

    /// May these offsets be committed in a transaction? Its client may be none of the group's
    /// members if it says so.
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
                    // TxnOffsetCommit knows generations only, as Kafka's.
                    Err(ResponseError::StaleMemberEpoch) => Err(ResponseError::IllegalGeneration),
                    checked => checked,
                }
            }
        }
    }

    /// May a member see the offsets? Who names none may.
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
