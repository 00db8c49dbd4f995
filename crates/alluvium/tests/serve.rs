//! `alluvium serve` and `alluvium topic`, with the built binary.

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, Signal, kill_process, prlimit};
use support::produce::produce;
use support::{
    Server, alluvium, contains, ok, ok_json, refused, run, stderr, text, until, write_target,
};

const SMALL: [&str; 2] = ["--wal-capacity", "64MiB"];

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// Runs `alluvium serve` in `data_dir`, which must refuse with exit code 1.
fn will_not_serve(data_dir: &Path, arguments: &[&str]) -> String {
    let output = Server::command(data_dir, arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    stderr(&output)
}

#[test]
fn topics_survive_a_graceful_stop_and_a_kill() {
    let data = directory();
    let mut server = Server::start(data.path(), &SMALL);
    contains(
        &server.log,
        &["creating", "formatted", "each write is flushed", "of a new log: nothing", "cluster_id"],
    );
    let at = server.kafka.clone();

    assert_eq!(ok(&["topic", "list", "--bootstrap", &at]), "there are no topics\n");
    let made = ok_json(&[
        "topic",
        "create",
        "orders",
        "--partitions",
        "3",
        "--config",
        "retention.ms=3600000",
        "--bootstrap",
        &at,
        "--json",
    ]);
    assert_eq!((&made["name"], &made["partitions"]), (&"orders".into(), &3.into()));
    ok(&["topic", "create", "logs", "--bootstrap", &at]);
    let twice = refused(1, &["topic", "create", "orders", "--bootstrap", &at]);
    contains(&twice, &["orders", "TopicAlreadyExists"]);

    let listed = ok(&["topic", "list", "--bootstrap", &at]);
    contains(&listed, &["TOPIC", "orders", "logs"]);
    let described = ok_json(&["topic", "describe", "orders", "--bootstrap", &at, "--json"]);
    assert_eq!(described[0]["topic_id"], made["topic_id"]);
    assert_eq!(described[0]["configs"]["retention.ms"], "3600000");
    let partitions = described[0]["partitions"].as_array().unwrap();
    assert_eq!(partitions.len(), 3);
    assert_eq!(
        (&partitions[2]["partition"], &partitions[2]["high_watermark"]),
        (&2.into(), &0.into())
    );
    contains(
        &ok(&["topic", "describe", "orders", "--bootstrap", &at]),
        &["HIGH WATERMARK", "retention.ms=3600000"],
    );
    let unknown = refused(1, &["topic", "describe", "nothing", "--bootstrap", &at]);
    contains(&unknown, &["nothing", "does not exist", "UnknownTopicOrPartition"]);

    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
    contains(&log, &["SIGTERM", "closed"]);

    server = Server::start(data.path(), &[]);
    // One line each: the version, the admin port, the data directory, what was recovered, and what
    // is served on which ports.
    assert_eq!(server.log.lines().count(), 7, "{}", server.log);
    contains(
        &server.log,
        &[
            concat!("alluvium ", env!("CARGO_PKG_VERSION")),
            &format!("data in {}", text(data.path())),
            &format!("write-ahead log: {}, a file of 64MiB", text(&data.path().join("wal"))),
            &format!("objects: {}", text(&data.path().join("objects"))),
            " s after a clean shutdown: nothing",
            "topics=2 partitions=4",
        ],
    );
    let at = server.kafka.clone();
    contains(&ok(&["topic", "list", "--bootstrap", &at]), &["orders", "logs"]);
    contains(&ok(&["topic", "delete", "logs", "--bootstrap", &at]), &["deleted topic logs"]);
    let gone = refused(1, &["topic", "delete", "logs", "--bootstrap", &at]);
    contains(&gone, &["logs", "UnknownTopicOrPartition"]);
    drop(server);

    server = Server::start(data.path(), &[]);
    contains(&server.log, &["an unclean shutdown"]);
    let listed = ok_json(&["topic", "list", "--bootstrap", &server.kafka, "--json"]);
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|topic| &topic["name"]).collect();
    assert_eq!(names, ["orders"]);
    let (status, log) = server.stop(Signal::INT);
    assert_eq!(status.code(), Some(0), "{log}");
    contains(&log, &["SIGINT"]);
}

#[test]
fn files_of_a_server_are_private_to_its_user() {
    fn check(directory: &Path) {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let (path, metadata) = (entry.path(), entry.metadata().unwrap());
            assert_eq!(metadata.mode() & 0o077, 0, "{}", path.display());
            if metadata.is_dir() {
                check(&path);
            }
        }
    }
    let data = directory();
    // An existing directory keeps its permissions, and what is created in it is private too.
    fs::set_permissions(data.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let server =
        Server::start(data.path(), &[&SMALL[..], &["--upload-interval", "100ms"]].concat());
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    while metric(&server, "alluvium_objects") == 0 {
        std::thread::sleep(Duration::from_millis(50));
    }
    server.stop(Signal::TERM);
    check(data.path());
}

#[test]
fn the_admin_port_shows_health_and_metrics() {
    let data = directory();
    let server = Server::start(data.path(), &SMALL);
    assert_eq!(server.get("/healthz"), ("HTTP/1.1 200 OK".into(), "ok\n".into()));
    let (status, metrics) = server.get("/metrics");
    assert_eq!(status, "HTTP/1.1 200 OK");
    contains(
        &metrics,
        &[
            "alluvium_wal_ring_bytes 67043328",
            "alluvium_wal_flushed_writes_total",
            "alluvium_wal_flush_duration_seconds_bucket{le=\"0.0001\"}",
            "alluvium_wal_flush_duration_seconds_bucket{le=\"+Inf\"}",
            "alluvium_wal_flush_duration_seconds_count",
            "alluvium_process_resident_memory_bytes",
            "alluvium_build_info{version=",
            "alluvium_kafka_",
            "# EOF",
        ],
    );
    assert_eq!(server.get("/other").0, "HTTP/1.1 404 Not Found");
    drop(server);

    let server = Server::start(data.path(), &["--admin-listen", "none"]);
    assert_eq!(server.admin, None);
    contains(&server.log, &["no admin port"]);
}

/// The server waits for its object store while it starts; the test acts as the object store.
#[test]
fn probes_are_answered_while_the_server_starts() {
    let data = directory();
    let objects = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", objects.local_addr().unwrap());
    let s3 = ["--object-store", "s3://bucket", "--s3-endpoint", &endpoint, "--s3-allow-http"];
    let mut command = Server::command(data.path(), &[&SMALL[..], &s3].concat());
    command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
    let server = Server::start_up_to_admin_port(command);
    let waiting = objects.accept().unwrap();

    let ok = |body: &str| ("HTTP/1.1 200 OK".to_owned(), body.to_owned());
    assert_eq!(server.get("/livez"), ok("ok\n"));
    assert_eq!(server.get("/healthz"), ok("ok\n"));
    let (status, why) = server.get("/readyz");
    assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
    assert_eq!(why, "checking the object store\n");
    assert_eq!(metric(&server, "alluvium_ready"), 0);
    contains(&server.get("/metrics").1, &["alluvium_build_info", "resident_memory", "# EOF"]);

    // It is not ready before the object store answers.
    drop((waiting, objects));
    until("the server waits for its catalog", || {
        let (status, why) = server.get("/readyz");
        assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
        why == "opening the catalog\n"
    });
    assert_eq!(metric(&server, "alluvium_ready"), 0);
    assert_eq!(server.get("/livez"), ok("ok\n"));
}

/// The value of a metric without labels.
fn metric(server: &Server, name: &str) -> u64 {
    let (_, metrics) = server.get("/metrics");
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in: {metrics}")).parse().expect("an integer")
}

#[test]
fn failing_uploads_are_reported_while_the_server_serves() {
    let data = directory();
    let objects = data.path().join("objects");
    let server =
        Server::start(data.path(), &[&SMALL[..], &["--upload-interval", "100ms"]].concat());
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    let away = data.path().join("away");
    fs::rename(&objects, &away).unwrap();
    fs::write(&objects, "not a directory").unwrap();
    assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    let failing = r#"alluvium_degraded{reason="uploads_failing"}"#;
    let health = server.wait_for_health("degraded\nuploads_failing: ");
    assert_eq!(health.0, "HTTP/1.1 200 OK");
    assert_eq!(metric(&server, failing), 1);
    contains(&health.1, &["uploads", " in a row", "write-ahead log", "log cache", "objects"]);
    assert!(metric(&server, "alluvium_consecutive_upload_failures") > 0);
    assert_eq!(produce(&server.kafka, "orders", b"another").unwrap(), 0);

    fs::remove_file(&objects).unwrap();
    fs::rename(&away, &objects).unwrap();
    assert_eq!(server.wait_for_health("ok").1, "ok\n");
    assert_eq!(metric(&server, failing), 0);
    assert_eq!(metric(&server, "alluvium_consecutive_upload_failures"), 0);
    assert!(metric(&server, "alluvium_upload_failures_total") > 0);
}

/// A directory mounted on another one, until this is dropped.
struct Mount<'a>(&'a Path);

impl<'a> Mount<'a> {
    /// Returns `None` and prints the reason where mounting is not allowed.
    fn new(directory: &Path, on: &'a Path) -> Option<Self> {
        let mounted = Command::new("mount").arg("--bind").arg(directory).arg(on).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(on)),
            other => {
                println!("SKIPPED: mounting is not allowed: {other:?}");
                None
            }
        }
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        // Lazily, because the server may have a file open.
        let unmounted = Command::new("umount").arg("--lazy").arg(self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "{}", self.0.display());
    }
}

#[test]
fn nothing_is_written_below_an_unmounted_mount_point() {
    let data = directory();
    let [mounted, objects] = ["mounted", "objects"].map(|name| data.path().join(name));
    for directory in [&mounted, &objects] {
        fs::create_dir(directory).unwrap();
    }
    let Some(mount) = Mount::new(&mounted, &objects) else { return };
    let server =
        Server::start(data.path(), &[&SMALL[..], &["--upload-interval", "100ms"]].concat());
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);

    drop(mount);
    assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    let (_, health) = server.wait_for_health("degraded\nuploads_failing: ");
    contains(&health, &[text(&objects), "is not the directory that was opened", "not mounted"]);
    assert_eq!(fs::read_dir(&objects).unwrap().count(), 0, "nothing was written below");

    let _mount = Mount::new(&mounted, &objects).expect("it was mounted before");
    server.wait_for_health("ok");
    while metric(&server, "alluvium_objects") == 0 {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(mounted.join("streams").exists());
}

#[test]
fn losses_found_by_recovery_are_counted() {
    let data = directory();
    let server = Server::start(data.path(), &SMALL);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    for _ in 0..3 {
        assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    }
    assert_eq!(metric(&server, "alluvium_recovery_lost_offsets"), 0);
    server.stop(Signal::TERM);
    let wal = data.path().join("wal");
    let url = format!("file://{}", text(&data.path().join("objects")));
    let named = ["--catalog", &url];
    let dump = ok(&[&["wal", "dump", text(&wal)][..], &named].concat());
    contains(&dump, &["batch: offsets 1 to 1 of partition 0 of topic orders"]);
    contains(&dump, &["3 of partition 0 of topic orders", "ends of "]);
    contains(&ok(&["wal", "dump", text(&wal)]), &["batch: offsets 1 to 1 of stream "]);
    let dump = ok(&["wal", "dump", text(&wal), "--json"]);
    let records = dump.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let is_second = |line: &serde_json::Value| line["record"]["content"]["first_offset"] == 1;
    let second = records.into_iter().find(is_second).unwrap();
    // The ring starts at 64 KiB, and the log is in its first lap.
    let at = (64 << 10) + second["record"]["offset"].as_u64().unwrap() as usize;
    let mut content = fs::read(&wal).unwrap();
    content[at + 40] ^= 1;
    fs::write(&wal, content).unwrap();
    let verified = run(&[&["wal", "verify", text(&wal)][..], &named].concat());
    assert_eq!(verified.status.code(), Some(1));
    let verified = String::from_utf8(verified.stdout).unwrap();
    contains(&verified, &["2 batches of 1 stream, 1 list of the ends of streams, "]);
    contains(&verified, &["lists of changes of the catalog"]);
    contains(&verified, &["MISSING OFFSETS", "partition 0 of topic orders"]);
    let copy = data.path().join("copy");
    fs::copy(&wal, &copy).unwrap();
    let recovered = run(&[&["wal", "recover", text(&copy)][..], &named].concat());
    assert_eq!(recovered.status.code(), Some(1));
    let recovered = String::from_utf8(recovered.stdout).unwrap();
    contains(&recovered, &["MISSING OFFSETS", "partition 0 of topic orders"]);

    let server = Server::start(data.path(), &[]);
    contains(&server.log, &["ERROR", "cannot be read back"]);
    assert_eq!(metric(&server, "alluvium_recovery_damaged_ranges"), 1);
    assert!(metric(&server, "alluvium_recovery_damaged_bytes") > 0);
    assert_eq!(metric(&server, "alluvium_recovery_lost_offset_ranges"), 1);
    assert_eq!(metric(&server, "alluvium_recovery_lost_offsets"), 1);
    let (status, health) = server.get("/healthz");
    assert_eq!(status, "HTTP/1.1 200 OK");
    let lines: Vec<_> = health.lines().collect();
    assert_eq!(lines.len(), 3, "{health}");
    assert_eq!(lines[0], "degraded");
    contains(lines[1], &["log_damaged: ", "by the last start: 1,"]);
    contains(lines[2], &["offsets_lost: ", "by the last start: lost, ", ": 1 in 1 ranges; lost: "]);
    contains(lines[2], &["offsets 1 to 1 of partition 0 of topic orders"]);
    for reason in ["log_damaged", "offsets_lost"] {
        assert_eq!(metric(&server, &format!("alluvium_degraded{{reason=\"{reason}\"}}")), 1);
    }
}

#[test]
fn every_metric_is_documented_with_its_type() {
    let data = directory();
    let server = Server::start(data.path(), &SMALL);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    let (_, metrics) = server.get("/metrics");
    let documented = include_str!("../../../docs/metrics.md");
    let mut shown = Vec::new();
    for line in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').expect("a name and a type");
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        shown.push(format!("| `{name}{suffix}` | {kind} |"));
        let help = metrics.lines().find(|line| line.starts_with(&format!("# HELP {name} ")));
        assert!(help.is_some_and(|help| help.ends_with('.')), "{help:?}");
    }
    assert!(shown.len() > 30, "{metrics}");
    for row in &shown {
        assert!(documented.contains(row.as_str()), "docs/metrics.md lacks: {row}");
    }
    // Metrics with labels may have no value yet. The last section is about another server.
    let (documented, _) = documented.split_once("\n## The journal cache as a server\n").unwrap();
    for row in documented.lines().filter(|row| row.starts_with("| `") && row.contains(" |  | ")) {
        assert!(
            shown.iter().any(|shown| row.starts_with(shown.as_str())),
            "documented but not exported: {row}"
        );
    }
}

#[test]
fn a_log_that_is_missing_or_blank_is_not_replaced() {
    let data = directory();
    Server::start(data.path(), &SMALL).stop(Signal::TERM);
    let wal = data.path().join("wal");
    fs::rename(&wal, data.path().join("elsewhere")).unwrap();
    let said = will_not_serve(data.path(), &[]);
    contains(&said, &[text(&wal), "does not exist", "--wal"]);
    assert!(!wal.exists());

    write_target(&wal, 64 << 20, 0, &[]);
    for arguments in [&[][..], &["--force-format"]] {
        contains(&will_not_serve(data.path(), arguments), &[text(&wal), "is blank"]);
    }
    write_target(&wal, 64 << 20, 1080, &[0x53, 0xef]);
    let said = will_not_serve(data.path(), &["--force-format"]);
    contains(&said, &[text(&wal), "contains something else"]);

    fs::remove_file(&wal).unwrap();
    let moved = data.path().join("elsewhere");
    Server::start(data.path(), &["--wal", text(&moved)]).stop(Signal::TERM);
}

/// A server that is killed while it pre-writes its log leaves a part of it under another name.
#[test]
fn an_incompletely_created_log_is_created_again() {
    let data = directory();
    let creating = data.path().join("wal.creating");
    fs::write(&creating, [0xff; 70_000]).unwrap();
    let server = Server::start(data.path(), &SMALL);
    contains(&server.log, &["creating", "formatted"]);
    assert!(!creating.exists());
    assert_eq!(fs::metadata(data.path().join("wal")).unwrap().len(), 64 << 20);
}

#[test]
fn other_data_is_overwritten_only_with_force_format() {
    let data = directory();
    let target = data.path().join("disk");
    write_target(&target, 64 << 20, 1080, &[0x53, 0xef]);
    let said = will_not_serve(data.path(), &["--wal", text(&target)]);
    contains(&said, &[text(&target), "ext", "--force-format"]);
    assert_eq!(fs::read(&target).unwrap()[1080..1082], [0x53, 0xef]);
    let server = Server::start(data.path(), &["--wal", text(&target), "--force-format"]);
    contains(&server.log, &["formatted", "64MiB"]);
}

#[test]
fn an_existing_log_keeps_its_capacity() {
    let data = directory();
    Server::start(data.path(), &SMALL).stop(Signal::TERM);
    let server = Server::start(data.path(), &["--wal-capacity", "128MiB"]);
    contains(&server.log, &["wal-capacity is 128MiB", "has 64MiB and keeps it"]);
    server.stop(Signal::TERM);
    let server = Server::start(data.path(), &[]);
    assert!(!server.log.contains("wal-capacity"), "{}", server.log);
    server.stop(Signal::TERM);
}

/// A supervisor signals the process and its group, a terminal the whole group: one request to stop
/// arrives twice.
#[test]
fn a_signal_that_is_delivered_twice_is_a_graceful_stop() {
    let data = directory();
    let server = Server::start(data.path(), &SMALL);
    // Both signals are pending when the server continues.
    for signal in [Signal::STOP, Signal::TERM, Signal::INT, Signal::CONT] {
        kill_process(server.pid(), signal).unwrap();
    }
    let (status, log) = server.end();
    assert_eq!(status.code(), Some(0), "{log}");
    contains(&log, &["stopping", "the write-ahead log is closed"]);
}

#[test]
fn a_data_directory_has_one_server() {
    let data = directory();
    let first = Server::start(data.path(), &SMALL);
    let id = || fs::read_to_string(data.path().join("lock")).unwrap().trim().to_string();
    assert_eq!(id(), first.pid().as_raw_nonzero().to_string());
    let said = will_not_serve(data.path(), &[]);
    contains(&said, &[text(data.path()), "another alluvium", &format!("(process {})", id())]);
    first.stop(Signal::KILL);
    let second = Server::start(data.path(), &[]);
    assert_eq!(id(), second.pid().as_raw_nonzero().to_string());
}

#[test]
fn a_port_in_use_is_named() {
    let (one, two) = (directory(), directory());
    let first = Server::start(one.path(), &SMALL);
    let said = will_not_serve(two.path(), &["--wal-capacity", "64MiB", "--listen", &first.kafka]);
    contains(&said, &[&first.kafka, "listen"]);
    assert!(
        !two.path().join("wal").exists(),
        "no log is pre-written for a server that cannot serve"
    );
}

#[test]
fn flags_override_the_environment_and_that_the_file() {
    let data = directory();
    let file = data.path().join("alluvium.toml");
    fs::write(
        &file,
        "node-id = 7\nlog-cache = \"64MiB\"\nupload-interval = \"5m\"\nwal-capacity = \"64MiB\"\n",
    )
    .unwrap();
    let arguments = ["--config", text(&file), "--node-id", "9", "--log", "debug"];
    let mut command = Server::command(data.path(), &arguments);
    command.env("ALLUVIUM_LOG_CACHE", "32MiB").env("ALLUVIUM_NODE_ID", "8");
    let server = Server::start_command(command);
    contains(
        &server.log,
        &[
            "node-id=9",
            "log-cache=32MiB",
            "upload-interval=5m",
            "max-connections=10000",
            "wal-capacity=64MiB",
            "upload-size=default",
        ],
    );
}

#[test]
fn an_invalid_configuration_is_exit_code_2_and_changes_nothing() {
    let parent = directory();
    let data = parent.path().join("data");
    let serve = |arguments: &[&str]| {
        let mut all = vec!["serve", "--data-dir", text(&data)];
        all.extend(arguments);
        refused(2, &all)
    };
    contains(
        &serve(&["--listen", "0.0.0.0:9092", "--advertise", "a:1"]),
        &["--allow-plaintext-network"],
    );
    contains(
        &serve(&["--object-store", "gs://bucket"]),
        &["unknown scheme `gs`", "s3://", "file://"],
    );
    let secret = serve(&["--object-store", "s3://KEY:hush@bucket"]);
    contains(&secret, &["object-store", "AWS_SECRET_ACCESS_KEY"]);
    assert!(!secret.contains("hush"), "{secret}");
    let plain = ["--object-store", "s3://bucket", "--s3-endpoint", "http://192.0.2.1"];
    contains(&serve(&plain), &["s3-endpoint", "--s3-allow-http"]);
    contains(&serve(&["--log-cache", "1GB"]), &["GB", "GiB"]);
    contains(&serve(&["--durability", "maybe"]), &["maybe", "dsync"]);
    contains(&serve(&["--log", "no=such=level"]), &["no=such=level"]);
    contains(&serve(&["--log", "inof"]), &["inof", "info"]);
    contains(&serve(&["--wal-capacity", "100000001"]), &["wal-capacity", "4KiB"]);
    contains(&serve(&["--wal-capacity", "64MiB", "--upload-size", "32MiB"]), &["16MiB"]);

    let file = parent.path().join("alluvium.toml");
    fs::write(&file, "wal_capacity = \"2GiB\"\n").unwrap();
    contains(&serve(&["--config", text(&file)]), &[text(&file), "wal_capacity"]);
    contains(&serve(&["--config", "/nonexistent.toml"]), &["/nonexistent.toml"]);

    let output = alluvium().args(["serve"]).env("ALLUVIUM_NODE_ID", "many").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    contains(&stderr(&output), &["--node-id", "many"]);
    assert!(!data.exists(), "nothing was created");
}

#[test]
fn acknowledged_records_survive_a_kill() {
    let data = directory();
    let server = Server::start(data.path(), &SMALL);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    for _ in 0..3 {
        assert_eq!(produce(&server.kafka, "orders", b"a record").unwrap(), 0);
    }
    server.stop(Signal::KILL);
    let server = Server::start(data.path(), &[]);
    contains(&server.log, &["after an unclean shutdown: 3 batches ("]);
    let described =
        ok_json(&["topic", "describe", "orders", "--bootstrap", &server.kafka, "--json"]);
    assert_eq!(described[0]["partitions"][0]["high_watermark"], 3);
}

/// A limit on file sizes provokes a failed write: from then on the kernel refuses all writes beyond
/// it.
#[test]
fn a_failed_log_ends_the_server_with_an_exit_code_of_its_own() {
    let data = directory();
    let inner = Server::command(data.path(), &SMALL);
    let mut command = Command::new("sh");
    // With the signal ignored, the write fails with EFBIG.
    command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]);
    command.arg(inner.get_program()).args(inner.get_args());
    let mut server = Server::start_command(command);
    ok(&["topic", "create", "orders", "--bootstrap", &server.kafka]);
    assert_eq!(produce(&server.kafka, "orders", b"before").unwrap(), 0);

    let none = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(Some(server.pid()), Resource::Fsize, none).unwrap();
    let answer = produce(&server.kafka, "orders", b"after");
    assert!(!matches!(answer, Ok(0)), "acknowledged although nothing was written: {answer:?}");
    server.wait_for("the write-ahead log has failed, the server stops");
    let (status, log) = server.end();
    assert_eq!(status.code(), Some(3), "{log}");
    contains(
        &log,
        &[
            "the write-ahead log has failed, the server stops",
            text(&data.path().join("wal")),
            "File too large",
        ],
    );

    let server = Server::start(data.path(), &[]);
    let described =
        ok_json(&["topic", "describe", "orders", "--bootstrap", &server.kafka, "--json"]);
    assert_eq!(described[0]["partitions"][0]["high_watermark"], 1);
}

#[test]
fn trusting_the_device_is_logged() {
    let data = directory();
    let mut arguments = SMALL.to_vec();
    arguments.extend([
        "--durability",
        "device",
        "--engine",
        "threads",
        "--object-store",
        "memory://",
    ]);
    let server = Server::start(data.path(), &arguments);
    contains(
        &server.log,
        &[
            "durability `device`",
            "power failure",
            "by threads, writes are not flushed",
            "For trials only",
        ],
    );
    assert_eq!(server.log.matches("WARN").count(), 2, "one warning each: {}", server.log);
}

/// Each connection takes a file descriptor, and most processes begin with a limit of 1,024: less
/// than `--max-connections` may be.
#[test]
fn the_limit_on_open_files_is_raised_for_connections() {
    let data = directory();
    let server = Server::start_with_files(100, data.path(), &SMALL);
    let connect = |_| std::net::TcpStream::connect(&server.kafka).unwrap();
    let open: Vec<_> = (0..200).map(connect).collect();
    // Connections are accepted in order, so this one is served after all of them were accepted.
    let listed = ok(&["topic", "list", "--bootstrap", &server.kafka]);
    assert_eq!(listed, "there are no topics\n");
    drop(open);
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!log.contains("could not be accepted"), "{log}");
}

#[test]
fn the_help_explains_each_option_with_its_default() {
    let help = support::help(&["serve", "--help"]);
    contains(
        &help,
        &[
            "--data-dir",
            "Default ./data",
            "--listen",
            "Default 127.0.0.1:9092",
            "Default 2GiB",
            "64MiB to 16TiB",
            "Default 1GiB, 16MiB to 1TiB",
            "Default 512MiB",
            "Default 1m, 100ms to 24h",
            "Default 127.0.0.1:9644",
            "Default auto",
            "[env: ALLUVIUM_WAL=]",
            "--allow-plaintext-network",
            "--force-format",
        ],
    );
    contains(
        &support::help(&["topic", "create", "--help"]),
        &["[default: 127.0.0.1:9092]", "--partitions"],
    );
    contains(&support::help(&["--help"]), &["Exit codes", "serve", "topic", "wal"]);
}

#[test]
fn an_unreachable_server_is_named() {
    // The port of a listener that has just been closed refuses connections.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let said = refused(1, &["topic", "list", "--bootstrap", &address.to_string()]);
    contains(&said, &[&address.to_string(), "is a server running there?"]);
    assert_eq!(run(&["topic", "create"]).status.code(), Some(2));
}
