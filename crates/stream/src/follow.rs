//! A store that another process writes: its chain in memory, and the task that follows it.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use object_store::ObjectStore;
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use crate::catalog::{ObjectInfo, ObjectRange};
use crate::chain::{Chain, ChainChanges, ChainReader, ChainState, ChainStream};
use crate::error::StoreError;
use crate::faults::Reason;
use crate::losses::Losses;
use crate::object_table::ObjectTable;
use crate::objects::{CountedStores, Objects};
use crate::open;
use crate::options::Options;
use crate::panics;
use crate::polls::{Applied, Polls};
use crate::range::Range;
use crate::read_ahead::Readers;
use crate::retry::Backoff;
use crate::tail::{Stored, StreamState, Tail};
use crate::types::{ObjectId, StreamId};
use crate::view::{Basis, Failure, View};
use crate::wake::{self, Wakes};

/// The largest batch that a store can have: the length of a record has 32 bits.
const MAX_BATCH_BYTES: u64 = u32::MAX as u64;
/// Streams that are changed without a pause.
const CHUNK_STREAMS: usize = 256;

/// A store in memory, and the reader of its chain.
pub(crate) struct Follower {
    pub(crate) view: Arc<View>,
    pub(crate) polls: Arc<Polls>,
    reader: ChainReader,
}

/// Loads the chain of a store. Waits while the object store does not answer.
///
/// # Errors
/// There is no such store, or its chain is damaged or of a later version; an option is invalid.
pub(crate) async fn open(
    objects: &Arc<dyn ObjectStore>,
    store: Uuid,
    options: Options,
) -> Result<Follower, StoreError> {
    options.check(u64::MAX)?;
    let stores = CountedStores::new(objects);
    let chain = Chain::new(stores.catalog(), store, options.retry());
    let load = || async { Ok(ChainReader::load(chain.clone()).await?) };
    let reader = open::until_answered(&options, load).await?;
    let reader = reader.ok_or(StoreError::NoStore { store })?;
    let losses = Arc::<Losses>::default();
    let polls = Arc::new(Polls::new());
    let view = Arc::new(View {
        basis: Basis::Chain(polls.clone()),
        objects: Objects::new(stores, &options, losses.clone())?,
        readers: Readers::default(),
        options,
        max_batch_bytes: MAX_BATCH_BYTES,
        streams: RwLock::default(),
        meta: RwLock::default(),
        object_table: Mutex::new(ObjectTable::default()),
        wakes: Wakes::new(),
        faults: losses.faults.clone(),
        losses,
        failure: Failure::default(),
        fence: chain.first_name(),
    });
    let mut follower = Follower { view, polls, reader };
    follower.apply().await?;
    Ok(follower)
}

impl Follower {
    /// Follows the chain until the store fails.
    pub(crate) async fn run(mut self) {
        let (view, polls) = (self.view.clone(), self.polls.clone());
        let followed = AssertUnwindSafe(self.follow()).catch_unwind().await;
        let cause = followed.unwrap_or_else(|panic| {
            StoreError::Failed(format!("a defect: {}", panics::text(&*panic)))
        });
        tracing::error!("the catalog in the object store is not followed any more: {cause}");
        view.fail(cause.clone());
        polls.close(&cause);
    }

    /// Reads the chain at intervals, and when a reader meets a missing object. Returns what makes
    /// it impossible to go on.
    async fn follow(&mut self) -> StoreError {
        let interval = self.view.options.poll_interval;
        let mut backoff = Backoff::new(self.view.options.retry());
        loop {
            let certainly = tokio::select! {
                () = self.polls.wanted() => true,
                () = tokio::time::sleep(interval) => false,
            };
            loop {
                self.polls.begin();
                let result = self.poll(certainly || backoff.failures() > 0).await;
                self.polls.end(result.clone());
                let Err(error) = result else { break };
                if matches!(error, StoreError::OtherHistory) {
                    return error;
                }
                let wait = backoff.failed();
                let failures = backoff.failures();
                let detail = format!(
                    "the catalog in the object store cannot be followed, and what was read before \
                     is served: {error}"
                );
                tracing::warn!("{detail}; attempt {failures} failed, next attempt in {wait:?}");
                self.view.faults.report(Reason::CatalogNotFollowed, Some(detail));
                tokio::time::sleep(wait).await;
            }
            if backoff.failures() > 0 {
                tracing::info!("the catalog in the object store is followed again");
                self.view.faults.report(Reason::CatalogNotFollowed, None);
                backoff.succeeded();
            }
        }
    }

    /// Reads the chain up to its end.
    async fn poll(&mut self, certainly: bool) -> Result<(), StoreError> {
        loop {
            let polled = self.reader.poll(certainly).await;
            if self.reader.is_checked() {
                if !self.reader.goes_on() {
                    return Err(StoreError::OtherHistory);
                }
                // Also what precedes damage.
                self.apply().await?;
            }
            if polled? {
                return Ok(());
            }
        }
    }

    /// Applies what was read. Metadata comes first: what it says of a stream is true of the stream
    /// from then on.
    async fn apply(&mut self) -> Result<(), StoreError> {
        let Some(changes) = self.reader.take_changes() else { return Ok(()) };
        let state = self.reader.state();
        let is_all = changes == ChainChanges::All;
        let mut is_meta = is_all;
        let streams: Vec<StreamId> = match changes {
            ChainChanges::Of(touched) => {
                is_meta = !touched.meta.is_empty();
                let mut meta = self.view.meta.write();
                for key in touched.meta {
                    match state.meta.get(&key) {
                        Some(value) => drop(meta.insert(key, value.to_vec())),
                        None => drop(meta.remove(&key)),
                    }
                }
                touched.streams.into_iter().collect()
            }
            ChainChanges::All => {
                let all = state.meta.iter().map(|(key, value)| (key.clone(), value.to_vec()));
                *self.view.meta.write() = all.collect();
                let before = self.view.streams.read();
                let all: BTreeSet<_> = before.keys().chain(state.streams.keys()).copied().collect();
                all.into_iter().collect()
            }
        };
        for some in streams.chunks(CHUNK_STREAMS) {
            for id in some {
                if let Err(error) = apply_stream(&self.view, state, *id) {
                    self.reader.not_applied();
                    return Err(error);
                }
            }
            tokio::task::yield_now().await;
        }
        {
            let mut table = self.view.object_table.lock();
            table.retired.retain(|id, _| state.objects.contains_key(id));
        }
        let applied = Applied {
            number: state.head.number,
            version: state.header.version,
            term: state.head.term,
            written_at_ms: state.header.written_at_ms,
        };
        if is_meta {
            self.polls.meta_changed();
        }
        let is_reload = is_all && self.polls.last_applied().number > 0;
        self.polls.applied(applied, is_reload);
        Ok(())
    }
}

/// Makes a stream in memory what the chain has of it.
fn apply_stream(view: &View, state: &ChainState, id: StreamId) -> Result<(), StoreError> {
    let found = view.streams.read().get(&id).cloned();
    let row = state.streams.get(&id);
    let is_other = |stream: &Arc<StreamState>| row.is_none_or(|row| row.kind != stream.kind);
    let kept = match found {
        Some(stream) if is_other(&stream) => {
            view.streams.write().remove(&id);
            let (_, gone) = stream.tail.lock().delete();
            release(view, &gone);
            wake::notify(&stream.watchers());
            None
        }
        found => found,
    };
    let Some(row) = row else { return Ok(()) };
    let is_new = kept.is_none();
    let stream = kept.unwrap_or_else(|| {
        Arc::new(StreamState::new(id, row.kind, row.label.clone(), Tail::default()))
    });
    take_over(view, state, &stream, row)?;
    if is_new {
        view.streams.write().insert(id, stream);
    } else {
        wake::notify(&stream.watchers());
    }
    Ok(())
}

fn take_over(
    view: &View,
    state: &ChainState,
    stream: &StreamState,
    row: &ChainStream,
) -> Result<(), StoreError> {
    let ChainStream { epoch, start, uploaded_end, checkpoint, ranges, .. } = row;
    // Nothing else changes the ranges.
    let at = stream.tail.lock().new_ranges(ranges);
    let new = retain(view, state, &ranges[at.clone()])?;
    let stored =
        Stored { epoch: *epoch, start: *start, uploaded_end: *uploaded_end, checkpoint, ranges };
    let gone = stream.tail.lock().follow(&stored, at, new);
    release(view, &gone);
    Ok(())
}

/// Counts ranges as in use, and returns them.
fn retain(
    view: &View,
    state: &ChainState,
    ranges: &[ObjectRange],
) -> Result<Vec<Range>, StoreError> {
    let mut table = view.object_table.lock();
    let mut retained = Vec::with_capacity(ranges.len());
    for range in ranges {
        match object(&table, state, range.object) {
            Ok(object) => {
                let range = Range::of(object, range);
                table.retain(&range);
                retained.push(range);
            }
            Err(error) => {
                for range in &retained {
                    table.release(range);
                }
                return Err(error);
            }
        }
    }
    Ok(retained)
}

fn release(view: &View, gone: &[Range]) {
    let mut table = view.object_table.lock();
    for range in gone {
        table.release(range);
    }
}

/// Returns an object of the chain.
fn object(
    table: &ObjectTable,
    state: &ChainState,
    id: ObjectId,
) -> Result<Arc<ObjectInfo>, StoreError> {
    let Some(stored) = state.objects.get(&id) else {
        return Err(StoreError::Failed(format!(
            "a stream has a range in object {id}, which is not in the catalog"
        )));
    };
    // No other object has had this number: the chain goes on from what was applied before.
    Ok(table.live(id).cloned().unwrap_or_else(|| Arc::new(stored.info(state.header.store))))
}
