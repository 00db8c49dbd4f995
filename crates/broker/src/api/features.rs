//! The features that ApiVersions announces, and UpdateFeatures, which changes their levels in
//! Kafka.

use std::collections::HashMap;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::api_versions_response::{FinalizedFeatureKey, SupportedFeatureKey};
use kafka_protocol::messages::update_features_request::FeatureUpdateKey;
use kafka_protocol::messages::update_features_response::UpdatableFeatureResult;
use kafka_protocol::messages::{UpdateFeaturesRequest, UpdateFeaturesResponse};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::security::{Operation, Resource};

/// Kafka's features and their levels: clients select their protocol by them. A level belongs to the
/// version of the server, so it is also the only supported one. `metadata.version` is that of Kafka
/// 4.3, as far as clients can tell. (`kraft.version` concerns changes of the controller quorum,
/// which does not exist here.)
const FEATURES: &[(&str, i16)] = &[
    ("group.version", 1),
    ("metadata.version", 30),
    ("share.version", 1),
    ("transaction.version", 2),
];

/// Kafka's codes for an upgrade, a safe downgrade and an unsafe downgrade.
const UPGRADE_TYPES: std::ops::RangeInclusive<i8> = 1..=3;

pub(super) fn supported() -> Vec<SupportedFeatureKey> {
    let feature = |(name, level): &(&'static str, i16)| {
        SupportedFeatureKey::default()
            .with_name(StrBytes::from_static_str(name))
            .with_min_version(*level)
            .with_max_version(*level)
    };
    FEATURES.iter().map(feature).collect()
}

pub(super) fn finalized() -> Vec<FinalizedFeatureKey> {
    let feature = |(name, level): &(&'static str, i16)| {
        FinalizedFeatureKey::default()
            .with_name(StrBytes::from_static_str(name))
            .with_min_version_level(*level)
            .with_max_version_level(*level)
    };
    FEATURES.iter().map(feature).collect()
}

/// Handles UpdateFeatures. It succeeds if it requests the existing levels, whether it only
/// validates or not. Anything else fails as a whole, as in Kafka: with the first error and no
/// results.
pub(super) async fn update(cx: &Context, request: UpdateFeaturesRequest) -> UpdateFeaturesResponse {
    let failed = |kind: ResponseError, message: String| {
        UpdateFeaturesResponse::default()
            .with_error_code(kind.code())
            .with_error_message(Some(StrBytes::from_string(message)))
    };
    if let Err(error) = cx.authorize(Operation::Alter, Resource::Cluster) {
        return failed(error.kind(), error.to_string());
    }
    let updates = request.feature_updates;
    // Of several updates of one feature, the last one counts.
    let last: HashMap<&StrBytes, usize> =
        updates.iter().enumerate().map(|(at, update)| (&update.feature, at)).collect();
    for (at, update) in updates.iter().enumerate() {
        if last[&update.feature] != at {
            continue;
        }
        if let Err(reason) = check(update, cx.server.node.id) {
            let message = format!(
                "The update failed for all features since the following feature had an error: \
                 Invalid update version {} for feature {}. {reason}",
                update.max_version_level, update.feature
            );
            return failed(ResponseError::InvalidUpdateVersion, message);
        }
    }
    let mut response = UpdateFeaturesResponse::default().with_error_message(None);
    if cx.version <= 1 {
        let result = |update: FeatureUpdateKey| {
            UpdatableFeatureResult::default()
                .with_feature(update.feature)
                .with_error_message(Some(StrBytes::from_static_str("NONE")))
        };
        response.results = updates.into_iter().map(result).collect();
    }
    response
}

/// Kafka's checks and messages, in its order.
fn check(update: &FeatureUpdateKey, node: i32) -> Result<(), String> {
    if !UPGRADE_TYPES.contains(&update.upgrade_type) {
        return Err("The controller does not support the given upgrade type.".into());
    }
    let level = update.max_version_level;
    if level < 0 {
        return Err("A feature version cannot be less than 0.".into());
    }
    match FEATURES.iter().find(|(name, _)| **name == *update.feature) {
        Some((_, only)) if level == *only => Ok(()),
        Some((_, only)) => Err(format!("Local controller {node} only supports versions {only}")),
        None if level == 0 => Err(format!("Feature {} not found.", &*update.feature)),
        None => Err(format!("Local controller {node} does not support this feature.")),
    }
}
