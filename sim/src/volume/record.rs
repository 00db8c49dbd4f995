//! The records of the write-ahead log. The campaign has an encoding of its own, of `u64`s behind
//! one byte for the kind: it checks the protocol, not the format.

use bytes::{Buf, Bytes};
use raft::eraftpb::{Entry, HardState};

use super::GROUPS;
use super::log::Position;

/// A record.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Record {
    /// `E`: entries of a group, which replace those from the first index on, and its hard state.
    /// Without entries it states the hard state alone.
    Entries { group: usize, hard_state: HardState, entries: Vec<Entry> },
    /// `I`: from here on, blocks of the group may be as new as the barrier.
    Install { group: usize, barrier: u64 },
    /// `C`: the store is durable up to the base of each group.
    Checkpoint { number: u64, groups: Vec<GroupCheckpoint> },
}

/// What a checkpoint states about one group.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupCheckpoint {
    pub(super) base: Position,
    pub(super) hard_state: HardState,
    pub(super) barrier: u64,
    /// An install is complete: the older log of the group is void.
    pub(super) completes_install: bool,
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Entries { group, hard_state, entries } => {
                let mut out = Writer::new(b'E');
                out.number(*group as u64);
                out.hard_state(hard_state);
                out.number(entries.len() as u64);
                for entry in entries {
                    out.number(entry.index);
                    out.number(entry.term);
                    out.number(entry.data.len() as u64);
                    out.0.extend_from_slice(&entry.data);
                }
                out.0
            }
            Self::Install { group, barrier } => {
                let mut out = Writer::new(b'I');
                out.number(*group as u64);
                out.number(*barrier);
                out.0
            }
            Self::Checkpoint { number, groups } => {
                let mut out = Writer::new(b'C');
                out.number(*number);
                for group in groups {
                    out.number(group.base.index);
                    out.number(group.base.term);
                    out.hard_state(&group.hard_state);
                    out.number(group.barrier);
                    out.number(u64::from(group.completes_install));
                }
                out.0
            }
        }
    }

    /// Returns the record in a payload. Panics if it is not one, since the log has verified its
    /// checksum.
    pub(super) fn decode(mut bytes: Bytes) -> Self {
        let decoded = match bytes.get_u8() {
            b'E' => Self::Entries {
                group: bytes.get_u64_le() as usize,
                hard_state: hard_state(&mut bytes),
                entries: (0..bytes.get_u64_le()).map(|_| entry(&mut bytes)).collect(),
            },
            b'I' => {
                Self::Install { group: bytes.get_u64_le() as usize, barrier: bytes.get_u64_le() }
            }
            b'C' => Self::Checkpoint {
                number: bytes.get_u64_le(),
                groups: (0..GROUPS)
                    .map(|_| GroupCheckpoint {
                        base: Position { index: bytes.get_u64_le(), term: bytes.get_u64_le() },
                        hard_state: hard_state(&mut bytes),
                        barrier: bytes.get_u64_le(),
                        completes_install: bytes.get_u64_le() == 1,
                    })
                    .collect(),
            },
            kind => panic!("a record of kind {kind}"),
        };
        assert!(bytes.is_empty(), "a record with {} bytes too many", bytes.len());
        decoded
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u8) -> Self {
        Self(vec![kind])
    }

    fn number(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn hard_state(&mut self, hard_state: &HardState) {
        self.number(hard_state.term);
        self.number(hard_state.vote);
        self.number(hard_state.commit);
    }
}

fn hard_state(bytes: &mut Bytes) -> HardState {
    HardState {
        term: bytes.get_u64_le(),
        vote: bytes.get_u64_le(),
        commit: bytes.get_u64_le(),
        ..HardState::default()
    }
}

fn entry(bytes: &mut Bytes) -> Entry {
    let (index, term) = (bytes.get_u64_le(), bytes.get_u64_le());
    let len = bytes.get_u64_le() as usize;
    Entry { index, term, data: bytes.split_to(len), ..Entry::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_their_encoding() {
        let hard_state = HardState { term: 3, vote: 2, commit: 7, ..HardState::default() };
        let entry = |index, data: &'static [u8]| {
            let data = Bytes::from_static(data);
            Entry { index, term: 3, data, ..Entry::default() }
        };
        let group = GroupCheckpoint {
            base: Position { index: 7, term: 2 },
            hard_state: hard_state.clone(),
            barrier: 9,
            completes_install: true,
        };
        let entries = vec![entry(8, b""), entry(9, b"data")];
        let records = [
            Record::Entries { group: 4, hard_state: hard_state.clone(), entries },
            Record::Entries { group: 0, hard_state, entries: vec![] },
            Record::Install { group: 1, barrier: 12 },
            Record::Checkpoint { number: 5, groups: vec![group; GROUPS] },
        ];
        for record in records {
            assert_eq!(Record::decode(Bytes::from(record.encode())), record);
        }
    }
}
