//! The tests of segmentio/kafka-go.

use std::time::Duration;

use super::peer::Setup;
use super::{Compat, Which};
use crate::report::{Case, GoTests};
use crate::setup::{self, Missing};

/// Above what they take; the tests give up a minute earlier and then print which have not finished.
const LIMIT: Duration = Duration::from_secs(11 * 60);

/// The settings of the authors' servers.
const SETUP: Setup<'_> = Setup {
    alluvium: &["--max-message-size", "4MiB"],
    kafka: "message.max.bytes=200000000\n",
    users: &[
        ("adminplain", "admin-secret"),
        ("adminscram256", "admin-secret-256"),
        ("adminscram512", "admin-secret-512"),
    ],
    ..Setup::with_partitions(1)
};

/// The tests derive from it what a server must support, and the names of its users.
const KAFKA_VERSION: &str = "4.0.0";

const AT_PORT_9092: &str = "it connects to port 9092, but the server uses another port";

/// Tests that are run with no server.
const SKIPPED: [(&str, &str); 3] = [
    ("TestDialerResolver/resolve_domain_to_ip", AT_PORT_9092),
    ("TestDialerResolver/resolve_domain_to_ip_and_port", AT_PORT_9092),
    ("TestReadTruncatedMessages", "its authors skip it: it passes with Apache Kafka 0.10.1.0 only"),
];

const ASKED_AT_ONCE: &str = "it reads right after a change, when Apache Kafka may be behind";
const JUST_CREATED: &str =
    "Apache Kafka creates topics in the background: its group may never see the partitions";

/// Tests that pass or fail with Apache Kafka by chance. Here they must pass.
const BY_CHANCE: [(&str, &str); 11] = [
    ("TestClient/retrieve_committed_offsets_for_a_consumer_group_and_topic", ASKED_AT_ONCE),
    ("TestClientAlterConfigs", ASKED_AT_ONCE),
    ("TestClientDescribeACLs", ASKED_AT_ONCE),
    ("TestClientElectLeaders", ASKED_AT_ONCE),
    ("TestClientIncrementalAlterConfigs", ASKED_AT_ONCE),
    ("TestDescribeUserScramCredentials", ASKED_AT_ONCE),
    ("TestConn/test_delete_topics", ASKED_AT_ONCE),
    ("TestConn/test_delete_topics_with_an_invalid_topic", ASKED_AT_ONCE),
    ("TestConsumerGroupWithTopic", JUST_CREATED),
    ("TestConsumerGroupWithGroupTopicsSingle", JUST_CREATED),
    ("TestRebalanceTooManyConsumers", JUST_CREATED),
];

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    if compat.short {
        let why = "the short form omits it: its tests wait for minutes";
        return Err(Missing::NotAllowed(why.into()));
    }
    let programs = setup::kafka_go_tests(compat.root)?;
    compat.with_peer_as("kafka-go", &SETUP, |peer, _| {
        let sasl = peer.sasl().ok_or("a server with users has a listener for them")?;
        let mut without = SKIPPED.to_vec();
        if compat.which() == Which::Kafka {
            without.extend(BY_CHANCE);
        }
        let pattern = |(name, _): &(&str, _)| {
            name.split('/').map(|part| format!("^{part}$")).collect::<Vec<_>>().join("/")
        };
        let skip = without.iter().map(pattern).collect::<Vec<_>>().join("|");
        let mut cases: Vec<Case> =
            without.iter().map(|(name, why)| Case::skipped(name, why)).collect();
        for tests in &programs {
            let mut command = peer.client(&tests.program);
            command.current_dir(&tests.package).env("BOOTSTRAP_SASL", sasl.to_string());
            command.env("KAFKA_VERSION", KAFKA_VERSION);
            if compat.which() == Which::Kafka {
                // As the authors do for newer versions of Kafka, with which the connections fail
                // one of the tests of Go's package `nettest`.
                command.env("KAFKA_SKIP_NETTEST", "1");
            }
            command.args([GoTests::VERBOSE, "-test.timeout", "10m", "-test.skip", &skip]);
            cases.extend(GoTests::run(&mut command, LIMIT, "kafka-go")?);
        }
        Ok(cases)
    })
}
