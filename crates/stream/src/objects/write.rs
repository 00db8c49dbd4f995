//! Writes objects in bounded memory.

use std::collections::VecDeque;
use std::panic::resume_unwind;

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload};
use tokio::task::{JoinError, JoinSet};

use super::{Request, StoreHandle, within};
use crate::object_error::ObjectError;
use crate::request_class::RequestClass;

/// Objects up to this size are one PUT; larger ones are written in parts of exactly this size,
/// except the last. At least 5 MiB, S3's minimum.
const PART_BYTES: usize = 8 << 20;
/// S3's limit on the number of parts of an object.
const PARTS_MAX: u64 = 10_000;
/// Parts in flight: with the one being filled, they are the memory of an upload.
const PARTS_IN_FLIGHT: usize = 4;
/// Parts in flight for object compaction, which is not urgent, writes two such objects at a time,
/// and also has its sources in memory.
const COMPACTED_PARTS_IN_FLIGHT: usize = 2;

/// Writes one object: a small one with a single PUT, a large one in parts, so that memory stays
/// bounded. Parts are also sent while the caller does not write. The store's client retries a
/// failed part; when it gives up, the object has failed.
pub(crate) struct Writer<'a> {
    handle: StoreHandle<'a>,
    name: &'a str,
    part_bytes: usize,
    /// Bytes that are in no part yet.
    pieces: VecDeque<Bytes>,
    pieces_bytes: usize,
    large: Option<Large>,
}

/// An object that is written in parts.
struct Large {
    upload: Box<dyn MultipartUpload>,
    /// Parts in flight. Dropping this cancels them.
    parts: JoinSet<Result<(), ObjectError>>,
}

impl<'a> Writer<'a> {
    /// Creates a writer for about this much payload. The size of parts is such that S3 accepts
    /// their number.
    pub(crate) fn new(handle: StoreHandle<'a>, name: &'a str, payload_bytes: u64) -> Self {
        let (pieces, pieces_bytes) = (VecDeque::new(), 0);
        let part_bytes = part_bytes(payload_bytes);
        Self { handle, name, part_bytes, pieces, pieces_bytes, large: None }
    }

    pub(crate) async fn write(&mut self, block: PutPayload) -> Result<(), ObjectError> {
        let bytes = block.content_length();
        self.handle.acquire(bytes as u64).await;
        self.pieces_bytes += bytes;
        self.pieces.extend(block);
        // If the data fills one part exactly, it may be all there is, and a single PUT suffices.
        while self.pieces_bytes > self.part_bytes {
            let payload = self.take(self.part_bytes);
            self.send(payload).await?;
        }
        Ok(())
    }

    /// Removes and returns the next `len` bytes without copying them.
    fn take(&mut self, len: usize) -> PutPayload {
        let mut taken = Vec::new();
        let mut missing = len;
        while missing > 0 {
            let mut piece = self.pieces.pop_front().expect("there are so many bytes");
            if piece.len() > missing {
                self.pieces.push_front(piece.split_off(missing));
            }
            missing -= piece.len();
            taken.push(piece);
        }
        self.pieces_bytes -= len;
        PutPayload::from_iter(taken)
    }

    /// Starts sending a part, once fewer than the maximum are in flight.
    async fn send(&mut self, payload: PutPayload) -> Result<(), ObjectError> {
        let large = match &mut self.large {
            Some(large) => large,
            none => {
                let path = self.name.into();
                let begun = self.handle.store.put_multipart(&path);
                let upload = within(Request::Begin, self.name, begun).await?;
                none.insert(Large { upload, parts: JoinSet::new() })
            }
        };
        while large.parts.len() >= parts_in_flight(self.handle.class) {
            arrived(self.name, large.parts.join_next().await)?;
        }
        let (name, part) = (self.name.to_owned(), large.upload.put_part(payload));
        large.parts.spawn(async move { within(Request::Part, &name, part).await });
        Ok(())
    }

    /// Completes the object; it is durable when this succeeds. After an error, here or in
    /// [`Self::write`], there may be an object or parts of one; the caller should try
    /// [`Self::abort`].
    pub(crate) async fn finish(&mut self) -> Result<(), ObjectError> {
        let rest = self.take(self.pieces_bytes);
        if self.large.is_none() {
            let path = self.name.into();
            let put = self.handle.store.put(&path, rest);
            return within(Request::Put, self.name, put).await.map(drop);
        }
        if rest.content_length() > 0 {
            self.send(rest).await?;
        }
        let large = self.large.as_mut().expect("it was there before");
        while !large.parts.is_empty() {
            arrived(self.name, large.parts.join_next().await)?;
        }
        within(Request::Complete, self.name, large.upload.complete()).await?;
        self.large = None;
        Ok(())
    }

    /// Removes the parts of an object that was not completed. An object that was completed without
    /// an answer stays.
    pub(crate) async fn abort_parts(&mut self) -> Result<(), ObjectError> {
        let Some(Large { mut upload, mut parts }) = self.large.take() else { return Ok(()) };
        // A part that arrives after the abort would remain.
        parts.shutdown().await;
        within(Request::Abort, self.name, upload.abort()).await
    }

    /// Removes what was written, as far as the object store allows it. Remaining parts cost money
    /// until the bucket's lifecycle rule removes them.
    pub(crate) async fn abort(mut self) -> Result<(), ObjectError> {
        let result = self.abort_parts().await;
        // A request without a response may have created the object even so.
        match within(Request::Delete, self.name, self.handle.store.delete(&self.name.into())).await
        {
            Err(error) if !error.is_not_found() => Err(error),
            _ => match result {
                Err(error) if !error.is_not_found() => Err(error),
                _ => Ok(()),
            },
        }
    }
}

/// Returns the size of the parts of an object with this much payload; overhead may double it.
fn part_bytes(payload_bytes: u64) -> usize {
    let least = payload_bytes.saturating_mul(2).div_ceil(PARTS_MAX);
    usize::try_from(least).unwrap_or(usize::MAX).max(PART_BYTES)
}

fn parts_in_flight(class: RequestClass) -> usize {
    match class {
        RequestClass::Compaction => COMPACTED_PARTS_IN_FLIGHT,
        RequestClass::Upload | RequestClass::Read | RequestClass::CleanUp => PARTS_IN_FLIGHT,
    }
}

/// Returns the result of a part.
fn arrived(
    name: &str,
    part: Option<Result<Result<(), ObjectError>, JoinError>>,
) -> Result<(), ObjectError> {
    match part.map(|part| part.map_err(JoinError::try_into_panic)) {
        None => Ok(()),
        Some(Ok(result)) => result,
        Some(Err(Ok(panic))) => resume_unwind(panic),
        // The runtime is shutting down.
        Some(Err(Err(cancelled))) => Err(ObjectError::failed(name, cancelled.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::time::Duration;

    use async_trait::async_trait;
    use futures::stream::BoxStream;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, ObjectMeta, ObjectStore,
        PutMultipartOptions, PutOptions, PutResult, Result, UploadPart,
    };
    use parking_lot::Mutex;

    use super::*;
    use crate::bandwidth::Transfers;

    /// The results of multipart uploads, and the faults to inject.
    #[derive(Debug, Default)]
    struct Log {
        parts: Mutex<Vec<usize>>,
        in_flight: AtomicU32,
        most_in_flight: AtomicU32,
        /// The number of the part that fails.
        failing: Option<usize>,
        /// Whether the completion of an upload gets no response.
        silent: bool,
        aborted: AtomicBool,
    }

    #[derive(Debug)]
    struct Store(InMemory, Arc<Log>);

    #[derive(Debug)]
    struct Upload(Box<dyn MultipartUpload>, Arc<Log>);

    #[async_trait]
    impl MultipartUpload for Upload {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            let log = self.1.clone();
            log.parts.lock().push(data.content_length());
            let fails = log.failing == Some(log.parts.lock().len());
            let put = self.0.put_part(data);
            Box::pin(async move {
                let now = log.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
                log.most_in_flight.fetch_max(now, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_secs(1)).await;
                log.in_flight.fetch_sub(1, Ordering::SeqCst);
                if fails {
                    return Err(object_store::Error::Generic {
                        store: "Test",
                        source: "no".into(),
                    });
                }
                put.await
            })
        }

        async fn complete(&mut self) -> Result<PutResult> {
            if self.1.silent {
                std::future::pending::<()>().await;
            }
            self.0.complete().await
        }

        async fn abort(&mut self) -> Result<()> {
            assert_eq!(self.1.in_flight.load(Ordering::SeqCst), 0, "a part may still arrive");
            self.1.aborted.store(true, Ordering::SeqCst);
            self.0.abort().await
        }
    }

    impl std::fmt::Display for Store {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("test")
        }
    }

    #[async_trait]
    impl ObjectStore for Store {
        async fn put_opts(&self, to: &Path, data: PutPayload, o: PutOptions) -> Result<PutResult> {
            self.0.put_opts(to, data, o).await
        }
        async fn put_multipart_opts(
            &self,
            to: &Path,
            options: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            let upload = self.0.put_multipart_opts(to, options).await?;
            Ok(Box::new(Upload(upload, self.1.clone())))
        }
        async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
            self.0.get_opts(from, options).await
        }
        fn delete_stream(
            &self,
            names: BoxStream<'static, Result<Path>>,
        ) -> BoxStream<'static, Result<Path>> {
            self.0.delete_stream(names)
        }
        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
            self.0.list(prefix)
        }
        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.0.list_with_delimiter(prefix).await
        }
        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
            self.0.copy_opts(from, to, options).await
        }
    }

    fn pattern(len: usize) -> Bytes {
        let mut bytes: Vec<u8> = (0..251).collect::<Vec<_>>().repeat(len / 251 + 1);
        bytes.truncate(len);
        bytes.into()
    }

    fn writer<'a>(store: &'a Store, unlimited: &'a Transfers) -> Writer<'a> {
        writer_for(RequestClass::Upload, store, unlimited)
    }

    fn writer_for<'a>(
        class: RequestClass,
        store: &'a Store,
        unlimited: &'a Transfers,
    ) -> Writer<'a> {
        Writer::new(StoreHandle { store, transfers: unlimited, class }, "a", 0)
    }

    #[test]
    fn an_object_fits_into_the_allowed_number_of_parts() {
        for payload_bytes in [0, 1 << 30, 32 << 30] {
            assert_eq!(part_bytes(payload_bytes), PART_BYTES);
        }
        for payload_bytes in [64 << 30, 512 << 30, 2 << 40] {
            assert!(part_bytes(payload_bytes) as u64 * PARTS_MAX >= 2 * payload_bytes);
        }
    }

    /// Writes `len` bytes in pieces of 1,000,000, which no part is a multiple of.
    async fn write(writer: &mut Writer<'_>, len: usize) -> std::result::Result<(), ObjectError> {
        let bytes = pattern(len);
        for at in (0..len).step_by(1_000_000) {
            writer.write(bytes.slice(at..len.min(at + 1_000_000)).into()).await?;
        }
        writer.finish().await
    }

    async fn written(store: &Store) -> Option<Bytes> {
        match store.get(&"a".into()).await {
            Ok(found) => Some(found.bytes().await.unwrap()),
            Err(_) => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_has_parts_of_one_size_and_few_in_flight() {
        let unlimited = Transfers::new(0);
        for (len, parts) in [
            (0, vec![]),
            (PART_BYTES, vec![]),
            (PART_BYTES + 1, vec![PART_BYTES, 1]),
            (2 * PART_BYTES, vec![PART_BYTES; 2]),
            (7 * PART_BYTES + 5, [vec![PART_BYTES; 7], vec![5]].concat()),
        ] {
            for (class, bound) in [(RequestClass::Upload, 4), (RequestClass::Compaction, 2)] {
                let store = Store(InMemory::new(), Arc::default());
                write(&mut writer_for(class, &store, &unlimited), len).await.unwrap();
                assert_eq!(*store.1.parts.lock(), parts);
                let most = store.1.most_in_flight.load(Ordering::SeqCst) as usize;
                assert_eq!(most, parts.len().min(bound), "{class:?}");
                assert!(written(&store).await == Some(pattern(len)));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn parts_are_sent_while_the_caller_does_not_write() {
        let unlimited = Transfers::new(0);
        let store = Store(InMemory::new(), Arc::default());
        let mut writer = writer(&store, &unlimited);
        writer.write(vec![0; PART_BYTES + 1].into()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(store.1.in_flight.load(Ordering::SeqCst), 1);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(store.1.in_flight.load(Ordering::SeqCst), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_attempt_leaves_no_object_and_no_parts() {
        let unlimited = Transfers::new(0);
        let failing = Log { failing: Some(2), ..Log::default() };
        let silent = Log { silent: true, ..Log::default() };
        for (log, reason) in [(failing, "no"), (silent, "no response for 300s")] {
            let store = Store(InMemory::new(), Arc::new(log));
            let mut writer = writer(&store, &unlimited);
            let error = write(&mut writer, 6 * PART_BYTES).await.unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
            writer.abort().await.unwrap();
            assert!(store.1.aborted.load(Ordering::SeqCst), "{reason}");
            assert_eq!(written(&store).await, None);
        }
    }
}
