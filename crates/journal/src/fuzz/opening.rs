//! Whole caches.

use std::collections::BTreeMap;

use alluvium_device::PAGE_BYTES;

use super::hint::hint_of;
use super::reference::{RECORDS_AT, checksum, head, hint_entry};
use super::{Checked, Image, Input, MIB, SALT, put_file, reference};
use crate::files::sim::SimDirectory;
use crate::hash::KeyHasher;
use crate::inspect::inspect_in;
use crate::{Cache, Error, HintState, Options};

const CACHE_ID: [u8; 16] = [7; 16];
const HASH_KEY: [u8; 16] = [9; 16];

/// The files of a cache under construction, and what must be found in them.
struct Files {
    directory: SimDirectory,
    /// The records of each journal, by number; without journals whose salt cannot be determined.
    journals: BTreeMap<u64, Vec<reference::Record>>,
    /// The files do not contradict each other, so the expected contents are known.
    is_honest: bool,
}

impl Files {
    fn new(input: &mut Input<'_>) -> Self {
        let directory = SimDirectory::default();
        let journal_bytes = match input.u8() % 32 {
            1 => input.u64(),
            2 => 0,
            _ => MIB as u64,
        };
        let fields: [(usize, &[u8]); 3] =
            [(16, &CACHE_ID), (32, &HASH_KEY), (48, &journal_bytes.to_le_bytes())];
        let mut identity = head(b"ALLUVJC1", &fields);
        if input.once_in(64) {
            identity[input.u8() as usize % 64] ^= 1 << (input.u8() % 8);
        }
        put_file(&directory, "cache", &identity, PAGE_BYTES);
        let mut files = Self { directory, journals: BTreeMap::new(), is_honest: true };
        let mut number = [0, 5, (1 << 20) - 2, 999_999][input.u8() as usize % 4];
        for _ in 0..1 + input.u8() % 3 {
            files.journal(input, number);
            number += 1 + input.below(300);
        }
        if input.once_in(8) {
            let names = ["x.tmp", "000000000003.hint", "18446744073709551615.journal", "1.journal"];
            put_file(&files.directory, names[input.u8() as usize % names.len()], b"what", 9);
        }
        files
    }

    fn journal(&mut self, input: &mut Input<'_>, number: u64) {
        let salt = SALT + number;
        let pieces = input.u8() as usize % 12;
        let mut bytes = Image::new(input, salt, pieces).bytes;
        // The bytes in the file: a record that was cut within zeroes is complete there.
        let in_file = |bytes: &[u8], len: usize| {
            let mut file = bytes.to_vec();
            file.resize(len, 0);
            reference::walk(&file, salt)
        };
        let walked = in_file(&bytes, MIB.max(bytes.len()));
        let mut named = number;
        let mut form = 0u8;
        match input.u8() % 32 {
            1 => named ^= 1,
            // 1 is a known form.
            2 => form = 2 + input.u8() % 3,
            _ => {}
        }
        let fields: [(usize, &[u8]); 4] =
            [(12, &[form]), (16, &CACHE_ID), (32, &named.to_le_bytes()), (40, &salt.to_le_bytes())];
        bytes[..64].copy_from_slice(&head(b"ALLUVJRN", &fields));
        if input.once_in(16) {
            bytes[input.u8() as usize % 64] ^= 1 << (input.u8() % 8);
        }
        let page_is_right =
            bytes[..64] == head(b"ALLUVJRN", &fields) && named == number && form == 0;
        let has_hint = match input.u8() % 4 {
            // A hint that describes the records, also where it predates the damage.
            1 => {
                let hasher = KeyHasher::new(&HASH_KEY);
                let entry = |record: &reference::Record| {
                    let hash = hasher.hash(&record.key);
                    hint_entry(hash.high, hash.fingerprint, record)
                };
                let entries: Vec<_> = walked.records.iter().map(entry).collect();
                let hint = reference::hint(salt, walked.end, &entries);
                put_file(&self.directory, &format!("{number:012}.hint"), &hint, hint.len());
                true
            }
            // A hint with false entries and valid checksums.
            2 if input.once_in(2) => {
                let mut hint = hint_of(input);
                let fields =
                    [(12, &hint[12..16]), (16, &salt.to_le_bytes()[..]), (24, &hint[24..32])];
                let page = head(b"ALLUVHNT", &fields);
                hint[..64].copy_from_slice(&page);
                for (index, block) in
                    hint[RECORDS_AT..].chunks_mut(reference::HINT_BLOCK).enumerate()
                {
                    let crc = checksum(salt, index as u32, &block[4..]);
                    block[..4].copy_from_slice(&crc.to_le_bytes());
                }
                put_file(&self.directory, &format!("{number:012}.hint"), &hint, hint.len());
                self.is_honest = false;
                true
            }
            _ => false,
        };
        let len = match input.u8() % 4 {
            1 => bytes.len().next_multiple_of(PAGE_BYTES),
            2 if input.once_in(8) => {
                // Truncated by whatever cause.
                self.is_honest = false;
                bytes.len() / 2
            }
            _ => MIB.max(bytes.len()),
        };
        put_file(&self.directory, &format!("{number:012}.journal"), &bytes, len);
        self.is_honest &= bytes.len() <= MIB && walked.searched < 16 * bytes.len();
        if len < MIB {
            self.is_honest &= in_file(&bytes, len).records == walked.records;
        }
        if page_is_right || has_hint {
            self.journals.insert(number, walked.records);
        }
    }

    /// Returns the newest record of each key, if that is a value that has not expired at the time
    /// `now`.
    fn newest(&self, now: u64) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut newest = BTreeMap::new();
        for record in self.journals.values().flatten() {
            if record.is_tombstone || record.expiry.is_some_and(|at| at <= now) {
                newest.remove(&record.key);
            } else {
                newest.insert(record.key.clone(), record.value.clone());
            }
        }
        newest
    }
}

fn contents(cache: &Cache) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Error> {
    cache
        .iter()
        .map(|entry| entry.map(|entry| (entry.key().to_vec(), entry.value().to_vec())))
        .collect()
}

fn failed(what: &'static str) -> impl FnOnce(Error) -> String {
    move |error| format!("{what}: {error}")
}

/// Checks arbitrary files of a cache: it is refused or opens, has the contents that the format
/// defines, and is usable.
pub fn opening(data: &[u8]) -> Checked {
    let mut input = Input(data);
    let files = Files::new(&mut input);
    let mut values = BTreeMap::new();
    let inspected = inspect_in(&files.directory, |report| {
        values.insert(report.number.0, (report.values + report.tombstones, report.hint));
        Ok::<_, Error>(())
    });
    let options = Options {
        journal_bytes: MIB,
        memory_bytes: 4 * MIB,
        max_disk_bytes: 64 << 20,
        ..Options::default()
    };
    let open = || Cache::open_in(Box::new(files.directory.clone()), options.clone());
    let cache = match open() {
        Ok(cache) => cache,
        Err(Error::NoCache { .. }) => return Ok(()),
        Err(error) => return Err(format!("the cache does not open: {error}")),
    };
    inspected.map_err(failed("the cache cannot be inspected"))?;
    if files.is_honest {
        let expected = files.newest(crate::clock::now_millis());
        let found = contents(&cache).map_err(failed("iterating"))?;
        if found != expected {
            return Err(format!("the keys are {:?}, not {:?}", found.keys(), expected.keys()));
        }
        for (key, value) in &expected {
            let found = cache.get(key).map_err(failed("reading"))?;
            if found.as_deref() != Some(&value[..]) {
                return Err(format!("{key:?} has another value"));
            }
        }
        for (number, records) in &files.journals {
            let seen = values.get(number).copied().unwrap_or_default();
            if seen.0 != records.len() as u64 || seen.1 == HintState::Mismatch {
                return Err(format!("journal {number}: {seen:?}, not {} records", records.len()));
            }
        }
    }
    // Whatever it contains, no read returns another key's value, and writes succeed. An iteration
    // asks the index only where a record was replaced and trusts hints: if a hint omits that, it
    // may return earlier values too.
    let mut before = BTreeMap::<_, Vec<_>>::new();
    for entry in cache.iter().collect::<Result<Vec<_>, _>>().unwrap_or_default() {
        before.entry(entry.key().to_vec()).or_default().push(entry.value().to_vec());
    }
    for variant in 0..8 {
        let key = [b'k', variant];
        if let Ok(Some(value)) = cache.get(&key)
            && before.get(&key[..]).is_some_and(|seen| seen.iter().all(|seen| **seen != *value))
        {
            return Err(format!("a read and an iteration of {key:?} disagree"));
        }
        cache.put(&key, &[variant; 50]).map_err(failed("writing"))?;
    }
    cache.delete(&[b'k', 0]).map_err(failed("deleting"))?;
    cache.close().map_err(failed("closing"))?;
    let cache = open().map_err(failed("opening it again"))?;
    for variant in 0..8 {
        let value = cache.get(&[b'k', variant]).map_err(failed("reading what was written"))?;
        let expected = (variant > 0).then_some([variant; 50]);
        if value.as_deref() != expected.as_ref().map(|value| &value[..]) {
            return Err(format!("the value written to variant {variant} is missing"));
        }
    }
    cache.close().map_err(failed("closing again"))
}
