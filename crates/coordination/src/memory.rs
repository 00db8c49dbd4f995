//! A coordination service in memory, for tests and simulations: deterministic, never pending.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::shared::Shared;
use crate::state::{State, Step};
use crate::{
    Changes, Clock, Conflict, Coordination, Entry, Error, Hosted, Identity, Lease, LeaseId, Limits,
    ListRequest, Page, Result, Revision, Transaction,
};

/// A coordination service in memory.
///
/// Its futures are ready at once, except for those of watches. Leases end in the next transaction
/// or operation on leases after their time, or in [`Hosted::expire`].
pub struct MemoryCoordination {
    shared: Arc<Shared>,
    identity: Identity,
    clock: Arc<dyn Clock>,
    /// Held from the planning of a step until it is applied.
    writer: Mutex<()>,
}

impl std::fmt::Debug for MemoryCoordination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryCoordination").finish_non_exhaustive()
    }
}

impl MemoryCoordination {
    /// Returns a service without keys at revision 0. Its store id is nil, so that simulations are
    /// deterministic.
    #[must_use]
    pub fn new(limits: Limits, clock: Arc<dyn Clock>) -> Self {
        Self::with_identity(limits, clock, Identity { store: Uuid::nil(), restores: 0 })
    }

    /// Returns a service without keys at revision 0, with this identity.
    #[must_use]
    pub fn with_identity(limits: Limits, clock: Arc<dyn Clock>, identity: Identity) -> Self {
        let shared = Shared::new(State::new(limits));
        Self { shared, identity, clock, writer: Mutex::new(()) }
    }

    fn write<T>(&self, plan: impl FnOnce(&State) -> Result<(Option<Step>, T)>) -> Result<T> {
        let _writer = self.writer.lock();
        let now = self.clock.now();
        self.shared.change(now, plan, |step| self.shared.apply(step, now))
    }
}

impl Drop for MemoryCoordination {
    fn drop(&mut self) {
        self.shared.stop(Error::Unavailable("the service was closed".to_owned()));
    }
}

#[async_trait]
impl Hosted for MemoryCoordination {
    async fn expire(&self) -> Result<()> {
        self.write(|_| Ok((None, ())))
    }
}

#[async_trait]
impl Coordination for MemoryCoordination {
    async fn identity(&self) -> Result<Identity> {
        Ok(self.identity)
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>> {
        self.shared.with(|state| state.get(key))?
    }

    async fn list(&self, request: &ListRequest) -> Result<Page> {
        self.shared.with(|state| state.list(request))?
    }

    async fn commit(
        &self,
        transaction: &Transaction,
    ) -> Result<std::result::Result<Revision, Conflict>> {
        self.write(|state| state.plan_commit(transaction))
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, Result<Changes>> {
        self.shared.watch(prefix, after)
    }

    async fn grant(&self, ttl: Duration) -> Result<Lease> {
        self.write(|state| state.plan_grant(ttl))
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<()> {
        self.shared.with(|state| state.keep_alive(lease, self.clock.now()))?
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        self.write(|state| state.plan_revoke(lease))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Fixture};
    use crate::{Change, Guard, ManualClock};

    struct Memory {
        service: MemoryCoordination,
        clock: ManualClock,
    }

    const HISTORY: usize = 200;

    fn new() -> Box<dyn Fixture> {
        let clock = ManualClock::default();
        let limits = Limits { history_revisions: HISTORY, ..Limits::default() };
        let service = MemoryCoordination::new(limits, Arc::new(clock.clone()));
        Box::new(Memory { service, clock })
    }

    #[async_trait]
    impl Fixture for Memory {
        fn service(&self) -> &dyn Coordination {
            &self.service
        }

        async fn advance(&self, by: Duration) {
            self.clock.advance(by);
            self.service.expire().await.unwrap();
        }

        async fn compact(&self) {
            for _ in 0..=HISTORY {
                let changes = vec![Change::put("compaction", "")];
                let transaction = Transaction { guards: Vec::new(), changes };
                self.service.commit(&transaction).await.unwrap().unwrap();
            }
        }
    }

    #[tokio::test]
    async fn the_memory_service_conforms() {
        conformance::run(&new).await;
    }

    fn put(key: &str, value: Vec<u8>) -> Transaction {
        Transaction { guards: Vec::new(), changes: vec![Change::put(key, value)] }
    }

    #[tokio::test]
    async fn a_full_service_refuses_growth_and_allows_deletion() {
        let limits = Limits { state_bytes: 1000, ..Limits::default() };
        let service = MemoryCoordination::new(limits, Arc::new(ManualClock::default()));
        service.commit(&put("a", vec![0; 800])).await.unwrap().unwrap();
        let answer = service.commit(&put("b", vec![0; 100])).await;
        assert!(matches!(answer, Err(Error::Full(_))), "{answer:?}");
        assert_eq!(service.get("b").await.unwrap(), None);
        service.commit(&put("a", vec![0; 500])).await.unwrap().unwrap();
        service.commit(&put("b", vec![0; 100])).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn the_history_is_bounded_by_bytes_and_keeps_the_newest_revision() {
        let limits = Limits { history_bytes: 10_000, ..Limits::default() };
        let service = MemoryCoordination::new(limits, Arc::new(ManualClock::default()));
        for _ in 0..20 {
            service.commit(&put("a", vec![0; 1000])).await.unwrap().unwrap();
        }
        let list = |at| ListRequest { at: Some(Revision(at)), ..ListRequest::new("") };
        // Each revision but the first has 2,129 bytes, so that four of them are kept.
        assert!(service.list(&list(16)).await.is_ok());
        let answer = service.list(&list(15)).await;
        assert!(matches!(answer, Err(Error::Compacted { .. })), "{answer:?}");
        service.commit(&put("b", vec![0; 20_000])).await.unwrap().unwrap();
        assert!(service.list(&list(20)).await.is_ok());
        assert!(service.list(&list(19)).await.is_err());
    }

    #[tokio::test]
    async fn a_watch_ends_with_its_service() {
        use futures::StreamExt as _;
        let service = MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default()));
        let mut watch = service.watch("", Revision(0));
        drop(service);
        let end = watch.next().await.unwrap();
        assert!(matches!(end, Err(Error::Unavailable(_))), "{end:?}");
        assert!(watch.next().await.is_none());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn increments_of_several_threads_all_count() {
        let clock = Arc::new(ManualClock::default());
        let service = Arc::new(MemoryCoordination::new(Limits::default(), clock));
        let tasks = (0..4).map(|_| {
            let service = service.clone();
            tokio::spawn(async move {
                let mut done = 0;
                while done < 250 {
                    let entry = service.get("n").await.unwrap();
                    let count = entry.as_ref().map_or(0, |entry| entry.value.len());
                    let guards =
                        vec![Guard::unchanged("n", entry.as_ref().map(|entry| entry.modified))];
                    let changes = vec![Change::put("n", vec![0; count + 1])];
                    let transaction = Transaction { guards, changes };
                    done += usize::from(service.commit(&transaction).await.unwrap().is_ok());
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        assert_eq!(service.get("n").await.unwrap().unwrap().value.len(), 1000);
    }
}
