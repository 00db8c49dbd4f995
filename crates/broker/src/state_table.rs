//! The table of a state stream, the records that change it, and its checkpoint, with the encoding
//! that all state streams share.
//!
//! Integers are little-endian. `str` is a u16 length in bytes and that much UTF-8; `bytes` is a u32
//! length and that many bytes; a list is a u32 count and its elements. Nothing may follow the last
//! field.
//!
//! **Record**: defined by the table; it begins with a version. Records carry no checksum of their
//! own: they exist only in the write-ahead log, whose checksums cover them.
//!
//! **Checkpoint**: magic (4 bytes), `version: u8`, the table, `crc: u32` = CRC32C of all before it.
//! Equal tables have equal bytes.
//!
//! **Quarantine**: magic (4 bytes), `version: u8 = 1`, list of blobs (bytes), `crc: u32`. The store
//! drops batches once they are folded, and a fold cannot fail. So a fold that meets input that it
//! cannot read (caused only by a defect or by records of a newer version) stores its input unread:
//! first the previous checkpoint, then each batch. [`decode`] of a quarantine fails with the
//! reason, so the server does not start and nothing is lost.

use std::ops::{Range, RangeInclusive};

use alluvium_stream::{Batch, Replay, StreamOffset};
use bytes::Bytes;

const CRC_LEN: usize = 4;
const QUARANTINE_VERSION: u8 = 1;

/// The longest string that the format can hold. Strings from clients are checked against it when
/// they are received.
pub(crate) const MAX_STRING_BYTES: usize = u16::MAX as usize;

/// Bytes that are not a valid record or checkpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Corrupt(String);

impl Corrupt {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }

    pub(crate) fn unknown_kind(kind: u8) -> Self {
        Self(format!("unknown record kind {kind}"))
    }
}

/// The state that the records of a state stream describe.
pub(crate) trait Table: Default {
    /// The name of the content, for messages.
    const WHAT: &'static str;
    const CHECKPOINT: [u8; 4];
    const QUARANTINE: [u8; 4];
    /// The version of the checkpoint format.
    const VERSION: u8;
    /// The oldest version that can be read.
    const OLDEST_VERSION: u8 = Self::VERSION;

    /// The consequence of records lost to damage, for messages.
    const AFTER_LOSS: &'static str;

    /// Applies an encoded record to the table.
    fn apply_encoded(&mut self, record: &[u8]) -> Result<(), Corrupt>;
    /// Handles the loss of records at this point: removes or marks the state that later records and
    /// requests cannot correct.
    fn after_loss(&mut self) {}
    /// Writes the table in a canonical order.
    fn write(&self, out: &mut Writer);
    /// Reads the output of [`Self::write`] of `version`, one of the readable versions.
    fn read(reader: &mut Reader<'_>, version: u8) -> Result<Self, Corrupt>;
}

/// Encodes the checkpoint of a table.
pub(crate) fn encode<T: Table>(table: &T) -> Vec<u8> {
    let mut out = Writer(T::CHECKPOINT.to_vec());
    out.u8(T::VERSION);
    table.write(&mut out);
    out.sealed()
}

/// Decodes a checkpoint.
pub(crate) fn decode<T: Table>(bytes: &[u8]) -> Result<T, Corrupt> {
    let body = unseal(bytes)?;
    let Some(body) = body.strip_prefix(&T::CHECKPOINT) else {
        return Err(match quarantined::<T>(bytes) {
            Some(blobs) => why_quarantined::<T>(&blobs),
            None => Corrupt("the checkpoint has no magic number".to_owned()),
        });
    };
    let mut reader = Reader(body);
    let version = reader.version_of("checkpoint", T::OLDEST_VERSION..=T::VERSION)?;
    let table = T::read(&mut reader, version)?;
    reader.end()?;
    Ok(table)
}

/// Rebuilds the table that a stream describes. Lost records are logged.
pub(crate) fn load<T: Table>(replay: &Replay) -> Result<T, Corrupt> {
    let Replay { checkpoint, checkpoint_end, batches, end } = replay;
    let table: T = rebuild(checkpoint.as_deref(), *checkpoint_end..*end, batches)?;
    if !replay.gaps().is_empty() {
        // The start has logged the offsets of each stream.
        tracing::error!("changes of {} are or may be lost: {}", T::WHAT, T::AFTER_LOSS);
    }
    Ok(table)
}

/// Rebuilds a table from a checkpoint as of the start of `offsets` and the batches of these
/// offsets.
fn rebuild<T: Table>(
    checkpoint: Option<&[u8]>,
    offsets: Range<StreamOffset>,
    batches: &[Batch],
) -> Result<T, Corrupt> {
    let mut table: T = checkpoint.map(decode).transpose()?.unwrap_or_default();
    let mut next = offsets.start;
    for batch in batches {
        if batch.base > next {
            table.after_loss();
        }
        next = batch.end();
        table.apply_encoded(&batch.payload).map_err(|Corrupt(cause)| {
            Corrupt(format!("batch at offset {}: {cause}", batch.base))
        })?;
    }
    if offsets.end > next {
        table.after_loss();
    }
    Ok(table)
}

/// Builds the checkpoint at the end of `offsets`, see [`alluvium_stream::Fold`]. `None` as long as
/// the table is empty. Input that cannot be read goes into quarantine.
pub(crate) fn fold<T: Table>(
    offsets: Range<StreamOffset>,
    previous: Option<&[u8]>,
    batches: &[Batch],
) -> Option<Vec<u8>> {
    match rebuild::<T>(previous, offsets, batches) {
        Ok(table) => (previous.is_some() || !batches.is_empty()).then(|| encode(&table)),
        Err(error) => {
            tracing::error!(%error, "{} cannot be read and are quarantined", T::WHAT);
            Some(quarantine::<T>(previous, batches))
        }
    }
}

fn quarantine<T: Table>(previous: Option<&[u8]>, batches: &[Batch]) -> Vec<u8> {
    let kept = previous.and_then(quarantined::<T>);
    let mut blobs = kept.unwrap_or_else(|| vec![previous.unwrap_or_default()]);
    blobs.extend(batches.iter().map(|batch| &batch.payload[..]));
    let mut out = Writer(T::QUARANTINE.to_vec());
    out.u8(QUARANTINE_VERSION);
    out.list(&blobs, |out, blob| out.bytes(blob));
    out.sealed()
}

/// The blobs of an intact quarantine; `None` for anything else.
pub(crate) fn quarantined<T: Table>(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut reader = Reader(unseal(bytes).ok()?.strip_prefix(&T::QUARANTINE)?);
    reader.version("quarantine", QUARANTINE_VERSION).ok()?;
    reader.list(Reader::bytes).ok()
}

/// The first blob that cannot be read, and the reason.
fn why_quarantined<T: Table>(blobs: &[&[u8]]) -> Corrupt {
    let (checkpoint, records) =
        blobs.split_first().map_or((&[][..], &[][..]), |(first, rest)| (*first, rest));
    let checkpoint = (!checkpoint.is_empty()).then(|| decode::<T>(checkpoint).map(drop));
    let mut scratch = T::default();
    let records = records.iter().map(|bytes| scratch.apply_encoded(bytes));
    let cause = checkpoint.into_iter().chain(records).find_map(Result::err);
    let cause =
        cause.map_or_else(|| "an error of another version".to_owned(), |Corrupt(cause)| cause);
    Corrupt(format!("they were quarantined because of: {cause}"))
}

/// Verifies and strips the checksum.
fn unseal(bytes: &[u8]) -> Result<&[u8], Corrupt> {
    let at = bytes
        .len()
        .checked_sub(CRC_LEN)
        .ok_or_else(|| Corrupt("the checkpoint is shorter than its checksum".to_owned()))?;
    let (body, crc) = bytes.split_at(at);
    if crc == crc32c::crc32c(body).to_le_bytes() {
        Ok(body)
    } else {
        Err(Corrupt(format!("the checkpoint of {} bytes has a wrong checksum", bytes.len())))
    }
}

/// Writes fields.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    /// Begins a record of a group.
    pub(crate) fn record(version: u8, kind: u8, group: &str) -> Self {
        let mut out = Self::default();
        out.u8(version);
        out.u8(kind);
        out.str(group);
        out
    }
    /// The encoded record, in memory of exactly its length.
    pub(crate) fn into_record(self) -> Bytes {
        Bytes::from(self.0.into_boxed_slice())
    }
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    pub(crate) fn i32(&mut self, value: i32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    pub(crate) fn i64(&mut self, value: i64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    /// Writes bytes with their length.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.len(bytes.len());
        self.raw(bytes);
    }
    /// Writes bytes whose length the reader knows.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
    pub(crate) fn size_bytes(&self) -> usize {
        self.0.len()
    }
    /// Writes an optional string: 0, or 1 and the string.
    pub(crate) fn opt(&mut self, value: Option<&str>) {
        self.u8(value.is_some().into());
        if let Some(value) = value {
            self.str(value);
        }
    }
    pub(crate) fn len(&mut self, value: usize) {
        let value = u32::try_from(value).expect("counts are bounded by memory far below 2^32");
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    pub(crate) fn str(&mut self, value: &str) {
        let len = u16::try_from(value.len())
            .expect("strings are checked against MAX_STRING_BYTES when they are received");
        self.0.extend_from_slice(&len.to_le_bytes());
        self.0.extend_from_slice(value.as_bytes());
    }
    pub(crate) fn list<I>(&mut self, items: I, mut write: impl FnMut(&mut Self, I::Item))
    where
        I: IntoIterator<IntoIter: ExactSizeIterator>,
    {
        let items = items.into_iter();
        self.len(items.len());
        for item in items {
            write(self, item);
        }
    }
    fn sealed(mut self) -> Vec<u8> {
        let crc = crc32c::crc32c(&self.0);
        self.0.extend_from_slice(&crc.to_le_bytes());
        self.0
    }
}

/// Reads fields written by [`Writer`]. Every error is [`Corrupt`].
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Corrupt> {
        let short = || Corrupt(format!("{} bytes are left, {len} are needed", self.0.len()));
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(short)?;
        self.0 = rest;
        Ok(taken)
    }
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Corrupt> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }
    pub(crate) fn u8(&mut self) -> Result<u8, Corrupt> {
        Ok(u8::from_le_bytes(self.array()?))
    }
    pub(crate) fn i32(&mut self) -> Result<i32, Corrupt> {
        Ok(i32::from_le_bytes(self.array()?))
    }
    pub(crate) fn i64(&mut self) -> Result<i64, Corrupt> {
        Ok(i64::from_le_bytes(self.array()?))
    }
    pub(crate) fn u64(&mut self) -> Result<u64, Corrupt> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    pub(crate) fn opt(&mut self) -> Result<Option<String>, Corrupt> {
        match self.u8()? {
            0 => Ok(None),
            1 => self.str().map(Some),
            other => Err(Corrupt(format!("{other} is not a valid presence byte"))),
        }
    }
    pub(crate) fn len(&mut self) -> Result<usize, Corrupt> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }
    pub(crate) fn str(&mut self) -> Result<String, Corrupt> {
        let len = u16::from_le_bytes(self.array()?);
        let bytes = self.take(usize::from(len))?;
        let text = std::str::from_utf8(bytes)
            .map_err(|error| Corrupt(format!("a string is not UTF-8: {error}")))?;
        Ok(text.to_owned())
    }
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], Corrupt> {
        let len = self.len()?;
        self.take(len)
    }
    /// Allocates nothing in advance: a corrupt count fails at the first missing element.
    pub(crate) fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, Corrupt>,
    ) -> Result<Vec<T>, Corrupt> {
        let count = self.len()?;
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(read(self)?);
        }
        Ok(items)
    }
    pub(crate) fn version(&mut self, what: &str, known: u8) -> Result<(), Corrupt> {
        self.version_of(what, known..=known).map(drop)
    }
    /// Reads a version and checks that it is in `known`.
    fn version_of(&mut self, what: &str, known: RangeInclusive<u8>) -> Result<u8, Corrupt> {
        match self.u8()? {
            version if known.contains(&version) => Ok(version),
            version => Err(Corrupt(format!("unknown format version {version} of a {what}"))),
        }
    }
    pub(crate) fn end(&self) -> Result<(), Corrupt> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Corrupt(format!("{} bytes follow the last field", self.0.len())))
        }
    }
}
