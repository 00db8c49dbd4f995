//! A second implementation of `docs/format/journal.md`, as simple as possible, that shares no code
//! with the one under test.

/// The offset of the first record.
pub(super) const RECORDS_AT: usize = 4096;
pub(super) const HINT_BLOCK: usize = 64 << 10;
pub(super) const HINT_BLOCK_ENTRIES: usize = 2730;
/// Valid bits of the first word of a hint's entry: shard, tag, tombstone, expiry.
const HINT_KNOWN: u64 = (0x3f << 58) | 0x3ff;

/// CRC32C by a table, byte by byte.
pub(super) fn crc32c(parts: &[&[u8]]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut crc, mut bit) = (byte as u32, 0);
            while bit < 8 {
                crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    let bytes = parts.iter().flat_map(|part| part.iter());
    !bytes.fold(!0, |crc, byte| (crc >> 8) ^ TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// A record as defined in section 3.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) at: usize,
    /// Without its padding.
    pub(super) len: usize,
    pub(super) is_tombstone: bool,
    pub(super) expiry: Option<u64>,
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
}

impl Record {
    pub(super) fn end(&self) -> usize {
        self.at + self.len.next_multiple_of(8)
    }
}

/// Computes the checksum of a record by its first granule, or of a hint's block by its number.
pub(super) fn checksum(salt: u64, position: u32, rest: &[u8]) -> u32 {
    crc32c(&[&salt.to_le_bytes(), &position.to_le_bytes(), rest])
}

/// Returns the length of the record if the bytes begin with a plausible header of one that lies
/// completely in `bytes`.
pub(super) fn plausible_len(bytes: &[u8]) -> Option<usize> {
    if bytes.len() < 16 {
        return None;
    }
    let (kind, flags, key) = (bytes[4], bytes[5], usize::from(u16_at(bytes, 6)));
    let value = u32_at(bytes, 8) as usize;
    let len = 16 + if flags == 1 { 8 } else { 0 } + key + value;
    let is_known = match kind {
        1 => flags <= 1,
        2 => flags == 0 && value == 8,
        _ => false,
    };
    (is_known && key > 0 && u32_at(bytes, 12) == 0 && len <= bytes.len()).then_some(len)
}

/// Returns the record at `at` of a journal, if there is one.
pub(super) fn record_at(journal: &[u8], salt: u64, at: usize) -> Option<Record> {
    let bytes = &journal[at..];
    let len = plausible_len(bytes)?;
    if u32_at(bytes, 0) != checksum(salt, (at / 8) as u32, &bytes[4..len]) {
        return None;
    }
    let expiry = (bytes[5] == 1).then(|| u64_at(bytes, 16));
    let key_at = if expiry.is_some() { 24 } else { 16 };
    let value_at = key_at + usize::from(u16_at(bytes, 6));
    let (key, value) = (bytes[key_at..value_at].to_vec(), bytes[value_at..len].to_vec());
    Some(Record { at, len, is_tombstone: bytes[4] == 2, expiry, key, value })
}

/// The contents of a journal: records, and bytes between them that are not records.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Journal {
    pub(super) records: Vec<Record>,
    pub(super) damage: Vec<(usize, usize)>,
    pub(super) end: usize,
    /// Bytes that looked like records and were not.
    pub(super) searched: usize,
}

pub(super) fn walk(journal: &[u8], salt: u64) -> Journal {
    let mut found = Journal { end: RECORDS_AT, ..Journal::default() };
    let mut at = RECORDS_AT;
    while at < journal.len() {
        let Some(record) = record_at(journal, salt, at) else {
            found.searched += plausible_len(&journal[at..]).unwrap_or(0);
            at += 8;
            continue;
        };
        if at > found.end {
            found.damage.push((found.end, at));
        }
        at = record.end();
        found.end = at.min(journal.len());
        found.records.push(record);
    }
    found
}

/// Encodes one entry of a hint, section 5.
pub(super) fn hint_entry(h1: u64, h2: u64, record: &Record) -> [u8; 24] {
    let flags = (u64::from(record.is_tombstone) << 8) | (u64::from(record.expiry.is_some()) << 9);
    let mut entry = [0; 24];
    let high = (h1 & (0x3f << 58)) | (h1 & 0xff) | flags;
    entry[..8].copy_from_slice(&high.to_le_bytes());
    entry[8..16].copy_from_slice(&h2.to_le_bytes());
    entry[16..20].copy_from_slice(&((record.at / 8) as u32).to_le_bytes());
    entry[20..].copy_from_slice(&(record.len.div_ceil(8) as u32).to_le_bytes());
    entry
}

/// Encodes the first 64 bytes of a file of a cache, with their checksum.
pub(super) fn head(magic: &[u8; 8], fields: &[(usize, &[u8])]) -> [u8; 64] {
    let mut head = [0; 64];
    head[..8].copy_from_slice(magic);
    head[8] = 1;
    for (at, bytes) in fields {
        head[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    let crc = crc32c(&[&head[..60]]);
    head[60..].copy_from_slice(&crc.to_le_bytes());
    head
}

/// Encodes a hint with these entries.
pub(super) fn hint(salt: u64, end: usize, entries: &[[u8; 24]]) -> Vec<u8> {
    let count = (entries.len() as u32).to_le_bytes();
    let fields: [(usize, &[u8]); 3] =
        [(12, &count), (16, &salt.to_le_bytes()), (24, &(end as u64).to_le_bytes())];
    let mut bytes = head(b"ALLUVHNT", &fields).to_vec();
    bytes.resize(4096, 0);
    for (number, entries) in entries.chunks(HINT_BLOCK_ENTRIES).enumerate() {
        let mut block = vec![0; 4];
        block.extend_from_slice(&(entries.len() as u32).to_le_bytes());
        block.extend(entries.iter().flatten());
        block.resize(HINT_BLOCK, 0);
        let crc = checksum(salt, number as u32, &block[4..]);
        block[..4].copy_from_slice(&crc.to_le_bytes());
        bytes.extend_from_slice(&block);
    }
    bytes
}

/// Returns the entries of a hint of a journal with this salt, if all of it is valid.
pub(super) fn hint_entries(bytes: &[u8], salt: u64, journal_bytes: usize) -> Option<Vec<[u8; 24]>> {
    let mut page = [0; 64];
    let len = bytes.len().min(64);
    page[..len].copy_from_slice(&bytes[..len]);
    let is_head = page.starts_with(b"ALLUVHNT")
        && u32_at(&page, 8) == 1
        && u32_at(&page, 60) == crc32c(&[&page[..60]])
        && u64_at(&page, 16) == salt;
    let (count, end) = (u64::from(u32_at(&page, 12)), u64_at(&page, 24));
    let is_end = (RECORDS_AT as u64..=journal_bytes as u64).contains(&end) && end.is_multiple_of(8);
    // A record has at least 24 bytes.
    if !is_head || !is_end || count > (end - RECORDS_AT as u64) / 24 {
        return None;
    }
    let mut all = Vec::new();
    for number in 0..(count as usize).div_ceil(HINT_BLOCK_ENTRIES) {
        let at = RECORDS_AT + number * HINT_BLOCK;
        // Bytes after the end of the file read as zeroes.
        let mut block = bytes.get(at..).unwrap_or(&[]).to_vec();
        block.resize(HINT_BLOCK, 0);
        let entries = u32_at(&block, 4) as usize;
        if u32_at(&block, 0) != checksum(salt, number as u32, &block[4..])
            || entries > HINT_BLOCK_ENTRIES
        {
            return None;
        }
        for entry in block[8..8 + entries * 24].chunks(24) {
            let (first, len) = (u64::from(u32_at(entry, 16)), u64::from(u32_at(entry, 20)));
            let unknown = u64_at(entry, 0) & !HINT_KNOWN;
            if unknown != 0 || first < 512 || len == 0 || (first + len) * 8 > end {
                return None;
            }
            all.push(entry.try_into().expect("24 bytes"));
        }
    }
    (all.len() as u64 == count).then_some(all)
}
