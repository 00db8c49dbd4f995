//! The kill test: SIGKILL at random moments under load, each followed by a check of the server's
//! data.
//!
//! Real idempotent producers (librdkafka, franz-go) and consumer groups run through all kills, in
//! their own processes, and log what they were promised. After each restart an independent reader
//! (kcat) reads every partition from the start, and [`check`] compares.

mod check;

use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use self::check::{Promises, ServerData};
use crate::Error;
use crate::exec::{describe, each_line, output, quietly, wait};
use crate::loopdev::{self, LoopDevice};
use crate::rng::Rng;
use crate::s3::Gateway;
use crate::server::{Config, Ending, Server};

const TOPIC: &str = "kill";
const PARTITIONS: u32 = 6;
/// The groups of the two loads, which have the names of their producers.
const GROUPS: [&str; 2] = ["py", "go"];
/// Small, so that a campaign passes through the ring many times: uploads and trims happen between
/// the kills.
const WAL_MEBIBYTES: u64 = 128;
/// Clients reconnect within a second; only a server that refuses clients takes longer.
const PROGRESS_LIMIT: Duration = Duration::from_secs(90);

/// A partition holds some hundred MiB at the end of a long campaign.
const READ_LIMIT: Duration = Duration::from_secs(300);

/// What the WAL is stored on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// A regular file.
    File,
    /// A loop block device.
    Loop,
}

impl Target {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Loop => "loop",
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "a file",
            Self::Loop => "a loop device",
        })
    }
}

/// The programs of the load.
pub(crate) struct Tools {
    /// A Python with confluent-kafka.
    pub(crate) python: PathBuf,
    /// `tests/clients/python/load.py`.
    pub(crate) script: PathBuf,
    /// The compiled `tests/clients/go/cmd/load`.
    pub(crate) go_load: PathBuf,
}

/// Why a campaign has no result.
pub(crate) enum Stopped {
    /// It cannot run here.
    Skipped(String),
    /// A promise was broken, or the test itself could not continue.
    Failed(Error),
}

impl<E: Into<Error>> From<E> for Stopped {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Runs a campaign of `rounds` kills in `directory`. An object store in its own process is killed
/// too.
pub(crate) fn run(
    target: Target,
    rounds: u32,
    seed: u64,
    server_binary: &Path,
    tools: &Tools,
    directory: &Path,
    gateway: Option<&mut Gateway>,
) -> Result<(), Stopped> {
    let again = match &gateway {
        None => format!("kill --rounds {rounds} --seed {seed} --target {}", target.name()),
        Some(gateway) => format!("s3 --rounds {rounds} --seed {seed} --peer {}", gateway.peer()),
    };
    println!(
        "kill test on {target}, {rounds} rounds, seed {seed}; repeat with: cargo xtask {again}"
    );
    if directory.exists() {
        // Left by an earlier run that was interrupted.
        drop(LoopDevice::left_in(directory)?);
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let device = match target {
        Target::File => None,
        Target::Loop => {
            let image = directory.join("loop.img");
            loopdev::write_image(&image, WAL_MEBIBYTES)?;
            match LoopDevice::attach(&image) {
                Ok(device) => Some(device),
                Err(error) => {
                    fs::remove_dir_all(directory)?;
                    return Err(Stopped::Skipped(format!("no loop device: {error}")));
                }
            }
        }
    };
    let config = Config {
        binary: server_binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: WAL_MEBIBYTES,
        log_cache_mebibytes: WAL_MEBIBYTES / 4,
        wal: device.as_ref().map(|device| device.path().to_path_buf()),
        objects: gateway
            .as_ref()
            .map(|gateway| gateway.objects(&["--upload-size=1MiB", "--upload-interval=300ms"])),
    };
    let mut campaign = Campaign::start(config, tools, directory, seed, gateway)?;
    for round in 1..=rounds {
        campaign.round(round).map_err(|error| in_round(round, seed, &error))?;
    }
    campaign.finish().map_err(|error| in_round(rounds, seed, &error))?;
    drop(device);
    fs::remove_dir_all(directory)?;
    Ok(())
}

fn in_round(round: u32, seed: u64, error: &Error) -> Error {
    format!("seed {seed}, round {round}: {error}").into()
}

struct Campaign<'a> {
    server: Server,
    gateway: Option<&'a mut Gateway>,
    tools: &'a Tools,
    loads: Vec<Load>,
    promises: Promises,
    rng: Rng,
}

impl<'a> Campaign<'a> {
    fn start(
        config: Config,
        tools: &'a Tools,
        dir: &Path,
        seed: u64,
        gateway: Option<&'a mut Gateway>,
    ) -> Result<Self, Error> {
        let server = Server::start(config)?;
        let common = [
            "--bootstrap".to_owned(),
            server.address(),
            "--topic".to_owned(),
            TOPIC.to_owned(),
            "--partitions".to_owned(),
            PARTITIONS.to_string(),
        ];
        let python = |command: &str| {
            let mut python = server.client(&tools.python);
            python.arg(&tools.script).arg(command).args(&common);
            python
        };
        quietly(&mut python("create"))?;
        let journals = [dir.join("py.journal"), dir.join("go.journal")];
        let mut commands = [python("load"), server.client(&tools.go_load)];
        commands[1].args(&common);
        let mut loads = Vec::new();
        for ((command, journal), name) in commands.iter_mut().zip(journals).zip(GROUPS) {
            command.args(["--name", name, "--seed", &seed.to_string(), "--journal"]).arg(&journal);
            loads.push(Load::start(command, journal)?);
        }
        let (promises, rng) = (Promises::default(), Rng::new(seed));
        Ok(Self { server, gateway, tools, loads, promises, rng })
    }

    /// Load, kill, restart, check.
    fn round(&mut self, round: u32) -> Result<(), Error> {
        self.wait_for_progress()?;
        let load_time = self.rng.duration(Duration::from_millis(50), Duration::from_millis(2500));
        thread::sleep(load_time);
        if let Some(gateway) = &mut self.gateway
            && self.rng.below(2) == 0
        {
            // The server may be in the middle of an upload, and has some time to notice the outage.
            gateway.end()?;
            thread::sleep(self.rng.duration(Duration::ZERO, Duration::from_millis(600)));
            if self.rng.below(2) == 0 {
                gateway.start_again()?;
            }
        }
        self.server.end(Ending::Sigkill)?;
        let mut kills = 1;
        // In one of three rounds it is killed again during recovery.
        while self.rng.below(3) == 0 {
            let recovering = self.rng.duration(Duration::ZERO, Duration::from_millis(400));
            self.server.spawn_again()?;
            thread::sleep(recovering);
            self.server.end(Ending::Sigkill)?;
            kills += 1;
        }
        let began = Instant::now();
        self.server.spawn_again()?;
        if let Some(gateway) = &mut self.gateway {
            // The start waits for it.
            thread::sleep(self.rng.duration(Duration::ZERO, Duration::from_millis(600)));
            gateway.start_again()?;
        }
        self.server.wait_until_ready()?;
        let start_time = began.elapsed();
        let records = self.check()?;
        println!(
            "round {round}: {} ms of load, {kills} SIGKILL, restarted in {} ms; {records} records, \
             {} acknowledged, {} delivered: all there",
            load_time.as_millis(),
            start_time.as_millis(),
            self.promises.acknowledged(),
            self.promises.delivered(),
        );
        Ok(())
    }

    /// Waits until each producer gets a new acknowledgement: a round without load would check
    /// nothing.
    fn wait_for_progress(&mut self) -> Result<(), Error> {
        self.read_journals()?;
        let before = self.promises.by_producer();
        let deadline = Instant::now() + PROGRESS_LIMIT;
        loop {
            self.read_journals()?;
            let now = self.promises.by_producer();
            let moved = |producer| now.get(producer) > before.get(producer);
            if now.len() == 2 * GROUPS.len() && now.keys().all(moved) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let counts: Vec<String> =
                    now.iter().map(|(who, count)| format!("{who}: {count}")).collect();
                return Err(format!(
                    "not every producer got an answer within {} s; records acknowledged: {}{}",
                    PROGRESS_LIMIT.as_secs(),
                    counts.join(", "),
                    self.server.log_tail()
                )
                .into());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Compares the promises with the server's data, and returns the number of its records.
    fn check(&mut self) -> Result<usize, Error> {
        // The promises are read before the data: a promise made in between need not be in the data
        // yet.
        self.read_journals()?;
        let data = self.read_server()?;
        let violations = check::check(&self.promises, &data);
        if violations.is_empty() {
            return Ok(data.records());
        }
        let shown: Vec<String> =
            violations.iter().take(20).map(|each| format!("\n  {each}")).collect();
        Err(format!("{} promises were broken:{}", violations.len(), shown.concat()).into())
    }

    fn read_journals(&mut self) -> Result<(), Error> {
        for load in &mut self.loads {
            load.read_journal(&mut self.promises)?;
        }
        Ok(())
    }

    fn read_server(&self) -> Result<ServerData, Error> {
        let mut data = ServerData::default();
        // The commits are read first: a member may commit while the records are being read, and its
        // commit must not appear to be beyond their end.
        for group in GROUPS {
            let mut python = self.server.client(&self.tools.python);
            python.arg(&self.tools.script).args(["committed", "--name", group, "--topic", TOPIC]);
            python.args(["--bootstrap", &self.server.address()]);
            python.args(["--partitions", &PARTITIONS.to_string()]);
            for line in String::from_utf8(output(&mut python)?)?.lines() {
                data.commit_line(group, line)?;
            }
        }
        for partition in 0..PARTITIONS {
            self.read_partition(partition, &mut data)?;
        }
        Ok(data)
    }

    /// Reads a partition from its start to its current end. A reader that finds the end itself
    /// would never finish, since the producers continue.
    fn read_partition(&self, partition: u32, data: &mut ServerData) -> Result<(), Error> {
        let kcat = |arguments: &[&str]| {
            let mut command = self.server.client("kcat");
            command.args(["-q", "-b", &self.server.address()]);
            command.args(arguments);
            command
        };
        let query = output(&mut kcat(&["-Q", "-t", &format!("{TOPIC}:{partition}:-1")]))?;
        let query = String::from_utf8(query)?;
        let end = query.trim().rsplit_once(' ').map_or("", |(_, end)| end);
        if end == "0" {
            return Ok(()); // kcat takes a count of 0 for "all"
        }
        let (partition, count) = (partition.to_string(), end.parse::<u64>()?.to_string());
        let arguments = [
            "-C",
            "-t",
            TOPIC,
            "-p",
            &partition,
            "-o",
            "beginning",
            "-c",
            &count,
            "-X",
            "check.crcs=true",
            "-f",
            "%p %o %k\n",
        ];
        let mut refused = None;
        let status = each_line(&mut kcat(&arguments), READ_LIMIT, |line| {
            if refused.is_none() {
                refused = data.record_line(line).err();
            }
        })?;
        match refused {
            Some(reason) => Err(reason.into()),
            None if status.success() => Ok(()),
            None => {
                Err(format!("reading partition {partition} up to {end}: kcat: {status}").into())
            }
        }
    }

    /// Lets the producers finish, checks a last time, and stops the server.
    fn finish(mut self) -> Result<(), Error> {
        self.wait_for_progress()?;
        for load in &mut self.loads {
            load.finish()?;
        }
        let records = self.check()?;
        let complete = self.promises.ended();
        if complete != GROUPS.len() {
            return Err(format!("{complete} of {} journals are complete", GROUPS.len()).into());
        }
        // No request is in progress any more: the server holds exactly what was acknowledged.
        let acknowledged = self.promises.acknowledged();
        if records != acknowledged {
            return Err(format!("{records} records exist, {acknowledged} were acknowledged").into());
        }
        println!("end: {records} records, each acknowledged once");
        self.server.finish()
    }
}

/// A process that produces and consumes until it is stopped.
struct Load {
    what: String,
    child: Child,
    journal: PathBuf,
    /// Bytes of the journal that have been read: complete lines only.
    read_bytes: u64,
}

impl Load {
    fn start(command: &mut Command, journal: PathBuf) -> Result<Self, Error> {
        let what = describe(command);
        // The clients' messages about lost connections go to a log beside the journal.
        let log = File::create(journal.with_extension("log"))?;
        let child = command
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .map_err(|error| format!("`{what}`: {error}"))?;
        Ok(Self { what, child, journal, read_bytes: 0 })
    }

    fn read_journal(&mut self, promises: &mut Promises) -> Result<(), Error> {
        // The process may not have created it yet.
        let Ok(mut file) = File::open(&self.journal) else { return Ok(()) };
        file.seek(SeekFrom::Start(self.read_bytes))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let complete = text.rfind('\n').map_or(0, |last| last + 1);
        for line in text[..complete].lines() {
            promises.line(line)?;
        }
        self.read_bytes += complete as u64;
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Error> {
        drop(self.child.stdin.take());
        match wait(&mut self.child, PROGRESS_LIMIT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("`{}`: {status}", self.what).into()),
            None => {
                let seconds = PROGRESS_LIMIT.as_secs();
                Err(format!("`{}` did not finish within {seconds} s", self.what).into())
            }
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // The process may have ended already; the error is of no use here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
