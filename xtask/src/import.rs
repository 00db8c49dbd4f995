//! `alluvium import` from a cluster of three brokers of Apache Kafka.

use std::fs;
use std::path::Path;

use crate::Error;
use crate::kafka::{Cluster, Member};
use crate::report::Case;
use crate::server::{Config, Objects, Server, free_address};
use crate::setup::{self, Missing};
use crate::tap::tap;
use crate::web::Authority;

/// Space for the data set of the long form before it is uploaded.
const WAL_MEBIBYTES: u64 = 512;
/// Smaller than the data set.
const LOG_CACHE_MEBIBYTES: u64 = 32;
const BROKERS: u32 = 3;

/// Settings of a broker: ACLs, frequent log compaction, and a listener with TLS and SCRAM.
const PROPERTIES: &str = "\
    authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n\
    allow.everyone.if.no.acl.found=true\n\
    super.users=User:ANONYMOUS\n\
    group.initial.rebalance.delay.ms=0\n\
    log.cleaner.backoff.ms=500\n\
    log.retention.ms=-1\n\
    sasl.enabled.mechanisms=SCRAM-SHA-512\n\
    listener.name.secure.scram-sha-512.sasl.jaas.config=\
    org.apache.kafka.common.security.scram.ScramLoginModule required;\n\
    listener.name.secure.ssl.keystore.type=PEM\n";

/// Imports from Kafka as a user would, interrupted by SIGKILL, and compares everything. The data
/// set has this size for each codec.
pub(crate) fn run(
    root: &Path,
    binary: &Path,
    directory: &Path,
    mebibytes: u64,
) -> Result<Vec<Case>, Missing> {
    setup::openssl()?;
    let python = setup::python(root)?;
    let jars = setup::kafka(root)?;
    if directory.exists() {
        fs::remove_dir_all(directory).map_err(Error::from)?;
    }
    fs::create_dir_all(directory).map_err(Error::from)?;
    let authority = Authority::new(&directory.join("authority"))?;
    let (cluster, secure) = cluster(&jars, &directory.join("kafka"), &authority)?;
    let arguments = ["--authorization", "--allow-everyone-if-no-acl-found"];
    let arguments = [&arguments[..], &["--super-users=User:ANONYMOUS"]].concat();
    let server = Server::start(Config {
        binary: binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: WAL_MEBIBYTES,
        log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
        wal: None,
        objects: Some(Objects {
            arguments: arguments.into_iter().map(str::to_owned).collect(),
            environment: Vec::new(),
        }),
    })?;
    let mut script = server.client(&python);
    script.arg(root.join("tests/clients/python/import_kafka.py")).arg(binary);
    script.arg(cluster.address()).arg(secure).arg(authority.root());
    let mut cases = tap("import_kafka.py", script.arg(mebibytes.to_string()))?;
    if cases.iter().any(Case::has_failed) {
        println!("data and logs are kept in {}", directory.display());
        return Ok(cases);
    }
    cases.push(Case::run("the server stops on SIGTERM", || server.finish()));
    Ok(cases)
}

/// Starts the brokers. Returns them, and the address of the first one's listener with TLS.
fn cluster(
    jars: &Path,
    directory: &Path,
    authority: &Authority,
) -> Result<(Cluster, String), Error> {
    let (mut members, mut addresses) = (Vec::new(), Vec::new());
    for node in 1..=BROKERS {
        let directory = directory.join(node.to_string());
        fs::create_dir_all(&directory)?;
        let store = directory.join("keystore.pem");
        let (key, certificate) = (authority.key(), authority.certificate());
        fs::write(&store, fs::read_to_string(key)? + &fs::read_to_string(certificate)?)?;
        let further =
            format!("{PROPERTIES}listener.name.secure.ssl.keystore.location={}\n", store.display());
        let address = free_address()?;
        addresses.push(address);
        let listener = Some(("SECURE", "SASL_SSL", address));
        members.push(Member { directory, further, listener });
    }
    Ok((Cluster::start(jars, &members)?, addresses[0].to_string()))
}
