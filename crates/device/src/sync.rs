//! Locks, atomics and threads: the real ones, or with `--cfg loom` those of a model checker, which
//! runs a test in every order of their steps (`cargo xtask loom`). Both have the interface of
//! `parking_lot` and `std`.
//!
//! Public only with `--cfg loom`, for the crates above.

#[cfg(loom)]
mod modelled;

#[cfg(loom)]
pub use modelled::{
    Condvar, Mutex, MutexGuard, OnceLock, WaitTimeoutResult, atomic, thread, thread_local,
};
#[cfg(not(loom))]
pub(crate) use {
    parking_lot::{Condvar, Mutex},
    std::sync::{OnceLock, atomic},
    std::thread,
};
