//! Messages between servers: delivered in any order, more than once or never, and cut off by
//! partitions.

use std::collections::{BTreeMap, BTreeSet};

use raft::eraftpb::Message;

use super::op::Value;

/// A message on its way.
#[derive(Clone)]
pub(super) struct Envelope {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) group: usize,
    pub(super) message: Message,
}

/// The blocks that a replica has pulled for a snapshot.
pub(super) struct Pulled {
    /// The applied index of the source when it read the last block.
    pub(super) as_of: u64,
    pub(super) blocks: Vec<Value>,
}

/// All messages on their way.
#[derive(Default)]
pub(super) struct Network {
    in_flight: Vec<Envelope>,
    cut_off: BTreeSet<usize>,
    /// By target server and group. A pull is one moment here: the blocks arrive with the message
    /// that announces the snapshot.
    pulled: BTreeMap<(usize, usize), Pulled>,
}

impl Network {
    /// Sends the messages of one replica.
    pub(super) fn send(&mut self, from: usize, group: usize, messages: Vec<Message>) {
        for message in messages {
            let to = message.to as usize - 1;
            self.in_flight.push(Envelope { from, to, group, message });
        }
    }

    /// Sends a copy of a message.
    pub(super) fn repeat(&mut self, envelope: &Envelope) {
        self.in_flight.push(envelope.clone());
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Takes a message out of the network.
    pub(super) fn take(&mut self, index: usize) -> Envelope {
        self.in_flight.swap_remove(index)
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

    pub(super) fn pull(&mut self, to: usize, group: usize, pulled: Pulled) {
        self.pulled.insert((to, group), pulled);
    }

    pub(super) fn take_pulled(&mut self, to: usize, group: usize) -> Option<Pulled> {
        self.pulled.remove(&(to, group))
    }

    /// Drops what a server that ends has pulled.
    pub(super) fn forget_pulls(&mut self, server: usize) {
        self.pulled.retain(|(to, _), _| *to != server);
    }
}
