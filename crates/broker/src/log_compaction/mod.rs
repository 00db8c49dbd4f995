//! Log compaction: keeps the last record of each key. `docs/log-compaction.md` describes guarantees
//! and procedure.

mod cleaner;
mod keys;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use alluvium_stream::{
    Change, FetchError, Reason, Store, StoreError, StoredPart, StreamId, StreamOffset,
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::batch::BatchHeader;
use crate::configs::topic::CompactionRules;
use crate::partition::{Partition, unix_time_ms};
use crate::server::Server;

use cleaner::Cleaner;
use keys::{AbortedTransactions, FirstPass, MAX_KEYS};

/// The pause after a partition could not be compacted; it doubles after each further failure.
const RETRY_INITIAL: Duration = Duration::from_secs(1);
/// The longest pause.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// The longest pause after a loss of records: each attempt reads again everything before the loss.
const RETRY_LOST: Duration = Duration::from_secs(60 * 60);
/// The number of clean ends that are stored per partition, approximately; at most twice as many. A
/// tombstone may stay longer than `delete.retention.ms` by about this fraction of it.
const ENDS: i64 = 16;

const META_PREFIX: &str = "cleaned/";

/// The catalog key of a partition's clean ends with their times.
pub(crate) fn meta_key(stream: StreamId) -> String {
    format!("{META_PREFIX}{stream}")
}

/// The clean ends of all partitions.
pub(crate) struct CleanEnds(HashMap<String, Cleaned>);

impl CleanEnds {
    pub(crate) fn load(store: &Store) -> Self {
        let stored = store.meta(META_PREFIX).into_iter();
        Self(stored.map(|(key, value)| (key, Cleaned::decode(&value))).collect())
    }

    pub(crate) fn of(&self, stream: StreamId) -> StreamOffset {
        StreamOffset(self.0.get(&meta_key(stream)).map_or(0, Cleaned::end))
    }
}

/// A partition's catalog entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cleaned {
    /// Offset and time in ms: everything before the offset was compacted before that time. In
    /// ascending order of both.
    ends: Vec<(u64, i64)>,
}

impl Cleaned {
    fn of(store: &Store, stream: StreamId) -> Self {
        let stored = store.meta_value(&meta_key(stream));
        stored.map(|value| Self::decode(&value)).unwrap_or_default()
    }

    fn decode(value: &[u8]) -> Self {
        // Without it the whole partition is compacted again, nothing worse.
        serde_json::from_slice(value).unwrap_or_default()
    }

    /// The offset before which everything was compacted at least once.
    fn end(&self) -> u64 {
        self.ends.last().map_or(0, |(end, _)| *end)
    }

    /// The offset before which everything was compacted at `time_ms` or earlier.
    fn end_at(&self, time_ms: i64) -> u64 {
        let before = self.ends.iter().take_while(|(_, at_ms)| *at_ms <= time_ms);
        before.last().map_or(0, |(end, _)| *end)
    }

    /// Adds an end. Those older than `delete.retention.ms` are merged into one. Of ends that follow
    /// each other closely some are left out: records before such an end count as compacted at the
    /// time of its successor.
    fn push(&mut self, end: u64, now_ms: i64, rules: &CompactionRules) {
        let over_ms = now_ms.saturating_sub(rules.delete_retention_ms);
        let over = self.ends.iter().take_while(|(_, at_ms)| *at_ms <= over_ms).count();
        self.ends.drain(..over.saturating_sub(1));
        if let [.., (_, before_ms), (_, last_ms)] = self.ends[..]
            && (last_ms - before_ms < rules.delete_retention_ms / ENDS
                || self.ends.len() > 2 * ENDS as usize)
        {
            self.ends.pop();
        }
        let last_ms = self.ends.last().map_or(now_ms, |(_, at_ms)| now_ms.max(*at_ms));
        self.ends.push((end, last_ms));
    }
}

/// The offset before which a partition was compacted.
#[cfg(test)]
pub(crate) fn clean_end(store: &Store, stream: StreamId) -> u64 {
    Cleaned::of(store, stream).end()
}

/// The work to do in a partition.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    /// Bytes that were compacted at least once.
    clean_bytes: u64,
    /// Bytes up to `to` that were not.
    dirty_bytes: u64,
    /// The end of the range that may be compacted now.
    to: u64,
}

impl Plan {
    /// Plans the compaction of a partition with the last stable offset `last_stable`.
    fn new(
        parts: &[StoredPart],
        clean_end: u64,
        last_stable: u64,
        now_ms: i64,
        rules: &CompactionRules,
    ) -> Self {
        let mut plan = Self { clean_bytes: 0, dirty_bytes: 0, to: clean_end };
        for part in parts {
            let offsets = (part.end.0 - part.start.0).max(1);
            let clean = clean_end.clamp(part.start.0, part.end.0) - part.start.0;
            let clean_bytes =
                u128::from(part.payload_bytes) * u128::from(clean) / u128::from(offsets);
            let clean_bytes = u64::try_from(clean_bytes).unwrap_or(part.payload_bytes);
            plan.clean_bytes += clean_bytes;
            if part.end.0 <= clean_end {
                continue;
            }
            let is_recent =
                rules.min_lag_ms > 0 && part.newest_ms > now_ms.saturating_sub(rules.min_lag_ms);
            if part.end.0 > last_stable || is_recent {
                break;
            }
            plan.dirty_bytes += part.payload_bytes - clean_bytes;
            plan.to = part.end.0;
        }
        plan
    }

    /// The dirty fraction of the bytes; 0 if nothing can be compacted.
    fn dirty_ratio(&self) -> f64 {
        let all = self.clean_bytes + self.dirty_bytes;
        if all == 0 { 0.0 } else { self.dirty_bytes as f64 / all as f64 }
    }
}

/// The state kept between checks.
pub(crate) struct Memory {
    /// The greatest number of keys in one pass.
    max_keys: usize,
    failing: HashMap<StreamId, Failing>,
    /// Clean end and time of the first record after it, of partitions with `max.compaction.lag.ms`.
    first_times: HashMap<StreamId, (u64, i64)>,
}

impl Memory {
    pub(crate) fn new(max_keys: usize) -> Self {
        Self { max_keys, failing: HashMap::new(), first_times: HashMap::new() }
    }

    /// The time of the next retry of a failed partition.
    fn next_retry(&self) -> Option<Instant> {
        self.failing.values().map(|failing| failing.until).min()
    }
}

/// A partition that could not be compacted.
struct Failing {
    /// The time of the next attempt.
    until: Instant,
    /// Failures in a row.
    failures: u32,
    /// Partition and error, for messages.
    text: String,
}

impl Failing {
    /// Schedules the retry after `failures` earlier failures.
    fn new(failures: u32, is_loss: bool, text: String) -> Self {
        let longest = if is_loss { RETRY_LOST } else { RETRY_MAX };
        let wait = RETRY_INITIAL.saturating_mul(1 << failures.min(20)).min(longest);
        Self { until: Instant::now() + wait, failures: failures.saturating_add(1), text }
    }
}

/// A partition to compact.
struct Due {
    topic: Arc<str>,
    index: usize,
    partition: Arc<Partition>,
    rules: CompactionRules,
    plan: Plan,
    cleaned: Cleaned,
}

/// Compacts the topics periodically until the server stops.
pub(crate) async fn run(server: Arc<Server>) {
    let mut memory = Memory::new(MAX_KEYS);
    loop {
        let begun = Instant::now();
        let next_retry = memory.next_retry();
        loop {
            // Before the backoff is read, so that no change of it is missed.
            let mut changed = pin!(server.configs.changed());
            changed.as_mut().enable();
            let next_check = begun + server.configs.cleaner_backoff();
            let next = next_retry.map_or(next_check, |retry| retry.min(next_check));
            tokio::select! {
                () = server.stopping() => return,
                () = tokio::time::sleep_until(next) => break,
                () = changed => {}
            }
        }
        tokio::select! {
            () = server.stopping() => return,
            () = compact_all(&server, &mut memory) => {}
        }
    }
}

/// Compacts the partitions that are due, the dirtiest first.
pub(crate) async fn compact_all(server: &Arc<Server>, memory: &mut Memory) {
    let now = Instant::now();
    memory.first_times.retain(|id, _| server.store.stream(*id).is_some());
    let mut due = Vec::new();
    let mut dirtiest: f64 = 0.0;
    let mut dirty_bytes = 0;
    let mut waiting = HashSet::new();
    for topic in server.topics.all() {
        let Some(rules) = topic.rules.compaction else { continue };
        for (index, partition) in topic.partitions.iter().enumerate() {
            let stream = &partition.stream;
            // A stream with another writer is not this server's to compact.
            if partition.writer_epoch().ok() != Some(stream.newest_epoch()) {
                continue;
            }
            let cleaned = Cleaned::of(&server.store, stream.id());
            let (last_stable, now_ms) = (partition.last_stable_offset().0, unix_time_ms());
            let parts = stream.stored_parts(StreamOffset(0));
            let plan = Plan::new(&parts, cleaned.end(), last_stable, now_ms, &rules);
            let ratio = plan.dirty_ratio();
            dirtiest = dirtiest.max(ratio);
            dirty_bytes += plan.dirty_bytes;
            let failing = memory.failing.get(&stream.id());
            if failing.is_some_and(|failing| now < failing.until) {
                waiting.insert(stream.id());
                continue;
            }
            let is_due = plan.dirty_bytes > 0
                && (ratio > rules.min_dirty_ratio
                    || is_too_old(memory, partition, cleaned.end(), now_ms, &rules).await);
            if is_due {
                waiting.insert(stream.id());
                let (topic, partition) = (topic.name.clone(), partition.clone());
                due.push(Due { topic, index, partition, rules, plan, cleaned });
            }
        }
        tokio::task::yield_now().await;
    }
    // The others are deleted, or have nothing left to compact.
    memory.failing.retain(|id, _| waiting.contains(id));
    server.metrics.log_compaction_dirtiest.set(dirtiest);
    server.metrics.log_compaction_dirty_bytes.set(i64::try_from(dirty_bytes).unwrap_or(i64::MAX));
    due.sort_by(|one, other| other.plan.dirty_ratio().total_cmp(&one.plan.dirty_ratio()));
    for due in due {
        let (topic, partition, id) = (due.topic.clone(), due.index, due.partition.stream.id());
        let done = compact(server, due, memory.max_keys).await;
        match done {
            Ok(done) => {
                memory.failing.remove(&id);
                let metrics = &server.metrics;
                metrics.log_compactions.inc();
                metrics.log_compaction_last_success.set(unix_time_ms() as f64 / 1e3);
                metrics.log_compaction_read_bytes.inc_by(done.read_bytes);
                metrics.log_compaction_written_bytes.inc_by(done.written_bytes);
                tracing::info!(
                    %topic,
                    partition,
                    up_to = done.end,
                    read_bytes = done.read_bytes,
                    written_bytes = done.written_bytes,
                    "compacted"
                );
            }
            // The topic was deleted concurrently.
            Err(error) if server.store.stream(id).is_none() => {
                tracing::debug!(%topic, partition, %error, "log compaction");
            }
            Err(error) => {
                server.metrics.log_compaction_failures.inc();
                let before = memory.failing.get(&id).map_or(0, |failing| failing.failures);
                let is_loss = matches!(&error, StoreError::Object(error) if error.is_loss());
                let text = format!("partition {partition} of topic {topic}: {error}");
                let failing = Failing::new(before, is_loss, text);
                let next_try = failing.until - Instant::now();
                tracing::warn!(%topic, partition, %error, ?next_try, "log compaction failed");
                memory.failing.insert(id, failing);
                // Now, not only when all other partitions are done.
                report(server, memory);
            }
        }
    }
    report(server, memory);
}

/// Reports the partitions that wait for a retry.
fn report(server: &Server, memory: &Memory) {
    let failing = memory.failing.values();
    server.metrics.log_compaction_failing.set(failing.len() as i64);
    let next_ms = memory.next_retry().map_or(0, |at| {
        let wait = at.saturating_duration_since(Instant::now());
        unix_time_ms() + i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)
    });
    server.metrics.log_compaction_next_retry.set(next_ms as f64 / 1e3);
    let worst = memory.failing.values().max_by_key(|failing| failing.failures);
    let detail = worst.map(|worst| {
        format!(
            "log compaction fails for {} partitions, which grow until a retry succeeds; the one \
             with most failures, {} in a row: {}",
            memory.failing.len(),
            worst.failures,
            worst.text
        )
    });
    server.store.report(Reason::LogCompactionFailing, detail);
}

/// Whether the first record that is not compacted is older than `max.compaction.lag.ms`.
async fn is_too_old(
    memory: &mut Memory,
    partition: &Partition,
    clean_end: u64,
    now_ms: i64,
    rules: &CompactionRules,
) -> bool {
    if rules.max_lag_ms == i64::MAX {
        return false;
    }
    let stream = &partition.stream;
    let from = StreamOffset(clean_end).max(stream.start_offset());
    let known = memory.first_times.get(&stream.id()).filter(|(at, _)| *at == from.0);
    let first_ms = match known {
        Some((_, first_ms)) => *first_ms,
        None => match first_time(partition, from).await {
            Ok(Some(first_ms)) => {
                memory.first_times.insert(stream.id(), (from.0, first_ms));
                first_ms
            }
            Ok(None) => return false,
            Err(error) => {
                tracing::debug!(%error, "the timestamp of the first dirty record cannot be read");
                return false;
            }
        },
    };
    first_ms < now_ms.saturating_sub(rules.max_lag_ms)
}

async fn first_time(partition: &Partition, from: StreamOffset) -> Result<Option<i64>, FetchError> {
    let batches = partition.stream.fetch(from, 1).await?.batches;
    let header = batches.first().and_then(|first| BatchHeader::parse(&first.payload));
    Ok(header.map(|header| match header.is_log_append_time() {
        true => header.max_timestamp_ms,
        false => header.base_timestamp_ms,
    }))
}

/// The result of compacting a partition.
struct Done {
    end: u64,
    read_bytes: u64,
    written_bytes: u64,
}

/// Compacts one partition and stores its new clean end.
async fn compact(server: &Arc<Server>, due: Due, max_keys: usize) -> Result<Done, StoreError> {
    let Due { partition, rules, plan, mut cleaned, .. } = due;
    let (store, stream) = (server.store.clone(), partition.stream.id());
    let epoch = partition.writer_epoch()?;
    let work = {
        let (store, partition, cleaned) = (store.clone(), partition.clone(), cleaned.clone());
        async move { clean(&store, &partition, plan, &cleaned, &rules, max_keys).await }
    };
    let done = server.store.in_background(work).await??;
    partition.record_compaction(StreamOffset(done.end));
    cleaned.push(done.end, unix_time_ms(), &rules);
    let value = serde_json::to_vec(&cleaned).expect("numbers can be written");
    // The trim has no effect, but is refused if the partition was deleted or has another writer.
    let still_ours = Change::TrimStream { id: stream, epoch, to: StreamOffset(0) };
    let remember = Change::PutMeta { key: meta_key(stream), value };
    store.commit(vec![still_ours, remember]).await?;
    Ok(done)
}

/// Runs both passes. Each step is committed separately; after any number of them each key still has
/// its last record.
async fn clean(
    store: &Store,
    partition: &Partition,
    plan: Plan,
    cleaned: &Cleaned,
    rules: &CompactionRules,
    max_keys: usize,
) -> Result<Done, StoreError> {
    let stream = &partition.stream;
    let (start, to) = (stream.start_offset(), StreamOffset(plan.to));
    let aborted = AbortedTransactions::new(partition.aborted_before(to));
    let from = StreamOffset(cleaned.end()).max(start);
    let first = FirstPass::new(from.0, aborted, max_keys);
    let first = store.scan(stream, from, to, first, FirstPass::batches).await?;
    let end = match first.is_full {
        false => plan.to,
        true => end_of_full(&stream.stored_parts(from), first.end),
    };
    let over_ms = unix_time_ms().saturating_sub(rules.delete_retention_ms);
    let mut cleaner = Cleaner::new(first, end, cleaned.end_at(over_ms));
    let mut done = Done { end, read_bytes: 0, written_bytes: 0 };
    let mut at = start;
    while at < StreamOffset(end) {
        let (then, step) = store.rewrite(stream, at, StreamOffset(end), cleaner).await?;
        (cleaner, at) = (then, step.end);
        done.read_bytes += step.read_bytes;
        done.written_bytes += step.written_bytes;
    }
    Ok(done)
}

/// The end of a pass that knows the keys up to `end` only: the last end of a part before it, so
/// that parts that were not compacted stay unchanged, or else `end`.
fn end_of_full(parts: &[StoredPart], end: u64) -> u64 {
    let whole = parts.iter().map(|part| part.end.0).take_while(|part_end| *part_end <= end);
    whole.last().unwrap_or(end)
}
