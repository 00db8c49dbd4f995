//! Streams of unlimited length over one write-ahead log and an object store.
//!
//! A batch is durable in the WAL before its append completes, is read from the log cache while it is young, and
//! settles in objects. When a cut of the log cache is full (or old) it is sorted by stream, written as an object, committed in the
//! [`Catalog`], and only then is the WAL trimmed. See `ARCHITECTURE.md` and `docs/format/object.md`.
#![forbid(unsafe_code)]

pub mod catalog;
mod store;
mod types;

pub use catalog::{Catalog, CatalogError, Change, RedbCatalog};
pub use store::{Append, AppendError, FetchError, Fetched, Opened, Options, Replay, Stats, Store, StoreError, Stream, Watch};
pub use types::{Batch, Fold, NewBatch, StreamId, StreamOffset};
