//! ApiVersions: the supported APIs and their versions.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::api_versions_response::ApiVersion;
use kafka_protocol::messages::{ApiKey, ApiVersionsRequest, ApiVersionsResponse};

use super::{APIS, Context, features};
use crate::wire::response::{EncodeError, Response};

pub(super) async fn handle(cx: &Context, request: ApiVersionsRequest) -> ApiVersionsResponse {
    let valid = cx.version < 3
        || (is_valid(&request.client_software_name) && is_valid(&request.client_software_version));
    if !valid {
        return ApiVersionsResponse::default()
            .with_error_code(ResponseError::InvalidRequest.code());
    }
    let response = ApiVersionsResponse::default().with_api_keys(served());
    if cx.version < 3 {
        return response;
    }
    response
        .with_supported_features(features::supported())
        .with_finalized_features_epoch(0)
        .with_finalized_features(features::finalized())
}

/// The response to an unsupported version of ApiVersions: version 0, which every client can read.
pub(super) fn unsupported(correlation_id: i32) -> Result<Response, EncodeError> {
    let response = ApiVersionsResponse::default()
        .with_error_code(ResponseError::UnsupportedVersion.code())
        .with_api_keys(served());
    Response::encode(correlation_id, 0, &response, 0)
}

/// The first version of Produce that is announced, although versions before 3 are refused, as in
/// Kafka since 4.0 (KAFKA-18659). librdkafka before 2.11.1 does not send batches compressed by
/// gzip, Snappy or LZ4 to a server without version 0; it sends them uncompressed.
const FIRST_ANNOUNCED_PRODUCE: i16 = 0;

impl super::Api {
    /// The first version that is announced to clients.
    pub(crate) fn announced_min(&self) -> i16 {
        if self.key == ApiKey::Produce { FIRST_ANNOUNCED_PRODUCE } else { self.min }
    }
}

fn served() -> Vec<ApiVersion> {
    let version = |api: &super::Api| {
        ApiVersion::default()
            .with_api_key(api.key as i16)
            .with_min_version(api.announced_min())
            .with_max_version(api.max)
    };
    APIS.iter().map(version).collect()
}

/// Kafka's rule for a client's software name and version: letters, digits, `.` and `-`, the last
/// two not at the ends.
fn is_valid(name: &str) -> bool {
    let alphanumeric = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    alphanumeric(name.chars().next())
        && alphanumeric(name.chars().last())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_software_names_follow_kafkas_rule() {
        for good in ["librdkafka", "apache-kafka-java", "4.1.0", "a"] {
            assert!(is_valid(good), "{good}");
        }
        for bad in ["", "-a", "a.", "a b", "ä"] {
            assert!(!is_valid(bad), "{bad}");
        }
    }
}
