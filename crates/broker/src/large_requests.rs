//! Threads for large requests.
//!
//! Checking, decoding, handling and answering a request takes up to a few microseconds for each
//! array element, without a point at which the thread could do something else. On a thread that
//! serves connections, a request of a million elements would delay all other requests of that
//! thread for seconds.

use std::num::NonZero;
use std::panic::resume_unwind;

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

/// Requests with at most this many array elements are handled on the threads that serve
/// connections.
pub(crate) const MAX_SERVED_ELEMENTS: usize = 8_192;

/// Requests of at most this many bytes, without their batches, are checked against their shape on
/// the threads that serve connections: that takes up to about ten nanoseconds per byte.
pub(crate) const MAX_SERVED_BYTES: usize = 256 << 10;

/// The threads on which larger requests are handled: half as many as processors, so that the other
/// processors remain for the threads that serve connections. A request that waits holds no thread.
pub(crate) struct LargeRequests {
    /// `None` only during the drop.
    runtime: Option<Runtime>,
}

impl LargeRequests {
    /// Starts the threads.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub(crate) fn start() -> std::io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(Self::threads())
            .thread_name("alluvium-large")
            .enable_all()
            .build()?;
        Ok(Self { runtime: Some(runtime) })
    }

    /// The number of threads.
    pub(crate) fn threads() -> usize {
        std::thread::available_parallelism().map_or(1, NonZero::get).div_ceil(2)
    }

    /// Runs `handling` on these threads until it is done or the returned future is dropped. A panic
    /// continues in the caller.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        handling: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let runtime = self.runtime.as_ref().expect("it is not being dropped");
        let mut tasks = JoinSet::new();
        tasks.spawn_on(handling, runtime.handle());
        let handled = tasks.join_next().await.expect("there is one task");
        // The task is not cancelled while this future exists, so the error is a panic.
        handled.unwrap_or_else(|error| resume_unwind(error.into_panic()))
    }
}

impl Drop for LargeRequests {
    fn drop(&mut self) {
        // The last owner of the server may be a task, which must not block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
