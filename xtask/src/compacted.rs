//! A compacted topic under SIGKILL: the server is killed at random moments while records, some in
//! transactions, are written and compacted as often as possible. After each restart an independent
//! reader must find the last record of each key, and nothing that was aborted.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use crate::Error;
use crate::exec::wait;
use crate::rng::Rng;
use crate::server::{Config, Ending, Objects, Server};

const WAL_MEBIBYTES: u64 = 64;
/// Interrupted producers continue, and all records are read.
const CHECK_LIMIT: Duration = Duration::from_secs(180);
const STOP_LIMIT: Duration = Duration::from_secs(60);
const PASS_LIMIT: Duration = Duration::from_secs(60);
/// The counter of passes of log compaction.
const PASSES: &str = "alluvium_kafka_log_compactions_total";

/// Runs `rounds` kills in `directory`. `load` is the compiled `tests/clients/go/cmd/compacted`.
///
/// # Errors
/// A broken promise; a program that failed; no compaction.
pub(crate) fn run(
    rounds: u32,
    seed: u64,
    binary: &Path,
    load: &Path,
    directory: &Path,
) -> Result<(), Error> {
    println!(
        "compacted, {rounds} rounds, seed {seed}; \
         repeat with: cargo xtask compacted --rounds {rounds} --seed {seed}"
    );
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let often = [
        "--upload-size=1MiB",
        "--upload-interval=200ms",
        "--compaction-size=256KiB",
        "--log-compaction-interval=20ms",
    ];
    let arguments = often.map(str::to_owned).to_vec();
    let config = Config {
        binary: binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: WAL_MEBIBYTES,
        log_cache_mebibytes: WAL_MEBIBYTES / 4,
        wal: None,
        objects: Some(Objects { arguments, environment: Vec::new() }),
    };
    let mut server = Server::start(config)?;
    let mut load = Load::start(&server, load, seed, directory)?;
    let mut rng = Rng::new(seed);
    let (mut passes, mut failures) = (0.0, 0.0);
    for round in 1..=rounds {
        let load_time = rng.duration(Duration::from_millis(100), Duration::from_millis(2500));
        thread::sleep(load_time);
        // A busy machine takes longer to the first pass.
        server.until("a pass of log compaction", PASS_LIMIT, |metrics| {
            Ok(metrics.get(PASSES).is_some_and(|passes| passes > 0.0))
        })?;
        let metrics = server.metrics()?;
        let number = |name| metrics.get(name).ok_or_else(|| format!("no metric {name}"));
        passes += number(PASSES)?;
        failures += number("alluvium_kafka_log_compaction_failures_total")?;
        server.end(Ending::Sigkill)?;
        let mut kills = 1;
        // In one of three rounds it is killed again during recovery, or during the compaction right
        // after it.
        while rng.below(3) == 0 {
            server.spawn_again()?;
            thread::sleep(rng.duration(Duration::ZERO, Duration::from_millis(600)));
            server.end(Ending::Sigkill)?;
            kills += 1;
        }
        server.start_again()?;
        let found = load
            .check()
            .map_err(|error| format!("seed {seed}, round {round}: {error}{}", server.log_tail()))?;
        println!("round {round}: {} ms, {kills} SIGKILL; {found}", load_time.as_millis());
    }
    load.finish()?;
    println!("{passes} passes before the kills, {failures} of them failed");
    if passes < f64::from(rounds) || failures > 0.0 {
        return Err("too few passes, or passes that failed".into());
    }
    server.finish()?;
    fs::remove_dir_all(directory)?;
    Ok(())
}

/// The program that writes and checks.
struct Load {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    log: std::path::PathBuf,
}

impl Load {
    fn start(server: &Server, program: &Path, seed: u64, directory: &Path) -> Result<Self, Error> {
        let log = directory.join("load.log");
        let mut command = server.client(program);
        command.args(["--bootstrap", &server.address(), "--seed", &seed.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take().ok_or("no standard output")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // After a failure of the campaign the receiver is gone.
                let _ = sender.send(line);
            }
        });
        Ok(Self { child, input, lines, log })
    }

    /// Returns its summary after it has checked all records.
    fn check(&mut self) -> Result<String, Error> {
        let input = self.input.as_mut().ok_or("it has ended")?;
        let asked = input.write_all(b"check\n");
        let summary = self.lines.recv_timeout(CHECK_LIMIT);
        asked.map_err(Error::from).and_then(|()| Ok(summary?)).map_err(|error| {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            format!("{error}\n{log}").into()
        })
    }

    fn finish(&mut self) -> Result<(), Error> {
        drop(self.input.take());
        match wait(&mut self.child, STOP_LIMIT)? {
            Some(status) if status.success() => Ok(()),
            status => Err(format!("the load ended with {status:?}").into()),
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
