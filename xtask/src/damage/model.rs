//! The model: everything that the server has acknowledged, and that may therefore be read back.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A partition by topic and number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Partition {
    pub(super) topic: String,
    pub(super) index: i32,
}

impl std::fmt::Display for Partition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.topic, self.index)
    }
}

/// An acknowledged record. Its value is derived from its number, which keeps the model small.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Unique among all records.
    pub(super) id: u64,
    /// Length of the value.
    pub(super) bytes: usize,
    pub(super) key: Option<String>,
    pub(super) timestamp_ms: i64,
    /// Index into [`Model::transactions`].
    pub(super) txn: Option<usize>,
}

impl Record {
    /// Returns the bytes that were produced.
    pub(super) fn value(&self) -> Vec<u8> {
        let mut value = format!("record {} ", self.id).into_bytes();
        let mut word = self.id.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        while value.len() < self.bytes {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            value.extend(word.to_le_bytes());
        }
        value.truncate(self.bytes);
        value
    }
}

/// The outcome of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Outcome {
    Committed,
    Aborted,
    /// It has not ended.
    Open,
}

/// A transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Transaction {
    pub(super) producer_id: i64,
    pub(super) outcome: Outcome,
}

/// An offset that a group has committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Commit {
    pub(super) offset: i64,
    /// The transaction that it is part of.
    pub(super) txn: Option<usize>,
}

/// A partition's log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Log {
    /// By offset. Offsets without a record are markers.
    pub(super) records: BTreeMap<i64, Record>,
    /// First offsets of batches, markers included.
    pub(super) batches: Vec<i64>,
    /// The high watermark: every offset below it was assigned and may have been read.
    pub(super) next: i64,
}

/// A transactional producer and its next requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) transactional_id: String,
    /// Whether it uses version 2 of the protocol, in which each end of a transaction raises the
    /// epoch.
    pub(super) second_version: bool,
    pub(super) producer_id: i64,
    pub(super) epoch: i16,
    /// Next sequence number by partition.
    pub(super) sequences: BTreeMap<String, i32>,
    /// Index of the open transaction.
    pub(super) open: Option<usize>,
}

/// An idempotent producer without transactions. It keeps its ID and epoch across restarts of the
/// server, and has one batch in flight at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Idempotent {
    pub(super) producer_id: i64,
    pub(super) epoch: i16,
    /// Next sequence number by partition.
    pub(super) sequences: BTreeMap<String, i32>,
    /// Offsets of its records by partition.
    pub(super) offsets: BTreeMap<String, Vec<i64>>,
    /// The number of refusals, by partition.
    pub(super) refusals: BTreeMap<String, u32>,
}

/// Everything that was acknowledged.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Model {
    /// Topics whose records may be replaced by later ones with the same key.
    pub(super) compacted: Vec<String>,
    /// Logs by topic, one for each partition.
    pub(super) topics: BTreeMap<String, Vec<Log>>,
    pub(super) transactions: Vec<Transaction>,
    /// All commits by group and partition, in order. Those of aborted or open transactions are
    /// included.
    pub(super) groups: BTreeMap<String, Vec<(Partition, Vec<Commit>)>>,
    pub(super) sessions: Vec<Session>,
    pub(super) idempotent: Vec<Idempotent>,
    /// The next record's number.
    pub(super) next_id: u64,
    /// Topics without records, and whether they exist: changes of the catalog alone.
    #[serde(default)]
    pub(super) empty_topics: BTreeMap<String, bool>,
    /// Offsets that were assigned again after another record may have been read there.
    #[serde(default)]
    pub(super) reused: Vec<(Partition, i64)>,
    /// Records that were sent without receiving an answer: they may have been appended.
    #[serde(default, alias = "doubtful")]
    pub(super) unanswered: Vec<Record>,
}

impl Model {
    pub(super) fn partitions(&self) -> Vec<Partition> {
        let of = |(topic, logs): (&String, &Vec<Log>)| {
            (0..logs.len() as i32)
                .map(|index| Partition { topic: topic.clone(), index })
                .collect::<Vec<_>>()
        };
        self.topics.iter().flat_map(of).collect()
    }

    pub(super) fn log(&self, partition: &Partition) -> &Log {
        &self.topics[&partition.topic][partition.index as usize]
    }

    pub(super) fn log_mut(&mut self, partition: &Partition) -> &mut Log {
        let logs = self.topics.get_mut(&partition.topic).expect("the model knows the topic");
        &mut logs[partition.index as usize]
    }

    /// Records the acknowledgement of a batch with this first offset.
    pub(super) fn acknowledged(&mut self, partition: &Partition, base: i64, records: Vec<Record>) {
        if base < self.log(partition).next {
            self.reused.push((partition.clone(), base));
        }
        let log = self.log_mut(partition);
        log.batches.push(base);
        log.next = log.next.max(base + records.len() as i64);
        for (offset, record) in (base..).zip(records) {
            log.records.entry(offset).or_insert(record);
        }
    }

    /// Removes records that were lost in the silent window, so that the partition ends at `next`
    /// again.
    pub(super) fn forget(&mut self, partition: &Partition, offsets: &[i64], next: i64) {
        let log = self.log_mut(partition);
        for offset in offsets {
            log.records.remove(offset);
        }
        log.batches.retain(|base| !offsets.contains(base));
        log.next = log.next.min(next);
    }

    /// Whether the record at an offset must be present. In a compacted topic, only the last one of
    /// each key must be.
    pub(super) fn must_hold(&self, partition: &Partition, offset: i64) -> bool {
        let log = self.log(partition);
        let Some(record) = log.records.get(&offset) else { return false };
        if !self.compacted.contains(&partition.topic) {
            return true;
        }
        !log.records.range(offset + 1..).any(|(_, later)| later.key == record.key)
    }

    /// Returns the outcome of a transaction.
    pub(super) fn outcome(&self, txn: usize) -> Outcome {
        self.transactions[txn].outcome
    }

    /// Whether consumers with `read_committed` receive this record, provided that all markers are
    /// present.
    pub(super) fn is_committed(&self, record: &Record) -> bool {
        record.txn.is_none_or(|txn| self.outcome(txn) == Outcome::Committed)
    }

    /// Returns the commits of a group that are effective: those outside transactions and those of
    /// committed ones.
    pub(super) fn effective<'a>(
        &'a self,
        commits: &'a [Commit],
    ) -> impl DoubleEndedIterator<Item = &'a Commit> {
        commits
            .iter()
            .filter(|commit| commit.txn.is_none_or(|txn| self.outcome(txn) == Outcome::Committed))
    }

    /// Ends a transaction. Its staged offsets take effect now, after any that the same group has
    /// committed in the meantime.
    pub(super) fn end(&mut self, txn: usize, outcome: Outcome) {
        self.transactions[txn].outcome = outcome;
        for (_, commits) in self.groups.values_mut().flatten() {
            commits.sort_by_key(|commit| commit.txn == Some(txn));
        }
    }

    /// Records a commit of a group.
    pub(super) fn commit(&mut self, group: &str, partition: &Partition, commit: Commit) {
        let all = self.groups.entry(group.to_owned()).or_default();
        match all.iter_mut().find(|(of, _)| of == partition) {
            Some((_, commits)) => commits.push(commit),
            None => all.push((partition.clone(), vec![commit])),
        }
    }

    /// Returns the last stable offset: the first offset of an open transaction, or the end.
    pub(super) fn last_stable_offset(&self, partition: &Partition) -> i64 {
        let log = self.log(partition);
        let is_open =
            |record: &Record| record.txn.is_some_and(|txn| self.outcome(txn) == Outcome::Open);
        log.records
            .iter()
            .find(|(_, record)| is_open(record))
            .map_or(log.next, |(offset, _)| *offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u64, key: &str, txn: Option<usize>) -> Record {
        Record { id, bytes: 100, key: Some(key.into()), timestamp_ms: 0, txn }
    }

    #[test]
    fn values_differ_and_have_their_length() {
        let values: Vec<_> = (0..100).map(|id| record(id, "", None).value()).collect();
        assert!(values.iter().all(|value| value.len() == 100));
        assert!((1..100).all(|id| !values[..id].contains(&values[id])));
    }

    #[test]
    fn the_last_record_of_each_key_of_a_compacted_topic_must_be_present() {
        let mut model = Model { compacted: vec!["c".into()], ..Model::default() };
        let logs = || vec![Log::default()];
        model.topics = [("c".into(), logs()), ("p".into(), logs())].into();
        for topic in ["c", "p"] {
            let partition = Partition { topic: topic.into(), index: 0 };
            let records = [(1, "a"), (2, "b"), (3, "a")].map(|(id, key)| record(id, key, None));
            model.acknowledged(&partition, 0, records.into());
            let must_hold: Vec<_> = (0..4).map(|at| model.must_hold(&partition, at)).collect();
            assert_eq!(must_hold, [topic == "p", true, true, false]);
        }
    }

    #[test]
    fn staged_offsets_take_effect_when_their_transaction_commits() {
        let open = Transaction { producer_id: 1, outcome: Outcome::Open };
        let mut model = Model { transactions: vec![open, open], ..Model::default() };
        let partition = Partition { topic: "t".into(), index: 0 };
        for (offset, txn) in [(7, Some(0)), (8, Some(1)), (3, None)] {
            model.commit("g", &partition, Commit { offset, txn });
        }
        let effective = |model: &Model| -> Vec<i64> {
            let commits = &model.groups["g"][0].1;
            model.effective(commits).map(|commit| commit.offset).collect()
        };
        assert_eq!(effective(&model), [3]);
        model.end(0, Outcome::Committed);
        model.end(1, Outcome::Aborted);
        assert_eq!(effective(&model), [3, 7]);
    }

    #[test]
    fn the_last_stable_offset_is_the_first_offset_of_an_open_transaction() {
        let mut model = Model {
            topics: [("t".into(), vec![Log::default()])].into(),
            transactions: [Outcome::Committed, Outcome::Open]
                .map(|outcome| Transaction { producer_id: 1, outcome })
                .into(),
            ..Model::default()
        };
        let partition = Partition { topic: "t".into(), index: 0 };
        model.acknowledged(&partition, 0, vec![record(1, "a", Some(0))]);
        assert_eq!(model.last_stable_offset(&partition), 1);
        model.acknowledged(&partition, 2, vec![record(2, "a", Some(1)), record(3, "a", None)]);
        assert_eq!(model.last_stable_offset(&partition), 2);
    }
}
