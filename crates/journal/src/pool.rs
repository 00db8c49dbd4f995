//! The memory of journals: arenas that are reused, so that a write does not fault in pages.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::time::{Duration, Instant};

use alluvium_device::Arena;

use crate::sync::{Arc, Condvar, Mutex};

/// A bounded number of arenas of one size. Clones share them.
#[derive(Clone)]
pub(crate) struct Pool(Arc<Arenas>);

struct Arenas {
    arena_bytes: usize,
    max: usize,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    free: Vec<Arena>,
    /// Includes those in use.
    made: usize,
    /// What is given back now is for writers.
    is_for_writers: bool,
    /// The maximum number at any time.
    #[cfg(test)]
    most: usize,
    /// Behaves as on a system without memory.
    #[cfg(all(test, not(loom)))]
    is_refused: bool,
}

impl Pool {
    pub(crate) fn new(arena_bytes: usize, max: usize) -> Self {
        let (state, freed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Arenas { arena_bytes, max, state, freed }))
    }

    /// Returns the size of an arena.
    pub(crate) fn arena_bytes(&self) -> usize {
        self.0.arena_bytes
    }

    /// Returns a free arena, if the bound and the system permit one.
    pub(crate) fn take(&self) -> Option<Pooled> {
        self.take_within(Duration::ZERO).ok().flatten()
    }

    /// Returns a free arena, waiting for one to be given back.
    ///
    /// # Errors
    /// None was given back, and the system has no memory for another one.
    pub(crate) fn take_within(&self, wait: Duration) -> io::Result<Option<Pooled>> {
        self.wait(wait, false)
    }

    /// Returns a free arena for writers: what is given back meanwhile is not taken by other
    /// waiters. `release` makes a holder give one back.
    pub(crate) fn take_for_writers(
        &self,
        wait: Duration,
        release: impl FnOnce(),
    ) -> io::Result<Option<Pooled>> {
        self.0.state.lock().is_for_writers = true;
        release();
        let taken = self.wait(wait, true);
        self.0.state.lock().is_for_writers = false;
        self.0.freed.notify_all();
        taken
    }

    fn wait(&self, wait: Duration, for_writers: bool) -> io::Result<Option<Pooled>> {
        let until = Instant::now() + wait;
        let mut state = self.0.state.lock();
        loop {
            let mut refused = None;
            if for_writers || !state.is_for_writers {
                if let Some(mut arena) = state.free.pop() {
                    arena.reset();
                    return Ok(Some(self.pooled(arena)));
                }
                if state.made < self.0.max {
                    match self.make(&mut state) {
                        Ok(arena) => return Ok(Some(arena)),
                        // One that is given back will suffice.
                        Err(error) => refused = Some(error),
                    }
                }
            }
            if wait.is_zero() || self.0.freed.wait_until(&mut state, until).timed_out() {
                return refused.map_or(Ok(None), Err);
            }
        }
    }

    /// Returns a free arena, or one beyond the bound.
    pub(crate) fn take_or_create(&self) -> io::Result<Pooled> {
        self.take().map_or_else(|| self.take_over_budget(), Ok)
    }

    /// Creates a new arena, whatever the bound. For when readers hold what should be free: their
    /// values stay valid, and writers cannot wait for them.
    pub(crate) fn take_over_budget(&self) -> io::Result<Pooled> {
        self.make(&mut self.0.state.lock())
    }

    /// Creates an arena. Mapping takes microseconds; the pages are allocated later.
    fn make(&self, state: &mut State) -> io::Result<Pooled> {
        #[cfg(all(test, not(loom)))]
        if state.is_refused {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let arena = Arena::new(self.0.arena_bytes)?;
        state.made += 1;
        #[cfg(test)]
        {
            state.most = state.most.max(state.made);
        }
        Ok(self.pooled(arena))
    }

    /// Wraps an arena in which nothing is reserved.
    fn pooled(&self, arena: Arena) -> Pooled {
        Pooled { arena: Some(arena), pool: self.clone() }
    }

    fn give_back(&self, arena: Arena) {
        let mut state = self.0.state.lock();
        if state.made > self.0.max {
            state.made -= 1;
            drop(state);
            drop(arena);
        } else {
            state.free.push(arena);
            self.0.freed.notify_all();
        }
    }

    /// Returns by how many the arenas exceed the bound.
    pub(crate) fn excess(&self) -> usize {
        self.0.state.lock().made.saturating_sub(self.0.max)
    }

    /// Returns the maximum memory of all arenas at any time, in bytes.
    #[cfg(test)]
    pub(crate) fn most_bytes(&self) -> usize {
        self.0.state.lock().most * self.0.arena_bytes
    }

    /// Makes the creation of arenas fail while set.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn refuse(&self, is_refused: bool) {
        self.0.state.lock().is_refused = is_refused;
    }

    /// Returns how many arenas could be taken within the bound.
    pub(crate) fn unused(&self) -> usize {
        let state = self.0.state.lock();
        state.free.len() + self.0.max.saturating_sub(state.made)
    }

    /// Returns the memory of all arenas, in use or free, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.0.state.lock().made * self.0.arena_bytes
    }
}

/// An arena that returns to its pool with its last owner.
pub(crate) struct Pooled {
    /// `Some` until it is dropped.
    arena: Option<Arena>,
    pool: Pool,
}

impl Pooled {
    /// Returns the arena for filling it before it is shared.
    pub(crate) fn arena_mut(&mut self) -> &mut Arena {
        self.arena.as_mut().expect("there until it is dropped")
    }
}

impl Deref for Pooled {
    type Target = Arena;

    #[inline]
    fn deref(&self) -> &Arena {
        self.arena.as_ref().expect("there until it is dropped")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        self.pool.give_back(self.arena.take().expect("dropped once"));
    }
}

impl fmt::Debug for Pooled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
