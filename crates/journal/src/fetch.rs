//! Reading the cold records of several keys: the required parts of their files are read
//! concurrently, and each record is then loaded as usual, from these pages instead of the disk.
//!
//! The pages are only an optimisation. Journals may be compressed, moved or removed meanwhile, and
//! frames come and go: what loading a record does not find in the pages is read from the disk.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_device::AlignedBuf;

use crate::error::{Error, Result};
use crate::files::{Directory, File, ReadAt};
use crate::journal::Journal;
use crate::memory;
use crate::position::Position;
use crate::unreadable::Unreadable;

/// Maximum number of reads in a batch.
pub(crate) const MOST_READS: usize = 32;
/// Maximum total bytes of a batch.
const MOST_BYTES: usize = 1 << 20;
/// A longer read is done by itself: the disk is busy with it for longer than it takes to submit the
/// next one.
const LONG_BYTES: usize = 256 << 10;
const _: () = assert!(LONG_BYTES <= MOST_BYTES);

/// Pages of a file that have been read.
pub(crate) struct Pages {
    file: Arc<dyn File>,
    at: usize,
    bytes: AlignedBuf,
}

impl Pages {
    fn has(&self, file: &dyn File, range: &Range<usize>) -> bool {
        let pages = self.at..self.at + self.bytes.len();
        ptr::addr_eq(Arc::as_ptr(&self.file), ptr::from_ref(file))
            && pages.start <= range.start
            && range.end <= pages.end
    }
}

/// Where records of a file are read from.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    file: &'a dyn File,
    /// The path of the file, for messages.
    path: &'a Path,
    /// Pages read before, of this file and of others.
    fetched: &'a [Pages],
    /// Counts disk reads, if set.
    reads: Option<&'a AtomicU64>,
    /// Collects unreadable ranges, if they are not errors.
    unreadable: Option<&'a Unreadable>,
}

impl<'a> Source<'a> {
    /// Creates a source of the file alone.
    pub(crate) fn file(file: &'a dyn File, path: &'a Path) -> Self {
        Self { file, path, fetched: &[], reads: None, unreadable: None }
    }

    /// Adds pages, which take precedence over the file; `reads` counts reads of the file.
    pub(crate) fn with(self, fetched: &'a [Pages], reads: &'a AtomicU64) -> Self {
        Self { fetched, reads: Some(reads), ..self }
    }

    /// Makes unreadable ranges read as zeroes and collects them.
    pub(crate) fn past(self, unreadable: &'a Unreadable) -> Self {
        Self { unreadable: Some(unreadable), ..self }
    }

    /// Allocates memory for a read.
    pub(crate) fn pages(&self, len_bytes: usize) -> Result<AlignedBuf> {
        memory::pages(len_bytes).map_err(self.no_memory())
    }

    pub(crate) fn no_memory(&self) -> impl FnOnce(io::Error) -> Error {
        Error::no_memory(self.path, "a read from it")
    }

    /// Reads as [`File::read_at`]; `action` is the operation named in an error.
    pub(crate) fn read_at(&self, at: usize, to: &mut [u8], action: &'static str) -> Result<()> {
        let range = at..at + to.len();
        if let Some(pages) = self.fetched.iter().find(|it| it.has(self.file, &range)) {
            to.copy_from_slice(&pages.bytes[at - pages.at..][..to.len()]);
            return Ok(());
        }
        if let Some(reads) = self.reads {
            reads.fetch_add(1, Ordering::Relaxed);
        }
        let read = match self.unreadable {
            Some(unreadable) => unreadable.read_past(self.file, at, to),
            None => self.file.read_at(at as u64, to),
        };
        read.map_err(Error::io(self.path, action))
    }
}

/// The reads of a batch: bounded in number and in bytes.
#[derive(Default)]
pub(crate) struct Batch {
    pages: Vec<Pages>,
    bytes: usize,
}

impl Batch {
    /// Adds the reads needed for the record at `position` of the journal; none if it is in memory,
    /// long, or already covered. False if it does not fit; anything fits an empty batch.
    pub(crate) fn add(&mut self, journal: &Journal, position: Position) -> bool {
        let Some(range) = journal.pages(position).filter(|it| it.len() <= LONG_BYTES) else {
            return true;
        };
        if self.pages.iter().any(|pages| pages.has(&*journal.file, &range)) {
            return true;
        }
        if self.pages.len() == MOST_READS || self.bytes + range.len() > MOST_BYTES {
            return false;
        }
        // Without memory for it the record is read by itself, or fails.
        let Ok(bytes) = memory::pages(range.len()) else { return true };
        journal.counts.disk_reads.fetch_add(1, Ordering::Relaxed);
        self.bytes += range.len();
        self.pages.push(Pages { file: journal.file.clone(), at: range.start, bytes });
        true
    }

    /// Performs all reads and waits for them. Failed ones are left out: loading the record reads
    /// again and reports the error.
    pub(crate) fn read(self, directory: &dyn Directory) -> Vec<Pages> {
        let mut all = self.pages;
        let reads = all.iter_mut().map(|pages| ReadAt {
            file: &*pages.file,
            at: pages.at as u64,
            to: &mut pages.bytes,
        });
        let mut results = directory.read_many(reads.collect()).into_iter();
        all.retain(|_| results.next().is_some_and(|result| result.is_ok()));
        all
    }
}
