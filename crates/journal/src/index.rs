//! The index: a concurrent hash table from the hash of a key to the position of its newest record.
//! `docs/journal-cache-design.md`, "Index".
//!
//! Readers take no lock. A writer holds the lock of its key's shard from before it reserves space
//! in the journal until the entry is set.

mod grower;

use std::io;

use alluvium_device::Words;

use crate::hash::{KeyHash, SHARD_BITS};
use crate::position::Position;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, ArcSwap, Mutex, MutexGuard};

pub(crate) use grower::Grower;

/// A slot has two words: the position, then the fingerprint.
const SLOT_WORDS: usize = 2;
/// A bucket is a cache line.
const BUCKET_SLOTS: usize = 4;
const BUCKET_WORDS: usize = BUCKET_SLOTS * SLOT_WORDS;

/// The position of a slot that was never used since the table was created.
const EMPTY: u64 = 0;
/// The position of a slot whose entry was removed. A search continues past it; an insertion may use
/// it.
const REMOVED: u64 = 1;

/// Buckets of a new shard: one page; two in a model.
const FIRST_BUCKETS_LOG2: u32 = if cfg!(loom) { 1 } else { 6 };

/// The entries, by shard.
pub(crate) struct Index {
    shards: Box<[Shard]>,
    /// Replaces tables before their writers have to.
    pub(crate) grower: Grower,
}

/// The data that writers change has its own cache line, so that readers of the table and writers of
/// the next shard do not contend for it.
#[repr(align(64))]
struct Shard {
    /// The writers' state.
    writer: CachePadded<Mutex<Owned>>,
    /// The writers' table, for readers.
    table: ArcSwap<Table>,
}

#[repr(align(64))]
struct CachePadded<T>(T);

/// The state of a shard's writer.
struct Owned {
    table: Arc<Table>,
    fill: Fill,
    /// The grower has been asked to replace the crowded table.
    has_requested: bool,
    /// Bytes of keys and values that users have put, and of keys that they have deleted. Kept here
    /// because the lock is held anyway.
    user_bytes: u64,
}

/// How full a table is.
#[derive(Clone, Copy, Debug, Default)]
struct Fill {
    entries: usize,
    /// Number of [`REMOVED`] slots.
    removed: usize,
}

impl Index {
    /// Creates an empty index with space for about `entries`.
    pub(crate) fn with_capacity(entries: usize) -> io::Result<Self> {
        let per_shard = entries.div_ceil(1 << SHARD_BITS);
        let mut log2 = FIRST_BUCKETS_LOG2;
        while crowded_slots(log2) < per_shard {
            log2 += 1;
        }
        let shard = |_| {
            let table = Arc::new(Table::new(log2)?);
            let owned = Owned {
                table: table.clone(),
                fill: Fill::default(),
                has_requested: false,
                user_bytes: 0,
            };
            Ok(Shard { writer: CachePadded(Mutex::new(owned)), table: ArcSwap::new(table) })
        };
        let shards = (0..1 << SHARD_BITS).map(shard).collect::<io::Result<_>>()?;
        Ok(Self { shards, grower: Grower::default() })
    }

    /// Returns the position of a key's newest record, by the hash of the key.
    #[inline]
    pub(crate) fn find(&self, hash: KeyHash) -> Option<Position> {
        self.shards[hash.shard()].table.load().find(hash).map(|(_, position)| position)
    }

    /// Returns as [`Self::find`] the position after the writer that holds the lock of this key's
    /// shard, if any, has finished. Must be called without the lock.
    ///
    /// A reader whose record has expired calls this before it answers that the key is absent: a
    /// writer in progress may have found the same record present before it expired, and replaces
    /// the value that it returns. A later writer finds the record expired.
    pub(crate) fn find_after_writer(&self, hash: KeyHash) -> Option<Position> {
        self.lock(hash).get()
    }

    /// Starts loading a key's slot into the processor's cache.
    #[inline]
    pub(crate) fn prefetch(&self, hash: KeyHash) {
        self.shards[hash.shard()].table.load().prefetch(hash);
    }

    /// Marks the record at `position` as read, if it is still the key's newest.
    #[inline]
    pub(crate) fn mark_read(&self, hash: KeyHash, position: Position) {
        let table = self.shards[hash.shard()].table.load();
        if let Some((slot, found)) = table.find(hash)
            && found == position
        {
            let word = &table.words[slot * SLOT_WORDS];
            let read = position.marked_read().0;
            // A concurrent change takes precedence.
            let _ = word.compare_exchange(position.0, read, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Locks this key's shard for changes of its entries.
    pub(crate) fn lock(&self, hash: KeyHash) -> Writer<'_> {
        Writer { owned: self.shards[hash.shard()].writer.0.lock(), index: self, hash }
    }

    /// Adds a record found on disk, unless a newer one of its key was added. There are no readers
    /// yet.
    pub(crate) fn recover(&self, hash: KeyHash, position: Position) -> io::Result<Recovery> {
        let mut writer = self.lock(hash);
        let table = &writer.owned.table;
        if let Some((slot, known)) = table.find(hash) {
            if known.is_same(position) {
                return Ok(Recovery::Known);
            }
            if known.is_newer(position) {
                return Ok(Recovery::Older);
            }
            table.words[slot * SLOT_WORDS].store(position.0, Ordering::Release);
            return Ok(Recovery::Replaced(known));
        }
        // At once: the grower is not running yet.
        if writer.owned.is_crowded() {
            writer.grow()?;
        }
        writer.insert(position);
        Ok(Recovery::New)
    }

    /// Appends all entries of a shard whose own bucket is that of `fingerprint`; returns the
    /// smallest fingerprint of the next bucket, if there is one.
    ///
    /// Visiting all buckets finds every entry that is present throughout exactly once: tables are
    /// ordered by fingerprint whatever their size, so a larger one does not move an entry from
    /// behind the cursor to ahead of it, and within a table an entry stays in its slot.
    pub(crate) fn bucket(
        &self,
        shard: usize,
        fingerprint: u64,
        found: &mut Vec<(KeyHash, Position)>,
    ) -> Option<u64> {
        let table = self.shards[shard].table.load();
        let own = table.bucket(fingerprint);
        for bucket in table.buckets(fingerprint) {
            let mut has_empty = false;
            for slot in bucket * BUCKET_SLOTS..(bucket + 1) * BUCKET_SLOTS {
                match table.entry(slot) {
                    Ok((fingerprint, position)) if table.bucket(fingerprint) == own => {
                        let high = (shard as u64) << (u64::BITS - SHARD_BITS) | position.tag();
                        found.push((KeyHash { high, fingerprint }, position));
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

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.writer.0.lock().fill.entries).sum()
    }

    /// Returns the bytes of keys and values that users have put, and of keys that they have
    /// deleted.
    pub(crate) fn user_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.writer.0.lock().user_bytes).sum()
    }

    /// Returns the memory of the tables, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.shards.iter().map(|shard| size_of_val::<[_]>(&shard.table.load().words)).sum()
    }

    /// Removes all entries for which `keep` returns false. It is called once for each position;
    /// readers do not wait, and writers only for their shard's lock.
    pub(crate) fn retain(&self, mut keep: impl FnMut(Position) -> bool) {
        for shard in &self.shards {
            let Owned { table, fill, .. } = &mut *shard.writer.0.lock();
            for slot in 0..table.slots() {
                let word = table.words[slot * SLOT_WORDS].load(Ordering::Relaxed);
                if word > REMOVED && !keep(Position(word)) {
                    table.remove(slot, fill);
                }
            }
        }
    }
}

/// The outcome of entering a record found on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// It is the first one of its key.
    New,
    /// It replaced this older one.
    Replaced(Position),
    /// This record was already entered.
    Known,
    /// A newer one was already entered.
    Older,
}

/// Exclusive access to one key's entry.
pub(crate) struct Writer<'a> {
    owned: MutexGuard<'a, Owned>,
    index: &'a Index,
    hash: KeyHash,
}

impl Writer<'_> {
    /// Returns the position of the key's newest record.
    pub(crate) fn get(&self) -> Option<Position> {
        self.owned.table.find(self.hash).map(|(_, position)| position)
    }

    /// Ensures that [`Self::set`] finds a free slot within a short search.
    ///
    /// # Errors
    /// There is no memory for a larger table.
    pub(crate) fn reserve_slot(&mut self) -> io::Result<()> {
        let owned = &mut *self.owned;
        if owned.is_crowded() {
            if owned.fill.used() >= max_slots(owned.table.buckets_log2) {
                return self.grow();
            }
            if !std::mem::replace(&mut owned.has_requested, true) {
                self.index.grower.report(self.hash.shard());
            }
        }
        self.owned.table.prefetch(self.hash);
        Ok(())
    }

    /// Replaces the table now.
    #[cold]
    fn grow(&mut self) -> io::Result<()> {
        let larger = Arc::new(Table::new(self.owned.next_log2())?);
        self.owned.move_to(larger, &self.index.shards[self.hash.shard()]);
        Ok(())
    }

    /// Sets the position of the key's newest record and returns the previous one.
    /// [`Self::reserve_slot`] must have been called.
    pub(crate) fn set(&mut self, position: Position) -> Option<Position> {
        let table = &self.owned.table;
        if let Some((slot, _)) = table.find(self.hash) {
            // Not the word that `find` has seen: a reader may have marked it meanwhile.
            return Some(Position(
                table.words[slot * SLOT_WORDS].swap(position.0, Ordering::AcqRel),
            ));
        }
        self.insert(position);
        None
    }

    /// Inserts an entry for a key that has none.
    fn insert(&mut self, position: Position) {
        let Owned { table, fill, .. } = &mut *self.owned;
        let (slot, was_removed) = table.free_slot(self.hash.fingerprint);
        table.fill_slot(slot, self.hash.fingerprint, position);
        fill.entries += 1;
        fill.removed -= usize::from(was_removed);
    }

    /// Adds to the bytes that users have put or deleted.
    pub(crate) fn count_user_bytes(&mut self, bytes: usize) {
        self.owned.user_bytes += bytes as u64;
    }

    /// Removes the key's entry and returns its position.
    pub(crate) fn remove(&mut self) -> Option<Position> {
        let Owned { table, fill, .. } = &mut *self.owned;
        let (slot, _) = table.find(self.hash)?;
        Some(table.remove(slot, fill))
    }
}

impl Fill {
    /// Returns the number of slots that are not free.
    fn used(self) -> usize {
        self.entries + self.removed
    }
}

impl Owned {
    /// Returns whether the table should be replaced.
    fn is_crowded(&self) -> bool {
        self.fill.used() >= crowded_slots(self.table.buckets_log2)
    }

    /// Returns the size of the table that replaces a crowded one: twice as large, or the same
    /// without the removed entries. At most half of it is used then, so that tables are not
    /// replaced over and over.
    fn next_log2(&self) -> u32 {
        let log2 = self.table.buckets_log2;
        log2 + u32::from(self.fill.entries >= crowded_slots(log2) / 2)
    }

    /// Moves all entries to another table, which is empty and has the size of [`Self::next_log2`];
    /// returns the old one.
    fn move_to(&mut self, other: Arc<Table>, shard: &Shard) -> Arc<Table> {
        let table = &self.table;
        for slot in 0..table.slots() {
            let position = table.words[slot * SLOT_WORDS].load(Ordering::Relaxed);
            if position > REMOVED {
                let fingerprint = table.words[slot * SLOT_WORDS + 1].load(Ordering::Relaxed);
                let (free, _) = other.free_slot(fingerprint);
                other.fill_slot(free, fingerprint, Position(position));
            }
        }
        self.fill.removed = 0;
        self.has_requested = false;
        shard.table.store(other.clone());
        std::mem::replace(&mut self.table, other)
    }
}

/// Returns the number of used slots, removed ones included, from which a table is crowded: three
/// quarters.
fn crowded_slots(buckets_log2: u32) -> usize {
    (BUCKET_SLOTS << buckets_log2) / 4 * 3
}

/// Returns the number of used slots that a table may have; beyond it a writer does not wait for the
/// grower: seven eighths.
fn max_slots(buckets_log2: u32) -> usize {
    (BUCKET_SLOTS << buckets_log2) / 8 * 7
}

/// A hash table with bucketised linear probing. An entry is in the first bucket, from its own on,
/// that had a free slot; so a search ends at a bucket with an [`EMPTY`] slot.
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

    /// In the order of fingerprints, so that a larger table is filled from beginning to end.
    fn bucket(&self, fingerprint: u64) -> usize {
        (fingerprint >> (u64::BITS - self.buckets_log2)) as usize
    }

    #[inline]
    fn prefetch(&self, hash: KeyHash) {
        self.words.prefetch(self.bucket(hash.fingerprint) * BUCKET_WORDS);
    }

    /// Returns all buckets, beginning with the fingerprint's own.
    fn buckets(&self, fingerprint: u64) -> impl Iterator<Item = usize> {
        let (first, mask) = (self.bucket(fingerprint), (1 << self.buckets_log2) - 1);
        (0..=mask).map(move |step| (first + step) & mask)
    }

    #[inline]
    fn find(&self, hash: KeyHash) -> Option<(usize, Position)> {
        for bucket in self.buckets(hash.fingerprint) {
            let mut has_empty = false;
            for slot in bucket * BUCKET_SLOTS..(bucket + 1) * BUCKET_SLOTS {
                match self.read(slot, hash) {
                    Slot::Found(position) => return Some((slot, position)),
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

    /// Reads a slot like a seqlock. Writers store the fingerprint of a reused slot before its
    /// position, and no two entries share a position: a position that is the same before and after
    /// belongs to the fingerprint read in between.
    #[inline]
    fn read(&self, slot: usize, hash: KeyHash) -> Slot {
        let [position, fingerprint] = [0, 1].map(|word| &self.words[slot * SLOT_WORDS + word]);
        let mut before = position.load(Ordering::Acquire);
        loop {
            if before <= REMOVED {
                return if before == EMPTY { Slot::Empty } else { Slot::Other };
            }
            if fingerprint.load(Ordering::Acquire) != hash.fingerprint {
                return Slot::Other;
            }
            let after = position.load(Ordering::Acquire);
            if Position(before).is_same(Position(after)) {
                let is_key = Position(after).tag() == hash.tag();
                return if is_key { Slot::Found(Position(after)) } else { Slot::Other };
            }
            before = after;
        }
    }

    /// Returns fingerprint and position of the entry in a slot, consistent as in [`Self::read`];
    /// otherwise [`EMPTY`] or [`REMOVED`].
    fn entry(&self, slot: usize) -> Result<(u64, Position), u64> {
        let [position, fingerprint] = [0, 1].map(|word| &self.words[slot * SLOT_WORDS + word]);
        let mut before = position.load(Ordering::Acquire);
        loop {
            if before <= REMOVED {
                return Err(before);
            }
            let found = fingerprint.load(Ordering::Acquire);
            let after = position.load(Ordering::Acquire);
            if Position(before).is_same(Position(after)) {
                return Ok((found, Position(after)));
            }
            before = after;
        }
    }

    /// Returns the slot for a new entry, and whether an entry was removed from it.
    fn free_slot(&self, fingerprint: u64) -> (usize, bool) {
        let slots = self
            .buckets(fingerprint)
            .flat_map(|bucket| bucket * BUCKET_SLOTS..(bucket + 1) * BUCKET_SLOTS);
        for slot in slots {
            let position = self.words[slot * SLOT_WORDS].load(Ordering::Relaxed);
            if position <= REMOVED {
                return (slot, position == REMOVED);
            }
        }
        unreachable!("a table is never full: `reserve_slot` precedes each insertion")
    }

    fn fill_slot(&self, slot: usize, fingerprint: u64, position: Position) {
        self.words[slot * SLOT_WORDS + 1].store(fingerprint, Ordering::Release);
        self.words[slot * SLOT_WORDS].store(position.0, Ordering::Release);
    }

    fn remove(&self, slot: usize, fill: &mut Fill) -> Position {
        // If the bucket has an empty slot, no entry overflowed to the next bucket, and a search may
        // end here.
        let bucket = slot / BUCKET_SLOTS * BUCKET_SLOTS;
        let has_empty = (bucket..bucket + BUCKET_SLOTS)
            .any(|slot| self.words[slot * SLOT_WORDS].load(Ordering::Relaxed) == EMPTY);
        let free = if has_empty { EMPTY } else { REMOVED };
        let position = self.words[slot * SLOT_WORDS].swap(free, Ordering::AcqRel);
        fill.entries -= 1;
        fill.removed += usize::from(!has_empty);
        Position(position)
    }
}

enum Slot {
    Found(Position),
    /// Never used.
    Empty,
    /// Another key's, or removed.
    Other,
}

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
