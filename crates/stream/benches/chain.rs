//! Time to load a chain with many streams and objects from a local directory, and to write its
//! snapshot: `cargo bench -p alluvium-stream --bench chain`. Results:
//! `docs/benchmarks/recovery.md`.
#![allow(missing_docs)]

use std::time::{Duration, Instant};

use alluvium_stream::catalog::{ObjectRange, Uploaded};
use alluvium_stream::chain::{
    Chain, ChainChange, ChainObject, ChainState, ChainWriter, Delta, Fence, Hints, Recorded,
    Snapshot,
};
use alluvium_stream::{KIND_LOG, LogOffset, ObjectId, StreamId, StreamOffset, local_objects};
use bytes::Bytes;
use uuid::Uuid;

const STREAMS: u64 = 10_000;
const OBJECTS: u64 = 100_000;
/// Number of streams with a range in an object; streams take turns.
const RANGES_PER_OBJECT: u64 = 10;
const RECORDS_PER_RANGE: u64 = 1000;
const CHECKPOINT_BYTES: usize = 200;
/// Number of objects in one delta.
const GROUP: u64 = 10_000;
const ROUNDS: usize = 5;
const RETRY: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

fn main() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(run());
}

async fn run() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let store = local_objects(directory.path()).expect("a directory for objects");
    let chain = Chain::new(store, Uuid::from_u128(1), RETRY);
    let until = tokio::time::Instant::now() + Duration::from_secs(600);
    let decide = |_: Option<&ChainState>| {
        Ok::<_, String>(Fence {
            wal: Uuid::from_u128(2),
            epoch: 1,
            incarnation: Uuid::new_v4(),
            node: 0,
            written_at_ms: 0,
            term: None,
            next_stream: StreamId(0),
            own: Vec::new(),
            hints: Hints::new(),
        })
    };
    let mut writer =
        ChainWriter::open(chain.clone(), None, until, decide).await.expect("a new chain");
    let create =
        |id| ChainChange::CreateStream { id: StreamId(id), kind: KIND_LOG, label: label(id) };
    let mut recorded = (0..STREAMS).map(create).collect::<Vec<_>>();
    for first in (0..OBJECTS).step_by(GROUP as usize) {
        let version = writer.state().header.version;
        let changes = std::mem::take(&mut recorded);
        let lists = if changes.is_empty() {
            vec![]
        } else {
            vec![Recorded { version: version + 1, changes }]
        };
        writer.freeze(delta(version + 2, lists, (first..first + GROUP).flat_map(upload).collect()));
        writer.publish(until).await.expect("a delta");
    }
    let ranges: usize = writer.state().streams.values().map(|stream| stream.ranges.len()).sum();
    println!("{STREAMS} streams, {OBJECTS} objects, {ranges} ranges");
    load(&chain, "from deltas of 10,000 objects each").await;
    let began = Instant::now();
    let snapshot = Snapshot::of(writer.state().clone());
    let copied = began.elapsed();
    let bytes = chain.write_snapshot(snapshot).await.expect("a snapshot");
    println!(
        "snapshot: {:.1} MB, copied in {:.3} s, encoded and written (with a sync) in {:.3} s",
        bytes as f64 / 1e6,
        copied.as_secs_f64(),
        (began.elapsed() - copied).as_secs_f64()
    );
    load(&chain, "from a snapshot").await;
}

/// Loads the chain and prints the median.
async fn load(chain: &Chain, what: &str) {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let loaded = chain.load().await.expect("an intact chain").expect("a chain");
        times.push(began.elapsed());
        drop(loaded);
    }
    times.sort_unstable();
    println!("load {what}: median of {ROUNDS}: {:.3} s", times[ROUNDS / 2].as_secs_f64());
}

fn label(id: u64) -> Bytes {
    format!("topic-{}/{}", id / 10, id % 10).into()
}

fn upload(id: u64) -> Vec<ChainChange> {
    let mut changes = vec![ChainChange::AddObject(ChainObject {
        id: ObjectId(id),
        nonce: Uuid::new_v4(),
        size_bytes: 64 << 20,
        index_position: 60 << 20,
        index_bytes: 56 * 64,
        index_crc32c: 1,
        created_at_ms: 1_760_000_000_000,
        generation: 0,
        payload_bytes: 60 << 20,
        format: 1,
    })];
    changes.extend((0..RANGES_PER_OBJECT).map(|at| {
        let number = id * RANGES_PER_OBJECT + at;
        let (stream, turn) = (number % STREAMS, number / STREAMS);
        let (start, end) = (turn * RECORDS_PER_RANGE, (turn + 1) * RECORDS_PER_RANGE);
        ChainChange::Uploaded(Uploaded {
            stream: StreamId(stream),
            uploaded_end: StreamOffset(end),
            start: StreamOffset(0),
            checkpoint: Some(vec![stream as u8; CHECKPOINT_BYTES].into()),
            range: Some(ObjectRange {
                object: ObjectId(id),
                start: StreamOffset(start),
                end: StreamOffset(end),
                payload_bytes: 1 << 20,
                max_timestamp_ms: 1_760_000_000_000 + id as i64,
            }),
        })
    }));
    changes
}

fn delta(version: u64, recorded: Vec<Recorded>, own: Vec<ChainChange>) -> Delta {
    Delta {
        version,
        recorded,
        own,
        hints: Hints::new(),
        cut: LogOffset(0),
        wal_mark: 0,
        next_stream: StreamId(STREAMS),
        is_clean: false,
        written_at_ms: 0,
    }
}
