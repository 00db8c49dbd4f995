//! Servers: registration and openings.

use alluvium_coordination::Change;
use alluvium_coordination::keys::NumberKind;
use uuid::Uuid;

use super::{
    MAX_ATTEMPTS, Registry, RegistryError, Result, ServerValue, Stored, encode, unchanged,
};
use crate::ServerId;

/// An opening of a server that was checked and not yet recorded.
#[derive(Debug)]
pub struct Opening {
    id: ServerId,
    registered: Stored<ServerValue>,
}

impl Opening {
    /// The mark in the registry. The WAL is opened with a greater one.
    pub fn mark(&self) -> u64 {
        self.registered.value.mark
    }
}

impl Registry<'_> {
    /// Registers a server with new devices, and returns its id; or returns the id that these
    /// devices have.
    ///
    /// # Errors
    /// [`RegistryError::NumbersUsedUp`], [`RegistryError::Contended`], and those of the service.
    pub async fn register_server(
        &self,
        address: &str,
        [store, wal]: [Uuid; 2],
        incarnation: Uuid,
    ) -> Result<ServerId> {
        let value = ServerValue {
            address: address.to_owned(),
            store,
            wal,
            mark: 0,
            incarnation,
            features: 0,
        };
        for _ in 0..MAX_ATTEMPTS {
            let known = self.servers().await?;
            if let Some((id, known)) = known.iter().find(|(_, known)| known.value.store == store) {
                check_disks(*id, &known.value, [store, wal])?;
                return Ok(*id);
            }
            let next = self.draw(NumberKind::Server, 1).await?;
            let id = ServerId(u32::try_from(next.first).expect("numbers of servers have 32 bits"));
            let key = self.keys.server(next.first);
            let guards = vec![unchanged::<ServerValue>(&key, None), next.guard];
            let changes = vec![Change::put(key, encode(&value)), next.change];
            if self.commit(guards, changes).await?.is_some() {
                return Ok(id);
            }
        }
        Err(RegistryError::Contended(self.keys.next(NumberKind::Server)))
    }

    /// Returns a server.
    ///
    /// # Errors
    /// [`RegistryError::UnknownServer`], and those of the service.
    pub async fn server(&self, id: ServerId) -> Result<Stored<ServerValue>> {
        let server = self.read(&self.keys.server(u64::from(id.0))).await?;
        server.ok_or(RegistryError::UnknownServer(id))
    }

    /// Returns all servers, by their ids.
    ///
    /// # Errors
    /// Those of the service.
    pub async fn servers(&self) -> Result<Vec<(ServerId, Stored<ServerValue>)>> {
        let (servers, _) = self.read_all::<u32, _>("server").await?;
        Ok(servers.into_iter().map(|(id, server)| (ServerId(id), server)).collect())
    }

    /// Checks that a server may be opened with these devices, of which the WAL has `mark`, before
    /// the WAL is opened (`docs/format/volume-wire.md`, section 2).
    ///
    /// # Errors
    /// [`RegistryError::UnknownServer`], [`RegistryError::WrongDisks`], [`RegistryError::OldCopy`],
    /// and those of the service.
    pub async fn check_opening(
        &self,
        id: ServerId,
        disks: [Uuid; 2],
        mark: u64,
    ) -> Result<Opening> {
        let registered = self.server(id).await?;
        check_disks(id, &registered.value, disks)?;
        if mark < registered.value.mark {
            let registered = registered.value.mark;
            return Err(RegistryError::OldCopy { server: id, mark, registered });
        }
        Ok(Opening { id, registered })
    }

    /// Records an opening when the WAL is open with its new mark. The server connects and accepts
    /// only afterwards.
    ///
    /// # Errors
    /// [`RegistryError::OpenedElsewhere`], after which the process must not try again: two copies
    /// of a server would replace each other forever. Those of the service.
    pub async fn record_opening(
        &self,
        opening: &Opening,
        mark: u64,
        incarnation: Uuid,
        address: &str,
        features: u64,
    ) -> Result<()> {
        let Opening { id, registered } = opening;
        let before = registered.value.mark;
        if mark <= before {
            return Err(RegistryError::OldCopy { server: *id, mark, registered: before });
        }
        let key = self.keys.server(u64::from(id.0));
        let address = address.to_owned();
        let value =
            ServerValue { address, mark, incarnation, features, ..registered.value.clone() };
        let guards = vec![unchanged(&key, Some(registered))];
        match self.commit(guards, vec![Change::put(key, encode(&value))]).await? {
            Some(_) => Ok(()),
            None => {
                // An earlier call for this run may have ended without its outcome.
                match self.server(*id).await?.value == value {
                    true => Ok(()),
                    false => Err(RegistryError::OpenedElsewhere(*id)),
                }
            }
        }
    }
}

fn check_disks(server: ServerId, known: &ServerValue, [store, wal]: [Uuid; 2]) -> Result<()> {
    match known.store == store && known.wal == wal {
        true => Ok(()),
        false => Err(RegistryError::WrongDisks { server, store: known.store, wal: known.wal }),
    }
}
