//! The APIs of groups: what the client may see of groups, and whether the response fits in memory;
//! [`crate::groups`] handles neither.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{
    ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse, ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse, DescribeGroupsRequest, DescribeGroupsResponse,
    HeartbeatRequest, HeartbeatResponse, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest,
    LeaveGroupResponse, ListGroupsRequest, ListGroupsResponse, OffsetCommitRequest,
    OffsetCommitResponse, ShareGroupDescribeRequest, ShareGroupDescribeResponse, SyncGroupRequest,
    SyncGroupResponse, consumer_group_describe_response, describe_groups_response,
    offset_commit_response, share_group_describe_response,
};
use kafka_protocol::protocol::StrBytes;

use super::Context;
use crate::errors::ApiError;
use crate::groups::{ClientInfo, ConsumerTimes};
use crate::security::{Operation, Resource};
use crate::topics::Topic;

/// The greatest size of a member in a response, beside its own data.
const MEMBER_BYTES: usize = 16;

/// Kafka's message for a group with topics that the client may not describe; nothing else is
/// returned for the group.
const UNSEEN_TOPICS: &str =
    "The group has described topic(s) that the client is not authorized to describe.";

/// The error if there is no memory for the response: the client retries a little later.
const NO_ROOM: ResponseError = ResponseError::CoordinatorNotAvailable;

// The APIs that describe groups use different types with the same fields.

/// Sets the operations that the client may do with each described group.
macro_rules! set_operations {
    ($cx:ident, $response:ident) => {
        for group in $response.groups.iter_mut().filter(|group| group.error_code == 0) {
            let operations = $cx.authorized_operations(Resource::Group(&group.group_id));
            group.authorized_operations = operations;
        }
    };
}

/// Completes the response for groups whose members have the topics of `$assignments`: hides topics
/// that the client may not see, sets its operations, and adds the groups that it may not describe.
macro_rules! finish_described {
    (
        $cx:ident, $response:ident, $with_operations:ident, $refused:ident,
        $described:ty, $member:ident => $assignments:expr
    ) => {
        if $cx.server.authorizer.is_some() {
            let sees = |name: &str| $cx.may(Operation::Describe, Resource::Topic(name));
            for group in &mut $response.groups {
                let is_unseen = group
                    .members
                    .iter()
                    .flat_map(|$member| $assignments)
                    .flat_map(|assignment| &assignment.topic_partitions)
                    .any(|topic| !sees(&topic.topic_name));
                if is_unseen {
                    *group = <$described>::default()
                        .with_group_id(group.group_id.clone())
                        .with_error_code(ResponseError::TopicAuthorizationFailed.code())
                        .with_error_message(Some(StrBytes::from_static_str(UNSEEN_TOPICS)));
                }
                for member in &mut group.members {
                    member.subscribed_topic_names.retain(|name| sees(name));
                }
            }
        }
        if $with_operations {
            set_operations!($cx, $response);
        }
        $response.groups.extend($refused.into_iter().map(|(group, code)| {
            <$described>::default().with_group_id(group).with_error_code(code)
        }));
    };
}

pub(super) async fn join(cx: &Context, request: JoinGroupRequest) -> JoinGroupResponse {
    let refused = |code| {
        JoinGroupResponse::default()
            .with_error_code(code)
            .with_protocol_name((cx.version < 7).then(Default::default))
    };
    let code = cx.group_code(Operation::Read, &request.group_id);
    if code != 0 {
        return refused(code);
    }
    let client = ClientInfo { visibility: cx.visibility(), ..cx.client.clone() };
    let joined = cx.server.groups.join(&client, &request, cx.version, &*cx.server.topics);
    drop((client, request));
    cx.release_request_memory(0).await;
    let response = joined.await;
    let members = response.members.iter();
    let bytes = members.map(|member| {
        let instance_id = member.group_instance_id.as_ref().map_or(0, |id| id.len());
        member.metadata.len() + member.member_id.len() + instance_id + MEMBER_BYTES
    });
    match cx.reserve_response(bytes.sum()).await {
        true => response,
        false => refused(NO_ROOM.code()).with_member_id(response.member_id),
    }
}

pub(super) async fn heartbeat(cx: &Context, request: HeartbeatRequest) -> HeartbeatResponse {
    match cx.group_code(Operation::Read, &request.group_id) {
        0 => cx.server.groups.heartbeat(request).await,
        code => HeartbeatResponse::default().with_error_code(code),
    }
}

pub(super) async fn leave(cx: &Context, request: LeaveGroupRequest) -> LeaveGroupResponse {
    match cx.group_code(Operation::Read, &request.group_id) {
        0 => cx.server.groups.leave(request, cx.version).await,
        code => LeaveGroupResponse::default().with_error_code(code),
    }
}

pub(super) async fn sync(cx: &Context, request: SyncGroupRequest) -> SyncGroupResponse {
    match cx.group_code(Operation::Read, &request.group_id) {
        0 => {
            let synced = cx.server.groups.sync(&request, cx.version);
            drop(request);
            cx.release_request_memory(0).await;
            let response = synced.await;
            match cx.reserve_response(response.assignment.len()).await {
                true => response,
                false => SyncGroupResponse::default().with_error_code(NO_ROOM.code()),
            }
        }
        code => SyncGroupResponse::default().with_error_code(code),
    }
}

/// Commits offsets. `is_meant` decides whether a topic with a name from the request is the
/// requested one.
pub(super) async fn offset_commit(
    cx: &Context,
    request: OffsetCommitRequest,
    is_meant: impl Fn(&Topic) -> bool + Send,
) -> OffsetCommitResponse {
    let code = cx.group_code(Operation::Read, &request.group_id);
    if code != 0 {
        use offset_commit_response::*;
        let topics = request.topics.into_iter().map(|topic| {
            let partition = |index: i32| {
                OffsetCommitResponsePartition::default()
                    .with_partition_index(index)
                    .with_error_code(code)
            };
            let partitions = topic.partitions.iter().map(|p| partition(p.partition_index));
            OffsetCommitResponseTopic::default()
                .with_partitions(partitions.collect())
                .with_name(topic.name)
        });
        return OffsetCommitResponse::default().with_topics(topics.collect());
    }
    let readable = |topic: &str| cx.authorize(Operation::Read, Resource::Topic(topic));
    let names = request.topics.iter().map(|topic| topic.name.clone()).collect();
    let exists = cx.readable_partitions(names, is_meant);
    let view = cx.server.topics.view();
    let mut response = cx.server.groups.offset_commit(request, cx.version, &view, exists).await;
    // If the group refused the request, the existence of topics does not matter.
    let unknown = ApiError::UnknownTopicOrPartition.code();
    for topic in &mut response.topics {
        if let Err(error) = readable(&topic.name) {
            for partition in topic.partitions.iter_mut().filter(|p| p.error_code == unknown) {
                partition.error_code = error.code();
            }
        }
    }
    response
}

pub(super) async fn describe_groups(
    cx: &Context,
    mut request: DescribeGroupsRequest,
) -> DescribeGroupsResponse {
    let with_operations = request.include_authorized_operations;
    let refused = cx.remove_refused(Operation::Describe, &mut request.groups);
    let mut response = cx.server.groups.describe(request, cx.version).await;
    if with_operations {
        set_operations!(cx, response);
    }
    response.groups.extend(refused.into_iter().map(|(group, code)| {
        describe_groups_response::DescribedGroup::default()
            .with_group_id(group)
            .with_error_code(code)
            .with_error_message(None)
    }));
    response
}

/// Handles ConsumerGroupHeartbeat. The client must be allowed to describe the topics that it names;
/// of the topics matching a regular expression it gets those that it may describe.
pub(super) async fn consumer_heartbeat(
    cx: &Context,
    request: ConsumerGroupHeartbeatRequest,
) -> ConsumerGroupHeartbeatResponse {
    let names = request.subscribed_topic_names.iter().flatten();
    let code = cx.member_code(&request.group_id, names);
    if code != 0 {
        return ConsumerGroupHeartbeatResponse::default().with_error_code(code);
    }
    let time = |name| cx.server.configs.group_time(&request.group_id, name);
    let times = ConsumerTimes {
        session_timeout: time("consumer.session.timeout.ms"),
        heartbeat_interval: time("consumer.heartbeat.interval.ms"),
    };
    let client = ClientInfo { visibility: cx.visibility(), ..cx.client.clone() };
    let topics = &*cx.server.topics;
    cx.server.groups.consumer_heartbeat(client, request, cx.version, topics, times).await
}

pub(super) async fn consumer_describe(
    cx: &Context,
    mut request: ConsumerGroupDescribeRequest,
) -> ConsumerGroupDescribeResponse {
    let with_operations = request.include_authorized_operations;
    let refused = cx.remove_refused(Operation::Describe, &mut request.group_ids);
    let topics = cx.server.topics.view();
    let mut response = cx.server.groups.consumer_describe(request, cx.version, &topics).await;
    finish_described!(
        cx, response, with_operations, refused,
        consumer_group_describe_response::DescribedGroup,
        member => [&member.assignment, &member.target_assignment]
    );
    response
}

pub(super) async fn share_describe(
    cx: &Context,
    mut request: ShareGroupDescribeRequest,
) -> ShareGroupDescribeResponse {
    let with_operations = request.include_authorized_operations;
    let refused = cx.remove_refused(Operation::Describe, &mut request.group_ids);
    let topics = cx.server.topics.view();
    let mut response = cx.server.groups.share_describe(request, &topics).await;
    finish_described!(
        cx, response, with_operations, refused,
        share_group_describe_response::DescribedGroup,
        member => [&member.assignment]
    );
    response
}

/// Lists all groups to a client that may describe the cluster, and to others the groups that they
/// may describe.
pub(super) async fn list_groups(cx: &Context, request: ListGroupsRequest) -> ListGroupsResponse {
    let mut response = cx.server.groups.list(request, cx.version).await;
    if !cx.may(Operation::Describe, Resource::Cluster) {
        response
            .groups
            .retain(|group| cx.may(Operation::Describe, Resource::Group(&group.group_id)));
    }
    response
}
