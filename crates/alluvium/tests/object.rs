//! `alluvium object` on data that a server has written.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::produce::produce;
use support::{Server, contains, ok, ok_json, refused, text};

/// Returns the data directory of a stopped server, with at least `objects` objects.
fn served(objects: usize) -> tempfile::TempDir {
    let data = tempfile::tempdir().unwrap();
    let arguments = ["--wal-capacity", "64MiB", "--upload-interval", "100ms"];
    let server = Server::start(data.path(), &arguments);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    let began = Instant::now();
    // Uses the metric: an object exists slightly before it is in the catalog.
    let in_catalog = || {
        let metrics = server.get("/metrics").1;
        let line = metrics.lines().find_map(|line| line.strip_prefix("alluvium_objects "));
        line.expect("the metric exists").parse::<usize>().unwrap()
    };
    for number in 1..=objects {
        assert_eq!(produce(&server.kafka, "orders", b"some value").unwrap(), 0);
        while in_catalog() < number {
            assert!(began.elapsed() < Duration::from_secs(120), "timed out waiting for an upload");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    assert!(server.stop(Signal::TERM).0.success());
    data
}

/// The objects in a data directory, by name.
fn files(data: &Path) -> Vec<PathBuf> {
    let Ok(stores) = fs::read_dir(data.join("objects/streams")) else { return Vec::new() };
    let files = stores.flat_map(|store| fs::read_dir(store.unwrap().path()).unwrap());
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    files
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn intact_objects_are_shown_and_verified() {
    let data = served(2);
    let files = files(data.path());
    let name = files[0].file_name().unwrap().to_str().unwrap();
    let seen = ok_json(&["object", "inspect", text(&files[0]), "--json"]);
    assert_eq!(seen["format_version"], 2);
    assert!(name.ends_with(seen["nonce"].as_str().unwrap()), "{name}");
    assert_eq!(seen["size_bytes"], fs::metadata(&files[0]).unwrap().len());
    let (block, total) = (&seen["blocks"][0], &seen["streams"][0]);
    assert_eq!((&block["position"], &block["start_offset"]), (&32.into(), &0.into()));
    assert_eq!((&total["blocks"], &total["max_timestamp_ms"]), (&1.into(), &1.into()));
    let header_of_entries = 24 * total["entries"].as_u64().unwrap();
    let payload = total["payload_bytes"].as_u64().unwrap();
    assert_eq!(block["length_bytes"], payload + header_of_entries);
    // The directory.
    assert_eq!((&total["name"], &total["kind"]), (&"orders-0".into(), &0.into()));
    assert_eq!(total["topic_id"].as_str().unwrap().len(), 36);
    let (store, by) = (files[0].parent().unwrap(), &seen["written_by"]);
    assert_eq!(by["store"], store.file_name().unwrap().to_str().unwrap());
    assert_eq!((&by["opening"], &by["generation"]), (&1.into(), &0.into()));
    assert!(by["cut"].as_u64().unwrap() > 0 && by["created_at_ms"].as_u64().unwrap() > 0);
    let shown = ok(&["object", "inspect", &format!("file://{}", text(&files[0]))]);
    let of_directory = ["orders-0", "opening 1", "an upload of the log below offset"];
    contains(&shown, &[name, "version     2", "BLOCK OF STREAM", "GREATEST TIMESTAMP"]);
    contains(&shown, &of_directory);

    let objects = data.path().join("objects");
    // Files without the name of an object are skipped, unless they are named.
    fs::write(objects.join("notes.txt"), "no object").unwrap();
    for place in [text(&objects).to_string(), format!("file://{}", text(&objects))] {
        contains(&ok(&["object", "verify", &place]), &["intact, every checksum is correct"]);
    }
    let seen = ok_json(&["object", "verify", text(&objects), "--json"]);
    assert_eq!(seen["intact"], true);
    assert_eq!(seen["objects"].as_array().unwrap().len(), files.len());
    let notes = refused(1, &["object", "verify", text(&objects.join("notes.txt"))]);
    contains(&notes, &["notes.txt", "too short for an object"]);
    let several = refused(2, &["object", "inspect", text(&objects)]);
    contains(&several, &["name one of them"]);
}

#[test]
fn an_object_store_is_probed() {
    let directory = tempfile::tempdir().unwrap();
    let probe = |path: &Path| format!("file://{}", text(path));
    let url = probe(directory.path());
    contains(
        &ok(&["object", "probe", "--object-store", &url]),
        &[text(directory.path()), "creates objects"],
    );
    let seen = ok_json(&["object", "probe", "--object-store", &url, "--json"]);
    assert_eq!(seen["suitable"], true);
    contains(seen["object_store"].as_str().unwrap(), &[text(directory.path())]);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "the probe has left something");
    contains(&ok(&["object", "probe", "--object-store", "memory://"]), &["creates objects"]);

    let missing = probe(&directory.path().join("missing"));
    let said = refused(2, &["object", "probe", "--object-store", &missing]);
    contains(&said, &["missing", "no such directory"]);
    assert!(!directory.path().join("missing").exists());
    let said = refused(2, &["object", "probe", "--object-store", "s3:/bucket"]);
    contains(&said, &["s3:/bucket"]);
}

/// An earlier build has left objects but no mark.
#[test]
fn a_directory_with_the_objects_of_the_catalog_needs_no_mark() {
    let data = served(1);
    let mark = data.path().join("objects/alluvium-objects#0");
    fs::remove_file(&mark).unwrap();
    let server = Server::start(data.path(), &[]);
    assert!(mark.is_file());
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn damage_is_reported_with_its_position() {
    let data = served(2);
    let files = files(data.path());
    let objects = data.path().join("objects");
    let whole = fs::read(&files[1]).unwrap();
    let footer = whole.len() - 64;
    for (at, place, inspected) in [
        (9, "byte 0: the header", false),
        (40, "byte 32: the block does not match its checksum", true),
        (footer - 20, "the top of the index does not match its checksum", false),
        (footer - 40, "page 0 of the index does not match its checksum", false),
        (footer - 100, "the directory does not match its checksum", false),
        (footer + 50, "the footer does not match its checksum", false),
    ] {
        fs::write(&files[1], &whole).unwrap();
        change(&files[1], |bytes| bytes[at] ^= 1);
        let said = refused(1, &["object", "verify", text(&objects)]);
        contains(&said, &["1 object is of", text(&files[1]), place]);
        let catalog = format!("file://{}", text(&objects));
        let named = ["object", "verify", text(&objects), "--catalog", &catalog];
        let named = support::run(&named);
        assert_eq!(named.status.code(), Some(1));
        let named = String::from_utf8(named.stdout).unwrap();
        contains(&named, &["contains offsets 1 to 1 of partition 0 of topic orders"]);
        if !inspected {
            contains(&refused(1, &["object", "inspect", text(&files[1])]), &[place]);
        }
    }
    // Of a later version.
    fs::write(&files[1], &whole).unwrap();
    change(&files[1], |bytes| {
        bytes[8] = 3;
        let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..32]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    });
    let said = refused(2, &["object", "verify", text(&files[1])]);
    contains(&said, &["could not be read", "format version 3 is not known"]);
    fs::write(&files[1], &whole).unwrap();
    change(&files[1], |bytes| bytes.truncate(footer));
    contains(&refused(1, &["object", "verify", text(&files[1])]), &["footer"]);
    // Another object under this name.
    fs::copy(&files[0], &files[1]).unwrap();
    contains(&refused(1, &["object", "verify", text(&objects)]), &["byte 16", "another object"]);
}

#[test]
fn unreadable_objects_are_not_reported_as_damaged() {
    let empty = tempfile::tempdir().unwrap();
    let missing = empty.path().join("missing");
    for (place, reason) in [
        (text(&missing), "No such file"),
        (text(empty.path()), "no object found"),
        ("gs://bucket/object", "unknown scheme"),
        ("memory://", "memory of a server"),
    ] {
        contains(&refused(2, &["object", "verify", place]), &[reason]);
    }
}

#[test]
fn orphans_and_missing_objects_are_listed() {
    let data = served(2);
    let objects = files(data.path());
    let store = format!("file://{}", text(&data.path().join("objects")));
    let gc = ["object", "gc", "--object-store", &store];
    let with = |more: &[&'static str]| [&gc, more].concat();
    contains(&ok(&gc), &["as in the catalog; 0 orphans; 0 missing"]);

    // Attempts to write objects: with numbers that were used, and with a new one.
    let orphan = |number: u64| {
        let name = format!("{number:016x}-{:032x}", 7);
        let path = objects[0].with_file_name(name);
        fs::copy(&objects[0], &path).unwrap();
        path
    };
    let (past, future) = (orphan(0), orphan(u64::MAX));
    let listed = ok(&with(&["--older-than", "0s"]));
    contains(&listed, &["2 orphans", "old enough", "newer than the catalog"]);
    let recent = ok_json(&with(&["--json"]));
    assert_eq!(recent["orphans"][0]["state"], "not older than 24h");
    assert!(past.exists() && future.exists(), "nothing is deleted");

    change(&objects[0], |bytes| bytes.truncate(100));
    fs::remove_file(&objects[1]).unwrap();
    let lost = refused(1, &gc);
    contains(&lost, &["2 objects are with records missing or of another size"]);
    let nowhere = format!("{store}-2");
    let nowhere = ["object", "gc", "--object-store", &nowhere];
    contains(&refused(1, &nowhere), &["no such directory"]);

    // It may be run while the server does.
    let server = Server::start(data.path(), &["--wal-capacity", "64MiB"]);
    contains(&refused(1, &gc), &["2 objects are with records missing or of another size"]);
    assert!(server.stop(Signal::TERM).0.success());
}

/// Of an object of an earlier build, the index shows what it has.
#[test]
fn an_object_of_format_version_1_is_shown_and_verified() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../stream/tests/data/object-v1.bin");
    contains(&ok(&["object", "verify", text(&file)]), &["intact, every checksum is correct"]);
    let seen = ok_json(&["object", "inspect", text(&file), "--json"]);
    assert_eq!(seen["format_version"], 1);
    assert!(seen["written_by"].is_null());
    let total = &seen["streams"][0];
    assert_eq!((&total["stream"], &total["payload_bytes"]), (&3.into(), &8.into()));
    assert!(total["name"].is_null());
    contains(&ok(&["object", "inspect", text(&file)]), &["version     1"]);
}
