//! Runs all engines in turn, round by round.

use std::fs;
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use alluvium_device::sim::Random;
use serde::{Deserialize, Serialize};

use crate::cgroup::Group;
use crate::child::{Message, Plan, Spec};
use crate::engine::Result;
use crate::engines::{self, Name};
use crate::report;
use crate::saved::{Log, Settings};
use crate::system;
use crate::workload::{ENTRY_BYTES, Puts, Sampler, Values, Workload, key};
use crate::{Data, Options};

const MIB: u64 = 1 << 20;
/// The number of entries from which a run is a measurement.
const LEAST_MEASURED: u64 = 1_000_000;
/// The memory of an in-memory index for each key: 16 bytes with the slack of a hash table. Every
/// engine gets it on top of its memory.
const INDEX_BYTES_PER_KEY: u64 = 32;
/// The ratio of memory to data if all data fit, and of data to memory if they do not.
const FITS: u64 = 3;
const LARGE: u64 = 4;
/// Less is not enough for some of the engines.
const MIN_MEMORY_BYTES: u64 = 24 * MIB;
/// For the program and what an allocator retains, in addition to an eighth of the memory.
const SLACK_BYTES: u64 = 128 * MIB;
/// For the program alone.
const PROGRAM_BYTES: u64 = 32 * MIB;
/// Disk space of engines with a limit, per byte of data: more than all puts, so that nothing is
/// evicted.
const DISK: u64 = 6;
const MIN_DISK_BYTES: u64 = 512 * MIB;
/// Free disk space for a run, per byte of data: engines without a limit defer garbage collection.
const FREE: u64 = 16;
/// Puts in a transaction: one, or many.
const BATCHES: [u32; 2] = [1, 1000];
/// The number of puts of such a trial: a fifth of the entries, at most this many.
const TRIAL_ENTRIES: u64 = 100_000;

/// The amount of memory, and the number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Scene {
    /// The data is larger than the memory.
    pub is_large: bool,
    pub threads: u64,
}

/// What a child has reported.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub engine: Name,
    #[serde(flatten)]
    pub scene: Scene,
    pub round: u32,
    #[serde(flatten)]
    pub message: Message,
}

/// The contents of the tables.
pub struct Results {
    pub entries: u64,
    pub engines: Vec<Name>,
    pub scenes: Vec<Scene>,
    pub outcomes: Vec<Outcome>,
    /// Notes on all figures, a line each.
    pub notes: Vec<String>,
    /// Failed runs, and why.
    pub failures: Vec<String>,
}

struct Race<'a> {
    options: &'a Options,
    /// Puts in a transaction, for engines with transactions.
    batches: Vec<(Name, u32)>,
    /// Why the memory is not limited by the system, if it is not.
    unbounded: Option<String>,
}

pub fn run(options: &Options) -> Result<()> {
    let is_measurement = options.is_measurement();
    let threads = match &options.threads[..] {
        [] if is_measurement => vec![1, 2],
        [] => vec![1],
        threads => threads.to_vec(),
    };
    let rounds = options.rounds();
    let engines =
        if options.engines.is_empty() { engines::ALL.to_vec() } else { options.engines.clone() };
    let sizes = match options.data {
        None => &[false, true][..],
        Some(Data::Fits) => &[false],
        Some(Data::Exceeds) => &[true],
    };
    let scenes: Vec<Scene> = sizes
        .iter()
        .flat_map(|is_large| {
            threads.iter().map(move |threads| Scene { is_large: *is_large, threads: *threads })
        })
        .collect();
    let needed_bytes = FREE * options.data_bytes();
    check_space(&options.dir, needed_bytes, "use fewer entries or another --dir")?;
    fs::create_dir_all(&options.out)?;
    let mut race = Race {
        options,
        batches: Vec::new(),
        unbounded: Group::new(options.memory_bytes(true)).err(),
    };
    let mut results = Results {
        entries: options.entries,
        engines: engines.clone(),
        scenes: scenes.clone(),
        outcomes: Vec::new(),
        notes: race.notes(),
        failures: Vec::new(),
    };
    for engine in engines.iter().filter(|engine| engine.has_transactions()) {
        let note = race.choose_batch(*engine).unwrap_or_else(|error| {
            format!("{}: choosing the size of transactions: {error}", engine.text())
        });
        println!("{note}");
        results.notes.push(note);
    }
    let mut log = Log::new(&options.out, race.settings(), &results.notes)?;
    for round in 1..=rounds {
        for scene in &scenes {
            for position in 0..engines.len() {
                // No engine is always the first.
                let engine = engines[(position + round as usize - 1) % engines.len()];
                println!("round {round} of {rounds}: {}, {}", report::scene(*scene), engine.text());
                for plan in [Plan::Ordered, Plan::Random] {
                    let spec = race.spec(engine, plan, *scene);
                    let run = race.child(&spec, |message| {
                        println!("  {}", report::line(message));
                        let outcome =
                            Outcome { engine, scene: *scene, round, message: message.clone() };
                        log.outcome(&outcome)?;
                        results.outcomes.push(outcome);
                        Ok(())
                    });
                    // A failure does not affect the figures of the others; it is reported at the
                    // end.
                    if let Err(error) = run {
                        let what = format!(
                            "{}, {}, round {round}: {error}",
                            engine.text(),
                            report::scene(*scene)
                        );
                        println!("  failed: {what}");
                        log.failure(&what)?;
                        results.failures.push(what);
                    }
                }
            }
        }
    }
    // Created by this program, and empty by now.
    let _ = fs::remove_dir(&options.dir);
    // A trial does not justify a plot.
    let plots = options.plots.as_deref().filter(|_| is_measurement);
    report::write(&results, &options.out, plots)
}

/// Creates the directory and checks that it is empty and has enough space.
pub fn check_space(dir: &Path, needed_bytes: u64, help: &str) -> Result<()> {
    fs::create_dir_all(dir)?;
    if fs::read_dir(dir)?.next().is_some() {
        let dir = dir.display();
        return Err(format!("{dir} is not empty; stores are created and removed there").into());
    }
    let system = rustix::fs::statvfs(dir)?;
    let free_bytes = system.f_bavail * system.f_frsize;
    if free_bytes < needed_bytes {
        return Err(format!(
            "{} has {} MiB free; up to {} MiB are needed there: {help}",
            dir.display(),
            free_bytes / MIB,
            needed_bytes / MIB
        )
        .into());
    }
    Ok(())
}

impl Options {
    /// Returns whether this is a measurement, and not a trial of the bench.
    pub fn is_measurement(&self) -> bool {
        self.entries >= LEAST_MEASURED
    }

    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.is_measurement() { 3 } else { 1 })
    }

    fn data_bytes(&self) -> u64 {
        self.entries * ENTRY_BYTES
    }

    fn index_bytes(&self) -> u64 {
        self.entries * INDEX_BYTES_PER_KEY
    }

    /// Returns the total memory of an engine.
    fn memory_bytes(&self, is_large: bool) -> u64 {
        let memory = match (is_large, self.memory) {
            (true, _) => self.data_bytes() / LARGE,
            (false, Some(mebibytes)) => mebibytes.saturating_mul(MIB),
            (false, None) => self.data_bytes() * FITS,
        };
        memory.max(MIN_MEMORY_BYTES) + self.index_bytes()
    }
}

/// Returns the limit on all memory of the process of an engine that is configured to use this much.
fn limit_bytes(engine: Name, memory_bytes: u64) -> u64 {
    match engine {
        // It has no such setting and uses what the system permits, to the last page; the others do
        // not.
        Name::Lmdb => memory_bytes + PROGRAM_BYTES,
        _ => memory_bytes / 8 * 9 + SLACK_BYTES,
    }
}

impl Race<'_> {
    /// Returns the notes before the figures.
    fn notes(&self) -> Vec<String> {
        let options = self.options;
        let memory = |is_large| {
            let beside = options.memory_bytes(is_large) - options.index_bytes();
            format!(
                "{} MiB of memory ({:.2} of the data) and {} MiB for an index",
                beside / MIB,
                beside as f64 / options.data_bytes() as f64,
                options.index_bytes() / MIB
            )
        };
        let (put, read) = harness();
        let notes = vec![
            format!(
                "{} entries, {} MiB of keys and values; where they fit: {}; where they do not: {}",
                options.entries,
                options.data_bytes() / MIB,
                memory(false),
                memory(true)
            ),
            match &self.unbounded {
                None => "memory is limited by a control group, including the page cache".into(),
                Some(reason) => format!(
                    "NOT COMPARABLE where data do not fit: no control group limits the memory, so \
                     the page cache is free for engines that use it ({reason})"
                ),
            },
            format!(
                "all figures include about {put:.3} us of harness for a put, {read:.3} us for a \
                 read"
            ),
            match system::reports_free_memory() {
                true => "the kernel can give free memory back to a host: there is a pause before \
                    each store, so that all begin with memory that the host has to find and \
                    clear"
                    .into(),
                false => "free memory stays with the kernel".into(),
            },
        ];
        for note in &notes {
            println!("{note}");
        }
        notes
    }

    fn settings(&self) -> Settings {
        let options = self.options;
        Settings {
            entries: options.entries,
            fits_bytes: options.memory_bytes(false),
            large_bytes: options.memory_bytes(true),
            seconds: options.seconds,
            is_bounded: self.unbounded.is_none(),
            has_pauses: system::reports_free_memory() && options.is_measurement(),
        }
    }

    fn spec(&self, engine: Name, plan: Plan, scene: Scene) -> Spec {
        let options = self.options;
        let batch = self.batches.iter().find(|(name, _)| *name == engine);
        Spec {
            engine,
            plan,
            path: options.dir.join("store"),
            entries: options.entries,
            threads: scene.threads,
            memory_bytes: options.memory_bytes(scene.is_large),
            index_bytes: options.index_bytes(),
            disk_bytes: (options.data_bytes() * DISK).max(MIN_DISK_BYTES),
            batch: batch.map_or(BATCHES[1], |(_, batch)| *batch),
            is_large: scene.is_large,
            seconds: options.seconds,
            patience: options.patience,
            group: None,
        }
    }

    /// Tries transactions of both sizes, and selects the one with less time per put.
    fn choose_batch(&mut self, engine: Name) -> Result<String> {
        let scene = Scene { is_large: false, threads: 1 };
        let entries = (self.options.entries / 5).min(TRIAL_ENTRIES);
        let mut tried = Vec::new();
        for batch in BATCHES {
            let spec = Spec { entries, batch, ..self.spec(engine, Plan::Trial, scene) };
            self.child(&spec, |message| {
                if let Message::Row(row) = message {
                    tried.push((row.wall_us, batch));
                }
                Ok(())
            })?;
        }
        let best = tried.iter().min_by(|one, other| one.0.total_cmp(&other.0));
        let (_, batch) = *best.ok_or("nothing was measured")?;
        self.batches.push((engine, batch));
        let tried: Vec<String> =
            tried.iter().map(|(us, batch)| format!("{us:.2} us with {batch}")).collect();
        Ok(format!(
            "{}: {batch} puts in a transaction of a fill ({}, {entries} puts each)",
            engine.text(),
            tried.join(", ")
        ))
    }

    /// Runs one child to its end.
    fn child(&self, spec: &Spec, mut on: impl FnMut(&Message) -> Result<()>) -> Result<()> {
        let limit = limit_bytes(spec.engine, spec.memory_bytes);
        let group = match &self.unbounded {
            None => Some(Group::new(limit)?),
            Some(_) => None,
        };
        let path = |group: &Group| -> PathBuf { group.path().to_owned() };
        let spec = Spec { group: group.as_ref().map(path), ..spec.clone() };
        // Dirty pages of the previous child must not be written while this one is measured.
        system::sync(&self.options.dir)?;
        if self.options.is_measurement() {
            system::wait_for_memory_reporting();
        }
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--child")
            .arg(serde_json::to_string(&spec)?)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().expect("standard output is piped");
        let mut heard = Ok(());
        for line in BufReader::new(stdout).lines() {
            // Output of a library is ignored.
            if let Ok(message) = serde_json::from_str::<Message>(&line?) {
                heard = heard.and_then(|()| on(&message));
            }
        }
        let status = child.wait()?;
        remove(&spec.path)?;
        heard?;
        match status.success() {
            true => Ok(()),
            false => {
                Err(format!("{status} (its memory was limited to {} MiB)", limit / MIB).into())
            }
        }
    }
}

/// Removes a store, if it exists.
pub fn remove(store: &Path) -> Result<()> {
    match fs::remove_dir_all(store) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns the processor time of making a put, and of making a key and checking its value, without
/// an engine.
fn harness() -> (f64, f64) {
    const TRIES: u64 = 1_000_000;
    let us = |from: Duration| (system::thread_cpu() - from).as_secs_f64() * 1e6 / TRIES as f64;
    let progress = AtomicU64::new(0);
    let limit = Duration::from_secs(60);
    let sampler = Sampler::new(limit, &progress);
    let mut puts = Puts::new(Workload::Fillrandom, TRIES, 0, 1, sampler);
    let before = system::thread_cpu();
    while let Some((key, value)) = puts.draw() {
        black_box((key, value));
    }
    let put = us(before);
    let mut sampler = Sampler::new(limit, &progress);
    let mut random = Random::new(1);
    let value = Values::new(1).draw(0, 1).to_vec();
    let before = system::thread_cpu();
    while sampler.operations < TRIES && sampler.tick(1) {
        let number = random.below(TRIES);
        black_box((key(number), Values::matches(black_box(&value), number, 1)));
    }
    (put, us(before))
}
