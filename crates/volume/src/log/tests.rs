//! Round trips of all records, and what is refused.

use bytes::Bytes;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::fields::FieldError;
use crate::state::VolumeState;
use crate::types::{
    AttachEpoch, CheckpointNumber, ConfState, GroupId, HardState, Index, Layer, Parent, PeerId,
    Sequence, Term, VolumeId,
};
use crate::window::{WINDOW_BYTES, Window};

/// The payload of a record, as the log returns it.
fn encode(record: &Record) -> Bytes {
    let mut out = record.encode_head();
    if let Record::Entries(entries) = record {
        for entry in &entries.entries {
            out.extend(&entry.data);
        }
    }
    out.into()
}

fn entries() -> impl Strategy<Value = Record> {
    let entry = (0..3_u64, any::<bool>(), vec(any::<u8>(), 0..200));
    (any::<[u64; 4]>(), 1..1_u64 << 62, 1..1000_u64, vec(entry, 0..20)).prop_map(
        |([group, peer, vote, commit], first, previous, steps)| {
            let mut term = previous;
            let previous = if first == 1 { 0 } else { previous };
            let entries = steps.into_iter().map(|(more, is_conf, data)| {
                term += more;
                let kind = if is_conf { EntryKind::ConfChange } else { EntryKind::Normal };
                Entry { term: Term(term), kind, data: data.into() }
            });
            let entries = entries.collect();
            Record::Entries(Entries {
                group: GroupId(group.max(1)),
                peer: PeerId(peer.max(1)),
                state: HardState { term: Term(term), vote: PeerId(vote), commit: Index(commit) },
                first: Index(first),
                previous_term: Term(previous),
                entries,
            })
        },
    )
}

fn install() -> impl Strategy<Value = Record> {
    let finished = (any::<u32>(), any::<u8>()).prop_map(|(volume, byte)| FinishedChunks {
        volume: VolumeId(volume),
        chunks: Box::new([byte; 512]),
    });
    let finished = vec(finished, 0..3).prop_map(|mut finished| {
        finished.sort_by_key(|finished| finished.volume);
        finished.dedup_by_key(|finished| finished.volume);
        finished
    });
    let progress = option::of((any::<u64>().prop_map(Index), finished));
    (any::<[u64; 4]>(), progress).prop_map(|([group, peer, barrier, applied], progress)| {
        Record::Install(Install {
            group: GroupId(group.max(1)),
            peer: PeerId(peer.max(1)),
            barrier: Index(barrier),
            applied: Index(applied),
            progress,
        })
    })
}

fn volume() -> impl Strategy<Value = VolumeState> {
    let parent = option::of(
        (1..=u32::MAX, any::<u32>())
            .prop_map(|(volume, layer)| Parent { volume: VolumeId(volume), layer: Layer(layer) }),
    );
    let window =
        option::of((1..=u64::MAX, any::<u8>()).prop_map(|(floor, byte)| {
            Window::new(Sequence(floor), Box::new([byte; WINDOW_BYTES]))
        }));
    let layers = prop::collection::btree_set(any::<u32>(), 0..5);
    (any::<(u64, u32)>(), parent, window, layers).prop_map(|(id, parent, window, layers)| {
        VolumeState {
            volume: VolumeId(0),
            parent,
            epoch: AttachEpoch(id.0),
            nonce: id.1,
            window,
            dropped_layers: layers.into_iter().map(Layer).collect(),
        }
    })
}

fn peers() -> impl Strategy<Value = Vec<PeerId>> {
    vec(any::<u64>().prop_map(PeerId), 0..4)
}

fn conf() -> impl Strategy<Value = ConfState> {
    (peers(), peers(), peers(), peers(), any::<bool>()).prop_map(
        |(voters, learners, outgoing_voters, next_learners, auto_leave)| ConfState {
            voters,
            learners,
            outgoing_voters,
            next_learners,
            auto_leave,
        },
    )
}

/// A group whose number is set by the caller.
fn group() -> impl Strategy<Value = GroupCheckpoint> {
    let pair = any::<(u64, u64)>()
        .prop_map(|(number, base)| Pair { number: CheckpointNumber(number), base: Index(base) });
    // Base, commit and last index; base term, last term and term.
    let numbers = (any::<[u32; 3]>(), any::<[u64; 3]>(), 1..=u64::MAX, any::<(u64, u64, bool)>());
    (numbers, conf(), vec(pair, 0..17), vec(volume(), 0..4)).prop_map(
        |((mut indexes, mut terms, peer, others), conf, pairs, mut volumes)| {
            let (vote, barrier, completes_install) = others;
            indexes.sort_unstable();
            terms.sort_unstable();
            if completes_install {
                indexes = [indexes[0]; 3];
                terms[1] = terms[0];
            }
            for (number, volume) in (7..).zip(&mut volumes) {
                volume.volume = VolumeId(number);
            }
            let [base, commit, last] = indexes.map(|index| Index(index.into()));
            let [base_term, last_term, term] = terms.map(Term);
            GroupCheckpoint {
                group: GroupId(0),
                peer: PeerId(peer),
                base,
                base_term,
                last,
                last_term,
                state: HardState { term, vote: PeerId(vote), commit },
                barrier: Index(barrier),
                completes_install,
                conf,
                pairs,
                volumes,
            }
        },
    )
}

fn checkpoint() -> impl Strategy<Value = Checkpoint> {
    (any::<u32>(), vec(group(), 0..12)).prop_map(|(number, mut groups)| {
        for (id, group) in (3..).step_by(5).zip(&mut groups) {
            group.group = GroupId(id);
        }
        Checkpoint { number: CheckpointNumber(number.into()), groups }
    })
}

fn record() -> impl Strategy<Value = Record> {
    let part = checkpoint()
        .prop_map(|checkpoint| Record::Checkpoint(checkpoint.into_parts(usize::MAX).remove(0)));
    let gone = any::<(u64, u64)>().prop_map(|(group, peer)| {
        Record::Tombstone(Tombstone { group: GroupId(group), peer: PeerId(peer) })
    });
    prop_oneof![entries(), install(), part, gone]
}

proptest! {
    #[test]
    fn a_record_is_read_as_it_was_written(record in record()) {
        prop_assert_eq!(Record::decode(&encode(&record)), Ok(record));
    }

    #[test]
    fn a_record_that_is_shorter_or_longer_is_refused(record in record(), at: prop::sample::Index) {
        let bytes = encode(&record);
        let short = bytes.slice(..at.index(bytes.len()));
        prop_assert!(Record::decode(&short).is_err());
        let long: Bytes = [&bytes[..], &[0]].concat().into();
        prop_assert!(Record::decode(&long).is_err());
    }

    /// A byte may be that of a number, so that the result is another record. What is accepted is
    /// written again as the same bytes: no two encodings of a record are accepted.
    #[test]
    fn a_changed_record_is_refused_or_has_one_encoding(
        record in record(),
        at: prop::sample::Index,
        byte: u8,
    ) {
        let mut bytes = encode(&record).to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let bytes = Bytes::from(bytes);
        if let Ok(other) = Record::decode(&bytes) {
            prop_assert_eq!(encode(&other), bytes);
        }
    }

    #[test]
    fn a_checkpoint_is_put_together_from_parts_of_bounded_length(
        checkpoint in checkpoint(),
        max_bytes in 32..6000_usize,
    ) {
        let parts = checkpoint.clone().into_parts(max_bytes);
        let mut assembler = Assembler::default();
        let last = parts.len() - 1;
        for (n, part) in parts.into_iter().enumerate() {
            let bytes = encode(&Record::Checkpoint(part.clone()));
            prop_assert!(bytes.len() <= max_bytes || part.groups.len() <= 1);
            let Ok(Record::Checkpoint(part)) = Record::decode(&bytes) else { panic!("{bytes:?}") };
            let complete = assembler.push(part);
            prop_assert_eq!(complete.is_some(), n == last);
            if let Some(complete) = complete {
                prop_assert_eq!(&complete, &checkpoint);
            }
        }
    }
}

/// Parts of a checkpoint with a group in each.
fn parts(number: u64, count: u32) -> Vec<CheckpointPart> {
    let part = |part| CheckpointPart {
        number: CheckpointNumber(number),
        part,
        parts: count,
        groups: Vec::new(),
    };
    (0..count).map(part).collect()
}

#[test]
fn a_checkpoint_counts_only_with_all_its_parts_in_a_row() {
    let mut assembler = Assembler::default();
    let [a, b, c] = parts(1, 3).try_into().unwrap();
    // Cut short by a crash, then the next process's.
    assert!(assembler.push(a.clone()).is_none());
    assert!(assembler.push(b.clone()).is_none());
    let second = parts(1, 1).remove(0);
    assert!(assembler.push(second).is_some(), "the same number in another process");
    assert!(assembler.push(c.clone()).is_none(), "its first parts were followed by another one");
    // A part is missing.
    assert!(assembler.push(a.clone()).is_none());
    assert!(assembler.push(c.clone()).is_none());
    assert!(assembler.push(b.clone()).is_none());
    // Another record in between.
    assert!(assembler.push(a.clone()).is_none());
    assembler.interrupt();
    assert!(assembler.push(b.clone()).is_none());
    assert!(assembler.push(c.clone()).is_none());
    for part in [a, b] {
        assert!(assembler.push(part).is_none());
    }
    assert_eq!(assembler.push(c).unwrap().number, CheckpointNumber(1));
}

#[test]
fn records_of_others_and_of_newer_versions_are_refused() {
    let gone = Record::Tombstone(Tombstone { group: GroupId(1), peer: PeerId(2) });
    let bytes = encode(&gone);
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.to_vec();
        bytes[at] = byte;
        Record::decode(&bytes.into()).unwrap_err()
    };
    // The record of a stream begins with its version.
    assert_eq!(with(0, 2), RecordError::Magic(2));
    assert_eq!(with(1, 2), RecordError::Version(2));
    assert_eq!(with(2, 5), RecordError::Kind(5));
    assert_eq!(with(3, 1), RecordError::Flags { of: "record", flags: 1 });
    assert_eq!(with(7, 1), FieldError::Reserved { at: 4 }.into());
    assert_eq!(Record::decode(&Bytes::new()), Err(FieldError::Length { len: 0 }.into()));
}

/// The bytes of the document, so that a change of the format does not go unnoticed.
#[test]
fn entries_have_the_bytes_of_the_document() {
    let record = Record::Entries(Entries {
        group: GroupId(0x0102),
        peer: PeerId(3),
        state: HardState { term: Term(9), vote: PeerId(4), commit: Index(16) },
        first: Index(17),
        previous_term: Term(8),
        entries: vec![
            Entry { term: Term(8), kind: EntryKind::Normal, data: Bytes::from_static(b"op") },
            Entry { term: Term(9), kind: EntryKind::ConfChange, data: Bytes::from_static(b"c") },
        ],
    });
    let mut expected = b"V\x01\x01\0\0\0\0\0".to_vec();
    for number in [0x0102_u64, 3, 9, 4, 16, 17, 8, 2, 8] {
        expected.extend(number.to_le_bytes());
    }
    expected.extend([2, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend(9_u64.to_le_bytes());
    expected.extend([1, 0, 0, 0, 2, 0, 0, 0]);
    expected.extend(b"opc");
    assert_eq!(encode(&record), expected);
}

/// A count that the record cannot hold is refused before memory is allocated for it.
#[test]
fn a_count_beyond_the_record_is_refused() {
    let part =
        CheckpointPart { number: CheckpointNumber(1), part: 0, parts: 1, groups: Vec::new() };
    let mut bytes = encode(&Record::Checkpoint(part)).to_vec();
    bytes[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(Record::decode(&bytes.into()), Err(FieldError::Length { len: 32 }.into()));
}
