//! What the volume must do, independent of how it does it (`docs/volumes-design.md`, "What is
//! checked").

use std::collections::BTreeMap;

use super::op::{Op, Value};
use super::{BLOCKS, GROUPS};

/// What a client knows of one block.
#[derive(Default)]
struct History {
    /// The newest operation that was acknowledged, or seen by a read.
    acknowledged: Option<Op>,
    /// Later operations whose outcome is unknown, in the order of their proposals.
    unknown: Vec<Op>,
}

impl History {
    fn value(&self) -> Value {
        self.acknowledged.and_then(Op::value)
    }

    fn learn(&mut self, op: Op) {
        if self.acknowledged.is_none_or(|known| known.id < op.id) {
            self.acknowledged = Some(op);
        }
        self.unknown.retain(|unknown| unknown.id > op.id);
    }
}

/// An operation that its client waits for.
struct Waiting {
    op: Op,
    group: usize,
    server: usize,
    incarnation: u64,
}

/// An entry that a replica has applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Applied {
    term: u64,
    op: Option<Op>,
}

/// Clients, and the committed log of each group.
pub(super) struct Oracle {
    histories: Vec<[History; BLOCKS]>,
    tokens: [u64; GROUPS],
    committed: Vec<BTreeMap<u64, Applied>>,
    waiting: BTreeMap<u64, Waiting>,
    last_op: u64,
}

impl Oracle {
    pub(super) fn new() -> Self {
        Self {
            histories: (0..GROUPS).map(|_| Default::default()).collect(),
            tokens: [0; GROUPS],
            committed: vec![BTreeMap::new(); GROUPS],
            waiting: BTreeMap::new(),
            last_op: 0,
        }
    }

    /// The next operation, which does not count before `proposed`.
    pub(super) fn next_op(&self, block: usize, discards: bool) -> Op {
        Op { id: self.last_op + 1, block, discards }
    }

    /// Notes that a client has sent an operation to a server.
    pub(super) fn proposed(&mut self, group: usize, op: Op, server: usize, incarnation: u64) {
        self.last_op = op.id;
        self.histories[group][op.block].unknown.push(op);
        self.waiting.insert(op.id, Waiting { op, group, server, incarnation });
    }

    /// Notes that a replica has applied an entry. Panics if another one has applied a different
    /// entry at the same index.
    pub(super) fn applied(&mut self, group: usize, index: u64, term: u64, op: Option<Op>) {
        let applied = Applied { term, op };
        let known = *self.committed[group].entry(index).or_insert(applied);
        assert_eq!(known, applied, "SPLIT: two entries at index {index} of group {group}");
    }

    /// Acknowledges an operation to its client if this server is the one that it waits for.
    /// Returns false if not. Otherwise the client raises its token to `index`.
    pub(super) fn acknowledge(
        &mut self,
        op: Op,
        index: u64,
        server: usize,
        incarnation: u64,
    ) -> bool {
        let waits_here =
            |waiting: &Waiting| (waiting.server, waiting.incarnation) == (server, incarnation);
        if !self.waiting.get(&op.id).is_some_and(waits_here) {
            return false;
        }
        let Some(Waiting { op, group, .. }) = self.waiting.remove(&op.id) else { return false };
        self.histories[group][op.block].learn(op);
        self.raise_token(group, index);
        true
    }

    /// Whether the client of an operation still waits.
    pub(super) fn is_waiting(&self, op: u64) -> bool {
        self.waiting.contains_key(&op)
    }

    /// The applied index below which a replica must not answer the client.
    pub(super) fn token(&self, group: usize) -> u64 {
        self.tokens[group]
    }

    pub(super) fn raise_token(&mut self, group: usize, index: u64) {
        self.tokens[group] = self.tokens[group].max(index);
    }

    /// Checks what a client has read: the last acknowledged operation, or a later one of unknown
    /// outcome. Returns whether it was the latter.
    pub(super) fn read(&mut self, group: usize, block: usize, value: Value) -> bool {
        let history = &mut self.histories[group][block];
        if history.value() == value {
            return false;
        }
        // A value of a write is unique. Of several discards it may be any; the first one is the
        // least that the client knows now.
        let Some(seen) = history.unknown.iter().copied().find(|op| op.value() == value) else {
            panic!(
                "STALE or LOST: read {value:?} from block {block} of group {group}; \
                 acknowledged {:?}, unknown {:?}",
                history.acknowledged, history.unknown
            );
        };
        history.learn(seen);
        true
    }

    /// Checks that a replica serves exactly the committed log up to its applied index.
    pub(super) fn compare(
        &self,
        server: usize,
        group: usize,
        block: usize,
        (value, applied): (Value, u64),
    ) {
        let entries = self.committed[group].range(..=applied).rev();
        let expected = entries.filter_map(|(_, entry)| entry.op).find(|op| op.block == block);
        let expected = expected.and_then(Op::value);
        assert_eq!(
            value, expected,
            "NOT EXACT: block {block} of group {group} at server {server}, applied index {applied}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_three_ops() -> (Oracle, [Op; 3]) {
        let mut oracle = Oracle::new();
        let ops = [false, true, false].map(|discards| {
            let op = oracle.next_op(4, discards);
            oracle.proposed(0, op, 1, 0);
            op
        });
        (oracle, ops)
    }

    #[test]
    fn operations_of_unknown_outcome_may_be_read() {
        let (mut oracle, ops) = with_three_ops();
        assert!(!oracle.read(0, 4, None), "nothing is acknowledged yet");
        assert!(oracle.read(0, 4, ops[0].value()));
        assert!(oracle.read(0, 4, ops[2].value()));
        assert!(!oracle.read(0, 4, ops[2].value()));
    }

    #[test]
    #[should_panic(expected = "STALE or LOST")]
    fn an_acknowledged_operation_is_not_undone() {
        let (mut oracle, ops) = with_three_ops();
        assert!(oracle.acknowledge(ops[2], 9, 1, 0));
        assert_eq!(oracle.token(0), 9);
        oracle.read(0, 4, ops[0].value());
    }

    #[test]
    #[should_panic(expected = "STALE or LOST")]
    fn a_read_is_not_undone() {
        let (mut oracle, ops) = with_three_ops();
        assert!(oracle.acknowledge(ops[0], 9, 1, 0));
        assert!(oracle.read(0, 4, None), "the discard was seen");
        oracle.read(0, 4, ops[0].value());
    }

    #[test]
    fn only_the_server_that_a_client_waits_for_acknowledges() {
        let (mut oracle, ops) = with_three_ops();
        assert!(!oracle.acknowledge(ops[0], 9, 2, 0));
        assert!(!oracle.acknowledge(ops[0], 9, 1, 1), "a later incarnation");
        assert!(oracle.acknowledge(ops[0], 9, 1, 0));
        assert!(!oracle.acknowledge(ops[0], 9, 1, 0));
    }

    #[test]
    #[should_panic(expected = "SPLIT")]
    fn one_index_has_one_entry() {
        let (mut oracle, ops) = with_three_ops();
        oracle.applied(0, 7, 1, Some(ops[0]));
        oracle.applied(0, 7, 1, Some(ops[0]));
        oracle.applied(0, 7, 2, Some(ops[1]));
    }

    #[test]
    #[should_panic(expected = "NOT EXACT")]
    fn a_value_of_a_later_entry_is_not_exact() {
        let (mut oracle, ops) = with_three_ops();
        oracle.applied(0, 7, 1, Some(ops[0]));
        oracle.applied(0, 8, 1, Some(ops[1]));
        oracle.compare(0, 0, 4, (None, 6));
        oracle.compare(0, 0, 4, (ops[0].value(), 7));
        oracle.compare(0, 0, 4, (None, 8));
        oracle.compare(0, 0, 4, (ops[0].value(), 8));
    }
}
