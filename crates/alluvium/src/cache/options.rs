//! How a cache is opened, as a person says it.

use alluvium_journal::{Compression, Durability, Options, WhenFull};
use clap::Args;

use crate::units::{Size, Span};

/// What the commands that open a cache to write to it have in common.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheArgs {
    /// Memory for journals, at least four of them; the index comes on top. Default 1GiB, of the bench 3GiB.
    #[arg(long, value_name = "SIZE")]
    pub(super) memory: Option<Size>,
    /// Disk space for journals, at least eight of them.
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(16))]
    pub(super) max_disk: Size,
    /// Size of a journal, and so bound of a key with its value: 1MiB to 1GiB. Of a cache that is there its own counts.
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(128))]
    pub(super) journal: Size,
    /// When a write is on stable storage: `none`, `always`, or after a time.
    #[arg(long, value_name = "none|always|TIME", default_value = "none", value_parser = durability)]
    pub(super) durability: Durability,
    /// What happens when the disk space is used up: `evict` the oldest records, but for those that were read, or `refuse` writes.
    #[arg(long, value_name = "evict|refuse", default_value = "evict", value_parser = when_full)]
    pub(super) when_full: WhenFull,
    /// What journals are compressed with that are not in memory any more.
    #[arg(long, value_name = "none|lz4|zstd|snappy", default_value_t)]
    pub(super) compression: Compression,
}

impl CacheArgs {
    /// The same in the words of the crate.
    pub(super) fn options(&self, default_memory: Size) -> Options {
        Options {
            memory_bytes: bytes(self.memory.unwrap_or(default_memory)),
            max_disk_bytes: self.max_disk.bytes,
            journal_bytes: bytes(self.journal),
            durability: self.durability,
            when_full: self.when_full,
            compression: self.compression,
            ..Options::default()
        }
    }
}

/// A size in memory.
pub(super) fn bytes(size: Size) -> usize {
    usize::try_from(size.bytes).unwrap_or(usize::MAX)
}

fn durability(text: &str) -> Result<Durability, String> {
    match text {
        "none" => Ok(Durability::None),
        "always" => Ok(Durability::Always),
        time => time.parse::<Span>().map(|span| Durability::Interval(span.0)),
    }
}

fn when_full(text: &str) -> Result<WhenFull, String> {
    match text {
        "evict" => Ok(WhenFull::Evict),
        "refuse" => Ok(WhenFull::Refuse),
        other => Err(format!("`{other}` is neither `evict` nor `refuse`")),
    }
}
