//! The state that all connections share.

use std::num::NonZero;
use std::sync::Arc;

use alluvium_stream::Store;
use kafka_protocol::protocol::StrBytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::api::LargeResponses;
use crate::config::BrokerConfig;
use crate::configs::{Configs, Overrides};
use crate::connections::Connections;
use crate::errors::ApiError;
use crate::groups::Groups;
use crate::large_requests::LargeRequests;
use crate::metrics::Metrics;
use crate::producer_ids::ProducerIds;
use crate::quotas::Quotas;
use crate::security::{Authentication, Authorizer, Listener};
use crate::sessions::Sessions;
use crate::topics::{Topic, Topics};
use crate::transactions::Transactions;

/// The number of batches that are decompressed concurrently, off the serving threads.
pub(crate) fn concurrent_decompressions() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get).div_ceil(2).clamp(2, 8)
}

/// This server's identity to clients.
pub(crate) struct Node {
    pub(crate) id: i32,
    pub(crate) cluster_id: StrBytes,
    pub(crate) rack: Option<StrBytes>,
}

/// The state that all connections share.
pub(crate) struct Server {
    pub(crate) config: BrokerConfig,
    pub(crate) configs: Arc<Configs>,
    pub(crate) node: Node,
    pub(crate) listeners: Vec<Arc<Listener>>,
    pub(crate) authentication: Authentication,
    /// `None`: authorization is off, every operation is allowed.
    pub(crate) authorizer: Option<Arc<Authorizer>>,
    pub(crate) connections: Arc<Connections>,
    pub(crate) store: Store,
    pub(crate) topics: Arc<Topics>,
    pub(crate) groups: Groups,
    pub(crate) transactions: Transactions,
    pub(crate) producer_ids: ProducerIds,
    pub(crate) sessions: Sessions,
    pub(crate) quotas: Quotas,
    pub(crate) metrics: Metrics,
    pub(crate) request_memory: RequestMemory,
    /// The budget for decoded requests with many elements, and for their responses.
    pub(crate) decoded_budget: ByteBudget,
    pub(crate) large_responses: LargeResponses,
    pub(crate) large_requests: LargeRequests,
    /// The budget for fetch responses read from memory.
    pub(crate) fetch_budget: ByteBudget,
    /// The budget for fetch responses read from objects.
    pub(crate) cold_fetch_budget: ByteBudget,
    pub(crate) decompressions: Arc<Semaphore>,
    pub(crate) stop: watch::Sender<bool>,
}

impl Server {
    /// Creates a topic, see [`Topics::create`]. First drops group offsets of an earlier topic of
    /// this name, including offsets staged in transactions.
    pub(crate) async fn create_topic(
        &self,
        name: &str,
        partitions: u32,
        overrides: Overrides,
        validate_only: bool,
    ) -> Result<Arc<Topic>, ApiError> {
        let failed = |error: &dyn std::fmt::Display| ApiError::Storage(error.to_string());
        let forget = async {
            // Transactions first: one that is ending may still append its offsets.
            Transactions::forget_offsets(self, name).await.map_err(|error| failed(&error))?;
            let exists = |name: &str| self.topics.by_name(name).is_ok();
            let forgotten = self.groups.forget_missing_topics(&[name.to_owned()], exists).await;
            forgotten.map_err(|error| failed(&error))
        };
        self.topics.create(name, partitions, overrides, validate_only, forget).await
    }

    /// Applies the quotas of transfers with the object store.
    pub(crate) fn limit_transfers(&self) {
        self.store.limit_transfers(|| self.configs.transfer_limits());
    }

    /// Creates an internal topic if it does not exist, see [`crate::topics::is_internal`].
    pub(crate) async fn ensure_internal(&self, name: &'static str) {
        if self.topics.by_name(name).is_ok() || self.store.is_followed() {
            return;
        }
        let compacted = [("cleanup.policy".to_owned(), "compact".to_owned())].into();
        match self.create_topic(name, 1, compacted, false).await {
            Ok(_) | Err(ApiError::TopicExists(_)) => {}
            // The coordinator does not need the topic.
            Err(error) => tracing::debug!(name, %error, "internal topic not created"),
        }
    }

    /// Runs work that may decompress a batch, off the serving threads.
    pub(crate) async fn run_decompression<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let one_of_few = self.decompressions.clone().acquire_owned().await;
        // The caller may be cancelled before the work ends.
        let result = tokio::task::spawn_blocking(move || {
            let _one_of_few = one_of_few;
            work()
        });
        let result = result.await;
        result.map_err(|e| ApiError::Internal(format!("decompression task failed: {e}")))?
    }

    /// Whether the server is shutting down.
    pub(crate) fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }

    /// Whether requests wait for memory that responses occupy.
    pub(crate) fn responses_block_others(&self) -> bool {
        [&self.fetch_budget, &self.cold_fetch_budget, &self.decoded_budget]
            .into_iter()
            .chain([self.large_responses.budget()])
            .any(ByteBudget::is_exhausted)
    }

    /// Resolves when the server is shutting down.
    pub(crate) async fn stopping(&self) {
        // An error would mean that the sender is dropped, but `self` holds it.
        let _ = self.stop.subscribe().wait_for(|stop| *stop).await;
    }
}

/// A limit in bytes on something queued. Requests beyond it wait, first come, first served.
pub(crate) struct ByteBudget {
    /// One permit per KiB.
    free: Arc<Semaphore>,
    total_kib: u32,
}

impl ByteBudget {
    /// Creates a budget of `total_bytes`, at most 4 TiB.
    pub(crate) fn new(total_bytes: u64) -> Self {
        let total_kib = u32::try_from(total_bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        Self { free: Arc::new(Semaphore::new(total_kib as usize)), total_kib }
    }

    /// Takes `bytes` from the budget, or all of it if it is smaller. Dropping the permit returns
    /// them.
    pub(crate) async fn acquire(&self, bytes: usize) -> OwnedSemaphorePermit {
        let share = kib(bytes).min(self.total_kib);
        let permit = self.free.clone().acquire_many_owned(share).await;
        permit.expect("the semaphore is never closed")
    }

    /// The bytes that are not taken.
    pub(crate) fn free_bytes(&self) -> usize {
        self.free.available_permits() * 1024
    }

    /// Whether nothing more can be taken. Bytes too few for the first waiter are reserved for it.
    fn is_exhausted(&self) -> bool {
        self.free.available_permits() == 0
    }

    /// Returns all but `bytes` of a permit to the budget.
    pub(crate) fn shrink(
        mut permit: OwnedSemaphorePermit,
        bytes: usize,
    ) -> Option<OwnedSemaphorePermit> {
        let keep = (kib(bytes) as usize).min(permit.num_permits());
        if keep == 0 { None } else { permit.split(keep) }
    }
}

/// The memory for requests, beyond the size that each connection may use without it.
///
/// A request takes memory as its bytes arrive, so an announced length alone reserves nothing. It
/// therefore holds some memory when it needs more, and requests that have together used up the
/// budget would deadlock. The **overdraft permit** prevents this: its holder, one request at a
/// time, grows without taking memory, at most to the largest request size. It does not wait for
/// memory any more, so it is read to its end or times out. When it is handled, or when its handling
/// waits for other events, it returns the permit and all memory that it took. So every waiter
/// proceeds at the latest when those before it have had the permit. Clients that send nothing
/// cannot make this long: no request waits, or blocks others, beyond
/// [`BrokerConfig::transfer_timeout`].
pub(crate) struct RequestMemory {
    shared: ByteBudget,
    overdraft: Arc<Semaphore>,
}

/// A request's share of [`RequestMemory`].
#[derive(Default)]
pub(crate) struct RequestShare {
    taken: Option<OwnedSemaphorePermit>,
    overdraft: Option<OwnedSemaphorePermit>,
}

impl RequestMemory {
    pub(crate) fn new(total_bytes: u64) -> Self {
        Self { shared: ByteBudget::new(total_bytes), overdraft: Arc::new(Semaphore::new(1)) }
    }

    /// Takes `bytes` more for a request.
    pub(crate) async fn grow(&self, share: &mut RequestShare, bytes: usize) {
        if share.overdraft.is_some() {
            return;
        }
        tokio::select! {
            biased;
            more = self.shared.acquire(bytes) => match &mut share.taken {
                Some(taken) => taken.merge(more),
                None => share.taken = Some(more),
            },
            permit = self.overdraft.clone().acquire_owned() => {
                share.overdraft = Some(permit.expect("the semaphore is never closed"));
            }
        }
    }

    /// Whether nothing but the overdraft permit can be taken.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.shared.is_exhausted()
    }

    /// The bytes that are not taken, without the overdraft.
    #[cfg(test)]
    pub(crate) fn free_bytes(&self) -> usize {
        self.shared.free_bytes()
    }

    /// Whether the overdraft permit is free.
    #[cfg(test)]
    pub(crate) fn has_overdraft(&self) -> bool {
        self.overdraft.available_permits() > 0
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn a_budget_is_taken_shrunk_and_released() {
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

    #[tokio::test]
    async fn a_budget_counts_as_used_up_while_a_request_waits() {
        let budget = ByteBudget::new(10 * 1024);
        let share = budget.acquire(6 * 1024).await;
        assert!(!budget.is_exhausted());
        let mut waiting = Box::pin(budget.acquire(5 * 1024));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        assert!(budget.is_exhausted());
        drop(waiting);
        assert!(!budget.is_exhausted());
        drop(share);
    }

    #[tokio::test]
    async fn requests_that_have_used_up_the_memory_proceed_one_by_one() {
        let memory = RequestMemory::new(10 * 1024);
        let mut shares = [(); 4].map(|()| RequestShare::default());
        for share in &mut shares {
            memory.grow(share, 2 * 1024).await;
        }
        assert_eq!(memory.free_bytes(), 2 * 1024);
        {
            let [first, second, third, _] = &mut shares;
            memory.grow(first, 8 * 1024).await;
            memory.grow(first, 100 * 1024).await;
            assert!(first.overdraft.is_some());
            let mut waiting = pin!(memory.grow(second, 8 * 1024));
            assert!(futures::poll!(waiting.as_mut()).is_pending());
            // The order is first come, first served: else small requests would starve it.
            let mut behind = pin!(memory.grow(third, 1024));
            assert!(futures::poll!(behind.as_mut()).is_pending());
            *first = RequestShare::default();
            waiting.await;
            behind.await;
        }
        drop(shares);
        assert_eq!(memory.free_bytes(), 10 * 1024);
    }
}
