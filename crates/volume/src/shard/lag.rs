//! Followers that lag: ops are refused before they need entries that are no longer in memory, and
//! with them all blocks of the group.

use std::collections::BTreeMap;

use super::replica::Replica;
use super::{ServerState, Shard};
use crate::types::{GroupId, Index, ServerId};

/// Time for which ops are refused, in milliseconds. A server that does not catch up in this time
/// has stopped, or is far slower than the others.
const WAIT_MS: u64 = 2_000;

/// A server with followers that lag.
pub(super) struct Lagging {
    /// The entries that they lack, or have lacked.
    groups: BTreeMap<GroupId, Index>,
    /// Until then ops are refused. Not again before the server has caught up in all of these
    /// groups, also if it was away in between.
    until: u64,
}

impl Lagging {
    fn new(now: u64) -> Self {
        Self { groups: BTreeMap::new(), until: now + WAIT_MS }
    }

    /// Whether the server has all entries that were noted. Those that it has are forgotten, so that
    /// each is looked at once.
    fn has_caught_up(&mut self, server: ServerId, replicas: &BTreeMap<GroupId, Replica>) -> bool {
        while let Some((group, index)) = self.groups.first_key_value() {
            let matched = replicas.get(group).and_then(|replica| replica.matched(server));
            if matched.is_some_and(|matched| matched < *index) {
                return false;
            }
            self.groups.pop_first();
        }
        true
    }
}

/// Whether a server is connected, and its devices are not stalled.
fn may_catch_up(others: &BTreeMap<ServerId, ServerState>, server: ServerId) -> bool {
    others.get(&server).is_some_and(|state| !state.is_stalled)
}

impl Shard {
    /// Notes followers that lack an entry when half of the memory for entries is behind it. The
    /// entries of all groups share that memory.
    pub(super) fn note_lagging(&mut self) {
        let Self { cache, replicas, others, lagging, options, now, .. } = self;
        while let Some((group, index)) = cache.pass(options.entry_cache_bytes / 2) {
            let Some(replica) = replicas.get(&group).filter(|replica| replica.is_leader()) else {
                continue;
            };
            // With these it can be brought up from memory.
            let in_memory = replica.memory().truncated().index..index;
            for server in
                replica.view.peers.values().filter(|server| may_catch_up(others, **server))
            {
                if replica.matched(*server).is_some_and(|matched| in_memory.contains(&matched)) {
                    let lags = lagging.entry(*server).or_insert_with(|| Lagging::new(*now));
                    if lags.has_caught_up(*server, replicas) {
                        *lags = Lagging::new(*now);
                    }
                    lags.groups.insert(group, index);
                }
            }
        }
    }

    /// Whether ops are refused until a server has caught up.
    pub(super) fn waits_for_lagging(&mut self) -> bool {
        let Self { replicas, others, lagging, now, .. } = self;
        lagging.iter_mut().any(|(server, lags)| {
            *now < lags.until
                && may_catch_up(others, *server)
                && !lags.has_caught_up(*server, replicas)
        })
    }
}
