//! Tests of the task that follows the registry, with a registry that fails by seed.

use std::collections::BTreeSet;
use std::time::Duration;

use alluvium_coordination::faulty::{Faults, Faulty};
use alluvium_coordination::{
    Changes, Conflict, Entry, Error, Identity as StoreIdentity, Lease, LeaseId, Limits,
    ListRequest, ManualClock, MemoryCoordination, Page, Transaction,
};
use async_trait::async_trait;
use futures::stream::BoxStream;

use super::super::Sink;
use super::super::driver::Event;
use super::super::tests::create_groups;
use super::*;
use crate::net::{Features, Identity, Local, NetLimits, cluster_id};

/// More than the retries of an operation need, and far below the pause of a task that is stuck.
const ENOUGH: Duration = Duration::from_secs(600);

struct Test {
    service: Arc<Faulty<MemoryCoordination>>,
    keys: Arc<Keys>,
    events: Arc<Events>,
    notices: mpsc::UnboundedSender<Notice>,
    incarnation: Uuid,
    server: ServerId,
    view: Arc<Mutex<ServerView>>,
}

impl Test {
    /// Starts the task.
    async fn start(faults: Faults, seed: u64) -> Self {
        let (test, control) = Self::new(faults, seed).await;
        tokio::spawn(control.run());
        test
    }

    /// The task of the first of three servers, with a volume of 4 groups.
    async fn new(faults: Faults, seed: u64) -> (Self, Control) {
        let memory = MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default()));
        let service = Arc::new(Faulty::new(memory, faults, seed));
        let keys = Arc::new(Keys::new("c").unwrap());
        let registry = Registry::new(service.inner(), &keys);
        create_groups(service.inner(), &keys, 1..=3, 4, seed).await;
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
        let view = Arc::default();
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
            lost: BTreeSet::new(),
            view: Arc::clone(&view),
            outage: Outage::default(),
        };
        (Self { service, keys, events, notices, incarnation, server, view }, control)
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
        for &(group, peer) in &replicas {
            let reason = "a test".to_owned();
            test.notices.send(Notice::Lost { group, peer, reason }).unwrap();
        }
        test.until(seed, |peer| peer.lost).await;
        let shown = async {
            while test.view.lock().lost_replicas != replicas.len() {
                tokio::time::sleep(RETRY).await;
            }
        };
        let shown = tokio::time::timeout(ENOUGH, shown).await;
        shown.unwrap_or_else(|_| panic!("seed {seed}: lost replicas are not shown"));
    }
}

/// A service that answers reads, but no changes.
struct ReadOnly {
    inner: Arc<Faulty<MemoryCoordination>>,
    /// Nothing else answers, either, but a watch waits.
    is_away: bool,
}

type Answer<T> = Result<T, Error>;

#[async_trait]
impl Coordination for ReadOnly {
    async fn identity(&self) -> Answer<StoreIdentity> {
        match self.is_away {
            true => Err(Error::Unavailable("away".to_owned())),
            false => self.inner.identity().await,
        }
    }

    async fn get(&self, key: &str) -> Answer<Option<Entry>> {
        self.inner.get(key).await
    }

    async fn list(&self, request: &ListRequest) -> Answer<Page> {
        self.inner.list(request).await
    }

    async fn commit(&self, _: &Transaction) -> Answer<Result<Revision, Conflict>> {
        Err(Error::Full("no space".to_owned()))
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, Answer<Changes>> {
        self.inner.watch(prefix, after)
    }

    async fn grant(&self, ttl: Duration) -> Answer<Lease> {
        self.inner.grant(ttl).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Answer<()> {
        self.inner.keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> Answer<()> {
        self.inner.revoke(lease).await
    }
}

const NO_FAULTS: Faults =
    Faults { refused: 0, lost: 0, unanswered: 0, late: 0, expired: 0, delayed: 0, cut_off: 0 };

/// Follows the registry for some time without an error.
async fn follow_well(control: &mut Control) {
    let followed = tokio::time::timeout(RETRY * 3, control.follow()).await;
    assert!(followed.is_err(), "{followed:?}");
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_over_once_the_registry_also_takes_changes() {
    let (test, mut control) = Test::new(NO_FAULTS, 1).await;
    follow_well(&mut control).await;
    let created = test.events.take().into_iter().find_map(|event| match event {
        Event::Input(Input::Create { group, peer, .. }) => Some((group, peer)),
        _ => None,
    });
    let (group, peer) = created.expect("a group has a replica here");
    control.service = Arc::new(ReadOnly { inner: Arc::clone(&test.service), is_away: false });
    test.notices.send(Notice::Created { group, peer, is_recovered: false }).unwrap();
    for _ in 0..3 {
        let error = control.follow().await.unwrap_err();
        assert!(matches!(error, RegistryError::Coordination(Error::Full(_))), "{error}");
        control.outage.failed("changes fail", &error);
        assert!(!control.outage.is_over());
    }
    control.service = Arc::<Faulty<_>>::clone(&test.service);
    follow_well(&mut control).await;
    assert!(control.outage.is_over());
}

#[tokio::test(start_paused = true)]
async fn a_service_that_cannot_be_reached_is_noticed_without_a_notice() {
    let (test, mut control) = Test::new(NO_FAULTS, 1).await;
    control.service = Arc::new(ReadOnly { inner: Arc::clone(&test.service), is_away: true });
    let error = control.follow().await.unwrap_err();
    assert!(matches!(error, RegistryError::Coordination(Error::Unavailable(_))), "{error}");
    control.outage.failed("it is away", &error);
    control.follow().await.unwrap_err();
    assert!(!control.outage.is_over());
}
