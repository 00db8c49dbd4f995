//! `alluvium wal verify` and `inspect` on intact and damaged logs and on other data, and what every
//! tool reports about an unusable target.

mod support;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use rustix::process::Signal;
use serde_json::Value;
use support::log::{DATA_START, SLOTS, Target, append, append_at_once, writer};
use support::produce::produce;
use support::{Server, contains, ok, ok_json, refused, run, stderr, write_target};

const MIB: usize = 1 << 20;

/// Runs `wal verify --json`; returns exit code, output and standard error.
fn verify(target: &Target) -> (Option<i32>, Value, String) {
    let output = run(&["wal", "verify", "--target", target.arg(), "--json"]);
    let seen = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), seen, stderr(&output))
}

/// The beginning and end of each record of a log.
fn places(target: &Target) -> Vec<(u64, u64)> {
    let lines = ok(&["wal", "dump", target.arg(), "--json"]);
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let place = |line: Value| {
        Some((line["record"]["offset"].as_u64()?, line["record"]["end_offset"].as_u64()?))
    };
    lines.filter_map(place).collect()
}

/// The device offset, in the first lap of a ring that was never resized.
fn on_device(offset: u64) -> usize {
    DATA_START + usize::try_from(offset).unwrap()
}

#[test]
fn an_intact_log_is_reported_as_intact() {
    let target = Target::formatted();
    for close in [true, false] {
        append(&target.path, &[b"one", &[2; 9000], &[3; 300_000]], close);
        let (code, seen, said) = verify(&target);
        assert_eq!((code, said.as_str()), (Some(0), ""));
        assert_eq!(
            (&seen["intact"], &seen["scan"]["damage"]),
            (&true.into(), &Value::Array(vec![]))
        );
        assert_eq!(seen["header"]["clean_shutdown"], close);
    }
    assert_eq!(verify(&target).1["scan"]["records"], 6);
    let text = ok(&["wal", "verify", target.arg()]);
    contains(&text, &["SLOT", "records     6", "not closed", "intact: every checksum is correct"]);
}

#[test]
fn every_gap_is_listed_with_its_position_and_reason() {
    let target = Target::formatted();
    append(&target.path, &[&[1; 5000][..]; 40], true);
    let places = places(&target);
    let (payload, header, lost) = (places[3], places[10], places[20].0..places[24].0);
    target.damage(on_device(payload.0) + 1000);
    target.damage(on_device(header.0) + 9);
    target.change(|bytes| bytes[on_device(lost.start)..on_device(lost.end)].fill(0));

    let (code, seen, said) = verify(&target);
    assert_eq!(code, Some(1));
    assert_eq!((&seen["intact"], &seen["scan"]["records"]), (&false.into(), &34.into()));
    let damage = seen["scan"]["damage"].as_array().unwrap();
    let expected = [
        (payload, "payload with a wrong checksum"),
        (header, "record header with a wrong checksum"),
        ((lost.start, lost.end), "zeros where a record should be"),
    ];
    assert_eq!(damage.len(), expected.len());
    for (damage, ((start, end), reason)) in damage.iter().zip(expected) {
        assert_eq!((&damage["start_offset"], &damage["end_offset"]), (&start.into(), &end.into()));
        assert_eq!(damage["device_at"], on_device(start));
        assert_eq!(damage["reason"], reason);
    }
    contains(&said, &[target.arg(), "damaged at 3 places", &payload.0.to_string()]);

    let text = run(&["wal", "verify", target.arg()]);
    assert_eq!(text.status.code(), Some(1));
    let text = String::from_utf8(text.stdout).unwrap();
    contains(&text, &["DAMAGED FROM", "AT DEVICE BYTE", &on_device(header.0).to_string()]);
    assert!(!text.contains("intact"), "{text}");
}

#[test]
fn unacknowledged_records_are_counted_and_are_not_damage() {
    let target = Target::formatted();
    let hole = append_at_once(&target.path, &[&[5; 1000][..]; 9])[4].start;
    target.change(|bytes| bytes[on_device(hole)..][..500].fill(0));
    let (code, seen, _) = verify(&target);
    assert_eq!((code, &seen["scan"]["end_offset"]), (Some(0), &hole.into()));
    assert_eq!(
        (&seen["scan"]["records"], &seen["scan"]["dropped_records"]),
        (&4.into(), &4.into())
    );
    contains(
        &ok(&["wal", "verify", target.arg()]),
        &["4 records behind the end, never acknowledged"],
    );
}

#[test]
fn a_damaged_header_is_named_with_what_remains() {
    let target = Target::formatted();
    append(&target.path, &[b"one"], true);
    let intact = fs::read(&target.path).unwrap();
    for slot in 0..2 {
        fs::write(&target.path, &intact).unwrap();
        target.damage(SLOTS[slot] + 60);
        let (code, seen, said) = verify(&target);
        assert_eq!((code, &seen["slots"][slot]["state"]), (Some(1), &"damaged".into()));
        let (lost, remains) =
            (format!("header slot {slot} is lost"), format!("slot {} is sufficient", 1 - slot));
        contains(&said, &[&lost, "checksum", &remains]);
        // Only a copy is lost, so the tools continue, and report it.
        contains(&ok(&["wal", "inspect", target.arg()]), &[&lost, &remains]);
        assert_eq!(places(&target).len(), 1);
    }
    ok(&["wal", "recover", target.arg()]);
    assert_eq!(verify(&target).0, Some(0), "the next writer restores both");

    for slot in SLOTS {
        target.damage(slot + 60);
    }
    for command in ["inspect", "dump", "verify", "recover"] {
        let said = refused(1, &["wal", command, target.arg()]);
        contains(
            &said,
            &[target.arg(), "both copies", "slot 0: damaged: checksum", "slot 1", "32768"],
        );
    }
}

#[test]
fn other_data_is_described_and_not_changed() {
    let target = Target::formatted();
    append(&target.path, &[b"one"], true);
    let log = fs::read(&target.path).unwrap();
    let newer = |at: usize| {
        let mut bytes = log.clone();
        let slot = &mut bytes[..4096];
        slot[at] = 7;
        let crc = crc32c::crc32c(&slot[..124]);
        slot[124..128].copy_from_slice(&crc.to_le_bytes());
        bytes
    };
    let with = |at: usize, what: &[u8]| {
        let mut bytes = vec![0; 8 * MIB];
        bytes[at..at + what.len()].copy_from_slice(what);
        bytes
    };
    let mut of_two_logs = log.clone();
    of_two_logs.copy_within(0..4096, SLOTS[1]);
    let cases: [(Vec<u8>, &[&str]); 9] = [
        (vec![0; 8 * MIB], &["not formatted"]),
        (with(0, b"XFSB"), &["an xfs file system", "not an Alluvium WAL"]),
        (with(1080, &[0x53, 0xef]), &["ext2, ext3 or ext4"]),
        (with(5000, b"what"), &["not formatted"]),
        (with(3, b"what"), &["unknown data", "byte 3"]),
        (newer(8), &["format version 7", "a later version of alluvium"]),
        (newer(12), &["flags 0x7", "a later version of alluvium"]),
        (log[..4 * MIB].to_vec(), &["needs 8MiB", "only 4MiB"]),
        (log[..128 << 10].to_vec(), &["128KiB", "192KiB"]),
    ];
    for (content, words) in cases {
        fs::write(&target.path, &content).unwrap();
        for (command, code) in [("inspect", 1), ("dump", 1), ("verify", 2), ("recover", 1)] {
            contains(&refused(code, &["wal", command, target.arg()]), words);
        }
        let said = refused(1, &["wal", "resize", target.arg(), "--capacity", "16MiB"]);
        contains(&said, words);
        assert!(fs::read(&target.path).unwrap() == content, "nothing is written: {words:?}");
    }
    // There is a log, but it is unknown which of the two.
    fs::write(&target.path, of_two_logs).unwrap();
    contains(&refused(1, &["wal", "verify", target.arg()]), &["contradict", "generation"]);
}

/// Each tool on a target that cannot be opened, with its exit code.
fn tools(path: &str) -> [(Vec<&str>, i32); 5] {
    [
        (vec!["wal", "inspect", path], 1),
        (vec!["wal", "dump", path], 1),
        (vec!["wal", "verify", "--target", path], 2),
        (vec!["wal", "recover", "--target", path], 1),
        (vec!["wal", "resize", "--target", path, "--capacity", "1MiB"], 1),
    ]
}

#[test]
fn targets_that_are_no_file_or_block_device_are_named() {
    let target = Target::new();
    let directory = target.path.parent().unwrap().to_str().unwrap();
    let pipe = target.path.with_extension("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    let cases = [
        (target.arg(), "no such file"),
        (directory, "is a directory, not a block device or regular file"),
        ("/dev/null", "is a character device"),
        (pipe.to_str().unwrap(), "is a pipe"),
    ];
    for (path, words) in cases {
        for (arguments, code) in tools(path) {
            contains(&refused(code, &arguments), &[path, words]);
        }
    }
    for (path, words) in &cases[1..] {
        contains(&refused(1, &["wal", "format", path]), &[path, words]);
    }
    assert!(!target.path.exists());
}

#[test]
fn exactly_one_target_is_required() {
    for command in ["inspect", "dump", "verify", "recover", "format"] {
        contains(&refused(2, &["wal", command]), &["--target"]);
        contains(&refused(2, &["wal", command, "/a", "--target", "/b"]), &["cannot be used with"]);
    }
}

#[test]
fn a_log_in_use_can_be_read_and_not_changed() {
    let target = Target::formatted();
    let wal = writer(&target.path);
    wal.append(&[b"live"]).unwrap().wait().unwrap();
    let bytes = fs::read(&target.path).unwrap();
    let (code, seen, _) = verify(&target);
    assert_eq!((code, &seen["scan"]["records"]), (Some(0), &1.into()));
    for command in
        [&["recover"][..], &["resize", "--capacity", "4MiB"], &["resize", "--capacity", "16MiB"]]
    {
        let arguments =
            [&["wal"], &command[..1], &["--target", target.arg()], &command[1..]].concat();
        contains(
            &refused(1, &arguments),
            &[target.arg(), "in use by another process", "stop the server"],
        );
    }
    assert!(fs::read(&target.path).unwrap() == bytes);
    wal.close().unwrap();
}

/// The binary, run by a user other than root, so that permissions apply.
struct Unprivileged {
    binary: std::path::PathBuf,
    root: bool,
}

impl Unprivileged {
    fn new(directory: &Path) -> Self {
        let binary = directory.join("alluvium");
        fs::copy(env!("CARGO_BIN_EXE_alluvium"), &binary).unwrap();
        fs::set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
        Self { binary, root: rustix::process::getuid().is_root() }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        loop {
            match self.command().args(arguments).output() {
                // While the copy was written, another test forked a process, which has the copy
                // open until it executes its program.
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {}
                output => return output.expect("the binary starts"),
            }
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        if self.root {
            command.uid(65534).gid(65534);
        }
        command
    }
}

#[test]
fn missing_permissions_are_reported() {
    let target = Target::formatted();
    let user = Unprivileged::new(target.path.parent().unwrap());
    fs::set_permissions(&target.path, PermissionsExt::from_mode(0o000)).unwrap();
    for (arguments, code) in tools(target.arg()) {
        let output = user.run(&arguments);
        contains(&stderr(&output), &[target.arg(), "permission denied"]);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
    }
    // Reading needs no write permission.
    fs::set_permissions(&target.path, PermissionsExt::from_mode(0o444)).unwrap();
    for (arguments, code) in tools(target.arg()) {
        let output = user.run(&arguments);
        if ["inspect", "dump", "verify"].contains(&arguments[1]) {
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        } else {
            assert_eq!(output.status.code(), Some(code));
            contains(&stderr(&output), &[target.arg(), "permission denied"]);
        }
    }
}

#[test]
fn inspect_shows_usage_owner_and_both_slots() {
    let target = Target::formatted();
    append(&target.path, &[&[1; 5000][..]; 3], true);
    let wal = writer(&target.path);
    let first_end = wal.appended().0;
    let mut ends = Vec::new();
    for _ in 0..3 {
        let append = wal.append(&[&[2; 5000]]).unwrap();
        ends.push(append.end());
        append.wait().unwrap();
    }
    wal.trim_and_mark(..ends[0], 77).wait().unwrap();
    wal.close().unwrap();
    let seen = ok_json(&["wal", "inspect", "--target", target.arg(), "--json"]);
    let header = &seen["header"];
    assert_eq!((&header["epoch"], &header["epoch_start_offset"]), (&2.into(), &first_end.into()));
    assert_eq!(header["trim_offset"], ends[0].0);
    let used = header["durable_offset"].as_u64().unwrap() - ends[0].0;
    assert_eq!((&seen["used_bytes"], &header["ring_origin_bytes"]), (&used.into(), &0.into()));
    assert_eq!(header["mark"], 77);
    assert_eq!(seen["oldest_timestamp_ms"], Value::Null, "the records are not batches");
    assert!(
        header["window_bytes"].as_u64() > Some(0) && header["written_at_ms"].as_u64() > Some(0)
    );
    // Closing is one write: the other slot still says that the log is open.
    let newest = usize::try_from(seen["newest_slot"].as_u64().unwrap()).unwrap();
    assert_eq!(seen["slots"][newest]["header"]["clean_shutdown"], true);
    assert_eq!(seen["slots"][1 - newest]["header"]["clean_shutdown"], false);

    let text = ok(&["wal", "inspect", target.arg()]);
    let entries = [
        "usage",
        "of 7.9 MiB",
        "log",
        "origin",
        "window",
        "epoch       2",
        "mark        77",
        "node",
        "written",
        "shutdown    closed",
    ];
    contains(&text, &entries);
    contains(&text, &["GENERATION", "(newest)", "open", "closed"]);
    assert!(!text.contains("oldest"), "{text}");
}

#[test]
fn the_age_of_the_oldest_batch_is_its_timestamp() {
    let data = tempfile::tempdir().unwrap();
    let server =
        Server::start(data.path(), &["--wal-capacity", "64MiB", "--upload-interval", "1h"]);
    ok(&["topic", "create", "t", "--bootstrap", &server.kafka]);
    assert_eq!(produce(&server.kafka, "t", b"one").unwrap(), 0);
    let wal = data.path().join("wal");
    let wal = wal.to_str().unwrap();
    // One millisecond after the Unix epoch.
    assert_eq!(ok_json(&["wal", "inspect", wal, "--json"])["oldest_timestamp_ms"], 1);
    contains(&ok(&["wal", "inspect", wal]), &["oldest", "by its producer's clock"]);
    server.stop(Signal::TERM);
}

#[test]
fn reading_needs_no_write_and_no_lock() {
    let target = Target::formatted();
    append(&target.path, &[b"one"], false);
    let before = fs::read(&target.path).unwrap();
    let lock = File::open(&target.path).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    for command in ["inspect", "dump", "verify"] {
        ok(&["wal", command, target.arg()]);
    }
    assert!(fs::read(&target.path).unwrap() == before);
}

#[test]
fn a_file_without_a_log_is_not_extended() {
    let target = Target::new();
    write_target(&target.path, MIB, 0, &[]);
    refused(1, &["wal", "resize", target.arg(), "--capacity", "2MiB"]);
    assert_eq!(target.len(), MIB as u64);
}
