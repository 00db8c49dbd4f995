//! Quotas: told, kept, and felt.

use std::time::{Duration, Instant};

use kafka_protocol::messages::*;

use super::harness::{Client, TestServer, fetch, produce, text};
use crate::batch::tests::plain;

/// Change the quotas of an entity; the error code.
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

type Told = Vec<(Vec<(String, Option<String>)>, Vec<(String, f64)>)>;

/// The quotas that match these filters: type, how to match, name.
async fn told(client: &mut Client, filters: &[(&str, i8, Option<&str>)], strict: bool) -> Told {
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

#[tokio::test(flavor = "multi_thread")]
async fn quotas_are_kept_and_found() {
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
        vec![("user".to_owned(), Some("u".to_owned())), ("client-id".to_owned(), None)],
        vec![(FETCH.to_owned(), 2.0), (PRODUCE.to_owned(), 1.0)],
    );
    let all = told(&mut client, &[], false).await;
    assert_eq!(all.len(), 2);
    assert!(all.contains(&of_user) && all.contains(&of_both));
    let exact = ("user", 0, Some("u"));
    assert_eq!(told(&mut client, &[exact], true).await, [of_user]);
    assert_eq!(told(&mut client, &[exact], false).await.len(), 2);
    let of_default_clients = told(&mut client, &[("client-id", 1, None)], false).await;
    assert_eq!(of_default_clients.iter().collect::<Vec<_>>(), [&of_both]);
    assert_eq!(told(&mut client, &[("client-id", 2, None)], true).await, []);
    assert_eq!(told(&mut client, &[("user", 1, None)], false).await, []);
    assert_eq!(told(&mut client, &[("ip", 2, None)], false).await, []);

    assert_eq!(alter(&mut client, &[user], &[(PRODUCE, 0.0, true)]).await, 0);
    assert_eq!(told(&mut client, &[], false).await, [of_both]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_quota_is_refused() {
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
        (vec![("ip", Some("1.2.3.4"))], good),
        (vec![user, ("ip", Some("1.2.3.4"))], good),
        (vec![user], [("nope", 1.0, false)]),
        (vec![user], [("request_percentage", 1.0, false)]),
        (vec![user], [(PRODUCE, 0.0, false)]),
        (vec![user], [(PRODUCE, -1.0, false)]),
        (vec![user], [(PRODUCE, f64::NAN, false)]),
        (vec![user], [(PRODUCE, f64::INFINITY, false)]),
        (vec![user], [(PRODUCE, 1.5, false)]),
    ] {
        assert_eq!(alter(&mut client, &entity, &ops).await, 42, "{entity:?} {ops:?}");
    }
    assert_eq!(told(&mut client, &[], false).await, []);
}

/// A client over its quota is told so, and its next request is not read before its time. Nobody else waits.
#[tokio::test(flavor = "multi_thread")]
async fn who_is_over_the_quota_is_not_heard_for_a_while() {
    let server = TestServer::start().await;
    server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let batch = plain(&[1; 1_000]);
    let response = client.call(9, &produce("t", 0, &batch, -1)).await;
    assert_eq!(response.throttle_time_ms, 0);
    // Ten seconds of the rate are free: each batch is one more.
    let rate = (batch.len() / 11) as f64;
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
        "it was heard after {:?} of {throttle:?}",
        begun.elapsed()
    );

    // On another connection the debt is waited for.
    let fetched = client.call(12, &fetch("t", &[(0, 1_000)], 0)).await;
    let throttle = Duration::from_millis(fetched.throttle_time_ms.try_into().unwrap());
    assert!(throttle > Duration::ZERO && throttle < Duration::from_secs(60), "{throttle:?}");
    let begun = Instant::now();
    let mut other = server.client().await;
    other.call(9, &metadata).await;
    other.call(12, &fetch("t", &[(0, 2_000)], 0)).await;
    let waited = begun.elapsed();
    assert!(waited > throttle / 2, "it was served after {waited:?} of {throttle:?}");
}
