//! The conformance suite of [`Catalog`]. An implementation's tests call [`run`]; each check names
//! the rule that was broken.

use alluvium_wal::LogOffset;
use bytes::Bytes;
use uuid::Uuid;

use super::{
    Catalog, Change, INCARNATIONS_KEPT, Incarnation, ObjectInfo, ObjectRange, Replaced, Snapshot,
    Uploaded,
};
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

/// Runs the suite; `new` creates an empty catalog.
///
/// # Panics
/// At the first rule that is broken.
pub fn run(new: &dyn Fn() -> Box<dyn Catalog>) {
    assert_eq!(new().load().expect("load"), Snapshot::default(), "a new catalog is empty");
    everything_comes_back(&*new());
    a_list_is_applied_in_order_and_atomically(&*new());
    objects_are_added_in_any_order(&*new());
    refusals_change_nothing(&*new());
    only_the_newest_writer_changes_a_stream(&*new());
    trimming_drops_ranges(&*new());
    deleting_drops_everything(&*new());
    neighbours_are_replaced(&*new());
    an_upload_replaces_the_checkpoint(&*new());
    the_uploaded_log_is_the_last_one_committed(&*new());
    the_mark_of_the_wal_only_grows(&*new());
    each_commit_raises_the_version(&*new());
    the_last_runs_are_kept(&*new());
    metadata_is_kept(&*new());
}

/// Fills a catalog with something of everything: streams 0 and 1 with epochs 0 and 3, object 0 in
/// use, object 1 without a range.
pub fn fill(catalog: &dyn Catalog) {
    catalog
        .commit(&[
            Change::BindWal(Uuid::from_u128(7)),
            Change::NextStreamId(StreamId(3)),
            Change::CreateStream { id: StreamId(0), kind: 0 },
            Change::CreateStream { id: StreamId(1), kind: 1 },
            open(1, 3),
            Change::PutMeta { key: "topic/a".into(), value: vec![1, 2] },
        ])
        .expect("create");
    catalog
        .commit(&[
            Change::AddObject(object(0)),
            Change::AddObject(object(1)),
            uploaded(0, 10, Some(range(0, 0, 10))),
            uploaded(1, 5, None),
            Change::LogUploaded(LogOffset(4096)),
        ])
        .expect("upload");
}

fn object(id: u64) -> ObjectInfo {
    ObjectInfo {
        id: ObjectId(id),
        name: format!("objects/{id}"),
        size_bytes: 1020 + id,
        index_position: 900 + id,
        index_bytes: 56,
        index_crc32c: 0xdead_beef,
        created_at_ms: 1,
        generation: u8::try_from(id % 3).expect("below 3"),
        payload_bytes: 800,
    }
}

fn range(object: u64, start: u64, end: u64) -> ObjectRange {
    ObjectRange {
        object: ObjectId(object),
        start: StreamOffset(start),
        end: StreamOffset(end),
        payload_bytes: u64::from(u32::MAX) + 1,
        max_timestamp_ms: -1,
    }
}

fn uploaded(stream: u64, end: u64, range: Option<ObjectRange>) -> Change {
    Change::Uploaded(Uploaded {
        stream: StreamId(stream),
        uploaded_end: StreamOffset(end),
        start: StreamOffset(0),
        checkpoint: Some(Bytes::from(format!("at {end}"))),
        range,
    })
}

fn open(id: u64, epoch: u64) -> Change {
    Change::OpenStream { id: StreamId(id), epoch: StreamEpoch(epoch) }
}

fn delete(id: u64, epoch: u64) -> Change {
    Change::DeleteStream { id: StreamId(id), epoch: StreamEpoch(epoch) }
}

/// A trim by a writer with epoch 0.
fn trim(id: u64, to: u64) -> Change {
    Change::TrimStream { id: StreamId(id), epoch: StreamEpoch(0), to: StreamOffset(to) }
}

fn everything_comes_back(catalog: &dyn Catalog) {
    fill(catalog);
    let found = catalog.load().expect("load");
    assert_eq!(found.wal_id, Some(Uuid::from_u128(7)));
    assert_eq!((found.next_stream_id, found.next_object_id), (3, 2), "counters are kept");
    assert_eq!(found.uploaded_log, LogOffset(4096));
    assert_eq!(found.streams.len(), 2);
    let stream = &found.streams[&StreamId(0)];
    assert_eq!(
        (stream.kind, stream.start, stream.uploaded_end),
        (0, StreamOffset(0), StreamOffset(10))
    );
    assert_eq!(stream.checkpoint.as_deref(), Some(b"at 10".as_slice()));
    assert_eq!(stream.ranges, [range(0, 0, 10)]);
    let other = &found.streams[&StreamId(1)];
    assert_eq!((other.kind, stream.epoch, other.epoch), (1, StreamEpoch(0), StreamEpoch(3)));
    assert_eq!(found.streams[&StreamId(1)].ranges, []);
    let objects: Vec<_> = found.objects.into_values().collect();
    assert_eq!(objects, [object(0), object(1)], "an object without a range is kept");
    assert_eq!(found.meta["topic/a"], [1, 2]);

    catalog.commit(&[Change::RemoveObject(ObjectId(1))]).expect("remove");
    let objects: Vec<_> = catalog.load().expect("load").objects.into_values().collect();
    assert_eq!(objects, [object(0)]);
    catalog.commit(&[Change::RemoveObject(ObjectId(1))]).expect("removing twice is harmless");
    assert_eq!(catalog.load().expect("load").next_object_id, 2, "a used id is not forgotten");
}

/// Ranges 0..10, 10..20, 20..30 and 35..40 of stream 0, in objects 0 and 2 to 4.
fn neighbours_are_replaced(catalog: &dyn Catalog) {
    fill(catalog);
    for (object_id, start, end) in [(2, 10, 20), (3, 20, 30), (4, 35, 40)] {
        let range = range(object_id, start, end);
        catalog
            .commit(&[Change::AddObject(object(object_id)), uploaded(0, end, Some(range))])
            .expect("upload");
    }
    catalog.commit(&[Change::AddObject(object(9))]).expect("an object is added once");
    let replaced = |old: &[u64], new: ObjectRange| {
        let old = old.iter().copied().map(StreamOffset).collect();
        Change::Replaced(Replaced { stream: StreamId(0), old, new })
    };
    let ranges = || catalog.load().expect("load").streams.remove(&StreamId(0)).unwrap().ranges;
    let before = ranges();
    for (change, why) in [
        (replaced(&[], range(9, 10, 20)), "nothing is replaced"),
        (replaced(&[11], range(9, 11, 20)), "no range starts there"),
        (replaced(&[10, 35], range(9, 10, 40)), "they are not neighbours"),
        (replaced(&[20, 10], range(9, 10, 30)), "they are not in order"),
        (replaced(&[35, 40], range(9, 35, 50)), "there are no more"),
        (replaced(&[10, 20], range(9, 10, 31)), "it reaches beyond them"),
        (replaced(&[10, 20], range(9, 9, 30)), "it reaches beyond them"),
        (replaced(&[10, 20], range(9, 20, 20)), "it is empty"),
        (replaced(&[10, 20], range(8, 10, 30)), "there is no such object"),
    ] {
        catalog.commit(&[change]).expect_err(why);
        assert_eq!(ranges(), before, "{why}");
    }
    let no_stream =
        Replaced { stream: StreamId(2), old: vec![StreamOffset(0)], new: range(9, 0, 1) };
    catalog.commit(&[Change::Replaced(no_stream)]).expect_err("there is no such stream");

    catalog.commit(&[replaced(&[10, 20], range(9, 12, 30))]).expect("two neighbours");
    assert_eq!(ranges(), [range(0, 0, 10), range(9, 12, 30), range(4, 35, 40)]);
    catalog.commit(&[replaced(&[35], range(2, 35, 40))]).expect("the last one");
    catalog.commit(&[replaced(&[0, 12, 35], range(3, 0, 40))]).expect("all of them");
    assert_eq!(ranges(), [range(3, 0, 40)]);
    let objects: Vec<_> = catalog.load().expect("load").objects.into_keys().collect();
    assert_eq!(
        objects,
        [0, 1, 2, 3, 4, 9].map(ObjectId),
        "unneeded objects stay until they are removed"
    );
    catalog.commit(&[uploaded(0, 50, Some(range(4, 40, 50)))]).expect("uploads continue behind it");
    catalog.commit(&[trim(0, 40)]).expect("trim");
    assert_eq!(ranges(), [range(4, 40, 50)]);
}

/// Two writers were given ids, and the one with the later id finishes first.
fn objects_are_added_in_any_order(catalog: &dyn Catalog) {
    fill(catalog);
    for (id, next) in [(5, 6), (2, 6), (4, 6), (6, 7)] {
        catalog.commit(&[Change::AddObject(object(id))]).expect("no other object has this id");
        assert_eq!(catalog.load().expect("load").next_object_id, next, "greater than all of them");
    }
    catalog.commit(&[uploaded(0, 20, Some(range(5, 10, 20)))]).expect("upload");
    catalog.commit(&[uploaded(0, 30, Some(range(2, 20, 30)))]).expect("upload");
    let before = catalog.load().expect("load");
    assert_eq!(before.streams[&StreamId(0)].ranges[1..], [range(5, 10, 20), range(2, 20, 30)]);
    catalog.commit(&[Change::AddObject(object(2))]).expect_err("there is an object 2");
    assert_eq!(catalog.load().expect("load"), before);
    let same_list = [Change::AddObject(object(3)), Change::AddObject(object(3))];
    catalog.commit(&same_list).expect_err("the second change sees the first");
    assert_eq!(catalog.load().expect("load"), before);
}

fn a_list_is_applied_in_order_and_atomically(catalog: &dyn Catalog) {
    catalog
        .commit(&[
            Change::NextStreamId(StreamId(1)),
            Change::CreateStream { id: StreamId(0), kind: 0 },
        ])
        .expect("the second change sees the first");
    let before = catalog.load().expect("load");
    let failing = [
        Change::PutMeta { key: "k".into(), value: vec![1] },
        Change::NextStreamId(StreamId(9)),
        trim(0, 4),
        delete(8, 0),
    ];
    catalog.commit(&failing).expect_err("there is no stream 8");
    assert_eq!(catalog.load().expect("load"), before, "a list that fails changes nothing");
}

fn refusals_change_nothing(catalog: &dyn Catalog) {
    fill(catalog);
    catalog.commit(&[trim(0, 3)]).expect("trim");
    let before = catalog.load().expect("load");
    let refused = [
        Change::CreateStream { id: StreamId(0), kind: 0 },
        Change::CreateStream { id: StreamId(3), kind: 0 },
        delete(2, 0),
        trim(2, 1),
        open(2, 1),
        open(1, 2),
        Change::NextStreamId(StreamId(2)),
        uploaded(2, 1, None),
        uploaded(1, 4, None),
        uploaded(1, 20, Some(range(5, 5, 20))),
        uploaded(0, 10, Some(range(0, 0, 10))),
        Change::AddObject(object(0)),
        Change::AddObject(ObjectInfo { name: "another".into(), ..object(0) }),
    ];
    for change in refused {
        catalog
            .commit(std::slice::from_ref(&change))
            .expect_err(&format!("{change:?} must be refused"));
        assert_eq!(
            catalog.load().expect("load"),
            before,
            "{change:?} was refused and yet changed something"
        );
    }
}

fn only_the_newest_writer_changes_a_stream(catalog: &dyn Catalog) {
    fill(catalog);
    let row = || catalog.load().expect("load").streams[&StreamId(0)].clone();
    let (id, to) = (StreamId(0), StreamOffset(9));
    let trim = |epoch| Change::TrimStream { id, epoch: StreamEpoch(epoch), to };
    let mut before = row();
    for (epoch, newest) in [(0, 0), (5, 5), (5, 5), (4, 5), (0, 5), (u64::MAX, u64::MAX)] {
        let opened = catalog.commit(&[open(0, epoch)]);
        assert_eq!(opened.is_ok(), epoch == newest, "epoch {epoch} after {newest}");
        before.epoch = StreamEpoch(newest);
        assert_eq!(row(), before, "nothing else changes");
    }
    for epoch in [0, 5, u64::MAX - 1] {
        catalog.commit(&[trim(epoch)]).expect_err("a trim of an older epoch");
        catalog.commit(&[delete(0, epoch)]).expect_err("a deletion of an older epoch");
        assert_eq!(row(), before);
    }
    catalog.commit(&[delete(1, 4)]).expect_err("it was never opened with epoch 4");
    catalog.commit(&[uploaded(0, 20, None)]).expect("an upload has no epoch");
    catalog.commit(&[trim(u64::MAX)]).expect("the stream's writer can");
    let expected = (StreamEpoch(u64::MAX), to, StreamOffset(20));
    let found = row();
    assert_eq!((found.epoch, found.start, found.uploaded_end), expected, "the epoch stays");
    catalog.commit(&[open(1, 4), delete(1, 3)]).expect_err("the second change sees the first");
    catalog.commit(&[open(1, 4), delete(1, 4)]).expect("the second change sees the first");
    catalog.commit(&[open(1, 9)]).expect_err("stream 1 was deleted");
}

fn trimming_drops_ranges(catalog: &dyn Catalog) {
    fill(catalog);
    catalog
        .commit(&[
            Change::AddObject(object(2)),
            uploaded(0, 20, Some(range(2, 10, 20))),
            Change::AddObject(object(3)),
            uploaded(0, 30, Some(range(3, 25, 30))),
        ])
        .expect("upload");
    catalog.commit(&[uploaded(0, 40, Some(range(3, 29, 40)))]).expect_err("ranges do not overlap");
    let starts = |to: u64| {
        let start = catalog.load().expect("load").streams[&StreamId(0)].start;
        catalog.commit(&[trim(0, to)]).expect("trim");
        let row = catalog.load().expect("load").streams.remove(&StreamId(0)).expect("stream 0");
        assert_eq!(row.start, start.max(StreamOffset(to)), "a start never goes back");
        row.ranges.iter().map(|range| range.start.0).collect::<Vec<_>>()
    };
    assert_eq!(starts(9), [0, 10, 25], "a range is kept while one of its offsets is");
    assert_eq!(starts(10), [10, 25]);
    assert_eq!(starts(10), [10, 25], "trimming to the start is harmless");
    assert_eq!(starts(29), [25]);
    assert_eq!(starts(30), [0; 0]);
    assert_eq!(starts(35), [0; 0], "a start may pass the uploaded end");
    assert_eq!(starts(31), [0; 0], "and stays where it is");

    // An upload's start may be older than the last trim; a range that is already trimmed is not
    // added.
    let upload = |end, range| catalog.commit(&[uploaded(0, end, Some(range))]).expect("upload");
    upload(35, range(3, 30, 35));
    upload(45, range(2, 35, 45));
    let row = catalog.load().expect("load").streams.remove(&StreamId(0)).expect("stream 0");
    assert_eq!((row.start, row.uploaded_end), (StreamOffset(35), StreamOffset(45)));
    assert_eq!(row.ranges, [range(2, 35, 45)]);
}

fn deleting_drops_everything(catalog: &dyn Catalog) {
    fill(catalog);
    catalog.commit(&[delete(0, 0), delete(1, 3)]).expect("delete");
    let found = catalog.load().expect("load");
    assert!(found.streams.is_empty());
    assert_eq!(found.objects.len(), 2, "objects stay until they are removed");
    assert_eq!(found.next_stream_id, 3, "stream ids are not reused");
}

fn an_upload_replaces_the_checkpoint(catalog: &dyn Catalog) {
    fill(catalog);
    let without = Uploaded {
        stream: StreamId(1),
        uploaded_end: StreamOffset(5),
        start: StreamOffset(5),
        checkpoint: None,
        range: None,
    };
    catalog.commit(&[Change::Uploaded(without)]).expect("upload");
    let row = &catalog.load().expect("load").streams[&StreamId(1)];
    assert_eq!(
        (row.start, &row.checkpoint),
        (StreamOffset(5), &None),
        "no checkpoint removes the old one"
    );
}

fn the_uploaded_log_is_the_last_one_committed(catalog: &dyn Catalog) {
    for to in [10, 9, 10, u64::MAX, 0] {
        catalog.commit(&[Change::LogUploaded(LogOffset(to))]).expect("never refused");
        assert_eq!(catalog.load().expect("load").uploaded_log, LogOffset(to));
    }
}

fn the_mark_of_the_wal_only_grows(catalog: &dyn Catalog) {
    for (mark, kept) in [(10, 10), (9, 10), (10, 10), (u64::MAX, u64::MAX)] {
        catalog.commit(&[Change::WalMarked(mark)]).expect("never refused");
        assert_eq!(catalog.load().expect("load").wal_mark, kept);
    }
}

fn each_commit_raises_the_version(catalog: &dyn Catalog) {
    let lists = [
        vec![],
        vec![Change::NextStreamId(StreamId(1)), Change::LogUploaded(LogOffset(1))],
        vec![Change::DeleteMeta("nothing".into())],
    ];
    for (before, list) in (0..).zip(lists) {
        assert_eq!(catalog.load().expect("load").version, before);
        assert_eq!(
            catalog.commit(&list).expect("commit"),
            before + 1,
            "the version of this commit"
        );
    }
    catalog.commit(&[delete(0, 0)]).expect_err("there is no stream 0");
    assert_eq!(catalog.load().expect("load").version, 3, "a refused list raises no version");
}

fn the_last_runs_are_kept(catalog: &dyn Catalog) {
    let count = INCARNATIONS_KEPT + 2;
    let mut all = Vec::new();
    for (ids, ahead) in [(0..2, 1000), (2..count - 1, 1), (count - 1..count, 0)] {
        let before = catalog.load().expect("load").version;
        let version = before + ahead;
        let mut begin = Vec::new();
        for id in ids.map(|id| Uuid::from_u128(id as u128)) {
            // Most of them in one commit, to save time.
            let after_version = if begin.is_empty() { before } else { before.max(version - 1) };
            all.push(Incarnation { after_version, id });
            begin.push(Change::BeginIncarnation { id, version });
        }
        let now = catalog.commit(&begin).expect("never refused");
        assert_eq!(now, version.max(before + 1), "a version never goes back");
        assert_eq!(catalog.load().expect("load").version, now);
    }
    let incarnations = catalog.load().expect("load").incarnations;
    assert!(incarnations == all[2..], "in order, each with the version before it");
}

fn metadata_is_kept(catalog: &dyn Catalog) {
    let put = |key: &str, value: &[u8]| Change::PutMeta { key: key.into(), value: value.into() };
    catalog
        .commit(&[put("b", b"1"), put("a", b"2"), put("ä", b""), put("b", b"3"), put("", b"4")])
        .expect("put");
    catalog
        .commit(&[Change::DeleteMeta("a".into()), Change::DeleteMeta("nothing".into())])
        .expect("delete");
    let meta = catalog.load().expect("load").meta;
    let meta: Vec<_> = meta.iter().map(|(key, value)| (key.as_str(), value.as_slice())).collect();
    assert_eq!(meta, [("", b"4".as_slice()), ("b", b"3"), ("ä", b"")]);
}
