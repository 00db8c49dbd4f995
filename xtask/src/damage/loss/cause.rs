//! What a drill loses: changes of the files of a server that has ended.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::super::files::{Content, Files, WAL};
use super::super::layout::{Block, Class, Extent, Object, SLOTS, object, wal_records};
use super::site::{Bucket, Site};
use crate::Error;
use crate::rng::Rng;

/// Bytes of an entry of an index, and entries of a page of it.
const ENTRY_BYTES: u64 = 56;
const PAGE_ENTRIES: usize = 73;
/// Pages of an index that are fetched at once.
const SMALL_PAGES: usize = 3;
/// The kind of a delta, in the header of an object of the chain.
const AT_KIND: usize = 16;
const DELTA: u8 = 2;

/// What is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    DataDirectory,
    Wal,
    WalAndData,
    NewestDelta,
    Delta,
    NewestSnapshot,
    Snapshots,
    Object,
    IndexPage,
    ObjectDirectory,
    /// A data object whose loss is accepted with a rebuild.
    AcceptedObject,
    Chain,
    ChainAndWal,
    /// A data object with its records, and a part of the catalog.
    ObjectAndDelta,
    ObjectAndChain,
    /// A record of the log, and a part of the catalog.
    RecordAndDelta,
}

/// How it is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    Deleted,
    Flipped,
    Truncated,
}

impl Lost {
    const ALL: [Self; 16] = [
        Self::DataDirectory,
        Self::Wal,
        Self::WalAndData,
        Self::NewestDelta,
        Self::Delta,
        Self::NewestSnapshot,
        Self::Snapshots,
        Self::Object,
        Self::IndexPage,
        Self::ObjectDirectory,
        Self::AcceptedObject,
        Self::Chain,
        Self::ChainAndWal,
        Self::ObjectAndDelta,
        Self::ObjectAndChain,
        Self::RecordAndDelta,
    ];

    /// Losses of the catalog or the log, which may follow one another.
    pub(super) const REBUILT: [(Self, How); 6] = [
        (Self::Wal, How::Deleted),
        (Self::NewestDelta, How::Flipped),
        (Self::Delta, How::Truncated),
        (Self::Chain, How::Deleted),
        (Self::Chain, How::Flipped),
        (Self::ChainAndWal, How::Deleted),
    ];

    /// Returns what is lost in each way that applies.
    pub(super) fn all() -> Vec<(Self, How)> {
        let ways = |lost| -> &[How] {
            match lost {
                Self::DataDirectory | Self::WalAndData | Self::ChainAndWal => &[How::Deleted],
                Self::AcceptedObject | Self::ObjectAndDelta | Self::ObjectAndChain => {
                    &[How::Deleted]
                }
                Self::IndexPage | Self::ObjectDirectory => &[How::Flipped],
                Self::RecordAndDelta => &[How::Flipped],
                _ => &[How::Deleted, How::Flipped, How::Truncated],
            }
        };
        Self::ALL
            .into_iter()
            .flat_map(|lost| ways(lost).iter().map(move |how| (lost, *how)))
            .collect()
    }

    pub(super) fn has_wal(self) -> bool {
        !matches!(self, Self::Wal | Self::WalAndData | Self::ChainAndWal)
    }

    pub(super) fn has_whole_chain(self) -> bool {
        matches!(self, Self::Chain | Self::ChainAndWal | Self::ObjectAndChain)
    }

    /// Whether a data object is damaged and nothing else, so that the server starts.
    pub(super) fn is_of_objects(self) -> bool {
        matches!(self, Self::Object | Self::IndexPage | Self::ObjectDirectory)
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DataDirectory => "the data directory",
            Self::Wal => "the log",
            Self::WalAndData => "the log and the data directory",
            Self::NewestDelta => "the newest delta",
            Self::Delta => "a delta",
            Self::NewestSnapshot => "the newest snapshot",
            Self::Snapshots => "all snapshots",
            Self::Object => "an object",
            Self::IndexPage => "a page of an index",
            Self::ObjectDirectory => "the directory of an object",
            Self::AcceptedObject => "an object whose loss is accepted",
            Self::Chain => "the chain",
            Self::ChainAndWal => "the chain and the log",
            Self::ObjectAndDelta => "an object and the newest delta",
            Self::ObjectAndChain => "an object and the chain",
            Self::RecordAndDelta => "a record of the log and the newest delta",
        })
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Deleted => "deleted",
            Self::Flipped => "flipped",
            Self::Truncated => "truncated",
        })
    }
}

/// What was done to a server's files.
#[derive(Default)]
pub(super) struct Done {
    pub(super) descriptions: Vec<String>,
    /// Numbers of fences and deltas that are lost.
    pub(super) numbers: BTreeSet<u64>,
    /// The data object that is damaged.
    pub(super) object: Option<DamagedObject>,
    /// What the damaged record of the log has.
    pub(super) record: Option<Extent>,
}

/// A data object that is damaged.
pub(super) struct DamagedObject {
    /// Its name without the directories.
    pub(super) name: String,
    pub(super) is_deleted: bool,
    /// What cannot be read of it, and what may be unreadable besides.
    pub(super) must: Vec<Extent>,
    pub(super) may: Vec<Extent>,
}

/// Damages the files of a server that does not run.
pub(super) fn apply(lost: Lost, how: How, site: &mut Site, rng: &mut Rng) -> Result<Done, Error> {
    let mut done = Done::default();
    let bucket = site.bucket.clone();
    match lost {
        Lost::DataDirectory => fs::remove_dir_all(site.data())?,
        Lost::Wal => lose_wal(how, site, rng)?,
        Lost::WalAndData => {
            lose_wal(how, site, rng)?;
            fs::remove_dir_all(site.data())?;
        }
        Lost::NewestDelta | Lost::Delta => {
            let is_delta =
                |path: &Path| fs::read(path).is_ok_and(|it| it.get(AT_KIND) == Some(&DELTA));
            let mut deltas = bucket.chain();
            deltas.retain(|(_, path)| is_delta(path));
            let newest_snapshot = bucket.snapshots().last().map_or(0, |(number, _)| *number);
            let count = deltas.len() as u64;
            // Those that the newest snapshot covers are not read at all.
            let covered = deltas.iter().filter(|(number, _)| *number <= newest_snapshot).count();
            let after = (count - covered as u64).max(1);
            let which = match lost {
                Lost::NewestDelta => count - 1,
                _ if rng.below(4) == 0 => rng.below(count),
                _ => count - 1 - rng.below(after),
            };
            let (number, path) = &deltas[which as usize];
            done.numbers.insert(*number);
            damage(path, how, rng, &mut done)?;
        }
        Lost::NewestSnapshot | Lost::Snapshots => {
            let all = bucket.snapshots();
            let chosen = match lost {
                Lost::NewestSnapshot => &all[all.len().saturating_sub(1)..],
                _ => &all[..],
            };
            for (_, path) in chosen {
                damage(path, how, rng, &mut done)?;
            }
        }
        Lost::Chain | Lost::ChainAndWal => {
            for (number, path) in bucket.chain() {
                done.numbers.insert(number);
                damage(&path, how, rng, &mut done)?;
            }
            for (_, path) in bucket.snapshots() {
                damage(&path, how, rng, &mut done)?;
            }
            done.descriptions.truncate(1);
            if lost == Lost::ChainAndWal {
                lose_wal(how, site, rng)?;
            }
        }
        Lost::ObjectAndDelta | Lost::ObjectAndChain => {
            let of_chain = match lost {
                Lost::ObjectAndDelta => Lost::NewestDelta,
                _ => Lost::Chain,
            };
            done = apply(of_chain, How::Flipped, site, rng)?;
            damage_object(Lost::Object, How::Deleted, &bucket, rng, &mut done)?;
        }
        Lost::RecordAndDelta => {
            done = apply(Lost::NewestDelta, How::Flipped, site, rng)?;
            flip_record(site, rng, &mut done)?;
        }
        Lost::AcceptedObject => damage_object(Lost::Object, how, &bucket, rng, &mut done)?,
        Lost::Object | Lost::IndexPage | Lost::ObjectDirectory => {
            damage_object(lost, how, &bucket, rng, &mut done)?;
        }
    }
    if done.descriptions.is_empty() {
        done.descriptions.push(format!("{lost}: {how}"));
    }
    Ok(done)
}

fn lose_wal(how: How, site: &mut Site, rng: &mut Rng) -> Result<(), Error> {
    let path = site.wal();
    match how {
        How::Deleted => return Ok(fs::remove_file(path)?),
        How::Flipped => {
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            for slot in SLOTS {
                flip(&file, slot + rng.below(128), rng)?;
            }
        }
        How::Truncated => {
            let file = OpenOptions::new().write(true).open(path)?;
            file.set_len(rng.below(file.metadata()?.len()))?;
        }
    }
    // The damaged one is kept, as an operator would.
    site.wal = "new-wal";
    Ok(())
}

/// Damages a record of a client in the log, if there is one.
fn flip_record(site: &Site, rng: &mut Rng, done: &mut Done) -> Result<(), Error> {
    let content = Content::new(fs::read(site.wal())?);
    let mut records = wal_records(&Files([(WAL.to_owned(), content)].into()));
    records.retain(|record| matches!(record.class, Class::Data | Class::Transactional));
    // What follows the record proves that it was there.
    let last = records.len().saturating_sub(8);
    if last == 0 {
        return Ok(());
    }
    let record = &records[rng.below(last as u64) as usize];
    let (at, len) = record.payload();
    let at = at + rng.below(len);
    flip(&OpenOptions::new().read(true).write(true).open(site.wal())?, at, rng)?;
    done.descriptions.push(format!("the log: byte {at}, {:?}", record.extent));
    done.record = Some(record.extent);
    Ok(())
}

fn flip(file: &fs::File, at: u64, rng: &mut Rng) -> Result<(), Error> {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    byte[0] ^= 1 << rng.below(8);
    Ok(file.write_all_at(&byte, at)?)
}

fn damage(path: &Path, how: How, rng: &mut Rng, done: &mut Done) -> Result<(), Error> {
    let len = fs::metadata(path)?.len();
    let what = match how {
        How::Deleted => {
            fs::remove_file(path)?;
            "deleted".to_owned()
        }
        // An earlier loss has truncated it.
        _ if len == 0 => "empty already".to_owned(),
        How::Flipped => {
            let at = rng.below(len);
            flip(&OpenOptions::new().read(true).write(true).open(path)?, at, rng)?;
            format!("a bit of byte {at} flipped")
        }
        How::Truncated => {
            let to = rng.below(len);
            OpenOptions::new().write(true).open(path)?.set_len(to)?;
            format!("truncated to {to} bytes")
        }
    };
    done.descriptions.push(format!("{}: {what}", path.display()));
    Ok(())
}

fn damage_object(
    lost: Lost,
    how: How,
    bucket: &Bucket,
    rng: &mut Rng,
    done: &mut Done,
) -> Result<(), Error> {
    let mut objects = Vec::new();
    for path in bucket.files_with("/streams/") {
        let content = Content::new(fs::read(&path)?);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        objects.extend(object(&name, &content).map(|object| (path, object)));
    }
    let is_large = |object: &Object| object.blocks.len() > SMALL_PAGES * PAGE_ENTRIES;
    if lost == Lost::IndexPage && rng.below(4) > 0 && objects.iter().any(|(_, it)| is_large(it)) {
        objects.retain(|(_, object)| is_large(object));
    }
    if objects.is_empty() {
        return Err("there is no object".into());
    }
    let (path, object) = &objects[rng.below(objects.len() as u64) as usize];
    let extents = |blocks: &[Block]| blocks.iter().map(|block| block.extent).collect::<Vec<_>>();
    let all = extents(&object.blocks);
    let (must, may) = match (lost, how) {
        (Lost::IndexPage, _) => {
            let pages = object.blocks.len().div_ceil(PAGE_ENTRIES);
            let page = rng.below(pages as u64) as usize;
            let blocks = object.blocks.chunks(PAGE_ENTRIES).nth(page).unwrap_or_default();
            let at = object.index.0 + (page * PAGE_ENTRIES) as u64 * ENTRY_BYTES;
            let at = at + rng.below(blocks.len() as u64 * ENTRY_BYTES);
            flip(&OpenOptions::new().read(true).write(true).open(path)?, at, rng)?;
            done.descriptions
                .push(format!("{}: page {page} of {pages}, byte {at}", path.display()));
            (extents(blocks), if pages > SMALL_PAGES { extents(blocks) } else { all })
        }
        (Lost::ObjectDirectory, _) => {
            let at = object.directory.0 + rng.below(object.directory.1);
            flip(&OpenOptions::new().read(true).write(true).open(path)?, at, rng)?;
            done.descriptions.push(format!("{}: directory, byte {at}", path.display()));
            (Vec::new(), Vec::new())
        }
        (_, How::Flipped) => {
            let block = &object.blocks[rng.below(object.blocks.len() as u64) as usize];
            let at = block.at + rng.below(block.len);
            flip(&OpenOptions::new().read(true).write(true).open(path)?, at, rng)?;
            done.descriptions.push(format!("{}: block, byte {at}", path.display()));
            (vec![block.extent], vec![block.extent])
        }
        (_, How::Truncated) => {
            // Part of the index at least.
            let to = rng.below(object.index.0 + object.index.1);
            OpenOptions::new().write(true).open(path)?.set_len(to)?;
            done.descriptions.push(format!("{}: truncated to {to}", path.display()));
            let cut = object.blocks.iter().filter(|block| block.at + block.len > to);
            (cut.map(|block| block.extent).collect(), all)
        }
        (_, How::Deleted) => {
            damage(path, How::Deleted, rng, done)?;
            (all.clone(), all)
        }
    };
    let (name, is_deleted) = (object.name.clone(), lost == Lost::Object && how == How::Deleted);
    done.object = Some(DamagedObject { name, is_deleted, must, may });
    Ok(())
}
