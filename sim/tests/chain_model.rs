//! All interleavings of two servers with one chain, within bounds, by the model checker stateright.
//! What the model leaves out (time, damage, large bodies, three servers) is simulated by seed in
//! `crates/stream/src/chain/writer/tests.rs`. The rules are those of `docs/format/chain.md`.

use stateright::{Checker, Model, Property};

/// The greatest number of an object.
const LAST: usize = 4;
const SERVERS: usize = 2;
/// Creates whose answers are lost and that may take effect later.
const LATE: usize = 1;

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// A fence is never deleted.
    FencesStay,
    /// The object right below a fence is never deleted.
    ObjectsBelowFencesStay,
    /// An opening lists the snapshots after its fence.
    SnapshotsAfterFence,
    /// A snapshot has what its writer knows, and no more.
    SnapshotsOfOneMoment,
}

/// A fence or a delta.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Object {
    /// Unique.
    nonce: u8,
    /// The nonce of the object that it extends.
    previous: u8,
    is_fence: bool,
}

/// What a server knows of the chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Known {
    number: usize,
    nonce: u8,
    /// The deltas, by nonce.
    deltas: u32,
    /// The number of fences: the ordinal of the newest opening.
    opening: u8,
}

impl Known {
    /// Applies the next object, if it is that.
    fn with(self, object: Object) -> Option<Self> {
        let delta = if object.is_fence { 0 } else { 1 << object.nonce };
        (object.previous == self.nonce).then_some(Self {
            number: self.number + 1,
            nonce: object.nonce,
            deltas: self.deltas | delta,
            opening: self.opening + u8::from(object.is_fence),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Server {
    Stopped,
    /// It has loaded the chain.
    Loaded(Known),
    /// It creates its fence.
    Fencing(Known, Object),
    /// Its fence is won, and it has not listed the snapshots yet.
    Won(Known),
    Open(Writer),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Writer {
    known: Known,
    frozen: Option<Object>,
    /// It has found the last object that it knows.
    is_checked: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    objects: [Option<Object>; LAST + 1],
    /// Numbers that were created before.
    used: [bool; LAST + 1],
    snapshots: [Option<Known>; LAST + 1],
    servers: [Server; SERVERS],
    /// Creates that may take effect, in order.
    late: Vec<(usize, Object)>,
    next_nonce: u8,
    /// The newest opening: its ordinal and the number of its fence.
    newest: (u8, usize),
    /// Deltas that were acknowledged.
    acknowledged: u32,
    happened: [bool; 4],
    wrong: Option<&'static str>,
}

const FENCED: usize = 0;
const DELETED: usize = 1;
const BEGAN_AGAIN: usize = 2;
const REPLACED: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Load(usize),
    BeginFence(usize),
    /// A create, with its answer.
    Create(usize),
    /// A create whose answer is lost, and that takes effect at any later time, or never.
    CreateLate(usize),
    Arrive(usize),
    ListSnapshots(usize),
    Freeze(usize),
    Check(usize),
    Snapshot(usize),
    Delete(usize),
    Stop(usize),
}

enum Created {
    Won,
    Taken(Object),
}

impl World {
    fn new() -> Self {
        Self {
            objects: [None; LAST + 1],
            used: [false; LAST + 1],
            snapshots: [None; LAST + 1],
            servers: [Server::Stopped; SERVERS],
            late: Vec::new(),
            next_nonce: 1,
            newest: (0, 0),
            acknowledged: 0,
            happened: [false; 4],
            wrong: None,
        }
    }

    fn object(&mut self, previous: u8, is_fence: bool) -> Object {
        self.next_nonce += 1;
        Object { nonce: self.next_nonce - 1, previous, is_fence }
    }

    fn at(&self, number: usize) -> Option<Object> {
        self.objects.get(number).copied().flatten()
    }

    fn create(&mut self, number: usize, object: Object) -> Created {
        match self.objects[number] {
            Some(found) if found == object => Created::Won,
            Some(found) => Created::Taken(found),
            None => {
                self.objects[number] = Some(object);
                self.used[number] = true;
                Created::Won
            }
        }
    }

    /// Loads the chain, as in section 8, at one moment.
    fn load(&self) -> Result<Known, &'static str> {
        let mut known = Known::default();
        for (number, snapshot) in self.snapshots.iter().enumerate().rev() {
            let Some(snapshot) = snapshot else { continue };
            if self.at(number).is_some_and(|object| object.nonce == snapshot.nonce) {
                known = *snapshot;
                break;
            }
        }
        while let Some(object) = self.at(known.number + 1) {
            known = known.with(object).ok_or("a load finds an object that extends another one")?;
        }
        let is_after = |number: usize| number > known.number;
        let snapshots = self.snapshots.iter().enumerate();
        if snapshots.filter(|(_, it)| it.is_some()).any(|(number, _)| is_after(number)) {
            return Err("a load finds a snapshot beyond the end");
        }
        Ok(known)
    }

    /// Whether the object may be deleted, without the rule.
    fn is_needless(&self, number: usize, without: Without) -> bool {
        let mut snapshots = self.snapshots.iter().enumerate().rev().filter(|(_, it)| it.is_some());
        let Some((second, _)) = snapshots.nth(1) else { return false };
        let is_fence = |number: usize| self.at(number).is_some_and(|object| object.is_fence);
        let stays = match without {
            Without::FencesStay => false,
            Without::ObjectsBelowFencesStay => is_fence(number),
            _ => is_fence(number) || is_fence(number + 1),
        };
        number < second && self.at(number).is_some() && !stays
    }

    fn be_wrong(&mut self, what: &'static str) {
        self.wrong.get_or_insert(what);
    }

    /// Continues an opening whose fence cannot stay where it is.
    fn begin_again(&mut self, server: usize) {
        self.happened[BEGAN_AGAIN] = true;
        match self.load() {
            Ok(known) => self.servers[server] = Server::Loaded(known),
            Err(what) => self.be_wrong(what),
        }
    }

    fn created(&mut self, server: usize, number: usize, was_used: bool, created: Created) {
        match (self.servers[server], created) {
            (Server::Fencing(known, fence), Created::Won) => {
                let known = known.with(fence).expect("it was made for this state");
                self.servers[server] = Server::Won(known);
            }
            (Server::Fencing(known, _), Created::Taken(found)) => match known.with(found) {
                Some(known) => self.servers[server] = Server::Loaded(known),
                None => self.begin_again(server),
            },
            (Server::Open(writer), Created::Won) => {
                let object = writer.frozen.expect("it creates one");
                let (newest, fence) = self.newest;
                if writer.known.opening < newest && number >= fence {
                    self.be_wrong("a replaced server publishes after the fence");
                }
                if was_used {
                    self.be_wrong("a deleted object is published again");
                }
                self.acknowledged |= 1 << object.nonce;
                let known = writer.known.with(object).expect("it was made for this state");
                let (frozen, is_checked) = (None, false);
                self.servers[server] = Server::Open(Writer { known, frozen, is_checked });
            }
            (Server::Open(_), Created::Taken(_)) => {
                self.happened[FENCED] = true;
                self.servers[server] = Server::Stopped;
            }
            _ => unreachable!("nothing is created"),
        }
    }

    /// What a server creates now.
    fn wanted(&self, server: usize) -> Option<(usize, Object)> {
        match self.servers[server] {
            Server::Fencing(known, fence) => Some((known.number + 1, fence)),
            Server::Open(Writer { known, frozen: Some(object), is_checked: true, .. }) => {
                Some((known.number + 1, object))
            }
            _ => None,
        }
    }
}

struct Chain(Without);

impl Model for Chain {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new()]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        if world.wrong.is_some() {
            return;
        }
        for (at, server) in world.servers.iter().enumerate() {
            match server {
                Server::Stopped => steps.push(Step::Load(at)),
                Server::Loaded(known) if known.number < LAST => steps.push(Step::BeginFence(at)),
                Server::Loaded(_) => {}
                Server::Fencing(..) => {
                    steps.extend([Step::Create(at), Step::CreateLate(at), Step::Stop(at)]);
                }
                Server::Won(_) => steps.extend([Step::ListSnapshots(at), Step::Stop(at)]),
                Server::Open(Writer { frozen: None, known, .. }) => {
                    if known.number < LAST {
                        steps.push(Step::Freeze(at));
                    }
                    steps.extend([Step::Snapshot(at), Step::Stop(at)]);
                    // Deletion by a server that was replaced is also possible.
                    let needless = (1..=LAST).filter(|it| world.is_needless(*it, self.0));
                    steps.extend(needless.map(Step::Delete));
                }
                Server::Open(Writer { is_checked: false, .. }) => steps.push(Step::Check(at)),
                Server::Open(_) => steps.extend([Step::Create(at), Step::CreateLate(at)]),
            }
        }
        steps.extend((0..world.late.len()).map(Step::Arrive));
        steps.dedup();
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        match step {
            Step::Load(at) => match world.load() {
                Ok(known) => world.servers[at] = Server::Loaded(known),
                Err(what) => world.be_wrong(what),
            },
            Step::BeginFence(at) => {
                let Server::Loaded(known) = world.servers[at] else { return None };
                let fence = world.object(known.nonce, true);
                world.servers[at] = Server::Fencing(known, fence);
            }
            Step::Create(at) => {
                let (number, object) = world.wanted(at)?;
                let was_used = world.used[number] && world.at(number).is_none();
                let created = world.create(number, object);
                world.created(at, number, was_used, created);
            }
            Step::CreateLate(at) => {
                let wanted = world.wanted(at)?;
                if world.late.len() == LATE || world.late.contains(&wanted) {
                    return None;
                }
                world.late.push(wanted);
                // Later it looks for the last object again.
                if let Server::Open(writer) = &mut world.servers[at] {
                    writer.is_checked = false;
                }
            }
            Step::Arrive(at) => {
                let (number, object) = world.late.remove(at);
                let _ = world.create(number, object);
            }
            Step::ListSnapshots(at) => {
                let Server::Won(known) = world.servers[at] else { return None };
                let is_hole = world.snapshots[known.number..].iter().any(Option::is_some);
                if is_hole && self.0 != Without::SnapshotsAfterFence {
                    world.begin_again(at);
                    return Some(world);
                }
                // An opening may learn late of its fence; then another one may be newer.
                if known.opening > world.newest.0 {
                    if world.acknowledged & !known.deltas != 0 {
                        world.be_wrong("an opening lacks what was acknowledged");
                    }
                    world.happened[REPLACED] |= known.opening > 1;
                    world.newest = (known.opening, known.number);
                }
                let (frozen, is_checked) = (None, false);
                world.servers[at] = Server::Open(Writer { known, frozen, is_checked });
            }
            Step::Freeze(at) => {
                let Server::Open(writer) = world.servers[at] else { return None };
                let frozen = Some(world.object(writer.known.nonce, false));
                world.servers[at] = Server::Open(Writer { frozen, ..writer });
            }
            Step::Check(at) => {
                let Server::Open(writer) = world.servers[at] else { return None };
                let Known { number, nonce, .. } = writer.known;
                let is_there = world.at(number).is_some_and(|object| object.nonce == nonce);
                if !is_there && world.at(number + 1).is_none() {
                    world.be_wrong("a server waits for an object store that is the right one");
                }
                world.servers[at] = Server::Open(Writer { is_checked: true, ..writer });
            }
            Step::Snapshot(at) => {
                let Server::Open(Writer { known, .. }) = world.servers[at] else {
                    return None;
                };
                if world.snapshots[known.number].is_some() {
                    return None;
                }
                let mut snapshot = known;
                if self.0 == Without::SnapshotsOfOneMoment && known.opening < world.newest.0 {
                    // What the server has recorded in its own log since.
                    snapshot.deltas |= 1 << 31;
                }
                world.snapshots[known.number] = Some(snapshot);
            }
            Step::Delete(number) => {
                world.objects[number] = None;
                world.happened[DELETED] = true;
            }
            Step::Stop(at) => world.servers[at] = Server::Stopped,
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing is wrong", |_, world: &World| world.wrong.is_none()),
            Property::always("a state has only what was published", |_, world: &World| {
                let is_of_chain = |known: &Known| known.deltas & 1 << 31 == 0;
                world.servers.iter().all(|server| match server {
                    Server::Loaded(known) | Server::Fencing(known, _) | Server::Won(known) => {
                        is_of_chain(known)
                    }
                    Server::Open(writer) => is_of_chain(&writer.known),
                    Server::Stopped => true,
                })
            }),
            Property::sometimes("a server is fenced", |_, it: &World| it.happened[FENCED]),
            Property::sometimes("an object is deleted", |_, it: &World| it.happened[DELETED]),
            Property::sometimes("an opening begins again", |_, it: &World| {
                it.happened[BEGAN_AGAIN]
            }),
            Property::sometimes("a server is replaced", |_, it: &World| it.happened[REPLACED]),
        ]
    }

    fn within_boundary(&self, world: &World) -> bool {
        world.next_nonce <= 6
    }
}

#[test]
fn all_interleavings_are_right() {
    let checker = Chain(Without::Nothing).checker().spawn_bfs().join();
    println!("{} states, {} of them unique", checker.state_count(), checker.unique_state_count());
    checker.assert_properties();
}

#[test]
fn each_rule_is_needed() {
    for without in [
        Without::FencesStay,
        Without::ObjectsBelowFencesStay,
        Without::SnapshotsAfterFence,
        Without::SnapshotsOfOneMoment,
    ] {
        let checker = Chain(without).checker().spawn_bfs().join();
        let found = ["nothing is wrong", "a state has only what was published"];
        let found = found.iter().find_map(|name| checker.discovery(name));
        let path = found.unwrap_or_else(|| panic!("{without:?} is not found"));
        let last = path.last_state().wrong;
        println!("{without:?}: {last:?} after {} steps", path.into_actions().len());
    }
}
