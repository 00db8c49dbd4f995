//! `alluvium rebuild`: brings a server back after a loss: of its write-ahead log, of a part of its
//! catalog in the object store, or of all of it.

mod report;
mod topic;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use alluvium_broker::{BrokerFold, Restored, restore_metadata};
use alluvium_device::{Access, OpenOptions, SharedDevice};
use alluvium_stream::chain::ChainStream;
use alluvium_stream::{
    Fold, KIND_LOG, Options, Rebuild, RebuildError, RebuildStep, StreamId, locate,
};
use alluvium_wal::{FormatOptions, HeaderInfo, OpenError, Wal};
use clap::Args;
use serde::Serialize;
use uuid::Uuid;

use self::report::Report;
use crate::address::HostPort;
use crate::admin::Health;
use crate::catalog::{self, CatalogArgs};
use crate::config::{check_wal_capacity, limits};
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::storage::{self, lock_directory, open_device};
use crate::units::Size;

/// Bring a server back from its object store after a loss.
///
/// The write-ahead log is lost: everything that was uploaded is kept: records, topics, settings,
/// users, committed offsets. What was only in the lost log is lost: records since the last upload,
/// and changes of topics, settings and users of about the last second. The command prints what that
/// is. Partitions continue beyond everything that may have been handed out, so that no offset gets
/// a second record, and leader epochs report the truncation to consumers. If the old log still
/// exists, start the server with it instead.
///
/// The catalog in the object store is damaged, older than the log, or lost: with --from-objects it
/// is put together from its readable parts, from the objects, and from the log if --wal names the
/// one of the server.
///
/// A single topic is lost, or needed in an earlier state: --topic copies it from an object store,
/// such as a copy of a bucket, into a running server.
///
/// Without --accept-loss nothing is changed. A server that still runs stops when it next writes to
/// the object store, and what it accepts until then is lost, too: stop it first.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 done, and nothing is lost; 1 refused or failed, nothing has \
                  changed unless the message says so; 2 wrong usage; 3 done, and records are or \
                  may be lost. A dry run exits with 0, whatever is lost."
)]
pub(crate) struct RebuildArgs {
    #[command(flatten)]
    catalog: CatalogArgs,
    /// The write-ahead log: a file, which is created if it is missing, or a block device. One that
    /// was in use is refused, except with --from-objects the log of the server. Not used with
    /// --topic.
    #[arg(
        long,
        env = "ALLUVIUM_WAL",
        value_name = "PATH",
        required_unless_present_any = ["dry_run", "topic"]
    )]
    wal: Option<PathBuf>,
    /// The size of a new file or the part of a device that is used. Default: 2 GiB for a file, all
    /// of a device.
    #[arg(long, value_name = "SIZE")]
    wal_capacity: Option<Size>,
    /// The data directory of the server, which must be stopped; created if it is missing. Not used
    /// with --topic.
    #[arg(
        long,
        env = "ALLUVIUM_DATA_DIR",
        value_name = "DIR",
        required_unless_present_any = ["dry_run", "topic"]
    )]
    data_dir: Option<PathBuf>,
    /// The number of the server, recorded for information.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    node_id: u32,
    /// Put the catalog together from what is left of it and from the objects. Reads what each
    /// object holds that the catalog does not have.
    #[arg(long)]
    from_objects: bool,
    /// Restore only this topic, as a new topic of the running server at --bootstrap: its settings,
    /// and its committed records at their offsets. The object store is only read; it may be a copy,
    /// or that of a running server. Repeat an interrupted command to go on.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["from_objects", "accept_loss"])]
    topic: Option<String>,
    /// The name of the new topic. Default: that of the restored one.
    #[arg(long = "as", value_name = "NAME", requires = "topic")]
    name: Option<String>,
    /// Address of the server that gets the topic.
    #[arg(
        long,
        env = "ALLUVIUM_BOOTSTRAP",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:9092"
    )]
    bootstrap: HostPort,
    /// Client properties for that server, as those of `alluvium topic`.
    #[arg(long, env = "ALLUVIUM_COMMAND_CONFIG", value_name = "FILE")]
    command_config: Option<PathBuf>,
    /// Print what is lost, or with --topic what would be copied, and change nothing. The server at
    /// --bootstrap is not contacted.
    #[arg(long, conflicts_with = "accept_loss")]
    dry_run: bool,
    /// Rebuild although records are or may be lost.
    #[arg(long)]
    accept_loss: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The JSON of a rebuild that is not needed, with fields of the report.
#[derive(Serialize)]
struct NotNeeded {
    store: Uuid,
    clean: bool,
    lost: [(); 0],
}

/// The JSON of a rebuild that an earlier run has done.
#[derive(Serialize)]
struct AlreadyBound {
    store: Uuid,
    wal: Uuid,
    already_bound: bool,
}

/// Rebuilds a store.
///
/// # Errors
/// The catalog cannot be read; the log is not the right one; or something would be lost and that
/// was not accepted.
pub(crate) fn run(args: &RebuildArgs) -> Result<(), Failure> {
    output::start_logging("warn,alluvium=info,alluvium::progress=info")?;
    if let Some(name) = &args.topic {
        return topic::run(args, name);
    }
    // Before anything is read: no server may run meanwhile.
    let lock =
        args.data_dir.as_deref().filter(|_| !args.dry_run).map(lock_directory).transpose()?;
    let log = match (&args.wal, args.from_objects) {
        (Some(path), true) => used_log(args, path)?,
        _ => None,
    };
    if args.from_objects {
        match (&log, &args.wal) {
            (Some((_, header)), _) => tracing::info!("with write-ahead log {}", header.wal_id),
            (None, Some(path)) => tracing::info!(
                "without the write-ahead log: {} is a new one, so what was not uploaded is lost",
                path.display()
            ),
            (None, None) => tracing::info!("without the write-ahead log: give it with --wal"),
        }
    }
    let loaded = catalog::blocking(load(args, log.clone()))?;
    let Some(mut rebuild) = loaded else { return Ok(()) };
    let restored = match args.from_objects {
        true => restore(&mut rebuild),
        false => Restored::default(),
    };
    let mut report = Report::of(&rebuild, &restored);
    if is_bound(args, &report)? {
        // By an earlier run, which has printed what is lost.
        if let Some(data_dir) = args.data_dir.as_ref().filter(|_| !args.dry_run) {
            storage::write_wal_id(data_dir, report.lost_wal())?;
        }
        let (store, wal) = (report.store(), report.lost_wal());
        return match args.json {
            true => output::json(&AlreadyBound { store, wal, already_bound: true }),
            false => output::line(format_args!(
                "store {store} was already bound to write-ahead log {wal}: start the server with it"
            )),
        };
    }
    let is_refused = !args.dry_run && !args.accept_loss && !report.clean;
    if args.dry_run || is_refused {
        report.show(args.json)?;
        return match is_refused {
            false => Ok(()),
            true => Err(Failure::Failed(
                "nothing has changed: records are or may be lost. To go on: --accept-loss".into(),
            )),
        };
    }
    let (Some(wal), Some(data_dir), Some(_lock)) = (&args.wal, &args.data_dir, &lock) else {
        return Err(Failure::Usage("--wal and --data-dir are needed".into()));
    };
    let header = match &log {
        Some((_, header)) => header.clone(),
        None => new_log(args, wal)?,
    };
    let objects = crate::objects::open(&args.catalog.url()?)?;
    // Before the store is bound: afterwards the catalog does not show it any more.
    report.set_wal(header.wal_id);
    report.show(args.json)?;
    let bound = catalog::blocking(async {
        rebuild.bind(&objects, &header, args.node_id).await.map_err(Failure::new)
    })?;
    storage::write_wal_id(data_dir, header.wal_id)?;
    if !args.json {
        let was = if bound { "is" } else { "was already" };
        output::line(format_args!(
            "store {} {was} bound to write-ahead log {} in {}: start the server with it",
            report.store(),
            header.wal_id,
            wal.display()
        ))?;
    }
    match report.clean || !bound {
        true => Ok(()),
        false => Err(Failure::Lost("records are or may be lost, as stated".into())),
    }
}

/// Whether the store is bound to the log at `--wal` already. With `--from-objects` that is no
/// reason to stop: it is the log of the server.
fn is_bound(args: &RebuildArgs, report: &Report) -> Result<bool, Failure> {
    let Some(path) = args.wal.as_ref().filter(|_| !args.from_objects) else { return Ok(false) };
    let log = inspected(path, Access::ReadOnly)?;
    Ok(log.is_some_and(|(_, header)| header.wal_id == report.lost_wal()))
}

/// Reads what is left of the store; `None` if nothing is lost.
async fn load(
    args: &RebuildArgs,
    log: Option<(SharedDevice, HeaderInfo)>,
) -> Result<Option<Rebuild>, Failure> {
    let url = args.catalog.url()?;
    let objects = crate::objects::open_to_read(&url)?;
    let advice = match args.from_objects {
        true => "",
        false => ". With --from-objects the catalog is put together from what is left",
    };
    let failed = |error: RebuildError| {
        let is_of_catalog = match &error {
            RebuildError::NoCatalog(_) => true,
            RebuildError::Object(error) => error.is_loss(),
            _ => false,
        };
        let advice = if is_of_catalog { advice } else { "" };
        Failure::Failed(format!("object store {url}: {error}{advice}"))
    };
    let options = Options::default();
    if !args.from_objects {
        let none = format!("{}{advice}", catalog::NO_CATALOG);
        let store = args.catalog.chosen(&*objects, &none).await?;
        let rebuild = Rebuild::load(&objects, store, &options).await.map_err(failed)?;
        return Ok(Some(rebuild));
    }
    let of_log = match &log {
        Some((_, header)) => Some(locate(&*objects, header.wal_id).await.map_err(Failure::new)?),
        None => None,
    };
    let store = args.catalog.chosen_with_data(&*objects, of_log).await?;
    let log = log.map(|(device, _)| device);
    let directories = Meter::new("reading what objects hold");
    let records = Meter::new("reading records for checkpoints");
    let (directories, records) = (directories.callback(), records.callback());
    let progress = move |step: RebuildStep, done: u64, total: u64| match step {
        RebuildStep::Directories => directories(done, total),
        RebuildStep::Records => records(done, total),
    };
    let fold: Arc<dyn Fold> = Arc::new(BrokerFold);
    let rebuild = Rebuild::from_objects(&objects, store, log, &fold, &options, &progress).await;
    match rebuild {
        Ok(rebuild) => Ok(Some(rebuild)),
        Err(not_needed @ RebuildError::NotNeeded(_)) => {
            match args.json {
                true => output::json(&NotNeeded { store, clean: true, lost: [] })?,
                false => output::line(format_args!("store {store}: {not_needed}"))?,
            }
            Ok(None)
        }
        Err(error) => Err(failed(error)),
    }
}

/// Gives names to streams whose entries in the catalog are lost.
fn restore(rebuild: &mut Rebuild) -> Restored {
    let term = rebuild.state().head.term;
    let state = rebuild.state_mut();
    let mut reserved = state.reserved;
    let labels = state.streams.iter().map(|(id, stream)| (*id, &stream.label[..]));
    let restored = restore_metadata(&state.meta, labels, term, || {
        reserved = StreamId(reserved.0 + 1);
        StreamId(reserved.0 - 1)
    });
    state.reserved = reserved;
    state.meta.extend(restored.meta.clone());
    for (id, label) in &restored.streams {
        let stream = ChainStream { kind: KIND_LOG, label: label.clone(), ..ChainStream::default() };
        state.streams.insert(*id, stream);
    }
    restored
}

/// Opens the log if it was in use. A dry run only reads it, also while a server runs.
fn used_log(
    args: &RebuildArgs,
    path: &Path,
) -> Result<Option<(SharedDevice, HeaderInfo)>, Failure> {
    let access = if args.dry_run { Access::ReadOnly } else { Access::Exclusive };
    Ok(inspected(path, access)?.filter(|(_, header)| header.epoch > 0))
}

/// Opens a log, if there is one.
fn inspected(path: &Path, access: Access) -> Result<Option<(SharedDevice, HeaderInfo)>, Failure> {
    if !path.exists() {
        return Ok(None);
    }
    let device = alluvium_device::open(path, &OpenOptions { access, ..OpenOptions::default() })?;
    match Wal::inspect(&device) {
        Ok(inspection) => Ok(Some((device, inspection.header))),
        Err(OpenError::NotFormatted { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Opens the new log, and formats it unless an earlier run has.
fn new_log(args: &RebuildArgs, path: &Path) -> Result<HeaderInfo, Failure> {
    let capacity = args.wal_capacity.unwrap_or(limits::WAL_CAPACITY);
    check_wal_capacity(capacity).map_err(|error| Failure::Usage(error.to_string()))?;
    let options = OpenOptions {
        create_bytes: (!path.exists()).then_some(capacity.bytes),
        ..OpenOptions::default()
    };
    let device = open_device(path, &options, "writing the log", &Health::new())?;
    match Wal::inspect(&device) {
        Ok(inspection) => Ok(inspection.header),
        Err(OpenError::NotFormatted { .. }) => {
            let options = FormatOptions {
                capacity_bytes: args.wal_capacity.map(|capacity| capacity.bytes),
                node_id: args.node_id,
                ..FormatOptions::default()
            };
            Ok(Wal::format(&device, &options)?)
        }
        Err(error) => Err(error.into()),
    }
}
