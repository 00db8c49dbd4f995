//! `alluvium serve`: starts the layers in order, waits for the end, and stops them in reverse
//! order.

mod read_only;

use std::collections::HashMap;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_broker::groups::GroupConfig;
use alluvium_broker::{
    Broker, BrokerConfig, BrokerFold, ListenerConfig, SecurityConfig, StartError,
};
use alluvium_device::SharedDevice;
use alluvium_stream::{Gap, GapCause, Opened, Recovery, Store, StoreError, StreamId, migrate};
use prometheus_client::registry::Registry;
use rustix::fs::Mode;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::address::HostPort;
use crate::admin::{self, Admin, Condition, Health};
use crate::config::{ServeConfig, ServeOptions};
use crate::control::Socket;
use crate::jwks;
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::storage::{Storage, prepare, wait_for};
use crate::units::{Size, Span, about, counted};

/// Exit code after a second signal, which ends the process before a graceful stop is complete.
const STOPPED_AT_ONCE: i32 = 130;

/// Approximate number of open files other than connections: the log, the catalog, the runtime and
/// the ports, objects, and requests to the object store.
const OTHER_FILES: u64 = 100;

/// Time that the end of a server waits for tasks that it does not need.
const LAST_TASKS: Duration = Duration::from_secs(5);

/// A second signal that arrives earlier is the first one delivered twice: a supervisor signals a
/// process and its group, and a terminal signals the group, whose parent may forward it. A user
/// takes longer to repeat a signal.
const REPEATED_SIGNAL: Duration = Duration::from_secs(1);

/// Runs the server until a signal stops it or its write-ahead log fails.
///
/// # Errors
/// The configuration is invalid; a part cannot be opened; the write-ahead log failed while serving.
pub(crate) fn run(options: ServeOptions) -> Result<(), Failure> {
    let log = output::start_log_queue()?;
    let config = ServeConfig::load(options).map_err(|error| Failure::Usage(error.to_string()))?;
    output::start_server_logging(log, &config.log)?;
    // Files that are created from here on, such as records and password hashes, are accessible to
    // the server's user only.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let data = match config.read_only {
        None => config.data_dir.display().to_string(),
        Some(_) => format!("{}, read-only", config.object_store),
    };
    tracing::info!(
        "alluvium {}, node {}, data in {data}",
        env!("CARGO_PKG_VERSION"),
        config.node_id
    );
    tracing::debug!("configuration: {config}");
    let runtime = runtime(None)?;
    // Before anything that may take long: otherwise a supervisor treats a starting server as a dead
    // one.
    let health = Health::new();
    let admin = match config.admin_listen {
        Some(listen) => Some(runtime.block_on(Admin::start(listen, health.clone()))?),
        None => None,
    };
    check_ports(&config)?;
    raise_file_limit(&config);
    let served = match &config.read_only {
        Some(of) => runtime.block_on(async {
            let store = read_only::open(&config, of, &health).await?;
            serve_store(&config, Serving { store, device: None }, admin, &health).await
        }),
        None => {
            // On this thread, on which the runtime runs nothing. Up to here a signal ends the
            // process at once, which is harmless at any moment.
            let storage = Storage::open(&config, &health)?;
            tracing::info!(
                "objects: {}, uploaded at {} or after {}",
                config.object_store,
                Size { bytes: storage.options.upload_bytes },
                config.upload_interval
            );
            runtime.block_on(serve(&config, storage, admin, &health))
        }
    };
    // The remaining tasks, such as extending a file, may be interrupted.
    runtime.shutdown_timeout(LAST_TASKS);
    served
}

/// Starts a runtime with this number of workers, or one for each processor.
///
/// # Errors
/// The system has no threads or descriptors left.
pub(crate) fn runtime(workers: Option<usize>) -> Result<Runtime, Failure> {
    let mut builder = Builder::new_multi_thread();
    if let Some(workers) = workers {
        builder.worker_threads(workers);
    }
    let failed = |error| Failure::Failed(format!("cannot start the runtime: {error}"));
    builder.enable_all().build().map_err(failed)
}

/// Recovers the store that this server writes, and serves it.
async fn serve(
    config: &ServeConfig,
    storage: Storage,
    admin: Option<Admin>,
    health: &Arc<Health>,
) -> Result<(), Failure> {
    let device = storage.device.clone();
    let (Opened { store, recovery }, _lock) = recover(config, storage, health).await?;
    if !recovery.gaps.is_empty() {
        let meta = store.meta("");
        let meta = meta.iter().map(|(key, value)| (key.as_str(), value.as_slice()));
        for lost in losses(&recovery, &alluvium_broker::stream_names(meta)) {
            tracing::error!("{lost}");
        }
    }
    tracing::info!("{}", summary(&recovery));
    tracing::debug!("recovered {recovery}");
    let largest = Size { bytes: store.max_batch_bytes() };
    if config.max_message_size > largest {
        return Err(Failure::Usage(format!(
            "max-message-size is {}, but with this log cache and write-ahead log the largest \
             record batch is {largest}",
            config.max_message_size
        )));
    }
    serve_store(config, Serving { store, device: Some(device) }, admin, health).await
}

/// An open store.
struct Serving {
    store: Store,
    /// The device of its log, if this server writes it.
    device: Option<SharedDevice>,
}

/// Serves a store until a signal or a failure of the store ends that.
async fn serve_store(
    config: &ServeConfig,
    Serving { store, device }: Serving,
    admin: Option<Admin>,
    health: &Arc<Health>,
) -> Result<(), Failure> {
    let mut signals = Signals::install()?;
    let watched = store.clone();
    health.watch(move || Condition::of_store(&watched));
    let followed = store.clone();
    health.note(move || followed.following().map(|of| read_only::describe(&of)));
    health.begin("opening the partitions");
    let mut registry = Registry::default();
    admin::register(&mut registry, store.clone());
    let socket = device.and_then(|device| Some((Socket::open(config)?, device)));
    let broker = Broker::start(broker_config(config), store.clone(), &mut registry)
        .await
        .map_err(|error| not_started(error, config))?;
    if let Some(admin) = &admin {
        admin.publish(registry);
    }
    let control =
        socket.map(|(socket, device)| socket.answer(config, device, store.clone(), broker.users()));
    let kafka: Vec<_> = broker.listeners().map(|(listener, addr)| at(listener, addr)).collect();
    let admin_at = admin.as_ref().map_or_else(
        || "no admin port".to_string(),
        |admin| format!("metrics on http://{}/metrics", admin.local_addr()),
    );
    health.serving();
    tracing::info!("alluvium is ready: kafka on {}, {admin_at}", kafka.join(" and "));

    let failure = tokio::select! {
        name = signals.next() => {
            tracing::info!(
                "{name}: stopping; a further signal after at least one second ends the process \
                 at once"
            );
            None
        }
        cause = store.failed() => {
            match store.is_followed() {
                true => tracing::error!("the server stops: {cause}"),
                false => {
                    tracing::error!("the write-ahead log has failed, the server stops: {cause}");
                }
            }
            Some(cause.to_string())
        }
    };
    health.stopping();
    signals.end_on_second();
    // Requests in flight are answered, with errors if the store has failed.
    broker.shutdown().await;
    if let Some(control) = &control {
        control.stop();
    }
    let ended = match failure {
        None => {
            let closed = store.close().await.map_err(Failure::new);
            if closed.is_ok() {
                if let Some(control) = control {
                    control.closed().await;
                }
                match config.read_only {
                    Some(_) => tracing::info!("stopped"),
                    None => tracing::info!("stopped; the write-ahead log is closed"),
                }
            }
            closed
        }
        // After a failed write only reopening shows what a device or a catalog contains. There is
        // nothing to close.
        Some(cause) if config.read_only.is_none() => Err(Failure::WalFailed(cause)),
        Some(cause) => Err(Failure::Failed(cause)),
    };
    if let Some(admin) = admin {
        admin.shutdown().await;
    }
    ended
}

/// Explains why the broker could not start, with advice if it cannot read its stored state.
fn not_started(error: StartError, config: &ServeConfig) -> Failure {
    use StartError as E;
    let of = match config.read_only {
        None => format!("data directory {}", config.data_dir.display()),
        Some(_) => format!("object store {}", config.object_store),
    };
    match error {
        E::Config(error) => Failure::Usage(error.to_string()),
        // All of it has passed its checksums.
        E::Metadata(_) | E::Groups(_) | E::Transactions(_) | E::Users(_) | E::Acls(_) => {
            Failure::Failed(format!("{of}: {error}. If a newer alluvium wrote this, use that one"))
        }
        other => Failure::new(other),
    }
}

/// Recovers the store, and keeps the lock of the data directory.
async fn recover(
    config: &ServeConfig,
    storage: Storage,
    health: &Arc<Health>,
) -> Result<(Opened, File), Failure> {
    let Storage { device, wal_options, objects, options, wal_id, lock } = storage;
    prepare(config, &objects, wal_id, health).await?;
    health.begin("opening the catalog");
    let node_id = config.node_id;
    let migrated = loop {
        match migrate(&objects, &device, &config.data_dir, node_id, &options).await {
            Err(error) if error.is_temporary() => wait_for(config, &error).await,
            migrated => break migrated.map_err(Failure::new)?,
        }
    };
    if let Some(file) = migrated {
        tracing::info!(
            "the catalog was moved to the object store; {} is not needed any more",
            file.display()
        );
    }
    let meter = Meter::new(format!("recovering {}", config.wal.display()));
    let progress = Some(health.later("recovering", meter.callback()));
    let fold = Arc::new(BrokerFold);
    let opened = Store::open(device, wal_options, objects, fold, options, progress).await;
    let opened = opened.map_err(|error| {
        let (wal, url) = (config.wal.display(), &config.object_store);
        let advice = match &error {
            StoreError::NoCatalog { .. } => {
                format!(
                    ". If the object store has lost it: `alluvium rebuild --from-objects --dry-run \
                     --wal {wal}` shows what is left. To discard the records of the log: `alluvium \
                     wal format --force {wal}`, and remove the file wal-id in the data directory"
                )
            }
            StoreError::Object(error) if error.is_loss() => {
                format!(
                    ". Restore that object from a copy of the object store, or put the catalog \
                     together from what is left: `alluvium rebuild --from-objects --dry-run --wal \
                     {wal}` shows what is lost"
                )
            }
            StoreError::OldCatalog { .. } => format!(
                ". If there is no newer copy of the object store: `alluvium rebuild \
                 --from-objects --dry-run --wal {wal}` shows what is lost"
            ),
            _ => String::new(),
        };
        Failure::Failed(format!("write-ahead log {wal}, object store {url}: {error}{advice}"))
    })?;
    Ok((opened, lock))
}

/// Number of lost ranges that are logged individually; further ones are counted.
const NAMED_LOSSES: usize = 1000;

/// Describes the offsets that recovery found lost, by topic and partition.
fn losses(recovery: &Recovery, names: &HashMap<StreamId, String>) -> Vec<String> {
    let mut lines = Vec::new();
    let log = match recovery.declared_gaps {
        0 => "the write-ahead log is damaged",
        _ => "a rebuild has stated it, or the write-ahead log is damaged",
    };
    for Gap { stream, offsets, cause } in recovery.gaps.iter().take(NAMED_LOSSES) {
        let name = names.get(stream).cloned().unwrap_or_else(|| format!("stream {stream}"));
        let (start, last) = (offsets.start, offsets.end.0 - 1);
        lines.push(match cause {
            GapCause::Lost => {
                format!("offsets {start} to {last} of {name} are lost: {log}; readers skip them")
            }
            GapCause::Skipped => format!(
                "offsets {start} to {last} of {name} are skipped: {log}, and at most this many \
                 records may be lost; readers skip them"
            ),
        });
    }
    let unnamed = recovery.gaps.len().saturating_sub(NAMED_LOSSES);
    if unnamed > 0 {
        let ranges = counted(unnamed as u64, "more range", "more ranges");
        lines.push(format!("{ranges} of lost or skipped offsets"));
    }
    lines
}

/// Summarizes recovery in one line, without values that are as expected. Losses are logged before
/// it.
fn summary(recovery: &Recovery) -> String {
    let Recovery { wal, batches, payload_bytes, .. } = recovery;
    let of_batches = |n: u64| counted(n, "batch", "batches");
    let ended = match (wal.epoch, wal.clean_shutdown) {
        (..=1, _) => "of a new log",
        (_, true) => "after a clean shutdown",
        (_, false) => "after an unclean shutdown",
    };
    let mut text = format!("recovered in {:.3} s {ended}: ", recovery.elapsed.as_secs_f64());
    text += &match batches {
        0 => "nothing to upload".into(),
        n => format!("{} ({}) to upload", of_batches(*n), about(*payload_bytes)),
    };
    for (n, what) in [
        (recovery.skipped_uploaded, "uploaded before"),
        (recovery.skipped_deleted, "of deleted topics"),
    ] {
        if n > 0 {
            text += &format!(", {} {what}", of_batches(n));
        }
    }
    if wal.dropped_records > 0 {
        let dropped = counted(wal.dropped_records, "record", "records");
        text += &format!("; {dropped} after the end of the log dropped: never acknowledged");
    }
    for (cause, what) in [(GapCause::Lost, "LOST"), (GapCause::Skipped, "SKIPPED")] {
        let gaps = recovery.gaps.iter().filter(|gap| gap.cause == cause).count();
        if gaps > 0 {
            text += &format!("; {} of offsets {what}", counted(gaps as u64, "range", "ranges"));
        }
    }
    if recovery.missing_end.is_some() {
        text += "; the end of the log LOST";
    }
    text
}

/// Checks that no client port is in use, before a log is written and recovered in vain. The ports
/// are opened when there is something to serve; if one is taken in between, the start fails then.
fn check_ports(config: &ServeConfig) -> Result<(), Failure> {
    for address in config.security.listeners.iter().map(|listener| listener.listen) {
        TcpListener::bind(address).map_err(|error| {
            Failure::Failed(format!("cannot listen on kafka port {address}: {error}"))
        })?;
    }
    Ok(())
}

/// Raises the limit of open files as far as the system allows: each connection, each journal of the
/// disk cache and each object in use is one. The usual soft limit (1,024) is below the default
/// limit on connections, and a process without free descriptors neither accepts clients nor reads
/// and writes objects.
fn raise_file_limit(config: &ServeConfig) {
    let connections = config.max_connections;
    match crate::open_files::raise_limit() {
        Some(files) if files < u64::from(connections) + OTHER_FILES => tracing::warn!(
            "max-connections is {connections}, but this process may open only {files} files, and \
             not all of them are connections: raise the limit (ulimit -n, LimitNOFILE), otherwise \
             some clients are not accepted and objects cannot be read or written"
        ),
        _ => {}
    }
}

fn broker_config(config: &ServeConfig) -> BrokerConfig {
    BrokerConfig {
        listeners: config.security.listeners.clone(),
        security: SecurityConfig {
            session_lifetime: config.security.session_lifetime.map(|Span(lifetime)| lifetime),
            oauth: config.security.oauth.as_ref().map(jwks::broker_config),
            authorization: config.security.authorization.clone(),
        },
        node_id: i32::try_from(config.node_id).expect("the configuration was checked"),
        cluster_id: config.cluster_id.clone(),
        auto_create_topics: config.auto_create_topics,
        default_partitions: config.default_partitions,
        max_message_bytes: u32::try_from(config.max_message_size.bytes)
            .expect("the configuration was checked"),
        max_connections: config.max_connections,
        max_connections_of_address: config.max_connections_per_ip.unwrap_or(i32::MAX as u32),
        max_connections_overrides: config.max_connections_per_ip_overrides.0.clone(),
        idle_timeout: config.idle_timeout.0,
        queued_request_bytes: config.queued_request_memory.bytes,
        log_compaction_check_interval: config.log_compaction_interval.0,
        rack: config.rack.clone(),
        transaction_max_timeout: config.transaction_max_timeout.0,
        transactional_id_expiration: config.transactional_id_expiration.0,
        groups: GroupConfig {
            initial_rebalance_delay: config.group_initial_rebalance_delay.0,
            min_session_timeout: config.group_min_session_timeout.0,
            max_session_timeout: config.group_max_session_timeout.0,
            max_offset_metadata_bytes: usize::try_from(config.offset_metadata_max_size.bytes)
                .expect("the configuration was checked"),
            offsets_retention: config.offsets_retention.0,
            sweep_interval: config.offsets_retention_check_interval.0,
            max_group_members: config.group_max_size as usize,
            consumer: config.group_times.consumer.clone(),
            share: config.group_times.share.clone(),
            ..GroupConfig::default()
        },
        ..BrokerConfig::default()
    }
}

/// Describes a listener's address for the log.
fn at(listener: &ListenerConfig, addr: SocketAddr) -> String {
    let mut notes = Vec::new();
    if listener.protocol() != "PLAINTEXT" {
        notes.push(format!("{}, {}", listener.name, listener.protocol()));
    }
    if let Some(host) = &listener.advertised_host {
        let port = listener.advertised_port.unwrap_or(addr.port());
        notes.push(format!("advertised as {}", HostPort { host: host.clone(), port }));
    }
    match notes.is_empty() {
        true => addr.to_string(),
        false => format!("{addr} ({})", notes.join(", ")),
    }
}

/// Whether a signal that arrives this long after a stop began is a second request to stop.
fn is_second_request(since_begin: Duration) -> bool {
    since_begin >= REPEATED_SIGNAL
}

/// The signals that stop a server.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Installs the handlers: from now on these signals do not end the process.
    pub(crate) fn install() -> Result<Self, Failure> {
        let install = |kind| {
            signal(kind).map_err(|error| Failure::Failed(format!("cannot handle signals: {error}")))
        };
        Ok(Self {
            terminate: install(SignalKind::terminate())?,
            interrupt: install(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal and returns its name.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }

    /// Records that a stop has begun: a further signal ends the process, unless it is the first one
    /// delivered twice.
    pub(crate) fn end_on_second(mut self) {
        let stopping_since = Instant::now();
        tokio::spawn(async move {
            loop {
                let name = self.next().await;
                if is_second_request(stopping_since.elapsed()) {
                    tracing::warn!("{name}: stopping at once; the next start recovers");
                    output::exit_at_once(STOPPED_AT_ONCE);
                }
                tracing::info!(
                    "{name} counts as the first signal; repeat it to end the process at once"
                );
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::mpsc::{channel, sync_channel};

    use alluvium_stream::{Change, KIND_LOG, NewBatch, StreamEpoch, StreamOffset};
    use alluvium_wal::{LogOffset, RecoveryReport};
    use parking_lot::Mutex;
    use tokio::runtime::Runtime;

    use super::*;

    #[test]
    fn stored_metadata_that_cannot_be_read_are_refused_with_advice() {
        let error = StartError::Metadata("topic a: its catalog entry: no JSON".into());
        let options =
            ServeOptions { data_dir: Some("/var/lib/a".into()), ..ServeOptions::default() };
        let config = ServeConfig::load(options).unwrap();
        let Failure::Failed(message) = not_started(error, &config) else {
            panic!("a failure of another kind");
        };
        assert_eq!(
            message,
            "data directory /var/lib/a: the stored metadata is damaged: topic a: its catalog \
             entry: no JSON. If a newer alluvium wrote this, use that one"
        );
    }

    fn recovery() -> Recovery {
        let wal = RecoveryReport {
            wal_id: Default::default(),
            records: 0,
            payload_bytes: 0,
            start: LogOffset(0),
            end: LogOffset(0),
            clean_shutdown: true,
            damage: vec![],
            damaged_ranges: vec![],
            dropped_records: 0,
            epoch: 2,
            ring_bytes: 1 << 20,
            elapsed: Duration::ZERO,
        };
        Recovery {
            wal,
            streams: 1,
            batches: 0,
            payload_bytes: 0,
            skipped_uploaded: 0,
            skipped_deleted: 0,
            gaps: vec![],
            missing_end: None,
            declared_gaps: 0,
            lost_lists: 0,
            elapsed: Duration::from_millis(7),
        }
    }

    /// The steps that report progress keep their last report until the next step begins.
    #[tokio::test]
    async fn probes_see_how_far_the_start_is() {
        let data = tempfile::tempdir().unwrap();
        let wal_capacity = "64MiB".parse().ok();
        let options = || ServeOptions {
            data_dir: Some(data.path().into()),
            wal_capacity,
            ..Default::default()
        };
        let config = ServeConfig::load(options()).unwrap();
        for is_new in [true, false] {
            let health = Health::new();
            let (opening, config) = (health.clone(), config.clone());
            let open = move || Storage::open(&config, &opening).map(|storage| (storage, config));
            let (storage, config) = tokio::task::spawn_blocking(open).await.unwrap().unwrap();
            let step = if is_new { "writing the log 100%, 0 s left" } else { "opening the log" };
            assert_eq!(health.ready().1, format!("{step}\n"));
            let (opened, _lock) = recover(&config, storage, &health).await.unwrap();
            let step = health.ready().1;
            assert!(step.starts_with("recovering"), "{step}");
            opened.store.close().await.unwrap();
        }
    }

    /// Requests a path of the admin port and returns status and body.
    fn get(admin: SocketAddr, path: &str) -> (String, String) {
        let mut connection = TcpStream::connect(admin).unwrap();
        write!(connection, "GET {path} HTTP/1.1\r\nHost: {admin}\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.lines().next().unwrap().to_owned(), body.to_owned())
    }

    /// Pauses `start` at each of its progress reports and queries the admin port meanwhile. Returns
    /// the progress that it saw, in percent.
    fn probe<T: Send>(
        runtime: &Runtime,
        step: &str,
        start: impl FnOnce(Arc<Health>) -> T + Send,
    ) -> (T, Vec<u64>) {
        let health = Health::new();
        let listen = "127.0.0.1:0".parse().unwrap();
        let admin = runtime.block_on(Admin::start(listen, health.clone())).ok().unwrap();
        let (report, reports) = channel();
        let (go_on, wait) = sync_channel(0);
        let (done, wait) = (report.clone(), Mutex::new(wait));
        let held = move |done: u64, total: u64| {
            report.send(Some(done * 100 / total)).unwrap();
            wait.lock().recv().unwrap();
        };
        assert!(health.held.set(Arc::new(held)).is_ok());
        std::thread::scope(|scope| {
            let started = scope.spawn(move || {
                let started = start(health);
                done.send(None).unwrap();
                started
            });
            let mut seen = Vec::new();
            while let Some(percent) = reports.recv().unwrap() {
                let (status, why) = get(admin.local_addr(), "/readyz");
                assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
                assert!(why.starts_with(&format!("{step} {percent}%")), "{why}");
                let alive = ("HTTP/1.1 200 OK".to_owned(), "ok\n".to_owned());
                assert_eq!(get(admin.local_addr(), "/livez"), alive);
                assert_eq!(get(admin.local_addr(), "/healthz"), alive);
                seen.push(percent);
                go_on.send(()).unwrap();
            }
            (started.join().unwrap(), seen)
        })
    }

    #[test]
    fn probes_are_answered_while_the_log_is_written_and_recovered() {
        let runtime = Runtime::new().unwrap();
        let data = tempfile::tempdir().unwrap();
        let options = ServeOptions {
            data_dir: Some(data.path().into()),
            wal_capacity: "64MiB".parse().ok(),
            ..Default::default()
        };
        let config = &ServeConfig::load(options).unwrap();
        let open = |health: Arc<Health>| Storage::open(config, &health).unwrap();
        let (storage, seen) = probe(&runtime, "writing the log", open);
        assert!(seen.len() > 1 && seen.is_sorted() && seen.last() == Some(&100), "{seen:?}");

        // A record to recover.
        let health = Health::new();
        let (Opened { store, .. }, lock) =
            runtime.block_on(recover(config, storage, &health)).unwrap();
        runtime.block_on(async {
            let id = store.new_stream_ids(1).await.unwrap()[0];
            let create = Change::CreateStream { id, kind: KIND_LOG, label: Default::default() };
            store.commit(vec![create]).await.unwrap();
            let stream = store.open_stream(id, StreamEpoch(0)).await.unwrap();
            let payload = vec![1; 1000].into();
            let batch = NewBatch { base: StreamOffset(0), count: 1, max_timestamp_ms: 0, payload };
            stream.append(batch).unwrap().await.unwrap();
            store.close().await.unwrap();
        });
        drop(lock);

        let storage = open(health);
        let recover =
            |health: Arc<Health>| runtime.block_on(recover(config, storage, &health)).unwrap();
        let ((opened, _lock), seen) = probe(&runtime, "recovering", recover);
        assert!(seen.starts_with(&[0]), "{seen:?}");
        runtime.block_on(opened.store.close()).unwrap();
    }

    #[test]
    fn options_of_groups_and_transactions_reach_the_broker() {
        let span = |text: &str| Some(text.parse::<Span>().unwrap());
        let options = ServeOptions {
            rack: Some("eu-1a".into()),
            transaction_max_timeout: span("1h"),
            transactional_id_expiration: span("2h"),
            offsets_retention: span("3h"),
            offset_metadata_max_size: Some(Size { bytes: 77 }),
            group_initial_rebalance_delay: span("3s"),
            group_min_session_timeout: span("5s"),
            group_max_session_timeout: span("6s"),
            group_consumer_heartbeat_interval: span("700ms"),
            group_consumer_min_heartbeat_interval: span("600ms"),
            group_share_session_timeout: span("50s"),
            group_share_max_session_timeout: span("2m"),
            group_max_size: Some(9),
            offsets_retention_check_interval: span("2s"),
            ..ServeOptions::default()
        };
        let config = broker_config(&ServeConfig::load(options).unwrap());
        let (hour, second) = (Duration::from_secs(3600), Duration::from_secs(1));
        assert_eq!(config.rack.as_deref(), Some("eu-1a"));
        assert_eq!(config.transaction_max_timeout, hour);
        assert_eq!(config.transactional_id_expiration, 2 * hour);
        let groups = config.groups;
        assert_eq!(groups.offsets_retention, 3 * hour);
        assert_eq!(groups.max_offset_metadata_bytes, 77);
        assert_eq!(groups.initial_rebalance_delay, 3 * second);
        assert_eq!(groups.consumer.heartbeat_interval, Duration::from_millis(700));
        assert_eq!(groups.consumer.min_heartbeat_interval, Duration::from_millis(600));
        assert_eq!(groups.share.session_timeout, 50 * second);
        assert_eq!(groups.share.max_session_timeout, 120 * second);
        assert_eq!((groups.max_group_members, groups.sweep_interval), (9, 2 * second));
        assert_eq!(
            (groups.min_session_timeout, groups.max_session_timeout),
            (5 * second, 6 * second)
        );
    }

    /// The program's defaults equal those of the broker where both have one.
    #[test]
    fn defaults_of_groups_and_transactions_are_those_of_the_broker() {
        let options = ServeOptions::default();
        let config = broker_config(&ServeConfig::load(options).unwrap());
        let broker = BrokerConfig::default();
        assert_eq!(config.transaction_max_timeout, broker.transaction_max_timeout);
        assert_eq!(config.transactional_id_expiration, broker.transactional_id_expiration);
        assert_eq!(format!("{:?}", config.groups), format!("{:?}", broker.groups));
    }

    #[test]
    fn a_signal_counts_again_after_a_second() {
        assert!(!is_second_request(Duration::ZERO));
        assert!(!is_second_request(Duration::from_millis(999)));
        assert!(is_second_request(Duration::from_secs(1)));
    }

    #[test]
    fn lost_offsets_are_reported_by_topic_and_partition() {
        let mut found = recovery();
        assert!(losses(&found, &HashMap::new()).is_empty());
        let gap =
            |stream, cause| Gap { stream, offsets: StreamOffset(34)..StreamOffset(36), cause };
        let lost = gap(StreamId(9), GapCause::Lost);
        found.gaps = vec![lost.clone(), gap(StreamId(10), GapCause::Skipped)];
        let names = HashMap::from([(StreamId(9), "partition 3 of topic orders".to_owned())]);
        let why = "are lost: the write-ahead log is damaged; readers skip them";
        assert_eq!(
            losses(&found, &names),
            [
                format!("offsets 34 to 35 of partition 3 of topic orders {why}"),
                "offsets 34 to 35 of stream 10 are skipped: the write-ahead log is damaged, and at \
                 most this many records may be lost; readers skip them"
                    .to_owned()
            ]
        );
        found.gaps = vec![lost; NAMED_LOSSES + 2];
        let lines = losses(&found, &names);
        assert_eq!(lines.last().unwrap(), "2 more ranges of lost or skipped offsets");
    }

    #[test]
    fn the_recovery_summary_omits_expected_values() {
        let mut found = recovery();
        assert_eq!(
            summary(&found),
            "recovered in 0.007 s after a clean shutdown: nothing to upload"
        );
        found.wal.clean_shutdown = false;
        (found.batches, found.payload_bytes) = (1, 1536);
        assert_eq!(
            summary(&found),
            "recovered in 0.007 s after an unclean shutdown: 1 batch (1.5 KiB) to upload"
        );
        (found.skipped_uploaded, found.skipped_deleted, found.wal.dropped_records) = (2, 1, 1);
        let offsets = StreamOffset(3)..StreamOffset(9);
        let gap = |cause| Gap { stream: StreamId(0), offsets: offsets.clone(), cause };
        found.gaps = vec![gap(GapCause::Lost), gap(GapCause::Skipped)];
        found.missing_end = Some(LogOffset(7)..LogOffset(8));
        assert_eq!(
            summary(&found),
            "recovered in 0.007 s after an unclean shutdown: 1 batch (1.5 KiB) to upload, \
             2 batches uploaded before, 1 batch of deleted topics; 1 record after the end of the \
             log dropped: never acknowledged; 1 range of offsets LOST; 1 range of \
             offsets SKIPPED; the end of the log LOST"
        );
    }
}
