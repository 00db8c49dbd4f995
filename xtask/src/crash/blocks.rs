//! Compares the blocks of a volume with what its writer was promised. Pure; no I/O. The lines are
//! those of `sim/src/bin/volumes.rs`.
//!
//! A block is written by one worker, each time with a higher version. Once it was read after a
//! start, versions that were issued before the read and not returned by it cannot come back: the
//! attachment that issued them is fenced.

use std::collections::{BTreeMap, BTreeSet};

/// What is known of a block.
#[derive(Clone, Debug, Default)]
struct Block {
    /// The newest version that was acknowledged or read.
    floor: u64,
    /// The versions that are zeros. Version 0 is, too.
    zeros: BTreeSet<u64>,
    /// All versions below it but `floor` have no effect any more.
    settled: u64,
}

impl Block {
    /// Returns the version that a content stands for; 0 are zeros.
    fn version(&self, content: u64) -> Result<u64, String> {
        let Self { floor, zeros, settled } = self;
        let version = match content {
            0 if *floor == 0 => 0,
            0 => {
                let possible = zeros.iter().find(|version| *version >= floor);
                *possible.ok_or_else(|| format!("version {floor} is lost: zeros were read"))?
            }
            version if version < *floor => {
                return Err(format!("version {floor} is lost: version {version} was read"));
            }
            version if zeros.contains(&version) => {
                return Err(format!("version {version} are zeros, and data were read"));
            }
            version => version,
        };
        match version != *floor && version < *settled {
            true => Err(format!("version {version} was read, and {floor} by an earlier start")),
            false => Ok(version),
        }
    }
}

/// The promises of all rounds so far.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    blocks: BTreeMap<u64, Block>,
    acknowledged: u64,
    /// The first version of this round.
    first: u64,
}

impl Blocks {
    /// A round begins, whose versions are not below `first`.
    pub(super) fn begin(&mut self, first: u64) {
        self.first = first;
    }

    /// The number of operations that were acknowledged.
    pub(super) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Adds one line of the writer. An error is a broken promise, or not a line of a writer.
    pub(super) fn line(&mut self, line: &str) -> Result<(), String> {
        let (what, numbers) = line.split_once(' ').unwrap_or((line, ""));
        if let ("failed", _) | ("opening" | "ready" | "closed", "") = (what, numbers) {
            return Ok(());
        }
        let wrong = || format!("not a writer's line: {line:?}");
        let numbers: Result<Vec<u64>, _> = numbers.split(' ').map(str::parse).collect();
        match (what, &*numbers.map_err(|_| wrong())?) {
            ("held", [first, versions @ ..]) => {
                for (number, content) in (*first..).zip(versions) {
                    let block = self.blocks.entry(number).or_default();
                    let version = block.version(*content);
                    block.floor = version.map_err(|error| format!("block {number}: {error}"))?;
                    block.settled = self.first;
                    let floor = block.floor;
                    block.zeros.retain(|zeros| *zeros == floor);
                }
            }
            ("zeros", [first, count, version]) => {
                for number in *first..first + count {
                    self.blocks.entry(number).or_default().zeros.insert(*version);
                }
            }
            ("acked", [first, count, version]) => {
                self.acknowledged += 1;
                for number in *first..first + count {
                    let block = self.blocks.entry(number).or_default();
                    if *version <= block.floor {
                        let floor = block.floor;
                        return Err(format!("{version} was acknowledged after {floor}: {line:?}"));
                    }
                    block.floor = *version;
                    // What was issued before it is answered: nothing overlapping is in flight.
                    block.zeros.retain(|zeros| zeros >= version);
                }
            }
            _ => return Err(wrong()),
        }
        Ok(())
    }

    /// Compares a line `held` of what a server has, in which uncommitted entries may be that a
    /// later start does not have. Returns the blocks that are behind what was promised, and why.
    pub(super) fn behind(&self, line: &str) -> Result<Vec<(u64, String)>, String> {
        let wrong = || format!("not a line of versions: {line:?}");
        let numbers = line.strip_prefix("held ").ok_or_else(wrong)?.split(' ').map(str::parse);
        let numbers = numbers.collect::<Result<Vec<u64>, _>>().map_err(|_| wrong())?;
        let (first, versions) = numbers.split_first().ok_or_else(wrong)?;
        let blocks = (*first..).zip(versions).filter_map(|(number, content)| {
            let block = self.blocks.get(&number).cloned().unwrap_or_default();
            Some((number, block.version(*content).err()?))
        });
        Ok(blocks.collect())
    }

    /// The blocks that a server is behind of which nothing is left.
    pub(super) fn all_behind(&self) -> Vec<(u64, String)> {
        let written = self
            .blocks
            .iter()
            .filter_map(|(number, block)| Some((*number, block.version(0).err()?)));
        written.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(lines: &[&str]) -> Blocks {
        let mut blocks = Blocks::default();
        blocks.begin(10);
        for line in lines {
            blocks.line(line).expect(line);
        }
        blocks
    }

    const WRITTEN: [&str; 6] =
        ["opening", "held 0 0 0 0", "ready", "acked 0 2 10", "acked 1 2 12", "acked 0 1 13"];

    #[test]
    fn acknowledged_versions_must_survive_and_newer_ones_may() {
        for held in ["held 0 13 12 12", "held 0 13 15 12", "held 1 12"] {
            after(&WRITTEN).line(held).expect(held);
        }
        for held in ["held 0 10 12 12", "held 0 13 10 12", "held 0 13 12 0", "held 2 11"] {
            let error = after(&WRITTEN).line(held).expect_err(held);
            assert!(error.contains("is lost"), "{error}");
            assert_eq!(after(&WRITTEN).behind(held).unwrap().len(), 1, "{held}");
        }
    }

    #[test]
    fn zeros_are_a_version() {
        let mut blocks = after(&WRITTEN);
        blocks.line("zeros 0 1 14").unwrap();
        for held in ["held 0 13", "held 0 0", "held 0 15"] {
            assert_eq!(blocks.behind(held).unwrap(), [], "{held}");
        }
        assert!(blocks.line("held 0 14").is_err(), "version 14 has no data");
        blocks.line("acked 0 1 14").unwrap();
        assert!(blocks.line("held 0 13").is_err());
        blocks.line("held 0 0").unwrap();
    }

    #[test]
    fn what_a_start_has_not_read_does_not_come_back() {
        let mut blocks = after(&WRITTEN);
        blocks.line("zeros 0 1 14").unwrap();
        blocks.begin(20);
        blocks.line("held 0 13 12").unwrap();
        for held in ["held 0 0", "held 0 15", "held 1 13"] {
            assert!(blocks.line(held).is_err(), "{held}");
        }
        blocks.line("held 0 21 12").unwrap();
    }

    #[test]
    fn a_comparison_changes_nothing() {
        let blocks = after(&WRITTEN);
        assert_eq!(blocks.behind("held 0 15 15 15").unwrap(), []);
        assert_eq!(blocks.behind("held 0 13 12 12").unwrap(), []);
        let all: Vec<u64> = blocks.all_behind().into_iter().map(|(block, _)| block).collect();
        assert_eq!(all, [0, 1, 2]);
    }

    #[test]
    fn only_a_writers_lines_are_accepted() {
        for line in ["", "held x", "acked 1", "acked 1 1 x", "panicked", "zeros 1 2"] {
            assert!(Blocks::default().line(line).is_err(), "{line:?}");
        }
        assert!(after(&WRITTEN).line("acked 0 1 13").is_err(), "versions go up");
        after(&WRITTEN).line("failed the device is gone").unwrap();
    }
}
