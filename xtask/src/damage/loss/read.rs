//! Reads all partitions back, many with one request, with either isolation level.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::fetch_response::PartitionData;
use kafka_protocol::messages::{DescribeAclsRequest, DescribeConfigsRequest};
use kafka_protocol::protocol::StrBytes;

use super::super::batch::{BatchKind, decode_batches};
use super::super::model::{Model, Partition};
use super::super::reads::{self, CORRUPT_MESSAGE, Fetched, Isolation};
use super::journal::{SETTING, State, acl_name};
use crate::Error;
use crate::client::{Client, EARLIEST};

/// How long a read is repeated that returns nothing or an error. A healthy server answers at once.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(30);
const UNKNOWN_PARTITION: i16 = 3;

/// The end of a transaction in a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ending {
    pub(super) offset: i64,
    pub(super) producer_id: i64,
    pub(super) is_commit: bool,
}

/// A partition as read with one isolation level.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) records: BTreeMap<i64, Fetched>,
    pub(super) endings: Vec<Ending>,
    /// Ranges that reads cannot get past, and why.
    pub(super) unreadable: Vec<(i64, i64, String)>,
    /// The offset after the last one.
    pub(super) end: i64,
}

/// A partition as read with both.
#[derive(Clone, Debug, Default)]
pub(super) struct Contents {
    pub(super) all: View,
    pub(super) committed: View,
}

/// What a server has.
#[derive(Default)]
pub(super) struct Observed {
    pub(super) partitions: BTreeMap<Partition, Contents>,
    /// Committed offsets by group.
    pub(super) groups: BTreeMap<String, Vec<(Partition, i64)>>,
    /// Topics, settings and ACLs.
    pub(super) state: State,
}

/// Reads everything that the model has.
pub(super) fn observe(client: &mut Client, model: &Model) -> Result<Observed, Error> {
    let mut observed = Observed { state: state(client)?, ..Observed::default() };
    for (topic, logs) in &model.topics {
        if !observed.state.contains_key(&format!("topic {topic}")) {
            continue;
        }
        let mut reader = Reader { client, model, topic, count: logs.len() as i32 };
        let starts = reader.starts()?;
        let all = reader.read(&starts, false)?;
        let committed = reader.read(&starts, true)?;
        for (index, (all, committed)) in (0..).zip(all.into_iter().zip(committed)) {
            if !starts.contains_key(&index) {
                continue;
            }
            let partition = Partition { topic: topic.clone(), index };
            observed.partitions.insert(partition, Contents { all, committed });
        }
    }
    for group in model.groups.keys() {
        observed.groups.insert(group.clone(), committed_offsets(client, group)?);
    }
    Ok(observed)
}

struct Reader<'a> {
    client: &'a mut Client,
    model: &'a Model,
    topic: &'a str,
    count: i32,
}

impl Reader<'_> {
    fn partition(&self, index: i32) -> Partition {
        Partition { topic: self.topic.to_owned(), index }
    }

    /// Returns the first offset of each partition that exists.
    fn starts(&mut self) -> Result<BTreeMap<i32, i64>, Error> {
        let mut starts = BTreeMap::new();
        for result in self.client.list_offsets(self.topic, 0..self.count, EARLIEST)? {
            if result.error_code == UNKNOWN_PARTITION {
                continue;
            }
            if result.error_code != 0 {
                let Self { topic, .. } = self;
                let (index, code) = (result.partition_index, result.error_code);
                return Err(format!("ListOffsets of {topic}-{index}: error code {code}").into());
            }
            starts.insert(result.partition_index, result.offset);
        }
        Ok(starts)
    }

    fn fetch(
        &mut self,
        positions: &BTreeMap<i32, i64>,
        committed: bool,
    ) -> Result<Vec<PartitionData>, Error> {
        let answer = reads::fetch(self.client, self.topic, positions, committed, 200)?;
        if answer.error_code != 0 {
            return Err(format!("Fetch: error code {}", answer.error_code).into());
        }
        Ok(answer.responses.into_iter().flat_map(|topic| topic.partitions).collect())
    }

    /// Reads all partitions from their starts to their ends.
    fn read(&mut self, starts: &BTreeMap<i32, i64>, committed: bool) -> Result<Vec<View>, Error> {
        let mut views = vec![View::default(); self.count as usize];
        let mut positions = starts.clone();
        let mut since_progress = Instant::now();
        while !positions.is_empty() {
            let mut has_progress = false;
            let is_late = since_progress.elapsed() > PATIENCE;
            for data in self.fetch(&positions, committed)? {
                let index = data.partition_index;
                let Some(from) = positions.get(&index).copied() else { continue };
                let view = &mut views[index as usize];
                let end = if committed { data.last_stable_offset } else { data.high_watermark };
                let failure = match data.error_code {
                    0 => {
                        let offset = view.add(&data, from, committed);
                        view.end = view.end.max(end);
                        match offset {
                            Ok(offset) if offset >= end => {
                                has_progress = true;
                                positions.remove(&index);
                                continue;
                            }
                            Ok(offset) if offset > from => {
                                has_progress = true;
                                positions.insert(index, offset);
                                continue;
                            }
                            Ok(_) if !is_late => continue,
                            Ok(_) => format!("nothing before the end, {end}"),
                            Err(error) => error.to_string(),
                        }
                    }
                    CORRUPT_MESSAGE => "CORRUPT_MESSAGE".to_owned(),
                    _ if !is_late => continue,
                    code => format!("error code {code}"),
                };
                has_progress = true;
                let log = self.model.log(&self.partition(index));
                let next = log.batches.iter().copied().filter(|base| *base > from).min();
                let to = next.unwrap_or(log.next.max(from + 1));
                views[index as usize].unreadable.push((from, to, failure));
                match next {
                    Some(next) => positions.insert(index, next),
                    None => positions.remove(&index),
                };
            }
            if has_progress {
                since_progress = Instant::now();
            } else {
                thread::sleep(PAUSE);
            }
        }
        Ok(views)
    }
}

impl View {
    /// Whether a read at this offset fails.
    pub(super) fn is_unreadable(&self, offset: i64) -> bool {
        self.unreadable.iter().any(|(from, to, _)| (*from..*to).contains(&offset))
    }

    /// Adds what a fetch at `from` has returned, and returns the next offset.
    fn add(&mut self, data: &PartitionData, from: i64, committed: bool) -> Result<i64, Error> {
        let mut isolation = Isolation::of(data, committed);
        let mut offset = from;
        for batch in decode_batches(data.records.clone().unwrap_or_default())? {
            offset = offset.max(batch.end);
            if batch.kind != BatchKind::Data {
                self.endings.push(Ending {
                    offset: batch.base,
                    producer_id: batch.producer_id,
                    is_commit: batch.kind == BatchKind::CommitMarker,
                });
            }
            self.records.extend(isolation.deliver(batch));
        }
        Ok(offset)
    }
}

/// Reads topics, settings and ACLs.
fn state(client: &mut Client) -> Result<State, Error> {
    let mut state = State::new();
    let names = reads::topics(client)?;
    state.extend(names.iter().map(|name| (format!("topic {name}"), "there".into())));
    let resources = names.iter().map(|name| {
        DescribeConfigsResource::default()
            .with_resource_type(2)
            .with_resource_name(StrBytes::from_string(name.clone()))
            .with_configuration_keys(Some(vec![StrBytes::from_static_str(SETTING)]))
    });
    let request = DescribeConfigsRequest::default().with_resources(resources.collect());
    for result in client.call(1, &request)?.results {
        for config in result.configs {
            let value = config.value.map(|value| value.to_string()).unwrap_or_default();
            state.insert(format!("setting {}", result.resource_name.as_str()), value);
        }
    }
    let request = DescribeAclsRequest::default()
        .with_resource_type_filter(1)
        .with_resource_name_filter(None)
        .with_principal_filter(None)
        .with_host_filter(None)
        .with_pattern_type_filter(1)
        .with_operation(1)
        .with_permission_type(1);
    let answer = client.call(2, &request)?;
    if answer.error_code != 0 {
        return Err(format!("DescribeAcls: error code {}", answer.error_code).into());
    }
    for resource in answer.resources {
        state.insert(acl_name(resource.resource_name.as_str()), "there".into());
    }
    Ok(state)
}

fn committed_offsets(client: &mut Client, group: &str) -> Result<Vec<(Partition, i64)>, Error> {
    let offsets = reads::committed_offsets(client, group)?;
    offsets.map_err(|code| format!("OffsetFetch of group {group}: error code {code}").into())
}
