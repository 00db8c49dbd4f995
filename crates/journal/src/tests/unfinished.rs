//! Unfinished compactions: what they have moved is not moved again.

use super::cold::{plain, still};
use super::removing::{compact, without_maintenance_thread};
use super::steps::{Map, crash_at_each_step};
use super::*;
use crate::error::Stopped;
use crate::journal::{Journal, file_name};
use crate::position::JournalNumber;
use crate::shared::Shared;

/// Deleted keys.
const DELETED: std::ops::Range<u64> = 0..300;
/// The size of a tombstone: header, key, and a number.
const TOMBSTONE_BYTES: u64 = 32;
const ALL_TOMBSTONES: u64 = (DELETED.end - DELETED.start) * TOMBSTONE_BYTES;
/// A position in the journal with the tombstones, behind them.
const BEHIND: usize = 4096 + 200_000;

/// Journal 0 is mostly live. Journal 1 has nothing live except the tombstones of the rest of
/// journal 0, and a few values behind these; the replacements are in journal 2.
fn filled() -> (SimDirectory, Map) {
    let directory = SimDirectory::default();
    let mut map = Map::new();
    let mut put = |shared: &Shared, keys: std::ops::Range<u64>, value: u8| {
        for key in keys.map(u64::to_le_bytes) {
            shared.put(&key, &[value; 1000], None).unwrap();
            map.insert(key.to_vec(), vec![value; 1000]);
        }
    };
    without_maintenance_thread(&directory, &plain(), |shared| put(shared, 0..900, 0));
    without_maintenance_thread(&directory, &plain(), |shared| {
        for key in DELETED.map(u64::to_le_bytes) {
            assert!(shared.delete(&key).unwrap());
        }
        put(shared, 1000..1400, 1);
    });
    without_maintenance_thread(&directory, &plain(), |shared| put(shared, 1000..1395, 2));
    map.retain(|key, _| !DELETED.contains(&u64::from_le_bytes(key[..].try_into().unwrap())));
    (directory, map)
}

fn journal(shared: &Shared, number: u64) -> Arc<Journal> {
    shared.journals.get(JournalNumber(number)).unwrap()
}

/// Returns the bytes of tombstones in the newest journal.
fn tombstone_bytes(shared: &Shared) -> u64 {
    shared.active.load().counts.tombstone_bytes.load(Ordering::Relaxed)
}

/// Lets the maintenance thread run again after some time.
fn try_again(shared: &Shared) {
    *journal(shared, 1).counts.failed_at.lock() = None;
    let _exclusive = shared.maintenance.exclusive.lock();
    shared.run_task(&mut true).unwrap();
}

fn is_gone(directory: &SimDirectory) -> bool {
    !directory.list().unwrap().contains(&file_name(JournalNumber(1)))
}

/// Checks what the next processes find, also after a power cut.
fn check(directory: &SimDirectory, map: &Map) {
    for left in [directory.killed(), directory.power_cut(1), directory.power_cut(2)] {
        remove_hints(&left);
        assert!(contents(&open(&left, &plain())) == *map);
    }
}

#[test]
fn tombstones_of_a_partly_unreadable_journal_are_moved_once() {
    let (directory, map) = filled();
    without_maintenance_thread(&directory, &plain(), |shared| {
        directory.make_unreadable(&file_name(JournalNumber(1)), BEHIND..BEHIND + 1);
        for attempt in 0..3 {
            try_again(shared);
            assert!(journal(shared, 1).counts.has_just_failed(), "attempt {attempt}");
            assert_eq!(tombstone_bytes(shared), 0, "attempt {attempt}");
        }
        directory.make_readable(&file_name(JournalNumber(1)));
        try_again(shared);
        assert!(is_gone(&directory));
        assert_eq!(tombstone_bytes(shared), ALL_TOMBSTONES);
        check(&directory, &map);
    });
    check(&directory, &map);
}

/// The journal was scanned before, and then an error occurs in the middle of it, usually
/// repeatedly.
#[test]
fn records_moved_before_an_error_are_not_moved_again() {
    let (directory, mut map) = filled();
    without_maintenance_thread(&directory, &plain(), |shared| {
        let compact_half = || {
            let moved = journal(shared, 1);
            let scan = shared.scan_live(&moved, Duration::ZERO)?;
            directory.make_unreadable(&file_name(JournalNumber(1)), BEHIND..BEHIND + 1);
            let compacted = shared.compact(moved, &scan, Duration::ZERO);
            directory.make_readable(&file_name(JournalNumber(1)));
            compacted
        };
        for attempt in 0..3 {
            let compacted = compact_half();
            let has_failed = matches!(compacted, Err(Stopped::Failed(Error::Io { .. })));
            assert!(has_failed, "attempt {attempt}: {compacted:?}");
            assert_eq!(tombstone_bytes(shared), ALL_TOMBSTONES, "attempt {attempt}");
        }
        // A key that is written meanwhile and deleted again has another tombstone by then.
        let (again, back) = (0u64.to_le_bytes(), 1u64.to_le_bytes());
        shared.put(&again, b"again", None).unwrap();
        assert!(shared.delete(&again).unwrap());
        shared.put(&back, b"back", None).unwrap();
        map.insert(back.to_vec(), b"back".to_vec());
        try_again(shared);
        assert!(is_gone(&directory));
        assert_eq!(tombstone_bytes(shared), ALL_TOMBSTONES + TOMBSTONE_BYTES);
        shared.flush.wait_for(shared.newest_point()).unwrap();
        check(&directory, &map);
    });
    check(&directory, &map);
}

#[test]
fn a_crash_between_two_compaction_attempts_loses_and_restores_nothing() {
    let (original, map) = filled();
    let work = |directory: &SimDirectory, shared: &Shared| -> crate::Result<()> {
        let moved = journal(shared, 1);
        let scan = shared.scan_live(&moved, Duration::ZERO).unwrap();
        directory.make_unreadable(&file_name(JournalNumber(1)), BEHIND..BEHIND + 1);
        assert!(shared.compact(moved, &scan, Duration::ZERO).is_err());
        directory.make_readable(&file_name(JournalNumber(1)));
        // Only the moved records are being written.
        shared.flush.wait_for(shared.newest_point())?;
        compact(shared, 1)?;
        assert_eq!(tombstone_bytes(shared), ALL_TOMBSTONES);
        Ok(())
    };
    let steps = crash_at_each_step(&original.killed(), work, |found| *found == map);
    assert!(steps >= 6, "{steps}");
}

/// The hint of the journal includes the damaged record, so an opening does not detect the damage.
#[test]
fn a_journal_that_turns_out_to_be_damaged_has_no_tombstones_moved() {
    let (directory, mut map) = filled();
    // The damage need not be in live data.
    directory.corrupt(&file_name(JournalNumber(1)), BEHIND);
    for process in 0..3 {
        without_maintenance_thread(&directory, &plain(), |shared| {
            try_again(shared);
            assert!(journal(shared, 1).counts.is_damaged.load(Ordering::Relaxed));
            assert_eq!(tombstone_bytes(shared), 0, "process {process}");
            let key = [200 + process];
            shared.put(&key, b"value", None).unwrap();
            map.insert(key.to_vec(), b"value".to_vec());
        });
    }
    assert!(contents(&still_open(&directory)) == map);
}

fn still_open(directory: &SimDirectory) -> Cache {
    assert_eq!(still(&directory.killed(), &plain()).journals.len(), 7);
    open(directory, &plain())
}
