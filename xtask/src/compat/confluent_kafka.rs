//! The tests of confluent-kafka-go that need a server: librdkafka as called by Confluent's own
//! client.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::peer::{Peer, SCRAM_USER, Setup};
use super::{Compat, NEW_GROUPS, Which};
use crate::Error;
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
const READ_AT_ONCE: [&str; 2] =
    ["TestIntegration/TestAdminConfig", "TestIntegration/TestAdminClient_UserScramCredentials"];

/// Tests that sometimes never end because of a fault of their own, each with that fault. Each of
/// them runs alone, and a second time if it does not end.
const MAY_HANG: [(&str, &str); 2] = [
    // It has no open connection to a server when it hangs.
    (
        "TestConsumerCloseForStaticMember",
        "one of its goroutines polls a consumer that another has closed, and waits on the queue of \
         the destroyed handle",
    ),
    // It hangs whenever the server stops for 11 s while the second consumer joins.
    (
        "TestIntegration/TestAdminClient_ListAndDescribeConsumerGroups",
        "it polls the first consumer of a group once, for 5 s, and then waits without polling \
         until that consumer has rejoined",
    ),
];

/// The limit of one attempt of a test in [`MAY_HANG`]. It takes seconds when it ends.
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
        let names = asking.join("|");
        let mut cases = pass(peer, directory, &tests, &names, without, "classic")?;
        for (name, fault) in MAY_HANG {
            let ended = retried(name, fault, || {
                let mut command = command(peer, directory, &tests, "classic");
                command.args(["-test.run", &exactly(name)]);
                limited(&mut command, MAY_HANG_LIMIT, name)
            })?;
            if ended.is_empty() {
                return Err(format!("no test matches {name}").into());
            }
            cases.extend(ended);
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

/// Runs the tests whose names match, without these and those of [`MAY_HANG`], with groups of one
/// kind.
fn pass(
    peer: &Peer,
    directory: &Path,
    tests: &GoTest,
    names: &str,
    without: &[&str],
    protocol: &str,
) -> Result<Vec<Case>, Error> {
    let mut command = command(peer, directory, tests, protocol);
    let skipped = MAY_HANG.iter().map(|(name, _)| name).chain(without).map(|name| exactly(name));
    let skipped = skipped.collect::<Vec<_>>().join("|");
    command.args(["-test.run", &format!("^({names})$"), "-test.skip", &skipped]);
    let mut cases = limited(&mut command, LIMIT, &format!("kafka, {protocol}"))?;
    cases.extend(without.iter().map(|name| {
        let why = "it reads right after a change, when Apache Kafka may be a moment behind";
        Case::skipped(name, why)
    }));
    Ok(cases)
}

/// Returns the pattern that only the test with this name matches.
fn exactly(name: &str) -> String {
    name.split('/').map(|part| format!("^{part}$")).collect::<Vec<_>>().join("/")
}

/// Returns the command that runs tests with groups of one kind.
fn command(peer: &Peer, directory: &Path, tests: &GoTest, protocol: &str) -> Command {
    let mut command = peer.client(&tests.program);
    command.current_dir(directory).env("TEST_CONSUMER_GROUP_PROTOCOL", protocol);
    command
}

/// Runs compiled tests that end themselves a minute before `limit`, or after two thirds of a
/// shorter one, and then print which of them have not finished.
fn limited(command: &mut Command, limit: Duration, name: &str) -> Result<Vec<Case>, Error> {
    let own = limit.saturating_sub(Duration::from_secs(60)).max(limit * 2 / 3);
    command.args([GoTests::VERBOSE, "-test.timeout", &format!("{}s", own.as_secs())]);
    GoTests::run(command, limit, name)
}

/// Returns the cases of a test that may hang because of a fault of its own: those of a second
/// attempt if the first did not finish.
fn retried(
    name: &str,
    fault: &str,
    mut run: impl FnMut() -> Result<Vec<Case>, Error>,
) -> Result<Vec<Case>, Error> {
    let cases = run()?;
    let hangs =
        |case: &Case| matches!(&case.outcome, Outcome::Failed(why) if why.contains(ENDLESS));
    if !cases.iter().any(hangs) {
        return Ok(cases);
    }
    println!("{name} did not finish and is retried: {fault}");
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
            let cases = retried("A", "a fault", || {
                tries += 1;
                Ok(vec![match *outcomes.next().expect("a further try") {
                    "" => Case::passed("A"),
                    why => Case::failed("A", why),
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
    fn a_pattern_matches_each_part_of_a_name() {
        assert_eq!(exactly("TestA"), "^TestA$");
        assert_eq!(exactly("TestA/TestB"), "^TestA$/^TestB$");
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
