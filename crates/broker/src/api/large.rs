//! Answers that may be large: because the request is, or however small the request is, about all topics, all groups, all settings.
//!
//! They are held in memory until their clients have taken them, for which these have half a minute. So their bytes are bounded over all
//! connections, and of the second kind few of an API are put together at the same time. Each API has turns of its own: who waits for the bytes
//! of one makes nobody wait for another. What members of a group have for one another exists already, so it is counted before it is encoded ([`Context::make_room`]).
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

/// Those of which each answer may be large.
const ALWAYS: [ApiKey; 15] = [
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
    ApiKey::ConsumerGroupDescribe,
    ApiKey::ShareGroupDescribe,
    ApiKey::DescribeShareGroupOffsets,
    ApiKey::ListConfigResources,
];

/// Those of which the handler sees in the request whether the answer may be.
const SOMETIMES: [ApiKey; 2] = [ApiKey::Metadata, ApiKey::CreateTopics];

pub(crate) struct LargeAnswers {
    turns: Vec<(ApiKey, Arc<Semaphore>)>,
    budget: ByteBudget,
}

impl LargeAnswers {
    pub(crate) fn new(total_bytes: u64) -> Self {
        let apis = ALWAYS.into_iter().chain(SOMETIMES);
        let turns = apis.map(|api| (api, Arc::new(Semaphore::new(CONCURRENT))));
        Self { turns: turns.collect(), budget: ByteBudget::new(total_bytes) }
    }

    /// Whether each answer of the API may be large.
    pub(super) fn are_always(key: ApiKey) -> bool {
        ALWAYS.contains(&key)
    }

    /// A turn to put an answer together; `None` for an API whose answers are in proportion to their requests.
    pub(super) async fn turn(&self, key: ApiKey) -> Option<OwnedSemaphorePermit> {
        let (_, turns) = self.turns.iter().find(|(api, _)| *api == key)?;
        Some(turns.clone().acquire_owned().await.expect("the semaphore is never closed"))
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
