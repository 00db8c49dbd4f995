//! The server's counters, and all of its metrics for Prometheus.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;

use super::Server;
use super::command::COMMANDS;
use crate::admin::{encode_counters, encode_gauges};

/// Totals since the start, and the open connections.
pub(super) struct Counters {
    /// By position in [`COMMANDS`]; the last one counts unknown commands.
    commands: Vec<AtomicU64>,
    hits: AtomicU64,
    misses: AtomicU64,
    connections: AtomicU64,
    connected: AtomicU64,
    refused: AtomicU64,
    failed_logins: AtomicU64,
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            commands: (0..=COMMANDS.len()).map(|_| zero()).collect(),
            hits: zero(),
            misses: zero(),
            connections: zero(),
            connected: zero(),
            refused: zero(),
            failed_logins: zero(),
        }
    }

    /// Counts an answered command.
    pub(super) fn count(&self, command: Option<usize>) {
        add(&self.commands[command.unwrap_or(COMMANDS.len())], 1);
    }

    /// Counts requested values that were present or absent.
    pub(super) fn count_hits(&self, hits: u64, misses: u64) {
        add(&self.hits, hits);
        add(&self.misses, misses);
    }

    pub(super) fn count_failed_login(&self) {
        add(&self.failed_logins, 1);
    }

    /// Counts a new connection if there are fewer than `max`. [`Self::disconnect`] must follow.
    pub(super) fn connect(&self, max: u64) -> bool {
        if self.connections.fetch_add(1, Ordering::Relaxed) < max {
            add(&self.connected, 1);
            return true;
        }
        self.disconnect();
        add(&self.refused, 1);
        false
    }

    pub(super) fn disconnect(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    pub(super) fn connected(&self) -> u64 {
        self.connected.load(Ordering::Relaxed)
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the number of requested values that were present, and absent.
    pub(super) fn reads(&self) -> (u64, u64) {
        (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed))
    }

    /// Returns the number of answered commands.
    pub(super) fn commands(&self) -> u64 {
        self.commands.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Collects the metrics of cache and server at each scrape.
pub(super) struct CacheCollector(pub(super) Arc<Server>);

impl fmt::Debug for CacheCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheCollector").finish_non_exhaustive()
    }
}

impl Collector for CacheCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Server { cache, counters, buffers, .. } = &*self.0;
        let stats = cache.stats();
        let of = |n: usize| n as u64;
        let gauges: [(&str, &str, u64); 20] = [
            (
                "cache_entries",
                "Keys, including expired ones that are not removed yet",
                of(stats.entries),
            ),
            ("cache_journals", "Journals on disk", of(stats.journals)),
            ("cache_journals_in_memory", "Journals in memory", of(stats.journals_in_memory)),
            ("cache_disk_bytes", "Disk space of journals", stats.disk_bytes),
            ("cache_compressed_journals", "Compressed journals", of(stats.compressed)),
            ("cache_compressed_bytes", "Disk space of compressed journals", stats.compressed_bytes),
            (
                "cache_uncompressed_bytes",
                "Decompressed size of compressed journals",
                stats.uncompressed_bytes,
            ),
            (
                "cache_incompressible_journals",
                "Journals that stay uncompressed because compression was not worthwhile or failed",
                of(stats.incompressible),
            ),
            (
                "cache_block_memory_bytes",
                "Memory of cached records and decompressed frames of cold journals, part of the \
                 journal memory",
                of(stats.block_bytes),
            ),
            (
                "cache_table_memory_bytes",
                "Memory of the frame tables of compressed journals",
                of(stats.table_bytes),
            ),
            ("cache_live_bytes", "Bytes of live records, an upper bound", stats.live_bytes),
            (
                "cache_journal_memory_bytes",
                "Memory of journals, including what is free for new ones",
                of(stats.memory_bytes),
            ),
            ("cache_index_memory_bytes", "Memory of the index", of(stats.index_bytes)),
            (
                "cache_buffer_memory_bytes",
                "Memory of large requests and answers",
                of(buffers.used_bytes()),
            ),
            ("cache_damaged_bytes", "Bytes of journals found damaged", stats.damaged_bytes),
            (
                "cache_set_aside_files",
                "Files that openings could not use and have set aside (*.journal.damaged)",
                of(stats.set_aside.files),
            ),
            (
                "cache_set_aside_bytes",
                "Total size of the files set aside, which are outside the disk budget",
                stats.set_aside.bytes,
            ),
            (
                "cache_failed",
                "1 once a write or sync has failed, or files were removed: nothing is written any \
                 more",
                cache.failure().is_some().into(),
            ),
            (
                "cache_maintenance_failed",
                "1 while background work such as eviction fails: it is retried, and writers that \
                 need the space get errors",
                stats.upkeep_failed.into(),
            ),
            ("cache_connections", "Open connections", counters.connections()),
        ];
        encode_gauges(&mut encoder, &gauges)?;
        let (hits, misses) = counters.reads();
        let totals: [(&str, &str, u64); 12] = [
            ("cache_user_bytes", "Bytes of keys and values put", stats.user_bytes),
            ("cache_written_bytes", "Bytes written to journals", stats.written_bytes),
            ("cache_stalls", "Times that a writer waited for the disk", stats.stalls),
            ("cache_compacted_journals", "Journals compacted", stats.compacted),
            (
                "cache_promoted_journals",
                "Journals promoted to memory because they were read",
                stats.promoted,
            ),
            ("cache_evicted_records", "Records removed by eviction", stats.evicted),
            (
                "cache_kept_records",
                "Records kept by eviction because they had been read",
                stats.kept,
            ),
            ("cache_hits", "Values found by GET and MGET", hits),
            ("cache_misses", "Values not found by GET and MGET", misses),
            ("cache_accepted_connections", "Connections accepted", counters.connected()),
            (
                "cache_refused_connections",
                "Connections refused because there were too many",
                counters.refused(),
            ),
            (
                "cache_failed_logins",
                "Wrong passwords",
                counters.failed_logins.load(Ordering::Relaxed),
            ),
        ];
        encode_counters(&mut encoder, &totals)?;
        let (name, help) = ("alluvium_cache_commands", "Commands answered, including errors.");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        let names = COMMANDS.iter().map(|command| command.name).chain(["unknown"]);
        for (name, count) in names.zip(&counters.commands) {
            let labels = [("command", name.to_ascii_lowercase())];
            let count = ConstCounter::new(count.load(Ordering::Relaxed));
            count.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
