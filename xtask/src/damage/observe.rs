//! Reads back everything that a server holds, as consumers with either isolation level do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use kafka_protocol::messages::fetch_response::PartitionData;

use super::batch::{BatchKind, decode_batches};
use super::model::{Model, Partition};
use super::reads::{self, CORRUPT_MESSAGE, Fetched, Isolation};
use crate::Error;
use crate::client::{Client, EARLIEST, LATEST};

/// The total time that one case may wait for missing answers. A healthy server answers at once.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// The reason why a range of offsets could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReadFailure {
    /// An error code that persisted for the whole wait.
    Code(i16),
    /// Fetches return nothing before the end of the log.
    NoData,
    /// The bytes are not valid batches.
    Malformed(String),
}

/// Offsets that a consumer cannot read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnreadableRange {
    pub(super) from: i64,
    pub(super) to: i64,
    pub(super) failure: ReadFailure,
}

/// A partition as read with one isolation level.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) records: BTreeMap<i64, Fetched>,
    pub(super) markers: BTreeSet<i64>,
    pub(super) batches: Vec<i64>,
    pub(super) unreadable: Vec<UnreadableRange>,
    pub(super) high_watermark: i64,
    pub(super) last_stable_offset: i64,
    pub(super) log_start: i64,
}

/// The offset and the timestamp that ListOffsets returns, or its error code.
pub(super) type ListedOffset = Result<(i64, i64), i16>;

/// A partition as read by clients.
#[derive(Clone, Debug, Default)]
pub(super) struct PartitionContents {
    pub(super) all: View,
    pub(super) committed: View,
    /// From ListOffsets; an error code where it is unreadable.
    pub(super) earliest: Option<Result<i64, i16>>,
    pub(super) latest: Option<Result<i64, i16>>,
    /// A timestamp, and the offset and timestamp of the first record that is not older.
    pub(super) by_time: Option<(i64, ListedOffset)>,
}

/// Committed offsets by group; an error code where they are unreadable.
pub(super) type Commits = BTreeMap<String, Result<Vec<(Partition, i64)>, i16>>;

/// The contents of a server.
#[derive(Clone, Debug, Default)]
pub(super) struct Observation {
    pub(super) partitions: BTreeMap<Partition, PartitionContents>,
    pub(super) groups: Commits,
    /// All topics.
    pub(super) topics: BTreeSet<String>,
}

/// Reads from one server.
pub(super) struct Reader<'a> {
    client: Client,
    model: &'a Model,
    /// Whether an offset was reported as lost; no record is expected there.
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

    /// Reads all partitions and groups of the model. `pick` chooses one of the given number of
    /// records, whose timestamp is searched for.
    pub(super) fn observe(
        &mut self,
        pick: &mut dyn FnMut(u64) -> u64,
    ) -> Result<Observation, Error> {
        let mut observation =
            Observation { topics: reads::topics(&mut self.client)?, ..Observation::default() };
        for partition in self.model.partitions() {
            let mut contents = PartitionContents {
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
                contents.by_time = Some((time, self.list(&partition, time)?));
            }
            observation.partitions.insert(partition, contents);
        }
        for group in self.model.groups.keys() {
            let offsets = reads::committed_offsets(&mut self.client, group)?;
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
        let positions = BTreeMap::from([(partition.index, offset)]);
        let answer = reads::fetch(&mut self.client, &partition.topic, &positions, committed, 50)?;
        let result = answer
            .responses
            .into_iter()
            .next()
            .and_then(|topic| topic.partitions.into_iter().next());
        result.ok_or_else(|| {
            format!("an answer to Fetch without a partition: {}", answer.error_code).into()
        })
    }

    /// Reads a partition from its start to its end.
    fn read(&mut self, partition: &Partition, committed: bool) -> Result<View, Error> {
        let mut view = View::default();
        let start = self.list(partition, EARLIEST)?.map_or(0, |found| found.0);
        view.log_start = start;
        let mut offset = start;
        // The start of a range that cannot be read.
        let mut unreadable: Option<(i64, ReadFailure)> = None;
        loop {
            let answer = self.fetch(partition, offset, committed)?;
            let mut isolation = Isolation::of(&answer, committed);
            let bytes = answer.records.unwrap_or_default();
            let end = if committed { answer.last_stable_offset } else { answer.high_watermark };
            let outcome = match answer.error_code {
                0 => {
                    decode_batches(bytes).map_err(|error| ReadFailure::Malformed(error.to_string()))
                }
                code => Err(ReadFailure::Code(code)),
            };
            if answer.error_code == 0 {
                view.high_watermark = answer.high_watermark;
                view.last_stable_offset = answer.last_stable_offset;
                view.log_start = answer.log_start_offset;
            }
            let failure = match outcome {
                Ok(batches) if batches.is_empty() => {
                    if offset >= end || (offset..end).all(|at| (self.lost)(partition, at)) {
                        break;
                    }
                    ReadFailure::NoData
                }
                Ok(batches) => {
                    if let Some((from, failure)) = unreadable.take() {
                        view.unreadable.push(UnreadableRange { from, to: offset, failure });
                    }
                    for batch in batches {
                        offset = offset.max(batch.end);
                        view.batches.push(batch.base);
                        if batch.kind != BatchKind::Data {
                            view.markers.insert(batch.base);
                        }
                        view.records.extend(isolation.deliver(batch));
                    }
                    continue;
                }
                Err(failure) => failure,
            };
            // A consumer stops at this error and retries on all others.
            let ends = failure == ReadFailure::Code(CORRUPT_MESSAGE);
            if unreadable.is_none() && !ends && self.waited < PATIENCE {
                self.wait();
                continue;
            }
            let (from, failure) = unreadable.take().unwrap_or((offset, failure));
            match self.model.log(partition).batches.iter().find(|base| **base > offset) {
                Some(next) => {
                    offset = *next;
                    unreadable = Some((from, failure));
                }
                None => {
                    let to = self.model.log(partition).next.max(from + 1);
                    view.unreadable.push(UnreadableRange { from, to, failure });
                    break;
                }
            }
        }
        if let Some((from, failure)) = unreadable {
            view.unreadable.push(UnreadableRange { from, to: offset, failure });
        }
        Ok(view)
    }

    fn wait(&mut self) {
        let begun = Instant::now();
        thread::sleep(PAUSE);
        self.waited += begun.elapsed();
    }

    fn list(&mut self, partition: &Partition, time: i64) -> Result<ListedOffset, Error> {
        let indexes = [partition.index].into_iter();
        let answer = self.client.list_offsets(&partition.topic, indexes, time)?;
        let result = answer.first().ok_or("an answer to ListOffsets without a partition")?;
        Ok(match result.error_code {
            0 => Ok((result.offset, result.timestamp)),
            code => Err(code),
        })
    }
}
