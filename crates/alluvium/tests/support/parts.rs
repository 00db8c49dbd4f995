//! Data directory, write-ahead log and object store of a server.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Server, text};

/// A directory for data directories, write-ahead logs and object stores, each with a name.
pub struct Parts {
    directory: tempfile::TempDir,
}

impl Parts {
    pub fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a temporary directory") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn url(&self, name: &str) -> String {
        format!("file://{}", text(&self.path(name)))
    }

    /// A server with parts of these names.
    pub fn command(&self, data: &str, wal: &str, objects: &str, more: &[&str]) -> Command {
        let (wal, url) = (self.path(wal), self.url(objects));
        let arguments = ["--wal-capacity", "64MiB", "--wal", text(&wal), "--object-store", &url];
        Server::command(&self.path(data), &[&arguments, more].concat())
    }
}

/// Copies a file or a directory.
pub fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-r").arg(from).arg(to).status().expect("cp runs");
    assert!(copied.success());
}
