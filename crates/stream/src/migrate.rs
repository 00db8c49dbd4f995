//! Migration of the catalog of earlier versions, a file in the data directory, to the object store.
//!
//! | crash after | this version | an earlier version |
//! |---|---|---|
//! | the snapshot | begins again; no fence names the snapshot | goes on with the file |
//! | the renaming | begins again, with the renamed file | finds no catalog, and refuses the WAL |
//! | the fence | the object store has the catalog | finds no catalog, and refuses the WAL |

mod redb;

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use alluvium_device::SharedDevice;
use alluvium_wal::Wal;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use tokio::time::Instant;
use uuid::Uuid;

use crate::chain::{Chain, ChainState, ChainWriter, Snapshot};
use crate::error::StoreError;
use crate::naming::object_prefix;
use crate::object_error::ObjectError;
use crate::objects::{Request, probe_objects, read_whole, within};
use crate::open::LogHeader;
use crate::options::Options;

/// The catalog of earlier versions in a data directory.
pub const LEGACY_CATALOG: &str = "catalog.redb";
/// Its name after the migration.
const MIGRATED: &str = "catalog.redb.migrated";
/// The name of the file that kept space for it.
const RESERVE: &str = "catalog.redb.reserve";
/// The name of the object that states which server owns the objects, for earlier versions.
const OWNER: &str = "owner";
/// The time in which the fence must be created.
const ATTEMPT: Duration = Duration::from_secs(60);

/// Why a catalog was not migrated. Nothing has changed that an earlier version needs, unless the
/// file was renamed; then the next start goes on.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The file cannot be read or renamed.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The object store has the catalog, and the file is there again.
    #[error(
        "{path} is the catalog of an earlier version, but the object store has a newer one of this \
         log. Move the file away to go on with the newer one"
    )]
    Superseded {
        /// The file.
        path: PathBuf,
    },
    /// Another server has written objects of this log.
    #[error(
        "another server owns the objects of this log (its incarnation is {incarnation}): it runs \
         from a copy, or has taken over. If it is gone for good, delete the object {owner}"
    )]
    NotOwner {
        /// The incarnation of the other server.
        incarnation: Uuid,
        /// The object that states it.
        owner: String,
    },
    /// None of the objects of the catalog exists.
    #[error(
        "the object store has none of the objects in {path}: it is another one, or is not mounted"
    )]
    OtherObjectStore {
        /// The file.
        path: PathBuf,
    },
    /// The catalog and the WAL do not belong together, or one of them cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl MigrateError {
    /// Whether the object store does not answer, so that another attempt may succeed.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Store(StoreError::Object(error)) if error.is_temporary())
    }
}

impl From<ObjectError> for MigrateError {
    fn from(error: ObjectError) -> Self {
        Self::Store(error.into())
    }
}

/// Migrates the catalog of an earlier version in `directory`, if there is one and the object store
/// has no catalog of the WAL on `device` yet. Returns the file that was migrated, under its new
/// name. Nothing else may use the device or the directory.
///
/// # Errors
/// The catalog cannot be read, or does not belong to the WAL or the object store.
pub async fn migrate(
    objects: &Arc<dyn ObjectStore>,
    device: &SharedDevice,
    directory: &Path,
    node_id: u32,
    options: &Options,
) -> Result<Option<PathBuf>, MigrateError> {
    let (current, renamed) = (directory.join(LEGACY_CATALOG), directory.join(MIGRATED));
    let path = match current.exists() {
        true => current.clone(),
        false if renamed.exists() => renamed.clone(),
        false => return Ok(None),
    };
    let device = device.clone();
    let inspected = tokio::task::spawn_blocking(move || Wal::inspect(&device)).await;
    let inspected = inspected.map_err(|error| StoreError::Failed(error.to_string()))?;
    let header = inspected.map_err(|error| StoreError::Open(Arc::new(error)))?.header;
    let store = header.wal_id;
    let chain = Chain::new(objects.clone(), store, options.retry());
    let is_migrated = chain.has_fence().await?;
    if is_migrated && path == renamed {
        return Ok(None);
    }
    let mut legacy = read(&path).await?;
    let mut path = path;
    if legacy.is_none() && path == current && renamed.exists() {
        // An earlier version was started after the file was renamed, and has left an empty one.
        path = renamed.clone();
        legacy = if is_migrated { None } else { read(&path).await? };
    }
    let Some(state) = legacy.filter(|state| path == current || state.header.wal == store) else {
        return Ok(None);
    };
    if is_migrated {
        return Err(MigrateError::Superseded { path });
    }
    let log = LogHeader { header, node_id };
    log.fence(Some(&state), None)?;
    check_owner(&**objects, &state).await?;
    let names: HashSet<_> = state.objects.values().map(|object| object.name(store)).collect();
    let is_known = |name: &str| names.contains(name);
    if !names.is_empty() && !probe_objects(&**objects, Some(store), &is_known).await? {
        return Err(MigrateError::OtherObjectStore { path });
    }

    let snapshot = Snapshot::of_new_base(state);
    let base = snapshot.state.clone();
    chain.write_snapshot(snapshot).await?;
    if path == current {
        rename(&current, &renamed)?;
    }
    // An earlier version that runs from a copy of this server trims and deletes nothing any more.
    disown(&**objects, &base).await?;
    let until = Instant::now() + ATTEMPT;
    let opened = ChainWriter::open(chain, Some(base), until, |state| log.fence(state, None));
    opened.await.map_err(StoreError::from)?;
    // Space that the file needed on a full disk.
    let _ = std::fs::remove_file(directory.join(RESERVE));
    Ok(Some(renamed))
}

/// Reads the file; `None` if it is not in use with a WAL.
async fn read(path: &Path) -> Result<Option<ChainState>, MigrateError> {
    let file = path.to_path_buf();
    let read = tokio::task::spawn_blocking(move || redb::read(&file)).await;
    let read = read.unwrap_or_else(|error| Err(error.to_string()));
    read.map_err(|reason| MigrateError::File { path: path.to_path_buf(), reason })
}

fn rename(from: &Path, to: &Path) -> Result<(), MigrateError> {
    let renamed = std::fs::rename(from, to).and_then(|()| {
        let directory = from.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    });
    renamed.map_err(|error| {
        let reason = format!("cannot be renamed to {}: {error}", to.display());
        MigrateError::File { path: from.to_path_buf(), reason }
    })
}

/// The object that states the owner of the objects.
#[derive(serde::Serialize, serde::Deserialize)]
struct Owner {
    epoch: u32,
    #[serde(rename = "life")]
    incarnation: Uuid,
    node_id: u32,
    version: u64,
    written_at_ms: u64,
}

fn owner_name(store: Uuid) -> String {
    format!("{}/{OWNER}", object_prefix(store))
}

/// Refuses objects that a server has written since which the catalog does not know.
async fn check_owner(objects: &dyn ObjectStore, state: &ChainState) -> Result<(), MigrateError> {
    let owner = owner_name(state.header.store);
    let Some(bytes) = read_whole(objects, &owner).await? else { return Ok(()) };
    let stated: Owner = serde_json::from_slice(&bytes)
        .map_err(|error| ObjectError::failed(&owner, format!("not an owner object: {error}")))?;
    let is_known = |id| state.incarnations.iter().any(|known| known.id == id);
    match stated.incarnation {
        known if known.is_nil() || is_known(known) => Ok(()),
        incarnation => Err(MigrateError::NotOwner { incarnation, owner }),
    }
}

/// Writes an owner that no server is.
async fn disown(objects: &dyn ObjectStore, state: &ChainState) -> Result<(), ObjectError> {
    /// The length that earlier versions write.
    const PADDED_BYTES: usize = 256;
    let owner = Owner {
        epoch: state.header.opening,
        incarnation: Uuid::nil(),
        node_id: 0,
        version: state.header.version,
        written_at_ms: state.header.written_at_ms,
    };
    let mut bytes = serde_json::to_vec(&owner).expect("numbers and an id");
    bytes.resize(bytes.len().max(PADDED_BYTES), b' ');
    let name = owner_name(state.header.store);
    let path = name.as_str().into();
    let put = objects.put(&path, PutPayload::from(bytes));
    within(Request::Put, &name, put).await.map(drop)
}

#[cfg(test)]
mod tests;
