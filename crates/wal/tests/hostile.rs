//! Forged images with valid checksums: any bytes are opened or refused with an error, without a
//! panic.

mod common;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_wal::{LogOffset, Options, Wal};
use common::*;
use proptest::prelude::*;

const SLOTS: [u64; 2] = [0, 32 * 1024];
/// The header's eight-byte integers, by position: generation, capacity, trim, window, epoch start,
/// durable.
const FIELDS: [usize; 6] = [32, 40, 48, 56, 72, 80];
const RING: u64 = 128 * 1024;

fn options() -> Options {
    Options {
        window_bytes: 32 * 1024,
        block_bytes: 8192,
        max_record_bytes: 8000,
        ..common::options()
    }
}

/// A log on its second lap, trimmed inside a page, and opened twice.
fn image(clean: bool) -> Vec<u8> {
    let disk = disk(RING);
    format(&disk);
    let mut alive = VecDeque::new();
    for _ in 0..2 {
        let (wal, ..) = try_open(disk.device(), &options()).unwrap();
        for name in 0..60 {
            let append = wal.append(&[&vec![name; 1500]]).unwrap();
            alive.push_back(append.offset());
            append.wait().unwrap();
            if alive.len() > 30 {
                wal.trim(..alive.pop_front().unwrap()).wait().unwrap();
            }
        }
        if clean {
            wal.close().unwrap();
        }
    }
    disk.image()
}

/// Sets fields of a slot and corrects its checksum.
fn forge(image: &mut [u8], slot: usize, fields: &[(usize, u64)]) {
    let page = &mut image[SLOTS[slot] as usize..][..PAGE as usize];
    for &(at, value) in fields {
        page[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    let crc = crc32c::crc32c(&page[..124]);
    page[124..128].copy_from_slice(&crc.to_le_bytes());
}

/// Writes a record header at logical offset `at`, with a payload checksum of 0.
fn forge_record(image: &mut [u8], magic: &[u8; 4], at: u64, len: u32, epoch: u32, lag: u32) {
    let mut header = Vec::from(magic);
    header.extend(len.to_le_bytes());
    header.extend(at.to_le_bytes());
    header.extend(epoch.to_le_bytes());
    header.extend(lag.to_le_bytes());
    header.extend([0; 4]);
    let crc = crc32c::crc32c_append(crc32c::crc32c(&image[16..32]), &header);
    header.extend(crc.to_le_bytes());
    for (index, byte) in header.into_iter().enumerate() {
        image[(DATA_START + (at + index as u64) % RING) as usize] = byte;
    }
}

/// Calls everything that takes an image; one that opens must also work.
fn use_it(image: &[u8]) -> Result<(), TestCaseError> {
    let used = catch_unwind(AssertUnwindSafe(|| {
        let disk = SimDisk::from_image(image, SimOptions::default());
        let _ = Wal::inspect(&disk.device());
        let _ = Wal::scan(&disk.device(), None, &mut |_| Ok(()));
        let Ok((wal, report, _)) = try_open(disk.device(), &options()) else { return };
        assert_eq!(wal.appended(), report.end);
        wal.trim(..wal.durable()).wait().unwrap();
        for name in 0..20 {
            let record = wal.append(&[&vec![name; 5000]]).unwrap();
            let end = record.end();
            record.wait().unwrap();
            wal.trim(..end).wait().unwrap();
        }
        wal.append(&[b"last"]).unwrap().wait().unwrap();
        wal.close().unwrap();
        let (wal, report, records) = try_open(disk.device(), &options()).unwrap();
        assert_eq!(
            (&records[0].payload[..], records.len(), report.damage.len()),
            (&b"last"[..], 1, 0)
        );
        drop(wal);
        format(&disk);
    }));
    prop_assert!(used.is_ok());
    Ok(())
}

const EDGES: [u64; 10] =
    [0, 1, PAGE, RING / 2, RING, RING + DATA_START, 1 << 32, 1 << 62, 1 << 63, u64::MAX];

/// Numbers at which arithmetic overflows.
fn edge() -> impl Strategy<Value = u64> {
    let base = prop_oneof![proptest::sample::select(&EDGES[..]), any::<u64>()];
    (base, -2i64..=2, prop_oneof![Just(1), Just(PAGE as i64)])
        .prop_map(|(base, steps, step)| base.wrapping_add_signed(steps * step))
}

#[test]
fn offsets_near_the_end_of_their_type_are_refused() {
    for clean in [true, false] {
        for slot in [0, 1] {
            for at in [0, 1, PAGE, RING].map(|below| u64::MAX - below) {
                let mut image = image(clean);
                forge(&mut image, slot, &[(48, at), (80, at)]);
                use_it(&image).unwrap();
                forge(&mut image, slot, &[(32, at)]);
                use_it(&image).unwrap();
            }
        }
    }
}

/// A trim offset inside a page, and a durable offset behind that page's next lap: the log would
/// overlap its own start.
#[test]
fn a_log_longer_than_its_ring_allows_is_refused() {
    let mut image = image(false);
    forge(&mut image, 0, &[(48, 100), (80, 100 + RING), (72, 0)]);
    forge(&mut image, 1, &[(48, 100), (80, 100 + RING), (72, 0)]);
    use_it(&image).unwrap();
    let disk = SimDisk::from_image(&image, SimOptions::default());
    assert!(Wal::inspect(&disk.device()).is_err(), "both slots contradict themselves");
}

/// The search beyond a damaged record continues after it, even if that is behind the window: the
/// content of its payload is not taken for records.
#[test]
fn no_record_is_found_inside_one_longer_than_the_window() {
    let mut image = image(false);
    let scan_of = |image: &[u8]| scan(&SimDisk::from_image(image, SimOptions::default())).0;
    let before = scan_of(&image);
    let epoch = before.epoch;
    forge_record(&mut image, b"ALRD", before.end.0, 40_000, epoch, 0);
    forge_record(&mut image, b"ALRD", before.end.0 + 1000, 100, epoch, 0);
    let after = scan_of(&image);
    assert_eq!((after.end, after.damage.len()), (before.end, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn forged_headers_never_panic(
        clean: bool,
        slot in 0usize..2,
        fields in proptest::collection::vec((proptest::sample::select(&FIELDS[..]), edge()), 1..4),
        // The offsets often have to agree, or the header is refused at once.
        at in proptest::option::of((edge(), 0u64..=RING + PAGE)),
    ) {
        let mut image = image(clean);
        forge(&mut image, slot, &fields);
        if let Some((trim, len)) = at {
            let durable = trim.saturating_add(len);
            forge(&mut image, slot, &[(48, trim), (80, durable), (72, trim)]);
        }
        use_it(&image)?;
    }

    /// Record headers with any length, epoch and lag, at any position.
    #[test]
    fn forged_records_never_panic(
        clean: bool,
        records in proptest::collection::vec(
            (0u64..3 * RING, prop_oneof![any::<u32>(), 0u32..10_000], 0u32..4,
             prop_oneof![any::<u32>(), 0u32..100_000], any::<bool>()),
            1..40),
        flips in proptest::collection::vec((0usize..(DATA_START + RING) as usize, 0u8..8), 0..40),
    ) {
        let mut image = image(clean);
        for (at, len, epoch, lag, padding) in records {
            let magic = if padding { b"ALRP" } else { b"ALRD" };
            forge_record(&mut image, magic, at, len, epoch, lag);
        }
        for (at, bit) in flips {
            image[at] ^= 1 << bit;
        }
        use_it(&image)?;
    }
}

#[test]
fn the_images_to_forge_are_valid_logs() {
    let disk = SimDisk::from_image(&image(true), SimOptions::default());
    let (report, records) = scan(&disk);
    assert!(report.start > LogOffset(0) && report.end.0 > RING, "a second lap");
    assert!(records.len() >= 30 && report.damage.is_empty());
}
