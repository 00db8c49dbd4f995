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
            ("volume_ring_bytes", "Size of the log's ring", view.log.ring_bytes),
            ("volume_ring_used_bytes", "Bytes of the log's ring in use", view.log.used_bytes),
            (
                "volume_overlay_bytes",
                "Memory of blocks that are not written to the store yet",
                view.overlay_bytes,
            ),
            (
                "volume_device_stalled",
                "1 while a device has completed nothing for 2 s or more",
                view.is_stalled.into(),
            ),
            (
                "volume_lost_replicas",
                "Replicas of this server that are lost: their groups have fewer copies",
                view.lost_replicas as u64,
            ),
            (
                "volume_checkpoint_running",
                "1 while a checkpoint is in progress",
                view.is_checkpointing.into(),
            ),
        ];
        encode_gauges(&mut encoder, &gauges)?;
        let (counters, log, store) = (view.counters, view.log, view.store);
        encode_counters(
            &mut encoder,
            &[
                ("volume_ops", "Ops that were applied and answered by their leader", counters.ops),
                (
                    "volume_duplicate_ops",
                    "Ops that were answered and had taken effect before",
                    counters.duplicates,
                ),
                (
                    "volume_busy_answers",
                    "Ops that were refused because too much waits",
                    counters.busy,
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
                    "volume_installs_of_changes",
                    "Completed installs that transferred only changed blocks",
                    counters.installs_of_changes,
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
                ("volume_device_stalls", "Times that a device has stalled", counters.stalls),
                ("volume_elections", "Elections that a replica here has won", counters.elections),
                ("volume_turns", "Turns of the task that serves all replicas", counters.turns),
                ("volume_store_block_writes", "Writes of blocks to the store", store.block_writes),
                (
                    "volume_store_block_bytes",
                    "Bytes of the writes of blocks to the store",
                    store.block_bytes,
                ),
                (
                    "volume_store_checkpoint_bytes",
                    "Bytes of sectors and superblocks written by checkpoints",
                    store.checkpoint_bytes,
                ),
                (
                    "volume_store_flushes",
                    "Flushes of the store, and writes that carried one",
                    store.flushes,
                ),
                ("wal_records", "Records appended", log.records),
                ("wal_payload_bytes", "Payload of the records appended", log.payload_bytes),
                ("wal_device_bytes", "Bytes of block writes", log.device_bytes),
                ("wal_block_writes", "Block writes completed", log.block_writes),
                ("wal_flushed_writes", "Writes that carried a flush or FUA", log.flushed_writes),
            ],
        )
    }
}
