//! The tasks that publish recorded lists, write snapshots, and delete what the chain does not need
//! any more.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Publication;
use crate::chain::{CleanUp, DELETION_AGE};
use crate::object_error::ObjectError;
use crate::shared::Shared;

/// Interval of the deletion of what the chain does not need.
const CLEAN_UP_INTERVAL: Duration = Duration::from_secs(3600);

/// Publishes lists of changes within [`crate::Options::catalog_interval`]. Ends when the store
/// fails.
pub(crate) async fn run(shared: Arc<Shared>) {
    loop {
        shared.catalog.wanted.notified().await;
        tokio::time::sleep(shared.options.catalog_interval).await;
        // Its error has halted the store, or is that of the WAL, which is reported elsewhere.
        if shared.publish(Publication::Recorded).await.is_err() {
            return;
        }
    }
}

/// Writes snapshots, and deletes what the chain does not need. Nothing waits for either.
pub(crate) async fn run_upkeep(shared: Arc<Shared>) {
    let catalog = &shared.catalog;
    let chain = catalog.writer.lock().await.chain().clone();
    let mut clean_up = CleanUp::new(chain);
    let mut clean_up_at = Instant::now() + CLEAN_UP_INTERVAL;
    loop {
        tokio::select! {
            () = catalog.snapshot_wanted.notified() => {}
            () = tokio::time::sleep_until(clean_up_at) => {
                if let Err(error) = clean_up.run(DELETION_AGE).await {
                    tracing::warn!("old objects of the catalog are not deleted: {error}");
                }
                clean_up_at = Instant::now() + CLEAN_UP_INTERVAL;
                continue;
            }
        }
        if let Err(error) = write_snapshot(&shared).await {
            tracing::warn!("a snapshot of the catalog cannot be written: {error}");
            tokio::time::sleep(shared.options.retry_max).await;
            catalog.snapshot_wanted.notify_one();
        }
    }
}

/// Writes a snapshot of the catalog if one is due.
async fn write_snapshot(shared: &Shared) -> Result<(), ObjectError> {
    let (chain, snapshot) = {
        let writer = shared.catalog.writer.lock().await;
        let Some(snapshot) = writer.due_snapshot() else { return Ok(()) };
        (writer.chain().clone(), snapshot)
    };
    let number = snapshot.state.head.number;
    let size_bytes = chain.write_snapshot(snapshot).await?;
    shared.catalog.writer.lock().await.snapshot_written(number, size_bytes);
    Ok(())
}
