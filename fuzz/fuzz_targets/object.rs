//! See `alluvium_stream::object::fuzz::object`.
#![no_main]
#![forbid(unsafe_code)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(what) = alluvium_stream::object::fuzz::object(data) {
        panic!("{what}");
    }
});
