//! `alluvium wal recover` and `resize`, and servers before and after them.

mod support;

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;

use rustix::process::Signal;
use serde_json::Value;
use support::log::{DATA_START, Target, append, append_at_once, payloads, writer};
use support::produce::produce;
use support::{Server, contains, help, ok, ok_json, refused, run, stderr, text};

fn inspect(path: &str) -> Value {
    ok_json(&["wal", "inspect", path, "--json"])
}

#[test]
fn recover_opens_the_next_epoch_and_closes_it() {
    let target = Target::formatted();
    append(&target.path, &[b"one", b"two"], false);
    let before = inspect(target.arg());
    assert_eq!(before["header"]["clean_shutdown"], false);

    let output = run(&["wal", "recover", "--target", target.arg()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let id = before["header"]["wal_id"].as_str().unwrap();
    let plan = stderr(&output);
    contains(&plan, &["taking over", target.arg(), id, "epoch 1", "not closed", "as epoch 2"]);
    let done = String::from_utf8(output.stdout).unwrap();
    contains(&done, &["records     2", "not closed", "now         epoch 2, closed"]);

    let after = inspect(target.arg());
    assert_eq!(
        (&after["header"]["clean_shutdown"], &after["header"]["epoch"]),
        (&true.into(), &2.into())
    );
    assert_eq!(after["header"]["wal_id"], id);
    assert_eq!(after["header"]["trim_offset"], before["header"]["trim_offset"]);
    assert_eq!(payloads(&target.path), [b"one", b"two"]);

    // Repeating it is harmless; also checks the JSON output.
    let again = ok_json(&["wal", "recover", "--target", target.arg(), "--json"]);
    assert_eq!((&again["before"]["epoch"], &again["header"]["epoch"]), (&2.into(), &3.into()));
    assert_eq!(
        (&again["scan"]["records"], &again["scan"]["clean_shutdown"]),
        (&2.into(), &true.into())
    );
    assert_eq!(again["header"]["clean_shutdown"], true);
}

#[test]
fn recover_fences_the_previous_owner() {
    let target = Target::formatted();
    // A claim holds on one machine only. On the other machine, the command runs on the current
    // content of the device.
    let wal = writer(&target.path);
    let one = wal.append(&[b"one"]).unwrap();
    let end = one.end();
    one.wait().unwrap();
    let copy = target.path.with_extension("copy");
    std::fs::copy(&target.path, &copy).unwrap();
    ok(&["wal", "recover", text(&copy)]);
    // It has written the two headers, and nothing else.
    let taken_over = std::fs::read(&copy).unwrap();
    let device = std::fs::File::options().write(true).open(&target.path).unwrap();
    device.write_all_at(&taken_over[..DATA_START], 0).unwrap();
    let error = wal.trim(..end).wait().unwrap_err();
    contains(&error.to_string(), &["taken over", "epoch 2"]);
}

/// Files have no reservations, and the command must not pretend otherwise.
#[test]
fn a_reservation_of_a_file_is_refused() {
    let target = Target::formatted();
    append(&target.path, &[b"one"], false);
    let before = std::fs::read(&target.path).unwrap();
    let said = refused(1, &["wal", "recover", target.arg(), "--reserve"]);
    contains(&said, &[target.arg(), "cannot be reserved", "regular file"]);
    assert!(std::fs::read(&target.path).unwrap() == before);

    let data = tempfile::tempdir().unwrap();
    let serve = ["serve", "--data-dir", text(data.path()), "--listen", "127.0.0.1:0"];
    let more = ["--admin-listen", "none", "--wal-capacity", "64MiB", "--wal-reserve"];
    contains(&refused(1, &[&serve[..], &more].concat()), &["cannot be reserved", "regular file"]);
}

#[test]
fn records_discarded_by_recover_stay_discarded() {
    let target = Target::formatted();
    let places = append_at_once(&target.path, &[&[5; 1000][..]; 9]);
    target.damage(DATA_START + usize::try_from(places[4].start).unwrap());
    let seen = ok_json(&["wal", "recover", target.arg(), "--json"]);
    assert_eq!(
        (&seen["scan"]["records"], &seen["scan"]["dropped_records"]),
        (&4.into(), &4.into())
    );
    let wal = writer(&target.path);
    let filling = wal.append(&[&[7; 1000]]).unwrap();
    assert_eq!(filling.end().0, places[5].start, "exactly up to the old records");
    filling.wait().unwrap();
    drop(wal);
    assert_eq!(payloads(&target.path).len(), 5);
}

#[test]
fn recover_reports_damage_and_closes_the_log() {
    let target = Target::formatted();
    append(&target.path, &[&[1; 5000], &[2; 5000], &[3; 5000]], false);
    target.damage(DATA_START + 6000);
    let output = run(&["wal", "recover", target.arg()]);
    assert_eq!(output.status.code(), Some(1));
    contains(&stderr(&output), &["taken over and closed, but", "damaged at 1 place", "5032"]);
    contains(
        &String::from_utf8(output.stdout).unwrap(),
        &["records     2", "payload with a wrong checksum"],
    );
    assert_eq!(inspect(target.arg())["header"]["clean_shutdown"], true);
}

#[test]
fn acknowledged_records_survive_recover() {
    let data = tempfile::tempdir().unwrap();
    let server =
        Server::start(data.path(), &["--wal-capacity", "64MiB", "--upload-interval", "1h"]);
    ok(&["topic", "create", "t", "--bootstrap", &server.kafka]);
    for _ in 0..3 {
        assert_eq!(produce(&server.kafka, "t", b"acknowledged").unwrap(), 0);
    }
    let wal = data.path().join("wal");
    contains(&refused(1, &["wal", "recover", text(&wal)]), &["in use", "stop the server"]);
    server.stop(Signal::KILL);
    ok(&["wal", "recover", text(&wal)]);
    let server = Server::start(data.path(), &[]);
    let topic = ok_json(&["topic", "describe", "t", "--bootstrap", &server.kafka, "--json"]);
    assert_eq!(topic[0]["partitions"][0]["high_watermark"], 3);
    server.stop(Signal::TERM);
}

#[test]
fn an_unused_log_is_left_to_its_first_server() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    ok(&["wal", "format", text(&wal), "--capacity", "64MiB"]);
    contains(&ok(&["wal", "recover", text(&wal)]), &["never opened", "nothing to take over"]);
    // A request for a fence is refused explicitly.
    let said = refused(1, &["wal", "recover", text(&wal), "--reserve"]);
    contains(&said, &["never opened", "nothing to take over", "was not reserved"]);
    ok(&["wal", "resize", text(&wal), "--capacity", "80MiB"]);
    Server::start(data.path(), &["--wal-capacity", "80MiB"]).stop(Signal::TERM);
}

/// A log of 8 MiB with 2 MiB of records across the end of its ring.
fn over_the_rings_end() -> Target {
    let target = Target::formatted();
    let wal = writer(&target.path);
    let mut ends = Vec::new();
    for i in 0..36_u8 {
        let append = wal.append(&[&[i; 250 << 10]]).unwrap();
        ends.push(append.end());
        append.wait().unwrap();
        if ends.len() > 8 {
            wal.trim(..ends[ends.len() - 9]).wait().unwrap();
        }
    }
    wal.close().unwrap();
    target
}

#[test]
fn a_log_in_a_file_grows_and_shrinks_with_its_file() {
    let target = over_the_rings_end();
    let mut expected = payloads(&target.path);
    assert_eq!(expected.len(), 8);
    for (capacity, mib) in [("16MiB", 16), ("3MiB", 3), ("8MiB", 8)] {
        let seen =
            ok_json(&["wal", "resize", "--target", target.arg(), "--capacity", capacity, "--json"]);
        assert_eq!(seen["header"]["capacity_bytes"], mib << 20);
        assert_eq!(seen["target"]["size_bytes"], mib << 20);
        assert_eq!(target.len(), mib << 20);
        assert_eq!(inspect(target.arg())["header"], seen["header"]);
        // The log can be written to.
        append(&target.path, &[b"more"], true);
        expected.push(b"more".to_vec());
        assert!(payloads(&target.path) == expected, "{capacity}");
        ok(&["wal", "verify", target.arg()]);
    }
    assert_ne!(inspect(target.arg())["header"]["ring_origin_bytes"], 0);

    let output = run(&["wal", "resize", target.arg(), "--capacity", "16MiB"]);
    contains(&stderr(&output), &["resizing", target.arg(), "from 8MiB to 16MiB"]);
    contains(&String::from_utf8(output.stdout).unwrap(), &["8MiB before, 16MiB now"]);
    let before = inspect(target.arg());
    contains(&ok(&["wal", "resize", target.arg(), "--capacity", "16MiB"]), &["already has 16MiB"]);
    assert_eq!(inspect(target.arg()), before);
}

/// The bytes behind the log were not written by it.
#[test]
fn a_file_that_is_longer_than_its_log_is_not_shortened() {
    let target = Target::new();
    support::write_target(&target.path, 8 << 20, 7 << 20, &[]);
    ok(&["wal", "format", target.arg(), "--capacity", "6MiB"]);
    target.change(|bytes| bytes[7 << 20..].fill(9));
    ok(&["wal", "resize", target.arg(), "--capacity", "4MiB"]);
    assert_eq!(target.len(), 8 << 20);
    target.change(|bytes| assert!(bytes[7 << 20..].iter().all(|byte| *byte == 9)));
}

/// A file that cannot contain a log is refused before it is modified.
#[test]
fn a_sparse_file_is_refused_unchanged() {
    let target = Target::formatted();
    std::fs::File::options().write(true).open(&target.path).unwrap().set_len(9 << 20).unwrap();
    for capacity in ["16MiB", "4MiB"] {
        let said = refused(1, &["wal", "resize", target.arg(), "--capacity", capacity]);
        contains(&said, &["is sparse", "a hole at byte 8388608"]);
        assert_eq!(target.len(), 9 << 20);
    }
}

/// A write beyond the limit on file sizes kills the process, in the middle of a page.
#[test]
fn a_size_beyond_the_limit_of_the_process_is_refused() {
    let target = Target::formatted();
    let limited = |arguments: &[&str]| {
        // In units of 512 bytes.
        let mut command = std::process::Command::new("sh");
        let binary = env!("CARGO_BIN_EXE_alluvium");
        command.args(["-c", "ulimit -f 20481 && exec \"$0\" \"$@\"", binary]).args(arguments);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{:?}: {}", output.status, stderr(&output));
        contains(&stderr(&output), &["cannot have 16MiB", "limited to 10486272B", "ulimit -f"]);
    };
    limited(&["wal", "resize", target.arg(), "--capacity", "16MiB"]);
    assert_eq!(target.len(), 8 << 20);
    let other = target.path.with_extension("other");
    limited(&["wal", "format", text(&other), "--capacity", "16MiB"]);
    assert!(!other.exists());
}

#[test]
fn records_that_do_not_fit_keep_the_log_as_it_is() {
    let target = over_the_rings_end();
    let before = std::fs::read(&target.path).unwrap();
    let said = refused(1, &["wal", "resize", target.arg(), "--capacity", "1MiB"]);
    contains(
        &said,
        &[target.arg(), "1MiB", "the log does not fit", "2.0 MiB of it", "Nothing was changed"],
    );
    contains(&said, &["Start the server and let it upload", "wal inspect", "another capacity"]);
    assert!(std::fs::read(&target.path).unwrap() == before);

    // The whole ring is in use, across its end: one more page is not enough space to move records.
    let wal = writer(&target.path);
    while wal.append(&[&[1; 250 << 10]]).map(|append| append.wait().unwrap()).is_ok() {}
    while wal.append(&[&[1; 100]]).map(|append| append.wait().unwrap()).is_ok() {}
    wal.close().unwrap();
    let before = std::fs::read(&target.path).unwrap();
    let larger = ((8 << 20) + 4096).to_string();
    let said = refused(1, &["wal", "resize", target.arg(), "--capacity", &larger]);
    contains(&said, &["8196KiB", "cannot be moved through free space", "Nothing was changed"]);
    assert!(std::fs::read(&target.path).unwrap() == before, "the file is unchanged");
    ok(&["wal", "resize", target.arg(), "--capacity", "24MiB"]);
}

#[test]
fn an_invalid_capacity_is_wrong_usage() {
    let target = Target::formatted();
    for capacity in ["100KiB", "1000001"] {
        let said = refused(2, &["wal", "resize", target.arg(), "--capacity", capacity]);
        contains(&said, &["--capacity", "4KiB", "192KiB"]);
    }
    let said = refused(1, &["wal", "resize", target.arg(), "--capacity", "1024TiB"]);
    contains(&said, &[target.arg(), "no space for a file of 1024TiB"]);
    assert_eq!(target.len(), 8 << 20);
}

#[test]
fn a_server_with_another_capacity_names_the_resize_command() {
    let data = tempfile::tempdir().unwrap();
    let server =
        Server::start(data.path(), &["--wal-capacity", "64MiB", "--upload-interval", "1h"]);
    ok(&["topic", "create", "t", "--bootstrap", &server.kafka]);
    assert_eq!(produce(&server.kafka, "t", b"acknowledged").unwrap(), 0);
    server.stop(Signal::TERM);
    let mut server = Server::start(data.path(), &["--wal-capacity", "96MiB"]);
    let said = std::mem::take(&mut server.log);
    contains(&said, &["wal-capacity is 96MiB", "64MiB and keeps it", "Remove the option"]);
    assert_eq!(inspect(text(&data.path().join("wal")))["header"]["capacity_bytes"], 64 << 20);
    server.stop(Signal::TERM);

    let (_, command) = said.split_once("`alluvium ").expect("the command to run");
    let command: Vec<&str> = command.split_once('`').unwrap().0.split(' ').collect();
    assert_eq!(command[..2], ["wal", "resize"]);
    ok(&command);
    let server = Server::start(data.path(), &["--wal-capacity", "96MiB"]);
    assert!(!server.log.contains("wal-capacity"), "{}", server.log);
    let topic = ok_json(&["topic", "describe", "t", "--bootstrap", &server.kafka, "--json"]);
    assert_eq!(topic[0]["partitions"][0]["high_watermark"], 1);
    server.stop(Signal::TERM);
}

#[test]
fn the_help_explains_consequences_and_exit_codes() {
    contains(
        &help(&["wal", "recover", "--help"]),
        &["next epoch", "are discarded", "detach the device", "docs/format/wal.md", "Exit codes"],
    );
    contains(
        &help(&["wal", "resize", "--help"]),
        &[
            "--capacity <SIZE>",
            "at least 192KiB",
            "written in full",
            "can be repeated",
            "--wal-capacity",
        ],
    );
    contains(
        &help(&["wal", "verify", "--help"]),
        &["Exit codes: 0", "1 it is damaged", "2 it could not"],
    );
}

/// The names of all fields, at any depth.
fn names(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                into.insert(name.clone());
                names(value, into);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| names(item, into)),
        _ => {}
    }
}

#[test]
fn the_document_has_every_field_and_no_other() {
    let target = Target::new();
    let mut printed = BTreeSet::new();
    let mut print = |arguments: &[&str]| {
        let output = run(&[&["wal"], arguments, &["--target", target.arg(), "--json"]].concat());
        for value in serde_json::Deserializer::from_slice(&output.stdout).into_iter() {
            names(&value.unwrap(), &mut printed);
        }
    };
    print(&["format", "--capacity", "8MiB"]);
    append(&target.path, &[&[1; 5000], &[2; 5000]], false);
    target.damage(DATA_START + 1000);
    for command in
        [&["inspect", "--scan"][..], &["dump", "--payload", "hex"], &["verify"], &["recover"]]
    {
        print(command);
    }
    print(&["resize", "--capacity", "4MiB"]);

    let document = include_str!("../../../docs/wal-tools.md");
    let (_, section) = document.split_once("## JSON").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let undocumented: Vec<_> =
        printed.iter().filter(|name| !section.contains(&format!("`{name}`"))).collect();
    assert!(undocumented.is_empty(), "{undocumented:?}");
    // Field names are in the first column of each table, except in the first table: there commands
    // are in the first column and fields in the second.
    let mut column = 2;
    for row in section.lines().filter(|line| line.starts_with('|')) {
        if row.starts_with("| field |") {
            column = 1;
        }
        let cell = row.split('|').nth(column).unwrap();
        for name in cell.split('`').skip(1).step_by(2).filter(|name| !name.starts_with("--")) {
            let known = printed.contains(name) || name == "inspect";
            assert!(known, "{name} is documented and never printed");
        }
    }
}
