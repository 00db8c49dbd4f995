//! The checks of the fuzz targets `cache_*` of `fuzz/`, as functions of bytes. They also run as an
//! everyday test, with their seeds and a bounded number of inputs. Compiled only in these two
//! builds.
//!
//! Each treats any bytes as a script, creates files from it whose checksums are about as often
//! right as wrong, and compares what the readers find with an implementation of
//! `docs/format/journal.md` that shares no code with them ([`reference`]). A failure is an `Err`
//! with the reason, or a panic.

mod hint;
mod opening;
mod reference;
#[cfg(test)]
mod tests;

use alluvium_device::{AlignedBuf, PAGE_BYTES};

use self::reference::{RECORDS_AT, checksum};
use crate::files::Directory;
use crate::files::sim::SimDirectory;
use crate::position::{Granule, JournalNumber};
use crate::record::{Content, Kind, NewRecord, Record, Salt};
use crate::walk::{Found, Walk};

pub use self::hint::hints;
pub use self::opening::opening;

type Checked = Result<(), String>;

const MIB: usize = 1 << 20;
const SALT: u64 = 0x5eed;
/// The maximum length of a value: more than a page, so that records lie across pages.
const MAX_VALUE: u64 = 6000;

/// The script. Zeroes follow its end, so that every input is complete.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next `len` bytes, or as many as are left.
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Returns a number below `bound`, which is at most 2^16.
    fn below(&mut self, bound: u64) -> u64 {
        let number = if bound <= 256 {
            u64::from(self.u8())
        } else {
            u64::from(u16::from_le_bytes(self.array()))
        };
        number % bound
    }

    /// Returns true with probability 1/n for random bytes, and false after the end.
    fn once_in(&mut self, n: u8) -> bool {
        self.u8() % n == 1
    }
}

/// The bytes of a journal under construction, without page 0.
struct Image {
    bytes: Vec<u8>,
    salt: u64,
}

impl Image {
    /// Creates up to `pieces` pieces: records, some of them with one error, and bytes that are not
    /// records.
    fn new(input: &mut Input<'_>, salt: u64, pieces: usize) -> Self {
        let mut image = Self { bytes: vec![0; RECORDS_AT], salt };
        for _ in 0..pieces {
            if input.is_empty() {
                break;
            }
            image.piece(input);
        }
        image
    }

    fn piece(&mut self, input: &mut Input<'_>) {
        match input.u8() % 16 {
            0..=9 => self.record(input),
            10 => {
                // Arbitrary bytes, at a granule.
                let len = input.u8() as usize;
                self.bytes.extend_from_slice(input.bytes(len));
            }
            11 => {
                let zeroes = input.below(5000) as usize;
                self.bytes.resize(self.bytes.len() + zeroes, 0);
            }
            12 | 13 => {
                let back = 1 + input.below(5000) as usize;
                let at = self.bytes.len().saturating_sub(back).max(RECORDS_AT);
                if let Some(byte) = self.bytes.get_mut(at) {
                    *byte ^= 1 << (input.u8() % 8);
                }
            }
            14 => {
                // A copy of existing bytes at another position.
                let len = input.below(300) as usize;
                let from = self.bytes.len().saturating_sub(len).max(RECORDS_AT) / 8 * 8;
                let copy = self.bytes[from..].to_vec();
                self.bytes.extend(copy);
            }
            _ => self.bytes.truncate(self.bytes.len().saturating_sub(8).max(RECORDS_AT)),
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }

    fn record(&mut self, input: &mut Input<'_>) {
        let at = self.bytes.len();
        // Few keys, so that records replace one another.
        let mut key = vec![b'k', input.u8() % 8];
        if input.once_in(8) {
            key.resize(1 + input.below(700) as usize, b'x');
        }
        let is_tombstone = input.u8() % 5 == 4;
        let expiry = match input.u8() % 6 {
            _ if is_tombstone => None,
            1 => Some(input.u64()),
            2 => Some(1),
            3 => Some(u64::MAX),
            _ => None,
        };
        let value = match is_tombstone {
            true => input.array::<8>().to_vec(),
            false => {
                let len = if input.once_in(6) { input.below(MAX_VALUE) } else { input.below(40) };
                let first = input.u8();
                (0..len).map(|at| first.wrapping_mul(at as u8)).collect()
            }
        };
        let mut bytes = vec![0; 16];
        bytes[4] = if is_tombstone { 2 } else { 1 };
        bytes[5] = u8::from(expiry.is_some());
        bytes[6..8].copy_from_slice(&(key.len() as u16).to_le_bytes());
        bytes[8..12].copy_from_slice(&(value.len() as u32).to_le_bytes());
        bytes.extend(expiry.iter().flat_map(|at| at.to_le_bytes()));
        bytes.extend(key);
        bytes.extend(value);
        let (mut salt, mut position) = (self.salt, (at / 8) as u32);
        match input.u8() % 32 {
            1 => bytes[4] = input.u8(),
            2 => bytes[5] = input.u8(),
            3 => bytes[6..8].copy_from_slice(&input.array::<2>()),
            4 => bytes[8..12].copy_from_slice(&input.array::<4>()),
            5 => bytes[8..10].copy_from_slice(&input.array::<2>()),
            6 => bytes[12] = input.u8(),
            7 => salt ^= 1,
            8 => position += 1,
            9 => bytes.truncate(bytes.len().saturating_sub(input.u8() as usize).max(16)),
            _ => {}
        }
        let crc = checksum(salt, position, &bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        self.bytes.extend(bytes);
    }
}

/// Checks arbitrary bytes behind a journal's header: exactly the records that are there are found,
/// and writing them again gives the same bytes.
pub fn records(data: &[u8]) -> Checked {
    let mut input = Input(data);
    let salt = if input.once_in(2) { input.u64() } else { SALT };
    let image = Image::new(&mut input, salt, usize::MAX);
    let bytes = &image.bytes;
    let expected = reference::walk(bytes, salt);
    let mut walk = Walk::new(bytes, Salt(salt));
    let (mut found, mut damage) = (Vec::new(), Vec::new());
    for next in walk.by_ref() {
        match next {
            Found::Damage(range) => damage.push((range.start, range.end)),
            Found::Record(first, record) => found.push(again(bytes, salt, first, &record)?),
        }
    }
    // The search for the next record has a limit, which only crafted bytes reach.
    let gives_up = expected.searched >= 16 * bytes.len();
    let is_right = match gives_up {
        true => expected.records.starts_with(&found),
        false => {
            expected.records == found && expected.damage == damage && expected.end == walk.end()
        }
    };
    if is_right {
        return Ok(());
    }
    let positions = |records: &[reference::Record]| {
        records.iter().map(|record| (record.at, record.len)).collect::<Vec<_>>()
    };
    Err(format!(
        "records at {:?}, damage {damage:?}, end {}; by the format at {:?}, damage {:?}, end {}",
        positions(&found),
        walk.end(),
        positions(&expected.records),
        expected.damage,
        expected.end
    ))
}

/// Encodes a record that was read, and checks that this gives the same bytes.
fn again(
    bytes: &[u8],
    salt: u64,
    first: Granule,
    record: &Record<'_>,
) -> Result<reference::Record, String> {
    let is_tombstone = record.header().kind == Kind::Tombstone;
    let content = match is_tombstone {
        true => Content::Tombstone { origin: record.origin() },
        false => Content::Value { value: record.value(), expires_at: record.expires_at() },
    };
    let new = NewRecord { key: record.key(), content };
    let (at, len) = (first.byte(), record.header().len_bytes());
    let mut written = vec![0xee; new.len_bytes()];
    new.write(&mut written, Salt(salt), JournalNumber(0), first);
    if written != bytes[at..at + len] {
        return Err(format!("the record at {at} is not written as it was read"));
    }
    let (key, value) = (record.key().to_vec(), record.value().to_vec());
    Ok(reference::Record { at, len, is_tombstone, expiry: record.expires_at(), key, value })
}

fn put_file(directory: &SimDirectory, name: &str, bytes: &[u8], len: usize) {
    let mut pages = AlignedBuf::zeroed(len.max(bytes.len()).max(1).next_multiple_of(PAGE_BYTES));
    pages[..bytes.len()].copy_from_slice(bytes);
    // Two may have the same name: the first one counts.
    let Ok(file) = directory.create(name, 0) else { return };
    file.write_at(0, &pages).expect("in memory");
    if len < bytes.len() {
        file.truncate(len as u64).expect("in memory");
    }
}
