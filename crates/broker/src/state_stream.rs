//! State streams: a coordinator's state, as records in a stream whose checkpoint is the whole
//! state.
//!
//! Kafka keeps such state in compacted internal topics. A state stream is compacted by the fold of
//! its checkpoint.

use std::collections::BTreeMap;

use alluvium_stream::{
    AppendError, Change, Store, StoreError, StreamEpoch, StreamId, StreamWriter,
};

use crate::label::Label;

/// The kind of stream with the committed offsets of groups.
pub(crate) const KIND_OFFSETS: u8 = alluvium_stream::KIND_STATE;
/// The kind of stream with transactions.
pub(crate) const KIND_TRANSACTIONS: u8 = 2;
/// The kind of stream with members of groups whose assignment the server computes.
pub(crate) const KIND_GROUP_MEMBERS: u8 = 3;
/// The kind of stream with the in-flight records of share groups.
pub(crate) const KIND_SHARES: u8 = 4;
/// The kind of stream with members of groups that compute their own assignment.
pub(crate) const KIND_CLASSIC_GROUPS: u8 = 5;

/// Why a state stream could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The store failed.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// The catalog's metadata does not contain a valid stream ID.
    #[error("catalog entry {key} is {value:?}, which is not a stream ID")]
    BadMetadata {
        /// The metadata key.
        key: &'static str,
        /// The value, with unprintable bytes escaped.
        value: String,
    },
    /// The catalog names a stream that does not exist.
    #[error("the stream {0} does not exist")]
    NoStream(StreamId),
}

/// Why a record was not appended; nothing has changed.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The store has no free space now; see [`Store::wait_for_space`].
    Full,
    /// The record is larger than the store accepts.
    TooLarge,
    /// Another server writes this state now.
    Fenced,
    /// The store has failed.
    Failed(String),
}

impl From<AppendError> for Refused {
    fn from(error: AppendError) -> Self {
        match error {
            AppendError::Full => Self::Full,
            AppendError::TooLarge { .. } => Self::TooLarge,
            AppendError::Fenced { .. } => Self::Fenced,
            error @ (AppendError::NotNext { .. }
            | AppendError::Deleted
            | AppendError::Failed(_)) => Self::Failed(error.to_string()),
        }
    }
}

/// Opens the stream that the catalog's metadata names under `key`, or creates it, and becomes its
/// writer. One server coordinates everything permanently, so there is one epoch.
///
/// # Errors
/// Invalid metadata, a failed store.
pub(crate) async fn open(
    store: &Store,
    key: &'static str,
    kind: u8,
) -> Result<StreamWriter, StateError> {
    let id = match store.meta_value(key) {
        Some(value) => parse_stream_id(key, &value)?,
        None => create(store, key, kind).await?,
    };
    store.stream(id).ok_or(StateError::NoStream(id))?;
    Ok(store.open_stream(id, StreamEpoch(0)).await?)
}

/// The ID of the stream that the catalog's metadata names under `key`, if any.
pub(crate) fn id_in(meta: &BTreeMap<String, Vec<u8>>, key: &'static str) -> Option<StreamId> {
    parse_stream_id(key, meta.get(key)?).ok()
}

fn parse_stream_id(key: &'static str, value: &[u8]) -> Result<StreamId, StateError> {
    let id = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    id.map(StreamId)
        .ok_or_else(|| StateError::BadMetadata { key, value: value.escape_ascii().to_string() })
}

async fn create(store: &Store, key: &'static str, kind: u8) -> Result<StreamId, StateError> {
    let ids = store.new_stream_ids(1).await?;
    let id =
        *ids.first().ok_or_else(|| StoreError::Failed("no stream ID was allocated".to_owned()))?;
    let label = Label::State { state: key.into() }.encode();
    let create = Change::CreateStream { id, kind, label };
    let remember = Change::PutMeta { key: key.to_owned(), value: id.to_string().into_bytes() };
    store.commit(vec![create, remember]).await?;
    Ok(id)
}
