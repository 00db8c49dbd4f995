//! What the registry states, as inputs of the shard, and what the registry is to record.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Changes, Coordination, Revision};
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::ServerView;
use super::driver::Events;
use super::opening::{own_peer, view_of};
use super::outage::{Outage, RETRY};
use crate::net::{Directory, Net};
use crate::registry::{GroupValue, Registry, RegistryError, Stored};
use crate::shard::{Input, Notice};
use crate::types::{GroupId, ServerId};

/// The task that follows the registry.
pub(super) struct Control {
    pub(super) id: ServerId,
    pub(super) incarnation: Uuid,
    pub(super) service: Arc<dyn Coordination>,
    pub(super) keys: Arc<Keys>,
    pub(super) events: Arc<Events>,
    pub(super) net: Arc<Net>,
    pub(super) directory: Arc<Mutex<Directory>>,
    pub(super) addresses: Arc<Mutex<HashMap<ServerId, String>>>,
    pub(super) notices: mpsc::UnboundedReceiver<Notice>,
    /// A notice that was received and is not recorded yet.
    pub(super) unrecorded: Option<Notice>,
    /// The groups with a replica here, as the shard knows them.
    pub(super) groups: BTreeMap<GroupId, Stored<GroupValue>>,
    /// The groups whose replica here is lost.
    pub(super) lost: BTreeSet<GroupId>,
    /// What the metrics show.
    pub(super) view: Arc<Mutex<ServerView>>,
    pub(super) outage: Outage,
}

impl Control {
    /// Follows the registry until it is aborted. While the registry is away, the server goes on
    /// with what it knows.
    pub(super) async fn run(mut self) {
        loop {
            if let Err(error) = self.follow().await {
                let effect =
                    "changes of the registry are not received; volumes are served as before";
                self.outage.failed(effect, &error);
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn follow(&mut self) -> Result<(), RegistryError> {
        let service = Arc::clone(&self.service);
        let after = self.read_groups().await?;
        self.read_servers().await?;
        let mut changes = service.watch(self.keys.root(), after);
        loop {
            if let Some(notice) = &self.unrecorded {
                self.record(notice).await?;
                self.unrecorded = None;
            }
            tokio::select! {
                notice = self.notices.recv() => match notice {
                    Some(notice) => self.unrecorded = Some(notice),
                    // The driver has ended, and the server with it.
                    None => std::future::pending().await,
                },
                change = changes.next() => match change {
                    Some(Ok(changes)) => {
                        self.take_changes(&changes).await?;
                        self.outage.over();
                    }
                    Some(Err(error)) => return Err(error.into()),
                    None => return Ok(()),
                },
                // A watch waits for the service without an error.
                answered = answers_later(&*service) => {
                    answered?;
                    self.outage.over();
                }
            }
        }
    }

    async fn take_changes(&mut self, changes: &Changes) -> Result<(), RegistryError> {
        let servers = self.keys.prefix("server");
        if changes.events.iter().any(|event| event.key.starts_with(&servers)) {
            self.read_servers().await?;
        }
        for event in &changes.events {
            let registry = Registry::new(&*self.service, &self.keys);
            if let Some((group, now)) = registry.group_of_event(event)? {
                self.group_is(group, now);
            }
        }
        Ok(())
    }

    /// Connects to all servers of the cluster.
    async fn read_servers(&self) -> Result<(), RegistryError> {
        let registry = Registry::new(&*self.service, &self.keys);
        let servers = registry.servers().await?;
        let mut addresses = HashMap::new();
        for (id, stored) in servers {
            let record = stored.value.record();
            self.net.update_server(id, record);
            self.directory.lock().update(id, record);
            // A server that was never opened has no address that counts.
            if id != self.id && stored.value.mark > 0 {
                addresses.insert(id, stored.value.address);
            }
        }
        self.net.set_peers(&addresses);
        *self.addresses.lock() = addresses;
        Ok(())
    }

    /// Passes to the shard what has changed since the last time. Returns the revision that it is
    /// of. A change of one group does not read all of them: there may be thousands.
    async fn read_groups(&mut self) -> Result<Revision, RegistryError> {
        let registry = Registry::new(&*self.service, &self.keys);
        let (groups, revision) = registry.groups().await?;
        let groups: BTreeMap<_, _> = groups.into_iter().collect();
        let is_gone = |group: &GroupId| !groups.contains_key(group);
        let known = self.groups.keys().chain(&self.lost).copied();
        let gone: Vec<GroupId> = known.filter(is_gone).collect();
        let gone = gone.into_iter().map(|group| (group, None));
        for (group, now) in gone.chain(groups.into_iter().map(|(id, group)| (id, Some(group)))) {
            self.group_is(group, now);
        }
        Ok(revision)
    }

    /// Passes to the shard what the registry states of a group now.
    fn group_is(&mut self, group: GroupId, now: Option<Stored<GroupValue>>) {
        let mut peers = now.iter().flat_map(|stored| &stored.value.peers);
        match peers.any(|peer| peer.server == self.id && peer.lost) {
            true => self.lost.insert(group),
            false => self.lost.remove(&group),
        };
        self.view.lock().lost_replicas = self.lost.len();
        let own = now.as_ref().and_then(|stored| own_peer(&stored.value, self.id));
        let Some((stored, own)) = now.zip(own) else {
            if self.groups.remove(&group).is_some() {
                self.events.input(Input::Remove { group });
            }
            return;
        };
        let view = view_of(&stored.value);
        let (revision, known) = (stored.revision, self.groups.insert(group, stored));
        match (known, own) {
            (Some(known), _) if known.revision == revision => {}
            (None, (peer, false)) => self.events.input(Input::Create { group, peer, view }),
            _ => self.events.input(Input::View { group, view }),
        }
    }

    /// Records what the shard reports. After an error the same notice is to be recorded again.
    async fn record(&self, notice: &Notice) -> Result<(), RegistryError> {
        let registry = Registry::new(&*self.service, &self.keys);
        let recorded = match *notice {
            Notice::Created { group, peer, is_recovered } => {
                let run = self.incarnation;
                let created = registry.mark_created(group, peer, run, is_recovered).await;
                if created.is_ok() {
                    self.events.input(Input::Activate { group, peer });
                }
                created
            }
            Notice::Lost { group, peer, ref reason } => {
                tracing::error!(%group, %peer, reason, "a replica is lost");
                registry.mark_lost(group, peer).await
            }
            Notice::Stopped { group, peer, ref reason } => {
                tracing::error!(%group, %peer, reason, "a replica has stopped");
                Ok(())
            }
            Notice::UnknownGroup { .. } => Ok(()),
        };
        match recorded {
            Err(error @ (RegistryError::Coordination(_) | RegistryError::Contended(_))) => {
                Err(error)
            }
            // The volume was deleted meanwhile. The replica is removed with its group.
            Err(RegistryError::UnknownPeer { group, peer }) => {
                tracing::debug!(%group, %peer, "a notice of a replica that is not registered");
                Ok(())
            }
            Err(error) => {
                tracing::error!(%error, ?notice, "a notice cannot be recorded");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Checks, after a pause, that the service can be reached.
async fn answers_later(service: &dyn Coordination) -> Result<(), RegistryError> {
    tokio::time::sleep(RETRY).await;
    service.identity().await?;
    Ok(())
}

#[cfg(test)]
mod tests;
