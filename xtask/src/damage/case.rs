//! One case: an image is copied and damaged, and a server has to live with it.

use std::collections::BTreeSet;
use std::process::ExitStatus;

use super::files::Files;
use super::image::{Image, step};
use super::kinds::{Kind, Plan, Scene};
use super::layout::Extent;
use super::model::{Model, Outcome};
use super::observe::Reader;
use super::process::{Place, Process, Settings, Start};
use super::says::{Stated, advice, last_words, panic_in};
use super::verdict::{Facts, Finding, Verdict, judge};
use super::work::{Refused, Worker};
use crate::Error;
use crate::rng::Rng;
use crate::server::Ending;

/// How much is written after the damage.
const STEPS: u32 = 6;
/// How often producers may have to begin anew in the meantime.
const REFUSALS: u32 = 2;

/// What is done to which image, and when.
pub(super) struct Case<'a> {
    /// `None` for a case without damage.
    pub(super) kind: Option<&'a Kind>,
    /// Whether the server runs when it is damaged.
    pub(super) running: bool,
    pub(super) image: &'a Image,
    pub(super) seed: u64,
    /// Take no notice of what the server says, to see that it would be missed.
    pub(super) deaf: bool,
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
            searched_bytes: 0,
        };
        let damaged;
        if self.running {
            let Some((done, files)) = run.damage_while_running()? else { return Ok(None) };
            (plan, damaged) = (done, files);
        } else {
            for edit in &plan.edits {
                edit.apply(&place.directory)?;
            }
            damaged = Files::load(&place.directory)?;
        }
        run.live_on()?;
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

    /// Start a server without damage, let it work, damage its files, and read. It has ended when
    /// this returns.
    fn damage_while_running(&mut self) -> Result<Option<(Plan, Files)>, Error> {
        let settings = self.settings();
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
        self.look(&mut process, true)?;
        self.end(process)?;
        Ok(Some((plan, damaged)))
    }

    /// Start, read, work, stop, start again and read again.
    fn live_on(&mut self) -> Result<(), Error> {
        let settings = self.settings();
        let Some(mut process) = self.start(settings)? else { return Ok(()) };
        if self.look(&mut process, true)? && self.work(&mut process)? {
            self.end(process)?;
            let settings = self.settings();
            let Some(mut process) = self.start(settings)? else { return Ok(()) };
            self.look(&mut process, false)?;
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
                let told = now.partitions.values().flatten().chain(&now.streams);
                let told: i64 = told.map(|range| range.end - range.start).sum();
                let lost = process.metric("alluvium_recovery_lost_offsets")?;
                let skipped = process.metric("alluvium_recovery_skipped_offsets")?;
                let counted = lost.map(|lost| lost + skipped.unwrap_or_default());
                if counted.is_some_and(|counted| counted != told as f64) {
                    let detail = format!(
                        "alluvium_recovery_lost_offsets and alluvium_recovery_skipped_offsets are \
                         {} together, and the log names {told} offsets",
                        counted.unwrap_or_default()
                    );
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
            std::thread::sleep(std::time::Duration::from_millis(20));
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
            health: &health,
        });
        self.findings.extend(found);
        Ok(true)
    }

    /// Write a little more. Returns whether the server still serves.
    fn work(&mut self, process: &mut Process) -> Result<bool, Error> {
        let load = self.case.image.load;
        let mut worker = Worker::new(process.address, &mut self.model)?;
        let (mut failed, mut refusals) = (None, 0);
        for _ in 0..STEPS {
            let Err(error) = step(&mut worker, load, &mut self.rng) else { continue };
            refusals += 1;
            // A transactional producer begins anew after a refusal: what it has sent before may be
            // lost.
            let may_begin_anew =
                error.is::<Refused>() && !worker.model.sessions.is_empty() && refusals <= REFUSALS;
            if !may_begin_anew {
                failed = Some(error);
                break;
            }
            failed = begin_anew(&mut worker).err();
            if failed.is_some() {
                break;
            }
        }
        if failed.is_none() {
            failed = end_some(&mut worker, &mut self.rng).err();
        }
        drop(worker);
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

fn begin_anew(worker: &mut Worker<'_>) -> Result<(), Error> {
    for session in worker.model.sessions.clone() {
        worker.initialise(&session.transactional_id, session.second_version)?;
    }
    Ok(())
}

/// End some of the transactions that are open. One that cannot be ended is aborted by its
/// producer's next beginning.
fn end_some(worker: &mut Worker<'_>, rng: &mut Rng) -> Result<(), Error> {
    for (index, session) in worker.model.sessions.clone().iter().enumerate() {
        let outcome = match rng.below(3) {
            0 => Outcome::Aborted,
            1 => Outcome::Committed,
            _ => continue,
        };
        match worker.end(index, outcome) {
            Err(error) if error.is::<Refused>() => {
                worker.initialise(&session.transactional_id, session.second_version)?;
            }
            ended => ended?,
        }
    }
    Ok(())
}
