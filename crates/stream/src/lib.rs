//! Streams of unlimited length over one write-ahead log and an object store.
//!
//! A batch is durable in the WAL before its append completes. It is read from the log cache until
//! it is uploaded and evicted, and from objects afterwards. An upload takes the part of the log
//! cache below a log offset (the cut), sorts it by stream, writes it as objects and commits them in
//! the [`Catalog`]; only then is the WAL trimmed. See `ARCHITECTURE.md`, `docs/format/object.md`,
//! `docs/format/stream-record.md` and `docs/format/catalog.md`.
//!
//! # Modules
//!
//! - `stream.rs`, `writer.rs`, `tail.rs`, `cache.rs`: a stream; its one writer; its tail; the byte
//!   limit over all tails
//! - `store.rs`, `commit.rs`, `object_table.rs`, `numbers.rs`: all streams of one WAL; ordered
//!   changes of the catalog; objects in use; statistics
//! - `upload.rs`, `pace.rs`, `object.rs`, `output.rs`: uploads, their rate, the bytes of objects,
//!   an object being written
//! - `objects/`: the object store: requests, retries, local directories, cold reads, the disk cache
//! - `read_ahead.rs`, `search.rs`: read-ahead; search by time
//! - `bandwidth.rs`, `background.rs`: precedence on the way to the object store; low-priority
//!   threads
//! - `compact.rs`, `compact/`, `object_cleaner.rs`: object compaction and rewriting of batches;
//!   deletion of objects
//! - `owner.rs`: ownership of the objects
//! - `health.rs`, `losses.rs`, `panics.rs`: reasons for a degraded state; damaged and missing
//!   objects; panics as errors
//! - `ends.rs`, `ends/`: lists of stream ends in the WAL, and conclusions about damage from them
//! - `recover.rs`, `repair.rs`, `wake.rs`: recovery; repair of gaps; wake-ups without polling
//! - `catalog.rs`, `catalog/`: the trait, `redb`, an implementation in memory, their conformance
//!   suite
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
