//! The store: the blocks of all replicas of a server. `docs/format/volume-store.md`.

mod block_store;
mod checkpoint;
mod error;
mod free;
mod io;
mod layout;
#[cfg(test)]
mod model_tests;
mod open;
mod overlay;
#[cfg(test)]
mod overlay_tests;
mod pending;
mod pull;
mod read;
mod sector;
#[cfg(test)]
mod sector_tests;
mod slots;
#[cfg(test)]
mod store_tests;
mod superblock;
#[cfg(test)]
mod superblock_tests;

pub use block_store::{Expected, KnownReplica, NoSlots, Store, StoreOptions};
pub use error::{Ahead, CopyDamage, StoreError};
pub use io::{StoreCounters, Wake};
pub use layout::{
    Layout, LayoutError, MAX_CAPACITY_BYTES, META_START, MIN_CAPACITY_BYTES, PAGE_SECTORS,
    SECTOR_BYTES, SLOT_BLOCKS, SLOT_BYTES, SUPERBLOCK_AT, SUPERBLOCK_BYTES,
};
pub use overlay::Content;
pub use pending::{BlocksRead, DamagedBlock, ReadId};
pub use pull::ChunkBits;
pub(crate) use pull::has_block;
pub use sector::{Address, BlockEpoch, Sector, SectorState, Word, encode_lost, mix};
pub use superblock::{Chosen, CopyState, Current, Owner, Superblock, choose};

/// The field of `N` bytes at `at`. Positions are constants, within the bytes of their structure.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a field has its size")
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(field(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(field(bytes, at))
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}
