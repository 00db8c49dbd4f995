//! The persisted state of a consumer group: a fold of [`Change`]s. No clock, no I/O.
//!
//! The live group changes its state by [`GroupState::apply`] alone, and a replay does the same, so
//! the two cannot differ. Every prefix of the changes is a state from which the group can continue:
//! see `docs/format/group-state.md`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use uuid::Uuid;

/// Partitions by topic. No topic in it is without partitions.
pub(in crate::groups) type Assignment = BTreeMap<Uuid, BTreeSet<i32>>;

/// The member epoch in which a member received each of its partitions.
pub(in crate::groups) type Since = HashMap<(Uuid, i32), i32>;

/// The epoch of a static member that has left temporarily.
pub(in crate::groups) const LEFT_FOR_A_WHILE: i32 = -2;

/// Estimated memory of a topic of an assignment, and of a partition of it; used for the bound only.
const TOPIC_BYTES: usize = 96;
const PARTITION_BYTES: usize = 8;
/// Estimated memory of an entry of [`GroupState::owners`], including the table's spare capacity.
const OWNER_BYTES: usize = 96;
/// Estimated memory of a member apart from its strings and partitions.
pub(in crate::groups) const MEMBER_BYTES: usize = 640;

/// The data that a member sends about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct Profile {
    pub(in crate::groups) instance_id: Option<String>,
    pub(in crate::groups) rack_id: Option<String>,
    pub(in crate::groups) client_id: String,
    pub(in crate::groups) client_host: String,
    pub(in crate::groups) rebalance_timeout_ms: i32,
    /// Topics by name, whether they exist or not.
    pub(in crate::groups) topics: BTreeSet<String>,
    /// A regular expression; every topic whose whole name it matches is subscribed too.
    pub(in crate::groups) regex: Option<String>,
    /// The assignor that the member votes for.
    pub(in crate::groups) assignor: Option<String>,
}

/// The progress of a member towards its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) enum Progress {
    /// It has the partitions of its epoch's target.
    #[default]
    Stable,
    /// It has to give up partitions, and has not reported yet that it did.
    Revoking,
    /// It has the free ones; other members have not released the rest.
    Waiting,
}

/// The current assignment of a member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct Current {
    pub(in crate::groups) epoch: i32,
    /// The previous epoch. A member that did not receive the last response still has it.
    pub(in crate::groups) previous_epoch: i32,
    pub(in crate::groups) progress: Progress,
    pub(in crate::groups) assigned: Assignment,
    /// Partitions that it may still have, until it reports that it has not.
    pub(in crate::groups) revoking: Assignment,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct Member {
    pub(in crate::groups) profile: Profile,
    pub(in crate::groups) current: Current,
    /// Its assignment in the group's target epoch.
    pub(in crate::groups) target: Assignment,
}

impl Member {
    pub(in crate::groups) fn size_bytes(&self, id: &str) -> usize {
        let Profile {
            instance_id, rack_id, client_id, client_host, topics, regex, assignor, ..
        } = &self.profile;
        let options: usize =
            [instance_id, rack_id, regex, assignor].into_iter().flatten().map(String::len).sum();
        let topics: usize = topics.iter().map(|topic| topic.len() + 32).sum();
        let owned = [&self.current.assigned, &self.current.revoking];
        let owned: usize = owned.into_iter().map(|all| assignment_bytes(all, owned_bytes)).sum();
        let assignments = owned + assignment_bytes(&self.target, assigned_bytes);
        // The id is in the map, in the timers, and by reference for each partition.
        MEMBER_BYTES
            + 2 * id.len()
            + client_id.len()
            + client_host.len()
            + options
            + topics
            + assignments
    }
}

/// Estimated memory of a topic with this many partitions in a current or target assignment.
pub(in crate::groups) fn assigned_bytes(partitions: usize) -> usize {
    TOPIC_BYTES + partitions * PARTITION_BYTES
}

/// Estimated memory of a topic with this many partitions, including the entries of their owners.
pub(in crate::groups) fn owned_bytes(partitions: usize) -> usize {
    assigned_bytes(partitions) + partitions * OWNER_BYTES
}

/// Estimated memory of an assignment, with `of_topic` for each topic.
pub(in crate::groups) fn assignment_bytes(
    assignment: &Assignment,
    of_topic: fn(usize) -> usize,
) -> usize {
    assignment.values().map(|partitions| of_topic(partitions.len())).sum()
}

/// The member that has a partition, or may still have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Owner {
    pub(in crate::groups) id: Arc<str>,
    /// The member epoch in which it received the partition, which no other member has had since.
    pub(in crate::groups) since_epoch: i32,
}

/// A change of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) enum Change {
    /// The subscribed topics have changed: which topics exist, or how many partitions they have.
    Topics { group_epoch: i32, hash: u64 },
    /// A member is new, or has changed its profile.
    Joined { group_epoch: i32, id: String, profile: Profile },
    /// A member is removed, with all that it had.
    Removed { group_epoch: i32, id: String },
    /// A static member has come back under another id.
    Renamed { from: String, to: String },
    /// The target of a member.
    Target { id: String, target: Assignment },
    /// All members' targets are those of this group epoch.
    Targeted { epoch: i32 },
    /// The current assignment of a member.
    Current { id: String, current: Current },
}

/// One group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct GroupState {
    pub(in crate::groups) epoch: i32,
    /// Hash of the topics that the epoch is based on.
    pub(in crate::groups) topics_hash: u64,
    /// The group epoch for which the targets were computed.
    pub(in crate::groups) target_epoch: i32,
    pub(in crate::groups) members: BTreeMap<Arc<str>, Member>,
    /// Derived: member by instance id.
    pub(in crate::groups) static_members: BTreeMap<String, Arc<str>>,
    /// Derived: the owner of each partition.
    pub(in crate::groups) owners: HashMap<(Uuid, i32), Owner>,
    /// Derived: estimated memory of the members.
    pub(in crate::groups) size_bytes: usize,
}

impl GroupState {
    /// Applies a change. A change of a member that does not exist has no effect.
    pub(in crate::groups) fn apply(&mut self, change: &Change) {
        match change {
            Change::Topics { group_epoch, hash } => {
                self.epoch = *group_epoch;
                self.topics_hash = *hash;
            }
            Change::Joined { group_epoch, id, profile } => {
                self.epoch = *group_epoch;
                let (id, mut member, since) = self
                    .take(id)
                    .unwrap_or_else(|| (id.as_str().into(), Member::default(), Since::new()));
                member.profile = profile.clone();
                self.put(id, member, &since);
            }
            Change::Removed { group_epoch, id } => {
                self.epoch = *group_epoch;
                self.take(id);
            }
            Change::Renamed { from, to } => {
                if let Some((_, mut member, since)) = self.take(from) {
                    self.take(to);
                    member.current.epoch = 0;
                    member.current.previous_epoch = 0;
                    self.put(to.as_str().into(), member, &since);
                }
            }
            Change::Target { id, target } => {
                if let Some(member) = self.members.get_mut(id.as_str()) {
                    self.size_bytes += assignment_bytes(target, assigned_bytes);
                    self.size_bytes -= assignment_bytes(&member.target, assigned_bytes);
                    member.target = target.clone();
                }
            }
            Change::Targeted { epoch } => self.target_epoch = *epoch,
            Change::Current { id, current } => {
                if let Some((id, mut member, since)) = self.take(id) {
                    member.current = current.clone();
                    self.put(id, member, &since);
                }
            }
        }
    }

    /// Removes a member, with the derived data.
    fn take(&mut self, id: &str) -> Option<(Arc<str>, Member, Since)> {
        let (id, member) = self.members.remove_entry(id)?;
        self.size_bytes -= member.size_bytes(&id);
        if let Some(instance_id) = &member.profile.instance_id
            && self.static_members.get(instance_id) == Some(&id)
        {
            self.static_members.remove(instance_id);
        }
        let mut since = Since::new();
        for partition in partitions(&member.current) {
            if let Some(epoch) = self.since(&id, partition) {
                self.owners.remove(&partition);
                since.insert(partition, epoch);
            }
        }
        Some((id, member, since))
    }

    /// The member epoch in which a member received a partition that it has, or may still have.
    pub(in crate::groups) fn since(&self, id: &str, partition: (Uuid, i32)) -> Option<i32> {
        let owner = self.owners.get(&partition).filter(|owner| *owner.id == *id)?;
        Some(owner.since_epoch)
    }

    /// Inserts a member that is not present. Its partitions that are not in `since` were received
    /// in its current epoch.
    pub(in crate::groups) fn put(&mut self, id: Arc<str>, member: Member, since: &Since) {
        self.size_bytes += member.size_bytes(&id);
        if let Some(instance_id) = &member.profile.instance_id {
            self.static_members.insert(instance_id.clone(), Arc::clone(&id));
        }
        for partition in partitions(&member.current) {
            let since_epoch = since.get(&partition).copied().unwrap_or(member.current.epoch);
            self.owners.insert(partition, Owner { id: Arc::clone(&id), since_epoch });
        }
        self.members.insert(id, member);
    }
}

/// The partitions that a member has, then those that it may still have, each in ascending order.
pub(in crate::groups) fn partitions(current: &Current) -> impl Iterator<Item = (Uuid, i32)> {
    let all = current.assigned.iter().chain(&current.revoking);
    all.flat_map(|(topic, partitions)| partitions.iter().map(|partition| (*topic, *partition)))
}
