//! Where a rebuild reads, and how it reports its progress.

use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;

use crate::fold::Fold;
use crate::object_error::ObjectError;
use crate::retry::Backoff;

/// Attempts of a request whose errors are temporary.
const ATTEMPTS: u32 = 10;

/// A part of a rebuild that can take long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebuildStep {
    /// Reads what each object holds.
    Directories,
    /// Reads records, from which checkpoints are derived.
    Records,
}

/// Reports how much of a step is done, of how much: in bytes of the objects in question.
pub type RebuildProgress<'a> = &'a (dyn Fn(RebuildStep, u64, u64) + Sync);

/// Where a rebuild reads.
pub(super) struct Source<'a> {
    pub(super) objects: &'a Arc<dyn ObjectStore>,
    pub(super) fold: &'a Arc<dyn Fold>,
    pub(super) progress: RebuildProgress<'a>,
    /// The first and the longest delay between two attempts of a request.
    pub(super) retry: (Duration, Duration),
}

impl Source<'_> {
    /// Sends a request again as long as its errors are temporary: a rebuild that has read for hours
    /// must not begin again because of one of them.
    pub(super) async fn read<T, F: Future<Output = Result<T, ObjectError>>>(
        &self,
        request: impl FnMut() -> F,
    ) -> Result<T, ObjectError> {
        retried(self.retry, request).await
    }
}

/// Sends a request again as long as its errors are temporary, up to [`ATTEMPTS`] times.
pub(super) async fn retried<T, F: Future<Output = Result<T, ObjectError>>>(
    retry: (Duration, Duration),
    mut request: impl FnMut() -> F,
) -> Result<T, ObjectError> {
    let mut backoff = Backoff::new(retry);
    loop {
        match request().await {
            Err(error) if error.is_temporary() && backoff.failures() + 1 < ATTEMPTS => {
                let wait = backoff.failed();
                tracing::warn!("{error}; next attempt in {wait:?}");
                tokio::time::sleep(wait).await;
            }
            answer => return answer,
        }
    }
}
