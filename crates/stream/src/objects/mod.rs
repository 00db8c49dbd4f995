//! The object store: errors and deadlines of its requests; writing objects in bounded memory,
//! reading them with verification and a cache.

mod counted;
mod disk;
mod error;
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

use crate::upload::object_prefix;

use crate::bandwidth::Bandwidth;

pub(crate) use counted::Cause;
pub use counted::Requests;
pub use disk::DiskCacheStats;
pub use error::{ErrorKind, ObjectError};
pub(crate) use flight::Ticket;
pub use local::local_objects;
pub use numbers::ReadStats;
pub(crate) use read::{Budget, Enough, Objects, Part, READ_BYTES};
pub(crate) use scan::{Scan, index};
pub use survey::{Orphan, Survey, Wrong, survey};
pub use whole::{StoredObject, list_objects, object_size};
pub(crate) use write::Writer;

/// The objects of all stores lie under it, each store's in a directory of its own.
pub(crate) const OBJECTS_DIRECTORY: &str = "streams";
/// Who owns the objects of a WAL, next to them.
pub(crate) const OWNER_OBJECT: &str = "owner";

/// The way to the object store on behalf of one cause: requests are counted there, and bytes wait
/// for their turn.
#[derive(Clone, Copy)]
pub(crate) struct Way<'a> {
    pub(crate) store: &'a dyn ObjectStore,
    bandwidth: &'a Bandwidth,
    cause: Cause,
}

impl Way<'_> {
    /// Wait until so many bytes may be on their way.
    async fn acquire(&self, bytes: u64) {
        self.bandwidth.acquire(self.cause, bytes).await;
    }
}

/// What is asked of the object store; how long an answer may take depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Up to 8 MiB, and somebody is waiting for them.
    Get,
    /// A small object.
    Put,
    /// The begin of a large object.
    Begin,
    /// A part of a large object. The client of a remote store repeats it in that time.
    Part,
    /// The end of a large object.
    Complete,
    /// The parts of a large object are not needed.
    Abort,
    /// The next page of a listing.
    List,
    /// One object.
    Delete,
}

impl Request {
    /// A request that has no answer after so long has failed, whatever becomes of it.
    fn deadline(self) -> Duration {
        Duration::from_secs(match self {
            Self::Get => 15,
            Self::Begin | Self::Abort | Self::List | Self::Delete => 30,
            Self::Put | Self::Part => 60,
            // Flushing a large object to a slow disk.
            Self::Complete => 300,
        })
    }
}

/// The answer to a request about `name`, or an error if it does not come.
pub(crate) async fn within<T>(
    request: Request,
    name: &str,
    answer: impl Future<Output = object_store::Result<T>>,
) -> Result<T, ObjectError> {
    let deadline = request.deadline();
    match tokio::time::timeout(deadline, answer).await {
        Ok(answer) => answer.map_err(|error| ObjectError::store(name, &error)),
        Err(_) => Err(ObjectError::no_answer(name, deadline)),
    }
}

/// Ask an object store whether it can be used: for what it holds, of the store with this WAL if
/// there is one, up to the first name that `is_known`. Whether there is one.
///
/// # Errors
/// What any other request would meet now; see [`ObjectError::is_permanent`].
pub async fn try_objects(
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
