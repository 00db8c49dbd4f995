//! `alluvium rebuild`: the write-ahead log of a server is lost. With the built binary.

mod support;

use std::fs;
use std::path::PathBuf;

use rustix::process::Signal;
use support::parts::Parts;
use support::produce::{consume, produce};
use support::{Server, alluvium, contains, ok, ok_json, refused, run, stderr, text, until};

impl Parts {
    fn start(&self, wal: &str, interval: &str) -> Server {
        let more = ["--upload-interval", interval];
        Server::start_command(self.command("data", wal, "objects", &more))
    }

    /// The words of a rebuild to this log.
    fn rebuild(&self, wal: &str, more: &[&str]) -> Vec<String> {
        let (wal, data, url) = (self.path(wal), self.path("data"), self.url("objects"));
        let parts = ["--object-store", &url, "--wal", text(&wal), "--data-dir", text(&data)];
        let words = [&["rebuild", "--wal-capacity", "64MiB"][..], &parts, more].concat();
        words.into_iter().map(str::to_owned).collect()
    }
}

fn words(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Waits until the server has written the catalog, with everything that it has now.
fn wait_until_published(server: &Server) {
    let puts = || {
        let metrics = server.get("/metrics").1;
        let line = metrics.lines().find(|line| {
            line.starts_with("alluvium_object_store_requests_total")
                && line.contains("cause=\"catalog\"")
                && line.contains("kind=\"put\"")
        });
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0u64)
    };
    let before = puts();
    until("the catalog is written", || puts() > before);
}

#[test]
fn a_server_comes_back_without_its_log_and_states_what_is_lost() {
    let parts = Parts::new();
    let server = parts.start("wal", "200ms");
    ok(&["topic", "create", "a", "--bootstrap", &server.kafka]);
    assert_eq!(produce(&server.kafka, "a", b"uploaded").unwrap(), 0);
    until("the record is in an object", || {
        !server.get("/metrics").1.contains("alluvium_objects 0\n")
    });
    server.stop(Signal::KILL);
    let server = parts.start("wal", "24h");
    for _ in 0..3 {
        assert_eq!(produce(&server.kafka, "a", b"known").unwrap(), 0);
    }
    ok(&["topic", "create", "b", "--bootstrap", &server.kafka]);
    wait_until_published(&server);
    assert_eq!(produce(&server.kafka, "a", b"not known").unwrap(), 0);
    server.stop(Signal::KILL);
    fs::remove_file(parts.path("wal")).unwrap();

    // A start finds that the log is missing; another log is refused.
    let url = parts.url("objects");
    let dry = ok_json(&["rebuild", "--object-store", &url, "--dry-run", "--json"]);
    assert_eq!((dry["clean"].as_bool(), dry["wal"].as_str()), (Some(false), None), "{dry}");
    let lost = |report: &serde_json::Value| {
        let lost = report["lost"].as_array().unwrap().iter();
        let found = lost.clone().find(|lost| lost["name"] == "partition 0 of topic a").unwrap();
        ["from", "known_end", "resume"].map(|field| found[field].as_u64().unwrap())
    };
    let [from, known_end, resume] = lost(&dry);
    assert_eq!((from, known_end), (1, 4));
    let refusal = refused(1, &words(&parts.rebuild("new", &[])));
    contains(&refusal, &["nothing has changed", "--accept-loss"]);
    assert!(!parts.path("new").exists());
    let printed = ok(&["rebuild", "--object-store", &url, "--dry-run"]);
    contains(
        &printed,
        &["3 offsets", "partition 0 of topic a", "not known", "partition 0 of topic b"],
    );

    let small = parts.rebuild("new", &["--accept-loss"]);
    let small: Vec<_> =
        small.iter().map(|word| if word == "64MiB" { "1MiB" } else { word.as_str() }).collect();
    contains(&refused(2, &small), &["wal-capacity is 1MiB, but must be 64MiB"]);
    assert!(!parts.path("new").exists());
    // What cannot be stated is not done.
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = alluvium();
    let failed = command.args(parts.rebuild("new", &["--accept-loss"])).stdout(full).output();
    let failed = failed.unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}", stderr(&failed));
    assert_eq!(
        lost(&ok_json(&["rebuild", "--object-store", &url, "--dry-run", "--json"])),
        lost(&dry)
    );

    let rebuilt = run(&words(&parts.rebuild("new", &["--accept-loss", "--json"])));
    assert_eq!(rebuilt.status.code(), Some(3), "{}", stderr(&rebuilt));
    let report: serde_json::Value = serde_json::from_slice(&rebuilt.stdout).unwrap();
    assert_eq!(lost(&report), [from, known_end, resume]);
    assert!(report["wal"].is_string());
    // It can be repeated.
    contains(&ok(&words(&parts.rebuild("new", &["--accept-loss"]))), &["was already bound"]);
    let again = ok_json(&words(&parts.rebuild("new", &["--json"])));
    assert_eq!((&again["already_bound"], &again["wal"]), (&true.into(), &report["wal"]));

    let server = parts.start("new", "200ms");
    contains(&server.log, &["offsets 1 to 3 of partition 0 of topic a are lost"]);
    assert_eq!(consume(&server.kafka, "a"), ["uploaded"]);
    let topics = ok(&["topic", "list", "--bootstrap", &server.kafka]);
    contains(&topics, &["a ", "b "]);
    assert_eq!(produce(&server.kafka, "a", b"new").unwrap(), 0);
    assert_eq!(produce(&server.kafka, "b", b"new").unwrap(), 0);
    server.stop(Signal::KILL);
    for signal in [Signal::KILL, Signal::TERM] {
        let server = parts.start("new", "200ms");
        assert_eq!(consume(&server.kafka, "a"), ["uploaded", "new"]);
        assert_eq!(consume(&server.kafka, "b"), ["new"]);
        server.stop(signal);
    }
}

#[test]
fn a_rebuild_needs_a_new_log_and_no_running_server() {
    let parts = Parts::new();
    let server = parts.start("wal", "24h");
    let refusal = refused(1, &words(&parts.rebuild("new", &["--accept-loss"])));
    contains(&refusal, &["another alluvium process is using it"]);
    server.stop(Signal::TERM);
    // Nothing was appended, so the last server has left nothing in its log.
    let rebuilt = ok(&words(&parts.rebuild("new", &[])));
    contains(&rebuilt, &["nothing is lost", "is bound to write-ahead log"]);
    let server = parts.start("new", "24h");
    ok(&["topic", "create", "a", "--bootstrap", &server.kafka]);
    server.stop(Signal::TERM);
    // The old log is not that of the store any more, and cannot be bound again.
    let refusal = refused(1, &words(&parts.rebuild("wal", &["--accept-loss"])));
    contains(&refusal, &["was opened 1 times", "a rebuild needs a new one"]);
    let elsewhere = format!("file://{}", text(&parts.path("nowhere")));
    contains(
        &refused(1, &["rebuild", "--object-store", &elsewhere, "--dry-run"]),
        &["no such directory"],
    );
    contains(&refused(2, &["rebuild", "--object-store", &elsewhere]), &["--wal"]);
}

/// Returns the files of a catalog whose path has this part, in order.
fn catalog_files(parts: &Parts, part: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![parts.path("objects").join("catalogs")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => directories.push(path),
                false if text(&path).contains(part) => found.push(path),
                false => {}
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_damaged_catalog_is_put_together_and_nothing_is_lost_if_the_log_is_there() {
    let parts = Parts::new();
    let server = parts.start("wal", "200ms");
    ok(&["topic", "create", "a", "--bootstrap", &server.kafka, "--partitions", "2"]);
    for value in ["1", "2", "3"] {
        assert_eq!(produce(&server.kafka, "a", value.as_bytes()).unwrap(), 0);
        wait_until_published(&server);
    }
    server.stop(Signal::KILL);
    let server = parts.start("wal", "24h");
    assert_eq!(produce(&server.kafka, "a", b"4").unwrap(), 0);
    server.stop(Signal::KILL);
    // The object with the second record.
    let entries = catalog_files(&parts, "/chain/");
    let mut bytes = fs::read(&entries[4]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&entries[4], bytes).unwrap();

    let (wal, data) = (parts.path("wal"), parts.path("data"));
    let url = parts.url("objects");
    let mut command = parts.command("data", "wal", "objects", &[]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    contains(&stderr(&output), &["does not match its checksum", "alluvium rebuild --from-objects"]);

    let dry = ["rebuild", "--object-store", &url, "--dry-run", "--from-objects", "--wal"];
    let report = ok_json(&[&dry[..], &[text(&wal), "--json"]].concat());
    let found = &report["from_objects"];
    assert_eq!(found["catalog"].as_array().unwrap().len(), 1, "{report}");
    for none in ["lost_records", "lost_log_records", "missing_objects", "damaged_objects"] {
        assert_eq!(found[none].as_array().unwrap().len(), 0, "{none}: {report}");
    }
    assert_eq!(report["lost"].as_array().unwrap().len(), 0, "{report}");
    let refusal = refused(1, &words(&parts.rebuild("wal", &["--from-objects"])));
    contains(&refusal, &["nothing has changed", "--accept-loss"]);
    let rebuilt = run(&words(&parts.rebuild("wal", &["--from-objects", "--accept-loss"])));
    assert_eq!(rebuilt.status.code(), Some(3), "{}", stderr(&rebuilt));
    contains(
        &String::from_utf8(rebuilt.stdout).unwrap(),
        &["0 ranges of offsets are known to be lost"],
    );
    let again = ok(&words(&parts.rebuild("wal", &["--from-objects"])));
    contains(&again, &["nothing is lost"]);

    let server = parts.start("wal", "200ms");
    assert_eq!(consume(&server.kafka, "a"), ["1", "2", "3", "4"]);
    assert_eq!(produce(&server.kafka, "a", b"5").unwrap(), 0);
    server.stop(Signal::TERM);
    let server = parts.start("wal", "200ms");
    assert_eq!(consume(&server.kafka, "a"), ["1", "2", "3", "4", "5"]);
    server.stop(Signal::TERM);
    assert!(data.is_dir());
}

#[test]
fn a_stream_whose_name_is_lost_is_listed() {
    let parts = Parts::new();
    let server = parts.start("wal", "200ms");
    ok(&["topic", "create", "a", "--bootstrap", &server.kafka]);
    wait_until_published(&server);
    assert_eq!(produce(&server.kafka, "a", b"1").unwrap(), 0);
    until("the record is in an object", || {
        !server.get("/metrics").1.contains("alluvium_objects 0\n")
    });
    server.stop(Signal::KILL);
    // Without it no label shows the name.
    fs::remove_dir_all(parts.path("objects").join("streams")).unwrap();

    let url = parts.url("objects");
    let dry = ["rebuild", "--object-store", &url, "--dry-run", "--from-objects", "--json"];
    let mut listed = 0;
    for entry in catalog_files(&parts, "/chain/") {
        let bytes = fs::read(&entry).unwrap();
        fs::remove_file(&entry).unwrap();
        let report = ok_json(&dry);
        fs::write(&entry, bytes).unwrap();
        let found = &report["from_objects"];
        let stream = |view: &serde_json::Value| view["stream"].as_u64().unwrap();
        let unnamed: Vec<_> = found["unnamed"].as_array().unwrap().iter().map(stream).collect();
        for lost in [&report["lost"], &found["lost_records"], &found["skipped"]] {
            for view in lost.as_array().unwrap() {
                let is_named = !view["name"].as_str().unwrap().starts_with("stream ");
                assert_eq!(is_named, !unnamed.contains(&stream(view)), "{report}");
            }
        }
        listed += unnamed.len();
    }
    assert_eq!(listed, 1);
}

#[test]
fn topics_come_back_from_objects_alone() {
    let parts = Parts::new();
    let server = parts.start("wal", "200ms");
    ok(&["topic", "create", "a", "--bootstrap", &server.kafka]);
    ok(&["topic", "create", "empty", "--bootstrap", &server.kafka]);
    for value in ["1", "2"] {
        assert_eq!(produce(&server.kafka, "a", value.as_bytes()).unwrap(), 0);
        wait_until_published(&server);
    }
    server.stop(Signal::TERM);
    fs::remove_dir_all(parts.path("objects").join("catalogs")).unwrap();
    fs::remove_file(parts.path("wal")).unwrap();
    fs::remove_dir_all(parts.path("data")).unwrap();

    let (url, more) = (parts.url("objects"), ["--from-objects", "--accept-loss", "--json"]);
    let dry = ok(&["rebuild", "--object-store", &url, "--dry-run", "--from-objects"]);
    contains(&dry, &["topic a: 1 partition found; its settings are lost"]);
    assert!(!parts.path("objects").join("catalogs").exists());
    let rebuilt = run(&words(&parts.rebuild("new", &more)));
    assert_eq!(rebuilt.status.code(), Some(3), "{}", stderr(&rebuilt));
    let report: serde_json::Value = serde_json::from_slice(&rebuilt.stdout).unwrap();
    let topics = report["from_objects"]["restored_topics"].as_array().unwrap();
    assert_eq!(topics.len(), 1, "{report}");
    assert_eq!(topics[0]["settings_lost"], true);
    let lost = report["lost"].as_array().unwrap().iter();
    let of_a = lost.clone().find(|lost| lost["name"] == "partition 0 of topic a").unwrap();
    assert_eq!(of_a["from"], 2, "{report}");
    assert!(of_a["resume"].as_u64().unwrap() > 1 << 40, "{report}");

    let server = parts.start("new", "200ms");
    assert_eq!(consume(&server.kafka, "a"), ["1", "2"]);
    assert_eq!(produce(&server.kafka, "a", b"3").unwrap(), 0);
    assert_eq!(consume(&server.kafka, "a"), ["1", "2", "3"]);
    let settings = ok(&["topic", "describe", "a", "--bootstrap", &server.kafka]);
    contains(&settings, &["retention.ms"]);
    server.stop(Signal::KILL);
    let server = parts.start("new", "200ms");
    assert_eq!(consume(&server.kafka, "a"), ["1", "2", "3"]);
    server.stop(Signal::TERM);
}
