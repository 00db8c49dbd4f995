//! What a server receives on a peer connection, decoded. `docs/format/volume-wire.md`, sections 9
//! and 11.

use super::error::WireError;
use super::frame::{Frame, FrameType, Received};
use super::messages::{Entries, Messages, decode_messages};
use super::pull::{PullOffer, PullPin, Pulled};
use crate::fields::{Put, Reader};
use crate::types::{GroupId, PeerId};

const GONE_BYTES: usize = 24;
/// Greatest number of peers in one frame; a sender has more frames.
const MAX_GONE: usize = 4096;

/// A peer has been removed from its group. It is a hint: the receiver reads the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The group.
    pub group: GroupId,
    /// The peer that is gone.
    pub peer: PeerId,
    /// The peer that it is sent to.
    pub to: PeerId,
}

/// A frame of another server.
#[derive(Clone, Debug, PartialEq)]
pub enum PeerFrame {
    /// Raft messages.
    Messages(Messages),
    /// Peers that are gone.
    Gone(Vec<Gone>),
    /// A pull is offered.
    PullOffer(PullOffer),
    /// Entries are to be kept in memory.
    PullPin(PullPin),
    /// A pull is complete.
    Pulled(Pulled),
}

impl PeerFrame {
    /// Decodes a frame, with the checksums of its blocks.
    ///
    /// # Errors
    /// A field is out of bounds, an op is not valid, or a block does not have its checksum.
    pub fn decode(frame: &Received, entries: Entries) -> Result<Self, WireError> {
        match frame.header.kind {
            FrameType::Raft | FrameType::Heartbeats | FrameType::HeartbeatResponses => {
                decode_messages(frame, entries).map(Self::Messages)
            }
            FrameType::Gone => decode_gone(frame).map(Self::Gone),
            FrameType::PullOffer => PullOffer::decode(&frame.meta).map(Self::PullOffer),
            FrameType::PullPin => PullPin::decode(&frame.meta).map(Self::PullPin),
            FrameType::Pulled => Pulled::decode(&frame.meta).map(Self::Pulled),
            other => Err(WireError::Type(other as u16)),
        }
    }
}

/// Builds the frames of peers that are gone.
pub fn encode_gone(gone: &[Gone]) -> impl Iterator<Item = Frame> {
    gone.chunks(MAX_GONE).map(|gone| {
        let mut frame = Frame::new(FrameType::Gone, 0);
        for Gone { group, peer, to } in gone {
            for field in [group.0, peer.0, to.0] {
                frame.meta().put_u64(field);
            }
        }
        frame
    })
}

fn decode_gone(frame: &Received) -> Result<Vec<Gone>, WireError> {
    let reader = &mut Reader::new(&frame.meta);
    let mut gone = Vec::with_capacity(reader.rest() / GONE_BYTES);
    while reader.rest() > 0 {
        let (group, peer, to) = (reader.u64()?, reader.u64()?, reader.u64()?);
        if group == 0 || peer == 0 || to == 0 {
            return Err(WireError::field("group or peer that is gone", group));
        }
        gone.push(Gone { group: GroupId(group), peer: PeerId(peer), to: PeerId(to) });
    }
    Ok(gone)
}
