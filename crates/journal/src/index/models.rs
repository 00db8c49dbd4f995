//! A model of one slot between its writer and its readers, in every order of their steps: `cargo
//! xtask loom`.

use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::position::{Granule, JournalNumber};

/// Keys of one bucket with the same tag: only the fingerprint distinguishes them.
fn hash(key: u64) -> KeyHash {
    KeyHash { high: 0, fingerprint: key }
}

fn position(granule: u32) -> Position {
    Position::new(JournalNumber(1), Granule(granule), 64, false, hash(0))
}

fn table_with(key: u64, position: Position) -> (Arc<Table>, Fill) {
    let table = Arc::new(Table::new(1).unwrap());
    let (slot, _) = table.free_slot(hash(key).fingerprint);
    table.fill_slot(slot, hash(key).fingerprint, position);
    (table, Fill { entries: 1, removed: 0 })
}

/// A slot changes from one key to another: no reader sees one key with the position of the other.
#[test]
fn a_reused_slot_never_mixes_two_keys() {
    loom::model(|| {
        let (old, new) = (position(600), position(700));
        let (table, mut fill) = table_with(1, old);
        let readers: Vec<_> = [1, 2]
            .map(|key| {
                let table = table.clone();
                thread::spawn(move || table.find(hash(key)).map(|(_, position)| position))
            })
            .into();
        let (slot, _) = table.find(hash(1)).unwrap();
        assert_eq!(table.remove(slot, &mut fill), old);
        let (again, _) = table.free_slot(hash(2).fingerprint);
        assert_eq!(again, slot);
        table.fill_slot(again, hash(2).fingerprint, new);
        let found: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        assert!(found[0].is_none_or(|it| it == old));
        assert!(found[1].is_none_or(|it| it == new));
        assert_eq!(table.find(hash(2)), Some((slot, new)));
    });
}

/// A key that is present throughout is found before and after its record moves, while a reader
/// marks it.
#[test]
fn a_record_moves() {
    loom::model(|| {
        let (old, new) = (position(600), position(700));
        let (table, _) = table_with(1, old);
        let reader = {
            let table = table.clone();
            thread::spawn(move || {
                let (slot, found) = table.find(hash(1)).expect("it is there all the time");
                let word = &table.words[slot * SLOT_WORDS];
                let _ = word.compare_exchange(
                    found.0,
                    found.marked_read().0,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                found
            })
        };
        let (slot, _) = table.find(hash(1)).unwrap();
        let was = Position(table.words[slot * SLOT_WORDS].swap(new.0, Ordering::AcqRel));
        assert!(was.is_same(old));
        let found = reader.join().unwrap();
        assert!(found.is_same(old) || found.is_same(new));
        let (_, last) = table.find(hash(1)).unwrap();
        assert!(last.is_same(new));
    });
}

/// A table that has become too small is replaced, by the grower or by the writer that finds it
/// full, while a reader looks for a key that is present throughout and marks it.
#[test]
fn a_table_grows_while_it_is_read() {
    loom::model(|| {
        let index = Arc::new(Index::with_capacity(0).unwrap());
        let small = index.shards[0].table.load().slots();
        let insert = |key: u32| {
            let mut writer = index.lock(hash(key.into()));
            writer.reserve_slot().unwrap();
            assert_eq!(writer.set(position(key)), None);
        };
        let full = max_slots(FIRST_BUCKETS_LOG2) as u32;
        (1..=full).for_each(insert);
        let grower = {
            let index = index.clone();
            thread::spawn(move || index.grow_crowded())
        };
        let reader = {
            let index = index.clone();
            thread::spawn(move || {
                let found = index.find(hash(1)).expect("it is there all the time");
                assert!(found.is_same(position(1)));
                index.mark_read(hash(1), found);
                index.find(hash(u64::from(full) + 1))
            })
        };
        insert(full + 1);
        let last = reader.join().unwrap();
        assert!(last.is_none_or(|found| found == position(full + 1)));
        grower.join().unwrap();
        assert_eq!(index.shards[0].table.load().slots(), 2 * small, "replaced once");
        for key in 1..=full + 1 {
            assert!(index.find(hash(key.into())).is_some_and(|found| found.is_same(position(key))));
        }
    });
}
