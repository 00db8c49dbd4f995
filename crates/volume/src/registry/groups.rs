//! Groups: creation, and the marks of their peers.

use std::collections::BTreeMap;

use alluvium_coordination::keys::NumberKind;
use alluvium_coordination::{Change, Event, Guard, Revision, Transaction, retry};
use alluvium_device::ByteSize;
use uuid::Uuid;

use super::{
    AttachValue, FirstEpoch, GroupValue, MAX_ATTEMPTS, PeerValue, REPLICAS, Registry,
    RegistryError, Result, Stored, VolumeValue, encode, number, parse, place, unchanged,
};
use crate::{AttachEpoch, GroupId, PeerId, ServerId, VolumeId};

/// Bytes of a region.
const REGION_BYTES: u64 = 64 << 30;

/// A group that is not committed yet.
pub(super) struct Planned {
    group: GroupId,
    value: GroupValue,
    pub(super) transaction: Transaction,
}

impl Registry<'_> {
    /// Creates the group of a region of a volume that is attached with `epoch`, or returns the one
    /// that it has. The seed decides between servers with equal loads.
    ///
    /// The group's state begins with the attachments of the registry, guarded by the revisions of
    /// their keys: otherwise a fenced gateway could have a group created that the newer `Attach`
    /// never reaches, and write there.
    ///
    /// # Errors
    /// [`RegistryError::UnknownVolume`], [`RegistryError::Deleting`], [`RegistryError::Invalid`],
    /// [`RegistryError::Fenced`], [`RegistryError::TooFewServers`],
    /// [`RegistryError::NumbersUsedUp`], [`RegistryError::Contended`], and those of the service.
    pub async fn create_group(
        &self,
        id: VolumeId,
        region: u16,
        epoch: AttachEpoch,
        seed: u64,
    ) -> Result<(GroupId, Stored<GroupValue>)> {
        for _ in 0..MAX_ATTEMPTS {
            let volume = self.available(id).await?;
            let attach = self.attached_with(id, epoch).await?;
            if let Some(group) = volume.value.regions.get(&region) {
                return Ok((*group, self.group(*group).await?));
            }
            let planned = self.plan_group(id, region, seed, &volume, &attach);
            let Planned { group, value, transaction } = planned.await?;
            if let Ok(revision) = retry::commit(self.service, &transaction).await? {
                return Ok((group, Stored { value, revision }));
            }
        }
        Err(RegistryError::Contended(self.keys.volume(u64::from(id.0))))
    }

    /// Plans the creation of a group of a volume that was read.
    pub(super) async fn plan_group(
        &self,
        id: VolumeId,
        region: u16,
        seed: u64,
        volume: &Stored<VolumeValue>,
        attach: &Stored<AttachValue>,
    ) -> Result<Planned> {
        if u64::from(region) * REGION_BYTES >= volume.value.bytes {
            return Err(RegistryError::Invalid(format!(
                "volume {id} has {} and no region {region}",
                ByteSize(volume.value.bytes)
            )));
        }
        let loads = self.loads().await?;
        let servers = place(&loads, seed).ok_or(RegistryError::TooFewServers(loads.len()))?;
        let number = self.draw(NumberKind::Group, 1).await?;
        let peers = self.draw(NumberKind::Peer, REPLICAS as u64).await?;
        let founders: Vec<_> = (peers.first..peers.first + REPLICAS as u64).map(PeerId).collect();
        let group = GroupId(number.first);
        let replicas = founders.iter().zip(servers);
        // Of the family there is only this volume as long as there are no clones.
        let (epoch, nonce) = (attach.value.epoch, attach.value.nonce);
        let value = GroupValue {
            family: volume.value.family,
            region,
            peers: replicas
                .map(|(peer, server)| PeerValue { peer: *peer, server, created: None, lost: false })
                .collect(),
            founders,
            epochs: vec![FirstEpoch { volume: id, epoch, nonce }],
            creation: Uuid::new_v4(),
        };
        let mut with_region = volume.value.clone();
        with_region.regions.insert(region, group);
        let group_key = self.keys.group(group.0);
        let volume_key = self.keys.volume(u64::from(id.0));
        let guards = vec![
            Guard::Absent(group_key.clone()),
            unchanged(&volume_key, Some(volume)),
            unchanged(&self.keys.attach(u64::from(id.0)), Some(attach)),
            number.guard,
            peers.guard,
        ];
        let changes = vec![
            Change::put(group_key, encode(&value)),
            Change::put(volume_key, encode(&with_region)),
            number.change,
            peers.change,
        ];
        Ok(Planned { group, value, transaction: Transaction { guards, changes } })
    }

    /// Returns the number of replicas of each server. With no more servers than a group needs they
    /// do not matter, and are not counted.
    async fn loads(&self) -> Result<BTreeMap<ServerId, u64>> {
        let servers = self.servers().await?;
        let mut loads: BTreeMap<_, _> = servers.into_iter().map(|(id, _)| (id, 0)).collect();
        if loads.len() > REPLICAS {
            for (_, group) in self.groups().await?.0 {
                for peer in group.value.peers {
                    if let Some(load) = loads.get_mut(&peer.server) {
                        *load += 1;
                    }
                }
            }
        }
        Ok(loads)
    }

    /// Returns a group.
    ///
    /// # Errors
    /// [`RegistryError::UnknownPeer`] with peer 0, if it does not exist; those of the service.
    pub async fn group(&self, id: GroupId) -> Result<Stored<GroupValue>> {
        let group = self.read(&self.keys.group(id.0)).await?;
        group.ok_or(RegistryError::UnknownPeer { group: id, peer: PeerId(0) })
    }

    /// Returns all groups, by their ids, and the revision that they are of: the events of a watch
    /// after it have all later changes.
    ///
    /// # Errors
    /// Those of the service.
    pub async fn groups(&self) -> Result<(Vec<(GroupId, Stored<GroupValue>)>, Revision)> {
        let (groups, revision) = self.read_all::<u64, _>("group").await?;
        let groups = groups.into_iter().map(|(id, group)| (GroupId(id), group));
        Ok((groups.collect(), revision))
    }

    /// Returns the group that an event is about, and what it is now: `None` if it was deleted.
    /// Returns `None` for an event about something else.
    ///
    /// # Errors
    /// [`RegistryError::Value`].
    pub fn group_of_event(
        &self,
        event: &Event,
    ) -> Result<Option<(GroupId, Option<Stored<GroupValue>>)>> {
        let prefix = self.keys.prefix("group");
        if !event.key.starts_with(&prefix) {
            return Ok(None);
        }
        let id = GroupId(number(&event.key, &prefix)?);
        Ok(Some((id, event.entry.as_ref().map(parse).transpose()?)))
    }

    /// Marks a peer as created, by this run of its server, when its first record is durable. Only
    /// then does the replica take part.
    ///
    /// A peer is created once: a run whose log has forgotten the replica, and one that another run
    /// has replaced, fail. If the log had the replica when it was opened (`is_recovered`), the mark
    /// may also be that of an earlier run, which was applied after the registry was read.
    ///
    /// # Errors
    /// [`RegistryError::CreatedElsewhere`], [`RegistryError::UnknownPeer`],
    /// [`RegistryError::Contended`], and those of the service. The call may be repeated.
    pub async fn mark_created(
        &self,
        group: GroupId,
        peer: PeerId,
        incarnation: Uuid,
        is_recovered: bool,
    ) -> Result<()> {
        self.mark(group, peer, |value| match value.created {
            None => {
                value.created = Some(incarnation);
                Ok(true)
            }
            Some(run) if run == incarnation || is_recovered => Ok(false),
            Some(_) => Err(RegistryError::CreatedElsewhere { group, peer }),
        })
        .await
    }

    /// Marks a peer as lost. It stays lost.
    ///
    /// # Errors
    /// [`RegistryError::UnknownPeer`], [`RegistryError::Contended`], and those of the service. The
    /// call may be repeated.
    pub async fn mark_lost(&self, group: GroupId, peer: PeerId) -> Result<()> {
        self.mark(group, peer, |value| Ok(!std::mem::replace(&mut value.lost, true))).await
    }

    /// Changes a peer by `change`, which returns whether anything has changed.
    async fn mark(
        &self,
        id: GroupId,
        peer: PeerId,
        change: impl Fn(&mut PeerValue) -> Result<bool>,
    ) -> Result<()> {
        let key = self.keys.group(id.0);
        for _ in 0..MAX_ATTEMPTS {
            let group = self.group(id).await?;
            let mut value = group.value.clone();
            let found = value.peers.iter_mut().find(|found| found.peer == peer);
            if !change(found.ok_or(RegistryError::UnknownPeer { group: id, peer })?)? {
                return Ok(());
            }
            let guards = vec![unchanged(&key, Some(&group))];
            let changes = vec![Change::put(key.clone(), encode(&value))];
            if self.attempt(&Transaction { guards, changes }).await? {
                return Ok(());
            }
        }
        Err(RegistryError::Contended(key))
    }
}
