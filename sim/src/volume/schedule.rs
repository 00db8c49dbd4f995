//! Where a simulation puts the faults.

use std::fmt;

use alluvium_device::sim::Random;
use clap::ValueEnum;

/// Where the faults are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Schedule {
    /// Anywhere.
    Mixed,
    /// On installs, in the way that is hardest for them: a leader is cut off with entries of its
    /// own, so that it comes back with a log that conflicts with the snapshot; a checkpoint is in
    /// progress when the install begins; and the server ends before the next one completes it.
    InterruptedInstalls,
    /// On the ring: there are more operations, and the store of one server is slow for a while, so
    /// that its checkpoints take long and its ring fills until it refuses entries.
    SlowStore,
    /// On the slots: the stores have too few for all blocks, and there are more discards.
    FullStore,
    /// On attachments: many, with late and repeated requests of older ones.
    Attachments,
    /// On the moments between the disks of a server: few blocks are written again and again, and a
    /// server ends when its disks have just completed a checkpoint, when the store is ahead of the
    /// log, or when the log has a part of what was appended.
    BetweenDisks,
    /// On the disks of one server, whose replicas become lost: a record of its log or a sector of
    /// its store rots, or both disks are replaced by empty ones. The other servers go on.
    Damage,
}

impl Schedule {
    /// The schedule of a seed.
    pub(super) fn draw(random: &mut Random) -> Self {
        match random.below(20) {
            0..3 => Self::Mixed,
            3..8 => Self::InterruptedInstalls,
            8..11 => Self::SlowStore,
            11..13 => Self::FullStore,
            13..16 => Self::Attachments,
            16..18 => Self::BetweenDisks,
            _ => Self::Damage,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no variant is skipped");
        f.write_str(value.get_name())
    }
}
