//! The persisted state of share groups: `docs/format/share-state.md`.

use std::collections::BTreeMap;

use alluvium_stream::StreamOffset;
use bytes::Bytes;
use uuid::Uuid;

use super::state::{Change, SharePartition, Stored};
use crate::state_table::{Corrupt, Reader, Table, Writer};

const RECORD_VERSION: u8 = 1;

const CHANGED: u8 = 1;
const SET: u8 = 2;
const TOPIC_FORGOTTEN: u8 = 3;
const GROUP_DELETED: u8 = 4;

/// A partition of a topic.
pub(crate) type TopicPartition = (Uuid, i32);

/// The persisted state of a share partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Remembered {
    pub(crate) start: StreamOffset,
    /// In ascending order, none below the start.
    pub(crate) changes: Vec<Change>,
}

/// The share partitions of all groups.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ShareStates(pub(super) BTreeMap<String, BTreeMap<TopicPartition, Remembered>>);

/// Encodes changes of records. Other records stay as they were, and records below `start` are
/// dropped.
pub(super) fn changed(
    group: &str,
    partition: TopicPartition,
    start: StreamOffset,
    changes: &[Change],
) -> Bytes {
    let mut out = Writer::record(RECORD_VERSION, CHANGED, group);
    put_partition(&mut out, partition);
    put_state(&mut out, start, changes);
    out.into_record()
}

/// Encodes the whole state of these partitions, whether they exist or not.
pub(super) fn set(group: &str, partitions: &[(TopicPartition, Remembered)]) -> Bytes {
    let mut out = Writer::record(RECORD_VERSION, SET, group);
    out.list(partitions, |out, (partition, Remembered { start, changes })| {
        put_partition(out, *partition);
        put_state(out, *start, changes);
    });
    out.into_record()
}

pub(super) fn topic_forgotten(group: &str, topic: Uuid) -> Bytes {
    let mut out = Writer::record(RECORD_VERSION, TOPIC_FORGOTTEN, group);
    out.raw(topic.as_bytes());
    out.into_record()
}

pub(super) fn group_deleted(group: &str) -> Bytes {
    Writer::record(RECORD_VERSION, GROUP_DELETED, group).into_record()
}

fn put_partition(out: &mut Writer, (topic, partition): TopicPartition) {
    out.raw(topic.as_bytes());
    out.i32(partition);
}

fn put_state(out: &mut Writer, start: StreamOffset, changes: &[Change]) {
    out.u64(start.0);
    out.list(changes, |out, change| {
        out.u64(change.from.0);
        out.u64(change.to.0);
        out.u8(match change.state {
            Stored::Available => 0,
            Stored::Acknowledged => 1,
            Stored::Archived => 2,
        });
        out.raw(&change.deliveries.to_le_bytes());
    });
}

fn read_partition(reader: &mut Reader<'_>) -> Result<TopicPartition, Corrupt> {
    Ok((Uuid::from_bytes(reader.array()?), reader.i32()?))
}

fn read_state(reader: &mut Reader<'_>) -> Result<Remembered, Corrupt> {
    let start = StreamOffset(reader.u64()?);
    let changes = reader.list(|reader| {
        let (from, to) = (StreamOffset(reader.u64()?), StreamOffset(reader.u64()?));
        let state = match reader.u8()? {
            0 => Stored::Available,
            1 => Stored::Acknowledged,
            2 => Stored::Archived,
            other => return Err(Corrupt::new(format!("unknown state of a record: {other}"))),
        };
        let deliveries = u16::from_le_bytes(reader.array()?);
        if from >= to {
            return Err(Corrupt::new(format!("invalid range of records: {from} to {to}")));
        }
        Ok(Change { from, to, state, deliveries })
    })?;
    Ok(Remembered { start, changes })
}

impl Remembered {
    /// Applies later changes.
    pub(super) fn apply(&mut self, later: Self) {
        // Only a record of kind 2 moves the start back, so such a record was lost to damage. The
        // state here is from before it: the group continues from the new start.
        if later.start < self.start {
            *self = Self { start: later.start, changes: Vec::new() };
        }
        for change in later.changes {
            let first = self.changes.partition_point(|old| old.to <= change.from);
            let behind = self.changes.partition_point(|old| old.from < change.to);
            let before = self.changes[first..behind].first();
            let before = before.filter(|old| old.from < change.from);
            let before = before.map(|old| Change { to: change.from, ..*old });
            let after = self.changes[first..behind].last();
            let after = after.filter(|old| old.to > change.to);
            let after = after.map(|old| Change { from: change.to, ..*old });
            let new = before.into_iter().chain([change]).chain(after);
            self.changes.splice(first..behind, new);
        }
        self.start = self.start.max(later.start);
        self.changes.retain(|change| change.to > self.start);
        if let Some(first) = self.changes.first_mut() {
            first.from = first.from.max(self.start);
        }
    }

    pub(super) fn live(&self) -> SharePartition {
        SharePartition::new(self.start, self.changes.iter().copied())
    }
}

impl Table for ShareStates {
    const WHAT: &'static str = "states of share groups";
    const AFTER_LOSS: &'static str = "acknowledged records may be delivered again, a position that \
                                      an administrator has set may be undone, and groups whose \
                                      start offset is lost begin at the offset in their settings";
    const CHECKPOINT: [u8; 4] = *b"ALSG";
    const QUARANTINE: [u8; 4] = *b"ALSN";
    const VERSION: u8 = 1;

    fn apply_encoded(&mut self, record: &[u8]) -> Result<(), Corrupt> {
        let mut reader = Reader::new(record);
        reader.version("record", RECORD_VERSION)?;
        let kind = reader.u8()?;
        let group = reader.str()?;
        match kind {
            CHANGED => {
                let partition = read_partition(&mut reader)?;
                let later = read_state(&mut reader)?;
                let known = self.0.get_mut(&group).and_then(|known| known.get_mut(&partition));
                if let Some(known) = known {
                    known.apply(later);
                }
            }
            SET => {
                let partitions =
                    reader.list(|reader| Ok((read_partition(reader)?, read_state(reader)?)))?;
                self.0.entry(group).or_default().extend(partitions);
            }
            TOPIC_FORGOTTEN => {
                let topic = Uuid::from_bytes(reader.array()?);
                if let Some(known) = self.0.get_mut(&group) {
                    known.retain(|(of, _), _| *of != topic);
                    if known.is_empty() {
                        self.0.remove(&group);
                    }
                }
            }
            GROUP_DELETED => {
                self.0.remove(&group);
            }
            other => return Err(Corrupt::unknown_kind(other)),
        }
        reader.end()
    }

    fn write(&self, out: &mut Writer) {
        out.list(&self.0, |out, (group, partitions)| {
            out.str(group);
            out.list(partitions, |out, (partition, Remembered { start, changes })| {
                put_partition(out, *partition);
                put_state(out, *start, changes);
            });
        });
    }

    fn read(reader: &mut Reader<'_>, _version: u8) -> Result<Self, Corrupt> {
        let groups = reader.list(|reader| {
            let group = reader.str()?;
            let partitions =
                reader.list(|reader| Ok((read_partition(reader)?, read_state(reader)?)))?;
            Ok((group, partitions.into_iter().collect()))
        })?;
        Ok(Self(groups.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests;
