//! The chain: the catalog in the object store. `docs/format/chain.md`.
//!
//! In development: the bytes of fences and deltas, without I/O.
//!
//! - `body.rs`, `change.rs`: the body of a fence or delta; its changes
//! - `wire.rs`: numbers of variable length

mod body;
mod change;
mod wire;

pub use body::{Body, ObjectKind, Recorded};
pub use change::{ChainChange, ChainObject};
