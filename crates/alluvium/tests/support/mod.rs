//! Shared code of the tests of the binary: running it, and a server that is stopped when a test
//! ends.
#![allow(dead_code, unreachable_pub)]

pub mod cluster;
pub mod log;
pub mod nbd;
pub mod parts;
pub mod produce;
pub mod s3;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use alluvium_device::sim::Random;
use rustix::process::{Pid, Signal, kill_process};

/// Long enough for the slowest machine; only a server that hangs reaches it.
pub const HANGS: Duration = Duration::from_secs(120);

/// The binary, without the environment's ALLUVIUM_ variables.
pub fn alluvium() -> Command {
    unswayed(Command::new(env!("CARGO_BIN_EXE_alluvium")))
}

fn unswayed(mut command: Command) -> Command {
    for (key, _) in
        std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("ALLUVIUM_"))
    {
        command.env_remove(key);
    }
    command
}

/// Runs the binary to its end.
pub fn run(arguments: &[&str]) -> Output {
    alluvium().args(arguments).output().expect("the binary starts")
}

/// Runs the binary, which must succeed. Returns its output.
pub fn ok(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).expect("the output is text")
}

/// Runs the binary, which must succeed and print JSON.
pub fn ok_json(arguments: &[&str]) -> serde_json::Value {
    let text = ok(arguments);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

/// Runs the binary, which must fail with `code`. Returns its standard error.
pub fn refused(code: i32, arguments: &[&str]) -> String {
    let output = run(arguments);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    said
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are text")
}

/// Polls until something is so.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < HANGS, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// An address that no other process uses: it is derived from the process ID. Its port is
/// outside of the range of ephemeral ports, so that no client connects from it.
pub fn own_address() -> String {
    static PORT: AtomicU16 = AtomicU16::new(20_000);
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let port = PORT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{b}.{c}:{port}", a | 0x80)
}

/// Asserts that `text` contains all of `parts`.
#[track_caller]
pub fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is missing in: {text}");
    }
}

/// Whether Python is installed; prints a message if not.
pub fn python_is_there() -> bool {
    let there = Command::new("python3")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success());
    if !there {
        eprintln!("skipped: python3 is not installed");
    }
    there
}

/// A help text without its line breaks.
pub fn help(arguments: &[&str]) -> String {
    ok(arguments).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Writes a file of zeros in full, with `bytes` at `at`.
pub fn write_target(path: &Path, len_bytes: usize, at: usize, bytes: &[u8]) {
    let mut content = vec![0; len_bytes];
    content[at..at + bytes.len()].copy_from_slice(bytes);
    std::fs::write(path, content).expect("the file can be written");
}

/// A running server with ports of its own; killed when it is dropped.
pub struct Server {
    child: Child,
    lines: Receiver<String>,
    /// Its log so far.
    pub log: String,
    /// The address of its Kafka listener.
    pub kafka: String,
    /// The address of its Redis listener, if it is a cache.
    pub redis: String,
    /// The address of its admin port, if it has one.
    pub admin: Option<String>,
}

impl Server {
    /// Starts a server in `data_dir`, with a small log and free ports, and waits until it is ready.
    pub fn start(data_dir: &Path, arguments: &[&str]) -> Self {
        Self::start_command(Self::command(data_dir, arguments))
    }

    pub fn command(data_dir: &Path, arguments: &[&str]) -> Command {
        let mut command = alluvium();
        command.arg("serve").arg("--data-dir").arg(data_dir);
        for port in ["--listen", "--admin-listen"] {
            if !arguments.contains(&port) {
                command.args([port, "127.0.0.1:0"]);
            }
        }
        command.args(arguments);
        command
    }

    /// Starts a server in a process with this soft limit on open files and this process's hard
    /// limit.
    pub fn start_with_files(files: u32, data_dir: &Path, arguments: &[&str]) -> Self {
        let serve = Self::command(data_dir, arguments);
        let mut command = unswayed(Command::new("sh"));
        let script = format!("ulimit -S -n {files} && exec \"$0\" \"$@\"");
        command.args(["-c", &script]).arg(serve.get_program()).args(serve.get_args());
        Self::start_command(command)
    }

    pub fn start_command(command: Command) -> Self {
        let (mut server, ready) = Self::spawn(command, "alluvium is ready");
        server.kafka = after(&ready, "kafka on ").expect("the line names the Kafka port");
        server.admin = after(&ready, "http://");
        server
    }

    /// Starts a server, and waits until the admin port is open.
    pub fn start_up_to_admin_port(command: Command) -> Self {
        let (mut server, open) = Self::spawn(command, "the admin port is open");
        server.admin = after(&open, "http://");
        server
    }

    /// Starts `alluvium cache serve` with these arguments, and waits until it is ready.
    pub fn start_cache(arguments: &[&str]) -> Self {
        Self::start_cache_by(alluvium(), arguments)
    }

    /// Starts `alluvium cache serve` in a process with this limit on open files.
    pub fn start_cache_with_files(files: u32, arguments: &[&str]) -> Self {
        let mut command = unswayed(Command::new("sh"));
        let script = format!("ulimit -n {files} && exec \"$0\" \"$@\"");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_alluvium")]);
        Self::start_cache_by(command, arguments)
    }

    fn start_cache_by(mut command: Command, arguments: &[&str]) -> Self {
        command.args(["cache", "serve", "--listen", "127.0.0.1:0"]).args(arguments);
        let (mut server, ready) = Self::spawn(command, "alluvium cache is ready");
        server.redis = after(&ready, "redis on ").expect("the line names the port of clients");
        server.admin = after(&ready, "http://");
        server
    }

    /// Starts a command that serves, and waits for a line of its log.
    pub fn start_until(command: Command, ready: &str) -> Self {
        let mut server = Self::spawn(command, ready).0;
        let open = server.log.lines().find(|line| line.contains("the admin port is open"));
        server.admin = open.and_then(|open| after(open, "http://"));
        server
    }

    fn spawn(mut command: Command, ready: &str) -> (Self, String) {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let stderr = child.stderr.take().expect("it is piped");
        let (tx, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if tx.send(line).is_err() {
                    break;
                }
            }
        });
        let [log, kafka, redis] = [const { String::new() }; 3];
        let mut server = Self { child, lines, log, kafka, redis, admin: None };
        let ready = server.wait_for(ready);
        (server, ready)
    }

    /// Waits for a line of the log.
    pub fn wait_for(&mut self, part: &str) -> String {
        let began = Instant::now();
        loop {
            match self.lines.recv_timeout(HANGS.saturating_sub(began.elapsed())) {
                Ok(line) => {
                    writeln!(self.log, "{line}").expect("a string can be written to");
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("no `{part}` in the log: {}", self.log),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the server ended without `{part}`: {}", self.log)
                }
            }
        }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends a signal and waits for the end.
    pub fn stop(self, signal: Signal) -> (ExitStatus, String) {
        kill_process(self.pid(), signal).expect("the server runs");
        self.end()
    }

    /// Waits for the end; returns the exit status and the whole log.
    pub fn end(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().expect("it can be waited for");
        while let Ok(line) = self.lines.recv_timeout(HANGS) {
            writeln!(self.log, "{line}").expect("a string can be written to");
        }
        (status, std::mem::take(&mut self.log))
    }

    /// Polls the health until the answer starts with `start`.
    pub fn wait_for_health(&self, start: &str) -> (String, String) {
        let began = Instant::now();
        loop {
            let health = self.get("/healthz");
            if health.1.starts_with(start) {
                return health;
            }
            assert!(began.elapsed() < HANGS, "{health:?} instead of `{start}`");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Requests a path of the admin port; returns status line and body.
    pub fn get(&self, path: &str) -> (String, String) {
        use std::io::{Read, Write};
        let admin = self.admin.as_deref().expect("the admin port is open");
        let mut stream = std::net::TcpStream::connect(admin).expect("the admin port accepts");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {admin}\r\nConnection: close\r\n\r\n")
            .expect("the request can be sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("there is an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("the answer has a body");
        (head.lines().next().unwrap_or_default().to_string(), body.to_string())
    }
}

/// Bytes without a pattern.
pub fn random_bytes(random: &mut Random, length: usize) -> Vec<u8> {
    let words = std::iter::repeat_with(|| random.next_u64().to_le_bytes());
    words.take(length.div_ceil(8)).flatten().take(length).collect()
}

/// Checks that docs/metrics.md has each shown metric with its type, and that each of its section
/// with this heading is shown.
pub fn assert_documented(shown: &str, heading: &str) {
    let document = include_str!("../../../../docs/metrics.md");
    let rows = |text: &str| -> std::collections::BTreeSet<String> {
        let rows = text.lines().filter(|line| line.starts_with("| `"));
        rows.map(|line| line.splitn(4, '|').take(3).collect::<Vec<_>>().join("|") + "|").collect()
    };
    let (_, section) = document.split_once(&format!("\n{heading}\n")).expect("the heading exists");
    let section = section.split("\n#").next().expect("a section has text");
    let types = shown.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let shown = types.map(|line| {
        let (name, kind) = line.split_once(' ').expect("a name and a type");
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        format!("| `{name}{suffix}` | {kind} |")
    });
    let shown: std::collections::BTreeSet<_> = shown.collect();
    let (documented, section) = (rows(document), rows(section));
    let unknown: Vec<_> = shown.difference(&documented).collect();
    assert!(unknown.is_empty(), "not documented: {unknown:?}");
    let missing: Vec<_> = section.difference(&shown).collect();
    assert!(missing.is_empty(), "documented and not shown: {missing:?}");
}

/// The address behind `mark`.
fn after(line: &str, mark: &str) -> Option<String> {
    let rest = line.split_once(mark)?.1;
    Some(rest.split([',', ' ', '/']).next().unwrap_or(rest).to_string())
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already if the test stopped it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
