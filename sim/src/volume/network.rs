//! Messages between servers and with clients: delivered in any order, more than once or never, and
//! cut off by partitions. Pulls are streams, whose frames keep their order until they break.

use std::collections::{BTreeSet, VecDeque};

use alluvium_volume::shard::Input;
use alluvium_volume::{Answer, GroupId, PeerMessage, PullFrame, Request, RequestError};

/// A message between two servers on its way.
#[derive(Clone)]
pub(super) struct Envelope {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) message: PeerMessage,
}

/// A request of a client on its way, or an answer.
#[derive(Clone)]
pub(super) enum ClientMessage {
    Request { to: usize, ticket: u64, request: Request },
    Answer { ticket: u64, answer: Result<Answer, RequestError> },
}

/// A pull: the frames on their way.
pub(super) struct Stream {
    pub(super) id: u64,
    pub(super) source: usize,
    pub(super) target: usize,
    pub(super) attempt: u64,
    pub(super) group: GroupId,
    /// The request has not arrived yet.
    pub(super) request: Option<Input>,
    pub(super) frames: VecDeque<PullFrame>,
}

/// All messages on their way.
#[derive(Default)]
pub(super) struct Network {
    pub(super) peers: Vec<Envelope>,
    pub(super) clients: Vec<ClientMessage>,
    pub(super) streams: Vec<Stream>,
    next_stream: u64,
    cut_off: BTreeSet<usize>,
}

impl Network {
    /// A name for a new stream.
    pub(super) fn stream_id(&mut self) -> u64 {
        self.next_stream += 1;
        self.next_stream
    }

    /// Whether a partition separates the two servers.
    pub(super) fn separates(&self, one: usize, other: usize) -> bool {
        self.is_cut_off(one) || self.is_cut_off(other)
    }

    pub(super) fn is_cut_off(&self, server: usize) -> bool {
        self.cut_off.contains(&server)
    }

    pub(super) fn is_whole(&self) -> bool {
        self.cut_off.is_empty()
    }

    /// Separates a server from all others.
    pub(super) fn cut_off(&mut self, server: usize) {
        self.cut_off.insert(server);
    }

    pub(super) fn heal(&mut self) {
        self.cut_off.clear();
    }
}
