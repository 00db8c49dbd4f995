//! See `alluvium_sim::fuzz::headers`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_sim::fuzz::headers(data) {
        panic!("{what}");
    }
});
