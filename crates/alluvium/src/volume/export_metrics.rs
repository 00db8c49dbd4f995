//! Metrics of an exported volume.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use alluvium_nbd::{Command, CommandCounters, Counters};
use alluvium_volume::gateway::{Counter, KindCounters};
use alluvium_volume::{Attached, gateway};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::admin::{encode_counters, encode_gauges, encode_labelled_counters};

type Labels = [(&'static str, &'static str); 1];

/// The times of the requests to a volume.
pub(super) struct Times(Family<Labels, Histogram, fn() -> Histogram>);

impl Times {
    pub(super) fn new() -> Self {
        // 50 us to 26 s.
        let buckets = || Histogram::new(exponential_buckets(50e-6, 2.0, 20));
        let times = Family::new_with_constructor(buckets as fn() -> Histogram);
        // A query finds each kind from the start.
        for kind in ["read", "write", "zero", "discard", "status"] {
            drop(times.get_or_create(&[("kind", kind)]));
        }
        Self(times)
    }

    /// Waits for a request, and records the time that it took.
    pub(super) async fn of<T>(&self, kind: &'static str, request: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let answer = request.await;
        self.0.get_or_create(&[("kind", kind)]).observe(begun.elapsed().as_secs_f64());
        answer
    }
}

/// Registers the metrics of an export.
pub(super) fn register(
    registry: &mut Registry,
    nbd: Arc<Counters>,
    attached: &Attached,
    times: &Times,
) {
    let help = "Time of reads, writes, zeroes, discards and status queries, each of at most 1 MiB";
    registry.register("alluvium_volume_request_seconds", help, times.0.clone());
    let gateway = attached.volume.counters().clone();
    registry.register_collector(Box::new(ExportCollector { nbd, gateway }));
}

/// Reads the counters at each scrape.
struct ExportCollector {
    nbd: Arc<Counters>,
    gateway: Arc<gateway::Counters>,
}

impl fmt::Debug for ExportCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportCollector").finish_non_exhaustive()
    }
}

impl Collector for ExportCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.encode_nbd(&mut encoder)?;
        self.encode_gateway(&mut encoder)
    }
}

impl ExportCollector {
    fn encode_nbd(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (nbd, value) = (&self.nbd, |counter: &AtomicU64| counter.load(Ordering::Relaxed));
        encode_gauges(
            encoder,
            &[
                ("nbd_open_connections", "Open connections", value(&nbd.open_connections)),
                ("nbd_requests_in_flight", "Requests in progress", value(&nbd.requests_in_flight)),
                (
                    "nbd_bytes_in_flight",
                    "Bytes in flight, as the bounds of the server count them",
                    value(&nbd.bytes_in_flight),
                ),
            ],
        )?;
        encode_counters(
            encoder,
            &[
                ("nbd_connections", "Connections accepted", value(&nbd.connections)),
                (
                    "nbd_refused_connections",
                    "Connections closed at once because there were too many",
                    value(&nbd.refused_connections),
                ),
                (
                    "nbd_failed_handshakes",
                    "Handshakes that were invalid, too slow, or for an unknown export",
                    value(&nbd.failed_handshakes),
                ),
                (
                    "nbd_violations",
                    "Connections closed because the client violated the protocol",
                    value(&nbd.violations),
                ),
                (
                    "nbd_stalled_connections",
                    "Connections closed because the client stopped sending or receiving",
                    value(&nbd.stalled_connections),
                ),
                (
                    "nbd_unknown_requests",
                    "Requests with an unknown command",
                    value(&nbd.unknown_requests),
                ),
            ],
        )?;
        let mut by_command = |name, help, of: fn(&CommandCounters) -> &AtomicU64| {
            let values = Command::ALL.map(|it| (it.name(), value(of(nbd.command(it)))));
            encode_labelled_counters(encoder, name, help, "command", &values)
        };
        by_command("nbd_requests", "Requests received", |it| &it.requests)?;
        by_command("nbd_request_bytes", "Bytes of the valid requests of NBD clients", |it| {
            &it.bytes
        })?;
        by_command("nbd_request_errors", "Requests answered with an error", |it| &it.errors)
    }

    fn encode_gateway(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gateway = &self.gateway;
        let kinds = [
            ("read", &gateway.read),
            ("write", &gateway.write),
            ("zero", &gateway.zero),
            ("discard", &gateway.discard),
            ("status", &gateway.status),
            ("attach", &gateway.attach),
        ];
        let mut by_kind = |name, help, of: fn(&KindCounters) -> &Counter| {
            let values = kinds.map(|(kind, counters)| (kind, of(counters).get()));
            encode_labelled_counters(encoder, name, help, "kind", &values)
        };
        by_kind("volume_requests", "Requests to the volume", |it| &it.requests)?;
        by_kind("volume_request_bytes", "Bytes of the requests to the volume", |it| &it.bytes)?;
        by_kind("volume_request_failures", "Requests that failed", |it| &it.failures)?;
        by_kind("volume_sends", "Requests to servers, with the repeated ones", |it| &it.sends)?;
        let help = "Requests to servers sent again after an error or a closed connection";
        by_kind("volume_retries", help, |it| &it.retries)?;
        let help = "Copies sent to another replica because no answer had arrived in time";
        by_kind("volume_copies", help, |it| &it.copies)?;
        encode_counters(
            encoder,
            &[
                (
                    "volume_lock_waits",
                    "Requests that waited for the lock of a range",
                    gateway.lock_waits.get(),
                ),
                (
                    "volume_merges",
                    "Requests that read blocks because a block was changed in part",
                    gateway.merges.get(),
                ),
                (
                    "volume_bad_answers",
                    "Answers that were not valid, or whose blocks failed their checksums",
                    gateway.bad_answers.get(),
                ),
            ],
        )
    }
}
