//! A limit on all memory of a process, including its page cache: what an engine leaves to the page
//! cache counts as its memory too.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where groups are, and the names of their limits: version 1, and version 2.
const HIERARCHIES: [(&str, &str); 2] =
    [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];

/// A group of one process. It is removed when dropped, which succeeds once the process has ended.
pub struct Group {
    path: PathBuf,
}

impl Group {
    /// Creates a group with a limit. Needs root, and a system that permits it.
    pub fn new(limit_bytes: u64) -> Result<Self, String> {
        let mut reasons = Vec::new();
        for (root, bound) in HIERARCHIES {
            let path = Path::new(root).join(format!("alluvium-bench-{}", std::process::id()));
            match Self::make(&path, bound, limit_bytes) {
                Ok(group) => return Ok(group),
                Err(error) => reasons.push(format!("{}: {error}", path.display())),
            }
        }
        Err(reasons.join("; "))
    }

    fn make(path: &Path, bound: &str, limit_bytes: u64) -> io::Result<Self> {
        match fs::create_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // From here on it is removed if anything fails.
        let group = Self { path: path.to_owned() };
        // Only the kernel creates files there, so a wrong name is an error.
        fs::File::options().write(true).open(path.join(bound))?;
        fs::write(path.join(bound), limit_bytes.to_string())?;
        Ok(group)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A leftover group has no process and no memory, and is reused by the next run.
        let _ = fs::remove_dir(&self.path);
    }
}

/// Moves this process into a group.
pub fn join(group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}
