//! Suites that are programs of their own: they report in TAP, or cannot run on this machine.

use std::process::{ChildStdin, Command, ExitStatus};
use std::time::Duration;

use crate::Error;
use crate::exec::{converse, follow};
use crate::report::{Case, Tap};
use crate::setup::Missing;

/// Far above the duration of any suite: it keeps a suite that hangs from blocking the rest.
pub(crate) const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Runs a program that reports in TAP.
pub(crate) fn tap(name: &str, command: &mut Command) -> Result<Vec<Case>, Error> {
    let mut tap = Tap::default();
    let status = follow(command, LIMIT, |line| tap.line(line))?;
    Ok(ended(name, tap, status))
}

/// Runs a program that reports in TAP and makes requests in lines of its output, which are answered
/// on its input.
pub(crate) fn tap_that_asks(
    name: &str,
    command: &mut Command,
    mut on_line: impl FnMut(&str, &mut ChildStdin) -> Result<(), Error>,
) -> Result<Vec<Case>, Error> {
    let mut tap = Tap::default();
    let status = converse(command, LIMIT, |line, input| {
        tap.line(line);
        on_line(line, input)
    })?;
    Ok(ended(name, tap, status))
}

fn ended(name: &str, tap: Tap, status: ExitStatus) -> Vec<Case> {
    let mut cases = tap.finish(name);
    if !status.success() && !cases.iter().any(Case::has_failed) {
        cases.push(Case::failed(name, status));
    }
    cases
}

/// Turns a suite that cannot run here into a skipped case.
pub(crate) fn skip_if_missing(
    name: &str,
    result: Result<Vec<Case>, Missing>,
) -> Result<Vec<Case>, Error> {
    match result {
        Ok(cases) => Ok(cases),
        Err(Missing::NotAllowed(reason)) => {
            println!("skipped - {name}: {reason}");
            Ok(vec![Case::skipped(name, reason)])
        }
        Err(Missing::Failed(error)) => {
            println!("not ok - {name}: {error}");
            Err(error)
        }
    }
}
