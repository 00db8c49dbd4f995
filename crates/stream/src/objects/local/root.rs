//! Detects that the directory of a local object store is no longer the one that was opened. While
//! its file system is not mounted, the mount point is in its place. Objects written there would be
//! missing when the file system is mounted again, and a read there looks like a deleted object.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use uuid::Uuid;

/// The file that identifies the directory; docs/format/object.md, section 6. `LocalFileSystem`
/// neither lists nor opens a file with such a name.
pub const MARK: &str = "alluvium-objects#0";
/// An id as text, a space, its checksum, and the end of the line.
const MARK_BYTES: usize = 36 + 1 + 8 + 1;

/// A directory that was opened.
#[derive(Debug)]
pub(super) struct Root {
    path: PathBuf,
    /// The id in its mark; `None` if it could not be marked.
    id: Option<Uuid>,
    /// Its identity when it was last checked.
    directory: Mutex<DirectoryId>,
}

/// A directory's identity to the kernel. A file system may have another device number when it is
/// mounted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DirectoryId {
    device: u64,
    inode: u64,
}

impl DirectoryId {
    fn of(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path)?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }
}

/// Whether a server has opened this directory as an object store, or the operator has put a file
/// with the mark's name there. A damaged mark, or an empty one, counts.
pub fn is_marked(directory: &Path) -> bool {
    directory.join(MARK).is_file()
}

impl Root {
    /// Opens an existing directory, and marks it if it is not marked yet. If that fails, for
    /// example on a full disk, the directory is recognized only as long as its device number stays
    /// the same.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let directory = Mutex::new(DirectoryId::of(path)?);
        let id = match read_mark(path).and_then(|id| id.map_or_else(|| mark(path), Ok)) {
            Ok(id) => Some(id),
            Err(error) => {
                tracing::warn!("{} cannot be marked: {error}", path.join(MARK).display());
                None
            }
        };
        Ok(Self { path: path.to_owned(), id, directory })
    }

    /// Checks that it is still the same directory. Blocking.
    ///
    /// # Errors
    /// Another directory, or none, is in its place.
    pub(super) fn check(&self) -> io::Result<()> {
        let found = DirectoryId::of(&self.path).ok();
        let mut directory = self.directory.lock();
        match found {
            Some(found) if found == *directory => return Ok(()),
            Some(found) if self.id.is_some() && read_mark(&self.path).ok() == Some(self.id) => {
                tracing::info!("{} is on another device now", self.path.display());
                *directory = found;
                return Ok(());
            }
            _ => {}
        }
        Err(io::Error::other(format!(
            "{} is not the directory that was opened: its file system is not mounted, or it was \
             replaced. Nothing is read or written there until it is back",
            self.path.display()
        )))
    }
}

fn read_mark(directory: &Path) -> io::Result<Option<Uuid>> {
    let path = directory.join(MARK);
    match fs::read(&path) {
        Ok(bytes) => {
            let id = decode(&bytes);
            if id.is_none() {
                tracing::warn!("{} is damaged", path.display());
            }
            Ok(id)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Marks a directory durably, and returns its mark then: another process may mark it at the same
/// time. A crash may leave a file with a name that is not listed.
fn mark(directory: &Path) -> io::Result<Uuid> {
    let id = Uuid::new_v4();
    // The number is not 0, since it contains the version of the id.
    let unfinished = directory.join(format!("alluvium-objects#{}", id.as_u64_pair().0));
    let written = File::create_new(&unfinished).and_then(|mut file| {
        file.write_all(encode(id).as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, directory.join(MARK))?;
        File::open(directory)?.sync_all()
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&unfinished);
        return Err(error);
    }
    read_mark(directory)?.ok_or_else(|| io::Error::other("the mark is gone or damaged"))
}

fn encode(id: Uuid) -> String {
    let text = id.hyphenated().to_string();
    format!("{text} {:08x}\n", crc32c::crc32c(text.as_bytes()))
}

fn decode(bytes: &[u8]) -> Option<Uuid> {
    let text = bytes.first_chunk::<MARK_BYTES>().and_then(|it| str::from_utf8(it).ok())?;
    let id = Uuid::try_parse(text.get(..36)?).ok()?;
    (bytes.len() == MARK_BYTES && text == encode(id)).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_back_and_each_flipped_bit_is_detected() {
        let id = Uuid::from_u128(0x1234_5678_9abc_def0_1234_5678_9abc_def0);
        let bytes = encode(id).into_bytes();
        assert_eq!(decode(&bytes), Some(id));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&damaged), None, "bit {bit}");
        }
        assert_eq!((decode(&bytes[..45]), decode(&[&bytes[..], b"x"].concat())), (None, None));
    }

    #[test]
    fn a_directory_that_cannot_be_marked_is_recognized_until_it_is_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("objects");
        // A directory with the name of the mark can be neither read nor replaced.
        fs::create_dir_all(path.join(MARK)).unwrap();
        let root = Root::open(&path).unwrap();
        assert_eq!(root.id, None);
        root.check().unwrap();
        fs::rename(&path, parent.path().join("away")).unwrap();
        fs::create_dir(&path).unwrap();
        root.check().unwrap_err();
    }

    #[test]
    fn a_damaged_mark_is_replaced_when_the_directory_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        let mark = directory.path().join(MARK);
        let first = Root::open(directory.path()).unwrap().id;
        assert!(first.is_some());
        assert_eq!(Root::open(directory.path()).unwrap().id, first);
        fs::write(&mark, "nonsense").unwrap();
        let second = Root::open(directory.path()).unwrap().id;
        assert!(second.is_some() && second != first);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no other file is left");
    }
}
