//! Rebuild after the loss of the WAL: binds the store to a new one, and declares what the old one
//! may have had. `docs/rebuild.md`.
//!
//! | crash after | then |
//! |---|---|
//! | the object that names the store of the new WAL | the rebuild is repeated with the same WAL |
//! | the fence | the store is bound; repeating the rebuild changes nothing |

use std::sync::Arc;
use std::time::Duration;

use alluvium_wal::HeaderInfo;
use object_store::{ObjectStore, PutMode, PutPayload};
use tokio::time::Instant;
use uuid::Uuid;

use crate::chain::{
    Chain, ChainChange, ChainState, ChainStream, ChainWriter, Fence, FenceError, Hints,
};
use crate::clock::unix_ms;
use crate::naming::WALS_DIRECTORY;
use crate::object_error::ObjectError;
use crate::objects::{Request, within};
use crate::open::locate;
use crate::options::Options;
use crate::tail::UNHINTED_OFFSETS;
use crate::types::{StreamId, StreamOffset};

/// The time in which the fence must be created.
const ATTEMPT: Duration = Duration::from_secs(60);

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

/// A store whose WAL is lost.
pub struct Rebuild {
    chain: Chain,
    state: ChainState,
}

impl Rebuild {
    /// Loads the catalog of a store.
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
        Ok(Self { chain, state })
    }

    /// Returns the catalog, which is what is left.
    pub fn state(&self) -> &ChainState {
        &self.state
    }

    /// Whether the last server has stated that its WAL had nothing else. Then nothing is lost.
    pub fn is_clean(&self) -> bool {
        self.state.header.is_clean
    }

    /// Returns what each stream loses with the WAL. All streams may have been appended to after the
    /// last change of the catalog, unless it [is clean](Self::is_clean).
    pub fn lost_ends(&self) -> Vec<LostEnd> {
        lost_ends(&self.state)
    }

    /// Binds the store to a new WAL: the next server that opens it continues with what is left. A
    /// server that still has the old WAL loses the store. Returns false if it was bound already.
    ///
    /// # Errors
    /// The WAL is not new, or the object store does not answer.
    pub async fn bind(
        self,
        objects: &Arc<dyn ObjectStore>,
        wal: &HeaderInfo,
        node_id: u32,
    ) -> Result<bool, RebuildError> {
        let HeaderInfo { wal_id, epoch, .. } = *wal;
        let store = self.state.header.store;
        if self.state.header.wal == wal_id {
            return Ok(false);
        }
        if epoch > 0 {
            return Err(RebuildError::UsedWal { wal: wal_id, epoch });
        }
        name_store(&**objects, wal_id, store).await?;
        let until = Instant::now() + ATTEMPT;
        let number = self.state.head.number;
        let decide = |state: Option<&ChainState>| match state {
            // What the caller has accepted.
            Some(state) if state.head.number == number => Ok(fence(state, wal, node_id)),
            _ => Err(RebuildError::Changed),
        };
        match ChainWriter::open(self.chain, Some(self.state), until, decide).await {
            Ok(_) => Ok(true),
            Err(FenceError::Object(error)) => Err(error.into()),
            Err(FenceError::Refused(error)) => Err(error),
        }
    }
}

fn lost_ends(state: &ChainState) -> Vec<LostEnd> {
    if state.header.is_clean {
        return Vec::new();
    }
    let ends = state.streams.iter().map(|(id, stream)| {
        let from = uploaded_end(stream);
        let known = state.hints.get(id).map_or(from, |hint| from.max(*hint));
        // What an earlier rebuild has declared, if nothing after it is uploaded.
        let declared = state.gaps.range((*id, StreamOffset(0))..=(*id, from)).next_back();
        let from = declared.map_or(from, |(_, end)| from.max(*end));
        let known_end = known.max(from);
        let resume = StreamOffset(known_end.0.saturating_add(UNHINTED_OFFSETS));
        LostEnd { stream: *id, from, known_end, resume }
    });
    ends.collect()
}

fn uploaded_end(stream: &ChainStream) -> StreamOffset {
    stream.uploaded_end.max(stream.start)
}

/// Returns the fence that binds the store. The opening of the new WAL finds the gaps, raises the
/// term, and notes the ends.
fn fence(state: &ChainState, wal: &HeaderInfo, node: u32) -> Fence {
    let gaps = lost_ends(state).into_iter().map(|lost| ChainChange::Gap {
        stream: lost.stream,
        offsets: uploaded_end(&state.streams[&lost.stream])..lost.resume,
    });
    let is_lossy = !state.header.is_clean;
    Fence {
        wal: wal.wal_id,
        epoch: wal.epoch,
        incarnation: Uuid::new_v4(),
        node,
        written_at_ms: unix_ms().cast_unsigned(),
        // Also if there is no stream: the opening raises it only for gaps.
        term: is_lossy.then(|| state.head.term.saturating_add(1)),
        next_stream: if is_lossy { state.reserved } else { StreamId(0) },
        own: gaps.collect(),
        hints: Hints::new(),
    }
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
