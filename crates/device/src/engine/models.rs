//! Model-checked tests of the engines' threads, in every order of their steps: `cargo xtask loom`.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use loom::thread;
use rustix::io::Errno;

use super::inbox::{Inbox, Next};
use super::threads::Threads;
use super::{Core, Job};
use crate::buffer::Pool;
use crate::sim::{SimDisk, SimOptions, Stepper};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};
use crate::{
    AlignedBuf, Completion, Device, DeviceError, DeviceOffset, Geometry, PAGE_BYTES, Request,
};

fn core() -> Core {
    let geometry = Geometry {
        name: "modelled".into(),
        capacity_bytes: 16 * PAGE_BYTES as u64,
        logical_block_bytes: 512,
        block_device: false,
        volatile_cache: false,
        flushes: false,
        read_only: false,
        engine: "threads",
    };
    Core::new(geometry, None)
}

fn write(page: u64) -> Request {
    let buf = AlignedBuf::zeroed(PAGE_BYTES).freeze();
    Request::Write { at: DeviceOffset(page * PAGE_BYTES as u64), buf, durable: false }
}

/// Collects the results of completions, and waits for them.
#[derive(Default)]
struct Reported {
    results: Mutex<Vec<Result<(), DeviceError>>>,
    more: Condvar,
}

impl Reported {
    fn completion(self: &Arc<Self>) -> Completion {
        let reported = self.clone();
        Box::new(move |result| {
            reported.results.lock().push(result.map(drop));
            reported.more.notify_all();
        })
    }

    fn wait_for(&self, count: usize) -> Vec<Result<(), DeviceError>> {
        let mut results = self.results.lock();
        while results.len() < count {
            self.more.wait(&mut results);
        }
        results.clone()
    }
}

// -- The inbox of the io_uring engine

/// An engine whose kernel has completed everything by the time it is waited for.
struct Engine {
    inbox: Inbox<u32>,
    /// The eventfd that the ring polls: it stays readable until it is read.
    rung: Mutex<bool>,
    ring: Condvar,
    served: Mutex<Vec<u32>>,
    more: Condvar,
}

impl Engine {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inbox: Inbox::new(),
            rung: Mutex::new(false),
            ring: Condvar::new(),
            served: Mutex::default(),
            more: Condvar::new(),
        })
    }

    fn submit(&self, job: u32) {
        if self.inbox.push(job) {
            self.wake();
        }
    }

    fn wake(&self) {
        *self.rung.lock() = true;
        self.ring.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock();
        while !*rung {
            self.ring.wait(&mut rung);
        }
        *rung = false;
    }

    /// The engine's thread.
    fn serve(&self, slots: usize) {
        let mut in_flight = Vec::new();
        loop {
            match self.inbox.next(slots - in_flight.len(), slots) {
                Next::Take(job) => in_flight.push(job),
                Next::End => return,
                Next::Sleep => {
                    match in_flight.is_empty() {
                        true => self.wait(),
                        false => {
                            self.served.lock().append(&mut in_flight);
                            self.more.notify_one();
                        }
                    }
                    self.inbox.awake();
                }
            }
        }
    }

    /// Waits before closing: closing would wake the thread, and every submitted job has to be
    /// served without that.
    fn close_when_served(&self, jobs: usize) {
        let mut served = self.served.lock();
        while served.len() < jobs {
            self.more.wait(&mut served);
        }
        drop(served);
        self.close();
    }

    fn close(&self) {
        self.inbox.close();
        self.wake();
    }
}

#[test]
fn all_jobs_are_served_and_the_thread_ends() {
    loom::model(|| {
        let engine = Engine::new();
        let submitter = {
            let engine = engine.clone();
            thread::spawn(move || engine.submit(1))
        };
        let thread = {
            let engine = engine.clone();
            thread::spawn(move || engine.serve(1))
        };
        engine.submit(2);
        engine.close_when_served(2);
        submitter.join().unwrap();
        thread.join().unwrap();
        let mut served = engine.served.lock().clone();
        served.sort_unstable();
        assert_eq!(served, [1, 2]);
    });
}

#[test]
fn closing_waits_for_submitted_jobs() {
    loom::model(|| {
        let engine = Engine::new();
        let thread = {
            let engine = engine.clone();
            thread::spawn(move || engine.serve(2))
        };
        engine.submit(1);
        engine.submit(2);
        engine.close();
        thread.join().unwrap();
        assert_eq!(*engine.served.lock(), [1, 2]);
    });
}

// -- The thread engine

/// An in-memory file, large enough for the pages that the models write.
fn file(writable: bool) -> OwnedFd {
    let file = rustix::fs::memfd_create("models", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 16 * PAGE_BYTES as u64).unwrap();
    match writable {
        true => file,
        false => File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().into(),
    }
}

fn threads(fd: OwnedFd, workers: usize) -> Threads {
    Threads::start(fd, core(), Pool::new(PAGE_BYTES, 0, 0).unwrap(), workers).unwrap()
}

#[test]
fn the_thread_engine_completes_all_and_drops_when_it_is_idle() {
    loom::model(|| {
        let (engine, reported) = (Arc::new(threads(file(true), 2)), Arc::new(Reported::default()));
        let submitter = {
            let (engine, reported) = (engine.clone(), reported.clone());
            thread::spawn(move || engine.submit(write(1), reported.completion()))
        };
        engine.submit(write(2), reported.completion());
        submitter.join().unwrap();
        drop(engine); // joins the workers
        assert_eq!(reported.results.lock().iter().filter(|result| result.is_ok()).count(), 2);
    });
}

#[test]
fn all_failures_report_the_first_cause_and_no_write_follows_it() {
    loom::model(|| {
        let (engine, reported) = (threads(file(false), 2), Arc::new(Reported::default()));
        engine.submit(write(1), reported.completion());
        engine.submit(write(2), reported.completion());
        let first = reported.wait_for(1).remove(0).expect_err("the file is open for reading only");
        assert_eq!(engine.failure().unwrap().at, first.at);
        engine.submit(write(3), reported.completion());
        for result in reported.wait_for(3) {
            assert_eq!(result.unwrap_err().at, first.at);
        }
    });
}

/// An engine finishes a successful write while another one fails on the next thread.
#[test]
fn a_request_submitted_after_a_visible_failure_is_refused() {
    loom::model(|| {
        let (core, reported) = (Arc::new(core()), Arc::new(Reported::default()));
        let failing = core.accept(write(1), reported.completion());
        let thread = {
            let core = core.clone();
            thread::spawn(move || core.finish(failing, Err(Errno::IO.into())))
        };
        let other: Job = core.accept(write(2), Box::new(|_| ()));
        core.finish(other, Ok(()));
        let first = reported.wait_for(1).remove(0).unwrap_err();
        let late = core.accept(write(3), reported.completion());
        assert!(core.refusal(&late).is_some());
        core.finish(late, Ok(()));
        assert_eq!(reported.wait_for(2)[1].as_ref().unwrap_err().at, first.at);
        thread.join().unwrap();
    });
}

// -- The pool

#[test]
fn a_slot_has_one_owner_and_returns_to_the_pool() {
    loom::model(|| {
        let (pool, users) = (Pool::new(PAGE_BYTES, 1, 0).unwrap(), Arc::new(AtomicUsize::new(0)));
        let use_one = |pool: &Arc<Pool>, users: &AtomicUsize| {
            let buf = pool.alloc(PAGE_BYTES);
            if buf.registered() {
                assert_eq!(users.fetch_add(1, Ordering::Relaxed), 0);
                users.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = {
            let (pool, users) = (pool.clone(), users.clone());
            thread::spawn(move || use_one(&pool, &users))
        };
        use_one(&pool, &users);
        thread.join().unwrap();
        assert!(pool.alloc(PAGE_BYTES).registered());
    });
}

// -- The thread that is a simulated disk

#[test]
fn a_stepper_executes_requests_unless_held_and_stops() {
    loom::model(|| {
        let (disk, reported) = (SimDisk::new(SimOptions::default()), Arc::new(Reported::default()));
        let stepper = Stepper::start(disk.clone());
        stepper.hold(true);
        disk.submit(write(1), reported.completion());
        assert!(reported.results.lock().is_empty());
        stepper.hold(false);
        assert!(reported.wait_for(1)[0].is_ok());
        disk.submit(write(2), reported.completion());
        drop(stepper);
        assert!(reported.results.lock()[1].is_ok());
    });
}
