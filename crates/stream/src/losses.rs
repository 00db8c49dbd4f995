//! Objects with lost records, as found by readers and object compaction.

mod classify;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::faults::{Faults, Reason};
use crate::report::{Gap, GapCause};
use crate::types::{ObjectId, StreamId};

/// Maximum number of streams listed for an object, and of gaps listed.
pub(crate) const LISTED: usize = 10;

/// Returns the owner's name for a stream.
type Names = Box<dyn Fn(StreamId) -> Option<String> + Send + Sync>;

/// Lost objects of one kind that are still in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LostObjects {
    /// The number of such objects.
    pub count: usize,
    /// Description of one of them: what is wrong with it, and which records it has.
    pub first: Option<String>,
}

#[derive(Default)]
pub(crate) struct Losses {
    /// The first gaps that recovery found.
    gaps: Vec<Gap>,
    found: Mutex<BTreeMap<ObjectId, Loss>>,
    /// At least one object in [`Self::found`] is missing and may come back.
    is_one_missing: AtomicBool,
    /// Whether [`Reason::ColdReadsFailing`] is reported.
    reads_fail: AtomicBool,
    /// Time of the last warning about failed reads.
    warned_at: Mutex<Option<Instant>>,
    names: OnceLock<Names>,
    /// The faults of the store.
    pub(crate) faults: Arc<Faults>,
}

struct Loss {
    is_missing: bool,
    text: String,
}

impl Losses {
    pub(crate) fn new(gaps: &[Gap]) -> Self {
        Self { gaps: gaps.iter().take(LISTED).cloned().collect(), ..Self::default() }
    }

    /// Describes the first gaps that recovery found.
    pub(crate) fn gaps(&self) -> String {
        let words = |gap: &Gap| {
            let Gap { stream, offsets, cause } = gap;
            let what = match cause {
                GapCause::Lost => "lost",
                GapCause::Skipped => "skipped",
            };
            let (start, last) = (offsets.start, offsets.end.0 - 1);
            format!("{what}: offsets {start} to {last} of {}", self.name(*stream))
        };
        self.gaps.iter().map(words).collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn name_streams(&self, names: Names) {
        // There is only one owner.
        let _ = self.names.set(names);
    }

    fn name(&self, stream: StreamId) -> String {
        let name = self.names.get().and_then(|names| names(stream));
        name.unwrap_or_else(|| format!("stream {stream}"))
    }

    /// Records that an object was read from the object store, not from a cache. If it was missing,
    /// it is back.
    pub(crate) fn was_read(&self, object: ObjectId) {
        self.reads_recovered();
        if !self.is_one_missing.load(Ordering::Relaxed) {
            return;
        }
        let mut found = self.found.lock();
        if found.get(&object).is_some_and(|loss| loss.is_missing) {
            found.remove(&object);
        }
        let is_one = found.values().any(|loss| loss.is_missing);
        self.is_one_missing.store(is_one, Ordering::Relaxed);
    }

    /// Records that the object store responds.
    pub(crate) fn reads_recovered(&self) {
        if self.reads_fail.load(Ordering::Relaxed) && self.reads_fail.swap(false, Ordering::Relaxed)
        {
            self.faults.report(Reason::ColdReadsFailing, None);
        }
    }
}
