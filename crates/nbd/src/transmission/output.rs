//! Bytes to the client.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::Buf;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, timeout_at};

use super::reply::Reply;
use crate::budget::PIECE_BYTES;

/// Greatest number of buffers of one write.
const MAX_BUFFERS: usize = 64;

/// Writes replies until the channel is closed. Replies that are ready at the same time share a
/// write.
///
/// The client must receive each MiB within the stall timeout.
pub(crate) async fn write_replies<W: AsyncWrite + Unpin>(
    writer: &mut W,
    replies: &mut UnboundedReceiver<Reply>,
    stall_timeout: Duration,
) -> io::Result<()> {
    let mut queue: VecDeque<Reply> = VecDeque::new();
    let mut deadline = None;
    loop {
        if queue.is_empty() {
            match replies.recv().await {
                Some(reply) => queue.push_back(reply),
                None => return Ok(()),
            }
        }
        while queue.len() < MAX_BUFFERS
            && let Ok(reply) = replies.try_recv()
        {
            queue.push_back(reply);
        }
        let mut slices = [IoSlice::new(&[]); MAX_BUFFERS];
        let buffers = queue.iter().flat_map(|reply| &reply.buffers);
        let count = slices.iter_mut().zip(buffers).map(|(slice, buffer)| {
            *slice = IoSlice::new(buffer);
        });
        let count = count.count();
        let deadline_of_first = *deadline.get_or_insert_with(|| {
            let pieces = 1 + queue[0].len() as u32 / PIECE_BYTES;
            Instant::now() + stall_timeout * pieces
        });
        let writing = writer.write_vectored(&slices[..count]);
        let mut written = match timeout_at(deadline_of_first, writing).await?? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => written,
        };
        while let Some(reply) = queue.front_mut() {
            while let Some(buffer) = reply.buffers.front_mut() {
                let part = written.min(buffer.len());
                buffer.advance(part);
                written -= part;
                if !buffer.is_empty() {
                    break;
                }
                reply.buffers.pop_front();
            }
            if !reply.buffers.is_empty() {
                break;
            }
            // Releases its memory.
            queue.pop_front();
            deadline = None;
        }
        if queue.is_empty() {
            writer.flush().await?;
        }
    }
}
