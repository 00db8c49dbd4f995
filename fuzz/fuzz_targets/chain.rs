//! See `alluvium_stream::chain::fuzz::chain`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_stream::chain::fuzz::chain(data) {
        panic!("{what}");
    }
});
