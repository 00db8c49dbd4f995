//! ShareGroupHeartbeat and ShareGroupDescribe: translation between the protocol and
//! [`super::share`].

use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::share_group_describe_response as described;
use kafka_protocol::messages::share_group_heartbeat_response as answered;
use kafka_protocol::messages::{
    GroupId, ShareGroupDescribeRequest, ShareGroupDescribeResponse, ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse, TopicName,
};
use kafka_protocol::protocol::StrBytes;

use super::consumer::{Assignment, Fault, assigned_bytes};
use super::heartbeat::{
    MAX_SUBSCRIPTION_BYTES, are_too_long, names_bytes, not_found, plain, was_deleted,
};
use super::live::LiveGroup;
use super::membership::MAX_NAME_BYTES;
use super::registry::Registry;
use super::share::{MEMBER_BYTES, Return, ShareBeat, ShareMember, unknown_member};
use super::topics_view::{TopicsNow, TopicsView};
use super::{ClientInfo, Groups, Shared};
use crate::wire::once;

/// Kafka's name for the assignor of share groups.
const ASSIGNOR: &str = "simple";

const LEAVES: i32 = -1;

impl Groups {
    /// Handles ShareGroupHeartbeat, version 1. `session_timeout` and `interval` are the group's
    /// settings.
    pub(crate) async fn share_heartbeat(
        &self,
        client: ClientInfo,
        request: ShareGroupHeartbeatRequest,
        session_timeout: Duration,
        interval: Duration,
        topics: &dyn TopicsNow,
    ) -> ShareGroupHeartbeatResponse {
        let response = ShareGroupHeartbeatResponse::default();
        match self.shared.share_heartbeat(&client, &request, session_timeout, topics) {
            Ok((epoch, assignment)) => {
                let interval = if epoch >= 0 { interval.as_millis() } else { 0 };
                response
                    .with_member_id(Some(request.member_id))
                    .with_member_epoch(epoch)
                    .with_heartbeat_interval_ms(i32::try_from(interval).unwrap_or(i32::MAX))
                    .with_assignment(assignment.map(answered_assignment))
            }
            Err(Fault { error, message }) => response
                .with_error_code(error.code())
                .with_error_message(Some(StrBytes::from_string(message))),
        }
    }

    /// Handles ShareGroupDescribe, version 1.
    pub(crate) async fn share_describe(
        &self,
        request: ShareGroupDescribeRequest,
        topics: &TopicsView,
    ) -> ShareGroupDescribeResponse {
        let groups = once(request.group_ids, GroupId::clone).map(|group_id| {
            let group = match self.shared.share_describe(&group_id, topics) {
                Ok(group) => group,
                Err(Fault { error, message }) => described::DescribedGroup::default()
                    .with_error_code(error.code())
                    .with_error_message(Some(StrBytes::from_string(message))),
            };
            group.with_group_id(group_id)
        });
        ShareGroupDescribeResponse::default().with_groups(groups.collect())
    }
}

impl Shared {
    /// Returns the member's epoch, and its assignment if the member may not know it.
    fn share_heartbeat(
        &self,
        client: &ClientInfo,
        request: &ShareGroupHeartbeatRequest,
        session_timeout: Duration,
        topics: &dyn TopicsNow,
    ) -> Result<(i32, Option<Assignment>), Fault> {
        let group_id = request.group_id.as_str();
        self.check_group_id(group_id).map_err(plain)?;
        check_request(request)?;
        let beat = beat(client, request);
        self.check_share_memory(group_id, &beat, topics).map_err(plain)?;
        let is_joining = request.member_epoch == 0;
        // A group that has only members is gone after a restart, since members are in memory only.
        // A member that continues has to join again; GROUP_ID_NOT_FOUND would be fatal for clients.
        let unknown = || unknown_member(&beat.member_id);
        let slot = match is_joining {
            true => self.create(group_id).map_err(plain)?,
            false => self.registry.get(group_id).ok_or_else(unknown)?,
        };
        self.registry.change(&slot, |group, now| {
            if is_joining && group.is_dead() {
                return Err(was_deleted());
            }
            // A share group cannot use committed offsets.
            let convert = is_joining && !self.has_offsets(group_id);
            let Some(share) = Registry::share(group, convert, now) else {
                let is_unused =
                    group.is_dead() || group.is_vacant_classic() && !self.has_offsets(group_id);
                return Err(if is_unused { unknown() } else { not_a_share_group(group_id) });
            };
            if request.member_epoch == LEAVES {
                share.leave(now, &beat.member_id)?;
                self.registry.shares.member_gone(group_id, &beat.member_id, Return::Lost);
                return Ok((LEAVES, None));
            }
            share.heartbeat(now, session_timeout, &topics.view(), &beat)
        })
    }

    /// Checks whether there is memory for a member that joins or changes its subscription.
    fn check_share_memory(
        &self,
        group_id: &str,
        beat: &ShareBeat,
        topics: &dyn TopicsNow,
    ) -> Result<(), ResponseError> {
        let Some(names) = &beat.topics else { return Ok(()) };
        let is_known = self.registry.get(group_id).is_some_and(|slot| {
            self.registry.peek(&slot, |group, _| match group {
                LiveGroup::Share(group) => group.subscribes_to(&beat.member_id, names),
                LiveGroup::Classic(_) | LiveGroup::Consumer(_) => false,
            })
        });
        if beat.epoch == LEAVES || is_known {
            return Ok(());
        }
        let view = topics.view();
        let partitions = names.iter().filter_map(|name| view.get(name));
        let assigned: usize = partitions.map(|(_, all)| assigned_bytes(all as usize)).sum();
        let wanted_bytes = MEMBER_BYTES + names_bytes(names.iter()) + assigned;
        let held_bytes = self.member_bytes(group_id, &beat.member_id, None);
        self.check_membership_memory(group_id, wanted_bytes, held_bytes)
    }

    fn share_describe(
        &self,
        group_id: &str,
        topics: &TopicsView,
    ) -> Result<described::DescribedGroup, Fault> {
        self.check_open().map_err(plain)?;
        let slot = self.registry.get(group_id).ok_or_else(|| not_found(group_id))?;
        self.registry.peek(&slot, |group, _| match group {
            LiveGroup::Classic(_) if group.is_dead() => Err(not_found(group_id)),
            LiveGroup::Classic(_) | LiveGroup::Consumer(_) => Err(not_a_share_group(group_id)),
            LiveGroup::Share(group) => {
                let members = group.members().iter();
                let members = members.map(|(id, member)| described_member(id, member, topics));
                Ok(described::DescribedGroup::default()
                    .with_group_state(StrBytes::from_static_str(group.phase_name()))
                    .with_group_epoch(group.epoch())
                    .with_assignment_epoch(group.epoch())
                    .with_assignor_name(StrBytes::from_static_str(ASSIGNOR))
                    .with_members(members.collect()))
            }
        })
    }
}

/// Checks a request as far as no state is needed. The messages are Kafka's.
fn check_request(request: &ShareGroupHeartbeatRequest) -> Result<(), Fault> {
    let invalid = |message: &str| Err(Fault::new(ResponseError::InvalidRequest, message));
    if request.member_id.is_empty() {
        return invalid("MemberId can't be empty.");
    }
    if request.rack_id.as_ref().is_some_and(|id| id.is_empty()) {
        return invalid("RackId can't be empty.");
    }
    if request.member_epoch < LEAVES {
        return invalid("MemberEpoch is invalid.");
    }
    let names = request.subscribed_topic_names.as_ref();
    if request.member_epoch == 0 && names.is_none_or(Vec::is_empty) {
        return invalid("SubscribedTopicNames must be set in first request.");
    }
    let mut ids = request.rack_id.iter().chain([&request.member_id]);
    if ids.any(|id| id.len() > MAX_NAME_BYTES) {
        return invalid(&format!("member and rack ids must have at most {MAX_NAME_BYTES} bytes"));
    }
    let names = names.into_iter().flatten();
    if are_too_long(names.map(|name| name.len())) {
        return invalid(&format!(
            "the topic names of a member must have at most {MAX_SUBSCRIPTION_BYTES} bytes in total"
        ));
    }
    Ok(())
}

fn beat(client: &ClientInfo, request: &ShareGroupHeartbeatRequest) -> ShareBeat {
    let text = |text: &StrBytes| text.as_str().to_owned();
    let names = request.subscribed_topic_names.as_ref();
    ShareBeat {
        member_id: text(&request.member_id),
        epoch: request.member_epoch,
        rack_id: request.rack_id.as_ref().map(text),
        topics: names.map(|names| names.iter().map(|name| text(name)).collect()),
        client_id: text(&client.client_id),
        client_host: text(&client.client_host),
    }
}

fn answered_assignment(assignment: Assignment) -> answered::Assignment {
    let topics = assignment.into_iter().map(|(topic_id, partitions)| {
        answered::TopicPartitions::default()
            .with_topic_id(topic_id)
            .with_partitions(partitions.into_iter().collect())
    });
    answered::Assignment::default().with_topic_partitions(topics.collect())
}

fn described_member(id: &str, member: &ShareMember, topics: &TopicsView) -> described::Member {
    let text = |text: &str| StrBytes::from_string(text.to_owned());
    let assigned = member.assigned.iter().filter_map(|(topic_id, partitions)| {
        // A deleted topic has no name any more.
        let name = topics.name(*topic_id)?;
        Some(
            described::TopicPartitions::default()
                .with_topic_id(*topic_id)
                .with_topic_name(TopicName(text(name)))
                .with_partitions(partitions.iter().copied().collect()),
        )
    });
    described::Member::default()
        .with_member_id(text(id))
        .with_rack_id(member.rack_id.as_deref().map(text))
        .with_member_epoch(member.epoch)
        .with_client_id(text(&member.client_id))
        .with_client_host(text(&member.client_host))
        .with_subscribed_topic_names(member.topics.iter().map(|t| TopicName(text(t))).collect())
        .with_assignment(described::Assignment::default().with_topic_partitions(assigned.collect()))
}

pub(super) fn not_a_share_group(group_id: &str) -> Fault {
    Fault::new(ResponseError::GroupIdNotFound, format!("Group {group_id} is not a share group."))
}
