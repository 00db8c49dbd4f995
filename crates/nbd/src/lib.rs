//! NBD server. It exports disks, which it knows by the trait [`Disk`], over Unix sockets and TCP.
//! `docs/nbd.md` lists what of the protocol is supported, the bounds and the errors. The protocol
//! is defined by `doc/proto.md` of the NBD project; comments cite it as "the protocol".
//!
//! # Modules
//!
//! - `disk.rs`: the trait of a disk; `memory.rs`: a sparse disk in memory, for tests
//! - `exports.rs`: names of disks, which may change while the server runs
//! - `protocol.rs`: constants and headers
//! - `handshake.rs`, `handshake/`: negotiation; the data of options (`option.rs`)
//! - `transmission.rs`, `transmission/`: requests and replies of a connection: bytes from the
//!   socket (`input.rs`), the rules of a request (`check.rs`), its execution (`execute.rs`), its
//!   reply (`reply.rs`), bytes to the socket (`output.rs`)
//! - `budget.rs`: bounds on the bytes in flight
//! - `server.rs`: listeners, connections, shutdown; `counters.rs`: what the server counts
//! - `fuzz.rs`: the checks of the fuzz targets; `testing.rs`: a client for tests
#![forbid(unsafe_code)]

mod budget;
mod counters;
mod disk;
mod exports;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod handshake;
mod memory;
mod protocol;
mod server;
#[cfg(any(test, fuzzing))]
mod testing;
mod transmission;

pub use counters::{CommandCounters, Counters};
pub use disk::{Allocation, Disk, DiskError, Extent, Part, ZeroMode};
pub use exports::{ExportError, Exports};
pub use memory::MemoryDisk;
pub use protocol::Command;
pub use server::{Listener, Options, Server};
