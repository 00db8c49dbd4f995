//! The limits on open connections, in total and per address.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

/// The open connections and their limits.
pub(crate) struct Connections {
    limits: RwLock<Limits>,
    open: Mutex<Open>,
}

/// The greatest numbers of connections.
pub(crate) struct Limits {
    pub(crate) max: u32,
    pub(crate) max_of_address: u32,
    /// Addresses with a limit of their own.
    pub(crate) overrides: BTreeMap<IpAddr, u32>,
}

#[derive(Default)]
struct Open {
    total: u32,
    by_address: HashMap<IpAddr, u32>,
}

/// The limit that refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Full {
    #[error("too many open connections")]
    All,
    #[error("too many open connections from this address")]
    OfAddress,
}

impl Full {
    /// The label for the metric of connections that the server closed.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::All => "too_many",
            Self::OfAddress => "too_many_of_address",
        }
    }
}

impl Connections {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits: RwLock::new(limits), open: Mutex::default() })
    }

    /// Sets the limits for new connections. `limits` is evaluated under the lock, so that the
    /// latest change wins.
    pub(crate) fn refresh(&self, limits: impl FnOnce() -> Limits) {
        let mut current = self.limits.write();
        *current = limits();
    }

    /// Counts a connection from this address.
    ///
    /// # Errors
    /// A limit is reached.
    pub(crate) fn take(self: &Arc<Self>, ip: IpAddr) -> Result<ConnectionPermit, Full> {
        let ip = ip.to_canonical();
        let (max, max_of_address) = {
            let limits = self.limits.read();
            let own = limits.overrides.get(&ip).copied();
            (limits.max, own.unwrap_or(limits.max_of_address))
        };
        let mut open = self.open.lock();
        let of_address = open.by_address.get(&ip).copied().unwrap_or(0);
        if of_address >= max_of_address {
            return Err(Full::OfAddress);
        }
        if open.total >= max {
            return Err(Full::All);
        }
        open.total += 1;
        open.by_address.insert(ip, of_address + 1);
        Ok(ConnectionPermit { connections: self.clone(), ip })
    }
}

/// A counted connection; dropping it ends the count.
pub(crate) struct ConnectionPermit {
    connections: Arc<Connections>,
    ip: IpAddr,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        open.total -= 1;
        match open.by_address.get_mut(&self.ip) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(open.by_address.remove(&self.ip)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_an_address_is_enforced_until_its_connections_close() {
        let ip = |ip: &str| ip.parse::<IpAddr>().unwrap();
        let overrides = [(ip("10.0.0.2"), 3), (ip("10.0.0.3"), 0)].into();
        let connections = Connections::new(Limits { max: 4, max_of_address: 2, overrides });
        let first = connections.take(ip("10.0.0.1")).unwrap();
        // The same address over an IPv6 socket.
        let second = connections.take(ip("::ffff:10.0.0.1")).unwrap();
        assert_eq!(connections.take(ip("10.0.0.1")).err(), Some(Full::OfAddress));
        assert_eq!(connections.take(ip("10.0.0.3")).err(), Some(Full::OfAddress));
        let others = [(); 2].map(|()| connections.take(ip("10.0.0.2")).unwrap());
        assert_eq!(connections.take(ip("10.0.0.2")).err(), Some(Full::All));
        drop(first);
        let third = connections.take(ip("10.0.0.2")).unwrap();
        assert_eq!(connections.take(ip("10.0.0.2")).err(), Some(Full::OfAddress));
        drop((second, third, others));
        let open = connections.open.lock();
        assert_eq!((open.total, open.by_address.len()), (0, 0));
    }
}
