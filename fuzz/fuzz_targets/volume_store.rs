//! See `alluvium_volume::fuzz::store`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_volume::fuzz::store(data) {
        panic!("{what}");
    }
});
