//! A server's place: its data directory, its log, and its bucket, all of which are files.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::super::process::{Process, SMALL, Start, launch, read_log};
use crate::Error;
use crate::exec::{describe, quietly};
use crate::server::{Objects, clean, free_address};

/// An object store, which has its objects as files.
#[derive(Clone)]
pub(super) struct Bucket {
    pub(super) url: String,
    /// Options and credentials for it.
    pub(super) access: Objects,
    pub(super) files: PathBuf,
}

impl Bucket {
    /// A directory.
    pub(super) fn directory(files: PathBuf) -> Self {
        let access = Objects { arguments: Vec::new(), environment: Vec::new() };
        Self { url: format!("file://{}", files.display()), access, files }
    }

    /// Returns the files whose path has this part, in the order of their paths.
    pub(super) fn files_with(&self, part: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut directories = vec![self.files.clone()];
        while let Some(directory) = directories.pop() {
            // A running server may remove directories and files meanwhile.
            let Ok(entries) = fs::read_dir(directory) else { continue };
            for entry in entries.filter_map(Result::ok) {
                let path = entry.path();
                let text = path.to_string_lossy();
                match path.is_dir() {
                    true => directories.push(path),
                    false if text.contains(part) && !text.contains('#') => found.push(path),
                    false => {}
                }
            }
        }
        found.sort();
        found
    }

    /// Returns the fences and deltas by number, with their files.
    pub(super) fn chain(&self) -> Vec<(u64, PathBuf)> {
        let files = self.files_with("/chain/").into_iter();
        files.filter_map(|path| Some((number(&path)?, path))).collect()
    }

    /// Returns the greatest number of a fence or delta.
    pub(super) fn head(&self) -> u64 {
        self.chain().last().map_or(0, |(number, _)| *number)
    }

    /// Returns the snapshots by number, with their files.
    pub(super) fn snapshots(&self) -> Vec<(u64, PathBuf)> {
        let files = self.files_with("/snapshots/").into_iter();
        files.filter_map(|path| Some((number(&path)?, path))).collect()
    }
}

/// The number at the beginning of a file's name.
fn number(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    u64::from_str_radix(name.get(..16)?, 16).ok()
}

/// How a server uploads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// As often as possible, with object compaction if it is set.
    Fast { compaction: bool },
    /// Not before it stops.
    Never,
}

/// A server under test.
pub(super) struct Site {
    pub(super) binary: PathBuf,
    /// Has the data directory, the log and what servers have printed.
    pub(super) directory: PathBuf,
    pub(super) bucket: Bucket,
    /// The name of the log's file.
    pub(super) wal: &'static str,
    ports: [SocketAddr; 2],
}

/// What a command has printed.
pub(super) struct Printed {
    pub(super) code: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
    pub(super) what: String,
}

impl Site {
    pub(super) fn ports() -> Result<[SocketAddr; 2], Error> {
        Ok([free_address()?, free_address()?])
    }

    pub(super) fn new(
        binary: &Path,
        directory: &Path,
        bucket: Bucket,
        ports: [SocketAddr; 2],
    ) -> Self {
        Self {
            binary: binary.to_owned(),
            directory: directory.to_owned(),
            bucket,
            wal: "wal",
            ports,
        }
    }

    pub(super) fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    pub(super) fn wal(&self) -> PathBuf {
        self.directory.join(self.wal)
    }

    fn log_path(&self) -> PathBuf {
        self.directory.join("server.log")
    }

    /// Returns everything that servers have printed here.
    pub(super) fn log(&self) -> Result<String, Error> {
        read_log(&self.log_path())
    }

    /// Starts a server.
    pub(super) fn start(&self, pace: Pace) -> Result<Start, Error> {
        let mut command = clean(&self.binary);
        command.arg("serve").arg("--data-dir").arg(self.data()).arg("--wal").arg(self.wal());
        command.args(SMALL).args(["--upload-size=1MiB", "--object-store", &self.bucket.url]);
        command.args(["--authorization", "--super-users=User:ANONYMOUS"]);
        command.args(match pace {
            Pace::Fast { compaction } => [
                "--upload-interval=100ms",
                "--log-compaction-interval=20ms",
                if compaction { "--compaction-size=1MiB" } else { "--compaction-size=0" },
            ],
            Pace::Never => {
                ["--upload-interval=24h", "--log-compaction-interval=24h", "--compaction-size=0"]
            }
        });
        self.with_access(&mut command);
        launch(command, self.ports, &self.log_path())
    }

    /// Starts a server that must start.
    pub(super) fn started(&self, pace: Pace) -> Result<Process, Error> {
        match self.start(pace)? {
            Start::Ready(process) => Ok(process),
            Start::Ended(status) => {
                Err(format!("the server ended with {status}: {}", last(&self.log()?)).into())
            }
            Start::Hangs => Err("the server does not start".into()),
        }
    }

    fn with_access(&self, command: &mut Command) {
        command.args(&self.bucket.access.arguments);
        command.envs(self.bucket.access.environment.iter().map(|(name, value)| (name, value)));
    }

    /// Runs a tool on the bucket; `option` names it.
    pub(super) fn tool(&self, words: &[&str], option: &str) -> Result<Printed, Error> {
        let mut command = clean(&self.binary);
        command.args(words).arg(option).arg(&self.bucket.url).stdin(Stdio::null());
        self.with_access(&mut command);
        let output = command.output()?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Printed {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
            what: describe(&command),
        })
    }

    /// Adds a user through the running server.
    pub(super) fn add_user(&self, name: &str) -> Result<(), Error> {
        let password = self.directory.join("password");
        fs::write(&password, "a password of the test")?;
        let mut command = clean(&self.binary);
        command.args(["user", "add", name, "--password-file"]).arg(&password);
        quietly(command.arg("--data-dir").arg(self.data()))
    }

    /// Returns the names of the running server's users.
    pub(super) fn users(&self) -> Result<Vec<String>, Error> {
        let mut command = clean(&self.binary);
        command.args(["user", "list", "--json", "--data-dir"]).arg(self.data());
        let printed = crate::exec::output(&mut command)?;
        let users: Value = serde_json::from_slice(&printed)?;
        let users = users.as_array().cloned().unwrap_or_default();
        Ok(users.iter().filter_map(|user| Some(user["name"].as_str()?.to_owned())).collect())
    }
}

impl Printed {
    /// The printed JSON, if the command has ended with one of these codes.
    pub(super) fn json(&self, codes: &[i32]) -> Result<Value, Error> {
        if !self.code.is_some_and(|code| codes.contains(&code)) {
            return Err(self.to_string().into());
        }
        Ok(serde_json::from_str(&self.stdout)
            .map_err(|error| format!("{error}: no JSON from {self}"))?)
    }
}

impl std::fmt::Display for Printed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, what, stdout, stderr } = self;
        write!(f, "`{what}` ended with {code:?}: {}{}", last(stdout), last(stderr))
    }
}

/// Copies a directory with the attributes in which an S3 server keeps what it knows of an object.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    let parent = to.parent().ok_or("a copy without a parent")?;
    fs::create_dir_all(parent)?;
    let mut command = Command::new("cp");
    quietly(command.args(["-a", "--reflink=auto", "--sparse=never"]).arg(from).arg(to))
}

/// Returns the end of a long text.
pub(super) fn last(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(6)..].join("\n  | ")
}
