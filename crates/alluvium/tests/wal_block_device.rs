//! The tools on a block device. A test process of its own: between fork and exec, a child holds a copy of each descriptor, and with it of the
//! claim on a device.

mod support;

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use support::log::{append, writer};
use support::{contains, ok, ok_json, refused};

/// A loop device over a file of its own; gone when dropped.
struct LoopDevice {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl LoopDevice {
    /// None, with a printed reason, where loop devices are not allowed.
    fn new(bytes: u64) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("backing");
        File::create(&file).unwrap().set_len(bytes).unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        match output {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).unwrap().trim().into();
                Some(Self { path, _directory: directory })
            }
            other => {
                eprintln!("skipped: losetup: {other:?}");
                None
            }
        }
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
    contains(&said, &[path, "a block device of 16MiB", "no room", "32MiB"]);
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
