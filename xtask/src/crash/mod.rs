//! The crash test: the power of a disk is really cut under the WAL, and acknowledged records must
//! survive.
//!
//! `cargo xtask sim` cuts the power of a simulated disk, and `cargo xtask kill` kills the process;
//! here everything down to the disk is real: io_uring, a kernel's block layer and drivers, flushes
//! and FUA, and a volatile cache that is lost ([`guest`]). The writer reports over a serial line
//! what it was promised, [`journal`] compares.

mod guest;
mod journal;

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
use guest::{Config, Disk, Machine};
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
    let name = format!("{rounds} power cuts, seed {seed}");
    let mut report = Report::default();
    report.suite("crash", || {
        println!("repeat with: cargo xtask crash --rounds {rounds} --seed {seed}");
        let mut bench = match Bench::prepare(root, seed) {
            Ok(bench) => bench,
            Err(Missing::NotAllowed(reason)) => {
                println!("skipped: {reason}");
                return Ok(vec![Case::skipped(&name, reason)]);
            }
            Err(Missing::Failed(error)) => return Err(error),
        };
        let mut cases: Vec<Case> = Disk::ALL
            .iter()
            .map(|disk| {
                Case::run(&format!("{disk} loses what is not flushed"), || bench.control(*disk))
            })
            .collect();
        cases.push(Case::run(&name, || bench.rounds(rounds)));
        if cases.iter().any(Case::has_failed) {
            println!("medium, console and logs are kept in {}", bench.directory.display());
        } else {
            fs::remove_dir_all(&bench.directory)?;
        }
        Ok(cases)
    });
    Ok(report)
}

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
        let directory = root.join("target/e2e/run/crash");
        if directory.exists() {
            fs::remove_dir_all(&directory).map_err(Error::from)?;
        }
        fs::create_dir_all(&directory).map_err(Error::from)?;
        let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
        let numbered = root.join(target).join("debug/numbered");
        let package = ["--package", "alluvium-sim", "--bin", "numbered"];
        quietly(cargo(root).args(["build", "--locked"]).args(package))?;
        let image = guest::image(&root.join("target/e2e/crash"), &directory, &numbered)?;
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

    /// Runs a machine until the power is cut. `on_line` gets each line of the writer.
    fn run(
        &self,
        config: &Config<'_>,
        cut: Cut,
        mut on_line: impl FnMut(&str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut machine = Machine::start(&self.image, &self.directory, config)?;
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
                Cut::Load(after) if line.starts_with("held ") => thread::sleep(after),
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
        // The machine keeps running: until the writer notices, it reports what was promised before
        // the cut. During recovery it notices late, since it tries to read every page of a dead
        // disk.
        while let Some(line) = machine.line_within(Duration::from_secs(5))? {
            if take(&line)? {
                break;
            }
        }
        Ok(())
    }

    /// Checks that a writer that does not flush loses promised records: otherwise this test could
    /// not fail.
    fn control(&self, disk: Disk) -> Result<(), Error> {
        self.format()?;
        let writer = self.writer(1, &["--durability", "device"]);
        let config = Config { disk, slow_flushes: false, writer: &writer };
        let mut promises = Promises::default();
        self.run(&config, Cut::Load(Duration::from_secs(1)), |line| Ok(promises.line(line)?))?;
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
        let arguments = ["--seed", &seed, "--load", &load];
        arguments.iter().chain(more).map(|&word| word.to_owned()).collect()
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
        let config = Config { disk, slow_flushes, writer: &writer };
        self.run(&config, cut, |line| Ok(promises.line(line)?))?;
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
