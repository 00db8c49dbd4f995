//! A second implementation of `docs/format/wal.md`, for images in memory: it does not read ahead,
//! wrap or cache anything, and uses no code of the WAL, not even its checksum.

use std::cmp::Ordering;
use std::ops::Range;

use crate::ring::{DATA_START, HEADER, MIN_CAPACITY, PAGE};

/// CRC32C as in RFC 3720, of the concatenation of `parts`.
pub(super) fn crc32c(parts: &[&[u8]]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut index = 0;
        while index < 256 {
            let mut crc = index as u32;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
                bit += 1;
            }
            table[index] = crc;
            index += 1;
        }
        table
    };
    let bytes = parts.iter().copied().flatten();
    !bytes.fold(!0, |crc, &byte| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

// -- Section 3

/// The fields of a header slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) id: [u8; 16],
    pub(super) generation: u64,
    pub(super) capacity: u64,
    pub(super) trim: u64,
    pub(super) window: u64,
    pub(super) epoch: u32,
    pub(super) node: u32,
    pub(super) epoch_start: u64,
    pub(super) durable: u64,
    pub(super) written_at: u64,
    pub(super) clean: bool,
    pub(super) origin: u64,
    pub(super) mark: u64,
}

impl Header {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut page = Vec::with_capacity(PAGE as usize);
        page.extend(b"ALLUVWAL\x01\0\0\0\0\0\0\0");
        page.extend(self.id);
        for field in [self.generation, self.capacity, self.trim, self.window] {
            page.extend(field.to_le_bytes());
        }
        page.extend(self.epoch.to_le_bytes());
        page.extend(self.node.to_le_bytes());
        for field in [self.epoch_start, self.durable, self.written_at] {
            page.extend(field.to_le_bytes());
        }
        page.extend(u32::from(self.clean).to_le_bytes());
        page.extend(self.origin.to_le_bytes());
        page.extend(self.mark.to_le_bytes());
        page.resize(PAGE as usize, 0);
        seal_header(&mut page);
        page
    }

    pub(super) fn ring(&self) -> u64 {
        self.capacity - DATA_START
    }

    /// Device position of the byte at logical offset `x`.
    pub(super) fn at(&self, x: u64) -> u64 {
        DATA_START + (x + self.origin) % self.ring()
    }

    /// No record extends beyond it.
    pub(super) fn limit(&self) -> u64 {
        self.trim - self.trim % PAGE + self.ring()
    }
}

/// Corrects the checksum of a slot's page.
pub(super) fn seal_header(page: &mut [u8]) {
    let crc = crc32c(&[&page[..124]]);
    page[124..128].copy_from_slice(&crc.to_le_bytes());
}

/// The content of a slot, in the terms of the table in section 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Valid(Header),
    Damaged,
    Empty,
    Future,
    Other,
}

pub(super) fn slot(page: &[u8]) -> Slot {
    if page.iter().all(|&byte| byte == 0) {
        return Slot::Empty;
    }
    if !page.starts_with(b"ALLUVWAL") {
        return Slot::Other;
    }
    if crc32c(&[&page[..124]]) != u32_at(page, 124) {
        return Slot::Damaged;
    }
    if u32_at(page, 8) != 1 || u32_at(page, 12) != 0 {
        return Slot::Future;
    }
    let header = Header {
        id: page[16..32].try_into().expect("sixteen bytes"),
        generation: u64_at(page, 32),
        capacity: u64_at(page, 40),
        trim: u64_at(page, 48),
        window: u64_at(page, 56),
        epoch: u32_at(page, 64),
        node: u32_at(page, 68),
        epoch_start: u64_at(page, 72),
        durable: u64_at(page, 80),
        written_at: u64_at(page, 88),
        clean: u32_at(page, 96) == 1,
        origin: u64_at(page, 100),
        mark: u64_at(page, 108),
    };
    let Header { generation, capacity, trim, window, epoch_start, durable, origin, .. } = header;
    let sound = generation < 1 << 63
        && u32_at(page, 96) <= 1
        && capacity.is_multiple_of(PAGE)
        && capacity >= MIN_CAPACITY
        && origin.is_multiple_of(PAGE)
        && origin < header.ring()
        && window.is_multiple_of(PAGE)
        && window > 0
        && window <= header.ring() / 2
        && trim <= durable
        && epoch_start <= durable
        && durable < 1 << 63
        && durable - (trim - trim % PAGE) <= header.ring();
    if sound { Slot::Valid(header) } else { Slot::Damaged }
}

/// The result for both slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Slot(usize),
    NotFormatted,
    NotAWal,
    Damaged,
    Conflict,
    Future,
}

/// The table of section 6, "Headers".
pub(super) fn choose(slots: &[Slot; 2]) -> Choice {
    match slots {
        _ if slots.contains(&Slot::Future) => Choice::Future,
        [Slot::Valid(a), Slot::Valid(b)] if a.id != b.id => Choice::Conflict,
        [Slot::Valid(a), Slot::Valid(b)] => {
            match (a.epoch, a.generation).cmp(&(b.epoch, b.generation)) {
                Ordering::Less => Choice::Slot(1),
                Ordering::Equal => Choice::Conflict,
                Ordering::Greater => Choice::Slot(0),
            }
        }
        [Slot::Valid(_), _] => Choice::Slot(0),
        [_, Slot::Valid(_)] => Choice::Slot(1),
        _ if slots.contains(&Slot::Damaged) => Choice::Damaged,
        _ if slots.contains(&Slot::Other) => Choice::NotAWal,
        _ => Choice::NotFormatted,
    }
}

// -- Sections 4 and 6

/// A record header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) padding: bool,
    pub(super) len: u32,
    pub(super) offset: u64,
    pub(super) epoch: u32,
    pub(super) lag: u32,
    pub(super) payload_crc: u32,
}

impl Record {
    /// Creates the header of a record with this payload.
    pub(super) fn data(offset: u64, epoch: u32, lag: u32, payload: &[u8]) -> Self {
        let (len, payload_crc) = (payload.len() as u32, crc32c(&[payload]));
        Self { padding: false, len, offset, epoch, lag, payload_crc }
    }

    pub(super) fn encode(&self, id: &[u8; 16]) -> [u8; HEADER as usize] {
        let mut bytes = [0; HEADER as usize];
        bytes[..4].copy_from_slice(if self.padding { b"ALRP" } else { b"ALRD" });
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.lag.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = crc32c(&[id, &bytes[..28]]);
        bytes[28..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(x: u64, bytes: &[u8], id: &[u8; 16]) -> Option<Self> {
        let record = Self {
            padding: match &bytes[..4] {
                b"ALRD" => false,
                b"ALRP" => true,
                _ => return None,
            },
            len: u32_at(bytes, 4),
            offset: u64_at(bytes, 8),
            epoch: u32_at(bytes, 16),
            lag: u32_at(bytes, 20),
            payload_crc: u32_at(bytes, 24),
        };
        // Padding ends at a page boundary, the next one if the header itself does not fit before
        // it.
        let rest = PAGE - x % PAGE;
        let padding = if rest < HEADER { rest + PAGE } else { rest } - HEADER;
        let sound = crc32c(&[id, &bytes[..28]]) == u32_at(bytes, 28)
            && record.offset == x
            && u64::from(record.lag) <= x
            && match record.padding {
                true => u64::from(record.len) == padding,
                false => (1..=512 << 20).contains(&record.len),
            };
        sound.then_some(record)
    }

    fn end(&self) -> u64 {
        self.offset + HEADER + u64::from(self.len)
    }

    fn proof(&self) -> u64 {
        self.offset - u64::from(self.lag)
    }
}

/// The log of one header, laid out flat: the byte at logical offset `x` is `bytes[x - start]`.
pub(super) struct Log {
    pub(super) header: Header,
    start: u64,
    bytes: Vec<u8>,
    /// Logical offsets of unreadable pages.
    unreadable: Vec<u64>,
}

/// The result of a walk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Walked {
    /// Start and payload of each record.
    pub(super) records: Vec<(u64, Vec<u8>)>,
    pub(super) damage: Vec<Range<u64>>,
    pub(super) end: u64,
    /// Intact records after the end, within the search range.
    pub(super) dropped: u64,
}

/// The findings after a hole.
struct Beyond {
    /// The greatest proof.
    proof: u64,
    /// Number of intact data records.
    intact: u64,
    /// End of the search.
    seen: u64,
}

impl Log {
    /// Lays out the log from the image of a device. `unreadable` are pages of the device.
    pub(super) fn new(header: Header, image: &[u8], unreadable: &[u64]) -> Self {
        let start = header.trim - header.trim % PAGE;
        let pages = (start..header.limit()).step_by(PAGE as usize);
        let mut log = Self { header, start, bytes: Vec::new(), unreadable: Vec::new() };
        for page in pages {
            if unreadable.contains(&header.at(page)) {
                log.unreadable.push(page);
                log.bytes.extend([0; PAGE as usize]);
            } else {
                log.bytes.extend(&image[header.at(page) as usize..][..PAGE as usize]);
            }
        }
        log
    }

    fn unreadable_in(&self, range: Range<u64>) -> bool {
        self.unreadable.iter().any(|&page| page < range.end && range.start < page + PAGE)
    }

    /// Bytes of the log, which are between the page of the trim offset and the limit.
    pub(super) fn bytes(&self, range: Range<u64>) -> &[u8] {
        &self.bytes[(range.start - self.start) as usize..(range.end - self.start) as usize]
    }

    /// Whether `bytes` are at `x`. False outside the log.
    pub(super) fn holds(&self, x: u64, bytes: &[u8]) -> bool {
        let range = x..x + bytes.len() as u64;
        range.start >= self.start && range.end <= self.header.limit() && self.bytes(range) == bytes
    }

    /// The padding at `x`, of any epoch.
    pub(super) fn padding_at(&self, x: u64) -> Option<Record> {
        let inside = x >= self.start && x + HEADER <= self.header.limit();
        let bytes = inside.then(|| self.bytes(x..x + HEADER))?;
        Record::decode(x, bytes, &self.header.id).filter(|record| record.padding)
    }

    /// The record header at `x`, after a record of epoch `before`.
    fn header_at(&self, x: u64, before: u32) -> Option<Record> {
        let Header { id, epoch, epoch_start, durable, .. } = &self.header;
        if x + HEADER > self.header.limit() {
            return None;
        }
        let record = Record::decode(x, self.bytes(x..x + HEADER), id)?;
        let allowed = match x >= *epoch_start {
            true => record.epoch == *epoch,
            false => record.epoch < *epoch && record.epoch >= before,
        };
        let reaches_over = |place: &u64| (x + 1..record.end()).contains(place);
        let fits = record.end() <= self.header.limit()
            && !reaches_over(durable)
            && !reaches_over(epoch_start);
        (allowed && fits).then_some(record)
    }

    fn payload(&self, record: &Record) -> &[u8] {
        self.bytes(record.offset + HEADER..record.end())
    }

    fn intact(&self, record: &Record) -> bool {
        record.padding || crc32c(&[self.payload(record)]) == record.payload_crc
    }

    /// The first record header in `range` of an epoch not below `least`.
    fn first_header(&self, range: Range<u64>, least: u32) -> Option<Record> {
        let range = range.start..range.end.min(self.header.limit());
        let from = range.start;
        let bytes = if range.is_empty() { &[] } else { self.bytes(range) };
        let candidates = (from..).zip(bytes).filter(|(_, byte)| **byte == b'A');
        let mut records = candidates.filter_map(|(x, _)| self.header_at(x, least));
        records.find(|record| record.epoch >= least)
    }

    fn beyond(&self, x: u64, before: u32) -> Beyond {
        let mut before = before;
        let torn = self.header_at(x, before);
        let mut beyond = Beyond { proof: 0, intact: 0, seen: torn.map_or(x, |torn| torn.end()) };
        let mut to = x + self.header.window;
        let mut from = torn.map_or(x + 1, |torn| torn.end());
        loop {
            let Some(record) = self.first_header(from..to, before) else {
                beyond.seen = beyond.seen.max(to);
                // The rest of a header may be behind that.
                for place in to.saturating_sub(HEADER).max(from)..to.min(self.header.limit()) {
                    let begun = self.bytes(place..to.min(self.header.limit()).min(place + 3));
                    if b"ALR".starts_with(begun) && place + HEADER <= self.header.limit() {
                        beyond.seen = beyond.seen.max(place + HEADER);
                    }
                }
                return beyond;
            };
            beyond.proof = beyond.proof.max(record.proof());
            beyond.intact += u64::from(!record.padding && self.intact(&record));
            beyond.seen = beyond.seen.max(record.end());
            before = record.epoch;
            to = x + 2 * self.header.window;
            from = record.end();
        }
    }

    /// The table of section 6. `None`: the log may end at an unreadable page.
    pub(super) fn walk(&self) -> Option<Walked> {
        let mut walked = Walked { records: Vec::new(), damage: Vec::new(), end: 0, dropped: 0 };
        let (mut x, mut known, mut before) = (self.header.trim, self.header.durable, 0);
        while !(self.header.clean && x == self.header.durable) {
            let record = self.header_at(x, before);
            if let Some(record) = record.filter(|record| self.intact(record)) {
                if !record.padding {
                    walked.records.push((x, self.payload(&record).to_vec()));
                }
                known = known.max(record.proof());
                before = record.epoch;
                x = record.end();
                continue;
            }
            if x >= known {
                let beyond = self.beyond(x, before);
                known = known.max(beyond.proof);
                if x >= known {
                    if self.unreadable_in(x..beyond.seen.min(self.header.limit())) {
                        return None;
                    }
                    walked.dropped = beyond.intact;
                    break;
                }
            }
            let (end, least) = match record {
                // Old, if a record of a later epoch begins before its end.
                Some(torn) => (torn.end().min(known), torn.epoch + 1),
                None => (known, before),
            };
            let next = self.first_header(x + 1..end, least).map_or(end, |next| next.offset);
            match walked.damage.last_mut() {
                Some(last) if last.end == x => last.end = next,
                _ => walked.damage.push(x..next),
            }
            x = next;
        }
        walked.end = x;
        // The bytes before the end on its page have to be written again.
        (!self.unreadable_in(x - x % PAGE..x)).then_some(walked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_matches_the_standard() {
        assert_eq!(crc32c(&[b"12345", b"6789"]), 0xe306_9283);
    }

    #[test]
    fn the_slot_table_covers_every_case() {
        let valid = |generation| {
            let (id, capacity) = ([1; 16], MIN_CAPACITY);
            let (epoch, node, written_at, origin, mark) = (0, 0, 0, 0, 1 << 40);
            let (trim, epoch_start, durable, window, clean) = (0, 0, 0, PAGE, true);
            let header = Header {
                id,
                generation,
                capacity,
                trim,
                window,
                epoch,
                node,
                epoch_start,
                durable,
                written_at,
                clean,
                origin,
                mark,
            };
            assert_eq!(slot(&header.encode()), Slot::Valid(header));
            header
        };
        let other_id = Slot::Valid(Header { id: [2; 16], ..valid(3) });
        let [one, two] = [1, 2].map(|generation| Slot::Valid(valid(generation)));
        let [damaged, empty, future, other] =
            [Slot::Damaged, Slot::Empty, Slot::Future, Slot::Other];
        let rows = [
            ([one, two], Choice::Slot(1)),
            ([two, two], Choice::Conflict),
            ([one, other_id], Choice::Conflict),
            ([Slot::Valid(Header { epoch: 1, ..valid(1) }), two], Choice::Slot(0)),
            ([one, damaged], Choice::Slot(0)),
            ([one, empty], Choice::Slot(0)),
            ([one, other], Choice::Slot(0)),
            ([damaged, damaged], Choice::Damaged),
            ([damaged, empty], Choice::Damaged),
            ([damaged, other], Choice::Damaged),
            ([empty, empty], Choice::NotFormatted),
            ([other, other], Choice::NotAWal),
            ([other, empty], Choice::NotAWal),
            ([future, one], Choice::Future),
            ([future, damaged], Choice::Future),
        ];
        for ([first, second], choice) in rows {
            assert_eq!(choose(&[first, second]), choice, "{first:?}, {second:?}");
            let turned = match choice {
                Choice::Slot(index) => Choice::Slot(1 - index),
                choice => choice,
            };
            assert_eq!(choose(&[second, first]), turned, "{second:?}, {first:?}");
        }
    }
}
