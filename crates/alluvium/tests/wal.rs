//! `alluvium wal` with the built binary, on files.

mod support;

use std::fs::{self, File};

use support::log::{SLOTS, Target, append, writer};
use support::{contains, ok, ok_json, refused, write_target};

const MIB: usize = 1 << 20;
/// Position of the magic number of ext2, ext3 and ext4.
const EXT4: (usize, [u8; 2]) = (1080, [0x53, 0xef]);

#[test]
fn a_new_file_is_created_in_full_formatted_and_described() {
    let target = Target::new();
    let made =
        ok_json(&["wal", "format", target.arg(), "--capacity", "8MiB", "--node-id", "5", "--json"]);
    assert_eq!(fs::metadata(&target.path).unwrap().len(), 8 << 20);

    let seen = ok_json(&["wal", "inspect", target.arg(), "--json"]);
    assert_eq!(seen["header"]["wal_id"], made["header"]["wal_id"]);
    assert_eq!(seen["header"]["capacity_bytes"], 8 << 20);
    assert_eq!(seen["header"]["node_id"], 5);
    assert_eq!(seen["ring_bytes"], (8 << 20) - (64 << 10));
    assert_eq!(seen["used_bytes"], 0);
    assert_eq!(seen["target"]["kind"], "file");
    assert_eq!(seen["target"]["flushes"], true);
    assert_eq!(seen["slots"].as_array().unwrap().len(), 2);

    let text = ok(&["wal", "inspect", target.arg()]);
    contains(&text, &["SLOT", "1 (newest)", "8MiB", "flushed", "usage", "origin", "closed"]);
}

#[test]
fn format_overwrites_data_only_with_force() {
    let target = Target::new();
    write_target(&target.path, 8 * MIB, EXT4.0, &EXT4.1);
    let said = refused(1, &["wal", "format", target.arg()]);
    contains(&said, &[target.arg(), "ext", "--force"]);
    assert_eq!(fs::read(&target.path).unwrap()[EXT4.0..EXT4.0 + 2], EXT4.1, "nothing is written");

    let first = ok_json(&["wal", "format", target.arg(), "--force", "--json"]);
    let said = refused(1, &["wal", "format", target.arg()]);
    contains(&said, &[target.arg(), "--force"]);
    let second = ok_json(&["wal", "format", target.arg(), "--force", "--json"]);
    assert_ne!(first["header"]["wal_id"], second["header"]["wal_id"]);
}

#[test]
fn a_target_smaller_than_asked_is_refused_with_both_sizes() {
    let target = Target::new();
    write_target(&target.path, 8 * MIB, 0, &[]);
    let said = refused(1, &["wal", "format", target.arg(), "--capacity", "16MiB"]);
    contains(&said, &[target.arg(), "of 16MiB does not fit into 8MiB."]);
    // Nor does any file system have that much space.
    let target = Target::new();
    let said = refused(1, &["wal", "format", target.arg(), "--capacity", "1024TiB"]);
    contains(&said, &[target.arg(), "no space for a file of 1024TiB"]);
    assert!(!target.path.exists());
}

#[test]
fn targets_without_a_log_are_described() {
    let target = Target::new();
    let missing = refused(1, &["wal", "inspect", target.arg()]);
    contains(&missing, &[target.arg(), "no such file"]);

    write_target(&target.path, MIB, 0, &[]);
    for command in ["inspect", "dump"] {
        let blank = refused(1, &["wal", command, target.arg()]);
        contains(&blank, &[target.arg(), "not formatted"]);
    }

    write_target(&target.path, MIB, EXT4.0, &EXT4.1);
    let foreign = refused(1, &["wal", "inspect", target.arg()]);
    contains(&foreign, &[target.arg(), "ext", "not an Alluvium WAL"]);
}

#[test]
fn one_damaged_header_is_survived_and_two_are_refused() {
    let target = Target::formatted();
    append(&target.path, &[b"one"], true);
    let before = ok_json(&["wal", "inspect", target.arg(), "--json"]);
    let newest = usize::try_from(before["newest_slot"].as_u64().unwrap()).unwrap();
    target.damage(SLOTS[newest] + 60);
    let after = ok_json(&["wal", "inspect", target.arg(), "--json"]);
    assert_eq!(after["newest_slot"], 1 - newest);
    assert_eq!(after["slots"][newest]["state"], "damaged");
    target.damage(SLOTS[1 - newest] + 60);
    let said = refused(1, &["wal", "inspect", target.arg()]);
    contains(&said, &[target.arg(), "damaged", "slot 0", "slot 1"]);
}

#[test]
fn records_are_listed_with_payloads_up_to_the_limit() {
    let target = Target::formatted();
    append(&target.path, &[b"one", b"\x00\xff", b"three"], true);

    let lines = ok(&["wal", "dump", target.arg(), "--json", "--payload", "hex"]);
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect();
    let payloads: Vec<&str> =
        lines.iter().filter_map(|line| line["record"]["payload"].as_str()).collect();
    assert_eq!(payloads, ["6f6e65", "00ff", "7468726565"]);
    let scan = &lines.last().unwrap()["scan"];
    assert_eq!((&scan["records"], &scan["clean_shutdown"]), (&3.into(), &true.into()));

    let limited = ok(&["wal", "dump", target.arg(), "--json", "--limit", "2"]);
    assert_eq!(limited.lines().count(), 2);
    assert!(!limited.contains("payload\""), "payloads are shown on request only: {limited}");

    let text = ok(&["wal", "dump", target.arg(), "--payload", "hex"]);
    contains(&text, &["OFFSET", "7468726565", "3 records"]);

    let seen = ok_json(&["wal", "inspect", target.arg(), "--scan", "--json"]);
    assert_eq!(seen["scan"]["records"], 3);

    // Each record has the epoch of its writer.
    append(&target.path, &[b"four"], true);
    let lines = ok(&["wal", "dump", target.arg(), "--json"]);
    let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let epochs: Vec<_> = lines.filter_map(|line| line["record"]["epoch"].as_u64()).collect();
    assert_eq!(epochs, [1, 1, 1, 2]);
    let text = ok(&["wal", "dump", target.arg()]);
    let columns = |line: usize| text.lines().nth(line).unwrap().split_whitespace().nth(2);
    assert_eq!((columns(0), columns(1), columns(4)), (Some("EPOCH"), Some("1"), Some("2")));
}

#[test]
fn damage_is_reported_with_its_position_and_an_exit_code() {
    let target = Target::formatted();
    append(&target.path, &[b"first", &[7; 9000], b"last"], true);
    let lines = ok(&["wal", "dump", target.arg(), "--json"]);
    let second: serde_json::Value = serde_json::from_str(lines.lines().nth(1).unwrap()).unwrap();
    let offset = second["record"]["offset"].as_u64().unwrap();
    // The ring starts at 64 KiB, and the log is in its first lap.
    let at = (64 << 10) + usize::try_from(offset).unwrap();
    target.damage(at + 100);

    let output = support::run(&["wal", "inspect", target.arg(), "--scan", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let seen: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("JSON in spite of the damage");
    assert_eq!(seen["scan"]["damage"][0]["start_offset"], offset);
    assert_eq!(seen["scan"]["damage"][0]["device_at"], at);
    contains(&support::stderr(&output), &["damaged", &offset.to_string()]);

    let dump = support::run(&["wal", "dump", target.arg()]);
    assert_eq!(dump.status.code(), Some(1));
    contains(&String::from_utf8_lossy(&dump.stdout), &["2 records"]);
}

#[test]
fn a_log_in_use_can_be_read_and_not_formatted() {
    let target = Target::formatted();
    let wal = writer(&target.path);
    wal.append(&[b"live"]).unwrap().wait().unwrap();

    let said = refused(1, &["wal", "format", target.arg(), "--force"]);
    contains(&said, &[target.arg(), "in use"]);
    let seen = ok_json(&["wal", "inspect", target.arg(), "--scan", "--json"]);
    assert_eq!(seen["header"]["clean_shutdown"], false);
    assert_eq!(seen["scan"]["records"], 1);
    contains(&ok(&["wal", "dump", target.arg(), "--payload", "hex"]), &["6c697665"]);
    wal.close().unwrap();
}

#[test]
fn reading_changes_no_byte() {
    let target = Target::formatted();
    append(&target.path, &[b"one"], false);
    let before = fs::read(&target.path).unwrap();
    ok(&["wal", "inspect", target.arg(), "--scan"]);
    ok(&["wal", "dump", target.arg()]);
    assert!(fs::read(&target.path).unwrap() == before);
}

const QUICK: [&str; 8] =
    ["--window", "2MiB", "--record", "1KiB", "--duration", "50ms", "--warmup", "10ms"];

#[test]
fn the_bench_measures_and_removes_what_it_created() {
    let target = Target::new();
    let mut arguments =
        vec!["wal", "bench", "--target", target.arg(), "--capacity", "8MiB", "--json"];
    arguments.extend(QUICK);
    arguments.extend(["--record", "1MiB", "--outstanding", "1", "--outstanding", "64"]);
    let report = ok_json(&arguments);
    assert!(!target.path.exists(), "the file was created by the bench");
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in &cases[..2] {
        let case = &case["measured"];
        assert!(case["records"].as_u64().unwrap() > 0, "{case}");
        assert!(case["p50_us"].as_f64() <= case["max_us"].as_f64(), "{case}");
        assert!(case["cpu_us_per_record"].as_f64().unwrap() > 0.0, "{case}");
        assert!(case["flushes_per_second"].as_f64().unwrap() > 0.0, "a file is flushed: {case}");
    }
    // The largest record is half of the window, less the overhead.
    for case in &cases[2..] {
        contains(case["skipped"]["reason"].as_str().unwrap(), &["2MiB"]);
    }
}

#[test]
fn the_bench_fits_its_window_to_the_ring_and_refuses_one_that_does_not_fit() {
    let target = Target::new();
    let mut arguments = vec!["wal", "bench", "--target", target.arg(), "--capacity", "8MiB"];
    contains(&refused(2, &[&arguments[..], &["--window", "8MiB"]].concat()), &["--window", "8MiB"]);
    contains(&refused(2, &[&arguments[..], &["--duration", "0s"]].concat()), &["--duration"]);
    arguments.extend(["--outstanding", "1", "--json"]);
    arguments.extend(&QUICK[2..]);
    let report = ok_json(&arguments);
    let half_of_the_ring = (8 * MIB as u64 - (64 << 10)) / 2;
    assert_eq!(report["window_bytes"], half_of_the_ring);
}

#[test]
fn an_invalid_capacity_is_refused_before_a_file_is_created() {
    let target = Target::new();
    for capacity in ["100KiB", "1000001"] {
        let said = refused(2, &["wal", "format", target.arg(), "--capacity", capacity]);
        contains(&said, &["--capacity", "4KiB", "192KiB"]);
        assert!(!target.path.exists());
    }
}

#[test]
fn the_bench_overwrites_only_what_it_may() {
    let target = Target::new();
    write_target(&target.path, 8 * MIB, EXT4.0, &EXT4.1);
    let mut arguments = vec!["wal", "bench", "--target", target.arg(), "--outstanding", "1"];
    arguments.extend(QUICK);
    let said = refused(1, &arguments);
    contains(&said, &[target.arg(), "ext", "--force"]);
    assert_eq!(fs::read(&target.path).unwrap()[EXT4.0..EXT4.0 + 2], EXT4.1);

    arguments.push("--force");
    let text = ok(&arguments);
    contains(&text, &["1KiB", "p99.9", "MiB/s", "io"]);
    assert!(target.path.exists(), "the file was there before the bench");
}

#[test]
fn without_fio_the_bench_names_the_package() {
    let target = Target::new();
    let output = support::alluvium()
        .args(["wal", "bench", "--fio", "--target", target.arg()])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    contains(&support::stderr(&output), &["apt-get install fio"]);
    assert!(!target.path.exists());
}

#[test]
fn every_pairing_is_compared_with_fio() {
    if std::process::Command::new("fio").arg("--version").output().is_err() {
        eprintln!("skipped: fio is not installed");
        return;
    }
    let target = Target::new();
    let report = ok_json(&[
        "wal",
        "bench",
        "--target",
        target.arg(),
        "--capacity",
        "160MiB",
        "--fio",
        "--only-pairs",
        "--pairs",
        "1",
        "--duration",
        "100ms",
        "--warmup",
        "10ms",
        "--json",
    ]);
    assert!(report["fio_version"].as_str().unwrap().starts_with("fio"));
    let comparisons = report["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 8);
    for comparison in comparisons {
        assert!(comparison["median"].as_f64().unwrap() > 0.0, "{comparison}");
        assert_eq!(comparison["rounds"].as_array().unwrap().len(), 1);
    }
    assert!(!target.path.exists());
}

#[test]
fn a_closed_pipe_ends_the_dump_quietly() {
    let target = Target::formatted();
    append(&target.path, &[&[1; 64][..]; 50], true);
    let mut dump = support::alluvium()
        .args(["wal", "dump", target.arg(), "--payload", "hex"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Closed before anything was read.
    drop(dump.stdout.take());
    let output = dump.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", support::stderr(&output));
    assert_eq!(support::stderr(&output), "");
}

#[test]
fn the_help_states_defaults() {
    for (command, defaults) in [
        ("format", &["2GiB", "--force", "[default: 1]"][..]),
        ("inspect", &["--scan", "--json"]),
        ("dump", &["--limit", "[default: none]"]),
        (
            "bench",
            &[
                "[default: 3s]",
                "Default: 64MiB, or half of the ring",
                "[default: auto]",
                "[default: 8]",
                "--fio",
            ],
        ),
    ] {
        contains(&support::help(&["wal", command, "--help"]), defaults);
    }
}

#[test]
fn a_directory_is_not_a_target() {
    let directory = tempfile::tempdir().unwrap();
    let said = refused(1, &["wal", "inspect", directory.path().to_str().unwrap()]);
    contains(&said, &["directory"]);
    drop(File::create(directory.path().join("empty")).unwrap());
    let empty = directory.path().join("empty");
    let said = refused(1, &["wal", "format", empty.to_str().unwrap()]);
    contains(&said, &["length of 0B"]);
}
