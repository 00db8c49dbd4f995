//! The object cleaner: deletes objects without references, which are retired objects and orphans of
//! interrupted uploads: `docs/format/chain.md`, section 6.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use alluvium_wal::WalError;
use futures::TryStreamExt;
use tokio::time::Instant;

use crate::error::StoreError;
use crate::faults::Reason;
use crate::naming::object_prefix;
use crate::object_error::ObjectError;
use crate::objects::{Request, within};
use crate::publish::Publication;
use crate::request_class::RequestClass;
use crate::retry::Backoff;
use crate::shared::Shared;

/// Interval of checks whether objects are still held by readers.
const HELD: Duration = Duration::from_secs(1);
/// The longest wait before a failed task is tried again: its deletions may free what a full disk
/// needs.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// When a task of the object cleaner runs next.
struct Schedule {
    at: Instant,
    backoff: Backoff,
    last_error: String,
}

impl Schedule {
    fn immediately(shared: &Shared) -> Self {
        let backoff = Backoff::new((shared.options.retry_initial, RETRY_MAX));
        Self { at: Instant::now(), backoff, last_error: String::new() }
    }

    /// Schedules the next run after this one's result.
    fn done(&mut self, shared: &Shared, result: Result<(), StoreError>) {
        let Err(error) = result else {
            self.at = Instant::now() + shared.options.orphan_age;
            self.backoff.succeeded();
            return;
        };
        shared.numbers.clean_up_failures.fetch_add(1, Ordering::Relaxed);
        let wait = self.backoff.failed();
        tracing::warn!("cannot clean up the object store, next attempt in {wait:?}: {error}");
        self.at = Instant::now() + wait;
        self.last_error = error.to_string();
    }
}

/// Reports whether deletions fail.
fn report(shared: &Shared, orphans: &Schedule, retired: &Schedule) {
    let worst = std::cmp::max_by_key(orphans, retired, |schedule| schedule.backoff.failures());
    let failures = worst.backoff.failures();
    let detail = (failures > 0).then(|| {
        format!(
            "objects that are not needed are not deleted, and keep their space; failures in a row: \
             {failures}; the last error: {}",
            worst.last_error
        )
    });
    shared.faults.report(Reason::ObjectDeletionFailing, detail);
}

/// Runs the object cleaner: for retired objects when there are any, for orphans at the start and
/// when the next one may have become old enough. Failed tasks are retried.
///
/// Not `complete` means that recovery found losses. An upload that was not committed may have
/// written what the WAL has lost since, so an orphan may be all that is left of it; then orphans
/// are counted and kept.
pub(crate) async fn run(shared: Arc<Shared>, complete: bool) {
    let mut orphans = Schedule::immediately(&shared);
    let mut retired = Schedule::immediately(&shared);
    loop {
        report(&shared, &orphans, &retired);
        tokio::select! {
            () = tokio::time::sleep_until(retired.at) => {}
            // While deletions fail, later objects wait with them.
            () = shared.retired.notified(), if retired.backoff.failures() == 0 => {}
            () = tokio::time::sleep_until(orphans.at) => {
                match clean_orphans(&shared, complete).await {
                    Ok(result) => orphans.done(&shared, result),
                    Err(error) => return shared.fail(error.into()),
                }
                continue;
            }
        }
        match delete_retired(&shared).await {
            Ok((Ok(()), held)) if held > 0 => retired.at = Instant::now() + HELD,
            Ok((result, _)) => retired.done(&shared, result),
            // If it was the catalog's error, the store has halted
            Err(error) => return shared.fail(error),
        }
    }
}

/// Deletes retired objects that no reader holds; the next delta removes them from the catalog. The
/// inner error is that of the last object that could not be deleted; the outer one is that of the
/// WAL or the catalog. The number is that of the objects held by readers.
async fn delete_retired(
    shared: &Arc<Shared>,
) -> Result<(Result<(), StoreError>, usize), StoreError> {
    let (retired, held) = {
        let table = shared.object_table.lock();
        // No new references can be taken; the holder of an existing one may be reading.
        let free = table.retired.values().filter(|object| Arc::strong_count(object) == 1);
        let free: Vec<_> = free.cloned().collect();
        let held = table.retired.len() - free.len();
        (free, held)
    };
    if retired.is_empty() {
        return Ok((Ok(()), held));
    }
    // The chain must have what dropped their last ranges, and a chain without it must not open the
    // WAL any more.
    shared.publish(Publication::Recorded).await?;
    shared.wal.set_mark(shared.catalog.version()).await?;
    let mut result = Ok(());
    for info in retired {
        match shared.objects.delete(&info.name).await {
            Ok(()) => {
                shared.object_table.lock().retired.remove(&info.id);
                shared.catalog.committing.lock().await.removed.push(info.id);
            }
            Err(error) => result = Err(error.into()),
        }
    }
    Ok((result, held))
}

/// Deletes, or only counts, the objects under this store's prefix that are old, have a number that
/// was committed or belongs to an earlier opening, and are neither in the catalog nor about to be.
/// The age protects objects that an earlier run may still be writing; it is measured with two
/// clocks, so nothing of this run depends on it. The number protects objects of a later run on
/// another machine. The outer error is that of a WAL that has stopped.
async fn clean_orphans(
    shared: &Arc<Shared>,
    delete: bool,
) -> Result<Result<(), StoreError>, WalError> {
    let orphans = match list_orphans(shared).await {
        Ok(orphans) => orphans,
        Err(error) => return Ok(Err(error.into())),
    };
    shared.numbers.orphans.store(orphans.len(), Ordering::Relaxed);
    if !delete && !orphans.is_empty() {
        tracing::warn!(
            "{} objects that the catalog does not record are kept, because they may hold lost \
             records",
            orphans.len()
        );
    }
    if !delete || orphans.is_empty() {
        return Ok(Ok(()));
    }
    match shared.is_owner().await? {
        Ok(true) => {}
        not => return Ok(not.map(drop)),
    }
    let mut result = Ok(());
    for name in &orphans {
        match shared.objects.delete(name).await {
            Ok(()) => {
                tracing::info!("deleted the orphaned object {name}");
                shared.numbers.orphans.fetch_sub(1, Ordering::Relaxed);
                shared.numbers.orphans_deleted.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => result = Err(error.into()),
        }
    }
    Ok(result)
}

async fn list_orphans(shared: &Shared) -> Result<BTreeSet<String>, ObjectError> {
    let prefix = object_prefix(shared.catalog.store);
    let mut orphans = BTreeSet::new();
    let Some(oldest) = SystemTime::now().checked_sub(shared.options.orphan_age) else {
        return Ok(orphans); // nothing can be that old
    };
    let mut listing =
        shared.objects.store(RequestClass::CleanUp).list(Some(&prefix.as_str().into()));
    while let Some(object) = within(Request::List, &prefix, listing.try_next()).await? {
        let name = object.location.to_string();
        // Checked after it was listed: if it was about to be committed then, it still is, or is in
        // the catalog.
        let is_old = SystemTime::from(object.last_modified) < oldest;
        if is_old && shared.object_table.lock().is_orphan(&name) {
            orphans.insert(name);
        }
    }
    Ok(orphans)
}
