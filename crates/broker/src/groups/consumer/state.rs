//! What a consumer group remembers over a restart: a fold of [`Change`]s. No clock, no I/O.
//!
//! The live group changes its state by [`GroupState::apply`] alone, and a replay does the same, so
//! the two cannot differ. Every prefix of the changes is a state from which the group goes on: see
//! `docs/format/group-state.md`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use uuid::Uuid;

/// Partitions by topic. No topic in it is without partitions.
pub(in crate::groups) type Assignment = BTreeMap<Uuid, BTreeSet<i32>>;

/// In which member epoch a member got each of its partitions.
pub(in crate::groups) type Since = HashMap<(Uuid, i32), i32>;

/// The epoch of a static member that has left for a while.
pub(in crate::groups) const LEFT_FOR_A_WHILE: i32 = -2;

/// What a topic of an assignment, and what a partition of it, take in memory; measured by eye, used
/// for the bound only.
const TOPIC_BYTES: usize = 96;
const PARTITION_BYTES: usize = 8;
/// What an entry of [`GroupState::owners`] takes, with the room that a table has for more.
const OWNER_BYTES: usize = 96;
/// What a member takes beside its strings and partitions.
pub(in crate::groups) const MEMBER_BYTES: usize = 640;

/// What a member says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct Profile {
    pub(in crate::groups) instance_id: Option<String>,
    pub(in crate::groups) rack_id: Option<String>,
    pub(in crate::groups) client_id: String,
    pub(in crate::groups) client_host: String,
    pub(in crate::groups) rebalance_timeout_ms: i32,
    /// Topics by name, whether they exist or not.
    pub(in crate::groups) topics: BTreeSet<String>,
    /// And all topics that it matches as a whole.
    pub(in crate::groups) regex: Option<String>,
    /// The assignor that the member votes for.
    pub(in crate::groups) assignor: Option<String>,
}

/// Where a member is on its way to its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) enum Progress {
    /// It has what it was to get in its epoch.
    #[default]
    Stable,
    /// It has been told to give up partitions, and has not said yet that it did.
    Revoking,
    /// It has what is free; others have not released the rest.
    Waiting,
}

/// What a member has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct Current {
    pub(in crate::groups) epoch: i32,
    /// That of before, from which a member may come whose answer was lost.
    pub(in crate::groups) previous_epoch: i32,
    pub(in crate::groups) progress: Progress,
    pub(in crate::groups) assigned: Assignment,
    /// What it may still have, until it says that it has not.
    pub(in crate::groups) revoking: Assignment,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct Member {
    pub(in crate::groups) profile: Profile,
    pub(in crate::groups) current: Current,
    /// What it is to have in the group's target epoch.
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
        // The id is kept in the map, for the timers, and for each partition by reference.
        MEMBER_BYTES
            + 2 * id.len()
            + client_id.len()
            + client_host.len()
            + options
            + topics
            + assignments
    }
}

/// What a topic of which a member has, or is to have, so many partitions takes in memory, about.
pub(in crate::groups) fn assigned_bytes(partitions: usize) -> usize {
    TOPIC_BYTES + partitions * PARTITION_BYTES
}

/// The same with the entries of who has them.
pub(in crate::groups) fn owned_bytes(partitions: usize) -> usize {
    assigned_bytes(partitions) + partitions * OWNER_BYTES
}

/// What an assignment takes, of which each topic takes so much.
pub(in crate::groups) fn assignment_bytes(
    assignment: &Assignment,
    of_topic: fn(usize) -> usize,
) -> usize {
    assignment.values().map(|partitions| of_topic(partitions.len())).sum()
}

/// Who has a partition, or may still have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Owner {
    pub(in crate::groups) id: Arc<str>,
    /// The member epoch in which it got the partition, which nobody else has had since.
    pub(in crate::groups) since_epoch: i32,
}

/// A change of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) enum Change {
    /// What the members have subscribed to has changed: which topics these are, or how many
    /// partitions they have.
    Topics { group_epoch: i32, hash: u64 },
    /// A member is new, or says something new of itself.
    Joined { group_epoch: i32, id: String, profile: Profile },
    /// A member is gone, with all that it had.
    Removed { group_epoch: i32, id: String },
    /// A static member has come back under another id.
    Renamed { from: String, to: String },
    /// What a member is to have.
    Target { id: String, target: Assignment },
    /// All members' targets are those of this group epoch.
    Targeted { epoch: i32 },
    /// What a member has.
    Current { id: String, current: Current },
}

/// One group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::groups) struct GroupState {
    pub(in crate::groups) epoch: i32,
    /// Of the topics that the epoch is about.
    pub(in crate::groups) topics_hash: u64,
    /// The group epoch for which the targets were computed.
    pub(in crate::groups) target_epoch: i32,
    pub(in crate::groups) members: BTreeMap<Arc<str>, Member>,
    /// Derived: member by instance id.
    pub(in crate::groups) static_members: BTreeMap<String, Arc<str>>,
    /// Derived: who has, or may still have, a partition.
    pub(in crate::groups) owners: HashMap<(Uuid, i32), Owner>,
    /// Derived: what the members take in memory, about.
    pub(in crate::groups) size_bytes: usize,
}

impl GroupState {
    /// Change the group. What is said of a member that does not exist changes nothing.
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

    /// Take a member out, with what is derived from it.
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

    /// The member epoch in which a member got a partition that it has, or may still have.
    pub(in crate::groups) fn since(&self, id: &str, partition: (Uuid, i32)) -> Option<i32> {
        let owner = self.owners.get(&partition).filter(|owner| *owner.id == *id)?;
        Some(owner.since_epoch)
    }

    /// Put a member in that is not there. Of its partitions it got those that are not in `since` in
    /// its present epoch.
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

/// What a member has, and then what it may still have, each in ascending order.
pub(in crate::groups) fn partitions(current: &Current) -> impl Iterator<Item = (Uuid, i32)> {
    let all = current.assigned.iter().chain(&current.revoking);
    all.flat_map(|(topic, partitions)| partitions.iter().map(|partition| (*topic, *partition)))
}
