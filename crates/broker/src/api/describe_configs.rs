//! DescribeConfigs: the settings of topics, and those of the server that clients ask for.

use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::describe_configs_response::{
    DescribeConfigsResourceResult, DescribeConfigsResult, DescribeConfigsSynonym,
};
use kafka_protocol::messages::{DescribeConfigsRequest, DescribeConfigsResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::config::BrokerConfig;
use crate::errors::ApiError;
use crate::server::Server;
use crate::topic_config::{ConfigType, MAX_MESSAGE_BYTES, SETTINGS, Setting};
use crate::topics::Topic;
use crate::wire::once;

const TOPIC: i8 = 2;
const BROKER: i8 = 4;

/// Where a value comes from, with its number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Topic = 1,
    StaticBroker = 4,
    Default = 5,
}

/// A topic's setting and its value.
pub(super) struct TopicSetting {
    pub(super) setting: &'static Setting,
    pub(super) value: String,
    pub(super) source: Source,
}

/// The settings of a topic that are in effect, and those that it was given.
pub(super) fn of_topic<'a>(
    server: &'a Server,
    topic: &'a Topic,
) -> impl Iterator<Item = TopicSetting> + use<'a> {
    SETTINGS.iter().filter_map(|setting| {
        let (value, source) = if let Some(value) = topic.overrides.get(setting.name) {
            (value.clone(), Source::Topic)
        } else if setting.name == MAX_MESSAGE_BYTES {
            let configured = server.config.max_message_bytes;
            let is_default = configured == BrokerConfig::default().max_message_bytes;
            (
                configured.to_string(),
                if is_default { Source::Default } else { Source::StaticBroker },
            )
        } else {
            (setting.default?.to_owned(), Source::Default)
        };
        Some(TopicSetting { setting, value, source })
    })
}

pub(super) async fn handle(
    cx: &Context,
    request: DescribeConfigsRequest,
) -> DescribeConfigsResponse {
    let describe = |resource: &DescribeConfigsResource| {
        let result = DescribeConfigsResult::default()
            .with_resource_type(resource.resource_type)
            .with_resource_name(resource.resource_name.clone());
        match configs(cx, resource) {
            Ok(mut configs) => {
                if let Some(wanted) = &resource.configuration_keys {
                    configs.retain(|config| wanted.contains(&config.name));
                }
                for config in &mut configs {
                    if !request.include_synonyms {
                        config.synonyms.clear();
                    }
                    if !request.include_documentation {
                        config.documentation = None;
                    }
                }
                result.with_error_message(None).with_configs(configs)
            }
            Err(error) => result.with_error_code(error.code()).with_error_message(error.message()),
        }
    };
    let which = |resource: &&DescribeConfigsResource| {
        (resource.resource_type, resource.resource_name.clone())
    };
    DescribeConfigsResponse::default()
        .with_results(once(&request.resources, which).map(describe).collect())
}

fn configs(
    cx: &Context,
    resource: &DescribeConfigsResource,
) -> Result<Vec<DescribeConfigsResourceResult>, ApiError> {
    match resource.resource_type {
        TOPIC => {
            let topic = cx.server.topics.by_name(&resource.resource_name)?;
            Ok(of_topic(&cx.server, &topic).map(topic_config).collect())
        }
        BROKER => {
            let id = cx.server.node.id;
            if !resource.resource_name.is_empty() && resource.resource_name.parse() != Ok(id) {
                return Err(ApiError::InvalidRequest(format!(
                    "broker {:?} is not this one, which is {id}",
                    &*resource.resource_name
                )));
            }
            Ok(broker_configs(&cx.server))
        }
        other => Err(ApiError::InvalidRequest(format!(
            "resources of type {other} have no configuration here"
        ))),
    }
}

fn topic_config(config: TopicSetting) -> DescribeConfigsResourceResult {
    entry(
        config.setting.name,
        config.value,
        config.setting.kind,
        config.source,
        config.setting.documentation,
    )
}

/// The server's own settings under the names that Kafka has for them.
fn broker_configs(server: &Server) -> Vec<DescribeConfigsResourceResult> {
    let config = &server.config;
    let node = &server.node;
    let listener = format!("PLAINTEXT://{}:{}", &*node.host, node.port);
    let settings: [(&'static str, String, ConfigType, &'static str); 13] = [
        ("advertised.listeners", listener, ConfigType::List, "Where clients connect to."),
        (
            "auto.create.topics.enable",
            config.auto_create_topics.to_string(),
            ConfigType::Boolean,
            "Create topics that clients ask for.",
        ),
        ("broker.id", node.id.to_string(), ConfigType::Int, "This server's id."),
        (
            "connections.max.idle.ms",
            config.idle_timeout.as_millis().to_string(),
            ConfigType::Long,
            "Idle connections are closed after this time.",
        ),
        ("default.replication.factor", "1".into(), ConfigType::Int, "There is one replica."),
        (
            "fetch.max.bytes",
            config.max_fetch_bytes.to_string(),
            ConfigType::Int,
            "Largest fetch response, a first batch that is larger excepted.",
        ),
        (
            "max.connections",
            config.max_connections.to_string(),
            ConfigType::Int,
            "Bound on open connections.",
        ),
        (
            "message.max.bytes",
            config.max_message_bytes.to_string(),
            ConfigType::Int,
            "Largest record batch.",
        ),
        ("min.insync.replicas", "1".into(), ConfigType::Int, "There is one replica."),
        ("node.id", node.id.to_string(), ConfigType::Int, "This server's id."),
        (
            "num.partitions",
            config.default_partitions.to_string(),
            ConfigType::Int,
            "Partitions of a topic that is created without a number.",
        ),
        (
            "queued.max.request.bytes",
            config.queued_request_bytes.to_string(),
            ConfigType::Long,
            "Bound on the bytes of requests in memory.",
        ),
        (
            "socket.request.max.bytes",
            config.max_request_bytes.to_string(),
            ConfigType::Int,
            "Largest request.",
        ),
    ];
    let entries = settings.into_iter().map(|(name, value, kind, documentation)| {
        entry(name, value, kind, Source::StaticBroker, documentation)
    });
    entries.collect()
}

fn entry(
    name: &'static str,
    value: String,
    kind: ConfigType,
    source: Source,
    documentation: &'static str,
) -> DescribeConfigsResourceResult {
    let name = StrBytes::from_static_str(name);
    let value = Some(StrBytes::from_string(value));
    DescribeConfigsResourceResult::default()
        .with_synonyms(vec![
            DescribeConfigsSynonym::default()
                .with_name(name.clone())
                .with_value(value.clone())
                .with_source(source as i8),
        ])
        .with_name(name)
        .with_value(value)
        // There is no API that changes one: a topic keeps what it was created with, the server what it was started with.
        .with_read_only(true)
        .with_config_source(source as i8)
        .with_config_type(kind as i8)
        .with_documentation(Some(StrBytes::from_static_str(documentation)))
}
