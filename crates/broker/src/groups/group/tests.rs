//! Scenarios of one group, and random walks through its states.

mod random;
mod restart;

use std::collections::BTreeMap;

use super::persisted::PersistedGroup;
use super::*;
use crate::groups::TopicVisibility;
use crate::state_table::{self, Table};

const SESSION: Duration = Duration::from_secs(10);
const REBALANCE: Duration = Duration::from_secs(60);

fn s(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

/// A JoinGroup as a current client sends it: `range` only, metadata is the client's name.
fn join(client: &str, member_id: &str) -> JoinEvent {
    JoinEvent {
        member_id: s(member_id),
        fresh_id: StrBytes::new(),
        instance_id: None,
        client_id: s(client),
        client_host: s("/127.0.0.1"),
        session_timeout: SESSION,
        rebalance_timeout: REBALANCE,
        protocol_type: s("consumer"),
        protocols: vec![(s("range"), Bytes::from(client.to_owned()))],
        can_require_id: true,
        can_skip_assignment: true,
        visibility: TopicVisibility::default(),
    }
}

/// A JoinGroup of a version without MEMBER_ID_REQUIRED.
fn old_join(client: &str) -> JoinEvent {
    JoinEvent { can_require_id: false, can_skip_assignment: false, ..join(client, "") }
}

fn static_join(instance: &str, member_id: &str) -> JoinEvent {
    JoinEvent { instance_id: Some(s(instance)), ..join(instance, member_id) }
}

fn with_protocols(event: JoinEvent, names: &[&str]) -> JoinEvent {
    let protocols = names.iter().map(|name| (s(name), Bytes::from_static(b"topics"))).collect();
    JoinEvent { protocols, ..event }
}

/// A group, its clock, and the answers by waiter.
struct Bench {
    group: Group<u32, u32>,
    now: Instant,
    waiters: u32,
    joined: BTreeMap<u32, Result<Joined, Refusal>>,
    synced: BTreeMap<u32, Result<Synced, ResponseError>>,
    dropped: Vec<StrBytes>,
    /// Its persisted state.
    persisted: Option<PersistedGroup>,
}

impl Bench {
    fn new() -> Self {
        Self::with(Rules { initial_rebalance_delay: Duration::ZERO, max_members: 100 })
    }

    fn with(rules: Rules) -> Self {
        let now = Instant::now();
        Bench {
            group: Group::new(rules, now),
            now,
            waiters: 0,
            joined: BTreeMap::new(),
            synced: BTreeMap::new(),
            dropped: Vec::new(),
            persisted: None,
        }
    }

    /// Restarts the server, through the persisted state: waiting requests are not answered.
    fn restart(&mut self) {
        let mut read = PersistedGroups::default();
        if let Some(persisted) = &self.persisted {
            let record = persisted.encode("g");
            assert_eq!(persisted.record_bytes("g"), record.len());
            read.apply_encoded(&record).unwrap();
            assert_eq!(read.0["g"], *persisted);
            assert_eq!(
                state_table::decode::<PersistedGroups>(&state_table::encode(&read)),
                Ok(read)
            );
        }
        self.group = match self.persisted.clone() {
            Some(persisted) => Group::from_persisted(self.group.rules, self.now, persisted),
            None => Group::new(self.group.rules, self.now),
        };
    }

    fn collect(&mut self) {
        if self.group.is_unwritten() {
            self.persisted = self.group.persisted();
            self.group.written();
        }
        for effect in self.group.take_effects() {
            match effect {
                Effect::Joined(waiter, answer) => {
                    assert_eq!(self.joined.insert(waiter, answer), None, "answered twice");
                }
                Effect::Synced(waiter, answer) => {
                    assert_eq!(self.synced.insert(waiter, answer), None, "answered twice");
                }
                Effect::Dropped(member, _) => self.dropped.push(member),
            }
        }
    }

    /// Joins and returns the waiter; a fresh member id is `m<waiter>`.
    fn join(&mut self, event: JoinEvent) -> u32 {
        self.waiters += 1;
        let fresh_id = s(&format!("m{}", self.waiters));
        self.group.join(self.now, JoinEvent { fresh_id, ..event }, self.waiters);
        self.collect();
        self.waiters
    }

    fn sync(&mut self, member_id: &str, generation: i32, assignments: &[(&str, &str)]) -> u32 {
        self.waiters += 1;
        let assignments = assignments.iter().map(|(id, to)| (s(id), Bytes::from((*to).to_owned())));
        let event = SyncEvent {
            member_id: s(member_id),
            instance_id: None,
            generation,
            protocol_type: Some(s("consumer")),
            protocol: None,
            assignments: assignments.collect(),
        };
        self.group.sync(self.now, event, self.waiters);
        self.collect();
        self.waiters
    }

    fn heartbeat(&mut self, member_id: &str, generation: i32) -> Result<(), ResponseError> {
        self.group.heartbeat(self.now, &s(member_id), None, generation)
    }

    fn leave(&mut self, member_id: &str, instance_id: Option<&str>) -> Result<(), ResponseError> {
        let result = self.group.leave(self.now, &s(member_id), instance_id.map(s).as_ref());
        self.collect();
        result
    }

    fn commit(&mut self, member_id: &str, generation: i32) -> Result<(), ResponseError> {
        self.group.check_commit(self.now, &s(member_id), None, generation)
    }

    /// Advances the time as the timer would: stops at each deadline on the way.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        for _ in 0..10_000 {
            match self.group.deadline().filter(|deadline| *deadline <= until) {
                None => {
                    self.now = until;
                    return;
                }
                Some(deadline) => {
                    self.now = self.now.max(deadline);
                    self.group.tick(self.now);
                    self.collect();
                }
            }
        }
        panic!("the timer spins: {:?}", self.group);
    }

    fn generation_of(&self, waiter: u32) -> &Joined {
        match self.joined.get(&waiter) {
            Some(Ok(joined)) => joined,
            other => panic!("waiter {waiter} should have joined: {other:?}"),
        }
    }

    fn refusal_of(&self, waiter: u32) -> ResponseError {
        match self.joined.get(&waiter) {
            Some(Err(refusal)) => refusal.error,
            other => panic!("waiter {waiter} should have been refused: {other:?}"),
        }
    }

    fn assignment_of(&self, waiter: u32) -> &[u8] {
        match self.synced.get(&waiter) {
            Some(Ok(synced)) => &synced.assignment,
            other => panic!("waiter {waiter} should have an assignment: {other:?}"),
        }
    }

    /// Creates one stable generation of static members `i1`, `i2`, ... and returns their ids.
    fn stable_static(&mut self, count: usize) -> Vec<String> {
        let first: Vec<u32> =
            (1..=count).map(|n| self.join(static_join(&format!("i{n}"), ""))).collect();
        let ids: Vec<String> = first.iter().map(|waiter| format!("m{waiter}")).collect();
        // Without a delay the first makes its own generation; it joins again and all are in one.
        if count > 1 {
            self.join(static_join("i1", &ids[0]));
        }
        assert_eq!(self.group.state(), State::Completing);
        let generation = self.group.generation();
        let leader = self.group.leader.clone().unwrap_or_default();
        let plan: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), id.as_str())).collect();
        self.sync(&leader, generation, &plan);
        for id in &ids {
            self.sync(id, generation, &[]);
        }
        assert_eq!(self.group.state(), State::Stable);
        ids
    }
}

#[test]
fn a_new_member_receives_an_id_to_join_with() {
    let mut bench = Bench::new();
    let first = bench.join(join("a", ""));
    assert_eq!(bench.refusal_of(first), ResponseError::MemberIdRequired);
    assert_eq!(bench.joined[&first].as_ref().unwrap_err().member_id, s("m1"));
    assert_eq!((bench.group.state(), bench.group.member_count()), (State::Empty, 0));

    let second = bench.join(join("a", "m1"));
    let joined = bench.generation_of(second);
    assert_eq!((joined.generation, &joined.member_id, &joined.leader), (1, &s("m1"), &s("m1")));
    assert_eq!(joined.members.len(), 1);

    // An issued id that is never used expires after the session timeout.
    let other = bench.join(join("b", ""));
    assert!(bench.group.vacant_since().is_none());
    bench.sync("m1", 1, &[]);
    for _ in 0..3 {
        bench.pass(SESSION / 2);
        assert_eq!(bench.heartbeat("m1", 1), Ok(()));
    }
    let late = bench.join(join("b", &format!("m{other}")));
    assert_eq!(bench.refusal_of(late), ResponseError::UnknownMemberId);
}

#[test]
fn three_members_join_sync_and_become_stable() {
    let mut bench = Bench::new();
    let a = bench.join(old_join("a"));
    assert_eq!(bench.generation_of(a).generation, 1);
    let b = bench.join(old_join("b"));
    let c = bench.join(old_join("c"));
    assert_eq!(bench.group.state(), State::Preparing);
    assert!(!bench.joined.contains_key(&b) && !bench.joined.contains_key(&c));
    assert_eq!(bench.heartbeat("m1", 1), Err(ResponseError::RebalanceInProgress));

    let again = bench.join(join("a", "m1"));
    for waiter in [again, b, c] {
        let joined = bench.generation_of(waiter);
        assert_eq!((joined.generation, &joined.leader), (2, &s("m1")));
        assert_eq!(joined.protocol, s("range"));
    }
    let leader = bench.generation_of(again);
    let reported: Vec<_> =
        leader.members.iter().map(|m| (m.member_id.clone(), m.metadata.clone())).collect();
    assert_eq!(reported, [(s("m1"), "a".into()), (s("m2"), "b".into()), (s("m3"), "c".into())]);
    assert_eq!(bench.generation_of(b).members, []);

    let b = bench.sync("m2", 2, &[]);
    assert!(!bench.synced.contains_key(&b));
    assert_eq!(bench.heartbeat("m2", 2), Ok(()));
    assert_eq!(bench.commit("m2", 2), Err(ResponseError::RebalanceInProgress));
    let a = bench.sync("m1", 2, &[("m1", "p0"), ("m2", "p1"), ("stranger", "p9")]);
    assert_eq!(bench.group.state(), State::Stable);
    assert_eq!((bench.assignment_of(a), bench.assignment_of(b)), (&b"p0"[..], &b"p1"[..]));
    // The member without an assignment gets an empty one, which is an answer too; and it may repeat
    // the request.
    for _ in 0..2 {
        let c = bench.sync("m3", 2, &[]);
        assert_eq!(bench.assignment_of(c), b"");
    }
    assert_eq!(bench.commit("m2", 2), Ok(()));
    assert_eq!(bench.commit("m2", 1), Err(ResponseError::IllegalGeneration));
    assert_eq!(bench.commit("", -1), Err(ResponseError::UnknownMemberId));
    let description = bench.group.describe();
    assert_eq!((description.state, description.protocol), (State::Stable, s("range")));
    assert_eq!(description.members[1].assignment, "p1");
}

#[test]
fn a_member_that_leaves_makes_the_others_rejoin() {
    let mut bench = Bench::new();
    let ids = bench.stable_static(3);
    let generation = bench.group.generation();
    assert_eq!(bench.leave(&ids[2], None), Ok(()));
    assert_eq!(bench.leave(&ids[2], None), Err(ResponseError::UnknownMemberId));
    assert_eq!(bench.heartbeat(&ids[0], generation), Err(ResponseError::RebalanceInProgress));
    let a = bench.join(static_join("i1", &ids[0]));
    let b = bench.join(static_join("i2", &ids[1]));
    assert_eq!(bench.generation_of(a).generation, generation + 1);
    assert_eq!(bench.generation_of(a).members.len() + bench.generation_of(b).members.len(), 2);

    // The last member leaves an empty group, whose offsets any client may set.
    assert_eq!(bench.leave(&ids[0], None), Ok(()));
    assert_eq!(bench.leave(&ids[1], None), Ok(()));
    assert_eq!(bench.group.state(), State::Empty);
    assert_eq!(bench.group.vacant_since(), Some(bench.now));
    assert_eq!(bench.commit("", -1), Ok(()));
    assert_eq!(bench.commit(&ids[0], generation + 1), Err(ResponseError::UnknownMemberId));
}

#[test]
fn a_silent_member_expires_and_others_stay_by_their_heartbeats() {
    let mut bench = Bench::new();
    let ids = bench.stable_static(2);
    let generation = bench.group.generation();
    bench.pass(SESSION * 6 / 10);
    assert_eq!(bench.heartbeat(&ids[0], generation), Ok(()));
    bench.pass(SESSION * 6 / 10);
    assert_eq!(bench.dropped, [s(&ids[1])]);
    assert_eq!(bench.heartbeat(&ids[0], generation), Err(ResponseError::RebalanceInProgress));
    assert_eq!(bench.heartbeat(&ids[1], generation), Err(ResponseError::UnknownMemberId));
    bench.pass(SESSION);
    assert_eq!((bench.group.state(), bench.group.deadline()), (State::Empty, None));
}

#[test]
fn a_rebalance_removes_a_member_that_only_sends_heartbeats() {
    let mut bench = Bench::new();
    let a = bench.join(old_join("a"));
    bench.sync("m1", bench.generation_of(a).generation, &[]);
    let b = bench.join(old_join("b"));
    for _ in 0..13 {
        bench.pass(SESSION / 2);
        let _ = bench.heartbeat("m1", 1);
    }
    assert_eq!(bench.dropped, [s("m1")]);
    assert_eq!(bench.generation_of(b).leader, bench.generation_of(b).member_id);
    assert_eq!(bench.generation_of(b).members.len(), 1);
}

#[test]
fn the_first_join_of_a_member_waits_no_longer_than_five_minutes() {
    let mut bench = Bench::new();
    let slow = JoinEvent { rebalance_timeout: NEW_MEMBER_JOIN_TIMEOUT * 4, ..old_join("a") };
    bench.join(slow);
    bench.sync("m1", 1, &[]);
    let b = bench.join(old_join("b"));
    for _ in 0..59 {
        bench.pass(NEW_MEMBER_JOIN_TIMEOUT / 60);
        let _ = bench.heartbeat("m1", 1);
    }
    assert!(!bench.joined.contains_key(&b));
    bench.pass(NEW_MEMBER_JOIN_TIMEOUT / 60);
    assert_eq!(bench.refusal_of(b), ResponseError::UnknownMemberId);
    assert_eq!(bench.dropped, [s(&format!("m{b}"))]);
}

#[test]
fn a_rebalance_ends_the_wait_for_an_assignment() {
    let mut bench = Bench::new();
    bench.join(old_join("a"));
    bench.join(old_join("b"));
    bench.join(join("a", "m1"));
    let waiting = bench.sync("m2", 2, &[]);
    let c = bench.join(old_join("c"));
    assert_eq!(bench.synced[&waiting], Err(ResponseError::RebalanceInProgress));
    let late = bench.sync("m1", 2, &[("m1", "p0")]);
    assert_eq!(bench.synced[&late], Err(ResponseError::RebalanceInProgress));
    bench.join(join("a", "m1"));
    bench.join(join("b", "m2"));
    assert_eq!(bench.generation_of(c).generation, 3);
    let late = bench.sync("m1", 2, &[("m1", "p0")]);
    assert_eq!(bench.synced[&late], Err(ResponseError::IllegalGeneration));
}

#[test]
fn a_leader_that_never_assigns_is_removed() {
    let mut bench = Bench::new();
    bench.join(old_join("a"));
    let b = bench.join(old_join("b"));
    bench.join(join("a", "m1"));
    assert_eq!(bench.generation_of(b).leader, s("m1"));
    let waiting = bench.sync("m2", 2, &[]);
    for _ in 0..12 {
        bench.pass(REBALANCE / 12);
        let _ = bench.heartbeat("m1", 2);
    }
    assert_eq!(bench.synced[&waiting], Err(ResponseError::RebalanceInProgress));
    assert_eq!(bench.dropped, [s("m1")]);
    let b = bench.join(join("b", "m2"));
    assert_eq!((bench.generation_of(b).generation, &bench.generation_of(b).leader), (3, &s("m2")));
}

#[test]
fn a_waiting_member_does_not_expire() {
    let mut bench = Bench::new();
    bench.join(old_join("a"));
    let b = bench.join(old_join("b"));
    bench.join(join("a", "m1"));
    let waiting = bench.sync("m2", 2, &[]);
    assert_eq!(bench.heartbeat("m2", 2), Ok(()));
    bench.pass(SESSION / 2);
    assert_eq!(bench.heartbeat("m1", 2), Ok(()));
    bench.pass(SESSION * 3 / 4);
    assert_eq!(bench.generation_of(b).generation, 2);
    bench.sync("m1", 2, &[("m2", "p1")]);
    assert_eq!(bench.assignment_of(waiting), b"p1");

    // The same holds for a member that waits in a JoinGroup for an absent one.
    let rejoin = bench.join(with_protocols(join("b", "m2"), &["range", "sticky"]));
    assert_eq!(bench.heartbeat("m2", 2), Err(ResponseError::RebalanceInProgress));
    for _ in 0..11 {
        bench.pass(SESSION / 2);
        assert_eq!(bench.heartbeat("m1", 2), Err(ResponseError::RebalanceInProgress));
    }
    assert_eq!(bench.dropped, [] as [StrBytes; 0]);
    bench.pass(SESSION / 2);
    assert_eq!(bench.dropped, [s("m1")]);
    assert_eq!(bench.generation_of(rejoin).leader, s("m2"));
}

#[test]
fn an_absent_leader_is_replaced_by_a_joined_member() {
    let mut bench = Bench::new();
    let long = |event: JoinEvent| JoinEvent { session_timeout: REBALANCE * 3, ..event };
    bench.join(long(static_join("i1", "")));
    bench.join(long(static_join("i2", "")));
    let leader = bench.join(long(static_join("i1", "m1")));
    assert_eq!(bench.generation_of(leader).leader, s("m1"));
    let other = bench.join(with_protocols(long(static_join("i2", "m2")), &["range", "sticky"]));
    bench.pass(REBALANCE);
    assert_eq!(bench.generation_of(other).leader, s("m2"));
    assert_eq!(bench.generation_of(other).members.len(), 2);
}

#[test]
fn a_repeated_join_returns_the_same_answer_and_the_leader_can_start_a_rebalance() {
    let mut bench = Bench::new();
    bench.join(old_join("a"));
    bench.join(old_join("b"));
    bench.join(join("a", "m1"));
    let again = bench.join(join("b", "m2"));
    assert_eq!(bench.generation_of(again).generation, 2);
    let leader_again = bench.join(join("a", "m1"));
    assert_eq!(bench.generation_of(leader_again).members.len(), 2);
    bench.sync("m1", 2, &[]);
    bench.sync("m2", 2, &[]);
    let again = bench.join(join("b", "m2"));
    assert_eq!(bench.generation_of(again).generation, 2);
    assert_eq!(bench.group.state(), State::Stable);
    bench.join(join("a", "m1"));
    assert_eq!(bench.group.state(), State::Preparing);
    // A join that is repeated while it waits replaces the earlier one.
    let twice = bench.join(join("a", "m1"));
    assert_eq!(bench.refusal_of(twice - 1), ResponseError::RebalanceInProgress);
    bench.join(join("b2", "m2"));
    assert_eq!(bench.generation_of(twice).generation, 3);
    assert_eq!(bench.generation_of(twice).members[1].metadata, "b2");
}

#[test]
fn members_must_share_a_protocol_and_votes_select_it() {
    let mut bench = Bench::new();
    let nothing = bench.join(with_protocols(old_join("x"), &[]));
    assert_eq!(bench.refusal_of(nothing), ResponseError::InconsistentGroupProtocol);
    let nothing = bench.join(JoinEvent { protocol_type: StrBytes::new(), ..old_join("x") });
    assert_eq!(bench.refusal_of(nothing), ResponseError::InconsistentGroupProtocol);

    let a = bench.join(with_protocols(old_join("a"), &["range", "sticky", "robin"]));
    let a_id = bench.generation_of(a).member_id.clone();
    let other = bench.join(with_protocols(old_join("x"), &["exotic"]));
    assert_eq!(bench.refusal_of(other), ResponseError::InconsistentGroupProtocol);
    let connect = JoinEvent { protocol_type: s("connect"), ..old_join("x") };
    let connect = bench.join(connect);
    assert_eq!(bench.refusal_of(connect), ResponseError::InconsistentGroupProtocol);

    // "range" is not common, "sticky" has two votes of three.
    bench.join(with_protocols(old_join("b"), &["sticky", "robin"]));
    let c = bench.join(with_protocols(old_join("c"), &["robin", "sticky"]));
    bench.join(with_protocols(join("a", &a_id), &["range", "sticky", "robin"]));
    assert_eq!(bench.generation_of(c).protocol, s("sticky"));

    let wrong = SyncEvent {
        member_id: a_id.clone(),
        instance_id: None,
        generation: 2,
        protocol_type: None,
        protocol: Some(s("robin")),
        assignments: Vec::new(),
    };
    bench.group.sync(bench.now, wrong, 1000);
    bench.collect();
    assert_eq!(bench.synced[&1000], Err(ResponseError::InconsistentGroupProtocol));
}

#[test]
fn the_leader_decides_between_equal_votes() {
    let mut bench = Bench::new();
    bench.join(with_protocols(old_join("a"), &["zeta", "alpha"]));
    bench.join(with_protocols(old_join("b"), &["alpha", "zeta"]));
    let a = bench.join(with_protocols(join("a", "m1"), &["zeta", "alpha"]));
    assert_eq!(bench.generation_of(a).protocol, s("zeta"));
}

#[test]
fn a_static_member_restarts_without_a_rebalance() {
    let mut bench = Bench::new();
    let ids = bench.stable_static(2);
    let generation = bench.group.generation();

    // A follower.
    let follower = bench.join(static_join("i2", ""));
    let joined = bench.generation_of(follower).clone();
    assert_eq!((joined.generation, &joined.leader), (generation, &s(&ids[0])));
    assert_eq!((joined.members, joined.skip_assignment), (Vec::new(), false));
    let sync = bench.sync(&joined.member_id, generation, &[]);
    assert_eq!(bench.assignment_of(sync), ids[1].as_bytes(), "it keeps its assignment");

    // The leader: it leads under its new name, and must not assign again.
    let leader = bench.join(static_join("i1", ""));
    let joined = bench.generation_of(leader);
    assert_eq!((&joined.leader, joined.skip_assignment), (&joined.member_id, true));
    assert_eq!((joined.generation, joined.members.len()), (generation, 2));

    // A leader whose client does not support that receives another leader's id.
    let before = bench.generation_of(leader).member_id.clone();
    let old_client = JoinEvent { can_skip_assignment: false, ..static_join("i1", "") };
    let old_client = bench.join(old_client);
    let joined = bench.generation_of(old_client);
    assert_eq!((&joined.leader, joined.skip_assignment, joined.members.len()), (&before, false, 0));
    assert_eq!((bench.group.state(), bench.group.generation()), (State::Stable, generation));
}

#[test]
fn a_static_member_that_changes_the_protocol_needs_a_rebalance() {
    let mut bench = Bench::new();
    let both = with_protocols(static_join("i1", ""), &["range", "sticky"]);
    let first = bench.join(both);
    bench.sync("m1", bench.generation_of(first).generation, &[]);
    let other = bench.join(with_protocols(static_join("i1", ""), &["sticky"]));
    assert_eq!(bench.generation_of(other).generation, 2);
    assert_eq!(bench.generation_of(other).protocol, s("sticky"));
}

#[test]
fn the_previous_incarnation_of_a_static_member_is_fenced() {
    let mut bench = Bench::new();
    let ids = bench.stable_static(2);
    let generation = bench.group.generation();
    bench.join(static_join("i2", ""));
    let (old, instance) = (s(&ids[1]), s("i2"));
    let fenced = Err(ResponseError::FencedInstanceId);
    assert_eq!(bench.group.heartbeat(bench.now, &old, Some(&instance), generation), fenced);
    assert_eq!(bench.group.check_commit(bench.now, &old, Some(&instance), generation), fenced);
    assert_eq!(bench.leave(&ids[1], Some("i2")), fenced);
    let rejoin = bench.join(static_join("i2", &ids[1]));
    assert_eq!(bench.refusal_of(rejoin), ResponseError::FencedInstanceId);
    let unknown = bench.join(static_join("i3", &ids[1]));
    assert_eq!(bench.refusal_of(unknown), ResponseError::UnknownMemberId);
    // An operator removes it by its instance id alone.
    assert_eq!(bench.leave("", Some("i2")), Ok(()));
    assert_eq!(bench.leave("", Some("i2")), Err(ResponseError::UnknownMemberId));
    assert_eq!(bench.group.member_count(), 1);

    // If its previous incarnation waits for a rebalance, that request is answered.
    bench.join(static_join("i2", ""));
    let newer = bench.join(static_join("i2", ""));
    assert_eq!(bench.refusal_of(newer - 1), ResponseError::FencedInstanceId);
    bench.join(static_join("i1", &ids[0]));
    let generation = bench.generation_of(newer).generation;
    let waiting = bench.sync(&format!("m{newer}"), generation, &[]);
    bench.join(static_join("i2", ""));
    assert_eq!(bench.synced[&waiting], Err(ResponseError::FencedInstanceId));
}

#[test]
fn absent_static_members_stay_until_their_session_ends() {
    let mut bench = Bench::new();
    let long = |event: JoinEvent| JoinEvent { session_timeout: REBALANCE * 3, ..event };
    bench.join(long(static_join("i1", "")));
    bench.join(long(static_join("i2", "")));
    bench.join(long(static_join("i1", "m1")));
    bench.sync("m1", 2, &[]);
    bench.sync("m2", 2, &[]);
    // The leader asks for a rebalance; the other is away, and stays a member.
    let leader = bench.join(long(static_join("i1", "m1")));
    bench.pass(REBALANCE);
    assert_eq!(bench.generation_of(leader).members.len(), 2);
    assert_eq!(bench.dropped, [] as [StrBytes; 0]);
    // It has sent no SyncGroup before its deadline.
    bench.sync("m1", 3, &[]);
    bench.pass(REBALANCE);
    assert_eq!(bench.dropped, [s("m2")]);
}

#[test]
fn a_full_group_refuses_new_members() {
    let rules = Rules { initial_rebalance_delay: Duration::ZERO, max_members: 2 };
    let mut bench = Bench::with(rules);
    bench.stable_static(2);
    for event in [old_join("c"), join("c", ""), static_join("i3", "")] {
        let refused = bench.join(event);
        assert_eq!(bench.refusal_of(refused), ResponseError::GroupMaxSizeReached);
    }
    let replaced = bench.join(static_join("i2", ""));
    bench.generation_of(replaced);

    let mut bench = Bench::with(rules);
    for expected in [ResponseError::MemberIdRequired; 2] {
        let waiter = bench.join(join("a", ""));
        assert_eq!(bench.refusal_of(waiter), expected);
    }
    let third = bench.join(join("a", ""));
    assert_eq!(bench.refusal_of(third), ResponseError::GroupMaxSizeReached);
}

#[test]
fn the_initial_delay_gathers_members() {
    let delay = Duration::from_secs(3);
    let mut bench = Bench::with(Rules { initial_rebalance_delay: delay, max_members: 100 });
    let a = bench.join(old_join("a"));
    bench.pass(delay * 2 / 3);
    let b = bench.join(old_join("b"));
    // Extended, because a member joined; over, because no other did.
    bench.pass(delay);
    assert!(!bench.joined.contains_key(&a));
    bench.pass(delay);
    assert_eq!(bench.generation_of(a).generation, 1);
    assert_eq!(bench.generation_of(b).generation, 1);

    // It is extended up to the rebalance timeout only.
    let mut bench = Bench::with(Rules { initial_rebalance_delay: delay, max_members: 100 });
    let first = bench.join(old_join("a"));
    for _ in 0..30 {
        bench.pass(REBALANCE / 30);
        bench.join(old_join("more"));
    }
    assert_eq!(bench.generation_of(first).generation, 1);
}

#[test]
fn a_dead_group_answers_all_requests_with_a_retriable_error() {
    let mut bench = Bench::new();
    bench.join(old_join("a"));
    bench.join(old_join("b"));
    bench.join(join("a", "m1"));
    let syncing = bench.sync("m2", 2, &[]);
    bench.group.kill();
    bench.collect();
    assert_eq!(bench.synced[&syncing], Err(ResponseError::CoordinatorNotAvailable));
    let gone = Err(ResponseError::CoordinatorNotAvailable);
    assert_eq!(bench.heartbeat("m1", 2), gone);
    assert_eq!(bench.leave("m1", None), gone);
    assert_eq!(bench.commit("", -1), gone);
    let join = bench.join(old_join("a"));
    assert_eq!(bench.refusal_of(join), ResponseError::CoordinatorNotAvailable);
    assert_eq!((bench.group.deadline(), bench.group.size_bytes()), (None, 0));
}

#[test]
fn a_rebalance_timeout_of_zero_does_not_make_the_timer_spin() {
    let mut bench = Bench::new();
    let hasty = |event: JoinEvent| JoinEvent { rebalance_timeout: Duration::ZERO, ..event };
    bench.join(hasty(static_join("i1", "")));
    bench.sync("m1", 1, &[]);
    bench.join(hasty(static_join("i2", "")));
    bench.pass(SESSION * 4);
    assert_eq!(bench.group.state(), State::Empty);
}
