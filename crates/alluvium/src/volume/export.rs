//! `alluvium volume export`: a volume as an NBD disk.

use std::io::{self, ErrorKind};
use std::ops::RangeInclusive;
use std::path::{self, Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use alluvium_nbd::{Exports, Listener, Options, Server};
use alluvium_volume::gateway::{Trouble, VolumeConfig};
use alluvium_volume::registry::RegistryError;
use alluvium_volume::{AttachError, AttachOptions, Attached};
use clap::{ArgGroup, Args};
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, UnixStream};
use uuid::Uuid;

use super::disk::VolumeDisk;
use super::export_metrics::Times;
use super::{ClusterArgs, attached_by, check_exposure, export_metrics, serving_runtime};
use crate::address::Address;
use crate::admin::{Admin, Condition, Health};
use crate::output::Failure;
use crate::serve::Signals;
use crate::units::{Size, Span, within};
use crate::unix_socket;

/// Bounds of the memory for requests. A request has at most 1 MiB.
const MEMORY: RangeInclusive<Size> = Size::mib(1)..=Size::gib(4);
/// Bounds of the I/O timeout. A leader that hangs is replaced within 3 s, or within 4 s if only the
/// device of its log hangs.
const IO_TIMEOUT: RangeInclusive<Span> =
    Span(Duration::from_secs(1))..=Span(Duration::from_secs(24 * 3600));

/// Attach a volume and serve it over NBD, until a signal stops it. If another process takes the
/// volume, requests fail.
///
/// An answered write is durable on a majority of the servers, so FLUSH and FUA cost nothing. After
/// a restart of this process clients that reconnect go on without an error. At least one of
/// --socket and --listen is required.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("address").required(true).multiple(true))]
pub(crate) struct ExportArgs {
    /// Name of the volume. It is also the name of the export, and the default export.
    name: String,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Unix socket for NBD clients. A socket there that no process serves is replaced.
    #[arg(long, value_name = "PATH", group = "address")]
    socket: Option<PathBuf>,
    /// TCP address for NBD clients; port 0 selects a free one.
    #[arg(long, value_name = "ADDR:PORT", group = "address")]
    listen: Option<Address>,
    /// Listen beyond loopback. There is no encryption and no authentication: every machine that
    /// reaches the port of --listen can read and write the volume.
    #[arg(long)]
    allow_plaintext_network: bool,
    /// Take the volume from a process that has it attached and is alive. Its next write fails.
    #[arg(long)]
    take: bool,
    /// Time after which a request fails, and the attachment at the start: 1s to 24h. Default:
    /// they wait until a majority answers.
    #[arg(long, value_name = "TIME", value_parser = within(IO_TIMEOUT))]
    io_timeout: Option<Span>,
    /// Memory for requests that are not answered yet: 1MiB to 4GiB.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "256MiB",
        value_parser = within(MEMORY)
    )]
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
    let Listening { listeners, addresses, socket } = listen(&args).await?;
    let health = Health::new();
    health.begin("attaching the volume");
    let trouble = Arc::new(Trouble::new(&args.name));
    let ended = Arc::new(OnceLock::new());
    let (of_volume, of_attachment) = (trouble.clone(), ended.clone());
    health.watch(move || condition(&of_volume, of_attachment.get()));
    let admin = match args.metrics_listen {
        Some(Address(address)) => {
            check_exposure("metrics-listen", address, args.allow_plaintext_network)?;
            Some(Admin::start(address, health.clone()).await?)
        }
        None => None,
    };
    let cluster = args.cluster.connect()?;
    let registry = cluster.registry();
    let (id, _) = tokio::select! {
        found = registry.volume_by_name(&args.name) => found.map_err(Failure::new)?,
        name = signals.next() => return stopped_early(name),
    };
    let options = AttachOptions {
        owner: Uuid::new_v4(),
        address: attached_by(&addresses[0]),
        take: args.take,
        config: VolumeConfig {
            io_timeout: args.io_timeout.map(|Span(time)| time),
            memory_bytes: args.memory.bytes,
            seed: u64::from(std::process::id()),
        },
        trouble,
    };
    let mut stopped_by = "";
    let stop = async { stopped_by = signals.next().await };
    let attached = match cluster.attach(id, options, stop).await {
        Ok(attached) => Arc::new(attached),
        Err(AttachError::Stopped) => return stopped_early(stopped_by),
        Err(error) => return Err(Failure::new(error)),
    };
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
        () = keep_registered(&attached, &ended) => {}
    }
    signals.end_on_second();
    health.stopping();
    // Before the listener closes: after that, the file may be the socket of another process.
    drop(socket);
    stop.send_replace(true);
    while serving.join_next().await.is_some() {}
    drop(server);
    match Arc::try_unwrap(attached) {
        Ok(attached) => match attached.detach().await {
            Ok(()) | Err(RegistryError::Fenced { .. }) => {}
            Err(error) => {
                tracing::warn!("the attachment could not be removed, and ends by itself: {error}");
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

/// Keeps the volume registered as attached, until that is refused or a server refuses the
/// attachment. Requests fail from then on, but clients may read the reason of their errors: the
/// process goes on.
async fn keep_registered(attached: &Attached, ended: &OnceLock<String>) {
    let reason = tokio::select! {
        refused = attached.keep_registered() => refused.to_string(),
        failure = attached.volume.ended() => failure.to_string(),
    };
    let text = format!("the volume is no longer attached: {reason}");
    let text = ended.get_or_init(|| text);
    tracing::error!("{text}");
    std::future::pending::<()>().await;
}

/// Ends a start that a signal has stopped.
fn stopped_early(name: &str) -> Result<(), Failure> {
    tracing::info!("{name}: stopped before the volume was attached");
    Ok(())
}

/// What probes learn of the volume.
fn condition(trouble: &Trouble, ended: Option<&String>) -> Condition {
    match (ended.cloned().or_else(|| trouble.stuck()), trouble.full()) {
        (Some(reason), _) => Condition::Unready(reason),
        (None, Some(text)) => Condition::Degraded(vec![("no_space", text)]),
        (None, None) => Condition::Ok,
    }
}

/// Bytes of a socket's path: `sun_path` of Linux has 108, of which one ends the path.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The file of a Unix socket, which is removed when it is dropped.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The next start replaces it anyway.
        drop(std::fs::remove_file(&self.0));
    }
}

/// Where NBD clients are served.
struct Listening {
    /// At least one.
    listeners: Vec<Listener>,
    /// The address of each.
    addresses: Vec<String>,
    socket: Option<SocketFile>,
}

/// Checks that the kernel takes a path for a socket (`unix(7)`).
fn check_socket_path(path: &Path) -> Result<(), Failure> {
    match std::os::unix::net::SocketAddr::from_pathname(path) {
        Ok(_) => Ok(()),
        Err(_) => Err(Failure::Usage(format!(
            "--socket {}: the path of a socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes",
            path.display()
        ))),
    }
}

/// Opens the socket and the port.
async fn listen(args: &ExportArgs) -> Result<Listening, Failure> {
    let (mut listeners, mut addresses, mut socket) = (Vec::new(), Vec::new(), None);
    if let Some(path) = &args.socket {
        let failed = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
        check_socket_path(path)?;
        let is_served = match UnixStream::connect(path).await.map_err(|error| error.kind()) {
            // The second one: the queue of connections that are not accepted yet is full.
            Ok(_) | Err(ErrorKind::WouldBlock) => true,
            Err(ErrorKind::NotFound | ErrorKind::ConnectionRefused) => false,
            Err(kind) => return Err(failed(kind.into())),
        };
        if is_served {
            return Err(Failure::Failed(format!(
                "{}: another process serves this socket; stop it, or use another path",
                path.display()
            )));
        }
        listeners.push(unix_socket::bind(path).map_err(failed)?.into());
        socket = Some(SocketFile(path.clone()));
        addresses.push(path::absolute(path).map_err(failed)?.display().to_string());
    }
    if let Some(Address(address)) = args.listen {
        check_exposure("listen", address, args.allow_plaintext_network)?;
        let failed =
            |error| Failure::Failed(format!("cannot listen on {address} (--listen): {error}"));
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        addresses.push(listener.local_addr().map_err(failed)?.to_string());
        listeners.push(listener.into());
    }
    Ok(Listening { listeners, addresses, socket })
}
