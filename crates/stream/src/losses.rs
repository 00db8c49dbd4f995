//! Objects with lost records, as found by readers and object compaction.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::health::{Faults, Reason};
use crate::objects::{ErrorKind, OWNER_OBJECT, ObjectError, RequestClass, object_size};
use crate::recover::{Gap, GapCause};
use crate::store::Shared;
use crate::stream::FetchError;
use crate::tail::Range;
use crate::types::{ObjectId, StreamId, StreamOffset};
use crate::upload::{object_id, object_prefix};

/// Maximum number of streams listed for an object, and of gaps listed.
pub(crate) const LISTED: usize = 10;
/// Number of lost objects that are described by their streams and offsets, which takes a scan of
/// all ranges. For further ones only the name and the error are kept.
const DESCRIBED: usize = 20;
/// Clients repeat failed reads; a warning is logged at most this often.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

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

impl Shared {
    /// Returns the damaged and the missing objects.
    pub(crate) fn lost_objects(&self) -> [LostObjects; 2] {
        let mut found = self.losses.found.lock();
        {
            let table = self.object_table.lock();
            found.retain(|id, _| table.is_live(*id));
        }
        [false, true].map(|is_missing| {
            let mut losses = found.values().filter(|loss| loss.is_missing == is_missing);
            let first = losses.next().map(|loss| loss.text.clone());
            LostObjects { count: usize::from(first.is_some()) + losses.count(), first }
        })
    }

    /// Reports a failed read that may succeed later.
    fn note_failure(&self, error: &ObjectError) {
        let detail = format!(
            "records in objects cannot be read, and clients repeat their reads; the last error: \
             {error}"
        );
        self.faults.report(Reason::ColdReadsFailing, Some(detail));
        self.losses.reads_fail.store(true, Ordering::Relaxed);
        let now = Instant::now();
        let mut warned_at = self.losses.warned_at.lock();
        if warned_at.is_none_or(|at| now - at >= WARNING_INTERVAL) {
            *warned_at = Some(now);
            tracing::warn!("records in objects cannot be read: {error}");
        }
    }

    /// Classifies an error of reading an object in use, and reports it if the object's records are
    /// lost. An object counts as missing only if the object store has the owner object: a file
    /// system that is not mounted has none of the objects and comes back.
    pub(crate) async fn classified(&self, error: ObjectError) -> ObjectError {
        let error = match error {
            ObjectError::Store { name, reason, kind: ErrorKind::NotFound } => {
                let owner = format!("{}/{OWNER_OBJECT}", object_prefix(self.wal_id));
                let store = self.objects.store(RequestClass::CleanUp);
                match object_size(store, &owner.as_str().into()).await {
                    Ok(Some(_)) => ObjectError::Store { name, reason, kind: ErrorKind::NotFound },
                    Ok(None) => ObjectError::failed(
                        &name,
                        format!(
                            "it is missing, and so is {owner}: check that this is the right \
                             object store and that it is mounted"
                        ),
                    ),
                    Err(error) => error,
                }
            }
            error => error,
        };
        if error.is_loss() {
            self.note_loss(&error);
        }
        error
    }

    /// Classifies an error of a read for a client, which repeats the read if it may succeed later.
    pub(crate) async fn read_failed(&self, error: ObjectError) -> FetchError {
        let error = self.classified(error).await;
        if !error.is_loss() {
            self.note_failure(&error);
        }
        FetchError::Failed(error.into())
    }

    fn note_loss(&self, error: &ObjectError) {
        let (ObjectError::Damaged { name, .. } | ObjectError::Store { name, .. }) = error;
        let is_live = self.object_table.lock().is_live_name(name);
        let Some(id) = object_id(name).filter(|_| is_live) else { return };
        let known = {
            let found = self.losses.found.lock();
            if found.contains_key(&id) {
                return;
            }
            found.len()
        };
        let is_described = known < DESCRIBED;
        let text = if is_described {
            format!("{error}; it contains {}", self.content(id))
        } else {
            error.to_string()
        };
        let is_missing = error.is_not_found();
        if is_missing {
            self.losses.is_one_missing.store(true, Ordering::Relaxed);
        }
        if is_described {
            tracing::error!("records cannot be read: {text}");
        } else {
            tracing::error!(
                "records cannot be read: {text}; `alluvium object verify` lists its contents"
            );
        }
        self.losses.found.lock().insert(id, Loss { is_missing, text });
    }

    /// Describes what streams have in an object.
    fn content(&self, object: ObjectId) -> String {
        let streams: Vec<_> = self.streams.read().values().cloned().collect();
        let mut parts = Vec::new();
        for stream in streams {
            let tail = stream.tail.lock();
            let all = tail.ranges_after(StreamOffset(0));
            let of_object = all.filter(|range| range.object.id == object);
            let offsets = |range: &Range| (stream.id, range.start, range.end);
            parts.extend(of_object.map(offsets));
        }
        parts.sort_unstable();
        let named = parts.iter().take(LISTED).map(|(stream, start, end)| {
            format!(
                "offsets {start} to {} of {}",
                end.0.saturating_sub(1),
                self.losses.name(*stream)
            )
        });
        let mut text = named.collect::<Vec<_>>().join(", ");
        if parts.len() > LISTED {
            text = format!("{text}, and {} more", parts.len() - LISTED);
        }
        text
    }
}
