//! Writes a topic of a running server at given offsets: a topic with the setting `alluvium.import`.
//! `docs/decisions/0028-import-at-given-offsets.md`.

use std::collections::{BTreeMap, VecDeque};

use alluvium_broker::{IMPORT_SETTING, is_internal_topic};
use bytes::Bytes;
use kafka_protocol::ResponseError;
use kafka_protocol::messages::delete_records_request::{
    DeleteRecordsPartition, DeleteRecordsTopic,
};
use kafka_protocol::messages::incremental_alter_configs_request::{
    AlterConfigsResource, AlterableConfig,
};
use kafka_protocol::messages::{
    DeleteRecordsRequest, IncrementalAlterConfigsRequest, ProduceRequest,
};
use kafka_protocol::protocol::StrBytes;

use crate::address::HostPort;
use crate::kafka::{
    Access, Client, Receiving, SERVER_TIMEOUT_MS, Sending, produce, refusal, topic_name,
};
use crate::output::Failure;
use crate::topic::{self, LATEST, TOPIC_RESOURCE};

/// Batches that are sent before the oldest one is acknowledged.
const IN_FLIGHT: usize = 32;
/// Kafka's operation that deletes a setting.
const DELETE: i8 = 1;

/// A topic that is being imported.
pub(crate) struct Import {
    name: String,
    admin: Client,
    sending: Sending,
    receiving: Receiving,
    version: i16,
    /// The correlation ids of batches that are not acknowledged.
    in_flight: VecDeque<i32>,
    /// Where each partition continues.
    next: Vec<u64>,
}

impl Import {
    /// Creates a topic with these settings, or continues its import from `source`. Returns whether
    /// it was created.
    ///
    /// # Errors
    /// There is a topic of this name that is not being imported from there, or that has another
    /// number of partitions; the server cannot be reached, or refuses.
    pub(crate) fn begin(
        server: &HostPort,
        access: &Access,
        name: &str,
        source: &str,
        partitions: usize,
        mut configs: BTreeMap<String, String>,
    ) -> Result<(Self, bool), Failure> {
        if is_internal_topic(name) {
            return Err(Failure::Usage(format!(
                "topic {name} is internal: the server keeps its content elsewhere, and takes no \
                 records for it"
            )));
        }
        let mut admin = Client::connect(server, access).map_err(Failure::new)?;
        configs.insert(IMPORT_SETTING.into(), source.into());
        let count = i32::try_from(partitions).map_err(Failure::new)?;
        let configs = configs.into_iter().collect();
        let created = topic::create_topic(&mut admin, name, Some(count), configs)?;
        let is_new = created.error_code != ResponseError::TopicAlreadyExists.code();
        let refused = refusal(created.error_code, created.error_message.as_ref());
        if let Some(reason) = refused.filter(|_| is_new) {
            return Err(Failure::Failed(format!("topic {name}: {reason}")));
        }
        if !is_new {
            let settings = topic::configs(&mut admin, name)?;
            let of = settings.get(IMPORT_SETTING).and_then(Option::as_deref).unwrap_or_default();
            if of != source {
                let import = match of {
                    "" => String::new(),
                    other => format!(", and is being imported from {other}"),
                };
                return Err(Failure::Failed(format!(
                    "topic {name} exists already at {server}{import}: choose another name with \
                     --as, or delete it first"
                )));
            }
        }
        let names = [name.to_owned()];
        let metadata = topic::metadata(&mut admin, Some(&names))?;
        let found = metadata.topics.first().ok_or_else(|| {
            Failure::Failed(format!("topic {name}: missing in the server's answer"))
        })?;
        if found.partitions.len() != partitions {
            return Err(Failure::Failed(format!(
                "topic {name} at {server} has {} partitions instead of {partitions}: it was begun \
                 with other data. Delete it first",
                found.partitions.len()
            )));
        }
        let ends = topic::offsets(&mut admin, found, LATEST)?;
        let next = (0..count).map(|index| {
            let end = ends.get(&index).and_then(|end| u64::try_from(*end).ok());
            let missing = || format!("topic {name}, partition {index}: no offset in the answer");
            end.ok_or_else(|| Failure::Failed(missing()))
        });
        let next = next.collect::<Result<_, _>>()?;
        let producer = Client::connect(server, access).map_err(Failure::new)?;
        let version = producer.version::<ProduceRequest>(produce::NEWEST).map_err(Failure::new)?;
        let (sending, receiving) = producer.into_halves();
        let in_flight = VecDeque::new();
        let name = name.to_owned();
        Ok((Self { name, admin, sending, receiving, version, in_flight, next }, is_new))
    }

    /// Returns the offset at which a partition continues.
    pub(crate) fn next(&self, partition: usize) -> u64 {
        self.next[partition]
    }

    /// Sends the next batch of a partition.
    ///
    /// # Errors
    /// The server refuses this batch or an earlier one, or the connection failed.
    pub(crate) fn append(&mut self, partition: usize, batch: Bytes) -> Result<(), String> {
        if self.in_flight.len() >= IN_FLIGHT {
            self.receive()?;
        }
        let request = produce::request(&self.name, index_of(partition), batch);
        let correlation =
            self.sending.send(self.version, &request).map_err(|error| error.to_string())?;
        self.in_flight.push_back(correlation);
        Ok(())
    }

    /// Waits for the oldest batch that is not acknowledged.
    fn receive(&mut self) -> Result<(), String> {
        let Some(correlation) = self.in_flight.pop_front() else { return Ok(()) };
        let answer = self.receiving.answer::<ProduceRequest>(self.version, correlation);
        produce::check(&answer.map_err(|error| error.to_string())?)
    }

    /// Waits until all batches are durable, deletes what precedes the first offsets of partitions,
    /// and makes the topic an ordinary one.
    ///
    /// # Errors
    /// The server refuses, or the connection failed.
    pub(crate) fn finish(mut self, starts: &[u64]) -> Result<(), String> {
        while !self.in_flight.is_empty() {
            self.receive()?;
        }
        self.delete_before(starts)?;
        let setting = AlterableConfig::default()
            .with_name(StrBytes::from_static_str(IMPORT_SETTING))
            .with_config_operation(DELETE);
        let resource = AlterConfigsResource::default()
            .with_resource_type(TOPIC_RESOURCE)
            .with_resource_name(StrBytes::from_string(self.name.clone()))
            .with_configs(vec![setting]);
        let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
        let admin = &mut self.admin;
        let version = admin
            .version::<IncrementalAlterConfigsRequest>(1)
            .map_err(|error| error.to_string())?;
        let answer = admin.call(version, &request).map_err(|error| error.to_string())?;
        for result in &answer.responses {
            if let Some(reason) = refusal(result.error_code, result.error_message.as_ref()) {
                return Err(format!("its settings: {reason}"));
            }
        }
        Ok(())
    }

    fn delete_before(&mut self, starts: &[u64]) -> Result<(), String> {
        let started = starts.iter().enumerate().filter(|(_, start)| **start > 0);
        let partition = |(index, start): (usize, &u64)| {
            DeleteRecordsPartition::default()
                .with_partition_index(index_of(index))
                .with_offset(i64::try_from(*start).unwrap_or(i64::MAX))
        };
        let partitions: Vec<_> = started.map(partition).collect();
        if partitions.is_empty() {
            return Ok(());
        }
        let topic = DeleteRecordsTopic::default()
            .with_name(topic_name(&self.name))
            .with_partitions(partitions);
        let request = DeleteRecordsRequest::default()
            .with_topics(vec![topic])
            .with_timeout_ms(SERVER_TIMEOUT_MS);
        let version =
            self.admin.version::<DeleteRecordsRequest>(2).map_err(|error| error.to_string())?;
        let answer = self.admin.call(version, &request).map_err(|error| error.to_string())?;
        for result in answer.topics.iter().flat_map(|topic| &topic.partitions) {
            if let Some(reason) = refusal(result.error_code, None) {
                let index = result.partition_index;
                return Err(format!("partition {index}: its start cannot be set: {reason}"));
            }
        }
        Ok(())
    }
}

/// Returns the index of a partition as in requests. The server has created as many.
fn index_of(partition: usize) -> i32 {
    i32::try_from(partition).expect("a partition of a topic")
}
