//! Tests of sequences, transactions and checkpoints.

use std::sync::Arc;

use kafka_protocol::ResponseError::{InvalidProducerEpoch, OutOfOrderSequenceNumber};

use super::*;
use crate::batch::without_records;

const NOW: i64 = 1_000;
/// Where these checkpoints end.
const END: StreamOffset = StreamOffset(1_000);
/// The end of the last batch, and the number of epochs.
const EPOCHS_BYTES: usize = 8 + 4;

fn batch(producer_id: i64, epoch: i16, base_sequence: i32, records: i32) -> BatchHeader {
    BatchHeader {
        base_offset: 0,
        len_bytes: 61,
        magic: 2,
        crc: 0,
        attributes: 0,
        last_offset_delta: records - 1,
        base_timestamp_ms: 0,
        max_timestamp_ms: 0,
        producer_id,
        producer_epoch: epoch,
        base_sequence,
        record_count: records,
    }
}

fn append(states: &mut ProducerStates, header: &BatchHeader, offset: u64) {
    assert_eq!(states.check(header).unwrap(), Verdict::Append);
    states.record(header, offset, 7, NOW);
}

#[test]
fn sequences_wrap_to_zero() {
    assert_eq!(advance(0, 0), 0);
    assert_eq!(advance(2_147_483_645, 2), 2_147_483_647);
    assert_eq!(advance(2_147_483_647, 0), 2_147_483_647);
    assert_eq!(advance(2_147_483_647, 1), 0);
    assert_eq!(advance(2_147_483_646, 4), 2);
    assert_eq!(distance(2_147_483_646, 2), 4);
    assert_eq!(distance(5, 5), 0);

    let mut states = ProducerStates::default();
    append(&mut states, &batch(1, 0, i32::MAX - 1, 5), 100);
    // The last record had sequence 2.
    let duplicate = states.check(&batch(1, 0, i32::MAX - 1, 5)).unwrap();
    let Verdict::Duplicate(seen) = duplicate else { panic!("{duplicate:?}") };
    assert_eq!((seen.base_offset, seen.end().0), (100, 105));
    append(&mut states, &batch(1, 0, 3, 1), 105);
    assert_eq!(states.check(&batch(1, 0, 5, 1)).unwrap_err().kind(), OutOfOrderSequenceNumber);
}

#[test]
fn a_duplicate_is_detected_among_the_last_five_batches() {
    let mut states = ProducerStates::default();
    for i in 0..6 {
        append(&mut states, &batch(1, 0, i * 10, 10), i as u64 * 10);
    }
    for i in 1..6 {
        let verdict = states.check(&batch(1, 0, i * 10, 10)).unwrap();
        assert!(matches!(verdict, Verdict::Duplicate(seen) if seen.base_offset == i as u64 * 10));
    }
    assert_eq!(
        states.check(&batch(1, 0, 0, 10)).unwrap_err().kind(),
        OutOfOrderSequenceNumber,
        "too old to be detected"
    );
    assert_eq!(
        states.check(&batch(1, 0, 50, 9)).unwrap_err().kind(),
        OutOfOrderSequenceNumber,
        "not the same batch"
    );
    assert_eq!(
        states.check(&batch(1, 0, 61, 1)).unwrap_err().kind(),
        OutOfOrderSequenceNumber,
        "a gap"
    );
    assert_eq!(states.check(&batch(1, 0, 60, 1)).unwrap(), Verdict::Append);
}

#[test]
fn a_new_epoch_begins_at_zero_and_ends_the_old_one() {
    let mut states = ProducerStates::default();
    append(&mut states, &batch(1, 3, 0, 1), 0);
    assert_eq!(states.check(&batch(1, 4, 1, 1)).unwrap_err().kind(), OutOfOrderSequenceNumber);
    append(&mut states, &batch(1, 4, 0, 1), 1);
    assert_eq!(states.check(&batch(1, 3, 1, 1)).unwrap_err().kind(), InvalidProducerEpoch);
    assert_eq!(
        states.check(&batch(1, 3, 0, 1)).unwrap_err().kind(),
        InvalidProducerEpoch,
        "the batches of the old epoch are dropped"
    );
}

#[test]
fn an_unknown_producer_may_start_at_any_sequence_and_plain_batches_are_not_checked() {
    let mut states = ProducerStates::default();
    append(&mut states, &batch(9, 2, 1234, 1), 0);
    let plain = batch(-1, -1, -1, 3);
    append(&mut states, &plain, 1);
    append(&mut states, &plain, 4);
    assert_eq!(states.producers.len(), 1);
}

#[test]
fn producers_are_bounded_and_expire() {
    let mut states = ProducerStates::default();
    for id in 0..MAX_PRODUCERS as i64 + 10 {
        states.record(&batch(id, 0, 0, 1), id as u64, 0, NOW);
    }
    assert_eq!(states.producers.len(), MAX_PRODUCERS);
    assert!(
        !states.producers.contains_key(&9) && states.producers.contains_key(&10),
        "the oldest ones are evicted"
    );

    states.record(&batch(1_000_000, 0, 0, 1), 1_000_000, 0, NOW + EXPIRATION_MS);
    states.drop_expired(NOW + EXPIRATION_MS - 1);
    assert_eq!(states.producers.len(), MAX_PRODUCERS);
    states.drop_expired(NOW + EXPIRATION_MS);
    assert_eq!(states.producers.len(), 1);
}

/// The cost of an eviction does not depend on the number of producers.
#[test]
fn an_eviction_examines_only_the_evicted_producers() {
    let examined = |states: &mut ProducerStates, ids: std::ops::Range<i64>| {
        let before = EXAMINED.get();
        for id in ids {
            states.record(&batch(id, 0, 0, 1), id as u64, 0, NOW);
        }
        EXAMINED.get() - before
    };
    let mut states = ProducerStates::default();
    let max = MAX_PRODUCERS as i64;
    assert_eq!(examined(&mut states, 0..max), 0);
    assert_eq!(examined(&mut states, max..max + 1_000), 1_000);
    let mut read = ProducerStates::decode(&states.encode(END).unwrap(), 0).unwrap();
    assert_eq!(examined(&mut read, max + 1_000..max + 2_000), 1_000, "after a start");

    // Producers with an open transaction are not examined either.
    let mut states = ProducerStates::default();
    for id in 0..max {
        states.record(&transactional(id), id as u64, 0, NOW);
    }
    assert!(examined(&mut states, max..max + 1_000) <= 1_000);
    assert_eq!(states.producers.len(), MAX_PRODUCERS + 1);
}

/// The evicted producer is the one that a scan over all producers finds.
#[test]
fn the_oldest_producer_without_an_open_transaction_is_evicted_first() {
    let oldest = |states: &ProducerStates| {
        let newest = states.producers.values().map(|producer| producer.last_offset).max();
        let idle = states.producers.iter().filter(|(_, producer)| {
            producer.transaction.is_none() && Some(producer.last_offset) < newest
        });
        idle.map(|(id, producer)| (producer.last_offset, *id)).min().map(|(_, id)| id)
    };
    let mut random = 1_u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % below
    };
    let mut states = ProducerStates::default();
    for offset in 0..20_000 {
        let id = next(40) as i64;
        let epoch = states.epoch(id).unwrap_or(0);
        match next(8) {
            0 | 1 => {
                let outcome = if next(2) == 0 { Outcome::Abort } else { Outcome::Commit };
                let epoch = epoch + next(2) as i16;
                states.record_marker(&batch(id, epoch, -1, 1), outcome, offset, NOW);
            }
            2 => {
                let header = BatchHeader { attributes: 1 << 4, ..batch(id, epoch, 0, 1) };
                states.record(&header, offset, 0, NOW);
            }
            3 => {
                let bytes = states.encode(END);
                let read = bytes.map(|bytes| ProducerStates::decode(&bytes, 0).unwrap());
                states = read.unwrap_or_default();
            }
            4 => {
                let expected = oldest(&states);
                let before = ids(&states);
                states.evict_oldest(1);
                let left: Vec<_> = before.into_iter().filter(|id| Some(*id) != expected).collect();
                assert_eq!(ids(&states), left);
            }
            5 if next(50) == 0 => states.drop_expired(NOW + EXPIRATION_MS),
            _ => states.record(&batch(id, epoch, 0, 1), offset, 0, NOW),
        }
    }
}

#[test]
fn a_checkpoint_decodes_to_the_encoded_state() {
    assert_eq!(ProducerStates::default().encode(END), None);
    let mut states = ProducerStates::default();
    for i in 0..7 {
        states.record(&batch(i % 3, 2, 0, 4), i as u64 * 4, i, NOW);
    }
    let bytes = states.encode(END).unwrap();
    assert_eq!(ProducerStates::decode(&bytes, 0).unwrap(), states);
    for len in 0..bytes.len() {
        assert!(ProducerStates::decode(&bytes[..len], 0).is_err(), "{len} bytes");
    }
    for bit in 8..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(ProducerStates::decode(&damaged, 0).unwrap_err(), BadCheckpoint::Checksum);
    }
    let with_checksum = |content: &[u8]| [content, &crc32c::crc32c(content).to_le_bytes()].concat();
    let content = &bytes[..bytes.len() - 4];
    let longer = with_checksum(&[content, &[0]].concat());
    assert!(matches!(ProducerStates::decode(&longer, 0), Err(BadCheckpoint::Content(_))));
    let shorter = with_checksum(&content[..content.len() - 1]);
    assert_eq!(ProducerStates::decode(&shorter, 0).unwrap_err(), BadCheckpoint::Truncated);
    let mut newer = bytes.clone();
    newer[0] = 7;
    assert_eq!(ProducerStates::decode(&newer, 0).unwrap_err(), BadCheckpoint::Version(7));
}

/// A batch of two records in a leader epoch.
fn in_epoch(epoch: i32, offset: u64) -> Batch {
    let bytes = without_records(offset, 2, epoch);
    Batch { base: StreamOffset(offset), count: 2, max_timestamp_ms: -1, payload: bytes.into() }
}

/// However the batches are divided into uploads, with lost offsets between them and at an end.
#[test]
fn checkpoints_have_the_leader_epochs_of_their_batches() {
    let log = [
        in_epoch(0, 0),
        in_epoch(0, 2),
        // 4 to 20 are lost.
        in_epoch(1, 20),
        in_epoch(-1, 30),
        in_epoch(1, 32),
        in_epoch(4, 34),
    ];
    let offsets = [0, 2, 20, 30, 32, 34, 36].map(StreamOffset);
    for division in 0..1 << (log.len() - 1) {
        let (mut checkpoint, mut from) = (None, 0);
        for to in 1..=log.len() {
            if to < log.len() && division & (1 << (to - 1)) == 0 {
                continue;
            }
            let part = offsets[from]..offsets[to];
            checkpoint = fold(NOW, part, StreamOffset(0), checkpoint.as_deref(), &log[from..to]);
            from = to;
        }
        let states = ProducerStates::decode(&checkpoint.unwrap(), NOW).unwrap();
        let ends = [0, 1, 2, 4].map(|epoch| states.epochs.end_of(epoch).unwrap());
        let expected = [(0, Some(4)), (1, Some(34)), (1, Some(34)), (4, None)];
        assert_eq!(ends, expected, "division {division:b}");
    }
    // Without idempotent producers and losses there is no checkpoint.
    let plain = fold(NOW, offsets[0]..offsets[1], StreamOffset(0), None, &log[..1]);
    assert_eq!(plain, None);
}

#[test]
fn impossible_leader_epochs_are_refused() {
    let mut states = ProducerStates::default();
    for (epochs, is_valid) in [
        (vec![(1, 0), (2, 5)], true),
        (vec![(0, 5)], false),
        (vec![(2, 5), (2, 6)], false),
        (vec![(2, 5), (3, 5)], false),
    ] {
        states.epochs = LeaderEpochs::new(epochs.clone(), Some(9));
        let read = ProducerStates::decode(&states.encode(END).unwrap(), NOW);
        assert_eq!(read.is_ok(), is_valid, "{epochs:?}");
    }
}

/// Version 5 is version 6 without leader epochs.
#[test]
fn version_5_still_opens() {
    let mut states = ProducerStates::default();
    states.record(&batch(5, 1, 7, 2), 9, 11, NOW);
    states.lost_end = 4;
    let mut bytes = states.encode(END).unwrap();
    bytes.truncate(bytes.len() - 4 - EPOCHS_BYTES);
    bytes[0] = 5;
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    assert_eq!(ProducerStates::decode(&bytes, NOW).unwrap(), states);
}

/// Version 4 is version 5 without the end of the last loss.
#[test]
fn version_4_still_opens() {
    let mut states = ProducerStates::default();
    states.record(&batch(5, 1, 7, 2), 9, 11, NOW);
    let mut bytes = states.encode(END).unwrap();
    bytes.truncate(bytes.len() - 4 - EPOCHS_BYTES - 8);
    bytes[0] = 4;
    let crc = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    assert_eq!(ProducerStates::decode(&bytes, NOW).unwrap(), states);
}

/// Batches of two records of one producer, by sequence and offset.
fn batches_at(positions: &[(i32, u64)]) -> Vec<Batch> {
    let batch = |(sequence, base): &(i32, u64)| Batch {
        base: StreamOffset(*base),
        count: 2,
        max_timestamp_ms: 2,
        payload: batch::tests::encode(
            kafka_protocol::records::Compression::None,
            (4, 0, *sequence),
            &[1, 2],
        ),
    };
    positions.iter().map(batch).collect()
}

#[test]
fn a_producer_continues_after_a_loss_and_its_remaining_batches_are_recognised() {
    let kept = batches_at(&[(0, 0), (2, 2)]);
    let replay = |batches: &[Batch], to| {
        let mut states = ProducerStates::default();
        states.replay(StreamOffset(0), batches, StreamOffset(to), NOW);
        states
    };
    let whole = replay(&kept, 4);
    let cut = replay(&kept, 8);
    let verdict = |states: &ProducerStates, epoch, sequence| {
        states.check(&batch(4, epoch, sequence, 2)).map_err(|error| error.kind())
    };
    for (states, behind) in [(&whole, Err(OutOfOrderSequenceNumber)), (&cut, Ok(Verdict::Append))] {
        assert!(matches!(verdict(states, 0, 2), Ok(Verdict::Duplicate(_))));
        assert_eq!(verdict(states, 0, 4), Ok(Verdict::Append));
        assert_eq!(verdict(states, 0, 8), behind, "the next batch, whose predecessor is lost");
        assert_eq!(verdict(states, 1, 6), behind, "a batch of another epoch");
        assert_eq!(
            verdict(states, 0, 1),
            Err(OutOfOrderSequenceNumber),
            "a duplicate that is not detected"
        );
    }
    // From its next batch on the sequence is known, even if that batch is in the log already.
    let mut on = cut.clone();
    on.record(&batch(4, 0, 8, 2), 8, 2, NOW);
    for states in [&on, &replay(&batches_at(&[(0, 0), (2, 2), (8, 8)]), 10)] {
        assert_eq!(verdict(states, 0, 10), Ok(Verdict::Append));
        assert_eq!(verdict(states, 0, 12), Err(OutOfOrderSequenceNumber));
        assert_eq!(
            verdict(states, 0, 4),
            Err(OutOfOrderSequenceNumber),
            "it would follow its successor"
        );
    }
}

#[test]
fn a_marker_after_a_loss_does_not_determine_the_sequence() {
    let record = |sequence| BatchHeader { attributes: 1 << 4, ..batch(4, 0, sequence, 2) };
    let mut states = ProducerStates::default();
    states.record(&record(0), 0, 0, NOW);
    // The producer's next batch, with sequence numbers 2 and 3, is lost; its marker is not.
    states.lost_end = 4;
    states.record_marker(&batch(4, 0, -1, 1), Outcome::Commit, 4, NOW);
    let verdict = |states: &ProducerStates, sequence| {
        states.check(&record(sequence)).map_err(|error| error.kind())
    };
    assert_eq!(verdict(&states, 4), Ok(Verdict::Append));
    states.record(&record(4), 5, 0, NOW);
    assert_eq!(verdict(&states, 6), Ok(Verdict::Append));
    assert_eq!(verdict(&states, 8), Err(OutOfOrderSequenceNumber), "only once");
}

#[test]
fn a_fold_over_a_loss_equals_a_replay_at_start() {
    let batches = batches_at(&[(0, 0), (2, 2), (8, 8), (10, 10)]);
    let live = |batches: &[Batch], checkpoint: Option<&[u8]>, from, to| {
        let mut states = checkpoint.map_or_else(ProducerStates::default, |bytes| {
            ProducerStates::decode(bytes, NOW).unwrap()
        });
        states.replay(StreamOffset(from), batches, StreamOffset(to), NOW);
        states
    };
    let start = StreamOffset(0);
    // The partition ends with a batch, or with lost offsets.
    for (to, lost_end) in [(12, 8), (14, 14)] {
        let at_once = live(&batches, None, 0, to);
        assert_eq!(at_once.lost_end, lost_end);
        for cut in 1..=batches.len() {
            // An upload ends with a batch, or with lost offsets after it.
            let next = batches.get(cut).map_or(StreamOffset(to), |next| next.base);
            for end in [batches[cut - 1].end(), next] {
                let first = fold(NOW, start..end, start, None, &batches[..cut]);
                let rest = end..StreamOffset(to);
                let both = fold(NOW, rest, start, first.as_deref(), &batches[cut..]).unwrap();
                let case = format!("cut at {cut}, {end} of {to}");
                assert_eq!(ProducerStates::decode(&both, NOW).unwrap(), at_once, "{case}");
                assert_eq!(live(&batches[cut..], first.as_deref(), end.0, to), at_once, "{case}");
            }
        }
    }
}

/// Bytes that format version 1 wrote; they must open forever.
#[test]
fn version_1_still_opens() {
    let mut states = ProducerStates::default();
    states.record(&batch(5, 1, 7, 2), 9, 11, NOW);
    let bytes = [
        1, 1, 0, 0, 0, // version, one producer
        5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, // id, epoch, one batch
        7, 0, 0, 0, 8, 0, 0, 0, // base and last sequence
        9, 0, 0, 0, 0, 0, 0, 0, // base offset
        11, 0, 0, 0, 0, 0, 0, 0, // greatest timestamp
        208, 136, 9, 6, // CRC32C
    ];
    assert_eq!(ProducerStates::decode(&bytes, NOW).unwrap(), states);
}

/// Bytes that format version 2 wrote.
#[test]
fn version_2_still_opens() {
    let mut states = ProducerStates::default();
    states.record(&batch(5, 1, 7, 2), 9, 11, NOW);
    states.record(&batch(6, 0, 0, 1), 12, 8, NOW);
    states.aborted.push_back(Aborted {
        producer_id: 5,
        first_offset: 3,
        marker_offset: 4,
        stable_end: 5,
    });
    let bytes = [
        2, 2, 0, 0, 0, // version, two producers
        5, 0, 0, 0, 0, 0, 0, 0, 1, 0, // id, epoch
        255, 255, 255, 255, 255, 255, 255, 255, // no transaction
        9, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, // last offset and timestamp
        1, 7, 0, 0, 0, 8, 0, 0, 0, // one batch: base and last sequence
        9, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, // base offset, greatest timestamp
        6, 0, 0, 0, 0, 0, 0, 0, 0, 0, // the other producer
        255, 255, 255, 255, 255, 255, 255, 255, //
        12, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, //
        1, 0, 0, 0, 0, 0, 0, 0, 0, //
        12, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, //
        1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, // one aborted transaction: producer
        3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, // first offset, marker
        5, 0, 0, 0, 0, 0, 0, 0, // stable end
        219, 160, 79, 24, // CRC32C
    ];
    assert_eq!(ProducerStates::decode(&bytes, NOW).unwrap(), states);
}

/// Bytes that format version 3 wrote, where the time of the last append is a record timestamp.
#[test]
fn version_3_still_opens() {
    let mut states = ProducerStates::default();
    states.record(&batch(5, 1, 7, 2), 9, 11, NOW);
    let bytes = [
        3, 1, 0, 0, 0, // version, one producer
        5, 0, 0, 0, 0, 0, 0, 0, 1, 0, // id, epoch
        255, 255, 255, 255, 255, 255, 255, 255, // no transaction
        9, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, // last offset and timestamp
        12, 0, 0, 0, 0, 0, 0, 0, // time of the last append
        1, 7, 0, 0, 0, 8, 0, 0, 0, // one batch: base and last sequence
        9, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, // base offset, greatest timestamp
        0, 0, 0, 0, // no aborted transaction
        22, 58, 98, 64, // CRC32C
    ];
    assert_eq!(ProducerStates::decode(&bytes, NOW).unwrap(), states);
}

#[test]
fn folding_in_parts_equals_folding_at_once() {
    let produced = |sequence, base| {
        let payload = batch::tests::encode(
            kafka_protocol::records::Compression::None,
            (4, 0, sequence),
            &[1, 2],
        );
        Batch { base: StreamOffset(base), count: 2, max_timestamp_ms: 2, payload }
    };
    let batches = [produced(0, 0), produced(2, 2), produced(4, 4)];
    let at_once = fold(NOW, StreamOffset(0)..StreamOffset(6), StreamOffset(0), None, &batches);
    let first = fold(NOW, StreamOffset(0)..StreamOffset(2), StreamOffset(0), None, &batches[..1]);
    let in_parts = fold(
        NOW,
        StreamOffset(2)..StreamOffset(6),
        StreamOffset(0),
        first.as_deref(),
        &batches[1..],
    );
    assert_eq!(at_once, in_parts);
    let states = ProducerStates::decode(&at_once.unwrap(), 0).unwrap();
    assert_eq!(states.check(&batch(4, 0, 6, 1)).unwrap(), Verdict::Append);
}

const DAY: i64 = EXPIRATION_MS;

/// Batches of two records by producer, sequence and time, optionally in a transaction.
fn log(appended: &[(i64, i32, i64, bool)]) -> Vec<Batch> {
    let batch = |(at, (id, sequence, time_ms, transactional)): (usize, &(i64, i32, i64, bool))| {
        let of = (*id, 0, *sequence);
        let compression = kafka_protocol::records::Compression::None;
        let mut payload = batch::tests::encode(compression, of, &[*time_ms, *time_ms]);
        if *transactional {
            payload = batch::tests::transactional(&payload);
        }
        let base = StreamOffset(2 * at as u64);
        Batch { base, count: 2, max_timestamp_ms: *time_ms, payload }
    };
    appended.iter().enumerate().map(batch).collect()
}

/// The state after folding these pieces of a log, each at its own time.
fn folded(log: &[Batch], pieces: &[(i64, usize)]) -> ProducerStates {
    let (mut checkpoint, mut from) = (None, 0);
    for (now_ms, end) in pieces {
        let offsets = StreamOffset(2 * from as u64)..StreamOffset(2 * *end as u64);
        let pieces = &log[from..*end];
        checkpoint = fold(*now_ms, offsets, StreamOffset(0), checkpoint.as_deref(), pieces);
        from = *end;
    }
    assert_eq!(from, log.len());
    checkpoint.map_or_else(ProducerStates::default, |checkpoint| {
        ProducerStates::decode(&checkpoint, 0).unwrap()
    })
}

fn ids(states: &ProducerStates) -> Vec<i64> {
    states.active().iter().map(|producer| producer.id).collect()
}

#[test]
fn a_fold_expires_producers_by_the_servers_clock() {
    let log = log(&[(3, 0, 0, true), (1, 0, 0, false), (2, 0, 0, false), (4, 0, 0, false)]);
    let at = |later_ms| folded(&log, &[(NOW, 2), (NOW + 1, 3), (NOW + later_ms, 4)]);
    assert_eq!(ids(&at(DAY - 1)), [1, 2, 3, 4]);
    assert_eq!(ids(&at(DAY)), [2, 3, 4], "producers with an open transaction stay");
    assert_eq!(ids(&at(DAY + 1)), [3, 4]);
    // A clock that is set back expires no producers when it is correct again.
    let set_back = folded(&log, &[(30 * DAY, 2), (0, 3), (30 * DAY + 5, 4)]);
    assert_eq!(ids(&set_back), [1, 2, 3, 4]);
}

/// Record timestamps come from the client: an import may span years.
#[test]
fn record_timestamps_do_not_expire_producers() {
    let import: Vec<_> = (0..5)
        .map(|at| (1, 2 * at, i64::from(at) * 400 * DAY, false))
        .chain([(2, 0, 9_000 * DAY, false), (3, 0, -1, false)])
        .collect();
    let log = log(&import);
    for pieces in
        [&[(NOW, 7)][..], &[(NOW, 1), (NOW, 4), (NOW, 7)], &[(NOW, 5), (NOW + DAY - 1, 7)]]
    {
        let states = folded(&log, pieces);
        assert_eq!(ids(&states), [1, 2, 3]);
        for at in 0..5 {
            let verdict = states.check(&batch(1, 0, 2 * at, 2)).unwrap();
            assert!(
                matches!(verdict, Verdict::Duplicate(seen) if seen.base_offset == 2 * at as u64)
            );
        }
    }
}

#[test]
fn after_a_start_producers_expire_by_the_checkpoints_times_after_a_grace_period() {
    let now_ms = 10 * DAY;
    let start = |used_ms| {
        let mut states = ProducerStates::default();
        states.record(&batch(1, 0, 0, 1), 0, used_ms, used_ms);
        states.start_clock(now_ms);
        states.producers[&1].used_ms
    };
    assert_eq!(start(now_ms - 5), now_ms - 5);
    assert_eq!(start(i64::MAX), now_ms, "a checkpoint time in the future");
    assert_eq!(start(-1), now_ms - DAY + GRACE_MS);
}

fn transactional(producer_id: i64) -> BatchHeader {
    BatchHeader { attributes: 1 << 4, ..batch(producer_id, 0, 0, 1) }
}

/// A transaction of one record that begins at this offset.
fn begin(producers: &mut Counted, id: i64, offset: u64) {
    producers.change(|states| states.record(&transactional(id), offset, 0, NOW));
}

fn end(producers: &mut Counted, id: i64, outcome: Outcome, offset: u64) {
    producers.change(|states| states.record_marker(&batch(id, 0, -1, 1), outcome, offset, NOW));
}

#[test]
fn aborted_and_open_transactions_of_a_partition_are_limited_together() {
    const MAX: u64 = 1 << 18;
    let totals = Arc::<Totals>::default();
    let mut producers = Counted::new(ProducerStates::default(), totals.clone());
    begin(&mut producers, 1, 0);
    for at in 1..MAX {
        assert!(producers.can_track_transaction(), "{at}");
        begin(&mut producers, 2, 2 * at);
        end(&mut producers, 2, Outcome::Abort, 2 * at + 1);
    }
    assert!(!producers.can_track_transaction());
    assert!(!producers.begins_transaction(&transactional(1)), "its transaction continues");
    assert!(producers.begins_transaction(&transactional(2)));
    assert!(!producers.begins_transaction(&batch(3, 0, 0, 1)), "the batch is not transactional");
    assert_eq!(totals.transactions.get(), MAX as i64);

    // A checkpoint holds them all.
    let bytes = producers.encode(END).unwrap();
    let read = Counted::new(ProducerStates::decode(&bytes, 0).unwrap(), totals.clone());
    assert!(!read.can_track_transaction());
    assert_eq!(totals.transactions.get(), 2 * MAX as i64);
    drop(read);
    assert_eq!((totals.transactions.get(), totals.producers.get()), (MAX as i64, 2));

    end(&mut producers, 1, Outcome::Abort, 2 * MAX);
    assert_eq!(producers.aborted_in(0, u64::MAX).len() as u64, MAX);
    assert!(!producers.can_track_transaction(), "it is still tracked");
    producers.change(|states| states.drop_aborted(StreamOffset(4)));
    assert!(producers.can_track_transaction());
    assert_eq!(totals.transactions.get(), MAX as i64 - 1);
    begin(&mut producers, 1, 2 * MAX + 1);
    assert!(!producers.can_track_transaction());
    end(&mut producers, 1, Outcome::Commit, 2 * MAX + 2);
    assert!(producers.can_track_transaction(), "the transaction was committed");
}

#[test]
fn full_totals_leave_each_partition_its_minimum() {
    let totals = Arc::<Totals>::default();
    totals.fill();
    let mut producers = Counted::new(ProducerStates::default(), totals.clone());
    let others = totals.producers.get();
    for id in 0..32 {
        producers.change(|states| states.record(&batch(id, 0, 0, 1), id as u64, 0, NOW));
    }
    assert_eq!(ids(&producers), (0..32).collect::<Vec<_>>());
    begin(&mut producers, 0, 100);
    producers.change(|states| states.record(&batch(99, 0, 0, 1), 101, 0, NOW));
    let left: Vec<i64> = [0].into_iter().chain(2..32).chain([99]).collect();
    assert_eq!(ids(&producers), left, "the oldest without an open transaction is evicted");
    assert_eq!(totals.producers.get(), others + 32);

    // The producer that has just appended stays, even if it is the only one without an open
    // transaction.
    let mut open = Counted::new(ProducerStates::default(), totals.clone());
    for id in 0..40 {
        begin(&mut open, id, id as u64);
    }
    for id in [70, 71] {
        open.change(|states| states.record(&batch(id, 0, 0, 1), 100 + id as u64, 0, NOW));
        assert!(matches!(open.check(&batch(id, 0, 0, 1)).unwrap(), Verdict::Duplicate(_)));
    }
    assert_eq!(ids(&open), (0..40).chain([71]).collect::<Vec<_>>());
    drop(open);

    // The same holds after a start.
    let mut states = ProducerStates::default();
    for id in 0..100 {
        states.record(&batch(id, 0, 0, 1), id as u64, 0, NOW);
    }
    assert_eq!(ids(&Counted::new(states, totals.clone())), (68..100).collect::<Vec<_>>());

    for at in 1..128 {
        assert!(producers.can_track_transaction(), "{at}");
        begin(&mut producers, 1, 1_000 + 2 * at);
        end(&mut producers, 1, Outcome::Abort, 1_001 + 2 * at);
    }
    assert!(!producers.can_track_transaction());
    drop(producers);
    assert_eq!(totals.producers.get(), others);
}
