//! The errors of requests, and their mapping to Kafka's error codes.

use alluvium_stream::{AppendError, FetchError, StoreError, StreamOffset};
use kafka_protocol::error::ResponseError;
use kafka_protocol::protocol::StrBytes;

use crate::security::ResourceType;

/// Why a request, or its part for one topic or partition, fails. The text is for people; it goes
/// into the response's error message where the protocol has one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("the topic or partition does not exist")]
    UnknownTopicOrPartition,
    #[error("no topic has this ID")]
    UnknownTopicId,
    #[error("{0}")]
    InvalidTopicName(String),
    #[error("topic {0} exists already")]
    TopicExists(String),
    #[error("{0}")]
    InvalidPartitions(String),
    #[error(
        "replication factor {0} is not possible: this server keeps one replica, so only 1 and -1 \
         are allowed"
    )]
    InvalidReplicationFactor(i16),
    #[error("{0}")]
    InvalidReplicaAssignment(String),
    #[error("{0}")]
    InvalidConfig(String),
    #[error("{0}")]
    PolicyViolation(String),
    #[error(
        "the topic is being imported, and takes no batches or transactions of producers until that \
         is done (alluvium.import)"
    )]
    Importing,
    #[error("The throttling quota has been exceeded.")]
    QuotaExceeded,
    #[error("{0}")]
    InvalidRequest(String),
    #[error("acks is {0}, but must be 0, 1 or -1")]
    InvalidRequiredAcks(i16),
    #[error("{0}")]
    CorruptBatch(String),
    #[error("{0}")]
    InvalidRecord(String),
    #[error("{0}")]
    InvalidTimestamp(String),
    #[error(
        "One or more records have been rejected due to {}",
        if *times { "invalid timestamp" } else { "records without a key in a compacted topic" }
    )]
    RejectedRecords {
        /// Whether the timestamps are invalid; else keys are missing.
        times: bool,
        /// Some of the rejected records: index in the batch, and reason.
        records: Vec<(i32, String)>,
    },
    #[error("a batch of {len_bytes} bytes exceeds the limit of {max_bytes}")]
    BatchTooLarge { len_bytes: u64, max_bytes: u64 },
    #[error("{0}")]
    UnsupportedCompression(String),
    #[error(
        "producer {producer_id} sent sequence number {got} in epoch {epoch}, expected {expected}"
    )]
    OutOfOrderSequence { producer_id: i64, epoch: i16, got: i32, expected: i32 },
    #[error("producer {producer_id} sent epoch {got}, but epoch {current} is current")]
    InvalidProducerEpoch { producer_id: i64, got: i16, current: i16 },
    #[error("{reason}")]
    Transaction { kind: ResponseError, reason: String },
    #[error("offset {offset} is outside {start}..={end}")]
    OffsetOutOfRange { offset: i64, start: StreamOffset, end: StreamOffset },
    #[error("leader epoch {0} is newer than the partition's")]
    UnknownLeaderEpoch(i32),
    #[error("leader epoch {0} is older than the partition's")]
    FencedLeaderEpoch(i32),
    #[error("{0}")]
    NotLeader(String),
    #[error("the fetch session does not exist")]
    FetchSessionNotFound,
    #[error("fetch session epoch is {got}, expected {expected}")]
    InvalidFetchSessionEpoch { got: i32, expected: i32 },
    #[error(
        "the request names topics differently (by name or ID) than the one that began its fetch \
         session"
    )]
    FetchSessionTopicId,
    #[error("the share session does not exist")]
    ShareSessionNotFound,
    #[error("share session epoch is {got}, expected {expected}")]
    InvalidShareSessionEpoch { got: i32, expected: i32 },
    #[error("the limit of {0} share sessions, or that of their partitions, is reached")]
    ShareSessionLimit(usize),
    #[error("the member has not acquired all of these records, or no longer holds them")]
    InvalidRecordState,
    #[error("the log had no free space within the request's timeout; nothing was written")]
    TimedOut,
    #[error("the log has no free space now, nothing has changed: try again")]
    LogFull,
    #[error(
        "objects could not be read within the request's timeout; the parts that were read are \
        cached"
    )]
    ObjectsTooSlow,
    #[error("resources of type {0} cannot be configured")]
    UnsupportedResourceType(i8),
    #[error("timestamp {0} is not defined in this version")]
    UnsupportedTimestamp(i64),
    #[error("the ACLs do not allow this ({0:?})")]
    Unauthorized(ResourceType),
    #[error("No Authorizer is configured.")]
    NoAuthorizer,
    #[error("this server is read-only")]
    ReadOnly,
    /// Records are lost: a retry cannot succeed.
    #[error("records are lost: {0}")]
    Lost(String),
    #[error("storage: {0}")]
    Storage(String),
    #[error("{0}")]
    Internal(String),
}

impl ApiError {
    /// Kafka's error for this one.
    pub(crate) fn kind(&self) -> ResponseError {
        use ResponseError as E;
        match self {
            Self::UnknownTopicOrPartition => E::UnknownTopicOrPartition,
            Self::UnknownTopicId => E::UnknownTopicId,
            Self::InvalidTopicName(_) => E::InvalidTopicException,
            Self::TopicExists(_) => E::TopicAlreadyExists,
            Self::InvalidPartitions(_) => E::InvalidPartitions,
            Self::InvalidReplicationFactor(_) => E::InvalidReplicationFactor,
            Self::InvalidReplicaAssignment(_) => E::InvalidReplicaAssignment,
            Self::InvalidConfig(_) => E::InvalidConfig,
            // Clients take it for final, and most responses that have it have a text, too.
            Self::PolicyViolation(_) | Self::Importing | Self::ReadOnly => E::PolicyViolation,
            Self::QuotaExceeded => E::ThrottlingQuotaExceeded,
            Self::InvalidRequest(_) => E::InvalidRequest,
            Self::InvalidRequiredAcks(_) => E::InvalidRequiredAcks,
            Self::CorruptBatch(_) => E::CorruptMessage,
            Self::InvalidRecord(_) => E::InvalidRecord,
            Self::InvalidTimestamp(_) | Self::RejectedRecords { times: true, .. } => {
                E::InvalidTimestamp
            }
            Self::RejectedRecords { times: false, .. } => E::InvalidRecord,
            Self::BatchTooLarge { .. } => E::MessageTooLarge,
            Self::UnsupportedCompression(_) => E::UnsupportedCompressionType,
            Self::OutOfOrderSequence { .. } => E::OutOfOrderSequenceNumber,
            Self::InvalidProducerEpoch { .. } => E::InvalidProducerEpoch,
            Self::Transaction { kind, .. } => *kind,
            Self::OffsetOutOfRange { .. } => E::OffsetOutOfRange,
            Self::UnknownLeaderEpoch(_) => E::UnknownLeaderEpoch,
            Self::FencedLeaderEpoch(_) => E::FencedLeaderEpoch,
            Self::NotLeader(_) => E::NotLeaderOrFollower,
            Self::FetchSessionNotFound => E::FetchSessionIdNotFound,
            Self::InvalidFetchSessionEpoch { .. } => E::InvalidFetchSessionEpoch,
            Self::FetchSessionTopicId => E::FetchSessionTopicIdError,
            Self::ShareSessionNotFound => E::ShareSessionNotFound,
            Self::InvalidShareSessionEpoch { .. } => E::InvalidShareSessionEpoch,
            Self::ShareSessionLimit(_) => E::ShareSessionLimitReached,
            Self::InvalidRecordState => E::InvalidRecordState,
            // Clients retry it, and report the reason where the protocol has a text for it.
            Self::TimedOut | Self::LogFull | Self::ObjectsTooSlow => E::RequestTimedOut,
            Self::UnsupportedTimestamp(_) | Self::UnsupportedResourceType(_) => {
                E::UnsupportedVersion
            }
            Self::Unauthorized(kind) => match kind {
                ResourceType::Topic => E::TopicAuthorizationFailed,
                ResourceType::Group => E::GroupAuthorizationFailed,
                ResourceType::TransactionalId => E::TransactionalIdAuthorizationFailed,
                ResourceType::DelegationToken => E::DelegationTokenAuthorizationFailed,
                ResourceType::Cluster | ResourceType::User => E::ClusterAuthorizationFailed,
            },
            Self::NoAuthorizer => E::SecurityDisabled,
            // The only code of a Fetch at which clients stop reading: they retry
            // KAFKA_STORAGE_ERROR silently and forever.
            Self::Lost(_) => E::CorruptMessage,
            Self::Storage(_) => E::KafkaStorageError,
            Self::Internal(_) => E::UnknownServerError,
        }
    }

    /// The error's number on the wire.
    pub(crate) fn code(&self) -> i16 {
        self.kind().code()
    }

    /// The text for a response's error message field.
    pub(crate) fn message(&self) -> Option<StrBytes> {
        Some(StrBytes::from_string(self.to_string()))
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            // The writer that fenced this one now leads the partition.
            StoreError::Fenced { .. } => Self::NotLeader(error.to_string()),
            StoreError::Object(lost) if lost.is_loss() => Self::Lost(lost.to_string()),
            StoreError::LogFull => Self::LogFull,
            StoreError::ReadOnly => Self::ReadOnly,
            // Callers check everything but the length of the list of changes, which a retry does
            // not make shorter.
            StoreError::InvalidChange(reason) => Self::PolicyViolation(reason),
            error => Self::Storage(error.to_string()),
        }
    }
}

impl From<AppendError> for ApiError {
    fn from(error: AppendError) -> Self {
        match error {
            // Appends wait for free space, so this reaches the client only after the wait has timed
            // out.
            AppendError::Full => Self::TimedOut,
            AppendError::TooLarge { len_bytes, max_bytes } => {
                Self::BatchTooLarge { len_bytes, max_bytes }
            }
            AppendError::NotNext { .. } => Self::Internal(error.to_string()),
            AppendError::Fenced { .. } => Self::NotLeader(error.to_string()),
            AppendError::Deleted => Self::UnknownTopicOrPartition,
            AppendError::Failed(cause) => cause.into(),
        }
    }
}

impl From<FetchError> for ApiError {
    fn from(error: FetchError) -> Self {
        match error {
            FetchError::OutOfRange { offset, start, end } => Self::OffsetOutOfRange {
                offset: i64::try_from(offset.0).unwrap_or(i64::MAX),
                start,
                end,
            },
            FetchError::Deleted => Self::UnknownTopicOrPartition,
            FetchError::Failed(cause) => cause.into(),
        }
    }
}
