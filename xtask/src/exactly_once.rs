//! Exactly once under SIGKILL: records are consumed, transformed and produced in transactions while
//! the server and the transformers are killed at random moments; at the end the output must contain
//! each input exactly once.
//!
//! Two transformers share a group: franz-go with version 2 of transactions (KIP-890), librdkafka
//! with version 1. The feed is never killed, so that it can report the number of records.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::exec::{describe, output, wait};
use crate::rng::Rng;
use crate::server::{Config, Ending, Server};

/// A killed transformer holds its partitions for a session timeout of 6 s, and its open transaction
/// for 10 s.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(180);
const STOP_LIMIT: Duration = Duration::from_secs(60);
const WAL_MEBIBYTES: u64 = 128;

/// The programs.
pub(crate) struct Tools {
    /// A Python with confluent-kafka.
    pub(crate) python: PathBuf,
    /// `tests/clients/python/transform.py`.
    pub(crate) script: PathBuf,
    /// The compiled `tests/clients/go/cmd/exactlyonce`.
    pub(crate) go: PathBuf,
}

/// Runs `rounds` kills in `directory`.
///
/// # Errors
/// A missing or duplicate record; a program that failed.
pub(crate) fn run(
    rounds: u32,
    seed: u64,
    binary: &Path,
    tools: &Tools,
    directory: &Path,
) -> Result<(), Error> {
    println!(
        "exactly once, {rounds} rounds, seed {seed}; \
         repeat with: cargo xtask exactly-once --rounds {rounds} --seed {seed}"
    );
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let config = Config {
        binary: binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: WAL_MEBIBYTES,
        log_cache_mebibytes: WAL_MEBIBYTES / 4,
        wal: None,
        objects: None,
    };
    let mut campaign = Campaign::start(config, tools, directory)?;
    let mut rng = Rng::new(seed);
    for round in 1..=rounds {
        campaign.round(round, &mut rng).map_err(|error| format!("round {round}: {error}"))?;
    }
    campaign.finish()?;
    fs::remove_dir_all(directory)?;
    Ok(())
}

struct Campaign<'a> {
    server: Server,
    tools: &'a Tools,
    directory: &'a Path,
    feed: Process,
    transformers: Vec<Process>,
}

impl<'a> Campaign<'a> {
    fn start(config: Config, tools: &'a Tools, directory: &'a Path) -> Result<Self, Error> {
        let server = Server::start(config)?;
        output(go(&server, tools, "create").stdin(Stdio::null()))?;
        let feed = Process::start(go(&server, tools, "feed"), directory, "feed")?;
        let transformers = (0..2)
            .map(|which| transformer(&server, tools, directory, which))
            .collect::<Result<_, _>>()?;
        Ok(Self { server, tools, directory, feed, transformers })
    }

    /// Lets a few transactions complete, then kills one of the three.
    fn round(&mut self, round: u32, rng: &mut Rng) -> Result<(), Error> {
        let load_time = rng.duration(Duration::from_millis(100), Duration::from_millis(2500));
        thread::sleep(load_time);
        let victim = rng.below(3);
        let what = match usize::try_from(victim) {
            Ok(which @ 0..2) => {
                self.transformers[which].kill()?;
                self.transformers[which] =
                    transformer(&self.server, self.tools, self.directory, which)?;
                self.transformers[which].name
            }
            _ => {
                self.server.end(Ending::Sigkill)?;
                self.server.start_again()?;
                "the server"
            }
        };
        println!("round {round}: {} ms, then SIGKILL of {what}", load_time.as_millis());
        self.feed.check_alive()?;
        self.transformers.iter_mut().try_for_each(Process::check_alive)
    }

    fn finish(mut self) -> Result<(), Error> {
        let records = self.feed.finish()?;
        let records: u64 = records.trim().parse()?;
        let begun = Instant::now();
        loop {
            let behind = String::from_utf8(output(&mut go(&self.server, self.tools, "lag"))?)?;
            if behind.trim() == "0" {
                break;
            }
            if begun.elapsed() > CATCH_UP_LIMIT {
                let log = self.server.log_tail();
                let behind = behind.trim();
                return Err(format!("{behind} of {records} inputs are not transformed{log}").into());
            }
            thread::sleep(Duration::from_millis(500));
        }
        for transformer in &mut self.transformers {
            transformer.finish()?;
        }
        let mut verify = go(&self.server, self.tools, "verify");
        let violations = output(verify.args(["--records", &records.to_string()]))?;
        print!("{}", String::from_utf8_lossy(&violations));
        println!("end: {records} inputs, each exactly once in the output");
        self.server.finish()
    }
}

fn go(server: &Server, tools: &Tools, command: &str) -> Command {
    let mut go = server.client(&tools.go);
    go.arg(command).args(["--bootstrap", &server.address()]);
    go
}

fn transformer(
    server: &Server,
    tools: &Tools,
    directory: &Path,
    which: usize,
) -> Result<Process, Error> {
    if which == 0 {
        return Process::start(go(server, tools, "transform"), directory, "franz-go");
    }
    let mut python = server.client(&tools.python);
    python.arg(&tools.script).args(["--bootstrap", &server.address()]);
    Process::start(python, directory, "librdkafka")
}

/// A program that runs until its standard input ends. Its standard error goes to a file.
struct Process {
    name: &'static str,
    what: String,
    child: Child,
}

impl Process {
    fn start(mut command: Command, directory: &Path, name: &'static str) -> Result<Self, Error> {
        let log = directory.join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(log)?;
        let what = describe(&command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let child = command.spawn().map_err(|error| format!("`{what}`: {error}"))?;
        Ok(Self { name, what, child })
    }

    fn kill(&mut self) -> Result<(), Error> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    fn check_alive(&mut self) -> Result<(), Error> {
        match self.child.try_wait()? {
            Some(status) => Err(format!("`{}` ended with {status}", self.what).into()),
            None => Ok(()),
        }
    }

    /// Ends its input, waits for its end, and returns its output.
    fn finish(&mut self) -> Result<String, Error> {
        drop(self.child.stdin.take());
        let status = wait(&mut self.child, STOP_LIMIT)?;
        let mut printed = String::new();
        if let Some(mut stdout) = self.child.stdout.take() {
            stdout.read_to_string(&mut printed)?;
        }
        match status {
            Some(status) if status.success() => Ok(printed),
            Some(status) => Err(format!("`{}` ended with {status}", self.what).into()),
            None => {
                let seconds = STOP_LIMIT.as_secs();
                Err(format!("`{}` did not finish within {seconds} s", self.what).into())
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already; the error is of no use here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
