//! Time until a server with many streams and many objects can serve, and its memory: `cargo bench
//! -p alluvium-stream --bench recovery`. Results: `docs/benchmarks/recovery.md`.
#![allow(missing_docs)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use alluvium_device::{OpenOptions, SharedDevice};
use alluvium_stream::catalog::{ObjectInfo, ObjectRange, Uploaded};
use alluvium_stream::{
    Catalog, Change, KIND_LOG, ObjectId, Opened, Options, RedbCatalog, Store, StreamId,
    StreamOffset, local_objects,
};
use alluvium_wal::{FormatOptions, Wal};
use bytes::Bytes;
use uuid::Uuid;

const STREAMS: u64 = 10_000;
const OBJECTS: u64 = 100_000;
/// Number of streams with a range in an object; streams take turns.
const RANGES_PER_OBJECT: u64 = 10;
const RECORDS_PER_RANGE: u64 = 1000;
const CHECKPOINT_BYTES: usize = 200;
const WAL_BYTES: u64 = 64 << 20;
/// Number of objects committed together while the catalog is created.
const GROUP: u64 = 1000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, directory] = arguments.as_slice()
        && first == "make"
    {
        make(Path::new(directory));
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    // In a process of its own, so that its memory is not counted.
    let own = std::env::current_exe().expect("this program has a path");
    let made = Command::new(own).arg("make").arg(directory.path()).status().expect("it starts");
    assert!(made.success(), "the catalog could not be made");
    measure(directory.path());
}

fn make(directory: &Path) {
    let catalog = RedbCatalog::open(&directory.join("catalog")).expect("a new catalog");
    let wal_id = Uuid::from_u128(7);
    let checkpoint = Bytes::from(vec![7; CHECKPOINT_BYTES]);
    let mut changes = vec![Change::NextStreamId(StreamId(STREAMS))];
    let create = |id| Change::CreateStream { id: StreamId(id), kind: KIND_LOG };
    changes.extend((0..STREAMS).map(create));
    for id in 0..OBJECTS {
        changes.push(Change::AddObject(ObjectInfo {
            id: ObjectId(id),
            name: format!("streams/{wal_id}/{id:016x}-{}", Uuid::from_u128(id.into()).simple()),
            size_bytes: 64 << 20,
            index_position: 60 << 20,
            index_bytes: 56 * 64,
            index_crc32c: 1,
            created_at_ms: 1_700_000_000_000,
            generation: 1,
            payload_bytes: 60 << 20,
        }));
        for i in 0..RANGES_PER_OBJECT {
            let number = id * RANGES_PER_OBJECT + i;
            let start = StreamOffset(number / STREAMS * RECORDS_PER_RANGE);
            let end = StreamOffset(start.0 + RECORDS_PER_RANGE);
            changes.push(Change::Uploaded(Uploaded {
                stream: StreamId(number % STREAMS),
                uploaded_end: end,
                start: StreamOffset(0),
                checkpoint: Some(checkpoint.clone()),
                range: Some(ObjectRange {
                    object: ObjectId(id),
                    start,
                    end,
                    payload_bytes: 6 << 20,
                    max_timestamp_ms: 1_700_000_000_000,
                }),
            }));
        }
        if (id + 1) % GROUP == 0 {
            catalog.commit(&changes).expect("the changes are in order");
            changes.clear();
        }
    }
    catalog.commit(&changes).expect("the changes are in order");
}

fn measure(directory: &Path) {
    let objects = local_objects(&directory.join("objects")).expect("a directory");
    let device = wal(&directory.join("wal"));
    let path = directory.join("catalog");
    let file_bytes = std::fs::metadata(&path).expect("it was made").len();
    println!(
        "{STREAMS} streams, {OBJECTS} objects, {} ranges; a catalog of {} MiB",
        OBJECTS * RANGES_PER_OBJECT,
        file_bytes >> 20
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let mut last = (Instant::now(), cpu());
    let mut step = |what: &str| {
        let (elapsed, cpu_s) = (last.0.elapsed().as_secs_f64(), cpu() - last.1);
        println!(
            "{what:<16}{elapsed:>7.2} s, {cpu_s:>5.2} s of CPU, {} MiB resident",
            memory("VmRSS")
        );
        last = (Instant::now(), cpu());
    };
    step("before");
    let catalog = Arc::new(RedbCatalog::open(&path).expect("it was made"));
    step("open the file");
    catalog.load().expect("it is whole");
    step("Catalog::load");
    let opened = runtime.block_on(Store::open(
        device,
        alluvium_wal::Options {
            window_bytes: 1 << 20,
            max_record_bytes: 500 << 10,
            ..alluvium_wal::Options::default()
        },
        objects,
        catalog,
        Arc::new(()),
        Options::for_wal(WAL_BYTES),
        None,
    ));
    let Opened { store, recovery } = opened.expect("the catalog and the WAL match");
    assert_eq!(recovery.streams as u64, STREAMS);
    step("Store::open");
    println!("at most {} MiB resident", memory("VmHWM"));
    runtime.block_on(store.close()).expect("it closes");
}

fn wal(path: &Path) -> SharedDevice {
    let options = OpenOptions { create_bytes: Some(WAL_BYTES), ..OpenOptions::default() };
    let device = alluvium_device::open(path, &options).expect("a new file");
    Wal::format(&device, &FormatOptions::default()).expect("a new log");
    device
}

/// Returns the CPU time of this process, user and system, in seconds.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux has it");
    // The name, in parentheses, may contain blanks. Two fields count ticks, of which Linux shows
    // 100 per second.
    let fields = stat.rsplit_once(')').expect("the name ends").1.split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().expect("a number")).sum::<f64>()
        / 100.0
}

/// Returns a line of this process's status from the kernel, in MiB.
fn memory(what: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("a number of KiB") >> 10
}
