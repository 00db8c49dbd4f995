//! Streams of unlimited length over one write-ahead log and an object store.
//!
//! A batch is durable in the WAL before its append completes. It is read from the log cache until
//! it is uploaded and evicted, and from objects afterwards. An upload takes the part of the log
//! cache below a log offset (the cut), sorts it by stream, writes it as objects and commits them in
//! the [`Catalog`]; only then is the WAL trimmed. See `ARCHITECTURE.md`, `docs/format/object.md`,
//! `docs/format/stream-record.md` and `docs/format/catalog.md`.
#![forbid(unsafe_code)]

mod background;
mod bandwidth;
mod cache;
pub mod catalog;
mod commit;
mod compact;
mod ends;
mod health;
mod losses;
mod numbers;
pub mod object;
mod object_cleaner;
mod object_table;
mod objects;
mod options;
mod output;
mod owner;
mod pace;
pub mod panics;
mod read_ahead;
mod record;
mod recover;
mod repair;
mod search;
mod store;
mod stream;
mod tail;
mod types;
mod upload;
mod wake;
mod writer;

pub use alluvium_wal::LogOffset;
pub use catalog::{Catalog, CatalogError, Change, MemoryCatalog, RedbCatalog};
pub use compact::{Rewrite, Rewritten, StoredPart};
pub use health::{Degraded, Reason};
pub use losses::LostObjects;
pub use numbers::{Lost, UploadFailing};
pub use objects::{
    DiskCacheStats, ErrorKind, MARK, Mismatch, ObjectError, Orphan, ReadStats, Requests,
    StoredObject, Survey, is_marked, list_objects, local_objects, object_size, probe_objects,
    survey,
};
pub use options::{DiskCacheOptions, Options};
pub use record::{End, Ends, StreamRecord, decode_record};
pub use recover::{Gap, GapCause, Recovery};
pub use repair::DamagedStreams;
pub use store::{Opened, Stats, Store, StoreError};
pub use stream::{FetchError, Fetched, History, Replay, Stream, Watch};
pub use types::{
    Batch, Fold, KIND_LOG, KIND_STATE, NewBatch, ObjectId, StreamEpoch, StreamId, StreamOffset,
};
pub use writer::{Append, AppendError, StreamWriter};
