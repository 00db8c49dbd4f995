//! A request off its socket, and apart from it the batches that it brings.
//!
//! The log cache keeps a batch for long, and nothing else of its request. So each is read into
//! memory of its own, of exactly its length, and nobody has to copy it out of the request
//! (`docs/copies.md`). Nothing is refused here but what comes too slowly: what is not as a Produce
//! request has to be is left as it is, to whoever decodes it.

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

/// So much of a request is read without asking for memory: each connection has at most one, so the
/// bound on connections bounds them, and small ones never wait behind large ones.
const SMALL_FRAME_BYTES: usize = 64 << 10;

/// Memory for the rest is asked for as it comes: so much, or [`STEP_FACTOR`] times what has come if
/// that is more. So a batch that grows is moved a few times only, and whoever holds much has sent a
/// good part of it.
const STEP_BYTES: usize = 256 << 10;
const STEP_FACTOR: usize = 3;

/// Batches from this length on are read into memory of their own. What such memory takes besides is
/// little then, however many batches a request has.
const APART_BYTES: usize = 1 << 10;

/// What a request takes that brings no records, as a rule.
const USUAL_BYTES: usize = 512;

// Of Produce.
const VERSIONS: RangeInclusive<i16> = 3..=13;
const FIRST_FLEXIBLE: i16 = 9;
const FIRST_WITH_TOPIC_IDS: i16 = 13;

/// A request as it came in, without its length.
pub(crate) struct Frame {
    /// All of it but `batches`, each of which has left an empty field. What was empty before is
    /// null.
    pub(crate) bytes: Bytes,
    /// Batches of a Produce request, in their order, each in memory of its own.
    pub(crate) batches: Vec<Bytes>,
    /// What it has taken of the memory for requests.
    pub(crate) share: RequestShare,
}

/// Read one request. What it says about its length is believed only as far as bytes have come.
///
/// # Errors
/// The connection is to be closed, for this reason.
pub(crate) async fn read_frame(
    server: &Server,
    peer: &Peer,
    reader: &mut BufReader<impl AsyncRead + Unpin>,
) -> Result<Frame, End> {
    let config = &server.config;
    // Who has not said who it is gets neither much time nor much room, and produces nothing.
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

/// A request of which the length is known, as far as it has come.
struct Incoming<'a, R> {
    reader: &'a mut BufReader<R>,
    left_bytes: usize,
    came_bytes: usize,
    /// Of what is left, as much as there is memory for.
    room_bytes: usize,
    memory: &'a RequestMemory,
    share: RequestShare,
    /// Whether it has any of the memory that all share.
    holds_memory: bool,
    transfer_timeout: Duration,
    deadline: Instant,
    /// While it holds memory its pace is looked at from here on.
    span_began: Instant,
    span_came_bytes: usize,
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
            came_bytes: 0,
            room_bytes: len_bytes.min(SMALL_FRAME_BYTES),
            memory,
            share: RequestShare::default(),
            holds_memory: false,
            transfer_timeout,
            deadline,
            span_began: deadline,
            span_came_bytes: 0,
        }
    }

    async fn read_frame(self, may_produce: bool) -> Result<Frame, End> {
        let bytes = Vec::with_capacity(self.left_bytes.min(USUAL_BYTES));
        let mut parts = Parts { incoming: self, bytes, batches: Vec::new(), is_flexible: false };
        if may_produce && let Err(Halt::End(end)) = parts.take_apart().await {
            return Err(end);
        }
        let Parts { mut incoming, mut bytes, batches, .. } = parts;
        bytes.reserve_exact(incoming.left_bytes.min(incoming.room_bytes));
        incoming.read(&mut bytes, incoming.left_bytes).await?;
        Ok(Frame { bytes: bytes.into(), batches, share: incoming.share })
    }

    /// Read so many bytes more, at most all that are left, to the end of `to`. It grows as there is
    /// memory for it, at the end to exactly what is needed.
    async fn read(&mut self, to: &mut Vec<u8>, len_bytes: usize) -> Result<(), End> {
        // Most fields are here already: no timer for those.
        let here = self.reader.buffer();
        if len_bytes <= here.len().min(self.room_bytes) {
            to.extend_from_slice(&here[..len_bytes]);
            self.reader.consume(len_bytes);
            self.count(len_bytes);
            return Ok(());
        }
        let end = to.len() + len_bytes;
        while to.len() < end {
            if self.room_bytes == 0 {
                self.make_room().await?;
            }
            let most_bytes = self.room_bytes.min(end - to.len());
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
        self.room_bytes -= read_bytes;
        self.came_bytes += read_bytes;
    }

    /// While this waits the rest of the request stays with the client: that is how the bound pushes
    /// back. The client is not to blame for that time; but others wait for what it has, so it is
    /// not without an end.
    async fn make_room(&mut self) -> Result<(), End> {
        let more_bytes = self.left_bytes.min(STEP_BYTES.max(STEP_FACTOR * self.came_bytes));
        let asked_at = Instant::now();
        let grown = self.memory.grow(&mut self.share, more_bytes);
        timeout(self.transfer_timeout, grown).await.map_err(|_| End::SlowRequest)?;
        self.deadline += asked_at.elapsed();
        self.room_bytes = more_bytes;
        self.holds_memory = true;
        self.begin_span();
        Ok(())
    }

    fn begin_span(&mut self) {
        (self.span_began, self.span_came_bytes) = (Instant::now(), self.came_bytes);
    }

    /// So long it may take until more comes.
    fn next_check(&self) -> Instant {
        match self.holds_memory {
            true => self.deadline.min(self.span_began + self.transfer_timeout / 10),
            false => self.deadline,
        }
    }

    /// Nothing has come until then: go on waiting, unless its time is over, or so little has come
    /// in this span that others have to wait for the memory that it keeps.
    fn check_pace(&mut self) -> Result<(), End> {
        let now = Instant::now();
        let span = now.saturating_duration_since(self.span_began);
        let rate = (self.came_bytes - self.span_came_bytes) as f64 / span.as_secs_f64();
        let is_too_slow = self.holds_memory && rate < LEAST_BYTES_PER_SECOND;
        if now >= self.deadline || is_too_slow && self.memory.is_used_up() {
            return Err(End::SlowRequest);
        }
        self.begin_span();
        Ok(())
    }
}

/// A request that is taken apart.
struct Parts<'a, R> {
    incoming: Incoming<'a, R>,
    bytes: Vec<u8>,
    batches: Vec<Bytes>,
    /// Lengths are compact, and there are tagged fields.
    is_flexible: bool,
}

/// Why a request is not taken apart any further.
enum Halt {
    /// It is of another kind, or not as one of this kind has to be.
    Other,
    End(End),
}

impl From<End> for Halt {
    fn from(end: End) -> Self {
        Self::End(end)
    }
}

/// A length of fixed width. -1 is that of what is not there.
fn fixed_len(len: i32) -> Result<usize, Halt> {
    match len {
        -1 => Ok(0),
        len => usize::try_from(len).map_err(|_| Halt::Other),
    }
}

impl<R: AsyncRead + Unpin> Parts<'_, R> {
    /// Read a Produce request up to its last batch; of another one the beginning.
    async fn take_apart(&mut self) -> Result<(), Halt> {
        let [k0, k1, v0, v1, ..] = self.fixed::<8>().await?;
        let (key, version) = (i16::from_be_bytes([k0, k1]), i16::from_be_bytes([v0, v1]));
        if key != ApiKey::Produce as i16 || !VERSIONS.contains(&version) {
            return Err(Halt::Other);
        }
        self.text().await?; // The client's id, of which the length is never compact.
        self.is_flexible = version >= FIRST_FLEXIBLE;
        self.tagged().await?;
        self.text().await?; // The transactional id.
        self.field(2 + 4).await?; // Acknowledgements, and the timeout.
        for _ in 0..self.len().await? {
            match version {
                FIRST_WITH_TOPIC_IDS.. => self.field(16).await?,
                _ => self.text().await?,
            }
            for _ in 0..self.len().await? {
                self.field(4).await?; // The partition's number.
                self.batch().await?;
                self.tagged().await?;
            }
            self.tagged().await?;
        }
        Ok(())
    }

    async fn batch(&mut self) -> Result<(), Halt> {
        let at = self.bytes.len();
        let len_bytes = self.len().await?;
        if (1..APART_BYTES).contains(&len_bytes) {
            return self.field(len_bytes).await;
        }
        if len_bytes > self.incoming.left_bytes {
            return Err(Halt::Other);
        }
        let is_there = len_bytes > 0;
        if is_there {
            let mut batch = Vec::with_capacity(len_bytes.min(self.incoming.room_bytes));
            self.incoming.read(&mut batch, len_bytes).await?;
            self.batches.push(batch.into());
        }
        // An empty field for the batch, and null where there is none.
        self.bytes.truncate(at);
        match self.is_flexible {
            true => self.bytes.push(is_there.into()),
            false => self.bytes.extend((i32::from(is_there) - 1).to_be_bytes()),
        }
        Ok(())
    }

    async fn tagged(&mut self) -> Result<(), Halt> {
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

    async fn text(&mut self) -> Result<(), Halt> {
        let len_bytes = match self.is_flexible {
            true => self.len().await?,
            false => fixed_len(i16::from_be_bytes(self.fixed().await?).into())?,
        };
        self.field(len_bytes).await
    }

    /// The length of an array, or of bytes.
    async fn len(&mut self) -> Result<usize, Halt> {
        match self.is_flexible {
            // It is stored plus one, 0 means null.
            true => Ok(self.unsigned_varint().await?.saturating_sub(1)),
            false => fixed_len(i32::from_be_bytes(self.fixed().await?)),
        }
    }

    async fn unsigned_varint(&mut self) -> Result<usize, Halt> {
        let mut value = 0;
        for at in 0..5 {
            let [byte] = self.fixed().await?;
            value |= u32::from(byte & 0x7f) << (at * 7);
            if byte < 0x80 {
                return Ok(value as usize);
            }
        }
        Err(Halt::Other)
    }

    async fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Halt> {
        self.field(N).await?;
        Ok(*self.bytes.last_chunk().expect("so many were read"))
    }

    /// Gather so many bytes.
    async fn field(&mut self, len_bytes: usize) -> Result<(), Halt> {
        if len_bytes > self.incoming.left_bytes {
            return Err(Halt::Other);
        }
        self.incoming.read(&mut self.bytes, len_bytes).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
