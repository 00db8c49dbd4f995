//! One case: an image is copied and damaged, and a server runs on the copy.

use std::collections::BTreeSet;
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use super::faults::{Fault, Plan, Target};
use super::files::Files;
use super::image::{BUSY, End, IDLE, IDLE_PRODUCER, Image, Load, step};
use super::layout::{Class, Extent};
use super::log_lines::{Reported, advice, final_error, panic_in};
use super::model::{Idempotent, Model, Outcome, Partition, Session};
use super::observe::{Observation, Reader};
use super::process::{Installation, Process, Settings, Start};
use super::verdict::{Facts, Finding, Verdict, judge};
use super::window::{Offsets, has, offsets, unproven};
use super::work::{ProducerRef, RequestRefused, Worker};
use crate::Error;
use crate::rng::Rng;
use crate::server::Ending;

/// Number of load steps after the damage.
const STEPS: u32 = 6;
/// How long a case waits for uploads. Data that cannot be uploaded is not waited for.
const UPLOAD_LIMIT: Duration = Duration::from_secs(2);

/// The state of the server when its files are damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Stopped,
    /// It runs, and is only read afterwards.
    Running,
    /// It runs, and continues its load, uploads and compaction on the damaged files.
    UnderLoad,
}

/// A fault, the image it is applied to, and when.
#[derive(Clone, Copy)]
pub(super) struct Case<'a> {
    /// `None` for a case without damage.
    pub(super) fault: Option<&'a Fault>,
    pub(super) when: When,
    pub(super) image: &'a Image,
    pub(super) seed: u64,
    /// Ignore the losses that the server reports. The self-check uses it to show that a missing
    /// report is detected.
    pub(super) ignore_reports: bool,
    /// Excuse nothing by the silent window. The self-check uses it to show that such a loss is
    /// detected.
    pub(super) no_window: bool,
}

/// How often a damaged server continues its load and is read.
const ROUNDS: u32 = 2;

const LOST_OFFSETS: &str = "alluvium_recovery_lost_offsets";
const SKIPPED_OFFSETS: &str = "alluvium_recovery_skipped_offsets";

/// Compares the metrics of a server with the number of lost and skipped offsets in its log. Returns
/// a description of the difference.
fn miscounted(reported_offsets: i64, lost: Option<f64>, skipped: Option<f64>) -> Option<String> {
    let (Some(lost), Some(skipped)) = (lost, skipped) else {
        let missing = if lost.is_none() { LOST_OFFSETS } else { SKIPPED_OFFSETS };
        return Some(format!("there is no metric {missing}"));
    };
    (lost + skipped != reported_offsets as f64).then(|| {
        format!(
            "{LOST_OFFSETS} is {lost}, {SKIPPED_OFFSETS} is {skipped}, and the log reports \
             {reported_offsets} offsets"
        )
    })
}

/// The result of a case.
pub(super) struct CaseResult {
    pub(super) plan: Plan,
    /// The files right after the damage.
    pub(super) damaged: Files,
    pub(super) findings: Vec<Finding>,
    pub(super) log: String,
}

impl CaseResult {
    /// Returns the worst verdict among the findings. A refusal is a finding.
    pub(super) fn verdict(&self) -> Verdict {
        self.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Intact)
    }
}

struct Run<'a> {
    case: &'a Case<'a>,
    installation: &'a Installation,
    model: Model,
    rng: Rng,
    reported: Reported,
    reach: Option<BTreeSet<Extent>>,
    /// Whether the server must start.
    must_start: bool,
    /// Names of which a refusal to start must contain one.
    named: Vec<String>,
    findings: Vec<Finding>,
    /// Offsets that may be missing at the next start without a report.
    window: Offsets,
    /// Whether changes of the catalog may be missing at the next start without a report.
    changes_in_window: bool,
    /// The bytes of the log that have been searched for panics.
    searched_bytes: usize,
}

impl Case<'_> {
    /// Plans the damage to the image. `None` if the image offers no target for the fault.
    pub(super) fn plan(&self, files: &Files) -> Option<Plan> {
        let Some(fault) = self.fault else {
            return Some(Plan { reach: Some(BTreeSet::new()), ..Plan::default() });
        };
        let target = Target { files, earlier: &self.image.earlier };
        (fault.plan)(&target, &mut Rng::new(self.seed))
    }

    /// Runs the case in a directory that may contain the files of an earlier case. `None` if the
    /// image offers no target for the fault.
    pub(super) fn run(&self, installation: &Installation) -> Result<Option<CaseResult>, Error> {
        let Some(mut plan) = self.plan(&self.image.files) else { return Ok(None) };
        self.image.files.restore(&installation.directory)?;
        let mut run = Run {
            case: self,
            installation,
            model: self.image.model.clone(),
            rng: Rng::new(self.seed ^ 0x5eed),
            reported: Reported::default(),
            reach: plan.reach.clone(),
            must_start: plan.must_start,
            named: plan.named.clone(),
            findings: Vec::new(),
            window: Offsets::new(),
            changes_in_window: false,
            searched_bytes: 0,
        };
        let damaged;
        let mut all_answered = true;
        if self.when != When::Stopped {
            let Some(done) = run.damage_while_running()? else { return Ok(None) };
            (plan, damaged, all_answered) = done;
        } else {
            for edit in &plan.edits {
                edit.apply(&installation.directory)?;
            }
            damaged = Files::load(&installation.directory)?;
            if self.image.end == End::KilledUnderLoad
                && !run.open_window(&self.image.files, &damaged)
            {
                return Ok(None);
            }
        }
        match all_answered {
            true => run.run_and_restart()?,
            false => run.read_after_lost_answer()?,
        }
        run.check_panics()?;
        let log = installation.log()?;
        run.findings.sort();
        run.findings.dedup();
        Ok(Some(CaseResult { plan, damaged, findings: run.findings, log }))
    }
}

impl Run<'_> {
    fn settings(&mut self) -> Settings {
        let about_cache = self.case.fault.is_some_and(|fault| fault.name.starts_with("disk cache"));
        Settings {
            uploads: self.rng.below(2) == 0,
            disk_cache: about_cache || self.rng.below(2) == 0,
        }
    }

    fn add_finding(&mut self, verdict: Verdict, detail: impl Into<String>) {
        self.findings.push(Finding::new(verdict, detail));
    }

    /// Opens the silent window: excuses the offsets that may be missing from `damaged` without a
    /// report. Returns false if more than records may be missing: decisions and committed offsets
    /// are not judged then.
    fn open_window(&mut self, before: &Files, damaged: &Files) -> bool {
        let Some(records) = unproven(before, damaged) else { return true };
        if !self.case.no_window {
            self.window = offsets(&records, &self.case.image.streams);
            self.changes_in_window = records.iter().any(|it| it.class == Class::Catalog);
        }
        matches!(self.case.image.load, Load::Plain | Load::Compacted)
    }

    /// Starts a server without damage, runs some load, damages its files, continues the load if the
    /// case is under load, and reads everything. The server has stopped when this returns. The last
    /// value is whether every request was answered.
    fn damage_while_running(&mut self) -> Result<Option<(Plan, Files, bool)>, Error> {
        let mut settings = self.settings();
        // Uploads from memory do not read the log, so damage to the log must still be there after
        // the load.
        let is_in_log = self.case.fault.is_some_and(|fault| fault.name.starts_with("log"));
        settings.uploads |= self.case.when == When::UnderLoad && !is_in_log;
        let Some(mut process) = self.start(settings)? else {
            return Err("a server without damage does not start".into());
        };
        self.work(&mut process)?;
        let files = Files::load(&self.installation.directory)?;
        let Some(plan) = self.case.plan(&files) else { return Ok(None) };
        self.reach = plan.reach.clone();
        (self.must_start, self.named) = (plan.must_start, plan.named.clone());
        for edit in &plan.edits {
            // The server may have removed the file; then there is no target.
            if let Err(error) = edit.apply(&self.installation.directory) {
                let is_missing = error
                    .downcast_ref::<std::io::Error>()
                    .is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound);
                return if is_missing { Ok(None) } else { Err(error) };
            }
        }
        let damaged = Files::load(&self.installation.directory)?;
        let is_serving = match self.case.when {
            When::UnderLoad => self.continue_load(&mut process, settings.uploads)?,
            _ => self.read_back(&mut process, true).map(|_| true)?,
        };
        if self.case.when == When::UnderLoad && is_serving {
            // Each record written since the damage proves that the ones before it were durable.
            self.stop(process)?;
            return Ok(Some((plan, damaged, true)));
        }
        if !self.open_window(&files, &Files::load(&self.installation.directory)?) {
            // The header of an idle log proves that every record was durable.
            thread::sleep(IDLE);
        }
        self.stop(process)?;
        // Writing a header closes the window.
        self.window.clear();
        self.changes_in_window = false;
        self.open_window(&files, &Files::load(&self.installation.directory)?);
        Ok(Some((plan, damaged, is_serving)))
    }

    /// Continues the load on the damaged files. Returns whether the server still serves.
    fn continue_load(&mut self, process: &mut Process, uploads: bool) -> Result<bool, Error> {
        for _ in 0..ROUNDS {
            if !self.work(process)? {
                return Ok(false);
            }
            if uploads {
                wait_for_uploads(process)?;
            }
            if !self.read_back(process, true)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Starts and reads a server that ended without answering its last request. Whether a record
    /// was appended can be read back; whether a decision or a committed offset was persisted
    /// cannot.
    fn read_after_lost_answer(&mut self) -> Result<(), Error> {
        let settings = self.settings();
        let Some(mut process) = self.start(settings)? else { return Ok(()) };
        if matches!(self.case.image.load, Load::Plain | Load::Compacted) {
            self.read_back(&mut process, true)?;
        }
        self.stop(process)
    }

    /// Starts the server, reads, runs load, stops it, starts it again, reads again and resumes the
    /// idempotent producers.
    fn run_and_restart(&mut self) -> Result<(), Error> {
        let settings = self.settings();
        let Some(mut process) = self.start(settings)? else { return Ok(()) };
        if self.read_back(&mut process, true)? && self.work(&mut process)? {
            if settings.uploads {
                wait_for_uploads(&process)?;
            }
            self.stop(process)?;
            let settings = self.settings();
            let Some(mut process) = self.start(settings)? else { return Ok(()) };
            if self.read_back(&mut process, false)? {
                self.resume_producers(&mut process)?;
            }
            self.stop(process)?;
        }
        Ok(())
    }

    /// Checks that the server has not panicked while it served. (During a start that the server
    /// refuses, a library may panic over a damaged file; the refusal is judged instead.)
    fn check_panics(&mut self) -> Result<(), Error> {
        let log = self.installation.log()?;
        if let Some(panic) = panic_in(&log[self.searched_bytes..]) {
            self.add_finding(Verdict::Crash, panic);
        }
        self.searched_bytes = log.len();
        Ok(())
    }

    /// Starts the server. `None` if it does not serve, which is added to the findings.
    fn start(&mut self, settings: Settings) -> Result<Option<Process>, Error> {
        self.check_panics()?;
        let before = self.searched_bytes;
        let started = self.installation.start(settings)?;
        let log = self.installation.log()?;
        let log = &log[before..];
        let mut now = Reported::default();
        let partitions = self.model.partitions();
        // The metric counts what recovery lost, not what damaged objects contain.
        let is_of_recovery = |line: &&str| !line.contains("object ");
        let of_recovery: Vec<&str> = log.lines().filter(is_of_recovery).collect();
        now.read(&of_recovery.join("\n"), &partitions);
        if !self.case.ignore_reports {
            self.reported.read(log, &partitions);
        }
        match started {
            Start::Ready(process) => {
                let reported_offsets: i64 = now.ranges().map(|range| range.end - range.start).sum();
                let metrics = [LOST_OFFSETS, SKIPPED_OFFSETS].map(|name| process.metric(name));
                let [lost, skipped] = metrics;
                // The client does not know the offsets of markers.
                if self.case.image.load != Load::Transactional
                    && let Some(detail) = now.beyond(|partition| self.model.log(partition).next)
                {
                    self.add_finding(Verdict::LossMisreported, detail);
                }
                if let Some(detail) = miscounted(reported_offsets, lost?, skipped?) {
                    self.add_finding(Verdict::LossMisreported, detail);
                }
                Ok(Some(process))
            }
            Start::Ended(status) => {
                let message = final_error(log);
                self.searched_bytes = before + log.len();
                self.add_end(status, &message, Verdict::Refused);
                Ok(None)
            }
            Start::Hangs => {
                self.add_finding(Verdict::Hang, "the server neither starts nor ends");
                Ok(None)
            }
        }
    }

    fn add_end(&mut self, status: ExitStatus, message: &str, good: Verdict) {
        let directory = self.installation.directory.display().to_string();
        if good == Verdict::Refused {
            if self.must_start {
                self.add_finding(Verdict::NeedlessRefusal, message);
            } else if !is_named(&self.named, message) {
                let names = self.named.join(" or ");
                self.add_finding(Verdict::NoAdvice, format!("it does not name {names}: {message}"));
            }
        }
        match (status.code(), advice(message, &directory)) {
            (None, _) => self.add_finding(Verdict::Crash, format!("{status}: {message}")),
            (Some(_), Ok(())) => self.add_finding(good, message),
            (Some(_), Err(missing)) => {
                self.add_finding(Verdict::NoAdvice, format!("{missing}: {message}"));
            }
        }
    }

    /// Records why a server does not serve: it has ended by itself, or it hangs.
    fn add_failure(&mut self, process: &mut Process, what: &str) -> Result<(), Error> {
        // A process that is about to end gets a moment to do so.
        for _ in 0..100 {
            if let Some(status) = process.ended()? {
                let message = final_error(&self.installation.log()?);
                self.add_end(status, &message, Verdict::Stopped);
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.add_finding(Verdict::Hang, what);
        Ok(())
    }

    /// Reads everything back and judges it. Returns whether the server still serves.
    fn read_back(&mut self, process: &mut Process, with_health: bool) -> Result<bool, Error> {
        let (model, reported, rng) = (&self.model, &self.reported, &mut self.rng);
        let lost = |partition: &_, offset| reported.is_lost(partition, offset);
        let observed = Reader::connect(process.address, model, &lost)
            .and_then(|mut reader| reader.observe(&mut |end| rng.below(end)));
        let observation = match observed {
            Ok(observation) => observation,
            Err(error) => {
                self.add_failure(process, &format!("reading: {error}"))?;
                return Ok(false);
            }
        };
        let health = if with_health { process.get("/healthz")? } else { String::new() };
        let found = judge(&Facts {
            model: &self.model,
            observation: &observation,
            reported: &self.reported,
            reach: self.reach.as_ref(),
            streams: &self.case.image.streams,
            window: &self.window,
            changes_in_window: self.changes_in_window,
            health: &health,
        });
        self.findings.extend(found);
        self.close_window(&observation);
        Ok(true)
    }

    /// Closes the silent window: removes the missing records from the model, since their offsets
    /// are used again. From now on, every acknowledged record must be present.
    fn close_window(&mut self, observation: &Observation) {
        for (topic, exists) in &mut self.model.empty_topics {
            *exists = observation.topics.contains(topic);
        }
        self.changes_in_window = false;
        for (partition, ranges) in std::mem::take(&mut self.window) {
            let Some(contents) = observation.partitions.get(&partition) else { continue };
            let offsets = ranges.iter().cloned().flatten();
            let missing: Vec<i64> =
                offsets.filter(|at| !contents.all.records.contains_key(at)).collect();
            let next = contents.all.high_watermark;
            self.model.forget(&partition, &missing, next);
            let silent = self.reported.silent.entry(partition).or_default();
            silent.extend(missing.into_iter().map(|at| at..at + 1));
        }
    }

    /// Runs a few load steps. Returns whether the server still serves.
    fn work(&mut self, process: &mut Process) -> Result<bool, Error> {
        let load = self.case.image.load;
        let mut refusals = Refusals::default();
        let mut worker = Worker::new(process.address, &mut self.model)?;
        let mut failed = None;
        if self.rng.below(2) == 0 {
            failed = worker.change_topics().err();
        }
        for _ in 0..STEPS {
            if failed.is_some() {
                break;
            }
            let done = step(&mut worker, load, &mut self.rng, false);
            failed = refusals.take(done, &mut worker, &self.reported).err();
        }
        if failed.is_none() {
            failed = end_some(&mut worker, &mut self.rng, &mut refusals, &self.reported).err();
        }
        drop(worker);
        self.record_load(process, refusals, failed)
    }

    /// Continues each idempotent producer in each partition, twice, to distinguish a producer that
    /// is refused permanently from one that is refused once.
    fn resume_producers(&mut self, process: &mut Process) -> Result<bool, Error> {
        let mut refusals = Refusals::default();
        let mut worker = Worker::new(process.address, &mut self.model)?;
        let mut failed = None;
        let producers = [IDLE_PRODUCER, BUSY, IDLE_PRODUCER];
        let producers = producers.iter().filter(|it| **it < worker.model.idempotent.len());
        let partitions = worker.model.partitions();
        let requests: Vec<_> = producers
            .flat_map(|it| partitions.iter().map(move |partition| (*it, partition)))
            .collect();
        for (producer, partition) in requests {
            let records = worker.records(2, 100, None);
            let done = worker.produce_next(producer, partition, records);
            failed = refusals.take(done, &mut worker, &self.reported).err();
            if failed.is_some() {
                break;
            }
        }
        drop(worker);
        self.record_load(process, refusals, failed)
    }

    /// Adds the refusals and the failure of a load to the findings.
    fn record_load(
        &mut self,
        process: &mut Process,
        refusals: Refusals,
        failed: Option<Error>,
    ) -> Result<bool, Error> {
        for detail in refusals.found {
            self.add_finding(Verdict::ProducerRefused, detail);
        }
        for (partition, offset) in std::mem::take(&mut self.model.reused) {
            let detail = format!("{partition}: offset {offset} is assigned again");
            self.add_finding(Verdict::OffsetReused, detail);
        }
        match failed {
            None => Ok(true),
            Some(error) => {
                self.add_failure(process, &format!("writing: {error}"))?;
                Ok(false)
            }
        }
    }

    fn stop(&mut self, process: Process) -> Result<(), Error> {
        let ending = if self.rng.below(2) == 0 { Ending::Sigkill } else { Ending::Sigterm };
        match (ending, process.end(ending)?) {
            (_, None) => self.add_finding(Verdict::Hang, "the server does not end after SIGTERM"),
            (Ending::Sigterm, Some(status)) if !status.success() => {
                let message = final_error(&self.installation.log()?);
                self.add_end(status, &message, Verdict::Stopped);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether a message contains one of these names, if there are any.
fn is_named(names: &[String], message: &str) -> bool {
    names.is_empty() || names.iter().any(|name| message.contains(name))
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

/// Producers that were refused since the last start.
#[derive(Default)]
struct Refusals {
    /// Transactional IDs.
    sessions: BTreeSet<String>,
    /// Refusals without a cause.
    found: Vec<String>,
}

impl Refusals {
    /// Records a refused producer, and reinitializes a transactional one, as clients do. Any other
    /// error is returned.
    fn take(
        &mut self,
        done: Result<(), Error>,
        worker: &mut Worker<'_>,
        reported: &Reported,
    ) -> Result<(), Error> {
        let error = match done {
            Ok(()) => return Ok(()),
            Err(error) if !error.is::<RequestRefused>() => return Err(error),
            Err(error) => error,
        };
        match worker.last_producer.clone() {
            None => Err(error),
            Some(ProducerRef::Session(session)) => {
                let session = worker.model.sessions[session].clone();
                let id = &session.transactional_id;
                let is_first = self.sessions.insert(id.clone());
                if !is_first || !may_refuse_session(&session, worker.model, reported) {
                    let why =
                        if is_first { "without a loss" } else { "again after the same start" };
                    self.found.push(format!("transactional id {id}, {why}: {error}"));
                }
                // If this is refused, the producer can never continue.
                worker.initialise(id, session.second_version).map(drop)
            }
            Some(ProducerRef::Idempotent(producer, partition)) => {
                let producer = &worker.model.idempotent[producer];
                if !may_refuse_idempotent(producer, &partition, reported) {
                    let (id, name) = (producer.producer_id, partition.to_string());
                    let next = producer.sequences.get(&name).unwrap_or(&0);
                    let times = producer.refusals.get(&name).unwrap_or(&0);
                    self.found.push(format!(
                        "producer {id} continues in {partition} with sequence number {next}, \
                         refusal {times}: {error}"
                    ));
                }
                Ok(())
            }
        }
    }
}

/// Whether a transactional producer may be refused: its state may be lost, or its transaction was
/// aborted because a partition that it has written to has lost records.
fn may_refuse_session(session: &Session, model: &Model, reported: &Reported) -> bool {
    let has_written_to = |partition: &&Partition| {
        let mut records = model.log(partition).records.values();
        session.open.is_some() && records.any(|record| record.txn == session.open)
    };
    reported.has_lost_state("transactions")
        || reported.partitions.keys().any(|it| has_written_to(&it))
}

/// Whether the refusals of an idempotent producer in a partition are justified: none, or one if a
/// batch of its own is lost. If the batch was lost in the silent window, the server does not know
/// of a gap, and refuses the following batches until the producer is reinitialized.
fn may_refuse_idempotent(
    producer: &Idempotent,
    partition: &Partition,
    reported: &Reported,
) -> bool {
    let name = partition.to_string();
    let own = || producer.offsets.get(&name).into_iter().flatten();
    match producer.refusals.get(&name) {
        None => true,
        Some(_) if own().any(|offset| has(&reported.silent, partition, *offset)) => true,
        Some(1) => own().any(|offset| reported.is_lost(partition, *offset)),
        Some(_) => false,
    }
}

/// Ends some of the open transactions. One that cannot be ended is aborted when its producer is
/// initialized again.
fn end_some(
    worker: &mut Worker<'_>,
    rng: &mut Rng,
    refusals: &mut Refusals,
    reported: &Reported,
) -> Result<(), Error> {
    for index in 0..worker.model.sessions.len() {
        let outcome = match rng.below(3) {
            0 => Outcome::Aborted,
            1 => Outcome::Committed,
            _ => continue,
        };
        let ended = worker.end(index, outcome);
        refusals.take(ended, worker, reported)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "case_tests.rs"]
mod tests;
