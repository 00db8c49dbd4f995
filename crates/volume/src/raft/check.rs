//! The checks of a message that raft does not make. raft trusts its peers, and ends the process on
//! states that they cannot reach; a volume server has other groups to serve.
//! `docs/format/volume-wire.md`, section 9.

use raft::eraftpb::{Message, MessageType};

use crate::types::{Index, Term};

/// What is to be done with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// It is handed to raft.
    Step,
    /// It is dropped. raft repeats what matters.
    Drop,
    /// This replica has forgotten something that it acknowledged: it is lost.
    Lost(String),
    /// The log of this replica or of another one is wrong: the replica stops.
    Breach(String),
}

/// The state of a replica that a message is checked against.
pub(crate) struct Receiver<'a> {
    /// The term of an entry, as far as raft knows it. The log in memory is behind raft until raft
    /// has handed its entries out.
    pub(crate) term_at: &'a dyn Fn(Index) -> Option<Term>,
    /// The last index.
    pub(crate) last: Index,
    pub(crate) term: Term,
    pub(crate) commit: Index,
    pub(crate) is_leader: bool,
    /// The peer that leads in this term, as far as the replica knows; 0 for none.
    pub(crate) leader: u64,
    /// The snapshot whose blocks were pulled.
    pub(crate) pulled: Option<(Index, Term)>,
}

/// Checks a message from a peer of the group.
pub(crate) fn check(receiver: &Receiver<'_>, message: &Message) -> Check {
    if message.term == 0 {
        // raft treats it as a local message.
        return Check::Drop;
    }
    let is_current = message.term >= receiver.term.0;
    match message.get_msg_type() {
        MessageType::MsgAppend if is_current => append(receiver, message),
        MessageType::MsgHeartbeat if is_current && message.commit > receiver.last.0 => {
            // A leader states at most what this peer has acknowledged.
            let (commit, last) = (message.commit, receiver.last);
            Check::Lost(format!("the leader commits index {commit}, and the log ends at {last}"))
        }
        MessageType::MsgAppendResponse
            if !message.reject
                && receiver.is_leader
                && message.term == receiver.term.0
                && message.index > receiver.last.0 =>
        {
            Check::Drop
        }
        MessageType::MsgSnapshot => {
            let metadata = message.get_snapshot().get_metadata();
            let is_pulled = receiver.pulled == Some((Index(metadata.index), Term(metadata.term)));
            if is_pulled { Check::Step } else { Check::Drop }
        }
        MessageType::MsgTimeoutNow
            if message.term == receiver.term.0 && message.from != receiver.leader =>
        {
            Check::Drop
        }
        MessageType::MsgAppend
        | MessageType::MsgAppendResponse
        | MessageType::MsgRequestVote
        | MessageType::MsgRequestVoteResponse
        | MessageType::MsgRequestPreVote
        | MessageType::MsgRequestPreVoteResponse
        | MessageType::MsgHeartbeat
        | MessageType::MsgHeartbeatResponse
        | MessageType::MsgTimeoutNow => Check::Step,
        // Local messages, and those that a server never sends: ops are checked at the leader, and
        // reads need no message.
        MessageType::MsgHup
        | MessageType::MsgBeat
        | MessageType::MsgPropose
        | MessageType::MsgUnreachable
        | MessageType::MsgSnapStatus
        | MessageType::MsgCheckQuorum
        | MessageType::MsgTransferLeader
        | MessageType::MsgReadIndex
        | MessageType::MsgReadIndexResp => Check::Drop,
    }
}

/// Nothing at or below the commit index may be replaced.
fn append(receiver: &Receiver<'_>, message: &Message) -> Check {
    let commit = receiver.commit;
    let before = std::iter::once((message.index, message.log_term));
    let entries = message.entries.iter().map(|entry| (entry.index, entry.term));
    for (index, term) in before.chain(entries) {
        let index = Index(index);
        if index > commit {
            break;
        }
        if (receiver.term_at)(index).is_some_and(|known| known.0 != term) {
            return Check::Breach(format!(
                "an append has term {term} at index {index}, which is committed with another one"
            ));
        }
    }
    let committed_term = (receiver.term_at)(commit);
    if message.index >= commit.0 && committed_term.is_some_and(|term| message.log_term < term.0) {
        let (index, term) = (message.index, message.log_term);
        return Check::Breach(format!(
            "an append states term {term} at index {index}, below the term at commit index {commit}"
        ));
    }
    Check::Step
}

#[cfg(test)]
mod tests {
    use raft::eraftpb::Entry;

    use super::*;

    fn judge(message: &Message) -> Check {
        // Entries 3 to 6; the ones before are not in memory.
        let terms = [1, 1, 2, 2];
        let term_at = |index: Index| {
            let at = index.0.checked_sub(3)? as usize;
            terms.get(at).copied().map(Term)
        };
        let receiver = Receiver {
            term_at: &term_at,
            last: Index(6),
            term: Term(3),
            commit: Index(5),
            is_leader: message.get_msg_type() == MessageType::MsgAppendResponse,
            leader: 2,
            pulled: Some((Index(9), Term(3))),
        };
        check(&receiver, message)
    }

    fn message(kind: MessageType, term: u64) -> Message {
        Message { msg_type: kind, term, from: 2, ..Message::default() }
    }

    #[test]
    fn a_committed_entry_is_never_replaced() {
        let mut append = message(MessageType::MsgAppend, 3);
        (append.index, append.log_term) = (5, 2);
        assert_eq!(judge(&append), Check::Step);
        append.log_term = 1;
        assert!(matches!(judge(&append), Check::Breach(_)));
        append.term = 2;
        assert_eq!(judge(&append), Check::Step, "raft refuses an older term by itself");
        let mut append = message(MessageType::MsgAppend, 4);
        (append.index, append.log_term) = (4, 1);
        let entry = |index, term| Entry { index, term, ..Entry::default() };
        append.entries = vec![entry(5, 2), entry(6, 4)].into();
        assert_eq!(judge(&append), Check::Step, "entry 6 is not committed");
        append.entries = vec![entry(5, 4)].into();
        assert!(matches!(judge(&append), Check::Breach(_)));
        let mut append = message(MessageType::MsgAppend, 4);
        (append.index, append.log_term) = (40, 1);
        assert!(matches!(judge(&append), Check::Breach(_)), "terms do not go back");
    }

    #[test]
    fn a_leader_that_commits_more_than_the_log_has_proves_a_loss() {
        let mut heartbeat = message(MessageType::MsgHeartbeat, 3);
        heartbeat.commit = 6;
        assert_eq!(judge(&heartbeat), Check::Step);
        heartbeat.commit = 7;
        assert!(matches!(judge(&heartbeat), Check::Lost(_)));
    }

    #[test]
    fn messages_that_raft_cannot_take_are_dropped() {
        for kind in [
            MessageType::MsgHup,
            MessageType::MsgPropose,
            MessageType::MsgReadIndex,
            MessageType::MsgTransferLeader,
        ] {
            assert_eq!(judge(&message(kind, 3)), Check::Drop, "{kind:?}");
        }
        assert_eq!(judge(&message(MessageType::MsgAppend, 0)), Check::Drop);
        let mut response = message(MessageType::MsgAppendResponse, 3);
        response.index = 7;
        assert_eq!(judge(&response), Check::Drop);
        response.reject = true;
        assert_eq!(judge(&response), Check::Step);
        let mut timeout = message(MessageType::MsgTimeoutNow, 3);
        assert_eq!(judge(&timeout), Check::Step);
        timeout.from = 4;
        assert_eq!(judge(&timeout), Check::Drop, "it does not lead");
        let mut snapshot = message(MessageType::MsgSnapshot, 3);
        snapshot.mut_snapshot().mut_metadata().index = 9;
        assert_eq!(judge(&snapshot), Check::Drop, "of another term");
        snapshot.mut_snapshot().mut_metadata().term = 3;
        assert_eq!(judge(&snapshot), Check::Step);
    }
}
