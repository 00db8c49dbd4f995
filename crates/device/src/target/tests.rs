//! Opening and creating a target, and each way in which that fails.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::process::Command;

use parking_lot::Mutex;
use tempfile::TempDir;

use super::*;
use crate::{DeviceOffset, Durability, Engine, SharedDevice, open};

const BYTES: u64 = 9 * 1024 * 1024;

fn creating(bytes: u64) -> OpenOptions {
    OpenOptions {
        create_bytes: Some(bytes),
        engine: Engine::Threads,
        io_depth: 1,
        ..OpenOptions::default()
    }
}

fn existing() -> OpenOptions {
    OpenOptions { create_bytes: None, ..creating(0) }
}

fn reading() -> OpenOptions {
    OpenOptions { access: Access::ReadOnly, ..existing() }
}

fn refused(path: &Path, options: &OpenOptions) -> OpenError {
    open(path, options).expect_err("must be refused")
}

/// A directory, and a path in it that does not exist.
fn nowhere() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("wal");
    (dir, path)
}

fn names(dir: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(dir.path()).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

// -- Creation

#[test]
fn a_new_file_is_written_to_its_full_size() {
    let (dir, path) = nowhere();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let progress = {
        let (seen, path) = (seen.clone(), path.clone());
        move |done, total| {
            assert!(!path.exists(), "the file has its name only when complete");
            seen.lock().push((done, total));
        }
    };
    let device =
        open(&path, &OpenOptions { progress: Some(Arc::new(progress)), ..creating(BYTES) })
            .unwrap();
    assert_eq!(device.geometry().capacity_bytes, BYTES);
    assert!(device.geometry().volatile_cache && device.geometry().flushes, "as every file");
    let mib = 1024 * 1024;
    assert_eq!(*seen.lock(), [(4 * mib, BYTES), (8 * mib, BYTES), (BYTES, BYTES)]);

    let file = File::open(&path).unwrap();
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(0)).unwrap(), BYTES, "no hole");
    assert!(file.metadata().unwrap().blocks() * 512 >= BYTES, "all of it is allocated");
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(names(&dir), ["wal"]);
}

#[test]
fn an_interrupted_creation_is_started_over() {
    let (dir, path) = nowhere();
    fs::write(dir.path().join("wal.creating"), [0xff; 70_000]).unwrap();
    open(&path, &creating(BYTES)).unwrap();
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(names(&dir), ["wal"]);
}

#[test]
fn concurrent_creations_exclude_each_other() {
    let (dir, path) = nowhere();
    let other = File::create(dir.path().join("wal.creating")).unwrap();
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    let error = refused(&path, &creating(BYTES));
    assert!(matches!(error, OpenError::InUse(_)), "{error}");
    assert!(!path.exists());
}

#[test]
fn an_existing_file_is_not_created_again() {
    let (_dir, path) = nowhere();
    let device: SharedDevice = open(&path, &creating(BYTES)).unwrap();
    let mut page = device.alloc(PAGE_BYTES);
    page.fill(5);
    device.write_durable(DeviceOffset(0), page.freeze()).unwrap();
    drop(device);
    let never = |_, _| panic!("nothing must be written");
    let options = OpenOptions { progress: Some(Arc::new(never)), ..creating(BYTES) };
    let device = open(&path, &options).unwrap();
    assert_eq!(*device.read(DeviceOffset(0), PAGE_BYTES).unwrap(), [5; PAGE_BYTES]);
}

#[test]
fn a_creation_without_space_fails_and_leaves_no_file() {
    let (dir, path) = nowhere();
    let error = refused(&path, &creating(1 << 50));
    assert!(
        matches!(error, OpenError::NoSpace { wanted_bytes, .. } if wanted_bytes == 1 << 50),
        "{error}"
    );
    assert!(names(&dir).is_empty());
}

#[test]
fn a_size_that_is_not_whole_pages_is_refused() {
    let (dir, path) = nowhere();
    for bytes in [0, 1, 4095, 1024 * 1024 + 512] {
        let error = refused(&path, &creating(bytes));
        assert!(matches!(error, OpenError::Unsuitable { .. }), "{error}");
    }
    assert!(names(&dir).is_empty());
}

// -- Resizing an open target

fn engines() -> [OpenOptions; 2] {
    [Engine::Auto, Engine::Threads].map(|engine| OpenOptions { engine, ..creating(1 << 20) })
}

#[test]
fn an_open_file_can_be_extended_and_truncated() {
    for options in engines() {
        let (_dir, path) = nowhere();
        let device = open(&path, &options).unwrap();
        let page = |value: u8| {
            let mut page = device.alloc(PAGE_BYTES);
            page.fill(value);
            page.freeze()
        };
        let last = DeviceOffset((1 << 20) + BYTES - 4096);
        for round in 1..3 {
            let seen = Arc::new(Mutex::new(Vec::new()));
            let progress: Progress = {
                let seen = seen.clone();
                Arc::new(move |done, total| seen.lock().push((done, total)))
            };
            device.set_capacity((1 << 20) + BYTES, Some(&progress)).unwrap();
            assert_eq!(seen.lock().last(), Some(&(BYTES, BYTES)));
            assert_eq!(device.capacity_bytes(), (1 << 20) + BYTES);
            assert!(device.read(last, PAGE_BYTES).unwrap().iter().all(|byte| *byte == 0));
            device.write_durable(last, page(round)).unwrap();
            assert!(device.read(last, PAGE_BYTES).unwrap().iter().all(|byte| *byte == round));
            let file = File::open(&path).unwrap();
            let length = (1 << 20) + BYTES;
            assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(0)).unwrap(), length, "no hole");

            device.set_capacity(1 << 20, None).unwrap();
            assert_eq!(device.capacity_bytes(), 1 << 20);
            assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
        }
        device.write_durable(DeviceOffset((1 << 20) - 4096), page(9)).unwrap();
        drop(device);
        assert_eq!(open(&path, &existing()).unwrap().capacity_bytes(), 1 << 20);
    }
}

#[test]
fn an_extended_file_keeps_its_content() {
    let (_dir, path) = nowhere();
    let device = open(&path, &creating(2 << 20)).unwrap();
    let mut page = device.alloc(PAGE_BYTES);
    page.fill(5);
    device.write_durable(DeviceOffset((2 << 20) - 4096), page.freeze()).unwrap();
    device.set_capacity((2 << 20) + BYTES, None).unwrap();
    drop(device);
    let content = fs::read(&path).unwrap();
    let (old, new) = content.split_at(2 << 20);
    assert!(old[..old.len() - 4096].iter().all(|byte| *byte == 0));
    assert!(old[old.len() - 4096..].iter().all(|byte| *byte == 5));
    assert!(new.iter().all(|byte| *byte == 0));
    let device = open(&path, &existing()).expect("no hole");
    assert_eq!(device.geometry().capacity_bytes, (2 << 20) + BYTES);
}

/// After a kill at any moment the file can still be opened: a reader during the extension sees what
/// a kill would leave.
#[test]
fn a_file_has_no_hole_while_it_is_extended() {
    let (_dir, path) = nowhere();
    let device = open(&path, &creating(1 << 20)).unwrap();
    let watched = path.clone();
    let watch: Progress = Arc::new(move |done, _| {
        let file = File::open(&watched).unwrap();
        let length = file.metadata().unwrap().len();
        assert_eq!(length, (1 << 20) + done);
        assert_eq!(rustix::fs::seek(&file, SeekFrom::Hole(0)).unwrap(), length);
    });
    device.set_capacity((1 << 20) + BYTES, Some(&watch)).unwrap();
}

#[test]
#[should_panic(expected = "beyond the capacity of 524288 bytes")]
fn writes_beyond_a_reduced_capacity_are_refused() {
    let (_dir, path) = nowhere();
    let device = open(&path, &creating(1 << 20)).unwrap();
    device.set_capacity(512 << 10, None).unwrap();
    let page = device.alloc(PAGE_BYTES).freeze();
    let _ = device.write_durable(DeviceOffset(512 << 10), page);
}

#[test]
fn an_invalid_size_leaves_an_open_file_unchanged() {
    for options in engines() {
        let (_dir, path) = nowhere();
        let device = open(&path, &options).unwrap();
        let error = device.set_capacity(1 << 50, None).unwrap_err();
        assert!(
            matches!(error, OpenError::NoSpace { wanted_bytes, .. } if wanted_bytes == 1 << 50),
            "{error}"
        );
        for bytes in [0, 5000] {
            let error = device.set_capacity(bytes, None).unwrap_err().to_string();
            assert!(error.contains("not a positive multiple of 4KiB"), "{error}");
        }
        let reader = open(&path, &OpenOptions { create_bytes: None, ..reading() }).unwrap();
        let error = reader.set_capacity(2 << 20, None).unwrap_err().to_string();
        assert!(error.contains("read-only"), "{error}");
        assert_eq!(device.capacity_bytes(), 1 << 20);
        assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    }
}

// -- Refusals

#[test]
fn a_missing_target_is_not_found() {
    let (dir, path) = nowhere();
    for options in
        [existing(), reading(), OpenOptions { access: Access::ReadOnly, ..creating(BYTES) }]
    {
        let error = refused(&path, &options);
        assert!(matches!(&error, OpenError::NotFound(named) if *named == path), "{error}");
    }
    let error = refused(&path.join("deeper"), &creating(BYTES));
    assert!(
        matches!(&error, OpenError::NotFound(named) if *named == path),
        "the directory: {error}"
    );
    assert!(names(&dir).is_empty());
}

/// The path of a disk that is not attached, or is misspelt: a file of that name would be in memory,
/// and lost at the next boot.
#[test]
fn no_file_is_created_in_dev() {
    let (dir, _) = nowhere();
    let link = dir.path().join("by-another-way");
    symlink("/dev", &link).unwrap();
    for path in [Path::new("/dev/alluvium-no-such-disk"), &link.join("alluvium-no-such-disk")] {
        let error = refused(path, &creating(BYTES));
        assert!(matches!(error, OpenError::Unsuitable { .. }), "{error}");
        assert!(error.to_string().contains("no such device"), "{error}");
        assert!(!path.exists());
    }
}

#[test]
fn a_file_has_one_writer_and_any_number_of_readers() {
    let (_dir, path) = nowhere();
    let writer = open(&path, &creating(BYTES)).unwrap();
    for options in [existing(), creating(BYTES)] {
        let error = refused(&path, &options);
        assert!(matches!(error, OpenError::InUse(_)), "{error}");
    }
    let readers = [open(&path, &reading()).unwrap(), open(&path, &reading()).unwrap()];
    drop(writer);
    let again = open(&path, &existing()).expect("readers do not exclude other openers");
    drop((readers, again));
}

#[test]
fn a_too_small_file_is_refused_with_both_sizes() {
    let (_dir, path) = nowhere();
    drop(open(&path, &creating(1 << 20)).unwrap());
    let error = refused(&path, &creating(2 << 20));
    assert!(matches!(error, OpenError::TooSmall { .. }));
    let message = error.to_string();
    assert!(message.contains("2MiB requested, but it has 1MiB"), "{message}");
    open(&path, &creating(4096)).expect("more than enough");
}

#[test]
fn a_sparse_file_can_only_be_opened_read_only() {
    let (_dir, path) = nowhere();
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let error = refused(&path, &existing());
    assert!(error.to_string().contains("sparse (a hole at byte 0)"), "{error}");
    let device = open(&path, &reading()).unwrap();
    assert_eq!(*device.read(DeviceOffset(4096), 4096).unwrap(), [0; 4096]);
}

#[test]
fn a_preallocated_unwritten_file_counts_as_sparse() {
    let (_dir, path) = nowhere();
    let file = File::create(&path).unwrap();
    match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 20) {
        Ok(()) if rustix::fs::seek(&file, SeekFrom::Hole(0)) == Ok(0) => {}
        other => {
            return println!("SKIPPED: the file system reports reserved space as data: {other:?}");
        }
    }
    let error = refused(&path, &existing());
    assert!(error.to_string().contains("sparse"), "{error}");
}

#[test]
fn a_file_length_that_is_not_whole_pages_is_refused() {
    let (_dir, path) = nowhere();
    for len in [0, 4095, 10_000] {
        fs::write(&path, vec![1; len]).unwrap();
        let error = refused(&path, &existing());
        assert!(error.to_string().contains(&format!("length of {len}B")), "{error}");
    }
}

#[test]
fn special_files_are_refused() {
    let (dir, _) = nowhere();
    for (path, kind) in [(dir.path(), "directory"), (Path::new("/dev/null"), "character device")] {
        let error = refused(path, &existing());
        assert!(matches!(error, OpenError::Unsuitable { .. }));
        assert!(error.to_string().contains(kind), "{error}");
    }
}

#[test]
fn a_symbolic_link_is_followed() {
    let (dir, path) = nowhere();
    drop(open(&path, &creating(1 << 20)).unwrap());
    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    let held = open(&link, &existing()).unwrap();
    assert!(matches!(refused(&path, &existing()), OpenError::InUse(_)), "the lock is the file's");
    drop(held);
    let dangling = dir.path().join("dangling");
    symlink(dir.path().join("nothing"), &dangling).unwrap();
    let error = refused(&dangling, &creating(1 << 20));
    assert!(matches!(error, OpenError::Unsuitable { .. }), "{error}");
}

#[test]
fn system_errors_map_to_open_errors() {
    let path = Path::new("/dev/wal");
    let of = |errno| error(path, "open", errno);
    assert!(matches!(of(Errno::NOENT), OpenError::NotFound(_)));
    assert!(matches!(of(Errno::BUSY), OpenError::InUse(_)));
    assert!(matches!(of(Errno::WOULDBLOCK), OpenError::InUse(_)));
    assert!(matches!(of(Errno::ACCESS), OpenError::Permission(_)));
    assert!(matches!(of(Errno::PERM), OpenError::Permission(_)));
    assert!(matches!(of(Errno::ROFS), OpenError::Unsuitable { .. }));
    let other = of(Errno::IO);
    assert!(matches!(other, OpenError::Io { .. }));
    assert_eq!(other.to_string(), "/dev/wal: open: Input/output error (os error 5)");
}

// -- Properties of a target

#[test]
fn a_partition_has_the_write_cache_of_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let sysfs = dir.path().join("dev/block");
    let disk = dir.path().join("devices/sda");
    fs::create_dir_all(&sysfs).unwrap();
    fs::create_dir_all(disk.join("queue")).unwrap();
    fs::create_dir_all(disk.join("sda1")).unwrap();
    symlink(&disk, sysfs.join("8:0")).unwrap();
    symlink(disk.join("sda1"), sysfs.join("8:1")).unwrap();
    let volatile = |minor| volatile_cache(&sysfs, rustix::fs::makedev(8, minor));
    for (state, expected) in [("write back\n", true), ("write through\n", false), ("what\n", true)]
    {
        fs::write(disk.join("queue/write_cache"), state).unwrap();
        assert_eq!((volatile(0), volatile(1)), (expected, expected), "{state:?}");
    }
    assert!(volatile(2), "unknown counts as volatile");
}

#[test]
fn a_loop_device_over_a_sparse_file_is_detected_also_by_partition() {
    let dir = tempfile::tempdir().unwrap();
    let (sysfs, disk) = (dir.path().join("dev/block"), dir.path().join("devices/loop0"));
    fs::create_dir_all(&sysfs).unwrap();
    fs::create_dir_all(disk.join("loop")).unwrap();
    fs::create_dir_all(disk.join("loop0p1")).unwrap();
    symlink(&disk, sysfs.join("7:0")).unwrap();
    symlink(disk.join("loop0p1"), sysfs.join("7:1")).unwrap();
    let sparse = |minor| sparse_loop_device(&sysfs, rustix::fs::makedev(7, minor));
    assert_eq!(sparse(0), None, "no loop device");

    let image = dir.path().join("disk.img");
    fs::write(disk.join("loop/backing_file"), format!("{}\n", image.display())).unwrap();
    assert_eq!(sparse(0), None, "a file that cannot be seen");
    let file = File::create(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    for minor in [0, 1] {
        let reason = sparse(minor).expect("nothing is allocated");
        assert!(reason.contains("0 of 1048576 bytes") && reason.contains("fallocate"), "{reason}");
    }
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    assert_eq!((sparse(0), sparse(1)), (None, None));
}

#[test]
fn durability_is_resolved_when_opening() {
    let (_dir, path) = nowhere();
    for (durability, flushes) in
        [(Durability::Auto, true), (Durability::Dsync, true), (Durability::Device, false)]
    {
        let device = open(&path, &OpenOptions { durability, ..creating(1 << 20) }).unwrap();
        assert_eq!(device.geometry().flushes, flushes, "{durability}");
    }
}

/// ramfs has no Direct I/O. Everything else behaves as on any file.
#[test]
fn a_file_system_without_direct_io_goes_through_the_page_cache() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount").args(["-t", "ramfs", "ramfs"]).arg(dir.path()).output();
    match mounted {
        Ok(output) if output.status.success() => {}
        other => return println!("SKIPPED: mounting a ramfs is not allowed: {other:?}"),
    }
    let unmount = Unmount(&dir);
    for engine in [Engine::Threads, Engine::Auto] {
        let path = dir.path().join("wal");
        let device = open(&path, &OpenOptions { engine, ..creating(1 << 20) }).unwrap();
        let mut page = device.alloc(PAGE_BYTES);
        page.fill(5);
        let page = page.freeze();
        device.write_durable(DeviceOffset(4096), page.clone()).unwrap();
        device.flush().unwrap();
        assert_eq!(*device.read(DeviceOffset(4096), PAGE_BYTES).unwrap(), *page);
    }
    drop(unmount);
}

struct Unmount<'a>(&'a TempDir);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        // Lazily, since io_uring releases a file some time after its ring was closed.
        let unmounted = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "{:?} is still mounted", self.0);
    }
}
