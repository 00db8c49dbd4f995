//! One journal, and its header: `docs/format/journal.md`, section 3.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use alluvium_device::{AlignedBuf, PAGE_BYTES};
use parking_lot::Mutex;

use crate::blocks::Block;
use crate::dead::Dead;
use crate::error::{Error, Result};
use crate::fetch::{Pages, Source};
use crate::fields::{self, u32_at, u64_at};
use crate::files::OpenFile;
use crate::frames::Frames;
use crate::place::{Granule, JournalNumber, Place};
use crate::pool::Pooled;
use crate::record::{HEADER_BYTES, Header, Record, Salt};
use crate::sync::Arc;
// Known to the model checker too: a journal without any goes as it is.
use crate::sync::atomic::AtomicU64 as LiveBytes;
use crate::unreadable::Unreadable;

/// The header's page; records begin behind it.
pub(crate) const FIRST_RECORD: usize = PAGE_BYTES;

const MAGIC: &[u8; 8] = b"ALLUVJRN";

/// Records that take more than this are read in part where only their keys are wanted: for those
/// that take less it would be no gain.
const LONG_RECORD_BYTES: usize = 16 << 10;
/// So much of them.
const HEAD_BYTES: usize = PAGE_BYTES;

/// Of a cache: random, in the header of each of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheId(pub(crate) [u8; 16]);

/// What page 0 of a journal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JournalHeader {
    pub(crate) cache: CacheId,
    pub(crate) number: JournalNumber,
    pub(crate) salt: Salt,
    /// Frames follow, and no records.
    pub(crate) is_compressed: bool,
}

const PLAIN: u32 = 0;
const COMPRESSED: u32 = 1;

impl JournalHeader {
    /// Into the first bytes of a zeroed page.
    pub(crate) fn write(&self, page: &mut [u8]) {
        let form = if self.is_compressed { COMPRESSED } else { PLAIN };
        page[12..16].copy_from_slice(&form.to_le_bytes());
        page[16..32].copy_from_slice(&self.cache.0);
        page[32..40].copy_from_slice(&self.number.0.to_le_bytes());
        page[40..48].copy_from_slice(&self.salt.0.to_le_bytes());
        fields::seal(page, MAGIC);
    }

    /// `None`, if these bytes are no header of a version that is known.
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

/// Of a journal's number in its file's name: more than there will be journals.
pub(crate) const NAME_DIGITS: usize = 12;

/// Behind the number in its file's name.
pub(crate) const NAME_END: &str = ".journal";

/// Its file's name.
pub(crate) fn file_name(number: JournalNumber) -> String {
    format!("{:0NAME_DIGITS$}{NAME_END}", number.0)
}

/// What could not be read is tried again after this time.
const LEFT_ALONE: Duration = Duration::from_secs(10);

/// What changes of a journal while it lives.
#[derive(Debug)]
pub(crate) struct Counts {
    /// Bytes of records that the index names; by size classes, so up to a quarter too many.
    pub(crate) live_bytes: LiveBytes,
    /// Of these, bytes of records that count as absent one day, or do already.
    pub(crate) expiring_bytes: AtomicU64,
    /// Of these, what was to be gained by removing those that had expired when it was last looked
    /// (`expired.rs`).
    pub(crate) expired_bytes: AtomicU64,
    /// What `expiring_bytes` was before that.
    pub(crate) expiring_then: AtomicU64,
    /// It is not looked again before: milliseconds since 1970.
    pub(crate) look_at_millis: AtomicU64,
    /// Reads, halved now and then (`promote.rs`); about as many as there were.
    pub(crate) reads: AtomicU64,
    /// Reads of the disk since it became cold, or was last thought of for the memory.
    pub(crate) disk_reads: AtomicU64,
    /// Compressing it was not worth it, or has failed.
    pub(crate) stays_plain: AtomicBool,
    /// First byte behind its records, once it is sealed.
    pub(crate) end_bytes: AtomicUsize,
    /// There are records in it that cannot be read.
    pub(crate) is_damaged: AtomicBool,
    /// Bytes that the opening found to be no records, when it read all of a journal for want of a
    /// hint: neither the index nor a hint knows what they were. No part of what was damaged since.
    pub(crate) lost_bytes: AtomicUsize,
    /// The system could not read it then, or had no memory for it.
    pub(crate) failed_at: Mutex<Option<Instant>>,
    /// Whoever makes room is at it: its memory would not come free if it were taken away.
    pub(crate) is_busy: AtomicBool,
    /// Records are in its file that the index does not name any more, and perhaps no newer ones say
    /// that they are gone: an opening may read them.
    pub(crate) has_lost_keys: AtomicBool,
    /// Bytes of its tombstones.
    pub(crate) tombstone_bytes: AtomicU64,
    /// The newest journal whose records they may hide.
    pub(crate) newest_origin: AtomicU64,
    /// Its tombstones before this byte were written anew by a compaction that has not come to its
    /// end. For whoever has the turn ([`crate::keep::Keep::turn`]).
    pub(crate) tombstones_moved_until: AtomicUsize,
    /// Where its records are that do not count any more.
    pub(crate) dead: Dead,
}

impl Counts {
    /// Of a journal of so many bytes.
    pub(crate) fn new(journal_bytes: usize) -> Self {
        Self {
            live_bytes: LiveBytes::new(0),
            expiring_bytes: AtomicU64::new(0),
            expired_bytes: AtomicU64::new(0),
            expiring_then: AtomicU64::new(0),
            look_at_millis: AtomicU64::new(0),
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
            dead: Dead::none(journal_bytes),
        }
    }

    /// The index names the record at `place`, which is one of this journal's, from now on.
    pub(crate) fn count(&self, place: Place) {
        let bytes = place.max_len_bytes() as u64;
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        if place.expires() {
            self.expiring_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// It does not any more.
    pub(crate) fn forget(&self, place: Place) {
        self.dead.mark(place.first());
        let bytes = place.max_len_bytes() as u64;
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if place.expires() {
            self.expiring_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes of records that the index names, without those that are known to have expired.
    pub(crate) fn unexpired_bytes(&self) -> u64 {
        let expired = self.expired_bytes.load(Ordering::Relaxed) - self.doubtful_bytes();
        self.live_bytes.load(Ordering::Relaxed).saturating_sub(expired)
    }

    /// Of what had expired when it was looked, what may have been replaced or removed since: a
    /// place does not tell whether its record had. All that has gone counts as if it had, so that
    /// nothing counts as dead twice.
    pub(crate) fn doubtful_bytes(&self) -> u64 {
        let now = self.expiring_bytes.load(Ordering::Relaxed);
        let gone = self.expiring_then.load(Ordering::Relaxed).saturating_sub(now);
        gone.min(self.expired_bytes.load(Ordering::Relaxed))
    }

    /// So much of it has expired, and it is not looked again before `look_at`. `expiring_then`:
    /// from before it was looked.
    pub(crate) fn found_expired(&self, expired_bytes: u64, expiring_then: u64, look_at: u64) {
        self.expired_bytes.store(expired_bytes, Ordering::Relaxed);
        self.expiring_then.store(expiring_then, Ordering::Relaxed);
        self.look_at_millis.store(look_at, Ordering::Relaxed);
    }

    /// It could not be read now. That may pass: it is left alone for a while.
    pub(crate) fn failed(&self) {
        *self.failed_at.lock() = Some(Instant::now());
    }

    pub(crate) fn has_just_failed(&self) -> bool {
        self.failed_at.lock().is_some_and(|at| at.elapsed() < LEFT_ALONE)
    }

    /// Whether nothing is known that keeps it from being read as a whole.
    pub(crate) fn is_sound(&self) -> bool {
        !self.is_damaged.load(Ordering::Relaxed) && !self.has_just_failed()
    }

    /// Whether it may be written anew: sound, or without more damage than what was lost before the
    /// opening. To keep it for that would bring nothing back, neither now nor at the next opening,
    /// and each power cut may leave one.
    pub(crate) fn may_be_moved(&self) -> bool {
        let is_damaged = self.is_damaged.load(Ordering::Relaxed);
        let is_lost = self.lost_bytes.load(Ordering::Relaxed) > 0;
        (!is_damaged || is_lost) && !self.has_just_failed()
    }

    /// Whether something in it that the index, a hint or another opening may know of cannot be
    /// read, if so many bytes are no records just now.
    pub(crate) fn has_damage(&self, damaged_bytes: usize) -> bool {
        let lost_bytes = self.lost_bytes.load(Ordering::Relaxed);
        damaged_bytes > lost_bytes || (lost_bytes == 0 && self.is_damaged.load(Ordering::Relaxed))
    }

    /// A tombstone that may hide records of the journals up to `origin`.
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

/// A journal as readers see it. One that changes its level is replaced by another value.
pub(crate) struct Journal {
    pub(crate) number: JournalNumber,
    pub(crate) salt: Salt,
    pub(crate) file: OpenFile,
    /// Its file's, for messages.
    pub(crate) path: PathBuf,
    /// Room that its file takes.
    pub(crate) file_bytes: u64,
    /// `Some`: the file is compressed.
    pub(crate) frames: Option<Arc<Frames>>,
    /// `None`: it is cold.
    pub(crate) arena: Option<Arc<Pooled>>,
    /// Of the newest journal: whole journals that there is room for beside it. Who has to leave
    /// more than that must not write to it.
    pub(crate) beside: AtomicUsize,
    pub(crate) counts: Arc<Counts>,
}

/// A record, and what keeps its bytes where they are.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    owner: Owner,
    // Half as long as `usize`, which is enough for any journal: an iteration moves one of these for
    // each entry.
    at: u32,
    len: u32,
}

/// An iteration's own hold on the memory of a journal, for its entries to count: counting on the
/// journal's would make iterations over the same one wait for each other at each entry.
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
        debug_assert!(at + len <= u32::MAX as usize, "no journal is so long");
        Self { owner, at: at as u32, len: len as u32 }
    }

    /// A record that an iteration has found at `at`.
    pub(crate) fn iterated(hold: Arc<Hold>, at: usize, len: usize) -> Self {
        Self::new(Owner::Iterated(hold), at, len)
    }

    /// The same at `at` in what was read from disk.
    pub(crate) fn cold(buf: Arc<AlignedBuf>, at: usize, len: usize) -> Self {
        Self::new(Owner::Cold(buf), at, len)
    }

    /// The same in what was decompressed.
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

    /// A part of it.
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
    /// The same one with this memory, or without.
    pub(crate) fn with_memory(&self, arena: Option<Arc<Pooled>>) -> Self {
        Self {
            number: self.number,
            salt: self.salt,
            file: self.file.clone(),
            path: self.path.clone(),
            file_bytes: self.file_bytes,
            frames: self.frames.clone(),
            arena,
            beside: AtomicUsize::new(0),
            counts: self.counts.clone(),
        }
    }

    /// The same one, cold, in a compressed file.
    pub(crate) fn compressed(&self, file: OpenFile, file_bytes: u64, frames: Frames) -> Self {
        Self { file, file_bytes, frames: Some(Arc::new(frames)), ..self.with_memory(None) }
    }

    /// Nobody takes its memory away until the return is dropped.
    pub(crate) fn busy(&self) -> Busy {
        self.counts.is_busy.store(true, Ordering::Release);
        Busy(self.counts.clone())
    }

    /// Its bytes up to `end`, into the memory of a whole journal: from its file, whatever that
    /// looks like. Zeroes stand for its header.
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

    /// For whoever looks at all records. If it is known to be damaged, what cannot be read of it
    /// is more of that, and zeroes stand for it; else it is an error, which may pass.
    fn source_of_many<'a>(&'a self, unreadable: &'a Unreadable) -> Source<'a> {
        match self.counts.is_damaged.load(Ordering::Relaxed) {
            true => self.source().past(unreadable),
            false => self.source(),
        }
    }

    /// Where [`Self::read_piece`] begins to read for `at`.
    pub(crate) fn piece_start(&self, at: usize) -> usize {
        match &self.frames {
            Some(frames) => frames.start_of(at),
            None => at / PAGE_BYTES * PAGE_BYTES,
        }
    }

    /// Its bytes from [`Self::piece_start`] on, as many as `to` has room for (whole chunks, if it
    /// is compressed), and not beyond `end`; returns which ones these are.
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

    /// The first byte behind its last record, once it is sealed; 0 before.
    pub(crate) fn end(&self) -> usize {
        self.counts.end_bytes.load(Ordering::Acquire)
    }

    /// The record at `place`, which is one of this journal's.
    #[inline]
    pub(crate) fn load(&self, place: Place) -> Result<Loaded> {
        self.load_with(place, &[])
    }

    /// The same with pages that were read before, of this journal and of others.
    #[inline]
    pub(crate) fn load_with(&self, place: Place, fetched: &[Pages]) -> Result<Loaded> {
        let at = place.first().byte();
        let Some(arena) = &self.arena else { return self.load_cold(place, fetched) };
        let len = arena
            .read(at..at + HEADER_BYTES)
            .and_then(Header::parse)
            .map(Header::len_bytes)
            .filter(|len| arena.read(at..at + len).is_some());
        match len {
            Some(len) => Ok(Loaded::new(Owner::Hot(arena.clone()), at, len)),
            None => Err(self.corrupt(place.first())),
        }
    }

    #[cold]
    fn load_cold(&self, place: Place, fetched: &[Pages]) -> Result<Loaded> {
        let source = self.source().with(fetched, &self.counts.disk_reads);
        if let Some(frames) = &self.frames {
            return frames.load(source, place)?.ok_or_else(|| self.corrupt(place.first()));
        }
        let pages = plain_pages(place);
        let mut buf = source.pages(pages.len())?;
        source.read_at(pages.start, &mut buf, "reading a record")?;
        let at = place.first().byte() - pages.start;
        let record = Record::checked(&buf[at..], self.salt, place.first());
        let Some(len) = record.map(|record| record.header().len_bytes()) else {
            return Err(self.corrupt(place.first()));
        };
        Ok(Loaded::new(Owner::Cold(Arc::new(buf)), at, len))
    }

    /// Memory that [`Self::load`] takes for the record at `place`: up to a quarter more than its
    /// size, and 0 if it is in memory.
    pub(crate) fn cold_bytes(&self, place: Place) -> usize {
        if self.arena.is_some() { 0 } else { place.max_len_bytes() }
    }

    /// Memory that [`Self::read_head`] takes; `None` where that would be no gain: the record is
    /// short, or in memory, or compressed.
    pub(crate) fn head_bytes(&self, place: Place) -> Option<usize> {
        let is_plain = self.arena.is_none() && self.frames.is_none();
        let is_wanted = is_plain && place.max_len_bytes() > LONG_RECORD_BYTES;
        is_wanted.then(|| head_pages(place).len())
    }

    /// The first [`HEAD_BYTES`] of the record at `place`, where there is [`Self::head_bytes`]: as
    /// the disk has them, whatever they are.
    pub(crate) fn read_head(&self, place: Place) -> Result<Loaded> {
        self.counts.disk_reads.fetch_add(1, Ordering::Relaxed);
        let pages = head_pages(place);
        let mut buf = self.source().pages(pages.len())?;
        self.source().read_at(pages.start, &mut buf, "reading a key")?;
        let at = place.first().byte() - pages.start;
        Ok(Loaded::new(Owner::Cold(Arc::new(buf)), at, HEAD_BYTES))
    }

    /// The bytes of its file that loading the record at `place` reads, whole pages; `None` if that
    /// is nothing, since they are in memory or were decompressed.
    pub(crate) fn pages(&self, place: Place) -> Option<Range<usize>> {
        match (&self.arena, &self.frames) {
            (Some(_), _) => None,
            (None, Some(frames)) => frames.pages(place),
            (None, None) => Some(plain_pages(place)),
        }
    }

    /// Whether it was cut short by a close.
    pub(crate) fn is_short(&self, journal_bytes: usize) -> bool {
        self.frames.is_none() && self.file_bytes * 4 <= journal_bytes as u64
    }

    fn corrupt(&self, first: Granule) -> Error {
        let path = self.path.clone();
        Error::Corrupt { path, journal: self.number, offset: first.byte() as u64 }
    }
}

/// Where the first bytes of a long record are, in whole pages of its file.
fn head_pages(place: Place) -> Range<usize> {
    let at = place.first().byte();
    at / PAGE_BYTES * PAGE_BYTES..(at + HEAD_BYTES).next_multiple_of(PAGE_BYTES)
}

/// The pages of a plain journal that the record at `place` is in.
fn plain_pages(place: Place) -> Range<usize> {
    let at = place.first().byte();
    at / PAGE_BYTES * PAGE_BYTES..(at + place.max_len_bytes()).next_multiple_of(PAGE_BYTES)
}
