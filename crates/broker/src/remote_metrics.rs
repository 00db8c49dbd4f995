//! The metrics of tiered storage by topic, under the names that the JMX exporter gives to those of
//! Kafka (KIP-405 and KIP-963).

use std::fmt;
use std::sync::Weak;

use alluvium_stream::Moved;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::topics::{Topic, Topics};

/// Bound on the topics that have these metrics: about 10,000 time series.
const MAX_TOPICS: usize = if cfg!(test) { 3 } else { 1_000 };
/// What the JMX exporter makes of `kafka.server:type=BrokerTopicMetrics`.
const PREFIX: &str = "kafka_server_brokertopicmetrics";

type Value = fn(&Moved) -> u64;

/// Type, name, meaning and value.
const METRICS: [(MetricType, &str, &str, Value); 9] = [
    (Counter, "remotecopybytes", "Bytes of record batches that uploads have written", |it| {
        it.copied_bytes
    }),
    (
        Counter,
        "remotecopyrequests",
        "Parts of partitions that uploads have written to objects",
        |it| it.copies,
    ),
    (
        Counter,
        "remotefetchbytes",
        "Bytes of record batches of objects that reads have returned",
        |it| it.read_bytes,
    ),
    (Counter, "remotefetchrequests", "Reads of objects that returned records", |it| it.reads),
    (Counter, "remotefetcherrors", "Reads of objects that failed", |it| it.failed_reads),
    (
        Counter,
        "remotedeleterequests",
        "Parts of partitions in objects that retention or DeleteRecords has removed",
        |it| it.removed,
    ),
    (Gauge, "remotecopylagbytes", "Bytes of record batches that wait for an upload", |it| {
        it.waiting_bytes
    }),
    (Gauge, "remotelogsizebytes", "Bytes of record batches in objects", |it| it.stored_bytes),
    (Gauge, "remotelogmetadatacount", "Parts of partitions in objects", |it| it.stored_ranges),
];

/// Collects the metrics of topics with `remote.storage.enable`.
pub(crate) struct RemoteMetrics {
    /// The registry may live longer than the server, and must not keep its store open.
    pub(crate) topics: Weak<Topics>,
}

impl fmt::Debug for RemoteMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteMetrics").finish_non_exhaustive()
    }
}

impl Collector for RemoteMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(topics) = self.topics.upgrade() else { return Ok(()) };
        let mut topics = topics.all();
        topics.retain(|topic| topic.rules.is_tiered);
        let left_out = topics.len().saturating_sub(MAX_TOPICS);
        topics.truncate(MAX_TOPICS);
        let topics: Vec<_> = topics.iter().map(|topic| (&*topic.name, moved(topic))).collect();
        let gauge = |value: u64| ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
        for (kind, name, help, value) in METRICS {
            let (name, help) = (format!("{PREFIX}_{name}"), format!("{help}."));
            let mut family = encoder.encode_descriptor(&name, &help, None, kind)?;
            for (topic, moved) in &topics {
                let labels = [("topic", *topic)];
                let series = family.encode_family(&labels)?;
                match kind {
                    Counter => ConstCounter::new(value(moved)).encode(series)?,
                    _ => gauge(value(moved)).encode(series)?,
                }
            }
        }
        let help = "Topics without metrics of tiered storage because there are too many.";
        let name = "alluvium_kafka_topics_without_remote_metrics";
        let left_out = gauge(left_out as u64);
        left_out.encode(encoder.encode_descriptor(name, help, None, Gauge)?)
    }
}

/// Returns the sum over all partitions of a topic.
fn moved(topic: &Topic) -> Moved {
    topic.partitions.iter().map(|partition| partition.stream.moved()).sum()
}
