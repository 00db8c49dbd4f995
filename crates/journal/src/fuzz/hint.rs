//! Hints.

use super::reference::{RECORDS_AT, checksum, head, hint_entries, hint_entry};
use super::{Checked, Input, MIB, SALT, put_file, reference};
use crate::files::sim::SimDirectory;
use crate::hint::{self, Entry};
use crate::position::JournalNumber;
use crate::record::Salt;

/// Checks arbitrary bytes as a hint: it is accepted if it is valid by the format, and gives the
/// same entries.
pub fn hints(data: &[u8]) -> Checked {
    const NUMBER: JournalNumber = JournalNumber(7);
    let mut input = Input(data);
    let mut bytes = hint_of(&mut input);
    let mut len = bytes.len();
    match input.u8() % 8 {
        1 => len = len.saturating_sub(input.below(1 << 16) as usize),
        2 => {
            let at = input.below(1 << 16) as usize % len;
            bytes[at] ^= 1 << (input.u8() % 8);
        }
        3 => {
            bytes.extend_from_slice(input.bytes(100));
            len = bytes.len();
        }
        _ => {}
    }
    bytes.truncate(len);
    let directory = SimDirectory::default();
    put_file(&directory, &hint::file_name(NUMBER), &bytes, len);
    let mut found = Vec::new();
    let head = hint::read_head(&directory, NUMBER, MIB).filter(|it| it.salt == Salt(SALT));
    let is_whole = match head {
        None => false,
        Some(head) => hint::read(&directory, NUMBER, head.salt, head, |entries| {
            found.extend_from_slice(entries);
            Ok::<_, String>(())
        })?,
    };
    let expected = hint_entries(&bytes, SALT, MIB);
    let written: Vec<_> = found.iter().map(bytes_of).collect();
    match expected {
        Some(expected) if is_whole && expected == written => Ok(()),
        None if !is_whole => Ok(()),
        expected => Err(format!(
            "{} entries, complete: {is_whole}; by the format {:?}",
            found.len(),
            expected.map(|all| all.len())
        )),
    }
}

/// Creates a hint of any journal, in some cases invalid with valid checksums.
pub(super) fn hint_of(input: &mut Input<'_>) -> Vec<u8> {
    let end = match input.u8() % 8 {
        1 => input.u64(),
        2 => MIB as u64 + 8,
        3 => 4099,
        4 => 4096,
        _ => MIB as u64,
    };
    let count = match input.u8() % 8 {
        1 => 2730,
        2 => 2731,
        3 => 6000,
        _ => input.below(40) as usize,
    };
    let mut entries = Vec::new();
    let mut first = 512;
    for index in 0..count {
        let len = 3 + u32::from(input.u8() % 4);
        let mut entry = [0; 24];
        entry[..8]
            .copy_from_slice(&(((index as u64) << 58) | (index as u64 & 0x3ff)).to_le_bytes());
        entry[8..16].copy_from_slice(&(index as u64 * 77).to_le_bytes());
        entry[16..20].copy_from_slice(&u32::to_le_bytes(first));
        entry[20..].copy_from_slice(&len.to_le_bytes());
        if input.once_in(64) {
            entry[input.u8() as usize % 24] ^= input.u8();
        }
        first += len;
        entries.push(entry);
    }
    let mut bytes =
        reference::hint(if input.once_in(16) { SALT ^ 1 } else { SALT }, end as usize, &entries);
    match input.u8() % 8 {
        // A wrong number of entries.
        1 => {
            let fields = [(12, input.bytes(4)), (16, &bytes[16..24]), (24, &bytes[24..32])];
            let page = head(b"ALLUVHNT", &fields);
            bytes[..64].copy_from_slice(&page);
        }
        // A block with a wrong number, or at a wrong position.
        2 if bytes.len() > RECORDS_AT => {
            let block = &mut bytes[RECORDS_AT..RECORDS_AT + reference::HINT_BLOCK];
            block[4..8].copy_from_slice(&input.array::<4>());
            let crc = checksum(SALT, u32::from(input.u8() % 4 == 3), &block[4..]);
            block[..4].copy_from_slice(&crc.to_le_bytes());
        }
        _ => {}
    }
    bytes
}

/// Returns an entry as encoded in a hint.
fn bytes_of(entry: &Entry) -> [u8; 24] {
    let record = reference::Record {
        at: entry.first.byte(),
        len: entry.len_bytes,
        is_tombstone: entry.is_tombstone,
        expiry: entry.expires.then_some(0),
        key: Vec::new(),
        value: Vec::new(),
    };
    hint_entry(entry.hash.high, entry.hash.fingerprint, &record)
}
