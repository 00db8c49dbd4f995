//! Makes committed offsets durable, and shows only durable ones.
//!
//! Records are appended to the offsets stream and queued here, both under one lock, so the queue is
//! in the stream's order. A record is applied to the table once the stream's durable end has passed
//! it, by whichever request accesses the table first. A request that was cancelled while it waited
//! leaves nothing unfinished.

use std::borrow::Borrow;
use std::collections::{HashSet, VecDeque};

use alluvium_stream::{NewBatch, Store, StoreError, StreamOffset};
use bytes::Bytes;
use parking_lot::Mutex;

use super::GroupsError;
use super::offsets::{Offsets, Position, Record};
use crate::state_stream::{self, KIND_OFFSETS, StateStream, Written};
use crate::state_table;

/// Catalog metadata: the id of the offsets stream, in decimal.
const STREAM_KEY: &str = "groups/offsets-stream";

/// Why a record was not appended; nothing has changed.
#[derive(Debug)]
pub(super) enum Refused {
    /// The table would exceed its bound.
    TableFull,
    /// The stream refused it. See [`OffsetLog::wait_for_space`] for a lack of space.
    Stream(state_stream::Refused),
}

/// A record with its encoding, made once for any number of attempts.
pub(super) struct Prepared {
    record: Record,
    payload: Bytes,
}

impl Prepared {
    /// See [`Record::committed`].
    pub(super) fn committed(&self) -> &[(String, Vec<Position>)] {
        self.record.committed()
    }
}

impl From<Record> for Prepared {
    fn from(record: Record) -> Self {
        let payload = Bytes::from(record.encode().into_boxed_slice());
        Self { record, payload }
    }
}

/// A record that was appended and may not be durable yet.
pub(super) struct Appended {
    append: Written,
    end: StreamOffset,
}

pub(super) struct Tail {
    /// The durable state.
    table: Offsets,
    /// Records that are not known to be durable yet, each with the stream offset after it.
    queue: VecDeque<(StreamOffset, Record)>,
}

impl Tail {
    fn apply_up_to(&mut self, durable_end: StreamOffset) {
        while let Some((end, _)) = self.queue.front()
            && *end <= durable_end
        {
            if let Some((_, record)) = self.queue.pop_front() {
                self.table.apply(record);
            }
        }
    }

    /// Returns a predicate: whether a topic has offsets in any group, or may have once all queued
    /// records are durable.
    pub(super) fn may_have_topics(&self) -> impl Fn(&str) -> bool {
        let on_their_way = self.queue.iter().flat_map(|(_, record)| record.committed());
        let on_their_way: HashSet<&str> = on_their_way.map(|(name, _)| name.as_str()).collect();
        move |topic| self.table.has_topic(topic) || on_their_way.contains(topic)
    }
}

pub(super) struct OffsetLog {
    store: Store,
    stream: StateStream,
    max_table_bytes: usize,
    tail: Mutex<Tail>,
}

impl OffsetLog {
    /// Opens the stream, or creates it, and rebuilds the table. A read-only server begins with the
    /// offsets that the writer of the store has uploaded.
    pub(super) async fn open(store: Store, max_table_bytes: usize) -> Result<Self, GroupsError> {
        let (stream, replay) = StateStream::open(&store, STREAM_KEY, KIND_OFFSETS, true).await?;
        let table = state_table::load::<Offsets>(&replay)?;
        tracing::debug!(
            groups = table.groups().count(),
            bytes = table.size_bytes(),
            replayed_batches = replay.batches.len(),
            "committed offsets are loaded"
        );
        Ok(Self {
            store,
            stream,
            max_table_bytes,
            tail: Mutex::new(Tail { table, queue: VecDeque::new() }),
        })
    }

    /// Appends a record. Does not wait; the record takes effect only when [`Self::durable`]
    /// returns.
    pub(super) fn append(&self, prepared: &Prepared) -> Result<Appended, Refused> {
        self.append_bounded(&mut self.tail.lock(), prepared)
    }

    /// Appends the record that `choose` returns, if any. No other record is appended between its
    /// check and that. So if topics are checked by their ids, either the removal of a deleted
    /// topic's offsets finds the record, or `choose` finds no topic.
    pub(super) fn append_chosen<P: Borrow<Prepared>>(
        &self,
        choose: impl FnOnce(&Tail) -> Option<P>,
    ) -> Result<Option<Appended>, Refused> {
        let mut tail = self.tail.lock();
        let Some(prepared) = choose(&tail) else { return Ok(None) };
        self.append_bounded(&mut tail, prepared.borrow()).map(Some)
    }

    fn append_bounded(&self, tail: &mut Tail, prepared: &Prepared) -> Result<Appended, Refused> {
        tail.apply_up_to(self.stream.durable_end());
        // Queued records are not counted: what they can add is bounded by the window of the
        // write-ahead log.
        let growth = tail.table.growth_bytes(&prepared.record);
        if !self.has_space_for(&tail.table, growth) {
            return Err(Refused::TableFull);
        }
        self.append_to(tail, prepared)
    }

    /// Appends a record that was decided before; the bound does not apply to it.
    pub(super) fn append_decided(&self, prepared: &Prepared) -> Result<Appended, Refused> {
        self.append_to(&mut self.tail.lock(), prepared)
    }

    /// Whether the bound allows to decide a commit.
    pub(super) fn has_space(&self, group: &str, topics: &[(String, Vec<Position>)]) -> bool {
        self.read(|table| self.has_space_for(table, table.growth_by_commit(group, topics)))
    }

    /// Records that only overwrite or remove are always accepted.
    fn has_space_for(&self, table: &Offsets, growth_bytes: usize) -> bool {
        growth_bytes == 0 || table.size_bytes() + growth_bytes <= self.max_table_bytes
    }

    fn append_to(&self, tail: &mut Tail, prepared: &Prepared) -> Result<Appended, Refused> {
        let base = self.stream.next_offset();
        let batch =
            NewBatch { base, count: 1, max_timestamp_ms: -1, payload: prepared.payload.clone() };
        let append = self
            .stream
            .append(batch)
            .map_err(|e| Refused::Stream(state_stream::Refused::from(e)))?;
        let end = StreamOffset(base.0 + 1);
        tail.queue.push_back((end, prepared.record.clone()));
        Ok(Appended { append, end })
    }

    /// Waits until the record is durable; then it is in the table as well.
    pub(super) async fn durable(&self, appended: Appended) -> Result<(), StoreError> {
        appended.append.await?;
        self.tail.lock().apply_up_to(appended.end);
        Ok(())
    }

    /// Reads the durable state.
    pub(super) fn read<R>(&self, read: impl FnOnce(&Offsets) -> R) -> R {
        let mut tail = self.tail.lock();
        tail.apply_up_to(self.stream.durable_end());
        read(&tail.table)
    }

    /// Returns [`Offsets::expired`], unless a record of the group is queued: that may renew an old
    /// offset.
    pub(super) fn expired(&self, group: &str, cutoff_ms: i64) -> Option<Record> {
        let mut tail = self.tail.lock();
        tail.apply_up_to(self.stream.durable_end());
        let nothing_queued = tail.queue.iter().all(|(_, record)| record.group() != Some(group));
        tail.table.expired(group, cutoff_ms).filter(|_| nothing_queued)
    }

    /// Whether the group has offsets or queued records.
    pub(super) fn mentions(&self, group: &str) -> bool {
        let tail = self.tail.lock();
        tail.table.group(group).is_some()
            || tail.queue.iter().any(|(_, record)| record.group() == Some(group))
    }

    /// Resolves when an append that failed for lack of space may succeed.
    pub(super) async fn wait_for_space(&self) {
        self.store.wait_for_space().await;
    }
}
