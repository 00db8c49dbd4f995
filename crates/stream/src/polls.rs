//! Reads of the chain by a store that follows it: requests for one, and the results.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::clock::unix_ms;
use crate::error::StoreError;

/// What a store that follows the chain has of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Following {
    /// The number of the last object of the chain that is applied.
    pub number: u64,
    /// Its version of the catalog.
    pub version: u64,
    /// The term that holds after it.
    pub term: u32,
    /// When it was written, by the clock of its writer: Unix time in milliseconds.
    pub written_at_ms: u64,
    /// The time since it was written, by the clock of this machine; 0 if that is behind the
    /// writer's. It grows while the writer has nothing to write.
    pub age: Duration,
    /// The time since the chain was last read up to its end.
    pub current: Duration,
    /// Reads of the chain since the store was opened.
    pub polls: u64,
    /// Those that failed.
    pub failures: u64,
    /// Times that the catalog was loaded again from a snapshot.
    pub reloads: u64,
}

/// The object of the chain that is applied.
#[derive(Clone, Copy, Default)]
pub(crate) struct Applied {
    pub(crate) number: u64,
    pub(crate) version: u64,
    pub(crate) term: u32,
    pub(crate) written_at_ms: u64,
}

struct State {
    applied: Applied,
    /// When the chain was last read up to its end.
    current_at: Instant,
    polls: u64,
    failures: u64,
    reloads: u64,
}

/// Reads of the chain, of which there is one at a time.
pub(crate) struct Polls {
    state: Mutex<State>,
    /// Notified when a read is wanted before it is due.
    wanted: Notify,
    /// The number of reads that have begun, and those that have ended, with the error of the last.
    done: watch::Sender<Done>,
    /// The version of the catalog that is applied.
    version: watch::Sender<u64>,
    /// How often metadata was changed.
    meta_changes: AtomicU64,
    /// The term that is applied; read often.
    term: AtomicU32,
}

#[derive(Clone, Default)]
struct Done {
    begun: u64,
    ended: u64,
    error: Option<StoreError>,
}

impl Polls {
    pub(crate) fn new() -> Self {
        let state = State {
            applied: Applied::default(),
            current_at: Instant::now(),
            polls: 0,
            failures: 0,
            reloads: 0,
        };
        Self {
            state: Mutex::new(state),
            wanted: Notify::new(),
            done: watch::Sender::default(),
            version: watch::Sender::new(0),
            meta_changes: AtomicU64::new(0),
            term: AtomicU32::new(0),
        }
    }

    /// Waits for a read that begins after this call.
    ///
    /// # Errors
    /// It has failed.
    pub(crate) async fn wait_for_new(&self) -> Result<(), StoreError> {
        let mut done = self.done.subscribe();
        let needed = done.borrow_and_update().begun.saturating_add(1);
        self.wanted.notify_one();
        let done = done.wait_for(|done| done.ended >= needed).await;
        let done = done.expect("the sender is borrowed from self");
        done.error.clone().map_or(Ok(()), Err)
    }

    /// Resolves when a read is wanted.
    pub(crate) async fn wanted(&self) {
        self.wanted.notified().await;
    }

    pub(crate) fn begin(&self) {
        self.done.send_modify(|done| done.begun += 1);
        self.state.lock().polls += 1;
    }

    /// Ends a read, with its result.
    pub(crate) fn end(&self, result: Result<(), StoreError>) {
        {
            let mut state = self.state.lock();
            match &result {
                Ok(()) => state.current_at = Instant::now(),
                Err(_) => state.failures += 1,
            }
        }
        self.done.send_modify(|done| {
            done.ended = done.begun;
            done.error = result.err();
        });
    }

    /// Ends the waits for a read, those of now and later ones: there are no more.
    pub(crate) fn close(&self, cause: &StoreError) {
        self.done.send_modify(|done| {
            done.ended = u64::MAX;
            done.error = Some(cause.clone());
        });
    }

    /// Notes what is applied now.
    pub(crate) fn applied(&self, applied: Applied, is_reload: bool) {
        {
            let mut state = self.state.lock();
            state.applied = applied;
            state.reloads += u64::from(is_reload);
        }
        self.term.store(applied.term, Ordering::Release);
        self.version.send_replace(applied.version);
    }

    pub(crate) fn last_applied(&self) -> Applied {
        self.state.lock().applied
    }

    pub(crate) fn meta_changed(&self) {
        self.meta_changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn meta_changes(&self) -> u64 {
        self.meta_changes.load(Ordering::Acquire)
    }

    pub(crate) fn term(&self) -> u32 {
        self.term.load(Ordering::Acquire)
    }

    /// Returns the version that is applied, and later ones.
    pub(crate) fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(crate) fn following(&self) -> Following {
        let state = self.state.lock();
        let Applied { number, version, term, written_at_ms } = state.applied;
        let age_ms = unix_ms().cast_unsigned().saturating_sub(written_at_ms);
        Following {
            number,
            version,
            term,
            written_at_ms,
            age: Duration::from_millis(age_ms),
            current: state.current_at.elapsed(),
            polls: state.polls,
            failures: state.failures,
            reloads: state.reloads,
        }
    }
}
