//! See `alluvium_journal::fuzz::opening`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_journal::fuzz::opening(data) {
        panic!("{what}");
    }
});
