//! The process that is killed, from inside and from outside. Both sides communicate in lines.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio, exit};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use alluvium_device::sim::Random;
use alluvium_journal::{Cache, Error};

use super::plan::{KEYS, Left, Plan, THREADS};
use super::{PATIENCE, PROCESS_DIRECTORY, PROCESS_PLAN, Result};

/// Each thread flushes after this many writes.
const FLUSH_EVERY: u64 = 400;
const SIGKILL: i32 = 9;

/// Reports what the cache contains, receives the first write and their number (0: unlimited), and
/// writes until killed.
pub(super) fn live(directory: &Path, plan: Plan) -> Result<()> {
    let cache = Cache::open(directory, plan.options())?;
    // The test harness has begun a line.
    println!();
    println!("damaged {}", cache.recovered().damaged_bytes);
    for (thread, left) in plan.left_in(&cache)?.iter().enumerate() {
        for (key, number) in left {
            println!("left {thread} {key} {number}");
        }
    }
    println!("ready");
    let mut lines = io::stdin().lines();
    let Some(line) = lines.next() else { return Ok(()) };
    let numbers = line?.split(' ').map(str::parse).collect::<std::result::Result<Vec<u64>, _>>()?;
    let [ref first @ .., burst] = numbers[..] else { return Err("nothing to begin with".into()) };
    thread::scope(|scope| {
        for (thread, first) in first.iter().enumerate() {
            let cache = &cache;
            scope.spawn(move || {
                if let Err(error) = write(cache, &plan, thread, *first, burst) {
                    eprintln!("thread {thread}: {error}");
                    exit(1);
                }
            });
        }
        // The input ends when the parent ends.
        let _ = lines.next();
        exit(0)
    })
}

fn write(cache: &Cache, plan: &Plan, thread: usize, first: u64, burst: u64) -> Result<()> {
    let last = if burst == 0 { u64::MAX } else { first + burst - 1 };
    let mut random = Random::new(first);
    for number in first..=last {
        let (key, words) = plan.write(thread, number);
        let name = Plan::key(thread, key);
        loop {
            let written = match words {
                Some(words) => cache.put(name.as_bytes(), &Plan::value(thread, number, words)),
                None => cache.delete(name.as_bytes()).map(drop),
            };
            match written {
                // Until something was compacted.
                Err(Error::DiskFull { .. }) => thread::sleep(Duration::from_millis(1)),
                written => break written?,
            }
        }
        println!("done {thread} {number}");
        if number.is_multiple_of(FLUSH_EVERY) {
            cache.flush()?;
            println!("flushed {thread} {number}");
        }
        // Records that are read are kept when the oldest journal is evicted.
        cache.get(Plan::key(thread, random.below(KEYS)).as_bytes())?;
    }
    println!("idle {thread}");
    Ok(())
}

/// The process, from outside.
pub(super) struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    pub(super) fn start(directory: &Path, plan: &Plan) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", "the_process", "--nocapture", "--test-threads=1"])
            .env(PROCESS_DIRECTORY, directory)
            .env(PROCESS_PLAN, plan.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().expect("piped");
        let (sender, lines) = channel();
        thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = String::new();
            // An incomplete line at the kill is ignored.
            while stdout.read_line(&mut line).is_ok_and(|read| read > 0) && line.ends_with('\n') {
                if sender.send(line.trim_end().to_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
        Ok(Self { child, lines })
    }

    pub(super) fn line(&self) -> Result<String> {
        self.lines.recv_timeout(PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => "the process tells nothing any more".into(),
            RecvTimeoutError::Disconnected => "the process has ended by itself".into(),
        })
    }

    /// Returns what it has found.
    pub(super) fn found(&self) -> Result<Vec<Left>> {
        let mut found = vec![Left::new(); THREADS];
        loop {
            let line = self.line()?;
            let words: Vec<_> = line.split(' ').collect();
            match words[..] {
                ["ready"] => return Ok(found),
                ["damaged", "0"] => {}
                ["damaged", bytes] => {
                    return Err(format!("{bytes} bytes are damaged, by a kill alone").into());
                }
                ["left", thread, key, number] => {
                    found[thread.parse::<usize>()?].insert(key.parse()?, number.parse()?);
                }
                _ => {} // the harness
            }
        }
    }

    pub(super) fn go(&mut self, first: [u64; THREADS], burst: u64) -> Result<()> {
        let stdin = self.child.stdin.as_mut().expect("piped");
        let first = first.map(|first| first.to_string()).join(" ");
        Ok(writeln!(stdin, "{first} {burst}")?)
    }

    /// Kills it; returns what it had reported and was not yet received.
    pub(super) fn kill(mut self) -> Result<Vec<String>> {
        self.child.kill()?;
        let status = self.child.wait()?;
        if status.signal() != Some(SIGKILL) {
            return Err(format!("the process has ended before it was killed: {status}").into());
        }
        Ok(self.lines.iter().collect())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
