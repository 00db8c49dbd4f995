//! Answers that may be large: because the request is, or however small the request is, about all
//! topics, all groups, all settings.
//!
//! They are held in memory until their clients have taken them, for which these have half a minute.
//! So their bytes are bounded over all connections, and of the second kind few of an API are put
//! together at the same time. Each API has turns of its own: who waits for the bytes of one makes
//! nobody wait for another. An answer that turns out to be small waits for no turn. What members of
//! a group have for one another exists already, so it is counted before it is encoded
//! ([`Context::make_room`]).
//!
//! [`Context::make_room`]: super::Context::make_room

use std::sync::Arc;

use kafka_protocol::messages::ApiKey;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::server::ByteBudget;
use crate::wire::response::Response;

/// Answers up to this size are not counted: the bound on connections bounds them.
pub(super) const SMALL_BYTES: usize = 256 << 10;

/// Answers of one API that are put together, or wait for bytes, at the same time.
const CONCURRENT: usize = 8;

/// Those of which each answer may be large, and is there without a wait.
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

/// Those of which each may be, and has one part in memory while it waits for another.
const IN_PARTS: [ApiKey; 2] = [ApiKey::ConsumerGroupDescribe, ApiKey::DescribeShareGroupOffsets];

/// Those of which the handler sees in the request whether the answer may be.
const SOMETIMES: [ApiKey; 2] = [ApiKey::Metadata, ApiKey::CreateTopics];

pub(crate) struct LargeAnswers {
    turns: Vec<(ApiKey, Arc<Semaphore>)>,
    budget: ByteBudget,
}

impl LargeAnswers {
    pub(crate) fn new(total_bytes: u64) -> Self {
        let apis = AT_ONCE.into_iter().chain(IN_PARTS).chain(SOMETIMES);
        let turns = apis.map(|api| (api, Arc::new(Semaphore::new(CONCURRENT))));
        Self { turns: turns.collect(), budget: ByteBudget::new(total_bytes) }
    }

    /// Whether each answer of the API may be large, and can be put together to see whether it is.
    pub(super) fn are_at_once(key: ApiKey) -> bool {
        AT_ONCE.contains(&key)
    }

    /// Whether each answer of the API may be large, and many that are not complete would take
    /// memory.
    pub(super) fn are_in_parts(key: ApiKey) -> bool {
        IN_PARTS.contains(&key)
    }

    /// A turn to put an answer together; `None` for an API whose answers are in proportion to their
    /// requests.
    pub(super) async fn turn(&self, key: ApiKey) -> Option<OwnedSemaphorePermit> {
        let turns = self.turns_of(key)?;
        Some(turns.acquire_owned().await.expect("the semaphore is never closed"))
    }

    /// The same, if nobody has to be waited for.
    pub(super) fn free_turn(&self, key: ApiKey) -> Option<OwnedSemaphorePermit> {
        self.turns_of(key)?.try_acquire_owned().ok()
    }

    fn turns_of(&self, key: ApiKey) -> Option<Arc<Semaphore>> {
        self.turns.iter().find(|(api, _)| *api == key).map(|(_, turns)| turns.clone())
    }

    /// Have the bytes of an answer counted until it has been written.
    pub(super) async fn count(&self, answer: &mut Response) {
        if answer.len_bytes() > SMALL_BYTES {
            answer.budgets.push(self.room(answer.len_bytes()).await);
        }
    }

    /// Room for so many bytes.
    pub(super) async fn room(&self, bytes: usize) -> OwnedSemaphorePermit {
        self.budget.acquire(bytes).await
    }

    pub(crate) fn budget(&self) -> &ByteBudget {
        &self.budget
    }
}
