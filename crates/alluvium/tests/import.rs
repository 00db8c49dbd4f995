//! `alluvium import` from another server, with the built binary. `cargo xtask import` runs it from
//! a cluster of Apache Kafka.

mod support;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use support::parts::Parts;
use support::produce::{consume, produce};
use support::{Server, alluvium, contains, ok, ok_json, refused, run, until};

/// Kafka's code of a request that a policy does not allow.
const POLICY_VIOLATION: i16 = 44;

/// A source and a target.
struct Sides {
    _parts: [Parts; 2],
    from: Server,
    to: Server,
}

impl Sides {
    fn start() -> Self {
        let parts = [Parts::new(), Parts::new()];
        let [from, to] = [0, 1]
            .map(|side| Server::start_command(parts[side].command("data", "wal", "objects", &[])));
        Self { _parts: parts, from, to }
    }

    /// With topics at the source.
    fn with(topics: &[&str]) -> Self {
        let sides = Self::start();
        for topic in topics {
            ok(&sides.at_source(&["topic", "create", topic]));
        }
        sides
    }

    /// The words of an import.
    fn import<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let sides = ["import", "--from", &self.from.kafka, "--bootstrap", &self.to.kafka];
        [&sides[..], more].concat()
    }

    fn at_source<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        [words, &["--bootstrap", &self.from.kafka]].concat()
    }

    fn at_target<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        [words, &["--bootstrap", &self.to.kafka]].concat()
    }

    fn produce(&self, topic: &str, values: &[&'static str]) {
        for value in values {
            assert_eq!(produce(&self.from.kafka, topic, value.as_bytes()).unwrap(), 0);
        }
    }

    fn follow(&self) -> Following {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = alluvium();
        command.args(self.import(&["--follow"])).stdout(Stdio::null());
        let child = command.stderr(File::create(&log).unwrap()).spawn().unwrap();
        Following { child, log, _directory: directory }
    }

    fn follow_until_caught_up(&self) -> Following {
        let following = self.follow();
        until("it has caught up", || following.errors().contains("caught up"));
        following
    }

    /// The state of a topic after an import with this exit code.
    fn state(&self, code: i32, topic: &str, more: &[&str]) -> String {
        let output = run(&self.import(&[&["--json"], more].concat()));
        assert_eq!(output.status.code(), Some(code), "{}", support::stderr(&output));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["topics"][topic]["state"].as_str().unwrap_or("none").to_owned()
    }
}

#[test]
fn topics_are_imported_once_and_existing_ones_are_left_alone() {
    let sides = Sides::start();
    let words = ["topic", "create", "a", "--partitions", "2", "--config", "retention.ms=-1"];
    ok(&sides.at_source(&words));
    ok(&sides.at_source(&["topic", "create", "b"]));
    sides.produce("a", &["1", "2", "3"]);
    sides.produce("b", &["x"]);

    contains(&refused(2, &sides.import(&["--topics", "c"])), &["has no topic c: it has a, b"]);
    contains(&refused(2, &sides.import(&["--topics", ""])), &["--topics names no topic"]);
    let unknown = refused(2, &sides.import(&["--exclude-topics", "a,bb*"]));
    contains(&unknown, &["--exclude-topics bb*: the source has no such topic"]);
    contains(
        &refused(1, &["import", "--from", "127.0.0.1:1", "--bootstrap", &sides.to.kafka]),
        &["127.0.0.1:1", "cannot connect"],
    );
    assert_eq!(sides.state(0, "a", &["--dry-run"]), "planned");
    assert!(!ok(&sides.at_target(&["topic", "list"])).contains("a "));

    assert_eq!(sides.state(0, "a", &["--topics", "a*"]), "opened");
    assert_eq!(consume(&sides.to.kafka, "a"), ["1", "2", "3"]);
    let described = ok_json(&sides.at_target(&["topic", "describe", "a", "--json"]));
    assert_eq!(described[0]["configs"]["retention.ms"], "-1");
    assert_eq!(sides.state(0, "a", &["--topics", "a"]), "complete");
    assert_eq!(sides.state(0, "a", &["--dry-run"]), "complete");
    assert_eq!(sides.state(0, "a", &["--topics", "a", "--verify"]), "compared");
    assert_eq!(sides.state(3, "b", &["--topics", "b", "--verify"]), "missing");

    // It is an ordinary topic now, and no import changes it.
    assert_eq!(produce(&sides.to.kafka, "a", b"4").unwrap(), 0);
    sides.produce("a", &["other", "5"]);
    assert_eq!(sides.state(3, "a", &[]), "exists");
    assert_eq!(consume(&sides.to.kafka, "a"), ["1", "2", "3", "4"]);
    assert_eq!(consume(&sides.to.kafka, "b"), ["x"]);
    let output = run(&sides.import(&["--topics", "a", "--verify", "--json"]));
    assert_eq!(output.status.code(), Some(3));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let partition = &report["topics"]["a"]["partitions"][0];
    assert_eq!((&partition["compared"]["different"], &partition["behind"]), (&1.into(), &1.into()));
    assert_eq!(partition["compared"]["first"], 3);
}

#[test]
fn a_topic_of_another_import_is_in_the_way_even_if_it_ends_at_the_same_offset() {
    let sides = Sides::start();
    ok(&sides.at_source(&["topic", "create", "a"]));
    ok(&sides.at_source(&["topic", "create", "b"]));
    let other = ["topic", "create", "a", "--config", "alluvium.import=another source"];
    ok(&sides.at_target(&other));
    assert_eq!(sides.state(0, "a", &["--dry-run"]), "exists");
    assert_eq!(sides.state(3, "a", &[]), "exists");
    let output = ok(&sides.import(&["--exclude-topics", "a"]));
    contains(&output, &["b", "complete"]);
    let compared = ok(&sides.import(&["--topics", "a", "--verify"]));
    contains(&compared, &["topic a is still being imported"]);
}

#[test]
fn an_import_follows_its_source_and_goes_on_after_a_kill() {
    let sides = Sides::start();
    ok(&sides.at_source(&["topic", "create", "a"]));
    sides.produce("a", &["1"]);
    for (value, signal) in [("2", Signal::KILL), ("3", Signal::INT), ("4", Signal::TERM)] {
        let mut following = sides.follow();
        sides.produce("a", &[value]);
        until("the record is copied", || {
            let listed = ok(&sides.at_target(&["topic", "list"]));
            listed.contains("a ") && consume(&sides.to.kafka, "a").iter().any(|it| it == value)
        });
        let refusal = produce(&sides.to.kafka, "a", b"too early").unwrap();
        assert_eq!(refusal, POLICY_VIOLATION);
        let status = following.end(signal);
        assert_eq!(status.success(), signal != Signal::KILL, "{status}");
    }
    sides.produce("a", &["5"]);
    assert_eq!(sides.state(0, "a", &[]), "opened");
    assert_eq!(consume(&sides.to.kafka, "a"), ["1", "2", "3", "4", "5"]);
    assert_eq!(produce(&sides.to.kafka, "a", b"6").unwrap(), 0);
}

#[test]
fn a_topic_that_is_created_again_at_the_source_is_another_one() {
    let sides = Sides::start();
    ok(&sides.at_source(&["topic", "create", "a"]));
    sides.produce("a", &["1"]);
    let mut following = sides.follow();
    until("the record is copied", || {
        let listed = ok(&sides.at_target(&["topic", "list"]));
        listed.contains("a ") && consume(&sides.to.kafka, "a") == ["1"]
    });
    ok(&sides.at_source(&["topic", "delete", "a"]));
    ok(&sides.at_source(&["topic", "create", "a"]));
    sides.produce("a", &["other", "2"]);
    until("the import says so", || following.errors().contains("it is left alone"));
    // The old copy is in the way until it is deleted.
    assert_eq!(consume(&sides.to.kafka, "a"), ["1"]);
    ok(&sides.at_target(&["topic", "delete", "a"]));
    until("the new topic is copied", || {
        let listed = ok(&sides.at_target(&["topic", "list"]));
        listed.contains("a ") && consume(&sides.to.kafka, "a") == ["other", "2"]
    });
    following.end(Signal::INT);
    assert_eq!(sides.state(0, "a", &[]), "opened");
}

#[test]
fn an_import_that_follows_leaves_topics_alone_that_were_opened() {
    let sides = Sides::with(&["a", "empty"]);
    sides.produce("a", &["1"]);
    let mut following = sides.follow_until_caught_up();
    assert_eq!(sides.state(0, "a", &[]), "opened");
    // What producers do to the topics at either side is no reason to delete them.
    assert_eq!(produce(&sides.to.kafka, "a", b"at the target").unwrap(), 0);
    sides.produce("a", &["at the source"]);
    sides.produce("empty", &["at the source"]);
    for topic in ["a", "empty"] {
        let message = format!("topic {topic}: it was opened at the target");
        until("it has noticed that", || following.errors().contains(&message));
    }
    sides.produce("empty", &["another one"]);
    let passes = || following.errors().matches("caught up").count();
    let before = passes();
    until("it has copied again", || passes() > before);
    assert_eq!(consume(&sides.to.kafka, "a"), ["1", "at the target"]);
    assert!(consume(&sides.to.kafka, "empty").is_empty());
    assert_eq!(following.end(Signal::INT).code(), Some(3), "{}", following.errors());
    assert!(!following.errors().contains("elete"), "{}", following.errors());
}

#[test]
fn a_topic_that_is_deleted_at_the_source_is_not_forgotten() {
    let sides = Sides::with(&["a", "b"]);
    let mut following = sides.follow_until_caught_up();
    ok(&sides.at_source(&["topic", "delete", "a"]));
    until("it says so", || following.errors().contains("topic a: the source does not have"));
    assert_eq!(following.end(Signal::INT).code(), Some(3), "{}", following.errors());
    assert_eq!(sides.state(3, "a", &[]), "blocked");
    assert_eq!(sides.state(0, "b", &["--topics", "b"]), "complete");
}

#[test]
fn more_partitions_at_the_target_block_only_their_topic() {
    let sides = Sides::with(&["a", "b"]);
    let mut following = sides.follow_until_caught_up();
    following.end(Signal::INT);
    let described = ok_json(&sides.at_target(&["topic", "describe", "a", "--json"]));
    let source = described[0]["configs"]["alluvium.import"].as_str().unwrap().to_owned();
    ok(&sides.at_target(&["topic", "delete", "a"]));
    let setting = format!("alluvium.import={source}");
    let words = ["topic", "create", "a", "--partitions", "2", "--config", &setting];
    ok(&sides.at_target(&words));
    assert_eq!(sides.state(0, "a", &["--dry-run"]), "blocked");
    let output = run(&sides.import(&[]));
    assert_eq!(output.status.code(), Some(3));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    contains(&text, &["topic a: it has 2 partitions at the target, and 1 at the source", "open"]);
    assert_eq!(sides.state(0, "b", &["--topics", "b"]), "complete");
}

/// An import that follows. It is killed when it is dropped.
struct Following {
    child: Child,
    log: PathBuf,
    _directory: tempfile::TempDir,
}

impl Following {
    /// What it has logged.
    fn errors(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    fn end(&mut self, signal: Signal) -> ExitStatus {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
