//! How a thread behind the cache is told that there may be something to do, and that it is to end.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

/// One thread sleeps, any wake it.
#[derive(Default)]
pub(crate) struct Waker {
    thread: OnceLock<Thread>,
    is_woken: AtomicBool,
    is_closing: AtomicBool,
}

impl Waker {
    /// This thread is the one that is woken.
    pub(crate) fn is_here(&self) {
        let _ = self.thread.set(thread::current());
    }

    /// There may be something to do.
    pub(crate) fn wake(&self) {
        // Once until it looks: those who come in crowds leave the rest to the first one.
        if !self.is_woken.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// It is to end, in its own way.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// It begins to look what there is to do, whether to end among it: whoever comes from now on is
    /// not overlooked, and what those did who came until now is seen.
    pub(crate) fn look(&self) {
        self.is_woken.swap(false, Ordering::AcqRel);
    }

    /// Whether somebody has come since it began to look.
    pub(crate) fn is_woken(&self) -> bool {
        self.is_woken.load(Ordering::Acquire)
    }

    /// Until somebody comes, for `most` if that is given; not at all if somebody came since it
    /// began to look.
    pub(crate) fn sleep(&self, most: Option<Duration>) {
        match most {
            _ if self.is_woken() => {}
            Some(most) => thread::park_timeout(most),
            None => thread::park(),
        }
    }
}
