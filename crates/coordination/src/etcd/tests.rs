//! Tests with real members of etcd: conformance, restarts, members that hang, restores, users.

use std::fs;
use std::path::Path;

use futures::StreamExt as _;
use futures::future::join_all;
use prost::Message;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use super::rpc::{Answer, Header, Unary};
use super::*;
use crate::conformance::{self, Fixture};
use crate::retry;

mod process;

use process::{Certificates, Member, Members, etcdctl, is_installed};

/// A client whose operations end only with an answer: tests must not depend on speed.
fn patient(endpoints: Vec<String>) -> Etcd {
    let deadline = Duration::from_secs(120);
    Etcd::new(EtcdOptions { deadline, ..EtcdOptions::new("c", endpoints) }).unwrap()
}

fn impatient(endpoints: Vec<String>) -> Etcd {
    let deadline = Duration::from_millis(500);
    Etcd::new(EtcdOptions { deadline, ..EtcdOptions::new("c", endpoints) }).unwrap()
}

async fn put(etcd: &Etcd, key: &str, value: &str) -> Revision {
    let changes = vec![Change::put(key, value.to_owned())];
    etcd.commit(&Transaction { guards: Vec::new(), changes }).await.unwrap().unwrap()
}

/// A guarded put, which may be sent again.
async fn put_new(etcd: &Etcd, key: &str) -> Revision {
    let guards = vec![Guard::Absent(key.to_owned())];
    let changes = vec![Change::put(key, Uuid::new_v4().to_string())];
    retry::commit(etcd, &Transaction { guards, changes }).await.unwrap().unwrap()
}

#[derive(Clone, PartialEq, Message)]
struct Compact {
    #[prost(int64, tag = "1")]
    revision: i64,
    #[prost(bool, tag = "2")]
    physical: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Compacted {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
}

impl Unary for Compact {
    const PATH: &'static str = "/etcdserverpb.KV/Compact";
    type Answer = Compacted;
}

impl Answer for Compacted {
    fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }
}

struct Real {
    etcd: Etcd,
    _members: Members,
}

#[async_trait]
impl Fixture for Real {
    fn service(&self) -> &dyn Coordination {
        &self.etcd
    }

    async fn advance(&self, by: Duration) {
        tokio::time::sleep(by).await;
    }

    async fn compact(&self) {
        let current = put(&self.etcd, "compaction", "").await;
        let revision = i64::try_from(current.0).unwrap();
        self.etcd.link.ask(Compact { revision, physical: true }).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_passes_the_conformance_suite() {
    if is_installed() {
        let new = || -> Box<dyn Fixture> {
            let members = Members::start(1);
            Box::new(Real { etcd: patient(members.addresses()), _members: members })
        };
        conformance::run(&new).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_pages_and_revisions_arrive_whole() {
    if !is_installed() {
        return;
    }
    let members = Members::start(1);
    let etcd = patient(members.addresses());
    let value = Bytes::from(vec![7; crate::MAX_VALUE_BYTES]);
    const KEYS: usize = 80;
    let start = put(&etcd, "a", "").await;
    for n in 0..KEYS {
        let changes = vec![
            // In this order, fragments end within revisions.
            Change::put(format!("s/{n:03}"), "small"),
            Change::put(format!("k/{n:03}"), value.clone()),
        ];
        etcd.commit(&Transaction { guards: Vec::new(), changes }).await.unwrap().unwrap();
    }
    // More than a message may have, so pages shrink.
    let (entries, _) = crate::election::list_all(&etcd, "k/").await.unwrap();
    assert_eq!(entries.len(), KEYS);
    assert!(entries.iter().all(|entry| entry.value == value));
    let page = etcd.list(&ListRequest::new("")).await.unwrap();
    assert!(page.more && page.entries.len() <= 4, "{} entries", page.entries.len());
    let mut watch = etcd.watch("", start);
    for n in 0..KEYS {
        let changes = watch.next().await.unwrap().unwrap();
        assert_eq!(changes.events.len(), 2, "revision {n} is whole");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_outlive_a_restart() {
    if !is_installed() {
        return;
    }
    let mut members = Members::start(1);
    let etcd = patient(members.addresses());
    let first = put(&etcd, "a", "1").await;
    let mut watch = etcd.watch("a", Revision(0));
    assert_eq!(watch.next().await.unwrap().unwrap().revision, first);
    let lease = etcd.grant(Duration::from_secs(600)).await.unwrap().id;
    members.members[0].kill();
    let answer = impatient(members.addresses()).get("a").await;
    assert!(
        matches!(&answer, Err(Error::Unavailable(why)) if why.contains("refused")),
        "{answer:?}"
    );
    let change = Transaction { guards: Vec::new(), changes: vec![Change::put("x", "")] };
    let answer = impatient(members.addresses()).commit(&change).await;
    assert!(matches!(answer, Err(Error::Unavailable(_))), "nothing was sent: {answer:?}");
    members.members[0].start();
    assert_eq!(etcd.get("a").await.unwrap().unwrap().modified, first);
    etcd.keep_alive(lease).await.unwrap();
    let second = put_new(&etcd, "ab").await;
    let changes = watch.next().await.unwrap().unwrap();
    assert_eq!(changes.revision, second, "the watch goes on behind what it has received");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_hangs_or_ends_is_left_for_another() {
    if !is_installed() {
        return;
    }
    let mut members = Members::start(3);
    let etcd = patient(members.addresses());
    put_new(&etcd, "a").await;
    let mut watch = etcd.watch("", Revision(0));
    watch.next().await.unwrap().unwrap();
    // The client's first connection is to the first member.
    members.members[0].signal("STOP");
    assert!(etcd.get("a").await.unwrap().is_some());
    let second = put_new(&etcd, "b").await;
    assert_eq!(watch.next().await.unwrap().unwrap().revision, second, "also the watch");
    members.members[0].signal("CONT");
    for number in 0..3 {
        members.members[number].kill();
        let revision = put_new(&etcd, &format!("c{number}")).await;
        assert_eq!(watch.next().await.unwrap().unwrap().revision, revision);
        members.members[number].start();
    }
    let all = crate::election::list_all(&etcd, "").await.unwrap().0;
    assert_eq!(all.len(), 5);
}

/// Replaces the data of a stopped member.
fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    let status = std::process::Command::new("cp").arg("-r").args([from, to]).status().unwrap();
    assert!(status.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_was_set_back_is_not_used() {
    if !is_installed() {
        return;
    }
    let mut members = Members::start(1);
    let clients: Vec<_> = (0..3).map(|_| patient(members.addresses())).collect();
    let [reader, writer, watcher] = &clients[..] else { unreachable!() };
    put(reader, "a", "1").await;
    let backup = members.directory.path().join("backup");
    let member = &mut members.members[0];
    member.kill();
    copy(member.data(), &backup);
    member.start();
    // Reads are sent again, until the member is ready.
    reader.get("a").await.unwrap();
    let last = put(reader, "a", "2").await;
    for etcd in &clients {
        assert_eq!(etcd.get("a").await.unwrap().unwrap().modified, last);
    }
    let mut watch = watcher.watch("b", last);
    assert!(tokio::time::timeout(Duration::from_secs(1), watch.next()).await.is_err());
    member.kill();
    copy(&backup, member.data());
    member.start();
    let change = Transaction { guards: Vec::new(), changes: vec![Change::put("a", "3")] };
    let answer = writer.commit(&change).await;
    assert!(matches!(answer, Err(Error::Replaced(_))), "{answer:?}");
    let answer = reader.get("a").await;
    assert!(matches!(answer, Err(Error::Replaced(_))), "{answer:?}");
    let answer = watch.next().await;
    assert!(matches!(answer, Some(Err(Error::Replaced(_)))), "{answer:?}");
    let found = patient(vec![member.address.clone()]).get("a").await.unwrap().unwrap();
    assert_eq!(found.value, "1", "nothing was written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_compare_the_identity_beside_their_guards() {
    if !is_installed() {
        return;
    }
    let members = Members::start(1);
    let etcd = patient(members.addresses());
    etcd.identity().await.unwrap();
    let created = put(&etcd, "a", "1").await;
    let guards = vec![Guard::Created("a".to_owned(), created), Guard::Absent("a".to_owned())];
    let conflict = etcd.commit(&Transaction { guards, changes: Vec::new() }).await.unwrap();
    let conflict = conflict.unwrap_err();
    assert_eq!(conflict.key, "a");
    assert_eq!(conflict.found.unwrap().modified, created);
    for count in [MAX_TRANSACTION_ITEMS - 1, MAX_TRANSACTION_ITEMS] {
        let guards = (0..count).map(|n| Guard::Absent(format!("absent/{n}"))).collect();
        let changes = vec![Change::put("b", count.to_string())];
        etcd.commit(&Transaction { guards, changes }).await.unwrap().unwrap();
    }
    let lease = etcd.grant(Duration::from_secs(600)).await.unwrap().id;
    let ended = etcd.grant(Duration::from_secs(600)).await.unwrap().id;
    etcd.revoke(ended).await.unwrap();
    let changes = vec![Change::put_leased("c", "", lease), Change::put_leased("d", "", ended)];
    let answer = etcd.commit(&Transaction { guards: Vec::new(), changes }).await;
    assert_eq!(answer, Err(Error::LeaseNotFound(ended)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recorded_restore_stops_clients_that_run_on() {
    if !is_installed() {
        return;
    }
    let members = Members::start(1);
    let clients: Vec<_> = (0..4).map(|_| patient(members.addresses())).collect();
    let identities = join_all(clients.iter().map(Coordination::identity)).await;
    let identity = identities[0].clone().unwrap();
    assert!(identities.iter().all(|found| *found == Ok(identity)), "{identities:?}");
    put_new(&clients[0], "a").await;
    let operator = patient(members.addresses());
    let restored = operator.restored().await.unwrap();
    assert_eq!(restored.restores, identity.restores + 1);
    assert_ne!(restored.store, identity.store);
    let change = Transaction {
        guards: vec![Guard::Absent("b".to_owned())],
        changes: vec![Change::put("b", "")],
    };
    for etcd in &clients {
        let answer = etcd.commit(&change).await;
        assert!(matches!(answer, Err(Error::Replaced(_))), "{answer:?}");
        assert!(matches!(etcd.get("a").await, Err(Error::Replaced(_))));
    }
    let new = patient(members.addresses());
    assert_eq!(new.identity().await.unwrap(), restored);
    assert_eq!(new.get("b").await.unwrap(), None);
    new.commit(&change).await.unwrap().unwrap();
}

/// Creates an authority, a certificate of a member, and one of a client, in a directory.
fn certificates(directory: &Path) -> (Certificates, Certificates) {
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&ca_key).unwrap();
    fs::write(directory.join("ca.pem"), ca.pem()).unwrap();
    let issuer = Issuer::new(params, ca_key);
    let signed = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
        let files = Certificates {
            ca: directory.join("ca.pem"),
            certificate: directory.join(format!("{name}.pem")),
            key: directory.join(format!("{name}.key")),
        };
        fs::write(&files.certificate, certificate.pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    };
    (signed("member"), signed("client"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_and_users_are_required() {
    if !is_installed() {
        return;
    }
    let mut of_client = None;
    let mut members = Members::start_with(1, |directory| {
        let (member, client) = certificates(directory);
        of_client = Some(client);
        let path = |path: &Path| path.display().to_string();
        let arguments = [
            ("--cert-file", path(&member.certificate)),
            ("--key-file", path(&member.key)),
            ("--trusted-ca-file", path(&member.ca)),
        ];
        let arguments = arguments.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
        arguments.chain(["--client-cert-auth".to_owned()]).collect()
    });
    let files = of_client.unwrap();
    let read = |path: &Path| fs::read(path).unwrap();
    let identity = || Some((read(&files.certificate), read(&files.key)));
    let with = |identity, user: Option<(&str, &str)>, deadline| {
        let user = user.map(|(name, password)| (name.to_owned(), password.to_owned()));
        let tls = Some(EtcdTls { ca: read(&files.ca), identity });
        let options = EtcdOptions::new("c", members.addresses());
        Etcd::new(EtcdOptions { tls, user, deadline: Duration::from_secs(deadline), ..options })
            .unwrap()
    };
    put_new(&with(identity(), None, 120), "a").await;
    let answer = with(None, None, 1).get("a").await;
    assert!(matches!(answer, Err(Error::Unavailable(_))), "no certificate: {answer:?}");
    let answer = impatient(members.addresses()).get("a").await;
    assert!(matches!(answer, Err(Error::Unavailable(_))), "no TLS: {answer:?}");

    for arguments in [
        &["user", "add", "root:secret"][..],
        &["user", "grant-role", "root", "root"],
        &["user", "add", "alluvium:word"],
        &["role", "add", "alluvium"],
        &["role", "grant-permission", "alluvium", "readwrite", "--prefix", "/alluvium/c/"],
        &["user", "grant-role", "alluvium", "alluvium"],
        &["auth", "enable"],
    ] {
        etcdctl(&members.members[0], &files, arguments);
    }
    let user = with(identity(), Some(("alluvium", "word")), 120);
    user.identity().await.unwrap();
    put_new(&user, "/alluvium/c/a").await;
    let answer = user.get("other").await;
    assert!(
        matches!(&answer, Err(Error::Invalid(why)) if why.contains("permission")),
        "{answer:?}"
    );
    let answer = user.watch("other", Revision(0)).next().await.unwrap();
    assert!(
        matches!(&answer, Err(Error::Invalid(why)) if why.contains("permission")),
        "{answer:?}"
    );
    let answer = with(identity(), Some(("alluvium", "wrong")), 1).get("/alluvium/c/a").await;
    let is_refused = matches!(&answer, Err(Error::Unavailable(why)) if why.contains("password"));
    assert!(is_refused, "{answer:?}");
    // A token ends with the member that gave it out.
    let member: &mut Member = &mut members.members[0];
    member.kill();
    member.start();
    put_new(&user, "/alluvium/c/b").await;
}
