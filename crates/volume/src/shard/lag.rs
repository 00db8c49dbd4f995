//! Followers that lag: ops are delayed before they need entries that are no longer in memory, and
//! with them an install.

use std::collections::{BTreeMap, VecDeque};

use super::replica::Replica;
use super::{Output, ServerState, Shard};
use crate::op::Op;
use crate::request::{ErrorCode, RequestError};
use crate::types::{GroupId, Index, ServerId};

/// Time for which ops are delayed, in milliseconds. A server that does not catch up in this time
/// has stopped, or is far slower than the others.
const WAIT_MS: u64 = 2_000;
/// Bytes of the ops that are delayed; more are refused. Half of what a server reads of its clients'
/// requests before they are answered, so that reads are served meanwhile.
const DELAYED_BYTES: usize = 16 << 20;
/// What an op takes besides its blocks, in bytes.
const OP_BYTES: usize = 1 << 10;
/// Time after which a client tries again when an op is refused, in milliseconds.
const AGAIN_MS: u32 = 20;

/// Ops that are delayed, in the order in which they have arrived.
#[derive(Default)]
pub(super) struct Delayed {
    ops: VecDeque<(u64, GroupId, Op)>,
    bytes: usize,
}

fn bytes_of(op: &Op) -> usize {
    op.blocks().len() + OP_BYTES
}

/// A server with followers that lag.
pub(super) struct Lagging {
    /// The entries that they lack, or have lacked.
    groups: BTreeMap<GroupId, Index>,
    /// Until then ops are delayed. Not again before the server has caught up in all of these
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

    /// Whether ops are delayed, since a server lags or earlier ops are delayed still.
    pub(super) fn delays_ops(&mut self) -> bool {
        !self.delayed.ops.is_empty() || self.waits_for_lagging()
    }

    /// Delays an op until no server lags.
    pub(super) fn delay(
        &mut self,
        group: GroupId,
        op: Op,
        ticket: u64,
    ) -> Result<(), RequestError> {
        let bytes = bytes_of(&op);
        if self.delayed.bytes + bytes > DELAYED_BYTES {
            let error =
                RequestError::new(ErrorCode::Busy, group, "ops wait for a follower that lags");
            return Err(RequestError { retry_after_ms: AGAIN_MS, ..error });
        }
        self.delayed.bytes += bytes;
        self.delayed.ops.push_back((ticket, group, op));
        Ok(())
    }

    /// Accepts the ops that are delayed if no server lags any more, up to one for which this server
    /// is too busy still: later ones would overtake it.
    pub(super) fn accept_delayed(&mut self, out: &mut Output) {
        if self.delayed.ops.is_empty() || self.waits_for_lagging() {
            return;
        }
        while let Some((ticket, group, op)) = self.delayed.ops.pop_front() {
            match self.accept(group, &op, ticket) {
                Err(error) if error.code == ErrorCode::Busy => {
                    self.delayed.ops.push_front((ticket, group, op));
                    return;
                }
                Err(error) => self.refuse(ticket, error, out),
                Ok(()) => {}
            }
            self.delayed.bytes -= bytes_of(&op);
        }
    }

    /// Refuses the delayed ops of a group that this server does not lead any more.
    pub(super) fn refuse_delayed(&mut self, group: GroupId, out: &mut Output) {
        let Self { delayed: Delayed { ops, bytes }, replicas, .. } = self;
        let Some(replica) = replicas.get(&group) else { return };
        ops.retain(|(ticket, of, op)| {
            let is_kept = *of != group;
            if !is_kept {
                *bytes -= bytes_of(op);
                out.answers.push((*ticket, Err(replica.not_leader())));
            }
            is_kept
        });
    }

    fn waits_for_lagging(&mut self) -> bool {
        let Self { replicas, others, lagging, now, .. } = self;
        lagging.iter_mut().any(|(server, lags)| {
            *now < lags.until
                && may_catch_up(others, *server)
                && !lags.has_caught_up(*server, replicas)
        })
    }
}
