//! `alluvium cache serve` with the programs of Redis, and with its Python client.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::exec::{output, wait};
use crate::report::Case;
use crate::server::free_address;
use crate::tap::tap;

/// Opening and closing an almost empty cache takes a moment; a slow machine under load may take
/// longer.
const LIMIT: Duration = Duration::from_secs(60);
/// Number of requests of each kind.
const REQUESTS: u32 = 20_000;
const PASSWORD: &str = "open-sesame";

/// Runs all tests. `words` is a list of words, one per line; `python` has the client, `script` uses
/// it.
pub(crate) fn run(
    binary: &Path,
    words: &Path,
    python: &Path,
    script: &Path,
    directory: &Path,
) -> Result<Vec<Case>, Error> {
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let words = fs::read_to_string(words)?;
    let words: Vec<&str> = words.lines().filter(|word| !word.is_empty()).take(50_000).collect();
    let mut cache = Cache::start(binary, directory, &[])?;
    let mut cases = vec![
        Case::run("redis-cli: values, times to live, errors", || values(&cache)),
        Case::run("redis-cli: a value of a megabyte, byte for byte", || blob(&cache, directory)),
        Case::run("redis-cli --pipe and --scan: a list of words", || {
            list(&cache, &words, directory)
        }),
    ];
    for (name, more) in [
        ("redis-benchmark, 20 clients", &[][..]),
        ("redis-benchmark, 20 clients, pipelines of 16", &["-P", "16"]),
        ("redis-benchmark, 20 clients, values of 5 KB", &["-d", "5000", "-n", "1000"]),
    ] {
        cases.push(Case::run(name, || benchmark(&cache, more)));
    }
    let mut client = Command::new(python);
    client.env("BOOTSTRAP", cache.address.to_string()).env("PYTHONDONTWRITEBYTECODE", "1");
    cases.extend(tap("cache.py", client.arg(script))?);
    cases.push(Case::run("SIGTERM and restart: the words survive", || {
        cache.stop()?;
        cache = Cache::start(binary, directory, &[])?;
        let (word, at) = (words[words.len() / 2], words.len() / 2);
        same(&cache.cli(&["GET", &format!("word:{word}")])?, &at.to_string())
    }));
    cases.push(Case::run("redis-cli and redis-benchmark log in", || {
        cache.stop()?;
        let file = directory.join("password");
        fs::write(&file, PASSWORD)?;
        let file = file.to_str().ok_or("the directory's name is not UTF-8")?;
        cache = Cache::start(binary, directory, &["--password-file", file])?;
        login(&cache)
    }));
    cases.push(Case::run("the server stops on SIGTERM", || cache.stop()));
    match cases.iter().any(Case::has_failed) {
        true => println!("the server's data and log are kept in {}", directory.display()),
        false => fs::remove_dir_all(directory)?,
    }
    Ok(cases)
}

/// A running server. It is killed when dropped.
struct Cache {
    address: SocketAddr,
    child: Child,
    log: PathBuf,
}

impl Cache {
    fn start(binary: &Path, directory: &Path, more: &[&str]) -> Result<Self, Error> {
        let address = free_address()?;
        let path = directory.join("log");
        let log = File::options().create(true).append(true).open(&path)?;
        let mut command = Command::new(binary);
        command.args(["cache", "serve", "--listen", &address.to_string(), "--dir"]);
        command.arg(directory.join("cache"));
        command.args(["--memory", "64MiB", "--journal", "16MiB", "--max-disk", "1GiB"]);
        command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|error| format!("{}: {error}", binary.display()))?;
        let mut cache = Self { address, child, log: path };
        let deadline = Instant::now() + LIMIT;
        // Connections are accepted before they are served: a request waits as long as needed.
        while TcpStream::connect(address).is_err() {
            if let Some(status) = cache.child.try_wait()? {
                return Err(format!("it ended with {status} at start{}", cache.log_suffix()).into());
            }
            if Instant::now() >= deadline {
                return Err(format!("it accepts no connections{}", cache.log_suffix()).into());
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(cache)
    }

    fn stop(&mut self) -> Result<(), Error> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a child has a process id"), Signal::TERM)?;
        match wait(&mut self.child, LIMIT)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                Err(format!("it ended with {status} after SIGTERM{}", self.log_suffix()).into())
            }
            None => {
                Err(format!("it was still running long after SIGTERM{}", self.log_suffix()).into())
            }
        }
    }

    /// The text of its log, to append to a message.
    fn log_suffix(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        format!("; its log:\n{log}")
    }

    fn tool(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["-h", "127.0.0.1", "-p", &self.address.port().to_string()]);
        command
    }

    /// Runs redis-cli and returns its output. redis-cli reports an error response as an error of
    /// its own.
    fn cli(&self, arguments: &[&str]) -> Result<String, Error> {
        let printed = output(self.tool("redis-cli").arg("-e").args(arguments))?;
        Ok(String::from_utf8(printed)?.trim_end().to_owned())
    }

    /// Runs redis-cli with an input.
    fn cli_with(&self, arguments: &[&str], input: &Path) -> Result<String, Error> {
        let mut command = self.tool("redis-cli");
        let printed = command.args(arguments).stdin(File::open(input)?).output()?;
        let text = String::from_utf8_lossy(&printed.stdout).into_owned();
        match printed.status.success() {
            true => Ok(text),
            false => Err(format!("redis-cli {arguments:?}: {}: {text}", printed.status).into()),
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // It has already ended if it was stopped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn same(got: &str, wanted: &str) -> Result<(), Error> {
    match got == wanted {
        true => Ok(()),
        false => Err(format!("{got:?}, not {wanted:?}").into()),
    }
}

fn values(cache: &Cache) -> Result<(), Error> {
    for (asked, answer) in [
        (&["PING"][..], "PONG"),
        (&["SET", "a", "1"], "OK"),
        (&["GET", "a"], "1"),
        (&["SET", "a", "2", "NX"], ""),
        (&["SET", "a", "2", "XX", "GET"], "1"),
        (&["SET", "b", "1", "EX", "1000"], "OK"),
        (&["TTL", "a"], "-1"),
        (&["TTL", "none"], "-2"),
        (&["MSET", "c", "3", "d", "4"], "OK"),
        (&["MGET", "a", "c", "d"], "2\n3\n4"),
        (&["EXISTS", "a", "none"], "1"),
        (&["DEL", "c", "d"], "2"),
        (&["DBSIZE"], "2"),
        (&["-3", "GET", "a"], "2"),
        (&["-3", "SET", "a", "3", "KEEPTTL"], "OK"),
        (&["GET", "a"], "3"),
    ] {
        same(&cache.cli(asked)?, answer).map_err(|error| format!("{asked:?}: {error}"))?;
    }
    let info = cache.cli(&["INFO"])?;
    if !info.contains("db0:keys=2") {
        return Err(format!("unexpected INFO: {info}").into());
    }
    match cache.cli(&["LPUSH", "list", "1"]) {
        Err(error) if error.to_string().contains("failed") => Ok(()),
        other => Err(format!("LPUSH is not supported, but answers {other:?}").into()),
    }
}

fn blob(cache: &Cache, directory: &Path) -> Result<(), Error> {
    let bytes: Vec<u8> =
        (0..1u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let file = directory.join("blob");
    fs::write(&file, &bytes)?;
    same(cache.cli_with(&["-x", "SET", "blob"], &file)?.trim_end(), "OK")?;
    let mut value = output(cache.tool("redis-cli").args(["GET", "blob"]))?;
    // redis-cli appends the line end.
    let is_line = value.pop() == Some(b'\n');
    match is_line && value == bytes {
        true => Ok(()),
        false => {
            Err(format!("{} bytes read differ from the {} written", value.len(), bytes.len())
                .into())
        }
    }
}

fn list(cache: &Cache, words: &[&str], directory: &Path) -> Result<(), Error> {
    let mut requests = String::new();
    for (at, word) in words.iter().enumerate() {
        let (key, at) = (format!("word:{word}"), at.to_string());
        for part in ["*3\r\n$3\r\nSET\r\n", &bulk(&key), &bulk(&at)] {
            requests.push_str(part);
        }
    }
    let file = directory.join("words");
    fs::write(&file, requests)?;
    let printed = cache.cli_with(&["--pipe"], &file)?;
    let wanted = format!("errors: 0, replies: {}", words.len());
    if !printed.contains(&wanted) {
        return Err(format!("no `{wanted}` in {printed:?}").into());
    }
    let scanned = output(cache.tool("redis-cli").args(["--scan", "--pattern", "word:*"]))?;
    let scanned = String::from_utf8(scanned)?;
    let mut found: Vec<&str> =
        scanned.lines().filter_map(|line| line.strip_prefix("word:")).collect();
    let mut expected = words.to_vec();
    found.sort_unstable();
    expected.sort_unstable();
    expected.dedup();
    match found == expected {
        true => Ok(()),
        false => Err(format!("{} words scanned, not {}", found.len(), expected.len()).into()),
    }
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

fn benchmark(cache: &Cache, more: &[&str]) -> Result<(), Error> {
    let mut command = cache.tool("redis-benchmark");
    command.args(["--csv", "-c", "20", "-r", "10000", "-t", "ping,set,get,mset", "-n"]);
    command.arg(REQUESTS.to_string()).args(more);
    let printed = String::from_utf8(output(&mut command)?)?;
    for test in ["PING_INLINE", "PING_MBULK", "SET", "GET", "MSET (10 keys)"] {
        let line = printed.lines().find(|line| line.starts_with(&format!("\"{test}\",")));
        println!("{}", line.ok_or_else(|| format!("no {test} in {printed}"))?);
    }
    let keys: u64 = cache.cli(&["DBSIZE"])?.parse()?;
    match keys > 5000 && !printed.contains("rror") {
        true => Ok(()),
        false => Err(format!("{keys} keys exist after {printed}").into()),
    }
}

fn login(cache: &Cache) -> Result<(), Error> {
    let refused = output(cache.tool("redis-cli").args(["GET", "a"]))?;
    let refused = String::from_utf8(refused)?;
    if !refused.contains("NOAUTH") {
        return Err(format!("without the password it answers {refused:?}").into());
    }
    let auth = ["--no-auth-warning", "-a", PASSWORD];
    same(&cache.cli(&[&auth[..], &["GET", "a"]].concat())?, "3")?;
    same(&cache.cli(&[&auth[..], &["-3", "PING"]].concat())?, "PONG")?;
    let mut command = cache.tool("redis-benchmark");
    command.args(["-a", PASSWORD, "--csv", "-t", "set", "-n", "1000"]);
    let printed = String::from_utf8(output(&mut command)?)?;
    match printed.contains("\"SET\",") {
        true => Ok(()),
        false => Err(format!("unexpected output of redis-benchmark: {printed}").into()),
    }
}
