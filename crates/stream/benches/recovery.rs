//! Time until a server with many streams and many objects can serve, and its memory: `cargo bench
//! -p alluvium-stream --bench recovery`. Results: `docs/benchmarks/recovery.md`.
#![allow(missing_docs)]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use alluvium_device::{OpenOptions, SharedDevice};
use alluvium_stream::catalog::{ObjectRange, Uploaded};
use alluvium_stream::chain::{
    Chain, ChainChange, ChainObject, ChainWriter, Delta, Fence, Hints, Recorded,
};
use alluvium_stream::{
    KIND_LOG, LogOffset, ObjectId, Opened, Options, Store, StreamId, StreamOffset, local_objects,
};
use alluvium_wal::{FormatOptions, Wal};
use bytes::Bytes;
use tokio::runtime::Runtime;
use uuid::Uuid;

const STREAMS: u64 = 10_000;
const OBJECTS: u64 = 100_000;
/// Number of streams with a range in an object; streams take turns.
const RANGES_PER_OBJECT: u64 = 10;
const RECORDS_PER_RANGE: u64 = 1000;
const CHECKPOINT_BYTES: usize = 200;
const WAL_BYTES: u64 = 64 << 20;
/// Number of objects in a delta.
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

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime")
}

/// Makes a log, and the catalog of a store that has used it.
fn make(directory: &Path) {
    let device = wal(&directory.join("wal"));
    let wal_id = Wal::inspect(&device).expect("it was formatted").header.wal_id;
    runtime().block_on(make_catalog(directory, wal_id));
}

fn chain(directory: &Path, store: Uuid) -> Chain {
    let objects = local_objects(&directory.join("objects")).expect("a directory");
    Chain::new(objects, store, Options::default().retry())
}

async fn make_catalog(directory: &Path, wal: Uuid) {
    let until = tokio::time::Instant::now() + std::time::Duration::from_secs(600);
    let fence = |_: Option<&_>| {
        Ok::<_, String>(Fence {
            wal,
            epoch: 0,
            incarnation: Uuid::from_u128(1),
            node: 1,
            written_at_ms: 0,
            term: None,
            next_stream: StreamId(0),
            own: vec![ChainChange::LargestCount(16 << 10)],
            hints: Hints::new(),
        })
    };
    let writer = ChainWriter::open(chain(directory, wal), None, until, fence).await;
    let mut writer = writer.expect("a new chain");
    let create = |id| ChainChange::CreateStream {
        id: StreamId(id),
        kind: KIND_LOG,
        label: format!(r#"{{"topic":"topic-{}","partition":{}}}"#, id / 10, id % 10).into(),
    };
    let version = writer.state().header.version + 1;
    let mut recorded = vec![Recorded { version, changes: (0..STREAMS).map(create).collect() }];
    for group in 0..OBJECTS / GROUP {
        let objects = group * GROUP..(group + 1) * GROUP;
        let version = version + 1 + group;
        writer.freeze(Delta {
            version,
            recorded: std::mem::take(&mut recorded),
            own: objects.flat_map(uploads).collect(),
            hints: Hints::new(),
            cut: LogOffset(0),
            wal_mark: 0,
            next_stream: StreamId(STREAMS),
            is_clean: false,
            written_at_ms: 0,
        });
        writer.publish(until).await.expect("a directory");
        // As a server does.
        if let Some(snapshot) = writer.due_snapshot() {
            let number = snapshot.state.head.number;
            let bytes = writer.chain().write_snapshot(snapshot).await.expect("a directory");
            writer.snapshot_written(number, bytes);
        }
    }
}

/// The changes of an object and its ranges.
fn uploads(id: u64) -> Vec<ChainChange> {
    let object = ChainObject {
        id: ObjectId(id),
        nonce: Uuid::new_v4(),
        size_bytes: 64 << 20,
        index_position: 60 << 20,
        index_bytes: 56 * 64,
        index_crc32c: id as u32,
        created_at_ms: 1_700_000_000_000,
        generation: 1,
        payload_bytes: 60 << 20,
        format: 1,
    };
    let mut changes = vec![ChainChange::AddObject(object)];
    changes.extend((0..RANGES_PER_OBJECT).map(|i| {
        let number = id * RANGES_PER_OBJECT + i;
        let start = StreamOffset(number / STREAMS * RECORDS_PER_RANGE);
        let end = StreamOffset(start.0 + RECORDS_PER_RANGE);
        ChainChange::Uploaded(Uploaded {
            stream: StreamId(number % STREAMS),
            uploaded_end: end,
            start: StreamOffset(0),
            checkpoint: Some(Bytes::from(vec![7; CHECKPOINT_BYTES])),
            range: Some(ObjectRange {
                object: ObjectId(id),
                start,
                end,
                payload_bytes: 6 << 20,
                max_timestamp_ms: 1_700_000_000_000,
            }),
        })
    }));
    changes
}

fn measure(directory: &Path) {
    let objects = local_objects(&directory.join("objects")).expect("a directory");
    let device = alluvium_device::open(&directory.join("wal"), &OpenOptions::default());
    let device = device.expect("it was made");
    let wal_id = Wal::inspect(&device).expect("it was formatted").header.wal_id;
    println!(
        "{STREAMS} streams, {OBJECTS} objects, {} ranges; a catalog of {} MiB",
        OBJECTS * RANGES_PER_OBJECT,
        bytes_in(&directory.join("objects/catalogs")) >> 20
    );
    let runtime = runtime();
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
    let state = runtime.block_on(chain(directory, wal_id).load()).expect("it is intact");
    drop(state.expect("it was made"));
    step("Chain::load");
    let opened = runtime.block_on(Store::open(
        device,
        alluvium_wal::Options {
            window_bytes: 1 << 20,
            max_record_bytes: 500 << 10,
            ..alluvium_wal::Options::default()
        },
        objects,
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

/// Returns the length of all files below a directory.
fn bytes_in(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).expect("it was made").map(|entry| {
        let entry = entry.expect("it can be read");
        let found = entry.metadata().expect("it is there");
        if found.is_dir() { bytes_in(&entry.path()) } else { found.len() }
    });
    entries.sum()
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
