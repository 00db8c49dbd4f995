//! What the servers of volumes share: servers, volumes, groups and attachments, as typed values and
//! transactions over [`Coordination`]. Format: `docs/format/volume-registry.md`.
//!
//! Every function may be called again after [`Error::Unavailable`]. After [`Error::Unknown`] it may
//! be called again too, except where it says otherwise.

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{
    Change, Coordination, Entry, Error, Guard, Revision, Transaction, election, retry,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::{AttachEpoch, GroupId, PeerId, ServerId, VolumeId};

mod attach;
mod groups;
mod numbers;
mod placement;
mod servers;
#[cfg(test)]
mod tests;
mod values;
mod volumes;

pub use attach::{ATTACH_LEASE, AttachRequest, Owner};
pub use placement::place;
pub use servers::Opening;
pub use values::{
    AttachValue, FirstEpoch, GroupValue, NameValue, PeerValue, REPLICAS, ServerValue, VolumeState,
    VolumeValue,
};
pub use volumes::MAX_VOLUME_BYTES;

/// How often a change is decided anew because another one came before it.
const MAX_ATTEMPTS: usize = 10;

/// Why an operation of the registry has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The coordination service has failed.
    #[error(transparent)]
    Coordination(#[from] Error),
    /// A value is not one of this version. Nothing was changed.
    #[error("the value of key {key} is damaged or of a newer version: {what}")]
    Value {
        /// The key.
        key: String,
        /// What is wrong with it.
        what: String,
    },
    /// The server is not registered.
    #[error("server {0} is not registered")]
    UnknownServer(ServerId),
    /// There is no such volume.
    #[error("volume {0} does not exist")]
    UnknownVolume(String),
    /// There is no such group, or it has no such peer.
    #[error("group {group} does not exist or has no peer {peer}")]
    UnknownPeer {
        /// The group.
        group: GroupId,
        /// The peer, or 0 if the group does not exist.
        peer: PeerId,
    },
    /// A volume has the name.
    #[error("the name {name} is taken: volume {volume} exists with it")]
    NameTaken {
        /// The name.
        name: String,
        /// The volume.
        volume: VolumeId,
    },
    /// A size or region is out of bounds.
    #[error("{0}")]
    Invalid(String),
    /// The volume is being deleted.
    #[error("volume {0} is being deleted")]
    Deleting(VolumeId),
    /// Another process has the volume attached, and its lease is fresh.
    #[error(
        "volume {name} is attached by {owner}. Stop that process; if it has died, its lease ends \
         within {} s; or fence it: `alluvium volume attach {name} --take`",
        ATTACH_LEASE.as_secs()
    )]
    Attached {
        /// The name of the volume.
        name: String,
        /// The owner.
        owner: Owner,
    },
    /// The attachment is not the newest one.
    #[error("volume {volume} was attached again, with epoch {found}: epoch {epoch} is fenced")]
    Fenced {
        /// The volume.
        volume: VolumeId,
        /// The epoch that was given.
        epoch: AttachEpoch,
        /// The epoch in the registry; 0 if the volume was never attached.
        found: AttachEpoch,
    },
    /// The server's devices are not the registered ones.
    #[error("server {server} is registered with store {store} and WAL {wal}, not with these")]
    WrongDisks {
        /// The server.
        server: ServerId,
        /// The registered store.
        store: Uuid,
        /// The registered WAL.
        wal: Uuid,
    },
    /// The server's WAL is an old copy.
    #[error("the WAL of server {server} has mark {mark}, below {registered}: it is an old copy")]
    OldCopy {
        /// The server.
        server: ServerId,
        /// The mark of the WAL.
        mark: u64,
        /// The registered mark.
        registered: u64,
    },
    /// Another process has opened the server meanwhile. This one must not try again.
    #[error("another process has opened server {0}")]
    OpenedElsewhere(ServerId),
    /// Another run of the server has created the replica, and this one's log lacks it.
    #[error("another run of the server has created replica {peer} of group {group}")]
    CreatedElsewhere {
        /// The group.
        group: GroupId,
        /// The replica.
        peer: PeerId,
    },
    /// There are fewer servers than a group has replicas.
    #[error("a group needs {REPLICAS} servers, and {0} are registered")]
    TooFewServers(usize),
    /// All numbers of a kind have been given out.
    #[error("the numbers of {0} are used up")]
    NumbersUsedUp(&'static str),
    /// Other changes came before this one each time.
    #[error("key {0} changes too often; try again")]
    Contended(String),
}

/// The result of an operation of the registry.
pub type Result<T> = std::result::Result<T, RegistryError>;

/// A value with the revision that has put it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored<T> {
    /// The value.
    pub value: T,
    /// The revision of its last put.
    pub revision: Revision,
}

/// The registry of a cluster.
#[derive(Clone, Copy)]
pub struct Registry<'a> {
    service: &'a dyn Coordination,
    keys: &'a Keys,
}

impl std::fmt::Debug for Registry<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("keys", self.keys).finish_non_exhaustive()
    }
}

impl<'a> Registry<'a> {
    /// Returns the registry with these keys in a service.
    pub fn new(service: &'a dyn Coordination, keys: &'a Keys) -> Self {
        Self { service, keys }
    }

    async fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<Stored<T>>> {
        self.service.get(key).await?.map(|entry| parse(&entry)).transpose()
    }

    /// Reads all values below a first part of the keys, with their numbers, and the revision that
    /// they are of.
    async fn read_all<N, T>(&self, part: &str) -> Result<(Vec<(N, Stored<T>)>, Revision)>
    where
        N: TryFrom<u64, Error: std::fmt::Display>,
        T: DeserializeOwned,
    {
        let prefix = self.keys.prefix(part);
        let (entries, revision) = election::list_all(self.service, &prefix).await?;
        let value = |entry: &Entry| Ok((number(&entry.key, &prefix)?, parse(entry)?));
        Ok((entries.iter().map(value).collect::<Result<_>>()?, revision))
    }

    /// Commits a transaction with a value that nothing else puts. Returns its revision, or `None`
    /// if a guard did not hold.
    async fn commit(&self, guards: Vec<Guard>, changes: Vec<Change>) -> Result<Option<Revision>> {
        let transaction = Transaction { guards, changes };
        Ok(retry::commit(self.service, &transaction).await?.ok())
    }

    /// Commits a transaction of a caller that reads the keys again to see what was done. Returns
    /// `true` if it was applied, and `false` after a conflict or an unknown outcome.
    async fn attempt(&self, transaction: &Transaction) -> Result<bool> {
        match self.service.commit(transaction).await {
            Ok(answer) => Ok(answer.is_ok()),
            Err(Error::Unknown(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// The number at the end of a key with a prefix.
fn number<N: TryFrom<u64, Error: std::fmt::Display>>(key: &str, prefix: &str) -> Result<N> {
    let number = u64::from_str_radix(&key[prefix.len()..], 16).map_err(|error| error.to_string());
    number
        .and_then(|number| N::try_from(number).map_err(|error| error.to_string()))
        .map_err(|what| RegistryError::Value { key: key.to_owned(), what })
}

fn parse<T: DeserializeOwned>(entry: &Entry) -> Result<Stored<T>> {
    match serde_json::from_slice(&entry.value) {
        Ok(value) => Ok(Stored { value, revision: entry.modified }),
        Err(error) => Err(RegistryError::Value { key: entry.key.clone(), what: error.to_string() }),
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("a value of the registry is JSON")
}

/// Returns the guard that a key is as it was read.
fn unchanged<T>(key: &str, stored: Option<&Stored<T>>) -> Guard {
    Guard::unchanged(key, stored.map(|stored| stored.revision))
}
