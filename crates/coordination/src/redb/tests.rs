//! Tests of the service in a file: conformance, restarts, damage.

use futures::StreamExt as _;
use tempfile::TempDir;

use super::*;
use crate::conformance::{self, Fixture};
use crate::election::list_all;
use crate::{Change, ManualClock};

const HISTORY: usize = 200;

struct InFile {
    directory: TempDir,
    service: Option<RedbCoordination>,
    clock: ManualClock,
}

impl InFile {
    fn new() -> Self {
        let (directory, clock) = (TempDir::new().unwrap(), ManualClock::default());
        let mut new = Self { directory, service: None, clock };
        new.reopen();
        new
    }

    fn open(&self) -> Result<RedbCoordination> {
        let limits = Limits { history_revisions: HISTORY, ..Limits::default() };
        let path = self.directory.path().join("coordination");
        RedbCoordination::open(&path, limits, Arc::new(self.clock.clone()))
    }

    fn reopen(&mut self) {
        drop(self.service.take());
        self.service = Some(self.open().unwrap());
    }
}

#[async_trait]
impl Fixture for InFile {
    fn service(&self) -> &dyn Coordination {
        self.service.as_ref().unwrap()
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.service.as_ref().unwrap().expire().await.unwrap();
    }

    async fn compact(&self) {
        for _ in 0..=HISTORY {
            put(self.service(), "compaction").await;
        }
    }
}

async fn put(service: &dyn Coordination, key: &str) -> Revision {
    let changes = vec![Change::put(key, "x")];
    service.commit(&Transaction { guards: Vec::new(), changes }).await.unwrap().unwrap()
}

#[tokio::test]
async fn the_service_in_a_file_conforms() {
    conformance::run(&|| Box::new(InFile::new())).await;
}

#[tokio::test]
async fn revisions_history_and_lease_numbers_go_on_after_a_restart() {
    let mut file = InFile::new();
    let first = put(file.service(), "a").await;
    let second = put(file.service(), "b").await;
    let lease = file.service().grant(Duration::from_secs(5)).await.unwrap();
    let before = list_all(file.service(), "").await.unwrap();
    file.reopen();
    assert_eq!(list_all(file.service(), "").await.unwrap(), before);
    let changes = file.service().watch("", first).next().await.unwrap().unwrap();
    assert_eq!(changes.revision, second);
    assert_eq!(put(file.service(), "c").await, second.next());
    assert!(file.service().grant(Duration::from_secs(5)).await.unwrap().id > lease.id);
    file.service().revoke(lease.id).await.unwrap();
}

#[tokio::test]
async fn an_outage_does_not_end_leases_at_once() {
    let mut file = InFile::new();
    let lease = file.service().grant(Duration::from_secs(5)).await.unwrap();
    let changes = vec![Change::put_leased("a", "x", lease.id)];
    let transaction = Transaction { guards: Vec::new(), changes };
    file.service().commit(&transaction).await.unwrap().unwrap();
    file.clock.advance(Duration::from_secs(60));
    file.reopen();
    file.advance(Duration::from_secs(4)).await;
    assert!(file.service().get("a").await.unwrap().is_some());
    file.advance(Duration::from_secs(1)).await;
    assert_eq!(file.service().get("a").await.unwrap(), None);
    file.reopen();
    assert_eq!(file.service().get("a").await.unwrap(), None);
}

#[tokio::test]
async fn a_file_is_open_once_and_a_damaged_row_is_refused() {
    use redb::{Database, TableDefinition};
    const ENTRIES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("entries");
    let mut file = InFile::new();
    put(file.service(), "a").await;
    put(file.service(), "b").await;
    assert!(matches!(file.open(), Err(Error::Failed(_))), "it is open");
    drop(file.service.take());
    let path = file.directory.path().join("coordination");
    type Rows<'a> = redb::Table<'a, &'static str, &'static [u8]>;
    let damage = |damage: &dyn Fn(&mut Rows<'_>)| {
        let database = Database::open(&path).unwrap();
        let write = database.begin_write().unwrap();
        damage(&mut write.open_table(ENTRIES).unwrap());
        write.commit().unwrap();
    };
    let mut row = Vec::new();
    {
        use redb::ReadableDatabase as _;
        let database = Database::open(&path).unwrap();
        let table = database.begin_read().unwrap().open_table(ENTRIES).unwrap();
        row.extend_from_slice(table.get("a").unwrap().unwrap().value());
    }
    damage(&|table| drop(table.remove("a").unwrap()));
    assert!(matches!(file.open(), Err(Error::Failed(text)) if text.contains("missing")));
    let mut flipped = row.clone();
    *flipped.last_mut().unwrap() ^= 1;
    damage(&|table| drop(table.insert("a", flipped.as_slice()).unwrap()));
    assert!(matches!(file.open(), Err(Error::Failed(text)) if text.contains("checksum")));
    damage(&|table| drop(table.insert("a", row.as_slice()).unwrap()));
    file.reopen();
}

/// Memory as a disk that a test can let fail.
#[derive(Clone, Debug, Default)]
struct Disk(Arc<parking_lot::Mutex<Content>>);

#[derive(Debug, Default)]
struct Content {
    bytes: Vec<u8>,
    /// Writes and flushes that still succeed; `None`: all.
    left: Option<u64>,
    /// Whether a write that fails has changed half of its bytes.
    is_torn: bool,
}

impl Content {
    fn spend(&mut self) -> std::io::Result<()> {
        match &mut self.left {
            None => Ok(()),
            Some(0) => Err(std::io::Error::other("the disk fails")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }
}

impl ::redb::StorageBackend for Disk {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.0.lock().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        let content = self.0.lock();
        let from = usize::try_from(offset).unwrap();
        let found = content.bytes.get(from..from + out.len());
        out.copy_from_slice(found.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        let mut content = self.0.lock();
        content.spend()?;
        content.bytes.resize(usize::try_from(len).unwrap(), 0);
        Ok(())
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.0.lock().spend()
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let mut content = self.0.lock();
        let from = usize::try_from(offset).unwrap();
        let spent = content.spend();
        let length = match spent {
            Ok(()) => data.len(),
            Err(_) if content.is_torn => data.len() / 2,
            Err(_) => 0,
        };
        content.bytes[from..from + length].copy_from_slice(&data[..length]);
        spent
    }
}

/// A write or flush of redb fails, at each of the first places at which one can.
#[tokio::test]
async fn after_a_failed_write_the_service_stops_and_has_each_acknowledged_change() {
    let (mut failures, mut kept, mut dropped) = (0, 0, 0);
    for left in 0..60 {
        let disk = Disk::default();
        let clock = Arc::new(ManualClock::default());
        let service = RedbCoordination::open_backend(disk.clone(), clock.clone()).unwrap();
        let lease = service.grant(Duration::from_secs(5)).await.unwrap().id;
        put(&service, "before").await;
        disk.0.lock().left = Some(left);
        disk.0.lock().is_torn = left % 2 == 1;
        let mut watch = service.watch("", Revision(1));
        let mut acknowledged = Vec::new();
        let error = loop {
            let n = acknowledged.len();
            let changes = vec![Change::put_leased(format!("k{n:02}"), "x", lease)];
            match service.commit(&Transaction { guards: Vec::new(), changes }).await {
                Ok(revision) => acknowledged.push(revision.unwrap()),
                Err(error) => break error,
            }
        };
        assert!(matches!(&error, Error::Failed(text) if text.contains("the disk fails")));
        assert!(error.is_unknown());
        // Nothing goes on, and no watch has seen what may not be durable.
        for answer in [
            service.get("before").await.map(drop),
            service.commit(&Transaction::default()).await.map(drop),
            service.grant(Duration::from_secs(1)).await.map(drop),
            service.keep_alive(lease).await,
        ] {
            assert_eq!(answer, Err(error.clone()));
        }
        assert_eq!(watch.next().await, Some(Err(error)));
        drop(service);
        disk.0.lock().left = None;
        let service = RedbCoordination::open_backend(disk.clone(), clock).unwrap();
        let (entries, revision) = list_all(&service, "k").await.unwrap();
        let known = acknowledged.len();
        assert!((known..=known + 1).contains(&entries.len()), "{left}: {known} {entries:?}");
        assert_eq!(revision.0, 1 + entries.len() as u64);
        failures += 1;
        kept += usize::from(entries.len() > known);
        dropped += usize::from(entries.len() == known);
        put(&service, "after").await;
    }
    assert_eq!(failures, 60);
    assert!(kept > 0 && dropped > 0, "{kept} unknown changes were kept, {dropped} were not");
}

fn in_meta(path: &Path, change: impl FnOnce(&[u8]) -> Vec<u8>) {
    use ::redb::{Database, ReadableTable as _, TableDefinition};
    const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
    let database = Database::open(path).unwrap();
    let write = database.begin_write().unwrap();
    {
        let mut table = write.open_table(META).unwrap();
        let row = table.get("state").unwrap().unwrap().value().to_vec();
        let row = rows::seal(rows::Kind::Meta, b"state", &change(&row[4..]));
        table.insert("state", row.as_slice()).unwrap();
    }
    write.commit().unwrap();
}

#[tokio::test]
async fn a_file_of_format_1_opens_and_gets_an_identity_that_stays() {
    let mut file = InFile::new();
    put(file.service(), "a").await;
    let first = file.service().identity().await.unwrap();
    file.reopen();
    assert_eq!(file.service().identity().await.unwrap(), first);
    drop(file.service.take());
    let path = file.directory.path().join("coordination");
    in_meta(&path, |body| [&1_u32.to_le_bytes(), &body[4..36]].concat());
    file.reopen();
    let given = file.service().identity().await.unwrap();
    assert_ne!(given.store, first.store);
    assert_eq!(given.restores, 0);
    assert!(file.service().get("a").await.unwrap().is_some());
    file.reopen();
    assert_eq!(file.service().identity().await.unwrap(), given);
    drop(file.service.take());
    in_meta(&path, |body| [&3_u32.to_le_bytes(), &body[4..]].concat());
    assert!(matches!(file.open(), Err(Error::Failed(text)) if text.contains("format 3")));
}

#[tokio::test]
async fn a_restored_file_reuses_no_revision_and_no_lease() {
    let mut file = InFile::new();
    let lease = file.service().grant(Duration::from_secs(5)).await.unwrap();
    put(file.service(), "a").await;
    let before = file.service().identity().await.unwrap();
    let path = file.directory.path().join("coordination");
    assert!(matches!(RedbCoordination::restored(&path), Err(Error::Failed(_))), "it is open");
    let backup = {
        drop(file.service.take());
        std::fs::read(&path).unwrap()
    };
    file.reopen();
    // After the backup.
    let lost_lease = file.service().grant(Duration::from_secs(5)).await.unwrap();
    let lost = put(file.service(), "b").await;
    drop(file.service.take());
    std::fs::write(&path, backup).unwrap();
    let after = RedbCoordination::restored(&path).unwrap();
    file.reopen();
    let service = file.service();
    assert_eq!(service.identity().await.unwrap(), after);
    assert_eq!(after.restores, before.restores + 1);
    assert_ne!(after.store, before.store);
    assert!(service.get("a").await.unwrap().is_some());
    assert!(service.get("b").await.unwrap().is_none());
    let ended = service.watch("", lost).next().await.unwrap();
    assert!(matches!(ended, Err(Error::Compacted { .. })), "{ended:?}");
    assert!(put(service, "c").await > lost);
    service.keep_alive(lease.id).await.unwrap();
    assert!(service.grant(Duration::from_secs(5)).await.unwrap().id > lost_lease.id);
    let absent = file.directory.path().join("absent");
    assert!(matches!(RedbCoordination::restored(&absent), Err(Error::Failed(_))));
}
