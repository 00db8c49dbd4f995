//! The gate: what a change must pass before anything else looks at it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::Error;
use crate::bench::journal;
use crate::exec::{cargo, describe, each_line, follow, output};
use crate::report::{CargoTests, Case, Report};
use crate::tidy;

/// Longer than any step takes on a slow machine from a fresh clone.
const STEP_LIMIT: Duration = Duration::from_secs(45 * 60);

/// What must not be among the dependencies of the log.
const RUNTIMES: [&str; 6] = ["async-io", "async-std", "futures-executor", "mio", "smol", "tokio"];

/// Format, lints, documentation, dependencies, tests; then a look at whether any of it has changed
/// the work tree.
pub(crate) fn run(root: &Path) -> Result<Report, Error> {
    let before = work_tree(root);
    let mut report = Report::default();
    report.suite("format", || step(cargo(root).args(["fmt", "--all", "--check"])));
    report.suite("tidy", || tidy::run(root));
    report.suite("lints", || {
        let mut cases = step(
            cargo(root)
                .args(["clippy", "--workspace", "--all-targets", "--locked"])
                .args(["--", "-D", "warnings"]),
        )?;
        cases.extend(bench(root)?);
        Ok(cases)
    });
    report.suite("documentation", || {
        step(
            cargo(root)
                .args(["doc", "--workspace", "--no-deps", "--locked"])
                .env("RUSTDOCFLAGS", "-D warnings"),
        )
    });
    report.suite("dependencies", || no_runtime(root));
    report.suite("cargo tests", || cargo_tests(root));
    report.suite("work tree", || {
        let after = work_tree(root);
        Ok(vec![match (before, after) {
            (Ok(before), Ok(after)) if before == after => Case::passed("unchanged"),
            (Ok(_), Ok(_)) => {
                Case::failed("unchanged", "`git status` or `git diff` has changed during the gate")
            }
            (Err(error), _) | (_, Err(error)) => Case::skipped("unchanged", error),
        }])
    });
    Ok(report)
}

/// The bench of the journal cache, a package of its own that nothing else builds between two of its
/// runs: a change to the crate must not break it unseen. Not its tests: they link RocksDB and
/// LevelDB, which are to be installed first, and all engines would be built, not only checked.
fn bench(root: &Path) -> Result<Vec<Case>, Error> {
    step(
        cargo(root)
            .args(["clippy", "--manifest-path", journal::MANIFEST, "--all-targets", "--locked"])
            // The crates below it have lints of their own.
            .args(["--no-deps", "--target-dir", journal::BUILD])
            .args(["--", "-D", "warnings"]),
    )
}

/// What git says about the work tree, to be compared with what it says later.
fn work_tree(root: &Path) -> Result<String, String> {
    let status = output(Command::new("git").current_dir(root).args(["status", "--porcelain"]))
        .map_err(|error| format!("not a git checkout: {error}"))?;
    // The status alone would not see that a file which was modified already has been modified
    // again.
    let diff = output(Command::new("git").current_dir(root).args(["diff", "HEAD"]))
        .map_err(|error| format!("not a git checkout: {error}"))?;
    Ok(String::from_utf8_lossy(&[status, diff].concat()).into_owned())
}

/// The log and the device are for programs with any async runtime, or none.
fn no_runtime(root: &Path) -> Result<Vec<Case>, Error> {
    let mut command = cargo(root);
    command.args(["tree", "--package", "alluvium-wal", "--edges", "normal", "--prefix", "none"]);
    let tree = String::from_utf8(output(command.arg("--locked"))?)?;
    let mut crates = tree.lines().filter_map(|line| line.split(' ').next());
    let found = crates.find(|name| RUNTIMES.contains(name));
    let name = "alluvium-wal needs no async runtime";
    Ok(vec![match found {
        None => Case::passed(name),
        Some(runtime) => Case::failed(name, format!("`{}` shows {runtime}", describe(&command))),
    }])
}

/// One command that passes or fails as a whole.
fn step(command: &mut Command) -> Result<Vec<Case>, Error> {
    let what = describe(command);
    println!("{what}");
    let status = follow(command, STEP_LIMIT, |_| ())?;
    Ok(vec![if status.success() { Case::passed(&what) } else { Case::failed(&what, status) }])
}

/// All tests of the workspace, one case each.
pub(crate) fn cargo_tests(root: &Path) -> Result<Vec<Case>, Error> {
    let mut command = cargo(root);
    command.args(["test", "--workspace", "--locked", "--no-fail-fast"]);
    test(&mut command)
}

/// A `cargo test`, one case for each test.
pub(crate) fn test(command: &mut Command) -> Result<Vec<Case>, Error> {
    command.args(["--", "--show-output"]);
    println!("{}", describe(command));
    let mut tests = CargoTests::default();
    let status = each_line(command, STEP_LIMIT, |line| {
        if tests.line(line) {
            println!("{line}");
        }
    })?;
    let mut cases = tests.finish();
    if !status.success() && !cases.iter().any(Case::has_failed) {
        // A compile error, or a test process that was killed.
        cases.push(Case::failed("cargo test", status));
    }
    Ok(cases)
}
