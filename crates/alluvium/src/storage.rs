//! What a server is built on: data directory, write-ahead log and object store. They are opened or
//! created, and checked to belong together before anything is written to any of them.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use alluvium_device::{Access, Geometry, OpenOptions, SharedDevice};
use alluvium_stream::chain::list_stores;
use alluvium_stream::sequence::{ProbeError, probe_creates};
use alluvium_stream::{DiskCacheOptions, LEGACY_CATALOG, ObjectError, PROBES_DIRECTORY, locate};
use alluvium_wal::{FormatOptions, HeaderInfo, OpenError, Wal};
use object_store::ObjectStore;
use uuid::Uuid;

use crate::admin::Health;
use crate::config::{ServeConfig, limits};
use crate::output::Failure;
use crate::progress::Meter;
use crate::units::{Size, counted};

/// Name of the file in a data directory that has the id of the server's write-ahead log. It decides
/// nothing but whether a missing or another log is noticed.
const WAL_ID_FILE: &str = "wal-id";

/// Storage that is opened and checked, not recovered yet.
pub(crate) struct Storage {
    pub(crate) device: SharedDevice,
    pub(crate) wal_options: alluvium_wal::Options,
    pub(crate) objects: Arc<dyn ObjectStore>,
    pub(crate) options: alluvium_stream::Options,
    /// The id of the log.
    pub(crate) wal_id: Uuid,
    /// Held as long as the server runs: one server per data directory.
    pub(crate) lock: File,
}

impl Storage {
    /// Opens all parts and creates those that are missing: directory, write-ahead log. Blocks while
    /// a new log is pre-written.
    ///
    /// # Errors
    /// A part cannot be opened, contains something else, or belongs to another server.
    pub(crate) fn open(config: &ServeConfig, health: &Arc<Health>) -> Result<Self, Failure> {
        if !config.wal.exists() {
            // Checked before a file is pre-written, so that the error comes at once.
            stream_options(config, config.wal_capacity.unwrap_or(limits::WAL_CAPACITY))?;
        }
        // Checked before anything is created.
        health.begin("checking the object store");
        crate::objects::check(&config.object_store)?;
        let lock = lock_directory(&config.data_dir)?;
        let known = read_wal_id(&config.data_dir)?;
        let bound = known.is_some() || config.data_dir.join(LEGACY_CATALOG).exists();
        health.begin("opening the log");
        let (device, header) = open_wal(config, bound, health)?;
        match known {
            Some(known) if known != header.wal_id => {
                return Err(Failure::Failed(format!(
                    "data directory {} belongs to write-ahead log {known}, but {} is write-ahead \
                     log {}. Set --wal to the path of that log, or --data-dir to another directory",
                    config.data_dir.display(),
                    config.wal.display(),
                    header.wal_id
                )));
            }
            Some(_) => {}
            None => write_wal_id(&config.data_dir, header.wal_id)?,
        }
        let capacity = Size { bytes: header.capacity_bytes };
        let options = stream_options(config, capacity)?;
        let objects = crate::objects::open(&config.object_store)?;
        let wal_options = wal_options(config.node_id, capacity);
        let wal_options = alluvium_wal::Options { reserve: config.wal_reserve, ..wal_options };
        Ok(Self { device, wal_options, objects, options, wal_id: header.wal_id, lock })
    }
}

/// Time in which a new object store must have answered.
const PROBE: Duration = Duration::from_secs(60);
/// Time after which an object store that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Waits before the object store is asked again.
pub(crate) async fn wait_for(config: &ServeConfig, error: &dyn std::fmt::Display) {
    let url = &config.object_store;
    tracing::warn!("object store {url}: {error}; the server waits until it is available");
    tokio::time::sleep(ASK_AGAIN).await;
}

/// Checks that the object store is suitable, unless it has the catalog of this log already. Reports
/// which other servers use it.
pub(crate) async fn prepare(
    config: &ServeConfig,
    objects: &Arc<dyn ObjectStore>,
    wal_id: Uuid,
    health: &Arc<Health>,
) -> Result<(), Failure> {
    let url = &config.object_store;
    let failed = |reason: String| Failure::Failed(format!("object store {url}: {reason}"));
    health.begin("opening the catalog");
    let stores = loop {
        let listed = async {
            let store = locate(&**objects, wal_id).await?;
            let stores = list_stores(&**objects).await?;
            Ok((!stores.contains(&store)).then_some(stores))
        };
        match listed.await {
            Ok(Some(others)) => break others,
            Ok(None) => return Ok(()),
            Err(error) => wait_unless_permanent(config, &error).await?,
        }
    };
    health.begin("testing the object store");
    loop {
        let until = tokio::time::Instant::now() + PROBE;
        match probe_creates(objects, PROBES_DIRECTORY, until, &mut |_, _| ()).await {
            Ok(()) => break,
            Err(ProbeError::Unsuitable(reason)) => {
                return Err(failed(format!(
                    "it is not suitable, because it does not create objects atomically: {reason}"
                )));
            }
            Err(ProbeError::Object(error)) => wait_unless_permanent(config, &error).await?,
        }
    }
    if let Some(first) = stores.first() {
        tracing::warn!(
            "object store {url} has the catalogs of {}, for example of {first}, and none of this \
             log",
            counted(stores.len() as u64, "other server", "other servers")
        );
    }
    Ok(())
}

/// Waits before the object store is asked again.
///
/// # Errors
/// No later attempt can succeed.
pub(crate) async fn wait_unless_permanent(
    config: &ServeConfig,
    error: &ObjectError,
) -> Result<(), Failure> {
    let reason = error.reason();
    if error.is_permanent() || error.is_loss() {
        return Err(Failure::Failed(format!("object store {}: {reason}", config.object_store)));
    }
    wait_for(config, &reason).await;
    Ok(())
}

/// Returns the id of the log that the directory belongs to, if it has one.
fn read_wal_id(directory: &Path) -> Result<Option<Uuid>, Failure> {
    let path = directory.join(WAL_ID_FILE);
    let failed = |reason: &dyn std::fmt::Display| {
        Failure::Failed(format!(
            "{}: {reason}. It has the id of the server's write-ahead log; if it is damaged, remove \
             it",
            path.display()
        ))
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => Uuid::try_parse(text.trim_end()).map(Some).map_err(|error| failed(&error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&error)),
    }
}

/// Writes the id of the log that the directory belongs to.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write_wal_id(directory: &Path, wal_id: Uuid) -> Result<(), Failure> {
    let path = directory.join(WAL_ID_FILE);
    let unfinished = directory.join(format!("{WAL_ID_FILE}.new"));
    let write = || {
        let mut file = File::create(&unfinished)?;
        writeln!(file, "{wal_id}")?;
        file.sync_all()?;
        std::fs::rename(&unfinished, &path)?;
        File::open(directory)?.sync_all()
    };
    write().map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))
}

/// Locks the directory for this process and writes the process ID into the lock file, for tools
/// that signal the server. The lock is released when the process ends; the ID stays.
pub(crate) fn lock_directory(directory: &Path) -> Result<File, Failure> {
    let failed = |action: &str, error: std::io::Error| {
        Failure::Failed(format!("data directory {}: {action}: {error}", directory.display()))
    };
    // Only the server's user may read the directory, which contains password verifiers. (For
    // other permissions, the operator creates the directory.)
    let parents = directory.parent().map_or(Ok(()), std::fs::create_dir_all);
    let made = parents.and_then(|()| DirBuilder::new().mode(0o700).create(directory));
    let created = made.or_else(|error| if directory.is_dir() { Ok(()) } else { Err(error) });
    created.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            Failure::Failed(format!("data directory {}: not a directory", directory.display()))
        }
        _ => failed("cannot be created", error),
    })?;
    // Not truncated before the lock is held: the file contains the holder's process ID.
    let mut lock = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        // Another user who could open the file could hold the lock.
        .mode(0o600)
        .open(directory.join("lock"))
        .map_err(|error| failed("its lock file cannot be opened", error))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = lock.read_to_string(&mut holder);
            return Err(Failure::Failed(format!(
                "data directory {}: another alluvium process is using it (process {})",
                directory.display(),
                holder.trim()
            )));
        }
        Err(TryLockError::Error(error)) => return Err(failed("cannot be locked", error)),
    }
    lock.set_len(0)
        .and_then(|()| writeln!(lock, "{}", std::process::id()))
        .map_err(|error| failed("its lock file cannot be written", error))?;
    Ok(lock)
}

/// Opens the write-ahead log, and formats it if it is new. `bound`: the data directory belongs to a
/// log.
///
/// | the target | new data directory | data directory of a log |
/// |---|---|---|
/// | does not exist | created and formatted | refused: its log is missing |
/// | blank | formatted | refused: its log was erased |
/// | a write-ahead log | opened | opened; a foreign one is refused |
/// | something else | refused; formatted with --force-format | refused |
/// | a damaged or unknown header | refused | refused |
fn open_wal(
    config: &ServeConfig,
    bound: bool,
    health: &Arc<Health>,
) -> Result<(SharedDevice, HeaderInfo), Failure> {
    let path = config.wal.display();
    let missing = !config.wal.exists();
    let directory_needs = |what: &str| {
        Failure::Failed(format!(
            "{path} {what}, but the data directory {} belongs to a write-ahead log that contains \
             acknowledged records. Set --wal to the path of that log. If it is lost: `alluvium \
             rebuild --dry-run` shows what is lost with it",
            config.data_dir.display()
        ))
    };
    let occupied = |looks_like: &str| {
        Failure::Failed(format!(
            "{path} contains {looks_like}, not a write-ahead log. To overwrite it, give \
             --force-format"
        ))
    };
    if missing && bound {
        return Err(directory_needs("does not exist"));
    }
    let capacity = config.wal_capacity.unwrap_or(limits::WAL_CAPACITY);
    let options = OpenOptions {
        durability: config.durability,
        engine: config.engine,
        create_bytes: missing.then_some(capacity.bytes),
        ..OpenOptions::default()
    };
    let device = open_device(&config.wal, &options, "writing the log", health)?;
    let geometry = device.geometry();
    tracing::info!(
        "write-ahead log: {}, {}",
        describe(geometry),
        match (geometry.flushes, geometry.volatile_cache) {
            (true, _) => "each write is flushed",
            (false, true) => "writes are not flushed, although it may have a volatile cache",
            (false, false) => "writes are not flushed: the device reports no volatile cache",
        },
    );
    let capacity_bytes = config.wal_capacity.map(|capacity| capacity.bytes);
    let format = |force: bool| -> Result<HeaderInfo, Failure> {
        let options = FormatOptions {
            capacity_bytes,
            node_id: config.node_id,
            force,
            ..FormatOptions::default()
        };
        let header = Wal::format(&device, &options).map_err(|error| match error {
            OpenError::Occupied { looks_like, .. } => occupied(&looks_like),
            other => other.into(),
        })?;
        tracing::info!(
            "formatted {path} as write-ahead log {} of {}",
            header.wal_id,
            Size { bytes: header.capacity_bytes }
        );
        Ok(header)
    };
    let header = match Wal::inspect(&device) {
        Ok(inspection) => {
            compare_capacity(config, &inspection.header);
            inspection.header
        }
        Err(OpenError::NotFormatted { .. }) if bound => return Err(directory_needs("is blank")),
        // The header slots are blank; `format` checks more of the device and reports what it finds.
        Err(OpenError::NotFormatted { .. }) => format(config.force_format)?,
        Err(OpenError::NotAWal { .. }) if bound => {
            return Err(directory_needs("contains something else"));
        }
        Err(OpenError::NotAWal { .. }) if config.force_format => format(true)?,
        Err(OpenError::NotAWal { looks_like, .. }) => return Err(occupied(&looks_like)),
        Err(other) => return Err(other.into()),
    };
    Ok((device, header))
}

/// Opens a device of a server. Nothing else may use it. If `options` have a size for a new file,
/// the file is written in full, and probes see the progress as `writing`.
pub(crate) fn open_device(
    path: &Path,
    options: &OpenOptions,
    writing: &'static str,
    health: &Arc<Health>,
) -> Result<SharedDevice, Failure> {
    let meter = Meter::new(format!("pre-writing {}", path.display()));
    let mut progress = meter.callback();
    if let Some(bytes) = options.create_bytes {
        tracing::info!("creating {}: {}, written in full", path.display(), Size { bytes });
        progress = health.progress(writing, progress);
    }
    let options =
        OpenOptions { access: Access::Exclusive, progress: Some(progress), ..options.clone() };
    Ok(alluvium_device::open(path, &options)?)
}

/// Describes a device, for the log.
pub(crate) fn describe(geometry: &Geometry) -> String {
    format!(
        "{}, a {} of {}, by {}",
        geometry.name,
        if geometry.block_device { "block device" } else { "file" },
        Size { bytes: geometry.capacity_bytes },
        geometry.engine,
    )
}

/// Warns if the configured capacity differs from the log's. The option is for a new log. This is no
/// error, because the log may have been resized while a server ran with this option, and that
/// server must be able to start again.
fn compare_capacity(config: &ServeConfig, header: &HeaderInfo) {
    let there = Size { bytes: header.capacity_bytes };
    if let Some(asked) = config.wal_capacity
        && asked != there
    {
        tracing::warn!(
            "wal-capacity is {asked}, but the write-ahead log in {path} has {there} and keeps it. \
             Remove the option, or resize the log: `alluvium wal resize --target {path} \
             --capacity {asked}`",
            path = config.wal.display()
        );
    }
}

/// The log's default options, lowered to what a small ring allows.
fn wal_options(node_id: u32, capacity: Size) -> alluvium_wal::Options {
    /// Bytes in front of the ring; see `docs/format/wal.md`.
    const DATA_START_BYTES: u64 = 64 << 10;
    let half_ring = capacity.bytes.saturating_sub(DATA_START_BYTES) / 2;
    let window_bytes = alluvium_wal::Options::default().window_bytes.min(half_ring);
    alluvium_wal::Options { node_id, ..with_window(Size { bytes: window_bytes }) }
}

/// The log's default options with this window, rounded down to a page, and with block and record
/// sizes lowered to what it allows.
pub(crate) fn with_window(window: Size) -> alluvium_wal::Options {
    const PAGE_BYTES: u64 = alluvium_device::PAGE_BYTES as u64;
    let window_bytes = window.bytes - window.bytes % PAGE_BYTES;
    let half = u32::try_from(window_bytes / 2).unwrap_or(u32::MAX);
    let defaults = alluvium_wal::Options::default();
    alluvium_wal::Options {
        window_bytes,
        block_bytes: defaults.block_bytes.min(half - half % PAGE_BYTES as u32),
        max_record_bytes: defaults.max_record_bytes.min(half.saturating_sub(2 * PAGE_BYTES as u32)),
        ..defaults
    }
}

/// The store's options for a log of `capacity`.
pub(crate) fn stream_options(
    config: &ServeConfig,
    capacity: Size,
) -> Result<alluvium_stream::Options, Failure> {
    let quarter = Size { bytes: capacity.bytes / 4 };
    let half_cache = Size { bytes: config.log_cache.bytes / 2 };
    let upload_size = match config.upload_size {
        Some(asked) if asked > quarter => {
            return Err(Failure::Usage(format!(
                "upload-size is {asked}, but must be at most {quarter}, a quarter of the \
                 write-ahead log of {capacity}"
            )));
        }
        Some(asked) => asked,
        None => limits::UPLOAD_SIZE.min(quarter).min(half_cache),
    };
    Ok(alluvium_stream::Options {
        cache_bytes: config.log_cache.bytes,
        upload_bytes: upload_size.bytes,
        upload_interval: config.upload_interval.0,
        block_cache_bytes: config.block_cache.bytes,
        disk_cache: config.disk_cache.clone().map(|directory| DiskCacheOptions {
            directory,
            max_disk_bytes: config.disk_cache_size.bytes,
            memory_bytes: config.disk_cache_memory.in_memory(),
        }),
        cold_read_bytes: config.cold_read_memory.bytes,
        object_store_bytes_per_s: config.object_store_rate.map_or(0, |rate| rate.bytes),
        background_threads: std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2)),
        compaction_bytes: config.compaction_size.bytes,
        ..alluvium_stream::Options::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeOptions;

    #[test]
    fn options_fit_the_smallest_log_that_is_allowed() {
        let small = wal_options(7, limits::WAL_CAPACITY_MIN);
        assert_eq!(small.node_id, 7);
        assert_eq!(small.window_bytes, (32 << 20) - (32 << 10));
        assert_eq!(u64::from(small.max_record_bytes), small.window_bytes / 2 - 8192);
        assert!(u64::from(small.max_record_bytes) > limits::MESSAGE_MAX.bytes);

        let large = wal_options(7, limits::WAL_CAPACITY);
        assert_eq!(large.window_bytes, alluvium_wal::Options::default().window_bytes);
        assert_eq!(large.max_record_bytes, alluvium_wal::Options::default().max_record_bytes);
    }

    #[test]
    fn a_new_data_directory_is_private_to_its_user() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("a/data");
        let _lock = lock_directory(&data).unwrap();
        assert_eq!(data.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        // An existing directory keeps its permissions.
        let theirs = dir.path().join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o755)).unwrap();
        let _lock = lock_directory(&theirs).unwrap();
        assert_eq!(theirs.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        let lock = theirs.join("lock").metadata().unwrap();
        assert_eq!(lock.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn the_disk_cache_is_used_only_if_configured() {
        let disk_cache = |asked: ServeOptions| {
            let config = ServeConfig::load(asked).unwrap();
            stream_options(&config, limits::WAL_CAPACITY).unwrap().disk_cache
        };
        assert_eq!(disk_cache(ServeOptions::default()), None);
        let asked = ServeOptions { disk_cache: Some("/fast".into()), ..Default::default() };
        let (directory, max_disk_bytes, memory_bytes) = ("/fast".into(), 16 << 30, 128 << 20);
        let expected = DiskCacheOptions { directory, max_disk_bytes, memory_bytes };
        assert_eq!(disk_cache(asked), Some(expected));
    }

    #[test]
    fn the_store_gets_the_configured_compaction_size() {
        let compaction_bytes = |text: &str| {
            let asked = ServeOptions { compaction_size: text.parse().ok(), ..Default::default() };
            let config = ServeConfig::load(asked).unwrap();
            stream_options(&config, limits::WAL_CAPACITY).unwrap().compaction_bytes
        };
        assert_eq!(compaction_bytes("default"), 256 << 20);
        assert_eq!(compaction_bytes("32GiB"), 32 << 30);
        assert_eq!(compaction_bytes("64KiB"), 64 << 10);
        assert_eq!(compaction_bytes("0"), 0);
        let default = alluvium_stream::Options::default();
        assert_eq!(compaction_bytes("default"), default.compaction_bytes);
    }
}
