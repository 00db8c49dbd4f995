//! The io_uring engine: one ring, one thread, which sleeps in the kernel until a transfer completes
//! or a request arrives.
//!
//! Requests come through an inbox under a short lock. The thread takes as many as it may have in
//! flight, submits them together with the wait for the next completion, and runs completions
//! between two waits. A submitter wakes it, through an eventfd that the ring polls, only if the
//! thread has marked that it sleeps with capacity for more.
//!
//! The number of requests in flight is bounded by the size of the ring, so neither of its queues
//! can overflow.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::inbox::{Inbox, Next};
use super::{Core, Engine, Job, Transfer};
use crate::buffer::Pool;

/// The target's index in the table of registered files.
const TARGET: types::Fixed = types::Fixed(0);

/// The pool's index in the table of registered buffers.
const POOL: u16 = 0;

/// `user_data` of the poll on the eventfd; transfers carry the index of their slot.
const WAKE: u64 = u64::MAX;

/// Upper bound of bytes per transfer; a longer one is continued. Below the kernel's limit of 2 GiB
/// less a page (read(2), "NOTES").
const MAX_TRANSFER_BYTES: usize = 1 << 30;

/// A device served by a ring.
pub(crate) struct Uring {
    shared: Arc<Shared>,
    pool: Arc<Pool>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    core: Core,
    inbox: Inbox<Job>,
    /// Written by submitters, polled by the ring.
    wake: OwnedFd,
}

impl Uring {
    /// Starts the engine. Fails where the kernel or the container refuses io_uring or a required
    /// part of it.
    pub(crate) fn start(
        fd: OwnedFd,
        core: Core,
        pool: Arc<Pool>,
        io_depth: usize,
    ) -> io::Result<Self> {
        // Not O_NONBLOCK: it is read only after the ring has reported it readable.
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let shared = Arc::new(Shared { core, inbox: Inbox::new(), wake });
        let (ready, started) = mpsc::sync_channel(1);
        // The ring is created on the thread that uses it: IORING_SETUP_SINGLE_ISSUER binds it to
        // its creator.
        let thread = thread::Builder::new().name("device-io".into()).spawn({
            let (shared, pool) = (shared.clone(), pool.clone());
            move || match IoThread::set_up(shared, fd, pool, io_depth) {
                Ok(io_thread) => {
                    drop(ready.send(Ok(())));
                    io_thread.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        })?;
        started.recv().expect("the thread answers before it ends")?;
        Ok(Self { shared, pool, thread: Some(thread) })
    }
}

impl Shared {
    fn wake(&self) {
        // This fails only if the counter would overflow, and then the eventfd is readable anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Engine for Uring {
    fn core(&self) -> &Core {
        &self.shared.core
    }

    fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn push(&self, job: Job) {
        if self.shared.inbox.push(job) {
            self.shared.wake();
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.inbox.close();
        self.shared.wake();
        let thread = self.thread.take().expect("taken only here");
        // The last handle may be dropped inside a completion, on this very thread, which then ends
        // by itself.
        if thread.thread().id() != thread::current().id() {
            thread.join().expect("the I/O thread aborts rather than panics");
        }
    }
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (io_uring)", self.shared.core.geometry.name)
    }
}

/// The state of the I/O thread.
struct IoThread {
    shared: Arc<Shared>,
    ring: IoUring,
    flight: Flight,
    /// Whether the poll on the eventfd is in the ring.
    polling: bool,
    /// Whether the pool is registered, so that transfers of its slots need not pin pages.
    registered: bool,
    _fd: OwnedFd,
    _pool: Arc<Pool>,
}

/// Jobs that the kernel is working on, by slot. The kernel reads and writes their buffers, which
/// must stay valid until the ring reports completion.
struct Flight {
    slots: Vec<Option<Job>>,
    free: Vec<usize>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        if thread::panicking() {
            // A defect of the engine itself. Freeing the buffers would let the kernel write into
            // memory that is reused, and keeping them would leave their owners waiting for ever.
            tracing::error!("the I/O thread of a device panicked; aborting");
            std::process::abort();
        }
    }
}

impl IoThread {
    fn set_up(
        shared: Arc<Shared>,
        fd: OwnedFd,
        pool: Arc<Pool>,
        io_depth: usize,
    ) -> io::Result<Self> {
        // One entry for each transfer and one for the poll. The completion queue is twice that.
        let entries = (io_depth as u32 + 1).next_power_of_two();
        let ring = build(entries)?;
        require_operations(&ring)?;
        ring.submitter().register_files(&[fd.as_raw_fd()])?;
        let registered = match register_pool(&ring, &pool) {
            Ok(registered) => registered,
            Err(error) => {
                tracing::info!(
                    "{}: buffers are not registered with io_uring: {error} (RLIMIT_MEMLOCK may be \
                     too low)",
                    shared.core.geometry.name
                );
                false
            }
        };
        let flight = Flight {
            slots: (0..io_depth).map(|_| None).collect(),
            free: (0..io_depth).rev().collect(),
        };
        Ok(Self { shared, ring, flight, polling: false, registered, _fd: fd, _pool: pool })
    }

    /// Runs until the device is closed and idle.
    fn run(mut self) {
        let mut completed = Vec::with_capacity(self.flight.slots.len() + 1);
        while self.start_requests() {
            self.wait();
            self.shared.inbox.awake();
            completed
                .extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
            for (user_data, result) in completed.drain(..) {
                match user_data {
                    WAKE => self.woken(),
                    slot => self.transferred(slot as usize, result),
                }
            }
        }
    }

    /// Moves queued requests into the ring while slots are free. Returns false if the device is
    /// closed and idle.
    fn start_requests(&mut self) -> bool {
        loop {
            let Flight { free, slots } = &self.flight;
            let job = match self.shared.inbox.next(free.len(), slots.len()) {
                Next::Take(job) => job,
                Next::Sleep => break,
                Next::End => return false,
            };
            match self.shared.core.refusal(&job) {
                Some(refusal) => self.shared.core.finish(job, Err(refusal)),
                None => {
                    let slot = self.flight.free.pop().expect("a slot is free, or no job is taken");
                    self.flight.slots[slot] = Some(job);
                    self.transfer(slot);
                }
            }
        }
        if !self.polling {
            let wake = types::Fd(self.shared.wake.as_raw_fd());
            let poll = opcode::PollAdd::new(wake, libc::POLLIN as u32).build().user_data(WAKE);
            // SAFETY: the operation uses no memory; the eventfd lives in `shared`.
            unsafe { push(&mut self.ring, &poll) };
            self.polling = true;
        }
        true
    }

    /// Submits the queued entries and sleeps until a completion.
    fn wait(&mut self) {
        if let Err(error) = self.ring.submit_and_wait(1) {
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // The kernel is short of memory; entries not submitted stay in the ring for the
                // next round.
                Some(libc::EAGAIN | libc::EBUSY) => thread::yield_now(),
                _ => panic!("{}: io_uring_enter: {error}", self.shared.core.geometry.name),
            }
        }
    }

    fn woken(&mut self) {
        self.polling = false;
        // The value does not matter; the eventfd is readable, so this does not block. If the read
        // fails, the next poll fires at once.
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
    }

    /// Hands the next transfer of the job in `slot` to the ring.
    fn transfer(&mut self, slot: usize) {
        let job = self.flight.slots[slot].as_mut().expect("the slot is in flight");
        let entry = match job.next() {
            Transfer::Read { at, buf, registered } => {
                let (ptr, len) = (buf.as_mut_ptr(), buf.len().min(MAX_TRANSFER_BYTES) as u32);
                if registered && self.registered {
                    opcode::ReadFixed::new(TARGET, ptr, len, POOL).offset(at).build()
                } else {
                    opcode::Read::new(TARGET, ptr, len).offset(at).build()
                }
            }
            Transfer::Write { at, buf, registered, dsync } => {
                let (ptr, len) = (buf.as_ptr(), buf.len().min(MAX_TRANSFER_BYTES) as u32);
                let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                if registered && self.registered {
                    opcode::WriteFixed::new(TARGET, ptr, len, POOL)
                        .offset(at)
                        .rw_flags(flags)
                        .build()
                } else {
                    opcode::Write::new(TARGET, ptr, len).offset(at).rw_flags(flags).build()
                }
            }
            Transfer::Flush => {
                opcode::Fsync::new(TARGET).flags(types::FsyncFlags::DATASYNC).build()
            }
        };
        let entry = entry.user_data(slot as u64);
        // SAFETY: the buffer belongs to the job, which stays in its slot until this operation has
        // completed (`transferred`), even if the thread panics (`Flight::drop`). A read's buffer is
        // unique and not accessible elsewhere; a write's is frozen. Moving the job does not move
        // the buffer's bytes. The target is registered as long as the ring lives.
        unsafe { push(&mut self.ring, &entry) };
    }

    /// Handles the kernel's completion of the transfer in `slot`.
    fn transferred(&mut self, slot: usize, result: i32) {
        let moved = match u32::try_from(result) {
            Ok(moved) => Ok(moved as usize),
            Err(_) => Err(Errno::from_raw_os_error(-result)),
        };
        let job = self.flight.slots[slot].as_mut().expect("the ring names slots in flight only");
        match job.advance(moved, self.shared.core.geometry.logical_block_bytes) {
            None => self.transfer(slot),
            Some(result) => {
                let job = self.flight.slots[slot].take().expect("checked above");
                self.flight.free.push(slot);
                self.shared.core.finish(job, result);
            }
        }
    }
}

/// Creates a ring with the cheapest completion delivery that the kernel supports.
fn build(entries: u32) -> io::Result<IoUring> {
    // Completions are delivered when the thread asks for them, never by interrupting it. Linux 6.1.
    let deferred = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    match deferred {
        // Completions do not interrupt the thread, but are delivered whenever it enters the kernel.
        // Linux 5.19.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            match IoUring::builder().setup_coop_taskrun().build(entries) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
                other => other,
            }
        }
        other => other,
    }
}

/// Returns an error if the kernel lacks an operation that the engine uses.
fn require_operations(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
        opcode::PollAdd::CODE,
    ];
    match needed.iter().all(|code| probe.is_supported(*code)) {
        true => Ok(()),
        false => {
            Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old"))
        }
    }
}

/// Registers the pool's memory; false if it has none.
fn register_pool(ring: &IoUring, pool: &Pool) -> io::Result<bool> {
    let Some((base, len)) = pool.region() else { return Ok(false) };
    let buffer = libc::iovec { iov_base: base.cast(), iov_len: len };
    // SAFETY: the region is mapped, and stays so as long as the ring: the thread that owns both
    // drops the pool last.
    unsafe { ring.submitter().register_buffers(&[buffer]) }?;
    Ok(true)
}

/// Queues an entry.
///
/// # Safety
///
/// The memory that the entry points to must stay valid until the entry has completed.
unsafe fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the caller guarantees it.
    let pushed = unsafe { ring.submission().push(entry) };
    pushed.expect("the ring has an entry for each slot and for the poll");
}
