//! CONTRACT SKELETON, to be replaced: the signatures of the group coordinator.
#![allow(unused_variables, missing_docs, clippy::todo, clippy::needless_pass_by_value, clippy::unused_async)]

use std::time::Duration;

use alluvium_stream::{Batch, Store, StoreError};
use kafka_protocol::messages::{
    DeleteGroupsRequest, DeleteGroupsResponse, DescribeGroupsRequest, DescribeGroupsResponse, HeartbeatRequest,
    HeartbeatResponse, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest, LeaveGroupResponse, ListGroupsRequest,
    ListGroupsResponse, OffsetCommitRequest, OffsetCommitResponse, OffsetFetchRequest, OffsetFetchResponse,
    SyncGroupRequest, SyncGroupResponse,
};
use kafka_protocol::protocol::StrBytes;

/// Bounds and times of the coordinator; `Default` is documented per field.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub initial_rebalance_delay: Duration,
    pub min_session_timeout: Duration,
    pub max_session_timeout: Duration,
    pub offsets_retention: Duration,
}

impl Default for GroupConfig {
    fn default() -> Self {
        todo!()
    }
}

/// Who sends a JoinGroup.
#[derive(Clone, Debug)]
pub struct ClientInfo {
    /// The request header's client id, empty when there is none.
    pub client_id: StrBytes,
    /// The peer's address as Kafka shows it: `/127.0.0.1`.
    pub client_host: StrBytes,
}

#[derive(Debug, thiserror::Error)]
pub enum GroupsError {
    #[error("{0}")]
    Store(StoreError),
}

/// The checkpoint of the offsets stream (kind 1); for the server's [`alluvium_stream::Fold`].
pub fn fold(previous: Option<&[u8]>, batches: &[Batch]) -> Option<Vec<u8>> {
    todo!()
}

/// The group coordinator. Cheap to clone.
#[derive(Clone)]
pub struct Groups {}

impl Groups {
    pub async fn open(store: Store, config: GroupConfig) -> Result<Groups, GroupsError> {
        todo!()
    }
    pub async fn join(&self, client: ClientInfo, request: JoinGroupRequest, version: i16) -> JoinGroupResponse {
        todo!()
    }
    pub async fn sync(&self, request: SyncGroupRequest, version: i16) -> SyncGroupResponse {
        todo!()
    }
    pub async fn heartbeat(&self, request: HeartbeatRequest, version: i16) -> HeartbeatResponse {
        todo!()
    }
    pub async fn leave(&self, request: LeaveGroupRequest, version: i16) -> LeaveGroupResponse {
        todo!()
    }
    /// `exists(topic, partition)`: others are answered with UNKNOWN_TOPIC_OR_PARTITION.
    pub async fn offset_commit(
        &self,
        request: OffsetCommitRequest,
        version: i16,
        exists: impl Fn(&str, i32) -> bool + Send + Sync,
    ) -> OffsetCommitResponse {
        todo!()
    }
    pub async fn offset_fetch(&self, request: OffsetFetchRequest, version: i16) -> OffsetFetchResponse {
        todo!()
    }
    pub async fn list(&self, request: ListGroupsRequest, version: i16) -> ListGroupsResponse {
        todo!()
    }
    pub async fn describe(&self, request: DescribeGroupsRequest, version: i16) -> DescribeGroupsResponse {
        todo!()
    }
    pub async fn delete_groups(&self, request: DeleteGroupsRequest, version: i16) -> DeleteGroupsResponse {
        todo!()
    }
    /// Drop the committed offsets of deleted topics; durable when it returns.
    pub async fn topics_deleted(&self, names: &[String]) -> Result<(), GroupsError> {
        todo!()
    }
    /// Answer every waiting request with COORDINATOR_NOT_AVAILABLE and stop the timer.
    pub async fn shutdown(&self) {
        todo!()
    }
}
