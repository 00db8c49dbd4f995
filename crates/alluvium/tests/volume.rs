//! `alluvium volume` with the built binary: three servers, an export, and a client of the NBD
//! protocol.

mod support;

use std::net::TcpStream;
use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};
use support::cluster::{Cluster, EXPORTED};
use support::nbd::{NO_SPACE, Nbd, SHUTDOWN};
use support::{Server, alluvium, assert_documented, contains, refused, until};

const BLOCK: usize = 4096;

fn pattern(number: u8) -> Vec<u8> {
    (0..BLOCK).map(|at| number ^ at as u8 ^ (at >> 8) as u8).collect()
}

#[test]
fn a_volume_keeps_acknowledged_writes_when_its_leader_and_its_exporter_are_killed() {
    let cluster = Cluster::new();
    let mut servers: Vec<_> = (1..=3).map(|server| Some(cluster.start(server))).collect();
    let created = cluster.json(&["create", "disk", "--size", "1GiB"]);
    assert_eq!(created, json!({ "name": "disk", "id": 1, "bytes": 1 << 30 }));
    let socket = cluster.path("nbd.sock");
    let mut export = cluster.export("disk", &socket, &[]);
    let mut nbd = Nbd::open(&socket);
    assert_eq!(nbd.size_bytes, 1 << 30);

    let at = |number: u8| u64::from(number) * 3 * BLOCK as u64 + 100;
    let mut written = 0;
    let mut write = |nbd: &mut Nbd, count: u8| {
        for number in written..written + count {
            assert_eq!(nbd.write(at(number), &pattern(number)).unwrap(), 0);
        }
        written += count;
        for number in 0..written {
            assert!(nbd.read(at(number), BLOCK) == pattern(number), "block {number} is lost");
        }
    };
    write(&mut nbd, 20);
    let replicas = cluster.replicas("disk");
    assert_eq!(replicas.len(), 3);
    let leader = replicas.iter().find(|replica| replica["role"] == "leader").unwrap();
    let leader = leader["server"].as_u64().unwrap() as usize;

    servers[leader - 1].take().unwrap().stop(Signal::KILL);
    write(&mut nbd, 20);
    servers[leader - 1] = Some(cluster.start(leader));
    write(&mut nbd, 20);

    drop(nbd);
    export.stop(Signal::KILL);
    // The registry has not noticed the end of the process yet, or it has: --take is right in both.
    export = cluster.export("disk", &socket, &["--take"]);
    let mut nbd = Nbd::open(&socket);
    write(&mut nbd, 20);
    cluster.wait_until_applied("disk");

    let list = cluster.json(&["list"]);
    let epoch = list[0]["epoch"].as_u64().unwrap();
    assert!(epoch >= 2, "{list}");
    let socket_text = socket.to_str().unwrap();
    let attached_at = list[0]["attached_at"].as_str().unwrap().to_owned();
    let process = format!("(process {})", export.pid().as_raw_nonzero());
    assert!(attached_at.starts_with(&format!("{socket_text} on host ")), "{attached_at}");
    assert!(attached_at.ends_with(&process), "{attached_at}");
    let expected = json!([{
        "name": "disk", "id": 1, "bytes": 1 << 30, "regions": 1, "state": "available",
        "attached_at": attached_at, "epoch": epoch,
    }]);
    assert_eq!(list, expected);
    contains(&cluster.ok(&["list"]), &["disk", "1GiB", "available", socket_text]);
    let info = cluster.json(&["info", "disk"]);
    assert_eq!(info["attached_at"], attached_at);
    let text = cluster.ok(&["info", "disk"]);
    contains(&text, &["volume disk: 1GiB", "leader", "follower", "exact", socket_text]);
    let status = cluster.json(&["status"]);
    let status = status.as_array().unwrap();
    assert_eq!(status.len(), 3);
    for server in status {
        assert_eq!((&server["error"], &server["replicas"]), (&Value::Null, &json!(1)), "{server}");
        assert_eq!(server["not_exact"], 0, "{server}");
    }
    let leaders: u64 = status.iter().map(|server| server["leaders"].as_u64().unwrap()).sum();
    assert_eq!(leaders, 1);
    contains(&cluster.ok(&["status"]), &["SERVER", "ok"]);

    // A volume that is attached is taken only on request; then the older attachment is fenced.
    let year = ["since 20", "T", "Z. "];
    cluster.refused(&["attach", "disk"], &[&[&attached_at[..], "--take"], &year[..]].concat());
    let attached = cluster.json(&["attach", "disk", "--take"]);
    assert_eq!(attached, json!({ "name": "disk", "epoch": epoch + 1 }));
    assert_eq!(nbd.write(at(0), &pattern(255)).unwrap(), SHUTDOWN);
    drop(nbd);
    let (status, log) = export.stop(Signal::TERM);
    assert!(status.success(), "{log}");
    let export = cluster.export("disk", &socket, &[]);
    let mut nbd = Nbd::open(&socket);
    write(&mut nbd, 1);
    drop(nbd);
    let (status, log) = export.stop(Signal::TERM);
    assert!(status.success(), "{log}");
    assert!(!socket.exists());

    assert_eq!(cluster.json(&["delete", "disk"]), json!(["disk"]));
    until("the volume is gone", || cluster.json(&["list"]) == json!([]));
    until("the replicas are gone", || {
        let status = cluster.json(&["status"]);
        status.as_array().unwrap().iter().all(|server| server["replicas"] == 0)
    });
    for server in servers.into_iter().rev() {
        let (status, log) = server.unwrap().stop(Signal::TERM);
        assert!(status.success(), "{log}");
    }
}

/// The server of the leader of the only group of a volume, once there is one.
fn leader(cluster: &Cluster, name: &str) -> usize {
    let mut found = None;
    until("there is a leader", || {
        let replicas = cluster.replicas(name);
        let leader = replicas.iter().find(|replica| replica["role"] == "leader");
        found = leader.map(|leader| leader["server"].as_u64().unwrap() as usize);
        found.is_some()
    });
    found.unwrap()
}

/// Server 1 hosts the coordination service and leads the group. A new export has not used the
/// other servers yet when it dies.
#[test]
fn the_loss_of_the_coordination_service_and_of_a_leader_ends_no_attachment() {
    let cluster = Cluster::new();
    let mut servers: Vec<_> = (1..=3).map(|server| Some(cluster.start(server))).collect();
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let socket = cluster.path("nbd.sock");
    let mut export = cluster.export("disk", &socket, &[]);
    assert_eq!(Nbd::open(&socket).write(0, &pattern(1)).unwrap(), 0);
    for _ in 0..20 {
        let leader = leader(&cluster, "disk");
        if leader == 1 {
            break;
        }
        servers[leader - 1].take().unwrap().stop(Signal::KILL);
        assert_eq!(Nbd::open(&socket).write(0, &pattern(1)).unwrap(), 0);
        servers[leader - 1] = Some(cluster.start(leader));
        cluster.wait_until_applied("disk");
    }
    assert_eq!(leader(&cluster, "disk"), 1, "it never led");
    export.stop(Signal::TERM);
    export = cluster.export("disk", &socket, &["--metrics-listen", "127.0.0.1:0"]);
    let mut nbd = Nbd::open(&socket);
    assert_eq!(nbd.write(0, &pattern(2)).unwrap(), 0);
    servers[0].take().unwrap().stop(Signal::KILL);
    assert_eq!(nbd.write(0, &pattern(3)).unwrap(), 0);
    assert!(nbd.read(0, BLOCK) == pattern(3));
    // Longer than the registry considers an export alive that it does not hear from.
    export.wait_for("another process may attach the volume");
    for server in servers.iter_mut().flatten() {
        server.wait_for("changes of the registry are not received");
    }
    servers[0] = Some(cluster.start(1));
    export.wait_for("the attachment is renewed");
    for server in servers.iter_mut().skip(1).flatten() {
        server.wait_for("the coordination service answers again");
    }
    cluster.refused(&["delete", "disk"], &["attached"]);
    cluster.refused(&["attach", "disk"], &["attached"]);
    assert_eq!(nbd.write(0, &pattern(4)).unwrap(), 0);
    assert!(export.get("/readyz").0.contains("200"));

    // An export that is fenced reports it without a request.
    cluster.ok(&["attach", "disk", "--take"]);
    export.wait_for("the volume is no longer attached");
    let (status, reason) = export.get("/readyz");
    assert!(status.contains("503"), "{status}");
    contains(&reason, &["no longer attached", "fenced"]);
    assert_eq!(nbd.write(0, &pattern(5)).unwrap(), SHUTDOWN);
    for line in ["another process may attach the volume", "the attachment is renewed"] {
        assert_eq!(export.log.matches(line).count(), 1, "{line}: {}", export.log);
    }
    assert_eq!(export.log.matches(" WARN ").count(), 1, "{}", export.log);
    // The other servers have logged the end of server 1 once, too.
    for server in servers.into_iter().skip(1).rev() {
        let (_, log) = server.unwrap().stop(Signal::TERM);
        for line in
            ["changes of the registry are not received", "coordination service answers again"]
        {
            assert_eq!(log.matches(line).count(), 1, "`{line}`: {log}");
        }
        let ended = log.lines().filter(|line| line.contains("server=1")).filter_map(|line| {
            let is_end = line.contains("the connection to a server has ended");
            (is_end || line.contains("connected to a server")).then_some(is_end)
        });
        let ended: Vec<_> = ended.collect();
        assert!(ended.contains(&true), "{log}");
        assert!(ended.windows(2).all(|pair| pair[0] != pair[1]), "{log}");
    }
}

#[test]
fn a_full_store_takes_writes_again_after_blocks_were_discarded() {
    let cluster = Cluster::new();
    let _servers = [1, 2, 3].map(|server| cluster.start(server));
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let socket = cluster.path("nbd.sock");
    let health = ["--metrics-listen", "127.0.0.1:0"];
    let mut export = cluster.export("disk", &socket, &health);
    let mut nbd = Nbd::open(&socket);
    let data = pattern(1).repeat(256);
    let mut full = 0;
    while full < 64 {
        match nbd.write(full << 20, &data).unwrap() {
            0 => full += 1,
            error => {
                assert_eq!(error, NO_SPACE);
                break;
            }
        }
    }
    assert!((30..64).contains(&full), "{full} MiB were written to stores of 64 MiB");
    contains(&export.wait_for("fail for lack of space"), &["writes of volume disk", "slots"]);
    contains(&export.get("/healthz").1, &["degraded", "no_space"]);
    nbd.trim(0, (full << 20) as usize);
    for at in 0..full {
        let is_written = || nbd.write(at << 20, &data).unwrap() == 0;
        until("the discarded blocks have left the stores", is_written);
    }
    export.wait_for("writes of volume disk do not fail for lack of space any more");
    assert_eq!(export.log.matches("fail for lack of space:").count(), 1, "{}", export.log);
    contains(&export.get("/healthz").1, &["ok"]);
}

#[test]
fn an_export_on_a_free_port_registers_that_port() {
    let cluster = Cluster::new();
    let _server = cluster.start(1);
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let mut command = alluvium();
    command.args(cluster.words(&["export", "disk", "--listen", "127.0.0.1:0"]));
    let export = Server::start_until(command, EXPORTED);
    let attached_at = cluster.json(&["info", "disk"])["attached_at"].as_str().unwrap().to_owned();
    let (address, _) = attached_at.split_once(" on host ").unwrap();
    assert!(TcpStream::connect(address).is_ok(), "{address}");
    contains(&export.log, &[address]);
}

#[test]
fn each_metric_of_servers_and_exports_is_documented() {
    let cluster = Cluster::new();
    let servers = [1, 2, 3].map(|number| {
        let mut command = cluster.serve(number, number);
        command.args(["--metrics-listen", "127.0.0.1:0"]);
        Server::start_until(command, " is ready: ")
    });
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let socket = cluster.path("disk.sock");
    let export = cluster.export("disk", &socket, &["--metrics-listen", "127.0.0.1:0"]);
    let (_, metrics) = export.get("/metrics");
    for kind in ["read", "write", "zero", "discard", "status"] {
        let line = format!("alluvium_volume_request_seconds_count{{kind=\"{kind}\"}} 0");
        assert!(metrics.lines().any(|it| it == line), "{line} is missing: {metrics}");
    }
    let mut nbd = Nbd::open(&socket);
    for _ in 0..3 {
        assert_eq!(nbd.write(0, &pattern(1)).unwrap(), 0);
    }
    assert_eq!(nbd.read(0, BLOCK), pattern(1));
    assert_ne!(nbd.write(1 << 30, &pattern(1)).unwrap(), 0, "beyond the end");
    let (_, metrics) = export.get("/metrics");
    for line in [
        "alluvium_nbd_connections_total 1",
        "alluvium_nbd_open_connections 1",
        "alluvium_nbd_requests_total{command=\"write\"} 4",
        "alluvium_nbd_request_errors_total{command=\"write\"} 1",
        "alluvium_nbd_request_bytes_total{command=\"read\"} 4096",
        "alluvium_volume_requests_total{kind=\"write\"} 3",
        "alluvium_volume_request_bytes_total{kind=\"write\"} 12288",
        "alluvium_volume_request_failures_total{kind=\"write\"} 0",
        "alluvium_volume_request_seconds_count{kind=\"write\"} 3",
    ] {
        assert!(metrics.lines().any(|it| it == line), "{line} is missing: {metrics}");
    }
    assert_documented(&metrics, "### Exports");
    assert!(export.get("/readyz").0.contains("200"));
    let written: u64 = servers
        .iter()
        .map(|server| {
            let (_, metrics) = server.get("/metrics");
            assert_documented(&metrics, "## Volume servers");
            let name = "alluvium_volume_ops_total ";
            let value = metrics.lines().find_map(|line| line.strip_prefix(name));
            value.expect("it is there").parse::<u64>().unwrap()
        })
        .sum();
    assert!(written >= 3, "{written}");
}

#[test]
fn wrong_usage_of_volumes_is_explained() {
    let cluster = Cluster::new();
    let create = |name, size| ["create", name, "--size", size];
    // Nothing listens there yet.
    for words in [&["list"][..], &["info", "disk"], &create("disk", "1GiB")] {
        cluster.refused(words, &["cannot be reached", &cluster.coordination]);
    }
    let first = cluster.start(1);
    cluster.ok(&create("disk", "1GiB"));
    cluster.refused(&create("disk", "2GiB"), &["disk is taken"]);
    cluster.refused(&create("other", "5000"), &["5000B", "multiple of 4KiB", "64TiB"]);
    cluster.refused(&create("other", "65TiB"), &["65TiB", "64TiB"]);
    for name in ["a/b", ".", ".."] {
        cluster.refused(&create(name, "1GiB"), &[name, "not a name", "a letter or a digit"]);
    }
    let option = ["--size", "1GiB", "--", "-y"];
    let create_at = ["volume", "create", "--coordination", &cluster.coordination];
    let said = refused(1, &[&create_at[..], &option].concat());
    contains(&said, &["-y", "not a name"]);
    // No volume is deleted if a name is wrong.
    cluster.ok(&create("other", "1GiB"));
    cluster.refused(
        &["delete", "disk", "missing", "other", "gone"],
        &["volume missing does not exist", "volume gone does not exist", "nothing was deleted"],
    );
    assert_eq!(cluster.json(&["list"]).as_array().unwrap().len(), 2);
    assert_eq!(cluster.json(&["delete", "other", "other"]), json!(["other"]));
    let missing = ["volume missing does not exist"];
    let socket = cluster.path("nbd.sock");
    let export = ["export", "missing", "--socket", socket.to_str().unwrap()];
    for words in [&["info", "missing"][..], &["attach", "missing"], &["delete", "missing"], &export]
    {
        cluster.refused(words, &missing);
    }
    let said = refused(2, &cluster.words(&["export", "disk"]));
    contains(&said, &["--socket"]);
    let said = refused(2, &cluster.words(&["export", "disk", "--listen", "0.0.0.0:0"]));
    contains(&said, &["--allow-plaintext-network"]);
    // A file at the path of the socket is not a socket that an earlier process has left behind.
    let file = cluster.path("image");
    std::fs::write(&file, "data").unwrap();
    cluster.refused(
        &["export", "missing", "--socket", file.to_str().unwrap()],
        &["image", "not a socket"],
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"data");

    // Another process with the devices of a running server.
    let fails = |mut command: Command, parts: &[&str]| {
        let output = command.output().unwrap();
        let said = support::stderr(&output);
        assert!(!output.status.success(), "{said}");
        contains(&said, parts);
    };
    fails(cluster.serve(1, 1), &["wal1", "in use"]);
    // A server with the store of another one, and one without the log that it had.
    drop(cluster.start(2).stop(Signal::TERM));
    drop(cluster.start(3).stop(Signal::TERM));
    fails(cluster.serve(3, 2), &["server 2", "not with these"]);
    // A device that is missing is not created if the other one was in use.
    fails(cluster.serve(4, 2), &["wal4", "log is blank", "store2", "belongs to server 2"]);
    fails(cluster.serve(2, 4), &["store4", "store is blank", "wal2", "has been in use"]);
    assert!(!cluster.path("wal4").exists() && !cluster.path("store4").exists());
    std::fs::write(cluster.path("store4"), vec![0; 64 << 20]).unwrap();
    fails(cluster.serve(2, 4), &["store4", "store is blank", "wal2", "has been in use"]);
    std::fs::write(cluster.path("wal4"), vec![0; 16 << 20]).unwrap();
    fails(cluster.serve(4, 5), &["wal4", "16MiB", "at least 160MiB"]);
    // A device with something else is not formatted, although its first 64 KiB are zeros.
    let mut btrfs = vec![0; 64 << 20];
    btrfs[(64 << 10) + 64..][..8].copy_from_slice(b"_BHRfS_M");
    std::fs::write(cluster.path("store6"), &btrfs).unwrap();
    fails(cluster.serve(6, 6), &["store6", "holds a btrfs file system, not a volume store"]);
    assert!(!cluster.path("wal6").exists(), "a log was created");
    assert_eq!(std::fs::read(cluster.path("store6")).unwrap(), btrfs);
    std::fs::rename(cluster.path("store6"), cluster.path("wal7")).unwrap();
    fails(cluster.serve(7, 7), &["wal7", "holds a btrfs file system, not an Alluvium WAL"]);
    assert!(!cluster.path("store7").exists(), "a store was created");
    let [log, store] = ["wal5", "store5"].map(|name| cluster.path(name).display().to_string());
    let small = ["serve", "--wal", &log, "--store", &store];
    for (option, size, bound) in [
        ("--wal-capacity", "16MiB", "from 160MiB"),
        ("--store-capacity", "63MiB", "from 64MiB"),
        ("--store-capacity", "17TiB", "to 16TiB"),
        ("--entry-memory", "15MiB", "from 16MiB"),
        ("--overlay-memory", "16000000TiB", "to 1TiB"),
    ] {
        let said = refused(2, &cluster.words(&[&small[..], &[option, size]].concat()));
        contains(&said, &[option, bound]);
        // The help has the same bounds.
        let bound = bound.rsplit(' ').next().unwrap();
        contains(&support::help(&["volume", "serve", "--help"]), &[option, bound]);
    }
    let everywhere = "0.0.0.0:0";
    for (more, parts) in [
        (&["--metrics-listen", everywhere][..], ["metrics-listen is", "--allow-plaintext-network"]),
        (&["--listen", everywhere], ["listen is", "--allow-plaintext-network"]),
        (&["--listen", everywhere, "--allow-plaintext-network"], ["listen is", "--advertise"]),
        (&["--advertise", "nowhere"], ["--advertise", "HOST:PORT"]),
    ] {
        contains(&refused(2, &cluster.words(&[&small[..], more].concat())), &parts);
    }
    let host = ["--coordination", "0.0.0.0:7400", "--coordination-file", "none"];
    let said = refused(2, &[&["volume"], &small[..], &host].concat());
    contains(&said, &["coordination is", "--allow-plaintext-network"]);
    assert!(!cluster.path("wal5").exists());
    drop(cluster.start(2).stop(Signal::TERM));
    let (status, log) = first.stop(Signal::TERM);
    assert!(status.success(), "{log}");
}

#[test]
fn servers_that_are_stopped_find_a_clean_shutdown_and_all_writes() {
    let cluster = Cluster::new();
    let servers = [1, 2, 3].map(|server| cluster.start(server));
    cluster.ok(&["create", "disk", "--size", "1GiB"]);
    let socket = cluster.path("nbd.sock");
    let export = cluster.export("disk", &socket, &[]);
    let mut nbd = Nbd::open(&socket);
    for block in 0..100 {
        assert_eq!(nbd.write(block * BLOCK as u64, &pattern(block as u8)).unwrap(), 0);
    }
    drop(nbd);
    drop(export.stop(Signal::TERM));
    for server in servers.into_iter().rev() {
        let (status, log) = server.stop(Signal::TERM);
        assert!(status.success(), "{log}");
    }
    let mut servers = [1, 2, 3].map(|server| Some(cluster.start(server)));
    for server in servers.iter().flatten() {
        contains(&server.log, &[" after a clean shutdown"]);
    }
    let export = cluster.export("disk", &socket, &[]);
    let mut nbd = Nbd::open(&socket);
    for block in 0..100 {
        let data = nbd.read(block * BLOCK as u64, BLOCK);
        assert!(data == pattern(block as u8), "block {block} is lost");
    }
    drop(nbd);
    drop(export.stop(Signal::TERM));
    servers[2].take().unwrap().stop(Signal::KILL);
    contains(&cluster.start(3).log, &[" after an unclean shutdown"]);
}

#[test]
fn a_server_waits_for_the_coordination_service_until_a_signal_ends_it() {
    let cluster = Cluster::new();
    let waits = || {
        let mut command = cluster.serve(2, 2);
        command.args(["--metrics-listen", "127.0.0.1:0"]);
        Server::start_until(command, "the start waits for the coordination service")
    };
    let server = waits();
    let (_, answer) = server.get("/readyz");
    contains(&answer, &["waiting for the coordination service"]);
    let (status, log) = server.stop(Signal::TERM);
    assert!(status.success(), "{log}");
    contains(&log, &["SIGTERM: stopping before the server is ready", "stopped"]);

    let mut server = waits();
    let first = cluster.start(1);
    server.wait_for(" is ready: ");
    drop(first.stop(Signal::TERM));
    assert!(server.get("/readyz").0.contains("200"));
    let first = cluster.start(1);
    let is_away = |server: &Value| !server["error"].is_null();
    until("both servers answer", || {
        let status = cluster.json(&["status"]);
        !status.as_array().unwrap().iter().any(is_away)
    });

    drop(server.stop(Signal::TERM));
    let status = cluster.json(&["status"]);
    let servers = status.as_array().unwrap();
    let away: Vec<_> = servers.iter().filter(|server| is_away(server)).collect();
    assert_eq!(away.len(), 1, "{status}");
    for field in ["replicas", "store_bytes", "store_free_bytes", "ring_bytes", "checkpoint"] {
        assert_eq!(away[0][field], Value::Null, "{status}");
    }
    let text = cluster.ok(&["status"]);
    let line = text.lines().find(|line| line.contains("not reachable")).unwrap();
    assert_eq!(line.split_whitespace().filter(|cell| *cell == "-").count(), 4, "{text}");
    drop(first.stop(Signal::TERM));
}
