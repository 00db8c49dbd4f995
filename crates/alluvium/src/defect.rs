//! A panic anywhere in a server ends its process; see
//! docs/decisions/0015-a-panic-ends-the-server.md.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::thread;

use alluvium_stream::panics;

use crate::log_queue::{LAST_LINES, LogQueue};

/// Exit code of a server that ended because of a panic.
pub(crate) const EXIT_CODE: i32 = 4;

/// Installs a hook by which a panic on any thread is logged and ends the process, before the stack
/// unwinds and the thread's locks are released. Code that runs in [`panics::contained`] is exempt.
pub(crate) fn end_process_on_panic(log: &'static LogQueue) {
    panic::set_hook(Box::new(move |panic| {
        if panics::is_contained() {
            return;
        }
        log.put(describe(panic).as_bytes());
        // Returns without success if the log cannot be written, or if this is the thread that
        // writes it.
        log.flush(LAST_LINES);
        std::process::exit(EXIT_CODE);
    }));
}

fn describe(panic: &PanicHookInfo<'_>) -> String {
    let thread = thread::current();
    let name = thread.name().unwrap_or("unnamed");
    let text = panics::text(panic.payload());
    let location = panic.location().map(|it| format!(" at {it}")).unwrap_or_default();
    let backtrace = Backtrace::capture();
    let backtrace = match backtrace.status() {
        BacktraceStatus::Captured => format!("\n{backtrace}"),
        _ => String::new(),
    };
    format!(
        "error: a defect ended the server: thread {name} panicked{location}: {text}. No \
         acknowledged record is lost; the next start recovers{backtrace}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Child, Command, Stdio};

    use super::*;

    const CASE: &str = "ALLUVIUM_TEST_PANIC";

    /// Runs in a separate process that the other tests start.
    #[test]
    #[ignore = "ends the process; the other tests of this module start it"]
    fn child() {
        let case = std::env::var(CASE).expect("the parent process sets it");
        let log = crate::log_queue::start().unwrap();
        end_process_on_panic(log);
        if case == "with a blocked log" {
            // More than a pipe holds.
            (0..100).for_each(|_| log.put(&[b'x'; 8 << 10]));
        }
        match case.as_str() {
            "contained" => {
                let outcome = panics::contained(|| -> () { panic!("an expected one") });
                assert_eq!(outcome, Err("an expected one".to_owned()));
                std::process::exit(0);
            }
            "task" => {
                let runtime = tokio::runtime::Runtime::new().unwrap();
                runtime.block_on(async {
                    let _ = tokio::spawn(async { panic!("in a task") }).await;
                });
            }
            _ => {
                let _ = thread::spawn(|| panic!("in a thread")).join();
            }
        }
        // Not reached: the process has ended.
        std::process::exit(0);
    }

    fn start(case: &str) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "defect::tests::child"]);
        command.env(CASE, case).env_remove("RUST_BACKTRACE");
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn ended(case: &str) -> (Option<i32>, String) {
        let output = start(case).wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }

    #[test]
    fn a_panic_on_any_thread_ends_the_process_and_is_logged() {
        for (case, text) in [("thread", "in a thread"), ("task", "in a task")] {
            let (code, log) = ended(case);
            assert_eq!(code, Some(EXIT_CODE), "{log}");
            assert!(log.starts_with("error: a defect ended the server: thread "), "{log}");
            assert!(log.contains(&format!(": {text}. ")), "{log}");
            assert!(log.contains("defect.rs:"), "{log}");
        }
    }

    #[test]
    fn a_panic_ends_the_process_even_if_its_log_is_blocked() {
        let mut child = start("with a blocked log");
        assert_eq!(child.wait().unwrap().code(), Some(EXIT_CODE));
        // The log was blocked: the pipe is full, and the last line was not written.
        let mut log = String::new();
        child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        assert!(log.len() >= 60 << 10 && !log.contains("a defect"), "{}", log.len());
    }

    #[test]
    fn a_contained_panic_is_an_error_of_its_caller() {
        assert_eq!(ended("contained"), (Some(0), String::new()));
    }
}
