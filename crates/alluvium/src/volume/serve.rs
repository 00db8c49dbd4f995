//! `alluvium volume serve`: a server of volumes.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use alluvium_coordination::{
    Coordination, Host, HostOptions, Limits, RedbCoordination, SystemClock,
};
use alluvium_device::{Geometry, OpenOptions, SharedDevice};
use alluvium_volume::net::NetLimits;
use alluvium_volume::serve::{
    RECORD_BYTES, ServeError, ServeOptions, Server, ServerView, check_devices,
};
use alluvium_volume::shard::Apply;
use clap::{Args, ValueEnum};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use super::metrics::VolumeCollector;
use super::{ClusterArgs, check_exposure, serving_runtime};
use crate::address::{Address, HostPort};
use crate::admin::{Admin, Condition, Health};
use crate::output::Failure;
use crate::progress::Meter;
use crate::serve::Signals;
use crate::storage;
use crate::units::{Size, within};

/// The two devices, for messages.
const LOG: &str = "write-ahead log";
const STORE: &str = "store";

/// Bounds of a log. The ring of the smallest holds twice the window of the log, with some reserve
/// for headers.
const LOG_BOUNDS: RangeInclusive<Size> = Size::mib(160)..=Size::tib(16);

/// Bounds of a store. The smallest has 248 slots, of which 64 are kept free.
const STORE_BOUNDS: RangeInclusive<Size> = Size::mib(64)..=Size::tib(16);

/// Bounds of --entry-memory. A leader makes clients wait for followers that lack half of it. Half
/// of the least is the window of one client.
const ENTRY_BOUNDS: RangeInclusive<Size> = Size::mib(16)..=Size::tib(1);

/// Bounds of --overlay-memory. An op has up to 1 MiB of blocks.
const OVERLAY_BOUNDS: RangeInclusive<Size> = Size::mib(1)..=Size::tib(1);

/// Bounds of --install-rate, apart from 0.
const INSTALL_BOUNDS: RangeInclusive<Size> = Size::mib(1)..=Size::tib(1);

/// Serve volumes: one of the servers of a cluster, with a write-ahead log and a store of its own.
///
/// A new server formats its two devices, if they are empty, and registers itself. A volume needs
/// at least three servers. One of them hosts the coordination service (--coordination-file). Exit
/// codes: 0 stopped; 1 failed; 2 wrong usage; 3 the log or the store failed while serving. While
/// the coordination service cannot be reached, a start waits for it, and a running server goes on.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Host the coordination service at --coordination, with its data in this file, which is
    /// created if it does not exist. Exactly one server of a cluster hosts it, unless it is etcd.
    #[arg(long, value_name = "FILE")]
    coordination_file: Option<PathBuf>,
    /// Write-ahead log: a raw block device, or a file, of at least 160MiB. Nothing else may use it.
    #[arg(long, value_name = "PATH")]
    wal: PathBuf,
    /// Size of a write-ahead log that is a new file: 160MiB to 16TiB, a multiple of 4KiB.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "1GiB",
        value_parser = within(LOG_BOUNDS)
    )]
    wal_capacity: Size,
    /// Store of the blocks: a raw block device, or a file, of at least 64MiB; space beyond 16TiB is
    /// not used. Nothing else may use it.
    #[arg(long, value_name = "PATH")]
    store: PathBuf,
    /// Size of a store that is a new file: 64MiB to 16TiB, a multiple of 4KiB.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "10GiB",
        value_parser = within(STORE_BOUNDS)
    )]
    store_capacity: Size,
    /// Address for other servers and for gateways; port 0 selects a free one.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7420")]
    listen: Address,
    /// Address that other servers and gateways connect to. Default: the one of --listen.
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<HostPort>,
    /// Listen beyond loopback. There is no encryption and no authentication: every machine that
    /// reaches the ports can read and write all volumes.
    #[arg(long)]
    allow_plaintext_network: bool,
    /// When a write is answered.
    #[arg(long, value_enum, default_value_t = ApplyArg::Deferred)]
    apply: ApplyArg,
    /// Memory for entries that a slow replica may still need: 16MiB to 1TiB.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "128MiB",
        value_parser = within(ENTRY_BOUNDS)
    )]
    entry_memory: Size,
    /// Memory for blocks that are not written to the store yet: 1MiB to 1TiB. While it is full, ops
    /// wait.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "64MiB",
        value_parser = within(OVERLAY_BOUNDS)
    )]
    overlay_memory: Size,
    /// Bytes per second of the blocks that installs, which bring replicas up to date, bring to this
    /// server, and the same for those that they take from it: 1MiB to 1TiB, or 0 for no bound. What
    /// has changed during an install is sent without a bound.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "64MiB",
        value_parser = install_rate
    )]
    install_rate: Size,
    /// Address for metrics (/metrics, for Prometheus) and probes (/livez, /readyz, /healthz).
    /// Default: none.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<Address>,
    /// Log level, or a list of target=level.
    #[arg(long, env = "ALLUVIUM_LOG", value_name = "FILTER", default_value = "info")]
    log: String,
}

/// Parses --install-rate.
fn install_rate(text: &str) -> Result<Size, String> {
    match text.parse()? {
        size if size == Size::mib(0) || INSTALL_BOUNDS.contains(&size) => Ok(size),
        _ => Err(format!(
            "it must be 0, or from {} to {}",
            INSTALL_BOUNDS.start(),
            INSTALL_BOUNDS.end()
        )),
    }
}

/// When a write is answered.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ApplyArg {
    /// When a majority has it durably in its log; the store follows without a flush.
    Deferred,
    /// When it is durable in the leader's store, too: for disks whose flushes are cheap.
    Dsync,
}

impl ServeArgs {
    pub(super) fn log(&self) -> &str {
        &self.log
    }

    /// The address at which this process hosts the coordination service, if it does.
    fn hosted_at(&self) -> Result<Option<SocketAddr>, Failure> {
        if self.coordination_file.is_none() {
            return Ok(None);
        }
        let invalid = |reason| Failure::Usage(format!("--coordination: {reason}"));
        let Address(address) = self.cluster.host_address()?.parse().map_err(invalid)?;
        Ok(Some(address))
    }

    /// Checks that the ports are protected, or were opened to the network on request, and that
    /// others can connect.
    fn check_addresses(&self, hosted_at: Option<SocketAddr>) -> Result<(), Failure> {
        let Address(listen) = self.listen;
        let metrics = self.metrics_listen.map(|Address(address)| ("metrics-listen", address));
        let hosted = hosted_at.map(|address| ("coordination", address));
        for (option, address) in [Some(("listen", listen)), metrics, hosted].into_iter().flatten() {
            check_exposure(option, address, self.allow_plaintext_network)?;
        }
        match listen.ip().is_unspecified() && self.advertise.is_none() {
            false => Ok(()),
            true => Err(Failure::Usage(format!(
                "listen is {listen}, to which other servers cannot connect: set an address with \
                 --advertise HOST:PORT"
            ))),
        }
    }
}

/// Serves until a signal stops it, or the log or the store fails.
///
/// # Errors
/// Invalid options; a device or a port cannot be opened; the server does not open; its log or its
/// store failed while serving.
pub(super) fn run(args: ServeArgs) -> Result<(), Failure> {
    crate::open_files::raise_limit();
    let hosted_at = args.hosted_at()?;
    args.check_addresses(hosted_at)?;
    let runtime = serving_runtime()?;
    let health = Health::new();
    let admin = match args.metrics_listen {
        Some(Address(listen)) => Some(runtime.block_on(Admin::start(listen, health.clone()))?),
        None => None,
    };
    let [log, store] = open_devices(&args, &health)?;
    let served = runtime.block_on(serve(args, hosted_at, log, store, admin, &health));
    runtime.shutdown_background();
    served
}

/// Opens log and store. One that does not exist is created, unless the other one was in use.
fn open_devices(args: &ServeArgs, health: &Arc<Health>) -> Result<[SharedDevice; 2], Failure> {
    let open = |path: &Path, create: Option<Size>, writing, what| -> Result<_, Failure> {
        let create_bytes = create.map(|capacity| capacity.bytes);
        let options = OpenOptions { create_bytes, io_depth: 32, ..OpenOptions::default() };
        let device = storage::open_device(path, &options, writing, health)?;
        tracing::info!("{what}: {}", storage::describe(device.geometry()));
        Ok(device)
    };
    let [log, store] = [&args.wal, &args.store].map(|path| path.exists().then_some(path));
    let log = log.map(|path| open(path, None, "opening the log", LOG)).transpose()?;
    let store = store.map(|path| open(path, None, "opening the store", STORE)).transpose()?;
    let (wal_path, store_path) = (args.wal.display(), args.store.display());
    let [is_new_log, is_new_store] =
        check_devices(log.as_ref(), store.as_ref()).map_err(|error| {
            Failure::Failed(format!("--wal {wal_path} --store {store_path}: {error}"))
        })?;
    let log = match log {
        Some(log) => log,
        None => open(&args.wal, Some(args.wal_capacity), "writing the log", LOG)?,
    };
    let store = match store {
        Some(store) => store,
        None => open(&args.store, Some(args.store_capacity), "writing the store", STORE)?,
    };
    for (device, is_new, what, bounds) in
        [(&log, is_new_log, LOG, LOG_BOUNDS), (&store, is_new_store, STORE, STORE_BOUNDS)]
    {
        let Geometry { name, capacity_bytes, .. } = device.geometry();
        let size = Size { bytes: *capacity_bytes };
        let least = bounds.start();
        if is_new && size < *least {
            return Err(Failure::Failed(format!(
                "{name} has {size}, and a {what} needs at least {least}"
            )));
        }
    }
    Ok([log, store])
}

async fn serve(
    args: ServeArgs,
    hosted_at: Option<SocketAddr>,
    log: SharedDevice,
    store: SharedDevice,
    admin: Option<Admin>,
    health: &Arc<Health>,
) -> Result<(), Failure> {
    let Address(listen) = args.listen;
    let mut signals = Signals::install()?;
    let (service, host) = coordination(&args, hosted_at).await?;
    let failed = |error| Failure::Failed(format!("cannot listen on {listen} (--listen): {error}"));
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let options = ServeOptions {
        cluster: args.cluster.cluster.clone(),
        log,
        log_options: alluvium_wal::Options {
            max_record_bytes: RECORD_BYTES,
            ..alluvium_wal::Options::default()
        },
        store,
        apply: match args.apply {
            ApplyArg::Deferred => Apply::Deferred,
            ApplyArg::Dsync => Apply::Dsync,
        },
        entry_cache_bytes: args.entry_memory.in_memory(),
        overlay_bytes: args.overlay_memory.in_memory(),
        install_bytes_per_s: args.install_rate.bytes,
        limits: NetLimits::default(),
        advertised: match &args.advertise {
            Some(advertised) => advertised.to_string(),
            None => address.to_string(),
        },
    };
    let shown = health.clone();
    let mut meter = None;
    let step = move |what| {
        let meter = meter.insert(Meter::new(what));
        shown.progress(what, meter.callback())
    };
    let keys = args.cluster.keys()?;
    let opened = tokio::select! {
        opened = Server::open(options, service, keys, step) => Some(opened.map_err(Failure::new)?),
        name = signals.next() => {
            tracing::info!("{name}: stopping before the server is ready");
            health.stopping();
            None
        }
    };
    let ended = match opened {
        Some(server) => {
            run_server(server, (listener, address), admin.as_ref(), signals, health).await
        }
        None => {
            signals.end_on_second();
            Ok(())
        }
    };
    if let Some(host) = host {
        host.shutdown().await;
    }
    if let Some(admin) = admin {
        admin.shutdown().await;
    }
    match ended {
        Ok(()) => {
            tracing::info!("stopped");
            Ok(())
        }
        Err(error @ ServeError::Failed(_)) => Err(Failure::WalFailed(error.to_string())),
        Err(error) => Err(Failure::new(error)),
    }
}

/// Serves until a signal stops it, or the log or the store fails.
async fn run_server(
    server: Server,
    (listener, address): (TcpListener, SocketAddr),
    admin: Option<&Admin>,
    mut signals: Signals,
    health: &Arc<Health>,
) -> Result<(), ServeError> {
    if let Some(admin) = admin {
        let view = server.view();
        health.watch(move || condition(&view.lock()));
        let mut registry = Registry::default();
        registry.register_collector(Box::new(VolumeCollector::new(server.view())));
        admin.publish(registry);
    }
    health.serving();
    tracing::info!("volume server {} is ready: on {address}", server.id());
    let stop = server.stop_handle();
    let stopping = health.clone();
    tokio::spawn(async move {
        let name = signals.next().await;
        tracing::info!("{name}: stopping");
        stopping.stopping();
        signals.end_on_second();
        stop.stop();
    });
    server.run(listener).await
}

/// What probes learn of the server.
fn condition(view: &ServerView) -> Condition {
    let mut faults = Vec::new();
    if view.lost_replicas > 0 {
        let text = format!("replicas that are lost: {}", view.lost_replicas);
        faults.push(("replicas_lost", text));
    }
    if view.is_stalled {
        faults.push(("device_stalled", "a device has completed nothing for 2 s".to_owned()));
    }
    match faults.is_empty() {
        true => Condition::Ok,
        false => Condition::Degraded(faults),
    }
}

/// The coordination service: hosted by this process, or that of another one.
async fn coordination(
    args: &ServeArgs,
    hosted_at: Option<SocketAddr>,
) -> Result<(Arc<dyn Coordination>, Option<Host>), Failure> {
    let (Some(file), Some(address)) = (args.coordination_file.clone(), hosted_at) else {
        return Ok((args.cluster.service()?, None));
    };
    let opened = tokio::task::spawn_blocking(move || {
        RedbCoordination::open(&file, Limits::default(), Arc::new(SystemClock::default()))
    });
    let service = Arc::new(opened.await.map_err(Failure::new)?.map_err(Failure::new)?);
    let options = HostOptions {
        allow_plaintext_network: args.allow_plaintext_network,
        ..HostOptions::new(&args.cluster.cluster)
    };
    let host = Host::bind(address, service.clone(), options).await.map_err(Failure::new)?;
    Ok((service, Some(host)))
}
