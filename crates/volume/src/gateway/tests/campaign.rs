//! Runs of a session against the model, by seed: requests of the user, and faults of servers,
//! messages and the registry, in any order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use alluvium_device::sim::Random;
use proptest::prelude::*;

use super::history::{CELL_BYTES, History, User, payload};
use super::model::{Cluster, Origin, Outcome, SERVERS};
use crate::gateway::{
    Attachment, Closed, Counters, GroupError, GroupReplicas, Output, REGION_BLOCKS, RegionIndex,
    SendId, Session, SessionConfig, UserRequest,
};
use crate::group::REGION_CHUNKS;
use crate::op::{Attach, BLOCK_BYTES, Op};
use crate::request::{ErrorCode, Request, RequestError};
use crate::rules::{Broken, Rule};
use crate::state::{GroupState, VolumeState};
use crate::types::{AttachEpoch, GroupId, Layer, ServerId, VolumeId};
use crate::window::{WINDOW_NUMBERS, Window};

const VOLUME: VolumeId = VolumeId(7);
const SIZE_BYTES: u64 = 2 * REGION_BLOCKS * BLOCK_BYTES as u64;
const CELL: u64 = CELL_BYTES as u64;

/// What requests of a run are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    /// Whole blocks, and requests that fail.
    Failures,
    /// Any cells, and no request of which an op fails.
    Merges,
}

/// Errors after which a request is sent again.
const RETRYABLE: [ErrorCode; 12] = [
    ErrorCode::Busy,
    ErrorCode::NotReady,
    ErrorCode::Behind,
    ErrorCode::BadChecksum,
    ErrorCode::UnknownGroup,
    ErrorCode::Stopping,
    ErrorCode::UnknownServer,
    ErrorCode::OldOpening,
    ErrorCode::WrongServer,
    ErrorCode::TooManyBytes,
    ErrorCode::NotLeader,
    ErrorCode::NotAttached,
];
const FINAL: [ErrorCode; 3] = [ErrorCode::NoSpace, ErrorCode::BadRequest, ErrorCode::Unsupported];

struct World {
    random: Random,
    style: Style,
    broken: Broken,
    now: Duration,
    session: Session,
    /// The number of the session. Each is an attachment with an epoch of its own.
    number: usize,
    epoch: u64,
    is_attached: bool,
    clusters: BTreeMap<RegionIndex, Cluster>,
    is_up: BTreeMap<ServerId, bool>,
    requests: VecDeque<(Origin, ServerId, Request)>,
    outcomes: VecDeque<(Origin, Result<Outcome, Closed>)>,
    registry: Vec<RegionIndex>,
    /// Sent and not answered.
    open: BTreeMap<Origin, ServerId>,
    owners: BTreeMap<(usize, u64), User>,
    history: History,
    next_number: u64,
    active: usize,
    is_quiet: bool,
    /// Another gateway has attached the volume.
    is_fenced: bool,
}

type Check = Result<(), String>;

impl World {
    fn new(seed: u64, style: Style, broken: Broken) -> Self {
        let mut random = Random::new(seed);
        let io_timeout = (style == Style::Failures && random.chance(0.5))
            .then(|| Duration::from_millis(500 + random.below(3000)));
        let session = Self::session(1, &[], io_timeout, broken, &mut random);
        let mut history = History::default();
        history.checks_merges = style == Style::Merges;
        Self {
            random,
            style,
            broken,
            now: Duration::ZERO,
            session,
            number: 0,
            epoch: 1,
            is_attached: false,
            clusters: BTreeMap::new(),
            is_up: SERVERS.map(|server| (server, true)).into(),
            requests: VecDeque::new(),
            outcomes: VecDeque::new(),
            registry: Vec::new(),
            open: BTreeMap::new(),
            owners: BTreeMap::new(),
            history,
            next_number: 1,
            active: 0,
            is_quiet: false,
            is_fenced: false,
        }
    }

    fn session(
        epoch: u64,
        groups: &[(RegionIndex, GroupReplicas)],
        io_timeout: Option<Duration>,
        broken: Broken,
        random: &mut Random,
    ) -> Session {
        let attachment = Attachment {
            volume: VOLUME,
            parent: None,
            layer: Layer(0),
            size_bytes: SIZE_BYTES,
            epoch: AttachEpoch(epoch),
            nonce: epoch as u32,
            gateway: Some(SERVERS[random.index(3)]).filter(|_| random.chance(0.7)),
            groups: groups.to_vec(),
        };
        let config = SessionConfig { io_timeout, seed: random.next_u64(), broken };
        Session::new(attachment, config, Arc::new(Counters::default()))
    }

    fn view(&self, region: RegionIndex) -> GroupReplicas {
        GroupReplicas { group: self.clusters[&region].group, replicas: SERVERS.to_vec() }
    }

    /// Takes the outputs of the session.
    fn drain(&mut self) -> Check {
        while let Some(output) = self.session.next_output() {
            match output {
                Output::Attached => self.is_attached = true,
                Output::Stuck(_) | Output::Full(_) => {}
                Output::CreateGroup { region } | Output::ReadGroup { region, .. } => {
                    self.registry.push(region);
                }
                Output::Ended(_) => self.is_attached = false,
                Output::Complete { id, result } => {
                    self.active -= 1;
                    let has_group = |place: (u32, u16)| {
                        self.clusters.contains_key(&RegionIndex((place.0 / REGION_CHUNKS) as u16))
                    };
                    self.history.reported((self.number, id), &result, has_group)?;
                }
                Output::Send { id, server, request } => self.sent(id, server, request)?,
            }
        }
        let [users, pieces, locks, wakes, numbers, _] = self.session.sizes();
        if numbers as u64 > WINDOW_NUMBERS * 2 || locks > users || wakes > users + pieces + 2 {
            return Err(format!("it keeps too much: {:?}", self.session.sizes()));
        }
        let servers = self.session.most_servers_of_a_piece();
        if servers > SERVERS.len() {
            return Err(format!("a piece keeps {servers} servers"));
        }
        Ok(())
    }

    fn sent(&mut self, id: SendId, server: ServerId, request: Request) -> Check {
        let origin = (self.number, id);
        if let Some(user) = self.session.owner(id) {
            let user = (self.number, user);
            self.owners.insert((self.number, id.piece), user);
            if let Request::Op { op, .. } = &request {
                self.history.sent(user, op)?;
            }
        }
        self.open.insert(origin, server);
        match self.is_up[&server] {
            true => self.requests.push_back((origin, server, request)),
            false => self.close(origin),
        }
        Ok(())
    }

    /// The session learns that the connection of a sending is closed.
    fn close(&mut self, origin: Origin) {
        if self.open.remove(&origin).is_some() {
            self.outcomes.push_back((origin, Err(Closed)));
        }
    }

    fn submit(&mut self) -> Check {
        let base = [0, 4092, REGION_BLOCKS - 3][self.random.index(3)] * BLOCK_BYTES as u64;
        let block = BLOCK_BYTES as u64;
        let (mut offset, mut len) =
            (base + self.random.below(6) * block, (1 + self.random.below(5)) * block);
        if self.style == Style::Merges && self.random.chance(0.7) {
            offset += self.random.below(4) * CELL;
            len = (1 + self.random.below(8)) * CELL;
        }
        let number = self.next_number;
        self.next_number += 1;
        let request = match self.random.below(20) {
            0..9 => UserRequest::Write { offset, data: payload(number, len as usize) },
            9 => UserRequest::Zero { offset, len },
            10 => UserRequest::Discard { offset, len },
            _ => UserRequest::Read { offset, len },
        };
        self.active += 1;
        // Outputs come later, so the number is known before anything else happens.
        let id = self.session.submit(self.now, request.clone());
        self.history.submitted((self.number, id), request);
        self.drain()
    }

    /// A request arrives at a server.
    fn deliver(&mut self, at: usize) {
        let Some((origin, server, request)) = self.requests.remove(at) else { return };
        if !self.is_up[&server] {
            return self.close(origin);
        }
        let group = match &request {
            Request::Op { group, .. } => *group,
            Request::Read(read) => read.group,
            Request::Status { .. } => return,
        };
        let is_op = matches!(request, Request::Op { .. });
        let is_attach = matches!(request, Request::Op { op: Op::Attach(_), .. });
        if !self.is_quiet && self.random.chance(0.08) {
            let mut code = RETRYABLE[self.random.index(RETRYABLE.len())];
            if self.style == Style::Failures && self.random.chance(0.5) && is_op && !is_attach {
                code = FINAL[self.random.index(FINAL.len())];
            } else if !is_op && self.random.chance(0.1) {
                code = ErrorCode::Damaged;
            }
            let leader = Some(SERVERS[self.random.index(3)]).filter(|_| self.random.chance(0.5));
            let error = RequestError { leader, ..RequestError::new(code, group, "injected") };
            self.answer(origin, Err(error));
            // The error says nothing about the copy.
            if self.random.chance(0.5) {
                self.requests.push_back((origin, server, request));
            }
            return;
        }
        let cluster = self.clusters.values_mut().find(|cluster| cluster.group == group);
        let cluster = cluster.expect("a group is known before it is used");
        let outcome = match request {
            Request::Op { op, .. } => match cluster.propose(server, op, origin) {
                None => return,
                Some(error) => Err(error),
            },
            Request::Read(read) => cluster.read(server, read, &mut self.random),
            Request::Status { .. } => return,
        };
        self.answer(origin, outcome);
    }

    fn answer(&mut self, origin: Origin, outcome: Result<crate::request::Answer, RequestError>) {
        if self.open.remove(&origin).is_some() {
            self.outcomes.push_back((origin, Ok((origin, outcome))));
        }
    }

    fn answer_all(&mut self, outcomes: Vec<Outcome>) {
        outcomes.into_iter().for_each(|(origin, outcome)| self.answer(origin, outcome));
    }

    /// An outcome arrives at the session, unless that has ended.
    fn take_outcome(&mut self, at: usize) -> Check {
        let Some(((session, id), outcome)) = self.outcomes.remove(at) else { return Ok(()) };
        if session == self.number {
            let outcome = outcome.map(|(_, outcome)| outcome);
            self.session.answer(self.now, id, outcome);
        }
        self.drain()
    }

    fn commit(&mut self, region: RegionIndex) -> Check {
        let Some(cluster) = self.clusters.get_mut(&region) else { return Ok(()) };
        if !self.is_up[&cluster.leader] {
            return Ok(());
        }
        let Some((entry, outcome)) = cluster.commit() else { return Ok(()) };
        let owner = entry
            .origin
            .and_then(|(session, send)| self.owners.get(&(session, send.piece)).copied());
        self.history.committed(&entry, owner)?;
        if let Some((origin, outcome)) = outcome {
            self.answer(origin, outcome);
        }
        Ok(())
    }

    fn elect(&mut self, region: RegionIndex, leader: ServerId) {
        if let Some(cluster) = self.clusters.get_mut(&region) {
            let outcomes = cluster.elect(leader, &mut self.random);
            self.answer_all(outcomes);
        }
    }

    /// A server stops: its connections are closed, another server leads its groups. What it has
    /// received may arrive nevertheless, later.
    fn stop(&mut self, server: ServerId) {
        if self.is_up.values().any(|is_up| !is_up) {
            return;
        }
        self.is_up.insert(server, false);
        let origins: Vec<Origin> = self.open.keys().copied().collect();
        for origin in origins {
            if self.open[&origin] == server {
                self.close(origin);
            }
        }
        let (random, is_lost) = (&mut self.random, 0.5);
        self.requests.retain(|(_, to, _)| *to != server || !random.chance(is_lost));
        let others: Vec<_> = SERVERS.into_iter().filter(|other| *other != server).collect();
        for region in [0, 1].map(RegionIndex) {
            if self.clusters.get(&region).is_some_and(|cluster| cluster.leader == server) {
                let leader = others[self.random.index(2)];
                self.elect(region, leader);
            }
        }
    }

    fn registry(&mut self) -> Check {
        if self.registry.is_empty() {
            return Ok(());
        }
        let region = self.registry.swap_remove(self.random.index(self.registry.len()));
        if !self.is_quiet && self.random.chance(0.2) {
            let error = GroupError::Unavailable("injected".into());
            self.session.group_known(self.now, region, Err(error));
            return self.drain();
        }
        if !self.clusters.contains_key(&region) {
            if self.is_fenced {
                self.session.group_known(self.now, region, Err(GroupError::Fenced));
                return self.drain();
            }
            let state = VolumeState {
                volume: VOLUME,
                parent: None,
                epoch: AttachEpoch(self.epoch),
                nonce: self.epoch as u32,
                window: Some(Window::default()),
                dropped_layers: Vec::new(),
            };
            // A group that lacks the attachment answers NotAttached.
            let state = Some(state).filter(|_| self.random.chance(0.7));
            let leader = SERVERS[self.random.index(3)];
            let group = GroupId(10 + u64::from(region.0));
            let cluster = Cluster::new(group, &GroupState::new(state), leader);
            self.clusters.insert(region, cluster);
        }
        let view = self.view(region);
        self.session.group_known(self.now, region, Ok(view));
        self.drain()
    }

    /// The process of the gateway ends, and another one attaches the volume. Its requests are on
    /// their way still.
    fn attach_again(&mut self, was_fenced: bool) -> Check {
        self.history.abandoned(self.number);
        self.number += 1;
        self.epoch += 1 + u64::from(was_fenced);
        self.active = 0;
        self.is_attached = false;
        self.registry.clear();
        let groups: Vec<_> =
            self.clusters.keys().map(|region| (*region, self.view(*region))).collect();
        self.session = Self::session(self.epoch, &groups, None, self.broken, &mut self.random);
        self.drain()
    }

    /// Another gateway attaches the volume. The session learns it by its next request.
    fn fence(&mut self) -> Check {
        if self.clusters.is_empty() {
            return Ok(());
        }
        self.is_fenced = true;
        let attach = Attach {
            volume: VOLUME,
            epoch: AttachEpoch(self.epoch + 1),
            parent: None,
            gateway: None,
            nonce: 99,
        };
        for region in [0, 1].map(RegionIndex) {
            if let Some(cluster) = self.clusters.get_mut(&region) {
                // No session has this number, so nothing is answered.
                let origin = (usize::MAX, SendId { piece: u64::from(region.0), attempt: 0 });
                let leader = cluster.leader;
                cluster.propose(leader, Op::Attach(attach), origin);
                while !self.clusters[&region].replicas[&leader].proposals.is_empty() {
                    self.is_up.insert(leader, true);
                    self.commit(region)?;
                }
            }
        }
        // Whatever it does from now on ends it. Fairness of the run is restored before.
        self.calm();
        for _ in 0..20_000 {
            if !self.is_attached {
                break;
            }
            if self.active == 0 {
                self.submit()?;
            }
            self.quiet_step()?;
        }
        if self.is_attached {
            return Err("a fenced session goes on".into());
        }
        if self.active != 0 {
            return Err("a fenced session has not completed its requests".into());
        }
        (self.is_quiet, self.is_fenced) = (false, false);
        self.attach_again(true)
    }

    fn calm(&mut self) {
        self.is_quiet = true;
        self.is_up.values_mut().for_each(|is_up| *is_up = true);
        for region in [0, 1].map(RegionIndex) {
            for server in SERVERS {
                if let Some(cluster) = self.clusters.get_mut(&region) {
                    let outcomes = cluster.learn(server, &mut self.random);
                    cluster.replicas.get_mut(&server).unwrap().is_exact = true;
                    self.answer_all(outcomes);
                }
            }
        }
    }

    /// A step without faults.
    fn quiet_step(&mut self) -> Check {
        self.calm();
        self.deliver(0);
        self.take_outcome(0)?;
        for region in [0, 1].map(RegionIndex) {
            self.commit(region)?;
            for server in SERVERS {
                if let Some(cluster) = self.clusters.get_mut(&region) {
                    cluster.apply(server, 1);
                }
            }
        }
        self.registry()?;
        if self.requests.is_empty() && self.outcomes.is_empty() {
            self.advance_to_wake()?;
        }
        Ok(())
    }

    fn advance_to_wake(&mut self) -> Check {
        if let Some(at) = self.session.wakes_at() {
            self.now = self.now.max(at);
            self.session.advance(self.now);
        }
        self.drain()
    }

    fn step(&mut self) -> Check {
        let region = RegionIndex(self.random.below(2) as u16);
        let server = SERVERS[self.random.index(3)];
        match self.random.below(100) {
            0..15 if self.is_attached && self.active < 12 => self.submit(),
            15..45 if !self.requests.is_empty() => {
                // Mostly the oldest, sometimes one that has been overtaken for long.
                let at = self.random.index(self.requests.len());
                let at = if self.random.chance(0.6) { 0 } else { at };
                if self.random.chance(0.05) {
                    let copy = self.requests[at].clone();
                    self.requests.push_back(copy);
                }
                if !self.random.chance(0.03) {
                    self.deliver(at);
                }
                Ok(())
            }
            45..65 if !self.outcomes.is_empty() => {
                let at = self.random.index(self.outcomes.len());
                if self.random.chance(0.03) {
                    // Lost without a word: a copy to another replica has to bring the answer.
                    self.outcomes.remove(at);
                    return Ok(());
                }
                if self.random.chance(0.05) {
                    let copy = self.outcomes[at].clone();
                    self.outcomes.push_back(copy);
                }
                self.take_outcome(at)
            }
            65..78 => self.commit(region),
            78..85 => {
                let count = 1 + self.random.index(3);
                if let Some(cluster) = self.clusters.get_mut(&region) {
                    cluster.apply(server, count);
                }
                Ok(())
            }
            85..87 if self.is_up[&server] => {
                self.elect(region, server);
                Ok(())
            }
            87..89 => {
                if let Some(cluster) = self.clusters.get_mut(&region) {
                    let outcomes = cluster.learn(server, &mut self.random);
                    self.answer_all(outcomes);
                }
                Ok(())
            }
            89 if self.random.chance(0.3) => {
                self.stop(server);
                Ok(())
            }
            90 => {
                self.is_up.insert(server, true);
                Ok(())
            }
            91 => {
                let is_exact = self.random.chance(0.7);
                if let Some(cluster) = self.clusters.get_mut(&region) {
                    cluster.replicas.get_mut(&server).unwrap().is_exact = is_exact;
                }
                Ok(())
            }
            92..95 => self.registry(),
            95 if !self.random.chance(0.7) => self.advance_to_wake(),
            _ => {
                self.now += Duration::from_millis(self.random.below(20));
                self.session.advance(self.now);
                self.drain()
            }
        }
    }

    fn complete_all(&mut self) -> Check {
        for _ in 0..50_000 {
            // An attach may be on its way after the request that needed it has failed.
            let [_, pieces, ..] = self.session.sizes();
            let is_idle = self.active == 0 && pieces == 0 && self.is_attached;
            if is_idle && self.requests.is_empty() {
                return Ok(());
            }
            self.quiet_step()?;
        }
        Err(format!("{} requests never end", self.history.unreported()))
    }

    /// The faults end, and everything completes.
    fn finish(&mut self) -> Check {
        self.complete_all()?;
        for base in [0, 4092, REGION_BLOCKS - 3] {
            let request = UserRequest::Read {
                offset: base * BLOCK_BYTES as u64,
                len: 12 * BLOCK_BYTES as u64,
            };
            self.active += 1;
            let id = self.session.submit(self.now, request.clone());
            self.history.submitted((self.number, id), request);
            self.drain()?;
        }
        self.complete_all()?;
        match self.session.sizes() {
            [0, 0, 0, 0, 0, 0] => Ok(()),
            sizes => Err(format!("it keeps something after the end: {sizes:?}")),
        }
    }
}

fn run(seed: u64, style: Style, steps: u32, broken: Broken) -> Check {
    let mut world = World::new(seed, style, broken);
    world.drain()?;
    for _ in 0..steps {
        world.step()?;
        if world.random.chance(0.001) {
            world.attach_again(false)?;
        }
        if world.random.chance(0.0005) {
            world.fence()?;
        }
    }
    world.finish()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_volume_of_failing_servers_is_linearizable(seed in any::<u64>()) {
        prop_assert_eq!(run(seed, Style::Failures, 3000, Broken::default()), Ok(()));
    }

    #[test]
    fn changes_of_blocks_in_part_are_merged(seed in any::<u64>()) {
        prop_assert_eq!(run(seed, Style::Merges, 3000, Broken::default()), Ok(()));
    }
}

/// The checks find each rule when it is broken.
#[track_caller]
fn is_found(rule: Rule, style: Style, findings: &[&str]) {
    let found = (0..2000).find_map(|seed| run(seed, style, 3000, Broken::rule(rule)).err());
    let found = found.unwrap_or_else(|| panic!("{rule:?} is not found"));
    assert!(findings.iter().any(|text| found.contains(text)), "{rule:?} is found by: {found}");
}

#[test]
fn a_missing_range_lock_is_found() {
    is_found(Rule::RangeLock, Style::Merges, &["in flight"]);
}

#[test]
fn a_range_that_is_released_when_its_op_fails_is_found() {
    is_found(Rule::FailedRange, Style::Failures, &["a late copy"]);
}

#[test]
fn a_floor_above_an_op_that_is_not_completed_is_found() {
    is_found(Rule::GatewayFloor, Style::Merges, &["without effect"]);
}

#[test]
fn a_read_without_token_is_found() {
    is_found(Rule::Token, Style::Merges, &["stale", "lacks"]);
}

#[test]
fn a_token_that_reads_do_not_raise_is_found() {
    is_found(Rule::TokenOfReads, Style::Failures, &["stale"]);
}

#[test]
fn a_retry_with_a_new_number_is_found() {
    is_found(Rule::NumberOfRetry, Style::Merges, &["twice", "a late copy"]);
}
