//! Sequences, transactions and checkpoints.

use super::*;

const NOW: Duration = Duration::from_secs(1);

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
    assert!(
        matches!(duplicate, Verdict::Duplicate(seen) if seen.base_offset == 100 && seen.end().0 == 105)
    );
    append(&mut states, &batch(1, 0, 3, 1), 105);
    assert_eq!(states.check(&batch(1, 0, 5, 1)).unwrap_err().code(), 45);
}

#[test]
fn a_repetition_is_recognised_among_the_last_five() {
    let mut states = ProducerStates::default();
    for i in 0..6 {
        append(&mut states, &batch(1, 0, i * 10, 10), i as u64 * 10);
    }
    for i in 1..6 {
        let verdict = states.check(&batch(1, 0, i * 10, 10)).unwrap();
        assert!(matches!(verdict, Verdict::Duplicate(seen) if seen.base_offset == i as u64 * 10));
    }
    assert_eq!(
        states.check(&batch(1, 0, 0, 10)).unwrap_err().code(),
        45,
        "too old to be recognised"
    );
    assert_eq!(states.check(&batch(1, 0, 50, 9)).unwrap_err().code(), 45, "not the same batch");
    assert_eq!(states.check(&batch(1, 0, 61, 1)).unwrap_err().code(), 45, "a gap");
    assert_eq!(states.check(&batch(1, 0, 60, 1)).unwrap(), Verdict::Append);
}

#[test]
fn a_new_epoch_begins_at_zero_and_ends_the_old_one() {
    let mut states = ProducerStates::default();
    append(&mut states, &batch(1, 3, 0, 1), 0);
    assert_eq!(states.check(&batch(1, 4, 1, 1)).unwrap_err().code(), 45);
    append(&mut states, &batch(1, 4, 0, 1), 1);
    assert_eq!(states.check(&batch(1, 3, 1, 1)).unwrap_err().code(), 47);
    assert_eq!(
        states.check(&batch(1, 3, 0, 1)).unwrap_err().code(),
        47,
        "its batches are forgotten"
    );
}

#[test]
fn an_unknown_producer_may_begin_anywhere_and_a_plain_batch_is_never_checked() {
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
        "the oldest go"
    );

    states.record(&batch(1_000_000, 0, 0, 1), 1_000_000, 0, NOW + EXPIRATION);
    assert_eq!(states.producers.len(), 1);
}

#[test]
fn a_checkpoint_is_what_was_written() {
    assert_eq!(ProducerStates::default().encode(), None);
    let mut states = ProducerStates::default();
    for i in 0..7 {
        states.record(&batch(i % 3, 2, 0, 4), i as u64 * 4, i, NOW);
    }
    let bytes = states.encode().unwrap();
    let mut read = ProducerStates::decode(&bytes, NOW).unwrap();
    read.swept_at = states.swept_at;
    assert_eq!(read, states);
    for len in 0..bytes.len() {
        assert!(ProducerStates::decode(&bytes[..len], NOW).is_err(), "{len} bytes");
    }
    for bit in 8..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(ProducerStates::decode(&damaged, NOW).unwrap_err(), BadCheckpoint::Checksum);
    }
    let with_checksum = |content: &[u8]| [content, &crc32c::crc32c(content).to_le_bytes()].concat();
    let content = &bytes[..bytes.len() - 4];
    let longer = with_checksum(&[content, &[0]].concat());
    assert!(matches!(ProducerStates::decode(&longer, NOW), Err(BadCheckpoint::Content(_))));
    let shorter = with_checksum(&content[..content.len() - 1]);
    assert_eq!(ProducerStates::decode(&shorter, NOW).unwrap_err(), BadCheckpoint::Truncated);
    let mut newer = bytes.clone();
    newer[0] = 3;
    assert_eq!(ProducerStates::decode(&newer, NOW).unwrap_err(), BadCheckpoint::Version(3));
}

/// Bytes that format version 1 has written; they must open for ever.
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
    let mut read = ProducerStates::decode(&bytes, NOW).unwrap();
    read.swept_at = states.swept_at;
    assert_eq!(read, states);
}

#[test]
fn folding_in_parts_is_folding_at_once() {
    let produced = |sequence, base| {
        let payload = batch::tests::encode(
            kafka_protocol::records::Compression::None,
            (4, 0, sequence),
            &[1, 2],
        );
        Batch { base: StreamOffset(base), count: 2, max_timestamp_ms: 2, payload }
    };
    let batches = [produced(0, 0), produced(2, 2), produced(4, 4)];
    let at_once = fold(StreamOffset(0), None, &batches);
    let in_parts =
        fold(StreamOffset(0), fold(StreamOffset(0), None, &batches[..1]).as_deref(), &batches[1..]);
    assert_eq!(at_once, in_parts);
    let states = ProducerStates::decode(&at_once.unwrap(), NOW).unwrap();
    assert_eq!(states.check(&batch(4, 0, 6, 1)).unwrap(), Verdict::Append);
}
