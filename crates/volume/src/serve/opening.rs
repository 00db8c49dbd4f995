//! From two devices and the registry to an open server. `docs/format/volume-wire.md`, section 2.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Coordination, Revision};
use alluvium_device::SharedDevice;
use alluvium_wal::{FormatOptions, HeaderInfo, Options, Progress, Wal, looks_like};
use parking_lot::{Condvar, Mutex};
use uuid::Uuid;

use super::ServeOptions;
use super::driver::Events;
use super::outage::until_answered;
use crate::group::GroupView;
use crate::net::{Features, ServerRecord};
use crate::registry::{GroupValue, Registry, RegistryError, Stored};
use crate::shard::{Notice, OpenError, Opening, Recovered, Shard, ShardFailure, ShardOptions};
use crate::state::VolumeState;
use crate::store::{Owner, Store, StoreError, Superblock};
use crate::types::{GroupId, PeerId, ServerId, unix_ms};
use crate::window::Window;

/// Why a server does not open, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The registry.
    #[error("the registry: {0}")]
    Registry(#[from] RegistryError),
    /// The write-ahead log cannot be read or formatted.
    #[error("the write-ahead log: {0}")]
    Log(#[from] alluvium_wal::OpenError),
    /// The store cannot be read or formatted.
    #[error("the store: {0}")]
    Store(#[from] StoreError),
    /// The log was in use, and the store is new.
    #[error(
        "the store is blank, but write-ahead log {wal} has been in use, and its records require \
         the blocks of its store: attach that store"
    )]
    StoreBlank {
        /// The id of the log.
        wal: Uuid,
    },
    /// The store was in use, and the log is new.
    #[error(
        "the write-ahead log is blank, but store {store} belongs to server {server}, whose log has \
         acknowledged writes: attach the log of this store"
    )]
    LogBlank {
        /// The server.
        server: ServerId,
        /// The id of the store.
        store: Uuid,
    },
    /// The recovery has failed.
    #[error("server {server} does not open: {error}")]
    Recovery {
        /// The server.
        server: ServerId,
        /// Why.
        error: OpenError,
    },
    /// The log or the store has failed while the server was running.
    #[error(transparent)]
    Failed(ShardFailure),
    /// The thread of the recovery has ended.
    #[error("the recovery has panicked")]
    Panicked,
}

/// What an opening returns.
pub(super) struct Opened {
    pub(super) id: ServerId,
    pub(super) record: ServerRecord,
    pub(super) shard: Shard,
    pub(super) notices: Vec<Notice>,
    /// The groups that have a replica here, as they were read before the log was.
    pub(super) groups: BTreeMap<GroupId, Stored<GroupValue>>,
}

/// As [`Steps`], on any thread.
pub(super) type SentSteps = Box<dyn FnMut(&'static str) -> Progress + Send>;

/// The step while an opening waits for the registry.
const WAITING: &str = "waiting for the coordination service";

/// Opens the server of the devices.
pub(super) async fn open(
    options: &ServeOptions,
    service: &Arc<dyn Coordination>,
    keys: &Arc<Keys>,
    incarnation: Uuid,
    events: Arc<Events>,
    mut step: SentSteps,
) -> Result<Opened, ServeError> {
    let registry = Registry::new(&**service, keys);
    step(WAITING);
    let (id, disks) = identify(options, &registry, incarnation).await?;
    let mark = Wal::inspect(&options.log)?.header.mark;
    let opening = until_answered(|| registry.check_opening(id, disks, mark)).await?;
    let mark = mark.max(opening.mark()) + 1;
    // Read before the log is: a replica that the registry calls created must be in the log.
    let (groups, _) = until_answered(|| own_groups(&registry, id)).await?;
    let replicas = groups.iter().filter_map(|(group, stored)| {
        let (peer, is_created) = own_peer(&stored.value, id)?;
        Some((*group, (peer, view_of(&stored.value), is_created)))
    });
    let replicas = replicas.collect();
    let wake = move || events.wake();
    let waiting = Arc::new((Mutex::new(false), Condvar::new()));
    let woken = Arc::clone(&waiting);
    let shard_options = ShardOptions {
        apply: options.apply,
        entry_cache_bytes: options.entry_cache_bytes,
        overlay_bytes: options.overlay_bytes,
        ..ShardOptions::new(id)
    };
    let shard_opening = Opening {
        log: options.log.clone(),
        log_options: Options { mark: Some(mark), ..options.log_options.clone() },
        store: options.store.clone(),
        store_id: disks[0],
        cluster: options.cluster.clone(),
        replicas,
        options: shard_options,
        now: 0,
        unix_ms: unix_ms(),
        wake: Arc::new(move || {
            *woken.0.lock() = true;
            woken.1.notify_one();
            wake();
        }),
    };
    let recovery = tokio::task::spawn_blocking(move || {
        let mut wait = || {
            let mut is_woken = waiting.0.lock();
            // A wake-up since the last check is not lost.
            if !*is_woken {
                waiting.1.wait_for(&mut is_woken, Duration::from_millis(100));
            }
            *is_woken = false;
        };
        let recovered = Shard::open(shard_opening, &mut wait, &mut step);
        step(WAITING);
        recovered
    });
    let started = Instant::now();
    let recovered = recovery.await.map_err(|_| ServeError::Panicked)?;
    let Recovered { shard, notices, report, .. } =
        recovered.map_err(|error| ServeError::Recovery { server: id, error })?;
    tracing::info!(server = %id, log = %report, elapsed = ?started.elapsed(), "recovered");
    let features = Features::PULLS.0;
    let address = &options.advertised;
    until_answered(|| registry.record_opening(&opening, mark, incarnation, address, features))
        .await?;
    let record = ServerRecord { store: disks[0], wal: disks[1], mark, incarnation };
    Ok(Opened { id, record, shard, notices, groups })
}

/// What the devices of a server are. A new one is blank.
struct Devices {
    log: Option<HeaderInfo>,
    store: Option<Superblock>,
}

impl Devices {
    /// Reads the devices; one that does not exist yet is blank. `docs/format/volume-store.md`,
    /// section 8.
    fn read(log: Option<&SharedDevice>, store: Option<&SharedDevice>) -> Result<Self, ServeError> {
        let log = log.map(inspect).transpose()?.flatten();
        let store = match store.map(Store::identify) {
            None | Some(Err(StoreError::NotFormatted)) => None,
            Some(identified) => Some(identified?),
        };
        match (&log, &store) {
            (None, Some(store)) => {
                let (server, store) = (store.server, store.store_id);
                Err(ServeError::LogBlank { server, store })
            }
            // The store is formatted before the log is opened for the first time.
            (Some(log), None) if log.epoch > 0 => Err(ServeError::StoreBlank { wal: log.wal_id }),
            _ => Ok(Self { log, store }),
        }
    }
}

/// Reads the header of a log; `None` if the device is empty and may be formatted.
fn inspect(log: &SharedDevice) -> Result<Option<HeaderInfo>, alluvium_wal::OpenError> {
    match Wal::inspect(log) {
        Err(alluvium_wal::OpenError::NotFormatted { device }) => match looks_like(&**log)? {
            Some(looks_like) => Err(alluvium_wal::OpenError::NotAWal { device, looks_like }),
            None => Ok(None),
        },
        inspected => inspected.map(|inspection| Some(inspection.header)),
    }
}

/// Checks that a log and a store are both new or both in use, and returns whether each is new. One
/// that does not exist yet is new. Nothing is written.
///
/// # Errors
/// One of the devices cannot be read, has something else, or is new while the other one is not.
pub fn check_devices(
    log: Option<&SharedDevice>,
    store: Option<&SharedDevice>,
) -> Result<[bool; 2], ServeError> {
    let devices = Devices::read(log, store)?;
    Ok([devices.log.is_none(), devices.store.is_none()])
}

/// The server of the devices, and the ids of store and log. Empty devices become those of a new
/// server. The log is formatted first and the store last: after a crash in between, the
/// registration is found again by the log's id.
async fn identify(
    options: &ServeOptions,
    registry: &Registry<'_>,
    incarnation: Uuid,
) -> Result<(ServerId, [Uuid; 2]), ServeError> {
    let devices = Devices::read(Some(&options.log), Some(&options.store))?;
    let wal_id = match devices.log {
        Some(header) => header.wal_id,
        None => {
            let window_bytes = Some(options.log_options.window_bytes);
            let format = FormatOptions { window_bytes, ..FormatOptions::default() };
            Wal::format(&options.log, &format)?.wal_id
        }
    };
    if let Some(superblock) = devices.store {
        return Ok((superblock.server, [superblock.store_id, wal_id]));
    }
    let disks = [Uuid::new_v4(), wal_id];
    let address = &options.advertised;
    let (id, store_id) = until_answered(|| register(registry, address, disks, incarnation)).await?;
    let cluster = options.cluster.clone();
    let owner = Owner { wal_id, store_id, server: id, cluster };
    Store::format(&options.store, owner, None, unix_ms())?;
    tracing::info!(server = %id, store = %store_id, wal = %wal_id, "a new server");
    Ok((id, [store_id, wal_id]))
}

/// Registers a new server, unless the log is registered already. Returns its id and that of its
/// store.
async fn register(
    registry: &Registry<'_>,
    address: &str,
    [store, wal]: [Uuid; 2],
    incarnation: Uuid,
) -> Result<(ServerId, Uuid), RegistryError> {
    let known = registry.servers().await?;
    let known = known.iter().find(|(_, known)| known.value.wal == wal);
    let store = known.map_or(store, |(_, known)| known.value.store);
    Ok((registry.register_server(address, [store, wal], incarnation).await?, store))
}

/// The groups that have a replica on a server, and the revision that they are of.
pub(super) async fn own_groups(
    registry: &Registry<'_>,
    server: ServerId,
) -> Result<(BTreeMap<GroupId, Stored<GroupValue>>, Revision), RegistryError> {
    let (groups, revision) = registry.groups().await?;
    let is_own = |group: &GroupValue| own_peer(group, server).is_some();
    Ok((groups.into_iter().filter(|(_, stored)| is_own(&stored.value)).collect(), revision))
}

/// The replica of a group on a server, and whether it was created. Not one that is lost.
pub(super) fn own_peer(group: &GroupValue, server: ServerId) -> Option<(PeerId, bool)> {
    let peer = group.peers.iter().find(|peer| peer.server == server && !peer.lost)?;
    Some((peer.peer, peer.created.is_some()))
}

/// What the registry states of a group, as the shard takes it.
pub(super) fn view_of(group: &GroupValue) -> GroupView {
    let volumes = group.epochs.iter().map(|first| VolumeState {
        volume: first.volume,
        parent: None,
        epoch: first.epoch,
        nonce: first.nonce,
        window: Some(Window::default()),
        dropped_layers: Vec::new(),
    });
    GroupView {
        region: group.region,
        family: group.family,
        founders: group.founders.clone(),
        peers: group.peers.iter().map(|peer| (peer.peer, peer.server)).collect(),
        volumes: volumes.collect(),
    }
}

#[cfg(test)]
mod tests;
