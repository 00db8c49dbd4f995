use super::super::super::model::{Log, Transaction};
use super::super::super::reads::Fetched;
use super::super::journal::Uploaded;
use super::super::read::{Ending, View};
use super::*;

/// A journal with five records: two without a transaction, two of a committed one, and one of an
/// aborted one; and a server that has all of them.
struct Setup {
    journal: Journal,
    observed: Observed,
    stated: Stated,
    damaged_log: Vec<(Partition, Range<i64>)>,
    unnamed: Vec<Partition>,
    is_chain_lost: bool,
}

fn at(index: i32) -> Partition {
    Partition { topic: "t".into(), index }
}

fn view(offsets: &[(i64, &Record)], end: i64) -> View {
    let fetched = |record: &Record| Fetched {
        key: None,
        value: Some(record.value()),
        timestamp_ms: record.timestamp_ms,
    };
    let records = offsets.iter().map(|(at, record)| (*at, fetched(record))).collect();
    View { records, end, ..View::default() }
}

impl Setup {
    fn new() -> Self {
        let mut journal = Journal::default();
        let model = &mut journal.model;
        model.topics.insert("t".into(), vec![Log::default(), Log::default()]);
        model.next_id = 5;
        for outcome in [Outcome::Committed, Outcome::Aborted] {
            model.transactions.push(Transaction { producer_id: 7, outcome });
        }
        let record = |id, txn| Record { id, bytes: 30, key: None, timestamp_ms: 9, txn };
        let [plain, other] = [record(0, None), record(1, None)];
        let [first, second] = [record(2, Some(0)), record(3, Some(0))];
        let aborted = record(4, Some(1));
        for (index, records) in [
            (0, vec![plain.clone(), first.clone()]),
            (1, vec![other.clone(), second.clone(), aborted.clone()]),
        ] {
            model.acknowledged(&at(index), 0, records);
        }
        let commit = |offset| Commit { offset, txn: None };
        model.groups.insert("g".into(), vec![(at(0), vec![commit(1), commit(2)])]);
        let mut observed = Observed::default();
        let mut contents = Contents {
            all: view(&[(0, &plain), (1, &first)], 3),
            committed: view(&[(0, &plain), (1, &first)], 3),
        };
        contents.all.endings = vec![Ending { offset: 2, producer_id: 7, is_commit: true }];
        observed.partitions.insert(at(0), contents);
        let contents = Contents {
            all: view(&[(0, &other), (1, &second), (2, &aborted)], 5),
            committed: view(&[(0, &other), (1, &second)], 5),
        };
        observed.partitions.insert(at(1), contents);
        observed.groups.insert("g".into(), vec![(at(0), 2)]);
        journal.note_loss();
        Self {
            journal,
            observed,
            stated: Stated::default(),
            damaged_log: Vec::new(),
            unnamed: Vec::new(),
            is_chain_lost: false,
        }
    }

    fn contents(&mut self, index: i32) -> &mut Contents {
        self.observed.partitions.get_mut(&at(index)).unwrap()
    }

    /// Loses a record; it is also stated if `is_stated`.
    fn lose(&mut self, index: i32, offset: i64, is_stated: bool) {
        self.contents(index).all.records.remove(&offset);
        self.contents(index).committed.records.remove(&offset);
        if is_stated {
            self.stated.ranges.entry(at(index)).or_default().push(offset..offset + 1);
        }
    }

    fn differences(&self) -> Vec<String> {
        check(&Facts {
            journal: &self.journal,
            observed: &self.observed,
            stated: &self.stated,
            must: &[],
            may: &[],
            gone: &[],
            damaged_log: &self.damaged_log,
            unnamed: &self.unnamed,
            is_chain_lost: self.is_chain_lost,
            head: 9,
            numbers: &BTreeSet::new(),
        })
    }

    fn finds(&self, what: &str) {
        let found = self.differences();
        assert!(found.iter().any(|each| each.contains(what)), "{what}: {found:?}");
    }
}

#[test]
fn a_server_with_everything_has_no_difference() {
    assert_eq!(Setup::new().differences(), [""; 0]);
}

#[test]
fn exactly_the_stated_records_must_be_missing() {
    let mut setup = Setup::new();
    setup.lose(0, 0, true);
    assert_eq!(setup.differences(), [""; 0]);
    let mut setup = Setup::new();
    setup.lose(0, 0, false);
    setup.finds("missing, and not stated as lost: 1 from offset 0 on");
    let mut setup = Setup::new();
    setup.stated.ranges.entry(at(0)).or_default().push(1..2);
    setup.finds("stated as lost, and can be read");
}

#[test]
fn what_nothing_shows_is_stated_as_skipped_or_kept_without_a_name() {
    let mut setup = Setup::new();
    setup.lose(0, 0, false);
    setup.unnamed.push(at(1));
    setup.finds("missing, and not stated as lost");
    setup.unnamed.push(at(0));
    assert_eq!(setup.differences(), [""; 0]);
    let mut setup = Setup::new();
    setup.lose(0, 0, false);
    setup.damaged_log.push((at(0), 0..1));
    setup.finds("missing, and not stated as lost");
    setup.stated.skipped.entry(at(0)).or_default().push(0..9);
    assert_eq!(setup.differences(), [""; 0]);
    setup.damaged_log.clear();
    setup.finds("missing, and not stated as lost");
}

#[test]
fn uploaded_records_must_not_be_lost() {
    let mut setup = Setup::new();
    setup.lose(0, 0, true);
    let ends = [(at(0), 1)].into();
    setup.journal.uploads.push(Uploaded { ends, ..Uploaded::default() });
    setup.finds("stated as lost, and was uploaded");
}

#[test]
fn another_record_and_a_repeated_offset_are_found() {
    let mut setup = Setup::new();
    let other = setup.contents(1).all.records[&0].clone();
    setup.contents(0).all.records.insert(0, other);
    setup.finds("another record than the acknowledged one");
    let mut setup = Setup::new();
    setup.journal.model.reused.push((at(0), 1));
    setup.finds("offset 1 was handed out twice");
}

#[test]
fn transactions_are_visible_as_a_whole_if_they_were_committed() {
    let mut setup = Setup::new();
    setup.contents(0).committed.records.remove(&1);
    setup.finds("visible in part");
    setup.contents(1).committed.records.remove(&1);
    setup.finds("was committed, and is hidden");
    // Its decision may be lost, but a marker proves it.
    setup.stated.state = true;
    setup.finds("was committed, and is hidden");
    setup.contents(0).all.endings.clear();
    assert_eq!(setup.differences(), [""; 0]);
    let mut setup = Setup::new();
    let aborted = setup.contents(1).all.records[&2].clone();
    setup.contents(1).committed.records.insert(2, aborted);
    setup.finds("was not committed, and is visible");
}

#[test]
fn a_transaction_is_hidden_in_part_only_as_stated() {
    let mut setup = Setup::new();
    setup.contents(0).committed.records.remove(&1);
    setup.finds("visible in part");
    setup.stated.aborted.insert(at(0), vec![(8, 0..5)]);
    setup.finds("visible in part");
    setup.stated.aborted.insert(at(0), vec![(7, 1..2)]);
    assert_eq!(setup.differences(), [""; 0]);
    setup.stated.aborted.insert(at(1), vec![(7, 1..2)]);
    setup.finds("is stated as one of an aborted transaction, and is visible");
}

#[test]
fn an_open_transaction_hides_what_follows_unless_it_is_lost() {
    let mut setup = Setup::new();
    let model = &mut setup.journal.model;
    model.transactions.push(Transaction { producer_id: 8, outcome: Outcome::Open });
    let log = &mut model.topics.get_mut("t").unwrap()[1];
    log.records.get_mut(&0).unwrap().txn = Some(2);
    let contents = setup.contents(1);
    contents.committed = view(&[], 0);
    let open = contents.all.records.remove(&0).unwrap();
    setup.finds("visible in part");
    setup.contents(1).all.unreadable = vec![(0, 1, "CORRUPT_MESSAGE".to_owned())];
    let is_of_transaction = |each: &String| each.contains("transaction");
    assert!(!setup.differences().iter().any(is_of_transaction), "{:?}", setup.differences());
    let contents = setup.contents(1);
    contents.all.unreadable.clear();
    contents.all.records.insert(0, open);
    assert_eq!(setup.differences(), [""; 0]);
}

#[test]
fn markers_that_were_not_written_need_a_decision_that_is_not_lost() {
    let mut setup = Setup::new();
    setup.journal.model.transactions[1].producer_id = 8;
    setup.contents(1).committed.records.remove(&1);
    setup.finds("visible in part");
    (setup.stated.state, setup.is_chain_lost) = (true, true);
    assert_eq!(setup.differences(), [""; 0]);
    let marker = Ending { offset: 3, producer_id: 7, is_commit: true };
    setup.contents(1).all.endings.push(marker);
    setup.finds("visible in part");
    setup.contents(1).all.endings.clear();
    setup.journal.model.transactions[1].producer_id = 7;
    setup.finds("visible in part");
}

#[test]
fn committed_offsets_go_back_only_if_that_is_stated() {
    let mut setup = Setup::new();
    setup.observed.groups.insert("g".into(), vec![(at(0), 1)]);
    setup.finds("committed 2, found Some(1)");
    setup.stated.state = true;
    assert_eq!(setup.differences(), [""; 0]);
    let commits = [(("g".to_owned(), at(0)), 2)].into();
    setup.journal.uploads.push(Uploaded { commits, ..Uploaded::default() });
    setup.finds("committed 2, found Some(1)");
    setup.observed.groups.insert("g".into(), vec![(at(0), 3)]);
    setup.finds("3 was never committed");
}

#[test]
fn changes_are_lost_only_if_that_is_stated() {
    let mut setup = Setup::new();
    setup.journal.changes.push(Change::new("user a", "there", 1));
    setup.finds("user a: expected Some(\"there\"), found None");
    // The chain has it, and has lost nothing.
    setup.stated.changes = true;
    setup.finds("user a: expected Some(\"there\"), found None");
    setup.journal.changes[0] = Change::new("user a", "there", 8);
    assert_eq!(setup.differences(), [""; 0]);
    setup.journal.changes[0] = Change::new("user a", "there", 1);
    setup.stated.all_changes = true;
    assert_eq!(setup.differences(), [""; 0]);
}
