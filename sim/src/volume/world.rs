//! The schedule of a simulation: which server, disk, message or client is next, and when a server
//! ends. All of it is drawn from the seed.

use std::collections::BTreeSet;

use alluvium_device::sim::Random;
use alluvium_volume::shard::Input;
use alluvium_volume::{PeerBody, PullFrame};

use super::blocks::BLOCKS;
use super::client::{Clients, first_nonce};
use super::environment::{Environment, Trace};
use super::network::{ClientMessage, Envelope, Network};
use super::oracle::Oracle;
use super::server::{End, Server, broken_stream, peer_down};
use super::{GROUPS, Outcome, Plan, RING_BYTES, SERVERS, begins_attached, group_id, server_id};

/// Messages in flight, above which some get lost.
const NETWORK_MESSAGES: usize = 400;

/// Rounds within which all servers must be equal after everything is repaired.
const CONVERGENCE_ROUNDS: usize = 4000;

/// Where the schedule puts the faults.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Schedule {
    /// Anywhere.
    Mixed,
    /// On installs, in the way that is hardest for them: a leader is cut off with entries of its
    /// own, so that it comes back with a log that conflicts with the snapshot; a checkpoint is in
    /// progress when the install begins; and the server ends before the next one completes it.
    InterruptedInstalls,
    /// On the ring: there are more operations, and the store of one server is slow for a while, so
    /// that its checkpoints take long and its ring fills until it refuses entries.
    SlowStore,
    /// On the slots: the stores have too few for all blocks, and there are more discards.
    FullStore,
    /// On attachments: many, with late and repeated requests of older ones.
    Attachments,
}

/// All servers, and what they meet.
pub(super) struct World {
    schedule: Schedule,
    servers: Vec<Server>,
    clients: Clients,
    /// The server whose store is slow now.
    slow: Option<usize>,
    environment: Environment,
}

impl World {
    pub(super) fn new(plan: Plan) -> Self {
        let mut random = Random::new(plan.seed);
        let schedule = match random.below(20) {
            0..6 => Schedule::Mixed,
            6..12 => Schedule::InterruptedInstalls,
            12..15 => Schedule::SlowStore,
            15..17 => Schedule::FullStore,
            _ => Schedule::Attachments,
        };
        let mut oracle = Oracle::new();
        for group in (0..GROUPS).filter(|group| begins_attached(*group)) {
            oracle.attached(group, 1, first_nonce(group));
        }
        let mut environment = Environment {
            mutation: plan.mutation,
            random,
            network: Network::default(),
            oracle,
            outcome: Outcome::default(),
            trace: Trace::new(plan.verbose),
        };
        let store_mib = if schedule == Schedule::FullStore { 8 } else { 12 };
        let mut servers: Vec<Server> =
            (0..SERVERS).map(|index| Server::new(index, plan.seed, store_mib << 20)).collect();
        for server in &mut servers {
            server.open(&mut environment);
        }
        let clients = Clients::new(std::array::from_fn(begins_attached));
        Self { schedule, servers, clients, slow: None, environment }
    }

    /// Runs the schedule, then repairs everything and checks that the servers converge. Panics if a
    /// check fails. Returns the counts and the digest of all events.
    pub(super) fn run(mut self, steps: u64) -> (Outcome, u64) {
        for _ in 0..steps {
            self.step();
        }
        self.heal();
        let mut outcome = self.environment.outcome;
        for server in &self.servers {
            outcome.add(&server.outcome());
        }
        (outcome, self.environment.trace.digest())
    }

    fn random(&mut self) -> &mut Random {
        &mut self.environment.random
    }

    fn step(&mut self) {
        let server = self.random().index(SERVERS);
        match self.random().below(100) {
            0..24 => {
                for _ in 0..2 * self.load() {
                    self.deliver_one();
                }
            }
            24..38 => {
                for _ in 0..2 * self.load() {
                    self.deliver_client();
                }
            }
            38..43 => self.deliver_frame(),
            43..55 => drop(self.servers[server].step_log()),
            55..67 => self.step_store(server),
            67..75 => {
                for _ in 0..2 * self.load() {
                    self.write();
                }
            }
            75..81 => self.clients.retry(&mut self.environment),
            81..84 => self.read(server),
            84..86 => self.compare(server),
            86..93 => self.tick(server),
            93 => self.maybe_checkpoint(server),
            94 => self.change_attachments(),
            95 => match self.schedule {
                Schedule::SlowStore => self.change_slow_store(server),
                _ => self.change_partition(server),
            },
            96 => self.maybe_end(server),
            _ => self.maybe_open(server),
        }
        if self.environment.network.peers.len() > NETWORK_MESSAGES {
            let index = self.random().index(NETWORK_MESSAGES);
            self.environment.network.peers.swap_remove(index);
        }
        self.turns();
    }

    /// Messages and operations per step.
    fn load(&self) -> usize {
        match self.schedule {
            Schedule::SlowStore => 3,
            _ => 1,
        }
    }

    fn turns(&mut self) {
        for server in &mut self.servers {
            server.turn(&mut self.environment);
        }
    }

    // -- Messages

    fn deliver_one(&mut self) {
        let messages = self.environment.network.peers.len();
        if messages > 0 {
            let index = self.random().index(messages);
            self.deliver(index);
        }
    }

    fn deliver(&mut self, index: usize) {
        let Environment { network, random, trace, .. } = &mut self.environment;
        let envelope = network.peers.swap_remove(index);
        if network.separates(envelope.from, envelope.to) || random.chance(0.02) {
            return;
        }
        if random.chance(0.01) {
            network.peers.push(envelope.clone());
        }
        let Envelope { from, to, message } = envelope;
        let kind = match &message.body {
            PeerBody::Raft(message) => message.get_msg_type() as u64,
            PeerBody::Offer { .. } => 100,
            PeerBody::Pin { .. } => 101,
            PeerBody::Pulled { .. } => 102,
        };
        let fields = [("kind", kind), ("group", message.group.0)];
        trace.event("deliver", &fields);
        trace.event("from", &[("from", from as u64), ("to", to as u64)]);
        self.servers[to].input(Input::Peer { server: server_id(from), message });
    }

    /// A request of a client or an answer arrives, or is lost.
    fn deliver_client(&mut self) {
        let messages = self.environment.network.clients.len();
        if messages == 0 {
            return;
        }
        let index = self.random().index(messages);
        let random = &mut self.environment.random;
        let (is_lost, is_repeated) = (random.chance(0.05), random.chance(0.05));
        let message = self.environment.network.clients.swap_remove(index);
        if is_lost {
            return;
        }
        match message {
            ClientMessage::Request { to, ticket, request } => {
                if is_repeated {
                    let ticket = u64::MAX - ticket;
                    let request = request.clone();
                    let copy = ClientMessage::Request { to, ticket, request };
                    self.environment.network.clients.push(copy);
                }
                self.servers[to].input(Input::Client { ticket, request });
            }
            ClientMessage::Answer { ticket, answer } => {
                self.clients.answer(ticket, answer, &mut self.environment);
            }
        }
    }

    /// A request of a pull, or its next frame, arrives.
    fn deliver_frame(&mut self) {
        let streams = self.environment.network.streams.len();
        if streams > 0 {
            let index = self.random().index(streams);
            self.advance_stream(index);
        }
    }

    fn advance_stream(&mut self, index: usize) {
        let Environment { network, random, .. } = &mut self.environment;
        let stream = &mut network.streams[index];
        let (source, target) = (stream.source, stream.target);
        let is_cut = network.cut_off_either(source, target);
        let stream = &mut network.streams[index];
        if is_cut || !self.servers[source].is_running() || random.chance(0.01) {
            let stream = network.streams.swap_remove(index);
            self.servers[target].input(broken_stream(&stream));
            self.servers[source].input(Input::PullClosed { stream: stream.id });
            return;
        }
        if let Some(request) = stream.request.take() {
            self.servers[source].input(request);
            return;
        }
        let Some(frame) = stream.frames.pop_front() else { return };
        let id = stream.id;
        let (attempt, group) = (stream.attempt, stream.group);
        match &frame {
            PullFrame::End | PullFrame::Failed => drop(network.streams.swap_remove(index)),
            _ => self.servers[source].input(Input::PullReady { stream: id }),
        }
        if frame == PullFrame::End {
            self.checkpoint_before_install(target);
        }
        self.servers[target].input(Input::PullFrame { attempt, group, frame });
    }

    /// Begins a checkpoint that is in progress when the install begins.
    fn checkpoint_before_install(&mut self, server: usize) {
        if self.schedule == Schedule::InterruptedInstalls && self.random().chance(0.5) {
            // What is in progress completes first, so that its bases are recent and it trims much.
            for _ in 0..4 {
                self.complete_requests(server);
            }
            self.servers[server].input(Input::Checkpoint);
            self.servers[server].turn(&mut self.environment);
        }
    }

    // -- Clients

    fn write(&mut self) {
        let group = self.random().index(GROUPS);
        let more_discards = self.schedule == Schedule::FullStore && self.random().chance(0.4);
        self.clients.write(group, more_discards, &mut self.environment);
    }

    fn read(&mut self, server: usize) {
        let group = self.random().index(GROUPS);
        self.clients.read(server, group, &mut self.environment);
    }

    fn change_attachments(&mut self) {
        let group = self.random().index(GROUPS);
        let often = if self.schedule == Schedule::Attachments { 0.3 } else { 0.02 };
        if self.random().chance(often) {
            self.clients.take_over(group, &mut self.environment);
        } else if self.random().chance(0.3) {
            self.clients.give_up(group, &mut self.environment);
        }
    }

    /// Compares a replica with the committed log.
    fn compare(&mut self, server: usize) {
        let group = self.random().index(GROUPS);
        let Some(applied) = self.servers[server].applied(group) else { return };
        let mut block = 0;
        while block < BLOCKS {
            let (ticket, request, blocks) = self.clients.compare(server, group, block, applied);
            self.servers[server].input(Input::Client { ticket, request });
            block += blocks;
        }
    }

    // -- Time and faults

    fn tick(&mut self, server: usize) {
        let ms = self.random().below(150);
        self.servers[server].advance_clock(ms);
    }

    fn maybe_checkpoint(&mut self, server: usize) {
        let is_early = self.random().chance(0.1);
        if self.schedule == Schedule::SlowStore {
            return; // the ring must start all checkpoints
        }
        let server = &mut self.servers[server];
        if is_early || server.ring_used_bytes() > RING_BYTES / 8 {
            server.input(Input::Checkpoint);
        }
    }

    fn change_partition(&mut self, server: usize) {
        let is_whole = self.environment.network.is_whole();
        let probability = match (self.schedule, is_whole) {
            (Schedule::InterruptedInstalls, true) => 0.3,
            // Long enough for the others to elect a leader and to compact their logs.
            (Schedule::InterruptedInstalls, false) => 0.05,
            _ => 0.15,
        };
        if !self.random().chance(probability) {
            return;
        }
        if is_whole {
            self.cut_off(server);
        } else {
            self.environment.network.heal();
            self.environment.trace.event("heal", &[]);
        }
    }

    fn cut_off(&mut self, server: usize) {
        let group = self.random().index(GROUPS);
        let leader = self.servers.iter().position(|server| server.leads(group));
        let server = match self.schedule {
            Schedule::InterruptedInstalls => leader.unwrap_or(server),
            _ => server,
        };
        self.environment.network.cut_off(server);
        self.environment.trace.event("cut off", &[("server", server as u64)]);
    }

    fn step_store(&mut self, server: usize) {
        if self.slow != Some(server) || self.random().chance(0.02) {
            self.servers[server].step_store();
        }
    }

    /// Completes all requests of a server's disks.
    fn complete_requests(&mut self, server: usize) {
        let server = &mut self.servers[server];
        while server.step_log() {}
        while server.step_store() {}
        server.turn(&mut self.environment);
    }

    fn change_slow_store(&mut self, server: usize) {
        let probability = if self.slow.is_none() { 0.3 } else { 0.03 };
        if self.random().chance(probability) {
            self.slow = self.slow.is_none().then_some(server);
            self.environment.trace.event("slow store", &[("server", server as u64)]);
        }
    }

    fn maybe_end(&mut self, server: usize) {
        let Some(shard) = self.servers[server].shard() else { return };
        let is_installing = shard.is_installing();
        let probability = match self.schedule {
            Schedule::InterruptedInstalls if is_installing => 0.7,
            // Its ring stays full, and its next checkpoint begins with an old base.
            Schedule::SlowStore if self.slow == Some(server) => 0.4,
            _ => 0.12,
        };
        let Environment { random, network, outcome, trace, .. } = &mut self.environment;
        if !random.chance(probability) {
            return;
        }
        let end = if random.chance(0.6) { End::PowerCut } else { End::Kill };
        match end {
            End::PowerCut => outcome.power_cuts += 1,
            End::Kill => outcome.kills += 1,
        }
        outcome.interrupted_installs += u64::from(is_installing);
        trace.event(
            if end == End::PowerCut { "power cut" } else { "kill" },
            &[("server", server as u64), ("installing", u64::from(is_installing))],
        );
        network.streams.retain(|stream| stream.target != server);
        let is_noticed = random.chance(0.5);
        let is_refused = random.chance(0.5);
        let tickets = self.servers[server].end(end);
        self.clients.forget(tickets);
        if is_noticed {
            for other in (0..SERVERS).filter(|other| *other != server) {
                self.servers[other].input(peer_down(server, is_refused));
            }
        }
    }

    fn maybe_open(&mut self, server: usize) {
        if !self.servers[server].is_running() && self.random().chance(0.3) {
            self.open(server);
        }
    }

    fn open(&mut self, server: usize) {
        self.environment.trace.event("open", &[("server", server as u64)]);
        self.servers[server].open(&mut self.environment);
    }

    // -- The end

    /// Heals the network and opens all servers. They must become equal, and each volume must then
    /// acknowledge an op.
    fn heal(&mut self) {
        self.environment.network.heal();
        for server in 0..SERVERS {
            if !self.servers[server].is_running() {
                self.open(server);
            }
        }
        self.converge();
        for group in 0..GROUPS {
            self.write_one(group);
        }
        self.converge();
        for server in 0..SERVERS {
            for group in 0..GROUPS {
                self.compare_now(server, group);
            }
        }
    }

    /// Runs rounds until all replicas have everything. Panics if that takes too long.
    fn converge(&mut self) {
        for _ in 0..CONVERGENCE_ROUNDS {
            if (0..GROUPS).all(|group| self.has_converged(group)) {
                return;
            }
            self.round();
        }
        panic!("NOT LIVE: the servers do not converge: {}", self.state());
    }

    /// Sends ops to a volume until one is acknowledged. Panics if that takes too long.
    fn write_one(&mut self, group: usize) {
        let acknowledged = self.environment.outcome.acknowledged;
        for round in 0..CONVERGENCE_ROUNDS {
            if self.clients.is_idle(group) && self.environment.outcome.acknowledged > acknowledged {
                return;
            }
            if round % 20 == 0 {
                // A store may have no space for anything but a discard.
                self.clients.write(group, true, &mut self.environment);
                for _ in 0..4 {
                    self.clients.retry_group(group, &mut self.environment);
                }
            }
            self.round();
        }
        panic!("NOT LIVE: group {group} acknowledges nothing: {}", self.state());
    }

    /// Completes all requests of the disks, delivers all messages, and lets time pass.
    fn round(&mut self) {
        for server in 0..SERVERS {
            self.complete_requests(server);
        }
        for _ in 0..self.environment.network.peers.len() {
            self.deliver(0);
            self.turns();
        }
        for _ in 0..self.environment.network.clients.len() {
            self.deliver_client();
            self.turns();
        }
        for _ in 0..self.environment.network.streams.len() {
            self.deliver_frame();
            self.turns();
        }
        for server in 0..SERVERS {
            self.servers[server].advance_clock(100);
            self.servers[server].turn(&mut self.environment);
        }
    }

    fn state(&self) -> String {
        let states: Vec<String> = self.servers.iter().map(Server::describe).collect();
        states.join("; ")
    }

    fn has_converged(&self, group: usize) -> bool {
        let applied: BTreeSet<Option<u64>> =
            self.servers.iter().map(|server| server.applied(group)).collect();
        let mut shards = self.servers.iter().filter_map(Server::shard);
        applied.len() == 1
            && shards.all(|shard| shard.is_settled(group_id(group)))
            && self.servers.iter().any(|server| server.leads(group))
    }

    /// Compares a settled replica with the committed log.
    fn compare_now(&mut self, server: usize, group: usize) {
        let applied = self.servers[server].applied(group).expect("the server is running");
        assert_eq!(applied, self.environment.oracle.len(group), "LOST: an entry was committed");
        let before = self.environment.outcome.compared;
        let mut block = 0;
        while block < BLOCKS {
            let (ticket, request, blocks) = self.clients.compare(server, group, block, applied);
            self.servers[server].input(Input::Client { ticket, request });
            block += blocks;
        }
        self.servers[server].turn(&mut self.environment);
        for _ in 0..20 {
            self.complete_requests(server);
        }
        let network = &mut self.environment.network;
        for message in std::mem::take(&mut network.clients) {
            if let ClientMessage::Answer { ticket, answer } = message {
                self.clients.answer(ticket, answer, &mut self.environment);
            }
        }
        let compared = self.environment.outcome.compared - before;
        assert_eq!(compared as usize, BLOCKS, "a settled replica serves all of its blocks");
    }
}
