//! A server whose standard error accepts no more bytes: it continues, and a failed log still ends
//! it.

mod support;

use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use support::produce::produce;
use support::{HANGS, Server, contains, ok, own_address, until};

/// A server whose log is unreadable, so its ports are chosen here.
struct Mute {
    child: Child,
    /// The address of its Kafka listener.
    clients: String,
    admin: String,
}

impl Mute {
    fn start(data: &tempfile::TempDir, stderr: impl Into<Stdio>) -> Self {
        let (kafka, admin) = (own_address(), own_address());
        let arguments =
            ["--wal-capacity", "64MiB", "--log", "trace", "--listen", &kafka, "--admin-listen"];
        let inner = Server::command(data.path(), &[&arguments[..], &[&admin]].concat());
        let mut command = Command::new("sh");
        // With the signal ignored, a write beyond the limit on file sizes fails with EFBIG.
        command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]);
        command.arg(inner.get_program()).args(inner.get_args());
        Self::spawn(command, stderr, kafka, admin)
    }

    fn spawn(
        mut command: Command,
        stderr: impl Into<Stdio>,
        clients: String,
        admin: String,
    ) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let child = command.spawn().expect("the server starts");
        let server = Self { child, clients, admin };
        until("the server accepts clients", || TcpStream::connect(&server.clients).is_ok());
        server
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.admin).expect("the admin port accepts");
        stream.set_read_timeout(Some(HANGS)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.admin).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("there is an answer");
        answer
    }

    fn dropped_lines(&self) -> u64 {
        let metrics = self.get("/metrics");
        let name = "alluvium_log_dropped_lines_total ";
        let value = metrics.lines().find_map(|line| line.strip_prefix(name));
        value.expect("the metric exists").parse().expect("an integer")
    }
}

impl Drop for Mute {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks that the server acknowledges and answers until `is_blocked`, and after that; then its log
/// fails, and it ends.
fn goes_on_and_ends(
    data: &tempfile::TempDir,
    mut server: Mute,
    is_blocked: impl Fn(&Mute) -> bool,
) {
    ok(&["topic", "create", "orders", "--bootstrap", &server.clients]);
    let produce_one = |server: &Mute| {
        assert_eq!(produce(&server.clients, "orders", b"a record").unwrap(), 0);
    };
    until("standard error accepts nothing more", || {
        (0..50).for_each(|_| produce_one(&server));
        is_blocked(&server)
    });
    for _ in 0..20 {
        produce_one(&server);
    }
    contains(&server.get("/healthz"), &["HTTP/1.1 200 OK", "\r\n\r\nok\n"]);

    let none = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(Some(Pid::from_child(&server.child)), Resource::Fsize, none).unwrap();
    let answer = produce(&server.clients, "orders", b"not written");
    assert!(!matches!(answer, Ok(0)), "acknowledged although nothing was written: {answer:?}");
    let mut ended = None;
    until("the server ends", || {
        ended = server.child.try_wait().expect("it can be waited for");
        ended.is_some()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(3), "{}", data.path().display());
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

/// The capacity of a Linux pipe (pipe(7)).
const PIPE_BYTES: usize = 65_536;

/// Runs a command whose standard error is full and not read. Returns its exit code.
fn code_with_full_stderr(mut command: Command) -> Option<i32> {
    let (_reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[b'x'; PIPE_BYTES]).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
    exit_code(command.spawn().unwrap())
}

fn exit_code(mut child: Child) -> Option<i32> {
    let mut status = None;
    until("the process ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code()
}

#[test]
fn a_refused_configuration_ends_the_process() {
    let data = tempfile::tempdir().unwrap();
    for wrong in
        [["--log", "nonsense"], ["--upload-size", "1TiB"], ["--wal-capacity", "x"], ["--no-x", ""]]
    {
        let command = Server::command(data.path(), &wrong);
        assert_eq!(code_with_full_stderr(command), Some(2), "{wrong:?}");
    }
}

#[test]
fn arguments_that_cannot_be_parsed_end_the_process() {
    for wrong in [&[][..], &["nonsense"], &["serve", "--listen"], &["cache", "serve", "--no-x"]] {
        let mut command = support::alluvium();
        command.args(wrong);
        assert_eq!(code_with_full_stderr(command), Some(2), "{wrong:?}");
    }
}

/// `alluvium --help | head -1`, whose reader may be gone before anything is written.
#[test]
fn help_and_version_end_well_without_a_reader() {
    for arguments in [&["--help"][..], &["--version"], &["serve", "--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = support::alluvium();
        command.args(arguments).stdin(Stdio::null()).stdout(writer);
        assert_eq!(exit_code(command.spawn().unwrap()), Some(0), "{arguments:?}");
    }
}

/// Creates a full terminal that is not read, and executes a program with it as standard error. The
/// program itself keeps the other side open.
const IN_FULL_TERMINAL: &str = "
import os, pty, sys
master, terminal = pty.openpty()
os.set_inheritable(master, True)
os.set_blocking(terminal, False)
try:
    while True:
        os.write(terminal, b'x')
except BlockingIOError:
    pass
os.set_blocking(terminal, True)
os.dup2(terminal, 2)
os.execv(sys.argv[1], sys.argv[1:])
";

#[test]
fn a_server_survives_a_terminal_that_is_not_read() {
    if Command::new("python3").args(["-c", "import pty"]).status().is_err() {
        return println!("skipped: python3, which creates the terminal, is not installed");
    }
    let data = directory();
    let (kafka, admin) = (own_address(), own_address());
    let arguments = ["--wal-capacity", "64MiB", "--log", "trace", "--listen", &kafka];
    let arguments = [&arguments[..], &["--admin-listen", &admin]].concat();
    let server = Mute::spawn(
        in_full_terminal(&Server::command(data.path(), &arguments)),
        Stdio::null(),
        kafka,
        admin,
    );
    goes_on_and_ends(&data, server, |_| true);

    let mut wrong = in_full_terminal(&Server::command(data.path(), &["--log", "nonsense"]));
    assert_eq!(exit_code(wrong.spawn().unwrap()), Some(2));
}

fn in_full_terminal(command: &Command) -> Command {
    // With the signal ignored, a write beyond the limit on file sizes fails with EFBIG.
    let script =
        format!("import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN){IN_FULL_TERMINAL}");
    let mut python = Command::new("python3");
    python.args(["-c", &script]).arg(command.get_program()).args(command.get_args());
    python
}

#[test]
fn a_server_survives_a_full_disk_under_its_log() {
    let data = directory();
    // Each write to it fails with ENOSPC.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let server = Mute::start(&data, full);
    goes_on_and_ends(&data, server, |server| server.dropped_lines() > 0);
}

#[test]
fn a_server_survives_a_pipe_without_a_reader() {
    let data = directory();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let server = Mute::start(&data, writer);
    goes_on_and_ends(&data, server, |server| server.dropped_lines() > 0);
}

#[test]
fn a_server_survives_a_pipe_that_is_not_read() {
    let data = directory();
    let (reader, writer) = std::io::pipe().unwrap();
    let server = Mute::start(&data, writer);
    let is_full = |reader: &PipeReader| {
        // A pipe is full when it has no free page; the last page may have space left.
        rustix::io::ioctl_fionread(reader).unwrap() > (64 << 10) - 4096
    };
    goes_on_and_ends(&data, server, |_| is_full(&reader));
}

#[test]
fn a_cache_survives_a_full_disk_under_its_log() {
    let data = directory();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (clients, metrics) = (own_address(), own_address());
    let mut command = support::alluvium();
    command.args(["cache", "serve", "--log", "trace", "--dir"]).arg(data.path());
    command.args(["--listen", &clients, "--metrics-listen", &metrics]);
    let server = Mute::spawn(command, full, clients, metrics);
    until("lines are dropped", || {
        let mut client = TcpStream::connect(&server.clients).unwrap();
        client.set_read_timeout(Some(HANGS)).unwrap();
        client.write_all(b"PING\r\n").unwrap();
        let mut answer = [0; 7];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"+PONG\r\n");
        server.dropped_lines() > 0
    });
    contains(&server.get("/readyz"), &["HTTP/1.1 200 OK"]);
}
