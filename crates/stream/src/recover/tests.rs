use alluvium_wal::LogOffset;
use uuid::Uuid;

use super::*;
use crate::catalog::ObjectRange;
use crate::chain::{BodyHeader, ChainObject, Gaps, Head, encode_recorded};
use crate::types::StreamEpoch;

/// The version up to which the chain of these tests has the lists of changes.
const COVERS: u64 = (1 << 32) + 4;

/// Stream 0 is uploaded up to 10, stream 1 up to 5, stream 2 was deleted, 3 is the next id.
fn state() -> ChainState {
    let uploaded = |end| ChainStream { uploaded_end: StreamOffset(end), ..ChainStream::default() };
    let object = ChainObject {
        id: ObjectId(7),
        nonce: Uuid::from_u128(7),
        size_bytes: 100,
        index_position: 50,
        index_bytes: 20,
        index_crc32c: 1,
        created_at_ms: 0,
        generation: 0,
        payload_bytes: 40,
        format: 1,
    };
    let range = ObjectRange {
        object: object.id,
        start: StreamOffset(0),
        end: StreamOffset(10),
        payload_bytes: 40,
        max_timestamp_ms: 0,
    };
    let header = BodyHeader {
        store: Uuid::from_u128(1),
        wal: Uuid::from_u128(1),
        incarnation: Uuid::from_u128(2),
        version: COVERS,
        epoch: 1,
        opening: 1,
        node: 0,
        is_clean: false,
        written_at_ms: 0,
        covers: COVERS,
        cut: LogOffset(0),
        wal_mark: 0,
        next_stream: StreamId(3),
    };
    ChainState {
        head: Head { number: 2, link: 0, term: 0, is_snapshot: false },
        header,
        reserved: StreamId(1 << 20),
        largest_count: 16 << 10,
        streams: BTreeMap::from([
            (StreamId(0), ChainStream { ranges: vec![range], ..uploaded(10) }),
            (StreamId(1), uploaded(5)),
        ]),
        objects: BTreeMap::from([(object.id, object)]),
        meta: BTreeMap::from([("kept".into(), Bytes::from_static(b"1"))]),
        incarnations: Vec::new(),
        gaps: Gaps::new(),
        hints: Hints::new(),
    }
}

fn replay() -> Replay {
    Replay::new(state(), LogCache::new(1 << 20)).unwrap()
}

fn in_log(payload: Vec<u8>) -> Record {
    Record { offset: LogOffset(0), end: LogOffset(1), epoch: 1, payload: payload.into() }
}

fn record(stream: u64, base: u64, count: u32) -> Record {
    let header = record::encode_header(StreamId(stream), StreamOffset(base), count, 0, 4);
    in_log([header.as_slice(), b"1234"].concat())
}

/// Returns a list of changes; its version and the one before it count from [`COVERS`].
fn list(version: u64, before: u64, next_stream: u64, changes: &[ChainChange]) -> Record {
    in_log(record::encode_catalog(&CatalogRecord {
        version: COVERS + version,
        before: COVERS + before,
        next_stream: StreamId(next_stream),
        count: changes.len() as u32,
        changes: encode_recorded(changes).into(),
    }))
}

/// Returns a list of ends after the list of changes with this version.
fn ends(version: u64) -> Record {
    let (at, version) = (LogOffset(0), COVERS + version);
    in_log(record::encode_ends(at..at, &[], version, 1000).remove(0))
}

fn create(id: u64) -> ChainChange {
    ChainChange::CreateStream { id: StreamId(id), kind: KIND_LOG, label: Bytes::new() }
}

fn delete(id: u64) -> ChainChange {
    ChainChange::DeleteStream { id: StreamId(id), epoch: StreamEpoch(0) }
}

fn versions(replay: &Replay) -> Vec<u64> {
    replay.lists.iter().map(|list| list.version - COVERS).collect()
}

#[test]
fn each_record_is_one_case() {
    let mut replay = replay();
    replay.visit(&record(0, 0, 10)).unwrap();
    replay.visit(&record(0, 9, 1)).unwrap();
    replay.visit(&record(2, 0, 1)).unwrap();
    assert_eq!((replay.skipped_uploaded, replay.skipped_deleted, replay.batches), (2, 1, 0));

    replay.visit(&record(0, 10, 2)).unwrap();
    replay.visit(&record(1, 5, 1)).unwrap();
    replay.visit(&record(0, 12, 1)).unwrap();
    assert_eq!(
        (replay.batches, replay.payload_bytes, replay.cache.pinned_bytes()),
        (3, 12, 3 * (4 + BATCH_OVERHEAD_BYTES))
    );
    assert_eq!(replay.gaps, []);

    replay.visit(&record(0, 20, 1)).unwrap();
    let offsets = StreamOffset(13)..StreamOffset(20);
    let gap = Gap { stream: StreamId(0), offsets, cause: GapCause::Lost };
    assert_eq!(replay.gaps, [gap]);

    for (refused, why) in [
        (record(0, 20, 1), "a duplicate"),
        (record(0, 13, 1), "in a gap, out of order"),
        (record(1, 4, 3), "across the uploaded end"),
    ] {
        assert!(replay.visit(&refused).is_err(), "{why}");
    }
    assert_eq!(replay.batches, 4, "a refused record changes nothing");
    assert_eq!((replay.lost_lists(), replay.next_stream_id), (0, 3));
}

#[test]
fn lists_of_changes_are_applied_in_order_unless_the_chain_has_them() {
    let mut replay = replay();
    // The chain has it, so it knows better: stream 5 was deleted since.
    let old = encode_recorded(&[create(5)]);
    let old = CatalogRecord {
        version: COVERS,
        before: 0,
        next_stream: StreamId(3),
        count: 1,
        changes: old.into(),
    };
    replay.visit(&in_log(record::encode_catalog(&old))).unwrap();
    assert!(!replay.streams.contains_key(&StreamId(5)) && replay.lists.is_empty());

    let put = |key: &str, value: &'static [u8]| ChainChange::PutMeta {
        key: key.into(),
        value: Bytes::from_static(value),
    };
    let first = [create(3), put("a", b"1"), put("b", b"2"), put("a", b"3")];
    replay.visit(&list(1, 0, 5, &first)).unwrap();
    replay.visit(&record(3, 0, 8)).unwrap();
    let (id, epoch) = (StreamId(3), StreamEpoch(4));
    let second = [
        ChainChange::OpenStream { id, epoch },
        ChainChange::TrimStream { id, epoch, to: StreamOffset(6) },
        ChainChange::DeleteMeta { key: "b".into() },
        ChainChange::TrimStream { id: StreamId(0), epoch, to: StreamOffset(10) },
        delete(1),
    ];
    replay.visit(&list(3, 1, 5, &second)).unwrap();
    replay.visit(&record(3, 8, 1)).unwrap();
    replay.visit(&record(1, 9, 1)).unwrap();
    let (kind, tail) = &replay.streams[&id];
    assert_eq!((*kind, tail.epoch, tail.start.0, tail.next.0), (KIND_LOG, epoch, 6, 9));
    assert!(!replay.streams.contains_key(&StreamId(1)));
    assert_eq!((replay.skipped_deleted, replay.lost_lists(), &replay.orphans), (1, 0, &vec![]));
    let meta: Vec<_> = replay.meta.iter().map(|(key, value)| (key.as_str(), &value[..])).collect();
    assert_eq!(meta, [("a", &b"3"[..]), ("kept", b"1")]);
    assert_eq!(replay.objects.live_count(), 0, "nothing is left in the object");
    assert_eq!(
        (versions(&replay), replay.recorded - COVERS, replay.next_stream_id),
        (vec![1, 3], 3, 5)
    );
    assert_eq!(replay.lists[0].changes, first);
    assert_eq!(replay.lists[1].changes, second);
}

#[test]
fn a_list_of_changes_that_was_not_read_is_counted_once() {
    let mut replay = replay();
    let one = [create(3)];
    replay.visit(&list(1, 0, 4, &one)).unwrap();
    replay.visit(&ends(1)).unwrap();
    assert_eq!(replay.lost_lists(), 0);
    replay.visit(&ends(2)).unwrap();
    assert_eq!(replay.lost_lists(), 1, "the list of ends states its version");
    replay.visit(&ends(2)).unwrap();
    replay.visit(&list(5, 2, 9, &[create(8)])).unwrap();
    assert_eq!(replay.lost_lists(), 1);
    replay.visit(&list(7, 6, 9, &[delete(8)])).unwrap();
    assert_eq!((replay.lost_lists(), versions(&replay)), (2, vec![1, 5, 7]));
    assert_eq!(replay.next_stream_id, 9, "ids that were given to others are not used again");

    let mut replay = self::replay();
    replay.visit(&ends(0)).unwrap();
    assert_eq!(replay.lost_lists(), 0, "the chain has it");
}

/// The creation is in the next delta, too: the chain would pass over everything else of the stream.
#[test]
fn a_stream_whose_creation_is_lost_is_created_for_its_batches() {
    let mut replay = replay();
    // The list with version 2 is lost.
    replay.visit(&record(6, 0, 2)).unwrap();
    replay.visit(&record(4, 5, 1)).unwrap();
    replay.visit(&record(6, 2, 2)).unwrap();
    let offsets = StreamOffset(0)..StreamOffset(5);
    let gap = Gap { stream: StreamId(4), offsets, cause: GapCause::Lost };
    assert_eq!(replay.gaps, [gap]);
    assert_eq!((replay.batches, &replay.orphans[..]), (3, &[StreamId(6), StreamId(4)][..]));
    assert_eq!(replay.lost_lists(), 1, "the batches show it");
    let trim =
        ChainChange::TrimStream { id: StreamId(6), epoch: StreamEpoch(0), to: StreamOffset(3) };
    replay.visit(&list(3, 2, 8, std::slice::from_ref(&trim))).unwrap();
    assert_eq!(replay.lost_lists(), 1);
    // So is the one with version 4. The first batch of its stream comes after a later list.
    replay.visit(&list(5, 4, 10, &[delete(6)])).unwrap();
    replay.visit(&record(8, 0, 1)).unwrap();
    replay.visit(&list(6, 5, 10, &[delete(8)])).unwrap();
    replay.visit(&record(8, 1, 1)).unwrap();
    replay.visit(&record(9, 0, 1)).unwrap();
    assert_eq!((replay.lost_lists(), replay.next_stream_id), (2, 10));
    assert_eq!((replay.batches, replay.skipped_deleted), (2, 4));

    // In the order in which they were applied here.
    assert_eq!(versions(&replay), [1, 3, 5, 6]);
    let changes: Vec<_> = replay.lists.iter().map(|list| list.changes.clone()).collect();
    let expected = [
        vec![create(6), create(4)],
        vec![trim],
        vec![delete(6), create(8)],
        vec![delete(8), create(9)],
    ];
    assert_eq!(changes, expected);
    let mut ids: Vec<_> = replay.streams.keys().map(|id| id.0).collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 4, 9]);
}

/// A batch of a stream that was deleted in the log is no sign of a lost creation.
#[test]
fn batches_of_a_stream_that_the_log_has_deleted_are_skipped() {
    let mut replay = replay();
    replay.visit(&list(1, 0, 4, &[create(3)])).unwrap();
    replay.visit(&record(3, 0, 1)).unwrap();
    replay.visit(&list(2, 1, 4, &[delete(3)])).unwrap();
    replay.visit(&record(3, 1, 1)).unwrap();
    assert_eq!((replay.skipped_deleted, replay.lost_lists()), (2, 0), "before and after it");
    assert_eq!((replay.batches, replay.payload_bytes, replay.cache.pinned_bytes()), (0, 0, 0));
    assert!(replay.orphans.is_empty() && !replay.streams.contains_key(&StreamId(3)));
}

#[test]
fn a_range_in_an_unknown_object_is_refused() {
    let mut state = state();
    state.objects.clear();
    let Err(error) = Replay::new(state, LogCache::new(1 << 20)) else { panic!("it is accepted") };
    assert!(error.to_string().contains("object 7, which is not in the catalog"), "{error}");
}
