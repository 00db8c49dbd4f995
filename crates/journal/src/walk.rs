//! A walk over the records of a journal in order, past damage.

use std::ops::Range;

use alluvium_device::GRANULE_BYTES;

use crate::journal::FIRST_RECORD;
use crate::position::Granule;
use crate::record::{HEADER_BYTES, Record, Salt};

/// The next item of a journal.
#[derive(Debug)]
pub(crate) enum Found<'a> {
    Record(Granule, Record<'a>),
    /// Bytes that are not a record, before one that is; or up to the end if the search was given
    /// up, and it is unknown what is behind them.
    Damage(Range<usize>),
}

/// Searching for records computes checksums over at most this many times the bytes of the journal:
/// values may be crafted to look like headers of long records.
const MAX_SEARCHES: usize = 16;

/// Returns the limit for a journal of this many bytes.
pub(crate) fn search_bytes_of(journal_bytes: usize) -> usize {
    journal_bytes.saturating_mul(MAX_SEARCHES)
}

/// An iterator over all records in the bytes of a journal, from the first one on. Ends after the
/// last record, or at the end of the bytes if the search for the next one was given up.
pub(crate) struct Walk<'a> {
    bytes: &'a [u8],
    salt: Salt,
    at: usize,
    /// Bytes that may still be checksummed without finding a record.
    search_bytes: usize,
}

impl<'a> Walk<'a> {
    /// Starts at the first record. `bytes`: from the beginning of the file.
    pub(crate) fn new(bytes: &'a [u8], salt: Salt) -> Self {
        Self::from(bytes, salt, FIRST_RECORD)
    }

    /// Starts at `at`, where a record begins.
    pub(crate) fn from(bytes: &'a [u8], salt: Salt, at: usize) -> Self {
        Self { bytes, salt, at, search_bytes: search_bytes_of(bytes.len()) }
    }

    /// Sets the search limit to what another walk of this journal has left.
    pub(crate) fn with_search_bytes(self, search_bytes: usize) -> Self {
        Self { search_bytes, ..self }
    }

    /// Returns what is left of [`search_bytes_of`].
    pub(crate) fn search_bytes(&self) -> usize {
        self.search_bytes
    }

    /// Returns the end of the last record so far.
    pub(crate) fn end(&self) -> usize {
        self.at
    }

    fn record_at(&mut self, at: usize) -> Option<Record<'a>> {
        let bytes = self.bytes.get(at..)?;
        let plausible = Record::trusted(bytes)?;
        let len = plausible.header().len_bytes();
        let checked = Record::checked(bytes, self.salt, Granule::at(at));
        if checked.is_none() {
            self.search_bytes = self.search_bytes.saturating_sub(len);
        }
        checked
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = Found<'a>;

    fn next(&mut self) -> Option<Found<'a>> {
        let start = self.at;
        if let Some(record) = self.record_at(start) {
            self.at = (start + record.header().padded_bytes()).min(self.bytes.len());
            return Some(Found::Record(Granule::at(start), record));
        }
        let mut at = start + GRANULE_BYTES;
        while at + HEADER_BYTES <= self.bytes.len() {
            if self.search_bytes == 0 {
                // What was not searched is not a torn tail.
                self.at = self.bytes.len();
                return Some(Found::Damage(start..self.at));
            }
            if self.record_at(at).is_some() {
                self.at = at;
                return Some(Found::Damage(start..at));
            }
            at += GRANULE_BYTES;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::position::JournalNumber;
    use crate::record::{Content, NewRecord};

    const SALT: Salt = Salt(3);

    fn journal(values: &[Vec<u8>]) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = vec![0; FIRST_RECORD];
        let starts = values
            .iter()
            .enumerate()
            .map(|(index, value)| {
                let key = index.to_le_bytes();
                let content = Content::Value { value, expires_at: None };
                let record = NewRecord { key: &key, content };
                let at = bytes.len();
                bytes.resize(at + record.len_bytes(), 0);
                record.write(&mut bytes[at..], SALT, JournalNumber(0), Granule::at(at));
                bytes.resize(bytes.len().next_multiple_of(GRANULE_BYTES), 0);
                at
            })
            .collect();
        (bytes, starts)
    }

    fn keys(bytes: &[u8]) -> (Vec<usize>, Vec<Range<usize>>, usize) {
        let mut walk = Walk::new(bytes, SALT);
        let (mut keys, mut damage) = (Vec::new(), Vec::new());
        for found in &mut walk {
            match found {
                Found::Record(_, record) => {
                    keys.push(usize::from_le_bytes(record.key().try_into().unwrap()));
                }
                Found::Damage(range) => damage.push(range),
            }
        }
        (keys, damage, walk.end())
    }

    proptest! {
        #[test]
        fn undamaged_records_are_found(
            values in vec(vec(any::<u8>(), 0..200), 1..30),
            hit in any::<proptest::sample::Index>(),
            zeroes in 0usize..2000,
        ) {
            let (mut bytes, starts) = journal(&values);
            let end = bytes.len();
            bytes.resize(end + zeroes / GRANULE_BYTES * GRANULE_BYTES, 0);
            let all: Vec<usize> = (0..values.len()).collect();
            prop_assert_eq!(keys(&bytes), (all, vec![], end));
            let hit = hit.index(values.len());
            bytes[starts[hit]] ^= 1;
            let left: Vec<usize> = (0..values.len()).filter(|at| *at != hit).collect();
            let next = starts.get(hit + 1);
            let expected: Vec<_> = next.map(|next| starts[hit]..*next).into_iter().collect();
            let expected_end = if next.is_some() { end } else { starts[hit] };
            prop_assert_eq!(keys(&bytes), (left, expected, expected_end));
        }
    }

    #[test]
    fn a_search_through_crafted_headers_is_bounded() {
        // Each granule looks like the header of a record of one MiB.
        let mut header = [0; HEADER_BYTES];
        header[4] = 1;
        header[6] = 1;
        header[8..12].copy_from_slice(&(1u32 << 20).to_le_bytes());
        let mut bytes = vec![0; FIRST_RECORD];
        while bytes.len() < 8 << 20 {
            bytes.extend_from_slice(&header);
        }
        let mut walk = Walk::new(&bytes, SALT);
        // It gives up, and reports the rest as unknown.
        let rest = FIRST_RECORD..bytes.len();
        assert!(matches!(walk.next(), Some(Found::Damage(range)) if range == rest));
        assert!(walk.next().is_none());
        assert_eq!((walk.end(), walk.search_bytes), (bytes.len(), 0));
    }
}
