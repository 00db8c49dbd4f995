//! Applications on top of Kafka, started as a user would: Kafka Streams, Kafka Connect,
//! MirrorMaker, a schema registry, a UI.

mod ui;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Compat;
use super::peer::Peer;
use crate::Error;
use crate::exec::describe;
use crate::kafka::Kafka;
use crate::report::Case;
use crate::server::free_address;
use crate::setup::{self, Missing, Registry};
use crate::tap::{tap, tap_that_asks};

/// Longer than any of them takes to start and to do its work on a busy machine.
const LIMIT: Duration = Duration::from_secs(180);

/// The line with which the test of Kafka Streams reports that one of its transactions is open.
const KILL_THE_SERVER: &str = "kill the server";

const UI: &str = "kaskade shows topics, records and groups, and creates and deletes a topic";

/// Licences: third-party texts.
const TEXTS: &str = "/usr/share/common-licenses";

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    if compat.short {
        let why = "the short form omits it: its downloads and restarts take too long";
        return Err(Missing::NotAllowed(why.into()));
    }
    let class_path = setup::apps(compat.root)?;
    let registry = setup::registry(compat.root)?;
    let kafka = setup::kafka(compat.root)?;
    // Where kaskade cannot be installed, the others still run.
    let kaskade = setup::kaskade(compat.root);
    compat.with_peer("apps", 1, |peer, directory| {
        let mut cases = vec![
            Case::run("Connect copies a file through a topic into another file", || {
                connect(peer, &class_path, directory)
            }),
            Case::run("Apicurio Registry stores a schema in a topic", || {
                schemas(peer, &registry, directory)
            }),
            match &kaskade {
                Ok(kaskade) => Case::run(UI, || ui::kaskade(peer, kaskade, compat.root, directory)),
                Err(Missing::NotAllowed(reason)) => Case::skipped(UI, reason),
                Err(Missing::Failed(error)) => Case::failed(UI, error),
            },
        ];
        let program = |class: &str| {
            let mut java = peer.client("java");
            java.args(["-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]);
            java.args(["-cp", &class_path, class]);
            java
        };
        let scratch = directory.join("moving");
        fs::create_dir_all(&scratch)?;
        // The source of the migration is Apache Kafka, whatever the peer.
        let moved = Kafka::start(&kafka, &scratch.join("kafka"), "").and_then(|from| {
            let mut moving = program("alluvium.apps.Moving");
            tap("alluvium.apps.Moving", moving.arg(from.address()).arg(&scratch))
        });
        cases.extend(moved.unwrap_or_else(|error| vec![Case::failed("MirrorMaker", error)]));
        if Path::new(TEXTS).is_dir() {
            let mut java = program("alluvium.apps.Streams");
            java.arg(TEXTS).arg(directory.join("streams"));
            cases.extend(tap_that_asks("alluvium.apps.Streams", &mut java, |line, input| {
                if line == KILL_THE_SERVER {
                    peer.kill_and_start_again()?;
                    input.write_all(b"\n")?;
                }
                Ok(())
            })?);
        } else {
            cases.push(Case::skipped("Streams", format!("no texts in {TEXTS}")));
        }
        Ok(cases)
    })
}

/// A process that is killed when it is dropped.
struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Starts a program whose output goes to a file.
    fn start(command: &mut Command, log: &Path) -> Result<Self, Error> {
        let output = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().map_err(|error| format!("{}: {error}", describe(command)))?;
        Ok(Self { child, log: log.to_path_buf() })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already; the error is of no use here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls until the condition holds or the program ends.
fn eventually(
    what: &str,
    running: &mut Running,
    mut attempt: impl FnMut() -> Result<bool, Error>,
) -> Result<(), Error> {
    let deadline = Instant::now() + LIMIT;
    while !attempt()? {
        let log = running.log.display();
        if let Some(status) = running.child.try_wait()? {
            return Err(format!("{what}: the program ended with {status}, see {log}").into());
        }
        if Instant::now() >= deadline {
            return Err(format!("{what}: not within {} s, see {log}", LIMIT.as_secs()).into());
        }
        thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

fn connect(peer: &Peer, class_path: &str, directory: &Path) -> Result<(), Error> {
    let scratch = directory.join("connect");
    fs::create_dir_all(&scratch)?;
    let (source, sink) = (scratch.join("source"), scratch.join("sink"));
    let rest = free_address()?;
    let worker = format!(
        "bootstrap.servers={}\nlisteners=http://{rest}\noffset.flush.interval.ms=500\n\
         key.converter=org.apache.kafka.connect.storage.StringConverter\n\
         value.converter=org.apache.kafka.connect.storage.StringConverter\n\
         group.id=connect\nconfig.storage.topic=connect-configs\n\
         config.storage.replication.factor=1\n\
         offset.storage.topic=connect-offsets\noffset.storage.replication.factor=1\n\
         status.storage.topic=connect-status\nstatus.storage.replication.factor=1\n\
         exactly.once.source.support=enabled\n",
        peer.address()
    );
    fs::write(scratch.join("worker.properties"), worker)?;
    let log = scratch.join("connect.log");
    let mut java = peer.client("java");
    java.args(["-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=info", "-cp", class_path]);
    java.arg("org.apache.kafka.connect.cli.ConnectDistributed").current_dir(&scratch);
    java.arg("worker.properties");
    let lines =
        |from: u32| -> String { (from..from + 1000).map(|n| format!("line {n}\n")).collect() };
    fs::write(&source, lines(0))?;
    let connectors = [
        ("source", "FileStreamSource", "topic", &source),
        ("sink", "FileStreamSink", "topics", &sink),
    ];
    let put = |name: &str, class: &str, topic: &str, file: &Path| {
        let config = format!(
            "{{\"connector.class\":\"{class}\",\"tasks.max\":\"1\",\
             \"{topic}\":\"connected\",\"file\":\"{}\"}}",
            file.display()
        );
        let path = format!("/connectors/file-{name}/config");
        Ok(http(rest, "PUT", &path, "application/json", &config)
            .is_ok_and(|(status, _)| status < 300))
    };
    let mut running = Running::start(&mut java, &log)?;
    for (name, class, topic, file) in connectors {
        eventually("a connector is accepted", &mut running, || put(name, class, topic, file))?;
    }
    eventually("the file is copied", &mut running, || {
        Ok(fs::read_to_string(&sink).is_ok_and(|text| text == lines(0)))
    })?;
    // Connectors and their positions survive the process.
    drop(running);
    File::options().append(true).open(&source)?.write_all(lines(1000).as_bytes())?;
    let mut running = Running::start(&mut java, &log)?;
    // The sink may write records again that it had not committed when it was killed, but must not
    // omit any.
    eventually("later lines are copied", &mut running, || {
        let text = fs::read_to_string(&sink)?;
        Ok((0..2000).all(|n| text.contains(&format!("line {n}\n"))))
    })
}

fn schemas(peer: &Peer, registry: &Registry, directory: &Path) -> Result<(), Error> {
    let scratch = directory.join("registry");
    fs::create_dir_all(&scratch)?;
    let log = scratch.join("registry.log");
    let address = free_address()?;
    let mut java = peer.client(&registry.java);
    java.args(["-Xmx512m", "-jar"]).arg(&registry.program).current_dir(&scratch);
    java.env("QUARKUS_HTTP_HOST", address.ip().to_string());
    java.env("QUARKUS_HTTP_PORT", address.port().to_string());
    java.env("QUARKUS_MANAGEMENT_ENABLED", "false").env("APICURIO_STORAGE_KIND", "kafkasql");
    java.env("APICURIO_KAFKASQL_BOOTSTRAP_SERVERS", peer.address());
    let path = "/apis/ccompat/v7/subjects/words-value/versions";
    let kind = "application/vnd.schemaregistry.v1+json";
    let schema = concat!(
        r#"{"schema":"{\"type\":\"record\",\"name\":\"Word\","#,
        r#"\"fields\":[{\"name\":\"word\",\"type\":\"string\"}]}"}"#
    );
    let mut running = Running::start(&mut java, &log)?;
    eventually("a schema is accepted", &mut running, || {
        Ok(http(address, "POST", path, kind, schema).is_ok_and(|(status, _)| status == 200))
    })?;
    drop(running);
    // Its only store is the topic.
    let mut running = Running::start(&mut java, &log)?;
    eventually("the schema survives a restart", &mut running, || {
        let latest = format!("{path}/latest");
        Ok(http(address, "GET", &latest, kind, "")
            .is_ok_and(|(status, body)| status == 200 && body.contains("Word")))
    })
}

/// Sends one HTTP request and returns the status and the body of the response.
fn http(
    address: SocketAddr,
    method: &str,
    path: &str,
    kind: &str,
    body: &str,
) -> Result<(u16, String), Error> {
    let mut connection = TcpStream::connect(address)?;
    connection.set_read_timeout(Some(Duration::from_secs(30)))?;
    let length = body.len();
    write!(
        connection,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: {kind}\r\nAccept: */*\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or("no HTTP response")?;
    Ok((status, answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned()))
}
