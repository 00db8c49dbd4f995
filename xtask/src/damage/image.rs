//! Images: the files of servers after a load, with the models of what they have acknowledged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::files::{CATALOGS, Files, WAL};
use super::layout::{objects, wal_records};
use super::log_lines::Reported;
use super::model::{Model, Outcome, Partition};
use super::observe::{Observation, Reader};
use super::process::{Installation, Process, Settings, Start};
use super::verdict::{Facts, judge};
use super::window::Offsets;
use super::work::{ABORTED_OFFSETS, Worker};
use crate::Error;
use crate::rng::Rng;
use crate::server::Ending;

/// The longest wait for uploads and for log compaction, which run as often as possible.
const UPLOAD_LIMIT: Duration = Duration::from_secs(60);
/// After this time without a write, the log's header contains the durable offset, so that it is
/// known after a SIGKILL.
pub(super) const IDLE: Duration = Duration::from_secs(3);

/// Steps of the load that are uploaded one by one: enough for two snapshots of the catalog.
const UPLOADS: usize = 140;

/// Half of the steps under load between the last idle period and the end.
const BURST: usize = 20;

/// The idempotent producer that writes as long as servers run, and the one that writes nothing
/// between the damage and the second start after it.
pub(super) const BUSY: usize = 0;
pub(super) const IDLE_PRODUCER: usize = 1;

/// The load of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Load {
    Plain,
    Transactional,
    Compacted,
    Grouped,
}

impl Load {
    pub(super) const ALL: [Self; 4] =
        [Self::Plain, Self::Transactional, Self::Compacted, Self::Grouped];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Transactional => "transactional",
            Self::Compacted => "compacted",
            Self::Grouped => "grouped",
        }
    }

    fn topic(self) -> &'static str {
        match self {
            Self::Plain => "events",
            Self::Transactional => "ledger",
            Self::Compacted => "table",
            Self::Grouped => "orders",
        }
    }
}

/// How the server of an image ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Stopped,
    /// Killed while idle, when a header of its log proves that everything acknowledged is durable.
    Killed,
    /// Killed right after an answer, under load.
    KilledUnderLoad,
}

impl End {
    pub(super) const ALL: [Self; 3] = [Self::Stopped, Self::Killed, Self::KilledUnderLoad];

    fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Killed => "killed",
            Self::KilledUnderLoad => "killed-under-load",
        }
    }
}

/// The files of a server that has ended.
#[derive(Clone)]
pub(super) struct Image {
    pub(super) load: Load,
    pub(super) end: End,
    pub(super) files: Files,
    /// Earlier states of its log and its catalog. They are not to be restored together: that would
    /// be a backup, which cannot be distinguished from the last state.
    pub(super) earlier: Files,
    pub(super) model: Model,
    /// The partition of each stream.
    pub(super) streams: BTreeMap<u64, Partition>,
}

impl Image {
    pub(super) fn name(load: Load, end: End) -> String {
        format!("{}-{}", load.name(), end.name())
    }

    /// Runs a server in `directory` and keeps its files. An image from an earlier run in that
    /// directory is used instead, unless an earlier version of the campaign wrote it.
    pub(super) fn build(
        binary: &Path,
        directory: &Path,
        load: Load,
        end: End,
        seed: u64,
    ) -> Result<Self, Error> {
        let model_path = directory.join("model.json");
        let kept = fs::read(&model_path).ok();
        let kept = kept.and_then(|kept| serde_json::from_slice::<Model>(&kept).ok());
        if kept.is_none() {
            Installation::clear(directory)?;
            let installation =
                Installation { binary: binary.to_owned(), directory: directory.join("server") };
            Installation::clear(&installation.directory)?;
            let model = run(&installation, directory, load, end, seed)?;
            fs::write(&model_path, serde_json::to_vec(&model)?)?;
        }
        let model: Model = serde_json::from_slice(&fs::read(&model_path)?)?;
        let files = Files::load(&directory.join("server"))?;
        let earlier = Files::load(&directory.join("earlier"))?;
        let streams = streams(&files, &model);
        Ok(Self { load, end, files, earlier, model, streams })
    }
}

/// Maps streams to partitions by the records found in them.
fn streams(files: &Files, model: &Model) -> BTreeMap<u64, Partition> {
    let mut by_id: BTreeMap<u64, Partition> = BTreeMap::new();
    for partition in model.partitions() {
        let records = model.log(&partition).records.values();
        by_id.extend(records.map(|record| (record.id, partition.clone())));
    }
    let mut positions: Vec<(u64, &str, u64, u64)> = Vec::new();
    for record in wal_records(files) {
        positions.push((record.extent.stream, WAL, record.at, record.len));
    }
    let objects = objects(files);
    for object in &objects {
        for block in &object.blocks {
            positions.push((block.extent.stream, &object.name, block.at, block.len));
        }
    }
    let mut streams = BTreeMap::new();
    for (stream, file, at, len) in positions {
        let bytes = files.get(file).map(|content| content.range(at, len)).unwrap_or_default();
        if let Some(partition) = first_record(&bytes).and_then(|id| by_id.get(&id)) {
            streams.entry(stream).or_insert_with(|| partition.clone());
        }
    }
    streams
}

/// Returns the number of the first record in a batch: each value begins with it.
fn first_record(bytes: &[u8]) -> Option<u64> {
    const WORD: &[u8] = b"record ";
    let at = bytes.windows(WORD.len()).position(|window| window == WORD)? + WORD.len();
    let digits = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit());
    String::from_utf8(digits.copied().collect()).ok()?.parse().ok()
}

fn started(installation: &Installation, uploads: bool) -> Result<Process, Error> {
    match installation.start(Settings { uploads, disk_cache: true })? {
        Start::Ready(process) => Ok(process),
        Start::Ended(status) => {
            Err(format!("the server of an image ended with {status}:\n{}", installation.log()?)
                .into())
        }
        Start::Hangs => Err("the server of an image does not start".into()),
    }
}

fn run(
    installation: &Installation,
    directory: &Path,
    load: Load,
    end: End,
    seed: u64,
) -> Result<Model, Error> {
    let mut rng = Rng::new(seed.wrapping_mul(16) + load as u64 * 4 + end as u64);
    let mut model = Model::default();
    let process = started(installation, true)?;
    {
        let mut worker = Worker::new(process.address, &mut model)?;
        prepare(&mut worker, load)?;
        // Some objects, each with several blocks.
        for _ in 0..5 {
            for _ in 0..40 {
                step(&mut worker, load, &mut rng, true)?;
            }
            wait_until(&process, "alluvium_log_cache_pinned_bytes", &|bytes| bytes == 0.0)?;
        }
        // Each upload adds an object to the catalog; a snapshot follows after 64 of them.
        for _ in 0..UPLOADS {
            step(&mut worker, load, &mut rng, true)?;
            wait_until(&process, "alluvium_log_cache_pinned_bytes", &|bytes| bytes == 0.0)?;
        }
        if load == Load::Compacted {
            let passes = "alluvium_kafka_log_compactions_total";
            wait_until(&process, passes, &|passes| passes > 0.0)?;
        }
    }
    process.end(Ending::Sigterm)?;

    // Reads fill the disk cache, and stopping writes the part of it that is in memory.
    let process = started(installation, false)?;
    observe(&process, &model)?;
    process.end(Ending::Sigterm)?;

    let mut earlier = Files::load(&installation.directory)?;
    earlier.0.retain(|name, _| name == WAL || name.starts_with(CATALOGS));
    earlier.keep(&directory.join("earlier"))?;

    // Data written from here on stays in the log.
    let process = started(installation, false)?;
    {
        let mut worker = Worker::new(process.address, &mut model)?;
        for _ in 0..3 {
            for _ in 0..40 {
                step(&mut worker, load, &mut rng, true)?;
            }
            worker.change_topics()?;
        }
        // A transaction that stays open.
        if load == Load::Transactional {
            let partition = Partition { topic: load.topic().into(), index: 1 };
            let records = worker.records(2, 200, None);
            worker.end(0, Outcome::Committed)?;
            let base = worker.write(0, &partition, records)?;
            worker.stage_offset(0, "readers", &partition, base + ABORTED_OFFSETS)?;
        }
    }
    thread::sleep(IDLE);
    let observation = observe(&process, &model)?;
    // Markers are acknowledged without an offset, and have one.
    for (partition, contents) in &observation.partitions {
        let log = model.log_mut(partition);
        log.next = contents.all.high_watermark;
        log.batches = contents.all.batches.clone();
        log.batches.sort_unstable();
    }
    let (reported, streams) = (Reported::default(), BTreeMap::new());
    let facts = Facts {
        model: &model,
        observation: &observation,
        reported: &reported,
        reach: None,
        streams: &streams,
        window: &Offsets::new(),
        changes_in_window: false,
        health: "",
    };
    if let Some(finding) = judge(&facts).first() {
        return Err(format!("without damage: {}: {}", finding.verdict, finding.detail).into());
    }
    if end == End::KilledUnderLoad {
        let mut worker = Worker::new(process.address, &mut model)?;
        for _ in 0..BURST {
            step(&mut worker, load, &mut rng, true)?;
        }
        // Not in the catalog yet, but in the log, which the records after it prove.
        worker.change_topics()?;
        for _ in 0..BURST {
            step(&mut worker, load, &mut rng, true)?;
        }
    }
    process.end(if end == End::Stopped { Ending::Sigterm } else { Ending::Sigkill })?;
    Ok(model)
}

fn observe(process: &Process, model: &Model) -> Result<Observation, Error> {
    Reader::connect(process.address, model, &|_, _| false)?.observe(&mut |_| 0)
}

pub(super) fn wait_until(
    process: &Process,
    metric: &str,
    is_done: &dyn Fn(f64) -> bool,
) -> Result<(), Error> {
    let begun = Instant::now();
    loop {
        let value = process.metric(metric)?.ok_or_else(|| format!("no metric {metric}"))?;
        if is_done(value) {
            return Ok(());
        }
        if begun.elapsed() > UPLOAD_LIMIT {
            return Err(format!("{metric} stays at {value}").into());
        }
        thread::sleep(Duration::from_millis(10));
    }
}

pub(super) fn prepare(worker: &mut Worker<'_>, load: Load) -> Result<(), Error> {
    let topic = load.topic();
    match load {
        Load::Compacted => {
            let configs = [
                ("cleanup.policy", "compact"),
                ("min.cleanable.dirty.ratio", "0.01"),
                ("segment.ms", "100"),
            ];
            worker.create_topic(topic, 2, &configs)?;
            worker.model.compacted.push(topic.into());
        }
        _ => worker.create_topic(topic, 3, &[])?,
    }
    if load == Load::Transactional {
        for (name, second_version) in [("one", false), ("two", true), ("three", false)] {
            worker.initialise(name, second_version)?;
        }
    }
    if load == Load::Plain {
        for _ in [BUSY, IDLE_PRODUCER] {
            worker.identify()?;
        }
    }
    if load == Load::Grouped {
        for group in ["members-0", "members-1"] {
            worker.join(group, topic)?;
        }
    }
    Ok(())
}

/// Runs one step of a load. The steps after the damage first leave out the idle producer.
pub(super) fn step(
    worker: &mut Worker<'_>,
    load: Load,
    rng: &mut Rng,
    with_idle: bool,
) -> Result<(), Error> {
    let topic = load.topic();
    let partitions = worker.model.topics[topic].len() as u64;
    let partition = Partition { topic: topic.into(), index: rng.below(partitions) as i32 };
    let large = rng.below(40) == 0;
    let (count, bytes) = match large {
        // Large enough for the log to refer to it instead of copying it.
        true => (1, 40_000 + rng.below(20_000) as usize),
        false => (1 + rng.below(4) as usize, 50 + rng.below(1500) as usize),
    };
    match load {
        Load::Plain => {
            let records = worker.records(count, bytes, None);
            match rng.below(3) {
                0 => worker.produce_next(BUSY, &partition, records)?,
                1 if with_idle => worker.produce_next(IDLE_PRODUCER, &partition, records)?,
                _ => drop(worker.produce(&partition, records)?),
            }
        }
        Load::Compacted => {
            let key = format!("key {}", rng.below(60));
            let records = worker.records(count, bytes, Some(&key));
            worker.produce(&partition, records)?;
        }
        Load::Grouped => {
            let records = worker.records(count, bytes, None);
            let base = worker.produce(&partition, records)?;
            let group = format!("group-{}", rng.below(4));
            worker.commit_offset(&group, &partition, base + 1)?;
        }
        Load::Transactional => {
            let session = rng.below(worker.model.sessions.len() as u64) as usize;
            let records = worker.records(count, bytes, None);
            let base = worker.write(session, &partition, records)?;
            match rng.below(6) {
                0 | 1 => worker.end(session, Outcome::Committed)?,
                2 => worker.end(session, Outcome::Aborted)?,
                3 => {
                    let outcome = match rng.below(3) {
                        0 => Outcome::Aborted,
                        _ => Outcome::Committed,
                    };
                    let aborted = if outcome == Outcome::Aborted { ABORTED_OFFSETS } else { 0 };
                    worker.stage_offset(session, "readers", &partition, base + aborted)?;
                    worker.end(session, outcome)?;
                }
                _ => {} // it goes on
            }
        }
    }
    Ok(())
}
