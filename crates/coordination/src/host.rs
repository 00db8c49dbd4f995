//! A service on a TCP port: `docs/format/coordination-wire.md`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::wire::{Answer, Request, Welcome, with_length};
use crate::{Coordination, Error, Result};

mod connection;
#[cfg(test)]
mod tests;

/// How often the leases whose time is over are ended.
const EXPIRE_EVERY: Duration = Duration::from_millis(200);

/// A service that a [`Host`] can serve.
#[async_trait]
pub trait Hosted: Coordination {
    /// Ends all leases whose time is over.
    ///
    /// # Errors
    /// [`Error::Failed`], [`Error::Unavailable`].
    async fn expire(&self) -> Result<()>;
}

/// The options of a host.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// The cluster; clients of others are refused.
    pub cluster: String,
    /// Whether the host may listen beyond loopback. The protocol has no encryption and no
    /// authentication, so every machine that reaches the port must be trusted.
    pub allow_plaintext_network: bool,
    /// Most connections at a time.
    pub max_connections: usize,
    /// Most operations of a connection that are not answered. Beyond it the host reads nothing from
    /// the connection.
    pub max_calls: usize,
    /// Most watches of a connection. Further ones end with [`Error::Full`].
    pub max_watches: usize,
    /// Bytes of all requests and answers in memory, of all connections. Beyond it the host reads
    /// nothing.
    pub memory_bytes: usize,
    /// The time within which a connection sends its first frame.
    pub handshake_timeout: Duration,
    /// The time after which a connection that sends nothing is closed.
    pub idle_timeout: Duration,
    /// The time after which a connection that does not take a frame is closed.
    pub write_timeout: Duration,
    /// The time that [`Host::shutdown`] waits for operations.
    pub drain_timeout: Duration,
}

impl HostOptions {
    /// Returns the default options for a cluster.
    pub fn new(cluster: impl Into<String>) -> Self {
        Self {
            cluster: cluster.into(),
            allow_plaintext_network: false,
            max_connections: 64,
            max_calls: 32,
            max_watches: 64,
            memory_bytes: 64 << 20,
            handshake_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(15),
            write_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(5),
        }
    }
}

/// What all connections share.
struct Shared {
    service: Arc<dyn Hosted>,
    options: HostOptions,
    /// Memory in KiB.
    memory: Arc<Semaphore>,
}

/// A service on a TCP port. It also ends the service's leases when their time is over. A drop
/// closes the connections at once.
#[derive(Debug)]
pub struct Host {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Host {
    /// Listens on `address` and serves from now on. Runs in a runtime of tokio.
    ///
    /// # Errors
    /// [`Error::Invalid`], if the address is beyond loopback and plaintext is not allowed there;
    /// [`Error::Unavailable`], if the port cannot be opened.
    pub async fn bind(
        address: SocketAddr,
        service: Arc<dyn Hosted>,
        options: HostOptions,
    ) -> Result<Self> {
        if !address.ip().is_loopback() && !options.allow_plaintext_network {
            return Err(Error::Invalid(format!(
                "{address} is not a loopback address, and the protocol has no encryption: allow \
                 plaintext on the network if every machine that reaches it is trusted"
            )));
        }
        let failed = |error| Error::Unavailable(format!("cannot listen on {address}: {error}"));
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let memory = Arc::new(Semaphore::new(kib(options.memory_bytes) as usize));
        let shared = Arc::new(Shared { service, options, memory });
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(run(listener, shared, stopped));
        tracing::info!(%address, "coordination is served");
        Ok(Self { address, stop, task })
    }

    /// Returns the address on which the host listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no further operations, answers those that were read, and closes all connections.
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        // A panic of the task was reported when it happened.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns the number of KiB that hold this many bytes.
fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).expect("memory in KiB fits into 32 bits")
}

async fn run(listener: TcpListener, shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    // Both end with the set if this task is aborted.
    let mut clock = JoinSet::new();
    clock.spawn(expire(shared.service.clone()));
    let slots = Arc::new(Semaphore::new(shared.options.max_connections));
    loop {
        let accepted = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "connection not accepted");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        match slots.clone().try_acquire_owned() {
            Ok(slot) => {
                let (shared, stop) = (shared.clone(), stop.clone());
                connections.spawn(async move {
                    let _slot = slot;
                    match connection::serve(stream, &shared, stop).await {
                        Ok(()) => tracing::debug!(%peer, "connection closed"),
                        Err(reason) => tracing::warn!(%peer, reason, "connection closed"),
                    }
                });
            }
            Err(_) => refuse(&stream, shared.options.max_connections),
        }
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    let _ = timeout(shared.options.drain_timeout, all).await;
}

/// Sends a refusal to a connection that has no slot, without waiting.
fn refuse(stream: &TcpStream, connections: usize) {
    let reason = format!("the host has {connections} connections and takes no more");
    let frame = with_length(&Welcome::refused(reason).encode());
    // The buffer of a new connection has enough space. If not, the client sees the end alone.
    let _ = stream.try_write(&frame);
}

async fn expire(service: Arc<dyn Hosted>) {
    let mut ticks = interval(EXPIRE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match service.expire().await {
            Ok(()) => {}
            Err(error @ Error::Failed(_)) => {
                tracing::error!(%error, "leases do not end any more");
                return;
            }
            Err(error) => tracing::warn!(%error, "leases not ended, retrying"),
        }
    }
}

/// Runs one operation.
pub(crate) async fn execute<S: Coordination + ?Sized>(
    service: &S,
    request: Request,
) -> Result<Answer> {
    match request {
        Request::Get(key) => service.get(&key).await.map(Answer::Entry),
        Request::List(request) => service.list(&request).await.map(Answer::Page),
        Request::Commit(transaction) => service.commit(&transaction).await.map(Answer::Committed),
        Request::Grant(ttl) => service.grant(ttl).await.map(Answer::Lease),
        Request::KeepAlive(lease) => service.keep_alive(lease).await.map(|()| Answer::Done),
        Request::Revoke(lease) => service.revoke(lease).await.map(|()| Answer::Done),
    }
}
