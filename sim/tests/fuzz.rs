//! The fuzz targets without a fuzzer: their seeds, and a bounded number of random inputs. `cargo
//! xtask fuzz` runs more.

use std::fs;
use std::path::Path;

use alluvium_device::Durability;
use alluvium_device::sim::Random;
use alluvium_sim::fuzz;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

type Target = fn(&[u8]) -> Result<(), String>;

const TARGETS: [(&str, Target); 3] =
    [("headers", fuzz::headers), ("records", fuzz::records), ("recovery", fuzz::recovery)];

#[test]
fn the_seeds_find_nothing() {
    for (name, target) in TARGETS {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(name);
        let mut seeds = 0;
        for seed in fs::read_dir(&directory).expect("each target has seeds") {
            let path = seed.unwrap().path();
            target(&fs::read(&path).unwrap()).unwrap_or_else(|what| panic!("{path:?}: {what}"));
            seeds += 1;
        }
        assert!(seeds > 10, "{seeds} seeds in {directory:?}");
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..600)
}

/// Generates identical inputs each time; the fuzzer generates new ones.
fn inputs(cases: u32) -> ProptestConfig {
    let (rng_seed, failure_persistence) = (RngSeed::Fixed(1), None);
    ProptestConfig { cases, rng_seed, failure_persistence, ..ProptestConfig::default() }
}

fn passes(target: Target, data: &[u8]) -> Result<(), TestCaseError> {
    target(data).map_err(TestCaseError::fail)
}

proptest! {
    #![proptest_config(inputs(4000))]
    #[test]
    fn random_headers(data in bytes()) {
        passes(fuzz::headers, &data)?;
    }
}

proptest! {
    #![proptest_config(inputs(500))]
    #[test]
    fn random_records(data in bytes()) {
        passes(fuzz::records, &data)?;
    }

    #[test]
    fn random_histories(data in bytes()) {
        passes(fuzz::recovery, &data)?;
    }
}

/// Negative control of the ledger: a disk whose cache is trusted, and lost, is found.
#[test]
fn a_trusted_volatile_cache_is_found() {
    let mut random = Random::new(1);
    let found = (0..300).any(|_| {
        let data: Vec<u8> = (0..200).map(|_| random.next_u64() as u8).collect();
        let result = fuzz::recovery_on(&data, Durability::Device);
        result.is_err_and(|what| what.starts_with("the promised record"))
    });
    assert!(found, "not found in 300 runs on a disk with a trusted cache");
}
