//! Unreadable sectors: damage like any other, and no reason to reject what is around them.

use std::ops::Range;

use alluvium_device::{AlignedBuf, PAGE_BYTES};

use super::cold::{compress_all, text};
use super::removing::{compact, without_maintenance_thread};
use super::*;
use crate::HintState;
use crate::Recovered;
use crate::inspect::inspect_in;
use crate::journal::FIRST_RECORD;
use crate::position::JournalNumber;

const KEYS: u64 = 3000;
const FIRST: &str = "000000000000.journal";

/// Several journals, closed, and their contents.
fn closed() -> (SimDirectory, BTreeMap<Vec<u8>, Vec<u8>>) {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    let mut map = BTreeMap::new();
    for key in 0..KEYS {
        let value = vec![key as u8 | 1; 1000];
        cache.put(&key.to_le_bytes(), &value).unwrap();
        map.insert(key.to_le_bytes().to_vec(), value);
    }
    cache.close().unwrap();
    (directory, map)
}

fn without_hints() -> (SimDirectory, BTreeMap<Vec<u8>, Vec<u8>>) {
    let (directory, map) = closed();
    remove_hints(&directory);
    (directory, map)
}

/// Changes all of these bytes.
fn garble(directory: &SimDirectory, name: &str, range: Range<usize>) {
    range.for_each(|at| directory.corrupt(name, at));
}

fn page(number: usize) -> Range<usize> {
    number * PAGE_BYTES..(number + 1) * PAGE_BYTES
}

/// Returns the damaged bytes of each journal, and the state of its hint.
fn inspected(directory: &SimDirectory) -> Vec<(u64, HintState)> {
    let mut found = Vec::new();
    inspect_in(directory, |report| {
        found.push((report.damaged_bytes, report.hint));
        Ok::<_, Error>(())
    })
    .unwrap();
    found
}

/// Returns what an opening finds.
fn found(
    directory: &SimDirectory,
    options: &Options,
) -> (Recovered, BTreeMap<Vec<u8>, Option<Vec<u8>>>) {
    let cache = open(directory, options);
    let value = |key: u64| cache.get_bytes(&key.to_le_bytes()).ok().flatten();
    let values = (0..KEYS).map(|key| (key.to_le_bytes().to_vec(), value(key))).collect();
    (cache.recovered(), values)
}

/// Returns what an opening finds when these bytes are damaged, which is the same whether they are
/// changed or cannot be read.
fn recovered_with_damage(directory: &SimDirectory, name: &str, range: Range<usize>) -> Recovered {
    let [garbled, lost] = [directory.killed(), directory.killed()];
    garble(&garbled, name, range.clone());
    lost.make_unreadable(name, range);
    assert_eq!(inspected(&garbled), inspected(&lost));
    let [garbled, lost] = [garbled, lost].map(|directory| found(&directory, &options()));
    assert_eq!(lost.0, garbled.0);
    assert!(lost.1 == garbled.1);
    lost.0
}

#[test]
fn a_journal_without_its_header_is_read_with_its_hint() {
    let (directory, map) = closed();
    let recovered = recovered_with_damage(&directory, FIRST, page(0));
    assert_eq!((recovered.entries, recovered.damaged_bytes), (map.len(), 0));
    directory.make_unreadable(FIRST, page(0));
    assert_eq!(inspected(&directory)[0], (PAGE_BYTES as u64, HintState::Valid));
    let cache = open(&directory, &Options { memory_bytes: 16 * MIB, ..options() });
    assert!(contents(&cache) == map);
    // The unreadable page has no records, so the journal can be loaded into memory.
    wait_until_idle(&cache);
    assert!(cache.shared.journals.get(JournalNumber(0)).unwrap().arena.is_some());
    assert!(cache.upkeep_failure().is_none());
    cache.close().unwrap();
    assert!(contents(&open(&directory, &options())) == map);
}

#[test]
fn an_unreadable_part_of_a_journal_without_a_hint_costs_only_its_records() {
    let (directory, map) = without_hints();
    let recovered = recovered_with_damage(&directory, FIRST, page(30));
    let lost = KEYS as usize - recovered.entries;
    assert!((4..7).contains(&lost), "{recovered:?}");
    assert!((4096..8192).contains(&recovered.damaged_bytes), "{recovered:?}");

    directory.make_unreadable(FIRST, page(30));
    let whole = directory.open(FIRST).unwrap().len_bytes().unwrap();
    let cache = open(&directory, &options());
    let found = contents(&cache);
    assert!(found.iter().all(|(key, value)| map[key] == *value));
    assert_eq!(
        (found.len(), cache.stats().damaged_bytes),
        (map.len() - lost, recovered.damaged_bytes)
    );
    cache.close().unwrap();
    // It stays as it is, without a hint: another opening tries again, and finds everything.
    assert_eq!(directory.open(FIRST).unwrap().len_bytes().unwrap(), whole);
    assert_eq!(inspected(&directory)[0], (recovered.damaged_bytes, HintState::Missing));
    directory.make_readable(FIRST);
    let cache = open(&directory, &options());
    assert!(contents(&cache) == map);
    assert_eq!(cache.recovered().damaged_bytes, 0);
}

/// Zeroes there are a torn tail; unreadable bytes may be anything.
#[test]
fn unreadable_bytes_after_the_last_record_are_damage_and_not_a_torn_tail() {
    let (directory, map) = without_hints();
    let last = {
        let names = directory.list().unwrap();
        names.into_iter().filter(|name| name.ends_with(".journal")).max().unwrap()
    };
    let len = directory.open(&last).unwrap().len_bytes().unwrap() as usize;
    // The last records, and what a killed process had allocated and not used.
    let file = directory.open(&last).unwrap();
    file.write_at(MIB as u64 - PAGE_BYTES as u64, &AlignedBuf::zeroed(PAGE_BYTES)).unwrap();
    let pages = len / PAGE_BYTES;
    directory.make_unreadable(&last, (pages - 5) * PAGE_BYTES..pages * PAGE_BYTES);
    directory.make_unreadable(&last, MIB - PAGE_BYTES..MIB);
    for _ in 0..2 {
        let cache = open(&directory, &options());
        let recovered = cache.recovered();
        assert_eq!(recovered.damaged_bytes, 6 * PAGE_BYTES as u64);
        assert!(contents(&cache).len() < map.len());
        cache.close().unwrap();
        assert_eq!(
            inspected(&directory).iter().map(|it| it.0).sum::<u64>(),
            recovered.damaged_bytes
        );
    }
    directory.make_readable(&last);
    assert!(contents(&open(&directory, &options())) == map);
}

/// A journal without readable records is distinguished from one whose creation was interrupted.
#[test]
fn a_journal_without_readable_records_is_not_empty() {
    let (directory, map) = without_hints();
    directory.make_unreadable(FIRST, FIRST_RECORD..MIB);
    let cache = open(&directory, &options());
    let recovered = cache.recovered();
    assert!(recovered.damaged_bytes > 900_000, "{recovered:?}");
    assert!((1000..map.len()).contains(&recovered.entries), "{recovered:?}");
    // None of it is live now, and the next opening may be able to read it.
    assert_eq!(cache.compact(|_| ()).unwrap().damaged, 1);
    cache.close().unwrap();
    directory.make_readable(FIRST);
    assert!(contents(&open(&directory, &options())) == map);
}

#[test]
fn a_journal_without_header_and_hint_is_set_aside() {
    let (directory, map) = closed();
    let hint = "000000000000.hint";
    directory.make_unreadable(FIRST, page(0));
    directory.make_unreadable(hint, page(0));
    assert_eq!(inspected(&directory)[0], (FIRST_RECORD as u64, HintState::Missing));
    let cache = open(&directory, &options());
    assert_eq!(cache.stats().set_aside.files, 1);
    let left = contents(&cache).len();
    assert!((1000..map.len()).contains(&left), "{left}");
    cache.close().unwrap();
    // Not even a file that is completely unreadable is treated as one whose creation was
    // interrupted.
    let (directory, _) = without_hints();
    directory.make_unreadable(FIRST, 0..MIB);
    assert_eq!(open(&directory, &options()).stats().set_aside.files, 1);
}

/// Without the header, a frame in the middle, the table behind the frames, or both ends.
#[test]
fn compressed_journals_are_read_as_far_as_they_can_be() {
    let directory = SimDirectory::default();
    let options = Options { compression: Compression::Lz4, ..options() };
    let cache = open(&directory, &options);
    for key in 0..KEYS * 2 {
        cache.put(&key.to_le_bytes(), &text(key)).unwrap();
    }
    cache.close().unwrap();
    assert!(compress_all(&directory, &options).compressed > 1);
    let len = directory.open(FIRST).unwrap().len_bytes().unwrap() as usize;
    for has_hints in [true, false] {
        if !has_hints {
            remove_hints(&directory);
        }
        let [header, frame, footer] = [page(0), page(40), len - PAGE_BYTES..len];
        for parts in [vec![header.clone()], vec![frame], vec![footer.clone()], vec![header, footer]]
        {
            let [garbled, lost] = [directory.killed(), directory.killed()];
            for part in parts.clone() {
                garble(&garbled, FIRST, part.clone());
                lost.make_unreadable(FIRST, part);
            }
            let case = format!("{has_hints}, {parts:?}");
            assert_eq!(inspected(&garbled), inspected(&lost), "{case}");
            let [garbled, lost] = [garbled, lost].map(|directory| found(&directory, &options));
            assert_eq!(lost.0, garbled.0, "{case}");
            assert!(lost.1 == garbled.1, "{case}");
        }
    }
}

/// Other errors than unreadable media are temporary and do not show that data is damaged.
#[test]
fn other_errors_of_reads_refuse_the_opening() {
    let (directory, map) = without_hints();
    for reads in 1..8 {
        directory.fail_reads(reads);
        let opened = crate::open::open(Box::new(directory.clone()), options());
        assert!(matches!(opened, Err(Error::Io { .. })), "{reads} reads");
        directory.fail_reads(0);
    }
    assert!(contents(&open(&directory, &options())) == map);
    assert_eq!(open(&directory, &options()).stats().set_aside.files, 0);
}

/// The index does not contain an unreadable key, which may become readable again.
#[test]
fn an_unreadable_key_that_was_deleted_stays_deleted() {
    let (directory, map) = without_hints();
    directory.make_unreadable(FIRST, page(30));
    let options = Options { durability: Durability::Always, ..options() };
    let cache = open(&directory, &options);
    let found = contents(&cache);
    let unread: Vec<_> = map.keys().filter(|key| !found.contains_key(*key)).collect();
    assert!(unread.len() > 3);
    for key in &unread {
        assert!(!cache.delete(key).unwrap());
    }
    let left = directory.killed();
    drop(cache);
    left.make_readable(FIRST);
    assert!(contents(&open(&left, &options)) == found);
}

/// While the journal stays, neither its unreadable values nor the tombstones of other journals are
/// lost.
#[test]
fn a_partly_unreadable_journal_stays_until_an_opening_can_read_it() {
    for tail in [false, true] {
        let (directory, map) = without_hints();
        let end = directory.open(FIRST).unwrap().len_bytes().unwrap() as usize;
        directory.make_unreadable(FIRST, if tail { end - PAGE_BYTES..end } else { page(30) });
        without_maintenance_thread(&directory, &options(), |shared| {
            compact(shared, 0).unwrap();
            assert!(directory.list().unwrap().contains(&FIRST.to_owned()), "{tail}");
            // Nor if another part is unreadable now.
            directory.make_readable(FIRST);
            directory.make_unreadable(FIRST, page(60));
            compact(shared, 0).unwrap();
            assert!(directory.list().unwrap().contains(&FIRST.to_owned()), "{tail}");
            assert!(shared.maintenance.is_evicting());
        });
        directory.make_readable(FIRST);
        assert!(contents(&open(&directory, &options())) == map);
    }
}

/// Damage not known before, found by the scan for dead records.
#[test]
fn compaction_on_demand_skips_unreadable_journals() {
    let (directory, map) = closed();
    let cache = open(&directory, &options());
    for key in (0..KEYS).step_by(2) {
        assert!(cache.delete(&key.to_le_bytes()).unwrap());
    }
    cache.close().unwrap();
    directory.make_unreadable(FIRST, page(30));
    without_maintenance_thread(&directory, &options(), |shared| {
        let mut reported = 0;
        let compacted = shared.compact_all(|it| reported = it.done).unwrap();
        assert_eq!(
            (compacted.damaged, compacted.done, reported),
            (1, compacted.journals, reported)
        );
        assert!(compacted.rewritten >= 2, "{compacted:?}");
    });
    let names = directory.list().unwrap();
    assert!(
        names.contains(&FIRST.to_owned()) && !names.contains(&"000000000001.journal".to_owned())
    );
    directory.make_readable(FIRST);
    let left = contents(&open(&directory, &options()));
    assert_eq!(left.len(), map.len() / 2);
    // Any other error ends it.
    let (directory, _) = closed();
    without_maintenance_thread(&directory, &options(), |shared| {
        directory.fail_reads(1);
        assert!(matches!(shared.compact_all(|_| {}), Err(Error::Io { .. })));
    });
}
