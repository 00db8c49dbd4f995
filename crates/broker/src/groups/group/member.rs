//! One member of a group.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kafka_protocol::protocol::StrBytes;

use super::{JoinEvent, NEW_MEMBER_JOIN_TIMEOUT};

/// Estimated memory of a member apart from its strings, protocols and assignment; used for the
/// bound only.
pub(in crate::groups) const MEMBER_BYTES: usize = 512;

/// Estimated memory of protocols: name and metadata of each.
pub(in crate::groups) fn protocols_bytes<'a>(
    protocols: impl Iterator<Item = (&'a StrBytes, &'a Bytes)>,
) -> usize {
    protocols.map(|(name, metadata)| name.len() + metadata.len() + 64).sum()
}

#[derive(Debug)]
pub(super) struct Member<J, S> {
    pub(super) instance_id: Option<StrBytes>,
    pub(super) client_id: StrBytes,
    pub(super) client_host: StrBytes,
    pub(super) session_timeout: Duration,
    pub(super) rebalance_timeout: Duration,
    pub(super) protocols: Vec<(StrBytes, Bytes)>,
    pub(super) assignment: Bytes,
    /// Its JoinGroup that waits for the rebalance to end.
    pub(super) joining: Option<J>,
    /// Its SyncGroup that waits for the leader's assignment.
    pub(super) syncing: Option<S>,
    /// Whether it has sent a SyncGroup in this generation.
    pub(super) synced: bool,
    /// Whether it has sent a request since the server started. Until then a static member may have
    /// received a newer id than the persisted one.
    pub(super) was_active: bool,
    /// Whether its first JoinGroup is still unanswered.
    pub(super) is_new: bool,
    /// When it expires. `None` only while a request of it waits.
    pub(super) deadline: Option<Instant>,
}

impl<J, S> Member<J, S> {
    /// Records a request of the member.
    pub(super) fn touch(&mut self, now: Instant) {
        self.was_active = true;
        if self.joining.is_none() && self.syncing.is_none() {
            self.deadline = Some(now + self.session_timeout);
        }
    }

    pub(super) fn supports(&self, protocol: &StrBytes) -> bool {
        self.protocols.iter().any(|(name, _)| name == protocol)
    }

    pub(super) fn metadata(&self, protocol: &StrBytes) -> Bytes {
        self.protocols
            .iter()
            .find(|(name, _)| name == protocol)
            .map_or_else(Bytes::new, |(_, bytes)| bytes.clone())
    }

    /// Takes over the values of a repeated JoinGroup, and makes it wait.
    pub(super) fn rejoin(&mut self, now: Instant, join: JoinEvent, waiter: J) -> Option<J> {
        self.update(join);
        self.deadline = self.is_new.then(|| now + NEW_MEMBER_JOIN_TIMEOUT);
        self.joining.replace(waiter)
    }

    pub(super) fn update(&mut self, join: JoinEvent) {
        self.was_active = true;
        self.client_id = join.client_id;
        self.client_host = join.client_host;
        self.session_timeout = join.session_timeout;
        self.rebalance_timeout = join.rebalance_timeout;
        self.protocols = join.protocols;
    }

    pub(super) fn size_bytes(&self) -> usize {
        MEMBER_BYTES
            + self.client_id.len()
            + self.client_host.len()
            + protocols_bytes(self.protocols.iter().map(|(name, data)| (name, data)))
            + self.assignment.len()
    }
}
