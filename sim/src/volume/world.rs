//! The schedule of a simulation: which server, disk, message or client is next, and when a server
//! ends. All of it is drawn from the seed.

use std::collections::BTreeSet;

use alluvium_device::sim::Random;
use raft::eraftpb::MessageType;

use super::environment::{Environment, Trace};
use super::network::{Envelope, Network, Pulled};
use super::oracle::Oracle;
use super::server::{End, Running, Server};
use super::{BLOCKS, GROUPS, Mutation, Outcome, Plan, RING_BYTES, SERVERS};

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
}

/// All servers, and what they meet.
pub(super) struct World {
    schedule: Schedule,
    servers: Vec<Server>,
    /// The server whose store is slow now.
    slow: Option<usize>,
    environment: Environment,
}

impl World {
    pub(super) fn new(plan: Plan) -> Self {
        let mut random = Random::new(plan.seed);
        let schedule = match random.below(10) {
            0..4 => Schedule::Mixed,
            4..8 => Schedule::InterruptedInstalls,
            _ => Schedule::SlowStore,
        };
        let environment = Environment {
            mutation: plan.mutation,
            random,
            network: Network::default(),
            oracle: Oracle::new(),
            outcome: Outcome::default(),
            trace: Trace::new(plan.verbose),
        };
        let mut servers: Vec<Server> =
            (0..SERVERS).map(|index| Server::new(index, plan.seed)).collect();
        for server in &mut servers {
            server.open(plan.mutation);
        }
        Self { schedule, servers, slow: None, environment }
    }

    /// Runs the schedule, then repairs everything and checks that the servers converge. Panics if a
    /// check fails. Returns the counts and the digest of all events.
    pub(super) fn run(mut self, steps: u64) -> (Outcome, u64) {
        for _ in 0..steps {
            self.step();
        }
        self.heal();
        self.check_end();
        (self.environment.outcome, self.environment.trace.digest())
    }

    fn random(&mut self) -> &mut Random {
        &mut self.environment.random
    }

    fn step(&mut self) {
        let server = self.random().index(SERVERS);
        match self.random().below(100) {
            0..30 => {
                for _ in 0..self.load() {
                    self.deliver_one();
                }
            }
            30..48 => drop(self.servers[server].step_log()),
            48..66 => self.step_store(server),
            66..74 => {
                for _ in 0..self.load() {
                    self.write();
                }
            }
            74..79 => self.read(),
            79..82 => self.compare(),
            82..92 => self.tick(server),
            92..95 => self.maybe_checkpoint(server),
            95 => match self.schedule {
                Schedule::SlowStore => self.change_slow_store(server),
                _ => self.change_partition(server),
            },
            96 => self.maybe_end(server),
            _ => self.maybe_open(server),
        }
        if self.environment.network.len() > NETWORK_MESSAGES {
            let index = self.random().index(NETWORK_MESSAGES);
            drop(self.environment.network.take(index));
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
        let messages = self.environment.network.len();
        if messages > 0 {
            let index = self.random().index(messages);
            self.deliver(index);
        }
    }

    fn deliver(&mut self, index: usize) {
        let Environment { network, random, .. } = &mut self.environment;
        let envelope = network.take(index);
        if network.separates(envelope.from, envelope.to) || random.chance(0.02) {
            return;
        }
        if random.chance(0.01) {
            network.repeat(&envelope);
        }
        let Envelope { from, to, group, message } = envelope;
        let kind = message.get_msg_type();
        if kind == MessageType::MsgSnapshot {
            let snapshot = message.get_snapshot().get_metadata().index;
            let Some(pulled) = pull(&self.servers[from], group, snapshot) else { return };
            self.environment.network.pull(to, group, pulled);
            self.checkpoint_before_install(to);
        }
        let Some(target) = self.servers[to].running_mut() else { return };
        // A follower refuses entries when its ring is nearly full. Raft sends them again.
        let has_entries = kind == MessageType::MsgAppend && !message.entries.is_empty();
        if has_entries && target.ring_used_bytes() > RING_BYTES / 4 * 3 {
            self.environment.outcome.refused_appends += 1;
            return;
        }
        self.environment.trace.event(
            "deliver",
            &[
                ("kind", kind as u64),
                ("group", group as u64),
                ("from", from as u64),
                ("to", to as u64),
            ],
        );
        target.step(group, message);
    }

    /// Begins a checkpoint that is in progress when the install begins.
    fn checkpoint_before_install(&mut self, server: usize) {
        if self.schedule == Schedule::InterruptedInstalls && self.random().chance(0.5) {
            // What is in progress completes first, so that its bases are recent and it trims much.
            for _ in 0..4 {
                self.complete_requests(server);
            }
            if let Some(running) = self.servers[server].running_mut() {
                running.want_checkpoint();
            }
            self.servers[server].turn(&mut self.environment);
        }
    }

    // -- Clients

    fn write(&mut self) {
        let group = self.random().index(GROUPS);
        // Some clients still write to a leader that is cut off.
        let to_cut_off = match self.schedule {
            Schedule::InterruptedInstalls => 0.6,
            _ => 0.3,
        };
        let Environment { network, random, .. } = &mut self.environment;
        let leader = self.servers.iter().position(|server| {
            server.leads(group)
                && (!network.is_cut_off(server.index()) || random.chance(to_cut_off))
        });
        if let Some(leader) = leader {
            self.propose(leader, group);
        }
    }

    /// Sends a write or discard of any block to a leader. Returns its number, or `None` if the
    /// leader has refused it.
    fn propose(&mut self, leader: usize, group: usize) -> Option<u64> {
        let Environment { random, oracle, .. } = &mut self.environment;
        let op = oracle.next_op(random.index(BLOCKS), random.chance(0.15));
        let leader = &mut self.servers[leader];
        let (server, incarnation) = (leader.index(), leader.incarnation());
        if !leader.running_mut()?.propose(group, op) {
            return None;
        }
        oracle.proposed(group, op, server, incarnation);
        Some(op.id)
    }

    /// A client reads a block from any replica. If it learns the outcome of an operation that way,
    /// it reads the block from all others too: none may go back.
    fn read(&mut self) {
        let random = self.random();
        let server = random.index(SERVERS);
        let (group, block) = (random.index(GROUPS), random.index(BLOCKS));
        if self.read_from(server, group, block) {
            for server in 0..SERVERS {
                self.read_from(server, group, block);
            }
        }
    }

    /// Reads a block from one server. Returns whether the client has learned an outcome.
    fn read_from(&mut self, server: usize, group: usize, block: usize) -> bool {
        let Environment { mutation, oracle, outcome, .. } = &mut self.environment;
        let token = match mutation {
            Mutation::NoToken => 0,
            _ => oracle.token(group),
        };
        let Some((value, applied)) = self.servers[server].read(group, block, token) else {
            return false;
        };
        let learns = oracle.read(group, block, value);
        outcome.reads += 1;
        outcome.reads_of_unknown += u64::from(learns);
        if *mutation != Mutation::TokenIgnoresReads {
            oracle.raise_token(group, applied);
        }
        learns
    }

    /// Compares a replica with the committed log.
    fn compare(&mut self) {
        let (server, group) = (self.random().index(SERVERS), self.random().index(GROUPS));
        let Environment { oracle, outcome, .. } = &mut self.environment;
        for block in 0..BLOCKS {
            let read = self.servers[server].read(group, block, 0);
            let Some(read) = read else { return };
            oracle.compare(server, group, block, read);
            outcome.compared += 1;
        }
    }

    // -- Time and faults

    fn tick(&mut self, server: usize) {
        if let Some(running) = self.servers[server].running_mut() {
            running.tick(&mut self.environment);
        }
    }

    fn maybe_checkpoint(&mut self, server: usize) {
        let is_early = self.random().chance(0.1);
        if self.schedule == Schedule::SlowStore {
            return; // the ring must start all checkpoints
        }
        if let Some(running) = self.servers[server].running_mut()
            && (is_early || running.ring_used_bytes() > RING_BYTES / 8)
        {
            running.want_checkpoint();
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
        if self.schedule == Schedule::InterruptedInstalls {
            // Entries that the others will replace.
            for group in 0..GROUPS {
                if self.servers[server].leads(group) {
                    self.propose(server, group);
                }
            }
        }
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
        let Some(running) = self.servers[server].running() else { return };
        let has_install = running.has_install();
        let probability = match self.schedule {
            Schedule::InterruptedInstalls if has_install => 0.7,
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
        outcome.interrupted_installs += u64::from(has_install);
        trace.event(
            if end == End::PowerCut { "power cut" } else { "kill" },
            &[("server", server as u64), ("installing", u64::from(has_install))],
        );
        network.forget_pulls(server);
        self.servers[server].end(end);
    }

    fn maybe_open(&mut self, server: usize) {
        if !self.servers[server].is_running() && self.random().chance(0.3) {
            self.open(server);
        }
    }

    fn open(&mut self, server: usize) {
        self.environment.trace.event("open", &[("server", server as u64)]);
        self.servers[server].open(self.environment.mutation);
    }

    // -- The end

    /// Heals the network and opens all servers. They must become equal, and each group must then
    /// acknowledge an operation.
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

    /// Sends operations to a group until one is acknowledged. Panics if that takes too long.
    fn write_one(&mut self, group: usize) {
        let mut sent = None;
        for round in 0..CONVERGENCE_ROUNDS {
            if sent.is_some_and(|op| !self.environment.oracle.is_waiting(op)) {
                return;
            }
            // A leader that is deposed forgets it.
            if sent.is_none() || round % 100 == 99 {
                let leader = self.servers.iter().position(|server| server.leads(group));
                sent = leader.and_then(|leader| self.propose(leader, group)).or(sent);
            }
            self.round();
        }
        panic!("NOT LIVE: group {group} acknowledges nothing: {}", self.state());
    }

    /// Completes all requests of the disks, delivers all messages, and lets a tick pass.
    fn round(&mut self) {
        for server in 0..SERVERS {
            self.complete_requests(server);
        }
        for _ in 0..self.environment.network.len() {
            self.deliver(0);
            self.turns();
        }
        for server in 0..SERVERS {
            self.tick(server);
            self.servers[server].turn(&mut self.environment);
        }
    }

    fn state(&self) -> String {
        let states: Vec<String> =
            self.servers.iter().filter_map(Server::running).map(Running::describe).collect();
        states.join("; ")
    }

    fn has_converged(&self, group: usize) -> bool {
        let running = || self.servers.iter().filter_map(Server::running);
        let applied: BTreeSet<u64> =
            running().map(|running| running.replica(group).applied).collect();
        applied.len() == 1
            && running().all(|running| running.is_caught_up(group))
            && running().any(|running| running.replica(group).is_leader())
    }

    /// Checks that all replicas serve the same blocks, and what the clients know.
    fn check_end(&mut self) {
        let oracle = &mut self.environment.oracle;
        for group in 0..GROUPS {
            let token = oracle.token(group);
            for block in 0..BLOCKS {
                for server in &self.servers {
                    let read = server
                        .read(group, block, token)
                        .expect("a replica that is caught up serves the clients");
                    oracle.compare(server.index(), group, block, read);
                    oracle.read(group, block, read.0);
                }
            }
        }
    }
}

/// Reads all blocks of an exact replica, as of a snapshot or later. `None` if the source cannot
/// serve now.
fn pull(source: &Server, group: usize, snapshot: u64) -> Option<Pulled> {
    let mut as_of = 0;
    let mut blocks = vec![];
    for block in 0..BLOCKS {
        let (value, applied) = source.read(group, block, snapshot)?;
        as_of = applied;
        blocks.push(value);
    }
    Some(Pulled { as_of, blocks })
}
