//! A file system of its own on a loop device, at the speed of a cloud volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::Error;
use crate::exec::quietly;
use crate::loopdev::LoopDevice;

/// What a volume gives, in each direction. 0: what the disk below has.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    pub(super) mebibytes_per_second: u64,
    pub(super) iops: u64,
}

/// An empty ext4. It is unmounted when dropped; the image stays, for the next one.
pub(super) struct Volume {
    mount: PathBuf,
    /// Major and minor number.
    number: String,
    device: Option<LoopDevice>,
}

/// The controller of cgroup v1. At its root it limits all I/O of a device, that of the file system's writers in the kernel included.
const THROTTLE: &str = "/sys/fs/cgroup/blkio/blkio.throttle";

impl Volume {
    /// Make one in `directory`, in the image of an earlier one if there is one. Takes root, loop devices and, with a limit, cgroup v1.
    pub(super) fn new(
        directory: &Path,
        name: &str,
        gibibytes: u64,
        limit: Limit,
    ) -> Result<Self, Error> {
        let (mount, image) = (directory.join(name), directory.join(format!("{name}.img")));
        fs::create_dir_all(&mount)?;
        if !image.exists() {
            // Written in full: where the file below has no block yet, or one that was never written, a flush of the volume is one of that file
            // system's journal too, in which everything on the disk has to wait for everything else.
            let mut write = Command::new("dd");
            write.args(["if=/dev/zero", "bs=1M", "oflag=direct", "conv=fsync"]);
            write.arg(format!("count={}", gibibytes << 10));
            quietly(write.arg(format!("of={}", image.display())))?;
        }
        let options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
        quietly(Command::new("mkfs.ext4").args(["-q", "-F", "-E", options]).arg(&image))?;
        let device = LoopDevice::attach(&image)?;
        let name = device.path().file_name().expect("a device has a name").to_string_lossy();
        let number = fs::read_to_string(format!("/sys/block/{name}/dev"))?.trim().to_owned();
        quietly(Command::new("mount").arg(device.path()).arg(&mount))?;
        let volume = Self { mount, number, device: Some(device) };
        volume.limit(limit)?;
        Ok(volume)
    }

    pub(super) fn path(&self) -> &Path {
        &self.mount
    }

    fn limit(&self, limit: Limit) -> Result<(), Error> {
        for direction in ["read", "write"] {
            for (kind, most) in [("bps", limit.mebibytes_per_second << 20), ("iops", limit.iops)] {
                let path = format!("{THROTTLE}.{direction}_{kind}_device");
                let set = fs::write(&path, format!("{} {most}", self.number));
                if let Err(error) = set
                    && most > 0
                {
                    return Err(format!("{path}: {error}; --unlimited does without").into());
                }
            }
        }
        Ok(())
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = self.limit(Limit { mebibytes_per_second: 0, iops: 0 });
        // A process that was killed a moment ago may still hold it.
        for _ in 0..50 {
            if quietly(Command::new("umount").arg(&self.mount)).is_ok() {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        self.device = None;
    }
}

/// Forget what the file system's cache holds, of all files.
pub(super) fn drop_caches() -> Result<(), Error> {
    const PATH: &str = "/proc/sys/vm/drop_caches";
    fs::write(PATH, "1").map_err(|error| format!("{PATH}: {error}").into())
}
