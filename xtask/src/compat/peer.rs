//! The server that a suite runs against.

use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::kafka::{Kafka, Settings};
use crate::server::{Config, Ending, Objects, Server, free_address};

/// Many times the size of a suite's data.
const WAL_MEBIBYTES: u64 = 256;
/// Small, so that most cold reads are served from objects.
const LOG_CACHE_MEBIBYTES: u64 = 16;

/// The settings that Apache Kafka needs to run all its features on one node.
const KAFKA_PROPERTIES: &str = "\
    share.coordinator.state.topic.replication.factor=1\n\
    share.coordinator.state.topic.min.isr=1\n\
    share.coordinator.state.topic.num.partitions=5\n\
    group.initial.rebalance.delay.ms=0\n\
    authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n\
    allow.everyone.if.no.acl.found=true\n";

/// Name and password of a user.
pub(super) const SCRAM_USER: (&str, &str) = ("someone", "a-password");

/// A suite's requirements of its server.
#[derive(Clone, Copy)]
pub(super) struct Setup<'a> {
    /// Number of partitions of a topic that is created without one.
    pub(super) partitions: u32,
    pub(super) node: u32,
    /// Settings of the broker.
    pub(super) settings: &'a [(&'a str, &'a str)],
    /// Further options of Alluvium.
    pub(super) alluvium: &'a [&'a str],
    /// Further settings of Apache Kafka, as lines of its `server.properties`.
    pub(super) kafka: &'a str,
    /// The address of a proxy: clients that connect through it must be given this address.
    pub(super) proxy: Option<SocketAddr>,
    /// Users and passwords. The server has a listener with SASL if there are any.
    pub(super) users: &'a [(&'a str, &'a str)],
}

impl Setup<'_> {
    /// The setup of most suites, with this many partitions per topic.
    pub(super) const fn with_partitions(partitions: u32) -> Self {
        Self {
            partitions,
            node: 1,
            settings: &[],
            alluvium: &[],
            kafka: "",
            proxy: None,
            users: &[SCRAM_USER],
        }
    }
}

/// A running server. It is killed when dropped.
pub(super) struct Peer {
    process: Process,
    directory: PathBuf,
    sasl: Option<SocketAddr>,
    behind_proxy: SocketAddr,
}

enum Process {
    Alluvium(Server),
    Kafka(Kafka),
}

impl Peer {
    /// Starts Alluvium.
    pub(super) fn alluvium(
        binary: &Path,
        directory: &Path,
        setup: &Setup<'_>,
    ) -> Result<Self, Error> {
        let (sasl, behind_proxy) = (free_address()?, free_address()?);
        let mut listeners = Vec::new();
        if !setup.users.is_empty() {
            listeners.push(format!(
                "{{name='sasl', listen='{sasl}', protocol='SASL_PLAINTEXT', \
                 sasl-mechanisms=['PLAIN', 'SCRAM-SHA-256', 'SCRAM-SHA-512']}}"
            ));
        }
        if let Some(proxy) = setup.proxy {
            listeners.push(format!(
                "{{name='proxied', listen='{behind_proxy}', protocol='PLAINTEXT', \
                 advertise='{proxy}'}}"
            ));
        }
        let mut arguments = vec![
            format!("--default-partitions={}", setup.partitions),
            format!("--node-id={}", setup.node),
            format!("--listener=[{}]", listeners.join(", ")),
        ];
        // Like Apache Kafka here: an ACL restricts only the resources that have one.
        let authorization = ["--authorization", "--allow-everyone-if-no-acl-found"];
        arguments.extend(authorization.iter().chain(setup.alluvium).map(|&one| one.to_owned()));
        let server = Server::start(Config {
            binary: binary.to_path_buf(),
            directory: directory.to_path_buf(),
            wal_mebibytes: WAL_MEBIBYTES,
            log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
            wal: None,
            objects: Some(Objects { arguments, environment: Vec::new() }),
        })?;
        for (user, password) in setup.users {
            server.add_user(user, password)?;
        }
        for (name, value) in setup.settings {
            server.set(name, value)?;
        }
        let sasl = (!setup.users.is_empty()).then_some(sasl);
        let process = Process::Alluvium(server);
        Ok(Self { process, directory: directory.to_path_buf(), sasl, behind_proxy })
    }

    /// Starts Apache Kafka with equivalent settings.
    pub(super) fn kafka(jars: &Path, directory: &Path, setup: &Setup<'_>) -> Result<Self, Error> {
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
        let Setup { partitions, node, users, .. } = *setup;
        let (sasl, behind_proxy) = (free_address()?, free_address()?);
        let mut further = format!("{KAFKA_PROPERTIES}num.partitions={partitions}\n{}", setup.kafka);
        for (name, value) in setup.settings {
            further.push_str(&format!("{name}={value}\n"));
        }
        let mut listeners = Vec::new();
        if let Some(proxy) = setup.proxy {
            listeners.push(("PROXIED", "PLAINTEXT", behind_proxy, proxy));
        }
        if !users.is_empty() {
            listeners.push(("SASL", "SASL_PLAINTEXT", sasl, sasl));
            further.push_str(&login_modules(users));
        }
        let settings =
            Settings { node, controller: None, further: &further, listeners: &listeners, users };
        let process = Process::Kafka(Kafka::start_as(jars, directory, &settings)?);
        let sasl = (!users.is_empty()).then_some(sasl);
        Ok(Self { process, directory: directory.to_path_buf(), sasl, behind_proxy })
    }

    /// The address that clients connect to.
    pub(super) fn address(&self) -> String {
        match &self.process {
            Process::Alluvium(server) => server.address(),
            Process::Kafka(server) => server.address(),
        }
    }

    /// The address that the suite's proxy connects to.
    pub(super) fn behind_proxy(&self) -> SocketAddr {
        self.behind_proxy
    }

    /// Ends the server with SIGKILL, and waits until it accepts connections again.
    pub(super) fn kill_and_start_again(&mut self) -> Result<(), Error> {
        match &mut self.process {
            Process::Alluvium(server) => {
                server.end(Ending::Sigkill)?;
                server.start_again().map(drop)
            }
            Process::Kafka(server) => server.kill_and_start_again(),
        }
    }

    /// The address of the listener with SASL, for the suite's users, if it has any.
    pub(super) fn sasl(&self) -> Option<SocketAddr> {
        self.sasl
    }

    /// Returns a command for a client program, with the server's address in `BOOTSTRAP`.
    pub(super) fn client(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("BOOTSTRAP", self.address()).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// The last lines of the server's log, to append to a message.
    pub(super) fn log_tail(&self) -> String {
        match &self.process {
            Process::Alluvium(server) => server.log_tail(),
            Process::Kafka(server) => server.log_tail(),
        }
    }

    /// Stops the server for good and removes its data. For suites that passed.
    pub(super) fn finish(self) -> Result<(), Error> {
        match self.process {
            Process::Alluvium(server) => server.finish(),
            Process::Kafka(server) => {
                drop(server);
                Ok(fs::remove_dir_all(self.directory)?)
            }
        }
    }
}

/// The lines of `server.properties` that let users log in with PLAIN and SCRAM.
fn login_modules(users: &[(&str, &str)]) -> String {
    let prefix = "listener.name.sasl";
    let module = "org.apache.kafka.common.security";
    let scram = format!("{module}.scram.ScramLoginModule required;");
    let plain = users.iter().map(|(user, password)| format!(" user_{user}=\"{password}\""));
    let plain = plain.collect::<String>();
    format!(
        "{prefix}.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512\n\
         {prefix}.plain.sasl.jaas.config={module}.plain.PlainLoginModule required{plain};\n\
         {prefix}.scram-sha-256.sasl.jaas.config={scram}\n\
         {prefix}.scram-sha-512.sasl.jaas.config={scram}\n"
    )
}
