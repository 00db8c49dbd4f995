//! ShareFetch: applies acknowledgements, and delivers records of many partitions to one member,
//! waiting until there are some.
//!
//! Batches stay the bytes that the producer sent. The records that the member has acquired are
//! listed beside them, so a batch that several members share is sent to each as a whole.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use alluvium_stream::{StreamOffset, Watch};
use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::share_fetch_response::AcquiredRecords;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use super::share::{Acks, Member, error_fields};
use super::{Answer, Context, Refused, fetch, list_offsets};
use crate::batch::BatchHeader;
use crate::configs::group::ShareStart;
use crate::errors::ApiError;
use crate::groups::share::{
    self, Acquired, Found, Return, ShareSession, Slot, Step, TopicPartition, Wanted,
};
use crate::partition::{Partition, current_leader_epoch, unix_time_ms};
use crate::quotas::Bound;
use crate::sessions::{FetchTarget, Key};
use crate::topics::TopicRef;
use crate::wire::share::{FetchedPartition, ShareFetch, ShareFetched};

/// The bytes of a partition that are read at once. A member gets a few hundred records per
/// response, so more would be read for nothing.
const PARTITION_BYTES: i32 = 1 << 20;

/// The greatest number of unreadable partitions of a session that one response lists. They stay in
/// the session, so each small request would have a large response.
const MAX_FAILURES: usize = 1_000;

/// Records are acquired one by one, not by batch.
const RECORD_LIMIT: i8 = 1;

/// The result for a partition.
#[derive(Default)]
struct PartitionResult {
    error: Option<ApiError>,
    /// The code of an error that [`fetch`] has already converted.
    error_code: i16,
    records: Vec<Bytes>,
    acquired: Vec<Acquired>,
}

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: ShareFetch = cx.decode(body)?;
    let mut budgets = Vec::new();
    let response = match answer(&cx, request, &mut budgets).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(%error, "share fetch refused");
            cx.server.metrics.error(&error);
            let (error_code, error_message) = error_fields(Some(&error));
            ShareFetched { error_code, error_message, ..ShareFetched::default() }
        }
    };
    let leader = (cx.server.node.id, current_leader_epoch(&cx.server.store));
    let mut response = response.encode(cx.correlation_id, leader)?;
    response.budgets = budgets;
    Ok(Answer::Ready(response))
}

async fn answer(
    cx: &Context,
    request: ShareFetch,
    budgets: &mut Vec<OwnedSemaphorePermit>,
) -> Result<ShareFetched, ApiError> {
    let ShareFetch { body, acquire_mode, is_renew_ack } = request;
    let member = Member::new(cx, body.group_id.as_ref(), body.member_id.as_ref())?;
    let mut added = Vec::new();
    let mut acknowledged = Vec::new();
    for topic in &body.topics {
        for partition in &topic.partitions {
            let of = (topic.topic_id, partition.partition_index);
            added.push(of);
            if !partition.acknowledgement_batches.is_empty() {
                acknowledged.push((of, &partition.acknowledgement_batches));
            }
        }
    }
    if body.share_session_epoch == 0 && !acknowledged.is_empty() {
        let reason = "the first request of a session must not have acknowledgements";
        return Err(ApiError::InvalidRequest(reason.into()));
    }
    let wants_nothing = body.max_bytes <= 0 || body.max_records <= 0;
    if is_renew_ack && !wants_nothing {
        let reason = "a request that renews records must not request new ones";
        return Err(ApiError::InvalidRequest(reason.into()));
    }
    let forgotten = body.forgotten_topics_data.iter();
    let forgotten: Vec<TopicPartition> =
        forgotten.flat_map(|t| t.partitions.iter().map(|p| (t.topic_id, *p))).collect();
    let mut missing = take_missing(cx, &mut added);
    let sessions = &cx.server.groups.shares().sessions;
    let fetched = sessions.fetch(
        &member.session,
        body.share_session_epoch,
        cx.peer.connection(),
        &added,
        &forgotten,
    );
    if let Err(ApiError::ShareSessionLimit(_)) = fetched {
        // A session that grows too large ends.
        let ShareSession { group, member } = &member.session;
        cx.server.groups.shares().release(group, member, Return::Lost);
    }
    let (step, mut partitions) = fetched?;
    let released = member.released_at_the_end(cx, step);
    // Topics that were deleted since.
    let gone = take_missing(cx, &mut partitions);
    if !gone.is_empty() {
        sessions.forget(&member.session, &gone);
        missing.extend(gone);
    }

    let left = partitions.len() + missing.len() + acknowledged.len();
    let named = acknowledged.iter().map(|(of, _)| *of);
    let mut acks = Acks::new(cx, is_renew_ack, named);
    for (of, batches) in acknowledged {
        let batches = batches.iter().map(|batch| {
            (batch.first_offset, batch.last_offset, batch.acknowledge_types.as_slice())
        });
        acks.take(cx, &member, of, batches).await;
    }
    drop(released);
    let mut given = BTreeMap::new();
    let mut limits = Limits {
        max_bytes: usize::try_from(body.max_bytes)
            .unwrap_or(0)
            .min(cx.server.config.max_fetch_bytes as usize),
        max_wait: Duration::from_millis(body.max_wait_ms.max(0) as u64),
        waits: body.min_bytes > 0 && missing.is_empty(),
        max_records: u64::try_from(body.max_records).unwrap_or(0),
        is_exact: acquire_mode == RECORD_LIMIT,
        batch_records: u64::try_from(body.batch_size).unwrap_or(0),
    };
    drop((body, added, forgotten));
    limits.max_wait = limits.max_wait.min(cx.release_request_memory(left).await);
    if step != Step::Ended && !wants_nothing && !cx.is_throttled(Bound::Fetched) {
        given = deliver(cx, &member, &partitions, limits, budgets).await;
        let shares = cx.server.groups.shares();
        if !shares.sessions.is_open(&member.session) {
            // The session ended while this request waited, perhaps before it acquired records. If
            // the end of the session has not released them yet, this releases them without counting
            // a delivery.
            let ShareSession { group, member } = &member.session;
            shares.release(group, member, Return::Unused);
            given.clear();
        }
        let served = given.iter().filter(|(_, given)| !given.acquired.is_empty());
        let served: Vec<TopicPartition> = served.map(|(of, _)| *of).collect();
        shares.sessions.served(&member.session, &served);
    }
    let bytes: usize = given.values().flat_map(|given| &given.records).map(Bytes::len).sum();
    cx.charge(Bound::Fetched, bytes as f64);
    cx.server.metrics.fetched_bytes.inc_by(bytes as u64);

    // The first response of a session lists all its partitions.
    if step == Step::Begun {
        for of in partitions {
            given.entry(of).or_default();
        }
    }
    if step != Step::Ended {
        for of in missing {
            let error = Member::partition(cx, of).err();
            let error = error.unwrap_or(ApiError::UnknownTopicOrPartition);
            given.insert(of, PartitionResult::failed(cx, error));
        }
    }
    let mut topics: BTreeMap<Uuid, BTreeMap<i32, FetchedPartition>> = BTreeMap::new();
    for ((topic, index), given) in given {
        topics.entry(topic).or_default().insert(index, given.into_response(index));
    }
    for (topic, index, error) in acks.outcomes().await {
        let partitions = topics.entry(topic).or_default();
        let partition = partitions
            .entry(index)
            .or_insert_with(|| FetchedPartition { index, ..FetchedPartition::default() });
        (partition.acknowledge_error_code, partition.acknowledge_error_message) =
            error_fields(error.as_ref());
    }
    let topics = topics.into_iter().map(|(id, all)| (id, all.into_values().collect()));
    Ok(ShareFetched {
        throttle_time_ms: cx.throttle_ms(),
        acquisition_lock_timeout_ms: member.lock_timeout_ms(),
        topics: topics.collect(),
        ..ShareFetched::default()
    })
}

/// Takes out the partitions that do not exist; a member gets the error once. Nothing has to be
/// stored: a member names its assignment, topics do not lose partitions, and another topic has
/// another ID. Partitions that may not be read stay, as the right may be granted.
fn take_missing(cx: &Context, partitions: &mut Vec<TopicPartition>) -> Vec<TopicPartition> {
    let exists = |(topic, index): &TopicPartition| {
        cx.server.topics.by_id(*topic).is_ok_and(|topic| topic.partition(*index).is_some())
    };
    let missing;
    (*partitions, missing) = std::mem::take(partitions).into_iter().partition(exists);
    missing
}

impl PartitionResult {
    fn failed(cx: &Context, error: ApiError) -> Self {
        cx.server.metrics.error(&error);
        Self { error: Some(error), ..Self::default() }
    }

    fn into_response(self, index: i32) -> FetchedPartition {
        let (code, error_message) = error_fields(self.error.as_ref());
        let acquired = self.acquired.into_iter().map(|Acquired { from, to, deliveries }| {
            AcquiredRecords::default()
                .with_first_offset(i64::try_from(from.0).unwrap_or(i64::MAX))
                .with_last_offset(i64::try_from(to.0 - 1).unwrap_or(i64::MAX))
                .with_delivery_count(i16::try_from(deliveries).unwrap_or(i16::MAX))
        });
        FetchedPartition {
            index,
            error_code: if code == 0 { self.error_code } else { code },
            error_message,
            records: self.records,
            acquired: acquired.collect(),
            ..FetchedPartition::default()
        }
    }
}

/// How much a member requests, and how long it waits.
#[derive(Clone, Copy)]
struct Limits {
    max_bytes: usize,
    max_wait: Duration,
    waits: bool,
    max_records: u64,
    is_exact: bool,
    batch_records: u64,
}

/// A share partition that may have records to acquire.
struct Source {
    of: TopicPartition,
    slot: Arc<Slot>,
    from: StreamOffset,
}

/// Acquires records, and waits until there are some.
async fn deliver(
    cx: &Context,
    member: &Member,
    partitions: &[TopicPartition],
    limits: Limits,
    budgets: &mut Vec<OwnedSemaphorePermit>,
) -> BTreeMap<TopicPartition, PartitionResult> {
    let mut failures = BTreeMap::new();
    let mut readable = Vec::new();
    let mut refused = HashMap::new();
    for of in partitions {
        match ready(cx, member, *of, &mut refused).await {
            Ok((partition, slot)) => readable.push((*of, partition, slot)),
            Err(failed) if failures.len() < MAX_FAILURES => drop(failures.insert(*of, failed)),
            Err(_) => {}
        }
    }
    let deadline = Instant::now() + limits.max_wait;
    let shares = cx.server.groups.shares();
    let progress = Arc::new(Notify::new());
    let mut watches: Option<Vec<Watch>> = None;
    let mut given = BTreeMap::new();
    loop {
        let read_committed = member.rules.read_committed;
        let sources = readable.iter().filter_map(|(of, partition, slot)| {
            let stream = &partition.stream;
            let from = shares.next_read(slot, &member.rules, stream.start_offset())?;
            let end =
                if read_committed { partition.last_stable_offset() } else { stream.durable_end() };
            (from < end).then(|| Source { of: *of, slot: Arc::clone(slot), from })
        });
        let sources: Vec<Source> = sources.collect();
        let (progressed, is_changed) =
            pass(cx, member, &sources, limits, deadline, &progress, &mut given, budgets).await;
        // An unreadable partition is reported with the others, and does not cause endless reads of
        // them.
        let has_only_failures = readable.is_empty() && !failures.is_empty();
        let is_enough = !given.is_empty() || has_only_failures || !limits.waits;
        if is_enough || Instant::now() >= deadline {
            break;
        }
        if is_changed || progressed {
            continue;
        }
        if watches.is_none() {
            // Records that arrived before the watches began are found by another pass.
            let watch = |(_, partition, slot): &(_, Arc<Partition>, Arc<Slot>)| {
                shares.watch(slot, &progress);
                partition.stream.watch(&progress)
            };
            watches = Some(readable.iter().map(watch).collect());
            continue;
        }
        tokio::select! {
            () = progress.notified() => {}
            () = sleep_until(deadline) => break,
            () = cx.server.stopping() => break,
        }
    }
    given.append(&mut failures);
    given
}

/// Reads once and acquires what it finds. Returns whether there is more in memory by now, and
/// whether something has changed so that another read may find more.
#[allow(clippy::too_many_arguments, reason = "it is the body of a loop")]
async fn pass(
    cx: &Context,
    member: &Member,
    sources: &[Source],
    limits: Limits,
    deadline: Instant,
    progress: &Notify,
    given: &mut BTreeMap<TopicPartition, PartitionResult>,
    budgets: &mut Vec<OwnedSemaphorePermit>,
) -> (bool, bool) {
    if sources.is_empty() {
        return (false, false);
    }
    let targets = sources.iter().map(|source| FetchTarget {
        key: Key { topic: TopicRef::Id(source.of.0), partition: source.of.1 },
        offset: i64::try_from(source.from.0).unwrap_or(i64::MAX),
        max_bytes: PARTITION_BYTES,
        leader_epoch: -1,
    });
    let targets: Vec<FetchTarget> = targets.collect();
    let read_committed = member.rules.read_committed;
    let (pass, progressed) =
        fetch::read_once(cx, &targets, limits.max_bytes, read_committed, deadline, progress).await;
    let shares = cx.server.groups.shares();
    let mut left = limits.max_records;
    let mut is_changed = false;
    for (source, read) in sources.iter().zip(pass.reads) {
        if read.status.error_code == ResponseError::OffsetOutOfRange.code() {
            // Retention has deleted the offset meanwhile.
            is_changed = true;
            continue;
        }
        if read.status.error_code != 0 {
            let failed = PartitionResult {
                error_code: read.status.error_code,
                ..PartitionResult::default()
            };
            given.insert(source.of, failed);
            continue;
        }
        if left == 0 || read.batches.is_empty() {
            continue;
        }
        let found = found(&read.batches, &read.aborted);
        let wanted = Wanted {
            max_records: left,
            is_exact: limits.is_exact,
            batch_records: limits.batch_records,
            max_in_flight: member.rules.max_in_flight,
        };
        let acquired = shares.acquire(
            &source.slot,
            &member.rules,
            (source.from, &found),
            &member.session.member,
            wanted,
        );
        let records: u64 = acquired.iter().map(|acquired| acquired.to.0 - acquired.from.0).sum();
        cx.server.metrics.share_acquired.inc_by(records);
        left = left.saturating_sub(records);
        if acquired.is_empty() {
            // There were no records for members, or other members acquired them: then the next read
            // begins elsewhere.
            let next = shares.next_read(&source.slot, &member.rules, StreamOffset(0));
            is_changed |= next.is_some_and(|next| next != source.from);
            continue;
        }
        let batches = read.batches.into_iter().zip(&found);
        let is_shown = |found: &Found| {
            acquired.iter().any(|acquired| acquired.from < found.to && found.from < acquired.to)
        };
        let records = batches.filter(|(_, found)| is_shown(found)).map(|(batch, _)| batch);
        let records = records.collect();
        given
            .insert(source.of, PartitionResult { records, acquired, ..PartitionResult::default() });
    }
    if !given.is_empty() {
        budgets.extend(pass.budgets);
    }
    (progressed, is_changed)
}

/// Lists the offsets of batches, and whether they are for members: markers and batches without
/// records are not, nor are records of aborted transactions if the group reads committed records.
fn found(batches: &[Bytes], aborted: &[(i64, i64)]) -> Vec<Found> {
    let mut coming = aborted.to_vec();
    coming.sort_unstable_by_key(|(_, first_offset)| std::cmp::Reverse(*first_offset));
    // The producers whose aborted transaction is open at the current batch.
    let mut open: HashSet<i64> = HashSet::new();
    let headers = batches.iter().filter_map(|batch| BatchHeader::parse(batch));
    let found = headers.map(|header| {
        while let Some((producer_id, first_offset)) = coming.last().copied()
            && first_offset <= header.base_offset
        {
            open.insert(producer_id);
            coming.pop();
        }
        let from = StreamOffset(header.base_offset.unsigned_abs());
        let to = StreamOffset(from.0 + u64::from(header.offsets()));
        let mut is_for_members = header.record_count > 0;
        if header.is_control() {
            open.remove(&header.producer_id);
            is_for_members = false;
        } else if header.is_transactional() && open.contains(&header.producer_id) {
            is_for_members = false;
        }
        Found { from, to, is_for_members }
    });
    found.collect()
}

/// Returns the partition and its share partition, which is started if necessary. `refused` holds
/// the topics that could not start, with the error code: all partitions of a topic start together,
/// so a failure of one is not repeated for the next.
async fn ready(
    cx: &Context,
    member: &Member,
    of: TopicPartition,
    refused: &mut HashMap<Uuid, i16>,
) -> Result<(Arc<Partition>, Arc<Slot>), PartitionResult> {
    let failed = |error| PartitionResult::failed(cx, error);
    let partition = Member::partition(cx, of).map_err(failed)?;
    let slot = match (
        cx.server.groups.shares().get(&member.session.group, of),
        refused.get(&of.0).copied(),
    ) {
        (Some(slot), _) => slot,
        (None, Some(code)) => {
            return Err(PartitionResult { error_code: code, ..PartitionResult::default() });
        }
        (None, None) => begin(cx, member, of).await.map_err(|error| {
            refused.insert(of.0, error.code());
            failed(error)
        })?,
    };
    // Another member's request may be starting it at this moment.
    share::durable(slot.begun()).await.map_err(failed)?;
    Ok((partition, slot))
}

/// Starts a topic's share partitions. If the topic is new to the group, all start where the group's
/// settings say; if it has grown, the new ones start at their beginning.
async fn begin(cx: &Context, member: &Member, of: TopicPartition) -> Result<Arc<Slot>, ApiError> {
    let shares = cx.server.groups.shares();
    let group = &member.session.group;
    let start = match shares.has_topic(group, of.0) {
        true => ShareStart::Earliest,
        false => cx.server.configs.share_start(group),
    };
    let topic = cx.server.topics.by_id(of.0)?;
    let mut starts = Vec::with_capacity(topic.partitions.len());
    for (index, partition) in (0..).zip(&topic.partitions) {
        let stream = &partition.stream;
        let start = match start {
            ShareStart::Earliest => stream.start_offset(),
            ShareStart::Latest => stream.durable_end(),
            ShareStart::Ago(ago) => {
                let ago_ms = i64::try_from(ago.as_millis()).unwrap_or(i64::MAX);
                let from_ms = unix_time_ms().saturating_sub(ago_ms).max(0);
                let found = list_offsets::offset_of_time(cx, partition, from_ms).await?;
                let found = found.map(|offset| StreamOffset(offset.unsigned_abs()));
                found.unwrap_or_else(|| stream.durable_end())
            }
        };
        starts.push((index, start));
    }
    let exists = || cx.server.topics.by_id(of.0).is_ok();
    cx.server.groups.begin_shares(group, of.0, &starts, exists)?;
    // The topic may have been deleted since.
    shares.get(group, of).ok_or(ApiError::UnknownTopicOrPartition)
}
