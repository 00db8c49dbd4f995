//! A stream's writer: append, trim, close, delete. How a writer replaces an earlier one:
//! `docs/format/stream-record.md`, "Writers of a stream".

use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use bytes::Bytes;

use crate::catalog::Change;
use crate::ends::LargestCount;
use crate::error::StoreError;
use crate::publish::Publication;
use crate::record;
use crate::shared::Shared;
use crate::store::Store;
use crate::stream::Stream;
use crate::tail::{self, Cached, Tail};
use crate::types::{NewBatch, StreamEpoch, StreamId, StreamOffset};

/// Why a batch was not appended. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// There is no space now: await [`crate::Store::wait_for_space`] and try again.
    #[error("the write-ahead log or the log cache is full")]
    Full,
    /// The batch can never be appended.
    #[error("a batch of {len_bytes} bytes exceeds the limit of {max_bytes}")]
    TooLarge {
        /// Length of the payload.
        len_bytes: u64,
        /// See [`crate::Store::max_batch_bytes`].
        max_bytes: u64,
    },
    /// The batch does not start at the stream's next offset.
    #[error("the batch starts at {got}, the stream's next offset is {expected}")]
    NotNext {
        /// The stream's next offset.
        expected: StreamOffset,
        /// The first offset of the batch.
        got: StreamOffset,
    },
    /// A newer writer has opened the stream, so this one cannot append any more.
    #[error(
        "the stream was opened with epoch {newest}: a writer with epoch {epoch} can no longer \
         append"
    )]
    Fenced {
        /// The epoch of this writer.
        epoch: StreamEpoch,
        /// The newest epoch.
        newest: StreamEpoch,
    },
    /// The stream was deleted.
    #[error("the stream was deleted")]
    Deleted,
    /// The store has failed or is closed: nothing can be appended any more.
    #[error("{0}")]
    Failed(StoreError),
}

/// The right to write to a stream, until the stream is opened with a newer epoch. It is also a
/// [`Stream`] for reading.
pub struct StreamWriter {
    stream: Stream,
    shared: Arc<Shared>,
    epoch: StreamEpoch,
}

impl Deref for StreamWriter {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Store {
    /// Opens the stream for writing. Once this returns, also after a crash, no writer with an older
    /// epoch can change the stream; what such writers have appended is durable and lies before
    /// [`Stream::next_offset`].
    ///
    /// The component that appoints writers ensures that no two of them have the same epoch. Opening
    /// the stream again with its current epoch costs nothing and does not fence the holder; a newer
    /// epoch costs a commit of the catalog. Dropping the future does not stop a commit that has
    /// begun. This call does not detect that the store has failed; an append does.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if the stream was opened with a newer epoch;
    /// [`StoreError::InvalidChange`] if there is no such stream; [`StoreError::ReadOnly`]; the
    /// error of a failed commit or log, in which case the epoch may be the newest even so.
    pub async fn open_stream(
        &self,
        id: StreamId,
        epoch: StreamEpoch,
    ) -> Result<StreamWriter, StoreError> {
        let stream = self.stream(id).ok_or_else(|| StoreError::no_stream(id))?;
        let shared = self.owner()?.clone();
        if stream.newest_epoch() < epoch {
            shared.open_stream(id, epoch).await?;
        }
        let writer = StreamWriter { stream, shared, epoch };
        writer.wait_durable().await?;
        Ok(writer)
    }
}

impl StreamWriter {
    /// Returns the epoch with which the stream was opened.
    pub fn epoch(&self) -> StreamEpoch {
        self.epoch
    }

    /// Appends a batch; the future completes when it and everything before it is durable. Does not
    /// block or wait; dropping the future changes nothing.
    ///
    /// # Panics
    /// If the batch has no records or its offsets pass `u64::MAX`: defects of the caller.
    pub fn append(&self, batch: NewBatch) -> Result<Append, AppendError> {
        let NewBatch { base, count, max_timestamp_ms, payload } = batch;
        assert!(
            count > 0 && base.0.checked_add(u64::from(count)).is_some(),
            "{count} records at offset {base}"
        );
        let (shared, state) = (&self.shared, &self.stream.state);
        if let Some(failure) = shared.failure() {
            return Err(AppendError::Failed(failure));
        }
        let len_bytes = payload.len() as u64;
        if len_bytes > shared.max_batch_bytes {
            return Err(AppendError::TooLarge { len_bytes, max_bytes: shared.max_batch_bytes });
        }
        // Before the attempt: a refused writer must not miss an event after this.
        let seen = shared.space.generation();
        if count > shared.ends.largest_count() {
            return Err(shared.raise_largest_count(count, seen));
        }
        let cost_bytes = tail::cost_bytes(payload.len());
        if !shared.cache.reserve(cost_bytes) {
            // A writer that can never append again must not wait for space.
            self.check(&state.tail.lock())?;
            return Err(shared.refuse_until_upload(seen));
        }
        let len = u32::try_from(len_bytes).expect("at most what a record holds");
        let header = record::encode_header(state.id, base, count, max_timestamp_ms, len);
        let mut tail = state.tail.lock();
        let appended = if let Err(refused) = self.check(&tail) {
            Err(refused)
        } else if base != tail.next {
            Err(AppendError::NotNext { expected: tail.next, got: base })
        } else if base.0 + u64::from(count) > tail.append_limit(shared.catalog.version()).0 {
            Err(shared.refuse_until_upload(seen))
        } else {
            shared.append_to_wal(&header, &payload, seen)
        };
        let done = match appended {
            Ok(done) => done,
            Err(error) => {
                drop(tail);
                shared.cache.unreserve(cost_bytes);
                if let AppendError::Failed(cause @ StoreError::Wal(_)) = &error {
                    shared.fail(cause.clone());
                }
                return Err(error);
            }
        };
        let log_end = done.end();
        shared.cache.pin(cost_bytes);
        let crc32c = done.body_crc32c();
        tail.push(Cached { base, count, max_timestamp_ms, log_end, payload, crc32c });
        if !tail.watchers.is_empty() && !tail.wake_queued {
            tail.wake_queued = true;
            shared.wakes.queue(log_end, state.clone());
        }
        drop(tail);
        shared.ends.appended();
        shared.request_upload_if_due(log_end);
        Ok(Append { done })
    }

    /// Removes the records before `to`, which may be at most the durable end. When it returns, they
    /// are gone, also after a restart. Does nothing if the stream starts at `to` or later.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if a newer writer has opened the stream; see [`Store::commit`].
    pub async fn trim(&self, to: StreamOffset) -> Result<(), StoreError> {
        let (id, epoch) = (self.stream.id(), self.epoch);
        self.shared.commit(vec![Change::TrimStream { id, epoch, to }]).await
    }

    /// Stops writing. What was appended is durable when it returns. Readers continue, and the
    /// stream can be opened again with this epoch or a newer one.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if a newer writer has opened the stream;
    /// [`StoreError::InvalidChange`] if it was deleted; the error of a failed log. The handle is
    /// consumed in any case.
    pub async fn close(self) -> Result<(), StoreError> {
        self.wait_durable().await
    }

    /// Deletes the stream with all its records, durably. Use [`Store::commit`] to delete it
    /// together with other changes.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if a newer writer has opened the stream; see [`Store::commit`].
    pub async fn delete(self) -> Result<(), StoreError> {
        let (id, epoch) = (self.stream.id(), self.epoch);
        self.shared.commit(vec![Change::DeleteStream { id, epoch }]).await
    }

    /// Waits until everything in the stream is durable.
    async fn wait_durable(&self) -> Result<(), StoreError> {
        let (shared, state) = (&self.shared, &self.stream.state);
        let checked = {
            let tail = state.tail.lock();
            self.check(&tail).map(|()| tail.log_end())
        };
        let log_end = checked.map_err(|refused| match refused {
            AppendError::Fenced { epoch, newest } => {
                StoreError::Fenced { stream: state.id, epoch, newest }
            }
            _ => StoreError::no_stream(state.id),
        })?;
        Ok(shared.wal.wait_durable(log_end).await?)
    }

    /// Fails if this is not the stream's writer.
    fn check(&self, tail: &Tail) -> Result<(), AppendError> {
        match tail {
            Tail { deleted: true, .. } => Err(AppendError::Deleted),
            Tail { epoch: newest, .. } if *newest != self.epoch => {
                Err(AppendError::Fenced { epoch: self.epoch, newest: *newest })
            }
            _ => Ok(()),
        }
    }
}

impl Shared {
    /// Appends to the WAL, or refuses the batch and arranges for a wake-up.
    fn append_to_wal(
        &self,
        header: &[u8],
        payload: &Bytes,
        seen: u64,
    ) -> Result<alluvium_wal::Append, AppendError> {
        use alluvium_wal::AppendError as Wal;
        if !self.has_space_for((header.len() + payload.len()) as u64) {
            return Err(self.refuse_until_upload(seen));
        }
        let refused = match self.wal.append_shared(&[header], payload) {
            Ok(append) => return Ok(append),
            Err(Wal::OverCapacity { .. } | Wal::WindowFull { .. }) => {
                // Try again after creating the future, so that space freed in between is not
                // missed.
                let future = self.wal.wait_space();
                match self.wal.append_shared(&[header], payload) {
                    Ok(append) => return Ok(append),
                    Err(refused) => {
                        self.wakes.wait_for_wal(future);
                        refused
                    }
                }
            }
            Err(refused) => refused,
        };
        Err(match refused {
            Wal::OverCapacity { .. } => self.refuse_until_upload(seen),
            Wal::WindowFull { .. } => {
                self.numbers.refused_appends.fetch_add(1, Ordering::Relaxed);
                self.space.full(seen);
                AppendError::Full
            }
            Wal::Failed(error) => AppendError::Failed(StoreError::Wal(error)),
            Wal::Closed => AppendError::Failed(StoreError::Closed),
            other => {
                AppendError::Failed(StoreError::Failed(format!("the WAL refused a batch: {other}")))
            }
        })
    }

    /// Refuses a batch with more records than recovery allows for, until the catalog records the
    /// new maximum. That is rare: the number only doubles and never decreases.
    fn raise_largest_count(self: &Arc<Self>, count: u32, seen: u64) -> AppendError {
        self.numbers.refused_appends.fetch_add(1, Ordering::Relaxed);
        self.space.full(seen);
        if self.ends.begin_to_raise() {
            let shared = self.clone();
            self.objects.background().spawn_normal(async move {
                let largest = Publication::LargestCount(LargestCount::at_least(count));
                if let Err(error) = shared.publish(largest).await {
                    tracing::warn!("no batch of {count} records can be appended yet: {error}");
                    tokio::time::sleep(shared.options.retry_max).await;
                }
                shared.ends.end_to_raise();
                shared.space.open();
            });
        }
        self.failure().map_or(AppendError::Full, AppendError::Failed)
    }

    /// Refuses a batch that needs space which an upload must free first.
    fn refuse_until_upload(&self, seen: u64) -> AppendError {
        self.numbers.refused_appends.fetch_add(1, Ordering::Relaxed);
        self.space.full(seen);
        self.request_upload();
        self.failure().map_or(AppendError::Full, AppendError::Failed)
    }
}

/// Completes when the batch, and everything before it in the log, is durable.
#[must_use = "an append is acknowledged by its future"]
pub struct Append {
    done: alluvium_wal::Append,
}

impl Future for Append {
    type Output = Result<(), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.done).poll(cx).map_err(StoreError::Wal)
    }
}
