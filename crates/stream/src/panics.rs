//! Panics of code that reads untrusted bytes and changes no shared state.
//!
//! A server ends when one of its threads panics, since memory may be inconsistent then (see
//! docs/decisions/0015-a-panic-ends-the-server.md). The exception is declared here.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Runs `work` and turns a panic into an error with its text. `work` must not leave anything that
/// is used afterwards half changed.
///
/// # Errors
/// `work` has panicked.
pub fn contained<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    /// Also counts down on unwinding.
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    DEPTH.set(DEPTH.get() + 1);
    let inside = Inside;
    let outcome = catch_unwind(AssertUnwindSafe(work));
    drop(inside);
    outcome.map_err(|panic| text(&*panic).to_owned())
}

/// Whether this thread runs in [`contained`], so that a panic becomes an error of its caller.
pub fn is_contained() -> bool {
    // The value is gone while the thread ends: nothing is contained then.
    DEPTH.try_with(Cell::get).unwrap_or(0) > 0
}

/// Returns the message of a panic.
pub fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containment_ends_with_its_work() {
        assert!(!is_contained());
        let nested = || contained(|| -> () { panic!("inner") });
        let outcome = contained(|| (nested(), is_contained()));
        assert_eq!(outcome, Ok((Err("inner".to_owned()), true)));
        assert!(!is_contained());
    }
}
