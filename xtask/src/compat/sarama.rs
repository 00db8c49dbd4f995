//! The functional tests of sarama, through the proxies with which they inject faults.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Compat;
use super::peer::Setup;
use crate::Error;
use crate::report::{Case, GoTests};
use crate::server::free_address;
use crate::setup::{self, Missing};

/// Above what they take; the tests give up a minute earlier and then print which have not finished.
const LIMIT: Duration = Duration::from_secs(14 * 60);
/// Far above what a proxy takes to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The Apache Kafka version that the tests assume.
const KAFKA_VERSION: &str = "4.3.1";
/// The tests expect a proxy for each of five brokers. Here all of them lead to the only one.
const PROXIES: usize = 5;

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    if compat.short {
        let why = "the short form omits it: its tests wait for minutes";
        return Err(Missing::NotAllowed(why.into()));
    }
    let tests = setup::sarama_tests(compat.root)?;
    let toxiproxy = setup::toxiproxy(compat.root)?;
    let proxies = (0..PROXIES).map(|_| free_address()).collect::<Result<Vec<_>, _>>()?;
    let setup = Setup {
        alluvium: &["--auto-create-topics", "false"],
        kafka: "auto.create.topics.enable=false\n",
        proxy: Some(proxies[0]),
        ..Setup::with_partitions(1)
    };
    compat.with_peer_as("sarama", &setup, |peer, directory| {
        let proxy = Toxiproxy::start(&toxiproxy, directory, &proxies, peer.behind_proxy())?;
        let mut command = peer.client(&tests.program);
        command.current_dir(&tests.package).env("KAFKA_VERSION", KAFKA_VERSION);
        command.env("TOXIPROXY_ADDR", format!("http://{}", proxy.address));
        command.args([GoTests::VERBOSE, "-test.timeout", "13m", "-test.run"]);
        // The other tests in these files test the client alone.
        command.arg(functional(&tests.package)?);
        GoTests::run(&mut command, LIMIT, "sarama")
    })
}

/// Returns a pattern for the names of the functional tests: those in the files with their build
/// tag.
fn functional(package: &Path) -> Result<String, Error> {
    let mut names = Vec::new();
    for entry in fs::read_dir(package)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("functional_") && name.ends_with("_test.go") {
            let source = fs::read_to_string(&path)?;
            let tests = source.split("\nfunc ").filter_map(|function| {
                let (name, _) = function.split_once("(t *testing.T)")?;
                name.starts_with("Test").then(|| name.to_owned())
            });
            names.extend(tests);
        }
    }
    if names.is_empty() {
        return Err(format!("no functional tests in {}", package.display()).into());
    }
    names.sort();
    Ok(format!("^({})$", names.join("|")))
}

/// The process that runs the proxies. It is killed when dropped.
struct Toxiproxy {
    address: SocketAddr,
    child: Child,
}

impl Toxiproxy {
    fn start(
        program: &Path,
        directory: &Path,
        proxies: &[SocketAddr],
        upstream: SocketAddr,
    ) -> Result<Self, Error> {
        let named = proxies.iter().zip(1..).map(|(listen, number)| {
            format!(
                "{{\"name\":\"kafka{number}\",\"listen\":\"{listen}\",\"upstream\":\"{upstream}\",\
                 \"enabled\":true}}"
            )
        });
        let config = directory.join("toxiproxy.json");
        fs::write(&config, format!("[{}]\n", named.collect::<Vec<_>>().join(",")))?;
        let address = free_address()?;
        let mut command = Command::new(program);
        command.arg("-host").arg(address.ip().to_string());
        command.arg("-port").arg(address.port().to_string()).arg("-config").arg(&config);
        let log = fs::File::create(directory.join("toxiproxy.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut proxy = Self { address, child: command.spawn()? };
        let deadline = Instant::now() + START_LIMIT;
        while std::iter::once(&address).chain(proxies).any(|it| TcpStream::connect(it).is_err()) {
            if proxy.child.try_wait()?.is_some() || Instant::now() >= deadline {
                return Err("toxiproxy did not start, see toxiproxy.log".into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(proxy)
    }
}

impl Drop for Toxiproxy {
    fn drop(&mut self) {
        // The process may have ended already; the error is of no use here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
