//! Kills a process repeatedly, and compares what is left with what it reported.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use alluvium_device::sim::Random;
use alluvium_journal::{Cache, Durability, inspect};
use tempfile::TempDir;

use super::plan::{KEYS, Left, MEMORY_BYTES, MIB, Plan, THREADS};
use super::process::Process;
use super::{PATIENCE, Result};

/// Writes of each thread before it pauses.
const BURST: u64 = 3000;

/// What a process has reported between an opening and its end.
#[derive(Default)]
struct Reported {
    /// Writes that have returned, in the order of the reports.
    done: Vec<(usize, u64)>,
    /// By thread: the last write before a flush that has returned.
    flushed: [u64; THREADS],
    /// The process has finished its writes and has had time for its background work.
    is_idle: bool,
}

impl Reported {
    fn parse(&mut self, line: &str) -> Result<()> {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["done", thread, number] => self.done.push((thread.parse()?, number.parse()?)),
            ["flushed", thread, number] => {
                self.flushed[thread.parse::<usize>()?] = number.parse()?;
            }
            _ => {}
        }
        Ok(())
    }
}

pub(super) struct Campaign {
    plan: Plan,
    pub(super) directory: TempDir,
    /// By thread: the number of writes that certainly survive, and their result.
    from: [u64; THREADS],
    base: [Left; THREADS],
    reported: Reported,
    random: Random,
    pub(super) writes: usize,
    pub(super) kills: usize,
}

/// The first and last number of the writes that may be the last surviving one.
type Fit = (u64, u64);

impl Campaign {
    pub(super) fn new(plan: Plan) -> Result<Self> {
        Ok(Self {
            plan,
            directory: tempfile::tempdir()?,
            from: [0; THREADS],
            base: Default::default(),
            reported: Reported::default(),
            random: Random::new(plan.seed),
            writes: 0,
            kills: 0,
        })
    }

    /// Returns the last write of a thread that has returned.
    fn done(&self, thread: usize) -> u64 {
        let mut done = self.reported.done.iter().rev();
        done.find(|(of, _)| *of == thread).map_or(self.from[thread], |(_, number)| *number)
    }

    /// Kills a process in the middle of writing, perhaps some more while they open the cache, and
    /// examines what is left.
    pub(super) fn round(&mut self) -> Result<()> {
        let mut process = self.start()?;
        if self.plan.evicts && self.plan.durability != Durability::Always {
            // What was lost and what was evicted cannot be distinguished the next time: start over.
            drop(process);
            self.directory = tempfile::tempdir()?;
            (self.from, self.base) = ([0; THREADS], Default::default());
            process = self.start()?;
        }
        let is_burst = !self.plan.evicts
            && self.plan.durability != Durability::Always
            && self.random.chance(0.3);
        process.go(self.from.map(|from| from + 1), if is_burst { BURST } else { 0 })?;
        let mut waits_for: HashSet<String> = (0..THREADS)
            .map(|thread| match is_burst {
                true => format!("idle {thread}"),
                // The first write of each: a round without any would check nothing.
                false => format!("done {thread} {}", self.from[thread] + 1),
            })
            .collect();
        while !waits_for.is_empty() {
            let line = process.line()?;
            self.reported.parse(&line)?;
            waits_for.remove(&line);
        }
        if is_burst {
            self.wait_for_files()?;
            self.reported.is_idle = true;
        } else {
            thread::sleep(Duration::from_micros(self.random.below(60_000)));
        }
        for line in process.kill()? {
            self.reported.parse(&line)?;
        }
        self.kills += 1;
        self.writes += self.reported.done.len();
        while self.random.chance(0.3) {
            let process = Process::start(self.directory.path(), &self.plan)?;
            thread::sleep(Duration::from_micros(self.random.below(30_000)));
            // It is opening the cache or has done so, and was given nothing to write.
            process.kill()?;
            self.kills += 1;
        }
        Ok(())
    }

    /// Starts a process that opens the cache, and checks what it found.
    fn start(&mut self) -> Result<Process> {
        let process = Process::start(self.directory.path(), &self.plan)?;
        let fits = self.check(&process.found()?)?;
        for (thread, (_, last)) in fits.into_iter().enumerate() {
            // With evictions, only writes that returned are known to have happened.
            let until = if self.plan.evicts { self.done(thread) } else { last };
            for number in self.from[thread] + 1..=until {
                self.plan.apply(&mut self.base[thread], thread, number);
            }
            self.from[thread] = until;
        }
        self.reported = Reported::default();
        Ok(process)
    }

    /// Compares what was found with the guarantees.
    fn check(&self, found: &[Left]) -> Result<Vec<Fit>> {
        let fits = (0..THREADS).map(|thread| self.fit(thread, &found[thread]));
        let fits = fits.collect::<Result<Vec<_>>>()?;
        let mut lost_bytes = 0;
        for (thread, (_, last)) in fits.iter().enumerate() {
            let lost = last + 1..=self.done(thread);
            lost_bytes += lost.map(|it| self.plan.record_bytes(thread, it)).sum::<u64>();
        }
        let may_lose = match (self.plan.durability, self.reported.is_idle) {
            (Durability::Always, _) | (Durability::Interval(_), true) => 0,
            // What the newest journal contains before it is full.
            (Durability::None, true) => MIB,
            // What is in memory and not yet written.
            _ => MEMORY_BYTES + MIB,
        };
        if lost_bytes > may_lose as u64 {
            return Err(format!("{lost_bytes} bytes are lost, more than {may_lose}").into());
        }
        if !self.plan.evicts {
            self.check_order(&fits)?;
        }
        Ok(fits)
    }

    /// Returns after how many writes of a thread the contents are those found.
    fn fit(&self, thread: usize, found: &Left) -> Result<Fit> {
        let done = self.done(thread);
        let least = match self.plan.durability {
            Durability::Always => done,
            // What was read from files at the last opening is in files.
            _ => self.from[thread].max(self.reported.flushed[thread]),
        };
        let mut model = self.base[thread].clone();
        let differs = |model: &Left, key: u64| {
            let (is, should) = (found.get(&key), model.get(&key));
            is != should && !(self.plan.evicts && is.is_none())
        };
        let mut wrong: HashSet<u64> = (0..KEYS).filter(|key| differs(&model, *key)).collect();
        let mut fit: Option<Fit> = None;
        // One more may have been in progress.
        for number in self.from[thread]..=done + 1 {
            if number > self.from[thread] {
                let key = self.plan.apply(&mut model, thread, number);
                if differs(&model, key) {
                    wrong.insert(key);
                } else {
                    wrong.remove(&key);
                }
            }
            if wrong.is_empty() && number >= least {
                fit = Some((fit.map_or(number, |(first, _)| first), number));
            }
        }
        fit.ok_or_else(|| {
            format!(
                "thread {thread}: no number of writes between {least} and {} leaves what there is",
                done + 1
            )
            .into()
        })
    }

    /// Checks that no write survives without its predecessors: those that had returned to one
    /// thread when another one began a surviving write.
    fn check_order(&self, fits: &[Fit]) -> Result<()> {
        for (thread, (first, _)) in fits.iter().enumerate() {
            // It began the write after the one before it had returned.
            let begun =
                self.reported.done.iter().position(|(of, it)| *of == thread && it + 1 == *first);
            let Some(begun) = begun else { continue };
            for (other, (_, last)) in fits.iter().enumerate() {
                let before = self.reported.done[..begun].iter().rev().find(|(of, _)| *of == other);
                if let Some((_, number)) = before.filter(|(_, number)| number > last) {
                    return Err(format!(
                        "write {first} of thread {thread} is left, and write {number} of thread \
                         {other} before it is not"
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    /// Waits, without further writes, until the process has as little unwritten data as permitted.
    /// Examines a copy, as another process would find it.
    fn wait_for_files(&mut self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        self.reported.is_idle = true;
        loop {
            match self.check_copy() {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > until => {
                    return Err(format!("long after the last write: {error}").into());
                }
                // The copy was made while the files changed, or too early.
                Err(_) => {}
            }
        }
    }

    fn check_copy(&self) -> Result<()> {
        let copy = copy_of(self.directory.path())?;
        let cache = Cache::open(copy.path(), self.plan.options())?;
        self.check(&self.plan.left_in(&cache)?).map(drop)
    }

    /// Performs the last opening in this process.
    pub(super) fn end(&self) -> Result<()> {
        let cache = Cache::open(self.directory.path(), self.plan.options())?;
        if cache.recovered().damaged_bytes > 0 {
            return Err(format!("{:?}", cache.recovered()).into());
        }
        self.check(&self.plan.left_in(&cache)?)?;
        cache.close()?;
        inspect(self.directory.path(), |report| -> Result<()> {
            match report.damaged_bytes {
                0 => Ok(()),
                bytes => {
                    Err(format!("journal {}: {bytes} bytes are damaged", report.number).into())
                }
            }
        })?;
        Ok(())
    }
}

/// Copies the directory; files may appear, disappear and change meanwhile.
fn copy_of(directory: &Path) -> Result<TempDir> {
    let copy = tempfile::tempdir()?;
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        names.push(entry?.file_name());
    }
    names.sort();
    for name in names {
        match std::fs::copy(directory.join(&name), copy.path().join(&name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            copied => drop(copied?),
        }
    }
    Ok(copy)
}
