//! The damage campaign: flips, truncations, swaps, zeroed pages and lost files in the write-ahead
//! log, the objects, their indexes, the catalog and the disk cache, of servers that are stopped,
//! running idle, or under load.
//!
//! [`image`] runs servers under each load and keeps their files with a [`model`] of what they have
//! acknowledged. Each [`case`] copies an image, applies one of the [`faults`], starts the server on
//! it, reads everything back ([`observe`]) and compares it with the model and with the losses in
//! the server's log ([`log_lines`], [`verdict`]).

mod batch;
mod case;
mod faults;
mod files;
mod image;
mod layout;
mod log_lines;
pub(crate) mod loss;
mod model;
mod observe;
mod process;
mod reads;
mod self_check;
mod verdict;
mod window;
mod work;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use self::case::{Case, CaseResult, When};
use self::faults::{FAULTS, Fault};
use self::image::{End, Image, Load};
use self::process::Installation;
use self::verdict::Verdict;
use crate::report;
use crate::{DamageOptions, Error};

/// Number of concurrent cases. A case waits for disks and processes most of the time.
const JOBS: u64 = 3;
/// The number of failed cases whose damaged files are kept. Of the others, only the log and the
/// findings are.
const KEPT: u64 = 20;
const PROGRESS: Duration = Duration::from_secs(5);
/// Has no common divisor with the number of variants, so that a short campaign covers faults of all
/// types.
const STRIDE: u64 = 61;

/// Options of a campaign.
pub(crate) struct Campaign {
    pub(crate) seed: u64,
    pub(crate) cases: u64,
    /// Run this case only.
    pub(crate) case: Option<u64>,
}

impl Campaign {
    pub(crate) fn of(options: &DamageOptions, clock: u64) -> Self {
        Self { seed: options.seed.unwrap_or(clock), cases: options.cases, case: options.case }
    }
}

/// Every fault with each state of the server in which it is applied.
fn variants() -> Vec<(&'static Fault, When)> {
    let of = |when: When| {
        let faults = FAULTS.iter().filter(move |fault| fault.running || when == When::Stopped);
        faults.map(move |fault| (fault, when))
    };
    [When::Stopped, When::Running, When::UnderLoad].into_iter().flat_map(of).collect()
}

fn label(fault: &Fault, when: When) -> String {
    let when = match when {
        When::Stopped => "",
        When::Running => ", while running",
        When::UnderLoad => ", under load",
    };
    format!("{}{when}", fault.name)
}

/// The outcome of one case.
struct Summary {
    number: u64,
    label: String,
    verdict: Option<Verdict>,
    /// The verdict with the detail of its finding.
    reason: String,
}

/// Runs a campaign in `directory`. The report has one test for each variant.
pub(crate) fn run(
    campaign: &Campaign,
    binary: &Path,
    directory: &Path,
) -> Result<Vec<report::Case>, Error> {
    let Campaign { seed, cases, case } = *campaign;
    println!(
        "damage, {cases} cases, seed {seed}; repeat with: cargo xtask damage \
         --seed {seed} --cases {cases}"
    );
    // The images of a seed are kept if a case has failed, so that a replay gets the same bytes.
    let images = directory.join(format!("images-{seed}"));
    if !images.exists() {
        Installation::clear(directory)?;
    }
    fs::create_dir_all(&images)?;
    let begun = Instant::now();
    let images = build(binary, &images, seed)?;
    println!("{} images after {:.1} s", images.len(), begun.elapsed().as_secs_f64());
    let self_check = self_check::run(&images[..], binary, &directory.join("worker-0"))?;
    let numbers: Vec<u64> = case.map_or((0..cases).collect(), |case| vec![case]);
    let summaries = run_cases(&numbers, seed, &images, binary, directory)?;
    print!("{}", table(&summaries));
    let mut tests: BTreeMap<&str, (Vec<String>, bool)> = BTreeMap::new();
    for summary in &summaries {
        let (failures, has_run) = tests.entry(&summary.label).or_default();
        *has_run |= summary.verdict.is_some();
        if summary.verdict.is_some_and(Verdict::is_failure) {
            failures.push(format!("case {}: {}", summary.number, summary.reason));
        }
    }
    let mut report = self_check;
    report.extend(tests.into_iter().map(
        |(label, (failures, has_run))| match failures.as_slice() {
            [] if !has_run => {
                report::Case::skipped(label, "no image offers a target for the fault")
            }
            [] => report::Case::passed(label),
            [first, ..] => {
                report::Case::failed(label, format!("{} failed; {first}", failures.len()))
            }
        },
    ));
    // A campaign that finds no records to damage in the logs is itself defective.
    let log_cases = summaries.iter().filter(|summary| summary.label.starts_with("log: flip"));
    if case.is_none()
        && log_cases.clone().count() > 4
        && log_cases.clone().all(|summary| summary.verdict.is_none())
    {
        report.push(report::Case::failed("log", "no record of a log was recognized"));
    }
    if report.iter().any(report::Case::has_failed) {
        println!(
            "the files of failed cases are in {}; repeat one with: \
             cargo xtask damage --seed {seed} --case N",
            directory.display()
        );
    } else {
        fs::remove_dir_all(directory)?;
    }
    Ok(report)
}

/// Builds an image for each load and each way a server ends.
fn build(binary: &Path, directory: &Path, seed: u64) -> Result<Vec<Image>, Error> {
    let wanted = Load::ALL.into_iter().flat_map(|load| End::ALL.map(|end| (load, end)));
    thread::scope(|scope| {
        let building: Vec<_> = wanted
            .map(|(load, end)| {
                let directory = directory.join(Image::name(load, end));
                scope.spawn(move || {
                    Image::build(binary, &directory, load, end, seed)
                        .map_err(|error| format!("{}: {error}", Image::name(load, end)))
                })
            })
            .collect();
        let built = building.into_iter().map(|image| match image.join() {
            Ok(image) => Ok(image?),
            Err(_) => Err("building an image panicked".into()),
        });
        built.collect()
    })
}

fn run_cases(
    numbers: &[u64],
    seed: u64,
    images: &[Image],
    binary: &Path,
    directory: &Path,
) -> Result<Vec<Summary>, Error> {
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let summaries = Mutex::new((Vec::new(), Instant::now()));
    let begun = Instant::now();
    let worker = |index: u64| -> Result<(), String> {
        let installation = Installation {
            binary: binary.to_path_buf(),
            directory: directory.join(format!("worker-{index}")),
        };
        while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let summary = run_case(number, seed, images, &installation, &|result| {
                let keep_files = failed.fetch_add(1, Ordering::Relaxed) < KEPT;
                save(result, &directory.join(format!("case-{number}")), keep_files)
            })
            .map_err(|error| format!("case {number}: {error}"))?;
            let mut summaries = summaries.lock().map_err(|_| "another worker panicked")?;
            if summary.verdict.is_some_and(Verdict::is_failure) {
                println!("not ok - case {number}, {}: {}", summary.label, summary.reason);
            }
            summaries.0.push(summary);
            if summaries.1.elapsed() > PROGRESS {
                summaries.1 = Instant::now();
                println!(
                    "{} of {} cases after {:.0} s, {} failed",
                    summaries.0.len(),
                    numbers.len(),
                    begun.elapsed().as_secs_f64(),
                    failed.load(Ordering::Relaxed)
                );
            }
        }
        // It contains a log of 64 MiB.
        fs::remove_dir_all(&installation.directory).map_or(Ok(()), Ok)
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..JOBS).map(|index| scope.spawn(move || worker(index))).collect();
        for worker in workers {
            worker.join().map_err(|_| "a worker panicked")??;
        }
        Ok::<(), Error>(())
    })?;
    let (mut summaries, _) = summaries.into_inner().map_err(|_| "a worker panicked")?;
    summaries.sort_by_key(|summary: &Summary| summary.number);
    Ok(summaries)
}

/// Runs one case. Its number determines the fault, the image and all random choices.
fn run_case(
    number: u64,
    seed: u64,
    images: &[Image],
    installation: &Installation,
    save: &dyn Fn(&FailedCase<'_>) -> Result<(), Error>,
) -> Result<Summary, Error> {
    let variants = variants();
    let count = variants.len() as u64;
    let which = number.wrapping_mul(STRIDE) % count;
    let (fault, when) = variants[which as usize];
    let label = label(fault, when);
    let base = seed.wrapping_mul(0x1_0000_0001).wrapping_add(number) << 8;
    // If an image offers no target for the fault, the next one is tried.
    for attempt in 0..3 * images.len() as u64 {
        let image = &images[((number / count + which + attempt) % images.len() as u64) as usize];
        let case = Case {
            fault: Some(fault),
            when,
            image,
            seed: base.wrapping_add(attempt),
            ignore_reports: false,
            no_window: false,
        };
        let Some(result) = case.run(installation)? else { continue };
        let verdict = result.verdict();
        let worst = result.findings.iter().rev().find(|finding| finding.verdict == verdict);
        let reason = worst.map_or(String::new(), |finding| finding.detail.clone());
        let reason = format!("{verdict}: {reason}");
        if verdict.is_failure() {
            save(&FailedCase { number, seed, label: &label, image, result: &result })?;
        }
        return Ok(Summary { number, label, verdict: Some(verdict), reason });
    }
    Ok(Summary {
        number,
        label,
        verdict: None,
        reason: "no image offers a target for the fault".into(),
    })
}

/// A failed case, with what is saved about it.
struct FailedCase<'a> {
    number: u64,
    seed: u64,
    label: &'a str,
    image: &'a Image,
    result: &'a CaseResult,
}

fn save(case: &FailedCase<'_>, directory: &Path, with_files: bool) -> Result<(), Error> {
    Installation::clear(directory)?;
    let FailedCase { number, seed, label, image, result } = case;
    let image = Image::name(image.load, image.end);
    let mut text = format!(
        "{label}, on the image {image}\nrepeat with: cargo xtask damage \
         --seed {seed} --case {number}\n"
    );
    for what in &result.plan.descriptions {
        writeln!(text, "damage: {what}")?;
    }
    for finding in result.findings.iter().rev() {
        writeln!(text, "{}: {}", finding.verdict, finding.detail)?;
    }
    fs::write(directory.join("case.txt"), text)?;
    fs::write(directory.join("server.log"), &result.log)?;
    if with_files {
        result.damaged.keep(&directory.join("damaged"))?;
    }
    Ok(())
}

/// Formats how often each variant got each verdict.
fn table(summaries: &[Summary]) -> String {
    let mut counts: BTreeMap<&str, BTreeMap<Option<Verdict>, u64>> = BTreeMap::new();
    for summary in summaries {
        *counts.entry(&summary.label).or_default().entry(summary.verdict).or_default() += 1;
    }
    let width = counts.keys().map(|label| label.len()).max().unwrap_or(0);
    let mut text = String::from("\n");
    for (label, verdicts) in &counts {
        let verdicts: Vec<String> = verdicts
            .iter()
            .map(|(verdict, count)| match verdict {
                Some(verdict) if verdict.is_failure() => format!("{count} {verdict} (FAILED)"),
                Some(verdict) => format!("{count} {verdict}"),
                None => format!("{count} without a target"),
            })
            .collect();
        text.push_str(&format!("{label:width$}  {}\n", verdicts.join(", ")));
    }
    text.push('\n');
    for verdict in Verdict::ALL {
        let count = summaries.iter().filter(|summary| summary.verdict == Some(verdict)).count();
        if count > 0 {
            let failed = if verdict.is_failure() { " (FAILED)" } else { "" };
            text.push_str(&format!("{count:>6}  {verdict}{failed}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_cases_cover_every_variant() {
        let count = variants().len() as u64;
        let covered: std::collections::BTreeSet<u64> =
            (0..count).map(|number| number * STRIDE % count).collect();
        assert_eq!(covered.len() as u64, count);
    }

    #[test]
    fn the_table_counts_by_variant_and_verdict() {
        let summary = |label: &str, verdict| Summary {
            number: 0,
            label: label.into(),
            verdict,
            reason: String::new(),
        };
        let summaries = [
            summary("a", Some(Verdict::Intact)),
            summary("a", Some(Verdict::SilentLoss)),
            summary("a", Some(Verdict::Intact)),
            summary("bb", None),
        ];
        assert_eq!(
            table(&summaries),
            "\na   2 correct bytes, no loss, 1 silent loss (FAILED)\n\
             bb  1 without a target\n\n     2  correct bytes, no loss\n\
     \x20    1  silent loss (FAILED)\n"
        );
    }
}
