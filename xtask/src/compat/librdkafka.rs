//! librdkafka's own tests, run by its own program: all in quick mode, then those that this mode
//! leaves out or that need another server.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::peer::{Peer, SCRAM_USER, Setup};
use super::{Compat, NEW_GROUPS, tools};
use crate::Error;
use crate::exec::each_line;
use crate::report::{Case, Outcome};
use crate::setup::{self, Missing};

/// Far above what they take. Each test has its own limit, after which the program ends with a
/// summary.
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// The tests expect topics with more than one partition by default, as on the authors' servers.
const SERVER: Setup<'_> = Setup::with_partitions(4);

/// The scenario that the authors call `noautocreate`.
const WITHOUT_AUTO_CREATE: Setup<'_> = Setup {
    alluvium: &["--auto-create-topics=false"],
    kafka: "auto.create.topics.enable=false\n",
    users: &[],
    ..SERVER
};

/// A run of the program.
struct Pass<'a> {
    name: &'a str,
    /// The numbers of the tests; empty for all.
    tests: &'a str,
    arguments: &'a [&'a str],
    /// Appended to the names of the tests.
    suffix: &'a str,
}

/// All tests, in quick mode and without those that emulate a bad network (`-E`), four at a time:
/// they mostly wait.
const QUICK: Pass<'_> =
    Pass { name: "quick", tests: "", arguments: &["-Q", "-E", "-p4"], suffix: "" };

/// The subset that continuous integration runs: what librdkafka's authors call smoke tests, and
/// some more that take seconds.
const SHORT: &str =
    "0000,0001,0004,0005,0012,0013,0017,0022,0030,0031,0033,0039,0044,0052,0073,0086,0090,0099";

/// The tests that delay and cut connections and expect timeouts, and one that quick mode leaves
/// out. They run one at a time so that they do not delay each other.
const NETWORK: Pass<'_> = Pass {
    name: "network",
    tests: "0049,0068,0075,0076,0082,0088,0094",
    arguments: &["-p1"],
    suffix: "",
};

/// The test of authentication. (0142 would pass with all of its parts skipped in quick mode; the
/// suite `security` tests reauthentication.)
const SASL: Pass<'_> = Pass { name: "sasl", tests: "0135", arguments: &["-Q"], suffix: "" };

/// The tests that consume as members of a group, with the groups of KIP-848.
const GROUPS: Pass<'_> = Pass {
    name: "consumer",
    tests: "0018,0019,0022,0026,0029,0030,0033,0040,0042,0045,0050,0056,0069,0081,0083,0089,0091,\
            0093,0098,0102,0106,0109,0113,0118,0119,0120,0122,0132,0137,0147,0148,0153",
    arguments: &["-Q", "-E", "-p4"],
    suffix: NEW_GROUPS,
};

/// The tests that create topics while clients request them.
const NO_AUTO_CREATE: Pass<'_> = Pass {
    name: "noautocreate",
    tests: "0045,0107,0111",
    arguments: &["-p4", "-s", "noautocreate"],
    suffix: "",
};

/// The Kafka version that determines which features the tests use.
const VERSION: &str = "4.3.1";

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let jars = setup::kafka(compat.root)?;
    let program = Program { tests: setup::librdkafka_tests(compat.root, &jars)?, jars };
    let mut cases = compat.with_peer_as("librdkafka", &SERVER, |peer, directory| {
        if compat.short {
            return program.pass(peer, directory, &Pass { tests: SHORT, ..QUICK });
        }
        let mut cases = program.pass(peer, directory, &QUICK)?;
        for pass in [NETWORK, SASL, GROUPS] {
            merge(&mut cases, program.pass(peer, directory, &pass)?);
        }
        Ok(cases)
    })?;
    if !compat.short {
        let name = "librdkafka-noautocreate";
        let more = compat.with_peer_as(name, &WITHOUT_AUTO_CREATE, |peer, directory| {
            program.pass(peer, directory, &NO_AUTO_CREATE)
        })?;
        merge(&mut cases, more);
        say_why(&mut cases);
    }
    let source = fs::read_to_string(program.tests.join("test.c")).map_err(Error::from)?;
    let more = left_out(&source, &cases, compat.short);
    cases.extend(more);
    Ok(cases)
}

/// librdkafka's `test-runner`, and the jars of the Kafka tools that it calls.
struct Program {
    tests: PathBuf,
    jars: PathBuf,
}

impl Program {
    fn pass(&self, peer: &Peer, directory: &Path, pass: &Pass<'_>) -> Result<Vec<Case>, Error> {
        let Pass { name, tests, arguments, suffix } = *pass;
        let mut text = String::from("test.topic.random=true\n");
        let mut address = peer.address();
        if name == SASL.name {
            let sasl = peer.sasl().ok_or("the server has no listener with SASL")?;
            let (user, password) = SCRAM_USER;
            text.push_str(&format!(
                "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n\
                 sasl.username={user}\nsasl.password={password}\n"
            ));
            address = sasl.to_string();
        }
        text.push_str(&format!("metadata.broker.list={address}\n"));
        let settings = directory.join(format!("{name}.conf"));
        fs::write(&settings, text)?;
        let log = directory.join(format!("{name}.log"));
        println!("the output of the tests is in {}", log.display());
        let scripts = directory.join("kafka");
        tools::scripts(&self.jars, &scripts.join("bin"))?;
        // Line-buffered, so that a test that hangs does not hold back other lines.
        let mut command = peer.client("stdbuf");
        command.args(["-oL", "./test-runner"]).current_dir(&self.tests);
        command.env("RDKAFKA_TEST_CONF", &settings).env("BROKERS", &address);
        command.env("KAFKA_PATH", &scripts);
        command.env("LD_LIBRARY_PATH", "../src:../src-cpp");
        command.args(arguments).args(["-V", VERSION]);
        if !tests.is_empty() {
            command.env("TESTS", tests);
        }
        if suffix == NEW_GROUPS {
            command.env("TEST_CONSUMER_GROUP_PROTOCOL", "consumer");
        }
        command.stderr(File::create(&log)?);
        let mut cases = Vec::new();
        let status = each_line(&mut command, LIMIT, |line| {
            let line = without_colours(line);
            if line.starts_with('|') {
                println!("{line}");
            }
            cases.extend(case(&line));
        })?;
        if cases.is_empty() || (!status.success() && !cases.iter().any(Case::has_failed)) {
            cases.push(Case::failed(&format!("test-runner, {name}"), status));
        }
        if !suffix.is_empty() {
            for case in &mut cases {
                case.name = format!("{}, {suffix}", case.name);
            }
        }
        Ok(cases)
    }
}

/// Adds the cases of a further pass. A case that was skipped before has now run.
fn merge(cases: &mut Vec<Case>, more: Vec<Case>) {
    for case in more {
        let skipped =
            |old: &&mut Case| old.name == case.name && matches!(old.outcome, Outcome::Skipped(_));
        match cases.iter_mut().find(skipped) {
            Some(old) => *old = case,
            None => cases.push(case),
        }
    }
}

/// Replaces the reason of tests that the program's flags still exclude: those for the network have
/// run.
fn say_why(cases: &mut [Case]) {
    for case in cases {
        if let Outcome::Skipped(why) = &mut case.outcome
            && why.starts_with("Filtered due to negative test flags")
        {
            *why = "its authors marked it as known to fail".to_owned();
        }
    }
}

/// Returns the tests of the program that its summary does not name. It says nothing about those
/// that were not requested.
fn left_out(source: &str, cases: &[Case], short: bool) -> Vec<Case> {
    let names = source.lines().filter_map(|line| line.trim_start().strip_prefix("_TEST("));
    let names = names.filter_map(|rest| rest.split([',', ')']).next());
    let names: Vec<&str> =
        names.filter(|name| cases.iter().all(|case| case.name != *name)).collect();
    match (short, names.len()) {
        (true, 1..) => {
            let what = format!("{} more tests", names.len());
            vec![Case::skipped(&what, format!("the short form runs only {SHORT}"))]
        }
        _ => {
            let why = "the test program runs it only by name, or is built without it";
            names.into_iter().map(|name| Case::skipped(name, why)).collect()
        }
    }
}

/// Parses the case in a line of the summary, if any: `| 0001_multiobj | PASSED | 1.234s | why`.
fn case(line: &str) -> Option<Case> {
    let fields: Vec<&str> = line.strip_prefix('|')?.splitn(4, '|').map(str::trim).collect();
    let [name, state, _, reason] = fields[..] else { return None };
    // The table also lists the program itself.
    if name == "<MAIN>" {
        return None;
    }
    let reason = if reason.is_empty() { "no reason given" } else { reason };
    let outcome = match state {
        "PASSED" => Outcome::Passed,
        "SKIPPED" => Outcome::Skipped(reason.to_owned()),
        "FAILED" => Outcome::Failed(reason.to_owned()),
        state => Outcome::Failed(format!("{state}: {reason}")),
    };
    Some(Case { name: name.to_owned(), outcome })
}

/// Removes terminal colour codes: `ESC [ ... m`.
fn without_colours(line: &str) -> String {
    let mut pieces = line.split('\u{1b}');
    let mut text = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        text.push_str(piece.split_once('m').map_or(piece, |(_, rest)| rest));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_the_program_does_not_run_are_reported() {
        let source = "#define _TEST(NAME, ...) x\n _TEST(a, 0),\n _TEST(b,\n 1),\n _TEST(c, 0)";
        let cases = [Case::passed("a")];
        let names = |cases: Vec<Case>| {
            assert!(cases.iter().all(|case| matches!(case.outcome, Outcome::Skipped(_))));
            cases.into_iter().map(|case| case.name).collect::<Vec<_>>()
        };
        assert_eq!(names(left_out(source, &cases, false)), ["b", "c"]);
        assert_eq!(names(left_out(source, &cases, true)), ["2 more tests"]);
        assert!(left_out("_TEST(a, 0)", &cases, true).is_empty());
    }

    #[test]
    fn a_test_that_a_further_pass_runs_is_not_skipped() {
        let mut cases = vec![Case::passed("a"), Case::skipped("b", "x"), Case::skipped("c", "x")];
        let more = vec![Case::failed("a", "1"), Case::failed("b", "2"), Case::passed("d")];
        merge(&mut cases, more);
        let (a, b) = (Case::failed("a", "1"), Case::failed("b", "2"));
        let skipped = Case::skipped("c", "x");
        assert_eq!(cases, [Case::passed("a"), b, skipped, a, Case::passed("d")]);
    }

    #[test]
    fn lines_of_the_summary_become_cases() {
        let line = "|\u{1b}[32m 0001_multiobj            |     PASSED |   1.234s \u{1b}[0m|";
        assert_eq!(case(&without_colours(line)), Some(Case::passed("0001_multiobj")));
        let line = "|\u{1b}[31m 0004_conf |  FAILED |  0.1s \u{1b}[0m|\u{1b}[31m 1 | 2\u{1b}[0m";
        assert_eq!(case(&without_colours(line)), Some(Case::failed("0004_conf", "1 | 2")));
        assert_eq!(case("| a | SKIPPED | 0s | no"), Some(Case::skipped("a", "no")));
        assert_eq!(case("| a | RUNNING | 0s |").map(|case| case.has_failed()), Some(true));
        assert_eq!(case("| <MAIN> | PASSED | 0s |"), None);
        assert_eq!(case("#====#"), None);
    }
}
