//! See `alluvium_volume::net::fuzz::net`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_volume::net::fuzz::net(data) {
        panic!("{what}");
    }
});
