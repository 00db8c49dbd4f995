//! OffsetCommit and OffsetFetch, and the removal of committed offsets: deleted topics and
//! retention.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::offset_commit_request::OffsetCommitRequestPartition;
use kafka_protocol::messages::offset_commit_response::{
    OffsetCommitResponsePartition, OffsetCommitResponseTopic,
};
use kafka_protocol::messages::offset_fetch_response::{
    OffsetFetchResponseGroup, OffsetFetchResponsePartition, OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic, OffsetFetchResponseTopics,
};
use kafka_protocol::messages::{
    OffsetCommitRequest, OffsetCommitResponse, OffsetFetchRequest, OffsetFetchResponse, TopicName,
    TxnOffsetCommitRequest,
};
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::delete_offsets::Reads;
use super::live::{ClassicGroup, LiveGroup};
use super::offset_log::{Appended, Prepared, Refused};
use super::offsets::{Committed, Offsets, Position, Record};
use super::registry::now;
use super::topics_view::TopicsView;
use super::{Groups, GroupsError, MAX_GROUP_ID_BYTES, Shared};
use crate::partition::unix_time_ms;
use crate::state_stream;
use crate::state_table::MAX_STRING_BYTES;
use crate::wire::once;

/// Size at which a transaction's offsets for a group are split into records: together they may
/// exceed what one record can hold.
const COMMIT_RECORD_BYTES: usize = 64 << 10;

/// Why a record was not appended.
pub(super) enum Blocked {
    /// The log refused it.
    Log(Refused),
    /// The group refused it.
    Group(ResponseError),
    /// A transaction that is being ended blocks it, see
    /// [`super::pending::Pending::decision_ended`].
    Transaction,
}

impl From<Refused> for Blocked {
    fn from(refused: Refused) -> Self {
        Blocked::Log(refused)
    }
}

impl From<ResponseError> for Blocked {
    fn from(error: ResponseError) -> Self {
        Blocked::Group(error)
    }
}

/// What an OffsetFetch requests: topics with their partitions, or all offsets.
type Wanted = Option<Vec<(TopicName, Vec<i32>)>>;
/// The committed offset or `None`, by topic and partition.
type Found = Vec<(TopicName, Vec<(i32, Option<Committed>)>)>;

impl Groups {
    /// Handles OffsetCommit, versions 2 to 10. Answers when the offsets are durable.
    ///
    /// `view` has the ids of the topics. `exists(topic, partition)` says whether a partition
    /// exists; others are answered with UNKNOWN_TOPIC_OR_PARTITION. It is called again right before
    /// the append, and must not accept another topic that was created under the same name since: if
    /// a topic has been deleted by then, nothing is committed and every partition gets this error.
    /// The retention time of versions 2 to 4 is ignored.
    pub(crate) async fn offset_commit(
        &self,
        request: OffsetCommitRequest,
        version: i16,
        view: &TopicsView,
        exists: impl Fn(&str, i32) -> bool + Send + Sync,
    ) -> OffsetCommitResponse {
        let mut good = Vec::new();
        let mut topics = Vec::new();
        for topic in &request.topics {
            let mut positions = Vec::new();
            let mut partitions = Vec::new();
            for partition in &topic.partitions {
                let metadata = partition.committed_metadata.as_deref().unwrap_or_default();
                let index = partition.partition_index;
                let error = self.shared.check_position(&topic.name, index, metadata, &exists).err();
                if error.is_none() {
                    positions.push(position(partition));
                }
                partitions.push((partition.partition_index, error));
            }
            if !positions.is_empty() {
                good.push((topic.name.as_str().to_owned(), positions));
            }
            topics.push((topic.name.clone(), partitions));
        }
        let outcome = self.shared.commit(&request, version, good, view, &exists).await.err();
        let topics = topics.into_iter().map(|(name, partitions)| {
            let partitions = partitions.into_iter().map(|(index, error)| {
                // Errors of the whole group come first: to a fenced member the existence of topics
                // does not matter.
                let code = outcome.or(error).map_or(0, |error| error.code());
                OffsetCommitResponsePartition::default()
                    .with_partition_index(index)
                    .with_error_code(code)
            });
            OffsetCommitResponseTopic::default()
                .with_name(name)
                .with_partitions(partitions.collect())
        });
        OffsetCommitResponse::default().with_topics(topics.collect())
    }

    /// Handles OffsetFetch, versions 1 to 10. Returns durable offsets only; -1 where there is none.
    /// `require_stable` is left to the caller.
    pub async fn offset_fetch(
        &self,
        request: OffsetFetchRequest,
        version: i16,
    ) -> OffsetFetchResponse {
        let response = OffsetFetchResponse::default();
        if version >= 8 {
            let groups = once(request.groups, |group| group.group_id.clone()).map(|group| {
                let wanted = group.topics.map(|topics| {
                    topics.into_iter().map(|t| (t.name, t.partition_indexes)).collect()
                });
                let result = OffsetFetchResponseGroup::default();
                let checked = self.shared.check_fetch(
                    &group.group_id,
                    group.member_id.as_ref(),
                    group.member_epoch,
                );
                let found = checked.and_then(|()| self.shared.fetch(&group.group_id, wanted));
                let result = match found {
                    Ok(found) => result.with_topics(found.into_iter().map(fetched_topic).collect()),
                    Err(error) => result.with_error_code(error.code()),
                };
                result.with_group_id(group.group_id)
            });
            return response.with_groups(groups.collect());
        }
        let wanted: Wanted = request
            .topics
            .map(|topics| topics.into_iter().map(|t| (t.name, t.partition_indexes)).collect());
        match self.shared.fetch(&request.group_id, wanted.clone()) {
            Ok(found) => response.with_topics(
                found.into_iter().map(|topic| fetched_topic_v7(topic, None)).collect(),
            ),
            Err(error) if version >= 2 => response.with_error_code(error.code()),
            Err(error) => {
                // Version 1 has no error field outside of the partitions.
                let missing = |(name, indexes): (TopicName, Vec<i32>)| {
                    let partitions = indexes.into_iter().map(|index| (index, None)).collect();
                    fetched_topic_v7((name, partitions), Some(error))
                };
                response.with_topics(wanted.unwrap_or_default().into_iter().map(missing).collect())
            }
        }
    }

    /// Calls `record` if the client of a TxnOffsetCommit may commit these offsets for the group.
    /// The transaction coordinator stages them until the transaction ends. Creates the group if it
    /// does not exist.
    ///
    /// # Errors
    /// As for OffsetCommit.
    pub(crate) fn commit_in_transaction<R>(
        &self,
        request: &TxnOffsetCommitRequest,
        topics: &[(String, Vec<Position>)],
        view: &TopicsView,
        record: impl FnOnce() -> R,
    ) -> Result<R, ResponseError> {
        let shared = &self.shared;
        shared.check_open()?;
        if request.group_id.is_empty() || request.group_id.len() > MAX_GROUP_ID_BYTES {
            return Err(ResponseError::InvalidGroupId);
        }
        if !shared.log.has_space(&request.group_id, topics) {
            return Err(ResponseError::CoordinatorNotAvailable);
        }
        let slot = match shared.registry.get(&request.group_id) {
            Some(slot) => slot,
            None if request.generation_id < 0 => shared.create(&request.group_id)?,
            None => return Err(ResponseError::IllegalGeneration),
        };
        // Under the group's lock, so that every other change of the group comes before the check or
        // after the record: members that fence this one, a deletion, the sweep, a share group's
        // first member.
        shared.registry.peek(&slot, |group, now| {
            group.check_transactional_commit(
                now,
                &request.member_id,
                request.group_instance_id.as_ref(),
                request.generation_id,
                partitions(topics, view),
            )?;
            Ok(record())
        })
    }

    /// Ensures that a group exists that [`Pending`](super::pending::Pending) knows from before a
    /// restart; it stays.
    pub(crate) fn ensure(&self, group: &str) {
        self.shared.registry.with_live_group(group, || ());
    }

    /// Checks whether an offset can be committed for this partition; see [`Groups::offset_commit`].
    pub(crate) fn check_position(
        &self,
        topic: &str,
        partition: i32,
        metadata: &str,
        exists: impl Fn(&str, i32) -> bool,
    ) -> Result<(), ResponseError> {
        self.shared.check_position(topic, partition, metadata, exists)
    }

    /// Appends the offsets of a committing transaction as soon as there is space. Offsets of
    /// partitions that do not exist any more are left out.
    ///
    /// # Errors
    /// A failed store, as text.
    pub(crate) async fn commit_of_transaction(
        &self,
        group: &str,
        topics: BTreeMap<String, BTreeMap<i32, Position>>,
        exists: impl Fn(&str, i32) -> bool,
    ) -> Result<(), String> {
        let there = topics.into_iter().flat_map(|(name, positions)| {
            positions.into_values().map(move |position| (name.clone(), position))
        });
        let mut there = there.filter(|(name, p)| exists(name, p.partition)).peekable();
        let committed_at_ms = unix_time_ms();
        while there.peek().is_some() {
            let (mut topics, mut len_bytes) = (Vec::<(String, Vec<Position>)>::new(), 0);
            while len_bytes < COMMIT_RECORD_BYTES
                && let Some((name, position)) = there.next()
            {
                len_bytes += name.len() + size_of::<Position>() + position.metadata.len();
                match topics.last_mut().filter(|(last, _)| *last == name) {
                    Some((_, positions)) => positions.push(position),
                    None => topics.push((name, vec![position])),
                }
            }
            let record = Record::Commit { group: group.to_owned(), committed_at_ms, topics };
            self.append_decided(group, &Prepared::from(record)).await?;
        }
        Ok(())
    }

    /// Returns the committed offset of a group for a partition.
    pub(crate) fn committed_offset(&self, group: &str, topic: &str, partition: i32) -> Option<i64> {
        let offset = |table: &Offsets| Some(table.get(group, topic, partition)?.offset);
        self.shared.log.read(offset)
    }

    async fn append_decided(&self, group: &str, record: &Prepared) -> Result<(), String> {
        let shared = &self.shared;
        loop {
            let append = || shared.log.append_decided(record);
            let appended = shared.registry.with_live_group(group, append);
            match appended {
                Ok(_) => return Ok(()),
                Err(Refused::Stream(state_stream::Refused::Full)) => {
                    shared.log.wait_for_space().await;
                }
                Err(refused) => return Err(format!("{refused:?}")),
            }
        }
    }

    /// Removes all groups' offsets of those of `names` for which no topic exists, according to
    /// `exists` at the moment of the append. Durable when it returns.
    ///
    /// Needed when a topic was deleted; at start, since the server may have died between the two;
    /// and before a topic is created, which must not begin with the offsets of an earlier topic of
    /// its name, whatever the outcome of the other attempts.
    ///
    /// # Errors
    /// [`GroupsError::NotWritten`]: nothing was removed.
    pub async fn forget_missing_topics(
        &self,
        names: &[String],
        exists: impl Fn(&str) -> bool,
    ) -> Result<(), GroupsError> {
        let forget = || {
            Ok(self.shared.log.append_chosen(|tail| {
                let may_have = tail.may_have_topics();
                let missing = |name: &&String| {
                    name.len() <= MAX_STRING_BYTES && may_have(name) && !exists(name)
                };
                let names: Vec<String> = names.iter().filter(missing).cloned().collect();
                (!names.is_empty()).then(|| Prepared::from(Record::TopicsDeleted { names }))
            })?)
        };
        self.shared.write(forget).await.map_err(GroupsError::NotWritten)
    }

    /// Returns the topics for which any group has offsets, in order.
    pub fn topics_with_offsets(&self) -> Vec<String> {
        self.shared.log.read(|table| table.topics().map(str::to_owned).collect())
    }
}

/// A group without members and offsets is removed by the next sweep, as in Kafka, unless it became
/// vacant less than this long ago: its first member may be joining.
const MIN_VACANCY: Duration = Duration::from_secs(1);

/// Number of groups that are swept before the task yields.
const SWEPT_AT_ONCE: usize = 256;
/// The record that a group has members is renewed when this fraction of the retention has passed.
const NOTED_PARTS: u32 = 100;

impl Shared {
    fn check_position(
        &self,
        topic: &str,
        partition: i32,
        metadata: &str,
        exists: impl Fn(&str, i32) -> bool,
    ) -> Result<(), ResponseError> {
        if topic.len() > MAX_STRING_BYTES || !exists(topic, partition) {
            return Err(ResponseError::UnknownTopicOrPartition);
        }
        if metadata.len() > self.config.max_offset_metadata_bytes {
            return Err(ResponseError::OffsetMetadataTooLarge);
        }
        Ok(())
    }

    /// Commits offsets for a group. The member is checked even if there is nothing to commit.
    async fn commit(
        &self,
        request: &OffsetCommitRequest,
        version: i16,
        topics: Vec<(String, Vec<Position>)>,
        view: &TopicsView,
        exists: impl Fn(&str, i32) -> bool,
    ) -> Result<(), ResponseError> {
        self.check_open()?;
        // A group with an empty id cannot be joined, but old clients commit under it, and Kafka
        // allows it.
        if request.group_id.len() > MAX_GROUP_ID_BYTES {
            return Err(ResponseError::InvalidGroupId);
        }
        let generation = request.generation_id_or_member_epoch;
        let group = request.group_id.as_str().to_owned();
        let record =
            Prepared::from(Record::Commit { group, committed_at_ms: unix_time_ms(), topics });
        let topics = record.committed();
        // A topic is created and deleted as a whole, so one partition suffices.
        let is_there = |(topic, positions): &(String, Vec<Position>)| {
            positions.first().is_some_and(|position| exists(topic, position.partition))
        };
        self.write(|| {
            let slot = match self.registry.get(&request.group_id) {
                Some(slot) => slot,
                // There is nothing to write, so no group is created.
                None if generation < 0 && topics.is_empty() => return Ok(None),
                None if generation < 0 => self.create(&request.group_id)?,
                None if version >= 9 => return Err(ResponseError::GroupIdNotFound.into()),
                None => return Err(ResponseError::IllegalGeneration.into()),
            };
            // Under the group's lock, so that a deletion of the group comes before (and is seen) or
            // after the record.
            self.registry.peek(&slot, |group, now| {
                group.check_commit(
                    now,
                    &request.member_id,
                    request.group_instance_id.as_ref(),
                    generation,
                    version,
                    partitions(topics, view),
                )?;
                if topics.is_empty() {
                    return Ok(None);
                }
                // The offsets of transactions are appended under this lock, too.
                if self.pending.is_decided(&request.group_id, topics) {
                    return Err(Blocked::Transaction);
                }
                let chosen =
                    self.log.append_chosen(|_| topics.iter().all(is_there).then_some(&record))?;
                chosen.map(Some).ok_or(ResponseError::UnknownTopicOrPartition.into())
            })
        })
        .await
    }

    /// Appends a record with `attempt` and waits until it is durable. Repeats the attempt while the
    /// store has no space or a transaction has to end first. `attempt` may find that there is
    /// nothing to write.
    pub(super) async fn write<A>(
        &self,
        mut attempt: impl FnMut() -> Result<A, Blocked>,
    ) -> Result<(), ResponseError>
    where
        A: Into<Option<Appended>>,
    {
        let deadline = now() + self.config.append_timeout;
        let appended = loop {
            let ended = self.pending.decision_ended();
            let is_for_space = match attempt() {
                Ok(appended) => break appended.into(),
                Err(Blocked::Group(error)) => return Err(error),
                Err(Blocked::Transaction) => false,
                Err(Blocked::Log(Refused::TableFull)) => {
                    tracing::warn!(
                        "offset commit refused: memory limit for committed offsets reached"
                    );
                    // Old offsets expire, and consumers treat other errors as fatal.
                    return Err(ResponseError::CoordinatorNotAvailable);
                }
                Err(Blocked::Log(Refused::Stream(refused))) => match refused {
                    state_stream::Refused::Full => true,
                    state_stream::Refused::TooLarge => {
                        return Err(ResponseError::InvalidCommitOffsetSize);
                    }
                    state_stream::Refused::Fenced => return Err(ResponseError::NotCoordinator),
                    state_stream::Refused::Failed(cause) => {
                        tracing::error!("committed offsets cannot be written: {cause}");
                        return Err(ResponseError::CoordinatorNotAvailable);
                    }
                },
            };
            let again = async {
                if is_for_space {
                    self.log.wait_for_space().await;
                } else {
                    ended.await;
                }
            };
            if tokio::time::timeout_at(deadline.into(), again).await.is_err() {
                let missing = match is_for_space {
                    true => "the write-ahead log was full for too long",
                    false => "a transaction with offsets of the same partitions did not end",
                };
                tracing::warn!("change of committed offsets failed: {missing}");
                return Err(ResponseError::CoordinatorNotAvailable);
            }
        };
        let Some(appended) = appended else { return Ok(()) };
        self.log.durable(appended).await.map_err(|error| {
            tracing::error!("committed offsets could not be written: {error}");
            ResponseError::CoordinatorNotAvailable
        })
    }

    /// Checks whether this member may read the group's offsets (since version 9).
    fn check_fetch(
        &self,
        group_id: &str,
        member_id: Option<&StrBytes>,
        epoch: i32,
    ) -> Result<(), ResponseError> {
        match self.registry.get(group_id) {
            Some(slot) => self.registry.peek(&slot, |group, _| group.check_fetch(member_id, epoch)),
            None => Ok(()),
        }
    }

    fn fetch(&self, group_id: &str, wanted: Wanted) -> Result<Found, ResponseError> {
        self.check_open()?;
        Ok(self.log.read(|table| match wanted {
            None => all_offsets(table, group_id),
            Some(topics) => {
                let mut seen = HashSet::new();
                let find = |(name, indexes): (TopicName, Vec<i32>)| {
                    // Repetitions are left out, as by `once`: the metadata may be long.
                    let new = |index: &i32| seen.insert((name.clone(), *index));
                    let find = |index| (index, table.get(group_id, &name, index).cloned());
                    let partitions = indexes.into_iter().filter(new).map(find).collect();
                    (name, partitions)
                };
                topics.into_iter().map(find).collect()
            }
        }))
    }

    /// Whether the group has committed offsets, or offsets that are not durable yet or belong to an
    /// open transaction.
    pub(super) fn has_offsets(&self, group: &str) -> bool {
        self.log.mentions(group) || self.pending.concerns(group)
    }

    /// Drops offsets that are past their retention at `now`, which is `unix_now_ms`: of groups
    /// without members, and of topics that members do not read. Removes groups that have neither
    /// members nor offsets and that no open transaction has offsets for. A record that cannot be
    /// written now is left for the next sweep; no request waits for it.
    pub(super) async fn sweep(&self, now: Instant, unix_now_ms: i64) {
        let retention = self.config.offsets_retention;
        let retention_ms = i64::try_from(retention.as_millis()).unwrap_or(i64::MAX);
        let cutoff_ms = unix_now_ms.saturating_sub(retention_ms);
        for (n, slot) in self.registry.all().into_iter().enumerate() {
            if n % SWEPT_AT_ONCE == SWEPT_AT_ONCE - 1 {
                tokio::task::yield_now().await;
            }
            if self.is_closed() {
                return;
            }
            let is_dead = self.registry.change(&slot, |group, _| {
                let Some(since) = group.vacant_since() else {
                    self.expire_unread(&slot.name, group, cutoff_ms);
                    self.note_use(&slot.name, unix_now_ms);
                    return false;
                };
                let vacant_for = now.saturating_duration_since(since);
                if vacant_for >= MIN_VACANCY && !self.has_offsets(&slot.name) {
                    // A record that cannot be written now is left for the next sweep.
                    let classic = self.registry.make_classic(&slot, group, now);
                    return classic.map(ClassicGroup::kill).is_ok();
                }
                // Without this, a server that is restarted often would never find a group that has
                // been vacant for long. For a group from before the start, the last use is recorded
                // with its offsets; its members, if it has any, have had the time to join again.
                let was_vacant_at_start = self.registry.was_vacant_at_start(since);
                if !was_vacant_at_start {
                    let vacant_ms = i64::try_from(vacant_for.as_millis()).unwrap_or(i64::MAX);
                    self.note_use(&slot.name, unix_now_ms.saturating_sub(vacant_ms));
                }
                let last_use_ms = || self.log.read(|table| table.last_use_ms(&slot.name));
                let is_old = vacant_for >= retention
                    || (was_vacant_at_start
                        && vacant_for >= self.config.max_session_timeout
                        && last_use_ms().is_some_and(|at_ms| at_ms <= cutoff_ms));
                if is_old {
                    self.expire_offsets(&slot.name, cutoff_ms, |_| true);
                }
                false
            });
            if is_dead {
                self.registry.remove(&slot);
            }
        }
    }

    /// Records that the group had members at this time, for use after a restart: members that read
    /// quiet topics commit nothing for long. Skipped until a small part of the retention has
    /// passed, so that it is written seldom.
    fn note_use(&self, group_id: &str, at_ms: i64) {
        let part = self.config.offsets_retention / NOTED_PARTS;
        let part_ms = i64::try_from(part.as_millis()).unwrap_or(i64::MAX);
        let (last_use_ms, table_bytes) =
            self.log.read(|table| (table.last_use_ms(group_id), table.size_bytes()));
        // The last part of the memory is reserved for commits.
        let is_crowded = table_bytes > self.config.max_offsets_bytes / 10 * 9;
        if is_crowded || last_use_ms.is_none_or(|last_ms| at_ms.saturating_sub(last_ms) < part_ms) {
            return;
        }
        let record = Record::Used { group: group_id.to_owned(), at_ms };
        // A record that cannot be written now is left for the next sweep; no request waits for it.
        if let Err(refused) = self.log.append(&Prepared::from(record)) {
            tracing::debug!(group = group_id, ?refused, "last use of a group not recorded");
        }
    }

    /// Drops the old offsets of topics that no member of a group reads any more, as far as the
    /// subscriptions are known, that is for consumers. Without this, a group that runs forever
    /// would keep the offsets of every topic that it has ever read.
    fn expire_unread(&self, group_id: &str, group: &LiveGroup, cutoff_ms: i64) {
        // A member is about to join, and its subscription is not known yet.
        let has_members = match group {
            LiveGroup::Classic(group) => group.member_count() > 0,
            LiveGroup::Consumer(_) | LiveGroup::Share(_) => true,
        };
        if has_members && let Ok(reads) = Reads::of(group) {
            self.expire_offsets(group_id, cutoff_ms, |topic| !reads.includes(topic));
        }
    }

    fn expire_offsets(&self, group_id: &str, cutoff_ms: i64, may_go: impl Fn(&str) -> bool) {
        let expired = self.log.expired(group_id, cutoff_ms);
        let Some(Record::Expired { group, mut topics }) = expired else { return };
        // Otherwise an aborted transaction would leave no offset where there was one.
        let pending = self.pending.partitions(group_id);
        for (topic, partitions) in &mut topics {
            partitions.retain(|partition| !pending.contains(&(topic.clone(), *partition)));
        }
        topics.retain(|(topic, partitions)| !partitions.is_empty() && may_go(topic));
        if topics.is_empty() {
            return;
        }
        match self.log.append(&Prepared::from(Record::Expired { group, topics })) {
            Ok(_) => tracing::info!(group = group_id, "expired offsets dropped"),
            Err(refused) => {
                tracing::warn!(
                    group = group_id,
                    ?refused,
                    "expired offsets kept until the next check"
                );
            }
        }
    }
}

/// Partitions with the ids of their topics, `None` where the topic does not exist.
fn partitions<'a>(
    topics: &'a [(String, Vec<Position>)],
    view: &'a TopicsView,
) -> impl Iterator<Item = Option<(Uuid, i32)>> + 'a {
    topics.iter().flat_map(|(name, positions)| {
        let id = view.get(name).map(|(id, _)| id);
        positions.iter().map(move |position| Some((id?, position.partition)))
    })
}

fn position(partition: &OffsetCommitRequestPartition) -> Position {
    Position {
        partition: partition.partition_index,
        offset: partition.committed_offset,
        leader_epoch: partition.committed_leader_epoch,
        metadata: partition
            .committed_metadata
            .as_ref()
            .map_or_else(String::new, |text| text.as_str().to_owned()),
    }
}

fn all_offsets(table: &Offsets, group_id: &str) -> Found {
    let topic = |(name, partitions): (&String, &BTreeMap<i32, Committed>)| {
        let partitions =
            partitions.iter().map(|(index, committed)| (*index, Some(committed.clone())));
        (TopicName(StrBytes::from_string(name.clone())), partitions.collect())
    };
    table.group(group_id).map(|topics| topics.iter().map(topic).collect()).unwrap_or_default()
}

fn fetched_topic(
    (name, partitions): (TopicName, Vec<(i32, Option<Committed>)>),
) -> OffsetFetchResponseTopics {
    let partitions = partitions.into_iter().map(|(index, committed)| {
        let committed = committed.unwrap_or_else(nothing_committed);
        OffsetFetchResponsePartitions::default()
            .with_partition_index(index)
            .with_committed_offset(committed.offset)
            .with_committed_leader_epoch(committed.leader_epoch)
            .with_metadata(Some(StrBytes::from_string(committed.metadata)))
    });
    OffsetFetchResponseTopics::default().with_name(name).with_partitions(partitions.collect())
}

/// Builds the topic of a response of versions 1 to 7, which have their own types.
fn fetched_topic_v7(
    (name, partitions): (TopicName, Vec<(i32, Option<Committed>)>),
    error: Option<ResponseError>,
) -> OffsetFetchResponseTopic {
    let partitions = partitions.into_iter().map(|(index, committed)| {
        let committed = committed.unwrap_or_else(nothing_committed);
        OffsetFetchResponsePartition::default()
            .with_partition_index(index)
            .with_committed_offset(committed.offset)
            .with_committed_leader_epoch(committed.leader_epoch)
            .with_metadata(Some(StrBytes::from_string(committed.metadata)))
            .with_error_code(error.map_or(0, |error| error.code()))
    });
    OffsetFetchResponseTopic::default().with_name(name).with_partitions(partitions.collect())
}

/// The protocol's values for "no offset".
fn nothing_committed() -> Committed {
    Committed { offset: -1, leader_epoch: -1, committed_at_ms: -1, metadata: String::new() }
}
