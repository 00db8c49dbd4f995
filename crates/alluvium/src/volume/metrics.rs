//! Metrics of a volume server.

use std::fmt;
use std::sync::Arc;

use alluvium_volume::serve::ServerView;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use crate::admin::{encode_counters, encode_gauges};

/// Encodes what a server shows of itself.
pub(super) struct VolumeCollector {
    view: Arc<Mutex<ServerView>>,
}

impl VolumeCollector {
    pub(super) fn new(view: Arc<Mutex<ServerView>>) -> Self {
        Self { view }
    }
}

impl fmt::Debug for VolumeCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeCollector").finish_non_exhaustive()
    }
}

impl Collector for VolumeCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let view = *self.view.lock();
        let gauges = [
            ("volume_slots", "Slots of 256 KiB of the store", view.slots.into()),
            ("volume_free_slots", "Slots of the store that are free", view.free_slots.into()),
            ("volume_ring_bytes", "Size of the log's ring", view.ring_bytes),
            ("volume_ring_used_bytes", "Bytes of the log's ring in use", view.ring_used_bytes),
        ];
        encode_gauges(&mut encoder, &gauges)?;
        let counters = view.counters;
        encode_counters(
            &mut encoder,
            &[
                ("volume_ops", "Ops that were applied and answered by their leader", counters.ops),
                (
                    "volume_duplicate_ops",
                    "Ops among them that had taken effect before",
                    counters.duplicates,
                ),
                ("volume_reads", "Reads that were answered", counters.reads),
                ("volume_checkpoints", "Completed checkpoints", counters.checkpoints),
                (
                    "volume_groups_carried_forward",
                    "Groups that checkpoints have carried forward",
                    counters.carried_forward,
                ),
                ("volume_installs", "Installs that have begun", counters.installs),
                (
                    "volume_installs_completed",
                    "Installs that have completed",
                    counters.installs_completed,
                ),
                (
                    "volume_refused_appends",
                    "Messages whose entries were refused",
                    counters.refused_appends,
                ),
                (
                    "volume_commit_records",
                    "Log records of a commit index alone",
                    counters.commit_records,
                ),
                ("volume_elections", "Elections that a replica here has won", counters.elections),
            ],
        )
    }
}
