//! The commands of the replicated state machine: a write or a discard of one block.

use bytes::Bytes;

use super::{BLOCKS, PAGE};

/// The content of a block: the identifier of the write that it stems from, or `None` if the block
/// is absent (never written, or discarded).
pub(super) type Value = Option<u64>;

/// One command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Op {
    /// Unique in a simulation, ascending in the order of the proposals.
    pub(super) id: u64,
    pub(super) block: usize,
    pub(super) discards: bool,
}

impl Op {
    /// The content of the block after the command.
    pub(super) fn value(self) -> Value {
        (!self.discards).then_some(self.id)
    }

    /// Returns the data of an entry. A write contains the whole page.
    pub(super) fn encode(self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24 + PAGE);
        for number in [self.id, self.block as u64, u64::from(self.discards)] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        if let Some(id) = self.value() {
            out.extend_from_slice(&page_of(id));
        }
        out
    }

    /// Returns the command of an entry, or `None` for the empty entry of a new leader. Panics if
    /// the data is not what `encode` returns.
    pub(super) fn decode(data: &Bytes) -> Option<Self> {
        if data.is_empty() {
            return None;
        }
        let number = |index: usize| {
            let bytes = &data[index * 8..index * 8 + 8];
            u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
        };
        let op = Self { id: number(0), block: number(1) as usize, discards: number(2) == 1 };
        assert!(op.block < BLOCKS, "an entry names block {}", op.block);
        match op.value() {
            Some(id) => assert_eq!(&data[24..], &page_of(id)[..], "the page of write {id}"),
            None => assert_eq!(data.len(), 24, "discard {} has a page", op.id),
        }
        Some(op)
    }
}

/// Returns the page that the write `id` stores: the identifier, followed by bytes derived from it.
pub(super) fn page_of(id: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    let mut word = id;
    for bytes in page.as_chunks_mut::<8>().0 {
        *bytes = word.to_le_bytes();
        // The multiplier and increment of Knuth's MMIX.
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    }
    page
}

/// Returns the identifier of the write that a page stems from.
pub(super) fn id_of(page: &[u8]) -> u64 {
    u64::from_le_bytes(page[..8].try_into().expect("eight bytes"))
}
