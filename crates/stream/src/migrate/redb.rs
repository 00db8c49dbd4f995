//! Reads the catalog of earlier versions, a `redb` database. Tables and values:
//! `docs/format/catalog.md`.

use std::collections::BTreeMap;
use std::path::Path;

use alluvium_wal::LogOffset;
use bytes::Bytes;
use redb::{
    Database, Key, ReadOnlyTable, ReadTransaction, ReadableDatabase, ReadableTable,
    TableDefinition, TableHandle, Value,
};
use uuid::Uuid;

use crate::catalog::{Incarnation, ObjectRange};
use crate::chain::{BodyHeader, ChainObject, ChainState, ChainStream, Gaps, Head, Hints};
use crate::clock::unix_ms;
use crate::fields::u64_at;
use crate::naming::{object_name, object_nonce};
use crate::panics;
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

const FORMAT_VERSION: u64 = 1;
/// The format version of the objects.
const OBJECT_FORMAT: u8 = 1;

pub(super) const COUNTERS: TableDefinition<'_, &str, u64> = TableDefinition::new("counters");
pub(super) const IDENTITY: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("identity");
pub(super) const STREAMS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("streams");
pub(super) const CHECKPOINTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("checkpoints");
pub(super) const RANGES: TableDefinition<'_, (u64, u64), &[u8]> = TableDefinition::new("ranges");
pub(super) const OBJECTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("objects");
pub(super) const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
pub(super) const CHECKSUM: TableDefinition<'_, &str, u64> = TableDefinition::new("checksum");

/// The key prefix of the store's own metadata.
const OWN_META_PREFIX: &str = "stream/";
const TERM_KEY: &str = "stream/term";
const LARGEST_COUNT_KEY: &str = "stream/largest-count";

/// The database is small and read once; redb's default of 1 GiB would be most of the memory.
const PAGE_CACHE_BYTES: usize = 8 << 20;

// Lengths of the values.
const STREAM_BYTES_V1: usize = 1 + 1 + 8 + 8;
const STREAM_BYTES: usize = STREAM_BYTES_V1 + 8;
const RANGE_BYTES: usize = 1 + 8 + 8 + 8 + 8;
const INCARNATION_BYTES: usize = 8 + 16;
const VALUE_VERSION: u8 = 1;
const STREAM_VERSION: u8 = 2;

/// Why the file cannot be read.
type Result<T, E = Failure> = std::result::Result<T, E>;

pub(super) struct Failure(String);

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.into().to_string())
    }
}

fn invalid<T>(what: impl Into<String>) -> Result<T> {
    Err(Failure(what.into()))
}

/// Reads the catalog as the state of the store that has the id of its WAL; `None` if it is not in
/// use with a WAL. Blocking.
///
/// # Errors
/// Another process has it open, it is something else, it is damaged, or a newer version wrote it.
pub(super) fn read(path: &Path) -> Result<Option<ChainState>, String> {
    // redb panics if what it needs is damaged.
    let read = panics::contained(|| {
        let database = Database::builder().set_cache_size(PAGE_CACHE_BYTES).open(path)?;
        let state = read_state(&database.begin_read()?);
        drop(database);
        state
    });
    match read {
        Ok(read) => read.map_err(|Failure(reason)| reason),
        Err(panic) => Err(format!("damaged: {panic}")),
    }
}

fn read_state(transaction: &ReadTransaction) -> Result<Option<ChainState>> {
    let counters = transaction.open_table(COUNTERS)?;
    let counter =
        |key: &str| -> Result<Option<u64>> { Ok(counters.get(key)?.map(|it| it.value())) };
    match counter("format_version")? {
        Some(FORMAT_VERSION) => {}
        other => return invalid(format!("format version {other:?} is not known")),
    }
    let identity = transaction.open_table(IDENTITY)?;
    let Some(wal) = identity.get("wal_id")? else { return Ok(None) };
    let wal = Uuid::from_slice(wal.value()).or_else(|error| invalid(format!("WAL: {error}")))?;
    let incarnations = identity.get("lives")?;
    let incarnations =
        incarnations.map_or(Ok(Vec::new()), |value| decode_incarnations(value.value()))?;

    // Each row is read once, so the checksum is complete when everything is decoded.
    let mut sum = sum_of(&counters)?.wrapping_add(sum_of(&identity)?);
    let mut streams = BTreeMap::new();
    each(&transaction.open_table(STREAMS)?, &mut sum, |id, value| {
        streams.insert(StreamId(id), decode_stream(value)?);
        Ok(())
    })?;
    each(&transaction.open_table(CHECKPOINTS)?, &mut sum, |id, value| {
        let stream = of_stream(&mut streams, id, "a checkpoint")?;
        stream.checkpoint = Some(Bytes::copy_from_slice(value));
        Ok(())
    })?;
    each(&transaction.open_table(RANGES)?, &mut sum, |(id, start), value| {
        let stream = of_stream(&mut streams, id, "a range")?;
        stream.ranges.push(decode_range(StreamOffset(start), value)?);
        Ok(())
    })?;
    let mut objects = BTreeMap::new();
    each(&transaction.open_table(OBJECTS)?, &mut sum, |id, value| {
        objects.insert(ObjectId(id), decode_object(wal, value)?);
        Ok(())
    })?;
    let mut meta = BTreeMap::new();
    each(&transaction.open_table(META)?, &mut sum, |key, value| {
        meta.insert(key.to_owned(), Bytes::copy_from_slice(value));
        Ok(())
    })?;
    let stated = transaction.open_table(CHECKSUM)?.get("rows")?.map(|it| it.value());
    if stated != Some(sum) {
        return invalid("damaged: the rows do not match their checksum");
    }

    let own = |key: &str| -> Option<u32> { std::str::from_utf8(meta.get(key)?).ok()?.parse().ok() };
    let (term, largest_count) = (own(TERM_KEY).unwrap_or(0), own(LARGEST_COUNT_KEY).unwrap_or(0));
    meta.retain(|key, _| !key.starts_with(OWN_META_PREFIX));
    let version = counter("version")?.unwrap_or(0);
    let next_stream = StreamId(counter("next_stream_id")?.unwrap_or(0));
    let header = BodyHeader {
        store: wal,
        wal,
        incarnation: incarnations.last().map_or(Uuid::nil(), |last| last.id),
        version,
        epoch: 0,
        opening: (version >> 32) as u32,
        node: 0,
        is_clean: false,
        written_at_ms: unix_ms().cast_unsigned(),
        covers: version,
        cut: LogOffset(counter("uploaded_log")?.unwrap_or(0)),
        wal_mark: counter("wal_mark")?.unwrap_or(0),
        next_stream,
    };
    Ok(Some(ChainState {
        head: Head { number: 0, link: 0, term, is_snapshot: false },
        header,
        reserved: next_stream,
        largest_count,
        streams,
        objects,
        meta,
        incarnations,
        gaps: Gaps::new(),
        hints: Hints::new(),
    }))
}

fn of_stream<'s>(
    streams: &'s mut BTreeMap<StreamId, ChainStream>,
    id: u64,
    what: &str,
) -> Result<&'s mut ChainStream> {
    let unknown = || Failure(format!("{what} of stream {id}, which does not exist"));
    streams.get_mut(&StreamId(id)).ok_or_else(unknown)
}

pub(super) fn row_sum<K: Value, V: Value>(
    table: &str,
    key: &K::SelfType<'_>,
    value: &V::SelfType<'_>,
) -> u64 {
    let (key, value) = (K::as_bytes(key), V::as_bytes(value));
    let (key, value): (&[u8], &[u8]) = (key.as_ref(), value.as_ref());
    let crc = crc32c::crc32c(table.as_bytes());
    let crc = crc32c::crc32c_append(crc, &(key.len() as u64).to_le_bytes());
    u64::from(crc32c::crc32c_append(crc32c::crc32c_append(crc, key), value))
}

fn sum_of<K: Key, V: Value>(table: &ReadOnlyTable<K, V>) -> Result<u64> {
    let mut sum = 0;
    each(table, &mut sum, |_, _| Ok(()))?;
    Ok(sum)
}

/// Visits all rows and adds them to the sum.
fn each<K: Key, V: Value>(
    table: &ReadOnlyTable<K, V>,
    sum: &mut u64,
    mut visit: impl FnMut(K::SelfType<'_>, V::SelfType<'_>) -> Result<()>,
) -> Result<()> {
    for row in table.iter()? {
        let (key, value) = row?;
        let (key, value) = (key.value(), value.value());
        *sum = sum.wrapping_add(row_sum::<K, V>(table.name(), &key, &value));
        visit(key, value)?;
    }
    Ok(())
}

fn decode_stream(value: &[u8]) -> Result<ChainStream> {
    let epoch = match (value.first(), value.len()) {
        (Some(&VALUE_VERSION), STREAM_BYTES_V1) => 0,
        (Some(&STREAM_VERSION), STREAM_BYTES) => u64_at(value, STREAM_BYTES_V1),
        (version, len) => {
            return invalid(format!("a stream row of version {version:?}, {len} bytes"));
        }
    };
    Ok(ChainStream {
        kind: value[1],
        epoch: StreamEpoch(epoch),
        start: StreamOffset(u64_at(value, 2)),
        uploaded_end: StreamOffset(u64_at(value, 10)),
        ..ChainStream::default()
    })
}

fn decode_range(start: StreamOffset, value: &[u8]) -> Result<ObjectRange> {
    if value.len() != RANGE_BYTES || value[0] != VALUE_VERSION {
        return invalid(format!("a range row of {} bytes", value.len()));
    }
    Ok(ObjectRange {
        object: ObjectId(u64_at(value, 1)),
        start,
        end: StreamOffset(u64_at(value, 9)),
        payload_bytes: u64_at(value, 17),
        max_timestamp_ms: u64_at(value, 25).cast_signed(),
    })
}

fn decode_incarnations(value: &[u8]) -> Result<Vec<Incarnation>> {
    let Some((&VALUE_VERSION, rows)) = value.split_first() else {
        return invalid(format!("a `lives` row of {} bytes", value.len()));
    };
    let (incarnations, rest) = rows.as_chunks::<INCARNATION_BYTES>();
    if !rest.is_empty() {
        return invalid(format!("a `lives` row of {} bytes", value.len()));
    }
    let decode = |incarnation: &[u8; INCARNATION_BYTES]| {
        let id = Uuid::from_slice(&incarnation[8..]).expect("16 bytes");
        Incarnation { after_version: u64_at(incarnation, 0), id }
    };
    Ok(incarnations.iter().map(decode).collect())
}

/// An object row, as JSON.
#[derive(serde::Deserialize)]
struct ObjectRow {
    id: u64,
    name: String,
    size_bytes: u64,
    index_position: u64,
    index_bytes: u64,
    index_crc32c: u32,
    created_at_ms: i64,
    #[serde(default)]
    generation: u8,
    #[serde(default)]
    payload_bytes: u64,
}

fn decode_object(store: Uuid, value: &[u8]) -> Result<ChainObject> {
    let row: ObjectRow = serde_json::from_slice(value)
        .or_else(|error| invalid(format!("an object row: {error}")))?;
    let id = ObjectId(row.id);
    match object_nonce(&row.name) {
        Some(nonce) if object_name(store, id, nonce) == row.name => Ok(ChainObject {
            id,
            nonce,
            size_bytes: row.size_bytes,
            index_position: row.index_position,
            index_bytes: row.index_bytes,
            index_crc32c: row.index_crc32c,
            created_at_ms: row.created_at_ms,
            generation: row.generation,
            payload_bytes: row.payload_bytes,
            format: OBJECT_FORMAT,
        }),
        _ => invalid(format!("object {id} has the name {}", row.name)),
    }
}
