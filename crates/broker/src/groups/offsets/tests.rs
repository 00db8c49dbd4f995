//! Properties of the table and its encodings, over seeded random records.

use alluvium_stream::{Batch, StreamOffset};
use bytes::Bytes;

use super::*;
use crate::state_table::{decode, encode, quarantined};

fn fold(previous: Option<&[u8]>, batches: &[Batch]) -> Option<Vec<u8>> {
    let from = batches.first().map_or(StreamOffset(0), |first| first.base);
    let to = batches.last().map_or(from, Batch::end);
    crate::state_table::fold::<Offsets>(from..to, previous, batches)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap()
    }

    fn name(&mut self, kind: &str) -> String {
        format!("{kind}-{}", self.below(4))
    }

    fn record(&mut self) -> Record {
        match self.below(9) {
            3 => Record::Used { group: self.name("group"), at_ms: self.below(1 << 40) as i64 },
            0 => Record::GroupDeleted { group: self.name("group") },
            1 => Record::TopicsDeleted { names: vec![self.name("topic")] },
            2 => {
                let partitions = (0..self.below(3)).map(|index| i32::try_from(index).unwrap());
                let topics = vec![(self.name("topic"), partitions.collect())];
                Record::Expired { group: self.name("group"), topics }
            }
            _ => {
                let topics = (0..self.below(3)).map(|_| {
                    let positions = (0..self.below(4)).map(|_| self.position()).collect();
                    (self.name("topic"), positions)
                });
                let topics = topics.collect();
                Record::Commit {
                    group: self.name("group"),
                    committed_at_ms: 1_700_000_000_000,
                    topics,
                }
            }
        }
    }

    fn position(&mut self) -> Position {
        Position {
            partition: i32::try_from(self.below(4)).unwrap(),
            offset: i64::try_from(self.below(1 << 62)).unwrap(),
            leader_epoch: -1,
            metadata: "ü".repeat(self.index(3)),
        }
    }
}

fn batches(records: &[Record]) -> Vec<Batch> {
    let batch = |(base, record): (u64, &Record)| Batch {
        base: StreamOffset(base),
        count: 1,
        max_timestamp_ms: -1,
        payload: Bytes::from(record.encode()),
    };
    (0..).zip(records).map(batch).collect()
}

fn table(records: &[Record]) -> Offsets {
    let mut table = Offsets::default();
    for record in records {
        table.apply(record.clone());
    }
    table
}

fn commit(group: &str, topic: &str, partition: i32, offset: i64) -> Record {
    let position = Position { partition, offset, leader_epoch: 3, metadata: "note".to_owned() };
    Record::Commit {
        group: group.to_owned(),
        committed_at_ms: offset,
        topics: vec![(topic.to_owned(), vec![position])],
    }
}

#[test]
fn folding_in_steps_equals_folding_at_once() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let records: Vec<Record> = (0..40).map(|_| random.record()).collect();
        let batches = batches(&records);
        let at_once = fold(None, &batches).expect("there are batches");
        let mut pieces = None;
        let mut rest = &batches[..];
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(1 + random.index(rest.len()));
            pieces = fold(pieces.as_deref(), piece);
            rest = after;
        }
        assert_eq!(pieces.as_deref(), Some(&at_once[..]), "seed {seed}");
        let decoded = decode::<Offsets>(&at_once).expect("a checkpoint is readable");
        assert_eq!(decoded, table(&records), "seed {seed}; the accounted size included");
    }
    assert_eq!(fold(None, &[]), None);
}

#[test]
fn records_survive_encoding() {
    let mut random = Random(7);
    for _ in 0..500 {
        let record = random.record();
        assert_eq!(Record::decode(&record.encode()), Ok(record));
    }
}

/// These bytes were written by version 1; later versions must read them too.
#[test]
fn version_1_is_readable() {
    let record: &[u8] =
        b"\x01\x01\x01\x00g\x05\0\0\0\0\0\0\0\x01\0\0\0\x01\x00t\x01\0\0\0\x02\0\0\0\x05\0\0\0\0\
          \0\0\0\x03\0\0\0\x04\x00note";
    assert_eq!(Record::decode(record), Ok(commit("g", "t", 2, 5)));
    assert_eq!(commit("g", "t", 2, 5).encode(), record);
    let body: &[u8] =
        b"ALGO\x01\x01\0\0\0\x01\x00g\x01\0\0\0\x01\x00t\x01\0\0\0\x02\0\0\0\x05\0\0\0\0\0\0\0\
          \x03\0\0\0\x05\0\0\0\0\0\0\0\x04\x00note";
    let checkpoint = [body, &0x7ae6_afcf_u32.to_le_bytes()].concat();
    assert_eq!(decode::<Offsets>(&checkpoint), Ok(table(&[commit("g", "t", 2, 5)])));
}

/// These bytes were written by version 2; later versions must read them too.
#[test]
fn version_2_is_readable() {
    let used = Record::Used { group: "g".to_owned(), at_ms: 9 };
    assert_eq!(used.encode(), b"\x01\x05\x01\x00g\x09\0\0\0\0\0\0\0");
    let body: &[u8] =
        b"ALGO\x02\x01\0\0\0\x01\x00g\x01\0\0\0\x01\x00t\x01\0\0\0\x02\0\0\0\x05\0\0\0\0\0\0\0\
          \x03\0\0\0\x05\0\0\0\0\0\0\0\x04\x00note\x01\0\0\0\x01\x00g\x09\0\0\0\0\0\0\0";
    let checkpoint = [body, &crc32c::crc32c(body).to_le_bytes()].concat();
    let table = table(&[commit("g", "t", 2, 5), used]);
    assert_eq!(decode::<Offsets>(&checkpoint).as_ref(), Ok(&table));
    assert_eq!(encode(&table), checkpoint);
}

/// The record of a group's last use concerns its offsets, and is removed with them.
#[test]
fn the_last_use_of_a_group_is_the_newest_record() {
    let used = |at_ms| Record::Used { group: "g".to_owned(), at_ms };
    let mut offsets = table(&[used(7)]);
    assert_eq!((offsets.last_use_ms("g"), offsets.size_bytes()), (None, 0));
    offsets.apply(commit("g", "t", 0, 5));
    assert_eq!(offsets.last_use_ms("g"), Some(5));
    for (at_ms, wanted) in [(4, 5), (9, 9), (6, 6)] {
        let before_bytes = offsets.size_bytes();
        let growth_bytes = offsets.growth_bytes(&used(at_ms));
        offsets.apply(used(at_ms));
        assert_eq!(offsets.last_use_ms("g"), Some(wanted));
        assert_eq!(offsets.size_bytes(), before_bytes + growth_bytes);
    }
    offsets.apply(Record::GroupDeleted { group: "g".to_owned() });
    assert_eq!(offsets, Offsets::default());
}

#[test]
fn a_changed_or_truncated_record_never_panics() {
    let mut random = Random(11);
    for _ in 0..200 {
        let bytes = random.record().encode();
        for len in 0..bytes.len() {
            Record::decode(&bytes[..len]).expect_err("a truncated record");
        }
        for _ in 0..50 {
            let mut changed = bytes.clone();
            let at = random.index(changed.len());
            changed[at] ^= 1 << random.below(8);
            if let Ok(record) = Record::decode(&changed) {
                assert_eq!(record.encode(), changed, "the decoded record equals the original");
            }
        }
        let longer = [&bytes[..], b"x"].concat();
        Record::decode(&longer).expect_err("an excess byte");
    }
    Record::decode(b"\x02\x01").expect_err("a version from the future");
    Record::decode(b"\x01\x09").expect_err("an unknown kind");
    // A count of four billion elements is not trusted.
    Record::decode(b"\x01\x03\xff\xff\xff\xff").expect_err("a count without elements");
}

#[test]
fn every_changed_bit_of_a_checkpoint_is_detected() {
    let used = Record::Used { group: "g".to_owned(), at_ms: 9 };
    let checkpoint = encode(&table(&[commit("g", "t", 0, 5), commit("h", "u", 1, 6), used]));
    for at in 0..checkpoint.len() {
        for bit in 0..8 {
            let mut changed = checkpoint.clone();
            changed[at] ^= 1 << bit;
            decode::<Offsets>(&changed).expect_err("a changed bit");
        }
        decode::<Offsets>(&checkpoint[..at]).expect_err("a truncated checkpoint");
    }
}

#[test]
fn unreadable_records_are_quarantined_and_reported() {
    let good = batches(&[commit("g", "t", 0, 5)]);
    let bad = Batch { payload: Bytes::from_static(b"\x09future"), ..good[0].clone() };
    let before = fold(None, &good).expect("a checkpoint");
    let kept = fold(Some(&before), &[good[0].clone(), bad.clone()]).expect("a quarantine");
    let kept = fold(Some(&kept), &good).expect("a larger quarantine");
    let blobs = quarantined::<Offsets>(&kept).expect("it is intact");
    assert_eq!(blobs, [&before[..], &good[0].payload, &bad.payload, &good[0].payload]);
    let cause = decode::<Offsets>(&kept).expect_err("a quarantine is not a table").to_string();
    assert!(cause.contains("unknown format version 9"), "{cause}");

    let kept = fold(Some(b"rubbish"), &good).expect("a quarantine");
    assert_eq!(quarantined::<Offsets>(&kept), Some(vec![&b"rubbish"[..], &good[0].payload]));
    decode::<Offsets>(&kept).expect_err("a quarantine is not a table");
}

/// A quarantine as the first version wrote it, which must always be readable.
#[test]
fn the_format_of_a_quarantine_is_as_documented() {
    let payload = Bytes::from_static(b"\x09future");
    let batch = Batch { base: StreamOffset(0), count: 1, max_timestamp_ms: -1, payload };
    let kept = fold(Some(b"rubbish"), &[batch]).expect("a quarantine");
    let expected = b"ALGQ\x01\x02\0\0\0\x07\0\0\0rubbish\x07\0\0\0\x09future\x5c\xcf\xd0\x93";
    assert_eq!(kept.escape_ascii().to_string(), expected.escape_ascii().to_string());
    let blobs = quarantined::<Offsets>(expected).expect("it is intact");
    assert_eq!(blobs, [&b"rubbish"[..], b"\x09future"]);
    // A length is not trusted.
    let mut reader = Reader::new(b"\x04\0\0\0cut");
    reader.bytes().expect_err("three bytes of four");
}

#[test]
fn the_accounted_size_follows_the_table() {
    for seed in 0..100 {
        let mut random = Random(1_000 + seed);
        let mut table = Offsets::default();
        for _ in 0..60 {
            let record = random.record();
            let (before, growth) = (table.size_bytes(), table.growth_bytes(&record));
            table.apply(record);
            assert!(table.size_bytes() <= before + growth, "it grew more than was announced");
            let topics = table.groups.values().flat_map(BTreeMap::keys).map(String::as_str);
            let topics: BTreeSet<&str> = topics.collect();
            assert!(table.topics().eq(topics), "{table:?}");
        }
        let groups: Vec<String> = table.groups().map(str::to_owned).collect();
        for group in groups {
            table.apply(Record::GroupDeleted { group });
        }
        assert_eq!(table, Offsets::default());
    }
}

#[test]
fn only_old_offsets_expire() {
    let mut table =
        table(&[commit("g", "t", 0, 10), commit("g", "t", 1, 20), commit("h", "t", 0, 10)]);
    assert_eq!(table.expired("g", 9), None);
    assert_eq!(table.expired("absent", 99), None);
    let record = table.expired("g", 10).expect("one is old");
    table.apply(record);
    assert_eq!(table.get("g", "t", 0), None);
    assert_eq!(table.get("g", "t", 1).map(|committed| committed.offset), Some(20));
    assert_eq!(table.get("h", "t", 0).map(|committed| committed.offset), Some(10));
    let record = table.expired("g", 99).expect("the other one is old now");
    table.apply(record);
    assert_eq!(table.group("g"), None);
}
