//! Tables of the state machine's decisions, and its records.

use kafka_protocol::error::ResponseError as E;

use super::record::Record;
use super::transaction::{Doubt, Identity, Span};
use super::*;

const NONE: i16 = -1;

fn transaction(state: State, producer_id: i64, epoch: i16) -> Transaction {
    let identity = Identity { producer_id, epoch, ..Identity::default() };
    Transaction { identity, state, timeout_ms: 1_000, ..Transaction::default() }
}

fn identity(id: i64, epoch: i16, previous_id: i64, previous_epoch: i16) -> Identity {
    Identity { producer_id: id, epoch, previous_producer_id: previous_id, previous_epoch }
}

#[test]
fn a_producer_is_initialised_as_in_kafka() {
    let begin = |id, epoch, previous_id, previous_epoch| {
        Ok(Init::Begin(Some(identity(id, epoch, previous_id, previous_epoch))))
    };
    let new = Transaction::default();
    assert_eq!(new.init(None, None), Ok(Init::NeedsProducerId));
    assert_eq!(new.init(None, Some(5)), begin(5, 0, -1, NONE));
    // A client from a server that has lost its state.
    assert_eq!(new.init(Some((3, 3)), Some(5)), begin(5, 0, -1, NONE));

    for state in [State::Empty, State::Completed(Outcome::Commit), State::Completed(Outcome::Abort)]
    {
        let mut known = transaction(state, 5, 7);
        assert_eq!(known.init(None, None), begin(5, 8, -1, NONE));
        assert_eq!(known.init(Some((5, 7)), None), begin(5, 8, -1, 7));
        assert_eq!(known.init(Some((5, 6)), None), Err(E::ProducerFenced));
        assert_eq!(known.init(Some((5, 8)), None), Err(E::ProducerFenced));
        assert_eq!(known.init(Some((4, 7)), None), Err(E::ProducerFenced));
        // The response to epoch 7 was lost.
        known.identity = identity(5, 8, -1, 7);
        assert_eq!(known.init(Some((5, 7)), None), Ok(Init::Begin(None)));

        let last = transaction(state, 5, i16::MAX - 1);
        assert_eq!(last.init(None, None), Ok(Init::NeedsProducerId));
        assert_eq!(last.init(None, Some(9)), begin(9, 0, 5, NONE));
        assert_eq!(last.init(Some((5, i16::MAX - 1)), Some(9)), begin(9, 0, 5, i16::MAX - 1));
        let mut next = last.clone();
        next.identity = identity(9, 0, 5, i16::MAX - 1);
        assert_eq!(next.init(Some((5, i16::MAX - 1)), None), Ok(Init::Begin(None)));
        assert_eq!(next.init(Some((5, 3)), None), Err(E::ProducerFenced));
    }

    let open = transaction(State::Ongoing, 5, 7);
    let fenced = identity(5, 8, -1, NONE);
    let abort = Event::Prepared {
        outcome: Outcome::Abort,
        marker: (5, 8),
        identity: fenced,
        spans: None,
        resolves_doubt: false,
    };
    assert_eq!(open.init(None, None), Ok(Init::AbortFirst(abort.clone())));
    // The same producer receives the raised epoch, however often it asks.
    let raised = identity(5, 8, -1, 7);
    let goes_on = Event::Prepared {
        outcome: Outcome::Abort,
        marker: (5, 8),
        identity: raised,
        spans: None,
        resolves_doubt: false,
    };
    assert_eq!(open.init(Some((5, 7)), None), Ok(Init::AbortFirst(goes_on.clone())));
    let mut aborted = open.clone();
    aborted.apply(1, goes_on);
    assert_eq!(aborted.init(Some((5, 7)), None), Ok(Init::Wait));
    aborted.apply(2, Event::Completed);
    assert_eq!(aborted.init(Some((5, 7)), None), Ok(Init::Begin(None)));
    let last = transaction(State::Ongoing, 5, i16::MAX - 1);
    assert_eq!(last.init(Some((5, i16::MAX - 1)), None), Ok(Init::NeedsProducerId));
    let identity_after = identity(9, 0, 5, i16::MAX - 1);
    let marker = (5, i16::MAX);
    let replaced = Event::Prepared {
        outcome: Outcome::Abort,
        marker,
        identity: identity_after,
        spans: None,
        resolves_doubt: false,
    };
    assert_eq!(last.init(Some((5, i16::MAX - 1)), Some(9)), Ok(Init::AbortFirst(replaced)));
    assert_eq!(open.init(Some((6, 7)), None), Err(E::ProducerFenced));
    // A fenced producer, or one that guesses, aborts no transaction.
    assert_eq!(open.init(Some((5, 6)), None), Err(E::ProducerFenced));
    assert_eq!(open.init(Some((5, 8)), None), Err(E::ProducerFenced));
    let mut successor = open.clone();
    successor.identity = identity(9, 0, 5, i16::MAX - 1);
    assert_eq!(successor.init(Some((5, i16::MAX - 1)), None), Err(E::ProducerFenced));
    for outcome in [Outcome::Commit, Outcome::Abort] {
        assert_eq!(transaction(State::Prepared(outcome), 5, 7).init(None, None), Ok(Init::Wait));
    }
}

#[test]
fn a_transaction_ends_as_in_kafka() {
    use Outcome::{Abort, Commit};
    let prepared = |outcome, marker, identity| {
        Ok(End::Prepare(Event::Prepared {
            outcome,
            marker,
            identity,
            spans: None,
            resolves_doubt: false,
        }))
    };
    let me = (5, 7);
    // State, client of version 2, requested outcome, result.
    let table = [
        (State::Ongoing, false, Commit, prepared(Commit, me, identity(5, 7, -1, NONE))),
        (State::Ongoing, false, Abort, prepared(Abort, me, identity(5, 7, -1, NONE))),
        (State::Ongoing, true, Commit, prepared(Commit, (5, 8), identity(5, 8, -1, 7))),
        (State::Ongoing, true, Abort, prepared(Abort, (5, 8), identity(5, 8, -1, 7))),
        (State::Empty, false, Commit, Err(E::InvalidTxnState)),
        (State::Empty, false, Abort, Err(E::InvalidTxnState)),
        (State::Empty, true, Commit, Err(E::InvalidTxnState)),
        (State::Empty, true, Abort, prepared(Abort, (5, 8), identity(5, 8, -1, 7))),
        (State::Prepared(Commit), false, Commit, Ok(End::Wait)),
        (State::Prepared(Commit), false, Abort, Err(E::InvalidTxnState)),
        (State::Prepared(Abort), false, Abort, Ok(End::Wait)),
        (State::Prepared(Abort), false, Commit, Err(E::InvalidTxnState)),
        (State::Prepared(Commit), true, Commit, Err(E::ProducerFenced)),
        (State::Completed(Commit), false, Commit, Ok(End::Done)),
        (State::Completed(Commit), false, Abort, Err(E::InvalidTxnState)),
        (State::Completed(Abort), false, Abort, Ok(End::Done)),
        (State::Completed(Abort), false, Commit, Err(E::InvalidTxnState)),
        (State::Completed(Commit), true, Commit, Err(E::InvalidTxnState)),
        (State::Completed(Commit), true, Abort, prepared(Abort, (5, 8), identity(5, 8, -1, 7))),
        (State::Completed(Abort), true, Commit, Err(E::InvalidTxnState)),
        (State::Completed(Abort), true, Abort, prepared(Abort, (5, 8), identity(5, 8, -1, 7))),
    ];
    for (state, version_2, outcome, wanted) in table {
        let known = transaction(state, 5, 7);
        let ended = known.end(me, outcome, version_2, None);
        assert_eq!(ended, wanted, "{state:?} {outcome:?}, version 2: {version_2}");
        assert_eq!(known.end((5, 6), outcome, version_2, None), Err(E::ProducerFenced));
        assert_eq!(known.end((5, 9), outcome, version_2, None), Err(E::ProducerFenced));
        assert_eq!(known.end((4, 7), outcome, version_2, None), Err(E::InvalidProducerIdMapping));
    }
    // A client of version 2 that has lost the response.
    for (state, outcome, wanted) in [
        (State::Prepared(Commit), Commit, Ok(End::Wait)),
        (State::Prepared(Commit), Abort, Err(E::InvalidTxnState)),
        (State::Completed(Commit), Commit, Ok(End::Done)),
        (State::Completed(Commit), Abort, Err(E::InvalidTxnState)),
        (State::Completed(Abort), Abort, Ok(End::Done)),
        (State::Ongoing, Commit, Err(E::ProducerFenced)),
        (State::Empty, Abort, Err(E::ProducerFenced)),
    ] {
        let mut known = transaction(state, 5, 8);
        known.identity.previous_epoch = 7;
        assert_eq!(known.end(me, outcome, true, None), wanted, "{state:?} {outcome:?} again");
    }
    // The last epoch: the next one belongs to another producer ID.
    let last = transaction(State::Ongoing, 5, i16::MAX - 1);
    let me = (5, i16::MAX - 1);
    assert_eq!(last.end(me, Commit, true, None), Ok(End::NeedsProducerId));
    let replaced = identity(9, 0, 5, i16::MAX - 1);
    let wanted = prepared(Commit, (5, i16::MAX), replaced);
    assert_eq!(last.end(me, Commit, true, Some(9)), wanted);
    let mut next = transaction(State::Completed(Commit), 9, 0);
    next.identity = replaced;
    assert_eq!(next.end(me, Commit, true, None), Ok(End::Done));
}

/// As in Kafka 4.3.1 with version 2 of transactions.
#[test]
fn a_producer_continues_after_its_transaction_timed_out() {
    use Outcome::{Abort, Commit};
    let mut late = transaction(State::Ongoing, 5, 7);
    late.apply(1, late.time_out());
    assert_eq!((late.state, late.marker), (State::Prepared(Abort), (5, 8)));
    let me = (5, 7);
    assert_eq!(late.end(me, Abort, true, None), Ok(End::Wait));
    assert_eq!(late.init(Some(me), None), Ok(Init::Wait));
    late.apply(2, Event::Completed);
    assert_eq!(late.identity, identity(5, 8, -1, 7));
    assert_eq!(late.end(me, Abort, true, None), Ok(End::Done));
    assert_eq!(late.end(me, Commit, true, None), Err(E::InvalidTxnState), "nothing was committed");
    assert_eq!(late.init(Some(me), None), Ok(Init::Begin(None)));
    assert_eq!(late.check_open(5, 7), Err(E::ProducerFenced));
    // A client of version 1 does not receive an epoch at the end of a transaction.
    assert_eq!(late.end(me, Abort, false, None), Err(E::ProducerFenced));
    // Another producer has initialised.
    let Ok(Init::Begin(Some(next))) = late.init(None, None) else { panic!("it begins") };
    late.apply(3, Event::Initialised { identity: next, timeout_ms: 1_000 });
    assert_eq!(late.init(Some(me), None), Err(E::ProducerFenced));
    assert_eq!(late.end(me, Abort, true, None), Err(E::ProducerFenced));

    // The epoch after the last one is never issued.
    let mut last = transaction(State::Ongoing, 5, i16::MAX - 1);
    last.apply(1, last.time_out());
    last.apply(2, Event::Completed);
    let me = (5, i16::MAX - 1);
    assert_eq!(last.end(me, Abort, true, None), Err(E::ProducerFenced));
    assert_eq!(last.init(Some(me), None), Err(E::ProducerFenced));
    assert_eq!(last.init(None, None), Ok(Init::NeedsProducerId));
}

#[test]
fn only_the_current_producer_adds_and_only_while_no_transaction_is_being_ended() {
    for (state, wanted) in [
        (State::Empty, Ok(())),
        (State::Ongoing, Ok(())),
        (State::Completed(Outcome::Abort), Ok(())),
        (State::Prepared(Outcome::Abort), Err(E::ConcurrentTransactions)),
    ] {
        let known = transaction(state, 5, 7);
        assert_eq!(known.check_open(5, 7), wanted);
        assert_eq!(known.check_open(5, 6), Err(E::ProducerFenced));
        assert_eq!(known.check_open(4, 7), Err(E::InvalidProducerIdMapping));
    }
}

fn records() -> Vec<Record> {
    let position = |partition| Position {
        partition,
        offset: 1 << 40,
        leader_epoch: -1,
        metadata: "über".to_owned(),
    };
    let partitions = vec![(Uuid::from_u128(1 << 100), 3), (Uuid::from_u128(2), 0)];
    let events = [
        Event::Initialised { identity: identity(1 << 50, 3, -1, NONE), timeout_ms: 60_000 },
        Event::Added { partitions, groups: vec!["group".to_owned()] },
        Event::Added { partitions: vec![(Uuid::from_u128(9), 1)], groups: Vec::new() },
        Event::Offsets {
            group: "group".to_owned(),
            topics: vec![("topic".to_owned(), vec![position(0), position(7)])],
        },
        Event::Offsets {
            group: "group".to_owned(),
            topics: vec![("topic".to_owned(), Vec::new()), ("other".to_owned(), vec![position(1)])],
        },
        Event::Prepared {
            outcome: Outcome::Commit,
            marker: (1 << 50, i16::MAX),
            identity: identity(77, 0, 1 << 50, 3),
            spans: Some(vec![Span { partition: (Uuid::from_u128(9), 1), records: 7..9 }]),
            resolves_doubt: false,
        },
        Event::Prepared {
            outcome: Outcome::Abort,
            marker: (77, 1),
            identity: identity(77, 1, -1, NONE),
            spans: Some(vec![Span { partition: (Uuid::from_u128(9), 1), records: 7..9 }]),
            resolves_doubt: true,
        },
        Event::Resolved,
        Event::Completed,
        Event::Removed,
    ];
    let record = |(at, event)| Record { id: "id".to_owned(), at_ms: at as i64, event };
    events.into_iter().enumerate().map(record).collect()
}

#[test]
fn records_survive_encoding_and_damage_is_detected() {
    for record in records() {
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes).unwrap(), record);
        for len in 0..bytes.len() {
            assert!(Record::decode(&bytes[..len]).is_err(), "{record:?} cut to {len}");
        }
        assert!(Record::decode(&[&bytes[..], b"x"].concat()).is_err());
    }
}

#[test]
fn a_topic_without_positions_removes_its_staged_offsets() {
    let mut transaction = Transaction::default();
    let sizes = records().into_iter().take(5).map(|record| {
        transaction.apply(record.at_ms, record.event);
        let names = transaction.offsets.values().flat_map(|topics| topics.keys().cloned());
        (names.collect::<Vec<_>>(), transaction.size_bytes())
    });
    let sizes: Vec<_> = sizes.collect();
    assert_eq!(sizes[3].0, ["topic"]);
    assert_eq!(sizes[4].0, ["other"]);
    assert!(sizes[4].1 < sizes[3].1);
}

#[test]
fn a_loss_puts_transactions_in_doubt_until_their_state_is_known_again() {
    use Outcome::{Abort, Commit};
    let added = |n| Event::Added { partitions: vec![(Uuid::from_u128(n), 0)], groups: Vec::new() };
    let prepared = |outcome| Event::Prepared {
        outcome,
        marker: (5, 8),
        identity: identity(5, 8, -1, 7),
        spans: Some(vec![Span { partition: (Uuid::from_u128(3), 0), records: 0..1 }]),
        resolves_doubt: false,
    };
    let begun = Event::Initialised { identity: identity(5, 9, -1, NONE), timeout_ms: 1 };
    // Events after the loss, the resulting state and doubt, and the number of partitions.
    let table = [
        (vec![], State::Ongoing, Doubt::Stale, 1),
        (vec![added(2)], State::Ongoing, Doubt::Mixed, 2),
        (vec![Event::Completed], State::Ongoing, Doubt::Stale, 1),
        (vec![Event::Completed, added(2)], State::Ongoing, Doubt::Mixed, 2),
        (vec![prepared(Commit)], State::Prepared(Commit), Doubt::None, 2),
        (vec![prepared(Abort), Event::Completed], State::Completed(Abort), Doubt::None, 0),
        (vec![added(2), begun.clone()], State::Empty, Doubt::None, 0),
        (vec![begun, added(2)], State::Ongoing, Doubt::None, 1),
    ];
    for (events, state, doubt, partitions) in table {
        let mut transaction = transaction(State::Empty, 5, 7);
        transaction.apply(0, added(1));
        transaction.after_loss();
        for event in events.clone() {
            transaction.apply(1, event);
        }
        let found = (transaction.state, transaction.doubt, transaction.partitions.len());
        assert_eq!(found, (state, doubt, partitions), "{events:?}");
        transaction.resolved();
        assert_eq!(transaction.doubt, doubt, "it is open, {events:?}");
        if state != State::Ongoing {
            continue;
        }
        // It ends in an epoch that no partition refuses and in which no producer may continue.
        let event = transaction.resolve(20, Abort);
        transaction.apply(2, event);
        let found = (transaction.state, transaction.identity, transaction.doubt);
        assert_eq!(found, (State::Prepared(Abort), identity(5, 21, -1, NONE), Doubt::Renew));
        // The epoch may have been issued before.
        transaction.apply(9, Event::Completed);
        assert_eq!(transaction.check_open(5, 21), Err(E::InvalidProducerIdMapping));
    }
}

#[test]
fn offsets_from_before_a_loss_are_not_committed_by_a_later_decision() {
    let offsets = |offset| {
        let position = Position { partition: 0, offset, leader_epoch: -1, metadata: String::new() };
        let topics = vec![(format!("topic-{offset}"), vec![position])];
        Event::Offsets { group: "group".to_owned(), topics }
    };
    let prepared = |resolves_doubt| Event::Prepared {
        outcome: Outcome::Commit,
        marker: (5, 8),
        identity: identity(5, 8, -1, 7),
        spans: None,
        resolves_doubt,
    };
    let begun = Event::Added { partitions: Vec::new(), groups: vec!["group".to_owned()] };
    // Events after the loss, and the offsets to commit then.
    let table = [
        (vec![prepared(false)], vec![]),
        (vec![begun.clone(), prepared(false)], vec![]),
        (vec![begun, offsets(2), prepared(false)], vec!["topic-2"]),
        (vec![offsets(2), offsets(3), prepared(false)], vec!["topic-2", "topic-3"]),
        // A start has found a proof that the transaction from before the loss is committed.
        (vec![prepared(true)], vec!["topic-1"]),
    ];
    for (events, wanted) in table {
        let mut transaction = transaction(State::Ongoing, 5, 7);
        transaction.apply(0, offsets(1));
        transaction.after_loss();
        for event in events.clone() {
            transaction.apply(1, event);
        }
        let names: Vec<_> = transaction.offsets.values().flat_map(|topics| topics.keys()).collect();
        assert_eq!(names, wanted, "{events:?}");
        // Without a loss they stay.
        let mut transaction = Transaction { offsets: [].into(), ..transaction };
        transaction.apply(2, offsets(4));
        transaction.apply(3, prepared(false));
        assert_eq!(transaction.offsets["group"].len(), 1);
    }
}

/// Whole transactions may be lost, and epochs that were issued.
#[test]
fn a_producer_in_doubt_gets_a_new_producer_id() {
    use Outcome::Commit;
    let mut known = transaction(State::Completed(Commit), 5, 7);
    known.identity.previous_epoch = 6;
    known.after_loss();
    known.resolved();
    assert_eq!(known.doubt, Doubt::Resolved);
    // What it adds could belong to a transaction that is lost.
    assert_eq!(known.check_open(5, 7), Err(E::InvalidProducerIdMapping));
    // In version 2 the epoch identifies the transaction that the client means.
    assert_eq!(known.end((5, 6), Commit, true, None), Ok(End::Done));
    assert_eq!(known.end((5, 7), Commit, false, None), Err(E::InvalidTxnState));
    let renewed = Identity { previous_epoch: NONE, ..identity(9, 0, 5, NONE) };
    // Also after a transaction of version 1, whose end returns no new id.
    for begun in [false, true] {
        if begun {
            known.apply(1, Event::Added { partitions: Vec::new(), groups: vec!["g".to_owned()] });
            let Ok(End::Prepare(event)) = known.end((5, 7), Commit, false, None) else {
                panic!("it ends")
            };
            known.apply(2, event);
            known.apply(3, Event::Completed);
            assert_eq!(known.end((5, 7), Commit, false, None), Ok(End::Done));
        }
        assert_eq!(known.init(None, None), Ok(Init::NeedsProducerId));
        assert_eq!(known.init(None, Some(9)), Ok(Init::Begin(Some(renewed))));
        assert_eq!(known.init(Some((5, 7)), None), Ok(Init::NeedsProducerId));
    }
    known.apply(4, Event::Added { partitions: Vec::new(), groups: vec!["g".to_owned()] });
    assert_eq!(known.end((5, 7), Commit, true, None), Ok(End::NeedsProducerId));
    let Ok(End::Prepare(event)) = known.end((5, 7), Commit, true, Some(9)) else {
        panic!("it ends")
    };
    known.apply(5, event);
    known.apply(6, Event::Completed);
    assert_eq!((known.identity, known.doubt), (identity(9, 0, 5, 7), Doubt::None));
    // A client that has lost the response repeats the request.
    assert_eq!(known.end((5, 7), Commit, true, None), Ok(End::Done));
    assert_eq!(known.init(Some((5, 7)), None), Ok(Init::Begin(None)));
    assert_eq!(known.init(None, None), Ok(Init::Begin(Some(identity(9, 1, 5, NONE)))));
}

#[test]
fn folding_over_a_loss_equals_loading_it() {
    use alluvium_stream::{Batch, Replay, StreamOffset};
    let batch = |at: usize| Batch {
        base: StreamOffset(at as u64),
        count: 1,
        max_timestamp_ms: 0,
        payload: records()[at].encode().into(),
    };
    let batches: Vec<Batch> = [0, 1, 4].map(batch).into();
    let replay = |checkpoint: Option<Vec<u8>>, from, batches: &[Batch], end| Replay {
        checkpoint: checkpoint.map(Into::into),
        checkpoint_end: StreamOffset(from),
        batches: batches.to_vec(),
        end: StreamOffset(end),
    };
    let at_once: Table = state_table::load(&replay(None, 0, &batches, 5)).unwrap();
    assert_eq!(at_once.0["id"].doubt, Doubt::Mixed);
    let first = state_table::fold::<Table>(StreamOffset(0)..StreamOffset(2), None, &batches[..2]);
    assert_eq!(at_once, state_table::load(&replay(first.clone(), 2, &batches[2..], 5)).unwrap());
    let both = state_table::fold::<Table>(
        StreamOffset(2)..StreamOffset(5),
        first.as_deref(),
        &batches[2..],
    );
    assert_eq!(at_once, state_table::decode(&both.unwrap()).unwrap());
    // At the very end.
    let end: Table = state_table::load(&replay(first.clone(), 2, &[], 3)).unwrap();
    assert_eq!(end.0["id"].doubt, Doubt::Stale);
    let folded =
        state_table::fold::<Table>(StreamOffset(2)..StreamOffset(3), first.as_deref(), &[]);
    assert_eq!(end, state_table::decode(&folded.unwrap()).unwrap());
}

#[test]
fn the_growth_by_an_event_is_estimated_correctly() {
    let mut transaction = Transaction::default();
    for record in records().into_iter().take(4) {
        let (before, growth) = (transaction.size_bytes(), transaction.growth_bytes(&record.event));
        transaction.apply(record.at_ms, record.event.clone());
        assert_eq!(transaction.size_bytes(), before + growth, "{record:?}");
        assert_eq!(transaction.growth_bytes(&record.event), 0, "{record:?} again");
    }
    assert!(transaction.size_bytes() > 0);
}

/// A checkpoint of version 1 has neither spans nor doubt.
#[test]
fn a_checkpoint_of_version_1_can_be_read() {
    let records = &records()[..4];
    let mut table = Table::default();
    for record in records {
        table.0.entry(record.id.clone()).or_default().apply(record.at_ms, record.event.clone());
    }
    let mut bytes = state_table::encode(&table);
    bytes.truncate(bytes.len() - 4 - 2);
    bytes[4] = 1;
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    assert_eq!(state_table::decode::<Table>(&bytes).unwrap(), table);
}

/// Bytes written by format version 1, which must always be readable.
#[test]
fn version_1_can_be_read() {
    let record = Record {
        id: "t".to_owned(),
        at_ms: 5,
        event: Event::Prepared {
            outcome: Outcome::Commit,
            marker: (3, 1),
            identity: identity(3, 2, -1, 1),
            spans: None,
            resolves_doubt: false,
        },
    };
    let bytes: Vec<u8> = [
        &[1, 4][..], // version, kind
        &[1, 0, b't'],
        &[5, 0, 0, 0, 0, 0, 0, 0],             // time
        &[1],                                  // commit
        &[3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], // the markers' producer id and epoch
        &[3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0], // the producer's
        &[0xff; 8],                            // no previous producer
        &[1, 0, 0, 0],                         // the previous epoch
    ]
    .concat();
    assert_eq!(record.encode(), bytes);
    assert_eq!(Record::decode(&bytes).unwrap(), record);
}

#[test]
fn checkpoints_hold_every_state_and_folding_in_steps_equals_folding_at_once() {
    use alluvium_stream::{Batch, Replay, StreamOffset};
    let all = records();
    for end in 0..=all.len() {
        let batch = |(at, record): (usize, &Record)| Batch {
            base: StreamOffset(at as u64),
            count: 1,
            max_timestamp_ms: 0,
            payload: record.encode().into(),
        };
        let batches: Vec<Batch> = all[..end].iter().enumerate().map(batch).collect();
        let at_once =
            state_table::fold::<Table>(StreamOffset(0)..StreamOffset(end as u64), None, &batches);
        let mut parts = None;
        for batch in batches.chunks(1) {
            parts =
                state_table::fold::<Table>(batch[0].base..batch[0].end(), parts.as_deref(), batch);
        }
        assert_eq!(at_once, parts);
        let Some(bytes) = at_once else { continue };
        let read: Table = state_table::decode(&bytes).unwrap();
        let end_offset = StreamOffset(end as u64);
        let (checkpoint, checkpoint_end) = (None, StreamOffset(0));
        let replay = Replay { checkpoint, checkpoint_end, batches, end: end_offset };
        assert_eq!(read, state_table::load(&replay).unwrap(), "after {end} records");
        assert_eq!(read.0.len(), usize::from(end < all.len()));
    }
}

impl Transactions {
    /// The bytes of all ids, and of the contents of transactions.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.ids_bytes.load(Ordering::Relaxed), self.open_bytes.load(Ordering::Relaxed))
    }

    /// Inserts ids of this length until there is no space for another, as if their producers had
    /// just initialised. In memory only.
    pub(crate) fn fill(&self, len: usize) {
        let mut slots = self.slots.write();
        while slots.len() < MAX_IDS && self.sizes().0 < MAX_IDS_BYTES {
            let len = len.min(MAX_IDS_BYTES - self.sizes().0);
            let id = format!("{:0len$}", slots.len());
            let mut transaction = transaction(State::Empty, 5, 0);
            transaction.updated_at_ms = unix_time_ms() + 1;
            self.insert(&mut slots, id.into(), transaction);
        }
    }

    /// Does what InitProducerId does, without validating the id.
    pub(crate) async fn take(&self, id: &str) {
        let slot = self.insert(&mut self.slots.write(), id.into(), Transaction::default());
        let append = {
            let mut transaction = slot.transaction.lock();
            let identity = identity(1 << 40, 0, -1, NONE);
            let event = Event::Initialised { identity, timeout_ms: 1_000 };
            self.change(&slot, &mut transaction, event).ok().unwrap()
        };
        append.await.unwrap();
    }

    /// Runs the steps that follow the decision.
    pub(crate) fn complete_decided(&self, server: &Arc<Server>, id: &str) {
        end::start(server, &self.get(id).unwrap());
    }

    /// Decides the end of a transaction, durably, without the steps that follow. Returns the
    /// producer id and epoch of its markers.
    pub(crate) async fn decide_only(
        &self,
        id: &str,
        outcome: Outcome,
        raises_epoch: bool,
    ) -> (i64, i16) {
        let slot = self.get(id).unwrap();
        let (append, marker) = {
            let mut transaction = slot.transaction.lock();
            let by = transaction.identity.current();
            let End::Prepare(event) = transaction.end(by, outcome, raises_epoch, None).unwrap()
            else {
                panic!("it cannot end");
            };
            let append = self.decide(&slot, &mut transaction, event).ok().flatten().unwrap();
            (append, transaction.marker)
        };
        append.await.unwrap();
        marker
    }
}
