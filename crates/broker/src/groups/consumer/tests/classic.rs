//! Members of the classic protocol among others: converted, moved, converted back; and random
//! histories of such a group.

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::consumer_protocol_subscription::TopicPartition;
use kafka_protocol::messages::{ConsumerProtocolSubscription, TopicName};
use kafka_protocol::protocol::{Encodable, StrBytes};
use proptest::prelude::*;

use super::*;
use crate::groups::embedded;
use crate::groups::group::{JoinEvent, Migrant, Refusal, SyncEvent};

const CLASSIC_SESSION: Duration = Duration::from_secs(30);

fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn topics() -> TopicsView {
    view(1, &[("t", 4), ("u", 3)])
}

/// The metadata that a consumer sends.
fn metadata(names: &[&str], owned: &Assignment, topics: &TopicsView) -> Bytes {
    let owned = owned.iter().map(|(id, partitions)| {
        TopicPartition::default()
            .with_topic(TopicName(text(topics.name(*id).unwrap())))
            .with_partitions(partitions.iter().copied().collect())
    });
    let reported = ConsumerProtocolSubscription::default()
        .with_topics(names.iter().map(|name| text(name)).collect())
        .with_owned_partitions(owned.collect());
    let mut bytes = BytesMut::new();
    bytes.put_i16(1);
    reported.encode(&mut bytes, 1).unwrap();
    bytes.freeze()
}

fn classic_join(id: &str, fresh_id: &str, metadata: Bytes) -> JoinEvent {
    JoinEvent {
        member_id: text(id),
        fresh_id: text(fresh_id),
        instance_id: None,
        client_id: text("c"),
        client_host: text("/h"),
        session_timeout: CLASSIC_SESSION,
        rebalance_timeout: Duration::from_secs(60),
        protocol_type: text("consumer"),
        protocols: vec![(text("range"), metadata)],
        can_require_id: true,
        can_skip_assignment: true,
        visibility: TopicVisibility::default(),
    }
}

fn sync(id: &str, generation: i32) -> SyncEvent {
    SyncEvent {
        member_id: text(id),
        instance_id: None,
        generation,
        protocol_type: Some(text("consumer")),
        protocol: Some(text("range")),
        assignments: vec![],
    }
}

fn migrant(id: &str, assignment: &Assignment) -> Migrant {
    let topics = topics();
    Migrant {
        member_id: text(id),
        instance_id: None,
        client_id: text("c"),
        client_host: text("/h"),
        session_timeout: CLASSIC_SESSION,
        rebalance_timeout: Duration::from_secs(60),
        protocols: vec![(text("range"), metadata(&["t"], &Assignment::new(), &topics))],
        assignment: embedded::write_assignment(assignment, &topics),
    }
}

#[test]
fn a_classic_group_is_converted_to_a_consumer_group_and_back() {
    let (now, topics) = (Instant::now(), topics());
    let all = parts("t", &[0, 1, 2, 3]);
    let migrants = vec![migrant("old", &all)];
    let mut group = ConsumerGroup::of_migrants(rules(), now, &topics, 7, migrants).unwrap();
    assert_eq!((group.state.epoch, group.phase()), (7, Phase::Stable));
    assert!(group.is_all_classic());
    let old = text("old");
    assert_eq!(group.classic_heartbeat(now, &old, None, 7), Ok(()));
    assert_eq!(group.check_epoch("old", 7), Ok(()));

    // The new one waits until the old one has joined again, which gives up all partitions for that.
    let new = group.heartbeat(now, rules(), &topics, &join("new", &["t"])).unwrap();
    assert_eq!((new.epoch, new.assignment), (8, Some(Assignment::new())));
    assert!(!group.is_all_classic());
    let rebalance = Err(ResponseError::RebalanceInProgress);
    assert_eq!(group.classic_heartbeat(now, &old, None, 7), rebalance);
    assert_eq!(
        group.classic_sync(now, &sync("old", 7)).unwrap_err(),
        ResponseError::RebalanceInProgress
    );
    let nothing = metadata(&["t"], &Assignment::new(), &topics);
    let joined =
        group.classic_join(now, rules(), &topics, classic_join("old", "", nothing)).unwrap();
    assert_eq!((joined.generation, &*joined.leader, &*joined.protocol), (8, "", "range"));
    assert_eq!(
        group.classic_sync(now, &sync("old", 7)).unwrap_err(),
        ResponseError::IllegalGeneration
    );
    let synced = group.classic_sync(now, &sync("old", 8)).unwrap();
    let of_old = embedded::read_assignment(&synced.assignment, &topics).unwrap();
    let of_new =
        group.heartbeat(now, rules(), &topics, &go_on("new", 8)).unwrap().assignment.unwrap();
    assert_eq!((of_old[&topic_id("t")].len(), of_new[&topic_id("t")].len()), (2, 2));
    assert!(of_old[&topic_id("t")].is_disjoint(&of_new[&topic_id("t")]));
    assert_eq!(group.classic_heartbeat(now, &old, None, 8), Ok(()));
    assert_eq!(group.phase(), Phase::Stable);

    group.leave(now, "new", None, false).unwrap();
    assert!(group.is_all_classic());
    assert_eq!((group.state.target_epoch, group.state.epoch), (8, 9), "it has received the first");
    assert_eq!(group.migrants()[0].assignment, synced.assignment);
}

#[test]
fn a_cooperative_member_revokes_partitions_before_others_get_them() {
    let (now, topics) = (Instant::now(), topics());
    let all = parts("t", &[0, 1, 2, 3]);
    let migrants = vec![migrant("old", &all)];
    let mut group = ConsumerGroup::of_migrants(rules(), now, &topics, 1, migrants).unwrap();
    group.heartbeat(now, rules(), &topics, &join("new", &["t"])).unwrap();
    let rejoin = |group: &mut ConsumerGroup, owned: &Assignment| {
        let event = classic_join("old", "", metadata(&["t"], owned, &topics));
        let generation = group.classic_join(now, rules(), &topics, event).unwrap().generation;
        let synced = group.classic_sync(now, &sync("old", generation)).unwrap();
        (generation, embedded::read_assignment(&synced.assignment, &topics).unwrap())
    };
    let (generation, kept) = rejoin(&mut group, &all);
    assert_eq!((generation, kept[&topic_id("t")].len()), (1, 2));
    // It may still have the rest.
    assert_eq!(group.heartbeat(now, rules(), &topics, &go_on("new", 2)).unwrap().assignment, None);
    let old = text("old");
    let rebalance = Err(ResponseError::RebalanceInProgress);
    assert_eq!(group.classic_heartbeat(now, &old, None, 1), rebalance);
    assert_eq!(rejoin(&mut group, &kept), (2, kept));
    let new = group.heartbeat(now, rules(), &topics, &go_on("new", 2)).unwrap();
    assert_eq!(new.assignment.unwrap()[&topic_id("t")].len(), 2);
    assert_eq!(group.phase(), Phase::Stable);
}

#[test]
fn a_classic_member_that_does_not_rejoin_is_removed() {
    let (now, topics) = (Instant::now(), topics());
    let migrants = vec![migrant("a", &parts("t", &[0, 1])), migrant("b", &parts("t", &[2, 3]))];
    let mut group = ConsumerGroup::of_migrants(rules(), now, &topics, 1, migrants).unwrap();
    group.heartbeat(now, rules(), &topics, &join("new", &["t"])).unwrap();
    // It continues its heartbeats, and does not join.
    let mut epoch = group.state.epoch;
    for seconds in (0..60).step_by(10) {
        let at = now + Duration::from_secs(seconds);
        let _ = group.classic_heartbeat(at, &text("a"), None, 1);
        epoch = group.heartbeat(at, rules(), &topics, &go_on("new", epoch)).unwrap().epoch;
        group.written(group.unwritten.len());
        let gone: Vec<_> = group.tick(at).into_iter().map(|(id, _)| id).collect();
        // The other has sent none.
        assert_eq!(
            gone.iter().map(|id| &**id).collect::<Vec<_>>(),
            ["b"][..usize::from(seconds == 30)]
        );
        group.written(group.unwritten.len());
    }
    let at = now + Duration::from_secs(60);
    let _ = group.classic_heartbeat(at, &text("a"), None, 1);
    assert_eq!(&*group.tick(at)[0].0, "a");
}

/// Its client may have minutes of work before it joins, and sends heartbeats meanwhile.
#[test]
fn a_member_with_heartbeats_after_a_restart_has_its_rebalance_timeout_to_join_again() {
    let (now, topics) = (Instant::now(), topics());
    let migrants = vec![migrant("old", &parts("t", &[0, 1, 2, 3]))];
    let group = ConsumerGroup::of_migrants(rules(), now, &topics, 7, migrants).unwrap();
    let mut group = ConsumerGroup::new(group.state, rules(), now);
    let mut beat = |seconds| {
        let at = now + Duration::from_secs(seconds);
        let gone = group.tick(at);
        group.written(group.unwritten.len());
        (group.classic_heartbeat(at, &text("old"), None, 7), gone.len())
    };
    for seconds in (10..70).step_by(10) {
        assert_eq!(beat(seconds), (Err(ResponseError::RebalanceInProgress), 0), "{seconds} s");
    }
    assert_eq!(beat(70), (Err(ResponseError::UnknownMemberId), 1));
}

/// A static member is stopped without leaving, and restarted with the other protocol.
#[test]
fn a_static_member_can_restart_with_the_other_protocol() {
    let (now, topics) = (Instant::now(), topics());
    let all = parts("t", &[0, 1, 2, 3]);
    let named = |id: &str| Migrant { instance_id: Some(text("i")), ..migrant(id, &all) };
    let mut group =
        ConsumerGroup::of_migrants(rules(), now, &topics, 7, vec![named("old")]).unwrap();
    let join = |id: &str| Beat { instance_id: Some("i".into()), ..join(id, &["t"]) };
    let new = group.heartbeat(now, rules(), &topics, &join("new")).unwrap();
    assert_eq!((new.epoch, new.assignment), (8, Some(all)));
    assert!(!group.is_all_classic());
    let fenced = Err(ResponseError::FencedInstanceId);
    assert_eq!(group.classic_heartbeat(now, &text("old"), Some(&text("i")), 7), fenced);
    // A member of the consumer protocol leaves explicitly.
    let another = group.heartbeat(now, rules(), &topics, &join("another"));
    assert_eq!(error(another), ResponseError::UnreleasedInstanceId);
}

/// After a restart the protocol of an instance id's holder is unknown.
#[test]
fn a_static_member_has_to_retry_until_the_protocol_of_the_holder_is_known() {
    let (now, topics) = (Instant::now(), topics());
    let all = parts("t", &[0, 1, 2, 3]);
    let old = Migrant { instance_id: Some(text("i")), ..migrant("old", &all) };
    let group = ConsumerGroup::of_migrants(rules(), now, &topics, 7, vec![old]).unwrap();
    let restarted = || ConsumerGroup::new(group.state.clone(), rules(), now);
    let named = |beat: Beat| Beat { instance_id: Some("i".into()), ..beat };
    let new = named(join("new", &["t"]));

    let mut group = restarted();
    let refused = group.heartbeat(now, rules(), &topics, &new);
    assert_eq!(error(refused), ResponseError::CoordinatorLoadInProgress);
    let heard = group.classic_heartbeat(now, &text("old"), Some(&text("i")), 7);
    assert_eq!(heard, Err(ResponseError::RebalanceInProgress));
    let taken = group.heartbeat(now, rules(), &topics, &new).unwrap();
    assert_eq!(taken.assignment, Some(all));

    let mut group = restarted();
    group.heartbeat(now, rules(), &topics, &named(go_on("old", 7))).unwrap();
    let refused = group.heartbeat(now, rules(), &topics, &new);
    assert_eq!(error(refused), ResponseError::UnreleasedInstanceId);

    let mut group = restarted();
    assert_eq!(group.tick(now + SESSION).len(), 1);
    group.heartbeat(now + SESSION, rules(), &topics, &new).unwrap();
}

/// A client that names a topic learns no more about it than by a heartbeat of the consumer
/// protocol, which would be refused.
#[test]
fn a_member_gets_no_topics_that_it_may_not_describe() {
    let now = Instant::now();
    let topics = view(1, &[("open", 2), ("secret", 2)]);
    let mut group = group(now);
    group.heartbeat(now, rules(), &topics, &join("new", &["open"])).unwrap();
    let see = Clerk { viewer: "clerk", sees_all: Arc::default() };
    let event = JoinEvent {
        visibility: TopicVisibility(Some(Arc::new(see))),
        can_require_id: false,
        ..classic_join("", "old", metadata(&["open", "secret"], &Assignment::new(), &topics))
    };
    group.classic_join(now, rules(), &topics, event).unwrap();
    let target = &group.state().members["old"].target;
    assert_eq!(*target, parts("open", &[1]));
}

#[test]
fn members_that_are_not_consumers_are_not_converted() {
    let (now, topics) = (Instant::now(), topics());
    let mut other = migrant("connect", &Assignment::new());
    other.protocols[0].1 = Bytes::from_static(b"?");
    assert!(ConsumerGroup::of_migrants(rules(), now, &topics, 1, vec![other]).is_none());
    let mut group = group(now);
    group.heartbeat(now, rules(), &topics, &join("new", &["t"])).unwrap();
    let good = || metadata(&["t"], &Assignment::new(), &topics);
    let mut refused = |event: JoinEvent| {
        let Refusal { error, member_id } =
            group.classic_join(now, rules(), &topics, event).unwrap_err();
        (error, member_id.to_string())
    };
    let connect = JoinEvent { protocol_type: text("connect"), ..classic_join("", "f", good()) };
    assert_eq!(refused(connect).0, ResponseError::InconsistentGroupProtocol);
    let garbage = classic_join("", "f", Bytes::from_static(b"?"));
    assert_eq!(refused(garbage).0, ResponseError::InconsistentGroupProtocol);
    let without_id = classic_join("", "f", good());
    assert_eq!(refused(without_id), (ResponseError::MemberIdRequired, "f".to_owned()));
    // An active member of the consumer protocol is not removed by such a request.
    assert_eq!(refused(classic_join("new", "", good())).0, ResponseError::UnknownMemberId);
    let unknown = Err(ResponseError::UnknownMemberId);
    assert_eq!(group.classic_heartbeat(now, &text("new"), None, 1), unknown);
    assert_eq!(group.classic_leave(now, &text("new"), None), unknown);
    assert!(group.state.members.contains_key("new"));
}

/// A change that does not fit in a record would never be written, and no request of the group would
/// be answered.
#[test]
fn a_subscription_that_is_too_large_is_refused() {
    let (now, topics) = (Instant::now(), topics());
    let mut group = group(now);
    group.heartbeat(now, rules(), &topics, &join("new", &["t"])).unwrap();
    group.written(group.unwritten.len());
    let names: Vec<String> = (0..20 << 10).map(|at| format!("{at:01024}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let large = metadata(&names, &Assignment::new(), &topics);
    let joined =
        group.classic_join(now, rules(), &topics, classic_join("large", "", large.clone()));
    assert_eq!(joined.unwrap_err().error, ResponseError::InvalidRequest);
    assert!(group.unwritten.is_empty());
    group.heartbeat(now, rules(), &topics, &go_on("new", 1)).unwrap();
    let mut migrant = migrant("large", &Assignment::new());
    migrant.protocols[0].1 = large;
    assert!(ConsumerGroup::of_migrants(rules(), now, &topics, 1, vec![migrant]).is_none());
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The next step of the client: join, sync, or heartbeat.
    Next(usize),
    /// The next step, but its response is lost; the client repeats the request.
    Lost(usize),
    Leave(usize),
    Seconds(u64),
    Restart,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    #[default]
    Join,
    Sync,
    Beat,
}

/// Clients 0 and 1 speak the consumer protocol. 2 speaks the classic one and gives up everything to
/// join again; 3 and 4 speak the classic one and keep what they may.
#[derive(Clone, Debug, Default)]
struct Client {
    lives: usize,
    id: String,
    epoch: i32,
    step: Step,
    used: Assignment,
    is_member: bool,
    /// It got no response, so its next heartbeat contains everything.
    missed_answer: bool,
}

struct World {
    now: Instant,
    group: ConsumerGroup,
    clients: Vec<Client>,
}

const CLIENTS: usize = 5;

fn is_modern(client: usize) -> bool {
    client < 2
}

fn world_rules() -> ConsumerRules {
    ConsumerRules { max_members: 100, ..rules() }
}

impl World {
    fn modern(&mut self, client: usize, is_lost: bool) {
        let c = &mut self.clients[client];
        if c.step == Step::Join {
            c.lives += 1;
            *c = Client {
                lives: c.lives,
                id: format!("m{client}-{}", c.lives),
                ..Client::default()
            };
        }
        let is_joining = c.step == Step::Join;
        c.is_member = true;
        let beat = match is_joining {
            true => join(&c.id, &["t", "u"]),
            false if c.missed_answer => {
                Beat { epoch: c.epoch, ..owns(join(&c.id, &["t", "u"]), &c.used) }
            }
            false => owns(go_on(&c.id, c.epoch), &c.used),
        };
        c.missed_answer = is_lost;
        let answer = self.group.heartbeat(self.now, world_rules(), &topics(), &beat);
        let c = &mut self.clients[client];
        match answer {
            Ok(_) if is_lost => {}
            Ok(answer) => {
                c.step = Step::Beat;
                c.epoch = answer.epoch;
                c.used = answer.assignment.unwrap_or(std::mem::take(&mut c.used));
            }
            Err(_) => c.stop(),
        }
    }

    fn classic(&mut self, client: usize, is_lost: bool) {
        let c = &mut self.clients[client];
        let id = text(&c.id);
        match c.step {
            Step::Join => {
                if client == 2 {
                    c.used.clear();
                }
                c.lives += 1;
                c.is_member = true;
                let metadata = metadata(&["t", "u"], &c.used, &topics());
                let event = classic_join(&c.id, &format!("c{client}-{}", c.lives), metadata);
                let joined = self.group.classic_join(self.now, world_rules(), &topics(), event);
                let c = &mut self.clients[client];
                match joined {
                    _ if is_lost => {}
                    Ok(joined) => (c.epoch, c.step) = (joined.generation, Step::Sync),
                    Err(Refusal { error: ResponseError::MemberIdRequired, member_id }) => {
                        c.id = member_id.to_string();
                    }
                    Err(_) => c.stop(),
                }
            }
            Step::Sync => {
                let synced = self.group.classic_sync(self.now, &sync(&c.id, c.epoch));
                let c = &mut self.clients[client];
                match synced {
                    _ if is_lost => {}
                    Ok(synced) => {
                        let before = std::mem::take(&mut c.used);
                        c.used = embedded::read_assignment(&synced.assignment, &topics()).unwrap();
                        let gives_up = before.iter().any(|(topic, partitions)| {
                            c.used.get(topic).is_none_or(|used| !partitions.is_subset(used))
                        });
                        c.step = if gives_up { Step::Join } else { Step::Beat };
                    }
                    Err(ResponseError::RebalanceInProgress) => c.step = Step::Join,
                    Err(_) => c.stop(),
                }
            }
            Step::Beat => {
                let answer = self.group.classic_heartbeat(self.now, &id, None, c.epoch);
                let c = &mut self.clients[client];
                match answer {
                    Ok(()) => {}
                    _ if is_lost => {}
                    Err(ResponseError::RebalanceInProgress) => c.step = Step::Join,
                    Err(_) => c.stop(),
                }
            }
        }
    }

    fn next(&mut self, client: usize, is_lost: bool) {
        match is_modern(client) {
            true => self.modern(client, is_lost),
            false => self.classic(client, is_lost),
        }
        self.group.written(self.group.unwritten.len());
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Next(client) => self.next(client, false),
            Event::Lost(client) => self.next(client, true),
            Event::Leave(client) => {
                let c = &mut self.clients[client];
                let id = c.id.clone();
                c.stop();
                c.is_member = false;
                let _ = match is_modern(client) {
                    true => self.group.leave(self.now, &id, None, false).map_err(|f| f.error),
                    false => self.group.classic_leave(self.now, &text(&id), None),
                };
            }
            Event::Seconds(seconds) => {
                self.now += Duration::from_secs(seconds);
                for (id, _) in self.group.tick(self.now) {
                    self.clients.iter_mut().filter(|c| *c.id == *id).for_each(Client::stop);
                }
            }
            Event::Restart => {
                let state = self.group.state.clone();
                self.group = ConsumerGroup::new(state, world_rules(), self.now);
            }
        }
        self.group.written(self.group.unwritten.len());
        let mut users = HashMap::new();
        for (client, c) in self.clients.iter().enumerate() {
            for (topic, partitions) in &c.used {
                for partition in partitions {
                    let other = users.insert((*topic, *partition), client);
                    assert_eq!(
                        other, None,
                        "{topic} {partition} is used by {client} too: {event:?}"
                    );
                }
            }
        }
        let known = self.group.classic.keys().chain(self.group.unconfirmed.keys());
        assert!(known.clone().all(|id| self.group.state.members.contains_key(id)));
    }
}

impl Client {
    /// It has lost everything, and starts again.
    fn stop(&mut self) {
        *self = Self { lives: self.lives, is_member: self.is_member, ..Self::default() };
    }
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        20 => (0..CLIENTS).prop_map(Event::Next),
        3 => (0..CLIENTS).prop_map(Event::Lost),
        2 => (0..CLIENTS).prop_map(Event::Leave),
        2 => (0..20_u64).prop_map(Event::Seconds),
        1 => Just(Event::Restart),
    ];
    prop::collection::vec(event, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_partition_of_a_mixed_group_never_has_two_owners(events in events()) {
        let now = Instant::now();
        let mut world = World { now, group: group(now), clients: vec![Client::default(); CLIENTS] };
        for event in events {
            world.happen(event);
        }
        // Without faults every client soon has its share. (Previous incarnations without a client
        // expire.)
        for _ in 0..25 {
            let members = (0..CLIENTS).filter(|client| world.clients[*client].is_member);
            for client in members.collect::<Vec<_>>() {
                for _ in 0..3 {
                    world.happen(Event::Next(client));
                }
            }
            world.happen(Event::Seconds(5));
        }
        let used = world.clients.iter().flat_map(|c| c.used.values());
        let used: usize = used.map(BTreeSet::len).sum();
        let has_members = world.clients.iter().any(|c| c.is_member);
        let wanted = if has_members { 7 } else { 0 };
        assert_eq!(used, wanted, "{:#?} {:#?}", world.clients, world.group);
        for c in world.clients.iter().filter(|c| c.is_member) {
            assert_eq!(c.step, Step::Beat, "{c:?}");
            assert_eq!(c.epoch, world.group.state.epoch);
        }
    }
}
