//! Developer tasks, started as `cargo xtask`: the gate, the test suites with real clients, and long
//! campaigns.
#![forbid(unsafe_code)]

mod bench;
mod client;
mod compacted;
mod compat;
mod crash;
mod damage;
mod dist;
mod endless;
mod exactly_once;
mod exec;
mod fence;
mod fuzz;
mod gate;
mod hostile;
mod image;
mod import;
mod kafka;
mod kcat;
mod kill;
mod lanes;
mod loom;
mod loopdev;
mod redis;
mod report;
mod rng;
mod s3;
mod server;
mod setup;
mod suites;
mod tap;
mod tidy;
mod volume;
mod web;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// The error of every task. Its text explains the failure; no caller matches on its kind.
type Error = Box<dyn std::error::Error>;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
/// Alluvium's developer tasks.
struct Cli {
    #[command(subcommand)]
    task: Task,
    /// Also write the report to this file, as JSON.
    #[arg(long, global = true, value_name = "FILE")]
    report: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Task {
    /// Check format, lints, documentation and all cargo tests. Changes nothing in the work tree.
    ///
    /// Also lints bench/journal, which is not a member of the workspace. Its tests run with `cargo
    /// test --manifest-path bench/journal/Cargo.toml`: they link librocksdb-dev and libleveldb-dev
    /// and build seven engines.
    ///
    /// Runs every step even if one fails, so that one run shows everything that needs to be fixed.
    Gate,
    /// Check the rules of docs/STYLE.md that a program can check: line width, file length, banned
    /// words, imports between layers, import cycles, links between files. The gate runs it too.
    Tidy(TidyOptions),
    /// Install what the tests need, then run all of them: cargo tests, real clients, kill test.
    ///
    /// Missing tools come from the ordinary package registries: kcat, OpenSSL, redis-tools, Java,
    /// Maven, Python, Go and a word list through apt-get (as root or with sudo), confluent-kafka
    /// and redis-py from PyPI, kafka-clients from Maven Central, franz-go, confluent-kafka-go and
    /// versitygw from the Go module proxy, which also provides a newer Go where Debian's is too
    /// old. Everything but the Debian packages is installed under target/e2e and in the caches of
    /// the package managers.
    ///
    /// A suite whose tools cannot be installed for lack of permission is skipped, with the reason.
    /// Data and logs of a failed suite stay under target/e2e/run.
    Test(TestOptions),
    /// Run third-party Kafka test suites, and Kafka's own programs, against the real binary.
    ///
    /// They come from the ordinary package registries, like the tools of `cargo xtask test`. Known
    /// failures are listed in tests/compat/known.txt, with their reasons.
    Compat(compat::Options),
    /// Simulate power cuts under the WAL on a simulated disk: `--seeds 10000`.
    Sim(SimOptions),
    /// Simulate replicated block volumes on three servers with power cuts, kills, partitions and
    /// interrupted installs: `--seeds 2000`.
    VolumeSim(VolumeSimOptions),
    /// Run concurrent code in every interleaving of its threads, in a model checker: a campaign.
    Loom(LoomOptions),
    /// Compare streams with plain lists, and a compacted topic with a map, through uploads,
    /// compaction, crashes and power cuts; check that concurrent operations on a journal cache are
    /// linearizable: a campaign.
    Model(ModelOptions),
    /// Kill the server under load with SIGKILL, repeatedly, and check its data after each restart;
    /// then the same for a journal cache: a campaign.
    Kill(KillOptions),
    /// Kill the server and transactional clients with SIGKILL, repeatedly; the output must contain
    /// each input exactly once: a campaign.
    ExactlyOnce(ExactlyOnceOptions),
    /// Kill the server with SIGKILL while it compacts a topic, repeatedly; the last record of each
    /// key must survive: a campaign.
    Compacted(CompactedOptions),
    /// Damage the files of stopped or running servers; each must serve only correct bytes and
    /// report the loss, or refuse to start with advice: a campaign.
    Damage(DamageOptions),
    /// Lose the data directory, the WAL, or a part of the object store, in a directory or an S3
    /// server; what `alluvium rebuild` states as lost must be exactly what is lost: a campaign.
    Loss(LossOptions),
    /// Import topics from a cluster of Apache Kafka, interrupted by SIGKILL, and compare all of it:
    /// a campaign.
    Import(ImportOptions),
    /// Cut the power of a virtual machine's disks under the WAL and under three volume servers,
    /// repeatedly, and check what survives: a campaign.
    Crash(CrashOptions),
    /// Take over a WAL from one host to another on a shared, reserved disk, in a virtual machine.
    Fence(FenceOptions),
    /// Run with an S3 server as the object store: network faults, an outage, TLS, credentials,
    /// tools, SIGKILL of both servers: a campaign.
    S3(S3Options),
    /// Run the fuzz targets of the WAL, the journal cache, volumes and what servers receive: all,
    /// or the named ones.
    Fuzz(FuzzOptions),
    /// Attack the server as clients can: many connections, partial and invalid requests,
    /// decompression bombs, responses that are never read, endless new names, stolen credentials.
    Hostile(HostileOptions),
    /// Run the clients of libnbd, QEMU and fio against the NBD server with a disk in memory.
    ///
    /// They are installed through apt-get, like the tools of `cargo xtask test`.
    Nbd,
    /// Kill, stop and cut off the servers of a replicated volume under load, and kill its exporter;
    /// each acknowledged write must be read back: a campaign. Needs fio.
    Volume(VolumeOptions),
    /// Write many bytes through a small WAL and read all of them back: a campaign.
    Endless(EndlessOptions),
    /// Build the release binary: target/dist/alluvium, with its debug information in
    /// target/dist/alluvium.debug. Needs binutils.
    Dist,
    /// Measure a server under load: against Apache Kafka, against itself without uploads, or
    /// against its configured bounds.
    #[command(subcommand)]
    Bench(bench::Bench),
}

#[derive(Args)]
struct TidyOptions {
    /// First lower the allowances in xtask/tidy.txt to the current values. None is raised or added.
    #[arg(long)]
    tighten: bool,
}

#[derive(Args)]
struct TestOptions {
    /// The suites to run. Default: all.
    suites: Vec<Suite>,
    /// Skip the cargo tests, for use after the gate has run them.
    #[arg(long)]
    no_cargo: bool,
    #[command(flatten)]
    server: ServerOptions,
    /// Seed of the kill test.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// All cargo tests of the workspace.
    Cargo,
    /// Every interleaving of threads with up to two preemptions, in a model checker.
    Loom,
    /// kcat: a third-party data set in and out, every codec.
    Kcat,
    /// confluent-kafka (librdkafka).
    Python,
    /// kafka-clients, Kafka's console tools, a group of three processes.
    Java,
    /// franz-go.
    Go,
    /// SIGTERM and restart: all state must survive.
    Restart,
    /// The journal cache as a server: redis-cli, redis-benchmark, redis-py.
    Redis,
    /// The NBD server with a disk in memory: nbdinfo, nbdcopy, nbdsh, qemu-img, qemu-io, fio.
    Nbd,
    /// The client of etcd against real members: restarts, members that hang, restores, users.
    Etcd,
    /// An S3 server (versitygw) as the object store: network faults, an outage, TLS, credentials,
    /// tools, three rounds of SIGKILL.
    S3,
    /// Transactions under SIGKILL of server and clients, six rounds.
    ExactlyOnce,
    /// Malicious clients, 2,000 connections.
    Hostile,
    /// A compacted topic under SIGKILL, six rounds.
    Compacted,
    /// Damage to the files of servers, 60 cases.
    Damage,
    /// Loss of the WAL or of parts of the object store, 25 drills.
    Loss,
    /// `alluvium import` from a cluster of Apache Kafka, 6 MiB for each codec.
    Import,
    /// 1 GiB through a WAL of 256 MiB.
    Endless,
    /// Seven minutes of mixed load, during which resident memory stays within the configured bound.
    Memory,
    /// `cargo xtask compat --short`: the third-party suites, without the slow ones.
    Compat,
    /// Five rounds of SIGKILL on a file, five on a loop device.
    Kill,
}

#[derive(Args)]
struct ServerOptions {
    /// Use this binary instead of building one. Tests build with the dev profile, benchmarks with
    /// the release profile.
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,
}

#[derive(Args)]
struct SimOptions {
    /// Number of seeds to run.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// Further options of the simulation, such as `-- --seed 7` to replay one seed.
    #[arg(last = true)]
    rest: Vec<String>,
}

#[derive(Args)]
struct VolumeSimOptions {
    /// Number of seeds to run.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// Break a rule of the protocol; the campaign then fails if no seed finds it. See
    /// docs/volumes-design.md.
    #[arg(long = "break", value_name = "MUTATION", default_value = "sound")]
    mutation: String,
    /// Further options of the simulation, such as `-- --seed 7` to replay one seed.
    #[arg(last = true)]
    rest: Vec<String>,
}

#[derive(Args)]
struct VolumeOptions {
    /// Number of rounds; each ends with all processes running and progress on each connection.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Seed of the faults and of the load. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Use three members of etcd as the coordination service, and kill and stop them too. etcd is
    /// installed through apt-get.
    #[arg(long)]
    etcd: bool,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct ModelOptions {
    /// Number of seeds of streams to run; compacted topics run a tenth of it, journal caches a
    /// twentieth.
    #[arg(long, default_value_t = 20_000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    start: u64,
}

#[derive(Args)]
struct LoomOptions {
    /// Maximum number of times that a thread is preempted where it need not wait. Interleavings
    /// with more preemptions are not explored.
    #[arg(long, default_value_t = 3)]
    preemptions: u32,
}

#[derive(Args)]
struct KillOptions {
    /// Number of rounds; each ends with a SIGKILL, a restart and a check.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Seed of the times of the kills and of the produced data. Default: from the clock; it is
    /// printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Where the server's WAL is stored. Default: each target in turn.
    #[arg(long)]
    target: Option<kill::Target>,
    /// Only kill a process with an open journal cache, and no server. Default: the server first,
    /// then the cache.
    #[arg(long, conflicts_with_all = ["target", "server"])]
    cache: bool,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct ExactlyOnceOptions {
    /// Number of rounds; each ends with a SIGKILL of the server or of a client.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Seed of the times and victims of the kills. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct CompactedOptions {
    /// Number of rounds; each ends with a SIGKILL, a restart and a check.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Seed of the times of the kills and of the written data. Default: from the clock; it is
    /// printed.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct DamageOptions {
    /// Number of cases. About 195 cases cover each kind of damage once.
    #[arg(long, default_value_t = 1000)]
    cases: u64,
    /// Seed of the written data and of the damage. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Run only this case.
    #[arg(long, requires = "seed")]
    case: Option<u64>,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct LossOptions {
    /// Number of drills. 360 cover each loss in each state of a server once.
    #[arg(long, default_value_t = 500)]
    drills: u64,
    /// Seed of the first drill; each further one has the next seed. `--drills 1` repeats one.
    /// Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Pass over drills whose description, as it is printed, does not contain this text.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct ImportOptions {
    /// Size of the data set in MiB, for each of five codecs.
    #[arg(long, default_value_t = 32)]
    mebibytes: u64,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct CrashOptions {
    /// Number of rounds; each ends with a power cut and a check. Of volumes a tenth.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Only the volume servers, and all rounds.
    #[arg(long)]
    volumes: bool,
    /// Seed of the times of the power cuts and of the written data. Default: from the clock; it is
    /// printed.
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Args)]
struct FenceOptions {
    /// Number of takeovers; in each, the old owner keeps writing.
    #[arg(long, default_value_t = 10)]
    rounds: u32,
}

#[derive(Args)]
struct S3Options {
    /// Number of rounds of the kill test.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Seed of the network faults and of the times of the kills. Default: from the clock; it is
    /// printed.
    #[arg(long)]
    seed: Option<u64>,
    /// The S3 server, built from source with Go.
    #[arg(long, default_value = "versitygw")]
    peer: s3::Peer,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct FuzzOptions {
    /// The targets: `headers`, `records`, `recovery`, `requests`; `cache_records`, `cache_hints`,
    /// `cache_opening`; `chain`; `coordination_wire`; `nbd_handshake`, `nbd_requests`; `object`;
    /// `volume_log`, `volume_net`, `volume_store`. Default: all.
    targets: Vec<String>,
    /// Seconds per target.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Run the target on this file only, to replay a finding.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

#[derive(Args)]
struct HostileOptions {
    /// Number of concurrent connections in the largest attack.
    #[arg(long, default_value_t = 10_000)]
    connections: u32,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct EndlessOptions {
    /// MiB to write.
    #[arg(long, default_value_t = 10 * 1024)]
    mebibytes: u64,
    /// Capacity of the WAL in MiB.
    #[arg(long, default_value_t = 512)]
    wal_mebibytes: u64,
    #[command(flatten)]
    server: ServerOptions,
}

fn run(task: Task) -> Result<report::Report, Error> {
    let root = exec::workspace_root();
    match task {
        Task::Gate => gate::run(&root),
        Task::Tidy(options) => {
            let mut report = report::Report::default();
            report.suite("tidy", || match options.tighten {
                true => tidy::tighten(&root),
                false => tidy::run(&root),
            });
            Ok(report)
        }
        Task::Test(options) => suites::run(&root, &options),
        Task::Compat(options) => compat::run(&root, &options),
        Task::Sim(options) => suites::sim(&root, &options),
        Task::VolumeSim(options) => suites::volume_sim(&root, &options),
        Task::Loom(options) => Ok(loom::campaign(&root, &options)),
        Task::Model(options) => suites::model(&root, &options),
        Task::Kill(options) => suites::kill_campaign(&root, &options),
        Task::ExactlyOnce(options) => suites::exactly_once_campaign(&root, &options),
        Task::Compacted(options) => suites::compacted_campaign(&root, &options),
        Task::Damage(options) => suites::damage_campaign(&root, &options),
        Task::Loss(options) => suites::loss_campaign(&root, &options),
        Task::Import(options) => suites::import_campaign(&root, &options),
        Task::Crash(options) => crash::campaign(&root, &options),
        Task::Fence(options) => fence::campaign(&root, &options),
        Task::S3(options) => suites::s3_campaign(&root, &options),
        Task::Fuzz(options) => fuzz::run(&root, &options),
        Task::Hostile(options) => suites::hostile_campaign(&root, &options),
        Task::Nbd => Ok(suites::nbd_clients(&root)),
        Task::Dist => Ok(dist::run(&root)),
        Task::Bench(bench) => bench::run(&root, &bench),
        Task::Volume(options) => suites::volume_campaign(&root, &options),
        Task::Endless(options) => suites::endless_campaign(&root, &options),
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let written = run(cli.task).and_then(|report| {
        if let Some(path) = cli.report {
            std::fs::write(path, serde_json::to_string(&report)?)?;
        }
        Ok(report)
    });
    let report = match written {
        Ok(report) => report,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    print!("\n{report}");
    if report.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
