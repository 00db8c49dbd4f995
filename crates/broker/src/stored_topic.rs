//! Reads the committed records of a topic in a store, as batches that another topic imports: at
//! their offsets, and without their producers. `docs/decisions/0028-import-at-given-offsets.md`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use alluvium_stream::{FetchError, Store, StreamOffset};
use uuid::Uuid;

use crate::exported::{BadBatch, Exported};
use crate::partition::Partition;
use crate::producer_state::Totals;
use crate::topics::{META_PREFIX, Stored};

/// A topic of a store that this process follows ([`Store::follow`]).
pub struct StoredTopic {
    /// Its id.
    pub id: Uuid,
    /// Its settings, as far as they were set.
    pub configs: BTreeMap<String, String>,
    partitions: Vec<Arc<Partition>>,
}

/// Why a topic cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The store cannot be read.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The records of a batch cannot be read.
    #[error(transparent)]
    Batch(#[from] BadBatch),
}

impl StoredTopic {
    /// Opens a topic; `None` if there is none of this name.
    ///
    /// # Errors
    /// Its entry in the catalog, or the state of a partition, cannot be read.
    pub fn open(store: &Store, name: &str) -> Result<Option<Self>, String> {
        let Some(entry) = store.meta_value(&format!("{META_PREFIX}{name}")) else {
            return Ok(None);
        };
        let Stored { id, streams, configs } = serde_json::from_slice(&entry)
            .map_err(|error| format!("topic {name}: its catalog entry: {error}"))?;
        let totals = Arc::new(Totals::default());
        let partitions = streams.into_iter().enumerate().map(|(index, stream)| {
            let failed = |reason: String| format!("topic {name}, partition {index}: {reason}");
            let found = store.stream(stream);
            let stream = found.ok_or_else(|| failed(format!("no stream {stream}")))?;
            let partition = Partition::follow(stream, store, totals.clone());
            partition.map(Arc::new).map_err(|error| failed(error.to_string()))
        });
        Ok(Some(Self { id, configs, partitions: partitions.collect::<Result<_, _>>()? }))
    }

    /// Returns the names of all topics of a store.
    pub fn names(store: &Store) -> Vec<String> {
        let names = store.meta(META_PREFIX).into_iter();
        names.map(|(key, _)| key[META_PREFIX.len()..].to_owned()).collect()
    }

    /// Returns the number of partitions.
    pub fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// Returns the offsets that readers of committed records see: from the log start up to the last
    /// stable offset.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn offsets(&self, partition: usize) -> Range<u64> {
        let partition = &self.partitions[partition];
        let end = partition.last_stable_offset();
        partition.stream.start_offset().0.min(end.0)..end.0
    }

    /// Returns the end of a partition, with records of transactions that are open.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn end(&self, partition: usize) -> u64 {
        self.partitions[partition].stream.durable_end().0
    }

    /// Returns the payload of all batches of a partition, in bytes.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn size_bytes(&self, partition: usize) -> u64 {
        self.partitions[partition].stream.size_bytes()
    }

    /// Reads batches from `from` on, about `max_bytes` of them, up to `end` at most, which is not
    /// beyond the last stable offset. What precedes the log start counts as offsets without
    /// records.
    ///
    /// # Errors
    /// A read fails, or a batch cannot be split.
    ///
    /// # Panics
    /// If there is no such partition.
    pub async fn read(
        &self,
        partition: usize,
        from: u64,
        end: u64,
        max_bytes: usize,
    ) -> Result<Exported, ExportError> {
        let partition = &self.partitions[partition];
        let mut exported = Exported::from(from);
        let start = partition.stream.start_offset().0;
        if from < start {
            exported.cover(start.min(end));
            return Ok(exported);
        }
        loop {
            let snapshot = partition.read_snapshot();
            let fetched = partition.stream.fetch(StreamOffset(from), max_bytes).await?;
            let mut batches = fetched.batches;
            // Everything before it was read, or has no record.
            let read_to = batches.last().map_or(end, |batch| batch.end().0).min(end);
            batches.retain(|batch| batch.base.0 < end);
            let among = partition.aborted_among(StreamOffset(from), &batches, snapshot);
            // Some were dropped meanwhile: their records are gone, too.
            let Some(aborted) = among else { continue };
            let aborted = aborted.iter().map(|it| (it.producer_id, it.first_offset));
            let batches = batches.into_iter().map(|batch| batch.payload);
            exported.add(batches, aborted.collect(), end)?;
            exported.cover(read_to);
            return Ok(exported);
        }
    }
}
