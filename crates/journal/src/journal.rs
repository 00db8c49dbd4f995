//! One journal and its header: `docs/format/journal.md`, section 3.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use alluvium_device::{AlignedBuf, PAGE_BYTES};
use parking_lot::Mutex;

use crate::blocks::Block;
use crate::dead_marks::DeadMarks;
use crate::error::{Error, Result};
use crate::fetch::{Pages, Source};
use crate::fields::{self, u32_at, u64_at};
use crate::files::OpenFile;
use crate::frames::Frames;
use crate::pool::Pooled;
use crate::position::{Granule, JournalNumber, Position};
use crate::record::{HEADER_BYTES, Header, Record, Salt};
use crate::sync::Arc;
// Visible to the model checker too: a journal without live bytes is removed without being read.
use crate::sync::atomic::AtomicU64 as LiveBytes;
use crate::unreadable::Unreadable;

/// The size of the header's page; records begin after it.
pub(crate) const FIRST_RECORD: usize = PAGE_BYTES;

const MAGIC: &[u8; 8] = b"ALLUVJRN";

/// Where only the key is needed, records longer than this are read in part; for shorter ones that
/// would gain nothing.
const LONG_RECORD_BYTES: usize = 16 << 10;
/// The length of the part.
const HEAD_BYTES: usize = PAGE_BYTES;

/// The random identity of a cache, in the header of each of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheId(pub(crate) [u8; 16]);

/// The contents of page 0 of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JournalHeader {
    pub(crate) cache: CacheId,
    pub(crate) number: JournalNumber,
    pub(crate) salt: Salt,
    /// Whether frames follow instead of records.
    pub(crate) is_compressed: bool,
}

const PLAIN: u32 = 0;
const COMPRESSED: u32 = 1;

impl JournalHeader {
    /// Writes the header to the beginning of a zeroed page.
    pub(crate) fn write(&self, page: &mut [u8]) {
        let form = if self.is_compressed { COMPRESSED } else { PLAIN };
        page[12..16].copy_from_slice(&form.to_le_bytes());
        page[16..32].copy_from_slice(&self.cache.0);
        page[32..40].copy_from_slice(&self.number.0.to_le_bytes());
        page[40..48].copy_from_slice(&self.salt.0.to_le_bytes());
        fields::seal(page, MAGIC);
    }

    /// Parses the header; `None` if the bytes are not a header of a known version.
    pub(crate) fn parse(page: &[u8]) -> Option<Self> {
        let fields = fields::unseal(page, MAGIC).ok()?;
        let form = u32_at(fields, 12);
        (form == PLAIN || form == COMPRESSED).then(|| Self {
            cache: CacheId(fields[16..32].try_into().expect("sixteen")),
            number: JournalNumber(u64_at(fields, 32)),
            salt: Salt(u64_at(fields, 40)),
            is_compressed: form == COMPRESSED,
        })
    }
}

/// Digits of the journal number in a file name: more than there will be journals.
pub(crate) const NAME_DIGITS: usize = 12;

/// The suffix of a file name, after the number.
pub(crate) const NAME_END: &str = ".journal";

/// Returns the file name of a journal.
pub(crate) fn file_name(number: JournalNumber) -> String {
    format!("{:0NAME_DIGITS$}{NAME_END}", number.0)
}

/// How long a journal that could not be read is left alone before a retry.
const LEFT_ALONE: Duration = Duration::from_secs(10);

/// The mutable state of a journal.
#[derive(Debug)]
pub(crate) struct Counts {
    /// Bytes of records that the index names; by size class, so up to a quarter too large.
    pub(crate) live_bytes: LiveBytes,
    /// The part of `live_bytes` in records with a time to live, expired or not.
    pub(crate) expiring_bytes: AtomicU64,
    /// The part of `expiring_bytes` that removing expired records would have gained at the last
    /// scan (`expired.rs`).
    pub(crate) expired_bytes: AtomicU64,
    /// The value of `expiring_bytes` before that scan.
    pub(crate) expiring_then: AtomicU64,
    /// The time before which the journal is not scanned again, in milliseconds since 1970.
    pub(crate) next_scan_millis: AtomicU64,
    /// Estimated number of reads, halved from time to time (`promote.rs`).
    pub(crate) reads: AtomicU64,
    /// Number of disk reads since it became cold, or was last considered for promotion.
    pub(crate) disk_reads: AtomicU64,
    /// Compression was not worthwhile or failed.
    pub(crate) stays_plain: AtomicBool,
    /// The end of its last record, once it is sealed.
    pub(crate) end_bytes: AtomicUsize,
    /// It contains records that cannot be read.
    pub(crate) is_damaged: AtomicBool,
    /// Bytes that the opening found to be no records, when it read the whole journal for lack of a
    /// hint: neither the index nor a hint knows what they were. Damage found later is not included.
    pub(crate) lost_bytes: AtomicUsize,
    /// When the system last failed to read it or lacked the memory.
    pub(crate) failed_at: Mutex<Option<Instant>>,
    /// A maintenance task is working on it: taking its memory away would not release it.
    pub(crate) is_busy: AtomicBool,
    /// Its file contains records that the index no longer names, perhaps without newer records that
    /// supersede them: an opening may read them.
    pub(crate) has_lost_keys: AtomicBool,
    /// Total bytes of its tombstones.
    pub(crate) tombstone_bytes: AtomicU64,
    /// The newest journal whose records its tombstones may hide.
    pub(crate) newest_origin: AtomicU64,
    /// Tombstones before this byte were rewritten by an unfinished compaction. Accessed only while
    /// holding [`crate::maintenance::Maintenance::exclusive`].
    pub(crate) tombstones_moved_until: AtomicUsize,
    /// The regions that contain dead records.
    pub(crate) dead: DeadMarks,
}

impl Counts {
    /// Creates the state of an empty journal of `journal_bytes`.
    pub(crate) fn new(journal_bytes: usize) -> Self {
        Self {
            live_bytes: LiveBytes::new(0),
            expiring_bytes: AtomicU64::new(0),
            expired_bytes: AtomicU64::new(0),
            expiring_then: AtomicU64::new(0),
            next_scan_millis: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            disk_reads: AtomicU64::new(0),
            stays_plain: AtomicBool::new(false),
            end_bytes: AtomicUsize::new(0),
            is_damaged: AtomicBool::new(false),
            lost_bytes: AtomicUsize::new(0),
            failed_at: Mutex::new(None),
            is_busy: AtomicBool::new(false),
            has_lost_keys: AtomicBool::new(false),
            tombstone_bytes: AtomicU64::new(0),
            newest_origin: AtomicU64::new(0),
            tombstones_moved_until: AtomicUsize::new(0),
            dead: DeadMarks::new(journal_bytes),
        }
    }

    /// Counts the record at `position` of this journal, which the index names from now on.
    pub(crate) fn count(&self, position: Position) {
        let bytes = position.max_len_bytes() as u64;
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        if position.expires() {
            self.expiring_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Removes the record at `position` from the counts: the index does not name it any more.
    pub(crate) fn mark_dead(&self, position: Position) {
        self.dead.mark(position.first());
        let bytes = position.max_len_bytes() as u64;
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if position.expires() {
            self.expiring_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Returns the bytes of records that the index names, without those known to have expired.
    pub(crate) fn unexpired_bytes(&self) -> u64 {
        let expired = self.expired_bytes.load(Ordering::Relaxed) - self.doubtful_bytes();
        self.live_bytes.load(Ordering::Relaxed).saturating_sub(expired)
    }

    /// Returns how many of the bytes found expired may have been replaced or removed since: a
    /// position does not show whether its record had expired. All bytes removed since count as
    /// expired ones, so that nothing counts as dead twice.
    pub(crate) fn doubtful_bytes(&self) -> u64 {
        let now = self.expiring_bytes.load(Ordering::Relaxed);
        let gone = self.expiring_then.load(Ordering::Relaxed).saturating_sub(now);
        gone.min(self.expired_bytes.load(Ordering::Relaxed))
    }

    /// Records the result of a scan for expired records: the next is not due before `next_scan`.
    /// `expiring_then`: the value from before the scan.
    pub(crate) fn found_expired(&self, expired_bytes: u64, expiring_then: u64, next_scan: u64) {
        self.expired_bytes.store(expired_bytes, Ordering::Relaxed);
        self.expiring_then.store(expiring_then, Ordering::Relaxed);
        self.next_scan_millis.store(next_scan, Ordering::Relaxed);
    }

    /// Records that the journal could not be read now. This may be temporary, so it is left alone
    /// for a while.
    pub(crate) fn failed(&self) {
        *self.failed_at.lock() = Some(Instant::now());
    }

    pub(crate) fn has_just_failed(&self) -> bool {
        self.failed_at.lock().is_some_and(|at| at.elapsed() < LEFT_ALONE)
    }

    /// Returns whether nothing is known that prevents reading all of it.
    pub(crate) fn is_sound(&self) -> bool {
        !self.is_damaged.load(Ordering::Relaxed) && !self.has_just_failed()
    }

    /// Returns whether it may be rewritten: it is sound, or has no more damage than was lost before
    /// the opening. Retaining it for that would restore nothing, now or at the next opening, and
    /// each power cut may leave such a journal.
    pub(crate) fn may_be_moved(&self) -> bool {
        let is_damaged = self.is_damaged.load(Ordering::Relaxed);
        let is_lost = self.lost_bytes.load(Ordering::Relaxed) > 0;
        (!is_damaged || is_lost) && !self.has_just_failed()
    }

    /// Returns whether a record that the index, a hint or another opening may have cannot be read,
    /// given that this many bytes are no records now.
    pub(crate) fn has_damage(&self, damaged_bytes: usize) -> bool {
        let lost_bytes = self.lost_bytes.load(Ordering::Relaxed);
        damaged_bytes > lost_bytes || (lost_bytes == 0 && self.is_damaged.load(Ordering::Relaxed))
    }

    /// Counts a tombstone that may hide records of the journals up to `origin`.
    pub(crate) fn count_tombstone(&self, len_bytes: usize, origin: JournalNumber) {
        self.tombstone_bytes.fetch_add(len_bytes as u64, Ordering::Relaxed);
        self.newest_origin.fetch_max(origin.0, Ordering::Relaxed);
    }
}

/// See [`Journal::busy`].
pub(crate) struct Busy(Arc<Counts>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.is_busy.store(false, Ordering::Release);
    }
}

/// A journal as readers see it. When it changes level, it is replaced by another value.
pub(crate) struct Journal {
    pub(crate) number: JournalNumber,
    pub(crate) salt: Salt,
    pub(crate) file: OpenFile,
    /// The path of its file, for messages.
    pub(crate) path: PathBuf,
    /// The disk space of its file.
    pub(crate) file_bytes: u64,
    /// `Some` if the file is compressed.
    pub(crate) frames: Option<Arc<Frames>>,
    /// `None` if the journal is cold.
    pub(crate) arena: Option<Arc<Pooled>>,
    /// For the newest journal: the number of further journals that there is space for. A write
    /// class that has to leave more than this must not write to it.
    pub(crate) free_journals: AtomicUsize,
    pub(crate) counts: Arc<Counts>,
}

/// A record, and the owner of its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    owner: Owner,
    // `u32` is sufficient for any journal and half the size of `usize`: an iteration moves one of
    // these for each entry.
    at: u32,
    len: u32,
}

/// An iteration's own reference to the memory of a journal, whose count its entries share: counting
/// on the journal's would make concurrent iterations contend at each entry.
#[derive(Debug)]
pub(crate) struct Hold(pub(crate) Arc<Pooled>);

#[derive(Clone, Debug)]
enum Owner {
    Hot(Arc<Pooled>),
    Iterated(Arc<Hold>),
    Cold(Arc<AlignedBuf>),
    Decompressed(Block),
}

impl Loaded {
    #[inline]
    fn new(owner: Owner, at: usize, len: usize) -> Self {
        debug_assert!(at + len <= u32::MAX as usize, "longer than any journal");
        Self { owner, at: at as u32, len: len as u32 }
    }

    /// Creates the reference of an iteration to a record at `at`.
    pub(crate) fn iterated(hold: Arc<Hold>, at: usize, len: usize) -> Self {
        Self::new(Owner::Iterated(hold), at, len)
    }

    /// Creates the reference to a record at `at` of a buffer read from disk.
    pub(crate) fn cold(buf: Arc<AlignedBuf>, at: usize, len: usize) -> Self {
        Self::new(Owner::Cold(buf), at, len)
    }

    /// Creates the reference to a record at `at` of a decompressed block.
    pub(crate) fn of_block(block: Block, at: usize, len: usize) -> Self {
        Self::new(Owner::Decompressed(block), at, len)
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        let (at, len) = (self.at as usize, self.len as usize);
        let range = at..at + len;
        match &self.owner {
            Owner::Hot(arena) => arena.read(range).expect("published when it was loaded"),
            Owner::Iterated(hold) => hold.0.read(range).expect("published when it was found"),
            Owner::Cold(buf) => &buf[range],
            Owner::Decompressed(block) => &block[range],
        }
    }

    /// Returns a part of it.
    pub(crate) fn slice(mut self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len as usize,
            "{range:?} of {} bytes",
            self.len
        );
        self.at += range.start as u32;
        self.len = range.len() as u32;
        self
    }
}

impl Journal {
    /// Returns the same journal with this memory, or without.
    pub(crate) fn with_memory(&self, arena: Option<Arc<Pooled>>) -> Self {
        Self {
            number: self.number,
            salt: self.salt,
            file: self.file.clone(),
            path: self.path.clone(),
            file_bytes: self.file_bytes,
            frames: self.frames.clone(),
            arena,
            free_journals: AtomicUsize::new(0),
            counts: self.counts.clone(),
        }
    }

    /// Returns the same journal, cold, in a compressed file.
    pub(crate) fn compressed(&self, file: OpenFile, file_bytes: u64, frames: Frames) -> Self {
        Self { file, file_bytes, frames: Some(Arc::new(frames)), ..self.with_memory(None) }
    }

    /// Prevents the journal's memory from being taken away until the returned guard is dropped.
    pub(crate) fn busy(&self) -> Busy {
        self.counts.is_busy.store(true, Ordering::Release);
        Busy(self.counts.clone())
    }

    /// Reads its bytes up to `end` from its file, plain or compressed, into the memory of a whole
    /// journal. The header becomes zeroes.
    pub(crate) fn read_whole(&self, end: usize, memory: &mut [u8]) -> Result<()> {
        let unreadable = Unreadable::default();
        let source = self.source_of_many(&unreadable);
        match &self.frames {
            Some(frames) => frames.read_whole(source, memory),
            None => {
                let whole = end.next_multiple_of(PAGE_BYTES).max(FIRST_RECORD);
                let (header, records) = memory[..whole].split_at_mut(FIRST_RECORD);
                header.fill(0);
                source.read_at(FIRST_RECORD, records, "reading a journal")
            }
        }
    }

    pub(crate) fn source(&self) -> Source<'_> {
        Source::file(&*self.file, &self.path)
    }

    /// Returns the source for reading all records. If the journal is known to be damaged, what
    /// cannot be read adds to the damage and becomes zeroes; otherwise it is an error, which may be
    /// temporary.
    fn source_of_many<'a>(&'a self, unreadable: &'a Unreadable) -> Source<'a> {
        match self.counts.is_damaged.load(Ordering::Relaxed) {
            true => self.source().past(unreadable),
            false => self.source(),
        }
    }

    /// Returns where [`Self::read_piece`] begins to read for `at`.
    pub(crate) fn piece_start(&self, at: usize) -> usize {
        match &self.frames {
            Some(frames) => frames.start_of(at),
            None => at / PAGE_BYTES * PAGE_BYTES,
        }
    }

    /// Reads its bytes from [`Self::piece_start`], as many as fit into `to` (whole chunks if it is
    /// compressed) and not beyond `end`; returns their range.
    pub(crate) fn read_piece(&self, at: usize, end: usize, to: &mut [u8]) -> Result<Range<usize>> {
        let unreadable = Unreadable::default();
        let source = self.source_of_many(&unreadable);
        if let Some(frames) = &self.frames {
            return frames.read_piece(source, at, to);
        }
        let start = self.piece_start(at);
        let piece = start..end.min(start + to.len());
        let whole = piece.len().next_multiple_of(PAGE_BYTES);
        source.read_at(start, &mut to[..whole], "reading a journal")?;
        Ok(piece)
    }

    /// Returns the end of its last record, once it is sealed; 0 before.
    pub(crate) fn end(&self) -> usize {
        self.counts.end_bytes.load(Ordering::Acquire)
    }

    /// Loads the record at `position` of this journal.
    #[inline]
    pub(crate) fn load(&self, position: Position) -> Result<Loaded> {
        self.load_with(position, &[])
    }

    /// Loads the record at `position` with pages that were read before, which may include pages of
    /// other journals.
    #[inline]
    pub(crate) fn load_with(&self, position: Position, fetched: &[Pages]) -> Result<Loaded> {
        let at = position.first().byte();
        let Some(arena) = &self.arena else { return self.load_cold(position, fetched) };
        let len = arena
            .read(at..at + HEADER_BYTES)
            .and_then(Header::parse)
            .map(Header::len_bytes)
            .filter(|len| arena.read(at..at + len).is_some());
        match len {
            Some(len) => Ok(Loaded::new(Owner::Hot(arena.clone()), at, len)),
            None => Err(self.corrupt(position.first())),
        }
    }

    #[cold]
    fn load_cold(&self, position: Position, fetched: &[Pages]) -> Result<Loaded> {
        let source = self.source().with(fetched, &self.counts.disk_reads);
        if let Some(frames) = &self.frames {
            return frames.load(source, position)?.ok_or_else(|| self.corrupt(position.first()));
        }
        let pages = plain_pages(position);
        let mut buf = source.pages(pages.len())?;
        source.read_at(pages.start, &mut buf, "reading a record")?;
        let at = position.first().byte() - pages.start;
        let record = Record::checked(&buf[at..], self.salt, position.first());
        let Some(len) = record.map(|record| record.header().len_bytes()) else {
            return Err(self.corrupt(position.first()));
        };
        Ok(Loaded::new(Owner::Cold(Arc::new(buf)), at, len))
    }

    /// Returns the memory that [`Self::load`] allocates for the record at `position`: up to a
    /// quarter more than its size, and 0 if it is in memory.
    pub(crate) fn cold_bytes(&self, position: Position) -> usize {
        if self.arena.is_some() { 0 } else { position.max_len_bytes() }
    }

    /// Returns the memory that [`Self::read_head`] allocates; `None` if reading the head would gain
    /// nothing: the record is short, in memory or compressed.
    pub(crate) fn head_bytes(&self, position: Position) -> Option<usize> {
        let is_plain = self.arena.is_none() && self.frames.is_none();
        let is_wanted = is_plain && position.max_len_bytes() > LONG_RECORD_BYTES;
        is_wanted.then(|| head_pages(position).len())
    }

    /// Reads the first [`HEAD_BYTES`] of the record at `position`, without verifying them.
    /// [`Self::head_bytes`] must be `Some`.
    pub(crate) fn read_head(&self, position: Position) -> Result<Loaded> {
        self.counts.disk_reads.fetch_add(1, Ordering::Relaxed);
        let pages = head_pages(position);
        let mut buf = self.source().pages(pages.len())?;
        self.source().read_at(pages.start, &mut buf, "reading a key")?;
        let at = position.first().byte() - pages.start;
        Ok(Loaded::new(Owner::Cold(Arc::new(buf)), at, HEAD_BYTES))
    }

    /// Returns the range of whole pages of its file that loading the record at `position` reads;
    /// `None` if the record is in memory or decompressed.
    pub(crate) fn pages(&self, position: Position) -> Option<Range<usize>> {
        match (&self.arena, &self.frames) {
            (Some(_), _) => None,
            (None, Some(frames)) => frames.pages(position),
            (None, None) => Some(plain_pages(position)),
        }
    }

    /// Returns whether a close truncated it to a quarter of a journal or less.
    pub(crate) fn is_short(&self, journal_bytes: usize) -> bool {
        self.frames.is_none() && self.file_bytes * 4 <= journal_bytes as u64
    }

    fn corrupt(&self, first: Granule) -> Error {
        let path = self.path.clone();
        Error::Corrupt { path, journal: self.number, offset: first.byte() as u64 }
    }
}

/// Returns the pages of the file that contain the first bytes of a long record.
fn head_pages(position: Position) -> Range<usize> {
    let at = position.first().byte();
    at / PAGE_BYTES * PAGE_BYTES..(at + HEAD_BYTES).next_multiple_of(PAGE_BYTES)
}

/// Returns the pages of a plain journal that contain the record at `position`.
fn plain_pages(position: Position) -> Range<usize> {
    let at = position.first().byte();
    at / PAGE_BYTES * PAGE_BYTES..(at + position.max_len_bytes()).next_multiple_of(PAGE_BYTES)
}
