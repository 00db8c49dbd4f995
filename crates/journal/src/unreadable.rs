//! Unreadable parts of a file. They are damage, like bytes with a wrong checksum: exactly these
//! bytes of the file are missing. Any other error of a read (too many open files, no memory, no
//! access) says nothing about the data.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::path::Path;

use alluvium_device::PAGE_BYTES;
use rustix::io::Errno;

use crate::error::Error;
use crate::files::File;
use crate::shared::CHUNK_BYTES;

/// The errors of Linux for data that cannot be delivered. With Direct I/O: `ENODATA` for a medium
/// error reported by the disk, `EILSEQ` for a failed integrity check on the way. The others:
/// checksums and structures of the file system.
const OF_MEDIA: [Errno; 5] = [Errno::IO, Errno::NODATA, Errno::ILSEQ, Errno::BADMSG, Errno::UCLEAN];

/// A disk may retry each read for seconds. After this many failed reads of a file, unreadable
/// ranges are not divided below a chunk.
const MOST_FAILED: usize = 256;

/// Returns whether an error of a read means that the bytes cannot be delivered.
pub(crate) fn is_of_media(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| OF_MEDIA.iter().any(|it| it.raw_os_error() == code))
}

/// Returns whether a call failed with such an error.
pub(crate) fn is_unreadable(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if is_of_media(source))
}

/// The unreadable parts of one file found so far.
#[derive(Debug, Default)]
pub(crate) struct Unreadable {
    /// Byte ranges of the file, in the order in which they were found.
    ranges: RefCell<Vec<Range<usize>>>,
    failed: RefCell<Failed>,
}

#[derive(Debug, Default)]
struct Failed {
    reads: usize,
    /// The last error.
    error: Option<io::Error>,
}

impl Unreadable {
    /// Reads as [`File::read_at`]. Unreadable pages become zeroes and are collected.
    ///
    /// # Errors
    /// Errors that say nothing about the data.
    pub(crate) fn read_past(&self, file: &dyn File, at: usize, to: &mut [u8]) -> io::Result<()> {
        let error = match file.read_at(at as u64, to) {
            Err(error) if is_of_media(&error) => error,
            read => return read,
        };
        let mut failed = self.failed.borrow_mut();
        failed.reads += 1;
        failed.error = Some(error);
        let is_enough = failed.reads > MOST_FAILED && to.len() <= CHUNK_BYTES;
        drop(failed);
        if is_enough || to.len() <= PAGE_BYTES {
            to.fill(0);
            self.add(at..at + to.len());
            return Ok(());
        }
        let half = to.len() / PAGE_BYTES / 2 * PAGE_BYTES;
        let (first, second) = to.split_at_mut(half);
        self.read_past(file, at, first)?;
        self.read_past(file, at + half, second)
    }

    fn add(&self, range: Range<usize>) {
        let mut ranges = self.ranges.borrow_mut();
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.borrow().is_empty()
    }

    /// Returns how many bytes after `end` cannot be read.
    pub(crate) fn bytes_after(&self, end: usize) -> usize {
        self.ranges
            .borrow()
            .iter()
            .map(|range| range.end.saturating_sub(range.start.max(end)))
            .sum()
    }

    /// Logs the unreadable ranges, for the operator of the disk.
    pub(crate) fn log(&self, path: &Path) {
        let failed = self.failed.borrow();
        let Some(error) = &failed.error else { return };
        for Range { start, end } in &*self.ranges.borrow() {
            let (path, len) = (path.display(), end - start);
            tracing::warn!(
                "journal cache: {path}, byte {start}: {len} bytes cannot be read: {error}"
            );
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A file of ones with unreadable pages.
    struct Spotted {
        bad: Vec<usize>,
        error: Errno,
        reads: AtomicUsize,
    }

    impl File for Spotted {
        fn len_bytes(&self) -> io::Result<u64> {
            unreachable!("not called")
        }

        fn read_at(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            let pages = at as usize / PAGE_BYTES..(at as usize + to.len()) / PAGE_BYTES;
            to.fill(1);
            let is_bad = self.bad.iter().any(|page| pages.contains(page));
            if is_bad { Err(self.error.into()) } else { Ok(()) }
        }

        fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
            unreachable!("only read")
        }

        fn sync(&self) -> io::Result<()> {
            unreachable!("only read")
        }

        fn truncate(&self, _: u64) -> io::Result<()> {
            unreachable!("only read")
        }
    }

    fn spotted(bad: impl IntoIterator<Item = usize>, error: Errno) -> Spotted {
        Spotted { bad: bad.into_iter().collect(), error, reads: AtomicUsize::new(0) }
    }

    /// Reads this many pages from page 1 on; returns the missing ones, as ranges of pages.
    fn missing(file: &Spotted, pages: usize) -> Vec<Range<usize>> {
        let (unreadable, mut bytes) = (Unreadable::default(), vec![7; pages * PAGE_BYTES]);
        unreadable.read_past(file, PAGE_BYTES, &mut bytes).unwrap();
        let ranges = unreadable.ranges.into_inner();
        for (at, page) in (1..).zip(bytes.chunks(PAGE_BYTES)) {
            let is_missing = ranges.iter().any(|range| range.contains(&(at * PAGE_BYTES)));
            assert!(page.iter().all(|byte| *byte == u8::from(!is_missing)), "page {at}");
        }
        ranges.into_iter().map(|it| it.start / PAGE_BYTES..it.end / PAGE_BYTES).collect()
    }

    #[test]
    fn all_readable_pages_are_read() {
        for error in OF_MEDIA {
            let file = spotted([3, 40, 41, 999], error);
            assert_eq!(missing(&file, 999), [3..4, 40..42, 999..1000], "{error}");
            assert!(file.reads.into_inner() < 80);
        }
        assert_eq!(missing(&spotted([], Errno::IO), 10), []);
        assert_eq!(missing(&spotted([1, 2, 3, 5], Errno::IO), 5), [1..4, 5..6]);
    }

    #[test]
    fn other_errors_are_errors() {
        for error in [Errno::MFILE, Errno::NOMEM, Errno::ACCESS, Errno::AGAIN, Errno::NODEV] {
            let unreadable = Unreadable::default();
            let read = unreadable.read_past(&spotted([3], error), 0, &mut [0; 8 * PAGE_BYTES]);
            assert_eq!(read.unwrap_err().raw_os_error(), Some(error.raw_os_error()));
            assert!(unreadable.is_empty());
        }
        assert!(!is_of_media(&io::ErrorKind::UnexpectedEof.into()));
    }

    /// On a disk that fails everywhere, not every page is tried; readable data behind the bad range
    /// is found.
    #[test]
    fn the_search_for_unreadable_pages_is_bounded() {
        let file = spotted(1..10_000, Errno::IO);
        let missing = missing(&file, 20_000);
        // Up to the end of a part.
        let most = 10_000 + CHUNK_BYTES / PAGE_BYTES;
        assert!(matches!(missing[..], [Range { start: 1, end }] if end < most), "{missing:?}");
        assert!(file.reads.into_inner() < 500);
    }

    #[test]
    fn unreadable_bytes_after_the_end_are_counted() {
        let unreadable = Unreadable::default();
        for range in [10..20, 20..30, 50..60] {
            unreadable.add(range);
        }
        let after = [0, 25, 30, 55, 60].map(|end| unreadable.bytes_after(end));
        assert_eq!(after, [30, 15, 10, 5, 0]);
    }
}
