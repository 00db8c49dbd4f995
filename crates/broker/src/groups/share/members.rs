//! The members of one share group and their assignments, as a pure state machine.
//!
//! Several members may read one partition, so no partition has to be given up before another member
//! gets it, and nothing here has to survive a restart: members receive UNKNOWN_MEMBER_ID and join
//! again, and the records that they had acquired are available then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kafka_protocol::error::ResponseError;
use uuid::Uuid;

use crate::groups::consumer::{Assignment, Fault, assigned_bytes, assignment_bytes};
use crate::groups::topics_view::TopicsView;

/// Maximum number of members of one group (`group.share.max.size`).
const MAX_MEMBERS: usize = 200;

/// Estimated memory of a member apart from its strings and partitions.
pub(in crate::groups) const MEMBER_BYTES: usize = 512;

/// A heartbeat. Fields that are `None` have not changed.
#[derive(Clone, Debug)]
pub(in crate::groups) struct ShareBeat {
    /// Not empty.
    pub(in crate::groups) member_id: String,
    /// 0 to join, not negative.
    pub(in crate::groups) epoch: i32,
    pub(in crate::groups) rack_id: Option<String>,
    pub(in crate::groups) topics: Option<BTreeSet<String>>,
    pub(in crate::groups) client_id: String,
    pub(in crate::groups) client_host: String,
}

#[derive(Clone, Debug)]
pub(in crate::groups) struct ShareMember {
    pub(in crate::groups) rack_id: Option<String>,
    pub(in crate::groups) client_id: String,
    pub(in crate::groups) client_host: String,
    pub(in crate::groups) topics: BTreeSet<String>,
    pub(in crate::groups) epoch: i32,
    /// The previous epoch. A member that did not receive the last response still has it.
    previous_epoch: i32,
    pub(in crate::groups) assigned: Assignment,
    /// When it is removed.
    deadline: Instant,
}

impl ShareMember {
    fn size_bytes(&self, id: &str) -> usize {
        let rack = self.rack_id.as_ref().map_or(0, String::len);
        let topics: usize = self.topics.iter().map(|topic| topic.len() + 32).sum();
        let assigned = assignment_bytes(&self.assigned, assigned_bytes);
        let texts = id.len() + rack + self.client_id.len() + self.client_host.len();
        MEMBER_BYTES + texts + topics + assigned
    }
}

/// One group.
#[derive(Debug)]
pub(in crate::groups) struct ShareGroup {
    epoch: i32,
    members: BTreeMap<Arc<str>, ShareMember>,
    empty_since: Instant,
    /// The version of the topics that the assignment was last compared with.
    compared_with: Option<u64>,
    /// The basis of the assignment: id and number of partitions of the topics that members have
    /// subscribed to and that exist.
    ///
    /// `None` after a member has left: the others then get its partitions.
    topics: Option<Vec<(Uuid, u32)>>,
}

impl ShareGroup {
    pub(in crate::groups) fn new(now: Instant) -> Self {
        let members = BTreeMap::new();
        Self { epoch: 0, members, empty_since: now, compared_with: None, topics: None }
    }

    pub(in crate::groups) fn epoch(&self) -> i32 {
        self.epoch
    }

    pub(in crate::groups) fn members(&self) -> &BTreeMap<Arc<str>, ShareMember> {
        &self.members
    }

    pub(in crate::groups) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Since when it has had no members; `None` if it has any.
    pub(in crate::groups) fn vacant_since(&self) -> Option<Instant> {
        self.is_empty().then_some(self.empty_since)
    }

    /// The state of the group, with Kafka's names.
    pub(in crate::groups) fn phase_name(&self) -> &'static str {
        if self.is_empty() { "Empty" } else { "Stable" }
    }

    /// Estimated memory of one of its members.
    pub(in crate::groups) fn member_bytes(&self, id: &str) -> Option<usize> {
        self.members.get(id).map(|member| member.size_bytes(id))
    }

    /// Whether it has this member, with exactly these topics as its subscription.
    pub(in crate::groups) fn subscribes_to(&self, id: &str, topics: &BTreeSet<String>) -> bool {
        self.members.get(id).is_some_and(|member| member.topics == *topics)
    }

    /// Estimated memory of the members.
    pub(in crate::groups) fn size_bytes(&self) -> usize {
        self.members.iter().map(|(id, member)| member.size_bytes(id)).sum()
    }

    /// The next moment at which [`Self::tick`] has something to do.
    pub(in crate::groups) fn deadline(&self) -> Option<Instant> {
        self.members.values().map(|member| member.deadline).min()
    }

    /// Handles a heartbeat that joins, continues, or changes the subscription. Returns the member's
    /// epoch, and its assignment if the member may not know it.
    pub(in crate::groups) fn heartbeat(
        &mut self,
        now: Instant,
        session_timeout: Duration,
        topics: &TopicsView,
        beat: &ShareBeat,
    ) -> Result<(i32, Option<Assignment>), Fault> {
        let id = beat.member_id.as_str();
        let known = self.members.get(id);
        if beat.epoch > 0 {
            check_epoch(id, known.ok_or_else(|| unknown_member(id))?, beat.epoch)?;
        } else if known.is_none() && self.members.len() >= MAX_MEMBERS {
            return Err(Fault::new(
                ResponseError::GroupMaxSizeReached,
                format!(
                    "The share group has reached its maximum capacity of {MAX_MEMBERS} members."
                ),
            ));
        }
        // Nothing fails from here on.
        let deadline = now + session_timeout;
        let is_new = known.is_none();
        let key: Arc<str> = id.into();
        let member = self.members.entry(key).or_insert_with(|| ShareMember {
            rack_id: None,
            client_id: String::new(),
            client_host: String::new(),
            topics: BTreeSet::new(),
            epoch: 0,
            previous_epoch: 0,
            assigned: Assignment::new(),
            deadline,
        });
        member.deadline = deadline;
        member.client_id.clone_from(&beat.client_id);
        member.client_host.clone_from(&beat.client_host);
        if beat.rack_id.is_some() || beat.epoch == 0 {
            member.rack_id.clone_from(&beat.rack_id);
        }
        let subscribed = beat.topics.as_ref().filter(|topics| **topics != member.topics);
        let subscribes = is_new || subscribed.is_some();
        if let Some(topics) = subscribed {
            member.topics.clone_from(topics);
        }
        let before = member.assigned.clone();
        self.assign(topics, subscribes);
        let epoch = self.epoch;
        let Some(member) = self.members.get_mut(id) else {
            unreachable!("the heartbeat's member exists or has just joined");
        };
        if member.epoch != epoch {
            (member.previous_epoch, member.epoch) = (member.epoch, epoch);
        }
        let sends_assignment = beat.epoch != epoch || member.assigned != before;
        Ok((epoch, sends_assignment.then(|| member.assigned.clone())))
    }

    pub(in crate::groups) fn leave(&mut self, now: Instant, id: &str) -> Result<(), Fault> {
        if !self.members.contains_key(id) {
            return Err(unknown_member(id));
        }
        self.remove(now, id);
        Ok(())
    }

    /// Removes the members whose deadlines have passed, and returns their ids.
    pub(in crate::groups) fn tick(&mut self, now: Instant) -> Vec<Arc<str>> {
        let due = self.members.iter().filter(|(_, member)| member.deadline <= now);
        let due: Vec<_> = due.map(|(id, _)| Arc::clone(id)).collect();
        for id in &due {
            self.remove(now, id);
        }
        due
    }

    fn remove(&mut self, now: Instant, id: &str) {
        self.members.remove(id);
        self.epoch = self.epoch.saturating_add(1);
        // The others get its partitions with their next heartbeats.
        self.compared_with = None;
        self.topics = None;
        if self.is_empty() {
            self.empty_since = now;
        }
    }

    /// Computes a new assignment, in a new epoch, if members or topics have changed.
    fn assign(&mut self, topics: &TopicsView, subscribes: bool) {
        if !subscribes && self.compared_with == Some(topics.version()) {
            return;
        }
        self.compared_with = Some(topics.version());
        let names: BTreeSet<&str> =
            self.members.values().flat_map(|m| m.topics.iter().map(String::as_str)).collect();
        let found = names.into_iter().filter_map(|name| Some((name, topics.get(name)?)));
        let found: Vec<_> = found.filter(|(_, (_, partitions))| *partitions > 0).collect();
        let table: Vec<(Uuid, u32)> = found.iter().map(|(_, topic)| *topic).collect();
        if !subscribes && self.topics.as_ref() == Some(&table) {
            return;
        }
        let mut assigned: BTreeMap<Arc<str>, Assignment> = BTreeMap::new();
        for (ordinal, (name, (topic, partitions))) in found.iter().enumerate() {
            let subscribers =
                self.members.iter().filter(|(_, member)| member.topics.contains(*name));
            let subscribers: Vec<&Arc<str>> = subscribers.map(|(id, _)| id).collect();
            // Each partition has a reader, and each member something to read. Each topic begins
            // with a different member.
            let pairs = subscribers.len().max(*partitions as usize);
            for pair in 0..pairs {
                let member = subscribers[(pair + ordinal) % subscribers.len()];
                let of_member = assigned.entry(Arc::clone(member)).or_default();
                let partition = i32::try_from(pair % *partitions as usize).unwrap_or(i32::MAX);
                of_member.entry(*topic).or_default().insert(partition);
            }
        }
        for (id, member) in &mut self.members {
            member.assigned = assigned.remove(id).unwrap_or_default();
        }
        self.topics = Some(table);
        self.epoch = self.epoch.saturating_add(1);
    }
}

fn check_epoch(id: &str, member: &ShareMember, epoch: i32) -> Result<(), Fault> {
    let known = member.epoch;
    let comparison = match epoch.cmp(&known) {
        std::cmp::Ordering::Equal => return Ok(()),
        std::cmp::Ordering::Less if epoch == member.previous_epoch => return Ok(()),
        std::cmp::Ordering::Less => "smaller",
        std::cmp::Ordering::Greater => "greater",
    };
    Err(Fault::new(
        ResponseError::FencedMemberEpoch,
        format!(
            "The share group member {id} has a {comparison} member epoch ({epoch}) than the one \
             known by the group coordinator ({known}). The member must abandon all its \
             partitions and rejoin."
        ),
    ))
}

pub(crate) fn unknown_member(id: &str) -> Fault {
    Fault::new(ResponseError::UnknownMemberId, format!("Member {id} is not a member of the group."))
}
