//! `alluvium bench consume`.

use std::time::{Duration, Instant};

use bytes::Buf;
use clap::Args;
use kafka_protocol::ResponseError;
use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::metadata_response::MetadataResponseTopic;
use kafka_protocol::messages::{BrokerId, FetchRequest, FetchResponse};

use super::{LoadArgs, Sample, Share, Tally, shares};
use crate::kafka::{Client, refusal, topic_name};
use crate::output::Failure;
use crate::topic::{EARLIEST, LATEST, offsets};
use crate::units::{Size, Span};

/// The last version that names topics by name.
const NEWEST: i16 = 12;
/// The defaults of Kafka's consumers: `fetch.max.bytes`, `fetch.max.wait.ms`.
const FETCH_MAX_BYTES: i32 = 50 << 20;
const FETCH_MAX_WAIT_MS: i32 = 500;

/// Each connection is a reader of its partitions. The checksum and the order of all batches are
/// checked; latency is that of a fetch. If retention deletes records that are not read yet, the
/// reader continues at the new start, as with `auto.offset.reset=earliest`; the skipped offsets are
/// counted.
#[derive(Args, Debug)]
pub(crate) struct ConsumeArgs {
    #[command(flatten)]
    common: LoadArgs,
    /// Duration; a partition that was read up to its end at the start of the run is read again from
    /// its start. Default: until each was read once.
    #[arg(long, value_name = "TIME")]
    duration: Option<Span>,
    /// Read what is produced from now on, with --duration. Default: from the start of the topic.
    #[arg(long, requires = "duration")]
    follow: bool,
    /// Read this number of bytes per second over all partitions, on average since the start: after
    /// each response, a connection pauses until its bytes are due. Default: no limit.
    #[arg(long, value_name = "SIZE")]
    rate: Option<Size>,
    /// Maximum bytes per partition in a response (a larger batch is sent alone). Kafka's default is
    /// 1MiB.
    #[arg(long, value_name = "SIZE", default_value_t = Size::mib(1))]
    fetch_size: Size,
}

/// A partition, the position of its reader, and the range to read.
struct PartitionReader {
    partition: i32,
    next: i64,
    start: i64,
    /// `None`: without end.
    end: Option<i64>,
}

/// Runs the consumers.
///
/// # Errors
/// The server cannot be reached, or refuses; a batch is damaged or out of order.
pub(super) fn run(args: &ConsumeArgs) -> Result<(), Failure> {
    let fetch_bytes = i32::try_from(args.fetch_size.bytes).ok().filter(|bytes| *bytes > 0);
    let fetch_bytes = fetch_bytes.ok_or_else(|| {
        Failure::Usage("--fetch-size must be at least 1 byte, and less than 2GiB".into())
    })?;
    let (topic, shares) = shares(&args.common)?;
    if args.rate.is_some_and(|rate| rate.bytes == 0) {
        return Err(Failure::Usage("--rate is 0: nothing would be read".into()));
    }
    let rate_of_share = args.rate.map(|rate| rate.bytes as f64 / shares.len() as f64);
    let tally = Tally::new(&args.common)?;
    let until = args.duration.and_then(|span| tally.started.checked_add(span.0));
    tally.drive(&shares, |_, share| {
        consume(args, fetch_bytes, share, &topic, (until, rate_of_share), &tally)
    })?;
    tally.report(&args.common)
}

/// Requests the offsets of these partitions from the broker that leads them.
fn readers(
    client: &mut Client,
    topic: &MetadataResponseTopic,
    partitions: &[i32],
    follow: bool,
) -> Result<Vec<PartitionReader>, Failure> {
    let topic = only(topic, partitions);
    let starts = offsets(client, &topic, EARLIEST)?;
    let ends = offsets(client, &topic, LATEST)?;
    let reader = |partition: &i32| {
        let missing = || Failure::Failed(format!("partition {partition}: no offset in the answer"));
        let start = *starts.get(partition).ok_or_else(missing)?;
        let end = *ends.get(partition).ok_or_else(missing)?;
        let (next, end) = if follow { (end, None) } else { (start, Some(end)) };
        Ok(PartitionReader { partition: *partition, next, start, end })
    };
    partitions.iter().map(reader).collect()
}

/// Returns the topic with these partitions only: the others may have other leaders.
fn only(topic: &MetadataResponseTopic, partitions: &[i32]) -> MetadataResponseTopic {
    let mut topic = topic.clone();
    topic.partitions.retain(|it| partitions.contains(&it.partition_index));
    topic
}

fn consume(
    args: &ConsumeArgs,
    fetch_bytes: i32,
    share: &Share,
    topic: &MetadataResponseTopic,
    (until, bytes_per_second): (Option<Instant>, Option<f64>),
    tally: &Tally,
) -> Result<(), Failure> {
    let mut client = Client::connect(&share.broker, &share.access).map_err(Failure::new)?;
    let version = client.version::<FetchRequest>(NEWEST).map_err(Failure::new)?;
    let name = topic_name(&args.common.topic);
    let mut readers = readers(&mut client, topic, &share.partitions, args.follow)?;
    // These partitions are empty and stay so in the range to read.
    readers.retain(|reader| reader.end.is_none_or(|end| reader.start < end));
    let (begun, mut read_for) = (Instant::now(), Duration::ZERO);
    while !readers.is_empty() && !tally.is_over() {
        let due = Instant::now();
        if until.is_some_and(|until| due >= until) {
            break;
        }
        let partition = |reader: &PartitionReader| {
            FetchPartition::default()
                .with_partition(reader.partition)
                .with_fetch_offset(reader.next)
                .with_partition_max_bytes(fetch_bytes)
        };
        let wanted = FetchTopic::default()
            .with_topic(name.clone())
            .with_partitions(readers.iter().map(partition).collect());
        // Without a fetch session: each request names all partitions.
        let request = FetchRequest::default()
            .with_replica_id(BrokerId(-1))
            .with_max_wait_ms(FETCH_MAX_WAIT_MS)
            .with_min_bytes(1)
            .with_max_bytes(FETCH_MAX_BYTES)
            .with_session_epoch(-1)
            .with_topics(vec![wanted]);
        let answer = client.call(version, &request).map_err(Failure::new)?;
        let latency = due.elapsed();
        let (bytes, skipped) =
            take(&mut readers, &answer, |partition| start(&mut client, topic, partition))?;
        // If the run is limited by time, a partition that was read completely is read again.
        for reader in &mut readers {
            if until.is_some() && reader.end.is_some_and(|end| reader.next >= end) {
                reader.next = reader.start;
            }
        }
        readers.retain(|reader| reader.end.is_none_or(|end| reader.next < end));
        tally.add(Sample { due, latency, bytes });
        tally.skip(skipped);
        if let Some(rate) = bytes_per_second {
            read_for += Duration::from_secs_f64(bytes as f64 / rate);
            let next = until.map_or(begun + read_for, |until| until.min(begun + read_for));
            tally.sleep_until(next);
        }
    }
    Ok(())
}

/// Requests the current log start offset of a partition.
fn start(
    client: &mut Client,
    topic: &MetadataResponseTopic,
    partition: i32,
) -> Result<i64, Failure> {
    let starts = offsets(client, &only(topic, &[partition]), EARLIEST)?;
    let missing = || Failure::Failed(format!("partition {partition}: no offset in the answer"));
    starts.get(&partition).copied().ok_or_else(missing)
}

/// Processes a response. Returns the bytes of complete batches and the number of skipped offsets: a
/// partition whose next offset is gone continues at its current start, which `start` returns.
fn take(
    readers: &mut [PartitionReader],
    answer: &FetchResponse,
    mut start: impl FnMut(i32) -> Result<i64, Failure>,
) -> Result<(u64, u64), Failure> {
    if let Some(reason) = refusal(answer.error_code, None) {
        return Err(Failure::Failed(format!("fetch: {reason}")));
    }
    let (mut bytes, mut skipped) = (0, 0);
    for data in answer.responses.iter().flat_map(|topic| &topic.partitions) {
        let index = data.partition_index;
        let failed = |reason| Failure::Failed(format!("partition {index}: {reason}"));
        let reader = readers.iter_mut().find(|reader| reader.partition == index);
        let reader = reader.ok_or_else(|| failed("was not requested".into()))?;
        if data.error_code == ResponseError::OffsetOutOfRange.code() {
            skipped += reader.skip_to(start(index)?).map_err(failed)?;
            continue;
        }
        if let Some(reason) = refusal(data.error_code, None) {
            return Err(failed(reason));
        }
        if let Some(records) = &data.records {
            bytes += reader.take(records).map_err(failed)?;
        }
    }
    Ok((bytes, skipped))
}

impl PartitionReader {
    /// Continues at the partition's current start. Returns the number of offsets that this skips.
    fn skip_to(&mut self, start: i64) -> Result<u64, String> {
        let skipped = u64::try_from(start.saturating_sub(self.next)).unwrap_or(0);
        if skipped == 0 {
            // Retention is not the cause: offsets that existed at the beginning are missing at the
            // end.
            return Err(format!(
                "offset {} is out of range, but the partition starts at {start}",
                self.next
            ));
        }
        (self.start, self.next) = (start, start);
        Ok(skipped)
    }

    /// Checks the batches of a response and advances past them. Returns their bytes; an incomplete
    /// batch at the end does not count.
    fn take(&mut self, mut records: &[u8]) -> Result<u64, String> {
        /// Bytes up to the end of the length field.
        const FRAME: usize = 12;
        /// Bytes in front of the records, in a batch of the current format.
        const HEADER: usize = 61;
        const MAGIC: usize = 16;
        const CHECKSUM: usize = 17;
        const CHECKED: usize = 21;
        const LAST_OFFSET_DELTA: usize = 23;
        let all = records.len();
        while let Some(mut frame) = records.get(..FRAME) {
            let base = frame.get_i64();
            let length = frame.get_i32();
            let length =
                usize::try_from(length).map_err(|_| format!("invalid batch length {length}"))?;
            let Some(batch) = records.get(..FRAME + length) else { break };
            if batch.len() < HEADER || batch[MAGIC] != 2 {
                return Err(format!("offset {base}: unknown batch format"));
            }
            if (&batch[CHECKSUM..]).get_u32() != crc32c::crc32c(&batch[CHECKED..]) {
                return Err(format!("offset {base}: the batch is damaged"));
            }
            let last = base.saturating_add(i64::from((&batch[LAST_OFFSET_DELTA..]).get_i32()));
            // The first batch may begin before the requested offset.
            if last < self.next {
                return Err(format!("batch {base} to {last}, but expected offset {}", self.next));
            }
            self.next = last + 1;
            records = &records[batch.len()..];
        }
        let taken = all - records.len();
        if taken == 0 && all > 0 {
            return Err(format!("offset {}: no complete batch in {all} bytes", self.next));
        }
        Ok(taken as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch of `count` records from `base` on, with the fields that a reader checks.
    fn batch(base: i64, count: i32) -> Vec<u8> {
        let mut rest = vec![0; 61 - 21];
        rest[2..6].copy_from_slice(&(count - 1).to_be_bytes());
        let mut batch = base.to_be_bytes().to_vec();
        batch.extend_from_slice(&(rest.len() as i32 + 9).to_be_bytes());
        batch.extend_from_slice(&[0, 0, 0, 0, 2]);
        batch.extend_from_slice(&crc32c::crc32c(&rest).to_be_bytes());
        batch.extend_from_slice(&rest);
        batch
    }

    fn reader(next: i64) -> PartitionReader {
        PartitionReader { partition: 0, next, start: 0, end: None }
    }

    #[test]
    fn whole_batches_count_and_the_next_offset_follows_them() {
        let mut reader = reader(5);
        // The first batch begins before the requested offset; the last one is incomplete.
        let records = [batch(3, 4), batch(7, 10), batch(17, 1)[..40].to_vec()].concat();
        assert_eq!(reader.take(&records), Ok(2 * 61));
        assert_eq!(reader.next, 17);
        assert_eq!(reader.take(&[]), Ok(0));
        // Log compaction leaves gaps.
        assert_eq!(reader.take(&batch(30, 1)), Ok(61));
        assert_eq!(reader.next, 31);
    }

    #[test]
    fn a_reader_overtaken_by_retention_continues_at_the_new_start() {
        use kafka_protocol::messages::fetch_response::{FetchableTopicResponse, PartitionData};

        let out_of_range = ResponseError::OffsetOutOfRange.code();
        let data = |index: i32, code: i16, records: Vec<u8>| {
            PartitionData::default()
                .with_partition_index(index)
                .with_error_code(code)
                .with_records(Some(records.into()))
        };
        let answer = |partitions| {
            let topic = FetchableTopicResponse::default().with_partitions(partitions);
            FetchResponse::default().with_responses(vec![topic])
        };
        let mut readers = [reader(5), PartitionReader { partition: 1, ..reader(3) }];
        let both = answer(vec![data(0, out_of_range, vec![]), data(1, 0, batch(3, 2))]);
        let mut asked = Vec::new();
        let taken = take(&mut readers, &both, |partition| {
            asked.push(partition);
            Ok(12)
        });
        assert_eq!((taken.unwrap(), asked), ((61, 7), vec![0]));
        assert_eq!((readers[0].start, readers[0].next), (12, 12), "and so does the next round");
        assert_eq!((readers[1].start, readers[1].next), (0, 5));
        // The end of its range is gone.
        assert!(take(&mut readers, &both, |_| Ok(12)).is_err());
        assert!(
            take(&mut readers, &answer(vec![data(0, 1 + out_of_range, vec![])]), |_| Ok(99))
                .is_err()
        );
    }

    #[test]
    fn damaged_and_unordered_batches_are_errors() {
        let mut flipped = batch(0, 1);
        flipped[60] ^= 1;
        let mut negative = batch(0, 1);
        negative[8..12].copy_from_slice(&(-1_i32).to_be_bytes());
        let mut old = batch(0, 1);
        old[16] = 1;
        for (records, reason) in [
            (flipped, "damaged"),
            (negative, "batch length -1"),
            (old, "unknown batch format"),
            (batch(0, 1)[..60].to_vec(), "no complete batch"),
            ([batch(0, 2), batch(1, 1)].concat(), "expected offset 2"),
        ] {
            let error = reader(0).take(&records).unwrap_err();
            assert!(error.contains(reason), "{reason}: {error}");
        }
    }
}
