//! Exports disks in memory, so that NBD clients can be tried:
//!
//! ```text
//! cargo run --release -p alluvium-nbd --example memory -- unix:/tmp/nbd.sock 1073741824
//! nbdinfo --list 'nbd+unix:///?socket=/tmp/nbd.sock'
//! ```
//!
//! It ends gracefully on SIGINT.
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::sync::Arc;

use alluvium_nbd::{Exports, Listener, MemoryDisk, Options, Server};
use tokio::net::{TcpListener, UnixListener};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [address, size] = &arguments[..] else {
        return Err("usage: memory (unix:PATH | tcp:ADDRESS:PORT) SIZE-IN-BYTES".into());
    };
    let size = size.parse()?;
    let exports = Arc::new(Exports::default());
    exports.add("disk", "a disk in memory", Arc::new(MemoryDisk::new(size)))?;
    let read_only = MemoryDisk::new(size).read_only();
    exports.add("empty", "a read-only disk of zeros", Arc::new(read_only))?;
    exports.set_default(Some("disk"));
    let listener: Listener = match address.split_once(':') {
        Some(("unix", path)) => UnixListener::bind(path)?.into(),
        Some(("tcp", address)) => TcpListener::bind(address).await?.into(),
        _ => return Err(format!("{address}: not unix:PATH or tcp:ADDRESS:PORT").into()),
    };
    let server = Server::new(exports, Options::default());
    println!("serving {address}");
    let interrupted = async {
        if let Err(error) = tokio::signal::ctrl_c().await {
            eprintln!("cannot wait for SIGINT: {error}");
        }
    };
    server.serve(listener, interrupted).await;
    println!("{:#?}", server.counters());
    Ok(())
}
