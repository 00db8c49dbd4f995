//! The admin port: `/metrics` for Prometheus; `/livez`, `/readyz` and `/healthz` for probes.
//! Separate from the Kafka port.

mod health;
mod visits;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use alluvium_stream::{Degraded, DiskCacheStats, Following, Reason, Requests, Store};
use alluvium_wal::DurationHistogram;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::middleware::map_response;
use axum::response::IntoResponse;
use axum::routing::get;
use parking_lot::RwLock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) use self::health::{Condition, Health};
use self::visits::{AdminListener, Bounds};
use crate::log_queue;
use crate::output::Failure;

/// A running admin port. A server opens it before any step that may take long, so that probes get
/// answers from the start.
pub(crate) struct Admin {
    local_addr: SocketAddr,
    shown: Arc<Shown>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

struct Shown {
    registry: RwLock<Registry>,
    health: Arc<Health>,
}

impl Admin {
    /// Opens the port and answers requests. `/metrics` shows the process's metrics only until
    /// [`Admin::publish`].
    ///
    /// # Errors
    /// The address is in use or is not an address of this machine.
    pub(crate) async fn start(listen: SocketAddr, health: Arc<Health>) -> Result<Self, Failure> {
        Self::start_within(listen, health, Bounds::USUAL).await
    }

    async fn start_within(
        listen: SocketAddr,
        health: Arc<Health>,
        bounds: Bounds,
    ) -> Result<Self, Failure> {
        let failed =
            |error| Failure::Failed(format!("cannot listen on admin port {listen}: {error}"));
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let local_addr = listener.local_addr().map_err(failed)?;
        let mut registry = Registry::default();
        register_process(&mut registry, &health);
        let shown = Arc::new(Shown { registry: RwLock::new(registry), health });
        let routes = Router::new()
            .route("/metrics", get(metrics))
            .route("/livez", get(async || "ok\n"))
            .route("/readyz", get(async |State(shown): State<Arc<Shown>>| shown.health.ready()))
            .route("/healthz", get(async |State(shown): State<Arc<Shown>>| shown.health.health()))
            .with_state(shown.clone())
            .layer(map_response(visits::mark_last));
        let listener = AdminListener::new(listener, bounds);
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            // Dropping the sender stops the port too.
            let stopped = async { drop(stopped.await) };
            if let Err(error) = axum::serve(listener, routes).with_graceful_shutdown(stopped).await
            {
                tracing::error!("the admin port failed: {error}");
            }
        });
        tracing::info!("the admin port is open: http://{local_addr}/readyz");
        Ok(Self { local_addr, shown, stop, task })
    }

    /// Shows these metrics and those of the process from now on.
    pub(crate) fn publish(&self, mut registry: Registry) {
        register_process(&mut registry, &self.shown.health);
        *self.shown.registry.write() = registry;
    }

    /// The address that the port is bound to.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops accepting. Connections that stay open do not delay the end of the server.
    pub(crate) async fn shutdown(self) {
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(Duration::from_secs(1), self.task).await;
    }
}

async fn metrics(State(shown): State<Arc<Shown>>) -> impl IntoResponse {
    let mut text = String::new();
    match encode(&mut text, &shown.registry.read()) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text)
        }
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [(header::CONTENT_TYPE, "text/plain; charset=utf-8")],
            format!("the metrics cannot be encoded: {error}\n"),
        ),
    }
}

/// Registers the store's metrics.
pub(crate) fn register(registry: &mut Registry, store: Store) {
    registry.register_collector(Box::new(StoreCollector { store }));
}

/// Registers the metrics that every server has.
fn register_process(registry: &mut Registry, health: &Arc<Health>) {
    let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("alluvium_build", "Version of this program", build);
    registry.register_collector(Box::new(ProcessCollector { health: health.clone() }));
}

struct ProcessCollector {
    health: Arc<Health>,
}

impl fmt::Debug for ProcessCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessCollector").finish_non_exhaustive()
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauges = [
            ("ready", "1 while clients are served", u64::from(self.health.is_ready())),
            (
                "process_resident_memory_bytes",
                "Resident memory of the process",
                resident_bytes().unwrap_or(0),
            ),
        ];
        encode_gauges(&mut encoder, &gauges)?;
        let dropped = (
            "log_dropped_lines",
            "Log lines dropped because standard error did not accept them",
            log_queue::dropped_lines(),
        );
        encode_counters(&mut encoder, &[dropped])
    }
}

/// Encodes current values: name without the prefix `alluvium_`, help, value.
pub(crate) fn encode_gauges(
    encoder: &mut DescriptorEncoder<'_>,
    gauges: &[(&str, &str, u64)],
) -> Result<(), fmt::Error> {
    for (name, help, value) in gauges {
        let gauge = ConstGauge::new(i64::try_from(*value).unwrap_or(i64::MAX));
        gauge.encode(encoder.encode_descriptor(
            &format!("alluvium_{name}"),
            &format!("{help}."),
            None,
            gauge.metric_type(),
        )?)?;
    }
    Ok(())
}

/// Encodes counters: name without the prefix `alluvium_`, help, value.
pub(crate) fn encode_counters(
    encoder: &mut DescriptorEncoder<'_>,
    counters: &[(&str, &str, u64)],
) -> Result<(), fmt::Error> {
    for (name, help, value) in counters {
        let counter = ConstCounter::new(*value);
        counter.encode(encoder.encode_descriptor(
            &format!("alluvium_{name}"),
            &format!("{help}."),
            None,
            counter.metric_type(),
        )?)?;
    }
    Ok(())
}

/// Encodes a counter with one label: name without the prefix `alluvium_`, and a value for each
/// value of the label.
pub(crate) fn encode_labelled_counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &str,
    values: &[(&str, u64)],
) -> Result<(), fmt::Error> {
    let (name, help) = (format!("alluvium_{name}"), format!("{help}."));
    let mut family = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
    values.iter().try_for_each(|(of, value)| {
        ConstCounter::new(*value).encode(family.encode_family(&[(label, *of)])?)
    })
}

/// Encodes durations as a histogram.
fn encode_times(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    times: &DurationHistogram,
) -> Result<(), fmt::Error> {
    let seconds = |bound: Duration| match bound {
        Duration::MAX => f64::INFINITY,
        bound => bound.as_secs_f64(),
    };
    let steps: Vec<_> = times.buckets().map(|(bound, count)| (seconds(bound), count)).collect();
    let (name, help) = (format!("alluvium_{name}"), format!("{help}."));
    let mut metric = encoder.encode_descriptor(&name, &help, None, MetricType::Histogram)?;
    metric.encode_histogram::<NoLabelSet>(times.sum().as_secs_f64(), times.count(), &steps, None)
}

/// The statistics that a read-only server has, too: those of reads and of objects in use.
const OF_READS: [&str; 9] = [
    "streams",
    "block_cache_used_bytes",
    "cold_reads_waiting",
    "read_ahead_unread_bytes",
    "objects",
    "objects_bytes",
    "objects_retired",
    "objects_damaged",
    "objects_missing",
];

/// The counters of a read-only server begin with one of these.
const COUNTERS_OF_READS: [&str; 3] = ["cold_read_", "block_cache_", "read_ahead_"];

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Encodes what a read-only server has of the catalog.
fn encode_following(
    encoder: &mut DescriptorEncoder<'_>,
    following: &Following,
) -> Result<(), fmt::Error> {
    let gauges = [
        ("catalog_object", "Number of the last object of the catalog applied", following.number),
        ("catalog_version", "Version of the catalog applied", following.version),
        (
            "catalog_age_seconds",
            "Time since the last object of the catalog applied was written",
            following.age.as_secs(),
        ),
        (
            "catalog_current_seconds",
            "Time since the catalog was last read to its end",
            following.current.as_secs(),
        ),
    ];
    encode_gauges(encoder, &gauges)?;
    let counters = [
        ("catalog_polls", "Reads of the catalog that another server writes", following.polls),
        ("catalog_poll_failures", "Reads of the catalog that failed", following.failures),
        (
            "catalog_reloads",
            "Times that the catalog was loaded again from a snapshot",
            following.reloads,
        ),
    ];
    encode_counters(encoder, &counters)
}

/// Reads the store's statistics at each scrape, so that nothing is counted twice.
struct StoreCollector {
    store: Store,
}

impl fmt::Debug for StoreCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreCollector").finish_non_exhaustive()
    }
}

impl Collector for StoreCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stats = self.store.stats();
        let wal = stats.wal;
        let count = |n: usize| n as u64;
        let failing = stats.upload_failing.as_ref();
        let gauges: [(&str, &str, u64); 33] = [
            ("streams", "Streams that exist", count(stats.streams)),
            ("log_cache_limit_bytes", "Size limit of the log cache", stats.cache_bound_bytes),
            ("log_cache_used_bytes", "Bytes of batches in the log cache", stats.cache_used_bytes),
            (
                "log_cache_pinned_bytes",
                "Bytes of batches in the log cache that are not uploaded yet",
                stats.cache_pinned_bytes,
            ),
            (
                "log_behind_bytes",
                "Growth of the write-ahead log since the last upload began",
                stats.log_behind_bytes,
            ),
            (
                "block_cache_used_bytes",
                "Memory of cached blocks of objects",
                stats.block_cache_used_bytes,
            ),
            (
                "cold_reads_waiting",
                "Cold reads that wait for the object store",
                stats.reads.waiting,
            ),
            (
                "read_ahead_unread_bytes",
                "Bytes of blocks being read ahead or read ahead and not used yet",
                stats.reads.ahead_unread_bytes,
            ),
            ("objects", "Objects in use", count(stats.objects)),
            ("objects_bytes", "Size of the objects in use", stats.object_bytes),
            ("objects_retired", "Objects waiting to be deleted", count(stats.retired_objects)),
            ("wal_ring_bytes", "Size of the write-ahead log's ring", wal.ring_bytes),
            ("wal_used_bytes", "Bytes of the ring that cannot be reused yet", wal.used_bytes),
            (
                "wal_resize_to_bytes",
                "Target capacity of a resize in progress, otherwise 0",
                wal.resize_to_bytes.unwrap_or(0),
            ),
            (
                "wal_resize_distance_bytes",
                "Upper bound of the bytes to trim before the resize is complete",
                wal.resize_distance_bytes,
            ),
            (
                "wal_oldest_seconds",
                "Upper bound of the age of the oldest record that is not uploaded and trimmed",
                stats.log_age.as_secs(),
            ),
            ("wal_window_bytes", "Limit on bytes appended and not durable", wal.window_bytes),
            ("wal_window_used_bytes", "Bytes appended and not durable", wal.window_used_bytes),
            ("wal_writes_in_flight", "Block writes in flight", count(wal.in_flight)),
            ("wal_sealed_blocks", "Blocks waiting for an I/O slot", count(wal.sealed_blocks)),
            (
                "wal_failed",
                "1 after a write or flush has failed: nothing is acknowledged",
                u64::from(wal.failed),
            ),
            (
                "consecutive_upload_failures",
                "Failed upload attempts since the last success",
                failing.map_or(0, |failing| failing.failures.into()),
            ),
            (
                "upload_failing_seconds",
                "Time since uploads began to fail, 0 while they succeed",
                failing.map_or(0, |failing| failing.elapsed.as_secs()),
            ),
            (
                "objects_orphaned",
                "Old objects that are not in the catalog and not deleted yet",
                count(stats.orphans),
            ),
            (
                "objects_damaged",
                "Objects in use that are known to be damaged",
                count(stats.damaged_objects.count),
            ),
            (
                "objects_missing",
                "Objects in use that are known to be missing",
                count(stats.missing_objects.count),
            ),
            (
                "recovery_damaged_ranges",
                "Parts of the write-ahead log that were durable and could not be read by recovery",
                count(stats.lost.damaged_ranges),
            ),
            (
                "recovery_damaged_bytes",
                "Bytes of the damaged parts of the write-ahead log",
                stats.lost.damaged_bytes,
            ),
            (
                "recovery_lost_offset_ranges",
                "Ranges of lost offsets found by recovery, of partitions and of internal state",
                count(stats.lost.gaps),
            ),
            ("recovery_lost_offsets", "Lost offsets found by recovery", stats.lost.offsets),
            (
                "recovery_skipped_offset_ranges",
                "Ranges of offsets skipped by recovery because they may have been used and lost",
                count(stats.lost.skipped_gaps),
            ),
            (
                "recovery_skipped_offsets",
                "Offsets skipped by recovery: an upper bound of further losses",
                stats.lost.skipped_offsets,
            ),
            ("wal_durable_offset", "Log offset below which everything is durable", wal.durable.0),
        ];
        let following = self.store.following();
        let read_only = (
            "read_only",
            "1 on a server that serves what another one has uploaded",
            u64::from(following.is_some()),
        );
        encode_gauges(&mut encoder, &[read_only])?;
        let is_read_only = following.is_some();
        let gauges: Vec<_> = gauges
            .into_iter()
            .filter(|(name, _, _)| !is_read_only || OF_READS.contains(name))
            .collect();
        encode_gauges(&mut encoder, &gauges)?;
        let counters: [(&str, &str, u64); 26] = [
            ("uploads", "Uploads committed", stats.uploads),
            ("uploaded_bytes", "Bytes of objects committed", stats.uploaded_bytes),
            ("object_compactions", "Object compactions committed", stats.compactions),
            (
                "object_compacted_bytes",
                "Bytes of objects written by object compaction",
                stats.compacted_bytes,
            ),
            (
                "object_compaction_failures",
                "Failed object compactions, including those that are retried",
                stats.compaction_failures,
            ),
            ("upload_failures", "Failed upload attempts", stats.upload_failures),
            (
                "remote_copy_throttle_ms",
                "Time that uploads and compaction have waited for their quota (KIP-956)",
                millis(stats.throttled.copy),
            ),
            (
                "remote_fetch_throttle_ms",
                "Time that reads of objects have waited for their quota (KIP-956)",
                millis(stats.throttled.fetch),
            ),
            ("objects_orphans_deleted", "Orphaned objects deleted", stats.orphans_deleted),
            (
                "object_cleaner_failures",
                "Failed attempts to delete, unregister or list objects",
                stats.clean_up_failures,
            ),
            ("cold_read_gets", "Ranged GETs of blocks and indexes", stats.reads.gets),
            (
                "cold_read_get_bytes",
                "Bytes requested by ranged GETs of blocks and indexes",
                stats.reads.get_bytes,
            ),
            (
                "cold_read_failures",
                "Blocks and indexes that could not be read or are damaged",
                stats.reads.failures,
            ),
            (
                "cold_read_bytes",
                "Bytes of record batches returned by cold reads",
                stats.reads.returned_bytes,
            ),
            ("block_cache_hits", "Blocks found in the block cache", stats.reads.hits),
            ("block_cache_misses", "Blocks not found in the block cache", stats.reads.misses),
            (
                "read_ahead_used_bytes",
                "Bytes of blocks that were read ahead and then used",
                stats.reads.ahead_used_bytes,
            ),
            (
                "read_ahead_wasted_bytes",
                "Bytes of blocks that were read ahead and evicted unused",
                stats.reads.ahead_wasted_bytes,
            ),
            (
                "refused_appends",
                "Appends refused or delayed because the log or its cache was full",
                stats.refused_appends,
            ),
            ("wal_records", "Records appended", wal.records),
            ("wal_payload_bytes", "Payload of the records appended", wal.payload_bytes),
            ("wal_device_bytes", "Bytes of block writes", wal.device_bytes),
            ("wal_block_writes", "Block writes completed", wal.block_writes),
            ("wal_flushed_writes", "Writes that carried a flush or FUA", wal.flushed_writes),
            ("wal_header_writes", "Header slots written", wal.header_writes),
            ("wal_padding_bytes", "Padding of blocks to a whole page", wal.padding_bytes),
        ];
        let is_of_reads =
            |name: &str| COUNTERS_OF_READS.iter().any(|prefix| name.starts_with(prefix));
        let counters: Vec<_> = counters
            .into_iter()
            .filter(|(name, _, _)| !is_read_only || is_of_reads(name))
            .collect();
        encode_counters(&mut encoder, &counters)?;
        match &following {
            Some(following) => encode_following(&mut encoder, following)?,
            None => encode_times(
                &mut encoder,
                "wal_flush_duration_seconds",
                "Time from submitting a block to the device until it is written and flushed",
                &wal.write_times,
            )?,
        }
        encode_degraded(&mut encoder, &self.store.degraded())?;
        encode_disk_cache(&mut encoder, &stats.disk_cache)?;
        encode_requests(encoder, &stats.requests)
    }
}

/// Encodes one value per reason, so that an alert finds a 0 as well.
fn encode_degraded(
    encoder: &mut DescriptorEncoder<'_>,
    faults: &[Degraded],
) -> Result<(), fmt::Error> {
    let (name, help) = ("alluvium_degraded", "1 while the server is degraded for this reason.");
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    Reason::ALL.iter().try_for_each(|reason| {
        let is_present = faults.iter().any(|fault| fault.reason == *reason);
        let value = ConstGauge::new(i64::from(is_present));
        value.encode(family.encode_family(&[("reason", reason.label())])?)
    })
}

fn encode_disk_cache(
    encoder: &mut DescriptorEncoder<'_>,
    stats: &DiskCacheStats,
) -> Result<(), fmt::Error> {
    let gauges = [
        ("disk_cache_open", "1 while cold reads use the disk cache", u64::from(stats.is_open)),
        (
            "disk_cache_failed",
            "1 after the disk cache could not be opened, was disabled, or stopped accepting writes",
            u64::from(stats.has_failed),
        ),
        ("disk_cache_entries", "Blocks and indexes in the disk cache", stats.entries as u64),
        ("disk_cache_used_bytes", "Disk space of the disk cache", stats.disk_bytes),
        (
            "disk_cache_memory_bytes",
            "Memory of the disk cache, including its index",
            stats.memory_bytes,
        ),
    ];
    encode_gauges(encoder, &gauges)?;
    let counters = [
        ("disk_cache_hits", "Blocks and indexes found in the disk cache", stats.hits),
        (
            "disk_cache_hit_bytes",
            "Bytes of blocks and indexes found in the disk cache",
            stats.hit_bytes,
        ),
        ("disk_cache_misses", "Blocks and indexes not found in the disk cache", stats.misses),
        ("disk_cache_writes", "Blocks and indexes written to the disk cache", stats.writes),
        (
            "disk_cache_written_bytes",
            "Bytes of blocks and indexes written to the disk cache",
            stats.written_bytes,
        ),
        (
            "disk_cache_dropped_writes",
            "Blocks and indexes not written to the disk cache: too large, its disk was too slow, \
             or a write failed",
            stats.dropped_writes,
        ),
        ("disk_cache_evicted", "Blocks and indexes evicted from the disk cache", stats.evicted),
        ("disk_cache_damaged", "Damaged blocks and indexes found in the disk cache", stats.damaged),
        (
            "disk_cache_errors",
            "Reads and writes of the disk cache that failed or took too long",
            stats.errors,
        ),
    ];
    encode_counters(encoder, &counters)
}

fn encode_requests(
    mut encoder: DescriptorEncoder<'_>,
    requests: &[Requests],
) -> Result<(), fmt::Error> {
    let mut family = |name: &str, help: &str, value: &dyn Fn(&Requests) -> u64| {
        let kind = MetricType::Counter;
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        requests.iter().try_for_each(|request| {
            let labels = [("cause", request.class), ("kind", request.kind)];
            ConstCounter::new(value(request)).encode(family.encode_family(&labels)?)
        })
    };
    family("alluvium_object_store_requests", "Requests to the object store.", &|it| it.count)?;
    let help = "Bytes of objects transferred by requests to the object store.";
    family("alluvium_object_store_bytes", help, &|it| it.bytes)
}

/// Resident memory according to /proc/self/status; `None` where there is no such file.
pub(crate) fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read_in_bytes() {
        let bytes = resident_bytes().expect("this test runs on Linux");
        assert!(bytes > 100 << 10 && bytes < 64 << 30, "{bytes}");
    }
}
