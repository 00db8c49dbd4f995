//! One classic consumer group as a pure state machine.
//!
//! Nothing here reads a clock, generates an id, locks or waits: each event takes the time as an
//! argument, changes the state and leaves [`Effect`]s for the caller to apply. A request that has
//! to wait is represented by an opaque waiter (`J` for JoinGroup, `S` for SyncGroup) that is moved
//! into the group and moved out with its answer, so it cannot be answered twice.
//!
//! ```text
//!            join                all have joined, or the           the leader has sent
//!                                rebalance timeout is over         the assignment
//!   Empty ----------> Preparing ---------------------> Completing ----------------> Stable
//!     ^                  |  ^                              |                          |
//!     |   no one joined  |  |   a join, a leave, an expiry, a missing SyncGroup       |
//!     +------------------+  +------------------------------+--------------------------+
//! ```
//!
//! Expiry of members:
//! - A member that is not waiting for an answer has a session deadline.
//! - A member that waits for an answer is alive by definition (its connection can send nothing
//!   else). The group's own deadline (rebalance timeout) ends the wait.
//! - The exception: the **first** JoinGroup of a member waits no longer than
//!   [`NEW_MEMBER_JOIN_TIMEOUT`]. A client that gives up and retries receives another id, and the
//!   members that it leaves behind must not accumulate in a long rebalance.

mod member;
mod migration;
mod persisted;
mod rebalance;
mod types;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;

use member::Member;
pub(super) use member::{MEMBER_BYTES, protocols_bytes};
pub(super) use migration::Migrant;
pub(crate) use persisted::PersistedGroups;
pub(super) use persisted::encode_removal;
pub(super) use types::{
    DescribedMember, Description, Effect, JoinEvent, Joined, JoinedMember, Refusal, State,
    SyncEvent, Synced,
};

/// How long the first JoinGroup of a member may wait before the member is removed; the value is
/// Kafka's.
pub(super) const NEW_MEMBER_JOIN_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// How long a write that failed for lack of space waits for the next attempt, if no request
/// triggers one before.
const RETRY_WRITE: Duration = Duration::from_secs(1);

/// The configuration of one group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// How long the first rebalance of an empty group waits for more members.
    pub(super) initial_rebalance_delay: Duration,
    /// Bound on members, and separately on issued ids that have not joined yet.
    pub(super) max_members: usize,
}

/// State of the delay with which the first rebalance of an empty group waits for more members.
#[derive(Debug)]
struct InitialDelay {
    /// How much the delay may still be extended.
    remaining: Duration,
    /// Whether a member has joined since the last extension.
    new_member: bool,
}

/// One group. `J` and `S` are waiting JoinGroups and SyncGroups.
#[derive(Debug)]
pub(super) struct Group<J, S> {
    rules: Rules,
    state: State,
    /// When the group became empty; valid in state `Empty`.
    empty_since: Instant,
    generation: i32,
    protocol_type: Option<StrBytes>,
    /// The protocol of the current generation.
    protocol: Option<StrBytes>,
    leader: Option<StrBytes>,
    members: BTreeMap<StrBytes, Member<J, S>>,
    /// Member id by `group.instance.id`.
    static_members: BTreeMap<StrBytes, StrBytes>,
    /// Ids issued with MEMBER_ID_REQUIRED that have not joined yet, and when they expire.
    pending: BTreeMap<StrBytes, Instant>,
    /// In `Preparing`, when the rebalance ends. In `Completing` and `Stable`, when members without
    /// a SyncGroup are removed.
    phase_deadline: Option<Instant>,
    initial_delay: Option<InitialDelay>,
    /// Set while its state to persist ([`Self::persisted`]) differs from what was appended: when
    /// the write is tried again.
    unwritten: Option<Instant>,
    effects: Vec<Effect<J, S>>,
}

impl<J, S> Group<J, S> {
    pub(super) fn new(rules: Rules, now: Instant) -> Self {
        Self {
            rules,
            state: State::Empty,
            empty_since: now,
            generation: 0,
            protocol_type: None,
            protocol: None,
            leader: None,
            members: BTreeMap::new(),
            static_members: BTreeMap::new(),
            pending: BTreeMap::new(),
            phase_deadline: None,
            initial_delay: None,
            unwritten: None,
            effects: Vec::new(),
        }
    }

    // ---- state ----

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn generation(&self) -> i32 {
        self.generation
    }

    pub(super) fn member_count(&self) -> usize {
        self.members.len()
    }

    /// Since when there have been neither members nor issued ids; `None` if there are any.
    pub(super) fn vacant_since(&self) -> Option<Instant> {
        (self.state == State::Empty && self.pending.is_empty()).then_some(self.empty_since)
    }

    /// Estimated memory of one of its members.
    pub(super) fn member_bytes(&self, member_id: &str, instance_id: Option<&str>) -> Option<usize> {
        let id = instance_id.and_then(|id| self.static_members.get(id.as_bytes()));
        let id = id.map_or(member_id, StrBytes::as_str);
        self.members.get(id.as_bytes()).map(Member::size_bytes)
    }

    /// Memory of the members' assignments.
    pub(super) fn assigned_bytes(&self) -> usize {
        self.members.values().map(|member| member.assignment.len()).sum()
    }

    /// Estimated memory of members and issued ids.
    pub(super) fn size_bytes(&self) -> usize {
        let pending: usize = self.pending.keys().map(|id| id.len() + 64).sum();
        pending + self.members.values().map(Member::size_bytes).sum::<usize>()
    }

    /// The next moment at which [`Self::tick`] or a retried write is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.unwritten.is_some() {
            return self.unwritten;
        }
        let members = self.members.values().filter_map(|member| member.deadline);
        members.chain(self.pending.values().copied()).chain(self.phase_deadline).min()
    }

    pub(super) fn describe(&self) -> Description {
        let stable = self.state == State::Stable;
        let protocol = self.protocol.clone().filter(|_| stable).unwrap_or_default();
        let members = self.members.iter().map(|(id, member)| DescribedMember {
            member_id: id.clone(),
            instance_id: member.instance_id.clone(),
            client_id: member.client_id.clone(),
            client_host: member.client_host.clone(),
            metadata: if stable { member.metadata(&protocol) } else { Bytes::new() },
            assignment: if stable { member.assignment.clone() } else { Bytes::new() },
        });
        Description {
            state: self.state,
            protocol_type: self.protocol_type.clone().unwrap_or_default(),
            members: members.collect(),
            protocol,
        }
    }

    /// Takes the effects of the events since the last call.
    #[must_use]
    pub(super) fn take_effects(&mut self) -> Vec<Effect<J, S>> {
        std::mem::take(&mut self.effects)
    }

    /// Whether the state to persist has to be appended before it may be shown to any client. Until
    /// then no member joins or leaves, for any reason; heartbeats, commits and SyncGroups do not
    /// change the persisted state.
    pub(super) fn is_unwritten(&self) -> bool {
        self.unwritten.is_some()
    }

    /// Records that the state was appended.
    pub(super) fn written(&mut self) {
        self.unwritten = None;
    }

    /// Records that there was no space for the state.
    pub(super) fn not_written(&mut self, now: Instant) {
        self.unwritten = Some(now + RETRY_WRITE);
    }

    // ---- events ----

    /// Handles a JoinGroup; its answer is an effect of this event or of a later one.
    pub(super) fn join(&mut self, now: Instant, join: JoinEvent, waiter: J) {
        if let Err(error) = self.check_join(&join) {
            self.refuse(waiter, error, join.member_id);
        } else if !join.member_id.is_empty() {
            self.join_with_id(now, join, waiter);
        } else if let Some(instance_id) = &join.instance_id {
            match self.static_members.get(instance_id).cloned() {
                Some(old_id) => self.replace_static_member(now, &old_id, join, waiter),
                None => self.add_member(now, join.fresh_id.clone(), join, waiter),
            }
        } else if !join.can_require_id {
            self.add_member(now, join.fresh_id.clone(), join, waiter);
        } else if self.pending.len() >= self.rules.max_members {
            self.refuse(waiter, ResponseError::GroupMaxSizeReached, join.member_id);
        } else {
            self.pending.insert(join.fresh_id.clone(), now + join.session_timeout);
            self.refuse(waiter, ResponseError::MemberIdRequired, join.fresh_id);
        }
    }

    /// Handles a SyncGroup; its answer is an effect of this event or of a later one.
    pub(super) fn sync(&mut self, now: Instant, sync: SyncEvent, waiter: S) {
        if let Err(error) = self.check_sync(&sync) {
            self.effects.push(Effect::Synced(waiter, Err(error)));
            return;
        }
        let is_leader = self.leader.as_ref() == Some(&sync.member_id);
        let Some(member) = self.members.get_mut(&sync.member_id) else {
            unreachable!("check_sync found the member");
        };
        member.synced = true;
        if self.state == State::Completing {
            member.deadline = None;
            if let Some(earlier) = member.syncing.replace(waiter) {
                self.effects.push(Effect::Synced(earlier, Err(ResponseError::RebalanceInProgress)));
            }
            if is_leader {
                self.assign(now, sync.assignments);
            }
        } else {
            member.touch(now);
            let assignment = member.assignment.clone();
            self.answer_sync(waiter, assignment);
        }
        if self.state == State::Stable && self.members.values().all(|member| member.synced) {
            self.phase_deadline = None;
        }
    }

    /// Handles a Heartbeat. Can only move a deadline to later.
    pub(super) fn heartbeat(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation: i32,
    ) -> Result<(), ResponseError> {
        self.check_generation(member_id, instance_id, generation)?;
        self.touch(now, member_id);
        if self.state == State::Preparing {
            Err(ResponseError::RebalanceInProgress)
        } else {
            Ok(())
        }
    }

    /// Checks whether a commit of offsets is allowed. For a member it also counts as a heartbeat.
    /// Can only move a deadline to later.
    pub(super) fn check_commit(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation: i32,
    ) -> Result<(), ResponseError> {
        if self.state == State::Empty && generation < 0 {
            // An admin client, or a consumer that assigns its partitions itself.
            return Ok(());
        }
        self.check_generation(member_id, instance_id, generation)?;
        if self.state == State::Completing {
            // The member knows the new generation, but not its assignment yet.
            return Err(ResponseError::RebalanceInProgress);
        }
        self.touch(now, member_id);
        Ok(())
    }

    /// Checks whether a commit of offsets in a transaction is allowed. A client that names no
    /// member need not be a member of the group.
    pub(super) fn check_transactional_commit(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation: i32,
    ) -> Result<(), ResponseError> {
        if self.state == State::Dead {
            return Err(ResponseError::CoordinatorNotAvailable);
        }
        let is_named = generation >= 0 || !member_id.is_empty() || instance_id.is_some();
        if !is_named || (self.state == State::Empty && generation < 0) {
            return Ok(());
        }
        self.check_generation(member_id, instance_id, generation)?;
        self.touch(now, member_id);
        Ok(())
    }

    /// Handles one member of a LeaveGroup. A static member may be named by its instance id alone.
    pub(super) fn leave(
        &mut self,
        now: Instant,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
    ) -> Result<(), ResponseError> {
        if self.state == State::Dead {
            return Err(ResponseError::CoordinatorNotAvailable);
        }
        let member_id = match instance_id {
            Some(instance_id) => match self.static_members.get(instance_id) {
                None => return Err(ResponseError::UnknownMemberId),
                Some(current) if !member_id.is_empty() && member_id != current => {
                    return Err(self.not_that_member(current));
                }
                Some(current) => current.clone(),
            },
            None => member_id.clone(),
        };
        if self.pending.remove(&member_id).is_some() {
            self.try_complete_join(now);
            return Ok(());
        }
        if !self.members.contains_key(&member_id) {
            return Err(ResponseError::UnknownMemberId);
        }
        self.remove_member(now, &member_id);
        Ok(())
    }

    /// Expires what is due.
    pub(super) fn tick(&mut self, now: Instant) {
        if self.is_unwritten() {
            return;
        }
        let due = |deadline: Instant| deadline <= now;
        let expired_ids = self.pending.len();
        self.pending.retain(|_, deadline| !due(*deadline));
        if self.pending.len() < expired_ids {
            self.try_complete_join(now);
        }
        let expired: Vec<StrBytes> = self
            .members
            .iter()
            .filter(|(_, member)| member.deadline.is_some_and(due))
            .map(|(id, _)| id.clone())
            .collect();
        for member_id in expired {
            // Removing one member may end the rebalance that another waited for, which gives the
            // other a new deadline.
            if self.members.get(&member_id).is_some_and(|member| member.deadline.is_some_and(due)) {
                self.effects.push(Effect::Dropped(member_id.clone(), "session timed out"));
                self.remove_member(now, &member_id);
            }
        }
        if self.phase_deadline.is_some_and(due) {
            self.phase_deadline = None;
            match self.state {
                State::Preparing => self.end_join_phase(now),
                State::Completing | State::Stable => self.end_sync_phase(now),
                State::Empty | State::Dead => {}
            }
        }
    }

    /// The group is deleted, or the coordinator closes: every waiting request is answered with
    /// COORDINATOR_NOT_AVAILABLE, so that its client looks the coordinator up again.
    pub(super) fn kill(&mut self) {
        self.state = State::Dead;
        self.unwritten = None;
        self.phase_deadline = None;
        self.initial_delay = None;
        self.pending.clear();
        self.static_members.clear();
        self.leader = None;
        for (member_id, member) in std::mem::take(&mut self.members) {
            self.answer_waiters(member_id, member, ResponseError::CoordinatorNotAvailable);
        }
    }

    // ---- checks ----

    fn check_join(&self, join: &JoinEvent) -> Result<(), ResponseError> {
        if self.state == State::Dead {
            return Err(ResponseError::CoordinatorNotAvailable);
        }
        let known_instance =
            || join.instance_id.as_ref().is_some_and(|id| self.static_members.contains_key(id));
        let is_member = self.members.contains_key(&join.member_id)
            || (join.member_id.is_empty() && known_instance());
        if !is_member && self.members.len() >= self.rules.max_members {
            return Err(ResponseError::GroupMaxSizeReached);
        }
        let named = !join.protocol_type.is_empty() && !join.protocols.is_empty();
        let fits = self.members.is_empty()
            || (self.protocol_type.as_ref() == Some(&join.protocol_type)
                && join
                    .protocols
                    .iter()
                    .any(|(name, _)| self.members.values().all(|member| member.supports(name))));
        if named && fits { Ok(()) } else { Err(ResponseError::InconsistentGroupProtocol) }
    }

    fn check_member(
        &self,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
    ) -> Result<(), ResponseError> {
        if self.state == State::Dead {
            return Err(ResponseError::CoordinatorNotAvailable);
        }
        if let Some(instance_id) = instance_id {
            match self.static_members.get(instance_id) {
                None => return Err(ResponseError::UnknownMemberId),
                Some(current) if current != member_id => return Err(self.not_that_member(current)),
                Some(_) => {}
            }
        }
        if self.members.contains_key(member_id) {
            Ok(())
        } else {
            Err(ResponseError::UnknownMemberId)
        }
    }

    /// The error for a request that names the instance of the static member `current` but another
    /// id. FENCED_INSTANCE_ID is fatal for a client, so it is only for a client whose id was
    /// replaced. Until `current` has sent a request since the server started, its persisted id may
    /// be the older one: the newer one may have been issued in a rebalance that did not end.
    fn not_that_member(&self, current: &StrBytes) -> ResponseError {
        match self.members.get(current).is_some_and(|member| member.was_active) {
            true => ResponseError::FencedInstanceId,
            false => ResponseError::UnknownMemberId,
        }
    }

    fn check_generation(
        &self,
        member_id: &StrBytes,
        instance_id: Option<&StrBytes>,
        generation: i32,
    ) -> Result<(), ResponseError> {
        self.check_member(member_id, instance_id)?;
        if generation == self.generation { Ok(()) } else { Err(ResponseError::IllegalGeneration) }
    }

    fn check_sync(&self, sync: &SyncEvent) -> Result<(), ResponseError> {
        self.check_generation(&sync.member_id, sync.instance_id.as_ref(), sync.generation)?;
        let differs =
            |asked: &Option<StrBytes>, is: &Option<StrBytes>| asked.is_some() && asked != is;
        if differs(&sync.protocol_type, &self.protocol_type)
            || differs(&sync.protocol, &self.protocol)
        {
            return Err(ResponseError::InconsistentGroupProtocol);
        }
        if self.state == State::Preparing {
            Err(ResponseError::RebalanceInProgress)
        } else {
            Ok(())
        }
    }

    // ---- members ----

    fn join_with_id(&mut self, now: Instant, join: JoinEvent, waiter: J) {
        if join.instance_id.is_none() && self.pending.remove(&join.member_id).is_some() {
            return self.add_member(now, join.member_id.clone(), join, waiter);
        }
        if let Err(error) = self.check_member(&join.member_id, join.instance_id.as_ref()) {
            return self.refuse(waiter, error, join.member_id);
        }
        let is_leader = self.leader.as_ref() == Some(&join.member_id);
        let Some(member) = self.members.get_mut(&join.member_id) else {
            unreachable!("check_member found the member");
        };
        let unchanged = member.protocols == join.protocols;
        // A follower that joins again with nothing new has only lost the response. The leader joins
        // again because it wants another assignment (its subscription's topics have changed), which
        // takes a rebalance; but not before it has made the first one.
        let only_lost = unchanged
            && (self.state == State::Completing || (self.state == State::Stable && !is_leader));
        if only_lost {
            member.touch(now);
            let joined = self.joined(&join.member_id);
            self.effects.push(Effect::Joined(waiter, Ok(joined)));
        } else {
            let member_id = join.member_id.clone();
            let earlier = member.rejoin(now, join, waiter);
            self.supersede(earlier, member_id);
            self.rebalance(now);
        }
    }

    fn add_member(&mut self, now: Instant, member_id: StrBytes, join: JoinEvent, waiter: J) {
        if self.members.is_empty() {
            self.protocol_type = Some(join.protocol_type.clone());
        }
        if let Some(instance_id) = &join.instance_id {
            self.static_members.insert(instance_id.clone(), member_id.clone());
        }
        if let Some(initial) = &mut self.initial_delay {
            initial.new_member = true;
        }
        self.leader.get_or_insert_with(|| member_id.clone());
        let member = Member {
            instance_id: join.instance_id,
            client_id: join.client_id,
            client_host: join.client_host,
            session_timeout: join.session_timeout,
            rebalance_timeout: join.rebalance_timeout,
            protocols: join.protocols,
            assignment: Bytes::new(),
            joining: Some(waiter),
            syncing: None,
            synced: false,
            was_active: true,
            is_new: true,
            deadline: Some(now + NEW_MEMBER_JOIN_TIMEOUT),
        };
        self.members.insert(member_id, member);
        self.rebalance(now);
    }

    /// A static member has restarted: it joins without an id and replaces its previous incarnation
    /// under a new id. If the generation can stay as it is, no other member is affected.
    fn replace_static_member(
        &mut self,
        now: Instant,
        old_id: &StrBytes,
        join: JoinEvent,
        waiter: J,
    ) {
        let Some(mut member) = self.members.remove(old_id) else {
            unreachable!("static_members names members only");
        };
        if let Some(earlier) = member.joining.take() {
            self.refuse(earlier, ResponseError::FencedInstanceId, old_id.clone());
        }
        if let Some(earlier) = member.syncing.take() {
            self.effects.push(Effect::Synced(earlier, Err(ResponseError::FencedInstanceId)));
        }
        let new_id = join.fresh_id.clone();
        let is_leader = self.leader.as_ref() == Some(old_id);
        if is_leader {
            self.leader = Some(new_id.clone());
        }
        if let Some(instance_id) = &member.instance_id {
            self.static_members.insert(instance_id.clone(), new_id.clone());
        }
        let can_skip_assignment = join.can_skip_assignment;
        member.update(join);
        self.members.insert(new_id.clone(), member);
        let stays = self.state == State::Stable && self.select_protocol() == self.protocol;
        let Some(member) = self.members.get_mut(&new_id) else {
            unreachable!("it was inserted above");
        };
        if !stays {
            member.deadline = member.is_new.then(|| now + NEW_MEMBER_JOIN_TIMEOUT);
            member.joining = Some(waiter);
            return self.rebalance(now);
        }
        member.touch(now);
        self.unwritten = Some(now);
        let mut joined = self.joined(&new_id);
        if is_leader && can_skip_assignment {
            joined.skip_assignment = true;
        } else if is_leader {
            // An older client would compute an assignment that is not used. It receives its
            // previous id as the leader's, and so acts as a follower.
            joined.leader = old_id.clone();
            joined.members = Vec::new();
        }
        self.effects.push(Effect::Joined(waiter, Ok(joined)));
    }

    fn remove_member(&mut self, now: Instant, member_id: &StrBytes) {
        self.forget_member(member_id);
        match self.state {
            State::Completing | State::Stable => self.prepare_rebalance(now),
            State::Preparing => self.try_complete_join(now),
            State::Empty | State::Dead => {}
        }
    }

    /// Removes a member without considering the effect on the generation.
    fn forget_member(&mut self, member_id: &StrBytes) {
        let Some(member) = self.members.remove(member_id) else { return };
        if let Some(instance_id) = &member.instance_id {
            self.static_members.remove(instance_id);
        }
        if self.leader.as_ref() == Some(member_id) {
            self.leader = self.members.keys().next().cloned();
        }
        // On this error a client that is alive after all joins again without an id.
        self.answer_waiters(StrBytes::new(), member, ResponseError::UnknownMemberId);
    }

    fn touch(&mut self, now: Instant, member_id: &StrBytes) {
        if let Some(member) = self.members.get_mut(member_id) {
            member.touch(now);
        }
    }

    // ---- answers ----

    fn joined(&self, member_id: &StrBytes) -> Joined {
        let protocol = self.protocol.clone().unwrap_or_default();
        let member = |(id, member): (&StrBytes, &Member<J, S>)| JoinedMember {
            member_id: id.clone(),
            instance_id: member.instance_id.clone(),
            metadata: member.metadata(&protocol),
        };
        let is_leader = self.leader.as_ref() == Some(member_id);
        Joined {
            generation: self.generation,
            protocol_type: self.protocol_type.clone().unwrap_or_default(),
            leader: self.leader.clone().unwrap_or_default(),
            member_id: member_id.clone(),
            skip_assignment: false,
            members: if is_leader { self.members.iter().map(member).collect() } else { Vec::new() },
            protocol,
        }
    }

    fn answer_sync(&mut self, waiter: S, assignment: Bytes) {
        let synced = Synced {
            protocol_type: self.protocol_type.clone(),
            protocol: self.protocol.clone(),
            assignment,
        };
        self.effects.push(Effect::Synced(waiter, Ok(synced)));
    }

    fn refuse(&mut self, waiter: J, error: ResponseError, member_id: StrBytes) {
        self.effects.push(Effect::Joined(waiter, Err(Refusal { error, member_id })));
    }

    /// A member has repeated a request on another connection: the earlier one is most likely dead,
    /// and if it is not, this error makes its client rejoin.
    fn supersede(&mut self, earlier: Option<J>, member_id: StrBytes) {
        if let Some(earlier) = earlier {
            self.refuse(earlier, ResponseError::RebalanceInProgress, member_id);
        }
    }

    fn answer_waiters(&mut self, member_id: StrBytes, member: Member<J, S>, error: ResponseError) {
        if let Some(waiter) = member.joining {
            self.refuse(waiter, error, member_id);
        }
        if let Some(waiter) = member.syncing {
            self.effects.push(Effect::Synced(waiter, Err(error)));
        }
    }
}

#[cfg(test)]
mod tests;
