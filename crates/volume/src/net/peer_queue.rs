//! What waits to be sent to another server: votes, heartbeats and responses before appends.
//! `docs/format/volume-wire.md`, section 8.

use std::collections::VecDeque;

use raft::eraftpb::MessageType;

use super::frame::{Frame, FrameType};
use super::messages::{
    GroupMessage, MessagesFrame, SenderState, UnsendableMessage, check_sendable, message_bytes,
};

/// Bytes of appends that wait for one server. Further ones are dropped; raft repeats them.
pub const MAX_APPEND_BYTES: usize = 8 << 20;
/// Bytes of everything else that waits for one server. Raft also tolerates its loss.
pub const MAX_URGENT_BYTES: usize = 4 << 20;

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// It waits.
    Queued,
    /// The queue is full.
    Dropped,
}

/// The queues of one server. What waits is bounded by [`MAX_APPEND_BYTES`] and
/// [`MAX_URGENT_BYTES`], beyond which one append fits an empty queue, whatever its length.
#[derive(Debug, Default)]
pub struct PeerQueue {
    heartbeats: VecDeque<GroupMessage>,
    heartbeat_responses: VecDeque<GroupMessage>,
    /// Votes and responses.
    urgent: VecDeque<GroupMessage>,
    /// Frames that are no raft messages.
    frames: VecDeque<Frame>,
    urgent_bytes: usize,
    appends: VecDeque<GroupMessage>,
    append_bytes: usize,
    /// Entries of the first append that were sent.
    sent_entries: usize,
}

impl PeerQueue {
    /// Queues a message.
    ///
    /// # Errors
    /// The message has no bytes in the protocol.
    pub fn push(&mut self, message: GroupMessage) -> Result<Pushed, UnsendableMessage> {
        let kind = check_sendable(&message)?;
        let bytes = message_bytes(&message.message);
        let is_append = message.message.get_msg_type() == MessageType::MsgAppend;
        let (queue, waiting, limit) = match kind {
            FrameType::Heartbeats => {
                (&mut self.heartbeats, &mut self.urgent_bytes, MAX_URGENT_BYTES)
            }
            FrameType::HeartbeatResponses => {
                (&mut self.heartbeat_responses, &mut self.urgent_bytes, MAX_URGENT_BYTES)
            }
            _ if is_append => (&mut self.appends, &mut self.append_bytes, MAX_APPEND_BYTES),
            _ => (&mut self.urgent, &mut self.urgent_bytes, MAX_URGENT_BYTES),
        };
        if *waiting + bytes > limit && *waiting > 0 {
            return Ok(Pushed::Dropped);
        }
        *waiting += bytes;
        queue.push_back(message);
        Ok(Pushed::Queued)
    }

    /// Queues a frame that has no raft messages.
    pub fn push_frame(&mut self, frame: Frame) -> Pushed {
        let bytes = frame.wire_bytes();
        if self.urgent_bytes + bytes > MAX_URGENT_BYTES {
            return Pushed::Dropped;
        }
        self.urgent_bytes += bytes;
        self.frames.push_back(frame);
        Pushed::Queued
    }

    /// Drops everything that waits.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Takes the next frame, with as many messages as fit.
    pub fn next(&mut self, sender: SenderState) -> Option<Frame> {
        for (kind, queue) in [
            (FrameType::Heartbeats, &mut self.heartbeats),
            (FrameType::HeartbeatResponses, &mut self.heartbeat_responses),
        ] {
            if !queue.is_empty() {
                let mut frame = MessagesFrame::new(kind, sender);
                self.urgent_bytes -= fill(&mut frame, queue);
                return Some(frame.finish());
            }
        }
        if let Some(frame) = self.frames.pop_front() {
            self.urgent_bytes -= frame.wire_bytes();
            return Some(frame);
        }
        let mut frame = MessagesFrame::new(FrameType::Raft, sender);
        self.urgent_bytes -= fill(&mut frame, &mut self.urgent);
        while let Some(append) = self.appends.front() {
            let Some(sent) = frame.push(append, self.sent_entries) else { break };
            self.sent_entries = sent;
            if sent == append.message.entries.len() {
                self.append_bytes -= message_bytes(&append.message);
                self.sent_entries = 0;
                self.appends.pop_front();
            }
        }
        (!frame.is_empty()).then(|| frame.finish())
    }
}

/// Moves messages to the frame until it is full. Returns the bytes of what was moved.
fn fill(frame: &mut MessagesFrame, queue: &mut VecDeque<GroupMessage>) -> usize {
    let mut bytes = 0;
    while let Some(message) = queue.front()
        && frame.push(message, 0).is_some()
    {
        bytes += message_bytes(&message.message);
        queue.pop_front();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use raft::eraftpb::Entry;

    use super::*;
    use crate::net::tests::message_of;
    use crate::types::GroupId;

    fn message(kind: MessageType) -> GroupMessage {
        GroupMessage { group: GroupId(1), message: message_of(kind, 1, 2, 3) }
    }

    /// An append with entries of one block of data each.
    fn append(entries: usize) -> GroupMessage {
        let mut message = message(MessageType::MsgAppend);
        let entry = Entry {
            term: 1,
            data: vec![0; 44].into(),
            context: Bytes::from_static(&[0; crate::BLOCK_BYTES]),
            ..Entry::default()
        };
        message.message.entries = vec![entry; entries].into();
        message
    }

    fn frames(queue: &mut PeerQueue) -> Vec<FrameType> {
        let next = || queue.next(SenderState::default()).map(|frame| frame.kind());
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn votes_and_heartbeats_overtake_appends() {
        let mut queue = PeerQueue::default();
        for _ in 0..3 {
            queue.push(append(200)).unwrap();
        }
        queue.push(message(MessageType::MsgRequestVote)).unwrap();
        queue.push(message(MessageType::MsgHeartbeatResponse)).unwrap();
        queue.push(message(MessageType::MsgHeartbeat)).unwrap();
        let kinds = frames(&mut queue);
        assert_eq!(kinds[..2], [FrameType::Heartbeats, FrameType::HeartbeatResponses]);
        // 600 blocks need three frames of 256. The vote is in the first of them.
        assert_eq!(kinds[2..], [FrameType::Raft; 3]);
        assert_eq!((queue.urgent_bytes, queue.append_bytes), (0, 0));
    }

    #[test]
    fn a_queue_that_is_full_drops_what_comes_and_keeps_the_other_class() {
        let mut queue = PeerQueue::default();
        let mut queued = 0;
        while queue.push(append(100)).unwrap() == Pushed::Queued {
            queued += 1;
        }
        assert!(queue.append_bytes <= MAX_APPEND_BYTES);
        assert_eq!(queued, MAX_APPEND_BYTES / message_bytes(&append(100).message));
        let vote = message(MessageType::MsgRequestVote);
        while queue.push(vote.clone()).unwrap() == Pushed::Queued {}
        assert!(queue.urgent_bytes <= MAX_URGENT_BYTES);
        assert_eq!(queue.push_frame(Frame::ping(1)), Pushed::Queued);
        while queue.push_frame(Frame::ping(1)) == Pushed::Queued {}
        frames(&mut queue);
        assert_eq!((queue.urgent_bytes, queue.append_bytes), (0, 0));
        assert_eq!(queue.push(append(1)), Ok(Pushed::Queued));
    }
}
