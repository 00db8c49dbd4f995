//! Locks, atomics and reference counting: the real ones, or with `--cfg loom` those of a model
//! checker (`cargo xtask loom`).

#[cfg(loom)]
mod modelled;

#[cfg(loom)]
pub(crate) use {
    alluvium_device::sync::{Condvar, Mutex, MutexGuard, atomic},
    loom::sync::Arc,
    modelled::{ArcSwap, ArcSwapOption, Guard},
};
#[cfg(not(loom))]
pub(crate) use {
    arc_swap::{ArcSwap, ArcSwapOption, Guard},
    parking_lot::{Condvar, Mutex, MutexGuard},
    std::sync::{Arc, atomic},
};
