//! The checks of the fuzz targets `volume_log`, arbitrary bytes as the records of a log and as ops,
//! and `volume_store`, arbitrary bytes as sectors and as superblocks.

use alluvium_wal::{Damage, DeviceOffset, LogOffset};
use bytes::Bytes;
use uuid::Uuid;

use crate::log::{Record, Surveyor};
use crate::op::Op;
use crate::store::{CopyState, SECTOR_BYTES, SUPERBLOCK_BYTES, SectorState, choose, encode_lost};
use crate::types::{CheckpointNumber, SlotIndex};

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
    encoded.extend(op.blocks());
    // Whether the checksums hold or not: it must come to an end.
    let _ = op.verify();
    match encoded == *bytes {
        true => Ok(()),
        false => Err(format!("{bytes:?} is encoded as {encoded:?}")),
    }
}

/// The store and slot of the sectors of [`store`].
const STORE_ID: Uuid = Uuid::from_u128(1);
const SLOT: SlotIndex = SlotIndex(9);
/// Bytes of sectors and superblocks that a checksum is of.
const CRC_AT: usize = 508;

/// Takes `data` as sectors, if its first byte is even, or as pairs of superblock copies. With the
/// second bit of that byte they get right checksums. Whatever counts is encoded to the same fields
/// again.
pub fn store(data: &[u8]) -> Result<(), String> {
    let Some((kind, data)) = data.split_first() else { return Ok(()) };
    let has_checksums = kind & 2 != 0;
    let units: Vec<[u8; SECTOR_BYTES]> = data
        .chunks(SECTOR_BYTES)
        .map(|chunk| std::array::from_fn(|at| chunk.get(at).copied().unwrap_or(0)))
        .collect();
    if kind & 1 == 0 {
        return units.into_iter().try_for_each(|unit| check_sector(unit, has_checksums));
    }
    units.chunks(2).try_for_each(|pair| {
        let copies = [&pair[0], pair.last().expect("a chunk is not empty")];
        check_superblocks(copies.map(|unit| copy_of(unit, has_checksums)))
    })
}

fn sector_checksum(bytes: &[u8; SECTOR_BYTES]) -> [u8; 4] {
    let crc = crc32c::crc32c(STORE_ID.as_bytes());
    let crc = crc32c::crc32c_append(crc, &SLOT.0.to_le_bytes());
    crc32c::crc32c_append(crc, &bytes[..CRC_AT]).to_le_bytes()
}

fn check_sector(mut bytes: [u8; SECTOR_BYTES], has_checksum: bool) -> Result<(), String> {
    if has_checksum {
        let crc = sector_checksum(&bytes);
        bytes[CRC_AT..].copy_from_slice(&crc);
    }
    let state = SectorState::decode(STORE_ID, SLOT, &bytes);
    // Refused or not: it must come to an end.
    let _ = state.check(SLOT, CheckpointNumber(5));
    let mut encoded = [0; SECTOR_BYTES];
    match &state {
        SectorState::Valid(sector) => sector.encode(STORE_ID, SLOT, &mut encoded),
        SectorState::Lost(checkpoint) => encode_lost(*checkpoint, STORE_ID, SLOT, &mut encoded),
        SectorState::Free | SectorState::Future { .. } | SectorState::Damaged => return Ok(()),
    }
    // Reserved bytes are ignored, and written as zeros.
    bytes[488..CRC_AT].fill(0);
    let crc = sector_checksum(&bytes);
    bytes[CRC_AT..].copy_from_slice(&crc);
    match encoded == bytes {
        true => Ok(()),
        false => Err(format!("{state:?} is encoded as {encoded:?}")),
    }
}

fn copy_of(unit: &[u8; SECTOR_BYTES], has_checksum: bool) -> [u8; SUPERBLOCK_BYTES] {
    let mut page = [0; SUPERBLOCK_BYTES];
    page[..SECTOR_BYTES].copy_from_slice(unit);
    if has_checksum {
        let crc = crc32c::crc32c(&page[..CRC_AT]);
        page[CRC_AT..SECTOR_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
    page
}

fn check_superblocks(pages: [[u8; SUPERBLOCK_BYTES]; 2]) -> Result<(), String> {
    let copies = pages.each_ref().map(CopyState::decode);
    for copy in &copies {
        let CopyState::Valid(superblock) = copy else { continue };
        let mut encoded = [0; SUPERBLOCK_BYTES];
        superblock.encode(&mut encoded);
        if CopyState::decode(&encoded) != *copy {
            return Err(format!("{copy:?} is encoded as {encoded:?}"));
        }
    }
    let Ok(chosen) = choose(&copies) else { return Ok(()) };
    let counts = chosen.current.superblock();
    let _ = counts.check_device(1 << 30);
    let _ = counts.check_log(CheckpointNumber(5), LogOffset(1000));
    let generations = copies.iter().filter_map(|copy| match copy {
        CopyState::Valid(superblock) => Some(superblock.generation),
        _ => None,
    });
    match generations.max() {
        Some(generation) if generation == counts.generation => Ok(()),
        greatest => Err(format!("{counts:?} counts, and the greatest generation is {greatest:?}")),
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

    #[test]
    fn the_seeds_are_sectors_and_superblocks() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/volume_store");
        let mut found = Vec::new();
        for seed in fs::read_dir(directory).expect("the target has seeds") {
            let path = seed.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            store(&bytes).unwrap_or_else(|what| panic!("{path:?}: {what}"));
            let mut unit = [0; SECTOR_BYTES];
            unit.copy_from_slice(&bytes[1..=SECTOR_BYTES]);
            let crc = sector_checksum(&unit);
            unit[CRC_AT..].copy_from_slice(&crc);
            let is_valid = match bytes[0] {
                2 => !matches!(
                    SectorState::decode(STORE_ID, SLOT, &unit),
                    SectorState::Free | SectorState::Damaged
                ),
                _ => matches!(CopyState::decode(&copy_of(&unit, true)), CopyState::Valid(_)),
            };
            assert!(is_valid, "{path:?}");
            found.push(bytes[0]);
        }
        assert!(found.contains(&2) && found.contains(&3), "{found:?}");
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

        /// Sectors and superblocks of which some bytes are changed.
        #[test]
        fn arbitrary_sectors_and_superblocks_are_refused_or_kept(
            kind in 0..4_u8,
            changes in prop::collection::vec((0..1024_usize, any::<u8>()), 0..20),
        ) {
            let mut data = vec![0; 1025];
            data[0] = kind;
            for unit in data[1..].chunks_mut(SECTOR_BYTES) {
                if kind & 1 == 0 {
                    unit[..5].copy_from_slice(b"ALVS\x01");
                    for field in [8, 16, 28, 32, 480] {
                        unit[field] = 1;
                    }
                } else {
                    unit[..9].copy_from_slice(b"ALLUVSTO\x01");
                    // Capacity and maximum of 16 MiB, server 1, cluster `c`.
                    for (at, byte) in [(59, 1), (67, 1), (96, 1), (100, 1), (104, b'c')] {
                        unit[at] = byte;
                    }
                }
            }
            for (at, byte) in changes {
                data[at + 1] = byte;
            }
            prop_assert_eq!(store(&data), Ok(()));
        }
    }
}
