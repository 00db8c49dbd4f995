//! The queue between those who submit and the one I/O thread of an engine, which sleeps in the
//! kernel.
//!
//! Waking it is a system call. So the thread says when it goes to sleep and would take more, and
//! only the first who submits after that wakes it. Whether it is about to sleep and whether there
//! is something to do are decided under one lock, so no wake-up is lost; one that comes while the
//! thread is still on its way must keep it from sleeping, as an eventfd does.

use std::collections::VecDeque;

use crate::sync::Mutex;

pub(super) struct Inbox<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    jobs: VecDeque<T>,
    /// The thread sleeps, or is about to, has room for more in flight, and wants to be woken.
    asleep: bool,
    closed: bool,
}

/// What the thread has to do next.
pub(super) enum Next<T> {
    Take(T),
    /// Sleep until something has completed or it is woken.
    Sleep,
    End,
}

impl<T> Inbox<T> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State { jobs: VecDeque::new(), asleep: false, closed: false }) }
    }

    /// Put a job at the end. True if the thread has to be woken.
    #[must_use]
    pub(super) fn push(&self, job: T) -> bool {
        let mut state = self.state.lock();
        state.jobs.push_back(job);
        std::mem::take(&mut state.asleep)
    }

    /// Nothing comes any more. The thread has to be woken after this.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// For the thread, which has `free` of its `slots` left.
    pub(super) fn next(&self, free: usize, slots: usize) -> Next<T> {
        let mut state = self.state.lock();
        if state.jobs.is_empty() && state.closed && free == slots {
            return Next::End;
        }
        // Without room for more, the next completion wakes the thread early enough.
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

    /// For the thread: it has slept.
    pub(super) fn awake(&self) {
        self.state.lock().asleep = false;
    }
}
