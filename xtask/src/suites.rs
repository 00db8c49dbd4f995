//! The suites with real clients, in the order in which they run.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::ValueEnum;

use crate::bench::memory_suite;
use crate::damage::loss;
use crate::exec::{cargo, describe, output};
use crate::kill::{Stopped, Target, Tools};
use crate::lanes::{self, Task};
use crate::report::{Case, GoTests, Report};
use crate::s3::Peer;
use crate::server::{Config, Ending, Server, binary};
use crate::setup::Missing;
use crate::tap::{LIMIT, skip_if_missing, tap};
use crate::{
    CompactedOptions, DamageOptions, EndlessOptions, Error, ExactlyOnceOptions, HostileOptions,
    ImportOptions, KillOptions, LossOptions, ModelOptions, S3Options, SimOptions, Suite,
    TestOptions, VolumeOptions, VolumeSimOptions, compacted, compat, damage, endless, exactly_once,
    gate, hostile, import, kcat, kill, loom, redis, s3, setup, volume,
};

/// Many times the size of a suite's data.
const WAL_MEBIBYTES: u64 = 256;
/// The server's minimum.
const LOG_CACHE_MEBIBYTES: u64 = 16;

/// `cargo xtask test`.
pub(crate) fn run(root: &Path, options: &TestOptions) -> Result<Report, Error> {
    let mut report = Report::default();
    let wanted = |suite| options.suites.is_empty() || options.suites.contains(&suite);
    if wanted(Suite::Cargo) && !options.no_cargo {
        report.suite("cargo tests", || gate::cargo_tests(root));
    }
    if wanted(Suite::Loom) {
        report.suite("loom", || loom::models(root, 2));
    }
    if options.suites.contains(&Suite::Nbd) {
        report.append(nbd_clients(root));
    }
    if options.suites.contains(&Suite::Etcd) {
        report.suite("etcd", || skip_if_missing("etcd", etcd_members(root)));
    }
    let needs_no_binary =
        |suite| matches!(suite, &Suite::Cargo | &Suite::Loom | &Suite::Nbd | &Suite::Etcd);
    if !options.suites.is_empty() && options.suites.iter().all(needs_no_binary) {
        return Ok(report);
    }
    let binary = match binary(root, options.server.server.as_deref()) {
        Ok(binary) => binary,
        Err(error) => {
            report.suite("build", || Err(error));
            return Ok(report);
        }
    };
    if options.suites.is_empty() {
        // All suites: many of them mostly wait, so two run side by side.
        lanes::run(root, tasks(&binary, options.seed), &mut report)?;
        return Ok(report);
    }
    let bench = Bench { root, binary };
    let mut suite = |suite, name: &str, run: &dyn Fn() -> Result<Vec<Case>, Missing>| {
        if wanted(suite) {
            report.suite(name, || skip_if_missing(name, run()));
        }
    };
    suite(Suite::Kcat, "kcat", &|| bench.kcat());
    suite(Suite::Python, "confluent-kafka", &|| bench.python());
    suite(Suite::Java, "kafka-clients", &|| bench.java());
    suite(Suite::Go, "franz-go", &|| bench.go());
    suite(Suite::Restart, "restart", &|| bench.restart());
    suite(Suite::Redis, "redis", &|| bench.redis());
    suite(Suite::S3, "s3", &|| bench.s3(Peer::Versitygw, 3, options.seed));
    suite(Suite::ExactlyOnce, "exactly once", &|| bench.exactly_once(6, options.seed));
    suite(Suite::Hostile, "hostile", &|| bench.hostile(2_000));
    suite(Suite::Compacted, "compacted", &|| bench.compacted(6, options.seed));
    suite(Suite::Damage, "damage", &|| bench.damage(60, options.seed));
    suite(Suite::Loss, "loss", &|| bench.loss(25, options.seed, ""));
    suite(Suite::Import, "import", &|| bench.import(6));
    suite(Suite::Endless, "endless", &|| bench.endless(1024, WAL_MEBIBYTES));
    suite(Suite::Memory, "memory", &|| bench.memory());
    if wanted(Suite::Compat) {
        compat::short(root, &bench.binary, &mut report);
    }
    if wanted(Suite::Kill) {
        bench.kill(&mut report, &[Target::File, Target::Loop], 5, options.seed);
    }
    Ok(report)
}

/// Every suite except for the cargo tests and loom, the longest first.
fn tasks(binary: &Path, seed: u64) -> Vec<Task> {
    let seed = seed.to_string();
    let task = |name: String, arguments: &[&str]| {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned());
        let server = ["--server".to_owned(), binary.display().to_string()];
        Task { name, arguments: arguments.chain(server).collect() }
    };
    let others = Suite::value_variants().iter().filter(|suite| {
        !matches!(suite, Suite::Cargo | Suite::Loom | Suite::Compat | Suite::Memory)
    });
    let mut tests = [Suite::Memory].iter().chain(others).map(|suite| {
        let name = suite.to_possible_value().expect("no suite is hidden").get_name().to_owned();
        task(name.clone(), &["test", &name, "--seed", &seed])
    });
    let mut compats =
        compat::names().map(|name| task(format!("compat {name}"), &["compat", name, "--short"]));
    // Alternately, so that a suite that compiles or computes runs beside one that waits.
    let mut tasks = Vec::new();
    loop {
        let next: Vec<Task> = tests.next().into_iter().chain(compats.next()).collect();
        if next.is_empty() {
            return tasks;
        }
        tasks.extend(next);
    }
}

/// `cargo xtask nbd`.
pub(crate) fn nbd_clients(root: &Path) -> Report {
    let mut report = Report::default();
    report.suite("nbd", || {
        let run = || -> Result<Vec<Case>, Missing> {
            setup::nbd_clients()?;
            let mut command = cargo(root);
            // The whole workspace: with the features of one package, dependencies are built again.
            command.args(["test", "--workspace", "--locked", "--test", "clients"]);
            Ok(gate::test(command.env("ALLUVIUM_NBD_CLIENTS", "required"))?)
        };
        skip_if_missing("nbd", run())
    });
    report
}

/// The tests of the client of etcd, with real members.
fn etcd_members(root: &Path) -> Result<Vec<Case>, Missing> {
    setup::etcd()?;
    let mut command = cargo(root);
    command.args(["test", "--workspace", "--locked", "--lib", "etcd::tests"]);
    Ok(gate::test(command.env("ALLUVIUM_ETCD", "required"))?)
}

/// `cargo xtask sim`.
pub(crate) fn sim(root: &Path, options: &SimOptions) -> Result<Report, Error> {
    let mut command = cargo(root);
    command.args(["run", "--release", "--locked", "--package", "alluvium-sim", "--", "--seeds"]);
    command.arg(options.seeds.to_string()).args(&options.rest);
    let mut report = Report::default();
    in_sight(&mut report, "simulation", command);
    Ok(report)
}

/// `cargo xtask volume-sim`. The dev profile optimises simulations and checks overflows.
pub(crate) fn volume_sim(root: &Path, options: &VolumeSimOptions) -> Result<Report, Error> {
    let VolumeSimOptions { seeds, mutation, rest } = options;
    let mut command = cargo(root);
    command.args(["run", "--locked", "--package", "alluvium-sim", "--bin", "volume", "--"]);
    command.args(["--seeds", &seeds.to_string(), "--break", mutation]).args(rest);
    let mut report = Report::default();
    in_sight(&mut report, "simulation of volumes", command);
    Ok(report)
}

/// `cargo xtask model`.
pub(crate) fn model(root: &Path, options: &ModelOptions) -> Result<Report, Error> {
    let mut report = Report::default();
    let models = [
        ("streams", options.seeds, ["alluvium-stream", "--test=model", "streams_are_lists"]),
        (
            "damaged logs",
            options.seeds,
            ["alluvium-stream", "--test=lost", "no_seed_hands_out_an_offset_twice"],
        ),
        (
            "compacted topics",
            options.seeds.div_ceil(10),
            ["alluvium-broker", "--lib", "a_compacted_topic_is_a_map"],
        ),
        (
            "histories of a journal cache",
            options.seeds.div_ceil(20),
            ["alluvium-journal", "--lib", "histories_are_linearizable"],
        ),
    ];
    for (name, seeds, [package, target, test]) in models {
        let mut command = cargo(root);
        command.args(["test", "--release", "--locked", "--package", package, target]);
        command.args(["--", test, "--nocapture"]);
        command.env("ALLUVIUM_MODEL_SEEDS", seeds.to_string());
        command.env("ALLUVIUM_MODEL_START", options.start.to_string());
        in_sight(&mut report, &format!("model of {name}"), command);
    }
    Ok(report)
}

/// Runs a suite that is a single command and prints its own progress.
fn in_sight(report: &mut Report, suite: &str, mut command: Command) {
    let what = describe(&command);
    report.suite(suite, || {
        println!("{what}");
        let status = command.status()?;
        Ok(vec![if status.success() { Case::passed(&what) } else { Case::failed(&what, status) }])
    });
}

/// `cargo xtask kill`.
pub(crate) fn kill_campaign(root: &Path, options: &KillOptions) -> Result<Report, Error> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = options.seed.unwrap_or(clock);
    let mut report = Report::default();
    if !options.cache {
        let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
        let both = vec![Target::File, Target::Loop];
        let targets = options.target.map_or(both, |target| vec![target]);
        bench.kill(&mut report, &targets, options.rounds, seed);
    }
    if options.target.is_none() {
        // One plan after the other, to leave a processor to the process that kills.
        let mut command = cargo(root);
        command.args(["test", "--release", "--locked", "--package", "alluvium-journal"]);
        command.args(["--test=kill", "--", "--nocapture", "--test-threads=1"]);
        command.env("ALLUVIUM_KILL_ROUNDS", options.rounds.to_string());
        command.env("ALLUVIUM_KILL_SEED", seed.to_string());
        println!("seed {seed}; repeat with: cargo xtask kill --cache --seed {seed}");
        in_sight(&mut report, "kill of a journal cache", command);
    }
    Ok(report)
}

/// `cargo xtask damage`.
pub(crate) fn damage_campaign(root: &Path, options: &DamageOptions) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut report = Report::default();
    report.suite("damage", || {
        let campaign = damage::Campaign::of(options, clock);
        damage::run(&campaign, &bench.binary, &bench.directory("damage"))
    });
    Ok(report)
}

/// `cargo xtask loss`.
pub(crate) fn loss_campaign(root: &Path, options: &LossOptions) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut report = Report::default();
    report.suite("loss", || {
        let seed = options.seed.unwrap_or(clock);
        skip_if_missing("loss", bench.loss(options.drills, seed, &options.only))
    });
    Ok(report)
}

/// `cargo xtask import`.
pub(crate) fn import_campaign(root: &Path, options: &ImportOptions) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let mut report = Report::default();
    report.suite("import", || skip_if_missing("import", bench.import(options.mebibytes)));
    Ok(report)
}

/// `cargo xtask volume`.
pub(crate) fn volume_campaign(root: &Path, options: &VolumeOptions) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = options.seed.unwrap_or(clock);
    let mut report = Report::default();
    report.suite("volume", || {
        if options.etcd {
            setup::etcd().map_err(|missing| Error::from(missing.to_string()))?;
        }
        let directory = bench.directory("volume");
        volume::run(root, &bench.binary, &directory, options.rounds, seed, options.etcd)
    });
    Ok(report)
}

/// `cargo xtask hostile`.
pub(crate) fn hostile_campaign(root: &Path, options: &HostileOptions) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let mut report = Report::default();
    report.suite("hostile", || skip_if_missing("hostile", bench.hostile(options.connections)));
    Ok(report)
}

/// `cargo xtask s3`.
pub(crate) fn s3_campaign(root: &Path, options: &S3Options) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut report = Report::default();
    report.suite("s3", || {
        let seed = options.seed.unwrap_or(clock);
        skip_if_missing("s3", bench.s3(options.peer, options.rounds, seed))
    });
    Ok(report)
}

/// `cargo xtask compacted`.
pub(crate) fn compacted_campaign(root: &Path, options: &CompactedOptions) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut report = Report::default();
    report.suite("compacted", || {
        let seed = options.seed.unwrap_or(clock);
        skip_if_missing("compacted", bench.compacted(options.rounds, seed))
    });
    Ok(report)
}

/// `cargo xtask exactly-once`.
pub(crate) fn exactly_once_campaign(
    root: &Path,
    options: &ExactlyOnceOptions,
) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut report = Report::default();
    report.suite("exactly once", || {
        let seed = options.seed.unwrap_or(clock);
        skip_if_missing("exactly once", bench.exactly_once(options.rounds, seed))
    });
    Ok(report)
}

/// `cargo xtask endless`.
pub(crate) fn endless_campaign(root: &Path, options: &EndlessOptions) -> Result<Report, Error> {
    let bench = Bench { root, binary: binary(root, options.server.server.as_deref())? };
    let mut report = Report::default();
    report.suite("endless", || {
        skip_if_missing("endless", bench.endless(options.mebibytes, options.wal_mebibytes))
    });
    Ok(report)
}

/// The environment of the suites: the work tree and the binary under test.
struct Bench<'a> {
    root: &'a Path,
    binary: PathBuf,
}

impl Bench<'_> {
    fn directory(&self, suite: &str) -> PathBuf {
        self.root.join("target/e2e/run").join(suite)
    }

    /// Runs `suite` against a fresh server. Its data and log are kept if a case failed.
    fn with_server(
        &self,
        name: &str,
        suite: impl FnOnce(&mut Server) -> Result<Vec<Case>, Error>,
    ) -> Result<Vec<Case>, Missing> {
        let config = Config {
            binary: self.binary.clone(),
            directory: self.directory(name),
            wal_mebibytes: WAL_MEBIBYTES,
            log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
            wal: None,
            objects: None,
        };
        let mut server = Server::start(config)?;
        let mut cases = suite(&mut server).unwrap_or_else(|error| {
            vec![Case::failed(name, format!("{error}{}", server.log_tail()))]
        });
        if cases.iter().any(Case::has_failed) {
            println!("the server's data and log are kept in {}", self.directory(name).display());
            return Ok(cases);
        }
        cases.push(Case::run("the server stops on SIGTERM", || server.finish()));
        Ok(cases)
    }

    fn hostile(&self, connections: u32) -> Result<Vec<Case>, Missing> {
        let mut cases = hostile::run(&self.binary, &self.directory("hostile"), connections)?;
        cases.extend(hostile::volumes::run(&self.binary, &self.directory("hostile-volumes"))?);
        Ok(cases)
    }

    fn damage(&self, cases: u64, seed: u64) -> Result<Vec<Case>, Missing> {
        let campaign = damage::Campaign { seed, cases, case: None };
        Ok(damage::run(&campaign, &self.binary, &self.directory("damage"))?)
    }

    fn loss(&self, drills: u64, seed: u64, only: &str) -> Result<Vec<Case>, Missing> {
        setup::kcat()?;
        let gateway = setup::s3_server(self.root, Peer::Versitygw)?;
        let directory = self.directory("loss");
        let (binary, gateway, directory) = (&self.binary, &gateway, &directory);
        Ok(loss::run(&loss::Campaign { binary, gateway, directory, seed, drills, only })?)
    }

    fn import(&self, mebibytes: u64) -> Result<Vec<Case>, Missing> {
        import::run(self.root, &self.binary, &self.directory("import"), mebibytes)
    }

    fn kcat(&self) -> Result<Vec<Case>, Missing> {
        setup::kcat()?;
        let words = setup::words()?;
        let scratch = self.directory("kcat").join("files");
        self.with_server("kcat", |server| kcat::run(server, &words, &scratch))
    }

    fn python(&self) -> Result<Vec<Case>, Missing> {
        let python = setup::python(self.root)?;
        let script = self.root.join("tests/clients/python/suite.py");
        self.with_server("python", |server| tap("suite.py", server.client(&python).arg(&script)))
    }

    fn java(&self) -> Result<Vec<Case>, Missing> {
        let class_path = setup::java(self.root)?;
        let mut cases = self.with_server("java", |server| {
            let mut java = server.client("java");
            java.args(["-Xmx256m", "-cp", &class_path, "alluvium.clients.Suite"]);
            tap("alluvium.clients.Suite", &mut java)
        })?;
        cases
            .extend(self.with_server("java-truncation", |server| truncation(server, &class_path))?);
        Ok(cases)
    }

    fn go(&self) -> Result<Vec<Case>, Missing> {
        let go = setup::go(self.root)?;
        self.with_server("go", |server| {
            let mut go = go.command(|program| server.client(program));
            go.args(["test", "-count=1", GoTests::VERBOSE, "-timeout", "10m", "."]);
            GoTests::run(&mut go, LIMIT, "go test")
        })
    }

    /// Stops and restarts the server: all data must survive, and clients that stayed connected must
    /// continue.
    fn restart(&self) -> Result<Vec<Case>, Missing> {
        let python = setup::python(self.root)?;
        let script = self.root.join("tests/clients/python/restart.py");
        self.with_server("restart", |server| {
            let run = |server: &Server, command: &str| {
                let mut python = server.client(&python);
                python.arg(&script).arg(command);
                python
            };
            let written = String::from_utf8(output(&mut run(server, "write"))?)?;
            let ids = written.lines().find_map(|line| line.strip_prefix("topic ids: "));
            let ids = ids.ok_or_else(|| format!("no topic ids in {written:?}"))?.to_owned();
            let mut cases = Vec::new();
            for (pass, ending) in [("1", Ending::Sigterm), ("2", Ending::Sigkill)] {
                server.end(ending)?;
                let took = server.start_again()?;
                println!("restarted after {ending} in {} ms", took.as_millis());
                let mut verify = run(server, "verify");
                for mut case in tap("restart.py", verify.arg(pass).args(ids.split(' ')))? {
                    case.name = format!("after {ending}: {}", case.name);
                    cases.push(case);
                }
            }
            cases.push(Case::run("connected clients continue after a restart", || {
                live(server, run(server, "live"))
            }));
            Ok(cases)
        })
    }

    fn redis(&self) -> Result<Vec<Case>, Missing> {
        setup::redis_tools()?;
        let (words, python) = (setup::words()?, setup::python(self.root)?);
        let script = self.root.join("tests/clients/python/cache.py");
        Ok(redis::run(&self.binary, &words, &python, &script, &self.directory("redis"))?)
    }

    fn endless(&self, mebibytes: u64, wal_mebibytes: u64) -> Result<Vec<Case>, Missing> {
        let program = setup::go_program(self.root, "endless")?;
        let name = format!("{mebibytes} MiB through a WAL of {wal_mebibytes} MiB");
        let directory = self.directory("endless");
        Ok(vec![Case::run(&name, || {
            endless::run(mebibytes, wal_mebibytes, &self.binary, &program, &directory)
        })])
    }

    fn exactly_once(&self, rounds: u32, seed: u64) -> Result<Vec<Case>, Missing> {
        let tools = exactly_once::Tools {
            python: setup::python(self.root)?,
            script: self.root.join("tests/clients/python/transform.py"),
            go: setup::go_program(self.root, "exactlyonce")?,
        };
        let directory = self.directory("exactly-once");
        let name = format!("{rounds} rounds of SIGKILL, seed {seed}");
        Ok(vec![Case::run(&name, || {
            exactly_once::run(rounds, seed, &self.binary, &tools, &directory)
        })])
    }

    fn compacted(&self, rounds: u32, seed: u64) -> Result<Vec<Case>, Missing> {
        let load = setup::go_program(self.root, "compacted")?;
        let directory = self.directory("compacted");
        let name = format!("{rounds} rounds of SIGKILL, seed {seed}");
        Ok(vec![Case::run(&name, || compacted::run(rounds, seed, &self.binary, &load, &directory))])
    }

    fn memory(&self) -> Result<Vec<Case>, Missing> {
        Ok(memory_suite(self.root, &self.binary, &self.directory("memory"))?)
    }

    fn kill(&self, report: &mut Report, targets: &[Target], rounds: u32, seed: u64) {
        for &target in targets {
            let name = format!("kill on {target}");
            report.suite(&name, || skip_if_missing(&name, self.kill_on(target, rounds, seed)));
        }
    }

    fn load(&self) -> Result<Tools, Missing> {
        setup::kcat()?;
        Ok(Tools {
            python: setup::python(self.root)?,
            script: self.root.join("tests/clients/python/load.py"),
            go_load: setup::go_program(self.root, "load")?,
        })
    }

    fn s3(&self, peer: Peer, rounds: u32, seed: u64) -> Result<Vec<Case>, Missing> {
        setup::openssl()?;
        let tools = s3::Tools {
            gateway: setup::s3_server(self.root, peer)?,
            endless: setup::go_program(self.root, "endless")?,
            load: self.load()?,
        };
        Ok(s3::run(peer, rounds, seed, &self.binary, &tools, &self.directory("s3")))
    }

    fn kill_on(&self, target: Target, rounds: u32, seed: u64) -> Result<Vec<Case>, Missing> {
        let tools = self.load()?;
        let directory = self.directory(&format!("kill-{}", target.name()));
        let name = format!("{rounds} rounds of SIGKILL on {target}, seed {seed}");
        Ok(vec![match kill::run(target, rounds, seed, &self.binary, &tools, &directory, None) {
            Ok(()) => Case::passed(&name),
            Err(Stopped::Skipped(reason)) => {
                println!("skipped: {reason}");
                Case::skipped(&name, reason)
            }
            Err(Stopped::Failed(error)) => {
                println!("not ok - {name}: {error}");
                println!("journals, data and log are kept in {}", directory.display());
                Case::failed(&name, error)
            }
        }])
    }
}

/// Consumers that have read records which a damaged log has lost since: they learn of it by the
/// leader epoch.
fn truncation(server: &mut Server, class_path: &str) -> Result<Vec<Case>, Error> {
    let run = |server: &Server, phase: &str| {
        let mut java = server.client("java");
        java.args(["-Xmx256m", "-cp", class_path, "alluvium.clients.Truncation", phase]);
        tap("alluvium.clients.Truncation", &mut java)
    };
    let mut cases = run(server, "write")?;
    server.end(Ending::Sigkill)?;
    let damaged = server.damage_log(b"lost-")?;
    if damaged == 0 {
        return Err("the log has no record to damage".into());
    }
    server.start_again()?;
    cases.extend(run(server, "verify")?);
    Ok(cases)
}

/// Restarts the server under a client that stays connected, once gracefully and once by SIGKILL.
fn live(server: &mut Server, mut client: Command) -> Result<(), Error> {
    // The client's complaints about an absent server are expected.
    client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = client.spawn()?;
    let mut lines = BufReader::new(child.stdout.take().expect("standard output is piped")).lines();
    let first = lines.next().transpose()?;
    if first.as_deref() != Some("writing") {
        return Err(format!("unexpected first line of the client: {first:?}").into());
    }
    // Some load before, between and after; the amount does not matter.
    for ending in [Ending::Sigterm, Ending::Sigkill] {
        std::thread::sleep(Duration::from_millis(500));
        server.end(ending)?;
        server.start_again()?;
    }
    std::thread::sleep(Duration::from_millis(500));
    let mut stdin = child.stdin.take().expect("standard input is piped");
    stdin.flush()?;
    drop(stdin);
    for line in lines {
        println!("{}", line?);
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(format!("the client ended with {status}").into()) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    #[test]
    fn every_suite_is_a_valid_task_of_this_program() {
        let tasks = tasks(Path::new("/server"), 7);
        for task in &tasks {
            let arguments = ["xtask"].into_iter().chain(task.arguments.iter().map(String::as_str));
            Cli::command().try_get_matches_from(arguments.chain(["--report", "file"])).unwrap();
        }
        // Cargo and loom run before the others, and `compat` is one task for each of its suites.
        let tests = Suite::value_variants().len() - 3;
        assert_eq!(tasks.len(), tests + compat::names().count());
    }
}
