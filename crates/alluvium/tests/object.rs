//! `alluvium object` and `alluvium catalog` on data that a server has written.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::produce::produce;
use support::{Server, contains, ok, ok_json, refused};

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
    files.retain(|path| path.file_name().is_some_and(|name| name != "owner"));
    files.sort();
    files
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are text")
}

#[test]
fn intact_objects_are_shown_and_verified() {
    let data = served(2);
    let files = files(data.path());
    let name = files[0].file_name().unwrap().to_str().unwrap();
    let seen = ok_json(&["object", "inspect", text(&files[0]), "--json"]);
    assert_eq!(seen["format_version"], 1);
    assert!(name.ends_with(seen["nonce"].as_str().unwrap()), "{name}");
    assert_eq!(seen["size_bytes"], fs::metadata(&files[0]).unwrap().len());
    let (block, total) = (&seen["blocks"][0], &seen["streams"][0]);
    assert_eq!((&block["position"], &block["start_offset"]), (&32.into(), &0.into()));
    assert_eq!((&total["blocks"], &total["max_timestamp_ms"]), (&1.into(), &1.into()));
    let header_of_entries = 24 * total["entries"].as_u64().unwrap();
    let payload = total["payload_bytes"].as_u64().unwrap();
    assert_eq!(block["length_bytes"], payload + header_of_entries);
    let shown = ok(&["object", "inspect", &format!("file://{}", text(&files[0]))]);
    contains(&shown, &[name, "version     1", "BLOCK OF STREAM", "GREATEST TIMESTAMP"]);

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

/// Causes are a missing mount and a forgotten option.
#[test]
fn a_server_starts_only_with_its_own_object_store() {
    let data = served(1);
    let other = tempfile::tempdir().unwrap();
    let url = |path: &Path| format!("file://{}", text(path));
    let serve = |url: &str| {
        let arguments = ["--listen", "127.0.0.1:0", "--admin-listen", "none"];
        let mut all = vec!["serve", "--data-dir", text(data.path()), "--object-store", url];
        all.extend(arguments);
        refused(1, &all)
    };
    for missing in [other.path().to_path_buf(), other.path().join("not-there")] {
        contains(&serve(&url(&missing)), &["contains none of the objects", "not mounted"]);
    }
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0, "nothing was created there");

    // What an earlier run wrote below the mount point: an object that is not in the catalog, and a
    // claim.
    let below = other.path().join("below");
    let known = files(data.path());
    let of_store = known[0].parent().unwrap();
    let strays = below.join(of_store.strip_prefix(data.path().join("objects")).unwrap());
    fs::create_dir_all(&strays).unwrap();
    let name = known[0].file_name().unwrap().to_str().unwrap();
    let (number, _) = name.split_once('-').unwrap();
    fs::write(strays.join(format!("{number}-{}", "0".repeat(32))), "stray").unwrap();
    fs::copy(of_store.join("owner"), strays.join("owner")).unwrap();
    contains(&serve(&url(&below)), &["contains none of the objects", name, "not mounted"]);
    // The operator confirms that the objects are lost.
    fs::write(strays.join(name), "").unwrap();
    let server = Server::start(data.path(), &["--object-store", &url(&below)]);
    assert!(server.stop(Signal::TERM).0.success());
    fs::remove_dir_all(&below).unwrap();

    // Moved, it is still the same object store.
    let moved = other.path().join("moved");
    fs::rename(data.path().join("objects"), &moved).unwrap();
    let server = Server::start(data.path(), &["--object-store", &url(&moved)]);
    assert!(server.stop(Signal::TERM).0.success());
}

/// Before the first upload, no object identifies the store.
#[test]
fn a_server_without_objects_needs_a_marked_directory() {
    let data = tempfile::tempdir().unwrap();
    let objects = tempfile::tempdir().unwrap();
    let url = format!("file://{}", text(objects.path()));
    let small = ["--wal-capacity", "64MiB", "--object-store", &url];
    let server = Server::start(data.path(), &small);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    assert!(server.stop(Signal::TERM).0.success());
    let mark = objects.path().join("alluvium-objects#0");
    assert!(mark.is_file());

    let serve = || {
        let ports = ["--listen", "127.0.0.1:0", "--admin-listen", "none"];
        let all = ["serve", "--data-dir", text(data.path()), "--object-store", &url];
        refused(1, &[&all[..], &ports].concat())
    };
    let reasons = [text(objects.path()), "alluvium-objects#0", "not mounted", "an empty file"];
    // The mount point, and a path below it.
    fs::remove_dir_all(objects.path()).unwrap();
    fs::create_dir(objects.path()).unwrap();
    contains(&serve(), &reasons);
    assert_eq!(fs::read_dir(objects.path()).unwrap().count(), 0, "nothing was created there");
    fs::remove_dir(objects.path()).unwrap();
    contains(&serve(), &reasons);
    assert!(!objects.path().exists(), "it was not created");

    // Another directory on purpose.
    fs::create_dir(objects.path()).unwrap();
    fs::write(&mark, "").unwrap();
    for _ in 0..2 {
        let server = Server::start(data.path(), &small);
        assert!(server.stop(Signal::TERM).0.success());
        assert_ne!(fs::metadata(&mark).unwrap().len(), 0);
    }
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

/// Such a file is left by a full disk. An export of it would be an empty backup.
#[test]
fn an_empty_file_is_not_a_catalog() {
    let data = tempfile::tempdir().unwrap();
    let path = data.path().join("catalog.redb");
    fs::write(&path, "").unwrap();
    let said = refused(1, &["catalog", "export", "--data-dir", text(data.path())]);
    contains(&said, &["there is no catalog"]);
    assert_eq!(fs::read(&path).unwrap(), b"", "and none was created");
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
        (footer - 20, "the index does not match its checksum", false),
        (footer + 50, "the footer does not match its checksum", false),
    ] {
        fs::write(&files[1], &whole).unwrap();
        change(&files[1], |bytes| bytes[at] ^= 1);
        let said = refused(1, &["object", "verify", text(&objects)]);
        contains(&said, &["1 object is of", text(&files[1]), place]);
        let data_dir = ["--data-dir", text(data.path())];
        let named = [&["object", "verify", text(&objects)], &data_dir[..]].concat();
        let named = support::run(&named);
        let named = String::from_utf8(named.stdout).unwrap();
        contains(&named, &["contains offsets 1 to 1 of partition 0 of topic orders"]);
        if !inspected {
            contains(&refused(1, &["object", "inspect", text(&files[1])]), &[place]);
        }
    }
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
fn a_server_starts_with_an_imported_catalog() {
    let data = served(1);
    let (catalog, export) = (data.path().join("catalog.redb"), data.path().join("export.json"));
    let directory = ["--data-dir", text(data.path())];
    let done = ok(&["catalog", "export", directory[0], directory[1], "--output", text(&export)]);
    contains(&done, &["1 object", "CRC32C", text(&export)]);
    assert_eq!(fs::metadata(&export).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(files(data.path()).len(), 1);
    let printed = ok(&["catalog", "export", directory[0], directory[1]]);
    assert_eq!(printed, fs::read_to_string(&export).unwrap());
    let import = ["catalog", "import", directory[0], directory[1], "--input", text(&export)];
    contains(&refused(1, &import), &["a catalog exists already"]);
    let again = ["catalog", "export", directory[0], directory[1], "--output", text(&export)];
    contains(&refused(1, &again), &["export.json", "exists"]);

    fs::rename(&catalog, data.path().join("old")).unwrap();
    contains(&refused(1, &again[..4]), &["there is no catalog"]);
    assert!(!catalog.exists(), "and none was created");
    change(&export, |bytes| {
        let at = bytes.windows(13).position(|text| text == b"uploaded_end\"").unwrap();
        bytes[at + 14] ^= 1;
    });
    contains(&refused(1, &import), &["export.json", "checksum"]);
    assert!(!catalog.exists(), "and none was created");
    fs::write(&export, &printed).unwrap();
    contains(&ok(&import), &["1 object", "catalog.redb"]);
    assert_eq!(ok(&["catalog", "export", directory[0], directory[1]]), printed);

    let server = Server::start(data.path(), &["--wal-capacity", "64MiB"]);
    let topic = ok_json(&["topic", "describe", "orders", "--bootstrap", &server.kafka, "--json"]);
    assert_eq!(topic[0]["partitions"][0]["high_watermark"], 1);
    contains(&refused(1, &again[..4]), &["another alluvium process is using it"]);
    assert!(server.stop(Signal::TERM).0.success());
}

#[test]
fn orphans_and_missing_objects_are_listed() {
    let data = served(2);
    let objects = files(data.path());
    let store = format!("file://{}", text(&data.path().join("objects")));
    let gc = ["object", "gc", "--data-dir", text(data.path()), "--object-store", &store];
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
    contains(&lost, &["with records missing or of another size"]);
    let elsewhere = ["object", "gc", "--data-dir", text(data.path()), "--object-store"];
    let nowhere = format!("{store}-2");
    contains(&refused(1, &[&elsewhere[..], &[&nowhere]].concat()), &["no such directory"]);

    let server = Server::start(data.path(), &["--wal-capacity", "64MiB"]);
    contains(
        &refused(1, &gc),
        &["another alluvium process is using it", "deletes orphans by itself"],
    );
    assert!(server.stop(Signal::TERM).0.success());
}
