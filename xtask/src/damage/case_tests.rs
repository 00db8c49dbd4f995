use super::*;
use crate::damage::model::{Log, Record, Transaction};

fn partition(index: i32) -> Partition {
    Partition { topic: "t".into(), index }
}

fn lost(partition: Partition, range: std::ops::Range<i64>) -> Reported {
    Reported { partitions: [(partition, vec![range])].into(), ..Reported::default() }
}

#[test]
fn the_metrics_must_exist_and_agree_with_the_log() {
    assert_eq!(miscounted(0, Some(0.0), Some(0.0)), None);
    assert_eq!(miscounted(7, Some(3.0), Some(4.0)), None);
    assert!(miscounted(7, Some(7.0), Some(1.0)).is_some());
    for (lost, skipped) in [(None, Some(0.0)), (Some(0.0), None)] {
        assert!(miscounted(0, lost, skipped).is_some_and(|it| it.contains("no metric")));
    }
}

#[test]
fn a_refusal_must_contain_one_of_the_names_if_there_are_any() {
    assert!(is_named(&[], "b"));
    assert!(is_named(&["a".into(), "b".into()], "x b y"));
    assert!(!is_named(&["a".into()], "x b y"));
}

#[test]
fn an_idempotent_producer_may_be_refused_once_after_losing_a_batch() {
    let mut producer = Idempotent {
        producer_id: 1,
        epoch: 0,
        sequences: Default::default(),
        offsets: [("t-0".into(), vec![4, 5])].into(),
        refusals: Default::default(),
    };
    let (own, others) = (lost(partition(0), 5..6), lost(partition(0), 6..9));
    let (elsewhere, nothing) = (lost(partition(1), 5..6), Reported::default());
    assert!(may_refuse_idempotent(&producer, &partition(0), &nothing));
    producer.refusals.insert("t-0".into(), 1);
    assert!(may_refuse_idempotent(&producer, &partition(0), &own));
    for reported in [&others, &elsewhere, &nothing] {
        assert!(!may_refuse_idempotent(&producer, &partition(0), reported));
    }
    producer.refusals.insert("t-0".into(), 2);
    assert!(!may_refuse_idempotent(&producer, &partition(0), &own));
    let silent = |offsets| Reported {
        silent: [(partition(0), vec![offsets])].into(),
        ..Reported::default()
    };
    assert!(may_refuse_idempotent(&producer, &partition(0), &silent(5..6)));
    assert!(!may_refuse_idempotent(&producer, &partition(0), &silent(6..7)));
}

#[test]
fn a_transactional_producer_may_be_refused_if_its_transaction_or_state_is_lost() {
    let mut model = Model {
        topics: [("t".into(), vec![Log::default(), Log::default()])].into(),
        transactions: vec![Transaction { producer_id: 1, outcome: Outcome::Open }],
        ..Model::default()
    };
    let record = Record { id: 0, bytes: 20, key: None, timestamp_ms: 0, txn: Some(0) };
    model.acknowledged(&partition(0), 0, vec![record]);
    let mut session = Session {
        transactional_id: "one".into(),
        second_version: true,
        producer_id: 1,
        epoch: 0,
        sequences: Default::default(),
        open: Some(0),
    };
    let state =
        Reported { states: [("transactions".into(), vec![0..1; 1])].into(), ..Reported::default() };
    assert!(!may_refuse_session(&session, &model, &Reported::default()));
    assert!(!may_refuse_session(&session, &model, &lost(partition(1), 0..1)));
    assert!(may_refuse_session(&session, &model, &lost(partition(0), 0..1)));
    assert!(may_refuse_session(&session, &model, &state));
    session.open = None;
    assert!(!may_refuse_session(&session, &model, &lost(partition(0), 0..1)));
    assert!(may_refuse_session(&session, &model, &state));
}
