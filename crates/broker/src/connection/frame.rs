//! Reads a request from its socket, with its batches in separate buffers.
//!
//! The log cache keeps a batch for a long time, and nothing else of its request. Therefore each
//! batch is read into a buffer of exactly its length, and need not be copied out of the request
//! (`docs/copies.md`). This module refuses only requests that arrive too slowly: bytes that are not
//! a valid Produce request are left unchanged for the decoder.

use std::io;
use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::{BufMut, Bytes};
use kafka_protocol::messages::ApiKey;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::time::{Instant, timeout, timeout_at};

use super::{End, LEAST_BYTES_PER_SECOND};
use crate::security::Peer;
use crate::server::{RequestMemory, RequestShare, Server};

/// The bytes of a request that are read without taking request memory. Each connection has at most
/// one request, so the limit on connections limits them, and small requests never wait behind large
/// ones.
const SMALL_FRAME_BYTES: usize = 64 << 10;

/// Memory for the rest is taken as bytes arrive: this much at a time, or [`STEP_FACTOR`] times the
/// bytes received so far if that is more. So a growing batch is moved only a few times, and a
/// request that holds much memory has sent a good part of it.
const STEP_BYTES: usize = 256 << 10;
const STEP_FACTOR: usize = 3;

/// The length from which a batch is read into its own buffer. The overhead of a buffer is then
/// small, whatever the number of batches in a request.
const SEPARATE_BYTES: usize = 1 << 10;

/// The initial buffer for a request; most requests without records fit in it.
const USUAL_BYTES: usize = 512;

// The Produce versions whose layout is known here.
const VERSIONS: RangeInclusive<i16> = 3..=13;
const FIRST_FLEXIBLE: i16 = 9;
const FIRST_WITH_TOPIC_IDS: i16 = 13;

/// A request as received, without its length.
pub(crate) struct Frame {
    /// The request without `batches`: each has left an empty field. A field that was empty before
    /// is null.
    pub(crate) bytes: Bytes,
    /// The batches of a Produce request in their order, each in its own buffer.
    pub(crate) batches: Vec<Bytes>,
    /// The request's share of the request memory.
    pub(crate) share: RequestShare,
}

/// Reads one request. Its announced length is trusted only as far as bytes have arrived.
///
/// # Errors
/// The reason for which the connection is to be closed.
pub(crate) async fn read_frame(
    server: &Server,
    peer: &Peer,
    reader: &mut BufReader<impl AsyncRead + Unpin>,
) -> Result<Frame, End> {
    let config = &server.config;
    // Unauthenticated clients get little time and memory, and cannot produce.
    let (patience, max_bytes, may_produce) = match peer.max_request_bytes() {
        None => (config.idle_timeout, config.max_request_bytes, true),
        Some(bytes) => (config.transfer_timeout, bytes.min(config.max_request_bytes), false),
    };
    let first = timeout(patience, reader.fill_buf()).await.map_err(|_| End::Idle)??;
    if first.is_empty() {
        return Err(End::Closed);
    }
    let deadline = Instant::now() + config.transfer_timeout;
    let len = timeout_at(deadline, reader.read_i32()).await.map_err(|_| End::SlowRequest)??;
    let len_bytes = match u32::try_from(len) {
        Ok(len_bytes) if len_bytes <= max_bytes => len_bytes as usize,
        _ => return Err(End::BadLength(len)),
    };
    let memory = &server.request_memory;
    let incoming = Incoming::new(reader, len_bytes, memory, config.transfer_timeout, deadline);
    incoming.read_frame(may_produce).await
}

/// A request of known length that is being received.
struct Incoming<'a, R> {
    reader: &'a mut BufReader<R>,
    left_bytes: usize,
    received_bytes: usize,
    /// The part of the remaining bytes for which memory is taken.
    reserved_bytes: usize,
    memory: &'a RequestMemory,
    share: RequestShare,
    /// Whether the request holds a share of the common memory.
    holds_memory: bool,
    transfer_timeout: Duration,
    deadline: Instant,
    /// The start of the span over which the pace is measured while the request holds memory.
    span_began: Instant,
    span_received_bytes: usize,
}

impl<'a, R: AsyncRead + Unpin> Incoming<'a, R> {
    fn new(
        reader: &'a mut BufReader<R>,
        len_bytes: usize,
        memory: &'a RequestMemory,
        transfer_timeout: Duration,
        deadline: Instant,
    ) -> Self {
        Self {
            reader,
            left_bytes: len_bytes,
            received_bytes: 0,
            reserved_bytes: len_bytes.min(SMALL_FRAME_BYTES),
            memory,
            share: RequestShare::default(),
            holds_memory: false,
            transfer_timeout,
            deadline,
            span_began: deadline,
            span_received_bytes: 0,
        }
    }

    async fn read_frame(self, may_produce: bool) -> Result<Frame, End> {
        let bytes = Vec::with_capacity(self.left_bytes.min(USUAL_BYTES));
        let mut parts =
            BatchSeparator { incoming: self, bytes, batches: Vec::new(), is_flexible: false };
        if may_produce && let Err(ParseStop::End(end)) = parts.separate_batches().await {
            return Err(end);
        }
        let BatchSeparator { mut incoming, mut bytes, batches, .. } = parts;
        bytes.reserve_exact(incoming.left_bytes.min(incoming.reserved_bytes));
        incoming.read(&mut bytes, incoming.left_bytes).await?;
        Ok(Frame { bytes: bytes.into(), batches, share: incoming.share })
    }

    /// Reads `len_bytes` more bytes, at most the remaining ones, to the end of `to`. `to` grows as
    /// memory becomes available, in the end to exactly the needed size.
    async fn read(&mut self, to: &mut Vec<u8>, len_bytes: usize) -> Result<(), End> {
        // Most fields are buffered already and need no timer.
        let here = self.reader.buffer();
        if len_bytes <= here.len().min(self.reserved_bytes) {
            to.extend_from_slice(&here[..len_bytes]);
            self.reader.consume(len_bytes);
            self.count(len_bytes);
            return Ok(());
        }
        let end = to.len() + len_bytes;
        while to.len() < end {
            if self.reserved_bytes == 0 {
                self.reserve().await?;
            }
            let most_bytes = self.reserved_bytes.min(end - to.len());
            if to.capacity() == to.len() {
                to.reserve_exact(most_bytes);
            }
            let step_bytes = most_bytes.min(to.capacity() - to.len());
            let mut step = BufMut::limit(&mut *to, step_bytes);
            let until = self.next_check();
            match timeout_at(until, self.reader.read_buf(&mut step)).await {
                Ok(read) => match read? {
                    0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                    read_bytes => self.count(read_bytes),
                },
                Err(_) => self.check_pace()?,
            }
        }
        Ok(())
    }

    fn count(&mut self, read_bytes: usize) {
        self.left_bytes -= read_bytes;
        self.reserved_bytes -= read_bytes;
        self.received_bytes += read_bytes;
    }

    /// Takes memory for more bytes. Meanwhile the rest of the request stays with the client, which
    /// is the backpressure of this limit. The client is not charged for this time; the wait is
    /// limited since others wait for the memory that the request holds.
    async fn reserve(&mut self) -> Result<(), End> {
        let more_bytes = self.left_bytes.min(STEP_BYTES.max(STEP_FACTOR * self.received_bytes));
        let asked_at = Instant::now();
        let grown = self.memory.grow(&mut self.share, more_bytes);
        timeout(self.transfer_timeout, grown).await.map_err(|_| End::SlowRequest)?;
        self.deadline += asked_at.elapsed();
        self.reserved_bytes = more_bytes;
        self.holds_memory = true;
        self.begin_span();
        Ok(())
    }

    fn begin_span(&mut self) {
        (self.span_began, self.span_received_bytes) = (Instant::now(), self.received_bytes);
    }

    /// The time at which the pace is checked next if no bytes arrive.
    fn next_check(&self) -> Instant {
        match self.holds_memory {
            true => self.deadline.min(self.span_began + self.transfer_timeout / 10),
            false => self.deadline,
        }
    }

    /// Continues the wait for bytes, unless the request's time is over, or it has received so
    /// little in this span that others wait for the memory that it holds.
    fn check_pace(&mut self) -> Result<(), End> {
        let now = Instant::now();
        let span = now.saturating_duration_since(self.span_began);
        let rate = (self.received_bytes - self.span_received_bytes) as f64 / span.as_secs_f64();
        let is_too_slow = self.holds_memory && rate < LEAST_BYTES_PER_SECOND;
        if now >= self.deadline || is_too_slow && self.memory.is_exhausted() {
            return Err(End::SlowRequest);
        }
        self.begin_span();
        Ok(())
    }
}

/// A Produce request whose batches are being separated.
struct BatchSeparator<'a, R> {
    incoming: Incoming<'a, R>,
    bytes: Vec<u8>,
    batches: Vec<Bytes>,
    /// Whether lengths are compact and tagged fields exist.
    is_flexible: bool,
}

/// Why the separation of batches stops.
enum ParseStop {
    /// The request is not a Produce request, or is malformed.
    NotProduce,
    End(End),
}

impl From<End> for ParseStop {
    fn from(end: End) -> Self {
        Self::End(end)
    }
}

/// Converts a length of fixed width; -1 is null.
fn fixed_len(len: i32) -> Result<usize, ParseStop> {
    match len {
        -1 => Ok(0),
        len => usize::try_from(len).map_err(|_| ParseStop::NotProduce),
    }
}

impl<R: AsyncRead + Unpin> BatchSeparator<'_, R> {
    /// Reads a Produce request up to its last batch, or the beginning of any other request.
    async fn separate_batches(&mut self) -> Result<(), ParseStop> {
        let [k0, k1, v0, v1, ..] = self.fixed::<8>().await?;
        let (key, version) = (i16::from_be_bytes([k0, k1]), i16::from_be_bytes([v0, v1]));
        if key != ApiKey::Produce as i16 || !VERSIONS.contains(&version) {
            return Err(ParseStop::NotProduce);
        }
        self.skip_string().await?; // The client ID, whose length is never compact.
        self.is_flexible = version >= FIRST_FLEXIBLE;
        self.tagged().await?;
        self.skip_string().await?; // The transactional ID.
        self.field(2 + 4).await?; // Acknowledgements and timeout.
        for _ in 0..self.len().await? {
            match version {
                FIRST_WITH_TOPIC_IDS.. => self.field(16).await?,
                _ => self.skip_string().await?,
            }
            for _ in 0..self.len().await? {
                self.field(4).await?; // The partition index.
                self.batch().await?;
                self.tagged().await?;
            }
            self.tagged().await?;
        }
        Ok(())
    }

    async fn batch(&mut self) -> Result<(), ParseStop> {
        let at = self.bytes.len();
        let len_bytes = self.len().await?;
        if (1..SEPARATE_BYTES).contains(&len_bytes) {
            return self.field(len_bytes).await;
        }
        if len_bytes > self.incoming.left_bytes {
            return Err(ParseStop::NotProduce);
        }
        let is_there = len_bytes > 0;
        if is_there {
            let mut batch = Vec::with_capacity(len_bytes.min(self.incoming.reserved_bytes));
            self.incoming.read(&mut batch, len_bytes).await?;
            self.batches.push(batch.into());
        }
        // An empty field for the batch, and null if there is none.
        self.bytes.truncate(at);
        match self.is_flexible {
            true => self.bytes.push(is_there.into()),
            false => self.bytes.extend((i32::from(is_there) - 1).to_be_bytes()),
        }
        Ok(())
    }

    async fn tagged(&mut self) -> Result<(), ParseStop> {
        if !self.is_flexible {
            return Ok(());
        }
        for _ in 0..self.unsigned_varint().await? {
            self.unsigned_varint().await?; // The tag.
            let len_bytes = self.unsigned_varint().await?;
            self.field(len_bytes).await?;
        }
        Ok(())
    }

    async fn skip_string(&mut self) -> Result<(), ParseStop> {
        let len_bytes = match self.is_flexible {
            true => self.len().await?,
            false => fixed_len(i16::from_be_bytes(self.fixed().await?).into())?,
        };
        self.field(len_bytes).await
    }

    /// Reads the length of an array or of bytes.
    async fn len(&mut self) -> Result<usize, ParseStop> {
        match self.is_flexible {
            // Stored plus one; 0 means null.
            true => Ok(self.unsigned_varint().await?.saturating_sub(1)),
            false => fixed_len(i32::from_be_bytes(self.fixed().await?)),
        }
    }

    async fn unsigned_varint(&mut self) -> Result<usize, ParseStop> {
        let mut value = 0;
        for at in 0..5 {
            let [byte] = self.fixed().await?;
            value |= u32::from(byte & 0x7f) << (at * 7);
            if byte < 0x80 {
                return Ok(value as usize);
            }
        }
        Err(ParseStop::NotProduce)
    }

    async fn fixed<const N: usize>(&mut self) -> Result<[u8; N], ParseStop> {
        self.field(N).await?;
        Ok(*self.bytes.last_chunk().expect("N bytes were read"))
    }

    /// Reads `len_bytes` bytes into the buffer.
    async fn field(&mut self, len_bytes: usize) -> Result<(), ParseStop> {
        if len_bytes > self.incoming.left_bytes {
            return Err(ParseStop::NotProduce);
        }
        self.incoming.read(&mut self.bytes, len_bytes).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
