//! One drill: load, loss, what an operator does, and the checks.

use std::collections::BTreeSet;
use std::fmt;
use std::mem;
use std::net::SocketAddr;
use std::ops::Range;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value};

use super::super::image::{BUSY, IDLE_PRODUCER, Load, step};
use super::super::log_lines::{Reported, final_error, panic_in};
use super::super::model::{Model, Outcome, Partition, Record};
use super::super::process::{Process, Start};
use super::super::work::{ProducerRef, RequestRefused, Worker};
use super::base::{WIDE, wait_for_upload};
use super::cause::{Done, How, Lost, apply};
use super::check::{Facts, check};
use super::journal::Journal;
use super::read::{Observed, observe};
use super::site::{Pace, Site, last};
use super::stated::{Exported, Stated};
use crate::Error;
use crate::client::Client;
use crate::exec::each_line;
use crate::rng::Rng;
use crate::server::Ending;

/// A topic has some hundred records.
const KCAT_LIMIT: Duration = Duration::from_secs(60);
const COMPACTIONS: &str = "alluvium_object_compactions_total";
const UPLOADED: &str = "alluvium_uploaded_bytes_total";

/// The state of the server when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Stopped,
    Idle,
    UnderLoad,
    Upload,
    Compaction,
    OpenTransaction,
}

impl When {
    pub(super) const ALL: [Self; 6] = [
        Self::Stopped,
        Self::Idle,
        Self::UnderLoad,
        Self::Upload,
        Self::Compaction,
        Self::OpenTransaction,
    ];
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Stopped => "stopped",
            Self::Idle => "idle",
            Self::UnderLoad => "under load",
            Self::Upload => "during an upload",
            Self::Compaction => "during a compaction",
            Self::OpenTransaction => "in a transaction",
        })
    }
}

/// What a drill has found.
#[derive(Default)]
pub(super) struct Outcomes {
    pub(super) differences: Vec<String>,
    /// What was done, for people.
    pub(super) notes: Vec<String>,
    pub(super) losses: Vec<Loss>,
}

/// One loss of a drill.
pub(super) struct Loss {
    pub(super) lost: Lost,
    pub(super) how: How,
    /// Whether `alluvium rebuild` was needed.
    pub(super) is_rebuilt: bool,
    /// Acknowledged records that are lost.
    pub(super) lost_records: u64,
    pub(super) differences: usize,
}

/// A drill.
pub(super) struct Drill {
    pub(super) site: Site,
    pub(super) journal: Journal,
    pub(super) lost: Lost,
    pub(super) how: How,
    pub(super) when: When,
    pub(super) rng: Rng,
    pub(super) outcomes: Outcomes,
    /// Whether this loss needs a rebuild.
    pub(super) is_rebuilt: bool,
    pub(super) is_second: bool,
}

impl Drill {
    /// Runs the drill. An error that ends it early counts as a difference.
    pub(super) fn run(&mut self) {
        self.next_loss();
        // In one of three drills the catalog or the log is lost another time.
        let is_intact = self.outcomes.differences.is_empty();
        if is_intact && !self.lost.is_of_objects() && self.rng.below(3) == 0 {
            let all = Lost::REBUILT;
            (self.lost, self.how) = all[self.rng.below(all.len() as u64) as usize];
            self.outcomes.notes.push(format!("then: {}, {}", self.lost, self.how));
            self.is_second = true;
            self.next_loss();
        }
    }

    fn next_loss(&mut self) {
        self.is_rebuilt = false;
        let lost_records = self.round().unwrap_or_else(|error| {
            self.differ(format!("the drill has not ended: {error}"));
            0
        });
        let Self { lost, how, is_rebuilt, .. } = *self;
        let before: usize = self.outcomes.losses.iter().map(|loss| loss.differences).sum();
        let differences = self.outcomes.differences.len() - before;
        self.outcomes.losses.push(Loss { lost, how, is_rebuilt, lost_records, differences });
    }

    /// Load, loss, recovery, checks. Returns the number of acknowledged records that are lost.
    fn round(&mut self) -> Result<u64, Error> {
        self.load()?;
        let head = self.site.bucket.head();
        self.journal.note_loss();
        let exported = self.site.tool(&["catalog", "export"], "--object-store")?;
        let exported = Exported::read(&exported.json(&[0])?);
        let done = apply(self.lost, self.how, &mut self.site, &mut self.rng)?;
        self.outcomes.notes.extend(done.descriptions.iter().cloned());
        let mut damaged = Damaged::of(&done, &exported);
        let damaged_log: Vec<_> =
            done.record.iter().filter_map(|extent| exported.offsets(extent)).collect();
        if self.lost.is_of_objects() {
            self.verify(&done, &damaged, &exported)?;
        } else {
            // A rebuild states it.
            damaged.gone = mem::take(&mut damaged.may);
            damaged.must.clear();
        }
        let logged = self.site.log()?.len();
        let (process, mut stated) = self.recover()?;
        if !self.is_rebuilt {
            stated = self.logged_losses(&self.site.log()?[logged..]);
        }
        let unnamed = stated.unnamed.iter().filter_map(|stream| exported.partition(*stream));
        let unnamed: Vec<Partition> = unnamed.cloned().collect();
        let facts = |journal: &Journal, process: &Process| -> Result<_, Error> {
            let mut client = Client::connect(process.address)?;
            let mut observed = observe(&mut client, &journal.model)?;
            for user in self.site.users()? {
                observed.state.insert(format!("user {user}"), "there".into());
            }
            let differences = check(&Facts {
                journal,
                observed: &observed,
                stated: &stated,
                must: &damaged.must,
                may: &damaged.may,
                gone: &damaged.gone,
                damaged_log: &damaged_log,
                unnamed: &unnamed,
                is_chain_lost: self.lost.has_whole_chain(),
                head,
                numbers: &done.numbers,
            });
            Ok((observed, differences))
        };
        let when = if self.is_second { ", second loss" } else { "" };
        let (observed, found) = facts(&self.journal, &process)?;
        let mut differences = named(&format!("after the loss{when}"), found);
        let journal = &mut self.journal;
        journal.model.topics.retain(|topic, logs| {
            // The last partitions may be lost with all of their records.
            logs.truncate(observed.partitions.keys().filter(|it| it.topic == *topic).count());
            !logs.is_empty()
        });
        let continued = proceed(journal, &stated, process.address, &mut self.rng)?;
        differences.extend(named("while clients continue", continued));
        let ending = if self.rng.below(2) == 0 { Ending::Sigterm } else { Ending::Sigkill };
        process.end(ending)?;
        let process = self.site.started(self.pace())?;
        let (observed, found) = facts(&self.journal, &process)?;
        differences.extend(named(&format!("after another restart{when}"), found));
        if !self.lost.is_of_objects() {
            let found = by_kcat(&process, &observed)?;
            differences.extend(named("read by kcat", found));
        }
        process.end(Ending::Sigterm)?;
        if let Some(line) = panic_in(&self.site.log()?) {
            differences.push(format!("a panic: {line}"));
        }
        let lost_records = lost_records(&self.journal, &stated);
        self.outcomes.differences.extend(differences);
        self.journal.settle(&observed);
        Ok(lost_records)
    }

    fn pace(&self) -> Pace {
        Pace::Fast { compaction: self.when == When::Compaction }
    }

    /// Runs a server and ends it in the wanted state.
    fn load(&mut self) -> Result<(), Error> {
        let Self { site, journal, rng, when, .. } = self;
        let pace = Pace::Fast { compaction: *when == When::Compaction };
        let mut process = site.started(pace)?;
        let mut count = 4 + rng.below(30);
        if *when == When::Compaction {
            count += 30;
        }
        for _ in 0..count {
            if rng.below(12) == 0 {
                journal.change(site, process.address, rng)?;
            }
            let mut worker = Worker::new(process.address, &mut journal.model)?;
            any_step(&mut worker, rng)?;
            if rng.below(8) == 0 {
                wait_for_upload(&process)?;
            }
        }
        wait_for_upload(&process)?;
        journal.note_upload(site.bucket.head());
        let is_held = match when {
            When::Upload | When::Compaction => false,
            _ => rng.below(3) > 0,
        };
        if is_held {
            // What follows is in the log only.
            process.end(if rng.below(2) == 0 { Ending::Sigterm } else { Ending::Sigkill })?;
            process = site.started(Pace::Never)?;
            for _ in 0..rng.below(40) {
                let mut worker = Worker::new(process.address, &mut journal.model)?;
                any_step(&mut worker, rng)?;
            }
            if rng.below(2) == 0 {
                journal.change(site, process.address, rng)?;
            }
        }
        match when {
            When::Stopped => drop(process.end(Ending::Sigterm)?),
            When::Idle => {
                thread::sleep(rng.duration(Duration::ZERO, Duration::from_millis(1500)));
                process.end(Ending::Sigkill)?;
            }
            When::OpenTransaction => {
                let mut worker = Worker::new(process.address, &mut journal.model)?;
                for session in 0..worker.model.sessions.len() {
                    for _ in 0..1 + rng.below(3) {
                        let index = rng.below(3) as i32;
                        let records = worker.records(2, 200, None);
                        worker.write(
                            session,
                            &Partition { topic: "ledger".into(), index },
                            records,
                        )?;
                    }
                    any_step(&mut worker, rng)?;
                }
                drop(worker);
                if rng.below(2) == 0 && !is_held {
                    wait_for_upload(&process)?;
                }
                process.end(Ending::Sigkill)?;
            }
            When::UnderLoad | When::Upload | When::Compaction => {
                let wait = match when {
                    When::Compaction => Wait::Metric(COMPACTIONS),
                    When::Upload => Wait::Metric(UPLOADED),
                    _ => Wait::Time(rng.duration(Duration::ZERO, Duration::from_millis(500))),
                };
                let more = rng.duration(Duration::ZERO, Duration::from_millis(120));
                kill_under_load(process, journal, rng, wait, more)?;
            }
        }
        Ok(())
    }

    /// Checks that the tools name a damaged object.
    fn verify(&mut self, done: &Done, damaged: &Damaged, exported: &Exported) -> Result<(), Error> {
        let Some(object) = &done.object else { return Ok(()) };
        let url = &self.site.bucket.url;
        let (what, printed) = match object.is_deleted {
            true => ("gc", self.site.tool(&["object", "gc", "--json"], "--object-store")?),
            false => {
                let streams = format!("{url}/streams");
                let words = ["object", "verify", &streams, "--json"];
                ("verify", self.site.tool(&words, "--catalog")?)
            }
        };
        // A missing object is none that matters unless the catalog has records in it.
        let must_fail = !object.is_deleted || exported.uses(&object.name);
        let names = printed.stdout.contains(&object.name);
        if must_fail && (printed.code != Some(1) || !names) {
            self.differ(format!("object {what} does not name {}: {printed}", object.name));
        }
        // It names ten partitions, and the number of others.
        let is_complete = !printed.stdout.contains("other streams");
        let holds = damaged.must.iter().find(|(partition, _)| {
            let Partition { topic, index } = partition;
            is_complete && !printed.stdout.contains(&format!("partition {index} of topic {topic}"))
        });
        if let Some((partition, _)) = holds {
            self.differ(format!("object {what} does not name {partition}: {printed}"));
        }
        Ok(())
    }

    fn differ(&mut self, difference: String) {
        self.outcomes.differences.push(difference);
    }

    /// Does what an operator does until the server runs. Returns what was stated as lost.
    fn recover(&mut self) -> Result<(Process, Stated), Error> {
        let pace = self.pace();
        let mut stated = Stated { is_clean: true, ..Stated::default() };
        let mut advice = match self.lost {
            // Without both, a start would be that of a new server.
            Lost::WalAndData => Some(false),
            // The server would start, and reads of the object would fail.
            Lost::AcceptedObject => Some(true),
            _ => None,
        };
        for _ in 0..2 {
            if advice.is_none() {
                let before = self.site.log()?.len();
                match self.site.start(pace)? {
                    Start::Ready(process) => return Ok((process, stated)),
                    Start::Hangs => return Err("the server does not start".into()),
                    Start::Ended(status) => {
                        let log = self.site.log()?;
                        let error = final_error(&log[before..]);
                        self.outcomes.notes.push(format!("{status}: {error}"));
                        if self.is_rebuilt {
                            return Err(format!("refused after the rebuild: {error}").into());
                        }
                        if !error.contains("alluvium rebuild") {
                            self.differ(format!("a refusal does not name `rebuild`: {error}"));
                        }
                        let is_of_chain = self.lost.has_wal();
                        advice = Some(error.contains("--from-objects") || is_of_chain);
                    }
                }
            }
            stated = self.rebuild(advice.take().unwrap_or(false))?;
            self.is_rebuilt = true;
        }
        Err("two rebuilds are not enough".into())
    }

    /// Runs the rebuild that is advised.
    fn rebuild(&mut self, from_objects: bool) -> Result<Stated, Error> {
        let (wal, data) = (self.site.wal(), self.site.data());
        let (wal, data) = (wal.to_string_lossy().into_owned(), data.to_string_lossy().into_owned());
        let mut words = vec!["rebuild", "--json", "--wal", &wal];
        if from_objects {
            words.push("--from-objects");
        }
        let dry = self.site.tool(&[&words[..], &["--dry-run"]].concat(), "--object-store")?;
        if dry.code != Some(0) && !from_objects {
            if !dry.stderr.contains("--from-objects") {
                self.differ(format!("a refusal does not name --from-objects: {dry}"));
            }
            return self.rebuild(true);
        }
        let dry = dry.json(&[0])?;
        let wanted = Stated::read(&dry)?;
        if !wanted.is_clean {
            let more = ["--data-dir", &data];
            let refused = self.site.tool(&[&words[..], &more].concat(), "--object-store")?;
            if refused.code != Some(1) || !refused.stderr.contains("--accept-loss") {
                self.differ(format!("a loss is not refused without --accept-loss: {refused}"));
            }
        }
        let more = ["--data-dir", &data, "--accept-loss", "--wal-capacity", "64MiB"];
        let done = self.site.tool(&[&words[..], &more].concat(), "--object-store")?;
        let expected = if wanted.is_clean { 0 } else { 3 };
        let done = done.json(&[expected])?;
        if let Some(difference) = first_difference(&dry, &done, "") {
            self.differ(format!(
                "the dry run states something else than the rebuild: {difference}"
            ));
        }
        self.outcomes.notes.push(format!("rebuilt: {}", summary(&done)));
        Stated::read(&done)
    }

    /// Returns the losses that a server has logged.
    fn logged_losses(&self, log: &str) -> Stated {
        let mut reported = Reported::default();
        reported.read(log, &self.journal.model.partitions());
        let state = !reported.states.is_empty();
        Stated {
            ranges: reported.partitions,
            state,
            changes: reported.changes,
            all_changes: reported.changes,
            is_clean: reported.lines.is_empty(),
            ..Stated::default()
        }
    }
}

/// Returns where two reports differ first, except for the new log, and for reasons: one of an S3
/// server has the duration of the request.
fn first_difference(dry: &Value, done: &Value, at: &str) -> Option<String> {
    match (dry, done) {
        (Value::Object(left), Value::Object(right)) => {
            let keys: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
            let is_compared = |key: &&String| *key != "wal" && *key != "reason";
            keys.into_iter().filter(is_compared).find_map(|key| {
                let of = |fields: &Map<String, Value>| fields.get(key).cloned().unwrap_or_default();
                first_difference(&of(left), &of(right), &format!("{at}/{key}"))
            })
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            left.iter().zip(right).find_map(|(left, right)| first_difference(left, right, at))
        }
        _ => (dry != done).then(|| format!("{at}: {dry}, {done}")),
    }
}

/// The parts of a report that people look at first.
fn summary(report: &Value) -> String {
    let mut report = report.clone();
    if let Some(lost) = report["lost"].as_array_mut() {
        lost.retain(|lost| lost["from"] != lost["known_end"]);
        lost.truncate(8);
    }
    report.to_string()
}

fn named(when: &str, differences: Vec<String>) -> Vec<String> {
    differences.into_iter().map(|difference| format!("{when}: {difference}")).collect()
}

/// Number of acknowledged records that are stated as lost.
fn lost_records(journal: &Journal, stated: &Stated) -> u64 {
    let of = |partition: &Partition| {
        let offsets = journal.model.log(partition).records.keys();
        let lost = offsets
            .filter(|at| !journal.is_new(partition, **at) && stated.is_lost(partition, **at));
        lost.count() as u64
    };
    journal.model.partitions().iter().map(of).sum()
}

/// What of partitions is in damaged parts of an object.
#[derive(Default)]
struct Damaged {
    must: Vec<(Partition, Range<i64>)>,
    may: Vec<(Partition, Range<i64>)>,
    /// What a rebuild has to state as lost, unless another object has it.
    gone: Vec<(Partition, Range<i64>)>,
}

impl Damaged {
    fn of(done: &Done, exported: &Exported) -> Self {
        let Some(object) = &done.object else { return Self::default() };
        Self {
            must: exported.partitions(&object.name, &object.must),
            may: exported.partitions(&object.name, &object.may),
            gone: Vec::new(),
        }
    }
}

/// When a server under load is killed.
#[derive(Clone, Copy)]
enum Wait {
    Time(Duration),
    /// When the metric changes.
    Metric(&'static str),
}

/// Kills the server while a client writes, and notes what had no answer.
fn kill_under_load(
    process: Process,
    journal: &mut Journal,
    rng: &mut Rng,
    wait: Wait,
    more: Duration,
) -> Result<(), Error> {
    let pid = i32::try_from(process.pid()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or("a process without an id")?;
    thread::scope(|scope| -> Result<(), Error> {
        let killer = scope.spawn(|| -> Result<(), String> {
            match wait {
                Wait::Time(time) => thread::sleep(time),
                Wait::Metric(name) => {
                    let value = || process.metric(name).map_err(|error| error.to_string());
                    let (before, begun) = (value()?, Instant::now());
                    while value()? == before && begun.elapsed() < Duration::from_secs(2) {
                        thread::sleep(Duration::from_millis(2));
                    }
                }
            }
            thread::sleep(more);
            kill_process(pid, Signal::KILL).map_err(|error| error.to_string())
        });
        let mut worker = Worker::new(process.address, &mut journal.model)?;
        loop {
            let load = Load::ALL[rng.below(4) as usize];
            let refused = match step(&mut worker, load, rng, true) {
                Ok(()) => continue,
                Err(error) => error.is::<RequestRefused>(),
            };
            if refused {
                return Err("a request is refused under load".into());
            }
            break;
        }
        let last = worker.last_producer.clone();
        journal.is_cut_off = true;
        match last {
            Some(ProducerRef::Session(session)) => {
                journal.unknown_end = journal.model.sessions[session].open;
                journal.unknown_session = Some(session);
            }
            Some(ProducerRef::Idempotent(producer, partition)) => {
                journal.unknown_sequence = Some((producer, partition));
            }
            None => {}
        }
        killer.join().map_err(|_| "the killer panicked")??;
        Ok(())
    })?;
    process.end(Ending::Sigkill)?;
    Ok(())
}

/// Runs a step of any load.
fn any_step(worker: &mut Worker<'_>, rng: &mut Rng) -> Result<(), Error> {
    let wide = worker.model.topics.get(WIDE).map_or(0, Vec::len) as u64;
    match rng.below(9) {
        8 if wide > 0 => {
            let index = rng.below(wide) as i32;
            let records = worker.records(1, 100, None);
            worker.produce(&Partition { topic: WIDE.into(), index }, records).map(drop)
        }
        which => step(worker, Load::ALL[which as usize % 4], rng, true),
    }
}

/// Lets the clients continue, and new ones begin. Returns what they must not have met.
fn proceed(
    journal: &mut Journal,
    stated: &Stated,
    address: SocketAddr,
    rng: &mut Rng,
) -> Result<Vec<String>, Error> {
    let mut differences = Vec::new();
    let lost = lost_of(journal, stated);
    let unknown = journal.unknown_sequence.clone();
    let (unknown_session, unknown_end) = (journal.unknown_session, journal.unknown_end);
    let mut refused = BTreeSet::new();
    let mut worker = Worker::new(address, &mut journal.model)?;
    for producer in [BUSY, IDLE_PRODUCER] {
        let partitions = worker.model.topics["events"].len() as i32;
        for index in 0..partitions {
            let partition = Partition { topic: "events".into(), index };
            if unknown.as_ref() == Some(&(producer, partition.clone())) {
                // Whether its last batch is there is not known.
                continue;
            }
            let name = partition.to_string();
            let of = &worker.model.idempotent[producer];
            let has_lost = of.offsets.get(&name).is_some_and(|offsets| {
                offsets.iter().any(|offset| lost.contains(&(partition.clone(), *offset)))
            });
            let records = worker.records(1 + rng.below(3) as usize, 100, None);
            if let Err(error) = worker.produce_next(producer, &partition, records) {
                if !error.is::<RequestRefused>() {
                    return Err(error);
                }
                if !has_lost {
                    differences.push(format!(
                        "{partition}: an idempotent producer that has lost nothing: {error}"
                    ));
                }
                refused.insert(producer);
            }
        }
    }
    refused.extend(unknown.map(|(producer, _)| producer));
    for producer in refused {
        // It gets another id, as clients do.
        worker.identify()?;
        worker.model.idempotent[producer] = worker.model.idempotent.pop().ok_or("no id")?;
    }
    worker.identify()?;
    let new = worker.model.idempotent.len() - 1;
    for session in 0..worker.model.sessions.len() {
        let name = worker.model.sessions[session].transactional_id.clone();
        let second_version = worker.model.sessions[session].second_version;
        if unknown_session == Some(session) {
            // The transaction without an answer has ended, one way or the other.
            worker.model.sessions[session].open =
                worker.model.sessions[session].open.filter(|open| Some(*open) != unknown_end);
            worker.initialise(&name, second_version)?;
        }
        let open = worker.model.sessions[session].open;
        let has_lost = open.is_some_and(|txn| {
            lost.iter().any(|(partition, offset)| {
                worker.model.log(partition).records[offset].txn == Some(txn)
            })
        });
        // Others may have been its own.
        let may_be_refused = has_lost
            || open.is_some_and(|txn| {
                let model = &worker.model;
                let is_own = |record: &Record| record.txn == Some(txn);
                model.partitions().iter().any(|partition| {
                    stated.has_hole(partition) && model.log(partition).records.values().any(is_own)
                })
            });
        let outcome = if rng.below(4) == 0 { Outcome::Aborted } else { Outcome::Committed };
        let continued = go_on(&mut worker, session, outcome, rng);
        match continued {
            Ok(()) if has_lost && outcome == Outcome::Committed => differences
                .push(format!("session {name}: a transaction with lost records was committed")),
            Ok(()) => {}
            Err(error) if error.is::<RequestRefused>() => {
                if !may_be_refused && !stated.state {
                    differences.push(format!("session {name}, which has lost nothing: {error}"));
                }
                worker.initialise(&name, second_version)?;
                go_on(&mut worker, session, Outcome::Committed, rng)?;
            }
            Err(error) => return Err(error),
        }
    }
    let session = worker.initialise("new", true)?;
    go_on(&mut worker, session, Outcome::Committed, rng)?;
    for load in [Load::Compacted, Load::Grouped, Load::Compacted, Load::Grouped] {
        step(&mut worker, load, rng, true)?;
    }
    for partition in worker.model.partitions() {
        // Each partition takes records after all that it has had.
        let is_wide = partition.topic == WIDE;
        if partition.topic == "ledger" || is_wide && rng.below(20) > 0 {
            continue;
        }
        let key = (partition.topic == "table").then_some("another key");
        let records = worker.records(1, 100, key);
        match partition.topic == "events" {
            true => worker.produce_next(new, &partition, records)?,
            false => drop(worker.produce(&partition, records)?),
        }
    }
    Ok(differences)
}

/// Writes in a transaction and ends it.
fn go_on(
    worker: &mut Worker<'_>,
    session: usize,
    outcome: Outcome,
    rng: &mut Rng,
) -> Result<(), Error> {
    let partition = Partition { topic: "ledger".into(), index: rng.below(3) as i32 };
    let records = worker.records(2, 100, None);
    worker.write(session, &partition, records)?;
    worker.end(session, outcome)
}

/// Acknowledged records that are stated as lost.
fn lost_of(journal: &Journal, stated: &Stated) -> BTreeSet<(Partition, i64)> {
    let of = |model: &Model, partition: Partition| {
        let offsets: Vec<i64> = model.log(&partition).records.keys().copied().collect();
        offsets
            .into_iter()
            .filter(|offset| stated.is_lost(&partition, *offset))
            .map(|offset| (partition.clone(), offset))
            .collect::<Vec<_>>()
    };
    let partitions = journal.model.partitions().into_iter();
    partitions.flat_map(|partition| of(&journal.model, partition)).collect()
}

/// Compares what kcat reads of committed records with what was read before. It passes the offsets
/// that a partition skips, as every client has to.
fn by_kcat(process: &Process, observed: &Observed) -> Result<Vec<String>, Error> {
    let mut differences = Vec::new();
    for topic in ["events", "ledger", "orders", "table"] {
        let mut command = Command::new("kcat");
        command.args(["-C", "-q", "-e", "-t", topic, "-o", "beginning", "-X", "check.crcs=true"]);
        command.args(["-f", "%p %o\n", "-b", &process.address.to_string()]);
        let mut found = BTreeSet::new();
        let status = each_line(&mut command, KCAT_LIMIT, |line| {
            let mut numbers = line.split(' ').filter_map(|number| number.parse::<i64>().ok());
            found.extend(numbers.next().zip(numbers.next()));
        })?;
        let partitions = observed.partitions.iter().filter(|(of, _)| of.topic == topic);
        let expected: BTreeSet<(i64, i64)> = partitions
            .flat_map(|(of, contents)| {
                contents.committed.records.keys().map(|offset| (i64::from(of.index), *offset))
            })
            .collect();
        let missing = expected.difference(&found).next();
        // Log compaction may remove records between the two reads.
        let missing = missing.filter(|_| topic != "table");
        let more = found.difference(&expected).next();
        if !status.success() || missing.is_some() || more.is_some() {
            differences.push(format!("{topic}: {status}, missing {missing:?}, more {more:?}"));
        }
    }
    Ok(differences)
}

/// Describes a drill that has failed, for its file.
pub(super) fn describe(drill: &Drill) -> String {
    let Outcomes { differences, notes, .. } = &drill.outcomes;
    let log = drill.site.log().unwrap_or_default();
    format!("{}\n\n{}\n\n{}\n", differences.join("\n"), notes.join("\n"), last(&log))
}
