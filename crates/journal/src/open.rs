//! Opening a cache: its identity, its journals, the index. `cache.rs` starts the background threads
//! afterwards.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use alluvium_device::{AlignedBuf, PAGE_BYTES};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::allocator::first_journal;
use crate::blocks::Blocks;
use crate::clear::{SetAside, first_set_aside_name, is_foreign, is_of_a_cache, set_aside_name};
use crate::clock::Clock;
use crate::disk_budget::hint_headroom_bytes;
use crate::error::{Error, Result};
use crate::fetch::Source;
use crate::fields::{self, Fields, u32_at, u64_at};
use crate::files::{Directory, File, NotAFile, OpenFile};
use crate::flush::Flush;
use crate::frames::Frames;
use crate::hash::KeyHasher;
use crate::hint::{self, Head};
use crate::index::Index;
use crate::journal::{
    CacheId, Counts, FIRST_RECORD, Journal, JournalHeader, NAME_DIGITS, NAME_END, file_name,
};
use crate::journals::Journals;
use crate::maintenance::Maintenance;
use crate::options::{Compression, Contents, Options, WhenFull, is_size};
use crate::pool::Pool;
use crate::position::{JournalNumber, MAX_SPAN};
use crate::record::Salt;
use crate::recover::{Reading, is_tombstone};
use crate::shared::{CHUNK_BYTES, Counters, Shared};
use crate::sync::{Arc, ArcSwap};
use crate::unreadable::{Unreadable, is_of_media};
use crate::waker::Waker;

pub(crate) const IDENTITY: &str = "cache";
const IDENTITY_TEMPORARY: &str = "cache.tmp";
const MAGIC: &[u8; 8] = b"ALLUVJC1";
const CONTENTS_AT: usize = 56;
/// The number of journals may exceed that of plain ones within the budget by this factor, when they
/// are compressed.
const MOST_COMPRESSED: u64 = 8;

/// The contents of the file `cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) id: CacheId,
    pub(crate) hash_key: [u8; 16],
    pub(crate) journal_bytes: usize,
    pub(crate) contents: Contents,
}

impl Identity {
    fn random(journal_bytes: usize, contents: Contents) -> Self {
        let id = CacheId(Uuid::new_v4().into_bytes());
        Self { id, hash_key: secret(), journal_bytes, contents }
    }

    pub(crate) fn page(&self) -> AlignedBuf {
        let mut page = AlignedBuf::zeroed(PAGE_BYTES);
        page[16..32].copy_from_slice(&self.id.0);
        page[32..48].copy_from_slice(&self.hash_key);
        page[48..56].copy_from_slice(&(self.journal_bytes as u64).to_le_bytes());
        page[CONTENTS_AT..CONTENTS_AT + 4].copy_from_slice(&self.contents.0);
        fields::seal(&mut page, MAGIC);
        page
    }

    fn parse(page: &[u8]) -> std::result::Result<Self, &'static str> {
        let fields = fields::unseal(page, MAGIC)?;
        let journal_bytes = usize::try_from(u64_at(fields, 48)).ok().filter(|it| is_size(*it));
        Ok(Self {
            id: CacheId(fields[16..32].try_into().expect("sixteen")),
            hash_key: fields[32..48].try_into().expect("sixteen"),
            journal_bytes: journal_bytes.ok_or("its journal size is invalid")?,
            contents: contents(fields),
        })
    }
}

/// Returns the contents tag, whatever the version of the file.
fn contents(fields: &Fields) -> Contents {
    Contents(u32_at(fields, CONTENTS_AT).to_le_bytes())
}

/// Returns 128 random bits. (A UUID of version 4 has 6 that are not random.)
fn secret() -> [u8; 16] {
    let (one, other) = (Uuid::new_v4().into_bytes(), Uuid::new_v4().into_bytes());
    let mut secret = [0; 16];
    secret[..8].copy_from_slice(&one[8..]);
    secret[8..].copy_from_slice(&other[8..]);
    secret[0] ^= one[0];
    secret[8] ^= other[0];
    secret
}

/// What an opening found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Number of journals. (Not included are those without a record and those evicted for lack of
    /// space.)
    pub journals: usize,
    /// Number of these that had no usable hint and were read whole.
    pub scanned: usize,
    /// Number of keys, including those that have expired.
    pub entries: usize,
    /// Unused bytes: those between records that were damaged or could not be read, those that could
    /// not be read after the last record of a journal without a hint, and whole journals without a
    /// header.
    pub damaged_bytes: u64,
}

/// A journal that exists when the cache is opened.
pub(crate) struct ExistingJournal {
    pub(crate) number: JournalNumber,
    pub(crate) salt: Salt,
    pub(crate) file: OpenFile,
    /// `Some` if it is compressed.
    pub(crate) frames: Option<Arc<Frames>>,
    pub(crate) hint: Option<Head>,
    pub(crate) counts: Arc<Counts>,
    /// Its first page is damaged.
    pub(crate) has_lost_header: bool,
}

impl ExistingJournal {
    /// Reads its bytes, as those of a plain journal, into the memory of a whole journal. The
    /// header, and what cannot be read, become zeroes.
    pub(crate) fn read<'m>(
        &self,
        path: &Path,
        memory: &'m mut [u8],
    ) -> Result<(&'m [u8], Unreadable)> {
        let path = path.join(file_name(self.number));
        let unreadable = Unreadable::default();
        let source = Source::file(&*self.file, &path).past(&unreadable);
        let whole = match &self.frames {
            Some(frames) => {
                frames.read_whole(source, memory)?;
                frames.end()
            }
            None => {
                let len = self.file.len_bytes();
                let len = len.map_err(Error::io(&path, "asking for the length"))?;
                let len = usize::try_from(len).unwrap_or(usize::MAX).min(memory.len());
                let whole = len.next_multiple_of(PAGE_BYTES).min(memory.len()).max(FIRST_RECORD);
                let (header, records) = memory[..whole].split_at_mut(FIRST_RECORD);
                header.fill(0);
                source.read_at(FIRST_RECORD, records, "reading a journal")?;
                whole
            }
        };
        unreadable.log(&path);
        Ok((&memory[..whole], unreadable))
    }

    /// Returns the number of damaged bytes after the last record, which ends at `end`. A
    /// compressed journal was sealed and states its end. In a plain one only unreadable bytes
    /// count, since the rest may be a torn tail.
    pub(crate) fn lost_tail(&self, end: usize, unreadable: &Unreadable) -> u64 {
        let lost = match &self.frames {
            Some(frames) => frames.end().saturating_sub(end),
            None => unreadable.bytes_after(end),
        };
        lost as u64
    }
}

/// The newest journal of an opening that may still fail: its file is removed on failure, so that
/// repeated attempts do not accumulate journals.
struct FirstJournal<'a> {
    directory: &'a dyn Directory,
    /// `None` once the journal is kept.
    journal: Option<Journal>,
}

impl FirstJournal<'_> {
    fn keep(mut self) -> Journal {
        self.journal.take().expect("kept once")
    }
}

impl Drop for FirstJournal<'_> {
    fn drop(&mut self) {
        if let Some(journal) = &self.journal {
            let _ = self.directory.remove(&file_name(journal.number));
        }
    }
}

/// Builds the in-memory state of an open cache; no thread is started.
pub(crate) fn open(directory: Box<dyn Directory>, options: Options) -> Result<(Shared, Recovered)> {
    let path = directory.path().to_owned();
    let mut names = directory.list().map_err(Error::io(&path, "listing the files"))?;
    // The directory may by mistake belong to another program too: its files stay.
    for name in names.extract_if(.., |name| name.ends_with(".tmp") && is_of_a_cache(name)) {
        remove_if_file(&*directory, &name, "removing an unfinished file")?;
    }
    let mut numbers = journal_numbers(&names);
    if !names.iter().any(|name| name == IDENTITY) && numbers.is_empty() && options.create {
        if let Some(reason) = options.fault(options.journal_bytes) {
            return Err(Error::NoCache { path, reason });
        }
        // The documentation advises removing the directory to remove a cache.
        if let Some(other) = names.iter().find(|name| is_foreign(name)) {
            let reason = format!(
                "there is no cache, and the directory contains other files (`{other}`): choose an \
                 empty or a new directory"
            );
            return Err(Error::NoCache { path, reason });
        }
        make_identity(&*directory, Identity::random(options.journal_bytes, options.contents))
            .map_err(Error::io(path.join(IDENTITY), "writing the cache's identity"))?;
        names.push(IDENTITY.into());
    }
    let identity = identity_of(&*directory, &names)?;
    check_contents(&path, identity.contents, options.contents)?;
    let journal_bytes = identity.journal_bytes;
    if let Some(reason) = options.fault(journal_bytes) {
        return Err(Error::NoCache { path, reason });
    }
    let hasher = KeyHasher::new(&identity.hash_key);
    let memory = options.memory(journal_bytes);
    let pool = Pool::new(journal_bytes, memory.arenas);
    let blocks = Arc::new(Blocks::new(memory.block_bytes));

    let (mut old, mut gone, mut set_aside_bytes) = (Vec::new(), Vec::new(), 0);
    for number in &numbers {
        let name = file_name(*number);
        let failed = |action| Error::io(path.join(&name), action);
        let (len, why) = match probe_journal(&*directory, identity, *number, &blocks) {
            Ok(Some(journal)) => {
                old.push(journal);
                continue;
            }
            Ok(None) => {
                let file = directory.open(&name).map_err(failed("opening a journal"))?;
                let len = file.len_bytes().map_err(failed("asking for the length"))?;
                // A file longer than a journal cannot be a journal whose creation was interrupted,
                // and searching all of it could take very long: a sparse file may have any length.
                let may_be_blank = len <= journal_bytes as u64;
                if may_be_blank && is_blank(&*file, len).map_err(failed("reading a journal"))? {
                    // Its creation was interrupted.
                    directory.remove(&name).map_err(failed("removing an empty journal"))?;
                    gone.push(*number);
                    continue;
                }
                (len, "has no header of this cache, or cannot be decompressed")
            }
            Err(error) if is_not_a_file(&error) => (0, "is not a regular file"),
            Err(error) => return Err(error),
        };
        // A damaged journal, kept for inspection.
        let aside = set_aside_name(*number, &names);
        set_aside_bytes += len;
        tracing::warn!(
            "journal cache: {} {why}; it was renamed to {aside}",
            path.join(&name).display()
        );
        directory.rename(&name, &aside).map_err(failed("renaming an unusable journal"))?;
        names.push(aside);
        gone.push(*number);
    }
    // Its number may be arbitrary and belong to no journal: the remaining journals are not too far
    // behind it, and new ones need not follow it.
    numbers.retain(|number| !gone.contains(number));
    for name in
        names.iter().filter(|name| hint_number(name).is_some_and(|it| !numbers.contains(&it)))
    {
        remove_if_file(&*directory, name, "removing a hint without a journal")?;
    }
    // At least as many keys as the largest journal has; it is unknown how many keys the others
    // share with it.
    let expected =
        old.iter().filter_map(|old| old.hint).map(|head| head.entries).max().unwrap_or(0);
    let index = Index::with_capacity(expected).map_err(Error::no_memory(&path, "the index"))?;
    let next = JournalNumber(numbers.last().map_or(0, |last| last.0 + 1));
    if let Some(oldest) = numbers.first().filter(|oldest| next.0 - oldest.0 >= MAX_SPAN) {
        let reason = format!(
            "journal {oldest} is too far behind the newest one to distinguish their records: it \
             could not be read, or the cache was never open for long enough to move its records; \
             to give it up, remove {}",
            file_name(*oldest)
        );
        return Err(Error::NoCache { path, reason });
    }
    let slots = slots(&options, journal_bytes, &numbers, &path)?;
    let journals = Journals::new(slots, &options, journal_bytes);

    let slot = |number: JournalNumber| number.0 % slots as u64;
    // Numbers of journals that were set aside are skipped too, so that the name is free when an
    // operator restores the file.
    let is_taken = |number: &JournalNumber| {
        numbers.iter().any(|other| slot(*other) == slot(*number))
            || names.contains(&first_set_aside_name(*number))
    };
    let next = (next.0..).map(JournalNumber).find(|number| !is_taken(number));
    let next = next.expect("there are fewer journals than slots");
    let make = || first_journal(&*directory, identity.id, next, journal_bytes, &pool);
    let full = || {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        Error::io(path.join(file_name(next)), "creating a journal")(full)
    };
    // Before the journals are read, which may take minutes, so that an obstacle is reported at
    // once. And before hints are written: otherwise a process killed between the two steps would
    // leave less space to its successor than it had.
    let first =
        make()?.map(|journal| FirstJournal { directory: &*directory, journal: Some(journal) });
    let may_evict = options.when_full == WhenFull::Evict;
    // Reading the journals frees space if a process was killed and left a journal without a hint.
    if first.is_none() && !may_evict && old.iter().all(|old| old.hint.is_some()) {
        return Err(full());
    }

    let reading = Reading {
        directory: &*directory,
        journals: &old,
        index: &index,
        hasher: &hasher,
        pool: &pool,
        hint_headroom_bytes: first
            .is_some()
            .then(|| hint_headroom_bytes(options.when_full, journal_bytes)),
        hint_lock: Mutex::new(()),
        has_excess: AtomicBool::new(false),
    };
    let found = reading.read_all()?;
    let has_excess = reading.has_excess.into_inner();
    let mut unread = Vec::new();
    let mut recovered =
        Recovered { journals: old.len(), damaged_bytes: set_aside_bytes, ..Recovered::default() };
    for (old, found) in old.iter().zip(found) {
        if found.end == FIRST_RECORD && found.damaged_bytes == 0 {
            // Nothing was written to it before the process ended.
            let name = file_name(old.number);
            directory
                .remove(&name)
                .map_err(Error::io(path.join(&name), "removing an empty journal"))?;
            recovered.journals -= 1;
            continue;
        }
        recovered.scanned += usize::from(found.is_scanned);
        recovered.damaged_bytes += found.damaged_bytes;
        let counts = &old.counts;
        counts.end_bytes.store(found.end, Ordering::Relaxed);
        counts.is_damaged.store(found.damaged_bytes > 0, Ordering::Relaxed);
        // What could not be read may be readable at the next opening.
        let is_lost = found.is_scanned && !found.has_unread;
        if is_lost && old.hint.is_none() && old.frames.is_none() {
            let lost_bytes = usize::try_from(found.damaged_bytes).unwrap_or(usize::MAX);
            counts.lost_bytes.store(lost_bytes, Ordering::Relaxed);
        }
        // Tombstones that were moved here have an older origin; assuming a newer one only retains
        // them for longer.
        counts.count_tombstone(found.tombstone_bytes, old.number);
        if found.has_unread {
            unread.push(old.number);
        }
        journals.put(Arc::new(Journal {
            number: old.number,
            salt: old.salt,
            file: old.file.clone(),
            path: path.join(file_name(old.number)),
            file_bytes: found.file_bytes,
            frames: old.frames.clone(),
            arena: None,
            free_journals: AtomicUsize::new(0),
            counts: counts.clone(),
        }));
    }
    if has_excess {
        index.retain(|position| !is_tombstone(position) && journals.of(position).is_some());
    }

    // The file system frees the space of a removed file only when it is no longer open.
    drop(old);
    let newest = match first.map(FirstJournal::keep) {
        Some(newest) => newest,
        None => loop {
            if let Some(newest) = make()? {
                break newest;
            }
            // The process before this one continued by evicting, and so does this one.
            if !may_evict || !remove_oldest(&*directory, &journals, &index)? {
                return Err(full());
            }
            recovered.journals -= 1;
        },
    };
    let newest = Arc::new(newest);
    recovered.entries = index.len();
    journals.put(newest.clone());
    let maintenance = Maintenance::default();
    maintenance.damaged_bytes.store(recovered.damaged_bytes, Ordering::Relaxed);
    *maintenance.set_aside.lock() = SetAside::among(&*directory, &names);
    let flush = Flush::new(newest.clone(), options.durability);
    let shared = Shared {
        options,
        id: identity.id,
        journal_bytes,
        directory,
        hasher,
        index,
        journals,
        pool,
        blocks,
        active: ArcSwap::new(newest.clone()),
        flush,
        allocator: Waker::default(),
        maintenance,
        counters: Counters::default(),
        clock: Clock::default(),
    };
    newest.free_journals.store(shared.free_journals(), Ordering::Relaxed);
    shared.update_free_space();
    // Another opening may be able to read what this one could not: what is deleted until then must
    // not reappear.
    for journal in unread.into_iter().filter_map(|number| shared.journals.get(number)) {
        shared.mark_keys_lost(&journal);
    }
    Ok((shared, recovered))
}

/// Removes a leftover file and returns whether it was removed. A cache creates no directories: one
/// with such a name belongs to another program and stays.
pub(crate) fn remove_if_file(
    directory: &dyn Directory,
    name: &str,
    action: &'static str,
) -> Result<bool> {
    let path = directory.path().join(name);
    match directory.remove(name) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            tracing::warn!(
                "journal cache: {} is a directory with the name of a cache file; remove it if it \
                 is not needed",
                path.display()
            );
            Ok(false)
        }
        removed => removed.map(|()| true).map_err(Error::io(path, action)),
    }
}

/// Returns whether the error shows that the name of a journal belongs to something that cannot be
/// one.
fn is_not_a_file(error: &Error) -> bool {
    let Error::Io { source, .. } = error else { return false };
    matches!(NotAFile::from_error(source), Some(NotAFile::Other(_)))
}

/// Removes the oldest journal of a cache that is not yet in use; false if there is none.
fn remove_oldest(directory: &dyn Directory, journals: &Journals, index: &Index) -> Result<bool> {
    let Some(number) = journals.oldest() else { return Ok(false) };
    let path = directory.path();
    tracing::warn!(
        "journal cache: {}: the disk is full; the oldest journal, {number}, is removed",
        path.display()
    );
    // The records that were read are synced, but not all names: what has replaced records of this
    // journal must outlive it.
    directory.sync().map_err(Error::io(path, "syncing the directory"))?;
    index.retain(|position| !position.is_in(number));
    let name = file_name(number);
    directory.remove(&name).map_err(Error::io(path.join(&name), "removing a journal"))?;
    let _ = directory.remove(&hint::file_name(number));
    let removed = journals.remove(number);
    journals.budget.give_back(removed.file_bytes);
    Ok(true)
}

/// Returns whether a file of `len_bytes` contains only zeroes. A file that cannot be read is not
/// blank.
fn is_blank(file: &dyn File, len_bytes: u64) -> io::Result<bool> {
    let mut buf = AlignedBuf::zeroed(CHUNK_BYTES);
    for at in (0..len_bytes).step_by(CHUNK_BYTES) {
        match file.read_at(at, &mut buf) {
            Err(error) if is_of_media(&error) => return Ok(false),
            read => read?,
        }
        if buf.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the size of the table of journals: twice as many as the budget permits, more if they are
/// to be compressed, and so that no two existing journals share a slot.
fn slots(
    options: &Options,
    journal_bytes: usize,
    numbers: &[JournalNumber],
    path: &Path,
) -> Result<usize> {
    let journals = (options.max_disk_bytes / journal_bytes as u64).max(numbers.len() as u64);
    let mut slots = (journals.saturating_mul(2) + 64).next_power_of_two();
    if options.compression != Compression::None {
        slots = slots.saturating_mul(MOST_COMPRESSED / 2).min(MAX_SPAN).max(slots);
    }
    let collide = |slots: u64| {
        let taken: HashSet<_> = numbers.iter().map(|number| number.0 % slots).collect();
        taken.len() < numbers.len()
    };
    while slots <= MAX_SPAN && collide(slots) {
        slots *= 2;
    }
    if slots > MAX_SPAN {
        let reason = format!(
            "{journals} journals of {journal_bytes} bytes are too many: a cache of this size needs \
             larger journals"
        );
        return Err(Error::NoCache { path: path.to_owned(), reason });
    }
    Ok(slots as usize)
}

pub(crate) fn hint_number(name: &str) -> Option<JournalNumber> {
    let number = JournalNumber(name.strip_suffix(".hint")?.parse().ok()?);
    (hint::file_name(number) == name).then_some(number)
}

pub(crate) fn journal_number(name: &str) -> Option<JournalNumber> {
    let digits = name.strip_suffix(NAME_END).filter(|digits| digits.len() == NAME_DIGITS)?;
    let number = JournalNumber(digits.parse().ok()?);
    (file_name(number) == name).then_some(number)
}

/// Returns the numbers of all journals, oldest first.
pub(crate) fn journal_numbers(names: &[String]) -> Vec<JournalNumber> {
    let mut numbers: Vec<_> = names.iter().filter_map(|name| journal_number(name)).collect();
    numbers.sort_unstable();
    numbers
}

fn make_identity(directory: &dyn Directory, identity: Identity) -> io::Result<()> {
    // Before the cache exists: the next opening takes its name for granted, and its contents are
    // promised to be there.
    directory.sync_above()?;
    let file = directory.create(IDENTITY_TEMPORARY, PAGE_BYTES as u64)?;
    file.write_at(0, &identity.page())?;
    file.sync()?;
    directory.rename(IDENTITY_TEMPORARY, IDENTITY)?;
    directory.sync()
}

fn check_contents(path: &Path, found: Contents, expected: Contents) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(Error::OtherContents { path: path.to_owned(), found, expected }),
    }
}

/// Fails if the cache has another contents tag, according to the file `cache`. Works also for a
/// cache that cannot be opened.
pub(crate) fn check_contents_of(
    directory: &dyn Directory,
    names: &[String],
    expected: Contents,
) -> Result<()> {
    if !names.iter().any(|name| name == IDENTITY) {
        return Ok(());
    }
    let page = read_identity(directory)?;
    let found = fields::undamaged(&page, MAGIC).map(contents);
    found.map_or(Ok(()), |found| check_contents(directory.path(), found, expected))
}

fn read_identity(directory: &dyn Directory) -> Result<AlignedBuf> {
    let mut page = AlignedBuf::zeroed(PAGE_BYTES);
    directory
        .open(IDENTITY)
        .and_then(|file| file.read_at(0, &mut page))
        .map_err(Error::io(directory.path().join(IDENTITY), "reading the cache's identity"))?;
    Ok(page)
}

/// Reads the file `cache`.
pub(crate) fn identity_of(directory: &dyn Directory, names: &[String]) -> Result<Identity> {
    let path = directory.path();
    let no_cache = |reason: String| Error::NoCache { path: path.to_owned(), reason };
    if !names.iter().any(|name| name == IDENTITY) {
        return Err(no_cache(match journal_numbers(names).is_empty() {
            true => "there is no cache".into(),
            false => format!(
                "there are journals, but they cannot be read without the missing file \
                 `{IDENTITY}`; to start with an empty cache, remove the directory"
            ),
        }));
    }
    Identity::parse(&read_identity(directory)?).map_err(|reason| {
        no_cache(format!(
            "the file `{IDENTITY}` cannot be used: {reason}; the journals cannot be \
            read without it; to start with an empty cache, remove the directory"
        ))
    })
}

/// Reads header and hint of a journal; `None` if it does not belong to this cache.
pub(crate) fn probe_journal(
    directory: &dyn Directory,
    identity: Identity,
    number: JournalNumber,
    blocks: &Arc<Blocks>,
) -> Result<Option<ExistingJournal>> {
    let path = directory.path().join(file_name(number));
    let failed = |action| Error::io(&path, action);
    let file = directory.open(&file_name(number)).map_err(failed("opening a journal"))?;
    let mut page = AlignedBuf::zeroed(PAGE_BYTES);
    let unreadable = Unreadable::default();
    unreadable.read_past(&*file, 0, &mut page).map_err(failed("reading the header"))?;
    unreadable.log(&path);
    let header = JournalHeader::parse(&page);
    if header.is_some_and(|header| header.cache != identity.id) {
        // The page is intact and belongs to another cache; so does its hint, which has hashes with
        // another key but does not identify its cache.
        return Ok(None);
    }
    let header = header.filter(|header| header.number == number);
    let hint = hint::read_head(directory, number, identity.journal_bytes);
    // If the page is damaged, only the salt is needed from it, without which no record can be
    // verified.
    let salt = header.map(|header| header.salt).or(hint.map(|hint| hint.salt));
    let Some(salt) = salt else { return Ok(None) };
    let mut hint = hint.filter(|hint| hint.salt == salt);
    let is_plain = header.is_some_and(|header| !header.is_compressed);
    let mut frames = None;
    if !is_plain {
        // Without a header, the end of the file shows whether it is compressed: only a writer that
        // knows the salt can have written that.
        frames = match Frames::open(&*file, number, salt, identity.journal_bytes, blocks) {
            Err(error) if is_of_media(&error) => {
                let path = path.display();
                tracing::warn!("journal cache: {path}: its end cannot be read: {error}");
                None
            }
            opened => opened.map_err(failed("reading the table of frames"))?,
        };
    }
    if let Some(frames) = &frames {
        hint = hint.filter(|hint| hint.end == frames.end());
    } else if header.is_some_and(|header| header.is_compressed) {
        let Some(hint) = hint else { return Ok(None) };
        tracing::warn!(
            "journal cache: {} cannot be decompressed: its table is damaged",
            path.display()
        );
        frames = Some(Frames::lost(number, salt, hint.end, blocks));
    }
    let counts = Arc::new(Counts::new(identity.journal_bytes));
    let (frames, has_lost_header) = (frames.map(Arc::new), header.is_none());
    Ok(Some(ExistingJournal { number, salt, file, frames, hint, counts, has_lost_header }))
}
