//! loom's types behind the interfaces of `parking_lot` and `std`. They work inside of a model only.

use std::ops::{Deref, DerefMut};
use std::time::Instant;

pub use loom::sync::atomic;
pub use loom::{thread, thread_local};

use atomic::{AtomicBool, Ordering};

/// As `parking_lot::Mutex`.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

/// As `parking_lot::MutexGuard`. `None` only while a condition variable has it.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    /// Unlocked.
    pub fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    /// Block until it is free, and take it.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect("a model stops at its first panic")))
    }

    /// Take it if it is free.
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
    /// Nobody waits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Give the lock up until notified.
    #[track_caller]
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.0.take().expect("held");
        guard.0 = Some(self.0.wait(held).expect("a model stops at its first panic"));
    }

    /// As [`Condvar::wait`]: no time passes in a model.
    #[track_caller]
    pub fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        _until: Instant,
    ) -> WaitTimeoutResult {
        self.wait(guard);
        WaitTimeoutResult(())
    }

    /// Wake one.
    #[track_caller]
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wake all.
    #[track_caller]
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// As `parking_lot::WaitTimeoutResult`.
#[derive(Debug)]
pub struct WaitTimeoutResult(());

impl WaitTimeoutResult {
    /// Never.
    pub fn timed_out(&self) -> bool {
        false
    }
}

/// As `std::sync::OnceLock`: whoever sees the value sees what happened before it was set, and it
/// need not be seen at once.
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
    /// Empty.
    pub fn new() -> Self {
        let (value, setting, set) = (std::sync::OnceLock::new(), Mutex::new(()), false.into());
        Self { value, setting, set }
    }

    /// The value, if it is set.
    #[track_caller]
    pub fn get(&self) -> Option<&T> {
        self.set.load(Ordering::Acquire).then(|| self.value.get().expect("set"))
    }

    /// Set it, or hand the value back if it is set.
    #[track_caller]
    pub fn set(&self, value: T) -> Result<(), T> {
        let _setting = self.setting.lock();
        self.value.set(value)?;
        self.set.store(true, Ordering::Release);
        Ok(())
    }

    /// The value, which `init` makes if there is none.
    #[track_caller]
    pub fn get_or_init(&self, init: impl FnOnce() -> T) -> &T {
        let _setting = self.setting.lock();
        let value = self.value.get_or_init(init);
        self.set.store(true, Ordering::Release);
        value
    }
}
