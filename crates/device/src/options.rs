//! Options for opening a target.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The access mode of a target and the locking that goes with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Read-only, without a lock and regardless of other openers. Writes and flushes fail.
    ReadOnly,
    /// Read and write as the only opener: `O_EXCL` on a block device, an exclusive `flock` on a
    /// file.
    #[default]
    Exclusive,
}

/// How a write is made durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Flush or FUA where the target has, or may have, a volatile cache (as every regular file
    /// does); otherwise rely on Direct I/O.
    #[default]
    Auto,
    /// Always flush or FUA.
    Dsync,
    /// Trust the device: a write counts as durable once the device has accepted it. For disks whose
    /// cache survives a power failure (cloud disks, SSDs with power-loss protection). On any other
    /// disk a power failure loses acknowledged data.
    Device,
}

/// The mechanism that passes requests to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring, or threads where the kernel or the container refuses it.
    #[default]
    Auto,
    /// io_uring; opening fails if it is refused.
    IoUring,
    /// Threads.
    Threads,
}

/// A callback with bytes done and bytes in total.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Options for opening a target.
#[derive(Clone)]
pub struct OpenOptions {
    /// Access mode. Default: [`Access::Exclusive`].
    pub access: Access,
    /// How writes are made durable. Default: [`Durability::Auto`].
    pub durability: Durability,
    /// The engine that serves requests. Default: [`Engine::Auto`].
    pub engine: Engine,
    /// Requests in flight in the kernel; more wait in the engine's queue. Default 8, range 1 to
    /// 1024.
    pub io_depth: usize,
    /// If the target does not exist, create a regular file and write it to this size (a positive
    /// multiple of [`PAGE_BYTES`](crate::PAGE_BYTES)); if it exists, its minimum size. Default:
    /// none.
    pub create_bytes: Option<u64>,
    /// Called on the opening thread while a new file is pre-written. Default: none.
    pub progress: Option<Progress>,
    /// Size of a pooled buffer, a positive multiple of [`PAGE_BYTES`](crate::PAGE_BYTES). Larger
    /// requests to [`crate::Device::alloc`] are served from the heap. Default 272 KiB: a block of
    /// 256 KiB plus its header and padding.
    pub buffer_bytes: usize,
    /// Number of pooled buffers. With io_uring they are registered with the kernel, which counts
    /// them against `RLIMIT_MEMLOCK` (8 MiB by default). Default 16.
    pub buffers: usize,
    /// Bytes of heap buffers, beyond the pooled ones, that are kept for reuse instead of being
    /// freed. Default 64 MiB, which is reached only if that much is in use at the same time.
    pub max_spare_bytes: usize,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            access: Access::default(),
            durability: Durability::default(),
            engine: Engine::default(),
            io_depth: 8,
            create_bytes: None,
            progress: None,
            buffer_bytes: 272 * 1024,
            buffers: 16,
            max_spare_bytes: 64 * 1024 * 1024,
        }
    }
}

impl fmt::Debug for OpenOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenOptions")
            .field("access", &self.access)
            .field("durability", &self.durability)
            .field("engine", &self.engine)
            .field("io_depth", &self.io_depth)
            .field("create_bytes", &self.create_bytes)
            .field("progress", &self.progress.is_some())
            .field("buffer_bytes", &self.buffer_bytes)
            .field("buffers", &self.buffers)
            .field("max_spare_bytes", &self.max_spare_bytes)
            .finish()
    }
}

impl Durability {
    /// Whether durable writes flush, given whether the device has a volatile cache.
    pub(crate) fn flushes(self, volatile_cache: bool) -> bool {
        match self {
            Self::Auto => volatile_cache,
            Self::Dsync => true,
            Self::Device => false,
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Dsync => "dsync",
            Self::Device => "device",
        })
    }
}

impl FromStr for Durability {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "dsync" => Ok(Self::Dsync),
            "device" => Ok(Self::Device),
            _ => Err(format!("unknown durability `{s}`: expected auto, dsync or device")),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        })
    }
}

impl FromStr for Engine {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::IoUring),
            "threads" => Ok(Self::Threads),
            _ => Err(format!("unknown engine `{s}`: expected auto, io_uring or threads")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durability_and_cache_determine_whether_writes_flush() {
        let table = [
            (Durability::Auto, true, true),
            (Durability::Auto, false, false),
            (Durability::Dsync, true, true),
            (Durability::Dsync, false, true),
            (Durability::Device, true, false),
            (Durability::Device, false, false),
        ];
        for (durability, volatile_cache, flushes) in table {
            assert_eq!(
                durability.flushes(volatile_cache),
                flushes,
                "{durability}, {volatile_cache}"
            );
        }
    }

    #[test]
    fn parsing_accepts_the_displayed_names() {
        for durability in [Durability::Auto, Durability::Dsync, Durability::Device] {
            assert_eq!(durability.to_string().parse(), Ok(durability));
        }
        for engine in [Engine::Auto, Engine::IoUring, Engine::Threads] {
            assert_eq!(engine.to_string().parse(), Ok(engine));
        }
        let error = "fsync".parse::<Durability>().unwrap_err();
        assert_eq!(error, "unknown durability `fsync`: expected auto, dsync or device");
        let error = "aio".parse::<Engine>().unwrap_err();
        assert_eq!(error, "unknown engine `aio`: expected auto, io_uring or threads");
    }
}
