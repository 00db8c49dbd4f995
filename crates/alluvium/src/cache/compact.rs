//! `alluvium cache compact`: reclaims the space of dead records now.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use alluvium_journal::{Cache, Compression, Options, WhenFull};
use clap::Args;

use super::memory;
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::units::{Size, about, counted};

/// Rewrite the live records of each journal that contains anything else, and remove the journal. No
/// other process may have the cache open.
///
/// In use, a cache reclaims overwritten and deleted records when they are most of a journal, and
/// expired ones when the disk space is used up; this command reclaims all of the space at once.
/// Compressed records are written plain until the cache is in use again; a journal stays if that
/// would take more space than it does. Needs disk space for two journals. Nothing is evicted: the
/// disk budget with which the cache is used does not apply here.
///
/// Exit codes: 0 done, even if journals that are damaged or unreadable stay as they are; 1 failed,
/// or the cache is in use; 2 wrong usage, or there is no cache.
#[derive(Args, Debug)]
pub(crate) struct CompactArgs {
    /// The cache's directory.
    directory: PathBuf,
    /// Memory for journals, at least four of them.
    #[arg(long, value_name = "SIZE", default_value_t = Size::gib(1))]
    memory: Size,
    /// Print JSON. Default: two lines.
    #[arg(long)]
    json: bool,
}

/// Additional disk budget: more than the newest journal, its successor and the minimum of a cache
/// take, whatever the size of its journals.
const EXTRA_DISK: Size = Size::gib(16);
/// The unit in which the system reports the disk space of a file.
const SECTOR_BYTES: u64 = 512;

/// The files of a cache, and their disk space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OnDisk {
    journals: u64,
    bytes: u64,
}

impl OnDisk {
    fn of(directory: &Path) -> Result<Self, Failure> {
        let failed = |error| Failure::Usage(format!("{}: {error}", directory.display()));
        let mut found = Self::default();
        for entry in directory.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            found.journals += u64::from(entry.path().extension().is_some_and(|it| it == "journal"));
            found.bytes += entry.metadata().map_err(failed)?.blocks() * SECTOR_BYTES;
        }
        Ok(found)
    }
}

/// Runs `alluvium cache compact`.
///
/// # Errors
/// There is no cache, it is open elsewhere, or compaction fails.
pub(crate) fn run(args: &CompactArgs) -> Result<(), Failure> {
    memory::check(args.memory);
    let directory = &args.directory;
    let before = OnDisk::of(directory)?;
    let options = Options {
        memory_bytes: args.memory.in_memory(),
        max_disk_bytes: before.bytes.saturating_add(EXTRA_DISK.bytes),
        when_full: WhenFull::Refuse,
        compression: Compression::None,
        create: false,
        ..Options::default()
    };
    let cache = Cache::open(directory, options)?;
    let entries = cache.stats().entries;
    let meter = Meter::new(format!("compacting {}", directory.display()));
    let report = meter.callback();
    let compacted = cache.compact(|it| {
        let journals = it.journals.max(1) as u64;
        report(before.bytes / journals * it.done as u64, before.bytes);
    })?;
    drop(meter);
    cache.close()?;
    let after = OnDisk::of(directory)?;
    if args.json {
        return output::json(&serde_json::json!({
            "entries": entries,
            "journals_before": before.journals,
            "bytes_before": before.bytes,
            "journals_after": after.journals,
            "bytes_after": after.bytes,
            "rewritten": compacted.rewritten,
            "damaged": compacted.damaged,
        }));
    }
    let print = |when: &str, on_disk: OnDisk| {
        let journals = counted(on_disk.journals, "journal", "journals");
        output::line(format_args!("{when} {journals}, {} on disk", about(on_disk.bytes)))
    };
    print("before:", before)?;
    print("after: ", after)?;
    if compacted.damaged > 0 {
        let journals =
            counted(compacted.damaged as u64, "damaged journal stays", "damaged journals stay");
        output::line(format_args!("{journals} as before: `alluvium cache verify` lists them"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(directory: &Path) -> CompactArgs {
        CompactArgs { directory: directory.to_owned(), memory: Size::mib(8), json: false }
    }

    #[test]
    fn the_space_of_deleted_records_is_reclaimed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let options =
            Options { journal_bytes: 1 << 20, memory_bytes: 8 << 20, ..Options::default() };
        let cache = Cache::open(path, options.clone()).unwrap();
        for key in 0..6000u64 {
            cache.put(&key.to_le_bytes(), &[1; 1000]).unwrap();
        }
        for key in (0..6000u64).step_by(2) {
            assert!(cache.delete(&key.to_le_bytes()).unwrap());
        }
        cache.close().unwrap();
        let before = OnDisk::of(path).unwrap();
        run(&args(path)).unwrap();
        let after = OnDisk::of(path).unwrap();
        assert!(after.bytes < before.bytes * 2 / 3, "{before:?}, {after:?}");
        let cache = Cache::open(path, options).unwrap();
        assert_eq!(cache.stats().entries, 3000);
        assert!(
            (0..6000u64)
                .all(|key| { cache.contains(&key.to_le_bytes()).unwrap() == (key % 2 == 1) })
        );
        let Err(Failure::Failed(error)) = run(&args(path)) else { panic!("the cache is in use") };
        assert!(error.contains("in use by another process"), "{error}");
    }

    #[test]
    fn a_directory_without_a_cache_is_refused_and_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(run(&args(directory.path())), Err(Failure::Usage(_))));
        assert!(matches!(run(&args(&directory.path().join("none"))), Err(Failure::Usage(_))));
        assert!(!directory.path().join("cache").exists());
    }
}
