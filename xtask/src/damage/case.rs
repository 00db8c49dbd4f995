//! One case: an image is copied and damaged, and a server has to live with it.

use std::collections::BTreeSet;
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use super::files::Files;
use super::image::{BUSY, End, IDLE, IDLE_PRODUCER, Image, Load, step};
use super::kinds::{Kind, Plan, Scene};
use super::layout::Extent;
use super::model::{Idempotent, Model, Outcome, Partition, Session};
use super::observe::{Observation, Reader};
use super::process::{Place, Process, Settings, Start};
use super::says::{Stated, advice, last_words, panic_in};
use super::verdict::{Facts, Finding, Verdict, judge};
use super::window::{Offsets, has, offsets, unproven};
use super::work::{Refused, Who, Worker};
use crate::Error;
use crate::rng::Rng;
use crate::server::Ending;

/// How much is written after the damage.
const STEPS: u32 = 6;
/// How long uploads may take that a case waits for. What cannot be uploaded is not waited for.
const UPLOAD_LIMIT: Duration = Duration::from_secs(2);

/// When a server is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Stopped,
    /// It runs and is only read afterwards.
    Running,
    /// It runs, and goes on with its load, with uploads and compaction, while it has the damage.
    UnderLoad,
}

/// What is done to which image, and when.
#[derive(Clone, Copy)]
pub(super) struct Case<'a> {
    /// `None` for a case without damage.
    pub(super) kind: Option<&'a Kind>,
    pub(super) when: When,
    pub(super) image: &'a Image,
    pub(super) seed: u64,
    /// Take no notice of what the server says, to see that it would be missed.
    pub(super) deaf: bool,
    /// Excuse nothing with the silent window, to see that it would be missed.
    pub(super) strict: bool,
}

/// How often a damaged server goes on with its load, and is read.
const ROUNDS: u32 = 2;

const LOST_OFFSETS: &str = "alluvium_recovery_lost_offsets";
const SKIPPED_OFFSETS: &str = "alluvium_recovery_skipped_offsets";

/// What is wrong with the metrics of a server whose log names so many lost and skipped offsets.
fn miscounted(told: i64, lost: Option<f64>, skipped: Option<f64>) -> Option<String> {
    let (Some(lost), Some(skipped)) = (lost, skipped) else {
        let missing = if lost.is_none() { LOST_OFFSETS } else { SKIPPED_OFFSETS };
        return Some(format!("there is no metric {missing}"));
    };
    (lost + skipped != told as f64).then(|| {
        format!(
            "{LOST_OFFSETS} is {lost}, {SKIPPED_OFFSETS} is {skipped}, and the log names {told} \
             offsets"
        )
    })
}

/// What has come of a case.
pub(super) struct Shown {
    pub(super) plan: Plan,
    /// The files at the moment of the damage, with it.
    pub(super) damaged: Files,
    pub(super) findings: Vec<Finding>,
    pub(super) log: String,
}

impl Shown {
    /// The worst finding. A refusal is one.
    pub(super) fn verdict(&self) -> Verdict {
        self.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Whole)
    }
}

struct Run<'a> {
    case: &'a Case<'a>,
    place: &'a Place,
    model: Model,
    rng: Rng,
    stated: Stated,
    reach: Option<BTreeSet<Extent>>,
    findings: Vec<Finding>,
    /// What may be missing at the next start without a word.
    window: Offsets,
    /// So far the log was searched for panics.
    searched_bytes: usize,
}

impl Case<'_> {
    /// What would be damaged in the image. `None` if it has nothing of the kind.
    pub(super) fn plan(&self, files: &Files) -> Option<Plan> {
        let Some(kind) = self.kind else {
            return Some(Plan { reach: Some(BTreeSet::new()), ..Plan::default() });
        };
        let scene = Scene { files, earlier: &self.image.earlier };
        (kind.plan)(&scene, &mut Rng::new(self.seed))
    }

    /// Do it, in a directory that may have the files of an earlier case. `None` if there is nothing
    /// of the kind.
    pub(super) fn run(&self, place: &Place) -> Result<Option<Shown>, Error> {
        let Some(mut plan) = self.plan(&self.image.files) else { return Ok(None) };
        self.image.files.restore(&place.directory)?;
        let mut run = Run {
            case: self,
            place,
            model: self.image.model.clone(),
            rng: Rng::new(self.seed ^ 0x5eed),
            stated: Stated::default(),
            reach: plan.reach.clone(),
            findings: Vec::new(),
            window: Offsets::new(),
            searched_bytes: 0,
        };
        let damaged;
        let mut goes_on = true;
        if self.when != When::Stopped {
            let Some(done) = run.damage_while_running()? else { return Ok(None) };
            (plan, damaged, goes_on) = done;
        } else {
            for edit in &plan.edits {
                edit.apply(&place.directory)?;
            }
            damaged = Files::load(&place.directory)?;
            if self.image.end == End::KilledUnderLoad
                && !run.open_window(&self.image.files, &damaged)
            {
                return Ok(None);
            }
        }
        match goes_on {
            true => run.live_on()?,
            false => run.live_on_in_doubt()?,
        }
        run.check_panics()?;
        let log = place.log()?;
        run.findings.sort();
        run.findings.dedup();
        Ok(Some(Shown { plan, damaged, findings: run.findings, log }))
    }
}

impl Run<'_> {
    fn settings(&mut self) -> Settings {
        let about_cache = self.case.kind.is_some_and(|kind| kind.name.starts_with("disk cache"));
        Settings {
            uploads: self.rng.below(2) == 0,
            disk_cache: about_cache || self.rng.below(2) == 0,
        }
    }

    fn found(&mut self, verdict: Verdict, detail: impl Into<String>) {
        self.findings.push(Finding::new(verdict, detail));
    }

    /// Excuse what may be missing from `damaged` without a word. Returns false if that is more than
    /// records: decisions and positions are not judged without those that may be missing.
    fn open_window(&mut self, before: &Files, damaged: &Files) -> bool {
        let Some(records) = unproven(before, damaged) else { return true };
        if !self.case.strict {
            self.window = offsets(&records, &self.case.image.streams);
        }
        matches!(self.case.image.load, Load::Plain | Load::Compacted)
    }

    /// Start a server without damage, let it work, damage its files, let it work on if it is to be
    /// under load, and read. It has ended when this returns. The last value is whether every
    /// request has had its answer.
    fn damage_while_running(&mut self) -> Result<Option<(Plan, Files, bool)>, Error> {
        let mut settings = self.settings();
        // What is uploaded from memory needs no log: damage to that has to outlive the load, too.
        let is_in_log = self.case.kind.is_some_and(|kind| kind.name.starts_with("log"));
        settings.uploads |= self.case.when == When::UnderLoad && !is_in_log;
        let Some(mut process) = self.start(settings)? else {
            return Err("a server does not start although nothing is damaged".into());
        };
        self.work(&mut process)?;
        let files = Files::load(&self.place.directory)?;
        let Some(plan) = self.case.plan(&files) else { return Ok(None) };
        self.reach = plan.reach.clone();
        for edit in &plan.edits {
            // The server may have removed the file: then there is nothing to damage.
            if let Err(error) = edit.apply(&self.place.directory) {
                let is_gone = error
                    .downcast_ref::<std::io::Error>()
                    .is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound);
                return if is_gone { Ok(None) } else { Err(error) };
            }
        }
        let damaged = Files::load(&self.place.directory)?;
        let is_whole = match self.case.when {
            When::UnderLoad => self.load_on(&mut process, settings.uploads)?,
            _ => self.look(&mut process, true).map(|_| true)?,
        };
        if self.case.when == When::UnderLoad && is_whole {
            // Each record that was written since proves those before it.
            self.end(process)?;
            return Ok(Some((plan, damaged, true)));
        }
        if !self.open_window(&files, &Files::load(&self.place.directory)?) {
            // Idle, its header proves everything.
            thread::sleep(IDLE);
        }
        self.end(process)?;
        // The window ends where a header is written.
        self.window.clear();
        self.open_window(&files, &Files::load(&self.place.directory)?);
        Ok(Some((plan, damaged, is_whole)))
    }

    /// Go on with the load over the damage. Returns whether the server still serves.
    fn load_on(&mut self, process: &mut Process, uploads: bool) -> Result<bool, Error> {
        for _ in 0..ROUNDS {
            if !self.work(process)? {
                return Ok(false);
            }
            if uploads {
                wait_for_uploads(process)?;
            }
            if !self.look(process, true)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Start and read a server that has ended without an answer to its last request. What became
    /// of a record is seen; what became of a decision or a position is not.
    fn live_on_in_doubt(&mut self) -> Result<(), Error> {
        let settings = self.settings();
        let Some(mut process) = self.start(settings)? else { return Ok(()) };
        if matches!(self.case.image.load, Load::Plain | Load::Compacted) {
            self.look(&mut process, true)?;
        }
        self.end(process)
    }

    /// Start, read, work, stop, start again, read again and go on with the producers.
    fn live_on(&mut self) -> Result<(), Error> {
        let settings = self.settings();
        let Some(mut process) = self.start(settings)? else { return Ok(()) };
        if self.look(&mut process, true)? && self.work(&mut process)? {
            if settings.uploads {
                wait_for_uploads(&process)?;
            }
            self.end(process)?;
            let settings = self.settings();
            let Some(mut process) = self.start(settings)? else { return Ok(()) };
            if self.look(&mut process, false)? {
                self.go_on(&mut process)?;
            }
            self.end(process)?;
        }
        Ok(())
    }

    /// A server that serves must not panic. (At a start that it refuses, a library may do so over a
    /// damaged file, and it is the refusal that counts.)
    fn check_panics(&mut self) -> Result<(), Error> {
        let log = self.place.log()?;
        if let Some(panic) = panic_in(&log[self.searched_bytes..]) {
            self.found(Verdict::Crash, panic);
        }
        self.searched_bytes = log.len();
        Ok(())
    }

    /// Start the server. `None` if it does not serve, which is noted.
    fn start(&mut self, settings: Settings) -> Result<Option<Process>, Error> {
        self.check_panics()?;
        let before = self.searched_bytes;
        let started = self.place.start(settings)?;
        let log = self.place.log()?;
        let log = &log[before..];
        let mut now = Stated::default();
        let partitions = self.model.partitions();
        // The metric counts what recovery lost, not what damaged objects hold.
        let is_of_recovery = |line: &&str| !line.contains("object ");
        let of_recovery: Vec<&str> = log.lines().filter(is_of_recovery).collect();
        now.read(&of_recovery.join("\n"), &partitions);
        if !self.case.deaf {
            self.stated.read(log, &partitions);
        }
        match started {
            Start::Ready(process) => {
                let told: i64 = now.ranges().map(|range| range.end - range.start).sum();
                let metrics = [LOST_OFFSETS, SKIPPED_OFFSETS].map(|name| process.metric(name));
                let [lost, skipped] = metrics;
                // Where markers are written, the client does not know their offsets.
                if self.case.image.load != Load::Transactional
                    && let Some(detail) = now.beyond(|partition| self.model.log(partition).next)
                {
                    self.found(Verdict::LossMisstated, detail);
                }
                if let Some(detail) = miscounted(told, lost?, skipped?) {
                    self.found(Verdict::LossMisstated, detail);
                }
                Ok(Some(process))
            }
            Start::Ended(status) => {
                let message = last_words(log);
                self.searched_bytes = before + log.len();
                self.ended(status, &message, Verdict::Refused);
                Ok(None)
            }
            Start::Hangs => {
                self.found(Verdict::Hang, "the server neither starts nor ends");
                Ok(None)
            }
        }
    }

    fn ended(&mut self, status: ExitStatus, message: &str, good: Verdict) {
        let directory = self.place.directory.display().to_string();
        match (status.code(), advice(message, &directory)) {
            (None, _) => self.found(Verdict::Crash, format!("{status}: {message}")),
            (Some(_), Ok(())) => self.found(good, message),
            (Some(_), Err(missing)) => {
                self.found(Verdict::NoAdvice, format!("{missing}: {message}"));
            }
        }
    }

    /// The server has ended by itself, or hangs.
    fn broken(&mut self, process: &mut Process, what: &str) -> Result<(), Error> {
        // A process that is about to end has a moment for it.
        for _ in 0..100 {
            if let Some(status) = process.ended()? {
                let message = last_words(&self.place.log()?);
                self.ended(status, &message, Verdict::Stopped);
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.found(Verdict::Hang, what);
        Ok(())
    }

    /// Read everything back and judge it. Returns whether the server still serves.
    fn look(&mut self, process: &mut Process, with_health: bool) -> Result<bool, Error> {
        let (model, stated, rng) = (&self.model, &self.stated, &mut self.rng);
        let lost = |partition: &_, offset| stated.is_lost(partition, offset);
        let observed = Reader::connect(process.address, model, &lost)
            .and_then(|mut reader| reader.observe(&mut |end| rng.below(end)));
        let observation = match observed {
            Ok(observation) => observation,
            Err(error) => {
                self.broken(process, &format!("reading: {error}"))?;
                return Ok(false);
            }
        };
        let health = if with_health { process.admin("/healthz")? } else { String::new() };
        let found = judge(&Facts {
            model: &self.model,
            observation: &observation,
            stated: &self.stated,
            reach: self.reach.as_ref(),
            streams: &self.case.image.streams,
            window: &self.window,
            health: &health,
        });
        self.findings.extend(found);
        self.close_window(&observation);
        Ok(true)
    }

    /// Whatever is missing from the window is forgotten: its offsets are used again. From now on
    /// all that is acknowledged has to be there.
    fn close_window(&mut self, observation: &Observation) {
        for (partition, ranges) in std::mem::take(&mut self.window) {
            let Some(held) = observation.partitions.get(&partition) else { continue };
            let offsets = ranges.iter().cloned().flatten();
            let missing: Vec<i64> =
                offsets.filter(|at| !held.all.records.contains_key(at)).collect();
            let next = held.all.high_watermark;
            self.model.forget(&partition, &missing, next);
            let silent = self.stated.silent.entry(partition).or_default();
            silent.extend(missing.into_iter().map(|at| at..at + 1));
        }
    }

    /// Write a little more. Returns whether the server still serves.
    fn work(&mut self, process: &mut Process) -> Result<bool, Error> {
        let load = self.case.image.load;
        let mut refusals = Refusals::default();
        let mut worker = Worker::new(process.address, &mut self.model)?;
        let mut failed = None;
        for _ in 0..STEPS {
            let done = step(&mut worker, load, &mut self.rng, false);
            failed = refusals.take(done, &mut worker, &self.stated).err();
            if failed.is_some() {
                break;
            }
        }
        if failed.is_none() {
            failed = end_some(&mut worker, &mut self.rng, &mut refusals, &self.stated).err();
        }
        drop(worker);
        self.worked(process, refusals, failed)
    }

    /// Have each idempotent producer go on in each partition, twice, so that one that is refused
    /// for ever is distinguished from one that is refused once.
    fn go_on(&mut self, process: &mut Process) -> Result<bool, Error> {
        let mut refusals = Refusals::default();
        let mut worker = Worker::new(process.address, &mut self.model)?;
        let mut failed = None;
        let producers = [IDLE_PRODUCER, BUSY, IDLE_PRODUCER];
        let producers = producers.iter().filter(|it| **it < worker.model.idempotent.len());
        let partitions = worker.model.partitions();
        let turns: Vec<_> = producers
            .flat_map(|it| partitions.iter().map(move |partition| (*it, partition)))
            .collect();
        for (producer, partition) in turns {
            let records = worker.records(2, 100, None);
            let done = worker.produce_next(producer, partition, records);
            failed = refusals.take(done, &mut worker, &self.stated).err();
            if failed.is_some() {
                break;
            }
        }
        drop(worker);
        self.worked(process, refusals, failed)
    }

    /// Note what has come of writing.
    fn worked(
        &mut self,
        process: &mut Process,
        refusals: Refusals,
        failed: Option<Error>,
    ) -> Result<bool, Error> {
        for detail in refusals.found {
            self.found(Verdict::ProducerRefused, detail);
        }
        for (partition, offset) in std::mem::take(&mut self.model.reused) {
            let detail = format!("{partition}: a new record gets offset {offset}");
            self.found(Verdict::OffsetReused, detail);
        }
        match failed {
            None => Ok(true),
            Some(error) => {
                self.broken(process, &format!("writing: {error}"))?;
                Ok(false)
            }
        }
    }

    fn end(&mut self, process: Process) -> Result<(), Error> {
        let ending = if self.rng.below(2) == 0 { Ending::Sigkill } else { Ending::Sigterm };
        match (ending, process.end(ending)?) {
            (_, None) => self.found(Verdict::Hang, "the server does not end after SIGTERM"),
            (Ending::Sigterm, Some(status)) if !status.success() => {
                let message = last_words(&self.place.log()?);
                self.ended(status, &message, Verdict::Stopped);
            }
            _ => {}
        }
        Ok(())
    }
}

fn wait_for_uploads(process: &Process) -> Result<(), Error> {
    let begun = Instant::now();
    while process.metric("alluvium_log_cache_pinned_bytes")?.is_some_and(|bytes| bytes > 0.0)
        && begun.elapsed() < UPLOAD_LIMIT
    {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Producers that were refused since a start.
#[derive(Default)]
struct Refusals {
    /// Transactional ids.
    sessions: BTreeSet<String>,
    /// Refusals without a cause.
    found: Vec<String>,
}

impl Refusals {
    /// Take note if a producer was refused, and have a transactional one begin anew, as clients do.
    /// All other errors are handed on.
    fn take(
        &mut self,
        done: Result<(), Error>,
        worker: &mut Worker<'_>,
        stated: &Stated,
    ) -> Result<(), Error> {
        let error = match done {
            Ok(()) => return Ok(()),
            Err(error) if !error.is::<Refused>() => return Err(error),
            Err(error) => error,
        };
        match worker.who.clone() {
            None => Err(error),
            Some(Who::Session(session)) => {
                let session = worker.model.sessions[session].clone();
                let id = &session.transactional_id;
                let is_first = self.sessions.insert(id.clone());
                if !is_first || !may_be_refused(&session, worker.model, stated) {
                    let why = if is_first { "without a loss" } else { "again since the start" };
                    self.found.push(format!("transactional id {id}, {why}: {error}"));
                }
                // If this is refused, the producer can never go on.
                worker.initialise(id, session.second_version).map(drop)
            }
            Some(Who::Idempotent(producer, partition)) => {
                let producer = &worker.model.idempotent[producer];
                if !may_skip(producer, &partition, stated) {
                    let (id, name) = (producer.producer_id, partition.to_string());
                    let next = producer.sequences.get(&name).unwrap_or(&0);
                    let times = producer.refusals.get(&name).unwrap_or(&0);
                    self.found.push(format!(
                        "producer {id} goes on in {partition} with sequence number {next}, \
                         refusal {times}: {error}"
                    ));
                }
                Ok(())
            }
        }
    }
}

/// Whether a transactional producer may be refused: its state may be lost, or its transaction was
/// aborted since a partition that it has written to has lost records.
fn may_be_refused(session: &Session, model: &Model, stated: &Stated) -> bool {
    let has_written_to = |partition: &&Partition| {
        let mut records = model.log(partition).records.values();
        session.open.is_some() && records.any(|record| record.txn == session.open)
    };
    stated.has_lost_state("transactions") || stated.partitions.keys().any(|it| has_written_to(&it))
}

/// Whether the refusals of an idempotent producer in a partition are as they may be: none, or one
/// if a batch of its own is lost. If that was lost in the silent window, the server does not know
/// of a gap, and refuses what follows on it until the producer begins anew.
fn may_skip(producer: &Idempotent, partition: &Partition, stated: &Stated) -> bool {
    let name = partition.to_string();
    let own = || producer.offsets.get(&name).into_iter().flatten();
    match producer.refusals.get(&name) {
        None => true,
        Some(_) if own().any(|offset| has(&stated.silent, partition, *offset)) => true,
        Some(1) => own().any(|offset| stated.is_lost(partition, *offset)),
        Some(_) => false,
    }
}

/// End some of the transactions that are open. One that cannot be ended is aborted by its
/// producer's next beginning.
fn end_some(
    worker: &mut Worker<'_>,
    rng: &mut Rng,
    refusals: &mut Refusals,
    stated: &Stated,
) -> Result<(), Error> {
    for index in 0..worker.model.sessions.len() {
        let outcome = match rng.below(3) {
            0 => Outcome::Aborted,
            1 => Outcome::Committed,
            _ => continue,
        };
        let ended = worker.end(index, outcome);
        refusals.take(ended, worker, stated)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "case_tests.rs"]
mod tests;
