//! The objects of one chain. `docs/format/chain.md`, section 2.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use uuid::Uuid;

use super::entry::{Entry, SealedEntry};
use super::snapshot::Snapshot;
use super::state::ChainState;
use crate::bandwidth::Bandwidth;
use crate::naming::catalog_prefix;
use crate::object::Damage;
use crate::object_error::ObjectError;
use crate::objects::{Request, StoreHandle, Writer, delete_object, within};
use crate::request_class::RequestClass;
use crate::sequence::{Sealed, Sequence};

/// Objects of the chain that are read at the same time.
const READS: usize = 16;
/// Bytes of a large object that one GET fetches.
const PIECE_BYTES: u64 = 8 << 20;
/// Pieces of a large object that are read at the same time.
const PIECES: usize = 4;

/// A snapshot as it is listed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SnapshotName {
    /// The number of the object that it is the state after.
    pub number: u64,
    /// Random.
    pub nonce: Uuid,
    /// Its length.
    pub size_bytes: u64,
}

/// Access to the chain of one store. Cheap to clone.
#[derive(Clone)]
pub struct Chain {
    pub(super) store: Arc<dyn ObjectStore>,
    id: Uuid,
    pub(super) prefix: String,
    pub(super) sequence: Sequence,
    bandwidth: Arc<Bandwidth>,
}

impl Chain {
    /// Returns the chain of the store with this id. `retry` is the first and the longest delay
    /// between two attempts to create an object.
    pub fn new(store: Arc<dyn ObjectStore>, id: Uuid, retry: (Duration, Duration)) -> Self {
        let prefix = catalog_prefix(id);
        let sequence = Sequence::new(store.clone(), format!("{prefix}/chain"), retry);
        Self { store, id, prefix, sequence, bandwidth: Arc::new(Bandwidth::new(0)) }
    }

    fn snapshot_name(&self, number: u64, nonce: Uuid) -> String {
        format!("{}/{number:016x}-{}", self.snapshots_prefix(), nonce.simple())
    }

    fn body_name(&self, number: u64, nonce: Uuid) -> String {
        format!("{}/{number:016x}-{}", self.bodies_prefix(), nonce.simple())
    }

    fn snapshots_prefix(&self) -> String {
        format!("{}/snapshots", self.prefix)
    }

    pub(super) fn bodies_prefix(&self) -> String {
        format!("{}/bodies", self.prefix)
    }

    /// Reads a fence or delta; `None` if there is none with this number.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or is of a later version.
    pub async fn read(&self, number: u64) -> Result<Option<Entry>, ObjectError> {
        match self.sequence.get(number).await? {
            Some(object) => self.open(&object).await.map(Some),
            None => Ok(None),
        }
    }

    /// Decodes a fence or delta, whose body may be elsewhere.
    pub(super) async fn open(&self, object: &Sealed) -> Result<Entry, ObjectError> {
        let name = self.sequence.name(object.number);
        let elsewhere = Entry::body_elsewhere(object).map_err(|error| error.of(&name))?;
        let (name, body) = match elsewhere {
            None => (name, object.body.clone()),
            Some(elsewhere) => {
                let name = self.body_name(object.number, object.nonce);
                let body = self.read_large(&name, elsewhere.length_bytes).await;
                (name.clone(), body.map_err(|error| missing(&name, error))?)
            }
        };
        let entry = Entry::open(object, &body).map_err(|error| error.of(&name))?;
        self.check_store(&name, entry.body.header.store).map(|()| entry)
    }

    /// Checks that an object states the store in its name.
    fn check_store(&self, name: &str, stated: Uuid) -> Result<(), ObjectError> {
        if stated == self.id {
            return Ok(());
        }
        let reason = format!("it belongs to store {stated}");
        Err(ObjectError::damaged(name, Damage { position: 0, reason }))
    }

    /// Loads the state after the last object; `None` if the chain has no object. Reads the newest
    /// snapshot that counts and the objects behind it. A damaged snapshot is passed over for the
    /// one before it.
    ///
    /// # Errors
    /// An object cannot be read, is damaged or missing, or is of a later version.
    pub async fn load(&self) -> Result<Option<ChainState>, ObjectError> {
        let mut snapshots = self.snapshots().await?;
        loop {
            let base = self.newest_that_counts(&snapshots).await?;
            let from = base.as_ref().map_or(1, |state| state.head.number);
            let Some(last) = self.sequence.last(from.max(1)).await? else {
                return match snapshots.iter().find(|it| it.number > 0) {
                    Some(found) => Err(self.lost_end(found)),
                    None => Ok(None),
                };
            };
            let mut state = base;
            let next = state.as_ref().map_or(1, |state| state.head.number + 1);
            let mut objects = futures::stream::iter(next..=last)
                .map(|number| async move { (number, self.read(number).await) })
                .buffered(READS);
            while let Some((number, entry)) = objects.next().await {
                let Some(entry) = entry? else { return Err(self.missing(number)) };
                self.extend(&mut state, entry)?;
            }
            drop(objects);
            let Some(mut state) = state else { return Err(self.missing(1)) };
            self.read_on(&mut state).await?;
            // An absent number is the end only if no snapshot is behind it: it may be that of an
            // object that was deleted since the snapshots were listed.
            let later = self.snapshots().await?;
            match later.iter().find(|it| it.number > state.head.number) {
                Some(found) if snapshots.contains(found) => return Err(self.lost_end(found)),
                Some(_) => snapshots = later,
                None => return Ok(Some(state)),
            }
        }
    }

    /// Loads the chain; `None` if it does not reach further than `known`.
    pub(super) async fn load_behind(
        &self,
        known: Option<&ChainState>,
    ) -> Result<Option<Option<ChainState>>, ObjectError> {
        let known = known.map_or(0, |state| state.head.number);
        let loaded = self.load().await?;
        Ok(loaded.filter(|state| state.head.number > known).map(Some))
    }

    /// Applies the objects that were created since the state was read. Returns whether there were
    /// any.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub async fn follow(&self, state: &mut ChainState) -> Result<bool, ObjectError> {
        if self.read_on(state).await? {
            return Ok(true);
        }
        let snapshots = self.snapshots().await?;
        if snapshots.iter().all(|snapshot| snapshot.number <= state.head.number) {
            return Ok(false);
        }
        // The next object was deleted since: the reader was away for long.
        match self.load().await? {
            Some(now) => *state = now,
            None => return Err(self.missing(state.head.number + 1)),
        }
        Ok(true)
    }

    /// Applies the objects behind `state`, up to the first number that is absent.
    async fn read_on(&self, state: &mut ChainState) -> Result<bool, ObjectError> {
        let before = state.head.number;
        while let Some(entry) = self.read(state.head.number + 1).await? {
            self.apply(state, entry)?;
        }
        Ok(state.head.number > before)
    }

    pub(super) fn apply(&self, state: &mut ChainState, entry: Entry) -> Result<(), ObjectError> {
        let name = self.sequence.name(entry.number);
        state.apply(entry).map_err(|damage| ObjectError::damaged(&name, damage))
    }

    /// Applies the first or the next object.
    pub(super) fn extend(
        &self,
        state: &mut Option<ChainState>,
        entry: Entry,
    ) -> Result<(), ObjectError> {
        match state {
            Some(state) => return self.apply(state, entry),
            None => {
                let name = self.sequence.name(entry.number);
                let first = ChainState::first(entry);
                *state = Some(first.map_err(|damage| ObjectError::damaged(&name, damage))?);
            }
        }
        Ok(())
    }

    /// Returns the state of the newest snapshot that counts.
    async fn newest_that_counts(
        &self,
        newest_first: &[SnapshotName],
    ) -> Result<Option<ChainState>, ObjectError> {
        for name in newest_first {
            match self.read_snapshot(name).await {
                Ok(Some(snapshot)) => return Ok(Some(snapshot.state)),
                Ok(None) => {}
                Err(error) if error.is_loss() => {
                    tracing::warn!("the snapshot before it is used: {error}");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Reads a snapshot; `None` if it does not count.
    pub(super) async fn read_snapshot(
        &self,
        listed: &SnapshotName,
    ) -> Result<Option<Snapshot>, ObjectError> {
        let snapshot = self.decode_snapshot(listed).await?;
        let counts = match snapshot.previous {
            // Of a migration or rebuild: the fence behind it names it.
            0 => match self.read(listed.number + 1).await? {
                Some(fence) => fence.previous == snapshot.state.head.link,
                None => false,
            },
            link => self.sequence.identity(listed.number).await?.is_some_and(|it| it.link == link),
        };
        Ok(counts.then_some(snapshot))
    }

    /// Reads a snapshot, whether or not it counts.
    async fn decode_snapshot(
        &self,
        &SnapshotName { number, nonce, size_bytes }: &SnapshotName,
    ) -> Result<Snapshot, ObjectError> {
        let name = self.snapshot_name(number, nonce);
        let bytes = self.read_large(&name, size_bytes).await?;
        let decode = move || Snapshot::decode(number, nonce, &bytes);
        let decoded = tokio::task::spawn_blocking(decode).await;
        let decoded = decoded.map_err(|ended| ObjectError::failed(&name, ended.to_string()))?;
        let snapshot = decoded.map_err(|error| error.of(&name))?;
        self.check_store(&name, snapshot.state.header.store).map(|()| snapshot)
    }

    /// Lists the snapshots, the newest first.
    ///
    /// # Errors
    /// The object store cannot be listed.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotName>, ObjectError> {
        let prefix = self.snapshots_prefix();
        let mut snapshots = Vec::new();
        for found in self.list(&prefix).await? {
            let Some((number, nonce)) = numbered(&prefix, found.location.as_ref()) else {
                continue;
            };
            snapshots.push(SnapshotName { number, nonce, size_bytes: found.size });
        }
        snapshots.sort_unstable_by(|one, other| other.cmp(one));
        Ok(snapshots)
    }

    pub(super) async fn list(&self, prefix: &str) -> Result<Vec<ObjectMeta>, ObjectError> {
        let path = prefix.into();
        let mut listing = self.store.list(Some(&path));
        let mut found = Vec::new();
        while let Some(object) = within(Request::List, prefix, listing.try_next()).await? {
            found.push(object);
        }
        Ok(found)
    }

    /// Writes a snapshot of the state after an object of the chain.
    ///
    /// # Errors
    /// It cannot be written.
    pub async fn write_snapshot(&self, snapshot: Snapshot) -> Result<SnapshotName, ObjectError> {
        let (number, nonce) = (snapshot.state.head.number, snapshot.nonce);
        let name = self.snapshot_name(number, nonce);
        let encoded = tokio::task::spawn_blocking(move || snapshot.encode());
        let encoded =
            encoded.await.map_err(|ended| ObjectError::failed(&name, ended.to_string()))?;
        let size_bytes = encoded.iter().map(|part| part.len() as u64).sum();
        self.write_large(&name, &encoded).await?;
        Ok(SnapshotName { number, nonce, size_bytes })
    }

    pub(super) async fn delete_snapshot(&self, name: &SnapshotName) -> Result<(), ObjectError> {
        delete_object(&*self.store, &self.snapshot_name(name.number, name.nonce)).await
    }

    /// Writes the body of an entry if it is an object of its own.
    pub(super) async fn write_body(&self, sealed: &SealedEntry) -> Result<(), ObjectError> {
        let Some(body) = &sealed.body_elsewhere else { return Ok(()) };
        let name = self.body_name(sealed.object.number, sealed.object.nonce);
        self.write_large(&name, std::slice::from_ref(body)).await
    }

    async fn write_large(&self, name: &str, parts: &[Bytes]) -> Result<(), ObjectError> {
        let handle = StoreHandle::new(&*self.store, &self.bandwidth, RequestClass::Upload);
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        let mut writer = Writer::new(handle, name, bytes);
        let write = async {
            for part in parts {
                writer.write(part.clone().into()).await?;
            }
            writer.finish().await
        };
        let written = write.await;
        if written.is_err()
            && let Err(left) = writer.abort().await
        {
            tracing::debug!("could not remove an abandoned object: {left}");
        }
        written
    }

    /// Reads an object of this length.
    async fn read_large(&self, name: &str, size_bytes: u64) -> Result<Bytes, ObjectError> {
        let path = &object_store::path::Path::from(name);
        let starts = (0..size_bytes).step_by(PIECE_BYTES as usize);
        let pieces = starts.map(|start| {
            let range = start..size_bytes.min(start + PIECE_BYTES);
            async move { within(Request::Get, name, self.store.get_range(path, range)).await }
        });
        let mut pieces = futures::stream::iter(pieces).buffered(PIECES);
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.try_next().await? {
            // The common case is one piece, which is not copied.
            if piece.len() as u64 == size_bytes {
                return Ok(piece);
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.into())
    }

    pub(super) fn missing(&self, number: u64) -> ObjectError {
        let reason = "it is missing".into();
        ObjectError::damaged(&self.sequence.name(number), Damage { position: 0, reason })
    }

    /// Returns the error for a snapshot behind the end of the chain.
    fn lost_end(&self, snapshot: &SnapshotName) -> ObjectError {
        let name = self.snapshot_name(snapshot.number, snapshot.nonce);
        let reason = format!("it is missing, and {name} shows that it existed");
        let lost = self.sequence.name(snapshot.number);
        ObjectError::damaged(&lost, Damage { position: 0, reason })
    }
}

/// Returns an object that must exist as missing, if the error says that it does not.
fn missing(name: &str, error: ObjectError) -> ObjectError {
    match error.is_not_found() {
        true => {
            let reason = "the body of an object of the chain is missing".into();
            ObjectError::damaged(name, Damage { position: 0, reason })
        }
        false => error,
    }
}

/// Returns number and nonce in a name below `prefix`.
pub(super) fn numbered(prefix: &str, name: &str) -> Option<(u64, Uuid)> {
    let (number, nonce) = name.strip_prefix(prefix)?.strip_prefix('/')?.split_once('-')?;
    let found = (u64::from_str_radix(number, 16).ok()?, Uuid::try_parse(nonce).ok()?);
    let is_exact = name == format!("{prefix}/{:016x}-{}", found.0, found.1.simple());
    is_exact.then_some(found)
}

#[cfg(test)]
mod tests;
