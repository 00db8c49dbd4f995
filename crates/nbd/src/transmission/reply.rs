//! Replies as lists of buffers. Data is referenced, not copied.

use std::collections::VecDeque;

use bytes::{BufMut, Bytes, BytesMut};

use super::check::Failure;
use crate::budget::Reservation;
use crate::disk::{Allocation, Extent, Part};
use crate::protocol::{
    ALLOCATION_CONTEXT_ID, DONE, STATE_HOLE, STATE_ZERO, chunk, put_chunk, put_simple,
};

/// Greatest length of an error's text, far below that of a string of the protocol.
const MAX_TEXT: usize = 512;
/// Zeros, for replies that cannot have holes.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A reply, or a part of one, with the memory that is reserved for it until it is written.
pub(crate) struct Reply {
    pub(crate) buffers: VecDeque<Bytes>,
    pub(crate) reservation: Reservation,
}

impl Reply {
    /// Success of a request without data in its reply.
    pub(crate) fn success(cookie: u64, reservation: Reservation) -> Self {
        let mut head = BytesMut::with_capacity(16);
        put_simple(&mut head, 0, cookie);
        Self { buffers: [head.freeze()].into(), reservation }
    }

    /// Success of a read of nothing, with structured replies.
    pub(crate) fn empty_read(cookie: u64, reservation: Reservation) -> Self {
        let mut head = BytesMut::with_capacity(20);
        put_chunk(&mut head, DONE, chunk::NONE, cookie, 0);
        Self { buffers: [head.freeze()].into(), reservation }
    }

    /// Failure of a request as a whole.
    pub(crate) fn failure(
        is_structured: bool,
        cookie: u64,
        failure: &Failure,
        reservation: Reservation,
    ) -> Self {
        let mut head = BytesMut::new();
        if is_structured {
            put_error(&mut head, DONE, chunk::ERROR, cookie, failure, &[]);
        } else {
            put_simple(&mut head, failure.errno as u32, cookie);
        }
        Self { buffers: [head.freeze()].into(), reservation }
    }

    /// Failure of the part of a read that begins at `at`.
    pub(crate) fn failure_at(
        at: u64,
        is_last: bool,
        cookie: u64,
        failure: &Failure,
        reservation: Reservation,
    ) -> Self {
        let mut head = BytesMut::new();
        let flags = if is_last { DONE } else { 0 };
        put_error(&mut head, flags, chunk::ERROR_OFFSET, cookie, failure, &at.to_be_bytes());
        Self { buffers: [head.freeze()].into(), reservation }
    }

    /// A simple reply with data.
    pub(crate) fn simple_data(cookie: u64, parts: Vec<Part>, reservation: Reservation) -> Self {
        let mut head = BytesMut::with_capacity(16);
        put_simple(&mut head, 0, cookie);
        let mut buffers = VecDeque::from([head.freeze()]);
        push_data(&mut buffers, parts);
        Self { buffers, reservation }
    }

    /// A read in one chunk: a hole if all of it is zeros.
    pub(crate) fn unfragmented(
        at: u64,
        cookie: u64,
        parts: Vec<Part>,
        reservation: Reservation,
    ) -> Self {
        if parts.iter().all(|part| matches!(part, Part::Zeros(_))) {
            return Self::chunks(at, true, cookie, parts, reservation);
        }
        let len = total(&parts);
        let mut head = BytesMut::with_capacity(28);
        put_chunk(&mut head, DONE, chunk::OFFSET_DATA, cookie, 8 + len);
        head.put_u64(at);
        let mut buffers = VecDeque::from([head.freeze()]);
        push_data(&mut buffers, parts);
        Self { buffers, reservation }
    }

    /// Chunks of a read, of data and of holes. `parts` has at least one byte.
    pub(crate) fn chunks(
        mut at: u64,
        is_last: bool,
        cookie: u64,
        parts: Vec<Part>,
        reservation: Reservation,
    ) -> Self {
        let mut head = BytesMut::with_capacity(32);
        let mut buffers = VecDeque::new();
        let mut parts = parts.into_iter().filter(|part| !part.is_empty()).peekable();
        while let Some(first) = parts.next() {
            let is_data = matches!(first, Part::Data(_));
            let mut run = vec![first];
            while let Some(next) = parts.next_if(|next| matches!(next, Part::Data(_)) == is_data) {
                run.push(next);
            }
            let flags = if is_last && parts.peek().is_none() { DONE } else { 0 };
            let len = total(&run);
            if is_data {
                put_chunk(&mut head, flags, chunk::OFFSET_DATA, cookie, 8 + len);
                head.put_u64(at);
            } else {
                put_chunk(&mut head, flags, chunk::OFFSET_HOLE, cookie, 12);
                head.put_u64(at);
                head.put_u32(len);
            }
            buffers.push_back(head.split().freeze());
            if is_data {
                push_data(&mut buffers, run);
            }
            at += u64::from(len);
        }
        Self { buffers, reservation }
    }

    /// The extents of the allocation context; `None` if there are none. They are cut at `len`, and
    /// equal neighbours are merged.
    pub(crate) fn status(
        cookie: u64,
        len: u32,
        extents: &[Extent],
        reservation: Reservation,
    ) -> Result<Self, Reservation> {
        let mut rows: Vec<(u32, u32)> = Vec::with_capacity(extents.len());
        let mut left = len;
        for extent in extents {
            let len = left.min(u32::try_from(extent.len).unwrap_or(u32::MAX));
            if len == 0 {
                continue;
            }
            left -= len;
            let state = match extent.allocation {
                Allocation::Data => 0,
                Allocation::Zeros => STATE_ZERO,
                Allocation::Hole => STATE_HOLE | STATE_ZERO,
            };
            match rows.last_mut() {
                Some((previous, of)) if *of == state => *previous += len,
                _ => rows.push((len, state)),
            }
        }
        if rows.is_empty() {
            return Err(reservation);
        }
        let bytes = 4 + 8 * rows.len();
        let mut head = BytesMut::with_capacity(20 + bytes);
        put_chunk(&mut head, DONE, chunk::BLOCK_STATUS, cookie, bytes as u32);
        head.put_u32(ALLOCATION_CONTEXT_ID);
        for (len, state) in rows {
            head.put_u32(len);
            head.put_u32(state);
        }
        Ok(Self { buffers: [head.freeze()].into(), reservation })
    }

    pub(crate) fn len(&self) -> usize {
        self.buffers.iter().map(Bytes::len).sum()
    }
}

/// Total length. A read has at most 32 MiB.
fn total(parts: &[Part]) -> u32 {
    parts.iter().map(Part::len).sum::<usize>() as u32
}

fn push_data(buffers: &mut VecDeque<Bytes>, parts: Vec<Part>) {
    for part in parts {
        match part {
            Part::Data(data) if data.is_empty() => {}
            Part::Data(data) => buffers.push_back(data),
            Part::Zeros(len) => {
                let mut left = len as usize;
                while left > 0 {
                    let zeros = Bytes::from_static(&ZEROS[..left.min(ZEROS.len())]);
                    left -= zeros.len();
                    buffers.push_back(zeros);
                }
            }
        }
    }
}

fn put_error(
    to: &mut BytesMut,
    flags: u16,
    kind: u16,
    cookie: u64,
    failure: &Failure,
    rest: &[u8],
) {
    let text = &failure.text[..failure.text.floor_char_boundary(MAX_TEXT)];
    put_chunk(to, flags, kind, cookie, (6 + text.len() + rest.len()) as u32);
    to.put_u32(failure.errno as u32);
    to.put_u16(text.len() as u16);
    to.put_slice(text.as_bytes());
    to.put_slice(rest);
}
