//! See `alluvium_journal::fuzz::hints`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_journal::fuzz::hints(data) {
        panic!("{what}");
    }
});
