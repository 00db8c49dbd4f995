//! ShareGroupHeartbeat and ShareAcknowledge, and the parts that ShareFetch shares with the latter.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use alluvium_stream::StreamOffset;
use bytes::Bytes;
use kafka_protocol::messages::share_acknowledge_response::{
    LeaderIdAndEpoch, PartitionData, ShareAcknowledgeTopicResponse,
};
use kafka_protocol::messages::{
    GroupId, ShareAcknowledgeResponse, ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse,
};
use kafka_protocol::protocol::StrBytes;
use tokio::time::{Instant, timeout_at};

use super::{Answer, Context, Refused};
use crate::errors::ApiError;
use crate::groups::share::{
    self, Ack, AckKind, NotTaken, Return, ShareRules, ShareSession, Shares, TopicPartition,
};
use crate::partition::{Partition, current_leader_epoch};
use crate::security::{Operation, Resource};
use crate::state_stream;
use crate::topics::TopicRef;
use crate::wire::share::{ShareAcknowledge, ShareAcknowledged};

/// The longest member ID.
const MAX_MEMBER_ID_BYTES: usize = 1024;

pub(super) async fn heartbeat(
    cx: &Context,
    request: ShareGroupHeartbeatRequest,
) -> ShareGroupHeartbeatResponse {
    let names = request.subscribed_topic_names.iter().flatten();
    let code = cx.member_code(&request.group_id, names);
    if code != 0 {
        return ShareGroupHeartbeatResponse::default().with_error_code(code);
    }
    // What the members of a share group do is stored.
    if let Err(error) = cx.check_writable() {
        return ShareGroupHeartbeatResponse::default()
            .with_error_code(error.code())
            .with_error_message(error.message());
    }
    let time = |name| cx.server.configs.group_time(&request.group_id, name);
    let session_timeout = time("share.session.timeout.ms");
    let interval = time("share.heartbeat.interval.ms");
    let (groups, topics) = (&cx.server.groups, &*cx.server.topics);
    groups.share_heartbeat(cx.client.clone(), request, session_timeout, interval, topics).await
}

/// Handles ShareAcknowledge; the response waits until the acknowledgements are durable.
pub(super) async fn acknowledge(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let mut response = acknowledged(&cx, cx.decode(body)?).await;
    response.body.throttle_time_ms = cx.throttle_ms();
    cx.reply(&response)
}

async fn acknowledged(cx: &Context, request: ShareAcknowledge) -> ShareAcknowledged {
    let body = request.body;
    let failed = |error: ApiError| {
        tracing::debug!(%error, "acknowledgements refused");
        cx.server.metrics.error(&error);
        let body = ShareAcknowledgeResponse::default()
            .with_error_code(error.code())
            .with_error_message(error.message());
        ShareAcknowledged { body, acquisition_lock_timeout_ms: 0 }
    };
    let member = match Member::new(cx, body.group_id.as_ref(), body.member_id.as_ref()) {
        Ok(member) => member,
        Err(error) => return failed(error),
    };
    let sessions = &cx.server.groups.shares().sessions;
    let step = match sessions.acknowledge(&member.session, body.share_session_epoch) {
        Ok(step) => step,
        Err(error) => return failed(error),
    };
    let released = member.released_at_the_end(cx, step);
    let named = body.topics.iter().flat_map(|topic| {
        topic.partitions.iter().map(|partition| (topic.topic_id, partition.partition_index))
    });
    let mut acks = Acks::new(cx, request.is_renew_ack, named);
    for topic in &body.topics {
        for partition in &topic.partitions {
            let of = (topic.topic_id, partition.partition_index);
            let batches = partition.acknowledgement_batches.iter().map(|batch| {
                (batch.first_offset, batch.last_offset, batch.acknowledge_types.as_slice())
            });
            acks.take(cx, &member, of, batches).await;
        }
    }
    drop(released);
    let mut topics: Vec<ShareAcknowledgeTopicResponse> = Vec::new();
    let leader = LeaderIdAndEpoch::default()
        .with_leader_id(cx.server.node.id)
        .with_leader_epoch(current_leader_epoch(&cx.server.store));
    for (topic, index, error) in acks.outcomes().await {
        let (code, message) = error_fields(error.as_ref());
        let partition = PartitionData::default()
            .with_partition_index(index)
            .with_error_code(code)
            .with_error_message(message)
            .with_current_leader(leader.clone());
        match topics.last_mut().filter(|last| last.topic_id == topic) {
            Some(last) => last.partitions.push(partition),
            None => topics.push(
                ShareAcknowledgeTopicResponse::default()
                    .with_topic_id(topic)
                    .with_partitions(vec![partition]),
            ),
        }
    }
    ShareAcknowledged {
        body: ShareAcknowledgeResponse::default().with_responses(topics),
        acquisition_lock_timeout_ms: member.lock_timeout_ms(),
    }
}

/// The code and message of an error, or of success.
pub(super) fn error_fields(error: Option<&ApiError>) -> (i16, Option<StrBytes>) {
    (error.map_or(0, ApiError::code), error.and_then(ApiError::message))
}

/// The sender of a ShareFetch or a ShareAcknowledge.
pub(super) struct Member {
    pub(super) session: ShareSession,
    pub(super) rules: ShareRules,
}

impl Member {
    /// Identifies the member. As in Kafka, membership by heartbeat is not checked: after a restart
    /// of the server a member may have to rejoin, and continues meanwhile.
    ///
    /// # Errors
    /// The client may not read with the group; group or member ID is missing.
    pub(super) fn new(
        cx: &Context,
        group: Option<&GroupId>,
        member: Option<&StrBytes>,
    ) -> Result<Self, ApiError> {
        let group = group.map_or("", |group| group.as_str());
        let member = member.map_or("", StrBytes::as_str);
        cx.authorize(Operation::Read, Resource::Group(group))?;
        cx.check_writable()?;
        if group.is_empty() || member.is_empty() || member.len() > MAX_MEMBER_ID_BYTES {
            return Err(ApiError::InvalidRequest(format!(
                "a share group and a member ID of at most {MAX_MEMBER_ID_BYTES} bytes are required"
            )));
        }
        let rules = cx.server.configs.share_rules(group);
        let session = ShareSession { group: group.into(), member: member.into() };
        Ok(Self { session, rules })
    }

    pub(super) fn lock_timeout_ms(&self) -> i32 {
        i32::try_from(self.rules.lock_duration.as_millis()).unwrap_or(i32::MAX)
    }

    /// The partition, if the client may read it.
    pub(super) fn partition(
        cx: &Context,
        (topic, index): TopicPartition,
    ) -> Result<Arc<Partition>, ApiError> {
        let topic = cx.topic(Operation::Read, &TopicRef::Id(topic))?;
        topic.partition(index).cloned().ok_or(ApiError::UnknownTopicOrPartition)
    }

    /// A guard to drop when the acknowledgements are appended: if the session ends, records that
    /// the member has not acknowledged are released then, even if the request is cancelled before.
    pub(super) fn released_at_the_end<'a>(
        &'a self,
        cx: &'a Context,
        step: share::Step,
    ) -> Option<ReleasedAtTheEnd<'a>> {
        let shares = cx.server.groups.shares();
        (step == share::Step::Ended).then(|| ReleasedAtTheEnd { shares, session: &self.session })
    }
}

/// Releases the records of a session that has ended.
pub(super) struct ReleasedAtTheEnd<'a> {
    shares: &'a Shares,
    session: &'a ShareSession,
}

impl Drop for ReleasedAtTheEnd<'_> {
    fn drop(&mut self) {
        self.shares.release(&self.session.group, &self.session.member, Return::Lost);
    }
}

type Outcome = Result<Option<share::Durable>, ApiError>;

/// The acknowledgements of a request.
pub(super) struct Acks {
    is_renew_ack: bool,
    /// The partitions that are named more than once, whose acknowledgements are refused; and
    /// whether that is in the results already.
    repeated: HashMap<TopicPartition, bool>,
    /// The deadline of all appends for free space in the log.
    deadline: Instant,
    /// In the order of the request.
    outcomes: Vec<(TopicPartition, Outcome)>,
}

impl Acks {
    /// Prepares for a request with acknowledgements for these partitions.
    pub(super) fn new(
        cx: &Context,
        is_renew_ack: bool,
        named: impl Iterator<Item = TopicPartition>,
    ) -> Self {
        let mut seen = HashSet::new();
        Self {
            is_renew_ack,
            repeated: named.filter(|of| !seen.insert(*of)).map(|of| (of, false)).collect(),
            deadline: Instant::now() + cx.server.config.groups.append_timeout,
            outcomes: Vec::new(),
        }
    }

    /// Applies the acknowledgements of a partition, all or none: first and last offset, and types.
    pub(super) async fn take<'a>(
        &mut self,
        cx: &Context,
        member: &Member,
        of: TopicPartition,
        batches: impl Iterator<Item = (i64, i64, &'a [i8])>,
    ) {
        let is_reported =
            self.repeated.get_mut(&of).map(|is_reported| std::mem::replace(is_reported, true));
        let outcome = match (is_reported, self.parse(&member.rules, batches)) {
            (Some(true), _) => return,
            (Some(false), _) => {
                Err(ApiError::InvalidRequest("a partition is named more than once".into()))
            }
            (None, Ok(acks)) => append(cx, member, of, &acks, self.deadline).await,
            (None, Err(error)) => Err(error),
        };
        if let Err(error) = &outcome {
            tracing::debug!(topic = %of.0, partition = of.1, %error, "acknowledgements refused");
            cx.server.metrics.error(error);
        }
        self.outcomes.push((of, outcome));
    }

    /// Parses the acknowledgements of a partition.
    ///
    /// # Errors
    /// INVALID_REQUEST: batches out of order, or with a number of types that is neither one nor
    /// that of their records; unknown types.
    fn parse<'a>(
        &self,
        rules: &ShareRules,
        batches: impl Iterator<Item = (i64, i64, &'a [i8])>,
    ) -> Result<Vec<Ack>, ApiError> {
        let invalid = |what: &str| ApiError::InvalidRequest(what.to_owned());
        let mut acks: Vec<Ack> = Vec::new();
        let mut next = 0;
        for (first, last, types) in batches {
            if first < next || last < first || last == i64::MAX {
                return Err(invalid("acknowledgements must be in the order of their offsets"));
            }
            next = last + 1;
            let records = next - first;
            let is_one_for_all = types.len() == 1;
            if !is_one_for_all && i64::try_from(types.len()) != Ok(records) {
                return Err(invalid(
                    "a batch must have one acknowledgement type, or one for each record",
                ));
            }
            for (number, at) in types.iter().zip(first..) {
                let kind = AckKind::from_number(*number)
                    .ok_or_else(|| invalid("unknown acknowledgement type"))?;
                if kind == AckKind::Renew && !(self.is_renew_ack && rules.may_renew) {
                    return Err(invalid(
                        "RENEW needs the request's renew flag, and the group setting \
                         share.renew.acknowledge.enable",
                    ));
                }
                let to = if is_one_for_all { next } else { at + 1 };
                let (from, to) = (offset(at), offset(to));
                match acks.last_mut().filter(|last| last.to == from && last.kind == kind) {
                    Some(last) => last.to = to,
                    None => acks.push(Ack { from, to, kind }),
                }
            }
        }
        Ok(acks)
    }

    /// Waits until all are durable; returns the result of each.
    pub(super) async fn outcomes(self) -> Vec<(uuid::Uuid, i32, Option<ApiError>)> {
        let mut outcomes = Vec::with_capacity(self.outcomes.len());
        for ((topic, index), outcome) in self.outcomes {
            let outcome = match outcome {
                Ok(record) => share::durable(record).await,
                Err(error) => Err(error),
            };
            outcomes.push((topic, index, outcome.err()));
        }
        outcomes
    }
}

/// Converts an offset that was checked to be positive.
fn offset(offset: i64) -> StreamOffset {
    StreamOffset(offset.unsigned_abs())
}

/// Appends acknowledgements; waits for free space in the log until `deadline`.
async fn append(
    cx: &Context,
    member: &Member,
    of: TopicPartition,
    acks: &[Ack],
    deadline: Instant,
) -> Outcome {
    let partition = Member::partition(cx, of)?;
    let shares = cx.server.groups.shares();
    let ShareSession { group, member: id } = &member.session;
    let slot = shares.get(group, of).ok_or(ApiError::InvalidRecordState)?;
    loop {
        let log_start = partition.stream.start_offset();
        match shares.acknowledge(&slot, &member.rules, log_start, id, acks) {
            Ok((record, start)) => {
                for Ack { from, to, kind } in acks {
                    let records = to.max(&start).0 - from.max(&start).0;
                    cx.server.metrics.share_acknowledged(*kind, records);
                }
                return Ok(record);
            }
            Err(NotTaken::NotAcquired | NotTaken::Gone) => {
                return Err(ApiError::InvalidRecordState);
            }
            Err(NotTaken::Log(refused @ state_stream::Refused::Full)) => {
                let freed = timeout_at(deadline, shares.wait_for_space()).await;
                freed.map_err(|_| share::refused(refused))?;
            }
            Err(NotTaken::Log(refused)) => return Err(share::refused(refused)),
        }
    }
}
