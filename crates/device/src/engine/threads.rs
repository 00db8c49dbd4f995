//! The thread engine: `pread`, `pwritev2` and `fdatasync` on a few threads, for kernels and
//! containers without io_uring.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::{Errno, ReadWriteFlags, pread, pwrite, pwritev2};

use super::{Core, Engine, Job, Transfer};
use crate::buffer::Pool;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Mutex};

/// A device served by threads, one request at a time on each.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    pool: Arc<Pool>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    core: Core,
    fd: OwnedFd,
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Threads {
    pub(crate) fn start(
        fd: OwnedFd,
        core: Core,
        pool: Arc<Pool>,
        io_depth: usize,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared { core, fd, queue: Mutex::default(), wake: Condvar::new() });
        let mut engine = Self { shared, pool, workers: Vec::with_capacity(io_depth) };
        for index in 0..io_depth {
            let shared = engine.shared.clone();
            let worker = thread::Builder::new()
                .name(format!("device-io-{index}"))
                .spawn(move || shared.serve())?;
            engine.workers.push(worker);
        }
        Ok(engine)
    }
}

impl Shared {
    /// Runs one worker: requests in order of submission, until the device is closed and the queue
    /// is empty.
    fn serve(&self) {
        loop {
            let mut queue = self.queue.lock();
            let job = loop {
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                if queue.closed {
                    return;
                }
                self.wake.wait(&mut queue);
            };
            drop(queue);
            self.run(job);
        }
    }

    fn run(&self, mut job: Job) {
        let result = match self.core.refusal(&job) {
            Some(refusal) => Err(refusal),
            None => loop {
                let moved = self.transfer(job.next());
                if let Some(result) = job.advance(moved, self.core.geometry.logical_block_bytes) {
                    break result;
                }
            },
        };
        self.core.finish(job, result);
    }

    fn transfer(&self, transfer: Transfer<'_>) -> Result<usize, Errno> {
        match transfer {
            Transfer::Read { at, buf, .. } => pread(&self.fd, buf, at),
            Transfer::Write { at, buf, dsync: false, .. } => pwrite(&self.fd, buf, at),
            Transfer::Write { at, buf, dsync: true, .. } => self.write_durable(at, buf),
            Transfer::Flush => rustix::fs::fdatasync(&self.fd).map(|()| 0),
        }
    }

    fn write_durable(&self, at: u64, buf: &[u8]) -> Result<usize, Errno> {
        // On a block device the flag costs two flushes, one that belongs to the write and one after
        // it (`blkdev_write_iter` in block/fops.c, for synchronous writes).
        if !self.core.geometry.block_device {
            match pwritev2(&self.fd, &[IoSlice::new(buf)], at, ReadWriteFlags::DSYNC) {
                // A sandbox's own kernel may support neither the call nor the flag.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
                other => return other,
            }
        }
        let written = pwrite(&self.fd, buf, at)?;
        rustix::fs::fdatasync(&self.fd).map(|()| written)
    }
}

impl Engine for Threads {
    fn core(&self) -> &Core {
        &self.shared.core
    }

    fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn push(&self, job: Job) {
        self.shared.queue.lock().jobs.push_back(job);
        self.shared.wake.notify_one();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // The last handle may be dropped inside a completion, on a worker: that worker ends by
            // itself.
            if worker.thread().id() != thread::current().id() {
                worker
                    .join()
                    .expect("a worker catches panics of completions and has none of its own");
            }
        }
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} threads)", self.shared.core.geometry.name, self.workers.len())
    }
}
