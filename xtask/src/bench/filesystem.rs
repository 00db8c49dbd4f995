//! Loop devices at the speed of cloud volumes, with a file system or without.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::Error;
use crate::exec::quietly;
use crate::loopdev::LoopDevice;

/// The limits of a file system, in each direction. 0: those of the underlying disk.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    pub(super) mebibytes_per_second: u64,
    pub(super) iops: u64,
}

/// An empty ext4. It is unmounted when dropped; the image is kept for the next one.
pub(super) struct FileSystem {
    mount: PathBuf,
    /// Detached after the unmount.
    raw: Raw,
}

/// The controller of cgroup v1. At its root it limits all I/O of a device, including that of the
/// file system's writers in the kernel.
const THROTTLE: &str = "/sys/fs/cgroup/blkio/blkio.throttle";

impl FileSystem {
    /// Creates a file system in `directory`, in the image of an earlier one if any. Needs root,
    /// loop devices and, with a limit, cgroup v1.
    pub(super) fn new(
        directory: &Path,
        name: &str,
        gibibytes: u64,
        limit: Limit,
    ) -> Result<Self, Error> {
        let mount = directory.join(name);
        fs::create_dir_all(&mount)?;
        let raw = Raw::unlimited(directory, name, gibibytes)?;
        let options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
        quietly(Command::new("mkfs.ext4").args(["-q", "-F", "-E", options]).arg(raw.path()))?;
        quietly(Command::new("mount").arg(raw.path()).arg(&mount))?;
        let filesystem = Self { mount, raw };
        set_limit(&filesystem.raw.number, limit)?;
        Ok(filesystem)
    }

    pub(super) fn path(&self) -> &Path {
        &self.mount
    }
}

/// A loop device. Its limits are removed when it is dropped.
pub(super) struct Raw {
    /// Major and minor number.
    number: String,
    device: LoopDevice,
}

impl Raw {
    /// Creates a device in `directory`, with the image of an earlier one if any. Needs what
    /// [`FileSystem::new`] needs.
    pub(super) fn new(
        directory: &Path,
        name: &str,
        gibibytes: u64,
        limit: Limit,
    ) -> Result<Self, Error> {
        let raw = Self::unlimited(directory, name, gibibytes)?;
        set_limit(&raw.number, limit)?;
        Ok(raw)
    }

    fn unlimited(directory: &Path, name: &str, gibibytes: u64) -> Result<Self, Error> {
        let device = LoopDevice::attach(&image(directory, name, gibibytes)?)?;
        Ok(Self { number: number(&device)?, device })
    }

    pub(super) fn path(&self) -> &Path {
        self.device.path()
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = set_limit(&self.number, Limit { mebibytes_per_second: 0, iops: 0 });
    }
}

/// Writes the image of a device, unless an earlier one has left it.
fn image(directory: &Path, name: &str, gibibytes: u64) -> Result<PathBuf, Error> {
    let image = directory.join(format!("{name}.img"));
    if !image.exists() {
        // Written completely: where the file has no block yet, or one that was never written, a
        // flush of the file system also commits the journal of the underlying file system, and
        // everything on the disk waits for everything else.
        let mut write = Command::new("dd");
        write.args(["if=/dev/zero", "bs=1M", "oflag=direct", "conv=fsync"]);
        write.arg(format!("count={}", gibibytes << 10));
        quietly(write.arg(format!("of={}", image.display())))?;
    }
    Ok(image)
}

/// The device's major and minor number.
fn number(device: &LoopDevice) -> Result<String, Error> {
    let name = device.path().file_name().expect("a device has a name").to_string_lossy();
    Ok(fs::read_to_string(format!("/sys/block/{name}/dev"))?.trim().to_owned())
}

fn set_limit(number: &str, limit: Limit) -> Result<(), Error> {
    for direction in ["read", "write"] {
        for (kind, most) in [("bps", limit.mebibytes_per_second << 20), ("iops", limit.iops)] {
            let path = format!("{THROTTLE}.{direction}_{kind}_device");
            let set = fs::write(&path, format!("{number} {most}"));
            if let Err(error) = set
                && most > 0
            {
                return Err(format!("{path}: {error}; --unlimited does not need it").into());
            }
        }
    }
    Ok(())
}

/// Removes the file systems in `directory` that a run left when it was ended by a signal. Others
/// are not touched.
///
/// # Errors
/// A process of that run still uses one.
fn release(directory: &Path) -> Result<(), Error> {
    // The path as the kernel names it.
    let directory = directory.canonicalize()?;
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    for mount in mounts.lines().rev().filter_map(|line| mounted_in(line, &directory)) {
        println!("{} is still mounted; unmounting it", mount.display());
        quietly(Command::new("umount").arg(mount))?;
    }
    for device in LoopDevice::left_in(&directory)? {
        println!("{} is still attached; detaching it", device.path().display());
        set_limit(&number(&device)?, Limit { mebibytes_per_second: 0, iops: 0 })?;
    }
    Ok(())
}

/// Creates an empty directory in place of what an earlier run left.
pub(super) fn emptied(directory: &Path) -> Result<(), Error> {
    if directory.exists() {
        removed(directory)?;
    }
    Ok(fs::create_dir_all(directory)?)
}

/// Removes a directory, also if file systems in it are still mounted: a process that was killed a
/// moment ago may have kept one.
pub(super) fn removed(directory: &Path) -> Result<(), Error> {
    release(directory)?;
    Ok(fs::remove_dir_all(directory)?)
}

/// Returns the mount point in a line of /proc/self/mounts if it is inside the directory and not the
/// directory itself.
fn mounted_in(line: &str, directory: &Path) -> Option<PathBuf> {
    let mut place = line.split(' ').nth(1)?.to_owned();
    // The kernel writes these characters as octal escapes.
    for (number, character) in [(r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", r"\")] {
        place = place.replace(number, character);
    }
    let place = PathBuf::from(place);
    (place.starts_with(directory) && place != directory).then_some(place)
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _ = set_limit(&self.raw.number, Limit { mebibytes_per_second: 0, iops: 0 });
        // A process that was killed a moment ago may still use it.
        for _ in 0..50 {
            if quietly(Command::new("umount").arg(&self.mount)).is_ok() {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Drops the file system's cache of all files.
pub(super) fn drop_caches() -> Result<(), Error> {
    const PATH: &str = "/proc/sys/vm/drop_caches";
    fs::write(PATH, "1").map_err(|error| format!("{PATH}: {error}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_inside_the_directory_are_found() {
        let directory = Path::new("/srv/run of tests");
        let found = |line: &str| mounted_in(line, directory);
        let inside = Path::new("/srv/run of tests/log");
        let line = r"/dev/loop3 /srv/run\040of\040tests/log ext4 rw 0 0";
        assert_eq!(found(line).as_deref(), Some(inside));
        for elsewhere in [
            "/dev/loop3 /srv/log ext4 rw 0 0",
            r"/dev/loop3 /srv/run\040of\040tests2/log ext4 rw 0 0",
            r"/dev/sdb /srv/run\040of\040tests ext4 rw 0 0",
            r"/srv/run\040of\040tests/log /mnt ext4 rw 0 0",
            "",
        ] {
            assert_eq!(found(elsewhere), None, "{elsewhere}");
        }
    }
}
