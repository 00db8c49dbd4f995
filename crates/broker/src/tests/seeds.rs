//! Seeds of the fuzz target `requests`: the examples of all APIs and versions, and rows of requests
//! that build on one another. `cargo xtask fuzz` requests them; the target's source documents the
//! bytes.

use std::collections::BTreeMap;
use std::path::Path;

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::*;
use kafka_protocol::protocol::Request;
use kafka_protocol::records::Compression;

use super::examples::{World, body, encode};
use super::harness::{fetch, produce, text};
use crate::api::APIS;
use crate::batch::tests::{encode as batch, plain, transactional};

const OPEN: u8 = 0;
const SECURED: u8 = 1;

/// The requests of one client.
struct Row(BytesMut);

impl Row {
    fn to(listener: u8) -> Self {
        Self(BytesMut::from(&[listener][..]))
    }

    fn raw(mut self, key: ApiKey, version: i16, body: &[u8]) -> Self {
        self.0.put_u8((key as i16).try_into().unwrap());
        self.0.put_u8(version.try_into().unwrap());
        self.0.put_u16(body.len().try_into().unwrap());
        self.0.put_slice(body);
        self
    }

    fn then<R: Request>(self, version: i16, request: &R) -> Self {
        let key = ApiKey::try_from(R::KEY).unwrap();
        self.raw(key, version, &encode(request, version))
    }

    fn handshake(self, version: i16, mechanism: &str) -> Self {
        self.then(version, &SaslHandshakeRequest::default().with_mechanism(text(mechanism)))
    }

    fn token(self, token: &'static [u8]) -> Self {
        let request = SaslAuthenticateRequest::default().with_auth_bytes(Bytes::from_static(token));
        self.then(2, &request)
    }

    fn logged_in() -> Self {
        Self::to(SECURED).handshake(1, "PLAIN").token(b"\0alice\0secret")
    }

    fn with_topic(self) -> Self {
        let wanted = metadata_request::MetadataRequestTopic::default()
            .with_name(Some(TopicName(text("topic"))));
        self.then(12, &MetadataRequest::default().with_topics(Some(vec![wanted])))
    }
}

fn topic(name: &str, configs: &[(&str, &str)]) -> CreateTopicsRequest {
    use create_topics_request::*;
    let config = |(name, value): &(&str, &str)| {
        CreatableTopicConfig::default().with_name(text(name)).with_value(Some(text(value)))
    };
    let topic = CreatableTopic::default()
        .with_name(TopicName(text(name)))
        .with_num_partitions(1)
        .with_replication_factor(1)
        .with_configs(configs.iter().map(config).collect());
    CreateTopicsRequest::default().with_topics(vec![topic])
}

fn in_transaction() -> Row {
    use add_partitions_to_txn_request::*;
    let id = || TransactionalId(text("t"));
    let partitions = AddPartitionsToTxnTopic::default()
        .with_name(TopicName(text("topic")))
        .with_partitions(vec![0]);
    let begin = InitProducerIdRequest::default()
        .with_transactional_id(Some(id()))
        .with_transaction_timeout_ms(60_000)
        .with_producer_id(ProducerId(-1))
        .with_producer_epoch(-1);
    let add = AddPartitionsToTxnRequest::default()
        .with_v3_and_below_transactional_id(id())
        .with_v3_and_below_topics(vec![partitions]);
    let mut write =
        produce("topic", 0, &transactional(&batch(Compression::None, (0, 0, 0), &[1, 2])), -1);
    write.transactional_id = Some(id());
    Row::to(OPEN).with_topic().then(4, &begin).then(3, &add).then(11, &write)
}

fn consumer(member_epoch: i32, pattern: Option<&str>) -> ConsumerGroupHeartbeatRequest {
    ConsumerGroupHeartbeatRequest::default()
        .with_group_id(GroupId(text("g")))
        .with_member_id(text("m"))
        .with_member_epoch(member_epoch)
        .with_rebalance_timeout_ms(60_000)
        .with_subscribed_topic_names(Some(vec![TopicName(text("topic"))]))
        .with_subscribed_topic_regex(pattern.map(text))
        .with_topic_partitions(Some(Vec::new()))
}

fn rows() -> BTreeMap<String, Row> {
    let mut rows = BTreeMap::new();
    let world = World::imaginary();
    for api in APIS {
        for version in api.min..=api.max {
            let row = Row::to(OPEN).raw(api.key, version, &body(api.key, version, &world));
            rows.insert(format!("{}-{version}", api.name), row);
        }
        let row = Row::logged_in().raw(api.key, api.max, &body(api.key, api.max, &world));
        rows.insert(format!("{}-logged-in", api.name), row);
    }
    for codec in [Compression::Gzip, Compression::Snappy, Compression::Lz4, Compression::Zstd] {
        let records = batch(codec, (-1, -1, -1), &[1, 3, 2]);
        let row = Row::to(OPEN).with_topic().then(9, &produce("topic", 0, &records, -1));
        let row = row.then(12, &fetch("topic", &[(0, 0)], 0));
        rows.insert(format!("batch-{codec:?}"), row);
    }
    let settings = [("cleanup.policy", "compact"), ("min.cleanable.dirty.ratio", "0")];
    let mut compacted = Row::to(OPEN).then(7, &topic("c", &settings));
    for n in 0..4 {
        compacted = compacted.then(9, &produce("c", 0, &plain(&[n, n + 1]), -1));
    }
    rows.insert("compacted".into(), compacted.then(12, &fetch("c", &[(0, 0)], 0)));
    let settings = [
        ("compression.type", "lz4"),
        ("message.timestamp.type", "LogAppendTime"),
        ("max.message.bytes", "1000"),
        ("retention.ms", "1"),
    ];
    let recompressed = Row::to(OPEN).then(7, &topic("r", &settings));
    rows.insert("settings".into(), recompressed.then(9, &produce("r", 0, &plain(&[1, 2]), -1)));
    for committed in [true, false] {
        let end = EndTxnRequest::default()
            .with_transactional_id(TransactionalId(text("t")))
            .with_committed(committed);
        let row = in_transaction().then(4, &end).then(12, &fetch("topic", &[(0, 0)], 0));
        rows.insert(format!("transaction-{committed}"), row);
    }
    for pattern in [None, Some("t.*(o|p)+[a-z]{1,9}")] {
        let row = Row::to(OPEN).with_topic().then(1, &consumer(0, pattern));
        let row = row.then(1, &consumer(1, pattern)).then(1, &consumer(-1, pattern));
        rows.insert(format!("consumer-{}", pattern.is_some()), row);
    }
    rows.insert(
        "scram".into(),
        Row::to(SECURED)
            .handshake(1, "SCRAM-SHA-256")
            .token(b"n,,n=alice,r=nonce")
            .token(b"c=biws,r=nonce0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="),
    );
    rows.insert(
        "bearer".into(),
        Row::to(SECURED).handshake(1, "OAUTHBEARER").token(
            b"n,,\x01auth=Bearer eyJhbGciOiJFZERTQSIsImtpZCI6ImsifQ.\
              eyJpc3MiOiJpc3N1ZXIifQ.AAAA\x01\x01",
        ),
    );
    rows.insert(
        "bare".into(),
        Row::to(SECURED).handshake(0, "SCRAM-SHA-512").raw(
            ApiKey::SaslAuthenticate,
            0,
            b"n,,n=alice,r=nonce",
        ),
    );
    rows
}

/// With `FUZZ_SEEDS` the rows are written to that directory.
#[test]
fn seeds_of_the_fuzz_target_fit_into_an_input() {
    let rows = rows();
    assert!(rows.len() > APIS.len());
    for (name, Row(bytes)) in &rows {
        // The limit of `cargo xtask fuzz`.
        assert!(bytes.len() <= 2_048, "{name}: {} bytes", bytes.len());
    }
    if let Some(dir) = std::env::var_os("FUZZ_SEEDS") {
        for (name, Row(bytes)) in &rows {
            std::fs::write(Path::new(&dir).join(name), bytes).unwrap();
        }
    }
}
