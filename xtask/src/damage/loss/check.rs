//! Compares what a server has with the journal and with what was stated as lost.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::super::model::{Commit, Outcome, Partition, Record};
use super::journal::{Change, Journal, State};
use super::read::{Contents, Observed, View};
use super::stated::Stated;

/// What is compared with the journal.
pub(super) struct Facts<'a> {
    pub(super) journal: &'a Journal,
    pub(super) observed: &'a Observed,
    pub(super) stated: &'a Stated,
    /// Offsets that cannot be read, and those that perhaps cannot be, in a damaged object.
    pub(super) must: &'a [(Partition, Range<i64>)],
    pub(super) may: &'a [(Partition, Range<i64>)],
    /// What was in an object that does not exist any more.
    pub(super) gone: &'a [(Partition, Range<i64>)],
    /// What was in a damaged record of the log.
    pub(super) damaged_log: &'a [(Partition, Range<i64>)],
    /// Partitions whose records are kept without a name. A partition with the name may be there
    /// too, without records: the topic has further ones.
    pub(super) unnamed: &'a [Partition],
    /// The whole chain is lost.
    pub(super) is_chain_lost: bool,
    /// The newest object of the chain when the server ended, and those that are lost.
    pub(super) head: u64,
    pub(super) numbers: &'a BTreeSet<u64>,
}

/// Differences of one kind in one partition, merged: the first offset and their number.
#[derive(Default)]
struct Found(BTreeMap<String, (i64, u64)>);

impl Found {
    fn add(&mut self, what: impl Into<String>, offset: i64) {
        self.0.entry(what.into()).or_insert((offset, 0)).1 += 1;
    }
}

/// Returns all differences.
pub(super) fn check(facts: &Facts<'_>) -> Vec<String> {
    let mut differences = Vec::new();
    let journal = facts.journal;
    for (partition, base) in &journal.model.reused {
        differences.push(format!("{partition}: offset {base} was handed out twice"));
    }
    for partition in journal.model.partitions() {
        let Some(contents) = facts.observed.partitions.get(&partition) else {
            // Nothing shows a partition whose objects are lost with the chain, or its name.
            let is_explained = |offset: &i64| {
                facts.unnamed.contains(&partition)
                    || facts.stated.is_lost(&partition, *offset)
                    || facts.is_chain_lost && has(facts.gone, &partition, *offset)
            };
            if !journal.model.log(&partition).records.keys().all(is_explained) {
                differences.push(format!("{partition}: there is no such partition"));
            }
            continue;
        };
        let mut found = Found::default();
        records(facts, &partition, contents, &mut found);
        differences.extend(found.0.into_iter().map(|(what, (first, count))| {
            format!("{partition}: {what}: {count} from offset {first} on")
        }));
    }
    transactions(facts, &mut differences);
    groups(facts, &mut differences);
    state(facts, &mut differences);
    differences
}

fn has(ranges: &[(Partition, Range<i64>)], partition: &Partition, offset: i64) -> bool {
    ranges.iter().any(|(of, range)| of == partition && range.contains(&offset))
}

/// Whether a record must be there unless it is stated as lost. In a compacted topic a later record
/// of its key has taken its place, unless that one is lost with the end of the partition: then it
/// was not uploaded, and has replaced nothing. The later one may be without an answer.
fn must_be_there(facts: &Facts<'_>, partition: &Partition, offset: i64, record: &Record) -> bool {
    let model = &facts.journal.model;
    if !model.compacted.contains(&partition.topic) {
        return true;
    }
    let key = record.key.as_ref().map(String::as_bytes);
    let view = facts.observed.partitions.get(partition).map(|contents| &contents.all);
    let mut unanswered = view.into_iter().flat_map(|view| view.records.range(offset + 1..));
    if unanswered.any(|(_, later)| later.key.as_deref() == key) {
        return false;
    }
    let later = model.log(partition).records.range(offset + 1..);
    !later.into_iter().any(|(at, later)| {
        let is_lost = facts.stated.is_lost_end(partition, *at);
        later.key == record.key && (!is_lost || facts.journal.is_new(partition, *at))
    })
}

fn records(facts: &Facts<'_>, partition: &Partition, contents: &Contents, found: &mut Found) {
    let (journal, stated, view) = (facts.journal, facts.stated, &contents.all);
    let log = journal.model.log(partition);
    for (offset, fetched) in &view.records {
        let of_earlier = || journal.lost.get(partition).filter(|_| stated.all_changes)?.get(offset);
        let Some(record) = log.records.get(offset).or_else(of_earlier) else {
            if !journal.is_cut_off || !is_unanswered(journal, fetched.value.as_deref()) {
                found.add("a record that was never acknowledged", *offset);
            }
            continue;
        };
        let is_true = fetched.key.as_deref() == record.key.as_ref().map(String::as_bytes)
            && fetched.value.as_deref() == Some(&record.value())
            && fetched.timestamp_ms == record.timestamp_ms;
        if !is_true {
            found.add("another record than the acknowledged one", *offset);
        }
        if is_lost(facts, partition, *offset) {
            found.add("stated as lost, and can be read", *offset);
        }
        if has(facts.must, partition, *offset) {
            found.add("damaged, and can be read", *offset);
        }
    }
    let uploaded = journal.uploads.last().and_then(|uploaded| uploaded.ends.get(partition));
    let uploaded = uploaded.copied().unwrap_or(0);
    for (offset, record) in &log.records {
        if is_lost(facts, partition, *offset)
            && *offset < uploaded
            && !has(facts.gone, partition, *offset)
        {
            found.add("stated as lost, and was uploaded", *offset);
        }
        let is_there = view.records.contains_key(offset);
        if is_there || is_lost(facts, partition, *offset) || has(facts.may, partition, *offset) {
            continue;
        }
        if view.is_unreadable(*offset) {
            found.add(format!("cannot be read ({:?})", view.unreadable[0].2), *offset);
        } else if must_be_there(facts, partition, *offset, record)
            && !is_unknown(facts, partition, view, *offset)
        {
            found.add("missing, and not stated as lost", *offset);
        }
    }
    for (from, to, reason) in &view.unreadable {
        if facts.may.is_empty() && log.records.range(from..to).next().is_none() {
            found.add(format!("reads fail ({reason})"), *from);
        }
    }
    let last = log.next - 1;
    if view.end < log.next && !stated.is_lost(partition, last) && !view.is_unreadable(last) {
        found.add(format!("ends at {}, before {}", view.end, log.next), view.end);
    }
    if let Some((_, resume)) = stated.ends.get(partition)
        && *resume
            < log
                .records
                .keys()
                .filter(|at| !journal.is_new(partition, **at))
                .max()
                .map_or(0, |at| at + 1)
    {
        found.add("the partition continues at an offset that was handed out", *resume);
    }
}

/// Whether a record is missing, and nothing shows that it was there: it is kept in a stream without
/// a name; or it was in an object that is lost together with the whole chain (what precedes the
/// first record that is left may have been deleted, and what follows the last one is stated as
/// skipped); or it was the last one of its partition in a damaged log, which is stated as skipped.
fn is_unknown(facts: &Facts<'_>, partition: &Partition, view: &View, offset: i64) -> bool {
    let mut skipped = facts.stated.skipped.get(partition).into_iter().flatten();
    let is_skipped = skipped.any(|range| range.contains(&offset));
    let is_outside = is_skipped || view.records.range(..offset).next().is_none();
    facts.unnamed.contains(partition)
        || facts.is_chain_lost && has(facts.gone, partition, offset) && is_outside
        || has(facts.damaged_log, partition, offset) && is_skipped
}

/// Whether an offset is stated as lost. What was written after the loss is not.
fn is_lost(facts: &Facts<'_>, partition: &Partition, offset: i64) -> bool {
    !facts.journal.is_new(partition, offset) && facts.stated.is_lost(partition, offset)
}

/// Whether a value is that of a record that was sent and not acknowledged.
fn is_unanswered(journal: &Journal, value: Option<&[u8]>) -> bool {
    let Some(value) = value else { return false };
    let text = String::from_utf8_lossy(&value[..value.len().min(40)]).into_owned();
    let id = text.strip_prefix("record ").and_then(|rest| rest.split(' ').next()?.parse().ok());
    let Some(id) = id.filter(|id| *id < journal.model.next_id) else { return false };
    let record = Record { id, bytes: value.len(), key: None, timestamp_ms: 0, txn: None };
    let logs = journal.model.topics.values().flatten();
    let mut acknowledged = logs.flat_map(|log| log.records.values());
    record.value() == value && !acknowledged.any(|other| other.id == id)
}

/// What is left of a transaction.
#[derive(Default)]
struct Left {
    shown: Option<(Partition, i64)>,
    hidden: Option<(Partition, i64)>,
    /// A commit marker of it is left.
    is_proven: bool,
    /// All of its records are left.
    is_whole: bool,
    /// One of its partitions has lost records before its end: a marker may have been among them.
    has_hole: bool,
    /// A partition with a commit marker of it hides it.
    is_contradicted: bool,
}

/// Checks that exactly the committed transactions among what is left are visible.
fn transactions(facts: &Facts<'_>, differences: &mut Vec<String>) {
    let journal = facts.journal;
    let model = &journal.model;
    let mut all: BTreeMap<usize, Left> = BTreeMap::new();
    for (partition, contents) in &facts.observed.partitions {
        let records = &model.log(partition).records;
        for (offset, record) in records {
            let is_left = contents.all.records.contains_key(offset);
            let is_shown = contents.committed.records.contains_key(offset);
            // What follows an open transaction waits for its end.
            let is_waiting = *offset >= contents.committed.end
                && (journal.is_cut_off || may_be_open(facts, partition, contents, *offset));
            let Some(txn) = record.txn else {
                if is_left
                    && !is_shown
                    && !is_waiting
                    && !contents.committed.is_unreadable(*offset)
                    && must_be_there(facts, partition, *offset, record)
                {
                    differences.push(format!("{partition}: offset {offset} is hidden"));
                }
                continue;
            };
            let left = all.entry(txn).or_insert_with(|| Left { is_whole: true, ..Left::default() });
            left.is_whole &= is_left;
            left.has_hole |= facts.stated.has_hole(partition);
            let producer_id = model.transactions[txn].producer_id;
            let is_aborted = facts.stated.is_aborted(partition, producer_id, *offset);
            if is_shown && is_aborted {
                differences.push(format!(
                    "{partition}: offset {offset} is stated as one of an aborted transaction, and \
                     is visible"
                ));
            }
            let side = match is_shown {
                true => &mut left.shown,
                false if is_aborted => continue,
                false if !is_left || is_waiting => continue,
                false if contents.committed.is_unreadable(*offset) => continue,
                false => &mut left.hidden,
            };
            side.get_or_insert_with(|| (partition.clone(), *offset));
            // Up to the next transaction of the producer in the partition.
            let is_next = |record: &Record| {
                record.txn.is_some_and(|other| {
                    other != txn && model.transactions[other].producer_id == producer_id
                })
            };
            let next = records.range(offset + 1..).find(|(_, record)| is_next(record));
            let range = *offset..next.map_or(i64::MAX, |(at, _)| *at);
            let is_marked = contents.all.endings.iter().any(|ending| {
                ending.is_commit
                    && ending.producer_id == producer_id
                    && range.contains(&ending.offset)
                    && !is_lost(facts, partition, ending.offset)
            });
            left.is_proven |= is_marked;
            left.is_contradicted |= is_marked && !is_shown;
        }
    }
    for (txn, left) in all {
        // Decisions of the state of transactions may be lost. A marker of another partition then
        // decides only if it is there (docs/transactions.md, "Limits").
        let may_be_undecided = facts.stated.state && left.has_hole;
        // So does a decision whose markers were being written when the server ended.
        let may_be_unmarked = facts.is_chain_lost
            && facts.stated.state
            && !left.is_contradicted
            && is_last_of_producer(facts, txn);
        let name = format!("transaction {txn} of producer {}", model.transactions[txn].producer_id);
        if let (Some((shown, at)), Some((hidden, hidden_at))) = (&left.shown, &left.hidden) {
            if !may_be_undecided && !may_be_unmarked {
                differences.push(format!(
                    "{name} is visible in part: offset {at} of {shown} is, and {hidden_at} of \
                     {hidden} is not"
                ));
            }
            continue;
        }
        if journal.unknown_end == Some(txn) {
            continue;
        }
        match (model.outcome(txn), &left) {
            (
                Outcome::Committed,
                Left { hidden: Some((partition, at)), is_proven, is_whole, .. },
            ) => {
                let was_uploaded = journal.uploads.iter().any(|it| it.transactions.contains(&txn));
                let is_excused = facts.stated.state
                    && !(*is_proven && *is_whole)
                    && (may_be_undecided || !was_uploaded);
                if !is_excused {
                    differences.push(format!(
                        "{name} was committed, and is hidden: offset {at} of {partition}"
                    ));
                }
            }
            (Outcome::Aborted | Outcome::Open, Left { shown: Some((partition, at)), .. }) => {
                differences.push(format!(
                    "{name} was not committed, and is visible: offset {at} of {partition}"
                ));
            }
            _ => {}
        }
    }
}

/// Whether a transaction was the last one of its producer before the loss: the markers of others
/// were complete when the next one began.
fn is_last_of_producer(facts: &Facts<'_>, txn: usize) -> bool {
    let (journal, model) = (facts.journal, &facts.journal.model);
    let producer_id = model.transactions[txn].producer_id;
    let is_later = |record: &Record| {
        record.txn.is_some_and(|it| it > txn && model.transactions[it].producer_id == producer_id)
    };
    !model.partitions().iter().any(|partition| {
        let mut records = model.log(partition).records.iter();
        records.any(|(at, record)| is_later(record) && !journal.is_new(partition, *at))
    })
}

/// Whether a transaction that may be open has a record from the last stable offset up to this one.
/// A record that cannot be read is not lost: its transaction waits for its end too.
fn may_be_open(facts: &Facts<'_>, partition: &Partition, contents: &Contents, offset: i64) -> bool {
    let model = &facts.journal.model;
    let records = model.log(partition).records.range(contents.committed.end..=offset);
    records.into_iter().any(|(at, record)| {
        let is_open = |txn| model.outcome(txn) == Outcome::Open;
        let is_left = contents.all.records.contains_key(at) || contents.all.is_unreadable(*at);
        record.txn.is_some_and(is_open) && is_left
    })
}

fn groups(facts: &Facts<'_>, differences: &mut Vec<String>) {
    let journal = facts.journal;
    for (group, partitions) in &journal.model.groups {
        let contents = facts.observed.groups.get(group).map(Vec::as_slice).unwrap_or_default();
        for (partition, commits) in partitions {
            let found = contents.iter().find(|(of, _)| of == partition).map(|(_, offset)| *offset);
            let effective: Vec<&Commit> = journal.model.effective(commits).collect();
            let at = match found {
                None => 0,
                Some(found) => {
                    match effective.iter().rposition(|commit| commit.offset == found) {
                        Some(at) => at + 1,
                        // A commit, or the end of a transaction, without an answer.
                        None if journal.is_cut_off
                            && is_possible(journal, partition, commits, found) =>
                        {
                            continue;
                        }
                        None => {
                            differences.push(format!(
                                "group {group}, {partition}: {found} was never committed"
                            ));
                            continue;
                        }
                    }
                }
            };
            let key = (group.clone(), partition.clone());
            let least = match facts.stated.state {
                true => kept_commits(facts, &key),
                false => effective.len(),
            };
            if at < least {
                let expected = effective[least - 1].offset;
                differences.push(format!(
                    "group {group}, {partition}: committed {expected}, found {found:?}, and no \
                     loss of it is stated"
                ));
            }
        }
    }
}

/// The number of commits that the chain has, if part of it is lost.
fn kept_commits(facts: &Facts<'_>, key: &(String, Partition)) -> usize {
    let first_lost = match facts.stated.all_changes {
        true => 0,
        false => facts.numbers.first().copied().unwrap_or(u64::MAX),
    };
    let mut uploads = facts.journal.uploads.iter().rev();
    let kept = uploads.find(|uploaded| uploaded.head < first_lost);
    kept.and_then(|uploaded| uploaded.commits.get(key)).copied().unwrap_or(0)
}

/// Whether a request without an answer may have committed this offset.
fn is_possible(journal: &Journal, partition: &Partition, commits: &[Commit], found: i64) -> bool {
    if !journal.is_cut_off {
        return false;
    }
    let of_end = |commit: &Commit| commit.txn.is_some() && commit.txn == journal.unknown_end;
    commits.iter().any(|commit| commit.offset == found && of_end(commit))
        || journal.model.log(partition).records.contains_key(&(found - 1))
}

/// Checks topics, settings, users and ACLs.
fn state(facts: &Facts<'_>, differences: &mut Vec<String>) {
    let stated = facts.stated;
    let lacks =
        |number: u64| stated.all_changes || stated.changes && facts.numbers.contains(&number);
    let mut histories: BTreeMap<&str, Vec<&Change>> = BTreeMap::new();
    for change in &facts.journal.changes {
        histories.entry(&change.of).or_default().push(change);
    }
    let observed: &State = &facts.observed.state;
    for (of, history) in histories {
        let found = observed.get(of);
        let Some(at) = history.iter().rposition(|it| it.value.as_ref() == found) else {
            let may_be_lost = stated.changes && !history[0].is_kept(facts.head, &lacks);
            let has_no_settings = of
                .strip_prefix("setting ")
                .is_some_and(|topic| stated.without_settings.iter().any(|it| it == topic));
            if !may_be_lost && !has_no_settings {
                let expected = &history[history.len() - 1].value;
                differences.push(format!("{of}: expected {expected:?}, found {found:?}"));
            }
            continue;
        };
        for later in &history[at + 1..] {
            if !stated.changes || later.is_kept(facts.head, &lacks) {
                let expected = &later.value;
                differences.push(format!("{of}: expected {expected:?}, found {found:?}"));
            }
        }
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
