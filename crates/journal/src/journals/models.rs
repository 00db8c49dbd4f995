//! Models of a journal's memory and its slot in the table, from one journal to the next, with
//! concurrent reads, writes, moves, evictions and removals in every order of their steps: `cargo
//! xtask loom`.
//!
//! Index, table, pool and arenas are the real ones, on the model checker's locks and atomics and
//! with a stand-in for `arc_swap` (`sync/modelled.rs`). What the threads of a cache do with them is
//! repeated here in a few lines each: the steps that matter to a reader, without files and
//! durability. The model checker tracks each access to the bytes of a granule. It fails if a byte
//! is written that may still be read, and if a thread waits forever.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use alluvium_device::{GRANULE_BYTES, PAGE_BYTES};
use loom::thread;

use super::*;
use crate::allocator::RELEASE_WITHIN;
use crate::files::{File, OpenFile};
use crate::index::Writer;
use crate::journal::{Counts, Loaded};
use crate::pool::{Pool, Pooled};
use crate::position::Granule;
use crate::record::{Content, NewRecord, Record, Salt};

const KEY: u8 = b'k';
const OTHER: u8 = b'o';

/// The position of the first record of a journal.
const FIRST: Granule = Granule(1);

/// Keys of one bucket with the same tag: only the fingerprint distinguishes them.
fn hash(key: u8) -> KeyHash {
    KeyHash { high: 0, fingerprint: key.into() }
}

fn salt(number: JournalNumber) -> Salt {
    Salt(number.0)
}

fn record<'a>(key: &'a [u8; 1], value: &'a [u8; 1]) -> NewRecord<'a> {
    NewRecord { key, content: Content::Value { value, expires_at: None } }
}

/// A read-only file.
struct Written(Vec<u8>);

impl File for Written {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        to.copy_from_slice(&self.0[at as usize..][..to.len()]);
        Ok(())
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn truncate(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}

/// The state that a cache has between its callers and its journals; journals of a page, and a table
/// with two slots.
struct Model {
    pool: Pool,
    index: Index,
    journals: Journals,
}

impl Model {
    /// Creates a model with memory for this many journals.
    fn new(arenas: usize) -> Arc<Self> {
        Arc::new(Self {
            pool: Pool::new(PAGE_BYTES, arenas),
            index: Index::with_capacity(0).unwrap(),
            journals: Journals::new(2, &Options::default(), PAGE_BYTES),
        })
    }

    /// Makes a new journal the newest one, in this memory; its slot in the table must be free.
    fn begin(&self, number: u64, arena: Pooled, file: Vec<u8>) -> Arc<Journal> {
        let number = JournalNumber(number);
        // The header.
        arena.reserve(GRANULE_BYTES).expect("it is empty").publish();
        let file: OpenFile = std::sync::Arc::new(Written(file));
        let journal = Arc::new(Journal {
            number,
            path: std::path::PathBuf::new(),
            salt: salt(number),
            file,
            file_bytes: PAGE_BYTES as u64,
            frames: None,
            arena: Some(Arc::new(arena)),
            free_journals: AtomicUsize::new(0),
            counts: Arc::new(Counts::new(PAGE_BYTES)),
        });
        assert!(self.journals.is_free(number));
        self.journals.put(journal.clone());
        journal
    }

    /// Creates journal 1, sealed, with one record, in memory and in its file.
    fn begin_with(&self, key: u8, value: u8) -> Position {
        let number = JournalNumber(1);
        let (key_bytes, value_bytes) = ([key], [value]);
        let record = record(&key_bytes, &value_bytes);
        let mut file = vec![0; PAGE_BYTES];
        let to = &mut file[FIRST.byte()..][..record.len_bytes()];
        record.write(to, salt(number), number, FIRST);
        let journal = self.begin(number.0, self.pool.take().expect("free"), file);
        let position = self.put(&journal, key, value);
        assert_eq!(position.first(), FIRST);
        let arena = journal.arena.as_ref().expect("in memory");
        arena.close();
        assert!(arena.try_seal());
        position
    }

    /// As `Shared::append_and_index`, which is also how compaction moves a record.
    fn put(&self, newest: &Journal, key: u8, value: u8) -> Position {
        let mut writer = self.index.lock(hash(key));
        self.append_and_index(&mut writer, newest, key, value).expect("it fits")
    }

    /// `None` if the journal is full.
    fn append_and_index(
        &self,
        writer: &mut Writer<'_>,
        newest: &Journal,
        key: u8,
        value: u8,
    ) -> Option<Position> {
        writer.reserve_slot().unwrap();
        let (key_bytes, value_bytes) = ([key], [value]);
        let record = record(&key_bytes, &value_bytes);
        let arena = newest.arena.as_ref().expect("in memory");
        let mut taken = arena.reserve(record.len_bytes())?;
        let first = Granule::at(taken.at());
        record.write(&mut taken, newest.salt, newest.number, first);
        let position = Position::new(newest.number, first, record.len_bytes(), false, hash(key));
        newest.counts.count(position);
        taken.publish();
        if let Some(old) = writer.set(position) {
            self.journals.mark_dead(old);
        }
        Some(position)
    }

    /// As `Cache::read`: loads what the index names, from memory or from the file.
    fn load(&self, key: u8) -> Option<Loaded> {
        let hash = hash(key);
        let (position, journal) = self.journals.find(&self.index, hash, self.index.find(hash))?;
        Some(journal.load(position).expect("what the index names is there"))
    }

    fn get(&self, key: u8) -> Option<u8> {
        self.load(key).map(|loaded| value_of(key, &loaded))
    }

    /// As `Shared::demote`, for the oldest journal.
    fn demote(&self) {
        let hot = self.journals.all().remove(0);
        self.journals.replace(&hot, Arc::new(hot.with_memory(None)));
    }

    /// As eviction and compaction process a record of a journal to be removed, if it is the newest
    /// of its key: drops it or rewrites it to the newest journal.
    fn move_or_drop(&self, key: u8, position: Position, kept: Option<(&Journal, u8)>) {
        let mut writer = self.index.lock(hash(key));
        if !writer.get().is_some_and(|named| named.is_same(position)) {
            return;
        }
        match kept {
            Some((newest, value)) => {
                self.append_and_index(&mut writer, newest, key, value).expect("it fits");
            }
            None => self.journals.mark_dead(writer.remove().expect("just seen")),
        }
    }
}

fn value_of(key: u8, loaded: &Loaded) -> u8 {
    let record = Record::trusted(loaded.bytes()).expect("a record");
    assert_eq!(record.key(), [key], "another key's record");
    assert_eq!(record.value().len(), 1);
    record.value()[0]
}

/// The allocator takes the memory of a hot journal while a reader looks for a record in it or has
/// found it: it waits until the reader has released it before it writes to it.
#[test]
fn a_journal_takes_the_memory_of_one_that_is_read() {
    loom::model(|| {
        let model = Model::new(1);
        model.begin_with(KEY, 1);
        let reader = {
            let model = model.clone();
            thread::spawn(move || {
                assert_eq!(model.get(KEY), Some(1));
                assert!(matches!(model.get(OTHER), None | Some(2)));
            })
        };
        let taken = model.pool.take_for_writers(RELEASE_WITHIN, || model.demote());
        let newest = model.begin(2, taken.unwrap().expect("no time passes"), Vec::new());
        model.put(&newest, OTHER, 2);
        reader.join().unwrap();
        assert_eq!([KEY, OTHER].map(|key| model.get(key)), [Some(1), Some(2)]);
        assert_eq!(model.pool.excess(), 0);
    });
}

/// A reader keeps what it has found: writers take other memory, beyond the budget, which is
/// respected again once the reader releases it.
#[test]
fn a_held_value_is_not_overwritten() {
    loom::model(|| {
        let model = Model::new(1);
        model.begin_with(KEY, 1);
        let reader = {
            let model = model.clone();
            thread::spawn(move || model.load(KEY).expect("it is there all the time"))
        };
        model.demote();
        let newest = model.begin(2, model.pool.take_or_create().unwrap(), Vec::new());
        model.put(&newest, OTHER, 2);
        let kept = reader.join().unwrap();
        assert_eq!(value_of(KEY, &kept), 1);
        drop(kept);
        assert_eq!((model.get(OTHER), model.pool.excess()), (Some(2), 0));
    });
}

/// Compaction moves a record and removes its journal while a reader is between the index and the
/// record; another journal takes over the slot in the table and the memory.
#[test]
fn a_record_is_moved_and_its_journal_removed() {
    loom::model(|| {
        let model = Model::new(2);
        let position = model.begin_with(KEY, 1);
        let newest = model.begin(2, model.pool.take_or_create().unwrap(), Vec::new());
        let reader = {
            let model = model.clone();
            thread::spawn(move || assert_eq!(model.get(KEY), Some(1)))
        };
        model.move_or_drop(KEY, position, Some((&*newest, 1)));
        drop(model.journals.remove(JournalNumber(1)));
        let next = model.begin(3, model.pool.take_or_create().unwrap(), Vec::new());
        assert_eq!(model.put(&next, OTHER, 3).first(), position.first());
        reader.join().unwrap();
        assert_eq!([KEY, OTHER].map(|key| model.get(key)), [Some(1), Some(3)]);
    });
}

/// Eviction removes a journal that has just been sealed if nothing in it is live, but not together
/// with the record that was published last.
#[test]
fn a_journal_is_not_removed_with_a_record_just_published() {
    loom::model(|| {
        let model = Model::new(1);
        let oldest = model.begin(1, model.pool.take().expect("free"), Vec::new());
        let user = {
            let (model, oldest) = (model.clone(), oldest.clone());
            thread::spawn(move || {
                let entered =
                    model.append_and_index(&mut model.index.lock(hash(KEY)), &oldest, KEY, 1);
                assert_eq!(model.get(KEY), entered.map(|_| 1));
            })
        };
        let arena = oldest.arena.as_ref().expect("in memory");
        arena.close();
        if arena.try_seal() && oldest.counts.live_bytes.load(Ordering::Relaxed) == 0 {
            drop(model.journals.remove(JournalNumber(1)));
        }
        user.join().unwrap();
    });
}

/// The key is written while its journal is removed: no reader sees the old value afterwards or
/// loses the new one.
fn a_key_is_written_while_its_journal_is_removed(is_kept: bool) {
    loom::model(move || {
        let model = Model::new(2);
        let position = model.begin_with(KEY, 1);
        let newest = model.begin(2, model.pool.take_or_create().unwrap(), Vec::new());
        let user = {
            let (model, newest) = (model.clone(), newest.clone());
            thread::spawn(move || {
                let before = model.get(KEY);
                assert!(before == Some(1) || (before.is_none() && !is_kept), "{before:?}");
                model.put(&newest, KEY, 2);
                assert_eq!(model.get(KEY), Some(2));
            })
        };
        model.move_or_drop(KEY, position, is_kept.then_some((&*newest, 1)));
        drop(model.journals.remove(JournalNumber(1)));
        let next = model.begin(3, model.pool.take_or_create().unwrap(), Vec::new());
        model.put(&next, OTHER, 3);
        user.join().unwrap();
        assert_eq!([KEY, OTHER].map(|key| model.get(key)), [Some(2), Some(3)]);
    });
}

#[test]
fn a_key_is_written_while_it_is_evicted() {
    a_key_is_written_while_its_journal_is_removed(false);
}

#[test]
fn a_key_is_written_while_it_is_moved() {
    a_key_is_written_while_its_journal_is_removed(true);
}
