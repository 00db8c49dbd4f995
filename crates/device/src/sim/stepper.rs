//! A thread that executes a simulated disk's requests, for tests that do not step it themselves.

use std::sync::Arc;

use super::{Mode, SimDisk};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};

/// Executes the requests of a disk as soon as they are queued, on its own thread and in the order
/// of [`SimDisk::step`]. On drop it executes the remaining requests and sets the disk to
/// [`Mode::Immediate`] again.
pub struct Stepper {
    disk: SimDisk,
    flags: Arc<Flags>,
    thread: Option<JoinHandle<()>>,
}

/// Flags for the thread, changed under the lock of the disk's state so that the thread does not
/// miss a change.
#[derive(Default)]
struct Flags {
    hold: AtomicBool,
    stop: AtomicBool,
}

impl Stepper {
    /// Sets the disk to [`Mode::Queued`] and starts the thread.
    pub fn start(disk: SimDisk) -> Self {
        disk.set_mode(Mode::Queued);
        let flags = Arc::new(Flags::default());
        let thread = thread::spawn({
            let (disk, flags) = (disk.clone(), flags.clone());
            move || {
                while disk.wait_queued(&flags) {
                    disk.step();
                }
            }
        });
        Self { disk, flags, thread: Some(thread) }
    }

    /// While `hold` is set, queued requests are not executed. A request already being executed
    /// completes.
    pub fn hold(&self, hold: bool) {
        self.set(&self.flags.hold, hold);
    }

    fn set(&self, what: &AtomicBool, value: bool) {
        let state = self.disk.0.medium.state.lock();
        what.store(value, Ordering::Release);
        drop(state);
        self.disk.0.medium.changed.notify_all();
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        self.set(&self.flags.stop, true);
        let stopped = self.thread.take().map(JoinHandle::join);
        // A panic of a completion has been reported on its thread; do not hide it from a test that
        // continues.
        if !thread::panicking() {
            assert!(matches!(stopped, Some(Ok(()))), "the thread of a simulated disk has panicked");
        }
        self.disk.set_mode(Mode::Immediate);
    }
}

impl SimDisk {
    /// Blocks until a request can be executed; false if the thread has to end.
    fn wait_queued(&self, flags: &Flags) -> bool {
        let mut state = self.0.medium.state.lock();
        loop {
            if flags.stop.load(Ordering::Acquire) {
                return false;
            }
            if !state.queue.is_empty() && !flags.hold.load(Ordering::Acquire) {
                return true;
            }
            self.0.medium.changed.wait(&mut state);
        }
    }
}
