//! The memory of journals: arenas that are used again, so that a write finds its pages there.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::time::{Duration, Instant};

use alluvium_device::Arena;

use crate::sync::{Arc, Condvar, Mutex};

/// Arenas of one size, up to a number. Clones share them.
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
    /// Those that are in use too.
    made: usize,
    /// What is given back now is for writers.
    is_for_writers: bool,
    /// As many as there were at one time.
    #[cfg(test)]
    most: usize,
    /// As on a system without memory.
    #[cfg(all(test, not(loom)))]
    is_refused: bool,
}

impl Pool {
    pub(crate) fn new(arena_bytes: usize, max: usize) -> Self {
        let (state, freed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Arenas { arena_bytes, max, state, freed }))
    }

    /// The size of each.
    pub(crate) fn arena_bytes(&self) -> usize {
        self.0.arena_bytes
    }

    /// A free arena, if the bound and the system allow one.
    pub(crate) fn take(&self) -> Option<Pooled> {
        self.take_within(Duration::ZERO).ok().flatten()
    }

    /// The same, waiting for one that is given back.
    ///
    /// # Errors
    /// None was, and the system has no memory for another one.
    pub(crate) fn take_within(&self, wait: Duration) -> io::Result<Option<Pooled>> {
        self.wait(wait, false)
    }

    /// The same for writers: whoever else waits leaves them what is given back meanwhile, which
    /// `let_go` has somebody do.
    pub(crate) fn take_for_writers(
        &self,
        wait: Duration,
        let_go: impl FnOnce(),
    ) -> io::Result<Option<Pooled>> {
        self.0.state.lock().is_for_writers = true;
        let_go();
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
                        // One that is given back will do.
                        Err(error) => refused = Some(error),
                    }
                }
            }
            if wait.is_zero() || self.0.freed.wait_until(&mut state, until).timed_out() {
                return refused.map_or(Ok(None), Err);
            }
        }
    }

    /// A free arena, or one beyond the bound.
    pub(crate) fn take_anyway(&self) -> io::Result<Pooled> {
        self.take().map_or_else(|| self.take_beyond(), Ok)
    }

    /// A new arena, whatever the bound is. For when readers hold what should be free: their values
    /// are theirs, and writers cannot wait for them.
    pub(crate) fn take_beyond(&self) -> io::Result<Pooled> {
        self.make(&mut self.0.state.lock())
    }

    /// Mapping memory takes microseconds; its pages come later.
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

    /// One that nobody has taken anything of.
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

    /// How many there are more than the bound allows.
    pub(crate) fn beyond(&self) -> usize {
        self.0.state.lock().made.saturating_sub(self.0.max)
    }

    /// Memory of all arenas that there were at one time, in bytes.
    #[cfg(test)]
    pub(crate) fn most_bytes(&self) -> usize {
        self.0.state.lock().most * self.0.arena_bytes
    }

    /// No other arena can be made as long as this is so.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn refuse(&self, is_refused: bool) {
        self.0.state.lock().is_refused = is_refused;
    }

    /// Arenas that could be taken within the bound.
    pub(crate) fn unused(&self) -> usize {
        let state = self.0.state.lock();
        state.free.len() + self.0.max.saturating_sub(state.made)
    }

    /// Memory of all arenas, in bytes: those in use and those that are kept for use.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.0.state.lock().made * self.0.arena_bytes
    }
}

/// An arena that goes back to its pool with its last owner.
pub(crate) struct Pooled {
    /// `Some` until it is dropped.
    arena: Option<Arena>,
    pool: Pool,
}

impl Pooled {
    /// For whoever fills it before he shares it.
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
