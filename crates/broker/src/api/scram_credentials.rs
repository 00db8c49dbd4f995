//! AlterUserScramCredentials and DescribeUserScramCredentials: users and their passwords.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use alluvium_stream::StoreError;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::alter_user_scram_credentials_request::ScramCredentialUpsertion;
use kafka_protocol::messages::describe_user_scram_credentials_response::{
    CredentialInfo, DescribeUserScramCredentialsResult,
};
use kafka_protocol::messages::{
    AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse,
    alter_user_scram_credentials_response as alter_response,
};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::java_order;
use crate::security::{
    Credential, Hash, ITERATIONS, Operation, Resource, UserChange, UserError, check_name,
};

type Refusal = (ResponseError, String);

/// The longest accepted salt and salted password, in bytes.
const MAX_SECRET_BYTES: usize = 1024;

pub(super) async fn alter(
    cx: &Context,
    request: AlterUserScramCredentialsRequest,
) -> AlterUserScramCredentialsResponse {
    // All changes of a user have one result: success of all, or the first error.
    let mut users: BTreeMap<StrBytes, Result<Vec<UserChange>, Refusal>> = BTreeMap::new();
    let refused = cx.authorize(Operation::Alter, Resource::Cluster);
    let refused = refused.and_then(|()| cx.check_writable()).err();
    let mut seen = BTreeSet::new();
    let deletions = request.deletions.iter().map(|d| (&d.name, d.mechanism, None));
    let upsertions = request.upsertions.iter().map(|u| (&u.name, u.mechanism, Some(u)));
    for (name, mechanism, upsertion) in deletions.chain(upsertions) {
        let change = if let Some(refused) = &refused {
            Err((refused.kind(), refused.to_string()))
        } else if seen.insert((name.clone(), mechanism)) {
            check(cx, name, mechanism, upsertion)
        } else {
            let twice = "A user credential cannot be altered twice in the same request";
            Err((ResponseError::DuplicateResource, twice.into()))
        };
        let of_user = users.entry(name.clone()).or_insert_with(|| Ok(Vec::new()));
        match (of_user.as_mut(), change) {
            (Ok(changes), Ok(change)) => changes.push(change),
            (Ok(_), Err(refusal)) => *of_user = Err(refusal),
            (Err(_), _) => {}
        }
    }
    let mut response = AlterUserScramCredentialsResponse::default();
    for (name, changes) in users {
        let outcome = match changes {
            Err(refusal) => Err(refusal),
            Ok(changes) => {
                let changed = cx.server.authentication.users.change(changes).await;
                changed.map_err(|error| {
                    let kind = match error {
                        UserError::TooMany | UserError::Store(StoreError::InvalidChange(_)) => {
                            ResponseError::PolicyViolation
                        }
                        UserError::Store(StoreError::LogFull) => ResponseError::RequestTimedOut,
                        _ => ResponseError::UnknownServerError,
                    };
                    (kind, error.to_string())
                })
            }
        };
        let mut result = alter_response::AlterUserScramCredentialsResult::default()
            .with_user(name)
            .with_error_message(None);
        if let Err((kind, message)) = outcome {
            result.error_code = kind.code();
            result.error_message = Some(StrBytes::from_string(message));
        }
        response.results.push(result);
    }
    let hash = |r: &alter_response::AlterUserScramCredentialsResult| java_order::hash(&r.user);
    java_order::sort(&mut response.results, java_order::MIN_CAPACITY, hash);
    response
}

fn check(
    cx: &Context,
    name: &StrBytes,
    mechanism: i8,
    upsertion: Option<&ScramCredentialUpsertion>,
) -> Result<UserChange, Refusal> {
    let unacceptable = |message: &str| (ResponseError::UnacceptableCredential, message.to_owned());
    check_name(name).map_err(|error| unacceptable(&error.to_string()))?;
    let unknown =
        || (ResponseError::UnsupportedSaslMechanism, "Unknown SCRAM mechanism".to_owned());
    let hash = Hash::from_number(mechanism).ok_or_else(unknown)?;
    let key = (name.to_string(), hash);
    let Some(upsertion) = upsertion else {
        return match cx.server.authentication.users.credential(name, hash) {
            Some(_) => Ok((key, None)),
            None => Err((
                ResponseError::ResourceNotFound,
                "Attempt to delete a user credential that does not exist".into(),
            )),
        };
    };
    let iterations = u32::try_from(upsertion.iterations).unwrap_or(0);
    if iterations < *ITERATIONS.start() {
        return Err(unacceptable("Too few iterations"));
    }
    if iterations > *ITERATIONS.end() {
        return Err(unacceptable("Too many iterations"));
    }
    let sizes = 1..=MAX_SECRET_BYTES;
    if !sizes.contains(&upsertion.salt.len()) || !sizes.contains(&upsertion.salted_password.len()) {
        return Err(unacceptable("salt and salted password must have 1 to 1024 bytes"));
    }
    let iterations =
        NonZeroU32::new(iterations).ok_or_else(|| unacceptable("Too few iterations"))?;
    let salt = upsertion.salt.to_vec();
    Ok((key, Some(Credential::of_salted(hash, &upsertion.salted_password, salt, iterations))))
}

pub(super) async fn describe(
    cx: &Context,
    request: DescribeUserScramCredentialsRequest,
) -> DescribeUserScramCredentialsResponse {
    if let Err(error) = cx.authorize(Operation::Describe, Resource::Cluster) {
        return DescribeUserScramCredentialsResponse::default()
            .with_error_code(error.code())
            .with_error_message(error.message());
    }
    let mut found: BTreeMap<String, Vec<CredentialInfo>> = BTreeMap::new();
    for (user, hash, iterations) in cx.server.authentication.users.all() {
        let iterations = i32::try_from(iterations.get()).expect("iterations are bounded");
        let info = CredentialInfo::default().with_mechanism(hash as i8).with_iterations(iterations);
        found.entry(user).or_default().push(info);
    }
    let wanted = request.users.filter(|wanted| !wanted.is_empty());
    let result = |user: StrBytes, infos: Vec<CredentialInfo>| {
        DescribeUserScramCredentialsResult::default().with_user(user).with_credential_infos(infos)
    };
    let refused = |user: &StrBytes, kind: ResponseError, message: &str| {
        let message = format!("{message}: {}", &**user);
        result(user.clone(), Vec::new())
            .with_error_code(kind.code())
            .with_error_message(Some(StrBytes::from_string(message)))
    };
    let answer = |mut results: Vec<DescribeUserScramCredentialsResult>| {
        java_order::sort(&mut results, java_order::MIN_CAPACITY, |r| java_order::hash(&r.user));
        DescribeUserScramCredentialsResponse::default().with_results(results)
    };
    let Some(wanted) = wanted else {
        let all = found.into_iter().map(|(user, infos)| result(StrBytes::from_string(user), infos));
        return answer(all.collect());
    };
    let mut counts: BTreeMap<&StrBytes, usize> = BTreeMap::new();
    for user in &wanted {
        *counts.entry(&user.name).or_default() += 1;
    }
    let results = counts.into_iter().map(|(user, count)| match found.remove(&**user) {
        _ if count > 1 => refused(
            user,
            ResponseError::DuplicateResource,
            "Cannot describe SCRAM credentials for the same user twice in a single request",
        ),
        Some(infos) => result(user.clone(), infos),
        None => refused(
            user,
            ResponseError::ResourceNotFound,
            "Attempt to describe a user credential that does not exist",
        ),
    });
    answer(results.collect())
}
