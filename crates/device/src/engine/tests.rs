//! The conformance suite on real engines and targets, and tests of what is specific to them.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::thread;

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::threads::Threads;
use super::uring::Uring;
use super::{Body, Core, Job, Transfer};
use crate::buffer::Pool;
use crate::conformance::{self, Subject, pattern};
use crate::{
    Access, AlignedBuf, DeviceOffset, Durability, Engine, Geometry, OpenOptions, PAGE_BYTES,
    Request, SharedDevice, open,
};

const FILE_BYTES: u64 = 4 * 1024 * 1024;

/// Few and small buffers, so that the suite exceeds the pool.
fn options(engine: Engine) -> OpenOptions {
    OpenOptions {
        engine,
        create_bytes: Some(FILE_BYTES),
        buffers: 4,
        buffer_bytes: 64 * 1024,
        ..OpenOptions::default()
    }
}

fn start(fd: OwnedFd, geometry: &Geometry, engine: Engine) -> io::Result<SharedDevice> {
    let pool = Pool::new(64 * 1024, 4, 256 * 1024)?;
    let core = Core::new(geometry.clone(), None);
    Ok(match engine {
        Engine::IoUring => Arc::new(Uring::start(fd, core, pool, 8)?),
        _ => Arc::new(Threads::start(fd, core, pool, 8)?),
    })
}

/// Whether `engine` can be tested here; prints a message if not.
fn available(engine: Engine) -> bool {
    if engine != Engine::IoUring || io_uring::IoUring::new(2).is_ok() {
        return true;
    }
    println!("SKIPPED: the kernel or the container refuses io_uring");
    false
}

fn conforms(path: &Path, engine: Engine) {
    if !available(engine) {
        return;
    }
    let options = options(engine);
    let read_only = OpenOptions { access: Access::ReadOnly, ..options.clone() };
    conformance::run(&Subject {
        open: &|| open(path, &options),
        // The kernel refuses to write through a descriptor that is open read-only, and to flush one
        // that is not a file.
        broken: &|| {
            let geometry = open(path, &options).unwrap().geometry().clone();
            let fd =
                rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty()).unwrap();
            start(fd, &geometry, engine).unwrap()
        },
        read_only: Some(&|| open(path, &read_only).unwrap()),
        drive: &|| {},
    });
}

#[test]
fn io_uring_on_a_file_conforms() {
    let dir = tempfile::tempdir().unwrap();
    conforms(&dir.path().join("wal"), Engine::IoUring);
}

#[test]
fn threads_on_a_file_conform() {
    let dir = tempfile::tempdir().unwrap();
    conforms(&dir.path().join("wal"), Engine::Threads);
}

#[test]
fn io_uring_on_a_block_device_conforms() {
    if let Some(device) = LoopDevice::new() {
        conforms(&device.path, Engine::IoUring);
    }
}

#[test]
fn threads_on_a_block_device_conform() {
    if let Some(device) = LoopDevice::new() {
        conforms(&device.path, Engine::Threads);
    }
}

#[test]
fn a_block_device_is_measured_and_claimed_exclusively() {
    let Some(device) = LoopDevice::new() else { return };
    let options = options(Engine::Threads);
    let held = open(&device.path, &options).unwrap();
    let geometry = held.geometry();
    assert!(geometry.block_device);
    assert_eq!(geometry.capacity_bytes, FILE_BYTES);
    assert_eq!(geometry.logical_block_bytes, 512);
    assert_eq!(geometry.flushes, geometry.volatile_cache);
    let second = open(&device.path, &options).unwrap_err();
    assert!(matches!(second, crate::OpenError::InUse(_)), "{second}");
    let larger = OpenOptions { create_bytes: Some(FILE_BYTES + 4096), ..options.clone() };
    drop(held);
    let too_small = open(&device.path, &larger).unwrap_err();
    assert!(matches!(too_small, crate::OpenError::TooSmall { .. }), "{too_small}");
    open(&device.path, &options).expect("the claim is released");
}

/// A durable write flushes the device: the block layer's counters show it.
#[test]
fn durable_writes_flush_the_device() {
    let Some(device) = LoopDevice::new() else { return };
    let name = device.path.file_name().unwrap().to_str().unwrap();
    let (cache, stat) =
        (format!("/sys/block/{name}/queue/write_cache"), format!("/sys/block/{name}/stat"));
    if !fs::read_to_string(&cache).is_ok_and(|cache| cache.trim() == "write back") {
        return println!("SKIPPED: the loop device has no volatile cache");
    }
    // Documentation/block/stat.rst: the 16th number counts flushes.
    let flushes = || -> u64 {
        fs::read_to_string(&stat).unwrap().split_whitespace().nth(15).unwrap().parse().unwrap()
    };
    for engine in [Engine::Threads, Engine::IoUring].into_iter().filter(|engine| available(*engine))
    {
        for (durability, expected) in
            [(Durability::Auto, 10), (Durability::Dsync, 10), (Durability::Device, 0)]
        {
            let device =
                open(&device.path, &OpenOptions { durability, ..options(engine) }).unwrap();
            assert!(device.geometry().volatile_cache);
            let count = |durable| {
                let before = flushes();
                for page in 0..10 {
                    let at = DeviceOffset(page * PAGE_BYTES as u64);
                    let (tx, rx) = mpsc::channel();
                    let write =
                        Request::Write { at, buf: pattern(&device, PAGE_BYTES, page), durable };
                    device.submit(write, Box::new(move |outcome| tx.send(outcome).unwrap()));
                    rx.recv().unwrap().unwrap();
                }
                flushes() - before
            };
            assert_eq!(count(true), expected, "{engine}, {durability}: of 10 durable writes");
            assert_eq!(count(false), 0, "{engine}, {durability}: of 10 other writes");
            let before = flushes();
            device.flush().unwrap();
            assert_eq!(flushes() - before, 1, "{engine}, {durability}: of one flush");
        }
    }
}

/// A loop device over its own file; detached when dropped.
struct LoopDevice {
    path: PathBuf,
    _dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// Serialises the tests with a loop device: between fork and exec, the child of one test holds a
/// copy of another's claim, and only `losetup` forks.
static LOOP_DEVICE: Mutex<()> = Mutex::new(());

impl LoopDevice {
    /// `None`, with a printed reason, where loop devices are not allowed.
    fn new() -> Option<Self> {
        let alone = LOOP_DEVICE.lock();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("backing");
        let backing = File::create(&file).unwrap();
        rustix::fs::fallocate(&backing, rustix::fs::FallocateFlags::empty(), 0, FILE_BYTES)
            .unwrap();
        let output = match Command::new("losetup").args(["--find", "--show"]).arg(&file).output() {
            Ok(output) if output.status.success() => output,
            Ok(output) => {
                println!("SKIPPED: losetup: {}", String::from_utf8_lossy(&output.stderr).trim());
                return None;
            }
            Err(error) => {
                println!("SKIPPED: losetup: {error}");
                return None;
            }
        };
        let path = String::from_utf8(output.stdout).unwrap().trim().into();
        Some(Self { path, _dir: dir, _alone: alone })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.path).status();
        assert!(
            detached.is_ok_and(|status| status.success()),
            "{} is still attached",
            self.path.display()
        );
    }
}

/// A file that was truncated under the engine: the kernel transfers the bytes that exist, then
/// none.
#[test]
fn reading_beyond_the_end_of_a_file_is_an_error() {
    for engine in [Engine::Threads, Engine::IoUring].into_iter().filter(|engine| available(*engine))
    {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wal");
        let device = open(&path, &options(engine)).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(3 * PAGE_BYTES as u64).unwrap();
        let error = device.read(DeviceOffset(PAGE_BYTES as u64), 4 * PAGE_BYTES).unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        assert_eq!((error.operation, error.at, error.len_bytes), ("read", 4096, 4 * 4096));
        assert!(device.failure().is_none(), "a failed read does not latch");
        device.read(DeviceOffset(PAGE_BYTES as u64), 2 * PAGE_BYTES).unwrap();
    }
}

#[test]
fn a_panicking_completion_latches_and_the_engine_lives_on() {
    for engine in [Engine::Threads, Engine::IoUring].into_iter().filter(|engine| available(*engine))
    {
        let dir = tempfile::tempdir().unwrap();
        let device = open(&dir.path().join("wal"), &options(engine)).unwrap();
        let buf = device.alloc(PAGE_BYTES);
        device
            .submit(Request::Read { at: DeviceOffset(0), buf }, Box::new(|_| panic!("on purpose")));
        // There are several engine threads: wait until the panic has taken effect.
        while device.failure().is_none() {
            thread::yield_now();
        }
        let error = device.flush().unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
        device.read(DeviceOffset(0), PAGE_BYTES).unwrap();
    }
}

/// Submitters on many threads race with the I/O thread going to sleep: a lost wake-up would hang
/// this test.
#[test]
fn no_wake_up_of_the_io_thread_is_lost() {
    for engine in [Engine::Threads, Engine::IoUring].into_iter().filter(|engine| available(*engine))
    {
        let dir = tempfile::tempdir().unwrap();
        let device = open(&dir.path().join("wal"), &options(engine)).unwrap();
        thread::scope(|scope| {
            for submitter in 0..4 {
                let device = &device;
                scope.spawn(move || {
                    for round in 0..500 {
                        let at = DeviceOffset((submitter * 500 + round) % 1024 * PAGE_BYTES as u64);
                        device.read(at, PAGE_BYTES).unwrap();
                    }
                });
            }
        });
    }
}

/// Two handles in turn, many times: the device's lock is released before its drop returns.
#[test]
fn the_lock_is_free_when_the_device_is_dropped() {
    for engine in [Engine::Threads, Engine::IoUring].into_iter().filter(|engine| available(*engine))
    {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wal");
        for round in 0..100 {
            let device = open(&path, &options(engine))
                .unwrap_or_else(|error| panic!("round {round}: {error}"));
            let write = Request::Write {
                at: DeviceOffset(0),
                buf: pattern(&device, PAGE_BYTES, round),
                durable: false,
            };
            device.submit(write, Box::new(|outcome| drop(outcome.unwrap())));
            device.submit(Request::Flush, Box::new(|outcome| drop(outcome.unwrap())));
        }
    }
}

#[test]
fn a_short_transfer_is_continued_at_whole_blocks() {
    let job = |len| job(Body::Read(AlignedBuf::zeroed(len)), 8192);
    let position = |job: &mut Job| match job.next() {
        Transfer::Read { at, buf, .. } => (at, buf.len()),
        _ => unreachable!("it is a read"),
    };
    let mut read = job(8192);
    assert_eq!(position(&mut read), (8192, 8192));
    assert!(read.advance(Ok(1024), 512).is_none());
    assert_eq!(position(&mut read), (9216, 7168));
    assert!(read.advance(Ok(700), 512).is_none(), "the odd bytes must be read again");
    assert_eq!(position(&mut read), (9728, 6656));
    assert!(read.advance(Err(Errno::INTR), 512).is_none());
    assert!(read.advance(Err(Errno::AGAIN), 512).is_none());
    assert_eq!(position(&mut read), (9728, 6656));
    assert!(read.advance(Ok(6656), 512).unwrap().is_ok());

    // No progress at all, or less than one block.
    for moved in [0, 511] {
        let error = job(4096).advance(Ok(moved), 512).unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
    let error = job(4096).advance(Err(Errno::IO), 512).unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
}

#[test]
fn a_permanent_shortage_becomes_an_error() {
    let mut read = job(Body::Read(AlignedBuf::zeroed(8192)), 0);
    for _ in 0..super::MAX_RETRIES {
        assert!(read.advance(Err(Errno::AGAIN), 512).is_none());
    }
    assert!(read.advance(Ok(4096), 512).is_none(), "progress starts the count again");
    for _ in 0..super::MAX_RETRIES {
        assert!(read.advance(Err(Errno::AGAIN), 512).is_none());
    }
    let error = read.advance(Err(Errno::AGAIN), 512).unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

fn job(body: Body, at: u64) -> Job {
    Job { at, done: 0, retries: 0, body, completion: Box::new(|_| {}) }
}

/// A write that was in flight beside the failed one is not acknowledged either.
#[test]
fn nothing_is_acknowledged_after_the_latch() {
    let geometry = Geometry {
        name: "under test".into(),
        capacity_bytes: 1 << 20,
        logical_block_bytes: 512,
        block_device: false,
        volatile_cache: true,
        flushes: true,
        read_only: false,
        engine: "none",
    };
    let core = Core::new(geometry, None);
    let (tx, rx) = mpsc::channel();
    let job = || {
        let tx = tx.clone();
        let buf = AlignedBuf::zeroed(4096).freeze();
        let request = Request::Write { at: DeviceOffset(4096), buf, durable: true };
        core.accept(request, Box::new(move |outcome| tx.send(outcome).unwrap()))
    };
    let (fails, succeeds) = (job(), job());
    assert!(core.refusal(&succeeds).is_none());
    core.finish(fails, Err(io::Error::from(Errno::IO)));
    core.finish(succeeds, Ok(()));
    let first = rx.recv().unwrap().unwrap_err();
    let second = rx.recv().unwrap().unwrap_err();
    assert!(Arc::ptr_eq(&first.source, &second.source));
    assert!(core.refusal(&job()).is_some());
}

/// The kernel registers at most 1 GiB as one buffer; a pool above that represents any pool that it
/// refuses.
#[test]
fn an_unregistrable_pool_works() {
    if !available(Engine::IoUring) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("wal");
    let buffer_bytes = 1024 * 1024;
    // Untouched slots are only address space.
    for buffers in [0, 1025] {
        let device =
            open(&path, &OpenOptions { buffer_bytes, buffers, ..options(Engine::IoUring) })
                .unwrap();
        let content = pattern(&device, 64 * 1024, 3);
        assert_eq!(content.registered(), buffers > 0, "from the pool");
        device.write_durable(DeviceOffset(0), content.clone()).unwrap();
        assert_eq!(*device.read(DeviceOffset(0), 64 * 1024).unwrap(), *content);
    }
}

/// A container that forbids io_uring: its seccomp filter returns EPERM.
#[test]
fn threads_serve_where_io_uring_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("wal");
    without(libc::SYS_io_uring_setup, libc::EPERM, || {
        let error = open(&path, &options(Engine::IoUring)).unwrap_err();
        assert!(
            error.to_string().contains("setting up io_uring: Operation not permitted"),
            "{error}"
        );
        let device = open(&path, &options(Engine::Auto)).unwrap();
        assert_eq!(device.geometry().engine, "threads");
        let content = pattern(&device, PAGE_BYTES, 3);
        device.write_durable(DeviceOffset(0), content.clone()).unwrap();
        assert_eq!(*device.read(DeviceOffset(0), PAGE_BYTES).unwrap(), *content);
    });
}

#[test]
fn durable_writes_work_without_the_dsync_flag() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("wal");
    without(libc::SYS_pwritev2, libc::EOPNOTSUPP, || {
        let device = open(&path, &options(Engine::Threads)).unwrap();
        let content = pattern(&device, 3 * PAGE_BYTES, 3);
        device.write_durable(DeviceOffset(4096), content.clone()).unwrap();
        assert_eq!(*device.read(DeviceOffset(4096), 3 * PAGE_BYTES).unwrap(), *content);
    });
}

/// Runs `test` on a thread (and the threads that it starts) for which the system call `number`
/// fails with `errno`.
fn without(number: libc::c_long, errno: i32, test: impl FnOnce() + Send) {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let filter = [
        // Offset 0 of seccomp_data is the number of the call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    thread::scope(|scope| {
        let tested = scope.spawn(|| {
            let program =
                libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
            // SAFETY: changes flags of this thread alone and takes no pointer.
            let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            assert_eq!(privileges, 0, "{}", io::Error::last_os_error());
            // SAFETY: the program and its filter outlive the call, which copies them (seccomp(2)).
            let installed = unsafe {
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
            };
            assert_eq!(installed, 0, "{}", io::Error::last_os_error());
            test();
        });
        tested.join().unwrap();
    });
}

#[test]
fn the_requested_engine_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("wal");
    assert_eq!(open(&path, &options(Engine::Threads)).unwrap().geometry().engine, "threads");
    if available(Engine::IoUring) {
        assert_eq!(open(&path, &options(Engine::IoUring)).unwrap().geometry().engine, "io_uring");
        assert_eq!(open(&path, &options(Engine::Auto)).unwrap().geometry().engine, "io_uring");
    }
}
