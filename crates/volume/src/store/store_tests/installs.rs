//! Blocks that an install pulls or removes.

use super::*;

/// The blocks whose bits are set.
fn blocks_of(bits: &ChunkBits) -> Vec<u16> {
    (0..CHUNK_BLOCKS).filter(|block| has_block(bits, *block)).collect()
}

/// The blocks of chunk 0.
fn present(store: &Store) -> Vec<u16> {
    blocks_of(&store.present(GROUP, VOLUME, LAYER, ChunkIndex(0)))
}

/// The blocks of chunk 0 that may have changed since a checkpoint.
fn changed(store: &Store, since: u64) -> Vec<u16> {
    let since = CheckpointNumber(since);
    blocks_of(&store.changed(GROUP, VOLUME, LAYER, ChunkIndex(0), since))
}

fn pull(store: &mut Store, first: u16, content: &Content, blocks: u16) {
    store.pull(GROUP, VOLUME, LAYER, range(first, blocks), content).unwrap();
}

#[test]
fn a_pulled_block_is_written_unless_the_device_has_it() {
    let disk = disk();
    let mut first = store(&disk, 0);
    pull(&mut first, 0, &data(&[1, 2]), 2);
    assert!(!first.has_pulls(GROUP));
    flush(&mut first);
    drop(first);
    // An interrupted install has left the words, and one of the blocks.
    let layout = Layout::new(DEVICE_BYTES, MAX_BYTES).unwrap();
    disk.poke(layout.block_at(SlotIndex(0), 1).0, &page(0));
    let disk = disk.power_cut();
    let mut expected = expected(0);
    expected.replicas.clear();
    let mut store = open(&disk, &expected).unwrap();
    store.add_replica(GROUP, PEER);
    assert_eq!(read(&mut store, 0, 2).unwrap_err().block, 1);
    let writes = disk.counters().writes;
    pull(&mut store, 0, &data(&[1, 2]), 2);
    assert!(store.has_pulls(GROUP) && !store.is_drained(GROUP) && store.overlay_bytes() > 0);
    store.take_completions().unwrap();
    assert!(!store.has_pulls(GROUP));
    land(&mut store);
    assert_eq!(disk.counters().writes - writes, 1, "only the block that differs");
    assert_eq!(store.overlay_bytes(), 0);
    assert_eq!(bytes(&read(&mut store, 0, 2).unwrap()), [1, 2]);
    // Zeros and absent blocks need no comparison.
    pull(&mut store, 1, &Content::Zeros, 2);
    pull(&mut store, 10, &Content::Absent, 2);
    land(&mut store);
    pull(&mut store, 1, &Content::Zeros, 2);
    assert!(store.is_drained(GROUP));
}

#[test]
fn what_has_changed_while_a_pulled_block_was_compared_stays() {
    let newer = [(data(&[5]), BlockState::Data), (Content::Zeros, BlockState::Zeros)];
    for (content, state) in newer.into_iter().chain([(Content::Absent, BlockState::Absent)]) {
        for lands_first in [false, true] {
            let disk = disk();
            let mut store = store(&disk, 0);
            apply(&mut store, 0, 1, data(&[1]), 1);
            land(&mut store);
            let layout = Layout::new(DEVICE_BYTES, MAX_BYTES).unwrap();
            disk.poke(layout.block_at(SlotIndex(0), 0).0, &page(7));
            disk.set_mode(Mode::Queued);
            pull(&mut store, 0, &data(&[1]), 1);
            pull(&mut store, 0, &content, 1);
            if lands_first {
                write_back(&mut store);
                if state == BlockState::Data {
                    disk.step_at(1);
                }
                store.take_completions().unwrap();
            }
            disk.set_mode(Mode::Immediate);
            store.take_completions().unwrap();
            land(&mut store);
            let found = read(&mut store, 0, 1).unwrap();
            assert_eq!(found.states, [state], "{lands_first}");
            assert!(bytes(&found).iter().all(|byte| *byte == 5));
        }
    }
}

#[test]
fn an_install_removes_what_its_source_lacks_and_a_source_states_what_it_has() {
    let disk = disk();
    let mut store = store(&disk, 0);
    apply(&mut store, 0, 3, data(&[1, 2, 3]), 1);
    let chunk = |chunk| BlockRange { chunk: ChunkIndex(chunk), first: 100, blocks: 1 };
    for number in [1, 2] {
        store.apply(GROUP, VOLUME, LAYER, chunk(number), data(&[4]), Index(2)).unwrap();
    }
    checkpoint(&mut store);
    apply(&mut store, 2, 1, data(&[5]), 3);
    assert_eq!(present(&store), [0, 1, 2]);
    assert_eq!(changed(&store, 1), [0, 1, 2], "the base of 1 may be below them");
    checkpoint(&mut store);
    assert_eq!(changed(&store, 2), [2]);
    apply(&mut store, 1, 1, Content::Zeros, 4);
    apply(&mut store, 70, 1, data(&[5]), 5);
    apply(&mut store, 0, 1, Content::Absent, 6);
    assert_eq!(present(&store), [1, 2, 70]);
    checkpoint(&mut store);
    assert_eq!(changed(&store, 2), [1, 2, 70]);
    assert_eq!(changed(&store, 3), [1, 70]);
    checkpoint(&mut store);
    assert!(changed(&store, 4).is_empty());
    let next_chunk = |store: &Store, from| {
        store.next_chunk_of(GROUP, VOLUME, LAYER, ChunkIndex(from)).map(|chunk| chunk.0)
    };
    assert_eq!(
        [0, 1, 2, 3].map(|from| next_chunk(&store, from)),
        [Some(0), Some(1), Some(2), None]
    );
    // The source has block 1 of chunk 0, and chunk 2.
    let mut of_source = [0; CHUNK_BLOCKS as usize / 8];
    of_source[0] = 1 << 1;
    store.pull_retain(GROUP, VOLUME, LAYER, ChunkIndex(0), &of_source);
    store.pull_retain(GROUP, VOLUME, LAYER, ChunkIndex(1), &[0; _]);
    assert_eq!(present(&store), [1]);
    checkpoint(&mut store);
    assert_eq!(next_chunk(&store, 1), Some(2));
    assert_eq!(store.free_slots(), 14);
}

#[test]
fn the_blocks_that_have_changed_since_a_checkpoint_are_known_also_after_a_restart() {
    let disk = disk();
    let mut first = store(&disk, 0);
    apply(&mut first, 0, 4, data(&[1, 2, 3, 4]), 1);
    checkpoint(&mut first);
    // Checkpoint 1 covers all of this.
    apply(&mut first, 1, 1, data(&[5]), 2);
    apply(&mut first, 70, 1, Content::Zeros, 3);
    apply(&mut first, 2, 1, Content::Absent, 4);
    checkpoint(&mut first);
    apply(&mut first, 3, 1, data(&[6]), 5);
    land(&mut first);
    apply(&mut first, 100, 1, data(&[7]), 6);
    // The words of blocks 0 to 3 were set before checkpoint 1 was complete.
    assert_eq!(changed(&first, 1), [0, 1, 3, 70, 100]);
    assert_eq!(changed(&first, 2), [1, 3, 70, 100]);
    checkpoint(&mut first);
    assert_eq!(changed(&first, 3), [3, 100]);
    assert_eq!(present(&first), [0, 1, 3, 70, 100]);
    drop(first);
    let mut second = store(&disk.power_cut(), 3);
    assert_eq!(changed(&second, 2), [1, 3, 70, 100]);
    // Only wanted blocks are read; the others count as absent.
    let wanted = second.changed(GROUP, VOLUME, LAYER, ChunkIndex(0), CheckpointNumber(3));
    second.read_wanted(ReadId(1), GROUP, VOLUME, LAYER, range(0, 101), &wanted);
    second.take_completions().unwrap();
    let mut done = Vec::new();
    second.take_reads(&mut done);
    let found = done.pop().unwrap().1.unwrap();
    assert_eq!(bytes(&found), [6, 7]);
    let is_data = |block: &usize| found.states[*block] == BlockState::Data;
    assert_eq!((0..101).filter(is_data).collect::<Vec<_>>(), [3, 100]);
}
