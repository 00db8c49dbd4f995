//! Compaction: a journal with few live records is written anew and removed. What may go without a trace: `docs/format/journal.md`, section 7.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::journal::{FIRST_RECORD, Journal};
use crate::options::WhenFull;
use crate::place::{Granule, JournalNumber, NUMBER_BITS};
use crate::record::{Content, NewRecord, Record};
use crate::shared::{Appended, CHUNK_BYTES, NotAppended, Shared, Who, now_millis};

/// Journals as far apart can not be told from one another by their places: half of it, to be far from that.
const MAX_SPAN: u64 = 1 << (NUMBER_BITS - 2);
/// Journals that were cut short by a close; from then on they are put together.
const MANY_SHORT: usize = 8;
/// Who works in the background reads a chunk, then waits so long: writers and readers come first.
pub(crate) const PAUSE: Duration = Duration::from_millis(8);

impl Shared {
    /// The journal with the smallest part of live bytes, if that is small enough to be worth writing it anew.
    pub(crate) fn emptiest(&self) -> Option<Arc<Journal>> {
        // Of four parts. What is written per byte that is gained: a third, one, three.
        let most_live = match (self.is_crowded(), self.options.when_full) {
            (false, _) => 1,
            (true, WhenFull::Evict) => 2,
            (true, WhenFull::Refuse) => 3,
        };
        let unwritten = self.flush.oldest_unwritten();
        let mut sealed = self.journals.all();
        let newest = sealed.last().map_or(0, |newest| newest.number.0);
        let is_short = |journal: &Journal| journal.is_short(self.journal_bytes);
        let are_many_short = sealed.iter().filter(|journal| is_short(journal)).count() > MANY_SHORT;
        let oldest_two = [0, 1].map(|at| sealed.get(at).map(|journal| journal.number));
        sealed.retain(|journal| {
            journal.number < unwritten && !journal.counts.is_damaged.load(Ordering::Relaxed)
        });
        // The index tells journals apart by a part of their numbers.
        if let Some(oldest) = sealed.first().filter(|oldest| newest - oldest.number.0 >= MAX_SPAN) {
            return Some(oldest.clone());
        }
        let parts = |journal: &Journal| {
            let counts = &journal.counts;
            let bytes = counts.end_bytes.load(Ordering::Relaxed).saturating_sub(FIRST_RECORD);
            let mut live = counts.live_bytes.load(Ordering::Relaxed);
            let oldest_other =
                oldest_two.into_iter().flatten().find(|other| *other != journal.number);
            // Tombstones are alive as long as they may hide something.
            if oldest_other.is_some_and(|it| it.0 <= counts.newest_origin.load(Ordering::Relaxed)) {
                live += counts.tombstone_bytes.load(Ordering::Relaxed);
            }
            // What was cut short by a close is as good as empty behind its end, when there are many of these.
            let bytes = if are_many_short && is_short(journal) {
                self.journal_bytes
            } else if journal.frames.is_some() {
                // What is moved is written plain, and has to be less than what is gained.
                bytes.min(journal.file_bytes as usize)
            } else {
                bytes
            };
            (live.saturating_mul(4), bytes.max(1) as u64)
        };
        sealed.retain(|journal| {
            let (live, bytes) = parts(journal);
            live <= most_live * bytes
        });
        sealed.into_iter().min_by_key(|journal| {
            let (live, bytes) = parts(journal);
            live.saturating_mul(1000) / bytes
        })
    }

    /// Write what a journal has alive anew, and remove it, with a `pause` after each chunk. False if there was no room for that, or it turned out to be damaged. For whoever has the turn ([`crate::keep::Keep::turn`]).
    pub(crate) fn compact(&self, journal: &Journal, pause: Duration) -> Result<bool> {
        let oldest_other = self.oldest_but(journal.number);
        let end = journal.counts.end_bytes.load(Ordering::Acquire);
        let mut pause_at = CHUNK_BYTES;
        let done = self.each_record(journal, end, |first, record| {
            if first.byte() >= pause_at && !pause.is_zero() && !self.is_crowded() {
                pause_at += CHUNK_BYTES;
                thread::sleep(pause);
            }
            if self.keep.is_closing() {
                return Err(Error::Closed);
            }
            self.carry(journal.number, oldest_other, first, record)
        });
        match done {
            // The rest is tried another time; what was moved is newer than what is left here.
            Err(Error::DiskFull { .. } | Error::Closed) => return Ok(false),
            // What can not be read may hide older records, in other journals.
            Ok(false) => {
                tracing::warn!(
                    "journal cache: journal {} is damaged; it stays until it is the oldest",
                    journal.number
                );
                journal.counts.is_damaged.store(true, Ordering::Relaxed);
                return Ok(false);
            }
            done => done?,
        };
        self.remove(journal)?;
        self.counters.compacted.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    /// The oldest journal beside this one. Nothing is held by it: the memory of the others has to come free when it is taken from them.
    pub(crate) fn oldest_but(&self, number: JournalNumber) -> Option<JournalNumber> {
        self.journals.all().iter().map(|other| other.number).find(|other| *other != number)
    }

    /// Write a record anew if something would be missing without it.
    fn carry(
        &self,
        number: JournalNumber,
        oldest_other: Option<JournalNumber>,
        first: Granule,
        record: &Record<'_>,
    ) -> Result<()> {
        loop {
            match self.try_carry(number, oldest_other, first, record) {
                Ok(Some(appended)) => {
                    self.nudge(appended);
                    return Ok(());
                }
                Ok(None) => return Ok(()),
                Err(NotAppended::Failed(error)) => return Err(error),
                Err(NotAppended::Full(full)) if self.wait_for_spare(full) => {}
                Err(NotAppended::Full(_)) => {
                    let full = Error::DiskFull { max_bytes: self.options.max_disk_bytes };
                    return Err(self.flush.failure().unwrap_or(full));
                }
            }
        }
    }

    fn try_carry(
        &self,
        number: JournalNumber,
        oldest_other: Option<JournalNumber>,
        first: Granule,
        record: &Record<'_>,
    ) -> std::result::Result<Option<Appended>, NotAppended> {
        let key = record.key();
        let hash = self.hasher.hash(key);
        let mut writer = self.index.lock(hash);
        // Whether a journal may be left that has an older record of the key.
        let hides_older =
            |origin: JournalNumber| oldest_other.is_some_and(|oldest| oldest <= origin);
        if let Some(origin) = record.origin() {
            if writer.get().is_some() || !hides_older(origin) {
                return Ok(None);
            }
            return self.append_tombstone(key, hash, Some(origin)).map(Some);
        }
        let expires_at = record.expires_at();
        let place = record.place(number, first, hash);
        let Some(named) = writer.get().filter(|named| named.is_same(place)) else {
            return Ok(None);
        };
        if !record.has_expired(now_millis) {
            let content = Content::Value { value: record.value(), expires_at };
            return self
                .enter(&mut writer, hash, &NewRecord { key, content }, Who::Maintenance)
                .map(Some);
        }
        let appended = match hides_older(number) {
            true => Some(self.append_tombstone(key, hash, Some(number))?),
            false => None,
        };
        writer.remove();
        self.journals.forget(named);
        Ok(appended)
    }
}
