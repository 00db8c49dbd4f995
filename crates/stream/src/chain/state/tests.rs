use alluvium_device::sim::Random;
use alluvium_wal::LogOffset;
use uuid::Uuid;

use super::super::Recorded;
use super::super::body::Body;
use super::*;

const STORE: Uuid = Uuid::from_u128(1);
const WAL: Uuid = Uuid::from_u128(2);

/// Builds a chain with few streams and objects, so that changes meet.
pub(in crate::chain) struct Builder {
    pub(in crate::chain) random: Random,
    /// The first object.
    pub(in crate::chain) first: Entry,
    pub(in crate::chain) state: ChainState,
    next_stream: u64,
    next_object: u64,
}

fn fence(state: Option<&ChainState>, own: Vec<ChainChange>) -> Entry {
    let (head, then) = match state {
        Some(state) => (state.head, Some(&state.header)),
        None => (Head { number: 0, link: 0, term: 0, is_snapshot: false }, None),
    };
    let opening = then.map_or(1, |then| then.opening + 1);
    let header = BodyHeader {
        store: STORE,
        wal: WAL,
        incarnation: Uuid::new_v4(),
        version: u64::from(opening) << 32,
        epoch: opening,
        opening,
        node: 1,
        is_clean: false,
        written_at_ms: 0,
        covers: then.map_or(0, |then| then.covers),
        cut: then.map_or(LogOffset(0), |then| then.cut),
        wal_mark: then.map_or(0, |then| then.wal_mark),
        next_stream: then.map_or(StreamId(0), |then| then.next_stream),
    };
    let hints = state.map_or_else(Hints::new, |state| state.hints.clone());
    Entry {
        number: head.number + 1,
        nonce: Uuid::new_v4(),
        previous: head.link,
        term: head.term,
        kind: ObjectKind::Fence,
        body: Body { header, recorded: Vec::new(), own, hints },
    }
}

fn delta(state: &ChainState, recorded: Vec<Recorded>, own: Vec<ChainChange>) -> Entry {
    let version = recorded.last().map_or(state.header.version, |last| last.version) + 1;
    let header = BodyHeader {
        version,
        covers: version,
        epoch: state.header.opening,
        ..state.header.clone()
    };
    let hints = state.hints.clone();
    Entry {
        number: state.head.number + 1,
        nonce: Uuid::new_v4(),
        previous: state.head.link,
        term: state.head.term,
        kind: ObjectKind::Delta,
        body: Body { header, recorded, own, hints },
    }
}

impl Builder {
    pub(in crate::chain) fn new(seed: u64) -> Self {
        let incarnation = ChainChange::BeginIncarnation(Uuid::from_u128(seed.into()));
        let first = fence(None, vec![incarnation]);
        let state = ChainState::first(first.clone()).unwrap();
        Self { random: Random::new(seed), first, state, next_stream: 0, next_object: 0 }
    }

    fn stream(&mut self) -> StreamId {
        StreamId(self.random.below(self.next_stream + 2))
    }

    fn recorded(&mut self) -> ChainChange {
        let (id, epoch) = (self.stream(), StreamEpoch(self.random.below(4)));
        match self.random.below(6) {
            0 | 1 => {
                self.next_stream += 1;
                let (id, label) = (StreamId(self.next_stream), Bytes::from_static(b"label"));
                ChainChange::CreateStream { id, kind: self.random.below(2) as u8, label }
            }
            2 if self.random.below(4) == 0 => ChainChange::DeleteStream { id, epoch },
            2 => ChainChange::OpenStream { id, epoch },
            3 => {
                let to = StreamOffset(self.random.below(300));
                ChainChange::TrimStream { id, epoch, to }
            }
            4 => {
                let key = format!("key {}", self.random.below(9));
                let value = vec![self.random.below(256) as u8; self.random.index(50)].into();
                ChainChange::PutMeta { key, value }
            }
            _ => ChainChange::DeleteMeta { key: format!("key {}", self.random.below(9)) },
        }
    }

    /// An object, and the part of some streams in it.
    fn upload(&mut self) -> Vec<ChainChange> {
        self.next_object += 1;
        let object = ChainObject {
            id: ObjectId(self.next_object),
            nonce: Uuid::from_u128(self.next_object.into()),
            size_bytes: 1000,
            index_position: 900,
            index_bytes: 50,
            index_crc32c: 1,
            created_at_ms: 5,
            generation: 0,
            payload_bytes: 800,
            format: 1,
        };
        let mut changes = vec![ChainChange::AddObject(object)];
        for _ in 0..self.random.below(4) {
            let id = self.stream();
            let from = self.state.streams.get(&id).map_or(0, |stream| stream.uploaded_end.0);
            let end = StreamOffset(from + 1 + self.random.below(40));
            let range = ObjectRange {
                object: ObjectId(self.next_object),
                start: StreamOffset(from),
                end,
                payload_bytes: 7,
                max_timestamp_ms: -1,
            };
            changes.push(ChainChange::Uploaded(Uploaded {
                stream: id,
                uploaded_end: end,
                start: StreamOffset(0),
                checkpoint: (self.random.below(2) == 0).then(|| Bytes::from_static(b"state")),
                range: Some(range),
            }));
        }
        changes
    }

    /// One range for two or more neighbours of a stream.
    fn compaction(&mut self) -> Option<ChainChange> {
        let id = self.stream();
        let stream = self.state.streams.get(&id).filter(|it| it.ranges.len() > 1)?;
        let first = self.random.index(stream.ranges.len() - 1);
        let (start, last) = (stream.ranges[first].start, &stream.ranges[first + 1]);
        let new = ObjectRange { start, ..last.clone() };
        let old = vec![start, last.start];
        Some(ChainChange::Replaced(Replaced { stream: id, old, new }))
    }

    /// Returns the next object of the chain, which is not applied.
    pub(in crate::chain) fn next(&mut self) -> Entry {
        if self.random.below(8) == 0 {
            let mut own = vec![ChainChange::BeginIncarnation(Uuid::new_v4())];
            if self.random.below(2) == 0 {
                let (stream, from) = (self.stream(), StreamOffset(self.random.below(300)));
                own.push(ChainChange::Gap { stream, offsets: from..StreamOffset(from.0 + 9) });
            }
            return fence(Some(&self.state), own);
        }
        let mut recorded = Vec::new();
        for version in 1..=self.random.below(3) {
            let version = self.state.header.version + version;
            let changes = (0..=self.random.below(3)).map(|_| self.recorded()).collect();
            recorded.push(Recorded { version, changes });
        }
        let mut own = Vec::new();
        match self.random.below(4) {
            0 | 1 => own = self.upload(),
            2 => own.extend(self.compaction()),
            _ => own.push(ChainChange::ReserveStreams(StreamId(self.next_stream + 1000))),
        }
        let mut entry = delta(&self.state, recorded, own);
        let hint = (self.stream(), StreamOffset(self.random.below(1000)));
        entry.body.hints = [hint].into();
        entry
    }
}

#[test]
fn ranges_follow_one_another_and_reach_no_further_than_the_uploaded_end() {
    let (mut ranges, mut gaps) = (0, 0);
    for seed in 0..200 {
        let mut builder = Builder::new(seed);
        for _ in 0..60 {
            let entry = builder.next();
            builder.state.apply(entry).unwrap();
            for stream in builder.state.streams.values() {
                assert!(stream.ranges.windows(2).all(|two| two[0].end <= two[1].start));
                assert!(stream.ranges.iter().all(|range| range.end > stream.start), "{stream:?}");
                let last = stream.ranges.last().map_or(StreamOffset(0), |last| last.end);
                assert!(last <= stream.uploaded_end);
            }
            for ((id, _), end) in &builder.state.gaps {
                assert!(builder.state.streams[id].start < *end, "a gap that was passed");
            }
            ranges = ranges.max(builder.state.streams.values().map(|it| it.ranges.len()).sum());
            gaps = gaps.max(builder.state.gaps.len());
        }
    }
    assert!(ranges > 10 && gaps > 1, "{ranges} ranges, {gaps} gaps");
}

#[test]
fn a_change_of_what_is_gone_is_passed_over() {
    let mut state = ChainState::first(fence(None, Vec::new())).unwrap();
    let (stream, range) = (
        StreamId(9),
        ObjectRange {
            object: ObjectId(1),
            start: StreamOffset(0),
            end: StreamOffset(10),
            payload_bytes: 1,
            max_timestamp_ms: 1,
        },
    );
    let uploaded = Uploaded {
        stream,
        uploaded_end: StreamOffset(10),
        start: StreamOffset(0),
        checkpoint: None,
        range: Some(range.clone()),
    };
    let replaced = Replaced { stream, old: vec![StreamOffset(0)], new: range.clone() };
    let own = vec![
        ChainChange::Uploaded(uploaded.clone()),
        ChainChange::Replaced(replaced.clone()),
        ChainChange::RemoveObject(ObjectId(8)),
    ];
    let changes = vec![
        ChainChange::DeleteStream { id: stream, epoch: StreamEpoch(0) },
        ChainChange::TrimStream { id: stream, epoch: StreamEpoch(0), to: StreamOffset(3) },
        ChainChange::OpenStream { id: stream, epoch: StreamEpoch(3) },
        ChainChange::DeleteMeta { key: "a".into() },
    ];
    let version = state.header.version + 1;
    let entry = delta(&state, vec![Recorded { version, changes }], own);
    state.apply(entry).unwrap();
    assert!(state.streams.is_empty());

    // The upload of a stream that was trimmed past it, and the replacement of trimmed ranges.
    let create = ChainChange::CreateStream { id: stream, kind: 0, label: Bytes::new() };
    let trim = |to| ChainChange::TrimStream { id: stream, epoch: StreamEpoch(0), to };
    for (to, ranges) in [(StreamOffset(4), vec![range.clone()]), (StreamOffset(10), vec![])] {
        for own in [
            vec![ChainChange::Uploaded(uploaded.clone())],
            vec![ChainChange::Replaced(replaced.clone())],
        ] {
            let mut state = state.clone();
            let changes = vec![create.clone(), trim(to)];
            let version = state.header.version + 1;
            let entry = delta(&state, vec![Recorded { version, changes }], own);
            state.apply(entry).unwrap();
            assert_eq!(state.streams[&stream].ranges, ranges);
        }
    }
}

#[test]
fn only_the_next_object_of_the_chain_is_applied() {
    let first = Entry { term: 5, ..fence(None, Vec::new()) };
    let state = ChainState::first(first).unwrap();
    let next = delta(&state, Vec::new(), Vec::new());
    let take_over = fence(Some(&state), Vec::new());
    type Change = Box<dyn Fn(&mut Entry)>;
    let of_delta: [Change; 9] = [
        Box::new(|entry| entry.number += 1),
        Box::new(|entry| entry.previous ^= 1),
        Box::new(|entry| entry.term += 1),
        Box::new(|entry| entry.body.header.store = WAL),
        Box::new(|entry| entry.body.header.wal = STORE),
        Box::new(|entry| entry.body.header.incarnation = STORE),
        Box::new(|entry| entry.body.header.version -= 1),
        Box::new(|entry| entry.body.header.opening += 1),
        Box::new(|entry| entry.body.recorded = vec![Recorded { version: 0, changes: vec![] }]),
    ];
    let of_fence: [Change; 3] = [
        Box::new(|entry| entry.term -= 1),
        Box::new(|entry| entry.body.header.opening -= 1),
        Box::new(|entry| entry.body.header.version = 1 << 32),
    ];
    let with = |entry: &Entry, change: Change| {
        let mut entry = entry.clone();
        change(&mut entry);
        entry
    };
    let wrong = of_delta.into_iter().map(|change| with(&next, change));
    let wrong = wrong.chain(of_fence.into_iter().map(|change| with(&take_over, change)));
    for (at, entry) in wrong.enumerate() {
        let mut changed = state.clone();
        assert!(changed.apply(entry).is_err(), "case {at}");
        assert_eq!(changed, state, "case {at}");
    }
    state.clone().apply(next.clone()).unwrap();
    let mut replaced = state.clone();
    replaced.apply(take_over.clone()).unwrap();
    // A writer that was replaced.
    let late = Entry { number: replaced.head.number + 1, previous: replaced.head.link, ..next };
    assert!(replaced.apply(late).is_err());
    assert!(ChainState::first(take_over).is_err());
}

/// The epoch of a fence may never have begun; that of another WAL says nothing about this one.
#[test]
fn the_epoch_is_that_of_the_newest_delta_of_the_wal() {
    let mut state = ChainState::first(fence(None, Vec::new())).unwrap();
    assert_eq!(state.header.epoch, 0);
    state.apply(delta(&state, Vec::new(), Vec::new())).unwrap();
    assert_eq!(state.header.epoch, 1);
    state.apply(fence(Some(&state), Vec::new())).unwrap();
    assert_eq!(state.header.epoch, 1);
    let mut other = fence(Some(&state), vec![ChainChange::BindWal(STORE)]);
    other.body.header.wal = STORE;
    state.apply(other).unwrap();
    assert_eq!((state.header.epoch, state.header.wal), (0, STORE));
}

fn range(object: u64, start: u64, end: u64) -> ObjectRange {
    let (start, end) = (StreamOffset(start), StreamOffset(end));
    ObjectRange { object: ObjectId(object), start, end, payload_bytes: 1, max_timestamp_ms: 1 }
}

fn uploaded(range: ObjectRange, checkpoint: Option<Bytes>) -> ChainChange {
    ChainChange::Uploaded(Uploaded {
        stream: StreamId(1),
        uploaded_end: range.end,
        start: StreamOffset(0),
        checkpoint,
        range: Some(range),
    })
}

/// A state with stream 1.
fn with_stream() -> ChainState {
    let mut state = ChainState::first(fence(None, Vec::new())).unwrap();
    let id = StreamId(1);
    let changes = vec![ChainChange::CreateStream { id, kind: 0, label: Bytes::new() }];
    let version = state.header.version + 1;
    state.apply(delta(&state, vec![Recorded { version, changes }], Vec::new())).unwrap();
    state
}

#[test]
fn an_upload_replaces_the_checkpoint_and_a_range_that_has_no_place_is_left_out() {
    let mut state = with_stream();
    for (change, checkpoint, ranges) in [
        (uploaded(range(1, 0, 10), Some(Bytes::from_static(b"a"))), Some("a"), 1),
        (uploaded(range(2, 9, 20), Some(Bytes::from_static(b"b"))), Some("b"), 1),
        (uploaded(range(3, 20, 30), None), None, 2),
    ] {
        state.apply(delta(&state, Vec::new(), vec![change])).unwrap();
        let stream = &state.streams[&StreamId(1)];
        assert_eq!(stream.checkpoint.as_deref(), checkpoint.map(str::as_bytes));
        assert_eq!(stream.ranges.len(), ranges);
    }
    assert_eq!(state.streams[&StreamId(1)].uploaded_end, StreamOffset(30));
}

#[test]
fn a_replacement_that_overlaps_what_stays_does_nothing() {
    let mut state = with_stream();
    let ranges = [range(1, 0, 10), range(2, 10, 20), range(3, 20, 30)];
    let own = ranges.iter().map(|range| uploaded(range.clone(), None)).collect();
    state.apply(delta(&state, Vec::new(), own)).unwrap();
    let replaced = |old: &[u64], new| {
        let old = old.iter().copied().map(StreamOffset).collect();
        ChainChange::Replaced(Replaced { stream: StreamId(1), old, new })
    };
    for (old, new, expected) in [
        (vec![0, 10], range(4, 0, 25), ranges.to_vec()),
        (vec![0, 10], range(4, 0, 20), vec![range(4, 0, 20), range(3, 20, 30)]),
        // Of the old ranges one is gone already.
        (vec![0, 5], range(5, 0, 20), vec![range(5, 0, 20), range(3, 20, 30)]),
    ] {
        state.apply(delta(&state, Vec::new(), vec![replaced(&old, new)])).unwrap();
        assert_eq!(state.streams[&StreamId(1)].ranges, expected);
    }
}

#[test]
fn limits_only_rise_and_the_last_incarnations_are_kept() {
    let mut state = with_stream();
    for (reserved, count) in [(50, 7), (40, 9), (60, 8)] {
        let own =
            vec![ChainChange::ReserveStreams(StreamId(reserved)), ChainChange::LargestCount(count)];
        state.apply(delta(&state, Vec::new(), own)).unwrap();
    }
    assert_eq!((state.reserved, state.largest_count), (StreamId(60), 9));
    let mut versions = Vec::new();
    for number in 0..INCARNATIONS_KEPT as u64 + 2 {
        versions.push(state.header.version);
        let id = Uuid::from_u128(number.into());
        state.apply(fence(Some(&state), vec![ChainChange::BeginIncarnation(id)])).unwrap();
    }
    assert_eq!(state.incarnations.len(), INCARNATIONS_KEPT);
    let [first, .., last] = &state.incarnations[..] else { panic!("there are some") };
    assert_eq!((first.after_version, first.id), (versions[2], Uuid::from_u128(2)));
    assert_eq!(Some(&last.after_version), versions.last());
}
