//! What all connections share.

use std::sync::Arc;

use alluvium_stream::Store;
use kafka_protocol::protocol::StrBytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::api::LargeAnswers;
use crate::config::BrokerConfig;
use crate::configs::{Configs, Overrides};
use crate::connections::Connections;
use crate::errors::ApiError;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::producer_ids::ProducerIds;
use crate::quotas::Quotas;
use crate::security::{Authentication, Authorizer, Listener};
use crate::sessions::Sessions;
use crate::topics::{Topic, Topics};
use crate::transactions::Transactions;

/// Batches that are decompressed at the same time, to look for times.
pub(crate) const CONCURRENT_DECOMPRESSIONS: usize = 2;

/// Who this server is to clients.
pub(crate) struct Node {
    pub(crate) id: i32,
    pub(crate) cluster_id: StrBytes,
}

/// What all connections share.
pub(crate) struct Server {
    pub(crate) config: BrokerConfig,
    pub(crate) configs: Arc<Configs>,
    pub(crate) node: Node,
    pub(crate) listeners: Vec<Arc<Listener>>,
    pub(crate) authentication: Authentication,
    /// `None`: everybody may do everything.
    pub(crate) authorizer: Option<Arc<Authorizer>>,
    pub(crate) connections: Arc<Connections>,
    pub(crate) store: Store,
    pub(crate) topics: Topics,
    pub(crate) groups: Groups,
    pub(crate) transactions: Transactions,
    pub(crate) producer_ids: ProducerIds,
    pub(crate) sessions: Sessions,
    pub(crate) quotas: Quotas,
    pub(crate) metrics: Metrics,
    /// For the bytes of requests.
    pub(crate) request_budget: ByteBudget,
    /// For what requests with many elements are decoded into, and for their responses.
    pub(crate) decoded_budget: ByteBudget,
    pub(crate) large_answers: LargeAnswers,
    /// For the bytes of fetch responses that were in memory.
    pub(crate) fetch_budget: ByteBudget,
    /// For those that were read from objects.
    pub(crate) late_fetch_budget: ByteBudget,
    pub(crate) decompressions: Semaphore,
    pub(crate) stop: watch::Sender<bool>,
}

impl Server {
    /// Create a topic, see [`Topics::create`]. Offsets that groups have of an earlier topic of this name are forgotten first.
    pub(crate) async fn create_topic(
        &self,
        name: &str,
        partitions: u32,
        overrides: Overrides,
        validate_only: bool,
    ) -> Result<Arc<Topic>, ApiError> {
        if !validate_only {
            let exists = |name: &str| self.topics.by_name(name).is_ok();
            let forgotten = self.groups.forget_missing_topics(&[name.to_owned()], exists).await;
            forgotten.map_err(|e| ApiError::Storage(e.to_string()))?;
        }
        self.topics.create(name, partitions, overrides, validate_only).await
    }

    /// Have one of Kafka's own topics, see [`crate::topics::is_internal`].
    pub(crate) async fn ensure_internal(&self, name: &'static str) {
        if self.topics.by_name(name).is_ok() {
            return;
        }
        let compacted = [("cleanup.policy".to_owned(), "compact".to_owned())].into();
        match self.create_topic(name, 1, compacted, false).await {
            Ok(_) | Err(ApiError::TopicExists(_)) => {}
            // The coordinator does not need it.
            Err(error) => tracing::debug!(name, %error, "no internal topic"),
        }
    }

    /// Look into a batch, off the threads that serve: it may have to be decompressed.
    pub(crate) async fn look_into<T: Send + 'static>(
        &self,
        look: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _one_of_few = self.decompressions.acquire().await;
        let looked = tokio::task::spawn_blocking(look).await;
        looked.map_err(|e| ApiError::Internal(format!("looking into a batch: {e}")))?
    }

    /// Whether the server is shutting down.
    pub(crate) fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }

    /// Resolves when the server is shutting down.
    pub(crate) async fn stopping(&self) {
        // An error would mean that the sender is gone, which this very object holds.
        let _ = self.stop.subscribe().wait_for(|stop| *stop).await;
    }
}

/// A bound in bytes on something that is queued; who wants more waits. First come, first served.
pub(crate) struct ByteBudget {
    /// One permit for each KiB.
    free: Arc<Semaphore>,
    total_kib: u32,
}

impl ByteBudget {
    /// A budget of `total_bytes`, at most 4 TiB.
    pub(crate) fn new(total_bytes: u64) -> Self {
        let total_kib = u32::try_from(total_bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        Self { free: Arc::new(Semaphore::new(total_kib as usize)), total_kib }
    }

    /// Take a share, all of the budget if it is less than `bytes`. It is given back when the permit is dropped.
    pub(crate) async fn acquire(&self, bytes: usize) -> OwnedSemaphorePermit {
        let share = kib(bytes).min(self.total_kib);
        let permit = self.free.clone().acquire_many_owned(share).await;
        permit.expect("the semaphore is never closed")
    }

    /// What nobody has taken.
    pub(crate) fn free_bytes(&self) -> usize {
        self.free.available_permits() * 1024
    }

    /// Give back all of a share but `bytes`.
    pub(crate) fn shrink(
        mut permit: OwnedSemaphorePermit,
        bytes: usize,
    ) -> Option<OwnedSemaphorePermit> {
        let keep = (kib(bytes) as usize).min(permit.num_permits());
        if keep == 0 { None } else { permit.split(keep) }
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_budget_is_taken_shrunk_and_given_back() {
        let budget = ByteBudget::new(10 * 1024);
        let share = budget.acquire(6 * 1024 + 1).await;
        assert_eq!(budget.free_bytes(), 3 * 1024);
        let share = ByteBudget::shrink(share, 1_500).unwrap();
        assert_eq!(budget.free_bytes(), 8 * 1024);
        drop(share);
        let all = budget.acquire(1 << 30).await;
        assert_eq!(budget.free_bytes(), 0);
        assert!(ByteBudget::shrink(all, 0).is_none());
        assert_eq!(budget.free_bytes(), 10 * 1024);
    }
}
