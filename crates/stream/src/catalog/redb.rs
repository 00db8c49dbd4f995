//! The embedded catalog. Tables and values: `docs/format/catalog.md`.

use std::fs::File;
use std::path::{Path, PathBuf};

use alluvium_wal::LogOffset;
use bytes::Bytes;
use redb::{
    Database, DatabaseError, Durability, ReadableDatabase, ReadableTable, Table, TableDefinition,
    WriteTransaction,
};
use uuid::Uuid;

use super::{
    Catalog, CatalogError, Change, ObjectInfo, ObjectRange, Snapshot, StreamRow, Uploaded, refusal,
};
use crate::types::{ObjectId, StreamId, StreamOffset};

const FORMAT_VERSION: u64 = 1;

const COUNTERS: TableDefinition<'_, &str, u64> = TableDefinition::new("counters");
const IDENTITY: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("identity");
const STREAMS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("streams");
const CHECKPOINTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("checkpoints");
const RANGES: TableDefinition<'_, (u64, u64), &[u8]> = TableDefinition::new("ranges");
const OBJECTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("objects");
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

const KEY_FORMAT: &str = "format_version";
const KEY_NEXT_STREAM: &str = "next_stream_id";
const KEY_NEXT_OBJECT: &str = "next_object_id";
const KEY_UPLOADED_LOG: &str = "uploaded_log";
const KEY_WAL: &str = "wal_id";

/// The catalog is small and read once, so a small page cache does; redb's default of 1 GiB would be most of an idle
/// server's memory.
const PAGE_CACHE_BYTES: usize = 8 << 20;

/// The embedded catalog, on `redb`: one file, one process at a time.
pub struct RedbCatalog {
    database: Database,
    path: PathBuf,
}

impl std::fmt::Debug for RedbCatalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedbCatalog").field("path", &self.path).finish_non_exhaustive()
    }
}

impl RedbCatalog {
    /// Open the catalog in the file at `path`, or create it there. Blocking.
    ///
    /// Fails if another process has it open, if the file is something else, or if a newer version wrote it.
    pub fn open(path: &Path) -> Result<Self, CatalogError> {
        let named = |what: String| CatalogError::Failed(format!("{}: {what}", path.display()));
        let database =
            Database::builder().set_cache_size(PAGE_CACHE_BYTES).create(path).map_err(|error| {
                match error {
                    DatabaseError::DatabaseAlreadyOpen => {
                        named("another process has it open; is the server running already?".into())
                    }
                    other => named(other.to_string()),
                }
            })?;
        let catalog = Self { database, path: path.to_path_buf() };
        catalog.initialise()?;
        // A new file is only there for good when its directory says so.
        if let Some(directory) = path.parent() {
            let directory =
                if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
            File::open(directory)
                .and_then(|directory| directory.sync_all())
                .map_err(|error| named(format!("can not sync its directory: {error}")))?;
        }
        Ok(catalog)
    }

    /// Create the tables of a new catalog, or check that this version understands an old one.
    fn initialise(&self) -> Result<(), CatalogError> {
        let transaction = self.begin()?;
        let found = {
            let mut counters = transaction.open_table(COUNTERS).map_err(|e| self.error(e))?;
            let found = counters.get(KEY_FORMAT).map_err(|e| self.error(e))?.map(|v| v.value());
            if found.is_none() {
                counters.insert(KEY_FORMAT, FORMAT_VERSION).map_err(|e| self.error(e))?;
            }
            found
        };
        match found {
            Some(FORMAT_VERSION) => return transaction.abort().map_err(|e| self.error(e)),
            Some(other) => {
                return Err(CatalogError::Failed(format!(
                    "{}: format version {other} is not known, only {FORMAT_VERSION}",
                    self.path.display()
                )));
            }
            None => {}
        }
        Tables::open(&transaction).map_err(|e| self.error(e))?;
        transaction.commit().map_err(|e| self.error(e))
    }

    fn begin(&self) -> Result<WriteTransaction, CatalogError> {
        let mut transaction = self.database.begin_write().map_err(|e| self.error(e))?;
        transaction.set_durability(Durability::Immediate).map_err(|e| self.error(e))?;
        Ok(transaction)
    }

    fn error(&self, error: impl Into<redb::Error>) -> CatalogError {
        CatalogError::Failed(format!("{}: {}", self.path.display(), error.into()))
    }

    fn read(&self) -> Result<Snapshot, Failure> {
        let transaction = self.database.begin_read()?;
        let mut snapshot = Snapshot::default();

        let counters = transaction.open_table(COUNTERS)?;
        snapshot.next_stream_id = counters.get(KEY_NEXT_STREAM)?.map_or(0, |v| v.value());
        snapshot.next_object_id = counters.get(KEY_NEXT_OBJECT)?.map_or(0, |v| v.value());
        snapshot.uploaded_log = LogOffset(counters.get(KEY_UPLOADED_LOG)?.map_or(0, |v| v.value()));
        if let Some(id) = transaction.open_table(IDENTITY)?.get(KEY_WAL)? {
            let id =
                Uuid::from_slice(id.value()).map_err(|e| Failure::Value(format!("WAL id: {e}")))?;
            snapshot.wal_id = Some(id);
        }
        for row in transaction.open_table(STREAMS)?.iter()? {
            let (id, value) = row?;
            snapshot.streams.insert(StreamId(id.value()), decode_stream(value.value())?);
        }
        for row in transaction.open_table(CHECKPOINTS)?.iter()? {
            let (id, value) = row?;
            let stream = snapshot.streams.get_mut(&StreamId(id.value()));
            let stream = stream.ok_or_else(|| {
                Failure::Value(format!("a checkpoint of stream {}, which is not there", id.value()))
            })?;
            stream.checkpoint = Some(Bytes::copy_from_slice(value.value()));
        }
        for row in transaction.open_table(RANGES)?.iter()? {
            let (key, value) = row?;
            let (id, start) = key.value();
            let stream = snapshot.streams.get_mut(&StreamId(id));
            let stream = stream.ok_or_else(|| {
                Failure::Value(format!("a range of stream {id}, which is not there"))
            })?;
            stream.ranges.push(decode_range(StreamOffset(start), value.value())?);
        }
        for row in transaction.open_table(OBJECTS)?.iter()? {
            let (id, value) = row?;
            snapshot.objects.insert(ObjectId(id.value()), decode_object(value.value())?);
        }
        for row in transaction.open_table(META)?.iter()? {
            let (key, value) = row?;
            snapshot.meta.insert(key.value().to_owned(), value.value().to_vec());
        }
        Ok(snapshot)
    }
}

impl Catalog for RedbCatalog {
    fn load(&self) -> Result<Snapshot, CatalogError> {
        self.read().map_err(|failure| self.named(failure))
    }

    fn commit(&self, changes: &[Change]) -> Result<(), CatalogError> {
        let transaction = self.begin()?;
        let applied = Tables::open(&transaction)
            .map_err(Failure::from)
            .and_then(|mut tables| changes.iter().try_for_each(|change| tables.apply(change)));
        match applied {
            Ok(()) => transaction.commit().map_err(|e| self.error(e)),
            Err(failure) => {
                transaction.abort().map_err(|e| self.error(e))?;
                Err(self.named(failure))
            }
        }
    }
}

/// Why reading or applying stopped.
enum Failure {
    Database(redb::Error),
    Value(String),
    Refused(CatalogError),
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Database(error.into())
    }
}

impl RedbCatalog {
    fn named(&self, failure: Failure) -> CatalogError {
        match failure {
            Failure::Database(error) => self.error(error),
            Failure::Value(what) => CatalogError::Failed(format!(
                "{}: damaged or of a newer version: {what}",
                self.path.display()
            )),
            Failure::Refused(refusal) => refusal,
        }
    }
}

struct Tables<'t> {
    counters: Table<'t, &'static str, u64>,
    identity: Table<'t, &'static str, &'static [u8]>,
    streams: Table<'t, u64, &'static [u8]>,
    checkpoints: Table<'t, u64, &'static [u8]>,
    ranges: Table<'t, (u64, u64), &'static [u8]>,
    objects: Table<'t, u64, &'static [u8]>,
    meta: Table<'t, &'static str, &'static [u8]>,
}

impl<'t> Tables<'t> {
    fn open(transaction: &'t WriteTransaction) -> Result<Self, redb::TableError> {
        Ok(Self {
            counters: transaction.open_table(COUNTERS)?,
            identity: transaction.open_table(IDENTITY)?,
            streams: transaction.open_table(STREAMS)?,
            checkpoints: transaction.open_table(CHECKPOINTS)?,
            ranges: transaction.open_table(RANGES)?,
            objects: transaction.open_table(OBJECTS)?,
            meta: transaction.open_table(META)?,
        })
    }

    fn apply(&mut self, change: &Change) -> Result<(), Failure> {
        match change {
            Change::CreateStream { id, kind } => {
                let next = self.counter(KEY_NEXT_STREAM)?;
                if id.0 >= next {
                    return Err(Failure::Refused(refusal::id_not_handed_out(*id, next)));
                }
                if self.streams.get(id.0)?.is_some() {
                    return Err(Failure::Refused(refusal::exists(*id)));
                }
                self.put_stream(*id, *kind, StreamOffset(0), StreamOffset(0))?;
            }
            Change::DeleteStream(id) => {
                self.stream(*id)?;
                self.streams.remove(id.0)?;
                self.checkpoints.remove(id.0)?;
                self.ranges.retain_in((id.0, 0)..=(id.0, u64::MAX), |_, _| false)?;
            }
            Change::TrimStream { id, to } => {
                let row = self.stream(*id)?;
                self.put_stream(*id, row.kind, row.start.max(*to), row.uploaded_end)?;
                self.drop_ranges(*id, *to)?;
            }
            Change::PutMeta { key, value } => {
                self.meta.insert(key.as_str(), value.as_slice())?;
            }
            Change::DeleteMeta(key) => {
                self.meta.remove(key.as_str())?;
            }
            Change::BindWal(id) => drop(self.identity.insert(KEY_WAL, id.as_bytes().as_slice())?),
            Change::NextStreamId(id) => {
                let next = self.counter(KEY_NEXT_STREAM)?;
                if id.0 < next {
                    return Err(Failure::Refused(refusal::back("the next stream id", next, id.0)));
                }
                self.counters.insert(KEY_NEXT_STREAM, id.0)?;
            }
            Change::AddObject(object) => {
                let next = self.counter(KEY_NEXT_OBJECT)?;
                if object.id.0 < next {
                    return Err(Failure::Refused(refusal::object_id_used(object.id, next)));
                }
                self.counters.insert(KEY_NEXT_OBJECT, object.id.0 + 1)?;
                self.objects.insert(object.id.0, encode_object(object)?.as_slice())?;
            }
            Change::Uploaded(uploaded) => self.upload(uploaded)?,
            Change::LogUploaded(to) => {
                let uploaded = self.counter(KEY_UPLOADED_LOG)?.max(to.0);
                self.counters.insert(KEY_UPLOADED_LOG, uploaded)?;
            }
            Change::ForgetObject(id) => drop(self.objects.remove(id.0)?),
        }
        Ok(())
    }

    fn upload(&mut self, uploaded: &Uploaded) -> Result<(), Failure> {
        let Uploaded { stream: id, uploaded_end, start, checkpoint, range } = uploaded;
        let row = self.stream(*id)?;
        if *uploaded_end < row.uploaded_end {
            return Err(Failure::Refused(refusal::back(
                "the uploaded end",
                row.uploaded_end.0,
                uploaded_end.0,
            )));
        }
        let start = row.start.max(*start);
        self.put_stream(*id, row.kind, start, *uploaded_end)?;
        match checkpoint {
            Some(checkpoint) => drop(self.checkpoints.insert(id.0, checkpoint.as_ref())?),
            None => drop(self.checkpoints.remove(id.0)?),
        }
        let Some(range) = range.as_ref().filter(|range| range.end > start) else {
            return Ok(());
        };
        if self.objects.get(range.object.0)?.is_none() {
            return Err(Failure::Refused(refusal::no_object(range.object)));
        }
        if let Some(last) = self.ranges.range((id.0, 0)..=(id.0, u64::MAX))?.next_back() {
            let (key, value) = last?;
            let last = decode_range(StreamOffset(key.value().1), value.value())?;
            if last.end > range.start {
                return Err(Failure::Refused(refusal::not_after(*id, range, last.end)));
            }
        }
        self.ranges.insert((id.0, range.start.0), encode_range(range).as_slice())?;
        Ok(())
    }

    /// Drop the ranges of `id` that end at or before `to`. They lie first, in order.
    fn drop_ranges(&mut self, id: StreamId, to: StreamOffset) -> Result<(), Failure> {
        let mut gone = Vec::new();
        for row in self.ranges.range((id.0, 0)..(id.0, to.0))? {
            let (key, value) = row?;
            if decode_range(StreamOffset(key.value().1), value.value())?.end > to {
                break;
            }
            gone.push(key.value());
        }
        for key in gone {
            self.ranges.remove(key)?;
        }
        Ok(())
    }

    fn counter(&self, key: &'static str) -> Result<u64, Failure> {
        Ok(self.counters.get(key)?.map_or(0, |v| v.value()))
    }

    fn stream(&self, id: StreamId) -> Result<StreamRow, Failure> {
        match self.streams.get(id.0)? {
            Some(value) => decode_stream(value.value()),
            None => Err(Failure::Refused(refusal::no_stream(id))),
        }
    }

    fn put_stream(
        &mut self,
        id: StreamId,
        kind: u8,
        start: StreamOffset,
        uploaded_end: StreamOffset,
    ) -> Result<(), Failure> {
        self.streams.insert(id.0, encode_stream(kind, start, uploaded_end).as_slice())?;
        Ok(())
    }
}

// Values. Each begins with its own version, so that one of them can change without the others.

const STREAM_BYTES: usize = 1 + 1 + 8 + 8;
const RANGE_BYTES: usize = 1 + 8 + 8 + 8 + 8;
const VALUE_VERSION: u8 = 1;

fn encode_stream(kind: u8, start: StreamOffset, uploaded_end: StreamOffset) -> [u8; STREAM_BYTES] {
    let mut value = [0; STREAM_BYTES];
    value[0] = VALUE_VERSION;
    value[1] = kind;
    value[2..10].copy_from_slice(&start.0.to_le_bytes());
    value[10..].copy_from_slice(&uploaded_end.0.to_le_bytes());
    value
}

fn decode_stream(value: &[u8]) -> Result<StreamRow, Failure> {
    let value: &[u8; STREAM_BYTES] = value
        .try_into()
        .map_err(|_| Failure::Value(format!("a stream row of {} bytes", value.len())))?;
    if value[0] != VALUE_VERSION {
        return Err(Failure::Value(format!("a stream row of version {}", value[0])));
    }
    Ok(StreamRow {
        kind: value[1],
        start: StreamOffset(u64_at(value, 2)),
        uploaded_end: StreamOffset(u64_at(value, 10)),
        ..StreamRow::default()
    })
}

fn encode_range(range: &ObjectRange) -> [u8; RANGE_BYTES] {
    let mut value = [0; RANGE_BYTES];
    value[0] = VALUE_VERSION;
    value[1..9].copy_from_slice(&range.object.0.to_le_bytes());
    value[9..17].copy_from_slice(&range.end.0.to_le_bytes());
    value[17..25].copy_from_slice(&range.payload_bytes.to_le_bytes());
    value[25..].copy_from_slice(&range.max_timestamp_ms.to_le_bytes());
    value
}

fn decode_range(start: StreamOffset, value: &[u8]) -> Result<ObjectRange, Failure> {
    let value: &[u8; RANGE_BYTES] = value
        .try_into()
        .map_err(|_| Failure::Value(format!("a range row of {} bytes", value.len())))?;
    if value[0] != VALUE_VERSION {
        return Err(Failure::Value(format!("a range row of version {}", value[0])));
    }
    Ok(ObjectRange {
        object: ObjectId(u64_at(value, 1)),
        start,
        end: StreamOffset(u64_at(value, 9)),
        payload_bytes: u64_at(value, 17),
        max_timestamp_ms: u64_at(value, 25).cast_signed(),
    })
}

fn u64_at(value: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(value[at..at + 8].try_into().expect("8 bytes"))
}

/// An object row is JSON: there are few, and a tool can read them.
fn encode_object(object: &ObjectInfo) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(object).map_err(|e| Failure::Value(format!("object {}: {e}", object.id)))
}

fn decode_object(value: &[u8]) -> Result<ObjectInfo, Failure> {
    serde_json::from_slice(value).map_err(|e| Failure::Value(format!("an object row: {e}")))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use redb::StorageBackend;

    use super::*;

    #[test]
    fn conforms() {
        let directory = tempfile::tempdir().unwrap();
        let number = std::cell::Cell::new(0);
        super::super::conformance::run(&|| {
            number.set(number.get() + 1);
            Box::new(
                RedbCatalog::open(&directory.path().join(format!("catalog-{}", number.get())))
                    .unwrap(),
            )
        });
    }

    #[test]
    fn it_survives_reopening_and_is_open_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog");
        let catalog = RedbCatalog::open(&path).unwrap();
        super::super::conformance::fill(&catalog);
        let before = catalog.load().unwrap();
        assert!(
            !before.streams.is_empty() && !before.objects.is_empty() && !before.meta.is_empty()
        );

        let error = RedbCatalog::open(&path).unwrap_err();
        assert!(error.to_string().contains("open"), "{error}");

        drop(catalog);
        assert_eq!(RedbCatalog::open(&path).unwrap().load().unwrap(), before);
    }

    /// A disk that is full, or broken, for a moment.
    #[derive(Debug)]
    struct Failing {
        inner: redb::backends::InMemoryBackend,
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

    /// Why the store does not try a commit again: a database that has seen one error gives nothing but errors.
    #[test]
    fn after_an_error_it_takes_nothing_until_it_is_opened_again() {
        let fails = Arc::new(AtomicBool::new(false));
        let inner = redb::backends::InMemoryBackend::new();
        let backend = Failing { inner, fails: fails.clone() };
        let database = Database::builder().create_with_backend(backend).unwrap();
        let catalog = RedbCatalog { database, path: "c".into() };
        catalog.initialise().unwrap();
        let change = Change::NextStreamId(StreamId(1));
        fails.store(true, Ordering::SeqCst);
        let error = catalog.commit(std::slice::from_ref(&change)).unwrap_err();
        assert!(matches!(error, CatalogError::Failed(_)), "{error}");
        fails.store(false, Ordering::SeqCst);
        let error = catalog.commit(&[change]).unwrap_err().to_string();
        assert!(error.contains("re-open the database"), "{error}");
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

        let other = directory.path().join("notes.txt");
        std::fs::write(&other, "not a database").unwrap();
        assert!(RedbCatalog::open(&other).unwrap_err().to_string().contains("notes.txt"));
    }

    /// Values of version 1. They must decode in every later version of this code.
    #[test]
    fn values_of_version_1_still_decode() {
        let stream = encode_stream(1, StreamOffset(2), StreamOffset(3));
        assert_eq!(stream, [1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        let range = ObjectRange {
            object: ObjectId(4),
            start: StreamOffset(5),
            end: StreamOffset(6),
            payload_bytes: 7,
            max_timestamp_ms: -1,
        };
        let mut bytes =
            vec![1, 4, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend([0xff; 8]);
        assert_eq!(encode_range(&range).as_slice(), bytes);
        assert!(decode_range(StreamOffset(5), &bytes).is_ok_and(|decoded| decoded == range));
        let object = br#"{"id":1,"name":"a/b","size_bytes":2,"index_position":3,"index_bytes":4,"index_crc32c":5,"created_at_ms":6}"#;
        assert!(
            decode_object(object)
                .is_ok_and(|object| object.name == "a/b" && object.index_crc32c == 5)
        );
    }
}
