//! See `alluvium_nbd::fuzz::requests`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_nbd::fuzz::requests(data) {
        panic!("{what}");
    }
});
