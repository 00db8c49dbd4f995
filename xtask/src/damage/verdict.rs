//! The judgement: what a server holds and says, against what it has acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::layout::Extent;
use super::model::{Commit, Model, Partition, Record};
use super::observe::{CORRUPT_MESSAGE, Held, Observation, Refused, Seen, View, Why};
use super::says::Stated;
use super::window::{Offsets, has};

/// What a case comes to, from the best to the worst. A case's verdict is its worst finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    /// Everything that was acknowledged is there.
    Whole,
    /// What is missing was named exactly.
    LossStated,
    /// What is missing lies in a range that was named as a bound.
    LossBounded,
    /// What is missing lies in the silent window of a kill, which is documented.
    InWindow,
    /// Reads of the damaged range, and of no other, end with an error.
    ReadError,
    /// The server refuses to start, and says what to do.
    Refused,
    /// The server has stopped because its storage failed under it, and says what to do.
    Stopped,
    // From here on failures.
    /// Health says `ok` although something is lost or cannot be read.
    HealthOk,
    /// The loss is told by the number of a stream only.
    LossUnnamed,
    /// The server says that something is lost, and not what.
    LossInexact,
    /// Something is called lost that is there, or metrics and log differ.
    LossMisstated,
    /// More is lost than was damaged.
    LossExcessive,
    /// A refusal that does not say what is wrong where, and what to do.
    NoAdvice,
    /// Clients are told to try again, for ever.
    EndlessRetry,
    /// A producer is refused that has lost nothing, or more than once.
    ProducerRefused,
    /// The server neither starts nor ends, or clients get no answer.
    Hang,
    /// The server has crashed, or one of its threads has.
    Crash,
    /// A committed record is hidden, or an aborted one is shown.
    WrongOutcome,
    /// An offset that was handed out is handed out again.
    OffsetReused,
    /// Something is read that was never written there.
    FalseBytes,
    /// Something is missing, and nothing says so.
    SilentLoss,
}

impl Verdict {
    pub(super) const ALL: [Self; 21] = [
        Self::Whole,
        Self::LossStated,
        Self::LossBounded,
        Self::InWindow,
        Self::ReadError,
        Self::Refused,
        Self::Stopped,
        Self::HealthOk,
        Self::LossUnnamed,
        Self::LossInexact,
        Self::LossMisstated,
        Self::LossExcessive,
        Self::NoAdvice,
        Self::EndlessRetry,
        Self::ProducerRefused,
        Self::Hang,
        Self::Crash,
        Self::WrongOutcome,
        Self::OffsetReused,
        Self::FalseBytes,
        Self::SilentLoss,
    ];

    pub(super) fn is_failure(self) -> bool {
        self >= Self::HealthOk
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "true bytes, no loss",
            Self::LossStated => "loss stated exactly",
            Self::LossBounded => "loss stated by a bound",
            Self::InWindow => "lost in the silent window",
            Self::ReadError => "read error",
            Self::Refused => "refused with advice",
            Self::Stopped => "stopped with advice",
            Self::HealthOk => "health says ok",
            Self::LossUnnamed => "loss without a name",
            Self::LossInexact => "loss not stated exactly",
            Self::LossMisstated => "loss misstated",
            Self::LossExcessive => "more lost than damaged",
            Self::NoAdvice => "refused without advice",
            Self::EndlessRetry => "endless retry",
            Self::ProducerRefused => "producer refused",
            Self::Hang => "hang",
            Self::Crash => "crash",
            Self::WrongOutcome => "wrong outcome",
            Self::OffsetReused => "offset reused",
            Self::FalseBytes => "false bytes",
            Self::SilentLoss => "silent loss",
        })
    }
}

/// Something that a case has shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Finding {
    pub(super) verdict: Verdict,
    pub(super) detail: String,
}

impl Finding {
    pub(super) fn new(verdict: Verdict, detail: impl Into<String>) -> Self {
        Self { verdict, detail: detail.into() }
    }
}

/// What the judgement is made from.
pub(super) struct Facts<'a> {
    pub(super) model: &'a Model,
    pub(super) observation: &'a Observation,
    pub(super) stated: &'a Stated,
    /// The offsets that the damage may cost, and whose streams are whose. `None` if nobody can
    /// tell.
    pub(super) reach: Option<&'a BTreeSet<Extent>>,
    pub(super) streams: &'a BTreeMap<u64, Partition>,
    /// What may be missing without a word.
    pub(super) window: &'a Offsets,
    /// What `/healthz` answers.
    pub(super) health: &'a str,
}

/// Findings of one kind in one partition become one, with the first offset and how many there are.
#[derive(Default)]
struct Findings(BTreeMap<(Verdict, String), (i64, u64)>);

impl Findings {
    fn add(&mut self, verdict: Verdict, what: String, offset: i64) {
        self.0.entry((verdict, what)).or_insert((offset, 0)).1 += 1;
    }
}

/// Compare. Without findings everything is there.
pub(super) fn judge(facts: &Facts<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (partition, held) in &facts.observation.partitions {
        let mut of = Findings::default();
        records(facts, partition, &held.all, &mut of);
        outcomes(facts, partition, held, &mut of);
        positions(facts, partition, held, &mut of);
        findings.extend(of.0.into_iter().map(|((verdict, what), (first, count))| {
            Finding::new(verdict, format!("{partition}: {what}: {count} from offset {first} on"))
        }));
    }
    let sides = sides(facts);
    atomicity(facts, &sides, &mut findings);
    groups(facts, &sides, &mut findings);
    if is_store_away(facts.health) {
        for finding in &mut findings {
            if finding.verdict == Verdict::EndlessRetry {
                finding.verdict = Verdict::ReadError;
            }
        }
    }
    let needs_attention = findings.iter().any(|finding| {
        !matches!(
            finding.verdict,
            Verdict::Whole | Verdict::InWindow | Verdict::WrongOutcome | Verdict::FalseBytes
        )
    });
    if needs_attention && facts.health.trim() == "ok" {
        findings.push(Finding::new(Verdict::HealthOk, "/healthz says `ok`"));
    }
    findings
}

/// Whether `/healthz` says that the object store as a whole is away. A directory that is gone
/// cannot be told from one whose file system is not mounted, so clients repeat their reads until it
/// is back (docs/storage-faults.md).
fn is_store_away(health: &str) -> bool {
    let away = ["is not the directory that was opened", "this is the right object store"];
    health.lines().any(|line| {
        line.starts_with("cold_reads_failing: ") && away.iter().any(|text| line.contains(text))
    })
}

fn refusal(view: &View, offset: i64) -> Option<&Refused> {
    view.refused.iter().find(|refused| (refused.from..refused.to).contains(&offset))
}

/// A range that cannot be read, as a finding.
fn refused_as(why: &Why) -> (Verdict, String) {
    match why {
        Why::Code(CORRUPT_MESSAGE) => (Verdict::ReadError, "reads end with an error".into()),
        Why::Code(code) => (Verdict::EndlessRetry, format!("error code {code}")),
        Why::Nothing => (Verdict::Hang, "fetches return nothing".into()),
        Why::Unreadable(error) => (Verdict::FalseBytes, error.clone()),
    }
}

fn records(facts: &Facts<'_>, partition: &Partition, view: &View, findings: &mut Findings) {
    let log = facts.model.log(partition);
    for (offset, seen) in &view.records {
        let Some(record) = log.records.get(offset) else {
            let is_doubtful = |record: &Record| seen.value.as_deref() == Some(&record.value());
            if facts.model.doubtful.iter().any(is_doubtful) {
                continue;
            }
            let what = "a record that was never acknowledged";
            findings.add(Verdict::FalseBytes, what.into(), *offset);
            continue;
        };
        let is_true = seen.key.as_deref() == record.key.as_ref().map(String::as_bytes)
            && seen.value.as_deref() == Some(&record.value())
            && seen.timestamp_ms == record.timestamp_ms;
        if !is_true {
            findings.add(Verdict::FalseBytes, "another record".into(), *offset);
        }
        if facts.stated.is_lost(partition, *offset) {
            findings.add(Verdict::LossMisstated, "called lost, and there".into(), *offset);
        }
    }
    for offset in log.records.keys() {
        if view.records.contains_key(offset) || !facts.model.must_hold(partition, *offset) {
            continue;
        }
        let stated = facts.stated;
        let (verdict, what) = if let Some(refused) = refusal(view, *offset) {
            refused_as(&refused.why)
        } else if stated.is_lost(partition, *offset) && !stated.is_exactly_lost(partition, *offset)
        {
            (Verdict::LossBounded, "lost, in a range that the log calls skipped".into())
        } else if stated.is_lost(partition, *offset) {
            (Verdict::LossStated, "lost, as the log says".into())
        } else if stated.is_lost_somewhere(*offset) {
            (Verdict::LossUnnamed, "lost, of which the log names a stream only".into())
        } else if has(facts.window, partition, *offset) {
            findings.add(Verdict::InWindow, "lost in the silent window".into(), *offset);
            continue;
        } else if stated.end {
            (Verdict::LossInexact, "lost with the end of the log".into())
        } else {
            (Verdict::SilentLoss, "missing".into())
        };
        findings.add(verdict, what, *offset);
        if !may_be_lost(facts, partition, *offset) {
            let what = "lost, and was not damaged";
            findings.add(Verdict::LossExcessive, what.into(), *offset);
        }
    }
    // Where nothing is expected there may be an error all the same.
    for refused in &view.refused {
        if !log.records.range(refused.from..refused.to).any(|_| true) {
            let (verdict, what) = refused_as(&refused.why);
            findings.add(verdict, what, refused.from);
        }
    }
}

fn may_be_lost(facts: &Facts<'_>, partition: &Partition, offset: i64) -> bool {
    facts.reach.is_none_or(|reach| {
        reach.iter().any(|extent| {
            facts.streams.get(&extent.stream) == Some(partition)
                && (extent.start..extent.end).contains(&(offset as u64))
        })
    })
}

/// Readers of committed records see those that are committed, of what the others see, and no
/// others.
fn outcomes(facts: &Facts<'_>, partition: &Partition, held: &Held, findings: &mut Findings) {
    let (log, committed) = (facts.model.log(partition), &held.committed);
    let expected = facts.model.stable_end(partition);
    for (offset, record) in &log.records {
        if !held.all.records.contains_key(offset) {
            continue;
        }
        let is_shown = committed.records.contains_key(offset);
        let is_committed = facts.model.is_committed(record);
        if is_shown && !is_committed {
            let what = "shown to readers of committed records, and not committed";
            findings.add(Verdict::WrongOutcome, what.into(), *offset);
        }
        // Log compaction may have removed it since the others have read it, if another one has
        // replaced it.
        let must_be_shown =
            is_committed && *offset < expected && facts.model.must_hold(partition, *offset);
        if is_shown || !must_be_shown {
            continue;
        }
        match refusal(committed, *offset) {
            Some(refused) => {
                let (verdict, what) = refused_as(&refused.why);
                findings.add(verdict, format!("{what}, to readers of committed records"), *offset);
            }
            None => {
                let (verdict, what) = hidden(facts, partition, record, committed);
                findings.add(verdict, what, *offset);
            }
        }
    }
    let reachable = expected.min(committed.high_watermark);
    if committed.refused.is_empty() && committed.stable_end < reachable {
        let what = format!("the last stable offset is stuck, and should be {reachable}");
        findings.add(Verdict::WrongOutcome, what, committed.stable_end);
    }
}

/// A committed record that is there and hidden, as a finding.
fn hidden(
    facts: &Facts<'_>,
    partition: &Partition,
    record: &Record,
    committed: &View,
) -> (Verdict, String) {
    let stable_end = committed.stable_end;
    let (log, wrong) = (facts.model.log(partition), Verdict::WrongOutcome);
    let Some(txn) = record.txn else {
        return (wrong, format!("hidden, the last stable offset being {stable_end}"));
    };
    let producer_id = facts.model.transactions[txn].producer_id;
    let aborts = || facts.stated.aborts.iter().filter(|abort| abort.producer_id == producer_id);
    let is_named = aborts().any(|abort| {
        abort.place.as_ref().is_some_and(|(of, first)| {
            let first = log.records.get(first);
            of == partition && first.is_some_and(|first| first.txn == Some(txn))
        })
    });
    if !decisions_may_be_lost(facts) {
        let what = "committed and hidden, and its decision was not damaged";
        (wrong, what.into())
    } else if is_named {
        (Verdict::LossStated, "aborted for want of an outcome, as the log says".into())
    } else if aborts().any(|abort| abort.place.is_none()) {
        let what =
            format!("aborted for want of an outcome: the log names producer {producer_id} only");
        (Verdict::LossInexact, what)
    } else {
        (wrong, format!("committed and hidden, the last stable offset being {stable_end}"))
    }
}

/// Whether the damage is to anything but records of partitions.
fn decisions_may_be_lost(facts: &Facts<'_>) -> bool {
    let is_state = |extent: &Extent| !facts.streams.contains_key(&extent.stream);
    facts.reach.is_none_or(|reach| reach.iter().any(is_state))
}

/// Where a transaction is shown to readers of committed records, and where it is hidden from them
/// although it can be read: one place for each.
#[derive(Default)]
struct Sides {
    shown: Option<(Partition, i64)>,
    hidden: Option<(Partition, i64)>,
}

fn sides(facts: &Facts<'_>) -> BTreeMap<usize, Sides> {
    let mut sides: BTreeMap<usize, Sides> = BTreeMap::new();
    for (partition, held) in &facts.observation.partitions {
        let log = facts.model.log(partition);
        for offset in held.all.records.keys().filter(|at| **at < held.committed.stable_end) {
            let Some(txn) = log.records.get(offset).and_then(|record| record.txn) else { continue };
            let of = sides.entry(txn).or_default();
            let side = match held.committed.records.contains_key(offset) {
                true => &mut of.shown,
                false if refusal(&held.committed, *offset).is_some() => continue,
                // Log compaction may have removed it in the meantime.
                false if !facts.model.must_hold(partition, *offset) => continue,
                false => &mut of.hidden,
            };
            side.get_or_insert_with(|| (partition.clone(), *offset));
        }
    }
    sides
}

/// A transaction is shown as a whole or hidden as a whole, whatever was lost and said.
fn atomicity(facts: &Facts<'_>, sides: &BTreeMap<usize, Sides>, findings: &mut Vec<Finding>) {
    for (txn, sides) in sides {
        if let Sides { shown: Some((shown, at)), hidden: Some((hidden, hidden_at)) } = sides {
            let producer_id = facts.model.transactions[*txn].producer_id;
            let detail = format!(
                "a transaction of producer {producer_id} is shown in part: offset {at} of {shown} \
                 is shown, and offset {hidden_at} of {hidden} is hidden"
            );
            findings.push(Finding::new(Verdict::WrongOutcome, detail));
        }
    }
}

/// Offsets that are told, beside the records.
fn positions(facts: &Facts<'_>, partition: &Partition, held: &Held, findings: &mut Findings) {
    let next = facts.model.log(partition).next;
    if let Some(Ok(earliest)) = held.earliest
        && earliest != 0
    {
        let what = "the log's start, which was 0".into();
        findings.add(Verdict::SilentLoss, what, earliest);
    }
    match held.latest {
        Some(Ok(latest)) if latest < next => {
            if (latest..next).all(|at| has(facts.window, partition, at)) {
                let what = format!("the high watermark goes back from {next}");
                return findings.add(Verdict::InWindow, what, latest);
            }
            let what = format!("the high watermark is {latest}, and was {next}");
            findings.add(Verdict::OffsetReused, what, latest);
        }
        Some(Err(code)) => {
            findings.add(Verdict::Hang, format!("ListOffsets: error code {code}"), next);
        }
        _ => {}
    }
    let Some((time, answer)) = &held.by_time else { return };
    let is_wanted = |(offset, seen): &(&i64, &Seen)| {
        seen.timestamp_ms >= *time && facts.model.must_hold(partition, **offset)
    };
    let first = held.all.records.iter().find(is_wanted);
    let first = first.map(|(offset, seen)| (*offset, seen.timestamp_ms));
    match (first, answer) {
        (Some((offset, _)), Ok((found, _))) if *found > offset || *found < 0 => {
            let what = format!("search by time finds {found}, and {offset} is there");
            findings.add(Verdict::FalseBytes, what, offset);
        }
        (_, Ok((found, told))) => {
            if let Some(seen) = held.all.records.get(found)
                && (seen.timestamp_ms != *told || told < time)
            {
                let what = "search by time tells another time than the record's";
                findings.add(Verdict::FalseBytes, what.into(), *found);
            }
        }
        // Not the leader, storage error, fenced: these a client tries again for ever.
        (_, Err(code @ (6 | 56 | 74))) => {
            let what = format!("search by time: error code {code}");
            findings.add(Verdict::EndlessRetry, what, 0);
        }
        (_, Err(code)) if held.all.refused.is_empty() => {
            let what = format!("search by time: error code {code}, and all can be read");
            findings.add(Verdict::ReadError, what, 0);
        }
        (_, Err(_)) => {}
    }
}

fn groups(facts: &Facts<'_>, sides: &BTreeMap<usize, Sides>, findings: &mut Vec<Finding>) {
    for (group, commits) in &facts.model.groups {
        let held = match facts.observation.groups.get(group) {
            None => continue,
            Some(Err(code)) => {
                let detail = format!("group {group}: OffsetFetch: error code {code}");
                findings.push(Finding::new(Verdict::Hang, detail));
                continue;
            }
            Some(Ok(held)) => held,
        };
        for (partition, commits) in commits {
            let found = held.iter().find(|(of, _)| of == partition).map(|(_, offset)| *offset);
            if let Some((verdict, what)) = position(facts, sides, commits, found) {
                findings.push(Finding::new(verdict, format!("group {group}, {partition}: {what}")));
            }
        }
        for (partition, offset) in held {
            if !commits.iter().any(|(of, _)| of == partition) {
                let detail = format!("group {group}, {partition}: found {offset}, never committed");
                findings.push(Finding::new(Verdict::FalseBytes, detail));
            }
        }
    }
}

/// The committed offset of a group in a partition.
fn position(
    facts: &Facts<'_>,
    sides: &BTreeMap<usize, Sides>,
    commits: &[Commit],
    found: Option<i64>,
) -> Option<(Verdict, String)> {
    let counting: Vec<&Commit> = facts.model.counting(commits).collect();
    let shown = |offset: Option<i64>| offset.map_or("none".to_owned(), |it| it.to_string());
    let expected = counting.last().map(|commit| commit.offset);
    let detail = format!("committed {}, found {}", shown(expected), shown(found));
    let at = match found {
        None => None,
        Some(found) => match counting.iter().rposition(|commit| commit.offset == found) {
            Some(at) => Some(at),
            None if commits.iter().any(|commit| commit.offset == found) => {
                let what = "which is of a transaction that was not committed";
                return Some((Verdict::WrongOutcome, format!("{detail}, {what}")));
            }
            None => return Some((Verdict::FalseBytes, format!("{detail}, never committed"))),
        },
    };
    let txn = at.and_then(|at| counting[at].txn);
    if let Some((hidden, offset)) =
        txn.and_then(|txn| sides.get(&txn)).and_then(|sides| sides.hidden.as_ref())
    {
        let what =
            format!("of a transaction whose record at offset {offset} of {hidden} is hidden");
        return Some((Verdict::WrongOutcome, format!("{detail}, {what}")));
    }
    let newer = &counting[at.map_or(0, |at| at + 1)..];
    // Positions go back to those before, or to none, if the records of those behind are lost.
    let stated = facts.stated;
    let is_lost = |commit: &&Commit| {
        stated.has_lost_state("offsets")
            || commit.txn.is_some() && stated.has_lost_state("transactions")
    };
    let verdict = match newer {
        [] => return None,
        newer if newer.iter().all(is_lost) => {
            let is_exact = ["offsets", "transactions"].map(|it| stated.has_exactly_lost_state(it));
            if is_exact.contains(&true) { Verdict::LossStated } else { Verdict::LossBounded }
        }
        _ if !stated.streams.is_empty() => Verdict::LossUnnamed,
        _ if stated.end => Verdict::LossInexact,
        _ => Verdict::SilentLoss,
    };
    Some((verdict, detail))
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
