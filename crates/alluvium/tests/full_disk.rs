//! `alluvium serve` on full disks. Each test mounts a small file system, and is skipped where this
//! process may not mount.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use support::produce::produce;
use support::{Server, contains, ok, refused, until};

/// A mounted file system, until it is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(path).unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(path)
            .output();
        match mount {
            Ok(output) if output.status.success() => Some(Self(path.to_path_buf())),
            other => {
                eprintln!("skipped: cannot mount a file system: {other:?}");
                None
            }
        }
    }

    /// Takes all space that is left.
    fn fill(&self) {
        let error = fs::write(self.0.join("filler"), vec![1; 64 << 20]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
    }

    fn empty(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are text")
}

/// Bytes of all files in a directory and those below it.
fn bytes_in(directory: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let entries = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let found = entry.metadata().ok()?; // The file may be gone.
        Some(if found.is_dir() { bytes_in(&entry.path()) } else { found.len() })
    });
    entries.sum()
}

#[test]
fn a_full_object_disk_is_emptied_by_deleting_topics() {
    let data = tempfile::tempdir().unwrap();
    let objects = data.path().join("disk");
    let Some(disk) = SmallDisk::mount(&objects, "24m") else { return };
    let store = format!("file://{}", text(&objects));
    let arguments =
        ["--wal-capacity", "64MiB", "--upload-interval", "1s", "--object-store", &store];
    let server = Server::start(&data.path().join("data"), &arguments);
    let at = server.kafka.clone();
    for topic in ["bulk", "kept"] {
        ok(&["topic", "create", topic, "--bootstrap", &at]);
    }
    let value: &'static [u8] = vec![b'x'; 900_000].leak();
    for _ in 0..14 {
        assert_eq!(produce(&at, "bulk", value).unwrap(), 0);
    }
    let streams = objects.join("streams");
    until("the records are in objects", || bytes_in(&streams) > 12 << 20);
    disk.fill();
    // An upload fails, which is when an operator looks for data to delete.
    assert_eq!(produce(&at, "kept", value).unwrap(), 0);
    ok(&["topic", "delete", "bulk", "--bootstrap", &at]);
    until("the objects are deleted", || bytes_in(&streams) < 2 << 20);
    contains(&ok(&["topic", "list", "--bootstrap", &at]), &["kept"]);
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_full_catalog_disk_refuses_new_topics_only() {
    let data = tempfile::tempdir().unwrap();
    let directory = data.path().join("disk");
    let Some(disk) = SmallDisk::mount(&directory, "24m") else { return };
    let (wal, objects) = (data.path().join("wal"), data.path().join("objects"));
    let store = format!("file://{}", text(&objects));
    let arguments = [
        "--wal",
        text(&wal),
        "--wal-capacity",
        "64MiB",
        "--upload-interval",
        "1s",
        "--object-store",
        &store,
    ];
    let mut server = Server::start(&directory, &arguments);
    let mut at = server.kafka.clone();
    ok(&["topic", "create", "first", "--bootstrap", &at]);
    disk.fill();
    let create = |at: &str, name: &str| {
        let arguments = ["topic", "create", name, "--partitions", "500", "--bootstrap", at];
        support::run(&arguments)
    };
    let mut made = Vec::new();
    let refusal = loop {
        let name = format!("topic-{}", made.len());
        let output = create(&at, &name);
        if !output.status.success() {
            break support::stderr(&output);
        }
        made.push(name);
        assert!(made.len() < 100, "the disk is not full");
    };
    contains(&refusal, &["no space", "PolicyViolation"]);
    // The refused topic does not exist, and other operations still work.
    let refused_name = format!("topic-{}", made.len());
    assert!(!ok(&["topic", "list", "--bootstrap", &at]).contains(&refused_name));
    assert_eq!(produce(&at, "first", b"one").unwrap(), 0);
    until("the record is in an object", || {
        server.get("/metrics").1.contains("alluvium_objects 1\n")
    });
    let health = server.get("/healthz").1;
    contains(&health, &["degraded", "catalog_disk_full: ", text(&directory)]);

    // The same holds after a crash, at the next start.
    server.stop(Signal::KILL);
    server = Server::start(&directory, &arguments);
    at = server.kafka.clone();
    assert_eq!(produce(&at, "first", b"two").unwrap(), 0);
    let again =
        refused(1, &["topic", "create", &refused_name, "--partitions", "500", "--bootstrap", &at]);
    contains(&again, &["no space"]);
    for name in ["first"].into_iter().chain(made.iter().map(String::as_str)) {
        ok(&["topic", "delete", name, "--bootstrap", &at]);
    }
    assert_eq!(ok(&["topic", "list", "--bootstrap", &at]), "there are no topics\n");
    disk.empty();
    assert!(create(&at, &refused_name).status.success());
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
}
