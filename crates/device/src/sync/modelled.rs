//! loom's types behind the interfaces of `parking_lot` and `std`. They work only inside a model.

use std::ops::{Deref, DerefMut};
use std::time::Instant;

pub use loom::sync::atomic;
pub use loom::{thread, thread_local};

use atomic::{AtomicBool, Ordering};

/// As `parking_lot::Mutex`.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

/// As `parking_lot::MutexGuard`. `None` only while a condition variable holds it.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    /// Creates an unlocked mutex.
    pub fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    /// Locks, blocking until the mutex is free.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect("a model stops at its first panic")))
    }

    /// Locks the mutex if it is free.
    #[track_caller]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard(Some(self.0.try_lock().ok()?)))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("held")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("held")
    }
}

/// As `parking_lot::Condvar`.
#[derive(Debug, Default)]
pub struct Condvar(loom::sync::Condvar);

impl Condvar {
    /// Creates a condition variable.
    pub fn new() -> Self {
        Self::default()
    }

    /// Releases the lock until notified.
    #[track_caller]
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.0.take().expect("held");
        guard.0 = Some(self.0.wait(held).expect("a model stops at its first panic"));
    }

    /// Waits like [`Condvar::wait`]: time does not pass in a model.
    #[track_caller]
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        _until: Instant,
    ) -> WaitTimeoutResult {
        self.wait(guard);
        WaitTimeoutResult(())
    }

    /// Wakes one waiter.
    #[track_caller]
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiters.
    #[track_caller]
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// As `parking_lot::WaitTimeoutResult`.
#[derive(Debug)]
pub struct WaitTimeoutResult(());

impl WaitTimeoutResult {
    /// Always false.
    pub fn timed_out(&self) -> bool {
        false
    }
}

/// As `std::sync::OnceLock`: a reader of the value also sees everything that happened before it was
/// set, and may see the value with a delay.
#[derive(Debug)]
pub struct OnceLock<T> {
    value: std::sync::OnceLock<T>,
    setting: Mutex<()>,
    set: AtomicBool,
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> From<T> for OnceLock<T> {
    fn from(value: T) -> Self {
        let (value, setting, set) = (value.into(), Mutex::new(()), true.into());
        Self { value, setting, set }
    }
}

impl<T> OnceLock<T> {
    /// Creates an empty cell.
    pub fn new() -> Self {
        let (value, setting, set) = (std::sync::OnceLock::new(), Mutex::new(()), false.into());
        Self { value, setting, set }
    }

    /// Returns the value if it is set.
    #[track_caller]
    pub fn get(&self) -> Option<&T> {
        self.set.load(Ordering::Acquire).then(|| self.value.get().expect("set"))
    }

    /// Sets the value, or returns it if the cell is already set.
    #[track_caller]
    pub fn set(&self, value: T) -> Result<(), T> {
        let _setting = self.setting.lock();
        self.value.set(value)?;
        self.set.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns the value, creating it with `init` if the cell is empty.
    #[track_caller]
    pub fn get_or_init(&self, init: impl FnOnce() -> T) -> &T {
        let _setting = self.setting.lock();
        let value = self.value.get_or_init(init);
        self.set.store(true, Ordering::Release);
        value
    }
}
