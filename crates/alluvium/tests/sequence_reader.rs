//! Compares `tools/sequence_reader.py`, which was written from `docs/format/sequence.md` alone,
//! with the server's own reading of sequences that it has written. Where they differ, the document
//! or one of the two is wrong.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use alluvium_device::sim::Random;
use alluvium_stream::local_objects;
use alluvium_stream::sequence::{Created, MAX_BODY_BYTES, Sealed, Sequence};
use serde_json::{Value, json};
use support::{python_is_there, random_bytes};
use uuid::Uuid;

const PREFIX: &str = "catalogs/a/delta";
const RETRY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(1));

/// What one of the two readers finds.
#[derive(Debug, PartialEq)]
struct Seen {
    objects: Vec<Value>,
    /// Numbers of damaged or missing objects, in order.
    damage: Vec<u64>,
    last: Value,
}

/// What the server's code finds.
async fn by_the_server(sequence: &Sequence) -> Seen {
    let listed = sequence.listed(1).await.unwrap();
    let (mut objects, mut damage) = (Vec::new(), Vec::new());
    let mut before: Option<Sealed> = None;
    for (at, number) in listed.iter().enumerate() {
        if at > 0 && listed[at - 1] + 1 != *number {
            damage.push(listed[at - 1] + 1);
        }
        let Ok(read) = sequence.get(*number).await else {
            damage.push(*number);
            before = None;
            continue;
        };
        let read = read.expect("it was listed");
        objects.push(json!({
            "number": read.number, "kind": read.kind, "flags": read.flags, "term": read.term,
            "nonce": read.nonce.simple().to_string(), "previous": read.previous,
            "body_bytes": read.body.len(),
        }));
        let follows = before.is_some_and(|before| {
            before.number + 1 == read.number && before.link() != read.previous
        });
        damage.extend(follows.then_some(read.number));
        before = Some(read);
    }
    let is_hole = |two: &[u64]| two[0] + 1 != two[1];
    assert_eq!(sequence.last(1).await.is_err(), listed.windows(2).any(is_hole));
    Seen { objects, damage, last: listed.last().map_or(Value::Null, |last| json!(last)) }
}

/// Runs the reader in Python.
fn read(directory: &Path) -> Output {
    let reader = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/sequence_reader.py");
    Command::new("python3").arg(reader).arg(directory).arg("--json").output().unwrap()
}

/// What the reader in Python finds.
fn by_the_document(directory: &Path) -> Seen {
    let output = read(directory);
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let damage: Vec<_> = report["damage"].as_array().unwrap().iter().collect();
    assert_eq!(output.status.code(), Some(i32::from(!damage.is_empty())));
    Seen {
        objects: report["objects"].as_array().unwrap().clone(),
        damage: damage.iter().map(|found| found["number"].as_u64().unwrap()).collect(),
        last: report["last"].clone(),
    }
}

/// Writes a sequence with bodies of all sizes.
async fn written(sequence: &Sequence, random: &mut Random) -> u64 {
    let last = 1 + random.below(12);
    let mut previous = 0;
    for number in 1..=last {
        let bytes = match random.below(20) {
            0 => MAX_BODY_BYTES as u64,
            _ => random.below(2_000),
        };
        let object = Sealed {
            kind: random.below(1 << 16) as u16,
            flags: random.below(1 << 16) as u16,
            term: random.below(1 << 32) as u32,
            number,
            nonce: Uuid::new_v4(),
            previous,
            body: random_bytes(random, bytes as usize).into(),
        };
        let until = tokio::time::Instant::now() + Duration::from_secs(60);
        assert_eq!(sequence.create(&object, until).await.unwrap(), Created::Won);
        previous = object.link();
    }
    last
}

/// Changes one object.
fn damage(directory: &Path, last: u64, random: &mut Random) {
    let path = |number: u64| directory.join(format!("{number:016x}"));
    let (one, other) = (path(1 + random.below(last)), path(1 + random.below(last)));
    let Ok(mut bytes) = fs::read(&one) else { return };
    match random.below(5) {
        0 => return fs::remove_file(one).unwrap(),
        // One object at the number of another one.
        1 if other != one => return drop(fs::copy(one, other)),
        2 => bytes.truncate(random.below(bytes.len() as u64) as usize),
        3 => bytes.push(0),
        _ => {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
    }
    fs::write(one, bytes).unwrap();
}

#[tokio::test]
async fn the_second_reader_finds_the_same_objects_and_the_same_damage() {
    if !python_is_there() {
        return;
    }
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let directory = tempfile::tempdir().unwrap();
        let objects = local_objects(directory.path()).unwrap();
        let sequence = Sequence::new(objects, PREFIX.into(), RETRY);
        let path = directory.path().join(PREFIX);
        let last = written(&sequence, &mut random).await;
        let seen = by_the_server(&sequence).await;
        assert_eq!((seen.objects.len() as u64, seen.damage.len()), (last, 0));
        assert_eq!(by_the_document(&path), seen, "seed {seed}");
        for _ in 0..=random.below(3) {
            damage(&path, last, &mut random);
        }
        assert_eq!(by_the_document(&path), by_the_server(&sequence).await, "seed {seed}, damaged");
    }
}

#[tokio::test]
async fn both_readers_end_at_an_object_of_a_later_version() {
    if !python_is_there() {
        return;
    }
    let mut random = Random::new(1);
    let directory = tempfile::tempdir().unwrap();
    let objects = local_objects(directory.path()).unwrap();
    let sequence = Sequence::new(objects, PREFIX.into(), RETRY);
    let last = written(&sequence, &mut random).await;
    let path = directory.path().join(PREFIX).join(format!("{last:016x}"));
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 2;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..64]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes.extend([0; 100]);
    fs::write(&path, bytes).unwrap();
    let error = sequence.get(last).await.unwrap_err();
    assert!(!error.is_loss() && error.to_string().contains("version 2"), "{error}");
    let output = read(path.parent().unwrap());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("version 2"), "{said}");
}
