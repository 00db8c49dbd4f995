//! Compares the journal cache with other engines, and its reads with and without maintenance:
//! builds `bench/journal`, a separate package, and runs it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::Args;

use crate::Error;
use crate::exec::{cargo, describe, each_line};
use crate::report::{Case, Report};
use crate::setup::{Missing, apt};

#[derive(Args)]
pub(crate) struct Options {
    /// Options of the benchmark: `--entries 100000` is a trial run of a minute or two, `--beside`
    /// measures only reads during maintenance; `-- --help` lists the others.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION")]
    rest: Vec<String>,
}

/// Several times the duration of a complete run on a slow disk.
const LIMIT: Duration = Duration::from_secs(24 * 60 * 60);
/// The package's manifest.
pub(crate) const MANIFEST: &str = "bench/journal/Cargo.toml";
/// The target directory: the workspace's own would be rebuilt with other features.
pub(crate) const BUILD: &str = "target/bench-journal/build";
/// The Debian packages that it links, each with a file that shows whether it is installed.
const PACKAGES: [(&str, &str); 2] = [
    ("librocksdb-dev", "/usr/include/rocksdb/c.h"),
    ("libleveldb-dev", "/usr/include/leveldb/c.h"),
];

pub(super) fn run(root: &Path, options: &Options) -> Report {
    let mut report = Report::default();
    report.suite("bench journal", || {
        match install() {
            Ok(()) => {}
            Err(Missing::NotAllowed(reason)) => {
                return Ok(vec![Case::skipped("bench journal", reason)]);
            }
            Err(Missing::Failed(error)) => return Err(error),
        }
        build(root)?;
        race(root, options)
    });
    report
}

fn install() -> Result<(), Missing> {
    let missing = PACKAGES.iter().filter(|(_, header)| !Path::new(header).exists());
    let missing: Vec<&str> = missing.map(|(package, _)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    apt(&missing, "engines that the journal cache is compared with")
}

fn build(root: &Path) -> Result<(), Error> {
    let mut build = cargo(root);
    build.args(["build", "--release", "--manifest-path", MANIFEST]);
    build.args(["--target-dir", BUILD]);
    println!("{}", describe(&build));
    let status = build.status()?;
    if status.success() { Ok(()) } else { Err(format!("`{}`: {status}", describe(&build)).into()) }
}

fn race(root: &Path, options: &Options) -> Result<Vec<Case>, Error> {
    let mut race = Command::new(root.join(BUILD).join("release/alluvium-bench-journal"));
    race.current_dir(root);
    if !options.rest.iter().any(|option| option.starts_with("--plots")) {
        race.args(["--plots", "docs/plots"]);
    }
    race.args(&options.rest);
    let mut cases = Vec::new();
    let status = each_line(&mut race, LIMIT, |line| {
        println!("{line}");
        cases.extend(case(line));
    })?;
    if !status.success() {
        cases.push(Case::failed("bench journal", status));
    }
    if cases.is_empty() {
        // Only help was printed, or only other engines were measured.
        cases.push(Case::skipped("bars", "nothing with a target was measured"));
    }
    Ok(cases)
}

/// Parses the case in a line of the benchmark, if there is one: `bar: missed: name: what it is`, or
/// `failed: what has`.
fn case(line: &str) -> Option<Case> {
    if let Some(what) = line.strip_prefix("failed: ") {
        return Some(Case::failed("a run", what));
    }
    let (outcome, rest) = line.strip_prefix("bar: ")?.split_once(": ")?;
    let (name, detail) = rest.split_once(": ")?;
    Some(if outcome == "met" { Case::passed(name) } else { Case::failed(name, detail) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_and_failures_become_cases() {
        let met = "bar: met: data within memory, 1 thread, fillseq, first: 0.400 us; \
            the best of the others is LMDB, 1.200";
        assert_eq!(case(met), Some(Case::passed("data within memory, 1 thread, fillseq, first")));
        let missed = "bar: missed: data within memory, 1 thread, opening: 3.000 s, to be at most 2";
        assert_eq!(
            case(missed),
            Some(Case::failed("data within memory, 1 thread, opening", "3.000 s, to be at most 2"))
        );
        let beside = "bar: missed: reads of the disk beside eviction, p99: 9.00 us, \
            3.00 times 3.00 without, to be at most 2";
        assert_eq!(
            case(beside),
            Some(Case::failed(
                "reads of the disk beside eviction, p99",
                "9.00 us, 3.00 times 3.00 without, to be at most 2"
            ))
        );
        assert_eq!(case("failed: redb: signal 9"), Some(Case::failed("a run", "redb: signal 9")));
        assert_eq!(case("fillseq   LMDB     1.250"), None);
    }
}
