//! Sequences of operations against a plain map per revision, in memory and in a file.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use alluvium_coordination::election::list_all;
use alluvium_coordination::{
    Change, Coordination, Error, Guard, LeaseId, Limits, ListRequest, ManualClock,
    MemoryCoordination, RedbCoordination, Revision, Transaction,
};
use futures::{FutureExt as _, StreamExt as _};
use proptest::prelude::*;

const TTL: u64 = 4;

#[derive(Clone, Debug)]
enum Op {
    /// Per change a key, and a put with the lease of this index, if there is one, or a deletion.
    /// A guard compares the key with its true revision or with another.
    Commit(Vec<(u8, bool, Option<u8>)>, Option<(u8, bool)>),
    Grant,
    Renew(u8),
    Revoke(u8),
    Advance(u64),
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    let change = (0..6_u8, prop::bool::weighted(0.7), prop::option::weighted(0.4, 0..4_u8));
    let changes = prop::collection::vec(change, 0..4);
    prop_oneof![
        6 => (changes, prop::option::of((0..6_u8, any::<bool>())))
            .prop_map(|(changes, guard)| Op::Commit(changes, guard)),
        2 => Just(Op::Grant),
        2 => (0..4_u8).prop_map(Op::Renew),
        1 => (0..4_u8).prop_map(Op::Revoke),
        2 => (1..=TTL).prop_map(Op::Advance),
        1 => Just(Op::Reopen),
    ]
}

/// A key's created and modified revision and its lease. The value is the modified revision.
type Row = (u64, u64, Option<LeaseId>);

#[derive(Default)]
struct Model {
    /// The state at each revision.
    states: Vec<BTreeMap<String, Row>>,
    /// The time at which each lease ends.
    leases: BTreeMap<LeaseId, u64>,
    now: u64,
}

impl Model {
    fn state(&self) -> BTreeMap<String, Row> {
        self.states.last().unwrap().clone()
    }

    fn end(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
        let mut state = self.state();
        state.retain(|_, row| row.2 != Some(lease));
        if state != self.state() {
            self.states.push(state);
        }
    }

    fn expire(&mut self) {
        while let Some((_, lease)) =
            self.leases.iter().map(|(lease, at)| (*at, *lease)).min().filter(|l| l.0 <= self.now)
        {
            self.end(lease);
        }
    }
}

enum Service {
    Memory(MemoryCoordination),
    File(Option<RedbCoordination>, tempfile::TempDir),
}

impl Service {
    fn get(&self) -> &dyn Coordination {
        match self {
            Self::Memory(service) => service,
            Self::File(service, _) => service.as_ref().unwrap(),
        }
    }

    fn open(directory: &tempfile::TempDir, clock: &ManualClock) -> Option<RedbCoordination> {
        let (path, clock) = (directory.path().join("file"), Arc::new(clock.clone()));
        Some(RedbCoordination::open(&path, Limits::default(), clock).unwrap())
    }
}

async fn rows(service: &dyn Coordination, at: Option<Revision>) -> (BTreeMap<String, Row>, u64) {
    let mut request = ListRequest { at, limit: 2, ..ListRequest::new("") };
    let mut rows = BTreeMap::new();
    loop {
        let page = service.list(&request).await.unwrap();
        for entry in &page.entries {
            assert_eq!(entry.value, entry.modified.0.to_string());
            let row = (entry.created.0, entry.modified.0, entry.lease);
            assert_eq!(rows.insert(entry.key.clone(), row), None);
        }
        match request.following(&page) {
            Some(following) => request = following,
            None => return (rows, page.revision.0),
        }
    }
}

async fn check(mut service: Service, clock: ManualClock, ops: Vec<Op>) {
    let mut model = Model { states: vec![BTreeMap::new()], ..Model::default() };
    let mut granted = Vec::new();
    for op in ops {
        match op {
            Op::Commit(changes, guard) => {
                model.expire();
                let next = model.states.len() as u64;
                let (mut state, before) = (model.state(), model.state());
                let mut transaction = Transaction::default();
                let mut ended = None;
                let changes: BTreeMap<u8, _> =
                    changes.into_iter().map(|(key, put, lease)| (key, (put, lease))).collect();
                for (key, (put, lease)) in changes {
                    let key = format!("k{key}");
                    if !put {
                        state.remove(&key);
                        transaction.changes.push(Change::Delete(key));
                        continue;
                    }
                    let lease = lease.and_then(|n| granted.get(usize::from(n)).copied());
                    let value = next.to_string().into();
                    ended = ended.or(lease.filter(|lease| !model.leases.contains_key(lease)));
                    let created = before.get(&key).map_or(next, |row| row.0);
                    state.insert(key.clone(), (created, next, lease));
                    transaction.changes.push(Change::Put { key, value, lease });
                }
                let mut holds = true;
                if let Some((key, right)) = guard {
                    let key = format!("k{key}");
                    holds = right;
                    transaction.guards.push(match (before.get(&key), right) {
                        (Some(row), true) => Guard::Modified(key, Revision(row.1)),
                        (None, true) | (Some(_), false) => Guard::Absent(key),
                        (None, false) => Guard::Created(key, Revision(1)),
                    });
                }
                let answer = service.get().commit(&transaction).await;
                if !holds {
                    assert!(answer.unwrap().is_err());
                } else if let Some(lease) = ended {
                    assert_eq!(answer, Err(Error::LeaseNotFound(lease)));
                } else {
                    if state != before {
                        model.states.push(state);
                    }
                    let revision = Revision(model.states.len() as u64 - 1);
                    assert_eq!(answer, Ok(Ok(revision)));
                }
            }
            Op::Grant => {
                model.expire();
                let lease = service.get().grant(Duration::from_secs(TTL)).await.unwrap().id;
                assert_eq!(model.leases.insert(lease, model.now + TTL), None);
                granted.insert(0, lease);
            }
            Op::Renew(lease) => {
                let Some(lease) = granted.get(usize::from(lease)).copied() else { continue };
                let answer = service.get().keep_alive(lease).await;
                let alive = model.leases.get_mut(&lease).filter(|at| **at > model.now);
                assert_eq!(answer.is_ok(), alive.is_some());
                if let Some(at) = alive {
                    *at = model.now + TTL;
                }
            }
            Op::Revoke(lease) => {
                let Some(lease) = granted.get(usize::from(lease)).copied() else { continue };
                model.expire();
                let answer = service.get().revoke(lease).await;
                assert_eq!(answer.is_ok(), model.leases.contains_key(&lease));
                model.end(lease);
            }
            Op::Advance(by) => {
                model.now += by;
                clock.advance(Duration::from_secs(by));
            }
            Op::Reopen => {
                if let Service::File(open, directory) = &mut service {
                    drop(open.take());
                    *open = Service::open(directory, &clock);
                    model.leases.values_mut().for_each(|at| *at = model.now + TTL);
                }
            }
        }
        let current = model.states.len() as u64 - 1;
        assert_eq!(rows(service.get(), None).await, (model.state(), current));
    }
    for (revision, state) in model.states.iter().enumerate() {
        let at = Revision(revision as u64);
        assert_eq!(rows(service.get(), Some(at)).await, (state.clone(), at.0));
    }
    let mut watch = service.get().watch("", Revision(0));
    let mut view = BTreeMap::new();
    for (revision, state) in model.states.iter().enumerate().skip(1) {
        let changes = watch.next().await.unwrap().unwrap();
        assert_eq!(changes.revision.0, revision as u64);
        for event in changes.events {
            match event.entry {
                Some(entry) => {
                    view.insert(event.key, (entry.created.0, entry.modified.0, entry.lease));
                }
                None => assert!(view.remove(&event.key).is_some()),
            }
        }
        assert_eq!(view, *state);
    }
    assert!(watch.next().now_or_never().is_none());
    assert_eq!(list_all(service.get(), "").await.unwrap().0.len(), view.len());
}

fn run(service: Service, clock: ManualClock, ops: Vec<Op>) {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(check(service, clock, ops));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    #[test]
    fn the_memory_service_equals_a_map_per_revision(ops in prop::collection::vec(op(), 1..60)) {
        let clock = ManualClock::default();
        let memory = MemoryCoordination::new(Limits::default(), Arc::new(clock.clone()));
        run(Service::Memory(memory), clock, ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn the_service_in_a_file_equals_a_map_per_revision(ops in prop::collection::vec(op(), 1..60)) {
        let (clock, directory) = (ManualClock::default(), tempfile::TempDir::new().unwrap());
        let file = Service::open(&directory, &clock);
        run(Service::File(file, directory), clock, ops);
    }
}
