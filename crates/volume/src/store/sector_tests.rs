//! Bytes, damage, words and epochs of sectors.

use proptest::collection::vec;
use proptest::prelude::*;
use uuid::Uuid;

use super::error::{Ahead, StoreError};
use super::layout::{SECTOR_BYTES, SLOT_BLOCKS};
use super::sector::{Address, BlockEpoch, Sector, SectorState, Word, encode_lost, mix};
use crate::types::{
    BlockIndex, CheckpointNumber, ChunkIndex, GroupId, Layer, PeerId, SlotIndex, SlotNumber,
    VolumeId,
};

type Bytes = [u8; SECTOR_BYTES];

const STORE: Uuid = Uuid::from_bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
const SLOT: SlotIndex = SlotIndex(9);

/// The checkpoint before the one whose words have this epoch.
fn epoch(number: u64) -> BlockEpoch {
    BlockEpoch::after(CheckpointNumber(number - 1))
}

fn data_crc() -> u32 {
    let block: Vec<u8> = (0..=255).cycle().take(4096).collect();
    crc32c::crc32c(&block)
}

/// The example of the document.
fn example() -> Sector {
    let address = Address {
        group: GroupId(1),
        peer: PeerId(7),
        volume: VolumeId(2),
        layer: Layer(0),
        chunk: ChunkIndex(3),
        number: SlotNumber(0),
    };
    let mut words = [Word::ABSENT; SLOT_BLOCKS];
    words[4] = Word::of_data(data_crc(), address.mix(4));
    words[5] = Word::ZEROS;
    let mut epochs = [BlockEpoch::default(); SLOT_BLOCKS];
    (epochs[4], epochs[5]) = (epoch(5), epoch(5));
    Sector { address, checkpoint: CheckpointNumber(5), words, epochs }
}

fn encode(sector: &Sector, slot: SlotIndex) -> Bytes {
    let mut bytes = [0xff; SECTOR_BYTES];
    sector.encode(STORE, slot, &mut bytes);
    bytes
}

fn lost(checkpoint: u64) -> Bytes {
    let mut bytes = [0xff; SECTOR_BYTES];
    encode_lost(CheckpointNumber(checkpoint), STORE, SLOT, &mut bytes);
    bytes
}

fn decode(bytes: &Bytes) -> SectorState {
    SectorState::decode(STORE, SLOT, bytes)
}

/// Changes bytes, and gives the sector the checksum of what it has then.
fn resealed(mut bytes: Bytes, at: usize, change: &[u8]) -> Bytes {
    bytes[at..at + change.len()].copy_from_slice(change);
    let covered = [STORE.as_bytes(), &SLOT.0.to_le_bytes()[..], &bytes[..508]].concat();
    bytes[508..].copy_from_slice(&crc32c::crc32c(&covered).to_le_bytes());
    bytes
}

fn word() -> impl Strategy<Value = Word> {
    let data = any::<(u32, u32)>().prop_map(|(crc, mix)| Word::of_data(crc, mix));
    prop_oneof![Just(Word::ABSENT), Just(Word::ZEROS), data]
}

fn sector() -> impl Strategy<Value = Sector> {
    let ids = (1..=u64::MAX, 1..=u64::MAX, 1..=u32::MAX, any::<u32>(), 0..1_u32 << 22, 0..64_u8);
    let address = ids.prop_map(|(group, peer, volume, layer, chunk, number)| Address {
        group: GroupId(group),
        peer: PeerId(peer),
        volume: VolumeId(volume),
        layer: Layer(layer),
        chunk: ChunkIndex(chunk),
        number: SlotNumber(number),
    });
    let epochs = vec(1..1_u64 << 32, SLOT_BLOCKS);
    (address, 1..1_u64 << 32, vec(word(), SLOT_BLOCKS), epochs, 0..SLOT_BLOCKS).prop_map(
        |(address, checkpoint, words, epochs, set)| {
            let mut words: [Word; SLOT_BLOCKS] = words.try_into().unwrap();
            if words[set] == Word::ABSENT {
                words[set] = Word::ZEROS;
            }
            let epochs = std::array::from_fn(|block| epoch(epochs[block]));
            Sector { address, checkpoint: CheckpointNumber(checkpoint), words, epochs }
        },
    )
}

proptest! {
    #[test]
    fn a_sector_is_read_as_it_was_written(sector in sector(), slot: u32) {
        let bytes = encode(&sector, SlotIndex(slot));
        let read = SectorState::decode(STORE, SlotIndex(slot), &bytes);
        prop_assert_eq!(read, SectorState::Valid(sector));
    }

    #[test]
    fn a_sector_of_another_slot_or_store_is_damaged(
        sector in sector(),
        slots in any::<(u32, u32)>(),
        other: [u8; 16],
    ) {
        prop_assume!(slots.0 != slots.1 && other != *STORE.as_bytes());
        let bytes = encode(&sector, SlotIndex(slots.0));
        let moved = SectorState::decode(STORE, SlotIndex(slots.1), &bytes);
        prop_assert_eq!(moved, SectorState::Damaged);
        let other = SectorState::decode(Uuid::from_bytes(other), SlotIndex(slots.0), &bytes);
        prop_assert_eq!(other, SectorState::Damaged);
    }

    /// Bytes with a checksum that is right: what is accepted is within its bounds, so that it can
    /// be encoded, and only reserved bytes are lost.
    #[test]
    fn hostile_bytes_with_a_right_checksum_are_bounded(
        sector in sector(),
        changes in vec((0..508_usize, any::<u8>()), 0..6),
        is_lost: bool,
    ) {
        let mut bytes = if is_lost { lost(3) } else { encode(&sector, SLOT) };
        for (at, byte) in changes {
            bytes = resealed(bytes, at, &[byte]);
        }
        let cleared = resealed(bytes, 488, &[0; 20]);
        match decode(&bytes) {
            SectorState::Valid(sector) => prop_assert_eq!(encode(&sector, SLOT), cleared),
            SectorState::Lost(checkpoint) => prop_assert_eq!(lost(checkpoint.0), cleared),
            SectorState::Future { .. } | SectorState::Damaged => {}
            SectorState::Free => prop_assert!(false, "a sector with a checksum is not zeros"),
        }
    }

    #[test]
    fn the_word_of_data_is_never_that_of_a_block_without_data(crc: u32, mix: u32) {
        for (crc, mix) in [(crc, mix), (crc, crc), (crc, crc ^ 1)] {
            prop_assert!(Word::of_data(crc, mix).has_data());
        }
    }

    /// A block that was written to, or read from, another position has a wrong word. Identities
    /// that differ in one of the fields below differ within 32 adjacent bits, so their mixes
    /// differ; two words of one block are equal then only as values that 0 or 1 became.
    #[test]
    fn a_misdirected_block_has_a_wrong_word(
        id in (1..=u64::MAX, 1..=u32::MAX, 0..1_u32 << 22, 0..4096_u16),
        other in (any::<u32>(), 1..=u32::MAX, 0..1_u32 << 22, 0..4096_u16),
        crc: u32,
    ) {
        let mix = |group, volume, chunk, block| {
            mix(GroupId(group), VolumeId(volume), ChunkIndex(chunk), BlockIndex(block))
        };
        let (group, volume, chunk, block) = id;
        let here = mix(group, volume, chunk, block);
        let others = [
            (mix(group ^ u64::from(other.0), volume, chunk, block), other.0 != 0),
            (mix(group, other.1, chunk, block), other.1 != volume),
            (mix(group, volume, other.2, block), other.2 != chunk),
            (mix(group, volume, chunk, other.3), other.3 != block),
        ];
        for (there, differs) in others {
            prop_assert_eq!(here != there, differs);
            let is_special = (crc ^ here) < 4 && (crc ^ there) < 4;
            let is_other = Word::of_data(crc, here) != Word::of_data(crc, there);
            prop_assert!(is_other || !differs || is_special);
        }
    }

    /// `set` is the number before its reduction, `complete` the last complete checkpoint. The block
    /// is sent if its change may be above the base of `since`; a wrap only adds blocks.
    #[test]
    fn a_block_that_has_changed_is_needed_also_when_epochs_have_wrapped(
        complete in prop_oneof![0..1000_u64, 0..(1_u64 << 32) - 1, (1_u64 << 24) - 9..1_u64 << 24],
        back in prop_oneof![0..3_u64, 0..1_u64 << 25, (1_u64 << 24) - 3..(1_u64 << 24) + 3],
        target in prop_oneof![0..3_u64, 0..1_u64 << 25, (1_u64 << 24) - 3..(1_u64 << 24) + 3],
    ) {
        let next = complete + 1;
        let (set, since) = (next.saturating_sub(back), next.saturating_sub(target));
        // A set of 0 is a word that was never set.
        let epoch = if set == 0 { BlockEpoch::default() } else { epoch(set) };
        let age = epoch.age(CheckpointNumber(complete));
        prop_assert!(age <= next - set, "set in {set}, age {age}, next {next}");
        prop_assert!(age == next - set || next - set >= 1 << 24);
        let is_needed = epoch.is_needed(CheckpointNumber(since), CheckpointNumber(complete));
        if set >= since {
            prop_assert!(is_needed, "set in {set}, changed since {since}, next {next}");
        } else if next - set < 1 << 24 {
            prop_assert!(!is_needed, "set in {set}, unchanged since {since}, next {next}");
        }
    }

    #[test]
    fn a_source_without_such_a_checkpoint_sends_every_block(
        complete in 0..1_u64 << 32,
        since: u64,
        set in 1..1_u64 << 32,
    ) {
        prop_assume!(since > complete + 1 || complete + 1 - since >= 1 << 24);
        let complete = CheckpointNumber(complete);
        prop_assert!(epoch(set).is_needed(CheckpointNumber(since), complete));
    }
}

/// Written out from the table of the document, with the checksum that it states.
#[test]
fn a_sector_has_the_bytes_of_the_document() {
    let mut expected = b"ALVS\x01\0\0\0".to_vec();
    expected.extend([1, 0, 0, 0, 0, 0, 0, 0]); // group
    expected.extend([2, 0, 0, 0, 3, 0, 0, 0]); // volume, chunk
    expected.extend([0, 0, 0, 0, 5, 0, 0, 0]); // layer, number
    for word in [0, 0, 0, 0, 0xd572_414b_u32, 1] {
        expected.extend(word.to_le_bytes());
    }
    expected.resize(288, 0);
    expected.extend([0; 12]);
    expected.extend([5, 0, 0, 5, 0, 0]); // epochs of blocks 4 and 5
    expected.resize(480, 0);
    expected.extend([7, 0, 0, 0, 0, 0, 0, 0]); // peer
    expected.resize(508, 0);
    expected.extend(0x3c7a_47fa_u32.to_le_bytes());
    assert_eq!(encode(&example(), SLOT)[..], expected[..]);
    assert_eq!(decode(&expected.try_into().unwrap()), SectorState::Valid(example()));
}

/// Every field with bytes that are all different, so that none is read from another's place.
#[test]
fn each_field_of_a_sector_has_its_place() {
    let address = Address {
        group: GroupId(0x0807_0605_0403_0201),
        peer: PeerId(0x2827_2625_2423_2221),
        volume: VolumeId(0x1413_1211),
        layer: Layer(0x1c1b_1a19),
        chunk: ChunkIndex(0x0017_1615),
        number: SlotNumber(0x3f),
    };
    let words = std::array::from_fn(|block| Word::of_data(0x0100 + block as u32, 0));
    let epochs = std::array::from_fn(|block| epoch(0x0002_0000 + block as u64));
    let checkpoint = CheckpointNumber(0x201f_1e1d);
    let bytes = encode(&Sector { address, checkpoint, words, epochs }, SLOT);
    assert_eq!(bytes[6..8], [0x3f, 0]);
    assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(bytes[16..24], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0]);
    assert_eq!(bytes[24..32], [0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f, 0x20]);
    for block in 0..64 {
        assert_eq!(bytes[32 + 4 * block..][..4], [block as u8, 1, 0, 0]);
        assert_eq!(bytes[288 + 3 * block..][..3], [block as u8, 0, 2]);
    }
    assert_eq!(bytes[480..488], [0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28]);
    assert_eq!(bytes[488..508], [0; 20]);
}

#[test]
fn mix_and_words_are_those_of_the_document() {
    let zeros = crc32c::crc32c(&[0; 4096]);
    let table = [
        ((1, 2, 3, 4), 0x4903_bf79, 0xd1fa_fef0, 0xd572_414b),
        ((1, 2, 3, 5), 0x9446_15c1, 0x0cbf_5448, 0x0837_ebf3),
        (
            (0x0102_0304_0506_0708, 0x1112_1314, 0x0021_2223, 4095),
            0x45bb_b037,
            0xdd42_f1be,
            0xd9ca_4e05,
        ),
    ];
    for ((group, volume, chunk, block), value, of_zeros, of_data) in table {
        let mix = mix(GroupId(group), VolumeId(volume), ChunkIndex(chunk), BlockIndex(block));
        assert_eq!(mix, value);
        let encoded = |crc| {
            let mut sector = example();
            sector.words[0] = Word::of_data(crc, mix);
            u32::from_le_bytes(encode(&sector, SLOT)[32..36].try_into().unwrap())
        };
        assert_eq!((encoded(zeros), encoded(data_crc())), (of_zeros, of_data));
    }
    assert_eq!(Word::of_data(5, 5), Word::of_data(7, 5), "0 becomes 2");
    assert_eq!(Word::of_data(4, 5), Word::of_data(6, 5), "1 becomes 3");
    assert!(!Word::ABSENT.has_data() && !Word::ZEROS.has_data());
}

#[test]
fn a_block_of_a_slot_is_identified_by_its_number_in_the_chunk() {
    let address = Address { number: SlotNumber(63), ..example().address };
    assert_eq!(address.block(0), BlockIndex(4032));
    assert_eq!(address.block(63), BlockIndex(4095));
    let Address { group, volume, chunk, .. } = address;
    assert_eq!(address.mix(63), mix(group, volume, chunk, BlockIndex(4095)));
}

#[test]
fn each_changed_bit_of_a_sector_makes_it_damaged() {
    for bytes in [encode(&example(), SLOT), lost(5)] {
        for bit in 0..8 * SECTOR_BYTES {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&changed), SectorState::Damaged, "bit {bit}");
        }
    }
}

#[test]
fn only_zeros_are_a_free_slot() {
    assert_eq!(decode(&[0; SECTOR_BYTES]), SectorState::Free);
    for at in 0..SECTOR_BYTES {
        let mut bytes = [0; SECTOR_BYTES];
        bytes[at] = 1;
        assert_eq!(decode(&bytes), SectorState::Damaged, "byte {at}");
    }
}

#[test]
fn a_sector_with_a_right_checksum_is_damaged_if_a_field_is_out_of_its_bounds() {
    let bytes = encode(&example(), SLOT);
    let with = |at, change: &[u8]| decode(&resealed(bytes, at, change));
    let valid = |state| matches!(state, SectorState::Valid(_));
    assert!(valid(with(6, &[63])) && !valid(with(6, &[64])), "slot number");
    assert!(valid(with(20, &[0xff, 0xff, 0x3f])) && !valid(with(20, &[0, 0, 0x40])), "chunk");
    let damaged = [(8, 8, "group"), (16, 4, "volume"), (28, 4, "checkpoint"), (480, 8, "peer")];
    for (at, len, field) in damaged {
        assert_eq!(with(at, &[0; 8][..len]), SectorState::Damaged, "{field}");
    }
    assert_eq!(with(32, &[0; 256]), SectorState::Damaged, "no block");
    // Reserved bytes may get a meaning that a reader need not know.
    assert_eq!(with(488, &[1; 20]), SectorState::Valid(example()));
}

#[test]
fn a_lost_sector_has_no_address() {
    let bytes = lost(0x0102_0304);
    let mut expected = b"ALVS\x01\0\0\x01".to_vec();
    expected.resize(28, 0);
    expected.extend([4, 3, 2, 1]);
    expected.resize(508, 0);
    assert_eq!(bytes[..508], expected[..]);
    assert_eq!(decode(&bytes), SectorState::Lost(CheckpointNumber(0x0102_0304)));
    for at in (0..512).filter(|at| matches!(at, 6 | 8..28 | 32..488)) {
        assert_eq!(decode(&resealed(bytes, at, &[1])), SectorState::Damaged, "byte {at}");
    }
    assert_eq!(decode(&resealed(bytes, 28, &[0; 4])), SectorState::Damaged, "no checkpoint");
}

#[test]
fn a_sector_of_a_newer_version_or_checkpoint_refuses_the_opening() {
    let log = CheckpointNumber(4);
    let check = |bytes: &Bytes| decode(bytes).check(SLOT, log);
    let future =
        |version, flags| Err(StoreError::FutureVersion { found: "sector", version, flags });
    let bytes = encode(&example(), SLOT);
    // No other field of it is examined.
    let other = resealed(bytes, 8, &[0; 500]);
    assert_eq!(check(&resealed(other, 4, &[2, 1])), future(0x0102, 0));
    assert_eq!(check(&resealed(other, 7, &[2])), future(1, 2));
    assert_eq!(check(&resealed(lost(5), 7, &[3])), future(1, 3));

    assert_eq!(check(&[0; SECTOR_BYTES]), Ok(()));
    assert_eq!(check(&[1; SECTOR_BYTES]), Ok(()), "damage does not refuse the opening");
    assert_eq!(check(&bytes), Ok(()), "5 is the checkpoint that may have been interrupted");
    assert_eq!(check(&lost(5)), Ok(()));
    let ahead = |sector| {
        let sector = CheckpointNumber(sector);
        Err(StoreError::LogBehindStore(Ahead::Sector { slot: SLOT, sector, log }))
    };
    assert_eq!(check(&lost(6)), ahead(6));
    let mut sector = example();
    sector.address.layer = Layer(1);
    let layer = StoreError::UnknownLayer { slot: SLOT, layer: Layer(1) };
    assert_eq!(check(&encode(&sector, SLOT)), Err(layer));
    let sector = Sector { checkpoint: CheckpointNumber(u32::MAX.into()), ..example() };
    assert_eq!(check(&encode(&sector, SLOT)), ahead(u32::MAX.into()));
}

/// The numbers before the reduction, around a wrap.
#[test]
fn an_epoch_that_has_wrapped_adds_blocks_only() {
    let wrap = 1 << 24;
    let is_needed = |set, since, complete| {
        epoch(set).is_needed(CheckpointNumber(since), CheckpointNumber(complete))
    };
    // Set in checkpoint 5, while 4 was complete; the target has what 5 and 6 cover.
    assert!(is_needed(5, 5, 4) && is_needed(5, 5, 9));
    assert!(!is_needed(5, 6, 9));
    // 2^24 checkpoints later its age is that of a block that was set just now.
    assert!(is_needed(5, wrap + 5, wrap + 4));
    assert!(!is_needed(5, wrap + 4, wrap + 3), "its age is 2^24 - 1");
    assert!(is_needed(5, 5, wrap + 3) && is_needed(5, 5, wrap + 4));
    // An epoch that is ahead, as an interrupted checkpoint's number would be, has almost that age.
    assert!(!is_needed(6, 5, 4), "the document's reason against the number of the writer");
}
