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
use super::schedule::Schedule;
use super::server::{Device, End, RECORD_BYTES, Server, Sizes, broken_stream, peer_down};
use super::{GROUPS, Outcome, Plan, RING_BYTES, SERVERS, begins_attached, group_id, server_id};

/// Messages in flight, above which some get lost.
const NETWORK_MESSAGES: usize = 400;

/// Rounds within which all servers must be equal after everything is repaired.
const CONVERGENCE_ROUNDS: usize = 4000;

/// An end of a server that is due after some steps.
struct Cut {
    server: usize,
    steps: u64,
    completes: Completes,
}

/// What the disks of a server complete before it ends.
#[derive(Clone, Copy)]
enum Completes {
    /// A checkpoint, or a part of it.
    Both,
    /// Whatever the store has without anything new in the log.
    Store,
    /// A few requests of the log.
    PartOfLog,
}

/// All servers, and what they meet.
pub(super) struct World {
    schedule: Schedule,
    servers: Vec<Server>,
    clients: Clients,
    /// The server whose store is slow now.
    slow: Option<usize>,
    /// The process that is stopped now.
    stopped: Option<usize>,
    /// The server whose log completes nothing now.
    hung: Option<usize>,
    cut: Option<Cut>,
    environment: Environment,
}

impl World {
    pub(super) fn new(plan: Plan) -> Self {
        let mut random = Random::new(plan.seed);
        let schedule = plan.schedule.unwrap_or_else(|| Schedule::draw(&mut random));
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
        let sizes = Sizes {
            store_bytes: if schedule == Schedule::FullStore { 8 << 20 } else { 12 << 20 },
            entry_cache_bytes: match schedule {
                // Followers that were away need an install.
                Schedule::InterruptedInstalls => 16 << 10,
                // They get many entries at once.
                Schedule::BetweenDisks => 96 << 10,
                _ => 24 << 10,
            },
            // Blocks wait in the overlay, where newer ones replace them.
            store_queue_depth: if schedule == Schedule::BetweenDisks { 1 } else { 4 },
        };
        let server = |index| Server::new(index, plan.seed, sizes);
        let mut servers: Vec<Server> = (0..SERVERS).map(server).collect();
        for server in &mut servers {
            server.open(&mut environment);
        }
        let clients = Clients::new(std::array::from_fn(begins_attached));
        Self {
            schedule,
            servers,
            clients,
            slow: None,
            stopped: None,
            hung: None,
            cut: None,
            environment,
        }
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
        self.end_when_due();
        let server = self.random().index(SERVERS);
        match self.random().below(100) {
            0..24 => {
                for _ in 0..5 * self.load() {
                    self.deliver_one();
                }
            }
            24..36 => {
                for _ in 0..3 * self.load() {
                    self.deliver_client();
                }
            }
            36..41 => self.deliver_frame(),
            41..54 => {
                for _ in 0..3 {
                    self.step_log(server);
                }
            }
            54..66 => {
                for _ in 0..2 {
                    self.step_store(server);
                }
            }
            66..74 => {
                for _ in 0..2 * self.load() {
                    self.write();
                }
            }
            74..80 => self.clients.retry(&mut self.environment),
            80..84 => self.read(server),
            84..86 => self.compare(server),
            86..92 => self.tick(server),
            92 => self.maybe_checkpoint(server),
            93 => self.change_attachments(),
            94 => match self.schedule {
                Schedule::SlowStore | Schedule::BetweenDisks => self.change_slow_store(server),
                _ => self.change_partition(server),
            },
            95 => {
                self.change_process(server);
                self.change_hung(server);
            }
            96..98 => self.maybe_end(server),
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
        if let PeerBody::Raft(message) = &message.body {
            if message.get_snapshot().get_metadata().index > 0 {
                self.checkpoint_before_install(to);
            }
            let entries = message.entries.iter();
            let bytes: usize = entries.map(|entry| entry.data.len() + entry.context.len()).sum();
            if bytes > RECORD_BYTES && message.commit > message.index {
                self.cut_split_ready(to);
            }
        }
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
        let is_cut = network.separates(source, target);
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
        self.servers[target].input(Input::PullFrame { attempt, group, frame });
    }

    /// Begins a checkpoint that is in progress when the install begins. The server often ends
    /// between this checkpoint and the next one.
    fn checkpoint_before_install(&mut self, server: usize) {
        if self.schedule == Schedule::InterruptedInstalls && self.random().chance(0.7) {
            // What is in progress completes first, so that its bases are recent and it trims much.
            for _ in 0..4 {
                self.complete_requests(server);
            }
            self.servers[server].input(Input::Checkpoint);
            self.servers[server].turn(&mut self.environment);
            if self.random().chance(0.5) {
                let steps = self.random().below(6);
                self.cut = Some(Cut { server, steps, completes: Completes::Both });
            }
        }
    }

    // -- Clients

    fn write(&mut self) {
        let is_hot = self.schedule == Schedule::BetweenDisks && self.random().chance(0.85);
        let (groups, blocks) = if is_hot { (2, 4) } else { (GROUPS, BLOCKS) };
        let (group, first) = (self.random().index(groups), self.random().index(blocks));
        let more_discards = self.schedule == Schedule::FullStore && self.random().chance(0.4);
        self.clients.write(group, first, more_discards, &mut self.environment);
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
        if let Some(applied) = self.servers[server].applied(group) {
            self.send_comparison(server, group, applied);
        }
    }

    /// Reads all blocks of a replica that has applied `applied`.
    fn send_comparison(&mut self, server: usize, group: usize, applied: u64) {
        let mut block = 0;
        while block < BLOCKS {
            let (ticket, request, blocks) = self.clients.compare(server, group, block, applied);
            self.servers[server].input(Input::Client { ticket, request });
            block += blocks;
        }
    }

    // -- Time and faults

    fn tick(&mut self, server: usize) {
        let ms = self.random().below(250);
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

    /// Completes a request of the log's disk, unless that hangs.
    fn step_log(&self, server: usize) -> bool {
        self.hung != Some(server) && self.servers[server].step_log()
    }

    /// A log hangs, or completes its requests again. Either state lasts several times as long as a
    /// server needs to notice it.
    fn change_hung(&mut self, server: usize) {
        let probability = if self.hung.is_none() { 0.05 } else { 0.15 };
        if self.random().chance(probability) {
            self.hung = self.hung.is_none().then_some(server);
            self.environment.outcome.hung += u64::from(self.hung.is_some());
            self.environment.trace.event("hang", &[("server", server as u64)]);
        }
    }

    /// A process is stopped or continues, or a device begins to fail.
    fn change_process(&mut self, server: usize) {
        let (is_changed, fails) = (self.random().chance(0.08), self.random().chance(0.02));
        match self.stopped {
            None if is_changed => {
                self.stopped = Some(server);
                self.environment.outcome.stopped += 1;
                self.environment.trace.event("stop", &[("server", server as u64)]);
                self.servers[server].set_stopped(true);
            }
            Some(stopped) if is_changed => {
                self.stopped = None;
                self.environment.trace.event("continue", &[("server", stopped as u64)]);
                self.servers[stopped].set_stopped(false);
            }
            _ if fails => {
                let random = self.random();
                let device = if random.chance(0.7) { Device::Store } else { Device::Log };
                let fails_flushes = random.chance(0.7);
                self.environment.trace.event("device fails", &[("server", server as u64)]);
                self.servers[server].fail_device(device, fails_flushes);
            }
            _ => {}
        }
    }

    fn maybe_end(&mut self, server: usize) {
        let Some(shard) = self.servers[server].shard() else { return };
        let is_installing = shard.is_installing();
        let probability = match self.schedule {
            Schedule::InterruptedInstalls if is_installing => 0.35,
            // Its ring stays full, and its next checkpoint begins with an old base.
            Schedule::SlowStore if self.slow == Some(server) => 0.2,
            Schedule::BetweenDisks => return self.plan_cut(server),
            _ => 0.06,
        };
        if self.random().chance(probability) {
            self.end(server);
        }
    }

    /// Plans the end of a server for a moment between its disks.
    fn plan_cut(&mut self, server: usize) {
        let server = self.slow.unwrap_or(server);
        // An applied entry that the log does not call committed yet is the hardest case.
        let probability = if self.servers[server].has_unstated_commit() { 0.8 } else { 0.2 };
        if self.cut.is_some() || !self.random().chance(probability) {
            return;
        }
        let steps = if self.random().chance(0.5) { 0 } else { self.random().below(80) };
        let completes = match self.random().below(3) {
            0 => Completes::Store,
            _ => {
                self.servers[server].input(Input::Checkpoint);
                Completes::Both
            }
        };
        self.cut = Some(Cut { server, steps, completes });
    }

    /// Plans the end of a server that gets entries for more than one record.
    fn cut_split_ready(&mut self, server: usize) {
        if self.schedule == Schedule::BetweenDisks && self.random().chance(0.1) {
            let steps = self.random().below(10);
            self.cut = Some(Cut { server, steps, completes: Completes::PartOfLog });
        }
    }

    fn end_when_due(&mut self) {
        let Some(cut) = &mut self.cut else { return };
        if cut.steps > 0 {
            cut.steps -= 1;
            return;
        }
        let Cut { server, completes, .. } = *cut;
        self.cut = None;
        match completes {
            Completes::Both => {
                for _ in 0..1 + self.random().index(10) {
                    self.complete_requests(server);
                }
            }
            Completes::Store => {
                for _ in 0..3 {
                    while self.servers[server].step_store() {}
                    self.servers[server].turn(&mut self.environment);
                }
            }
            Completes::PartOfLog => {
                for _ in 0..self.random().index(3) {
                    self.servers[server].step_log();
                }
            }
        }
        self.end(server);
    }

    fn end(&mut self, server: usize) {
        let Some(shard) = self.servers[server].shard() else { return };
        let is_installing = shard.is_installing();
        let Environment { random, outcome, .. } = &mut self.environment;
        let end = if random.chance(0.6) { End::PowerCut } else { End::Kill };
        let (is_noticed, is_gone) = (random.chance(0.5), random.chance(0.5));
        match end {
            End::PowerCut => outcome.power_cuts += 1,
            End::Kill => outcome.kills += 1,
        }
        outcome.interrupted_installs += u64::from(is_installing);
        self.servers[server].end(end, &mut self.environment);
        if is_noticed {
            for other in (0..SERVERS).filter(|other| *other != server) {
                self.servers[other].input(peer_down(server, is_gone));
            }
        }
    }

    fn maybe_open(&mut self, server: usize) {
        if self.servers[server].is_running() || !self.random().chance(0.4) {
            return;
        }
        if self.schedule == Schedule::Damage && server == 0 {
            self.damage(server);
        }
        self.servers[server].open(&mut self.environment);
    }

    /// Damages the disks of a server at times. Only one server has such disks: the others are a
    /// majority.
    fn damage(&mut self, server: usize) {
        let kind = self.random().below(20);
        let environment = &mut self.environment;
        match kind {
            0..6 => {
                self.servers[server].rot_record(environment);
                if environment.random.chance(0.9) {
                    // What it has forgotten matters if it has to be in the majority.
                    environment.network.heal();
                    self.cut_off((server + 1) % SERVERS);
                }
            }
            6..8 => self.servers[server].rot_sector(environment),
            8 => self.servers[server].replace_disks(environment),
            _ => {}
        }
    }

    fn open_all(&mut self) {
        for server in self.servers.iter_mut().filter(|server| !server.is_running()) {
            server.open(&mut self.environment);
        }
    }

    // -- The end

    /// Heals the network and opens all servers. They must become equal, and each volume must then
    /// acknowledge an op.
    fn heal(&mut self) {
        self.environment.network.heal();
        self.hung = None;
        for server in &mut self.servers {
            server.repair();
            server.set_stopped(false);
        }
        self.converge();
        for group in 0..GROUPS {
            self.write_one(group);
        }
        self.converge();
        for server in 0..SERVERS {
            for group in 0..GROUPS {
                if !self.servers[server].has_lost(group) {
                    self.compare_now(server, group);
                }
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
                let first = self.random().index(BLOCKS);
                self.clients.write(group, first, true, &mut self.environment);
                for _ in 0..4 {
                    self.clients.retry_group(group, &mut self.environment);
                }
            }
            self.round();
        }
        panic!("NOT LIVE: group {group} acknowledges nothing: {}", self.state());
    }

    /// Opens servers, completes all requests of the disks, delivers all messages, and lets time
    /// pass.
    fn round(&mut self) {
        self.open_all();
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
        let sound = self.servers.iter().filter(|server| !server.has_lost(group));
        let applied: BTreeSet<Option<u64>> =
            sound.clone().map(|server| server.applied(group)).collect();
        let mut shards = sound.filter_map(Server::shard);
        applied.len() == 1
            && shards.all(|shard| shard.is_settled(group_id(group)))
            && self.servers.iter().any(|server| server.leads(group))
    }

    /// Compares a settled replica with the committed log.
    fn compare_now(&mut self, server: usize, group: usize) {
        let applied = self.servers[server].applied(group).expect("the server is running");
        assert_eq!(applied, self.environment.oracle.len(group), "LOST: an entry was committed");
        let before = self.environment.outcome.compared;
        self.send_comparison(server, group, applied);
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
