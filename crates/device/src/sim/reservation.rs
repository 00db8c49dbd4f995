//! The registrations and the reservation of a simulated disk.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::SimDisk;
use crate::ReserveError;
use crate::engine::Core;
use crate::reserve::{self, Refusal, Reservations};

/// The answer of a disk to a host with a pending unit attention, and of some disks to an
/// unregistered host.
const CHECK_CONDITION: u32 = 2;
/// The answer of a disk to a command that it does not support.
const UNKNOWN_COMMAND: u32 = 0x402;

/// Persistent reservation state. A host is identified by its `Core`.
#[derive(Clone, Default)]
pub(super) struct Reservation {
    registered: Vec<(Arc<Core>, u64)>,
    holder: Option<Arc<Core>>,
    /// Hosts with a pending unit attention: others have cancelled their registration.
    attention: Vec<Arc<Core>>,
}

impl Reservation {
    /// Whether the writes of `host` are refused.
    pub(super) fn excludes(&self, host: &Arc<Core>) -> bool {
        self.holder.as_ref().is_some_and(|holder| !Arc::ptr_eq(holder, host))
    }

    /// Replaces the host `before` by its restarted self.
    pub(super) fn restart(&mut self, before: &Arc<Core>, after: &Arc<Core>) {
        let hosts = self.registered.iter_mut().map(|(host, _)| host);
        for host in hosts.chain(&mut self.holder).chain(&mut self.attention) {
            if Arc::ptr_eq(host, before) {
                *host = after.clone();
            }
        }
    }

    /// Reports a pending unit attention to `host`, once.
    fn report_attention(&mut self, host: &Arc<Core>) -> Result<(), Refusal> {
        match self.attention.iter().position(|of| Arc::ptr_eq(of, host)) {
            Some(at) => {
                self.attention.swap_remove(at);
                Err(Refusal::Status(CHECK_CONDITION))
            }
            None => Ok(()),
        }
    }

    fn key_of(&self, host: &Arc<Core>) -> Option<u64> {
        self.registered.iter().find(|(of, _)| Arc::ptr_eq(of, host)).map(|(_, key)| *key)
    }

    fn register(&mut self, host: &Arc<Core>, before: u64, key: u64) -> Result<(), Refusal> {
        if self.key_of(host).unwrap_or(0) != before {
            return Err(Refusal::Conflict);
        }
        self.registered.retain(|(of, _)| !Arc::ptr_eq(of, host));
        if key != 0 {
            self.registered.push((host.clone(), key));
        } else if !self.excludes(host) {
            self.holder = None;
        }
        Ok(())
    }

    fn reserve(&mut self, host: &Arc<Core>, key: u64) -> Result<(), Refusal> {
        if self.excludes(host) {
            Err(Refusal::Conflict)
        } else if self.key_of(host) != Some(key) {
            Err(Refusal::Status(CHECK_CONDITION))
        } else {
            self.holder = Some(host.clone());
            Ok(())
        }
    }

    fn preempt(&mut self, host: &Arc<Core>, key: u64) -> Result<(), Refusal> {
        if self.key_of(host) != Some(key) {
            return Err(Refusal::Conflict);
        }
        let takes_over = self.holder.as_ref().is_some_and(|held| self.key_of(held) == Some(key));
        for (of, registered) in std::mem::take(&mut self.registered) {
            let own = Arc::ptr_eq(&of, host);
            // A host that takes over no reservation cancels its own registration as well.
            if registered != key || (own && takes_over) {
                self.registered.push((of, registered));
            } else if !own {
                self.attention.push(of);
            }
        }
        if takes_over {
            self.holder = Some(host.clone());
        }
        Ok(())
    }
}

impl SimDisk {
    /// Implements [`Device::reserve`](crate::Device::reserve). Requests that other hosts have
    /// queued are refused when they are executed, that is, aborted.
    pub(super) fn acquire(&self) -> Result<(), ReserveError> {
        reserve::acquire(self, &self.0.core.geometry.name)
    }

    /// Reserves the disk as other software does, with another key. Panics if it is reserved
    /// already.
    pub fn reserve_with_other_key(&self) {
        let key = reserve::KEY + 1;
        self.register(0, key).and_then(|()| Reservations::reserve(self, key)).expect("it is free");
    }

    /// Clears all registrations, as a disk that does not keep them over a power loss.
    pub fn lose_reservation(&self) {
        if let Some(reservation) = &mut self.0.medium.state.lock().reservation {
            *reservation = Reservation::default();
        }
    }

    fn ask(
        &self,
        command: impl FnOnce(&mut Reservation, &Arc<Core>) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let state = &mut *self.0.medium.state.lock();
        if state.ended {
            return Err(Refusal::System(rustix::io::Errno::IO));
        }
        match &mut state.reservation {
            Some(reservation) => {
                reservation.report_attention(&self.0.core)?;
                command(reservation, &self.0.core)
            }
            None => Err(Refusal::Status(UNKNOWN_COMMAND)),
        }
    }
}

impl Reservations for SimDisk {
    fn register(&self, before: u64, key: u64) -> Result<(), Refusal> {
        self.ask(|reservation, host| reservation.register(host, before, key))
    }

    fn reserve(&self, key: u64) -> Result<(), Refusal> {
        self.ask(|reservation, host| reservation.reserve(host, key))
    }

    fn preempt(&self, key: u64) -> Result<(), Refusal> {
        self.ask(|reservation, host| reservation.preempt(host, key))
    }
}
