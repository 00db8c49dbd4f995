//! Bytes of superblock copies, the choice between two, and what is refused.

use alluvium_wal::{DeviceOffset, LogOffset};
use proptest::prelude::*;
use uuid::Uuid;

use super::error::{Ahead, CopyDamage, StoreError};
use super::layout::{Layout, LayoutError, SUPERBLOCK_BYTES};
use super::superblock::{Chosen, CopyState, Current, Owner, Superblock, choose};
use crate::fields::FieldError;
use crate::types::{CheckpointNumber, ServerId};

type Page = [u8; SUPERBLOCK_BYTES];

const MIB: u64 = 1 << 20;
const MAX: u64 = 64 * MIB;

fn owner() -> Owner {
    Owner {
        wal_id: Uuid::from_bytes([0x22; 16]),
        store_id: Uuid::from_bytes([0x11; 16]),
        server: ServerId(3),
        cluster: "zürich".to_owned(),
    }
}

fn example() -> Superblock {
    let Owner { wal_id, store_id, server, cluster } = owner();
    Superblock {
        store_id,
        wal_id,
        generation: 0x0102_0304_0506_0708,
        layout: Layout::new(8 * MIB, MAX).unwrap(),
        checkpoint: CheckpointNumber(0x0a0b_0c0d),
        wal_offset: LogOffset(0x1112_1314_1516_1718),
        written_at_ms: 0x2122_2324_2526_2728,
        server,
        cluster,
    }
}

fn encode(superblock: &Superblock) -> Page {
    let mut page = [0xff; SUPERBLOCK_BYTES];
    superblock.encode(&mut page);
    page
}

/// Changes bytes, and gives the copy the checksum of what it has then.
fn resealed(mut page: Page, at: usize, change: &[u8]) -> Page {
    page[at..at + change.len()].copy_from_slice(change);
    let crc = crc32c::crc32c(&page[..508]);
    page[508..512].copy_from_slice(&crc.to_le_bytes());
    page
}

fn copy(generation: u64, checkpoint: u64) -> Superblock {
    let checkpoint = CheckpointNumber(checkpoint);
    Superblock { generation, checkpoint, wal_offset: LogOffset(100), ..example() }
}

fn valid(generation: u64, checkpoint: u64) -> CopyState {
    CopyState::Valid(copy(generation, checkpoint))
}

fn superblock() -> impl Strategy<Value = Superblock> {
    let ids = any::<([u8; 16], [u8; 16])>();
    let numbers = (0..1_u64 << 63, 0..1_u64 << 32, 0..1_u64 << 63, any::<u64>(), 1..=u32::MAX);
    let sizes = (4..1000_u64, 0..1000_u64);
    (ids, numbers, sizes, "[a-z0-9.äß\u{1d11e}-]{1,60}").prop_map(
        |((store_id, wal_id), numbers, (capacity, extra), cluster)| {
            let (generation, checkpoint, wal_offset, written_at_ms, server) = numbers;
            // Enough for the sectors of the maximum.
            let capacity = capacity + 6;
            Superblock {
                store_id: Uuid::from_bytes(store_id),
                wal_id: Uuid::from_bytes(wal_id),
                generation,
                layout: Layout::new(capacity * MIB, (capacity + extra) * MIB).unwrap(),
                checkpoint: CheckpointNumber(checkpoint),
                wal_offset: LogOffset(wal_offset),
                written_at_ms,
                server: ServerId(server),
                cluster,
            }
        },
    )
}

proptest! {
    #[test]
    fn a_superblock_is_read_as_it_was_written(superblock in superblock()) {
        prop_assert_eq!(CopyState::decode(&encode(&superblock)), CopyState::Valid(superblock));
    }

    /// What is accepted is within its bounds, so that it can be encoded, and only reserved bytes
    /// are lost.
    #[test]
    fn hostile_bytes_with_a_right_checksum_are_bounded(
        superblock in superblock(),
        changes in prop::collection::vec((0..508_usize, any::<u8>()), 0..6),
    ) {
        let mut page = encode(&superblock);
        for (at, byte) in changes {
            page = resealed(page, at, &[byte]);
        }
        if let CopyState::Valid(superblock) = CopyState::decode(&page) {
            let cleared = resealed(resealed(page, 102, &[0; 2]), 360, &[0; 148]);
            prop_assert_eq!(encode(&superblock), cleared);
        }
    }

    /// Writes, torn writes and openings in any order: the copy that counts is never the one that is
    /// being written, so a torn write leaves the state before it, or is the state after it.
    #[test]
    fn a_torn_copy_never_loses_the_one_that_counts(
        steps in prop::collection::vec((0..4_u8, 0..3_u8), 1..40),
    ) {
        let layout = Layout::new(8 * MIB, MAX).unwrap();
        let first = Current::format(owner(), layout, 0);
        let mut current = first.repeated(0);
        let mut pages = [encode(first.superblock()), encode(current.superblock())];
        prop_assert_eq!((first.at(), current.at()), (DeviceOffset(0), DeviceOffset(32 << 10)));
        let mut number = 0;
        for (kind, fate) in steps {
            let next = match kind {
                0 => current.repeated(1),
                1 => current.grown(current.superblock().layout.grown(MAX), 1),
                _ => {
                    number += 1;
                    current.checkpointed(CheckpointNumber(number), LogOffset(number * 10), 1)
                }
            };
            let position = usize::from(next.at() != DeviceOffset(0));
            let page = encode(next.superblock());
            match fate {
                0 => pages[position] = page,
                1 => pages[position][..200].copy_from_slice(&page[..200]),
                _ => pages[position] = [0; SUPERBLOCK_BYTES],
            }
            let copies = [&pages[0], &pages[1]].map(CopyState::decode);
            let chosen = choose(&copies).unwrap();
            prop_assert_eq!(&chosen.current, if fate == 0 { &next } else { &current });
            current = chosen.current.clone();
            number = current.superblock().checkpoint.0;
            if let Some(repair) = chosen.repair(CheckpointNumber(number), 2) {
                let position = usize::from(repair.at() != DeviceOffset(0));
                pages[position] = encode(repair.superblock());
                current = repair;
            }
            // From then on, either copy can be lost.
            let copies = [&pages[0], &pages[1]].map(CopyState::decode);
            for lost in 0..2 {
                let mut copies = copies.clone();
                copies[lost] = CopyState::Unreadable;
                let alone = choose(&copies).unwrap().current;
                let mut fields = alone.superblock().clone();
                let counts = current.superblock();
                fields.generation = counts.generation;
                fields.written_at_ms = counts.written_at_ms;
                fields.wal_offset = counts.wal_offset;
                prop_assert_eq!(&fields, current.superblock());
            }
        }
    }
}

/// Written out from the table of the document.
#[test]
fn a_superblock_has_the_bytes_of_the_document() {
    let mut expected = b"ALLUVSTO\x01\0\0\0\0\0\0\0".to_vec();
    expected.extend([0x11; 16]);
    expected.extend([0x22; 16]);
    expected.extend([8, 7, 6, 5, 4, 3, 2, 1]); // generation
    expected.extend([0, 0, 0x80, 0, 0, 0, 0, 0]); // capacity: 8 MiB
    expected.extend([0, 0, 0, 4, 0, 0, 0, 0]); // max capacity: 64 MiB
    expected.extend([0x0d, 0x0c, 0x0b, 0x0a, 0, 0, 0, 0]); // checkpoint number
    expected.extend([0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]); // WAL offset
    expected.extend([0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21]); // written at
    expected.extend([3, 0, 0, 0]); // server id
    expected.extend([7, 0, 0, 0]); // cluster id length, reserved
    expected.extend(b"z\xc3\xbcrich");
    expected.resize(508, 0);
    expected.extend(0xa87a_bccd_u32.to_le_bytes());
    expected.resize(4096, 0);
    assert_eq!(encode(&example())[..], expected[..]);
    assert_eq!(CopyState::decode(&expected.try_into().unwrap()), CopyState::Valid(example()));
}

#[test]
fn each_changed_bit_of_a_copy_makes_it_not_count() {
    let page = encode(&example());
    for bit in 0..8 * 512 {
        let mut changed = page;
        changed[bit / 8] ^= 1 << (bit % 8);
        let expected = match bit {
            ..64 => CopyState::Other,
            _ => CopyState::Damaged(CopyDamage::Checksum),
        };
        assert_eq!(CopyState::decode(&changed), expected, "bit {bit}");
    }
    // The rest of the page is reserved.
    let mut changed = page;
    changed[512..].fill(1);
    assert_eq!(CopyState::decode(&changed), CopyState::Valid(example()));
}

#[test]
fn a_copy_with_a_right_checksum_is_damaged_if_a_field_is_out_of_its_bounds() {
    let page = encode(&example());
    let with = |at, change: &[u8]| CopyState::decode(&resealed(page, at, change));
    let damaged = |field, value| CopyState::Damaged(FieldError::Field { field, value }.into());
    let half = (1_u64 << 63).to_le_bytes();
    assert_eq!(with(48, &half), damaged("generation", 1 << 63));
    assert_eq!(with(72, &(1_u64 << 32).to_le_bytes()), damaged("checkpoint number", 1 << 32));
    assert_eq!(with(80, &half), damaged("log offset", 1 << 63));
    assert_eq!(with(96, &[0; 4]), damaged("server id", 0));
    for length in [0_u16, 250, u16::MAX] {
        let expected = damaged("length of the cluster id", length.into());
        assert_eq!(with(100, &length.to_le_bytes()), expected);
    }
    let cluster = CopyState::Damaged(CopyDamage::Cluster);
    assert_eq!(with(100, &[2]), cluster, "it ends within a character, and padding is not zero");
    assert_eq!(with(104, &[0xff]), cluster);
    assert_eq!(with(359, &[1]), cluster);
    assert_eq!(with(56, &[0; 8]), CopyState::Damaged(CopyDamage::Layout(LayoutError::TooSmall(0))));
    assert_eq!(
        with(64, &(4 * MIB).to_le_bytes()),
        CopyState::Damaged(CopyDamage::Layout(LayoutError::AboveMaximum {
            capacity_bytes: 8 * MIB,
            max_capacity_bytes: 4 * MIB,
        }))
    );
    // Reserved bytes may get a meaning that a reader need not know.
    assert_eq!(with(102, &[1; 2]), CopyState::Valid(example()));
    assert_eq!(with(360, &[1; 148]), CopyState::Valid(example()));
}

#[test]
fn a_copy_of_a_newer_version_is_known_by_its_head_only() {
    let page = resealed(encode(&example()), 16, &[0xff; 492]);
    let with = |at, byte| CopyState::decode(&resealed(page, at, &[byte]));
    assert_eq!(with(8, 2), CopyState::Future { version: 2, flags: 0 });
    assert_eq!(with(12, 1), CopyState::Future { version: 1, flags: 1 });
    assert_eq!(with(8, 0), CopyState::Future { version: 0, flags: 0 });
}

#[test]
fn a_page_is_zero_only_as_a_whole() {
    let mut page = [0; SUPERBLOCK_BYTES];
    assert_eq!(CopyState::decode(&page), CopyState::Zero);
    // ext4 leaves its first 1,024 bytes zero.
    page[1024] = 1;
    assert_eq!(CopyState::decode(&page), CopyState::Other);
}

/// The table of the document, in both orders.
#[test]
fn the_copy_that_counts_is_that_of_the_table() {
    let future = || CopyState::Future { version: 2, flags: 0 };
    let damaged = || CopyState::Damaged(CopyDamage::Checksum);
    let states =
        || [damaged(), CopyState::Unreadable, CopyState::Zero, CopyState::Other, valid(7, 4)];
    let both = |a: CopyState, b: CopyState| {
        let results = [choose(&[a.clone(), b.clone()]), choose(&[b, a])];
        results.map(|result| result.map(|chosen| (chosen.current.superblock().clone(), chosen)))
    };
    let refused = |a: CopyState, b: CopyState| {
        let [one, other] = both(a, b).map(Result::unwrap_err);
        match &one {
            StoreError::SuperblockDamaged { copies: [a, b] } => {
                let copies = [b.clone(), a.clone()];
                assert_eq!(other, StoreError::SuperblockDamaged { copies });
            }
            _ => assert_eq!(one, other),
        }
        one
    };
    for state in states().into_iter().chain([future()]) {
        let expected = StoreError::FutureVersion { found: "superblock", version: 2, flags: 0 };
        assert_eq!(refused(future(), state), expected);
    }
    for (number, other) in [(8, 4), (8, 5), (u64::MAX >> 1, 4)] {
        let results = both(valid(7, 4), valid(number, other));
        for (position, result) in [1, 0].into_iter().zip(results) {
            let (superblock, chosen) = result.unwrap();
            assert_eq!(superblock, copy(number, other));
            assert_eq!(chosen.current.at(), DeviceOffset(position * (32 << 10)));
        }
    }
    for state in &states()[..4] {
        for result in both(valid(7, 4), state.clone()) {
            let (superblock, chosen) = result.unwrap();
            assert_eq!(superblock, copy(7, 4));
            assert!(chosen.repair(CheckpointNumber(4), 0).is_some());
        }
        for bad in [damaged(), CopyState::Unreadable] {
            let error = refused(bad, state.clone());
            assert!(matches!(error, StoreError::SuperblockDamaged { .. }), "{error}");
        }
    }
    assert_eq!(refused(CopyState::Zero, CopyState::Zero), StoreError::NotFormatted);
    for second in [CopyState::Zero, CopyState::Other] {
        let error = refused(CopyState::Other, second);
        assert!(matches!(error, StoreError::NotAStore { .. }), "{error}");
    }
}

#[test]
fn copies_of_two_stores_are_refused() {
    let other = |change: fn(&mut Superblock)| {
        let mut other = copy(8, 4);
        change(&mut other);
        choose(&[valid(7, 4), CopyState::Valid(other)]).map(|chosen| chosen.current.at())
    };
    let conflict = |field| Err(StoreError::SuperblockConflict { field });
    assert_eq!(other(|_| ()), Ok(DeviceOffset(32 << 10)));
    assert_eq!(other(|copy| copy.store_id = Uuid::nil()), conflict("store id"));
    assert_eq!(other(|copy| copy.wal_id = Uuid::nil()), conflict("log id"));
    assert_eq!(other(|copy| copy.server = ServerId(4)), conflict("server id"));
    assert_eq!(other(|copy| copy.cluster.push('x')), conflict("cluster id"));
    let change = |copy: &mut Superblock| copy.layout = Layout::new(8 * MIB, MAX + MIB).unwrap();
    assert_eq!(other(change), conflict("maximum capacity"));
    assert_eq!(other(|copy| copy.generation = 7), conflict("generation"));
    let grown = |copy: &mut Superblock| copy.layout = Layout::new(16 * MIB, MAX).unwrap();
    assert_eq!(other(grown), Ok(DeviceOffset(32 << 10)), "growth that a crash has interrupted");
}

#[test]
fn an_opening_replaces_a_copy_that_could_not_stand_alone() {
    let choose = |a: CopyState, b: CopyState| choose(&[a, b]).unwrap();
    let log = CheckpointNumber(5);
    let repaired = |chosen: Chosen| {
        let repair = chosen.repair(log, 9)?;
        assert_ne!(repair.at(), chosen.current.at());
        let (next, before) = (repair.superblock(), chosen.current.superblock());
        assert_eq!(next.written_at_ms, 9);
        let fields = Superblock { written_at_ms: 9, generation: 9, ..before.clone() };
        assert_eq!(*next, fields);
        Some(repair.at().0)
    };
    // Interrupted after the record, before the second copy.
    assert_eq!(repaired(choose(valid(7, 4), valid(8, 5))), Some(0));
    assert_eq!(repaired(choose(valid(8, 5), valid(7, 4))), Some(32 << 10));
    // Both can stand alone: after a complete checkpoint, and in one that was interrupted.
    assert_eq!(repaired(choose(valid(7, 5), valid(8, 5))), None);
    assert_eq!(repaired(choose(valid(7, 5), valid(8, 6))), None);
    // The copy alone would hide the slots that growth has added.
    let grown = Superblock { layout: Layout::new(16 * MIB, MAX).unwrap(), ..copy(8, 5) };
    assert_eq!(repaired(choose(valid(7, 5), CopyState::Valid(grown))), Some(0));
}

#[test]
fn a_store_fits_its_device_and_belongs_to_its_server() {
    let superblock = example();
    assert_eq!(superblock.check_device(8 * MIB), Ok(()));
    let (capacity_bytes, device_bytes) = (8 * MIB, 8 * MIB - 1);
    assert_eq!(
        superblock.check_device(device_bytes),
        Err(StoreError::LargerThanDevice { capacity_bytes, device_bytes })
    );
    let foreign = |change: fn(&mut Owner)| {
        let mut owner = owner();
        change(&mut owner);
        match superblock.check_owner(&owner) {
            Err(StoreError::ForeignStore { field, found, expected }) => {
                assert_ne!(found, expected);
                Some(field)
            }
            other => {
                assert_eq!(other, Ok(()));
                None
            }
        }
    };
    assert_eq!(foreign(|_| ()), None);
    assert_eq!(foreign(|owner| owner.wal_id = Uuid::nil()), Some("log id"));
    assert_eq!(foreign(|owner| owner.cluster.push('x')), Some("cluster id"));
    assert_eq!(foreign(|owner| owner.server = ServerId(4)), Some("server id"));
    assert_eq!(foreign(|owner| owner.store_id = Uuid::nil()), Some("store id"));
}

#[test]
fn store_and_log_differ_by_one_interrupted_checkpoint_at_most() {
    let check = |number, log, end| {
        copy(1, number).check_log(CheckpointNumber(log), LogOffset(end)).map_err(|e| e.to_string())
    };
    assert_eq!((check(0, 0, 100), check(1, 0, 100)), (Ok(()), Ok(())));
    assert_eq!((check(5, 5, 100), check(6, 5, 101)), (Ok(()), Ok(())));
    let behind = |store, log| {
        let (store, log) = (CheckpointNumber(store), CheckpointNumber(log));
        Err(StoreError::StoreBehindLog { store, log }.to_string())
    };
    assert_eq!(check(4, 5, 100), behind(4, 5));
    assert_eq!(check(0, u64::MAX, 100), behind(0, u64::MAX));
    let (store, log) = (CheckpointNumber(7), CheckpointNumber(5));
    let ahead = StoreError::LogBehindStore(Ahead::Superblock { store, log });
    assert_eq!(check(7, 5, 100), Err(ahead.to_string()));
    let offset = Ahead::Offset { durable: LogOffset(100), end: LogOffset(99) };
    assert_eq!(check(5, 5, 99), Err(StoreError::LogBehindStore(offset).to_string()));
}

#[test]
#[should_panic(expected = "checkpoint 4 after 5")]
fn a_checkpoint_number_does_not_go_back() {
    let chosen = choose(&[valid(7, 5), CopyState::Zero]).unwrap();
    let _ = chosen.current.checkpointed(CheckpointNumber(4), LogOffset(200), 0);
}
