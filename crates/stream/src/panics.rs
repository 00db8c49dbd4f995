//! Panics of code that reads untrusted bytes and changes nothing that others see.
//!
//! A server ends when a thread of it panics, since nobody knows then what is true in memory (see
//! docs/decisions/0015-a-panic-ends-the-server.md). The exception is declared here.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Run `work`, and turn a panic into an error with its text. `work` must not leave anything half
/// changed that is used afterwards.
///
/// # Errors
/// `work` has panicked.
pub fn contained<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    /// Also counts down when an unwinding passes it.
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

/// Whether this thread runs in [`contained`]: a panic now is an error of who contains it.
pub fn is_contained() -> bool {
    // Without a value while the thread ends: nothing is contained then.
    DEPTH.try_with(Cell::get).unwrap_or(0) > 0
}

/// What a panic says.
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
