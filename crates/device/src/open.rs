//! Opening a device: the target, the buffer pool and the engine.

use std::path::Path;
use std::sync::Arc;

use crate::buffer::{PAGE_BYTES, Pool};
use crate::engine::Core;
use crate::engine::threads::Threads;
use crate::engine::uring::Uring;
use crate::options::{Access, Durability, Engine, OpenOptions};
use crate::target::Target;
use crate::{Geometry, OpenError, SharedDevice};

/// Opens the block device or regular file at `path`. Blocks while a new file is pre-written.
///
/// # Errors
/// The target does not exist and [`OpenOptions::create_bytes`] is not set; it is in use elsewhere;
/// it is too small or unsuitable; or [`Engine::IoUring`] was requested and io_uring is refused. A
/// failed creation leaves no file behind.
///
/// # Panics
/// A numeric option is outside its documented range. Callers that take options from a user check
/// them first.
pub fn open(path: &Path, options: &OpenOptions) -> Result<SharedDevice, OpenError> {
    assert!(
        (1..=1024).contains(&options.io_depth),
        "io_depth {} is not within 1..=1024",
        options.io_depth
    );
    assert!(
        options.buffer_bytes > 0 && options.buffer_bytes.is_multiple_of(PAGE_BYTES),
        "buffer_bytes {} is not a positive multiple of a page",
        options.buffer_bytes
    );
    let target = Target::open(path, options)?;
    let failed = |action| move |source| OpenError::Io { path: path.to_owned(), action, source };
    let pool = Pool::new(options.buffer_bytes, options.buffers, options.max_spare_bytes)
        .map_err(failed("mapping the buffer pool"))?;
    let core = |engine| Core::new(geometry(path, options, &target, engine), target.claim.clone());
    if options.durability == Durability::Device && options.access == Access::Exclusive {
        tracing::warn!(
            "{}: durability `device`: writes are acknowledged without a flush; a power failure \
             loses acknowledged data unless the device's cache survives it",
            path.display()
        );
    }
    if options.engine != Engine::Threads {
        let fd = target.fd.try_clone().map_err(failed("duplicating the descriptor"))?;
        match Uring::start(fd, core("io_uring"), pool.clone(), options.io_depth) {
            Ok(device) => return Ok(Arc::new(device)),
            Err(source) if options.engine == Engine::IoUring => {
                return Err(failed("setting up io_uring")(source));
            }
            Err(source) => {
                tracing::warn!("{}: io_uring is refused ({source}); using threads", path.display());
            }
        }
    }
    let core = core("threads");
    let device = Threads::start(target.fd, core, pool, options.io_depth)
        .map_err(failed("starting I/O threads"))?;
    Ok(Arc::new(device))
}

fn geometry(path: &Path, options: &OpenOptions, target: &Target, engine: &'static str) -> Geometry {
    Geometry {
        name: path.display().to_string(),
        capacity_bytes: target.capacity_bytes,
        logical_block_bytes: target.logical_block_bytes,
        block_device: target.block_device,
        volatile_cache: target.volatile_cache,
        flushes: options.durability.flushes(target.volatile_cache),
        read_only: options.access == Access::ReadOnly,
        engine,
    }
}
