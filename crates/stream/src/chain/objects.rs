//! The objects of one chain. `docs/format/chain.md`, section 2.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use uuid::Uuid;

use super::entry::{Entry, SealedEntry};
use super::snapshot::Snapshot;
use super::state::{ChainState, Head};
use crate::bandwidth::Transfers;
use crate::damage::Damage;
use crate::naming::{CATALOGS_DIRECTORY, OBJECTS_DIRECTORY, catalog_prefix};
use crate::object_error::ObjectError;
use crate::objects::{Request, StoreHandle, Writer, delete_object, list_all, within};
use crate::request_class::RequestClass;
use crate::sequence::{HEADER_BYTES, MAX_BODY_BYTES, NUMBERS, Sealed, Sequence};

/// Objects of the chain that are read at the same time.
pub(super) const READS: usize = 16;
/// Bytes of a large object that one GET fetches.
const PIECE_BYTES: u64 = 8 << 20;
/// The greatest length of a snapshot: a header, and a body whose length has 32 bits.
const MAX_SNAPSHOT_BYTES: u64 = HEADER_BYTES as u64 + u32::MAX as u64;
/// Pieces of a large object that are read at the same time.
const PIECES: usize = 4;

/// A snapshot as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotName {
    /// The number of the object that it is the state after.
    pub number: u64,
    /// A random number.
    pub nonce: Uuid,
    /// Its length.
    pub size_bytes: u64,
    /// When it was written, by the clock of the object store.
    pub written: SystemTime,
}

/// Lists the stores that have a catalog in an object store.
///
/// # Errors
/// The object store cannot be listed.
pub async fn list_stores(store: &dyn ObjectStore) -> Result<Vec<Uuid>, ObjectError> {
    list_ids(store, CATALOGS_DIRECTORY).await
}

/// Lists the stores that have a catalog or data in an object store, in order.
///
/// # Errors
/// The object store cannot be listed.
pub async fn list_stores_with_data(store: &dyn ObjectStore) -> Result<Vec<Uuid>, ObjectError> {
    let mut stores = list_ids(store, CATALOGS_DIRECTORY).await?;
    stores.extend(list_ids(store, OBJECTS_DIRECTORY).await?);
    stores.sort_unstable();
    stores.dedup();
    Ok(stores)
}

async fn list_ids(store: &dyn ObjectStore, directory: &str) -> Result<Vec<Uuid>, ObjectError> {
    let prefix = object_store::path::Path::from(directory);
    let listing = store.list_with_delimiter(Some(&prefix));
    let listed = within(Request::List, directory, listing).await?;
    let ids = listed.common_prefixes.iter().filter_map(|prefix| prefix.filename());
    Ok(ids.filter_map(|id| Uuid::try_parse(id).ok()).collect())
}

/// Access to the chain of one store. Cheap to clone.
#[derive(Clone)]
pub struct Chain {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) id: Uuid,
    pub(super) prefix: String,
    pub(super) sequence: Sequence,
    /// A longer body, as it is stored, is an object of its own.
    pub(super) max_body_bytes: usize,
    transfers: Arc<Transfers>,
}

impl Chain {
    /// Returns the chain of the store with this id. `retry` is the first and the longest delay
    /// between two attempts to create an object.
    pub fn new(store: Arc<dyn ObjectStore>, id: Uuid, retry: (Duration, Duration)) -> Self {
        let prefix = catalog_prefix(id);
        let sequence = Sequence::new(store.clone(), format!("{prefix}/chain"), retry);
        let transfers = Arc::new(Transfers::new(0));
        Self { store, id, prefix, sequence, max_body_bytes: MAX_BODY_BYTES, transfers }
    }

    /// Returns the first and the longest delay between two attempts of a request.
    pub(crate) fn retry(&self) -> (Duration, Duration) {
        self.sequence.retry()
    }

    /// Returns the name of the first object: a fence, which is never deleted.
    pub(crate) fn first_name(&self) -> String {
        self.sequence.name(1)
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
            Some(object) => self.decode(object).await.map(Some),
            None => Ok(None),
        }
    }

    /// Decodes a fence or delta, whose body may be elsewhere.
    pub(super) async fn decode(&self, object: Sealed) -> Result<Entry, ObjectError> {
        let name = self.sequence.name(object.number);
        let elsewhere = Entry::body_elsewhere(&object).map_err(|error| error.of(&name))?;
        let (name, body) = match elsewhere {
            None => (name, object.body.clone()),
            Some(elsewhere) => {
                let name = self.body_name(object.number, object.nonce);
                let body = self.read_large(&name, elsewhere.length_bytes).await;
                (name.clone(), body.map_err(|error| missing_body(&name, error))?)
            }
        };
        let decode = move || Entry::decode(&object, &body);
        let entry = self.blocking(&name, decode).await?.map_err(|error| error.of(&name))?;
        self.check_store(&name, entry.body.header.store).map(|()| entry)
    }

    /// Runs work on a large object where it does not delay others.
    async fn blocking<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ObjectError> {
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|ended| ObjectError::failed(name, ended.to_string()))
    }

    /// Checks that an object states the store in its name.
    fn check_store(&self, name: &str, stated: Uuid) -> Result<(), ObjectError> {
        if stated == self.id {
            return Ok(());
        }
        let reason = format!("it belongs to store {stated}");
        Err(ObjectError::damaged(name, Damage::of_all(reason)))
    }

    /// Whether the chain exists: its first object is a fence, and fences are not deleted.
    ///
    /// # Errors
    /// The object store cannot be asked.
    pub async fn has_fence(&self) -> Result<bool, ObjectError> {
        self.sequence.exists(1).await
    }

    /// Loads the state after the last object; `None` if the chain has no object. Reads the newest
    /// snapshot that counts and the objects after it. A damaged snapshot is passed over for the one
    /// before it.
    ///
    /// # Errors
    /// An object cannot be read, is damaged or missing, or is of a later version.
    pub async fn load(&self) -> Result<Option<ChainState>, ObjectError> {
        let mut snapshots = self.snapshots().await?;
        loop {
            let loaded = self.load_from(&snapshots).await;
            if loaded.as_ref().is_err_and(|error| !error.is_loss()) {
                return loaded;
            }
            // What was missing or damaged may have been deleted, and the end may be the number of a
            // deleted object. Then there is a newer snapshot.
            let later = self.snapshots().await?;
            let end = match &loaded {
                Ok(state) => state.as_ref().map_or(0, |state| state.head.number),
                Err(_) => snapshots.first().map_or(0, |newest| newest.number),
            };
            match later.iter().find(|snapshot| snapshot.number > end) {
                None => return loaded,
                Some(found) if snapshots.contains(found) => {
                    return loaded.and(Err(self.lost_end(found)));
                }
                Some(_) => snapshots = later,
            }
        }
    }

    /// Loads the state from the newest of these snapshots that counts.
    async fn load_from(
        &self,
        newest_first: &[SnapshotName],
    ) -> Result<Option<ChainState>, ObjectError> {
        let mut state = self.newest_that_counts(newest_first).await?;
        let from = state.as_ref().map_or(1, |state| state.head.number).max(1);
        let Some(last) = self.sequence.last(from).await? else { return Ok(None) };
        let next = state.as_ref().map_or(1, |state| state.head.number + 1);
        let mut objects = futures::stream::iter(next..=last)
            .map(|number| async move { (number, self.sequence.get(number).await) })
            .buffered(READS);
        while let Some((number, object)) = objects.next().await {
            let object = object?.ok_or_else(|| self.missing(number))?;
            self.extend(&mut state, self.decode(object).await?)?;
        }
        drop(objects);
        let mut state = state.ok_or_else(|| self.missing(1))?;
        self.read_on(&mut state).await?;
        Ok(Some(state))
    }

    /// Loads the chain; `None` if it does not reach further than `known`.
    pub(super) async fn load_beyond(&self, known: u64) -> Result<Option<ChainState>, ObjectError> {
        let loaded = self.load().await?;
        Ok(loaded.filter(|state| state.head.number > known))
    }

    /// Applies the objects after `state`, up to the first number that is absent.
    pub(super) async fn read_on(&self, state: &mut ChainState) -> Result<(), ObjectError> {
        while let Some(entry) = self.read(state.head.number + 1).await? {
            self.apply(state, entry)?;
        }
        Ok(())
    }

    fn apply(&self, state: &mut ChainState, entry: Entry) -> Result<(), ObjectError> {
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

    /// Returns the state of the newest snapshot that counts. Of two with one number, that of a
    /// rebuild is the newer one.
    async fn newest_that_counts(
        &self,
        newest_first: &[SnapshotName],
    ) -> Result<Option<ChainState>, ObjectError> {
        let mut found: Option<ChainState> = None;
        for name in newest_first {
            match &found {
                Some(state) if state.head.is_snapshot || state.head.number > name.number => break,
                _ => {}
            }
            match self.read_snapshot(name).await {
                Ok(Some(snapshot)) if found.is_none() || snapshot.state.head.is_snapshot => {
                    found = Some(snapshot.state);
                }
                Ok(_) => {}
                Err(error) if error.is_loss() => {
                    tracing::warn!("a snapshot of the catalog is passed over: {error}");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Reads a snapshot; `None` if it does not count.
    pub(super) async fn read_snapshot(
        &self,
        listed: &SnapshotName,
    ) -> Result<Option<Snapshot>, ObjectError> {
        let snapshot = self.decode_snapshot(listed).await?;
        let Head { number, link, is_snapshot, .. } = snapshot.state.head;
        let counts = match is_snapshot {
            true => {
                let next = self.sequence.identity(number + 1).await?;
                next.is_some_and(|next| next.previous == link)
            }
            false => self.sequence.identity(number).await?.is_some_and(|it| it.link == link),
        };
        Ok(counts.then_some(snapshot))
    }

    /// Reads a snapshot, whether or not it counts.
    pub(super) async fn decode_snapshot(
        &self,
        &SnapshotName { number, nonce, size_bytes, .. }: &SnapshotName,
    ) -> Result<Snapshot, ObjectError> {
        let name = self.snapshot_name(number, nonce);
        if size_bytes > MAX_SNAPSHOT_BYTES {
            let reason = format!("a snapshot of {size_bytes} bytes");
            return Err(ObjectError::damaged(&name, Damage::of_all(reason)));
        }
        let bytes = self.read_large(&name, size_bytes).await?;
        let decode = move || Snapshot::decode(number, nonce, &bytes);
        let snapshot = self.blocking(&name, decode).await?.map_err(|error| error.of(&name))?;
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
            let (size_bytes, written) = (found.size, found.last_modified.into());
            snapshots.push(SnapshotName { number, nonce, size_bytes, written });
        }
        snapshots.sort_unstable_by_key(|snapshot| Reverse((snapshot.number, snapshot.nonce)));
        Ok(snapshots)
    }

    pub(super) async fn list(&self, prefix: &str) -> Result<Vec<ObjectMeta>, ObjectError> {
        list_all(&*self.store, Some(&prefix.into())).await
    }

    /// Writes a snapshot. Returns its length.
    ///
    /// # Errors
    /// It cannot be written. Nothing depends on it.
    pub async fn write_snapshot(&self, snapshot: Snapshot) -> Result<u64, ObjectError> {
        let name = self.snapshot_name(snapshot.state.head.number, snapshot.nonce);
        let encoded = self.blocking(&name, move || snapshot.encode()).await?;
        self.write_large(&name, &encoded).await?;
        Ok(encoded.iter().map(|part| part.len() as u64).sum())
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
        let handle = StoreHandle::new(&*self.store, &self.transfers, RequestClass::Upload);
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        let mut writer = Writer::new(handle, name, bytes);
        let write = async {
            for part in parts {
                writer.write(part.clone().into()).await?;
            }
            writer.finish().await
        };
        let written = write.await;
        // The object stays if it is there: an earlier attempt may have completed it, and the object
        // of the chain may have been created since.
        if written.is_err()
            && let Err(left) = writer.abort_parts().await
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
        ObjectError::damaged(&self.sequence.name(number), Damage::of_all("it is missing"))
    }

    /// Returns the error for a snapshot beyond the end of the chain.
    fn lost_end(&self, snapshot: &SnapshotName) -> ObjectError {
        let name = self.snapshot_name(snapshot.number, snapshot.nonce);
        let reason = format!("it is missing, and {name} shows that it existed");
        let lost = self.sequence.name(snapshot.number);
        ObjectError::damaged(&lost, Damage::of_all(reason))
    }
}

/// Returns damage in place of the error that the body does not exist.
fn missing_body(name: &str, error: ObjectError) -> ObjectError {
    match error.is_not_found() {
        true => {
            let reason = "the body of an object of the chain is missing";
            ObjectError::damaged(name, Damage::of_all(reason))
        }
        false => error,
    }
}

/// Returns number and nonce in a name below `prefix`.
pub(super) fn numbered(prefix: &str, name: &str) -> Option<(u64, Uuid)> {
    let (number, nonce) = name.strip_prefix(prefix)?.strip_prefix('/')?.split_once('-')?;
    let found = (u64::from_str_radix(number, 16).ok()?, Uuid::try_parse(nonce).ok()?);
    let is_valid = found.0 == 0 || NUMBERS.contains(&found.0);
    let is_exact = is_valid && name == format!("{prefix}/{:016x}-{}", found.0, found.1.simple());
    is_exact.then_some(found)
}

#[cfg(test)]
pub(super) mod tests;
