//! Responses that may be large: because the request is, or although it is small, since they cover
//! all topics, all groups or all settings.
//!
//! They are held in memory until their clients have received them, for which a client has half a
//! minute. Therefore their bytes are limited over all connections, and of the second kind only a
//! few per API are built concurrently. Each API has permits of its own, so responses of one API
//! that wait for memory do not block those of another. A response that turns out to be small waits
//! for no permit. The data that group members send to each other exists already, so it is counted
//! before it is encoded ([`Context::reserve_response`]).
//!
//! [`Context::reserve_response`]: super::Context::reserve_response

use std::sync::Arc;

use kafka_protocol::messages::ApiKey;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::server::ByteBudget;
use crate::wire::response::Response;

/// Responses up to this size are not counted: the limit on connections limits them.
pub(super) const SMALL_BYTES: usize = 256 << 10;

/// The number of responses of one API that are built, or wait for memory, concurrently.
const CONCURRENT: usize = 8;

/// The APIs whose responses may be large and are built without waiting.
const AT_ONCE: [ApiKey; 13] = [
    ApiKey::OffsetFetch,
    ApiKey::DescribeGroups,
    ApiKey::ListGroups,
    ApiKey::DescribeConfigs,
    ApiKey::DescribeAcls,
    ApiKey::DescribeLogDirs,
    ApiKey::DescribeProducers,
    ApiKey::DescribeTransactions,
    ApiKey::ListTransactions,
    ApiKey::DescribeClientQuotas,
    ApiKey::DescribeUserScramCredentials,
    ApiKey::ShareGroupDescribe,
    ApiKey::ListConfigResources,
];

/// The APIs whose responses may be large, and hold one part in memory while they wait for another.
const IN_PARTS: [ApiKey; 2] = [ApiKey::ConsumerGroupDescribe, ApiKey::DescribeShareGroupOffsets];

/// The APIs whose handlers see in the request whether the response may be large.
const SOMETIMES: [ApiKey; 2] = [ApiKey::Metadata, ApiKey::CreateTopics];

pub(crate) struct LargeResponses {
    permits: Vec<(ApiKey, Arc<Semaphore>)>,
    budget: ByteBudget,
}

impl LargeResponses {
    pub(crate) fn new(total_bytes: u64) -> Self {
        let apis = AT_ONCE.into_iter().chain(IN_PARTS).chain(SOMETIMES);
        let permits = apis.map(|api| (api, Arc::new(Semaphore::new(CONCURRENT))));
        Self { permits: permits.collect(), budget: ByteBudget::new(total_bytes) }
    }

    /// Whether each response of the API may be large, and can be built to see whether it is.
    pub(super) fn are_at_once(key: ApiKey) -> bool {
        AT_ONCE.contains(&key)
    }

    /// Whether each response of the API may be large, and incomplete responses occupy memory.
    pub(super) fn are_in_parts(key: ApiKey) -> bool {
        IN_PARTS.contains(&key)
    }

    /// Waits for a permit to build a response; `None` for an API whose responses are proportional
    /// to their requests.
    pub(super) async fn permit(&self, key: ApiKey) -> Option<OwnedSemaphorePermit> {
        let permits = self.permits_of(key)?;
        Some(permits.acquire_owned().await.expect("the semaphore is never closed"))
    }

    /// Takes a permit to build a response if one is free.
    pub(super) fn free_permit(&self, key: ApiKey) -> Option<OwnedSemaphorePermit> {
        self.permits_of(key)?.try_acquire_owned().ok()
    }

    fn permits_of(&self, key: ApiKey) -> Option<Arc<Semaphore>> {
        self.permits.iter().find(|(api, _)| *api == key).map(|(_, permits)| permits.clone())
    }

    /// Counts the bytes of a response until it is written.
    pub(super) async fn count(&self, answer: &mut Response) {
        if answer.len_bytes() > SMALL_BYTES {
            answer.budgets.push(self.reserve(answer.len_bytes()).await);
        }
    }

    /// Waits for memory of `bytes`.
    pub(super) async fn reserve(&self, bytes: usize) -> OwnedSemaphorePermit {
        self.budget.acquire(bytes).await
    }

    pub(crate) fn budget(&self) -> &ByteBudget {
        &self.budget
    }
}
