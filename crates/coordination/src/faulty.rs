//! A service with faults by seed, for tests of what uses the trait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use tokio::task::yield_now;

use crate::{
    Change, Changes, Conflict, Coordination, Entry, Error, Hosted, Identity, Lease, LeaseId,
    ListRequest, Page, Result, Revision, Transaction,
};

/// How many of 1,000 operations meet each fault.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// The operation fails with [`Error::Unavailable`] and changes nothing.
    pub refused: u64,
    /// A change fails with [`Error::Unknown`] and is not applied.
    pub lost: u64,
    /// A change is applied, and fails with [`Error::Unknown`].
    pub unanswered: u64,
    /// A transaction fails with [`Error::Unknown`] and is applied before one of the next
    /// operations, if its guards hold then.
    pub late: u64,
    /// A lease ends before the operation that names it.
    pub expired: u64,
    /// An operation or an event of a watch waits until the task's other futures have run.
    pub delayed: u64,
    /// A watch ends with [`Error::Compacted`], as that of a slow watcher.
    pub cut_off: u64,
}

impl Faults {
    /// Every fault, each about once in ten operations.
    pub const ALL: Self = Self {
        refused: 60,
        lost: 100,
        unanswered: 100,
        late: 100,
        expired: 40,
        delayed: 300,
        cut_off: 50,
    };
}

/// Another service with faults. On one thread the faults depend on the seed alone.
#[derive(Debug)]
pub struct Faulty<S> {
    inner: S,
    faults: Faults,
    random: Mutex<Random>,
    /// Transactions that are applied before the operation that makes their counter 0.
    late: Mutex<Vec<(u64, Transaction)>>,
    applied_late: AtomicU64,
}

impl<S: Coordination> Faulty<S> {
    /// Returns `inner` with faults.
    pub fn new(inner: S, faults: Faults, seed: u64) -> Self {
        let (random, late) = (Mutex::new(Random(seed)), Mutex::default());
        Self { inner, faults, random, late, applied_late: AtomicU64::new(0) }
    }

    /// Returns the service without faults.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Returns how many transactions were applied late.
    pub fn applied_late(&self) -> u64 {
        self.applied_late.load(Ordering::Relaxed)
    }

    /// Applies the transactions that are still late.
    ///
    /// # Errors
    /// Those of [`Coordination::commit`].
    pub async fn settle(&self) -> Result<()> {
        let late = std::mem::take(&mut *self.late.lock());
        self.apply(late).await
    }

    async fn apply(&self, late: Vec<(u64, Transaction)>) -> Result<()> {
        for (_, transaction) in late {
            match self.inner.commit(&transaction).await {
                Ok(Ok(_)) => drop(self.applied_late.fetch_add(1, Ordering::Relaxed)),
                Ok(Err(_)) | Err(Error::LeaseNotFound(_) | Error::Full(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn meets(&self, per_mille: u64) -> bool {
        self.random.lock().next() % 1000 < per_mille
    }

    /// Begins an operation: applies what is due, and may refuse the operation.
    async fn begin(&self) -> Result<()> {
        while self.meets(self.faults.delayed) {
            yield_now().await;
        }
        let due = {
            let mut late = self.late.lock();
            late.iter_mut().for_each(|one| one.0 -= 1);
            late.extract_if(.., |one| one.0 == 0).collect()
        };
        self.apply(due).await?;
        match self.meets(self.faults.refused) {
            true => Err(Error::Unavailable("a fault refused the operation".to_owned())),
            false => Ok(()),
        }
    }

    async fn begin_with(&self, lease: Option<LeaseId>) -> Result<()> {
        if let Some(lease) = lease
            && self.meets(self.faults.expired)
        {
            match self.inner.revoke(lease).await {
                Ok(()) | Err(Error::LeaseNotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.begin().await
    }

    async fn change<T>(&self, change: impl Future<Output = Result<T>>) -> Result<T> {
        if self.meets(self.faults.lost) {
            return Err(Error::Unknown("a fault lost the change".to_owned()));
        }
        let answer = change.await?;
        match self.meets(self.faults.unanswered) {
            true => Err(Error::Unknown("a fault lost the answer".to_owned())),
            false => Ok(answer),
        }
    }
}

#[async_trait]
impl<S: Hosted> Hosted for Faulty<S> {
    async fn expire(&self) -> Result<()> {
        self.inner.expire().await
    }
}

#[async_trait]
impl<S: Coordination> Coordination for Faulty<S> {
    async fn identity(&self) -> Result<Identity> {
        self.begin().await?;
        self.inner.identity().await
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>> {
        self.begin().await?;
        self.inner.get(key).await
    }

    async fn list(&self, request: &ListRequest) -> Result<Page> {
        self.begin().await?;
        self.inner.list(request).await
    }

    async fn commit(
        &self,
        transaction: &Transaction,
    ) -> Result<std::result::Result<Revision, Conflict>> {
        let lease = transaction.changes.iter().find_map(|change| match change {
            Change::Put { lease, .. } => *lease,
            Change::Delete(_) => None,
        });
        self.begin_with(lease).await?;
        if self.meets(self.faults.late) {
            let after = 1 + self.random.lock().next() % 8;
            self.late.lock().push((after, transaction.clone()));
            return Err(Error::Unknown("a fault delayed the change".to_owned()));
        }
        self.change(self.inner.commit(transaction)).await
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, Result<Changes>> {
        let watch = self.inner.watch(prefix, after);
        let random = Random(self.random.lock().next());
        let faults = self.faults;
        stream::try_unfold((watch, random, after), move |state| async move {
            let (mut watch, mut random, at) = state;
            while random.next() % 1000 < faults.delayed {
                yield_now().await;
            }
            if random.next() % 1000 < faults.cut_off {
                return Err(Error::Compacted { asked: at, oldest: at.next() });
            }
            let Some(changes) = watch.try_next().await? else { return Ok(None) };
            let at = changes.revision;
            Ok(Some((changes, (watch, random, at))))
        })
        .boxed()
    }

    async fn grant(&self, ttl: Duration) -> Result<Lease> {
        self.begin().await?;
        self.change(self.inner.grant(ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<()> {
        self.begin_with(Some(lease)).await?;
        self.inner.keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        self.begin().await?;
        self.change(self.inner.revoke(lease)).await
    }
}

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests;
