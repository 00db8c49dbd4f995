//! Comparison of an object store with a catalog: for tools, while no server runs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use object_store::ObjectStore;
use object_store::path::Path;

use super::list_objects;
use crate::catalog::ObjectInfo;
use crate::chain::ChainState;
use crate::naming::{object_id, object_prefix};
use crate::object_error::ObjectError;
use crate::types::ObjectId;

/// Differences between an object store and a catalog.
#[derive(Debug, Default)]
pub struct Survey {
    /// Number of objects that match the catalog.
    pub matching: usize,
    /// Objects that the catalog does not record, by name.
    pub orphans: Vec<Orphan>,
    /// Objects in the catalog that are missing or have another size.
    pub mismatches: Vec<Mismatch>,
}

/// An object that the catalog does not record.
#[derive(Debug)]
pub struct Orphan {
    /// Its path in the object store.
    pub name: String,
    /// Its length.
    pub size_bytes: u64,
    /// When it was written, by the object store's clock.
    pub written: SystemTime,
    /// Whether its number was assigned before the catalog's last commit of an object. If not, a
    /// later catalog than this one may record it.
    pub is_past: bool,
}

/// An object that differs from its entry in the catalog.
#[derive(Debug)]
pub struct Mismatch {
    /// Its entry in the catalog.
    pub object: ObjectInfo,
    /// Its length, if it exists.
    pub found_bytes: Option<u64>,
    /// Whether a stream has records in it. If not, it is about to be deleted, or was.
    pub is_needed: bool,
}

impl Survey {
    /// Drops differences that a later state of the catalog does not confirm: a server has changed
    /// the catalog meanwhile.
    pub fn confirm(&mut self, later: &ChainState) {
        let known = |name: &str| {
            let id = object_id(name);
            id.is_some_and(|id| later.objects.contains_key(&id))
        };
        self.orphans.retain(|orphan| !known(&orphan.name));
        self.mismatches.retain(|mismatch| known(&mismatch.object.name));
    }
}

/// Compares the objects of a store with its catalog.
///
/// # Errors
/// The object store cannot be listed.
pub async fn survey(store: &dyn ObjectStore, state: &ChainState) -> Result<Survey, ObjectError> {
    let id = state.header.store;
    let objects: Vec<_> = state.objects.values().map(|object| object.info(id)).collect();
    let mut known: BTreeMap<&str, &ObjectInfo> =
        objects.iter().map(|object| (object.name.as_str(), object)).collect();
    // Numbers below it were assigned before the last object that the catalog has, or by earlier
    // openings.
    let last = state.objects.last_key_value().map_or(0, |(id, _)| id.0 + 1);
    let past_end = last.max(u64::from(state.header.opening) << 32);
    let ranges = state.streams.values().flat_map(|stream| &stream.ranges);
    let needed: BTreeSet<ObjectId> = ranges.map(|range| range.object).collect();
    let mut survey = Survey::default();
    let mismatch = |object: &ObjectInfo, found_bytes| Mismatch {
        object: object.clone(),
        found_bytes,
        is_needed: needed.contains(&object.id),
    };
    let prefix = Path::from(object_prefix(id));
    for meta in list_objects(store, Some(&prefix)).await? {
        match known.remove(meta.location.as_ref()) {
            Some(object) if object.size_bytes == meta.size => survey.matching += 1,
            Some(object) => survey.mismatches.push(mismatch(object, Some(meta.size))),
            None => survey.orphans.push(Orphan {
                is_past: object_id(meta.location.as_ref()).is_some_and(|id| id.0 < past_end),
                name: meta.location.to_string(),
                size_bytes: meta.size,
                written: meta.last_modified.into(),
            }),
        }
    }
    survey.mismatches.extend(known.into_values().map(|object| mismatch(object, None)));
    survey.mismatches.sort_by_key(|mismatch| mismatch.object.id);
    Ok(survey)
}
