//! Fetch: returns durable batches of many partitions, and waits until there are enough.
//!
//! A pass first reads what is in memory, without waiting, and then what is in objects. The two have
//! separate budgets, so cold reads and tail reads do not delay each other.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kafka_protocol::messages::FetchRequest;
use tokio::sync::{Notify, OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use uuid::Uuid;

use alluvium_stream::{FetchError, Fetched, StreamOffset, Watch};

use super::{Answer, Context, Refused};
use crate::batch::{self, NO_LEADER_EPOCH};
use crate::errors::ApiError;
use crate::partition::{Partition, ReadSnapshot, kafka_offset};
use crate::quotas::Bound;
use crate::security::Operation;
use crate::server::ByteBudget;
use crate::sessions::{FetchTarget, Key, PartitionStatus};
use crate::topics::{Topic, TopicRef};
use crate::wire::fetch_response::{self, FetchResponse};

/// The number of partitions that are read from objects concurrently, so that cold reads of many
/// partitions do not wait for one object after the other.
const CONCURRENT_READS: usize = 8;

/// The shortest wait for objects if nothing else is read: a client's maximum wait is meant for
/// records that do not exist yet.
const COLD_WAIT: Duration = Duration::from_millis(500);

/// How long a read from memory waits for its share of the response memory, and the bytes that it
/// gets without a share, which the limit on connections limits.
const SHARE_WAIT: Duration = Duration::from_millis(100);
const UNCOUNTED_BYTES: usize = 128 << 10;

const READ_COMMITTED: i8 = 1;

/// The greatest number of batches without records in one response.
const MOST_WITHOUT_RECORDS: usize = 1000;

/// The result of one pass over the partitions.
#[derive(Default)]
pub(super) struct Pass {
    pub(super) reads: Vec<Read>,
    bytes: usize,
    failed: bool,
    /// The partitions to read from objects.
    cold: Vec<ColdRead>,
    /// The first batch of all, if it is too large to be returned with others; returned if there is
    /// nothing else.
    too_large: Option<(usize, Read)>,
    pub(super) budgets: Vec<OwnedSemaphorePermit>,
}

/// A partition to read from objects.
struct ColdRead {
    /// The index of its request.
    at: usize,
    partition: Arc<Partition>,
    from: StreamOffset,
    one_batch_bytes: usize,
    /// The client's limit.
    max_bytes: usize,
    limit_bytes: usize,
    /// Whether the read may return one batch larger than its limit.
    is_first: bool,
}

/// The result of a pass for one partition.
pub(super) struct Read {
    pub(super) status: PartitionStatus,
    pub(super) batches: Vec<Bytes>,
    /// Producer ID and first offset of the aborted transactions among the batches, for a reader of
    /// committed records.
    pub(super) aborted: Vec<(i64, i64)>,
}

impl Read {
    fn failed(error: &ApiError) -> Self {
        let status = PartitionStatus {
            error_code: error.code(),
            high_watermark: -1,
            last_stable_offset: -1,
            log_start: -1,
        };
        Self { status, batches: Vec::new(), aborted: Vec::new() }
    }

    fn nothing(partition: &Partition) -> Self {
        let last_stable_offset = kafka_offset(partition.last_stable_offset());
        let status = PartitionStatus {
            error_code: 0,
            high_watermark: partition.high_watermark(),
            last_stable_offset,
            log_start: partition.log_start(),
        };
        Self { status, batches: Vec::new(), aborted: Vec::new() }
    }

    /// Builds the result from what was fetched from `from` on; for a reader of committed records,
    /// from the part below the last stable offset. `None` if that can no longer be determined, and
    /// the fetch must be repeated.
    ///
    /// If there are only offsets without records from `from` up to the end that the reader sees,
    /// the result has batches without records that cover them. A reader that waits for its position
    /// to reach that end would otherwise wait for the next record.
    fn new(
        partition: &Partition,
        mut fetched: Fetched,
        from: StreamOffset,
        limit_bytes: usize,
        snapshot: ReadSnapshot,
        read_committed: bool,
    ) -> Option<Self> {
        let mut aborted = Vec::new();
        let mut gap = fetched.gap(from);
        if read_committed {
            gap.end = gap.end.min(snapshot.last_stable_offset);
            fetched.batches.retain(|batch| batch.base < snapshot.last_stable_offset);
            aborted = partition.aborted_among(from, &fetched.batches, snapshot)?;
        }
        let batches = match fetched.batches.is_empty() {
            true => without_records(gap, limit_bytes),
            false => fetched.batches.into_iter().map(|batch| batch.payload).collect(),
        };
        Some(Self {
            status: PartitionStatus {
                error_code: 0,
                high_watermark: kafka_offset(fetched.durable_end),
                last_stable_offset: kafka_offset(snapshot.last_stable_offset),
                log_start: kafka_offset(fetched.start),
            },
            batches,
            aborted: aborted
                .into_iter()
                .map(|aborted| {
                    let first = StreamOffset(aborted.first_offset);
                    (aborted.producer_id, kafka_offset(first))
                })
                .collect(),
        })
    }

    /// Reads from memory from `from` on; `None` if `from` lies in an object.
    fn cached(
        partition: &Partition,
        from: StreamOffset,
        limit_bytes: usize,
        read_committed: bool,
    ) -> Result<Option<Self>, FetchError> {
        loop {
            let snapshot = partition.read_snapshot();
            let fetched = partition.stream.fetch_now(from, limit_bytes)?;
            if fetched.cold && fetched.batches.is_empty() {
                return Ok(None);
            }
            let read = Self::new(partition, fetched, from, limit_bytes, snapshot, read_committed);
            if read.is_some() {
                return Ok(read);
            }
        }
    }

    fn len_bytes(&self) -> usize {
        self.batches.iter().map(Bytes::len).sum()
    }
}

impl Pass {
    fn fail(&mut self, cx: &Context, error: &ApiError) -> Read {
        tracing::debug!(%error, "fetch of a partition refused");
        cx.server.metrics.error(error);
        self.failed = true;
        Read::failed(error)
    }

    /// The bytes that the pass holds in memory.
    fn held_bytes(&self) -> usize {
        self.bytes + self.too_large.as_ref().map_or(0, |(_, read)| read.len_bytes())
    }

    /// Limits what `read` returns: all of it if it is within its limit or the first one, else
    /// nothing.
    fn limit(&mut self, at: usize, mut read: Read, limit_bytes: usize, is_first: bool) -> Read {
        // A read returns one whole batch at least, which may exceed the limit.
        if !is_first && read.len_bytes() > limit_bytes {
            let rest = Read {
                status: read.status,
                batches: std::mem::take(&mut read.batches),
                aborted: std::mem::take(&mut read.aborted),
            };
            self.too_large.get_or_insert((at, rest));
        }
        self.bytes += read.len_bytes();
        read
    }
}

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: FetchRequest = cx.decode(body)?;
    let fetch = match cx.server.sessions.begin(&request, cx.version, Instant::now()) {
        Ok(fetch) => fetch,
        Err(error) => {
            tracing::debug!(%error, "fetch refused");
            cx.server.metrics.error(&error);
            let response = FetchResponse { error_code: error.code(), ..FetchResponse::default() };
            return Ok(Answer::Ready(response.encode(cx.correlation_id, cx.version)?));
        }
    };

    let read_committed = request.isolation_level == READ_COMMITTED;
    let max_bytes = usize::try_from(request.max_bytes)
        .unwrap_or(0)
        .min(cx.server.config.max_fetch_bytes as usize);
    // Waiting for more than the response can hold would be useless.
    let min_bytes = usize::try_from(request.min_bytes).unwrap_or(0).min(max_bytes);
    let max_wait = Duration::from_millis(request.max_wait_ms.max(0) as u64);
    drop(request);
    let max_wait = max_wait.min(cx.release_request_memory(fetch.targets.len()).await);
    let limits = Limits { min_bytes, max_bytes, max_wait, read_committed };
    if cx.is_throttled(Bound::Fetched) {
        // Throttled with an empty response, as in Kafka. A response to a full request begins no
        // session.
        if !fetch.incremental {
            cx.server.sessions.forget(fetch.session_id);
        }
        let response = FetchResponse {
            throttle_time_ms: cx.throttle_ms(),
            session_id: if fetch.incremental { fetch.session_id } else { 0 },
            ..FetchResponse::default()
        };
        return Ok(Answer::Ready(response.encode(cx.correlation_id, cx.version)?));
    }
    let pass = wait_for_enough(&cx, limits, &fetch.targets).await;
    cx.server.metrics.fetched_bytes.inc_by(pass.bytes as u64);
    let answers = fetch
        .targets
        .iter()
        .zip(&pass.reads)
        .map(|(target, read)| (&target.key, read.status, !read.batches.is_empty()));
    let changed = cx.server.sessions.finish(fetch.session_id, answers);
    let reads = fetch.targets.into_iter().zip(pass.reads).zip(changed);
    let answered =
        reads.filter(|(_, changed)| *changed || !fetch.incremental).map(|(read, _)| read);
    cx.charge(Bound::Fetched, pass.bytes as f64);
    let response = FetchResponse {
        throttle_time_ms: cx.throttle_ms(),
        error_code: 0,
        session_id: fetch.session_id,
        topics: by_topic(answered, read_committed),
    };
    let mut response = response.encode(cx.correlation_id, cx.version)?;
    response.budgets = pass.budgets;
    Ok(Answer::Ready(response))
}

/// How much a client requests, and how long it waits.
#[derive(Clone, Copy)]
struct Limits {
    min_bytes: usize,
    max_bytes: usize,
    max_wait: Duration,
    read_committed: bool,
}

/// Reads until there are enough bytes, an error occurs, or the client's time is over.
async fn wait_for_enough(cx: &Context, limits: Limits, targets: &[FetchTarget]) -> Pass {
    let Limits { min_bytes, max_bytes, max_wait, read_committed } = limits;
    let begun = Instant::now();
    let deadline = begun + max_wait;
    let progress = Arc::new(Notify::new());
    let mut watches: Option<Vec<Watch>> = None;
    let mut is_last = false;
    loop {
        let mut pass = read_cached(cx, targets, max_bytes, read_committed).await;
        let is_enough = |pass: &Pass| pass.bytes >= min_bytes || pass.failed || targets.is_empty();
        if !is_enough(&pass) && watches.is_none() {
            // Records that became durable before the watch began are found by another pass.
            let partitions = targets.iter().filter_map(|target| find(cx, &target.key).ok());
            watches = Some(partitions.map(|(_, found)| found.stream.watch(&progress)).collect());
            continue;
        }
        // A fetch that already has enough bytes does not wait for objects; the next one finds them.
        let until = match is_enough(&pass) || pass.too_large.is_some() {
            true => begun,
            false if is_last => Instant::now() + COLD_WAIT,
            false => deadline.max(begun + COLD_WAIT),
        };
        let progressed = complete(cx, &mut pass, min_bytes, read_committed, until, &progress).await;
        if is_enough(&pass) || is_last || Instant::now() >= deadline {
            return pass;
        }
        if progressed {
            continue;
        }
        // A waiting fetch holds no memory from the budgets; it reads again afterwards.
        drop(pass);
        tokio::select! {
            () = progress.notified() => {}
            () = sleep_until(deadline) => is_last = true,
            () = cx.server.stopping() => is_last = true,
        }
    }
}

/// Makes a single pass for callers that decide themselves whether to wait. Reads from objects until
/// there is any result, or until there is more in memory; returns whether the latter happened.
pub(super) async fn read_once(
    cx: &Context,
    targets: &[FetchTarget],
    max_bytes: usize,
    read_committed: bool,
    deadline: Instant,
    progress: &Notify,
) -> (Pass, bool) {
    let begun = Instant::now();
    let mut pass = read_cached(cx, targets, max_bytes, read_committed).await;
    let until = match pass.bytes > 0 || pass.failed || pass.too_large.is_some() {
        true => begun,
        false => deadline.max(begun + COLD_WAIT),
    };
    let progressed = complete(cx, &mut pass, 1, read_committed, until, progress).await;
    (pass, progressed)
}

/// Reads the partitions that a pass found in objects, see [`read_cold`], and adds the batch that
/// was too large if there is nothing else.
async fn complete(
    cx: &Context,
    pass: &mut Pass,
    min_bytes: usize,
    read_committed: bool,
    until: Instant,
    progress: &Notify,
) -> bool {
    let mut progressed = false;
    if !pass.cold.is_empty() {
        progressed = read_cold(cx, pass, min_bytes, read_committed, until, progress).await;
    }
    if pass.bytes == 0
        && let Some((at, read)) = pass.too_large.take()
    {
        pass.bytes = read.len_bytes();
        pass.reads[at] = read;
    }
    pass.cold.clear();
    progressed
}

/// Reads from memory. A fetch that does not get its share of the response memory soon reads a
/// little without one: clients that do not receive their responses cannot keep others from reading.
async fn read_cached(
    cx: &Context,
    targets: &[FetchTarget],
    max_bytes: usize,
    read_committed: bool,
) -> Pass {
    let sources: Vec<_> = targets.iter().map(|target| locate(cx, target, read_committed)).collect();
    let scan = |left_bytes| scan(cx, targets, &sources, max_bytes, left_bytes, read_committed);
    let readable = sources.iter().flatten().filter(|source| source.from.is_some());
    let Some(one_batch_bytes) = readable.map(|source| source.one_batch_bytes).max() else {
        return scan(max_bytes);
    };
    let budgets = &cx.server.fetch_budget;
    let share_bytes = share(max_bytes, budgets.free_bytes(), one_batch_bytes);
    let mut budget = timeout(SHARE_WAIT, budgets.acquire(share_bytes)).await.ok();
    let mut pass = match &budget {
        Some(_) => scan(max_bytes.min(share_bytes)),
        None => scan(max_bytes.min(UNCOUNTED_BYTES)),
    };
    if budget.is_none() && pass.held_bytes() > UNCOUNTED_BYTES {
        if (1..=UNCOUNTED_BYTES).contains(&pass.bytes) {
            // The large batch belongs to a partition after those that were read; a later fetch
            // returns it.
            pass.too_large = None;
        } else {
            // The first batch is larger, so it has to wait for memory.
            drop(pass);
            budget = Some(budgets.acquire(one_batch_bytes).await);
            pass = scan(max_bytes.min(one_batch_bytes));
        }
    }
    // Keeps only the share of the budget that the response needs.
    let held_bytes = pass.held_bytes();
    pass.budgets.extend(budget.and_then(|budget| ByteBudget::shrink(budget, held_bytes)));
    pass
}

/// Reads from memory, in order, until `left_bytes` are read or reserved for reads from objects.
/// Reads one batch at least if there is any, whatever its size: else a consumer would be stuck
/// before it.
fn scan(
    cx: &Context,
    targets: &[FetchTarget],
    sources: &[Result<Source, ApiError>],
    max_bytes: usize,
    mut left_bytes: usize,
    read_committed: bool,
) -> Pass {
    let mut pass = Pass { reads: Vec::with_capacity(targets.len()), ..Pass::default() };
    // At most half is reserved for reads that may not complete in time.
    let mut cold_bytes = max_bytes / 2;
    let mut is_first = true;
    for (at, (target, source)) in targets.iter().zip(sources).enumerate() {
        let Source { partition, from, one_batch_bytes } = match source {
            Ok(source) => source,
            Err(error) => {
                let read = pass.fail(cx, error);
                pass.reads.push(read);
                continue;
            }
        };
        let Some(from) = from.filter(|_| is_first || left_bytes > 0) else {
            pass.reads.push(Read::nothing(partition));
            continue;
        };
        let max_bytes = usize::try_from(target.max_bytes).unwrap_or(0);
        let limit_bytes = max_bytes.min(left_bytes);
        let read = match Read::cached(partition, from, limit_bytes, read_committed) {
            Ok(None) => {
                let limit_bytes = limit_bytes.min(cold_bytes);
                if is_first || limit_bytes > 0 {
                    (left_bytes, cold_bytes) = (left_bytes - limit_bytes, cold_bytes - limit_bytes);
                    pass.cold.push(ColdRead {
                        at,
                        partition: partition.clone(),
                        from,
                        one_batch_bytes: *one_batch_bytes,
                        max_bytes,
                        limit_bytes,
                        is_first,
                    });
                    is_first = false;
                }
                Read::nothing(partition)
            }
            Ok(Some(read)) => {
                let read = pass.limit(at, read, limit_bytes, is_first);
                is_first &= read.batches.is_empty();
                read
            }
            Err(error) => pass.fail(cx, &error.into()),
        };
        left_bytes = left_bytes.saturating_sub(read.len_bytes());
        pass.reads.push(read);
    }
    // Bytes that are left over go to the reads from objects.
    for cold in &mut pass.cold {
        let more_bytes = cold.max_bytes.saturating_sub(cold.limit_bytes).min(left_bytes);
        (cold.limit_bytes, left_bytes) = (cold.limit_bytes + more_bytes, left_bytes - more_bytes);
    }
    pass
}

/// Reads several partitions from objects concurrently: until `until`, until there is enough, or
/// until there is more in memory. Returns whether the latter happened. Unfinished reads continue
/// for the next fetch.
async fn read_cold(
    cx: &Context,
    pass: &mut Pass,
    min_bytes: usize,
    read_committed: bool,
    until: Instant,
    progress: &Notify,
) -> bool {
    let mut cold = std::mem::take(&mut pass.cold).into_iter();
    let wanted_bytes = cold.as_slice().iter().map(|cold| cold.limit_bytes).sum();
    let budgets = &cx.server.cold_fetch_budget;
    let one_batch_bytes = cold.as_slice().iter().map(|cold| cold.one_batch_bytes).max();
    let share_bytes = share(wanted_bytes, budgets.free_bytes(), one_batch_bytes.unwrap_or(0));
    let Ok(budget) = timeout_at(until, budgets.acquire(share_bytes)).await else { return false };
    let (stop, stopped) = watch::channel(false);
    let read = |cold: ColdRead, limit_bytes: usize| {
        let mut stopped = stopped.clone();
        async move {
            let partition = &cold.partition;
            let read = loop {
                let enough = async {
                    tokio::select! {
                        () = sleep_until(until) => {}
                        // An error would mean that the sender, and with it the caller, is gone.
                        _ = stopped.wait_for(|stopped| *stopped) => {}
                    }
                };
                let snapshot = partition.read_snapshot();
                let fetched = partition.stream.fetch_until(cold.from, limit_bytes, enough).await;
                let read = fetched.map(|fetched| {
                    Read::new(partition, fetched, cold.from, limit_bytes, snapshot, read_committed)
                });
                if let Some(read) = read.transpose() {
                    break read;
                }
            };
            (cold, limit_bytes, read)
        }
    };
    let (mut left_bytes, mut read_bytes, mut progressed) = (share_bytes, 0, false);
    let mut reads = FuturesUnordered::new();
    let mut stopping = std::pin::pin!(cx.server.stopping());
    loop {
        while reads.len() < CONCURRENT_READS && !*stop.borrow() {
            let Some(cold) = cold.next() else { break };
            let limit_bytes = cold.limit_bytes.min(left_bytes);
            left_bytes -= limit_bytes;
            if cold.is_first || limit_bytes > 0 {
                reads.push(read(cold, limit_bytes));
            }
        }
        let is_running = !*stop.borrow();
        tokio::select! {
            next = reads.next() => {
                let Some((cold, limit_bytes, read)) = next else { break };
                let read = match read {
                    Ok(read) => pass.limit(cold.at, read, limit_bytes, cold.is_first),
                    Err(error) => pass.fail(cx, &error.into()),
                };
                read_bytes += read.len_bytes();
                pass.reads[cold.at] = read;
                if pass.bytes >= min_bytes || pass.failed {
                    stop.send_replace(true);
                }
            }
            () = progress.notified(), if is_running => {
                progressed = true;
                stop.send_replace(true);
            }
            () = &mut stopping, if is_running => {
                stop.send_replace(true);
            }
        }
    }
    let held_bytes = read_bytes + pass.too_large.as_ref().map_or(0, |(_, read)| read.len_bytes());
    pass.budgets.extend(ByteBudget::shrink(budget, held_bytes));
    progressed
}

/// The share of a response budget that a fetch takes: at most half of the free bytes, so that slow
/// readers of large responses leave memory to others; and at least one batch, which it gets in any
/// case.
fn share(wanted_bytes: usize, free_bytes: usize, one_batch_bytes: usize) -> usize {
    wanted_bytes.min(free_bytes / 2).max(one_batch_bytes)
}

/// A requested partition.
struct Source {
    partition: Arc<Partition>,
    /// The offset to read from, if there is anything to read.
    from: Option<StreamOffset>,
    /// The greatest size of one of its batches.
    one_batch_bytes: usize,
}

fn find(cx: &Context, key: &Key) -> Result<(Arc<Topic>, Arc<Partition>), ApiError> {
    let topic = cx.topic(Operation::Read, &key.topic)?;
    let partition = topic.partition(key.partition).cloned();
    Ok((topic, partition.ok_or(ApiError::UnknownTopicOrPartition)?))
}

fn locate(cx: &Context, target: &FetchTarget, read_committed: bool) -> Result<Source, ApiError> {
    let (topic, partition) = find(cx, &target.key)?;
    partition.check_leader_epoch(target.leader_epoch)?;
    let stream = &partition.stream;
    let out_of_range = || ApiError::OffsetOutOfRange {
        offset: target.offset,
        start: stream.start_offset(),
        end: stream.durable_end(),
    };
    let from = StreamOffset(u64::try_from(target.offset).map_err(|_| out_of_range())?);
    if from < stream.start_offset() || from > stream.next_offset() {
        return Err(out_of_range());
    }
    let end = if read_committed { partition.last_stable_offset() } else { stream.durable_end() };
    let largest = topic.rules.append.max_batch_bytes.max(cx.server.config.max_message_bytes);
    let from = (from < end).then_some(from);
    Ok(Source { partition, from, one_batch_bytes: largest as usize })
}

/// Builds batches without records that cover `gap`: as many as are within the limit, but at least
/// one.
fn without_records(gap: Range<StreamOffset>, limit_bytes: usize) -> Vec<Bytes> {
    let most = (limit_bytes / batch::HEADER_BYTES).clamp(1, MOST_WITHOUT_RECORDS);
    let starts = (gap.start.0..gap.end.0).step_by(batch::MOST_OFFSETS as usize).take(most);
    let batch = |start: u64| {
        let count = (gap.end.0 - start).min(batch::MOST_OFFSETS);
        // No leader has appended it. With an epoch, a consumer that passes it could be beyond the
        // end of that epoch later.
        batch::without_records(start, count, NO_LEADER_EPOCH).into()
    };
    starts.map(batch).collect()
}

/// Groups partitions by topic, in the given order.
fn by_topic(
    reads: impl Iterator<Item = (FetchTarget, Read)>,
    read_committed: bool,
) -> Vec<fetch_response::Topic> {
    let mut topics: Vec<fetch_response::Topic> = Vec::new();
    let mut indices: HashMap<TopicRef, usize> = HashMap::new();
    for (target, read) in reads {
        let at = *indices.entry(target.key.topic.clone()).or_insert_with(|| {
            let (name, id) = match target.key.topic {
                TopicRef::Name(name) => (name, Uuid::nil()),
                TopicRef::Id(id) => (Arc::from(""), id),
            };
            topics.push(fetch_response::Topic { name, id, partitions: Vec::new() });
            topics.len() - 1
        });
        topics[at].partitions.push(fetch_response::Partition {
            index: target.key.partition,
            error_code: read.status.error_code,
            high_watermark: read.status.high_watermark,
            last_stable_offset: read.status.last_stable_offset,
            log_start: read.status.log_start,
            aborted: read_committed.then_some(read.aborted),
            records: read.batches,
        });
    }
    topics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_at_most_half_of_the_free_bytes_and_at_least_a_batch() {
        for (wanted, free, share_bytes) in
            [(500, 2_000, 500), (1_500, 2_000, 1_000), (1_500, 0, 100), (0, 2_000, 100)]
        {
            assert_eq!(share(wanted, free, 100), share_bytes, "{wanted} of {free}");
        }
    }

    #[test]
    fn a_gap_is_covered_by_batches_of_at_most_2_to_the_31_offsets() {
        let covered = |gap: Range<u64>, limit_bytes| {
            let gap = StreamOffset(gap.start)..StreamOffset(gap.end);
            let batches = without_records(gap, limit_bytes);
            let header = |batch: &Bytes| batch::BatchHeader::parse(batch).unwrap();
            let range = |header: batch::BatchHeader| {
                (header.base_offset, i64::from(header.last_offset_delta) + 1)
            };
            batches.iter().map(|batch| range(header(batch))).collect::<Vec<_>>()
        };
        assert_eq!(covered(5..5, 1000), []);
        assert_eq!(covered(5..6, 0), [(5, 1)]);
        let two = 1 << 31;
        assert_eq!(
            covered(5..5 + 2 * two + 1, 999),
            [(5, two as i64), (5 + two as i64, two as i64), (5 + 2 * two as i64, 1)]
        );
        assert_eq!(covered(5..5 + 2 * two, 61), [(5, two as i64)]);
        assert_eq!(covered(0..u64::MAX >> 1, usize::MAX).len(), MOST_WITHOUT_RECORDS);
    }
}
