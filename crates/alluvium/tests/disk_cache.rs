//! `alluvium serve --disk-cache` with the built binary: cold reads after a restart need no request
//! to the object store, and a cache that is lost or in use does not prevent a start.

mod support;

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use support::{Server, contains, ok, ok_json, until};

fn start(data: &Path, disk: &Path) -> Server {
    let disk = disk.to_str().expect("temporary paths are text");
    let mut arguments = vec!["--wal-capacity", "64MiB", "--upload-interval", "100ms"];
    arguments.extend(["--compaction-size", "0", "--disk-cache", disk]);
    arguments.extend(["--disk-cache-size", "128MiB", "--disk-cache-memory", "16MiB"]);
    Server::start(data, &arguments)
}

/// Starts a server and waits until its disk cache is open.
fn opened(data: &Path, disk: &Path) -> Server {
    let server = start(data, disk);
    until("the disk cache is open", || metric(&server, "disk_cache_open") == 1);
    server
}

/// The value of a metric without labels.
fn metric(server: &Server, name: &str) -> u64 {
    let (_, metrics) = server.get("/metrics");
    let value = |line: &str| {
        let (metric, value) = line.strip_prefix("alluvium_")?.split_once(' ')?;
        (metric == name).then(|| value.parse().expect("an integer"))
    };
    metrics.lines().find_map(value).unwrap_or_else(|| panic!("no {name} in: {metrics}"))
}

/// Reads the whole topic; returns its bytes.
fn consumed(server: &Server) -> u64 {
    let measured = ok_json(&["bench", "consume", "load", "--bootstrap", &server.kafka, "--json"]);
    measured["bytes"].as_u64().expect("a number of bytes")
}

fn gets(server: &Server) -> u64 {
    metric(server, "cold_read_gets_total")
}

#[test]
fn cold_reads_after_a_restart_are_served_from_disk() {
    let (data, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (data, disk) = (data.path(), disk.path().join("cache"));
    let server = start(data, &disk);
    let at = ["--bootstrap", server.kafka.as_str()];
    ok(&[&["topic", "create", "load", "--partitions", "3"], &at[..]].concat());
    let total = ["--total", "8MiB", "--batch-size", "64KiB"];
    ok(&[&["bench", "produce", "load"], &total[..], &at].concat());
    until("everything is uploaded", || metric(&server, "log_cache_pinned_bytes") == 0);
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");

    // From the object store, and written to the disk.
    let server = opened(data, &disk);
    let bytes = consumed(&server);
    assert!(bytes >= 8 << 20 && gets(&server) > 0, "{bytes} bytes by {} GETs", gets(&server));
    let put = || metric(&server, "disk_cache_writes_total");
    until("what was missed is put into the disk cache", || {
        put() >= metric(&server, "disk_cache_misses_total")
    });
    assert_eq!(metric(&server, "disk_cache_dropped_writes_total"), 0);
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");

    // From the disk: after a stop, and after a SIGKILL.
    for _ in 0..2 {
        let server = opened(data, &disk);
        assert_eq!(consumed(&server), bytes);
        assert_eq!(gets(&server), 0, "the object store was read");
        let hits = metric(&server, "disk_cache_hits_total");
        assert!(hits > 0 && metric(&server, "disk_cache_hit_bytes_total") >= 8 << 20, "{hits}");
        assert_eq!(metric(&server, "disk_cache_damaged_total"), 0);
        drop(server);
    }

    // If the cache is lost, blocks come from the object store again.
    fs::remove_dir_all(&disk).unwrap();
    let server = opened(data, &disk);
    assert_eq!(consumed(&server), bytes);
    assert!(gets(&server) > 0);

    // In use by that server: another one works without it, and logs that.
    let other_data = tempfile::tempdir().unwrap();
    let other = start(other_data.path(), &disk);
    until("the disk cache has failed", || metric(&other, "disk_cache_failed") == 1);
    assert_eq!(metric(&other, "disk_cache_open"), 0);
    assert_eq!(other.get("/healthz").1, "ok\n");
    assert_eq!(ok(&["topic", "list", "--bootstrap", &other.kafka]), "there are no topics\n");
    let (status, log) = other.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
    contains(&log, &["ERROR", "disk cache", "in use by another process", "does without it"]);
    assert_eq!((consumed(&server), metric(&server, "disk_cache_failed")), (bytes, 0));
}
