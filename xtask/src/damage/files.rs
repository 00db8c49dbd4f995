//! A server's files in memory: images are copied from them, and damage is applied to them.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::Error;

/// The write-ahead log, relative to the directory of a server.
pub(super) const WAL: &str = "data/wal";
/// The id of the write-ahead log.
pub(super) const WAL_ID: &str = "data/wal-id";
/// The object store.
pub(super) const OBJECT_STORE: &str = "data/objects";
/// The data objects in it.
pub(super) const OBJECTS: &str = "data/objects/streams";
/// The catalogs in it.
pub(super) const CATALOGS: &str = "data/objects/catalogs";
/// The file that identifies its directory.
pub(super) const MARK: &str = "data/objects/alluvium-objects#0";
/// The file that keeps space in it.
pub(super) const RESERVE: &str = "data/objects/alluvium-reserve#0";
/// The disk cache.
pub(super) const DISK_CACHE: &str = "disk-cache";
const CHUNK_BYTES: usize = 1 << 20;

/// A file. Zeroes at its end use no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    pub(super) len: u64,
}

/// Files by their path, relative to the directory of a server.
#[derive(Clone, Debug, Default)]
pub(super) struct Files(pub(super) BTreeMap<String, Content>);

/// One change of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Edit {
    Write { file: String, at: u64, bytes: Vec<u8> },
    Truncate { file: String, len: u64 },
    Remove { file: String },
    RemoveAll { directory: String },
    Replace { file: String, content: Content },
}

impl Content {
    pub(super) fn new(mut bytes: Vec<u8>) -> Self {
        let len = bytes.len() as u64;
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        bytes.truncate(used);
        Self { bytes, len }
    }

    /// Returns the bytes of a range, up to the file's end.
    pub(super) fn range(&self, at: u64, len: u64) -> Vec<u8> {
        let end = (at + len).min(self.len).max(at);
        let stored = |at: u64| (at as usize).min(self.bytes.len());
        let mut bytes = self.bytes[stored(at)..stored(end)].to_vec();
        bytes.resize((end - at) as usize, 0);
        bytes
    }
}

impl Files {
    /// Loads everything below a directory except logs.
    pub(super) fn load(directory: &Path) -> Result<Self, Error> {
        let mut files = Self::default();
        let mut pending = vec![PathBuf::new()];
        while let Some(relative) = pending.pop() {
            let path = directory.join(&relative);
            if !path.exists() {
                continue;
            }
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                let name = relative.join(entry.file_name());
                if entry.file_type()?.is_dir() {
                    pending.push(name);
                    continue;
                }
                let is_log = name.extension().is_some_and(|extension| extension == "log");
                // The running server may have removed a file since it was listed.
                if let Ok(bytes) = fs::read(entry.path())
                    && !is_log
                {
                    files.0.insert(name.to_string_lossy().into_owned(), Content::new(bytes));
                }
            }
        }
        Ok(files)
    }

    /// Writes the files into a directory that may contain those of an earlier case.
    pub(super) fn restore(&self, directory: &Path) -> Result<(), Error> {
        fs::create_dir_all(directory)?;
        let kept = directory.join(WAL);
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            match path.is_dir() {
                true if kept.starts_with(&path) => remove_but(&path, &kept)?,
                true => fs::remove_dir_all(path)?,
                false => fs::remove_file(path)?,
            }
        }
        for (name, content) in &self.0 {
            let path = directory.join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            if name == WAL {
                restore_in_place(&path, content)?;
            } else {
                write_sparse(&path, content)?;
            }
        }
        Ok(())
    }

    /// Saves a copy for inspection, as sparse files.
    pub(super) fn keep(&self, directory: &Path) -> Result<(), Error> {
        for (name, content) in &self.0 {
            let path = directory.join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            write_sparse(&path, content)?;
        }
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<&Content> {
        self.0.get(name)
    }

    /// Returns the names of the data objects.
    pub(super) fn objects(&self) -> Vec<&str> {
        self.below(OBJECTS).collect()
    }

    /// Returns the names of the files below a directory.
    pub(super) fn below<'a>(&'a self, directory: &'a str) -> impl Iterator<Item = &'a str> {
        let names = self.0.keys().map(String::as_str);
        let is_below = move |name: &&'a str| {
            name.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
        };
        names.filter(is_below)
    }

    /// Returns the names of the catalog's objects of one kind, in the order of their numbers:
    /// `chain`, `snapshots` or `bodies`.
    pub(super) fn catalog(&self, kind: &str) -> Vec<&str> {
        let is_one = |name: &&str| name.rsplit('/').nth(1) == Some(kind);
        self.below(CATALOGS).filter(is_one).collect()
    }
}

fn remove_but(directory: &Path, kept: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            fs::remove_dir_all(path)?;
        } else if path != kept {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Writes only the parts that differ: the server refuses a log with holes, and writing all of it
/// for each case would take too long.
fn restore_in_place(path: &Path, content: &Content) -> Result<(), Error> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    if file.metadata()?.len() > content.len {
        file.set_len(content.len)?;
    }
    let mut present = vec![0; CHUNK_BYTES];
    for at in (0..content.len).step_by(CHUNK_BYTES) {
        let wanted = content.range(at, CHUNK_BYTES as u64);
        let present = &mut present[..wanted.len()];
        if file.read_exact_at(present, at).is_err() || *present != wanted[..] {
            file.write_all_at(&wanted, at)?;
        }
    }
    Ok(())
}

fn write_sparse(path: &Path, content: &Content) -> Result<(), Error> {
    let mut file = fs::File::create(path)?;
    file.write_all(&content.bytes)?;
    Ok(file.set_len(content.len)?)
}

impl Edit {
    /// Applies the change to the files of a server, which may be running.
    pub(super) fn apply(&self, directory: &Path) -> Result<(), Error> {
        let open = |file: &str| OpenOptions::new().write(true).open(directory.join(file));
        match self {
            Self::Write { file, at, bytes } => open(file)?.write_all_at(bytes, *at)?,
            Self::Truncate { file, len } => open(file)?.set_len(*len)?,
            Self::Remove { file } => fs::remove_file(directory.join(file))?,
            Self::RemoveAll { directory: below } => fs::remove_dir_all(directory.join(below))?,
            Self::Replace { file, content } if file == WAL => {
                restore_in_place(&directory.join(file), content)?;
            }
            Self::Replace { file, content } => write_sparse(&directory.join(file), content)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_file_include_its_trailing_zeroes() {
        let content = Content::new(vec![0, 1, 2, 0, 0, 0]);
        assert_eq!((content.bytes.len(), content.len), (3, 6));
        assert_eq!(content.range(0, 6), [0, 1, 2, 0, 0, 0]);
        assert_eq!(content.range(2, 2), [2, 0]);
        assert_eq!(content.range(4, 100), [0, 0]);
        assert!(content.range(7, 1).is_empty());
    }

    #[test]
    fn files_are_restored_over_those_of_an_earlier_case() {
        let directory = std::env::temp_dir().join(format!("damage-{}", std::process::id()));
        let files = Files(
            [
                (WAL.to_owned(), Content::new(vec![1, 0, 3, 0])),
                ("data/x".into(), Content::new(vec![7])),
            ]
            .into(),
        );
        files.restore(&directory).unwrap();
        for edit in [
            Edit::Write { file: WAL.into(), at: 3, bytes: vec![9, 9] },
            Edit::Remove { file: "data/x".into() },
        ] {
            edit.apply(&directory).unwrap();
        }
        fs::write(directory.join("data/other"), "left").unwrap();
        files.restore(&directory).unwrap();
        let found = Files::load(&directory).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(found.0, files.0);
    }
}
