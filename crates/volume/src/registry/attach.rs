//! Attachments.

use std::fmt;
use std::time::{Duration, SystemTime};

use alluvium_coordination::{Change, LeaseId, Transaction};
use uuid::Uuid;

use super::values::AttachLeaseValue;
use super::{AttachValue, MAX_ATTEMPTS, Registry, RegistryError, Result, encode, unchanged};
use crate::{AttachEpoch, ServerId, VolumeId};

/// Time for which the registry considers a gateway alive that it does not hear from.
pub const ATTACH_LEASE: Duration = Duration::from_secs(5);

/// The owner of an attachment, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Where it serves the volume and what it is.
    pub address: String,
    /// When it has attached the volume, in ms since 1970-01-01 UTC.
    pub since_ms: u64,
}

/// The first second of the year 10000, in ms since 1970-01-01 UTC.
const END_OF_DATES_MS: u64 = 253_402_300_800_000;

impl Owner {
    pub(super) fn of(attach: &AttachValue) -> Self {
        Self { address: attach.address.clone(), since_ms: attach.since_ms }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, since_ms } = self;
        write!(f, "{address} since ")?;
        // A time that is out of bounds is not one of this program.
        let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(*since_ms));
        match since.filter(|_| *since_ms < END_OF_DATES_MS) {
            Some(since) => humantime::format_rfc3339_seconds(since).fmt(f),
            None => write!(f, "{since_ms} ms"),
        }
    }
}

/// What attaches a volume.
#[derive(Clone, Debug)]
pub struct AttachRequest {
    /// The run of the process.
    pub owner: Uuid,
    /// Its server, if it is one.
    pub server: Option<ServerId>,
    /// Where it serves the volume and what it is.
    pub address: String,
    /// The time, in ms since 1970-01-01 UTC.
    pub now_ms: u64,
    /// The lease that the process renews while it has the volume attached.
    pub lease: LeaseId,
    /// Whether the volume is taken from an owner whose lease is fresh.
    pub take: bool,
}

impl Registry<'_> {
    /// Attaches a volume: takes the next epoch, with a random nonce. The caller then sends `Attach`
    /// to all groups of the volume, which refuses the owner before it.
    ///
    /// After an unknown outcome an epoch may be used up. Calling again takes the next one.
    ///
    /// # Errors
    /// [`RegistryError::Attached`], if another process has the volume attached, its lease is fresh,
    /// and it is not taken over; [`RegistryError::UnknownVolume`], [`RegistryError::Deleting`],
    /// [`RegistryError::NumbersUsedUp`], [`RegistryError::Contended`], and those of the service;
    /// that the lease is not found, if the caller's lease has ended.
    pub async fn attach(&self, id: VolumeId, request: &AttachRequest) -> Result<AttachValue> {
        let number = u64::from(id.0);
        let (key, lease_key) = (self.keys.attach(number), self.keys.attach_lease(number));
        for _ in 0..MAX_ATTEMPTS {
            let volume = self.available(id).await?;
            let lease = self.read::<AttachLeaseValue>(&lease_key).await?;
            let last = self.read::<AttachValue>(&key).await?;
            if let (Some(last), Some(_)) = (&last, &lease)
                && last.value.owner != request.owner
                && !request.take
            {
                let owner = Owner::of(&last.value);
                return Err(RegistryError::Attached { name: volume.value.name, owner });
            }
            let last_epoch = last.as_ref().map_or(AttachEpoch(0), |last| last.value.epoch);
            let epoch = self.next_epoch(last_epoch).await?;
            let nonce = Uuid::new_v4().as_fields().0;
            let AttachRequest { owner, server, address, now_ms: since_ms, .. } = request.clone();
            let value = AttachValue { epoch, nonce, owner, server, address, since_ms };
            let guards = vec![
                unchanged(&key, last.as_ref()),
                unchanged(&lease_key, lease.as_ref()),
                unchanged(&self.keys.volume(number), Some(&volume)),
            ];
            let leased = encode(&AttachLeaseValue { epoch, nonce });
            let changes = vec![
                Change::put(key.clone(), encode(&value)),
                Change::put_leased(lease_key.clone(), leased, request.lease),
            ];
            if self.commit(guards, changes).await?.is_some() {
                return Ok(value);
            }
        }
        Err(RegistryError::Contended(key))
    }

    /// Registers a lease for an attachment whose lease has ended. Epoch and nonce stay, so the
    /// servers do not notice. The call may be repeated.
    ///
    /// # Errors
    /// [`RegistryError::Fenced`], if another process has attached the volume meanwhile;
    /// [`RegistryError::UnknownVolume`], [`RegistryError::Deleting`],
    /// [`RegistryError::Contended`], and those of the service.
    pub async fn attach_again(
        &self,
        id: VolumeId,
        value: &AttachValue,
        lease: LeaseId,
    ) -> Result<()> {
        let number = u64::from(id.0);
        let (key, lease_key) = (self.keys.attach(number), self.keys.attach_lease(number));
        let AttachValue { epoch, nonce, .. } = *value;
        for _ in 0..MAX_ATTEMPTS {
            let volume = self.available(id).await?;
            let attach = self.attached_with(id, epoch).await?;
            // The registry went back to a backup, and gave the same epoch to another attachment.
            if attach.value.nonce != nonce {
                return Err(RegistryError::Fenced { volume: id, epoch, found: epoch });
            }
            let former = self.read::<AttachLeaseValue>(&lease_key).await?;
            let guards = vec![
                unchanged(&key, Some(&attach)),
                unchanged(&lease_key, former.as_ref()),
                unchanged(&self.keys.volume(number), Some(&volume)),
            ];
            let leased = encode(&AttachLeaseValue { epoch, nonce });
            let changes = vec![Change::put_leased(lease_key.clone(), leased, lease)];
            if self.attempt(&Transaction { guards, changes }).await? {
                return Ok(());
            }
        }
        Err(RegistryError::Contended(key))
    }

    /// Returns the newest attachment of a volume, and whether its owner's lease is fresh.
    ///
    /// # Errors
    /// Those of the service.
    pub async fn attachment(&self, id: VolumeId) -> Result<Option<(AttachValue, bool)>> {
        let number = u64::from(id.0);
        let Some(attach) = self.read::<AttachValue>(&self.keys.attach(number)).await? else {
            return Ok(None);
        };
        let lease = self.read::<AttachLeaseValue>(&self.keys.attach_lease(number)).await?;
        let is_fresh = lease.is_some_and(|lease| lease.value.epoch == attach.value.epoch);
        Ok(Some((attach.value, is_fresh)))
    }

    /// Detaches a volume that is attached with `epoch`. The epoch stays, so that the next
    /// attachment has a higher one.
    ///
    /// # Errors
    /// [`RegistryError::Fenced`], [`RegistryError::Contended`], and those of the service.
    pub async fn detach(&self, id: VolumeId, epoch: AttachEpoch) -> Result<()> {
        let number = u64::from(id.0);
        let (key, lease_key) = (self.keys.attach(number), self.keys.attach_lease(number));
        for _ in 0..MAX_ATTEMPTS {
            let attach = self.attached_with(id, epoch).await?;
            let lease = self.read::<AttachLeaseValue>(&lease_key).await?;
            if lease.is_none() {
                return Ok(());
            }
            let guards =
                vec![unchanged(&key, Some(&attach)), unchanged(&lease_key, lease.as_ref())];
            let changes = vec![Change::Delete(lease_key.clone())];
            if self.attempt(&Transaction { guards, changes }).await? {
                return Ok(());
            }
        }
        Err(RegistryError::Contended(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_shown_with_its_place_and_a_date() {
        let shown = |since_ms| Owner { address: "nbd.sock".into(), since_ms }.to_string();
        assert_eq!(shown(1_795_822_690_123), "nbd.sock since 2026-11-27T23:38:10Z");
        assert_eq!(shown(END_OF_DATES_MS - 1), "nbd.sock since 9999-12-31T23:59:59Z");
        assert_eq!(shown(END_OF_DATES_MS), "nbd.sock since 253402300800000 ms");
        assert_eq!(shown(u64::MAX), "nbd.sock since 18446744073709551615 ms");
    }
}
