//! A modelled disk: a device whose requests take as long as those of a cloud disk, whatever it
//! really runs on.
//!
//! Cloud disks are sold by IOPS and bandwidth, and a write-ahead log reaches both limits; a
//! development machine has neither. The model applies them to any device, or to memory, so that a
//! log can be measured against a disk that is the same everywhere.
//!
//! # What it models
//!
//! - **Pieces.** A request is split every [`PIECE_BYTES`], 256 KiB. Each piece counts as one I/O,
//!   and pieces are served in parallel. Amazon EBS counts that way on its SSD volumes ("I/O
//!   characteristics and monitoring" in its user guide: an I/O of 1,024 KiB counts as four).
//! - **Quotas.** [`DiskModel::CLOUD`] has 3,000 IOPS and 125 MiB/s: the baseline of an EBS gp3
//!   volume and of an Azure Premium SSD v2 (125 MB/s there), and within 7% that of the smallest
//!   Alibaba Cloud ESSD PL1 (20 GiB: 2,800 IOPS and 130 MB/s, by the formulas of its
//!   documentation). A piece that would exceed a quota starts later, and later pieces wait behind
//!   it.
//! - **Burst.** None of these three has credits to burst above its baseline for seconds, and none
//!   documents how short an excess is tolerated. The model accumulates a tenth of a second of both
//!   quotas, 300 I/Os and 12.5 MiB, which is the default of QEMU's block throttling
//!   (`util/throttle.c`).
//! - **Latency.** 0.5 ms for each piece, plus its bytes at 220 MiB/s. This is fitted to a published
//!   measurement on a disk of this size (AutoMQ, "How to implement high-performance WAL based on
//!   raw devices?"): queue length divided by IOPS, requests of 44 to 251 KiB took 0.71 to 1.65 ms
//!   there, and the model is within 4% of each.
//!
//! # What it does not model
//!
//! There is no variation: a real disk has a tail of slow requests. Neighbouring small requests are
//! not merged (EBS merges them, to its users' advantage). Concurrent pieces do not slow each other
//! down, which favours large requests: in the same measurement four concurrent requests of 251 KiB
//! took 2.5 ms on average. There is no volatile cache: a flush takes no time of its own. Requests
//! are executed when they arrive and completed late, so readers see a write early.
//!
//! # How precise it is
//!
//! Completions run on one thread, in the order in which they are due. It sleeps until 50 us before
//! the next one and spins for the rest: at most 15% of a processor at 3,000 completions per second.
//! On a busy virtual machine of two processors, with real-time priority, 90% of completions were
//! late by less than 20 us, and 99% by less than 50 us. Without that priority it depends on the
//! scheduler; the disk is then slower than the model, never faster.

mod schedule;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::io;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

pub use schedule::{DiskModel, PIECE_BYTES, Usage};

use crate::buffer::Pool;
use crate::engine::{Core, Job, Transfer};
use crate::{
    AlignedBuf, Completion, Device, DeviceError, DeviceOffset, Geometry, OpenError, OpenOptions,
    PAGE_BYTES, Progress, Request, ReserveError, SharedDevice, copy_in_steps,
};
use schedule::Schedule;

/// The part of a wait that is spun instead of slept: about the delay of a wake-up.
const SPIN: Duration = Duration::from_micros(50);

/// A device with the speed of a [`DiskModel`], or of the device behind it if that is slower. See
/// the module documentation.
pub struct ModelledDisk {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Dropped last: its requests end before the thread does.
    inner: SharedDevice,
}

struct Shared {
    started: Instant,
    latch: OnceLock<DeviceError>,
    state: Mutex<State>,
    wake: Condvar,
}

struct State {
    schedule: Schedule,
    /// Executed requests, to be completed when they are due; earliest first, then in order of
    /// submission.
    due: BinaryHeap<Reverse<Due>>,
    submitted: u64,
    /// Number of requests submitted and not completed.
    outstanding: usize,
    closed: bool,
}

struct Due {
    /// Nanoseconds after the start, and a sequence number to break ties.
    at: (u64, u64),
    ticket: Ticket,
    result: Result<Option<AlignedBuf>, DeviceError>,
    done: Completion,
}

/// The count of one outstanding request. It is released whichever way the request ends, including a
/// panic in which the inner device refuses it.
struct Ticket {
    shared: Arc<Shared>,
    operation: &'static str,
    at: u64,
    len_bytes: u64,
}

impl ModelledDisk {
    /// Wraps `inner` with the speed of `model`. Panics if a number of `model` is out of its range.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn over(inner: SharedDevice, model: &DiskModel) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            started: Instant::now(),
            latch: OnceLock::new(),
            state: Mutex::new(State {
                schedule: Schedule::new(model),
                due: BinaryHeap::new(),
                submitted: 0,
                outstanding: 0,
                closed: false,
            }),
            wake: Condvar::new(),
        });
        let of_thread = shared.clone();
        let thread =
            thread::Builder::new().name("device-model".into()).spawn(move || of_thread.serve())?;
        Ok(Self { shared, thread: Some(thread), inner })
    }

    /// Creates a disk of `capacity_bytes` of memory, all of it allocated at once, with the speed of
    /// `model`. Like a cloud disk it has no volatile cache; its content is lost with the last
    /// handle. Panics unless the capacity is a positive multiple of [`PAGE_BYTES`], and as
    /// [`ModelledDisk::over`] does.
    ///
    /// # Errors
    /// The thread cannot be started, or the buffer pool cannot be mapped.
    pub fn in_memory(capacity_bytes: u64, model: &DiskModel) -> io::Result<Self> {
        Self::over(Arc::new(Memory::new(capacity_bytes)?), model)
    }

    /// The requests submitted to the disk so far.
    pub fn usage(&self) -> Usage {
        self.shared.state.lock().schedule.usage()
    }
}

impl Device for ModelledDisk {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn set_capacity(&self, bytes: u64, progress: Option<&Progress>) -> Result<(), OpenError> {
        self.inner.set_capacity(bytes, progress)
    }

    fn reserve(&self) -> Result<(), ReserveError> {
        self.inner.reserve()
    }

    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.inner.alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        let (operation, at, len) = match &request {
            Request::Read { at, buf } => ("read", *at, buf.len()),
            Request::Write { at, buf, .. } => ("write", *at, buf.len()),
            Request::Flush => ("flush", DeviceOffset(0), 0),
        };
        let mut state = self.shared.state.lock();
        let now = self.shared.now();
        let due = state.schedule.request(now, len as u64);
        let number = state.submitted;
        state.submitted += 1;
        state.outstanding += 1;
        drop(state);
        let ticket =
            Ticket { shared: self.shared.clone(), operation, at: at.0, len_bytes: len as u64 };
        let executed = move |result| {
            let shared = ticket.shared.clone();
            shared.complete_later(Due { at: (due, number), ticket, result, done });
        };
        match self.shared.latch.get() {
            Some(cause) if operation != "read" => executed(Err(cause.clone())),
            _ => self.inner.submit(request, Box::new(executed)),
        }
    }

    fn failure(&self) -> Option<DeviceError> {
        self.shared.latch.get().cloned().or_else(|| self.inner.failure())
    }
}

impl Shared {
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn complete_later(&self, due: Due) {
        let mut state = self.state.lock();
        let next = state.due.peek().is_none_or(|Reverse(first)| due < *first);
        state.due.push(Reverse(due));
        if next {
            self.wake.notify_one();
        }
    }

    /// The thread: completes requests when they are due, until the device is closed and nothing is
    /// outstanding.
    fn serve(&self) {
        // Makes the kernel wake this thread at the requested time, not up to 50 us later. Without
        // it the disk is slightly slower.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut state = self.state.lock();
        loop {
            let Some(Reverse(first)) = state.due.peek() else {
                if state.closed && state.outstanding == 0 {
                    return;
                }
                self.wake.wait(&mut state);
                continue;
            };
            let at = self.started + Duration::from_nanos(first.at.0);
            let left = at.saturating_duration_since(Instant::now());
            if left > SPIN {
                self.wake.wait_until(&mut state, at - SPIN);
                continue;
            }
            let Some(Reverse(due)) = state.due.pop() else { unreachable!("just peeked") };
            drop(state); // completions submit
            while Instant::now() < at {
                std::hint::spin_loop();
            }
            self.complete(due);
            state = self.state.lock();
        }
    }

    /// Completes a request. A panicking completion latches the device, and the thread continues for
    /// other requests.
    fn complete(&self, due: Due) {
        let Due { ticket, result, done, .. } = due;
        let result = match self.latch.get() {
            Some(cause) if ticket.operation != "read" => Err(cause.clone()),
            _ => result,
        };
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            self.latch.get_or_init(|| DeviceError {
                device: "modelled disk".into(),
                operation: ticket.operation,
                at: ticket.at,
                len_bytes: ticket.len_bytes,
                source: Arc::new(io::Error::other("the completion of the request panicked")),
            });
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.outstanding -= 1;
        if state.closed && state.outstanding == 0 {
            self.shared.wake.notify_one();
        }
    }
}

impl Drop for ModelledDisk {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take()
            // The last handle may be dropped inside a completion: the thread then ends by itself.
            && thread.thread().id() != thread::current().id()
        {
            thread
                .join()
                .expect("the thread catches panics of completions and has none of its own");
        }
    }
}

impl fmt::Debug for ModelledDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} (modelled)", self.inner)
    }
}

// Ordered by time only, for the heap.
impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

/// Memory as a device, with a thread that copies, so that a submitter spends no more time than with
/// a disk.
struct Memory {
    core: Arc<Core>,
    pool: Arc<Pool>,
    /// Taken only on drop, which ends the thread.
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Memory {
    fn new(capacity_bytes: u64) -> io::Result<Self> {
        assert!(
            capacity_bytes > 0 && capacity_bytes.is_multiple_of(PAGE_BYTES as u64),
            "a capacity of {capacity_bytes} bytes is not a positive multiple of a page"
        );
        let geometry = Geometry {
            name: "memory".into(),
            capacity_bytes,
            logical_block_bytes: PAGE_BYTES as u32,
            block_device: true,
            volatile_cache: false,
            flushes: false,
            read_only: false,
            engine: "memory",
        };
        let OpenOptions { buffer_bytes, buffers, max_spare_bytes, .. } = OpenOptions::default();
        let pool = Pool::new(buffer_bytes, buffers, max_spare_bytes)?;
        let core = Arc::new(Core::new(geometry, None));
        let mut bytes = AlignedBuf::zeroed(capacity_bytes as usize);
        let (jobs, queue) = mpsc::channel::<Job>();
        let of_thread = core.clone();
        let thread = thread::Builder::new().name("device-memory".into()).spawn(move || {
            for mut job in queue {
                match job.next() {
                    Transfer::Read { at, buf, .. } => {
                        let len = buf.len();
                        copy_in_steps(buf, &bytes[at as usize..][..len]);
                    }
                    Transfer::Write { at, buf, .. } => {
                        copy_in_steps(&mut bytes[at as usize..][..buf.len()], buf);
                    }
                    Transfer::Flush => {}
                }
                of_thread.finish(job, Ok(()));
            }
        })?;
        Ok(Self { core, pool, jobs: Some(jobs), thread: Some(thread) })
    }
}

impl Device for Memory {
    fn geometry(&self) -> &Geometry {
        &self.core.geometry
    }

    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        self.pool.alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        let job = self.core.accept(request, done);
        let jobs = self.jobs.as_ref().expect("taken by the drop alone");
        jobs.send(job).expect("the thread ends with the queue");
    }

    fn failure(&self) -> Option<DeviceError> {
        self.core.failure()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        drop(self.jobs.take());
        // Never on its own thread: completions there only hand over to the thread of the model.
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it catches panics of completions and has none of its own");
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.core.geometry.name)
    }
}
