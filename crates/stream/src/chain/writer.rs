//! The one writer of a chain. `docs/format/chain.md`, sections 6 to 8.

use std::fmt;

use alluvium_wal::LogOffset;
use tokio::time::Instant;
use uuid::Uuid;

use super::body::{Body, BodyHeader, Hints, ObjectKind, Recorded};
use super::change::ChainChange;
use super::entry::{Entry, SealedEntry};
use super::objects::{Chain, SnapshotName};
use super::snapshot::Snapshot;
use super::state::{ChainState, Head};
use crate::object_error::ObjectError;
use crate::sequence::Created;
use crate::types::StreamId;

/// Stream ids that a fence reserves.
pub(crate) const RESERVED_STREAMS: u64 = 1 << 20;
/// Objects of the chain after which a snapshot is due.
const SNAPSHOT_OBJECTS: u64 = 64;
/// A snapshot is due earlier if the objects since the last one are larger than it, and than this.
const SNAPSHOT_BYTES: u64 = 256 << 10;

/// What an opening states in its fence.
#[derive(Clone, Debug)]
pub struct Fence {
    /// The WAL that the store is bound to from now on.
    pub wal: Uuid,
    /// The epoch of the WAL that is about to begin.
    pub epoch: u32,
    /// The run of the store that begins.
    pub incarnation: Uuid,
    /// The number of the server, for people.
    pub node: u32,
    /// Unix time, for people.
    pub written_at_ms: u64,
    /// The term from now on, not below the one before; `None` if it stays.
    pub term: Option<u32>,
    /// Ids below it count as given to streams from now on, although the chain does not have these
    /// streams.
    pub next_stream: StreamId,
    /// Gaps, and other changes of a fence alone, in addition to those that each fence has.
    pub own: Vec<ChainChange>,
    /// Ends that replace those of the object before it.
    pub hints: Hints,
}

/// What a delta states.
#[derive(Clone, Debug)]
pub struct Delta {
    /// Its version: greater than all before it in the chain and in the WAL.
    pub version: u64,
    /// The lists that were recorded in the WAL since the last delta. All of them are durable.
    pub recorded: Vec<Recorded>,
    /// The changes of the chain alone.
    pub own: Vec<ChainChange>,
    /// The durable ends of streams with batches after their uploaded ends.
    pub hints: Hints,
    /// See [`BodyHeader::cut`].
    pub cut: LogOffset,
    /// See [`BodyHeader::wal_mark`].
    pub wal_mark: u64,
    /// See [`BodyHeader::next_stream`].
    pub next_stream: StreamId,
    /// Nothing in the WAL is needed.
    pub is_clean: bool,
    /// Unix time, for people.
    pub written_at_ms: u64,
}

/// Why a delta is not in the chain.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PublishError {
    /// The object store does not answer, or refuses a request. The delta may be there or appear
    /// later, so only the same one may be published.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// The object store does not have the object that this writer knows as the last one. It is
    /// another one, or an old copy, or a directory that is not mounted. The delta was not sent.
    #[error(
        "{name} is not the object that this server knows: the object store is another one, an old \
         copy, or a directory that is not mounted"
    )]
    OtherObjectStore {
        /// The object.
        name: String,
    },
    /// Another opening has the store. This writer is no longer that of the chain.
    #[error("another server has opened the store: object {number} of its catalog is {by}")]
    Fenced {
        /// The number of the other server's object.
        number: u64,
        /// The other server, as far as the object shows it.
        by: By,
    },
}

/// The writer of an object of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The object states it.
    Server {
        /// Its incarnation.
        incarnation: Uuid,
        /// Its number.
        node: u32,
    },
    /// The object cannot be decoded, for example because it is of a later version.
    Unknown,
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server { incarnation, node } => {
                write!(f, "of incarnation {incarnation} on node {node}")
            }
            Self::Unknown => f.write_str("of an unknown server"),
        }
    }
}

/// Why an opening has no fence.
#[derive(Debug, thiserror::Error)]
pub enum FenceError<E> {
    /// The object store does not answer, refuses a request, or has a damaged chain. The fence may
    /// be there or appear later; it has no effect if its number is taken.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// The opening does not accept the state.
    #[error("the catalog in the object store is refused: {0}")]
    Refused(E),
}

/// The writer of a chain, with its state.
pub struct ChainWriter {
    chain: Chain,
    /// The epoch of the WAL.
    epoch: u32,
    /// As of the last object that is known to be in the chain.
    state: ChainState,
    frozen: Option<Frozen>,
    /// Objects after the newest snapshot, and their bytes.
    since_snapshot: (u64, u64),
    /// The length of the newest snapshot.
    snapshot_bytes: u64,
}

/// The next object, from the moment at which it may have been sent.
#[derive(Clone)]
struct Frozen {
    entry: Entry,
    sealed: SealedEntry,
    /// If the body is an object of its own: it is complete.
    has_body: bool,
    /// It may have been sent, so its number can have no other object.
    is_sent: bool,
}

impl ChainWriter {
    /// Begins an opening: puts a fence after the last object. `decide` compares the state with the
    /// WAL (`None`: there is no chain yet) and returns the fence; it is called again if the chain
    /// has grown meanwhile.
    ///
    /// # Errors
    /// `decide` refuses the state; or the object store does, or has not answered before `until`.
    pub async fn open<E>(
        chain: Chain,
        mut state: Option<ChainState>,
        until: Instant,
        mut decide: impl FnMut(Option<&ChainState>) -> Result<Fence, E>,
    ) -> Result<Self, FenceError<E>> {
        loop {
            // In another object store, or in one that has deleted what the state knows, the fence
            // would make a hole.
            if let Some(Head { number, link, is_snapshot: false, .. }) =
                state.as_ref().map(|state| state.head)
                && chain.sequence.identity(number).await?.is_none_or(|found| found.link != link)
            {
                state = Some(beyond(&chain, number, chain.missing(number)).await?);
            }
            let fence = decide(state.as_ref()).map_err(FenceError::Refused)?;
            let epoch = fence.epoch;
            let entry = fence.entry(&chain, state.as_ref())?;
            let (number, sealed) = (entry.number, entry.seal(chain.max_body_bytes));
            chain.write_body(&sealed).await?;
            match chain.sequence.create(&sealed.object, until).await? {
                Created::Won => {
                    chain.extend(&mut state, entry)?;
                    let snapshots = chain.snapshots().await?;
                    let newest = snapshots.first();
                    if newest.is_none_or(|newest| newest.number < number) {
                        let state = state.expect("it has the fence");
                        return Ok(Self::opened(chain, epoch, state, newest));
                    }
                    // The free number was that of an object that was deleted since the chain was
                    // read.
                    state = Some(beyond(&chain, number, chain.missing(number)).await?);
                }
                Created::Taken(object) => {
                    let read = async {
                        let entry = chain.decode(object).await?;
                        chain.extend(&mut state, entry)?;
                        chain.read_on(state.as_mut().expect("it was extended")).await
                    };
                    match read.await {
                        Ok(()) => {}
                        // Numbers after the state may be those of deleted objects, which openings
                        // that began again have used.
                        Err(error) if error.is_loss() => {
                            state = Some(beyond(&chain, number - 1, error).await?);
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
            }
            if Instant::now() >= until {
                let reason = "other servers open the store at the same time".into();
                return Err(ObjectError::failed(&chain.prefix, reason).into());
            }
        }
    }

    /// Returns the writer after its fence. `snapshot` is the newest one.
    fn opened(
        chain: Chain,
        epoch: u32,
        state: ChainState,
        snapshot: Option<&SnapshotName>,
    ) -> Self {
        let objects = state.head.number - snapshot.map_or(0, |snapshot| snapshot.number);
        Self {
            chain,
            epoch,
            state,
            frozen: None,
            since_snapshot: (objects, 0),
            snapshot_bytes: snapshot.map_or(0, |snapshot| snapshot.size_bytes),
        }
    }

    /// Returns the state after the last object that is known to be in the chain.
    pub fn state(&self) -> &ChainState {
        &self.state
    }

    /// Whether a delta was frozen and is not known to be in the chain.
    pub fn is_frozen(&self) -> bool {
        self.frozen.is_some()
    }

    /// Fixes the next object of the chain.
    ///
    /// # Panics
    /// If one is fixed already, or the delta contradicts the state.
    pub fn freeze(&mut self, delta: Delta) {
        assert!(self.frozen.is_none(), "one delta at a time");
        let entry = delta.entry(&self.state, self.epoch);
        if let Err(damage) = self.state.check(&entry) {
            panic!("a delta that is not the next object: {damage}");
        }
        let sealed = entry.seal(self.chain.max_body_bytes);
        self.frozen = Some(Frozen { entry, sealed, has_body: false, is_sent: false });
    }

    /// Creates the frozen delta, and tries again until the outcome is certain.
    ///
    /// # Errors
    /// It is not known to be in the chain. After [`PublishError::Fenced`] it never will be, and
    /// this writer is no longer the one of the chain.
    ///
    /// # Panics
    /// If none is frozen.
    pub async fn publish(&mut self, until: Instant) -> Result<(), PublishError> {
        let Head { number, link, .. } = self.state.head;
        let sequence = &self.chain.sequence;
        let frozen = self.frozen.as_mut().expect("a frozen delta");
        let last = sequence.identity(number).await?;
        // If another server has the store, the last object may be deleted, and its number used by
        // an opening that had to begin again. The number after it is that of the other server's
        // fence, or of the frozen delta right below that fence, and neither is deleted.
        if last.is_none_or(|last| last.link != link) && !sequence.exists(number + 1).await? {
            return Err(PublishError::OtherObjectStore { name: sequence.name(number) });
        }
        if !frozen.has_body {
            self.chain.write_body(&frozen.sealed).await?;
            frozen.has_body = true;
        }
        frozen.is_sent = true;
        if let Created::Taken(object) = sequence.create(&frozen.sealed.object, until).await? {
            let number = object.number;
            let by = match self.chain.decode(object).await {
                Ok(Entry { body: Body { header, .. }, .. }) => {
                    By::Server { incarnation: header.incarnation, node: header.node }
                }
                Err(_) => By::Unknown,
            };
            return Err(PublishError::Fenced { number, by });
        }
        let Frozen { entry, sealed, .. } = self.frozen.take().expect("a frozen delta");
        let body = sealed.body_elsewhere.as_ref().unwrap_or(&sealed.object.body);
        self.since_snapshot.0 += 1;
        self.since_snapshot.1 += body.len() as u64;
        self.state.apply(entry).expect("it was checked when it was frozen");
        Ok(())
    }

    /// Takes back a frozen delta that was certainly not sent, and returns its recorded lists.
    /// Returns `None` if there is no such delta.
    pub fn discard(&mut self) -> Option<Vec<Recorded>> {
        let unsent = self.frozen.take_if(|frozen| !frozen.is_sent);
        unsent.map(|frozen| frozen.entry.body.recorded)
    }

    /// Whether a delta is frozen that may have been sent.
    pub fn is_sent(&self) -> bool {
        self.frozen.as_ref().is_some_and(|frozen| frozen.is_sent)
    }

    /// Returns the chain.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Returns the name of the last object that is known to be in the chain: after
    /// [`Self::open`] the fence.
    pub(crate) fn last_name(&self) -> String {
        self.chain.sequence.name(self.state.head.number)
    }

    /// Ends writing. Returns the chain and its last known state.
    pub fn into_parts(self) -> (Chain, ChainState) {
        (self.chain, self.state)
    }

    /// Whether the last object that this writer knows is the last one of the chain, as far as the
    /// object store shows.
    ///
    /// # Errors
    /// The object store cannot be asked.
    pub async fn is_newest(&self) -> Result<bool, ObjectError> {
        let Head { number, link, .. } = self.state.head;
        let last = self.chain.sequence.identity(number).await?;
        let is_known = last.is_some_and(|last| last.link == link);
        Ok(is_known && !self.chain.sequence.exists(number + 1).await?)
    }

    /// Returns the snapshot that should be written now, if one is due. Until
    /// [`Self::snapshot_written`], it is due again.
    pub fn due_snapshot(&self) -> Option<Snapshot> {
        let (objects, bytes) = self.since_snapshot;
        let is_due = objects >= SNAPSHOT_OBJECTS || bytes > self.snapshot_bytes.max(SNAPSHOT_BYTES);
        is_due.then(|| Snapshot::of(self.state.clone()))
    }

    /// Records that a snapshot of the state after object `number` was written, with this length.
    pub fn snapshot_written(&mut self, number: u64, size_bytes: u64) {
        self.since_snapshot = (self.state.head.number - number, 0);
        self.snapshot_bytes = size_bytes;
    }
}

/// Loads a chain that must reach further than `known`; else returns the error.
async fn beyond(chain: &Chain, known: u64, error: ObjectError) -> Result<ChainState, ObjectError> {
    chain.load_beyond(known).await?.ok_or(error)
}

impl Fence {
    /// Returns the fence after `state`.
    fn entry(self, chain: &Chain, state: Option<&ChainState>) -> Result<Entry, ObjectError> {
        let none = Head { number: 0, link: 0, term: 0, is_snapshot: false };
        let head = state.map_or(none, |state| state.head);
        let then = state.map(|state| &state.header);
        let term = self.term.unwrap_or(head.term);
        assert!(term >= head.term, "a term {term} below {}", head.term);
        let exhausted = |what: &str| {
            let reason = format!("the numbers of {what} are exhausted");
            ObjectError::failed(&chain.sequence.name(head.number + 1), reason)
        };
        let next = then.map_or(0, |then| then.opening).checked_add(1);
        let opening = next.ok_or_else(|| exhausted("openings"))?.max(self.epoch);
        let reserved = state.map_or(0, |state| state.reserved.0).checked_add(RESERVED_STREAMS);
        let reserved = reserved.ok_or_else(|| exhausted("streams"))?;
        let is_same_wal = then.is_some_and(|then| then.wal == self.wal);
        let of_wal = |value: fn(&BodyHeader) -> u64| match then.filter(|_| is_same_wal) {
            Some(then) => value(then),
            None => 0,
        };
        let header = BodyHeader {
            store: chain.id,
            wal: self.wal,
            incarnation: self.incarnation,
            version: u64::from(opening) << 32,
            epoch: self.epoch,
            opening,
            node: self.node,
            is_clean: false,
            written_at_ms: self.written_at_ms,
            covers: then.map_or(0, |then| then.covers),
            cut: LogOffset(of_wal(|then| then.cut.0)),
            wal_mark: of_wal(|then| then.wal_mark),
            next_stream: then.map_or(StreamId(0), |then| then.next_stream).max(self.next_stream),
        };
        let mut own = vec![
            ChainChange::BeginIncarnation(self.incarnation),
            ChainChange::ReserveStreams(StreamId(reserved)),
        ];
        if !is_same_wal {
            own.push(ChainChange::BindWal(self.wal));
        }
        own.extend(self.term.map(ChainChange::SetTerm));
        own.extend(self.own);
        let mut hints = state.map_or_else(Hints::new, |state| state.hints.clone());
        hints.extend(self.hints);
        Ok(Entry {
            number: head.number + 1,
            nonce: Uuid::new_v4(),
            previous: head.link,
            term,
            kind: ObjectKind::Fence,
            body: Body { header, recorded: Vec::new(), own, hints },
        })
    }
}

impl Delta {
    /// Returns the delta after `state`.
    fn entry(self, state: &ChainState, epoch: u32) -> Entry {
        let ChainState { head, header: then, .. } = state;
        let header = BodyHeader {
            version: self.version,
            epoch,
            is_clean: self.is_clean,
            written_at_ms: self.written_at_ms,
            covers: self.version,
            cut: self.cut,
            wal_mark: self.wal_mark,
            next_stream: self.next_stream,
            ..then.clone()
        };
        Entry {
            number: head.number + 1,
            nonce: Uuid::new_v4(),
            previous: head.link,
            term: head.term,
            kind: ObjectKind::Delta,
            body: Body { header, recorded: self.recorded, own: self.own, hints: self.hints },
        }
    }
}

#[cfg(test)]
mod tests;
