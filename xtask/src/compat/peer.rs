//! The server that a suite runs against.

use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::kafka::Kafka;
use crate::server::{Config, Ending, Objects, Server, free_address};

/// Large enough for a suite's data many times over.
const WAL_MEBIBYTES: u64 = 256;
/// Small, so that most of what is read late comes back from objects.
const LOG_CACHE_MEBIBYTES: u64 = 16;

/// What Apache Kafka needs to know to run all that it has on one node, and what franz-go's own pipeline tells it.
const KAFKA_PROPERTIES: &str = "\
    share.coordinator.state.topic.replication.factor=1\n\
    share.coordinator.state.topic.min.isr=1\n\
    share.coordinator.state.topic.num.partitions=5\n\
    group.share.delivery.count.limit=10\n\
    group.initial.rebalance.delay.ms=0\n\
    authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n\
    allow.everyone.if.no.acl.found=true\n";

/// Name and password of who may log in.
pub(super) const SCRAM_USER: (&str, &str) = ("someone", "a-password");

/// A running server. It is killed when dropped.
pub(super) enum Peer {
    Alluvium { server: Server, scram: SocketAddr },
    Kafka { server: Kafka, directory: PathBuf },
}

impl Peer {
    /// Start Alluvium. A topic that is created without a number of partitions has so many.
    pub(super) fn alluvium(
        binary: &Path,
        directory: &Path,
        partitions: u32,
    ) -> Result<Self, Error> {
        let mut arguments = vec!["--default-partitions".to_owned(), partitions.to_string()];
        // As the other one: ACLs hold where there are any.
        arguments
            .extend(["--authorization", "--allow-everyone-if-no-acl-found"].map(str::to_owned));
        let scram = free_address()?;
        let listener = format!("{{name='scram', listen='{scram}', protocol='SASL_PLAINTEXT'}}");
        arguments.extend(["--listener".to_owned(), listener]);
        let server = Server::start(Config {
            binary: binary.to_path_buf(),
            directory: directory.to_path_buf(),
            wal_mebibytes: WAL_MEBIBYTES,
            log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
            wal: None,
            objects: Some(Objects { arguments, environment: Vec::new() }),
        })?;
        server.add_user(SCRAM_USER.0, SCRAM_USER.1)?;
        Ok(Self::Alluvium { server, scram })
    }

    /// Start Apache Kafka, in the same way.
    pub(super) fn kafka(jars: &Path, directory: &Path, partitions: u32) -> Result<Self, Error> {
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
        let further = format!("{KAFKA_PROPERTIES}num.partitions={partitions}\n");
        let server = Kafka::start(jars, directory, &further)?;
        Ok(Self::Kafka { server, directory: directory.to_path_buf() })
    }

    /// Where clients connect to.
    pub(super) fn address(&self) -> String {
        match self {
            Self::Alluvium { server, .. } => server.address(),
            Self::Kafka { server, .. } => server.address(),
        }
    }

    /// End the server by SIGKILL, and wait until it takes connections again.
    pub(super) fn kill_and_start_again(&mut self) -> Result<(), Error> {
        match self {
            Self::Alluvium { server, .. } => {
                server.end(Ending::Sigkill)?;
                server.start_again().map(drop)
            }
            Self::Kafka { server, .. } => server.kill_and_start_again(),
        }
    }

    /// Where clients log in by SCRAM as [`SCRAM_USER`], if they can.
    pub(super) fn scram(&self) -> Option<SocketAddr> {
        match self {
            Self::Alluvium { scram, .. } => Some(*scram),
            Self::Kafka { .. } => None,
        }
    }

    /// A command for a client program: it finds the address in `BOOTSTRAP`.
    pub(super) fn client(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("BOOTSTRAP", self.address()).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// The last lines of the server's log, to be put behind a message.
    pub(super) fn log_tail(&self) -> String {
        match self {
            Self::Alluvium { server, .. } => server.log_tail(),
            Self::Kafka { server, .. } => server.log_tail(),
        }
    }

    /// Stops the server for good and removes its data, since everything went well.
    pub(super) fn finish(self) -> Result<(), Error> {
        match self {
            Self::Alluvium { server, .. } => server.finish(),
            Self::Kafka { server, directory } => {
                drop(server);
                Ok(fs::remove_dir_all(directory)?)
            }
        }
    }
}
