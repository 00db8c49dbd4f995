//! State streams: a coordinator's state, as records in a stream whose checkpoint is the whole
//! state.
//!
//! Kafka keeps such state in compacted internal topics. A state stream is compacted by the fold of
//! its checkpoint.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_stream::{
    Append, AppendError, Change, NewBatch, Replay, Store, StoreError, StreamEpoch, StreamId,
    StreamOffset, StreamWriter,
};
use futures::future::{Either, Ready, ready};

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

/// A state stream as its coordinator writes it.
pub(crate) enum StateStream {
    Stored(StreamWriter),
    /// On a read-only server the coordinator's state is in memory alone, so nothing is kept of the
    /// records; the offset of the next one.
    InMemory(AtomicU64),
}

/// Resolves when a record is durable, or at once if it is not kept.
pub(crate) type Written = Either<Append, Ready<Result<(), StoreError>>>;

impl StateStream {
    /// Opens or creates a state stream, see [`open`], and returns what it has. On a read-only
    /// server the state of the writer is read if `is_taken_over`.
    ///
    /// # Errors
    /// Those of [`open`].
    pub(crate) async fn open(
        store: &Store,
        key: &'static str,
        kind: u8,
        is_taken_over: bool,
    ) -> Result<(Self, Replay), StateError> {
        if !store.is_followed() {
            let stream = open(store, key, kind).await?;
            let replay = stream.replay();
            return Ok((Self::Stored(stream), replay));
        }
        let value = store.meta_value(key).filter(|_| is_taken_over);
        let replay = match value {
            Some(value) => {
                let id = parse_stream_id(key, &value)?;
                store.stream(id).ok_or(StateError::NoStream(id))?.replay()
            }
            None => Replay::default(),
        };
        Ok((Self::InMemory(replay.end.0.into()), replay))
    }

    /// Appends a record. The caller serializes the calls.
    pub(crate) fn append(&self, batch: NewBatch) -> Result<Written, AppendError> {
        match self {
            Self::Stored(stream) => stream.append(batch).map(Either::Left),
            Self::InMemory(next) => {
                next.fetch_add(batch.count.into(), Ordering::Relaxed);
                Ok(Either::Right(ready(Ok(()))))
            }
        }
    }

    /// The offset that the next record must have.
    pub(crate) fn next_offset(&self) -> StreamOffset {
        match self {
            Self::Stored(stream) => stream.next_offset(),
            Self::InMemory(next) => StreamOffset(next.load(Ordering::Relaxed)),
        }
    }

    /// The offset below which all records are durable.
    pub(crate) fn durable_end(&self) -> StreamOffset {
        match self {
            Self::Stored(stream) => stream.durable_end(),
            Self::InMemory(next) => StreamOffset(next.load(Ordering::Relaxed)),
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
