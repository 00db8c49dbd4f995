//! Three volume servers on the disks of a virtual machine, and a writer, for the test that cuts the
//! power of all disks at once (`cargo xtask crash`).
//!
//! The servers talk over loopback; each has a log and a store of its own. The writer is a gateway.
//! It prints to standard output, line by line, what it finds after each start and what it was
//! promised; the process that cuts the power compares them. A version is 0 for zeros.
//!
//! | line | meaning |
//! |---|---|
//! | `opening` | the servers open their devices |
//! | `held B V...` | the blocks from B on have these versions |
//! | `ready` | all blocks were read, and the replicas of all servers are exact |
//! | `zeros B N V` | N blocks from B on are about to become zeros, as version V |
//! | `acked B N V` | version V of N blocks from B on was acknowledged |
//! | `closed` | writer and servers have stopped |
//! | `failed CAUSE` | a server has stopped, or a block has a content that was never written |
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Coordination, Limits, RedbCoordination, SystemClock};
use alluvium_device::sim::Random;
use alluvium_device::{Durability, OpenOptions, SharedDevice};
use alluvium_volume::gateway::{Trouble, Volume, VolumeConfig};
use alluvium_volume::net::NetLimits;
use alluvium_volume::registry::RegistryError;
use alluvium_volume::serve::{ServeOptions, Server, Stop};
use alluvium_volume::shard::Apply;
use alluvium_volume::{Answer, AttachOptions, Attached, Cluster, GroupId, ReplicaState, Request};
use bytes::Bytes;
use clap::{Args, Parser, Subcommand};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use uuid::Uuid;

type Error = Box<dyn std::error::Error + Send + Sync>;

const CLUSTER: &str = "crash";
const NAME: &str = "disk";
const SERVERS: usize = 3;
const BLOCK: u64 = 4096;
/// A region of a volume, which is one raft group.
const REGION: u64 = 64 << 30;
/// The first blocks of each of two regions are used.
const REGION_BLOCKS: u64 = 512;
const BLOCKS: u64 = 2 * REGION_BLOCKS;
/// Blocks that one worker writes, in turn with the others. A read is as long.
const RUN: u64 = 64;
const WORKERS: u64 = 8;
/// More than the operations of a round. The versions of round R begin at R times this, and rounds
/// with 1.
const VERSIONS_OF_ROUND: u64 = 1_000_000;

#[derive(Parser)]
#[command(name = "volumes")]
/// Serve a volume by three servers and write to it, or check what is left of its content.
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve, check all blocks, and write until the devices fail.
    Write(Writing),
    /// Print the lines `held B V...` of an image of the volume.
    Held {
        path: PathBuf,
        /// Seed of the content; must be the same for all commands.
        #[arg(long)]
        seed: u64,
    },
}

#[derive(Args)]
struct Writing {
    /// The path of the disks without their numbers, 0 to 5: log and store of each server.
    disks: PathBuf,
    /// The file of the registry.
    #[arg(long)]
    registry: PathBuf,
    /// Seed of the content; must be the same for all commands.
    #[arg(long)]
    seed: u64,
    /// Seed of the operations.
    #[arg(long)]
    load: u64,
    /// The number of the round, from 1.
    #[arg(long)]
    round: u64,
    /// Stop everything after this number of operations. Default: never.
    #[arg(long)]
    operations: Option<u64>,
    /// `auto` flushes where there is a volatile cache; `device` trusts the devices of logs and
    /// stores, as a negative control.
    #[arg(long, default_value_t = Durability::Auto)]
    durability: Durability,
}

/// The content of a version of a block: both, then bytes derived from them.
fn content(seed: u64, block: u64, version: u64) -> Vec<u8> {
    let mut random = Random::new(seed ^ block << 48 ^ version);
    let mut content = block.to_le_bytes().to_vec();
    content.extend(version.to_le_bytes());
    while (content.len() as u64) < BLOCK {
        content.extend(random.next_u64().to_le_bytes());
    }
    content
}

/// Returns the version of a block. An error is a content that was never written.
fn version(seed: u64, block: u64, bytes: &[u8]) -> Result<u64, Error> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(0);
    }
    let version = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    match version > 0 && bytes == content(seed, block, version) {
        true => Ok(version),
        false => Err(format!("block {block} was never written so: {:x?}", &bytes[..32]).into()),
    }
}

/// Prints the versions of the blocks from `first` on.
fn print_held(seed: u64, first: u64, bytes: &[u8]) -> Result<(), Error> {
    let blocks = (first..).zip(bytes.chunks_exact(BLOCK as usize));
    let versions = blocks.map(|(block, bytes)| Ok(version(seed, block, bytes)?.to_string()));
    println!("held {first} {}", versions.collect::<Result<Vec<_>, Error>>()?.join(" "));
    Ok(())
}

/// The byte of the volume at which a block begins.
fn offset(block: u64) -> u64 {
    block / REGION_BLOCKS * REGION + block % REGION_BLOCKS * BLOCK
}

fn held(path: &Path, seed: u64) -> Result<(), Error> {
    let file = File::open(path)?;
    for first in (0..BLOCKS).step_by(RUN as usize) {
        let mut bytes = vec![0; (RUN * BLOCK) as usize];
        file.read_exact_at(&mut bytes, offset(first))?;
        print_held(seed, first, &bytes)?;
    }
    Ok(())
}

/// Opens a server on its disks, and lets it run on a thread of its own, until it is stopped or
/// a device fails. Its end is sent to `ended`.
async fn start(
    number: usize,
    writing: &Writing,
    service: &Arc<dyn Coordination>,
    keys: &Arc<Keys>,
    ended: mpsc::UnboundedSender<Result<(), Error>>,
) -> Result<Stop, Error> {
    let open = |which: usize| -> Result<SharedDevice, Error> {
        let path = format!("{}{which}", writing.disks.display());
        let options = OpenOptions { durability: writing.durability, ..OpenOptions::default() };
        let device = alluvium_device::open(path.as_ref(), &options)?;
        eprintln!("{:?}", device.geometry());
        Ok(device)
    };
    let (log, store) = (open(2 * number)?, open(2 * number + 1)?);
    let (service, keys) = (Arc::clone(service), Arc::clone(keys));
    let (opened, stop) = oneshot::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("the guest has threads");
        let done = runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let options = ServeOptions {
                cluster: CLUSTER.to_owned(),
                log,
                // As small as the ring allows, so that there are many checkpoints.
                log_options: alluvium_wal::Options {
                    window_bytes: 8 << 20,
                    max_record_bytes: 3 << 20,
                    ..alluvium_wal::Options::default()
                },
                store,
                apply: Apply::Deferred,
                entry_cache_bytes: 8 << 20,
                overlay_bytes: 8 << 20,
                install_bytes_per_s: 0,
                limits: NetLimits::default(),
                advertised: listener.local_addr()?.to_string(),
            };
            let server = Server::open(options, service, keys, |_| Arc::new(|_, _| {})).await?;
            drop(opened.send(server.stop_handle()));
            Ok(server.run(listener).await?)
        });
        drop(ended.send(done));
    });
    // Without a handle the end has a cause.
    stop.await.map_err(|_| "a server did not open".into())
}

async fn attach(cluster: &Arc<Cluster>, load: u64) -> Result<Attached, Error> {
    let registry = cluster.registry();
    let id = match registry.volume_by_name(NAME).await {
        Ok((id, _)) => id,
        Err(RegistryError::UnknownVolume(_)) => {
            registry.create_volume(NAME, REGION + REGION_BLOCKS * BLOCK).await?
        }
        Err(error) => return Err(error.into()),
    };
    let options = AttachOptions {
        owner: Uuid::new_v4(),
        address: "crash".to_owned(),
        take: true,
        config: VolumeConfig { io_timeout: None, memory_bytes: 16 << 20, seed: load },
        trouble: Arc::new(Trouble::new(NAME)),
    };
    Ok(cluster.attach(id, options, std::future::pending()).await?)
}

struct Writer {
    seed: u64,
    volume: Attached,
    version: AtomicU64,
    /// Operations that remain.
    operations: AtomicU64,
}

impl Writer {
    fn volume(&self) -> &Volume {
        &self.volume.volume
    }

    async fn check(&self) -> Result<(), Error> {
        for first in (0..BLOCKS).step_by(RUN as usize) {
            let bytes = self.volume().read(offset(first), RUN * BLOCK).await?;
            print_held(self.seed, first, &bytes)?;
        }
        Ok(())
    }

    /// Makes blocks zeros: discards them, or keeps their space.
    async fn zero(&self, first: u64, count: u64, is_discard: bool) -> Result<(), Error> {
        let version = self.version.fetch_add(1, Ordering::Relaxed);
        println!("zeros {first} {count} {version}");
        match is_discard {
            true => self.volume().discard(offset(first), count * BLOCK).await?,
            false => self.volume().zero(offset(first), count * BLOCK).await?,
        }
        println!("acked {first} {count} {version}");
        Ok(())
    }

    /// Waits until all servers have exact replicas of both regions, which are created first if they
    /// do not exist.
    async fn wait_until_exact(&self, cluster: &Cluster) -> Result<(), Error> {
        let of_volume = cluster.registry().volume(self.volume.id).await?.value;
        if of_volume.regions.len() < 2 {
            self.zero(0, 1, false).await?;
            self.zero(REGION_BLOCKS, 1, false).await?;
        }
        for (server, _) in cluster.registry().servers().await? {
            let request = Request::Status { group: None, after: GroupId(0) };
            loop {
                if let Ok(Ok(Answer::Status(status))) = cluster.call(server, &request).await
                    && status.replicas.len() == 2
                    && status.replicas.iter().all(|it| it.state == ReplicaState::Exact)
                {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        println!("ready");
        Ok(())
    }

    /// Writes to the runs of one worker, one operation after the other.
    async fn work(&self, worker: u64, random: &mut Random) -> Result<(), Error> {
        let more = |operations: u64| operations.checked_sub(1);
        while self.operations.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
            let run = random.below(BLOCKS / RUN / WORKERS) * WORKERS + worker;
            let within = random.below(RUN);
            let most = if random.below(3) == 0 { RUN } else { 4 };
            let count = (1 + random.below(most)).min(RUN - within);
            let first = run * RUN + within;
            let kind = random.below(10);
            if kind < 2 {
                self.zero(first, count, kind == 0).await?;
                continue;
            }
            let version = self.version.fetch_add(1, Ordering::Relaxed);
            let blocks = first..first + count;
            let data: Vec<u8> =
                blocks.flat_map(|block| content(self.seed, block, version)).collect();
            self.volume().write(offset(first), Bytes::from(data)).await?;
            println!("acked {first} {count} {version}");
        }
        Ok(())
    }
}

async fn write(writing: Writing) -> Result<(), Error> {
    println!("opening");
    let registry = writing.registry.clone();
    let opened = tokio::task::spawn_blocking(move || {
        RedbCoordination::open(&registry, Limits::default(), Arc::new(SystemClock::default()))
    });
    let service: Arc<dyn Coordination> = Arc::new(opened.await??);
    let keys = Arc::new(Keys::new(CLUSTER)?);
    let (ended, mut endings) = mpsc::unbounded_channel();
    let mut stops = Vec::new();
    for number in 0..SERVERS {
        match start(number, &writing, &service, &keys, ended.clone()).await {
            Ok(stop) => stops.push(stop),
            Err(error) => {
                endings.recv().await.unwrap_or(Ok(()))?;
                return Err(error);
            }
        }
    }
    drop(ended);
    let cluster = Cluster::new(CLUSTER, service, keys);
    let work = async {
        let writer = Arc::new(Writer {
            seed: writing.seed,
            volume: attach(&cluster, writing.load).await?,
            version: AtomicU64::new(writing.round * VERSIONS_OF_ROUND),
            operations: AtomicU64::new(writing.operations.unwrap_or(u64::MAX)),
        });
        writer.check().await?;
        writer.wait_until_exact(&cluster).await?;
        let mut workers = JoinSet::new();
        for worker in 0..WORKERS {
            let writer = Arc::clone(&writer);
            let mut random = Random::new(writing.load ^ worker << 56);
            workers.spawn(async move { writer.work(worker, &mut random).await });
        }
        while let Some(done) = workers.join_next().await {
            done??;
        }
        Ok::<_, Error>(())
    };
    tokio::select! {
        done = work => done?,
        ended = endings.recv() => {
            ended.unwrap_or(Ok(()))?;
            return Err("a server has stopped".into());
        }
    }
    for stop in stops {
        stop.stop();
    }
    while let Some(ended) = endings.recv().await {
        ended?;
    }
    println!("closed");
    Ok(())
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Write(writing) => {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
            let runtime = runtime.expect("the guest has threads");
            let done = runtime.block_on(write(writing));
            runtime.shutdown_background();
            done
        }
        Command::Held { path, seed } => held(&path, seed),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            println!("failed {cause}");
            ExitCode::FAILURE
        }
    }
}
