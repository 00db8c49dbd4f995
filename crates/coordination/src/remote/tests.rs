//! Tests of a client with a host on loopback: conformance, restarts, refusals.

use std::net::SocketAddr;
use std::path::PathBuf;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::task::block_in_place;
use tokio_util::codec::{Framed, LengthDelimitedCodec};
use uuid::Uuid;

use super::*;
use crate::conformance::{self, Fixture};
use crate::election::list_all;
use crate::wire::{HostMessage, MAX_HOST_BYTES, Welcome, codec};
use crate::{
    Change, Guard, Host, HostOptions, Hosted, Limits, ManualClock, MemoryCoordination,
    RedbCoordination, retry,
};

const ANY: &str = "127.0.0.1:0";

async fn host(service: Arc<dyn Hosted>) -> Host {
    Host::bind(ANY.parse().unwrap(), service, HostOptions::new("c")).await.unwrap()
}

/// A client whose operations end only with an answer: tests must not depend on speed.
fn patient(address: SocketAddr) -> Remote {
    let deadline = Duration::from_secs(600);
    Remote::new(RemoteOptions { deadline, ..RemoteOptions::new("c", address.to_string()) })
}

fn impatient(address: SocketAddr, cluster: &str) -> Remote {
    let deadline = Duration::from_millis(300);
    Remote::new(RemoteOptions { deadline, ..RemoteOptions::new(cluster, address.to_string()) })
}

fn put(key: &str, value: &str) -> Transaction {
    Transaction { guards: Vec::new(), changes: vec![Change::put(key, value.to_owned())] }
}

const HISTORY: usize = 200;

struct OverTcp {
    service: Arc<dyn Hosted>,
    clock: ManualClock,
    remote: Remote,
    _host: Host,
    _directory: Option<TempDir>,
}

impl OverTcp {
    fn boxed(in_file: bool) -> Box<dyn Fixture> {
        let clock = ManualClock::default();
        let limits = Limits { history_revisions: HISTORY, ..Limits::default() };
        let directory = in_file.then(|| TempDir::new().unwrap());
        let time = Arc::new(clock.clone());
        let service: Arc<dyn Hosted> = match &directory {
            None => Arc::new(MemoryCoordination::new(limits, time)),
            Some(directory) => {
                let path = directory.path().join("file");
                Arc::new(RedbCoordination::open(&path, limits, time).unwrap())
            }
        };
        let host = block_in_place(|| Handle::current().block_on(host(service.clone())));
        let remote = patient(host.address());
        Box::new(Self { service, clock, remote, _host: host, _directory: directory })
    }
}

#[async_trait]
impl Fixture for OverTcp {
    fn service(&self) -> &dyn Coordination {
        &self.remote
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.service.expire().await.unwrap();
    }

    async fn compact(&self) {
        for _ in 0..=HISTORY {
            self.remote.commit(&put("compaction", "")).await.unwrap().unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_a_service_in_memory_conforms() {
    conformance::run(&|| OverTcp::boxed(false)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_a_service_in_a_file_conforms() {
    conformance::run(&|| OverTcp::boxed(true)).await;
}

/// A host of a file that ends and begins again on the same port.
struct Restarting {
    path: PathBuf,
    address: SocketAddr,
    running: Option<(Host, Arc<RedbCoordination>)>,
    _directory: TempDir,
}

impl Restarting {
    async fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("file");
        let address = ANY.parse().unwrap();
        let mut new = Self { path, address, running: None, _directory: directory };
        new.start().await;
        new
    }

    async fn start(&mut self) {
        let clock = Arc::new(crate::SystemClock::default());
        let file = RedbCoordination::open(&self.path, Limits::default(), clock).unwrap();
        let file = Arc::new(file);
        let options = HostOptions::new("c");
        let host = Host::bind(self.address, file.clone(), options).await.unwrap();
        self.address = host.address();
        self.running = Some((host, file));
    }

    async fn stop(&mut self, is_graceful: bool) {
        let (host, file) = self.running.take().unwrap();
        match is_graceful {
            true => host.shutdown().await,
            false => drop(host),
        }
        let mut file = Some(file);
        while let Some(held) = file.take() {
            match Arc::try_unwrap(held) {
                Ok(last) => drop(last),
                Err(held) => {
                    file = Some(held);
                    sleep(Duration::from_millis(1)).await;
                }
            }
        }
    }
}

/// Increments the counter by guarded transactions; returns how many were applied for certain.
async fn increment(remote: &Remote, times: usize) -> usize {
    let mut applied = 0;
    while applied < times {
        let entry = remote.get("counter").await.unwrap();
        let count: u64 = entry.as_ref().map_or(0, |entry| {
            let text = std::str::from_utf8(&entry.value).unwrap();
            text.split_once(' ').unwrap().0.parse().unwrap()
        });
        let value = format!("{} {}", count + 1, Uuid::new_v4());
        let guards = vec![Guard::unchanged("counter", entry.as_ref().map(|entry| entry.modified))];
        let changes = vec![Change::put("counter", value)];
        match retry::commit(remote, &Transaction { guards, changes }).await {
            Ok(answer) => applied += usize::from(answer.is_ok()),
            Err(error) => panic!("{error}"),
        }
    }
    applied
}

async fn restarts_lose_and_repeat_nothing(is_graceful: bool) {
    const WRITERS: usize = 4;
    const EACH: usize = 60;
    const RESTARTS: u64 = 6;
    let mut host = Restarting::new().await;
    let first = patient(host.address);
    // The key exists, so that no guard is only for its absence.
    assert_eq!(increment(&first, 1).await, 1);
    let start = list_all(&first, "").await.unwrap().1;
    let watch = {
        let mut watch = first.watch("counter", start);
        tokio::spawn(async move {
            let mut count = 1;
            while count < 1 + WRITERS * EACH {
                let changes = watch.next().await.unwrap().unwrap();
                count += 1;
                assert_eq!(changes.revision.0, start.0 + count as u64 - 1);
                let value = changes.events[0].entry.as_ref().unwrap().value.clone();
                let text = std::str::from_utf8(&value).unwrap().to_owned();
                assert_eq!(text.split_once(' ').unwrap().0, count.to_string());
            }
        })
    };
    let address = host.address;
    let writers: Vec<_> = (0..WRITERS)
        .map(|_| tokio::spawn(async move { increment(&patient(address), EACH).await }))
        .collect();
    for restart in 1..=RESTARTS {
        let until = Revision(start.0 + restart * 30);
        let reached = async |file: &RedbCoordination| {
            file.watch("counter", Revision(until.0 - 1)).next().await.is_some_and(|r| r.is_ok())
        };
        let file = host.running.as_ref().unwrap().1.clone();
        // `Ahead` until the writers are there.
        while !reached(&file).await {
            assert!(writers.iter().any(|writer| !writer.is_finished()), "a writer has failed");
            sleep(Duration::from_millis(1)).await;
        }
        drop(file);
        host.stop(is_graceful).await;
        host.start().await;
    }
    let mut applied = 1;
    for writer in writers {
        applied += writer.await.unwrap();
    }
    watch.await.unwrap();
    let counter = first.get("counter").await.unwrap().unwrap();
    assert!(counter.value.starts_with(format!("{applied} ").as_bytes()), "{counter:?}");
    assert_eq!(applied, 1 + WRITERS * EACH);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_restarted_under_load_loses_and_repeats_nothing() {
    restarts_lose_and_repeat_nothing(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_killed_during_commits_loses_and_repeats_nothing() {
    restarts_lose_and_repeat_nothing(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_lease_survives_a_restart_of_the_host() {
    let mut host = Restarting::new().await;
    let remote = Arc::new(patient(host.address));
    // Longer than any test runs: it cannot end by the clock.
    let ttl = Duration::from_secs(3600);
    let lease = crate::KeptLease::grant(remote.clone(), ttl).await.unwrap();
    let changes = vec![Change::put_leased("a", "x", lease.id())];
    remote.commit(&Transaction { guards: Vec::new(), changes }).await.unwrap().unwrap();
    for is_graceful in [true, false] {
        host.stop(is_graceful).await;
        host.start().await;
        remote.keep_alive(lease.id()).await.unwrap();
        assert_eq!(remote.get("a").await.unwrap().unwrap().lease, Some(lease.id()));
    }
    assert!(lease.is_held());
    lease.revoke().await.unwrap();
    assert_eq!(remote.get("a").await, Ok(None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_answers_the_operations_that_were_read() {
    let service =
        Arc::new(MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default())));
    let host = host(service.clone()).await;
    let remote = patient(host.address());
    remote.commit(&put("a", "1")).await.unwrap().unwrap();
    host.shutdown().await;
    assert!(service.get("a").await.unwrap().is_some());
}

#[tokio::test]
async fn without_a_host_operations_end_with_the_address_and_the_cause() {
    let listener = TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let remote = impatient(address, "c");
    let commit = remote.commit(&put("a", "1")).await.map(drop);
    let get = remote.get("a").await.map(drop);
    let identity = remote.identity().await.map(drop);
    for answer in [commit, get, identity] {
        let Err(Error::Unavailable(text)) = answer else { panic!("{answer:?}") };
        assert!(text.contains(&address.to_string()) && text.contains("refused"), "{text}");
    }
}

#[tokio::test]
async fn a_client_of_another_cluster_is_refused() {
    let service = MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default()));
    let host = host(Arc::new(service)).await;
    let remote = impatient(host.address(), "other");
    // However long the machine takes for the first attempt.
    let text = loop {
        let Err(Error::Unavailable(text)) = remote.get("a").await else { panic!("served") };
        if !text.contains("no attempt") {
            break text;
        }
    };
    assert!(text.contains(r#"expects cluster "other""#) && text.contains(r#""c""#), "{text}");
}

/// A host that answers the handshake and then runs `then` with the connection.
async fn fake_host<F: Future<Output = ()> + Send>(
    then: impl Fn(usize, Framed<TcpStream, LengthDelimitedCodec>) -> F + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for connection in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            let mut framed = Framed::new(stream, codec(MAX_HOST_BYTES));
            framed.next().await.unwrap().unwrap();
            let identity = Identity { store: Uuid::nil(), restores: 0 };
            let welcome = Welcome::accepted(identity, Revision(0)).encode();
            futures::SinkExt::send(&mut framed, welcome).await.unwrap();
            then(connection, framed).await;
        }
    });
    address
}

#[tokio::test]
async fn a_commit_without_an_answer_is_unknown_and_a_read_is_sent_again() {
    let address = fake_host(|connection, mut framed| async move {
        loop {
            let frame = framed.next().await.unwrap().unwrap();
            match crate::wire::decode(&frame).unwrap() {
                ClientMessage::Call(id, Request::Get(_)) if connection > 0 => {
                    let answer = HostMessage::Answer(id, Ok(Answer::Entry(None)));
                    futures::SinkExt::send(&mut framed, encode(&answer)).await.unwrap();
                }
                // The connection is closed without an answer.
                ClientMessage::Call(..) => return,
                _ => {}
            }
        }
    })
    .await;
    let remote = patient(address);
    assert_eq!(remote.get("a").await, Ok(None), "the second connection answers");
    for answer in [
        remote.commit(&put("a", "1")).await.map(drop),
        remote.grant(Duration::from_secs(1)).await.map(drop),
        remote.revoke(LeaseId(1)).await,
    ] {
        let Err(Error::Unknown(text)) = answer else { panic!("{answer:?}") };
        assert!(text.contains(&address.to_string()), "{text}");
    }
}

#[tokio::test]
async fn a_commit_that_a_silent_host_has_got_is_unknown_after_the_deadline() {
    let address = fake_host(|_, framed| async move {
        let mut stream = framed.into_inner();
        let mut bytes = [0; 64];
        while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
    })
    .await;
    let remote = impatient(address, "c");
    loop {
        // `Unavailable` only if the connection took longer than the deadline.
        match remote.commit(&put("a", "1")).await {
            Err(Error::Unknown(text)) => break assert!(text.contains("within"), "{text}"),
            Err(Error::Unavailable(_)) => {}
            answer => panic!("{answer:?}"),
        }
    }
    assert!(matches!(remote.get("a").await, Err(Error::Unavailable(_))));
}

#[tokio::test]
async fn a_host_that_sends_garbage_is_left() {
    let address = fake_host(|connection, mut framed| async move {
        // Pings come first, and then the operation.
        while let Some(Ok(frame)) = framed.next().await {
            if !matches!(crate::wire::decode(&frame), Ok(ClientMessage::Ping)) {
                break;
            }
        }
        let mut stream = framed.into_inner();
        let garbage: &[u8] = match connection {
            0 => &[0xff; 64],
            1 => &[5, 0, 0, 0, 1, 2, 3, 4, 0],
            _ => &[5, 0, 0, 0, 0, 0],
        };
        stream.write_all(garbage).await.unwrap();
        if connection < 2 {
            let mut bytes = [0; 64];
            while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
        }
    })
    .await;
    let remote = patient(address);
    for expected in ["frame size too big", "checksum", "bytes remaining on stream"] {
        match remote.commit(&put("a", "1")).await {
            Err(Error::Unknown(text)) => assert!(text.contains(expected), "{text}"),
            answer => panic!("{answer:?}"),
        }
    }
}

fn memory(identity: Identity) -> Arc<MemoryCoordination> {
    let clock = Arc::new(ManualClock::default());
    Arc::new(MemoryCoordination::with_identity(Limits::default(), clock, identity))
}

async fn replaced_by(second: Identity, writes: usize) -> String {
    let first = Identity { store: Uuid::from_u128(1), restores: 0 };
    let old = host(memory(first)).await;
    let address = old.address();
    let remote = patient(address);
    for _ in 0..3 {
        remote.commit(&put("a", "1")).await.unwrap().unwrap();
    }
    assert_eq!(remote.identity().await, Ok(first));
    let mut watch = remote.watch("b", Revision(3));
    let next = memory(second);
    for _ in 0..writes {
        next.commit(&put("a", "1")).await.unwrap().unwrap();
    }
    old.shutdown().await;
    let _new = Host::bind(address, next, HostOptions::new("c")).await.unwrap();
    let ended = watch.next().await.unwrap();
    let Err(Error::Replaced(text)) = ended else { panic!("{ended:?}") };
    assert_eq!(remote.get("a").await.unwrap_err(), Error::Replaced(text.clone()));
    assert_eq!(remote.commit(&put("a", "1")).await.unwrap_err(), Error::Replaced(text.clone()));
    text
}

#[tokio::test]
async fn another_store_at_the_address_is_reported_and_not_used() {
    let text = replaced_by(Identity { store: Uuid::from_u128(2), restores: 0 }, 9).await;
    assert!(text.contains("now serves store 00000000-0000-0000-0000-000000000002"), "{text}");
}

#[tokio::test]
async fn a_restore_that_was_not_recorded_is_reported_and_not_used() {
    let text = replaced_by(Identity { store: Uuid::from_u128(1), restores: 0 }, 2).await;
    assert!(text.contains("revision 2") && text.contains("at 3 before"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_that_was_recorded_is_reported_too() {
    let mut host = Restarting::new().await;
    let remote = patient(host.address);
    remote.commit(&put("a", "1")).await.unwrap().unwrap();
    let before = remote.identity().await.unwrap();
    host.stop(true).await;
    let after = RedbCoordination::restored(&host.path).unwrap();
    assert_eq!((after.restores, after.store == before.store), (before.restores + 1, false));
    host.start().await;
    assert!(matches!(remote.get("a").await, Err(Error::Replaced(_))));
    assert_eq!(patient(host.address).identity().await, Ok(after));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_revisions_arrive_whole_in_parts() {
    let service = memory(Identity { store: Uuid::nil(), restores: 0 });
    let host = host(service.clone()).await;
    let remote = patient(host.address());
    let lease = remote.grant(Duration::from_secs(5)).await.unwrap();
    // More than a frame has: 6 MiB of keys.
    for part in 0..60 {
        let changes = (0..100).map(|n| {
            let key = format!("{part:03}{n:03}{}", "k".repeat(1000));
            Change::put_leased(key, "", lease.id)
        });
        let transaction = Transaction { guards: Vec::new(), changes: changes.collect() };
        remote.commit(&transaction).await.unwrap().unwrap();
    }
    let mut watch = remote.watch("", Revision(60));
    remote.revoke(lease.id).await.unwrap();
    let changes = watch.next().await.unwrap().unwrap();
    assert_eq!((changes.revision, changes.events.len()), (Revision(61), 6000));
    let keys: std::collections::BTreeSet<_> =
        changes.events.iter().map(|event| &event.key).collect();
    assert_eq!(keys.len(), 6000);
    remote.commit(&put("a", "1")).await.unwrap().unwrap();
    assert_eq!(watch.next().await.unwrap().unwrap().revision, Revision(62));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_is_not_read_is_cut_off_and_the_client_lists_again() {
    let limits = Limits { history_revisions: 20, ..Limits::default() };
    let service = MemoryCoordination::new(limits, Arc::new(ManualClock::default()));
    let host = host(Arc::new(service)).await;
    let remote = patient(host.address());
    let mut slow = remote.watch("a", Revision(0));
    let value = "x".repeat(100_000);
    remote.commit(&put("a", &value)).await.unwrap().unwrap();
    assert_eq!(slow.next().await.unwrap().unwrap().revision, Revision(1));
    for _ in 0..100 {
        remote.commit(&put("a", &value)).await.unwrap().unwrap();
    }
    let mut next = Revision(2);
    let error = loop {
        match slow.next().await.unwrap() {
            Ok(changes) => assert_eq!(changes.revision, next),
            Err(error) => break error,
        }
        next = next.next();
        assert!(next.0 < 10, "the host has sent more than a window: to revision {next}");
    };
    assert!(matches!(error, Error::Compacted { .. }), "{error:?}");
    assert!(slow.next().await.is_none());
    let (entries, revision) = list_all(&remote, "a").await.unwrap();
    assert_eq!((entries.len(), revision), (1, Revision(101)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_watches_free_their_slots() {
    let service = MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default()));
    let host = host(Arc::new(service)).await;
    let remote = patient(host.address());
    remote.commit(&put("a", "1")).await.unwrap().unwrap();
    for _ in 0..1000 {
        let mut watch = remote.watch("a", Revision(0));
        watch.next().await.unwrap().unwrap();
    }
    let mut held: Vec<_> = (0..65).map(|_| remote.watch("a", Revision(0))).collect();
    let mut full = 0;
    for watch in &mut held {
        match watch.next().await.unwrap() {
            Ok(_) => {}
            Err(Error::Full(_)) => full += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(full, 1);
}

/// Watches that are dropped before the connection has sent them.
#[tokio::test]
async fn a_watch_dropped_at_once_frees_its_slot() {
    let service = MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default()));
    let host = host(Arc::new(service)).await;
    let remote = patient(host.address());
    let revision = remote.commit(&put("a", "1")).await.unwrap().unwrap();
    for _ in 0..1000 {
        let mut watch = remote.watch("a", revision);
        assert!(futures::FutureExt::now_or_never(watch.next()).is_none());
        drop(watch);
        // The host reads what was sent.
        remote.get("a").await.unwrap();
    }
    let mut watch = remote.watch("a", Revision(0));
    assert_eq!(watch.next().await.unwrap().unwrap().revision, revision);
}
