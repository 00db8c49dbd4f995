//! The fuzz targets in `fuzz/`, run by cargo-fuzz (libFuzzer).

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::exec::{cargo, describe, quietly};
use crate::report::{Case, Report};
use crate::setup::{Missing, apt, runs};
use crate::{Error, FuzzOptions};

/// Interval between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// Lines of a target's output that are shown with a finding.
const TAIL_LINES: usize = 60;

/// `cargo xtask fuzz`.
pub(crate) fn run(root: &Path, options: &FuzzOptions) -> Result<Report, Error> {
    let known = targets(root)?;
    for target in &options.targets {
        if !known.contains(target) {
            return Err(format!("unknown target `{target}`; known: {}", known.join(", ")).into());
        }
    }
    let targets = if options.targets.is_empty() { known } else { options.targets.clone() };
    if options.input.is_some() && targets.len() != 1 {
        return Err("--input needs exactly one target".into());
    }
    let mut report = Report::default();
    report.suite("fuzz", || {
        match install() {
            Ok(()) => {}
            Err(Missing::NotAllowed(reason)) => return Ok(vec![Case::skipped("fuzz", reason)]),
            Err(Missing::Failed(error)) => return Err(error),
        }
        let fuzz = |target: &String| {
            Case::run(target, || match &options.input {
                Some(input) => replay(root, target, input),
                None => fuzz(root, target, options.seconds),
            })
        };
        Ok(targets.iter().map(fuzz).collect())
    });
    Ok(report)
}

fn targets(root: &Path) -> Result<Vec<String>, Error> {
    let mut targets = Vec::new();
    for entry in fs::read_dir(root.join("fuzz/fuzz_targets"))? {
        let path = entry?.path();
        targets.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    targets.sort();
    Ok(targets)
}

fn install() -> Result<(), Missing> {
    if !runs("c++", &["--version"]) {
        apt(&["g++"], "libFuzzer is written in C++")?;
    }
    if !runs("cargo", &["fuzz", "--version"]) {
        println!("setup: cargo install cargo-fuzz --locked (crates.io)");
        quietly(Command::new("cargo").args(["install", "cargo-fuzz", "--locked"]))?;
    }
    Ok(())
}

/// `cargo fuzz` with a subcommand, on the installed toolchain.
///
/// Coverage instrumentation is an unstable flag of rustc, which RUSTC_BOOTSTRAP enables on a stable
/// one. AddressSanitizer is off, since the fuzzed code has no `unsafe`, and so are traced
/// comparisons, since the targets fix checksums themselves: both cost more runs than they are
/// worth.
fn cargo_fuzz(root: &Path, subcommand: &str, target: &str) -> Command {
    let mut command = cargo(root);
    command.env("RUSTC_BOOTSTRAP", "1").args(["fuzz", subcommand, "--fuzz-dir", "fuzz"]);
    command.args(["--target-dir", "target/fuzz", "--sanitizer", "none", "--no-trace-compares"]);
    command.arg(target);
    command
}

/// Runs a target on new inputs.
fn fuzz(root: &Path, target: &str, seconds: u64) -> Result<(), Error> {
    quietly(&mut cargo_fuzz(root, "build", target))?;
    // New corpus entries stay out of the work tree.
    let corpus = Path::new("target/fuzz/corpus").join(target);
    fs::create_dir_all(root.join(&corpus))?;
    let mut command = cargo_fuzz(root, "run", target);
    command.arg(&corpus).arg(seeds(root, target)?);
    command.arg("--").arg(format!("-max_total_time={seconds}"));
    command.args(["-max_len=2048", "-len_control=0", "-timeout=60", "-rss_limit_mb=1024"]);
    command.args(["-malloc_limit_mb=64", "-print_final_stats=1"]);
    let what = describe(&command);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let started = Instant::now();
    let mut printed = Duration::ZERO;
    let mut tail = VecDeque::new();
    let stderr = child.stderr.take().expect("standard error is piped");
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).into_owned();
        // `#1234 NEW cov: 56 ...`, or `stat::number_of_executed_units: 1234` at the end.
        let elapsed = started.elapsed();
        if line.starts_with('#') && elapsed - printed >= PROGRESS_EVERY {
            printed = elapsed;
            let status: Vec<&str> = line.split_whitespace().collect();
            println!("{target}: {} of {seconds} s, {}", elapsed.as_secs(), status.join(" "));
        } else if line.starts_with("Done ") {
            println!("{target}: {line}");
        }
        tail.push_back(line);
        if tail.len() > TAIL_LINES {
            tail.pop_front();
        }
    }
    if child.wait()?.success() {
        return Ok(());
    }
    let artifact = tail.iter().find_map(|line| line.split_once("Test unit written to "));
    let artifact = artifact.map(|(_, path)| PathBuf::from(path.trim()));
    for line in &tail {
        println!("{line}");
    }
    match artifact {
        Some(path) => {
            let path = path.strip_prefix(root).unwrap_or(&path).display().to_string();
            Err(format!("repeat with: cargo xtask fuzz {target} --input {path}").into())
        }
        None => Err(format!("`{what}` failed").into()),
    }
}

/// The directory of a target's seeds.
fn seeds(root: &Path, target: &str) -> Result<PathBuf, Error> {
    if target != "requests" {
        return Ok(Path::new("fuzz/seeds").join(target));
    }
    // The examples of the server's own tests, one for each API and version.
    let seeds = Path::new("target/fuzz/seeds").join(target);
    let absolute = root.join(&seeds);
    fs::create_dir_all(&absolute)?;
    let mut write = cargo(root);
    write.env("FUZZ_SEEDS", &absolute).args(["test", "-q", "-p", "alluvium-broker", "--lib"]);
    quietly(write.arg("seeds_of_the_fuzz_target_fit_into_an_input"))?;
    if fs::read_dir(&absolute)?.next().is_none() {
        return Err(format!("the test wrote no seeds to {}", seeds.display()).into());
    }
    Ok(seeds)
}

/// Runs a target on one input and shows its output.
fn replay(root: &Path, target: &str, input: &Path) -> Result<(), Error> {
    let mut command = cargo_fuzz(root, "run", target);
    let status = command.arg(input).status()?;
    if status.success() { Ok(()) } else { Err(format!("{}: {status}", input.display()).into()) }
}
