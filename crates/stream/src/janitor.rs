//! Deleting objects that nobody needs: retired ones, to which no range refers any more, and orphans of uploads that were cut short.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use futures::TryStreamExt;

use crate::store::{Shared, StoreError};
use crate::types::ObjectId;
use crate::upload::object_prefix;

/// Retired objects are forgotten in the catalog in groups of this size.
const GROUP: usize = 100;

/// The janitor task: orphans once, then whatever is retired. What it can not delete is tried again at the next start.
///
/// Not `complete`: recovery has found gaps. An upload that was not committed may have written what the WAL has lost since, so
/// that an orphan is all that is left of it.
pub(crate) async fn run(shared: Arc<Shared>, complete: bool) {
    if !complete {
        tracing::warn!(
            "objects that the catalog does not know are kept, because recovery has found offsets missing"
        );
    } else if let Err(error) = delete_orphans(&shared).await {
        tracing::warn!(
            "could not look for orphaned objects, will try again at the next start: {error}"
        );
    }
    let mut gave_up: HashSet<ObjectId> = HashSet::new();
    loop {
        shared.retired.notified().await;
        loop {
            let retired: Vec<_> = {
                let table = shared.object_table.lock();
                let retired = table.retired.values().filter(|info| !gave_up.contains(&info.id));
                retired.take(GROUP).cloned().collect()
            };
            if retired.is_empty() {
                break;
            }
            let mut deleted = Vec::with_capacity(retired.len());
            for info in retired {
                match shared.objects.delete(&info.name).await {
                    Ok(()) => deleted.push(info.id),
                    Err(error) => {
                        tracing::warn!(
                            "could not delete a retired object, will try again at the next start: {error}"
                        );
                        gave_up.insert(info.id);
                    }
                }
            }
            if deleted.is_empty() {
                continue;
            }
            match shared.forget(deleted.clone()).await {
                Ok(()) => {}
                Err(StoreError::Closed) => return,
                Err(error) => {
                    tracing::warn!(
                        "deleted objects stay in the catalog until the next start: {error}"
                    );
                    gave_up.extend(deleted);
                }
            }
        }
    }
}

/// Delete what lies under this store's prefix, is old, and is not in the catalog.
///
/// Safe against the uploads of this run: their objects are younger than any age that [`crate::Options::orphan_age`] allows, and
/// the catalog is looked at after the listing.
async fn delete_orphans(shared: &Shared) -> Result<(), object_store::Error> {
    let prefix = object_prefix(shared.wal_id).into();
    let Some(oldest) = SystemTime::now().checked_sub(shared.options.orphan_age) else {
        return Ok(()); // nothing can be that old
    };
    let mut listing = shared.objects.store().list(Some(&prefix));
    let mut old = Vec::new();
    while let Some(object) = listing.try_next().await? {
        if SystemTime::from(object.last_modified) < oldest {
            old.push(object.location.to_string());
        }
    }
    let known: HashSet<String> = {
        let table = shared.object_table.lock();
        table
            .live
            .values()
            .map(|(info, _)| &info.name)
            .chain(table.retired.values().map(|info| &info.name))
            .cloned()
            .collect()
    };
    old.retain(|name| !known.contains(name));
    shared.numbers.orphans.store(old.len(), Ordering::Relaxed);
    for name in &old {
        match shared.objects.delete(name).await {
            Ok(()) => {
                tracing::info!("deleted the orphaned object {name}");
                shared.numbers.orphans.fetch_sub(1, Ordering::Relaxed);
                shared.numbers.orphans_deleted.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                tracing::warn!("could not delete an orphaned object: {error}");
                shared.numbers.clean_up_failures.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}
