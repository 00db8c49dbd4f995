//! Bases: servers with a long chain, two snapshots, compacted objects and an object whose index has
//! several pages. Drills begin with copies of them.

use std::fs;
use std::path::Path;

use super::super::image::{Load, prepare, step, wait_until};
use super::super::model::Partition;
use super::super::work::Worker;
use super::journal::Journal;
use super::site::{Bucket, Pace, Site, copy};
use crate::Error;
use crate::rng::Rng;
use crate::server::Ending;

/// Objects of a base's chain: a snapshot is written every 64.
const CHAIN: u64 = 134;
/// The topic with many partitions, which has an object with an index of several large pages.
pub(super) const WIDE: &str = "wide";
const WIDE_PARTITIONS: i32 = 230;
const PINNED: &str = "alluvium_log_cache_pinned_bytes";

/// A server that has ended, to copy.
pub(super) struct Base {
    pub(super) site: Site,
    pub(super) journal: Journal,
}

pub(super) fn wait_for_upload(process: &super::super::process::Process) -> Result<(), Error> {
    wait_until(process, PINNED, &|bytes| bytes == 0.0)
}

impl Base {
    /// Runs a server until its chain is long enough.
    pub(super) fn build(site: Site, compaction: bool, seed: u64) -> Result<Self, Error> {
        let mut rng = Rng::new(seed);
        let mut journal = Journal::default();
        fs::create_dir_all(&site.directory)?;
        let process = site.started(Pace::Fast { compaction })?;
        {
            let mut worker = Worker::new(process.address, &mut journal.model)?;
            for load in Load::ALL {
                prepare(&mut worker, load)?;
            }
        }
        journal.change(&site, process.address, &mut rng)?;
        while site.bucket.head() < CHAIN {
            let mut worker = Worker::new(process.address, &mut journal.model)?;
            for _ in 0..1 + rng.below(5) {
                let load = Load::ALL[rng.below(4) as usize];
                step(&mut worker, load, &mut rng, true)?;
            }
            if rng.below(2) == 0 {
                wait_for_upload(&process)?;
            }
            if rng.below(30) == 0 {
                journal.change(&site, process.address, &mut rng)?;
            }
        }
        process.end(Ending::Sigterm)?;
        // One upload, that of the next start, has all partitions of the wide topic.
        let process = site.started(Pace::Never)?;
        {
            let mut worker = Worker::new(process.address, &mut journal.model)?;
            worker.create_topic(WIDE, WIDE_PARTITIONS, &[])?;
            for index in 0..WIDE_PARTITIONS {
                let records = worker.records(1, 60 + rng.below(100) as usize, None);
                worker.produce(&Partition { topic: WIDE.into(), index }, records)?;
            }
        }
        process.end(Ending::Sigterm)?;
        let process = site.started(Pace::Fast { compaction: false })?;
        wait_for_upload(&process)?;
        process.end(Ending::Sigterm)?;
        journal.note_upload(site.bucket.head());
        Ok(Self { site, journal })
    }

    /// Copies the base.
    pub(super) fn copy(&self, directory: &Path, bucket: &Bucket) -> Result<(), Error> {
        copy(&self.site.directory, directory)?;
        // A base in a directory has its bucket in it.
        if !self.site.bucket.files.starts_with(&self.site.directory) {
            copy(&self.site.bucket.files, &bucket.files)?;
        }
        Ok(())
    }
}
