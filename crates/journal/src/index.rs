//! The key directory: hash of a key to the place of its newest record. `docs/journal-cache.md`,
//! "How it works".
//!
//! Readers take no lock. A writer holds the lock of its key's shard from before it takes a place in
//! the journal until the entry says so.

mod grower;

use std::io;

use alluvium_device::Words;

use crate::hash::{KeyHash, SHARD_BITS};
use crate::place::Place;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, ArcSwap, Mutex, MutexGuard};

pub(crate) use grower::Grower;

/// A slot is two words: place, then fingerprint.
const SLOT_WORDS: usize = 2;
/// A bucket is a cache line.
const BUCKET_SLOTS: usize = 4;
const BUCKET_WORDS: usize = BUCKET_SLOTS * SLOT_WORDS;

/// In the place of a slot: never used since the table was made.
const EMPTY: u64 = 0;
/// In the place of a slot: its entry was removed. A search goes on behind it, an insertion may take
/// it.
const REMOVED: u64 = 1;

/// Buckets of a new shard: one page; two in a model.
const FIRST_BUCKETS_LOG2: u32 = if cfg!(loom) { 1 } else { 6 };

/// Entries by shard.
pub(crate) struct Index {
    shards: Box<[Shard]>,
    /// Makes tables anew before their writers have to.
    pub(crate) grower: Grower,
}

/// What writers change has a cache line of its own: readers of the table, and writers of the next
/// shard, do not wait for it.
#[repr(align(64))]
struct Shard {
    /// What its writers know.
    writer: OwnLine<Mutex<Owned>>,
    /// The same table as theirs, for readers.
    table: ArcSwap<Table>,
}

#[repr(align(64))]
struct OwnLine<T>(T);

/// What the writer of a shard has for himself.
struct Owned {
    table: Arc<Table>,
    fill: Fill,
    /// The grower was told that the table is crowded.
    has_asked: bool,
    /// Bytes of keys and values that users have put, and of keys that they have deleted: here,
    /// where the lock is held anyhow.
    user_bytes: u64,
}

/// How full a table is.
#[derive(Clone, Copy, Debug, Default)]
struct Fill {
    entries: usize,
    /// Slots that are [`REMOVED`].
    removed: usize,
}

impl Index {
    /// Without entries, with room for about `entries`.
    pub(crate) fn with_room(entries: usize) -> io::Result<Self> {
        let per_shard = entries.div_ceil(1 << SHARD_BITS);
        let mut log2 = FIRST_BUCKETS_LOG2;
        while room(log2) < per_shard {
            log2 += 1;
        }
        let shard = |_| {
            let table = Arc::new(Table::new(log2)?);
            let owned = Owned {
                table: table.clone(),
                fill: Fill::default(),
                has_asked: false,
                user_bytes: 0,
            };
            Ok(Shard { writer: OwnLine(Mutex::new(owned)), table: ArcSwap::new(table) })
        };
        let shards = (0..1 << SHARD_BITS).map(shard).collect::<io::Result<_>>()?;
        Ok(Self { shards, grower: Grower::default() })
    }

    /// The place of a key's newest record, by what stands for the key.
    #[inline]
    pub(crate) fn find(&self, hash: KeyHash) -> Option<Place> {
        self.shards[hash.shard()].table.load().find(hash).map(|(_, place)| place)
    }

    /// Begin to bring a key's slot into the cache of the processor.
    #[inline]
    pub(crate) fn prefetch(&self, hash: KeyHash) {
        self.shards[hash.shard()].table.load().prefetch(hash);
    }

    /// Remember that the record at `place` was read, if it still is the key's newest.
    #[inline]
    pub(crate) fn mark_read(&self, hash: KeyHash, place: Place) {
        let table = self.shards[hash.shard()].table.load();
        if let Some((slot, found)) = table.find(hash)
            && found == place
        {
            let word = &table.words[slot * SLOT_WORDS];
            let read = place.marked_read().0;
            // Whoever has changed it meanwhile knows better.
            let _ = word.compare_exchange(place.0, read, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Be the only one who changes the entries of this key's shard.
    pub(crate) fn lock(&self, hash: KeyHash) -> Writer<'_> {
        Writer { owned: self.shards[hash.shard()].writer.0.lock(), index: self, hash }
    }

    /// Enter a record that was found on disk, unless a newer one of its key was. Nobody reads
    /// meanwhile.
    pub(crate) fn recover(&self, hash: KeyHash, place: Place) -> io::Result<Recovery> {
        let mut writer = self.lock(hash);
        let table = &writer.owned.table;
        if let Some((slot, known)) = table.find(hash) {
            if known.is_same(place) {
                return Ok(Recovery::Known);
            }
            if known.is_newer(place) {
                return Ok(Recovery::Older);
            }
            table.words[slot * SLOT_WORDS].store(place.0, Ordering::Release);
            return Ok(Recovery::Replaced(known));
        }
        // At once: nobody is there yet to do it beside.
        if writer.owned.is_crowded() {
            writer.grow()?;
        }
        writer.insert(place);
        Ok(Recovery::New)
    }

    /// Add all entries of a shard whose own bucket is that of `fingerprint`; returns the least
    /// fingerprint of the bucket behind it, if there is one.
    ///
    /// Who goes through all buckets so meets every entry that is there all the time, and only once:
    /// tables are in the order of fingerprints whatever their size, so a larger one does not move
    /// what is behind to what is ahead; and within one table an entry stays in its slot.
    pub(crate) fn bucket(
        &self,
        shard: usize,
        fingerprint: u64,
        found: &mut Vec<(KeyHash, Place)>,
    ) -> Option<u64> {
        let table = self.shards[shard].table.load();
        let own = table.bucket(fingerprint);
        for bucket in table.buckets(fingerprint) {
            let mut has_empty = false;
            for slot in bucket * BUCKET_SLOTS..(bucket + 1) * BUCKET_SLOTS {
                match table.entry(slot) {
                    Ok((fingerprint, place)) if table.bucket(fingerprint) == own => {
                        let high = (shard as u64) << (u64::BITS - SHARD_BITS) | place.tag();
                        found.push((KeyHash { high, fingerprint }, place));
                    }
                    Ok(_) => {}
                    Err(free) => has_empty |= free == EMPTY,
                }
            }
            if has_empty {
                break;
            }
        }
        let next = own as u64 + 1;
        (next < 1 << table.buckets_log2).then(|| next << (u64::BITS - table.buckets_log2))
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.writer.0.lock().fill.entries).sum()
    }

    /// Bytes of keys and values that users have put, and of keys that they have deleted.
    pub(crate) fn user_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.writer.0.lock().user_bytes).sum()
    }

    /// Memory of the tables, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.shards.iter().map(|shard| size_of_val::<[_]>(&shard.table.load().words)).sum()
    }

    /// Remove all entries that `keep` does not want. It sees each place once; readers and writers
    /// wait for nothing but their shard's lock.
    pub(crate) fn retain(&self, mut keep: impl FnMut(Place) -> bool) {
        for shard in &self.shards {
            let Owned { table, fill, .. } = &mut *shard.writer.0.lock();
            for slot in 0..table.slots() {
                let word = table.words[slot * SLOT_WORDS].load(Ordering::Relaxed);
                if word > REMOVED && !keep(Place(word)) {
                    table.remove(slot, fill);
                }
            }
        }
    }
}

/// What became of a record that was found on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// It is the first one of its key.
    New,
    /// It is newer than this one, which was entered before.
    Replaced(Place),
    /// It was entered before.
    Known,
    /// A newer one was.
    Older,
}

/// The right to change one key's entry.
pub(crate) struct Writer<'a> {
    owned: MutexGuard<'a, Owned>,
    index: &'a Index,
    hash: KeyHash,
}

impl Writer<'_> {
    /// The place of its newest record.
    pub(crate) fn get(&self) -> Option<Place> {
        self.owned.table.find(self.hash).map(|(_, place)| place)
    }

    /// See to it that [`Self::set`] finds a slot, and soon.
    ///
    /// # Errors
    /// There is no memory for a larger table.
    pub(crate) fn make_room(&mut self) -> io::Result<()> {
        let owned = &mut *self.owned;
        if owned.is_crowded() {
            if owned.fill.used() >= most(owned.table.buckets_log2) {
                return self.grow();
            }
            if !std::mem::replace(&mut owned.has_asked, true) {
                self.index.grower.ask(self.hash.shard());
            }
        }
        self.owned.table.prefetch(self.hash);
        Ok(())
    }

    /// Make the table anew, now.
    #[cold]
    fn grow(&mut self) -> io::Result<()> {
        let larger = Arc::new(Table::new(self.owned.next_log2())?);
        self.owned.move_to(larger, &self.index.shards[self.hash.shard()]);
        Ok(())
    }

    /// The key's newest record is at `place`; returns where it was. [`Self::make_room`] comes
    /// before.
    pub(crate) fn set(&mut self, place: Place) -> Option<Place> {
        let table = &self.owned.table;
        if let Some((slot, _)) = table.find(self.hash) {
            // Not what `find` has seen: a reader may have marked it meanwhile.
            return Some(Place(table.words[slot * SLOT_WORDS].swap(place.0, Ordering::AcqRel)));
        }
        self.insert(place);
        None
    }

    /// The same if it has none yet.
    fn insert(&mut self, place: Place) {
        let Owned { table, fill, .. } = &mut *self.owned;
        let (slot, was_removed) = table.free_slot(self.hash.fingerprint);
        table.fill_slot(slot, self.hash.fingerprint, place);
        fill.entries += 1;
        fill.removed -= usize::from(was_removed);
    }

    /// A user has put so many bytes, or deleted a key of so many.
    pub(crate) fn count_user_bytes(&mut self, bytes: usize) {
        self.owned.user_bytes += bytes as u64;
    }

    /// The key has no record any more; returns where it was.
    pub(crate) fn remove(&mut self) -> Option<Place> {
        let Owned { table, fill, .. } = &mut *self.owned;
        let (slot, _) = table.find(self.hash)?;
        Some(table.remove(slot, fill))
    }
}

impl Fill {
    /// Slots that are not free.
    fn used(self) -> usize {
        self.entries + self.removed
    }
}

impl Owned {
    /// Whether the table should be made anew.
    fn is_crowded(&self) -> bool {
        self.fill.used() >= room(self.table.buckets_log2)
    }

    /// The size of the table that comes behind a crowded one. Half of its room is left then, so
    /// that tables are not made again and again: twice as large, or the same without what was
    /// removed.
    fn next_log2(&self) -> u32 {
        let log2 = self.table.buckets_log2;
        log2 + u32::from(self.fill.entries >= room(log2) / 2)
    }

    /// Have all entries in another table, of [`Self::next_log2`], which is empty; returns the one
    /// before.
    fn move_to(&mut self, other: Arc<Table>, shard: &Shard) -> Arc<Table> {
        let table = &self.table;
        for slot in 0..table.slots() {
            let place = table.words[slot * SLOT_WORDS].load(Ordering::Relaxed);
            if place > REMOVED {
                let fingerprint = table.words[slot * SLOT_WORDS + 1].load(Ordering::Relaxed);
                let (free, _) = other.free_slot(fingerprint);
                other.fill_slot(free, fingerprint, Place(place));
            }
        }
        self.fill.removed = 0;
        self.has_asked = false;
        shard.table.store(other.clone());
        std::mem::replace(&mut self.table, other)
    }
}

/// Entries, with those that were removed, from which on a table is crowded: three quarters of its
/// slots.
fn room(buckets_log2: u32) -> usize {
    (BUCKET_SLOTS << buckets_log2) / 4 * 3
}

/// Of these a table takes no more, and a writer does not wait for the grower: seven eighths of its
/// slots.
fn most(buckets_log2: u32) -> usize {
    (BUCKET_SLOTS << buckets_log2) / 8 * 7
}

/// Open addressing by buckets. An entry is in the first bucket from its own on that had a free
/// slot: so a search ends at a bucket with an [`EMPTY`] slot.
struct Table {
    words: Words,
    buckets_log2: u32,
}

impl Table {
    fn new(buckets_log2: u32) -> io::Result<Self> {
        Ok(Self { words: Words::zeroed(BUCKET_WORDS << buckets_log2)?, buckets_log2 })
    }

    fn slots(&self) -> usize {
        BUCKET_SLOTS << self.buckets_log2
    }

    /// In the order of fingerprints, so that a larger table is filled from its beginning to its
    /// end.
    fn bucket(&self, fingerprint: u64) -> usize {
        (fingerprint >> (u64::BITS - self.buckets_log2)) as usize
    }

    #[inline]
    fn prefetch(&self, hash: KeyHash) {
        self.words.prefetch(self.bucket(hash.fingerprint) * BUCKET_WORDS);
    }

    /// All buckets, beginning with the fingerprint's own.
    fn buckets(&self, fingerprint: u64) -> impl Iterator<Item = usize> {
        let (first, mask) = (self.bucket(fingerprint), (1 << self.buckets_log2) - 1);
        (0..=mask).map(move |step| (first + step) & mask)
    }

    #[inline]
    fn find(&self, hash: KeyHash) -> Option<(usize, Place)> {
        for bucket in self.buckets(hash.fingerprint) {
            let mut has_empty = false;
            for slot in bucket * BUCKET_SLOTS..(bucket + 1) * BUCKET_SLOTS {
                match self.read(slot, hash) {
                    Slot::Found(place) => return Some((slot, place)),
                    Slot::Empty => has_empty = true,
                    Slot::Other => {}
                }
            }
            if has_empty {
                return None;
            }
        }
        None
    }

    /// Writers store a removed slot's fingerprint before its place, so a place that is the same
    /// before and after belongs to the fingerprint between: no two entries have one place.
    #[inline]
    fn read(&self, slot: usize, hash: KeyHash) -> Slot {
        let [place, fingerprint] = [0, 1].map(|word| &self.words[slot * SLOT_WORDS + word]);
        let mut before = place.load(Ordering::Acquire);
        loop {
            if before <= REMOVED {
                return if before == EMPTY { Slot::Empty } else { Slot::Other };
            }
            if fingerprint.load(Ordering::Acquire) != hash.fingerprint {
                return Slot::Other;
            }
            let after = place.load(Ordering::Acquire);
            if Place(before).is_same(Place(after)) {
                let is_key = Place(after).tag() == hash.tag();
                return if is_key { Slot::Found(Place(after)) } else { Slot::Other };
            }
            before = after;
        }
    }

    /// Fingerprint and place of the entry in a slot, that belong together as in [`Self::read`]; or
    /// [`EMPTY`] or [`REMOVED`].
    fn entry(&self, slot: usize) -> Result<(u64, Place), u64> {
        let [place, fingerprint] = [0, 1].map(|word| &self.words[slot * SLOT_WORDS + word]);
        let mut before = place.load(Ordering::Acquire);
        loop {
            if before <= REMOVED {
                return Err(before);
            }
            let found = fingerprint.load(Ordering::Acquire);
            let after = place.load(Ordering::Acquire);
            if Place(before).is_same(Place(after)) {
                return Ok((found, Place(after)));
            }
            before = after;
        }
    }

    /// Where an entry that is not there belongs, and whether another one was removed from there.
    fn free_slot(&self, fingerprint: u64) -> (usize, bool) {
        let slots = self
            .buckets(fingerprint)
            .flat_map(|bucket| bucket * BUCKET_SLOTS..(bucket + 1) * BUCKET_SLOTS);
        for slot in slots {
            let place = self.words[slot * SLOT_WORDS].load(Ordering::Relaxed);
            if place <= REMOVED {
                return (slot, place == REMOVED);
            }
        }
        unreachable!("a table is never full: `make_room` comes before each insertion")
    }

    fn fill_slot(&self, slot: usize, fingerprint: u64, place: Place) {
        self.words[slot * SLOT_WORDS + 1].store(fingerprint, Ordering::Release);
        self.words[slot * SLOT_WORDS].store(place.0, Ordering::Release);
    }

    fn remove(&self, slot: usize, fill: &mut Fill) -> Place {
        // Where a slot of the bucket is empty nothing was ever pushed on to the next one, and a
        // search may end here.
        let bucket = slot / BUCKET_SLOTS * BUCKET_SLOTS;
        let has_empty = (bucket..bucket + BUCKET_SLOTS)
            .any(|slot| self.words[slot * SLOT_WORDS].load(Ordering::Relaxed) == EMPTY);
        let free = if has_empty { EMPTY } else { REMOVED };
        let place = self.words[slot * SLOT_WORDS].swap(free, Ordering::AcqRel);
        fill.entries -= 1;
        fill.removed += usize::from(!has_empty);
        Place(place)
    }
}

enum Slot {
    Found(Place),
    /// Never used.
    Empty,
    /// Another key's, or removed.
    Other,
}

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
