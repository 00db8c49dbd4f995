//! The fuzz targets without a fuzzer: their seeds, and a bounded number of random inputs. `cargo
//! xtask fuzz` goes further.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::reference::{hint_entries, hint_entry};
use super::*;

type Target = fn(&[u8]) -> Checked;

const TARGETS: [(&str, Target); 3] =
    [("cache_records", records), ("cache_hints", hints), ("cache_opening", opening)];

#[test]
fn the_seeds_find_nothing() {
    for (name, target) in TARGETS {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(name);
        let mut seeds = 0;
        for seed in fs::read_dir(&directory).expect("each target has seeds") {
            let path = seed.unwrap().path();
            target(&fs::read(&path).unwrap()).unwrap_or_else(|what| panic!("{path:?}: {what}"));
            seeds += 1;
        }
        assert!(seeds > 10, "{seeds} seeds in {directory:?}");
    }
}

/// The reference itself is right: for a record, a hint and a header written by hand.
#[test]
fn the_reference_reads_what_is_written() {
    assert_eq!(reference::crc32c(&[b"1234", b"56789"]), 0xe306_9283);
    let mut journal = vec![0; RECORDS_AT + 40];
    let record =
        NewRecord { key: b"key", content: Content::Value { value: b"value", expires_at: Some(7) } };
    let end = RECORDS_AT + record.len_bytes();
    record.write(&mut journal[RECORDS_AT..end], Salt(3), JournalNumber(0), Granule::at(RECORDS_AT));
    let walked = reference::walk(&journal, 3);
    assert_eq!((walked.records.len(), walked.end), (1, RECORDS_AT + 32));
    let found = &walked.records[0];
    assert_eq!(
        (&found.key[..], &found.value[..], found.expiry),
        (&b"key"[..], &b"value"[..], Some(7))
    );
    assert!(reference::walk(&journal, 4).records.is_empty());
    let entries = [hint_entry(1 << 63, 5, found)];
    assert_eq!(hint_entries(&reference::hint(3, 8192, &entries), 3, MIB), Some(entries.to_vec()));
    assert_eq!(hint_entries(&reference::hint(3, 8192, &entries), 4, MIB), None);
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..600)
}

/// Generates identical inputs each time; finding new ones is the fuzzer's task.
fn inputs(cases: u32) -> ProptestConfig {
    let (rng_seed, failure_persistence) = (RngSeed::Fixed(1), None);
    ProptestConfig { cases, rng_seed, failure_persistence, ..ProptestConfig::default() }
}

fn passes(target: Target, data: &[u8]) -> Result<(), TestCaseError> {
    target(data).map_err(TestCaseError::fail)
}

proptest! {
    #![proptest_config(inputs(2000))]
    #[test]
    fn random_records(data in bytes()) {
        passes(records, &data)?;
    }
}

proptest! {
    #![proptest_config(inputs(300))]
    #[test]
    fn random_hints(data in bytes()) {
        passes(hints, &data)?;
    }

    #[test]
    fn random_files(data in bytes()) {
        passes(opening, &data)?;
    }
}
