//! The embedded catalog. Tables and values: `docs/format/catalog.md`.

use std::collections::HashSet;
use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use alluvium_wal::LogOffset;
use bytes::Bytes;
use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};
use redb::{
    AccessGuard, Builder, Database, DatabaseError, Durability, Key, ReadOnlyTable,
    ReadableDatabase, ReadableTable, Table, TableDefinition, TableHandle, Value, WriteTransaction,
};
use uuid::Uuid;

use super::{
    Catalog, CatalogError, Change, INCARNATIONS_KEPT, Incarnation, RESTORE, Replaced, Snapshot,
    StreamRow, Uploaded, refusal,
};
use crate::panics;
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

mod disk;
mod rows;
mod space;

use disk::{Disk, RESERVE_BYTES, Reserve, Watched};
use rows::{
    decode_incarnations, decode_object, decode_range, decode_stream, decode_wal_id,
    encode_incarnations, encode_object, encode_range, encode_stream,
};
use space::no_reserve;

const FORMAT_VERSION: u64 = 1;

const COUNTERS: TableDefinition<'_, &str, u64> = TableDefinition::new("counters");
const IDENTITY: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("identity");
const STREAMS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("streams");
const CHECKPOINTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("checkpoints");
const RANGES: TableDefinition<'_, (u64, u64), &[u8]> = TableDefinition::new("ranges");
const OBJECTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("objects");
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const CHECKSUM: TableDefinition<'_, &str, u64> = TableDefinition::new("checksum");

const KEY_FORMAT: &str = "format_version";
const KEY_NEXT_STREAM: &str = "next_stream_id";
const KEY_NEXT_OBJECT: &str = "next_object_id";
const KEY_UPLOADED_LOG: &str = "uploaded_log";
const KEY_VERSION: &str = "version";
const KEY_WAL_MARK: &str = "wal_mark";
const KEY_WAL: &str = "wal_id";
const KEY_INCARNATIONS: &str = "lives";
const KEY_ROWS: &str = "rows";

/// The catalog is small and read once, so a small page cache suffices; redb's default of 1 GiB
/// would be most of an idle server's memory.
const PAGE_CACHE_BYTES: usize = 8 << 20;

/// The embedded catalog, on `redb`: one file, used by one process at a time.
pub struct RedbCatalog {
    /// `None` after it could not be reopened.
    database: RwLock<Closing>,
    path: PathBuf,
    watched: Watched,
    /// Only for a catalog that is in use with a WAL.
    reserve: Option<Reserve>,
    /// See [`Catalog::shortage`].
    shortage: Mutex<Option<String>>,
}

/// A database whose closing does not panic. redb panics if what it keeps for writing is damaged,
/// which it reads when it closes, even where all rows are intact.
struct Closing(Option<Database>);

impl Drop for Closing {
    fn drop(&mut self) {
        let database = self.0.take();
        if let Err(text) = panics::contained(|| drop(database)) {
            tracing::error!(
                "the catalog is damaged, which was detected when it was closed: {text}"
            );
        }
    }
}

impl std::fmt::Debug for RedbCatalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedbCatalog").field("path", &self.path).finish_non_exhaustive()
    }
}

impl RedbCatalog {
    /// Opens the catalog in the file at `path`, or creates it there. Blocking.
    ///
    /// # Errors
    /// Another process has it open, the file is something else, or a newer version wrote it.
    pub fn open(path: &Path) -> Result<Self, CatalogError> {
        // It holds password verifiers: other users of the machine must not be able to read it.
        let mut private = File::options();
        let private = private.write(true).create_new(true).mode(0o600).open(path);
        let private = match private {
            // An existing file may be readable by others. It may also belong to another user, who
            // gave this process access.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                if let Err(error) = std::fs::set_permissions(path, Permissions::from_mode(0o600)) {
                    let path = path.display();
                    tracing::warn!(
                        "{path}: other users of the machine may be able to read it: {error}"
                    );
                }
                Ok(())
            }
            made => made.map(drop),
        };
        private.map_err(|error| CatalogError::Failed(format!("{}: {error}", path.display())))?;
        let watched = Watched::default();
        let disk = |watched| {
            move |builder: &mut Builder| builder.create_with_backend(Disk::open(path, watched)?)
        };
        let catalog = Self::with_database(path, watched.clone(), disk(watched))?;
        // A new file is durable only when its directory is synced.
        if let Some(directory) = path.parent() {
            let directory =
                if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
            File::open(directory).and_then(|directory| directory.sync_all()).map_err(|error| {
                let path = path.display();
                CatalogError::Failed(format!("{path}: cannot sync its directory: {error}"))
            })?;
        }
        Ok(catalog)
    }

    fn with_database(
        path: &Path,
        watched: Watched,
        open: impl FnOnce(&mut Builder) -> Result<Database, DatabaseError>,
    ) -> Result<Self, CatalogError> {
        unless_damaged(path, || {
            let database = RwLock::new(Closing(Some(open_database(path, open)?)));
            let catalog = Self {
                database,
                path: path.to_path_buf(),
                watched,
                reserve: None,
                shortage: Mutex::default(),
            };
            catalog.initialise()?;
            Ok(catalog)
        })
    }

    /// Keeps a reserve of disk space next to the file. When the disk is full, changes that free
    /// space and those of uploads can still use it; other changes are refused
    /// ([`CatalogError::Full`]) unless the reserve is complete. It is allocated here if there is
    /// space, otherwise before the next of those other changes.
    #[must_use]
    pub fn with_reserve(self) -> Self {
        self.with_reserve_of(RESERVE_BYTES)
    }

    fn with_reserve_of(mut self, bytes: u64) -> Self {
        let reserve = Reserve::new(&self.path, bytes);
        if let Err(error) = reserve.fill() {
            let error = self.full(no_reserve(&reserve, &error));
            tracing::warn!("{error}");
            self.shortage = Mutex::new(Some(error.to_string()));
        }
        self.reserve = Some(reserve);
        self
    }

    fn database(&self) -> Result<MappedRwLockReadGuard<'_, Database>, CatalogError> {
        RwLockReadGuard::try_map(self.database.read(), |closing| closing.0.as_ref()).map_err(|_| {
            CatalogError::Failed(format!("{}: could not be reopened", self.path.display()))
        })
    }

    /// Reopens the file after a transaction was refused for lack of space, since redb accepts
    /// nothing any more. The contents are then those before the transaction, which had version
    /// `version`.
    fn reopen(&self, version: u64) -> Result<(), CatalogError> {
        {
            let mut database = self.database.write();
            drop(std::mem::replace(&mut *database, Closing(None)));
            let opened = unless_damaged(&self.path, || {
                open_database(&self.path, |builder| {
                    builder.create_with_backend(Disk::open(&self.path, self.watched.clone())?)
                })
            });
            database.0 = Some(opened?);
        }
        let read = || -> Result<u64, Failure> {
            let database = self.database().map_err(Failure::Refused)?;
            let transaction = database.begin_read()?;
            let found = transaction.open_table(COUNTERS)?.get(KEY_VERSION)?;
            Ok(found.map_or(0, |found| found.value()))
        };
        let found = unless_damaged(&self.path, || read().map_err(|failure| self.named(failure)))?;
        match found == version {
            true => Ok(()),
            false => Err(damaged(
                &self.path,
                &format!("version {found} after a refused change of version {version}"),
            )),
        }
    }

    /// Creates the tables of a new catalog, or checks that this build understands an existing one.
    fn initialise(&self) -> Result<(), CatalogError> {
        let transaction = self.begin()?;
        let is_new = transaction.list_tables().map_err(|e| self.error(e))?.next().is_none();
        let found = {
            let counters = transaction.open_table(COUNTERS).map_err(|e| self.error(e))?;
            let found = counters.get(KEY_FORMAT).map_err(|e| self.error(e))?;
            found.map(|version| version.value())
        };
        match found {
            Some(FORMAT_VERSION) => transaction.abort().map_err(|e| self.error(e)),
            Some(other) => Err(self.named(Failure::Value(format!(
                "format version {other} is not known, only {FORMAT_VERSION}"
            )))),
            // Writing to it could make the damage worse.
            None if !is_new => {
                Err(self.named(Failure::Value("its format version is missing".into())))
            }
            None => {
                let changed = Tables::open(&transaction).and_then(|mut tables| {
                    put(&mut tables.sum, &mut tables.counters, &KEY_FORMAT, &FORMAT_VERSION)?;
                    tables.close()
                });
                changed.map_err(|failure| self.named(failure))?;
                transaction.commit().map_err(|e| self.error(e))
            }
        }
    }

    fn begin(&self) -> Result<WriteTransaction, CatalogError> {
        let mut transaction = self.database()?.begin_write().map_err(|e| self.error(e))?;
        transaction.set_durability(Durability::Immediate).map_err(|e| self.error(e))?;
        Ok(transaction)
    }

    fn error(&self, error: impl Into<redb::Error>) -> CatalogError {
        failed(&self.path, &error.into())
    }

    /// Returns the WAL that this catalog belongs to. Reads only that row and, unlike
    /// [`Catalog::load`], does not verify the checksum of all rows. Blocking.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn wal_id(&self) -> Result<Option<Uuid>, CatalogError> {
        let read = || -> Result<Option<Uuid>, Failure> {
            let transaction = self.database().map_err(Failure::Refused)?.begin_read()?;
            let row = transaction.open_table(IDENTITY)?.get(KEY_WAL)?;
            row.map(|id| decode_wal_id(id.value())).transpose()
        };
        unless_damaged(&self.path, || read().map_err(|failure| self.named(failure)))
    }

    /// Returns the names of the objects that it records, including those about to be deleted.
    /// Unlike [`Catalog::load`], which reads the whole catalog, it does not verify the checksum of
    /// all rows. Blocking.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn object_names(&self) -> Result<HashSet<String>, CatalogError> {
        let read = || -> Result<HashSet<String>, Failure> {
            let transaction = self.database().map_err(Failure::Refused)?.begin_read()?;
            let mut names = HashSet::new();
            each(&transaction.open_table(OBJECTS)?, &mut 0, |_, value| {
                names.insert(decode_object(value)?.name);
                Ok(())
            })?;
            Ok(names)
        };
        unless_damaged(&self.path, || read().map_err(|failure| self.named(failure)))
    }

    fn read(&self) -> Result<Snapshot, Failure> {
        let transaction = self.database().map_err(Failure::Refused)?.begin_read()?;
        let mut snapshot = Snapshot::default();

        let mut sum = sum_of(&transaction.open_table(COUNTERS)?)?
            .wrapping_add(sum_of(&transaction.open_table(IDENTITY)?)?);
        let counters = transaction.open_table(COUNTERS)?;
        snapshot.next_stream_id = counters.get(KEY_NEXT_STREAM)?.map_or(0, |v| v.value());
        snapshot.next_object_id = counters.get(KEY_NEXT_OBJECT)?.map_or(0, |v| v.value());
        snapshot.uploaded_log = LogOffset(counters.get(KEY_UPLOADED_LOG)?.map_or(0, |v| v.value()));
        snapshot.version = counters.get(KEY_VERSION)?.map_or(0, |v| v.value());
        snapshot.wal_mark = counters.get(KEY_WAL_MARK)?.map_or(0, |v| v.value());
        if let Some(id) = transaction.open_table(IDENTITY)?.get(KEY_WAL)? {
            snapshot.wal_id = Some(decode_wal_id(id.value())?);
        }
        if let Some(incarnations) = transaction.open_table(IDENTITY)?.get(KEY_INCARNATIONS)? {
            snapshot.incarnations = decode_incarnations(incarnations.value())?;
        }
        let Snapshot { streams, objects, meta, .. } = &mut snapshot;
        // Each row is read once, so the checksum is complete when everything is decoded.
        each(&transaction.open_table(STREAMS)?, &mut sum, |id, value| {
            streams.insert(StreamId(id), decode_stream(value)?);
            Ok(())
        })?;
        each(&transaction.open_table(CHECKPOINTS)?, &mut sum, |id, value| {
            let stream = streams.get_mut(&StreamId(id)).ok_or_else(|| {
                Failure::Value(format!("a checkpoint of stream {id}, which does not exist"))
            })?;
            stream.checkpoint = Some(Bytes::copy_from_slice(value));
            Ok(())
        })?;
        each(&transaction.open_table(RANGES)?, &mut sum, |(id, start), value| {
            let stream = streams.get_mut(&StreamId(id)).ok_or_else(|| {
                Failure::Value(format!("a range of stream {id}, which does not exist"))
            })?;
            stream.ranges.push(decode_range(StreamOffset(start), value)?);
            Ok(())
        })?;
        each(&transaction.open_table(OBJECTS)?, &mut sum, |id, value| {
            objects.insert(ObjectId(id), decode_object(value)?);
            Ok(())
        })?;
        each(&transaction.open_table(META)?, &mut sum, |key, value| {
            meta.insert(key.to_owned(), value.to_vec());
            Ok(())
        })?;
        let stated = transaction.open_table(CHECKSUM)?.get(KEY_ROWS)?.map(|v| v.value());
        if stated != Some(sum) {
            return Err(Failure::Value("the rows do not match their checksum".into()));
        }
        Ok(snapshot)
    }
}

impl Catalog for RedbCatalog {
    fn load(&self) -> Result<Snapshot, CatalogError> {
        unless_damaged(&self.path, || self.read().map_err(|failure| self.named(failure)))
    }

    fn commit(&self, changes: &[Change]) -> Result<u64, CatalogError> {
        unless_damaged(&self.path, || self.commit_in_space(changes))
    }

    fn shortage(&self) -> Option<String> {
        self.shortage.lock().clone()
    }
}

impl RedbCatalog {
    fn try_commit(&self, changes: &[Change]) -> Result<u64, CatalogError> {
        self.watched.begin();
        let transaction = self.begin()?;
        let mut before = 0;
        let applied = Tables::open(&transaction).and_then(|mut tables| {
            before = tables.counter(KEY_VERSION)?;
            changes.iter().try_for_each(|change| tables.apply(change))?;
            let version = tables.counter(KEY_VERSION)? + 1;
            tables.put_counter(KEY_VERSION, version)?;
            tables.close()?;
            Ok(version)
        });
        let committed = match applied {
            Ok(version) => transaction.commit().map(|()| version).map_err(|e| self.error(e)),
            Err(failure) => match transaction.abort() {
                Ok(()) => Err(self.named(failure)),
                Err(error) => Err(self.error(error)),
            },
        };
        match committed {
            Err(CatalogError::Failed(why)) if self.watched.is_refused() => {
                self.reopen(before)?;
                Err(CatalogError::Full(why))
            }
            committed => committed,
        }
    }
}

fn open_database(
    path: &Path,
    open: impl FnOnce(&mut Builder) -> Result<Database, DatabaseError>,
) -> Result<Database, CatalogError> {
    let named = |what: String| CatalogError::Failed(format!("{}: {what}", path.display()));
    let opened = open(Database::builder().set_cache_size(PAGE_CACHE_BYTES));
    opened.map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => {
            named("another process has it open; is the server running already?".into())
        }
        other => failed(path, &other.into()),
    })
}

/// Runs `read` and turns a panic of redb, which damage often causes, into an error.
fn unless_damaged<T>(
    path: &Path,
    read: impl FnOnce() -> Result<T, CatalogError>,
) -> Result<T, CatalogError> {
    panics::contained(read).unwrap_or_else(|text| Err(damaged(path, &format!("damaged: {text}"))))
}

fn failed(path: &Path, error: &redb::Error) -> CatalogError {
    use std::io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    let is_damaged = match error {
        // A truncated file, and pages at impossible positions.
        redb::Error::Io(error) => {
            matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
        }
        redb::Error::Corrupted(_)
        | redb::Error::UpgradeRequired(_)
        | redb::Error::TableTypeMismatch { .. }
        | redb::Error::TableIsMultimap(_)
        | redb::Error::TableIsNotMultimap(_)
        | redb::Error::TypeDefinitionChanged { .. }
        | redb::Error::TableDoesNotExist(_)
        | redb::Error::RepairAborted => true,
        _ => false,
    };
    match is_damaged {
        true => damaged(path, error),
        false => CatalogError::Failed(format!("{}: {error}", path.display())),
    }
}

/// Returns an error about a damaged catalog, with advice to the operator.
fn damaged(path: &Path, what: &dyn std::fmt::Display) -> CatalogError {
    CatalogError::Failed(format!("{}: {what}. {RESTORE}", path.display()))
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
            Failure::Value(what) => damaged(
                &self.path,
                &format!(
                    "damaged or of a newer version: {what}. If a newer alluvium wrote it, use \
                     that one"
                ),
            ),
            Failure::Refused(refusal) => refusal,
        }
    }
}

type RangeRow<'a> = (AccessGuard<'a, (u64, u64)>, AccessGuard<'a, &'static [u8]>);

struct Tables<'t> {
    counters: Table<'t, &'static str, u64>,
    identity: Table<'t, &'static str, &'static [u8]>,
    streams: Table<'t, u64, &'static [u8]>,
    checkpoints: Table<'t, u64, &'static [u8]>,
    ranges: Table<'t, (u64, u64), &'static [u8]>,
    objects: Table<'t, u64, &'static [u8]>,
    meta: Table<'t, &'static str, &'static [u8]>,
    checksum: Table<'t, &'static str, u64>,
    /// Sum over all rows but this one.
    sum: u64,
}

// redb has checksums of its pages, but does not verify them on reads. So the catalog has its own
// over its contents: the sum of all rows' checksums, which is cheap to update when a few rows
// change.

/// Returns a row's part in the sum: the CRC32C of its table's name, the length of its key, its key
/// and its value.
fn row_sum<K: Value, V: Value>(table: &str, key: &K::SelfType<'_>, value: &V::SelfType<'_>) -> u64 {
    let (key, value) = (K::as_bytes(key), V::as_bytes(value));
    let (key, value): (&[u8], &[u8]) = (key.as_ref(), value.as_ref());
    let crc = crc32c::crc32c(table.as_bytes());
    let crc = crc32c::crc32c_append(crc, &(key.len() as u64).to_le_bytes());
    u64::from(crc32c::crc32c_append(crc32c::crc32c_append(crc, key), value))
}

fn sum_of<K: Key, V: Value>(table: &ReadOnlyTable<K, V>) -> Result<u64, Failure> {
    let mut sum = 0;
    each(table, &mut sum, |_, _| Ok(()))?;
    Ok(sum)
}

/// Visits all rows and adds them to the sum.
fn each<K: Key, V: Value>(
    table: &ReadOnlyTable<K, V>,
    sum: &mut u64,
    mut visit: impl FnMut(K::SelfType<'_>, V::SelfType<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for row in table.iter()? {
        let (key, value) = row?;
        let (key, value) = (key.value(), value.value());
        *sum = sum.wrapping_add(row_sum::<K, V>(table.name(), &key, &value));
        visit(key, value)?;
    }
    Ok(())
}

fn put<'k, 'v, K: Key, V: Value>(
    sum: &mut u64,
    table: &mut Table<'_, K, V>,
    key: &K::SelfType<'k>,
    value: &V::SelfType<'v>,
) -> Result<(), Failure> {
    let name = table.name().to_owned();
    *sum = sum.wrapping_add(row_sum::<K, V>(&name, key, value));
    if let Some(old) = table.insert(key, value)? {
        *sum = sum.wrapping_sub(row_sum::<K, V>(&name, key, &old.value()));
    }
    Ok(())
}

/// Removes a row; does nothing if there is none.
fn remove<'k, K: Key, V: Value>(
    sum: &mut u64,
    table: &mut Table<'_, K, V>,
    key: &K::SelfType<'k>,
) -> Result<(), Failure> {
    let name = table.name().to_owned();
    if let Some(old) = table.remove(key)? {
        *sum = sum.wrapping_sub(row_sum::<K, V>(&name, key, &old.value()));
    }
    Ok(())
}

impl<'t> Tables<'t> {
    fn open(transaction: &'t WriteTransaction) -> Result<Self, Failure> {
        let checksum = transaction.open_table(CHECKSUM)?;
        let sum = checksum.get(KEY_ROWS)?.map_or(0, |sum| sum.value());
        Ok(Self {
            checksum,
            sum,
            counters: transaction.open_table(COUNTERS)?,
            identity: transaction.open_table(IDENTITY)?,
            streams: transaction.open_table(STREAMS)?,
            checkpoints: transaction.open_table(CHECKPOINTS)?,
            ranges: transaction.open_table(RANGES)?,
            objects: transaction.open_table(OBJECTS)?,
            meta: transaction.open_table(META)?,
        })
    }

    /// Stores the checksum, after the last change.
    fn close(mut self) -> Result<(), Failure> {
        self.checksum.insert(KEY_ROWS, self.sum)?;
        Ok(())
    }

    fn apply(&mut self, change: &Change) -> Result<(), Failure> {
        let sum = &mut self.sum;
        match change {
            Change::CreateStream { id, kind } => {
                let next = self.counter(KEY_NEXT_STREAM)?;
                if id.0 >= next {
                    return Err(Failure::Refused(refusal::id_not_handed_out(*id, next)));
                }
                if self.streams.get(id.0)?.is_some() {
                    return Err(Failure::Refused(refusal::exists(*id)));
                }
                self.put_stream(*id, &StreamRow { kind: *kind, ..StreamRow::default() })?;
            }
            Change::DeleteStream { id, epoch } => {
                self.writers_stream(*id, *epoch)?;
                remove(&mut self.sum, &mut self.streams, &id.0)?;
                remove(&mut self.sum, &mut self.checkpoints, &id.0)?;
                self.drop_ranges(*id, StreamOffset(u64::MAX))?;
            }
            Change::TrimStream { id, epoch, to } => {
                let row = self.writers_stream(*id, *epoch)?;
                self.put_stream(*id, &StreamRow { start: row.start.max(*to), ..row })?;
                self.drop_ranges(*id, *to)?;
            }
            Change::PutMeta { key, value } => {
                put(sum, &mut self.meta, &key.as_str(), &value.as_slice())?;
            }
            Change::DeleteMeta(key) => remove(sum, &mut self.meta, &key.as_str())?,
            Change::BindWal(id) => {
                put(sum, &mut self.identity, &KEY_WAL, &id.as_bytes().as_slice())?;
            }
            Change::NextStreamId(id) => {
                let next = self.counter(KEY_NEXT_STREAM)?;
                if id.0 < next {
                    return Err(Failure::Refused(refusal::back("the next stream id", next, id.0)));
                }
                self.put_counter(KEY_NEXT_STREAM, id.0)?;
            }
            Change::OpenStream { id, epoch } => {
                let row = self.stream(*id)?;
                if *epoch < row.epoch {
                    let back = refusal::back("a stream's epoch", row.epoch.0, epoch.0);
                    return Err(Failure::Refused(back));
                }
                self.put_stream(*id, &StreamRow { epoch: *epoch, ..row })?;
            }
            Change::AddObject(object) => {
                if self.objects.get(object.id.0)?.is_some() {
                    return Err(Failure::Refused(refusal::object_exists(object.id)));
                }
                let next = self.counter(KEY_NEXT_OBJECT)?.max(object.id.0 + 1);
                self.put_counter(KEY_NEXT_OBJECT, next)?;
                let row = encode_object(object)?;
                put(&mut self.sum, &mut self.objects, &object.id.0, &row.as_slice())?;
            }
            Change::Uploaded(uploaded) => self.upload(uploaded)?,
            Change::LogUploaded(to) => {
                self.put_counter(KEY_UPLOADED_LOG, to.0)?;
            }
            Change::BeginIncarnation { id, version } => {
                let after_version = self.counter(KEY_VERSION)?;
                // The commit raises it by one.
                self.put_counter(KEY_VERSION, after_version.max(version.saturating_sub(1)))?;
                if id.is_nil() {
                    return Ok(());
                }
                let incarnations = self
                    .identity
                    .get(KEY_INCARNATIONS)?
                    .map(|row| decode_incarnations(row.value()));
                let mut incarnations = incarnations.transpose()?.unwrap_or_default();
                incarnations.push(Incarnation { after_version, id: *id });
                let kept = &incarnations[incarnations.len().saturating_sub(INCARNATIONS_KEPT)..];
                let row = encode_incarnations(kept);
                put(&mut self.sum, &mut self.identity, &KEY_INCARNATIONS, &row.as_slice())?;
            }
            Change::WalMarked(mark) => {
                let mark = self.counter(KEY_WAL_MARK)?.max(*mark);
                self.put_counter(KEY_WAL_MARK, mark)?;
            }
            Change::Replaced(replaced) => self.replace(replaced)?,
            Change::RemoveObject(id) => remove(sum, &mut self.objects, &id.0)?,
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
        self.put_stream(*id, &StreamRow { start, uploaded_end: *uploaded_end, ..row })?;
        match checkpoint {
            Some(checkpoint) => {
                put(&mut self.sum, &mut self.checkpoints, &id.0, &checkpoint.as_ref())?;
            }
            None => remove(&mut self.sum, &mut self.checkpoints, &id.0)?,
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
        let row = encode_range(range);
        put(&mut self.sum, &mut self.ranges, &(id.0, range.start.0), &row.as_slice())
    }

    fn replace(&mut self, replaced: &Replaced) -> Result<(), Failure> {
        let Replaced { stream: id, old, new } = replaced;
        self.stream(*id)?;
        if self.objects.get(new.object.0)?.is_none() {
            return Err(Failure::Refused(refusal::no_object(new.object)));
        }
        let first = old.first().map_or(0, |start| start.0);
        let decode = |row: Result<RangeRow<'_>, redb::StorageError>| {
            let (key, value) = row?;
            decode_range(StreamOffset(key.value().1), value.value())
        };
        let before = self.ranges.range((id.0, 0)..(id.0, first))?.next_back();
        let before = before.map(decode).transpose()?;
        let found = self.ranges.range((id.0, first)..=(id.0, u64::MAX))?;
        let found: Vec<_> = found.take(old.len() + 1).map(decode).collect::<Result<_, _>>()?;
        refusal::of_replaced(replaced, before.as_ref(), &found).map_err(Failure::Refused)?;
        for start in old {
            remove(&mut self.sum, &mut self.ranges, &(id.0, start.0))?;
        }
        let row = encode_range(new);
        put(&mut self.sum, &mut self.ranges, &(id.0, new.start.0), &row.as_slice())
    }

    /// Drops the ranges of `id` that end at or before `to`. They come first in order.
    fn drop_ranges(&mut self, id: StreamId, to: StreamOffset) -> Result<(), Failure> {
        let mut gone = Vec::new();
        for row in self.ranges.range((id.0, 0)..(id.0, to.0))? {
            let (key, value) = row?;
            if decode_range(StreamOffset(key.value().1), value.value())?.end > to {
                break;
            }
            gone.push(key.value());
        }
        gone.iter().try_for_each(|key| remove(&mut self.sum, &mut self.ranges, key))
    }

    fn counter(&self, key: &'static str) -> Result<u64, Failure> {
        Ok(self.counters.get(key)?.map_or(0, |v| v.value()))
    }

    fn put_counter(&mut self, key: &'static str, value: u64) -> Result<(), Failure> {
        put(&mut self.sum, &mut self.counters, &key, &value)
    }

    fn stream(&self, id: StreamId) -> Result<StreamRow, Failure> {
        match self.streams.get(id.0)? {
            Some(value) => decode_stream(value.value()),
            None => Err(Failure::Refused(refusal::no_stream(id))),
        }
    }

    /// Returns the row of a stream that the writer with this epoch wants to change.
    fn writers_stream(&self, id: StreamId, epoch: StreamEpoch) -> Result<StreamRow, Failure> {
        let row = self.stream(id)?;
        refusal::of_epoch(id, epoch, row.epoch).map_err(Failure::Refused)?;
        Ok(row)
    }

    fn put_stream(&mut self, id: StreamId, row: &StreamRow) -> Result<(), Failure> {
        put(&mut self.sum, &mut self.streams, &id.0, &encode_stream(row).as_slice())
    }
}

#[cfg(test)]
mod tests;
