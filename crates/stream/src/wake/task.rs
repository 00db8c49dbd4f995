//! The task that wakes waiters.

use std::future::pending;
use std::sync::Arc;

use alluvium_wal::Space;

use super::notify;
use crate::shared::Shared;

/// Runs the waking task. Ends when the WAL has failed.
pub(crate) async fn run(shared: Arc<Shared>) {
    let wakes = &shared.wakes;
    let mut space: Option<Space> = None;
    loop {
        if let Some(future) = wakes.wal_space.lock().future.take() {
            space = Some(future);
        }
        let first = wakes.first();
        let durable = async {
            match first {
                Some(at) => shared.wal.wait_durable(at).await,
                None => pending().await,
            }
        };
        let has_space = async {
            match &mut space {
                Some(space) => space.await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = wakes.changed.notified() => {}
            result = durable => match result {
                Ok(()) => wake_durable(&shared),
                Err(error) => return shared.fail(error.into()),
            },
            () = has_space => {
                space = None;
                // Before the gate opens: an append that fails after this must register again.
                wakes.wal_space.lock().waiting = false;
                shared.space.open();
            }
        }
    }
}

fn wake_durable(shared: &Shared) {
    let durable = shared.wal.durable();
    for stream in shared.wakes.take_durable(durable) {
        {
            let mut tail = stream.tail.lock();
            let next = if tail.watchers.is_empty() { None } else { tail.next_durable(durable) };
            tail.wake_queued = next.is_some();
            if let Some(next) = next {
                shared.wakes.queue(next, stream.clone());
            }
        }
        notify(&stream.watchers());
    }
}
