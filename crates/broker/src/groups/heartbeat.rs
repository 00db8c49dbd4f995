//! ConsumerGroupHeartbeat and ConsumerGroupDescribe: translation between the protocol and
//! [`super::consumer`].

use std::collections::BTreeSet;
use std::time::Duration;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::consumer_group_describe_response as described;
use kafka_protocol::messages::consumer_group_heartbeat_request::TopicPartitions;
use kafka_protocol::messages::consumer_group_heartbeat_response as answered;
use kafka_protocol::messages::{
    ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse, ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse, GroupId, TopicName,
};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::consumer::{
    Answer, Assignment, Assignor, Beat, ConsumerGroup, Fault, LEFT_FOR_A_WHILE, MEMBER_BYTES,
    Member, assigned_bytes, check_regex, owned_bytes,
};
use super::live::LiveGroup;
use super::member_log::Durable;
use super::membership::MAX_NAME_BYTES;
use super::registry::{Slot, now};
use super::topics_view::{TopicsNow, TopicsView};
use super::{ClientInfo, Groups, Shared};
use crate::state_stream::Refused;
use crate::wire::once;

/// Since this version members generate their ids themselves.
const FIRST_VERSION_WITH_OWN_IDS: i16 = 1;

/// Bound on the total length of the topic names that one member subscribes to. They go into one
/// record.
pub(super) const MAX_SUBSCRIPTION_BYTES: usize = 256 << 10;

/// Whether names of these lengths exceed [`MAX_SUBSCRIPTION_BYTES`] in the record's encoding.
pub(super) fn are_too_long(name_lens: impl Iterator<Item = usize>) -> bool {
    name_lens.map(|len| len + size_of::<u16>()).sum::<usize>() > MAX_SUBSCRIPTION_BYTES
}

/// Member types in ConsumerGroupDescribe.
const MEMBER_TYPE_CONSUMER: i8 = 1;
const MEMBER_TYPE_CLASSIC: i8 = 0;

/// The times that can be set per consumer group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConsumerTimes {
    pub(crate) session_timeout: Duration,
    pub(crate) heartbeat_interval: Duration,
}

impl Groups {
    /// Handles ConsumerGroupHeartbeat, versions 0 and 1. Answers when the state that the response
    /// shows is durable.
    pub(crate) async fn consumer_heartbeat(
        &self,
        client: ClientInfo,
        request: ConsumerGroupHeartbeatRequest,
        version: i16,
        topics: &dyn TopicsNow,
        times: ConsumerTimes,
    ) -> ConsumerGroupHeartbeatResponse {
        let response = ConsumerGroupHeartbeatResponse::default();
        match self.shared.consumer_heartbeat(&client, &request, version, topics, times).await {
            Ok(answer) => {
                let interval = times.heartbeat_interval.as_millis();
                let is_going_on = answer.epoch >= 0;
                response
                    .with_member_id(Some(StrBytes::from_string(answer.member_id)))
                    .with_member_epoch(answer.epoch)
                    .with_heartbeat_interval_ms(if is_going_on {
                        i32::try_from(interval).unwrap_or(i32::MAX)
                    } else {
                        0
                    })
                    .with_assignment(answer.assignment.map(answered_assignment))
            }
            Err(Fault { error, message }) => response
                .with_error_code(error.code())
                .with_error_message(Some(StrBytes::from_string(message))),
        }
    }

    /// Handles ConsumerGroupDescribe, versions 0 and 1. Shows durable state only.
    pub(crate) async fn consumer_describe(
        &self,
        request: ConsumerGroupDescribeRequest,
        version: i16,
        topics: &TopicsView,
    ) -> ConsumerGroupDescribeResponse {
        let mut groups = Vec::new();
        for group_id in once(request.group_ids, GroupId::clone) {
            let group = match self.shared.consumer_describe(&group_id, version, topics).await {
                Ok(group) => group,
                Err(Fault { error, message }) => described::DescribedGroup::default()
                    .with_error_code(error.code())
                    .with_error_message(Some(StrBytes::from_string(message))),
            };
            groups.push(group.with_group_id(group_id));
        }
        ConsumerGroupDescribeResponse::default().with_groups(groups)
    }
}

impl Shared {
    async fn consumer_heartbeat(
        &self,
        client: &ClientInfo,
        request: &ConsumerGroupHeartbeatRequest,
        version: i16,
        topics: &dyn TopicsNow,
        times: ConsumerTimes,
    ) -> Result<Answer, Fault> {
        self.check_group_id(&request.group_id).map_err(plain)?;
        check_request(request, version)?;
        let beat = beat(client, request);
        let slot = self.consumer_slot(request, &beat, topics)?;
        // Changes of an earlier event go first, so that never more than the changes of one event
        // are pending.
        self.append_unwritten(&slot).await?;
        let happen = |group: &mut ConsumerGroup, now| {
            if request.member_epoch >= 0 {
                return group.heartbeat(now, self.consumer_rules(times), &topics.view(), &beat);
            }
            let instance_id = beat.instance_id.as_deref();
            let is_for_a_while = instance_id.is_some() && request.member_epoch == LEFT_FOR_A_WHILE;
            group.leave(now, &beat.member_id, instance_id, is_for_a_while)?;
            Ok(Answer {
                member_id: beat.member_id.clone(),
                epoch: request.member_epoch,
                assignment: None,
            })
        };
        let answer = self.registry.change(&slot, |group, now| {
            if let LiveGroup::Consumer(group) = group {
                return match group.unwritten().is_empty() {
                    true => happen(group, now),
                    false => Err(unavailable()),
                };
            }
            if request.member_epoch != 0 {
                return Err(not_a_consumer_group(&request.group_id));
            }
            if group.is_dead() {
                return Err(was_deleted());
            }
            let consumer = self.registry.as_consumer(group, &topics.view(), now);
            let consumer = consumer.map_err(|error| {
                let why = "the members of the group are receiving their assignments, try again";
                Fault::new(error, why)
            })?;
            let mut consumer = consumer.ok_or_else(|| not_a_consumer_group(&request.group_id))?;
            // If the member is refused, the group stays as it is.
            let answer = happen(&mut consumer, now)?;
            if group.vacant_since().is_none() {
                tracing::info!(
                    group = &*slot.name,
                    "a classic group was converted to a consumer group"
                );
            }
            *group = LiveGroup::Consumer(consumer);
            Ok(answer)
        })?;
        self.wait_durable(&slot).await?;
        Ok(answer)
    }

    /// Returns the group's slot; a joining member creates it.
    fn consumer_slot(
        &self,
        request: &ConsumerGroupHeartbeatRequest,
        beat: &Beat,
        topics: &dyn TopicsNow,
    ) -> Result<std::sync::Arc<Slot>, Fault> {
        let group_id = request.group_id.as_str();
        let subscribes = beat.topics.is_some() || beat.regex.is_some();
        let is_known = || {
            let Some(slot) = self.registry.get(group_id) else { return false };
            let (topics, regex) = (beat.topics.as_ref(), beat.regex.as_deref());
            self.registry.peek(&slot, |group, _| match group {
                LiveGroup::Consumer(group) => group.subscribes_to(&beat.member_id, topics, regex),
                LiveGroup::Classic(_) | LiveGroup::Share(_) => false,
            })
        };
        if request.member_epoch >= 0 && subscribes && !is_known() {
            let names = beat.topics.iter().flatten();
            // Memory of a member that has all these partitions: as current and as target
            // assignment.
            let view = topics.view();
            let subscribed = names.clone().filter_map(|name| view.get(name));
            let most = |(_, partitions)| {
                assigned_bytes(partitions as usize) + owned_bytes(partitions as usize)
            };
            let of_topics: usize = subscribed.map(most).sum();
            let wanted_bytes = MEMBER_BYTES + names_bytes(names) + of_topics;
            let held_bytes =
                self.member_bytes(group_id, &beat.member_id, beat.instance_id.as_deref());
            self.check_membership_memory(group_id, wanted_bytes, held_bytes).map_err(|error| {
                Fault::new(error, "the memory limit for group members is reached")
            })?;
        }
        if request.member_epoch == 0 {
            return self.create(group_id).map_err(plain);
        }
        self.registry.get(group_id).ok_or_else(|| not_found(group_id))
    }

    /// Waits until the state of a group's members is durable.
    pub(super) async fn wait_durable(&self, slot: &Slot) -> Result<(), Fault> {
        let Some(durable) = self.append_unwritten(slot).await? else { return Ok(()) };
        durable.await.map_err(|error| {
            tracing::error!("group members could not be written: {error}");
            unavailable()
        })
    }

    /// Waits until the state of a group's members is appended, and returns its last record.
    async fn append_unwritten(&self, slot: &Slot) -> Result<Option<Durable>, Fault> {
        let deadline = now() + self.config.append_timeout;
        loop {
            match self.registry.write(slot) {
                Ok(durable) => return Ok(durable),
                Err(Refused::Full) => {}
                Err(Refused::Fenced) => return Err(plain(ResponseError::NotCoordinator)),
                Err(refused @ (Refused::TooLarge | Refused::Failed(_))) => {
                    let group = &*slot.name;
                    tracing::error!(group, ?refused, "group members cannot be written");
                    return Err(unavailable());
                }
            }
            if tokio::time::timeout_at(deadline.into(), self.registry.wait_for_space())
                .await
                .is_err()
            {
                tracing::warn!(
                    group = &*slot.name,
                    "a member's request failed: the write-ahead log was full for too long"
                );
                return Err(unavailable());
            }
        }
    }

    async fn consumer_describe(
        &self,
        group_id: &str,
        version: i16,
        topics: &TopicsView,
    ) -> Result<described::DescribedGroup, Fault> {
        self.check_open().map_err(plain)?;
        let slot = self.registry.get(group_id).ok_or_else(|| not_found(group_id))?;
        let group = self.registry.peek(&slot, |group, _| match group {
            LiveGroup::Classic(_) if group.is_dead() => Err(not_found(group_id)),
            LiveGroup::Classic(_) | LiveGroup::Share(_) => Err(not_a_consumer_group(group_id)),
            LiveGroup::Consumer(group) => {
                let state = group.state();
                let members = state.members.iter();
                let members = members.map(|(id, member)| {
                    let described = described_member(id, member, topics);
                    match (version, group.is_classic(id)) {
                        (0, _) => described,
                        (_, true) => described.with_member_type(MEMBER_TYPE_CLASSIC),
                        (_, false) => described.with_member_type(MEMBER_TYPE_CONSUMER),
                    }
                });
                Ok(described::DescribedGroup::default()
                    .with_group_state(StrBytes::from_static_str(group.phase().name()))
                    .with_group_epoch(state.epoch)
                    .with_assignment_epoch(state.target_epoch)
                    .with_assignor_name(StrBytes::from_static_str(group.assignor().name()))
                    .with_members(members.collect()))
            }
        })?;
        self.wait_durable(&slot).await?;
        Ok(group)
    }
}

/// Estimated memory of the topic names that a member sends.
pub(super) fn names_bytes<'a>(names: impl Iterator<Item = &'a String>) -> usize {
    names.map(|name| name.len() + 64).sum()
}

/// Checks a request as far as no state is needed. The messages are Kafka's.
fn check_request(request: &ConsumerGroupHeartbeatRequest, version: i16) -> Result<(), Fault> {
    let invalid = |message: &str| Err(Fault::new(ResponseError::InvalidRequest, message));
    let epoch = request.member_epoch;
    if request.member_id.is_empty() && (version >= FIRST_VERSION_WITH_OWN_IDS || epoch != 0) {
        return invalid("MemberId can't be empty.");
    }
    if request.instance_id.as_ref().is_some_and(|id| id.is_empty()) {
        return invalid("InstanceId can't be empty.");
    }
    if request.rack_id.as_ref().is_some_and(|id| id.is_empty()) {
        return invalid("RackId can't be empty.");
    }
    match epoch {
        0 => {
            if request.rebalance_timeout_ms < 0 {
                return invalid("RebalanceTimeoutMs must be provided in first request.");
            }
            if request.topic_partitions.as_ref().is_none_or(|owned| !owned.is_empty()) {
                return invalid("TopicPartitions must be empty when (re-)joining.");
            }
            if request.subscribed_topic_names.is_none() && request.subscribed_topic_regex.is_none()
            {
                return invalid(
                    "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when \
                     (re-)joining.",
                );
            }
        }
        LEFT_FOR_A_WHILE if request.instance_id.is_none() => {
            return invalid("InstanceId can't be null.");
        }
        epoch if epoch < LEFT_FOR_A_WHILE => return invalid("MemberEpoch is invalid."),
        _ => {}
    }
    if let Some(name) = &request.server_assignor
        && Assignor::by_name(name).is_none()
    {
        let supported = Assignor::ALL.map(Assignor::name).join(", ");
        return Err(Fault::new(
            ResponseError::UnsupportedAssignor,
            format!(
                "ServerAssignor {} is not supported. Supported assignors: {supported}.",
                name.as_str()
            ),
        ));
    }
    if let Some(regex) = request.subscribed_topic_regex.as_ref().filter(|regex| !regex.is_empty()) {
        check_regex(regex)?;
    }
    let own_names = [&request.instance_id, &request.rack_id].into_iter().flatten();
    let mut own_names = own_names.chain([&request.member_id]);
    if own_names.any(|name| name.len() > MAX_NAME_BYTES) {
        return Err(Fault::new(
            ResponseError::InvalidRequest,
            format!("member, instance and rack ids must have at most {MAX_NAME_BYTES} bytes"),
        ));
    }
    let names = request.subscribed_topic_names.iter().flatten();
    if are_too_long(names.map(|name| name.len())) {
        return Err(Fault::new(
            ResponseError::InvalidRequest,
            format!(
                "the topic names of a member must have at most {MAX_SUBSCRIPTION_BYTES} bytes in \
                 total"
            ),
        ));
    }
    Ok(())
}

fn beat(client: &ClientInfo, request: &ConsumerGroupHeartbeatRequest) -> Beat {
    let text = |text: &StrBytes| text.as_str().to_owned();
    let member_id = if request.member_id.is_empty() {
        Uuid::new_v4().to_string()
    } else {
        text(&request.member_id)
    };
    let names = request.subscribed_topic_names.as_ref();
    Beat {
        member_id,
        epoch: request.member_epoch,
        instance_id: request.instance_id.as_ref().map(text),
        rack_id: request.rack_id.as_ref().map(text),
        rebalance_timeout_ms: (request.rebalance_timeout_ms >= 0)
            .then_some(request.rebalance_timeout_ms),
        topics: names.map(|names| names.iter().map(|name| text(name)).collect()),
        regex: request.subscribed_topic_regex.as_ref().map(text),
        assignor: request.server_assignor.as_ref().map(text),
        owned: request.topic_partitions.as_deref().map(owned),
        client_id: text(&client.client_id),
        client_host: text(&client.client_host),
        visibility: client.visibility.clone(),
    }
}

fn owned(topics: &[TopicPartitions]) -> Assignment {
    let mut owned = Assignment::new();
    for topic in topics.iter().filter(|topic| !topic.partitions.is_empty()) {
        let partitions: &mut BTreeSet<i32> = owned.entry(topic.topic_id).or_default();
        partitions.extend(&topic.partitions);
    }
    owned
}

fn answered_assignment(assignment: Assignment) -> answered::Assignment {
    let topics = assignment.into_iter().map(|(topic_id, partitions)| {
        answered::TopicPartitions::default()
            .with_topic_id(topic_id)
            .with_partitions(partitions.into_iter().collect())
    });
    answered::Assignment::default().with_topic_partitions(topics.collect())
}

fn described_member(id: &str, member: &Member, topics: &TopicsView) -> described::Member {
    let text = |text: &str| StrBytes::from_string(text.to_owned());
    let assignment = |assignment: &Assignment| {
        let topics = assignment.iter().filter_map(|(topic_id, partitions)| {
            // A deleted topic has no name any more.
            let name = topics.name(*topic_id)?;
            let partitions = partitions.iter().copied().collect();
            Some(
                described::TopicPartitions::default()
                    .with_topic_id(*topic_id)
                    .with_topic_name(TopicName(text(name)))
                    .with_partitions(partitions),
            )
        });
        described::Assignment::default().with_topic_partitions(topics.collect())
    };
    let profile = &member.profile;
    described::Member::default()
        .with_member_id(text(id))
        .with_instance_id(profile.instance_id.as_deref().map(text))
        .with_rack_id(profile.rack_id.as_deref().map(text))
        .with_member_epoch(member.current.epoch)
        .with_client_id(text(&profile.client_id))
        .with_client_host(text(&profile.client_host))
        .with_subscribed_topic_names(profile.topics.iter().map(|t| TopicName(text(t))).collect())
        .with_subscribed_topic_regex(profile.regex.as_deref().map(text))
        .with_assignment(assignment(&member.current.assigned))
        .with_target_assignment(assignment(&member.target))
}

pub(super) fn plain(error: ResponseError) -> Fault {
    let message = match error {
        ResponseError::InvalidGroupId => "GroupId can't be empty.",
        ResponseError::PolicyViolation => "the request exceeds the memory limit for group members",
        _ => "the coordinator is not available",
    };
    Fault::new(error, message)
}

pub(super) fn unavailable() -> Fault {
    Fault::new(
        ResponseError::CoordinatorNotAvailable,
        "the write-ahead log accepts no records now, try again",
    )
}

/// The group was deleted after the joining member had found it. When the member retries, there is
/// another group.
pub(super) fn was_deleted() -> Fault {
    Fault::new(
        ResponseError::CoordinatorNotAvailable,
        "the group was deleted during the request, try again",
    )
}

pub(super) fn not_found(group_id: &str) -> Fault {
    Fault::new(ResponseError::GroupIdNotFound, format!("Group {group_id} not found."))
}

fn not_a_consumer_group(group_id: &str) -> Fault {
    Fault::new(ResponseError::GroupIdNotFound, format!("Group {group_id} is not a consumer group."))
}
