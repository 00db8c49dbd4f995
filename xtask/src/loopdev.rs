//! A loop device: a block device backed by a file.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::exec::{output, quietly};

/// Writes a file of zeros in full: an image for a loop device.
pub(crate) fn write_image(file: &Path, mebibytes: u64) -> Result<(), Error> {
    let mut image = File::create(file)?;
    for _ in 0..mebibytes {
        image.write_all(&[0; 1 << 20])?;
    }
    image.sync_all()?;
    Ok(())
}

/// An attached loop device. It is detached when dropped.
pub(crate) struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches a file with direct I/O, so that a flush of the device is a flush of the file and no
    /// data stays in a cache of its own.
    ///
    /// Fails where loop devices are not allowed: without root, or in most containers.
    pub(crate) fn attach(file: &Path) -> Result<Self, Error> {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(file);
        let printed = output(&mut losetup)?;
        Ok(Self { path: PathBuf::from(String::from_utf8(printed)?.trim()) })
    }

    /// Returns the devices of files in `directory` that a run left attached when it was ended by a
    /// signal. Those of other files are not touched.
    pub(crate) fn left_in(directory: &Path) -> Result<Vec<Self>, Error> {
        // The path as the kernel names it.
        let directory = directory.canonicalize()?;
        let mut left = Vec::new();
        for device in fs::read_dir("/sys/block")? {
            let device = device?;
            // Exists only where a file is attached. The kernel marks a deleted file after its name.
            let file = fs::read_to_string(device.path().join("loop/backing_file"));
            if file.is_ok_and(|file| Path::new(file.trim_end()).starts_with(&directory)) {
                left.push(Self { path: Path::new("/dev").join(device.file_name()) });
            }
        }
        Ok(left)
    }

    /// The device's path, such as /dev/loop0.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(error) = quietly(Command::new("losetup").arg("--detach").arg(&self.path)) {
            eprintln!("{} stays attached: {error}", self.path.display());
        }
    }
}
