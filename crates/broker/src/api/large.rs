//! Answers that may be large however small the request is: about all topics, all groups, all settings.
//!
//! They are held in memory until their clients have taken them, for which these have half a minute. So their bytes are bounded over all
//! connections, and few of an API are put together at the same time. Each API has turns of its own: who waits for the bytes
//! of one makes nobody wait for another. What members of a group have for one another exists already, so it is counted before it is encoded ([`Context::make_room`]).
//!
//! [`Context::make_room`]: super::Context::make_room

use kafka_protocol::messages::ApiKey;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::server::ByteBudget;
use crate::wire::response::Response;

/// Answers up to this size are not counted: the bound on connections bounds them.
pub(super) const SMALL_BYTES: usize = 256 << 10;

/// Answers of one API that are put together, or wait for bytes, at the same time.
const CONCURRENT: usize = 8;

const APIS: [ApiKey; 16] = [
    ApiKey::Metadata,
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

pub(crate) struct LargeAnswers {
    turns: Vec<(ApiKey, Semaphore)>,
    budget: ByteBudget,
}

impl LargeAnswers {
    pub(crate) fn new(total_bytes: u64) -> Self {
        let turns = APIS.map(|api| (api, Semaphore::new(CONCURRENT)));
        Self { turns: turns.into(), budget: ByteBudget::new(total_bytes) }
    }

    /// A turn to put an answer together; `None` for an API whose answers are in proportion to their requests.
    pub(super) async fn turn(&self, key: ApiKey) -> Option<SemaphorePermit<'_>> {
        let (_, turns) = self.turns.iter().find(|(api, _)| *api == key)?;
        Some(turns.acquire().await.expect("the semaphore is never closed"))
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

    #[cfg(test)]
    pub(crate) fn budget(&self) -> &ByteBudget {
        &self.budget
    }
}
