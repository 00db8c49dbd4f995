//! The gate: the checks that every change must pass.

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

/// Packages that must not be among the dependencies of the log.
const RUNTIMES: [&str; 6] = ["async-io", "async-std", "futures-executor", "mio", "smol", "tokio"];

/// Checks format, lints, documentation, dependencies and tests, and that none of it changed the
/// work tree.
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
                Case::failed("unchanged", "`git status` or `git diff` changed during the gate")
            }
            (Err(error), _) | (_, Err(error)) => Case::skipped("unchanged", error),
        }])
    });
    Ok(report)
}

/// Lints the benchmark of the journal cache. It is a package of its own that is otherwise built
/// only when it runs, so this is where a breaking change to the crate shows. Its tests are not run:
/// they link RocksDB and LevelDB, which must be installed, and would build all engines instead of
/// only checking them.
fn bench(root: &Path) -> Result<Vec<Case>, Error> {
    step(
        cargo(root)
            .args(["clippy", "--manifest-path", journal::MANIFEST, "--all-targets", "--locked"])
            // The crates that it depends on have lints of their own.
            .args(["--no-deps", "--target-dir", journal::BUILD])
            .args(["--", "-D", "warnings"]),
    )
}

/// Returns git's view of the work tree, for comparison with a later one.
fn work_tree(root: &Path) -> Result<String, String> {
    let status = output(Command::new("git").current_dir(root).args(["status", "--porcelain"]))
        .map_err(|error| format!("not a Git checkout: {error}"))?;
    // The status alone does not show a further change to a file that was already modified.
    let diff = output(Command::new("git").current_dir(root).args(["diff", "HEAD"]))
        .map_err(|error| format!("not a Git checkout: {error}"))?;
    Ok(String::from_utf8_lossy(&[status, diff].concat()).into_owned())
}

/// Checks that the log and the device depend on no async runtime.
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

/// Runs a command that passes or fails as a whole.
fn step(command: &mut Command) -> Result<Vec<Case>, Error> {
    let what = describe(command);
    println!("{what}");
    let status = follow(command, STEP_LIMIT, |_| ())?;
    Ok(vec![if status.success() { Case::passed(&what) } else { Case::failed(&what, status) }])
}

/// Runs all tests of the workspace, one case each.
pub(crate) fn cargo_tests(root: &Path) -> Result<Vec<Case>, Error> {
    let mut command = cargo(root);
    command.args(["test", "--workspace", "--locked", "--no-fail-fast"]);
    test(&mut command)
}

/// Runs a `cargo test`, one case for each test.
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
