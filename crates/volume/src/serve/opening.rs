//! From two devices and the registry to an open server. `docs/format/volume-wire.md`, section 2.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Coordination, Revision};
use alluvium_wal::{FormatOptions, Options, Wal};
use parking_lot::{Condvar, Mutex};
use uuid::Uuid;

use super::ServeOptions;
use super::driver::Events;
use crate::group::GroupView;
use crate::net::{Features, ServerRecord};
use crate::registry::{GroupValue, Registry, RegistryError, Stored};
use crate::shard::{Notice, OpenError, Opening, Recovered, Shard, ShardFailure, ShardOptions};
use crate::state::VolumeState;
use crate::store::{Owner, Store, StoreError};
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

type Progress = Box<dyn FnMut(&'static str, u64, u64) + Send>;

/// Opens the server of the devices.
pub(super) async fn open(
    options: &ServeOptions,
    service: &Arc<dyn Coordination>,
    keys: &Arc<Keys>,
    incarnation: Uuid,
    events: Arc<Events>,
    mut progress: Progress,
) -> Result<Opened, ServeError> {
    let registry = Registry::new(&**service, keys);
    let (id, disks) = identify(options, &registry, incarnation).await?;
    let mark = Wal::inspect(&options.log)?.header.mark;
    let opening = registry.check_opening(id, disks, mark).await?;
    let mark = mark.max(opening.mark()) + 1;
    // Read before the log is: a replica that the registry calls created must be in the log.
    let (groups, _) = own_groups(&registry, id).await?;
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
        seed: u64::from(id.0),
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
        Shard::open(shard_opening, &mut wait, &mut progress)
    });
    let started = Instant::now();
    let recovered = recovery.await.map_err(|_| ServeError::Panicked)?;
    let Recovered { shard, notices, report, .. } =
        recovered.map_err(|error| ServeError::Recovery { server: id, error })?;
    tracing::info!(server = %id, log = %report, elapsed = ?started.elapsed(), "recovered");
    let features = Features::PULLS.0;
    registry.record_opening(&opening, mark, incarnation, &options.advertised, features).await?;
    let record = ServerRecord { store: disks[0], wal: disks[1], mark, incarnation };
    Ok(Opened { id, record, shard, notices, groups })
}

/// The server of the devices, and the ids of store and log. Empty devices become those of a new
/// server. The log is formatted first and the store last: after a crash in between, the
/// registration is found again by the log's id.
async fn identify(
    options: &ServeOptions,
    registry: &Registry<'_>,
    incarnation: Uuid,
) -> Result<(ServerId, [Uuid; 2]), ServeError> {
    let wal_id = match Wal::inspect(&options.log) {
        Ok(inspection) => inspection.header.wal_id,
        Err(alluvium_wal::OpenError::NotFormatted { .. }) => {
            let window_bytes = Some(options.log_options.window_bytes);
            let format = FormatOptions { window_bytes, ..FormatOptions::default() };
            Wal::format(&options.log, &format)?.wal_id
        }
        Err(error) => return Err(error.into()),
    };
    match Store::identify(&options.store) {
        Ok(superblock) => {
            let disks = [superblock.store_id, wal_id];
            Ok((superblock.server, disks))
        }
        Err(StoreError::NotFormatted) => {
            let known = registry.servers().await?;
            let known = known.iter().find(|(_, known)| known.value.wal == wal_id);
            let store_id = known.map_or_else(Uuid::new_v4, |(_, known)| known.value.store);
            let disks = [store_id, wal_id];
            let address = &options.advertised;
            let id = registry.register_server(address, disks, incarnation).await?;
            let cluster = options.cluster.clone();
            let owner = Owner { wal_id, store_id, server: id, cluster };
            Store::format(&options.store, owner, None, unix_ms())?;
            tracing::info!(server = %id, store = %store_id, wal = %wal_id, "a new server");
            Ok((id, disks))
        }
        Err(error) => Err(error.into()),
    }
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
