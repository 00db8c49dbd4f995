//! `alluvium volume export`: a volume as an NBD disk.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use alluvium_nbd::{Exports, Listener, Options, Server};
use alluvium_volume::gateway::VolumeConfig;
use alluvium_volume::{AttachOptions, Attached};
use clap::Args;
use tokio::net::{TcpListener, UnixListener};
use uuid::Uuid;

use super::disk::VolumeDisk;
use super::{ClusterArgs, runtime};
use crate::address::Address;
use crate::output::Failure;
use crate::serve::Signals;
use crate::units::{Size, Span};

/// Attach a volume and serve it over NBD, until a signal stops it or another process takes the
/// volume.
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
    /// reaches the port can read and write the volume.
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
    /// Log level, or a list of target=level.
    #[arg(long, env = "ALLUVIUM_LOG", value_name = "FILTER", default_value = "info")]
    log: String,
}

impl ExportArgs {
    pub(super) fn log(&self) -> &str {
        &self.log
    }
}

/// Serves until a signal stops it, or another process takes the volume.
///
/// # Errors
/// The volume cannot be attached; a socket cannot be opened.
pub(super) fn run(args: ExportArgs) -> Result<(), Failure> {
    let runtime = runtime()?;
    let served = runtime.block_on(export(args));
    runtime.shutdown_background();
    served
}

async fn export(args: ExportArgs) -> Result<(), Failure> {
    let mut signals = Signals::install()?;
    let listeners = listen(&args).await?;
    let address = match (&args.socket, args.listen) {
        (Some(path), _) => path.display().to_string(),
        (None, Some(Address(address))) => address.to_string(),
        (None, None) => unreachable!("one of them is required"),
    };
    let cluster = args.cluster.connect()?;
    let (id, _) = cluster.registry().volume_by_name(&args.name).await.map_err(Failure::new)?;
    let options = AttachOptions {
        owner: Uuid::new_v4(),
        address,
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
    let exports = Arc::new(Exports::default());
    exports
        .add(&args.name, "an Alluvium volume", Arc::new(VolumeDisk::new(attached.clone())))
        .map_err(Failure::new)?;
    exports.set_default(Some(&args.name));
    let server = Server::new(exports, Options::default());
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
        "volume {} is exported: {} bytes, epoch {}",
        args.name,
        attached.volume.size(),
        attached.value.epoch
    );
    tokio::select! {
        name = signals.next() => tracing::info!("{name}: stopping"),
        () = lease_watch(&attached) => {}
    }
    signals.end_on_second();
    stop.send_replace(true);
    while serving.join_next().await.is_some() {}
    if let Some(path) = &args.socket {
        // The next start replaces it anyway.
        drop(std::fs::remove_file(path));
    }
    drop(server);
    match Arc::try_unwrap(attached) {
        Ok(attached) => {
            if let Err(error) = attached.detach().await {
                tracing::warn!("the registry still has the volume as attached: {error}");
            }
        }
        Err(_) => tracing::warn!("requests are still in flight; the attachment ends by itself"),
    }
    tracing::info!("stopped");
    Ok(())
}

/// Reports a lost lease, and goes on: only another attachment ends this one.
async fn lease_watch(attached: &Attached) {
    attached.lease_lost().await;
    tracing::warn!(
        "the registry has not heard from this process: another one may attach the volume now"
    );
    std::future::pending::<()>().await;
}

async fn listen(args: &ExportArgs) -> Result<Vec<Listener>, Failure> {
    let mut listeners = Vec::new();
    if let Some(path) = &args.socket {
        // A socket that a process has left behind. One that is served answers.
        if path.exists() {
            let probe = tokio::net::UnixStream::connect(path);
            if tokio::time::timeout(Duration::from_secs(1), probe).await.is_ok_and(|it| it.is_ok())
            {
                return Err(Failure::Failed(format!("{} is in use", path.display())));
            }
            std::fs::remove_file(path)
                .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?;
        }
        let listener = UnixListener::bind(path)
            .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?;
        listeners.push(Listener::Unix(listener));
    }
    if let Some(Address(address)) = args.listen {
        if !alluvium_volume::serve::may_listen(address, args.allow_plaintext_network) {
            return Err(Failure::Usage(format!(
                "listen is {address}, which is reachable from the network, and plain NBD has no \
                 encryption: use a loopback address or --socket, or give \
                 --allow-plaintext-network if every machine that reaches it is trusted"
            )));
        }
        let listener = TcpListener::bind(address)
            .await
            .map_err(|error| Failure::Failed(format!("cannot listen on {address}: {error}")))?;
        listeners.push(Listener::Tcp(listener));
    }
    Ok(listeners)
}
