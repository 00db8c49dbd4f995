//! A read-only server on the object store of another one: it answers as that one does for
//! everything that is uploaded, refuses what would be stored, and writes nothing.

#[path = "../../../stream/tests/common/reads_only.rs"]
mod reads_only;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use alluvium_stream::{Options, Store};
use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::offset_for_leader_epoch_request::{
    OffsetForLeaderPartition, OffsetForLeaderTopic,
};
use kafka_protocol::messages::*;
use prometheus_client::registry::Registry;
use reads_only::ReadsOnly;
use uuid::Uuid;

use super::deleting::{commit, committed};
use super::every_api::{self, error_codes};
use super::examples::World;
use super::harness::{Client, HANG, TestServer, fetch, produce, stored, text};
use super::lost_offsets::{damage, prove};
use super::secured::sasl;
use super::transactions::{Producer, delete_topic};
use crate::batch::BatchHeader;
use crate::batch::tests::plain;
use crate::security::Mechanism;
use crate::{AuthorizationConfig, Broker, BrokerConfig};

const POLICY_VIOLATION: i16 = ResponseError::PolicyViolation.code();

/// A read-only server.
struct Reader {
    broker: Broker,
    store: Store,
}

impl Reader {
    /// Starts one beside a simulated server.
    async fn start(of: &TestServer) -> Self {
        Self::with(of, |_| {}).await
    }

    async fn with(of: &TestServer, configure: impl FnOnce(&mut BrokerConfig)) -> Self {
        let mut config = BrokerConfig::default();
        config.listeners[0].listen.set_port(0);
        configure(&mut config);
        let objects = Arc::new(ReadsOnly::new(of.object_store()));
        let id = of.store().wal_header().wal_id;
        let options = Options { poll_interval: Duration::from_millis(10), ..Options::default() };
        let store = Store::follow(objects, id, options).await.unwrap();
        let broker = Broker::start(config, store.clone(), &mut Registry::default()).await.unwrap();
        Self { broker, store }
    }

    fn addr(&self) -> SocketAddr {
        self.broker.listeners().next().unwrap().1
    }

    async fn client(&self) -> Client {
        Client::connect(self.addr()).await
    }

    /// Waits until the server has taken over what `of` has now.
    async fn catch_up(&self, of: &TestServer) {
        of.store().flush().await.unwrap();
        let wanted = of.store().catalog_version();
        self.store.catch_up().await.unwrap();
        // The writer may have published more since.
        assert!(self.store.catalog_version() >= wanted);
    }

    async fn stop(self) {
        self.broker.shutdown().await;
        self.store.close().await.unwrap();
    }
}

/// Asks both servers until they answer the same.
async fn same<R, F>(what: &str, mut one: Client, mut other: Client, ask: F) -> R
where
    R: PartialEq + std::fmt::Debug,
    F: AsyncFn(&mut Client) -> R,
{
    let begun = std::time::Instant::now();
    loop {
        let (first, second) = (ask(&mut one).await, ask(&mut other).await);
        if first == second {
            return first;
        }
        assert!(begun.elapsed() < HANG, "{what}: {first:?} is not {second:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What a reader of committed or of all records gets of partition 0 of `t`: error, log start, last
/// stable offset, high watermark, aborted transactions, and the records: their bytes and CRC.
type Fetched = (i16, i64, i64, i64, Vec<(i64, i64)>, (usize, u32));

async fn fetched(client: &mut Client, from: i64, isolation: i8) -> Fetched {
    let (mut next, mut records, mut aborted) = (from, Vec::new(), BTreeSet::new());
    loop {
        // A response from objects may end earlier than one from memory.
        let request = fetch("t", &[(0, next)], 0).with_isolation_level(isolation);
        let response = client.call(12, &request).await;
        let it = &response.responses[0].partitions[0];
        let listed = it.aborted_transactions.iter().flatten();
        aborted.extend(listed.map(|one| (one.producer_id.0, one.first_offset)));
        let mut rest = it.records.clone().unwrap_or_default();
        records.extend_from_slice(&rest);
        while let Some(header) = BatchHeader::parse(&rest) {
            next = header.base_offset + i64::from(header.last_offset_delta) + 1;
            rest = rest.slice(header.len_bytes..);
        }
        let end = if isolation == 0 { it.high_watermark } else { it.last_stable_offset };
        if next < end && it.error_code == 0 {
            continue;
        }
        let records = (records.len(), crc32c::crc32c(&records));
        let (start, stable) = (it.log_start_offset, it.last_stable_offset);
        let aborted = aborted.into_iter().collect();
        return (it.error_code, start, stable, it.high_watermark, aborted, records);
    }
}

/// The answer to a client that asks for the end of epoch 0, and the leader epoch in the metadata.
async fn epochs(client: &mut Client) -> (i16, i32, i64, i32) {
    let topic = OffsetForLeaderTopic::default()
        .with_topic(TopicName(text("t")))
        .with_partitions(vec![OffsetForLeaderPartition::default().with_leader_epoch(0)]);
    let request = OffsetForLeaderEpochRequest::default().with_topics(vec![topic]);
    let response = client.call(4, &request).await;
    let found = response.topics[0].partitions[0].clone();
    let all = client.call(12, &MetadataRequest::default().with_topics(None)).await;
    let t = all.topics.iter().find(|topic| topic.name.as_ref().unwrap().as_str() == "t").unwrap();
    (found.error_code, found.leader_epoch, found.end_offset, t.partitions[0].leader_epoch)
}

async fn both(owner: &TestServer, reader: &Reader) -> (Client, Client) {
    (owner.client().await, reader.client().await)
}

/// Topics by name: ID, number of partitions.
async fn topics(client: &mut Client) -> BTreeMap<String, (Uuid, usize)> {
    let all = client.call(12, &MetadataRequest::default().with_topics(None)).await;
    let topics = all.topics.iter().map(|topic| {
        (topic.name.as_ref().unwrap().to_string(), (topic.topic_id, topic.partitions.len()))
    });
    // Internal topics of the writer may appear at any time.
    topics.filter(|(name, _)| !name.starts_with("__")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_uploaded_is_served_as_by_the_writer() {
    let owner = TestServer::simulated(16 << 20).await;
    let id = owner.topic("t", 1, &[]).await;
    owner.store().flush().await.unwrap();
    let reader = Reader::start(&owner).await;
    assert_eq!(owner.client().await.produce("t", 0, &plain(&[1, 2])).await, (0, 0));
    let before = fetched(&mut reader.client().await, 0, 0).await;
    assert_eq!((before.0, before.3), (0, 0), "nothing is uploaded");

    for version_2 in [false, true] {
        // Each step is uploaded by itself: an open transaction, its abort; another, and its commit.
        let mut producer = Producer::init(&owner, "a", version_2).await;
        for commits in [false, true] {
            if !version_2 {
                assert_eq!(producer.add("t", &[0]).await, 0);
            }
            assert_eq!(producer.produce("t", id, 0).await.0, 0);
            for end in [None, Some(commits)] {
                if let Some(commits) = end {
                    assert_eq!(producer.end(commits).await, 0);
                }
                reader.catch_up(&owner).await;
                let high_watermark = fetched(&mut owner.client().await, 0, 0).await.3;
                for isolation in [0, 1] {
                    for from in 0..=high_watermark {
                        let (one, other) = both(&owner, &reader).await;
                        let ask =
                            async |client: &mut Client| fetched(client, from, isolation).await;
                        let found = same("a fetch", one, other, ask).await;
                        assert_eq!((found.0, found.3), (0, high_watermark));
                        assert_eq!(end.is_some(), found.2 == high_watermark);
                    }
                }
                let (one, other) = both(&owner, &reader).await;
                let describe = async |client: &mut Client| {
                    use describe_producers_request::TopicRequest;
                    let topic = TopicRequest::default()
                        .with_name(TopicName(text("t")))
                        .with_partition_indexes(vec![0]);
                    let request = DescribeProducersRequest::default().with_topics(vec![topic]);
                    let response = client.call(0, &request).await;
                    let mut active = response.topics[0].partitions[0].active_producers.clone();
                    active.iter_mut().for_each(|it| it.last_timestamp = 0);
                    active
                };
                assert!(!same("producers", one, other, describe).await.is_empty());
            }
        }
    }
    let (one, other) = both(&owner, &reader).await;
    assert_eq!(same("epochs", one, other, epochs).await.0, 0);
    let beyond = fetched(&mut reader.client().await, 1000, 0).await;
    assert_eq!(beyond.0, ResponseError::OffsetOutOfRange.code());
    // A fetch waits for an upload.
    let end = fetched(&mut reader.client().await, 0, 0).await.3;
    let mut client = reader.client().await;
    let waiting =
        tokio::spawn(async move { client.call(12, &fetch("t", &[(0, end)], 60_000)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(owner.client().await.produce("t", 0, &plain(&[1])).await, (0, end));
    owner.store().flush().await.unwrap();
    let answer = tokio::time::timeout(HANG, waiting).await.expect("it hangs").unwrap();
    assert!(!answer.responses[0].partitions[0].records.as_ref().unwrap().is_empty());
    reader.stop().await;
}

/// Topics that are created, deleted, grown and altered, and their settings.
#[tokio::test(flavor = "multi_thread")]
async fn changes_of_topics_are_taken_over() {
    use describe_configs_request::DescribeConfigsResource;
    let owner = TestServer::simulated(16 << 20).await;
    owner.topic("t", 1, &[]).await;
    let reader = Reader::start(&owner).await;
    let check = async |what: &str| {
        owner.store().flush().await.unwrap();
        let (one, other) = both(&owner, &reader).await;
        let found = same(what, one, other, topics).await;
        let (one, other) = both(&owner, &reader).await;
        let resource = |kind, name: &str| {
            DescribeConfigsResource::default()
                .with_resource_type(kind)
                .with_resource_name(text(name))
        };
        let request = DescribeConfigsRequest::default().with_resources(vec![resource(2, "t")]);
        let ask = async |client: &mut Client| {
            let response = client.call(4, &request).await;
            let configs = response.results.iter().flat_map(|result| &result.configs);
            configs.map(|it| (it.name.clone(), it.value.clone())).collect::<BTreeMap<_, _>>()
        };
        let configs = same(what, one, other, ask).await;
        (found, configs)
    };
    let value = |configs: &BTreeMap<_, Option<_>>, name: &str| {
        let found: &Option<kafka_protocol::protocol::StrBytes> = &configs[&text(name)];
        found.as_ref().unwrap().to_string()
    };
    check("at the start").await;
    owner.topic("new", 3, &[("retention.ms", "1234")]).await;
    assert_eq!(check("a new topic").await.0["new"].1, 3);
    let more = create_partitions_request::CreatePartitionsTopic::default()
        .with_name(TopicName(text("t")))
        .with_count(4)
        .with_assignments(None);
    let more = CreatePartitionsRequest::default().with_topics(vec![more]);
    assert_eq!(owner.client().await.call(3, &more).await.results[0].error_code, 0);
    assert_eq!(owner.client().await.produce("t", 3, &plain(&[1])).await, (0, 0));
    assert_eq!(check("more partitions").await.0["t"].1, 4);
    let (one, other) = both(&owner, &reader).await;
    let ask = async |client: &mut Client| client.fetch("t", 3, 0).await;
    assert_eq!(same("a new partition", one, other, ask).await.1, 1);

    super::configs::set_well(&mut owner.client().await, (2, "t"), "retention.ms", "77").await;
    super::configs::set_well(&mut owner.client().await, (4, ""), "log.segment.bytes", "2000000")
        .await;
    let configs = check("settings").await.1;
    assert_eq!(value(&configs, "retention.ms"), "77");
    assert_eq!(value(&configs, "segment.bytes"), "2000000");

    delete_topic(&owner, "new").await;
    assert!(!check("a deletion").await.0.contains_key("new"));
    // Deleted and created again: another ID, and no records.
    delete_topic(&owner, "t").await;
    let id = owner.topic("t", 1, &[]).await;
    assert_eq!(check("another topic of the name").await.0["t"], (id, 1));
    assert_eq!(reader.client().await.fetch("t", 0, 0).await.1, 0);
    reader.stop().await;
}

/// All APIs are announced, and answer in all versions; those that would store something refuse.
#[tokio::test(flavor = "multi_thread")]
async fn every_api_that_writes_is_refused() {
    use ResponseError as E;
    let owner = TestServer::simulated(16 << 20).await;
    let topic_id = owner.topic("topic", 3, &[]).await;
    owner.store().flush().await.unwrap();
    let reader = Reader::with(&owner, |config| {
        config.security.authorization = Some(AuthorizationConfig {
            super_users: Vec::new(),
            allow_everyone_if_no_acl_found: true,
        });
    })
    .await;
    let mut client = reader.client().await;
    let before = (owner.store().catalog_version(), topics(&mut owner.client().await).await);
    let mut refused = 0;
    for (key, version) in every_api::announced(&mut client).await {
        let world = World {
            topic_id,
            group: format!("group-{key:?}-{version}"),
            unique: "topic".to_owned(),
            ..World::imaginary()
        };
        let response = every_api::call(&mut client, key, version, &world).await;
        let errors = error_codes(&response);
        let expected = match key {
            ApiKey::Produce
            | ApiKey::CreateTopics
            | ApiKey::DeleteTopics
            | ApiKey::DeleteRecords
            | ApiKey::CreatePartitions
            | ApiKey::CreateAcls
            | ApiKey::DeleteAcls
            | ApiKey::AlterConfigs
            | ApiKey::IncrementalAlterConfigs
            | ApiKey::AlterClientQuotas
            | ApiKey::AlterUserScramCredentials
            | ApiKey::WriteTxnMarkers
            | ApiKey::ShareGroupHeartbeat
            | ApiKey::ShareFetch
            | ApiKey::ShareAcknowledge
            | ApiKey::AlterShareGroupOffsets
            | ApiKey::DeleteShareGroupOffsets => POLICY_VIOLATION,
            ApiKey::InitProducerId => E::ClusterAuthorizationFailed.code(),
            ApiKey::AddPartitionsToTxn
            | ApiKey::AddOffsetsToTxn
            | ApiKey::EndTxn
            | ApiKey::TxnOffsetCommit => E::TransactionalIdAuthorizationFailed.code(),
            _ => {
                assert!(!errors.contains(&POLICY_VIOLATION), "{key:?} v{version}: {response}");
                continue;
            }
        };
        let transactional = E::TransactionalIdAuthorizationFailed.code();
        let is_expected = |code: &i16| {
            *code == expected || (key == ApiKey::InitProducerId && *code == transactional)
        };
        assert!(errors.iter().any(is_expected), "{key:?} v{version}: {errors:?}: {response}");
        // Nothing has succeeded.
        let of_parts = errors.iter().filter(|code| **code != 0 && !is_expected(code)).count();
        let unknown = [E::UnknownTopicOrPartition.code(), E::UnknownTopicId.code()];
        let is_unknown = |code: &i16| unknown.contains(code);
        assert_eq!(of_parts, errors.iter().filter(|it| is_unknown(it)).count(), "{response}");
        refused += 1;
    }
    assert!(refused > 50, "{refused}");
    let response = client.call(9, &produce("topic", 0, &plain(&[1]), -1)).await;
    let message = response.responses[0].partition_responses[0].error_message.clone();
    assert_eq!(message.unwrap().to_string(), "this server is read-only");
    // Without an acknowledgement, a closed connection is the only answer.
    client.send(9, &produce("topic", 0, &plain(&[1]), 0)).await;
    assert!(client.receive_frame().await.is_none());
    assert_eq!((owner.store().catalog_version(), topics(&mut owner.client().await).await), before);
    assert_eq!(topics(&mut reader.client().await).await, before.1);
    // A request for metadata creates no topic.
    let mut client = reader.client().await;
    let topic =
        metadata_request::MetadataRequestTopic::default().with_name(Some(TopicName(text("other"))));
    let request = MetadataRequest::default()
        .with_topics(Some(vec![topic]))
        .with_allow_auto_topic_creation(true);
    let unknown = &client.call(12, &request).await.topics[0];
    assert_eq!(unknown.error_code, E::UnknownTopicOrPartition.code());
    reader.stop().await;
}

/// Groups begin with the offsets that are uploaded; what is committed here stays here.
#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_groups_are_taken_over_once_and_kept_in_memory() {
    let owner = TestServer::simulated(16 << 20).await;
    owner.topic("t", 3, &[]).await;
    commit(&mut owner.client().await, "g", "t", &[0, 1]).await;
    owner.store().flush().await.unwrap();
    commit(&mut owner.client().await, "late", "t", &[0]).await;
    let reader = Reader::start(&owner).await;
    let expected = [("t".to_owned(), 0), ("t".to_owned(), 1)];
    let mut client = reader.client().await;
    assert_eq!(committed(&mut client, "g").await, expected);
    assert_eq!(committed(&mut client, "late").await, []);
    commit(&mut client, "g", "t", &[2]).await;
    commit(&mut client, "own", "t", &[0]).await;
    assert_eq!(committed(&mut client, "g").await.len(), 3);
    let listed = client.call(4, &ListGroupsRequest::default()).await.groups;
    let mut listed: Vec<_> = listed.iter().map(|group| group.group_id.to_string()).collect();
    listed.sort();
    assert_eq!(listed, ["g", "own"]);
    assert_eq!(committed(&mut owner.client().await, "g").await, expected);
    assert_eq!(committed(&mut owner.client().await, "own").await, []);
    // Offsets of a topic that the writer deletes are dropped here, too.
    delete_topic(&owner, "t").await;
    reader.catch_up(&owner).await;
    let begun = std::time::Instant::now();
    while !committed(&mut client, "g").await.is_empty() {
        assert!(begun.elapsed() < HANG, "they stay");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    reader.stop().await;
}

/// After damage of the writer's log: its term, and where the records of the epoch before end.
#[tokio::test(flavor = "multi_thread")]
async fn leader_epochs_are_those_of_the_writer() {
    let mut owner = TestServer::start().await;
    owner.topic("t", 1, &[]).await;
    let batch = plain(&[10]);
    assert_eq!(owner.client().await.produce("t", 0, &batch).await, (0, 0));
    owner.store().flush().await.unwrap();
    let reader = Reader::start(&owner).await;
    let lost = plain(&[20, 21]);
    assert_eq!(owner.client().await.produce("t", 0, &lost).await, (0, 1));
    prove(&owner).await;
    owner.crash_and_damage(|wal| damage(wal, &[stored(&lost, 1)])).await;
    assert_eq!(owner.store().term(), 1);
    reader.catch_up(&owner).await;
    let (one, other) = both(&owner, &reader).await;
    let found = same("epochs", one, other, epochs).await;
    assert_eq!(found, (0, 0, 1, 1));
    let next = plain(&[30]);
    let (code, base) = owner.client().await.produce("t", 0, &next).await;
    assert_eq!(code, 0);
    reader.catch_up(&owner).await;
    let (one, other) = both(&owner, &reader).await;
    assert_eq!(same("epochs", one, other, epochs).await, (0, 0, 1, 1));
    for from in [0, 1, base] {
        let (one, other) = both(&owner, &reader).await;
        let ask = async |client: &mut Client| fetched(client, from, 0).await;
        assert_eq!(same("a gap", one, other, ask).await.3, base + 1);
    }
    reader.stop().await;
}

/// Users and ACLs of the writer apply, also those that change later.
#[tokio::test(flavor = "multi_thread")]
async fn users_and_acls_are_those_of_the_writer() {
    let owner = TestServer::simulated_with(16 << 20, |config| {
        config.security.authorization = Some(AuthorizationConfig {
            super_users: Vec::new(),
            allow_everyone_if_no_acl_found: true,
        });
    })
    .await;
    owner.topic("t", 1, &[]).await;
    let users = crate::UserAdmin(owner.server().clone());
    users.set_password("alice", "secret").await.unwrap();
    owner.store().flush().await.unwrap();
    let reader = Reader::with(&owner, |config| {
        config.listeners = vec![sasl("SASL", &[Mechanism::Plain, Mechanism::ScramSha256])];
        config.security.authorization = Some(AuthorizationConfig {
            super_users: Vec::new(),
            allow_everyone_if_no_acl_found: false,
        });
    })
    .await;
    let logs_in = async |user: &str, password: &str| {
        let mut client = reader.client().await;
        (client.plain(user, password).await.0 == 0, client)
    };
    assert!(logs_in("alice", "secret").await.0);
    assert!(!logs_in("alice", "other").await.0);
    assert!(!logs_in("bob", "secret").await.0);
    let (_, mut client) = logs_in("alice", "secret").await;
    let denied = ResponseError::TopicAuthorizationFailed.code();
    assert_eq!(client.fetch("t", 0, 0).await.0, denied);

    users.set_password("bob", "secret").await.unwrap();
    assert!(users.delete("alice").await.unwrap());
    let acl = create_acls_request::AclCreation::default()
        .with_resource_type(2)
        .with_resource_name(text("t"))
        .with_resource_pattern_type(3)
        .with_principal(text("User:bob"))
        .with_host(text("*"))
        .with_operation(2)
        .with_permission_type(3);
    let request = CreateAclsRequest::default().with_creations(vec![acl]);
    let created = owner.client().await.call(3, &request).await.results.remove(0);
    assert_eq!(created.error_code, 0, "{:?}", created.error_message);
    reader.catch_up(&owner).await;
    let begun = std::time::Instant::now();
    while !logs_in("bob", "secret").await.0 || logs_in("alice", "secret").await.0 {
        assert!(begun.elapsed() < HANG, "the users are not taken over");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (_, mut client) = logs_in("bob", "secret").await;
    assert_eq!(client.fetch("t", 0, 0).await.0, 0);
    let refused = reader.broker.users().set_password("carol", "secret").await.unwrap_err();
    assert!(refused.to_string().contains("read-only"), "{refused}");
    reader.stop().await;
}

/// The offsets of the records that a consumer with `read_committed` takes from a response: it drops
/// those of the transactions that the response lists, each up to its marker.
fn committed_records(batches: &Bytes, aborted: &[(i64, i64)]) -> Vec<i64> {
    let (mut rest, mut dropped, mut taken) = (batches.clone(), BTreeSet::new(), Vec::new());
    while let Some(header) = BatchHeader::parse(&rest) {
        let begun = aborted.iter().filter(|(_, first)| *first <= header.base_offset);
        for one @ (producer, _) in begun {
            if *producer == header.producer_id && !dropped.contains(&(*one, true)) {
                dropped.insert((*one, false));
            }
        }
        let is_of = |(one, is_over): &((i64, i64), bool)| one.0 == header.producer_id && !is_over;
        if header.is_control() {
            let ended: Vec<_> = dropped.iter().copied().filter(is_of).collect();
            for (one, _) in ended {
                dropped.remove(&(one, false));
                dropped.insert((one, true));
            }
        } else if !dropped.iter().any(is_of) {
            taken.push(header.base_offset);
        }
        rest = rest.slice(header.len_bytes..);
    }
    taken
}

/// Each step of each transaction is uploaded by itself while consumers read: they get records of
/// committed transactions only, and in the end all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_record_of_another_transaction_is_shown_while_uploads_go_on() {
    let owner = TestServer::simulated(16 << 20).await;
    let id = owner.topic("t", 1, &[]).await;
    owner.store().flush().await.unwrap();
    let reader = Reader::start(&owner).await;
    let over = Arc::new(AtomicBool::new(false));
    let consumers = (0..3).map(|_| {
        let (addr, over) = (reader.addr(), over.clone());
        tokio::spawn(async move {
            let mut client = Client::connect(addr).await;
            let mut seen = BTreeSet::new();
            let mut is_last = false;
            let mut from = 0;
            loop {
                let request = fetch("t", &[(0, from)], 0).with_isolation_level(1);
                let response = client.call(12, &request).await;
                let it = &response.responses[0].partitions[0];
                assert_eq!(it.error_code, 0);
                assert!(it.last_stable_offset <= it.high_watermark);
                // Some batches before the end, where the state changes.
                from = (it.last_stable_offset - 4).max(0);
                let aborted = it.aborted_transactions.iter().flatten();
                let aborted: Vec<_> =
                    aborted.map(|one| (one.producer_id.0, one.first_offset)).collect();
                seen.extend(committed_records(it.records.as_ref().unwrap(), &aborted));
                if is_last {
                    return seen;
                }
                is_last = over.load(Ordering::SeqCst);
            }
        })
    });
    let consumers: Vec<_> = consumers.collect();
    let mut producer = Producer::init(&owner, "a", true).await;
    let mut expected = BTreeSet::new();
    for round in 0..40 {
        let commits = round % 3 == 0;
        for _ in 0..2 {
            let (code, base) = producer.produce("t", id, 0).await;
            assert_eq!(code, 0);
            reader.catch_up(&owner).await;
            if commits {
                expected.insert(base);
            }
        }
        assert_eq!(producer.end(commits).await, 0);
        reader.catch_up(&owner).await;
    }
    reader.catch_up(&owner).await;
    over.store(true, Ordering::SeqCst);
    for consumer in consumers {
        let seen = consumer.await.unwrap();
        let others: Vec<_> = seen.difference(&expected).collect();
        assert!(others.is_empty(), "records of transactions that were aborted: {others:?}");
        assert!(seen.len() > 1, "it has read while uploads went on");
    }
    let mut client = reader.client().await;
    let (mut next, mut all) = (0, BTreeSet::new());
    loop {
        let request = fetch("t", &[(0, next)], 500).with_isolation_level(1);
        let response = client.call(12, &request).await;
        let it = &response.responses[0].partitions[0];
        let aborted = it.aborted_transactions.iter().flatten();
        let aborted: Vec<_> = aborted.map(|one| (one.producer_id.0, one.first_offset)).collect();
        let mut rest = it.records.clone().unwrap();
        if rest.is_empty() {
            break;
        }
        all.extend(committed_records(&rest, &aborted));
        while let Some(header) = BatchHeader::parse(&rest) {
            next = header.base_offset + i64::from(header.last_offset_delta) + 1;
            rest = rest.slice(header.len_bytes..);
        }
    }
    assert_eq!(all, expected);
    reader.stop().await;
}
