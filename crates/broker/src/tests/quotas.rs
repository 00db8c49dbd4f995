//! Quotas: described, persisted, and enforced.

use std::time::{Duration, Instant};

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;

use super::harness::{Client, TestServer, fetch, produce, text};
use super::secured::sasl;
use super::topic_ids::{commit_by_id, fetch_by_id};
use crate::Mechanism;
use crate::batch::tests::plain;
use crate::quotas::{Bound, QuotaOwner};
use crate::wire::newer::Unchanged;

/// Changes the quotas of an entity; returns the error code.
async fn alter(
    client: &mut Client,
    entity: &[(&str, Option<&str>)],
    ops: &[(&str, f64, bool)],
) -> i16 {
    use alter_client_quotas_request::*;
    let entity = entity.iter().map(|(entity_type, name)| {
        EntityData::default().with_entity_type(text(entity_type)).with_entity_name(name.map(text))
    });
    let ops = ops.iter().map(|(key, value, remove)| {
        OpData::default().with_key(text(key)).with_value(*value).with_remove(*remove)
    });
    let entry = EntryData::default().with_entity(entity.collect()).with_ops(ops.collect());
    let request = AlterClientQuotasRequest::default().with_entries(vec![entry]);
    client.call(1, &request).await.entries[0].error_code
}

type Described = Vec<(Vec<(String, Option<String>)>, Vec<(String, f64)>)>;

/// The quotas that match these filters: type, how to match, name.
async fn described(
    client: &mut Client,
    filters: &[(&str, i8, Option<&str>)],
    strict: bool,
) -> Described {
    use describe_client_quotas_request::*;
    let component = |(entity_type, match_type, name): &(&str, i8, Option<&str>)| {
        ComponentData::default()
            .with_entity_type(text(entity_type))
            .with_match_type(*match_type)
            .with_match(name.map(text))
    };
    let request = DescribeClientQuotasRequest::default()
        .with_components(filters.iter().map(component).collect())
        .with_strict(strict);
    let response = client.call(1, &request).await;
    assert_eq!(response.error_code, 0, "{:?}", response.error_message);
    let entries = response.entries.unwrap().into_iter().map(|entry| {
        let entity = entry.entity.into_iter();
        let entity =
            entity.map(|e| (e.entity_type.to_string(), e.entity_name.map(|n| n.to_string())));
        let values = entry.values.into_iter().map(|v| (v.key.to_string(), v.value));
        (entity.collect(), values.collect())
    });
    entries.collect()
}

const PRODUCE: &str = "producer_byte_rate";
const FETCH: &str = "consumer_byte_rate";
const HANDLING: &str = "request_percentage";
const CHANGES: &str = "controller_mutation_rate";
const CONNECT: &str = "connection_creation_rate";

#[tokio::test(flavor = "multi_thread")]
async fn quotas_are_persisted_and_described() {
    let mut server = TestServer::start().await;
    let mut client = server.client().await;
    let user = ("user", Some("u"));
    let any_client = ("client-id", None);
    assert_eq!(alter(&mut client, &[user], &[(PRODUCE, 1024.0, false)]).await, 0);
    let both = [(PRODUCE, 1.0, false), (FETCH, 2.0, false)];
    assert_eq!(alter(&mut client, &[user, any_client], &both).await, 0);
    server.crash().await;
    let mut client = server.client().await;
    let of_user =
        (vec![("user".to_owned(), Some("u".to_owned()))], vec![(PRODUCE.to_owned(), 1024.0)]);
    let of_both = (
        vec![("client-id".to_owned(), None), ("user".to_owned(), Some("u".to_owned()))],
        vec![(FETCH.to_owned(), 2.0), (PRODUCE.to_owned(), 1.0)],
    );
    let all = described(&mut client, &[], false).await;
    assert_eq!(all.len(), 2);
    assert!(all.contains(&of_user) && all.contains(&of_both));
    let exact = ("user", 0, Some("u"));
    assert_eq!(described(&mut client, &[exact], true).await, [of_user]);
    assert_eq!(described(&mut client, &[exact], false).await.len(), 2);
    let of_default_clients = described(&mut client, &[("client-id", 1, None)], false).await;
    assert_eq!(of_default_clients.iter().collect::<Vec<_>>(), [&of_both]);
    assert_eq!(described(&mut client, &[("client-id", 2, None)], true).await, []);
    assert_eq!(described(&mut client, &[("user", 1, None)], false).await, []);
    assert_eq!(described(&mut client, &[("ip", 2, None)], false).await, []);

    assert_eq!(alter(&mut client, &[user], &[(PRODUCE, 0.0, true)]).await, 0);
    assert_eq!(described(&mut client, &[], false).await, [of_both]);

    let fractions = [(HANDLING, 12.5, false), (CHANGES, 0.5, false)];
    assert_eq!(alter(&mut client, &[user], &fractions).await, 0);
    let values = vec![(CHANGES.to_owned(), 0.5), (HANDLING.to_owned(), 12.5)];
    assert_eq!(described(&mut client, &[exact], true).await[0].1, values);

    let address = [("ip", Some("::ffff:10.0.0.1"))];
    assert_eq!(alter(&mut client, &address, &[(CONNECT, 5.0, false)]).await, 0);
    assert_eq!(alter(&mut client, &[("ip", None)], &[(CONNECT, 50.0, false)]).await, 0);
    server.crash().await;
    let mut client = server.client().await;
    let of_ip = |ip: Option<&str>, rate| {
        (vec![("ip".to_owned(), ip.map(str::to_owned))], vec![(CONNECT.to_owned(), rate)])
    };
    let named = described(&mut client, &[("ip", 0, Some("10.0.0.1"))], true).await;
    assert_eq!(named, [of_ip(Some("10.0.0.1"), 5.0)]);
    assert_eq!(described(&mut client, &[("ip", 1, None)], true).await, [of_ip(None, 50.0)]);
    assert_eq!(described(&mut client, &[("ip", 2, None)], true).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_quotas_are_refused() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let user = ("user", Some("u"));
    let good = [(PRODUCE, 1.0, false)];
    let long = "u".repeat(256);
    for (entity, ops) in [
        (vec![], good),
        (vec![("user", Some(""))], good),
        (vec![user, user], good),
        (vec![("user", Some(long.as_str()))], good),
        (vec![("other", Some("u"))], good),
        // Quotas that apply to addresses, and others.
        (vec![("ip", Some("1.2.3.4"))], good),
        (vec![("ip", Some("somewhere"))], [(CONNECT, 1.0, false)]),
        (vec![("ip", Some("1.2.3.4"))], [(CONNECT, 1.5, false)]),
        (vec![("ip", Some("1.2.3.4"))], [(CONNECT, 3e9, false)]),
        (vec![user, ("ip", Some("1.2.3.4"))], [(CONNECT, 1.0, false)]),
        (vec![user], [(CONNECT, 1.0, false)]),
        (vec![user], [("nope", 1.0, false)]),
        (vec![user], [(HANDLING, f64::INFINITY, false)]),
        (vec![user], [(PRODUCE, 0.0, false)]),
        (vec![user], [(PRODUCE, -1.0, false)]),
        (vec![user], [(PRODUCE, f64::NAN, false)]),
        (vec![user], [(PRODUCE, f64::INFINITY, false)]),
        (vec![user], [(PRODUCE, 1.5, false)]),
    ] {
        assert_eq!(
            alter(&mut client, &entity, &ops).await,
            ResponseError::InvalidRequest.code(),
            "{entity:?} {ops:?}"
        );
    }
    assert_eq!(described(&mut client, &[], false).await, []);
}

/// A client over its quota receives its throttle time, and its next request is not read earlier. No
/// other client waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_over_its_quota_is_throttled() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1; 1_000]);
    let response = client.call(9, &produce("t", 0, &batch, -1)).await;
    assert_eq!(response.throttle_time_ms, 0);
    // Ten seconds of the rate are free: each batch is one more.
    let rate = (batch.len() / 13) as f64;
    let quota = [(PRODUCE, rate, false), (FETCH, rate, false)];
    assert_eq!(alter(&mut client, &[("client-id", Some("a test"))], &quota).await, 0);
    let begun = Instant::now();
    let response = client.call(9, &produce("t", 0, &batch, -1)).await;
    let throttle = Duration::from_millis(response.throttle_time_ms.try_into().unwrap());
    assert!(throttle > Duration::ZERO && throttle < Duration::from_secs(60), "{throttle:?}");
    assert_eq!(response.responses[0].partition_responses[0].error_code, 0);
    let metadata = MetadataRequest::default().with_topics(Some(vec![]));
    client.call(9, &metadata).await;
    assert!(
        begun.elapsed() >= throttle,
        "it was served after {:?} of {throttle:?}",
        begun.elapsed()
    );

    // On another connection no records are returned before the debt is paid, and the response does
    // not delay its client.
    let fetched = client.call(12, &fetch("t", &[(0, 1_000)], 0)).await;
    let throttle = Duration::from_millis(fetched.throttle_time_ms.try_into().unwrap());
    assert!(throttle > Duration::ZERO && throttle < Duration::from_secs(60), "{throttle:?}");
    let begun = Instant::now();
    let mut other = server.client().await;
    other.call(9, &metadata).await;
    let refused = other.call(12, &fetch("t", &[(0, 2_000)], 0)).await;
    assert!(refused.throttle_time_ms > 0);
    assert_eq!((refused.error_code, refused.session_id, refused.responses.len()), (0, 0, 0));
    // It is not read before that.
    let served = other.call(12, &fetch("t", &[(0, 2_000)], 0)).await;
    let waited = begun.elapsed();
    assert_eq!(served.responses.len(), 1);
    assert!(waited > throttle / 2, "it was served after {waited:?} of {throttle:?}");
}

/// Otherwise many connections, each of which waits for a minute at most, would leave a debt that is
/// never paid.
#[tokio::test(flavor = "multi_thread")]
async fn a_debt_expires_after_a_minute() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let quota = [(PRODUCE, 1_000.0, false), (FETCH, 1_000.0, false)];
    assert_eq!(alter(&mut client, &[("client-id", Some("a test"))], &quota).await, 0);
    let (quotas, now) = (&server.server().quotas, Instant::now());
    let who = QuotaOwner::Client { user: "ANONYMOUS", client: "a test" };
    let minute = Duration::from_secs(60);
    for bound in [Bound::Produced, Bound::Fetched] {
        assert_eq!(quotas.charge(bound, who, 1e9, now), minute);
        assert_eq!(quotas.charge(bound, who, 0.0, now + minute / 2), minute / 2);
        assert_eq!(quotas.charge(bound, who, 0.0, now + minute), Duration::ZERO);
    }
}

/// Nor does it hold the memory that many partitions take.
#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_fetch_of_many_partitions_is_answered_at_once() {
    let server = TestServer::start().await;
    server.topic("t", 2_000, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1; 1_000]);
    assert_eq!(client.produce("t", 0, &batch).await, (0, 0));
    // A debt of ten seconds, and the next fetch.
    let quota = [(FETCH, (batch.len() / 20) as f64, false)];
    assert_eq!(alter(&mut client, &[("client-id", Some("a test"))], &quota).await, 0);
    let fetched = client.call(12, &fetch("t", &[(0, 0)], 0)).await;
    assert!(fetched.throttle_time_ms > 5_000, "{} ms", fetched.throttle_time_ms);

    let all: Vec<_> = (0..2_000).map(|partition| (partition, 0)).collect();
    let mut other = server.client().await;
    let begun = Instant::now();
    let refused = other.call(12, &fetch("t", &all, 0).with_session_epoch(0)).await;
    assert!(begun.elapsed() < Duration::from_secs(4), "after {:?}", begun.elapsed());
    assert!(refused.throttle_time_ms > 0);
    assert_eq!((refused.error_code, refused.session_id, refused.responses.len()), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_client_holds_no_request_memory() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1; 10_000]);
    assert!(batch.len() > 64 << 10, "{}", batch.len());
    let quota = [(PRODUCE, (batch.len() / 20) as f64, false)];
    assert_eq!(alter(&mut client, &[("client-id", Some("a test"))], &quota).await, 0);
    let all_bytes = server.server().request_memory.free_bytes();
    let response = client.call(9, &produce("t", 0, &batch, -1)).await;
    assert!(response.throttle_time_ms > 1_000, "{} ms", response.throttle_time_ms);
    assert_eq!(server.server().request_memory.free_bytes(), all_bytes);
}

/// Processor time of threads that handle requests, of any kind.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_over_its_processor_quota_is_throttled() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    // Ten seconds of the rate are free: 10 microseconds.
    let quota = [(HANDLING, 0.0001, false)];
    assert_eq!(alter(&mut client, &[("client-id", Some("a test"))], &quota).await, 0);
    let metadata = MetadataRequest::default().with_topics(Some(vec![]));
    let mut throttle = Duration::ZERO;
    for _ in 0..100 {
        let response = client.call(9, &metadata).await;
        throttle = Duration::from_millis(response.throttle_time_ms.try_into().unwrap());
        if !throttle.is_zero() {
            break;
        }
    }
    // As in Kafka never longer than a second.
    assert!(!throttle.is_zero() && throttle <= Duration::from_secs(1), "{throttle:?}");
    let begun = Instant::now();
    let groups = client.call(3, &ListGroupsRequest::default()).await;
    assert!(groups.throttle_time_ms > 0);
    assert!(begun.elapsed() >= throttle / 2, "heard after {:?} of {throttle:?}", begun.elapsed());
    let produced = client.call(9, &produce("none", 0, &plain(&[1; 10]), -1)).await;
    assert!(produced.throttle_time_ms > 0);
    let fetched = client.call(12, &fetch("none", &[(0, 0)], 0)).await;
    assert!(fetched.throttle_time_ms > 0);
    // APIs with their own handler or codec return it too.
    let committed = client.call(10, &commit_by_id("g", ("", -1), &[])).await;
    assert!(committed.body.throttle_time_ms > 0);
    let offsets = client.call(10, &fetch_by_id(&[("g", ("", -1), None)], false)).await;
    assert!(offsets.body.throttle_time_ms > 0);
    let listed = client.call(11, &Unchanged(ListOffsetsRequest::default())).await;
    assert!(listed.0.throttle_time_ms > 0);
    let described = client.call(5, &Unchanged(DescribeLogDirsRequest::default())).await;
    assert!(described.0.throttle_time_ms > 0);
}

/// Otherwise a client that can connect could create any number of names, or charge those of others.
#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_clients_are_not_charged() {
    let server = TestServer::with(16 << 20, |config| {
        config.listeners.push(sasl("sasl", &[Mechanism::Plain]));
    })
    .await;
    server.server().authentication.users.set_password("bob", "builder").await.unwrap();
    let mut inside = server.client().await;
    let quota = [(HANDLING, 0.0001, false)];
    assert_eq!(alter(&mut inside, &[("client-id", None)], &quota).await, 0);
    let ask = ApiVersionsRequest::default();
    for _ in 0..20 {
        let mut client = Client::connect(server.addr_of("sasl")).await;
        assert_eq!(client.call(2, &ask).await.throttle_time_ms, 0);
    }
    let mut client = Client::connect(server.addr_of("sasl")).await;
    assert_eq!(client.plain("bob", "builder").await.0, 0);
    let mut asked = 0;
    while client.call(2, &ask).await.throttle_time_ms == 0 {
        asked += 1;
        assert!(asked < 100, "nothing is charged");
    }
}

/// Created and deleted partitions: versions that have the error are refused, the others wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_over_its_mutation_quota_has_to_wait() {
    const THROTTLING_QUOTA_EXCEEDED: i16 = ResponseError::ThrottlingQuotaExceeded.code();
    const TOPIC_EXISTS: i16 = ResponseError::TopicAlreadyExists.code();
    let server = TestServer::start().await;
    server.topic("grows", 1, &[]).await;
    let mut client = server.client().await;
    // Ten seconds of it are less than one partition, which is a debt longer than a test.
    let quota = [(CHANGES, 0.001, false)];
    assert_eq!(alter(&mut client, &[("client-id", Some("a test"))], &quota).await, 0);
    let create = |name: &str| {
        let topic = create_topics_request::CreatableTopic::default()
            .with_name(text(name).into())
            .with_num_partitions(1)
            .with_replication_factor(1);
        CreateTopicsRequest::default().with_topics(vec![topic])
    };
    // A request that fails for another reason is not charged.
    let twice = client.call(7, &create("grows")).await;
    assert_eq!((twice.topics[0].error_code, twice.throttle_time_ms), (TOPIC_EXISTS, 0));
    let first = client.call(7, &create("first")).await;
    assert_eq!((first.topics[0].error_code, first.throttle_time_ms), (0, 0));

    // A refused client has to wait too, so each uses its own connection.
    let mut other = server.client().await;
    let second = other.call(7, &create("second")).await;
    assert_eq!(second.topics[0].error_code, THROTTLING_QUOTA_EXCEEDED);
    assert!(second.throttle_time_ms > 0);
    let mut other = server.client().await;
    let grown = create_partitions_request::CreatePartitionsTopic::default()
        .with_name(text("grows").into())
        .with_count(2)
        .with_assignments(None);
    let grow = CreatePartitionsRequest::default().with_topics(vec![grown]);
    let grown = other.call(3, &grow).await;
    assert_eq!(grown.results[0].error_code, THROTTLING_QUOTA_EXCEEDED);
    let mut other = server.client().await;
    let deletion = DeleteTopicsRequest::default().with_topic_names(vec![text("grows").into()]);
    let deleted = other.call(5, &deletion).await;
    assert_eq!(deleted.responses[0].error_code, THROTTLING_QUOTA_EXCEEDED);
    assert!(deleted.throttle_time_ms > 0);
    let mut other = server.client().await;
    let deleted = other.call(4, &deletion).await;
    assert_eq!(deleted.responses[0].error_code, 0);
    assert!(deleted.throttle_time_ms > 0);

    let names: Vec<_> =
        server.server().topics.all().iter().map(|topic| topic.name.to_string()).collect();
    assert_eq!(names, ["first"]);
}

/// Connections that an address opens too fast are closed.
#[tokio::test(flavor = "multi_thread")]
async fn connections_over_the_rate_of_an_address_are_closed() {
    let server = TestServer::start().await;
    let mut client = server.client().await;
    let quota = [(CONNECT, 1.0, false)];
    assert_eq!(alter(&mut client, &[("ip", Some("10.0.0.1"))], &quota).await, 0);
    // A quota of another address.
    for _ in 0..30 {
        server.assert_alive().await;
    }
    assert_eq!(alter(&mut client, &[("ip", Some("127.0.0.1"))], &quota).await, 0);
    let mut taken = 0;
    loop {
        assert!(taken < 10_000, "no connection was closed");
        let mut other = server.client().await;
        other.send(0, &ApiVersionsRequest::default()).await;
        if other.receive_frame().await.is_none() {
            break;
        }
        taken += 1;
    }
    // Ten seconds of the rate are free.
    assert!(taken >= 10, "{taken}");
    // An existing connection is not affected.
    client.call(9, &MetadataRequest::default().with_topics(Some(vec![]))).await;
}
