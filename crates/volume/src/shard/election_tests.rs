//! Three shards of one group without disks that take time: how long the group is without a leader
//! when the server of its leader stops or ends. Time is the argument of a turn, so that the result
//! does not depend on the speed of the machine.

use std::collections::VecDeque;

use alluvium_device::sim::Mode;
use raft::eraftpb::{Message, MessageType};

use super::tests::{Disks, GROUP, OTHERS, PEER, entries_of, view_of_three, write};
use super::{Input, Output, ServerState, Shard};
use crate::messages::{PeerBody, PeerMessage};
use crate::types::{GroupId, PeerId, ServerId};

const PEERS: [PeerId; 3] = [PEER, OTHERS[0], OTHERS[1]];

/// Time in which a message arrives, unless a test sets another one.
const DELAY_MS: u64 = 3;

struct Trio {
    shards: Vec<Shard>,
    delay_ms: u64,
    /// What arrives at each server, and when.
    arriving: Vec<VecDeque<(u64, Input)>>,
    is_running: [bool; 3],
    /// Servers whose log completes nothing.
    hangs: [bool; 3],
    now: u64,
    disks: Vec<Disks>,
}

impl Trio {
    /// Three servers whose ticks come at different times.
    fn new(opened: [u64; 3], last: [u64; 3]) -> Self {
        let disks: Vec<Disks> = (0..3)
            .map(|at| Disks::of(server(at), &[entries_of(PEERS[at], GROUP, last[at], 1)]))
            .collect();
        let open = |(at, disks): (usize, &Disks)| {
            disks.open_at(server(at), PEERS[at], [GROUP], &view_of_three(), opened[at]).shard
        };
        let shards = disks.iter().enumerate().map(open).collect();
        let arriving = (0..3).map(|_| VecDeque::new()).collect();
        let (delay_ms, is_running, now) = (DELAY_MS, [true; 3], 200);
        Self { shards, delay_ms, arriving, is_running, hangs: [false; 3], now, disks }
    }

    /// Lets a millisecond pass.
    fn step(&mut self) {
        self.now += 1;
        for at in 0..3 {
            if !self.is_running[at] {
                continue;
            }
            let arriving = &mut self.arriving[at];
            let mut inputs = VecDeque::new();
            while let Some((_, input)) = arriving.pop_front_if(|it| it.0 <= self.now) {
                inputs.push_back(input);
            }
            let shard = &mut self.shards[at];
            if inputs.is_empty() && shard.wakes_at() > self.now {
                continue;
            }
            let mut out = Output::default();
            loop {
                shard.turn(self.now, &mut inputs, &mut out).unwrap();
                let Some(offset) = shard.awaits_log().filter(|_| !self.hangs[at]) else { break };
                shard.wal().wait_durable(offset).wait().unwrap();
            }
            for (to, message) in out.messages {
                let input = Input::Peer { server: server(at), message };
                self.send(to.0 as usize - 1, self.now + self.delay_ms, input);
            }
        }
    }

    fn send(&mut self, to: usize, at: u64, input: Input) {
        let arriving = &mut self.arriving[to];
        let place = arriving.partition_point(|it| it.0 <= at);
        arriving.insert(place, (at, input));
    }

    fn leader(&self) -> Option<usize> {
        let leads = |at: &usize| self.is_running[*at] && leads(&self.shards[*at]);
        (0..3).find(leads)
    }

    /// Waits for a leader. Returns after how many milliseconds there is one.
    fn elect(&mut self, bound_ms: u64) -> u64 {
        let before = self.now;
        while self.leader().is_none() {
            self.step();
            let elapsed = self.now - before;
            assert!(elapsed <= bound_ms, "no leader after {elapsed} ms");
        }
        self.now - before
    }

    /// The log of a server completes nothing until it is set to complete everything again.
    fn set_hangs(&mut self, at: usize, hangs: bool) {
        let mode = if hangs { Mode::Queued } else { Mode::Immediate };
        self.disks[at].log.set_mode(mode);
        self.hangs[at] = hangs;
        // The process learns of what is durable.
        let state = ServerState { free_slots: 1000, is_stalled: false };
        self.send(at, self.now, Input::PeerState { server: server(at), state });
    }

    /// A client writes to a server.
    fn write(&mut self, at: usize) {
        self.send(at, self.now, write(1));
    }

    /// The greatest term of a running server.
    fn term(&self) -> u64 {
        let term = |at: usize| self.shards[at].replica_status(GROUP).map(|status| status.term.0);
        (0..3).filter(|at| self.is_running[*at]).filter_map(term).max().unwrap()
    }

    fn run(&mut self, ms: u64) {
        (0..ms).for_each(|_| self.step());
    }
}

fn server(at: usize) -> ServerId {
    ServerId(at as u32 + 1)
}

fn leads(shard: &Shard) -> bool {
    shard.replica_status(GROUP).is_some_and(|status| status.role == crate::request::Role::Leader)
}

/// Ticks at many distances from each other.
fn phases() -> impl Iterator<Item = [u64; 3]> {
    let steps = || (0..200).step_by(33);
    steps().flat_map(move |second| steps().map(move |third| [0, second, third]))
}

#[test]
fn a_leader_that_stops_is_replaced_within_eight_ticks() {
    for opened in phases() {
        let mut trio = Trio::new(opened, [3; 3]);
        trio.elect(3000);
        // The server may stop at any time since its last heartbeat.
        for more_ms in [700, 751, 809, 897] {
            trio.run(more_ms);
            let stopped = trio.leader().expect("the leader is well");
            trio.is_running[stopped] = false;
            let without_ms = trio.elect(1600);
            assert!(without_ms >= 600, "a leader that is slow for {without_ms} ms is deposed");
            trio.is_running[stopped] = true;
        }
    }
}

#[test]
fn a_leader_that_stops_is_replaced_although_the_first_candidate_lacks_entries() {
    for opened in phases() {
        for behind in 0..3 {
            let mut last = [3; 3];
            last[behind] = 1;
            let mut trio = Trio::new(opened, last);
            // Before the entries reach it, the leader stops.
            while trio.leader().is_none() {
                trio.step();
            }
            let stopped = trio.leader().unwrap();
            trio.is_running[stopped] = false;
            trio.elect(1700);
        }
    }
}

#[test]
fn a_leader_whose_process_ends_is_replaced_within_600_ms() {
    for opened in phases() {
        // Each server may learn it at another time.
        for later_ms in [0, 1, 40, 100, 150, 200, 250] {
            let mut trio = Trio::new(opened, [3; 3]);
            trio.elect(3000);
            trio.run(700 + later_ms);
            let ended = trio.leader().expect("the leader is well");
            trio.is_running[ended] = false;
            let others = (0..3).filter(|at| *at != ended).zip([0, later_ms]);
            for (at, later_ms) in others.collect::<Vec<_>>() {
                let down = Input::PeerDown { server: server(ended), is_gone: true };
                trio.send(at, trio.now + later_ms, down);
            }
            trio.elect(600);
        }
    }
}

/// Votes wait for the log of each voter, which may be slow: an election that is in flight is not
/// replaced by another one before its votes can arrive.
#[test]
fn votes_that_take_most_of_an_election_timeout_elect_a_leader() {
    for delay_ms in [150, 300, 450] {
        for opened in phases() {
            for stopped in [None, Some(0), Some(1), Some(2)] {
                let mut trio = Trio::new(opened, [3; 3]);
                trio.delay_ms = delay_ms;
                if let Some(stopped) = stopped {
                    trio.is_running[stopped] = false;
                }
                trio.elect(8_000);
            }
        }
    }
}

/// Two servers are left, and hold elections at the same time: each votes for itself. The next time
/// they do not.
#[test]
fn candidates_that_have_split_the_votes_do_not_split_them_again() {
    // Without a leader the ranks of peers 1, 2 and 3 are 0, 1 and 2, each two ticks later than the
    // one before.
    for (stopped, [first, second], earlier_ms) in
        [(2, [0, 1], 400), (0, [1, 2], 400), (1, [0, 2], 800)]
    {
        let mut splits = 0;
        for jitter_ms in (0..400).step_by(7) {
            for delay_ms in [3, 25, 50] {
                let mut opened = [0; 3];
                opened[first] = earlier_ms + jitter_ms;
                opened[second] = 200;
                let mut trio = Trio::new(opened, [3; 3]);
                trio.delay_ms = delay_ms;
                trio.is_running[stopped] = false;
                trio.elect(6000);
                splits += u32::from(trio.term() > 2);
                assert!(trio.term() <= 3, "{stopped} {jitter_ms} {delay_ms}: {}", trio.term());
            }
        }
        assert!(splits > 0, "the elections are never at the same time");
    }
}

/// Heartbeats that come late use up nothing of the delay of the next election.
#[test]
fn a_late_heartbeat_does_not_bring_the_next_election_forward() {
    let mut alone = Alone::new();
    // Server 3 leads, and server 1 is the first candidate.
    let term = 2;
    for _ in 0..6 {
        let heartbeat = MessageType::MsgHeartbeat;
        alone.receive(2, Message { msg_type: heartbeat, term, ..Message::default() });
        let sent = alone.run(1390);
        assert!(!sent.contains(&MessageType::MsgRequestPreVote), "{sent:?}");
    }
    let sent = alone.run(410);
    assert!(sent.contains(&MessageType::MsgRequestPreVote), "{sent:?}");
}

/// Nor do candidates whose elections follow the proof that the leader is gone.
#[test]
fn candidates_that_know_that_the_leader_is_gone_split_the_votes_once_at_most() {
    let mut splits = 0;
    for phase in (0..200).step_by(29) {
        for (later_ms, delay_ms) in (0..300).step_by(3).flat_map(|ms| [(ms, 3), (ms, 25)]) {
            let mut trio = Trio::new([0, phase, 2 * phase % 200], [3; 3]);
            trio.delay_ms = delay_ms;
            trio.elect(3000);
            trio.run(700);
            let (ended, before) = (trio.leader().expect("the leader is well"), trio.term());
            trio.is_running[ended] = false;
            let others: Vec<usize> = (0..3).filter(|at| *at != ended).collect();
            // The second one in the order of the elections is the first one to know.
            for (at, later_ms) in others.into_iter().zip([later_ms, 0]) {
                let down = Input::PeerDown { server: server(ended), is_gone: true };
                trio.send(at, trio.now + later_ms, down);
            }
            trio.elect(800);
            splits += u32::from(trio.term() > before + 1);
            assert!(
                trio.term() <= before + 2,
                "{phase} {later_ms} {delay_ms}: term {}",
                trio.term()
            );
        }
    }
    assert!(splits > 0, "the elections are never at the same time");
}

/// The shard of server 2 alone: the test plays its peers.
struct Alone {
    shard: Shard,
    now: u64,
    _disks: Disks,
}

impl Alone {
    fn new() -> Self {
        let (server, peer) = (server(1), PEERS[1]);
        let disks = Disks::of(server, &[entries_of(peer, GROUP, 3, 1)]);
        let shard = disks.open_at(server, peer, [GROUP], &view_of_three(), 0).shard;
        Self { shard, now: 0, _disks: disks }
    }

    /// Hands an input to the shard. Returns the types of the messages that it sends to server 3.
    fn turn(&mut self, input: Option<Input>) -> Vec<MessageType> {
        let mut inputs = VecDeque::from_iter(input);
        let mut out = Output::default();
        loop {
            self.shard.turn(self.now, &mut inputs, &mut out).unwrap();
            let Some(offset) = self.shard.awaits_log() else { break };
            self.shard.wal().wait_durable(offset).wait().unwrap();
        }
        let raft = out.messages.into_iter().filter_map(|(to, message)| match message.body {
            PeerBody::Raft(message) if to == server(2) => Some(message.get_msg_type()),
            _ => None,
        });
        raft.collect()
    }

    fn run(&mut self, ms: u64) -> Vec<MessageType> {
        let step = |_| {
            self.now += 1;
            self.turn(None)
        };
        (0..ms).flat_map(step).collect()
    }

    /// Lets server `at` send a message of raft.
    fn receive(&mut self, at: usize, message: Message) -> Vec<MessageType> {
        let (from, to) = (PEERS[at], PEERS[1]);
        let message = Message { from: from.0, to: to.0, ..message };
        let body = PeerBody::Raft(Box::new(message));
        let message = PeerMessage { group: GROUP, from, to, body };
        self.turn(Some(Input::Peer { server: server(at), message }))
    }

    /// Waits for a campaign, whose votes arrive late.
    fn wins_with_late_votes(&mut self) {
        let campaign = (0..2000).find(|_| self.run(1).contains(&MessageType::MsgRequestPreVote));
        campaign.expect("there is no leader");
        let term = self.shard.replica_status(GROUP).unwrap().term.0 + 1;
        let response = |msg_type| Message { msg_type, term, ..Message::default() };
        let sent = self.receive(2, response(MessageType::MsgRequestPreVoteResponse));
        assert!(sent.contains(&MessageType::MsgRequestVote), "{sent:?}");
        let sent = self.run(999);
        assert_eq!(sent, [], "another election, before the votes are there");
        self.receive(2, response(MessageType::MsgRequestVoteResponse));
        assert!(leads(&self.shard));
    }
}

#[test]
fn a_candidate_waits_for_the_votes_of_slow_servers() {
    Alone::new().wins_with_late_votes();
}

#[test]
fn a_candidate_waits_for_the_votes_of_slow_servers_when_the_leader_is_gone() {
    let mut alone = Alone::new();
    let heartbeat = MessageType::MsgHeartbeat;
    alone.receive(0, Message { msg_type: heartbeat, term: 2, ..Message::default() });
    alone.turn(Some(Input::PeerDown { server: server(0), is_gone: true }));
    alone.wins_with_late_votes();
}

/// An idle group costs no place in the order of the log, and its heartbeats keep the leader.
#[test]
fn heartbeats_of_an_idle_group_wait_for_no_log() {
    let mut trio = Trio::new([0, 50, 120], [3; 3]);
    trio.elect(3000);
    trio.run(1000);
    let leader = trio.leader().unwrap();
    let follower = (leader + 1) % 3;
    let shard = &mut trio.shards[follower];
    let elections = shard.counters().elections;
    let status = shard.replica_status(GROUP).unwrap();
    let heartbeat = Message {
        msg_type: MessageType::MsgHeartbeat,
        from: PEERS[leader].0,
        to: PEERS[follower].0,
        term: status.term.0,
        commit: status.commit.0,
        ..Default::default()
    };
    // A record of another group is in front: nothing of it is durable yet.
    let other = GroupId(77);
    let create = Input::Create { group: other, peer: PeerId(70), view: view_of_three() };
    let message = PeerMessage {
        group: GROUP,
        from: PEERS[leader],
        to: PEERS[follower],
        body: PeerBody::Raft(Box::new(heartbeat)),
    };
    let mut inputs = [create, Input::Peer { server: server(leader), message }].into();
    let mut out = Output::default();
    shard.turn(trio.now, &mut inputs, &mut out).unwrap();
    let is_response = |message: &PeerMessage| match &message.body {
        PeerBody::Raft(message) => message.get_msg_type() == MessageType::MsgHeartbeatResponse,
        _ => false,
    };
    assert!(out.messages.iter().any(|(_, message)| is_response(message)), "{:?}", out.messages);
    assert_eq!(shard.counters().elections, elections);
}

#[test]
fn a_leader_whose_log_hangs_is_replaced_within_20_ticks() {
    for opened in phases().step_by(8) {
        let mut trio = Trio::new(opened, [3; 3]);
        trio.elect(3000);
        trio.run(700);
        let hung = trio.leader().expect("the leader is well");
        trio.set_hangs(hung, true);
        // Nothing waits for the log, so nothing hangs.
        trio.run(3000);
        assert_eq!(trio.leader(), Some(hung));
        trio.write(hung);
        trio.run(1700);
        assert!(leads(&trio.shards[hung]), "a disk that is slow for 1.7 s moves no leader");
        trio.run(600);
        assert!(!leads(&trio.shards[hung]));
        assert!(trio.shards[hung].log_is_stalled());
        trio.elect(1700);
        let leader = trio.leader().expect("there is one");
        let waiting = trio.shards[hung].waiting_items();
        trio.run(3000);
        assert_eq!(trio.leader(), Some(leader), "the server whose log hangs holds no election");
        assert_eq!(trio.shards[hung].waiting_items(), waiting, "responses that wait for the log");
        trio.set_hangs(hung, false);
        trio.run(1000);
        assert_eq!(trio.leader(), Some(leader));
        assert!(!trio.shards[hung].log_is_stalled());
        assert_eq!(trio.shards[hung].counters().stalls, 1);
        let last = |at: usize| trio.shards[at].replica_status(GROUP).unwrap().last;
        assert_eq!([last(0), last(1)], [last(leader); 2]);
    }
}

#[test]
fn a_process_that_was_stopped_has_no_stalled_log() {
    let mut trio = Trio::new([0, 66, 132], [3; 3]);
    trio.elect(3000);
    trio.run(700);
    let leader = trio.leader().unwrap();
    trio.set_hangs(leader, true);
    trio.write(leader);
    trio.run(10);
    assert!(trio.shards[leader].awaits_log().is_some());
    // The log completes everything while the process does not run.
    trio.set_hangs(leader, false);
    let shard = &mut trio.shards[leader];
    shard.turn(trio.now + 60_000, &mut VecDeque::new(), &mut Output::default()).unwrap();
    assert!(!shard.log_is_stalled());
    assert!(leads(shard));
}
