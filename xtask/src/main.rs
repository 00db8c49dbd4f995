//! Developer tasks, started as `cargo xtask`: the gate, the test suites with real clients, long
//! campaigns.
#![forbid(unsafe_code)]

mod bench;
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
mod tidy;
mod web;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// What every task can fail with. A task that cannot go on says so in words; nothing matches on
/// the kind.
type Error = Box<dyn std::error::Error>;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
/// Alluvium's developer tasks.
struct Cli {
    #[command(subcommand)]
    task: Task,
    /// Write the report to this file as JSON too.
    #[arg(long, global = true, value_name = "FILE")]
    report: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Task {
    /// Check format, lints, documentation and all cargo tests. Changes nothing in the work tree.
    ///
    /// Lints of bench/journal too, which is no member of the workspace; its tests are run by `cargo
    /// test --manifest-path bench/journal/Cargo.toml`: they link librocksdb-dev and libleveldb-dev,
    /// and build seven engines.
    ///
    /// Runs every step even if one fails, so that one run shows all there is to mend.
    Gate,
    /// Check the rules of docs/STYLE.md that a program can check: line width, file length, banned
    /// words, imports between layers, import cycles. The gate runs it too.
    Tidy(TidyOptions),
    /// Install what the tests need, then run all of them: cargo tests, real clients, kill test.
    ///
    /// What is missing comes from the ordinary package registries: kcat, OpenSSL, redis-tools,
    /// Java, Maven, Python, Go and a word list by apt-get (as root or through sudo),
    /// confluent-kafka and redis-py from PyPI, kafka-clients from Maven Central, franz-go,
    /// confluent-kafka-go and versitygw from the Go module proxy, and a newer Go too where Debian's
    /// is too old. Everything but the Debian packages lands under target/e2e and in the caches of
    /// the package managers.
    ///
    /// A suite whose tools cannot be installed for lack of permission is skipped, with the reason.
    /// Data and logs of a suite that failed stay under target/e2e/run.
    Test(TestOptions),
    /// Run suites that others have written for Kafka, and Kafka's own programs, against the real
    /// binary.
    ///
    /// They come from the ordinary package registries, as the tools of `cargo xtask test` do. What
    /// is known to fail, and why, is listed in tests/compat/known.txt.
    Compat(compat::Options),
    /// Simulate power cuts under the WAL on the simulated disk: `--seeds 10000`.
    Sim(SimOptions),
    /// Run what threads do to each other in every order, in a model checker: a campaign.
    Loom(LoomOptions),
    /// Compare streams with plain lists, and a compacted topic with a map, through uploads,
    /// compaction, crashes and power cuts; look for an order of what threads did to a journal
    /// cache: a campaign.
    Model(ModelOptions),
    /// Kill the server with SIGKILL under load, again and again, and check what it holds; then the
    /// same with a journal cache: a campaign.
    Kill(KillOptions),
    /// Kill the server and transactional clients with SIGKILL, again and again; the output must
    /// have each input once: a campaign.
    ExactlyOnce(ExactlyOnceOptions),
    /// Kill the server with SIGKILL while a topic is compacted, again and again; the last record of
    /// each key must be there: a campaign.
    Compacted(CompactedOptions),
    /// Damage the files of servers that are stopped or running; each serves true bytes and states
    /// the loss, or refuses to start with advice: a campaign.
    Damage(DamageOptions),
    /// Cut the power of a virtual machine's disk under the WAL, again and again, and check what is
    /// left: a campaign.
    Crash(CrashOptions),
    /// Take a WAL over from one host to another on a disk that both reach and that is reserved, in
    /// a virtual machine.
    Fence(FenceOptions),
    /// Run with an S3 server as the object store: faults on the way, an outage, TLS, credentials,
    /// tools, SIGKILL of both: a campaign.
    S3(S3Options),
    /// Run the fuzz targets of the WAL, of the journal cache and of the server's requests: all, or
    /// the ones named.
    Fuzz(FuzzOptions),
    /// Attack the server as clients can: connections, half and bad requests, bombs, answers that
    /// nobody reads, names without end, stolen logins.
    Hostile(HostileOptions),
    /// Write many bytes through a small WAL and read all of them back: a campaign.
    Endless(EndlessOptions),
    /// Build the binary that is handed out: target/dist/alluvium, with its debug lines in
    /// target/dist/alluvium.debug. Needs binutils.
    Dist,
    /// Measure a server under load: beside a real Apache Kafka, beside itself without uploads,
    /// beside its own bounds.
    #[command(subcommand)]
    Bench(bench::Bench),
}

#[derive(Args)]
struct TidyOptions {
    /// Lower the allowances in xtask/tidy.txt to today's values first. None is raised or added.
    #[arg(long)]
    tighten: bool,
}

#[derive(Args)]
struct TestOptions {
    /// Which suites to run. Default: all.
    suites: Vec<Suite>,
    /// Leave the cargo tests out, since the gate has just run them.
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
    /// What threads do to each other, in every order with up to two preemptions.
    Loom,
    /// kcat: a foreign data set in and out, every codec.
    Kcat,
    /// confluent-kafka (librdkafka).
    Python,
    /// kafka-clients, Kafka's console tools, a group of three processes.
    Java,
    /// franz-go.
    Go,
    /// SIGTERM and start again: what must survive.
    Restart,
    /// The journal cache as a server: redis-cli, redis-benchmark, redis-py.
    Redis,
    /// An S3 server (versitygw) as the object store: faults on the way, an outage, TLS,
    /// credentials, tools, three rounds of SIGKILL.
    S3,
    /// Transactions under SIGKILL of server and clients, six rounds.
    ExactlyOnce,
    /// Clients that mean harm, 2,000 connections.
    Hostile,
    /// A compacted topic under SIGKILL, six rounds.
    Compacted,
    /// Damage to the files of servers, 60 cases.
    Damage,
    /// 1 GiB through a WAL of 256 MiB.
    Endless,
    /// Ten minutes of mixed load, in which the resident memory stays below what the settings allow.
    Memory,
    /// `cargo xtask compat --short`: the foreign suites, without what takes long.
    Compat,
    /// Five rounds of SIGKILL on a file, five on a loop device.
    Kill,
}

#[derive(Args)]
struct ServerOptions {
    /// Take this binary instead of building one, with the dev profile, or for a benchmark with the
    /// release profile.
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,
}

#[derive(Args)]
struct SimOptions {
    /// How many seeds to run.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// Further options of the simulation, as `-- --seed 7` to replay one seed.
    #[arg(last = true)]
    rest: Vec<String>,
}

#[derive(Args)]
struct ModelOptions {
    /// How many seeds of streams to run, a tenth as many of compacted topics, and a twentieth as
    /// many of a journal cache.
    #[arg(long, default_value_t = 20_000)]
    seeds: u64,
    /// The first one.
    #[arg(long, default_value_t = 0)]
    start: u64,
}

#[derive(Args)]
struct LoomOptions {
    /// How often a thread may be interrupted where it need not wait. Orders with more are left out.
    #[arg(long, default_value_t = 3)]
    preemptions: u32,
}

#[derive(Args)]
struct KillOptions {
    /// Rounds; each ends with a SIGKILL, a restart and a check.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Decides when to kill and what the producers send. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// What the server's WAL lies on. Default: first one, then the other.
    #[arg(long)]
    target: Option<kill::Target>,
    /// Kill a process that has a journal cache open, and no server. Default: first the one, then
    /// the other.
    #[arg(long, conflicts_with_all = ["target", "server"])]
    cache: bool,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct ExactlyOnceOptions {
    /// Rounds; each ends with a SIGKILL of the server or of a client.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Decides when and whom to kill. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct CompactedOptions {
    /// Rounds; each ends with a SIGKILL, a restart and a check.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Decides when to kill and what is written. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct DamageOptions {
    /// How many cases. Each kind of damage comes once in about 155 of them.
    #[arg(long, default_value_t = 1000)]
    cases: u64,
    /// Decides what is written and what is damaged. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Run this case alone.
    #[arg(long, requires = "seed")]
    case: Option<u64>,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct CrashOptions {
    /// Rounds; each ends with a power cut and a check.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Decides when to cut and what is written. Default: from the clock; it is printed.
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Args)]
struct FenceOptions {
    /// Takeovers; in each the old owner goes on writing.
    #[arg(long, default_value_t = 10)]
    rounds: u32,
}

#[derive(Args)]
struct S3Options {
    /// Rounds of the kill test.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Decides what requests meet on their way, and when to kill. Default: from the clock; it is
    /// printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Which S3 server, built from source by Go.
    #[arg(long, default_value = "versitygw")]
    peer: s3::Peer,
    #[command(flatten)]
    server: ServerOptions,
}

#[derive(Args)]
struct FuzzOptions {
    /// Which targets: `headers`, `records`, `recovery`, `requests`; `cache_records`, `cache_hints`,
    /// `cache_opening`. Default: all.
    targets: Vec<String>,
    /// Seconds for each.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Run the target on this file alone, to replay what it has found.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

#[derive(Args)]
struct HostileOptions {
    /// Connections at the same time in the largest attack.
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
        Task::Loom(options) => Ok(loom::campaign(&root, &options)),
        Task::Model(options) => suites::model(&root, &options),
        Task::Kill(options) => suites::kill_campaign(&root, &options),
        Task::ExactlyOnce(options) => suites::exactly_once_campaign(&root, &options),
        Task::Compacted(options) => suites::compacted_campaign(&root, &options),
        Task::Damage(options) => suites::damage_campaign(&root, &options),
        Task::Crash(options) => crash::campaign(&root, &options),
        Task::Fence(options) => fence::campaign(&root, &options),
        Task::S3(options) => suites::s3_campaign(&root, &options),
        Task::Fuzz(options) => fuzz::run(&root, &options),
        Task::Hostile(options) => suites::hostile_campaign(&root, &options),
        Task::Dist => Ok(dist::run(&root)),
        Task::Bench(bench) => bench::run(&root, &bench),
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
