//! Inspection of a cache without changing it, also while it is in use.

use std::io;
use std::path::Path;

use alluvium_device::Arena;

use crate::blocks::Blocks;
use crate::clear::{is_of_a_cache, is_set_aside};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::files::{Directory, NotAFile, RealDirectory};
use crate::hash::KeyHasher;
use crate::hint::{self, Entry, Sum};
use crate::journal::{FIRST_RECORD, file_name};
use crate::open::{identity_of, journal_numbers, probe_journal};
use crate::options::Compression;
use crate::position::JournalNumber;
use crate::record::Kind;
use crate::sync::Arc;
use crate::walk::{Found, Walk};

/// What one journal contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JournalReport {
    /// The number of the journal, which is part of its file name.
    pub number: JournalNumber,
    /// The compression of the journal.
    pub compression: Compression,
    /// Size of the file, in bytes.
    pub file_bytes: u64,
    /// The end of the last record, in bytes from the beginning of the plain journal.
    pub end_bytes: u64,
    /// Number of records with a value, whether or not they are the newest of their keys.
    pub values: u64,
    /// Number of `values` that have expired.
    pub expired: u64,
    /// Number of tombstones: records of the removal of a key.
    pub tombstones: u64,
    /// Total bytes of keys.
    pub key_bytes: u64,
    /// Total bytes of values.
    pub value_bytes: u64,
    /// Bytes between records that are not a record or cannot be read, and unreadable bytes behind
    /// the last record; for a compressed journal, decompressed bytes. Includes the bytes in front
    /// of the first record if they are not a valid header (an opening needs no header as long as
    /// there is the hint), and the bytes by which the file is longer than a journal (an opening
    /// cuts them off).
    pub damaged_bytes: u64,
    /// The state of the hint.
    pub hint: HintState,
}

impl JournalReport {
    /// Returns the name of the journal's file in the cache's directory.
    pub fn file_name(&self) -> String {
        file_name(self.number)
    }
}

/// Whether an opening can use a journal's hint instead of reading the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HintState {
    /// There is no usable hint. The newest journal has none until the cache is closed.
    #[default]
    Missing,
    /// The hint agrees with every record of the journal. For a damaged journal: the hint itself is
    /// intact.
    Valid,
    /// The hint disagrees with the journal.
    Mismatch,
}

/// Reads all journals of the cache in `path`, oldest first, and passes a report of each to `each`.
/// Returns the size of a journal, in bytes. Writes nothing.
///
/// Needs the memory of one journal. If the cache is in use, what is not yet written is missing, and
/// journals may appear and disappear.
///
/// # Errors
/// There is no usable cache ([`Error::NoCache`]); a file cannot be read for a reason other than
/// unreadable media, which is damage; there is no memory for a journal; an error of `each`, which
/// ends the inspection.
pub fn inspect<E: From<Error>>(
    path: impl AsRef<Path>,
    each: impl FnMut(JournalReport) -> std::result::Result<(), E>,
) -> std::result::Result<usize, E> {
    let path = path.as_ref();
    let directory =
        RealDirectory::open_to_read(path).map_err(Error::io(path, "opening the directory"))?;
    inspect_in(&directory, each)
}

pub(crate) fn inspect_in<E: From<Error>>(
    directory: &dyn Directory,
    mut each: impl FnMut(JournalReport) -> std::result::Result<(), E>,
) -> std::result::Result<usize, E> {
    let names = directory.list().map_err(Error::io(directory.path(), "listing the files"))?;
    let identity = identity_of(directory, &names)?;
    let journal_bytes = identity.journal_bytes;
    let no_memory = Error::no_memory(directory.path(), "a journal");
    let mut memory = Arena::new(journal_bytes).map_err(no_memory)?;
    for number in journal_numbers(&names) {
        let report = match report(directory, identity, number, memory.memory()) {
            // Removed since the files were listed.
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                continue;
            }
            report => report?,
        };
        // Removed meanwhile and then truncated: the report is not meaningful.
        if is_gone(directory, number) {
            continue;
        }
        each(report)?;
    }
    names.iter().try_for_each(|name| check_is_file(directory, name))?;
    Ok(journal_bytes)
}

/// Fails if a name of one of the cache's files belongs to something other than a file, unless it
/// was set aside.
fn check_is_file(directory: &dyn Directory, name: &str) -> Result<()> {
    if !is_of_a_cache(name) || is_set_aside(name) {
        return Ok(());
    }
    match directory.open(name) {
        Err(error) if NotAFile::from_error(&error).is_some() => {
            Err(Error::io(directory.path().join(name), "opening a file")(error))
        }
        // It has not been checked.
        _ => Ok(()),
    }
}

fn is_gone(directory: &dyn Directory, number: JournalNumber) -> bool {
    let opened = directory.open(&file_name(number));
    opened.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn report(
    directory: &dyn Directory,
    identity: crate::open::Identity,
    number: JournalNumber,
    memory: &mut [u8],
) -> Result<JournalReport> {
    let failed = |action| Error::io(directory.path().join(file_name(number)), action);
    let mut report = JournalReport {
        number,
        compression: Compression::None,
        file_bytes: 0,
        end_bytes: 0,
        values: 0,
        expired: 0,
        tombstones: 0,
        key_bytes: 0,
        value_bytes: 0,
        damaged_bytes: 0,
        hint: HintState::Missing,
    };
    // Nothing is read twice here, so nothing is cached.
    let blocks = Arc::new(Blocks::new(0));
    let Some(journal) = probe_journal(directory, identity, number, &blocks)? else {
        report.damaged_bytes = FIRST_RECORD as u64;
        return Ok(report);
    };
    report.file_bytes = journal.file.len_bytes().map_err(failed("asking for the length"))?;
    if let Some(frames) = &journal.frames {
        report.compression = frames.compression();
    }
    let clock = Clock::default();
    let (bytes, unreadable) = journal.read(directory.path(), memory)?;
    let mut walk = Walk::new(bytes, journal.salt);
    let hasher = KeyHasher::new(&identity.hash_key);
    let mut in_journal = Sum::default();
    for found in walk.by_ref() {
        match found {
            Found::Damage(range) => report.damaged_bytes += range.len() as u64,
            Found::Record(first, record) => {
                in_journal.add(&Entry::of(hasher.hash(record.key()), first, &record));
                report.key_bytes += record.key().len() as u64;
                match record.header().kind {
                    Kind::Tombstone => report.tombstones += 1,
                    Kind::Value => {
                        report.values += 1;
                        report.expired += u64::from(record.has_expired(&clock));
                        report.value_bytes += record.value().len() as u64;
                    }
                }
            }
        }
    }
    report.end_bytes = walk.end() as u64;
    // A record that the hint has and the journal does not is damaged, wherever that is; so is a
    // missing part of a compressed journal.
    let hinted = journal.hint.map_or(0, |head| head.end as u64);
    report.damaged_bytes +=
        journal.lost_tail(walk.end(), &unreadable).max(hinted.saturating_sub(report.end_bytes));
    if let Some(head) = journal.hint {
        let mut in_hint = Sum::default();
        let is_whole = hint::read(directory, number, journal.salt, head, |some| {
            some.iter().for_each(|entry| in_hint.add(entry));
            Ok::<_, Error>(())
        })?;
        let is_right = is_whole && (report.damaged_bytes > 0 || in_hint == in_journal);
        report.hint = if is_right { HintState::Valid } else { HintState::Mismatch };
    }
    if journal.has_lost_header {
        report.damaged_bytes += FIRST_RECORD as u64;
    }
    if journal.frames.is_none() {
        report.damaged_bytes += report.file_bytes.saturating_sub(identity.journal_bytes as u64);
    }
    Ok(report)
}
