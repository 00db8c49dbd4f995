//! Removal of journals: their files are truncated, in steps, only once no power cut can restore
//! them.

use std::io;
use std::path::Path;

use alluvium_device::PAGE_BYTES;

use super::cold::{compress_all, still, text};
use super::*;
use crate::allocator::Allocator;
use crate::error::Stopped;
use crate::files::File;
use crate::flush::Flusher;
use crate::inspect::inspect_in;
use crate::journal::{Journal, file_name};
use crate::position::JournalNumber;
use crate::shared::Shared;

/// Runs `work` on a cache without its maintenance thread: journals are removed only by calls.
/// Closed afterwards.
pub(super) fn without_maintenance_thread(
    directory: &SimDirectory,
    options: &Options,
    work: impl FnOnce(&Shared),
) {
    let shared = Arc::new(still(directory, options));
    let next = JournalNumber(shared.active.load().number.0 + 1);
    let allocator = Allocator::new(shared.clone(), next);
    let allocator = thread::spawn(move || allocator.run());
    let flusher = Flusher::new(shared.clone());
    let flusher = thread::spawn(move || flusher.run());
    work(&shared);
    shared.allocator.close();
    allocator.join().unwrap();
    shared.flush.waker.close();
    flusher.join().unwrap();
}

pub(super) fn compact(shared: &Shared, number: u64) -> crate::Result<()> {
    let mut all = shared.journals.all();
    all.retain(|journal| journal.number.0 == number);
    let journal = all.pop().unwrap();
    let scan = shared.scan_live(&journal, Duration::ZERO);
    let compacted = scan.and_then(|scan| shared.compact(journal, &scan, Duration::ZERO));
    compacted.map(drop).map_err(|stopped| match stopped {
        Stopped::Failed(error) => error,
        Stopped::Closing => unreachable!("the cache stays open"),
    })
}

/// With steps of 4 MiB a journal has two of them, and the rest.
fn large() -> Options {
    Options {
        journal_bytes: 9 * MIB,
        memory_bytes: 36 * MIB,
        max_disk_bytes: 144 << 20,
        ..options()
    }
}

/// Several of them, nothing in them dead.
fn filled() -> (SimDirectory, BTreeMap<Vec<u8>, Vec<u8>>) {
    let directory = SimDirectory::default();
    let mut map = BTreeMap::new();
    without_maintenance_thread(&directory, &large(), |shared| {
        for key in 0..250u64 {
            let value = text(key).repeat(100_000 / text(key).len() + 1);
            shared.put(&key.to_le_bytes(), &value, None).unwrap();
            map.insert(key.to_le_bytes().to_vec(), value);
        }
    });
    (directory, map)
}

/// A failed sync says nothing about earlier removals, and neither does the next one, which
/// succeeds.
#[test]
fn a_tombstone_stays_as_long_as_a_power_cut_may_bring_back_what_it_hides() {
    const KEYS: u64 = 20;
    const SEEDS: u64 = 20;
    let directory = SimDirectory::default();
    without_maintenance_thread(&directory, &options(), |shared| {
        for key in 0..KEYS {
            shared.put(&key.to_le_bytes(), &[1; 1000], None).unwrap();
        }
    });
    without_maintenance_thread(&directory, &options(), |shared| {
        for key in 0..KEYS {
            assert!(shared.delete(&key.to_le_bytes()).unwrap());
        }
    });
    let shared = still(&directory, &options());
    directory.fail_directory_syncs(1);
    assert!(matches!(compact(&shared, 0), Err(Error::Io { .. })));
    // The remaining journals contain nothing that these hide, except what may come back.
    assert!(matches!(compact(&shared, 1), Err(Error::Io { .. })));
    assert!(matches!(shared.flush.failure(), Some(Error::Io { .. })));
    let mut has_come_back = 0;
    for seed in 0..SEEDS {
        let left = directory.power_cut(seed);
        has_come_back += u64::from(left.list().unwrap().contains(&file_name(JournalNumber(0))));
        assert_eq!(contents(&open(&left, &options())).len(), 0, "seed {seed}");
    }
    assert!((1..SEEDS).contains(&has_come_back), "{has_come_back}");
}

/// What eviction has removed from the index may come back: no call may report it as deleted.
#[test]
fn nothing_is_written_after_a_removal_could_not_be_synced() {
    let (directory, map) = filled();
    let shared = still(&directory, &large());
    directory.fail_directory_syncs(1);
    let cuts = directory.cuts();
    assert!(matches!(shared.evict_oldest(), Err(Error::Io { .. })));
    assert!(matches!(shared.delete(&0u64.to_le_bytes()), Err(Error::Io { .. })));
    assert!(matches!(shared.put(b"key", b"value", None), Err(Error::Io { .. })));
    // The others stay, and their records are readable.
    assert!(compact(&shared, 1).is_err());
    let newest = shared.index.find(shared.hasher.hash(&249u64.to_le_bytes())).unwrap();
    assert!(shared.journals.of(newest).unwrap().load(newest).is_ok());
    assert_eq!(directory.cuts(), cuts);
    let mut has_come_back = false;
    for seed in 0..8 {
        let left = directory.power_cut(seed);
        if left.list().unwrap().contains(&file_name(JournalNumber(0))) {
            // Complete.
            has_come_back = true;
            assert!(contents(&open(&left, &large())) == map, "seed {seed}");
        }
    }
    assert!(has_come_back);
}

/// Returns a key of the map whose record is in this journal.
fn key_in(shared: &Shared, map: &BTreeMap<Vec<u8>, Vec<u8>>, number: u64) -> Vec<u8> {
    let is_in_it = |key: &&Vec<u8>| {
        let named = shared.index.find(shared.hasher.hash(key));
        named.is_some_and(|position| position.is_in(JournalNumber(number)))
    };
    map.keys().find(is_in_it).unwrap().clone()
}

/// Returns whether deleting a key that the index does not know writes a tombstone.
fn is_deleted_by_a_tombstone(shared: &Shared, key: &[u8]) -> bool {
    let before = shared.newest_point();
    assert!(!shared.delete(key).unwrap());
    shared.newest_point() > before
}

/// The file of such a journal exists, and the next opening reads the records that the index no
/// longer names, whichever other journals were removed meanwhile.
#[test]
fn keys_in_a_journal_that_could_not_be_removed_can_be_deleted() {
    let (directory, map) = filled();
    without_maintenance_thread(&directory, &large(), |shared| {
        let second = shared.journals.all().swap_remove(1);
        let [evicted, given_up] = [0, 1].map(|number| key_in(shared, &map, number));
        // As one that is given up with its unreadable parts.
        directory.fail_removals(1);
        assert!(matches!(shared.remove(second.clone()), Err(Error::Io { .. })));
        assert!(shared.evict_oldest().unwrap());
        assert!(is_deleted_by_a_tombstone(shared, &given_up));
        shared.flush.wait_for(shared.newest_point()).unwrap();
        let left = open(&directory.killed(), &large());
        assert!(!left.contains(&given_up).unwrap());
        shared.remove(second).unwrap();
        assert!(!is_deleted_by_a_tombstone(shared, &evicted));
        assert!(!is_deleted_by_a_tombstone(shared, &given_up));
    });
}

/// Otherwise each deletion of an absent key would write something from then on.
#[test]
fn compaction_removes_a_journal_that_eviction_could_not_remove() {
    let (directory, map) = filled();
    without_maintenance_thread(&directory, &large(), |shared| {
        let evicted = key_in(shared, &map, 0);
        directory.fail_removals(1);
        assert!(matches!(shared.evict_oldest(), Err(Error::Io { .. })));
        assert!(is_deleted_by_a_tombstone(shared, &evicted));
        compact(shared, 0).unwrap();
        assert!(!directory.list().unwrap().contains(&file_name(JournalNumber(0))));
        assert!(!is_deleted_by_a_tombstone(shared, &evicted));
    });
}

#[test]
fn a_removed_journal_is_truncated_in_steps() {
    let (directory, _) = filled();
    let shared = still(&directory, &large());
    let budget = &shared.journals.budget;
    let (cuts, file_bytes) = (directory.cuts(), budget.file_bytes());
    assert!(shared.evict_oldest().unwrap());
    assert_eq!(directory.cuts() - cuts, 2);
    assert_eq!(budget.file_bytes(), file_bytes - 9 * MIB as u64);
    assert!(!directory.list().unwrap().contains(&file_name(JournalNumber(0))));
}

#[test]
fn the_plain_file_of_a_compressed_journal_is_truncated_in_steps() {
    let (directory, map) = filled();
    let options = Options { compression: Compression::Lz4, ..large() };
    let cuts = directory.cuts();
    let stats = compress_all(&directory, &options);
    assert!(stats.compressed >= 2, "{stats:?}");
    assert!(directory.cuts() - cuts >= 4);
    // They were not those of the compressed ones.
    for left in [directory.killed(), directory.power_cut(1), directory.power_cut(2)] {
        let cache = open(&left, &options);
        assert_eq!(cache.recovered().damaged_bytes, 0);
        assert!(contents(&cache) == map);
    }
}

/// The file of a removed journal is freed with its last reader.
#[test]
fn a_journal_being_read_is_not_truncated() {
    let (directory, map) = filled();
    let shared = still(&directory, &large());
    let held: Arc<Journal> = shared.journals.all().swap_remove(0);
    let positions: Vec<_> = map
        .iter()
        .map(|(key, value)| (shared.index.find(shared.hasher.hash(key)).unwrap(), value))
        .filter(|(position, _)| position.is_in(held.number))
        .collect();
    let cuts = directory.cuts();
    assert!(shared.evict_oldest().unwrap());
    assert_eq!(directory.cuts(), cuts);
    assert!(positions.len() > 50, "{}", positions.len());
    for (position, value) in positions {
        assert!(held.load(position).unwrap().bytes().ends_with(value));
    }
}

/// A directory whose oldest journal is removed and truncated once it has been opened.
struct Vanishing(SimDirectory);

impl Directory for Vanishing {
    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }

    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Arc<dyn File>> {
        self.0.create(name, len_bytes)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let file = self.0.open(name)?;
        if name == file_name(JournalNumber(0)) {
            self.0.remove(name)?;
            file.truncate(PAGE_BYTES as u64)?;
        }
        Ok(file)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        self.0.free_bytes()
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

#[test]
fn inspection_never_sees_a_truncated_journal() {
    let (directory, _) = filled();
    let mut reports = Vec::new();
    let inspected = inspect_in(&Vanishing(directory), |report| {
        reports.push(report);
        Ok::<_, Error>(())
    });
    assert_eq!(inspected.unwrap(), 9 * MIB);
    assert!(reports.len() >= 2, "{reports:?}");
    let is_right = |number, damaged_bytes| number > JournalNumber(0) && damaged_bytes == 0;
    assert!(reports.iter().all(|it| is_right(it.number, it.damaged_bytes)), "{reports:?}");
}
