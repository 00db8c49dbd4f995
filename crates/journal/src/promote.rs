//! Which journals are in memory: cold ones that are read more than hot ones change places with
//! them. `docs/journal-cache.md`, "Levels".

use std::sync::atomic::Ordering;

use crate::cache::READS_PER_COUNT;
use crate::error::{Error, Result};
use crate::journal::{FIRST_RECORD, Journal};
use crate::pieces::each_in;
use crate::pool::Pooled;
use crate::prepare::LET_GO_WITHIN;
use crate::shared::Shared;
use crate::sync::Arc;

/// Bytes that a disk reads one after the other in the time of one read at random. Bringing a
/// journal in takes as long as so many of its reads as it has of these.
const BYTES_PER_READ: usize = 128 << 10;
/// Arenas that are left to writers when journals are brought into memory that nobody has asked for.
const ARENAS_FOR_WRITERS: usize = 2;
/// How much more than the hot one a cold one has to be read.
const MORE: u64 = 2;
/// Counts are halved when there were so many reads as would pay for bringing in all that is in
/// memory, this many times.
const AGE_AFTER: u64 = 16;
/// But not before there were so many for each journal, on the average: of small journals, which
/// cost little, chance would tell who is read more.
const READS_PER_JOURNAL: u64 = 256;
/// What the count of a hot journal may be short of by chance: four of its reads that are counted.
const UNSURE: u64 = 4 * READS_PER_COUNT;

impl Shared {
    /// Reads of the disk that take as long as bringing a journal into memory.
    fn loading_reads(&self) -> u64 {
        (self.journal_bytes / BYTES_PER_READ).max(1) as u64
    }

    /// Reads of the disk after which a journal is looked at: as many as bringing it in costs, and
    /// enough to be more than chance. To look takes time for each journal there is.
    pub(crate) fn promotion_reads(&self) -> u64 {
        self.loading_reads().max(MORE * UNSURE)
    }

    /// Take a hot journal's memory away, if it is still hot. Who reads in it keeps it for that
    /// long.
    pub(crate) fn demote(&self, hot: &Arc<Journal>) {
        // Reads of the disk count from now on.
        hot.counts.disk_reads.store(0, Ordering::Relaxed);
        self.journals.replace(hot, Arc::new(hot.with_memory(None)));
        // It can be compressed now.
        self.keep.waker.wake();
    }

    /// Bring the newest cold journal back into memory, of those that can be read, if there is
    /// memory; whether it was tried.
    pub(crate) fn warm_one(&self) -> Result<bool> {
        let is_cold = |journal: &Arc<Journal>| journal.arena.is_none() && journal.counts.is_sound();
        let cold = self.journals.all().into_iter().rev().find(is_cold);
        let Some(journal) = cold else { return Ok(false) };
        if self.pool.unused() <= ARENAS_FOR_WRITERS {
            return Ok(false);
        }
        let Some(arena) = self.pool.take() else { return Ok(false) };
        self.heat(&journal, arena)?;
        Ok(true)
    }

    /// Look at the cold journal that is read most, of those that have paid for it; false if there
    /// is none.
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
        // What is held here is not given back.
        drop(all);
        let Some(wanted) = wanted else { return Ok(false) };
        // Whatever comes of it: the next time has to be paid for again.
        wanted.counts.disk_reads.store(0, Ordering::Relaxed);
        if let Some(arena) = self.pool.take() {
            self.promote(&wanted, arena)?;
            return Ok(true);
        }
        let Some(coldest) = self.coldest_in_memory() else { return Ok(true) };
        if reads(&wanted) <= reads(&coldest).saturating_add(UNSURE).saturating_mul(MORE) {
            return Ok(true);
        }
        self.demote(&coldest);
        drop(coldest);
        let taken = self.pool.take_within(LET_GO_WITHIN);
        if let Some(arena) = taken.map_err(self.no_memory("a journal"))? {
            self.promote(&wanted, arena)?;
        }
        Ok(true)
    }

    fn promote(&self, wanted: &Arc<Journal>, arena: Pooled) -> Result<()> {
        if self.heat(wanted, arena)? {
            self.counters.promoted.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Bring a cold journal into memory; false if it is damaged.
    fn heat(&self, journal: &Arc<Journal>, arena: Pooled) -> Result<bool> {
        let end = journal.end();
        let loaded = self.load_into(journal, end, arena);
        let arena = loaded.inspect_err(|_| journal.counts.failed())?;
        // What is in memory is not checked again: with any damage it stays on disk, where each read
        // is checked.
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

    /// Halve all counts of reads, if there were many: what was read long ago counts for less and
    /// less.
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
