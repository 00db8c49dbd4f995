//! Rules of a shard that need one server only. The campaign of `alluvium-sim` checks the others.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_wal::{FormatOptions, Options, Wal};
use raft::eraftpb::{Entry, Message, MessageType};
use uuid::Uuid;

use super::entries::encode;
use super::{
    Input, Notice, Opening, Output, Recovered, ServerState, Shard, ShardFailure, ShardOptions,
};
use crate::group::GroupView;
use crate::log::{Encoded, Install, LogWriter, Record};
use crate::messages::{
    PeerBody, PeerMessage, PullChunk, PullContent, PullFrame, PullItem, PullRequest,
};
use crate::op::{BLOCK_BYTES, BlockOp, BlockRange, CHUNK_BLOCKS, Change, Op};
use crate::request::{Answer, ErrorCode, Request, RequestError};
use crate::state::VolumeState;
use crate::store::{Owner, Store};
use crate::types::{
    AttachEpoch, ChunkIndex, GroupId, HardState, Index, Layer, PeerId, Position, Sequence,
    ServerId, Term, VolumeId,
};
use crate::window::Window;

pub(super) const GROUP: GroupId = GroupId(1);
const SERVER: ServerId = ServerId(1);
const VOLUME: VolumeId = VolumeId(1);
const RING_BYTES: u64 = 1 << 20;
const STORE_BYTES: u64 = 40 << 20;

/// This server's replica, and those of the two others.
pub(super) const PEER: PeerId = PeerId(1);
pub(super) const OTHERS: [PeerId; 2] = [PeerId(2), PeerId(3)];

fn view(peers: &[PeerId]) -> GroupView {
    let volume = VolumeState {
        volume: VOLUME,
        parent: None,
        epoch: AttachEpoch(1),
        nonce: 1,
        window: Some(Window::default()),
        dropped_layers: Vec::new(),
    };
    GroupView {
        region: 0,
        family: VOLUME,
        founders: peers.to_vec(),
        peers: peers.iter().map(|peer| (*peer, ServerId(peer.0 as u32))).collect(),
        volumes: vec![volume],
    }
}

pub(super) fn view_of_three() -> GroupView {
    view(&[PEER, OTHERS[0], OTHERS[1]])
}

/// A record with entries of term 1 up to `last`, of which those up to `commit` are committed.
fn entries(group: GroupId, last: u64, commit: u64) -> Encoded {
    entries_of(PEER, group, last, commit)
}

pub(super) fn entries_of(peer: PeerId, group: GroupId, last: u64, commit: u64) -> Encoded {
    let entries: Vec<Entry> =
        (1..=last).map(|index| Entry { index, term: 1, ..Entry::default() }).collect();
    let state = HardState { term: Term(1), vote: PeerId(0), commit: Index(commit) };
    encode(group, peer, state, Position::default(), entries.iter())
}

pub(super) struct Disks {
    pub(super) log: SimDisk,
    store: SimDisk,
}

impl Disks {
    /// The disks of a server whose log has some records.
    fn new(records: &[Encoded]) -> Self {
        Self::of(SERVER, records)
    }

    pub(super) fn of(server: ServerId, records: &[Encoded]) -> Self {
        let disk =
            |capacity_bytes| SimDisk::new(SimOptions { capacity_bytes, ..SimOptions::default() });
        let (log, store) = (disk(RING_BYTES + (64 << 10)), disk(STORE_BYTES));
        let header = Wal::format(&log.device(), &FormatOptions::default()).unwrap();
        let owner = Owner {
            wal_id: header.wal_id,
            store_id: Uuid::from_u128(1),
            server,
            cluster: "cluster".into(),
        };
        Store::format(&store.device(), owner, Some(STORE_BYTES), 0).unwrap();
        let (wal, _) = Wal::open(log.device(), &log_options(), None, &mut |_| Ok(())).unwrap();
        let writer = LogWriter::new(wal);
        for record in records {
            let placed = writer.append_now(record).unwrap().unwrap();
            writer.wal().wait_durable(placed.end).wait().unwrap();
        }
        Self { log, store }
    }

    /// Opens the server, of which the registry records that these replicas were created.
    fn open(&self, groups: impl IntoIterator<Item = GroupId>, view: &GroupView) -> Recovered {
        self.open_at(SERVER, PEER, groups, view, 0)
    }

    pub(super) fn open_at(
        &self,
        server: ServerId,
        peer: PeerId,
        groups: impl IntoIterator<Item = GroupId>,
        view: &GroupView,
        now: u64,
    ) -> Recovered {
        self.open_with(ShardOptions::new(server), peer, groups, view, now)
    }

    fn open_with(
        &self,
        options: ShardOptions,
        peer: PeerId,
        groups: impl IntoIterator<Item = GroupId>,
        view: &GroupView,
        now: u64,
    ) -> Recovered {
        let replicas: BTreeMap<_, _> =
            groups.into_iter().map(|group| (group, (peer, view.clone(), true))).collect();
        let opening = Opening {
            log: self.log.device(),
            log_options: log_options(),
            store: self.store.device(),
            store_id: Uuid::from_u128(1),
            cluster: "cluster".into(),
            replicas,
            options,
            now,
            unix_ms: 0,
            wake: Arc::new(|| {}),
        };
        Shard::open(opening, &mut || {}, &mut |_| Arc::new(|_, _| {})).unwrap()
    }
}

fn log_options() -> Options {
    Options {
        window_bytes: 480 << 10,
        block_bytes: 32 << 10,
        max_record_bytes: 100 << 10,
        ..Options::default()
    }
}

/// Hands inputs to a shard in one pass, and then waits until the log has everything.
fn turn(shard: &mut Shard, now: u64, inputs: impl IntoIterator<Item = Input>) -> Output {
    let mut inputs: VecDeque<Input> = inputs.into_iter().collect();
    let mut out = Output::default();
    loop {
        shard.turn(now, &mut inputs, &mut out).unwrap();
        let Some(offset) = shard.awaits_log() else { return out };
        shard.wal().wait_durable(offset).wait().unwrap();
    }
}

fn from_leader(group: GroupId, body: PeerBody) -> Input {
    let message = PeerMessage { group, from: OTHERS[0], to: PEER, body };
    Input::Peer { server: ServerId(OTHERS[0].0 as u32), message }
}

#[test]
fn a_record_of_an_install_does_not_bring_a_lost_replica_back() {
    let install =
        Install { group: GROUP, peer: PEER, barrier: Index(9), applied: Index(3), progress: None };
    // An entry that was committed is missing.
    let records = [entries(GROUP, 3, 5), Encoded::record(&Record::Install(install))];
    let Recovered { shard, notices, .. } = Disks::new(&records).open([GROUP], &view_of_three());
    assert!(matches!(notices[..], [Notice::Lost { group: GROUP, .. }]), "{notices:?}");
    assert_eq!(shard.replica_status(GROUP), None);
}

#[test]
fn a_damaged_sector_makes_the_replicas_lost() {
    let disks = Disks::new(&[entries(GROUP, 3, 3)]);
    disks.store.poke(1 << 20, &[1; 512]);
    let Recovered { shard, notices, .. } = disks.open([GROUP], &view_of_three());
    assert!(matches!(notices[..], [Notice::Lost { group: GROUP, .. }]), "{notices:?}");
    assert_eq!(shard.replica_status(GROUP), None);
}

/// A checkpoint waits for its record, and nothing else is appended that would show the failure.
#[test]
fn a_log_that_fails_under_the_record_of_a_checkpoint_ends_the_shard() {
    let disks = Disks::new(&[entries(GROUP, 3, 3)]);
    let mut shard = disks.open([GROUP], &view_of_three()).shard;
    turn(&mut shard, 0, []);
    disks.log.set_faults(Faults { write_error: 1.0, ..Faults::default() });
    let mut inputs = VecDeque::from([Input::Checkpoint]);
    let mut out = Output::default();
    while shard.awaits_log().is_none() {
        shard.turn(0, &mut inputs, &mut out).unwrap();
    }
    let record = shard.awaits_log().unwrap();
    shard.wal().wait_durable(record).wait().unwrap_err();
    let failure = shard.turn(0, &mut inputs, &mut out).unwrap_err();
    assert!(matches!(failure, ShardFailure::Log(_)), "{failure}");
}

/// The group comes back with another replica while records of the first one are on their way.
#[test]
fn what_the_log_has_of_a_replaced_replica_does_not_count_for_its_successor() {
    const SUCCESSOR: PeerId = PeerId(9);
    let disks = Disks::new(&[entries(GROUP, 3, 1)]);
    let mut shard = disks.open([GROUP], &view_of_three()).shard;
    turn(&mut shard, 0, []);
    disks.log.set_mode(Mode::Queued);
    let append = Message {
        msg_type: MessageType::MsgAppend,
        from: OTHERS[0].0,
        to: PEER.0,
        term: 2,
        index: 3,
        log_term: 1,
        commit: 3,
        entries: vec![Entry { index: 4, term: 2, ..Entry::default() }].into(),
        ..Message::default()
    };
    let mut out = Output::default();
    let append = from_leader(GROUP, PeerBody::Raft(Box::new(append)));
    shard.turn(0, &mut [append].into(), &mut out).unwrap();
    let mut successors = view_of_three();
    successors.peers.remove(&PEER);
    successors.peers.insert(SUCCESSOR, SERVER);
    let create = |peer: PeerId| Input::Create { group: GROUP, peer, view: successors.clone() };
    // One more that is replaced before its first record is durable.
    let mut inputs: VecDeque<_> = [
        Input::Remove { group: GROUP },
        create(PeerId(8)),
        Input::Remove { group: GROUP },
        create(SUCCESSOR),
    ]
    .into();
    shard.turn(0, &mut inputs, &mut out).unwrap();
    assert!(shard.awaits_log().is_some(), "the records are not durable");
    disks.log.set_mode(Mode::Immediate);
    disks.log.run_until_idle();
    let later = turn(&mut shard, 0, []);
    let status = shard.replica_status(GROUP).unwrap();
    assert_eq!((status.peer, status.durable_commit, status.last), (SUCCESSOR, Index(0), Index(0)));
    let created = Notice::Created { group: GROUP, peer: SUCCESSOR, is_recovered: false };
    assert_eq!(later.notices, [created]);
    assert!(out.messages.is_empty() && later.messages.is_empty(), "{later:?}");
}

#[test]
fn an_offer_that_is_not_needed_is_answered_with_the_commit_index() {
    let disks = Disks::new(&[entries(GROUP, 3, 3)]);
    let mut shard = disks.open([GROUP], &view_of_three()).shard;
    let offer = PeerBody::Offer { term: Term(2), applied: Index(3) };
    let out = turn(&mut shard, 0, [from_leader(GROUP, offer)]);
    let answers = out.messages.iter().filter_map(|(_, message)| match &message.body {
        PeerBody::Raft(message) => Some((message.get_msg_type(), message.index, message.reject)),
        _ => None,
    });
    let answers: Vec<_> = answers.collect();
    assert_eq!(answers, [(MessageType::MsgAppendResponse, 3, false)]);
    assert!(out.pulls.is_empty());
}

#[test]
fn a_pull_that_the_store_has_no_slots_for_does_not_complete() {
    let disks = Disks::new(&[entries(GROUP, 3, 3)]);
    let mut shard = disks.open([GROUP], &view_of_three()).shard;
    let offer = PeerBody::Offer { term: Term(1), applied: Index(9) };
    let out = turn(&mut shard, 0, [from_leader(GROUP, offer)]);
    let [(attempt, ..)] = out.pulls[..] else { panic!("{:?}", out.pulls) };
    let view = view_of_three();
    let at = Position { index: Index(9), term: Term(1) };
    let (conf, volumes) = (view.founders_conf(), view.volumes);
    // Each chunk takes 64 slots.
    let chunks = (0..4).map(|chunk| {
        let at = PullChunk { volume: VOLUME, layer: Layer(0), chunk: ChunkIndex(chunk) };
        PullItem { at, content: PullContent::Zeros { first: 0, blocks: CHUNK_BLOCKS } }
    });
    let frames = [
        PullFrame::Begin { at, source: OTHERS[0], conf, volumes, sends_everything: true },
        PullFrame::Batch { newest: Index(9), items: chunks.collect() },
        PullFrame::End,
    ];
    let frames = frames.map(|frame| Input::PullFrame { attempt, group: GROUP, frame });
    let out = turn(&mut shard, 0, frames);
    let is_pulled = |message: &PeerMessage| matches!(message.body, PeerBody::Pulled { .. });
    assert!(!out.messages.iter().any(|(_, message)| is_pulled(message)), "{:?}", out.messages);
    assert_eq!(out.cancelled, [attempt]);
}

/// Whether a source sends all blocks to a replica that has applied `since`.
fn sends_everything(shard: &mut Shard, since: u64) -> bool {
    let request =
        PullRequest { group: GROUP, target: OTHERS[0], since: Index(since), is_first: true };
    let out = turn(shard, 0, [Input::Pull { stream: since, request }]);
    match &out.frames[..] {
        [(stream, PullFrame::Begin { sends_everything, .. })] if *stream == since => {
            *sends_everything
        }
        frames => panic!("{frames:?}"),
    }
}

#[test]
fn a_source_sends_the_changed_blocks_until_it_pulls_itself() {
    let view = view_of_three();
    let disks = Disks::new(&[entries(GROUP, 5, 5)]);
    let mut shard = disks.open([GROUP], &view).shard;
    assert!(sends_everything(&mut shard, 5), "there was no checkpoint");
    // The pull begins one.
    for _ in 0..10 {
        turn(&mut shard, 0, []);
    }
    assert_eq!(shard.counters().checkpoints, 1);
    let check = |shard: &mut Shard| {
        let answers = [0, 4, 5, 9].map(|since| sends_everything(shard, since));
        assert_eq!(answers, [true, true, false, false], "the base of the checkpoint is 5");
    };
    check(&mut shard);
    drop(shard);
    let mut shard = disks.open([GROUP], &view).shard;
    check(&mut shard);
    // It begins to pull while a checkpoint is in progress, which makes no pair.
    shard.turn(0, &mut [Input::Checkpoint].into(), &mut Output::default()).unwrap();
    let offer = PeerBody::Offer { term: Term(1), applied: Index(9) };
    let out = turn(&mut shard, 0, [from_leader(GROUP, offer)]);
    let [(attempt, _, PullRequest { since, .. })] = out.pulls[..] else {
        panic!("{:?}", out.pulls)
    };
    assert_eq!(since, Index(5), "it pulls what has changed since");
    for _ in 0..10 {
        turn(&mut shard, 0, []);
    }
    assert!(sends_everything(&mut shard, 5));
    let at = Position { index: Index(9), term: Term(1) };
    let (conf, volumes) = (view.founders_conf(), view.volumes.clone());
    let frames = [
        PullFrame::Begin { at, source: OTHERS[0], conf, volumes, sends_everything: false },
        PullFrame::Batch { newest: Index(9), items: Vec::new() },
    ];
    turn(&mut shard, 0, frames.map(|frame| Input::PullFrame { attempt, group: GROUP, frame }));
    drop(shard);
    let mut shard = disks.open([GROUP], &view).shard;
    assert!(sends_everything(&mut shard, 5), "blocks may be too new");
}

#[test]
fn what_a_follower_accepts_of_a_group_in_one_pass_is_bounded() {
    accepts_a_bounded_burst(1);
}

#[test]
fn what_a_follower_accepts_of_all_groups_in_one_pass_is_bounded() {
    accepts_a_bounded_burst(24);
}

/// Checks a pass with 160 KiB of entries for each of some groups.
fn accepts_a_bounded_burst(groups: u64) {
    const ENTRY_BYTES: u64 = 8 << 10;
    let groups: Vec<GroupId> = (1..=groups).map(GroupId).collect();
    let records: Vec<Encoded> = groups.iter().map(|group| entries(*group, 1, 1)).collect();
    let disks = Disks::new(&records);
    let mut shard = disks.open(groups.clone(), &view_of_three()).shard;
    let append = |group: GroupId, index: u64| {
        let entry = Entry {
            index: index + 1,
            term: 1,
            data: vec![0; ENTRY_BYTES as usize].into(),
            ..Entry::default()
        };
        let message = Message {
            msg_type: MessageType::MsgAppend,
            from: OTHERS[0].0,
            to: PEER.0,
            term: 1,
            index,
            log_term: 1,
            commit: 1,
            entries: vec![entry].into(),
            ..Message::default()
        };
        from_leader(group, PeerBody::Raft(Box::new(message)))
    };
    let inputs = (1..=20).flat_map(|index| groups.iter().map(move |group| append(*group, index)));
    turn(&mut shard, 0, inputs.collect::<Vec<_>>());
    assert!(shard.counters().refused_appends > 0);
    for group in groups {
        // What a checkpoint carries forward.
        let last = shard.replica_status(group).unwrap().last.0;
        assert!(last * ENTRY_BYTES <= RING_BYTES / 16, "group {group} has {last} entries");
    }
    let used_bytes = shard.wal().stats().used_bytes;
    assert!(used_bytes <= RING_BYTES / 16 * 15, "{used_bytes} bytes");
}

#[test]
fn what_a_leader_accepts_in_one_pass_is_bounded() {
    let disks = Disks::new(&[entries(GROUP, 1, 1)]);
    let mut shard = disks.open([GROUP], &view(&[PEER])).shard;
    for tick in 1..=30 {
        turn(&mut shard, 100 * tick, []);
    }
    let out = turn(&mut shard, 3000, (1..=20).map(write));
    let refused = out.answers.iter().filter(|(_, answer)| is_busy(answer)).count();
    // 1/32 of the ring: three ops of 8 KiB and their heads.
    assert_eq!((refused, out.answers.len()), (17, 20), "{:?}", out.answers);
}

/// A write of 8 KiB.
pub(super) fn write(number: u64) -> Input {
    write_to(GROUP, number)
}

fn write_to(group: GroupId, number: u64) -> Input {
    let op = Op::Blocks(BlockOp {
        volume: VOLUME,
        epoch: AttachEpoch(1),
        layer: Layer(0),
        number: Sequence(number),
        floor_distance: 0,
        range: BlockRange { chunk: ChunkIndex(0), first: 2 * number as u16, blocks: 2 },
        change: Change::write(vec![0; 2 * BLOCK_BYTES].into()),
    });
    Input::Client { ticket: number, request: Request::Op { group, op } }
}

fn is_busy(answer: &Result<Answer, RequestError>) -> bool {
    answer.as_ref().is_err_and(|error| error.code == ErrorCode::Busy)
}

/// The groups of a [`Leader`].
const GROUPS: [GroupId; 2] = [GROUP, GroupId(2)];

/// A leader whose first follower has everything, and whose second one may lag.
struct Leader {
    shard: Shard,
    now: u64,
    /// Number of writes to each group.
    writes: [u64; 2],
    _disks: Disks,
}

impl Leader {
    /// The leader of two groups, with memory for eight writes.
    fn new() -> Self {
        Self::with(8 << 20)
    }

    fn with(proposal_bytes: usize) -> Self {
        let disks = Disks::new(&GROUPS.map(|group| entries(group, 1, 1)));
        let entry_cache_bytes = 70 << 10;
        let options =
            ShardOptions { entry_cache_bytes, proposal_bytes, ..ShardOptions::new(SERVER) };
        let shard = disks.open_with(options, PEER, GROUPS, &view_of_three(), 0).shard;
        let mut leader = Self { shard, now: 0, writes: [0; 2], _disks: disks };
        for tick in 1..=10 {
            turn(&mut leader.shard, 200 * tick, []);
        }
        leader.now = 2000;
        for group in GROUPS {
            for kind in
                [MessageType::MsgRequestPreVoteResponse, MessageType::MsgRequestVoteResponse]
            {
                leader.respond(group, OTHERS[0], kind, 0, 2);
            }
        }
        for other in OTHERS {
            leader.state(other, false);
            for group in GROUPS {
                leader.acknowledge(group, other);
            }
        }
        leader
    }

    /// A server states something of itself.
    fn state(&mut self, of: PeerId, is_stalled: bool) {
        let server = ServerId(of.0 as u32);
        let state = ServerState { free_slots: 10_000, is_stalled };
        turn(&mut self.shard, self.now, [Input::PeerState { server, state }]);
    }

    fn respond(
        &mut self,
        group: GroupId,
        from: PeerId,
        msg_type: MessageType,
        index: u64,
        term: u64,
    ) -> Output {
        let message =
            Message { msg_type, from: from.0, to: PEER.0, term, index, ..Message::default() };
        let body = PeerBody::Raft(Box::new(message));
        let message = PeerMessage { group, from, to: PEER, body };
        let server = ServerId(from.0 as u32);
        turn(&mut self.shard, self.now, [Input::Peer { server, message }])
    }

    /// A follower has all entries.
    fn acknowledge(&mut self, group: GroupId, follower: PeerId) -> Output {
        let last = self.shard.replica_status(group).unwrap().last.0;
        self.respond(group, follower, MessageType::MsgAppendResponse, last, 2)
    }

    fn write(&mut self) -> bool {
        self.write_to(0)
    }

    /// Writes with the first follower. Returns whether the leader has accepted the write, and does
    /// not delay it.
    fn write_to(&mut self, group: usize) -> bool {
        self.writes[group] += 1;
        let write = write_to(GROUPS[group], self.writes[group]);
        let last = self.last(group);
        let out = turn(&mut self.shard, self.now, [write]);
        assert!(out.answers.is_empty(), "{out:?}");
        if self.last(group) == last {
            return false;
        }
        let out = self.acknowledge(GROUPS[group], OTHERS[0]);
        assert!(matches!(out.answers[..], [.., (_, Ok(_))]), "{out:?}");
        true
    }

    fn last(&self, group: usize) -> Index {
        self.shard.replica_status(GROUPS[group]).unwrap().last
    }

    /// Writes until the leader delays one.
    fn write_until_delayed(&mut self) {
        // Half of the memory, and the write that exceeds it.
        let taken = (0..20).take_while(|_| self.write()).count();
        assert!((4..=6).contains(&taken), "{taken} writes");
    }

    /// Acknowledges what was delayed, and returns the tickets that are answered.
    fn delayed(&mut self) -> Vec<u64> {
        let out = self.acknowledge(GROUP, OTHERS[0]);
        assert!(out.answers.iter().all(|(_, answer)| answer.is_ok()), "{out:?}");
        out.answers.into_iter().map(|(ticket, _)| ticket).collect()
    }
}

#[test]
fn a_leader_delays_ops_for_a_follower_before_it_needs_all_blocks() {
    let mut leader = Leader::new();
    for _ in 0..3 {
        leader.write_until_delayed();
        assert!(!leader.write(), "an op is not accepted before an earlier one");
        let delayed = [leader.writes[0] - 1, leader.writes[0]];
        // The follower can be brought up with entries.
        leader.acknowledge(GROUP, OTHERS[1]);
        assert_eq!(leader.delayed(), delayed);
        leader.acknowledge(GROUP, OTHERS[1]);
    }
    for _ in 0..20 {
        assert!(leader.write());
        leader.acknowledge(GROUP, OTHERS[1]);
    }
}

#[test]
fn a_leader_does_not_wait_for_a_follower_that_does_not_catch_up() {
    let mut leader = Leader::new();
    leader.write_until_delayed();
    leader.now += 1999;
    assert!(!leader.write());
    leader.now += 1;
    assert!((0..20).all(|_| leader.write()));
    // It has caught up by itself, and may be waited for again.
    leader.acknowledge(GROUP, OTHERS[1]);
    leader.write_until_delayed();
}

#[test]
fn a_leader_does_not_wait_for_a_server_without_a_connection() {
    let mut leader = Leader::new();
    leader.write_until_delayed();
    let down = Input::PeerDown { server: ServerId(OTHERS[1].0 as u32), is_gone: false };
    turn(&mut leader.shard, leader.now, [down]);
    assert_eq!(leader.delayed().len(), 1);
    assert!((0..20).all(|_| leader.write()));
}

#[test]
fn a_leader_does_not_wait_for_a_server_whose_device_is_stalled() {
    let mut leader = Leader::new();
    leader.write_until_delayed();
    leader.state(OTHERS[1], true);
    assert_eq!(leader.delayed().len(), 1);
    assert!((0..20).all(|_| leader.write()));
}

/// Entries that have left memory do not count as received.
#[test]
fn a_leader_waits_once_for_a_server_that_does_not_catch_up_in_any_group() {
    let mut leader = Leader::new();
    leader.write_until_delayed();
    leader.now += 2000;
    assert!((0..20).all(|_| leader.write()), "the entry leaves memory");
    assert!((0..20).all(|_| leader.write_to(1)));
    // Neither does it count that the server was away.
    let down = Input::PeerDown { server: ServerId(OTHERS[1].0 as u32), is_gone: false };
    turn(&mut leader.shard, leader.now, [down]);
    leader.state(OTHERS[1], false);
    assert!((0..20).all(|_| leader.write_to(1)));
    for group in GROUPS {
        leader.acknowledge(group, OTHERS[1]);
    }
    leader.write_until_delayed();
}

#[test]
fn a_leader_that_steps_down_refuses_what_it_has_delayed() {
    let mut leader = Leader::new();
    leader.write_until_delayed();
    assert!(!leader.write_to(1));
    let out = leader.respond(GROUP, OTHERS[0], MessageType::MsgAppendResponse, 0, 9);
    let refused = |answer: &Result<Answer, RequestError>| {
        answer.as_ref().is_err_and(|error| error.code == ErrorCode::NotLeader)
    };
    assert_eq!(out.answers.len(), 1, "the other group has its leader still: {out:?}");
    assert_eq!(out.answers[0].0, leader.writes[0]);
    assert!(refused(&out.answers[0].1), "{out:?}");
}

#[test]
fn a_leader_that_accepts_few_ops_at_a_time_accepts_the_delayed_ones_in_order() {
    let two_writes = 20 << 10;
    let mut leader = Leader::with(two_writes);
    leader.write_until_delayed();
    let first = leader.writes[0];
    assert!((0..4).all(|_| !leader.write()));
    leader.acknowledge(GROUP, OTHERS[1]);
    assert!(!leader.write(), "it waits behind those that are delayed still");
    let mut tickets = Vec::new();
    for follower in OTHERS.into_iter().cycle().take(6) {
        let out = leader.acknowledge(GROUP, follower);
        assert!(out.answers.len() <= 2, "two of the writes fit");
        tickets.extend(out.answers.into_iter().map(|(ticket, answer)| answer.map(|_| ticket)));
    }
    assert_eq!(tickets, (first..first + 6).map(Ok).collect::<Vec<_>>());
    assert!(leader.write());
}

/// The bytes of clients' requests are bounded, and reads need some of them.
#[test]
fn a_leader_delays_a_bounded_number_of_bytes() {
    let mut leader = Leader::new();
    leader.write_until_delayed();
    let refused = (0..4000).find_map(|_| {
        leader.writes[0] += 1;
        let write = write_to(GROUP, leader.writes[0]);
        turn(&mut leader.shard, leader.now, [write]).answers.pop()
    });
    let (ticket, answer) = refused.expect("a write is refused");
    assert!(is_busy(&answer), "{answer:?}");
    let delayed = ticket as usize * (2 * BLOCK_BYTES);
    assert!((13 << 20..=16 << 20).contains(&delayed), "{delayed} bytes");
}

#[test]
fn a_leader_whose_store_hangs_steps_down_when_its_overlay_is_full() {
    let disks = Disks::new(&[entries(GROUP, 1, 1)]);
    let options = ShardOptions { overlay_bytes: 32 << 10, ..ShardOptions::new(SERVER) };
    let mut shard = disks.open_with(options, PEER, [GROUP], &view(&[PEER]), 0).shard;
    for tick in 1..=30 {
        turn(&mut shard, 200 * tick, []);
    }
    disks.store.set_mode(Mode::Queued);
    for number in 1..=3 {
        turn(&mut shard, 6000, [write(number)]);
    }
    for tick in 31..=60 {
        turn(&mut shard, 200 * tick, []);
    }
    assert!(!shard.is_stalled(), "the overlay has space, so nothing waits for the store");
    for number in 4..=9 {
        turn(&mut shard, 12_000, [write(number)]);
    }
    // In the first tick, the last commit index becomes durable.
    for tick in 61..=71 {
        turn(&mut shard, 200 * tick, []);
        assert!(!shard.is_stalled());
    }
    turn(&mut shard, 14_400, []);
    assert!(shard.is_stalled() && !shard.log_is_stalled());
    let role = |shard: &Shard| shard.replica_status(GROUP).unwrap().role;
    assert_ne!(role(&shard), crate::request::Role::Leader);
    disks.store.set_mode(Mode::Immediate);
    for tick in 73..=100 {
        turn(&mut shard, 200 * tick, []);
    }
    assert!(!shard.is_stalled());
    assert_eq!(role(&shard), crate::request::Role::Leader);
}
