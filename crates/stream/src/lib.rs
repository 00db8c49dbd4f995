//! Streams of unlimited length over one write-ahead log and an object store.
//!
//! A batch is durable in the WAL before its append completes. It is read from the log cache until
//! it is uploaded and evicted, and from objects afterwards. An upload takes the part of the log
//! cache below a log offset (the cut), sorts it by stream, writes it as objects and publishes them
//! in the catalog; only then is the WAL trimmed. See `ARCHITECTURE.md`, `docs/format/object.md`,
//! `docs/format/stream-record.md` and `docs/format/chain.md`.
//!
//! # Modules
//!
//! From the top to the bottom; no import points up in this list.
//!
//! - `writer.rs`, `compact/rewrite.rs`: a stream's one writer; rewriting of batches
//! - `store.rs`, `follow.rs`: all streams of one WAL; opening and closing; a store that another
//!   process writes
//! - `rebuild.rs`, `rebuild/`, `migrate.rs`, `migrate/`: rebuild after a loss; the catalog of
//!   earlier versions
//! - `upload.rs`, `pace.rs`, `compact.rs`, `object_cleaner.rs`: uploads and their rate; object
//!   compaction; deletion of objects
//! - `search.rs`, `stream.rs`: search by time; reads of a stream
//! - `recover.rs`, `open.rs`, `repair.rs`: recovery; opening of the catalog; repair of gaps
//! - `commit.rs`, `publish.rs`, `publish/`, `output.rs`, `ends/task.rs`, `wake/task.rs`,
//!   `losses/classify.rs`: code that changes the shared state: changes of the catalog in the WAL,
//!   and in the object store; an object being written; lists of stream ends; wake-ups; failed reads
//! - `shared.rs`: the state that handles and tasks share
//! - `view.rs`, `polls.rs`: what reads need of it; reads of a chain that is followed
//! - `catalog_state.rs`, `ends.rs`, `ends/`, `wake.rs`, `compaction_signal.rs`,
//!   `object_table.rs`, `health.rs`, `stats.rs`, `numbers.rs`: its parts, and views of them
//! - `chain.rs`, `chain/`: the catalog in the object store
//! - `sequence.rs`, `sequence/`: numbered objects, each created once
//! - `read_ahead.rs`, `objects/`: read-ahead; the object store: requests, retries, local
//!   directories, cold reads, the disk cache
//! - `losses.rs`, `fold.rs`, `replay.rs`, `report.rs`: damaged and missing objects; checkpoints;
//!   what their owner derives them from; what recovery found
//! - `cache.rs`, `tail.rs`, `tail/`, `range.rs`: the byte limit over all tails; a stream's tail;
//!   its part in an object
//! - `options.rs`, `background.rs`, `error.rs`: options; low-priority threads; errors
//! - `catalog.rs`: what the catalog records
//! - `object_error.rs`, `record.rs`, `object.rs`, `object/`: errors of the object store; the bytes
//!   of WAL records and of objects
//! - `frame.rs`, `wire.rs`, `damage.rs`: compression; numbers of variable length; damage
//! - `faults.rs`, `bandwidth.rs`, `request_class.rs`, `budget.rs`, `naming.rs`, `retry.rs`,
//!   `clock.rs`, `panics.rs`, `fields.rs`, `types.rs`: reported faults; precedence on the way to
//!   the object store; classes of requests; the byte limit of a fetch; names of objects; delays;
//!   the wall clock; panics as errors; integers in bytes; positions
#![forbid(unsafe_code)]

mod background;
mod bandwidth;
mod budget;
mod cache;
pub mod catalog;
mod catalog_state;
pub mod chain;
mod clock;
mod commit;
mod compact;
mod compaction_signal;
mod damage;
mod ends;
mod error;
mod faults;
mod fields;
mod fold;
mod follow;
mod frame;
mod health;
mod losses;
mod migrate;
mod moved;
mod naming;
mod numbers;
pub mod object;
mod object_cleaner;
mod object_error;
mod object_table;
mod objects;
mod open;
mod options;
mod output;
mod pace;
pub mod panics;
mod polls;
mod publish;
mod range;
mod read_ahead;
mod rebuild;
mod record;
mod recover;
mod repair;
mod replay;
mod report;
mod request_class;
mod retry;
mod search;
pub mod sequence;
mod shared;
mod stats;
mod store;
mod stream;
mod tail;
mod types;
mod upload;
mod view;
mod wake;
mod wire;
mod writer;

pub use alluvium_wal::LogOffset;
pub use bandwidth::Throttled;
pub use catalog::{Change, MAX_LABEL_BYTES};
pub use compact::{Rewrite, Rewritten, StoredPart};
pub use error::{FetchError, StoreError};
pub use faults::{Degraded, Reason};
pub use fold::{DamagedStreams, Filler, Fold};
pub use losses::LostObjects;
pub use migrate::{LEGACY_CATALOG, MigrateError, migrate};
pub use moved::Moved;
pub use naming::{DECLARED_LOSS, PROBES_DIRECTORY};
pub use numbers::UploadFailing;
pub use object_error::{ErrorKind, ObjectError};
pub use objects::{
    Directory, DiskCacheStats, MARK, Mismatch, Orphan, RESERVE, ReadStats, Requests, StoredObject,
    Survey, is_marked, list_objects, local_objects, object_size, probe_objects, read_directory,
    survey,
};
pub use open::locate;
pub use options::{DiskCacheOptions, Options};
pub use polls::Following;
pub use rebuild::{FromObjects, LostEnd, Rebuild, RebuildError, RebuildProgress, RebuildStep};
pub use record::{End, Ends, StreamRecord, decode_record};
pub use recover::LogLoss;
pub use replay::{History, Replay};
pub use report::{Gap, GapCause, Lost, Recovery};
pub use stats::Stats;
pub use store::{Opened, Store};
pub use stream::{Fetched, Stream, Watch};
pub use tail::Tiers;
pub use types::{
    Batch, KIND_LOG, KIND_STATE, NewBatch, ObjectId, StreamEpoch, StreamId, StreamOffset,
};
pub use writer::{Append, AppendError, StreamWriter};
