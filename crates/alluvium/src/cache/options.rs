//! Command-line options for opening a cache.

use alluvium_journal::{Compression, Durability, Options, WhenFull};
use clap::Args;

use crate::units::{Size, Span};

/// The options shared by the commands that open a cache for writing.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheArgs {
    /// Memory for journals, at least four of them; the index comes on top. A warning is logged if
    /// it is more than the machine has or the cgroup permits. Default 1GiB; for bench 3GiB.
    #[arg(long, value_name = "SIZE")]
    pub(super) memory: Option<Size>,
    /// Disk space for journals, at least eight of them.
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(16))]
    pub(super) max_disk: Size,
    /// Size of a journal, which limits a key with its value: 1MiB to 1GiB. An existing cache keeps
    /// its own size.
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(128))]
    pub(super) journal: Size,
    /// When a write is on stable storage: `always`, before it is answered; a TIME of 1ms or more,
    /// within that time plus the time of a sync, where writers that are faster than the disk wait
    /// for it; or `none`, at some later time without a bound.
    ///
    /// What can be lost: with `always` nothing. With a TIME, by SIGKILL and by a power cut alike,
    /// what was written within it and within the time that writing and syncing this takes: at most
    /// that TIME again at the recent speed of the disk, or the time for about 3MiB if that is
    /// longer. With `none`, by SIGKILL what was not yet written to its file: the last 1MiB, or up
    /// to --memory if writers are faster than the disk; by a power cut everything that the disk had
    /// not written on its own, possibly everything since the last journal was full.
    #[arg(long, value_name = "none|always|TIME", default_value = "none", value_parser = durability)]
    pub(super) durability: Durability,
    /// What happens when the disk space is used up: `evict` the oldest records except those that
    /// were read, or `refuse` writes.
    #[arg(long, value_name = "evict|refuse", default_value = "evict", value_parser = when_full)]
    pub(super) when_full: WhenFull,
    /// Compression of journals that are no longer in memory.
    #[arg(long, value_name = "none|lz4|zstd|snappy", default_value_t)]
    pub(super) compression: Compression,
}

/// Fields of [`Options`] that errors name, and the corresponding flags.
const FLAGS: [(&str, &str); 3] = [
    ("memory_bytes", "--memory"),
    ("max_disk_bytes", "--max-disk"),
    ("journal_bytes", "--journal"),
];

/// Replaces option names in an error by those of the command line.
pub(super) fn in_flags(reason: &str) -> String {
    FLAGS.iter().fold(reason.to_owned(), |reason, (field, flag)| reason.replace(field, flag))
}

impl CacheArgs {
    /// Returns the memory for journals.
    pub(super) fn memory(&self, default_memory: Size) -> Size {
        self.memory.unwrap_or(default_memory)
    }

    /// Returns the options of the cache.
    pub(super) fn options(&self, default_memory: Size) -> Options {
        Options {
            memory_bytes: self.memory(default_memory).in_memory(),
            max_disk_bytes: self.max_disk.bytes,
            journal_bytes: self.journal.in_memory(),
            durability: self.durability,
            when_full: self.when_full,
            compression: self.compression,
            ..Options::default()
        }
    }
}

fn durability(text: &str) -> Result<Durability, String> {
    match text {
        "none" => Ok(Durability::None),
        "always" => Ok(Durability::Always),
        time => match time.parse::<Span>()? {
            Span(interval) if interval.is_zero() => {
                Err("a sync takes some time: at least 1ms, or `always`".into())
            }
            Span(interval) => Ok(Durability::Interval(interval)),
        },
    }
}

fn when_full(text: &str) -> Result<WhenFull, String> {
    match text {
        "evict" => Ok(WhenFull::Evict),
        "refuse" => Ok(WhenFull::Refuse),
        other => Err(format!("`{other}` is neither `evict` nor `refuse`")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use alluvium_journal::Cache;
    use clap::Parser;

    use super::*;
    use crate::output::Failure;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: CacheArgs,
    }

    #[test]
    fn a_sync_interval_below_one_millisecond_is_refused() {
        for text in ["0ms", "0s"] {
            let error = durability(text).unwrap_err();
            assert!(error.contains("at least 1ms, or `always`"), "{error}");
        }
        let least = Duration::from_millis(1);
        assert_eq!(durability("1ms"), Ok(Durability::Interval(least)));
        assert!(Cli::try_parse_from(["x", "--durability", "0ms"]).is_err());
    }

    #[test]
    fn option_errors_name_the_flags_of_the_command_line() {
        let directory = tempfile::tempdir().unwrap();
        for (flags, expected) in [
            (["--memory", "1MiB", "--journal", "1MiB"], "--memory is 1048576; with journals of"),
            (["--max-disk", "4MiB", "--journal", "1MiB"], "--max-disk is 4194304; with journals"),
            (["--memory", "1GiB", "--journal", "5KiB"], "--journal is 5120; it must be 1 MiB"),
        ] {
            let Cli { args } = Cli::try_parse_from(["x"].iter().chain(&flags)).unwrap();
            let error = Cache::open(directory.path(), args.options(Size::gib(1))).unwrap_err();
            let Failure::Usage(message) = Failure::from(error) else { panic!("{flags:?}") };
            assert!(message.contains(expected) && !message.contains("_bytes"), "{message}");
        }
    }
}
