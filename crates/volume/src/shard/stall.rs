//! A disk that hangs: requests neither complete nor fail. The server's leaders could still send
//! heartbeats, so that no other replica would replace them, and would commit nothing.

use alluvium_wal::LogOffset;

use super::Shard;

/// Ticks without progress after which the log counts as stalled. More than an election timeout, so
/// that a disk which is only slow does not move the leadership of all groups.
const STALLED_TICKS: u32 = 10;

/// Whether the log completes what the shard waits for.
#[derive(Default)]
pub(super) struct Stall {
    /// What the log has to have durably next.
    awaited: Option<LogOffset>,
    /// Ticks since this has changed. Ticks that were missed, because the process did not run, do
    /// not count: the disk may have completed everything meanwhile.
    ticks: u32,
}

impl Stall {
    fn tick(&mut self, awaited: Option<LogOffset>) {
        if self.awaited == awaited {
            self.ticks = self.ticks.saturating_add(1);
        } else {
            *self = Self { awaited, ticks: 0 };
        }
    }

    fn is_stalled(&self) -> bool {
        self.awaited.is_some() && self.ticks >= STALLED_TICKS
    }
}

impl Shard {
    /// Counts a tick in which the log may have made progress. While the log is stalled, the server
    /// leads no group: the replicas that lead become followers without a leader, and those of other
    /// servers elect one of them.
    pub(super) fn watch_log(&mut self) {
        let was_stalled = self.log_is_stalled();
        self.stall.tick(self.awaits_log());
        if !self.log_is_stalled() {
            return;
        }
        self.counters.log_stalls += u64::from(!was_stalled);
        let leaders = self.replicas.values_mut().filter(|replica| replica.is_leader());
        for replica in leaders {
            let term = replica.raft.raft.term;
            replica.raft.raft.become_follower(term, raft::INVALID_ID);
            self.dirty.insert(replica.group);
        }
    }

    /// Whether the log has completed nothing of what it was given for ten ticks (2 s).
    pub fn log_is_stalled(&self) -> bool {
        // What has just become durable counts before the next tick.
        self.stall.is_stalled() && self.awaits_log() == self.stall.awaited
    }
}
