//! A Kafka server over streams.
//!
//! A topic's partition is one stream of the store; a record batch is one batch of the stream,
//! stored as the bytes that the producer sent. See `ARCHITECTURE.md` for the paths.
//!
//! The caller opens the store with [`BrokerFold`] and passes it to [`Broker::start`].
//!
//! # Modules
//!
//! - `listener.rs`, `connection.rs`, `connection/`, `connections.rs`: sockets, reading of requests,
//!   limits on connections
//! - `server.rs`: the state that all connections share, and its budgets
//! - `large_requests.rs`: threads for large requests
//! - `api/`: the table of APIs, and one file for each; quota charges; limits on large responses
//! - `wire/`: schemas that guard the decoder; fetch responses around borrowed bytes
//! - `partition.rs`, `producer_state.rs`, `producer_state/`: a partition; idempotence, open and
//!   aborted transactions, and limits on their state
//! - `admission.rs`, `batch.rs`, `records.rs`, `records/`: validation of batches; batch headers;
//!   records and compression
//! - `transactions/`: the transaction coordinator: state machine, records, end of a transaction,
//!   repair after damage
//! - `groups/group.rs`, `groups/group/`: classic groups as a state machine: events and the time in,
//!   effects out
//! - `groups/consumer/`: KIP-848 groups as a state machine, assignors, records, members of the
//!   classic protocol
//! - `groups/share/`: share groups (KIP-932): share partitions, members, sessions, locks, records
//! - `groups/registry.rs` and the other files of `groups/`: groups of all types and their timer;
//!   requests; durable offsets and members
//! - `stored_topic.rs`: reads a topic of a store, for a copy of it
//! - `state_stream.rs`, `state_table.rs`: state of coordinators in streams whose checkpoint is the
//!   state
//! - `retention.rs`, `log_compaction/`: retention; log compaction
//! - `follow.rs`: a read-only server
//! - `topics.rs`, `configs/`, `quotas.rs`, `sessions.rs`, `producer_ids.rs`: topics; settings;
//!   quotas; fetch sessions; producer IDs
//! - `security/`: listeners, TLS, SASL, ACLs
//! - `pattern.rs`: regular expressions in bounded time
//! - `restore.rs`: lost metadata of streams, from their labels
//! - `label.rs`: labels of streams
//! - `metrics.rs`, `errors.rs`: metrics; errors and their Kafka codes
#![forbid(unsafe_code)]

mod admission;
mod api;
mod batch;
mod config;
mod configs;
mod connection;
mod connections;
mod errors;
mod exported;
mod follow;
pub mod groups;
mod java_order;
mod label;
mod large_requests;
mod leader_epochs;
mod listener;
mod log_compaction;
mod metrics;
mod partition;
mod pattern;
mod producer_ids;
mod producer_state;
mod quotas;
mod records;
mod remote_metrics;
mod restore;
mod retention;
mod security;
mod server;
mod sessions;
mod state_stream;
mod state_table;
mod stored_topic;
mod topics;
mod transactions;
mod wire;

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use alluvium_stream::{
    Batch, Change, DECLARED_LOSS, DamagedStreams, Filler, Fold, KIND_LOG, Store, StoreError,
    StreamId, StreamOffset,
};
use bytes::Bytes;
use kafka_protocol::protocol::StrBytes;
use prometheus_client::registry::Registry;
use tokio::io::BufReader;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use configs::Configs;
use connections::Connections;
use groups::Groups;
use large_requests::LargeRequests;
use metrics::Metrics;
use producer_ids::ProducerIds;
use quotas::Quotas;
use remote_metrics::RemoteMetrics;
use security::{Authentication, Authorizer, Listener, Users};
use server::{ByteBudget, Node, RequestMemory, Server, concurrent_decompressions};
use sessions::Sessions;
use state_stream::{
    KIND_CLASSIC_GROUPS, KIND_GROUP_MEMBERS, KIND_OFFSETS, KIND_SHARES, KIND_TRANSACTIONS,
};
use topics::Topics;
use transactions::Transactions;

pub use exported::{BadBatch, Exported, RecordDigest, record_digests};
pub use label::Label;
pub use restore::{Restored, RestoredTopic, UnnamedPartition, restore_metadata};
pub use state_stream::StateError;
pub use state_table::Corrupt;
pub use stored_topic::{ExportError, StoredTopic};
pub use topics::{is_internal as is_internal_topic, stream_names};
pub use transactions::{TransactionsError, producer_of_marker};

pub use config::{BrokerConfig, InvalidConfig};
pub use configs::broker::per_ip;
pub use configs::topic::IMPORT as IMPORT_SETTING;
pub use security::{
    AclError, AuthorizationConfig, ClientCertificates, InvalidRules, JwksSource, ListenerConfig,
    Mechanism, OauthConfig, PrincipalRules, SecurityConfig, TlsConfig, UserError,
};

const CLUSTER_ID_KEY: &str = "cluster/id";

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A field of the configuration is out of bounds.
    #[error("configuration: {0}")]
    Config(#[from] InvalidConfig),
    /// The listener could not be opened.
    #[error("cannot listen on {addr}: {cause}")]
    Listen {
        /// The configured address.
        addr: SocketAddr,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The certificates of a listener cannot be used.
    #[error("listener {listener}: {cause}")]
    Tls {
        /// The listener's name.
        listener: String,
        /// What is wrong with which file.
        cause: String,
    },
    /// The metadata of topics, in the catalog or a checkpoint, is invalid.
    #[error("the stored metadata is damaged: {0}")]
    Metadata(String),
    /// The store belongs to another cluster.
    #[error("the store belongs to cluster {stored}, but {configured} is configured")]
    OtherCluster {
        /// The cluster ID in the store.
        stored: String,
        /// The cluster ID in the configuration.
        configured: String,
    },
    /// The group coordinator could not start.
    #[error("consumer groups: {0}")]
    Groups(#[from] groups::GroupsError),
    /// The transaction coordinator could not start.
    #[error("transactions: {0}")]
    Transactions(#[from] TransactionsError),
    /// The threads for large requests could not be started.
    #[error("threads for large requests: {0}")]
    Threads(std::io::Error),
    /// The users could not be loaded.
    #[error("users: {0}")]
    Users(#[from] UserError),
    /// The ACLs could not be loaded.
    #[error("ACLs: {0}")]
    Acls(#[from] AclError),
    /// The store failed.
    #[error("{0}")]
    Store(#[from] StoreError),
}

/// The fold that the store must be opened with. It derives the checkpoints of partitions (producer
/// state) and of the state streams: committed offsets, group members, transactions, share
/// partitions.
#[derive(Clone, Copy, Debug, Default)]
pub struct BrokerFold;

impl Fold for BrokerFold {
    fn fold(
        &self,
        _stream: StreamId,
        kind: u8,
        offsets: Range<StreamOffset>,
        start: StreamOffset,
        previous: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>> {
        match kind {
            KIND_LOG => {
                producer_state::fold(partition::unix_time_ms(), offsets, start, previous, batches)
            }
            KIND_TRANSACTIONS => {
                state_table::fold::<transactions::Table>(offsets, previous, batches)
            }
            KIND_OFFSETS => state_table::fold::<groups::Offsets>(offsets, previous, batches),
            KIND_GROUP_MEMBERS => {
                state_table::fold::<groups::GroupStates>(offsets, previous, batches)
            }
            KIND_SHARES => state_table::fold::<groups::ShareStates>(offsets, previous, batches),
            KIND_CLASSIC_GROUPS => {
                state_table::fold::<groups::PersistedGroups>(offsets, previous, batches)
            }
            // No stream of another kind was ever created.
            other => unreachable!("unknown stream kind {other}"),
        }
    }

    fn repair(&self, damaged: &DamagedStreams<'_>) -> Vec<(StreamId, Batch)> {
        transactions::markers_for_gaps(damaged)
    }

    fn fill(
        &self,
        kind: u8,
        hole: Range<StreamOffset>,
        checkpoint: &[u8],
        checkpoint_end: StreamOffset,
    ) -> Vec<Filler> {
        match kind {
            KIND_LOG => transactions::markers_for_hole(hole, checkpoint, checkpoint_end),
            // The streams of the server's own state are not in objects.
            _ => Vec::new(),
        }
    }
}

/// A running server. If it is dropped without [`Broker::shutdown`], it runs until the runtime ends.
pub struct Broker {
    server: Arc<Server>,
    accepting: Vec<JoinHandle<()>>,
}

impl Broker {
    /// Rebuilds the state from `store`, opens the listeners and serves. `store` must have been
    /// opened with [`BrokerFold`]. Metrics are registered in `registry` with names that begin with
    /// `alluvium_kafka_`. With a store that another server writes ([`Store::follow`]), the server
    /// is read-only, and its groups are in memory alone.
    ///
    /// # Errors
    /// An invalid configuration, damaged metadata, an address in use, failed storage.
    pub async fn start(
        mut config: BrokerConfig,
        store: Store,
        registry: &mut Registry,
    ) -> Result<Broker, StartError> {
        config.validate()?;
        if u64::from(config.max_message_bytes) > store.max_batch_bytes() {
            tracing::warn!(
                max_message_bytes = config.max_message_bytes,
                store_bytes = store.max_batch_bytes(),
                "the store's batch limit is below the configured one; larger batches are refused"
            );
        }
        let is_read_only = store.is_followed();
        config.auto_create_topics &= !is_read_only;
        let configs = Configs::open(store.clone(), &config).map_err(StartError::Metadata)?;
        let quotas = Quotas::open(store.clone()).map_err(StartError::Metadata)?;
        let topics = Topics::open(store.clone(), configs.topic_defaults(), config.max_partitions)
            .await
            .map_err(|e| StartError::Metadata(e.to_string()))?;
        let topics = Arc::new(topics);
        let groups = Groups::open(store.clone(), config.groups.clone()).await?;
        forget_deleted_topics(&groups, &topics).await;
        let metrics = Metrics::new(registry);
        metrics::register_shares(registry, groups.shares());
        metrics::register_producers(registry, &topics.totals);
        registry.register_collector(Box::new(RemoteMetrics { topics: Arc::downgrade(&topics) }));
        let transactions =
            Transactions::open(store.clone(), groups.clone(), metrics.open_transactions.clone())
                .await?;
        let cluster_id = cluster_id(&store, config.cluster_id.as_deref()).await?;
        tracing::info!(
            cluster_id,
            topics = topics.all().len(),
            partitions = topics.partitions(),
            "topics and groups loaded"
        );
        for stream in topics.unknown_streams() {
            tracing::warn!(
                %stream,
                "stream belongs to no topic: the change that created or deleted it was lost to \
                 damage of the write-ahead log; its records are kept"
            );
        }

        let users = Users::open(store.clone()).await?;
        let authorizer = match config.security.authorization.clone() {
            Some(authorization) => Some(Arc::new(Authorizer::open(store.clone(), authorization)?)),
            None => None,
        };
        let authentication = Authentication::new(users, config.security.oauth.clone());
        let (mut listeners, mut sockets) = (Vec::new(), Vec::new());
        for listener in &config.listeners {
            let (listener, socket) = Listener::open(listener.clone()).await?;
            listeners.push(Arc::new(listener));
            sockets.push(socket);
        }
        let node = Node {
            id: config.node_id,
            cluster_id: StrBytes::from_string(cluster_id),
            rack: config.rack.clone().map(StrBytes::from_string),
        };
        let server = Arc::new(Server {
            request_memory: RequestMemory::new(config.queued_request_bytes),
            decoded_budget: ByteBudget::new(config.queued_request_bytes),
            large_responses: api::LargeResponses::new(config.queued_request_bytes),
            large_requests: LargeRequests::start().map_err(StartError::Threads)?,
            fetch_budget: ByteBudget::new(config.queued_fetch_bytes.div_ceil(2)),
            cold_fetch_budget: ByteBudget::new(config.queued_fetch_bytes / 2),
            decompressions: Arc::new(Semaphore::new(concurrent_decompressions())),
            producer_ids: ProducerIds::new(store.clone()),
            sessions: Sessions::default(),
            metrics,
            stop: watch::Sender::new(false),
            connections: Connections::new(configs.connection_limits()),
            listeners,
            authentication,
            authorizer,
            config,
            configs,
            quotas,
            node,
            store,
            topics,
            groups,
            transactions,
        });
        server.limit_transfers();
        let named = Arc::downgrade(&server);
        let state = topics::state_stream_names(&server.store.meta(""));
        server.store.name_streams(move |id| {
            state.get(&id).cloned().or_else(|| named.upgrade()?.topics.name_of(id))
        });
        if is_read_only {
            tokio::spawn(follow::run(server.clone()));
        } else {
            transactions::start(&server).await?;
            if server.store.meta_value(DECLARED_LOSS).is_some() {
                let done = Change::DeleteMeta(DECLARED_LOSS.to_owned());
                match server.store.commit(vec![done]).await {
                    // With a full log the next start deletes it.
                    Ok(()) | Err(StoreError::LogFull) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            server.store.begin_uploads();
            tokio::spawn(transactions::run(server.clone()));
            tokio::spawn(retention::run(server.clone()));
            tokio::spawn(log_compaction::run(server.clone()));
        }
        let accept = |(listener, socket): (&Arc<Listener>, _)| {
            tokio::spawn(listener::run(server.clone(), listener.clone(), socket))
        };
        let accepting = server.listeners.iter().zip(sockets).map(accept).collect();
        Ok(Broker { server, accepting })
    }

    /// The listeners in the order of the configuration, with the addresses that they are bound to
    /// (useful with port 0).
    pub fn listeners(&self) -> impl Iterator<Item = (&ListenerConfig, SocketAddr)> {
        self.server.listeners.iter().map(|listener| (&listener.config, listener.local_addr))
    }

    /// A handle that changes users while the server runs.
    pub fn users(&self) -> UserAdmin {
        UserAdmin(self.server.clone())
    }

    /// A client of this listener without a connection, for the fuzz target `requests`.
    #[doc(hidden)]
    pub fn bare_client(&self, listener: usize, ip: IpAddr) -> BareClient {
        let listener = self.server.listeners[listener].clone();
        let peer = security::Peer::new(listener, ip, security::Principal::anonymous());
        BareClient { server: self.server.clone(), peer: Arc::new(peer) }
    }

    /// API key, first and last version of each supported API.
    #[doc(hidden)]
    pub fn apis() -> Vec<(i16, i16, i16)> {
        api::APIS.iter().map(|api| (api.key as i16, api.min, api.max)).collect()
    }

    /// Whether the request header of this API version has tagged fields.
    #[doc(hidden)]
    pub fn is_flexible(key: i16, version: i16) -> bool {
        let api = api::APIS.iter().find(|api| api.key as i16 == key);
        api.is_some_and(|api| api.key.request_header_version(version) >= 2)
    }

    /// Stops accepting, answers requests in flight (at most for the configured grace period), and
    /// closes all connections. The store stays open; the caller closes it afterwards.
    pub async fn shutdown(self) {
        self.server.stop.send_replace(true);
        // Members that wait for a rebalance get an error that makes them look up the coordinator
        // again, so that their connections can end.
        self.server.groups.shutdown().await;
        for accepting in self.accepting {
            if let Err(error) = accepting.await {
                tracing::error!(%error, "listener task failed");
            }
        }
    }
}

/// The server's side of a client without a connection.
#[doc(hidden)]
pub struct BareClient {
    server: Arc<Server>,
    peer: Arc<security::Peer>,
}

impl BareClient {
    /// Whether the client's next message is a SASL message without a request around it.
    #[doc(hidden)]
    pub fn sends_bare_message(&self) -> bool {
        self.peer.sends_bare_message()
    }

    /// Decodes and handles the bytes of one request (without its length) as if a connection had
    /// received them, up to the encoded response. Returns false if the connection would be closed
    /// now. Handling that takes longer than `patience` is dropped, as for a client that has
    /// disconnected.
    #[doc(hidden)]
    pub async fn send(&self, request: Bytes, patience: Duration) -> bool {
        let handled = async {
            let len_bytes = u32::try_from(request.len()).unwrap_or(u32::MAX);
            let sent = [&len_bytes.to_be_bytes()[..], &request[..]].concat();
            let mut reader = BufReader::new(&sent[..]);
            let read = connection::read_frame(&self.server, &self.peer, &mut reader).await;
            let Ok(frame) = read else { return false };
            match api::serve(&self.server, &self.peer, frame).await {
                Ok(api::Served { answer: api::Answer::Later { response, .. }, .. }) => {
                    response.await.is_ok()
                }
                Ok(api::Served { answer: api::Answer::Last(_) | api::Answer::Close, .. })
                | Err(_) => false,
                Ok(_) => true,
            }
        };
        tokio::time::timeout(patience, handled).await.unwrap_or(true)
    }
}

/// Changes the users of a running server.
#[derive(Clone)]
pub struct UserAdmin(Arc<Server>);

impl UserAdmin {
    /// Adds a user, or changes its password, for PLAIN and SCRAM.
    ///
    /// # Errors
    /// A name or password that cannot be used; a failed store.
    pub async fn set_password(&self, user: &str, password: &str) -> Result<(), UserError> {
        self.0.authentication.users.set_password(user, password).await
    }

    /// Deletes a user's passwords and returns whether the user existed. Open connections stay open.
    ///
    /// # Errors
    /// A failed store.
    pub async fn delete(&self, user: &str) -> Result<bool, UserError> {
        self.0.authentication.users.delete(user).await
    }

    /// The users, each with the SCRAM mechanisms that it has credentials for.
    pub fn list(&self) -> Vec<(String, Vec<&'static str>)> {
        let mut users: Vec<(String, Vec<&'static str>)> = Vec::new();
        for (user, hash, _) in self.0.authentication.users.all() {
            match users.last_mut().filter(|(last, _)| *last == user) {
                Some((_, mechanisms)) => mechanisms.push(hash.mechanism()),
                None => users.push((user, vec![hash.mechanism()])),
            }
        }
        users
    }
}

/// Completes deletions that the last run began: a topic and its groups' offsets are not deleted in
/// one step.
async fn forget_deleted_topics(groups: &Groups, topics: &Topics) {
    groups.shares().forget_missing_topics(|id| topics.by_id(id).is_ok());
    let exists = |name: &str| topics.by_name(name).is_ok();
    if let Err(error) = groups.forget_missing_topics(&groups.topics_with_offsets(), exists).await {
        // They only occupy space: they are dropped before another topic of the name is created.
        tracing::warn!(%error, "committed offsets of deleted topics not dropped");
    }
}

/// The stored cluster ID. On the first start, stores `configured` or a new one.
async fn cluster_id(store: &Store, configured: Option<&str>) -> Result<String, StartError> {
    if let Some(value) = store.meta_value(CLUSTER_ID_KEY) {
        let stored = String::from_utf8(value)
            .map_err(|_| StartError::Metadata(format!("{CLUSTER_ID_KEY} is not text")))?;
        return match configured {
            Some(configured) if configured != stored => {
                Err(StartError::OtherCluster { stored, configured: configured.to_owned() })
            }
            _ => Ok(stored),
        };
    }
    let id = configured.map_or_else(|| uuid::Uuid::new_v4().simple().to_string(), str::to_owned);
    if store.is_followed() {
        return Ok(id);
    }
    let change = Change::PutMeta { key: CLUSTER_ID_KEY.into(), value: id.clone().into_bytes() };
    store.commit(vec![change]).await?;
    Ok(id)
}
