//! The store: the blocks of all replicas of a server. `docs/format/volume-store.md`.

mod overlay;

pub use overlay::{ChunkKey, Content, FlightId, Overlay, WriteBack};
