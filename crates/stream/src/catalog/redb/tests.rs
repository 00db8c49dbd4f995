use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use redb::StorageBackend;
use redb::backends::InMemoryBackend;

use super::space::Claim;
use super::*;
use crate::catalog::OWN_META_PREFIX;
use crate::catalog::ObjectInfo;

#[test]
fn conforms() {
    let directory = tempfile::tempdir().unwrap();
    let number = std::cell::Cell::new(0);
    super::super::conformance::run(&|| {
        number.set(number.get() + 1);
        Box::new(
            RedbCatalog::open(&directory.path().join(format!("catalog-{}", number.get()))).unwrap(),
        )
    });
}

#[test]
fn other_users_of_the_machine_cannot_read_the_catalog() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    for _ in 0..2 {
        drop(RedbCatalog::open(&path).unwrap());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        // Like a file of an earlier build.
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    }
}

#[test]
fn a_catalog_survives_reopening_and_is_open_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let catalog = RedbCatalog::open(&path).unwrap();
    super::super::conformance::fill(&catalog);
    let before = catalog.load().unwrap();
    assert!(!before.streams.is_empty() && !before.objects.is_empty() && !before.meta.is_empty());

    let error = RedbCatalog::open(&path).unwrap_err();
    assert!(error.to_string().contains("open"), "{error}");

    drop(catalog);
    assert_eq!(RedbCatalog::open(&path).unwrap().load().unwrap(), before);
}

/// A disk that is full, or fails, for a moment.
#[derive(Debug)]
struct Failing {
    inner: InMemoryBackend,
    fails: Arc<AtomicBool>,
}

impl StorageBackend for Failing {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.inner.sync_data()
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.inner.write(offset, data)
    }
}

/// The reason why the store does not retry a commit: a database that has had one error returns only
/// errors.
#[test]
fn after_an_error_a_catalog_accepts_nothing_until_it_is_reopened() {
    let fails = Arc::new(AtomicBool::new(false));
    let inner = InMemoryBackend::new();
    let backend = Failing { inner, fails: fails.clone() };
    let catalog = RedbCatalog::with_database(Path::new("c"), Watched::default(), |builder| {
        builder.create_with_backend(backend)
    })
    .unwrap();
    let change = Change::NextStreamId(StreamId(1));
    fails.store(true, Ordering::SeqCst);
    let error = catalog.commit(std::slice::from_ref(&change)).unwrap_err();
    assert!(matches!(error, CatalogError::Failed(_)), "{error}");
    fails.store(false, Ordering::SeqCst);
    let error = catalog.commit(&[change]).unwrap_err().to_string();
    assert!(error.contains("re-open the database"), "{error}");
}

fn gives_advice(error: &CatalogError) -> bool {
    error.to_string().contains("Restore it from a copy")
}

/// redb has checksums, but does not verify them on reads; every read must still give the right
/// result or an error.
#[test]
fn flipped_bits_are_detected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let catalog = RedbCatalog::open(&path).unwrap();
    super::super::conformance::fill(&catalog);
    let before = catalog.load().unwrap();
    drop(catalog);
    let image = std::fs::read(&path).unwrap();
    let stream = encode_stream(&before.streams[&StreamId(0)]);
    let found = image.windows(stream.len()).enumerate().filter(|(_, found)| *found == stream);
    let rows = found.flat_map(|(at, _)| at..at + stream.len());
    // Every 40th byte of what is used, and all of a stream's row wherever redb has written it.
    let used = (0..image.len()).filter(|at| image[*at] != 0).step_by(40);
    let mut noticed = 0;
    for at in used.chain(rows) {
        let damaged = InMemoryBackend::new();
        damaged.set_len(image.len() as u64).unwrap();
        damaged.write(0, &image).unwrap();
        damaged.write(at as u64, &[image[at] ^ 1]).unwrap();
        let mut loaded: Option<Result<_, CatalogError>> = None;
        let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let opened = RedbCatalog::with_database(&path, Watched::default(), |builder| {
                builder.create_with_backend(damaged)
            });
            loaded = Some(opened.and_then(|catalog| catalog.load()));
        }));
        assert!(opened.is_ok(), "a panic is not contained, byte {at}");
        let loaded = loaded.unwrap();
        if let Err(error) = &loaded {
            assert!(gives_advice(error), "byte {at}: {error}");
        }
        // Otherwise it is in a page that is not in use any more, or in something that redb can do
        // without.
        noticed += u32::from(loaded.is_err());
        assert_eq!(loaded.as_ref().unwrap_or(&before), &before, "byte {at}");
    }
    assert!(noticed > 20, "{noticed}");
}

#[test]
fn another_version_and_another_file_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let catalog = RedbCatalog::open(&path).unwrap();
    let transaction = catalog.begin().unwrap();
    transaction.open_table(COUNTERS).unwrap().insert(KEY_FORMAT, 2).unwrap();
    transaction.commit().unwrap();
    drop(catalog);
    let error = RedbCatalog::open(&path).unwrap_err().to_string();
    assert!(error.contains("format version 2") && error.contains("catalog"), "{error}");
    assert!(error.contains("If a newer alluvium wrote it, use that one"), "{error}");

    let other = directory.path().join("notes.txt");
    std::fs::write(&other, "not a database").unwrap();
    assert!(RedbCatalog::open(&other).unwrap_err().to_string().contains("notes.txt"));
}

/// Each refusal of rows that contradict each other gives advice and changes nothing.
#[test]
fn a_catalog_with_rows_missing_or_wrong_is_refused_with_advice() {
    type Spoil = fn(&WriteTransaction);
    const SPOILS: &[(&str, Spoil)] = &[
        ("a range of stream 0", |it| {
            it.open_table(STREAMS).unwrap().remove(0).unwrap();
            it.open_table(CHECKPOINTS).unwrap().retain(|_, _| false).unwrap();
        }),
        ("a checkpoint of stream 77", |it| {
            it.open_table(CHECKPOINTS).unwrap().insert(77, b"x".as_slice()).unwrap();
        }),
        ("a stream row", |it| {
            it.open_table(STREAMS).unwrap().insert(0, b"x".as_slice()).unwrap();
        }),
        ("a range row", |it| {
            it.open_table(RANGES).unwrap().insert((0, 0), b"x".as_slice()).unwrap();
        }),
        ("an object row", |it| {
            it.open_table(OBJECTS).unwrap().insert(0, b"x".as_slice()).unwrap();
        }),
        ("WAL id", |it| {
            it.open_table(IDENTITY).unwrap().insert(KEY_WAL, b"x".as_slice()).unwrap();
        }),
        ("lives", |it| {
            it.open_table(IDENTITY).unwrap().insert(KEY_INCARNATIONS, b"x".as_slice()).unwrap();
        }),
        ("checksum", |it| {
            it.open_table(META).unwrap().insert("x", b"x".as_slice()).unwrap();
        }),
        ("checksum", |it| {
            it.open_table(CHECKSUM).unwrap().remove(KEY_ROWS).unwrap();
        }),
        ("format version", |it| {
            it.open_table(COUNTERS).unwrap().remove(KEY_FORMAT).unwrap();
        }),
        ("format version", |it| {
            it.delete_table(COUNTERS).unwrap();
        }),
        ("objects", |it| {
            it.delete_table(OBJECTS).unwrap();
        }),
        ("meta", |it| {
            it.delete_table(META).unwrap();
            let other: TableDefinition<'_, u64, u64> = TableDefinition::new("meta");
            it.open_table(other).unwrap();
        }),
    ];
    for (named, spoil) in SPOILS {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog");
        let catalog = RedbCatalog::open(&path).unwrap();
        super::super::conformance::fill(&catalog);
        let transaction = catalog.begin().unwrap();
        spoil(&transaction);
        transaction.commit().unwrap();
        drop(catalog);
        for _ in 0..2 {
            let error = RedbCatalog::open(&path).and_then(|catalog| catalog.load()).unwrap_err();
            assert!(error.to_string().contains(named), "{named}: {error}");
            assert!(gives_advice(&error), "{named}: {error}");
        }
    }
}

/// Wherever the file ends, it is complete or refused with advice.
#[test]
fn a_truncated_catalog_is_refused_with_advice() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let catalog = RedbCatalog::open(&path).unwrap();
    super::super::conformance::fill(&catalog);
    let before = catalog.load().unwrap();
    drop(catalog);
    let image = std::fs::read(&path).unwrap();
    for pages in 0..image.len().div_ceil(4096) {
        let len = (pages * 4096).max(1);
        std::fs::write(&path, &image[..len]).unwrap();
        match RedbCatalog::open(&path).and_then(|catalog| catalog.load()) {
            Ok(loaded) => assert_eq!(loaded, before, "{len} bytes"),
            Err(error) => assert!(gives_advice(&error), "{len} bytes: {error}"),
        }
    }
}

#[test]
fn a_rows_part_in_the_sum_covers_what_is_written() {
    let row =
        [b"streams".as_slice(), &[8, 0, 0, 0, 0, 0, 0, 0], &[5, 0, 0, 0, 0, 0, 0, 0], b"value"];
    let sum = row_sum::<u64, &[u8]>("streams", &5, &b"value".as_slice());
    assert_eq!(sum, u64::from(crc32c::crc32c(&row.concat())));
}

/// A catalog as an older program has written it.
#[test]
fn a_catalog_from_before_there_were_epochs_opens() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let catalog = RedbCatalog::open(&path).unwrap();
    super::super::conformance::fill(&catalog);
    let mut expected = catalog.load().unwrap();
    let transaction = catalog.begin().unwrap();
    let mut tables = Tables::open(&transaction).ok().unwrap();
    for (id, row) in &mut expected.streams {
        row.epoch = StreamEpoch(0);
        let old = [&[1], &encode_stream(row)[1..18]].concat();
        let Tables { sum, streams, .. } = &mut tables;
        assert!(put(sum, streams, &id.0, &old.as_slice()).is_ok());
    }
    assert!(tables.close().is_ok());
    transaction.commit().unwrap();
    drop(catalog);

    let catalog = RedbCatalog::open(&path).unwrap();
    assert_eq!(catalog.load().unwrap(), expected);
    let (id, epoch) = (StreamId(0), StreamEpoch(9));
    catalog.commit(&[Change::OpenStream { id, epoch }]).unwrap();
    drop(catalog);
    let found = RedbCatalog::open(&path).unwrap().load().unwrap();
    let epochs: Vec<_> = found.streams.values().map(|row| row.epoch.0).collect();
    assert_eq!(epochs, [9, 0], "one row is rewritten, the other one is unchanged");
    assert_eq!(found.streams[&id].ranges, expected.streams[&id].ranges);
}

/// Creates a catalog on a disk with space for this many more bytes of pages; the returned counter
/// has the rest.
fn on_a_small_disk(path: &Path, left_bytes: u64) -> (RedbCatalog, Arc<AtomicU64>) {
    let left = Arc::new(AtomicU64::new(left_bytes));
    let watched = Watched::with_space(left.clone());
    let catalog = RedbCatalog::with_database(path, watched.clone(), |builder| {
        builder.create_with_backend(Disk::open(path, watched)?)
    });
    (catalog.unwrap(), left)
}

fn put_meta(number: usize, bytes: usize) -> Change {
    Change::PutMeta { key: format!("key/{number}"), value: vec![b'x'; bytes] }
}

/// Wherever the space ends, the change is refused, and the catalog is unchanged and accepts the
/// next one.
#[test]
fn a_full_disk_refuses_a_change_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    let (catalog, left) = on_a_small_disk(&path, u64::MAX);
    super::super::conformance::fill(&catalog);
    let mut before = catalog.load().unwrap();
    let mut refused = 0;
    for number in 0..60 {
        left.store(number * 8192, Ordering::Relaxed);
        // More than half of the page cache, so that pages are written before the commit.
        let changes = [put_meta(number as usize, 200), put_meta(1000, 5 << 20)];
        match catalog.commit(&changes) {
            Err(CatalogError::Full(why)) => {
                assert!(why.contains("catalog"), "{why}");
                refused += 1;
            }
            other => panic!("{number}: {other:?}"),
        }
        assert_eq!(catalog.load().unwrap(), before, "{number}");
        left.store(u64::MAX, Ordering::Relaxed);
        let version = catalog.commit(&[put_meta(number as usize, 100)]).unwrap();
        assert_eq!(version, before.version + 1);
        before = catalog.load().unwrap();
    }
    assert_eq!(refused, 60);
    drop(catalog);
    assert_eq!(RedbCatalog::open(&path).unwrap().load().unwrap(), before);
}

/// Otherwise an upgraded server would not start, and larger batches could not be appended.
#[test]
fn the_stores_own_metadata_may_use_the_whole_reserve() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = RedbCatalog::open(&directory.path().join("catalog")).unwrap();
    let key = format!("{OWN_META_PREFIX}largest-count");
    let own = Change::PutMeta { key, value: b"16384".to_vec() };
    assert!(matches!(catalog.claim(&[Change::WalMarked(1), own.clone()]), Ok(Claim::All)));
    assert!(matches!(catalog.claim(&[own, put_meta(1, 5)]), Ok(Claim::None)));
}

/// A first start that finds no space loses nothing: the next one creates the catalog.
#[test]
fn a_catalog_that_found_no_space_is_created_later() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog");
    for left_bytes in [0, 4096, 3 * 4096, 10 * 4096] {
        let watched = Watched::with_space(Arc::new(AtomicU64::new(left_bytes)));
        let made = RedbCatalog::with_database(&path, watched.clone(), |builder| {
            builder.create_with_backend(Disk::open(&path, watched)?)
        });
        if left_bytes == 0 {
            made.unwrap_err();
        }
    }
    super::super::conformance::fill(&RedbCatalog::open(&path).unwrap());
}

/// With the errors of a real file system, where this process may mount one.
#[test]
fn deletions_succeed_from_the_reserve_when_the_disk_is_full() {
    let directory = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(directory.path(), "32m") else { return };
    let path = directory.path().join("catalog");
    let catalog = RedbCatalog::open(&path).unwrap().with_reserve_of(4 << 20);
    super::super::conformance::fill(&catalog);
    let other = directory.path().join("other");
    std::fs::write(&other, vec![1; 20 << 20]).unwrap();
    let mut kept = 0;
    let full = loop {
        match catalog.commit(&[put_meta(kept, 60_000)]) {
            Ok(_) => kept += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(full, CatalogError::Full(_)), "{full}");
    // No space is left except for the reserve.
    let rest = directory.path().join("rest");
    std::fs::write(&rest, vec![1; 32 << 20]).unwrap_err();
    let before = catalog.load().unwrap();
    let refused = catalog.commit(&[put_meta(kept, 60_000)]).unwrap_err();
    assert!(matches!(refused, CatalogError::Full(_)), "{refused}");
    assert_eq!(catalog.load().unwrap(), before);
    assert!(catalog.shortage().is_some());
    // A value of the same length, or a shorter one, asks for no space.
    catalog.commit(&[put_meta(0, 60_000)]).unwrap();
    // Uploads use a part of the reserve and leave the rest to deletions.
    let upload = |number: u64| {
        let name = "x".repeat(60_000);
        let (id, index_bytes, index_position) = (ObjectId(1_000 + number), 56, 900);
        Change::AddObject(ObjectInfo {
            id,
            name,
            index_position,
            index_bytes,
            size_bytes: 1_020,
            index_crc32c: 0,
            created_at_ms: 1,
            generation: 0,
            payload_bytes: 800,
        })
    };
    let mut uploads = 0;
    let full = loop {
        match catalog.commit(&[upload(uploads)]) {
            Ok(_) => uploads += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(full, CatalogError::Full(_)), "{full}");
    assert!(uploads > 0, "uploads may use a part of the reserve");
    let before = catalog.load().unwrap();
    for number in 0..kept {
        catalog.commit(&[Change::DeleteMeta(format!("key/{number}"))]).unwrap();
    }
    let mut expected = before;
    expected.meta.retain(|key, _| !key.starts_with("key/"));
    expected.version += kept as u64;
    assert_eq!(catalog.load().unwrap(), expected);
    std::fs::remove_file(other).unwrap();
    std::fs::remove_file(rest).unwrap();
    catalog.commit(&[put_meta(kept, 60_000)]).unwrap();
    assert_eq!(catalog.shortage(), None);
    drop(catalog);
    RedbCatalog::open(&path).unwrap().load().unwrap();
    drop(disk);
}

/// A mounted file system, until it is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: &Path, size: &str) -> Option<Self> {
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(path)
            .output();
        match mount {
            Ok(output) if output.status.success() => Some(Self(path.to_path_buf())),
            other => {
                eprintln!("skipped: no file system can be mounted here: {other:?}");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: the catalog may still be open.
        let _ = std::process::Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
