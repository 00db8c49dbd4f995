//! `alluvium serve --read-only` beside the server whose object store it reads, with the built
//! binary: what it serves, how it follows, and that it changes nothing there.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use support::parts::Parts;
use support::produce::{consume, produce};
use support::s3::S3;
use support::{Server, alluvium, contains, ok, ok_json, own_address, refused, stderr, text, until};

const SOON: [&str; 2] = ["--upload-interval", "100ms"];
/// Kafka's code of a request that a policy does not allow.
const POLICY_VIOLATION: i16 = 44;

/// Starts the server that writes.
fn owner(parts: &Parts, more: &[&str]) -> Server {
    Server::start_command(parts.command("data", "wal", "objects", more))
}

/// A command that serves the object store of another server.
fn reading(objects: &str, more: &[&str]) -> Command {
    let mut command = alluvium();
    command.args(["serve", "--read-only", "--object-store", objects]);
    command.args(["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    command.args(["--catalog-poll-interval", "100ms"]).args(more);
    command
}

fn url(directory: &Path) -> String {
    format!("file://{}", text(directory))
}

/// Every file and directory: its time of modification and its length.
fn listing(directory: &Path) -> BTreeMap<PathBuf, (SystemTime, u64)> {
    let mut found = BTreeMap::new();
    let metadata = fs::metadata(directory).unwrap();
    found.insert(directory.to_owned(), (metadata.modified().unwrap(), metadata.len()));
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        match metadata.is_dir() {
            true => found.extend(listing(&entry.path())),
            false => {
                let (changed, length) = (metadata.modified().unwrap(), metadata.len());
                found.insert(entry.path(), (changed, length));
            }
        }
    }
    found
}

fn topics(server: &Server) -> Vec<String> {
    let listed = ok_json(&["topic", "list", "--bootstrap", &server.kafka, "--json"]);
    let names = listed.as_array().unwrap().iter().map(|topic| topic["name"].as_str().unwrap());
    names.map(str::to_owned).collect()
}

/// Whether kcat is installed; prints a message if not.
fn kcat_is_there() -> bool {
    let there = Command::new("kcat").arg("-V").output().is_ok();
    if !there {
        eprintln!("skipped: kcat is not installed");
    }
    there
}

#[test]
fn consumers_read_beside_the_server_that_writes_and_after_its_end() {
    let parts = Parts::new();
    let writer = owner(&parts, &SOON);
    ok(&["topic", "create", "orders", "--partitions", "2", "--bootstrap", &writer.kafka]);
    assert_eq!(produce(&writer.kafka, "orders", b"one").unwrap(), 0);
    let objects = parts.path("objects");
    let reader = Server::start_command(reading(&url(&objects), &[]));
    contains(&reader.log, &["read-only: store", "of its catalog", ", read-only"]);
    until("the first record is there", || {
        topics(&reader) == ["orders"] && consume(&reader.kafka, "orders") == ["one"]
    });

    // What is written and created later.
    assert_eq!(produce(&writer.kafka, "orders", b"two").unwrap(), 0);
    until("the second record is there", || consume(&reader.kafka, "orders") == ["one", "two"]);
    ok(&["topic", "create", "later", "--bootstrap", &writer.kafka]);
    until("the topic is there", || topics(&reader) == ["later", "orders"]);
    let settings = |server: &Server| {
        ok_json(&["topic", "describe", "orders", "--bootstrap", &server.kafka, "--json"])
    };
    until("both describe it the same", || settings(&reader) == settings(&writer));

    // A client of others, which must not repeat what is refused.
    if kcat_is_there() {
        let input = parts.path("input");
        fs::write(&input, "record\n").unwrap();
        let kcat = |arguments: &[&str]| {
            let mut command = Command::new("kcat");
            command.args(["-b", &reader.kafka, "-t", "orders"]).args(arguments);
            command.stdin(fs::File::open(&input).unwrap());
            command.output().unwrap()
        };
        let group = ["-X", "group.id=g", "-X", "auto.offset.reset=earliest"];
        for how in [&["-C", "-e", "-q"][..], &[&["-C", "-e", "-q"], &group[..]].concat()] {
            let consumed = kcat(how);
            assert_eq!(String::from_utf8_lossy(&consumed.stdout), "one\ntwo\n");
        }
        let began = Instant::now();
        for how in [&[][..], &["-X", "enable.idempotence=true"], &["-X", "transactional.id=a"]] {
            // Its exit code is 0 at times, although it reports the error.
            let said = stderr(&kcat(&[&["-P"], how].concat()));
            let expected = ["Policy violation", "Cluster authorization", "Transactional Id auth"];
            assert!(expected.iter().any(|text| said.contains(text)), "{said}");
        }
        assert!(began.elapsed() < Duration::from_secs(30), "it repeats what was refused");
    }

    // Nothing is stored.
    assert_eq!(produce(&reader.kafka, "orders", b"no").unwrap(), POLICY_VIOLATION);
    for change in [&["create", "mine"][..], &["delete", "orders"]] {
        let command = [&["topic"], change, &["--bootstrap", &reader.kafka]].concat();
        contains(&refused(1, &command), &["this server is read-only", "PolicyViolation"]);
    }

    // It says what it is.
    assert_eq!(reader.get("/readyz").1, "ok\n");
    let (status, health) = reader.get("/healthz");
    assert!(status.contains("200"), "{status}");
    contains(&health, &["ok\nread-only: object ", " of the catalog (version ", " s ago"]);
    let metrics = reader.get("/metrics").1;
    contains(&metrics, &["alluvium_read_only 1\n", "alluvium_ready 1\n"]);
    assert!(!metrics.contains("alluvium_wal_"), "{metrics}");
    support::assert_documented(&metrics, "### Read-only servers");
    contains(&writer.get("/metrics").1, &["alluvium_read_only 0\n"]);

    // The writer is killed: reads go on, also of a server that starts now; neither changes a file.
    writer.stop(Signal::KILL);
    let before = listing(&objects);
    assert_eq!(consume(&reader.kafka, "orders"), ["one", "two"]);
    let another = Server::start_command(reading(&url(&objects), &[]));
    assert_eq!(consume(&another.kafka, "orders"), ["one", "two"]);
    assert_eq!(produce(&another.kafka, "orders", b"no").unwrap(), POLICY_VIOLATION);
    std::thread::sleep(Duration::from_millis(300));
    for server in [reader, another] {
        let (status, log) = server.stop(Signal::TERM);
        assert_eq!(status.code(), Some(0), "{log}");
        contains(&log, &["SIGTERM", "stopped"]);
    }
    assert_eq!(listing(&objects), before);

    // The writer goes on as if there had been no other server.
    let writer = owner(&parts, &SOON);
    assert_eq!(consume(&writer.kafka, "orders"), ["one", "two"]);
    assert_eq!(writer.stop(Signal::TERM).0.code(), Some(0));
}

/// A server that restarts, and one whose log is lost, with a rebuild of its catalog.
#[test]
fn restarts_and_a_rebuild_of_the_writer_are_followed() {
    let parts = Parts::new();
    let writer = owner(&parts, &SOON);
    ok(&["topic", "create", "t", "--bootstrap", &writer.kafka]);
    assert_eq!(produce(&writer.kafka, "t", b"one").unwrap(), 0);
    let objects = parts.path("objects");
    let reader = Server::start_command(reading(&url(&objects), &[]));
    until("the record is there", || {
        topics(&reader) == ["t"] && consume(&reader.kafka, "t") == ["one"]
    });
    writer.stop(Signal::KILL);
    let writer = owner(&parts, &SOON);
    assert_eq!(produce(&writer.kafka, "t", b"two").unwrap(), 0);
    until("the second record is there", || consume(&reader.kafka, "t") == ["one", "two"]);
    writer.stop(Signal::KILL);

    fs::remove_dir_all(parts.path("data")).unwrap();
    fs::remove_file(parts.path("wal")).unwrap();
    let rebuild = alluvium()
        .args(["rebuild", "--object-store", &url(&objects), "--accept-loss"])
        .args(["--wal", text(&parts.path("wal")), "--data-dir", text(&parts.path("data"))])
        .args(["--wal-capacity", "64MiB"])
        .output()
        .unwrap();
    assert_eq!(rebuild.status.code(), Some(3), "{}", stderr(&rebuild));
    let writer = owner(&parts, &SOON);
    assert_eq!(produce(&writer.kafka, "t", b"three").unwrap(), 0);
    until("the third record is there", || {
        consume(&reader.kafka, "t").last().is_some_and(|last| last == "three")
    });
    let metrics = reader.get("/metrics").1;
    contains(&metrics, &["alluvium_degraded{reason=\"catalog_not_followed\"} 0\n"]);
}

#[test]
fn a_start_without_a_store_or_with_several_says_so() {
    let parts = Parts::new();
    let nothing = parts.path("nothing");
    let start = |objects: &Path, more: &[&str]| {
        let output = reading(&url(objects), more).output().unwrap();
        (output.status.code(), stderr(&output))
    };
    let (code, said) = start(&nothing, &[]);
    assert_eq!(code, Some(1), "{said}");
    contains(&said, &["no such directory"]);
    assert!(!nothing.exists(), "it is not created");
    fs::create_dir(&nothing).unwrap();
    let (code, said) = start(&nothing, &[]);
    assert_eq!(code, Some(1), "{said}");
    contains(&said, &["there is no catalog"]);

    for (data, wal) in [("data", "wal"), ("data-2", "wal-2")] {
        let server = Server::start_command(parts.command(data, wal, "objects", &[]));
        ok(&["topic", "create", data, "--bootstrap", &server.kafka]);
        server.stop(Signal::TERM);
    }
    let objects = parts.path("objects");
    let listed = ok_json(&["catalog", "list", "--object-store", &url(&objects), "--json"]);
    let stores: Vec<_> =
        listed.as_array().unwrap().iter().map(|it| it["store"].as_str().unwrap()).collect();
    let (code, said) = start(&objects, &[]);
    assert_eq!(code, Some(2), "{said}");
    contains(&said, &["several servers", "--store", stores[0], stores[1]]);
    let unknown = "5e1a43a3-1a1f-4a39-8f5f-0c8e9a2f7b11";
    let (code, said) = start(&objects, &["--store", unknown]);
    assert_eq!(code, Some(1), "{said}");
    contains(&said, &[unknown, "no catalog", stores[0], stores[1]]);
    let mut served: Vec<String> = Vec::new();
    for store in &stores {
        let server = Server::start_command(reading(&url(&objects), &["--store", store]));
        served.extend(topics(&server));
    }
    served.sort();
    assert_eq!(served, ["data", "data-2"]);

    // Damage of the catalog: the object is named.
    let chain = objects.join("catalogs").join(stores[0]).join("chain");
    let last = fs::read_dir(&chain).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
    let whole = fs::read(&last).unwrap();
    fs::write(&last, &whole[..whole.len() - 1]).unwrap();
    let (code, said) = start(&objects, &["--store", stores[0]]);
    assert_eq!(code, Some(1), "{said}");
    contains(&said, &[last.file_name().unwrap().to_str().unwrap(), "Restore that object"]);

    // Usage.
    let url = url(&objects);
    let wrong = ["serve", "--read-only", "--object-store", &url, "--wal", "/dev/null"];
    contains(&refused(2, &wrong), &["wal is not an option of a read-only server"]);
    contains(&refused(2, &["serve", "--read-only"]), &["needs object-store"]);
}

/// A bucket that the reader may not write to, and that is away for a while.
#[test]
fn a_bucket_is_served_without_the_right_to_write() {
    let parts = Parts::new();
    let mut s3 = S3::start(&own_address(), true);
    let with_keys = |mut command: Command| {
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
        command
    };
    let mut command = Server::command(&parts.path("data"), &["--wal-capacity", "64MiB"]);
    command.args(S3::options(s3.address())).args(SOON);
    let writer = Server::start_command(with_keys(command));
    ok(&["topic", "create", "t", "--bootstrap", &writer.kafka]);
    assert_eq!(produce(&writer.kafka, "t", b"one").unwrap(), 0);
    until("the record is uploaded", || writer.get("/metrics").1.contains("alluvium_objects 1\n"));
    writer.stop(Signal::KILL);

    s3.refuse_writes();
    let mut command = alluvium();
    command.args(["serve", "--read-only", "--listen", "127.0.0.1:0"]);
    command.args(["--admin-listen", "127.0.0.1:0"]).args(S3::options(s3.address()));
    let mut reader = Server::start_command(with_keys(command));
    assert_eq!(consume(&reader.kafka, "t"), ["one"]);
    assert_eq!(reader.get("/readyz").1, "ok\n");

    s3.pause();
    let (_, health) = reader.wait_for_health("degraded\ncatalog_not_followed: ");
    contains(&health, &["cannot be followed", "read-only: object "]);
    assert_eq!(reader.get("/readyz").1, "ok\n", "what was read is served");
    assert_eq!(topics(&reader), ["t"]);
    s3.resume();
    reader.wait_for("is followed again");
    reader.wait_for_health("ok\n");
    assert_eq!(consume(&reader.kafka, "t"), ["one"]);
    assert_eq!(reader.stop(Signal::TERM).0.code(), Some(0));
    assert_eq!(s3.refused_writes(), 0);
}
