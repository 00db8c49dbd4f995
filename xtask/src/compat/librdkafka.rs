//! librdkafka's own tests in their quick mode, by its own program.

use std::fs::{self, File};
use std::time::Duration;

use super::{Compat, tools};
use crate::exec::each_line;
use crate::report::{Case, Outcome};
use crate::setup::{self, Missing};

/// Far above what they take. Each test has a limit of its own, after which the program ends with a summary.
const LIMIT: Duration = Duration::from_secs(40 * 60);

/// Tests at a time. They wait more than they compute.
const PARALLEL: u32 = 4;

/// The tests count on topics that have more than one partition by themselves, as their authors' servers are told.
const PARTITIONS: u32 = 4;

/// What continuous integration runs: what librdkafka's authors call smoke tests, and some more that take seconds.
const SHORT: &str = "0000,0001,0004,0005,0012,0013,0017,0022,0030,0031,0033,0039,0044,0049,0052,0073,0086,0090,0099";

/// The Kafka whose features the tests may ask for.
const VERSION: &str = "4.3.1";

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let tests = setup::librdkafka_tests(compat.root)?;
    let jars = setup::kafka(compat.root)?;
    compat.with_peer("librdkafka", PARTITIONS, |peer, directory| {
        let settings = directory.join("test.conf");
        let text = format!("metadata.broker.list={}\ntest.topic.random=true\n", peer.address());
        fs::write(&settings, text)?;
        let log = directory.join("tests.log");
        println!("what the tests say is in {}", log.display());
        let scripts = directory.join("kafka");
        tools::scripts(&jars, &scripts.join("bin"))?;
        // What a test that does not end would take with it is written at the end of each line, not of all.
        let mut command = peer.client("stdbuf");
        command.args(["-oL", "./test-runner"]).current_dir(&tests);
        command.env("RDKAFKA_TEST_CONF", &settings).env("BROKERS", peer.address());
        command.env("KAFKA_PATH", &scripts);
        command.env("LD_LIBRARY_PATH", "../src:../src-cpp");
        command.args(["-Q", "-E", &format!("-p{PARALLEL}"), "-V", VERSION]);
        if compat.short {
            command.env("TESTS", SHORT);
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
        if !status.success() && !cases.iter().any(Case::has_failed) {
            cases.push(Case::failed("test-runner", status));
        }
        let more = left_out(&fs::read_to_string(tests.join("test.c"))?, &cases, compat.short);
        cases.extend(more);
        Ok(cases)
    })
}

/// The tests of the program that its summary does not name: of those that were not asked for it says nothing.
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
            let why = "its program does not run it unless it is named, or is built without it";
            names.into_iter().map(|name| Case::skipped(name, why)).collect()
        }
    }
}

/// The case in a line of the summary, if there is one: `| 0001_multiobj | PASSED | 1.234s | why`.
fn case(line: &str) -> Option<Case> {
    let fields: Vec<&str> = line.strip_prefix('|')?.splitn(4, '|').map(str::trim).collect();
    let [name, state, _, reason] = fields[..] else { return None };
    // The program itself is in the table too.
    if name == "<MAIN>" {
        return None;
    }
    let reason = if reason.is_empty() { "it does not say why" } else { reason };
    let outcome = match state {
        "PASSED" => Outcome::Passed,
        "SKIPPED" => Outcome::Skipped(reason.to_owned()),
        "FAILED" => Outcome::Failed(reason.to_owned()),
        state => Outcome::Failed(format!("{state}: {reason}")),
    };
    Some(Case { name: name.to_owned(), outcome })
}

/// Without what tells a terminal to change its colour: `ESC [ ... m`.
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
    fn what_the_program_does_not_run_is_told() {
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
