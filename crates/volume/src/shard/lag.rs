//! Followers that lag: ops are refused before they need entries that are no longer in memory, and
//! with them all blocks of the group.

use std::collections::BTreeMap;

use super::Shard;
use crate::types::{GroupId, Index};

/// Time for which ops are refused, in milliseconds. A server that does not catch up in this time
/// has stopped, or is far slower than the others.
const WAIT_MS: u64 = 2_000;

/// A server with followers that lag.
pub(super) struct Lagging {
    /// The entries that they lack.
    groups: BTreeMap<GroupId, Index>,
    /// Until then ops are refused. Not again before it has caught up in all of these groups.
    until: u64,
}

impl Shard {
    /// Notes followers that lack an entry when half of the memory for entries is behind it. The
    /// entries of all groups share that memory.
    pub(super) fn note_lagging(&mut self) {
        let Self { cache, replicas, free_slots, lagging, options, now, .. } = self;
        while let Some((group, index)) = cache.pass(options.entry_cache_bytes / 2) {
            let Some(replica) = replicas.get(&group).filter(|replica| replica.is_leader()) else {
                continue;
            };
            for (peer, server) in &replica.view.peers {
                let is_connected = free_slots.contains_key(server);
                if is_connected && replica.can_bring_up(*peer, index) {
                    let until = *now + WAIT_MS;
                    let new = || Lagging { groups: BTreeMap::new(), until };
                    let server = lagging.entry(*server).or_insert_with(new);
                    server.groups.insert(group, index);
                }
            }
        }
    }

    /// Whether ops are refused until a server has caught up.
    pub(super) fn waits_for_lagging(&mut self) -> bool {
        let Self { replicas, free_slots, lagging, now, .. } = self;
        lagging.retain(|server, Lagging { groups, .. }| {
            groups.retain(|group, index| {
                replicas.get(group).is_some_and(|replica| {
                    let mut peers = replica.view.peers.iter().filter(|(_, on)| *on == server);
                    peers.any(|(peer, _)| replica.can_bring_up(*peer, *index))
                })
            });
            !groups.is_empty() && free_slots.contains_key(server)
        });
        lagging.values().any(|server| *now < server.until)
    }
}
