//! Why an operation of the store failed.

use std::sync::Arc;

use alluvium_wal::{LogOffset, WalError};
use uuid::Uuid;

use crate::chain::PublishError;
use crate::object_error::ObjectError;
use crate::types::{StreamEpoch, StreamId, StreamOffset};

/// Why an operation of the store failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The store has failed; the text is that of the first failure.
    #[error("the store has failed: {0}")]
    Failed(String),
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// An option is out of range. The message names the option, the value and the bound.
    #[error("{0}")]
    InvalidOption(String),
    /// An invalid change, such as a trim past the durable end. Nothing has changed.
    #[error("{0}")]
    InvalidChange(String),
    /// A newer writer has opened the stream. Nothing has changed.
    #[error(
        "stream {stream} was opened with epoch {newest}: a writer with epoch {epoch} can no \
         longer change it"
    )]
    Fenced {
        /// The stream.
        stream: StreamId,
        /// The epoch of the fenced writer.
        epoch: StreamEpoch,
        /// The newest epoch with which the stream was opened.
        newest: StreamEpoch,
    },
    /// The catalog and the WAL do not belong together. Continuing would drop records or assign them
    /// to the wrong streams.
    #[error(
        "the catalog belongs to the WAL {catalog}, but the device holds the WAL {wal}. Open the \
         WAL with the catalog that it was last in use with"
    )]
    WrongWal {
        /// The WAL that the catalog is bound to.
        catalog: Uuid,
        /// The WAL on the device.
        wal: Uuid,
    },
    /// The catalog was in use with this WAL before, and a newer catalog has been since. Continuing
    /// would lose records permanently.
    #[error(
        "the catalog is new or an old copy: it has version {version} and what the WAL held before \
         {uploaded}, but the WAL was in use with version {mark} and is trimmed up to {trimmed}. \
         The rest is in objects that only a newer catalog records: open the WAL with that catalog"
    )]
    OldCatalog {
        /// The version of this catalog.
        version: u64,
        /// The mark of the WAL: the version of the catalog that it was last in use with.
        mark: u64,
        /// The log offset below which this catalog has the contents of the WAL.
        uploaded: LogOffset,
        /// The WAL's trim offset.
        trimmed: LogOffset,
    },
    /// The WAL was in use with this catalog after this copy of the WAL was made. Everything
    /// appended since would be lost permanently.
    #[error(
        "the device holds an old copy of the WAL: it was last in use with version {mark} of the \
         catalog, but the catalog has been in use with the WAL at version {seen}. Open the \
         catalog with the device that it was last in use with, or restore copies of both from the \
         same moment. If there is no such device or copy, the WAL is lost: rebuild with a new one"
    )]
    OldWal {
        /// The mark in the header of this copy.
        mark: u64,
        /// The greatest mark that the WAL is known to have had.
        seen: u64,
    },
    /// The WAL was opened after this copy of it was made. Everything appended since would be lost
    /// permanently.
    #[error(
        "the device holds an old copy of the WAL: it was opened {epoch} times, but the catalog has \
         been in use with the WAL when it had been opened {seen} times. Open the device that the \
         catalog was last in use with, or restore copies of both from the same moment. If there is \
         no such device or copy, the WAL is lost: rebuild with a new one"
    )]
    OldWalEpoch {
        /// The epoch in the header of this copy.
        epoch: u32,
        /// The greatest epoch in which the catalog was in use.
        seen: u32,
    },
    /// The WAL could not be opened.
    #[error("cannot open the WAL: {0}")]
    Open(Arc<alluvium_wal::OpenError>),
    /// The WAL has failed.
    #[error(transparent)]
    Wal(#[from] WalError),
    /// An object could not be read.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// The object store has no catalog of this WAL.
    #[error(
        "the object store has no catalog of the WAL {wal}, which was opened {epoch} times: it is \
         another object store, an emptied one, or a directory that is not mounted"
    )]
    NoCatalog {
        /// The WAL on the device.
        wal: Uuid,
        /// Its epoch.
        epoch: u32,
    },
    /// The object store has no catalog of this store.
    #[error(
        "the object store has no catalog of the store {store}: it is another object store, or a \
         directory that is not mounted"
    )]
    NoStore {
        /// The id of the store.
        store: Uuid,
    },
    /// The store is followed, not written: nothing can be appended or changed.
    #[error("this server is read-only")]
    ReadOnly,
    /// The chain that is followed was replaced by another one, such as that of a copy which was
    /// restored and written to. Objects of the two may have the same numbers, so the store must be
    /// opened again.
    #[error(
        "the catalog in the object store was replaced by one that does not go on from what was \
         read before, such as that of a restored copy: start the server again"
    )]
    OtherHistory,
    /// Another opening has the store. Nothing was published since.
    #[error(transparent)]
    Replaced(PublishError),
    /// The log has no space for a change of the catalog until an upload has freed some. Nothing has
    /// changed.
    #[error("the log is full: the change is possible once an upload has freed space")]
    LogFull,
    /// Objects that were written have disappeared from the object store. Nothing was published.
    #[error("written objects have disappeared from the object store")]
    ObjectsMissing,
}

impl StoreError {
    pub(crate) fn no_stream(id: StreamId) -> Self {
        Self::InvalidChange(format!("there is no stream {id}"))
    }
}

/// Why a fetch returned nothing.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The offset is before the start or after the end of the stream.
    #[error("offset {offset} is outside {start}..={end}")]
    OutOfRange {
        /// The requested offset.
        offset: StreamOffset,
        /// The stream's start.
        start: StreamOffset,
        /// The stream's next offset.
        end: StreamOffset,
    },
    /// The stream was deleted.
    #[error("the stream was deleted")]
    Deleted,
    /// An object could not be read. If it is damaged or missing ([`crate::ObjectError::is_loss`]),
    /// its records are lost; otherwise a retry may succeed.
    #[error("{0}")]
    Failed(StoreError),
}
