//! The one writer of a chain. `docs/format/chain.md`, sections 6 to 8.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use alluvium_wal::LogOffset;
use tokio::time::Instant;
use uuid::Uuid;

use super::body::{Body, BodyHeader, Hints, ObjectKind, Recorded};
use super::change::ChainChange;
use super::entry::{Entry, SealedEntry};
use super::objects::{Chain, SnapshotName, numbered};
use super::snapshot::Snapshot;
use super::state::{ChainState, Head};
use crate::object_error::ObjectError;
use crate::objects::delete_object;
use crate::sequence::{Created, Identity};
use crate::types::StreamId;

/// Stream ids that a fence reserves.
const RESERVED_STREAMS: u64 = 1 << 20;
/// Objects of the chain after which a snapshot is due.
const SNAPSHOT_OBJECTS: u64 = 64;
/// A snapshot is due earlier if the objects since the last one are larger than it, but not below
/// this size.
const SNAPSHOT_BYTES: u64 = 256 << 10;
/// How much older than the newest object of the chain an object is when it is deleted.
pub const DELETION_AGE: Duration = Duration::from_secs(24 * 3600);

/// What an opening states in its fence.
#[derive(Clone, Debug)]
pub struct Fence {
    /// The store. Of an existing chain it must be its store.
    pub store: Uuid,
    /// The WAL that the store is bound to from now on.
    pub wal: Uuid,
    /// The epoch of the WAL that is about to begin.
    pub epoch: u32,
    /// The run of the store that begins.
    pub incarnation: Uuid,
    /// For people.
    pub node: u32,
    /// For people.
    pub written_at_ms: u64,
    /// The term from now on; `None` if it stays.
    pub term: Option<u32>,
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
    /// The durable ends of streams with batches behind their uploaded ends.
    pub hints: Hints,
    /// See [`BodyHeader::cut`].
    pub cut: LogOffset,
    /// See [`BodyHeader::wal_mark`].
    pub wal_mark: u64,
    /// See [`BodyHeader::next_stream`].
    pub next_stream: StreamId,
    /// Nothing in the WAL is needed.
    pub is_clean: bool,
    /// For people.
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
        "{name} is not the object that this server knows: the object store is another one, an \
             old copy, or a directory that is not mounted"
    )]
    OtherObjectStore {
        /// The object.
        name: String,
    },
    /// Another opening has the store.
    #[error(
        "another server has opened the store: object {number} of its catalog is of incarnation \
             {incarnation} on node {node}"
    )]
    Fenced {
        /// The number of its object.
        number: u64,
        /// Its incarnation.
        incarnation: Uuid,
        /// Its node.
        node: u32,
    },
}

/// Why an opening has no fence.
#[derive(Debug, thiserror::Error)]
pub enum FenceError<E> {
    /// The object store does not answer, refuses a request, or has a damaged chain. The fence may
    /// be there or appear later; it has no effect if its number is taken.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// The opening does not accept the state.
    #[error("the state is refused")]
    Refused(E),
}

/// The writer of a chain, with its state.
pub struct ChainWriter {
    chain: Chain,
    /// The epoch of the WAL.
    epoch: u32,
    /// As of the last object that is known to be in the chain.
    state: ChainState,
    /// The next object, from the moment at which it may have been sent.
    frozen: Option<(Entry, SealedEntry)>,
    /// Objects behind the newest snapshot, and their bytes.
    since_snapshot: (u64, u64),
    snapshot: Option<SnapshotName>,
    /// The second-newest snapshot, once it was read back.
    verified: Option<SnapshotName>,
    /// Objects below the snapshots that are kept.
    kept: BTreeSet<u64>,
}

impl ChainWriter {
    /// Begins an opening: puts a fence behind the last object. `decide` compares the state with the
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
            let fence = decide(state.as_ref()).map_err(FenceError::Refused)?;
            let epoch = fence.epoch;
            let entry = fence.entry(state.as_ref());
            let sealed = entry.seal();
            chain.write_body(&sealed).await?;
            match chain.sequence.create(&sealed.object, until).await? {
                Created::Taken(object) => {
                    let entry = chain.open(&object).await?;
                    if let Err(error) = chain.extend(&mut state, entry) {
                        // The numbers behind the state may be those of deleted objects, which
                        // openings that began again have used.
                        state = chain.load_behind(state.as_ref()).await?.ok_or(error)?;
                    }
                    continue;
                }
                Created::Won => chain.extend(&mut state, entry)?,
            }
            let snapshots = chain.snapshots().await?;
            let number = state.as_ref().map_or(0, |state| state.head.number);
            // The free number was that of an object that was deleted since the chain was read.
            if snapshots.iter().any(|snapshot| snapshot.number >= number) {
                let lost = || chain.missing(number);
                state = chain.load_behind(state.as_ref()).await?.ok_or_else(lost)?;
                continue;
            }
            let state = state.expect("it has the fence");
            let snapshot = snapshots.into_iter().next();
            let objects = number - snapshot.as_ref().map_or(0, |snapshot| snapshot.number);
            return Ok(Self {
                chain,
                epoch,
                state,
                frozen: None,
                since_snapshot: (objects, 0),
                snapshot,
                verified: None,
                kept: BTreeSet::new(),
            });
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
        let sealed = entry.seal();
        self.frozen = Some((entry, sealed));
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
        let (entry, sealed) = self.frozen.as_ref().expect("a frozen delta");
        let Head { number, link, .. } = self.state.head;
        let sequence = &self.chain.sequence;
        let is_known = match sequence.identity(number).await? {
            Some(last) => last.link == link,
            // Another server has the store and has deleted it. The number behind it is that of its
            // fence, or of the frozen delta right below the fence, and neither is deleted.
            None => sequence.exists(entry.number).await?,
        };
        if !is_known {
            return Err(PublishError::OtherObjectStore { name: sequence.name(number) });
        }
        self.chain.write_body(sealed).await?;
        if let Created::Taken(object) = sequence.create(&sealed.object, until).await? {
            let BodyHeader { incarnation, node, .. } = self.chain.open(&object).await?.body.header;
            return Err(PublishError::Fenced { number: entry.number, incarnation, node });
        }
        let (entry, sealed) = self.frozen.take().expect("a frozen delta");
        let body = sealed.body_elsewhere.as_ref().unwrap_or(&sealed.object.body);
        self.since_snapshot.0 += 1;
        self.since_snapshot.1 += body.len() as u64;
        self.state.apply(entry).expect("it was made for this state");
        Ok(())
    }

    /// Whether a snapshot should be written.
    pub fn is_snapshot_due(&self) -> bool {
        let (objects, bytes) = self.since_snapshot;
        let last_bytes = self.snapshot.as_ref().map_or(0, |snapshot| snapshot.size_bytes);
        objects >= SNAPSHOT_OBJECTS || bytes > last_bytes.max(SNAPSHOT_BYTES)
    }

    /// Writes a snapshot of the current state.
    ///
    /// # Errors
    /// It cannot be written. Nothing depends on it.
    pub async fn write_snapshot(&mut self) -> Result<(), ObjectError> {
        let written = self.chain.write_snapshot(Snapshot::of(self.state.clone())).await?;
        self.snapshot = Some(written);
        self.since_snapshot = (0, 0);
        Ok(())
    }

    /// Deletes what is below the second-newest snapshot and at least `age` older than the newest
    /// object of the chain: deltas, older snapshots, and bodies without an object. Fences and the
    /// objects right below them stay. Returns how many objects were deleted.
    ///
    /// # Errors
    /// An object cannot be listed, read or deleted. Nothing depends on it.
    pub async fn clean_up(&mut self, age: Duration) -> Result<usize, ObjectError> {
        let chain = &self.chain;
        let objects = chain.list(&format!("{}/chain", chain.prefix)).await?;
        let newest = objects.iter().map(|object| SystemTime::from(object.last_modified)).max();
        let Some(before) = newest.and_then(|newest| newest.checked_sub(age)) else { return Ok(0) };
        let is_old =
            |object: &object_store::ObjectMeta| SystemTime::from(object.last_modified) <= before;
        let Some((verified, older)) = self.verified_snapshot().await? else { return Ok(0) };
        let mut deleted = 0;
        for object in objects.iter().filter(|object| is_old(object)) {
            let number = object.location.filename().and_then(|it| u64::from_str_radix(it, 16).ok());
            let Some(number) = number.filter(|number| *number < verified.number) else { continue };
            if self.kept.contains(&number) {
                continue;
            }
            // A replaced writer has one of the two in flight.
            if self.is_fence(number).await? || self.is_fence(number + 1).await? {
                self.kept.insert(number);
                continue;
            }
            self.chain.sequence.delete([number]).await?;
            deleted += 1;
        }
        for snapshot in older {
            self.chain.delete_snapshot(&snapshot).await?;
            deleted += 1;
        }
        Ok(deleted + self.delete_bodies(is_old).await?)
    }

    /// Deletes old bodies whose objects do not exist, or are others.
    async fn delete_bodies(
        &self,
        is_old: impl Fn(&object_store::ObjectMeta) -> bool,
    ) -> Result<usize, ObjectError> {
        let chain = &self.chain;
        let prefix = chain.bodies_prefix();
        let frozen = self.frozen.as_ref().map(|(entry, _)| entry.number);
        let mut deleted = 0;
        for body in chain.list(&prefix).await?.iter().filter(|body| is_old(body)) {
            let Some((number, nonce)) = numbered(&prefix, body.location.as_ref()) else { continue };
            let object = chain.sequence.identity(number).await?;
            let is_used = object.is_some_and(|it| it.link == crate::sequence::link(nonce));
            if is_used || frozen == Some(number) {
                continue;
            }
            delete_object(&*chain.store, body.location.as_ref()).await?;
            deleted += 1;
        }
        Ok(deleted)
    }

    async fn is_fence(&self, number: u64) -> Result<bool, ObjectError> {
        let found = self.chain.sequence.identity(number).await?;
        let is_fence = |found: Identity| ObjectKind::of(found.kind) == Some(ObjectKind::Fence);
        Ok(found.is_some_and(is_fence))
    }

    /// Returns the second-newest snapshot that counts and is intact, and those that are older.
    async fn verified_snapshot(
        &mut self,
    ) -> Result<Option<(SnapshotName, Vec<SnapshotName>)>, ObjectError> {
        let mut snapshots = self.chain.snapshots().await?.into_iter();
        let mut intact = 0;
        while let Some(snapshot) = snapshots.next() {
            let is_known = self.verified.as_ref() == Some(&snapshot);
            let counts = is_known
                || match self.chain.read_snapshot(&snapshot).await {
                    Ok(found) => found.is_some(),
                    Err(error) if error.is_loss() => false,
                    Err(error) => return Err(error),
                };
            intact += usize::from(counts);
            if intact == 2 {
                self.verified = Some(snapshot.clone());
                return Ok(Some((snapshot, snapshots.collect())));
            }
        }
        Ok(None)
    }
}

impl Fence {
    /// Returns the fence behind `state`.
    fn entry(self, state: Option<&ChainState>) -> Entry {
        let head = state.map_or(Head { number: 0, link: 0, term: 0 }, |state| state.head);
        let then = state.map(|state| &state.header);
        let opening = self.epoch.max(then.map_or(0, |then| then.opening) + 1);
        let is_same_wal = then.is_some_and(|then| then.wal == self.wal);
        let of_wal = |value: fn(&BodyHeader) -> u64| match then.filter(|_| is_same_wal) {
            Some(then) => value(then),
            None => 0,
        };
        let header = BodyHeader {
            store: self.store,
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
            next_stream: then.map_or(StreamId(0), |then| then.next_stream),
        };
        let reserved = state.map_or(0, |state| state.reserved.0) + RESERVED_STREAMS;
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
        Entry {
            number: head.number + 1,
            nonce: Uuid::new_v4(),
            previous: head.link,
            term: self.term.unwrap_or(head.term),
            kind: ObjectKind::Fence,
            body: Body { header, recorded: Vec::new(), own, hints },
        }
    }
}

impl Delta {
    /// Returns the delta behind `state`.
    fn entry(self, state: &ChainState, epoch: u32) -> Entry {
        let ChainState { head, header: then, .. } = state;
        assert!(self.version > then.version, "version {} is not above", self.version);
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
