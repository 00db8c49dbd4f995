//! What a server needs from a cache: conditional writes, calls that must not wait, a scan without
//! state, compaction on demand.

use std::collections::BTreeSet;

use super::*;
use crate::{Lookup, ScanCursor, Ttl, When};

#[test]
fn a_swap_depends_on_and_returns_the_present_value() {
    let cache = open(&SimDirectory::default(), &options());
    let swap = |value: &[u8], when, ttl| {
        let swapped = cache.swap(b"key", value, when, ttl).unwrap();
        (swapped.old.map(|old| old.to_vec()), swapped.is_written)
    };
    let one_hour = Ttl::After(Duration::from_secs(3600));
    assert_eq!(swap(b"0", When::IfPresent, Ttl::None), (None, false));
    assert!(!cache.contains(b"key").unwrap());
    assert_eq!(swap(b"1", When::IfAbsent, one_hour), (None, true));
    assert_eq!(swap(b"2", When::IfAbsent, Ttl::None), (Some(b"1".to_vec()), false));
    assert_eq!(swap(b"3", When::IfPresent, Ttl::Keep), (Some(b"1".to_vec()), true));
    let (value, left) = cache.get_with_ttl(b"key").unwrap().unwrap();
    assert_eq!(*value, *b"3");
    assert!(left.unwrap() > Duration::from_secs(3000), "it was kept");
    assert_eq!(swap(b"4", When::Always, Ttl::None), (Some(b"3".to_vec()), true));
    assert!(cache.get_with_ttl(b"key").unwrap().unwrap().1.is_none());
    // An expired key is absent.
    assert!(swap(b"5", When::Always, Ttl::After(Duration::ZERO)).1);
    assert_eq!(swap(b"6", When::IfPresent, Ttl::None), (None, false));
    assert_eq!(swap(b"7", When::IfAbsent, Ttl::Keep), (None, true));
    assert_eq!(cache.get_bytes(b"key").unwrap(), Some(b"7".to_vec()));
    assert!(matches!(cache.swap(b"", b"", When::Always, Ttl::None), Err(Error::KeyEmpty)));
}

/// Each value that is put is returned once, or is present in the end: swaps are atomic.
#[test]
fn nothing_is_lost_between_swaps() {
    const THREADS: u64 = 4;
    const EACH: u64 = 20_000;
    let cache = Arc::new(open(&SimDirectory::default(), &options()));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let cache = cache.clone();
            thread::spawn(move || {
                let swap = |number: u64| {
                    let value = (thread * EACH + number).to_le_bytes().repeat(10);
                    cache.swap(b"key", &value, When::Always, Ttl::None).unwrap().old
                };
                let came_out = (0..EACH).filter_map(swap);
                came_out
                    .map(|old| u64::from_le_bytes(old[..8].try_into().unwrap()))
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    let mut all: Vec<_> = threads.into_iter().flat_map(|it| it.join().unwrap()).collect();
    let last = cache.get(b"key").unwrap().unwrap();
    all.push(u64::from_le_bytes(last[..8].try_into().unwrap()));
    all.sort_unstable();
    assert!(all.into_iter().eq(0..THREADS * EACH));
}

#[test]
fn try_get_reports_what_is_on_disk() {
    let cache = open(&SimDirectory::default(), &options());
    cache.put(b"key", b"value").unwrap();
    let written = put_until_on_disk(&cache, b"key");
    assert!(matches!(cache.try_get(b"key").unwrap(), Lookup::OnDisk));
    assert_eq!(cache.read_bytes(b"key"), 24);
    assert_eq!(cache.read_bytes(&(written - 1).to_le_bytes()), 0, "it is in memory");
    assert_eq!(cache.get_bytes(b"key").unwrap(), Some(b"value".to_vec()));
    assert!(matches!(cache.try_get(b"other").unwrap(), Lookup::Absent));
    cache.put_with_ttl(b"other", b"new", Duration::from_secs(3600)).unwrap();
    let Lookup::Found(value, Some(left)) = cache.try_get(b"other").unwrap() else {
        panic!("it is in memory");
    };
    assert!(*value == *b"new" && left > Duration::from_secs(3000));
}

#[test]
fn try_put_reports_that_it_would_wait() {
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 8 << 20, when_full: WhenFull::Refuse, ..options() };
    let cache = open(&directory, &options);
    assert!(cache.try_put(b"key", b"value", None).unwrap());
    assert_eq!(cache.get_bytes(b"key").unwrap(), Some(b"value".to_vec()));
    assert!(matches!(cache.try_put(b"", b"", None), Err(Error::KeyEmpty)));
    let mut key = 0u64;
    while cache.put(&key.to_le_bytes(), &[3; 1000]).is_ok() {
        key += 1;
    }
    assert!(!cache.try_put(&key.to_le_bytes(), &[3; 1000], None).unwrap());
    assert!(!cache.contains(&key.to_le_bytes()).unwrap(), "nothing was written");
    drop(cache);
    let always = Options { durability: Durability::Always, max_disk_bytes: 64 << 20, ..options };
    let cache = open(&directory, &always);
    assert!(!cache.try_put(b"other", b"value", None).unwrap());
    assert!(!cache.contains(b"other").unwrap());
}

fn scanned(cache: &Cache, limit: usize) -> Vec<Vec<u8>> {
    let (mut at, mut keys) = (ScanCursor::default(), Vec::new());
    loop {
        let found = cache.scan(at, limit).unwrap();
        keys.extend(found.keys);
        let Some(next) = found.next else { return keys };
        assert!(next.0 > at.0, "it comes to an end");
        at = next;
    }
}

#[test]
fn a_scan_returns_each_key_once() {
    let cache = open(&SimDirectory::default(), &options());
    assert_eq!(cache.scan(ScanCursor::default(), 10).unwrap(), crate::Scanned::default());
    // More than memory holds, so that some have to be read from the disk.
    let mut expected = BTreeSet::new();
    for number in 0..20_000u64 {
        cache.put(&key(number), &[1; 500]).unwrap();
        expected.insert(key(number));
    }
    for number in (0..20_000).step_by(3) {
        cache.delete(&key(number)).unwrap();
        expected.remove(&key(number));
    }
    cache.put_with_ttl(b"expired", b"", Duration::ZERO).unwrap();
    for limit in [1, 100, usize::MAX] {
        let mut keys = scanned(&cache, limit);
        keys.sort_unstable();
        assert!(keys.iter().eq(&expected), "limit {limit}: {} keys", keys.len());
    }
    // Any number from outside is a valid cursor.
    let mut random = Random::new(1);
    for _ in 0..1000 {
        let found = cache.scan(ScanCursor(random.next_u64()), 3).unwrap();
        assert!(found.keys.iter().all(|key| expected.contains(key)));
    }
    assert!(cache.scan(ScanCursor(u64::MAX), 3).unwrap().next.is_none());
}

#[test]
fn a_scan_reads_the_disk_only_if_permitted() {
    let cache = open(&SimDirectory::default(), &options());
    let expected: BTreeSet<_> = (0..20_000).map(key).collect();
    for key in &expected {
        cache.put(key, &[1; 500]).unwrap();
    }
    let (mut at, mut keys) = (ScanCursor::default(), Vec::new());
    while let Some(found) = cache.scan_within(at, usize::MAX, |read_bytes| read_bytes == 0).unwrap()
    {
        keys.extend(found.keys);
        at = found.next.expect("not all of them are in memory");
    }
    // It continues where it was refused.
    let mut most_bytes = 0;
    loop {
        let may_read = |read_bytes: usize| {
            most_bytes = read_bytes.max(most_bytes);
            true
        };
        let found = cache.scan_within(at, usize::MAX, may_read).unwrap().unwrap();
        keys.extend(found.keys);
        let Some(next) = found.next else { break };
        at = next;
    }
    assert!((500..1000).contains(&most_bytes), "{most_bytes}");
    keys.sort_unstable();
    assert!(keys.iter().eq(&expected), "{} keys", keys.len());
}

/// Returns all keys of a closed cache, and the sizes announced before each read, in order. Its
/// threads do not run, so that all of it stays on disk.
fn scanned_from_disk(directory: &SimDirectory) -> (Vec<Vec<u8>>, Vec<usize>) {
    let (shared, _) = crate::open::open(Box::new(directory.clone()), options()).unwrap();
    let (mut at, mut keys, mut heard) = (ScanCursor::default(), Vec::new(), Vec::new());
    loop {
        let may_read = |read_bytes: usize| {
            heard.push(read_bytes);
            true
        };
        let found = shared.scan(at, usize::MAX, may_read).unwrap().expect("all may be read");
        keys.extend(found.keys);
        let Some(next) = found.next else { break };
        at = next;
    }
    keys.sort_unstable();
    heard.sort_unstable();
    (keys, heard)
}

#[test]
fn a_scan_reads_only_the_beginning_of_long_records() {
    const PAGES: usize = 2 * 4096;
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    let mut expected = BTreeSet::new();
    // Each at another position within a page.
    for number in 0..60u64 {
        let (key, value) = (key(number), vec![2; 30_000 + number as usize * 72]);
        match number % 2 {
            0 => cache.put(&key, &value).unwrap(),
            _ => cache.put_with_ttl(&key, &value, Duration::from_secs(3600)).unwrap(),
        }
        expected.insert(key);
    }
    let long_key = vec![b'k'; 5000];
    cache.put(&long_key, &[3; 100_000]).unwrap();
    expected.insert(long_key.clone());
    cache.put_with_ttl(b"expired", &[4; 200_000], Duration::ZERO).unwrap();
    cache.close().unwrap();
    let (keys, heard) = scanned_from_disk(&directory);
    assert!(keys.iter().eq(&expected), "{} keys", keys.len());
    // The beginning of each; all of those whose key is longer than that, or that appear to have
    // expired.
    let (heads, whole) = heard.split_at(expected.len() + 1);
    assert!(heads.iter().all(|bytes| (4096..=PAGES).contains(bytes)), "{heads:?}");
    assert_eq!(whole, [114_688, 229_376]);
    // Not even these if that is refused.
    let (shared, _) = crate::open::open(Box::new(directory), options()).unwrap();
    let mut at = ScanCursor::default();
    while let Some(found) = shared.scan(at, usize::MAX, |bytes| bytes <= PAGES).unwrap() {
        assert!(!found.keys.contains(&long_key));
        at = found.next.expect("not all of them were let pass");
    }
}

/// A scan trusts a key because of its hash, and nothing else that it has not verified.
#[test]
fn a_scan_of_damaged_records_returns_no_key_that_was_never_there() {
    const KEYS: [&[u8]; 6] = [b"a", b"b", b"c", b"d", b"e", b"f"];
    const RECORD_BYTES: usize = 100_024;
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for key in KEYS {
        cache.put(key, &[b'v'; RECORD_BYTES - 24]).unwrap();
    }
    cache.close().unwrap();
    // A byte of each: in the value, of the key, of its length, of the checksum, of the flags, of
    // the kind.
    for (record, at) in [50_000, 16, 6, 0, 5, 4].into_iter().enumerate() {
        directory.corrupt("000000000000.journal", 4096 + record * RECORD_BYTES + at);
    }
    assert_eq!(scanned_from_disk(&directory).0, [b"a", b"d"]);
    let cache = open(&directory, &options());
    for key in KEYS {
        assert!(matches!(cache.get(key), Err(Error::Corrupt { .. })), "{}", key.escape_ascii());
    }
    // A caller that knows the key can delete it.
    assert!(cache.delete(b"a").unwrap() && cache.get(b"a").unwrap().is_none());
}

/// While the table grows and keys are replaced, moved and evicted.
#[test]
fn a_scan_returns_every_key_that_is_present_throughout() {
    let options = Options { max_disk_bytes: 12 << 20, ..options() };
    let cache = Arc::new(open(&SimDirectory::default(), &options));
    let stays = |number: u64| number.to_le_bytes();
    for number in 0..50 {
        cache.put(&stays(number), &[6; 100]).unwrap();
    }
    let is_done = Arc::new(AtomicBool::new(false));
    let writer = {
        let (cache, is_done) = (cache.clone(), is_done.clone());
        thread::spawn(move || {
            let mut number = 100u64;
            while !is_done.load(Ordering::Relaxed) {
                for _ in 0..500 {
                    cache.put(&number.to_le_bytes(), &[7; 300]).unwrap();
                    number += 1;
                }
                for kept in 0..50u64 {
                    match kept % 2 {
                        // Read, so that it is moved; or replaced, alternately with a time to live
                        // and without.
                        0 => assert!(cache.contains(&kept.to_le_bytes()).unwrap()),
                        _ if number.is_multiple_of(1000) => {
                            cache.put(&kept.to_le_bytes(), &[8; 100]).unwrap();
                        }
                        _ => {
                            let ttl = Duration::from_secs(3600);
                            cache.put_with_ttl(&kept.to_le_bytes(), &[9; 100], ttl).unwrap();
                        }
                    }
                }
            }
        })
    };
    let mut rounds = 0;
    while rounds < 30 || cache.stats().evicted < 20_000 {
        let found: BTreeSet<_> = scanned(&cache, 50).into_iter().collect();
        for number in 0..50 {
            assert!(found.contains(&stays(number)[..]), "round {rounds}: {number}");
        }
        rounds += 1;
    }
    is_done.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}

#[test]
fn compaction_on_demand_leaves_nothing_dead() {
    let directory = SimDirectory::default();
    let mut random = Random::new(5);
    let mut map = BTreeMap::new();
    let cache = open(&directory, &options());
    for step in 0..40_000 {
        let key = key(random.below(15_000));
        // Too few to be worthwhile in the background.
        match random.below(8) {
            0 if map.remove(&key).is_some() => assert!(cache.delete(&key).unwrap()),
            _ if step < 25_000 || random.chance(0.1) => {
                let value = vec![step as u8; 300 + random.index(300)];
                cache.put(&key, &value).unwrap();
                map.insert(key, value);
            }
            _ => {}
        }
    }
    cache.put_with_ttl(b"expired", &[1; 1000], Duration::ZERO).unwrap();
    cache.close().unwrap();
    let cache = open(&directory, &options());
    let before = wait_until_idle(&cache);
    let mut reported = Vec::new();
    let compacted = cache.compact(|compacted| reported.push(*compacted)).unwrap();
    assert!(compacted.rewritten > 0 && compacted.damaged == 0, "{compacted:?}");
    assert_eq!(compacted.done, compacted.journals);
    assert_eq!(reported.len(), compacted.journals + 1);
    assert!(contents(&cache) == map);
    // What is left is live, except for tombstones that became unnecessary last.
    cache.close().unwrap();
    let cache = open(&directory, &options());
    let again = cache.compact(|_| ()).unwrap();
    assert!(again.rewritten < compacted.rewritten, "{again:?} after {compacted:?}");
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    let records = map.len() * 24;
    cache.close().unwrap();
    let cache = open(&directory, &options());
    let after = wait_until_idle(&cache);
    assert!(after.disk_bytes < before.disk_bytes, "{before:?}, {after:?}");
    // The newest journal, its successor, and unused space at the ends of the others.
    let at_most = (bytes + records) as u64 * 11 / 10 + (3 << 20);
    assert!(after.disk_bytes <= at_most, "{after:?}, not {at_most}");
    assert!(contents(&cache) == map);
    drop(cache);
    assert!(contents(&open(&directory, &options())) == map);
}

/// Puts and deletions continue, and the maintenance thread works too. All of it is less than the
/// disk budget, so nothing is evicted.
#[test]
fn compaction_on_demand_keeps_concurrent_writes() {
    let directory = SimDirectory::default();
    let options = Options { max_disk_bytes: 256 << 20, ..options() };
    let cache = Arc::new(open(&directory, &options));
    let writer = {
        let cache = cache.clone();
        thread::spawn(move || {
            let mut random = Random::new(9);
            let mut map = BTreeMap::new();
            for _ in 0..80_000 {
                let key = key(random.below(3000));
                if random.chance(0.2) {
                    assert_eq!(cache.delete(&key).unwrap(), map.remove(&key).is_some());
                } else {
                    let value = value(&mut random);
                    cache.put(&key, &value).unwrap();
                    map.insert(key, value);
                }
            }
            map
        })
    };
    let mut rewritten = 0;
    while !writer.is_finished() {
        rewritten += cache.compact(|_| ()).unwrap().rewritten;
    }
    let map = writer.join().unwrap();
    assert!(rewritten + cache.compact(|_| ()).unwrap().rewritten > 0);
    assert_eq!(cache.stats().evicted, 0);
    assert!(contents(&cache) == map);
    drop(cache);
    assert!(contents(&open(&directory, &options)) == map);
}

#[test]
fn a_damaged_journal_stays_when_everything_is_compacted() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for number in 0..2000u64 {
        cache.put(&key(number), &[5; 1000]).unwrap();
    }
    cache.close().unwrap();
    directory.corrupt("000000000000.journal", 4096 + 500);
    let cache = open(&directory, &options());
    for number in 0..2000u64 {
        if number % 2 == 1 {
            cache.delete(&key(number)).unwrap();
        }
    }
    let compacted = cache.compact(|_| ()).unwrap();
    assert_eq!(compacted.damaged, 1, "{compacted:?}");
    assert!(cache.get(&key(0)).is_err(), "the damage is reported as before");
    let there = |number: &u64| cache.contains(&key(*number)).unwrap();
    assert_eq!((1..2000).filter(there).count(), 999);
}

/// A power cut may leave such damage behind the last sync. What is lost stays lost, with the
/// journal or without it.
#[test]
fn a_journal_is_compacted_only_if_the_opening_knew_all_of_its_damage() {
    for has_more in [false, true] {
        let directory = SimDirectory::default();
        let cache = open(&directory, &options());
        for number in 0..2000u64 {
            cache.put(&key(number), &[5; 1000]).unwrap();
        }
        cache.close().unwrap();
        directory.corrupt("000000000000.journal", 4096 + 500);
        directory.remove("000000000000.hint").unwrap();
        let cache = open(&directory, &options());
        let lost_bytes = cache.recovered().damaged_bytes;
        assert!(lost_bytes > 1000 && cache.get(&key(0)).unwrap().is_none());
        if has_more {
            directory.corrupt("000000000000.journal", 4096 + 400_500);
        }
        for number in (1..2000u64).step_by(2) {
            cache.delete(&key(number)).unwrap();
        }
        let compacted = cache.compact(|_| ()).unwrap();
        assert_eq!(compacted.damaged, usize::from(has_more), "{compacted:?}");
        let is_there = directory.list().unwrap().contains(&"000000000000.journal".to_owned());
        assert_eq!(is_there, has_more);
        assert_eq!(cache.stats().damaged_bytes > lost_bytes, has_more);
        // Repeating the call changes nothing.
        assert_eq!(cache.compact(|_| ()).unwrap().damaged, usize::from(has_more));
        let there = |number: &u64| matches!(cache.get(&key(*number)), Ok(Some(_)));
        let left = (0..2000).filter(there).count();
        if has_more {
            assert!((998..=999).contains(&left), "{left}");
        } else {
            assert_eq!(left, 999);
            cache.close().unwrap();
            let cache = open(&directory, &options());
            assert_eq!((contents(&cache).len(), cache.recovered().damaged_bytes), (999, 0));
        }
    }
}

/// Connections may have taken them, and will end.
#[test]
fn writers_wait_for_a_free_descriptor() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    directory.limit_files();
    let written = thread::scope(|scope| {
        let writer = scope
            .spawn(|| (0..4000u64).try_for_each(|key| cache.put(&key.to_le_bytes(), &[1; 1000])));
        while cache.stats().stalls == 0 && !writer.is_finished() {
            thread::yield_now();
        }
        directory.unlimit_files();
        writer.join().unwrap()
    });
    written.unwrap();
    assert!(cache.failure().is_none() && cache.stats().stalls > 0);
    for key in 0..4000u64 {
        assert!(cache.contains(&key.to_le_bytes()).unwrap(), "{key}");
    }
}
