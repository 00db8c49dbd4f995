//! The tools on a block device. In a test process of its own: between fork and exec, a child holds
//! a copy of each descriptor, and with it of the claim on a device.

mod support;

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use rustix::process::Signal;
use support::log::{append, writer};
use support::{Server, contains, ok, ok_json, refused};

/// A loop device over a file of its own; removed when dropped.
struct LoopDevice {
    path: PathBuf,
    directory: tempfile::TempDir,
}

impl LoopDevice {
    /// Returns `None` and prints the reason where loop devices are not allowed.
    fn new(bytes: u64) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("backing");
        let backing = File::create(&file).unwrap();
        rustix::fs::fallocate(&backing, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        match output {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).unwrap().trim().into();
                Some(Self { path, directory })
            }
            other => {
                eprintln!("skipped: losetup: {other:?}");
                None
            }
        }
    }
}

impl LoopDevice {
    /// Simulates the extension of a volume.
    fn grow(&self, bytes: u64) {
        let file = File::options().write(true).open(self.directory.path().join("backing")).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
        let resized = Command::new("losetup").arg("--set-capacity").arg(&self.path).status();
        assert!(resized.is_ok_and(|status| status.success()), "{}", self.path.display());
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.path).status();
        assert!(detached.is_ok_and(|status| status.success()), "{} stays", self.path.display());
    }
}

#[test]
fn every_tool_works_on_a_block_device_within_its_size() {
    let Some(device) = LoopDevice::new(16 << 20) else { return };
    let path = device.path.to_str().unwrap();
    ok(&["wal", "format", "--target", path, "--capacity", "8MiB"]);
    append(&device.path, &[b"one", &[2; 100_000]], false);
    let verified = ok_json(&["wal", "verify", "--target", path, "--json"]);
    assert_eq!(
        (&verified["target"]["kind"], &verified["intact"]),
        (&"block device".into(), &true.into())
    );
    ok(&["wal", "recover", "--target", path]);

    let said = refused(1, &["wal", "resize", "--target", path, "--capacity", "32MiB"]);
    contains(&said, &[path, "a block device of 16MiB", "is too small", "32MiB"]);
    for (capacity, bytes) in [("16MiB", 16 << 20), ("4MiB", 4 << 20)] {
        let seen = ok_json(&["wal", "resize", "--target", path, "--capacity", capacity, "--json"]);
        assert_eq!(seen["header"]["capacity_bytes"], bytes);
        assert_eq!(seen["target"]["size_bytes"], 16 << 20, "a device keeps its size");
        let seen = ok_json(&["wal", "verify", "--target", path, "--json"]);
        assert_eq!((&seen["intact"], &seen["scan"]["records"]), (&true.into(), &2.into()));
    }

    let wal = writer(&device.path);
    for command in [&["recover"][..], &["resize", "--capacity", "8MiB"]] {
        let arguments = [&["wal", command[0], "--target", path], &command[1..]].concat();
        contains(&refused(1, &arguments), &[path, "in use by another process"]);
    }
    wal.close().unwrap();
}

/// The kernel would report success for a write that was cut short by a full disk.
#[test]
fn a_loop_device_over_a_sparse_file_is_refused() {
    let Some(device) = LoopDevice::new(16 << 20) else { return };
    let path = device.path.to_str().unwrap();
    let backing =
        File::options().write(true).open(device.directory.path().join("backing")).unwrap();
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&backing, hole, 8 << 20, 1 << 20).unwrap();
    let format = ["wal", "format", "--target", path, "--capacity", "8MiB"];
    contains(&refused(1, &format), &[path, "sparse", "15728640 of 16777216", "fallocate"]);
    rustix::fs::fallocate(&backing, rustix::fs::FallocateFlags::empty(), 0, 16 << 20).unwrap();
    ok(&format);
}

#[test]
fn a_running_server_resizes_within_its_extended_device() {
    let Some(device) = LoopDevice::new(64 << 20) else { return };
    let (path, data) = (device.path.to_str().unwrap(), tempfile::tempdir().unwrap());
    let data_dir = data.path().to_str().unwrap();
    let server = Server::start(data.path(), &["--wal", path]);
    let resize = |capacity| ["wal", "resize", path, "--data-dir", data_dir, "--capacity", capacity];
    let said = refused(1, &resize("96MiB"));
    contains(&said, &[path, "not resized to 96MiB", "96MiB requested, but it has 64MiB"]);
    device.grow(128 << 20);
    contains(&ok(&resize("96MiB")), &["a block device of 128MiB", "64MiB before, 96MiB now"]);
    contains(&ok(&resize("128MiB")), &["128MiB now"]);
    // The device keeps its size.
    contains(&ok(&resize("64MiB")), &["a block device of 128MiB", "64MiB now"]);
    contains(&ok(&resize("128MiB")), &["128MiB now"]);
    server.stop(Signal::KILL);
    ok(&["wal", "verify", path]);
    Server::start(data.path(), &["--wal", path]).stop(Signal::TERM);
}
