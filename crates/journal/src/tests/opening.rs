//! Openings with little space, without hints, and interrupted.

use super::removing::without_maintenance_thread;
use super::*;
use crate::inspect::inspect_in;
use crate::{HintState, JournalReport, Recovered};

/// A closed cache with this many keys, about a thousand in each journal.
fn closed(options: &Options, keys: usize) -> SimDirectory {
    let directory = SimDirectory::default();
    let cache = open(&directory, options);
    for key in 0..keys as u64 {
        cache.put(&key.to_le_bytes(), &[4; 1000]).unwrap();
    }
    cache.close().unwrap();
    directory
}

fn used_bytes(directory: &SimDirectory) -> u64 {
    let names = directory.list().unwrap();
    names.iter().map(|name| directory.open(name).unwrap().len_bytes().unwrap()).sum()
}

/// An opening that has written hints and is killed has not taken the space of the next one's first
/// journal.
#[test]
fn an_opening_killed_at_any_step_leaves_space_for_the_next_one() {
    const KEYS: usize = 5000;
    for (when_full, has_hints) in [(WhenFull::Evict, true), (WhenFull::Refuse, false)] {
        let options = Options { when_full, ..options() };
        let directory = closed(&options, KEYS);
        remove_hints(&directory);
        // For a journal and for one or two hints.
        directory.limit(used_bytes(&directory) + MIB as u64 + (100 << 10));
        let mut were_through = 0;
        for steps in 0..60 {
            let first = directory.killed();
            first.fail_after(steps);
            let opened = crate::open::open(Box::new(first.clone()), options.clone());
            were_through += usize::from(opened.is_ok());
            // Without eviction no hint is written either: puts leave space for journals on the
            // disk.
            let names = first.list().unwrap();
            let has_some = names.iter().any(|name| name.ends_with(".hint"));
            assert!(has_hints || !has_some, "{steps} steps");
            let cache = open(&first.killed(), &options);
            assert_eq!(cache.recovered().entries, KEYS, "{steps} steps");
        }
        assert!((1..60).contains(&were_through), "{were_through}");
    }
}

/// The directory may have been created by an opening that was killed before its name was durable.
#[test]
fn the_name_of_the_directory_is_durable_when_there_is_a_cache() {
    for steps in 0..20 {
        let directory = SimDirectory::default();
        directory.fail_after(steps);
        let _ = crate::open::open(Box::new(directory.clone()), options());
        let left = directory.killed();
        let has_cache = left.list().unwrap().contains(&"cache".to_owned());
        assert!(left.has_durable_name() || !has_cache, "{steps} steps");
        open(&left, &options());
        assert!(left.has_durable_name(), "{steps} steps");
    }
}

#[test]
fn a_full_disk_is_reported_before_journals_are_read() {
    let options = Options { when_full: WhenFull::Refuse, ..options() };
    let directory = closed(&options, 5000);
    directory.limit(used_bytes(&directory));
    let names = directory.list().unwrap();
    let journals = names.iter().filter(|name| name.ends_with(".journal")).count() as u64;
    let before = directory.reads();
    let error = Cache::open_in(Box::new(directory.clone()), options).unwrap_err();
    assert!(matches!(error, Error::Io { action: "creating a journal", .. }), "{error}");
    // The identity, and the first page of each journal and of its hint.
    assert_eq!(directory.reads() - before, 1 + 2 * journals);
}

/// A sparse file may have any length, and must not be read whole.
#[test]
fn a_file_longer_than_a_journal_is_not_searched() {
    let directory = closed(&options(), 10);
    let [blank, longer] = ["000000000776.journal", "000000000777.journal"];
    directory.create(blank, MIB as u64).unwrap();
    directory.create(longer, 64 * MIB as u64).unwrap();
    let before = directory.reads();
    let cache = open(&directory, &options());
    assert!(directory.reads() - before < 20, "{}", directory.reads() - before);
    assert_eq!((cache.recovered().entries, cache.stats().set_aside.files), (10, 1));
    let names = directory.list().unwrap();
    let has = |name: &str| names.iter().any(|it| it == name);
    assert!(!has(blank) && !has(longer) && has(&format!("{longer}.damaged")), "{names:?}");
}

/// A foreign file with a journal's name does not affect the other journals.
#[test]
fn a_blank_journal_may_have_any_number() {
    for (len, number) in [(0, "000000600000"), (MIB as u64, "999999999999")] {
        let directory = closed(&options(), 5000);
        directory.create(&format!("{number}.journal"), len).unwrap();
        let cache = open(&directory, &options());
        assert_eq!((cache.recovered().entries, cache.stats().set_aside.files), (5000, 0));
        cache.put(b"key", b"value").unwrap();
        cache.close().unwrap();
        let all = open(&directory, &options());
        assert_eq!(all.recovered().entries, 5001);
    }
}

/// Bytes appended to a journal's file by another program take no space from other journals.
#[test]
fn a_journal_that_was_extended_is_truncated() {
    for has_hints in [true, false] {
        let directory = closed(&options(), 5000);
        let names = directory.list().unwrap();
        let journals = names.iter().filter(|name| name.ends_with(".journal"));
        for name in journals {
            directory.open(name).unwrap().truncate(100 * MIB as u64).unwrap();
        }
        if !has_hints {
            remove_hints(&directory);
        }
        let mut journals = 0;
        let each = |report: JournalReport| {
            journals += 1;
            assert_eq!(report.damaged_bytes, 99 * MIB as u64);
            assert_eq!(report.hint == HintState::Valid, has_hints, "{report:?}");
            Ok::<_, Error>(())
        };
        inspect_in(&directory, each).unwrap();
        let cache = open(&directory, &options());
        assert_eq!((cache.recovered().entries, cache.stats().damaged_bytes), (5000, 0));
        assert!(cache.stats().disk_bytes <= (journals + 1) * MIB as u64);
    }
}

/// To remove a cache, a user removes its directory.
#[test]
fn no_cache_is_created_next_to_foreign_files() {
    let directory = SimDirectory::default();
    directory.create("notes", 0).unwrap();
    let error = crate::open::open(Box::new(directory.clone()), options()).err().unwrap();
    assert!(
        matches!(&error, Error::NoCache { reason, .. } if reason.contains("`notes`")),
        "{error}"
    );
    assert_eq!(directory.list().unwrap(), ["notes"]);
    // Objects created by file systems are ignored; files that are added later do not matter.
    let directory = SimDirectory::default();
    directory.create("lost+found", 0).unwrap();
    open(&directory, &options()).close().unwrap();
    directory.create("notes", 0).unwrap();
    open(&directory, &options()).close().unwrap();
}

/// A failing opening may be retried many times.
#[test]
fn an_opening_that_fails_leaves_no_journal() {
    let directory = closed(&options(), 5000);
    remove_hints(&directory);
    let names = directory.list().unwrap();
    // The first journal is created, written and synced, with its name; the sync of what is read
    // fails.
    directory.fail_after(4);
    let error = Cache::open_in(Box::new(directory.clone()), options()).unwrap_err();
    assert!(matches!(error, Error::Io { action: "syncing records", .. }), "{error}");
    assert_eq!(directory.list().unwrap(), names);
}

/// Otherwise a cache that was running on a full disk could not be opened after a kill.
#[test]
fn a_full_disk_does_not_prevent_an_opening() {
    const KEYS: u64 = 20_000;
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for key in 0..KEYS {
        cache.put(&key.to_le_bytes(), &[4; 1000]).unwrap();
    }
    cache.flush().unwrap();
    let left = directory.killed();
    drop(cache);
    left.limit(10 << 20);
    let refusing = Options { when_full: WhenFull::Refuse, ..options() };
    let error = Cache::open_in(Box::new(left.clone()), refusing).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");

    // Without its threads, which would evict more for the spare.
    let (shared, recovered) = crate::open::open(Box::new(left.clone()), options()).unwrap();
    let entries = recovered.entries as u64;
    assert!((5000..10_000).contains(&entries), "{recovered:?}");
    // Exactly the newest are present.
    for key in 0..KEYS {
        let named = shared.index.find(shared.hasher.hash(&key.to_le_bytes()));
        assert_eq!(named.is_some(), key >= KEYS - entries, "{key}");
    }
    drop(shared);
    let cache = open(&left, &options());
    cache.put(b"one more", b"value").unwrap();
    cache.close().unwrap();
    let cache = open(&left, &options());
    assert!(cache.contains(b"one more").unwrap());
    assert!(cache.contains(&(KEYS - 1).to_le_bytes()).unwrap());
}

/// A hint saves the next opening some time: it must cost neither a record nor an opening.
#[test]
fn missing_hints_yield_to_the_first_journal() {
    const KEYS: usize = 5000;
    for when_full in [WhenFull::Refuse, WhenFull::Evict] {
        let options = Options { when_full, ..options() };
        let directory = closed(&options, KEYS);
        remove_hints(&directory);
        let names = || directory.list().unwrap();
        // Enough for a journal, and for each of the hints, but not for these together.
        directory.limit(used_bytes(&directory) + MIB as u64);
        // Without its threads, which would make space for the spare.
        let opened = crate::open::open(Box::new(directory.clone()), options.clone());
        let (shared, recovered) = opened.unwrap();
        assert_eq!(recovered.entries, KEYS, "{when_full:?}");
        assert!(recovered.scanned >= 5 && recovered.scanned == recovered.journals);
        assert!(!names().iter().any(|name| name.ends_with(".hint")), "{when_full:?}");
        drop(shared);
        // Hints are written once there is space.
        directory.limit(u64::MAX);
        for scanned in [recovered.scanned, 0] {
            let cache = open(&directory, &options);
            let found = cache.recovered();
            assert_eq!((found.entries, found.scanned), (KEYS, scanned), "{when_full:?}");
            cache.close().unwrap();
        }
    }
}

fn hints(directory: &SimDirectory) -> usize {
    directory.list().unwrap().iter().filter(|name| name.ends_with(".hint")).count()
}

fn recovered(directory: &SimDirectory) -> Recovered {
    open(directory, &options()).recovered()
}

/// Waiters for stable storage do not wait for hints. A journal without a hint when the process is
/// killed is read.
#[test]
fn journals_are_sealed_without_their_hints() {
    const KEYS: usize = 3500;
    let directory = SimDirectory::default();
    without_maintenance_thread(&directory, &options(), |shared| {
        for key in 0..KEYS as u64 {
            shared.put(&key.to_le_bytes(), &[4; 1000], None).unwrap();
        }
        shared.flush.wait_for(shared.newest_point()).unwrap();
        assert_eq!(hints(&directory), 0);
        // Three that are full, and the newest one.
        for scanned in (1..=4).rev() {
            let found = recovered(&directory.killed());
            assert_eq!((found.entries, found.scanned), (KEYS, scanned));
            assert_eq!(shared.write_one_hint(), scanned > 1);
        }
    });
    let found = recovered(&directory);
    assert_eq!((found.entries, found.scanned), (KEYS, 0));
}

/// Hints are written when there is time. By then some journals are no longer in memory, and one is
/// removed.
#[test]
fn a_hint_that_is_written_late_is_right() {
    const KEYS: u64 = 12_000;
    let directory = SimDirectory::default();
    let mut evicted = 0;
    without_maintenance_thread(&directory, &options(), |shared| {
        for key in 0..KEYS {
            shared.put(&key.to_le_bytes(), &[4; 1000], None).unwrap();
        }
        assert!(shared.evict_oldest().unwrap());
        evicted = shared.counters.evicted.load(Ordering::Relaxed);
        assert!(shared.journals.all()[0].arena.is_none());
        while shared.write_one_hint() {}
        assert!(!directory.list().unwrap().contains(&"000000000000.hint".to_owned()));
    });
    assert!(evicted > 1000, "{evicted}");
    let cache = open(&directory, &options());
    let found = cache.recovered();
    assert_eq!((found.entries as u64, found.scanned), (KEYS - evicted, 0));
    assert_eq!(contents(&cache).len(), found.entries);
}
