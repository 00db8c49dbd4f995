use super::*;
use crate::damage::log_lines::Abort;
use crate::damage::model::{Log, Outcome, Record, Transaction};

fn partition() -> Partition {
    Partition { topic: "t".into(), index: 0 }
}

/// Offsets 0 to 9: offset 2 is in a committed transaction, 4 in an aborted one, and 6 is a marker.
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
    model.empty_topics = [("there".into(), true), ("deleted".into(), false)].into();
    model
}

/// The contents of a server without losses.
fn observation(model: &Model) -> Observation {
    let log = model.log(&partition());
    let fetched = |record: &Record| Fetched {
        key: record.key.clone().map(String::into_bytes),
        value: Some(record.value()),
        timestamp_ms: record.timestamp_ms,
    };
    let mut all =
        View { high_watermark: log.next, last_stable_offset: log.next, ..View::default() };
    let mut committed = all.clone();
    for (offset, record) in &log.records {
        all.records.insert(*offset, fetched(record));
        if model.is_committed(record) {
            committed.records.insert(*offset, fetched(record));
        }
    }
    let contents = PartitionContents {
        all,
        committed,
        earliest: Some(Ok(0)),
        latest: Some(Ok(log.next)),
        by_time: Some((105, Ok((5, 105)))),
    };
    Observation {
        partitions: [(partition(), contents)].into(),
        groups: [("g".into(), Ok(vec![(partition(), 3)]))].into(),
        topics: ["t".into(), "there".into()].into(),
    }
}

/// One range.
fn lost(start: i64, end: i64) -> Vec<std::ops::Range<i64>> {
    std::iter::once(start..end).collect()
}

struct Scene {
    model: Model,
    observation: Observation,
    reported: Reported,
    reach: Option<BTreeSet<Extent>>,
    window: Offsets,
    changes_in_window: bool,
    health: &'static str,
}

impl Scene {
    fn new() -> Self {
        let model = model();
        let observation = observation(&model);
        let health = "degraded: something";
        let (reported, window) = (Reported::default(), Offsets::new());
        let changes_in_window = false;
        Self { model, observation, reported, reach: None, window, changes_in_window, health }
    }

    fn contents(&mut self) -> &mut PartitionContents {
        self.observation.partitions.get_mut(&partition()).unwrap()
    }

    /// Removes an offset for both isolation levels.
    fn lose(&mut self, offset: i64) {
        let contents = self.contents();
        contents.all.records.remove(&offset);
        contents.committed.records.remove(&offset);
        contents.by_time = None;
    }

    fn make_unreadable(&mut self, offset: i64, failure: &ReadFailure) {
        self.lose(offset);
        let unreadable =
            || vec![UnreadableRange { from: offset, to: offset + 1, failure: failure.clone() }];
        let contents = self.contents();
        (contents.all.unreadable, contents.committed.unreadable) = (unreadable(), unreadable());
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let streams = [(7, partition())].into();
        let facts = Facts {
            model: &self.model,
            observation: &self.observation,
            reported: &self.reported,
            reach: self.reach.as_ref(),
            streams: &streams,
            window: &self.window,
            changes_in_window: self.changes_in_window,
            health: self.health,
        };
        judge(&facts).into_iter().map(|finding| finding.verdict).collect()
    }
}

#[test]
fn a_server_without_losses_has_no_findings() {
    assert_eq!(Scene::new().verdicts(), []);
}

#[test]
fn a_missing_record_is_a_silent_loss_unless_it_is_reported() {
    let mut scene = Scene::new();
    scene.lose(8);
    assert_eq!(scene.verdicts(), [Verdict::SilentLoss]);
    scene.reported.end = true;
    assert_eq!(scene.verdicts(), [Verdict::LossInexact]);
    scene.reported.streams = lost(0, 8);
    assert_eq!(scene.verdicts(), [Verdict::LossInexact]);
    scene.reported.streams = lost(8, 9);
    assert_eq!(scene.verdicts(), [Verdict::LossUnnamed]);
    let other = Partition { topic: "t".into(), index: 1 };
    scene.reported.partitions = [(other, lost(8, 9))].into();
    assert_eq!(scene.verdicts(), [Verdict::LossUnnamed]);
    scene.reported.partitions = [(partition(), lost(8, 9))].into();
    assert_eq!(scene.verdicts(), [Verdict::LossReported]);
    scene.health = "ok\n";
    assert_eq!(scene.verdicts(), [Verdict::LossReported, Verdict::HealthOk]);
}

#[test]
fn a_missing_record_in_a_skipped_range_is_reported_by_a_bound() {
    let mut scene = Scene::new();
    scene.lose(9);
    scene.reported.partitions = [(partition(), lost(9, 100))].into();
    scene.reported.bounds = scene.reported.partitions.clone();
    assert_eq!(scene.verdicts(), [Verdict::LossBounded]);
    scene.reported.partitions.values_mut().next().unwrap().extend(lost(9, 10));
    assert_eq!(scene.verdicts(), [Verdict::LossReported]);
    // A bound that covers a readable record is as wrong as a loss.
    scene.reported.partitions = [(partition(), lost(8, 100))].into();
    scene.reported.bounds = scene.reported.partitions.clone();
    assert_eq!(scene.verdicts(), [Verdict::LossBounded, Verdict::LossMisreported]);
}

#[test]
fn only_losses_in_the_silent_window_need_no_report() {
    let mut scene = Scene::new();
    scene.window = [(partition(), lost(9, 10))].into();
    scene.health = "ok";
    scene.lose(9);
    assert_eq!(scene.verdicts(), [Verdict::InWindow]);
    scene.contents().latest = Some(Ok(9));
    assert_eq!(scene.verdicts(), [Verdict::InWindow, Verdict::InWindow]);
    scene.contents().latest = Some(Ok(8));
    assert!(scene.verdicts().contains(&Verdict::OffsetReused));
    scene.contents().latest = Some(Ok(10));
    scene.lose(8);
    assert!(scene.verdicts().contains(&Verdict::SilentLoss));
}

#[test]
fn only_an_unanswered_record_may_be_present_or_missing() {
    let mut scene = Scene::new();
    let mut record = scene.model.log(&partition()).records[&9].clone();
    record.id = 77;
    let value = Some(record.value());
    let fetched = Fetched { key: None, value, timestamp_ms: 0 };
    scene.contents().all.records.insert(10, fetched);
    assert_eq!(scene.verdicts(), [Verdict::WrongBytes]);
    scene.model.unanswered.push(record);
    assert_eq!(scene.verdicts(), []);
}

#[test]
fn a_present_record_that_is_reported_as_lost_is_misreported() {
    let mut scene = Scene::new();
    scene.reported.partitions = [(partition(), lost(8, 9))].into();
    assert_eq!(scene.verdicts(), [Verdict::LossMisreported]);
    // A marker's offset has no record, and offsets beyond the end may be skipped.
    scene.reported.partitions = [(partition(), [lost(6, 7), lost(10, 64)].concat())].into();
    assert_eq!(scene.verdicts(), []);
}

#[test]
fn records_that_were_not_damaged_must_not_be_lost() {
    let mut scene = Scene::new();
    scene.lose(8);
    scene.reported.partitions = [(partition(), lost(8, 9))].into();
    scene.reach = Some([Extent { stream: 7, start: 8, end: 9 }].into());
    assert_eq!(scene.verdicts(), [Verdict::LossReported]);
    for extent in [Extent { stream: 7, start: 9, end: 12 }, Extent { stream: 8, start: 8, end: 9 }]
    {
        scene.reach = Some([extent].into());
        assert_eq!(scene.verdicts(), [Verdict::LossReported, Verdict::LossExcessive]);
    }
}

#[test]
fn only_a_final_error_is_a_read_error() {
    let mut scene = Scene::new();
    for (failure, verdict) in [
        (ReadFailure::Code(CORRUPT_MESSAGE), Verdict::ReadError),
        (ReadFailure::Code(56), Verdict::EndlessRetry),
        (ReadFailure::NoData, Verdict::Hang),
        (ReadFailure::Malformed("no batch".into()), Verdict::WrongBytes),
    ] {
        scene.make_unreadable(8, &failure);
        assert_eq!(scene.verdicts().last(), Some(&verdict), "{failure:?}");
    }
    // An error at a marker only.
    let mut scene = Scene::new();
    scene.make_unreadable(6, &ReadFailure::Code(56));
    assert_eq!(scene.verdicts(), [Verdict::EndlessRetry]);
}

#[test]
fn reads_may_be_repeated_while_health_reports_an_unavailable_object_store() {
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
        scene.make_unreadable(8, &ReadFailure::Code(56));
        assert!(scene.verdicts().contains(&verdict), "{health}");
    }
}

#[test]
fn any_difference_of_a_record_is_wrong_bytes() {
    let spoil: [fn(&mut Fetched); 3] = [
        |fetched| fetched.key = None,
        |fetched| fetched.value.as_mut().unwrap()[29] ^= 1,
        |fetched| fetched.timestamp_ms += 1,
    ];
    for spoil in spoil {
        let mut scene = Scene::new();
        scene.contents().by_time = None;
        spoil(scene.contents().all.records.get_mut(&9).unwrap());
        assert_eq!(scene.verdicts(), [Verdict::WrongBytes]);
    }
    let mut scene = Scene::new();
    let fetched = scene.contents().all.records[&9].clone();
    scene.contents().all.records.insert(10, fetched);
    assert_eq!(scene.verdicts(), [Verdict::WrongBytes]);
}

#[test]
fn outcomes_must_not_change() {
    let mut hidden = Scene::new();
    hidden.contents().committed.records.remove(&2);
    assert_eq!(hidden.verdicts(), [Verdict::WrongOutcome]);
    let abort = |producer_id, position| Abort { producer_id, position };
    let other = Partition { topic: "t".into(), index: 1 };
    for (abort, verdict) in [
        (abort(5, Some((partition(), 2))), Verdict::LossReported),
        (abort(5, None), Verdict::LossInexact),
        // Another transaction, another partition, another producer.
        (abort(5, Some((partition(), 4))), Verdict::WrongOutcome),
        (abort(5, Some((other, 2))), Verdict::WrongOutcome),
        (abort(6, Some((partition(), 2))), Verdict::WrongOutcome),
        (abort(6, None), Verdict::WrongOutcome),
    ] {
        hidden.reported.aborts = [abort.clone()].into();
        assert_eq!(hidden.verdicts(), [verdict], "{abort:?}");
    }
    // A report is no excuse if the decision was not damaged.
    hidden.reported.aborts = [abort(5, Some((partition(), 2)))].into();
    hidden.reach = Some([Extent { stream: 7, start: 3, end: 4 }].into());
    assert_eq!(hidden.verdicts(), [Verdict::WrongOutcome]);
    hidden.reach = Some([Extent { stream: 8, start: 3, end: 4 }].into());
    assert_eq!(hidden.verdicts(), [Verdict::LossReported]);

    let mut shown = Scene::new();
    let fetched = shown.contents().all.records[&4].clone();
    shown.contents().committed.records.insert(4, fetched);
    assert_eq!(shown.verdicts(), [Verdict::WrongOutcome]);

    let mut stuck = Scene::new();
    stuck.contents().committed.last_stable_offset = 4;
    assert_eq!(stuck.verdicts(), [Verdict::WrongOutcome]);
    stuck.model.transactions[1].outcome = Outcome::Open;
    stuck.contents().committed.records.retain(|offset, _| *offset < 4);
    assert_eq!(stuck.verdicts(), []);
}

#[test]
fn the_high_watermark_must_not_decrease() {
    let mut scene = Scene::new();
    scene.contents().latest = Some(Ok(9));
    assert_eq!(scene.verdicts(), [Verdict::OffsetReused]);
    scene.contents().latest = Some(Ok(64));
    assert_eq!(scene.verdicts(), []);
    scene.contents().latest = Some(Err(6));
    assert_eq!(scene.verdicts(), [Verdict::Hang]);
    let mut scene = Scene::new();
    scene.contents().earliest = Some(Ok(1));
    assert_eq!(scene.verdicts(), [Verdict::SilentLoss]);
}

#[test]
fn a_search_by_timestamp_finds_the_first_record_and_its_timestamp() {
    for (answer, verdicts) in [
        (Ok((4, 100)), vec![Verdict::WrongBytes]),
        (Ok((5, 106)), vec![Verdict::WrongBytes]),
        (Ok((7, 107)), vec![Verdict::WrongBytes]),
        (Ok((-1, -1)), vec![Verdict::WrongBytes]),
        (Err(56), vec![Verdict::EndlessRetry]),
        (Err(2), vec![Verdict::ReadError]),
        (Ok((5, 105)), vec![]),
    ] {
        let mut scene = Scene::new();
        scene.contents().by_time = Some((105, answer));
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
    let fetched = Fetched {
        key: record.key.clone().map(String::into_bytes),
        value: Some(record.value()),
        timestamp_ms: record.timestamp_ms,
    };
    let view = View {
        records: [(0, fetched)].into(),
        high_watermark: 1,
        last_stable_offset: 1,
        ..View::default()
    };
    let contents =
        PartitionContents { all: view.clone(), committed: view, ..PartitionContents::default() };
    scene.observation.partitions.insert(other.clone(), contents);
    (scene, other)
}

#[test]
fn a_transaction_is_visible_as_a_whole_regardless_of_reports() {
    let (mut scene, other) = two_partitions();
    assert_eq!(scene.verdicts(), []);
    let abort =
        |partition: Partition, first| Abort { producer_id: 5, position: Some((partition, first)) };
    scene.reported.aborts = [abort(partition(), 2), abort(other.clone(), 0)].into();
    scene.contents().committed.records.remove(&2);
    assert_eq!(scene.verdicts(), [Verdict::LossReported, Verdict::WrongOutcome]);
    let hide = |scene: &mut Scene| {
        let contents = scene.observation.partitions.get_mut(&other).unwrap();
        contents.committed.records.clear();
    };
    hide(&mut scene);
    assert_eq!(scene.verdicts(), [Verdict::LossReported, Verdict::LossReported]);

    // An aborted transaction is also checked: it is visible in one partition.
    let (mut scene, _) = two_partitions();
    scene.model.transactions[0].outcome = Outcome::Aborted;
    hide(&mut scene);
    assert_eq!(scene.verdicts(), [Verdict::WrongOutcome, Verdict::WrongOutcome]);

    // Records that cannot be read, or not yet, do not count as hidden.
    let (mut scene, other) = two_partitions();
    hide(&mut scene);
    let contents = scene.observation.partitions.get_mut(&other).unwrap();
    contents.committed.unreadable =
        vec![UnreadableRange { from: 0, to: 1, failure: ReadFailure::Code(CORRUPT_MESSAGE) }];
    assert_eq!(scene.verdicts(), [Verdict::ReadError]);
    let contents = scene.observation.partitions.get_mut(&other).unwrap();
    (contents.all.records, contents.committed.unreadable) = Default::default();
    assert_eq!(scene.verdicts(), [Verdict::SilentLoss]);
}

#[test]
fn committed_offsets_of_groups_must_be_present() {
    let mut scene = Scene::new();
    for (contents, verdict) in [
        (Ok(vec![(partition(), 2)]), Verdict::SilentLoss),
        (Ok(vec![]), Verdict::SilentLoss),
        (Ok(vec![(partition(), 4)]), Verdict::WrongBytes),
        (Ok(vec![(partition(), 1)]), Verdict::WrongBytes),
        (Err(14), Verdict::Hang),
    ] {
        scene.observation.groups = [("g".into(), contents)].into();
        assert_eq!(scene.verdicts(), [verdict]);
    }
    let other = Partition { topic: "t".into(), index: 1 };
    scene.observation.groups = [("g".into(), Ok(vec![(partition(), 3), (other, 1)]))].into();
    assert_eq!(scene.verdicts(), [Verdict::WrongBytes]);
}

#[test]
fn a_committed_offset_decreases_only_if_the_offsets_of_groups_are_lost() {
    let mut scene = Scene::new();
    let states = |of: &str| [(of.to_owned(), lost(5, 6))].into();
    for contents in [vec![(partition(), 2)], vec![]] {
        scene.observation.groups = [("g".into(), Ok(contents))].into();
        for (of, verdict) in [
            ("groups offsets", Verdict::LossReported),
            ("groups members", Verdict::SilentLoss),
            ("transactions", Verdict::SilentLoss),
        ] {
            scene.reported.states = states(of);
            assert_eq!(scene.verdicts(), [verdict], "{of}");
        }
        scene.reported.states.clear();
        scene.reported.streams = lost(5, 6);
        assert_eq!(scene.verdicts(), [Verdict::LossUnnamed]);
        scene.reported.streams.clear();
    }
    // An offset that was never committed is not an earlier one, and an offset that was is no
    // excuse.
    scene.observation.groups = [("g".into(), Ok(vec![(partition(), 1)]))].into();
    scene.reported.states = states("groups offsets");
    assert_eq!(scene.verdicts(), [Verdict::WrongBytes]);
}

#[test]
fn staged_offsets_share_the_outcome_of_their_transaction() {
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
    scene.reported.states = [("transactions".into(), lost(0, 1))].into();
    assert_eq!(found(&mut scene, 3), [Verdict::LossReported]);
    assert_eq!(found(&mut scene, 2), [Verdict::SilentLoss], "3 is outside any transaction");
    // Regardless of losses, staged offsets of an aborted transaction are never committed.
    scene.reported.states.insert("groups offsets".into(), lost(0, 1));
    assert_eq!(found(&mut scene, 900), [Verdict::WrongOutcome]);

    scene.reported.aborts = [Abort { producer_id: 5, position: Some((partition(), 2)) }].into();
    scene.contents().committed.records.remove(&2);
    assert_eq!(found(&mut scene, 3), [Verdict::LossReported, Verdict::LossReported]);
    assert_eq!(found(&mut scene, 7), [Verdict::LossReported, Verdict::WrongOutcome]);
}

#[test]
fn topics_are_created_and_deleted_unless_a_loss_of_changes_is_reported() {
    let change: [fn(&mut Scene) -> bool; 2] = [
        |scene| scene.observation.topics.remove("there"),
        |scene| scene.observation.topics.insert("deleted".into()),
    ];
    for change in change {
        let mut scene = Scene::new();
        assert!(change(&mut scene));
        assert_eq!(scene.verdicts(), [Verdict::SilentLoss]);
        scene.changes_in_window = true;
        assert_eq!(scene.verdicts(), [Verdict::InWindow]);
        scene.reported.changes = true;
        assert_eq!(scene.verdicts(), [Verdict::LossReported]);
        scene.reach = Some([OF_CATALOG].into());
        assert_eq!(scene.verdicts(), [Verdict::LossReported]);
        scene.reach = Some([Extent { stream: 7, start: 0, end: 9 }].into());
        assert_eq!(scene.verdicts(), [Verdict::LossReported, Verdict::LossExcessive]);
    }
}

#[test]
fn failures_are_worse_than_all_other_verdicts() {
    let first = Verdict::ALL.iter().position(|verdict| verdict.is_failure()).unwrap();
    assert!(Verdict::ALL[first..].iter().all(|verdict| verdict.is_failure()));
    assert!(Verdict::ALL.is_sorted());
    assert_eq!(Verdict::ALL[first], Verdict::HealthOk);
}
