//! Damage: flips, truncations, swaps, zeroed pages and lost files in the write-ahead log, the
//! objects, their indexes, the catalog and the disk cache, of servers that are stopped, that
//! run, and that go on with their load.
//!
//! [`image`] lets servers work under each load and keeps what they leave, with a [`model`] of what
//! they have acknowledged. Each [`case`] copies an image, does damage of one of the [`kinds`],
//! starts the server on it, reads everything back ([`observe`]) and compares it with the model and
//! with what the server says ([`says`], [`verdict`]).

mod case;
mod client;
mod files;
mod image;
mod kinds;
mod layout;
mod model;
mod observe;
mod process;
mod proof;
mod says;
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

use self::case::{Case, Shown, When};
use self::image::{End, Image, Load};
use self::kinds::{KINDS, Kind};
use self::process::Place;
use self::verdict::Verdict;
use crate::report;
use crate::{DamageOptions, Error};

/// At the same time. A case waits for disks and processes most of the time.
const JOBS: u64 = 3;
/// With so many failed cases the damaged files are kept; of all others the log and the findings.
const KEPT: u64 = 20;
const PROGRESS: Duration = Duration::from_secs(5);
/// No common divisor with the number of kinds, so that a short campaign meets kinds of all sorts.
const STRIDE: u64 = 61;

/// What is run.
pub(crate) struct Campaign {
    pub(crate) seed: u64,
    pub(crate) cases: u64,
    /// Only this one.
    pub(crate) case: Option<u64>,
}

impl Campaign {
    pub(crate) fn of(options: &DamageOptions, clock: u64) -> Self {
        Self { seed: options.seed.unwrap_or(clock), cases: options.cases, case: options.case }
    }
}

/// A kind of damage, and what the server does when it is done.
fn variants() -> Vec<(&'static Kind, When)> {
    let of = |when: When| {
        let kinds = KINDS.iter().filter(move |kind| kind.running || when == When::Stopped);
        kinds.map(move |kind| (kind, when))
    };
    [When::Stopped, When::Running, When::UnderLoad].into_iter().flat_map(of).collect()
}

fn label(kind: &Kind, when: When) -> String {
    let when = match when {
        When::Stopped => "",
        When::Running => ", while running",
        When::UnderLoad => ", under load",
    };
    format!("{}{when}", kind.name)
}

/// What has come of one case.
struct Line {
    number: u64,
    label: String,
    verdict: Option<Verdict>,
    /// Why it is so.
    reason: String,
}

/// Run a campaign in `directory`, and count one test for each kind of damage.
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
    // Images of the same seed are kept if a case has failed: a replay finds the same bytes.
    let images = directory.join(format!("images-{seed}"));
    if !images.exists() {
        Place::clear(directory)?;
    }
    fs::create_dir_all(&images)?;
    let begun = Instant::now();
    let images = build(binary, &images, seed)?;
    println!("{} images after {:.1} s", images.len(), begun.elapsed().as_secs_f64());
    let proof = proof::run(&images[..], binary, &directory.join("worker-0"))?;
    let numbers: Vec<u64> = case.map_or((0..cases).collect(), |case| vec![case]);
    let lines = all(&numbers, seed, &images, binary, directory)?;
    print!("{}", table(&lines));
    let mut tests: BTreeMap<&str, (Vec<String>, bool)> = BTreeMap::new();
    for line in &lines {
        let (failures, has_run) = tests.entry(&line.label).or_default();
        *has_run |= line.verdict.is_some();
        if line.verdict.is_some_and(Verdict::is_failure) {
            failures.push(format!("case {}: {}", line.number, line.reason));
        }
    }
    let mut report = proof;
    report.extend(tests.into_iter().map(
        |(label, (failures, has_run))| match failures.as_slice() {
            [] if !has_run => report::Case::skipped(label, "no image has anything of the kind"),
            [] => report::Case::passed(label),
            [first, ..] => {
                report::Case::failed(label, format!("{} failed; {first}", failures.len()))
            }
        },
    ));
    // A campaign that finds nothing to damage in the logs is a defect of its own.
    let log_cases = lines.iter().filter(|line| line.label.starts_with("log: flip"));
    if case.is_none()
        && log_cases.clone().count() > 4
        && log_cases.clone().all(|line| line.verdict.is_none())
    {
        report.push(report::Case::failed("log", "no record of a log was recognised"));
    }
    if report.iter().any(report::Case::has_failed) {
        println!(
            "failed cases stay in {}; repeat one with: cargo xtask damage --seed {seed} --case N",
            directory.display()
        );
    } else {
        fs::remove_dir_all(directory)?;
    }
    Ok(report)
}

/// An image for each load and each end of a server.
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
            Err(_) => Err("building an image has panicked".into()),
        });
        built.collect()
    })
}

fn all(
    numbers: &[u64],
    seed: u64,
    images: &[Image],
    binary: &Path,
    directory: &Path,
) -> Result<Vec<Line>, Error> {
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let lines = Mutex::new((Vec::new(), Instant::now()));
    let begun = Instant::now();
    let worker = |index: u64| -> Result<(), String> {
        let place = Place {
            binary: binary.to_path_buf(),
            directory: directory.join(format!("worker-{index}")),
        };
        while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let line = one(number, seed, images, &place, &|shown| {
                let keep_files = failed.fetch_add(1, Ordering::Relaxed) < KEPT;
                keep(shown, &directory.join(format!("case-{number}")), keep_files)
            })
            .map_err(|error| format!("case {number}: {error}"))?;
            let mut lines = lines.lock().map_err(|_| "another worker has panicked")?;
            if line.verdict.is_some_and(Verdict::is_failure) {
                println!("not ok - case {number}, {}: {}", line.label, line.reason);
            }
            lines.0.push(line);
            if lines.1.elapsed() > PROGRESS {
                lines.1 = Instant::now();
                println!(
                    "{} of {} cases after {:.0} s, {} failed",
                    lines.0.len(),
                    numbers.len(),
                    begun.elapsed().as_secs_f64(),
                    failed.load(Ordering::Relaxed)
                );
            }
        }
        // It has a log of 64 MiB.
        fs::remove_dir_all(&place.directory).map_or(Ok(()), Ok)
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..JOBS).map(|index| scope.spawn(move || worker(index))).collect();
        for worker in workers {
            worker.join().map_err(|_| "a worker has panicked")??;
        }
        Ok::<(), Error>(())
    })?;
    let (mut lines, _) = lines.into_inner().map_err(|_| "a worker has panicked")?;
    lines.sort_by_key(|line: &Line| line.number);
    Ok(lines)
}

/// One case. Its number decides the kind, the image, and all else that is left to chance.
fn one(
    number: u64,
    seed: u64,
    images: &[Image],
    place: &Place,
    keep: &dyn Fn(&KeptCase<'_>) -> Result<(), Error>,
) -> Result<Line, Error> {
    let variants = variants();
    let count = variants.len() as u64;
    let which = number.wrapping_mul(STRIDE) % count;
    let (kind, when) = variants[which as usize];
    let label = label(kind, when);
    let base = seed.wrapping_mul(0x1_0000_0001).wrapping_add(number) << 8;
    // An image may have nothing of the kind: then the next one is tried.
    for attempt in 0..3 * images.len() as u64 {
        let image = &images[((number / count + which + attempt) % images.len() as u64) as usize];
        let case = Case {
            kind: Some(kind),
            when,
            image,
            seed: base.wrapping_add(attempt),
            deaf: false,
            strict: false,
        };
        let Some(shown) = case.run(place)? else { continue };
        let verdict = shown.verdict();
        let worst = shown.findings.iter().rev().find(|finding| finding.verdict == verdict);
        let reason = worst.map_or(String::new(), |finding| finding.detail.clone());
        let reason = format!("{verdict}: {reason}");
        if verdict.is_failure() {
            keep(&KeptCase { number, seed, label: &label, image, shown: &shown })?;
        }
        return Ok(Line { number, label, verdict: Some(verdict), reason });
    }
    Ok(Line { number, label, verdict: None, reason: "no image has anything of the kind".into() })
}

/// A failed case.
struct KeptCase<'a> {
    number: u64,
    seed: u64,
    label: &'a str,
    image: &'a Image,
    shown: &'a Shown,
}

fn keep(case: &KeptCase<'_>, directory: &Path, with_files: bool) -> Result<(), Error> {
    Place::clear(directory)?;
    let KeptCase { number, seed, label, image, shown } = case;
    let image = Image::name(image.load, image.end);
    let mut text = format!(
        "{label}, on the image {image}\nrepeat with: cargo xtask damage \
         --seed {seed} --case {number}\n"
    );
    for what in &shown.plan.what {
        writeln!(text, "damage: {what}")?;
    }
    for finding in shown.findings.iter().rev() {
        writeln!(text, "{}: {}", finding.verdict, finding.detail)?;
    }
    fs::write(directory.join("case.txt"), text)?;
    fs::write(directory.join("server.log"), &shown.log)?;
    if with_files {
        shown.damaged.keep(&directory.join("damaged"))?;
    }
    Ok(())
}

/// How often each kind of damage came to which verdict.
fn table(lines: &[Line]) -> String {
    let mut counts: BTreeMap<&str, BTreeMap<Option<Verdict>, u64>> = BTreeMap::new();
    for line in lines {
        *counts.entry(&line.label).or_default().entry(line.verdict).or_default() += 1;
    }
    let width = counts.keys().map(|label| label.len()).max().unwrap_or(0);
    let mut text = String::from("\n");
    for (label, verdicts) in &counts {
        let verdicts: Vec<String> = verdicts
            .iter()
            .map(|(verdict, count)| match verdict {
                Some(verdict) if verdict.is_failure() => format!("{count} {verdict} (FAILED)"),
                Some(verdict) => format!("{count} {verdict}"),
                None => format!("{count} not possible"),
            })
            .collect();
        text.push_str(&format!("{label:width$}  {}\n", verdicts.join(", ")));
    }
    text.push('\n');
    for verdict in Verdict::ALL {
        let count = lines.iter().filter(|line| line.verdict == Some(verdict)).count();
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
    fn cases_in_a_row_meet_every_kind() {
        let count = variants().len() as u64;
        let met: std::collections::BTreeSet<u64> =
            (0..count).map(|number| number * STRIDE % count).collect();
        assert_eq!(met.len() as u64, count);
    }

    #[test]
    fn the_table_counts_by_kind_and_verdict() {
        let line = |label: &str, verdict| Line {
            number: 0,
            label: label.into(),
            verdict,
            reason: String::new(),
        };
        let lines = [
            line("a", Some(Verdict::Whole)),
            line("a", Some(Verdict::SilentLoss)),
            line("a", Some(Verdict::Whole)),
            line("bb", None),
        ];
        assert_eq!(
            table(&lines),
            "\na   2 true bytes, no loss, 1 silent loss (FAILED)\nbb  1 not possible\n\n     \
             2  true bytes, no loss\n     1  silent loss (FAILED)\n"
        );
    }
}
