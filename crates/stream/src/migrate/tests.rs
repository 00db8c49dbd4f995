//! Tests of the migration.

use std::collections::BTreeMap;

use ::redb::{Database, Key, TableDefinition, TableHandle, Value};
use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_wal::FormatOptions;
use bytes::Bytes;
use object_store::memory::InMemory;

use super::redb::{
    CHECKPOINTS, CHECKSUM, COUNTERS, IDENTITY, META, OBJECTS, RANGES, STREAMS, row_sum,
};
use super::*;
use crate::chain::ChainStream;
use crate::naming::object_name;
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

/// The version of the catalog: of epoch 0.
const VERSION: u64 = 7;
const NONCE: Uuid = Uuid::from_u128(5);

/// The parts of a server of an earlier version.
struct World {
    objects: Arc<dyn ObjectStore>,
    disk: SimDisk,
    wal: Uuid,
    directory: tempfile::TempDir,
}

/// Adds a row, and its sum.
fn put<'k, 'v, K: Key + 'static, V: Value + 'static>(
    transaction: &::redb::WriteTransaction,
    sum: &mut u64,
    table: TableDefinition<'_, K, V>,
    key: &K::SelfType<'k>,
    value: &V::SelfType<'v>,
) {
    let mut table = transaction.open_table(table).unwrap();
    table.insert(key, value).unwrap();
    *sum = sum.wrapping_add(row_sum::<K, V>(table.name(), key, value));
}

impl World {
    /// A server with a stream of an object, a stream without one, and metadata.
    async fn new() -> Self {
        let disk = SimDisk::new(SimOptions { capacity_bytes: 1 << 20, ..SimOptions::default() });
        let header = Wal::format(&disk.device(), &FormatOptions::default()).unwrap();
        let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let world =
            Self { objects, disk, wal: header.wal_id, directory: tempfile::tempdir().unwrap() };
        world.write_catalog(Some(world.wal));
        let name = object_name(world.wal, ObjectId(3), NONCE);
        world.objects.put(&name.as_str().into(), "object".into()).await.unwrap();
        world
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes the catalog as the earlier version did.
    fn write_catalog(&self, wal: Option<Uuid>) {
        let path = self.file(LEGACY_CATALOG);
        let _ = std::fs::remove_file(&path);
        let database = Database::create(path).unwrap();
        let transaction = database.begin_write().unwrap();
        let sum = &mut 0;
        for (key, value) in [
            ("format_version", 1),
            ("next_stream_id", 9),
            ("next_object_id", 4),
            ("uploaded_log", 0),
            ("version", VERSION),
            ("wal_mark", 0),
        ] {
            put(&transaction, sum, COUNTERS, &key, &value);
        }
        if let Some(wal) = wal {
            put(&transaction, sum, IDENTITY, &"wal_id", &&wal.as_bytes()[..]);
        }
        let mut lives = vec![1];
        lives.extend(2u64.to_le_bytes());
        lives.extend(Uuid::from_u128(1).as_bytes());
        put(&transaction, sum, IDENTITY, &"lives", &&lives[..]);
        let row = |kind: u8, start: u64, end: u64, epoch: u64| {
            let mut row = vec![2, kind];
            [start, end, epoch].iter().for_each(|field| row.extend(field.to_le_bytes()));
            row
        };
        put(&transaction, sum, STREAMS, &4, &&row(0, 2, 10, 1)[..]);
        put(&transaction, sum, STREAMS, &8, &&row(1, 0, 0, 0)[..]);
        put(&transaction, sum, CHECKPOINTS, &4, &&b"checkpoint"[..]);
        let mut range = vec![1];
        [3u64, 10, 100, 50].iter().for_each(|field| range.extend(field.to_le_bytes()));
        put(&transaction, sum, RANGES, &(4, 0), &&range[..]);
        let name = object_name(wal.unwrap_or(self.wal), ObjectId(3), NONCE);
        let object = serde_json::json!({
            "id": 3, "name": name, "size_bytes": 6,
            "index_position": 1, "index_bytes": 2, "index_crc32c": 3, "created_at_ms": 4,
        });
        put(&transaction, sum, OBJECTS, &3, &object.to_string().as_bytes());
        for (key, value) in [("topic/a", "1"), ("stream/term", "6"), ("stream/largest-count", "99")]
        {
            put(&transaction, sum, META, &key, &value.as_bytes());
        }
        transaction.open_table(CHECKSUM).unwrap().insert("rows", *sum).unwrap();
        transaction.commit().unwrap();
    }

    async fn migrate(&self) -> Result<Option<PathBuf>, MigrateError> {
        let options = Options::default();
        let directory = self.directory.path();
        migrate(&self.objects, &self.disk.device(), directory, 1, &options).await
    }

    fn chain(&self) -> Chain {
        Chain::new(self.objects.clone(), self.wal, (Duration::ZERO, Duration::ZERO))
    }

    /// Checks what the chain has after a migration.
    async fn check(&self) {
        let state = self.chain().load().await.unwrap().unwrap();
        assert_eq!((state.head.number, state.head.term), (1, 6));
        assert_eq!((state.header.wal, state.header.covers), (self.wal, VERSION));
        assert!(state.header.version > VERSION);
        assert_eq!((state.header.next_stream, state.largest_count), (StreamId(9), 99));
        let range = crate::catalog::ObjectRange {
            object: ObjectId(3),
            start: StreamOffset(0),
            end: StreamOffset(10),
            payload_bytes: 100,
            max_timestamp_ms: 50,
        };
        let uploaded = ChainStream {
            epoch: StreamEpoch(1),
            start: StreamOffset(2),
            uploaded_end: StreamOffset(10),
            checkpoint: Some(Bytes::from_static(b"checkpoint")),
            ranges: vec![range],
            ..ChainStream::default()
        };
        let empty = ChainStream { kind: 1, ..ChainStream::default() };
        assert_eq!(state.streams, BTreeMap::from([(StreamId(4), uploaded), (StreamId(8), empty)]));
        assert_eq!(state.objects[&ObjectId(3)].nonce, NONCE);
        let meta: Vec<_> = state.meta.keys().map(String::as_str).collect();
        assert_eq!(meta, ["topic/a"], "the store's own entries are fields now");
        let owner = self.objects.get(&owner_name(self.wal).as_str().into()).await.unwrap();
        let owner: Owner = serde_json::from_slice(&owner.bytes().await.unwrap()).unwrap();
        assert!(owner.incarnation.is_nil());
    }
}

#[tokio::test]
async fn a_catalog_is_migrated_once() {
    let world = World::new().await;
    let renamed = world.file(MIGRATED);
    assert_eq!(world.migrate().await.unwrap(), Some(renamed.clone()));
    assert!(renamed.exists() && !world.file(LEGACY_CATALOG).exists());
    world.check().await;
    assert_eq!(world.migrate().await.unwrap(), None, "the object store has it");
    world.check().await;

    // An operator has gone back to the earlier version.
    std::fs::rename(renamed, world.file(LEGACY_CATALOG)).unwrap();
    let refused = world.migrate().await;
    assert!(matches!(refused, Err(MigrateError::Superseded { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_migration_goes_on_after_a_crash() {
    let world = World::new().await;
    // After the snapshot: a run that has ended before its fence.
    let state = redb::read(&world.file(LEGACY_CATALOG)).unwrap().unwrap();
    world.chain().write_snapshot(Snapshot::of_new_base(state)).await.unwrap();
    assert!(!world.chain().has_fence().await.unwrap());
    assert!(world.chain().load().await.unwrap().is_none());
    // After the renaming.
    std::fs::rename(world.file(LEGACY_CATALOG), world.file(MIGRATED)).unwrap();
    assert_eq!(world.migrate().await.unwrap(), Some(world.file(MIGRATED)));
    world.check().await;
}

#[tokio::test]
async fn what_does_not_belong_together_is_not_migrated() {
    let refused = async |world: &World| {
        let refused = world.migrate().await.unwrap_err();
        assert!(world.file(LEGACY_CATALOG).exists(), "nothing has changed: {refused}");
        assert!(!world.chain().has_fence().await.unwrap());
        refused
    };
    let world = World::new().await;
    world.write_catalog(Some(Uuid::from_u128(9)));
    let error = refused(&world).await;
    assert!(matches!(error, MigrateError::Store(StoreError::WrongWal { .. })), "{error}");

    let world = World::new().await;
    let owner = br#"{"epoch":1,"life":"00000000-0000-0000-0000-000000000002","node_id":1,
        "version":1,"written_at_ms":1}"#;
    world.objects.put(&owner_name(world.wal).as_str().into(), owner[..].into()).await.unwrap();
    assert!(matches!(refused(&world).await, MigrateError::NotOwner { .. }));

    let world = World { objects: Arc::new(InMemory::new()), ..World::new().await };
    assert!(matches!(refused(&world).await, MigrateError::OtherObjectStore { .. }));
}

#[tokio::test]
async fn a_catalog_without_a_log_is_nothing() {
    let world = World::new().await;
    world.write_catalog(None);
    assert_eq!(world.migrate().await.unwrap(), None);
    std::fs::remove_file(world.file(LEGACY_CATALOG)).unwrap();
    assert_eq!(world.migrate().await.unwrap(), None, "a new server");
}

#[tokio::test]
async fn damage_of_the_file_is_found() {
    let world = World::new().await;
    let path = world.file(LEGACY_CATALOG);
    let intact = std::fs::read(&path).unwrap();
    let mut found = 0;
    for at in (0..intact.len()).step_by(509) {
        let mut damaged = intact.clone();
        damaged[at] ^= 0xff;
        std::fs::write(&path, &damaged).unwrap();
        match redb::read(&path) {
            Err(_) => found += 1,
            // Not a byte that anything was read from.
            Ok(read) => assert_eq!(read.unwrap().streams.len(), 2),
        }
    }
    assert!(found > 0);
    std::fs::write(&path, &intact[..intact.len() / 2]).unwrap();
    assert!(redb::read(&path).is_err(), "truncated");
    std::fs::write(&path, b"").unwrap();
    assert!(redb::read(&path).is_err(), "empty");
}
