//! What `tools/volume_reader.py` finds on the devices of servers that have ended.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::checker::{VOLUME_BYTES, difference};
use crate::Error;
use crate::exec::{output, quietly};
use crate::setup::runs;

/// The reader, and the directory with the devices.
pub(super) struct Devices {
    reader: PathBuf,
    directory: PathBuf,
}

impl Devices {
    /// Returns nothing, and says so, if there is no Python.
    pub(super) fn new(root: &Path, directory: &Path) -> Option<Self> {
        if !runs("python3", &["--version"]) {
            println!("without tools/volume_reader.py: python3 is not installed");
            return None;
        }
        let reader = root.join("tools/volume_reader.py");
        Some(Self { reader, directory: directory.to_path_buf() })
    }

    /// The devices are the files `wal` and `store` of the servers, which are counted from 0.
    fn command(&self, command: &str, server: usize) -> Command {
        let mut python = Command::new("python3");
        python.arg(&self.reader).arg(command);
        let devices = ["wal", "store"].map(|what| format!("{what}{}", server + 1));
        python.args(devices.map(|device| self.directory.join(device)));
        python
    }

    /// Verifies all checksums of a server.
    pub(super) fn check(&self, server: usize) -> Result<(), Error> {
        output(&mut self.command("check", server)).map(drop).map_err(|error| {
            format!("the devices of server {} are damaged: {error}", server + 1).into()
        })
    }

    /// Compares the content of the volume on a server, whose replicas have applied everything, with
    /// what the checker has read.
    pub(super) fn compare(&self, server: usize, content: &[u8]) -> Result<(), Error> {
        let image = self.directory.join("image");
        let mut read = self.command("read", server);
        read.args(["--volume", "1", "--uncommitted", "--length", &VOLUME_BYTES.to_string()]);
        quietly(read.arg("--out").arg(&image))?;
        let differs = difference(&File::open(&image)?, content)?;
        fs::remove_file(&image)?;
        match differs {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {at} of the volume on the devices of server {} is another one than was read",
                server + 1
            )
            .into()),
        }
    }
}
