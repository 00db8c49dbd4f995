//! Random walks from a seed: clients that behave, forget, repeat, restart and lie.

use std::collections::BTreeSet;

use super::*;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[usize::try_from(self.below(items.len() as u64)).unwrap()]
    }
}

/// The next step of a client that behaves.
#[derive(Clone, Copy, Default)]
enum Next {
    #[default]
    Join,
    Sync,
    Heartbeat,
}

/// The state of a client.
#[derive(Clone, Default)]
struct Client {
    next: Next,
    instance: Option<StrBytes>,
    member_id: StrBytes,
    generation: i32,
    /// Its request that has not been answered.
    join: Option<u32>,
    sync: Option<u32>,
}

struct Walk {
    bench: Bench,
    random: Random,
    clients: Vec<Client>,
    greatest_generation: i32,
    /// The last generation in which any member received its assignment.
    received_generation: i32,
    /// The member that was asked to assign, by generation.
    leaders: BTreeMap<i32, StrBytes>,
    joins: BTreeSet<u32>,
    syncs: BTreeSet<u32>,
    /// Answered joins that [`Self::check`] has not checked.
    unseen: BTreeSet<u32>,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let rules = Rules {
            initial_rebalance_delay: Duration::from_secs(random.below(2) * 3),
            max_members: 3 + usize::try_from(random.below(5)).unwrap(),
        };
        let count = 2 + random.below(6);
        let clients = (0..count).map(|n| Client {
            instance: random.one_in(3).then(|| s(&format!("i{}", n % 3))),
            ..Client::default()
        });
        let clients = clients.collect();
        Walk {
            bench: Bench::with(rules),
            random,
            clients,
            greatest_generation: 0,
            received_generation: 0,
            leaders: BTreeMap::new(),
            joins: BTreeSet::new(),
            syncs: BTreeSet::new(),
            unseen: BTreeSet::new(),
        }
    }

    fn step(&mut self) {
        let index = usize::try_from(self.random.below(self.clients.len() as u64)).unwrap();
        let mut client = self.clients[index].clone();
        let now = self.bench.now;
        let waits = client.join.is_some() || client.sync.is_some();
        let action = match client.next {
            _ if self.random.one_in(2) => self.random.below(12),
            _ if waits => 11,
            Next::Join => 0,
            Next::Sync => 3,
            Next::Heartbeat => 6,
        };
        match action {
            0..=2 => client.join = Some(self.join(&client)),
            3..=5 => {
                let ids = self.bench.group.members.keys();
                let ids: Vec<String> = ids.map(|id| id.as_str().to_owned()).collect();
                let plan: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), "p")).collect();
                let waiter = self.bench.sync(&client.member_id, client.generation, &plan);
                client.sync = Some(waiter);
                self.syncs.insert(waiter);
            }
            6 => {
                let (id, instance) = (&client.member_id, client.instance.as_ref());
                let alive = self.bench.group.heartbeat(now, id, instance, client.generation);
                client.next = if alive.is_ok() { Next::Heartbeat } else { Next::Join };
            }
            7 => {
                let (id, instance) = (&client.member_id, client.instance.as_ref());
                let _ = self.bench.group.check_commit(now, id, instance, client.generation);
            }
            8 if self.random.one_in(3) => {
                let instance = client.instance.as_ref().map(StrBytes::as_str);
                let _ = self.bench.leave(&client.member_id, instance);
            }
            // A restart: everything is forgotten.
            9 => {
                client = Client { instance: client.instance, ..Client::default() };
            }
            // A lie.
            10 if self.random.one_in(4) => {
                client.generation += self.random.pick(&[-1, 1]);
                client.member_id = s(&format!("m{}", self.random.below(20)));
            }
            _ => {
                let millis = self.random.pick(&[0, 0, 1, 100, 100, 2_000, 7_000, 30_000]);
                self.bench.pass(Duration::from_millis(millis));
            }
        }
        self.clients[index] = client;
        self.hear();
        self.check();
    }

    /// Restarts the server: waiting requests are lost, and their clients send them again. A client
    /// that has received an assignment is in the persisted generation, or an older one.
    fn restart(&mut self) {
        self.bench.restart();
        let generation = self.bench.group.generation;
        for client in &mut self.clients {
            if client.join.take().is_some() {
                client.next = Next::Join;
            }
            if client.sync.take().is_some() {
                client.next = Next::Join;
            }
        }
        if self.bench.persisted.is_some() {
            assert!(
                self.received_generation <= generation,
                "generation {}",
                self.received_generation
            );
        }
        self.received_generation = generation;
        self.joins.retain(|waiter| self.bench.joined.contains_key(waiter));
        self.syncs.retain(|waiter| self.bench.synced.contains_key(waiter));
        self.unseen.clear();
        self.greatest_generation = generation;
        self.leaders.retain(|reported, _| *reported <= generation);
    }

    fn join(&mut self, client: &Client) -> u32 {
        let lists: [&[&str]; 5] =
            [&["range"], &["range"], &["range", "sticky"], &["sticky", "range"], &["other"]];
        let event = JoinEvent {
            instance_id: client.instance.clone(),
            can_require_id: !self.random.one_in(4),
            can_skip_assignment: self.random.one_in(2),
            session_timeout: Duration::from_secs(self.random.pick(&[6, 10, 45])),
            rebalance_timeout: Duration::from_secs(self.random.pick(&[0, 10, 60, 300])),
            ..join("c", &client.member_id)
        };
        let waiter = self.bench.join(with_protocols(event, self.random.pick(&lists)));
        self.joins.insert(waiter);
        self.unseen.insert(waiter);
        waiter
    }

    /// Delivers the answers to the clients.
    fn hear(&mut self) {
        for client in &mut self.clients {
            if let Some(answer) = client.join.and_then(|waiter| self.bench.joined.get(&waiter)) {
                client.join = None;
                client.next = if answer.is_ok() { Next::Sync } else { Next::Join };
                match answer {
                    Ok(joined) => {
                        client.member_id = joined.member_id.clone();
                        client.generation = joined.generation;
                    }
                    Err(refusal) => match refusal.error {
                        ResponseError::MemberIdRequired => {
                            client.member_id = refusal.member_id.clone();
                        }
                        ResponseError::RebalanceInProgress => {}
                        _ => client.member_id = StrBytes::new(),
                    },
                }
            }
            if let Some(answer) = client.sync.and_then(|waiter| self.bench.synced.get(&waiter)) {
                client.sync = None;
                if answer.is_ok() {
                    self.received_generation = self.bench.group.generation;
                }
                client.next = if answer.is_ok() { Next::Heartbeat } else { Next::Join };
            }
        }
    }

    fn check(&mut self) {
        let group = &self.bench.group;
        assert!(group.generation >= self.greatest_generation, "generations only grow");
        self.greatest_generation = group.generation;

        // Every waiter is either answered (once: `collect` checks that) or held by exactly one
        // member.
        let held: Vec<u32> = group.members.values().filter_map(|m| m.joining).collect();
        let open = self.joins.iter().filter(|waiter| !self.bench.joined.contains_key(waiter));
        assert_eq!(held.len(), held.iter().collect::<BTreeSet<_>>().len());
        assert_eq!(held.iter().collect::<BTreeSet<_>>(), open.collect(), "a JoinGroup is lost");
        let held: Vec<u32> = group.members.values().filter_map(|m| m.syncing).collect();
        let open = self.syncs.iter().filter(|waiter| !self.bench.synced.contains_key(waiter));
        assert_eq!(held.len(), held.iter().collect::<BTreeSet<_>>().len());
        assert_eq!(held.iter().collect::<BTreeSet<_>>(), open.collect(), "a SyncGroup is lost");

        // Every waiting request waits for something with a deadline.
        let (preparing, completing) =
            (group.state == State::Preparing, group.state == State::Completing);
        for (id, member) in &group.members {
            let (joining, syncing) = (member.joining.is_some(), member.syncing.is_some());
            let waits = joining || syncing;
            assert!(waits || member.deadline.is_some(), "{id} would stay forever");
            assert!(!waits || group.phase_deadline.is_some(), "{id} would wait forever");
            assert!(!joining || preparing, "{id} waits in a wrong state");
            assert!(!syncing || completing, "{id} waits in a wrong state");
        }

        // The persisted state is the current one, except in a rebalance.
        match group.state {
            State::Empty => assert_eq!(self.bench.persisted, None),
            State::Stable => assert_eq!(self.bench.persisted, group.persisted()),
            State::Preparing | State::Completing | State::Dead => {}
        }

        let statics = group.members.iter();
        let statics = statics.filter_map(|(id, m)| Some((m.instance_id.clone()?, id.clone())));
        assert_eq!(statics.collect::<BTreeMap<_, _>>(), group.static_members);
        match group.state {
            State::Empty => assert!(group.members.is_empty() && group.protocol.is_none()),
            State::Preparing => {}
            State::Completing | State::Stable => {
                let protocol = group.protocol.as_ref().expect("a generation has a protocol");
                assert!(group.members.values().all(|member| member.supports(protocol)));
                assert!(!group.members.is_empty());
            }
            State::Dead => panic!("it was not killed"),
        }
        match &group.leader {
            Some(leader) => assert!(group.members.contains_key(leader)),
            None => assert!(group.members.is_empty()),
        }
        assert!(group.members.len() <= group.rules.max_members);
        assert!(group.pending.len() <= group.rules.max_members);

        // In one generation, one member is asked to assign.
        let bench = &self.bench;
        let leaders = &mut self.leaders;
        self.unseen.retain(|waiter| {
            let Some(answer) = bench.joined.get(waiter) else { return true };
            if let Ok(joined) = answer
                && joined.leader == joined.member_id
                && !joined.skip_assignment
            {
                let leader = leaders.entry(joined.generation).or_insert(joined.leader.clone());
                assert_eq!(*leader, joined.member_id, "two leaders");
                assert!(!joined.members.is_empty(), "a leader without a list of members");
            }
            false
        });
        if completing {
            let reported = leaders.get(&group.generation);
            assert_eq!(reported, group.leader.as_ref(), "no member was asked to assign");
        }
    }
}

#[test]
fn random_walks_keep_the_invariants_and_end_empty() {
    for seed in 0..3_000 {
        let mut walk = Walk::new(seed);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..120 {
                walk.step();
            }
            // All clients go silent: all waiters are answered, all members expire.
            walk.bench.pass(Duration::from_secs(3600));
            walk.check();
            assert_eq!(walk.bench.group.state(), State::Empty);
            assert_eq!(walk.bench.group.deadline(), None);
            assert_eq!(walk.bench.group.size_bytes(), 0);
            assert_eq!(walk.bench.joined.len(), walk.joins.len());
            assert_eq!(walk.bench.synced.len(), walk.syncs.len());
        }));
        if let Err(panic) = caught {
            eprintln!("seed {seed} fails");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Whenever a server stops, its clients find a group again in which no partition has two owners,
/// and continue until they are gone.
#[test]
fn random_walks_continue_after_restarts() {
    let mut persisted = 0;
    for seed in 0..300 {
        let mut walk = Walk::new(seed);
        for _ in 0..6 {
            for _ in 0..20 {
                walk.step();
            }
            persisted += u32::from(walk.bench.persisted.is_some());
            walk.restart();
            walk.check();
        }
        walk.bench.pass(Duration::from_secs(3600));
        walk.check();
        assert_eq!(walk.bench.group.state(), State::Empty, "seed {seed}");
    }
    assert!(persisted > 100, "only {persisted} restarts with members");
}

/// The walks are useful only if they reach these states.
#[test]
fn random_walks_reach_all_states_and_answers() {
    let mut stable = 0;
    let mut skipped = 0;
    let mut errors = BTreeSet::new();
    for seed in 0..500 {
        let mut walk = Walk::new(seed);
        for _ in 0..120 {
            walk.step();
            stable += u32::from(walk.bench.group.state() == State::Stable);
        }
        let joined = walk.bench.joined.values();
        skipped += joined.clone().flatten().filter(|joined| joined.skip_assignment).count();
        errors.extend(joined.filter_map(|a| a.as_ref().err()).map(|refusal| refusal.error.code()));
        let synced = walk.bench.synced.values();
        errors.extend(synced.filter_map(|a| a.as_ref().err()).map(ResponseError::code));
    }
    assert!(stable > 5_000, "stable in {stable} steps only");
    assert!(skipped > 10, "{skipped} leaders came back");
    for expected in [
        ResponseError::IllegalGeneration,
        ResponseError::InconsistentGroupProtocol,
        ResponseError::UnknownMemberId,
        ResponseError::RebalanceInProgress,
        ResponseError::MemberIdRequired,
        ResponseError::GroupMaxSizeReached,
        ResponseError::FencedInstanceId,
    ] {
        assert!(errors.contains(&expected.code()), "{expected:?} never occurred");
    }
}
