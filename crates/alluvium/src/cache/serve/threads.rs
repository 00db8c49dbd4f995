//! A check that the system provides the server's threads, which the runtime assumes.

use std::io;
use std::num::NonZero;
use std::sync::RwLock;
use std::thread;

use crate::output::Failure;

/// The minimum of blocking threads: with one, blocking requests run one after the other.
const MIN_BLOCKING: usize = 1;

/// Checks that the runtime can start its threads, one for each processor, and one blocking thread:
/// it panics if it cannot.
///
/// # Errors
/// The threads cannot be started.
pub(super) fn check() -> Result<(), Failure> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get) + MIN_BLOCKING;
    start_concurrently(threads, thread::Builder::new).map_err(|error| {
        Failure::Failed(format!(
            "cannot start {threads} threads, which are needed in addition to those of the cache: \
             {error}; raise the limit (ulimit -u, or pids.max of the cgroup)"
        ))
    })
}

/// Starts this many threads, and ends them when all of them run.
fn start_concurrently(threads: usize, new: impl Fn() -> thread::Builder) -> io::Result<()> {
    let gate = RwLock::new(());
    thread::scope(|scope| {
        let _closed = gate.write();
        (0..threads).try_for_each(|_| new().spawn_scoped(scope, || drop(gate.read())).map(drop))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_threads_are_reported() {
        check().unwrap();
        start_concurrently(20, thread::Builder::new).unwrap();
        // There is no memory for such a stack; and the first threads end.
        let mut left = 3;
        let left = std::cell::Cell::from_mut(&mut left);
        let new = || {
            left.set(left.get() - 1);
            match left.get() {
                0 => thread::Builder::new().stack_size(1 << 60),
                _ => thread::Builder::new(),
            }
        };
        start_concurrently(3, new).unwrap_err();
    }
}
