//! A disk that hangs: requests neither complete nor fail. The server's leaders could still send
//! heartbeats, so that no other replica would replace them, and would serve no write.

use alluvium_wal::LogOffset;

use super::Shard;

/// Ticks without progress after which a device counts as stalled. More than an election timeout, so
/// that a disk which is only slow does not move the leadership of all groups.
const STALLED_TICKS: u32 = 10;

/// Whether something is as it was in earlier ticks. Ticks that were missed, because the process did
/// not run, do not count: the disk may have completed everything meanwhile.
struct Unchanged<T> {
    /// `None` if nothing waits.
    value: Option<T>,
    ticks: u32,
}

impl<T: PartialEq> Unchanged<T> {
    fn tick(&mut self, value: Option<T>) {
        if self.value == value {
            self.ticks = self.ticks.saturating_add(1);
        } else {
            *self = Self { value, ticks: 0 };
        }
    }

    fn is_stalled(&self) -> bool {
        self.value.is_some() && self.ticks >= STALLED_TICKS
    }
}

impl<T> Default for Unchanged<T> {
    fn default() -> Self {
        Self { value: None, ticks: 0 }
    }
}

/// Whether the devices complete what the shard waits for.
#[derive(Default)]
pub(super) struct Stall {
    /// What the log has to have durably next.
    log: Unchanged<LogOffset>,
    /// Bytes of a full overlay. While it is full nothing is applied.
    overlay: Unchanged<usize>,
}

impl Shard {
    /// Counts a tick in which the devices may have made progress. While one is stalled, the server
    /// leads no group: the replicas that lead become followers without a leader, and those of other
    /// servers elect one of them. A group has other voters. Returns whether a device is stalled.
    pub(super) fn watch_devices(&mut self) -> bool {
        let was_stalled = self.is_stalled();
        self.stall.log.tick(self.awaits_log());
        let overlay_bytes = self.store.overlay_bytes();
        let is_full = overlay_bytes > self.options.overlay_bytes;
        self.stall.overlay.tick(is_full.then_some(overlay_bytes));
        if !self.is_stalled() {
            return false;
        }
        self.counters.stalls += u64::from(!was_stalled);
        let leaders = self.replicas.values_mut().filter(|replica| replica.is_leader());
        for replica in leaders {
            let term = replica.raft.raft.term;
            replica.raft.raft.become_follower(term, raft::INVALID_ID);
            self.dirty.insert(replica.group);
        }
        true
    }

    /// Whether the log has completed nothing of what it was given for ten ticks (2 s).
    pub fn log_is_stalled(&self) -> bool {
        self.stall.log.is_stalled()
    }

    /// Whether the log, or the store while the overlay is full, has completed nothing for ten ticks
    /// (2 s).
    pub fn is_stalled(&self) -> bool {
        self.log_is_stalled() || self.stall.overlay.is_stalled()
    }
}
