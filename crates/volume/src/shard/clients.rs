//! Requests of clients: ops that the leader proposes and answers when they are applied, reads that
//! any exact replica answers, and the state of the server. `docs/format/volume-wire.md`, sections
//! 6, 7 and 12.

use std::ops::Bound;

use raft::eraftpb::{Entry, Message, MessageType};

use super::replica::{Replica, Waiting};
use super::{Apply, Output, Shard, ShardFailure};
use crate::op::{BlockOp, BlockRange, CHUNK_BLOCKS, Change, Op, OpError};
use crate::raft::entry_bytes;
use crate::request::{
    Answer, ErrorCode, MAX_READ_BLOCKS, MAX_STATUS_ROWS, OpAnswer, ReadAnswer, ReadRequest,
    ReplicaStatus, Request, RequestError, StatusAnswer,
};
use crate::state::{Applied, Refusal};
use crate::store::{BlocksRead, DamagedBlock, ReadId};
use crate::types::{GroupId, Index, Layer, PeerId, Position, VolumeId};

/// What a read of the store is for.
pub(super) enum Reading {
    /// A client, by the blocks of this replica.
    Client { ticket: u64, request: ReadRequest, peer: PeerId },
    /// A pull of another server.
    Source { stream: u64 },
}

/// An op that is applied and whose blocks are not durable in the store yet.
pub(super) struct DurableAnswer {
    group: GroupId,
    volume: VolumeId,
    layer: Layer,
    range: BlockRange,
    index: Index,
    ticket: u64,
    answer: Result<Answer, RequestError>,
}

/// Time after which a client tries again when the server is busy, in milliseconds.
const BUSY_MS: u32 = 10;

impl Shard {
    pub(super) fn client(&mut self, ticket: u64, request: Request, out: &mut Output) {
        let refused = match request {
            Request::Op { group, op } => self.op(group, op, ticket),
            Request::Read(request) => self.read(ticket, request),
            Request::Status { group, after } => {
                let status = self.status(group, after);
                out.answers.push((ticket, Ok(Answer::Status(status))));
                return;
            }
        };
        if let Err(error) = refused {
            self.refuse(ticket, error, out);
        }
    }

    pub(super) fn refuse(&mut self, ticket: u64, error: RequestError, out: &mut Output) {
        self.counters.busy += u64::from(error.code == ErrorCode::Busy);
        out.answers.push((ticket, Err(error)));
    }

    fn replica(&self, group: GroupId) -> Result<&Replica, RequestError> {
        let text = "no replica of the group is here";
        let unknown = || RequestError::new(ErrorCode::UnknownGroup, group, text);
        self.replicas.get(&group).ok_or_else(unknown)
    }

    // -- Ops

    /// Accepts an op, or delays it while a follower lags.
    fn op(&mut self, group: GroupId, op: Op, ticket: u64) -> Result<(), RequestError> {
        let replica = self.replica(group)?;
        replica.check_leads()?;
        replica.check_op(&op)?;
        match self.delays_ops() {
            true => self.delay(group, op, ticket),
            false => self.accept(group, &op, ticket),
        }
    }

    /// Accepts an op for the next proposal of its group.
    pub(super) fn accept(
        &mut self,
        group: GroupId,
        op: &Op,
        ticket: u64,
    ) -> Result<(), RequestError> {
        let error = |code, text: &str| RequestError::new(code, group, text);
        self.replica(group)?.check_leads()?;
        let entry =
            Entry { data: op.encode_head().into(), context: op.blocks(), ..Entry::default() };
        let bytes = entry_bytes(&entry);
        if self.ring_is_above(1, 2) {
            let text = "half of the write-ahead log is in use";
            return Err(RequestError { retry_after_ms: BUSY_MS, ..error(ErrorCode::Busy, text) });
        }
        let replica = self.replica(group)?;
        // Also those of earlier leaders: a follower accepts little more than a leader may have.
        let waits_bytes = replica.unapplied_bytes(replica.last_index()) + replica.proposals.bytes;
        if (waits_bytes > 0 && waits_bytes + bytes > self.options.proposal_bytes)
            || self.store.overlay_bytes() > self.options.overlay_bytes
        {
            let text = "too many ops of the group wait";
            return Err(RequestError { retry_after_ms: BUSY_MS, ..error(ErrorCode::Busy, text) });
        }
        self.check_space(group, op)?;
        let replica = self.replicas.get_mut(&group).expect("looked up above");
        self.accepted_bytes += bytes;
        replica.proposals.bytes += bytes;
        replica.proposals.entries.push(entry);
        replica.proposals.tickets.push(ticket);
        self.proposing.insert(group);
        Ok(())
    }

    /// Refuses an op that could leave this server or another one of the group without free slots:
    /// what is committed cannot be refused any more.
    fn check_space(&self, group: GroupId, op: &Op) -> Result<(), RequestError> {
        let Op::Blocks(op) = op else { return Ok(()) };
        if op.change == Change::Discard {
            return Ok(());
        }
        let missing = self.store.missing_slots(group, op.volume, op.layer, op.range);
        if missing == 0 {
            return Ok(());
        }
        let replica = &self.replicas[&group];
        let others = replica.view.peers.values().filter_map(|server| self.others.get(server));
        let others = others.map(|other| other.free_slots);
        let free = others.chain([self.store.free_slots()]).min().unwrap_or_default();
        // Ops that are proposed and not applied may take as many as they have parts.
        let proposed = replica.waiting.len() + replica.proposals.entries.len();
        let needed = missing + u32::try_from(proposed).unwrap_or(u32::MAX);
        if needed.saturating_add(self.options.reserved_slots) <= free {
            return Ok(());
        }
        let text = format!("{free} slots of the fullest store are free");
        Err(RequestError::new(ErrorCode::NoSpace, group, text))
    }

    /// Hands the accepted ops of each group to raft, as one message.
    pub(super) fn propose(&mut self, out: &mut Output) {
        for group in std::mem::take(&mut self.proposing) {
            let Some(replica) = self.replicas.get_mut(&group) else { continue };
            if !replica.proposals.entries.is_empty() {
                replica.propose(out);
                self.dirty.insert(group);
            }
        }
    }

    /// Answers an op that was applied here.
    pub(super) fn answer_applied(
        &mut self,
        group: GroupId,
        ticket: u64,
        op: &Op,
        index: Index,
        outcome: Applied,
        out: &mut Output,
    ) {
        let volume = match op {
            Op::Blocks(op) => op.volume,
            Op::Attach(attach) => attach.volume,
            Op::Noop { attachment } => attachment.unwrap_or_default().0,
            Op::Configuration(_) => VolumeId(0),
        };
        let epoch = self.replicas[&group].state.volume(volume).map(|state| state.epoch);
        let answer = match outcome {
            Applied::Refused(refusal) => Err(refused(group, refusal)),
            Applied::Effect | Applied::Duplicate => Ok(Answer::Op(OpAnswer {
                index,
                epoch: epoch.unwrap_or_default(),
                is_duplicate: outcome == Applied::Duplicate,
            })),
        };
        match (op, &answer) {
            (Op::Blocks(op), Ok(_)) if self.options.apply == Apply::Dsync => {
                let BlockOp { volume, layer, range, .. } = *op;
                let waiting = DurableAnswer { group, volume, layer, range, index, ticket, answer };
                self.durable_answers.push(waiting);
            }
            _ => out.answers.push((ticket, answer)),
        }
    }

    /// Answers the ops whose blocks have landed. Returns false if there is none.
    fn answer_durable(&mut self, out: &mut Output) -> bool {
        let Self { durable_answers, store, .. } = self;
        let before = durable_answers.len();
        durable_answers.retain_mut(|waiting| {
            let DurableAnswer { group, volume, layer, range, index, .. } = *waiting;
            if !store.has_landed(group, volume, layer, range, index) {
                return true;
            }
            out.answers.push((waiting.ticket, waiting.answer.clone()));
            false
        });
        durable_answers.len() < before
    }

    // -- Reads

    fn read(&mut self, ticket: u64, request: ReadRequest) -> Result<(), RequestError> {
        let ReadRequest { group, volume, layer, range, states_only, .. } = request;
        let replica = self.replica(group)?;
        replica.check_read(&request)?;
        let peer = replica.peer;
        let id = self.reading(Reading::Client { ticket, request, peer });
        self.store.read(id, group, volume, layer, range, states_only);
        Ok(())
    }

    pub(super) fn reading(&mut self, reading: Reading) -> ReadId {
        let id = ReadId(self.next_read);
        self.next_read += 1;
        self.reads.insert(id, reading);
        id
    }

    /// Takes what the store's device has completed. Returns false if there is nothing.
    pub(super) fn take_landed(&mut self, out: &mut Output) -> Result<bool, ShardFailure> {
        let mut is_busy = self.store.take_completions()?;
        let mut reads = Vec::new();
        self.store.take_reads(&mut reads);
        for (id, result) in reads {
            is_busy = true;
            match self.reads.remove(&id) {
                Some(Reading::Client { ticket, request, peer }) => {
                    let answer = self.answer_read(&request, peer, result);
                    self.counters.reads += u64::from(answer.is_ok());
                    out.answers.push((ticket, answer));
                }
                Some(Reading::Source { stream }) => self.source_read(stream, result, out),
                None => {}
            }
        }
        is_busy |= self.answer_durable(out);
        Ok(is_busy)
    }

    /// Answers a read whose blocks are there. The replica must still be exact, since an install may
    /// have begun; the blocks may be as new as what it has applied by now.
    fn answer_read(
        &self,
        request: &ReadRequest,
        peer: PeerId,
        result: Result<BlocksRead, DamagedBlock>,
    ) -> Result<Answer, RequestError> {
        let group = request.group;
        let replica = self.replica(group)?;
        replica.check_read(request)?;
        if replica.peer != peer {
            let text = "the replica was replaced while its blocks were read";
            return Err(RequestError::new(ErrorCode::NotReady, group, text));
        }
        match result {
            Ok(BlocksRead { states, crcs, data }) => {
                let applied = replica.applied.index;
                Ok(Answer::Read(ReadAnswer { applied, states, crcs, data }))
            }
            Err(damaged) => Err(RequestError::new(ErrorCode::Damaged, group, damaged.to_string())),
        }
    }

    // -- Status

    fn status(&self, group: Option<GroupId>, after: GroupId) -> StatusAnswer {
        let stats = self.log.wal().stats();
        let range = match group {
            Some(group) => (Bound::Included(group), Bound::Included(group)),
            None => (Bound::Excluded(after), Bound::Unbounded),
        };
        let mut rows = self.replicas.range(range).map(|(_, replica)| replica.status());
        let replicas: Vec<ReplicaStatus> = rows.by_ref().take(MAX_STATUS_ROWS).collect();
        StatusAnswer {
            server: self.options.server,
            mark: self.log.wal().mark(),
            slots: self.store.slots(),
            free_slots: self.store.free_slots(),
            ring_bytes: stats.ring_bytes,
            ring_used_bytes: stats.used_bytes,
            checkpoint: self.store.checkpoint(),
            has_more: rows.next().is_some(),
            replicas,
        }
    }

    /// The state of a replica.
    pub fn replica_status(&self, group: GroupId) -> Option<ReplicaStatus> {
        self.replicas.get(&group).map(Replica::status)
    }
}

fn refused(group: GroupId, refusal: Refusal) -> RequestError {
    let (code, value) = match refusal {
        Refusal::Fenced(epoch) => (ErrorCode::Fenced, epoch.0),
        Refusal::NotAttached(epoch) => (ErrorCode::NotAttached, epoch.0),
    };
    RequestError { value, ..RequestError::new(code, group, refusal.to_string()) }
}

impl Replica {
    fn check_leads(&self) -> Result<(), RequestError> {
        if !self.takes_part() {
            let text = "the replica takes no part in its group";
            return Err(RequestError::new(ErrorCode::NotReady, self.group, text));
        }
        if !self.is_leader() {
            return Err(self.not_leader());
        }
        Ok(())
    }

    pub(super) fn not_leader(&self) -> RequestError {
        let leader = self.view.peers.get(&self.leader()).copied();
        let text = "the replica does not lead its group";
        RequestError { leader, ..RequestError::new(ErrorCode::NotLeader, self.group, text) }
    }

    /// Refuses what can never be accepted, and what no replica may decide after the commit.
    fn check_op(&self, op: &Op) -> Result<(), RequestError> {
        let error = |code, text: String| Err(RequestError::new(code, self.group, text));
        let Op::Blocks(BlockOp { volume, epoch, layer, range, .. }) = op else {
            return match op {
                Op::Configuration(_) => {
                    error(ErrorCode::BadRequest, "clients do not change configurations".to_owned())
                }
                _ => Ok(()),
            };
        };
        if !self.view.has(range) || *layer != Layer(0) {
            let text = format!("chunk {} and layer {layer} are not of this group", range.chunk);
            return error(ErrorCode::BadRequest, text);
        }
        if let Err(OpError::Checksum { block }) = op.verify() {
            return error(ErrorCode::BadChecksum, format!("block {block} has another checksum"));
        }
        // A higher epoch is decided when the op is applied: the attachment may not be applied yet.
        match self.state.volume(*volume) {
            Some(state) if *epoch < state.epoch => {
                Err(refused(self.group, Refusal::Fenced(state.epoch)))
            }
            _ => Ok(()),
        }
    }

    /// Hands the accepted ops to raft, as one message.
    fn propose(&mut self, out: &mut Output) {
        let proposals = std::mem::take(&mut self.proposals);
        let (first, term) = (self.last_index().0 + 1, self.term());
        let message = Message {
            msg_type: MessageType::MsgPropose,
            from: self.peer.0,
            entries: proposals.entries.into(),
            ..Message::default()
        };
        if self.is_installing() || self.raft.step(message).is_err() {
            for ticket in proposals.tickets {
                out.answers.push((ticket, Err(self.not_leader())));
            }
            return;
        }
        for (index, ticket) in (first..).zip(proposals.tickets) {
            self.waiting.insert(Index(index), Waiting { term, ticket });
        }
    }

    /// The ticket of the client that waits for an entry, which is applied now. If another entry is
    /// at its index, the client is refused.
    pub(super) fn answered(&mut self, at: Position, out: &mut Output) -> Option<u64> {
        let waiting = self.waiting.remove(&at.index)?;
        if waiting.term == at.term {
            return Some(waiting.ticket);
        }
        out.answers.push((waiting.ticket, Err(self.not_leader())));
        None
    }

    /// Refuses all clients that wait, since the replica does not lead any more. Copies that they
    /// send elsewhere have their effect once.
    pub(super) fn refuse_waiting(&mut self, out: &mut Output) {
        let proposed = std::mem::take(&mut self.proposals).tickets;
        let waiting = std::mem::take(&mut self.waiting).into_values();
        for ticket in waiting.map(|waiting| waiting.ticket).chain(proposed) {
            out.answers.push((ticket, Err(self.not_leader())));
        }
    }

    /// Refuses a read that this replica must not answer now.
    fn check_read(&self, request: &ReadRequest) -> Result<(), RequestError> {
        let ReadRequest { epoch, token, volume, layer, range, states_only, .. } = request;
        let error = |code, text: String| RequestError::new(code, self.group, text);
        if !self.is_exact() {
            return Err(error(ErrorCode::NotReady, "the replica is not exact".to_owned()));
        }
        let applied = self.applied.index;
        if applied < *token {
            let text = format!("index {applied} is applied, and the token is {token}");
            return Err(RequestError { value: applied.0, ..error(ErrorCode::Behind, text) });
        }
        let ends = u32::from(range.first) + u32::from(range.blocks);
        let is_valid = self.view.has(range)
            && *layer == Layer(0)
            && range.blocks > 0
            && ends <= u32::from(CHUNK_BLOCKS)
            && (*states_only || range.blocks <= MAX_READ_BLOCKS);
        if !is_valid {
            return Err(error(
                ErrorCode::BadRequest,
                "the blocks are not of this group".to_owned(),
            ));
        }
        let known = self.state.volume(*volume).map(|state| state.epoch).unwrap_or_default();
        match epoch.0 {
            0 => Ok(()),
            _ if *epoch < known => Err(refused(self.group, Refusal::Fenced(known))),
            _ if *epoch > known => Err(refused(self.group, Refusal::NotAttached(known))),
            _ => Ok(()),
        }
    }

    pub(super) fn status(&self) -> ReplicaStatus {
        let leader = self.leader();
        ReplicaStatus {
            group: self.group,
            peer: self.peer,
            leader,
            leader_server: self.view.peers.get(&leader).copied(),
            role: self.role(),
            state: self.replica_state(),
            term: self.term(),
            last: self.last_index(),
            commit: self.committed(),
            applied: self.applied.index,
            durable_commit: self.durable_commit,
            base: self.base,
            barrier: if self.applied.index >= self.barrier { Index(0) } else { self.barrier },
        }
    }
}
