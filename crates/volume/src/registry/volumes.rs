//! Volumes: creation, lookup, deletion.

use std::collections::BTreeMap;

use alluvium_coordination::keys::{MAX_NAME_BYTES, NumberKind};
use alluvium_coordination::{Change, Guard, Transaction};
use alluvium_device::ByteSize;
use uuid::Uuid;

use super::{
    AttachValue, MAX_ATTEMPTS, NameValue, Registry, RegistryError, Result, Stored, VolumeState,
    VolumeValue, encode, unchanged,
};
use crate::op::BLOCK_BYTES;
use crate::{AttachEpoch, VolumeId};

/// Greatest size of a volume.
pub const MAX_VOLUME_BYTES: u64 = 64 << 40;

/// Groups that a transaction deletes. It also changes the volume.
const DELETED_AT_ONCE: usize = 100;

/// Checks the name of a new volume. Earlier versions have accepted all that is valid in a key, so
/// other operations do not check more than that.
fn check_new_name(name: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let starts = name.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric());
    match starts && name.len() <= MAX_NAME_BYTES && name.bytes().all(allowed) {
        true => Ok(()),
        false => Err(RegistryError::Invalid(format!(
            "{name:?} is not a name for a volume: a name starts with a letter or a digit, \
             continues with letters, digits, '.', '_' and '-', all of ASCII, and has at most \
             {MAX_NAME_BYTES} characters"
        ))),
    }
}

impl Registry<'_> {
    /// Creates a volume with this name and size, and returns its id. It has no groups: they are
    /// created when their region is written first.
    ///
    /// After an unknown outcome the volume may exist. Calling again then ends with
    /// [`RegistryError::NameTaken`].
    ///
    /// # Errors
    /// [`RegistryError::Invalid`], [`RegistryError::NameTaken`], [`RegistryError::NumbersUsedUp`],
    /// [`RegistryError::Contended`], and those of the service.
    pub async fn create_volume(&self, name: &str, bytes: u64) -> Result<VolumeId> {
        let block = BLOCK_BYTES as u64;
        if bytes == 0 || bytes > MAX_VOLUME_BYTES || !bytes.is_multiple_of(block) {
            return Err(RegistryError::Invalid(format!(
                "invalid size {}: a volume has a multiple of {block}, from {block} to {}",
                ByteSize(bytes),
                ByteSize(MAX_VOLUME_BYTES),
                block = ByteSize(block),
            )));
        }
        check_new_name(name)?;
        let creation = Uuid::new_v4();
        let name_key = self.keys.name(name)?;
        for _ in 0..MAX_ATTEMPTS {
            if let Some(taken) = self.read::<NameValue>(&name_key).await? {
                let (name, volume) = (name.to_owned(), taken.value.volume);
                return Err(RegistryError::NameTaken { name, volume });
            }
            let next = self.draw(NumberKind::Volume, 1).await?;
            let id = VolumeId(u32::try_from(next.first).expect("numbers of volumes have 32 bits"));
            let key = self.keys.volume(next.first);
            let value = VolumeValue {
                name: name.to_owned(),
                bytes,
                family: id,
                state: VolumeState::Available,
                regions: BTreeMap::new(),
                creation,
            };
            let guards =
                vec![Guard::Absent(name_key.clone()), Guard::Absent(key.clone()), next.guard];
            let changes = vec![
                Change::put(name_key.clone(), encode(&NameValue { volume: id, creation })),
                Change::put(key, encode(&value)),
                next.change,
            ];
            if self.commit(guards, changes).await?.is_some() {
                return Ok(id);
            }
        }
        Err(RegistryError::Contended(self.keys.next(NumberKind::Volume)))
    }

    /// Returns a volume.
    ///
    /// # Errors
    /// [`RegistryError::UnknownVolume`], and those of the service.
    pub async fn volume(&self, id: VolumeId) -> Result<Stored<VolumeValue>> {
        let volume = self.read(&self.keys.volume(u64::from(id.0))).await?;
        volume.ok_or_else(|| RegistryError::UnknownVolume(id.to_string()))
    }

    /// Returns the volume with a name.
    ///
    /// # Errors
    /// [`RegistryError::UnknownVolume`], and those of the service.
    pub async fn volume_by_name(&self, name: &str) -> Result<(VolumeId, Stored<VolumeValue>)> {
        let unknown = || RegistryError::UnknownVolume(name.to_owned());
        let found = self.read::<NameValue>(&self.keys.name(name)?).await?.ok_or_else(unknown)?;
        let id = found.value.volume;
        // It may have been deleted, and the name given to another one, meanwhile.
        let volume = self.read::<VolumeValue>(&self.keys.volume(u64::from(id.0))).await?;
        let volume = volume.filter(|volume| volume.value.creation == found.value.creation);
        Ok((id, volume.ok_or_else(unknown)?))
    }

    /// Returns all volumes, by their ids, also those that are being deleted.
    ///
    /// # Errors
    /// Those of the service.
    pub async fn volumes(&self) -> Result<Vec<(VolumeId, Stored<VolumeValue>)>> {
        let (volumes, _) = self.read_all::<u32, _>("volume").await?;
        Ok(volumes.into_iter().map(|(id, volume)| (VolumeId(id), volume)).collect())
    }

    /// Deletes a volume that is not attached: first its name, then its groups, whose servers remove
    /// their replicas, then the volume. It continues a deletion that was begun.
    ///
    /// # Errors
    /// [`RegistryError::UnknownVolume`], if it does not exist or was deleted;
    /// [`RegistryError::Attached`], [`RegistryError::Contended`], and those of the service.
    pub async fn delete_volume(&self, id: VolumeId) -> Result<()> {
        let key = self.keys.volume(u64::from(id.0));
        let mut has_begun = false;
        let mut left = MAX_ATTEMPTS;
        while left > 0 {
            let volume = match self.volume(id).await {
                Err(RegistryError::UnknownVolume(_)) if has_begun => return Ok(()),
                volume => volume?,
            };
            has_begun |= volume.value.state == VolumeState::Deleting;
            let transaction = self.next_deletion(id, &key, &volume).await?;
            if self.attempt(&transaction).await? {
                // One of the steps is done.
                has_begun = true;
                left = MAX_ATTEMPTS;
            } else {
                left -= 1;
            }
        }
        Err(RegistryError::Contended(key))
    }

    /// Plans the next step of a deletion. Each guards the volume as it was read, so a late copy
    /// does nothing.
    pub(super) async fn next_deletion(
        &self,
        id: VolumeId,
        key: &str,
        volume: &Stored<VolumeValue>,
    ) -> Result<Transaction> {
        let mut guards = vec![unchanged(key, Some(volume))];
        let mut value = volume.value.clone();
        let attach_key = self.keys.attach(u64::from(id.0));
        let changes = if value.state == VolumeState::Available {
            let lease_key = self.keys.attach_lease(u64::from(id.0));
            let attach = self.read::<AttachValue>(&attach_key).await?;
            if let (Some(attach), Some(_)) = (&attach, self.service.get(&lease_key).await?) {
                let owner = super::Owner::of(&attach.value);
                return Err(RegistryError::Attached { name: value.name, owner });
            }
            guards.push(unchanged(&attach_key, attach.as_ref()));
            guards.push(Guard::Absent(lease_key));
            value.state = VolumeState::Deleting;
            let name = self.keys.name(&value.name)?;
            vec![Change::put(key, encode(&value)), Change::Delete(name)]
        } else if value.regions.is_empty() {
            vec![Change::Delete(key.to_owned()), Change::Delete(attach_key)]
        } else {
            let regions: Vec<_> = value.regions.keys().copied().take(DELETED_AT_ONCE).collect();
            let groups: Vec<_> =
                regions.iter().filter_map(|region| value.regions.remove(region)).collect();
            let deleted = groups.iter().map(|group| Change::Delete(self.keys.group(group.0)));
            std::iter::once(Change::put(key, encode(&value))).chain(deleted).collect()
        };
        Ok(Transaction { guards, changes })
    }

    /// Returns a volume that can be used.
    pub(super) async fn available(&self, id: VolumeId) -> Result<Stored<VolumeValue>> {
        let volume = self.volume(id).await?;
        match volume.value.state {
            VolumeState::Available => Ok(volume),
            VolumeState::Deleting => Err(RegistryError::Deleting(id)),
        }
    }

    /// Returns the newest attachment of a volume if it has this epoch.
    pub(super) async fn attached_with(
        &self,
        volume: VolumeId,
        epoch: AttachEpoch,
    ) -> Result<Stored<AttachValue>> {
        let attach = self.read::<AttachValue>(&self.keys.attach(u64::from(volume.0))).await?;
        let found = attach.as_ref().map_or(AttachEpoch(0), |attach| attach.value.epoch);
        match attach {
            Some(attach) if found == epoch => Ok(attach),
            _ => Err(RegistryError::Fenced { volume, epoch, found }),
        }
    }
}
