//! DescribeConfigs: the settings of topics, the broker and groups.

use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::describe_configs_response::{
    DescribeConfigsResourceResult, DescribeConfigsResult, DescribeConfigsSynonym,
};
use kafka_protocol::messages::{DescribeConfigsRequest, DescribeConfigsResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::configs::broker::BrokerSetting;
use crate::configs::{ConfigType, Entity, Overrides, Setting, Source, Synonym, group, topic};
use crate::errors::ApiError;
use crate::security::{Operation, Resource};
use crate::server::Server;
use crate::topics::{Topic, check_name};
use crate::wire::once;

// Resource types by their protocol codes.
pub(super) const TOPIC: i8 = 2;
pub(super) const BROKER: i8 = 4;
pub(super) const BROKER_LOGGER: i8 = 8;
pub(super) const CLIENT_METRICS: i8 = 16;
pub(super) const GROUP: i8 = 32;

/// The greatest number of groups in a request. Every name is a valid group name, so the size of the
/// response would be unlimited.
const MAX_GROUPS: usize = 10_000;

/// A setting and the source of its value: the first of the synonyms, or else Kafka's default.
struct Described {
    name: &'static str,
    kind: ConfigType,
    value: Option<String>,
    synonyms: Vec<Synonym>,
    read_only: bool,
    documentation: &'static str,
}

/// A topic's settings with their effective values and sources.
pub(super) fn values_of_topic(
    server: &Server,
    topic: &Topic,
) -> impl Iterator<Item = (&'static str, String, Source)> {
    of_topic(server, topic).into_iter().map(|setting| {
        let source = setting.source();
        (setting.name, setting.value.unwrap_or_default(), source)
    })
}

fn of_topic(server: &Server, topic: &Topic) -> Vec<Described> {
    let describe = |setting| {
        let inherited = server.configs.topic_synonyms(setting);
        described(setting, &topic.overrides, Source::Topic, inherited)
    };
    topic::SETTINGS.iter().map(describe).collect()
}

fn of_group(server: &Server, name: &str) -> Vec<Described> {
    let overrides = server.configs.overrides(Entity::Group(name));
    let describe = |setting: &'static Setting| {
        let inherited = server.configs.group_synonyms(setting);
        described(setting, &overrides, Source::Group, inherited)
    };
    group::SETTINGS.iter().map(describe).collect()
}

/// The value of a setting from a resource's own settings, or else `inherited`.
fn described(
    setting: &'static Setting,
    own: &Overrides,
    source: Source,
    mut inherited: Vec<Synonym>,
) -> Described {
    if let Some(value) = own.get(setting.name) {
        inherited.insert(0, Synonym { name: setting.name, value: value.clone(), source });
    }
    let value = inherited.first().map_or(setting.default, |first| &first.value).to_owned();
    Described {
        name: setting.name,
        kind: setting.kind,
        value: Some(value),
        synonyms: inherited,
        read_only: false,
        documentation: setting.documentation,
    }
}

/// All settings of this broker.
fn of_this_broker(server: &Server) -> Vec<Described> {
    let describe = |setting: &BrokerSetting| {
        let mut synonyms = server.configs.broker_synonyms(setting);
        if setting.name == "advertised.listeners" {
            let listeners = server.listeners.iter();
            let advertised = listeners.map(|listener| listener.advertised()).collect::<Vec<_>>();
            let (value, source) = (advertised.join(","), Source::StaticBroker);
            synonyms.insert(0, Synonym { name: setting.name, value, source });
        }
        Described {
            name: setting.name,
            kind: setting.kind,
            value: synonyms.first().map(|first| first.value.clone()),
            synonyms,
            read_only: setting.dynamic.is_none(),
            documentation: setting.documentation,
        }
    };
    server.configs.broker_settings.iter().map(describe).collect()
}

/// The settings that were set dynamically for all brokers.
fn of_all_brokers(server: &Server) -> Vec<Described> {
    let set = server.configs.overrides(Entity::Brokers);
    let settings = server.configs.broker_settings.iter();
    let describe = |setting: &BrokerSetting| {
        let value = set.get(setting.name)?.clone();
        let source = Source::DynamicDefault;
        Some(Described {
            name: setting.name,
            kind: setting.kind,
            value: Some(value.clone()),
            synonyms: vec![Synonym { name: setting.name, value, source }],
            read_only: false,
            documentation: setting.documentation,
        })
    };
    settings.filter_map(describe).collect()
}

pub(super) async fn handle(
    cx: &Context,
    request: DescribeConfigsRequest,
) -> DescribeConfigsResponse {
    let mut groups = 0;
    let describe = |resource: &DescribeConfigsResource| {
        let result = DescribeConfigsResult::default()
            .with_resource_type(resource.resource_type)
            .with_resource_name(resource.resource_name.clone());
        groups += usize::from(resource.resource_type == GROUP);
        let found = match groups > MAX_GROUPS && resource.resource_type == GROUP {
            true => Err(ApiError::InvalidRequest(format!(
                "a request can describe at most {MAX_GROUPS} groups"
            ))),
            false => configs(cx, resource),
        };
        match found {
            Ok(mut configs) => {
                // Kafka also treats an empty list as a request for all.
                let wanted = resource.configuration_keys.as_ref().filter(|keys| !keys.is_empty());
                if let Some(wanted) = wanted {
                    configs.retain(|config| wanted.iter().any(|key| &**key == config.name));
                }
                let entry = |config: Described| {
                    config.entry(request.include_synonyms, request.include_documentation)
                };
                result.with_configs(configs.into_iter().map(entry).collect())
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

fn configs(cx: &Context, resource: &DescribeConfigsResource) -> Result<Vec<Described>, ApiError> {
    let (server, name) = (&cx.server, &*resource.resource_name);
    match resource.resource_type {
        BROKER => cx.authorize(Operation::DescribeConfigs, Resource::Cluster)?,
        GROUP => cx.authorize(Operation::DescribeConfigs, Resource::Group(name))?,
        TOPIC => cx.authorize(Operation::DescribeConfigs, Resource::Topic(name))?,
        _ => {}
    }
    match resource.resource_type {
        TOPIC => {
            check_name(name)?;
            Ok(of_topic(server, &*server.topics.by_name(name)?))
        }
        BROKER if name.is_empty() => Ok(of_all_brokers(server)),
        BROKER => {
            check_this_broker(server, name)?;
            Ok(of_this_broker(server))
        }
        GROUP if name.is_empty() => {
            Err(ApiError::InvalidRequest("Group name must not be empty".into()))
        }
        GROUP => Ok(of_group(server, name)),
        other => Err(not_configurable(other)),
    }
}

/// Checks that the name is this broker's.
pub(super) fn check_this_broker(server: &Server, name: &str) -> Result<(), ApiError> {
    let id = server.node.id;
    match name.parse::<i32>() {
        Ok(named) if named == id => Ok(()),
        Ok(_) => Err(ApiError::InvalidRequest(format!(
            "Unexpected broker id, expected {id} or empty string, but received {name}"
        ))),
        Err(_) => Err(ApiError::InvalidRequest(format!(
            "Broker id must be an integer, but it is: {name}"
        ))),
    }
}

/// The error for a resource type without settings.
pub(super) fn not_configurable(resource_type: i8) -> ApiError {
    ApiError::InvalidRequest(match resource_type {
        BROKER_LOGGER => {
            "log levels are set at the start of the server and cannot be changed".to_owned()
        }
        CLIENT_METRICS => "this server does not collect client metrics".to_owned(),
        other => format!("Unsupported resource type: {other}"),
    })
}

impl Described {
    fn source(&self) -> Source {
        self.synonyms.first().map_or(Source::Default, |first| first.source)
    }

    fn entry(self, synonyms: bool, documentation: bool) -> DescribeConfigsResourceResult {
        let synonym = |synonym: &Synonym| {
            DescribeConfigsSynonym::default()
                .with_name(StrBytes::from_static_str(synonym.name))
                .with_value(Some(StrBytes::from_string(synonym.value.clone())))
                .with_source(synonym.source as i8)
        };
        let listed = if synonyms { self.synonyms.iter().map(synonym).collect() } else { vec![] };
        let text = documentation.then(|| StrBytes::from_static_str(self.documentation));
        DescribeConfigsResourceResult::default()
            .with_name(StrBytes::from_static_str(self.name))
            .with_config_source(self.source() as i8)
            .with_value(self.value.map(StrBytes::from_string))
            .with_synonyms(listed)
            .with_read_only(self.read_only)
            .with_is_sensitive(false)
            .with_config_type(self.kind as i8)
            .with_documentation(text)
    }
}
