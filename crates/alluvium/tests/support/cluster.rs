//! Servers of volumes in a directory of their own.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::{Server, alluvium, contains, ok, ok_json, own_address, refused, until};

const READY: &str = " is ready: ";
pub const EXPORTED: &str = " is exported: ";

/// A cluster in a directory of its own, without servers at first.
pub struct Cluster {
    directory: tempfile::TempDir,
    pub coordination: String,
}

impl Cluster {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, coordination: own_address() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn words<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        [&["volume"], words, &["--coordination", &self.coordination]].concat()
    }

    pub fn ok(&self, words: &[&str]) -> String {
        ok(&self.words(words))
    }

    pub fn json(&self, words: &[&str]) -> Value {
        ok_json(&self.words(&[words, &["--json"]].concat()))
    }

    #[track_caller]
    pub fn refused(&self, words: &[&str], parts: &[&str]) {
        contains(&refused(1, &self.words(words)), parts);
    }

    /// The command of a server with this log and this store. The first one hosts the coordination
    /// service.
    pub fn serve(&self, log: usize, store: usize) -> Command {
        let mut command = alluvium();
        command.args(self.words(&["serve", "--listen", "127.0.0.1:0"]));
        command.args(["--wal-capacity", "160MiB", "--store-capacity", "64MiB"]);
        command.arg("--wal").arg(self.path(&format!("wal{log}")));
        command.arg("--store").arg(self.path(&format!("store{store}")));
        if log == 1 {
            command.arg("--coordination-file").arg(self.path("coordination"));
        }
        command
    }

    pub fn start(&self, server: usize) -> Server {
        Server::start_until(self.serve(server, server), READY)
    }

    pub fn export(&self, name: &str, socket: &Path, more: &[&str]) -> Server {
        let mut command = alluvium();
        command.args(self.words(&["export", name])).arg("--socket").arg(socket).args(more);
        Server::start_until(command, EXPORTED)
    }

    /// The replicas of a volume, as `volume info` shows them.
    pub fn replicas(&self, name: &str) -> Vec<Value> {
        self.json(&["info", name])["replicas"].as_array().unwrap().clone()
    }

    /// Waits until the replicas of a volume are exact and have applied all of their entries.
    pub fn wait_until_applied(&self, name: &str) {
        until("the replicas are exact at the same index", || {
            let replicas = self.replicas(name);
            replicas.iter().all(|replica| {
                let of_group = |other: &&Value| other["group"] == replica["group"];
                let mut group = replicas.iter().filter(of_group);
                replica["state"] == "exact"
                    && group.all(|other| other["last"] == replica["applied"])
            })
        });
    }
}
