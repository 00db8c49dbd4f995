//! The rebalance of a group: collecting members, forming a generation, distributing the assignment.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;

use super::{Effect, Group, InitialDelay, State};

/// The minimum time between two attempts to end a rebalance that no member has joined. Without it,
/// members with a rebalance timeout of 0 would make the timer spin.
const REBALANCE_RETRY_MIN: Duration = Duration::from_secs(1);

impl<J, S> Group<J, S> {
    /// A member waits in a JoinGroup: starts a rebalance, or checks whether the current one is
    /// complete.
    pub(super) fn rebalance(&mut self, now: Instant) {
        if self.state == State::Preparing {
            self.try_complete_join(now);
        } else {
            self.prepare_rebalance(now);
        }
    }

    pub(super) fn prepare_rebalance(&mut self, now: Instant) {
        let is_first = self.state == State::Empty;
        self.state = State::Preparing;
        for member in self.members.values_mut() {
            member.assignment = Bytes::new();
            member.synced = false;
            if let Some(waiter) = member.syncing.take() {
                self.effects.push(Effect::Synced(waiter, Err(ResponseError::RebalanceInProgress)));
                member.touch(now);
            }
        }
        let rebalance_timeout = self.rebalance_timeout();
        let delay = self.rules.initial_rebalance_delay;
        if is_first && !delay.is_zero() {
            let remaining = rebalance_timeout.saturating_sub(delay);
            self.initial_delay = Some(InitialDelay { remaining, new_member: false });
            self.phase_deadline = Some(now + delay);
        } else if is_first {
            // Not waiting also means not waiting for issued ids, which may never join.
            self.complete_join(now);
        } else {
            self.phase_deadline = Some(now + rebalance_timeout);
            self.try_complete_join(now);
        }
    }

    pub(super) fn try_complete_join(&mut self, now: Instant) {
        let all_joined =
            self.pending.is_empty() && self.members.values().all(|member| member.joining.is_some());
        if self.state == State::Preparing && self.initial_delay.is_none() && all_joined {
            self.complete_join(now);
        }
    }

    /// The deadline of `Preparing` has passed.
    pub(super) fn end_join_phase(&mut self, now: Instant) {
        if let Some(initial) = &mut self.initial_delay
            && initial.new_member
            && !initial.remaining.is_zero()
        {
            let prolonged = self.rules.initial_rebalance_delay.min(initial.remaining);
            initial.new_member = false;
            initial.remaining -= prolonged;
            self.phase_deadline = Some(now + prolonged);
            return;
        }
        self.initial_delay = None;
        self.complete_join(now);
    }

    /// Forms the next generation from the members that have joined. Static members stay until their
    /// session ends, whether they have joined or not.
    fn complete_join(&mut self, now: Instant) {
        let absent = self.members.iter().filter(|(_, member)| member.joining.is_none());
        let late: Vec<StrBytes> = absent
            .filter(|(_, member)| member.instance_id.is_none())
            .map(|(id, _)| id.clone())
            .collect();
        for member_id in late {
            self.effects.push(Effect::Dropped(
                member_id.clone(),
                "no JoinGroup within the rebalance timeout",
            ));
            self.forget_member(&member_id);
        }
        if self.members.is_empty() {
            self.next_generation();
            self.state = State::Empty;
            self.unwritten = Some(now);
            self.empty_since = now;
            self.protocol = None;
            self.leader = None;
            self.phase_deadline = None;
            return;
        }
        let leader_joined = self
            .leader
            .as_ref()
            .and_then(|id| self.members.get(id))
            .is_some_and(|member| member.joining.is_some());
        if !leader_joined {
            let Some((joined, _)) =
                self.members.iter().find(|(_, member)| member.joining.is_some())
            else {
                // Only static members that are away: try again until they join or their sessions
                // end.
                self.phase_deadline = Some(now + self.rebalance_timeout().max(REBALANCE_RETRY_MIN));
                return;
            };
            self.leader = Some(joined.clone());
        }
        self.next_generation();
        self.state = State::Completing;
        self.protocol = self.select_protocol();
        self.phase_deadline = Some(now + self.rebalance_timeout());
        let ids: Vec<StrBytes> = self.members.keys().cloned().collect();
        for member_id in ids {
            let Some(member) = self.members.get_mut(&member_id) else { continue };
            if let Some(waiter) = member.joining.take() {
                member.is_new = false;
                member.touch(now);
                let joined = self.joined(&member_id);
                self.effects.push(Effect::Joined(waiter, Ok(joined)));
            }
        }
    }

    fn next_generation(&mut self) {
        // Negative generations mean "no member" in the protocol, so the number wraps to 1 after
        // 2^31 - 1 rebalances.
        self.generation = self.generation.checked_add(1).unwrap_or(1);
    }

    /// Stores the leader's assignment and answers the waiting SyncGroups.
    pub(super) fn assign(&mut self, now: Instant, assignments: Vec<(StrBytes, Bytes)>) {
        self.state = State::Stable;
        self.unwritten = Some(now);
        for (member_id, assignment) in assignments {
            if let Some(member) = self.members.get_mut(&member_id) {
                member.assignment = assignment;
            }
        }
        let mut waiting = Vec::new();
        for member in self.members.values_mut() {
            if let Some(waiter) = member.syncing.take() {
                member.touch(now);
                waiting.push((waiter, member.assignment.clone()));
            }
        }
        for (waiter, assignment) in waiting {
            self.answer_sync(waiter, assignment);
        }
    }

    /// The deadline for SyncGroups has passed: a member that has not sent one does not follow the
    /// group.
    pub(super) fn end_sync_phase(&mut self, now: Instant) {
        let silent: Vec<StrBytes> = self
            .members
            .iter()
            .filter(|(_, member)| !member.synced)
            .map(|(id, _)| id.clone())
            .collect();
        if silent.is_empty() {
            return;
        }
        for member_id in silent {
            self.effects.push(Effect::Dropped(
                member_id.clone(),
                "no SyncGroup within the rebalance timeout",
            ));
            self.forget_member(&member_id);
        }
        self.prepare_rebalance(now);
    }

    /// The longest rebalance timeout of all members.
    fn rebalance_timeout(&self) -> Duration {
        self.members.values().map(|member| member.rebalance_timeout).max().unwrap_or_default()
    }

    /// Each member votes for the first protocol in its list that all members support. The protocol
    /// with the most votes wins; among equals, the one that the leader prefers.
    pub(super) fn select_protocol(&self) -> Option<StrBytes> {
        let leader = self.leader.as_ref().and_then(|id| self.members.get(id))?;
        let common = |name: &StrBytes| self.members.values().all(|member| member.supports(name));
        let candidates: Vec<&StrBytes> =
            leader.protocols.iter().map(|(name, _)| name).filter(|name| common(name)).collect();
        let mut votes = vec![0_usize; candidates.len()];
        for member in self.members.values() {
            let choice = member
                .protocols
                .iter()
                .find_map(|(name, _)| candidates.iter().position(|c| *c == name));
            if let Some(index) = choice {
                votes[index] += 1;
            }
        }
        // `max_by_key` returns the last of equals, so iterate from the end.
        let winner = votes.iter().enumerate().rev().max_by_key(|(_, count)| **count)?.0;
        Some(candidates[winner].clone())
    }
}
