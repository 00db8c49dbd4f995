//! Wakes a background thread when there may be work, and ends it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

/// One thread sleeps; any thread may wake it.
#[derive(Default)]
pub(crate) struct Waker {
    thread: OnceLock<Thread>,
    is_woken: AtomicBool,
    is_closing: AtomicBool,
}

impl Waker {
    /// Registers the calling thread as the one to wake.
    pub(crate) fn register(&self) {
        let _ = self.thread.set(thread::current());
    }

    /// Wakes the thread: there may be work.
    pub(crate) fn wake(&self) {
        // Once until it checks: of many concurrent callers only the first wakes it.
        if !self.is_woken.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Asks the thread to end.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Begins a check for work and for the end. A wake-up from now on is not missed, and the
    /// effects of earlier callers are visible.
    pub(crate) fn begin_check(&self) {
        self.is_woken.swap(false, Ordering::AcqRel);
    }

    /// Returns whether it was woken since the check began.
    pub(crate) fn is_woken(&self) -> bool {
        self.is_woken.load(Ordering::Acquire)
    }

    /// Sleeps until it is woken, or for `most` if given; not at all if it was woken since the check
    /// began.
    pub(crate) fn sleep(&self, most: Option<Duration>) {
        match most {
            _ if self.is_woken() => {}
            Some(most) => thread::park_timeout(most),
            None => thread::park(),
        }
    }
}
