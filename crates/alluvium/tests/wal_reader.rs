//! Compares `tools/wal_reader.py`, which was written from `docs/format/wal.md` alone, with
//! `alluvium wal dump`, on logs that the real write-ahead log has written. Where they differ, the
//! document or one of the two is wrong.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use alluvium_device::sim::Random;
use alluvium_device::{OpenOptions, SharedDevice};
use alluvium_wal::{Append, AppendError, FormatOptions, LogOffset, Options, Wal};
use serde_json::Value;
use support::log::append_at_once;
use support::{python_is_there, random_bytes};

const KIB: usize = 1 << 10;
const CAPACITY: u64 = 4 << 20;
/// `docs/format/wal.md`, section 2.
const DATA_START: usize = 64 * KIB;
const SLOTS: [usize; 2] = [0, 32 * KIB];

fn reader() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/wal_reader.py")
}

struct Log {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

/// A position, and the fields that are compared between the two readers.
type Line = Vec<Value>;

#[derive(Debug, PartialEq)]
struct Seen {
    records: Vec<Line>,
    damage: Vec<Line>,
    end: Line,
}

impl Log {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("wal");
        let log = Self { _directory: directory, path };
        Wal::format(&log.device(), &FormatOptions::default()).expect("a new file can be formatted");
        log
    }

    fn device(&self) -> SharedDevice {
        let options = OpenOptions { create_bytes: Some(CAPACITY), ..OpenOptions::default() };
        alluvium_device::open(&self.path, &options).expect("no other process has it open")
    }

    /// Opened by the next writer, with a new epoch.
    fn open(&self) -> Wal {
        let options =
            Options { window_bytes: 1 << 20, max_record_bytes: 500 << 10, ..Options::default() };
        Wal::open(self.device(), &options, None, &mut |_| Ok(())).expect("the log can be opened").0
    }

    fn resize(&self, capacity_bytes: u64) {
        let mut bytes = self.bytes();
        bytes.resize(bytes.len().max(usize::try_from(capacity_bytes).unwrap()), 0);
        fs::write(&self.path, bytes).unwrap();
        Wal::resize(&self.device(), capacity_bytes, None).expect("the live bytes fit");
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }

    /// Changes the bytes on the device.
    fn change(&self, change: impl FnOnce(&mut [u8])) {
        let mut bytes = self.bytes();
        change(&mut bytes);
        fs::write(&self.path, bytes).unwrap();
    }

    fn dump(&self) -> Output {
        support::run(&["wal", "dump", self.path.to_str().unwrap(), "--json"])
    }

    fn read(&self, arguments: &[&str]) -> Output {
        let output = Command::new("python3").arg(reader()).arg(&self.path).args(arguments).output();
        output.expect("python3 starts")
    }

    /// Asserts that both readers agree; returns what they found.
    #[track_caller]
    fn agreed(&self) -> Seen {
        let ours = self.dump();
        let lines = lines(&ours);
        let records = fields(&lines, "record", &["offset", "end_offset", "epoch", "payload_bytes"]);
        let scan = &lines.last().expect("a dump ends with the scan")["scan"];
        let wanted = Seen {
            records,
            damage: scan["damage"]
                .as_array()
                .expect("a complete scan")
                .iter()
                .map(|place| pick(place, &["start_offset", "end_offset", "device_at"]))
                .collect(),
            end: pick(scan, &["end_offset", "clean_shutdown", "dropped_records"]),
        };

        let output = self.read(&["--json"]);
        let lines = self::lines(&output);
        let seen = Seen {
            records: fields(&lines, "record", &["offset", "end_offset", "epoch", "payload_bytes"]),
            damage: fields(&lines, "damage", &["start_offset", "end_offset", "device_at"]),
            end: fields(&lines, "end", &["end_offset", "clean_shutdown", "dropped_records"])
                .pop()
                .expect("the scan has an end"),
        };
        assert_eq!(seen, wanted, "left: the reader in Python; right: `wal dump`");
        assert_eq!(output.status.code(), ours.status.code(), "{}", support::stderr(&output));
        seen
    }
}

#[track_caller]
fn lines(output: &Output) -> Vec<Value> {
    let text = std::str::from_utf8(&output.stdout).expect("the output is text");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect();
    assert!(!lines.is_empty(), "{}", support::stderr(output));
    lines
}

fn pick(value: &Value, names: &[&str]) -> Line {
    names
        .iter()
        .map(|name| value.get(name).unwrap_or_else(|| panic!("no {name} in {value}")).clone())
        .collect()
}

fn fields(lines: &[Value], kind: &str, names: &[&str]) -> Vec<Line> {
    lines.iter().filter_map(|line| line.get(kind)).map(|value| pick(value, names)).collect()
}

fn append_one(wal: &Wal, payload: &[u8]) -> Append {
    loop {
        match wal.append(&[payload]) {
            Ok(append) => return append,
            // The window grows with the load.
            Err(AppendError::WindowFull { .. }) => wal.wait_space().wait(),
            Err(other) => panic!("{other}"),
        }
    }
}

/// Appends records of these sizes, `together` at a time: single records are cut blocks, groups are
/// padded ones.
fn append(wal: &Wal, sizes: &[usize], together: usize) -> Vec<(u64, u64)> {
    let mut random = Random::new(sizes.len() as u64);
    let mut places = Vec::new();
    for group in sizes.chunks(together) {
        let mut appends = Vec::new();
        for size in group {
            appends.push(append_one(wal, &random_bytes(&mut random, *size)));
        }
        for append in appends {
            places.push((append.offset().0, append.end().0));
            append.wait().expect("the device works");
        }
    }
    places
}

/// From one byte to more than one block of 256 KiB, and around the sizes of page and record header.
const SIZES: [usize; 16] =
    [1, 2, 31, 32, 33, 100, 1000, 4031, 4032, 4063, 4064, 4065, 8192, 65_536, 262_144, 400_000];

#[test]
fn readers_agree_on_records_of_every_size() {
    if !python_is_there() {
        return;
    }
    for together in [1, 5, 16] {
        let log = Log::new();
        let wal = log.open();
        append(&wal, &SIZES, together);
        let end = wal.appended().0;
        wal.close().unwrap();
        let seen = log.agreed();
        assert_eq!(seen.records.len(), SIZES.len());
        // The rest of the last page may be padding.
        assert!(seen.end[0].as_u64().unwrap() >= end);
        assert_eq!(seen.end[1], true);
    }
}

#[test]
fn readers_agree_on_an_unclosed_log() {
    if !python_is_there() {
        return;
    }
    for together in [1, 4] {
        let log = Log::new();
        let wal = log.open();
        let places = append(&wal, &SIZES, together);
        wal.trim_and_mark(..LogOffset(places[3].0), 1 << 40).wait().unwrap();
        drop(wal);
        let seen = log.agreed();
        assert_eq!(seen.records.len(), SIZES.len() - 3);
        assert_eq!(seen.end[1], false);
    }
}

/// Writes several laps of the ring, with the live records across its end.
fn lap(log: &Log, records: usize) -> Wal {
    let wal = log.open();
    let mut random = Random::new(1);
    let sizes: Vec<usize> = (0..records).map(|_| 1 + random.index(60_000)).collect();
    for group in sizes.chunks(40) {
        let places = append(&wal, group, 7);
        wal.trim(..LogOffset(places[group.len() / 2].0)).wait().unwrap();
    }
    wal
}

#[test]
fn readers_agree_on_laps_across_the_rings_end() {
    if !python_is_there() {
        return;
    }
    let log = Log::new();
    let ring = CAPACITY - DATA_START as u64;
    let wal = lap(&log, 400);
    let mut over_the_end = 0;
    for _ in 0..10 {
        let places = append(&wal, &[90_000; 4], 2);
        let seen = log.agreed();
        let first = seen.records[0][0].as_u64().unwrap();
        over_the_end += u64::from(first / ring < places[3].1 / ring);
        wal.trim(..LogOffset(places[0].0)).wait().unwrap();
    }
    assert!(over_the_end > 0, "the live records crossed the ring's end once");
    wal.close().unwrap();
    log.agreed();
}

#[test]
fn readers_agree_on_a_resized_log() {
    if !python_is_there() {
        return;
    }
    for capacity in [CAPACITY + (1 << 20) + 4096, CAPACITY - (1 << 20), CAPACITY * 2] {
        let log = Log::new();
        lap(&log, 222).close().unwrap();
        let before = log.agreed();
        log.resize(capacity);
        let resized = log.agreed();
        assert_eq!(resized.records, before.records);
        lap(&log, 200).close().unwrap();
        log.agreed();
    }
}

#[test]
fn records_dropped_by_recovery_stay_dropped() {
    if !python_is_there() {
        return;
    }
    let log = Log::new();
    append(&log.open(), &[700; 4], 1);
    let places = append_at_once(&log.path, &[&[5; 1000][..]; 9]);
    let hole = DATA_START + usize::try_from(places[4].start).unwrap();
    log.change(|bytes| bytes[hole..][..500].fill(0));
    let seen = log.agreed();
    assert_eq!((seen.records.len(), seen.damage.len()), (8, 0));
    assert_eq!(seen.end[2], 4);
    // The next writer fills the gap exactly up to the old records.
    let wal = log.open();
    append(&wal, &[1000], 1);
    assert_eq!(wal.appended().0, places[4].end);
    drop(wal);
    let seen = log.agreed();
    assert_eq!((seen.records.len(), seen.damage.len()), (9, 0));
    assert_eq!(seen.end[0], places[4].end);
}

/// Damages bytes from `at` on: a flipped bit, zeros, or what a device that lost whole pages leaves.
fn damage(random: &mut Random, bytes: &mut [u8], at: usize) {
    match random.index(3) {
        0 => bytes[at] ^= 1 << random.index(8),
        1 => {
            let end = bytes.len().min(at + 1 + random.index(9000));
            bytes[at..end].fill(0);
        }
        _ => {
            let page = at - at % 4096;
            let end = bytes.len().min(page + 4096 * (1 + random.index(20)));
            bytes[page..end].fill(0);
        }
    }
}

/// Writes a log.
type Fill = fn(&Log);

#[test]
fn readers_agree_on_damage_anywhere() {
    if !python_is_there() {
        return;
    }
    fn one_by_one(log: &Log, closed: bool) {
        for sizes in [[1500; 60], [200; 60]] {
            let wal = log.open();
            append(&wal, &sizes, 1);
            if closed {
                wal.close().unwrap();
            }
        }
    }
    let fill: [(&str, Fill); 3] = [
        ("closed", |log| one_by_one(log, true)),
        ("not closed", |log| one_by_one(log, false)),
        ("at once", |log| {
            append(&log.open(), &[1500; 20], 1);
            append_at_once(&log.path, &[&[3; 700][..]; 20]);
        }),
    ];
    for (name, fill) in fill {
        let log = Log::new();
        fill(&log);
        let whole = log.agreed();
        let bytes = log.bytes();
        let mut random = Random::new(name.len() as u64);
        let (mut damaged, mut shorter) = (0, 0);
        for _ in 0..10 {
            log.change(|now| {
                now.copy_from_slice(&bytes);
                for _ in 0..=random.index(3) {
                    let record = &whole.records[random.index(whole.records.len())];
                    let offset = usize::try_from(record[0].as_u64().unwrap()).unwrap();
                    let at = DATA_START + offset + random.index(40);
                    damage(&mut random, now, at);
                }
            });
            let seen = log.agreed();
            damaged += u32::from(!seen.damage.is_empty());
            shorter += u32::from(seen.end != whole.end);
        }
        assert!(damaged > 0, "{name}");
        match name {
            "closed" => assert_eq!(shorter, 0, "its header covers every record"),
            "at once" => assert!(shorter > 0, "nothing proves that records in flight were durable"),
            _ => {}
        }
    }
}

/// Changes the page of a header slot.
type Change = fn(&mut [u8]);

/// Byte 8 is in the version, byte 12 in the flags, byte 16 in the WAL ID, byte 32 in the
/// generation.
fn change_slot(page: &mut [u8], at: usize) {
    page[at] ^= 0x10;
    let crc = crc32c::crc32c(&page[..124]);
    page[124..128].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn readers_agree_on_every_pair_of_header_slots() {
    if !python_is_there() {
        return;
    }
    let log = Log::new();
    let wal = log.open();
    append(&wal, &[10, 20], 1);
    wal.close().unwrap();
    let bytes = log.bytes();
    let kinds: [(&str, Change); 8] = [
        ("valid", |_| ()),
        ("rotten", |page| page[60] ^= 1),
        ("empty", |page| page.fill(0)),
        ("other data", |page| page.fill(0x55)),
        ("another version", |page| change_slot(page, 8)),
        ("unknown flags", |page| change_slot(page, 12)),
        ("another WAL", |page| change_slot(page, 16)),
        ("impossible capacity", |page| change_slot(page, 40)),
    ];
    let mut accepted = 0;
    for (first, change_first) in kinds {
        for (second, change_second) in kinds {
            log.change(|now| {
                now.copy_from_slice(&bytes);
                for (slot, change) in [(0, change_first), (1, change_second)] {
                    change(&mut now[SLOTS[slot]..][..4096]);
                }
            });
            let ours = support::run(&["wal", "verify", log.path.to_str().unwrap(), "--json"]);
            let theirs = log.read(&["--json"]);
            assert_eq!(theirs.status.code(), ours.status.code(), "{first}, {second}");
            if ours.stdout.is_empty() {
                assert!(theirs.stdout.is_empty(), "{first}, {second}");
                continue;
            }
            accepted += 1;
            let ours: Value = serde_json::from_slice(&ours.stdout).unwrap();
            assert_eq!(lines(&theirs)[0]["header"], ours["header"], "{first}, {second}");
        }
    }
    // One slot valid and the other one valid, damaged, empty, other data or impossible; or both of
    // another WAL.
    assert_eq!(accepted, 9 + 1 + 8);
}

#[test]
fn a_truncated_device_is_refused() {
    if !python_is_there() {
        return;
    }
    let log = Log::new();
    fs::OpenOptions::new().write(true).open(&log.path).unwrap().set_len(CAPACITY / 2).unwrap();
    let output = log.read(&[]);
    assert_eq!(output.status.code(), Some(2));
    support::contains(&support::stderr(&output), &["4194304", "2097152"]);
}

#[test]
fn the_default_output_is_a_table() {
    if !python_is_there() {
        return;
    }
    let log = Log::new();
    let wal = log.open();
    append(&wal, &[700, 800], 1);
    wal.close().unwrap();
    let text = String::from_utf8(log.read(&[]).stdout).unwrap();
    support::contains(
        &text,
        &["slot 0: valid", "epoch", "PAYLOAD B", "700  ok", "800  ok", "the log ends at"],
    );
}
