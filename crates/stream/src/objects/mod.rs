//! The object store: errors and deadlines of its requests; writing objects in bounded memory,
//! reading them with verification and a cache.

mod counted;
mod directory;
mod disk;
mod flight;
mod get;
mod local;
mod numbers;
mod read;
mod scan;
mod survey;
mod whole;
mod write;

use std::future::Future;
use std::time::Duration;

use futures::TryStreamExt;
use object_store::ObjectStore;
use uuid::Uuid;

use crate::bandwidth::Transfers;
use crate::naming::{OBJECTS_DIRECTORY, object_prefix};
use crate::object_error::ObjectError;
use crate::request_class::RequestClass;

pub(crate) use counted::CountedStores;
pub use counted::Requests;
pub(crate) use directory::read_index;
pub use directory::{Directory, read_directory};
pub use disk::DiskCacheStats;
pub(crate) use flight::FlightGuard;
#[cfg(test)]
pub(crate) use local::local_parents;
pub use local::{MARK, RESERVE, is_marked, local_objects};
pub use numbers::ReadStats;
pub(crate) use read::{Deadline, Objects, Part, READ_BYTES};
pub(crate) use scan::{Scan, index};
pub use survey::{Mismatch, Orphan, Survey, survey};
pub use whole::{StoredObject, list_objects, object_size};
pub(crate) use whole::{delete_object, list_all, read_whole};
pub(crate) use write::Writer;

/// Access to the object store for one request class: it counts requests and limits the bandwidth.
#[derive(Clone, Copy)]
pub(crate) struct StoreHandle<'a> {
    pub(crate) store: &'a dyn ObjectStore,
    transfers: &'a Transfers,
    class: RequestClass,
}

impl<'a> StoreHandle<'a> {
    pub(crate) fn new(
        store: &'a dyn ObjectStore,
        transfers: &'a Transfers,
        class: RequestClass,
    ) -> Self {
        Self { store, transfers, class }
    }

    /// Waits until this number of bytes may be transferred.
    async fn acquire(&self, bytes: u64) {
        self.transfers.acquire(self.class, bytes).await;
    }
}

/// The kinds of requests to the object store, which have different deadlines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Reads up to 8 MiB that are being waited for.
    Get,
    /// Writes a small object.
    Put,
    /// Begins a large object.
    Begin,
    /// Writes a part of a large object. The client of a remote store retries within the deadline.
    Part,
    /// Completes a large object.
    Complete,
    /// Discards the parts of a large object.
    Abort,
    /// Returns the next page of a listing.
    List,
    /// Deletes one object.
    Delete,
}

impl Request {
    /// Returns the time after which a request without a response has failed, whatever happens to it
    /// later.
    fn deadline(self) -> Duration {
        Duration::from_secs(match self {
            Self::Get => 15,
            Self::Begin | Self::Abort | Self::List | Self::Delete => 30,
            Self::Put | Self::Part => 60,
            // Includes flushing a large object to a slow disk.
            Self::Complete => 300,
        })
    }
}

/// Waits for the response to a request about `name`; fails after its deadline.
pub(crate) async fn within<T>(
    request: Request,
    name: &str,
    answer: impl Future<Output = object_store::Result<T>>,
) -> Result<T, ObjectError> {
    let deadline = request.deadline();
    match tokio::time::timeout(deadline, answer).await {
        Ok(answer) => answer.map_err(|error| ObjectError::store(name, &error)),
        Err(_) => Err(ObjectError::no_response(name, deadline)),
    }
}

/// Checks whether an object store is usable, by listing the objects of the store with this WAL, or
/// of all stores, up to the first name that `is_known`. Returns whether there is one.
///
/// # Errors
/// The error that any other request would get now; see [`ObjectError::is_permanent`].
pub async fn probe_objects(
    store: &dyn ObjectStore,
    wal_id: Option<Uuid>,
    is_known: &(dyn Fn(&str) -> bool + Sync),
) -> Result<bool, ObjectError> {
    let prefix = wal_id.map_or_else(|| OBJECTS_DIRECTORY.into(), object_prefix);
    let mut listing = store.list(Some(&prefix.as_str().into()));
    while let Some(object) = within(Request::List, &prefix, listing.try_next()).await? {
        if is_known(object.location.as_ref()) {
            return Ok(true);
        }
    }
    Ok(false)
}
