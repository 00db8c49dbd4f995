//! What `alluvium volume export` reports and does while servers are missing, and when it cannot
//! start.

mod support;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use support::cluster::{Cluster, EXPORTED};
use support::nbd::{IO_ERROR, Nbd};
use support::{Server, alluvium, contains, refused};

const BLOCK: [u8; 4096] = [7; 4096];

fn export_command(cluster: &Cluster, socket: &Path, more: &[&str]) -> Command {
    let mut command = alluvium();
    command.args(cluster.words(&["export", "disk", "--metrics-listen", "127.0.0.1:0"]));
    command.arg("--socket").arg(socket).args(more);
    command
}

/// Starts an export that cannot attach the volume.
fn start_stuck(cluster: &Cluster, socket: &Path) -> Server {
    Server::start_up_to_admin_port(export_command(cluster, socket, &[]))
}

/// A cluster whose volume `disk` has a group, and two of whose servers are gone.
fn without_majority(cluster: &Cluster, socket: &Path) -> Server {
    let [first, second, third] = [1, 2, 3].map(|server| cluster.start(server));
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let export = cluster.export("disk", socket, &[]);
    assert_eq!(Nbd::open(socket).write(0, &BLOCK).unwrap(), 0);
    assert!(export.stop(Signal::TERM).0.success());
    for server in [second, third] {
        server.stop(Signal::KILL);
    }
    first
}

#[track_caller]
fn answers(export: &Server, path: &str, status: &str, parts: &[&str]) {
    let (head, body) = export.get(path);
    assert!(head.contains(status), "{path}: {head}: {body}");
    contains(&body, parts);
}

#[test]
fn an_export_that_cannot_attach_says_what_it_waits_for_and_a_signal_ends_it() {
    let cluster = Cluster::new();
    let socket = cluster.path("nbd.sock");
    let _first = without_majority(&cluster, &socket);
    let mut export = start_stuck(&cluster, &socket);
    let line = export.wait_for("are stuck");
    let missing = ["volume disk", "region 0", "server 2 is not connected", "server 3"];
    contains(&line, &missing);
    answers(&export, "/readyz", "503", &missing[1..]);
    answers(&export, "/healthz", "200", &["degraded"]);
    // The errors of other commands name the process that has the volume.
    let place = format!("{} on host ", socket.display());
    let process = format!("(process {})", export.pid().as_raw_nonzero());
    let parts = ["volume disk is attached by", &place, &process, "within 5 s", "--take"];
    cluster.refused(&["delete", "disk"], &parts);
    cluster.refused(&["attach", "disk"], &parts);
    let (status, log) = export.stop(Signal::TERM);
    assert!(status.success(), "{log}");
    contains(&log, &["SIGTERM: stopped before the volume was attached"]);
    assert!(!socket.exists());
    assert_eq!(cluster.json(&["info", "disk"])["attached_at"], Value::Null);
    assert_eq!(cluster.json(&["delete", "disk"]), serde_json::json!(["disk"]));
}

#[test]
fn an_export_that_cannot_attach_fails_after_its_io_timeout() {
    let cluster = Cluster::new();
    let socket = cluster.path("nbd.sock");
    let _first = without_majority(&cluster, &socket);
    let text = socket.display().to_string();
    let export = ["export", "disk", "--socket", &text, "--io-timeout", "2s"];
    let parts = ["cannot be attached", "no answer in time", "region 0", "server 2", "server 3"];
    cluster.refused(&export, &parts);
    assert!(!socket.exists());
    assert_eq!(cluster.json(&["info", "disk"])["attached_at"], Value::Null);
}

#[test]
fn requests_that_wait_for_a_majority_are_reported_until_they_go_on() {
    let cluster = Cluster::new();
    let [_first, second, third] = [1, 2, 3].map(|server| cluster.start(server));
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let socket = cluster.path("nbd.sock");
    let mut export = Server::start_until(export_command(&cluster, &socket, &[]), EXPORTED);
    let mut nbd = Nbd::open(&socket);
    assert_eq!(nbd.write(0, &BLOCK).unwrap(), 0);
    for server in [second, third] {
        server.stop(Signal::KILL);
    }
    let write = std::thread::spawn(move || nbd.write(0, &BLOCK).unwrap());
    let line = export.wait_for("are stuck");
    let missing = ["volume disk", "region 0", "server 2 is not connected", "server 3"];
    contains(&line, &missing);
    answers(&export, "/readyz", "503", &missing[1..]);
    answers(&export, "/healthz", "200", &["degraded"]);
    let _second = cluster.start(2);
    assert_eq!(write.join().unwrap(), 0);
    export.wait_for("no request of volume disk is stuck any more");
    answers(&export, "/readyz", "200", &["ok"]);
    let (status, log) = export.stop(Signal::TERM);
    assert!(status.success(), "{log}");
    assert_eq!(log.matches("are stuck").count(), 1, "{log}");
}

#[test]
fn a_first_write_without_three_servers_says_what_it_waits_for_and_times_out() {
    let cluster = Cluster::new();
    let _first = cluster.start(1);
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let socket = cluster.path("nbd.sock");
    let timeout = ["--io-timeout", "7s"];
    let mut export = Server::start_until(export_command(&cluster, &socket, &timeout), EXPORTED);
    assert_eq!(Nbd::open(&socket).write(0, &BLOCK).unwrap(), IO_ERROR);
    let line = export.wait_for("are stuck");
    let missing = ["volume disk", "region 0", "a group needs 3 servers, and 1 are registered"];
    contains(&line, &missing);
    contains(&line, &["waited for 5 s"]);
    answers(&export, "/readyz", "503", &missing[1..]);
}

#[test]
fn a_socket_is_replaced_only_if_no_process_serves_it() {
    let cluster = Cluster::new();
    let _first = cluster.start(1);
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let socket = cluster.path("nbd.sock");
    let path = socket.to_str().unwrap();
    // A process that has ended without removing it.
    drop(UnixListener::bind(&socket).unwrap());
    let export = cluster.export("disk", &socket, &[]);
    let take = ["export", "disk", "--take", "--socket", path];
    cluster.refused(&take, &[path, "another process serves this socket"]);
    assert!(Nbd::open(&socket).size_bytes > 0, "it is served as before");
    drop(export.stop(Signal::TERM));
    // A start that fails leaves none.
    cluster.refused(&["export", "missing", "--socket", path], &["missing does not exist"]);
    assert!(!socket.exists());
}

#[test]
fn options_out_of_bounds_are_refused_with_their_bounds() {
    let export = |option, value| {
        refused(2, &["volume", "export", "disk", "--socket", "nbd.sock", option, value])
    };
    for value in ["0", "4095", "5GiB"] {
        contains(&export("--memory", value), &[value, "--memory", "from 1MiB to 4GiB"]);
    }
    for value in ["0s", "999ms", "25h"] {
        contains(&export("--io-timeout", value), &[value, "--io-timeout", "from 1s to 24h"]);
    }
    let serve = |option, value| {
        refused(2, &["volume", "serve", "--wal", "none", "--store", "none", option, value])
    };
    for (option, bounds) in [
        ("--entry-memory", "from 16MiB to 1TiB"),
        ("--overlay-memory", "from 1MiB to 1TiB"),
        ("--wal-capacity", "from 160MiB to 16TiB"),
        ("--store-capacity", "from 64MiB to 16TiB"),
    ] {
        contains(&serve(option, "0"), &[option, bounds]);
    }
    assert!(!Path::new("none").exists());
    let usage = refused(2, &["volume", "export", "disk"]);
    contains(&usage, &["<--socket <PATH>|--listen <ADDR:PORT>>"]);
    let usage = support::help(&["volume", "export", "--help"]);
    contains(&usage, &["<--socket <PATH>|--listen <ADDR:PORT>> <NAME>"]);
}
