//! Members of a consumer group that speak the classic protocol. A group takes them over with its
//! first member of the consumer protocol, and returns them to a classic group when its last such
//! member leaves. The server computes their assignments too. They learn of a new epoch by
//! REBALANCE_IN_PROGRESS, join again with their owned partitions, and receive their assignment at
//! once; their generation is their member epoch.
//!
//! The capabilities of their clients are kept in memory only: after a restart they are treated as
//! members of the consumer protocol until a request shows that they are not. They then have to join
//! again, which sends the capabilities again.

use bytes::Bytes;
use kafka_protocol::protocol::StrBytes;

use super::state::{Change, Current, Profile, Progress};
use super::*;
use crate::groups::embedded::{self, CONSUMER, Subscription};
use crate::groups::group::{
    JoinEvent, Joined, Migrant, Refusal, SyncEvent, Synced, protocols_bytes,
};
use crate::groups::heartbeat::are_too_long;
use crate::groups::membership::MAX_NAME_BYTES;

/// Data about the client of such a member.
#[derive(Debug)]
pub(super) struct Classic {
    session_timeout: Duration,
    rebalance_timeout: Duration,
    /// Name and metadata, in order of preference.
    protocols: Vec<(StrBytes, Bytes)>,
    /// The assignment that answers its SyncGroup.
    assignment: Bytes,
    /// When the member is removed, if it has to join again, or has joined and has to send a
    /// SyncGroup.
    pub(super) due: Option<Instant>,
}

impl Classic {
    pub(super) fn size_bytes(&self) -> usize {
        let protocols = protocols_bytes(self.protocols.iter().map(|(name, data)| (name, data)));
        size_of::<Self>() + protocols + self.assignment.len()
    }

    fn supports(&self, protocol: &StrBytes) -> bool {
        self.protocols.iter().any(|(name, _)| name == protocol)
    }
}

/// Parses the subscription in a member's first protocol; `None` if it is not a consumer's.
fn subscription(protocols: &[(StrBytes, Bytes)]) -> Option<Subscription> {
    Subscription::read(&protocols.first()?.1)
}

/// Whether the subscription exceeds the limits for a member of the consumer protocol. It has to fit
/// in one record: a group whose changes cannot be written cannot answer any request.
fn is_too_large(subscription: &Subscription) -> bool {
    let rack_bytes = subscription.rack.as_ref().map_or(0, String::len);
    are_too_long(subscription.topics.iter().map(String::len)) || rack_bytes > MAX_NAME_BYTES
}

fn millis(time: Duration) -> i32 {
    i32::try_from(time.as_millis()).unwrap_or(i32::MAX)
}

impl ConsumerGroup {
    /// Creates a group that continues with the members of a classic group, their assignments and
    /// its generation. `None` if they are not consumers, or their subscriptions exceed the limits
    /// for members of a consumer group.
    pub(in crate::groups) fn of_migrants(
        rules: ConsumerRules,
        now: Instant,
        topics: &TopicsView,
        generation: i32,
        migrants: Vec<Migrant>,
    ) -> Option<Self> {
        let epoch = generation.max(1);
        let mut group = Self::new(GroupState::default(), rules, now);
        let mut taken: HashSet<(Uuid, i32)> = HashSet::new();
        let mut assigned = Vec::with_capacity(migrants.len());
        for migrant in migrants {
            let id = migrant.member_id.to_string();
            let subscription =
                subscription(&migrant.protocols).filter(|wanted| !is_too_large(wanted))?;
            let mut assignment = embedded::read_assignment(&migrant.assignment, topics)?;
            // The leader may have assigned a partition twice.
            for (topic, partitions) in &mut assignment {
                partitions.retain(|partition| taken.insert((*topic, *partition)));
            }
            assignment.retain(|_, partitions| !partitions.is_empty());
            let profile = Profile {
                instance_id: migrant.instance_id.as_ref().map(ToString::to_string),
                rack_id: subscription.rack,
                client_id: migrant.client_id.to_string(),
                client_host: migrant.client_host.to_string(),
                rebalance_timeout_ms: millis(migrant.rebalance_timeout),
                topics: subscription.topics,
                ..Profile::default()
            };
            group.change(Change::Joined { group_epoch: epoch, id: id.clone(), profile });
            group.change(Change::Target { id: id.clone(), target: assignment.clone() });
            let key: Arc<str> = id.as_str().into();
            assigned.push((id, assignment));
            let session = now + migrant.session_timeout;
            group.deadlines.insert(Arc::clone(&key), Deadlines { session, revocation: None });
            let classic = Classic {
                session_timeout: migrant.session_timeout,
                rebalance_timeout: migrant.rebalance_timeout,
                protocols: migrant.protocols,
                assignment: migrant.assignment,
                due: None,
            };
            group.classic.insert(key, classic);
        }
        group.change(Change::Targeted { epoch });
        for (id, assigned) in assigned {
            let (progress, revoking) = (Progress::Stable, Assignment::new());
            let current = Current { epoch, previous_epoch: epoch, progress, assigned, revoking };
            group.change(Change::Current { id, current });
        }
        Some(group)
    }

    /// Whether it has members and all of them speak the classic protocol.
    pub(in crate::groups) fn is_all_classic(&self) -> bool {
        !self.is_empty() && self.state.members.keys().all(|id| self.classic.contains_key(id))
    }

    /// Whether a member speaks the classic protocol.
    pub(in crate::groups) fn is_classic(&self, id: &str) -> bool {
        self.classic.contains_key(id)
    }

    /// Whether a member may speak the classic protocol; unknown for members from before a restart.
    pub(in crate::groups) fn may_be_classic(&self, id: &str) -> bool {
        self.is_classic(id) || self.unconfirmed.contains_key(id)
    }

    /// Returns its members, for a classic group.
    pub(in crate::groups) fn migrants(&self) -> Vec<Migrant> {
        let own = |text: &str| StrBytes::from_string(text.to_owned());
        let members = self.state.members.iter().filter_map(|(id, member)| {
            let classic = self.classic.get(id)?;
            Some(Migrant {
                member_id: own(id),
                instance_id: member.profile.instance_id.as_deref().map(own),
                client_id: own(&member.profile.client_id),
                client_host: own(&member.profile.client_host),
                session_timeout: classic.session_timeout,
                rebalance_timeout: classic.rebalance_timeout,
                protocols: classic.protocols.clone(),
                assignment: classic.assignment.clone(),
            })
        });
        members.collect()
    }

    /// Handles a JoinGroup: the member is new, or has learnt of a new epoch. Never waits.
    pub(in crate::groups) fn classic_join(
        &mut self,
        now: Instant,
        rules: ConsumerRules,
        topics: &TopicsView,
        join: JoinEvent,
    ) -> Result<Joined, Refusal> {
        let refuse =
            |error, member_id: &StrBytes| Err(Refusal { error, member_id: member_id.clone() });
        let fits = |(name, _): &(StrBytes, Bytes)| {
            self.classic.iter().all(|(id, other)| **id == *join.member_id || other.supports(name))
        };
        let is_consumer = join.protocol_type.as_str() == CONSUMER;
        let Some(mut subscription) = subscription(&join.protocols)
            .filter(|_| is_consumer && join.protocols.iter().any(fits))
        else {
            return refuse(ResponseError::InconsistentGroupProtocol, &join.member_id);
        };
        if is_too_large(&subscription) {
            return refuse(ResponseError::InvalidRequest, &join.member_id);
        }
        let instance_id = join.instance_id.as_ref().map(StrBytes::as_str);
        let holder = instance_id.and_then(|id| self.state.static_members.get(id).cloned());
        let id = match (join.member_id.is_empty(), &holder) {
            (false, None) if instance_id.is_some() => {
                return refuse(ResponseError::UnknownMemberId, &join.member_id);
            }
            (false, Some(holder)) if **holder != *join.member_id => {
                return refuse(ResponseError::FencedInstanceId, &join.member_id);
            }
            (false, _) => join.member_id.clone(),
            (true, _) if instance_id.is_none() && join.can_require_id => {
                return refuse(ResponseError::MemberIdRequired, &join.fresh_id);
            }
            (true, _) => join.fresh_id.clone(),
        };
        let known = self.state.members.contains_key(id.as_str());
        if known && holder.is_none() && !self.may_be_classic(&id) {
            return refuse(ResponseError::UnknownMemberId, &StrBytes::new());
        }
        if !known && holder.is_none() && self.state.members.len() >= rules.max_members {
            return refuse(ResponseError::GroupMaxSizeReached, &join.member_id);
        }
        // Nothing fails from here on. A topic that the client may not describe does not exist for
        // it.
        subscription.topics.retain(|topic| join.visibility.is_visible(topic));
        if let Some(holder) = holder.filter(|holder| **holder != *id) {
            self.rename(&holder, &id);
        }
        let beat = Beat {
            member_id: id.to_string(),
            instance_id: instance_id.map(str::to_owned),
            rack_id: subscription.rack.clone(),
            rebalance_timeout_ms: Some(millis(join.rebalance_timeout)),
            topics: Some(subscription.topics.clone()),
            regex: Some(String::new()),
            client_id: join.client_id.to_string(),
            client_host: join.client_host.to_string(),
            ..Beat::default()
        };
        self.unconfirmed.remove(id.as_str());
        self.go_towards_epoch(&beat, topics);
        let rules = ConsumerRules { session_timeout: join.session_timeout, ..rules };
        self.reconcile(now, rules, &id, Some(&subscription.owned(topics)));
        let Some((key, member)) = self.state.members.get_key_value(id.as_str()) else {
            unreachable!("the member exists or has just joined");
        };
        let protocol = join.protocols[0].0.clone();
        let classic = Classic {
            session_timeout: join.session_timeout,
            rebalance_timeout: join.rebalance_timeout,
            protocols: join.protocols,
            assignment: embedded::write_assignment(&member.current.assigned, topics),
            due: Some(now + join.rebalance_timeout),
        };
        let generation = member.current.epoch;
        self.classic.insert(Arc::clone(key), classic);
        Ok(Joined {
            generation,
            protocol_type: join.protocol_type,
            protocol,
            // No leader: the server computes the assignment.
            leader: StrBytes::new(),
            member_id: id,
            skip_assignment: false,
            members: Vec::new(),
        })
    }

    /// Handles a SyncGroup: returns the member's assignment since it joined.
    pub(in crate::groups) fn classic_sync(
        &mut self,
        now: Instant,
        sync: &SyncEvent,
    ) -> Result<Synced, ResponseError> {
        let instance_id = sync.instance_id.as_ref();
        self.check_classic(now, &sync.member_id, instance_id, sync.generation)?;
        if self.is_to_join_again(&sync.member_id, false) {
            return Err(ResponseError::RebalanceInProgress);
        }
        let id = sync.member_id.as_str();
        let Some(classic) = self.classic.get_mut(id) else {
            return Err(ResponseError::UnknownMemberId);
        };
        let differs =
            |asked: &Option<StrBytes>, is: &str| asked.as_deref().is_some_and(|asked| asked != is);
        let protocol = classic.protocols[0].0.clone();
        if differs(&sync.protocol_type, CONSUMER) || differs(&sync.protocol, &protocol) {
            return Err(ResponseError::InconsistentGroupProtocol);
        }
        classic.due = None;
        Ok(Synced {
            protocol_type: Some(StrBytes::from_static_str(CONSUMER)),
            protocol: Some(protocol),
            assignment: classic.assignment.clone(),
        })
    }

    /// Handles a Heartbeat. The error says whether the member has to join again.
    pub(in crate::groups) fn classic_heartbeat(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation: i32,
    ) -> Result<(), ResponseError> {
        self.check_classic(now, member_id, instance_id, generation)?;
        if !self.is_to_join_again(member_id, true) {
            return Ok(());
        }
        if let Some(classic) = self.classic.get_mut(member_id.as_str()) {
            classic.due.get_or_insert(now + classic.rebalance_timeout);
        }
        Err(ResponseError::RebalanceInProgress)
    }

    /// Handles one member of a LeaveGroup; a static one may be named by its instance id alone.
    pub(in crate::groups) fn classic_leave(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
    ) -> Result<(), ResponseError> {
        let holder = instance_id.and_then(|id| self.state.static_members.get(id.as_str()));
        let id = match holder {
            Some(holder) if member_id.is_empty() => holder.to_string(),
            _ => member_id.to_string(),
        };
        if !self.may_be_classic(&id) {
            return Err(ResponseError::UnknownMemberId);
        }
        let left = self.leave(now, &id, instance_id.map(StrBytes::as_str), false);
        left.map_err(|fault| fault.error)
    }

    /// Checks that the member exists in this generation, and records the request as a heartbeat.
    fn check_classic(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation: i32,
    ) -> Result<(), ResponseError> {
        let id = member_id.as_str();
        if let Some(instance_id) = instance_id {
            self.check_instance(id, instance_id).map_err(|fault| fault.error)?;
        }
        let Some(member) = self.state.members.get(id) else {
            return Err(ResponseError::UnknownMemberId);
        };
        let epoch = member.current.epoch;
        if !self.may_be_classic(id) {
            return Err(ResponseError::UnknownMemberId);
        }
        if epoch != generation {
            return Err(ResponseError::IllegalGeneration);
        }
        if let Some(due) = self.unconfirmed.get_mut(id) {
            due.get_or_insert(now + rebalance_timeout(member));
        }
        let classic = self.classic.get(id);
        if let Some(deadlines) = self.deadlines.get_mut(id) {
            deadlines.session = now + classic.map_or(self.session_timeout, |c| c.session_timeout);
        }
        if classic.is_some() { Ok(()) } else { Err(ResponseError::RebalanceInProgress) }
    }

    /// Whether there is a newer epoch, or a partition that the member waits for is free; or, with
    /// `also_to_revoke`, whether the member has to report its owned partitions.
    fn is_to_join_again(&self, id: &str, also_to_revoke: bool) -> bool {
        let Some((key, member)) = self.state.members.get_key_value(id) else { return false };
        let is_free = |topic: &Uuid, partition: &i32| {
            self.state.owners.get(&(*topic, *partition)).is_none_or(|owner| owner.id == *key)
        };
        match member.current.progress {
            Progress::Revoking => also_to_revoke,
            _ if member.current.epoch < self.state.epoch => true,
            Progress::Stable => false,
            Progress::Waiting => {
                also_to_revoke
                    && member.target.iter().any(|(topic, partitions)| {
                        let has = member.current.assigned.get(topic);
                        let missing =
                            |partition: &&i32| has.is_none_or(|has| !has.contains(partition));
                        partitions.iter().filter(missing).any(|partition| is_free(topic, partition))
                    })
            }
        }
    }
}
