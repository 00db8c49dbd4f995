//! Between the frames of the protocol and the messages of the shard, which do not depend on it.

use crate::messages::{self, PeerBody, PeerMessage, PullContent, PullItem, PullRequest};
use crate::net::{
    GroupMessage, PeerFrame, Pull, PullBatch, PullBegin, PullEnd, PullFrame, PullOffer,
    PullParties, PullPin, Pulled, PulledVolume,
};
use crate::request::{ErrorCode, RequestError};
use crate::types::{GroupId, Index, PeerId};

/// Volumes in one frame.
const STATE_VOLUMES: usize = 256;

/// What a server sends to another one.
pub(super) enum PeerOutput {
    Raft(GroupMessage),
    Frame(crate::net::Frame),
}

/// The form in which a message is sent.
pub(super) fn to_peer(message: PeerMessage) -> PeerOutput {
    let PeerMessage { group, from, to, body } = message;
    let parties = |term| PullParties { group, from, to, term };
    match body {
        PeerBody::Raft(message) => PeerOutput::Raft(GroupMessage { group, message: *message }),
        PeerBody::Offer { term, applied } => {
            PeerOutput::Frame(PullOffer { parties: parties(term), applied }.encode())
        }
        PeerBody::Pin { term, at } => {
            PeerOutput::Frame(PullPin { parties: parties(term), since: at }.encode())
        }
        PeerBody::Pulled { term, at, conf } => {
            let since = at;
            PeerOutput::Frame(Pulled { parties: parties(term), since, conf }.encode())
        }
    }
}

/// The messages of a frame from another server.
pub(super) fn from_peer(frame: PeerFrame) -> Vec<PeerMessage> {
    let message = |parties: PullParties, body| {
        let PullParties { group, from, to, .. } = parties;
        vec![PeerMessage { group, from, to, body }]
    };
    match frame {
        PeerFrame::Messages(messages) => messages.messages.into_iter().map(from_raft).collect(),
        // A hint to read the registry, which is watched.
        PeerFrame::Gone(_) => Vec::new(),
        PeerFrame::PullOffer(PullOffer { parties, applied }) => {
            message(parties, PeerBody::Offer { term: parties.term, applied })
        }
        PeerFrame::PullPin(PullPin { parties, since }) => {
            message(parties, PeerBody::Pin { term: parties.term, at: since })
        }
        PeerFrame::Pulled(Pulled { parties, since, conf }) => {
            message(parties, PeerBody::Pulled { term: parties.term, at: since, conf })
        }
    }
}

fn from_raft(message: GroupMessage) -> PeerMessage {
    let GroupMessage { group, message } = message;
    let (from, to) = (PeerId(message.from), PeerId(message.to));
    PeerMessage { group, from, to, body: PeerBody::Raft(Box::new(message)) }
}

/// The request of a round of a pull.
pub(super) fn to_pull(request: &PullRequest) -> Pull {
    Pull {
        group: request.group,
        peer: request.target,
        since: request.since,
        finished_since: Index(0),
        after: None,
        finished: Vec::new(),
    }
}

/// A request of a pull from another server. More may always be sent: chunks that the target has
/// finished, and those before the place where it goes on.
pub(super) fn from_pull(pull: &Pull) -> PullRequest {
    PullRequest { group: pull.group, target: pull.peer, since: pull.since, is_first: false }
}

/// Counts what a stream has sent, for its last frame.
#[derive(Default)]
pub(super) struct Sent {
    newest: Index,
    bytes: u64,
    chunks: u64,
}

impl Sent {
    /// The frames in which a frame of the shard is sent.
    pub(super) fn frames(&mut self, group: GroupId, frame: messages::PullFrame) -> Vec<PullFrame> {
        match frame {
            messages::PullFrame::Begin { at, source, conf, volumes, sends_everything } => {
                let volumes: Vec<PulledVolume> = volumes
                    .into_iter()
                    .map(|state| PulledVolume { state, is_deleted: false })
                    .collect();
                let states = volumes.chunks(STATE_VOLUMES);
                let begin = PullBegin {
                    applied: at,
                    peer: source,
                    state_frames: states.len() as u32,
                    sends_everything,
                    conf,
                };
                let states = states.map(|volumes| PullFrame::State(volumes.to_vec()));
                std::iter::once(PullFrame::Begin(begin)).chain(states).collect()
            }
            messages::PullFrame::Batch { newest, items } => {
                self.newest = self.newest.max(newest);
                items.iter().for_each(|item| self.count(item));
                vec![PullFrame::Batch(PullBatch { applied: newest, items })]
            }
            messages::PullFrame::End => {
                let Self { newest, bytes, chunks } = *self;
                vec![PullFrame::End(Ok(PullEnd { applied: newest, bytes, chunks }))]
            }
            messages::PullFrame::Failed => {
                let text = "the replica cannot be the source of a pull now";
                vec![PullFrame::End(Err(RequestError::new(ErrorCode::NotReady, group, text)))]
            }
        }
    }

    fn count(&mut self, item: &PullItem) {
        self.bytes += item.data_bytes();
        self.chunks += u64::from(matches!(item.content, PullContent::Bitmap { .. }));
    }
}

/// Collects the frames of a stream that the shard takes as one.
#[derive(Default)]
pub(super) struct Arriving {
    begin: Option<(PullBegin, Vec<PulledVolume>)>,
}

impl Arriving {
    /// The frame for the shard; `None` if more frames belong to it.
    pub(super) fn frame(&mut self, frame: PullFrame) -> Option<messages::PullFrame> {
        match frame {
            PullFrame::Begin(begin) => {
                let is_complete = begin.state_frames == 0;
                self.begin = Some((begin, Vec::new()));
                is_complete.then(|| self.begun())
            }
            PullFrame::State(more) => {
                let Some((begin, volumes)) = &mut self.begin else {
                    return Some(messages::PullFrame::Failed);
                };
                volumes.extend(more);
                begin.state_frames = begin.state_frames.saturating_sub(1);
                (begin.state_frames == 0).then(|| self.begun())
            }
            PullFrame::Batch(PullBatch { applied, items }) => {
                Some(messages::PullFrame::Batch { newest: applied, items })
            }
            PullFrame::End(Ok(_)) => Some(messages::PullFrame::End),
            PullFrame::End(Err(error)) => {
                tracing::info!(%error, "the source has ended a pull");
                Some(messages::PullFrame::Failed)
            }
        }
    }

    fn begun(&mut self) -> messages::PullFrame {
        let (begin, volumes) = self.begin.take().expect("the caller has looked at it");
        let PullBegin { applied, peer, conf, sends_everything, .. } = begin;
        let volumes = volumes.into_iter().map(|volume| volume.state).collect();
        messages::PullFrame::Begin { at: applied, source: peer, conf, volumes, sends_everything }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::PullChunk;
    use crate::state::VolumeState;
    use crate::types::{AttachEpoch, ChunkIndex, ConfState, Layer, Position, Term, VolumeId};

    /// What the shard of a source sends arrives at the shard of the target, in frames between.
    #[test]
    fn a_stream_arrives_as_it_was_sent() {
        let volume = |id| VolumeState {
            volume: VolumeId(id),
            parent: None,
            epoch: AttachEpoch(1),
            nonce: 0,
            window: None,
            dropped_layers: Vec::new(),
        };
        let item = |chunk, content| {
            let (volume, layer, chunk) = (VolumeId(1), Layer(0), ChunkIndex(chunk));
            PullItem { at: PullChunk { volume, layer, chunk }, content }
        };
        let batch = messages::PullFrame::Batch {
            newest: Index(9),
            items: vec![
                item(0, PullContent::Absent { chunks: 2 }),
                item(2, PullContent::Zeros { first: 5, blocks: 2 }),
                item(2, PullContent::Bitmap { bits: Box::new([1; 512]), is_last: true }),
            ],
        };
        for volumes in [0, 1, STATE_VOLUMES, STATE_VOLUMES + 1] {
            let begin = messages::PullFrame::Begin {
                at: Position { index: Index(7), term: Term(2) },
                source: PeerId(3),
                conf: ConfState { voters: vec![PeerId(3)], ..ConfState::default() },
                volumes: (1..=volumes as u32).map(volume).collect(),
                sends_everything: volumes % 2 == 0,
            };
            let stream = [begin, batch.clone(), messages::PullFrame::End];
            let (mut sent, mut arriving) = (Sent::default(), Arriving::default());
            let frames =
                stream.clone().into_iter().flat_map(|frame| sent.frames(GroupId(1), frame));
            let arrived: Vec<_> = frames.filter_map(|frame| arriving.frame(frame)).collect();
            assert_eq!(arrived, stream);
        }
    }
}
