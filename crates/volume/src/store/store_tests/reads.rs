//! Reads of blocks while they are written, freed or damaged.

use super::*;

#[test]
fn blocks_are_read_from_overlay_and_device_and_verified() {
    let disk = disk();
    let mut store = store(&disk, 0);
    apply(&mut store, 60, 8, data(&[1, 2, 3, 4, 5, 6, 7, 8]), 1);
    land(&mut store);
    apply(&mut store, 62, 1, data(&[9]), 2);
    apply(&mut store, 63, 1, Content::Absent, 3);
    apply(&mut store, 64, 1, Content::Zeros, 4);
    let found = read(&mut store, 59, 10).unwrap();
    assert_eq!(bytes(&found), [1, 2, 9, 6, 7, 8]);
    let crcs: Vec<u32> = bytes(&found).iter().map(|byte| crc32c::crc32c(&page(*byte))).collect();
    assert_eq!(found.crcs, crcs);
    use BlockState::{Absent, Data, Zeros};
    let states = [Absent, Data, Data, Data, Absent, Zeros, Data, Data, Data, Absent];
    assert_eq!(found.states, states);
    store.read(ReadId(4), GROUP, VOLUME, LAYER, range(59, 10), true);
    let mut done = Vec::new();
    store.take_reads(&mut done);
    let only_states = BlocksRead { states: states.into(), crcs: vec![], data: Bytes::new() };
    assert_eq!(done, [(ReadId(4), Ok(only_states))]);
    // The third block rots.
    let layout = Layout::new(DEVICE_BYTES, MAX_BYTES).unwrap();
    let at = layout.block_at(SlotIndex(1), 2).0;
    disk.rot(at..at + 4096, 1);
    let damaged = read(&mut store, 59, 10).unwrap_err();
    assert_eq!((damaged.volume, damaged.block), (VOLUME, 66));
    assert_eq!(bytes(&read(&mut store, 60, 6).unwrap()), [1, 2, 9, 6]);
}

#[test]
fn a_block_that_is_written_while_it_is_read_is_read_again() {
    let disk = disk();
    let mut store = store(&disk, 0);
    apply(&mut store, 0, 3, data(&[1, 2, 3]), 1);
    land(&mut store);
    for content in [data(&[9]), Content::Absent, Content::Zeros, data(&[2])] {
        let is_data = matches!(content, Content::Data(..));
        disk.set_mode(Mode::Queued);
        store.read(ReadId(1), GROUP, VOLUME, LAYER, range(0, 3), false);
        // The write overtakes the read.
        apply(&mut store, 1, 1, content.clone(), 2);
        write_back(&mut store);
        if is_data {
            disk.step_at(1);
        }
        store.take_completions().unwrap();
        assert!(store.is_drained(GROUP));
        disk.set_mode(Mode::Immediate);
        store.take_completions().unwrap();
        store.take_completions().unwrap();
        let mut done = Vec::new();
        store.take_reads(&mut done);
        let found = done.pop().unwrap().1.unwrap();
        let expected = match &content {
            Content::Data(data, _) => vec![1, data[0], 3],
            // What it was, since the device still has it.
            _ => vec![1, 9, 3],
        };
        assert_eq!(bytes(&found), expected, "{:?}", found.states);
        if !is_data {
            apply(&mut store, 1, 1, data(&[9]), 3);
            land(&mut store);
        }
    }
}

/// The slot of the block has been freed, and a write that is not committed yet has reserved another
/// one for a neighbour of the block.
#[test]
fn a_block_whose_slot_was_freed_and_replaced_while_it_was_read_is_read_again() {
    let disk = disk();
    let mut store = store(&disk, 0);
    apply(&mut store, 0, 1, data(&[1]), 1);
    land(&mut store);
    disk.set_mode(Mode::Queued);
    store.read(ReadId(1), GROUP, VOLUME, LAYER, range(0, 1), false);
    apply(&mut store, 0, 1, Content::Absent, 2);
    write_back(&mut store);
    assert!(store.is_drained(GROUP));
    apply(&mut store, 1, 1, data(&[2]), 3);
    assert_eq!(store.free_slots(), 14, "the freed slot and the new one");
    // The next owner of the freed slot writes to it before the device reads it.
    let layout = Layout::new(DEVICE_BYTES, MAX_BYTES).unwrap();
    disk.poke(layout.block_at(SlotIndex(0), 0).0, &page(9));
    disk.set_mode(Mode::Immediate);
    store.take_completions().unwrap();
    let mut done = Vec::new();
    store.take_reads(&mut done);
    let states = vec![BlockState::Absent];
    let absent = BlocksRead { states, crcs: vec![], data: Bytes::new() };
    assert_eq!(done, [(ReadId(1), Ok(absent))]);
}
