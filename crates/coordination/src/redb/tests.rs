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
