//! What a session keeps of a region and its group.

use std::collections::VecDeque;
use std::time::Duration;

use super::numbers::Numbers;
use super::piece::Copy;
use super::types::GroupReplicas;
use crate::request::RequestError;
use crate::types::{Index, ServerId};

/// How long reads avoid the gateway's own server after it could not serve one.
const AVOID_OWN: Duration = Duration::from_secs(1);

/// A server that has a copy gets another one when it has not answered it, and as a leader has
/// applied nothing else, for this time.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// A region of the volume that has been written, or is about to be. The others have no group.
#[derive(Debug)]
pub(super) enum Region {
    /// The creation of its group was requested.
    Creating {
        /// Pieces that wait for the group.
        waiting: Vec<u64>,
        /// How often the registry has not created the group.
        failures: u32,
        /// Why it has not, the last time.
        error: Option<String>,
        /// When the creation is requested again.
        wake: Option<Duration>,
    },
    /// It has a group.
    Group(Box<Group>),
}

impl Region {
    /// Whether it has a group. Without one nothing was ever written there.
    pub(super) fn has_group(&self) -> bool {
        matches!(self, Self::Group(_))
    }
}

/// What a server has last said instead of serving a request.
#[derive(Clone, Debug)]
pub(super) enum Refusal {
    /// Nothing: there is no connection.
    NotConnected,
    /// An error.
    Error(RequestError),
    /// An answer that is not valid, or with damaged blocks.
    BadAnswer,
}

/// The state of an attachment in a group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) view: GroupReplicas,
    /// The presumed leader.
    pub(super) leader: Option<ServerId>,
    /// The greatest index of an answered op, or applied index of an answered read.
    pub(super) token: Index,
    pub(super) numbers: Numbers,
    /// Pieces that wait for a number.
    pub(super) waiting: VecDeque<u64>,
    /// The `Attach` on its way.
    pub(super) attach: Option<u64>,
    /// Pieces that wait for its answer.
    pub(super) parked: Vec<u64>,
    /// The registry was asked for the group again.
    pub(super) is_read: bool,
    /// When the last change and the last read were completed.
    pub(super) progressed: [Duration; 2],
    /// Servers that have not served the last request that they have answered.
    refusals: Vec<(ServerId, Refusal)>,
    /// The server that has last applied an op of this attachment, and when.
    applied: Option<(ServerId, Duration)>,
    /// Until then, reads go to the leader first.
    avoid_own_until: Duration,
}

impl Group {
    pub(super) fn new(view: GroupReplicas) -> Self {
        Self {
            view,
            leader: None,
            token: Index(0),
            numbers: Numbers::default(),
            waiting: VecDeque::new(),
            attach: None,
            parked: Vec::new(),
            is_read: false,
            progressed: [Duration::ZERO; 2],
            refusals: Vec::new(),
            applied: None,
            avoid_own_until: Duration::ZERO,
        }
    }

    /// The server for the first copy of an op.
    pub(super) fn op_target(&self, own: Option<ServerId>) -> Option<ServerId> {
        self.leader.or_else(|| self.own_replica(own)).or(self.view.replicas.first().copied())
    }

    /// The server for the first copy of a read.
    pub(super) fn read_target(&self, own: Option<ServerId>, now: Duration) -> Option<ServerId> {
        let own = self.own_replica(own).filter(|_| now >= self.avoid_own_until);
        own.or(self.leader).or(self.view.replicas.first().copied())
    }

    fn own_replica(&self, own: Option<ServerId>) -> Option<ServerId> {
        own.filter(|own| self.view.replicas.contains(own))
    }

    /// Notes whether a server has served a request.
    pub(super) fn note(&mut self, server: ServerId, refusal: Option<Refusal>) {
        self.refusals.retain(|(other, _)| *other != server);
        self.refusals.extend(refusal.map(|refusal| (server, refusal)));
    }

    /// What a server has last said, if it has not served a request.
    pub(super) fn refusal(&self, server: ServerId) -> Option<&Refusal> {
        self.refusals.iter().find(|(other, _)| *other == server).map(|(_, refusal)| refusal)
    }

    /// Records that a server has applied an op, so it leads.
    pub(super) fn has_applied(&mut self, server: ServerId, now: Duration) {
        self.leader = Some(server);
        self.applied = Some((server, now));
    }

    /// When a server that leads has last applied an op. A copy at it waits behind others, and is
    /// not lost before its connection ends.
    pub(super) fn applied_at(&self, server: ServerId) -> Option<Duration> {
        self.applied.filter(|(applied, _)| *applied == server).map(|(_, at)| at)
    }

    /// Whether a copy may have been lost, so that its server may get another one.
    pub(super) fn is_lost(&self, copy: &Copy, now: Duration) -> bool {
        let worked = self.applied_at(copy.server).map_or(copy.sent, |at| at.max(copy.sent));
        now >= worked + LOST_AFTER
    }

    /// Records that a server is not the leader.
    pub(super) fn not_leader(&mut self, server: ServerId) {
        if self.leader == Some(server) {
            self.leader = None;
        }
        self.applied = self.applied.filter(|(applied, _)| *applied != server);
    }

    /// Records that a server serves nothing at present.
    pub(super) fn not_serving(&mut self, server: ServerId, own: Option<ServerId>, now: Duration) {
        self.not_leader(server);
        if own == Some(server) {
            self.avoid_own_until = now + AVOID_OWN;
        }
    }

    /// The server to try after `after`: the presumed leader, or the next replica, that is not in
    /// `tried`. When all are in it, it is emptied, except for those in `never`. `None` if all
    /// replicas are in `never`.
    pub(super) fn next_target(
        &self,
        after: ServerId,
        tried: &mut Vec<ServerId>,
        never: &[ServerId],
    ) -> Option<ServerId> {
        let replicas = &self.view.replicas;
        let at = replicas.iter().position(|server| *server == after).map_or(0, |at| at + 1);
        let rotated = || {
            let (before, behind) = replicas.split_at(at);
            behind.iter().chain(before).copied().filter(|server| !never.contains(server))
        };
        let leader = self.leader.filter(|leader| rotated().any(|server| server == *leader));
        let next = leader.into_iter().chain(rotated()).find(|server| !tried.contains(server));
        next.or_else(|| {
            let first = rotated().next()?;
            tried.clear();
            Some(first)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::GroupId;

    fn group(leader: Option<u32>) -> Group {
        let replicas = [1, 2, 3].map(ServerId).to_vec();
        let mut group = Group::new(GroupReplicas { group: GroupId(1), replicas });
        group.leader = leader.map(ServerId);
        group
    }

    #[test]
    fn each_replica_is_tried_before_one_is_tried_again() {
        for leader in [None, Some(1), Some(2), Some(3)] {
            let group = group(leader);
            let mut tried = vec![ServerId(2)];
            let mut at = ServerId(2);
            for _ in 0..2 {
                at = group.next_target(at, &mut tried, &[]).unwrap();
                tried.push(at);
            }
            tried.sort();
            assert_eq!(tried, [1, 2, 3].map(ServerId), "leader {leader:?}");
            assert!(group.next_target(at, &mut tried, &[]).is_some_and(|next| next != at));
        }
    }

    #[test]
    fn a_replica_without_the_block_is_not_asked_again() {
        let group = group(Some(1));
        let never = [1, 3].map(ServerId);
        let mut tried = [1, 2, 3].map(ServerId).to_vec();
        assert_eq!(group.next_target(ServerId(3), &mut tried, &never), Some(ServerId(2)));
        assert_eq!(group.next_target(ServerId(3), &mut tried, &[1, 2, 3].map(ServerId)), None);
    }

    #[test]
    fn reads_avoid_the_own_server_for_a_second_after_it_failed() {
        let (mut group, own) = (group(Some(1)), Some(ServerId(3)));
        assert_eq!(group.read_target(own, Duration::ZERO), Some(ServerId(3)));
        group.not_serving(ServerId(3), own, Duration::ZERO);
        assert_eq!(group.read_target(own, AVOID_OWN / 2), Some(ServerId(1)));
        assert_eq!(group.read_target(own, AVOID_OWN), Some(ServerId(3)));
        assert_eq!(group.read_target(Some(ServerId(9)), AVOID_OWN), Some(ServerId(1)));
    }
}
