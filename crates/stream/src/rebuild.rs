//! Rebuild after a loss: of the WAL, of a part of the catalog, or of all of it. `docs/rebuild.md`;
//! `docs/format/chain.md`, section 10.
//!
//! - `from_objects.rs`: what the data objects show of the catalog
//! - `checkpoints.rs`: checkpoints, from the records in them
//! - `fill.rs`: batches for holes
//! - `source.rs`, `offsets.rs`: where it reads; sets of offsets
//!
//! | crash after | then |
//! |---|---|
//! | the object that names the store of the WAL | the rebuild is repeated with the same WAL |
//! | objects with batches for holes | no catalog names them; the rebuild is repeated |
//! | the snapshot of a rebuild from objects | no fence names it; the rebuild is repeated |
//! | the fence | the store is bound; repeating the rebuild changes nothing |

mod checkpoints;
mod fill;
mod from_objects;
mod offsets;
mod source;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use alluvium_device::SharedDevice;
use alluvium_wal::{HeaderInfo, LogOffset};
use bytes::Bytes;
use object_store::{ObjectStore, PutMode, PutPayload};
use tokio::time::Instant;
use uuid::Uuid;

use crate::chain::{
    BodyHeader, Chain, ChainChange, ChainState, ChainStream, ChainWriter, Fence, FenceError, Hints,
    Snapshot,
};
use crate::clock::unix_ms;
use crate::ends::LargestCount;
use crate::error::StoreError;
use crate::fold::Fold;
use crate::naming::{DECLARED_LOSS, WALS_DIRECTORY};
use crate::object_error::ObjectError;
use crate::objects::{Request, list_all, within};
use crate::open::{check_age, locate};
use crate::options::Options;
use crate::recover::{self, LogLoss};
use crate::tail::UNHINTED_OFFSETS;
use crate::types::{ObjectId, StreamId, StreamOffset};

pub use from_objects::FromObjects;
pub use source::{RebuildProgress, RebuildStep};

/// The time in which the fence must be created.
const ATTEMPT: Duration = Duration::from_secs(60);
/// Offsets that a stream skips if an unknown number of deltas is lost: for this rebuild, and for
/// each one before that may be lost with the chain. Each delta has allowed [`UNHINTED_OFFSETS`]
/// more.
const OFFSETS_OF_UNKNOWN_DELTAS: u64 = 1 << 40;
/// Terms that are skipped if fences may be lost.
const TERMS_OF_LOST_FENCES: u32 = 1000;
/// Stream ids continue at a multiple of this if fences may be lost.
const IDS_OF_LOST_FENCES: u64 = 1 << 32;

/// Why a store was not rebuilt. Nothing has changed that a server with the old WAL needs, unless
/// the error is that of the object store: then the fence may be there.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// The object store has no catalog of the store.
    #[error("there is no catalog of store {0}")]
    NoCatalog(Uuid),
    /// The new WAL was in use.
    #[error(
        "write-ahead log {wal} was opened {epoch} times: a rebuild needs a new one. If it is the \
         log of the store, start the server with it"
    )]
    UsedWal {
        /// The WAL.
        wal: Uuid,
        /// Its epoch.
        epoch: u32,
    },
    /// The new WAL belongs to another store.
    #[error("write-ahead log {wal} belongs to store {store}")]
    OtherStore {
        /// The WAL.
        wal: Uuid,
        /// The other store.
        store: Uuid,
    },
    /// A server has opened the store meanwhile.
    #[error("a server has opened the store meanwhile: stop it first, and begin again")]
    Changed,
    /// The WAL was in use, and the store is bound to another one.
    #[error("the store is bound to write-ahead log {bound_to}, and this is {wal}")]
    OtherWal {
        /// The WAL.
        wal: Uuid,
        /// The WAL of the store.
        bound_to: Uuid,
    },
    /// Nothing is damaged or missing, and the WAL is that of the store.
    #[error("nothing is lost: start the server with write-ahead log {0}")]
    NotNeeded(Uuid),
    /// The WAL cannot be read.
    #[error(transparent)]
    Log(StoreError),
    /// The object store does not answer, refuses a request, or has a damaged catalog.
    #[error(transparent)]
    Object(#[from] ObjectError),
}

/// The end of a stream that is lost with the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostEnd {
    /// The stream.
    pub stream: StreamId,
    /// Everything before it is in objects, or was lost with an earlier WAL. Everything from it on
    /// is lost.
    pub from: StreamOffset,
    /// The offsets up to here were durable when the last change of the catalog was written. More
    /// may have been appended since.
    pub known_end: StreamOffset,
    /// Where the stream continues: no offset from here on was handed out.
    pub resume: StreamOffset,
}

/// A store of which something is lost.
pub struct Rebuild {
    chain: Chain,
    /// What is left.
    state: ChainState,
    /// If the catalog was rebuilt from objects.
    from_objects: Option<FromObjects>,
    /// What the WAL has lost, if it is there.
    log: Option<LogLoss>,
    /// Offsets that a stream skips after what is known of it.
    skipped: u64,
}

impl Rebuild {
    /// Loads the catalog of a store whose WAL is lost.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub async fn load(
        objects: &Arc<dyn ObjectStore>,
        store: Uuid,
        options: &Options,
    ) -> Result<Self, RebuildError> {
        let chain = Chain::new(objects.clone(), store, options.retry());
        let state = chain.load().await?.ok_or(RebuildError::NoCatalog(store))?;
        Ok(Self { chain, state, from_objects: None, log: None, skipped: UNHINTED_OFFSETS })
    }

    /// Puts together what is left of the catalog of a store and what its objects show. `log` is the
    /// WAL of the store if it is there; it is only read. `fold` derives checkpoints.
    ///
    /// # Errors
    /// There is neither a catalog nor an object; nothing is lost; the WAL belongs to another store,
    /// or cannot be read; the object store does not answer.
    pub async fn from_objects(
        objects: &Arc<dyn ObjectStore>,
        store: Uuid,
        log: Option<SharedDevice>,
        fold: &Arc<dyn Fold>,
        options: &Options,
        progress: RebuildProgress<'_>,
    ) -> Result<Self, RebuildError> {
        let chain = Chain::new(objects.clone(), store, options.retry());
        // Before the chain: a server that runs beside a dry run changes both.
        let header = match &log {
            Some(device) => {
                Some(recover::inspect(device.clone()).await.map_err(RebuildError::Log)?)
            }
            None => None,
        };
        let salvaged = chain.salvage().await?;
        if let Some(header) = &header {
            check_store(objects, &salvaged.state, header, store).await?;
            let then = &salvaged.state.header;
            if then.wal == header.wal_id {
                check_age(then, header).map_err(RebuildError::Log)?;
            }
        }
        let then = &salvaged.state.header;
        // Without the WAL nothing shows whether the newest objects of the chain are there.
        let is_old = then.opening == 0
            || header.as_ref().is_none_or(|now| then.version < now.mark || then.cut < now.trim);
        let (covers, next_stream) =
            (salvaged.intact.header.covers, salvaged.intact.header.next_stream);
        let source = source::Source { objects, fold, progress, retry: options.retry() };
        let (mut state, found) = from_objects::restore(&source, salvaged, is_old).await?;
        if let Some(header) = &header {
            check_objects(&found, header)?;
        }
        let is_unknown = state.header.opening == 0 && found.last_object.is_none();
        if is_unknown && header.is_none() {
            return Err(RebuildError::NoCatalog(store));
        }
        if let Some(now) = header.as_ref().filter(|_| found.is_whole()) {
            // A snapshot may have what an object after it has lost.
            match chain.load().await {
                Ok(_) => return Err(RebuildError::NotNeeded(now.wal_id)),
                Err(error) if error.is_loss() => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !found.is_complete() {
            // Lists after it may be lost. Those that the WAL has are applied again.
            (state.header.covers, state.header.next_stream) = (covers, next_stream);
            after_lost_objects(&mut state, &found);
        }
        let log = match (log, header) {
            (Some(device), Some(header)) => {
                bind_to_used(&mut state, &header);
                let state = state.clone();
                let survey = move || recover::survey(&device, state);
                Some(recover::blocking(survey).await.map_err(RebuildError::Log)?)
            }
            _ => None,
        };
        let skipped = match (found.is_complete(), found.is_old) {
            (true, _) => UNHINTED_OFFSETS,
            (false, false) => UNHINTED_OFFSETS.saturating_mul(1 + found.lost_numbers()),
            (false, true) => {
                let rebuilds = 1 + bound_wals(&**objects, store).await?;
                OFFSETS_OF_UNKNOWN_DELTAS.saturating_mul(rebuilds)
            }
        };
        Ok(Self { chain, state, from_objects: Some(found), log, skipped })
    }

    /// Returns the catalog, which is what is left.
    pub fn state(&self) -> &ChainState {
        &self.state
    }

    /// Returns the catalog of a rebuild from objects, so that the owner of the streams can add what
    /// it knows of them.
    pub fn state_mut(&mut self) -> &mut ChainState {
        &mut self.state
    }

    /// Returns what a rebuild from objects has found.
    pub fn found(&self) -> Option<&FromObjects> {
        self.from_objects.as_ref()
    }

    /// Returns what the WAL has lost, or `None` if it is lost as a whole.
    pub fn log_loss(&self) -> Option<&LogLoss> {
        self.log.as_ref()
    }

    /// Whether nothing is lost: the last server has stated that its WAL had nothing else, and the
    /// catalog is whole.
    pub fn is_clean(&self) -> bool {
        let is_whole = self.from_objects.as_ref().is_none_or(|found| {
            found.is_complete() && found.lost.is_empty() && found.damaged.is_empty()
        });
        is_whole && self.log.is_none() && self.state.header.is_clean
    }

    /// Returns what each stream loses with the WAL. All streams may have been appended to after the
    /// last change of the catalog, unless the last server has stated that its WAL had nothing else.
    pub fn lost_ends(&self) -> Vec<LostEnd> {
        match self.log.is_some() || self.state.header.is_clean {
            true => Vec::new(),
            false => self.ends().collect(),
        }
    }

    /// Returns the offsets that streams skip although nothing of them is known to be lost: without
    /// the lost objects of the chain, nothing but batches in the WAL shows the end of a stream
    /// whose last records were trimmed before they were uploaded.
    pub fn skipped(&self) -> Vec<(StreamId, Range<StreamOffset>)> {
        let is_complete = self.from_objects.as_ref().is_none_or(FromObjects::is_complete);
        let Some(log) = self.log.as_ref().filter(|_| !is_complete) else { return Vec::new() };
        let ends = self.ends().filter(|end| !log.active.contains(&end.stream));
        ends.map(|end| (end.stream, end.from..end.resume)).collect()
    }

    fn ends(&self) -> impl Iterator<Item = LostEnd> {
        self.state.streams.iter().map(|(id, stream)| {
            let from = uploaded_end(stream);
            let known = self.state.hints.get(id).map_or(from, |hint| from.max(*hint));
            // What an earlier rebuild has declared, if nothing after it is uploaded.
            let declared = self.state.gaps_of(*id).rfind(|gap| gap.start <= from);
            let from = declared.map_or(from, |gap| from.max(gap.end));
            let known_end = known.max(from);
            let resume = StreamOffset(known_end.0.saturating_add(self.skipped));
            LostEnd { stream: *id, from, known_end, resume }
        })
    }

    /// Binds the store to a WAL, a new one unless that of the store is there: the next server that
    /// opens it continues with what is left. A server that still has the old WAL, or the old
    /// catalog, loses the store. Returns false if it was bound already.
    ///
    /// # Errors
    /// The WAL is not the right one, or the object store does not answer.
    pub async fn bind(
        self,
        objects: &Arc<dyn ObjectStore>,
        wal: &HeaderInfo,
        node_id: u32,
    ) -> Result<bool, RebuildError> {
        let HeaderInfo { wal_id, epoch, .. } = *wal;
        let store = self.state.header.store;
        let is_bound = self.state.header.wal == wal_id;
        if is_bound && self.from_objects.is_none() {
            return Ok(false);
        }
        if self.log.is_none() && epoch > 0 {
            return Err(RebuildError::UsedWal { wal: wal_id, epoch });
        }
        name_store(&**objects, wal_id, store).await?;
        let fence = self.fence(wal, node_id);
        let Self { chain, mut state, from_objects, .. } = self;
        if let Some(found) = from_objects {
            let filled = found.filled.into_iter().map(|(stream, filler)| (stream, filler.batch));
            let last = found.last_object.unwrap_or(ObjectId(0));
            fill::write(objects, chain.retry(), &mut state, last, filled.collect()).await?;
            if !found.lost.is_empty() {
                state.meta.insert(DECLARED_LOSS.into(), Bytes::from_static(b"1"));
            }
            let snapshot = Snapshot::of_new_base(state);
            state = snapshot.state.clone();
            chain.write_snapshot(snapshot).await?;
        }
        let until = Instant::now() + ATTEMPT;
        let head = state.head;
        let decide = |state: Option<&ChainState>| match state {
            // What the caller has accepted.
            Some(state) if state.head == head => Ok(fence.clone()),
            _ => Err(RebuildError::Changed),
        };
        match ChainWriter::open(chain, Some(state), until, decide).await {
            Ok(_) => Ok(true),
            Err(FenceError::Object(error)) => Err(error.into()),
            Err(FenceError::Refused(error)) => Err(error),
        }
    }

    /// Returns the fence that binds the store. The opening of a new WAL finds the gaps, raises the
    /// term, and notes the ends.
    fn fence(&self, wal: &HeaderInfo, node: u32) -> Fence {
        let Self { state, log, .. } = self;
        let lost = self.lost_ends().into_iter().map(|lost| (lost.stream, lost.resume));
        let skipped = self.skipped().into_iter().map(|(stream, offsets)| (stream, offsets.end));
        let gaps = lost.chain(skipped).map(|(stream, resume)| ChainChange::Gap {
            stream,
            offsets: uploaded_end(&state.streams[&stream])..resume,
        });
        // While there are gaps, objects that the catalog does not have are kept.
        let in_objects =
            self.from_objects.iter().flat_map(|found| &found.lost).map(|(stream, offsets)| {
                ChainChange::Gap { stream: *stream, offsets: offsets.clone() }
            });
        let is_lossy = !self.is_clean();
        let ids_are_lost = is_lossy && log.is_none();
        Fence {
            wal: wal.wal_id,
            epoch: wal.epoch,
            incarnation: Uuid::new_v4(),
            node,
            written_at_ms: unix_ms().cast_unsigned(),
            // Also if there is no stream: the opening raises it only for gaps.
            term: is_lossy.then(|| state.head.term.saturating_add(1)),
            next_stream: if ids_are_lost { state.reserved } else { StreamId(0) },
            own: in_objects.chain(gaps).collect(),
            hints: Hints::new(),
        }
    }
}

/// Checks that a WAL that was in use is that of the store.
async fn check_store(
    objects: &Arc<dyn ObjectStore>,
    state: &ChainState,
    &HeaderInfo { wal_id: wal, mark, .. }: &HeaderInfo,
    store: Uuid,
) -> Result<(), RebuildError> {
    let bound_to = match state.header.wal {
        // The fence that bound it is lost: the mark is the version of an object of the chain.
        _ if mark > state.header.version => wal,
        // The catalog is lost, so the object that names the store of the WAL decides.
        unknown if unknown.is_nil() => wal,
        bound_to => bound_to,
    };
    let named = locate(&**objects, wal).await?;
    match (bound_to == wal, named == store) {
        (true, true) => Ok(()),
        (false, true) => Err(RebuildError::OtherWal { wal, bound_to }),
        (_, false) => Err(RebuildError::OtherStore { wal, store: named }),
    }
}

/// Checks that the WAL has seen the opening in which the newest object was written: an opening
/// marks the WAL with its version before it writes objects.
fn check_objects(found: &FromObjects, log: &HeaderInfo) -> Result<(), RebuildError> {
    let opening = found.last_object.map_or(0, |id| id.0 >> 32);
    match opening > log.mark >> 32 {
        true => {
            let (mark, seen) = (log.mark, opening << 32);
            Err(RebuildError::Log(StoreError::OldWal { mark, seen }))
        }
        false => Ok(()),
    }
}

/// Moves numbers past all that may have been given out by what is lost of the catalog.
fn after_lost_objects(state: &mut ChainState, found: &FromObjects) {
    let last_object = found.last_object.map_or(0, |id| id.0);
    let of_objects = u32::try_from(last_object >> 32).expect("the upper half");
    let header = &mut state.header;
    raise_opening(header, of_objects);
    header.is_clean = false;
    let last_term = state.head.term.max(found.last_term);
    state.head.term = last_term.saturating_add(TERMS_OF_LOST_FENCES);
    state.largest_count = LargestCount::UNKNOWN.0;
    let last_stream = state.streams.last_key_value().map_or(0, |(id, _)| id.0);
    let used = state.reserved.0.max(last_stream.saturating_add(1));
    state.reserved = StreamId((used + 1).next_multiple_of(IDS_OF_LOST_FENCES));
}

/// Binds a catalog to a WAL that was in use.
fn bind_to_used(state: &mut ChainState, log: &HeaderInfo) {
    let header = &mut state.header;
    header.wal = log.wal_id;
    header.cut = LogOffset(header.cut.0.max(log.trim.0));
    header.wal_mark = log.mark;
    header.epoch = log.epoch;
    let of_mark = u32::try_from(log.mark >> 32).expect("the upper half");
    raise_opening(header, of_mark.max(log.epoch));
}

/// Makes the opening at least this one. The upper half of a version is the opening.
fn raise_opening(header: &mut BodyHeader, opening: u32) {
    if opening > header.opening {
        header.opening = opening;
        header.version = u64::from(opening) << 32;
    }
}

fn uploaded_end(stream: &ChainStream) -> StreamOffset {
    stream.uploaded_end.max(stream.start)
}

/// Returns the number of WALs that the object store names as those of a store: each rebuild after
/// the loss of a WAL has added one.
async fn bound_wals(objects: &dyn ObjectStore, store: Uuid) -> Result<u64, ObjectError> {
    let mut bound = 0;
    for found in list_all(objects, Some(&WALS_DIRECTORY.into())).await? {
        let Some(wal) = found.location.filename().and_then(|id| Uuid::try_parse(id).ok()) else {
            continue;
        };
        match locate(objects, wal).await {
            Ok(named) => bound += u64::from(named == store),
            Err(error) if error.is_loss() => bound += 1,
            Err(error) => return Err(error),
        }
    }
    Ok(bound)
}

/// Notes in the object store which store the WAL belongs to.
async fn name_store(objects: &dyn ObjectStore, wal: Uuid, store: Uuid) -> Result<(), RebuildError> {
    let name = format!("{WALS_DIRECTORY}/{wal}");
    let path = name.as_str().into();
    let create = async {
        let payload = PutPayload::from(store.to_string());
        match objects.put_opts(&path, payload, PutMode::Create.into()).await {
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    };
    within(Request::Put, &name, create).await?;
    match locate(objects, wal).await? {
        named if named == store => Ok(()),
        other => Err(RebuildError::OtherStore { wal, store: other }),
    }
}
