//! Apache Kafka's tools, each started as its script does.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::RECORD_BYTES;
use crate::Error;
use crate::exec::{output, quietly};

/// The location of the tools, the server that they use, and the topics that they create.
pub(super) struct Tools<'a> {
    pub(super) jars: &'a Path,
    pub(super) address: String,
    pub(super) settings: &'a [&'a str],
    pub(super) partitions: u32,
}

/// The figures that a tool reports; 0 for those that it does not report.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Measured {
    /// MiB per second.
    pub(super) throughput: f64,
    /// The tools count whole milliseconds.
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}

/// The first records of a run are not counted, one in this many: a client that has just started
/// takes 15 s to become three times as fast.
const WARM_UP_PART: u64 = 2;
/// The longest time that a consumer waits for the next record.
const CONSUME_LIMIT_MS: u32 = 60_000;
/// The longest wait for a topic.
const CREATE_LIMIT: Duration = Duration::from_secs(120);

impl Tools<'_> {
    /// The command as started by kafka-run-class.sh.
    fn java(&self, class: &str) -> Command {
        let mut java = Command::new("java");
        java.args(["-Xmx512m", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]);
        java.args(["-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"]);
        java.args(["-Djava.awt.headless=true", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]);
        java.arg("-cp").arg(format!("{}/*", self.jars.display()));
        java.arg(format!("org.apache.kafka.tools.{class}"));
        java
    }

    fn topics(&self, what: &str, topic: &str) -> Command {
        let mut topics = self.java("TopicCommand");
        topics.args(["--bootstrap-server", &self.address, what, "--topic", topic]);
        topics
    }

    pub(super) fn create(&self, topic: &str) -> Result<(), Error> {
        let mut create = self.topics("--create", topic);
        create.args(["--partitions", &self.partitions.to_string(), "--replication-factor", "1"]);
        for setting in self.settings {
            create.args(["--config", setting]);
        }
        quietly(&mut create)?;
        self.wait_for(topic)
    }

    /// Waits until each partition of a topic has a leader, which Apache Kafka elects after it has
    /// answered. If an idempotent producer starts before, its first batch for a partition is
    /// refused and its second one accepted, and then the first one is sent repeatedly, out of
    /// order, until it gives up after two minutes: with 1,000 partitions Kafka did nothing else.
    fn wait_for(&self, topic: &str) -> Result<(), Error> {
        let started = Instant::now();
        loop {
            let mut offsets = self.java("GetOffsetShell");
            offsets.args(["--bootstrap-server", &self.address, "--topic", topic]);
            let printed = run(&mut offsets)?;
            let of_the_topic =
                |line: &&str| line.strip_prefix(topic).is_some_and(|rest| rest.starts_with(':'));
            let found = printed.lines().filter(of_the_topic).count();
            if found == self.partitions as usize {
                return Ok(());
            }
            if started.elapsed() > CREATE_LIMIT {
                return Err(format!(
                    "{found} of {} partitions of {topic} have a leader after {CREATE_LIMIT:?}",
                    self.partitions
                )
                .into());
            }
        }
    }

    pub(super) fn delete(&self, topic: &str) -> Result<(), Error> {
        quietly(&mut self.topics("--delete", topic))
    }

    /// Produces this many records, at this rate or as fast as possible, with these producer
    /// settings.
    pub(super) fn produce(
        &self,
        topic: &str,
        records: u64,
        per_second: Option<u64>,
        settings: &[&str],
    ) -> Result<Measured, Error> {
        let mut produce = self.java("ProducerPerformance");
        produce.args(["--bootstrap-server", &self.address, "--topic", topic]);
        produce.args(["--num-records", &records.to_string()]);
        produce.args(["--record-size", &RECORD_BYTES.to_string()]);
        let throughput = per_second.map_or("-1".into(), |records| records.to_string());
        produce.args(["--throughput", &throughput]);
        produce.args(["--warmup-records", &(records / WARM_UP_PART).to_string()]);
        produce.arg("--command-property").args(settings);
        let printed = run(&mut produce)?;
        Ok(produced(&printed)
            .ok_or_else(|| format!("unexpected output of ProducerPerformance:\n{printed}"))?)
    }

    /// Consumes this many records; measures MiB per second from the first fetch on.
    pub(super) fn consume(&self, topic: &str, records: u64) -> Result<Measured, Error> {
        let mut consume = self.java("ConsumerPerformance");
        consume.args(["--bootstrap-server", &self.address, "--topic", topic]);
        consume.args(["--num-records", &records.to_string(), "--hide-header"]);
        consume.args(["--timeout", &CONSUME_LIMIT_MS.to_string()]);
        let printed = run(&mut consume)?;
        Ok(consumed(&printed, records)
            .ok_or_else(|| format!("unexpected output of ConsumerPerformance:\n{printed}"))?)
    }

    /// Sends one record after the other, each after the previous one has been received.
    pub(super) fn end_to_end(&self, topic: &str, records: u32) -> Result<Measured, Error> {
        let mut end_to_end = self.java("EndToEndLatency");
        end_to_end.args([
            &self.address,
            topic,
            &records.to_string(),
            "all",
            &RECORD_BYTES.to_string(),
        ]);
        let printed = run(&mut end_to_end)?;
        Ok(end_to_end_latency(&printed)
            .ok_or_else(|| format!("unexpected output of EndToEndLatency:\n{printed}"))?)
    }
}

fn run(command: &mut Command) -> Result<String, Error> {
    Ok(String::from_utf8_lossy(&output(command)?).into_owned())
}

/// Parses a line such as `400 steady state records sent, 1234.5 records/sec (1.21 MB/sec), 2.1 ms
/// avg latency, 9.0 ms max latency, 2 ms 50th, 3 ms 95th, 8 ms 99th, 9 ms 99.9th.` Its MB are MiB.
/// The last such line covers the records after the warm-up.
fn produced(printed: &str) -> Option<Measured> {
    let line = printed.lines().rfind(|line| line.contains(" 99.9th"))?;
    let before = |unit: &str| -> Option<f64> {
        let (before, _) = line.split_once(unit)?;
        before.rsplit([' ', '(']).next()?.parse().ok()
    };
    Some(Measured {
        throughput: before(" MB/sec)")?,
        p50_ms: before(" ms 50th")?,
        p99_ms: before(" ms 99th")?,
    })
}

/// Parses a line with the start, the end, MiB, MiB per second, records, records per second,
/// milliseconds of the rebalance and of fetching, and MiB and records per second while fetching.
/// All records must have arrived.
fn consumed(printed: &str, records: u64) -> Option<Measured> {
    let line = printed.lines().rfind(|line| line.split(", ").count() == 10)?;
    let fields: Vec<&str> = line.split(", ").collect();
    let received: u64 = fields[4].parse().ok()?;
    let throughput = fields[8].parse().ok()?;
    (received >= records).then_some(Measured { throughput, ..Measured::default() })
}

/// Parses `Percentiles: 50th = 2, 99th = 5, 99.9th = 17`, and the mean before it, which has
/// decimals: the median has none.
fn end_to_end_latency(printed: &str) -> Option<Measured> {
    let number = |name: &str| -> Option<f64> {
        let (_, rest) = printed.split_once(name)?;
        rest.split([',', ' ', '\n']).next()?.parse().ok()
    };
    Some(Measured { throughput: 0.0, p50_ms: number("Avg latency: ")?, p99_ms: number("99th = ")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_the_tools_is_parsed() {
        let printed = "1000 records sent, 99.1 records/sec (0.10 MB/sec), \
            1.0 ms avg latency, 7.0 ms max latency.\n\
             1000 records sent, 99.5 records/sec (0.11 MB/sec), \
             1.0 ms avg latency, 9.00 ms max latency, \
             1 ms 50th, 2 ms 95th, 3 ms 99th, 9 ms 99.9th.\n\
             800 steady state records sent, 1234.5 records/sec (1.21 MB/sec), 2.1 ms avg latency, \
             9.00 ms max latency, 2 ms 50th, 4 ms 95th, 8 ms 99th, 9 ms 99.9th.\n";
        assert_eq!(
            produced(printed),
            Some(Measured { throughput: 1.21, p50_ms: 2.0, p99_ms: 8.0 })
        );
        assert_eq!(produced("org.apache.kafka.common.errors.TimeoutException\n"), None);

        let printed = "2026-11-22 10:00:00:000, 2026-11-22 10:00:04:000, \
            100.0, 25.0, 102400, 25600.0, 3000, 1000, 100.0, 102400.0\n";
        let throughput = consumed(printed, 102_400).map(|figures| figures.throughput);
        assert_eq!(throughput, Some(100.0));
        assert_eq!(consumed(printed, 102_401), None, "one is missing");

        let printed = "0\t12.5\n1000\t1.5\nAvg latency: 1.2345 ms\n\n\
            Percentiles: 50th = 1, 99th = 4, 99.9th = 12\n";
        assert_eq!(
            end_to_end_latency(printed),
            Some(Measured { throughput: 0.0, p50_ms: 1.2345, p99_ms: 4.0 })
        );
    }
}
