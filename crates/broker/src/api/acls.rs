//! CreateAcls, DescribeAcls and DeleteAcls.

use std::collections::{BTreeMap, BTreeSet};

use kafka_protocol::messages::create_acls_request::AclCreation;
use kafka_protocol::messages::create_acls_response::AclCreationResult;
use kafka_protocol::messages::delete_acls_request::DeleteAclsFilter;
use kafka_protocol::messages::delete_acls_response::{
    DeleteAclsFilterResult, DeleteAclsMatchingAcl,
};
use kafka_protocol::messages::describe_acls_response::{AclDescription, DescribeAclsResource};
use kafka_protocol::messages::{
    CreateAclsRequest, CreateAclsResponse, DeleteAclsRequest, DeleteAclsResponse,
    DescribeAclsRequest, DescribeAclsResponse,
};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::errors::ApiError;
use crate::security::{
    ALLOW, Acl, AclError, Authorizer, CLUSTER_NAME, DENY, Filter, LITERAL, Operation, PREFIXED,
    Resource, ResourceType,
};

/// The longest name of a resource, a principal or a host, in bytes.
const MAX_TEXT_BYTES: usize = 1024;

pub(super) async fn create(cx: &Context, request: CreateAclsRequest) -> CreateAclsResponse {
    let checked: Vec<Result<Acl, ApiError>> = request.creations.iter().map(check).collect();
    let good: BTreeSet<_> = checked.iter().flatten().cloned().collect();
    let authorizer = authorizer(cx, Operation::Alter);
    let added = match &authorizer {
        Ok(authorizer) if !good.is_empty() => authorizer.add(good).await.map_err(ApiError::from),
        _ => Ok(()),
    };
    let refused = authorizer.err();
    let results = checked.iter().map(|checked| {
        match refused.as_ref().or(checked.as_ref().err()).or(added.as_ref().err()) {
            // Kafka leaves the text empty here, as in the response to DescribeAcls.
            None => AclCreationResult::default(),
            Some(error) => AclCreationResult::default()
                .with_error_code(error.code())
                .with_error_message(error.message()),
        }
    });
    CreateAclsResponse::default().with_results(results.collect())
}

pub(super) async fn describe(cx: &Context, request: DescribeAclsRequest) -> DescribeAclsResponse {
    let filter = filter(
        (request.resource_type_filter, request.pattern_type_filter),
        [request.resource_name_filter, request.principal_filter, request.host_filter],
        (request.operation, request.permission_type),
    );
    let found =
        authorizer(cx, Operation::Describe).and_then(|authorizer| Ok(authorizer.find(&filter?)));
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            return DescribeAclsResponse::default()
                .with_error_code(error.code())
                .with_error_message(error.message());
        }
    };
    let mut by_resource: BTreeMap<(i8, String, i8), Vec<AclDescription>> = BTreeMap::new();
    for acl in found {
        let description = AclDescription::default()
            .with_principal(StrBytes::from_string(acl.principal))
            .with_host(StrBytes::from_string(acl.host))
            .with_operation(acl.operation)
            .with_permission_type(acl.permission);
        let resource = (acl.resource_type, acl.resource_name, acl.pattern_type);
        by_resource.entry(resource).or_default().push(description);
    }
    let resource = |((kind, name, pattern), acls)| {
        DescribeAclsResource::default()
            .with_resource_type(kind)
            .with_resource_name(StrBytes::from_string(name))
            .with_pattern_type(pattern)
            .with_acls(acls)
    };
    DescribeAclsResponse::default().with_resources(by_resource.into_iter().map(resource).collect())
}

pub(super) async fn delete(cx: &Context, request: DeleteAclsRequest) -> DeleteAclsResponse {
    let checked: Vec<Result<Filter, ApiError>> = request
        .filters
        .into_iter()
        .map(|wanted: DeleteAclsFilter| {
            filter(
                (wanted.resource_type_filter, wanted.pattern_type_filter),
                [wanted.resource_name_filter, wanted.principal_filter, wanted.host_filter],
                (wanted.operation, wanted.permission_type),
            )
        })
        .collect();
    let good: Vec<_> = checked.iter().flatten().cloned().collect();
    let authorizer = authorizer(cx, Operation::Alter);
    let deleted = match &authorizer {
        Ok(authorizer) if !good.is_empty() => {
            authorizer.delete(&good).await.map_err(ApiError::from)
        }
        _ => Ok(Vec::new()),
    };
    let refused = authorizer.err();
    let (deleted, failed) = match deleted {
        Ok(deleted) => (deleted, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let mut deleted = deleted.into_iter();
    let results = checked.iter().map(|checked| {
        match refused.as_ref().or(checked.as_ref().err()).or(failed.as_ref()) {
            None => {
                let deleted = deleted.next().into_iter().flatten();
                DeleteAclsFilterResult::default()
                    .with_error_message(None)
                    .with_matching_acls(deleted.map(deleted_acl).collect())
            }
            Some(error) => DeleteAclsFilterResult::default()
                .with_error_code(error.code())
                .with_error_message(error.message()),
        }
    });
    DeleteAclsResponse::default().with_filter_results(results.collect())
}

fn deleted_acl(acl: Acl) -> DeleteAclsMatchingAcl {
    DeleteAclsMatchingAcl::default()
        .with_error_message(None)
        .with_resource_type(acl.resource_type)
        .with_resource_name(StrBytes::from_string(acl.resource_name))
        .with_pattern_type(acl.pattern_type)
        .with_principal(StrBytes::from_string(acl.principal))
        .with_host(StrBytes::from_string(acl.host))
        .with_operation(acl.operation)
        .with_permission_type(acl.permission)
}

/// The authorizer, if the client may do `operation` with the cluster.
fn authorizer(cx: &Context, operation: Operation) -> Result<&Authorizer, ApiError> {
    let authorizer = cx.server.authorizer.as_ref().ok_or(ApiError::NoAuthorizer)?;
    cx.authorize(operation, Resource::Cluster)?;
    if operation == Operation::Alter {
        cx.check_writable()?;
    }
    Ok(authorizer)
}

fn filter(
    (resource_type, pattern_type): (i8, i8),
    [resource_name, principal, host]: [Option<StrBytes>; 3],
    (operation, permission): (i8, i8),
) -> Result<Filter, ApiError> {
    let text = |text: Option<StrBytes>| text.map(|text| text.to_string());
    let filter = Filter {
        resource_type,
        resource_name: text(resource_name),
        pattern_type,
        principal: text(principal),
        host: text(host),
        operation,
        permission,
    };
    match filter.is_valid() {
        true => Ok(filter),
        false => Err(ApiError::InvalidRequest(
            "the filter has an unknown resource type, pattern type, operation or permission".into(),
        )),
    }
}

fn check(wanted: &AclCreation) -> Result<Acl, ApiError> {
    let refuse = |why: &str| Err(ApiError::InvalidRequest(why.into()));
    let texts = [&wanted.resource_name, &wanted.principal, &wanted.host];
    if texts.iter().any(|text| text.is_empty() || text.len() > MAX_TEXT_BYTES) {
        return refuse("resource name, principal and host must have 1 to 1024 bytes");
    }
    let Some(kind) = ResourceType::from_number(wanted.resource_type) else {
        return refuse("unknown resource type");
    };
    if kind == ResourceType::Cluster && &*wanted.resource_name != CLUSTER_NAME {
        return refuse("The only valid name for the CLUSTER resource is kafka-cluster");
    }
    if ![LITERAL, PREFIXED].contains(&wanted.resource_pattern_type) {
        return refuse("the pattern type must be LITERAL or PREFIXED");
    }
    if !Operation::is_number(wanted.operation) {
        return refuse("unknown operation");
    }
    if ![DENY, ALLOW].contains(&wanted.permission_type) {
        return refuse("the permission must be DENY or ALLOW");
    }
    if wanted
        .principal
        .split_once(':')
        .is_none_or(|(kind, name)| kind.is_empty() || name.is_empty())
    {
        return refuse("a principal must have the form User:alice");
    }
    Ok(Acl {
        resource_type: wanted.resource_type,
        resource_name: wanted.resource_name.to_string(),
        pattern_type: wanted.resource_pattern_type,
        principal: wanted.principal.to_string(),
        host: wanted.host.to_string(),
        operation: wanted.operation,
        permission: wanted.permission_type,
    })
}

impl From<AclError> for ApiError {
    fn from(error: AclError) -> Self {
        match error {
            AclError::TooMany | AclError::TooLarge => Self::PolicyViolation(error.to_string()),
            AclError::Store(cause) => cause.into(),
            AclError::Damaged(_) => Self::Internal(error.to_string()),
        }
    }
}
