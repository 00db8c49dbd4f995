//! Real clients against a server: nbdinfo, nbdcopy and nbdsh of libnbd, qemu-img, qemu-io, fio.
//!
//! A test whose tools are missing is skipped, and prints which. `cargo xtask nbd` installs them,
//! and sets `ALLUVIUM_NBD_CLIENTS=required`, with which a missing tool is a failure.
#![forbid(unsafe_code)]

use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::{env, fs};

use alluvium_nbd::{
    Command as NbdCommand, Disk, DiskError, Exports, Extent, MemoryDisk, Options, Part, Server,
    ZeroMode,
};
use async_trait::async_trait;
use bytes::Bytes;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

const MIB: u64 = 1 << 20;
/// Not a multiple of any block.
const SIZE: u64 = 64 * MIB + 1234;
/// Far above what any of the tools needs, so that one that hangs is a failure.
const LIMIT_SECONDS: &str = "300";

/// Whether all programs are installed.
fn have(programs: &[&str]) -> bool {
    let is_missing = |program: &&&str| {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
        !found.expect("sh runs").status.success()
    };
    let missing: Vec<&&str> = programs.iter().filter(is_missing).collect();
    if !missing.is_empty() {
        let text = format!("{missing:?} not found; `cargo xtask nbd` installs them");
        assert!(env::var_os("ALLUVIUM_NBD_CLIENTS").is_none(), "{text}");
        println!("skipped: {text}");
    }
    missing.is_empty()
}

/// Runs a program and returns its output.
fn run(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new("timeout");
    command.args(["-k", "1", LIMIT_SECONDS, program]).args(arguments).stdin(Stdio::null());
    // nbdsh runs the first `python3`, and libnbd is a package for that of the system.
    let path = env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:{path}"));
    let output = command.output().expect("timeout runs");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let status = output.status;
    assert!(status.success(), "{program} {arguments:?}: {status}\n{stdout}\n{stderr}");
    stdout
}

/// A disk with a fault.
struct Faulty {
    memory: MemoryDisk,
    /// The error of operations that reach beyond this offset.
    fault: Option<(u64, DiskError)>,
    is_zero_fast: bool,
}

impl Faulty {
    fn check(&self, at: u64, len: u64) -> Result<(), DiskError> {
        match &self.fault {
            Some((from, error)) if at + len > *from => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl Disk for Faulty {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    async fn read(&self, at: u64, len: u32) -> Result<Vec<Part>, DiskError> {
        self.check(at, len.into())?;
        self.memory.read(at, len).await
    }

    async fn write(&self, at: u64, data: Bytes) -> Result<(), DiskError> {
        self.check(at, data.len() as u64)?;
        self.memory.write(at, data).await
    }

    async fn zero(&self, at: u64, len: u64, mode: ZeroMode) -> Result<(), DiskError> {
        self.memory.zero(at, len, mode).await
    }

    fn is_zero_fast(&self, _at: u64, _len: u64, _mode: ZeroMode) -> bool {
        self.is_zero_fast
    }

    async fn discard(&self, at: u64, len: u64) -> Result<(), DiskError> {
        self.memory.discard(at, len).await
    }

    async fn flush(&self) -> Result<(), DiskError> {
        self.memory.flush().await
    }

    async fn status(
        &self,
        at: u64,
        len: u64,
        max_extents: usize,
    ) -> Result<Vec<Extent>, DiskError> {
        self.memory.status(at, len, max_extents).await
    }
}

/// A server on a Unix socket and on TCP, in this process.
struct Bench {
    runtime: Runtime,
    directory: TempDir,
    disk: Arc<MemoryDisk>,
    exports: Arc<Exports>,
    server: Server,
    stop: watch::Sender<bool>,
    serving: Vec<JoinHandle<()>>,
    port: u16,
}

impl Bench {
    fn start(size: u64) -> Self {
        let runtime = Runtime::new().unwrap();
        let disk = Arc::new(MemoryDisk::new(size));
        let exports = Arc::new(Exports::default());
        exports.add("disk", "for clients", disk.clone()).unwrap();
        exports.set_default(Some("disk"));
        let read_only = MemoryDisk::new(MIB).read_only();
        runtime.block_on(read_only.write(0, Bytes::from_static(b"read-only"))).unwrap();
        exports.add("read-only", "", Arc::new(read_only)).unwrap();
        let full = MemoryDisk::new(2 * MIB).with_capacity_bytes(MIB);
        exports.add("full", "", Arc::new(full)).unwrap();
        let add_faulty = |name, fault, is_zero_fast| {
            let memory = MemoryDisk::new(4 * MIB);
            exports.add(name, "", Arc::new(Faulty { memory, fault, is_zero_fast })).unwrap();
        };
        add_faulty("slow", None, false);
        add_faulty("broken", Some((MIB, DiskError::Io("a defect".into()))), true);
        add_faulty("fenced", Some((0, DiskError::Fenced)), true);
        let server = Server::new(Arc::clone(&exports), Options::default());
        let directory = tempfile::tempdir().unwrap();
        let (stop, serving) = (watch::Sender::new(false), Vec::new());
        let mut bench = Self { runtime, directory, disk, exports, server, stop, serving, port: 0 };
        bench.listen();
        bench
    }

    fn listen(&mut self) {
        self.server = Server::new(Arc::clone(&self.exports), Options::default());
        self.stop = watch::Sender::new(false);
        let _runtime = self.runtime.enter();
        let unix = UnixListener::bind(self.socket()).unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        self.port = tcp.local_addr().unwrap().port();
        let tcp = TcpListener::from_std(tcp).unwrap();
        for listener in [unix.into(), alluvium_nbd::Listener::from(tcp)] {
            let (server, mut stop) = (self.server.clone(), self.stop.subscribe());
            self.serving.push(self.runtime.spawn(async move {
                let stopped = async {
                    stop.wait_for(|stop| *stop).await.unwrap();
                };
                server.serve(listener, stopped).await;
            }));
        }
    }

    /// Stops the server as on SIGTERM. Its socket can be used again.
    fn stop(&mut self) {
        self.stop.send_replace(true);
        for serving in self.serving.drain(..) {
            self.runtime.block_on(serving).unwrap();
        }
        fs::remove_file(self.socket()).unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    fn tcp_uri(&self, export: &str) -> String {
        format!("nbd://127.0.0.1:{}/{export}", self.port)
    }

    fn file(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    /// A file of the disk's size with data and holes, and its content.
    fn image(&self, name: &str) -> (String, Vec<u8>) {
        let mut content = vec![0; self.disk.size_bytes() as usize];
        let mut state = 1_u64;
        for (number, piece) in content.chunks_mut(300_000).enumerate() {
            if number % 3 != 1 {
                piece.fill_with(|| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                });
            }
        }
        let path = self.file(name);
        fs::write(&path, &content).unwrap();
        (path, content)
    }

    /// The content of the disk, from the disk itself.
    fn content(&self) -> Vec<u8> {
        let mut content = Vec::new();
        let size = self.disk.size_bytes();
        while (content.len() as u64) < size {
            let at = content.len() as u64;
            let len = (size - at).min(MIB) as u32;
            for part in self.runtime.block_on(self.disk.read(at, len)).unwrap() {
                match part {
                    Part::Data(data) => content.extend(data),
                    Part::Zeros(len) => content.resize(content.len() + len as usize, 0),
                }
            }
        }
        content
    }

    fn requests(&self, command: NbdCommand) -> u64 {
        self.server.counters().command(command).requests.load(Ordering::Relaxed)
    }

    fn connections(&self) -> u64 {
        self.server.counters().connections.load(Ordering::Relaxed)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let counters = self.server.counters();
            assert_eq!(counters.violations.load(Ordering::Relaxed), 0);
            assert_eq!(counters.stalled_connections.load(Ordering::Relaxed), 0);
            self.stop();
            assert_eq!(self.server.counters().bytes_in_flight.load(Ordering::Relaxed), 0);
        }
    }
}

#[test]
fn nbdinfo_shows_what_is_exported() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let bench = Bench::start(SIZE);
    for uri in [bench.uri("disk"), bench.tcp_uri("disk"), bench.uri("")] {
        let info: Value = serde_json::from_str(&run("nbdinfo", &["--json", &uri])).unwrap();
        assert_eq!((&info["protocol"], &info["TLS"]), (&json!("newstyle-fixed"), &json!(false)));
        assert_eq!(info["structured"], json!(true));
        let export = &info["exports"][0];
        for (field, value) in [
            ("description", json!("for clients")),
            ("contexts", json!(["base:allocation"])),
            ("is_rotational", json!(false)),
            ("is_read_only", json!(false)),
            ("can_cache", json!(true)),
            ("can_df", json!(true)),
            ("can_fast_zero", json!(true)),
            ("can_flush", json!(true)),
            ("can_fua", json!(true)),
            ("can_multi_conn", json!(true)),
            ("can_trim", json!(true)),
            ("can_zero", json!(true)),
            ("block_size_minimum", json!(1)),
            ("block_size_preferred", json!(4096)),
            ("block_size_maximum", json!(33_554_432)),
            ("export-size", json!(SIZE)),
        ] {
            assert_eq!(export[field], value, "{field}");
        }
    }
    let list = run("nbdinfo", &["--list", "--json", &bench.uri("")]);
    let list: Value = serde_json::from_str(&list).unwrap();
    let names: Vec<&str> = list["exports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|export| export["export-name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["broken", "disk", "fenced", "full", "read-only", "slow"]);
    let write = bench.disk.write(MIB, Bytes::from(vec![1; 2 << 20]));
    bench.runtime.block_on(write).unwrap();
    let map = run("nbdinfo", &["--map", "--json", &bench.uri("disk")]);
    let map: Value = serde_json::from_str(&map).unwrap();
    let rows: Vec<_> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            [&row["offset"], &row["length"], &row["type"]].map(|value| value.as_u64().unwrap())
        })
        .collect();
    assert_eq!(rows, [[0, MIB, 3], [MIB, 2 * MIB, 0], [3 * MIB, SIZE - 3 * MIB, 3]]);
}

#[test]
fn nbdcopy_copies_in_and_out_over_several_connections() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let bench = Bench::start(SIZE);
    let (image, content) = bench.image("image");
    for (number, uri) in [bench.uri("disk"), bench.tcp_uri("disk")].iter().enumerate() {
        let before = bench.connections();
        run("nbdcopy", &["--connections=4", "--threads=4", "--requests=64", &image, uri]);
        assert!(bench.connections() >= before + 4, "it uses all connections");
        assert!(bench.content() == content);
        let copy = bench.file(&format!("copy-{number}"));
        run("nbdcopy", &["--connections=4", "--threads=4", "--synchronous", uri, &copy]);
        assert!(fs::read(&copy).unwrap() == content);
        run("nbdcopy", &["--connections=4", "--threads=4", uri, &copy]);
        assert!(fs::read(&copy).unwrap() == content);
    }
    assert!(bench.disk.allocated_bytes() < SIZE * 3 / 4, "zeros take no space");
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    if !have(&["qemu-img"]) {
        return;
    }
    let bench = Bench::start(SIZE / 512 * 512);
    let (image, content) = bench.image("image");
    let uri = bench.uri("disk");
    let raw = ["-f", "raw", "-O", "raw"];
    run("qemu-img", &[&["convert", "-n"][..], &raw, &["-W", "-m", "16", &image, &uri]].concat());
    assert!(bench.content() == content);
    let compare = ["compare", "-f", "raw", "-F", "raw"];
    assert!(run("qemu-img", &[&compare[..], &[&image, &uri]].concat()).contains("identical"));
    let copy = bench.file("copy");
    run("qemu-img", &[&["convert"][..], &raw, &[&bench.tcp_uri("disk"), &copy]].concat());
    assert!(fs::read(&copy).unwrap() == content);
    let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &uri]);
    let map: Value = serde_json::from_str(&map).unwrap();
    let rows = map.as_array().unwrap();
    let data = rows.iter().filter(|row| row["data"] == json!(true));
    let data: u64 = data.map(|row| row["length"].as_u64().unwrap()).sum();
    assert_eq!(data, bench.disk.allocated_bytes());
    assert!(rows.len() > 50 && rows.iter().any(|row| row["zero"] == json!(true)));
    assert!(bench.requests(NbdCommand::BlockStatus) > 0);
    // An image with a format of its own on the disk.
    run("qemu-img", &["create", "-q", "-f", "qcow2", &uri, "32M"]);
    let write = ["-c", "write -P 9 1M 5M", "-c", "write -z 2M 1M", "-c", "flush"];
    run("qemu-io", &[&["-f", "qcow2"][..], &write, &[&uri]].concat());
    let check = run("qemu-img", &["check", "-f", "qcow2", &uri]);
    assert!(check.contains("No errors"), "{check}");
}

/// Runs commands of qemu-io, which reports some failures only in its output.
fn qemu_io(uri: &str, commands: &[&str]) -> String {
    let commands = commands.iter().flat_map(|command| ["-c", *command]);
    let arguments: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).chain([uri]).collect();
    let output = run("qemu-io", &arguments);
    assert!(!output.contains("failed"), "{output}");
    output
}

#[test]
fn qemu_io_reads_the_patterns_that_it_wrote() {
    if !have(&["qemu-io"]) {
        return;
    }
    let bench = Bench::start(SIZE);
    qemu_io(
        &bench.uri("disk"),
        &[
            "write -P 1 0 1M",
            "write -P 2 1000 5000",
            "write -f -P 3 4095 2",
            "write -P 4 1M 20M",
            "read -P 1 0 1000",
            "read -P 2 1000 3095",
            "read -P 3 4095 2",
            "read -P 2 4097 1903",
            "read -P 1 6000 1042576",
            "read -P 4 1M 20M",
            "write -z 1M 64k",
            "read -P 0 1M 64k",
            "write -z -u 1114113 100001",
            "read -P 0 1114113 100001",
            "read -P 4 1214114 512",
            "discard 4M 1M",
            "flush",
            "aio_write -P 5 8M 1M",
            "aio_write -P 6 9M 1M",
            "aio_write -z 10M 1M",
            "aio_flush",
            "aio_read -P 5 8M 1M",
            "aio_read -P 6 9M 1M",
            "aio_read -P 0 10M 1M",
            "aio_flush",
            "writev -P 7 30M 512 1024 4096 65536",
            "readv -P 7 30M 512 1024 4096 65536",
        ],
    );
    let counters = bench.server.counters();
    for command in NbdCommand::ALL {
        let counters = counters.command(command);
        assert_eq!(counters.errors.load(Ordering::Relaxed), 0, "{command:?}");
    }
    assert!(bench.requests(NbdCommand::WriteZeroes) >= 3);
    assert!(bench.requests(NbdCommand::Trim) >= 1 && bench.requests(NbdCommand::Flush) >= 1);
}

/// A client that reconnects has no I/O error when the server restarts under its load.
#[test]
fn qemu_io_survives_restarts_of_the_server() {
    if !have(&["qemu-io"]) {
        return;
    }
    let mut bench = Bench::start(64 * MIB);
    let socket = bench.socket();
    let options = format!(
        "driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export=disk,\
         file.reconnect-delay=120",
        socket.display()
    );
    let mut command = Command::new("timeout");
    // Its output is not buffered, since its prompts are waited for.
    command.args(["-k", "1", LIMIT_SECONDS, "stdbuf", "-o0", "qemu-io", "--image-opts", &options]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut client = command.spawn().unwrap();
    let mut input = client.stdin.take().unwrap();
    let mut bytes = BufReader::new(client.stdout.take().unwrap()).bytes().map(Result::unwrap);
    // qemu-io may leave a command in its buffer until the next one arrives. Therefore each is sent
    // when it prompts. Returns what it has printed meanwhile.
    let mut prompted = move || {
        let mut printed = Vec::new();
        while !printed.ends_with(b"qemu-io> ") {
            printed.push(bytes.next().expect("it has not ended"));
        }
        let printed = String::from_utf8(printed).unwrap();
        assert!(!printed.contains("failed"), "{printed}");
        printed
    };
    prompted();
    for round in 0..5_u64 {
        let pieces = (0..32).map(|piece| {
            format!("-P {} {} {}", 1 + (round * 32 + piece) % 255, piece * MIB + round, MIB - 10)
        });
        let mut printed = String::new();
        let mut command = |text: &str| {
            writeln!(input, "{text}").unwrap();
            printed.push_str(&prompted());
        };
        pieces.clone().for_each(|piece| command(&format!("aio_write {piece}")));
        bench.stop();
        bench.listen();
        command("aio_flush");
        pieces.for_each(|piece| command(&format!("read {piece}")));
        let count = |what| printed.matches(what).count();
        assert_eq!((count("wrote"), count("read 1")), (32, 32), "round {round}: {printed}");
    }
    drop(input);
    assert!(client.wait().unwrap().success());
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !have(&["fio"]) {
        return;
    }
    if !run("fio", &["--enghelp"]).contains("nbd") {
        println!("skipped: this fio is built without its nbd engine");
        return;
    }
    let bench = Bench::start(SIZE);
    for (uri, more) in [
        (bench.uri("disk"), &["--rw=randwrite", "--bs=4k", "--iodepth=128"][..]),
        (bench.tcp_uri("disk"), &["--rw=write", "--bs=512k", "--iodepth=32"]),
        (bench.uri("disk"), &["--rw=randrw", "--bsrange=512-64k", "--iodepth=32"]),
        (bench.uri("disk"), &["--rw=randwrite", "--bs=4k", "--iodepth=16", "--fsync=8"]),
        (
            bench.tcp_uri("disk"),
            &["--rw=randtrimwrite", "--bs=64k", "--iodepth=1", "--numjobs=4", "--verify=0"],
        ),
    ] {
        let uri = format!("--uri={uri}");
        let common = ["--name=job", "--ioengine=nbd", &uri, "--size=16m", "--output-format=json"];
        // Without a file of the verification's state in the current directory.
        let verify =
            ["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_state_save=0"];
        let output = run("fio", &[&common[..], &verify, more].concat());
        // Lines for people precede the report.
        let report: Value =
            serde_json::from_str(&output[output.find("\n{").map_or(0, |at| at + 1)..])
                .unwrap_or_else(|error| panic!("{error}: {output}"));
        let jobs = report["jobs"].as_array().unwrap();
        assert!(!jobs.is_empty() && jobs.iter().all(|job| job["error"] == json!(0)), "{output}");
    }
    assert!(bench.requests(NbdCommand::Write) > 8192);
    assert!(bench.requests(NbdCommand::Trim) > 0 && bench.requests(NbdCommand::Flush) > 0);
}

#[test]
fn nbdsh_gets_every_reply_and_every_error() {
    if !have(&["nbdsh"]) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/commands.py");
    let script = script.display();
    for uri in [Bench::uri, Bench::tcp_uri] {
        let bench = Bench::start(SIZE);
        let uri = uri(&bench, "%s");
        let code = format!("import sys\nsys.argv = ['', '{uri}']\nexec(open('{script}').read())");
        let output = run("nbdsh", &["-c", &code]);
        assert!(output.contains("every option"), "{output}");
        for command in NbdCommand::ALL {
            assert!(bench.requests(command) > 0, "{command:?}");
        }
    }
}
