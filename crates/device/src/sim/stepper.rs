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
    told: Arc<Told>,
    thread: Option<JoinHandle<()>>,
}

/// Flags for the thread, changed under the lock of the disk's state so that the thread does not
/// miss a change.
#[derive(Default)]
struct Told {
    hold: AtomicBool,
    stop: AtomicBool,
}

impl Stepper {
    /// Sets the disk to [`Mode::Queued`] and starts the thread.
    pub fn start(disk: SimDisk) -> Self {
        disk.set_mode(Mode::Queued);
        let told = Arc::new(Told::default());
        let thread = thread::spawn({
            let (disk, told) = (disk.clone(), told.clone());
            move || {
                while disk.wait_queued(&told) {
                    disk.step();
                }
            }
        });
        Self { disk, told, thread: Some(thread) }
    }

    /// While `hold` is set, queued requests are not executed. A request already being executed
    /// completes.
    pub fn hold(&self, hold: bool) {
        self.tell(&self.told.hold, hold);
    }

    fn tell(&self, what: &AtomicBool, value: bool) {
        let state = self.disk.0.medium.state.lock();
        what.store(value, Ordering::Release);
        drop(state);
        self.disk.0.medium.changed.notify_all();
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        self.tell(&self.told.stop, true);
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
    fn wait_queued(&self, told: &Told) -> bool {
        let mut state = self.0.medium.state.lock();
        loop {
            if told.stop.load(Ordering::Acquire) {
                return false;
            }
            if !state.queue.is_empty() && !told.hold.load(Ordering::Acquire) {
                return true;
            }
            self.0.medium.changed.wait(&mut state);
        }
    }
}
