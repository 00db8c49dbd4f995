//! Openings that are refused, damage, and single rules of the store.

mod installs;
mod reads;

use std::collections::BTreeMap;
use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_wal::{DeviceOffset, LogOffset};
use bytes::Bytes;
use uuid::Uuid;

use super::*;
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS};
use crate::request::BlockState;
use crate::types::{
    CheckpointNumber, ChunkIndex, GroupId, Index, Layer, PeerId, ServerId, SlotIndex, SlotNumber,
    VolumeId,
};

const LAYER: Layer = Layer(0);
const GROUP: GroupId = GroupId(1);
const PEER: PeerId = PeerId(7);
const VOLUME: VolumeId = VolumeId(2);
/// A store of 16 slots.
const DEVICE_BYTES: u64 = 6 << 20;
const MAX_BYTES: u64 = 16 << 20;

fn owner() -> Owner {
    Owner {
        wal_id: Uuid::from_u128(2),
        store_id: Uuid::from_u128(1),
        server: ServerId(3),
        cluster: "cluster".into(),
    }
}

fn disk() -> SimDisk {
    let disk = SimDisk::new(SimOptions { capacity_bytes: DEVICE_BYTES, ..SimOptions::default() });
    Store::format(&disk.device(), owner(), Some(MAX_BYTES), 0).unwrap();
    disk
}

/// The log's last checkpoint covers the replica up to an index.
fn expected(checkpoint: u64) -> Expected {
    let known = KnownReplica { base: Index(9), barrier: Index(0), volumes: [VOLUME].into() };
    Expected {
        owner: owner(),
        checkpoint: CheckpointNumber(checkpoint),
        log_end: LogOffset(1000),
        replicas: [((GROUP, PEER), known)].into(),
        has_no_replica: false,
    }
}

fn open_with(
    disk: &SimDisk,
    expected: &Expected,
    options: StoreOptions,
) -> Result<Store, StoreError> {
    Store::open(disk.device(), expected, options, 0, Arc::new(|| {}), &mut |_, _| {})
}

fn open(disk: &SimDisk, expected: &Expected) -> Result<Store, StoreError> {
    open_with(disk, expected, StoreOptions::default())
}

/// A store with the replica.
fn store(disk: &SimDisk, checkpoint: u64) -> Store {
    let mut store = open(disk, &expected(checkpoint)).unwrap();
    store.add_replica(GROUP, PEER);
    store
}

fn page(byte: u8) -> Vec<u8> {
    vec![byte; BLOCK_BYTES]
}

/// Blocks of the given bytes.
fn data(bytes: &[u8]) -> Content {
    let pages: Vec<Vec<u8>> = bytes.iter().map(|byte| page(*byte)).collect();
    let crcs = pages.iter().map(|page| crc32c::crc32c(page)).collect();
    Content::Data(Bytes::from(pages.concat()), crcs)
}

fn range(first: u16, blocks: u16) -> BlockRange {
    BlockRange { chunk: ChunkIndex(0), first, blocks }
}

fn apply(store: &mut Store, first: u16, blocks: u16, content: Content, index: u64) {
    let range = range(first, blocks);
    store.apply(GROUP, VOLUME, LAYER, range, content, Index(index)).unwrap();
}

fn write_back(store: &mut Store) {
    store.write_back(&|_| Index(u64::MAX));
}

/// Writes all that is applied; the disk completes requests at once.
fn land(store: &mut Store) {
    while !store.is_drained(GROUP) {
        write_back(store);
        store.take_completions().unwrap();
    }
}

/// A checkpoint up to its step 4.
fn flush(store: &mut Store) {
    store.swap(&|_| Index(u64::MAX));
    land(store);
    assert!(!store.has_awaited());
    store.write_sectors(LogOffset(10 * (store.checkpoint().0 + 1)), 0);
    while !store.checkpoint_is_idle() {
        assert!(store.take_completions().unwrap());
    }
    store.flush();
    store.take_completions().unwrap();
    assert!(store.checkpoint_is_idle());
}

fn checkpoint(store: &mut Store) {
    flush(store);
    store.second_copy(LogOffset(10 * (store.checkpoint().0 + 1) + 1), 0);
    store.take_completions().unwrap();
    store.release();
    store.check();
}

fn read(store: &mut Store, first: u16, blocks: u16) -> Result<BlocksRead, DamagedBlock> {
    store.read(ReadId(1), GROUP, VOLUME, LAYER, range(first, blocks), false);
    store.take_completions().unwrap();
    let mut done = Vec::new();
    store.take_reads(&mut done);
    done.pop().expect("the disk reads at once").1
}

/// The first byte of each block that has data.
fn bytes(read: &BlocksRead) -> Vec<u8> {
    read.data.chunks(BLOCK_BYTES).map(|block| block[0]).collect()
}

/// A sector of the replica.
fn sector(number: u64) -> Sector {
    let address = Address {
        group: GROUP,
        peer: PEER,
        volume: VOLUME,
        layer: LAYER,
        chunk: ChunkIndex(0),
        number: SlotNumber(0),
    };
    let mut words = [Word::ABSENT; SLOT_BLOCKS];
    words[0] = Word::ZEROS;
    let epochs = [BlockEpoch::default(); SLOT_BLOCKS];
    Sector { address, checkpoint: CheckpointNumber(number), words, epochs }
}

fn poke_sector(disk: &SimDisk, slot: u32, sector: &Sector) {
    let mut bytes = [0; SECTOR_BYTES];
    sector.encode(owner().store_id, SlotIndex(slot), &mut bytes);
    disk.poke(sector_at(slot), &bytes);
}

fn sector_at(slot: u32) -> u64 {
    META_START.0 + u64::from(slot) * SECTOR_BYTES as u64
}

fn peek_sector(disk: &SimDisk, slot: u32) -> SectorState {
    let bytes = disk.peek_durable(sector_at(slot), SECTOR_BYTES);
    let bytes = bytes.as_slice().try_into().unwrap();
    SectorState::decode(owner().store_id, SlotIndex(slot), bytes)
}

fn peek_copy(disk: &SimDisk, at: DeviceOffset) -> CopyState {
    let page = disk.peek_durable(at.0, SUPERBLOCK_BYTES);
    CopyState::decode(page.as_slice().try_into().unwrap())
}

// -- Opening

#[test]
fn a_store_is_opened_with_what_the_checkpoint_has_made_durable() {
    let disk = disk();
    let mut first = store(&disk, 0);
    apply(&mut first, 0, 3, data(&[1, 2, 3]), 1);
    apply(&mut first, 70, 2, Content::Zeros, 2);
    checkpoint(&mut first);
    for at in SUPERBLOCK_AT {
        let CopyState::Valid(copy) = peek_copy(&disk, at) else { panic!("{at:?} is not valid") };
        assert_eq!(copy.checkpoint, CheckpointNumber(1));
    }
    apply(&mut first, 1, 1, Content::Absent, 3);
    assert_eq!(first.checkpoint(), CheckpointNumber(1));
    drop(first);
    let mut store = store(&disk.power_cut(), 1);
    assert_eq!((store.slots(), store.free_slots(), store.damaged_slots()), (16, 14, 0));
    let found = read(&mut store, 0, 80).unwrap();
    assert_eq!(bytes(&found), [1, 2, 3]);
    let states = |state| found.states.iter().filter(|other| **other == state).count();
    assert_eq!((states(BlockState::Data), states(BlockState::Zeros)), (3, 2));
    assert_eq!(found.crcs[1], crc32c::crc32c(&page(2)));
}

/// Asserts that an opening is refused with this error, and writes nothing.
#[track_caller]
fn refused(disk: &SimDisk, expected: &Expected, error: &StoreError) {
    let writes = disk.counters().writes;
    assert_eq!(open(disk, expected).err().as_ref(), Some(error));
    assert_eq!(disk.counters().writes, writes, "a refused opening writes nothing");
}

#[test]
fn an_opening_is_refused_as_the_table_says() {
    let numbers = |store, log| (CheckpointNumber(store), CheckpointNumber(log));
    let at = |store: u64| {
        let disk = disk();
        let mut first = self::store(&disk, 0);
        (0..store).for_each(|_| checkpoint(&mut first));
        disk
    };
    // Step 1.
    let disk = disk();
    disk.set_faults(Faults { flush_error: 1.0, ..Faults::default() });
    assert!(matches!(open(&disk, &expected(0)), Err(StoreError::Device(_))));
    // Step 2; all cases are those of `superblock_tests`.
    let empty = SimDisk::new(SimOptions { capacity_bytes: DEVICE_BYTES, ..SimOptions::default() });
    refused(&empty, &expected(0), &StoreError::NotFormatted);
    empty.poke(0, b"ext4");
    let looks_like = "unknown data (byte 0 is not zero)".into();
    refused(&empty, &expected(0), &StoreError::NotAStore { looks_like });
    // Step 3.
    let image = self::disk().peek(0, (DEVICE_BYTES - (1 << 20)) as usize);
    let small = SimDisk::from_image(&image, SimOptions::default());
    let (capacity_bytes, device_bytes) = (DEVICE_BYTES, DEVICE_BYTES - (1 << 20));
    refused(&small, &expected(0), &StoreError::LargerThanDevice { capacity_bytes, device_bytes });
    // Step 4.
    let mut other = expected(0);
    other.owner.wal_id = Uuid::from_u128(99);
    let foreign = StoreError::ForeignStore {
        field: "log id",
        found: Uuid::from_u128(2).to_string(),
        expected: Uuid::from_u128(99).to_string(),
    };
    refused(&self::disk(), &other, &foreign);
    // Step 6.
    let (store, log) = numbers(1, 2);
    refused(&at(1), &expected(2), &StoreError::StoreBehindLog { store, log });
    let (store, log) = numbers(2, 0);
    let ahead = StoreError::LogBehindStore(Ahead::Superblock { store, log });
    refused(&at(2), &expected(0), &ahead);
    let (durable, end) = (LogOffset(21), LogOffset(1));
    let short = Expected { log_end: end, ..expected(2) };
    let ahead = StoreError::LogBehindStore(Ahead::Offset { durable, end });
    refused(&at(2), &short, &ahead);
    // Step 7.
    let disk = at(1);
    poke_sector(&disk, 3, &sector(3));
    let (sector_number, log) = numbers(3, 1);
    let slot = SlotIndex(3);
    let ahead = Ahead::Sector { slot, sector: sector_number, log };
    refused(&disk, &expected(1), &StoreError::LogBehindStore(ahead));
    let mut layered = sector(1);
    layered.address.layer = Layer(1);
    poke_sector(&disk, 3, &layered);
    refused(&disk, &expected(1), &StoreError::UnknownLayer { slot, layer: Layer(1) });
}

#[test]
fn a_number_that_differs_by_one_is_accepted_and_a_lost_copy_is_repaired() {
    for (position, log) in [(0, 3), (1, 3), (0, 2), (1, 2)] {
        let disk = disk();
        let mut first = store(&disk, 0);
        (0..3).for_each(|_| checkpoint(&mut first));
        drop(first);
        disk.poke(SUPERBLOCK_AT[position].0, &[0xff; 512]);
        drop(store(&disk, log));
        // The other copy is lost now, and the repaired one is enough.
        disk.poke(SUPERBLOCK_AT[1 - position].0, &[0xff; 512]);
        let disk = disk.power_cut();
        drop(store(&disk, log));
        assert_eq!(Store::identify(&disk.device()).unwrap().checkpoint, CheckpointNumber(3));
    }
}

#[test]
fn an_interrupted_format_leaves_the_old_store_or_none() {
    let zones = [0..4096, 32 << 10..36 << 10, 1 << 20..1 << 21];
    for zone in zones {
        let disk = disk();
        disk.set_zone_faults(zone, Faults { write_error: 1.0, ..Faults::default() });
        let other = Owner { store_id: Uuid::from_u128(5), ..owner() };
        let formatted = Store::format(&disk.device(), other, Some(MAX_BYTES), 0);
        let disk = disk.power_cut();
        match (formatted, Store::identify(&disk.device())) {
            (Err(_), Ok(found)) => assert_eq!(found.store_id, owner().store_id),
            (Err(_), found) => assert_eq!(found, Err(StoreError::NotFormatted)),
            (Ok(()), found) => panic!("no write has failed, and {found:?} is found"),
        }
    }
}

// -- All replicas are lost

fn no_replica(checkpoint: u64) -> Expected {
    let replicas = BTreeMap::new();
    Expected { replicas, has_no_replica: true, log_end: LogOffset(50), ..expected(checkpoint) }
}

/// A store at checkpoint 1, with a sector of an unfinished checkpoint 2, a damaged one, and one
/// that a log that has lost its end does not explain.
fn store_of_lost_replicas() -> SimDisk {
    let disk = disk();
    let mut first = store(&disk, 0);
    apply(&mut first, 0, 1, data(&[1]), 1);
    checkpoint(&mut first);
    let mut foreign = sector(2);
    foreign.address.number = SlotNumber(1);
    poke_sector(&disk, 5, &foreign);
    disk.poke(sector_at(6), &[0xff; 512]);
    foreign.checkpoint = CheckpointNumber(9);
    poke_sector(&disk, 7, &foreign);
    disk
}

#[test]
fn after_the_loss_of_all_replicas_the_next_checkpoint_frees_everything() {
    let disk = store_of_lost_replicas();
    let reset = |disk: &SimDisk| {
        // The log has lost its end, and has a record of checkpoint 1 without replicas.
        let expected = Expected { log_end: LogOffset(1), ..no_replica(1) };
        let (options, wake) = (StoreOptions::default(), Arc::new(|| {}));
        Store::reset(disk.device(), &expected, options, 0, wake, &mut |_, _| {}).unwrap()
    };
    // Twice, as after a crash.
    drop(reset(&disk));
    let disk = disk.power_cut();
    let mut store = reset(&disk);
    assert_eq!((store.free_slots(), store.damaged_slots()), (12, 0));
    let found = Store::identify(&disk.device()).unwrap();
    assert_eq!((found.checkpoint, found.wal_offset), (CheckpointNumber(1), LogOffset(1)));
    checkpoint(&mut store);
    assert_eq!(store.free_slots(), 16);
    drop(store);
    let disk = disk.power_cut();
    assert!(matches!(peek_sector(&disk, 5), SectorState::Valid(_)), "its owner is gone");
    assert_eq!(peek_sector(&disk, 6), SectorState::Free);
    assert_eq!(peek_sector(&disk, 7), SectorState::Free);
    // New replicas are created, in the same group.
    let mut store = open(&disk, &no_replica(2)).unwrap();
    store.add_replica(GROUP, PeerId(8));
    assert!(read(&mut store, 0, 64).unwrap().data.is_empty());
}

#[test]
fn a_log_without_replicas_may_be_ahead_of_its_store() {
    // The crash came after C(5), which lists no replica, and before the copies of the superblock.
    let disk = store_of_lost_replicas();
    disk.poke(sector_at(7), &[0; 512]);
    let (store, log) = (CheckpointNumber(1), CheckpointNumber(5));
    refused(&disk, &expected(5), &StoreError::StoreBehindLog { store, log });
    let mut store = open(&disk, &no_replica(5)).unwrap();
    assert_eq!((store.checkpoint(), store.free_slots()), (CheckpointNumber(5), 13));
    for at in SUPERBLOCK_AT {
        // Either copy has the number.
        let CopyState::Valid(copy) = peek_copy(&disk, at) else { panic!("{at:?} is not valid") };
        assert_eq!((copy.checkpoint, copy.wal_offset), (CheckpointNumber(5), LogOffset(50)));
    }
    checkpoint(&mut store);
    assert_eq!((store.checkpoint(), store.free_slots()), (CheckpointNumber(6), 16));
    drop(store);
    open(&disk, &Expected { log_end: LogOffset(90), ..no_replica(6) }).unwrap();
}

// -- Sectors

#[test]
fn a_damaged_sector_keeps_its_slot_out_of_use() {
    for unreadable in [false, true] {
        let disk = disk();
        let mut first = store(&disk, 0);
        apply(&mut first, 0, 1, data(&[1]), 1);
        checkpoint(&mut first);
        drop(first);
        if unreadable {
            let faults = Faults { read_error: 1.0, ..Faults::default() };
            disk.set_zone_faults(META_START.0..META_START.0 + 4096, faults);
        } else {
            disk.rot(sector_at(0)..sector_at(1), 1);
        }
        let damaged = if unreadable { 8 } else { 1 };
        let mut second = store(&disk, 1);
        assert_eq!((second.damaged_slots(), second.free_slots()), (damaged, 16 - damaged));
        assert_eq!(read(&mut second, 0, 1).unwrap().states, [BlockState::Absent]);
        disk.clear_zones();
        checkpoint(&mut second);
        assert_eq!(second.free_slots(), 16 - damaged);
        drop(second);
        // A sector that is readable again does not count.
        assert_eq!(peek_sector(&disk, 0), SectorState::Lost(CheckpointNumber(2)));
        let third = store(&disk, 2);
        assert_eq!((third.damaged_slots(), third.free_slots()), (damaged, 16 - damaged));
    }
}

#[test]
fn a_broken_rule_frees_the_slot_of_a_damaged_sector() {
    let disk = disk();
    let mut first = store(&disk, 0);
    apply(&mut first, 0, 1, data(&[1]), 1);
    checkpoint(&mut first);
    drop(first);
    disk.rot(sector_at(0)..sector_at(1), 1);
    let broken = crate::Broken::rule(crate::Rule::DamagedSector);
    let options = StoreOptions { broken, ..StoreOptions::default() };
    let store = open_with(&disk, &expected(1), options).unwrap();
    assert_eq!((store.damaged_slots(), store.free_slots()), (0, 16));
}

#[test]
fn of_two_slots_with_one_address_the_newer_counts_and_the_other_is_zeroed() {
    for (first, second, counts) in [(2, 1, 3), (1, 2, 9), (2, 2, 3)] {
        let disk = disk();
        let mut begun = store(&disk, 0);
        (0..2).for_each(|_| checkpoint(&mut begun));
        drop(begun);
        poke_sector(&disk, 3, &sector(first));
        poke_sector(&disk, 9, &sector(second));
        let mut store = store(&disk, 2);
        store.check();
        assert_eq!(store.free_slots(), 14, "the other one is freed by the next checkpoint");
        checkpoint(&mut store);
        assert_eq!(store.free_slots(), 15);
        let loser = if counts == 3 { 9 } else { 3 };
        assert_eq!(peek_sector(&disk, loser), SectorState::Free);
        assert!(matches!(peek_sector(&disk, counts), SectorState::Valid(_)));
    }
}

/// The last lines of the table of sectors.
#[test]
fn sectors_that_the_checkpoint_does_not_list_are_decided_by_number_barrier_and_replay() {
    let open_at_3 = |peer, volume, number, barrier| {
        let disk = disk();
        let mut begun = store(&disk, 0);
        (0..3).for_each(|_| checkpoint(&mut begun));
        drop(begun);
        let mut sector = sector(number);
        (sector.address.peer, sector.address.volume) = (PeerId(peer), VolumeId(volume));
        poke_sector(&disk, 3, &sector);
        let mut expected = expected(3);
        expected.replicas.get_mut(&(GROUP, PEER)).unwrap().barrier = Index(barrier);
        let mut store = open(&disk, &expected).unwrap();
        store.add_replica(GROUP, PEER);
        store
    };
    // A former peer, before and after the checkpoint.
    assert_eq!(open_at_3(6, 2, 2, 0).free_slots(), 16);
    let mut store = open_at_3(6, 2, 3, 0);
    assert_eq!(store.free_slots(), 15);
    assert_eq!(read(&mut store, 0, 1).unwrap().states, [BlockState::Absent]);
    checkpoint(&mut store);
    assert_eq!(store.free_slots(), 16);
    // A volume that the checkpoint does not list.
    assert_eq!(open_at_3(7, 5, 2, 0).free_slots(), 16);
    for (number, barrier) in [(3, 0), (4, 0), (2, 10)] {
        for knows in [false, true] {
            let mut store = open_at_3(7, 5, number, barrier);
            assert_eq!(store.free_slots(), 15);
            if barrier > 0 {
                store.replayed(GROUP, &|_| false, false);
                checkpoint(&mut store);
                assert_eq!(store.free_slots(), 15, "the barrier decides");
            }
            store.replayed(GROUP, &|volume| knows && volume == VolumeId(5), true);
            store.check();
            checkpoint(&mut store);
            assert_eq!(store.free_slots(), if knows { 15 } else { 16 });
        }
    }
}

// -- Slots

#[test]
fn a_freed_slot_is_used_again_after_a_checkpoint_that_covers_the_freeing() {
    let disk = disk();
    let mut store = store(&disk, 0);
    for slot in 0..16 {
        apply(&mut store, slot * 64, 1, data(&[1]), u64::from(slot) + 1);
    }
    land(&mut store);
    assert_eq!(store.missing_slots(GROUP, VOLUME, LAYER, range(1000, 90)), 2);
    assert_eq!(store.missing_slots(GROUP, VOLUME, LAYER, range(0, 128)), 0);
    let full = store.apply(GROUP, VOLUME, LAYER, range(1000, 90), Content::Zeros, Index(17));
    assert_eq!(full, Err(NoSlots));
    apply(&mut store, 0, 64, Content::Absent, 17);
    land(&mut store);
    assert_eq!(store.free_slots(), 0);
    // What is freed after the sectors were written waits for the next checkpoint.
    store.swap(&|_| Index(17));
    store.write_sectors(LogOffset(1), 0);
    apply(&mut store, 64, 64, Content::Absent, 18);
    land(&mut store);
    store.take_completions().unwrap();
    store.flush();
    store.take_completions().unwrap();
    store.second_copy(LogOffset(2), 0);
    store.take_completions().unwrap();
    assert_eq!(store.free_slots(), 0);
    store.release();
    assert_eq!(store.free_slots(), 1);
    checkpoint(&mut store);
    assert_eq!(store.free_slots(), 2);
}

#[test]
fn a_reserved_slot_without_a_word_is_free_at_once() {
    let disk = disk();
    let mut store = store(&disk, 0);
    apply(&mut store, 0, 2, data(&[1, 2]), 1);
    apply(&mut store, 0, 1, Content::Absent, 2);
    assert_eq!(store.free_slots(), 15);
    apply(&mut store, 1, 1, Content::Absent, 3);
    assert_eq!(store.free_slots(), 16);
    store.check();
    land(&mut store);
    checkpoint(&mut store);
    assert_eq!(peek_sector(&disk, 0), SectorState::Free);
}

#[test]
fn the_slots_of_a_removed_replica_are_not_written_and_wait_for_the_checkpoint() {
    let disk = disk();
    let mut store = store(&disk, 0);
    apply(&mut store, 0, 1, data(&[1]), 1);
    checkpoint(&mut store);
    apply(&mut store, 64, 1, data(&[2]), 2);
    disk.set_mode(Mode::Queued);
    write_back(&mut store);
    store.remove_replica(GROUP);
    store.add_replica(GROUP, PeerId(8));
    store.check();
    assert_eq!(store.free_slots(), 14);
    // The new replica writes to the page of the old sectors.
    apply(&mut store, 0, 1, data(&[3]), 1);
    disk.set_mode(Mode::Immediate);
    checkpoint(&mut store);
    assert_eq!(store.free_slots(), 15);
    let SectorState::Valid(old) = peek_sector(&disk, 0) else { panic!("the log may have it") };
    assert_eq!(old.address.peer, PEER);
    assert_eq!(bytes(&read(&mut store, 0, 100).unwrap()), [3]);
}

// -- Write-back

#[test]
fn a_failed_write_or_flush_ends_the_store() {
    let disk = disk();
    let mut first = store(&disk, 0);
    apply(&mut first, 0, 1, data(&[1]), 1);
    disk.set_faults(Faults { write_error: 1.0, ..Faults::default() });
    write_back(&mut first);
    assert!(matches!(first.take_completions(), Err(StoreError::Device(_))));
    drop(first);
    let disk = disk.power_cut();
    disk.set_faults(Faults::default());
    let mut second = store(&disk, 0);
    second.swap(&|_| Index(1));
    second.write_sectors(LogOffset(1), 0);
    second.take_completions().unwrap();
    disk.set_faults(Faults { flush_error: 1.0, ..Faults::default() });
    second.flush();
    assert!(matches!(second.take_completions(), Err(StoreError::Device(_))));
}

#[test]
fn neighbouring_blocks_are_one_request_and_the_queue_is_bounded() {
    let disk = disk();
    let options = StoreOptions { queue_depth: 2, ..StoreOptions::default() };
    let mut store = open_with(&disk, &expected(0), options).unwrap();
    store.add_replica(GROUP, PEER);
    disk.set_mode(Mode::Queued);
    for block in 0..130 {
        apply(&mut store, block, 1, data(&[1]), u64::from(block) + 1);
    }
    for block in [200, 210, 220] {
        apply(&mut store, block, 1, data(&[1]), 131);
    }
    store.write_back(&|_| Index(0));
    assert!(disk.queued().is_empty(), "nothing is durably committed");
    write_back(&mut store);
    let lens: Vec<usize> = disk.queued().iter().map(|(_, _, len)| *len).collect();
    assert_eq!(lens, [512 << 10, 8 << 10]);
    write_back(&mut store);
    assert_eq!(disk.queued().len(), 2);
    disk.set_mode(Mode::Immediate);
    store.take_completions().unwrap();
    land(&mut store);
    assert_eq!(read(&mut store, 0, 230).unwrap().crcs.len(), 133);
    assert_eq!(disk.counters().dsync_writes, 4, "those of the format");
    drop(store);
    let options = StoreOptions { durable_writes: true, ..options };
    let mut store = open_with(&disk, &expected(0), options).unwrap();
    store.add_replica(GROUP, PEER);
    apply(&mut store, 0, 1, data(&[1]), 132);
    land(&mut store);
    assert_eq!(disk.counters().dsync_writes, 5);
}
