//! The crash test: the power of a disk is really cut under the WAL, or that of all disks under
//! three volume servers ([`volumes`]), and what was acknowledged must survive.
//!
//! `cargo xtask sim` cuts the power of a simulated disk, and `cargo xtask kill` kills the process;
//! here everything down to the disk is real: io_uring, a kernel's block layer and drivers, flushes
//! and FUA, and a volatile cache that is lost ([`guest`]). The writer reports over a serial line
//! what it was promised, [`journal`] and [`blocks`] compare.

mod blocks;
mod guest;
mod journal;
mod volumes;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::exec::{cargo, quietly};
use crate::image::Image;
use crate::report::{Case, Report};
use crate::rng::Rng;
use crate::setup::Missing;
use crate::{CrashOptions, Error};
use guest::{Config, Disk, Machine, Program};
use journal::{Promises, RecordRange};

/// The moment of the power cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// This long after recovery has started.
    Opening(Duration),
    /// This long after the first append.
    Load(Duration),
    /// As soon as the log was closed, after this many records.
    Closed(u64),
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opening(after) => write!(f, "{} ms into recovery", after.as_millis()),
            Self::Load(after) => write!(f, "{} ms into the load", after.as_millis()),
            Self::Closed(records) => write!(f, "when {records} records were closed"),
        }
    }
}

/// `cargo xtask crash`.
pub(crate) fn campaign(root: &Path, options: &CrashOptions) -> Result<Report, Error> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let (rounds, seed) = (options.rounds, options.seed.unwrap_or(clock));
    let mut report = Report::default();
    if !options.volumes {
        suite(&mut report, "crash", rounds, seed, "", |name| {
            let mut bench = Bench::prepare(root, seed)?;
            let mut cases: Vec<Case> = Disk::ALL
                .iter()
                .map(|disk| {
                    Case::run(&format!("{disk} loses what is not flushed"), || bench.control(*disk))
                })
                .collect();
            cases.push(Case::run(name, || bench.rounds(rounds)));
            Ok((cases, bench.directory))
        });
    }
    // A round of volumes takes several times as long.
    let rounds = if options.volumes { rounds } else { rounds.div_ceil(VOLUME_SHARE) };
    suite(&mut report, "crash of volumes", rounds, seed, " --volumes", |name| {
        let mut bench = volumes::Bench::prepare(root, seed)?;
        let cases = vec![
            Case::run("three volume servers lose what is not flushed", || bench.control()),
            Case::run(name, || bench.rounds(rounds)),
        ];
        Ok((cases, bench.directory))
    });
    Ok(report)
}

/// Runs cases in a directory, which is kept if one of them fails.
fn suite(
    report: &mut Report,
    name: &str,
    rounds: u32,
    seed: u64,
    more: &str,
    run: impl FnOnce(&str) -> Result<(Vec<Case>, PathBuf), Missing>,
) {
    let case = format!("{rounds} power cuts, seed {seed}");
    report.suite(name, || {
        println!("repeat with: cargo xtask crash --rounds {rounds} --seed {seed}{more}");
        let (cases, directory) = match run(&case) {
            Ok(done) => done,
            Err(Missing::NotAllowed(reason)) => {
                println!("skipped: {reason}");
                return Ok(vec![Case::skipped(&case, reason)]);
            }
            Err(Missing::Failed(error)) => return Err(error),
        };
        if cases.iter().any(Case::has_failed) {
            println!("medium, console and logs are kept in {}", directory.display());
        } else {
            fs::remove_dir_all(&directory)?;
        }
        Ok(cases)
    });
}

/// Creates the empty directory of a suite, builds a program of the simulations, and returns both
/// and the image of a machine that runs it.
fn prepare(root: &Path, program: Program) -> Result<(PathBuf, PathBuf, Image), Missing> {
    let directory = root.join("target/e2e/run").join(format!("crash-{}", program.name()));
    if directory.exists() {
        fs::remove_dir_all(&directory).map_err(Error::from)?;
    }
    fs::create_dir_all(&directory).map_err(Error::from)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let binary = root.join(target).join("debug").join(program.name());
    let package = ["--package", "alluvium-sim", "--bin", program.name()];
    quietly(cargo(root).args(["build", "--locked"]).args(package))?;
    let image = guest::image(&root.join("target/e2e/crash"), &directory, program, &binary)?;
    Ok((directory, binary, image))
}

/// Runs a machine until the power is cut. `on_line` gets each line of the writer. The load begins
/// with a line that starts with `loaded`.
fn run_until_cut(
    mut machine: Machine,
    cut: Cut,
    loaded: &str,
    mut on_line: impl FnMut(&str) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut take = |line: &str| {
        on_line(line)?;
        Ok::<_, Error>(line.starts_with("failed "))
    };
    let too_early = |line: &str| Error::from(format!("before the power was cut: {line}"));
    loop {
        let line = machine.line()?;
        if take(&line)? {
            return Err(too_early(&line));
        }
        match cut {
            Cut::Opening(after) if line == "opening" => thread::sleep(after),
            Cut::Load(after) if line.starts_with(loaded) => thread::sleep(after),
            Cut::Closed(_) if line == "closed" => {}
            _ => continue,
        }
        break;
    }
    while let Some(line) = machine.line_within(Duration::ZERO)? {
        if take(&line)? {
            return Err(too_early(&line));
        }
    }
    machine.cut()?;
    if let Cut::Closed(_) = cut {
        return Ok(());
    }
    // The machine keeps running: until the writer notices, it reports what was promised before the
    // cut. During recovery it notices late, since it tries to read every page of a dead disk.
    while let Some(line) = machine.line_within(Duration::from_secs(5))? {
        if take(&line)? {
            break;
        }
    }
    Ok(())
}

/// The words of a command line.
fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// One round of volumes for this number of rounds of the WAL.
const VOLUME_SHARE: u32 = 10;

struct Bench {
    seed: u64,
    rng: Rng,
    directory: PathBuf,
    /// The compiled `sim/src/bin/numbered.rs`.
    numbered: PathBuf,
    image: Image,
}

impl Bench {
    fn prepare(root: &Path, seed: u64) -> Result<Self, Missing> {
        let (directory, numbered, image) = prepare(root, Program::Numbered)?;
        Ok(Self { seed, rng: Rng::new(seed), directory, numbered, image })
    }

    fn medium(&self) -> PathBuf {
        self.directory.join("medium.img")
    }

    fn format(&self) -> Result<(), Error> {
        if self.medium().exists() {
            fs::remove_file(self.medium())?;
        }
        quietly(Command::new(&self.numbered).arg("format").arg(self.medium()))
    }

    /// Returns the records on the medium.
    fn held(&self) -> Result<RecordRange, Error> {
        let mut check = Command::new(&self.numbered);
        check.arg("check").arg(self.medium()).args(["--seed", &self.seed.to_string()]);
        let checked = check.output()?;
        let line = String::from_utf8_lossy(&checked.stdout).trim().to_owned();
        RecordRange::parse(&line)
            .ok_or_else(|| format!("unexpected content of the medium after the cut: {line}").into())
    }

    fn run(
        &self,
        disk: Disk,
        slow_flushes: bool,
        writer: &[String],
        cut: Cut,
        promises: &mut Promises,
    ) -> Result<(), Error> {
        let program = Program::Numbered;
        let config = Config { program, disk, media: &["medium.img"], slow_flushes, writer };
        let machine = Machine::start(&self.image, &self.directory, &config)?;
        run_until_cut(machine, cut, "held ", |line| Ok(promises.line(line)?))
    }

    /// Checks that a writer that does not flush loses promised records: otherwise this test could
    /// not fail.
    fn control(&self, disk: Disk) -> Result<(), Error> {
        self.format()?;
        let writer = self.writer(1, &["--durability", "device"]);
        let mut promises = Promises::default();
        self.run(disk, false, &writer, Cut::Load(Duration::from_secs(1)), &mut promises)?;
        let held = self.held()?;
        let (promised, kept) = (promises.next(), held.next);
        if kept >= promised {
            return Err(format!("none of {promised} records was lost without flushes").into());
        }
        println!("{} of {promised} records were lost without flushes", promised - kept);
        Ok(())
    }

    fn writer(&self, load: u64, more: &[&str]) -> Vec<String> {
        let (seed, load) = (self.seed.to_string(), load.to_string());
        words(&[&["--seed", &seed, "--load", &load], more].concat())
    }

    fn rounds(&mut self, rounds: u32) -> Result<(), Error> {
        self.format()?;
        let mut promises = Promises::default();
        for round in 1..=rounds {
            self.round(round, &mut promises)
                .map_err(|error| format!("seed {}, round {round}: {error}", self.seed))?;
        }
        println!("{} records were promised, none was lost", promises.next());
        Ok(())
    }

    fn round(&mut self, round: u32, promises: &mut Promises) -> Result<(), Error> {
        let millis = Duration::from_millis;
        let disk = Disk::ALL[self.rng.below(2) as usize];
        let slow_flushes = self.rng.below(2) == 0;
        let cut = match self.rng.below(5) {
            0 => Cut::Opening(self.rng.duration(millis(0), millis(400))),
            1 => Cut::Closed(1 + self.rng.below(1000)),
            _ => Cut::Load(self.rng.duration(millis(0), millis(3000))),
        };
        let load = self.rng.below(1 << 32);
        let writer = match cut {
            Cut::Closed(records) => self.writer(load, &["--records", &records.to_string()]),
            _ => self.writer(load, &[]),
        };
        let before = promises.next();
        self.run(disk, slow_flushes, &writer, cut, promises)?;
        let acknowledged = promises.next();
        let held = self.held()?;
        promises.check(held)?;
        let speed = if slow_flushes { ", slow flushes" } else { "" };
        println!(
            "round {round}: {disk}{speed}, cut {cut}: {} records acknowledged, {held} survived",
            acknowledged - before
        );
        Ok(())
    }
}
