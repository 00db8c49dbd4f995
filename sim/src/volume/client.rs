//! The gateways: one attachment of each volume counts, and older ones go on for a while. They
//! number their ops, send them again until they are answered, and lock their ranges
//! (`docs/format/volume-wire.md`, sections 6, 10 and 12).

use std::collections::{BTreeMap, BTreeSet};

use alluvium_volume::{
    Answer, Attach, AttachEpoch, BLOCK_BYTES, BlockOp, BlockRange, BlockState, Change, ErrorCode,
    GroupId, Index, Layer, Op, ReadAnswer, ReadRequest, Request, RequestError, Sequence, VolumeId,
};

use super::blocks::{BLOCKS, Value, blocks_of, data_of, range_from, value_of};
use super::environment::Environment;
use super::mutation::Mutation;
use super::network::ClientMessage;
use super::{GROUPS, SERVERS, group_id, volume_id};

/// Ops that a gateway has outstanding at most.
const OUTSTANDING: usize = 6;

/// An op that is not completed.
struct Outstanding {
    range: BlockRange,
    change: Change,
}

/// An attachment of a volume.
struct Gateway {
    group: usize,
    epoch: u64,
    nonce: u32,
    is_attached: bool,
    is_fenced: bool,
    next: u64,
    outstanding: BTreeMap<u64, Outstanding>,
    /// Ranges of ops that were reported as failed, by number: locked until the floor has passed.
    failed: BTreeMap<u64, BlockRange>,
    token: u64,
    /// The server that has answered last.
    leader: usize,
}

/// What a request is for.
#[derive(Clone, Copy)]
enum Sent {
    Attach {
        gateway: usize,
    },
    Op {
        gateway: usize,
        number: u64,
    },
    Read {
        gateway: usize,
        block: usize,
        blocks: usize,
        from: [u64; BLOCKS],
    },
    /// A read without an attachment, to compare a replica with the log.
    Compare {
        server: usize,
        group: usize,
        block: usize,
        applied: u64,
    },
}

/// All gateways.
pub(super) struct Clients {
    gateways: Vec<Gateway>,
    /// The gateway that counts, by group.
    current: [usize; GROUPS],
    sent: BTreeMap<u64, Sent>,
    next_ticket: u64,
    next_op: u64,
}

impl Gateway {
    fn new(group: usize, epoch: u64, nonce: u32, is_attached: bool) -> Self {
        Self {
            group,
            epoch,
            nonce,
            is_attached,
            is_fenced: false,
            next: 1,
            outstanding: BTreeMap::new(),
            failed: BTreeMap::new(),
            token: 0,
            leader: 0,
        }
    }

    /// The lowest number that is not completed.
    fn floor(&self) -> u64 {
        self.outstanding.first_key_value().map_or(self.next, |(number, _)| *number)
    }

    fn is_locked(&self, range: &BlockRange, mutation: Mutation) -> bool {
        let wanted: BTreeSet<usize> = blocks_of(range).collect();
        let meets = |other: &BlockRange| blocks_of(other).any(|block| wanted.contains(&block));
        let in_flight = self.outstanding.values().any(|op| meets(&op.range));
        let failed = self.failed.values().any(meets);
        (in_flight && mutation != Mutation::NoRangeLock)
            || (failed && mutation != Mutation::FailedOpReleased)
    }

    fn op(&self, number: u64) -> Option<Op> {
        let Outstanding { range, change } = self.outstanding.get(&number)?;
        Some(Op::Blocks(BlockOp {
            volume: volume_id(self.group),
            epoch: AttachEpoch(self.epoch),
            layer: Layer(0),
            number: Sequence(number),
            floor_distance: (number - self.floor()) as u32,
            range: *range,
            change: change.clone(),
        }))
    }

    /// A number is completed: ranges of failed ops below the floor are unlocked.
    fn completed(&mut self, number: u64) {
        self.outstanding.remove(&number);
        let floor = self.floor();
        self.failed.retain(|number, _| *number >= floor);
    }
}

impl Clients {
    pub(super) fn new(attached: [bool; GROUPS]) -> Self {
        let gateway = |(group, attached)| Gateway::new(group, 1, nonce(group, 1), attached);
        Self {
            gateways: attached.into_iter().enumerate().map(gateway).collect(),
            current: std::array::from_fn(|group| group),
            sent: BTreeMap::new(),
            next_ticket: 0,
            next_op: 0,
        }
    }

    fn current(&mut self, group: usize) -> &mut Gateway {
        &mut self.gateways[self.current[group]]
    }

    fn send(&mut self, to: usize, request: Request, what: Sent, environment: &mut Environment) {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        self.sent.insert(ticket, what);
        environment.network.clients.push(ClientMessage::Request { to, ticket, request });
    }

    // -- Ops

    /// A new op of a volume from block `first` on, or an attachment that is not acknowledged yet.
    pub(super) fn write(
        &mut self,
        group: usize,
        first: usize,
        only_discards: bool,
        environment: &mut Environment,
    ) {
        let mutation = environment.mutation;
        let random = &mut environment.random;
        let count = 1 + random.index(3);
        let kind = if only_discards { 0 } else { random.below(20) };
        let at = self.current[group];
        if !self.gateways[at].is_attached {
            self.attach(at, environment);
            return;
        }
        let (range, blocks) = range_from(first, count);
        self.next_op += 1;
        let change = match kind {
            0..2 => Change::Discard,
            2 => Change::Zero,
            _ => {
                let data = data_of(self.next_op, blocks);
                let crcs = data.chunks(BLOCK_BYTES).map(crc32c::crc32c).collect();
                Change::Write { crcs, data }
            }
        };
        let gateway = &mut self.gateways[at];
        if gateway.outstanding.len() >= OUTSTANDING || gateway.is_locked(&range, mutation) {
            return;
        }
        let number = gateway.next;
        gateway.next += 1;
        gateway.outstanding.insert(number, Outstanding { range, change });
        self.send_op(at, number, None, environment);
    }

    fn attach(&mut self, at: usize, environment: &mut Environment) {
        let Gateway { group, epoch, nonce, leader, .. } = self.gateways[at];
        let op = Op::Attach(Attach {
            volume: volume_id(group),
            epoch: AttachEpoch(epoch),
            parent: None,
            gateway: None,
            nonce,
        });
        let random = &mut environment.random;
        let to = if random.chance(0.5) { leader } else { random.index(SERVERS) };
        let request = Request::Op { group: group_id(group), op };
        self.send(to, request, Sent::Attach { gateway: at }, environment);
    }

    fn send_op(
        &mut self,
        at: usize,
        number: u64,
        to: Option<usize>,
        environment: &mut Environment,
    ) {
        let gateway = &self.gateways[at];
        let Some(op) = gateway.op(number) else { return };
        let to = to.unwrap_or(gateway.leader);
        let request = Request::Op { group: group_id(gateway.group), op };
        self.send(to, request, Sent::Op { gateway: at, number }, environment);
    }

    /// A gateway, also an older one, sends something again that has no answer.
    pub(super) fn retry(&mut self, environment: &mut Environment) {
        let random = &mut environment.random;
        let at = match random.chance(0.8) {
            true => self.current[random.index(GROUPS)],
            false => random.index(self.gateways.len()),
        };
        self.retry_of(at, environment);
    }

    /// The gateway of a group sends something again.
    pub(super) fn retry_group(&mut self, group: usize, environment: &mut Environment) {
        self.retry_of(self.current[group], environment);
    }

    fn retry_of(&mut self, at: usize, environment: &mut Environment) {
        let random = &mut environment.random;
        let gateway = &self.gateways[at];
        if gateway.is_fenced {
            return;
        }
        // An attachment is also sent again when it is acknowledged.
        if !gateway.is_attached || random.chance(0.05) {
            self.attach(at, environment);
            return;
        }
        let outstanding = gateway.outstanding.len();
        if outstanding == 0 {
            return;
        }
        let number = *gateway.outstanding.keys().nth(random.index(outstanding)).expect("counted");
        let to = random.chance(0.5).then(|| random.index(SERVERS));
        self.send_op(at, number, to, environment);
    }

    /// A gateway reports an op as failed. Its range stays locked until the floor has passed it.
    pub(super) fn give_up(&mut self, group: usize, environment: &mut Environment) {
        let random = &mut environment.random;
        let gateway = self.current(group);
        let outstanding = gateway.outstanding.len();
        if outstanding == 0 {
            return;
        }
        let number = *gateway.outstanding.keys().nth(random.index(outstanding)).expect("counted");
        let range = gateway.outstanding[&number].range;
        gateway.failed.insert(number, range);
        gateway.completed(number);
        environment.outcome.given_up += 1;
    }

    /// Another process attaches a volume. The older one goes on for a while.
    pub(super) fn take_over(&mut self, group: usize, environment: &mut Environment) {
        let epoch = self.current(group).epoch + 1;
        let mut gateway = Gateway::new(group, epoch, nonce(group, epoch), false);
        gateway.leader = self.current(group).leader;
        self.current[group] = self.gateways.len();
        self.gateways.push(gateway);
        environment.outcome.attachments += 1;
        environment.trace.event("attach", &[("group", group as u64), ("epoch", epoch)]);
        self.attach(self.current[group], environment);
    }

    // -- Reads

    /// A client reads some blocks from a server.
    pub(super) fn read(&mut self, to: usize, group: usize, environment: &mut Environment) {
        let block = environment.random.index(BLOCKS);
        let (range, blocks) = range_from(block, 3);
        let at = self.current[group];
        let gateway = &self.gateways[at];
        if !gateway.is_attached {
            return;
        }
        let token = match environment.mutation {
            Mutation::NoToken => 0,
            _ => gateway.token,
        };
        let mut from = [0; BLOCKS];
        for (at, from) in from.iter_mut().enumerate().skip(block).take(blocks) {
            *from = environment.oracle.seen(group, at);
        }
        let request = read_of(group, AttachEpoch(gateway.epoch), Index(token), range);
        self.send(to, request, Sent::Read { gateway: at, block, blocks, from }, environment);
    }

    /// A replica is compared with the log: the request arrives at once. Returns what to deliver.
    pub(super) fn compare(
        &mut self,
        server: usize,
        group: usize,
        block: usize,
        applied: u64,
    ) -> (u64, Request, usize) {
        let (range, blocks) = range_from(block, BLOCKS);
        self.next_ticket += 1;
        self.sent.insert(self.next_ticket, Sent::Compare { server, group, block, applied });
        (self.next_ticket, read_of(group, AttachEpoch(0), Index(0), range), blocks)
    }

    // -- Answers

    pub(super) fn answer(
        &mut self,
        ticket: u64,
        answer: Result<Answer, RequestError>,
        environment: &mut Environment,
    ) {
        let Some(sent) = self.sent.remove(&ticket) else { return };
        match (sent, answer) {
            (Sent::Op { gateway, number }, Ok(Answer::Op(answer))) => {
                let Environment { oracle, outcome, trace, .. } = environment;
                let Gateway { group, epoch, .. } = self.gateways[gateway];
                let gateway = &mut self.gateways[gateway];
                gateway.token = gateway.token.max(answer.index.0);
                let Some(op) = gateway.outstanding.get(&number) else { return };
                for block in blocks_of(&op.range) {
                    oracle.acknowledged(group, epoch, number, block);
                }
                outcome.acknowledged += 1;
                outcome.discards += u64::from(op.change == Change::Discard);
                outcome.duplicates += u64::from(answer.is_duplicate);
                trace.event("acknowledged", &[("op", number), ("index", answer.index.0)]);
                gateway.completed(number);
            }
            (Sent::Attach { gateway }, Ok(Answer::Op(answer))) => {
                let gateway = &mut self.gateways[gateway];
                let (group, epoch, nonce) = (gateway.group, gateway.epoch, gateway.nonce);
                environment.oracle.attachment_acknowledged(group, epoch, nonce);
                gateway.is_attached = true;
                gateway.token = gateway.token.max(answer.index.0);
            }
            (Sent::Read { gateway, block, blocks, from }, Ok(Answer::Read(answer))) => {
                let Environment { oracle, outcome, mutation, .. } = environment;
                let gateway = &mut self.gateways[gateway];
                let values = values(&answer);
                assert_eq!(values.len(), blocks, "a read has all of its blocks");
                for (block, value) in (block..).zip(values) {
                    let to = answer.applied.0;
                    oracle.read(gateway.group, block, value, from[block], to);
                }
                outcome.reads += 1;
                if *mutation != Mutation::TokenIgnoresReads {
                    gateway.token = gateway.token.max(answer.applied.0);
                }
            }
            (Sent::Compare { server, group, block, applied }, Ok(Answer::Read(answer))) => {
                for (block, value) in (block..).zip(values(&answer)) {
                    let span = (applied, answer.applied.0);
                    environment.oracle.compare(server, group, block, value, span);
                    environment.outcome.compared += 1;
                }
            }
            (sent, Err(error)) => self.refused(sent, &error, environment),
            (_, Ok(_)) => panic!("an answer of another kind"),
        }
    }

    fn refused(&mut self, sent: Sent, error: &RequestError, environment: &mut Environment) {
        assert!(error.code != ErrorCode::Damaged, "CORRUPT: {error}");
        let (Sent::Op { gateway, .. } | Sent::Attach { gateway } | Sent::Read { gateway, .. }) =
            sent
        else {
            return;
        };
        let gateway = &mut self.gateways[gateway];
        match error.code {
            ErrorCode::NotLeader => {
                gateway.leader = match error.leader {
                    Some(leader) => leader.0 as usize - 1,
                    None => (gateway.leader + 1) % SERVERS,
                };
            }
            ErrorCode::Fenced => {
                let is_current = error.value <= gateway.epoch;
                assert!(!is_current, "FENCED: the attachment that counts: {error}");
                gateway.is_fenced = true;
                environment.outcome.fenced += 1;
            }
            // The op is completed, with an error.
            ErrorCode::NoSpace => {
                if let Sent::Op { number, .. } = sent
                    && let Some(op) = gateway.outstanding.get(&number)
                {
                    gateway.failed.insert(number, op.range);
                    gateway.completed(number);
                }
                environment.outcome.no_space += 1;
            }
            ErrorCode::Busy
            | ErrorCode::NotReady
            | ErrorCode::Behind
            | ErrorCode::UnknownGroup
            | ErrorCode::NotAttached => {}
            _ => panic!("an unexpected error: {error}"),
        }
    }

    /// Whether the attachment that counts is acknowledged and has nothing outstanding.
    pub(super) fn is_idle(&self, group: usize) -> bool {
        let gateway = &self.gateways[self.current[group]];
        gateway.is_attached && gateway.outstanding.is_empty()
    }
}

fn nonce(group: usize, epoch: u64) -> u32 {
    group as u32 * 1000 + epoch as u32
}

/// The random number of the attachment with which a group begins.
pub(super) fn first_nonce(group: usize) -> u32 {
    nonce(group, 1)
}

fn read_of(group: usize, epoch: AttachEpoch, token: Index, range: BlockRange) -> Request {
    let (group, volume): (GroupId, VolumeId) = (group_id(group), volume_id(group));
    let (layer, states_only) = (Layer(0), false);
    Request::Read(ReadRequest { group, epoch, token, volume, layer, range, states_only })
}

fn values(answer: &ReadAnswer) -> Vec<Value> {
    let mut data = answer.data.chunks(BLOCK_BYTES);
    let mut crcs = answer.crcs.iter();
    let value = |state: &BlockState| {
        let block = match state {
            BlockState::Data => {
                let block = data.next().expect("a block with data has it");
                assert_eq!(crcs.next(), Some(&crc32c::crc32c(block)), "CORRUPT: an answer");
                block
            }
            _ => &[],
        };
        value_of(*state, block)
    };
    answer.states.iter().map(value).collect()
}
