//! The files of a cache: the interface of a directory, and its implementation on the file system.
//!
//! Journals bypass the page cache where the file system permits it, so that the memory used by a
//! cache is its budget.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use alluvium_device::{FileRead, PAGE_BYTES, ReadRings};
use rustix::fs::{
    self as sys, AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, Stat,
};
use rustix::io::Errno;

/// A directory that belongs to one cache. Calls block.
pub(crate) trait Directory: Send + Sync {
    /// Returns the names of the files in it.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Creates a file of `len_bytes` zeroes. Fails if the name is taken or the disk has no space
    /// for all of it.
    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Arc<dyn File>>;
    /// Opens an existing file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Arc<dyn File>>;
    /// Renames a file. Open handles of a previous file `to` stay valid.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file. Open handles of it stay valid.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes names that were created, changed and removed durable.
    fn sync(&self) -> io::Result<()>;
    /// Makes its own name durable, and those of the directories above it: the process that created
    /// them may have been killed before it synced them.
    fn sync_above(&self) -> io::Result<()> {
        Ok(())
    }
    /// Reads parts of files, each as by [`File::read_at`], concurrently where the system permits.
    /// Waits for all and returns their results in order.
    fn read_many(&self, reads: Vec<ReadAt<'_>>) -> Vec<io::Result<()>> {
        reads.into_iter().map(|read| read.file.read_at(read.at, read.to)).collect()
    }
    /// Returns the path of a file that was removed or replaced from outside while open: the file
    /// `name`, which is open as `file`, or the lock. Always `None` for a directory that others
    /// cannot access.
    fn removed(&self, _name: &str, _file: &dyn File) -> io::Result<Option<PathBuf>> {
        Ok(None)
    }
    /// Returns the free space of the disk. Fails if it is not known.
    fn free_bytes(&self) -> io::Result<u64>;
    /// Returns the path of the directory, for messages.
    fn path(&self) -> &Path;
}

/// One of several reads.
pub(crate) struct ReadAt<'a> {
    pub(crate) file: &'a dyn File,
    pub(crate) at: u64,
    pub(crate) to: &'a mut [u8],
}

/// An open file; it is closed with its last reference.
pub(crate) type OpenFile = Arc<dyn File>;

/// An open file. Memory, positions and lengths are multiples of [`PAGE_BYTES`], including the
/// file's length, except for the last page of files not created by `create`.
pub(crate) trait File: Send + Sync {
    fn len_bytes(&self) -> io::Result<u64>;
    /// Fills `to`, with zeroes after the end of the file.
    fn read_at(&self, at: u64, to: &mut [u8]) -> io::Result<()>;
    fn write_at(&self, at: u64, from: &[u8]) -> io::Result<()>;
    /// Makes everything written durable.
    fn sync(&self) -> io::Result<()>;
    fn truncate(&self, len_bytes: u64) -> io::Result<()>;
    /// The descriptor, if it is a file of the operating system.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A directory of the file system, locked for this process.
pub(crate) struct RealDirectory {
    path: PathBuf,
    directory: OwnedFd,
    /// The lock, held until it is closed. `None` if opened for reading only.
    lock: Option<OwnedFd>,
    /// Whether an open file has the device and inode numbers of its name. (On some network file
    /// systems it does not.)
    has_numbers: bool,
    rings: ReadRings,
    logged: Logged,
}

/// Missing features of the file system that have been logged, once each.
#[derive(Default)]
struct Logged {
    direct_io: AtomicBool,
    reserving: AtomicBool,
}

/// The number of concurrent callers that read several records with a ring each. Further callers
/// read sequentially: enough reads are in flight then.
const RINGS: usize = 8;

/// The name of the file that is locked while the cache is open.
const LOCK: &str = "lock";
const LOCK_TRIES: usize = 3;

impl RealDirectory {
    /// Opens and locks the directory; `None` if another process has locked it.
    pub(crate) fn open(path: &Path, create: bool) -> io::Result<Option<Self>> {
        if create {
            create_all(path)?;
        }
        let directory =
            sys::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let mut this = Self {
            path: path.to_owned(),
            directory,
            lock: None,
            has_numbers: false,
            rings: ReadRings::new(RINGS),
            logged: Logged::default(),
        };
        // The file may have been replaced before it was locked, but not repeatedly.
        for _ in 0..LOCK_TRIES {
            this.lock = None;
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
            let lock = sys::openat(&this.directory, LOCK, flags, mode())?;
            match sys::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            this.has_numbers = this.has_name(LOCK, &sys::fstat(&lock)?)? == Some(true);
            this.lock = Some(lock);
            if this.has_numbers {
                break;
            }
        }
        Ok(Some(this))
    }

    /// Opens the directory for reading while it may be in use. Calls that would change it fail or
    /// must not be made.
    pub(crate) fn open_to_read(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = sys::open(path, flags, Mode::empty())?;
        // Several records are never read at once here.
        let (path, rings) = (path.to_owned(), ReadRings::new(0));
        let (lock, has_numbers) = (None, false);
        Ok(Self { path, directory, lock, has_numbers, rings, logged: Logged::default() })
    }

    /// Behaves as on a system without io_uring.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn without_rings(self) -> Self {
        Self { rings: ReadRings::new(0), ..self }
    }

    /// Returns whether the lack of Direct I/O has been logged.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn has_logged_direct_io(&self) -> bool {
        self.logged.direct_io.load(Ordering::Relaxed)
    }

    fn open_direct(&self, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let access = if self.lock.is_some() { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = flags | access | OFlags::CLOEXEC;
        match sys::openat(&self.directory, name, flags | OFlags::DIRECT, mode()) {
            // The file system has no Direct I/O, or it is not a file. A file to be created exists
            // nevertheless.
            Err(Errno::INVAL) => {
                let opened = sys::openat(&self.directory, name, flags - OFlags::EXCL, mode());
                let opened = opened.inspect_err(|_| {
                    if flags.contains(OFlags::CREATE) {
                        // Otherwise it could not be created later.
                        let _ = self.remove(name);
                    }
                })?;
                if NotAFile::of(&sys::fstat(&opened)?).is_none()
                    && !self.logged.direct_io.swap(true, Ordering::Relaxed)
                {
                    tracing::warn!(
                        "journal cache: {}: this file system has no Direct I/O; reads and writes \
                         use the page cache, which is outside the memory budget",
                        self.path.display()
                    );
                }
                Ok(opened)
            }
            opened => Ok(opened?),
        }
    }

    /// Returns why a file could not be opened, if the object with its name is the cause.
    fn not_a_file(&self, name: &str, error: &io::Error) -> Option<NotAFile> {
        let stat = |flags| sys::statat(&self.directory, name, flags).ok();
        if error.kind() == io::ErrorKind::NotFound {
            let is_there = stat(AtFlags::SYMLINK_NOFOLLOW).is_some();
            return (is_there && stat(AtFlags::empty()).is_none()).then_some(NotAFile::Dangling);
        }
        NotAFile::of(&stat(AtFlags::empty())?)
    }

    /// Returns whether `name` still refers to an open file.
    fn is_named(&self, name: &str, file: BorrowedFd<'_>) -> io::Result<bool> {
        let opened = sys::fstat(file)?;
        let is_named = self.has_name(name, &opened)?;
        Ok(is_named.is_some_and(|it| it || (!self.has_numbers && opened.st_nlink > 0)))
    }

    /// Returns whether the object with this name has the numbers of an open file; `None` if there
    /// is no such name.
    fn has_name(&self, name: &str, opened: &Stat) -> io::Result<Option<bool>> {
        match sys::statat(&self.directory, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(None),
            named => {
                let named = named?;
                Ok(Some((named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)))
            }
        }
    }
}

/// Something that has the name of a file but is not one.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(crate) enum NotAFile {
    #[error("it is a {0}, not a regular file")]
    Other(&'static str),
    #[error("it is a dangling symbolic link: restore its target, or remove the link")]
    Dangling,
}

impl NotAFile {
    fn of(stat: &Stat) -> Option<Self> {
        Some(Self::Other(match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => return None,
            FileType::Directory => "directory",
            FileType::Fifo => "pipe",
            FileType::Socket => "socket",
            FileType::BlockDevice => "block device",
            FileType::CharacterDevice => "character device",
            _ => "special file",
        }))
    }

    /// Extracts it from an error of this module.
    pub(crate) fn from_error(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<NotAFile> for io::Error {
    fn from(not_a_file: NotAFile) -> Self {
        Self::other(not_a_file)
    }
}

/// Creates a directory and those above it.
fn create_all(path: &Path) -> io::Result<()> {
    match fs::create_dir_all(path) {
        // There is something other than a directory.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(Errno::NOTDIR.into()),
        made => made,
    }
}

/// Returns whether the error is that of a directory that this process may not read or whose file
/// system cannot sync any: nothing can be done for the names in it, which most likely have existed
/// for long.
fn cannot_be_synced(error: &io::Error) -> bool {
    let answers = [Errno::ACCESS, Errno::PERM, Errno::ROFS, Errno::INVAL, Errno::OPNOTSUPP];
    answers.iter().any(|it| Some(it.raw_os_error()) == error.raw_os_error())
}

/// Access for the owner only: a cache may hold anything.
fn mode() -> Mode {
    Mode::RUSR | Mode::WUSR
}

impl Directory for RealDirectory {
    fn list(&self) -> io::Result<Vec<String>> {
        let names =
            fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        Ok(names
            .collect::<io::Result<Vec<_>>>()?
            .into_iter()
            .flatten()
            .filter(|it| it != LOCK)
            .collect())
    }

    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Arc<dyn File>> {
        let fd = self.open_direct(name, OFlags::CREATE | OFlags::EXCL)?;
        // On some file systems a signal interrupts it.
        let allocate = || sys::fallocate(&fd, FallocateFlags::empty(), 0, len_bytes);
        let allocated = match rustix::io::retry_on_intr(allocate) {
            // The file system cannot reserve space.
            Err(Errno::OPNOTSUPP) => {
                if !self.logged.reserving.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "journal cache: {}: this file system cannot reserve space (fallocate); \
                         writing stops when the disk is full",
                        self.path.display()
                    );
                }
                sys::ftruncate(&fd, len_bytes)
            }
            allocated => allocated,
        };
        if let Err(error) = allocated {
            let _ = self.remove(name);
            return Err(error.into());
        }
        Ok(Arc::new(RealFile(fd)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        // Without this flag, opening a pipe waits for a writer.
        let opened = self.open_direct(name, OFlags::NONBLOCK);
        let fd = opened.map_err(|error| match self.not_a_file(name, &error) {
            Some(not_a_file) => not_a_file.into(),
            None => error,
        })?;
        if let Some(not_a_file) = NotAFile::of(&sys::fstat(&fd)?) {
            return Err(not_a_file.into());
        }
        // With the flag set, io_uring may refuse to wait for the disk.
        sys::fcntl_setfl(&fd, sys::fcntl_getfl(&fd)? - OFlags::NONBLOCK)?;
        Ok(Arc::new(RealFile(fd)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(sys::renameat(&self.directory, from, &self.directory, to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Ok(sys::unlinkat(&self.directory, name, AtFlags::empty())?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(sys::fsync(&self.directory)?)
    }

    fn sync_above(&self) -> io::Result<()> {
        for above in fs::canonicalize(&self.path)?.ancestors().skip(1) {
            match fs::File::open(above).and_then(|it| it.sync_all()) {
                Err(error) if cannot_be_synced(&error) => {}
                synced => synced?,
            }
        }
        Ok(())
    }

    fn read_many(&self, reads: Vec<ReadAt<'_>>) -> Vec<io::Result<()>> {
        let of_file = |ReadAt { file, at, to }| {
            let file = file.descriptor().expect("all files of the directory are the system's");
            FileRead { file, at, to }
        };
        self.rings.read(&mut reads.into_iter().map(of_file).collect::<Vec<_>>())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let of = sys::fstatvfs(&self.directory)?;
        // Reported by file systems that do not count blocks.
        if of.f_blocks == 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        Ok(of.f_bavail.saturating_mul(of.f_frsize))
    }

    fn removed(&self, name: &str, file: &dyn File) -> io::Result<Option<PathBuf>> {
        let file = file.descriptor().expect("all files of the directory are the system's");
        let lock = self.lock.as_ref().map(|lock| (LOCK, lock.as_fd()));
        for (name, file) in [Some((name, file)), lock].into_iter().flatten() {
            if !self.is_named(name, file)? {
                return Ok(Some(self.path.join(name)));
            }
        }
        Ok(None)
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

struct RealFile(OwnedFd);

impl File for RealFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(u64::try_from(sys::fstat(&self.0)?.st_size).unwrap_or(0))
    }

    fn read_at(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        debug_assert!(at.is_multiple_of(PAGE_BYTES as u64) && to.len().is_multiple_of(PAGE_BYTES));
        FileRead { file: self.0.as_fd(), at, to }.read()
    }

    fn write_at(&self, at: u64, from: &[u8]) -> io::Result<()> {
        debug_assert!(
            at.is_multiple_of(PAGE_BYTES as u64) && from.len().is_multiple_of(PAGE_BYTES)
        );
        let mut done = 0;
        while done < from.len() {
            match rustix::io::pwrite(&self.0, &from[done..], at + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(sys::fdatasync(&self.0)?)
    }

    fn truncate(&self, len_bytes: u64) -> io::Result<()> {
        Ok(sys::ftruncate(&self.0, len_bytes)?)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

#[cfg(all(any(test, fuzzing, feature = "sim"), not(loom)))]
#[cfg_attr(not(test), allow(dead_code))] // `sim` alone does not cut the power
pub(crate) mod sim;
