//! A stand-in for `arc_swap`, whose own atomics a model checker does not know. It has the same
//! guarantees: a load returns the value stored last, which is not freed as long as the [`Guard`]
//! exists, and the loading thread sees what happened before the store. It uses a lock instead of
//! debts, so a store also sees preceding loads; what readers do between a load and the end of its
//! guard is ordered only by the count of the [`Arc`], as in `arc_swap`.

use std::ops::Deref;

use alluvium_device::sync::Mutex;
use loom::sync::Arc;

/// As `arc_swap::ArcSwapAny`.
pub(crate) struct ArcSwapAny<T>(Mutex<T>);

/// As `arc_swap::ArcSwap`.
pub(crate) type ArcSwap<T> = ArcSwapAny<Arc<T>>;
/// As `arc_swap::ArcSwapOption`.
pub(crate) type ArcSwapOption<T> = ArcSwapAny<Option<Arc<T>>>;

/// As `arc_swap::Guard`.
pub(crate) struct Guard<T>(T);

impl<T> Deref for Guard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Clone> ArcSwapAny<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub(crate) fn load(&self) -> Guard<T> {
        Guard(self.load_full())
    }

    pub(crate) fn load_full(&self) -> T {
        self.0.lock().clone()
    }

    pub(crate) fn store(&self, value: T) {
        drop(self.swap(value));
    }

    pub(crate) fn swap(&self, value: T) -> T {
        std::mem::replace(&mut *self.0.lock(), value)
    }
}

impl<T> ArcSwapOption<T> {
    pub(crate) fn empty() -> Self {
        Self::new(None)
    }

    pub(crate) fn compare_and_swap(
        &self,
        current: &Option<Arc<T>>,
        new: Option<Arc<T>>,
    ) -> Guard<Option<Arc<T>>> {
        let mut value = self.0.lock();
        let is_current = match (&*value, current) {
            (Some(value), Some(current)) => Arc::ptr_eq(value, current),
            (value, current) => value.is_none() && current.is_none(),
        };
        let was = match is_current {
            true => std::mem::replace(&mut *value, new),
            false => value.clone(),
        };
        Guard(was)
    }
}
