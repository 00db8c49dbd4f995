//! Hints: what an opening needs of a sealed journal. `docs/format/journal.md`, section 5.

use std::io;

use alluvium_device::{AlignedBuf, GRANULE_BYTES, PAGE_BYTES};
use crc32c::crc32c_append;

use crate::fields::{self, u32_at, u64_at};
use crate::files::{Directory, OpenFile};
use crate::hash::{KeyHash, KeyHasher};
use crate::journal::{FIRST_RECORD, NAME_DIGITS};
use crate::memory;
use crate::position::{Granule, JournalNumber, Position};
use crate::record::{HEADER_BYTES, Header, Kind, Record, Salt};

const MAGIC: &[u8; 8] = b"ALLUVHNT";
const BLOCK_BYTES: usize = 64 << 10;
const BLOCK_HEADER_BYTES: usize = 8;
const ENTRY_BYTES: usize = 24;
const BLOCK_ENTRIES: usize = (BLOCK_BYTES - BLOCK_HEADER_BYTES) / ENTRY_BYTES;
const _: () = assert!(BLOCK_ENTRIES == 2730);
/// Blocks read at a time.
const READ_BLOCKS: usize = 16;

/// A key has at least one byte.
const MIN_RECORD_BYTES: usize = (HEADER_BYTES + 1).next_multiple_of(GRANULE_BYTES);

/// The stored bits of `h1`: the shard and the tag.
const KEPT: u64 = (0x3f << 58) | 0xff;
const TOMBSTONE: u64 = 1 << 8;
const EXPIRES: u64 = 1 << 9;

/// The index data of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) hash: KeyHash,
    pub(crate) first: Granule,
    pub(crate) len_bytes: usize,
    pub(crate) expires: bool,
    pub(crate) is_tombstone: bool,
}

impl Entry {
    pub(crate) fn of(hash: KeyHash, first: Granule, record: &Record<'_>) -> Self {
        Self::of_header(hash, first, record.header(), record.expires_at().is_some())
    }

    fn of_header(hash: KeyHash, first: Granule, header: Header, expires: bool) -> Self {
        let is_tombstone = header.kind == Kind::Tombstone;
        Self { hash, first, len_bytes: header.padded_bytes(), expires, is_tombstone }
    }

    pub(crate) fn position(&self, number: JournalNumber) -> Position {
        Position::new(number, self.first, self.len_bytes, self.expires, self.hash)
    }

    fn write(&self, to: &mut [u8]) {
        let flags =
            if self.is_tombstone { TOMBSTONE } else { 0 } | if self.expires { EXPIRES } else { 0 };
        let granules =
            u32::try_from(self.len_bytes.div_ceil(GRANULE_BYTES)).expect("within a journal");
        to[..8].copy_from_slice(&(self.hash.high & KEPT | flags).to_le_bytes());
        to[8..16].copy_from_slice(&self.hash.fingerprint.to_le_bytes());
        to[16..20].copy_from_slice(&self.first.0.to_le_bytes());
        to[20..24].copy_from_slice(&granules.to_le_bytes());
    }

    /// Parses an entry; `None` if it is invalid.
    fn read(from: &[u8], end: usize) -> Option<Self> {
        let high = u64_at(from, 0);
        if high & !(KEPT | TOMBSTONE | EXPIRES) != 0 {
            return None;
        }
        let entry = Self {
            hash: KeyHash { high: high & KEPT, fingerprint: u64_at(from, 8) },
            first: Granule(u32_at(from, 16)),
            len_bytes: u32_at(from, 20) as usize * GRANULE_BYTES,
            expires: high & EXPIRES != 0,
            is_tombstone: high & TOMBSTONE != 0,
        };
        let is_within = entry.first.byte() >= FIRST_RECORD
            && entry.len_bytes > 0
            && entry.first.byte() + entry.len_bytes <= end;
        is_within.then_some(entry)
    }
}

/// A checksum over a sequence of entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    entries: usize,
    checksum: u32,
}

impl Sum {
    /// Adds the next entry.
    pub(crate) fn add(&mut self, entry: &Entry) {
        let mut bytes = [0; ENTRY_BYTES];
        entry.write(&mut bytes);
        self.entries += 1;
        self.checksum = crc32c_append(self.checksum, &bytes);
    }
}

pub(crate) fn file_name(number: JournalNumber) -> String {
    format!("{:0NAME_DIGITS$}.hint", number.0)
}

fn temporary_name(number: JournalNumber) -> String {
    format!("{}.tmp", file_name(number))
}

/// Writes the hint of a journal. `bytes`, up to the end of its last record, must be complete and
/// synced in its file. Errors are only logged, since without a hint the next opening merely takes
/// longer.
pub(crate) fn write(
    directory: &dyn Directory,
    hasher: &KeyHasher,
    number: JournalNumber,
    salt: Salt,
    bytes: &[u8],
) {
    if let Err(error) = try_write(directory, hasher, number, salt, bytes) {
        let path = directory.path().join(file_name(number));
        tracing::warn!("journal cache: {}: writing a hint: {error}", path.display());
    }
}

fn try_write(
    directory: &dyn Directory,
    hasher: &KeyHasher,
    number: JournalNumber,
    salt: Salt,
    bytes: &[u8],
) -> io::Result<()> {
    let mut writer = Writer::new(directory, number, salt)?;
    let mut at = FIRST_RECORD;
    while at < bytes.len() {
        let record = Record::trusted(&bytes[at..]).ok_or(io::ErrorKind::InvalidData)?;
        let entry = Entry::of(hasher.hash(record.key()), Granule::at(at), &record);
        writer.push(&entry)?;
        at += entry.len_bytes;
    }
    writer.finish(bytes.len())
}

/// Returns whether the disk has space for a hint if `headroom_bytes` are to stay free.
pub(crate) fn has_space(directory: &dyn Directory, headroom_bytes: u64) -> bool {
    headroom_bytes == 0
        || directory.free_bytes().map_or(true, |free_bytes| free_bytes >= headroom_bytes)
}

/// A hint being written. It is not a valid hint before it is finished.
pub(crate) struct Writer<'a> {
    directory: &'a dyn Directory,
    number: JournalNumber,
    salt: Salt,
    file: OpenFile,
    block: AlignedBuf,
    /// The number of entries in `block`.
    in_block: usize,
    /// The number of blocks written.
    blocks: u32,
    entries: u32,
    is_finished: bool,
}

impl<'a> Writer<'a> {
    /// Starts the hint of a journal.
    pub(crate) fn new(
        directory: &'a dyn Directory,
        number: JournalNumber,
        salt: Salt,
    ) -> io::Result<Self> {
        // First, since nothing removes the file if this fails.
        let block = memory::pages(BLOCK_BYTES)?;
        let file = directory.create(&temporary_name(number), PAGE_BYTES as u64)?;
        let (in_block, blocks, entries, is_finished) = (0, 0, 0, false);
        Ok(Self { directory, number, salt, file, block, in_block, blocks, entries, is_finished })
    }

    /// Appends the next entry, in the order of the journal.
    pub(crate) fn push(&mut self, entry: &Entry) -> io::Result<()> {
        let to = BLOCK_HEADER_BYTES + self.in_block * ENTRY_BYTES;
        entry.write(&mut self.block[to..to + ENTRY_BYTES]);
        self.entries += 1;
        self.in_block += 1;
        if self.in_block == BLOCK_ENTRIES { self.write_block() } else { Ok(()) }
    }

    fn write_block(&mut self) -> io::Result<()> {
        let used = BLOCK_HEADER_BYTES + self.in_block * ENTRY_BYTES;
        self.block[used..].fill(0);
        self.block[4..8].copy_from_slice(&(self.in_block as u32).to_le_bytes());
        let checksum = self.salt.checksum(self.blocks, &self.block[4..]);
        self.block[..4].copy_from_slice(&checksum.to_le_bytes());
        let at = PAGE_BYTES as u64 + u64::from(self.blocks) * BLOCK_BYTES as u64;
        self.file.write_at(at, &self.block)?;
        self.blocks += 1;
        self.in_block = 0;
        Ok(())
    }

    /// Completes the hint; the last record ends at `end`. The records must be synced in the
    /// journal's file.
    pub(crate) fn finish(mut self, end: usize) -> io::Result<()> {
        if self.in_block > 0 {
            self.write_block()?;
        }
        let mut page = AlignedBuf::zeroed(PAGE_BYTES);
        page[12..16].copy_from_slice(&self.entries.to_le_bytes());
        page[16..24].copy_from_slice(&self.salt.0.to_le_bytes());
        page[24..32].copy_from_slice(&(end as u64).to_le_bytes());
        fields::seal(&mut page, MAGIC);
        self.file.write_at(0, &page)?;
        self.file.sync()?;
        self.directory.rename(&temporary_name(self.number), &file_name(self.number))?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            // Nothing else would before the next opening, and lack of space may be the reason why
            // it is incomplete.
            let _ = self.directory.remove(&temporary_name(self.number));
        }
    }
}

/// The head of a journal's hint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    pub(crate) salt: Salt,
    pub(crate) entries: usize,
    pub(crate) end: usize,
}

/// Parses page 0; `None` if it is not that of a hint.
fn parse_head(page: &[u8], journal_bytes: usize) -> Option<Head> {
    let fields = fields::unseal(page, MAGIC).ok()?;
    let end = usize::try_from(u64_at(fields, 24)).ok()?;
    let head = Head { salt: Salt(u64_at(fields, 16)), entries: u32_at(fields, 12) as usize, end };
    let is_end = (FIRST_RECORD..=journal_bytes).contains(&end) && end.is_multiple_of(GRANULE_BYTES);
    // The index is sized by the hint.
    let fit = end.saturating_sub(FIRST_RECORD) / MIN_RECORD_BYTES;
    (is_end && head.entries <= fit).then_some(head)
}

/// Reads the head of a journal's hint, if there is a usable one.
pub(crate) fn read_head(
    directory: &dyn Directory,
    number: JournalNumber,
    journal_bytes: usize,
) -> Option<Head> {
    let file = directory.open(&file_name(number)).ok()?;
    let mut page = AlignedBuf::zeroed(PAGE_BYTES);
    file.read_at(0, &mut page).ok()?;
    parse_head(&page, journal_bytes)
}

/// Passes all entries of a hint to `each`, several at a time. `Ok(false)` if it is damaged; the
/// entries passed until then are valid.
pub(crate) fn read<E>(
    directory: &dyn Directory,
    number: JournalNumber,
    salt: Salt,
    head: Head,
    mut each: impl FnMut(&[Entry]) -> Result<(), E>,
) -> Result<bool, E> {
    let Ok(file) = directory.open(&file_name(number)) else { return Ok(false) };
    let blocks = head.entries.div_ceil(BLOCK_ENTRIES);
    let mut buf = AlignedBuf::zeroed(READ_BLOCKS * BLOCK_BYTES);
    let mut found = Vec::with_capacity(BLOCK_ENTRIES);
    let mut read = 0;
    for first in (0..blocks).step_by(READ_BLOCKS) {
        let len = (blocks - first).min(READ_BLOCKS) * BLOCK_BYTES;
        let at = (PAGE_BYTES + first * BLOCK_BYTES) as u64;
        if file.read_at(at, &mut buf[..len]).is_err() {
            return Ok(false);
        }
        for (index, block) in buf[..len].chunks_exact(BLOCK_BYTES).enumerate() {
            let Some(entries) = entries_of(block, salt, (first + index) as u32) else {
                return Ok(false);
            };
            found.clear();
            found.extend(
                entries.chunks_exact(ENTRY_BYTES).map_while(|it| Entry::read(it, head.end)),
            );
            each(&found)?;
            read += found.len();
            if found.len() < entries.len() / ENTRY_BYTES {
                return Ok(false);
            }
        }
    }
    Ok(read == head.entries)
}

/// Returns the bytes of a block's entries, if it is undamaged and the expected one.
fn entries_of(block: &[u8], salt: Salt, number: u32) -> Option<&[u8]> {
    let entries = u32_at(block, 4) as usize;
    let is_whole =
        u32_at(block, 0) == salt.checksum(number, &block[4..]) && entries <= BLOCK_ENTRIES;
    is_whole.then(|| &block[BLOCK_HEADER_BYTES..BLOCK_HEADER_BYTES + entries * ENTRY_BYTES])
}
