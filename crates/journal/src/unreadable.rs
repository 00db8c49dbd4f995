//! What the disk cannot deliver of a file. It is damage as where a checksum is wrong: of the file
//! these bytes are missing, and no others. Any other error of a read (too many open files, no
//! memory, no access) says nothing of the data.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::path::Path;

use alluvium_device::PAGE_BYTES;
use rustix::io::Errno;

use crate::error::Error;
use crate::files::File;
use crate::shared::CHUNK_BYTES;

/// What Linux says where it cannot deliver what is there: of a sector, past the page cache
/// `ENODATA` if the disk calls it the medium, `EILSEQ` if an integrity check fails on the way; of a
/// file system's own checksums and structures the others.
const OF_MEDIA: [Errno; 5] = [Errno::IO, Errno::NODATA, Errno::ILSEQ, Errno::BADMSG, Errno::UCLEAN];

/// A disk may try each of them for seconds. After so many reads of a file have failed, what cannot
/// be read is not divided below a chunk.
const MOST_FAILED: usize = 256;

/// Whether an error of a read says that the bytes cannot be delivered.
pub(crate) fn is_of_media(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| OF_MEDIA.iter().any(|it| it.raw_os_error() == code))
}

/// Whether it is such a read that a call has failed by.
pub(crate) fn is_unreadable(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if is_of_media(source))
}

/// What could not be read of one file, until now.
#[derive(Debug, Default)]
pub(crate) struct Unreadable {
    /// Bytes of the file, in the order in which they were met.
    ranges: RefCell<Vec<Range<usize>>>,
    failed: RefCell<Failed>,
}

#[derive(Debug, Default)]
struct Failed {
    reads: usize,
    /// The last one.
    error: Option<io::Error>,
}

impl Unreadable {
    /// As [`File::read_at`]. Zeroes stand for the pages that cannot be read, which are noted.
    ///
    /// # Errors
    /// What says nothing of the data.
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

    /// How many bytes behind `end` cannot be read.
    pub(crate) fn bytes_behind(&self, end: usize) -> usize {
        self.ranges
            .borrow()
            .iter()
            .map(|range| range.end.saturating_sub(range.start.max(end)))
            .sum()
    }

    /// Where they are, for whoever looks after the disk.
    pub(crate) fn tell(&self, path: &Path) {
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

    /// Of ones, in which some pages cannot be read.
    struct Spotted {
        bad: Vec<usize>,
        error: Errno,
        reads: AtomicUsize,
    }

    impl File for Spotted {
        fn len_bytes(&self) -> io::Result<u64> {
            unreachable!("nobody asks")
        }

        fn read_at(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            let pages = at as usize / PAGE_BYTES..(at as usize + to.len()) / PAGE_BYTES;
            to.fill(1);
            let is_bad = self.bad.iter().any(|page| pages.contains(page));
            if is_bad { Err(self.error.into()) } else { Ok(()) }
        }

        fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
            unreachable!("it is read")
        }

        fn sync(&self) -> io::Result<()> {
            unreachable!("it is read")
        }

        fn truncate(&self, _: u64) -> io::Result<()> {
            unreachable!("it is read")
        }
    }

    fn spotted(bad: impl IntoIterator<Item = usize>, error: Errno) -> Spotted {
        Spotted { bad: bad.into_iter().collect(), error, reads: AtomicUsize::new(0) }
    }

    /// Reads so many pages from page 1 on; which ones are missing, as ranges of pages.
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
    fn all_but_the_pages_that_can_not_be_read_is_read() {
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

    /// Of a disk that fails everywhere nobody waits for each page; where it is read again what is
    /// there is found.
    #[test]
    fn what_can_not_be_read_is_divided_for_so_long() {
        let file = spotted(1..10_000, Errno::IO);
        let missing = missing(&file, 20_000);
        // Up to the end of a part.
        let most = 10_000 + CHUNK_BYTES / PAGE_BYTES;
        assert!(matches!(missing[..], [Range { start: 1, end }] if end < most), "{missing:?}");
        assert!(file.reads.into_inner() < 500);
    }

    #[test]
    fn what_is_behind_an_end_is_counted() {
        let unreadable = Unreadable::default();
        for range in [10..20, 20..30, 50..60] {
            unreadable.add(range);
        }
        let behind = [0, 25, 30, 55, 60].map(|end| unreadable.bytes_behind(end));
        assert_eq!(behind, [30, 15, 10, 5, 0]);
    }
}
