//! One engine in one process: its workloads, and their measurements.

use std::fs;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use alluvium_device::sim::{Random, Zipf};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::engine::{Engine, Result, Session, Setup};
use crate::engines::{self, Name, Visit};
use crate::system;
use crate::workload::{
    BATCH_KEYS, ENTRY_BYTES, Key, Puts, Sampler, Values, Workload, key, missing,
};

/// What is done to one store, starting empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plan {
    /// Filled in the order of the keys.
    Ordered,
    /// Filled in a random order, and then used.
    Random,
    /// Only to find a size of transactions.
    Trial,
}

impl Plan {
    pub fn workloads(self) -> &'static [Workload] {
        match self {
            Self::Ordered => &[Workload::Fillseq, Workload::Readseq],
            Self::Random => &[
                Workload::Fillrandom,
                Workload::Overwrite,
                Workload::Readrandom,
                Workload::Readmissing,
                Workload::Getmany,
                Workload::Mixed,
            ],
            Self::Trial => &[Workload::Fillrandom],
        }
    }
}

/// The instructions to a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub engine: Name,
    pub plan: Plan,
    pub path: PathBuf,
    pub entries: u64,
    pub threads: u64,
    pub memory_bytes: u64,
    pub index_bytes: u64,
    pub disk_bytes: u64,
    pub batch: u32,
    pub is_large: bool,
    /// Seconds after which a workload without dependents is ended.
    pub seconds: u64,
    /// Seconds after which filling the store is ended; the workloads that depend on it are then
    /// skipped.
    pub patience: u64,
    /// The control group that limits its memory.
    pub group: Option<PathBuf>,
}

/// A report of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Message {
    Row(Row),
    Store(Store),
}

/// The figures of a workload. Times are per operation, which is one key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub workload: Workload,
    pub operations: u64,
    /// The fraction of the reads of present keys that found a value.
    pub found: f64,
    /// Number of values that belonged to another key, an older generation, or an absent key.
    pub wrong: u64,
    /// From the first thread's start to the last one's end.
    pub wall_us: f64,
    /// Processor time of the threads that call the engine.
    pub cpu_us: f64,
    /// Processor time of the whole process, including deferred work of the engine.
    pub process_cpu_us: f64,
    /// Of one call, which is 32 keys in batched reads.
    pub p99_us: f64,
    pub resident_bytes: u64,
    pub peak_bytes: u64,
    /// It was ended by the time limit.
    pub is_cut: bool,
}

/// The final state of a plan.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Store {
    pub plan: Plan,
    pub disk_bytes: u64,
    /// Bytes of keys and values put.
    pub user_bytes: u64,
    /// Bytes written to the disk for them, until the store was closed and synced.
    pub written_bytes: u64,
    pub close_seconds: f64,
    /// The time to open the store again and read a value.
    pub open_seconds: f64,
    /// As `open_seconds`, without files that only speed up opening, if there are any.
    pub open_bare_seconds: Option<f64>,
    /// The fraction of the sampled keys that was present then, if all had been put.
    pub kept: Option<f64>,
}

/// Runs the plan and reports by lines of JSON on standard output.
pub fn run(spec: &Spec) -> Result<()> {
    if let Some(group) = &spec.group {
        cgroup::join(group).map_err(|error| format!("{}: {error}", group.display()))?;
    }
    match fs::remove_dir_all(&spec.path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    fs::create_dir_all(&spec.path)?;
    engines::with(spec.engine, Race { spec })
}

fn send(message: &Message) -> Result<()> {
    println!("{}", serde_json::to_string(message)?);
    Ok(())
}

struct Race<'a> {
    spec: &'a Spec,
}

impl Visit for Race<'_> {
    fn visit<E: Engine>(self) -> Result<()> {
        let spec = self.spec;
        let setup = Setup {
            path: spec.path.clone(),
            entries: spec.entries,
            data_bytes: spec.entries * ENTRY_BYTES,
            memory_bytes: spec.memory_bytes,
            index_bytes: spec.index_bytes,
            disk_bytes: spec.disk_bytes,
            batch: spec.batch,
            is_large: spec.is_large,
        };
        let written_before = system::written_bytes()?;
        let store = E::open(&setup)?;
        let (mut user_bytes, mut least) = (0, 1);
        let mut is_full = true;
        for workload in spec.plan.workloads() {
            if *workload == Workload::Readseq && !E::SCANS {
                continue;
            }
            if matches!(workload, Workload::Readseq | Workload::Readrandom) {
                warm(&store, spec)?;
            }
            let (row, puts) = measure(&store, spec, *workload, least)?;
            user_bytes += puts * ENTRY_BYTES;
            send(&Message::Row(row.clone()))?;
            if workload.fills() && row.is_cut {
                is_full = false;
                break;
            }
            if *workload == Workload::Overwrite && !row.is_cut {
                least = workload.generation();
            }
        }
        if spec.plan == Plan::Trial {
            return store.close();
        }
        let closing = Instant::now();
        store.close()?;
        let close_seconds = closing.elapsed().as_secs_f64();
        system::sync(&spec.path)?;
        let written_bytes = system::written_bytes()? - written_before;
        let disk_bytes = system::disk_bytes(&spec.path)?;
        let (open_seconds, kept) = reopen::<E>(&setup, is_full.then_some(least))?;
        let open_bare_seconds = if spec.engine == Name::Journal {
            engines::remove_hints(&spec.path)?;
            Some(reopen::<E>(&setup, None)?.0)
        } else {
            None
        };
        send(&Message::Store(Store {
            plan: spec.plan,
            disk_bytes,
            user_bytes,
            written_bytes,
            close_seconds,
            open_seconds,
            open_bare_seconds,
            kept,
        }))
    }
}

/// Reads for a while, or everything, so that caches are in a steady state: the first reads of a
/// newly filled store are influenced by the filling.
fn warm<E: Engine>(store: &E, spec: &Spec) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(WARM * spec.seconds);
    let mut session = store.session()?;
    if E::SCANS {
        let mut passed = 0_u64;
        return session.scan(|_, _| {
            passed += 1;
            !passed.is_multiple_of(LOOKED_FOR.into()) || Instant::now() < until
        });
    }
    let mut random = Random::new(2);
    while Instant::now() < until {
        for _ in 0..LOOKED_FOR {
            session.get(&key(random.below(spec.entries)), |_| ())?;
        }
    }
    Ok(())
}

/// The length of the warm-up, in workloads.
const WARM: u64 = 2;

/// Number of keys sampled after opening.
const LOOKED_FOR: u32 = 1000;

/// Opens the store, reads a value, and closes it; returns the time of the first two, and the
/// fraction of sampled keys that had a value of at least this generation.
fn reopen<E: Engine>(setup: &Setup, least: Option<u8>) -> Result<(f64, Option<f64>)> {
    let opening = Instant::now();
    let store = E::open(setup)?;
    store.session()?.get(&key(0), |_| ())?;
    let seconds = opening.elapsed().as_secs_f64();
    let mut kept = None;
    if let Some(least) = least {
        let mut session = store.session()?;
        let mut random = Random::new(1);
        let mut found = 0;
        for _ in 0..LOOKED_FOR {
            let number = random.below(setup.entries);
            session.get(&key(number), |value| {
                found += u32::from(Values::matches(value, number, least));
            })?;
        }
        kept = Some(f64::from(found) / f64::from(LOOKED_FOR));
    }
    store.close()?;
    Ok((seconds, kept))
}

/// A workload, for all of its threads.
struct Job<'a> {
    spec: &'a Spec,
    workload: Workload,
    /// The oldest generation of values that may be read.
    least: u8,
    zipf: Option<Zipf>,
    limit: Duration,
}

/// The results of one thread.
struct ThreadResult {
    started: Instant,
    ended: Instant,
    cpu: Duration,
    operations: u64,
    puts: u64,
    counts: ReadCounts,
    latencies: Histogram<u64>,
    is_cut: bool,
}

/// The results of reads.
#[derive(Clone, Copy, Default)]
struct ReadCounts {
    right: u64,
    wrong: u64,
}

impl ReadCounts {
    fn count(&mut self, is_right: bool) {
        self.right += u64::from(is_right);
        self.wrong += u64::from(!is_right);
    }
}

/// The interval between progress lines of a long workload.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
const POLL_EVERY: Duration = Duration::from_millis(50);

/// Runs one workload; returns its figures and the number of puts.
fn measure<E: Engine>(store: &E, spec: &Spec, workload: Workload, least: u8) -> Result<(Row, u64)> {
    let job = Job {
        spec,
        workload,
        least,
        zipf: (workload == Workload::Mixed).then(|| Zipf::new(spec.entries)),
        limit: Duration::from_secs(if workload.fills() { spec.patience } else { spec.seconds }),
    };
    let progress: Vec<AtomicU64> = (0..spec.threads).map(|_| AtomicU64::new(0)).collect();
    let barrier = Barrier::new(progress.len());
    system::reset_peak()?;
    let process_before = system::process_cpu();
    let taken = thread::scope(|scope| {
        let (job, barrier) = (&job, &barrier);
        let running: Vec<_> = (0_u64..)
            .zip(&progress)
            .map(|(thread, progress)| {
                scope.spawn(move || one_thread(store, job, thread, progress, barrier))
            })
            .collect();
        let mut last_report = Instant::now();
        while !running.iter().all(thread::ScopedJoinHandle::is_finished) {
            thread::sleep(POLL_EVERY);
            if last_report.elapsed() >= PROGRESS_EVERY {
                last_report = Instant::now();
                let done: u64 = progress.iter().map(|done| done.load(Ordering::Relaxed)).sum();
                eprintln!("    {}: {done} operations", workload.text());
            }
        }
        running
            .into_iter()
            .map(|thread| thread.join().expect("a workload does not panic"))
            .collect::<Result<Vec<ThreadResult>>>()
    })?;
    let resident = system::resident()?;
    if workload.writes() || workload == Workload::Mixed {
        system::wait_until_idle();
    }
    let process_cpu = system::process_cpu() - process_before;
    let puts = taken.iter().map(|it| it.puts).sum();
    Ok((row(spec, workload, &taken, process_cpu, resident), puts))
}

fn row(
    spec: &Spec,
    workload: Workload,
    taken: &[ThreadResult],
    process_cpu: Duration,
    resident: system::Resident,
) -> Row {
    let operations: u64 = taken.iter().map(|it| it.operations).sum();
    let puts: u64 = taken.iter().map(|it| it.puts).sum();
    let started = taken.iter().map(|it| it.started).min();
    let ended = taken.iter().map(|it| it.ended).max();
    let wall = ended.zip(started).map_or(Duration::ZERO, |(ended, started)| ended - started);
    let cpu: Duration = taken.iter().map(|it| it.cpu).sum();
    let right: u64 = taken.iter().map(|it| it.counts.right).sum();
    let is_cut = taken.iter().any(|it| it.is_cut);
    let wanted = match workload {
        Workload::Readmissing => 0,
        // Entries that are not returned at all are missing too.
        Workload::Readseq if !is_cut => spec.entries * spec.threads,
        _ => operations - puts,
    };
    let per_operation = |time: Duration| time.as_secs_f64() * 1e6 / operations.max(1) as f64;
    let mut latencies = taken[0].latencies.clone();
    for other in &taken[1..] {
        latencies.add(&other.latencies).expect("the same bounds");
    }
    Row {
        workload,
        operations,
        found: if wanted == 0 { 1.0 } else { right as f64 / wanted as f64 },
        wrong: taken.iter().map(|it| it.counts.wrong).sum(),
        wall_us: per_operation(wall),
        cpu_us: per_operation(cpu),
        process_cpu_us: per_operation(process_cpu),
        p99_us: latencies.value_at_quantile(0.99) as f64 / 1e3,
        resident_bytes: resident.now_bytes,
        peak_bytes: resident.peak_bytes,
        is_cut,
    }
}

fn one_thread<E: Engine>(
    store: &E,
    job: &Job<'_>,
    thread: u64,
    progress: &AtomicU64,
    barrier: &Barrier,
) -> Result<ThreadResult> {
    let session = store.session();
    let share = job.spec.entries / job.spec.threads;
    // Created before the time starts.
    let mut mixed = Values::new(thread);
    let mut puts = Puts::new(
        job.workload,
        job.spec.entries,
        thread,
        job.spec.threads,
        Sampler::new(job.limit, progress),
    );
    barrier.wait();
    let mut session = session?;
    puts.sampler.begin(job.limit);
    let (started, cpu) = (Instant::now(), system::thread_cpu());
    let mut counts = ReadCounts::default();
    let mut extra_puts = 0;
    if job.workload.writes() {
        session.fill(&mut puts)?;
    } else {
        let sampler = &mut puts.sampler;
        (counts, extra_puts) = read(&mut session, job, thread, share, sampler, &mut mixed)?;
    }
    let (ended, cpu) = (Instant::now(), system::thread_cpu() - cpu);
    drop(session);
    let Sampler { latencies, operations, is_over, .. } = puts.sampler;
    let puts = if job.workload.writes() { operations } else { extra_puts };
    Ok(ThreadResult { started, ended, cpu, operations, puts, counts, latencies, is_cut: is_over })
}

/// Runs the workloads that read; returns the results and the number of puts.
fn read(
    session: &mut impl Session,
    job: &Job<'_>,
    thread: u64,
    share: u64,
    sampler: &mut Sampler<'_>,
    values: &mut Values,
) -> Result<(ReadCounts, u64)> {
    let (entries, least) = (job.spec.entries, job.least);
    // Different keys in each workload: what one has read must not be cached for the next.
    let mut random = Random::new(1000 * (job.workload as u64 + 1) + thread);
    let mut counts = ReadCounts::default();
    let mut puts = 0;
    match job.workload {
        Workload::Readseq => session.scan(|key, value| {
            if !sampler.tick(1) {
                return false;
            }
            let number =
                key.first_chunk::<8>().map_or(u64::MAX, |bytes| u64::from_be_bytes(*bytes));
            counts.count(Values::matches(value, number, least));
            true
        })?,
        Workload::Readmissing => {
            while sampler.operations < share && sampler.tick(1) {
                session.get(&missing(random.below(entries)), |_| counts.count(false))?;
            }
        }
        Workload::Getmany => {
            let mut numbers = [0; BATCH_KEYS];
            let mut keys: [Key; BATCH_KEYS] = [[0; 16]; BATCH_KEYS];
            while sampler.operations < share && sampler.tick(BATCH_KEYS as u64) {
                for (number, key_of) in numbers.iter_mut().zip(&mut keys) {
                    *number = random.below(entries);
                    *key_of = key(*number);
                }
                session.get_many(&keys, |at, value| {
                    counts.count(Values::matches(value, numbers[at], least));
                })?;
            }
        }
        Workload::Mixed => {
            let zipf = job.zipf.as_ref().expect("made for this workload");
            while sampler.operations < share && sampler.tick(1) {
                let number = zipf.next(&mut random);
                if random.below(100) < 5 {
                    let value = values.draw(number, job.workload.generation());
                    session.put(&key(number), value)?;
                    puts += 1;
                } else {
                    session.get(&key(number), |value| {
                        counts.count(Values::matches(value, number, least));
                    })?;
                }
            }
        }
        _ => {
            while sampler.operations < share && sampler.tick(1) {
                let number = random.below(entries);
                session.get(&key(number), |value| {
                    counts.count(Values::matches(value, number, least))
                })?;
            }
        }
    }
    Ok((counts, puts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_runs_with_every_engine() {
        for engine in engines::ALL {
            for plan in [Plan::Ordered, Plan::Random, Plan::Trial] {
                let directory = tempfile::tempdir().unwrap();
                let spec = Spec {
                    engine,
                    plan,
                    path: directory.path().join("store"),
                    entries: 2000,
                    threads: 2,
                    memory_bytes: 64 << 20,
                    index_bytes: 2000 * 32,
                    disk_bytes: 512 << 20,
                    batch: 100,
                    is_large: plan == Plan::Random,
                    // Engines without iteration warm up for this long.
                    seconds: 1,
                    patience: 600,
                    group: None,
                };
                run(&spec).unwrap_or_else(|error| panic!("{}, {plan:?}: {error}", engine.text()));
            }
        }
    }

    #[test]
    fn messages_are_readable_lines() {
        let store = Store {
            plan: Plan::Random,
            disk_bytes: 1,
            user_bytes: 2,
            written_bytes: 3,
            close_seconds: 0.5,
            open_seconds: 1.5,
            open_bare_seconds: None,
            kept: Some(1.0),
        };
        let line = serde_json::to_string(&Message::Store(store)).unwrap();
        assert!(line.starts_with(r#"{"kind":"store","plan":"random","#), "{line}");
        let Ok(Message::Store(store)) = serde_json::from_str(&line) else { panic!("{line}") };
        assert_eq!(store.kept, Some(1.0));
    }
}
