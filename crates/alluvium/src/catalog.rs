//! `alluvium catalog`: exports the catalog of a stopped server as JSON, and imports it.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use alluvium_stream::catalog::{Snapshot, export};
use alluvium_stream::{Catalog, RedbCatalog};
use clap::{Args, Subcommand};

use crate::output::{self, Failure};
use crate::storage::{CATALOG_FILE, lock_directory};
use crate::units::counted;

#[derive(Debug, Subcommand)]
pub(crate) enum CatalogCommand {
    /// Write the content of the catalog as JSON with a checksum. The server must be stopped.
    Export(ExportArgs),
    /// Create a catalog from an export where there is none. An import is a copy of the catalog at
    /// the time of its export and belongs to the write-ahead log at that time. If that log has been
    /// trimmed since then, the server refuses to start with the import.
    Import(ImportArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    /// The server's data directory.
    #[arg(long, env = "ALLUVIUM_DATA_DIR", value_name = "DIR")]
    data_dir: PathBuf,
    /// Write to this file, which must not exist. Default: standard output.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    /// The data directory that gets the catalog; created if it is missing.
    #[arg(long, env = "ALLUVIUM_DATA_DIR", value_name = "DIR")]
    data_dir: PathBuf,
    /// The export.
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
}

/// Runs a `catalog` command.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(command: CatalogCommand) -> Result<(), Failure> {
    output::start_logging("warn,alluvium::progress=info")?;
    match command {
        CatalogCommand::Export(args) => run_export(&args),
        CatalogCommand::Import(args) => run_import(&args),
    }
}

/// Loads the catalog in `data_dir`, with the lock that keeps it from changing.
///
/// # Errors
/// There is none, it is in use, or it cannot be read.
pub(crate) fn load(data_dir: &Path) -> Result<(Snapshot, File), Failure> {
    let path = data_dir.join(CATALOG_FILE);
    // Otherwise a catalog would be created, even in an empty file.
    if std::fs::metadata(&path).map_or(0, |file| file.len()) == 0 {
        return Err(Failure::Failed(format!("{}: there is no catalog", path.display())));
    }
    let lock = lock_directory(data_dir)?;
    let snapshot = RedbCatalog::open(&path).and_then(|catalog| catalog.load());
    Ok((snapshot.map_err(Failure::new)?, lock))
}

fn run_export(args: &ExportArgs) -> Result<(), Failure> {
    let (snapshot, _lock) = load(&args.data_dir)?;
    let Some(path) = &args.output else {
        return match export::export(&snapshot, &mut BufWriter::new(io::stdout().lock())) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
            Err(error) => Err(Failure::Failed(format!("standard output: {error}"))),
        };
    };
    let failed = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
    // It contains password verifiers.
    let file = File::options().write(true).create_new(true).mode(0o600).open(path);
    let mut file = BufWriter::new(file.map_err(failed)?);
    let written = export::export(&snapshot, &mut file).and_then(|crc32c| {
        file.flush()?;
        file.get_ref().sync_all()?;
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
        Ok(crc32c)
    });
    match written {
        Ok(crc32c) => {
            print_summary(&snapshot, &format!("to {}, CRC32C {crc32c:08x}", path.display()))
        }
        Err(error) => {
            // The file is not a complete export.
            let _ = std::fs::remove_file(path);
            Err(failed(error))
        }
    }
}

fn run_import(args: &ImportArgs) -> Result<(), Failure> {
    let named =
        |what: &dyn std::fmt::Display| Failure::Failed(format!("{}: {what}", args.input.display()));
    let file = File::open(&args.input).map_err(|error| named(&error))?;
    let snapshot = export::read_export(&mut BufReader::new(file)).map_err(|error| named(&error))?;
    let _lock = lock_directory(&args.data_dir)?;
    let path = args.data_dir.join(CATALOG_FILE);
    export::import_file(&path, &snapshot).map_err(Failure::new)?;
    print_summary(&snapshot, &format!("into {}", path.display()))
}

fn print_summary(snapshot: &Snapshot, where_to: &str) -> Result<(), Failure> {
    let ranges: usize = snapshot.streams.values().map(|stream| stream.ranges.len()).sum();
    output::line(format_args!(
        "{}, {}, {}, {} {where_to}",
        counted(snapshot.streams.len() as u64, "stream", "streams"),
        counted(ranges as u64, "range", "ranges"),
        counted(snapshot.objects.len() as u64, "object", "objects"),
        counted(snapshot.meta.len() as u64, "entry of metadata", "entries of metadata"),
    ))
}
