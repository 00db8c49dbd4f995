//! The values of the keys: `docs/format/volume-registry.md`. JSON with these fields and no others.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::net::ServerRecord;
use crate::{AttachEpoch, GroupId, PeerId, ServerId, VolumeId};

/// The number of replicas of a group.
pub const REPLICAS: usize = 3;

/// The value of `server/<id>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerValue {
    /// Where servers and gateways reach it: `HOST:PORT`.
    pub address: String,
    /// The id of its store.
    pub store: Uuid,
    /// The id of its WAL.
    pub wal: Uuid,
    /// The opening mark of its WAL; 0 before its first opening.
    pub mark: u64,
    /// The run that has opened it last, or has registered it.
    pub incarnation: Uuid,
    /// The feature bits that it supports.
    pub features: u64,
}

impl ServerValue {
    /// The last opening of the server.
    pub fn record(&self) -> ServerRecord {
        let Self { store, wal, mark, incarnation, .. } = *self;
        ServerRecord { store, wal, mark, incarnation }
    }
}

/// The state of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// It can be attached.
    Available,
    /// Its groups are being deleted, and then the volume.
    Deleting,
}

/// The value of `volume/<id>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeValue {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// The volume's family: the first ancestor, or itself.
    pub family: VolumeId,
    /// Whether it is being deleted.
    pub state: VolumeState,
    /// The groups of the regions that were written.
    pub regions: BTreeMap<u16, GroupId>,
    /// Random, of its creation.
    pub creation: Uuid,
}

/// The value of `name/<name>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NameValue {
    /// The volume with this name.
    pub volume: VolumeId,
    /// As in its value.
    pub creation: Uuid,
}

/// The value of `group/<id>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupValue {
    /// The family whose region it has.
    pub family: VolumeId,
    /// The region.
    pub region: u16,
    /// The peers with which the group began.
    pub founders: Vec<PeerId>,
    /// All peers.
    pub peers: Vec<PeerValue>,
    /// The attachments with which the group's state begins, one for each volume of the family.
    pub epochs: Vec<FirstEpoch>,
    /// Random, of its creation.
    pub creation: Uuid,
}

/// A replica of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerValue {
    /// Its peer id.
    pub peer: PeerId,
    /// Its server.
    pub server: ServerId,
    /// The run of the server that has created the replica. A replica that is marked and not in the
    /// server's log was forgotten.
    pub created: Option<Uuid>,
    /// Whether the replica may have forgotten what it acknowledged.
    pub lost: bool,
}

/// An attachment with which the state of a group begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FirstEpoch {
    /// The volume.
    pub volume: VolumeId,
    /// The epoch of its newest attachment.
    pub epoch: AttachEpoch,
    /// The nonce of that attachment.
    pub nonce: u32,
}

/// The value of `attach/<volume>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachValue {
    /// The epoch of the newest attachment.
    pub epoch: AttachEpoch,
    /// A random number of the attachment.
    pub nonce: u32,
    /// The run of the process that has the volume attached.
    pub owner: Uuid,
    /// The server with that process, if it is one.
    pub server: Option<ServerId>,
    /// Where that process serves the volume and what it is, for operators.
    pub address: String,
    /// When it was attached, in ms since 1970-01-01 UTC, for operators.
    pub since_ms: u64,
}

/// The value of `lease/attach/<volume>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AttachLeaseValue {
    pub(super) epoch: AttachEpoch,
    pub(super) nonce: u32,
}
