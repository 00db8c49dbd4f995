//! A thread that is the disk, for tests that have something else to do.

use std::sync::Arc;

use super::{Mode, SimDisk};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};

/// Executes what is queued on a disk as soon as it is queued, on a thread of its own and in the
/// order that [`SimDisk::step`] chooses. When it is dropped it executes what is left, and the disk
/// is in [`Mode::Immediate`] again.
pub struct Stepper {
    disk: SimDisk,
    told: Arc<Told>,
    thread: Option<JoinHandle<()>>,
}

/// Changed under the lock of the disk's state, so that the thread does not miss it.
#[derive(Default)]
struct Told {
    hold: AtomicBool,
    stop: AtomicBool,
}

impl Stepper {
    /// Puts the disk into [`Mode::Queued`].
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

    /// Leave what is queued where it is, until told otherwise. What is being executed comes to its
    /// end.
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
        // A completion that panics has said so on its thread; do not hide it from a test that goes
        // on.
        if !thread::panicking() {
            assert!(matches!(stopped, Some(Ok(()))), "the thread of a simulated disk has panicked");
        }
        self.disk.set_mode(Mode::Immediate);
    }
}

impl SimDisk {
    /// Block until there is something to execute; false when there is to be an end.
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
