//! A model of groups on three servers, with the replicated state of real groups. A group's log is
//! one sequence; what raft does shows as proposals that are lost or committed after a change of the
//! leader, servers that believe themselves leaders, and replicas that lag.

use std::collections::BTreeMap;

use alluvium_device::sim::Random;
use bytes::{Bytes, BytesMut};

use crate::gateway::types::SendId;
use crate::op::{BLOCK_BYTES, BlockOp, BlockRange, Change, Op};
use crate::request::{
    Answer, BlockState, ErrorCode, OpAnswer, ReadAnswer, ReadRequest, RequestError,
};
use crate::state::{Applied, GroupState, Refusal};
use crate::types::{AttachEpoch, GroupId, Index, ServerId, VolumeId};

pub(super) const SERVERS: [ServerId; 3] = [ServerId(1), ServerId(2), ServerId(3)];

/// A sending of one of the sessions of a run.
pub(super) type Origin = (usize, SendId);
/// An outcome that travels to a session.
pub(super) type Outcome = (Origin, Result<Answer, RequestError>);
/// A block of a volume: chunk and block in it.
pub(super) type Place = (u32, u16);

/// A proposal. `answers` is false when the server that would answer it no longer leads.
#[derive(Clone, Debug)]
pub(super) struct Proposal {
    pub(super) op: Op,
    pub(super) origin: Option<Origin>,
    answers: bool,
}

/// What a replica has applied.
#[derive(Clone, Debug, Default)]
pub(super) struct Replica {
    pub(super) applied: usize,
    state: GroupState,
    blocks: BTreeMap<Place, Option<Bytes>>,
    pub(super) is_exact: bool,
    /// The leader that it follows, or itself.
    pub(super) believed: Option<ServerId>,
    /// Proposals, if it believes itself the leader.
    pub(super) proposals: Vec<Proposal>,
}

impl Replica {
    fn apply(&mut self, op: &Op) -> Applied {
        self.applied += 1;
        let applied = self.state.apply(op);
        if let (Applied::Effect, Op::Blocks(op)) = (applied, op) {
            for (place, content) in contents(op) {
                match content {
                    Some(content) => self.blocks.insert(place, content),
                    None => self.blocks.remove(&place),
                };
            }
        }
        applied
    }

    fn epoch(&self, volume: VolumeId) -> AttachEpoch {
        let state = self.state.volumes().find(|state| state.volume == volume);
        state.map_or(AttachEpoch(0), |state| state.epoch)
    }
}

/// What an op makes of each block: `None` removes it, `Some(None)` is zeros that keep their space.
pub(super) fn contents(op: &BlockOp) -> Vec<(Place, Option<Option<Bytes>>)> {
    let BlockRange { chunk, first, blocks } = op.range;
    let content = |at: u16| match &op.change {
        Change::Zero => Some(None),
        Change::Discard => None,
        Change::Write { data, .. } => {
            let at = usize::from(at) * BLOCK_BYTES;
            Some(Some(data.slice(at..at + BLOCK_BYTES)))
        }
    };
    (0..blocks).map(|at| ((chunk.0, first + at), content(at))).collect()
}

/// A group on the three servers.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) group: GroupId,
    pub(super) log: Vec<Op>,
    pub(super) replicas: BTreeMap<ServerId, Replica>,
    pub(super) leader: ServerId,
}

/// An op that was committed, with its effect, its index and its sender.
#[derive(Debug)]
pub(super) struct Committed {
    pub(super) op: Op,
    pub(super) origin: Option<Origin>,
    pub(super) applied: Applied,
    pub(super) index: Index,
}

impl Cluster {
    pub(super) fn new(group: GroupId, state: &GroupState, leader: ServerId) -> Self {
        let replica = Replica {
            state: state.clone(),
            is_exact: true,
            believed: Some(leader),
            ..Replica::default()
        };
        let replicas = SERVERS.map(|server| (server, replica.clone())).into();
        Self { group, log: Vec::new(), replicas, leader }
    }

    fn replica(&mut self, server: ServerId) -> &mut Replica {
        self.replicas.get_mut(&server).expect("there are three servers")
    }

    /// Takes an op from a client. An answer is for errors only.
    pub(super) fn propose(
        &mut self,
        server: ServerId,
        op: Op,
        origin: Origin,
    ) -> Option<RequestError> {
        let group = self.group;
        let replica = self.replica(server);
        if replica.believed != Some(server) {
            let leader = replica.believed;
            let error = RequestError::new(ErrorCode::NotLeader, group, "");
            return Some(RequestError { leader, ..error });
        }
        if let Op::Blocks(op) = &op
            && op.epoch < replica.epoch(op.volume)
        {
            return Some(RequestError::new(ErrorCode::Fenced, group, ""));
        }
        replica.proposals.push(Proposal { op, origin: Some(origin), answers: true });
        None
    }

    /// The leader commits its first proposal and answers it.
    pub(super) fn commit(&mut self) -> Option<(Committed, Option<Outcome>)> {
        let (group, leader) = (self.group, self.leader);
        self.apply(leader, usize::MAX);
        if self.replica(leader).proposals.is_empty() {
            return None;
        }
        let Proposal { op, origin, answers } = self.replica(leader).proposals.remove(0);
        self.log.push(op.clone());
        let applied = self.replica(leader).apply(&op);
        let index = Index(self.log.len() as u64);
        let volume = match &op {
            Op::Blocks(op) => op.volume,
            Op::Attach(attach) => attach.volume,
            _ => unreachable!("not sent here"),
        };
        let epoch = self.replica(leader).epoch(volume);
        let error = |code, epoch: AttachEpoch| {
            Err(RequestError { value: epoch.0, ..RequestError::new(code, group, "") })
        };
        let result = match applied {
            Applied::Effect | Applied::Duplicate => {
                let is_duplicate = applied == Applied::Duplicate;
                Ok(Answer::Op(OpAnswer { index, epoch, is_duplicate }))
            }
            Applied::Refused(Refusal::Fenced(epoch)) => error(ErrorCode::Fenced, epoch),
            Applied::Refused(Refusal::NotAttached(epoch)) => error(ErrorCode::NotAttached, epoch),
        };
        let outcome = origin.filter(|_| answers).map(|origin| (origin, result));
        Some((Committed { op, origin, applied, index }, outcome))
    }

    /// A replica applies up to `count` committed entries.
    pub(super) fn apply(&mut self, server: ServerId, count: usize) {
        let Self { log, replicas, .. } = self;
        let replica = replicas.get_mut(&server).expect("there are three servers");
        for op in log[replica.applied..].iter().take(count) {
            replica.apply(op);
        }
    }

    /// Another server leads. The proposals of the former leader are lost, or are committed later;
    /// some are answered with an error meanwhile.
    pub(super) fn elect(&mut self, leader: ServerId, random: &mut Random) -> Vec<Outcome> {
        if leader == self.leader {
            return Vec::new();
        }
        let mut outcomes = Vec::new();
        let former = std::mem::replace(&mut self.leader, leader);
        for mut proposal in std::mem::take(&mut self.replica(former).proposals) {
            if let Some(origin) = proposal.origin.filter(|_| proposal.answers && random.chance(0.7))
            {
                outcomes.push((origin, Err(self.not_leader(random.chance(0.5)))));
            }
            proposal.answers = false;
            if random.chance(0.5) {
                self.replica(leader).proposals.push(proposal);
            }
        }
        if random.chance(0.5) {
            self.replica(former).believed = None;
        }
        // What it got while it only believed to lead is lost.
        self.replica(leader).proposals.retain(|proposal| !proposal.answers);
        self.replica(leader).believed = Some(leader);
        outcomes
    }

    /// A server learns which one leads. What it took as a leader that it is not is lost.
    pub(super) fn learn(&mut self, server: ServerId, random: &mut Random) -> Vec<Outcome> {
        let leader = self.leader;
        if server == leader {
            return Vec::new();
        }
        self.replica(server).believed = Some(leader);
        let lost = std::mem::take(&mut self.replica(server).proposals);
        let origins = lost.into_iter().filter_map(|proposal| proposal.origin);
        origins
            .filter(|_| random.chance(0.8))
            .map(|origin| (origin, Err(self.not_leader(true))))
            .collect()
    }

    fn not_leader(&self, with_hint: bool) -> RequestError {
        let leader = with_hint.then_some(self.leader);
        RequestError { leader, ..RequestError::new(ErrorCode::NotLeader, self.group, "") }
    }

    /// Answers a read by the rule of `docs/format/volume-wire.md`, section 12. Entries may be
    /// applied while it goes on.
    pub(super) fn read(
        &mut self,
        server: ServerId,
        read: ReadRequest,
        random: &mut Random,
    ) -> Result<Answer, RequestError> {
        let group = self.group;
        let error = |code| Err(RequestError::new(code, group, ""));
        let replica = self.replica(server);
        if !replica.is_exact {
            return error(ErrorCode::NotReady);
        }
        if (replica.applied as u64) < read.token.0 {
            return error(ErrorCode::Behind);
        }
        match read.epoch.cmp(&replica.epoch(read.volume)) {
            std::cmp::Ordering::Less => return error(ErrorCode::Fenced),
            std::cmp::Ordering::Greater => return error(ErrorCode::NotAttached),
            std::cmp::Ordering::Equal => {}
        }
        let mut states = Vec::new();
        let (mut crcs, mut data) = (Vec::new(), BytesMut::new());
        for at in 0..read.range.blocks {
            if random.chance(0.1) {
                self.apply(server, 1);
            }
            let content =
                &self.replicas[&server].blocks.get(&(read.range.chunk.0, read.range.first + at));
            states.push(match content {
                None => BlockState::Absent,
                Some(None) => BlockState::Zeros,
                Some(Some(_)) => BlockState::Data,
            });
            if let Some(Some(content)) = content
                && !read.states_only
            {
                crcs.push(crc32c::crc32c(content));
                data.extend_from_slice(content);
            }
        }
        if self.replica(server).epoch(read.volume) != read.epoch {
            return error(ErrorCode::Fenced);
        }
        let applied = Index(self.replica(server).applied as u64);
        Ok(Answer::Read(ReadAnswer { applied, states, crcs, data: data.freeze() }))
    }
}
