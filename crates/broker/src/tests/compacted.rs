//! Random test, by seed, of a compacted topic against a list of all that was written to it: records
//! with and without transactions, tombstones, uploads, passes of log compaction concurrent with
//! writes and reads, trims, crashes and power cuts. `cargo xtask model` covers more.
//!
//! Every step is acknowledged before the next one begins, so the list determines what a reader must
//! find:
//!
//! - every record found is in the list, under the same offset, in order;
//! - the last record of each key is found, unless it is a tombstone whose retention is over; then
//!   no other record of the key is found;
//! - a record that was removed never comes back;
//! - a reader of committed records sees those, and no others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use alluvium_device::sim::Random;
use bytes::Bytes;
use kafka_protocol::messages::*;
use kafka_protocol::records::Compression;
use tokio::task::JoinHandle;

use super::harness::{Client, HANG, TestServer, text};
use super::log_compaction::{READ_COMMITTED, READ_UNCOMMITTED, Record, offset_at, read_from};
use super::transactions::Producer;
use crate::batch::Outcome;
use crate::log_compaction::tests::encode;
use crate::log_compaction::{Memory, clean_end, compact_all};

const WAL_BYTES: u64 = 4 << 20;
const TOPIC: &str = "t";
const KEYS: u64 = 6;

struct Written {
    key: String,
    /// `None` for a tombstone, and for a marker.
    value: Option<String>,
    time_ms: i64,
    /// Index in the transactions.
    transaction: Option<usize>,
    is_marker: bool,
}

struct Run {
    random: Random,
    server: TestServer,
    client: Client,
    topic_id: uuid::Uuid,
    /// By offset.
    log: Vec<Written>,
    /// How each has ended; `None` for an open one.
    transactions: Vec<Option<Outcome>>,
    /// Each with its open transaction.
    producers: [(Producer, Option<usize>); 2],
    /// A producer without transactions: id, next sequence, and its last batch with its offset.
    plain: (i64, i32, Option<(Bytes, i64)>),
    start: u64,
    gone: BTreeSet<u64>,
    tombstones_go: bool,
    can_be_trimmed: bool,
    max_keys: usize,
    pass: Option<JoinHandle<()>>,
    passes: u64,
    dropped: u64,
}

impl Run {
    async fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut server = TestServer::simulated_with(WAL_BYTES, |config| {
            // Passes begin when the seed says so.
            config.log_compaction_check_interval = Duration::from_secs(3600);
        })
        .await;
        server.options.compaction_bytes = [0, 64 << 10][random.index(2)];
        server.options.block_cache_bytes = [0, 1 << 20][random.index(2)];
        server.restart().await;
        let (tombstones_go, can_be_trimmed) = (random.chance(0.5), random.chance(0.3));
        let ratio = ["0", "0.4"][random.index(2)];
        let configs = [
            ("cleanup.policy", if can_be_trimmed { "compact,delete" } else { "compact" }),
            ("retention.ms", "-1"),
            ("min.cleanable.dirty.ratio", ratio),
            ("delete.retention.ms", if tombstones_go { "0" } else { "3600000" }),
        ];
        let topic_id = server.topic(TOPIC, 1, &configs).await;
        let mut client = server.client().await;
        let request = InitProducerIdRequest::default().with_transactional_id(None);
        let id = client.call(4, &request).await.producer_id.0;
        assert!(id >= 0);
        Self {
            topic_id,
            log: Vec::new(),
            transactions: Vec::new(),
            producers: [
                (Producer::init(&server, "a", true).await, None),
                (Producer::init(&server, "b", true).await, None),
            ],
            plain: (id, 0, None),
            start: 0,
            gone: BTreeSet::new(),
            tombstones_go,
            can_be_trimmed,
            max_keys: [2, 5, 1000][random.index(3)],
            pass: None,
            passes: 0,
            dropped: 0,
            random,
            server,
            client,
        }
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.random.below(one_in) == 0
    }

    async fn lives(&mut self) {
        for _ in 0..1 + self.random.below(3) {
            for _ in 0..self.random.below(60) {
                self.step().await;
            }
            if self.chance(2) {
                self.begin_pass();
                tokio::time::sleep(Duration::from_micros(self.random.below(2_000))).await;
            }
            self.restart_server().await;
            self.check(0).await;
        }
        for producer in 0..2 {
            self.end(producer).await;
        }
        self.compact().await;
        self.check(0).await;
    }

    async fn step(&mut self) {
        match self.random.below(20) {
            0..7 => self.produce().await,
            7..10 => {
                let producer = self.random.index(2);
                self.produce_in_transaction(producer).await;
            }
            10..12 => {
                let producer = self.random.index(2);
                self.end(producer).await;
            }
            12..14 => self.server.store().flush().await.unwrap(),
            14..16 => self.begin_pass(),
            16 => self.compact().await,
            17 => {
                let from = self.random.below(self.log.len() as u64 + 1);
                self.check(from.max(self.start)).await;
            }
            18 => self.trim().await,
            _ => self.repeat().await,
        }
    }

    /// Generates records, and the batch for a producer.
    fn batch(&mut self, transaction: Option<usize>) -> (Vec<Written>, Compression) {
        let longest = [10, 500, 20_000][self.random.index(3)];
        let record = |random: &mut Random, index: u64| {
            let value = "v".repeat(1 + random.below(longest) as usize);
            Written {
                key: format!("k{}", random.below(KEYS)),
                value: (random.below(5) > 0).then(|| format!("{}{value}", random.next_u64())),
                time_ms: (random.below(1_000) + index).cast_signed(),
                transaction,
                is_marker: false,
            }
        };
        let records = (0..1 + self.random.below(4)).map(|index| record(&mut self.random, index));
        let records = records.collect();
        let codecs = [Compression::None, Compression::Lz4, Compression::Zstd, Compression::Gzip];
        (records, codecs[self.random.index(4)])
    }

    async fn produce(&mut self) {
        let (records, codec) = self.batch(None);
        let (id, sequence, _) = self.plain;
        let batch = encoded(&records, (id, 0, sequence), codec);
        let base = self.log.len() as i64;
        assert_eq!(self.client.produce(TOPIC, 0, &batch).await, (0, base));
        self.plain = (id, sequence + records.len() as i32, Some((batch, base)));
        self.log.extend(records);
    }

    /// Repeats the last batch as if its response was lost: it is recognised, even if its records
    /// are gone.
    async fn repeat(&mut self) {
        let Some((batch, base)) = &self.plain.2 else { return };
        assert_eq!(self.client.produce(TOPIC, 0, batch).await, (0, *base));
    }

    async fn produce_in_transaction(&mut self, producer: usize) {
        let open = self.producers[producer].1;
        let transaction = open.unwrap_or_else(|| {
            self.transactions.push(None);
            self.transactions.len() - 1
        });
        let (records, codec) = self.batch(Some(transaction));
        let base = self.log.len() as i64;
        let topic = (TOPIC, self.topic_id);
        let (producer, open) = &mut self.producers[producer];
        let appended = producer.produce_batch(topic, 0, |of| encoded(&records, of, codec)).await;
        assert_eq!(appended, (0, base));
        *open = Some(transaction);
        self.log.extend(records);
    }

    async fn end(&mut self, producer: usize) {
        let commit = self.chance(2);
        let (producer, open) = &mut self.producers[producer];
        let Some(transaction) = open.take() else { return };
        assert_eq!(producer.end(commit).await, 0);
        let outcome = if commit { Outcome::Commit } else { Outcome::Abort };
        self.transactions[transaction] = Some(outcome);
        let (key, value) = (String::new(), None);
        let marker = Written { key, value, time_ms: -1, transaction: None, is_marker: true };
        self.log.push(marker);
    }

    /// Begins a pass in the background.
    fn begin_pass(&mut self) {
        if self.pass.as_ref().is_some_and(|pass| !pass.is_finished()) {
            return;
        }
        let (server, mut memory) = (self.server.server().clone(), Memory::new(self.max_keys));
        self.pass = Some(tokio::spawn(async move { compact_all(&server, &mut memory).await }));
        self.passes += 1;
    }

    async fn end_pass(&mut self) {
        let Some(pass) = self.pass.take() else { return };
        tokio::time::timeout(HANG, pass).await.expect("a pass hangs").unwrap();
        assert_eq!(self.server.server().metrics.log_compaction_failures.get(), 0);
    }

    /// Compacts as much as possible: then each key has only its last record below the clean end.
    async fn compact(&mut self) {
        self.server.store().flush().await.unwrap();
        self.end_pass().await;
        let partition = self.server.server().topics.by_name(TOPIC).unwrap().partitions[0].clone();
        let mut clean = clean_end(self.server.store(), partition.stream.id());
        loop {
            self.begin_pass();
            self.end_pass().await;
            let now = clean_end(self.server.store(), partition.stream.id());
            if now == clean {
                break;
            }
            clean = now;
        }
        let there = read_from(&mut self.client, TOPIC, self.start as i64, READ_UNCOMMITTED).await;
        let there: BTreeSet<u64> = there.into_iter().map(|(offset, _, _)| offset).collect();
        for offset in self.start..clean {
            let record = &self.log[offset as usize];
            let is_last = !record.is_marker
                && self.is_decided(record)
                && !self.is_replaced(offset, offset + 1..clean);
            let is_there = there.contains(&offset);
            let may_be_gone = record.value.is_none() && self.tombstones_go;
            assert!(is_there == is_last || may_be_gone && !is_there, "{offset} of {clean}");
        }
    }

    /// Whether the record counts: it has no transaction, or a committed one.
    fn is_decided(&self, record: &Written) -> bool {
        record.transaction.is_none_or(|at| self.transactions[at] == Some(Outcome::Commit))
    }

    /// Whether one of these records with its key counts.
    fn is_replaced(&self, offset: u64, among: Range<u64>) -> bool {
        let record = &self.log[offset as usize];
        let mut others = self.log[among.start as usize..among.end as usize].iter();
        others.any(|other| !other.is_marker && other.key == record.key && self.is_decided(other))
    }

    /// No record at or above it is stable.
    fn stable_end(&self) -> u64 {
        let is_open =
            |record: &Written| record.transaction.is_some_and(|at| self.transactions[at].is_none());
        self.log.iter().position(is_open).unwrap_or(self.log.len()) as u64
    }

    /// Checks what readers find from an offset on.
    async fn check(&mut self, from: u64) {
        if self.tombstones_go {
            // A reader that is overtaken by two passes may miss a tombstone: that is the purpose of
            // its retention.
            self.end_pass().await;
        }
        let from = from.max(self.start);
        for isolation in [READ_UNCOMMITTED, READ_COMMITTED] {
            let found = read_from(&mut self.client, TOPIC, from as i64, isolation).await;
            let end = match isolation {
                READ_COMMITTED => self.stable_end(),
                _ => self.log.len() as u64,
            };
            self.check_found(&found, from, end, isolation == READ_COMMITTED);
            if isolation == READ_UNCOMMITTED {
                let there: BTreeSet<u64> = found.iter().map(|(offset, _, _)| *offset).collect();
                let gone = (from..end).filter(|offset| !there.contains(offset));
                let gone: Vec<u64> = gone.filter(|at| !self.log[*at as usize].is_marker).collect();
                self.gone.extend(gone);
                self.dropped = self.gone.len() as u64;
            }
        }
        self.search().await;
    }

    fn check_found(&self, found: &[Record], from: u64, end: u64, committed: bool) {
        assert!(found.is_sorted_by(|one, next| one.0 < next.0), "out of order");
        let mut by_offset = BTreeMap::new();
        for (offset, key, value) in found {
            let record = &self.log[*offset as usize];
            assert!((from..end).contains(offset), "{offset} of {from}..{end}");
            assert!(!self.gone.contains(offset), "{offset} has come back");
            assert_eq!((key, value), (&record.key, &record.value), "{offset}");
            assert!(!committed || self.is_decided(record), "{offset} is not committed");
            by_offset.insert(*offset, key);
        }
        let stable_end = self.stable_end();
        for offset in (from..end).filter(|offset| !by_offset.contains_key(offset)) {
            let record = &self.log[offset as usize];
            if record.is_marker || (committed && !self.is_decided(record)) {
                continue;
            }
            assert!(
                offset < stable_end,
                "{offset} is missing, stable are those before {stable_end}"
            );
            if !self.is_decided(record) || self.is_replaced(offset, offset + 1..stable_end) {
                continue;
            }
            let name = format!("{offset}, the last of {}", record.key);
            assert!(record.value.is_none() && self.tombstones_go, "{name} is missing");
            let older = by_offset.iter().find(|(at, key)| **at < offset && ***key == record.key);
            assert_eq!(older, None, "{name} is a tombstone and was removed before an older record");
        }
    }

    /// Searches for the first record of a time or later: it is found, unless an earlier match was
    /// removed.
    async fn search(&mut self) {
        let time_ms = self.random.below(1_100).cast_signed();
        let (offset, found_ms) = offset_at(&mut self.client, TOPIC, time_ms).await;
        if offset >= 0 {
            let record = &self.log[offset as usize];
            let is_gone = self.gone.contains(&(offset as u64)) && offset as u64 > self.start;
            assert!(offset as u64 >= self.start && !is_gone, "{offset}");
            // Markers have a time, too: now.
            let is_so = record.is_marker || record.time_ms == found_ms;
            assert!(is_so, "{offset} at {found_ms}");
            assert!(found_ms >= time_ms);
        }
        let end = if offset < 0 { self.log.len() as u64 } else { offset as u64 };
        let stable_end = self.stable_end();
        for before in self.start..end {
            let record = &self.log[before as usize];
            let stays = before >= stable_end
                || self.is_decided(record) && !self.is_replaced(before, before + 1..stable_end);
            let stays =
                stays && !record.is_marker && (record.value.is_some() || !self.tombstones_go);
            assert!(!stays || record.time_ms < time_ms, "{before} is before {offset} at {time_ms}");
        }
    }

    async fn trim(&mut self) {
        if !self.can_be_trimmed || self.chance(2) {
            return;
        }
        let to = self.random.below(self.log.len() as u64 + 1);
        use delete_records_request::*;
        let partition = DeleteRecordsPartition::default().with_offset(to as i64);
        let topic = DeleteRecordsTopic::default()
            .with_name(TopicName(text(TOPIC)))
            .with_partitions(vec![partition]);
        let request = DeleteRecordsRequest::default().with_topics(vec![topic]);
        let response = self.client.call(2, &request).await;
        assert_eq!(response.topics[0].partitions[0].error_code, 0);
        self.start = self.start.max(to);
        assert_eq!(response.topics[0].partitions[0].low_watermark, self.start as i64);
    }

    async fn restart_server(&mut self) {
        match self.random.below(3) {
            0 => {
                self.pass = None;
                self.server.restart().await;
            }
            how => self.server.kill(how == 1).await,
        }
        // It belonged to the stopped server.
        self.pass = None;
        self.client = self.server.client().await;
        for (producer, _) in &mut self.producers {
            producer.reconnect(&self.server).await;
        }
        self.repeat().await;
    }
}

fn encoded(records: &[Written], producer: (i64, i16, i32), codec: Compression) -> Bytes {
    let own = |text: &String| text.as_bytes().to_vec();
    let record =
        |record: &Written| (Some(own(&record.key)), record.value.as_ref().map(own), record.time_ms);
    encode(&records.iter().map(record).collect::<Vec<_>>(), producer, codec)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

#[test]
fn a_compacted_topic_is_a_map() {
    let (start, seeds) = (number("ALLUVIUM_MODEL_START", 0), number("ALLUVIUM_MODEL_SEEDS", 25));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut passes, mut dropped) = (0, 0);
    for seed in start..start + seeds {
        let reported = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime.block_on(async {
                let mut run = Run::new(seed).await;
                run.lives().await;
                (run.passes, run.dropped)
            })
        }));
        match reported {
            Ok((some, gone)) => (passes, dropped) = (passes + some, dropped + gone),
            Err(panic) => {
                eprintln!("seed {seed}: ALLUVIUM_MODEL_START={seed} ALLUVIUM_MODEL_SEEDS=1");
                std::panic::resume_unwind(panic);
            }
        }
        let done = seed + 1 - start;
        if done.is_multiple_of(100) {
            println!("{done} of {seeds} seeds: {passes} passes, {dropped} records dropped");
        }
    }
    assert!(passes > seeds && (seeds < 20 || dropped > 5 * seeds), "{passes} {dropped}");
}
