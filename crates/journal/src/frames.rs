//! Compressed journals: the bytes of the plain journal in frames, and a table of these.
//! `docs/format/journal.md`, section 6.

use std::io;
use std::ops::Range;

use alluvium_device::{AlignedBuf, GRANULE_BYTES, PAGE_BYTES};

use crate::blocks::{Block, Blocks};
use crate::codec::{Codec, Encoder};
use crate::error::Result;
use crate::fetch::Source;
use crate::fields::{self, FIELDS_BYTES, u32_at, u64_at};
use crate::files::File;
use crate::journal::{FIRST_RECORD, JournalHeader, Loaded};
use crate::memory;
use crate::options::Compression;
use crate::position::{JournalNumber, Position};
use crate::record::{Record, Salt};
use crate::shared::CHUNK_BYTES;
use crate::sync::Arc;

const MAGIC: &[u8; 8] = b"ALLUVFRM";
/// Minimum number of plain bytes in a frame, a power of two: what a read of a small record
/// decompresses.
pub(crate) const LEAST_FRAME_BYTES: usize = 16 << 10;
/// Maximum number of plain bytes in a frame that is written; one that is read may have up to
/// [`CHUNK_BYTES`].
pub(crate) const MOST_FRAME_BYTES: usize = 256 << 10;
/// A table entry: length and codec of the stored frame, and its checksum.
const ENTRY_BYTES: usize = 8;
const LEN_BITS: u32 = 24;
/// The increment in which the table grows while it is written.
const TABLE_STEP_BYTES: usize = 16 << 10;
const _: () = assert!(TABLE_STEP_BYTES.is_multiple_of(ENTRY_BYTES));
const _: () = assert!(CHUNK_BYTES < 1 << LEN_BITS && CHUNK_BYTES.is_multiple_of(MOST_FRAME_BYTES));
/// A record in at most this many frames is assembled from cached frames. A longer one is read by
/// itself, since it would evict much that is read more often.
const KEPT_FRAMES: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Frame {
    /// The offset of its first byte in the file.
    at: u32,
    checksum: u32,
    codec: Codec,
}

/// The frame table of a compressed journal.
pub(crate) struct Frames {
    number: JournalNumber,
    salt: Salt,
    frame_bytes: usize,
    /// The end of the last record of the plain journal.
    end: usize,
    /// Empty if the table was damaged: then no record can be read.
    frames: Box<[Frame]>,
    /// The end of the last frame in the file.
    stored_end: usize,
    blocks: Arc<Blocks>,
}

/// The last 64 bytes of the file.
struct Footer {
    frames: usize,
    end: usize,
    table_at: usize,
    frame_bytes: usize,
    table_checksum: u32,
}

impl Footer {
    fn write(&self, salt: Salt) -> fields::Fields {
        let u32_of = |number: usize| u32::try_from(number).expect("a journal has at most 1 GiB");
        let mut fields = [0; FIELDS_BYTES];
        fields[12..16].copy_from_slice(&u32_of(self.frames).to_le_bytes());
        fields[16..24].copy_from_slice(&salt.0.to_le_bytes());
        fields[24..32].copy_from_slice(&(self.end as u64).to_le_bytes());
        fields[32..40].copy_from_slice(&(self.table_at as u64).to_le_bytes());
        fields[40..44].copy_from_slice(&u32_of(self.frame_bytes).to_le_bytes());
        fields[44..48].copy_from_slice(&self.table_checksum.to_le_bytes());
        fields::seal(&mut fields, MAGIC);
        fields
    }

    /// Parses the footer; `None` if it is damaged, belongs to another journal, or does not fit a
    /// file of `len_bytes`.
    fn parse(bytes: &[u8], salt: Salt, len_bytes: u64, journal_bytes: usize) -> Option<Self> {
        let fields = fields::unseal(bytes, MAGIC).ok()?;
        let footer = Self {
            frames: u32_at(fields, 12) as usize,
            end: usize::try_from(u64_at(fields, 24)).ok()?,
            table_at: usize::try_from(u64_at(fields, 32)).ok()?,
            frame_bytes: u32_at(fields, 40) as usize,
            table_checksum: u32_at(fields, 44),
        };
        let is_sound = u64_at(fields, 16) == salt.0
            && footer.frame_bytes.is_power_of_two()
            && (PAGE_BYTES..=CHUNK_BYTES).contains(&footer.frame_bytes)
            && (FIRST_RECORD + 1..=journal_bytes).contains(&footer.end)
            && footer.end.is_multiple_of(GRANULE_BYTES)
            && footer.frames == (footer.end - FIRST_RECORD).div_ceil(footer.frame_bytes)
            && (FIRST_RECORD..=journal_bytes).contains(&footer.table_at)
            && (footer.table_end() + FIELDS_BYTES) as u64 <= len_bytes;
        is_sound.then_some(footer)
    }

    fn table_end(&self) -> usize {
        self.table_at + self.frames * ENTRY_BYTES
    }
}

impl Frames {
    /// Reads the frame table of a compressed journal; `None` if it is unusable.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn open(
        file: &dyn File,
        number: JournalNumber,
        salt: Salt,
        journal_bytes: usize,
        blocks: &Arc<Blocks>,
    ) -> io::Result<Option<Self>> {
        let len_bytes = file.len_bytes()?;
        let page_bytes = PAGE_BYTES as u64;
        if len_bytes < page_bytes || !len_bytes.is_multiple_of(page_bytes) {
            return Ok(None);
        }
        let mut page = AlignedBuf::zeroed(PAGE_BYTES);
        file.read_at(len_bytes - page_bytes, &mut page)?;
        let footer = &page[PAGE_BYTES - FIELDS_BYTES..];
        let Some(footer) = Footer::parse(footer, salt, len_bytes, journal_bytes) else {
            return Ok(None);
        };
        let from = footer.table_at / PAGE_BYTES * PAGE_BYTES;
        let mut buf = memory::pages(footer.table_end().next_multiple_of(PAGE_BYTES) - from)?;
        file.read_at(from as u64, &mut buf)?;
        let table = &buf[footer.table_at - from..footer.table_end() - from];
        if salt.checksum(footer.frames as u32, table) != footer.table_checksum {
            return Ok(None);
        }
        let mut frames = Self {
            number,
            salt,
            frame_bytes: footer.frame_bytes,
            end: footer.end,
            frames: Box::default(),
            stored_end: FIRST_RECORD,
            blocks: blocks.clone(),
        };
        let mut found = Vec::new();
        memory::reserve(&mut found, footer.frames)?;
        for (index, entry) in table.chunks_exact(ENTRY_BYTES).enumerate() {
            let word = u32_at(entry, 0);
            let stored_bytes = word as usize & ((1 << LEN_BITS) - 1);
            let codec = Codec::of((word >> LEN_BITS) as u8);
            let is_length = (1..=frames.plain(index).len()).contains(&stored_bytes);
            let (Some(codec), true) = (codec, is_length) else { return Ok(None) };
            // No frame is longer than its plain bytes, so none lies behind 1 GiB.
            found.push(Frame { at: frames.stored_end as u32, checksum: u32_at(entry, 4), codec });
            frames.stored_end += stored_bytes;
        }
        frames.frames = found.into();
        Ok((frames.stored_end == footer.table_at).then_some(frames))
    }

    /// Creates the table of a journal with records up to `end` whose table is damaged: all of its
    /// contents count as damaged.
    pub(crate) fn lost(
        number: JournalNumber,
        salt: Salt,
        end: usize,
        blocks: &Arc<Blocks>,
    ) -> Self {
        Self {
            number,
            salt,
            frame_bytes: MOST_FRAME_BYTES,
            end,
            frames: Box::default(),
            stored_end: FIRST_RECORD,
            blocks: blocks.clone(),
        }
    }

    /// Returns whether its table, and with it all of its contents, is damaged.
    pub(crate) fn is_lost(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the end of the last record of the plain journal.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// Returns the compression of most of it.
    pub(crate) fn compression(&self) -> Compression {
        let codec = self.frames.iter().map(|frame| frame.codec).find(|it| *it != Codec::Stored);
        codec.map_or(Compression::None, Codec::name)
    }

    /// Returns the memory of the table, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.frames)
    }

    fn frame_of(&self, at: usize) -> usize {
        (at - FIRST_RECORD) / self.frame_bytes
    }

    /// Returns where in the plain journal the frame begins that contains `at`.
    pub(crate) fn start_of(&self, at: usize) -> usize {
        self.plain(self.frame_of(at)).start
    }

    /// Returns the bytes of the plain journal that a frame contains.
    fn plain(&self, frame: usize) -> Range<usize> {
        let start = FIRST_RECORD + frame * self.frame_bytes;
        start..(start + self.frame_bytes).min(self.end)
    }

    /// Returns the bytes of the file that a frame occupies, if known.
    fn stored(&self, frame: usize) -> Option<Range<usize>> {
        let start = self.frames.get(frame)?.at as usize;
        let end = self.frames.get(frame + 1).map_or(self.stored_end, |next| next.at as usize);
        Some(start..end)
    }

    /// Returns the pages of the file that these frames occupy, if known.
    fn stored_pages(&self, frames: &Range<usize>) -> Option<Range<usize>> {
        let (first, last) = (self.stored(frames.start)?, self.stored(frames.end - 1)?);
        Some(first.start / PAGE_BYTES * PAGE_BYTES..last.end.next_multiple_of(PAGE_BYTES))
    }

    /// Reads and decompresses consecutive frames into `to`, which has exactly their length. Damaged
    /// ones become zeroes; returns their total length.
    fn read(&self, source: Source<'_>, frames: Range<usize>, to: &mut [u8]) -> Result<usize> {
        let Some(pages) = self.stored_pages(&frames) else {
            to.fill(0);
            return Ok(to.len());
        };
        let from = pages.start;
        let mut buf = source.pages(pages.len())?;
        source.read_at(from, &mut buf, "reading compressed records")?;
        let start = self.plain(frames.start).start;
        let mut damaged_bytes = 0;
        for frame in frames {
            let Frame { checksum, codec, .. } = self.frames[frame];
            let stored = self.stored(frame).expect("it is one of those that are known");
            let stored = &buf[stored.start - from..stored.end - from];
            let plain = self.plain(frame);
            let to = &mut to[plain.start - start..plain.end - start];
            let is_whole = self.salt.checksum(frame as u32, stored) == checksum
                && codec.decompress(stored, to).map_err(source.no_memory())?;
            if !is_whole {
                to.fill(0);
                damaged_bytes += to.len();
            }
        }
        Ok(damaged_bytes)
    }

    /// Reads the plain journal up to its end into the memory of a whole journal. The header and
    /// damaged frames become zeroes.
    pub(crate) fn read_whole(&self, source: Source<'_>, memory: &mut [u8]) -> Result<()> {
        memory[..FIRST_RECORD].fill(0);
        let count = (self.end - FIRST_RECORD).div_ceil(self.frame_bytes);
        self.read_many(source, 0..count, &mut memory[FIRST_RECORD..self.end])
    }

    /// Reads frames from the one that contains `at` on, as many as fit into `to`, whose length is a
    /// multiple of a chunk; returns their range in the plain journal.
    pub(crate) fn read_piece(
        &self,
        source: Source<'_>,
        at: usize,
        to: &mut [u8],
    ) -> Result<Range<usize>> {
        let first = self.frame_of(at);
        let count = (self.end - FIRST_RECORD).div_ceil(self.frame_bytes);
        let frames = first..count.min(first + to.len() / self.frame_bytes);
        let plain = self.plain(frames.start).start..self.plain(frames.end - 1).end;
        self.read_many(source, frames, &mut to[..plain.len()])?;
        Ok(plain)
    }

    /// Reads any number of frames like [`Self::read`], with additional memory for a chunk.
    fn read_many(&self, source: Source<'_>, frames: Range<usize>, to: &mut [u8]) -> Result<()> {
        let start = self.plain(frames.start).start;
        let step = CHUNK_BYTES / self.frame_bytes;
        for first in frames.clone().step_by(step) {
            let part = first..(first + step).min(frames.end);
            let plain = self.plain(first).start - start..self.plain(part.end - 1).end - start;
            self.read(source, part, &mut to[plain])?;
        }
        Ok(())
    }

    /// Returns a frame, cached or read; `None` if it is damaged.
    fn block(&self, source: Source<'_>, frame: usize) -> Result<Option<Block>> {
        let block = self.blocks.get(self.number, frame, || {
            let bytes = memory::zeroes(self.plain(frame).len());
            let mut bytes = bytes.map_err(|error| Some(source.no_memory()(error)))?;
            match self.read(source, frame..frame + 1, &mut bytes) {
                Ok(0) => Ok(Arc::new(bytes)),
                Ok(_) => Err(None),
                Err(error) => Err(Some(error)),
            }
        });
        match block {
            Ok(block) => Ok(Some(block)),
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error),
        }
    }

    /// Returns the frames that may contain the record at `position`; `None` if it cannot be a
    /// record of this journal.
    fn around(&self, position: Position) -> Option<Range<usize>> {
        let at = position.first().byte();
        let limit = (at + position.max_len_bytes()).min(self.end);
        let is_here = FIRST_RECORD <= at && at < limit;
        is_here.then(|| self.frame_of(at)..self.frame_of(limit - 1) + 1)
    }

    /// Returns the pages of the file that [`Self::load`] reads, or slightly more; `None` if it
    /// needs none.
    pub(crate) fn pages(&self, position: Position) -> Option<Range<usize>> {
        let mut frames = self.around(position)?;
        if frames.len() <= KEPT_FRAMES {
            let is_kept = |frame: usize| self.blocks.has(self.number, frame);
            while !frames.is_empty() && is_kept(frames.start) {
                frames.start += 1;
            }
            while !frames.is_empty() && is_kept(frames.end - 1) {
                frames.end -= 1;
            }
        }
        if frames.is_empty() { None } else { self.stored_pages(&frames) }
    }

    /// Loads the record at `position`; `None` if it is damaged.
    pub(crate) fn load(&self, source: Source<'_>, position: Position) -> Result<Option<Loaded>> {
        let Some(frames) = self.around(position) else { return Ok(None) };
        let at = position.first().byte();
        let start = self.plain(frames.start).start;
        let record = |block: Block| {
            let record = Record::checked(&block[at - start..], self.salt, position.first())?;
            let len = record.header().len_bytes();
            Some(Loaded::of_block(block, at - start, len))
        };
        if frames.len() > KEPT_FRAMES {
            return Ok(record(self.read_alone(source, frames)?));
        }
        let Some(first) = self.block(source, frames.start)? else { return Ok(None) };
        // The common case: it ends in the frame that it begins in.
        if let Some(loaded) = record(first.clone()) {
            return Ok(Some(loaded));
        }
        let mut whole = Vec::new();
        let plain_bytes = self.plain(frames.end - 1).end - start;
        memory::reserve(&mut whole, plain_bytes).map_err(source.no_memory())?;
        whole.extend_from_slice(&first);
        for frame in frames.start + 1..frames.end {
            // Only an upper bound of the length is known: the record may end before a damaged
            // frame.
            let Some(block) = self.block(source, frame)? else { break };
            whole.extend_from_slice(&block);
        }
        Ok(record(Arc::new(whole)))
    }

    /// Reads consecutive frames without caching them.
    fn read_alone(&self, source: Source<'_>, frames: Range<usize>) -> Result<Block> {
        let plain_bytes = self.plain(frames.end - 1).end - self.plain(frames.start).start;
        let mut whole = memory::zeroes(plain_bytes).map_err(source.no_memory())?;
        self.read_many(source, frames, &mut whole)?;
        Ok(Arc::new(whole))
    }
}

/// Writes a compressed journal, from its first frame to its end.
pub(crate) struct Writer<'a> {
    file: &'a dyn File,
    salt: Salt,
    frame_bytes: usize,
    encoder: &'a mut Encoder,
    /// Data not yet in the file.
    staged: AlignedBuf,
    staged_bytes: usize,
    /// Where in the file `staged` begins.
    at: usize,
    table: Vec<u8>,
    /// Buffers for a frame, compressed and decompressed again.
    compressed: Vec<u8>,
    again: Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Starts writing into an empty file.
    ///
    /// # Errors
    /// There is no memory for the buffers.
    pub(crate) fn new(
        file: &'a dyn File,
        salt: Salt,
        frame_bytes: usize,
        encoder: &'a mut Encoder,
    ) -> io::Result<Self> {
        Ok(Self {
            file,
            salt,
            frame_bytes,
            encoder,
            staged: memory::pages(CHUNK_BYTES)?,
            staged_bytes: 0,
            at: FIRST_RECORD,
            table: Vec::new(),
            compressed: Encoder::buffer(frame_bytes)?,
            again: memory::zeroes(frame_bytes)?,
        })
    }

    /// Returns the length of the file so far.
    pub(crate) fn len_bytes(&self) -> usize {
        self.at + self.staged_bytes
    }

    /// Appends the next frame. All frames but the last have the full length.
    pub(crate) fn push(&mut self, plain: &[u8]) -> io::Result<()> {
        if self.table.len() == self.table.capacity() {
            memory::reserve(&mut self.table, TABLE_STEP_BYTES)?;
        }
        let mut compressed = std::mem::take(&mut self.compressed);
        let codec = self.encoder.codec();
        self.again.resize(plain.len(), 0);
        // The plain file is removed once this one is complete: a defect of a codec must cost space
        // and not records.
        let (stored, codec) = match self.encoder.compress(plain, &mut compressed)? {
            Some(stored) if codec.decompress(stored, &mut self.again)? && self.again == plain => {
                (stored, codec)
            }
            _ => (plain, Codec::Stored),
        };
        let frame = (self.table.len() / ENTRY_BYTES) as u32;
        let word = u32::try_from(stored.len()).expect("a frame is short")
            | u32::from(codec as u8) << LEN_BITS;
        self.table.extend_from_slice(&word.to_le_bytes());
        self.table.extend_from_slice(&self.salt.checksum(frame, stored).to_le_bytes());
        let appended = self.append(stored);
        self.compressed = compressed;
        appended
    }

    fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let len = bytes.len().min(self.staged.len() - self.staged_bytes);
            let staged = self.staged_bytes..self.staged_bytes + len;
            self.staged[staged].copy_from_slice(&bytes[..len]);
            self.staged_bytes += len;
            bytes = &bytes[len..];
            if self.staged_bytes == self.staged.len() {
                self.file.write_at(self.at as u64, &self.staged)?;
                self.at += self.staged_bytes;
                self.staged_bytes = 0;
            }
        }
        Ok(())
    }

    /// Writes the table, the footer and, at the beginning, the header. `end` is that of the plain
    /// journal. Returns the length of the file.
    pub(crate) fn finish(mut self, header: &JournalHeader, end: usize) -> io::Result<u64> {
        let table = std::mem::take(&mut self.table);
        let frames = table.len() / ENTRY_BYTES;
        let footer = Footer {
            frames,
            end,
            table_at: self.len_bytes(),
            frame_bytes: self.frame_bytes,
            table_checksum: self.salt.checksum(frames as u32, &table),
        };
        self.append(&table)?;
        let len = (self.len_bytes() + FIELDS_BYTES).next_multiple_of(PAGE_BYTES);
        let gap = len - FIELDS_BYTES - self.len_bytes();
        self.append(&[0u8; PAGE_BYTES][..gap])?;
        self.append(&footer.write(self.salt))?;
        if self.staged_bytes > 0 {
            self.file.write_at(self.at as u64, &self.staged[..self.staged_bytes])?;
        }
        let mut page = AlignedBuf::zeroed(PAGE_BYTES);
        header.write(&mut page);
        self.file.write_at(0, &page)?;
        Ok(len as u64)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
