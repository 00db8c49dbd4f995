//! Classification of failed reads, and the reports about them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::{LISTED, Loss, LostObjects};
use crate::error::FetchError;
use crate::faults::Reason;
use crate::naming::object_id;
use crate::object_error::{ErrorKind, ObjectError};
use crate::objects::object_size;
use crate::range::Range;
use crate::request_class::RequestClass;
use crate::types::{ObjectId, StreamOffset};
use crate::view::View;

/// Number of lost objects that are described by their streams and offsets, which takes a scan of
/// all ranges. For further ones only the name and the error are kept.
const DESCRIBED: usize = 20;
/// Clients repeat failed reads; a warning is logged at most this often.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

impl View {
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
    /// lost. An object counts as missing only if the object store has a fence of the chain: a
    /// file system that is not mounted has none of the objects and comes back.
    pub(crate) async fn classified(&self, error: ObjectError) -> ObjectError {
        let error = match error {
            ObjectError::Store { name, reason, kind: ErrorKind::NotFound } => {
                let fence = self.fence.as_str();
                let store = self.objects.store(RequestClass::CleanUp);
                match object_size(store, &fence.into()).await {
                    Ok(Some(_)) => ObjectError::Store { name, reason, kind: ErrorKind::NotFound },
                    Ok(None) => ObjectError::failed(
                        &name,
                        format!(
                            "it is missing, and so is {fence}: check that this is the right \
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
