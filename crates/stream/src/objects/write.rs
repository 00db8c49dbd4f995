//! Writing, in bounded memory.

use bytes::Bytes;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart};

use super::{ObjectError, within};

/// Objects up to this size are one PUT; larger ones are written in parts of this size. At least 5 MiB, S3's minimum.
const PART_BYTES: usize = 8 << 20;
/// Parts in flight: with the one being filled, the memory that an upload takes.
const PARTS_IN_FLIGHT: usize = 4;

/// Writes one object: a small one with a single PUT, a large one in parts, so that memory stays bounded.
pub(crate) struct Writer<'a> {
    store: &'a dyn ObjectStore,
    name: &'a str,
    small: Vec<Bytes>,
    small_bytes: usize,
    large: Option<WriteMultipart>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(store: &'a dyn ObjectStore, name: &'a str) -> Self {
        Self { store, name, small: Vec::new(), small_bytes: 0, large: None }
    }

    pub(crate) async fn write(&mut self, piece: Bytes) -> Result<(), ObjectError> {
        if let Some(large) = &mut self.large {
            within(self.name, large.wait_for_capacity(PARTS_IN_FLIGHT)).await?;
            large.put(piece);
            return Ok(());
        }
        self.small_bytes += piece.len();
        self.small.push(piece);
        if self.small_bytes > PART_BYTES {
            let upload = within(self.name, self.store.put_multipart(&self.name.into())).await?;
            let large = self.large.insert(WriteMultipart::new_with_chunk_size(upload, PART_BYTES));
            self.small.drain(..).for_each(|piece| large.put(piece));
        }
        Ok(())
    }

    /// The object is complete and durable when this succeeds. After an error, here or in [`Self::write`], there may be an
    /// object or parts of one, and [`Self::abort`] should be tried.
    pub(crate) async fn finish(&mut self) -> Result<(), ObjectError> {
        let (store, name) = (self.store, self.name);
        let result = match self.large.take() {
            Some(large) => within(name, large.finish()).await,
            None => {
                let payload = PutPayload::from_iter(self.small.drain(..));
                within(name, store.put(&name.into(), payload)).await
            }
        };
        result.map(drop)
    }

    /// Give up: remove what was written, as far as the object store lets us.
    pub(crate) async fn abort(self) -> Result<(), ObjectError> {
        if let Some(large) = self.large {
            within(self.name, large.abort()).await?;
        }
        match within(self.name, self.store.delete(&self.name.into())).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}
