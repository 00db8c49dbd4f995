use super::*;
use crate::damage::model::{Log, Outcome, Record, Transaction};
use crate::damage::says::Abort;

fn partition() -> Partition {
    Partition { topic: "t".into(), index: 0 }
}

/// Offsets 0 to 9: a committed transaction has 2, an aborted one 4, and a marker is at 6.
fn model() -> Model {
    let mut model = Model {
        topics: [("t".into(), vec![Log::default()])].into(),
        transactions: [Outcome::Committed, Outcome::Aborted]
            .map(|outcome| Transaction { producer_id: 5, outcome })
            .into(),
        ..Model::default()
    };
    for offset in (0..10).filter(|offset| *offset != 6) {
        let txn = [(2, 0), (4, 1)].into_iter().find(|(of, _)| *of == offset).map(|it| it.1);
        let record = Record {
            id: offset as u64,
            bytes: 30,
            key: Some(format!("key {}", offset % 3)),
            timestamp_ms: 100 + offset,
            txn,
        };
        model.acknowledged(&partition(), offset, vec![record]);
    }
    for offset in [2, 3] {
        model.commit("g", &partition(), Commit { offset, txn: None });
    }
    model
}

/// What a server holds that has lost nothing.
fn observation(model: &Model) -> Observation {
    let log = model.log(&partition());
    let seen = |record: &Record| Seen {
        key: record.key.clone().map(String::into_bytes),
        value: Some(record.value()),
        timestamp_ms: record.timestamp_ms,
    };
    let mut all = View { high_watermark: log.next, stable_end: log.next, ..View::default() };
    let mut committed = all.clone();
    for (offset, record) in &log.records {
        all.records.insert(*offset, seen(record));
        if model.is_committed(record) {
            committed.records.insert(*offset, seen(record));
        }
    }
    let held = Held {
        all,
        committed,
        earliest: Some(Ok(0)),
        latest: Some(Ok(log.next)),
        by_time: Some((105, Ok((5, 105)))),
    };
    Observation {
        partitions: [(partition(), held)].into(),
        groups: [("g".into(), Ok(vec![(partition(), 3)]))].into(),
    }
}

/// One range.
fn lost(start: i64, end: i64) -> Vec<std::ops::Range<i64>> {
    std::iter::once(start..end).collect()
}

struct Scene {
    model: Model,
    observation: Observation,
    stated: Stated,
    reach: Option<BTreeSet<Extent>>,
    window: Offsets,
    health: &'static str,
}

impl Scene {
    fn new() -> Self {
        let model = model();
        let observation = observation(&model);
        let health = "degraded: something";
        let (stated, window) = (Stated::default(), Offsets::new());
        Self { model, observation, stated, reach: None, window, health }
    }

    fn held(&mut self) -> &mut Held {
        self.observation.partitions.get_mut(&partition()).unwrap()
    }

    /// Both readers miss an offset.
    fn lose(&mut self, offset: i64) {
        let held = self.held();
        held.all.records.remove(&offset);
        held.committed.records.remove(&offset);
        held.by_time = None;
    }

    fn refuse(&mut self, offset: i64, why: &Why) {
        self.lose(offset);
        let refused = || vec![Refused { from: offset, to: offset + 1, why: why.clone() }];
        let held = self.held();
        (held.all.refused, held.committed.refused) = (refused(), refused());
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let streams = [(7, partition())].into();
        let facts = Facts {
            model: &self.model,
            observation: &self.observation,
            stated: &self.stated,
            reach: self.reach.as_ref(),
            streams: &streams,
            window: &self.window,
            health: self.health,
        };
        judge(&facts).into_iter().map(|finding| finding.verdict).collect()
    }
}

#[test]
fn of_a_server_that_has_lost_nothing_there_is_nothing_to_say() {
    assert_eq!(Scene::new().verdicts(), []);
}

#[test]
fn a_missing_record_is_silent_unless_it_was_named() {
    let mut scene = Scene::new();
    scene.lose(8);
    assert_eq!(scene.verdicts(), [Verdict::SilentLoss]);
    scene.stated.end = true;
    assert_eq!(scene.verdicts(), [Verdict::LossInexact]);
    scene.stated.streams = lost(0, 8);
    assert_eq!(scene.verdicts(), [Verdict::LossInexact]);
    scene.stated.streams = lost(8, 9);
    assert_eq!(scene.verdicts(), [Verdict::LossUnnamed]);
    let other = Partition { topic: "t".into(), index: 1 };
    scene.stated.partitions = [(other, lost(8, 9))].into();
    assert_eq!(scene.verdicts(), [Verdict::LossUnnamed]);
    scene.stated.partitions = [(partition(), lost(8, 9))].into();
    assert_eq!(scene.verdicts(), [Verdict::LossStated]);
    scene.health = "ok\n";
    assert_eq!(scene.verdicts(), [Verdict::LossStated, Verdict::HealthOk]);
}

#[test]
fn a_missing_record_in_a_skipped_range_is_stated_by_a_bound() {
    let mut scene = Scene::new();
    scene.lose(9);
    scene.stated.partitions = [(partition(), lost(9, 100))].into();
    scene.stated.bounds = scene.stated.partitions.clone();
    assert_eq!(scene.verdicts(), [Verdict::LossBounded]);
    scene.stated.partitions.values_mut().next().unwrap().extend(lost(9, 10));
    assert_eq!(scene.verdicts(), [Verdict::LossStated]);
    // A bound over a record that can be read is as wrong as a loss.
    scene.stated.partitions = [(partition(), lost(8, 100))].into();
    scene.stated.bounds = scene.stated.partitions.clone();
    assert_eq!(scene.verdicts(), [Verdict::LossBounded, Verdict::LossMisstated]);
}

#[test]
fn nothing_has_to_be_said_of_the_silent_window_and_of_nothing_else() {
    let mut scene = Scene::new();
    scene.window = [(partition(), lost(9, 10))].into();
    scene.health = "ok";
    scene.lose(9);
    assert_eq!(scene.verdicts(), [Verdict::InWindow]);
    scene.held().latest = Some(Ok(9));
    assert_eq!(scene.verdicts(), [Verdict::InWindow, Verdict::InWindow]);
    scene.held().latest = Some(Ok(8));
    assert!(scene.verdicts().contains(&Verdict::OffsetReused));
    scene.held().latest = Some(Ok(10));
    scene.lose(8);
    assert!(scene.verdicts().contains(&Verdict::SilentLoss));
}

#[test]
fn a_record_without_an_answer_may_be_there_and_nothing_else_may() {
    let mut scene = Scene::new();
    let mut record = scene.model.log(&partition()).records[&9].clone();
    record.id = 77;
    let value = Some(record.value());
    let seen = Seen { key: None, value, timestamp_ms: 0 };
    scene.held().all.records.insert(10, seen);
    assert_eq!(scene.verdicts(), [Verdict::FalseBytes]);
    scene.model.doubtful.push(record);
    assert_eq!(scene.verdicts(), []);
}

#[test]
fn what_is_called_lost_and_is_there_is_misstated() {
    let mut scene = Scene::new();
    scene.stated.partitions = [(partition(), lost(8, 9))].into();
    assert_eq!(scene.verdicts(), [Verdict::LossMisstated]);
    // The offset of a marker has no record, and offsets beyond the end may be skipped.
    scene.stated.partitions = [(partition(), [lost(6, 7), lost(10, 64)].concat())].into();
    assert_eq!(scene.verdicts(), []);
}

#[test]
fn more_than_was_damaged_must_not_be_lost() {
    let mut scene = Scene::new();
    scene.lose(8);
    scene.stated.partitions = [(partition(), lost(8, 9))].into();
    scene.reach = Some([Extent { stream: 7, start: 8, end: 9 }].into());
    assert_eq!(scene.verdicts(), [Verdict::LossStated]);
    for extent in [Extent { stream: 7, start: 9, end: 12 }, Extent { stream: 8, start: 8, end: 9 }]
    {
        scene.reach = Some([extent].into());
        assert_eq!(scene.verdicts(), [Verdict::LossStated, Verdict::LossExcessive]);
    }
}

#[test]
fn an_error_must_end_the_read() {
    let mut scene = Scene::new();
    for (why, verdict) in [
        (Why::Code(CORRUPT_MESSAGE), Verdict::ReadError),
        (Why::Code(56), Verdict::EndlessRetry),
        (Why::Nothing, Verdict::Hang),
        (Why::Unreadable("no batch".into()), Verdict::FalseBytes),
    ] {
        scene.refuse(8, &why);
        assert_eq!(scene.verdicts().last(), Some(&verdict), "{why:?}");
    }
    // An error where only a marker is.
    let mut scene = Scene::new();
    scene.refuse(6, &Why::Code(56));
    assert_eq!(scene.verdicts(), [Verdict::EndlessRetry]);
}

#[test]
fn reads_may_be_repeated_while_health_says_that_the_object_store_is_away() {
    for (health, verdict) in [
        (
            "degraded\ncold_reads_failing: a: b is not the directory that was opened: c",
            Verdict::ReadError,
        ),
        ("degraded\ncold_reads_failing: no answer", Verdict::EndlessRetry),
        (
            "degraded\nobjects_missing: a is not the directory that was opened",
            Verdict::EndlessRetry,
        ),
        ("ok", Verdict::EndlessRetry),
    ] {
        let mut scene = Scene::new();
        scene.health = health;
        scene.refuse(8, &Why::Code(56));
        assert!(scene.verdicts().contains(&verdict), "{health}");
    }
}

#[test]
fn other_bytes_are_false_whatever_differs() {
    let spoil: [fn(&mut Seen); 3] = [
        |seen| seen.key = None,
        |seen| seen.value.as_mut().unwrap()[29] ^= 1,
        |seen| seen.timestamp_ms += 1,
    ];
    for spoil in spoil {
        let mut scene = Scene::new();
        scene.held().by_time = None;
        spoil(scene.held().all.records.get_mut(&9).unwrap());
        assert_eq!(scene.verdicts(), [Verdict::FalseBytes]);
    }
    let mut scene = Scene::new();
    let seen = scene.held().all.records[&9].clone();
    scene.held().all.records.insert(10, seen);
    assert_eq!(scene.verdicts(), [Verdict::FalseBytes]);
}

#[test]
fn outcomes_must_not_change() {
    let mut hidden = Scene::new();
    hidden.held().committed.records.remove(&2);
    assert_eq!(hidden.verdicts(), [Verdict::WrongOutcome]);
    let abort = |producer_id, place| Abort { producer_id, place };
    let other = Partition { topic: "t".into(), index: 1 };
    for (abort, verdict) in [
        (abort(5, Some((partition(), 2))), Verdict::LossStated),
        (abort(5, None), Verdict::LossInexact),
        // Of another transaction, in another partition, of another producer.
        (abort(5, Some((partition(), 4))), Verdict::WrongOutcome),
        (abort(5, Some((other, 2))), Verdict::WrongOutcome),
        (abort(6, Some((partition(), 2))), Verdict::WrongOutcome),
        (abort(6, None), Verdict::WrongOutcome),
    ] {
        hidden.stated.aborts = [abort.clone()].into();
        assert_eq!(hidden.verdicts(), [verdict], "{abort:?}");
    }
    // What is stated is no excuse if the decision was not damaged.
    hidden.stated.aborts = [abort(5, Some((partition(), 2)))].into();
    hidden.reach = Some([Extent { stream: 7, start: 3, end: 4 }].into());
    assert_eq!(hidden.verdicts(), [Verdict::WrongOutcome]);
    hidden.reach = Some([Extent { stream: 8, start: 3, end: 4 }].into());
    assert_eq!(hidden.verdicts(), [Verdict::LossStated]);

    let mut shown = Scene::new();
    let seen = shown.held().all.records[&4].clone();
    shown.held().committed.records.insert(4, seen);
    assert_eq!(shown.verdicts(), [Verdict::WrongOutcome]);

    let mut stuck = Scene::new();
    stuck.held().committed.stable_end = 4;
    assert_eq!(stuck.verdicts(), [Verdict::WrongOutcome]);
    stuck.model.transactions[1].outcome = Outcome::Open;
    stuck.held().committed.records.retain(|offset, _| *offset < 4);
    assert_eq!(stuck.verdicts(), []);
}

#[test]
fn the_end_must_not_go_back() {
    let mut scene = Scene::new();
    scene.held().latest = Some(Ok(9));
    assert_eq!(scene.verdicts(), [Verdict::OffsetReused]);
    scene.held().latest = Some(Ok(64));
    assert_eq!(scene.verdicts(), []);
    scene.held().latest = Some(Err(6));
    assert_eq!(scene.verdicts(), [Verdict::Hang]);
    let mut scene = Scene::new();
    scene.held().earliest = Some(Ok(1));
    assert_eq!(scene.verdicts(), [Verdict::SilentLoss]);
}

#[test]
fn a_search_by_time_finds_the_first_record_and_its_time() {
    for (answer, verdicts) in [
        (Ok((4, 100)), vec![Verdict::FalseBytes]),
        (Ok((5, 106)), vec![Verdict::FalseBytes]),
        (Ok((7, 107)), vec![Verdict::FalseBytes]),
        (Ok((-1, -1)), vec![Verdict::FalseBytes]),
        (Err(56), vec![Verdict::EndlessRetry]),
        (Err(2), vec![Verdict::ReadError]),
        (Ok((5, 105)), vec![]),
    ] {
        let mut scene = Scene::new();
        scene.held().by_time = Some((105, answer));
        assert_eq!(scene.verdicts(), verdicts, "{answer:?}");
    }
}

/// The committed transaction has offset 2 of one partition and offset 0 of another one.
fn two_partitions() -> (Scene, Partition) {
    let mut scene = Scene::new();
    let other = Partition { topic: "t".into(), index: 1 };
    let mut record = scene.model.log(&partition()).records[&2].clone();
    record.id = 100;
    scene.model.topics.get_mut("t").unwrap().push(Log::default());
    scene.model.acknowledged(&other, 0, vec![record.clone()]);
    let seen = Seen {
        key: record.key.clone().map(String::into_bytes),
        value: Some(record.value()),
        timestamp_ms: record.timestamp_ms,
    };
    let view =
        View { records: [(0, seen)].into(), high_watermark: 1, stable_end: 1, ..View::default() };
    let held = Held { all: view.clone(), committed: view, ..Held::default() };
    scene.observation.partitions.insert(other.clone(), held);
    (scene, other)
}

#[test]
fn a_transaction_is_shown_as_a_whole_whatever_was_stated() {
    let (mut scene, other) = two_partitions();
    assert_eq!(scene.verdicts(), []);
    let abort =
        |partition: Partition, first| Abort { producer_id: 5, place: Some((partition, first)) };
    scene.stated.aborts = [abort(partition(), 2), abort(other.clone(), 0)].into();
    scene.held().committed.records.remove(&2);
    assert_eq!(scene.verdicts(), [Verdict::LossStated, Verdict::WrongOutcome]);
    let hide = |scene: &mut Scene| {
        let held = scene.observation.partitions.get_mut(&other).unwrap();
        held.committed.records.clear();
    };
    hide(&mut scene);
    assert_eq!(scene.verdicts(), [Verdict::LossStated, Verdict::LossStated]);

    // The same if it was aborted: it is shown in one partition.
    let (mut scene, _) = two_partitions();
    scene.model.transactions[0].outcome = Outcome::Aborted;
    hide(&mut scene);
    assert_eq!(scene.verdicts(), [Verdict::WrongOutcome, Verdict::WrongOutcome]);

    // What cannot be read, or not yet, is not hidden.
    let (mut scene, other) = two_partitions();
    hide(&mut scene);
    let held = scene.observation.partitions.get_mut(&other).unwrap();
    held.committed.refused = vec![Refused { from: 0, to: 1, why: Why::Code(CORRUPT_MESSAGE) }];
    assert_eq!(scene.verdicts(), [Verdict::ReadError]);
    let held = scene.observation.partitions.get_mut(&other).unwrap();
    (held.all.records, held.committed.refused) = Default::default();
    assert_eq!(scene.verdicts(), [Verdict::SilentLoss]);
}

#[test]
fn positions_of_groups_must_be_there() {
    let mut scene = Scene::new();
    for (held, verdict) in [
        (Ok(vec![(partition(), 2)]), Verdict::SilentLoss),
        (Ok(vec![]), Verdict::SilentLoss),
        (Ok(vec![(partition(), 4)]), Verdict::FalseBytes),
        (Ok(vec![(partition(), 1)]), Verdict::FalseBytes),
        (Err(14), Verdict::Hang),
    ] {
        scene.observation.groups = [("g".into(), held)].into();
        assert_eq!(scene.verdicts(), [verdict]);
    }
    let other = Partition { topic: "t".into(), index: 1 };
    scene.observation.groups = [("g".into(), Ok(vec![(partition(), 3), (other, 1)]))].into();
    assert_eq!(scene.verdicts(), [Verdict::FalseBytes]);
}

#[test]
fn a_position_goes_back_only_if_the_offsets_of_groups_are_lost() {
    let mut scene = Scene::new();
    let states = |of: &str| [(of.to_owned(), lost(5, 6))].into();
    for held in [vec![(partition(), 2)], vec![]] {
        scene.observation.groups = [("g".into(), Ok(held))].into();
        for (of, verdict) in [
            ("groups offsets", Verdict::LossStated),
            ("groups members", Verdict::SilentLoss),
            ("transactions", Verdict::SilentLoss),
        ] {
            scene.stated.states = states(of);
            assert_eq!(scene.verdicts(), [verdict], "{of}");
        }
        scene.stated.states.clear();
        scene.stated.streams = lost(5, 6);
        assert_eq!(scene.verdicts(), [Verdict::LossUnnamed]);
        scene.stated.streams.clear();
    }
    // One that was not committed is no step back, and one that was committed is no excuse.
    scene.observation.groups = [("g".into(), Ok(vec![(partition(), 1)]))].into();
    scene.stated.states = states("groups offsets");
    assert_eq!(scene.verdicts(), [Verdict::FalseBytes]);
}

#[test]
fn offsets_of_a_transaction_go_with_its_records() {
    let mut scene = Scene::new();
    let (committed, aborted) = (Some(0), Some(1));
    scene.model.commit("g", &partition(), Commit { offset: 7, txn: committed });
    scene.model.commit("g", &partition(), Commit { offset: 900, txn: aborted });
    let found = |scene: &mut Scene, offset| {
        scene.observation.groups = [("g".into(), Ok(vec![(partition(), offset)]))].into();
        scene.verdicts()
    };
    assert_eq!(found(&mut scene, 7), []);
    assert_eq!(found(&mut scene, 3), [Verdict::SilentLoss]);
    scene.stated.states = [("transactions".into(), lost(0, 1))].into();
    assert_eq!(found(&mut scene, 3), [Verdict::LossStated]);
    assert_eq!(found(&mut scene, 2), [Verdict::SilentLoss], "3 is of no transaction");
    // Whatever was lost, what was aborted is never committed.
    scene.stated.states.insert("groups offsets".into(), lost(0, 1));
    assert_eq!(found(&mut scene, 900), [Verdict::WrongOutcome]);

    scene.stated.aborts = [Abort { producer_id: 5, place: Some((partition(), 2)) }].into();
    scene.held().committed.records.remove(&2);
    assert_eq!(found(&mut scene, 3), [Verdict::LossStated, Verdict::LossStated]);
    assert_eq!(found(&mut scene, 7), [Verdict::LossStated, Verdict::WrongOutcome]);
}

#[test]
fn failures_are_worse_than_all_else() {
    let first = Verdict::ALL.iter().position(|verdict| verdict.is_failure()).unwrap();
    assert!(Verdict::ALL[first..].iter().all(|verdict| verdict.is_failure()));
    assert!(Verdict::ALL.is_sorted());
    assert_eq!(Verdict::ALL[first], Verdict::HealthOk);
}
