//! The servers of a cluster, as gateways and tools reach them: connections by server, and the
//! groups and attachments of the registry.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Coordination, KeptLease};
use async_trait::async_trait;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::gateway::{
    Attachment, Closed, Failure, GroupError, GroupView, Groups, RegionIndex, Servers, Volume,
    VolumeConfig,
};
use crate::net::{
    CallError, ClientConnection, Directory, Features, Local, ServerRecord, cluster_id,
};
use crate::registry::{AttachRequest, AttachValue, GroupValue, Registry, RegistryError};
use crate::request::{Answer, Request, RequestError};
use crate::types::{AttachEpoch, GroupId, Layer, ServerId, VolumeId};

/// Time for which the registry considers a gateway alive that it does not hear from.
const ATTACH_LEASE: Duration = Duration::from_secs(5);
/// Pause before another attempt to connect to a server.
const RECONNECT: Duration = Duration::from_millis(100);

/// The servers of a cluster.
pub struct Cluster {
    service: Arc<dyn Coordination>,
    keys: Arc<Keys>,
    local: Local,
    directory: Mutex<Directory>,
    connections: Mutex<HashMap<ServerId, Arc<Slot>>>,
}

/// The connection to a server. One task at a time connects.
type Slot = tokio::sync::Mutex<Option<Arc<ClientConnection>>>;

/// What a process attaches a volume with.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// The run of the process.
    pub owner: Uuid,
    /// Where it serves the volume, for operators.
    pub address: String,
    /// Take the volume from an owner that is alive.
    pub take: bool,
    /// Settings of the handle.
    pub config: VolumeConfig,
}

/// A volume that this process has attached. Dropping it ends its requests; the registry considers
/// it attached until the lease ends.
pub struct Attached {
    /// The handle.
    pub volume: Volume,
    /// The volume's id.
    pub id: VolumeId,
    /// What the registry has of the attachment.
    pub value: AttachValue,
    cluster: Arc<Cluster>,
    lease: KeptLease,
}

/// Why a volume cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A server refuses the attachment.
    #[error("the attachment is refused: {0}")]
    Refused(Failure),
}

impl Cluster {
    /// The servers that a registry has.
    pub fn new(name: &str, service: Arc<dyn Coordination>, keys: Arc<Keys>) -> Arc<Self> {
        let local = Local {
            cluster: cluster_id(name),
            identity: None,
            features: Features::PULLS,
            window_bytes: 0,
        };
        Arc::new(Self {
            service,
            keys,
            local,
            directory: Mutex::default(),
            connections: Mutex::default(),
        })
    }

    /// The registry.
    pub fn registry(&self) -> Registry<'_> {
        Registry::new(&*self.service, &self.keys)
    }

    /// A connection to a server: the one that there is, or a new one.
    async fn connection(&self, server: ServerId) -> Option<Arc<ClientConnection>> {
        let slot = Arc::clone(self.connections.lock().entry(server).or_default());
        let mut slot = slot.lock().await;
        if let Some(connection) = slot.as_ref().filter(|connection| !connection.is_closed()) {
            return Some(Arc::clone(connection));
        }
        // Read each time: the server may have another address or opening by now.
        let known = match self.registry().server(server).await {
            Ok(known) => known.value,
            Err(error) => {
                tracing::debug!(%server, %error, "a server was not found");
                return None;
            }
        };
        let (store, wal) = (known.store, known.wal);
        let record = ServerRecord { store, wal, mark: known.mark, incarnation: known.incarnation };
        self.directory.lock().update(server, record);
        let directory = Some(&self.directory);
        match ClientConnection::connect(&self.local, &known.address, Some(server), directory).await
        {
            Ok(connection) => {
                let connection = Arc::new(connection);
                *slot = Some(Arc::clone(&connection));
                Some(connection)
            }
            Err(error) => {
                tracing::debug!(%server, address = known.address, %error, "not connected");
                // The tasks that wait for this one would all connect anew.
                tokio::time::sleep(RECONNECT).await;
                None
            }
        }
    }

    /// Sends a request to a server.
    ///
    /// # Errors
    /// The outer error: there is no connection, or it has ended. The inner one: the server's.
    pub async fn call(
        &self,
        server: ServerId,
        request: &Request,
    ) -> Result<Result<Answer, RequestError>, Closed> {
        let connection = self.connection(server).await.ok_or(Closed)?;
        match connection.call(request).await {
            Ok(answer) => Ok(Ok(answer)),
            Err(CallError::Request(error)) => Ok(Err(error)),
            Err(CallError::Closed) => Err(Closed),
        }
    }

    /// Attaches a volume: takes the next epoch in the registry, and has it applied in all groups.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub async fn attach(
        self: &Arc<Self>,
        id: VolumeId,
        options: AttachOptions,
    ) -> Result<Attached, AttachError> {
        let service = Arc::clone(&self.service);
        let lease = KeptLease::grant(service, ATTACH_LEASE).await.map_err(RegistryError::from)?;
        let request = AttachRequest {
            owner: options.owner,
            server: None,
            address: options.address,
            now_ms: unix_ms(),
            lease: lease.id(),
            take: options.take,
        };
        let registry = self.registry();
        let value = registry.attach(id, &request).await?;
        // Read after the epoch was written: a group that is created later begins with it.
        let volume = registry.volume(id).await?.value;
        let mut groups = Vec::with_capacity(volume.regions.len());
        for (region, group) in &volume.regions {
            let stored = registry.group(*group).await?;
            groups.push((RegionIndex(*region), view_of(*group, &stored.value)));
        }
        let attachment = Attachment {
            volume: id,
            parent: None,
            layer: Layer(0),
            size_bytes: volume.bytes,
            epoch: value.epoch,
            nonce: value.nonce,
            gateway: None,
            groups,
        };
        let servers: Arc<dyn Servers> = Arc::clone(self) as Arc<dyn Servers>;
        let of_volume = VolumeGroups { cluster: Arc::clone(self), id, epoch: value.epoch };
        let handle = Volume::attach(attachment, options.config, servers, Arc::new(of_volume));
        let volume = handle.await.map_err(AttachError::Refused)?;
        Ok(Attached { volume, id, value, cluster: Arc::clone(self), lease })
    }
}

#[async_trait]
impl Servers for Cluster {
    async fn send(
        &self,
        server: ServerId,
        request: Request,
    ) -> Result<Result<Answer, RequestError>, Closed> {
        self.call(server, &request).await
    }
}

impl Attached {
    /// Waits until the registry may consider the volume as not attached. The attachment goes on
    /// until another one fences it.
    pub async fn lease_lost(&self) {
        self.lease.lost().await;
    }

    /// Records that the volume is not attached any more. Requests in flight are ended.
    ///
    /// # Errors
    /// Those of the registry. The lease ends by itself then.
    pub async fn detach(self) -> Result<(), RegistryError> {
        let Self { volume, id, value, cluster, lease } = self;
        drop(volume);
        let detached = cluster.registry().detach(id, value.epoch).await;
        drop(lease);
        detached
    }
}

/// The groups of an attached volume.
struct VolumeGroups {
    cluster: Arc<Cluster>,
    id: VolumeId,
    epoch: AttachEpoch,
}

#[async_trait]
impl Groups for VolumeGroups {
    async fn create(&self, region: RegionIndex) -> Result<GroupView, GroupError> {
        let registry = self.cluster.registry();
        let seed = u64::from(self.id.0) << 16 | u64::from(region.0);
        match registry.create_group(self.id, region.0, self.epoch, seed).await {
            Ok((group, stored)) => {
                tracing::info!(volume = %self.id, region = region.0, %group, "a new group");
                Ok(view_of(group, &stored.value))
            }
            Err(error) => Err(group_error(&error)),
        }
    }

    async fn read(&self, _: RegionIndex, group: GroupId) -> Result<GroupView, GroupError> {
        match self.cluster.registry().group(group).await {
            Ok(stored) => Ok(view_of(group, &stored.value)),
            Err(error) => Err(group_error(&error)),
        }
    }
}

fn view_of(group: GroupId, value: &GroupValue) -> GroupView {
    let replicas = value.peers.iter().filter(|peer| !peer.lost).map(|peer| peer.server);
    GroupView { group, replicas: replicas.collect() }
}

fn group_error(error: &RegistryError) -> GroupError {
    match error {
        RegistryError::Fenced { .. } => GroupError::Fenced,
        RegistryError::UnknownVolume(_) | RegistryError::Deleting(_) => GroupError::Dropped,
        other => GroupError::Unavailable(other.to_string()),
    }
}

fn unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_millis() as u64)
}
