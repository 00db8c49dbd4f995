//! Committed offsets: the table, the records that change it, and the checkpoint that holds it. No
//! I/O.
//!
//! The offsets of all groups are in one state stream. Each change is one batch of that stream with
//! one [`Record`]; the table is the fold of the records in order, and a
//! [`fold`](crate::state_table::fold) of a prefix is that stream's checkpoint.
//!
//! # Format
//!
//! Written as described in [`crate::state_table`]. A reader refuses an unknown version or kind:
//! guessing would lose offsets.
//!
//! **Record**: `version: u8 = 1`, `kind: u8`, then
//!
//! | kind | is | fields |
//! |---|---|---|
//! | 1 | commit | group: str, committed at: i64, topics: list of (name: str, list of *offset*) |
//! | 2 | group deleted | group: str |
//! | 3 | topics deleted, in all groups | names: list of str |
//! | 4 | offsets expired | group: str, topics: list of (name: str, list of partition: i32) |
//! | 5 | a group had members, so its offsets were in use | group: str, at: i64 |
//!
//! An *offset* is (partition: i32, offset: i64, leader epoch: i32, metadata: str). Times are
//! milliseconds since the Unix epoch.
//!
//! Records carry no checksum of their own: the write-ahead log's covers them, and they are stored
//! nowhere else.
//!
//! **Checkpoint**: magic `ALGO`, `version: u8 = 2`, list of groups (group: str, list of topics
//! (name: str, list of (partition: i32, offset: i64, leader epoch: i32, committed at: i64,
//! metadata: str))), list of (group: str, had members at: i64), `crc: u32` = CRC32C of all before
//! it. Groups, topics and partitions are in ascending order, so equal tables have equal bytes.
//! Version 1, which has no second list, can be read.
//!
//! **Quarantine**: magic `ALGQ`, see [`crate::state_table`].

use std::collections::{BTreeMap, BTreeSet};

use crate::state_table::{Corrupt, Reader, Table, Writer};

const VERSION: u8 = 1;
const CHECKPOINT_VERSION: u8 = 2;
const FIRST_WITH_USES: u8 = 2;

const KIND_COMMIT: u8 = 1;
const KIND_GROUP_DELETED: u8 = 2;
const KIND_TOPICS_DELETED: u8 = 3;
const KIND_EXPIRED: u8 = 4;
const KIND_USED: u8 = 5;

/// Estimated memory of an entry, a topic or a group apart from its strings; used for the bound
/// only.
const ENTRY_BYTES: usize = 96;

/// One committed offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Committed {
    pub(super) offset: i64,
    /// -1 if the client did not know it.
    pub(super) leader_epoch: i32,
    /// Time of the commit, in milliseconds since the Unix epoch; for retention.
    pub(super) committed_at_ms: i64,
    pub(super) metadata: String,
}

/// An offset to commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) leader_epoch: i32,
    pub(crate) metadata: String,
}

/// A change of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Record {
    Commit { group: String, committed_at_ms: i64, topics: Vec<(String, Vec<Position>)> },
    GroupDeleted { group: String },
    TopicsDeleted { names: Vec<String> },
    Expired { group: String, topics: Vec<(String, Vec<i32>)> },
    Used { group: String, at_ms: i64 },
}

impl Record {
    /// The group that it concerns; `None` for all.
    pub(super) fn group(&self) -> Option<&str> {
        match self {
            Record::Commit { group, .. }
            | Record::GroupDeleted { group }
            | Record::Expired { group, .. }
            | Record::Used { group, .. } => Some(group),
            Record::TopicsDeleted { .. } => None,
        }
    }

    /// The offsets that it commits, by topic.
    pub(super) fn committed(&self) -> &[(String, Vec<Position>)] {
        match self {
            Record::Commit { topics, .. } => topics,
            _ => &[],
        }
    }

    /// Encodes the record. Strings must not be longer than
    /// [`crate::state_table::MAX_STRING_BYTES`].
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.u8(VERSION);
        match self {
            Record::Commit { group, committed_at_ms, topics } => {
                out.u8(KIND_COMMIT);
                out.str(group);
                out.i64(*committed_at_ms);
                out.list(topics, |out, (name, positions)| {
                    out.str(name);
                    out.list(positions, |out, position| {
                        out.i32(position.partition);
                        out.i64(position.offset);
                        out.i32(position.leader_epoch);
                        out.str(&position.metadata);
                    });
                });
            }
            Record::GroupDeleted { group } => {
                out.u8(KIND_GROUP_DELETED);
                out.str(group);
            }
            Record::TopicsDeleted { names } => {
                out.u8(KIND_TOPICS_DELETED);
                out.list(names, |out, name| out.str(name));
            }
            Record::Expired { group, topics } => {
                out.u8(KIND_EXPIRED);
                out.str(group);
                out.list(topics, |out, (name, partitions)| {
                    out.str(name);
                    out.list(partitions, |out, partition| out.i32(*partition));
                });
            }
            Record::Used { group, at_ms } => {
                out.u8(KIND_USED);
                out.str(group);
                out.i64(*at_ms);
            }
        }
        out.into_bytes()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut reader = Reader::new(bytes);
        reader.version("record", VERSION)?;
        let record = match reader.u8()? {
            KIND_COMMIT => Record::Commit {
                group: reader.str()?,
                committed_at_ms: reader.i64()?,
                topics: reader.list(|reader| {
                    let name = reader.str()?;
                    let positions = reader.list(|reader| {
                        Ok(Position {
                            partition: reader.i32()?,
                            offset: reader.i64()?,
                            leader_epoch: reader.i32()?,
                            metadata: reader.str()?,
                        })
                    })?;
                    Ok((name, positions))
                })?,
            },
            KIND_GROUP_DELETED => Record::GroupDeleted { group: reader.str()? },
            KIND_TOPICS_DELETED => Record::TopicsDeleted { names: reader.list(Reader::str)? },
            KIND_EXPIRED => Record::Expired {
                group: reader.str()?,
                topics: reader.list(|reader| Ok((reader.str()?, reader.list(Reader::i32)?)))?,
            },
            KIND_USED => Record::Used { group: reader.str()?, at_ms: reader.i64()? },
            kind => return Err(Corrupt::unknown_kind(kind)),
        };
        reader.end()?;
        Ok(record)
    }
}

/// One group's offsets by topic and partition.
pub(super) type GroupOffsets = BTreeMap<String, BTreeMap<i32, Committed>>;

/// All committed offsets. No group and no topic in it is empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Offsets {
    groups: BTreeMap<String, GroupOffsets>,
    /// Time of the last record that a group had members, in milliseconds since the Unix epoch. Only
    /// for groups with offsets.
    used: BTreeMap<String, i64>,
    /// Number of groups with offsets of a topic.
    readers: BTreeMap<String, usize>,
    size_bytes: usize,
}

impl Offsets {
    /// Estimated memory of the table.
    pub(super) fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Names of the groups with offsets.
    pub(super) fn groups(&self) -> impl Iterator<Item = &str> {
        self.groups.keys().map(String::as_str)
    }

    pub(super) fn group(&self, group: &str) -> Option<&GroupOffsets> {
        self.groups.get(group)
    }

    pub(super) fn get(&self, group: &str, topic: &str, partition: i32) -> Option<&Committed> {
        self.groups.get(group)?.get(topic)?.get(&partition)
    }

    /// Names of the topics for which any group has offsets, in order.
    pub(super) fn topics(&self) -> impl Iterator<Item = &str> {
        self.readers.keys().map(String::as_str)
    }

    /// Whether any group has an offset of this topic.
    pub(super) fn has_topic(&self, topic: &str) -> bool {
        self.readers.contains_key(topic)
    }

    /// By how much the table would grow if the record were applied; 0 if it only overwrites or
    /// removes.
    pub(super) fn growth_bytes(&self, record: &Record) -> usize {
        match record {
            Record::Commit { group, topics, .. } => self.growth_by_commit(group, topics),
            Record::Used { group, .. } if !self.used.contains_key(group) => named_bytes(group),
            _ => 0,
        }
    }

    /// By how much the table would grow by a commit that is not a record yet.
    pub(super) fn growth_by_commit(
        &self,
        group: &str,
        topics: &[(String, Vec<Position>)],
    ) -> usize {
        let group_offsets = self.groups.get(group);
        let mut growth = if group_offsets.is_none() { named_bytes(group) } else { 0 };
        for (name, positions) in topics {
            let topic_offsets = group_offsets.and_then(|topics| topics.get(name));
            growth += if topic_offsets.is_none() { named_bytes(name) } else { 0 };
            for position in positions {
                let old = topic_offsets.and_then(|partitions| partitions.get(&position.partition));
                growth += match old {
                    Some(old) => position.metadata.len().saturating_sub(old.metadata.len()),
                    None => ENTRY_BYTES + position.metadata.len(),
                };
            }
        }
        growth
    }

    /// When the group's offsets were last in use according to the records: one was committed, or
    /// the group had members. `None` if it has no offsets.
    pub(super) fn last_use_ms(&self, group: &str) -> Option<i64> {
        let offsets = self.groups.get(group)?.values().flat_map(BTreeMap::values);
        let committed = offsets.map(|committed| committed.committed_at_ms);
        committed.chain(self.used.get(group).copied()).max()
    }

    /// Returns a record that removes the offsets of one group that were committed at `cutoff_ms` or
    /// earlier; `None` if there are none.
    pub(super) fn expired(&self, group: &str, cutoff_ms: i64) -> Option<Record> {
        let mut topics = Vec::new();
        for (name, partitions) in self.groups.get(group)? {
            let old =
                partitions.iter().filter(|(_, committed)| committed.committed_at_ms <= cutoff_ms);
            let old: Vec<i32> = old.map(|(partition, _)| *partition).collect();
            if !old.is_empty() {
                topics.push((name.clone(), old));
            }
        }
        (!topics.is_empty()).then(|| Record::Expired { group: group.to_owned(), topics })
    }

    /// Applies a record. Removing an absent entry does nothing.
    pub(super) fn apply(&mut self, record: Record) {
        match record {
            Record::Commit { group, committed_at_ms, topics } => {
                for (name, positions) in topics {
                    for position in positions {
                        self.insert(&group, &name, position, committed_at_ms);
                    }
                }
            }
            Record::GroupDeleted { group } => {
                for name in self
                    .groups
                    .get(&group)
                    .map(|topics| topics.keys().cloned().collect())
                    .unwrap_or(vec![])
                {
                    self.remove_topic(&group, &name);
                }
            }
            Record::TopicsDeleted { names } => {
                let names: BTreeSet<&String> =
                    names.iter().filter(|name| self.has_topic(name)).collect();
                let mut deleted = Vec::new();
                for (group, topics) in self.groups.iter().filter(|_| !names.is_empty()) {
                    // Iterate over the smaller of the two.
                    let of_group: Vec<&String> = match names.len() < topics.len() {
                        true => names.iter().copied().filter(|n| topics.contains_key(*n)).collect(),
                        false => topics.keys().filter(|name| names.contains(name)).collect(),
                    };
                    deleted.extend(of_group.into_iter().map(|name| (group.clone(), name.clone())));
                }
                for (group, name) in deleted {
                    self.remove_topic(&group, &name);
                }
            }
            Record::Expired { group, topics } => {
                for (name, partitions) in topics {
                    for partition in partitions {
                        self.remove(&group, &name, partition);
                    }
                }
            }
            Record::Used { group, at_ms } => {
                // Without offsets the entry would never be removed.
                if self.groups.contains_key(&group) && !self.used.contains_key(&group) {
                    self.size_bytes += named_bytes(&group);
                    self.used.insert(group, at_ms);
                } else if let Some(used) = self.used.get_mut(&group) {
                    *used = at_ms;
                }
            }
        }
    }

    fn insert(&mut self, group: &str, topic: &str, position: Position, committed_at_ms: i64) {
        if !self.groups.contains_key(group) {
            self.groups.insert(group.to_owned(), GroupOffsets::new());
            self.size_bytes += named_bytes(group);
        }
        let Some(topics) = self.groups.get_mut(group) else { return };
        if !topics.contains_key(topic) {
            topics.insert(topic.to_owned(), BTreeMap::new());
            self.size_bytes += named_bytes(topic);
            *self.readers.entry(topic.to_owned()).or_default() += 1;
        }
        let Some(partitions) = topics.get_mut(topic) else { return };
        let Position { partition, offset, leader_epoch, metadata } = position;
        self.size_bytes += ENTRY_BYTES + metadata.len();
        let committed = Committed { offset, leader_epoch, committed_at_ms, metadata };
        if let Some(old) = partitions.insert(partition, committed) {
            self.size_bytes -= ENTRY_BYTES + old.metadata.len();
        }
    }

    fn remove(&mut self, group: &str, topic: &str, partition: i32) {
        let Some(partitions) = self.groups.get_mut(group).and_then(|topics| topics.get_mut(topic))
        else {
            return;
        };
        if let Some(old) = partitions.remove(&partition) {
            self.size_bytes -= ENTRY_BYTES + old.metadata.len();
        }
        if partitions.is_empty() {
            self.remove_topic(group, topic);
        }
    }

    fn remove_topic(&mut self, group: &str, topic: &str) {
        let Some(topics) = self.groups.get_mut(group) else { return };
        if let Some(partitions) = topics.remove(topic) {
            let entries: usize =
                partitions.values().map(|old| ENTRY_BYTES + old.metadata.len()).sum();
            self.size_bytes -= named_bytes(topic) + entries;
            if let Some(groups) = self.readers.get_mut(topic) {
                *groups -= 1;
                if *groups == 0 {
                    self.readers.remove(topic);
                }
            }
        }
        if topics.is_empty() {
            self.groups.remove(group);
            self.size_bytes -= named_bytes(group);
            if self.used.remove(group).is_some() {
                self.size_bytes -= named_bytes(group);
            }
        }
    }
}

impl Table for Offsets {
    const WHAT: &'static str = "committed offsets";
    const AFTER_LOSS: &'static str = "groups may return to earlier committed offsets, have offsets \
                                      of a deleted topic in a new one of its name, or begin at \
                                      the offset in their clients' settings";
    const CHECKPOINT: [u8; 4] = *b"ALGO";
    const QUARANTINE: [u8; 4] = *b"ALGQ";
    const VERSION: u8 = CHECKPOINT_VERSION;
    const OLDEST_VERSION: u8 = 1;

    fn apply_encoded(&mut self, record: &[u8]) -> Result<(), Corrupt> {
        self.apply(Record::decode(record)?);
        Ok(())
    }

    fn write(&self, out: &mut Writer) {
        out.list(&self.groups, |out, (group, topics)| {
            out.str(group);
            out.list(topics, |out, (name, partitions)| {
                out.str(name);
                out.list(partitions, |out, (partition, committed)| {
                    out.i32(*partition);
                    out.i64(committed.offset);
                    out.i32(committed.leader_epoch);
                    out.i64(committed.committed_at_ms);
                    out.str(&committed.metadata);
                });
            });
        });
        out.list(&self.used, |out, (group, at_ms)| {
            out.str(group);
            out.i64(*at_ms);
        });
    }

    fn read(reader: &mut Reader<'_>, version: u8) -> Result<Self, Corrupt> {
        let mut offsets = Offsets::default();
        reader.list(|reader| {
            let group = reader.str()?;
            reader.list(|reader| {
                let topic = reader.str()?;
                reader.list(|reader| {
                    let partition = reader.i32()?;
                    let offset = reader.i64()?;
                    let leader_epoch = reader.i32()?;
                    let committed_at_ms = reader.i64()?;
                    let metadata = reader.str()?;
                    offsets.insert(
                        &group,
                        &topic,
                        Position { partition, offset, leader_epoch, metadata },
                        committed_at_ms,
                    );
                    Ok(())
                })
            })
        })?;
        if version >= FIRST_WITH_USES {
            reader.list(|reader| {
                let (group, at_ms) = (reader.str()?, reader.i64()?);
                offsets.apply(Record::Used { group, at_ms });
                Ok(())
            })?;
        }
        Ok(offsets)
    }
}

fn named_bytes(name: &str) -> usize {
    ENTRY_BYTES + name.len()
}

#[cfg(test)]
mod tests;
