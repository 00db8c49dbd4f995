//! Python clients: kafka-python with its own tests, aiokafka, and the widely used versions of both.

use std::path::Path;

use super::Compat;
use super::peer::{Peer, Setup};
use crate::Error;
use crate::report::Case;
use crate::setup::{self, Missing};
use crate::tap::tap;

/// Most tests of kafka-python can be pointed to an external server. This one cannot.
const SSL: &str = "test/integration/test_ssl_integration.py";

/// The server that kafka-python's tests expect. Its node ID is 0: a test assigns partitions to it.
const KAFKA_PYTHON: Setup<'_> = Setup {
    node: 0,
    alluvium: &["--group-min-session-timeout", "1s"],
    kafka: "group.min.session.timeout.ms=1000\n",
    // The user of the tests.
    users: &[("alice", "alice-secret")],
    ..Setup::with_partitions(4)
};

/// The Apache Kafka version that the tests assume.
const KAFKA_VERSION: &str = "4.3.1";

pub(super) fn kafka_python(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let versions = if compat.short { &setup::KAFKA_PYTHON[..1] } else { &setup::KAFKA_PYTHON };
    let tests = versions.iter().map(|version| setup::kafka_python_tests(compat.root, version));
    let tests = tests.collect::<Result<Vec<_>, _>>()?;
    let old = setup::kafka_python_old(compat.root);
    compat.with_peer_as("kafka-python", &KAFKA_PYTHON, |peer, _| {
        let sasl = peer.sasl().ok_or("a server with users has a listener for them")?;
        let mut cases = Vec::new();
        for (version, tests) in versions.iter().zip(&tests) {
            let mut command = peer.client(&tests.python);
            command.current_dir(&tests.directory).env("KAFKA_VERSION", KAFKA_VERSION);
            command.env("KAFKA_URI", format!("kafka://{}", peer.address()));
            command.env("SASL_HOST", sasl.ip().to_string());
            command.env("SASL_PORT", sasl.port().to_string());
            // A directory that must exist; nothing in it is run.
            command.env("KAFKA_ROOT", &tests.directory);
            command.env("PYTHONPATH", compat.root.join("tests/compat/python"));
            command.args(["-m", "pytest", "-p", "no:terminal", "-p", "pytest_tap"]);
            command.args(["-p", "no:cacheprovider", "--timeout", "120", "--deselect", SSL]);
            let ran = tap("pytest", command.arg("test/integration"))?;
            cases.extend(named(version, ran));
        }
        let why = "it starts its own server, from an installation of Apache Kafka";
        cases.push(Case::skipped("test_ssl_integration.py", why));
        let old_suite = "tests/compat/kafka-python/old.py";
        cases.extend(ours(compat.root, peer, "2.0.2", &old, old_suite)?);
        if compat.short {
            let why = "the short form runs the tests of the newest version only";
            cases.push(Case::skipped(setup::KAFKA_PYTHON[1], why));
        }
        Ok(cases)
    })
}

pub(super) fn aiokafka(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let pythons = setup::AIOKAFKA.map(|version| (version, setup::aiokafka(compat.root, version)));
    compat.with_peer("aiokafka", 1, |peer, _| {
        let mut cases = Vec::new();
        for (version, python) in &pythons {
            let suite = "tests/compat/aiokafka/suite.py";
            cases.extend(ours(compat.root, peer, version, python, suite)?);
        }
        Ok(cases)
    })
}

/// Runs our own program with a version of a client, if that can be installed.
fn ours(
    root: &Path,
    peer: &Peer,
    version: &str,
    python: &Result<std::path::PathBuf, Missing>,
    suite: &str,
) -> Result<Vec<Case>, Error> {
    match python {
        Ok(python) => {
            let mut command = peer.client(python);
            command.env("PYTHONPATH", root.join("tests/clients/python"));
            Ok(named(version, tap(suite, command.arg(root.join(suite)))?))
        }
        Err(Missing::NotAllowed(reason)) => Ok(vec![Case::skipped(version, reason)]),
        Err(Missing::Failed(error)) => Ok(vec![Case::failed(version, error)]),
    }
}

/// Adds the version of a client to the names of its cases.
fn named(version: &str, mut cases: Vec<Case>) -> Vec<Case> {
    for case in &mut cases {
        case.name = format!("{version}: {}", case.name);
    }
    cases
}
