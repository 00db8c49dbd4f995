//! Locks and atomics: the real ones, or with `--cfg loom` those of a model checker (`cargo xtask loom`).

#[cfg(loom)]
pub(crate) use alluvium_device::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(loom))]
pub(crate) use {
    parking_lot::{Mutex, MutexGuard},
    std::sync::atomic,
};
