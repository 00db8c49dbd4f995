//! The S3 test: a server whose object store is a separate process behind a network that loses and
//! delays requests, is unavailable at times, and is killed.

mod credentials;
mod issuer;
mod proxy;
mod tls;
mod tools;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;

pub(crate) use self::proxy::{NetworkState, Proxy};
use crate::Error;
use crate::exec::{describe, follow, quietly, wait};
use crate::kill::{self, Stopped, Target};
use crate::report::Case;
use crate::server::{Config, Objects, Server, clean, free_address};
use crate::web::Authority;

const BUCKET: &str = "bucket";
const PREFIX: &str = "some/prefix";
const KEY: &str = "key-of-the-test";
const SECRET: &str = "secret-of-the-test";
/// Two wrong secrets that a server of the test is given and that are refused.
const WRONG_SECRET: &str = "a-secret-that-is-wrong";
const WRONG_TOKEN: &str = "a-token-that-is-wrong";
const CREDENTIALS: [(&str, &str); 2] =
    [("AWS_ACCESS_KEY_ID", KEY), ("AWS_SECRET_ACCESS_KEY", SECRET)];
/// Secrets that must never be printed, whatever fails.
const SECRETS: [&str; 5] =
    [SECRET, WRONG_SECRET, WRONG_TOKEN, issuer::IDENTITY, issuer::WRONG_IDENTITY];

const WAL_MEBIBYTES: u64 = 128;
/// The server's minimum, so that data is read back from objects.
const LOG_CACHE_MEBIBYTES: u64 = 16;
/// A start takes about a second; so does deleting some objects.
const LIMIT: Duration = Duration::from_secs(120);
/// Time in which a server must not start while its object store is unavailable.
const DOWN: Duration = Duration::from_secs(5);
/// Writing in parts and reading back takes seconds, even where one request in eight fails.
const LOAD_LIMIT: Duration = Duration::from_secs(15 * 60);

/// An S3 server that can be built from source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// Small and quick to build: objects are files.
    Versitygw,
    /// Widely used; takes some minutes to build.
    Minio,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Versitygw => "versitygw",
            Self::Minio => "minio",
        })
    }
}

/// The programs of the test.
pub(crate) struct Tools {
    /// The S3 server.
    pub(crate) gateway: PathBuf,
    /// The compiled `tests/clients/go/cmd/endless`.
    pub(crate) endless: PathBuf,
    pub(crate) load: kill::Tools,
}

/// Runs all parts of the test in `directory`.
pub(crate) fn run(
    peer: Peer,
    rounds: u32,
    seed: u64,
    binary: &Path,
    tools: &Tools,
    directory: &Path,
) -> Vec<Case> {
    println!("S3 test with {peer}, seed {seed}");
    let test = Test { peer, seed, binary, tools, directory };
    vec![
        Case::run("objects are created by one writer each", || test.creates()),
        Case::run("large objects are uploaded in parts, read back, and deleted", || {
            test.passes("large", 384, NetworkState::Healthy)
        }),
        Case::run("nothing is lost to a bad network", || {
            test.passes("faults", 192, NetworkState::Faulty)
        }),
        Case::run("an outage causes backpressure, and ends", || test.outage()),
        Case::run("permanent errors end the start, and reveal no secret", || test.refusals()),
        Case::run("TLS works with a trusted certificate only", || test.tls()),
        Case::run("credentials are read from each source, and are not shown", || {
            test.credentials()
        }),
        test.tools(),
        test.kills(rounds),
    ]
}

struct Test<'a> {
    peer: Peer,
    seed: u64,
    binary: &'a Path,
    tools: &'a Tools,
    directory: &'a Path,
}

impl Test<'_> {
    fn config(&self, name: &str, objects: Objects) -> Config {
        Config {
            binary: self.binary.to_path_buf(),
            directory: self.directory.join(name),
            wal_mebibytes: WAL_MEBIBYTES,
            log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
            wal: None,
            objects: Some(objects),
        }
    }

    fn gateway(&self, name: &str) -> Result<Gateway, Error> {
        self.gateway_with(name, None)
    }

    fn gateway_with(&self, name: &str, authority: Option<Authority>) -> Result<Gateway, Error> {
        let directory = self.directory.join(format!("{name}-s3"));
        let gateway = Gateway::start(self.peer, &self.tools.gateway, &directory, authority)?;
        if self.peer == Peer::Minio {
            // For a while it accepts connections but answers only 503, at which a tool retries.
            let mut asked = self.tool(&gateway, &["object", "verify", "s3://bucket"]);
            if let Some(authority) = &gateway.authority {
                asked.arg("--s3-ca-file").arg(authority.root());
            }
            self.ends(&mut asked, 2, &["no object found"])?;
        }
        Ok(gateway)
    }

    fn endless(&self, server: &Server, mebibytes: u64) -> Command {
        let mut client = server.client(&self.tools.endless);
        client.args(["-bootstrap", &server.address(), "-bytes", &(mebibytes << 20).to_string()]);
        client
    }

    /// Two writers create the same objects; once directly, once through a network that loses
    /// requests and answers.
    fn creates(&self) -> Result<(), Error> {
        let gateway = self.gateway("creates")?;
        let url = format!("s3://{BUCKET}/{PREFIX}");
        let probe = ["object", "probe", "--object-store", &url];
        self.ends(&mut self.tool(&gateway, &probe), 0, &["creates objects atomically"])?;
        let proxy = Proxy::start(gateway.address, self.seed)?;
        proxy.set(NetworkState::Faulty);
        let mut probed = clean(self.binary);
        probed.args(probe).args(["--timeout", "90s", "--s3-endpoint"]);
        probed.arg(gateway.endpoint(proxy.address())).envs(CREDENTIALS);
        self.ends(&mut probed, 0, &["creates objects atomically"])?;
        println!("{proxy}");
        if proxy.faults() == 0 {
            return Err("no request met a fault".into());
        }
        if files_below(&gateway.bucket().join(PREFIX))? > 0 {
            return Err("the probe has left objects".into());
        }
        let mut missing = self.tool(&gateway, &["object", "probe"]);
        missing.args(["--object-store", "s3://missing/prefix"]);
        self.ends(&mut missing, 2, &["NoSuchBucket"])?;
        gateway.finish()
    }

    /// Writes much more than the log can hold, reads all of it back, and deletes it.
    fn passes(&self, name: &str, mebibytes: u64, network: NetworkState) -> Result<(), Error> {
        let gateway = self.gateway(name)?;
        let proxy = Proxy::start(gateway.address, self.seed)?;
        proxy.set(network);
        let server = Server::start(self.config(name, gateway.objects_at(proxy.address(), &[])))?;
        let status = follow(&mut self.endless(&server, mebibytes), LOAD_LIMIT, |_| ())?;
        println!("{proxy}");
        if !status.success() {
            return Err(format!("the client ended with {status}{}", server.log_tail()).into());
        }
        if network == NetworkState::Faulty && proxy.faults() == 0 {
            return Err("no request met a fault".into());
        }
        proxy.set(NetworkState::Healthy);
        if gateway.objects_there()? == 0 {
            return Err("no object was written".into());
        }
        let mut delete = Command::new(self.binary);
        delete.args(["topic", "delete", "endless", "--bootstrap", &server.address()]);
        quietly(&mut delete)?;
        // The server's own streams have no objects. What attempts that the network cut off could
        // not delete at once is an orphan that will be old enough tomorrow.
        let left = if network == NetworkState::Healthy { 0 } else { proxy.faults() as usize };
        eventually("the objects are deleted", || Ok(gateway.objects_there()? <= left))?;
        if network == NetworkState::Healthy && gateway.unfinished_there()? > 0 {
            return Err("parts of an upload were left behind".into());
        }
        server.finish()?;
        gateway.finish()
    }

    /// The object store is unavailable while producers write, until they meet backpressure, and
    /// then returns.
    fn outage(&self) -> Result<(), Error> {
        let gateway = self.gateway("outage")?;
        let proxy = Proxy::start(gateway.address, self.seed)?;
        let config = self.config("outage", gateway.objects_at(proxy.address(), &[]));
        // Down from the beginning: the server waits, since the object store has the catalog.
        proxy.set(NetworkState::Down);
        let mut server = Server::spawn(config)?;
        eventually("the server waits for the object store", || {
            Ok(server.log()?.contains("the object store is unavailable"))
        })?;
        thread::sleep(DOWN);
        if server.is_ready()? {
            return Err("the server is ready without its object store".into());
        }
        proxy.set(NetworkState::Healthy);
        server.wait_until_ready()?;
        proxy.set(NetworkState::Down);
        let mut client = self.endless(&server, 192);
        let mut client = Running(client.stdout(Stdio::null()).spawn()?);
        eventually("producers meet backpressure", || {
            Ok(server.metric("alluvium_refused_appends_total")? > 0.0)
        })?;
        eventually("uploads fail", || {
            Ok(server.metric("alluvium_consecutive_upload_failures")? > 0.0)
        })?;
        proxy.set(NetworkState::Healthy);
        match wait(&mut client.0, LOAD_LIMIT)? {
            Some(status) if status.success() => {}
            ended => return Err(format!("the client: {ended:?}{}", server.log_tail()).into()),
        }
        server.finish()?;
        gateway.finish()
    }

    /// The start is refused without a bucket or with wrong credentials. Nothing that is printed
    /// contains the secret.
    fn refusals(&self) -> Result<(), Error> {
        let gateway = self.gateway("refusals")?;
        for (url, secret, token, reason) in [
            ("s3://missing/prefix", SECRET, None, "NoSuchBucket"),
            ("s3://bucket/prefix", WRONG_SECRET, None, "SignatureDoesNotMatch"),
            ("s3://bucket/prefix", SECRET, Some(WRONG_TOKEN), "Invalid"),
        ] {
            let mut command = self.refused_server(&gateway, url)?;
            command.envs(CREDENTIALS).env("AWS_SECRET_ACCESS_KEY", secret);
            command.envs(token.map(|token| ("AWS_SESSION_TOKEN", token)));
            self.ends(&mut command, 1, &[reason])?;
            self.nothing_was_made()?;
        }
        gateway.finish()
    }

    /// A server that must be refused, with the most verbose log.
    fn refused_server(&self, gateway: &Gateway, url: &str) -> Result<Command, Error> {
        // Left by an earlier run in which it was not refused.
        if self.scratch().exists() {
            fs::remove_dir_all(self.scratch())?;
        }
        let mut command = clean(self.binary);
        command.args(["serve", "--log", "trace", "--listen", "127.0.0.1:0"]);
        command.args(["--object-store", url, "--s3-endpoint"]);
        command.arg(gateway.endpoint(gateway.address)).arg("--data-dir").arg(self.scratch());
        Ok(command)
    }

    fn scratch(&self) -> PathBuf {
        self.directory.join("refused")
    }

    fn nothing_was_made(&self) -> Result<(), Error> {
        match self.scratch().exists() {
            true => Err("files were created before the start was refused".into()),
            false => Ok(()),
        }
    }

    /// Runs a command that must end with this code, and returns its output, which must contain all
    /// of `expected` and no secret.
    fn ends(&self, command: &mut Command, code: i32, expected: &[&str]) -> Result<String, Error> {
        fs::create_dir_all(self.directory)?;
        let path = self.directory.join("printed");
        let file = File::create(&path)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let status = wait(&mut command.spawn()?, LIMIT)?;
        let printed = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
        let what = describe(command);
        no_secret(&what, &printed)?;
        if status.and_then(|status| status.code()) != Some(code) {
            let end = last(&printed);
            return Err(format!("{what}: ended with {status:?} instead of {code}: {end}").into());
        }
        if let Some(missing) = expected.iter().find(|text| !printed.contains(**text)) {
            return Err(format!("{what}: does not print {missing:?}: {}", last(&printed)).into());
        }
        Ok(printed)
    }

    fn kills(&self, rounds: u32) -> Case {
        let name = format!("{rounds} rounds of SIGKILL with {}, seed {}", self.peer, self.seed);
        let (load, directory) = (&self.tools.load, self.directory.join("kill"));
        let killed = self.gateway("kill").map_err(Stopped::Failed).and_then(|mut gateway| {
            let on = Some(&mut gateway);
            kill::run(Target::File, rounds, self.seed, self.binary, load, &directory, on)?;
            gateway.finish().map_err(Stopped::Failed)
        });
        match killed {
            Ok(()) => Case::passed(&name),
            Err(Stopped::Skipped(reason)) => Case::skipped(&name, reason),
            Err(Stopped::Failed(error)) => {
                println!("not ok - {name}: {error}");
                println!("journals, data and log are kept in {}", directory.display());
                Case::failed(&name, error)
            }
        }
    }
}

fn no_secret(what: &str, printed: &str) -> Result<(), Error> {
    match SECRETS.iter().find(|secret| printed.contains(**secret)) {
        // The failure of the test shows the line: the secret belongs to the test only.
        Some(secret) => {
            let line = printed.lines().find(|line| line.contains(secret)).unwrap_or_default();
            Err(format!("{what}: the output contains a secret: {line}").into())
        }
        None => Ok(()),
    }
}

/// Returns the end of a long text.
fn last(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n  | ")
}

/// An S3 server. It is killed when dropped, and its data is kept unless it was finished.
pub(crate) struct Gateway {
    peer: Peer,
    program: PathBuf,
    directory: PathBuf,
    address: SocketAddr,
    /// The authority of its certificate, if it uses TLS.
    authority: Option<Authority>,
    child: Option<Running>,
}

/// A process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already; the error is of no use here.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Gateway {
    pub(crate) fn start(
        peer: Peer,
        program: &Path,
        directory: &Path,
        authority: Option<Authority>,
    ) -> Result<Self, Error> {
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
        // Both servers treat a directory as a bucket.
        fs::create_dir_all(directory.join("data").join(BUCKET))?;
        let address = free_address()?;
        let (program, directory) = (program.to_path_buf(), directory.to_path_buf());
        let mut gateway = Self { peer, program, directory, address, authority, child: None };
        gateway.start_again()?;
        Ok(gateway)
    }

    pub(crate) fn peer(&self) -> Peer {
        self.peer
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Settings of a server that connects to it directly.
    pub(crate) fn objects(&self, more: &[&str]) -> Objects {
        self.objects_at(self.address, more)
    }

    /// Settings of a server that connects to it through another address.
    pub(crate) fn objects_at(&self, address: SocketAddr, more: &[&str]) -> Objects {
        let mut arguments = vec![
            format!("--object-store=s3://{BUCKET}/{PREFIX}"),
            format!("--s3-endpoint={}", self.endpoint(address)),
        ];
        arguments.extend(more.iter().map(ToString::to_string));
        let environment = CREDENTIALS.map(|(name, value)| (name, value.to_owned())).to_vec();
        Objects { arguments, environment }
    }

    /// Settings of servers and tools that use this prefix of its bucket, and the directory with the
    /// objects below the prefix. An S3 server that stores objects as files is needed.
    pub(crate) fn prefix(&self, prefix: &str) -> (String, Objects, PathBuf) {
        let url = format!("s3://{BUCKET}/{prefix}");
        let arguments = vec![format!("--s3-endpoint={}", self.endpoint(self.address))];
        let environment = CREDENTIALS.map(|(name, value)| (name, value.to_owned())).to_vec();
        (url, Objects { arguments, environment }, self.bucket().join(prefix))
    }

    fn endpoint(&self, address: SocketAddr) -> String {
        match self.authority {
            Some(_) => format!("https://{address}"),
            None => format!("http://{address}"),
        }
    }

    /// SIGKILL.
    pub(crate) fn end(&mut self) -> Result<(), Error> {
        self.child = None;
        Ok(())
    }

    /// Starts it, unless it runs, and waits until it accepts connections.
    pub(crate) fn start_again(&mut self) -> Result<(), Error> {
        if self.child.is_some() {
            return Ok(());
        }
        let path = self.directory.join("s3.log");
        let log: File = OpenOptions::new().create(true).append(true).open(path)?;
        let data = self.directory.join("data");
        let mut command = Command::new(&self.program);
        match self.peer {
            Peer::Versitygw => {
                command.args(["--port", &self.address.to_string()]);
                if let Some(authority) = &self.authority {
                    command.arg("--cert").arg(authority.certificate());
                    command.arg("--key").arg(authority.key());
                }
                command.arg("posix").arg(data);
                command.env("ROOT_ACCESS_KEY", KEY).env("ROOT_SECRET_KEY", SECRET);
            }
            Peer::Minio => {
                command.args(["server", "--quiet", "--address", &self.address.to_string()]);
                if let Some(authority) = &self.authority {
                    command.arg("--certs-dir").arg(authority.directory());
                }
                command.arg(data).env("MINIO_ROOT_USER", KEY).env("MINIO_ROOT_PASSWORD", SECRET);
                command.env("MINIO_BROWSER", "off").env("MINIO_UPDATE", "off");
            }
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn();
        let child = child.map_err(|error| format!("{}: {error}", self.program.display()))?;
        self.child = Some(Running(child));
        eventually("the S3 server accepts connections", || {
            Ok(TcpStream::connect(self.address).is_ok())
        })
    }

    /// Number of files of data objects.
    fn objects_there(&self) -> Result<usize, Error> {
        files_below(&self.objects_directory())
    }

    fn objects_directory(&self) -> PathBuf {
        self.bucket().join(PREFIX).join("streams")
    }

    fn bucket(&self) -> PathBuf {
        self.directory.join("data").join(BUCKET)
    }

    /// Number of files of unfinished multipart uploads.
    fn unfinished_there(&self) -> Result<usize, Error> {
        files_below(&match self.peer {
            Peer::Versitygw => self.bucket().join(".sgwtmp/multipart"),
            Peer::Minio => self.directory.join("data/.minio.sys/multipart"),
        })
    }

    /// Ends it for good and removes its data.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        self.end()?;
        fs::remove_dir_all(&self.directory)?;
        Ok(())
    }
}

fn files_below(directory: &Path) -> Result<usize, Error> {
    let mut files = 0;
    // Directories may disappear during the walk.
    let Ok(entries) = fs::read_dir(directory) else { return Ok(0) };
    for entry in entries.filter_map(Result::ok) {
        match entry.path().is_dir() {
            true => files += files_below(&entry.path())?,
            false => files += 1,
        }
    }
    Ok(files)
}

/// Polls until the condition holds.
fn eventually(what: &str, mut holds: impl FnMut() -> Result<bool, Error>) -> Result<(), Error> {
    let deadline = Instant::now() + LIMIT;
    while !holds()? {
        if Instant::now() >= deadline {
            return Err(format!("not within {} s: {what}", LIMIT.as_secs()).into());
        }
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
