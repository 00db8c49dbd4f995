//! The check of the fuzz target `volume_log`: arbitrary bytes as the records of a log, and as ops.

use alluvium_wal::{Damage, DeviceOffset, LogOffset};
use bytes::Bytes;

use crate::log::{Record, Surveyor};
use crate::op::{BlockOp, Change, Op};

/// Takes `data` as a sequence of payloads. Each begins with its length in two bytes, of which the
/// highest bit puts damage in front of it. Whatever is accepted is encoded to the same bytes again,
/// and a survey of it ends without a panic.
pub fn log(data: &[u8]) -> Result<(), String> {
    let mut surveyor = Surveyor::default();
    let mut damage = Vec::new();
    let (mut rest, mut offset) = (data, 0_u64);
    while let Some((head, tail)) = rest.split_first_chunk() {
        let head = u16::from_le_bytes(*head);
        let (payload, tail) = tail.split_at(tail.len().min(usize::from(head & 0x7fff)));
        rest = tail;
        if head & 0x8000 != 0 {
            let range = LogOffset(offset)..LogOffset(offset + 64);
            offset += 64;
            damage.push(Damage { range, device_at: DeviceOffset(0), reason: String::new() });
            surveyor.damage();
        }
        let payload = Bytes::copy_from_slice(payload);
        check_op(&payload)?;
        let Ok(record) = Record::decode(&payload) else { continue };
        let mut encoded = record.encode_head();
        if let Record::Entries(entries) = &record {
            for entry in &entries.entries {
                encoded.extend(&entry.data);
                check_op(&entry.data)?;
            }
        }
        if encoded != payload {
            return Err(format!("{payload:?} is encoded as {encoded:?}"));
        }
        surveyor.record(LogOffset(offset), record);
        offset += 32 + payload.len() as u64;
    }
    let survey = surveyor.finish(&damage);
    match survey.is_damaged_behind && survey.replicas.values().any(Result::is_ok) {
        true => Err(format!("sound in a log that is damaged behind its checkpoint: {survey:?}")),
        false => Ok(()),
    }
}

fn check_op(bytes: &Bytes) -> Result<(), String> {
    let Ok(op) = Op::decode(bytes) else { return Ok(()) };
    let mut encoded = op.encode_head();
    if let Op::Blocks(BlockOp { change: Change::Write { data, .. }, .. }) = &op {
        encoded.extend(data);
    }
    // Whether the checksums hold or not: it must come to an end.
    let _ = op.verify();
    match encoded == *bytes {
        true => Ok(()),
        false => Err(format!("{bytes:?} is encoded as {encoded:?}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// The seeds are written by hand from the documents.
    #[test]
    fn the_seeds_are_records_and_ops() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/volume_log");
        let mut seeds = 0;
        for seed in fs::read_dir(directory).expect("the target has seeds") {
            let path = seed.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            log(&bytes).unwrap_or_else(|what| panic!("{path:?}: {what}"));
            let payload = Bytes::copy_from_slice(&bytes[2..]);
            let is_valid = match payload[0] {
                b'V' => Record::decode(&payload).map(drop).map_err(|error| error.to_string()),
                _ => Op::decode(&payload).map(drop).map_err(|error| error.to_string()),
            };
            assert_eq!(is_valid, Ok(()), "{path:?}");
            seeds += 1;
        }
        assert!(seeds >= 8, "{seeds} seeds");
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], 0..300)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Bytes that often begin as records do.
        #[test]
        fn arbitrary_payloads_are_refused_or_kept(
            payloads in prop::collection::vec((any::<bool>(), 1..6_u8, bytes()), 0..6),
        ) {
            let mut data = Vec::new();
            for (is_behind_damage, kind, bytes) in payloads {
                let flag = if is_behind_damage { 0x8000 } else { 0 };
                data.extend((flag | (8 + bytes.len() as u16)).to_le_bytes());
                data.extend([b'V', 1, kind, 0, 0, 0, 0, 0]);
                data.extend(bytes);
            }
            prop_assert_eq!(log(&data), Ok(()));
        }
    }
}
