//! Cold records of several keys: what has to be read of their files for them is read at one time,
//! and each record is loaded as ever, from these pages in place of the disk.
//!
//! What is read is no more than advice. Journals may be compressed, moved or removed meanwhile, and
//! frames come and go; whoever loads a record and finds what he needs not among the pages reads it.

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
use crate::place::Place;
use crate::unreadable::Unreadable;

/// Reads of a batch.
pub(crate) const MOST_READS: usize = 32;
/// Their bytes together.
const MOST_BYTES: usize = 1 << 20;
/// What is longer is read by itself: the disk is busy with it for longer than it takes to ask for
/// the next one.
const LONG_BYTES: usize = 256 << 10;
const _: () = assert!(LONG_BYTES <= MOST_BYTES);

/// Pages of a file that were read.
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
    /// Its own, for messages.
    path: &'a Path,
    /// Pages that were read already, of this file and of others.
    fetched: &'a [Pages],
    /// Counts the reads of the disk, if somebody wants to know.
    reads: Option<&'a AtomicU64>,
    /// Notes what cannot be read, if that is no error.
    unreadable: Option<&'a Unreadable>,
}

impl<'a> Source<'a> {
    /// The file alone.
    pub(crate) fn file(file: &'a dyn File, path: &'a Path) -> Self {
        Self { file, path, fetched: &[], reads: None, unreadable: None }
    }

    /// These pages, and the file where they do not have what is wanted; `reads` counts that.
    pub(crate) fn with(self, fetched: &'a [Pages], reads: &'a AtomicU64) -> Self {
        Self { fetched, reads: Some(reads), ..self }
    }

    /// Zeroes stand for what cannot be read, which is noted.
    pub(crate) fn past(self, unreadable: &'a Unreadable) -> Self {
        Self { unreadable: Some(unreadable), ..self }
    }

    /// Memory for what is read of it.
    pub(crate) fn pages(&self, len_bytes: usize) -> Result<AlignedBuf> {
        memory::pages(len_bytes).map_err(self.no_memory())
    }

    pub(crate) fn no_memory(&self) -> impl FnOnce(io::Error) -> Error {
        Error::no_memory(self.path, "what is read of it")
    }

    /// As [`File::read_at`]; `action` says what for, if it fails.
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

/// What is to be read at one time: bounded in number and in bytes.
#[derive(Default)]
pub(crate) struct Batch {
    pages: Vec<Pages>,
    bytes: usize,
}

impl Batch {
    /// Add what has to be read for the record at `place`, which is one of the journal's; nothing,
    /// if that is in memory, long, or among the rest. False if there is no room for it; a batch
    /// with nothing in it has room.
    pub(crate) fn add(&mut self, journal: &Journal, place: Place) -> bool {
        let Some(range) = journal.pages(place).filter(|it| it.len() <= LONG_BYTES) else {
            return true;
        };
        if self.pages.iter().any(|pages| pages.has(&*journal.file, &range)) {
            return true;
        }
        if self.pages.len() == MOST_READS || self.bytes + range.len() > MOST_BYTES {
            return false;
        }
        // Without memory for it the record is read by itself, or cannot be.
        let Ok(bytes) = memory::pages(range.len()) else { return true };
        journal.counts.disk_reads.fetch_add(1, Ordering::Relaxed);
        self.bytes += range.len();
        self.pages.push(Pages { file: journal.file.clone(), at: range.start, bytes });
        true
    }

    /// Read all, and wait for it. What could not be read is left out: whoever needs it reads it by
    /// itself, and tells what is wrong.
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
