//! Holding what an object store has against a catalog: for tools, while no server runs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use object_store::ObjectStore;
use object_store::path::Path;

use super::{ObjectError, list_objects};
use crate::catalog::{ObjectInfo, Snapshot};
use crate::types::ObjectId;
use crate::upload::{object_id, object_prefix};

/// Where an object store and a catalog differ.
#[derive(Debug, Default)]
pub struct Survey {
    /// Objects that are there as the catalog says.
    pub right: usize,
    /// Objects that the catalog does not know, by name.
    pub orphans: Vec<Orphan>,
    /// Objects that the catalog names and that are not there, or not with that size.
    pub wrong: Vec<Wrong>,
}

/// An object that the catalog does not know.
#[derive(Debug)]
pub struct Orphan {
    /// Its path in the object store.
    pub name: String,
    /// Its length.
    pub size_bytes: u64,
    /// When it was written, by the object store's clock.
    pub written: SystemTime,
    /// Whether its number was given out before the catalog's last commit of an object. If not, a
    /// later catalog than this one may know it.
    pub is_past: bool,
}

/// An object that is not as the catalog says.
#[derive(Debug)]
pub struct Wrong {
    /// What the catalog says.
    pub object: ObjectInfo,
    /// Its length, if it is there.
    pub found_bytes: Option<u64>,
    /// Whether a stream has records in it. If not, it is about to be deleted, or was.
    pub is_needed: bool,
}

/// List the objects of the store whose catalog holds `snapshot`. A catalog that belongs to no WAL
/// yet has none.
///
/// # Errors
/// The object store cannot be listed.
pub async fn survey(store: &dyn ObjectStore, snapshot: &Snapshot) -> Result<Survey, ObjectError> {
    let Some(wal_id) = snapshot.wal_id else { return Ok(Survey::default()) };
    let mut known: BTreeMap<&str, &ObjectInfo> =
        snapshot.objects.values().map(|object| (object.name.as_str(), object)).collect();
    let ranges = snapshot.streams.values().flat_map(|stream| &stream.ranges);
    let needed: BTreeSet<ObjectId> = ranges.map(|range| range.object).collect();
    let mut survey = Survey::default();
    let wrong = |object: &ObjectInfo, found_bytes| Wrong {
        object: object.clone(),
        found_bytes,
        is_needed: needed.contains(&object.id),
    };
    let prefix = Path::from(object_prefix(wal_id));
    for meta in list_objects(store, Some(&prefix)).await? {
        match known.remove(meta.location.as_ref()) {
            Some(object) if object.size_bytes == meta.size => survey.right += 1,
            Some(object) => survey.wrong.push(wrong(object, Some(meta.size))),
            None => survey.orphans.push(Orphan {
                is_past: object_id(meta.location.as_ref())
                    .is_some_and(|id| id.0 < snapshot.next_object_id),
                name: meta.location.to_string(),
                size_bytes: meta.size,
                written: meta.last_modified.into(),
            }),
        }
    }
    survey.wrong.extend(known.into_values().map(|object| wrong(object, None)));
    survey.wrong.sort_by_key(|wrong| wrong.object.id);
    Ok(survey)
}
