//! `alluvium serve` on full disks. Each test mounts a small file system, and is skipped where this
//! process may not mount.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use support::produce::{consume, produce};
use support::{Server, contains, ok, text, until};

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

/// A server whose log is not on the disk of its objects.
struct Setting {
    directory: tempfile::TempDir,
    objects: PathBuf,
}

impl Setting {
    fn new() -> Option<(Self, SmallDisk)> {
        let directory = tempfile::tempdir().unwrap();
        let objects = directory.path().join("disk");
        let disk = SmallDisk::mount(&objects, "24m")?;
        Some((Self { directory, objects }, disk))
    }

    fn command(&self) -> Command {
        let store = format!("file://{}", text(&self.objects));
        let arguments =
            ["--wal-capacity", "64MiB", "--upload-interval", "1s", "--object-store", &store];
        Server::command(&self.directory.path().join("data"), &arguments)
    }

    fn reserve_bytes(&self) -> u64 {
        fs::metadata(self.objects.join("alluvium-reserve#0")).map_or(0, |found| found.len())
    }
}

fn create(at: &str, name: &str) {
    ok(&["topic", "create", name, "--partitions", "500", "--bootstrap", at]);
}

#[test]
fn topics_are_created_and_deleted_while_the_object_disk_is_full() {
    let Some((setting, disk)) = Setting::new() else { return };
    let mut server = Server::start_command(setting.command());
    let mut at = server.kafka.clone();
    ok(&["topic", "create", "first", "--bootstrap", &at]);
    assert_eq!(setting.reserve_bytes(), 8 << 20);
    disk.fill();
    let names: Vec<_> = (0..10).map(|number| format!("topic-{number}")).collect();
    names.iter().for_each(|name| create(&at, name));
    assert_eq!(produce(&at, "first", b"one").unwrap(), 0);
    let health = server.wait_for_health("degraded\nuploads_failing: ").1;
    // The catalog is written from the reserve, and nothing else is.
    assert!(!health.contains("catalog_behind"), "{health}");
    until("the reserve is in use", || setting.reserve_bytes() < 8 << 20);
    contains(&server.get("/metrics").1, &["alluvium_objects 0\n"]);

    // The same holds after a crash, at the next start.
    server.stop(Signal::KILL);
    server = Server::start_command(setting.command());
    contains(&server.log, &["WARN", "alluvium-reserve#0", "until there is space"]);
    at = server.kafka.clone();
    assert_eq!(produce(&at, "first", b"two").unwrap(), 0);
    create(&at, "late");
    let listed = ok(&["topic", "list", "--bootstrap", &at]);
    for name in names.iter().map(String::as_str).chain(["late", "first"]) {
        contains(&listed, &[name]);
        ok(&["topic", "delete", name, "--bootstrap", &at]);
    }
    assert_eq!(ok(&["topic", "list", "--bootstrap", &at]), "there are no topics\n");
    create(&at, "again");
    assert_eq!(produce(&at, "again", b"one").unwrap(), 0);
    disk.empty();
    until("the record is in an object", || {
        server.get("/metrics").1.contains("alluvium_objects 1\n")
    });
    assert_eq!(setting.reserve_bytes(), 8 << 20, "objects are written when the reserve is whole");
    assert_eq!(server.wait_for_health("ok").1, "ok\n");
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn a_catalog_that_cannot_be_written_delays_the_next_start_only() {
    let Some((setting, disk)) = Setting::new() else { return };
    let server = Server::start_command(setting.command());
    ok(&["topic", "create", "first", "--bootstrap", &server.kafka]);
    fs::remove_file(setting.objects.join("alluvium-reserve#0")).unwrap();
    disk.fill();
    create(&server.kafka, "second");
    until("it is reported", || server.get("/healthz").1.contains("\ncatalog_behind: "));
    contains(&server.get("/healthz").1, &["object store is behind", "No space left on device"]);
    contains(&server.get("/metrics").1, &[r#"alluvium_degraded{reason="catalog_behind"} 1"#]);
    ok(&["topic", "delete", "first", "--bootstrap", &server.kafka]);
    create(&server.kafka, "third");
    assert_eq!(produce(&server.kafka, "third", b"one").unwrap(), 0);
    server.stop(Signal::KILL);

    let mut server = Server::start_up_to_admin_port(setting.command());
    server.wait_for("the catalog in the object store cannot be opened");
    assert_eq!(server.get("/readyz").0, "HTTP/1.1 503 Service Unavailable");
    disk.empty();
    let ready = server.wait_for("alluvium is ready");
    let at = ready.split_once("kafka on ").unwrap().1.split(',').next().unwrap();
    let listed = ok(&["topic", "list", "--bootstrap", at]);
    contains(&listed, &["second", "third"]);
    assert!(!listed.contains("first"), "{listed}");
    assert_eq!(consume(at, "third"), ["one"]);
    assert_eq!(server.wait_for_health("ok").1, "ok\n");
    let (status, log) = server.stop(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{log}");
}
