//! Tests of servers on simulated disks.

use alluvium_coordination::{Limits, ManualClock, MemoryCoordination};
use alluvium_device::sim::{Mode, SimDisk, SimOptions};
use tokio::net::TcpListener;

use super::super::Server;
use super::super::tests::create_groups;
use super::*;
use crate::net::NetLimits;
use crate::shard::Apply;

fn disk(capacity_bytes: u64) -> SimDisk {
    SimDisk::new(SimOptions { capacity_bytes, ..SimOptions::default() })
}

fn new_log() -> SimDisk {
    disk(1 << 20)
}

fn new_store() -> SimDisk {
    disk(40 << 20)
}

fn log_options() -> Options {
    Options {
        window_bytes: 480 << 10,
        block_bytes: 32 << 10,
        max_record_bytes: 100 << 10,
        ..Options::default()
    }
}

/// The registry of servers.
struct Test {
    service: Arc<dyn Coordination>,
    keys: Arc<Keys>,
}

impl Test {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::default());
        let service = MemoryCoordination::new(Limits::default(), clock);
        Self { service: Arc::new(service), keys: Arc::new(Keys::new("c").unwrap()) }
    }

    async fn open(&self, log: &SimDisk, store: &SimDisk) -> Result<Server, ServeError> {
        self.open_with(log, store, |_| Arc::new(|_, _| {})).await
    }

    async fn open_with(
        &self,
        log: &SimDisk,
        store: &SimDisk,
        step: impl FnMut(&'static str) -> Progress + Send + 'static,
    ) -> Result<Server, ServeError> {
        let options = ServeOptions {
            cluster: "c".into(),
            log: log.device(),
            log_options: log_options(),
            store: store.device(),
            apply: Apply::Deferred,
            entry_cache_bytes: 1 << 20,
            overlay_bytes: 1 << 20,
            install_bytes_per_s: 0,
            limits: NetLimits::default(),
            advertised: "127.0.0.1:1".into(),
        };
        let (service, keys) = (Arc::clone(&self.service), Arc::clone(&self.keys));
        Server::open(options, service, keys, step).await
    }

    /// Opens a server, and stops it.
    async fn run(&self, log: &SimDisk, store: &SimDisk) -> ServerId {
        let server = self.open(log, store).await.unwrap();
        let id = server.id();
        server.stop_handle().stop();
        server.run(TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap();
        id
    }

    async fn refusal(&self, log: &SimDisk, store: &SimDisk) -> ServeError {
        match self.open(log, store).await {
            Ok(server) => panic!("server {} is open", server.id()),
            Err(error) => error,
        }
    }
}

fn header(log: &SimDisk) -> HeaderInfo {
    Wal::inspect(&log.device()).unwrap().header
}

#[tokio::test]
async fn a_server_that_is_stopped_has_closed_its_log() {
    let (test, log, store) = (Test::new(), new_log(), new_store());
    let id = test.run(&log, &store).await;
    assert!(header(&log).clean_shutdown);
    drop(test.open(&log, &store).await.unwrap());
    assert!(!header(&log).clean_shutdown, "a server that was not stopped");
    assert_eq!(test.run(&log, &store).await, id);
    assert!(header(&log).clean_shutdown);
    assert_eq!(header(&log).epoch, 3);
}

#[tokio::test]
async fn a_server_whose_log_hangs_stops_without_closing_it() {
    let (test, log, store) = (Test::new(), new_log(), new_store());
    let server = test.open(&log, &store).await.unwrap();
    // The first record of its replica is never durable.
    log.set_mode(Mode::Queued);
    create_groups(&*test.service, &test.keys, 1..=2, 1, 1).await;
    let (stop, view) = (server.stop_handle(), server.view());
    let stop = async {
        while !view.lock().is_stalled {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        stop.stop();
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (ended, ()) = tokio::join!(server.run(listener), stop);
    ended.unwrap();
    log.set_mode(Mode::Immediate);
    assert!(!header(&log).clean_shutdown);
}

#[tokio::test]
async fn a_blank_store_is_no_new_server_if_the_log_was_in_use_and_the_other_way_round() {
    let (test, log, store) = (Test::new(), new_log(), new_store());
    let id = test.run(&log, &store).await;
    let blank = new_store();
    let error = test.refusal(&log, &blank).await;
    assert!(matches!(error, ServeError::StoreBlank { .. }), "{error}");
    let unformatted = Store::identify(&blank.device());
    assert!(matches!(unformatted, Err(StoreError::NotFormatted)));
    let blank = new_log();
    let error = test.refusal(&blank, &store).await;
    assert!(matches!(error, ServeError::LogBlank { server, .. } if server == id), "{error}");
    assert!(Wal::inspect(&blank.device()).is_err(), "it was formatted");
    // The two devices that belong together are as they were.
    assert_eq!(test.run(&log, &store).await, id);
    assert_eq!(test.run(&new_log(), &new_store()).await, ServerId(id.0 + 1));
}

#[tokio::test]
async fn a_first_start_that_a_crash_has_interrupted_goes_on() {
    let (test, log, store) = (Test::new(), new_log(), new_store());
    let format = FormatOptions {
        window_bytes: Some(log_options().window_bytes),
        ..FormatOptions::default()
    };
    let wal_id = Wal::format(&log.device(), &format).unwrap().wal_id;
    let registry = Registry::new(&*test.service, &test.keys);
    let disks = [Uuid::from_u128(7), wal_id];
    let id = registry.register_server("127.0.0.1:1", disks, Uuid::nil()).await.unwrap();
    assert_eq!(test.run(&log, &store).await, id);
    assert_eq!(Store::identify(&store.device()).unwrap().store_id, disks[0]);
    assert_eq!(registry.servers().await.unwrap().len(), 1);
}

/// What an opening reports: each step, and the bytes of the last report in it.
type Reports = Arc<Mutex<Vec<(&'static str, Option<(u64, u64)>)>>>;

#[tokio::test]
async fn the_steps_of_an_opening_report_bytes() {
    let (test, log, store) = (Test::new(), new_log(), new_store());
    test.run(&log, &store).await;
    let reports = Reports::default();
    let reported = Arc::clone(&reports);
    let step = move |what| -> Progress {
        reported.lock().push((what, None));
        let reported = Arc::clone(&reported);
        Arc::new(move |done, all| reported.lock().last_mut().unwrap().1 = Some((done, all)))
    };
    let server = test.open_with(&log, &store, step).await.unwrap();
    let reports = reports.lock();
    let steps: Vec<_> = reports.iter().map(|(what, _)| *what).collect();
    let store_step = "reading the metadata of the store";
    assert_eq!(steps, [WAITING, "reading the log", store_step, "replaying the log", WAITING]);
    let sectors = u64::from(server.driver.shard.slots().0) * 512;
    assert_eq!(reports[2].1, Some((sectors, sectors)));
}

/// A new disk of a server that has other data at one position.
fn used(disk: SimDisk, at: u64, bytes: &[u8]) -> SimDisk {
    disk.poke(at, bytes);
    disk
}

#[tokio::test]
async fn a_device_with_other_data_is_not_formatted() {
    let test = Test::new();
    let end_of_log = (1 << 20) - 4096;
    let end_of_store = (40 << 20) - 4096;
    let cases = [
        (new_log(), used(new_store(), 64 * 1024 + 64, b"_BHRfS_M"), "btrfs"),
        (used(new_log(), 64 * 1024 + 64, b"_BHRfS_M"), new_store(), "btrfs"),
        (new_log(), used(new_store(), 700_000, b"x"), "byte 700000"),
        (new_log(), used(new_store(), end_of_store, b"x"), "unknown data"),
        (used(new_log(), end_of_log, b"x"), new_store(), "unknown data"),
        (new_log(), used(new_store(), 0, b"ALLUVWAL"), "an Alluvium WAL"),
        (used(new_log(), 0, b"ALLUVSTO"), new_store(), "an Alluvium volume store"),
    ];
    for (log, store, wanted) in cases {
        let writes = || [log.counters().writes, store.counters().writes];
        let before = writes();
        let error = test.refusal(&log, &store).await;
        let (log_device, store_device) = (log.device(), store.device());
        let checked = check_devices(Some(&log_device), Some(&store_device)).unwrap_err();
        for error in [error, checked] {
            assert!(error.to_string().contains(wanted), "{error}");
            assert!(!error.to_string().contains("force"), "the server has no such option: {error}");
        }
        assert_eq!(writes(), before, "a refused device is written");
    }
}
