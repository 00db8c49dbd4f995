//! The tests of confluent-kafka-go that need a server: librdkafka as called by Confluent's own
//! client.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::peer::{Peer, SCRAM_USER, Setup};
use super::{Compat, NEW_GROUPS, Which};
use crate::Error;
use crate::exec::follow_all;
use crate::report::{Case, ENDLESS, GoTests, Outcome};
use crate::setup::{self, GoTest, Missing};

/// Far above what they take, which is mostly waiting. The tests give up a minute earlier and then
/// print which have not finished.
const LIMIT: Duration = Duration::from_secs(11 * 60);

/// The default number of partitions of the authors' servers.
const PARTITIONS: u32 = 4;

/// The only test that runs with groups of both kinds. It has dozens of parts.
const WITH_GROUPS: &str = "TestIntegration";

/// Parts of it that read a setting right after they change it. Apache Kafka may still return the
/// previous value then, so they pass or fail there by chance.
const READ_AT_ONCE: [&str; 2] = ["TestAdminConfig", "TestAdminClient_UserScramCredentials"];

/// The test that sometimes never ends: one of its goroutines polls a consumer that another has
/// closed, and waits on the queue of the destroyed handle. It has no open connection to a server
/// then.
const MAY_HANG: &str = "TestConsumerCloseForStaticMember";

/// The limit of one attempt of [`MAY_HANG`]. It takes seconds when it ends.
const MAY_HANG_LIMIT: Duration = Duration::from_secs(90);

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let tests = setup::confluent_tests(compat.root)?;
    let mut setup = Setup::with_partitions(PARTITIONS);
    if compat.which() == Which::Kafka {
        // A test of authentication creates an ACL of the cluster. From then on, Apache Kafka on one
        // node, as it is started here, denies its own broker access to its controller.
        setup.users = &[];
    }
    compat.with_peer_as("confluent-kafka", &setup, |peer, directory| {
        // The tests read it from their working directory.
        fs::write(directory.join("testconf.json"), settings(peer))?;
        let (asking, others) = sort(&tests.package)?;
        if !asking.iter().any(|name| name == WITH_GROUPS) {
            return Err(format!("{WITH_GROUPS} is not among {asking:?}").into());
        }
        let without: &[&str] = match compat.which() {
            Which::Alluvium => &[],
            Which::Kafka => &READ_AT_ONCE,
        };
        let (hanging, others_asking): (Vec<_>, Vec<_>) =
            asking.into_iter().partition(|name| name == MAY_HANG);
        let names = others_asking.join("|");
        let mut cases = pass(peer, directory, &tests, &names, without, "classic")?;
        if !hanging.is_empty() {
            cases.extend(retried(|| {
                let mut command = command(peer, directory, &tests, MAY_HANG, "classic");
                follow_go(&mut command, MAY_HANG_LIMIT, MAY_HANG)
            })?);
        }
        if compat.short {
            let why = "the short form runs the tests with classic groups only";
            cases.push(Case::skipped(NEW_GROUPS, why));
        } else {
            for mut case in pass(peer, directory, &tests, WITH_GROUPS, without, "consumer")? {
                case.name = format!("{}, {NEW_GROUPS}", case.name);
                cases.push(case);
            }
        }
        let why = "they test the client alone, without a server";
        cases.push(Case::skipped(&format!("{others} more tests"), why));
        Ok(cases)
    })
}

/// The file from which the tests read the server's address.
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

/// Runs the tests with these names, without these parts, with groups of one kind.
fn pass(
    peer: &Peer,
    directory: &Path,
    tests: &GoTest,
    names: &str,
    without: &[&str],
    protocol: &str,
) -> Result<Vec<Case>, Error> {
    let mut command = command(peer, directory, tests, names, protocol);
    if !without.is_empty() {
        let parts = format!("^{WITH_GROUPS}$/^({})$", without.join("|"));
        command.args(["-test.skip", &parts]);
    }
    let mut cases = follow_go(&mut command, LIMIT, &format!("kafka, {protocol}"))?;
    cases.extend(without.iter().map(|part| {
        let why = "it reads right after a change, when Apache Kafka may be a moment behind";
        Case::skipped(&format!("{WITH_GROUPS}/{part}"), why)
    }));
    Ok(cases)
}

/// Returns the command that runs the tests with these names.
fn command(peer: &Peer, directory: &Path, tests: &GoTest, names: &str, protocol: &str) -> Command {
    let mut command = peer.client(&tests.program);
    command.current_dir(directory).env("TEST_CONSUMER_GROUP_PROTOCOL", protocol);
    command.args(["-test.v", "-test.run", &format!("^({names})$")]);
    command
}

/// Runs compiled tests that end themselves a minute before `limit`, or after two thirds of a
/// shorter one, and then print which of them have not finished.
fn follow_go(command: &mut Command, limit: Duration, name: &str) -> Result<Vec<Case>, Error> {
    let own = limit.saturating_sub(Duration::from_secs(60)).max(limit * 2 / 3);
    command.args(["-test.timeout", &format!("{}s", own.as_secs())]);
    let mut tests = GoTests::default();
    let status = follow_all(command, limit, |line| tests.line(line))?;
    Ok(tests.finish(name, status))
}

/// Returns the cases of [`MAY_HANG`]: those of a second attempt if the first did not finish.
fn retried(mut run: impl FnMut() -> Result<Vec<Case>, Error>) -> Result<Vec<Case>, Error> {
    let cases = run()?;
    let hangs =
        |case: &Case| matches!(&case.outcome, Outcome::Failed(why) if why.contains(ENDLESS));
    if !cases.iter().any(hangs) {
        return Ok(cases);
    }
    println!(
        "{MAY_HANG} did not finish and is retried: one of its goroutines polls a consumer that \
         another has closed"
    );
    run()
}

/// Returns the names of the tests in a package that use a server, and the number of the others.
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

/// Returns the tests in a file, and whether each uses a server. The function by which it reads the
/// server's address skips the test if there is none.
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
    fn only_a_test_that_does_not_finish_is_retried() {
        let ends = |outcomes: &[&'static str]| {
            let mut outcomes = outcomes.iter();
            let mut tries = 0;
            let cases = retried(|| {
                tries += 1;
                Ok(vec![match *outcomes.next().expect("a further try") {
                    "" => Case::passed(MAY_HANG),
                    why => Case::failed(MAY_HANG, why),
                }])
            });
            (tries, cases.unwrap().iter().any(Case::has_failed))
        };
        let hangs = "the test did not finish: panic: test timed out after 60s";
        assert!(hangs.contains(ENDLESS));
        assert_eq!(ends(&[""]), (1, false));
        assert_eq!(ends(&["another reason"]), (1, true));
        assert_eq!(ends(&[hangs, ""]), (2, false));
        assert_eq!(ends(&[hangs, hangs]), (2, true));
    }

    #[test]
    fn tests_that_use_a_server_are_distinguished_from_others() {
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
