//! A write-ahead log in a file, written without a server.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use alluvium_device::sim::{Mode, SimDisk, SimOptions};
use alluvium_device::{OpenOptions, SharedDevice};
use alluvium_wal::{Options, Wal};

use super::ok;

/// The two header slots, and the start of the ring; `docs/format/wal.md`, section 2.
pub const SLOTS: [usize; 2] = [0, 32 << 10];
pub const DATA_START: usize = 64 << 10;

pub struct Target {
    _directory: tempfile::TempDir,
    pub path: PathBuf,
}

impl Target {
    /// A path in a fresh directory, without a file.
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("wal");
        Self { _directory: directory, path }
    }

    /// An empty log of 8 MiB.
    pub fn formatted() -> Self {
        let target = Self::new();
        ok(&["wal", "format", target.arg(), "--capacity", "8MiB"]);
        target
    }

    pub fn arg(&self) -> &str {
        self.path.to_str().expect("temporary paths are text")
    }

    pub fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut content = fs::read(&self.path).unwrap();
        change(&mut content);
        fs::write(&self.path, content).unwrap();
    }

    pub fn damage(&self, at: usize) {
        self.change(|content| content[at] ^= 0xff);
    }

    pub fn len(&self) -> u64 {
        fs::metadata(&self.path).unwrap().len()
    }
}

fn open(path: &Path) -> SharedDevice {
    alluvium_device::open(path, &OpenOptions::default()).unwrap()
}

/// Options that fit a log of 3 MiB and more.
fn small() -> Options {
    let (window_bytes, max_record_bytes) = (1 << 20, 500 << 10);
    Options { window_bytes, max_record_bytes, ..Options::default() }
}

/// Opens the log of a file or block device for writing, with its next epoch.
pub fn writer(path: &Path) -> Wal {
    Wal::open(open(path), &small(), None, &mut |_| Ok(())).unwrap().0
}

/// Appends `records`, and closes the log or leaves it unclosed as a crash does.
pub fn append(path: &Path, records: &[&[u8]], close: bool) {
    let wal = writer(path);
    for record in records {
        wal.append(&[record]).unwrap().wait().unwrap();
    }
    if close {
        wal.close().unwrap();
    }
}

/// Appends `records` as if all were in flight when the writer was killed: none of them records that
/// another one was durable. Returns their ranges. The result does not depend on the speed of the
/// machine.
pub fn append_at_once(path: &Path, records: &[&[u8]]) -> Vec<Range<u64>> {
    let disk = SimDisk::from_image(&fs::read(path).unwrap(), SimOptions::default());
    let (wal, _) = Wal::open(disk.device(), &small(), None, &mut |_| Ok(())).unwrap();
    disk.set_mode(Mode::Queued);
    let appends: Vec<_> = records.iter().map(|record| wal.append(&[record]).unwrap()).collect();
    disk.run_until_idle();
    let places = appends.iter().map(|append| append.offset().0..append.end().0).collect();
    appends.into_iter().for_each(|append| append.wait().unwrap());
    drop(wal);
    fs::write(path, disk.image()).unwrap();
    places
}

/// The payloads of the records of a log.
pub fn payloads(path: &Path) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    Wal::scan(&open(path), None, &mut |record| {
        payloads.push(record.payload.to_vec());
        Ok(())
    })
    .unwrap();
    payloads
}
