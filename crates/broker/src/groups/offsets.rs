//! Committed offsets: the table, the records that change it, and the checkpoint that holds it. No I/O.
//!
//! The offsets of all groups live in one state stream. Each change is one batch of that stream holding one [`Record`];
//! the table is the fold of the records in order, and a [`fold`] of a prefix is that stream's checkpoint.
//!
//! # Format, version 1
//!
//! Integers are little-endian. `str` is a u16 length in bytes and that much UTF-8; a list is a u32 count and its elements.
//! Nothing may follow the last field. A reader refuses an unknown version or kind: to guess would lose offsets.
//!
//! **Record**: `version: u8 = 1`, `kind: u8`, then
//!
//! | kind | is | fields |
//! |---|---|---|
//! | 1 | commit | group: str, committed at: i64 (ms since the Unix epoch), topics: list of (name: str, list of (partition: i32, offset: i64, leader epoch: i32, metadata: str)) |
//! | 2 | group deleted | group: str |
//! | 3 | topics deleted, in all groups | names: list of str |
//! | 4 | offsets expired | group: str, topics: list of (name: str, list of partition: i32) |
//!
//! Records carry no checksum of their own: the write-ahead log's covers them, and they are kept nowhere else.
//!
//! **Checkpoint**: magic `ALGO`, `version: u8 = 1`, list of groups (group: str, list of topics (name: str, list of
//! (partition: i32, offset: i64, leader epoch: i32, committed at: i64, metadata: str))), `crc: u32` = CRC32C of all before it. Groups, topics
//! and partitions are in ascending order, so equal tables have equal bytes.
//!
//! **Quarantine**: magic `ALGQ`, `version: u8 = 1`, list of blobs (u32 length, bytes), `crc: u32`. The store drops batches once they are
//! folded, and [`fold`] can not refuse; so if it meets something that it can not read (which only a defect, or a newer version's
//! records, can cause), it keeps its input unread: first the previous checkpoint, then each batch. [`Offsets::decode`] of a
//! quarantine fails with the reason, so the coordinator does not open and nothing is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::str;

use alluvium_stream::Batch;

const VERSION: u8 = 1;
const CHECKPOINT: [u8; 4] = *b"ALGO";
const QUARANTINE: [u8; 4] = *b"ALGQ";
const CRC_LEN: usize = 4;

const KIND_COMMIT: u8 = 1;
const KIND_GROUP_DELETED: u8 = 2;
const KIND_TOPICS_DELETED: u8 = 3;
const KIND_EXPIRED: u8 = 4;

/// The longest string that the format can hold; what comes from clients is checked against it at the door.
pub(super) const MAX_STRING_BYTES: usize = u16::MAX as usize;

/// What an entry, a topic or a group takes in memory beside its strings; measured by eye, used for the bound only.
const ENTRY_BYTES: usize = 96;

/// Bytes that are no record or no checkpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("committed offsets are not readable: {0}")]
pub struct Corrupt(String);

/// One committed offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Committed {
    pub(super) offset: i64,
    /// -1 when the client did not know it.
    pub(super) leader_epoch: i32,
    /// When, in milliseconds since the Unix epoch; for retention.
    pub(super) committed_at_ms: i64,
    pub(super) metadata: String,
}

/// An offset to be committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) leader_epoch: i32,
    pub(super) metadata: String,
}

/// A change of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Record {
    Commit { group: String, committed_at_ms: i64, topics: Vec<(String, Vec<Position>)> },
    GroupDeleted { group: String },
    TopicsDeleted { names: Vec<String> },
    Expired { group: String, topics: Vec<(String, Vec<i32>)> },
}

impl Record {
    /// The group that it is about; `None` for all.
    pub(super) fn group(&self) -> Option<&str> {
        match self {
            Record::Commit { group, .. }
            | Record::GroupDeleted { group }
            | Record::Expired { group, .. } => Some(group),
            Record::TopicsDeleted { .. } => None,
        }
    }

    /// Does it give this topic an offset?
    pub(super) fn commits(&self, topic: &str) -> bool {
        let Record::Commit { topics, .. } = self else { return false };
        topics.iter().any(|(name, _)| name == topic)
    }

    /// Strings must not be longer than [`MAX_STRING_BYTES`].
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(vec![VERSION]);
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
        }
        out.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut reader = Reader(bytes);
        reader.version("record")?;
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
            kind => return Err(Corrupt(format!("a record of the unknown kind {kind}"))),
        };
        reader.end()?;
        Ok(record)
    }
}

/// One group's offsets by topic and partition.
pub(super) type GroupOffsets = BTreeMap<String, BTreeMap<i32, Committed>>;

/// All committed offsets. No group and no topic in it is empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Offsets {
    groups: BTreeMap<String, GroupOffsets>,
    size_bytes: usize,
}

impl Offsets {
    /// An estimate of the memory it takes.
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

    /// Names of the topics of which any group has offsets.
    pub(super) fn topics(&self) -> BTreeSet<&str> {
        self.groups.values().flat_map(|topics| topics.keys().map(String::as_str)).collect()
    }

    /// Does any group hold an offset of this topic?
    pub(super) fn has_topic(&self, topic: &str) -> bool {
        self.groups.values().any(|topics| topics.contains_key(topic))
    }

    /// By how much applying the record would let the table grow; 0 when it only overwrites or removes.
    pub(super) fn growth_bytes(&self, record: &Record) -> usize {
        let Record::Commit { group, topics, .. } = record else { return 0 };
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

    /// The offsets of one group that were committed at `cutoff_ms` or earlier, as a record that removes them; `None` if there are none.
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

    /// Change the table as the record says. Applying a removal of what is not there does nothing.
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
                let groups: Vec<String> = self.groups.keys().cloned().collect();
                for group in groups {
                    for name in &names {
                        self.remove_topic(&group, name);
                    }
                }
            }
            Record::Expired { group, topics } => {
                for (name, partitions) in topics {
                    for partition in partitions {
                        self.remove(&group, &name, partition);
                    }
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
        }
        if topics.is_empty() {
            self.groups.remove(group);
            self.size_bytes -= named_bytes(group);
        }
    }

    /// The checkpoint.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(CHECKPOINT.to_vec());
        out.u8(VERSION);
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
        out.sealed()
    }

    /// Read a checkpoint.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let body = unseal(bytes)?;
        let Some(body) = body.strip_prefix(&CHECKPOINT) else {
            return Err(match quarantined(bytes) {
                Some(blobs) => why_quarantined(&blobs),
                None => Corrupt("a checkpoint without its magic number".to_owned()),
            });
        };
        let mut reader = Reader(body);
        reader.version("checkpoint")?;
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
        reader.end()?;
        Ok(offsets)
    }

    /// The table that a checkpoint and the batches after it describe.
    pub(super) fn rebuild(checkpoint: Option<&[u8]>, batches: &[Batch]) -> Result<Self, Corrupt> {
        let mut offsets = checkpoint.map(Self::decode).transpose()?.unwrap_or_default();
        for batch in batches {
            let record = Record::decode(&batch.payload).map_err(|Corrupt(cause)| {
                Corrupt(format!("the batch at offset {}: {cause}", batch.base))
            })?;
            offsets.apply(record);
        }
        Ok(offsets)
    }
}

fn named_bytes(name: &str) -> usize {
    ENTRY_BYTES + name.len()
}

/// The checkpoint of the offsets stream after `batches`, for the server's [`alluvium_stream::Fold`]. `None` as long as there is
/// nothing to remember. Input that can not be read is kept as it is (see the format: quarantine) and reported by
/// [`crate::groups::Groups::open`].
pub fn fold(previous: Option<&[u8]>, batches: &[Batch]) -> Option<Vec<u8>> {
    match Offsets::rebuild(previous, batches) {
        Ok(offsets) => (previous.is_some() || !batches.is_empty()).then(|| offsets.encode()),
        Err(error) => {
            tracing::error!(%error, "group offsets are put into quarantine");
            Some(quarantine(previous, batches))
        }
    }
}

fn quarantine(previous: Option<&[u8]>, batches: &[Batch]) -> Vec<u8> {
    let kept = previous.and_then(quarantined);
    let mut blobs = kept.unwrap_or_else(|| vec![previous.unwrap_or_default()]);
    blobs.extend(batches.iter().map(|batch| &batch.payload[..]));
    let mut out = Writer(QUARANTINE.to_vec());
    out.u8(VERSION);
    out.list(&blobs, |out, blob| {
        out.len(blob.len());
        out.0.extend_from_slice(blob);
    });
    out.sealed()
}

/// The blobs of an intact quarantine; `None` for anything else.
fn quarantined(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut reader = Reader(unseal(bytes).ok()?.strip_prefix(&QUARANTINE)?);
    reader.version("quarantine").ok()?;
    let blobs = reader.list(|reader| {
        let len = reader.len()?;
        reader.take(len)
    });
    blobs.ok()
}

/// The first blob that can not be read, and why.
fn why_quarantined(blobs: &[&[u8]]) -> Corrupt {
    let (checkpoint, records) =
        blobs.split_first().map_or((&[][..], &[][..]), |(first, rest)| (*first, rest));
    let checkpoint = (!checkpoint.is_empty()).then(|| Offsets::decode(checkpoint).map(drop));
    let records = records.iter().map(|bytes| Record::decode(bytes).map(drop));
    let cause = checkpoint.into_iter().chain(records).find_map(Result::err);
    let cause =
        cause.map_or_else(|| "which this version can read".to_owned(), |Corrupt(cause)| cause);
    Corrupt(format!("they were put into quarantine because of {cause}"))
}

/// Verify and cut off the checksum.
fn unseal(bytes: &[u8]) -> Result<&[u8], Corrupt> {
    let at = bytes
        .len()
        .checked_sub(CRC_LEN)
        .ok_or_else(|| Corrupt("a checkpoint shorter than its checksum".to_owned()))?;
    let (body, crc) = bytes.split_at(at);
    if crc == crc32c::crc32c(body).to_le_bytes() {
        Ok(body)
    } else {
        Err(Corrupt(format!("a checkpoint of {} bytes whose checksum does not hold", bytes.len())))
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    fn i32(&mut self, value: i32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn i64(&mut self, value: i64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn len(&mut self, value: usize) {
        let value = u32::try_from(value).expect("counts are bounded by memory far below 2^32");
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn str(&mut self, value: &str) {
        let len = u16::try_from(value.len())
            .expect("strings were checked against MAX_STRING_BYTES at the door");
        self.0.extend_from_slice(&len.to_le_bytes());
        self.0.extend_from_slice(value.as_bytes());
    }
    fn list<I>(&mut self, items: I, mut write: impl FnMut(&mut Self, I::Item))
    where
        I: IntoIterator<IntoIter: ExactSizeIterator>,
    {
        let items = items.into_iter();
        self.len(items.len());
        for item in items {
            write(self, item);
        }
    }
    fn sealed(mut self) -> Vec<u8> {
        let crc = crc32c::crc32c(&self.0);
        self.0.extend_from_slice(&crc.to_le_bytes());
        self.0
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Corrupt> {
        let short = || Corrupt(format!("{} bytes where {len} were promised", self.0.len()));
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(short)?;
        self.0 = rest;
        Ok(taken)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Corrupt> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }
    fn u8(&mut self) -> Result<u8, Corrupt> {
        Ok(u8::from_le_bytes(self.array()?))
    }
    fn i32(&mut self) -> Result<i32, Corrupt> {
        Ok(i32::from_le_bytes(self.array()?))
    }
    fn i64(&mut self) -> Result<i64, Corrupt> {
        Ok(i64::from_le_bytes(self.array()?))
    }
    fn len(&mut self) -> Result<usize, Corrupt> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }
    fn str(&mut self) -> Result<String, Corrupt> {
        let len = u16::from_le_bytes(self.array()?);
        let bytes = self.take(usize::from(len))?;
        let text = str::from_utf8(bytes)
            .map_err(|error| Corrupt(format!("a string that is not UTF-8: {error}")))?;
        Ok(text.to_owned())
    }
    /// Reserves nothing ahead: a corrupt count fails at the first missing element.
    fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, Corrupt>,
    ) -> Result<Vec<T>, Corrupt> {
        let count = self.len()?;
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(read(self)?);
        }
        Ok(items)
    }
    fn version(&mut self, what: &str) -> Result<(), Corrupt> {
        match self.u8()? {
            VERSION => Ok(()),
            version => Err(Corrupt(format!("a {what} of the unknown format version {version}"))),
        }
    }
    fn end(&self) -> Result<(), Corrupt> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Corrupt(format!("{} bytes after the last field", self.0.len())))
        }
    }
}

#[cfg(test)]
mod tests;
