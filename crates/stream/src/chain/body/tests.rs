use alluvium_device::sim::Random;

use super::super::change::ChainObject;
use super::*;
use crate::catalog::{ObjectRange, Replaced, Uploaded};
use crate::types::{ObjectId, StreamEpoch};

/// A number of any length.
pub(in crate::chain) fn number(random: &mut Random) -> u64 {
    random.next_u64() >> random.below(64)
}

pub(in crate::chain) fn bytes(random: &mut Random, most: u64) -> Bytes {
    let length = random.below(most + 1);
    (0..length).map(|_| random.below(256) as u8).collect::<Vec<_>>().into()
}

pub(in crate::chain) fn uuid(random: &mut Random) -> Uuid {
    Uuid::from_u64_pair(random.next_u64(), random.next_u64())
}

pub(in crate::chain) fn range(random: &mut Random) -> ObjectRange {
    let start = number(random) >> 1;
    ObjectRange {
        object: ObjectId(number(random)),
        start: StreamOffset(start),
        end: StreamOffset(start + 1 + (number(random) >> 1)),
        payload_bytes: number(random),
        max_timestamp_ms: number(random).cast_signed(),
    }
}

fn change(place: Place, random: &mut Random) -> ChainChange {
    let tags = match place {
        Place::Recorded => 0..6,
        Place::Delta => 6..12,
        Place::Fence => 6..16,
    };
    let stream = StreamId(number(random));
    let epoch = StreamEpoch(number(random));
    let offset = StreamOffset(number(random));
    match tags.start + random.below(tags.end - tags.start) {
        0 => {
            let (kind, label) = (random.below(256) as u8, bytes(random, 512));
            ChainChange::CreateStream { id: stream, kind, label }
        }
        1 => ChainChange::DeleteStream { id: stream, epoch },
        2 => ChainChange::TrimStream { id: stream, epoch, to: offset },
        3 => ChainChange::PutMeta { key: "a/ü".into(), value: bytes(random, 300) },
        4 => ChainChange::DeleteMeta { key: String::new() },
        5 => ChainChange::OpenStream { id: stream, epoch },
        6 => ChainChange::AddObject(ChainObject {
            id: ObjectId(number(random)),
            nonce: uuid(random),
            size_bytes: number(random),
            index_position: number(random),
            index_bytes: number(random),
            index_crc32c: random.next_u64() as u32,
            created_at_ms: number(random).cast_signed(),
            generation: random.below(256) as u8,
            payload_bytes: number(random),
            format: 1 + random.below(2) as u8,
        }),
        7 => ChainChange::Uploaded(Uploaded {
            stream,
            uploaded_end: offset,
            start: StreamOffset(number(random)),
            checkpoint: (random.below(2) == 0).then(|| bytes(random, 300)),
            range: (random.below(2) == 0).then(|| range(random)),
        }),
        8 => {
            let mut start = random.below(1000);
            let old = (0..=random.below(5)).map(|_| {
                start += 1 + random.below(1 << 40);
                StreamOffset(start)
            });
            let old = old.collect();
            ChainChange::Replaced(Replaced { stream, old, new: range(random) })
        }
        9 => ChainChange::RemoveObject(ObjectId(number(random))),
        10 => ChainChange::ReserveStreams(stream),
        11 => ChainChange::LargestCount(random.next_u64() as u32),
        12 => ChainChange::BeginIncarnation(uuid(random)),
        13 => ChainChange::BindWal(uuid(random)),
        14 => ChainChange::SetTerm(random.next_u64() as u32),
        _ => {
            let start = number(random) >> 1;
            let end = StreamOffset(start + 1 + (number(random) >> 1));
            ChainChange::Gap { stream, offsets: StreamOffset(start)..end }
        }
    }
}

fn changes(place: Place, least: u64, random: &mut Random) -> Vec<ChainChange> {
    (0..least + random.below(6)).map(|_| change(place, random)).collect()
}

pub(in crate::chain) fn body(kind: ObjectKind, random: &mut Random) -> Body {
    let opening = 1 + random.below(1000) as u32;
    let version = (u64::from(opening) << 32) + 100 + random.below(1 << 20);
    let mut recorded = Vec::new();
    if kind == ObjectKind::Delta {
        // Also of an earlier opening.
        let mut at = (version - 100) >> random.below(3);
        for _ in 0..random.below(5) {
            at += 1 + random.below(10);
            recorded.push(Recorded { version: at, changes: changes(Place::Recorded, 1, random) });
        }
    }
    let header = BodyHeader {
        store: uuid(random),
        wal: uuid(random),
        incarnation: uuid(random),
        version,
        epoch: random.next_u64() as u32,
        opening,
        node: random.next_u64() as u32,
        is_clean: kind == ObjectKind::Delta && random.below(2) == 0,
        written_at_ms: number(random),
        covers: match kind {
            ObjectKind::Fence => random.below(version),
            ObjectKind::Delta => version,
        },
        cut: LogOffset(number(random)),
        wal_mark: number(random),
        next_stream: StreamId(number(random)),
    };
    Body {
        header,
        recorded,
        own: changes(kind.place_of_own(), 0, random),
        hints: (0..random.below(6))
            .map(|_| (StreamId(number(random)), StreamOffset(number(random))))
            .collect(),
    }
}

pub(in crate::chain) const KINDS: [ObjectKind; 2] = [ObjectKind::Fence, ObjectKind::Delta];

#[test]
fn bodies_are_decoded_as_they_were_encoded() {
    for seed in 0..1000 {
        let mut random = Random::new(seed);
        for kind in KINDS {
            let body = body(kind, &mut random);
            let encoded = Bytes::from(body.encode(kind));
            assert_eq!(Body::decode(kind, &encoded).unwrap(), body, "seed {seed}");
            // Each body has one form, so one that was changed is another one, or refused.
            let mut other = encoded.to_vec();
            let at = random.below(other.len() as u64) as usize;
            other[at] ^= 1 << random.below(8);
            if let Ok(changed) = Body::decode(kind, &other.clone().into()) {
                assert_eq!(changed.encode(kind), other, "seed {seed}");
            }
            let length = random.below(encoded.len() as u64) as usize;
            assert!(Body::decode(kind, &encoded.slice(..length)).is_err(), "seed {seed}");
            let longer = [&encoded[..], &[0]].concat().into();
            assert!(Body::decode(kind, &longer).is_err(), "seed {seed}");
        }
    }
}

#[test]
fn arbitrary_bytes_do_not_panic() {
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        let mut bytes = bytes(&mut random, 300).to_vec();
        // Past the first fields.
        if let Some(flags) = bytes.get_mut(68..72) {
            flags.fill(0);
        }
        for kind in KINDS {
            if let Ok(body) = Body::decode(kind, &bytes.clone().into()) {
                assert_eq!(body.encode(kind), bytes);
            }
        }
    }
}

#[test]
fn what_contradicts_the_kind_or_another_field_is_refused() {
    let mut random = Random::new(1);
    let list =
        |version| Recorded { version, changes: vec![ChainChange::DeleteMeta { key: "a".into() }] };
    type Change = Box<dyn Fn(&mut Body)>;
    let cases: [(ObjectKind, Change); 8] = [
        (ObjectKind::Fence, Box::new(|body| body.header.is_clean = true)),
        (ObjectKind::Fence, Box::new(|body| body.header.covers = body.header.version)),
        (ObjectKind::Fence, Box::new(move |body| body.recorded = vec![list(1)])),
        (ObjectKind::Delta, Box::new(|body| body.header.covers -= 1)),
        (ObjectKind::Delta, Box::new(|body| body.header.opening += 1)),
        (ObjectKind::Delta, Box::new(move |body| body.recorded = vec![list(body.header.version)])),
        (ObjectKind::Delta, Box::new(move |body| body.recorded = vec![list(2), list(2)])),
        (
            ObjectKind::Delta,
            Box::new(|body| body.recorded = vec![Recorded { version: 1, changes: vec![] }]),
        ),
    ];
    for (at, (kind, change)) in cases.into_iter().enumerate() {
        let mut body = body(kind, &mut random);
        assert_eq!(body.contradiction(kind), None);
        change(&mut body);
        assert!(body.contradiction(kind).is_some(), "case {at}");
    }
    // The own changes of a fence are refused in a delta.
    let fence = Body { own: vec![ChainChange::SetTerm(1)], ..body(ObjectKind::Fence, &mut random) };
    let bytes = fence.encode(ObjectKind::Fence).into();
    let error = Body::decode(ObjectKind::Delta, &bytes).unwrap_err();
    assert!(error.to_string().contains("tag 66"), "{error}");
}
