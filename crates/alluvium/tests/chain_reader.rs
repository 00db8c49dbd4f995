//! Compares `tools/chain_reader.py`, which was written from `docs/format/chain.md` alone, with the
//! server's own loading of chains that it has written. Where they differ, the document or one of
//! the two is wrong.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use alluvium_device::sim::Random;
use alluvium_stream::catalog::{ObjectRange, Replaced, Uploaded};
use alluvium_stream::chain::{
    Chain, ChainChange, ChainObject, ChainState, ChainWriter, CleanUp, Delta, Fence, Hints,
    Recorded, Snapshot,
};
use alluvium_stream::{LogOffset, ObjectId, StreamEpoch, StreamId, StreamOffset, local_objects};
use bytes::Bytes;
use serde_json::{Value, json};
use support::{python_is_there, random_bytes};
use tokio::time::Instant;
use uuid::Uuid;

const STORE: Uuid = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
const RETRY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(1));

fn chain(directory: &Path) -> Chain {
    Chain::new(local_objects(directory).unwrap(), STORE, RETRY)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The state as the reader in Python reports it.
fn report(state: &ChainState) -> Value {
    let range = |it: &ObjectRange| {
        json!([it.object.0, it.start.0, it.end.0, it.payload_bytes, it.max_timestamp_ms])
    };
    let streams = state.streams.iter().map(|(id, stream)| {
        json!({
            "id": id.0, "kind": stream.kind, "label": hex(&stream.label), "epoch": stream.epoch.0,
            "start": stream.start.0, "uploaded_end": stream.uploaded_end.0,
            "checkpoint": stream.checkpoint.as_ref().map(|bytes| hex(bytes)),
            "ranges": stream.ranges.iter().map(range).collect::<Vec<_>>(),
        })
    });
    let objects = state.objects.values().map(|object| {
        json!({
            "number": object.id.0, "nonce": object.nonce.simple().to_string(),
            "size": object.size_bytes, "index_position": object.index_position,
            "index_length": object.index_bytes, "index_crc": object.index_crc32c,
            "created_at": object.created_at_ms, "generation": object.generation,
            "payload": object.payload_bytes, "format": object.format,
        })
    });
    let meta = state.meta.iter().map(|(key, value)| json!([key, hex(value)]));
    let incarnations = state.incarnations.iter();
    let incarnations = incarnations.map(|it| json!([it.after_version, it.id.simple().to_string()]));
    let gaps = state.gaps.iter().map(|((stream, start), end)| json!([stream.0, start.0, end.0]));
    let hints = state.hints.iter().map(|(stream, next)| json!([stream.0, next.0]));
    let header = &state.header;
    json!({
        "number": state.head.number, "link": state.head.link, "term": state.head.term,
        "store": header.store, "wal": header.wal, "incarnation": header.incarnation,
        "version": header.version, "epoch": header.epoch, "opening": header.opening,
        "node": header.node, "clean": header.is_clean, "written_at": header.written_at_ms,
        "covers": header.covers, "cut": header.cut.0, "wal_mark": header.wal_mark,
        "next_stream": header.next_stream.0, "reserved": state.reserved.0,
        "largest_count": state.largest_count,
        "streams": streams.collect::<Vec<_>>(), "objects": objects.collect::<Vec<_>>(),
        "meta": meta.collect::<Vec<_>>(), "incarnations": incarnations.collect::<Vec<_>>(),
        "gaps": gaps.collect::<Vec<_>>(), "hints": hints.collect::<Vec<_>>(),
    })
}

/// Writes a chain with few streams, so that changes meet.
struct Author {
    random: Random,
    writer: ChainWriter,
    next_stream: u64,
    next_object: u64,
}

fn until() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

async fn open(chain: Chain, random: &mut Random) -> ChainWriter {
    let state = chain.load().await.unwrap();
    let wal = state.as_ref().map_or(Uuid::from_u128(7), |state| state.header.wal);
    let term = state.as_ref().map_or(0, |state| state.head.term) + 1;
    let mut fence = Fence {
        wal: if random.chance(0.3) { Uuid::new_v4() } else { wal },
        epoch: random.below(5) as u32,
        incarnation: Uuid::new_v4(),
        node: 3,
        written_at_ms: 1_700_000_000_000,
        term: random.chance(0.3).then_some(term),
        next_stream: StreamId(0),
        own: Vec::new(),
        hints: Hints::new(),
    };
    for _ in 0..random.below(3) {
        let (stream, start) = (StreamId(random.below(9)), random.below(300));
        let end = StreamOffset(start + 1 + random.below(1 << 40));
        fence.own.push(ChainChange::Gap { stream, offsets: StreamOffset(start)..end });
        fence.hints.insert(stream, end);
    }
    let decide = |_: Option<&ChainState>| Ok::<_, ()>(fence.clone());
    match ChainWriter::open(chain, state, until(), decide).await {
        Ok(writer) => writer,
        Err(error) => panic!("{error:?}"),
    }
}

impl Author {
    fn stream(&mut self) -> StreamId {
        StreamId(self.random.below(self.next_stream + 2))
    }

    fn recorded(&mut self) -> ChainChange {
        let (id, epoch) = (self.stream(), StreamEpoch(self.random.below(4)));
        let key = format!("topic/\u{fc} {}", self.random.below(9));
        match self.random.below(7) {
            0 | 1 => {
                self.next_stream += 1;
                let label = Bytes::from(random_bytes(&mut self.random, 20));
                let kind = self.random.below(2) as u8;
                ChainChange::CreateStream { id: StreamId(self.next_stream), kind, label }
            }
            2 if self.random.chance(0.2) => ChainChange::DeleteStream { id, epoch },
            2 | 3 => ChainChange::OpenStream { id, epoch },
            4 => {
                let to = StreamOffset(self.random.below(300));
                ChainChange::TrimStream { id, epoch, to }
            }
            5 => {
                let length = 1 << self.random.below(12);
                ChainChange::PutMeta { key, value: random_bytes(&mut self.random, length).into() }
            }
            _ => ChainChange::DeleteMeta { key },
        }
    }

    fn own(&mut self) -> Vec<ChainChange> {
        let id = self.stream();
        match self.random.below(6) {
            0 => vec![ChainChange::ReserveStreams(StreamId(self.random.below(1 << 30)))],
            1 => vec![ChainChange::LargestCount(self.random.next_u64() as u32)],
            2 => vec![ChainChange::RemoveObject(ObjectId(self.random.below(self.next_object + 1)))],
            3 => {
                // Neighbours; or ranges that do not exist, or a new one that overlaps others.
                let streams = &self.writer.state().streams;
                let ranges = streams.get(&id).map_or(&[][..], |stream| &stream.ranges);
                let Some(first) = ranges.first() else { return Vec::new() };
                let last = ranges.get(self.random.index(3)).unwrap_or(first);
                let new = ObjectRange { start: first.start, ..last.clone() };
                let mut old = vec![first.start, last.start, StreamOffset(last.start.0 + 1)];
                old.dedup();
                vec![ChainChange::Replaced(Replaced { stream: id, old, new })]
            }
            _ => self.upload(),
        }
    }

    fn upload(&mut self) -> Vec<ChainChange> {
        self.next_object += 1;
        let random = &mut self.random;
        let mut changes = vec![ChainChange::AddObject(ChainObject {
            id: ObjectId(self.next_object),
            nonce: Uuid::new_v4(),
            size_bytes: random.below(1 << 40),
            index_position: random.below(1 << 40),
            index_bytes: random.below(1 << 20),
            index_crc32c: random.next_u64() as u32,
            created_at_ms: random.next_u64().cast_signed() >> 20,
            generation: random.below(256) as u8,
            payload_bytes: random.below(1 << 40),
            format: 1 + random.below(2) as u8,
        })];
        for _ in 0..self.random.below(4) {
            let stream = self.stream();
            let found = self.writer.state().streams.get(&stream);
            let from = found.map_or(0, |stream| stream.uploaded_end.0);
            let end = StreamOffset(from + 1 + self.random.below(40));
            let range = ObjectRange {
                object: ObjectId(self.next_object),
                // Sometimes one that overlaps the last one.
                start: StreamOffset(from.saturating_sub(self.random.below(8) / 7)),
                end,
                payload_bytes: self.random.below(1000),
                max_timestamp_ms: -(self.random.below(1000) as i64),
            };
            let checkpoint = self.random.chance(0.5);
            changes.push(ChainChange::Uploaded(Uploaded {
                stream,
                uploaded_end: end,
                start: StreamOffset(self.random.below(10) * self.random.below(10)),
                checkpoint: checkpoint.then(|| random_bytes(&mut self.random, 30).into()),
                range: self.random.chance(0.9).then_some(range),
            }));
        }
        changes
    }

    async fn publish(&mut self) {
        let then = self.writer.state().header.version;
        let mut recorded = Vec::new();
        for version in 1..=self.random.below(3) {
            let changes = (0..=self.random.below(3)).map(|_| self.recorded()).collect();
            recorded.push(Recorded { version: then + version, changes });
        }
        let delta = Delta {
            version: then + 3 + self.random.below(5),
            recorded,
            own: self.own(),
            hints: (0..self.random.below(4))
                .map(|_| (self.stream(), StreamOffset(self.random.below(1 << 40))))
                .collect(),
            cut: LogOffset(self.random.below(1 << 50)),
            wal_mark: self.random.below(1 << 50),
            next_stream: StreamId(self.next_stream + 1),
            is_clean: self.random.chance(0.2),
            written_at_ms: self.random.below(1 << 45),
        };
        self.writer.freeze(delta);
        self.writer.publish(until()).await.unwrap();
    }
}

/// Writes a chain of some openings.
async fn write(directory: &Path, seed: u64) {
    let mut random = Random::new(seed);
    let (mut next_stream, mut next_object) = (0, 0);
    for _ in 0..1 + random.below(4) {
        let writer = open(chain(directory), &mut random).await;
        let mut author = Author { random, writer, next_stream, next_object };
        for _ in 0..author.random.below(25) {
            author.publish().await;
            if author.random.chance(0.1) {
                let snapshot = Snapshot::of(author.writer.state().clone());
                chain(directory).write_snapshot(snapshot).await.unwrap();
            }
            if author.random.chance(0.05) {
                CleanUp::new(chain(directory)).run(Duration::ZERO).await.unwrap();
            }
        }
        Author { random, next_stream, next_object, .. } = author;
    }
}

/// What the reader in Python finds: the state if it can be loaded, the names of what is damaged,
/// and its exit code.
fn by_the_document(directory: &Path) -> (Value, Vec<String>, i32) {
    let reader = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/chain_reader.py");
    let output = Command::new("python3").arg(reader).arg(directory).arg("--json").output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let damage = report["damage"].as_array().unwrap().iter();
    let names = damage.map(|found| found["name"].as_str().unwrap().to_owned());
    (report["state"].clone(), names.collect(), output.status.code().unwrap())
}

/// What the server's code loads, or its error.
async fn by_the_server(directory: &Path) -> Result<Value, String> {
    let loaded = chain(directory).load().await.map_err(|error| error.to_string())?;
    Ok(report(&loaded.expect("a chain")))
}

/// The objects of the catalog.
fn files(directory: &Path) -> Vec<PathBuf> {
    let catalog = directory.join(format!("catalogs/{STORE}"));
    let parts = ["chain", "snapshots", "bodies"].into_iter();
    let files = parts.filter_map(|part| fs::read_dir(catalog.join(part)).ok()).flatten();
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort_unstable();
    files
}

#[tokio::test]
async fn both_readers_load_the_same_state() {
    if !python_is_there() {
        return;
    }
    for seed in 0..12 {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), seed).await;
        let (state, damage, code) = by_the_document(directory.path());
        assert_eq!((damage, code), (vec![], 0), "seed {seed}");
        assert_eq!(state, by_the_server(directory.path()).await.unwrap(), "seed {seed}");
    }
}

#[tokio::test]
async fn both_readers_find_the_same_damage() {
    if !python_is_there() {
        return;
    }
    let mut refused = 0;
    for seed in 100..130 {
        let mut random = Random::new(seed);
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), seed).await;
        let files = files(directory.path());
        let file = &files[random.index(files.len())];
        let mut bytes = fs::read(file).unwrap();
        match random.below(3) {
            0 => fs::remove_file(file).unwrap(),
            1 => {
                bytes.truncate(random.index(bytes.len()));
                fs::write(file, &bytes).unwrap();
            }
            _ => {
                let at = random.index(bytes.len());
                bytes[at] ^= 1 << random.below(8);
                fs::write(file, &bytes).unwrap();
            }
        }
        let (state, damage, code) = by_the_document(directory.path());
        let context = format!("seed {seed}, {}: {damage:?}", file.display());
        match by_the_server(directory.path()).await {
            Ok(loaded) => assert_eq!(state, loaded, "{context}"),
            Err(error) => {
                refused += 1;
                assert!(state.is_null() && code == 1, "{context}: {error}");
                assert!(damage.iter().any(|name| error.contains(name)), "{context}: {error}");
            }
        }
    }
    assert!(refused > 3, "{refused}");
}

/// Sets an unknown flag in the header of an object, with its checksum.
fn make_later(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    bytes[18] |= 8;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..64]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    fs::write(file, bytes).unwrap();
}

#[tokio::test]
async fn both_readers_refuse_an_object_of_a_later_version_that_they_need() {
    if !python_is_there() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut random = Random::new(1);
    let writer = open(chain(directory.path()), &mut random).await;
    let mut author = Author { random, writer, next_stream: 0, next_object: 0 };
    for _ in 0..6 {
        author.publish().await;
    }
    let snapshot = Snapshot::of(author.writer.state().clone());
    chain(directory.path()).write_snapshot(snapshot).await.unwrap();
    author.publish().await;
    let object =
        |number: u64| directory.path().join(format!("catalogs/{STORE}/chain/{number:016x}"));
    // One below the snapshot does not matter.
    make_later(&object(3));
    let (state, damage, code) = by_the_document(directory.path());
    assert_eq!((damage, code), (vec![], 0));
    assert_eq!(state, by_the_server(directory.path()).await.unwrap());
    make_later(&object(8));
    let error = by_the_server(directory.path()).await.unwrap_err();
    assert!(error.contains("not known to this version"), "{error}");
    let (state, damage, code) = by_the_document(directory.path());
    assert!(state.is_null() && damage.is_empty() && code == 2, "{damage:?} {code}");
}
