//! The report of a run: one case per test, and a table at the end.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::exec::follow_go;

/// The outcome of one test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Passed,
    /// The failure's reason.
    Failed(String),
    /// The reason why it did not run.
    Skipped(String),
    /// The reason of an expected failure.
    Known(String),
}

/// One test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
}

impl Case {
    pub(crate) fn passed(name: &str) -> Self {
        Self { name: name.to_owned(), outcome: Outcome::Passed }
    }

    pub(crate) fn failed(name: &str, reason: impl fmt::Display) -> Self {
        Self { name: name.to_owned(), outcome: Outcome::Failed(reason.to_string()) }
    }

    pub(crate) fn skipped(name: &str, reason: impl fmt::Display) -> Self {
        Self { name: name.to_owned(), outcome: Outcome::Skipped(reason.to_string()) }
    }

    pub(crate) fn has_failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }

    /// Runs `test` and prints its outcome.
    pub(crate) fn run(name: &str, test: impl FnOnce() -> Result<(), Error>) -> Self {
        let start = Instant::now();
        match test() {
            Ok(()) => {
                println!("ok - {name} ({:.1} s)", start.elapsed().as_secs_f64());
                Self::passed(name)
            }
            Err(error) => {
                println!("not ok - {name}: {error}");
                Self::failed(name, error)
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Suite {
    name: String,
    cases: Vec<Case>,
    elapsed: Duration,
}

/// All suites of a run, in order. Displayed as a table, the reasons, and a closing line.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Report {
    suites: Vec<Suite>,
}

struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
    known: usize,
}

impl Tally {
    fn of<'a>(cases: impl Iterator<Item = &'a Case>) -> Self {
        let mut tally = Self { passed: 0, failed: 0, skipped: 0, known: 0 };
        for case in cases {
            match case.outcome {
                Outcome::Passed => tally.passed += 1,
                Outcome::Failed(_) => tally.failed += 1,
                Outcome::Skipped(_) => tally.skipped += 1,
                Outcome::Known(_) => tally.known += 1,
            }
        }
        tally
    }
}

impl Report {
    /// Runs a suite and adds its cases. A suite that returns an error counts as failed.
    pub(crate) fn suite(&mut self, name: &str, run: impl FnOnce() -> Result<Vec<Case>, Error>) {
        println!("\n== {name}");
        let start = Instant::now();
        let mut cases = run().unwrap_or_else(|error| vec![Case::failed(name, error)]);
        if cases.is_empty() {
            cases.push(Case::failed(name, "no tests were reported"));
        }
        self.add(name, cases, start.elapsed());
    }

    /// Adds the result of a suite.
    pub(crate) fn add(&mut self, name: &str, cases: Vec<Case>, elapsed: Duration) {
        self.suites.push(Suite { name: name.to_owned(), cases, elapsed });
    }

    /// Adds all suites of another run.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.suites.append(&mut other.suites);
    }

    /// Whether nothing failed.
    pub(crate) fn success(&self) -> bool {
        Tally::of(self.cases().map(|(_, case)| case)).failed == 0
    }

    fn cases(&self) -> impl Iterator<Item = (&Suite, &Case)> {
        self.suites.iter().flat_map(|suite| suite.cases.iter().map(move |case| (suite, case)))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.suites.iter().map(|suite| suite.name.len()).max().unwrap_or(0).max(5);
        let all = Tally::of(self.cases().map(|(_, case)| case));
        // Few tasks have tests with known failures.
        let known =
            |known: &str| if all.known > 0 { format!("  {known:>5}") } else { String::new() };
        writeln!(f, "{:width$}  passed  failed{}  skipped      time", "suite", known("known"))?;
        for suite in &self.suites {
            let tally = Tally::of(suite.cases.iter());
            writeln!(
                f,
                "{:width$}  {:>6}  {:>6}{}  {:>7}  {:>6.1} s",
                suite.name,
                tally.passed,
                tally.failed,
                known(&tally.known.to_string()),
                tally.skipped,
                suite.elapsed.as_secs_f64()
            )?;
        }
        for (suite, case) in self.cases() {
            if let Outcome::Known(reason) = &case.outcome {
                writeln!(f, "known to fail: {}: {}: {reason}", suite.name, case.name)?;
            }
        }
        for (suite, case) in self.cases() {
            if let Outcome::Skipped(reason) = &case.outcome {
                let reason: Vec<&str> = reason.lines().map(str::trim).collect();
                writeln!(f, "skipped: {}: {}: {}", suite.name, case.name, reason.join(" "))?;
            }
        }
        for (suite, case) in self.cases() {
            if let Outcome::Failed(reason) = &case.outcome {
                // The rest of a long reason was already printed when the case failed.
                let reason = reason.lines().next().unwrap_or_default();
                writeln!(f, "FAILED: {}: {}: {reason}", suite.name, case.name)?;
            }
        }
        let known =
            if all.known > 0 { format!(", {} known to fail", all.known) } else { String::new() };
        writeln!(f, "{} passed, {} failed{known}, {} skipped", all.passed, all.failed, all.skipped)
    }
}

/// Collects the cases of a program that reports in TAP (testanything.org).
#[derive(Default)]
pub(crate) struct Tap {
    planned: Option<usize>,
    cases: Vec<Case>,
}

impl Tap {
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(count) = line.strip_prefix("1..") {
            self.planned = count.trim().parse().ok();
        } else if let Some(rest) = line.strip_prefix("not ok ") {
            let (name, reason) = rest.split_once(": ").unwrap_or((rest, "no reason given"));
            self.cases.push(Case::failed(without_number(name), reason));
        } else if let Some(rest) = line.strip_prefix("ok ") {
            self.cases.push(match rest.split_once(" # SKIP ") {
                Some((name, reason)) => Case::skipped(without_number(name), reason),
                None => Case::passed(without_number(rest)),
            });
        }
    }

    /// Returns the cases, plus a failure if fewer were reported than planned: the program ended
    /// early.
    pub(crate) fn finish(mut self, name: &str) -> Vec<Case> {
        if self.planned != Some(self.cases.len()) {
            let planned = self.planned.map_or("an unknown number of".to_owned(), |n| n.to_string());
            let reason = format!("only {} of {planned} tests were reported", self.cases.len());
            self.cases.push(Case::failed(name, reason));
        }
        self.cases
    }
}

fn without_number(name: &str) -> &str {
    name.split_once(" - ").map_or(name, |(_, name)| name)
}

/// Collects the cases of `go test -v`, or of a compiled test with `-test.v`.
#[derive(Default)]
pub(crate) struct GoTests {
    /// The test that the next lines of output belong to.
    current: String,
    started: Vec<String>,
    /// The logged lines of each test.
    messages: HashMap<String, Vec<String>>,
    /// The first line of the program's crash message.
    crash: Option<String>,
    /// The last few lines that belong to no test.
    others: VecDeque<String>,
    cases: Vec<Case>,
}

/// Start of the reason of a test that started and did not end.
pub(crate) const ENDLESS: &str = "the test did not finish";

/// Number of a test's logged lines that become its reason.
const GO_MESSAGES: usize = 4;

/// How the Go runtime's message starts when it ends a program, by itself or because of a signal.
const GO_CRASHES: [&str; 4] = ["panic: ", "fatal error: ", "SIGSEGV: ", "SIGABRT: "];

impl GoTests {
    /// The flag of `go test`, or of a compiled test, with which the result of a part is printed
    /// when the part ends. With `-v` alone it is printed when the whole test ends, so that a part
    /// that hangs hides the results of the others.
    pub(crate) const VERBOSE: &str = "-test.v=test2json";

    /// Runs tests with [`Self::VERBOSE`] among their arguments.
    pub(crate) fn run(
        command: &mut Command,
        limit: Duration,
        name: &str,
    ) -> Result<Vec<Case>, Error> {
        let mut tests = Self::default();
        let status = follow_go(command, limit, |line| tests.line(line))?;
        Ok(tests.finish(name, status))
    }

    pub(crate) fn line(&mut self, line: &str) {
        if let Some((word, name)) = line.strip_prefix("=== ").and_then(|rest| rest.split_once(' '))
        {
            name.trim().clone_into(&mut self.current);
            if word == "RUN" {
                self.started.push(self.current.clone());
            }
        } else if let Some(case) = go_case(line) {
            self.cases.push(case);
        } else if GO_CRASHES.iter().any(|begin| line.starts_with(*begin)) {
            self.crash.get_or_insert_with(|| line.to_owned());
        } else if let Some(message) = go_message(line) {
            let messages = self.messages.entry(self.current.clone()).or_default();
            messages.push(message.to_owned());
        } else if !matches!(line.trim(), "" | "PASS" | "FAIL") {
            if self.others.len() == GO_MESSAGES {
                self.others.pop_front();
            }
            self.others.push_back(line.trim().to_owned());
        }
    }

    /// Returns the cases without those that only group others. A test that started and did not end
    /// has failed. The program itself has failed if it crashed, or if its status says so and no
    /// test failed.
    pub(crate) fn finish(self, name: &str, status: ExitStatus) -> Vec<Case> {
        let Self { started, messages, crash, others, mut cases, .. } = self;
        for case in &mut cases {
            let Some(messages) = messages.get(&case.name) else { continue };
            if let Outcome::Failed(reason) | Outcome::Skipped(reason) = &mut case.outcome {
                *reason = messages[..messages.len().min(GO_MESSAGES)].join(" / ");
            }
        }
        let ended: HashSet<String> = cases.iter().map(|case| case.name.clone()).collect();
        let has_crashed = crash.is_some();
        let why = crash.unwrap_or_else(|| {
            let status = std::iter::once(status.to_string());
            status.chain(others).collect::<Vec<_>>().join(" / ")
        });
        let mut is_reported = false;
        for test in started.iter().filter(|test| !ended.contains(*test)) {
            cases.push(Case::failed(test, format!("{ENDLESS}: {why}")));
            is_reported = true;
        }
        let mut cases = only_leaves(cases);
        // A test that panics has already ended when the program reports the panic.
        let is_unknown = has_crashed && !is_reported || !cases.iter().any(Case::has_failed);
        if !status.success() && is_unknown {
            cases.push(Case::failed(name, why));
        }
        cases
    }
}

/// The message in a line that a test logged: `    some_test.go:12: the message`.
fn go_message(line: &str) -> Option<&str> {
    let (location, message) = line.trim_start().split_once(": ")?;
    let (file, number) = location.rsplit_once(':')?;
    (file.ends_with(".go") && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(message)
}

/// Parses the case in a line of `go test -v`, if there is one: `    --- PASS: TestName/sub
/// (0.07s)`.
fn go_case(line: &str) -> Option<Case> {
    let (word, rest) = line.trim_start().strip_prefix("--- ")?.split_once(": ")?;
    let name = rest.rsplit_once(" (").map_or(rest, |(name, _)| name);
    match word {
        "PASS" => Some(Case::passed(name)),
        "FAIL" => Some(Case::failed(name, "see its output above")),
        "SKIP" => Some(Case::skipped(name, "see its output above")),
        _ => None,
    }
}

/// Drops tests that only group others, so that nothing is counted twice.
fn only_leaves(cases: Vec<Case>) -> Vec<Case> {
    let groups: HashSet<String> = cases
        .iter()
        .flat_map(|case| case.name.match_indices('/').map(|(at, _)| case.name[..at].to_owned()))
        .collect();
    let failed: Vec<String> =
        cases.iter().filter(|case| case.has_failed()).map(|case| case.name.clone()).collect();
    let is_leaf = |case: &Case| {
        // A parent can fail by itself, with all its children passed.
        let alone = || {
            let prefix = format!("{}/", case.name);
            !failed.iter().any(|name| name.starts_with(&prefix))
        };
        !groups.contains(&case.name) || (case.has_failed() && alone())
    };
    cases.into_iter().filter(is_leaf).collect()
}

/// Collects the cases of `cargo test -- --show-output`, which also shows the output of passed
/// tests: a test that cannot run here prints `skipped: ` and the reason.
#[derive(Default)]
pub(crate) struct CargoTests {
    cases: Vec<Case>,
    /// Index of the first case of the current test program.
    first: usize,
    /// Whether the current lines are the output of passed tests.
    shown: bool,
    /// The test that the next lines of output belong to.
    current: Option<String>,
}

impl CargoTests {
    /// Processes a line. Returns whether to show it: the output of passed tests is hidden.
    pub(crate) fn line(&mut self, line: &str) -> bool {
        if line.starts_with("test result: ") {
            (self.first, self.shown, self.current) = (self.cases.len(), false, None);
        } else if line == "failures:" {
            (self.shown, self.current) = (false, None);
        } else if line == "successes:" {
            self.shown = true;
        } else if !self.shown {
            self.cases.extend(cargo_case(line));
        } else if let Some(name) = output_of(line) {
            self.current = Some(name.to_owned());
        } else if let (Some(name), Some(reason)) = (&self.current, reason_to_skip(line)) {
            let passed = Case::passed(name);
            if let Some(case) = self.cases[self.first..].iter_mut().find(|case| **case == passed) {
                *case = Case::skipped(name, reason);
            }
        }
        !self.shown
    }

    pub(crate) fn finish(self) -> Vec<Case> {
        self.cases
    }
}

/// The test in `---- name stdout ----`.
fn output_of(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

fn reason_to_skip(line: &str) -> Option<&str> {
    line.strip_prefix("skipped: ").or_else(|| line.strip_prefix("SKIPPED: "))
}

/// Parses the case in a line of `cargo test`, if there is one: `test name ... ok`.
fn cargo_case(line: &str) -> Option<Case> {
    let (name, outcome) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    match outcome {
        "ok" => Some(Case::passed(name)),
        "FAILED" => Some(Case::failed(name, "see its output above")),
        _ => {
            let reason = outcome.strip_prefix("ignored")?;
            Some(Case::skipped(name, reason.strip_prefix(", ").unwrap_or("no reason given")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn tap(lines: &[&str]) -> Vec<Case> {
        let mut tap = Tap::default();
        for line in lines {
            tap.line(line);
        }
        tap.finish("suite")
    }

    #[test]
    fn tap_lines_become_cases() {
        let cases =
            tap(&["1..3", "noise", "ok 1 - a", "not ok 2 - b: 1: not 2", "ok 3 - c # SKIP no"]);
        assert_eq!(
            cases,
            [Case::passed("a"), Case::failed("b", "1: not 2"), Case::skipped("c", "no")]
        );
    }

    #[test]
    fn a_program_that_stops_early_fails() {
        let failure = Case::failed("suite", "only 1 of 2 tests were reported");
        assert_eq!(tap(&["1..2", "ok 1 - a"]), [Case::passed("a"), failure]);
        let failure = Case::failed("suite", "only 0 of an unknown number of tests were reported");
        assert_eq!(tap(&["noise"]), [failure]);
    }

    fn go(lines: &[&str], status: i32) -> Vec<Case> {
        let mut tests = GoTests::default();
        for line in lines {
            tests.line(line);
        }
        // The exit code is in the second byte of a wait status.
        tests.finish("suite", ExitStatus::from_raw(status << 8))
    }

    #[test]
    fn go_lines_become_cases_without_group_parents() {
        let lines = [
            "=== RUN   TestA",
            "=== RUN   TestA/one",
            "--- PASS: TestA (0.01s)",
            "    --- PASS: TestA/one (0.00s)",
            "--- FAIL: TestB (1.00s)",
            "    --- PASS: TestB/one (0.00s)",
            "--- FAIL: TestC (1.00s)",
            "    --- FAIL: TestC/one (0.00s)",
            "--- SKIP: TestD (0.00s)",
            "FAIL",
        ];
        let cases = go(&lines, 1);
        let names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names, ["TestA/one", "TestB", "TestB/one", "TestC/one", "TestD"]);
        assert!(cases[1].has_failed() && cases[3].has_failed());
        assert!(matches!(cases[4].outcome, Outcome::Skipped(_)));
        assert_eq!(go(&[], 0), []);
        assert_eq!(go(&["=== RUN   A", "--- PASS: A (0.0s)"], 1).len(), 2);
    }

    #[test]
    fn a_go_tests_log_is_its_reason() {
        let lines = [
            "=== RUN   A",
            "    a_test.go:1: 1: not 2",
            "=== RUN   B",
            "    b_test.go:2: something",
            "=== NAME  A",
            "    a_test.go:7: and 3",
            "--- FAIL: A (0.0s)",
            "=== CONT  B",
            "    b_test.go:3: no share groups",
            "--- SKIP: B (0.0s)",
            "=== RUN   C",
            "panic: too much",
        ];
        let wanted = [
            Case::failed("A", "1: not 2 / and 3"),
            Case::skipped("B", "something / no share groups"),
            Case::failed("C", "the test did not finish: panic: too much"),
        ];
        assert_eq!(go(&lines, 2), wanted);
    }

    #[test]
    fn the_reason_of_a_go_crash_is_reported() {
        let begun = ["=== RUN   A", "    a_test.go:1: 1: not 2", "--- FAIL: A (0.0s)"];
        let panic =
            ["panic: too much [recovered]", "\tpanic: too much", "", "goroutine 7 [running]:"];
        let wanted =
            [Case::failed("A", "1: not 2"), Case::failed("suite", "panic: too much [recovered]")];
        assert_eq!(go(&[&begun[..], &panic[..]].concat(), 2), wanted);
        let signal = ["=== RUN   A", "SIGABRT: abort", "PC=0x1 m=0 sigcode=0"];
        assert_eq!(go(&signal, 2), [Case::failed("A", "the test did not finish: SIGABRT: abort")]);
        let without = ["one", "two", "", "=== RUN   A", "three", "four", " five", "FAIL"];
        let reason = "the test did not finish: exit status: 1 / two / three / four / five";
        assert_eq!(go(&without, 1), [Case::failed("A", reason)]);
    }

    #[test]
    fn a_cargo_test_that_prints_skipped_is_skipped() {
        let lines = [
            "test a ... ok",
            "test b ... ok",
            "test c ... FAILED",
            "",
            "successes:",
            "",
            "---- a stdout ----",
            "test x ... ok",
            "skipped: fio is not installed",
            "",
            "successes:",
            "    a",
            "    b",
            "",
            "failures:",
            "",
            "---- c stdout ----",
            "skipped: is what it should print",
            "",
            "failures:",
            "    c",
            "",
            "test result: FAILED. 2 passed; 1 failed",
            "test a ... ok",
            "successes:",
            "---- a stdout ----",
            "test result: ok. 1 passed",
        ];
        let mut tests = CargoTests::default();
        let shown = lines.into_iter().filter(|line| tests.line(line)).count();
        assert_eq!(shown, lines.len() - 12);
        let wanted = [
            Case::skipped("a", "fio is not installed"),
            Case::passed("b"),
            Case::failed("c", "see its output above"),
            // From the second test program.
            Case::passed("a"),
        ];
        assert_eq!(tests.finish(), wanted);
    }

    #[test]
    fn cargo_lines_become_cases() {
        assert_eq!(cargo_case("test a::b ... ok"), Some(Case::passed("a::b")));
        assert_eq!(
            cargo_case("test src/lib.rs - f (line 3) ... FAILED"),
            Some(Case::failed("src/lib.rs - f (line 3)", "see its output above"))
        );
        assert_eq!(
            cargo_case("test slow ... ignored, takes hours"),
            Some(Case::skipped("slow", "takes hours"))
        );
        assert_eq!(cargo_case("test result: ok. 3 passed; 0 failed"), None);
        assert_eq!(cargo_case("testing"), None);
    }

    #[test]
    fn the_report_ends_with_counts_and_lists_every_reason() {
        let mut report = Report::default();
        report.suite("one", || Ok(vec![Case::passed("a"), Case::skipped("b", "no loop devices")]));
        assert!(report.success());
        report.suite("two", || Err("the server did not start".into()));
        report.suite("three", || Ok(Vec::new()));
        assert!(!report.success());
        let text = report.to_string();
        assert!(text.contains("skipped: one: b: no loop devices\n"), "{text}");
        assert!(text.contains("FAILED: two: two: the server did not start\n"), "{text}");
        assert!(text.contains("FAILED: three: three: no tests were reported\n"), "{text}");
        assert!(text.ends_with("1 passed, 2 failed, 1 skipped\n"), "{text}");
    }
}
