//! What `alluvium rebuild` states as lost, and which partition each stream is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde_json::Value;

use super::super::layout::Extent;
use super::super::model::Partition;
use crate::Error;

/// What is stated as lost.
#[derive(Clone, Debug, Default)]
pub(super) struct Stated {
    /// Ranges of partitions. An end that is lost has no upper bound.
    pub(super) ranges: BTreeMap<Partition, Vec<Range<i64>>>,
    /// The lost ends among them: the first offset, and the one at which the partition continues.
    pub(super) ends: BTreeMap<Partition, (i64, i64)>,
    /// Offsets that are skipped, which no record is stated to have had.
    pub(super) skipped: BTreeMap<Partition, Vec<Range<i64>>>,
    /// Transactions that are hidden before lost offsets: producer, and their offsets.
    pub(super) aborted: BTreeMap<Partition, Vec<(i64, Range<i64>)>>,
    /// Streams that are kept without a name.
    pub(super) unnamed: BTreeSet<u64>,
    /// A part of the server's own state is lost: committed offsets, transactions.
    pub(super) state: bool,
    /// Changes of topics, settings, users and ACLs may be lost.
    pub(super) changes: bool,
    /// All of them may be.
    pub(super) all_changes: bool,
    /// Topics that keep their records and have lost their settings.
    pub(super) without_settings: Vec<String>,
    pub(super) is_clean: bool,
}

impl Stated {
    /// Reads the JSON of a rebuild.
    pub(super) fn read(report: &Value) -> Result<Self, Error> {
        let mut stated = Self {
            is_clean: report["clean"].as_bool().ok_or("a report without `clean`")?,
            ..Self::default()
        };
        for lost in list(&report["lost"]) {
            stated.changes = true;
            let Some(partition) = partition(lost) else {
                stated.state = true;
                continue;
            };
            let (from, resume) = (int(lost, "from")?, int(lost, "resume")?);
            stated.ranges.entry(partition.clone()).or_default().push(from..i64::MAX);
            stated.ends.insert(partition, (from, resume));
        }
        let found = &report["from_objects"];
        for key in ["lost_records", "lost_log_records", "skipped"] {
            for lost in list(&found[key]) {
                let range = int(lost, "from")?..int(lost, "to")?;
                match (partition(lost), key) {
                    (Some(of), "skipped") => stated.skipped.entry(of).or_default().push(range),
                    (Some(of), _) => stated.ranges.entry(of).or_default().push(range),
                    (None, "skipped") => {}
                    (None, _) => stated.state = true,
                }
            }
        }
        for aborted in list(&found["aborted_transactions"]) {
            let range = int(aborted, "from")?..int(aborted, "to")?;
            let of = partition(aborted).ok_or("an aborted transaction of no partition")?;
            let producer_id = int(aborted, "producer_id")?;
            stated.aborted.entry(of).or_default().push((producer_id, range));
        }
        stated.unnamed =
            list(&found["unnamed"]).filter_map(|stream| stream["stream"].as_u64()).collect();
        stated.all_changes = found["catalog_may_be_old"].as_bool().unwrap_or(false);
        stated.changes |= stated.all_changes
            || list(&found["catalog"]).next().is_some()
            || found["lost_lists"].as_u64().unwrap_or(0) > 0;
        // Committed offsets and transactions are in the catalog, too.
        let is_of_catalog = stated.all_changes || list(&found["catalog"]).next().is_some();
        stated.state |= is_of_catalog;
        for topic in list(&found["restored_topics"]) {
            if topic["settings_lost"].as_bool() == Some(true) {
                stated.without_settings.extend(topic["name"].as_str().map(str::to_owned));
            }
        }
        Ok(stated)
    }

    pub(super) fn is_lost(&self, partition: &Partition, offset: i64) -> bool {
        let ranges = self.ranges.get(partition);
        ranges.is_some_and(|ranges| ranges.iter().any(|range| range.contains(&offset)))
    }

    /// Whether the record of this producer is stated as hidden.
    pub(super) fn is_aborted(&self, partition: &Partition, producer_id: i64, offset: i64) -> bool {
        let aborted = self.aborted.get(partition).into_iter().flatten();
        aborted.into_iter().any(|(id, range)| *id == producer_id && range.contains(&offset))
    }

    /// Whether records before the end of the partition are lost.
    pub(super) fn has_hole(&self, partition: &Partition) -> bool {
        let ranges = self.ranges.get(partition);
        ranges.is_some_and(|ranges| ranges.iter().any(|range| range.end != i64::MAX))
    }

    /// Whether the offset is in an end that is lost.
    pub(super) fn is_lost_end(&self, partition: &Partition, offset: i64) -> bool {
        self.ends.get(partition).is_some_and(|(from, _)| offset >= *from)
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn int(value: &Value, key: &str) -> Result<i64, Error> {
    let number = value[key].as_u64().ok_or_else(|| format!("no {key} in {value}"))?;
    Ok(i64::try_from(number)?)
}

/// Reads `partition 3 of topic a`.
fn partition(value: &Value) -> Option<Partition> {
    let (index, topic) =
        value["name"].as_str()?.strip_prefix("partition ")?.split_once(" of topic ")?;
    Some(Partition { topic: topic.to_owned(), index: index.parse().ok()? })
}

/// The partitions of streams, and the ranges of objects in the catalog, from its export.
#[derive(Default)]
pub(super) struct Exported {
    streams: BTreeMap<u64, Partition>,
    /// By the name of an object, without the directories.
    ranges: BTreeMap<String, Vec<Extent>>,
}

impl Exported {
    pub(super) fn read(export: &Value) -> Self {
        let mut exported = Self::default();
        let mut names = BTreeMap::new();
        for object in list(&export["objects"]) {
            let name = object["name"].as_str().and_then(|name| name.rsplit('/').next());
            names.extend(object["number"].as_u64().zip(name.map(str::to_owned)));
        }
        for stream in list(&export["streams"]) {
            let Some(id) = stream["id"].as_u64() else { continue };
            let label = stream["label"].as_str().and_then(unhex);
            let label: Value =
                label.and_then(|it| serde_json::from_slice(&it).ok()).unwrap_or_default();
            if let (Some(topic), Some(index)) =
                (label["topic"].as_str(), label["partition"].as_i64())
            {
                let partition = Partition { topic: topic.to_owned(), index: index as i32 };
                exported.streams.insert(id, partition);
            }
            for range in list(&stream["ranges"]) {
                let number = |key: &str| range[key].as_u64().unwrap_or_default();
                let Some(name) = names.get(&number("object")) else { continue };
                let extent = Extent { stream: id, start: number("start"), end: number("end") };
                exported.ranges.entry(name.clone()).or_default().push(extent);
            }
        }
        exported
    }

    /// Returns what of these parts of an object belongs to partitions, according to the catalog.
    pub(super) fn partitions(
        &self,
        object: &str,
        parts: &[Extent],
    ) -> Vec<(Partition, Range<i64>)> {
        let mut found = Vec::new();
        for range in self.ranges.get(object).into_iter().flatten() {
            let Some(partition) = self.streams.get(&range.stream) else { continue };
            for part in parts.iter().filter(|part| part.stream == range.stream) {
                let offsets = part.start.max(range.start) as i64..part.end.min(range.end) as i64;
                if !offsets.is_empty() {
                    found.push((partition.clone(), offsets));
                }
            }
        }
        found
    }

    /// Returns the partition of an extent, and its offsets.
    pub(super) fn offsets(&self, extent: &Extent) -> Option<(Partition, Range<i64>)> {
        let partition = self.streams.get(&extent.stream)?;
        Some((partition.clone(), extent.start as i64..extent.end as i64))
    }

    /// Returns the partition of a stream.
    pub(super) fn partition(&self, stream: u64) -> Option<&Partition> {
        self.streams.get(&stream)
    }

    /// Whether the catalog has a range in the object.
    pub(super) fn uses(&self, object: &str) -> bool {
        self.ranges.contains_key(object)
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok())
        .collect()
}
