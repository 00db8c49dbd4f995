//! The servers of a cluster, as gateways and tools reach them: connections by server, and the
//! groups and attachments of the registry.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Coordination, KeptLease};
use async_trait::async_trait;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::gateway::{
    Attachment, Closed, Failure, GroupError, GroupReplicas, Groups, RegionIndex, Servers, Trouble,
    Volume, VolumeConfig,
};
use crate::net::{CallError, ClientConnection, Directory, Features, Local, cluster_id};
use crate::registry::{
    ATTACH_LEASE, AttachRequest, AttachValue, GroupValue, Registry, RegistryError, ServerValue,
};
use crate::request::{Answer, Request, RequestError};
use crate::types::{AttachEpoch, GroupId, Layer, ServerId, VolumeId, unix_ms};

/// Time for the registry to end the lease of an attachment that has failed. It ends by itself
/// after [`ATTACH_LEASE`].
const REVOKE: Duration = Duration::from_secs(1);
/// Pause between two attempts to register an attachment again.
const REGISTER_AGAIN: Duration = Duration::from_secs(1);
/// Time after a failed attempt to connect to a server in which no other one is made.
const RECONNECT: Duration = Duration::from_millis(100);
/// Time for the registry to name another address of a server that does not answer at the known
/// one. The registry may be on that server.
const ADDRESS: Duration = Duration::from_millis(200);

/// The servers of a cluster.
pub struct Cluster {
    service: Arc<dyn Coordination>,
    keys: Arc<Keys>,
    local: Local,
    directory: Mutex<Directory>,
    connections: Mutex<HashMap<ServerId, Arc<Slot>>>,
    /// Where each server was reached or registered last.
    addresses: Mutex<HashMap<ServerId, String>>,
}

/// The connection to a server. One task at a time connects.
type Slot = tokio::sync::Mutex<Reached>;

/// How a server is reached.
#[derive(Default)]
struct Reached {
    connection: Option<Arc<ClientConnection>>,
    /// When the last attempt to connect has failed.
    failed: Option<Instant>,
}

/// What a process attaches a volume with.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// The run of the process.
    pub owner: Uuid,
    /// Where it serves the volume and what it is, for operators.
    pub address: String,
    /// Take the volume from an owner that is alive.
    pub take: bool,
    /// Settings of the handle.
    pub config: VolumeConfig,
    /// What requests wait for, from the attachment on.
    pub trouble: Arc<Trouble>,
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
    /// A server refuses the attachment, or too few answer within the I/O timeout.
    #[error("the volume cannot be attached: {0}")]
    Failed(Failure),
    /// It was stopped.
    #[error("the attachment was stopped")]
    Stopped,
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
            addresses: Mutex::default(),
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
        if let Some(connection) = slot.connection.as_ref().filter(|it| !it.is_closed()) {
            return Some(Arc::clone(connection));
        }
        // The tasks that have waited for a failed attempt do not repeat it one after the other.
        if slot.failed.is_some_and(|failed| failed.elapsed() < RECONNECT) {
            return None;
        }
        slot.connection = None;
        slot.failed = None;
        // First the address that is known: the registry may be away, even with the same server. A
        // server that has another address does not answer there.
        let known = self.addresses.lock().get(&server).cloned();
        let mut connected = None;
        if let Some(address) = &known {
            connected = self.connect(server, address).await;
        }
        if connected.is_none() {
            let address = match &known {
                None => self.address(server).await,
                Some(_) => tokio::time::timeout(ADDRESS, self.address(server)).await.ok().flatten(),
            };
            if let Some(address) = address.filter(|it| known.as_ref() != Some(it)) {
                connected = self.connect(server, &address).await;
                if connected.is_some() {
                    self.addresses.lock().insert(server, address);
                }
            }
        }
        slot.failed = connected.is_none().then(Instant::now);
        slot.connection.clone_from(&connected);
        connected
    }

    /// The address of a server in the registry.
    async fn address(&self, server: ServerId) -> Option<String> {
        match self.registry().server(server).await {
            Ok(known) => Some(self.learn(server, known.value)),
            Err(error) => {
                tracing::debug!(%server, %error, "a server was not found");
                None
            }
        }
    }

    /// Reads where all servers are: requests must reach them when the registry is away.
    async fn learn_servers(&self) -> Result<(), RegistryError> {
        for (server, known) in self.registry().servers().await? {
            let address = self.learn(server, known.value);
            self.addresses.lock().entry(server).or_insert(address);
        }
        Ok(())
    }

    /// Notes what the registry has of a server, and returns its address.
    fn learn(&self, server: ServerId, known: ServerValue) -> String {
        self.directory.lock().update(server, known.record());
        known.address
    }

    async fn connect(&self, server: ServerId, address: &str) -> Option<Arc<ClientConnection>> {
        let directory = Some(&self.directory);
        match ClientConnection::connect(&self.local, address, Some(server), directory).await {
            Ok(connection) => Some(Arc::new(connection)),
            Err(error) => {
                tracing::debug!(%server, address, %error, "not connected");
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
    /// If that fails, or `stop` completes before, the volume is not registered as attached.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub async fn attach(
        self: &Arc<Self>,
        id: VolumeId,
        options: AttachOptions,
        stop: impl Future<Output = ()>,
    ) -> Result<Attached, AttachError> {
        let service = Arc::clone(&self.service);
        tokio::pin!(stop);
        let lease = tokio::select! {
            lease = KeptLease::grant(service, ATTACH_LEASE) => lease.map_err(RegistryError::from)?,
            () = &mut stop => return Err(AttachError::Stopped),
        };
        let attached = tokio::select! {
            attached = self.attach_with(id, options, &lease) => attached,
            () = &mut stop => Err(AttachError::Stopped),
        };
        match attached {
            Ok((volume, value)) => {
                Ok(Attached { volume, id, value, cluster: Arc::clone(self), lease })
            }
            Err(error) => {
                // A transaction with the lease that is still on its way is refused from now on.
                if !matches!(tokio::time::timeout(REVOKE, lease.revoke()).await, Ok(Ok(()))) {
                    tracing::warn!(
                        "the registry may have the volume as attached for {ATTACH_LEASE:?}"
                    );
                }
                Err(error)
            }
        }
    }

    async fn attach_with(
        self: &Arc<Self>,
        id: VolumeId,
        options: AttachOptions,
        lease: &KeptLease,
    ) -> Result<(Volume, AttachValue), AttachError> {
        let request = AttachRequest {
            owner: options.owner,
            server: None,
            address: options.address,
            now_ms: unix_ms(),
            lease: lease.id(),
            take: options.take,
        };
        let registry = self.registry();
        self.learn_servers().await?;
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
        let AttachOptions { config, trouble, .. } = options;
        let handle = Volume::attach(attachment, config, servers, Arc::new(of_volume), trouble);
        let volume = handle.await.map_err(AttachError::Failed)?;
        Ok((volume, value))
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
    /// Keeps the volume registered as attached. When the registry was away for longer than the
    /// lease, it is registered again. Returns when that is refused: another process has attached
    /// the volume, or it is deleted.
    pub async fn keep_registered(&self) -> RegistryError {
        let mut renewed: Option<KeptLease> = None;
        loop {
            let lease = renewed.as_ref().unwrap_or(&self.lease);
            let next = match tokio::time::timeout(ATTACH_LEASE, lease.lost()).await {
                Err(_) => self.check_registered().await.map(|()| None),
                Ok(()) => self.register_again().await.map(Some),
            };
            match next {
                Ok(None) | Err(RegistryError::Coordination(_)) => {}
                Ok(lease) => renewed = lease,
                Err(refused) => return refused,
            }
        }
    }

    /// Fails if another process has taken the volume, or it is deleted.
    async fn check_registered(&self) -> Result<(), RegistryError> {
        let (volume, AttachValue { epoch, nonce, .. }) = (self.id, &self.value);
        match self.cluster.registry().attachment(volume).await? {
            None => Err(RegistryError::UnknownVolume(volume.to_string())),
            Some((found, _)) if (found.epoch, found.nonce) != (*epoch, *nonce) => {
                Err(RegistryError::Fenced { volume, epoch: *epoch, found: found.epoch })
            }
            Some(_) => Ok(()),
        }
    }

    /// Registers the volume with a new lease, and tries again while the registry is away.
    async fn register_again(&self) -> Result<KeptLease, RegistryError> {
        let volume = self.id;
        tracing::warn!(
            %volume,
            "the attachment could not be renewed: another process may attach the volume"
        );
        loop {
            let registered = async {
                let service = Arc::clone(&self.cluster.service);
                let lease = KeptLease::grant(service, ATTACH_LEASE).await?;
                self.cluster.registry().attach_again(volume, &self.value, lease.id()).await?;
                Ok(lease)
            };
            match registered.await {
                Err(RegistryError::Coordination(_) | RegistryError::Contended(_)) => {
                    tokio::time::sleep(REGISTER_AGAIN).await;
                }
                Err(refused) => return Err(refused),
                Ok(lease) => {
                    tracing::info!(%volume, "the attachment is renewed");
                    return Ok(lease);
                }
            }
        }
    }

    /// Records that the volume is no longer attached. Requests in flight are ended.
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
    async fn create(&self, region: RegionIndex) -> Result<GroupReplicas, GroupError> {
        let registry = self.cluster.registry();
        let seed = u64::from(self.id.0) << 16 | u64::from(region.0);
        match registry.create_group(self.id, region.0, self.epoch, seed).await {
            Ok((group, stored)) => {
                tracing::info!(volume = %self.id, region = region.0, %group, "a new group");
                // It may have replicas on a server that was registered after the attachment.
                if let Err(error) = self.cluster.learn_servers().await {
                    tracing::debug!(%error, "the servers cannot be read");
                }
                Ok(view_of(group, &stored.value))
            }
            Err(error) => Err(group_error(&error)),
        }
    }

    async fn read(&self, _: RegionIndex, group: GroupId) -> Result<GroupReplicas, GroupError> {
        match self.cluster.registry().group(group).await {
            Ok(stored) => Ok(view_of(group, &stored.value)),
            Err(error) => Err(group_error(&error)),
        }
    }
}

fn view_of(group: GroupId, value: &GroupValue) -> GroupReplicas {
    let replicas = value.peers.iter().filter(|peer| !peer.lost).map(|peer| peer.server);
    GroupReplicas { group, replicas: replicas.collect() }
}

fn group_error(error: &RegistryError) -> GroupError {
    match error {
        RegistryError::Fenced { .. } => GroupError::Fenced,
        RegistryError::UnknownVolume(_) | RegistryError::Deleting(_) => GroupError::Dropped,
        other => GroupError::Unavailable(other.to_string()),
    }
}
