//! A real Apache Kafka on loopback: one broker with its own controller, or several with one.

use std::fs::{self, OpenOptions};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::exec::{quietly, wait};
use crate::server::free_address;

/// A JVM on a busy machine starts slowly.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Any 16 bytes.
const CLUSTER: &str = "YWxsdXZpdW0tYmVuY2gtMQ";

/// Settings of a broker that differ from the defaults.
pub(crate) struct Settings<'a> {
    pub(crate) node: u32,
    /// The node and address of a controller, if the broker has none of its own.
    pub(crate) controller: Option<(u32, SocketAddr)>,
    /// Further lines of its `server.properties`.
    pub(crate) further: &'a str,
    /// Listeners besides the plaintext one: name, security protocol, address, and advertised
    /// address.
    pub(crate) listeners: &'a [(&'a str, &'a str, SocketAddr, SocketAddr)],
    /// Users and passwords for SCRAM.
    pub(crate) users: &'a [(&'a str, &'a str)],
}

/// A running broker. It is killed when dropped.
pub(crate) struct Kafka {
    address: SocketAddr,
    controller: (u32, SocketAddr),
    child: Child,
    jars: PathBuf,
    properties: PathBuf,
    log: PathBuf,
}

impl Kafka {
    /// Starts a broker whose logs are in `directory`, with further lines of its
    /// `server.properties`.
    pub(crate) fn start(jars: &Path, directory: &Path, further: &str) -> Result<Self, Error> {
        let settings = Settings { node: 1, controller: None, further, listeners: &[], users: &[] };
        Self::start_as(jars, directory, &settings)
    }

    /// Starts a broker with all settings.
    pub(crate) fn start_as(
        jars: &Path,
        directory: &Path,
        settings: &Settings<'_>,
    ) -> Result<Self, Error> {
        fs::create_dir_all(directory)?;
        let address = free_address()?;
        let properties = directory.join("server.properties");
        let Settings { node, further, .. } = settings;
        let (roles, controller, own) = match settings.controller {
            Some(controller) => ("broker", controller, String::new()),
            None => {
                let at = free_address()?;
                ("broker,controller", (*node, at), format!(",CONTROLLER://{at}"))
            }
        };
        let (of, at) = controller;
        let (mut listeners, mut advertised, mut protocols) = <(String, String, String)>::default();
        for (name, protocol, listen, advertise) in settings.listeners {
            listeners = format!("{listeners},{name}://{listen}");
            advertised = format!("{advertised},{name}://{advertise}");
            protocols = format!("{protocols},{name}:{protocol}");
        }
        fs::write(
            &properties,
            format!(
                "process.roles={roles}\n\
                 node.id={node}\n\
                 controller.quorum.voters={of}@{at}\n\
                 listeners=PLAINTEXT://{address}{own}{listeners}\n\
                 advertised.listeners=PLAINTEXT://{address}{advertised}\n\
                 controller.listener.names=CONTROLLER\n\
                 listener.security.protocol.map=CONTROLLER:PLAINTEXT,\
                 PLAINTEXT:PLAINTEXT{protocols}\n\
                 inter.broker.listener.name=PLAINTEXT\n\
                 offsets.topic.replication.factor=1\n\
                 transaction.state.log.replication.factor=1\n\
                 transaction.state.log.min.isr=1\n\
                 log.dirs={}\n\
                 {further}",
                directory.join("logs").display()
            ),
        )?;
        let mut format = format(jars, &properties);
        for (user, password) in settings.users {
            for mechanism in ["SCRAM-SHA-256", "SCRAM-SHA-512"] {
                let user = format!("{mechanism}=[name={user},password={password}]");
                format.args(["--add-scram", &user]);
            }
        }
        quietly(&mut format)?;
        let log = directory.join("server.log");
        let child = spawn(jars, &properties, &log)?;
        let mut kafka =
            Self { address, controller, child, jars: jars.to_path_buf(), properties, log };
        kafka.wait_until_ready()?;
        Ok(kafka)
    }

    /// Ends it with SIGKILL, and waits until it accepts connections again.
    pub(crate) fn kill_and_start_again(&mut self) -> Result<(), Error> {
        self.kill()?;
        self.spawn_again()?;
        self.wait_until_ready()
    }

    /// Ends it with SIGKILL, and replaces its logs by empty ones, as of a new disk.
    pub(crate) fn lose_logs(&mut self) -> Result<(), Error> {
        self.kill()?;
        fs::remove_dir_all(self.properties.with_file_name("logs"))?;
        quietly(&mut format(&self.jars, &self.properties))
    }

    fn kill(&mut self) -> Result<(), Error> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts the process again, without waiting for it.
    pub(crate) fn spawn_again(&mut self) -> Result<(), Error> {
        self.child = spawn(&self.jars, &self.properties, &self.log)?;
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + START_LIMIT;
        while TcpStream::connect(self.address).is_err() {
            if self.child.try_wait()?.is_some() || Instant::now() >= deadline {
                return Err(format!("Kafka did not start{}", self.log_tail()).into());
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// The last lines of its log, to append to a message.
    pub(crate) fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(20)..].join("\n  | ");
        format!("\n  end of {}:\n  | {tail}", self.log.display())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// A broker of a cluster.
pub(crate) struct Member {
    pub(crate) directory: PathBuf,
    /// Further lines of its `server.properties`.
    pub(crate) further: String,
    /// A listener besides the plaintext one: name, security protocol and address.
    pub(crate) listener: Option<(&'static str, &'static str, SocketAddr)>,
}

/// Several brokers with one controller, which is with the first one.
pub(crate) struct Cluster {
    pub(crate) brokers: Vec<Kafka>,
}

impl Cluster {
    /// Starts the brokers, with nodes from 1 on.
    pub(crate) fn start(jars: &Path, members: &[Member]) -> Result<Self, Error> {
        let mut brokers: Vec<Kafka> = Vec::new();
        for (node, member) in (1..).zip(members) {
            let listener = member.listener.iter();
            let listeners: Vec<_> = listener.map(|(name, of, at)| (*name, *of, *at, *at)).collect();
            let settings = Settings {
                node,
                controller: brokers.first().map(|first| first.controller),
                further: &member.further,
                listeners: &listeners,
                users: &[],
            };
            brokers.push(Kafka::start_as(jars, &member.directory, &settings)?);
        }
        Ok(Self { brokers })
    }

    /// Returns the address of the first broker.
    pub(crate) fn address(&self) -> String {
        self.brokers[0].address()
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        // The process may have ended already; the error is of no use here. Its data is not needed
        // any more.
        let _ = self.child.kill();
        let _ = wait(&mut self.child, Duration::from_secs(10));
    }
}

fn spawn(jars: &Path, properties: &Path, log: &Path) -> Result<Child, Error> {
    let output = OpenOptions::new().create(true).append(true).open(log)?;
    let mut server = java(jars, properties, "kafka.Kafka");
    server.arg(properties).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    server.spawn().map_err(|error| format!("java: {error}").into())
}

/// The command that writes the metadata of empty logs.
fn format(jars: &Path, properties: &Path) -> Command {
    let mut format = java(jars, properties, "kafka.tools.StorageTool");
    format.args(["format", "-t", CLUSTER, "-c"]).arg(properties);
    format
}

/// A program of Kafka, in the directory of the properties: Kafka's tests log to the current one.
fn java(jars: &Path, properties: &Path, class: &str) -> Command {
    let mut java = Command::new("java");
    java.current_dir(properties.parent().unwrap_or(Path::new("/")));
    // The options of kafka-server-start.sh.
    java.args(["-Xms1g", "-Xmx1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]);
    java.args(["-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"]);
    java.args(["-Djava.awt.headless=true", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]);
    java.arg("-cp").arg(format!("{}/*", jars.display())).arg(class);
    java
}
