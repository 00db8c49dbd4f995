//! A target as the kernel sees it: opening, locking, measuring; creating and pre-writing a new
//! file.

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, SeekFrom,
    Stat, StatxFlags,
};
use rustix::io::Errno;
use rustix::process::Resource;

use crate::buffer::PAGE_BYTES;
use crate::byte_size::PAGE;
use crate::claim::Claim;
use crate::options::{Access, OpenOptions, Progress};
use crate::{AlignedBuf, ByteSize, OpenError};

/// Bytes per write while a file is pre-written.
const PREWRITE_BYTES: usize = 4 * 1024 * 1024;

/// An open block device or regular file.
pub(crate) struct Target {
    pub(crate) fd: OwnedFd,
    /// The exclusive claim; `None` if the target is open read-only.
    pub(crate) claim: Option<Arc<Claim>>,
    pub(crate) capacity_bytes: u64,
    pub(crate) logical_block_bytes: u32,
    pub(crate) block_device: bool,
    pub(crate) volatile_cache: bool,
}

impl Target {
    pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Self, OpenError> {
        let exclusive = options.access == Access::Exclusive;
        let found = rustix::fs::stat(path);
        let (stat, claim) = match (found, options.create_bytes) {
            (Err(Errno::NOENT), Some(bytes)) if exclusive => {
                let claim = create(path, bytes, options)?;
                (rustix::fs::fstat(&claim.0), Some(claim))
            }
            (found, _) => (found, None),
        };
        let stat = stat.map_err(|errno| error(path, "reading its status", errno))?;
        let file_type = FileType::from_raw_mode(stat.st_mode);
        if !matches!(file_type, FileType::BlockDevice | FileType::RegularFile) {
            let reason = format!("is a {}, not a block device or regular file", kind(file_type));
            return Err(unsuitable(path, reason));
        }
        let (claim, flags) = match claim {
            _ if !exclusive => (None, OFlags::RDONLY),
            Some(created) => (Some(created), OFlags::RDWR),
            None => (Some(take(path, file_type)?), OFlags::RDWR),
        };
        let fd = open_direct(path, flags, Mode::empty())?;
        if claim.as_ref().is_some_and(|claim| !same_file(&claim.0, &fd)) {
            return Err(unsuitable(path, "was replaced while being opened".into()));
        }
        let claim = claim.map(Arc::new);
        let target = match file_type {
            FileType::BlockDevice => measure_block_device(path, fd, claim, stat.st_rdev)?,
            _ => measure_file(path, fd, claim)?,
        };
        match options.create_bytes {
            Some(wanted_bytes) if wanted_bytes > target.capacity_bytes => {
                Err(OpenError::TooSmall {
                    path: path.to_owned(),
                    wanted_bytes,
                    actual_bytes: target.capacity_bytes,
                })
            }
            _ => Ok(target),
        }
    }
}

/// Claims an existing target, or fails if it is claimed elsewhere. Never waits: a claim is held as
/// long as its process runs.
fn take(path: &Path, file_type: FileType) -> Result<Claim, OpenError> {
    // O_EXCL without O_CREAT on a block device fails with EBUSY if the device is mounted, part of a
    // device-mapper or md target, or open with O_EXCL elsewhere (open(2), "Since Linux 2.6").
    let flags = match file_type {
        FileType::BlockDevice => OFlags::RDWR | OFlags::EXCL,
        _ => OFlags::RDWR,
    };
    let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| error(path, "open", errno))?;
    match file_type {
        FileType::BlockDevice => Ok(Claim(fd)),
        _ => lock(path, fd),
    }
}

fn lock(path: &Path, fd: OwnedFd) -> Result<Claim, OpenError> {
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Claim(fd)),
        Err(errno) => Err(error(path, "lock", errno)),
    }
}

// -------------------------------------------------------------------------------------------------
// Block devices

fn measure_block_device(
    path: &Path,
    fd: OwnedFd,
    claim: Option<Arc<Claim>>,
    device: u64,
) -> Result<Target, OpenError> {
    let logical_block_bytes = rustix::fs::ioctl_blksszget(&fd)
        .map_err(|errno| error(path, "reading its logical block size", errno))?;
    if logical_block_bytes as usize > PAGE_BYTES {
        let reason = format!(
            "its logical block of {} is larger than {PAGE}",
            ByteSize(logical_block_bytes.into())
        );
        return Err(unsuitable(path, reason));
    }
    let bytes = block_device_bytes(&fd).map_err(|errno| error(path, "reading its size", errno))?;
    let capacity_bytes = whole_pages(bytes);
    if capacity_bytes == 0 {
        return Err(unsuitable(path, format!("has a size of {bytes} bytes")));
    }
    let sysfs = Path::new("/sys/dev/block");
    if claim.is_some()
        && let Some(reason) = sparse_loop_device(sysfs, device)
    {
        return Err(unsuitable(path, reason));
    }
    let volatile_cache = volatile_cache(sysfs, device);
    Ok(Target {
        fd,
        claim,
        capacity_bytes,
        logical_block_bytes,
        block_device: true,
        volatile_cache,
    })
}

/// Rounds down to whole pages: a partition may end inside a page, and the rest of that page is not
/// used.
fn whole_pages(bytes: u64) -> u64 {
    bytes - bytes % PAGE_BYTES as u64
}

fn block_device_bytes(fd: &OwnedFd) -> Result<u64, Errno> {
    use rustix::ioctl::{Getter, ioctl, opcode};
    // linux/fs.h: BLKGETSIZE64 = _IOR(0x12, 114, size_t)
    const BLKGETSIZE64: rustix::ioctl::Opcode = opcode::read::<usize>(0x12, 114);
    // SAFETY: the opcode writes one u64, its `size_t` notwithstanding (block/ioctl.c `put_u64`), to
    // the pointer that `Getter<_, u64>` provides.
    let getter = unsafe { Getter::<BLKGETSIZE64, u64>::new() };
    // SAFETY: opcode and output type belong together, as argued above.
    unsafe { ioctl(fd, getter) }
}

/// Reads the sysfs attribute `file` of the device number `device`. A partition has no such
/// attribute itself; its parent directory has it.
fn sysfs_attribute(sysfs: &Path, device: u64, file: &str) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let directory = fs::canonicalize(sysfs.join(number)).ok()?;
    let whole = directory.parent().unwrap_or(&directory);
    let read = |directory: &Path| fs::read_to_string(directory.join(file)).ok();
    read(&directory).or_else(|| read(whole))
}

/// Whether the device number `device` has a volatile write cache, according to `queue/write_cache`
/// below `sysfs` (Documentation/ABI/stable/sysfs-block). An unreadable attribute counts as
/// volatile.
fn volatile_cache(sysfs: &Path, device: u64) -> bool {
    sysfs_attribute(sysfs, device, "queue/write_cache")
        .is_none_or(|state| state.trim() != "write through")
}

/// Why the device number `device` is unsuitable for a log if it is a loop device over a sparse
/// file: when the file system below is full, the loop driver reports a truncated write as done
/// (drivers/block/loop.c, `lo_complete_rq` checks for short transfers of reads only). A backing
/// file that cannot be opened from here is not checked.
fn sparse_loop_device(sysfs: &Path, device: u64) -> Option<String> {
    let path = sysfs_attribute(sysfs, device, "loop/backing_file")?;
    let path = path.trim_end_matches('\n');
    let file = fs::File::open(path).ok()?;
    let found = file.metadata().ok()?;
    let (bytes, allocated_bytes) = (found.len(), found.blocks() * 512);
    // `fallocate` allocates without writing, and unwritten parts count as holes. A file system that
    // compresses allocates less than the length even without a hole.
    let has_hole = || rustix::fs::seek(&file, SeekFrom::Hole(0)).is_ok_and(|hole| hole < bytes);
    (allocated_bytes < bytes && has_hole()).then(|| {
        format!(
            "is a loop device over {path}, which is sparse ({allocated_bytes} of {bytes} bytes are \
             allocated): on a full disk the kernel would report failed writes as done. \
             `fallocate --length {bytes} {path}` allocates the rest and keeps the content"
        )
    })
}

// -------------------------------------------------------------------------------------------------
// Regular files

fn measure_file(path: &Path, fd: OwnedFd, claim: Option<Arc<Claim>>) -> Result<Target, OpenError> {
    let stat =
        rustix::fs::statx(&fd, "", AtFlags::EMPTY_PATH, StatxFlags::SIZE | StatxFlags::DIOALIGN)
            .map_err(|errno| error(path, "reading its status", errno))?;
    let capacity_bytes = stat.stx_size;
    if capacity_bytes == 0 || !capacity_bytes.is_multiple_of(PAGE_BYTES as u64) {
        let reason = format!(
            "its length of {} is not a positive multiple of {PAGE}: restore it if it was \
             truncated, or remove it if it was never used",
            ByteSize(capacity_bytes)
        );
        return Err(unsuitable(path, reason));
    }
    let known = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN);
    let alignment = stat.stx_dio_offset_align.max(stat.stx_dio_mem_align);
    if known && alignment as usize > PAGE_BYTES {
        let reason = format!(
            "its file system requires Direct I/O in units of {}, more than {PAGE}",
            ByteSize(alignment.into())
        );
        return Err(unsuitable(path, reason));
    }
    // The value is 0 if the file system has no Direct I/O, and missing before Linux 6.1.
    let logical_block_bytes =
        if known && stat.stx_dio_offset_align > 0 { stat.stx_dio_offset_align } else { 512 };
    if claim.is_some() {
        // A copy for inspection may be sparse. A log may not: its writes would allocate and could
        // fail for lack of space.
        let hole = rustix::fs::seek(&fd, SeekFrom::Hole(0))
            .map_err(|errno| error(path, "searching for holes", errno))?;
        if hole < capacity_bytes {
            let reason = format!(
                "is sparse (a hole at byte {hole}); copy it with `cp --sparse=never`, or let it \
                 be created here. A file system that compresses zeros away cannot be used"
            );
            return Err(unsuitable(path, reason));
        }
    }
    Ok(Target {
        fd,
        claim,
        capacity_bytes,
        logical_block_bytes,
        block_device: false,
        volatile_cache: true,
    })
}

/// Creates `path` with `bytes` zeroes, all of them written.
///
/// The file is written as `path.creating` and renamed when it is complete and synced. A file at
/// `path` is therefore always complete; a crash leaves at most `path.creating`, which the next
/// attempt overwrites. The lock on `path.creating` serialises concurrent creators.
fn create(path: &Path, bytes: u64, options: &OpenOptions) -> Result<Claim, OpenError> {
    if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES as u64) {
        let reason = format!("cannot have {}: not a positive multiple of {PAGE}", ByteSize(bytes));
        return Err(unsuitable(path, reason));
    }
    if !directory(path).is_dir() {
        return Err(OpenError::NotFound(directory(path).to_owned()));
    }
    if is_among_devices(directory(path)) {
        let reason =
            "no such device, and a file in its place would be in memory. Is the disk attached?";
        return Err(unsuitable(path, reason.into()));
    }
    let creating = suffixed(path, ".creating");
    let fd = open_direct(&creating, OFlags::RDWR | OFlags::CREATE, Mode::RUSR | Mode::WUSR)?;
    let claim = lock(&creating, fd)?;
    // The previous holder of the lock may have renamed the very file that was just opened.
    let ours = rustix::fs::stat(&creating).is_ok_and(|named| is_file(&named, &claim.0));
    if !ours || path.exists() {
        return Err(OpenError::InUse(path.to_owned()));
    }
    let written = rustix::fs::ftruncate(&claim.0, 0)
        .map_err(|errno| error(path, "truncating the file of an interrupted creation", errno))
        .and_then(|()| {
            prewrite(path, &claim.0, 0..bytes, FallocateFlags::empty(), options.progress.as_ref())
        });
    if let Err(failure) = written {
        if let Err(left) = fs::remove_file(&creating) {
            tracing::warn!("{}: could not be removed: {left}", creating.display());
        }
        return Err(failure);
    }
    publish(&creating, path)?;
    Ok(claim)
}

/// Whether `directory` is `/dev` or a directory below it, and not on a separate file system mounted
/// there, such as `/dev/shm`.
fn is_among_devices(directory: &Path) -> bool {
    let devices = Path::new("/dev");
    fs::canonicalize(directory).is_ok_and(|directory| directory.starts_with(devices))
        && matches!(
            (rustix::fs::stat(directory), rustix::fs::stat(devices)),
            (Ok(directory), Ok(devices)) if directory.st_dev == devices.st_dev
        )
}

/// Extends the file by `range`. On failure its length is unchanged.
fn lengthen(
    path: &Path,
    fd: &OwnedFd,
    range: Range<u64>,
    progress: Option<&Progress>,
) -> Result<(), OpenError> {
    let length = range.start;
    // The length grows with the written bytes, never ahead of them: a kill at any moment leaves a
    // file without a hole.
    let written = prewrite(path, fd, range, FallocateFlags::KEEP_SIZE, progress);
    if written.is_err()
        && let Err(left) = rustix::fs::ftruncate(fd, length)
    {
        tracing::warn!("{}: could not be truncated to {length} bytes: {left}", path.display());
    }
    written
}

/// Implements [`crate::Device::set_capacity`]. Returns the new capacity of an open target; `path`
/// is for messages.
pub(crate) fn set_capacity(
    path: &Path,
    claim: &Claim,
    block_device: bool,
    bytes: u64,
    progress: Option<&Progress>,
) -> Result<u64, OpenError> {
    let fd = claim.fd();
    if block_device {
        let there =
            block_device_bytes(fd).map_err(|errno| error(path, "reading its size", errno))?;
        let there = whole_pages(there);
        if there < bytes {
            let path = path.to_owned();
            return Err(OpenError::TooSmall { path, wanted_bytes: bytes, actual_bytes: there });
        }
        return Ok(there);
    }
    let stat = rustix::fs::fstat(fd).map_err(|errno| error(path, "reading its status", errno))?;
    let length = stat.st_size.cast_unsigned();
    if length >= bytes {
        // Not synced: after a crash the file may have its old length, which its owner has to expect
        // anyway.
        rustix::fs::ftruncate(fd, bytes).map_err(|errno| error(path, "truncating", errno))?;
        return Ok(bytes);
    }
    // Direct I/O keeps these writes from evicting other data from the page cache. Not every file
    // system supports it.
    match rustix::fs::fcntl_getfl(fd)
        .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | OFlags::DIRECT))
    {
        Ok(()) | Err(Errno::INVAL) => {}
        Err(errno) => return Err(error(path, "enabling Direct I/O", errno)),
    }
    lengthen(path, fd, length..bytes, progress)?;
    Ok(bytes)
}

/// Writes zeroes to `range`, the end of the file, and syncs it. `progress` is called with the bytes
/// of the range.
fn prewrite(
    path: &Path,
    fd: &OwnedFd,
    range: Range<u64>,
    reserve: FallocateFlags,
    progress: Option<&Progress>,
) -> Result<(), OpenError> {
    let failed = |errno| match errno {
        Errno::NOSPC | Errno::DQUOT => {
            OpenError::NoSpace { path: path.to_owned(), wanted_bytes: range.end }
        }
        other => error(path, "pre-writing", other),
    };
    let bytes = range.end - range.start;
    // A write beyond this limit would kill the process and leave a file that ends inside a page.
    if let Some(limit) = rustix::process::getrlimit(Resource::Fsize).current
        && range.end > limit
    {
        let reason = format!(
            "cannot have {}: a file is limited to {} (ulimit -f)",
            ByteSize(range.end),
            ByteSize(limit)
        );
        return Err(unsuitable(path, reason));
    }
    // Check the free space first: discovering a shortage by reserving would fill the file system up
    // for other users. Some file systems do not report it (0 blocks).
    let space = rustix::fs::fstatvfs(fd).map_err(failed)?;
    if space.f_blocks > 0 && space.f_bavail.saturating_mul(space.f_frsize) < bytes {
        return Err(failed(Errno::NOSPC));
    }
    // Keeps the file contiguous and its space reserved while it is written. Not every file system
    // supports it.
    match rustix::fs::fallocate(fd, reserve, range.start, bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let zeroes = AlignedBuf::zeroed(PREWRITE_BYTES);
    let mut done = 0;
    while done < bytes {
        let wanted =
            usize::try_from(bytes - done).map_or(PREWRITE_BYTES, |left| left.min(PREWRITE_BYTES));
        match rustix::io::pwrite(fd, &zeroes[..wanted], range.start + done) {
            Ok(0) => return Err(failed(Errno::IO)),
            Ok(written) => done += written as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
        if let Some(progress) = progress {
            progress(done, bytes);
        }
    }
    rustix::fs::fsync(fd).map_err(failed)
}

/// Gives the complete file its final name, durably.
fn publish(creating: &Path, path: &Path) -> Result<(), OpenError> {
    let failed = |errno| error(path, "renaming the pre-written file", errno);
    match rustix::fs::renameat_with(CWD, creating, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => {}
        Err(Errno::EXIST) => {
            let reason = "a file of this name appeared during the creation".into();
            return Err(unsuitable(path, reason));
        }
        // A file system without NOREPLACE (NFS): the lock on `creating` still excludes other
        // instances of this program.
        Err(Errno::INVAL) => rustix::fs::rename(creating, path).map_err(failed)?,
        Err(errno) => return Err(failed(errno)),
    }
    rustix::fs::open(
        directory(path),
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .and_then(rustix::fs::fsync)
    .map_err(|errno| error(path, "syncing its directory", errno))
}

// -------------------------------------------------------------------------------------------------
// Both

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Opens with Direct I/O, or through the page cache where the file system refuses that. Durable
/// writes stay durable (RWF_DSYNC and fdatasync do not depend on Direct I/O), but they are copied
/// and compete for memory.
fn open_direct(path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, OpenError> {
    let flags = flags | OFlags::CLOEXEC;
    let opened = match rustix::fs::open(path, flags | OFlags::DIRECT, mode) {
        Err(Errno::INVAL) => {
            let opened = rustix::fs::open(path, flags, mode);
            if opened.is_ok() {
                tracing::warn!(
                    "{}: the file system refuses Direct I/O; using the page cache",
                    path.display()
                );
            }
            opened
        }
        other => other,
    };
    opened.map_err(|errno| error(path, "open", errno))
}

fn same_file(a: &OwnedFd, b: &OwnedFd) -> bool {
    rustix::fs::fstat(a).is_ok_and(|a| is_file(&a, b))
}

fn is_file(stat: &Stat, fd: &OwnedFd) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|open| (open.st_dev, open.st_ino) == (stat.st_dev, stat.st_ino))
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

fn error(path: &Path, action: &'static str, errno: Errno) -> OpenError {
    let path = path.to_owned();
    match errno {
        Errno::NOENT => OpenError::NotFound(path),
        Errno::BUSY | Errno::WOULDBLOCK => OpenError::InUse(path),
        Errno::ACCESS | Errno::PERM => OpenError::Permission(path),
        Errno::ROFS => OpenError::Unsuitable { path, reason: "is read-only".into() },
        _ => OpenError::Io { path, action, source: io::Error::from(errno) },
    }
}

fn unsuitable(path: &Path, reason: String) -> OpenError {
    OpenError::Unsuitable { path: path.to_owned(), reason }
}

fn kind(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Directory => "directory",
        FileType::BlockDevice => "block device",
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        _ => "special file",
    }
}
