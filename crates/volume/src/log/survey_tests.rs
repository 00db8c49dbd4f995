//! The survey against histories of a log, whole and with a record taken out.

use std::collections::BTreeMap;

use alluvium_wal::{Damage, DeviceOffset, LogOffset};
use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::types::{CheckpointNumber, ConfState, GroupId, HardState, Index, PeerId, Term};

type Key = (GroupId, PeerId);
type History = Vec<(LogOffset, Record)>;

/// What a replica would recover: base, entries above it, hard state, barrier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    base: (Index, Term),
    entries: BTreeMap<Index, Term>,
    hard: HardState,
    barrier: Index,
}

impl State {
    fn last(&self) -> (Index, Term) {
        self.entries.last_key_value().map_or(self.base, |(index, term)| (*index, *term))
    }

    fn append(&mut self, entries: &Entries) {
        self.entries.split_off(&entries.first);
        for (index, entry) in (entries.first.0..).zip(&entries.entries) {
            self.entries.insert(Index(index), entry.term);
        }
        let commit = self.hard.commit.max(entries.state.commit);
        self.hard = HardState { commit, ..entries.state };
    }

    fn checkpointed(&mut self, group: &GroupCheckpoint) {
        if group.completes_install {
            self.entries.clear();
        }
        self.base = (group.base, group.base_term);
        self.entries = self.entries.split_off(&Index(group.base.0 + 1));
        // Only a record that the log has lost can have replaced them, and nothing of it is needed.
        self.entries.split_off(&Index(group.last.0 + 1));
        (self.hard, self.barrier) = (group.state, group.barrier);
    }
}

/// A server that writes a log, with what each replica has.
struct Writer {
    history: History,
    end: LogOffset,
    states: BTreeMap<Key, State>,
    /// The term of each committed entry.
    committed: BTreeMap<(Key, Index), Term>,
    next_peer: u64,
    number: u64,
}

impl Writer {
    fn new() -> Self {
        Self {
            history: Vec::new(),
            end: LogOffset(0),
            states: BTreeMap::new(),
            committed: BTreeMap::new(),
            next_peer: 1,
            number: 0,
        }
    }

    fn write(&mut self, record: Record) {
        let bytes = 100 + record.encode_head().len() as u64;
        self.history.push((self.end, record));
        self.end = LogOffset(self.end.0 + bytes);
    }

    /// The replica of `group`, which is created if there is none.
    fn replica(&mut self, group: u64) -> Key {
        let group = GroupId(group);
        if let Some(key) = self.states.keys().find(|key| key.0 == group) {
            return *key;
        }
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        self.states.insert((group, peer), State::default());
        // The first record, which makes the replica known.
        self.append((group, peer), 0, 0, 0, 0);
        (group, peer)
    }

    /// Appends `count` entries after dropping `overwritten` that are not committed, in a term
    /// `newer` by that much, and commits `commits` more.
    fn append(&mut self, key: Key, overwritten: u64, count: u64, newer: u64, commits: u64) {
        let state = self.states.get_mut(&key).unwrap();
        let floor = state.hard.commit.max(state.base.0);
        let overwritten = if newer > 0 && count > 0 { overwritten } else { 0 };
        let previous = Index(state.last().0.0.saturating_sub(overwritten)).max(floor);
        let previous_term = match previous == state.base.0 {
            true => state.base.1,
            false => state.entries[&previous],
        };
        let term = Term(state.hard.term.0.max(1) + newer);
        let last = Index(previous.0 + count);
        let commit = Index((floor.0 + commits).min(last.0));
        let entry = Entry { term, kind: EntryKind::Normal, data: Bytes::from_static(b"op") };
        let record = Entries {
            group: key.0,
            peer: key.1,
            state: HardState { term, vote: PeerId(1), commit },
            first: Index(previous.0 + 1),
            previous_term,
            entries: vec![entry; count as usize],
        };
        state.append(&record);
        for (index, term) in state.entries.range(..=commit) {
            let before = self.committed.insert((key, *index), *term);
            assert!(before.is_none_or(|before| before == *term), "committed entries stay");
        }
        self.write(Record::Entries(record));
    }

    /// Appends all entries above the base again.
    fn carry_forward(&mut self, key: Key) {
        let state = &self.states[&key];
        let entry = |term: &Term| Entry {
            term: *term,
            kind: EntryKind::Normal,
            data: Bytes::from_static(b"op"),
        };
        let record = Entries {
            group: key.0,
            peer: key.1,
            state: state.hard,
            first: Index(state.base.0.0 + 1),
            previous_term: state.base.1,
            entries: state.entries.values().map(entry).collect(),
        };
        self.write(Record::Entries(record));
    }

    /// Writes a checkpoint, all but its last `missing` parts. With `install`, that replica takes
    /// over a state beyond its log.
    fn checkpoint(&mut self, missing: usize, install: Option<Key>) {
        self.number += 1;
        let mut groups = Vec::new();
        for (key, state) in &self.states {
            let (mut base, mut hard) = (state.hard.commit.max(state.base.0), state.hard);
            let completes_install = install == Some(*key);
            let mut last = state.last();
            let base_term;
            if completes_install {
                base = Index(last.0.0 + 5);
                hard.term = Term(hard.term.0 + 1);
                hard.commit = base;
                base_term = hard.term;
                last = (base, base_term);
            } else if base == state.base.0 {
                base_term = state.base.1;
            } else {
                base_term = state.entries[&base];
            }
            groups.push(GroupCheckpoint {
                group: key.0,
                peer: key.1,
                base,
                base_term,
                last: last.0,
                last_term: last.1,
                state: hard,
                barrier: state.barrier,
                completes_install,
                conf: ConfState::default(),
                pairs: Vec::new(),
                volumes: Vec::new(),
            });
        }
        let checkpoint = Checkpoint { number: CheckpointNumber(self.number), groups };
        let mut parts = checkpoint.clone().into_parts(1);
        parts.truncate(parts.len().saturating_sub(missing));
        let is_complete = missing == 0;
        let start = self.end;
        for part in parts {
            self.write(Record::Checkpoint(part));
        }
        if is_complete {
            for group in &checkpoint.groups {
                self.states.get_mut(&(group.group, group.peer)).unwrap().checkpointed(group);
            }
            self.trim(start);
        }
    }

    /// Trims to the checkpoint at `start`, or to the first record with an entry above a base.
    fn trim(&mut self, start: LogOffset) {
        let needed = |(offset, record): &(LogOffset, Record)| match record {
            Record::Entries(entries) => self
                .states
                .get(&(entries.group, entries.peer))
                .is_some_and(|state| !entries.entries.is_empty() && entries.last() > state.base.0),
            _ => *offset >= start,
        };
        let keep = self.history.iter().position(|item| item.0 >= start || needed(item));
        self.history.drain(..keep.unwrap_or(0));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append { group: u64, overwritten: u64, count: u64, newer: u64, commits: u64 },
    Install { group: u64, completes: bool },
    Checkpoint { missing: usize },
    CarryForward { group: u64 },
    Remove { group: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let append = (1..4_u64, 0..4_u64, 0..5_u64, 0..3_u64, 0..5_u64).prop_map(
        |(group, overwritten, count, newer, commits)| {
            // Most appends are in the term of the one before.
            let newer = newer.saturating_sub(1);
            Step::Append { group, overwritten, count, newer, commits }
        },
    );
    prop_oneof![
        12 => append,
        1 => (1..4_u64, any::<bool>())
            .prop_map(|(group, completes)| Step::Install { group, completes }),
        2 => (0..3_usize)
            .prop_map(|missing| Step::Checkpoint { missing: missing.saturating_sub(1) }),
        1 => (1..4_u64).prop_map(|group| Step::CarryForward { group }),
        1 => (1..4_u64).prop_map(|group| Step::Remove { group }),
    ]
}

fn run(steps: &[Step]) -> Writer {
    let mut writer = Writer::new();
    for step in steps {
        match *step {
            Step::Append { group, overwritten, count, newer, commits } => {
                let key = writer.replica(group);
                writer.append(key, overwritten, count, newer, commits);
            }
            Step::Install { group, completes } => {
                let key = writer.replica(group);
                let state = writer.states.get_mut(&key).unwrap();
                let barrier = Index(state.last().0.0 + 5);
                state.barrier = state.barrier.max(barrier);
                let install = Install {
                    group: key.0,
                    peer: key.1,
                    barrier,
                    applied: state.hard.commit,
                    progress: None,
                };
                writer.write(Record::Install(install));
                if completes {
                    writer.checkpoint(0, Some(key));
                }
            }
            Step::Checkpoint { missing } => writer.checkpoint(missing, None),
            Step::CarryForward { group } => {
                let key = writer.replica(group);
                writer.carry_forward(key);
            }
            Step::Remove { group } => {
                let key = writer.replica(group);
                writer.states.remove(&key);
                writer.write(Record::Tombstone(Tombstone { group: key.0, peer: key.1 }));
            }
        }
    }
    writer
}

fn survey(history: &[(LogOffset, Record)], damage: &[Damage]) -> Survey {
    let mut surveyor = Surveyor::default();
    for (offset, record) in history {
        surveyor.record(*offset, record.clone());
    }
    surveyor.finish(damage)
}

/// Replays a log as the document says, from the last complete checkpoint that a survey has found,
/// and with no check of its own.
fn replay(history: &[(LogOffset, Record)], survey: &Survey) -> BTreeMap<Key, State> {
    let mut states: BTreeMap<Key, State> = BTreeMap::new();
    let last = survey.checkpoint.as_ref();
    let first_part = last.map_or(LogOffset(0), |(start, _)| *start);
    let mut is_before = last.is_some();
    for (offset, record) in history {
        if is_before && *offset >= first_part {
            is_before = false;
            let checkpoint = &last.unwrap().1;
            states.retain(|key, _| {
                checkpoint.groups.iter().any(|group| (group.group, group.peer) == *key)
            });
            for group in &checkpoint.groups {
                states.entry((group.group, group.peer)).or_default().checkpointed(group);
            }
        }
        match record {
            Record::Entries(entries) => {
                states.entry((entries.group, entries.peer)).or_default().append(entries);
            }
            Record::Install(install) => {
                let state = states.entry((install.group, install.peer)).or_default();
                state.barrier = state.barrier.max(install.barrier);
            }
            Record::Checkpoint(_) => {}
            Record::Tombstone(gone) => {
                states.remove(&(gone.group, gone.peer));
            }
        }
    }
    states
}

/// The entries that a replica applies while the records are handed out, as the document says, with
/// their terms.
fn walk(history: &[(LogOffset, Record)], survey: &Survey, key: Key) -> Vec<(Index, Term)> {
    let last = survey.checkpoint.as_ref();
    let group = last.and_then(|(start, checkpoint)| {
        let is_this = |group: &&GroupCheckpoint| (group.group, group.peer) == key;
        Some((*start, checkpoint.groups.iter().find(is_this)?))
    });
    let base = group.map_or((Index(0), Term(0)), |(_, group)| (group.base, group.base_term));
    // Records of a log that an install has made void are not kept.
    let from = group.filter(|(_, group)| group.completes_install).map(|(start, _)| start);
    let mut group = group;
    let mut state = State { base, ..State::default() };
    let mut applied = base.0;
    let mut terms = Vec::new();
    for (offset, record) in history.iter().filter(|(offset, _)| from <= Some(*offset)) {
        if let Some((_, stated)) = group.take_if(|(start, _)| *start <= *offset) {
            state.checkpointed(stated);
        }
        if let Record::Entries(entries) = record
            && (entries.group, entries.peer) == key
        {
            let previous = Index(entries.first.0 - 1);
            let joins =
                previous <= base.0 || state.entries.get(&previous) == Some(&entries.previous_term);
            if !joins {
                state.entries.clear();
            }
            state.append(entries);
            state.entries = state.entries.split_off(&Index(base.0.0 + 1));
        }
        while applied < state.hard.commit
            && let Some(term) = state.entries.get(&Index(applied.0 + 1))
        {
            applied.0 += 1;
            terms.push((applied, *term));
        }
    }
    terms
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_replica_of_an_intact_log_is_sound(steps in prop::collection::vec(step(), 1..60)) {
        let writer = run(&steps);
        let survey = survey(&writer.history, &[]);
        for (key, judged) in &survey.replicas {
            prop_assert_eq!(*judged, Ok(()), "{:?}", key);
        }
        prop_assert_eq!(replay(&writer.history, &survey), writer.states);
    }

    /// The one promise of the survey: a replica is not called sound if what it would recover is not
    /// what it had.
    #[test]
    fn a_replica_that_has_lost_something_is_never_called_sound(
        steps in prop::collection::vec(step(), 1..60),
        taken: prop::sample::Index,
    ) {
        let mut writer = run(&steps);
        prop_assume!(!writer.history.is_empty());
        let intact = survey(&writer.history, &[]);
        let taken = taken.index(writer.history.len());
        let end = writer.history.get(taken + 1).map_or(writer.end, |next| next.0);
        let (offset, record) = writer.history.remove(taken);
        let damage = Damage {
            range: offset..end,
            device_at: DeviceOffset(0),
            reason: String::from("taken out"),
        };
        let judged = survey(&writer.history, &[damage]);
        let recovered = replay(&writer.history, &judged);
        for (key, state) in &recovered {
            if judged.replicas[key] == Ok(()) {
                let had = writer.states.get(key);
                prop_assert_eq!(Some(state), had, "{:?} without {:?}", key, record);
                let walked = walk(&writer.history, &judged, *key);
                for (index, term) in &walked {
                    let committed = writer.committed.get(&(*key, *index));
                    prop_assert_eq!(Some(term), committed, "{:?} {:?}", key, index);
                }
                let last = walked.last().map_or(state.base.0, |(index, _)| *index);
                prop_assert_eq!(last, state.hard.commit, "{:?} applies up to its commit", key);
            }
        }
        // Nor is a replica called lost for a record that no replica needs.
        let start = intact.checkpoint.map_or(LogOffset(0), |(start, _)| start);
        if let Record::Entries(entries) = &record
            && offset < start
            && writer.states.get(&(entries.group, entries.peer)).is_none_or(
                |state| entries.last() <= state.base.0,
            )
        {
            for (key, judged) in &judged.replicas {
                prop_assert_eq!(*judged, Ok(()), "{:?} without {:?}", key, record);
            }
        }
    }
}

// -- Histories by hand

const KEY: Key = (GroupId(1), PeerId(1));

/// A record of [`KEY`] with entries of `terms` from `first` on.
fn record_of(term: u64, commit: u64, first: u64, previous: u64, terms: &[u64]) -> Record {
    let entry = |term: &u64| Entry {
        term: Term(*term),
        kind: EntryKind::Normal,
        data: Bytes::from_static(b"op"),
    };
    Record::Entries(Entries {
        group: KEY.0,
        peer: KEY.1,
        state: HardState { term: Term(term), vote: PeerId(0), commit: Index(commit) },
        first: Index(first),
        previous_term: Term(previous),
        entries: terms.iter().map(entry).collect(),
    })
}

/// A checkpoint of [`KEY`]: base and last entry with their terms, term and commit index.
fn checkpoint_of(
    base: (u64, u64),
    last: (u64, u64),
    (term, commit): (u64, u64),
    completes_install: bool,
) -> Record {
    Record::Checkpoint(CheckpointPart {
        number: CheckpointNumber(1),
        part: 0,
        parts: 1,
        groups: vec![GroupCheckpoint {
            group: KEY.0,
            peer: KEY.1,
            base: Index(base.0),
            base_term: Term(base.1),
            last: Index(last.0),
            last_term: Term(last.1),
            state: HardState { term: Term(term), vote: PeerId(0), commit: Index(commit) },
            barrier: Index(0),
            completes_install,
            conf: ConfState::default(),
            pairs: Vec::new(),
            volumes: Vec::new(),
        }],
    })
}

/// Each record takes 100 bytes.
fn history_of(records: Vec<Record>) -> History {
    (0..).step_by(100).map(LogOffset).zip(records).collect()
}

/// Takes record number `at` out of the log.
fn take_out(history: &mut History, at: usize) -> Damage {
    let (offset, _) = history.remove(at);
    Damage {
        range: offset..LogOffset(offset.0 + 100),
        device_at: DeviceOffset(0),
        reason: String::from("taken out"),
    }
}

/// The completing checkpoint has passed a record that waited in the queue. Its entries are of the
/// log that is void, and the ones above the base would follow the base with an older term: the
/// replica would vote for candidates that lack what the install has brought.
#[test]
fn a_record_of_the_void_log_behind_the_completing_checkpoint_is_not_sound() {
    let history = history_of(vec![
        record_of(1, 10, 1, 0, &[1; 94]),
        checkpoint_of((100, 3), (100, 3), (3, 100), true),
        record_of(3, 10, 95, 1, &[1; 16]),
    ]);
    let judged = survey(&history, &[]);
    assert_eq!(judged.replicas[&KEY], Err(Loss::Join(Index(94))), "94 is below the base");
}

/// A record that `C` has passed states the commit index of the time when it was queued. What `C`
/// has stated was durable, and allowed blocks to be written to the store.
#[test]
fn a_commit_index_never_falls_behind_that_of_a_checkpoint() {
    let history = history_of(vec![
        record_of(1, 5, 1, 0, &[1; 10]),
        // Base 5, and 10 was applied at the swap.
        checkpoint_of((5, 1), (10, 1), (1, 10), false),
        record_of(1, 5, 11, 1, &[1; 2]),
    ]);
    let judged = survey(&history, &[]);
    assert_eq!(judged.replicas[&KEY], Ok(()));
    assert_eq!(replay(&history, &judged)[&KEY].hard.commit, Index(10));
}

/// A damaged record has replaced entries, and a record that carries the group forward fills the
/// hole, so that the replica is sound. Before that record the walk must not apply what the damaged
/// one has replaced.
#[test]
fn a_walk_applies_no_entry_that_a_damaged_record_has_replaced() {
    let mut history = history_of(vec![
        record_of(1, 12, 1, 0, &[1; 12]),
        record_of(1, 12, 13, 1, &[1; 3]),
        record_of(2, 12, 13, 1, &[2; 4]), // damaged: 13 to 16
        record_of(2, 14, 17, 2, &[]),     // durable commit 14: the base of the checkpoint
        record_of(2, 16, 17, 2, &[2]),
        record_of(2, 16, 15, 2, &[2; 3]), // carried forward
        checkpoint_of((14, 2), (17, 2), (2, 16), false),
    ]);
    let damage = take_out(&mut history, 2);
    let judged = survey(&history, &[damage]);
    assert_eq!(judged.replicas[&KEY], Ok(()));

    let walked = walk(&history, &judged, KEY);
    assert_eq!(walked, [(Index(15), Term(2)), (Index(16), Term(2))]);
}

/// The trim may not rely on a record that is not durable: E 11..13 of term 2 was appended behind
/// `C`, the one of term 1 was trimmed for that, and the crash has taken the former.
#[test]
fn a_trim_for_a_replacement_that_a_crash_takes_makes_the_replica_lost() {
    let history = history_of(vec![checkpoint_of((10, 1), (15, 1), (1, 10), false)]);
    let judged = survey(&history, &[]);
    let expected = Loss::End { found: Index(0), stated: Index(15) };
    assert_eq!(judged.replicas[&KEY], Err(expected), "without any damage");
}

/// Indexes of entries would overflow in the survey and in `Entries::last`.
#[test]
fn an_index_beyond_the_bound_is_refused() {
    let Record::Entries(mut entries) = record_of(1, 0, 1, 0, &[1, 1]) else { unreachable!() };
    entries.first = Index(u64::MAX - 1);
    entries.previous_term = Term(1);
    let mut bytes = entries.encode_head();
    bytes.extend(b"opop");
    assert!(Record::decode(&bytes.into()).is_err());
}
