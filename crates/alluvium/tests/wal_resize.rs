//! `alluvium wal resize` of a log whose server runs, with the built binary.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use rustix::process::{Pid, Signal, kill_process};
use support::produce::produce;
use support::{Server, alluvium, contains, ok, ok_json, refused, text};

static LARGE: [u8; 900 << 10] = [7; 900 << 10];

fn metric(server: &Server, name: &str) -> u64 {
    let (_, metrics) = server.get("/metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("alluvium_{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {metrics}")).parse().expect("a number")
}

fn watermark(server: &Server, topic: &str) -> u64 {
    let topic = ok_json(&["topic", "describe", topic, "--bootstrap", &server.kafka, "--json"]);
    topic[0]["partitions"][0]["high_watermark"].as_u64().expect("a number")
}

/// A producer that continues until it is stopped or the server is gone.
struct Load {
    acknowledged: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Load {
    fn start(kafka: &str, topic: &'static str) -> Self {
        let (acknowledged, stop) = <(Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let thread = thread::spawn({
            let (kafka, acknowledged, stop) =
                (kafka.to_owned(), acknowledged.clone(), stop.clone());
            move || {
                for record in (0..).map(|n| if n % 2 == 0 { &LARGE[..] } else { b"small" }) {
                    match produce(&kafka, topic, record) {
                        Ok(0) => acknowledged.fetch_add(1, Ordering::SeqCst),
                        Ok(code) => panic!("error code {code}"),
                        Err(_) => return,
                    };
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                }
            }
        });
        Self { acknowledged, stop, thread }
    }

    /// Stops the producer; returns the number of acknowledged records.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("the producer does not fail");
        self.acknowledged.load(Ordering::SeqCst)
    }
}

#[test]
fn a_log_grows_and_shrinks_under_the_traffic_of_its_server() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    let arguments = ["--wal-capacity", "64MiB", "--upload-interval", "100ms"];
    let server = Server::start(data.path(), &arguments);
    ok(&["topic", "create", "t", "--bootstrap", &server.kafka]);
    let load = Load::start(&server.kafka, "t");
    for (capacity, mib) in [("160MiB", 160), ("72MiB", 72), ("64MiB", 64), ("100MiB", 100)] {
        let seen = ok_json(&["wal", "resize", text(&wal), "--capacity", capacity, "--json"]);
        assert_eq!(seen["header"]["capacity_bytes"], mib << 20);
        assert_eq!(seen["header"]["wal_id"], seen["before"]["wal_id"]);
        assert_eq!(seen["header"]["epoch"], seen["before"]["epoch"], "its owner is unchanged");
        assert_eq!(seen["target"]["size_bytes"], mib << 20);
        assert_eq!(fs::metadata(&wal).unwrap().len(), mib << 20);
        assert_eq!(metric(&server, "wal_ring_bytes"), (mib << 20) - (64 << 10));
    }
    // During the traffic, right after the last resize.
    server.stop(Signal::KILL);
    let acknowledged = load.end();
    assert!(acknowledged > 10, "{acknowledged}");
    ok(&["wal", "verify", text(&wal)]);

    // The server was started with another capacity, and starts with it again.
    let server = Server::start(data.path(), &arguments);
    contains(&server.log, &["wal-capacity is 64MiB", "100MiB and keeps it", "alluvium wal resize"]);
    let there = watermark(&server, "t");
    assert!((acknowledged..=acknowledged + 1).contains(&there), "{acknowledged}, {there} there");
    assert_eq!(produce(&server.kafka, "t", b"more").unwrap(), 0);
    server.stop(Signal::TERM);
}

/// The server is killed between the request and its completion, a little later in each round.
#[test]
fn a_kill_in_the_middle_of_a_resize_loses_nothing() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    let arguments = ["--wal-capacity", "64MiB", "--upload-interval", "100ms"];
    let mut server = Server::start(data.path(), &arguments);
    ok(&["topic", "create", "t", "--bootstrap", &server.kafka]);
    let (mut expected, mut capacity) = (0, 64);
    for round in 0..8 {
        let wanted = [80, 64, 96, 80, 128, 80, 160, 96][round];
        let load = Load::start(&server.kafka, "t");
        let resizing = alluvium()
            .args(["wal", "resize", text(&wal), "--capacity", &format!("{wanted}MiB")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        // After as many records as the number of the round; in the last round when the resize is
        // done.
        while load.acknowledged.load(Ordering::SeqCst) < round as u64 {
            thread::yield_now();
        }
        let mut resizing = resizing.unwrap();
        if round == 7 {
            resizing.wait().unwrap();
        }
        server.stop(Signal::KILL);
        resizing.wait().unwrap();
        let acknowledged = load.end();
        server = Server::start(data.path(), &arguments);
        let there = watermark(&server, "t") - expected;
        assert!((acknowledged..=acknowledged + 1).contains(&there), "{acknowledged}, {there}");
        expected += there;
        let header = &ok_json(&["wal", "inspect", text(&wal), "--json"])["header"];
        let found = header["capacity_bytes"].as_u64().unwrap() >> 20;
        assert!([capacity, wanted].contains(&found), "{capacity} to {wanted}: {found}");
        capacity = found;
    }
    server.stop(Signal::TERM);
}

/// Starts `alluvium wal resize` and waits until it reports that it waits.
fn waiting(wal: &Path, capacity: &str) -> (Child, BufReader<impl Read>) {
    let mut child = alluvium()
        .args(["wal", "resize", text(wal), "--capacity", capacity])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("waiting for the log to pass the end of its ring") {
        assert!(lines.read_line(&mut said).unwrap() > 0, "{said}");
    }
    contains(&said, &["ring: at most", "The server continues"]);
    (child, lines)
}

/// Produces to `t` until the end of the log is behind `mib`. Returns the number of records.
fn produce_up_to(server: &Server, mib: u64) -> u64 {
    let mut produced = 0;
    while metric(server, "wal_durable_offset") < mib << 20 {
        assert_eq!(produce(&server.kafka, "t", &LARGE).unwrap(), 0);
        produced += 1;
    }
    produced
}

/// A server with a log of 160 MiB, whose records lie between 110 and 150 MiB, and their number.
fn filled(data: &Path) -> (Server, u64) {
    let server = Server::start(
        data,
        &["--wal-capacity", "160MiB", "--upload-interval", "1h", "--upload-size", "20MiB"],
    );
    ok(&["topic", "create", "t", "--bootstrap", &server.kafka]);
    let produced = produce_up_to(&server, 140);
    (server, produced)
}

#[test]
fn a_pending_resize_ends_with_its_server() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    let (server, produced) = filled(data.path());
    let (watching, mut said) = waiting(&wal, "130MiB");
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(watching.wait_with_output().unwrap().status.code(), Some(1));
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    contains(&rest, &["error: "]);
    let server = Server::start(data.path(), &["--upload-interval", "1h"]);
    assert_eq!(metric(&server, "wal_resize_to_bytes"), 0);
    assert_eq!(metric(&server, "wal_ring_bytes"), (160 << 20) - (64 << 10));
    assert_eq!(watermark(&server, "t"), produced);
    server.stop(Signal::TERM);
}

#[test]
fn a_pending_resize_can_be_interrupted_and_withdrawn() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    // Its records lie after the end of the requested capacity.
    let (mut server, produced) = filled(data.path());
    assert_eq!(metric(&server, "wal_resize_to_bytes"), 0);
    let (mut command, _said) = waiting(&wal, "130MiB");
    assert_eq!(metric(&server, "wal_resize_to_bytes"), 130 << 20);
    let distance = metric(&server, "wal_resize_distance_bytes");
    // How much was uploaded and trimmed before depends on the speed of the machine.
    let ring = metric(&server, "wal_ring_bytes");
    assert!((1 << 20..=ring).contains(&distance), "{distance} of {ring}");
    // Not INT, because a shell makes background processes ignore it.
    kill_process(Pid::from_child(&command), Signal::TERM).unwrap();
    assert!(!command.wait().unwrap().success());
    assert_eq!(metric(&server, "wal_resize_to_bytes"), 130 << 20, "the resize continues");

    let (watching, said) = waiting(&wal, "130MiB");
    let present = ok(&["wal", "resize", text(&wal), "--capacity", "160MiB"]);
    contains(&present, &["already has 160MiB"]);
    let (output, mut rest) = (watching.wait_with_output().unwrap(), String::new());
    { said }.read_to_string(&mut rest).unwrap();
    assert_eq!(output.status.code(), Some(1));
    contains(&rest, &["not resized to 130MiB", "replaced by a later request, for 160MiB"]);
    assert_eq!(metric(&server, "wal_resize_to_bytes"), 0);

    let (watching, _said) = waiting(&wal, "130MiB");
    let produced = produced + produce_up_to(&server, 210);
    let output = watching.wait_with_output().unwrap();
    contains(&String::from_utf8(output.stdout).unwrap(), &["160MiB before, 130MiB now"]);
    server.wait_for("the capacity of the write-ahead log is now 130MiB");
    assert_eq!(fs::metadata(&wal).unwrap().len(), 130 << 20);
    assert_eq!(watermark(&server, "t"), produced);
    server.stop(Signal::KILL);
    let server = Server::start(data.path(), &["--upload-interval", "1h"]);
    assert_eq!(watermark(&server, "t"), produced);
    server.stop(Signal::TERM);
}

#[test]
fn impossible_capacities_are_refused_and_change_nothing() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    let server = Server::start(data.path(), &["--wal-capacity", "96MiB", "--upload-size", "20MiB"]);
    let refuse = |capacity: &str, parts: &[&str]| {
        let said = refused(1, &["wal", "resize", text(&wal), "--capacity", capacity]);
        contains(&said, parts);
    };
    refuse("32MiB", &["not resized to 32MiB", "64MiB to 16TiB"]);
    refuse("64MiB", &["upload-size is 20MiB", "a quarter of the write-ahead log of 64MiB"]);
    refuse("90MiB", &["more than half of the ring", "While the server is stopped"]);
    refuse("15TiB", &["no space for a file of 15TiB"]);
    assert_eq!(fs::metadata(&wal).unwrap().len(), 96 << 20);
    let seen = ok_json(&["wal", "inspect", text(&wal), "--json"]);
    assert_eq!(seen["header"]["capacity_bytes"], 96 << 20);
    server.stop(Signal::TERM);
    ok(&["wal", "resize", text(&wal), "--capacity", "90MiB"]);
}

/// Smaller than a server accepts for a new log. The current capacity may be requested nevertheless,
/// which withdraws a request.
#[test]
fn the_current_capacity_is_never_refused() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    ok(&["wal", "format", text(&wal), "--capacity", "32MiB"]);
    let server = Server::start(data.path(), &[]);
    let said = refused(1, &["wal", "resize", text(&wal), "--capacity", "40MiB"]);
    contains(&said, &["not resized to 40MiB", "64MiB to 16TiB"]);
    let present = ok(&["wal", "resize", text(&wal), "--capacity", "32MiB"]);
    contains(&present, &["already has 32MiB"]);
    server.stop(Signal::TERM);
}

#[test]
fn the_socket_serves_only_its_user_and_its_log() {
    let data = tempfile::tempdir().unwrap();
    let socket = data.path().join("alluvium.sock");
    let elsewhere = tempfile::tempdir().unwrap();
    let wal = elsewhere.path().join("log");
    let arguments = ["--wal-capacity", "64MiB", "--wal", text(&wal)];
    let server = Server::start(data.path(), &arguments);
    let found = fs::symlink_metadata(&socket).unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    for (request, answer) in [
        ("nonsense\n", "cannot parse"),
        ("{\"stop\":{}}\n", "cannot parse"),
        (
            "{\"resize\":{\"wal\":{\"device\":1,\"inode\":2},\"capacity_bytes\":1}}\n",
            "\"other_log\"\n",
        ),
    ] {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answered = String::new();
        stream.read_to_string(&mut answered).unwrap();
        contains(&answered, &[answer]);
    }

    // The socket is not next to the log: the command needs --data-dir, and the log is identified by
    // any path.
    let said = refused(1, &["wal", "resize", text(&wal), "--capacity", "80MiB"]);
    contains(&said, &["in use", "no server that has it open answers", "--data-dir"]);
    let link = data.path().join("link");
    std::os::unix::fs::symlink(&wal, &link).unwrap();
    let with_directory = ["--data-dir", text(data.path())];
    ok(&[&["wal", "resize", text(&link), "--capacity", "80MiB"], &with_directory[..]].concat());
    let other = elsewhere.path().join("other");
    ok(&["wal", "format", text(&other), "--capacity", "8MiB"]);
    let resized =
        [&["wal", "resize", text(&other), "--capacity", "9MiB"], &with_directory[..]].concat();
    contains(&ok(&resized), &["9MiB now"]);

    // A socket left by a killed server is replaced; a stopped server leaves none.
    server.stop(Signal::KILL);
    assert!(socket.exists());
    let server = Server::start(data.path(), &arguments);
    ok(&[&["wal", "resize", text(&wal), "--capacity", "88MiB"], &with_directory[..]].concat());
    server.stop(Signal::TERM);
    assert!(!socket.exists());
    // No server answers, so the command resizes the log itself.
    ok(&[&["wal", "resize", text(&wal), "--capacity", "72MiB"], &with_directory[..]].concat());

    fs::write(&socket, "a file").unwrap();
    let server = Server::start(data.path(), &arguments);
    contains(&server.log, &["no control socket at", "the path exists and is not a socket"]);
    server.stop(Signal::TERM);
    assert_eq!(fs::read_to_string(&socket).unwrap(), "a file");
}

#[test]
fn a_server_in_a_directory_with_a_long_name_works_without_a_socket() {
    let data = tempfile::tempdir().unwrap();
    let deep = data.path().join("d".repeat(100));
    let server = Server::start(&deep, &["--wal-capacity", "64MiB"]);
    contains(&server.log, &["no control socket", "needs this server to be stopped"]);
    let wal = deep.join("wal");
    contains(
        &refused(1, &["wal", "resize", text(&wal), "--capacity", "80MiB"]),
        &["in use", "stop the server first"],
    );
    server.stop(Signal::TERM);
    ok(&["wal", "resize", text(&wal), "--capacity", "80MiB"]);
}

/// What was prepared for a request is removed with it: the file must be as long as its log, or no
/// later command would ever shorten it.
#[test]
fn a_stopped_server_cuts_off_what_a_pending_resize_added() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    let server = Server::start(
        data.path(),
        &["--wal-capacity", "160MiB", "--upload-interval", "1h", "--upload-size", "35MiB"],
    );
    ok(&["topic", "create", "t", "--bootstrap", &server.kafka]);
    // The fourth upload has trimmed the log to 140, the fifth comes at 175: its records cross the
    // end of the ring.
    produce_up_to(&server, 165);
    let (watching, _said) = waiting(&wal, "300MiB");
    assert_eq!(fs::metadata(&wal).unwrap().len(), 300 << 20);
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(watching.wait_with_output().unwrap().status.code(), Some(1));
    assert_eq!(fs::metadata(&wal).unwrap().len(), 160 << 20, "{log}");
}

/// An impossible request does not end the server.
#[test]
fn a_server_is_not_killed_by_the_limit_on_the_size_of_its_files() {
    let data = tempfile::tempdir().unwrap();
    let wal = data.path().join("wal");
    let whole = Server::command(data.path(), &["--wal-capacity", "64MiB"]);
    let mut limited = std::process::Command::new("sh");
    // In units of 512 bytes.
    limited.args(["-c", "ulimit -f 204801 && exec \"$0\" \"$@\""]);
    limited.arg(whole.get_program()).args(whole.get_args());
    let server = Server::start_command(limited);
    let said = refused(1, &["wal", "resize", text(&wal), "--capacity", "160MiB"]);
    contains(&said, &["not resized to 160MiB", "ulimit -f"]);
    assert_eq!(fs::metadata(&wal).unwrap().len(), 64 << 20);
    ok(&["wal", "resize", text(&wal), "--capacity", "96MiB"]);
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
}
