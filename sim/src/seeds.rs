//! Running a simulation for many seeds on all processors.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Calls `run` with each of `start..start + count`, on all processors and in no particular order.
/// Stops early once `run` has returned false. `progress` gets the number of seeds that are done.
pub(crate) fn each(
    start: u64,
    count: u64,
    run: impl Fn(u64) -> bool + Sync,
    progress: impl Fn(u64) + Sync,
) {
    let next = AtomicU64::new(0);
    let done = AtomicU64::new(0);
    let stopped = Mutex::new(false);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count || *stopped.lock() {
                        return;
                    }
                    if !run(start + index) {
                        *stopped.lock() = true;
                    }
                    progress(done.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
}
