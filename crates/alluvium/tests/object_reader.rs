//! Compares `tools/object_reader.py`, which was written from `docs/format/object.md` alone, with
//! the server's own reading of objects that it has written. Where they differ, the document or one
//! of the two is wrong.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use alluvium_device::sim::{Random, SimDisk, SimOptions, Stepper};
use alluvium_stream::object::{Block, DecodeError, DirectoryRow, Origin, Whole};
use alluvium_stream::{
    Batch, Change, KIND_LOG, NewBatch, Options, Store, StoredObject, StreamId, StreamOffset,
    local_objects,
};
use alluvium_wal::{FormatOptions, Wal};
use serde_json::{Value, json};
use support::{python_is_there, random_bytes};

const WAL_BYTES: u64 = 32 << 20;

/// Writes objects with this many streams into a directory, and returns their paths.
async fn written(directory: &Path, streams: u32, random: &mut Random) -> Vec<PathBuf> {
    let disk = SimDisk::new(SimOptions { capacity_bytes: WAL_BYTES, ..SimOptions::default() });
    Wal::format(&disk.device(), &FormatOptions::default()).unwrap();
    let stepper = Stepper::start(disk.clone());
    let (objects, options) = (local_objects(directory).unwrap(), options());
    let wal_options = alluvium_wal::Options {
        window_bytes: 4 << 20,
        max_record_bytes: 1 << 20,
        ..alluvium_wal::Options::default()
    };
    let fold = Arc::new(());
    let opened = Store::open(disk.device(), wal_options, objects, fold, options, None);
    let store = opened.await.unwrap().store;
    let ids = store.new_stream_ids(streams).await.unwrap();
    let create = |id: &StreamId| {
        let label = format!("a label \u{fc} {id}").into();
        Change::CreateStream { id: *id, kind: KIND_LOG, label }
    };
    store.commit(ids.iter().map(create).collect()).await.unwrap();
    for _ in 0..2 {
        for id in &ids {
            let epoch = store.stream(*id).unwrap().newest_epoch();
            let stream = store.open_stream(*id, epoch).await.unwrap();
            let mut base = stream.next_offset();
            for _ in 0..1 + random.below(3) {
                let len_bytes = match random.below(30) {
                    0 if streams < 20 => 600_000 + random.below(400_000),
                    _ => random.below(300),
                };
                let payload = random_bytes(random, len_bytes as usize).into();
                let count = 1 + random.below(5) as u32;
                let max_timestamp_ms = random.below(1000).cast_signed() - 1;
                let batch = NewBatch { base, count, max_timestamp_ms, payload };
                base = StreamOffset(base.0 + u64::from(count));
                stream.append(batch).unwrap().await.unwrap();
            }
        }
        store.flush().await.unwrap();
    }
    store.close().await.unwrap();
    drop(stepper);
    let stores = fs::read_dir(directory.join("streams")).unwrap();
    let files = stores.flat_map(|store| fs::read_dir(store.unwrap().path()).unwrap());
    files.map(|file| file.unwrap().path()).collect()
}

fn options() -> Options {
    Options {
        cache_bytes: WAL_BYTES,
        upload_bytes: WAL_BYTES / 4,
        block_cache_bytes: 1 << 20,
        compaction_bytes: 0,
        ..Options::default()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What one of the two readers finds.
#[derive(Debug, PartialEq)]
struct Seen {
    object: Value,
    /// Where there is damage.
    damage: Vec<u64>,
}

/// What the server's code finds.
fn by_the_server(path: &Path) -> Seen {
    let whole = match Whole::open(fs::read(path).unwrap().into()) {
        Ok(whole) => whole,
        Err(DecodeError::Damaged(damage)) => {
            return Seen { object: Value::Null, damage: vec![damage.position] };
        }
        Err(DecodeError::LaterVersion(reason)) => panic!("{reason}"),
    };
    let mut damage = Vec::new();
    let mut block = |block: &Block| {
        let batches = match whole.batches(block) {
            Ok(batches) => {
                let batch = |batch: &Batch| {
                    let crc = crc32c::crc32c(&batch.payload);
                    json!([batch.base.0, batch.count, batch.max_timestamp_ms, crc])
                };
                json!(batches.iter().map(batch).collect::<Vec<_>>())
            }
            Err(found) => {
                damage.push(found.position);
                Value::Null
            }
        };
        json!({
            "stream": block.stream, "start": block.start, "end": block.end,
            "position": block.position, "length": block.len_bytes, "entries": block.entries,
            "max_timestamp": block.max_timestamp_ms, "crc": block.crc32c, "batches": batches,
        })
    };
    let blocks: Vec<_> = whole.blocks.iter().map(&mut block).collect();
    let row = |row: &DirectoryRow| {
        json!({
            "stream": row.stream, "kind": row.kind,
            "label": row.label.as_ref().map(|label| hex(label)), "start": row.start,
            "end": row.end, "payload": row.payload_bytes,
            "max_timestamp": row.max_timestamp_ms, "blocks": row.blocks,
        })
    };
    let origin = |origin: &Origin| {
        json!({
            "store": origin.store, "incarnation": origin.incarnation, "opening": origin.opening,
            "term": origin.term, "generation": origin.generation,
            "created_at": origin.created_at_ms, "cut": origin.cut.0,
        })
    };
    let object = json!({
        "version": whole.format, "nonce": whole.nonce.simple().to_string(),
        "origin": whole.origin.as_ref().map(origin),
        "rows": whole.rows.iter().map(row).collect::<Vec<_>>(), "blocks": blocks,
    });
    Seen { object, damage }
}

/// Runs the reader in Python.
fn read(path: &Path) -> Output {
    let reader = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/object_reader.py");
    Command::new("python3").arg(reader).arg(path).arg("--json").output().unwrap()
}

/// What the reader in Python finds.
fn by_the_document(path: &Path) -> Seen {
    let output = read(path);
    let mut object: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let damage = object.as_object_mut().unwrap().remove("damage").unwrap();
    let damage: Vec<_> = damage.as_array().unwrap().iter().collect();
    assert_eq!(output.status.code(), Some(i32::from(!damage.is_empty())));
    if object["version"].is_null() {
        object = Value::Null;
    }
    let position = |found: &&Value| found["position"].as_u64().unwrap();
    Seen { object, damage: damage.iter().map(position).collect() }
}

/// Changes an object. Positions of damage may differ where a part cannot be found.
fn damage(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    // Half of the damage is behind the blocks.
    let from = match random.below(2) {
        0 => 0,
        _ => bytes.len() - bytes.len().min(800),
    };
    let at = from + random.index(bytes.len() - from);
    match random.below(8) {
        0 => bytes.truncate(at),
        1 => bytes.push(0),
        2 => bytes[at..].rotate_left(1),
        _ => bytes[at] ^= 1 << random.below(8),
    }
    bytes
}

/// Compares both readers on an object, intact and damaged.
fn compare(path: &Path, rounds: u32, random: &mut Random) {
    let bytes = fs::read(path).unwrap();
    let seen = by_the_server(path);
    assert_eq!(seen.damage, Vec::<u64>::new());
    assert!(by_the_document(path) == seen, "{path:?} differs");
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join(path.file_name().unwrap());
    for round in 0..rounds {
        let damaged = damage(&bytes, random);
        fs::write(&copy, &damaged).unwrap();
        let (server, document) = (by_the_server(&copy), by_the_document(&copy));
        let unchanged = damaged == bytes;
        assert_eq!(document.damage.is_empty(), unchanged, "round {round}: {document:?}");
        assert_eq!(server.damage, document.damage, "round {round}");
        assert!(server.object == document.object, "round {round}");
    }
}

#[tokio::test]
async fn the_second_reader_finds_the_same_content_and_the_same_damage() {
    if !python_is_there() {
        return;
    }
    let mut random = Random::new(1);
    // Some blocks of one stream; an index of one page; of several.
    for streams in [1, 5, 60, 250] {
        let directory = tempfile::tempdir().unwrap();
        let paths = written(directory.path(), streams, &mut random).await;
        assert!(paths.len() >= 2);
        for path in &paths {
            compare(path, 8, &mut random);
        }
        let store = local_objects(directory.path()).unwrap();
        let name = paths[0].strip_prefix(directory.path()).unwrap().to_str().unwrap();
        let object = StoredObject::open(store, &name.into()).await.unwrap();
        assert_eq!(object.directory.rows.len(), streams as usize);
    }
}

#[test]
fn the_second_reader_reads_version_1() {
    if !python_is_there() {
        return;
    }
    let mut random = Random::new(2);
    let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("../stream/tests/data");
    compare(&stored.join("object-v1.bin"), 30, &mut random);
    compare(&stored.join("object-v2.bin"), 30, &mut random);
}

#[test]
fn both_readers_refuse_an_object_of_a_later_version() {
    if !python_is_there() {
        return;
    }
    let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("../stream/tests/data/object-v2.bin");
    let mut bytes = fs::read(stored).unwrap();
    bytes[8] = 3;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..32]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("object");
    fs::write(&path, &bytes).unwrap();
    let error = Whole::open(bytes.into()).unwrap_err();
    assert!(error.to_string().contains("version 3"), "{error}");
    let output = read(&path);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("version 3"), "{said}");
}
