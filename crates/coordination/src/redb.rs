//! A coordination service in a file. One process hosts it, for itself and for others.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use tokio::sync::{mpsc, oneshot};

use crate::shared::Shared;
use crate::state::{State, Step};
use crate::{
    Changes, Clock, Conflict, Coordination, Entry, Error, Hosted, Identity, Lease, LeaseId, Limits,
    ListRequest, Page, Result, Revision, Transaction,
};

mod file;
mod rows;
#[cfg(test)]
mod tests;

use file::Store;

/// Changes that wait for the thread that writes. With the bound of a transaction they take at most
/// 20 MiB.
const QUEUED_CHANGES: usize = 16;

type Job = Box<dyn FnOnce(&mut Writer) + Send>;

/// A coordination service in a file.
///
/// All keys are in memory too, and reads take them from there. A change is durable in the file
/// before it becomes visible; a thread of its own writes one after the other. After a failed write
/// every operation returns [`Error::Failed`] until the file is opened again.
///
/// Leases end in the next transaction or operation on leases after their time, or in
/// [`Hosted::expire`], which the host calls several times a second. Renewals are
/// not stored: an opening extends each lease by its time to live, so that an outage of the host
/// does not end those that are still renewed.
pub struct RedbCoordination {
    shared: Arc<Shared>,
    identity: Identity,
    clock: Arc<dyn Clock>,
    /// `None` only while it is dropped.
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for RedbCoordination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedbCoordination").finish_non_exhaustive()
    }
}

impl RedbCoordination {
    /// Opens the service in the file at `path`, or creates it there. Blocking.
    ///
    /// # Errors
    /// [`Error::Failed`]: another process has the file open, it is damaged or something else, or a
    /// newer version wrote it.
    pub fn open(path: &Path, limits: Limits, clock: Arc<dyn Clock>) -> Result<Self> {
        let (store, state) = Store::open(path, limits, clock.now())?;
        Self::start(store, state, clock)
    }

    /// Records that the file at `path` was restored from a backup, or is a copy, and returns its
    /// new identity. Blocking.
    ///
    /// The operator calls this once after each restore, before the file is opened again, because a
    /// backup lacks the numbers that were given out after it. The file gets a new store id, the
    /// count of restores grows, revisions and lease numbers continue far above those of the backup,
    /// and the history is dropped, so that every watch lists again.
    ///
    /// # Errors
    /// As [`RedbCoordination::open`].
    pub fn restored(path: &Path) -> Result<Identity> {
        if !path.exists() {
            return Err(Error::Failed(format!("{}: there is no such file", path.display())));
        }
        let (mut store, _) = Store::open(path, Limits::default(), Duration::ZERO)?;
        store.restore()
    }

    #[cfg(test)]
    fn open_backend(backend: impl ::redb::StorageBackend, clock: Arc<dyn Clock>) -> Result<Self> {
        let (store, state) = Store::open_backend(backend, Limits::default(), clock.now())?;
        Self::start(store, state, clock)
    }

    fn start(store: Store, state: State, clock: Arc<dyn Clock>) -> Result<Self> {
        let identity = store.identity();
        let shared = Shared::new(state);
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUED_CHANGES);
        let mut writer = Writer { store, shared: shared.clone(), clock: clock.clone() };
        let thread = std::thread::Builder::new()
            .name("coordination".to_owned())
            .spawn(move || {
                while let Some(job) = queue.blocking_recv() {
                    job(&mut writer);
                }
            })
            .map_err(|error| Error::Failed(format!("cannot start a thread: {error}")))?;
        Ok(Self { shared, identity, clock, jobs: Some(jobs), thread: Some(thread) })
    }

    async fn write<T: Send + 'static>(
        &self,
        plan: impl FnOnce(&State) -> Result<(Option<Step>, T)> + Send + 'static,
    ) -> Result<T> {
        let ended = || "the thread that writes has ended".to_owned();
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |writer| {
            // The caller may have gone; the change is made in any case.
            let _ = answer.send(writer.run(plan));
        });
        let jobs = self.jobs.as_ref().expect("present until the drop");
        jobs.send(job).await.map_err(|_| Error::Unavailable(ended()))?;
        answered.await.map_err(|_| Error::Unknown(ended()))?
    }
}

impl Drop for RedbCoordination {
    /// Ends watches, and waits for the write that is under way. Blocking.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
        self.shared.stop(Error::Unavailable("the service was closed".to_owned()));
    }
}

/// What the thread that writes owns.
struct Writer {
    store: Store,
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
}

impl Writer {
    fn run<T>(&mut self, plan: impl FnOnce(&State) -> Result<(Option<Step>, T)>) -> Result<T> {
        let shared = self.shared.clone();
        shared.change(self.clock.now(), plan, |step| self.take(step))
    }

    /// Stores a step, then makes it visible. The lock of the state is not held while the file is
    /// written; nothing else plans steps.
    fn take(&mut self, step: Step) -> Result<()> {
        let position = self.shared.with(|state| state.position())?;
        if let Err(error) = self.store.write(&step, &position) {
            self.shared.stop(error.clone());
            return Err(error);
        }
        self.shared.apply(step, self.clock.now())
    }
}

#[async_trait]
impl Hosted for RedbCoordination {
    async fn expire(&self) -> Result<()> {
        let over = self.shared.with(|state| state.next_expiry())?;
        if over.is_none_or(|over| self.clock.now() < over) {
            return Ok(());
        }
        self.write(|_| Ok((None, ()))).await
    }
}

#[async_trait]
impl Coordination for RedbCoordination {
    async fn identity(&self) -> Result<Identity> {
        self.shared.with(|_| self.identity)
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
        transaction.check()?;
        let transaction = transaction.clone();
        self.write(move |state| state.plan_commit(&transaction)).await
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, Result<Changes>> {
        self.shared.watch(prefix, after)
    }

    async fn grant(&self, ttl: Duration) -> Result<Lease> {
        self.write(move |state| state.plan_grant(ttl)).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<()> {
        self.shared.with(|state| state.keep_alive(lease, self.clock.now()))?
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        self.write(move |state| state.plan_revoke(lease)).await
    }
}
