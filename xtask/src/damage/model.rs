//! What the server has acknowledged: everything that may be read back, and nothing else.

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

/// A record that was acknowledged. Its value follows from its number, so that the model stays
/// small.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// No two records have the same.
    pub(super) id: u64,
    /// Length of the value.
    pub(super) bytes: usize,
    pub(super) key: Option<String>,
    pub(super) timestamp_ms: i64,
    /// Index into [`Model::transactions`].
    pub(super) txn: Option<usize>,
}

impl Record {
    /// The bytes that were produced.
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

/// How a transaction has ended.
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

/// An offset of a group that was once asked for.
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
    /// The high watermark: every offset below it was handed out and may have been seen.
    pub(super) next: i64,
}

/// A transactional producer: where it goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) transactional_id: String,
    /// Whether it speaks version 2 of the protocol, in which each end of a transaction raises the
    /// epoch.
    pub(super) second_version: bool,
    pub(super) producer_id: i64,
    pub(super) epoch: i16,
    /// Next sequence number by partition.
    pub(super) sequences: BTreeMap<String, i32>,
    /// Index of the transaction that is open.
    pub(super) open: Option<usize>,
}

/// A producer that is idempotent and not transactional: where it goes on. It keeps its id and its
/// epoch over restarts of the server, and has one batch on its way at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Idempotent {
    pub(super) producer_id: i64,
    pub(super) epoch: i16,
    /// Next sequence number by partition.
    pub(super) sequences: BTreeMap<String, i32>,
    /// Offsets of its records by partition.
    pub(super) offsets: BTreeMap<String, Vec<i64>>,
    /// How often it was refused, by partition.
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
    /// By group and partition, all commits in their order. Those of transactions that were aborted
    /// or have not ended are among them.
    pub(super) groups: BTreeMap<String, Vec<(Partition, Vec<Commit>)>>,
    pub(super) sessions: Vec<Session>,
    pub(super) idempotent: Vec<Idempotent>,
    /// The next record's number.
    pub(super) next_id: u64,
    /// Offsets that were handed out although somebody may have seen another record there.
    #[serde(default)]
    pub(super) reused: Vec<(Partition, i64)>,
    /// Records that were sent and got no answer: they may be there.
    #[serde(default)]
    pub(super) doubtful: Vec<Record>,
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

    /// Records were acknowledged with this first offset.
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

    /// Records at these offsets were lost in the silent window, so that the partition ends at
    /// `next` again.
    pub(super) fn forget(&mut self, partition: &Partition, offsets: &[i64], next: i64) {
        let log = self.log_mut(partition);
        for offset in offsets {
            log.records.remove(offset);
        }
        log.batches.retain(|base| !offsets.contains(base));
        log.next = log.next.min(next);
    }

    /// Whether the record at an offset has to be there. In a compacted topic only the last one of
    /// each key has.
    pub(super) fn must_hold(&self, partition: &Partition, offset: i64) -> bool {
        let log = self.log(partition);
        let Some(record) = log.records.get(&offset) else { return false };
        if !self.compacted.contains(&partition.topic) {
            return true;
        }
        !log.records.range(offset + 1..).any(|(_, later)| later.key == record.key)
    }

    /// How a transaction has ended.
    pub(super) fn outcome(&self, txn: usize) -> Outcome {
        self.transactions[txn].outcome
    }

    /// Whether readers of committed records get this one, all markers being there.
    pub(super) fn is_committed(&self, record: &Record) -> bool {
        record.txn.is_none_or(|txn| self.outcome(txn) == Outcome::Committed)
    }

    /// Those commits of a group that count: of no transaction, or of one that was committed.
    pub(super) fn counting<'a>(
        &'a self,
        commits: &'a [Commit],
    ) -> impl DoubleEndedIterator<Item = &'a Commit> {
        commits
            .iter()
            .filter(|commit| commit.txn.is_none_or(|txn| self.outcome(txn) == Outcome::Committed))
    }

    /// A transaction has ended. Its commits of offsets take effect now, in front of which others of
    /// the same group may have been made in the meantime.
    pub(super) fn end(&mut self, txn: usize, outcome: Outcome) {
        self.transactions[txn].outcome = outcome;
        for (_, commits) in self.groups.values_mut().flatten() {
            commits.sort_by_key(|commit| commit.txn == Some(txn));
        }
    }

    /// A group has asked for this.
    pub(super) fn commit(&mut self, group: &str, partition: &Partition, commit: Commit) {
        let all = self.groups.entry(group.to_owned()).or_default();
        match all.iter_mut().find(|(of, _)| of == partition) {
            Some((_, commits)) => commits.push(commit),
            None => all.push((partition.clone(), vec![commit])),
        }
    }

    /// The first offset of a transaction that is open, or the end: readers of committed records get
    /// no further.
    pub(super) fn stable_end(&self, partition: &Partition) -> i64 {
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
    fn of_a_compacted_topic_the_last_record_of_each_key_has_to_be_there() {
        let mut model = Model { compacted: vec!["c".into()], ..Model::default() };
        let logs = || vec![Log::default()];
        model.topics = [("c".into(), logs()), ("p".into(), logs())].into();
        for topic in ["c", "p"] {
            let partition = Partition { topic: topic.into(), index: 0 };
            let records = [(1, "a"), (2, "b"), (3, "a")].map(|(id, key)| record(id, key, None));
            model.acknowledged(&partition, 0, records.into());
            let held: Vec<_> = (0..4).map(|at| model.must_hold(&partition, at)).collect();
            assert_eq!(held, [topic == "p", true, true, false]);
        }
    }

    #[test]
    fn offsets_of_a_transaction_count_from_its_end_on() {
        let open = Transaction { producer_id: 1, outcome: Outcome::Open };
        let mut model = Model { transactions: vec![open, open], ..Model::default() };
        let partition = Partition { topic: "t".into(), index: 0 };
        for (offset, txn) in [(7, Some(0)), (8, Some(1)), (3, None)] {
            model.commit("g", &partition, Commit { offset, txn });
        }
        let counting = |model: &Model| -> Vec<i64> {
            let commits = &model.groups["g"][0].1;
            model.counting(commits).map(|commit| commit.offset).collect()
        };
        assert_eq!(counting(&model), [3]);
        model.end(0, Outcome::Committed);
        model.end(1, Outcome::Aborted);
        assert_eq!(counting(&model), [3, 7]);
    }

    #[test]
    fn the_stable_end_is_the_first_offset_of_an_open_transaction() {
        let mut model = Model {
            topics: [("t".into(), vec![Log::default()])].into(),
            transactions: [Outcome::Committed, Outcome::Open]
                .map(|outcome| Transaction { producer_id: 1, outcome })
                .into(),
            ..Model::default()
        };
        let partition = Partition { topic: "t".into(), index: 0 };
        model.acknowledged(&partition, 0, vec![record(1, "a", Some(0))]);
        assert_eq!(model.stable_end(&partition), 1);
        model.acknowledged(&partition, 2, vec![record(2, "a", Some(1)), record(3, "a", None)]);
        assert_eq!(model.stable_end(&partition), 2);
    }
}
