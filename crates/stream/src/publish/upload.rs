//! Uploads and object compactions in a delta.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::catalog::{ObjectInfo, ObjectRange, Replaced, Uploaded};
use crate::chain::{ChainChange, ChainObject};
use crate::object_table::Used;
use crate::range::Range;
use crate::shared::Shared;
use crate::tail::{Changed, StreamState, UploadedPart};
use crate::types::{ObjectId, StreamOffset};

/// A stream's part of an upload, ready to be published.
#[derive(Clone)]
pub(crate) struct UploadPart {
    pub(crate) stream: Arc<StreamState>,
    pub(crate) uploaded_end: StreamOffset,
    pub(crate) checkpoint: Option<Bytes>,
    /// The part's range in one of the upload's objects.
    pub(crate) range: Option<ObjectRange>,
}

/// A stream's part of an object compaction, ready to be published.
#[derive(Clone)]
pub(crate) struct Replacement {
    pub(crate) stream: Arc<StreamState>,
    /// The ranges to replace; they were neighbours when they were read.
    pub(crate) old: Vec<Range>,
    pub(crate) new: ObjectRange,
}

/// Objects to be committed, with the amount that streams have in them.
type NewObjects = BTreeMap<ObjectId, (Arc<ObjectInfo>, Used)>;

fn unused(objects: &[Arc<ObjectInfo>]) -> NewObjects {
    objects.iter().map(|object| (object.id, (object.clone(), Used::default()))).collect()
}

/// Counts a range in one of the objects, and returns it.
fn used_range(objects: &mut NewObjects, range: &ObjectRange) -> Range {
    let object = objects.get_mut(&range.object);
    let (object, used) = object.expect("a range lies in one of the objects");
    used.add(range.payload_bytes);
    Range::of(object.clone(), range)
}

/// Returns the changes that add the objects in which some stream has a range.
fn added(objects: &NewObjects) -> Vec<ChainChange> {
    let used = objects.values().filter(|(_, used)| used.streams > 0);
    used.map(|(object, _)| ChainChange::AddObject(ChainObject::of(object))).collect()
}

/// An upload that is frozen in a delta.
pub(super) struct PlannedUpload {
    objects: Vec<Arc<ObjectInfo>>,
    parts: Vec<(Arc<StreamState>, Uploaded)>,
}

impl PlannedUpload {
    /// Returns the changes of an upload, as of now.
    pub(super) fn new(
        objects: &[Arc<ObjectInfo>],
        parts: &[UploadPart],
    ) -> (Vec<ChainChange>, Self) {
        let mut live = unused(objects);
        let mut uploaded = Vec::with_capacity(parts.len());
        for UploadPart { stream, uploaded_end, checkpoint, range } in parts {
            let tail = stream.tail.lock();
            if tail.deleted {
                continue;
            }
            let start = match stream.is_state() {
                true => tail.start.max(*uploaded_end),
                false => tail.start,
            };
            drop(tail);
            let range = range.clone().filter(|range| range.end > start);
            if let Some(range) = &range {
                used_range(&mut live, range);
            }
            uploaded.push((
                stream.clone(),
                Uploaded {
                    stream: stream.id,
                    uploaded_end: *uploaded_end,
                    start,
                    checkpoint: checkpoint.clone(),
                    range,
                },
            ));
        }
        let mut changes = added(&live);
        changes.extend(uploaded.iter().map(|(_, part)| ChainChange::Uploaded(part.clone())));
        (changes, Self { objects: objects.to_vec(), parts: uploaded })
    }
}

/// An object compaction that is frozen in a delta.
pub(super) struct PlannedCompaction {
    objects: Vec<Arc<ObjectInfo>>,
    replaced: Vec<(Arc<StreamState>, Replaced)>,
}

impl PlannedCompaction {
    /// Returns the changes of a compaction, as of now.
    pub(super) fn new(
        objects: &[Arc<ObjectInfo>],
        replacements: &[Replacement],
    ) -> (Vec<ChainChange>, Self) {
        let mut live = unused(objects);
        let mut replaced = Vec::with_capacity(replacements.len());
        for Replacement { stream, old, new } in replacements {
            let old: Vec<_> = {
                let tail = stream.tail.lock();
                let is_there = |range: &&Range| {
                    let found = tail.range_at(range.start);
                    found.is_some_and(|found| found.object.id == range.object.id)
                };
                // What is missing was trimmed, unless a compaction whose caller was dropped has
                // replaced it meanwhile.
                let is_replaced =
                    old.iter().any(|range| range.end > tail.start && !is_there(&range));
                if tail.deleted || new.end <= tail.start || is_replaced {
                    continue;
                }
                old.iter().filter(is_there).map(|range| range.start).collect()
            };
            used_range(&mut live, new);
            let change = Replaced { stream: stream.id, old, new: new.clone() };
            replaced.push((stream.clone(), change));
        }
        let mut changes = added(&live);
        changes.extend(replaced.iter().map(|(_, change)| ChainChange::Replaced(change.clone())));
        (changes, Self { objects: objects.to_vec(), replaced })
    }
}

impl Shared {
    /// Applies an upload that is in the chain.
    pub(super) fn apply_upload(&self, PlannedUpload { objects, parts }: PlannedUpload) {
        let mut live = unused(&objects);
        let mut applied = Vec::with_capacity(parts.len());
        for (stream, part) in parts {
            let start = {
                let tail = stream.tail.lock();
                if tail.deleted {
                    continue;
                }
                tail.start.max(part.start)
            };
            let range = part.range.filter(|range| range.end > start);
            let range = range.map(|range| used_range(&mut live, &range));
            let Uploaded { uploaded_end, checkpoint, .. } = part;
            applied.push((stream, UploadedPart { uploaded_end, start, checkpoint, range }));
        }
        let used_bytes = used_bytes(&live);
        self.numbers.uploaded_bytes.fetch_add(used_bytes, Ordering::Relaxed);
        self.insert_objects(live);
        self.numbers.uploads.fetch_add(1, Ordering::Relaxed);
        let mut changed = Vec::with_capacity(applied.len());
        for (stream, part) in applied {
            if let Some(range) = &part.range {
                stream.moved.copied(range.payload_bytes);
                changed.push((stream.id, Changed::at(range)));
            }
            let released = stream.tail.lock().uploaded(part);
            self.cache.release(released);
            self.cache.offer(&stream);
        }
        self.cache.evict_to_bound();
        self.compaction.changed(changed);
    }

    /// Applies an object compaction that is in the chain.
    pub(super) fn apply_compaction(
        &self,
        PlannedCompaction { objects, replaced }: PlannedCompaction,
    ) {
        let mut live = unused(&objects);
        let mut applied = Vec::with_capacity(replaced.len());
        for (stream, Replaced { old, new, .. }) in replaced {
            let (first, count, is_live) = {
                let tail = stream.tail.lock();
                let mut left = old.into_iter().filter(|start| tail.range_at(*start).is_some());
                let Some(first) = left.next() else { continue };
                (first, 1 + left.count(), new.end > tail.start)
            };
            let range = is_live.then(|| used_range(&mut live, &new));
            applied.push((stream, first, count, range));
        }
        self.numbers.compactions.fetch_add(1, Ordering::Relaxed);
        self.numbers.compacted_bytes.fetch_add(used_bytes(&live), Ordering::Relaxed);
        self.insert_objects(live);
        let mut changed = Vec::with_capacity(applied.len());
        for (stream, first, count, range) in applied {
            changed.extend(range.as_ref().map(|range| (stream.id, Changed::at(range))));
            let gone = stream.tail.lock().replace(first, count, range);
            self.drop_ranges(&gone);
        }
        self.compaction.changed(changed);
    }

    /// Adds objects to the table; those without ranges are retired.
    fn insert_objects(&self, objects: NewObjects) {
        let mut table = self.object_table.lock();
        for (object, used) in objects.into_values() {
            table.uploading.remove(&object.name);
            table.insert(object, used);
        }
        self.retired.notify_one(); // one may be retired
    }
}

/// Returns the size of the objects in which some stream has a range.
fn used_bytes(objects: &NewObjects) -> u64 {
    let used = objects.values().filter(|(_, used)| used.streams > 0);
    used.map(|(object, _)| object.size_bytes).sum()
}
