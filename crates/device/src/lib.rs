//! Devices: where bytes become durable.
//!
//! A [`Device`] takes reads, writes and flushes on aligned buffers and completes them on a thread of its own.
//! Three engines implement it: io_uring, a pool of threads for kernels and containers that refuse io_uring, and a
//! simulated disk ([`sim`]) that loses what was not flushed. This is the only crate of the workspace with `unsafe`.
#![allow(unsafe_code)]
