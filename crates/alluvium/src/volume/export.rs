//! `alluvium volume export`: a volume as an NBD disk.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

use alluvium_nbd::{Exports, Listener, Options, Server};
use alluvium_volume::gateway::VolumeConfig;
use alluvium_volume::registry::RegistryError;
use alluvium_volume::{AttachOptions, Attached};
use clap::Args;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, UnixStream};
use uuid::Uuid;

use super::disk::VolumeDisk;
use super::export_metrics::Times;
use super::{ClusterArgs, check_exposure, export_metrics, serving_runtime};
use crate::address::Address;
use crate::admin::{Admin, Health};
use crate::output::Failure;
use crate::serve::Signals;
use crate::units::{Size, Span};
use crate::unix_socket;

/// Attach a volume and serve it over NBD, until a signal stops it. If another process takes the
/// volume, requests fail.
///
/// An answered write is durable on a majority of the servers, so FLUSH and FUA cost nothing. After
/// a restart of this process clients that reconnect go on without an error.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    /// Name of the volume. It is also the name of the export, and the default export.
    name: String,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Unix socket for NBD clients; an old socket there is replaced.
    #[arg(long, value_name = "PATH", required_unless_present = "listen")]
    socket: Option<PathBuf>,
    /// TCP address for NBD clients.
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<Address>,
    /// Listen beyond loopback. There is no encryption and no authentication: every machine that
    /// reaches the port of --listen can read and write the volume.
    #[arg(long)]
    allow_plaintext_network: bool,
    /// Take the volume from a process that has it attached and is alive. Its next write fails.
    #[arg(long)]
    take: bool,
    /// Time after which a request fails. Default: requests wait until a majority answers.
    #[arg(long, value_name = "TIME")]
    io_timeout: Option<Span>,
    /// Memory for requests that are not answered yet.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: Size,
    /// Address for metrics (/metrics, for Prometheus) and probes (/livez, /readyz, /healthz).
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<Address>,
    /// Log level, or a list of target=level.
    #[arg(long, env = "ALLUVIUM_LOG", value_name = "FILTER", default_value = "info")]
    log: String,
}

impl ExportArgs {
    pub(super) fn log(&self) -> &str {
        &self.log
    }
}

/// Serves until a signal stops it.
///
/// # Errors
/// The volume cannot be attached; a socket cannot be opened.
pub(super) fn run(args: ExportArgs) -> Result<(), Failure> {
    crate::open_files::raise_limit();
    let runtime = serving_runtime()?;
    let served = runtime.block_on(export(args));
    runtime.shutdown_background();
    served
}

async fn export(args: ExportArgs) -> Result<(), Failure> {
    let mut signals = Signals::install()?;
    let (listeners, addresses) = listen(&args).await?;
    let health = Health::new();
    let admin = match args.metrics_listen {
        Some(Address(address)) => {
            check_exposure("metrics-listen", address, args.allow_plaintext_network)?;
            Some(Admin::start(address, health.clone()).await?)
        }
        None => None,
    };
    let cluster = args.cluster.connect()?;
    let (id, _) = cluster.registry().volume_by_name(&args.name).await.map_err(Failure::new)?;
    let options = AttachOptions {
        owner: Uuid::new_v4(),
        address: addresses[0].clone(),
        take: args.take,
        config: VolumeConfig {
            io_timeout: args.io_timeout.map(|Span(time)| time),
            memory_bytes: args.memory.bytes,
            seed: u64::from(std::process::id()),
        },
    };
    let attached = tokio::select! {
        attached = cluster.attach(id, options) => attached.map_err(Failure::new)?,
        name = signals.next() => {
            return Err(Failure::Failed(format!("{name} before the volume was attached")));
        }
    };
    let attached = Arc::new(attached);
    let times = Arc::new(Times::new());
    let disk = VolumeDisk::new(attached.clone(), times.clone());
    let exports = Arc::new(Exports::default());
    exports.add(&args.name, "an Alluvium volume", Arc::new(disk)).map_err(Failure::new)?;
    exports.set_default(Some(&args.name));
    let server = Server::new(exports, Options::default());
    if let Some(admin) = &admin {
        let mut registry = Registry::default();
        export_metrics::register(&mut registry, server.counters().clone(), &attached, &times);
        admin.publish(registry);
    }
    health.serving();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut serving = tokio::task::JoinSet::new();
    for listener in listeners {
        let (server, mut stopped) = (server.clone(), stopped.clone());
        serving.spawn(async move {
            let shutdown = async move { drop(stopped.wait_for(|stopped| *stopped).await) };
            server.serve(listener, shutdown).await;
        });
    }
    tracing::info!(
        "volume {} is exported: {} bytes, epoch {}, at {}",
        args.name,
        attached.volume.size(),
        attached.value.epoch,
        addresses.join(" and ")
    );
    tokio::select! {
        name = signals.next() => tracing::info!("{name}: stopping"),
        () = keep_registered(&attached, &health) => {}
    }
    signals.end_on_second();
    health.stopping();
    stop.send_replace(true);
    while serving.join_next().await.is_some() {}
    if let Some(path) = &args.socket {
        // The next start replaces it anyway.
        drop(std::fs::remove_file(path));
    }
    drop(server);
    match Arc::try_unwrap(attached) {
        Ok(attached) => match attached.detach().await {
            Ok(()) | Err(RegistryError::Fenced { .. }) => {}
            Err(error) => {
                tracing::warn!("the registry still has the volume as attached: {error}");
            }
        },
        Err(_) => tracing::warn!("requests are still in flight; the attachment ends by itself"),
    }
    if let Some(admin) = admin {
        admin.shutdown().await;
    }
    tracing::info!("stopped");
    Ok(())
}

/// Keeps the volume registered as attached. If that is refused, requests fail from now on, but
/// clients may read the reason of their errors: the process goes on.
async fn keep_registered(attached: &Attached, health: &Health) {
    let refused = attached.keep_registered().await;
    tracing::error!("the volume is not attached any more: {refused}");
    health.stopping();
    std::future::pending::<()>().await;
}

/// Opens the socket and the port. Returns at least one listener, and the address of each.
async fn listen(args: &ExportArgs) -> Result<(Vec<Listener>, Vec<String>), Failure> {
    let (mut listeners, mut addresses) = (Vec::new(), Vec::new());
    if let Some(path) = &args.socket {
        let is_served = match UnixStream::connect(path).await {
            Ok(_) => true,
            // The queue of connections that are not accepted yet is full.
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        let bound = match is_served {
            true => Err(io::Error::other("the socket is in use")),
            false => unix_socket::bind(path),
        };
        let failed = |error| Failure::Failed(format!("{}: {error}", path.display()));
        listeners.push(bound.map_err(failed)?.into());
        addresses.push(path.display().to_string());
    }
    if let Some(Address(address)) = args.listen {
        check_exposure("listen", address, args.allow_plaintext_network)?;
        let failed =
            |error| Failure::Failed(format!("cannot listen on {address} (--listen): {error}"));
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        addresses.push(listener.local_addr().map_err(failed)?.to_string());
        listeners.push(listener.into());
    }
    Ok((listeners, addresses))
}
