//! Threads for background work.

use std::panic::resume_unwind;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::{JoinError, JoinHandle, JoinSet};

use crate::error::StoreError;

/// Concurrent file reads of all lagging readers and object compaction. More would not be faster and
/// would fill the disk's queue ahead of the log's writes.
const FILES_AT_A_TIME: usize = 4;

/// The runtime of cold reads and object compaction: either threads of low priority
/// ([`alluvium_device::lower_thread_priority`]), so that producers get the processor and the disk
/// first, or the runtime in which the store was opened.
pub(crate) struct Background {
    handle: Handle,
    own: Option<Runtime>,
    /// The runtime in which the store was opened.
    normal: Handle,
}

impl Background {
    /// Starts this number of threads, or uses the current runtime for 0.
    pub(crate) fn start(threads: usize) -> Result<Self, StoreError> {
        let normal = Handle::current();
        if threads == 0 {
            return Ok(Self { handle: normal.clone(), own: None, normal });
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .max_blocking_threads(FILES_AT_A_TIME)
            .thread_name("alluvium-cold")
            .on_thread_start(lower_priority)
            .enable_all()
            .build()
            .map_err(|error| {
                StoreError::Failed(format!("cannot start threads for cold reads: {error}"))
            })?;
        Ok(Self { handle: runtime.handle().clone(), own: Some(runtime), normal })
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.handle.spawn(task)
    }

    /// Runs a task in the background until it is done or the future is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        run_on(&self.handle, task).await
    }

    /// Spawns a task at normal priority, also when called from a background thread.
    pub(crate) fn spawn_normal<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.normal.spawn(task)
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

/// Lowers the priority of the calling thread.
pub(crate) fn lower_priority() {
    // It works without a low priority, too.
    if let Err(error) = alluvium_device::lower_thread_priority() {
        tracing::debug!("cannot lower the priority of a thread: {error}");
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // The last owner may be a task, which must not block.
        if let Some(runtime) = self.own.take() {
            runtime.shutdown_background();
        }
    }
}
