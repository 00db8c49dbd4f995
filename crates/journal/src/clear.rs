//! Clearing a cache's directory, for callers that can obtain all data again.

use std::iter;
use std::path::Path;

use crate::error::{Error, Result};
use crate::files::{Directory, RealDirectory};
use crate::journal::{NAME_END, file_name};
use crate::open::{IDENTITY, check_contents_of, hint_number, journal_number, remove_if_file};
use crate::options::Contents;
use crate::position::JournalNumber;
use crate::shared::Shared;

/// The suffix of the name of a journal that an opening could not use and has kept for inspection.
const SET_ASIDE: &str = ".damaged";
/// Exists in the root of a file system, which may be dedicated to a cache.
const LOST_AND_FOUND: &str = "lost+found";

/// Removes the cache in `path`, whatever its state: the next opening creates a new one.
///
/// A cache whose file `cache` is missing or damaged cannot be read any more, and its `contents`
/// cannot be determined: it is removed.
///
/// # Errors
/// The cache is open; it was created with other `contents` or the directory contains other files,
/// in which case nothing is removed; an I/O error.
pub fn clear(path: impl AsRef<Path>, contents: Contents) -> Result<()> {
    let path = path.as_ref();
    let directory = RealDirectory::open(path, false)
        .map_err(Error::io(path, "opening the directory"))?
        .ok_or_else(|| Error::InUse { path: path.to_owned() })?;
    let mut names = directory.list().map_err(Error::io(path, "listing the files"))?;
    if let Some(other) = names.iter().find(|name| is_foreign(name)) {
        let reason = format!(
            "`{other}` is not a file of a cache; to start with an empty cache, choose another \
             directory, or remove the files in this one"
        );
        return Err(Error::NoCache { path: path.to_owned(), reason });
    }
    names.retain(|name| is_of_a_cache(name));
    check_contents_of(&directory, &names, contents)?;
    // The identity is removed last: after an interruption the directory is still recognised as this
    // cache and can be cleared again.
    names.sort_unstable_by_key(|name| name == IDENTITY);
    names.iter().try_for_each(|name| remove(&directory, name))
}

/// Journals that openings could not use and have kept for inspection: files named
/// `*.journal.damaged`, with a counter before `.journal` if the name was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAside {
    /// Number of files.
    pub files: usize,
    /// Total size, in bytes.
    pub bytes: u64,
}

impl SetAside {
    /// Counts the files set aside among `names`.
    pub(crate) fn among(directory: &dyn Directory, names: &[String]) -> Self {
        let mut found = Self::default();
        for name in names.iter().filter(|name| is_set_aside(name)) {
            found.files += 1;
            // A file that cannot be opened is not an error here.
            found.bytes += directory.open(name).and_then(|file| file.len_bytes()).unwrap_or(0);
        }
        found
    }
}

/// Returns what openings of the cache in `path` have set aside. Writes nothing. The cache need not
/// be usable, and may be in use.
///
/// # Errors
/// An I/O error.
pub fn files_set_aside(path: impl AsRef<Path>) -> Result<SetAside> {
    let path = path.as_ref();
    let directory =
        RealDirectory::open_to_read(path).map_err(Error::io(path, "opening the directory"))?;
    let names = directory.list().map_err(Error::io(path, "listing the files"))?;
    Ok(SetAside::among(&directory, &names))
}

/// Removes what openings have set aside, and returns the number of files.
pub(crate) fn remove_set_aside(shared: &Shared) -> Result<usize> {
    let directory = &*shared.directory;
    let mut names = directory.list().map_err(Error::io(directory.path(), "listing the files"))?;
    names.retain(|name| is_set_aside(name));
    let (all, mut left) = (names.len(), Vec::new());
    for name in names {
        if !remove_if_file(directory, &name, "removing a file of a cache")? {
            left.push(name);
        }
    }
    *shared.maintenance.set_aside.lock() = SetAside::among(directory, &left);
    Ok(all - left.len())
}

fn remove(directory: &dyn Directory, name: &str) -> Result<()> {
    let path = directory.path().join(name);
    directory.remove(name).map_err(Error::io(path, "removing a file of a cache"))
}

/// Returns the first name for a journal that cannot be used.
pub(crate) fn first_set_aside_name(number: JournalNumber) -> String {
    format!("{}{SET_ASIDE}", file_name(number))
}

/// Returns a name for a journal that cannot be used which is not taken: the file with that name may
/// be all that is left of another journal.
pub(crate) fn set_aside_name(number: JournalNumber, names: &[String]) -> String {
    let journal = file_name(number);
    let digits = journal.strip_suffix(NAME_END).expect("a journal's name");
    let others = (2u64..).map(|count| format!("{digits}.{count}{NAME_END}{SET_ASIDE}"));
    let mut all = iter::once(first_set_aside_name(number)).chain(others);
    all.find(|name| !names.contains(name)).expect("there are more numbers than files")
}

/// Returns whether [`set_aside_name`] produces this name.
pub(crate) fn is_set_aside(name: &str) -> bool {
    let Some(journal) = name.strip_suffix(SET_ASIDE) else { return false };
    let parts = journal.strip_suffix(NAME_END).and_then(|it| it.split_once('.'));
    let Some((digits, count)) = parts else { return journal_number(journal).is_some() };
    let is_count = count.parse::<u64>().is_ok_and(|it| it > 1 && it.to_string() == count);
    is_count && journal_number(&format!("{digits}{NAME_END}")).is_some()
}

/// Returns whether a file of this name is neither a cache's nor created by a file system.
pub(crate) fn is_foreign(name: &str) -> bool {
    name != LOST_AND_FOUND && !is_of_a_cache(name)
}

/// Returns whether a cache has files of this name, except for the lock.
pub(crate) fn is_of_a_cache(name: &str) -> bool {
    let whole = name.strip_suffix(".tmp").unwrap_or(name);
    whole == IDENTITY
        || journal_number(whole).is_some()
        || hint_number(whole).is_some()
        || is_set_aside(name)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::fs;

    use super::*;
    use crate::{Cache, Options};

    fn open(path: &Path) -> Result<Cache> {
        let options =
            Options { journal_bytes: 1 << 20, memory_bytes: 4 << 20, ..Options::default() };
        Cache::open(path, options)
    }

    #[test]
    fn an_unusable_cache_can_be_cleared_and_recreated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let cache = open(path).unwrap();
        cache.put(b"key", b"value").unwrap();
        assert!(matches!(clear(path, Contents::default()), Err(Error::InUse { .. })));
        assert!(cache.contains(b"key").unwrap());
        cache.close().unwrap();
        let identity = path.join(IDENTITY);
        let mut bytes = fs::read(&identity).unwrap();
        bytes[20] ^= 1;
        fs::write(&identity, bytes).unwrap();
        assert!(matches!(open(path), Err(Error::NoCache { .. })));

        // Foreign files are not touched, and nothing is removed beside them.
        let other = path.join("letters.tmp");
        fs::write(&other, "mine").unwrap();
        assert!(open(path).is_err() && other.exists());
        let error = clear(path, Contents::default()).unwrap_err();
        assert!(error.to_string().contains("`letters.tmp`"), "{error}");
        assert!(identity.exists() && other.exists());
        fs::remove_file(other).unwrap();

        fs::create_dir(path.join(LOST_AND_FOUND)).unwrap();
        clear(path, Contents::default()).unwrap();
        let cache = open(path).unwrap();
        assert_eq!(cache.stats().entries, 0);
        assert!(path.join(LOST_AND_FOUND).exists());
    }

    /// A program that is given another program's directory by mistake neither reads nor removes the
    /// contents.
    #[test]
    fn a_cache_with_another_contents_tag_is_neither_opened_nor_cleared() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mine = Contents(*b"mine");
        let refused = |error: Error, of: &str| {
            assert!(matches!(error, Error::OtherContents { .. }), "{error}");
            assert!(error.to_string().contains(of), "{error}");
        };
        let cache = open(path).unwrap();
        cache.put(b"key", b"value").unwrap();
        cache.close().unwrap();
        let options = Options {
            journal_bytes: 1 << 20,
            memory_bytes: 4 << 20,
            contents: mine,
            ..Options::default()
        };
        for create in [true, false] {
            let opened = Cache::open(path, Options { create, ..options.clone() });
            refused(
                opened.unwrap_err(),
                "created with no contents, and opened with contents `mine`",
            );
        }
        refused(clear(path, mine).unwrap_err(), "`mine`");
        let cache = open(path).unwrap();
        assert!(cache.contains(b"key").unwrap());
        cache.close().unwrap();

        // The same for a cache that only a later version can open.
        let identity = path.join(IDENTITY);
        let mut bytes = fs::read(&identity).unwrap();
        bytes[8] += 1;
        let checksum = crc32c::crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&checksum.to_le_bytes());
        fs::write(&identity, bytes).unwrap();
        refused(clear(path, mine).unwrap_err(), "`mine`");
        clear(path, Contents::default()).unwrap();

        Cache::open(path, options.clone()).unwrap().close().unwrap();
        refused(open(path).unwrap_err(), "created with contents `mine`");
        Cache::open(path, options).unwrap().close().unwrap();
        clear(path, mine).unwrap();
    }

    #[test]
    fn a_file_is_not_a_cache_directory() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "mine").unwrap();
        for path in [file.join("cache"), file] {
            let error = open(&path).unwrap_err().to_string();
            assert!(error.contains("Not a directory"), "{error}");
        }
    }

    #[test]
    fn a_file_set_aside_gets_a_free_name() {
        let (number, mut names) = (JournalNumber(40), vec!["cache".to_owned()]);
        for count in ["", ".2", ".3"] {
            let name = set_aside_name(number, &names);
            assert_eq!(name, format!("000000000040{count}.journal.damaged"));
            assert!(is_set_aside(&name) && is_of_a_cache(&name) && journal_number(&name).is_none());
            names.push(name);
        }
        for count in [".", ".1", ".02", ".x", ".2.2", ".-2"] {
            assert!(!is_of_a_cache(&format!("000000000040{count}.journal.damaged")), "{count}");
            assert!(!is_of_a_cache(&format!("000000000040{count}.journal")), "{count}");
        }
        assert!(!is_of_a_cache("40.2.journal.damaged") && !is_of_a_cache(".2.journal.damaged"));
    }

    #[test]
    fn files_set_aside_are_removed_on_demand() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let cache = open(path).unwrap();
        cache.put(b"key", &[7; 10_000]).unwrap();
        cache.close().unwrap();
        let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> = names.collect();
        let of =
            |kind: &str| files.iter().find(|path| path.extension().is_some_and(|it| it == kind));
        // Without header and hint the journal cannot be attributed to a cache.
        let (journal, hint) = (of("journal").unwrap(), of("hint").unwrap());
        fs::remove_file(hint).unwrap();
        let mut bytes = fs::read(journal).unwrap();
        bytes[..4096].fill(0xff);
        fs::write(journal, bytes).unwrap();
        let cache = open(path).unwrap();
        let aside = journal.with_extension("journal.damaged");
        let len_bytes = fs::metadata(&aside).unwrap().len();
        let one = SetAside { files: 1, bytes: len_bytes };
        assert_eq!((files_set_aside(path).unwrap(), cache.stats().set_aside), (one, one));
        // Whichever opening set it aside.
        cache.close().unwrap();
        let cache = open(path).unwrap();
        assert_eq!((cache.stats().set_aside, cache.recovered().damaged_bytes), (one, 0));
        assert_eq!(cache.remove_damaged().unwrap(), 1);
        assert!(!aside.exists());
        assert_eq!(cache.remove_damaged().unwrap(), 0);
        let none = SetAside::default();
        assert_eq!((files_set_aside(path).unwrap(), cache.stats().set_aside), (none, none));
    }
}
