//! What all campaigns share: running a simulation for many seeds on all processors, its progress,
//! and the simulations that found a defect.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Seeds between two lines of progress.
const PROGRESS_SEEDS: u64 = 1000;

/// A simulation that found a defect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The defect.
    pub what: String,
    /// The command that replays the simulation.
    pub replay: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}\nreplay: {}", self.seed, self.what, self.replay)
    }
}

/// Returns a function that prints the progress of `count` seeds, given how many are done.
pub fn print_progress(count: u64) -> impl Fn(u64) + Sync {
    let started = Instant::now();
    move |done: u64| {
        if done.is_multiple_of(PROGRESS_SEEDS) {
            println!("{done} of {count} seeds, {:.1} s", started.elapsed().as_secs_f64());
        }
    }
}

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
    let is_stopped = AtomicBool::new(false);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count || is_stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    if !run(start + index) {
                        is_stopped.store(true, Ordering::Relaxed);
                    }
                    progress(done.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
}
