//! The judgement: compares what a server holds and reports with what it has acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::layout::{Extent, OF_CATALOG};
use super::log_lines::Reported;
use super::model::{Commit, Model, Partition, Record};
use super::observe::{Observation, PartitionContents, ReadFailure, UnreadableRange, View};
use super::reads::{CORRUPT_MESSAGE, Fetched};
use super::window::{Offsets, has};

/// The verdict on a finding, from the best to the worst. A case gets that of its worst finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    /// Everything that was acknowledged is present.
    Intact,
    /// Exactly the missing data was reported.
    LossReported,
    /// The missing data is in a range that was reported as an upper bound.
    LossBounded,
    /// The missing data is in the silent window of a kill, which is documented.
    InWindow,
    /// Reads of the damaged range, and of no other, end with an error.
    ReadError,
    /// The server refuses to start, with advice.
    Refused,
    /// The server has stopped because its storage failed while it ran, with advice.
    Stopped,
    // The verdicts from here on are failures.
    /// `/healthz` answers `ok` although data is lost or cannot be read.
    HealthOk,
    /// The loss is reported with the number of a stream only.
    LossUnnamed,
    /// The server reports a loss without its extent.
    LossInexact,
    /// Present data is reported as lost, or metrics and log differ.
    LossMisreported,
    /// More is lost than was damaged.
    LossExcessive,
    /// A refusal that does not name the file and the problem, or contains no advice.
    NoAdvice,
    /// A refusal although nothing is damaged that the server needs.
    NeedlessRefusal,
    /// Clients receive an error on which they retry forever.
    EndlessRetry,
    /// A producer is refused that has lost nothing, or is refused more than once.
    ProducerRefused,
    /// The server neither starts nor ends, or clients get no answer.
    Hang,
    /// The server has crashed, or one of its threads has.
    Crash,
    /// A committed record is hidden, or an aborted one is visible.
    WrongOutcome,
    /// An offset is assigned a second time.
    OffsetReused,
    /// A read returns data that was never written there.
    WrongBytes,
    /// Data is missing without a report.
    SilentLoss,
}

impl Verdict {
    pub(super) const ALL: [Self; 22] = [
        Self::Intact,
        Self::LossReported,
        Self::LossBounded,
        Self::InWindow,
        Self::ReadError,
        Self::Refused,
        Self::Stopped,
        Self::HealthOk,
        Self::LossUnnamed,
        Self::LossInexact,
        Self::LossMisreported,
        Self::LossExcessive,
        Self::NoAdvice,
        Self::NeedlessRefusal,
        Self::EndlessRetry,
        Self::ProducerRefused,
        Self::Hang,
        Self::Crash,
        Self::WrongOutcome,
        Self::OffsetReused,
        Self::WrongBytes,
        Self::SilentLoss,
    ];

    pub(super) fn is_failure(self) -> bool {
        self >= Self::HealthOk
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Intact => "correct bytes, no loss",
            Self::LossReported => "loss reported exactly",
            Self::LossBounded => "loss reported by a bound",
            Self::InWindow => "lost in the silent window",
            Self::ReadError => "read error",
            Self::Refused => "refused with advice",
            Self::Stopped => "stopped with advice",
            Self::HealthOk => "health is ok",
            Self::LossUnnamed => "loss without a partition",
            Self::LossInexact => "loss not reported exactly",
            Self::LossMisreported => "loss misreported",
            Self::LossExcessive => "more lost than damaged",
            Self::NoAdvice => "refused without advice",
            Self::NeedlessRefusal => "refused needlessly",
            Self::EndlessRetry => "endless retry",
            Self::ProducerRefused => "producer refused",
            Self::Hang => "hang",
            Self::Crash => "crash",
            Self::WrongOutcome => "wrong outcome",
            Self::OffsetReused => "offset reused",
            Self::WrongBytes => "wrong bytes",
            Self::SilentLoss => "silent loss",
        })
    }
}

/// A result of a case.
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

/// The input of the judgement.
pub(super) struct Facts<'a> {
    pub(super) model: &'a Model,
    pub(super) observation: &'a Observation,
    pub(super) reported: &'a Reported,
    /// The offsets that the damage may affect, and the partition of each stream. `None` if unknown.
    pub(super) reach: Option<&'a BTreeSet<Extent>>,
    pub(super) streams: &'a BTreeMap<u64, Partition>,
    /// Offsets that may be missing without a report.
    pub(super) window: &'a Offsets,
    /// Whether changes of the catalog may be missing without a report.
    pub(super) changes_in_window: bool,
    /// The answer of `/healthz`.
    pub(super) health: &'a str,
}

/// Findings with the same verdict and text in one partition, merged: the first offset and their
/// number.
#[derive(Default)]
struct Findings(BTreeMap<(Verdict, String), (i64, u64)>);

impl Findings {
    fn add(&mut self, verdict: Verdict, what: String, offset: i64) {
        self.0.entry((verdict, what)).or_insert((offset, 0)).1 += 1;
    }
}

/// Compares the facts. Returns no findings if everything is present.
pub(super) fn judge(facts: &Facts<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (partition, contents) in &facts.observation.partitions {
        let mut of = Findings::default();
        check_records(facts, partition, &contents.all, &mut of);
        check_outcomes(facts, partition, contents, &mut of);
        check_offsets(facts, partition, contents, &mut of);
        findings.extend(of.0.into_iter().map(|((verdict, what), (first, count))| {
            Finding::new(verdict, format!("{partition}: {what}: {count} from offset {first} on"))
        }));
    }
    check_topics(facts, &mut findings);
    let visibility = visibility(facts);
    check_atomicity(facts, &visibility, &mut findings);
    check_groups(facts, &visibility, &mut findings);
    if is_store_unavailable(facts.health) {
        for finding in &mut findings {
            if finding.verdict == Verdict::EndlessRetry {
                finding.verdict = Verdict::ReadError;
            }
        }
    }
    let needs_attention = findings.iter().any(|finding| {
        !matches!(
            finding.verdict,
            Verdict::Intact | Verdict::InWindow | Verdict::WrongOutcome | Verdict::WrongBytes
        )
    });
    if needs_attention && facts.health.trim() == "ok" {
        findings.push(Finding::new(Verdict::HealthOk, "/healthz answers `ok`"));
    }
    findings
}

/// Whether `/healthz` reports that the object store as a whole is unavailable. A missing directory
/// cannot be distinguished from one whose file system is not mounted, so clients repeat their reads
/// until it is available again (docs/storage-faults.md).
fn is_store_unavailable(health: &str) -> bool {
    let away = ["is not the directory that was opened", "this is the right object store"];
    health.lines().any(|line| {
        line.starts_with("cold_reads_failing: ") && away.iter().any(|text| line.contains(text))
    })
}

/// Checks that each change of a topic without records is still in effect.
fn check_topics(facts: &Facts<'_>, findings: &mut Vec<Finding>) {
    for (topic, exists) in &facts.model.empty_topics {
        if facts.observation.topics.contains(topic) == *exists {
            continue;
        }
        let change = if *exists { "creation" } else { "deletion" };
        let (verdict, how) = if facts.reported.changes {
            (Verdict::LossReported, "lost, as the log reports")
        } else if facts.changes_in_window {
            (Verdict::InWindow, "lost in the silent window")
        } else {
            (Verdict::SilentLoss, "lost")
        };
        findings.push(Finding::new(verdict, format!("topic {topic}: its {change} is {how}")));
        if facts.reach.is_some_and(|reach| !reach.contains(&OF_CATALOG)) {
            let what = format!("topic {topic}: its {change} is lost, but not damaged");
            findings.push(Finding::new(Verdict::LossExcessive, what));
        }
    }
}

fn unreadable_at(view: &View, offset: i64) -> Option<&UnreadableRange> {
    view.unreadable.iter().find(|range| (range.from..range.to).contains(&offset))
}

/// Returns the verdict on a range that cannot be read.
fn classify_failure(failure: &ReadFailure) -> (Verdict, String) {
    match failure {
        ReadFailure::Code(CORRUPT_MESSAGE) => {
            (Verdict::ReadError, "reads end with an error".into())
        }
        ReadFailure::Code(code) => (Verdict::EndlessRetry, format!("error code {code}")),
        ReadFailure::NoData => (Verdict::Hang, "fetches return nothing".into()),
        ReadFailure::Malformed(error) => (Verdict::WrongBytes, error.clone()),
    }
}

fn check_records(facts: &Facts<'_>, partition: &Partition, view: &View, findings: &mut Findings) {
    let log = facts.model.log(partition);
    for (offset, fetched) in &view.records {
        let Some(record) = log.records.get(offset) else {
            let is_unanswered = |record: &Record| fetched.value.as_deref() == Some(&record.value());
            if facts.model.unanswered.iter().any(is_unanswered) {
                continue;
            }
            let what = "a record that was never acknowledged";
            findings.add(Verdict::WrongBytes, what.into(), *offset);
            continue;
        };
        let is_true = fetched.key.as_deref() == record.key.as_ref().map(String::as_bytes)
            && fetched.value.as_deref() == Some(&record.value())
            && fetched.timestamp_ms == record.timestamp_ms;
        if !is_true {
            findings.add(Verdict::WrongBytes, "another record".into(), *offset);
        }
        if facts.reported.is_lost(partition, *offset) {
            findings.add(Verdict::LossMisreported, "reported as lost, but present".into(), *offset);
        }
    }
    for offset in log.records.keys() {
        if view.records.contains_key(offset) || !facts.model.must_hold(partition, *offset) {
            continue;
        }
        let reported = facts.reported;
        let (verdict, what) = if let Some(unreadable) = unreadable_at(view, *offset) {
            classify_failure(&unreadable.failure)
        } else if reported.is_lost(partition, *offset)
            && !reported.is_exactly_lost(partition, *offset)
        {
            (Verdict::LossBounded, "lost, in a range that the log reports as skipped".into())
        } else if reported.is_lost(partition, *offset) {
            (Verdict::LossReported, "lost, as the log reports".into())
        } else if reported.is_lost_somewhere(*offset) {
            (Verdict::LossUnnamed, "lost; the log names its stream only".into())
        } else if has(facts.window, partition, *offset) {
            findings.add(Verdict::InWindow, "lost in the silent window".into(), *offset);
            continue;
        } else if reported.end {
            (Verdict::LossInexact, "lost with the end of the log".into())
        } else {
            (Verdict::SilentLoss, "missing".into())
        };
        findings.add(verdict, what, *offset);
        if !may_be_lost(facts, partition, *offset) {
            let what = "lost, but not damaged";
            findings.add(Verdict::LossExcessive, what.into(), *offset);
        }
    }
    // Errors may also occur where no record is expected.
    for unreadable in &view.unreadable {
        if !log.records.range(unreadable.from..unreadable.to).any(|_| true) {
            let (verdict, what) = classify_failure(&unreadable.failure);
            findings.add(verdict, what, unreadable.from);
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

/// Checks that consumers with `read_committed` receive exactly the committed records among those
/// that other consumers receive.
fn check_outcomes(
    facts: &Facts<'_>,
    partition: &Partition,
    contents: &PartitionContents,
    findings: &mut Findings,
) {
    let (log, committed) = (facts.model.log(partition), &contents.committed);
    let expected = facts.model.last_stable_offset(partition);
    for (offset, record) in &log.records {
        if !contents.all.records.contains_key(offset) {
            continue;
        }
        let is_shown = committed.records.contains_key(offset);
        let is_committed = facts.model.is_committed(record);
        if is_shown && !is_committed {
            let what = "visible with read_committed, but not committed";
            findings.add(Verdict::WrongOutcome, what.into(), *offset);
        }
        // Log compaction may have removed it since the first read, if a later record has its key.
        let must_be_shown =
            is_committed && *offset < expected && facts.model.must_hold(partition, *offset);
        if is_shown || !must_be_shown {
            continue;
        }
        match unreadable_at(committed, *offset) {
            Some(unreadable) => {
                let (verdict, what) = classify_failure(&unreadable.failure);
                findings.add(verdict, format!("{what}, with read_committed"), *offset);
            }
            None => {
                let (verdict, what) = classify_hidden(facts, partition, record, committed);
                findings.add(verdict, what, *offset);
            }
        }
    }
    let reachable = expected.min(committed.high_watermark);
    if committed.unreadable.is_empty() && committed.last_stable_offset < reachable {
        let what = format!("the last stable offset does not advance to {reachable}");
        findings.add(Verdict::WrongOutcome, what, committed.last_stable_offset);
    }
}

/// Returns the verdict on a committed record that is present but hidden.
fn classify_hidden(
    facts: &Facts<'_>,
    partition: &Partition,
    record: &Record,
    committed: &View,
) -> (Verdict, String) {
    let last_stable_offset = committed.last_stable_offset;
    let (log, wrong) = (facts.model.log(partition), Verdict::WrongOutcome);
    let Some(txn) = record.txn else {
        return (wrong, format!("hidden; the last stable offset is {last_stable_offset}"));
    };
    let producer_id = facts.model.transactions[txn].producer_id;
    let aborts = || facts.reported.aborts.iter().filter(|abort| abort.producer_id == producer_id);
    let is_named = aborts().any(|abort| {
        abort.position.as_ref().is_some_and(|(of, first)| {
            let first = log.records.get(first);
            of == partition && first.is_some_and(|first| first.txn == Some(txn))
        })
    });
    if !may_affect_decisions(facts) {
        let what = "committed but hidden, and its decision was not damaged";
        (wrong, what.into())
    } else if is_named {
        (Verdict::LossReported, "aborted without a known outcome, as the log reports".into())
    } else if aborts().any(|abort| abort.position.is_none()) {
        let what =
            format!("aborted without a known outcome: the log names producer {producer_id} only");
        (Verdict::LossInexact, what)
    } else {
        (wrong, format!("committed but hidden; the last stable offset is {last_stable_offset}"))
    }
}

/// Whether the damage affects anything but records of partitions.
fn may_affect_decisions(facts: &Facts<'_>) -> bool {
    let is_state = |extent: &Extent| !facts.streams.contains_key(&extent.stream);
    facts.reach.is_none_or(|reach| reach.iter().any(is_state))
}

/// For a transaction, one offset that is visible to consumers with `read_committed`, and one that
/// is hidden from them although it can be read.
#[derive(Default)]
struct Visibility {
    shown: Option<(Partition, i64)>,
    hidden: Option<(Partition, i64)>,
}

fn visibility(facts: &Facts<'_>) -> BTreeMap<usize, Visibility> {
    let mut visibility: BTreeMap<usize, Visibility> = BTreeMap::new();
    for (partition, contents) in &facts.observation.partitions {
        let log = facts.model.log(partition);
        for offset in
            contents.all.records.keys().filter(|at| **at < contents.committed.last_stable_offset)
        {
            let Some(txn) = log.records.get(offset).and_then(|record| record.txn) else { continue };
            let of = visibility.entry(txn).or_default();
            let side = match contents.committed.records.contains_key(offset) {
                true => &mut of.shown,
                false if unreadable_at(&contents.committed, *offset).is_some() => continue,
                // Log compaction may have removed it in the meantime.
                false if !facts.model.must_hold(partition, *offset) => continue,
                false => &mut of.hidden,
            };
            side.get_or_insert_with(|| (partition.clone(), *offset));
        }
    }
    visibility
}

/// Checks that each transaction is visible or hidden as a whole, regardless of losses and reports.
fn check_atomicity(
    facts: &Facts<'_>,
    visibility: &BTreeMap<usize, Visibility>,
    findings: &mut Vec<Finding>,
) {
    for (txn, visibility) in visibility {
        if let Visibility { shown: Some((shown, at)), hidden: Some((hidden, hidden_at)) } =
            visibility
        {
            let producer_id = facts.model.transactions[*txn].producer_id;
            let detail = format!(
                "a transaction of producer {producer_id} is visible in part: offset {at} of \
                 {shown} is visible, and offset {hidden_at} of {hidden} is hidden"
            );
            findings.push(Finding::new(Verdict::WrongOutcome, detail));
        }
    }
}

/// Checks the answers of ListOffsets and the high watermark.
fn check_offsets(
    facts: &Facts<'_>,
    partition: &Partition,
    contents: &PartitionContents,
    findings: &mut Findings,
) {
    let next = facts.model.log(partition).next;
    if let Some(Ok(earliest)) = contents.earliest
        && earliest != 0
    {
        let what = "the log start offset, which was 0".into();
        findings.add(Verdict::SilentLoss, what, earliest);
    }
    match contents.latest {
        Some(Ok(latest)) if latest < next => {
            if (latest..next).all(|at| has(facts.window, partition, at)) {
                let what = format!("the high watermark is lower than {next}");
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
    let Some((time, answer)) = &contents.by_time else { return };
    let is_wanted = |(offset, fetched): &(&i64, &Fetched)| {
        fetched.timestamp_ms >= *time && facts.model.must_hold(partition, **offset)
    };
    let first = contents.all.records.iter().find(is_wanted);
    let first = first.map(|(offset, fetched)| (*offset, fetched.timestamp_ms));
    match (first, answer) {
        (Some((offset, _)), Ok((found, _))) if *found > offset || *found < 0 => {
            let what = format!("search by timestamp finds {found} instead of {offset}");
            findings.add(Verdict::WrongBytes, what, offset);
        }
        (_, Ok((found, timestamp))) => {
            if let Some(fetched) = contents.all.records.get(found)
                && (fetched.timestamp_ms != *timestamp || timestamp < time)
            {
                let what = "search by timestamp returns a timestamp other than the record's";
                findings.add(Verdict::WrongBytes, what.into(), *found);
            }
        }
        // On NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR and FENCED_LEADER_EPOCH a client retries
        // forever.
        (_, Err(code @ (6 | 56 | 74))) => {
            let what = format!("search by timestamp: error code {code}");
            findings.add(Verdict::EndlessRetry, what, 0);
        }
        (_, Err(code)) if contents.all.unreadable.is_empty() => {
            let what =
                format!("search by timestamp: error code {code}, but all records can be read");
            findings.add(Verdict::ReadError, what, 0);
        }
        (_, Err(_)) => {}
    }
}

fn check_groups(
    facts: &Facts<'_>,
    visibility: &BTreeMap<usize, Visibility>,
    findings: &mut Vec<Finding>,
) {
    for (group, commits) in &facts.model.groups {
        let contents = match facts.observation.groups.get(group) {
            None => continue,
            Some(Err(code)) => {
                let detail = format!("group {group}: OffsetFetch: error code {code}");
                findings.push(Finding::new(Verdict::Hang, detail));
                continue;
            }
            Some(Ok(contents)) => contents,
        };
        for (partition, commits) in commits {
            let found = contents.iter().find(|(of, _)| of == partition).map(|(_, offset)| *offset);
            if let Some((verdict, what)) = check_commits(facts, visibility, commits, found) {
                findings.push(Finding::new(verdict, format!("group {group}, {partition}: {what}")));
            }
        }
        for (partition, offset) in contents {
            if !commits.iter().any(|(of, _)| of == partition) {
                let detail = format!("group {group}, {partition}: found {offset}, never committed");
                findings.push(Finding::new(Verdict::WrongBytes, detail));
            }
        }
    }
}

/// Checks the committed offset of a group in a partition.
fn check_commits(
    facts: &Facts<'_>,
    visibility: &BTreeMap<usize, Visibility>,
    commits: &[Commit],
    found: Option<i64>,
) -> Option<(Verdict, String)> {
    let effective: Vec<&Commit> = facts.model.effective(commits).collect();
    let shown = |offset: Option<i64>| offset.map_or("none".to_owned(), |it| it.to_string());
    let expected = effective.last().map(|commit| commit.offset);
    let detail = format!("committed {}, found {}", shown(expected), shown(found));
    let at = match found {
        None => None,
        Some(found) => match effective.iter().rposition(|commit| commit.offset == found) {
            Some(at) => Some(at),
            None if commits.iter().any(|commit| commit.offset == found) => {
                let what = "which is from a transaction that was not committed";
                return Some((Verdict::WrongOutcome, format!("{detail}, {what}")));
            }
            None => return Some((Verdict::WrongBytes, format!("{detail}, never committed"))),
        },
    };
    let txn = at.and_then(|at| effective[at].txn);
    if let Some((hidden, offset)) =
        txn.and_then(|txn| visibility.get(&txn)).and_then(|visibility| visibility.hidden.as_ref())
    {
        let what =
            format!("from a transaction whose record at offset {offset} of {hidden} is hidden");
        return Some((Verdict::WrongOutcome, format!("{detail}, {what}")));
    }
    let newer = &effective[at.map_or(0, |at| at + 1)..];
    // If the latest commits are lost, the offset falls back to an earlier commit, or to none.
    let reported = facts.reported;
    let is_lost = |commit: &&Commit| {
        reported.has_lost_state("offsets")
            || commit.txn.is_some() && reported.has_lost_state("transactions")
    };
    let verdict = match newer {
        [] => return None,
        newer if newer.iter().all(is_lost) => {
            let is_exact =
                ["offsets", "transactions"].map(|it| reported.has_exactly_lost_state(it));
            if is_exact.contains(&true) { Verdict::LossReported } else { Verdict::LossBounded }
        }
        _ if !reported.streams.is_empty() => Verdict::LossUnnamed,
        _ if reported.end => Verdict::LossInexact,
        _ => Verdict::SilentLoss,
    };
    Some((verdict, detail))
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
