//! Fetch: durable batches of many partitions, waiting until there are enough.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use kafka_protocol::messages::FetchRequest;
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use alluvium_stream::{StreamOffset, Watch};

use super::{Answer, Context, Refused};
use crate::errors::ApiError;
use crate::partition::{Partition, kafka_offset};
use crate::server::ByteBudget;
use crate::sessions::{Key, Told, Want};
use crate::topics::TopicRef;
use crate::wire::fetch_response::{self, FetchResponse};

/// Partitions that are read at the same time, so that late readers of many partitions do not wait for one object after the other.
const CONCURRENT_READS: usize = 8;

const READ_COMMITTED: i8 = 1;

/// What one pass over the partitions gave.
struct Pass {
    reads: Vec<Read>,
    bytes: usize,
    failed: bool,
    budget: Option<OwnedSemaphorePermit>,
}

/// What a pass found in one partition.
struct Read {
    told: Told,
    batches: Vec<Bytes>,
}

impl Read {
    fn failed(error: &ApiError) -> Self {
        Self {
            told: Told { error_code: error.code(), high_watermark: -1, log_start: -1 },
            batches: Vec::new(),
        }
    }

    fn len_bytes(&self) -> usize {
        self.batches.iter().map(Bytes::len).sum()
    }
}

pub(super) async fn handle(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: FetchRequest = cx.decode(body)?;
    let fetch = match cx.server.sessions.begin(&request, cx.version, Instant::now()) {
        Ok(fetch) => fetch,
        Err(error) => {
            tracing::debug!(%error, "fetch refused");
            cx.server.metrics.error(&error);
            let response =
                FetchResponse { error_code: error.code(), session_id: 0, topics: Vec::new() };
            return Ok(Answer::Ready(response.encode(cx.correlation_id, cx.version)?));
        }
    };

    let pass = wait_for_enough(&cx, &request, &fetch.wants).await;
    cx.server.metrics.fetched_bytes.inc_by(pass.bytes as u64);
    let answers = fetch
        .wants
        .iter()
        .zip(&pass.reads)
        .map(|(want, read)| (&want.key, read.told, !read.batches.is_empty()));
    let changed = cx.server.sessions.finish(fetch.session_id, answers);
    let reads = fetch.wants.into_iter().zip(pass.reads).zip(changed);
    let answered =
        reads.filter(|(_, changed)| *changed || !fetch.incremental).map(|(read, _)| read);
    let read_committed = request.isolation_level == READ_COMMITTED;
    let response = FetchResponse {
        error_code: 0,
        session_id: fetch.session_id,
        topics: by_topic(answered, read_committed),
    };
    let mut response = response.encode(cx.correlation_id, cx.version)?;
    response.budget = pass.budget;
    Ok(Answer::Ready(response))
}

/// Read until there are enough bytes, an error, or the client's time is over.
async fn wait_for_enough(cx: &Context, request: &FetchRequest, wants: &[Want]) -> Pass {
    // Longer than a connection may be idle nobody waits.
    let max_wait =
        Duration::from_millis(request.max_wait_ms.max(0) as u64).min(cx.server.config.idle_timeout);
    let deadline = Instant::now() + max_wait;
    let max_bytes = usize::try_from(request.max_bytes)
        .unwrap_or(0)
        .min(cx.server.config.max_fetch_bytes as usize);
    // More than it may get nobody waits for.
    let min_bytes = usize::try_from(request.min_bytes).unwrap_or(0).min(max_bytes);
    let progress = Arc::new(Notify::new());
    let mut watches: Option<Vec<Watch>> = None;
    loop {
        let progressed = progress.notified();
        let pass = read_all(cx, wants, max_bytes).await;
        if pass.bytes >= min_bytes || pass.failed || wants.is_empty() || Instant::now() >= deadline
        {
            return pass;
        }
        if watches.is_none() {
            // What became durable before the watch began is found by reading once more.
            let partitions = wants.iter().filter_map(|want| find(cx, &want.key).ok());
            watches = Some(partitions.map(|partition| partition.stream.watch(&progress)).collect());
            continue;
        }
        tokio::select! {
            () = progressed => {}
            () = sleep_until(deadline) => return pass,
            () = cx.server.stopping() => return pass,
        }
    }
}

/// Read each partition once, in order, until `max_bytes` are read. At least one batch is read if there is any, however large it is:
/// else a consumer would stand still before it.
async fn read_all(cx: &Context, wants: &[Want], max_bytes: usize) -> Pass {
    let mut sources: Vec<_> = wants.iter().map(|want| locate(cx, want)).collect();
    let mut pass =
        Pass { reads: Vec::with_capacity(wants.len()), bytes: 0, failed: false, budget: None };
    let mut left_bytes = max_bytes;
    if sources.iter().any(|source| matches!(source, Ok((_, Some(_))))) {
        let budget = &cx.server.fetch_budget;
        let one_batch_bytes = cx.server.config.max_message_bytes as usize;
        let share_bytes = share(max_bytes, budget.free_bytes(), one_batch_bytes);
        left_bytes = left_bytes.min(share_bytes);
        pass.budget = Some(budget.acquire(share_bytes).await);
    }
    let mut partitions = wants.iter().zip(&mut sources).peekable();
    while partitions.peek().is_some() {
        // A group is read at the same time. What its partitions may read is together no more than is left, the first batch of all
        // excepted; who finds nothing left to promise comes with the next group, when it is known what was read.
        let mut unpromised_bytes = left_bytes;
        let mut first = pass.bytes == 0;
        let mut limits = Vec::with_capacity(CONCURRENT_READS);
        let mut reads = Vec::with_capacity(CONCURRENT_READS);
        while reads.len() < CONCURRENT_READS
            && (first || left_bytes == 0 || unpromised_bytes > 0)
            && let Some((want, source)) = partitions.next()
        {
            let mut limit_bytes = 0;
            if let Ok((_, from @ Some(_))) = source {
                if left_bytes == 0 && !first {
                    *from = None;
                }
                limit_bytes = usize::try_from(want.max_bytes).unwrap_or(0).min(unpromised_bytes);
                unpromised_bytes -= limit_bytes;
                first = false;
            }
            limits.push(limit_bytes);
            reads.push(read(source, limit_bytes));
        }
        for (result, limit_bytes) in join_all(reads).await.into_iter().zip(limits) {
            let mut read = result.unwrap_or_else(|error| {
                tracing::debug!(%error, "fetch of a partition refused");
                cx.server.metrics.error(&error);
                pass.failed = true;
                Read::failed(&error)
            });
            // A read gives a whole batch at least, which may be too much if it is not the first.
            if pass.bytes > 0 && read.len_bytes() > limit_bytes {
                read.batches.clear();
            }
            pass.bytes += read.len_bytes();
            left_bytes = left_bytes.saturating_sub(read.len_bytes());
            pass.reads.push(read);
        }
    }
    // Keep the share of the budget that the response really takes.
    pass.budget = pass.budget.and_then(|budget| ByteBudget::shrink(budget, pass.bytes));
    pass
}

/// The share of the budget for responses that a fetch takes: at most half of what is free, so that slow readers of large responses leave
/// room for others; and at least one batch, which it gets whatever it asks for.
fn share(wanted_bytes: usize, free_bytes: usize, one_batch_bytes: usize) -> usize {
    wanted_bytes.min(free_bytes / 2).max(one_batch_bytes)
}

fn find(cx: &Context, key: &Key) -> Result<Arc<Partition>, ApiError> {
    let topic = cx.server.topics.find(&key.topic)?;
    topic.partition(key.partition).cloned().ok_or(ApiError::UnknownTopicOrPartition)
}

/// A partition, and from where it is to be read if there is anything to read.
type Source = (Arc<Partition>, Option<StreamOffset>);

fn locate(cx: &Context, want: &Want) -> Result<Source, ApiError> {
    let partition = find(cx, &want.key)?;
    partition.check_leader_epoch(want.leader_epoch)?;
    let stream = &partition.stream;
    let out_of_range = || ApiError::OffsetOutOfRange {
        offset: want.offset,
        start: stream.start_offset(),
        end: stream.durable_end(),
    };
    let from = StreamOffset(u64::try_from(want.offset).map_err(|_| out_of_range())?);
    if from < stream.start_offset() || from > stream.next_offset() {
        return Err(out_of_range());
    }
    let readable = from < stream.durable_end();
    Ok((partition, readable.then_some(from)))
}

async fn read(source: &mut Result<Source, ApiError>, max_bytes: usize) -> Result<Read, ApiError> {
    let (partition, from) = match source {
        Ok(source) => source,
        Err(error) => return Err(std::mem::replace(error, ApiError::UnknownTopicOrPartition)),
    };
    let Some(from) = from else { return Ok(nothing(partition)) };
    let fetched = partition.stream.fetch(*from, max_bytes).await?;
    Ok(Read {
        told: Told {
            error_code: 0,
            high_watermark: kafka_offset(fetched.durable_end),
            log_start: kafka_offset(fetched.start),
        },
        batches: fetched.batches.into_iter().map(|batch| batch.payload).collect(),
    })
}

fn nothing(partition: &Partition) -> Read {
    let told = Told {
        error_code: 0,
        high_watermark: partition.high_watermark(),
        log_start: partition.log_start(),
    };
    Read { told, batches: Vec::new() }
}

/// Group partitions by their topics, both in the order in which they come.
fn by_topic(
    reads: impl Iterator<Item = (Want, Read)>,
    read_committed: bool,
) -> Vec<fetch_response::Topic> {
    let mut topics: Vec<fetch_response::Topic> = Vec::new();
    let mut places: HashMap<TopicRef, usize> = HashMap::new();
    for (want, read) in reads {
        let place = *places.entry(want.key.topic.clone()).or_insert_with(|| {
            let (name, id) = match want.key.topic {
                TopicRef::Name(name) => (name, Uuid::nil()),
                TopicRef::Id(id) => (Arc::from(""), id),
            };
            topics.push(fetch_response::Topic { name, id, partitions: Vec::new() });
            topics.len() - 1
        });
        topics[place].partitions.push(fetch_response::Partition {
            index: want.key.partition,
            error_code: read.told.error_code,
            high_watermark: read.told.high_watermark,
            log_start: read.told.log_start,
            read_committed,
            records: read.batches,
        });
    }
    topics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_half_of_what_is_free_and_at_least_a_batch() {
        for (wanted, free, share_bytes) in
            [(500, 2_000, 500), (1_500, 2_000, 1_000), (1_500, 0, 100), (0, 2_000, 100)]
        {
            assert_eq!(share(wanted, free, 100), share_bytes, "{wanted} of {free}");
        }
    }
}
