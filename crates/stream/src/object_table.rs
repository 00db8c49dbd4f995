//! The objects recorded in the catalog, how much of each is in use, and which of them object
//! compaction takes next.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::catalog::ObjectInfo;
use crate::naming::object_id;
use crate::range::Range;
use crate::types::ObjectId;

/// The objects recorded in the catalog.
#[derive(Default)]
pub(crate) struct ObjectTable {
    /// Objects in use.
    live: HashMap<ObjectId, Live>,
    /// Total size of the live objects.
    live_bytes: u64,
    /// The live objects that were written with ranges of several streams and are not settled, by
    /// generation and in the order of their data; an object written by compaction takes this order
    /// from its sources.
    shared: BTreeSet<(u8, i64, ObjectId)>,
    /// The live objects of which less than half is in use, in the same order.
    wasteful: BTreeSet<(i64, ObjectId)>,
    /// Objects to be deleted.
    pub(crate) retired: BTreeMap<ObjectId, Arc<ObjectInfo>>,
    /// Upper bound of the numbers that were committed, including all of earlier epochs of the WAL:
    /// an unknown object with a lower number is an orphan. Higher numbers belong to this run, or to
    /// a later one on another machine.
    pub(crate) committed: u64,
    /// Names of the objects that are being written, until they are live, retired or abandoned by
    /// their writer.
    pub(crate) uploading: HashSet<String>,
}

struct Live {
    object: Arc<ObjectInfo>,
    used: Used,
    /// Whether compaction with other shared objects would not merge what it has.
    is_settled: bool,
}

impl Live {
    /// Whether it was written with ranges of several streams, some of which may be gone. This never
    /// changes.
    fn is_shared(&self) -> bool {
        self.used.streams > 1 || self.used.payload_bytes != self.object.payload_bytes
    }

    fn is_wasteful(&self) -> bool {
        self.used.payload_bytes < self.object.payload_bytes / 2
    }
}

/// What streams have in an object.
#[derive(Clone, Copy, Default)]
pub(crate) struct Used {
    /// Number of streams with a range in it.
    pub(crate) streams: u64,
    /// Bytes of payload in the ranges.
    pub(crate) payload_bytes: u64,
}

impl Used {
    pub(crate) fn add(&mut self, payload_bytes: u64) {
        self.streams += 1;
        self.payload_bytes += payload_bytes;
    }
}

impl ObjectTable {
    /// Adds an object; one without a range is retired.
    pub(crate) fn insert(&mut self, object: Arc<ObjectInfo>, used: Used) {
        self.committed = self.committed.max(object.id.0 + 1);
        if used.streams == 0 {
            self.retired.insert(object.id, object);
        } else {
            let id = object.id;
            self.live_bytes += object.size_bytes;
            self.live.insert(id, Live { object, used, is_settled: false });
            self.sort(id);
        }
    }

    /// Adds a stream's range in an object, which it adds if it does not have it. Only a table that
    /// follows the chain uses this, and [`Self::release`]: it does not choose objects to compact.
    pub(crate) fn retain(&mut self, range: &Range) {
        let object = &range.object;
        self.retired.remove(&object.id);
        let live = self.live.entry(object.id).or_insert_with(|| {
            self.live_bytes += object.size_bytes;
            Live { object: object.clone(), used: Used::default(), is_settled: false }
        });
        live.used.add(range.payload_bytes);
    }

    /// Returns a live object.
    pub(crate) fn live(&self, id: ObjectId) -> Option<&Arc<ObjectInfo>> {
        self.live.get(&id).map(|live| &live.object)
    }

    /// Lists a live object as shared and as wasteful, if it is.
    fn sort(&mut self, id: ObjectId) {
        let live = &self.live[&id];
        let ObjectInfo { generation, created_at_ms, .. } = *live.object;
        if live.is_shared() && !live.is_settled {
            self.shared.insert((generation, created_at_ms, id));
        }
        if live.is_wasteful() {
            self.wasteful.insert((created_at_ms, id));
        }
    }

    /// Removes a stream's range in a live object. Returns true if it was the last one, so that the
    /// object is retired.
    pub(crate) fn release(&mut self, range: &Range) -> bool {
        let id = range.object.id;
        let Live { used, .. } = self.live.get_mut(&id).expect("an object with a range is live");
        used.streams -= 1;
        used.payload_bytes -= range.payload_bytes;
        if used.streams > 0 {
            self.sort(id);
            return false;
        }
        let Live { object, .. } = self.live.remove(&id).expect("it was there just now");
        self.live_bytes -= object.size_bytes;
        self.shared.remove(&(object.generation, object.created_at_ms, id));
        self.wasteful.remove(&(object.created_at_ms, id));
        self.retired.insert(id, object);
        true
    }

    /// Takes an object, if it is live, out of those that are compacted together.
    pub(crate) fn settle(&mut self, id: ObjectId) {
        let Some(live) = self.live.get_mut(&id) else { return };
        live.is_settled = true;
        self.shared.remove(&(live.object.generation, live.object.created_at_ms, id));
    }

    /// Returns objects to compact together, and the generation of the result: the `fan_in` oldest
    /// neighbours among the shared objects of a generation, or one object that is mostly waste.
    /// Objects that are `left_out` are not taken and also separate those on either side of them:
    /// the data in the middle would keep their ranges apart.
    ///
    /// Apart from objects that are left out and those between them, it visits fewer than `fan_in`
    /// objects of each generation before those that it returns.
    pub(crate) fn compactable(
        &self,
        fan_in: usize,
        left_out: impl Fn(ObjectId) -> bool,
    ) -> Option<(Vec<Arc<ObjectInfo>>, u8)> {
        let object = |id: &ObjectId| self.live[id].object.clone();
        let mut neighbours = Vec::with_capacity(fan_in);
        let mut of = 0;
        for (generation, _, id) in &self.shared {
            // Whatever the objects are, a byte is not rewritten without end.
            if *generation == u8::MAX {
                break;
            }
            if *generation != of || left_out(*id) {
                neighbours.clear();
                of = *generation;
            }
            if left_out(*id) {
                continue;
            }
            neighbours.push(*id);
            if neighbours.len() == fan_in {
                let objects = neighbours.iter().map(object).collect();
                return Some((objects, generation + 1));
            }
        }
        let (_, id) = self.wasteful.iter().find(|(_, id)| !left_out(*id))?;
        Some((vec![object(id)], self.live[id].object.generation))
    }

    /// Returns the number of objects in use.
    pub(crate) fn live_count(&self) -> usize {
        self.live.len()
    }

    /// Returns the total size of the objects in use.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Whether a stream has a range in the object of this name.
    pub(crate) fn is_live_name(&self, name: &str) -> bool {
        let live = object_id(name).and_then(|id| self.live.get(&id));
        live.is_some_and(|live| live.object.name == name)
    }

    /// Whether a stream has a range in the object.
    pub(crate) fn is_live(&self, id: ObjectId) -> bool {
        self.live.contains_key(&id)
    }

    /// Whether an object of this name belongs to this store and is neither in the catalog nor about
    /// to be.
    pub(crate) fn is_orphan(&self, name: &str) -> bool {
        let Some(id) = object_id(name).filter(|id| id.0 < self.committed) else {
            return false;
        };
        let object = self.live.get(&id).map(|live| &live.object);
        let known = object.or_else(|| self.retired.get(&id));
        known.is_none_or(|object| object.name != name) && !self.uploading.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use alluvium_device::sim::Random;

    use super::*;
    use crate::types::StreamOffset;

    fn range(id: u64, created_at_ms: i64, generation: u8, payload_bytes: u64) -> Range {
        let object = ObjectInfo {
            id: ObjectId(id),
            name: String::new(),
            size_bytes: 1,
            format: 2,
            index_position: 0,
            index_bytes: 0,
            index_crc32c: 0,
            created_at_ms,
            generation,
            payload_bytes,
        };
        let (start, end) = (StreamOffset(0), StreamOffset(1));
        Range { object: Arc::new(object), start, end, payload_bytes: 10, max_timestamp_ms: 0 }
    }

    /// Adds an object with this number of ranges of 10 bytes.
    fn insert(table: &mut ObjectTable, range: &Range, streams: u64) {
        table.insert(range.object.clone(), Used { streams, payload_bytes: streams * 10 });
    }

    fn found(table: &ObjectTable, left_out: &[u64]) -> Option<(Vec<u64>, u8)> {
        let found = table.compactable(3, |id| left_out.contains(&id.0));
        found.map(|(objects, generation)| {
            (objects.iter().map(|object| object.id.0).collect(), generation)
        })
    }

    #[test]
    fn the_oldest_neighbours_are_selected() {
        let mut table = ObjectTable::default();
        // Not in the order of their numbers, and one in between that holds a single stream.
        for (id, created_at_ms) in [(1, 50), (2, 10), (3, 20), (4, 30), (5, 40), (6, 60), (7, 70)] {
            let streams = if id == 3 { 1 } else { 2 };
            insert(&mut table, &range(id, created_at_ms, 0, streams * 10), streams);
        }
        insert(&mut table, &range(8, 0, 1, 20), 2);
        assert_eq!(found(&table, &[]), Some((vec![2, 4, 5], 1)));
        assert_eq!(
            found(&table, &[7]),
            Some((vec![2, 4, 5], 1)),
            "the object that is left out comes later"
        );
        assert_eq!(found(&table, &[4]), Some((vec![5, 1, 6], 1)));
        assert_eq!(found(&table, &[1, 2]), None);
        assert_eq!(found(&table, &[5, 6]), None);
    }

    #[test]
    fn released_ranges_make_an_object_wasteful_and_then_retired() {
        let mut table = ObjectTable::default();
        let (first, second) = (range(1, 10, 4, 40), range(2, 20, 0, 40));
        insert(&mut table, &first, 4);
        insert(&mut table, &second, 4);
        assert!(!table.release(&first) && !table.release(&first));
        assert_eq!(found(&table, &[]), None, "half of it is in use");
        assert!(!table.release(&first));
        assert_eq!(found(&table, &[]), Some((vec![1], 4)));
        assert_eq!(found(&table, &[1]), None);
        assert!(table.release(&first));
        assert_eq!(found(&table, &[]), None);
        assert_eq!((table.live_count(), table.live_bytes(), table.retired.len()), (1, 1, 1));
    }

    #[test]
    fn settled_objects_are_compacted_for_their_waste_only() {
        let mut table = ObjectTable::default();
        let ranges: Vec<_> = (1..=4).map(|id| range(id, id.cast_signed(), 0, 40)).collect();
        for range in &ranges {
            insert(&mut table, range, 4);
        }
        table.settle(ObjectId(2));
        assert_eq!(found(&table, &[]), Some((vec![1, 3, 4], 1)));
        table.settle(ObjectId(3));
        table.settle(ObjectId(9));
        assert_eq!(found(&table, &[]), None);
        for _ in 0..3 {
            table.release(&ranges[1]);
        }
        assert_eq!(found(&table, &[]), Some((vec![2], 0)));
        assert!(table.release(&ranges[1]));
        assert_eq!(found(&table, &[]), None);
    }

    #[test]
    fn objects_of_the_last_generation_stay() {
        let mut table = ObjectTable::default();
        for id in 1..=3 {
            insert(&mut table, &range(id, 0, u8::MAX, 20), 2);
        }
        assert_eq!(found(&table, &[]), None);
    }

    /// Objects come and go; the result is always the same as from sorting all of them.
    #[test]
    fn the_selection_is_the_same_as_by_sorting_all_objects() {
        let mut times_found = [0; 2];
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut table = ObjectTable::default();
            // With the number of streams that have 10 bytes in it.
            let mut live: Vec<(Range, u64)> = Vec::new();
            let mut left_out = Vec::new();
            for id in 0..100 {
                if random.below(3) == 0 && !live.is_empty() {
                    let at = random.below(live.len() as u64) as usize;
                    live[at].1 -= 1;
                    assert_eq!(table.release(&live[at].0), live[at].1 == 0);
                    live.retain(|(_, streams)| *streams > 0);
                } else {
                    let streams = 1 + random.below(4);
                    let generation = random.below(3) as u8;
                    let created_at_ms = random.below(50).cast_signed();
                    let new = range(id, created_at_ms, generation, streams * 10);
                    insert(&mut table, &new, streams);
                    live.push((new, streams));
                }
                if random.below(10) == 0 {
                    left_out.push(id);
                }
                let expected = by_sorting(&mut live, &left_out);
                assert_eq!(found(&table, &left_out), expected, "seed {seed}, {id}");
                if let Some((objects, _)) = expected {
                    times_found[usize::from(objects.len() == 1)] += 1;
                }
            }
        }
        assert!(times_found.iter().all(|times| *times > 100), "{times_found:?}");
    }

    fn by_sorting(live: &mut [(Range, u64)], left_out: &[u64]) -> Option<(Vec<u64>, u8)> {
        live.sort_by_key(|(range, _)| (range.object.created_at_ms, range.object.id));
        let is_left_out = |range: &Range| left_out.contains(&range.object.id.0);
        for generation in 0..3 {
            let shared = live.iter().filter(|(range, streams)| {
                range.object.generation == generation
                    && (*streams > 1 || range.object.payload_bytes != 10)
            });
            let shared: Vec<&Range> = shared.map(|(range, _)| range).collect();
            let mut windows = shared.windows(3);
            if let Some(three) = windows.find(|three| !three.iter().any(|range| is_left_out(range)))
            {
                return Some((
                    three.iter().map(|range| range.object.id.0).collect(),
                    generation + 1,
                ));
            }
        }
        let mut wasteful = live.iter().filter(|(range, streams)| {
            streams * 10 < range.object.payload_bytes / 2 && !is_left_out(range)
        });
        let (range, _) = wasteful.next()?;
        Some((vec![range.object.id.0], range.object.generation))
    }
}
