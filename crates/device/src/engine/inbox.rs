//! The queue between submitters and the I/O thread of an engine, which sleeps in the kernel.
//!
//! Waking the thread is a system call. Therefore the thread marks when it goes to sleep with
//! capacity for more requests, and only the first submitter after that wakes it. The decision to
//! sleep and the check for jobs happen under one lock, so no wake-up is lost. A wake-up that
//! arrives before the thread sleeps must keep it from sleeping, as an eventfd does.

use std::collections::VecDeque;

use crate::sync::Mutex;

pub(super) struct Inbox<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    jobs: VecDeque<T>,
    /// The thread sleeps or is about to, can take more requests, and needs a wake-up.
    asleep: bool,
    closed: bool,
}

/// The thread's next step.
pub(super) enum Next<T> {
    Take(T),
    /// Sleep until a completion or a wake-up.
    Sleep,
    End,
}

impl<T> Inbox<T> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State { jobs: VecDeque::new(), asleep: false, closed: false }) }
    }

    /// Appends a job. Returns true if the thread has to be woken.
    #[must_use]
    pub(super) fn push(&self, job: T) -> bool {
        let mut state = self.state.lock();
        state.jobs.push_back(job);
        std::mem::take(&mut state.asleep)
    }

    /// Closes the queue to further jobs. The caller then wakes the thread.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Returns the next step of the thread, which has `free` of its `slots` left.
    pub(super) fn next(&self, free: usize, slots: usize) -> Next<T> {
        let mut state = self.state.lock();
        if state.jobs.is_empty() && state.closed && free == slots {
            return Next::End;
        }
        // With no slot free, the next completion wakes the thread early enough.
        if free == 0 {
            return Next::Sleep;
        }
        match state.jobs.pop_front() {
            Some(job) => Next::Take(job),
            None => {
                state.asleep = true;
                Next::Sleep
            }
        }
    }

    /// Called by the thread after it has slept.
    pub(super) fn awake(&self) {
        self.state.lock().asleep = false;
    }
}
