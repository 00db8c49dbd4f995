//! Many bytes through a small WAL: the server can run indefinitely only if it uploads and trims
//! meanwhile.

use std::path::Path;
use std::time::Duration;

use crate::Error;
use crate::exec::follow;
use crate::server::{Config, Server, peak_memory_kib};

/// Even the slowest disk writes and reads a GiB in this time.
const LIMIT: Duration = Duration::from_secs(45 * 60);

const LOG_CACHE_MEBIBYTES: u64 = 64;

/// Writes `mebibytes` through a WAL of `wal_mebibytes` and reads all of them back from the start.
pub(crate) fn run(
    mebibytes: u64,
    wal_mebibytes: u64,
    binary: &Path,
    program: &Path,
    directory: &Path,
) -> Result<(), Error> {
    if mebibytes <= wal_mebibytes {
        return Err(format!("{mebibytes} MiB do not fill a WAL of {wal_mebibytes} MiB").into());
    }
    let config = Config {
        binary: binary.to_path_buf(),
        directory: directory.to_path_buf(),
        wal_mebibytes,
        log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
        wal: None,
        objects: None,
    };
    let server = Server::start(config)?;
    let mut client = server.client(program);
    client.args(["-bootstrap", &server.address(), "-bytes", &(mebibytes << 20).to_string()]);
    let status = follow(&mut client, LIMIT, |_| ())?;
    if !status.success() {
        return Err(format!("the client ended with {status}{}", server.log_tail()).into());
    }
    if let Some(kib) = peak_memory_kib(server.pid()) {
        println!("the server's memory was {} MiB at most", kib / 1024);
    }
    server.finish()
}
