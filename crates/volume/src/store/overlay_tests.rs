//! The overlay against plain maps.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::overlay::*;
use crate::op::BLOCK_BYTES;
use crate::types::{ChunkIndex, GroupId, Index, Layer, VolumeId};

const BLOCKS: u16 = 12;

fn key(group: u64, chunk: u32) -> ChunkKey {
    ChunkKey {
        group: GroupId(group),
        volume: VolumeId(1),
        chunk: ChunkIndex(chunk),
        layer: Layer(0),
    }
}

/// Blocks that say which entry has written them.
fn data(index: u64, blocks: u16) -> Content {
    let block = |_| index.to_le_bytes().repeat(BLOCK_BYTES / 8);
    let data: Vec<u8> = (0..blocks).flat_map(block).collect();
    Content::Data(data.into(), vec![index as u32; blocks.into()])
}

/// The entry that has made a block what it is, and whether it has data.
fn entry(content: &Content, at: usize) -> (u64, bool) {
    match content {
        Content::Data(data, crcs) => {
            let at = at * BLOCK_BYTES;
            let index = u64::from_le_bytes(data[at..at + 8].try_into().unwrap());
            assert_eq!(crcs.len() * BLOCK_BYTES, data.len());
            assert_eq!(u64::from(crcs[at / BLOCK_BYTES]), index);
            (index, true)
        }
        Content::Zeros | Content::Absent => (0, false),
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert { group: u64, chunk: u32, first: u16, blocks: u16, kind: u8 },
    Commit { group: u64, by: u64 },
    Write { max_blocks: u16 },
    Land(prop::sample::Index),
    Swap,
}

fn step() -> impl Strategy<Value = Step> {
    let insert = (1..3_u64, 0..2_u32, 0..BLOCKS, 1..5_u16, 0..4_u8).prop_map(
        |(group, chunk, first, blocks, kind)| {
            let blocks = blocks.min(BLOCKS - first);
            Step::Insert { group, chunk, first, blocks, kind }
        },
    );
    prop_oneof![
        6 => insert,
        3 => (1..3_u64, 0..6_u64).prop_map(|(group, by)| Step::Commit { group, by }),
        4 => (1..9_u16).prop_map(|max_blocks| Step::Write { max_blocks }),
        4 => any::<prop::sample::Index>().prop_map(Step::Land),
        1 => Just(Step::Swap),
    ]
}

type Place = (ChunkKey, u16);

/// The overlay over a device, beside plain maps.
#[derive(Default)]
struct Model {
    overlay: Overlay,
    /// The last change of each block: entry, and whether it has data.
    applied: BTreeMap<Place, (u64, bool)>,
    /// The entry of each block that has landed last.
    landed: BTreeMap<Place, u64>,
    flights: Vec<(WriteBack, BTreeMap<Place, u64>)>,
    /// The entry that has last changed each block when it was taken, in order.
    next_index: [u64; 3],
    durable: [u64; 3],
    after: Option<ChunkKey>,
    /// What a checkpoint in progress has to make durable: the last change of each block that
    /// was at or below its base at the swap.
    required: Option<BTreeMap<Place, u64>>,
}

impl Model {
    fn step(&mut self, step: Step) {
        match step {
            Step::Insert { group, chunk, first, blocks, kind } => {
                let index = self.next_index[group as usize] + 1;
                self.next_index[group as usize] = index;
                let content = match kind {
                    0 => Content::Zeros,
                    1 => Content::Absent,
                    _ => data(index, blocks),
                };
                let key = key(group, chunk);
                let range = first..first + blocks;
                self.overlay.insert(key, range.clone(), content, Index(index));
                for block in range {
                    self.applied.insert((key, block), (index, kind > 1));
                }
            }
            Step::Commit { group, by } => {
                let durable = &mut self.durable[group as usize];
                *durable = (*durable + by).min(self.next_index[group as usize]);
            }
            Step::Write { max_blocks } => {
                let durable = self.durable;
                let commit = |group: GroupId| Index(durable[group.0 as usize]);
                self.overlay.commit(commit);
                let taken = self.overlay.next_write(self.after, max_blocks);
                let Some(taken) = taken else { return };
                self.after = Some(taken.key);
                let mut entries = BTreeMap::new();
                let mut next = taken.runs[0].0.start;
                for (range, content) in &taken.runs {
                    assert_eq!(range.start, next, "neighbouring blocks");
                    next = range.end;
                    for block in range.clone() {
                        let place = (taken.key, block);
                        let (index, has_data) = self.applied[&place];
                        let found = entry(content, usize::from(block - range.start));
                        assert_eq!(found, (if has_data { index } else { 0 }, has_data));
                        assert!(index <= durable[taken.key.group.0 as usize], "W1");
                        let is_twice =
                            self.flights.iter().any(|(_, others)| others.contains_key(&place));
                        assert!(!is_twice, "two writes of a block in flight");
                        entries.insert(place, index);
                    }
                }
                assert!(taken.runs.len() == 1 || entries.len() <= usize::from(max_blocks));
                self.flights.push((taken, entries));
            }
            Step::Land(at) if !self.flights.is_empty() => {
                self.land(at.index(self.flights.len()));
            }
            Step::Land(_) => {}
            Step::Swap if self.required.is_none() => {
                let durable = self.durable;
                self.overlay.swap(|group| Index(durable[group.0 as usize]));
                let is_below = |(place, (index, _)): &(&Place, &(u64, bool))| {
                    *index <= durable[place.0.group.0 as usize]
                };
                let below = self.applied.iter().filter(is_below);
                self.required = Some(below.map(|(place, entry)| (*place, entry.0)).collect());
            }
            Step::Swap => {}
        }
    }

    fn land(&mut self, flight: usize) {
        let (taken, entries) = self.flights.remove(flight);
        self.overlay.landed(taken.id);
        for (place, index) in entries {
            let before = self.landed.insert(place, index);
            assert!(before < Some(index), "an older write has landed later");
        }
    }

    fn check(&mut self) {
        for chunk in [key(1, 0), key(1, 1), key(2, 0), key(2, 1)] {
            let mut found = BTreeMap::new();
            for (range, content) in self.overlay.read(chunk, 1..BLOCKS) {
                for block in range.clone() {
                    let at = usize::from(block - range.start);
                    assert!(found.insert(block, entry(&content, at)).is_none());
                }
            }
            for block in 1..BLOCKS {
                let place = (chunk, block);
                let Some((index, has_data)) = self.applied.get(&place).copied() else {
                    assert!(!found.contains_key(&block));
                    continue;
                };
                match found.get(&block) {
                    Some(found) => {
                        let expected = if has_data { index } else { 0 };
                        assert_eq!(*found, (expected, has_data));
                    }
                    None => assert_eq!(self.landed.get(&place), Some(&index), "{place:?}"),
                }
            }
        }
        if let Some(required) = &self.required
            && !self.overlay.has_awaited()
        {
            for (place, index) in required {
                assert!(self.landed.get(place) >= Some(index), "{place:?} has not landed");
            }
            self.required = None;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn blocks_are_read_written_and_awaited_as_in_a_model(
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut model = Model::default();
        for step in steps {
            model.step(step);
            model.check();
        }
        // Everything becomes durable, and lands: nothing is left behind or counted.
        model.durable = model.next_index;
        for _ in 0..1000 {
            model.step(Step::Write { max_blocks: 8 });
            if !model.flights.is_empty() {
                model.land(0);
            }
            model.check();
            if model.overlay.is_empty() {
                break;
            }
        }
        prop_assert!(model.overlay.is_empty() && model.required.is_none());
        prop_assert_eq!((model.overlay.bytes(), model.overlay.awaited()), (0, 0));
    }
}

#[test]
fn a_hot_block_is_written_once_per_landing_and_a_checkpoint_ends() {
    let mut overlay = Overlay::default();
    let key = key(1, 0);
    let all = |_: GroupId| Index(u64::MAX);
    overlay.insert(key, 0..1, data(1, 1), Index(1));
    overlay.commit(all);
    let first = overlay.next_write(None, 8).unwrap();
    overlay.insert(key, 0..1, data(2, 1), Index(2));
    overlay.insert(key, 0..1, data(3, 1), Index(3));
    overlay.commit(all);
    assert!(overlay.next_write(None, 8).is_none(), "a write of it is in flight");
    overlay.swap(|_| Index(2));
    assert!(overlay.has_awaited(), "a write is in flight");
    overlay.landed(first.id);
    assert!(!overlay.has_awaited(), "entry 2 was replaced before the swap");
    let second = overlay.next_write(None, 8).unwrap();
    assert_eq!(entry(&second.runs[0].1, 0), (3, true));
    overlay.landed(second.id);
    assert!(overlay.is_empty());
}

#[test]
fn a_removed_group_leaves_nothing_but_writes_in_flight() {
    let mut overlay = Overlay::default();
    let all = |_: GroupId| Index(u64::MAX);
    for group in [1, 2] {
        overlay.insert(key(group, 0), 0..4, data(1, 4), Index(1));
    }
    overlay.commit(all);
    let taken = overlay.next_write(None, 8).unwrap();
    overlay.remove_group(GroupId(1));
    assert!(overlay.read(key(1, 0), 0..4).next().is_none());
    assert!(overlay.read(key(2, 0), 0..4).next().is_some());
    overlay.landed(taken.id);
    assert!(overlay.next_write(None, 8).is_some_and(|next| next.key == key(2, 0)));
}
