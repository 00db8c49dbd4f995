//! Start offsets of share groups: described and changed by admins, initialised for members.

use alluvium_stream::StreamOffset;
use kafka_protocol::error::ResponseError;
use uuid::Uuid;

use super::consumer::Fault;
use super::heartbeat::{not_found, plain, unavailable, was_deleted};
use super::live::LiveGroup;
use super::registry::Registry;
use super::share::{self, Described};
use super::share_heartbeat::not_a_share_group;
use super::{Groups, Shared};
use crate::errors::ApiError;

impl Groups {
    /// Returns the share partitions of a share group, once their state is durable.
    ///
    /// # Errors
    /// There is no such share group; the store failed.
    pub(crate) async fn share_partitions(&self, group_id: &str) -> Result<Vec<Described>, Fault> {
        if !self.shared.is_share_group(group_id)? {
            return Err(not_found(group_id));
        }
        let shares = self.shares();
        let described = shares.describe(group_id);
        for partition in &described {
            let slot = shares.get(group_id, partition.of);
            let last_record = slot.and_then(|slot| slot.last_record());
            share::durable(last_record).await.map_err(|_| unavailable())?;
        }
        Ok(described)
    }

    /// Initialises the share partitions of a topic for a group's members, unless they exist. Does
    /// not wait until that is durable. `exists` says whether the topic still exists.
    ///
    /// # Errors
    /// There is no such share group: members receive UNKNOWN_TOPIC_OR_PARTITION and retry once they
    /// have joined. A topic that was deleted meanwhile, the bound on share partitions, a store that
    /// failed.
    pub(crate) fn begin_shares(
        &self,
        group_id: &str,
        topic: Uuid,
        starts: &[(i32, StreamOffset)],
        exists: impl Fn() -> bool,
    ) -> Result<(), ApiError> {
        let unknown = || ApiError::UnknownTopicOrPartition;
        let slot = self.shared.registry.get(group_id).ok_or_else(unknown)?;
        // Under the group's lock, so that the group is not deleted meanwhile.
        self.shared.registry.peek(&slot, |group, _| match group {
            LiveGroup::Share(_) => {
                self.shares().begin(group_id, topic, starts, false, exists).map(drop)
            }
            _ => Err(unknown()),
        })
    }

    /// Sets the start offsets of a group without members in partitions of a topic. Makes it a share
    /// group. `exists` says whether the topic still exists.
    ///
    /// # Errors
    /// A group with members, or of another type; a topic or a group that was deleted meanwhile;
    /// bounds; a store that failed.
    pub(crate) async fn alter_shares(
        &self,
        group_id: &str,
        topic: Uuid,
        starts: &[(i32, StreamOffset)],
        exists: impl Fn() -> bool,
    ) -> Result<(), Fault> {
        let slot = self.shared.create(group_id).map_err(plain)?;
        let begun = self.shared.registry.change(&slot, |group, now| {
            if group.is_dead() {
                return Err(was_deleted());
            }
            let convert = !self.shared.has_offsets(group_id);
            let share =
                Registry::share(group, convert, now).ok_or_else(|| not_a_share_group(group_id))?;
            if !share.is_empty() {
                return Err(not_empty(group_id));
            }
            self.shares().begin(group_id, topic, starts, true, exists).map_err(Fault::from)
        })?;
        share::durable(begun).await.map_err(Fault::from)
    }

    /// Checks that a group's share partitions can be changed: it is a share group without members.
    ///
    /// # Errors
    /// Why they cannot be changed.
    pub(crate) fn check_alterable(&self, group_id: &str, may_be_new: bool) -> Result<(), Fault> {
        self.shared.check_group_id(group_id).map_err(plain)?;
        let Some(slot) = self.shared.registry.get(group_id) else {
            return if may_be_new { Ok(()) } else { Err(not_found(group_id)) };
        };
        self.shared.registry.peek(&slot, |group, _| match group {
            LiveGroup::Share(group) if group.is_empty() => Ok(()),
            LiveGroup::Share(_) => Err(not_empty(group_id)),
            // The group is unused so far.
            LiveGroup::Classic(_)
                if may_be_new
                    && group.vacant_since().is_some()
                    && !self.shared.has_offsets(group_id) =>
            {
                Ok(())
            }
            _ => Err(not_a_share_group(group_id)),
        })
    }

    /// Deletes the share partitions of a group without members in a topic. Returns whether there
    /// were any.
    ///
    /// # Errors
    /// A group with members, or of another type; a store that failed.
    pub(crate) async fn delete_shares(&self, group_id: &str, topic: Uuid) -> Result<bool, Fault> {
        let slot = self.shared.registry.get(group_id).ok_or_else(|| not_found(group_id))?;
        let forgotten = self.shared.registry.change(&slot, |group, now| {
            let share = Registry::share(group, false, now);
            let share = share.ok_or_else(|| not_a_share_group(group_id))?;
            if !share.is_empty() {
                return Err(not_empty(group_id));
            }
            let forgotten = self.shares().forget_topic(group_id, topic);
            forgotten.map_err(|refused| share::refused(refused).into())
        })?;
        let was_known = forgotten.is_some();
        share::durable(forgotten).await.map_err(Fault::from)?;
        Ok(was_known)
    }
}

impl Shared {
    fn is_share_group(&self, group_id: &str) -> Result<bool, Fault> {
        self.check_group_id(group_id).map_err(plain)?;
        let Some(slot) = self.registry.get(group_id) else { return Ok(false) };
        Ok(self.registry.peek(&slot, |group, _| matches!(group, LiveGroup::Share(_))))
    }
}

fn not_empty(group_id: &str) -> Fault {
    Fault::new(ResponseError::NonEmptyGroup, format!("Group {group_id} is not empty."))
}

impl From<ApiError> for Fault {
    fn from(error: ApiError) -> Self {
        Self::new(error.kind(), error.to_string())
    }
}
