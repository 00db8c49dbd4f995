//! Load for a server, recorded in the model as soon as it is acknowledged.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::messages::add_partitions_to_txn_request::AddPartitionsToTxnTopic;
use kafka_protocol::messages::consumer_group_heartbeat_request::ConsumerGroupHeartbeatRequest;
use kafka_protocol::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig};
use kafka_protocol::messages::offset_commit_request::{
    OffsetCommitRequestPartition, OffsetCommitRequestTopic,
};
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::txn_offset_commit_request::{
    TxnOffsetCommitRequestPartition, TxnOffsetCommitRequestTopic,
};
use kafka_protocol::messages::{
    AddOffsetsToTxnRequest, AddPartitionsToTxnRequest, AddPartitionsToTxnResponse,
    CreateTopicsRequest, DeleteTopicsRequest, EndTxnRequest, GroupId, InitProducerIdRequest,
    OffsetCommitRequest, ProduceRequest, ProduceResponse, ProducerId, TransactionalId,
    TxnOffsetCommitRequest, TxnOffsetCommitResponse,
};
use kafka_protocol::protocol::{Request, StrBytes};

use super::batch::{Producer, encode_batch};
use super::model::{
    Commit, Idempotent, Log, Model, Outcome, Partition, Record, Session, Transaction,
};
use crate::Error;
use crate::client::{Client, topic_name};

const SERVER_TIMEOUT_MS: i32 = 30_000;
const LOADING: i16 = 14;
const CONCURRENT_TRANSACTIONS: i16 = 51;
/// Number of attempts; a transaction ends within milliseconds.
const TRIES: u32 = 200;
const PAUSE: Duration = Duration::from_millis(20);
/// Longer than any campaign, so that an open transaction stays open.
const TRANSACTION_TIMEOUT_MS: i32 = 23 * 60 * 60 * 1000;
/// Added to offsets that are committed in transactions to be aborted. It is beyond all other
/// committed offsets, so that no other commit has the same one.
pub(super) const ABORTED_OFFSETS: i64 = 1_000_000;

/// A refusal by error code.
#[derive(Debug)]
pub(super) struct RequestRefused {
    pub(super) what: &'static str,
    pub(super) code: i16,
}

impl std::fmt::Display for RequestRefused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is refused with error code {}", self.what, self.code)
    }
}

impl std::error::Error for RequestRefused {}

fn accepted(what: &'static str, code: i16) -> Result<(), Error> {
    if code == 0 { Ok(()) } else { Err(RequestRefused { what, code }.into()) }
}

fn string(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

/// A client that changes the server and the model together.
pub(super) struct Worker<'a> {
    pub(super) client: Client,
    pub(super) model: &'a mut Model,
    /// The producer of the last request.
    pub(super) last_producer: Option<ProducerRef>,
}

/// A producer of the model.
#[derive(Clone)]
pub(super) enum ProducerRef {
    Session(usize),
    Idempotent(usize, Partition),
}

impl<'a> Worker<'a> {
    pub(super) fn new(address: SocketAddr, model: &'a mut Model) -> Result<Self, Error> {
        Ok(Self { client: Client::connect(address)?, model, last_producer: None })
    }

    /// Repeats a request while the server is still loading or ending an earlier transaction.
    fn call<R: Request>(
        &mut self,
        version: i16,
        request: &R,
        code: impl Fn(&R::Response) -> i16,
    ) -> Result<R::Response, Error> {
        let mut tries = 0;
        loop {
            let answer = self.client.call(version, request)?;
            tries += 1;
            if !matches!(code(&answer), LOADING | CONCURRENT_TRANSACTIONS) || tries == TRIES {
                return Ok(answer);
            }
            thread::sleep(PAUSE);
        }
    }

    pub(super) fn create_topic(
        &mut self,
        name: &str,
        partitions: i32,
        configs: &[(&str, &str)],
    ) -> Result<(), Error> {
        self.request_topic(name, partitions, configs)?;
        let logs = (0..partitions).map(|_| Log::default()).collect();
        self.model.topics.insert(name.to_owned(), logs);
        Ok(())
    }

    pub(super) fn request_topic(
        &mut self,
        name: &str,
        partitions: i32,
        configs: &[(&str, &str)],
    ) -> Result<(), Error> {
        let configs = configs.iter().map(|(name, value)| {
            CreatableTopicConfig::default().with_name(string(name)).with_value(Some(string(value)))
        });
        let topic = CreatableTopic::default()
            .with_name(topic_name(name))
            .with_num_partitions(partitions)
            .with_replication_factor(1)
            .with_configs(configs.collect());
        let request = CreateTopicsRequest::default()
            .with_topics(vec![topic])
            .with_timeout_ms(SERVER_TIMEOUT_MS);
        let answer = self.client.call(5, &request)?;
        for topic in answer.topics {
            accepted("CreateTopics", topic.error_code)?;
        }
        Ok(())
    }

    /// Creates a topic without records, and deletes the oldest one if there are several.
    pub(super) fn change_topics(&mut self) -> Result<(), Error> {
        self.last_producer = None;
        let name = format!("empty-{:04}", self.model.empty_topics.len());
        let created = self.request_topic(&name, 1, &[]);
        self.note_topic(name, created, true)?;
        let existing = self.model.empty_topics.iter().filter(|(_, exists)| **exists);
        let existing: Vec<String> = existing.map(|(name, _)| name.clone()).collect();
        if let [oldest, _, ..] = &existing[..] {
            let request = DeleteTopicsRequest::default()
                .with_topic_names(vec![topic_name(oldest)])
                .with_timeout_ms(SERVER_TIMEOUT_MS);
            let answer = self.client.call(5, &request);
            let deleted = answer.and_then(|answer| {
                let code = answer.responses.first().map_or(0, |topic| topic.error_code);
                accepted("DeleteTopics", code)
            });
            self.note_topic(oldest.clone(), deleted, false)?;
        }
        Ok(())
    }

    /// Records whether a topic without records exists. Without an answer, that is unknown.
    fn note_topic(
        &mut self,
        name: String,
        changed: Result<(), Error>,
        exists: bool,
    ) -> Result<(), Error> {
        match &changed {
            Ok(()) => drop(self.model.empty_topics.insert(name, exists)),
            Err(error) if error.is::<RequestRefused>() => {}
            Err(_) => drop(self.model.empty_topics.remove(&name)),
        }
        changed
    }

    /// Creates records that the model does not contain yet.
    pub(super) fn records(&mut self, count: usize, bytes: usize, key: Option<&str>) -> Vec<Record> {
        let record = |id| Record {
            id,
            bytes,
            key: key.map(str::to_owned),
            // Any time that grows with the records and is recent enough for retention to keep them.
            timestamp_ms: now_ms() + id as i64,
            txn: None,
        };
        let first = self.model.next_id;
        self.model.next_id += count as u64;
        (first..self.model.next_id).map(record).collect()
    }

    /// Produces without a producer ID. Returns the first offset that the server has assigned.
    pub(super) fn produce(
        &mut self,
        partition: &Partition,
        records: Vec<Record>,
    ) -> Result<i64, Error> {
        self.last_producer = None;
        let batch = encode_batch(&records, Producer::NONE)?;
        let sent = self.send_batch(7, partition, None, batch);
        let base = self.note_unanswered(sent, &records)?;
        self.model.acknowledged(partition, base, records);
        Ok(base)
    }

    /// Records that a request without an answer may or may not have appended its records.
    fn note_unanswered(
        &mut self,
        sent: Result<i64, Error>,
        records: &[Record],
    ) -> Result<i64, Error> {
        if sent.as_ref().is_err_and(|error| !error.is::<RequestRefused>()) {
            self.model.unanswered.extend_from_slice(records);
        }
        sent
    }

    fn send_batch(
        &mut self,
        version: i16,
        partition: &Partition,
        transactional_id: Option<&str>,
        batch: Bytes,
    ) -> Result<i64, Error> {
        let data =
            PartitionProduceData::default().with_index(partition.index).with_records(Some(batch));
        let topic = TopicProduceData::default()
            .with_name(topic_name(&partition.topic))
            .with_partition_data(vec![data]);
        let request = ProduceRequest::default()
            .with_transactional_id(transactional_id.map(|id| TransactionalId(string(id))))
            .with_acks(-1)
            .with_timeout_ms(SERVER_TIMEOUT_MS)
            .with_topic_data(vec![topic]);
        let code = |answer: &ProduceResponse| {
            let topic = answer.responses.first();
            topic.and_then(|topic| topic.partition_responses.first()).map_or(0, |it| it.error_code)
        };
        let answer = self.call(version, &request, code)?;
        let result = answer.responses.first().and_then(|topic| topic.partition_responses.first());
        let result = result.ok_or("an answer to Produce without a partition")?;
        accepted("Produce", result.error_code)?;
        Ok(result.base_offset)
    }

    /// Gets an ID for a producer that is idempotent and not transactional.
    pub(super) fn identify(&mut self) -> Result<(), Error> {
        let request = InitProducerIdRequest::default()
            .with_transactional_id(None)
            .with_producer_id(ProducerId(-1))
            .with_producer_epoch(-1);
        let answer = self.call(4, &request, |answer| answer.error_code)?;
        accepted("InitProducerId", answer.error_code)?;
        self.model.idempotent.push(Idempotent {
            producer_id: answer.producer_id.0,
            epoch: answer.producer_epoch,
            sequences: Default::default(),
            offsets: Default::default(),
            refusals: Default::default(),
        });
        Ok(())
    }

    /// Produces with the next sequence number of an idempotent producer. A refusal is counted in
    /// the model: the producer continues with the same number.
    pub(super) fn produce_next(
        &mut self,
        producer: usize,
        partition: &Partition,
        records: Vec<Record>,
    ) -> Result<(), Error> {
        self.last_producer = Some(ProducerRef::Idempotent(producer, partition.clone()));
        let of = &self.model.idempotent[producer];
        let name = partition.to_string();
        let sequence = *of.sequences.get(&name).unwrap_or(&0);
        let (id, epoch) = (of.producer_id, of.epoch);
        let batch = encode_batch(&records, Producer { id, epoch, sequence, transactional: false })?;
        let sent = self.send_batch(7, partition, None, batch);
        let sent = self.note_unanswered(sent, &records);
        let of = &mut self.model.idempotent[producer];
        let base = match sent {
            Ok(base) => base,
            Err(error) => {
                if error.is::<RequestRefused>() {
                    *of.refusals.entry(name).or_default() += 1;
                }
                return Err(error);
            }
        };
        of.sequences.insert(name.clone(), sequence + records.len() as i32);
        of.offsets.entry(name).or_default().extend(base..base + records.len() as i64);
        self.model.acknowledged(partition, base, records);
        Ok(())
    }

    /// Gets a producer ID and an epoch. An open transaction with the same transactional ID is
    /// aborted by it.
    pub(super) fn initialise(&mut self, name: &str, second_version: bool) -> Result<usize, Error> {
        let request = InitProducerIdRequest::default()
            .with_transactional_id(Some(TransactionalId(string(name))))
            .with_transaction_timeout_ms(TRANSACTION_TIMEOUT_MS)
            .with_producer_id(ProducerId(-1))
            .with_producer_epoch(-1);
        let answer = self.call(4, &request, |answer| answer.error_code)?;
        accepted("InitProducerId", answer.error_code)?;
        let session = Session {
            transactional_id: name.to_owned(),
            second_version,
            producer_id: answer.producer_id.0,
            epoch: answer.producer_epoch,
            sequences: Default::default(),
            open: None,
        };
        let sessions = &mut self.model.sessions;
        let known = sessions.iter().position(|each| each.transactional_id == name);
        let Some(index) = known else {
            sessions.push(session);
            return Ok(sessions.len() - 1);
        };
        if let Some(open) = sessions[index].open {
            self.model.end(open, Outcome::Aborted);
        }
        self.model.sessions[index] = session;
        Ok(index)
    }

    /// Writes records in the session's transaction; begins one if none is open.
    pub(super) fn write(
        &mut self,
        session: usize,
        partition: &Partition,
        mut records: Vec<Record>,
    ) -> Result<i64, Error> {
        self.last_producer = Some(ProducerRef::Session(session));
        let of = self.model.sessions[session].clone();
        if !of.second_version {
            let topic = AddPartitionsToTxnTopic::default()
                .with_name(topic_name(&partition.topic))
                .with_partitions(vec![partition.index]);
            let request = AddPartitionsToTxnRequest::default()
                .with_v3_and_below_transactional_id(TransactionalId(string(&of.transactional_id)))
                .with_v3_and_below_producer_id(ProducerId(of.producer_id))
                .with_v3_and_below_producer_epoch(of.epoch)
                .with_v3_and_below_topics(vec![topic]);
            let code = |answer: &AddPartitionsToTxnResponse| {
                let topic = answer.results_by_topic_v3_and_below.first();
                let result = topic.and_then(|topic| topic.results_by_partition.first());
                result.map_or(0, |result| result.partition_error_code)
            };
            let answer = self.call(3, &request, code)?;
            for topic in answer.results_by_topic_v3_and_below {
                for result in topic.results_by_partition {
                    accepted("AddPartitionsToTxn", result.partition_error_code)?;
                }
            }
        }
        let sequence = *of.sequences.get(&partition.to_string()).unwrap_or(&0);
        let producer =
            Producer { id: of.producer_id, epoch: of.epoch, sequence, transactional: true };
        let batch = encode_batch(&records, producer)?;
        let version = if of.second_version { 12 } else { 7 };
        let base = self.send_batch(version, partition, Some(&of.transactional_id), batch)?;
        let txn = self.open_transaction(session);
        records.iter_mut().for_each(|record| record.txn = Some(txn));
        let next = sequence + records.len() as i32;
        self.model.sessions[session].sequences.insert(partition.to_string(), next);
        self.model.acknowledged(partition, base, records);
        Ok(base)
    }

    fn open_transaction(&mut self, session: usize) -> usize {
        let transactions = &mut self.model.transactions;
        let session = &mut self.model.sessions[session];
        let producer_id = session.producer_id;
        *session.open.get_or_insert_with(|| {
            transactions.push(Transaction { producer_id, outcome: Outcome::Open });
            transactions.len() - 1
        })
    }

    /// Stages a group's offset in the session's transaction, which stays open.
    pub(super) fn stage_offset(
        &mut self,
        session: usize,
        group: &str,
        partition: &Partition,
        offset: i64,
    ) -> Result<(), Error> {
        self.last_producer = Some(ProducerRef::Session(session));
        let of = self.model.sessions[session].clone();
        if !of.second_version {
            let request = AddOffsetsToTxnRequest::default()
                .with_transactional_id(TransactionalId(string(&of.transactional_id)))
                .with_producer_id(ProducerId(of.producer_id))
                .with_producer_epoch(of.epoch)
                .with_group_id(GroupId(string(group)));
            let answer = self.call(3, &request, |answer| answer.error_code)?;
            accepted("AddOffsetsToTxn", answer.error_code)?;
        }
        let committed = TxnOffsetCommitRequestPartition::default()
            .with_partition_index(partition.index)
            .with_committed_offset(offset)
            .with_committed_metadata(Some(StrBytes::default()));
        let topic = TxnOffsetCommitRequestTopic::default()
            .with_name(topic_name(&partition.topic))
            .with_partitions(vec![committed]);
        let request = TxnOffsetCommitRequest::default()
            .with_transactional_id(TransactionalId(string(&of.transactional_id)))
            .with_group_id(GroupId(string(group)))
            .with_producer_id(ProducerId(of.producer_id))
            .with_producer_epoch(of.epoch)
            .with_generation_id(-1)
            .with_topics(vec![topic]);
        let version = if of.second_version { 5 } else { 3 };
        let code = |answer: &TxnOffsetCommitResponse| {
            let topic = answer.topics.first();
            topic.and_then(|topic| topic.partitions.first()).map_or(0, |result| result.error_code)
        };
        for topic in self.call(version, &request, code)?.topics {
            for result in topic.partitions {
                accepted("TxnOffsetCommit", result.error_code)?;
            }
        }
        let txn = Some(self.open_transaction(session));
        self.model.commit(group, partition, Commit { offset, txn });
        Ok(())
    }

    /// Ends the session's transaction.
    pub(super) fn end(&mut self, session: usize, outcome: Outcome) -> Result<(), Error> {
        self.last_producer = Some(ProducerRef::Session(session));
        let of = self.model.sessions[session].clone();
        let Some(txn) = of.open else { return Ok(()) };
        let request = EndTxnRequest::default()
            .with_transactional_id(TransactionalId(string(&of.transactional_id)))
            .with_producer_id(ProducerId(of.producer_id))
            .with_producer_epoch(of.epoch)
            .with_committed(outcome == Outcome::Committed);
        let version = if of.second_version { 5 } else { 3 };
        let answer = self.call(version, &request, |answer| answer.error_code)?;
        accepted("EndTxn", answer.error_code)?;
        self.model.end(txn, outcome);
        let session = &mut self.model.sessions[session];
        session.open = None;
        if of.second_version {
            session.producer_id = answer.producer_id.0;
            session.epoch = answer.producer_epoch;
            session.sequences.clear();
        }
        Ok(())
    }

    /// Commits an offset of a group without members.
    pub(super) fn commit_offset(
        &mut self,
        group: &str,
        partition: &Partition,
        offset: i64,
    ) -> Result<(), Error> {
        let committed = OffsetCommitRequestPartition::default()
            .with_partition_index(partition.index)
            .with_committed_offset(offset)
            .with_committed_metadata(Some(StrBytes::default()));
        let topic = OffsetCommitRequestTopic::default()
            .with_name(topic_name(&partition.topic))
            .with_partitions(vec![committed]);
        let request = OffsetCommitRequest::default()
            .with_group_id(GroupId(string(group)))
            .with_generation_id_or_member_epoch(-1)
            .with_topics(vec![topic]);
        for topic in self.client.call(8, &request)?.topics {
            for result in topic.partitions {
                accepted("OffsetCommit", result.error_code)?;
            }
        }
        self.model.commit(group, partition, Commit { offset, txn: None });
        Ok(())
    }

    /// Joins a consumer group, so that the server has a member in its state. The member is not
    /// compared afterwards.
    pub(super) fn join(&mut self, group: &str, topic: &str) -> Result<(), Error> {
        let request = ConsumerGroupHeartbeatRequest::default()
            .with_group_id(GroupId(string(group)))
            .with_member_id(string(&format!("member-of-{group}")))
            .with_rebalance_timeout_ms(60_000)
            .with_subscribed_topic_names(Some(vec![topic_name(topic)]))
            .with_topic_partitions(Some(Vec::new()));
        accepted("ConsumerGroupHeartbeat", self.client.call(1, &request)?.error_code)
    }
}

fn now_ms() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_millis() as i64)
}
