//! What a server stands on: data directory, catalog, write-ahead log, object store. Found or made,
//! and checked to belong together before anything is written to any of them.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use alluvium_device::{Access, OpenOptions, SharedDevice};
use alluvium_stream::{Catalog, Change, DiskCacheOptions, RedbCatalog};
use alluvium_wal::{FormatOptions, HeaderInfo, OpenError, Wal};
use object_store::ObjectStore;
use uuid::Uuid;

use crate::admin::Health;
use crate::config::{ServeConfig, limits};
use crate::objects::ObjectStoreUrl;
use crate::output::Failure;
use crate::progress::Meter;
use crate::units::{Size, counted};

/// The catalog in a data directory.
pub(crate) const CATALOG_FILE: &str = "catalog.redb";

/// Opened and checked, not recovered yet.
pub(crate) struct Storage {
    pub(crate) device: SharedDevice,
    pub(crate) wal_options: alluvium_wal::Options,
    pub(crate) catalog: Arc<dyn Catalog>,
    pub(crate) objects: Arc<dyn ObjectStore>,
    pub(crate) options: alluvium_stream::Options,
    /// Held as long as the server runs: one server per data directory.
    pub(crate) lock: File,
}

impl Storage {
    /// Open all parts. What is missing is made: directory, catalog, write-ahead log. Blocks while a
    /// new log is pre-written.
    ///
    /// # Errors
    /// A part cannot be opened, holds something else, or belongs to another server.
    pub(crate) fn open(config: &ServeConfig, health: &Arc<Health>) -> Result<Self, Failure> {
        if !config.wal.exists() {
            // Known before a file is pre-written, so said before.
            stream_options(config, config.wal_capacity.unwrap_or(limits::WAL_CAPACITY))?;
        }
        let catalog_path = config.data_dir.join(CATALOG_FILE);
        let is_first = !catalog_path.exists();
        if is_first {
            // Known before anything is made.
            health.begin("asking the object store");
            crate::objects::check(&config.object_store, None, &|_| true)?;
        }
        let lock = lock_directory(&config.data_dir)?;
        health.begin("opening the catalog");
        let catalog = RedbCatalog::open(&catalog_path).map_err(Failure::new)?.with_reserve();
        // Recovery reads all of it, and writes nothing before. Only what would be written here has
        // to be certain here: a catalog without a log is small.
        let wal_id = match catalog.wal_id().map_err(Failure::new)? {
            Some(wal_id) => Some(wal_id),
            None => catalog.load().map_err(Failure::new)?.wal_id,
        };
        let bound = wal_id.is_some();
        if !is_first {
            health.begin("asking the object store");
            check_objects(config, &catalog, wal_id)?;
        }
        health.begin("opening the log");
        let (device, header) = open_wal(config, bound, health)?;
        if !bound {
            check_unused(config, &header, &catalog_path)?;
        }
        let capacity = Size { bytes: header.capacity_bytes };
        let options = stream_options(config, capacity)?;
        let objects = crate::objects::open(&config.object_store)?;
        if !bound {
            // Before the log is opened for the first time, so that one that was opened is bound,
            // whenever the server is killed.
            catalog.commit(&[Change::BindWal(header.wal_id)]).map_err(Failure::new)?;
        }
        let wal_options = wal_options(config.node_id, capacity);
        let wal_options = alluvium_wal::Options { reserve: config.wal_reserve, ..wal_options };
        Ok(Self { device, wal_options, catalog: Arc::new(catalog), objects, options, lock })
    }
}

/// The object store of a catalog that knows objects: one that has none of them is another one, or
/// is not mounted, whatever else is there. Uploads would go there, and the log be trimmed, and
/// whoever sets it right would miss those.
fn check_objects(
    config: &ServeConfig,
    catalog: &RedbCatalog,
    wal_id: Option<Uuid>,
) -> Result<(), Failure> {
    let names = catalog.object_names().map_err(Failure::new)?;
    let is_known = |name: &str| names.is_empty() || names.contains(name);
    if crate::objects::check(&config.object_store, wal_id, &is_known)? != Some(false) {
        return Ok(());
    }
    let snapshot = catalog.load().map_err(Failure::new)?;
    let ranges = snapshot.streams.values().flat_map(|stream| &stream.ranges);
    match ranges.map(|range| range.object).max().and_then(|id| snapshot.objects.get(&id)) {
        None => check_mark(config, wal_id),
        Some(newest) => Err(Failure::Failed(format!(
            "object store {}: none of the objects is there in which the catalog in {} has records, {} for one. Is it another one, or not mounted? If they are \
             lost for good, put anything there under that name, an empty file for instance, to start without them",
            config.object_store,
            config.data_dir.display(),
            newest.name
        ))),
    }
}

/// Refuses a directory that no server has opened if the catalog has been in use with an object
/// store: nothing of the catalog is in it, and the objects that would be uploaded to it would be
/// missing once its file system is mounted. The object store is opened before a log is bound to the
/// catalog.
fn check_mark(config: &ServeConfig, wal_id: Option<Uuid>) -> Result<(), Failure> {
    match &config.object_store {
        ObjectStoreUrl::Directory(directory)
            if wal_id.is_some() && !alluvium_stream::is_marked(directory) =>
        {
            Err(Failure::Failed(format!(
                "object store {}: no server has used this directory, and the catalog in {} is not new. Is its file system not mounted, or is it \
                 another directory? If objects are to be stored there, put an empty file named {} into it",
                directory.display(),
                config.data_dir.display(),
                alluvium_stream::MARK
            )))
        }
        _ => Ok(()),
    }
}

/// Lock the directory for this process, and leave its id there for who wants to signal it. The lock
/// goes with the process; the id stays.
pub(crate) fn lock_directory(directory: &Path) -> Result<File, Failure> {
    let failed = |action: &str, error: std::io::Error| {
        Failure::Failed(format!("data directory {}: {action}: {error}", directory.display()))
    };
    // What lies in it, what is kept of passwords for one, is nobody else's on the machine. (Who
    // wants it otherwise makes the directory.)
    let parents = directory.parent().map_or(Ok(()), std::fs::create_dir_all);
    let made = parents.and_then(|()| DirBuilder::new().mode(0o700).create(directory));
    let created = made.or_else(|error| if directory.is_dir() { Ok(()) } else { Err(error) });
    created.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            Failure::Failed(format!("data directory {}: is not a directory", directory.display()))
        }
        _ => failed("cannot be created", error),
    })?;
    // Not truncated before the lock is held: what is in there is the other one's.
    let mut lock = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        // Who may open it may hold it.
        .mode(0o600)
        .open(directory.join("lock"))
        .map_err(|error| failed("its lock file cannot be opened", error))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let _ = lock.read_to_string(&mut holder);
            return Err(Failure::Failed(format!(
                "data directory {}: another alluvium is using it (process {})",
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

/// The write-ahead log, formatted if it is new. `bound`: the catalog belongs to a log already.
///
/// | the target | catalog without a log | catalog bound to a log |
/// |---|---|---|
/// | does not exist | created and formatted | refused: its log is missing |
/// | blank | formatted | refused: its log was erased |
/// | a write-ahead log | opened, refused if it was in use | opened; recovery refuses another one than the catalog's |
/// | something else | refused, formatted with --force-format | refused |
/// | a damaged or unknown header | refused | refused |
fn open_wal(
    config: &ServeConfig,
    bound: bool,
    health: &Arc<Health>,
) -> Result<(SharedDevice, HeaderInfo), Failure> {
    let path = config.wal.display();
    let missing = !config.wal.exists();
    let catalog_needs = |what: &str| {
        Failure::Failed(format!(
            "{path} {what}, but the catalog in {} belongs to a write-ahead log: acknowledged records are in there. Point --wal \
             to it",
            config.data_dir.display()
        ))
    };
    let occupied = |looks_like: &str| {
        Failure::Failed(format!(
            "{path} holds {looks_like}, not a write-ahead log. If that may be overwritten, give --force-format"
        ))
    };
    if missing && bound {
        return Err(catalog_needs("does not exist"));
    }
    let device = open_device(config, missing, health)?;
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
        Err(OpenError::NotFormatted { .. }) if bound => return Err(catalog_needs("is blank")),
        // The header slots are blank; `format` looks further, and says what it finds.
        Err(OpenError::NotFormatted { .. }) => format(config.force_format)?,
        Err(OpenError::NotAWal { .. }) if bound => {
            return Err(catalog_needs("holds something else"));
        }
        Err(OpenError::NotAWal { .. }) if config.force_format => format(true)?,
        Err(OpenError::NotAWal { looks_like, .. }) => return Err(occupied(&looks_like)),
        Err(other) => return Err(other.into()),
    };
    Ok((device, header))
}

/// A new catalog may take a log that nobody has used, and no other: even if it is empty, another
/// catalog is bound to it, and whatever that one says of topics and objects is the other half of
/// what the log holds.
fn check_unused(
    config: &ServeConfig,
    header: &HeaderInfo,
    catalog_path: &Path,
) -> Result<(), Failure> {
    if header.epoch == 0 {
        return Ok(());
    }
    let path = config.wal.display();
    Err(Failure::Failed(format!(
        "{path} holds the write-ahead log {}, which was opened {} with another catalog, and {} is a new one. Point \
         --data-dir to the catalog that belongs to it. If what the log holds is not wanted: `alluvium wal format --force {path}`",
        header.wal_id,
        counted(header.epoch, "time", "times"),
        catalog_path.display()
    )))
}

fn open_device(
    config: &ServeConfig,
    create: bool,
    health: &Arc<Health>,
) -> Result<SharedDevice, Failure> {
    let capacity = config.wal_capacity.unwrap_or(limits::WAL_CAPACITY);
    if create {
        tracing::info!("creating {}: {capacity}, written in full", config.wal.display());
    }
    let meter = Meter::new(format!("pre-writing {}", config.wal.display()));
    let shown = meter.callback();
    let options = OpenOptions {
        access: Access::Exclusive,
        durability: config.durability,
        engine: config.engine,
        create_bytes: create.then_some(capacity.bytes),
        progress: Some(if create { health.progress("writing the log", shown) } else { shown }),
        ..OpenOptions::default()
    };
    let device = alluvium_device::open(&config.wal, &options)?;
    drop(meter);
    let geometry = device.geometry();
    tracing::info!(
        "write-ahead log: {}, a {} of {}, by {}, {}",
        geometry.name,
        if geometry.block_device { "block device" } else { "file" },
        Size { bytes: geometry.capacity_bytes },
        geometry.engine,
        match (geometry.flushes, geometry.volatile_cache) {
            (true, _) => "each write is flushed",
            (false, true) => "no write is flushed, although it may have a volatile cache",
            (false, false) => "no flush: the device states no volatile cache",
        },
    );
    Ok(device)
}

/// The option is for a new log. No error: the log may have been resized under a server that was
/// started with it, and has to start again.
fn compare_capacity(config: &ServeConfig, header: &HeaderInfo) {
    let there = Size { bytes: header.capacity_bytes };
    if let Some(asked) = config.wal_capacity
        && asked != there
    {
        tracing::warn!(
            "wal-capacity is {asked}, but the write-ahead log in {path} has {there}, and keeps it. Leave the option out, or change the log: \
             `alluvium wal resize --target {path} --capacity {asked}`",
            path = config.wal.display()
        );
    }
}

/// The log's defaults, lowered to what a small ring allows.
fn wal_options(node_id: u32, capacity: Size) -> alluvium_wal::Options {
    /// Bytes in front of the ring; see `docs/format/wal.md`.
    const DATA_START_BYTES: u64 = 64 << 10;
    let half_ring = capacity.bytes.saturating_sub(DATA_START_BYTES) / 2;
    let window_bytes = alluvium_wal::Options::default().window_bytes.min(half_ring);
    alluvium_wal::Options { node_id, ..with_window(Size { bytes: window_bytes }) }
}

/// The log's defaults with this window, rounded down to a page, and with blocks and records lowered
/// to what it allows.
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

/// The store's options with a log of `capacity`.
pub(crate) fn stream_options(
    config: &ServeConfig,
    capacity: Size,
) -> Result<alluvium_stream::Options, Failure> {
    let quarter = Size { bytes: capacity.bytes / 4 };
    let half_cache = Size { bytes: config.log_cache.bytes / 2 };
    let upload_size = match config.upload_size {
        Some(asked) if asked > quarter => {
            return Err(Failure::Usage(format!(
                "upload-size is {asked}, allowed is at most {quarter}: a quarter of the write-ahead log of {capacity}"
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
            memory_bytes: usize::try_from(config.disk_cache_memory.bytes).unwrap_or(usize::MAX),
        }),
        cold_read_bytes: config.late_read_memory.bytes,
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
    fn a_new_data_directory_is_its_users_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("a/data");
        let _lock = lock_directory(&data).unwrap();
        assert_eq!(data.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        // One that is there keeps its rights.
        let theirs = dir.path().join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o755)).unwrap();
        let _lock = lock_directory(&theirs).unwrap();
        assert_eq!(theirs.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        let lock = theirs.join("lock").metadata().unwrap();
        assert_eq!(lock.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn there_is_a_disk_cache_where_one_is_asked_for() {
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
    fn the_store_gets_the_size_that_was_asked_for() {
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
