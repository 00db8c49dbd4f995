//! The supported APIs: a table of keys, versions, shapes and handlers. ApiVersions announces its
//! content.

mod acls;
mod alter_configs;
mod api_versions;
mod authorization;
mod charges;
mod client_quotas;
mod create_partitions;
mod create_topics;
mod delete_groups;
mod delete_records;
mod delete_topics;
mod describe_cluster;
mod describe_configs;
mod describe_quorum;
mod describe_topic_partitions;
mod features;
mod fetch;
mod find_coordinator;
mod groups;
mod init_producer_id;
mod large;
mod lease;
mod list_config_resources;
mod list_offsets;
mod metadata;
mod offset_commit;
mod offset_fetch;
mod offset_for_leader_epoch;
mod produce;
mod replicas;
mod sasl;
mod scram_credentials;
mod share;
mod share_fetch;
mod share_offsets;
mod transaction_admin;
mod transactions;

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_stream::panics;
use bytes::{Buf, Bytes};
use charges::RequestCharges;
use futures::future::BoxFuture;
use kafka_protocol::messages::{ApiKey, RequestHeader};
use kafka_protocol::protocol::{Decodable, Encodable, StrBytes};
use large::SMALL_BYTES;
use lease::RequestLease;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

pub(crate) use large::LargeResponses;

use crate::connection::Frame;
use crate::errors::ApiError;
use crate::groups::{ClientInfo, TopicVisibility};
use crate::large_requests::{MAX_SERVED_BYTES, MAX_SERVED_ELEMENTS};
use crate::security::Peer;
use crate::server::Server;
use crate::wire::response::{EncodeError, Response};
use crate::wire::shape::{self, Shape};

/// The greatest number of array elements in a request. The largest real requests name each
/// partition of a cluster once.
const MAX_ELEMENTS: usize = 1_000_000;

/// An API: its key, supported versions and handler.
pub(crate) struct Api {
    pub(crate) key: ApiKey,
    pub(crate) name: &'static str,
    pub(crate) min: i16,
    pub(crate) max: i16,
    pub(crate) shape: &'static Shape,
    handle: fn(Context, Bytes) -> BoxFuture<'static, Result<Answer, Refused>>,
}

/// The request that is being handled.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) server: Arc<Server>,
    pub(crate) api: &'static Api,
    pub(crate) version: i16,
    pub(crate) peer: Arc<Peer>,
    correlation_id: i32,
    client: ClientInfo,
    charges: Arc<RequestCharges>,
    lease: Arc<Mutex<RequestLease>>,
}

/// The result of a request.
pub(crate) enum Answer {
    Ready(Response),
    /// The connection is closed after this response: the client has failed to authenticate.
    Last(Response),
    /// The request has taken effect in its order; its response follows later.
    Later {
        response: BoxFuture<'static, Result<Response, EncodeError>>,
        /// The approximate memory that it occupies until it is written.
        held_bytes: usize,
    },
    /// The client requested no response.
    Nothing,
    /// The client requested no response, and an error must be signalled: the connection is closed.
    Close,
}

/// A request that has taken effect.
pub(crate) struct Served {
    pub(crate) api: &'static Api,
    pub(crate) answer: Answer,
    /// The share of the server's budget that a request with many elements holds until its response
    /// is written.
    pub(crate) budget: Option<OwnedSemaphorePermit>,
    /// How long the connection must not be read because a quota is exceeded.
    pub(crate) throttle: Duration,
}

/// Why a request gets no response and its connection is closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("unknown API key {0}")]
    UnknownApi(i16),
    #[error("version {version} of {api} is not supported")]
    UnsupportedVersion { api: &'static str, version: i16 },
    #[error("the client has not authenticated")]
    Unauthenticated,
    #[error("malformed request: {0}")]
    Malformed(String),
    #[error("response cannot be encoded: {0}")]
    Encode(#[from] EncodeError),
}

/// Builds a row of the table: key, versions, shape, and handler. The handler is a function of
/// context and body, or an expression that makes a response from context and decoded request; the
/// throttle time is added to that.
macro_rules! api {
    ($key:ident, $min:literal..=$max:literal, $shape:ident, $handle:path) => {
        Api {
            key: ApiKey::$key,
            name: stringify!($key),
            min: $min,
            max: $max,
            shape: &shape::$shape,
            handle: |cx, body| Box::pin($handle(cx, body)),
        }
    };
    (
        $key:ident, $min:literal..=$max:literal, $shape:ident,
        |$cx:ident, $request:ident| $response:expr
    ) => {
        Api {
            key: ApiKey::$key,
            name: stringify!($key),
            min: $min,
            max: $max,
            shape: &shape::$shape,
            handle: |$cx, body| {
                Box::pin(async move {
                    let $request = $cx.decode(body)?;
                    let mut response = $response.await;
                    response.throttle_time_ms = $cx.throttle_ms();
                    $cx.reply(&response)
                })
            },
        }
    };
}

/// All supported APIs.
pub(crate) static APIS: &[Api] = &[
    api!(Produce, 3..=13, PRODUCE, produce::handle),
    api!(Fetch, 4..=18, FETCH, fetch::handle),
    api!(ListOffsets, 1..=11, LIST_OFFSETS, list_offsets::handle),
    api!(Metadata, 0..=13, METADATA, |cx, request| metadata::handle(&cx, request)),
    api!(OffsetCommit, 2..=10, OFFSET_COMMIT, offset_commit::handle),
    api!(OffsetFetch, 1..=10, OFFSET_FETCH, offset_fetch::handle),
    api!(FindCoordinator, 0..=6, FIND_COORDINATOR, |cx, request| find_coordinator::handle(
        &cx, request
    )),
    api!(JoinGroup, 0..=9, JOIN_GROUP, |cx, request| groups::join(&cx, request)),
    api!(Heartbeat, 0..=4, HEARTBEAT, |cx, request| groups::heartbeat(&cx, request)),
    api!(LeaveGroup, 0..=5, LEAVE_GROUP, |cx, request| groups::leave(&cx, request)),
    api!(SyncGroup, 0..=5, SYNC_GROUP, |cx, request| groups::sync(&cx, request)),
    api!(DescribeGroups, 0..=6, DESCRIBE_GROUPS, |cx, request| groups::describe_groups(
        &cx, request
    )),
    api!(ListGroups, 0..=5, LIST_GROUPS, |cx, request| groups::list_groups(&cx, request)),
    api!(SaslHandshake, 0..=1, SASL_HANDSHAKE, sasl::handshake),
    api!(ApiVersions, 0..=4, API_VERSIONS, |cx, request| api_versions::handle(&cx, request)),
    api!(CreateTopics, 2..=7, CREATE_TOPICS, |cx, request| create_topics::handle(&cx, request)),
    api!(DeleteTopics, 1..=6, DELETE_TOPICS, |cx, request| delete_topics::handle(&cx, request)),
    api!(DeleteRecords, 0..=2, DELETE_RECORDS, |cx, request| delete_records::handle(&cx, request)),
    api!(InitProducerId, 0..=5, INIT_PRODUCER_ID, |cx, request| init_producer_id::handle(
        &cx, request
    )),
    api!(OffsetForLeaderEpoch, 2..=4, OFFSET_FOR_LEADER_EPOCH, |cx, request| {
        offset_for_leader_epoch::handle(&cx, request)
    }),
    api!(AddPartitionsToTxn, 0..=3, ADD_PARTITIONS_TO_TXN, |cx, request| {
        transactions::add_partitions(&cx, request)
    }),
    api!(AddOffsetsToTxn, 0..=4, ADD_OFFSETS_TO_TXN, |cx, request| transactions::add_offsets(
        &cx, request
    )),
    api!(EndTxn, 0..=5, END_TXN, |cx, request| transactions::end(&cx, request)),
    api!(WriteTxnMarkers, 1..=1, WRITE_TXN_MARKERS, transaction_admin::write_markers),
    api!(TxnOffsetCommit, 0..=5, TXN_OFFSET_COMMIT, |cx, request| transactions::commit_offsets(
        &cx, request
    )),
    api!(DescribeAcls, 1..=3, DESCRIBE_ACLS, |cx, request| acls::describe(&cx, request)),
    api!(CreateAcls, 1..=3, CREATE_ACLS, |cx, request| acls::create(&cx, request)),
    api!(DeleteAcls, 1..=3, DELETE_ACLS, |cx, request| acls::delete(&cx, request)),
    api!(DescribeConfigs, 1..=4, DESCRIBE_CONFIGS, |cx, request| describe_configs::handle(
        &cx, request
    )),
    api!(AlterConfigs, 0..=2, ALTER_CONFIGS, |cx, request| alter_configs::whole(&cx, request)),
    api!(AlterReplicaLogDirs, 1..=2, ALTER_REPLICA_LOG_DIRS, |cx, request| {
        replicas::alter_log_dirs(&cx, request)
    }),
    api!(DescribeLogDirs, 1..=5, DESCRIBE_LOG_DIRS, replicas::describe_log_dirs),
    api!(SaslAuthenticate, 0..=2, SASL_AUTHENTICATE, sasl::authenticate),
    api!(CreatePartitions, 0..=3, CREATE_PARTITIONS, |cx, request| create_partitions::handle(
        &cx, request
    )),
    api!(DeleteGroups, 0..=2, DELETE_GROUPS, |cx, request| delete_groups::groups(&cx, request)),
    api!(ElectLeaders, 0..=2, ELECT_LEADERS, |cx, request| replicas::elect_leaders(&cx, request)),
    api!(IncrementalAlterConfigs, 0..=1, INCREMENTAL_ALTER_CONFIGS, |cx, request| {
        alter_configs::incremental(&cx, request)
    }),
    api!(AlterPartitionReassignments, 0..=1, ALTER_PARTITION_REASSIGNMENTS, |cx, request| {
        replicas::alter_reassignments(&cx, request)
    }),
    api!(ListPartitionReassignments, 0..=0, LIST_PARTITION_REASSIGNMENTS, |cx, request| {
        replicas::list_reassignments(&cx, request)
    }),
    api!(OffsetDelete, 0..=0, OFFSET_DELETE, |cx, request| delete_groups::offsets(&cx, request)),
    api!(DescribeClientQuotas, 0..=1, DESCRIBE_CLIENT_QUOTAS, |cx, request| {
        client_quotas::describe(&cx, request)
    }),
    api!(AlterClientQuotas, 0..=1, ALTER_CLIENT_QUOTAS, |cx, request| client_quotas::alter(
        &cx, request
    )),
    api!(DescribeUserScramCredentials, 0..=0, DESCRIBE_USER_SCRAM_CREDENTIALS, |cx, request| {
        scram_credentials::describe(&cx, request)
    }),
    api!(AlterUserScramCredentials, 0..=0, ALTER_USER_SCRAM_CREDENTIALS, |cx, request| {
        scram_credentials::alter(&cx, request)
    }),
    api!(DescribeQuorum, 0..=2, DESCRIBE_QUORUM, describe_quorum::handle),
    api!(UpdateFeatures, 0..=2, UPDATE_FEATURES, |cx, request| features::update(&cx, request)),
    api!(DescribeCluster, 0..=2, DESCRIBE_CLUSTER, |cx, request| describe_cluster::handle(
        &cx, request
    )),
    api!(DescribeProducers, 0..=0, DESCRIBE_PRODUCERS, |cx, request| {
        transaction_admin::describe_producers(&cx, request)
    }),
    api!(DescribeTransactions, 0..=0, DESCRIBE_TRANSACTIONS, |cx, request| {
        transaction_admin::describe(&cx, request)
    }),
    api!(ListTransactions, 0..=2, LIST_TRANSACTIONS, |cx, request| transaction_admin::list(
        &cx, request
    )),
    api!(ConsumerGroupHeartbeat, 0..=1, CONSUMER_GROUP_HEARTBEAT, |cx, request| {
        groups::consumer_heartbeat(&cx, request)
    }),
    api!(ConsumerGroupDescribe, 0..=1, CONSUMER_GROUP_DESCRIBE, |cx, request| {
        groups::consumer_describe(&cx, request)
    }),
    api!(ShareGroupHeartbeat, 1..=1, SHARE_GROUP_HEARTBEAT, |cx, request| share::heartbeat(
        &cx, request
    )),
    api!(ShareGroupDescribe, 1..=1, SHARE_GROUP_DESCRIBE, |cx, request| groups::share_describe(
        &cx, request
    )),
    api!(ShareFetch, 1..=2, SHARE_FETCH, share_fetch::handle),
    api!(ShareAcknowledge, 1..=2, SHARE_ACKNOWLEDGE, share::acknowledge),
    api!(ListConfigResources, 0..=1, LIST_CONFIG_RESOURCES, |cx, request| {
        list_config_resources::handle(&cx, request)
    }),
    api!(DescribeTopicPartitions, 0..=0, DESCRIBE_TOPIC_PARTITIONS, |cx, request| {
        describe_topic_partitions::handle(&cx, request)
    }),
    api!(DescribeShareGroupOffsets, 0..=1, DESCRIBE_SHARE_GROUP_OFFSETS, |cx, request| {
        share_offsets::describe(&cx, request)
    }),
    api!(AlterShareGroupOffsets, 0..=0, ALTER_SHARE_GROUP_OFFSETS, |cx, request| {
        share_offsets::alter(&cx, request)
    }),
    api!(DeleteShareGroupOffsets, 0..=0, DELETE_SHARE_GROUP_OFFSETS, |cx, request| {
        share_offsets::delete(&cx, request)
    }),
];

/// Whether a request is long-polling and safe to cancel when its client disconnects. (A cancelled
/// ShareFetch may have appended some of its acknowledgements without a response.) Group members
/// wait for one another for any length of time, and would occupy connections that others need.
pub(crate) fn is_cancellable(frame: &[u8]) -> bool {
    let waiting = [
        ApiKey::Fetch,
        ApiKey::ListOffsets,
        ApiKey::JoinGroup,
        ApiKey::SyncGroup,
        ApiKey::ShareFetch,
    ];
    let key = frame.first_chunk().map(|key| i16::from_be_bytes(*key));
    waiting.iter().any(|waits| key == Some(*waits as i16))
}

/// Handles one request. Returns when the request has taken effect, and has released what was held
/// for its bytes.
///
/// # Errors
/// The reason for which the connection is to be closed.
pub(crate) async fn serve(
    server: &Arc<Server>,
    peer: &Arc<Peer>,
    frame: Frame,
) -> Result<Served, Refused> {
    let Frame { bytes: frame, batches, share } = frame;
    if peer.sends_bare_message() {
        return sasl::bare_message(server, peer, &frame).await;
    }
    let malformed = |reason: String| Refused::Malformed(reason);
    let Some(&[k0, k1, v0, v1, c0, c1, c2, c3]) = frame.first_chunk() else {
        return Err(malformed(format!("{} bytes", frame.len())));
    };
    let (key, version) = (i16::from_be_bytes([k0, k1]), i16::from_be_bytes([v0, v1]));
    let correlation_id = i32::from_be_bytes([c0, c1, c2, c3]);
    let api = APIS.iter().find(|api| api.key as i16 == key).ok_or(Refused::UnknownApi(key))?;
    if !peer.may_send(api.key, Instant::now()) {
        return Err(Refused::Unauthenticated);
    }
    if version < api.min || version > api.max {
        if api.key == ApiKey::ApiVersions {
            // A client newer than this server learns here what it can use.
            let answer = Answer::Ready(api_versions::unsupported(correlation_id)?);
            return Ok(Served { api, answer, budget: None, throttle: Duration::ZERO });
        }
        return Err(Refused::UnsupportedVersion { api: api.name, version });
    }
    server.metrics.request(api.name, version);

    let walk = move |bytes: &[u8]| api.shape.walk(bytes, version, MAX_ELEMENTS);
    let elements = if frame.len() > MAX_SERVED_BYTES {
        let frame = frame.clone();
        server.large_requests.run(async move { walk(&frame) }).await
    } else {
        walk(&frame)
    };
    let elements = elements.map_err(|e| malformed(format!("{} v{version}: {e}", api.name)))?;
    let lease = RequestLease {
        request: share,
        batches,
        elements: lease::element_share(server, elements).await,
        ..RequestLease::default()
    };
    let request = Checked {
        server: server.clone(),
        peer: peer.clone(),
        api,
        version,
        correlation_id,
        bytes: frame,
        lease,
    };
    if elements <= MAX_SERVED_ELEMENTS {
        return request.serve().await;
    }
    let mut served = server.large_requests.run(request.serve()).await?;
    if let Answer::Later { response, .. } = &mut served.answer {
        // A response that is encoded later is as large as its request.
        let (server, encoding) = (server.clone(), std::mem::replace(response, Box::pin(pending())));
        *response = Box::pin(async move { server.large_requests.run(encoding).await });
    }
    Ok(served)
}

/// A request whose bytes have the shape of its version.
struct Checked {
    server: Arc<Server>,
    peer: Arc<Peer>,
    api: &'static Api,
    version: i16,
    correlation_id: i32,
    bytes: Bytes,
    lease: RequestLease,
}

impl Checked {
    /// Decodes and handles the request.
    async fn serve(self) -> Result<Served, Refused> {
        let Self { server, peer, api, version, correlation_id, mut bytes, lease } = self;
        let header =
            decoded(|| RequestHeader::decode(&mut bytes, api.key.request_header_version(version)));
        let header = header
            .map_err(|e| Refused::Malformed(format!("{} v{version}: header: {e}", api.name)))?;
        // A copy: state that outlives the request must not keep the whole request in memory.
        let client_id =
            StrBytes::from_string(header.client_id.as_deref().unwrap_or_default().to_owned());
        drop(header);
        let client = ClientInfo {
            client_id,
            client_host: peer.host.clone(),
            visibility: TopicVisibility::default(),
        };
        let (charges, lease) = (Arc::<RequestCharges>::default(), Arc::new(Mutex::new(lease)));
        let context = Context {
            server: server.clone(),
            api,
            version,
            peer,
            correlation_id,
            client,
            charges: charges.clone(),
            lease: lease.clone(),
        };
        if LargeResponses::are_in_parts(api.key) {
            context.wait_for_permit().await;
        }
        let handle = |context, bytes| charges.timed((api.handle)(context, bytes));
        let mut answer = if LargeResponses::are_at_once(api.key) && !context.take_free_permit() {
            // A small response needs no permit. These requests change nothing, so a large response
            // is dropped and built again once a permit is free; until then it occupies no memory.
            match handle(context.clone(), bytes.clone()).await? {
                Answer::Ready(response) if response.len_bytes() > SMALL_BYTES => {
                    drop(response);
                    context.wait_for_permit().await;
                    handle(context, bytes).await?
                }
                answer => answer,
            }
        } else {
            handle(context, bytes).await?
        };
        let RequestLease { request, elements, permit, answer: reserved, .. } =
            std::mem::take(&mut *lease.lock());
        if let Answer::Ready(response) = &mut answer {
            response.budgets.extend(reserved);
            // Fetch responses hold a share already.
            if response.budgets.is_empty() {
                server.large_responses.count(response).await;
            }
        }
        // A response that is not counted is one of a few, or about as large as its request, whose
        // bytes are counted. From here on they are not, however long the response waits to be
        // written, or the connection is throttled.
        drop((request, permit));
        Ok(Served { api, answer, budget: elements, throttle: charges.throttle() })
    }
}

/// Runs a decoder on a client's bytes. It changes no shared state, so a panic in it is contained:
/// it closes the client's connection and does not stop the server.
fn decoded<T, E: fmt::Display>(decode: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    let outcome =
        panics::contained(decode).map_err(|panic| format!("the decoder panicked: {panic}"));
    outcome?.map_err(|error| format!("{error:#}"))
}

impl Context {
    /// Refuses a change of what is stored on a read-only server. The store refuses it, too, but
    /// some changes have effects in memory before that.
    ///
    /// # Errors
    /// [`ApiError::ReadOnly`].
    fn check_writable(&self) -> Result<(), ApiError> {
        match self.server.store.is_followed() {
            true => Err(ApiError::ReadOnly),
            false => Ok(()),
        }
    }

    /// Decodes the request's body.
    ///
    /// # Errors
    /// [`Refused::Malformed`].
    fn decode<R: Decodable>(&self, mut body: Bytes) -> Result<R, Refused> {
        let malformed = |e| Refused::Malformed(format!("{} v{}: {e}", self.api.name, self.version));
        let request = decoded(|| R::decode(&mut body, self.version)).map_err(malformed)?;
        if body.has_remaining() {
            tracing::trace!(
                api = self.api.name,
                bytes = body.remaining(),
                "bytes follow the end of a request"
            );
        }
        Ok(request)
    }

    fn encode<M: Encodable>(&self, message: &M) -> Result<Response, EncodeError> {
        let header_version = self.api.key.response_header_version(self.version);
        Response::encode(self.correlation_id, header_version, message, self.version)
    }

    fn reply<M: Encodable>(&self, message: &M) -> Result<Answer, Refused> {
        Ok(Answer::Ready(self.encode(message)?))
    }
}
