//! Threads for what may wait.

use std::panic::resume_unwind;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::{JoinError, JoinHandle, JoinSet};

use crate::store::StoreError;

/// File reads at a time, of all late readers and compaction. More would not be faster, and would
/// stand in the disk's queue before the log's writes.
const FILES_AT_A_TIME: usize = 4;

/// Where late reads and compaction run: threads that make way for others
/// ([`alluvium_device::make_way`]), so that who produces has the processor and the disk first; or
/// the runtime that the store was opened in.
pub(crate) struct Background {
    handle: Handle,
    own: Option<Runtime>,
    /// The runtime that the store was opened in.
    ahead: Handle,
}

impl Background {
    /// So many threads of their own, or none.
    pub(crate) fn start(threads: usize) -> Result<Self, StoreError> {
        let ahead = Handle::current();
        if threads == 0 {
            return Ok(Self { handle: ahead.clone(), own: None, ahead });
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .max_blocking_threads(FILES_AT_A_TIME)
            .thread_name("alluvium-late")
            .on_thread_start(make_way)
            .enable_all()
            .build()
            .map_err(|error| StoreError::Failed(format!("threads for late reads: {error}")))?;
        Ok(Self { handle: runtime.handle().clone(), own: Some(runtime), ahead })
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.handle.spawn(task)
    }

    /// Run a task there, until it is done or the future is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        run_on(&self.handle, task).await
    }

    /// Run a task with the others, whoever asks for it.
    pub(crate) fn spawn_ahead<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.ahead.spawn(task)
    }

    /// The same, until the future is dropped.
    pub(crate) async fn run_ahead<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        run_on(&self.ahead, task).await
    }
}

async fn run_on<T: Send + 'static>(
    handle: &Handle,
    task: impl Future<Output = T> + Send + 'static,
) -> Result<T, StoreError> {
    let mut tasks = JoinSet::new();
    tasks.spawn_on(task, handle);
    match tasks.join_next().await.expect("there is one").map_err(JoinError::try_into_panic) {
        Ok(done) => Ok(done),
        Err(Ok(panic)) => resume_unwind(panic),
        Err(Err(cancelled)) => Err(StoreError::Failed(cancelled.to_string())),
    }
}

/// Have the calling thread make way for others.
pub(crate) fn make_way() {
    // It works all the same.
    if let Err(error) = alluvium_device::make_way() {
        tracing::debug!("a thread cannot get a low priority: {error}");
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // The last one to go may be a task, which must not wait.
        if let Some(runtime) = self.own.take() {
            runtime.shutdown_background();
        }
    }
}
