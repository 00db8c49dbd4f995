//! State after records of its stream were lost to damage.

use alluvium_stream::{Batch, Replay};

use super::*;
use crate::groups::offsets::Record;
use crate::state_table::{Table, decode, fold, load};

/// The state that a start and a fold derive from records at these offsets in a stream that ends at
/// `end`.
pub(in crate::groups) fn after<T: Table + PartialEq + std::fmt::Debug>(
    records: &[(u64, Bytes)],
    end: u64,
) -> T {
    let batch = |(base, payload): &(u64, Bytes)| Batch {
        base: StreamOffset(*base),
        count: 1,
        max_timestamp_ms: -1,
        payload: payload.clone(),
    };
    let batches: Vec<Batch> = records.iter().map(batch).collect();
    let (checkpoint, checkpoint_end, end) = (None, StreamOffset(0), StreamOffset(end));
    let replay = Replay { checkpoint, checkpoint_end, batches, end };
    let loaded: T = load(&replay).unwrap();
    let mut folded: Option<Vec<u8>> = None;
    let mut from = checkpoint_end;
    for batch in replay.batches.chunks(1) {
        let to = batch[0].end();
        folded = fold::<T>(from..to, folded.as_deref(), batch);
        from = to;
    }
    // Lost offsets after the last batch are uploaded on their own.
    let folded = fold::<T>(from..end, folded.as_deref(), &[]);
    assert_eq!(decode::<T>(&folded.unwrap()).unwrap(), loaded);
    loaded
}

#[test]
fn members_from_before_a_loss_join_again() {
    // Version, kind, name, one change; its kind, epoch 2, hash.
    let changed =
        |name| Bytes::from([&[1, 1, 1, 0, name, 1, 0, 0, 0, 1, 2, 0, 0, 0][..], &[9; 8]].concat());
    let names = |states: GroupStates| states.0.into_keys().collect::<Vec<_>>();
    let records = [(0, changed(b'a')), (2, changed(b'b'))];
    assert_eq!(names(after(&records, 3)), ["b"]);
    assert_eq!(names(after(&records, 4)), [""; 0]);
    let whole = [(0, changed(b'a')), (1, changed(b'b'))];
    assert_eq!(names(after(&whole, 2)), ["a", "b"]);

    // Version, kind, name; generation, three texts, no member.
    let kept = |name| Bytes::from([&[1, 1, 1, 0, name][..], &[0; 4 + 3 * 2 + 4]].concat());
    let names = |kept: PersistedGroups| kept.0.into_keys().collect::<Vec<_>>();
    let records = [(0, kept(b'a')), (2, kept(b'b'))];
    assert_eq!(names(after(&records, 3)), ["b"]);
    assert_eq!(names(after(&records, 4)), [""; 0]);
    let whole = [(0, kept(b'a')), (1, kept(b'b'))];
    assert_eq!(names(after(&whole, 2)), ["a", "b"]);
}

#[test]
fn committed_offsets_from_before_a_loss_stay() {
    let commit = |offset| {
        let (partition, leader_epoch, metadata) = (0, -1, String::new());
        let position = Position { partition, offset, leader_epoch, metadata };
        let topics = vec![("t".to_owned(), vec![position])];
        let record = Record::Commit { group: "g".to_owned(), committed_at_ms: 1, topics };
        Bytes::from(record.encode())
    };
    let offset = |table: Offsets| table.get("g", "t", 0).unwrap().offset;
    assert_eq!(offset(after(&[(0, commit(5)), (2, commit(7))], 3)), 7);
    assert_eq!(offset(after(&[(0, commit(5))], 3)), 5);
}
