//! Locks, atomics and threads: the real ones, or with `--cfg loom` those of a model checker (`cargo
//! xtask loom`).

#[cfg(loom)]
pub(crate) use alluvium_device::sync::{Condvar, Mutex, OnceLock, atomic, thread, thread_local};
#[cfg(not(loom))]
pub(crate) use {
    parking_lot::{Condvar, Mutex},
    std::sync::{OnceLock, atomic},
    std::{thread, thread_local},
};
