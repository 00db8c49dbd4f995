//! Reading back everything that a server holds, as consumers with either isolation level would.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::fetch_response::PartitionData;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::{
    BrokerId, FetchRequest, GroupId, ListOffsetsRequest, OffsetFetchRequest,
};
use kafka_protocol::protocol::StrBytes;

use super::client::{BatchKind, Client, decode_batches, topic_name};
use super::model::{Model, Partition};
use crate::Error;

/// How long one case may wait altogether for answers that do not come. A server that works answers
/// at once.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);
const FETCH_BYTES: i32 = 1 << 20;
/// The error that ends a consumer's read. With all others it tries again, or jumps to another
/// offset.
pub(super) const CORRUPT_MESSAGE: i16 = 2;
const EARLIEST: i64 = -2;
const LATEST: i64 = -1;

/// A record as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) key: Option<Vec<u8>>,
    pub(super) value: Option<Vec<u8>>,
    pub(super) timestamp_ms: i64,
}

/// Why a range of offsets could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// An error code, for as long as the reader was patient.
    Code(i16),
    /// Fetches return nothing, although the end of the log is further on.
    Nothing,
    /// The bytes are no batches.
    Unreadable(String),
}

/// Offsets that a reader does not get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) from: i64,
    pub(super) to: i64,
    pub(super) why: Why,
}

/// A partition as one reader sees it.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) records: BTreeMap<i64, Seen>,
    pub(super) markers: BTreeSet<i64>,
    pub(super) batches: Vec<i64>,
    pub(super) refused: Vec<Refused>,
    pub(super) high_watermark: i64,
    /// The last stable offset.
    pub(super) stable_end: i64,
    pub(super) log_start: i64,
}

/// The offset and the time that ListOffsets answers, or its error code.
pub(super) type Found = Result<(i64, i64), i16>;

/// A partition as clients see it.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    pub(super) all: View,
    pub(super) committed: View,
    /// From ListOffsets; an error code where it is refused.
    pub(super) earliest: Option<Result<i64, i16>>,
    pub(super) latest: Option<Result<i64, i16>>,
    /// A time, and the offset and time of the first record that is not older.
    pub(super) by_time: Option<(i64, Found)>,
}

/// Committed offsets by group; an error code where they are refused.
pub(super) type Commits = BTreeMap<String, Result<Vec<(Partition, i64)>, i16>>;

/// What a server holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Observation {
    pub(super) partitions: BTreeMap<Partition, Held>,
    pub(super) groups: Commits,
}

/// Reads from one server.
pub(super) struct Reader<'a> {
    client: Client,
    model: &'a Model,
    /// Whether an offset was reported as lost: nothing has to come there.
    lost: &'a dyn Fn(&Partition, i64) -> bool,
    waited: Duration,
}

impl<'a> Reader<'a> {
    pub(super) fn connect(
        address: SocketAddr,
        model: &'a Model,
        lost: &'a dyn Fn(&Partition, i64) -> bool,
    ) -> Result<Self, Error> {
        let client = Client::connect(address)?;
        Ok(Self { client, model, lost, waited: Duration::ZERO })
    }

    /// Read all partitions and groups of the model. `pick` chooses the time to search for, out of
    /// so many records.
    pub(super) fn observe(
        &mut self,
        pick: &mut dyn FnMut(u64) -> u64,
    ) -> Result<Observation, Error> {
        let mut observation = Observation::default();
        for partition in self.model.partitions() {
            let mut held = Held {
                all: self.read(&partition, false)?,
                committed: self.read(&partition, true)?,
                earliest: Some(self.list(&partition, EARLIEST)?.map(|found| found.0)),
                latest: Some(self.list(&partition, LATEST)?.map(|found| found.0)),
                by_time: None,
            };
            let records = &self.model.log(&partition).records;
            if !records.is_empty() {
                let which = pick(records.len() as u64) as usize;
                let time = records.values().nth(which).map_or(0, |record| record.timestamp_ms);
                held.by_time = Some((time, self.list(&partition, time)?));
            }
            observation.partitions.insert(partition, held);
        }
        for group in self.model.groups.keys() {
            let offsets = self.committed_offsets(group)?;
            observation.groups.insert(group.clone(), offsets);
        }
        Ok(observation)
    }

    fn fetch(
        &mut self,
        partition: &Partition,
        offset: i64,
        committed: bool,
    ) -> Result<PartitionData, Error> {
        let wanted = FetchPartition::default()
            .with_partition(partition.index)
            .with_current_leader_epoch(-1)
            .with_fetch_offset(offset)
            .with_log_start_offset(-1)
            .with_partition_max_bytes(FETCH_BYTES);
        let topic = FetchTopic::default()
            .with_topic(topic_name(&partition.topic))
            .with_partitions(vec![wanted]);
        let request = FetchRequest::default()
            .with_replica_id(BrokerId(-1))
            .with_max_wait_ms(50)
            .with_min_bytes(1)
            .with_max_bytes(FETCH_BYTES)
            .with_isolation_level(i8::from(committed))
            .with_session_epoch(-1)
            .with_topics(vec![topic]);
        let answer = self.client.call(11, &request)?;
        let told = answer
            .responses
            .into_iter()
            .next()
            .and_then(|topic| topic.partitions.into_iter().next());
        told.ok_or_else(|| {
            format!("an answer to Fetch without a partition: {}", answer.error_code).into()
        })
    }

    /// Read a partition from its start to its end.
    fn read(&mut self, partition: &Partition, committed: bool) -> Result<View, Error> {
        let mut view = View::default();
        let start = self.list(partition, EARLIEST)?.map_or(0, |found| found.0);
        view.log_start = start;
        let mut offset = start;
        // Where a range begins that cannot be read.
        let mut refused: Option<(i64, Why)> = None;
        loop {
            let answer = self.fetch(partition, offset, committed)?;
            let bytes = answer.records.unwrap_or_default();
            let end = if committed { answer.last_stable_offset } else { answer.high_watermark };
            let outcome = match answer.error_code {
                0 => decode_batches(bytes).map_err(|error| Why::Unreadable(error.to_string())),
                code => Err(Why::Code(code)),
            };
            if answer.error_code == 0 {
                view.high_watermark = answer.high_watermark;
                view.stable_end = answer.last_stable_offset;
                view.log_start = answer.log_start_offset;
            }
            let why = match outcome {
                Ok(batches) if batches.is_empty() => {
                    if offset >= end || (offset..end).all(|at| (self.lost)(partition, at)) {
                        break;
                    }
                    Why::Nothing
                }
                Ok(batches) => {
                    if let Some((from, why)) = refused.take() {
                        view.refused.push(Refused { from, to: offset, why });
                    }
                    let mut aborted: Vec<(i64, i64)> = answer
                        .aborted_transactions
                        .unwrap_or_default()
                        .iter()
                        .map(|each| (each.first_offset, each.producer_id.0))
                        .collect();
                    let mut hidden = BTreeSet::new();
                    for batch in batches {
                        aborted.retain(|(first, producer)| {
                            let begins = *first < batch.end;
                            if begins {
                                hidden.insert(*producer);
                            }
                            !begins
                        });
                        offset = offset.max(batch.end);
                        view.batches.push(batch.base);
                        if batch.kind != BatchKind::Data {
                            view.markers.insert(batch.base);
                            hidden.remove(&batch.producer_id);
                            continue;
                        }
                        if committed && batch.transactional && hidden.contains(&batch.producer_id) {
                            continue;
                        }
                        for (at, timestamp_ms, key, value) in batch.records {
                            let (key, value) = (key.map(Into::into), value.map(Into::into));
                            view.records.insert(at, Seen { key, value, timestamp_ms });
                        }
                    }
                    continue;
                }
                Err(why) => why,
            };
            // A consumer stops at this error, and tries again after all others.
            let ends = why == Why::Code(CORRUPT_MESSAGE);
            if refused.is_none() && !ends && self.waited < PATIENCE {
                self.wait();
                continue;
            }
            let (from, why) = refused.take().unwrap_or((offset, why));
            match self.model.log(partition).batches.iter().find(|base| **base > offset) {
                Some(next) => {
                    offset = *next;
                    refused = Some((from, why));
                }
                None => {
                    let to = self.model.log(partition).next.max(from + 1);
                    view.refused.push(Refused { from, to, why });
                    break;
                }
            }
        }
        if let Some((from, why)) = refused {
            view.refused.push(Refused { from, to: offset, why });
        }
        Ok(view)
    }

    fn wait(&mut self) {
        let begun = Instant::now();
        thread::sleep(PAUSE);
        self.waited += begun.elapsed();
    }

    fn list(&mut self, partition: &Partition, time: i64) -> Result<Found, Error> {
        let wanted = ListOffsetsPartition::default()
            .with_partition_index(partition.index)
            .with_current_leader_epoch(-1)
            .with_timestamp(time);
        let topic = ListOffsetsTopic::default()
            .with_name(topic_name(&partition.topic))
            .with_partitions(vec![wanted]);
        let request =
            ListOffsetsRequest::default().with_replica_id(BrokerId(-1)).with_topics(vec![topic]);
        let answer = self.client.call(5, &request)?;
        let told = answer.topics.first().and_then(|topic| topic.partitions.first());
        let told = told.ok_or("an answer to ListOffsets without a partition")?;
        Ok(match told.error_code {
            0 => Ok((told.offset, told.timestamp)),
            code => Err(code),
        })
    }

    fn committed_offsets(
        &mut self,
        group: &str,
    ) -> Result<Result<Vec<(Partition, i64)>, i16>, Error> {
        let request = OffsetFetchRequest::default()
            .with_group_id(GroupId(StrBytes::from_string(group.to_owned())))
            .with_topics(None);
        let answer = self.client.call(7, &request)?;
        if answer.error_code != 0 {
            return Ok(Err(answer.error_code));
        }
        let mut offsets = Vec::new();
        for topic in &answer.topics {
            for told in &topic.partitions {
                if told.error_code != 0 {
                    return Ok(Err(told.error_code));
                }
                let topic = topic.name.to_string();
                let partition = Partition { topic, index: told.partition_index };
                offsets.push((partition, told.committed_offset));
            }
        }
        Ok(Ok(offsets))
    }
}
