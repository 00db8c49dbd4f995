//! Which journals are in memory: cold journals that are read more than hot ones are exchanged with
//! these. `docs/journal-cache-design.md`, "Levels".

use std::sync::atomic::Ordering;

use crate::allocator::RELEASE_WITHIN;
use crate::cache::READS_PER_COUNT;
use crate::error::{Error, Result};
use crate::journal::{FIRST_RECORD, Journal};
use crate::pieces::each_in;
use crate::pool::Pooled;
use crate::shared::Shared;
use crate::sync::Arc;

/// Bytes that a disk reads sequentially in the time of one random read. Loading a journal takes as
/// long as one random read for each of these.
const BYTES_PER_READ: usize = 128 << 10;
/// Arenas left to writers when journals are loaded that have not been read.
const ARENAS_FOR_WRITERS: usize = 2;
/// How many times as often as the hot one a cold journal has to be read.
const MORE: u64 = 2;
/// The counts are halved after this many times as many reads as would justify loading everything in
/// memory.
const AGE_AFTER: u64 = 16;
/// But not before there were this many reads per journal on average: for small journals, which cost
/// little to load, the comparison would be decided by chance.
const READS_PER_JOURNAL: u64 = 256;
/// The amount by which the count of a hot journal may be too small by chance: four of its sampled
/// reads.
const SAMPLING_ERROR: u64 = 4 * READS_PER_COUNT;

impl Shared {
    /// Returns the number of random disk reads that take as long as loading a journal.
    fn loading_reads(&self) -> u64 {
        (self.journal_bytes / BYTES_PER_READ).max(1) as u64
    }

    /// Returns the number of disk reads after which a journal is considered: as many as loading it
    /// costs, and enough to be significant, since considering one takes time proportional to the
    /// number of journals.
    pub(crate) fn promotion_reads(&self) -> u64 {
        self.loading_reads().max(MORE * SAMPLING_ERROR)
    }

    /// Takes a hot journal's memory away, if it is still hot. Current readers keep it until they
    /// finish.
    pub(crate) fn demote(&self, hot: &Arc<Journal>) {
        // Disk reads count from now on.
        hot.counts.disk_reads.store(0, Ordering::Relaxed);
        self.journals.replace(hot, Arc::new(hot.with_memory(None)));
        // It can be compressed now.
        self.maintenance.waker.wake();
    }

    /// Loads the newest readable cold journal into memory, if there is memory; returns whether it
    /// was attempted.
    pub(crate) fn load_one(&self) -> Result<bool> {
        let is_cold = |journal: &Arc<Journal>| journal.arena.is_none() && journal.counts.is_sound();
        let cold = self.journals.all().into_iter().rev().find(is_cold);
        let Some(journal) = cold else { return Ok(false) };
        if self.pool.unused() <= ARENAS_FOR_WRITERS {
            return Ok(false);
        }
        let Some(arena) = self.pool.take() else { return Ok(false) };
        self.load_hot(&journal, arena)?;
        Ok(true)
    }

    /// Considers the most read of the cold journals whose reads justify it; false if there is none.
    pub(crate) fn promote_one(&self) -> Result<bool> {
        let all = self.journals.all();
        self.age(&all);
        let has_paid = |journal: &&Arc<Journal>| {
            journal.arena.is_none()
                && journal.counts.is_sound()
                && journal.counts.disk_reads.load(Ordering::Relaxed) >= self.promotion_reads()
        };
        let reads = |journal: &Journal| journal.counts.reads.load(Ordering::Relaxed);
        let wanted = all.iter().filter(has_paid).max_by_key(|it| reads(it)).cloned();
        // Journals held here would not release their memory.
        drop(all);
        let Some(wanted) = wanted else { return Ok(false) };
        // Whatever the result: the next attempt has to be justified by new reads.
        wanted.counts.disk_reads.store(0, Ordering::Relaxed);
        if let Some(arena) = self.pool.take() {
            self.promote(&wanted, arena)?;
            return Ok(true);
        }
        let Some(coldest) = self.coldest_in_memory() else { return Ok(true) };
        if reads(&wanted) <= reads(&coldest).saturating_add(SAMPLING_ERROR).saturating_mul(MORE) {
            return Ok(true);
        }
        self.demote(&coldest);
        drop(coldest);
        let taken = self.pool.take_within(RELEASE_WITHIN);
        if let Some(arena) = taken.map_err(self.no_memory("a journal"))? {
            self.promote(&wanted, arena)?;
        }
        Ok(true)
    }

    fn promote(&self, wanted: &Arc<Journal>, arena: Pooled) -> Result<()> {
        if self.load_hot(wanted, arena)? {
            self.counters.promoted.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Loads a cold journal into memory; false if it is damaged.
    fn load_hot(&self, journal: &Arc<Journal>, arena: Pooled) -> Result<bool> {
        let end = journal.end();
        let loaded = self.load_into(journal, end, arena);
        let arena = loaded.inspect_err(|_| journal.counts.failed())?;
        // Records in memory are not verified again, so a journal with any damage stays on disk,
        // where each read is verified.
        let bytes = arena.read(0..end).expect("sealed up to its end");
        let damaged_bytes = each_in(bytes, journal.salt, FIRST_RECORD, |_, _| Ok::<_, Error>(()))?;
        if damaged_bytes > 0 {
            self.mark_damaged(journal, damaged_bytes);
            return Ok(false);
        }
        let hot = journal.with_memory(Some(Arc::new(arena)));
        self.journals.replace(journal, Arc::new(hot));
        Ok(true)
    }

    /// Halves all read counts if there were many reads, so that older reads count less and less.
    fn age(&self, journals: &[Arc<Journal>]) {
        let in_memory = journals.iter().filter(|it| it.arena.is_some()).count() as u64;
        let most = (self.loading_reads() * AGE_AFTER * in_memory.max(1))
            .max(READS_PER_JOURNAL * journals.len() as u64);
        let reads = || journals.iter().map(|it| &it.counts.reads);
        if reads().map(|reads| reads.load(Ordering::Relaxed)).sum::<u64>() <= most {
            return;
        }
        for reads in reads() {
            // Readers only add to it meanwhile.
            reads.fetch_sub(reads.load(Ordering::Relaxed).div_ceil(2), Ordering::Relaxed);
        }
    }
}
