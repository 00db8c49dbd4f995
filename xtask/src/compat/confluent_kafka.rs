//! The tests of confluent-kafka-go that talk to a server: librdkafka, as one of Confluent's own
//! clients calls it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::peer::{Peer, SCRAM_USER, Setup};
use super::{Compat, NEW_GROUPS, Which};
use crate::Error;
use crate::exec::follow_all;
use crate::report::{Case, GoTests};
use crate::setup::{self, GoTest, Missing};

/// Far above what they take: most of it is time that they wait. They give up a minute earlier, and
/// then say which have not ended.
const LIMIT: Duration = Duration::from_secs(11 * 60);

/// As their authors' servers are told.
const PARTITIONS: u32 = 4;

/// The one test that runs with groups of either kind. It has dozens of parts.
const WITH_GROUPS: &str = "TestIntegration";

/// Parts of it that read a setting right after they have changed it. Apache Kafka may then still
/// answer with what was before: there they pass or fail by chance.
const READ_AT_ONCE: [&str; 2] = ["TestAdminConfig", "TestAdminClient_UserScramCredentials"];

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let tests = setup::confluent_tests(compat.root)?;
    let mut setup = Setup::with_partitions(PARTITIONS);
    if compat.which() == Which::Kafka {
        // A test that logs in creates an ACL of the cluster. From then on Apache Kafka on one node,
        // as it is started here, denies its own broker the way to its controller.
        setup.users = &[];
    }
    compat.with_peer_as("confluent-kafka", &setup, |peer, directory| {
        // They look for it where they run.
        fs::write(directory.join("testconf.json"), settings(peer))?;
        let (asking, others) = sort(&tests.package)?;
        if !asking.iter().any(|name| name == WITH_GROUPS) {
            return Err(format!("there is no {WITH_GROUPS} among {asking:?}").into());
        }
        let without: &[&str] = match compat.which() {
            Which::Alluvium => &[],
            Which::Kafka => &READ_AT_ONCE,
        };
        let names = asking.join("|");
        let mut cases = pass(peer, directory, &tests, &names, without, "classic")?;
        if compat.short {
            let why = "the short form runs the tests with classic groups only";
            cases.push(Case::skipped(NEW_GROUPS, why));
        } else {
            for mut case in pass(peer, directory, &tests, WITH_GROUPS, without, "consumer")? {
                case.name = format!("{}, {NEW_GROUPS}", case.name);
                cases.push(case);
            }
        }
        let why = "they try the client alone, without a server";
        cases.push(Case::skipped(&format!("{others} more tests"), why));
        Ok(cases)
    })
}

/// The file in which the tests look for a server.
fn settings(peer: &Peer) -> String {
    let login = peer.sasl().map_or(String::new(), |address| {
        let (user, password) = SCRAM_USER;
        format!(
            ", \"BrokersSasl\": \"{address}\", \"SaslUsername\": \"{user}\", \
             \"SaslPassword\": \"{password}\", \"SaslMechanism\": \"SCRAM-SHA-256\""
        )
    });
    format!("{{\"Brokers\": \"{}\"{login}}}\n", peer.address())
}

/// Runs tests of these names, without these parts, with groups of one kind.
fn pass(
    peer: &Peer,
    directory: &Path,
    tests: &GoTest,
    names: &str,
    without: &[&str],
    protocol: &str,
) -> Result<Vec<Case>, Error> {
    let mut command = peer.client(&tests.program);
    command.current_dir(directory).env("TEST_CONSUMER_GROUP_PROTOCOL", protocol);
    command.args(["-test.v", "-test.timeout", "10m", "-test.run", &format!("^({names})$")]);
    if !without.is_empty() {
        let parts = format!("^{WITH_GROUPS}$/^({})$", without.join("|"));
        command.args(["-test.skip", &parts]);
    }
    let mut tests = GoTests::default();
    let status = follow_all(&mut command, LIMIT, |line| tests.line(line))?;
    let mut cases = tests.finish(&format!("kafka, {protocol}"), status);
    cases.extend(without.iter().map(|part| {
        let why = "it reads right after a change, where Apache Kafka may be a moment behind";
        Case::skipped(&format!("{WITH_GROUPS}/{part}"), why)
    }));
    Ok(cases)
}

/// The names of the tests in a package that ask where a server is, and the number of the others.
fn sort(package: &Path) -> Result<(Vec<String>, usize), Error> {
    let (mut asking, mut others) = (Vec::new(), 0);
    for entry in fs::read_dir(package)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with("_test.go") {
            for (name, asks) in tests_in(&fs::read_to_string(&path)?) {
                if asks {
                    asking.push(name.to_owned());
                } else {
                    others += 1;
                }
            }
        }
    }
    asking.sort();
    Ok((asking, others))
}

/// The tests in a file, and whether each asks where a server is. What it asks with ends a test if
/// there is none.
fn tests_in(source: &str) -> impl Iterator<Item = (&str, bool)> {
    source.split("\nfunc ").skip(1).filter_map(|function| {
        let (name, _) = function.split_once("(t *testing.T)")?;
        name.starts_with("Test").then(|| (name, function.contains("testconfRead()")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_ask_for_a_server_are_told_from_others() {
        let source = "package kafka\n\n\
            func testconfRead() bool {\n}\n\n\
            // TestA asks.\nfunc TestA(t *testing.T) {\n\tif !testconfRead() {\n\t}\n}\n\n\
            func TestB(t *testing.T) {\n}\n\n\
            func (its *Suite) TestC() {\n\ttestconfRead()\n}\n\n\
            func testD(t *testing.T) {\n\ttestconfRead()\n}\n\n\
            func BenchmarkE(b *testing.B) {\n\ttestconfRead()\n}\n";
        assert_eq!(tests_in(source).collect::<Vec<_>>(), [("TestA", true), ("TestB", false)]);
    }
}
