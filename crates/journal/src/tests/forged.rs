//! Caches that are hard to create otherwise: keys with the same hash; journals whose numbers wrap
//! in the index, collide in the table of journals, or lie far apart; hints that disagree with their
//! journals.

use alluvium_device::{AlignedBuf, GRANULE_BYTES, PAGE_BYTES};

use super::*;
use crate::HintState;
use crate::hash::COLLIDING;
use crate::hint::{self, Entry};
use crate::inspect::inspect_in;
use crate::journal::{CacheId, FIRST_RECORD, JournalHeader, file_name};
use crate::open::Identity;
use crate::options::Contents;
use crate::position::{Granule, JournalNumber, MAX_SPAN, NUMBER_BITS};
use crate::record::{Content, HEADER_BYTES, NewRecord, Salt};

const ID: CacheId = CacheId([7; 16]);
/// The distance at which numbers look the same to the index.
const WRAP: u64 = 1 << NUMBER_BITS;

/// Creates a cache without journals.
fn forge(hash_key: [u8; 16]) -> SimDirectory {
    let directory = SimDirectory::default();
    let identity = Identity { id: ID, hash_key, journal_bytes: MIB, contents: Contents::default() };
    write(&directory, "cache", &identity.page());
    directory
}

fn write(directory: &SimDirectory, name: &str, bytes: &AlignedBuf) {
    let file = directory.create(name, bytes.len() as u64).unwrap();
    file.write_at(0, bytes).unwrap();
    file.sync().unwrap();
    directory.sync().unwrap();
}

/// Adds a journal with the values.
fn forge_journal(directory: &SimDirectory, number: u64, values: &BTreeMap<Vec<u8>, Vec<u8>>) {
    let (number, salt) = (JournalNumber(number), Salt(!number));
    let mut bytes = AlignedBuf::zeroed(MIB);
    JournalHeader { cache: ID, number, salt, is_compressed: false }.write(&mut bytes[..PAGE_BYTES]);
    let mut at = FIRST_RECORD;
    for (key, value) in values {
        let record = NewRecord { key, content: Content::Value { value, expires_at: None } };
        let end = at + record.len_bytes();
        record.write(&mut bytes[at..end], salt, number, Granule::at(at));
        at = end.next_multiple_of(GRANULE_BYTES);
    }
    write(directory, &file_name(number), &bytes);
}

/// Returns values that fill most of a journal.
fn most_of_a_journal(first: u64) -> BTreeMap<Vec<u8>, Vec<u8>> {
    (first..first + 60).map(|key| (key.to_le_bytes().to_vec(), vec![key as u8; 16_000])).collect()
}

fn has_journal(directory: &SimDirectory, number: u64) -> bool {
    directory.list().unwrap().contains(&file_name(JournalNumber(number)))
}

/// A journal of another cache is set aside even if it has its hint, which does not identify its
/// cache. (For example, a backup was restored into an existing directory.)
#[test]
fn a_journal_of_another_cache_is_set_aside() {
    let (own, other) = (SimDirectory::default(), SimDirectory::default());
    open(&own, &options()).close().unwrap();
    let cache = open(&other, &options());
    cache.put(b"key", b"value").unwrap();
    cache.close().unwrap();
    let names = other.list().unwrap();
    assert!(names.iter().any(|name| name.ends_with(".hint")), "{names:?}");
    for name in names.iter().filter(|name| *name != "cache") {
        let file = other.open(name).unwrap();
        let mut bytes = AlignedBuf::zeroed(file.len_bytes().unwrap() as usize);
        file.read_at(0, &mut bytes).unwrap();
        write(&own, name, &bytes);
    }
    let cache = open(&own, &options());
    assert_eq!((contents(&cache).len(), cache.stats().entries), (0, 0));
    let names = own.list().unwrap();
    assert!(names.iter().any(|name| name.ends_with(".damaged")), "{names:?}");
}

/// With the wrong `cache` file all journals are set aside, and new ones take their numbers; with
/// the right file restored, the new ones are set aside. Renaming the first ones back restores all
/// of their contents.
#[test]
fn a_file_set_aside_replaces_nothing() {
    let directory = forge([9; 16]);
    let map = most_of_a_journal(0);
    forge_journal(&directory, 2, &map);
    let name = file_name(JournalNumber(2));
    let aside = format!("{name}.damaged");
    let identity = |id: u8| {
        let (id, contents) = (CacheId([id; 16]), Contents::default());
        let identity = Identity { id, hash_key: [9; 16], journal_bytes: MIB, contents };
        directory.remove("cache").unwrap();
        write(&directory, "cache", &identity.page());
    };
    identity(8);
    let cache = open(&directory, &options());
    assert_eq!(cache.stats().set_aside.files, 1);
    for key in 0..4000u64 {
        cache.put(&key.to_le_bytes(), &[8; 1000]).unwrap();
    }
    cache.close().unwrap();
    let names = directory.list().unwrap();
    assert!(names.contains(&name) && names.contains(&aside), "{names:?}");
    let expected = 1 + names.iter().filter(|name| name.ends_with(".journal")).count();
    identity(ID.0[0]);
    let cache = open(&directory, &options());
    assert!(contents(&cache).is_empty());
    assert_eq!(cache.stats().set_aside.files, expected);
    cache.close().unwrap();
    let names = directory.list().unwrap();
    assert!(names.contains(&"000000000002.2.journal.damaged".to_owned()), "{names:?}");
    assert!(!names.contains(&name));
    directory.rename(&aside, &name).unwrap();
    let cache = open(&directory, &options());
    assert!(contents(&cache) == map);
    assert_eq!(cache.remove_damaged().unwrap(), expected - 1);
    let names = directory.list().unwrap();
    assert!(!names.iter().any(|name| name.contains("damaged")), "{names:?}");
}

/// The highest number that a name has digits for, and one much higher than the others.
#[test]
fn the_number_of_a_journal_set_aside_does_not_matter() {
    for stray in [MAX_SPAN, 999_999_999_999] {
        for has_others in [true, false] {
            let directory = forge([9; 16]);
            if has_others {
                forge_journal(&directory, 0, &most_of_a_journal(0));
            }
            let mut page = AlignedBuf::zeroed(PAGE_BYTES);
            page.fill(0xff);
            let name = file_name(JournalNumber(stray));
            write(&directory, &name, &page);
            for key in [&b"one"[..], b"two", b"three"] {
                let cache = open(&directory, &options());
                cache.put(key, b"value").unwrap();
                cache.close().unwrap();
            }
            let cache = open(&directory, &options());
            let expected = if has_others { 63 } else { 3 };
            assert_eq!(contents(&cache).len(), expected, "{stray}, {has_others}");
            assert!(directory.list().unwrap().contains(&format!("{name}.damaged")));
        }
    }
}

/// A user who starts an older program by mistake is not merely advised to remove everything.
#[test]
fn a_cache_of_another_version_is_left_as_it_is() {
    let directory = SimDirectory::default();
    let contents = Contents::default();
    let mut page = Identity { id: ID, hash_key: [9; 16], journal_bytes: MIB, contents }.page();
    page[8] += 1;
    let checksum = crc32c::crc32c(&page[..60]);
    page[60..64].copy_from_slice(&checksum.to_le_bytes());
    write(&directory, "cache", &page);
    let opened = Cache::open_in(Box::new(directory.clone()), options());
    let Err(Error::NoCache { reason, .. }) = opened else { panic!("{opened:?}") };
    assert!(reason.contains("the program that created it"), "{reason}");
    assert_eq!(directory.list().unwrap(), ["cache"]);
}

/// Keys with the same hash share an entry, which belongs to the last one written. None returns
/// another's value.
#[test]
fn keys_with_the_same_hash_never_get_each_others_values() {
    let mut compacted = 0;
    for seed in 0..3 {
        let mut random = Random::new(seed);
        let directory = forge(COLLIDING);
        let mut cache = open(&directory, &options());
        // By the first byte, the only one that is hashed here.
        let mut map: BTreeMap<u8, (Vec<u8>, Vec<u8>)> = BTreeMap::new();
        for step in 0..10_000 {
            let class = random.below(40) as u8;
            let key = vec![class; 1 + random.index(4)];
            let value = value(&mut random);
            let context = || format!("seed {seed}, step {step}, {key:?}");
            let held = |map: &BTreeMap<u8, (Vec<u8>, Vec<u8>)>, key: &Vec<u8>| {
                map.get(&key[0]).filter(|(of, _)| of == key).map(|(_, value)| value.clone())
            };
            match random.below(10) {
                0..4 => {
                    cache.put(&key, &value).unwrap();
                    map.insert(class, (key.clone(), value));
                }
                4 => {
                    let is_new = !map.contains_key(&class);
                    let has_put = cache.put_if_absent(&key, &value, None).unwrap();
                    assert_eq!(has_put, is_new, "{}", context());
                    map.entry(class).or_insert((key.clone(), value));
                }
                5 => {
                    let was_there = map.remove(&class).is_some();
                    assert_eq!(cache.delete(&key).unwrap(), was_there, "{}", context());
                }
                6 => {
                    let keys: Vec<Vec<u8>> = (1..6).map(|len| vec![class; len]).collect();
                    let found = cache.get_many(&keys);
                    for (key, found) in keys.iter().zip(found) {
                        assert_eq!(
                            found.unwrap().as_deref(),
                            held(&map, key).as_deref(),
                            "{}",
                            context()
                        );
                    }
                }
                _ => {
                    let found = cache.get(&key).unwrap();
                    assert_eq!(found.as_deref(), held(&map, &key).as_deref(), "{}", context());
                }
            }
            if random.chance(0.001) {
                let expected: BTreeMap<_, _> = map.values().cloned().collect();
                assert!(contents(&cache) == expected, "{}", context());
                compacted += cache.stats().compacted;
                cache.close().unwrap();
                if random.chance(0.5) {
                    remove_hints(&directory);
                }
                cache = open(&directory, &options());
                assert_eq!(cache.recovered().entries, map.len(), "{}", context());
                assert!(contents(&cache) == expected, "{}", context());
            }
        }
        compacted += wait_until_idle(&cache).compacted;
    }
    assert!(compacted > 0);
}

/// The index stores 20 bits of a journal's number: after the last value comes the first one again.
#[test]
fn numbers_that_wrap_are_distinguished() {
    let directory = forge([1; 16]);
    let mut random = Random::new(5);
    let mut map: BTreeMap<_, _> =
        (0..30).map(|key_number| (key(key_number), vec![9; 900])).collect();
    forge_journal(&directory, WRAP - 9, &map);
    for round in 0..12 {
        let cache = open(&directory, &options());
        assert!(contents(&cache) == map, "round {round}");
        for _ in 0..250 {
            let key = key(random.below(200));
            if random.chance(0.2) {
                assert_eq!(cache.delete(&key).unwrap(), map.remove(&key).is_some());
            } else {
                let value = vec![round as u8; random.index(20_000)];
                cache.put(&key, &value).unwrap();
                map.insert(key, value);
            }
        }
        for number in 0..200 {
            let found = cache.get(&key(number)).unwrap();
            assert_eq!(found.as_deref(), map.get(&key(number)).map(Vec::as_slice), "{round}");
        }
        cache.close().unwrap();
        if round % 2 == 0 {
            remove_hints(&directory);
        }
    }
    assert!(contents(&open(&directory, &options())) == map);
    let names = directory.list().unwrap();
    let newest = names.iter().filter_map(|name| name.strip_suffix(".journal")).max().unwrap();
    assert!(newest.parse::<u64>().unwrap() > WRAP, "{names:?}");
}

/// The table of journals has 256 slots here. A journal that exists for long keeps its slot; the
/// number that would collide with it is skipped.
#[test]
fn a_number_whose_slot_is_taken_is_skipped() {
    const PLACES: u64 = 256;
    const OLD: u64 = 1000;
    let directory = forge([2; 16]);
    let mut map = most_of_a_journal(0);
    forge_journal(&directory, OLD, &map);
    let newer = most_of_a_journal(100);
    forge_journal(&directory, OLD + PLACES - 2, &newer);
    map.extend(newer);
    let cache = open(&directory, &options());
    for first in (200..700).step_by(100) {
        for (key, value) in most_of_a_journal(first) {
            cache.put(&key, &value).unwrap();
            map.insert(key, value);
        }
    }
    cache.flush().unwrap();
    assert!(contents(&cache) == map);
    assert!(has_journal(&directory, OLD + PLACES - 1) && has_journal(&directory, OLD + PLACES + 1));
    assert!(has_journal(&directory, OLD) && !has_journal(&directory, OLD + PLACES));
    cache.close().unwrap();
    assert!(contents(&open(&directory, &options())) == map);
}

/// Journals created with a larger budget had a larger table.
#[test]
fn journals_that_would_share_a_slot_get_a_larger_table() {
    let directory = forge([3; 16]);
    let mut map = BTreeMap::new();
    for (index, number) in [3, 3 + 256, 3 + 512, 3 + 1024].into_iter().enumerate() {
        // Each also has some of the keys of the one before it.
        let mut values = most_of_a_journal(index as u64 * 50);
        values.values_mut().for_each(|value| value.fill(index as u8));
        forge_journal(&directory, number, &values);
        map.extend(values);
    }
    let cache = open(&directory, &options());
    assert!(contents(&cache) == map);
    cache.close().unwrap();
    assert!(contents(&open(&directory, &options())) == map);
}

/// Long before the numbers wrap the oldest journal is rewritten, however much of it is live.
#[test]
fn a_journal_that_is_far_behind_is_moved() {
    const FAR_BEHIND: u64 = WRAP / 4 + 77;
    let directory = forge([4; 16]);
    let mut map = most_of_a_journal(0);
    forge_journal(&directory, 5, &map);
    let newer = most_of_a_journal(30);
    forge_journal(&directory, 5 + FAR_BEHIND, &newer);
    map.extend(newer);
    let cache = open(&directory, &options());
    while has_journal(&directory, 5) {
        // The maintenance thread is working, and nothing else shows when it is done.
        thread::sleep(Duration::from_millis(5));
    }
    assert!(contents(&cache) == map);
    drop(cache);
    assert!(contents(&open(&directory, &options())) == map);
}

/// A damaged journal is not moved, since it may hide records. Once it is far behind it is the
/// oldest and hides nothing: its readable records are moved.
#[test]
fn a_damaged_journal_that_is_far_behind_is_moved_as_far_as_it_can_be_read() {
    let directory = forge([5; 16]);
    let mut map = most_of_a_journal(0);
    forge_journal(&directory, 5, &map);
    // In the value of the second key.
    directory.corrupt(&file_name(JournalNumber(5)), FIRST_RECORD + 20_000);
    map.remove(&1u64.to_le_bytes()[..]);
    let newer = most_of_a_journal(100);
    forge_journal(&directory, 5 + WRAP / 4 + 77, &newer);
    map.extend(newer);
    let cache = open(&directory, &options());
    assert!(cache.recovered().damaged_bytes > 16_000, "{:?}", cache.recovered());
    while has_journal(&directory, 5) {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(contents(&cache) == map);
    assert_eq!(cache.stats().damaged_bytes, cache.recovered().damaged_bytes);
    drop(cache);
    assert!(contents(&open(&directory, &options())) == map);
}

/// The damaged records of a journal leave the index before its file is removed. If they were merely
/// misread, an opening that finds them again must also find that they were deleted.
#[test]
fn a_key_deleted_while_a_damaged_journal_is_removed_stays_deleted() {
    let directory = forge([7; 16]);
    let options = Options { durability: Durability::Always, ..options() };
    let cache = open(&directory, &options);
    for (key, value) in most_of_a_journal(0) {
        cache.put(&key, &value).unwrap();
    }
    // Its hint includes the damaged record.
    cache.close().unwrap();
    let (damaged, at) = (file_name(JournalNumber(0)), FIRST_RECORD + 20_000);
    directory.corrupt(&damaged, at);
    forge_journal(&directory, WRAP / 4 + 77, &most_of_a_journal(100));
    directory.hold_removals();
    let cache = open(&directory, &options);
    directory.wait_for_removal();
    let key = 1u64.to_le_bytes();
    let deleted = cache.delete(&key);
    let left = directory.killed();
    // Checked later: a panic before would wait for the maintenance thread forever.
    directory.allow_removals();
    assert!(!deleted.unwrap());
    left.corrupt(&damaged, at);
    let mut expected = most_of_a_journal(0);
    expected.remove(&key[..]);
    expected.extend(most_of_a_journal(100));
    assert!(contents(&open(&left, &options)) == expected);
}

/// Returns bytes that look like the headers of this many records of half a journal, none with a
/// valid checksum.
fn plausible_headers(headers: usize) -> Vec<u8> {
    let mut header = [0; HEADER_BYTES];
    (header[4], header[6]) = (1, 1);
    header[8..12].copy_from_slice(&(MIB as u32 / 2).to_le_bytes());
    header.repeat(headers)
}

/// An opening limits the bytes that it checksums per journal; what it gives up on is not in the
/// index. An iteration that gets there with fewer bytes spent must not return it either.
#[test]
fn an_iteration_returns_no_record_that_the_opening_gave_up() {
    let directory = forge([8; 16]);
    let (number, salt) = (JournalNumber(5), Salt(8));
    let mut bytes = AlignedBuf::zeroed(MIB);
    JournalHeader { cache: ID, number, salt, is_compressed: false }.write(&mut bytes[..PAGE_BYTES]);
    let mut at = FIRST_RECORD;
    // Each time ten of the sixteen times that the journal may be checksummed.
    for (key, headers) in [(b"first", 0), (b"found", 20), (b"later", 20), (b"never", 0)] {
        let headers = plausible_headers(headers);
        bytes[at..at + headers.len()].copy_from_slice(&headers);
        at += headers.len();
        let content = Content::Value { value: b"old", expires_at: None };
        let record = NewRecord { key, content };
        let end = at + record.len_bytes();
        record.write(&mut bytes[at..end], salt, number, Granule::at(at));
        at = end.next_multiple_of(GRANULE_BYTES);
    }
    write(&directory, &file_name(number), &bytes);
    forge_journal(&directory, 6, &BTreeMap::from([(b"later".to_vec(), b"new".to_vec())]));
    let cache = open(&directory, &options());
    let expected: BTreeMap<Vec<u8>, Vec<u8>> =
        [(b"first", &b"old"[..]), (b"found", b"old"), (b"later", b"new")]
            .into_iter()
            .map(|(key, value)| (key.to_vec(), value.to_vec()))
            .collect();
    assert!(cache.get(b"never").unwrap().is_none());
    assert_eq!(contents(&cache), expected);
}

/// If two journals are half of the numbers apart it cannot be determined which one is newer.
#[test]
fn journals_that_are_too_far_apart_are_refused() {
    let directory = forge([6; 16]);
    forge_journal(&directory, 5, &most_of_a_journal(0));
    forge_journal(&directory, 5 + WRAP / 2 - 1, &most_of_a_journal(30));
    let error = Cache::open_in(Box::new(directory.clone()), options()).unwrap_err();
    assert!(error.to_string().contains("remove 000000000005.journal"), "{error}");
    directory.remove(&file_name(JournalNumber(5))).unwrap();
    assert!(contents(&open(&directory, &options())) == most_of_a_journal(30));
}

/// The checksums and the number of entries are right: no disk error causes this, but a defect in
/// writing hints might.
#[test]
fn a_hint_that_disagrees_with_its_journal_is_reported() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for key in 0..100u64 {
        cache.put(&key.to_le_bytes(), &[5; 1000]).unwrap();
    }
    cache.close().unwrap();
    let found = || {
        let mut found = Vec::new();
        let inspected = inspect_in(&directory, |report| {
            found.push((report.damaged_bytes, report.hint));
            Ok::<_, Error>(())
        });
        assert_eq!(inspected.unwrap(), MIB);
        found
    };
    assert_eq!(found(), [(0, HintState::Valid)]);
    let number = JournalNumber(0);
    let head = hint::read_head(&directory, number, MIB).unwrap();
    let mut right = Vec::new();
    let is_whole = hint::read(&directory, number, head.salt, head, |entries| {
        right.extend_from_slice(entries);
        Ok::<_, Error>(())
    });
    assert!(is_whole.unwrap());
    let changes: [fn(&mut Entry); 6] = [
        |entry| entry.hash.high ^= 1,
        |entry| entry.hash.fingerprint ^= 1,
        |entry| entry.first.0 += 1,
        |entry| entry.len_bytes += GRANULE_BYTES,
        |entry| entry.expires = true,
        |entry| entry.is_tombstone = true,
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut wrong = right.clone();
        change(&mut wrong[50]);
        let mut writer = hint::Writer::new(&directory, number, head.salt).unwrap();
        wrong.iter().for_each(|entry| writer.push(entry).unwrap());
        writer.finish(head.end).unwrap();
        assert_eq!(found(), [(0, HintState::Mismatch)], "change {at}");
    }
}
