//! `alluvium rebuild`: gives a store whose write-ahead log is lost a new one.

use std::path::{Path, PathBuf};

use alluvium_device::OpenOptions;
use alluvium_stream::{LostEnd, Options, Rebuild};
use alluvium_wal::{FormatOptions, HeaderInfo, OpenError, Wal};
use clap::Args;
use serde::Serialize;
use uuid::Uuid;

use crate::admin::Health;
use crate::catalog::{self, CatalogArgs};
use crate::config::limits;
use crate::output::{self, Failure, Table};
use crate::storage::{self, lock_directory, open_device};
use crate::units::{Size, counted};

/// Rebuild a server whose write-ahead log is lost from its object store.
///
/// Everything that was uploaded is kept: records, topics, settings, users, committed offsets. What
/// was only in the lost log is lost: records since the last upload, and changes of topics, settings
/// and users of about the last second. The command prints what that is. Partitions continue beyond
/// everything that may have been handed out, so that no offset gets a second record, and leader
/// epochs report the truncation to consumers.
///
/// Without --accept-loss nothing is changed. If the old log still exists, start the server with it
/// instead. A server that still runs with the old log stops when it next writes to the object
/// store, and what it accepts until then is lost, too: stop it first.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 done, and nothing is lost; 1 refused or failed, nothing has \
                  changed unless the message says so; 2 wrong usage; 3 done, and records are or \
                  may be lost."
)]
pub(crate) struct RebuildArgs {
    #[command(flatten)]
    catalog: CatalogArgs,
    /// The new write-ahead log: a file, which is created if it is missing, or a block device. One
    /// that was in use is refused.
    #[arg(long, env = "ALLUVIUM_WAL", value_name = "PATH", required_unless_present = "dry_run")]
    wal: Option<PathBuf>,
    /// The size of a new file or the part of a device that is used. Default: 2 GiB for a file, all
    /// of a device.
    #[arg(long, value_name = "SIZE")]
    wal_capacity: Option<Size>,
    /// The data directory of the server, which must be stopped; created if it is missing.
    #[arg(
        long,
        env = "ALLUVIUM_DATA_DIR",
        value_name = "DIR",
        required_unless_present = "dry_run"
    )]
    data_dir: Option<PathBuf>,
    /// The number of the server, recorded for information.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    node_id: u32,
    /// Print what is lost, and change nothing.
    #[arg(long, conflicts_with = "accept_loss")]
    dry_run: bool,
    /// Rebuild although records are or may be lost.
    #[arg(long)]
    accept_loss: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What is lost, and whether the store was rebuilt.
#[derive(Serialize)]
struct Report {
    store: Uuid,
    /// The lost log.
    lost_wal: Uuid,
    /// The new one, if the store was bound to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    wal: Option<Uuid>,
    /// The last server has stopped after it had uploaded everything: nothing is lost.
    clean: bool,
    /// When the last change of the catalog was written, in milliseconds since the Unix epoch. What
    /// was appended or changed after it is lost, and not known.
    written_at_ms: u64,
    streams: usize,
    objects: usize,
    lost: Vec<LostView>,
}

/// The end of a partition, or of the server's own state, that is lost.
#[derive(Serialize)]
struct LostView {
    stream: u64,
    name: String,
    /// The first offset that is lost.
    from: u64,
    /// The offsets from `from` up to it were durable and are lost. Later ones may be lost, too.
    known_end: u64,
    /// The offset of the next record.
    resume: u64,
}

impl Report {
    fn of(rebuild: &Rebuild) -> Self {
        let state = rebuild.state();
        let names = catalog::stream_names(state);
        let view = |lost: &LostEnd| LostView {
            stream: lost.stream.0,
            name: names
                .get(&lost.stream)
                .cloned()
                .unwrap_or_else(|| format!("stream {}", lost.stream)),
            from: lost.from.0,
            known_end: lost.known_end.0,
            resume: lost.resume.0,
        };
        Self {
            store: state.header.store,
            lost_wal: state.header.wal,
            wal: None,
            clean: rebuild.is_clean(),
            written_at_ms: state.header.written_at_ms,
            streams: state.streams.len(),
            objects: state.objects.len(),
            lost: rebuild.lost_ends().iter().map(view).collect(),
        }
    }

    fn show(&self, json: bool) -> Result<(), Failure> {
        if json { output::json(self) } else { self.print() }
    }

    fn print(&self) -> Result<(), Failure> {
        let seconds = self.written_at_ms / 1000;
        output::line(format_args!(
            "store {}: {} and {} are in the object store, as of {seconds} s since the Unix epoch",
            self.store,
            counted(self.streams as u64, "stream", "streams"),
            counted(self.objects as u64, "object", "objects"),
        ))?;
        if self.clean {
            return output::line(format_args!(
                "the last server has stopped after everything was uploaded: nothing is lost"
            ));
        }
        let mut table = Table::of_text(&["LOST FROM OFFSET", "AT LEAST", "CONTINUES AT", "OF"]);
        let mut known = 0u64;
        for lost in self.lost.iter().filter(|lost| lost.known_end > lost.from) {
            known += 1;
            let records = lost.known_end - lost.from;
            table.row(vec![
                lost.from.to_string(),
                counted(records, "offset", "offsets"),
                lost.resume.to_string(),
                lost.name.clone(),
            ]);
        }
        if known > 0 {
            output::line(format_args!("\n{table}\n"))?;
        }
        output::line(format_args!(
            "{} with records that are known to be lost. Records that were appended later than \
             {seconds} s since the Unix epoch are lost in all of {}, and so are changes of topics, \
             settings and users since then",
            counted(known, "stream", "streams"),
            counted(self.lost.len() as u64, "stream", "streams"),
        ))
    }
}

/// Rebuilds a store.
///
/// # Errors
/// The catalog cannot be read; the log is not a new one; or records would be lost and that was not
/// accepted.
pub(crate) fn run(args: &RebuildArgs) -> Result<(), Failure> {
    output::start_logging("warn,alluvium=info,alluvium::progress=info")?;
    // Before anything is read: no server may run meanwhile.
    let lock =
        args.data_dir.as_deref().filter(|_| !args.dry_run).map(lock_directory).transpose()?;
    let (rebuild, objects) = catalog::blocking(async {
        let url = args.catalog.url()?;
        let objects = match args.dry_run {
            true => crate::objects::open_to_read(&url)?,
            false => crate::objects::open(&url)?,
        };
        let store = args.catalog.chosen(&*objects).await?;
        let rebuild = Rebuild::load(&objects, store, &Options::default()).await;
        let failed = |error| Failure::Failed(format!("object store {url}: {error}"));
        Ok((rebuild.map_err(failed)?, objects))
    })?;
    let mut report = Report::of(&rebuild);
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
    let header = new_log(args, wal)?;
    let bound = catalog::blocking(async {
        rebuild.bind(&objects, &header, args.node_id).await.map_err(Failure::new)
    })?;
    storage::write_wal_id(data_dir, header.wal_id)?;
    report.wal = Some(header.wal_id);
    report.show(args.json)?;
    if !args.json {
        let was = if bound { "is" } else { "was already" };
        output::line(format_args!(
            "store {} {was} bound to write-ahead log {} in {}: start the server with it",
            report.store,
            header.wal_id,
            wal.display()
        ))?;
    }
    match report.clean || !bound {
        true => Ok(()),
        false => Err(Failure::Lost("records are or may be lost, as stated".into())),
    }
}

/// Opens the new log, and formats it unless an earlier run has.
fn new_log(args: &RebuildArgs, path: &Path) -> Result<HeaderInfo, Failure> {
    let capacity = args.wal_capacity.unwrap_or(limits::WAL_CAPACITY);
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
