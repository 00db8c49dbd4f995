//! `cargo xtask compat`: third-party test suites for Kafka, and Kafka's own programs, against the
//! server as a user starts it.

mod apps;
mod confluent_kafka;
mod franz_go;
mod java;
mod jvm;
mod kafka_go;
mod kafkajs;
mod known;
mod librdkafka;
mod peer;
mod python;
mod sarama;
mod security;
mod tools;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::report::{Case, Report};
use crate::server::binary;
use crate::setup::{self, Missing};
use crate::tap::skip_if_missing;
use crate::{Error, ServerOptions};

use known::Known;
use peer::{Peer, Setup};

#[derive(Args)]
pub(crate) struct Options {
    /// The suites to run. Default: all.
    suites: Vec<Suite>,
    /// Leave out slow tests, as continuous integration does.
    #[arg(long)]
    short: bool,
    /// The server to test. A test that fails against Apache Kafka on the same machine is not a
    /// fault of Alluvium.
    #[arg(long, default_value = "alluvium")]
    peer: Which,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// The tests of franz-go's package `kgo`.
    FranzGo,
    /// Kafka's command-line tools.
    KafkaTools,
    /// kafka-clients: administration, transactions, groups of both new kinds.
    KafkaClients,
    /// Listeners with TLS and SASL, and ACLs, with four kinds of clients.
    Security,
    /// All of librdkafka's tests that run on one node.
    Librdkafka,
    /// The tests of confluent-kafka-go that need a server.
    ConfluentKafka,
    /// The tests of kafka-python, and its widely used version of 2020.
    KafkaPython,
    /// aiokafka: two versions, through our own program.
    Aiokafka,
    /// The tests of segmentio/kafka-go.
    KafkaGo,
    /// The functional tests of sarama.
    Sarama,
    /// KafkaJS, through our own program.
    Kafkajs,
    /// A Spring Kafka application.
    Spring,
    /// A Flink job with exactly-once delivery.
    Flink,
    /// Kafka Streams, Kafka Connect, a schema registry and a UI.
    Apps,
}

impl Suite {
    const ALL: [Self; 14] = [
        Self::FranzGo,
        Self::KafkaTools,
        Self::KafkaClients,
        Self::Security,
        Self::Librdkafka,
        Self::ConfluentKafka,
        Self::KafkaPython,
        Self::Aiokafka,
        Self::KafkaGo,
        Self::Sarama,
        Self::Kafkajs,
        Self::Spring,
        Self::Flink,
        Self::Apps,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::FranzGo => "franz-go",
            Self::KafkaTools => "kafka-tools",
            Self::KafkaClients => "kafka-clients",
            Self::Security => "security",
            Self::Librdkafka => "librdkafka",
            Self::ConfluentKafka => "confluent-kafka",
            Self::KafkaPython => "kafka-python",
            Self::Aiokafka => "aiokafka",
            Self::KafkaGo => "kafka-go",
            Self::Sarama => "sarama",
            Self::Kafkajs => "kafkajs",
            Self::Spring => "spring",
            Self::Flink => "flink",
            Self::Apps => "apps",
        }
    }
}

/// The names of all suites, for `cargo xtask compat NAME`.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    Suite::ALL.into_iter().map(Suite::name)
}

/// The groups of KIP-848, in librdkafka's configuration.
const NEW_GROUPS: &str = "group.protocol=consumer";

/// A server that speaks Kafka.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    Alluvium,
    Kafka,
}

impl Which {
    fn name(self) -> &'static str {
        match self {
            Self::Alluvium => "alluvium",
            Self::Kafka => "kafka",
        }
    }
}

/// `cargo xtask compat`.
pub(crate) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    let binary = match options.peer {
        Which::Alluvium => Some(binary(root, options.server.server.as_deref())?),
        Which::Kafka => None,
    };
    let compat = Compat { root, binary, short: options.short };
    let mut report = Report::default();
    for suite in Suite::ALL {
        if options.suites.is_empty() || options.suites.contains(&suite) {
            compat.suite(&mut report, suite);
        }
    }
    Ok(report)
}

/// The short form, as part of `cargo xtask test`.
pub(crate) fn short(root: &Path, binary: &Path, report: &mut Report) {
    let compat = Compat { root, binary: Some(binary.to_path_buf()), short: true };
    for suite in Suite::ALL {
        compat.suite(report, suite);
    }
}

/// The environment of the suites: where they run and what they test.
struct Compat<'a> {
    root: &'a Path,
    /// Alluvium's binary; `None` if Apache Kafka is tested.
    binary: Option<PathBuf>,
    short: bool,
}

impl Compat<'_> {
    fn which(&self) -> Which {
        if self.binary.is_some() { Which::Alluvium } else { Which::Kafka }
    }

    fn suite(&self, report: &mut Report, suite: Suite) {
        let name = format!("compat {}", suite.name());
        report.suite(&name, || {
            let known = Known::read(self.root, self.which().name(), suite.name())?;
            let cases = skip_if_missing(&name, self.cases(suite))?;
            // The short form does not run every listed test.
            Ok(known.judge(cases, !self.short))
        });
    }

    fn cases(&self, suite: Suite) -> Result<Vec<Case>, Missing> {
        match suite {
            Suite::FranzGo => franz_go::run(self),
            Suite::KafkaTools => tools::run(self),
            Suite::KafkaClients => java::run(self),
            Suite::Security => security::run(self),
            Suite::Librdkafka => librdkafka::run(self),
            Suite::ConfluentKafka => confluent_kafka::run(self),
            Suite::KafkaPython => python::kafka_python(self),
            Suite::Aiokafka => python::aiokafka(self),
            Suite::KafkaGo => kafka_go::run(self),
            Suite::Sarama => sarama::run(self),
            Suite::Kafkajs => kafkajs::run(self),
            Suite::Spring => jvm::spring(self),
            Suite::Flink => jvm::flink(self),
            Suite::Apps => apps::run(self),
        }
    }

    /// Runs `suite` against a fresh server, whose topics have this many `partitions` by default.
    /// Its data and log are kept if a case failed.
    fn with_peer(
        &self,
        name: &str,
        partitions: u32,
        suite: impl FnOnce(&mut Peer, &Path) -> Result<Vec<Case>, Error>,
    ) -> Result<Vec<Case>, Missing> {
        self.with_peer_as(name, &Setup::with_partitions(partitions), suite)
    }

    /// Like `with_peer`, against a server with further settings.
    fn with_peer_as(
        &self,
        name: &str,
        setup: &Setup<'_>,
        suite: impl FnOnce(&mut Peer, &Path) -> Result<Vec<Case>, Error>,
    ) -> Result<Vec<Case>, Missing> {
        let directory = self.root.join("target/e2e/run").join(format!("compat-{name}"));
        let mut peer = match &self.binary {
            Some(binary) => Peer::alluvium(binary, &directory, setup)?,
            None => Peer::kafka(&setup::kafka(self.root)?, &directory, setup)?,
        };
        let mut cases = suite(&mut peer, &directory).unwrap_or_else(|error| {
            vec![Case::failed(name, format!("{error}{}", peer.log_tail()))]
        });
        if cases.iter().any(Case::has_failed) {
            println!("the server's data and log are kept in {}", directory.display());
            return Ok(cases);
        }
        match self.which() {
            Which::Alluvium => {
                cases.push(Case::run("the server stops on SIGTERM", || peer.finish()));
            }
            // Its process is killed, so this is not a test.
            Which::Kafka => peer.finish()?,
        }
        Ok(cases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::workspace_root;

    #[test]
    fn a_suite_that_the_short_form_omits_is_reported_with_the_reason() {
        let root = workspace_root();
        let compat = Compat { root: &root, binary: Some("/nowhere".into()), short: true };
        let mut report = Report::default();
        compat.suite(&mut report, Suite::Apps);
        let text = report.to_string();
        assert!(text.contains("skipped: compat apps: compat apps: the short form"), "{text}");
        assert!(text.ends_with("0 passed, 0 failed, 1 skipped\n"), "{text}");
    }
}
