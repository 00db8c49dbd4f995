//! Compression of cold journals, on the maintenance thread. The state of the files at each step:
//! `docs/format/journal.md`, section 6.

use std::io;
use std::sync::atomic::Ordering;
use std::thread;

use alluvium_device::{AlignedBuf, PAGE_BYTES};

use crate::codec::Encoder;
use crate::compact::{PAUSE, STEP_BYTES};
use crate::disk_budget::WriteClass;
use crate::error::{Error, Result};
use crate::files::File;
use crate::frames::{Frames, LEAST_FRAME_BYTES, MOST_FRAME_BYTES, Writer};
use crate::hint;
use crate::journal::{FIRST_RECORD, Journal, JournalHeader, file_name};
use crate::memory;
use crate::options::{Compression, WhenFull};
use crate::record::Chain;
use crate::shared::{CHUNK_BYTES, Shared};
use crate::sync::Arc;

/// A compressed file may have at most this many eighths of the plain one.
const MOST_PARTS: u64 = 7;
/// Frames that are compressed to decide whether the journal is worth compressing.
const SAMPLES: usize = 16;
/// The approximate number of records in a frame: reading one decompresses little more than it, and
/// the table has a few bytes for each.
const RECORDS_IN_FRAME: usize = 4;

/// The outcome of a compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Compressed into a file of this length, in bytes.
    Compressed(u64),
    /// The file would not be much shorter.
    NotWorthIt,
    /// Records in the journal are damaged.
    Damaged,
    /// The space is needed elsewhere, or the cache is being closed. It is retried.
    GaveUp,
}

impl Shared {
    /// Compresses one cold journal, if there is one and space for it; returns whether one was
    /// attempted.
    pub(crate) fn compress_one(&self) -> Result<bool> {
        let Some(journal) = self.to_compress() else { return Ok(false) };
        let reservation = self.journals.budget.reserve(journal.file_bytes);
        let Some(reservation) = reservation else { return Ok(false) };
        let name = file_name(journal.number);
        let temporary = format!("{name}.tmp");
        let outcome = self.compress(&journal, &name, &temporary);
        if let Ok(Outcome::Compressed(_)) = outcome {
            self.maintenance.has_logged_memory.store(false, Ordering::Relaxed);
            let plain = journal.file.clone();
            drop(journal);
            // Otherwise a power cut would restore its name with a partial file. Its space stays
            // reserved until then.
            self.sync_names()?;
            self.free_file(plain);
            self.release_space(|| drop(reservation));
            return Ok(true);
        }
        // The file is not needed; if it cannot be removed now, the next opening removes it.
        let _ = self.directory.remove(&temporary);
        self.release_reservation(reservation);
        match outcome {
            Ok(Outcome::Compressed(_) | Outcome::GaveUp) => {}
            Ok(Outcome::NotWorthIt) => journal.counts.stays_plain.store(true, Ordering::Relaxed),
            Ok(Outcome::Damaged) => {
                let found =
                    self.each_record(&journal, || self.step_bytes(), |_, _| Ok::<_, Error>(()));
                // Fails if, for example, there is no memory to search after the damage.
                let damaged_bytes = found.inspect_err(|_| journal.counts.failed())?;
                self.mark_damaged(&journal, damaged_bytes);
                if damaged_bytes == 0 {
                    // It was read incorrectly.
                    journal.counts.failed();
                }
            }
            // This is temporary, perhaps already for the next journal.
            Err(error) if error.is_out_of_memory() => {
                if !self.maintenance.has_logged_memory.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "journal cache: {error}; journals stay uncompressed until there is some"
                    );
                }
                journal.counts.failed();
            }
            // Not retried: it would fail again, and only space is lost.
            Err(error) => {
                tracing::warn!("journal cache: {error}; {name} stays uncompressed");
                journal.counts.stays_plain.store(true, Ordering::Relaxed);
            }
        }
        Ok(true)
    }

    /// Returns the cold journal with the most live bytes, which will exist for longest.
    fn to_compress(&self) -> Option<Arc<Journal>> {
        if self.options.compression == Compression::None
            || self.flush.failure().is_some()
            || self.flush.is_short()
            || (self.options.when_full == WhenFull::Evict && self.is_crowded())
        {
            return None;
        }
        let is_candidate = |journal: &Arc<Journal>| {
            let counts = &journal.counts;
            journal.arena.is_none()
                && journal.frames.is_none()
                && !journal.is_short(self.journal_bytes)
                && counts.end_bytes.load(Ordering::Acquire) > FIRST_RECORD
                && !counts.stays_plain.load(Ordering::Relaxed)
                && counts.is_sound()
        };
        let cold = self.journals.all().into_iter().filter(is_candidate);
        cold.max_by_key(|it| (it.counts.live_bytes.load(Ordering::Relaxed), it.number))
    }

    /// Returns whether the space in use is not needed elsewhere.
    fn may_continue(&self) -> bool {
        let budget = &self.journals.budget;
        let has_space = match self.options.when_full {
            WhenFull::Evict => budget.permits(1 + self.headroom(WriteClass::Put)),
            WhenFull::Refuse => budget.permits_with_reservations(1),
        };
        has_space && !self.flush.is_short() && !self.maintenance.waker.is_closing()
    }

    fn compress(&self, journal: &Arc<Journal>, name: &str, temporary: &str) -> Result<Outcome> {
        let failed = |action| Error::io(self.directory.path().join(temporary), action);
        let end = journal.counts.end_bytes.load(Ordering::Acquire);
        let frame_bytes = self.frame_bytes(journal, end);
        let encoder = Encoder::new(self.options.compression);
        let encoder = encoder.map_err(self.no_memory("compressing a journal"))?;
        let Some(mut encoder) = encoder else { return Ok(Outcome::NotWorthIt) };
        let buffer =
            Encoder::buffer(frame_bytes).map_err(self.no_memory("compressing a journal"))?;
        if !is_worth_it(journal, end, frame_bytes, &mut encoder, buffer)? {
            return Ok(Outcome::NotWorthIt);
        }
        let file = self
            .directory
            .create(temporary, PAGE_BYTES as u64)
            .map_err(failed("creating a compressed journal"))?;
        let writer = Writer::new(&*file, journal.salt, frame_bytes, &mut encoder);
        let writer = writer.map_err(self.no_memory("compressing a journal"))?;
        let copied = self.copy(journal, end, frame_bytes, writer, temporary)?;
        let Outcome::Compressed(len) = copied else { return Ok(copied) };
        file.sync().map_err(failed("syncing a compressed journal"))?;
        let frames =
            self.read_back(&*file, journal).map_err(failed("reading back a compressed journal"))?;
        self.directory.rename(temporary, name).map_err(failed("renaming"))?;
        self.counters.written_bytes.fetch_add(len, Ordering::Relaxed);
        // Readers that have the plain file open continue to read it. Only the holder of
        // `Maintenance::exclusive` replaces cold journals.
        self.journals.replace(journal, Arc::new(journal.compressed(file, len, frames)));
        Ok(copied)
    }

    /// Returns the frame size for the average record length of the journal, from its hint.
    fn frame_bytes(&self, journal: &Journal, end: usize) -> usize {
        let hint = hint::read_head(&*self.directory, journal.number, self.journal_bytes);
        let record_bytes = hint.map_or(0, |head| (end - FIRST_RECORD) / head.entries.max(1));
        (record_bytes * RECORDS_IN_FRAME)
            .next_power_of_two()
            .clamp(LEAST_FRAME_BYTES, MOST_FRAME_BYTES)
    }

    /// Writes all records to the new file.
    fn copy(
        &self,
        journal: &Journal,
        end: usize,
        frame_bytes: usize,
        mut writer: Writer<'_>,
        temporary: &str,
    ) -> Result<Outcome> {
        let failed = |action| Error::io(self.directory.path().join(temporary), action);
        let most_bytes = journal.file_bytes / 8 * MOST_PARTS;
        let mut chain = Chain::new(journal.salt, FIRST_RECORD);
        let chunk = memory::pages(CHUNK_BYTES);
        let mut chunk = chunk.map_err(self.no_memory("compressing a journal"))?;
        for at in (FIRST_RECORD..end).step_by(CHUNK_BYTES) {
            if !self.may_continue() {
                return Ok(Outcome::GaveUp);
            }
            let plain = read(journal, at..end.min(at + CHUNK_BYTES), &mut chunk)?;
            // What is read incorrectly now must not replace the original.
            if !chain.follow(plain) {
                return Ok(Outcome::Damaged);
            }
            for frame in plain.chunks(frame_bytes) {
                writer.push(frame).map_err(failed("writing a compressed journal"))?;
            }
            if writer.len_bytes() as u64 > most_bytes {
                return Ok(Outcome::NotWorthIt);
            }
            if !self.is_crowded() {
                thread::sleep(PAUSE * (CHUNK_BYTES / STEP_BYTES) as u32);
            }
        }
        if !chain.is_complete() {
            return Ok(Outcome::Damaged);
        }
        let header = JournalHeader {
            cache: self.id,
            number: journal.number,
            salt: journal.salt,
            is_compressed: true,
        };
        let len = writer
            .finish(&header, end)
            .map_err(failed("writing the end of a compressed journal"))?;
        Ok(if len > most_bytes { Outcome::NotWorthIt } else { Outcome::Compressed(len) })
    }

    /// Reads the table back from the disk, as the next opening will.
    fn read_back(&self, file: &dyn File, journal: &Journal) -> io::Result<Frames> {
        let (number, salt) = (journal.number, journal.salt);
        let frames = Frames::open(file, number, salt, self.journal_bytes, &self.blocks)?;
        frames.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Returns whether a few frames, spread over the journal, become short enough.
fn is_worth_it(
    journal: &Journal,
    end: usize,
    frame_bytes: usize,
    encoder: &mut Encoder,
    mut buffer: Vec<u8>,
) -> Result<bool> {
    let frames = (end - FIRST_RECORD).div_ceil(frame_bytes);
    let mut buf = journal.source().pages(frame_bytes)?;
    let (mut plain_bytes, mut stored_bytes) = (0, 0);
    for frame in (0..frames).step_by(frames.div_ceil(SAMPLES)) {
        let at = FIRST_RECORD + frame * frame_bytes;
        let plain = read(journal, at..end.min(at + frame_bytes), &mut buf)?;
        plain_bytes += plain.len() as u64;
        let stored = encoder.compress(plain, &mut buffer).map_err(journal.source().no_memory())?;
        stored_bytes += stored.map_or(plain.len(), <[u8]>::len) as u64;
    }
    let estimate_bytes = stored_bytes * end as u64 / plain_bytes.max(1);
    Ok(estimate_bytes <= journal.file_bytes / 8 * MOST_PARTS)
}

/// Reads bytes of a plain file, starting at a page.
fn read<'b>(
    journal: &Journal,
    range: std::ops::Range<usize>,
    buf: &'b mut AlignedBuf,
) -> Result<&'b [u8]> {
    let len = range.len();
    let whole = len.next_multiple_of(PAGE_BYTES);
    journal
        .file
        .read_at(range.start as u64, &mut buf[..whole])
        .map_err(Error::io(&*journal.path, "reading a journal"))?;
    Ok(&buf[..len])
}
