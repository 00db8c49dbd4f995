//! `alluvium topic`: administration of topics over the Kafka protocol, and therefore from any
//! machine.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use kafka_protocol::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig};
use kafka_protocol::messages::create_topics_response::CreatableTopicResult;
use kafka_protocol::messages::delete_topics_request::DeleteTopicState;
use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::describe_configs_response::{
    DescribeConfigsResourceResult, DescribeConfigsResult,
};
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::metadata_response::MetadataResponseTopic;
use kafka_protocol::messages::{
    BrokerId, CreateTopicsRequest, DeleteTopicsRequest, DescribeConfigsRequest, ListOffsetsRequest,
    MetadataRequest, MetadataResponse,
};
use kafka_protocol::protocol::StrBytes;
use serde::Serialize;

use crate::address::HostPort;
use crate::kafka::{Access, Client, SERVER_TIMEOUT_MS, refusal, topic_name};
use crate::output::{self, Failure, Table};
use crate::units::counted;

#[derive(Debug, Subcommand)]
pub(crate) enum TopicCommand {
    /// Create a topic.
    Create {
        /// Name of the topic: 1 to 249 letters, digits, dots, underscores and hyphens.
        name: String,
        /// Number of partitions. Default: the server's --default-partitions.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
        partitions: Option<i32>,
        /// A setting of the topic, as in retention.ms=86400000; can be repeated.
        #[arg(long, value_name = "KEY=VALUE", value_parser = key_and_value)]
        config: Vec<(String, String)>,
        #[command(flatten)]
        common: Common,
    },
    /// List all topics.
    List {
        #[command(flatten)]
        common: Common,
    },
    /// Show the partitions, offsets and settings of topics.
    Describe {
        /// Names of topics. Default: all.
        names: Vec<String>,
        #[command(flatten)]
        common: Common,
    },
    /// Delete topics with all their records.
    Delete {
        /// Names of the topics.
        #[arg(required = true)]
        names: Vec<String>,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Common {
    /// Address of the server.
    #[arg(
        long,
        env = "ALLUVIUM_BOOTSTRAP",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:9092"
    )]
    pub(crate) bootstrap: HostPort,
    /// Client properties for authentication and encryption: a file with `security.protocol`,
    /// `ssl.ca.location`, `sasl.mechanism`, `sasl.username`, `sasl.password` and so on, named as in
    /// librdkafka or in Kafka's tools (docs/security.md). Default none: plaintext, no login.
    #[arg(long, env = "ALLUVIUM_COMMAND_CONFIG", value_name = "FILE")]
    command_config: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Common {
    /// Reads the file of client properties.
    ///
    /// # Errors
    /// It is unusable.
    pub(crate) fn access(&self) -> Result<Access, Failure> {
        Access::of(self.command_config.as_deref()).map_err(Failure::Usage)
    }

    fn connect(&self) -> Result<Client, Failure> {
        Client::connect(&self.bootstrap, &self.access()?).map_err(Failure::new)
    }
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        _ => Err(format!("`{text}` is not KEY=VALUE")),
    }
}

/// Runs a `topic` command.
///
/// # Errors
/// The server cannot be reached, or refuses.
pub(crate) fn run(command: TopicCommand) -> Result<(), Failure> {
    match command {
        TopicCommand::Create { name, partitions, config, common } => {
            create(&name, partitions, config, &common)
        }
        TopicCommand::List { common } => list(&common),
        TopicCommand::Describe { names, common } => describe(&names, &common),
        TopicCommand::Delete { names, common } => delete(&names, &common),
    }
}

#[derive(Serialize)]
struct Created<'a> {
    name: &'a str,
    topic_id: String,
    partitions: i32,
}

fn create(
    name: &str,
    partitions: Option<i32>,
    config: Vec<(String, String)>,
    common: &Common,
) -> Result<(), Failure> {
    let mut client = common.connect()?;
    let result = create_topic(&mut client, name, partitions, config, Mode::Apply)?;
    if let Some(reason) = refusal(result.error_code, result.error_message.as_ref()) {
        return Err(Failure::Failed(format!("topic {name}: {reason}")));
    }
    let created =
        Created { name, topic_id: result.topic_id.to_string(), partitions: result.num_partitions };
    if common.json {
        return output::json(&created);
    }
    output::line(format_args!(
        "created topic {name}: {}, id {}",
        counted(created.partitions.unsigned_abs(), "partition", "partitions"),
        created.topic_id
    ))
}

/// Whether the server does what a request says, or only answers whether it could.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Apply,
    Validate,
}

/// Requests the creation of a topic. Returns the server's answer, which may be a refusal.
///
/// # Errors
/// The server does not answer.
pub(crate) fn create_topic(
    client: &mut Client,
    name: &str,
    partitions: Option<i32>,
    config: Vec<(String, String)>,
    mode: Mode,
) -> Result<CreatableTopicResult, Failure> {
    // Version 7 returns the topic's ID; since version 4, -1 selects the server's number of
    // partitions.
    let version = client.version::<CreateTopicsRequest>(7).map_err(Failure::new)?;
    let configs = config.into_iter().map(|(key, value)| {
        CreatableTopicConfig::default()
            .with_name(StrBytes::from_string(key))
            .with_value(Some(StrBytes::from_string(value)))
    });
    let topic = CreatableTopic::default()
        .with_name(topic_name(name))
        .with_num_partitions(partitions.unwrap_or(-1))
        .with_replication_factor(-1)
        .with_configs(configs.collect());
    let request = CreateTopicsRequest::default()
        .with_topics(vec![topic])
        .with_timeout_ms(SERVER_TIMEOUT_MS)
        .with_validate_only(mode == Mode::Validate);
    let answer = client.call(version, &request).map_err(Failure::new)?;
    let result = answer.topics.into_iter().next();
    result.ok_or_else(|| Failure::Failed(format!("topic {name}: missing in the server's answer")))
}

/// Requests metadata of the topics in `names`, or of all topics, sorted by name.
///
/// # Errors
/// A topic does not exist, or the server does not answer.
pub(crate) fn metadata(
    client: &mut Client,
    names: Option<&[String]>,
) -> Result<MetadataResponse, Failure> {
    // Later versions add nothing that is shown here.
    let version = client.version::<MetadataRequest>(12).map_err(Failure::new)?;
    let topics = names.map(|names| {
        let wanted =
            |name: &String| MetadataRequestTopic::default().with_name(Some(topic_name(name)));
        names.iter().map(wanted).collect()
    });
    let request =
        MetadataRequest::default().with_topics(topics).with_allow_auto_topic_creation(false);
    let mut answer = client.call(version, &request).map_err(Failure::new)?;
    for topic in &answer.topics {
        if let Some(reason) = refusal(topic.error_code, None) {
            return Err(Failure::Failed(format!("topic {}: {reason}", name_of(topic))));
        }
    }
    answer.topics.sort_by(|a, b| name_of(a).cmp(name_of(b)));
    Ok(answer)
}

pub(crate) fn name_of(topic: &MetadataResponseTopic) -> &str {
    topic.name.as_ref().map_or("", |name| name.0.as_str())
}

#[derive(Serialize)]
struct Listed<'a> {
    name: &'a str,
    topic_id: String,
    partitions: usize,
    internal: bool,
}

fn list(common: &Common) -> Result<(), Failure> {
    let mut client = common.connect()?;
    let topics = metadata(&mut client, None)?.topics;
    let listed: Vec<Listed<'_>> = topics
        .iter()
        .map(|topic| Listed {
            name: name_of(topic),
            topic_id: topic.topic_id.to_string(),
            partitions: topic.partitions.len(),
            internal: topic.is_internal,
        })
        .collect();
    if common.json {
        return output::json(&listed);
    }
    if listed.is_empty() {
        return output::line("there are no topics");
    }
    let mut table = Table::of_text(&["TOPIC", "PARTITIONS", "ID"]);
    for topic in listed {
        let internal = if topic.internal { " (internal)" } else { "" };
        table.row(vec![
            format!("{}{internal}", topic.name),
            topic.partitions.to_string(),
            topic.topic_id,
        ]);
    }
    output::line(table)
}

#[derive(Serialize)]
struct Described {
    name: String,
    topic_id: String,
    internal: bool,
    partitions: Vec<DescribedPartition>,
    configs: BTreeMap<String, Option<String>>,
}

#[derive(Serialize)]
struct DescribedPartition {
    partition: i32,
    leader: i32,
    leader_epoch: i32,
    replicas: Vec<i32>,
    in_sync_replicas: Vec<i32>,
    log_start_offset: i64,
    high_watermark: i64,
}

fn describe(names: &[String], common: &Common) -> Result<(), Failure> {
    let mut client = common.connect()?;
    let topics = metadata(&mut client, (!names.is_empty()).then_some(names))?.topics;
    let mut described = Vec::with_capacity(topics.len());
    for topic in &topics {
        described.push(describe_one(&mut client, topic)?);
    }
    if common.json {
        return output::json(&described);
    }
    for (i, topic) in described.iter().enumerate() {
        if i > 0 {
            output::line("")?;
        }
        output::line(format_args!(
            "topic {}: {}, id {}",
            topic.name,
            counted(topic.partitions.len() as u64, "partition", "partitions"),
            topic.topic_id
        ))?;
        for (key, value) in &topic.configs {
            output::line(format_args!("  {key}={}", value.as_deref().unwrap_or("")))?;
        }
        let mut table = Table::of_numbers(&[
            "PARTITION",
            "LEADER",
            "EPOCH",
            "REPLICAS",
            "IN SYNC",
            "LOG START",
            "HIGH WATERMARK",
        ]);
        for partition in &topic.partitions {
            table.row(vec![
                partition.partition.to_string(),
                partition.leader.to_string(),
                partition.leader_epoch.to_string(),
                join(&partition.replicas),
                join(&partition.in_sync_replicas),
                partition.log_start_offset.to_string(),
                partition.high_watermark.to_string(),
            ]);
        }
        output::line(table)?;
    }
    Ok(())
}

fn join(ids: &[i32]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Kafka's special timestamp for the log start offset.
pub(crate) const EARLIEST: i64 = -2;
/// Kafka's special timestamp for the offset of the next record.
pub(crate) const LATEST: i64 = -1;

fn describe_one(client: &mut Client, topic: &MetadataResponseTopic) -> Result<Described, Failure> {
    let starts = offsets(client, topic, EARLIEST)?;
    let ends = offsets(client, topic, LATEST)?;
    let ids = |nodes: &[BrokerId]| nodes.iter().map(|node| node.0).collect();
    let mut partitions: Vec<DescribedPartition> = topic
        .partitions
        .iter()
        .map(|partition| DescribedPartition {
            partition: partition.partition_index,
            leader: partition.leader_id.0,
            leader_epoch: partition.leader_epoch,
            replicas: ids(&partition.replica_nodes),
            in_sync_replicas: ids(&partition.isr_nodes),
            log_start_offset: starts.get(&partition.partition_index).copied().unwrap_or(-1),
            high_watermark: ends.get(&partition.partition_index).copied().unwrap_or(-1),
        })
        .collect();
    partitions.sort_by_key(|partition| partition.partition);
    Ok(Described {
        name: name_of(topic).to_string(),
        topic_id: topic.topic_id.to_string(),
        internal: topic.is_internal,
        partitions,
        configs: configs(client, name_of(topic))?,
    })
}

/// Requests the offsets of partitions for one of Kafka's special timestamps.
///
/// # Errors
/// The server does not answer for a partition.
pub(crate) fn offsets(
    client: &mut Client,
    topic: &MetadataResponseTopic,
    timestamp: i64,
) -> Result<BTreeMap<i32, i64>, Failure> {
    let version = client.version::<ListOffsetsRequest>(7).map_err(Failure::new)?;
    let partition = |index| {
        ListOffsetsPartition::default().with_partition_index(index).with_timestamp(timestamp)
    };
    let partitions = topic.partitions.iter().map(|p| partition(p.partition_index)).collect();
    let wanted = ListOffsetsTopic::default()
        .with_name(topic_name(name_of(topic)))
        .with_partitions(partitions);
    let request =
        ListOffsetsRequest::default().with_replica_id(BrokerId(-1)).with_topics(vec![wanted]);
    let answer = client.call(version, &request).map_err(Failure::new)?;
    let mut offsets = BTreeMap::new();
    for partition in answer.topics.iter().flat_map(|topic| &topic.partitions) {
        if let Some(reason) = refusal(partition.error_code, None) {
            return Err(Failure::Failed(format!(
                "topic {} partition {}: {reason}",
                name_of(topic),
                partition.partition_index
            )));
        }
        offsets.insert(partition.partition_index, partition.offset);
    }
    Ok(offsets)
}

/// Kafka's resource type for topics.
pub(crate) const TOPIC_RESOURCE: i8 = 2;

/// Requests the settings of a topic.
///
/// # Errors
/// The topic does not exist, or the server does not answer.
pub(crate) fn configs(
    client: &mut Client,
    name: &str,
) -> Result<BTreeMap<String, Option<String>>, Failure> {
    let described = described_configs(client, name)?.into_iter();
    let text = |value: StrBytes| value.to_string();
    Ok(described.map(|config| (text(config.name), config.value.map(text))).collect())
}

/// Requests the settings of a topic, with their sources.
///
/// # Errors
/// The topic does not exist, or the server does not answer.
pub(crate) fn described_configs(
    client: &mut Client,
    name: &str,
) -> Result<Vec<DescribeConfigsResourceResult>, Failure> {
    let mut configs = Vec::new();
    for result in describe_configs(client, &[name], None)? {
        if let Some(reason) = refusal(result.error_code, result.error_message.as_ref()) {
            return Err(Failure::Failed(format!("settings of topic {name}: {reason}")));
        }
        configs.extend(result.configs);
    }
    Ok(configs)
}

/// Requests the settings of topics with this name, or all of them. Each answer has an error code.
///
/// # Errors
/// The server does not answer.
pub(crate) fn describe_configs(
    client: &mut Client,
    topics: &[&str],
    setting: Option<&'static str>,
) -> Result<Vec<DescribeConfigsResult>, Failure> {
    let version = client.version::<DescribeConfigsRequest>(4).map_err(Failure::new)?;
    let resource = |name: &&str| {
        DescribeConfigsResource::default()
            .with_resource_type(TOPIC_RESOURCE)
            .with_resource_name(StrBytes::from_string((*name).to_owned()))
            .with_configuration_keys(setting.map(|name| vec![StrBytes::from_static_str(name)]))
    };
    let resources = topics.iter().map(resource).collect();
    let request = DescribeConfigsRequest::default().with_resources(resources);
    Ok(client.call(version, &request).map_err(Failure::new)?.results)
}

#[derive(Serialize)]
struct Deleted {
    name: String,
    deleted: bool,
    error: Option<String>,
}

fn delete(names: &[String], common: &Common) -> Result<(), Failure> {
    /// Since this version a topic can also be named by its ID, and names are in another field.
    const BY_STATE: i16 = 6;
    let mut client = common.connect()?;
    let version = client.version::<DeleteTopicsRequest>(6).map_err(Failure::new)?;
    let request = DeleteTopicsRequest::default().with_timeout_ms(SERVER_TIMEOUT_MS);
    let request = if version >= BY_STATE {
        let state = |name: &String| DeleteTopicState::default().with_name(Some(topic_name(name)));
        request.with_topics(names.iter().map(state).collect())
    } else {
        request.with_topic_names(names.iter().map(|name| topic_name(name)).collect())
    };
    let answer = client.call(version, &request).map_err(Failure::new)?;
    let deleted: Vec<Deleted> = answer
        .responses
        .iter()
        .map(|result| Deleted {
            name: result.name.as_ref().map_or_else(String::new, |name| name.0.to_string()),
            deleted: result.error_code == 0,
            error: refusal(result.error_code, result.error_message.as_ref()),
        })
        .collect();
    if common.json {
        output::json(&deleted)?;
    } else {
        for topic in deleted.iter().filter(|topic| topic.deleted) {
            output::line(format_args!("deleted topic {}", topic.name))?;
        }
    }
    let failed: Vec<String> = deleted
        .iter()
        .filter_map(|topic| Some(format!("topic {}: {}", topic.name, topic.error.as_ref()?)))
        .collect();
    if failed.is_empty() { Ok(()) } else { Err(Failure::Failed(failed.join("; "))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_split_at_the_first_equals_sign() {
        let pair = |key: &str, value: &str| Ok((key.to_string(), value.to_string()));
        assert_eq!(key_and_value("retention.ms=1"), pair("retention.ms", "1"));
        assert_eq!(key_and_value("a=b=c"), pair("a", "b=c"));
        assert_eq!(key_and_value("a="), pair("a", ""));
        assert!(key_and_value("a").is_err() && key_and_value("=a").is_err());
    }
}
