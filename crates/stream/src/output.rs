//! An object that is being written: its bytes, its destination, and what the catalog records about
//! it.

use alluvium_wal::LogOffset;
use bytes::Bytes;
use object_store::PutPayload;
use uuid::Uuid;

use crate::catalog::{ObjectInfo, ObjectRange};
use crate::clock::unix_ms;
use crate::naming::object_name;
use crate::object::{Encoder, Origin, REBUILD, Summary};
use crate::object_error::ObjectError;
use crate::objects::{StoreHandle, Writer};
use crate::shared::Shared;
use crate::tail::StreamState;
use crate::types::{Batch, ObjectId};

/// An attempt to write an object. Each has its own name, since it is unknown what an earlier
/// attempt left behind.
pub(crate) struct Attempt {
    pub(crate) id: ObjectId,
    pub(crate) nonce: Uuid,
    pub(crate) name: String,
    pub(crate) by: Author,
}

/// The run of the store that writes an object.
#[derive(Clone, Copy)]
pub(crate) struct Author {
    pub(crate) store: Uuid,
    pub(crate) incarnation: Uuid,
    pub(crate) opening: u32,
    pub(crate) term: u32,
}

/// Where the batches of an object come from.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// An upload of everything below this log offset.
    Upload { cut: LogOffset },
    /// Other objects. Generation and time of creation are those of the new one.
    Objects { generation: u8, created_at_ms: i64 },
    /// The owner of the streams, for holes that a rebuild has found.
    Rebuild,
}

impl Attempt {
    /// Creates an attempt. Its name counts as being uploaded until the object is committed or the
    /// attempt is [given up](give_up), so that the object cleaner leaves it alone.
    pub(crate) fn new(shared: &Shared, id: ObjectId) -> Self {
        let nonce = Uuid::new_v4();
        let name = object_name(shared.catalog.store, id, nonce);
        shared.object_table.lock().uploading.insert(name.clone());
        let catalog = &shared.catalog;
        let by = Author {
            store: catalog.store,
            incarnation: catalog.incarnation,
            opening: catalog.opening,
            term: catalog.term,
        };
        Self { id, nonce, name, by }
    }
}

/// Abandons the object of this name; `removed` is the result of removing it.
pub(crate) fn give_up(shared: &Shared, name: &str, removed: Result<(), ObjectError>) {
    if let Err(left) = removed {
        tracing::debug!("could not remove an abandoned object: {left}");
    }
    shared.object_table.lock().uploading.remove(name);
}

/// Encodes and writes an object. Nothing reaches the object store before the first block is
/// complete.
pub(crate) struct Output<'a> {
    attempt: &'a Attempt,
    /// The header, until it is written with the first block or at the end.
    header: Option<Bytes>,
    /// The encoder, until the end.
    encoder: Option<Encoder>,
    writer: Writer<'a>,
    source: Source,
    payload_bytes: u64,
}

impl<'a> Output<'a> {
    /// Creates an output for about this much payload.
    pub(crate) fn new(
        handle: StoreHandle<'a>,
        attempt: &'a Attempt,
        source: Source,
        payload_bytes: u64,
    ) -> Self {
        let (encoder, header) = Encoder::new(attempt.nonce);
        let writer = Writer::new(handle, &attempt.name, payload_bytes);
        let (header, encoder) = (Some(header), Some(encoder));
        Self { attempt, header, encoder, writer, source, payload_bytes: 0 }
    }

    /// Adds a batch, with its payload's checksum if known, and extends `range` by it. Streams must
    /// come in ascending order, and the batches of each in offset order. A returned block must be
    /// [written](Self::write) before the next batch is added.
    pub(crate) fn push(
        &mut self,
        stream: &StreamState,
        batch: &Batch,
        payload_crc32c: Option<u32>,
        range: &mut Option<ObjectRange>,
    ) -> Option<PutPayload> {
        let range = range.get_or_insert(ObjectRange {
            object: self.attempt.id,
            start: batch.base,
            end: batch.base,
            payload_bytes: 0,
            max_timestamp_ms: batch.max_timestamp_ms,
        });
        range.end = batch.end();
        range.payload_bytes += batch.payload.len() as u64;
        range.max_timestamp_ms = range.max_timestamp_ms.max(batch.max_timestamp_ms);
        self.payload_bytes += batch.payload.len() as u64;
        let encoder = self.encoder.as_mut().expect("it is not finished");
        encoder.begin(stream.id, stream.kind, &stream.label);
        encoder.push(batch, payload_crc32c)
    }

    /// Writes a block returned by [`Self::push`].
    pub(crate) async fn write(&mut self, block: PutPayload) -> Result<(), ObjectError> {
        if let Some(header) = self.header.take() {
            self.writer.write(header.into()).await?;
        }
        self.writer.write(block).await
    }

    /// Completes the object; it is durable when this succeeds. The time of creation of an upload is
    /// now.
    pub(crate) async fn finish(&mut self) -> Result<ObjectInfo, ObjectError> {
        let encoder = self.encoder.take().expect("it is finished once");
        let (generation, created_at_ms, cut) = match self.source {
            Source::Upload { cut } => (0, unix_ms(), cut),
            Source::Rebuild => (0, unix_ms(), LogOffset(0)),
            Source::Objects { generation, created_at_ms } => {
                (generation, created_at_ms, LogOffset(0))
            }
        };
        let Author { store, incarnation, opening, term } = self.attempt.by;
        let origin = Origin {
            store,
            incarnation,
            opening,
            term,
            generation: match self.source {
                Source::Rebuild => REBUILD,
                _ => generation.into(),
            },
            created_at_ms,
            cut,
        };
        let (last, tail, Summary { size_bytes, index }) = encoder.finish(&origin);
        if let Some(last) = last {
            self.write(last).await?;
        }
        self.write(tail.into()).await?;
        self.writer.finish().await?;
        Ok(ObjectInfo {
            id: self.attempt.id,
            name: self.attempt.name.clone(),
            size_bytes,
            format: u8::try_from(index.format).expect("a small number"),
            index_position: index.position,
            index_bytes: index.len_bytes,
            index_crc32c: index.crc32c,
            created_at_ms,
            generation,
            payload_bytes: self.payload_bytes,
        })
    }

    /// Abandons the object and removes what was written of it.
    pub(crate) async fn give_up(self, shared: &Shared) {
        let name = &self.attempt.name;
        give_up(shared, name, self.writer.abort().await);
    }
}
