//! Conversion of a group's members to the other type of group, and back.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kafka_protocol::protocol::StrBytes;

use super::member::Member;
use super::{Group, Rules, State};

/// A member in the form in which a group of the other type receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct Migrant {
    pub(in crate::groups) member_id: StrBytes,
    pub(in crate::groups) instance_id: Option<StrBytes>,
    pub(in crate::groups) client_id: StrBytes,
    pub(in crate::groups) client_host: StrBytes,
    pub(in crate::groups) session_timeout: Duration,
    pub(in crate::groups) rebalance_timeout: Duration,
    /// Name and metadata, in order of preference.
    pub(in crate::groups) protocols: Vec<(StrBytes, Bytes)>,
    pub(in crate::groups) assignment: Bytes,
}

impl<J, S> Group<J, S> {
    /// The type of the members' protocol.
    pub(in crate::groups) fn protocol_type(&self) -> Option<&StrBytes> {
        self.protocol_type.as_ref()
    }

    /// The members and their assignments. These are known only while the group is stable, when no
    /// request waits except possibly for the disk; `None` otherwise.
    pub(in crate::groups) fn stable_members(&self) -> Option<Vec<Migrant>> {
        let is_stable = self.state == State::Stable && !self.is_unwritten();
        is_stable.then(|| self.migrants())
    }

    pub(super) fn migrants(&self) -> Vec<Migrant> {
        let migrant = |(id, member): (&StrBytes, &Member<J, S>)| Migrant {
            member_id: id.clone(),
            instance_id: member.instance_id.clone(),
            client_id: member.client_id.clone(),
            client_host: member.client_host.clone(),
            session_timeout: member.session_timeout,
            rebalance_timeout: member.rebalance_timeout,
            protocols: member.protocols.clone(),
            assignment: member.assignment.clone(),
        };
        self.members.iter().map(migrant).collect()
    }

    /// Creates a group of members that come from the other type and have to join again.
    pub(in crate::groups) fn of_migrants(
        rules: Rules,
        now: Instant,
        generation: i32,
        protocol_type: StrBytes,
        migrants: Vec<Migrant>,
    ) -> Self {
        let mut group = Self::stable(rules, now, generation, protocol_type, migrants);
        group.prepare_rebalance(now);
        group
    }

    /// Creates a group in which each of these members has its assignment. The caller sets protocol
    /// and leader.
    pub(super) fn stable(
        rules: Rules,
        now: Instant,
        generation: i32,
        protocol_type: StrBytes,
        migrants: Vec<Migrant>,
    ) -> Self {
        let mut group = Self::new(rules, now);
        group.generation = generation;
        group.protocol_type = Some(protocol_type);
        group.state = State::Stable;
        for migrant in migrants {
            if let Some(instance_id) = &migrant.instance_id {
                group.static_members.insert(instance_id.clone(), migrant.member_id.clone());
            }
            let member = Member {
                instance_id: migrant.instance_id,
                client_id: migrant.client_id,
                client_host: migrant.client_host,
                session_timeout: migrant.session_timeout,
                rebalance_timeout: migrant.rebalance_timeout,
                protocols: migrant.protocols,
                assignment: migrant.assignment,
                joining: None,
                syncing: None,
                synced: true,
                was_active: true,
                is_new: false,
                deadline: Some(now + migrant.session_timeout),
            };
            group.members.insert(migrant.member_id, member);
        }
        group
    }
}
