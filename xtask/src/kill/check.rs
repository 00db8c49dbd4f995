//! The comparison of the kill test: the clients' journals against the server's data. Pure; no I/O.
//!
//! Each producer numbers its records per partition from 0 and abandons none. So a partition must
//! hold the numbers 0, 1, 2, ... of each producer in this order, at least up to the last
//! acknowledged one.

use std::collections::BTreeMap;
use std::fmt;

/// A partition of the test's only topic.
pub(super) type Partition = u32;

/// A producer's name: up to eight bytes, so that millions of records can be kept in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Producer([u8; 8]);

impl Producer {
    fn parse(name: &str) -> Option<Self> {
        let mut bytes = [0; 8];
        bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        Some(Self(bytes))
    }
}

impl fmt::Display for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(String::from_utf8_lossy(&self.0).trim_end_matches('\0'))
    }
}

/// A record's name: its producer, and its number among that producer's records in one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordId {
    producer: Producer,
    number: u64,
}

impl RecordId {
    /// Parses a record's key, `producer:number`.
    fn from_key(key: &str) -> Option<Self> {
        let (producer, number) = key.rsplit_once(':')?;
        Some(Self { producer: Producer::parse(producer)?, number: number.parse().ok()? })
    }
}

impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.producer, self.number)
    }
}

/// A record that was reported to a client: acknowledged to its producer, or delivered to a group
/// member.
#[derive(Clone, Copy, Debug)]
struct ReportedRecord {
    partition: Partition,
    offset: u64,
    id: RecordId,
}

/// The promises to clients so far.
#[derive(Default)]
pub(super) struct Promises {
    acknowledged: Vec<ReportedRecord>,
    delivered: Vec<ReportedRecord>,
    /// The largest acknowledged commit of each group and partition.
    committed: BTreeMap<(String, Partition), u64>,
    client_errors: Vec<String>,
    ended: usize,
}

impl Promises {
    /// Adds one line of a journal (`tests/clients/README.md`).
    pub(super) fn line(&mut self, line: &str) -> Result<(), String> {
        let bad = || format!("not a journal line: {line:?}");
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["A", producer, number, partition, offset] => {
                self.acknowledged.push(ReportedRecord {
                    partition: partition.parse().map_err(|_| bad())?,
                    offset: offset.parse().map_err(|_| bad())?,
                    id: RecordId {
                        producer: Producer::parse(producer).ok_or_else(bad)?,
                        number: number.parse().map_err(|_| bad())?,
                    },
                });
            }
            ["R", partition, offset, key] => self.delivered.push(ReportedRecord {
                partition: partition.parse().map_err(|_| bad())?,
                offset: offset.parse().map_err(|_| bad())?,
                id: RecordId::from_key(key).ok_or_else(bad)?,
            }),
            ["C", group, partition, offset] => {
                let partition = partition.parse().map_err(|_| bad())?;
                let offset: u64 = offset.parse().map_err(|_| bad())?;
                let largest = self.committed.entry((group.to_owned(), partition)).or_insert(0);
                *largest = offset.max(*largest);
            }
            ["F", ..] => self.client_errors.push(line[2..].to_owned()),
            ["END"] => self.ended += 1,
            _ => return Err(bad()),
        }
        Ok(())
    }

    /// Number of acknowledged records.
    pub(super) fn acknowledged(&self) -> usize {
        self.acknowledged.len()
    }

    /// Number of records delivered to group members, including repetitions.
    pub(super) fn delivered(&self) -> usize {
        self.delivered.len()
    }

    /// Number of complete journals.
    pub(super) fn ended(&self) -> usize {
        self.ended
    }

    /// Number of acknowledged records of each producer.
    pub(super) fn by_producer(&self) -> BTreeMap<Producer, usize> {
        let mut counts = BTreeMap::new();
        for each in &self.acknowledged {
            *counts.entry(each.id.producer).or_default() += 1;
        }
        counts
    }
}

/// The server's data: the records of each partition, in order of their offsets from 0.
#[derive(Default)]
pub(super) struct ServerData {
    partitions: BTreeMap<Partition, Vec<RecordId>>,
    committed: BTreeMap<(String, Partition), u64>,
}

impl ServerData {
    /// Adds one record as a reader prints it, `partition offset key`. Offsets must be dense from 0.
    pub(super) fn record_line(&mut self, line: &str) -> Result<(), String> {
        let bad = || format!("not a reader's line: {line:?}");
        let words: Vec<&str> = line.split(' ').collect();
        let [partition, offset, key] = words[..] else { return Err(bad()) };
        let partition: Partition = partition.parse().map_err(|_| bad())?;
        let offset: u64 = offset.parse().map_err(|_| bad())?;
        let records = self.partitions.entry(partition).or_default();
        if offset != records.len() as u64 {
            let expected = records.len();
            return Err(format!(
                "partition {partition}: a reader got offset {offset}, not {expected}"
            ));
        }
        records.push(RecordId::from_key(key).ok_or_else(bad)?);
        Ok(())
    }

    /// Adds one committed offset of a group, `partition offset`.
    pub(super) fn commit_line(&mut self, group: &str, line: &str) -> Result<(), String> {
        let bad = || format!("not a committed offset: {line:?}");
        let (partition, offset) = line.split_once(' ').ok_or_else(bad)?;
        let key = (group.to_owned(), partition.parse().map_err(|_| bad())?);
        self.committed.insert(key, offset.parse().map_err(|_| bad())?);
        Ok(())
    }

    /// Number of records in all partitions.
    pub(super) fn records(&self) -> usize {
        self.partitions.values().map(Vec::len).sum()
    }

    fn at(&self, reported: &ReportedRecord) -> Option<RecordId> {
        self.partitions.get(&reported.partition)?.get(reported.offset as usize).copied()
    }
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Violation(String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns all differences between the promises and the server's data.
pub(super) fn check(promises: &Promises, data: &ServerData) -> Vec<Violation> {
    let mut found = Vec::new();
    for error in &promises.client_errors {
        found.push(Violation(format!("a client reported: {error}")));
    }
    order(data, &mut found);
    reported_records("acknowledged", &promises.acknowledged, data, &mut found);
    reported_records("delivered", &promises.delivered, data, &mut found);
    commits(promises, data, &mut found);
    found
}

/// Checks that each partition holds the numbers 0, 1, 2, ... of each producer: none missing, none
/// twice, none out of order.
fn order(data: &ServerData, found: &mut Vec<Violation>) {
    for (partition, records) in &data.partitions {
        let mut next: BTreeMap<Producer, u64> = BTreeMap::new();
        for (offset, record) in records.iter().enumerate() {
            let expected = next.entry(record.producer).or_insert(0);
            if record.number == *expected {
                *expected += 1;
                continue;
            }
            let what =
                if record.number < *expected { "a duplicate, or out of order" } else { "a gap" };
            found.push(Violation(format!(
                "partition {partition}, offset {offset}: {record} where {}:{expected} was \
                 expected: {what}",
                record.producer
            )));
            *expected = record.number + 1;
        }
    }
}

/// Checks that each record that was reported to a client is at its reported offset.
fn reported_records(
    kind: &str,
    reported_records: &[ReportedRecord],
    data: &ServerData,
    found: &mut Vec<Violation>,
) {
    for each in reported_records {
        let holds = data.at(each);
        if holds == Some(each.id) {
            continue;
        }
        let instead = holds.map_or("nothing".to_owned(), |id| id.to_string());
        found.push(Violation(format!(
            "{kind} record {} is lost: partition {}, offset {} holds {instead}",
            each.id, each.partition, each.offset
        )));
    }
}

/// Checks that no committed offset is behind an acknowledged commit or beyond the partition's end.
fn commits(promises: &Promises, data: &ServerData, found: &mut Vec<Violation>) {
    for ((group, partition), promised) in &promises.committed {
        let stored = data.committed.get(&(group.clone(), *partition)).copied();
        if stored.is_none_or(|stored| stored < *promised) {
            let stored = stored.map_or("none".to_owned(), |stored| stored.to_string());
            found.push(Violation(format!(
                "group {group}, partition {partition}: the committed offset is {stored}, \
                 behind the acknowledged {promised}"
            )));
        }
    }
    for ((group, partition), stored) in &data.committed {
        let end = data.partitions.get(partition).map_or(0, Vec::len) as u64;
        if *stored > end {
            found.push(Violation(format!(
                "group {group}, partition {partition}: the committed offset {stored} \
                 is beyond the end {end}"
            )));
        }
    }
}

/// Tests of the checker itself: each breaks one promise in otherwise correct data.
#[cfg(test)]
mod tests {
    use super::*;

    const JOURNAL: [&str; 8] = [
        "A a 0 0 0",
        "A a 1 0 2",
        "A b 0 0 1",
        "A b 0 1 0",
        "R 0 0 a:0",
        "C group 0 1",
        "C group 0 2",
        "END",
    ];
    const LOG: [&str; 5] = ["0 0 a:0", "0 1 b:0", "0 2 a:1", "0 3 a:2", "1 0 b:0"];
    const COMMITS: [&str; 1] = ["0 2"];

    fn promises(lines: &[&str]) -> Promises {
        let mut promises = Promises::default();
        for line in lines {
            promises.line(line).unwrap();
        }
        promises
    }

    fn violations(journal: &[&str], log: &[&str], commits: &[&str]) -> Vec<String> {
        let mut data = ServerData::default();
        for line in log {
            data.record_line(line).unwrap();
        }
        for line in commits {
            data.commit_line("group", line).unwrap();
        }
        check(&promises(journal), &data).iter().map(ToString::to_string).collect()
    }

    /// Asserts that there is exactly one violation, and that it contains `wanted`.
    fn one(found: &[String], wanted: &str) {
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(wanted), "{found:?}");
    }

    #[test]
    fn promised_records_and_more_are_accepted() {
        // a:2 is in the log without an acknowledgement: its answer was lost in the kill.
        assert_eq!(violations(&JOURNAL, &LOG, &COMMITS), [""; 0]);
    }

    #[test]
    fn counts_match_the_journal() {
        let promises = promises(&JOURNAL);
        assert_eq!((promises.acknowledged(), promises.delivered(), promises.ended()), (4, 1, 1));
        let counts: Vec<_> =
            promises.by_producer().iter().map(|(who, count)| format!("{who} {count}")).collect();
        assert_eq!(counts, ["a 2", "b 2"]);
    }

    #[test]
    fn a_lost_record_at_the_end_is_found() {
        let found = violations(&JOURNAL, &LOG[..4], &COMMITS);
        one(&found, "acknowledged record b:0 is lost: partition 1, offset 0 holds nothing");
    }

    #[test]
    fn a_lost_record_in_the_middle_is_found() {
        let log = ["0 0 a:0", "0 1 b:0", "0 2 a:2", "1 0 b:0"];
        let found = violations(&JOURNAL, &log, &COMMITS);
        assert!(found.iter().any(|v| v.contains("a:2 where a:1 was expected: a gap")), "{found:?}");
        assert!(found.iter().any(|v| v.contains("acknowledged record a:1 is lost")), "{found:?}");
    }

    #[test]
    fn a_duplicate_record_is_found() {
        let log = ["0 0 a:0", "0 1 b:0", "0 2 a:1", "0 3 a:1", "1 0 b:0"];
        one(&violations(&JOURNAL, &log, &COMMITS), "offset 3: a:1 where a:2 was expected: a dupl");
    }

    #[test]
    fn a_wrong_order_is_found() {
        let log = ["0 0 a:0", "0 1 b:0", "0 2 a:1", "0 3 a:3", "0 4 a:2", "1 0 b:0"];
        let found = violations(&JOURNAL, &log, &COMMITS);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[1].contains("a:2 where a:4 was expected: a duplicate, or out of order"));
    }

    #[test]
    fn an_acknowledged_record_at_another_offset_is_found() {
        let log = ["0 0 a:0", "0 1 a:1", "0 2 b:0", "0 3 a:2", "1 0 b:0"];
        let found = violations(&JOURNAL, &log, &COMMITS);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("record a:1 is lost: partition 0, offset 2 holds b:0"));
    }

    #[test]
    fn a_delivered_record_that_vanished_is_found() {
        let journal = ["R 0 3 a:2", "R 1 1 b:1"];
        one(&violations(&journal, &LOG, &[]), "delivered record b:1 is lost: partition 1");
    }

    #[test]
    fn a_commit_that_moved_backwards_is_found() {
        one(&violations(&JOURNAL, &LOG, &["0 1"]), "offset is 1, behind the acknowledged 2");
        one(&violations(&JOURNAL, &LOG, &[]), "offset is none, behind the acknowledged 2");
    }

    #[test]
    fn a_commit_beyond_the_end_is_found() {
        one(&violations(&JOURNAL, &LOG, &["0 5"]), "committed offset 5 is beyond the end 4");
    }

    #[test]
    fn an_error_of_a_client_is_found() {
        let journal = ["F py0 record 7 of partition 1 KafkaError{...}"];
        one(&violations(&journal, &LOG, &[]), "a client reported: py0 record 7");
    }

    #[test]
    fn offsets_must_be_dense() {
        let mut data = ServerData::default();
        data.record_line("0 0 a:0").unwrap();
        assert!(data.record_line("0 2 a:1").is_err());
        assert!(data.record_line("0 0 a:1").is_err());
        assert!(data.record_line("1 1 a:0").is_err());
    }

    #[test]
    fn invalid_lines_are_errors() {
        for line in
            ["", "A a 0 0", "A a x 0 0", "A ninebytes 0 0 0", "R 0 0 nokey", "C g 0", "X", "END x"]
        {
            assert!(Promises::default().line(line).is_err(), "{line:?}");
        }
        for line in ["", "0 0", "0 0 nokey", "0 -1 a:0", "0 0 a:0 more"] {
            assert!(ServerData::default().record_line(line).is_err(), "{line:?}");
        }
        assert!(ServerData::default().commit_line("group", "0").is_err());
    }
}
