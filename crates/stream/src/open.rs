//! The beginning of an opening: finds the catalog in the object store, compares it with the WAL,
//! and puts a fence after it. `docs/format/chain.md`, section 8.

use std::sync::Arc;
use std::time::Duration;

use alluvium_wal::HeaderInfo;
use object_store::ObjectStore;
use tokio::time::Instant;
use uuid::Uuid;

use crate::chain::{
    BodyHeader, Chain, ChainChange, ChainState, ChainWriter, Fence, FenceError, Hints,
};
use crate::clock::unix_ms;
use crate::damage::Damage;
use crate::ends::LargestCount;
use crate::error::StoreError;
use crate::naming::WALS_DIRECTORY;
use crate::object_error::ObjectError;
use crate::objects::read_whole;
use crate::options::Options;
use crate::retry::Backoff;
use crate::types::StreamId;

/// The time in which one attempt to open the catalog begins its last request.
const ATTEMPT: Duration = Duration::from_secs(30);

/// What an opening knows of the WAL before it opens it.
pub(crate) struct LogHeader {
    pub(crate) header: HeaderInfo,
    pub(crate) node_id: u32,
}

impl LogHeader {
    /// Compares the catalog with the WAL and returns the fence of the opening, which raises the
    /// term to `term`, if given.
    pub(crate) fn fence(
        &self,
        state: Option<&ChainState>,
        term: Option<u32>,
    ) -> Result<Fence, StoreError> {
        let HeaderInfo { wal_id, epoch, mark, trim, .. } = self.header;
        let mut own = Vec::new();
        match state {
            None if epoch > 0 => return Err(StoreError::NoCatalog { wal: wal_id, epoch }),
            None => own.push(ChainChange::LargestCount(LargestCount::default().0)),
            Some(ChainState { header: then, .. }) => {
                if then.wal != wal_id {
                    return Err(StoreError::WrongWal { catalog: then.wal, wal: wal_id });
                }
                let (version, uploaded) = (then.version, then.cut);
                if version < mark || uploaded < trim {
                    return Err(StoreError::OldCatalog { version, mark, uploaded, trimmed: trim });
                }
                check_age(then, &self.header)?;
            }
        }
        Ok(Fence {
            wal: wal_id,
            epoch: epoch.saturating_add(1),
            incarnation: Uuid::new_v4(),
            node: self.node_id,
            written_at_ms: unix_ms().cast_unsigned(),
            term,
            next_stream: StreamId(0),
            own,
            hints: Hints::new(),
        })
    }
}

/// Checks that the chain does not know a later state of its WAL than this one.
pub(crate) fn check_age(then: &BodyHeader, log: &HeaderInfo) -> Result<(), StoreError> {
    if log.mark < then.wal_mark {
        return Err(StoreError::OldWal { mark: log.mark, seen: then.wal_mark });
    }
    if log.epoch < then.epoch {
        return Err(StoreError::OldWalEpoch { epoch: log.epoch, seen: then.epoch });
    }
    Ok(())
}

/// The catalog, open for this server.
pub(crate) struct OpenedChain {
    pub(crate) writer: ChainWriter,
    /// Stream ids that earlier openings have reserved.
    pub(crate) reserved_before: u64,
    /// The last object was a fence: that of a rebuild, or of an opening that has ended before its
    /// first delta. So the ids that the chain states as given to streams may be too low.
    pub(crate) is_after_fence: bool,
}

/// Opens the catalog of the store that the WAL belongs to. Waits while the object store does not
/// answer.
pub(crate) async fn open(
    objects: &Arc<dyn ObjectStore>,
    log: &LogHeader,
    options: &Options,
) -> Result<OpenedChain, StoreError> {
    until_answered(options, || try_open(objects, log, options)).await
}

/// Opens the catalog, again and again while the object store does not answer.
pub(crate) async fn until_answered<T, F>(
    options: &Options,
    mut open: impl FnMut() -> F,
) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut backoff = Backoff::new(options.retry());
    loop {
        match open().await {
            Err(StoreError::Object(error)) if error.is_temporary() => {
                wait_after(&mut backoff, &format!("opened: {error}")).await;
            }
            opened => return opened,
        }
    }
}

async fn try_open(
    objects: &Arc<dyn ObjectStore>,
    log: &LogHeader,
    options: &Options,
) -> Result<OpenedChain, StoreError> {
    let store = locate(&**objects, log.header.wal_id).await?;
    let chain = Chain::new(objects.clone(), store, options.retry());
    let state = chain.load().await?;
    let reserved_before = state.as_ref().map_or(0, |state| state.reserved.0);
    let is_after_fence =
        state.as_ref().is_some_and(|state| state.header.covers < state.header.version);
    let until = Instant::now() + ATTEMPT;
    let writer = ChainWriter::open(chain, state, until, |state| log.fence(state, None)).await;
    let writer = writer.map_err(StoreError::from)?;
    Ok(OpenedChain { writer, reserved_before, is_after_fence })
}

/// Puts a second fence after the first one, with a higher term: the WAL has lost records.
pub(crate) async fn raise_term(
    writer: ChainWriter,
    log: &LogHeader,
    options: &Options,
) -> Result<ChainWriter, StoreError> {
    let (chain, state) = writer.into_parts();
    let term = state.head.term.saturating_add(1);
    until_answered(options, || async {
        let until = Instant::now() + ATTEMPT;
        let decide = |state: Option<&ChainState>| log.fence(state, Some(term));
        let opened = ChainWriter::open(chain.clone(), Some(state.clone()), until, decide).await;
        opened.map_err(StoreError::from)
    })
    .await
}

/// Returns the store that a WAL belongs to: the one with its id, unless it was bound to another one
/// later.
///
/// # Errors
/// The object store cannot be asked, or has a damaged answer.
pub async fn locate(objects: &dyn ObjectStore, wal: Uuid) -> Result<Uuid, ObjectError> {
    let name = format!("{WALS_DIRECTORY}/{wal}");
    let Some(bytes) = read_whole(objects, &name).await? else { return Ok(wal) };
    let store = std::str::from_utf8(&bytes).ok().and_then(|text| Uuid::try_parse(text).ok());
    let damaged = || ObjectError::damaged(&name, Damage::of_all("it does not name a store"));
    store.ok_or_else(damaged)
}

/// Waits after the catalog could not be opened or written: `what` is one of these words, and why.
pub(crate) async fn wait_after(backoff: &mut Backoff, what: &str) {
    let (wait, failures) = (backoff.failed(), backoff.failures());
    tracing::warn!(
        "the catalog in the object store cannot be {what}; attempt {failures} failed, next attempt \
         in {wait:?}"
    );
    tokio::time::sleep(wait).await;
}

impl From<FenceError<StoreError>> for StoreError {
    fn from(error: FenceError<StoreError>) -> Self {
        match error {
            FenceError::Object(error) => error.into(),
            FenceError::Refused(error) => error,
        }
    }
}
