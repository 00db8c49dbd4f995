//! Runs `tools/volume_reader.py`, which was written from `docs/format/volume-log.md` and
//! `docs/format/volume-store.md` alone, on the devices of real servers that were killed. Where its
//! result differs from what was acknowledged, a document, a server or the reader is wrong.

mod support;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use alluvium_device::sim::Random;
use rustix::process::Signal;
use serde_json::Value;
use support::cluster::Cluster;
use support::nbd::Nbd;
use support::{Server, contains, python_is_there, random_bytes, until};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// A region of a volume, which is one raft group.
const REGION: u64 = 64 << 30;
const VOLUME_BYTES: u64 = REGION + 64 * MIB;
/// Where something is written: from the start of each region on.
const USED_BYTES: u64 = 34 * MIB;
const SERVERS: std::ops::RangeInclusive<usize> = 1..=3;
/// `docs/format/wal.md`, section 2.
const WAL_DATA_START: u64 = 64 << 10;
/// `docs/format/volume-store.md`, section 2, for a store of 64 MiB.
const STORE_DATA_START: u64 = 2 * MIB;
const SLOT: u64 = 256 << 10;

/// What the volume has: all blocks that are not zeros.
#[derive(Default)]
struct Model(BTreeMap<u64, Vec<u8>>);

impl Model {
    fn put(&mut self, at: u64, data: &[u8]) {
        let (mut at, mut data) = (at, data);
        while !data.is_empty() {
            let block = self.0.entry(at / BLOCK).or_insert_with(|| vec![0; BLOCK as usize]);
            let within = (at % BLOCK) as usize;
            let (now, later) = data.split_at(data.len().min(block.len() - within));
            block[within..][..now.len()].copy_from_slice(now);
            (at, data) = (at + now.len() as u64, later);
        }
    }

    fn zero(&mut self, at: u64, len: u64) {
        self.put(at, &vec![0; len as usize]);
    }

    fn content(&self, at: u64, len: u64) -> Vec<u8> {
        let mut content = vec![0; len as usize];
        for (block, data) in self.0.range(at / BLOCK..(at + len) / BLOCK) {
            content[(block * BLOCK - at) as usize..][..data.len()].copy_from_slice(data);
        }
        content
    }
}

/// A volume in two groups, with several checkpoints and writes since the last one. The first MiB
/// was written once, before the first checkpoint.
fn written(cluster: &Cluster) -> (Vec<Server>, Server, Model) {
    let servers = SERVERS.map(|server| cluster.start(server)).collect();
    cluster.ok(&["create", "disk", "--size", &VOLUME_BYTES.to_string()]);
    let socket = cluster.path("nbd.sock");
    let export = cluster.export("disk", &socket, &[]);
    let mut nbd = Nbd::open(&socket);
    let mut model = Model::default();
    let mut random = Random::new(40);
    let mut write = |nbd: &mut Nbd, at: u64, data: &[u8]| {
        assert_eq!(nbd.write(at, data).unwrap(), 0, "a write at {at}");
        model.put(at, data);
    };
    write(&mut nbd, 0, &random_bytes(&mut random, MIB as usize));
    for _ in 0..48 {
        let at = MIB + random.below(USED_BYTES - 2 * MIB) / 512 * 512;
        write(&mut nbd, at, &random_bytes(&mut random, MIB as usize));
    }
    for _ in 0..40 {
        let at = random.below(2) * REGION + MIB + random.below(MIB) / 512 * 512;
        let len = 512 * (1 + random.below(40));
        write(&mut nbd, at, &random_bytes(&mut random, len as usize));
    }
    for number in 0..8 {
        let at = number % 2 * REGION + MIB + 32 * BLOCK * number;
        let len = BLOCK * (1 + number);
        match number < 4 {
            true => nbd.trim(at, len as usize),
            false => nbd.zero(at, len as usize),
        }
        model.zero(at, len);
    }
    cluster.wait_until_applied("disk");
    (servers, export, model)
}

/// The reader, on log and store of a server.
fn reader(cluster: &Cluster, command: &str, server: usize) -> Command {
    devices(command, &cluster.path(&format!("wal{server}")), &store(cluster, server))
}

fn devices(command: &str, wal: &Path, store: &Path) -> Command {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/volume_reader.py");
    let mut python = Command::new("python3");
    python.arg(tool).arg(command).args([wal, store]);
    python
}

fn store(cluster: &Cluster, server: usize) -> PathBuf {
    cluster.path(&format!("store{server}"))
}

/// The lines of `check` or `dump`, and the exit code.
fn lines(mut command: Command) -> (Vec<Value>, Option<i32>) {
    let Output { status, stdout, stderr } = command.arg("--json").output().expect("python3 starts");
    let text = String::from_utf8(stdout).expect("the output is text");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON"));
    let lines: Vec<Value> = lines.collect();
    assert!(!lines.is_empty(), "{}", String::from_utf8_lossy(&stderr));
    (lines, status.code())
}

fn of_kind<'a>(lines: &'a [Value], kind: &str) -> Vec<&'a Value> {
    lines.iter().filter_map(|line| line.get(kind)).collect()
}

#[track_caller]
fn assert_content(cluster: &Cluster, server: usize, model: &Model, more: &[&str]) {
    let out = cluster.path("content");
    let mut command = reader(cluster, "read", server);
    command.args(["--volume", "1", "--length", &VOLUME_BYTES.to_string()]).args(more);
    let output = command.arg("--out").arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let file = fs::File::open(&out).unwrap();
    assert_eq!(file.metadata().unwrap().len(), VOLUME_BYTES);
    for region in [0, REGION] {
        let mut content = vec![0; USED_BYTES as usize];
        file.read_exact_at(&mut content, region).unwrap();
        let wanted = model.content(region, USED_BYTES);
        let blocks = content.chunks(BLOCK as usize).zip(wanted.chunks(BLOCK as usize));
        let differs = blocks.enumerate().find(|(_, (one, other))| one != other);
        let differs = differs.map(|(block, _)| region + block as u64 * BLOCK);
        assert_eq!(differs, None, "server {server}: the first block that differs");
    }
}

#[test]
fn the_reader_finds_the_acknowledged_content_on_each_server_that_was_killed() {
    if !python_is_there() {
        return;
    }
    let cluster = Cluster::new();
    let (servers, export, model) = written(&cluster);
    // The servers are idle: nothing changes but the commit index, which follows.
    until("each log states that its last entry is committed", || {
        SERVERS.into_iter().all(|server| {
            let (lines, _) = lines(reader(&cluster, "check", server));
            let replicas = of_kind(&lines, "replica");
            replicas.len() == 2 && replicas.iter().all(|it| it["commit"] == it["last"])
        })
    });
    for server in servers {
        drop(server.stop(Signal::KILL));
    }
    drop(export.stop(Signal::KILL));
    for server in SERVERS {
        let (lines, code) = lines(reader(&cluster, "check", server));
        assert_eq!(of_kind(&lines, "damage"), Vec::<&Value>::new());
        assert_eq!(code, Some(0));
        let summary = of_kind(&lines, "summary")[0];
        let at_least = |name: &str, least: u64| {
            assert!(summary[name].as_u64().unwrap() >= least, "{name} in {summary}");
        };
        at_least("last_checkpoint", 1);
        at_least("used_slots", 50);
        at_least("verified_blocks", 256);
        at_least("replayed_blocks", 1);
        for replica in of_kind(&lines, "replica") {
            assert_eq!(replica["state"], "exact", "{replica}");
        }
        assert_content(&cluster, server, &model, &[]);
        assert_content(&cluster, server, &model, &["--uncommitted"]);
    }
}

/// Flips a bit of a file, and back when it is dropped.
struct Flipped {
    path: PathBuf,
    at: u64,
}

impl Flipped {
    fn new(path: &Path, at: u64) -> Self {
        let flipped = Self { path: path.to_path_buf(), at };
        flipped.flip();
        flipped
    }

    fn flip(&self) {
        let file = OpenOptions::new().read(true).write(true).open(&self.path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, self.at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], self.at).unwrap();
    }
}

impl Drop for Flipped {
    fn drop(&mut self) {
        self.flip();
    }
}

#[test]
fn the_reader_finds_a_bit_that_was_flipped_in_a_record_a_sector_a_block_or_a_superblock() {
    if !python_is_there() {
        return;
    }
    let cluster = Cluster::new();
    let (servers, export, model) = written(&cluster);
    for server in servers {
        drop(server.stop(Signal::KILL));
    }
    drop(export.stop(Signal::KILL));
    let (wal, store) = (cluster.path("wal1"), store(&cluster, 1));
    let (dumped, code) = lines(reader(&cluster, "dump", 1));
    assert_eq!(code, Some(0));
    let ring = fs::metadata(&wal).unwrap().len() - WAL_DATA_START;
    let damage = |_flipped: &Flipped| -> Vec<(String, String)> {
        let (lines, code) = lines(reader(&cluster, "check", 1));
        assert_eq!(code, Some(1));
        assert_eq!(of_kind(&lines, "summary")[0]["intact"], false);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let damage = of_kind(&lines, "damage");
        damage.iter().map(|it| (text(&it["in"]), text(&it["what"]))).collect()
    };
    let is_in = |damage: &[(String, String)], place: &str, part: &str| {
        let found = damage.iter().any(|(of, what)| of == place && what.contains(part));
        assert!(found, "no {part} in {damage:?}");
    };

    // Records in front of the last one are proved by it.
    let records = of_kind(&dumped, "record");
    let entries = records.iter().filter(|it| it["kind"] == "E" && it["count"] != 0);
    let offsets: Vec<u64> = entries.map(|it| it["offset"].as_u64().unwrap()).collect();
    let offset = offsets[offsets.len() / 2];
    let found = damage(&Flipped::new(&wal, WAL_DATA_START + (offset + 100) % ring));
    is_in(&found, "log", "checksum");
    is_in(&found, "replica", "is lost");

    // The slot of the first blocks of the volume, which no entry of the log changes any more.
    let slots = of_kind(&dumped, "slot");
    let is_first = |slot: &&&Value| slot["chunk"] == 0 && slot["slot_number"] == 0;
    let slot = slots.iter().find(is_first).expect("the first blocks were checkpointed");
    let slot = slot["slot"].as_u64().unwrap();
    let found = damage(&Flipped::new(&store, MIB + 512 * slot + 40));
    is_in(&found, "store", &format!("the sector of slot {slot}: checksum"));
    is_in(&found, "replica", "a sector of the store is damaged");

    let flipped = Flipped::new(&store, STORE_DATA_START + SLOT * slot + 7 * BLOCK + 123);
    let found = damage(&flipped);
    assert_eq!(found.len(), 1, "{found:?}");
    is_in(&found, "store", "block 7 of volume 1");
    let mut read = reader(&cluster, "read", 1);
    let output = read.args(["--volume", "1", "--offset", "28672", "--length", "4096"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(output.stdout.len(), 4096);
    assert!(String::from_utf8(output.stderr).unwrap().contains("block 7 of volume 1"));
    drop(flipped);

    for copy in [0, 32 << 10] {
        let flipped = Flipped::new(&store, copy + 72);
        is_in(&damage(&flipped), "store", "superblock copy");
    }

    // Wrong usage: a device that is missing, or a range that no volume has.
    let refused = |mut command: Command, parts: &[&str]| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(output.stdout.is_empty());
        contains(&String::from_utf8(output.stderr).unwrap(), parts);
    };
    let missing = cluster.path("missing");
    let name = missing.to_str().unwrap();
    refused(devices("check", &missing, &store), &[name, "No such file"]);
    refused(devices("check", &wal, &missing), &[name, "No such file"]);
    refused(devices("check", &store, &wal), &[store.to_str().unwrap(), "not a write-ahead log"]);
    let read = |range: &[&str]| {
        let mut command = reader(&cluster, "read", 1);
        command.args(["--volume", "1"]).args(range);
        command
    };
    let (largest, above) = ((64_u64 << 40).to_string(), ((64_u64 << 40) + 1).to_string());
    refused(read(&["--offset=-1"]), &["--offset", "-1 is not a number of bytes"]);
    refused(read(&["--length=-4096"]), &["--length", "-4096 is not a number of bytes"]);
    refused(read(&["--offset", &above]), &["--offset", &above, "not a number of bytes"]);
    refused(read(&["--offset", &largest, "--length", "1"]), &["no volume is larger", &largest]);
    refused(read(&["--offset", &largest]), &["the last block that has data", "--length"]);

    // A log and a store that do not belong together.
    let output = devices("check", &wal, &cluster.path("store2")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("do not belong together"));

    let (_, code) = lines(reader(&cluster, "check", 1));
    assert_eq!(code, Some(0));
    assert_content(&cluster, 1, &model, &["--uncommitted"]);

    // A server reports a replica that is lost, and so does the cluster.
    let _flipped = Flipped::new(&wal, WAL_DATA_START + (offset + 100) % ring);
    let servers = SERVERS.map(|server| {
        let mut command = cluster.serve(server, server);
        command.args(["--metrics-listen", "127.0.0.1:0"]);
        Server::start_until(command, " is ready: ")
    });
    let servers: Vec<Server> = servers.collect();
    // The log may have had entries of both groups after the damage.
    let lost = |server: usize| cluster.json(&["status"])[server]["lost"].as_u64().unwrap();
    until("a replica is reported as lost", || lost(0) > 0);
    let count = lost(0);
    assert_eq!((lost(1), lost(2)), (0, 0));
    contains(&cluster.ok(&["status"]), &[&format!(" {count} lost ")]);
    contains(&servers[0].get("/healthz").1, &["degraded", "replicas_lost: "]);
    assert!(servers[0].get("/readyz").0.contains("200"));
    contains(&servers[0].get("/metrics").1, &[&format!("alluvium_volume_lost_replicas {count}")]);
    contains(&servers[1].get("/metrics").1, &["alluvium_volume_lost_replicas 0"]);
    let replicas = cluster.replicas("disk");
    let replicas = replicas.iter().filter(|replica| replica["state"] == "lost");
    assert_eq!(replicas.count() as u64, count);
}
