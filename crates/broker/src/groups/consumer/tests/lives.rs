//! Random histories of a group: members that join, leave, lose responses, are slow to give up
//! partitions, and restart; topics that change; a coordinator that crashes in the middle of its
//! writes.

use proptest::prelude::*;

use super::*;

const CLIENTS: usize = 4;
const TOPICS: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Copy, Debug)]
enum Event {
    /// Join, or start again.
    Join {
        client: usize,
        subscription: usize,
    },
    Subscribe {
        client: usize,
        subscription: usize,
    },
    Beat {
        client: usize,
        reports_owned: bool,
        answer_is_lost: bool,
    },
    /// Stop using revoked partitions.
    GiveUp {
        client: usize,
    },
    Leave {
        client: usize,
        for_a_while: bool,
    },
    Topic {
        topic: usize,
        partitions: u32,
    },
    Seconds(u64),
    /// The coordinator writes only this many of a heartbeat's changes, and restarts.
    Crash {
        client: usize,
        written: usize,
    },
    /// The coordinator folds its log into a checkpoint.
    Checkpoint,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let client = 0..CLIENTS;
    let event = prop_oneof![
        4 => (client.clone(), 0..16_usize)
            .prop_map(|(client, subscription)| Event::Join { client, subscription }),
        2 => (client.clone(), 0..16_usize)
            .prop_map(|(client, subscription)| Event::Subscribe { client, subscription }),
        12 => (client.clone(), any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(client, reports_owned, answer_is_lost)| {
                Event::Beat { client, reports_owned, answer_is_lost }
            }),
        5 => client.clone().prop_map(|client| Event::GiveUp { client }),
        2 => (client.clone(), any::<bool>())
            .prop_map(|(client, for_a_while)| Event::Leave { client, for_a_while }),
        2 => (0..TOPICS.len(), 0..6_u32)
            .prop_map(|(topic, partitions)| Event::Topic { topic, partitions }),
        2 => (0..50_u64).prop_map(Event::Seconds),
        2 => (client, 0..12_usize).prop_map(|(client, written)| Event::Crash { client, written }),
        1 => Just(Event::Checkpoint),
    ];
    prop::collection::vec(event, 1..80)
}

/// A client: the assignment that it received, and the partitions that it uses.
#[derive(Clone, Debug, Default)]
struct Client {
    member_id: String,
    instance_id: Option<String>,
    lives: usize,
    epoch: i32,
    subscription: usize,
    assigned: Assignment,
    used: Assignment,
    is_member: bool,
    /// It got no response, so its next heartbeat contains everything.
    missed_answer: bool,
}

struct World {
    now: Instant,
    group: ConsumerGroup,
    log: GroupStates,
    clients: Vec<Client>,
    topics: BTreeMap<&'static str, u32>,
    version: u64,
    /// The last user of a partition: its member id, and the epoch that it knew.
    last_used: HashMap<(Uuid, i32), (String, i32)>,
    /// Earlier users, with the same data: their requests may still arrive.
    before: BTreeSet<(String, i32, (Uuid, i32))>,
}

fn subscription(bits: usize) -> (BTreeSet<String>, String) {
    let topics = TOPICS.iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0);
    let regex = if bits & 8 != 0 { "[bc]" } else { "" };
    (topics.map(|(_, topic)| (*topic).to_owned()).collect(), regex.to_owned())
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let client = |i: usize| Client {
            // Half of them are static members.
            instance_id: (i % 2 == 1).then(|| format!("instance-{i}")),
            ..Client::default()
        };
        Self {
            now,
            group: group(now),
            log: GroupStates::default(),
            clients: (0..CLIENTS).map(client).collect(),
            topics: BTreeMap::from([("a", 3), ("b", 4)]),
            version: 0,
            last_used: HashMap::new(),
            before: BTreeSet::new(),
        }
    }

    fn view(&self) -> TopicsView {
        let topics: Vec<(&str, u32)> =
            self.topics.iter().filter(|(_, n)| **n > 0).map(|(name, n)| (*name, *n)).collect();
        view(self.version, &topics)
    }

    /// Writes the first of the unwritten changes, each in its own record or all in one.
    fn write(&mut self, changes: usize) {
        let all = self.group.unwritten()[..changes].to_vec();
        let mut rest = &all[..];
        while !rest.is_empty() {
            let (record, count) = encode_changes("g", rest);
            self.log.apply_encoded(&record).unwrap();
            rest = &rest[count..];
        }
        self.group.written(changes);
    }

    fn write_all(&mut self) {
        self.write(self.group.unwritten().len());
        let live = &self.group.state;
        assert_eq!(self.log.0.get("g").unwrap_or(&GroupState::default()), live, "replay and live");
    }

    fn beat(&mut self, client: usize, reports_owned: bool) -> Result<Answer, Fault> {
        let c = &self.clients[client];
        let beat = Beat {
            member_id: c.member_id.clone(),
            epoch: c.epoch,
            instance_id: c.instance_id.clone(),
            owned: (reports_owned || c.missed_answer).then(|| c.used.clone()),
            ..Beat::default()
        };
        let beat = if c.missed_answer {
            let (topics, regex) = subscription(c.subscription);
            let rebalance_timeout_ms = Some(REBALANCE);
            Beat { topics: Some(topics), regex: Some(regex), rebalance_timeout_ms, ..beat }
        } else {
            beat
        };
        self.group.heartbeat(self.now, rules(), &self.view(), &beat)
    }

    /// Applies the answer to a client's heartbeat.
    fn hear(&mut self, client: usize, answer: Result<Answer, Fault>) {
        let c = &mut self.clients[client];
        c.missed_answer = false;
        match answer {
            Ok(answer) => {
                assert!(answer.epoch >= c.epoch, "epochs do not go back: {c:?} {answer:?}");
                c.epoch = answer.epoch;
                if let Some(assignment) = answer.assignment {
                    for (topic, partitions) in &assignment {
                        c.used.entry(*topic).or_default().extend(partitions);
                    }
                    c.assigned = assignment;
                }
            }
            Err(fault) => {
                assert!(
                    matches!(
                        fault.error,
                        ResponseError::UnknownMemberId
                            | ResponseError::FencedMemberEpoch
                            | ResponseError::UnreleasedInstanceId
                            | ResponseError::CoordinatorLoadInProgress
                            | ResponseError::FencedInstanceId
                    ),
                    "{fault:?}"
                );
                c.is_member = false;
                c.used.clear();
                c.assigned.clear();
            }
        }
    }

    fn join(&mut self, client: usize, bits: usize) {
        let c = &mut self.clients[client];
        if c.instance_id.is_some() || c.member_id.is_empty() {
            c.lives += 1;
            c.member_id = format!("member-{client}-{}", c.lives);
        }
        let (topics, regex) = subscription(bits);
        c.used.clear();
        c.assigned.clear();
        c.epoch = 0;
        c.is_member = true;
        let beat = Beat {
            instance_id: c.instance_id.clone(),
            topics: Some(topics),
            regex: Some(regex),
            ..join(&c.member_id, &[])
        };
        c.subscription = bits;
        let answer = self.group.heartbeat(self.now, rules(), &self.view(), &beat);
        self.write_all();
        self.hear(client, answer);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Join { client, subscription } => {
                // A static member that stops without leaving holds its name; another with the same
                // name has to wait.
                self.join(client, subscription);
            }
            Event::Subscribe { client, subscription: bits } if self.clients[client].is_member => {
                let c = &mut self.clients[client];
                c.subscription = bits;
                let answer = if c.missed_answer {
                    self.beat(client, true)
                } else {
                    let (topics, regex) = subscription(bits);
                    let beat = Beat {
                        topics: Some(topics),
                        regex: Some(regex),
                        ..go_on(&c.member_id, c.epoch)
                    };
                    self.group.heartbeat(self.now, rules(), &self.view(), &beat)
                };
                self.write_all();
                self.hear(client, answer);
            }
            Event::Beat { client, reports_owned, answer_is_lost }
                if self.clients[client].is_member =>
            {
                let answer = self.beat(client, reports_owned);
                self.write_all();
                if answer_is_lost {
                    self.clients[client].missed_answer = true;
                } else {
                    self.hear(client, answer);
                }
            }
            Event::GiveUp { client } => {
                let c = &mut self.clients[client];
                c.used.retain(|topic, partitions| {
                    let kept = c.assigned.get(topic);
                    partitions.retain(|p| kept.is_some_and(|kept| kept.contains(p)));
                    !partitions.is_empty()
                });
            }
            Event::Leave { client, for_a_while } if self.clients[client].is_member => {
                let c = &mut self.clients[client];
                c.is_member = false;
                c.used.clear();
                let instance_id = c.instance_id.as_deref();
                let for_a_while = for_a_while && instance_id.is_some();
                let _ = self.group.leave(self.now, &c.member_id, instance_id, for_a_while);
                self.write_all();
            }
            Event::Topic { topic, partitions } => {
                self.version += 1;
                let count = self.topics.entry(TOPICS[topic]).or_default();
                // Topics grow or are deleted.
                *count = if partitions == 0 { 0 } else { partitions.max(*count) };
            }
            Event::Seconds(seconds) => {
                self.now += Duration::from_secs(seconds);
                for (id, _) in self.group.tick(self.now) {
                    // The session is over for the client too, which stops.
                    for c in self.clients.iter_mut().filter(|c| *c.member_id == *id) {
                        c.is_member = false;
                        c.used.clear();
                    }
                }
                self.write_all();
            }
            Event::Crash { client, written } => {
                if self.clients[client].is_member {
                    let _ = self.beat(client, true);
                    self.clients[client].missed_answer = true;
                }
                let written = written.min(self.group.unwritten().len());
                self.write(written);
                self.restart();
            }
            Event::Checkpoint => self.log = decode::<GroupStates>(&encode(&self.log)).unwrap(),
            Event::Subscribe { .. } | Event::Beat { .. } | Event::Leave { .. } => {}
        }
    }

    fn restart(&mut self) {
        let state = self.log.0.get("g").cloned().unwrap_or_default();
        self.group = ConsumerGroup::new(state, rules(), self.now);
    }

    /// Checks that no partition has two users; that its user may commit with the epoch that it
    /// knows, and earlier users may not.
    fn check(&mut self) {
        let mut users: HashMap<(Uuid, i32), usize> = HashMap::new();
        for (client, c) in self.clients.iter().enumerate() {
            for (topic, partitions) in &c.used {
                for partition in partitions {
                    let other = users.insert((*topic, *partition), client);
                    assert_eq!(other, None, "{topic} {partition} is used by {client} too");
                    let at = (*topic, *partition);
                    let user = (c.member_id.clone(), c.epoch);
                    if let Some((id, epoch)) = self.last_used.insert(at, user)
                        && id != c.member_id
                    {
                        self.before.insert((id, epoch, at));
                    }
                }
            }
            let used = c.used.iter().flat_map(|(topic, all)| all.iter().map(|p| (*topic, *p)));
            if c.is_member {
                let commit = self.group.check_commit(&c.member_id, c.epoch, used.map(Some));
                assert_eq!(commit, Ok(()), "{c:?} {:#?}", self.group.state);
            }
        }
        for (id, epoch, at) in &self.before {
            let commit = self.group.check_commit(id, *epoch, [Some(*at)].into_iter());
            assert!(commit.is_err(), "{id} {epoch} {at:?} {:#?}", self.group.state);
        }
        let members = self.group.state.members.iter();
        assert_eq!(
            self.group.state.size_bytes,
            members.map(|(id, member)| member.size_bytes(id)).sum::<usize>()
        );
    }

    /// Lets all clients continue without faults: after a bounded number of rounds each has its
    /// target.
    fn converge(&mut self) {
        // Members without a client expire.
        for _ in 0..4 {
            for client in 0..CLIENTS {
                if self.clients[client].is_member {
                    let answer = self.beat(client, true);
                    self.hear(client, answer);
                    self.happen(Event::GiveUp { client });
                }
                self.write_all();
            }
            self.happen(Event::Seconds(20));
        }
        for _ in 0..10 {
            for client in 0..CLIENTS {
                if self.clients[client].is_member {
                    let answer = self.beat(client, true);
                    self.write_all();
                    self.hear(client, answer);
                    self.happen(Event::GiveUp { client });
                    self.check();
                }
            }
        }
        let has_converged = matches!(self.group.phase(), Phase::Empty | Phase::Stable);
        assert!(has_converged, "{:?} {:#?}", self.group.phase(), self.group.state);
        let mut wanted = BTreeSet::new();
        for c in self.clients.iter().filter(|c| c.is_member) {
            let (names, regex) = subscription(c.subscription);
            for (name, count) in &self.topics {
                if names.contains(*name) || (!regex.is_empty() && *name != "a") {
                    let count = i32::try_from(*count).unwrap();
                    wanted.extend((0..count).map(|p| (topic_id(name), p)));
                }
            }
        }
        let used = self.clients.iter().flat_map(|c| {
            c.used.iter().flat_map(|(topic, partitions)| partitions.iter().map(|p| (*topic, *p)))
        });
        assert_eq!(used.collect::<BTreeSet<_>>(), wanted, "{:#?}", self.clients);
        for c in self.clients.iter().filter(|c| c.is_member) {
            let member = &self.group.state.members[c.member_id.as_str()];
            assert_eq!((&c.used, c.epoch), (&member.current.assigned, member.current.epoch));
            assert_eq!(c.used, member.target);
        }
        // And nothing changes any more.
        let epoch = self.group.state.epoch;
        for client in 0..CLIENTS {
            if self.clients[client].is_member {
                let answer = self.beat(client, false);
                assert_eq!(answer.unwrap().assignment, None);
            }
        }
        assert!(self.group.unwritten().is_empty());
        assert_eq!(self.group.state.epoch, epoch);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_partition_never_has_two_owners(events in events()) {
        let mut world = World::new();
        for event in events {
            world.happen(event);
            world.check();
        }
        world.converge();
    }
}
