//! The state of the catalog after an object of the chain.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use uuid::Uuid;

use super::body::{BodyHeader, Hints, ObjectKind};
use super::change::{ChainChange, ChainObject};
use super::entry::Entry;
use crate::catalog::{INCARNATIONS_KEPT, Incarnation, ObjectRange, Replaced, Uploaded};
use crate::damage::Damage;
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

/// The object of the chain that a state is the result of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Its number.
    pub number: u64,
    /// What the next object states as `previous`.
    pub link: u64,
    /// The term that holds after it.
    pub term: u32,
    /// It is not an object of the chain, but the snapshot of a migration or a rebuild.
    pub is_snapshot: bool,
}

/// A stream of the catalog.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ChainStream {
    /// See [`ChainChange::CreateStream`].
    pub kind: u8,
    /// See [`ChainChange::CreateStream`].
    pub label: Bytes,
    /// The newest epoch with which it was opened.
    pub epoch: StreamEpoch,
    /// The offset of the first readable record.
    pub start: StreamOffset,
    /// See [`Uploaded::uploaded_end`].
    pub uploaded_end: StreamOffset,
    /// See [`Uploaded::checkpoint`].
    pub checkpoint: Option<Bytes>,
    /// Its ranges in the order of offsets, without overlaps.
    pub ranges: Vec<ObjectRange>,
}

/// Offsets that were lost, by stream and first offset; the values are the offsets after them.
pub type Gaps = BTreeMap<(StreamId, StreamOffset), StreamOffset>;

/// The catalog after an object of the chain. It does not have what was recorded in the WAL since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainState {
    /// The object.
    pub head: Head,
    /// The values that hold after it. `epoch` is that of the newest delta of this WAL, or 0.
    pub header: BodyHeader,
    /// Ids below it may be given to streams.
    pub reserved: StreamId,
    /// Upper bound of the number of offsets of a batch.
    pub largest_count: u32,
    /// Streams by id.
    pub streams: BTreeMap<StreamId, ChainStream>,
    /// Objects by number.
    pub objects: BTreeMap<ObjectId, ChainObject>,
    /// Metadata by key.
    pub meta: BTreeMap<String, Bytes>,
    /// The last [`INCARNATIONS_KEPT`] runs of the store, in order.
    pub incarnations: Vec<Incarnation>,
    /// Lost offsets that the start of their stream has not passed.
    pub gaps: Gaps,
    /// The durable ends of streams with batches after their uploaded ends.
    pub hints: Hints,
}

impl ChainState {
    /// Returns the state before the first object of the chain of a store.
    pub(super) fn none(store: Uuid) -> Self {
        Self {
            head: Head { number: 0, link: 0, term: 0, is_snapshot: false },
            header: BodyHeader::none(store),
            reserved: StreamId(0),
            largest_count: 0,
            streams: BTreeMap::new(),
            objects: BTreeMap::new(),
            meta: BTreeMap::new(),
            incarnations: Vec::new(),
            gaps: Gaps::new(),
            hints: Hints::new(),
        }
    }

    /// Returns the state after the first object of a chain.
    ///
    /// # Errors
    /// The object cannot be the first one.
    pub fn first(entry: Entry) -> Result<Self, Damage> {
        if (entry.number, entry.previous, entry.kind) != (1, 0, ObjectKind::Fence) {
            return damaged("it is not the first object of a chain");
        }
        let mut state = Self::none(entry.body.header.store);
        state.apply(entry)?;
        Ok(state)
    }

    /// Applies the next object of the chain.
    ///
    /// # Errors
    /// It is not the next one of this chain. Nothing has changed.
    pub fn apply(&mut self, entry: Entry) -> Result<(), Damage> {
        self.check(&entry)?;
        self.apply_checked(entry);
        Ok(())
    }

    /// Applies an object that was checked.
    pub(super) fn apply_checked(&mut self, entry: Entry) {
        let link = entry.link();
        let Entry { number, kind, term, body, .. } = entry;
        let version_before = self.header.version;
        let newest_epoch = match kind {
            ObjectKind::Fence if body.header.wal != self.header.wal => 0,
            ObjectKind::Fence => self.header.epoch,
            ObjectKind::Delta => body.header.epoch,
        };
        let recorded = body.recorded.into_iter().flat_map(|list| list.changes);
        for change in recorded.chain(body.own) {
            self.change(change, version_before);
        }
        self.head = Head { number, link, term, is_snapshot: false };
        self.header = BodyHeader { epoch: newest_epoch, ..body.header };
        self.hints = body.hints;
    }

    /// Checks that an object extends this one. Its changes are not checked: a chain with a change
    /// that is refused would be lost.
    pub(super) fn check(&self, entry: &Entry) -> Result<(), Damage> {
        let (then, now) = (&self.header, &entry.body.header);
        if entry.number != self.head.number + 1 || entry.previous != self.head.link {
            return damaged("it does not extend the object before it");
        }
        self.check_later(entry)?;
        match entry.kind {
            ObjectKind::Fence if now.opening <= then.opening => {
                damaged("its opening is not above the one before it")
            }
            ObjectKind::Delta if now.opening != then.opening => {
                damaged("it is a delta of another opening")
            }
            ObjectKind::Delta if (now.incarnation, now.wal) != (then.incarnation, then.wal) => {
                damaged("it is a delta of another incarnation or WAL")
            }
            ObjectKind::Delta if entry.term != self.head.term => {
                damaged("it is a delta of another term")
            }
            _ => match entry.body.recorded.first() {
                Some(list) if list.version <= then.covers => {
                    damaged("it has a recorded list that is in an object before it")
                }
                _ => Ok(()),
            },
        }
    }

    /// Checks what holds for every later object of this chain, not only for the next one.
    pub(super) fn check_later(&self, entry: &Entry) -> Result<(), Damage> {
        let (then, now) = (&self.header, &entry.body.header);
        if now.store != then.store {
            return damaged(&format!("it belongs to store {}", now.store));
        }
        if now.version <= then.version {
            let (now, then) = (now.version, then.version);
            return damaged(&format!("its version {now} is not above {then}, an earlier one"));
        }
        if entry.term < self.head.term {
            return damaged("its term is below an earlier one");
        }
        Ok(())
    }

    /// Applies a change, or ignores it if its stream does not exist.
    fn change(&mut self, change: ChainChange, version_before: u64) {
        match change {
            ChainChange::CreateStream { id, kind, label } => {
                let stream = ChainStream { kind, label, ..ChainStream::default() };
                self.streams.entry(id).or_insert(stream);
            }
            ChainChange::DeleteStream { id, .. } => {
                self.streams.remove(&id);
                self.drop_gaps(id, StreamOffset(u64::MAX));
            }
            ChainChange::TrimStream { id, to, .. } => self.raise_start(id, to),
            ChainChange::PutMeta { key, value } => drop(self.meta.insert(key, value)),
            ChainChange::DeleteMeta { key } => drop(self.meta.remove(&key)),
            ChainChange::OpenStream { id, epoch } => {
                let Some(stream) = self.streams.get_mut(&id) else { return };
                stream.epoch = stream.epoch.max(epoch);
            }
            ChainChange::AddObject(object) => drop(self.objects.insert(object.id, object)),
            ChainChange::Uploaded(uploaded) => self.uploaded(uploaded),
            ChainChange::Replaced(replaced) => self.replaced(replaced),
            ChainChange::RemoveObject(object) => drop(self.objects.remove(&object)),
            ChainChange::ReserveStreams(end) => self.reserved = self.reserved.max(end),
            ChainChange::LargestCount(count) => self.largest_count = self.largest_count.max(count),
            ChainChange::BeginIncarnation(id) => {
                self.incarnations.push(Incarnation { after_version: version_before, id });
                let too_many = self.incarnations.len().saturating_sub(INCARNATIONS_KEPT);
                self.incarnations.drain(..too_many);
            }
            // The header of the same object has both.
            ChainChange::BindWal(_) | ChainChange::SetTerm(_) => {}
            ChainChange::Gap { stream, offsets } => {
                let is_ahead =
                    self.streams.get(&stream).is_some_and(|found| found.start < offsets.end);
                if is_ahead {
                    self.gaps.insert((stream, offsets.start), offsets.end);
                }
            }
        }
    }

    fn uploaded(&mut self, uploaded: Uploaded) {
        let Uploaded { stream: id, uploaded_end, start, checkpoint, range } = uploaded;
        self.raise_start(id, start);
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.uploaded_end = stream.uploaded_end.max(uploaded_end);
        stream.checkpoint = checkpoint;
        let has_place = |range: &ObjectRange| {
            range.end > stream.start
                && stream.ranges.last().is_none_or(|last| last.end <= range.start)
        };
        stream.ranges.extend(range.filter(has_place));
    }

    fn replaced(&mut self, Replaced { stream, old, new }: Replaced) {
        let Some(stream) = self.streams.get_mut(&stream) else { return };
        let is_old = |range: &ObjectRange| old.binary_search(&range.start).is_ok();
        let overlaps = |range: &ObjectRange| range.start < new.end && new.start < range.end;
        if stream.ranges.iter().any(|range| overlaps(range) && !is_old(range)) {
            return;
        }
        stream.ranges.retain(|range| !is_old(range));
        if new.end > stream.start {
            let at = stream.ranges.partition_point(|range| range.start < new.start);
            stream.ranges.insert(at, new);
        }
    }

    /// Raises the start of a stream, and drops what ends at or before it.
    fn raise_start(&mut self, id: StreamId, to: StreamOffset) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if to > stream.start {
            stream.start = to;
            let gone = stream.ranges.partition_point(|range| range.end <= to);
            stream.ranges.drain(..gone);
            self.drop_gaps(id, to);
        }
    }

    /// Returns the gaps of a stream, in the order of offsets.
    pub(crate) fn gaps_of(
        &self,
        stream: StreamId,
    ) -> impl DoubleEndedIterator<Item = Range<StreamOffset>> {
        let of_stream = (stream, StreamOffset(0))..=(stream, StreamOffset(u64::MAX));
        self.gaps.range(of_stream).map(|((_, start), end)| *start..*end)
    }

    /// Drops the gaps of a stream that end at or before `to`.
    fn drop_gaps(&mut self, stream: StreamId, to: StreamOffset) {
        if self.gaps.is_empty() {
            return;
        }
        let passed = self.gaps_of(stream).filter(|gap| gap.end <= to);
        let passed: Vec<_> = passed.map(|gap| gap.start).collect();
        for start in passed {
            self.gaps.remove(&(stream, start));
        }
    }
}

fn damaged<T>(reason: &str) -> Result<T, Damage> {
    Err(Damage::of_all(reason))
}

#[cfg(test)]
pub(super) mod tests;
