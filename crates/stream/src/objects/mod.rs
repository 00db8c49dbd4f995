//! The object store: errors and deadlines of its requests; writing objects in bounded memory, reading them with verification and a cache.

mod local;
mod read;
mod scan;
mod write;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::object::Damage;

pub use local::local_objects;
pub(crate) use read::{Budget, Objects};
pub(crate) use scan::{Scan, index};
pub(crate) use write::Writer;

/// The objects of all stores lie under it, each store's in a directory of its own.
pub(crate) const OBJECTS_DIRECTORY: &str = "streams";
/// A request that makes no progress for so long has failed: the longest that flushing a large object to a slow disk may take.
const STALL: Duration = Duration::from_secs(300);

/// An object could not be written, read or deleted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObjectError {
    /// The object store refused or could not be reached.
    #[error("object {name}: {source}")]
    Store {
        /// Its path in the object store.
        name: String,
        /// Cause.
        source: Arc<object_store::Error>,
    },
    /// It is not what was written.
    #[error("object {name}: {source}")]
    Damaged {
        /// Its path in the object store.
        name: String,
        /// Where and what.
        source: Arc<Damage>,
    },
}

impl ObjectError {
    fn store(name: &str, source: object_store::Error) -> Self {
        Self::Store { name: name.into(), source: Arc::new(source) }
    }

    fn damaged(name: &str, source: Damage) -> Self {
        Self::Damaged { name: name.into(), source: Arc::new(source) }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Store { source, .. } if matches!(**source, object_store::Error::NotFound { .. }))
    }
}

/// The answer to a request about `name`, or an error if it does not come.
pub(crate) async fn within<T>(
    name: &str,
    request: impl Future<Output = object_store::Result<T>>,
) -> Result<T, ObjectError> {
    let stalled = |_| object_store::Error::Generic {
        store: "object store",
        source: format!("no answer for {STALL:?}").into(),
    };
    let answer = tokio::time::timeout(STALL, request).await.map_err(stalled);
    answer.and_then(|answer| answer).map_err(|error| ObjectError::store(name, error))
}
