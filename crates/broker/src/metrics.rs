//! The metrics of the Kafka server.

use std::sync::atomic::{AtomicI64, AtomicU64};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::batch::Outcome;
use crate::groups::share::{AckKind, Shares};
use crate::producer_state::Totals;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    api: &'static str,
    version: i16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ApiLabel {
    api: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ErrorLabel {
    error: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct QuotaLabel {
    quota: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

/// All metrics of the Kafka server; names begin with `alluvium_kafka_`.
#[derive(Clone)]
pub(crate) struct Metrics {
    requests: Family<RequestLabels, Counter>,
    latency: Family<ApiLabel, Histogram, fn() -> Histogram>,
    errors: Family<ErrorLabel, Counter>,
    refused: Family<ReasonLabel, Counter>,
    throttled: Family<QuotaLabel, Counter>,
    pub(crate) connections: Gauge<i64, AtomicI64>,
    pub(crate) produced_bytes: Counter,
    pub(crate) produced_records: Counter,
    pub(crate) fetched_bytes: Counter,
    pub(crate) open_transactions: Gauge<i64, AtomicI64>,
    ended: Family<OutcomeLabel, Counter>,
    ended_after_loss: Family<OutcomeLabel, Counter>,
    pub(crate) share_acquired: Counter,
    share_acknowledged: Family<KindLabel, Counter>,
    pub(crate) log_compactions: Counter,
    pub(crate) log_compaction_read_bytes: Counter,
    pub(crate) log_compaction_written_bytes: Counter,
    pub(crate) log_compaction_failures: Counter,
    pub(crate) log_compaction_dirtiest: Gauge<f64, AtomicU64>,
    pub(crate) log_compaction_dirty_bytes: Gauge<i64, AtomicI64>,
    pub(crate) log_compaction_failing: Gauge<i64, AtomicI64>,
    /// Seconds since the Unix epoch; 0 if there was none.
    pub(crate) log_compaction_last_success: Gauge<f64, AtomicU64>,
    /// Seconds since the Unix epoch; 0 if there is none.
    pub(crate) log_compaction_next_retry: Gauge<f64, AtomicU64>,
}

impl Metrics {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        // 100 us to 26 s.
        let histogram: fn() -> Histogram = || Histogram::new(exponential_buckets(0.0001, 2.0, 19));
        let metrics = Self {
            requests: Family::default(),
            latency: Family::new_with_constructor(histogram),
            errors: Family::default(),
            refused: Family::default(),
            throttled: Family::default(),
            connections: Gauge::default(),
            produced_bytes: Counter::default(),
            produced_records: Counter::default(),
            fetched_bytes: Counter::default(),
            open_transactions: Gauge::default(),
            ended: Family::default(),
            ended_after_loss: Family::default(),
            share_acquired: Counter::default(),
            share_acknowledged: Family::default(),
            log_compactions: Counter::default(),
            log_compaction_read_bytes: Counter::default(),
            log_compaction_written_bytes: Counter::default(),
            log_compaction_failures: Counter::default(),
            log_compaction_dirtiest: Gauge::default(),
            log_compaction_dirty_bytes: Gauge::default(),
            log_compaction_failing: Gauge::default(),
            log_compaction_last_success: Gauge::default(),
            log_compaction_next_retry: Gauge::default(),
        };
        let registry = registry.sub_registry_with_prefix("alluvium_kafka");
        registry.register("requests", "Requests, by API and version", metrics.requests.clone());
        registry.register(
            "request_duration_seconds",
            "Time from the complete request to the written response",
            metrics.latency.clone(),
        );
        registry.register(
            "errors",
            "Partition errors in Produce, Fetch and ListOffsets responses, by error",
            metrics.errors.clone(),
        );
        registry.register(
            "closed_connections",
            "Connections closed by the server, by reason",
            metrics.refused.clone(),
        );
        registry.register(
            "throttled_requests",
            "Requests whose client was throttled, by quota",
            metrics.throttled.clone(),
        );
        registry.register("connections", "Open connections", metrics.connections.clone());
        registry.register(
            "produced_bytes",
            "Bytes of record batches appended",
            metrics.produced_bytes.clone(),
        );
        registry.register("produced_records", "Records appended", metrics.produced_records.clone());
        registry.register(
            "fetched_bytes",
            "Bytes of record batches in fetch responses",
            metrics.fetched_bytes.clone(),
        );
        registry.register(
            "open_transactions",
            "Open transactions",
            metrics.open_transactions.clone(),
        );
        registry.register("transactions", "Ended transactions, by outcome", metrics.ended.clone());
        registry.register(
            "transactions_ended_after_loss",
            "Transactions ended at the start because the log lost their end or a part of them; \
             `unknown` and `interrupted`: aborted",
            metrics.ended_after_loss.clone(),
        );
        registry.register(
            "share_acquired_records",
            "Records delivered to members of share groups, counting each delivery",
            metrics.share_acquired.clone(),
        );
        registry.register(
            "share_acknowledged_records",
            "Records acknowledged by members of share groups, by type of acknowledgement",
            metrics.share_acknowledged.clone(),
        );
        registry.register(
            "log_compactions",
            "Log compactions of partitions",
            metrics.log_compactions.clone(),
        );
        registry.register(
            "log_compaction_read_bytes",
            "Bytes of record batches before log compaction",
            metrics.log_compaction_read_bytes.clone(),
        );
        registry.register(
            "log_compaction_written_bytes",
            "Bytes of record batches after log compaction",
            metrics.log_compaction_written_bytes.clone(),
        );
        registry.register(
            "log_compaction_failures",
            "Failed log compactions of partitions",
            metrics.log_compaction_failures.clone(),
        );
        registry.register(
            "log_compaction_max_dirty_ratio",
            "Greatest dirty ratio of a log-compacted partition at the last check",
            metrics.log_compaction_dirtiest.clone(),
        );
        registry.register(
            "log_compaction_dirty_bytes",
            "Dirty bytes of all log-compacted partitions at the last check",
            metrics.log_compaction_dirty_bytes.clone(),
        );
        registry.register(
            "log_compaction_failing_partitions",
            "Partitions whose last log compaction failed and will be retried",
            metrics.log_compaction_failing.clone(),
        );
        registry.register(
            "log_compaction_last_success_timestamp_seconds",
            "Time of the last successful log compaction since the start, 0 if there was none",
            metrics.log_compaction_last_success.clone(),
        );
        registry.register(
            "log_compaction_next_retry_timestamp_seconds",
            "Time of the next retry of a failed log compaction, 0 if there is none",
            metrics.log_compaction_next_retry.clone(),
        );
        metrics
    }

    pub(crate) fn request(&self, api: &'static str, version: i16) {
        self.requests.get_or_create(&RequestLabels { api, version }).inc();
    }

    pub(crate) fn answered(&self, api: &'static str, elapsed: Duration) {
        self.latency.get_or_create(&ApiLabel { api }).observe(elapsed.as_secs_f64());
    }

    pub(crate) fn error(&self, error: &crate::errors::ApiError) {
        self.errors.get_or_create(&ErrorLabel { error: format!("{:?}", error.kind()) }).inc();
    }

    pub(crate) fn transaction(&self, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Abort => "aborted",
            Outcome::Commit => "committed",
        };
        self.ended.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a transaction that recovery ended after a loss. `outcome`: committed or aborted, as
    /// the coordinator decided; unknown: no decision found, so aborted; interrupted: a part of it
    /// is lost, so aborted.
    pub(crate) fn ended_after_loss(&self, outcome: &'static str) {
        self.ended_after_loss.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    pub(crate) fn throttled(&self, quota: &'static str) {
        self.throttled.get_or_create(&QuotaLabel { quota }).inc();
    }

    pub(crate) fn share_acknowledged(&self, kind: AckKind, records: u64) {
        let kind = match kind {
            AckKind::Gap => "gap",
            AckKind::Accept => "accept",
            AckKind::Release => "release",
            AckKind::Reject => "reject",
            AckKind::Renew => "renew",
        };
        self.share_acknowledged.get_or_create(&KindLabel { kind }).inc_by(records);
    }

    pub(crate) fn closed(&self, reason: &'static str) {
        self.refused.get_or_create(&ReasonLabel { reason }).inc();
    }
}

/// Registers the metrics that share groups maintain.
pub(crate) fn register_shares(registry: &mut Registry, shares: &Shares) {
    let registry = registry.sub_registry_with_prefix("alluvium_kafka");
    registry.register("share_sessions", "Open share sessions", shares.sessions.open.clone());
    registry.register(
        "share_timed_out_records",
        "Records of share groups whose lock expired before they were acknowledged",
        shares.counters.timed_out.clone(),
    );
}

/// Registers the metrics of the partitions' producer state.
pub(crate) fn register_producers(registry: &mut Registry, totals: &Totals) {
    let registry = registry.sub_registry_with_prefix("alluvium_kafka");
    registry.register(
        "tracked_producers",
        "Producer IDs tracked, summed over partitions",
        totals.producers.clone(),
    );
    registry.register(
        "tracked_transactions",
        "Open and aborted transactions tracked, summed over partitions",
        totals.transactions.clone(),
    );
    registry.register(
        "refused_transactions",
        "Batches refused because of the limits on tracked transactions",
        totals.refused.clone(),
    );
}
