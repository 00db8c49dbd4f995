//! Tests of the task that follows the registry, with a registry that fails by seed.

use std::collections::BTreeSet;
use std::time::Duration;

use alluvium_coordination::faulty::{Faults, Faulty};
use alluvium_coordination::{Identity as StoreIdentity, Limits, ManualClock, MemoryCoordination};

use super::super::Sink;
use super::super::driver::Event;
use super::*;
use crate::net::{Features, Identity, Local, NetLimits, cluster_id};
use crate::registry::AttachRequest;

const TIB: u64 = 1 << 40;

/// More than the retries of an operation need, and far below the pause of a task that is stuck.
const ENOUGH: Duration = Duration::from_secs(600);

struct Test {
    service: Arc<Faulty<MemoryCoordination>>,
    keys: Arc<Keys>,
    events: Arc<Events>,
    notices: mpsc::UnboundedSender<Notice>,
    incarnation: Uuid,
    server: ServerId,
}

impl Test {
    /// Starts the task for the first of three servers, with a volume of 4 groups.
    async fn start(faults: Faults, seed: u64) -> Self {
        let identity = StoreIdentity { store: Uuid::nil(), restores: 0 };
        let clock = Arc::new(ManualClock::default());
        let memory = MemoryCoordination::with_identity(Limits::default(), clock, identity);
        let service = Arc::new(Faulty::new(memory, faults, seed));
        let keys = Arc::new(Keys::new("c").unwrap());
        let registry = Registry::new(service.inner(), &keys);
        for n in 1..=3 {
            let disks = [n, n + 10].map(Uuid::from_u128);
            registry.register_server("127.0.0.1:1", disks, Uuid::nil()).await.unwrap();
        }
        let volume = registry.create_volume("v", TIB).await.unwrap();
        let lease = service.inner().grant(Duration::from_secs(5)).await.unwrap().id;
        let request = AttachRequest {
            owner: Uuid::nil(),
            server: None,
            address: String::new(),
            now_ms: 0,
            lease,
            take: false,
        };
        let epoch = registry.attach(volume, &request).await.unwrap().epoch;
        for region in 0..4 {
            registry.create_group(volume, region, epoch, seed).await.unwrap();
        }
        let (server, stored) = registry.servers().await.unwrap().remove(0);
        let opening = stored.value.record();
        let local = Local {
            cluster: cluster_id("c"),
            identity: Some(Identity { server, opening }),
            features: Features::PULLS,
            window_bytes: 1 << 20,
        };
        let events = Arc::new(Events::default());
        let sink = Sink {
            events: Arc::clone(&events),
            service: Arc::<Faulty<_>>::clone(&service),
            keys: Arc::clone(&keys),
        };
        let (notices, received) = mpsc::unbounded_channel();
        let incarnation = Uuid::from_u128(7);
        let control = Control {
            id: server,
            incarnation,
            service: Arc::<Faulty<_>>::clone(&service),
            keys: Arc::clone(&keys),
            events: Arc::clone(&events),
            net: Arc::new(Net::new(local, NetLimits::default(), Arc::new(sink))),
            directory: Arc::default(),
            addresses: Arc::default(),
            notices: received,
            unrecorded: None,
            groups: BTreeMap::new(),
            outage: Outage::default(),
        };
        tokio::spawn(control.run());
        Self { service, keys, events, notices, incarnation, server }
    }

    /// Passes inputs of the shard to `take` until it returns `true`.
    async fn inputs(&self, seed: u64, mut take: impl FnMut(Input) -> bool) {
        let mut inputs = async || {
            loop {
                for event in self.events.take() {
                    if let Event::Input(input) = event
                        && take(input)
                    {
                        return;
                    }
                }
                tokio::time::sleep(RETRY).await;
            }
        };
        let ended = tokio::time::timeout(ENOUGH, inputs()).await;
        ended.unwrap_or_else(|_| panic!("seed {seed}: a notice was lost"));
    }

    /// Passes the replicas of the server, as the registry has them, to `take` until all are as
    /// they are to be.
    async fn until(&self, seed: u64, is: impl Fn(&crate::registry::PeerValue) -> bool) {
        let registry = Registry::new(self.service.inner(), &self.keys);
        let all = async {
            loop {
                let groups = registry.groups().await.unwrap().0;
                let mut peers = groups.iter().flat_map(|(_, group)| &group.value.peers);
                if peers.all(|peer| peer.server != self.server || is(peer)) {
                    return;
                }
                tokio::time::sleep(RETRY).await;
            }
        };
        let ended = tokio::time::timeout(ENOUGH, all).await;
        ended.unwrap_or_else(|_| panic!("seed {seed}: a notice was not recorded"));
    }
}

#[tokio::test(start_paused = true)]
async fn each_notice_is_recorded_whatever_fails() {
    let faults = Faults { refused: 300, expired: 0, ..Faults::ALL };
    for seed in 0..40 {
        let test = Test::start(faults, seed).await;
        let (mut created, mut activated) = (BTreeSet::new(), BTreeSet::new());
        let mut replicas = Vec::new();
        test.inputs(seed, |input| {
            match input {
                Input::Create { group, peer, .. } => {
                    assert!(created.insert(group), "seed {seed}: group {group} created twice");
                    replicas.push((group, peer));
                    let notice = Notice::Created { group, peer, is_recovered: false };
                    test.notices.send(notice).unwrap();
                }
                Input::Activate { group, .. } => drop(activated.insert(group)),
                Input::View { .. } => {}
                other => panic!("seed {seed}: {other:?}"),
            }
            activated.len() == 4
        })
        .await;
        assert_eq!(activated, created, "seed {seed}");
        test.until(seed, |peer| peer.created == Some(test.incarnation)).await;
        for (group, peer) in replicas {
            let reason = "a test".to_owned();
            test.notices.send(Notice::Lost { group, peer, reason }).unwrap();
        }
        test.until(seed, |peer| peer.lost).await;
    }
}
