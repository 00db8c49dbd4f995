//! Positions of records and blocks in a write-ahead log and in objects, according to the documents
//! of their formats (`docs/format/`).

use super::files::{Content, Files, WAL};

pub(super) const PAGE: u64 = 4096;
/// Device offsets of the log's two headers, and of its first record.
pub(super) const SLOTS: [u64; 2] = [0, 32 << 10];
pub(super) const DATA_START: u64 = 64 << 10;
const RECORD_HEADER: u64 = 32;
const STREAM_HEADER: u64 = 40;
/// The kinds of a stream record that lists the ends of streams.
const KINDS_ENDS: [u8; 3] = [2, 3, 5];
/// The kind of a stream record that has changes of the catalog.
const KIND_CATALOG: u8 = 4;
const OBJECT_HEADER: u64 = 32;
const FOOTER: u64 = 64;
const INDEX_ENTRY: u64 = 56;

/// Offsets of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Extent {
    pub(super) stream: u64,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// The extent of a record that has no offsets.
const NO_EXTENT: Extent = Extent { stream: u64::MAX, start: 0, end: 0 };

/// The extent of a record that has changes of the catalog.
pub(super) const OF_CATALOG: Extent = Extent { stream: u64::MAX - 1, start: 0, end: 0 };

/// The type of a log record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Records of a client.
    Data,
    /// Records of a client, in a transaction.
    Transactional,
    /// The end of a transaction in a partition.
    Marker,
    /// State of the server's groups and transactions.
    State,
    /// Changes of the catalog.
    Catalog,
    Padding,
}

impl Class {
    pub(super) const NOT_PADDING: [Self; 5] =
        [Self::Data, Self::Transactional, Self::Marker, Self::State, Self::Catalog];

    /// Whether it is not a record of a partition.
    pub(super) fn is_of_server(self) -> bool {
        matches!(self, Self::State | Self::Catalog | Self::Padding)
    }
}

/// A record of the log.
#[derive(Clone, Debug)]
pub(super) struct WalRecord {
    /// Device offset.
    pub(super) at: u64,
    /// Includes the header.
    pub(super) len: u64,
    pub(super) class: Class,
    /// Meaningless for padding.
    pub(super) extent: Extent,
    /// The log offset after the record.
    pub(super) end: u64,
    /// The log offset below which everything was durable when the record was appended.
    pub(super) proof: u64,
}

impl WalRecord {
    pub(super) fn payload(&self) -> (u64, u64) {
        (self.at + RECORD_HEADER, self.len - RECORD_HEADER)
    }
}

/// A data block of an object.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) at: u64,
    pub(super) len: u64,
    pub(super) extent: Extent,
}

/// An object.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) name: String,
    pub(super) len: u64,
    pub(super) blocks: Vec<Block>,
    /// Position and length.
    pub(super) directory: (u64, u64),
    /// Position and length of the pages and the top.
    pub(super) index: (u64, u64),
    pub(super) footer: (u64, u64),
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Returns the intact headers of a log.
fn headers(wal: &Content) -> Vec<Vec<u8>> {
    let is_whole = |slot: &Vec<u8>| {
        slot.len() == PAGE as usize
            && slot.starts_with(b"ALLUVWAL")
            && crc32c::crc32c(&slot[..124]) == u32_at(slot, 124)
    };
    SLOTS.iter().map(|slot| wal.range(*slot, PAGE)).filter(is_whole).collect()
}

/// Returns the highest durable offset of the headers.
pub(super) fn header_durable(files: &Files) -> u64 {
    let headers = files.get(WAL).map(headers).unwrap_or_default();
    headers.iter().map(|header| u64_at(header, 80)).max().unwrap_or(0)
}

/// Returns the log's records, in order. The log must be intact and not resized.
pub(super) fn wal_records(files: &Files) -> Vec<WalRecord> {
    let Some(wal) = files.get(WAL) else { return Vec::new() };
    let headers = headers(wal);
    let newest = headers.iter().max_by_key(|slot| (u32_at(slot, 64), u64_at(slot, 32)));
    let Some(newest) = newest else { return Vec::new() };
    let ring = u64_at(newest, 40) - DATA_START;
    let mut records = Vec::new();
    let mut next = u64_at(newest, 48);
    loop {
        let at = DATA_START + next % ring;
        let header = wal.range(at, RECORD_HEADER + STREAM_HEADER + 64);
        if header.len() < RECORD_HEADER as usize || u64_at(&header, 8) != next {
            break;
        }
        let len = RECORD_HEADER + u64::from(u32_at(&header, 4));
        let stream = &header[RECORD_HEADER as usize..];
        let (class, extent) = match &header[..4] {
            b"ALRP" => (Class::Padding, NO_EXTENT),
            b"ALRD" if KINDS_ENDS.contains(&stream[1]) => (Class::State, NO_EXTENT),
            b"ALRD" if stream[1] == KIND_CATALOG => (Class::Catalog, OF_CATALOG),
            b"ALRD" => {
                let (id, start) = (u64_at(stream, 8), u64_at(stream, 16));
                let end = start + u64::from(u32_at(stream, 4));
                let batch = &stream[STREAM_HEADER as usize..];
                (class_of(batch), Extent { stream: id, start, end })
            }
            _ => break,
        };
        let proof = next.saturating_sub(u64::from(u32_at(&header, 20)));
        next += len;
        records.push(WalRecord { at, len, class, extent, end: next, proof });
    }
    records
}

/// Classifies a record as a partition's batch, or as state in another stream.
fn class_of(batch: &[u8]) -> Class {
    // Magic 2, and a plausible base offset.
    if batch.len() < 23 || batch[16] != 2 || batch[0] != 0 {
        return Class::State;
    }
    match u16::from_be_bytes([batch[21], batch[22]]) & 0x30 {
        0 => Class::Data,
        0x10 => Class::Transactional,
        _ => Class::Marker,
    }
}

/// Returns all intact objects.
pub(super) fn objects(files: &Files) -> Vec<Object> {
    let names = files.objects().into_iter();
    names.filter_map(|name| object(name, files.get(name)?)).collect()
}

pub(super) fn object(name: &str, content: &Content) -> Option<Object> {
    let footer_at = content.len.checked_sub(FOOTER).filter(|at| *at >= OBJECT_HEADER)?;
    let footer = content.range(footer_at, FOOTER);
    // The server writes format version 2 only.
    if &footer[52..60] != b"ALLUVEND" || u32_at(&footer, 20) != 2 {
        return None;
    }
    // The pages are entries without a gap; the top follows them.
    let (top_at, top_len) = (u64_at(&footer, 0), u64_at(&footer, 8));
    let entries_len = u64::from(u32_at(&footer, 44)) * INDEX_ENTRY;
    let index_at = top_at.checked_sub(entries_len)?;
    let index = (index_at, entries_len + top_len);
    let directory_len = u64::from(u32_at(&footer, 40));
    let directory = (index_at.checked_sub(directory_len)?, directory_len);
    let entries = content.range(index_at, entries_len);
    let block = |entry: &[u8]| Block {
        at: u64_at(entry, 24),
        len: u64::from(u32_at(entry, 32)),
        extent: Extent {
            stream: u64_at(entry, 0),
            start: u64_at(entry, 8),
            end: u64_at(entry, 16),
        },
    };
    Some(Object {
        name: name.to_owned(),
        len: content.len,
        blocks: entries.chunks_exact(INDEX_ENTRY as usize).map(block).collect(),
        directory,
        index,
        footer: (footer_at, FOOTER),
    })
}
