//! Writes a topic of a running server at given offsets: a topic with the setting `alluvium.import`.
//! `docs/decisions/0028-import-at-given-offsets.md`.

use std::collections::{BTreeMap, VecDeque};

use alluvium_broker::{IMPORT_SETTING, is_internal_topic};
use bytes::Bytes;
use kafka_protocol::ResponseError;
use kafka_protocol::messages::create_partitions_request::CreatePartitionsTopic;
use kafka_protocol::messages::delete_records_request::{
    DeleteRecordsPartition, DeleteRecordsTopic,
};
use kafka_protocol::messages::incremental_alter_configs_request::{
    AlterConfigsResource, AlterableConfig,
};
use kafka_protocol::messages::{
    CreatePartitionsRequest, DeleteRecordsRequest, IncrementalAlterConfigsRequest, ProduceRequest,
};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::reader::Reader;
use super::settings::Change;
use crate::address::HostPort;
use crate::kafka::{
    Access, Client, Receiving, SERVER_TIMEOUT_MS, Sending, partition_index, produce, refusal,
    topic_name,
};
use crate::output::Failure;
use crate::topic::{self, LATEST, Mode, TOPIC_RESOURCE};

/// Batches that are sent before the oldest one is acknowledged.
const IN_FLIGHT: usize = 32;
/// Kafka's operation that deletes a setting.
const DELETE: i8 = 1;

/// A server whose topics are imported.
pub(crate) struct Target {
    server: HostPort,
    access: Access,
    /// The connection for requests about topics.
    pub(super) admin: Client,
}

/// A topic whose import has begun.
pub(crate) struct Begun {
    /// Whether it was created now.
    pub(crate) is_new: bool,
    /// Where each partition continues.
    pub(crate) next: Vec<u64>,
    /// The ID of the topic.
    pub(super) id: Uuid,
}

/// Why an import cannot begin.
pub(crate) enum NotBegun {
    /// There is a topic of the name that is not being imported from this source. The text says so.
    Exists {
        /// Whether it is being imported from another source.
        is_import: bool,
        reason: String,
    },
    /// The import of the topic has begun with another number of partitions.
    Partitions {
        found: usize,
        reason: String,
    },
    Failed(Failure),
}

impl From<Failure> for NotBegun {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<NotBegun> for Failure {
    fn from(cause: NotBegun) -> Self {
        match cause {
            NotBegun::Exists { reason, .. } | NotBegun::Partitions { reason, .. } => {
                Self::Failed(reason)
            }
            NotBegun::Failed(failure) => failure,
        }
    }
}

impl Target {
    /// Connects to a server.
    ///
    /// # Errors
    /// It cannot be reached, or refuses the login.
    pub(crate) fn connect(server: &HostPort, access: &Access) -> Result<Self, Failure> {
        let admin = Client::connect(server, access).map_err(Failure::new)?;
        Ok(Self { server: server.clone(), access: access.clone(), admin })
    }

    /// Opens a connection to append batches.
    ///
    /// # Errors
    /// As [`Target::connect`].
    pub(crate) fn appender(&self) -> Result<Appender, Failure> {
        let producer = Client::connect(&self.server, &self.access).map_err(Failure::new)?;
        let version = producer.version::<ProduceRequest>(produce::NEWEST).map_err(Failure::new)?;
        let (sending, receiving) = producer.into_halves();
        Ok(Appender { sending, receiving, version, in_flight: VecDeque::new() })
    }

    /// Creates a topic with these settings, or continues its import from `source`.
    ///
    /// # Errors
    /// There is a topic of this name that is not being imported from there, or that has another
    /// number of partitions; the server cannot be reached, or refuses.
    pub(crate) fn begin(
        &mut self,
        name: &str,
        source: &str,
        partitions: usize,
        mut configs: BTreeMap<String, String>,
    ) -> Result<Begun, NotBegun> {
        if is_internal_topic(name) {
            return Err(NotBegun::Failed(Failure::Usage(format!(
                "topic {name} is internal: the server keeps its content elsewhere, and takes no \
                 records for it"
            ))));
        }
        configs.insert(IMPORT_SETTING.into(), source.into());
        let count = i32::try_from(partitions).map_err(Failure::new)?;
        let configs = configs.into_iter().collect();
        let created =
            topic::create_topic(&mut self.admin, name, Some(count), configs, Mode::Apply)?;
        let is_new = created.error_code != ResponseError::TopicAlreadyExists.code();
        let refused = refusal(created.error_code, created.error_message.as_ref());
        if let Some(reason) = refused.filter(|_| is_new) {
            return Err(Failure::Failed(format!("topic {name}: {reason}")).into());
        }
        if !is_new {
            let of = self.import_of(name)?;
            if of.as_deref() != Some(source) {
                let is_import = of.is_some();
                let import = match of {
                    None => String::new(),
                    Some(other) => format!(", and is being imported from {other}"),
                };
                let reason = format!("topic {name} exists already at {}{import}", self.server);
                return Err(NotBegun::Exists { is_import, reason });
            }
        }
        let (server, admin) = (&self.server, &mut self.admin);
        let names = [name.to_owned()];
        let metadata = topic::metadata(admin, Some(&names))?;
        let found = metadata.topics.first().ok_or_else(|| {
            Failure::Failed(format!("topic {name}: missing in the server's answer"))
        })?;
        if found.partitions.len() != partitions {
            let found = found.partitions.len();
            let reason = format!(
                "topic {name} at {server} has {found} partitions instead of {partitions}: it was \
                 begun with other data. Delete it first"
            );
            return Err(NotBegun::Partitions { found, reason });
        }
        let ends = topic::offsets(admin, found, LATEST)?;
        let next = (0..count).map(|index| {
            let end = ends.get(&index).and_then(|end| u64::try_from(*end).ok());
            let missing = || format!("topic {name}, partition {index}: no offset in the answer");
            end.ok_or_else(|| Failure::Failed(missing()))
        });
        Ok(Begun { is_new, next: next.collect::<Result<_, _>>()?, id: found.topic_id })
    }

    /// Returns the source of a topic that is being imported; `None` for an ordinary one.
    ///
    /// # Errors
    /// There is no such topic, or the server does not answer.
    fn import_of(&mut self, name: &str) -> Result<Option<String>, Failure> {
        let missing = || Failure::Failed(format!("topic {name} does not exist"));
        self.imports_of(&[name])?.remove(name).ok_or_else(missing)
    }

    /// Returns what these topics are being imported from: `None` for an ordinary one. Topics that
    /// do not exist are left out.
    ///
    /// # Errors
    /// The server does not answer, or refuses.
    pub(super) fn imports_of(
        &mut self,
        names: &[&str],
    ) -> Result<BTreeMap<String, Option<String>>, Failure> {
        let mut imports = BTreeMap::new();
        if names.is_empty() {
            return Ok(imports);
        }
        for result in topic::describe_configs(&mut self.admin, names, Some(IMPORT_SETTING))? {
            let name = result.resource_name.to_string();
            if result.error_code == ResponseError::UnknownTopicOrPartition.code() {
                continue;
            }
            if let Some(reason) = refusal(result.error_code, result.error_message.as_ref()) {
                return Err(Failure::Failed(format!("settings of topic {name}: {reason}")));
            }
            let value = result.configs.into_iter().find_map(|config| config.value);
            let source = value.map(|value| value.to_string());
            imports.insert(name, source.filter(|source| !source.is_empty()));
        }
        Ok(imports)
    }

    /// Returns the settings that the server refuses for a new topic, with its reasons.
    ///
    /// # Errors
    /// The server does not answer, or refuses the topic for another reason.
    pub(super) fn refused_for_new(
        &mut self,
        name: &str,
        settings: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, Failure> {
        let changes = settings.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
        refused(&changes.collect::<Vec<_>>(), |changes| {
            let configs = changes
                .iter()
                .filter_map(|(key, value)| value.clone().map(|value| (key.clone(), value)));
            let configs = configs.collect();
            let answer =
                topic::create_topic(&mut self.admin, name, Some(1), configs, Mode::Validate)?;
            Ok((answer.error_code, refusal(answer.error_code, answer.error_message.as_ref())))
        })
    }

    /// Returns the changes that the server refuses for an existing topic, with its reasons.
    ///
    /// # Errors
    /// The server does not answer, or refuses for another reason.
    pub(super) fn refused_changes(
        &mut self,
        name: &str,
        changes: &[Change],
    ) -> Result<BTreeMap<String, String>, Failure> {
        refused(changes, |changes| self.alter(name, changes, Mode::Validate))
    }

    /// Changes settings of a topic, or checks whether that would succeed. Returns the error code
    /// and its text.
    fn alter(
        &mut self,
        name: &str,
        changes: &[Change],
        mode: Mode,
    ) -> Result<(i16, Option<String>), Failure> {
        let config = |(key, value): &Change| {
            let config = AlterableConfig::default().with_name(StrBytes::from_string(key.clone()));
            match value {
                Some(value) => config.with_value(Some(StrBytes::from_string(value.clone()))),
                None => config.with_config_operation(DELETE).with_value(None),
            }
        };
        let resource = AlterConfigsResource::default()
            .with_resource_type(TOPIC_RESOURCE)
            .with_resource_name(StrBytes::from_string(name.to_owned()))
            .with_configs(changes.iter().map(config).collect());
        let request = IncrementalAlterConfigsRequest::default()
            .with_resources(vec![resource])
            .with_validate_only(mode == Mode::Validate);
        let admin = &mut self.admin;
        let version = admin.version::<IncrementalAlterConfigsRequest>(1).map_err(Failure::new)?;
        let answer = admin.call(version, &request).map_err(Failure::new)?;
        let result = answer.responses.first();
        let result = result.ok_or_else(|| Failure::Failed(format!("topic {name}: no answer")))?;
        Ok((result.error_code, refusal(result.error_code, result.error_message.as_ref())))
    }

    /// Adds partitions to a topic.
    ///
    /// # Errors
    /// The server refuses, or does not answer.
    pub(crate) fn add_partitions(&mut self, name: &str, count: usize) -> Result<(), Failure> {
        let version = self.admin.version::<CreatePartitionsRequest>(3).map_err(Failure::new)?;
        let topic = CreatePartitionsTopic::default()
            .with_name(topic_name(name))
            .with_count(i32::try_from(count).map_err(Failure::new)?)
            .with_assignments(None);
        let request = CreatePartitionsRequest::default()
            .with_topics(vec![topic])
            .with_timeout_ms(SERVER_TIMEOUT_MS);
        let answer = self.admin.call(version, &request).map_err(Failure::new)?;
        for result in &answer.results {
            if let Some(reason) = refusal(result.error_code, result.error_message.as_ref()) {
                return Err(Failure::Failed(format!("topic {name}: {reason}")));
            }
        }
        Ok(())
    }

    /// Opens a connection to read records.
    ///
    /// # Errors
    /// As [`Target::connect`].
    pub(super) fn reader(&self) -> Result<Reader, Failure> {
        Reader::connect(&self.server, &self.access)
    }

    /// Deletes what precedes the first offsets of the partitions of a topic, and makes it an
    /// ordinary one with these changes of its settings.
    ///
    /// # Errors
    /// The server refuses, or the connection failed.
    pub(crate) fn finish(
        &mut self,
        name: &str,
        starts: &[u64],
        mut changes: Vec<Change>,
    ) -> Result<(), String> {
        self.delete_before(name, starts)?;
        changes.push((IMPORT_SETTING.to_owned(), None));
        let altered = self.alter(name, &changes, Mode::Apply);
        match altered.map_err(|failure| failure.message().to_owned())? {
            (_, Some(reason)) => Err(format!("its settings: {reason}")),
            (_, None) => Ok(()),
        }
    }

    fn delete_before(&mut self, name: &str, starts: &[u64]) -> Result<(), String> {
        let started = starts.iter().enumerate().filter(|(_, start)| **start > 0);
        let partition = |(index, start): (usize, &u64)| {
            DeleteRecordsPartition::default()
                .with_partition_index(partition_index(index))
                .with_offset(i64::try_from(*start).unwrap_or(i64::MAX))
        };
        let partitions: Vec<_> = started.map(partition).collect();
        if partitions.is_empty() {
            return Ok(());
        }
        let topic =
            DeleteRecordsTopic::default().with_name(topic_name(name)).with_partitions(partitions);
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

/// Returns the changes that `validate` refuses, with its reasons. If it does not accept all of them
/// at once, they are added one by one to those that it accepts, in any order: a setting may be
/// valid only with the new value of another one. `validate` returns the error code and its text.
fn refused(
    changes: &[Change],
    mut validate: impl FnMut(&[Change]) -> Result<(i16, Option<String>), Failure>,
) -> Result<BTreeMap<String, String>, Failure> {
    let mut validate = |changes: &[Change]| match validate(changes)? {
        (_, None) => Ok(None),
        (code, Some(reason)) if code == ResponseError::InvalidConfig.code() => Ok(Some(reason)),
        (_, Some(reason)) => Err(Failure::Failed(reason)),
    };
    if changes.is_empty() || validate(changes)?.is_none() {
        return Ok(BTreeMap::new());
    }
    let (mut accepted, mut left) = (Vec::new(), changes.to_vec());
    loop {
        let mut refused = BTreeMap::new();
        let before = left.len();
        for change in std::mem::take(&mut left) {
            accepted.push(change);
            if let Some(reason) = validate(&accepted)? {
                left.extend(accepted.pop());
                refused.extend(left.last().map(|(name, _)| (name.clone(), reason)));
            }
        }
        if left.is_empty() || left.len() == before {
            return Ok(refused);
        }
    }
}

/// A connection that appends batches of imports.
pub(crate) struct Appender {
    sending: Sending,
    receiving: Receiving,
    version: i16,
    /// The correlation ids of batches that are not acknowledged.
    in_flight: VecDeque<i32>,
}

impl Appender {
    /// Sends the next batch of a partition.
    ///
    /// # Errors
    /// The server refuses this batch or an earlier one, or the connection failed.
    pub(crate) fn append(
        &mut self,
        topic: &str,
        partition: usize,
        batch: Bytes,
    ) -> Result<(), String> {
        if self.in_flight.len() >= IN_FLIGHT {
            self.receive()?;
        }
        let request = produce::request(produce::ALL, topic, partition_index(partition), batch);
        let sent = self.sending.send(self.version, &request);
        let correlation =
            sent.map_err(|error| format!("topic {topic}, partition {partition}: {error}"))?;
        self.in_flight.push_back(correlation);
        Ok(())
    }

    /// Waits until all batches are durable.
    ///
    /// # Errors
    /// The server refuses one, or the connection failed.
    pub(crate) fn wait(&mut self) -> Result<(), String> {
        while !self.in_flight.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    /// Waits for the oldest batch that is not acknowledged.
    fn receive(&mut self) -> Result<(), String> {
        let Some(correlation) = self.in_flight.pop_front() else { return Ok(()) };
        let answer = self.receiving.answer::<ProduceRequest>(self.version, correlation);
        produce::check(&answer.map_err(|error| error.to_string())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that knows `a` and `b`, of which `a` must not be greater.
    fn refused_by_model(a: i64, b: i64, changes: &[(&str, i64)]) -> Vec<String> {
        let changes: Vec<Change> =
            changes.iter().map(|(name, value)| ((*name).into(), Some(value.to_string()))).collect();
        let refused = refused(&changes, |changes| {
            let of = |name, before| {
                let change = changes.iter().find(|(of, _)| of == name);
                change.map_or(before, |(_, value)| value.as_ref().unwrap().parse().unwrap())
            };
            let is_unknown = changes.iter().any(|(name, _)| name != "a" && name != "b");
            let reason = match is_unknown {
                true => Some("unknown".to_owned()),
                false => (of("a", a) > of("b", b)).then(|| "a is greater".to_owned()),
            };
            Ok((if reason.is_some() { ResponseError::InvalidConfig.code() } else { 0 }, reason))
        });
        refused.map_err(|failure| failure.message().to_owned()).unwrap().into_keys().collect()
    }

    #[test]
    fn settings_are_refused_only_if_the_others_do_not_make_them_valid() {
        let none = [""; 0];
        assert_eq!(refused_by_model(5, 9, &[]), none);
        assert_eq!(refused_by_model(5, 9, &[("a", 1), ("b", 2)]), none);
        for changes in [[("a", 1), ("b", 2)], [("b", 2), ("a", 1)]] {
            let with_unknown = [&changes[..], &[("c", 0)]].concat();
            assert_eq!(refused_by_model(5, 9, &with_unknown), ["c"], "lower");
            assert_eq!(refused_by_model(0, 0, &with_unknown), ["c"], "higher");
        }
        assert_eq!(refused_by_model(5, 9, &[("a", 10), ("c", 0)]), ["a", "c"]);
        assert_eq!(refused_by_model(5, 9, &[("b", 3), ("a", 4)]), ["b"]);
    }
}
