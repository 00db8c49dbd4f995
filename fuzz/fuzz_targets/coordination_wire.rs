//! See `alluvium_coordination::fuzz::wire`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_coordination::fuzz::wire(data) {
        panic!("{what}");
    }
});
