//! A volume server: the shard with its sockets, devices and registry.
//!
//! - `opening.rs`: from two devices and the registry to an open server
//! - `driver.rs`: the task around the shard
//! - `translate.rs`: between the frames of the protocol and the messages of the shard
//! - `outage.rs`: times without the coordination service
//! - `control.rs`: what the registry states, and what it is to record

mod control;
mod driver;
mod opening;
mod outage;
mod rate;
#[cfg(test)]
mod tests;
mod translate;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use alluvium_coordination::Coordination;
use alluvium_coordination::keys::Keys;
use alluvium_device::SharedDevice;
use alluvium_wal::{Options, Progress};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use uuid::Uuid;

pub use self::opening::{ServeError, check_devices};

use self::control::Control;
use self::driver::{Driver, Event, Events};
use self::outage::Outage;
use self::rate::Rate;
use crate::net::{
    Directory, Features, Host, Identity, Local, MIN_WINDOW_BYTES, Net, NetEvent, NetLimits,
    ServerRecord,
};
use crate::registry::Registry;
use crate::shard::{Apply, ShardCounters};
use crate::store::StoreCounters;
use crate::types::ServerId;

/// The largest record that a log needs, whatever its size: a group that is carried forward has up
/// to 16 MiB of ops, and each of them a head. A ring below 256 MiB needs less, a sixteenth for the
/// ops of such a group.
pub const RECORD_BYTES: u32 = 24 << 20;

/// The window of a client's connection. A leader with a small log takes less at a time, and would
/// answer what is beyond it with `Busy`.
const MAX_WINDOW_BYTES: u32 = 8 << 20;

/// What a server needs.
pub struct ServeOptions {
    /// The cluster.
    pub cluster: String,
    /// The device of the log.
    pub log: SharedDevice,
    /// Options of the log. Its mark is set by the opening.
    pub log_options: Options,
    /// The device of the store.
    pub store: SharedDevice,
    /// When a write is answered.
    pub apply: Apply,
    /// Memory for entries that a slow follower may need, in bytes.
    pub entry_cache_bytes: usize,
    /// Memory for blocks that are not written yet, in bytes.
    pub overlay_bytes: usize,
    /// Bytes per second of the blocks that the first rounds of installs bring to this server, and
    /// of those that installs of everything take from it. 0 for no bound.
    pub install_bytes_per_s: u64,
    /// Bounds of connections.
    pub limits: NetLimits,
    /// Where other servers and gateways reach this one: `HOST:PORT`.
    pub advertised: String,
}

/// What a server shows of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerView {
    /// Counts since the start.
    pub counters: ShardCounters,
    /// Slots of the store.
    pub slots: u32,
    /// Free slots of the store.
    pub free_slots: u32,
    /// Memory of blocks that are not written to the store yet, in bytes.
    pub overlay_bytes: u64,
    /// Whether a device has completed nothing for ten ticks.
    pub is_stalled: bool,
    /// Whether a checkpoint is in progress.
    pub is_checkpointing: bool,
    /// Replicas of this server that are lost.
    pub lost_replicas: usize,
    /// Statistics of the log.
    pub log: alluvium_wal::Stats,
    /// What the store has written.
    pub store: StoreCounters,
}

/// A server that is open.
pub struct Server {
    id: ServerId,
    events: Arc<Events>,
    net: Arc<Net>,
    driver: Driver,
    control: Control,
    view: Arc<Mutex<ServerView>>,
}

/// Ends a server.
#[derive(Clone)]
pub struct Stop {
    events: Arc<Events>,
    net: Arc<Net>,
}

impl Stop {
    /// Ends the connections, closes the log, and then ends [`Server::run`].
    pub fn stop(&self) {
        self.net.stop();
        self.events.push(Event::Stop);
    }
}

/// The connections' way to the shard.
struct Sink {
    events: Arc<Events>,
    service: Arc<dyn Coordination>,
    keys: Arc<Keys>,
}

impl Host for Sink {
    fn event(&self, event: NetEvent) {
        self.events.push(Event::Net(event));
    }

    fn look_up(
        &self,
        server: ServerId,
    ) -> std::pin::Pin<Box<dyn Future<Output = Option<ServerRecord>> + Send + '_>> {
        Box::pin(async move {
            let registry = Registry::new(&*self.service, &self.keys);
            match registry.server(server).await {
                Ok(stored) => Some(stored.value.record()),
                Err(error) => {
                    tracing::debug!(%server, %error, "a server was not found");
                    None
                }
            }
        })
    }
}

impl Server {
    /// Opens a server: formats devices that are empty, registers the server if it is new, recovers
    /// its log and store, and records the opening. Waits for the coordination service without end.
    /// `step` is called as [`Steps`](crate::shard::Steps) says.
    ///
    /// # Errors
    /// See [`ServeError`]. Nothing is served.
    pub async fn open(
        options: ServeOptions,
        service: Arc<dyn Coordination>,
        keys: Arc<Keys>,
        step: impl FnMut(&'static str) -> Progress + Send + 'static,
    ) -> Result<Self, ServeError> {
        let incarnation = Uuid::new_v4();
        let events = Arc::new(Events::default());
        let started = Instant::now();
        let opened = opening::open(
            &options,
            &service,
            &keys,
            incarnation,
            Arc::clone(&events),
            Box::new(step),
        )
        .await?;
        let id = opened.id;
        let local = Local {
            cluster: crate::net::cluster_id(&options.cluster),
            identity: Some(Identity { server: id, opening: opened.record }),
            features: Features::PULLS,
            window_bytes: u32::try_from(opened.shard.proposal_bytes())
                .unwrap_or(MAX_WINDOW_BYTES)
                .clamp(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES),
        };
        let sink = Sink {
            events: Arc::clone(&events),
            service: Arc::clone(&service),
            keys: Arc::clone(&keys),
        };
        // Entries in the cache and blocks in the overlay are slices of received buffers, which
        // count as a whole while one of them is kept.
        let kept_bytes = 2 * (options.entry_cache_bytes + options.overlay_bytes);
        let entry_bytes = options.limits.entry_bytes + kept_bytes;
        let limits = NetLimits { entry_bytes, ..options.limits };
        let net = Arc::new(Net::new(local, limits, Arc::new(sink)));
        let directory = Arc::new(Mutex::new(Directory::default()));
        let addresses: Arc<Mutex<HashMap<ServerId, String>>> = Arc::default();
        let (notices, received) = mpsc::unbounded_channel();
        for notice in opened.notices {
            drop(notices.send(notice));
        }
        let view = Arc::new(Mutex::new(ServerView::default()));
        let control = Control {
            id,
            incarnation,
            service,
            keys,
            events: Arc::clone(&events),
            net: Arc::clone(&net),
            directory: Arc::clone(&directory),
            addresses: Arc::clone(&addresses),
            notices: received,
            unrecorded: None,
            groups: opened.groups,
            lost: BTreeSet::new(),
            view: Arc::clone(&view),
            outage: Outage::default(),
        };
        let driver = Driver {
            shard: opened.shard,
            events: Arc::clone(&events),
            net: Arc::clone(&net),
            local,
            directory,
            addresses,
            notices,
            view: Arc::clone(&view),
            started,
            sending: Arc::new(Rate::new(options.install_bytes_per_s)),
            receiving: Arc::new(Rate::new(options.install_bytes_per_s)),
        };
        Ok(Self { id, events, net, driver, control, view })
    }

    /// The server.
    pub fn id(&self) -> ServerId {
        self.id
    }

    /// What ends the server.
    pub fn stop_handle(&self) -> Stop {
        Stop { events: Arc::clone(&self.events), net: Arc::clone(&self.net) }
    }

    /// What the server shows of itself.
    pub fn view(&self) -> Arc<Mutex<ServerView>> {
        Arc::clone(&self.view)
    }

    /// Serves until [`Stop::stop`], or until the log or the store fails.
    ///
    /// # Errors
    /// The log or the store has failed. The process must end.
    pub async fn run(self, listener: TcpListener) -> Result<(), ServeError> {
        let Self { net, driver, control, .. } = self;
        let control = tokio::spawn(control.run());
        // On a worker thread, where what the connections receive and send reaches it without a
        // switch of threads.
        let mut driving = JoinSet::new();
        driving.spawn(driver.run());
        let accept = net.serve(listener);
        let result = {
            let ended = driving.join_next();
            tokio::pin!(accept, ended);
            // Accepting ends with the driver, and not before.
            let result = tokio::select! {
                result = &mut ended => result,
                () = &mut accept => ended.await,
            };
            net.stop();
            result
        };
        let result = match result.expect("the driver was spawned") {
            Ok(result) => result,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        control.abort();
        result.map_err(ServeError::Failed)
    }
}
