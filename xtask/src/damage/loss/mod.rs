//! The loss drills: a server loses its data directory, its log, or a part of its object store, in a
//! directory or an S3 server; what an operator does then is done; what is stated as lost must be
//! exactly what is lost.
//!
//! - [`base`] runs the servers that drills begin with copies of
//! - [`drill`] is one drill: load, loss, recovery, checks, more load, another restart
//! - [`cause`] damages files; [`site`] starts servers and tools; [`journal`] has what was
//!   acknowledged; [`read`] reads all of it back; [`stated`] reads what is stated as lost;
//!   [`check`] compares

mod base;
mod cause;
mod check;
mod drill;
mod journal;
mod read;
mod site;
mod stated;

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use self::base::Base;
use self::cause::{How, Lost};
use self::drill::{Drill, Loss, Outcomes, When, describe};
use self::site::{Bucket, Site};
use crate::Error;
use crate::report::Case;
use crate::rng::Rng;
use crate::s3::{Gateway, Peer};

/// Number of concurrent drills. A drill waits for disks and processes most of the time.
const JOBS: u64 = 3;
/// The number of failed drills whose files are kept.
const KEPT: u64 = 10;
/// Has no common divisor with the number of variants, so that a short campaign covers all losses.
const STRIDE: u64 = 61;

/// Where the objects are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Directory,
    S3,
}

/// What is lost, in which state of the server, and where.
#[derive(Clone, Copy, Debug)]
struct Variant {
    lost: Lost,
    how: How,
    when: When,
    place: Place,
}

fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for place in [Place::Directory, Place::S3] {
        for (lost, how) in Lost::all() {
            all.extend(When::ALL.map(|when| Variant { lost, how, when, place }));
        }
    }
    all
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { lost, how, when, place } = self;
        let place = if *place == Place::S3 { "S3" } else { "directory" };
        write!(f, "{lost} {how}, {when}, {place}")
    }
}

/// The variant of a drill, and the base that it copies.
fn plan(seed: u64) -> (Variant, BaseKind) {
    let variants = variants();
    let variant = variants[(seed.wrapping_mul(STRIDE) % variants.len() as u64) as usize];
    let compaction = Rng::new(seed ^ 0xba5e).below(2) == 0;
    (variant, BaseKind { place: variant.place, compaction })
}

/// A base: where its objects are, and whether it compacts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BaseKind {
    place: Place,
    compaction: bool,
}

impl BaseKind {
    fn name(self) -> String {
        let place = if self.place == Place::S3 { "s3" } else { "directory" };
        format!("base-{place}{}", if self.compaction { "-compacted" } else { "" })
    }
}

/// What a campaign needs.
pub(crate) struct Campaign<'a> {
    pub(crate) binary: &'a Path,
    /// The S3 server, which stores objects as files.
    pub(crate) gateway: &'a Path,
    pub(crate) directory: &'a Path,
    /// The seed of the first drill. Each further one has the next seed.
    pub(crate) seed: u64,
    pub(crate) drills: u64,
    /// What the variant of a drill contains; seeds of others are passed over.
    pub(crate) only: &'a str,
}

impl Campaign<'_> {
    /// Returns the seeds of the drills.
    fn seeds(&self) -> Result<Vec<u64>, Error> {
        let is_wanted = |seed: &u64| plan(*seed).0.to_string().contains(self.only);
        if !variants().iter().any(|variant| variant.to_string().contains(self.only)) {
            return Err(format!("no drill contains {:?}", self.only).into());
        }
        Ok((self.seed..).filter(is_wanted).take(self.drills as usize).collect())
    }
}

/// A drill that has ended.
struct Summary {
    seed: u64,
    variant: Variant,
    outcomes: Outcomes,
}

/// Runs a campaign. The report has one test for each kind of loss.
pub(crate) fn run(campaign: &Campaign<'_>) -> Result<Vec<Case>, Error> {
    let Campaign { directory, seed, .. } = *campaign;
    let seeds = campaign.seeds()?;
    let drills = seeds.len();
    println!(
        "loss drills: {drills} from seed {seed}; repeat one with: cargo xtask loss --drills 1 \
         --seed N"
    );
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let begun = Instant::now();
    let gateway =
        Gateway::start(Peer::Versitygw, campaign.gateway, &directory.join("s3-server"), None)?;
    let mut kinds: Vec<BaseKind> = seeds.iter().map(|seed| plan(*seed).1).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let bases = build(campaign, &gateway, &kinds)?;
    println!("{} bases after {:.0} s", bases.len(), begun.elapsed().as_secs_f64());
    let summaries = run_drills(campaign, &seeds, &gateway, &bases)?;
    print!("{}", table(&summaries));
    let failed = summaries.iter().any(|summary| !summary.outcomes.differences.is_empty());
    if failed {
        println!("what failed drills have left is in {}", directory.display());
    } else {
        drop(gateway);
        fs::remove_dir_all(directory)?;
    }
    println!("{drills} drills in {:.0} s", begun.elapsed().as_secs_f64());
    Ok(report(&summaries))
}

fn build(
    campaign: &Campaign<'_>,
    gateway: &Gateway,
    kinds: &[BaseKind],
) -> Result<BTreeMap<BaseKind, Base>, Error> {
    thread::scope(|scope| {
        let building: Vec<_> = kinds
            .iter()
            .map(|kind| {
                scope.spawn(move || -> Result<Base, String> {
                    let directory = campaign.directory.join(kind.name());
                    let bucket = bucket(gateway, *kind, &directory, &kind.name());
                    let ports = Site::ports().map_err(|error| error.to_string())?;
                    let site = Site::new(campaign.binary, &directory, bucket, ports);
                    Base::build(site, kind.compaction, 1)
                        .map_err(|error| format!("{}: {error}", kind.name()))
                })
            })
            .collect();
        let mut bases = BTreeMap::new();
        for (kind, base) in kinds.iter().zip(building) {
            bases.insert(*kind, base.join().map_err(|_| "a base has panicked")??);
        }
        Ok(bases)
    })
}

fn bucket(gateway: &Gateway, kind: BaseKind, directory: &Path, prefix: &str) -> Bucket {
    match kind.place {
        Place::Directory => Bucket::directory(directory.join("objects")),
        Place::S3 => {
            let (url, access, files) = gateway.prefix(prefix);
            Bucket { url, access, files }
        }
    }
}

fn run_drills(
    campaign: &Campaign<'_>,
    seeds: &[u64],
    gateway: &Gateway,
    bases: &BTreeMap<BaseKind, Base>,
) -> Result<Vec<Summary>, Error> {
    let (next, failed) = (AtomicUsize::new(0), AtomicU64::new(0));
    let summaries = Mutex::new(Vec::new());
    let begun = Instant::now();
    let worker = |worker: u64| -> Result<(), String> {
        let ports = Site::ports().map_err(|error| error.to_string())?;
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(&seed) = seeds.get(number) else { return Ok(()) };
            let run = One { campaign, gateway, bases, ports, worker, failed: &failed };
            let summary = run.drill(seed).map_err(|error| format!("drill {seed}: {error}"))?;
            let mut all = summaries.lock().map_err(|_| "another worker has panicked")?;
            let state = if summary.outcomes.differences.is_empty() { "ok" } else { "not ok" };
            println!(
                "{state} - drill {seed}: {}{}; {} of {} after {:.0} s",
                summary.variant,
                summary.outcomes.losses.iter().map(result_of).collect::<String>(),
                all.len() + 1,
                seeds.len(),
                begun.elapsed().as_secs_f64(),
            );
            for difference in summary.outcomes.differences.iter().take(10) {
                println!("    {difference}");
            }
            all.push(summary);
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..JOBS).map(|index| scope.spawn(move || worker(index))).collect();
        for worker in workers {
            worker.join().map_err(|_| "a worker has panicked")??;
        }
        Ok::<(), Error>(())
    })?;
    let mut summaries = summaries.into_inner().map_err(|_| "a worker has panicked")?;
    summaries.sort_by_key(|summary: &Summary| summary.seed);
    Ok(summaries)
}

/// Describes the result of a loss, and names it unless it is the first one.
fn result_of(loss: &Loss) -> String {
    let Loss { lost, how, is_rebuilt, lost_records, .. } = loss;
    match is_rebuilt {
        true => format!("; {lost} {how}: rebuilt, {lost_records} records lost"),
        false => format!("; {lost} {how}: started"),
    }
}

struct One<'a> {
    campaign: &'a Campaign<'a>,
    gateway: &'a Gateway,
    bases: &'a BTreeMap<BaseKind, Base>,
    ports: [SocketAddr; 2],
    worker: u64,
    failed: &'a AtomicU64,
}

impl One<'_> {
    fn drill(&self, seed: u64) -> Result<Summary, Error> {
        let (variant, kind) = plan(seed);
        let base = &self.bases[&kind];
        let name = format!("worker-{}", self.worker);
        let directory = self.campaign.directory.join(&name);
        let bucket = bucket(self.gateway, kind, &directory, &name);
        let site = Site::new(self.campaign.binary, &directory, bucket.clone(), self.ports);
        base.copy(&directory, &bucket)?;
        let Variant { lost, how, when, .. } = variant;
        let (rng, journal) = (Rng::new(seed), base.journal.clone());
        let outcomes = Outcomes::default();
        let (is_rebuilt, is_second) = (false, false);
        let mut drill =
            Drill { site, journal, lost, how, when, rng, outcomes, is_rebuilt, is_second };
        drill.run();
        if !drill.outcomes.differences.is_empty() {
            let kept = self.campaign.directory.join(format!("drill-{seed}"));
            self.keep(&drill, &kept)?;
        }
        Ok(Summary { seed, variant, outcomes: drill.outcomes })
    }

    /// Keeps the files of a drill that has failed.
    fn keep(&self, drill: &Drill, kept: &PathBuf) -> Result<(), Error> {
        fs::create_dir_all(kept)?;
        fs::write(kept.join("drill.txt"), describe(drill))?;
        fs::write(kept.join("server.log"), drill.site.log()?)?;
        if self.failed.fetch_add(1, Ordering::Relaxed) < KEPT {
            site::copy(&drill.site.directory, &kept.join("server"))?;
            if !drill.site.bucket.files.starts_with(&drill.site.directory) {
                site::copy(&drill.site.bucket.files, &kept.join("bucket"))?;
            }
        }
        Ok(())
    }
}

/// Numbers of one kind of loss.
#[derive(Default)]
struct Tally {
    losses: u64,
    rebuilt: u64,
    lost_records: u64,
    differences: usize,
    /// The first drill with a difference, and its first difference.
    first: Option<String>,
}

fn tallies(summaries: &[Summary]) -> BTreeMap<String, Tally> {
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    for Summary { seed, outcomes, .. } in summaries {
        for loss in &outcomes.losses {
            let tally = tallies.entry(format!("{}: {}", loss.lost, loss.how)).or_default();
            tally.losses += 1;
            tally.rebuilt += u64::from(loss.is_rebuilt);
            tally.lost_records += loss.lost_records;
            tally.differences += loss.differences;
            let first = outcomes.differences.first().filter(|_| loss.differences > 0);
            if let Some(first) = first {
                tally.first.get_or_insert_with(|| format!("drill {seed}: {first}"));
            }
        }
    }
    tallies
}

fn table(summaries: &[Summary]) -> String {
    let tallies = tallies(summaries);
    let width = tallies.keys().map(String::len).max().unwrap_or(0);
    let mut text =
        format!("\n{:width$}  losses  rebuilt  records lost  differences\n", "what is lost");
    let line = |name: &str, tally: &Tally| {
        let Tally { losses, rebuilt, lost_records, differences, .. } = tally;
        format!("{name:width$}  {losses:>6}  {rebuilt:>7}  {lost_records:>12}  {differences:>11}\n")
    };
    let mut all = Tally::default();
    for (name, tally) in &tallies {
        text.push_str(&line(name, tally));
        all.losses += tally.losses;
        all.rebuilt += tally.rebuilt;
        all.lost_records += tally.lost_records;
        all.differences += tally.differences;
    }
    text.push_str(&line("all", &all));
    text
}

fn report(summaries: &[Summary]) -> Vec<Case> {
    let cases = tallies(summaries).into_iter().map(|(name, tally)| match tally.first {
        None => Case::passed(&name),
        Some(first) => Case::failed(&name, format!("{} differences; {first}", tally.differences)),
    });
    cases.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_drills_cover_every_variant() {
        let count = variants().len() as u64;
        let covered: std::collections::BTreeSet<u64> =
            (0..count).map(|seed| seed * STRIDE % count).collect();
        assert_eq!(covered.len() as u64, count);
    }
}
