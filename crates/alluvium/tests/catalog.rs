//! The catalog of `alluvium serve` in the object store and the write-ahead log: what a server finds
//! again, what it refuses, and `alluvium catalog`. With the built binary.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use alluvium_device::{OpenOptions, SharedDevice};
use alluvium_stream::chain::{Chain, ChainChange, ChainWriter, Fence};
use alluvium_stream::{StreamId, local_objects};
use alluvium_wal::{FormatOptions, Options, Wal};
use rustix::process::Signal;
use support::parts::{Parts, copy};
use support::produce::{consume, produce};
use support::s3::S3;
use support::{Server, contains, ok, ok_json, own_address, refused, stderr, text, until};

impl Parts {
    fn start_with(&self, data: &str, wal: &str, objects: &str, more: &[&str]) -> Server {
        Server::start_command(self.command(data, wal, objects, more))
    }

    fn start(&self, more: &[&str]) -> Server {
        self.start_with("data", "wal", "objects", more)
    }

    /// Runs a server that must refuse to start. Returns its log.
    #[track_caller]
    fn refused(&self, data: &str, wal: &str, objects: &str) -> String {
        let output = self.command(data, wal, objects, &[]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        stderr(&output)
    }

    /// The id of a write-ahead log.
    fn wal_id(&self, wal: &str) -> String {
        let seen = ok_json(&["wal", "inspect", text(&self.path(wal)), "--json"]);
        seen["header"]["wal_id"].as_str().unwrap().to_owned()
    }
}

fn has_objects(server: &Server) -> bool {
    !server.get("/metrics").1.contains("alluvium_objects 0\n")
}

/// The line of a log with the id of the cluster.
fn cluster_id(log: &str) -> &str {
    let (_, id) = log.split_once("cluster_id=").expect("the log has the id of the cluster");
    id.split_whitespace().next().expect("it has a value")
}

#[test]
fn the_log_and_the_object_store_bring_back_a_lost_data_directory() {
    let parts = Parts::new();
    let server = parts.start(&["--upload-interval", "100ms"]);
    let at = &server.kafka;
    let orders = ["topic", "create", "orders", "--partitions", "3", "--config", "retention.ms=7"];
    ok(&[&orders[..], &["--bootstrap", at]].concat());
    ok(&["topic", "create", "kept", "--bootstrap", at]);
    assert_eq!(produce(at, "kept", b"in an object").unwrap(), 0);
    until("the record is in an object", || has_objects(&server));
    let cluster = cluster_id(&server.log).to_owned();
    server.stop(Signal::TERM);

    // Changes and records of which nothing is in the object store.
    for signal in [Signal::TERM, Signal::KILL] {
        let server = parts.start(&["--upload-interval", "24h"]);
        let at = &server.kafka;
        assert_eq!(produce(at, "kept", b"in the log").unwrap(), 0);
        let name = format!("made-{}", signal.as_raw());
        ok(&["topic", "create", &name, "--bootstrap", at]);
        let data = parts.path("data");
        let mut added = support::alluvium();
        added.args(["user", "add", &name, "--data-dir", text(&data)]).stdin(Stdio::piped());
        let mut added = added.spawn().unwrap();
        std::io::Write::write_all(&mut added.stdin.take().unwrap(), b"secret words\n").unwrap();
        assert!(added.wait().unwrap().success());
        let topics = ["topic", "describe", "--bootstrap", at, "--json"];
        let expected = ok_json(&topics);
        server.stop(signal);

        fs::remove_dir_all(&data).unwrap();
        let server = parts.start(&["--upload-interval", "24h"]);
        assert_eq!(cluster_id(&server.log), cluster);
        let topics = ["topic", "describe", "--bootstrap", &server.kafka, "--json"];
        assert_eq!(ok_json(&topics), expected);
        let users = ok_json(&["user", "list", "--json", "--data-dir", text(&data)]);
        assert!(users.as_array().unwrap().iter().any(|user| user["name"] == *name), "{users}");
        assert_eq!(server.stop(Signal::TERM).0.code(), Some(0));
        let mut files: Vec<_> =
            fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, ["lock", "wal-id"], "nothing else is in the data directory");
    }
    let server = parts.start(&[]);
    assert_eq!(consume(&server.kafka, "kept"), ["in an object", "in the log", "in the log"]);
    assert_eq!(produce(&server.kafka, "kept", b"new").unwrap(), 0);
}

#[test]
fn a_data_directory_is_in_use_with_one_log() {
    let parts = Parts::new();
    parts.start(&[]).stop(Signal::TERM);
    parts.start_with("data2", "wal2", "objects2", &[]).stop(Signal::TERM);
    let before = fs::read(parts.path("wal2")).unwrap();
    for objects in ["objects", "objects2"] {
        let said = parts.refused("data", "wal2", objects);
        let (one, two) = (parts.wal_id("wal"), parts.wal_id("wal2"));
        let (data, wal) = (parts.path("data"), parts.path("wal2"));
        let known = format!("data directory {} belongs to write-ahead log {one}", text(&data));
        contains(&said, &[&known, text(&wal), &two, "Set --wal", "--data-dir"]);
    }
    assert!(fs::read(parts.path("wal2")).unwrap() == before, "a foreign log is not written to");
    parts.start(&[]).stop(Signal::TERM);

    // The id is all that is known of the log, so without it the directory is as good as new.
    fs::write(parts.path("data/wal-id"), "not an id").unwrap();
    contains(&parts.refused("data", "wal", "objects"), &["data/wal-id", "remove"]);
    fs::remove_file(parts.path("data/wal-id")).unwrap();
    parts.start_with("data", "wal2", "objects2", &[]).stop(Signal::TERM);
}

/// Causes are a missing mount and a forgotten option.
#[test]
fn a_used_log_needs_the_object_store_that_has_its_catalog() {
    let parts = Parts::new();
    parts.start(&["--upload-interval", "100ms"]).stop(Signal::TERM);
    let other = parts.start_with("data2", "wal2", "objects2", &[]);
    ok(&["topic", "create", "theirs", "--bootstrap", &other.kafka]);
    other.stop(Signal::TERM);
    let before = fs::read(parts.path("wal")).unwrap();
    fs::create_dir(parts.path("emptied")).unwrap();
    for data in ["data", "data3"] {
        for objects in ["missing", "emptied", "objects2"] {
            let said = parts.refused(data, "wal", objects);
            let (wal, objects) = (parts.path("wal"), parts.path(objects));
            let none =
                format!("the object store has no catalog of the WAL {}", parts.wal_id("wal"));
            let hint = format!("alluvium wal format --force {}", text(&wal));
            contains(&said, &[text(&objects), &none, "not mounted", "emptied", &hint]);
            assert!(!objects.join("catalogs").join(parts.wal_id("wal")).exists());
        }
    }
    assert!(fs::read(parts.path("wal")).unwrap() == before, "it is not written to");
    // Moved, it is still the same object store.
    fs::rename(parts.path("objects"), parts.path("moved")).unwrap();
    parts.start_with("data", "wal", "moved", &[]).stop(Signal::TERM);

    // After a manual format, it is the log of a new server.
    ok(&["wal", "format", text(&parts.path("wal")), "--force"]);
    contains(&parts.refused("data", "wal", "moved"), &["belongs to write-ahead log"]);
    let server = parts.start_with("data4", "wal", "emptied", &[]);
    assert_eq!(ok(&["topic", "list", "--bootstrap", &server.kafka]), "there are no topics\n");
}

/// A log of 64 MiB that no server has used.
fn formatted(path: &Path) -> SharedDevice {
    let options = OpenOptions { create_bytes: Some(64 << 20), ..OpenOptions::default() };
    let device = alluvium_device::open(path, &options).unwrap();
    Wal::format(&device, &FormatOptions::default()).unwrap();
    device
}

/// Puts the fence of a first start into an object store.
fn fence(objects: &Path, wal: &SharedDevice) {
    let id = Wal::inspect(wal).unwrap().header.wal_id;
    let delay = Duration::from_millis(10);
    let open = async {
        let chain = Chain::new(local_objects(objects).unwrap(), id, (delay, delay));
        let until = tokio::time::Instant::now() + support::HANGS;
        let fence = Fence {
            wal: id,
            epoch: 1,
            incarnation: uuid::Uuid::new_v4(),
            node: 1,
            written_at_ms: 0,
            term: None,
            next_stream: StreamId(0),
            own: vec![ChainChange::LargestCount(16 << 10)],
            hints: Default::default(),
        };
        ChainWriter::open::<()>(chain, None, until, |_| Ok(fence.clone())).await.map(drop)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert!(runtime.block_on(open).is_ok());
}

/// The log is formatted before the fence is created, and that before the log is opened for the
/// first time, so these are all states that a kill can leave.
#[test]
fn a_first_start_that_was_killed_can_be_repeated() {
    for (has_wal_id, fences, opened) in
        [(false, 0, false), (true, 0, false), (true, 1, false), (true, 1, true), (true, 2, true)]
    {
        let parts = Parts::new();
        let device = formatted(&parts.path("wal"));
        if has_wal_id {
            let id = Wal::inspect(&device).unwrap().header.wal_id;
            fs::create_dir(parts.path("data")).unwrap();
            fs::write(parts.path("data/wal-id"), format!("{id}\n")).unwrap();
        }
        for _ in 0..fences {
            fence(&parts.path("objects"), &device);
        }
        if opened {
            let (window_bytes, max_record_bytes) = (16 << 20, 1 << 20);
            let options = Options { window_bytes, max_record_bytes, ..Options::default() };
            drop(Wal::open(device.clone(), &options, None, &mut |_| Ok(())).unwrap());
        }
        drop(device);
        let server = parts.start(&[]);
        ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
        assert_eq!(server.stop(Signal::TERM).0.code(), Some(0));
    }
}

/// Two servers with one object store and copies of one log.
#[test]
fn a_server_that_runs_from_a_copy_stops_the_first_one() {
    let parts = Parts::new();
    let mut first = parts.start(&[]);
    ok(&["topic", "create", "orders", "--bootstrap", &first.kafka]);
    assert_eq!(produce(&first.kafka, "orders", b"before").unwrap(), 0);
    // Until its last delta and the headers of its log are written.
    std::thread::sleep(Duration::from_secs(4));
    copy(&parts.path("wal"), &parts.path("copy"));
    let second = parts.start_with("data2", "copy", "objects", &["--node-id", "7"]);

    // The first one learns it when it publishes a change.
    let _ = support::run(&["topic", "create", "late", "--bootstrap", &first.kafka]);
    first.wait_for("the write-ahead log has failed, the server stops");
    let (status, log) = first.end();
    assert_eq!(status.code(), Some(3), "{log}");
    contains(&log, &["another server has opened the store: object ", "on node 7"]);

    // What the first one had acknowledged alone is in its log only, and it does not go on with it.
    let listed = ok(&["topic", "list", "--bootstrap", &second.kafka]);
    assert!(listed.contains("orders") && !listed.contains("late"), "{listed}");
    assert_eq!(produce(&second.kafka, "orders", b"after").unwrap(), 0);
    assert_eq!(consume(&second.kafka, "orders"), ["before", "after"]);
    assert_eq!(second.stop(Signal::TERM).0.code(), Some(0));
    let said = parts.refused("data", "wal", "objects");
    contains(&said, &["holds an old copy of the WAL", text(&parts.path("wal"))]);
    let again = parts.start_with("data2", "copy", "objects", &[]);
    assert_eq!(consume(&again.kafka, "orders"), ["before", "after"]);
}

#[test]
fn an_old_copy_of_the_log_or_of_the_object_store_is_refused() {
    let parts = Parts::new();
    let server = parts.start(&["--upload-interval", "100ms"]);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    server.stop(Signal::TERM);
    copy(&parts.path("wal"), &parts.path("wal-before"));
    copy(&parts.path("objects"), &parts.path("objects-before"));
    let server = parts.start(&["--upload-interval", "100ms"]);
    assert_eq!(produce(&server.kafka, "orders", b"since").unwrap(), 0);
    until("the record is in an object", || has_objects(&server));
    server.stop(Signal::TERM);

    let said = parts.refused("data", "wal-before", "objects");
    contains(&said, &["the device holds an old copy of the WAL"]);
    let said = parts.refused("data", "wal", "objects-before");
    contains(&said, &["the catalog is new or an old copy", text(&parts.path("objects-before"))]);
    let server = parts.start(&[]);
    assert_eq!(consume(&server.kafka, "orders"), ["since"]);
    server.stop(Signal::TERM);
    // Both of them together are a backup.
    let server = parts.start_with("data2", "wal-before", "objects-before", &[]);
    assert_eq!(consume(&server.kafka, "orders"), [""; 0]);
}

#[test]
fn a_log_that_was_taken_over_with_a_tool_is_opened() {
    let parts = Parts::new();
    let server = parts.start(&["--upload-interval", "24h"]);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    server.stop(Signal::KILL);
    let wal = parts.path("wal");
    let (url, id) = (parts.url("objects"), parts.wal_id("wal"));
    let recover = ["wal", "recover", text(&wal), "--catalog", &url, "--store", &id];
    contains(&ok(&recover), &["1 batch of 1 stream", "lists of changes of the catalog", "epoch 2"]);
    let server = parts.start(&[]);
    assert_eq!(consume(&server.kafka, "orders"), ["a record"]);
}

/// A server with its object store in `s3`.
fn s3_command(parts: &Parts, address: &str) -> Command {
    let wal = parts.path("wal");
    let mut command =
        Server::command(&parts.path("data"), &["--wal-capacity", "64MiB", "--wal", text(&wal)]);
    command.args(S3::options(address));
    command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
    command
}

#[test]
fn a_server_waits_until_its_object_store_is_available() {
    let parts = Parts::new();
    let address = own_address();
    let ok_line = |body: &str| ("HTTP/1.1 200 OK".to_owned(), body.to_owned());
    let mut s3 = None;
    // A new server, and one whose log is in use.
    for has_catalog in [false, true] {
        let mut server = Server::start_up_to_admin_port(s3_command(&parts, &address));
        server.wait_for("the object store is unavailable: s3://bucket");
        server.wait_for("; the server waits until it is available");
        let (status, step) = server.get("/readyz");
        assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
        assert_eq!(step, "opening the catalog\n");
        assert_eq!(server.get("/livez"), ok_line("ok\n"));

        match &mut s3 {
            None => s3 = Some(S3::start(&address, true)),
            Some(s3) => s3.resume(),
        }
        let ready = server.wait_for("alluvium is ready");
        assert_eq!(server.get("/readyz"), ok_line("ok\n"));
        let kafka = ready.split_once("kafka on ").unwrap().1.split(',').next().unwrap();
        match has_catalog {
            false => drop(ok(&["topic", "create", "orders", "--bootstrap", kafka])),
            true => contains(&ok(&["topic", "list", "--bootstrap", kafka]), &["orders"]),
        }
        assert_eq!(server.stop(Signal::TERM).0.code(), Some(0));
        let s3 = s3.as_mut().expect("it was started");
        assert_eq!(s3.names("probes/"), [""; 0], "the test of the object store has left objects");
        assert!(!s3.names("catalogs/").is_empty());
        s3.pause();
    }
}

#[test]
fn an_object_store_that_overwrites_instead_of_creating_is_refused() {
    let parts = Parts::new();
    let s3 = S3::start(&own_address(), false);
    let output = s3_command(&parts, s3.address()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    contains(
        &stderr(&output),
        &["s3://bucket", "not suitable", "does not create objects atomically"],
    );
    assert_eq!(s3.names(""), [""; 0], "the test has left objects");
}

#[test]
fn a_new_server_reports_that_others_use_the_object_store() {
    let parts = Parts::new();
    let first = parts.start(&[]);
    assert!(!first.log.contains("WARN"), "{}", first.log);
    let second = parts.start_with("data2", "wal2", "objects", &[]);
    let warning =
        format!("has the catalogs of 1 other server, for example of {}", parts.wal_id("wal"));
    contains(&second.log, &["WARN", &warning]);
    for server in [&first, &second] {
        ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
        assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    }
    for server in [first, second] {
        assert_eq!(server.stop(Signal::TERM).0.code(), Some(0));
    }
    let again = parts.start_with("data2", "wal2", "objects", &[]);
    assert!(!again.log.contains("WARN"), "only at the first start: {}", again.log);
}

#[test]
fn catalogs_are_listed_and_exported() {
    let parts = Parts::new();
    let url = &parts.url("objects");
    let export = ["catalog", "export", "--object-store", url];
    let list = ["catalog", "list", "--object-store", url];
    contains(&refused(1, &list), &["no such directory"]);
    fs::create_dir(parts.path("objects")).unwrap();
    contains(&ok(&list), &["there is no catalog"]);
    contains(&refused(1, &export), &["there is no catalog"]);
    contains(&refused(2, &["catalog", "list", "--object-store", "memory://"]), &["memory"]);
    assert_eq!(fs::read_dir(parts.path("objects")).unwrap().count(), 0, "a tool only reads");

    let server = parts.start(&["--upload-interval", "100ms", "--node-id", "7"]);
    ok(&["topic", "create", "orders", "--partitions", "3", "--bootstrap", &server.kafka]);
    assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    until("the record is in an object", || has_objects(&server));
    // The catalog of a running server is read, too.
    let id = parts.wal_id("wal");
    contains(&ok(&list), &["STORE", &id, "1 object"]);
    let running: serde_json::Value = serde_json::from_str(&ok(&export)).unwrap();
    assert_eq!(
        (&running["clean"], &running["objects"][0]["number"]),
        (&false.into(), &(1_u64 << 32).into())
    );
    assert_eq!(server.stop(Signal::TERM).0.code(), Some(0));

    let listed = ok_json(&[&list[..], &["--json"]].concat());
    let catalog = &listed[0]["catalog"];
    assert_eq!((&listed[0]["store"], &catalog["wal"]), (&(*id).into(), &(*id).into()));
    assert_eq!(catalog["node"], 7);
    assert_eq!((&catalog["objects"], &catalog["ranges"]), (&1.into(), &1.into()));

    let file = parts.path("export.json");
    let to_file = [&export[..], &["--output", text(&file)]].concat();
    contains(&ok(&to_file), &["1 object", text(&file)]);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    contains(&refused(1, &to_file), &["export.json", "exists"]);
    let printed = ok(&export);
    assert_eq!(printed, fs::read_to_string(&file).unwrap());
    let exported: serde_json::Value = serde_json::from_str(&printed).unwrap();
    for (name, value) in [("store", &id), ("wal", &id)] {
        assert_eq!(exported[name], **value, "{name}");
    }
    assert!(exported["version"].as_u64() > running["version"].as_u64());
    assert_eq!(exported["node"], 7);
    let object = &exported["objects"][0];
    let name = object["name"].as_str().unwrap();
    let found = fs::metadata(parts.path("objects").join(name)).unwrap();
    assert_eq!(object["size_bytes"], found.len());
    let streams = exported["streams"].as_array().unwrap();
    let with_range: Vec<_> =
        streams.iter().filter(|stream| stream["ranges"][0] != serde_json::Value::Null).collect();
    assert_eq!(with_range.len(), 1);
    assert_eq!(with_range[0]["ranges"][0]["object"], object["number"]);
    assert_eq!((&with_range[0]["uploaded_end"], &with_range[0]["start"]), (&1.into(), &0.into()));
    let meta = exported["meta"].as_array().unwrap();
    let topic = meta.iter().find(|entry| entry["key"].as_str().unwrap().contains("orders"));
    let value = topic.expect("the topic is in the metadata")["value"].as_str().unwrap();
    assert!(value.len() % 2 == 0 && value.bytes().all(|digit| digit.is_ascii_hexdigit()));

    // Two servers.
    parts.start_with("data2", "wal2", "objects", &[]).stop(Signal::TERM);
    let two = parts.wal_id("wal2");
    contains(&ok(&list), &[&id, &two]);
    contains(&refused(2, &export), &["used by several servers", "--store"]);
    assert_eq!(ok(&[&export[..], &["--store", &id]].concat()), printed);
    let other = ok_json(&[&export[..], &["--store", &two]].concat());
    assert_eq!((&other["store"], &other["objects"]), (&(*two).into(), &serde_json::json!([])));
    let unknown = "00000000-0000-0000-0000-000000000001";
    contains(
        &refused(1, &[&export[..], &["--store", unknown]].concat()),
        &["there is no catalog", unknown],
    );

    // A damaged one.
    let chain = parts.path("objects/catalogs").join(&id).join("chain");
    let mut names: Vec<_> =
        fs::read_dir(&chain).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let last = names.last().unwrap();
    let mut bytes = fs::read(last).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(last, bytes).unwrap();
    let last = last.strip_prefix(parts.path("objects")).unwrap();
    let said = refused(1, &[&export[..], &["--store", &id]].concat());
    contains(&said, &["damaged", text(last)]);
    contains(&ok(&list), &["damaged", text(last), &two]);
    contains(&parts.refused("data", "wal", "objects"), &[text(last)]);
}
