//! File descriptors: a process may have a limited number of files open, and a cache that cannot
//! create its next journal accepts no writes. Connections therefore leave enough descriptors to the
//! journals.

use crate::output::Failure;

/// Descriptors for everything except connections and journals: the runtime, the ports, metrics
/// requests (32, `admin/visits.rs`), the log, hints, and journals being compressed.
const OTHER_FILES: u64 = 64;
/// Compressed journals are smaller, and there may be up to this many times as many
/// (`docs/journal-cache.md`, "Limits").
const MAX_COMPRESSED_RATIO: u64 = 8;

/// The descriptors that journals need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Journals {
    /// When none is compressed: with fewer the cache cannot use all of its disk space.
    pub(super) plain: u64,
    pub(super) are_compressed: bool,
}

/// Returns how many of the wanted connections are possible with this many descriptors.
///
/// # Errors
/// There are not enough for the journals.
pub(super) fn connections(files: u64, wanted: u32, journals: Journals) -> Result<u32, Failure> {
    let Journals { plain, are_compressed } = journals;
    let max_journals =
        if are_compressed { plain.saturating_mul(MAX_COMPRESSED_RATIO) } else { plain };
    let files_left = files.saturating_sub(OTHER_FILES);
    // If descriptors are scarce, journals get half of them: more journals than that are evicted
    // when there is no descriptor for the next one.
    let for_journals = max_journals.min(plain.max(files_left / 2));
    let available = files_left.saturating_sub(for_journals);
    if available == 0 {
        return Err(Failure::Usage(format!(
            "up to {plain} journals and {OTHER_FILES} other files are more than the {files} \
             that this process may have open: raise the limit (ulimit -n), or have fewer journals \
             (--max-disk) or larger ones (--journal, of a new cache)"
        )));
    }
    if available < u64::from(wanted) {
        tracing::warn!(
            "at most {available} connections, not {wanted}: this process may have {files} files \
             open, of which journals take up to {for_journals}"
        );
    }
    Ok(u32::try_from(available).unwrap_or(u32::MAX).min(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_to_the_journals() {
        let plain = |plain| Journals { plain, are_compressed: false };
        let compressed = |plain| Journals { plain, are_compressed: true };
        for (files, journals, expected) in [
            (1 << 20, plain(128), Some(10_000)),
            (1 << 20, compressed(16_384), Some(10_000)),
            // The maximum number of journals.
            (4096, compressed(128), Some(4096 - 64 - 1024)),
            // Half of the descriptors.
            (1024, compressed(128), Some(480)),
            (1024, plain(128), Some(1024 - 64 - 128)),
            // The minimum that the journals need.
            (200, compressed(128), Some(8)),
            (193, compressed(128), Some(1)),
            (192, compressed(128), None),
            (64, plain(1), None),
            (0, plain(8), None),
        ] {
            let got = connections(files, 10_000, journals);
            assert_eq!(got.ok(), expected, "{files}, {journals:?}");
        }
    }
}
