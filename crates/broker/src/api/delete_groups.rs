//! DeleteGroups and OffsetDelete. As in Kafka, they also delete the group's offsets staged in
//! transactions: else deleted offsets would come back when a transaction ends.

use std::collections::HashSet;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::delete_groups_response::DeletableGroupResult;
use kafka_protocol::messages::{
    DeleteGroupsRequest, DeleteGroupsResponse, OffsetDeleteRequest, OffsetDeleteResponse,
};

use super::Context;
use crate::security::{Operation, Resource};
use crate::transactions::Transactions;

pub(super) async fn groups(cx: &Context, mut request: DeleteGroupsRequest) -> DeleteGroupsResponse {
    let refused = cx.remove_refused(Operation::Delete, &mut request.groups_names);
    let mut results = Vec::new();
    for group in request.groups_names {
        let code = delete_group(cx, &group).await.map_or_else(|error| error.code(), |()| 0);
        results.push(DeletableGroupResult::default().with_group_id(group).with_error_code(code));
    }
    results.extend(refused.into_iter().map(|(group, code)| {
        DeletableGroupResult::default().with_group_id(group).with_error_code(code)
    }));
    DeleteGroupsResponse::default().with_results(results)
}

/// Deletes the group first, since it may turn out to have members. A transaction that ends before
/// its staged offsets are dropped creates the group again; then it is deleted a second time.
async fn delete_group(cx: &Context, group: &str) -> Result<(), ResponseError> {
    let had_some = cx.server.groups.pending().has_partitions(group);
    match cx.server.groups.delete_group(group).await {
        // An earlier attempt got only this far.
        Err(ResponseError::GroupIdNotFound) if had_some => {}
        deleted => deleted?,
    }
    if !forget_pending(cx, group, |_, _| true).await? && !had_some {
        return Ok(());
    }
    match cx.server.groups.delete_group(group).await {
        Err(ResponseError::GroupIdNotFound) => Ok(()),
        deleted => deleted,
    }
}

pub(super) async fn offsets(cx: &Context, request: OffsetDeleteRequest) -> OffsetDeleteResponse {
    let code = cx.group_code(Operation::Delete, &request.group_id);
    if code != 0 {
        return OffsetDeleteResponse::default().with_error_code(code);
    }
    let readable = |topic: &str| cx.authorize(Operation::Read, Resource::Topic(topic));
    let names = request.topics.iter().map(|topic| topic.name.clone()).collect();
    let exists = cx.readable_partitions(names, |_| true);
    let had_some = cx.server.groups.pending().has_partitions(&request.group_id);
    let again = had_some.then(|| request.clone());
    let mut response = cx.server.groups.offset_delete(request, &exists).await;
    if let Some(request) = again.filter(|_| response.error_code == 0) {
        let deleted: HashSet<(String, i32)> = deleted(&response).collect();
        let is_deleted = |topic: &str, index| deleted.contains(&(topic.to_owned(), index));
        response = match forget_pending(cx, &request.group_id, is_deleted).await {
            Ok(_) => cx.server.groups.offset_delete(request, &exists).await,
            Err(error) => OffsetDeleteResponse::default().with_error_code(error.code()),
        };
    }
    for topic in &mut response.topics {
        if let Err(error) = readable(&topic.name) {
            for partition in &mut topic.partitions {
                partition.error_code = error.code();
            }
        }
    }
    response
}

fn deleted(response: &OffsetDeleteResponse) -> impl Iterator<Item = (String, i32)> {
    response.topics.iter().flat_map(|topic| {
        let good = topic.partitions.iter().filter(|partition| partition.error_code == 0);
        good.map(move |partition| (topic.name.to_string(), partition.partition_index))
    })
}

/// Drops staged offsets, see [`Transactions::forget_offsets_for`].
async fn forget_pending(
    cx: &Context,
    group: &str,
    is_deleted: impl Fn(&str, i32) -> bool,
) -> Result<bool, ResponseError> {
    let forgotten = Transactions::forget_offsets_for(&cx.server, group, is_deleted).await;
    forgotten.map_err(|error| match error {
        // Admin clients retry only on the usual coordinator errors.
        ResponseError::ConcurrentTransactions => ResponseError::CoordinatorNotAvailable,
        error => error,
    })
}
