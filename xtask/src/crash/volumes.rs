//! Power cuts of all disks of three volume servers at once, under a writer: `cargo xtask crash`.
//!
//! A machine has a disk for the log and one for the store of each server, and one with the
//! registry in a file system. After each cut, `tools/volume_reader.py` reads what is left of logs
//! and stores: nothing may be damaged, and two of three servers must have each acknowledged
//! version. Then the machine starts again; all servers must open, their replicas must become exact,
//! and the volume must have what was acknowledged.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::blocks::Blocks;
use super::guest::{Config, Disk, Machine, Program};
use super::{Cut, Missing, prepare, run_until_cut, words};
use crate::Error;
use crate::exec::{output, quietly};
use crate::image::Image;
use crate::rng::Rng;
use crate::setup::{apt, runs};

const MIB: u64 = 1 << 20;
const SERVERS: usize = 3;
const MAJORITY: usize = 2;
/// Its ring is filled every few seconds.
const LOG_BYTES: u64 = 17 * MIB;
const STORE_BYTES: u64 = 64 * MIB;
const REGISTRY_BYTES: u64 = 64 * MIB;
/// The media of the disks: log and store of each server, and the registry.
const MEDIA: [&str; 2 * SERVERS + 1] =
    ["log1.img", "store1.img", "log2.img", "store2.img", "log3.img", "store3.img", "registry.img"];
/// Of `sim/src/bin/volumes.rs`.
const VOLUME_BYTES: u64 = (64 << 30) + 512 * 4096;
const VERSIONS_OF_ROUND: u64 = 1_000_000;

pub(super) struct Bench {
    seed: u64,
    rng: Rng,
    pub(super) directory: PathBuf,
    volumes: PathBuf,
    image: Image,
    /// `tools/volume_reader.py`, if there is Python.
    reader: Option<PathBuf>,
    blocks: Blocks,
    round: u64,
}

/// What a reader has found in logs and stores.
#[derive(Default)]
struct Left {
    /// Blocks that no majority has as was promised, and the first of them.
    behind: usize,
    example: Option<String>,
    /// The number of the last checkpoint of each server.
    checkpoints: Vec<u64>,
    /// What the reader has said of a log and a store that are damaged or do not agree.
    damage: Option<String>,
}

impl Bench {
    pub(super) fn prepare(root: &Path, seed: u64) -> Result<Self, Missing> {
        if !runs("mkfs.ext4", &["-V"]) {
            apt(&["e2fsprogs"], "the guest's file system")?;
        }
        let reader = runs("python3", &["--version"]).then(|| root.join("tools/volume_reader.py"));
        if reader.is_none() {
            println!("without tools/volume_reader.py: python3 is not installed");
        }
        let (directory, volumes, image) = prepare(root, Program::Volumes)?;
        let (blocks, rng) = (Blocks::default(), Rng::new(seed));
        Ok(Self { seed, rng, directory, volumes, image, reader, blocks, round: 0 })
    }

    /// Empties all disks. The servers format theirs.
    fn format(&mut self) -> Result<(), Error> {
        let sizes = [LOG_BYTES, STORE_BYTES].repeat(SERVERS);
        let paths = MEDIA.map(|medium| self.directory.join(medium));
        for (path, bytes) in paths.iter().zip(sizes.into_iter().chain([REGISTRY_BYTES])) {
            File::create(path)?.set_len(bytes)?;
        }
        quietly(Command::new("mkfs.ext4").arg("-qF").arg(&paths[2 * SERVERS]))?;
        self.blocks = Blocks::default();
        self.round = 0;
        Ok(())
    }

    /// Runs a machine until the power is cut.
    fn run(
        &mut self,
        disk: Disk,
        slow_flushes: bool,
        cut: Cut,
        more: &[&str],
    ) -> Result<(), Error> {
        self.round += 1;
        self.blocks.begin(self.round * VERSIONS_OF_ROUND);
        let numbers = [self.seed, self.rng.below(1 << 32), self.round];
        let [seed, load, round] = numbers.map(|number| number.to_string());
        let options = ["--registry", "/registry/file", "--seed", &seed, "--load", &load];
        let writer = words(&[&options[..], &["--round", &round], more].concat());
        let program = Program::Volumes;
        let config = Config { program, disk, media: &MEDIA, slow_flushes, writer: &writer };
        let machine = Machine::start(&self.image, &self.directory, &config)?;
        run_until_cut(machine, cut, "ready", |line| Ok(self.blocks.line(line)?))
    }

    /// Checks that servers that do not flush lose promised writes: otherwise this test could not
    /// fail.
    pub(super) fn control(&mut self) -> Result<(), Error> {
        if self.reader.is_none() {
            return Err("python3 is required".into());
        }
        self.format()?;
        let cut = Cut::Load(Duration::from_secs(2));
        self.run(Disk::Virtio, false, cut, &["--durability", "device"])?;
        let left = self.left()?;
        let acknowledged = self.blocks.acknowledged();
        let found = match left {
            Left { damage: Some(damage), .. } => damage,
            Left { behind: 0, .. } => {
                let error = format!("none of {acknowledged} writes was lost without flushes");
                return Err(error.into());
            }
            Left { behind, .. } => format!("{behind} blocks are behind"),
        };
        println!("{acknowledged} writes were acknowledged without flushes; {}", found.trim_end());
        Ok(())
    }

    pub(super) fn rounds(&mut self, rounds: u32) -> Result<(), Error> {
        self.format()?;
        for round in 1..=rounds {
            self.round().map_err(|error| format!("seed {}, round {round}: {error}", self.seed))?;
        }
        // What the last cut has left.
        self.run(Disk::Virtio, false, Cut::Load(Duration::ZERO), &[])
            .map_err(|error| format!("seed {}, the last start: {error}", self.seed))?;
        println!("{} writes were acknowledged, none was lost", self.blocks.acknowledged());
        Ok(())
    }

    fn round(&mut self) -> Result<(), Error> {
        let millis = Duration::from_millis;
        let disk = Disk::ALL[self.rng.below(2) as usize];
        let slow_flushes = self.rng.below(3) == 0;
        let cut = match self.rng.below(5) {
            // The first start formats the disks.
            0 if self.round > 0 => Cut::Opening(self.rng.duration(millis(0), millis(1500))),
            1 => Cut::Closed(1 + self.rng.below(200)),
            _ => Cut::Load(self.rng.duration(millis(0), millis(6000))),
        };
        let before = self.blocks.acknowledged();
        match cut {
            Cut::Closed(count) => {
                self.run(disk, slow_flushes, cut, &["--operations", &count.to_string()])?;
            }
            _ => self.run(disk, slow_flushes, cut, &[])?,
        }
        let acknowledged = self.blocks.acknowledged() - before;
        let left = self.left()?;
        if let Some(damage) = left.damage {
            return Err(damage.into());
        }
        if let Some(example) = left.example {
            let behind = left.behind;
            let error = format!("{behind} blocks are behind what was acknowledged: {example}");
            return Err(error.into());
        }
        let speed = if slow_flushes { ", slow flushes" } else { "" };
        println!(
            "round {}: {disk}{speed}, cut {cut}: {acknowledged} writes acknowledged, last \
             checkpoints {:?}",
            self.round, left.checkpoints
        );
        Ok(())
    }

    fn devices(&self, server: usize) -> [PathBuf; 2] {
        [0, 1].map(|which| self.directory.join(MEDIA[2 * server + which]))
    }

    /// Reads all logs and stores.
    fn left(&self) -> Result<Left, Error> {
        let mut left = Left::default();
        let Some(reader) = &self.reader else { return Ok(left) };
        let mut misses: BTreeMap<u64, Vec<String>> = BTreeMap::new();
        for server in 0..SERVERS {
            let mut check = Command::new("python3");
            check.arg(reader).arg("check").arg("--json").args(self.devices(server));
            let checked = check.output()?;
            let lines = String::from_utf8(checked.stdout)?;
            let lines = lines.lines().map(serde_json::from_str);
            let lines = lines.collect::<Result<Vec<Value>, _>>()?;
            if !checked.status.success() {
                let damage: Vec<_> = lines.iter().filter_map(|line| line.get("damage")).collect();
                let said = String::from_utf8_lossy(&checked.stderr);
                left.damage = Some(format!("server {}: {damage:?} {said}", server + 1));
                return Ok(left);
            }
            let last = lines.iter().find_map(|line| line["summary"]["last_checkpoint"].as_u64());
            left.checkpoints.push(last.ok_or("no summary")?);
            let replicas: Vec<_> = lines.iter().filter_map(|line| line.get("replica")).collect();
            let behind = if replicas.iter().any(|replica| replica["state"] != "exact") {
                // It is between two states, so its content shows nothing.
                Vec::new()
            } else if replicas.iter().all(|replica| replica["volumes"].get("1").is_none()) {
                self.blocks.all_behind()
            } else {
                self.behind(reader, server)?
            };
            for (block, why) in behind {
                misses.entry(block).or_default().push(format!("server {}: {why}", server + 1));
            }
        }
        // A majority must have each version.
        misses.retain(|_, misses| SERVERS - misses.len() < MAJORITY);
        left.behind = misses.len();
        let example = misses.into_iter().next();
        left.example = example.map(|(block, why)| format!("block {block}: {}", why.join(", ")));
        Ok(left)
    }

    /// The blocks of the volume that a server is behind in all entries of its log.
    fn behind(&self, reader: &Path, server: usize) -> Result<Vec<(u64, String)>, Error> {
        let image = self.directory.join("image");
        let mut read = Command::new("python3");
        read.arg(reader).arg("read").args(self.devices(server)).args(["--volume", "1"]);
        read.args(["--uncommitted", "--length", &VOLUME_BYTES.to_string(), "--out"]).arg(&image);
        quietly(&mut read)?;
        let mut held = Command::new(&self.volumes);
        held.arg("held").arg(&image).args(["--seed", &self.seed.to_string()]);
        let held = String::from_utf8(output(&mut held)?)?;
        fs::remove_file(&image)?;
        let behind = held.lines().map(|line| self.blocks.behind(line));
        Ok(behind.collect::<Result<Vec<_>, _>>()?.concat())
    }
}
