//! ACLs, and the users whose passwords a source does not reveal.

use std::collections::BTreeSet;

use kafka_protocol::ResponseError;
use kafka_protocol::messages::create_acls_request::AclCreation;
use kafka_protocol::messages::{
    CreateAclsRequest, DescribeAclsRequest, DescribeUserScramCredentialsRequest,
};
use kafka_protocol::protocol::StrBytes;

use crate::kafka::{Client, refusal};
use crate::output::Failure;
use crate::topic::TOPIC_RESOURCE;

/// Kafka's filter values for any resource type, pattern, operation and permission.
const ANY: i8 = 1;
/// Kafka's pattern type of a name that is taken as it is.
const LITERAL: i8 = 3;

/// What a source shows of its ACLs.
pub(super) enum Shown {
    Acls(Vec<AclCreation>),
    /// The reason why it shows none.
    Hidden(String),
}

/// Reads the ACLs of the source, without those of topics that are not imported.
///
/// # Errors
/// It does not answer.
pub(super) fn read(
    client: &mut Client,
    is_imported: impl Fn(&str) -> bool,
) -> Result<Shown, Failure> {
    let Ok(version) = client.version::<DescribeAclsRequest>(3) else {
        return Ok(Shown::Acls(Vec::new()));
    };
    let request = DescribeAclsRequest::default()
        .with_resource_type_filter(ANY)
        .with_resource_name_filter(None)
        .with_principal_filter(None)
        .with_host_filter(None)
        .with_pattern_type_filter(ANY)
        .with_operation(ANY)
        .with_permission_type(ANY);
    let answer = client.call(version, &request).map_err(Failure::new)?;
    if answer.error_code == ResponseError::SecurityDisabled.code() {
        return Ok(Shown::Acls(Vec::new()));
    }
    if let Some(reason) = refusal(answer.error_code, answer.error_message.as_ref()) {
        return Ok(Shown::Hidden(reason));
    }
    let mut acls = Vec::new();
    for resource in &answer.resources {
        let is_other = resource.resource_type == TOPIC_RESOURCE
            && resource.pattern_type == LITERAL
            && &*resource.resource_name != "*"
            && !is_imported(&resource.resource_name);
        if is_other {
            continue;
        }
        acls.extend(resource.acls.iter().map(|acl| {
            AclCreation::default()
                .with_resource_type(resource.resource_type)
                .with_resource_name(resource.resource_name.clone())
                .with_resource_pattern_type(resource.pattern_type)
                .with_principal(acl.principal.clone())
                .with_host(acl.host.clone())
                .with_operation(acl.operation)
                .with_permission_type(acl.permission_type)
        }));
    }
    Ok(Shown::Acls(acls))
}

/// Creates ACLs at the target. Returns the reasons for which it refuses some; `None` if it has no
/// ACLs at all.
///
/// # Errors
/// It does not answer.
pub(super) fn create(
    client: &mut Client,
    acls: Vec<AclCreation>,
) -> Result<Option<Vec<String>>, Failure> {
    if acls.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let version = client.version::<CreateAclsRequest>(3).map_err(Failure::new)?;
    let request = CreateAclsRequest::default().with_creations(acls);
    let answer = client.call(version, &request).map_err(Failure::new)?;
    let disabled = ResponseError::SecurityDisabled.code();
    if answer.results.iter().any(|result| result.error_code == disabled) {
        return Ok(None);
    }
    let refused = request.creations.iter().zip(&answer.results).filter_map(|(acl, result)| {
        let reason = refusal(result.error_code, result.error_message.as_ref())?;
        Some(format!("ACL of {} on {}: {reason}", &*acl.principal, &*acl.resource_name))
    });
    Ok(Some(refused.collect()))
}

/// Returns the names of the users that log in with SCRAM. None if the server does not show them.
///
/// # Errors
/// It does not answer.
pub(super) fn users(client: &mut Client) -> Result<Option<BTreeSet<String>>, Failure> {
    let Ok(version) = client.version::<DescribeUserScramCredentialsRequest>(0) else {
        return Ok(None);
    };
    let request = DescribeUserScramCredentialsRequest::default().with_users(None);
    let answer = client.call(version, &request).map_err(Failure::new)?;
    if refusal(answer.error_code, None).is_some() {
        return Ok(None);
    }
    let name = |user: &StrBytes| user.to_string();
    Ok(Some(answer.results.iter().map(|result| name(&result.user)).collect()))
}
